// wgmma_sm90/positions.cuh: ALiBi by the tensor cores. Beside the diagonal the distance from a row to a key is a number of the row plus or
// minus the key's place in its tile. slope times that place is a product, too: of one more step of 16 columns in Q K^T,
//
//     Q   (high, middle, low, 0 ..)      the slope in the unit of q . k, in three parts of 8 or 11 bits; the same in every row
//     K   (place, place, place, 0 ..)    0 .. block_n - 1, which 16 bits hold exactly; the same in every tile
//
// so the exponentials have no operation more than without ALiBi. The row's number goes to the maximum that they subtract. Tiles on the
// diagonal take a step of zeros.
#pragma once

#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "device/wgmma.cuh"

namespace fa {

static_assert(sizeof(uint16_t) * 16 == 32, "a row of a step, in the 32-byte swizzle");

// Called by all threads of the block before they take their roles; a barrier of the block follows.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void write_positions(WgmmaSmem<T, kId>& smem) {
    constexpr int kBlockN = kWgmmaPlan<kId>.block_n;
    static_assert(kBlockN <= 256, "bfloat16 has whole numbers to 256");
    char* const tile = reinterpret_cast<char*>(smem.positions.tile);
    for (int i = threadIdx.x; i < kBlockN * 2; i += blockDim.x) {
        const int row = i / 2, piece = i % 2;
        const uint32_t two = pack_16<T>(float(row), float(row)), one = pack_16<T>(float(row), 0.0f);
        *reinterpret_cast<uint4*>(tile + narrow_swizzled_offset(row, piece)) =
            piece == 0 ? make_uint4(two, one, 0, 0) : make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
}

// A lane's share of the slope as A operand: columns 2 quad and 2 quad + 1 of rows g and g + 8.
template <typename T>
__device__ __forceinline__ uint32_t slope_fragment(float slope, int quad) {
    const float high = to_float(T(slope)), middle = to_float(T(slope - high)), low = slope - high - middle;
    return quad == 0 ? pack_16<T>(high, middle) : quad == 1 ? pack_16<T>(low, 0.0f) : 0;
}

// S = Q K^T + slope x place
template <typename T, WgmmaPlanId kId, int kScores>
__device__ __forceinline__ void multiply_qk_and_positions(float (&S)[kScores], uint32_t slope, uint64_t desc_q, uint64_t desc_k,
                                                          uint64_t desc_positions) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n;
    const uint32_t fragment[4] = {slope, slope, 0, 0};
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPlan.headdim / 16; ++i)
        wgmma_ss<T, kBlockN>(S, desc_q + descriptor_k_step(i, 64), desc_k + descriptor_k_step(i, kBlockN), i != 0);
    wgmma_rs<T, kBlockN, 0>(S, fragment, desc_positions, 1);
    wgmma_commit();
}

}  // namespace fa
