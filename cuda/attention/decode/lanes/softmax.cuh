// lanes/softmax.cuh: the work of a warp of lanes/kernel.cuh on a group of keys: scores, softmax, and the sums of P V; and how lanes with
// the same columns add up their sums.
#pragma once

#include "attention/common/general_scores.cuh"
#include "attention/decode/lanes/rows.cuh"
#include "common/constants.h"
#include "common/element.cuh"
#include "device/mma.cuh"
#include "device/widen.cuh"

#include <cfloat>
#include <climits>
#include <type_traits>

namespace fa {
namespace {

template <typename E>
__device__ __forceinline__ void widen_16_bytes(float (&to)[16 / sizeof(E)], uint4 bits) {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if constexpr (sizeof(E) == 4) {
            to[w] = __uint_as_float(word[w]);
        } else if constexpr (sizeof(E) == 2) {
            unpack_16<E>(reinterpret_cast<float(&)[2]>(to[2 * w]), word[w]);
        } else {
            uint32_t wide[2];
            widen_neighbours<E>(wide, word[w]);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) unpack_16<__half>(reinterpret_cast<float(&)[2]>(to[4 * w + 2 * pair]), wide[pair]);
        }
    }
}

// A group of keys: 16 bytes of each key in each part of the lane's columns.
template <typename Plan>
using LaneKeyBits = uint4[Plan::kAtOnce][Plan::kParts];
template <typename Plan>
using LaneScores = float[Plan::kAtOnce][Plan::kRows];

// K or V of a group from shared memory. whole: all passes; else only the first one, and zeros for the others.
template <typename Plan>
__device__ __forceinline__ void load_bits(LaneKeyBits<Plan>& bits, uint32_t at, uint32_t part_step, bool whole) {
#pragma unroll
    for (int i = 0; i < Plan::kAtOnce; ++i)
#pragma unroll
        for (int x = 0; x < Plan::kParts; ++x) {
            bits[i][x] = make_uint4(0, 0, 0, 0);
            if (!whole && i > 0) continue;
            const float4 four = load_shared_16(at + (i * 2 * Plan::kParts + x) * part_step);
            bits[i][x] = make_uint4(__float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z), __float_as_uint(four.w));
        }
}

// A lane's columns of this warp's rows of q.
template <typename Plan>
struct LaneQuery {
    float held[Plan::kQueryInRegisters ? Plan::kParts : 1][Plan::kRows][Plan::kVec];

    __device__ __forceinline__ void load(float (&to)[Plan::kRows][Plan::kVec], const LanePlace<Plan>& place, const float* q_tile,
                                         int part) {
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j)
#pragma unroll
            for (int c = 0; c < Plan::kVec; c += 4) {
                const float* const from = q_tile + (place.tile_row + j) * Plan::kD + place.column + part * Plan::kPartColumns + c;
                const float4 four = load_shared_16(shared_address(from));
                to[j][c] = four.x, to[j][c + 1] = four.y, to[j][c + 2] = four.z, to[j][c + 3] = four.w;
            }
    }
    __device__ __forceinline__ void hold(const LanePlace<Plan>& place, const float* q_tile) {
        if constexpr (Plan::kQueryInRegisters) {
#pragma unroll
            for (int part = 0; part < Plan::kParts; ++part) load(held[part], place, q_tile, part);
        }
    }
};

// S = Q K^T of a group; all lanes of a key get the result.
template <typename Plan>
__device__ __forceinline__ void multiply_keys(LaneScores<Plan>& S, LaneQuery<Plan>& Q, const LaneKeyBits<Plan>& K,
                                              const LanePlace<Plan>& place, const float* q_tile) {
#pragma unroll
    for (int x = 0; x < Plan::kParts; ++x) {
        if constexpr (!Plan::kQueryInRegisters) Q.load(Q.held[0], place, q_tile, x);
        const auto& q = Q.held[Plan::kQueryInRegisters ? x : 0];
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i) {
            float part[Plan::kVec];
            widen_16_bytes<typename Plan::E>(part, K[i][x]);
#pragma unroll
            for (int j = 0; j < Plan::kRows; ++j) {
                float sum = x ? S[i][j] : 0;
#pragma unroll
                for (int c = 0; c < Plan::kVec; ++c) sum += q[j][c] * part[c];
                S[i][j] = sum;
            }
        }
    }
#pragma unroll
    for (int offset = Plan::kLanes / 2; offset; offset /= 2)
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i)
#pragma unroll
            for (int j = 0; j < Plan::kRows; ++j) S[i][j] += __shfl_xor_sync(~0u, S[i][j], offset);
}

// Applies softcap and ALiBi, unless scores are natural (lanes/options.cuh); sets scores of keys that a row does not see to -inf. key0 is
// this lane's key in the first pass; keys from `end` on do not exist.
template <typename Plan>
__device__ __forceinline__ void lane_score_options(LaneScores<Plan>& S, const LaneParams& p, const LanePlace<Plan>& place,
                                                   const LaneUnit& unit, int shift, int key0, int end) {
    // i_aligned of row j, computed where it is used
    const auto aligned = [&](int j) { return lane_query(p, unit.row0 + opaque(place.tile_row) + j) + shift; };
    if (!Plan::kNatural && p.softcap_log2 != 0) {
        const float inverse = std::is_same_v<typename Plan::T, float> ? 1.0f / p.softcap_log2 : __fdividef(1.0f, p.softcap_log2);
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i)
#pragma unroll
            for (int j = 0; j < Plan::kRows; ++j) {  // exact for float32, as in transform_products
                const float x = S[i][j] * inverse;
                S[i][j] = p.softcap_log2 * (std::is_same_v<typename Plan::T, float> ? tanhf(x) : tanh_fast(x));
            }
    }
    if (!Plan::kNatural && p.alibi_slopes) {
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j) {
            const int r = min(unit.row0 + place.tile_row + j, p.rows - 1), head = lane_head(p, unit.head_k, r, lane_query(p, r));
            const float slope = p.alibi_slopes[unit.b * p.alibi_batch + head] * kLog2e;
#pragma unroll
            for (int i = 0; i < Plan::kAtOnce; ++i) S[i][j] -= slope * fabsf(float(aligned(j) - key0 - i * place.key_step));
        }
    }
#pragma unroll
    for (int i = 0; i < Plan::kAtOnce; ++i)
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j)
            if (key0 + i * place.key_step >= end) S[i][j] = -INFINITY;
    if (p.seqlen_q > 1 && (p.window_left >= 0 || p.window_right >= 0)) {
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j) {
            const int first = p.window_left < 0 ? INT_MIN : aligned(j) - p.window_left;
            const int last = p.window_right < 0 ? INT_MAX : aligned(j) + p.window_right;
#pragma unroll
            for (int i = 0; i < Plan::kAtOnce; ++i)
                if (key0 + i * place.key_step < first || key0 + i * place.key_step > last) S[i][j] = -INFINITY;
        }
    }
}

// This lane's share of the results of the warp's rows.
template <typename Plan>
struct LaneSums {
    float O[Plan::kRows][Plan::kDims], row_max[Plan::kRows], row_sum[Plan::kRows];

    __device__ __forceinline__ LaneSums() : O{} {
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j) row_max[j] = -FLT_MAX, row_sum[j] = 0;
    }
    // S becomes P = 2^(S - row_max).
    __device__ __forceinline__ void softmax(LaneScores<Plan>& S) {
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j) {
            float next = row_max[j];
#pragma unroll
            for (int i = 0; i < Plan::kAtOnce; ++i) next = fmaxf(next, S[i][j]);
            const float factor = exponential_of<Plan::kUnit>(row_max[j] - next);
            row_max[j] = next, row_sum[j] *= factor;
            if (__any_sync(~0u, factor != 1)) {
#pragma unroll
                for (int c = 0; c < Plan::kDims; ++c) O[j][c] *= factor;
            }
#pragma unroll
            for (int i = 0; i < Plan::kAtOnce; ++i) row_sum[j] += S[i][j] = exponential_of<Plan::kUnit>(S[i][j] - next);
        }
    }
    // O += P V
    __device__ __forceinline__ void add_values(const LaneScores<Plan>& P, const LaneKeyBits<Plan>& V) {
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i)
#pragma unroll
            for (int x = 0; x < Plan::kParts; ++x) {
                float part[Plan::kVec];
                widen_16_bytes<typename Plan::E>(part, V[i][x]);
#pragma unroll
                for (int c = 0; c < Plan::kVec; ++c)
#pragma unroll
                    for (int j = 0; j < Plan::kRows; ++j) O[j][x * Plan::kVec + c] += P[i][j] * part[c];
            }
    }
    // Adds up the shares of the lanes with the same columns. O of the warp, times `unit`, goes to o_tile (warp, row, column); the maximum
    // and the sum of row j go to stat_of[j].
    __device__ __forceinline__ void store(const LanePlace<Plan>& place, float* o_tile, float2* stat_of, float unit = 1) {
#pragma unroll
        for (int j = 0; j < Plan::kRows; ++j) {
            float max = row_max[j];
#pragma unroll
            for (int offset = Plan::kLanes; offset < 32; offset *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
            const float factor = exponential_of<Plan::kUnit>(row_max[j] - max);
            row_sum[j] *= factor;
#pragma unroll
            for (int c = 0; c < Plan::kDims; ++c) O[j][c] *= factor * unit;
#pragma unroll
            for (int offset = Plan::kLanes; offset < 32; offset *= 2) {
                row_sum[j] += __shfl_xor_sync(~0u, row_sum[j], offset);
#pragma unroll
                for (int c = 0; c < Plan::kDims; ++c) O[j][c] += __shfl_xor_sync(~0u, O[j][c], offset);
            }
            if (place.lane == 0) stat_of[j] = make_float2(max, row_sum[j]);
            if (place.lane < Plan::kLanes)
#pragma unroll
                for (int x = 0; x < Plan::kDims; x += 4) {
                    const int c = place.column + x / Plan::kVec * Plan::kPartColumns + x % Plan::kVec;
                    *reinterpret_cast<float4*>(o_tile + (place.warp * Plan::kRows + j) * Plan::kD + c) =
                        make_float4(O[j][x], O[j][x + 1], O[j][x + 2], O[j][x + 3]);
                }
        }
    }
};

// Four columns of a row, summed over several sources.
struct LaneResult {
    float4 o;
    float row_max, row_sum;
};
// Eight lanes sum four columns of a row over `count` sources: stat(i) is the maximum and the sum of source i, o(i) points at its O.
template <ScoreUnit kUnit = ScoreUnit::kLog2, typename Stat, typename O>
__device__ __forceinline__ LaneResult gather_results(int lane, int count, const Stat& stat, const O& o) {
    LaneResult all{make_float4(0, 0, 0, 0), -FLT_MAX, 0};
    float4& sum = all.o;
#pragma unroll 1
    for (int i = lane / 4; i < count; i += 8) {
        const float2 s = stat(i);
        const float4 x = *reinterpret_cast<const float4*>(o(i));
        const float next = fmaxf(all.row_max, s.x), factor = exponential_of<kUnit>(all.row_max - next),
                    weight = exponential_of<kUnit>(s.x - next);
        all.row_max = next, all.row_sum = all.row_sum * factor + weight * s.y;
        sum.x = sum.x * factor + weight * x.x, sum.y = sum.y * factor + weight * x.y;
        sum.z = sum.z * factor + weight * x.z, sum.w = sum.w * factor + weight * x.w;
    }
    float max = all.row_max;
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, offset));
    const float factor = exponential_of<kUnit>(all.row_max - max);
    all.row_max = max, all.row_sum *= factor, sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
        all.row_sum += __shfl_xor_sync(~0u, all.row_sum, offset);
        sum.x += __shfl_xor_sync(~0u, sum.x, offset), sum.y += __shfl_xor_sync(~0u, sum.y, offset);
        sum.z += __shfl_xor_sync(~0u, sum.z, offset), sum.w += __shfl_xor_sync(~0u, sum.w, offset);
    }
    return all;
}

}  // namespace
}  // namespace fa
