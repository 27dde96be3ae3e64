// float32_parts_blocks.cuh: what wgmma_float32_sm90 and wgmma_float32_wide_sm90 share. A block owns a tile of keys, or of queries, walks
// over tiles of the other, and writes the gradients of its own rows. Both kernels read float16 parts from the workspace
// (float16_parts.cuh).
#pragma once

#include "attention/common/float16_parts.cuh"
#include "attention/common/mask.h"
#include "attention/common/simple_tiles.cuh"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"

namespace fa {

namespace {

enum class Own { kKeys, kQueries };  // what a block owns; it walks over the other

// What brings a thread's two rows of P or dS into the range of float16 parts, and takes their product with a tile of scale `scale` back.
// element i: row i / 2 % 2; four neighbouring threads share the rows.
template <int kPairs>
__device__ __forceinline__ void scales_of_rows(const float (&x)[kPairs], float scale, float (&up)[2], float (&down)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float most = 0;
#pragma unroll
        for (int i = 2 * r; i < kPairs; i += 4) most = fmaxf(most, fmaxf(fabsf(x[i]), fabsf(x[i + 1])));
        const Scale own = scale_of(fminf(fmaxf(quad_max(most), 0x1p-100f), 0x1p100f));
        up[r] = own.down, down[r] = own.up * scale;
    }
}

// What a block does. In shared memory it takes no registers.
struct BlockWork {
    Sequence s;
    int batch, head, own0;  // head: of the own rows
    int own_rows;
    int first_tile, steps, all_steps;  // walked tiles of a head, of all heads
};

// The work of block `index`; `tiles`: of kOwnRows own rows.
template <Own kOwn, int kOwnRows, int kWalkedRows>
__device__ __forceinline__ BlockWork work_of_block(const AttentionParams& p, int tiles, unsigned index) {
    constexpr bool kOwnsKeys = kOwn == Own::kKeys;
    const int heads = kOwnsKeys ? p.nheads_k : p.nheads;
    BlockWork w{};
    w.head = index % heads;
    index /= heads;
    w.batch = index % p.batch;
    // Under a causal mask the first keys and the last queries have the longest walks, so they come first.
    w.own0 = (kOwnsKeys ? index / p.batch : tiles - 1 - index / p.batch) * kOwnRows;
    w.s = sequence_of(p, w.batch);
    w.own_rows = kOwnsKeys ? w.s.seqlen_k : w.s.seqlen_q;
    const int last = min(w.own0 + kOwnRows, w.own_rows) - 1;
    const int begin = kOwnsKeys ? query_range(p, w.s, w.own0).begin : key_range(p, w.s, w.own0).begin;
    const int end = kOwnsKeys ? query_range(p, w.s, last).end : key_range(p, w.s, last).end;
    w.first_tile = begin / kWalkedRows;
    w.steps = end > begin ? (end - 1) / kWalkedRows + 1 - w.first_tile : 0;
    w.all_steps = w.steps * (kOwnsKeys ? p.group : 1);
    return w;
}

// The place of a tile of a head among all tiles of a tensor.
template <typename Index>
__device__ __forceinline__ Index tile_of(const SplitTensor& t, int batch, int head, int tile) {
    return (Index(batch) * t.heads + head) * t.tiles + tile;
}

// What the threads of a block know about its work.
template <Own kOwn>
struct BlockView {
    static constexpr bool kOwnsKeys = kOwn == Own::kKeys;

    const BackwardParams& backward;
    const AttentionParams& p;
    const BlockWork& w;

    // Head and tile of a step.
    __device__ __forceinline__ int walked_head(int step) const { return kOwnsKeys ? w.head * p.group + step / w.steps : w.head / p.group; }
    __device__ __forceinline__ int walked_tile(int step) const { return w.first_tile + (kOwnsKeys ? step % w.steps : step); }

    __device__ __forceinline__ Query query_of(const RowsOfCall& rows, int head, int i) const {
        if (i >= w.s.seqlen_q) return {0, 0, 0, 0, 0};
        const int64_t row = lse_offset(p, w.s, head) + i;
        if (p.lse[row] == -INFINITY) return {0, 0, 0, 0, 0};
        const KeyRange range = key_range(p, w.s, i);
        const float2 base = rows.bases[row];
        return {range.begin, range.end, base.x, base.y, rows.delta[row]};
    }

    // Stores a thread's sums, or adds them to what the gradients hold. element i: row own + 8 (i / 2 % 2), column column0 + 8 (i / 4) + i
    // % 2.
    template <int kSums, typename ColumnOf>
    __device__ __forceinline__ void store(const float (&acc_a)[kSums], const float (&acc_b)[kSums], int own,
                                          const ColumnOf& column_of) const {
        const GradientSequence g = gradients_of(backward, w.batch);
        const auto put = [&](const float(&acc)[kSums], float scale, const TensorView& t, int64_t first, int columns) {
            float* const to = static_cast<float*>(const_cast<void*>(static_cast<const void*>(t.data))) + first + w.head * t.head;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (own + 8 * r >= w.own_rows) continue;
#pragma unroll
                for (int i = 2 * r; i < kSums; i += 4) {
                    const int column = column_of(i);
                    if (column >= columns) continue;
                    float2& two = *reinterpret_cast<float2*>(to + (own + 8 * r) * t.row + column);
                    const float2 old = backward.accumulate ? two : float2{};
                    two = make_float2(fmaf(acc[i], scale, old.x), fmaf(acc[i + 1], scale, old.y));
                }
            }
        };
        if (kOwnsKeys) {
            put(acc_a, p.scale, backward.dk, g.dk, p.headdim);
            put(acc_b, 1.0f, backward.dv, g.dv, p.headdim_v);
        } else {
            put(acc_a, p.scale, backward.dq, g.dq, p.headdim);
        }
    }
};

// Four pairs of a thread with options of scores, except dropout, one option at a time. Few pairs at a time take few registers.
template <bool kSoftcap>
struct GeneralPairs {
    const AttentionParams& p;
    const Sequence& s;
    int batch, head;
    float score[4], slope[4];
    int query[4], key[4];
    bool seen[4];

    __device__ __forceinline__ GeneralPairs(const AttentionParams& p, const Sequence& s, int batch, int head)
        : p(p), s(s), batch(batch), head(head) {}
    // `product`: q . k
    __device__ __forceinline__ void put(int e, float product, int i, int j, const Query& row) {
        score[e] = __fmul_rn(product, p.scale), slope[e] = 1, query[e] = i, key[e] = j, seen[e] = j >= row.begin && j < row.end;
    }
    // The arithmetic of gradients_of_pairs in mma_float32_sm80.cu. Arrays are read only for pairs that causal and window leave visible.
    __device__ __forceinline__ void transform() {
        if (kSoftcap && p.softcap != 0) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float t = tanhf(score[e] / p.softcap);
                score[e] = p.softcap * t, slope[e] = 1 - t * t;
            }
        }
        if (p.alibi_slopes) {
            const float alibi = p.alibi_slopes[batch * p.alibi_batch + head];
#pragma unroll
            for (int e = 0; e < 4; ++e) score[e] -= alibi * fabsf(float(int64_t(query[e]) + s.shift - key[e]));
        }
        if (p.bias.data) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (!seen[e]) continue;
                const int64_t place = batch * p.bias.batch + head * p.bias.head + query[e] * p.bias.row + key[e];
                const float bias = load_as_float(p.bias.data, place, p.bias_dtype);
                score[e] += bias;
                seen[e] = bias != -INFINITY;
            }
        }
        if (p.mask.data) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int64_t place = batch * p.mask.batch + head * p.mask.head + query[e] * p.mask.row + key[e];
                if (seen[e]) seen[e] = static_cast<const uint8_t*>(p.mask.data)[place];
            }
        }
        if (p.blocks.data) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (seen[e]) seen[e] = !block_hides(p, batch, head, query[e], key[e]);
        }
        if (p.intervals.data) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (seen[e]) seen[e] = !interval_hides(p, batch, head, query[e], key[e]);
        }
    }
    // P; 0 where the pair is hidden, which it then says in `seen`, too.
    __device__ __forceinline__ float probability(int e, const Query& row) {
        seen[e] = seen[e] && score[e] != -INFINITY;
        return seen[e] ? exp2_approx(((score[e] - row.max) - row.rest) * kLog2e) : 0.0f;
    }
};

// ---- launch ----

// Divides a workspace into arrays that begin at multiples of 1024 bytes.
struct PartsWorkspace {
    unsigned char* base;
    size_t used = 0;

    unsigned char* take(int64_t bytes) {
        unsigned char* const at = base + used;
        used += (size_t(bytes) + 1023) / 1024 * 1024;
        return at;
    }
    // First the statistics of the rows, then two words: the parts are not precise enough; some row is large, or its delta NaN or too large.
    int* take_statistics(const AttentionParams& p) {
        take(int64_t(rows_of_call_bytes(p)));
        return reinterpret_cast<int*>(take(2 * sizeof(int)));
    }
    // The scales and the parts of `heads` heads, over all sequences.
    void place(SplitTensor& t, int64_t heads, int64_t tiles, int tile_rows, int64_t d) {
        t.scales = reinterpret_cast<float*>(take(heads * tiles * 4));
        t.parts = reinterpret_cast<__half*>(take(heads * tiles * tile_rows * d * 4));
        t.tiles = int(tiles);
    }
};

void view_tensor(SplitTensor& t, const TensorView& x, int heads, int rows, int columns) {
    t.data = static_cast<const float*>(x.data), t.batch = x.batch, t.head = x.head, t.row = x.row;
    t.heads = heads, t.rows = rows, t.columns = columns;
}

// The statistics of the rows; then `launch`, whose kernels end at once where one of the two words is set; then the kernels that serve such
// calls, mma_float32_sm80 or simple.
template <typename Launch>
cudaError_t launch_with_fallbacks(const BackwardParams& b, int* out_of_range, const DeviceInfo& device, cudaStream_t stream,
                                  const Launch& launch) {
    const RowsOfCall rows = rows_of_call(b.forward);
    int* const some_large = out_of_range + 1;
    if (const cudaError_t error = cudaMemsetAsync(out_of_range, 0, 2 * sizeof(int), stream)) return cudaGetLastError(), error;
    if (const cudaError_t error = backward_delta(b, rows.delta, rows.bases, stream, some_large)) return error;
    if (const cudaError_t error = launch()) return error;
    if (const cudaError_t error = backward_mma_float32_sm80_if(out_of_range, some_large, b, device, stream)) return error;
    return backward_simple_if(some_large, b, device, stream);
}

}  // namespace
}  // namespace fa
