// scores.cuh: the steps of the decode kernels on tensor cores between the copies and the result: products, the options of a score, softmax.
// A warp has 16 rows of a tile of keys. Element e of S[n] is row lane / 4 + 8 (e / 2), key 8 n + mma_column(lane, e) of the part
// (mma.m16n8k16). Row r of the seqlen_q * group rows that share a key head is head r % group of query r / group.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/common/general_scores.cuh"
#include "attention/decode/common/schedule.h"
#include "common/constants.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/widen.cuh"

namespace fa {
namespace {

constexpr float kRescaleThreshold = 8;  // an exponent of 2: see attention/forward/mma_sm80/kernel.cuh
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

struct ScoreOptions {
    float softcap;  // in the unit of the scores
    const float* alibi_slopes;
    int seqlen_q, group, window_left, window_right;
};
__device__ __forceinline__ ScoreOptions score_options_of(const DecodeParams& d) {
    const AttentionParams& p = d.attention;
    return {d.softcap_log2, p.alibi_slopes, p.seqlen_q, p.group, p.window_left, p.window_right};
}

struct NoChange {
    template <typename Scores>
    __device__ __forceinline__ void operator()(Scores&) const {}
};

// Applies softcap and ALiBi, then change(S); sets scores of keys that a row does not see to -inf. row_of(half): the thread's row. slopes():
// index of the key head's first ALiBi slope.
template <ScoreUnit kUnit = ScoreUnit::kLog2, int kTilesN, typename RowOf, typename Slopes, typename Change = NoChange>
__device__ __forceinline__ void score_options(const ScoreOptions& p, const VisibleKeys& keys, int key0, int lane, const RowOf& row_of,
                                              const Slopes& slopes, float (&S)[kTilesN][4], const Change& change = {}) {
    if (p.softcap != 0) {
        const float inverse = 1.0f / p.softcap;
#pragma unroll
        for (int n = 0; n < kTilesN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[n][e] = p.softcap * tanh_fast(S[n][e] * inverse);
    }
    if (p.alibi_slopes) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row_of(half), distance = r / p.group + keys.shift - key0 - mma_column(lane, 0);
            const float slope = p.alibi_slopes[slopes() + r % p.group] * (kUnit == ScoreUnit::kLog2 ? kLog2e : 1.0f);
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) S[n][2 * half + e] -= slope * fabsf(float(distance - 8 * n - e));
        }
    }
    change(S);
    // Keys that every row sees need no comparison.
    const int every_begin = p.window_left >= 0 ? max(p.seqlen_q - 1 + keys.shift - p.window_left, keys.begin) : keys.begin;
    const int every_end = p.window_right >= 0 ? min(keys.shift + p.window_right + 1, keys.end) : keys.end;
    if (key0 < every_begin || key0 + 8 * kTilesN > every_end) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int aligned = row_of(half) / p.group + keys.shift, first = key0 + mma_column(lane, 0);
            const int begin = (p.window_left >= 0 ? max(aligned - p.window_left, keys.begin) : keys.begin) - first;
            const int end = (p.window_right >= 0 ? min(aligned + p.window_right + 1, keys.end) : keys.end) - first;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < begin || 8 * n + e >= end) S[n][2 * half + e] = -INFINITY;
        }
    }
}

// S becomes P = 2^(S - row_max), of natural scores e^(S - row_max), as in attention/forward/mma_sm80/kernel.cuh; row_sum is this thread's
// share.
template <ScoreUnit kUnit = ScoreUnit::kLog2, int kTilesN, int kTilesV>
__device__ __forceinline__ void softmax_step(float (&S)[kTilesN][4], float (&O)[kTilesV][4], float (&row_max)[2], float (&row_sum)[2]) {
    constexpr float kThreshold = kUnit == ScoreUnit::kNatural ? kRescaleThreshold * kLn2 : kRescaleThreshold;
    float new_max[2];
    bool moved = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float x = fmaxf(S[0][2 * half], S[0][2 * half + 1]);
#pragma unroll
        for (int n = 1; n < kTilesN; ++n) x = fmaxf(x, fmaxf(S[n][2 * half], S[n][2 * half + 1]));
        new_max[half] = fmaxf(row_max[half], quad_max(x));
        moved |= new_max[half] - row_max[half] > kThreshold;
    }
    if (__any_sync(kFullWarp, moved)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float next = new_max[half] - row_max[half] > kThreshold ? new_max[half] : row_max[half];
            const float factor = exponential_of<kUnit>(row_max[half] - next);
            row_max[half] = next;
            row_sum[half] *= factor;
#pragma unroll
            for (int n = 0; n < kTilesV; ++n) O[n][2 * half] *= factor, O[n][2 * half + 1] *= factor;
        }
    }
#pragma unroll
    for (int n = 0; n < kTilesN; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            S[n][e] = exponential_of<kUnit>(S[n][e] - row_max[e / 2]);
            row_sum[e / 2] += S[n][e];
        }
}

// Converts fragments of rows of q from bf16 to fp16. A row is divided by the power of two below its largest magnitude, so that nothing
// overflows, and what underflows is below 2^-24 of that magnitude. The power goes into the row's scale. Rows from `rows` on are zeros.
template <int kSteps>
__device__ __forceinline__ void narrow_rows(uint32_t (&Q)[kSteps][4], float (&row_scale)[2], int rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (8 * half >= rows) break;
        float amax = 0, x[2];
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = half; i < 4; i += 2) {
                unpack_16<__nv_bfloat16>(x, Q[step][i]);
                amax = fmaxf(amax, fmaxf(fabsf(x[0]), fabsf(x[1])));
            }
        const uint32_t exponent = min(max(__float_as_uint(quad_max(amax)) >> 23, 1u), 253u);
        const float inverse = __uint_as_float((254 - exponent) << 23);
        row_scale[half] *= __uint_as_float(exponent << 23);
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int i = half; i < 4; i += 2) {
                unpack_16<__nv_bfloat16>(x, Q[step][i]);
                Q[step][i] = pack_16<__half>(x[0] * inverse, x[1] * inverse);
            }
    }
}

// Loads the rows of q, 16-bit values in shared memory, as A fragments. With 8-bit keys, which become fp16, a lane has columns 4 (lane % 4)
// .. + 3 of a step, the order in which widen_neighbours gives those of K.
template <bool kBytes, typename TileQ, int kSteps>
__device__ __forceinline__ void load_query(uint32_t (&Q)[kSteps][4], uint32_t q_tile, int lane) {
    if constexpr (kBytes) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t at = q_tile + TileQ::offset(lane / 4 + 8 * half, 2 * step + lane % 4 / 2) + lane % 2 * 8;
                Q[step][half] = load_shared_4(at), Q[step][2 + half] = load_shared_4(at + 4);
            }
    } else {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) ldmatrix_x4(Q[step], TileQ::advance(q_tile + TileQ::offset(lane % 16, lane / 16), step));
    }
}

// S += Q K^T. at(step, i) is this lane's address for ldmatrix: keys from 8 i on, pieces 2 step and 2 step + 1 of a row.
template <typename E, typename Mma, int kSteps, int kTilesN, typename At>
__device__ __forceinline__ void multiply_keys(float (&S)[kTilesN][4], const uint32_t (&Q)[kSteps][4], const At& at) {
    constexpr bool kBytes = sizeof(E) == 1;
#pragma unroll
    for (int step = 0; step < kSteps; step += kBytes ? 2 : 1) {
#pragma unroll
        for (int i = 0; i < kTilesN; i += 2) {
            uint32_t B[4];
            ldmatrix_x4(B, at(kBytes ? step / 2 : step, i));
            if constexpr (kBytes) {
#pragma unroll
                for (int x = 0; x < 4; ++x) {
                    uint32_t wide[2];
                    widen_neighbours<E>(wide, B[x]);
                    mma<Mma>(S[i + x / 2], Q[step + x % 2], wide[0], wide[1]);
                }
            } else {
                mma<Mma>(S[i], Q[step], B[0], B[1]);
                mma<Mma>(S[i + 1], Q[step], B[2], B[3]);
            }
        }
    }
}

// 8-bit keys whose factors differ: multiplies S by the factors of its keys, which are floats at `scales`.
template <int kTilesN>
__device__ __forceinline__ void scale_keys(float (&S)[kTilesN][4], uint32_t scales, int lane) {
#pragma unroll
    for (int i = 0; i < kTilesN; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const float scale = __uint_as_float(load_shared_4(scales + 4 * (8 * i + mma_column(lane, e))));
            S[i][e] *= scale, S[i][2 + e] *= scale;
        }
}

// 8-bit values: O is in units of v_unit. If the largest factor of a part is larger, it becomes the unit.
template <int kTilesV>
__device__ __forceinline__ void raise_unit(float largest, float& v_unit, float (&O)[kTilesV][4]) {
    largest = quad_max(largest);
    if (largest > v_unit) {  // the same in all lanes: every quad covers all keys of the part
        const float factor = v_unit / largest;
#pragma unroll
        for (int n = 0; n < kTilesV; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) O[n][e] *= factor;
        v_unit = largest;
    }
}

// 8-bit values whose factors differ: multiplies P by the factors of its keys, floats at `scales`, in O's unit.
template <int kTilesN, int kTilesV>
__device__ __forceinline__ void scale_values(float (&P)[kTilesN][4], uint32_t scales, int lane, float& v_unit, float (&O)[kTilesV][4]) {
    float v_scale[kTilesN][2], largest = 0;
#pragma unroll
    for (int i = 0; i < kTilesN; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            v_scale[i][e] = __uint_as_float(load_shared_4(scales + 4 * (8 * i + mma_column(lane, e))));
            largest = fmaxf(largest, v_scale[i][e]);
        }
    raise_unit(largest, v_unit, O);
    const float inverse = 1.0f / v_unit;
#pragma unroll
    for (int i = 0; i < kTilesN; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) P[i][e] *= v_scale[i][e % 2] * inverse;
}

struct KeepAll {
    __device__ __forceinline__ uint32_t operator()(uint32_t values, int) const { return values; }
};

// O += P V. at(step, i) is this lane's address for ldmatrix: keys from 16 step on, pieces 2 i and 2 i + 1 of a row. With 8-bit values,
// tiles 2 j and 2 j + 1 of O have the even and the odd columns of 16. keep(values, n) gives the two values of this thread's keys in tile n
// of P, or zeros in their place.
template <typename E, typename Mma, int kTilesN, int kTilesV, typename At, typename Keep = KeepAll>
__device__ __forceinline__ void add_values(float (&O)[kTilesV][4], const float (&P)[kTilesN][4], const At& at, const Keep& keep = {}) {
    constexpr bool kBytes = sizeof(E) == 1;
#pragma unroll
    for (int step = 0; step < kTilesN / 2; ++step) {
        uint32_t A[4];
        fragment_of<Mma>(A, &P[2 * step]);
#pragma unroll
        for (int n = 0; n < kTilesV; n += kBytes ? 4 : 2) {
            if constexpr (kBytes) {
                uint32_t B[4];
                ldmatrix_x4_trans(B, at(step, n / 4));
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    uint32_t even[2], odd[2];
                    widen_even_odd<E>(even[0], odd[0], B[2 * x]);
                    widen_even_odd<E>(even[1], odd[1], B[2 * x + 1]);
                    mma<Mma>(O[n + 2 * x], A, even[0], even[1]);
                    mma<Mma>(O[n + 2 * x + 1], A, odd[0], odd[1]);
                }
            } else {
                uint32_t B[2][2];
                ldmatrix_x4_trans(B, at(step, n / 2));
                mma<Mma>(O[n], A, keep(B[0][0], 2 * step), keep(B[0][1], 2 * step + 1));
                mma<Mma>(O[n + 1], A, keep(B[1][0], 2 * step), keep(B[1][1], 2 * step + 1));
            }
        }
    }
}

// The index in shared memory of four neighbouring columns of a row of O. The swizzle spreads the rows of a store over the banks.
template <int kD>
__device__ __forceinline__ int o_place(int row, int column) {
    return row * kD + (column ^ row % 4 * 8);
}
// Stores tiles n and n + 1 of one half of a warp's rows as row `row` of `to`.
template <typename E, int kTilesV>
__device__ __forceinline__ void put_o(float* to, int row, int n, int half, int lane, const float (&O)[kTilesV][4], float unit) {
    constexpr int kD = 8 * kTilesV;
    const int x = 2 * half;
    if constexpr (sizeof(E) == 1) {  // two tiles hold the even and the odd columns of 16
        *reinterpret_cast<float4*>(to + o_place<kD>(row, 8 * n + 4 * (lane % 4))) =
            make_float4(O[n][x] * unit, O[n + 1][x] * unit, O[n][x + 1] * unit, O[n + 1][x + 1] * unit);
    } else {
        *reinterpret_cast<float2*>(to + o_place<kD>(row, 8 * n + 2 * (lane % 4))) = make_float2(O[n][x], O[n][x + 1]);
        *reinterpret_cast<float2*>(to + o_place<kD>(row, 8 * n + 8 + 2 * (lane % 4))) = make_float2(O[n + 1][x], O[n + 1][x + 1]);
    }
}

// Packs four neighbouring columns of a row of out: fp16 (`half`) or bf16.
__device__ __forceinline__ uint2 pack_row(float4 x, bool half) {
    return half ? make_uint2(pack_16<__half>(x.x, x.y), pack_16<__half>(x.z, x.w))
                : make_uint2(pack_16<__nv_bfloat16>(x.x, x.y), pack_16<__nv_bfloat16>(x.z, x.w));
}

}  // namespace
}  // namespace fa
