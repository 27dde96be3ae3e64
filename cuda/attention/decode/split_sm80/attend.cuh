// split_sm80/attend.cuh: the work of a warp of decode_split_sm80 on a part of the keys, and how the warps add up their results.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/decode/common/read_scores.cuh"
#include "attention/decode/split_sm80/loads.cuh"

#include <cfloat>

namespace fa {
namespace {

// The warp's 16 rows; this thread has two of them.
template <typename Plan>
struct SplitRows {
    static constexpr bool kBytes = Plan::kBytes;
    static constexpr int kTilesN = Plan::kTilesN, kTilesV = Plan::kTilesV, kStepsD = Plan::kStepsD, kPitch = Plan::Tile::kPitch;
    using E = typename Plan::E;
    using Mma = typename Plan::Mma;
    using Tile = typename Plan::Tile;
    using TileQ = typename Plan::TileQ;

    uint32_t Q[Plan::kQueryInRegisters ? kStepsD : 1][4];
    float row_scale[2];  // turns q . k into a score: an exponent of 2, or a natural one
    float O[kTilesV][4] = {};
    float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // max: exponents of 2; sum: this thread's share
    float v_unit = 1e-30f;                                         // bytes: O is in units of the largest factor of V so far

    // Loads step `step` of the rows of q as A operand. With 8-bit keys a lane has columns 4 (lane % 4) .. + 3, as widen_neighbours gives
    // those of K.
    __device__ __forceinline__ static void load_query(uint32_t (&A)[4], const SplitPlace<Plan>& place, int step) {
        const int lane = place.lane;
        if constexpr (kBytes) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = place.warp_row() + lane / 4 + 8 * half;
                const uint32_t at = place.q_tile() + TileQ::offset(row, 2 * step + lane % 4 / 2) + lane % 2 * 8;
                A[half] = load_shared_4(at), A[2 + half] = load_shared_4(at + 4);
            }
        } else {
            ldmatrix_x4(A, TileQ::advance(place.q_tile() + TileQ::offset(place.warp_row() + lane % 16, lane / 16), step));
        }
    }

    // Called by the whole block once the rows of q are in shared memory.
    __device__ __forceinline__ void prepare(const DecodeParams& d, const SplitPlace<Plan>& place, float* row_factor) {
        const bool narrows = kBytes && d.attention.dtype == DType::kBFloat16;
        if (narrows) {
            narrow_rows<Plan::kRows, Plan::kD>(place.q_tile(), row_factor);
            __syncthreads();
        }
        if (Plan::kQueryInRegisters) {
#pragma unroll
            for (int step = 0; step < kStepsD; ++step) load_query(Q[step], place, step);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            row_scale[half] = Plan::kGeneral ? d.attention.scale : d.scale_log2;
            if (narrows) row_scale[half] *= row_factor[place.warp_row() + place.lane / 4 + 8 * half];
        }
    }

    // S = Q K^T of a part.
    __device__ __forceinline__ void multiply_part(float (&S)[kTilesN][4], const SplitPlace<Plan>& place, uint32_t k_lane) {
#pragma unroll
        for (int step = 0; step < kStepsD; step += kBytes ? 2 : 1) {
            if (!Plan::kQueryInRegisters) load_query(Q[0], place, step);
            uint32_t next[4];
            if (!Plan::kQueryInRegisters && kBytes) load_query(next, place, step + 1);
            const auto& A = Q[Plan::kQueryInRegisters ? step : 0];
            const auto& A1 = Plan::kQueryInRegisters && kBytes ? Q[step + 1] : next;
#pragma unroll
            for (int n = 0; n < kTilesN; n += 2) {
                uint32_t B[4];
                ldmatrix_x4(B, Tile::advance(k_lane, kBytes ? step / 2 : step) + 8 * n * kPitch);
                if constexpr (kBytes) {
#pragma unroll
                    for (int x = 0; x < 4; ++x) {
                        uint32_t wide[2];
                        widen_neighbours<E>(wide, B[x]);
                        mma<Mma>(S[n + x / 2], x % 2 ? A1 : A, wide[0], wide[1]);
                    }
                } else {
                    mma<Mma>(S[n], A, B[0], B[1]);
                    mma<Mma>(S[n + 1], A, B[2], B[3]);
                }
            }
        }
    }

    // S = Q K^T, P = 2^(S - row_max), O += P V for the keys of a part, from key0 on.
    __device__ __forceinline__ void attend(const DecodeParams& d, const SplitPlace<Plan>& place, const SplitWorkAt<Plan>& work, int key0,
                                           uint32_t part, uint32_t scales) {
        const AttentionParams& p = d.attention;
        const int lane = Plan::kRegistersFull && !Plan::kSharedParts ? opaque(place.lane) : place.lane;
        const uint32_t k_lane = part + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        const uint32_t v_lane = part + Plan::kPartKeys * kPitch + Tile::offset(lane % 16, lane / 16);
        const auto row_of = [&](int half) {
            return min(work.row_tile0() + place.warp_row() + opaque(place.lane) / 4 + 8 * half, p.seqlen_q * p.group - 1);
        };
        float S[kTilesN][4] = {}, addends[Plan::kGeneral ? kTilesN : 1][4];
        const auto find_addends = [&] {
            if constexpr (Plan::kGeneral)
                load_addends<E, Plan::kRegistersFull ? 1 : 2>(d, work.b(), work.head_k(), key0, work.keys().end - 1, opaque(place.lane),
                                                              row_of, addends);
        };
        if (!Plan::kRegistersFull) find_addends();  // before the products, which hide the latency of these loads
        multiply_part(S, place, k_lane);
#pragma unroll
        for (int n = 0; n < kTilesN; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) S[n][e] = Plan::kGeneral ? __fmul_rn(S[n][e], row_scale[e / 2]) : S[n][e] * row_scale[e / 2];
        float v_scale[kBytes ? kTilesN : 1][2];
        if (kBytes) {
            float largest = 0;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const uint32_t at = scales + 4 * (8 * n + mma_column(place.lane, e));
                    const float k_scale = __uint_as_float(load_shared_4(at));
                    v_scale[n][e] = __uint_as_float(load_shared_4(at + 4 * Plan::kPartKeys));
                    largest = fmaxf(largest, v_scale[n][e]);
                    S[n][e] *= k_scale, S[n][2 + e] *= k_scale;
                }
            raise_unit(largest, v_unit, O);
        }
        const auto slopes = [&] { return work.b() * p.alibi_batch + work.head_k() * p.group; };
        if constexpr (Plan::kGeneral) {
            score_options<ScoreUnit::kNatural>(natural_options_of(d), work.keys(), key0, place.lane, row_of, slopes, S, [&](auto& scores) {
                if (Plan::kRegistersFull) find_addends();
                add_addends(scores, addends);
            });
            const SeenKeys<kTilesN> seen(S, opaque(place.lane));
            softmax_step<ScoreUnit::kNatural>(S, O, row_max, row_sum);
            if (p.dropout_threshold) drop_scores(d, work.b(), work.head_k(), key0, opaque(place.lane), row_of, S);
            add_values<E, Mma>(O, S, [&](int step, int i) { return Tile::advance(v_lane, i) + 16 * step * kPitch; }, seen);
            return;
        }
        score_options(score_options_of(d), work.keys(), key0, place.lane, row_of, slopes, S);
        softmax_step(S, O, row_max, row_sum);
        if (kBytes) {
            const float inverse = 1.0f / v_unit;
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[n][e] *= v_scale[n][e % 2] * inverse;
        }
        add_values<E, Mma>(O, S, [&](int step, int i) { return Tile::advance(v_lane, i) + 16 * step * kPitch; });
    }
};

// The maxima and sums of each warp's rows, for the other warps.
struct SplitStats {
    float row_max[kDecodeWarps][16], row_sum[kDecodeWarps][16];
};

// Stores a warp's O to its part of stage 0, and its row_max and row_sum to `stats`.
template <typename Plan>
__device__ __forceinline__ void leave_results(const SplitRows<Plan>& rows, const SplitPlace<Plan>& place, unsigned char* stage0,
                                              SplitStats& stats) {
    // opaque: the places of O are computed here, and not held in registers through the loop
    const int lane = Plan::kGeneral ? opaque(place.lane) : place.lane, warp = place.warp;
    float* const own = reinterpret_cast<float*>(stage0 + warp * Plan::kPartBytes);
    const float unit = Plan::kBytes ? rows.v_unit : 1.0f;
#pragma unroll
    for (int n = 0; n < Plan::kTilesV; n += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half) put_o<typename Plan::E>(own, lane / 4 + 8 * half, n, half, lane, rows.O, unit);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(rows.row_sum[half]);
        if (lane % 4 == 0) stats.row_max[warp][lane / 4 + 8 * half] = rows.row_max[half], stats.row_sum[warp][lane / 4 + 8 * half] = sum;
    }
    if (Plan::kSharedParts) __syncwarp();
    else __syncthreads();
}

// Adds up the results of all warps that have keys of a row, and stores them: to out, with lse; or, if the segment is not the whole unit, to
// its slot in the workspace.
template <typename Plan>
__device__ __forceinline__ void store_results(const DecodeParams& d, const SplitPlace<Plan>& place, const Segment& segment,
                                              const unsigned char* stage0, const SplitStats& stats) {
    constexpr int kD = Plan::kD, kSources = Plan::kSources, kThreadsPerRow = 32 * kSources / 16;
    constexpr bool kNatural = Plan::kUnit == ScoreUnit::kNatural;
    const AttentionParams& p = d.attention;
    const int thread = Plan::kSharedParts ? place.lane : int(threadIdx.x), source0 = Plan::kSharedParts ? place.warp : 0;
    const int row = thread / kThreadsPerRow, tile_row = place.warp_row() + row;
    const int r = segment.unit % d.shape.row_tiles * Plan::kRows + tile_row;
    if (r >= p.seqlen_q * p.group) return;
    float row_max = -FLT_MAX, row_sum = 0, weight[kSources];
#pragma unroll
    for (int x = 0; x < kSources; ++x) row_max = fmaxf(row_max, stats.row_max[source0 + x][row]);
#pragma unroll
    for (int x = 0; x < kSources; ++x) {
        weight[x] = exp2_approx((stats.row_max[source0 + x][row] - row_max) * (kNatural ? kLog2e : 1.0f));
        row_sum += weight[x] * stats.row_sum[source0 + x][row];
    }
    const int i = r / p.group, head = segment.unit / d.shape.row_tiles * p.group + r % p.group;
    const bool whole = segment.slot < 0, first = thread % kThreadsPerRow == 0;
    RowEnd end = finish_row<Plan::kUnit>(row_max, row_sum, whole ? sink_of(p.sinks, head) : -INFINITY);
    if (first) {
        if (!whole && kNatural)
            reinterpret_cast<float2*>(d.partial_lse)[int64_t(segment.slot) * Plan::kRows + tile_row] = make_float2(row_max, row_sum);
        else if (!whole) d.partial_lse[int64_t(segment.slot) * Plan::kRows + tile_row] = end.lse;
        else if (p.lse) p.lse[(int64_t(segment.b) * p.nheads + head) * p.seqlen_q + i] = end.lse * (kNatural ? 1.0f : kLn2);
    }
    if (Plan::kGeneral && p.dropout_threshold) end.inverse *= p.dropout_scale;
    float* const partial = d.partial + (int64_t(segment.slot) * Plan::kRows + tile_row) * p.headdim_v;
    uint16_t* const out = static_cast<uint16_t*>(p.out.data) + segment.b * p.out.batch + i * p.out.row + head * p.out.head;
#pragma unroll 1
    for (int column = opaque(thread) % kThreadsPerRow * 4; column < kD; column += 4 * kThreadsPerRow) {
        if (column >= p.headdim_v) continue;
        float4 x{};
#pragma unroll
        for (int source = 0; source < kSources; ++source) {
            const float* from = reinterpret_cast<const float*>(stage0 + (source0 + source) * Plan::kPartBytes);
            const float4 y = *reinterpret_cast<const float4*>(from + o_place<kD>(row, column));
            const float w = weight[source];
            x.x += w * y.x, x.y += w * y.y, x.z += w * y.z, x.w += w * y.w;
        }
        x = end.output(x);
        if (!whole) *reinterpret_cast<float4*>(partial + column) = x;
        else *reinterpret_cast<uint2*>(out + column) = pack_row(x, p.dtype == DType::kFloat16);
    }
}

}  // namespace
}  // namespace fa
