// w4_in_order.cuh: packed 4-bit weights (w4.h) as operand A with their columns in natural order, so that the other operand need not be
// permuted. New against w4.cuh; costs a third more instructions and four times the reads of shared memory.
//
// Step s of a tile takes columns 16 s .. 16 s + 15, of which a lane holds 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. These are one pair of columns
// from each of words q / 2 and 2 + q / 2 of lane 4 g + s. The pair is in registers 0 and 1 of the words where q is even, in registers 2
// and 3 where q is odd. The two cases differ only in masks and factors.
#pragma once

#include "device/ptx.cuh"
#include "transformer/w4/common/w4.cuh"

namespace fa::w4 {

template <Format kFormat, typename T>
class InOrder {
    static constexpr bool kHalf = std::is_same_v<T, __half>;
    static constexpr uint32_t kMask = kHalf ? 0x8E008E00u : 0x81C081C0u;
    uint32_t mask_[2], factor_[2], shift_;  // [0]: for row g, [1]: for row g + 8
    int codes_, scales_;                    // bytes from the start of a tile
    bool upper_;

public:
    __device__ __forceinline__ explicit InOrder(int lane) {
        const int g = lane / 4, q = lane % 4;
        const bool second = q % 2;
        upper_ = q / 2;
        codes_ = 64 * g, scales_ = kTileCodes + (kFormat == Format::kNvfp4 ? 8 : 4) * g;
        if constexpr (kFormat == Format::kInt4) {
            shift_ = second ? 8 : 0;
        } else {
            mask_[0] = !second ? kMask : kHalf ? 0x40384038u : 0x40074007u, factor_[0] = second ? 66 : 1;
            mask_[1] = !second ? kMask >> 3 : kHalf ? 0x20072007u : 0x2E002E00u;
            factor_[1] = !second ? 8 : kHalf ? 516 : 4, shift_ = second ? 3 : 31;
            // Opaque, so that they stay in registers: otherwise the compiler would select them again in every step.
            mask_[0] = opaque(mask_[0]), mask_[1] = opaque(mask_[1]), factor_[0] = opaque(factor_[0]), factor_[1] = opaque(factor_[1]);
        }
    }

    // The stored scales for all steps of a tile.
    __device__ __forceinline__ uint2 load_scales(const uint8_t* tile) const {
        if constexpr (kFormat == Format::kNvfp4) return *reinterpret_cast<const uint2*>(tile + scales_);
        return make_uint2(*reinterpret_cast<const uint32_t*>(tile + scales_), 0);
    }
    __device__ __forceinline__ uint4 load_codes(const uint8_t* tile, int step) const {
        return *reinterpret_cast<const uint4*>(tile + codes_ + 16 * step);
    }

    // The scales for one step. mxfp4 has one for steps 0 and 1 and one for steps 2 and 3, int4 one for all steps.
    __device__ __forceinline__ void widen_scales(uint32_t (&scale)[2], uint2 stored, int step) const {
        if constexpr (kFormat == Format::kNvfp4) {
            const uint32_t two = step < 2 ? stored.x : stored.y;
            w4::widen_scales<kFormat, T>(scale, step % 2 ? two >> 16 : two & 0xFFFFu);
        } else if constexpr (kFormat == Format::kMxfp4) {
            w4::widen_scales<kFormat, T>(scale, step < 2 ? stored.x & 0xFFFFu : stored.x >> 16);
        } else {
            w4::widen_scales<kFormat, T>(scale, stored.x);
        }
    }

    __device__ __forceinline__ void dequantize(uint32_t (&a)[4], uint4 codes, const uint32_t (&scale)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint32_t word = half ? (upper_ ? codes.w : codes.z) : upper_ ? codes.y : codes.x;
            uint32_t* const to = a + 2 * half;
            if constexpr (kFormat == Format::kInt4) {
                uint32_t four[4];
                unpack_word<kFormat, T>(four, word >> shift_);
                to[0] = four[0], to[1] = four[1];
            } else {
                const uint32_t other = word & mask_[1];
                to[0] = (word & mask_[0]) * factor_[0] & kMask;
                to[1] = (kHalf ? other * factor_[1] : other * factor_[1] + (other >> shift_)) & kMask;
            }
            to[0] = as_bits(__hmul2(as_pair<T>(to[0]), as_pair<T>(scale[0])));
            to[1] = as_bits(__hmul2(as_pair<T>(to[1]), as_pair<T>(scale[1])));
        }
    }
};

}  // namespace fa::w4
