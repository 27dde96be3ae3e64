// forward.cpp: the CPU forward pass outside the tile: which tiles there are, who computes them, where their scratch lies.
// FlashAttention's order: one task owns a tile of queries and walks over the keys with an online softmax; memory per thread does
// not depend on the sequence length, and nothing depends on which thread runs a task or how many there are.
#include <algorithm>
#include <cmath>

#include "attention/mask.h"
#include "kernels.h"
#include "parallel.h"
#include "tile.h"

namespace fa::cpu {
namespace {

const TileKernel& tile_kernel(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return kTileAvx512;
    if (isa == Isa::kAvx2) return kTileAvx2;
#elif defined(__aarch64__)
    if (isa == Isa::kNeon) return kTileNeon;
#endif
    (void)isa;
    return kTilePortable;
}

int64_t packed_rows(const AttentionParams& p, int32_t seqlen_q) { return int64_t(seqlen_q) * p.group; }

// Scratch of one thread in floats, each part a whole number of cache lines.
constexpr int64_t kLine = 64 / sizeof(float);
int64_t lines(int64_t floats) { return (floats + kLine - 1) / kLine * kLine; }

// Rows of a tile: the more, the fewer copies of K and V, as long as Q^T and O^T take no more than half of a usual L2 cache and
// every thread has several tiles to take. A row's result does not depend on the tile it is in, so the choice is free.
int64_t tile_rows(const AttentionParams& p) {
    const int64_t fit = (int64_t(1) << 18) / (p.headdim + p.headdim_v);
    const int64_t share = packed_rows(p, p.seqlen_q) * p.nheads_k * p.batch / (int64_t(8) * p.num_threads);
    return std::clamp<int64_t>(std::min(fit, share) / kMaxGroupRows * kMaxGroupRows, kMaxGroupRows, kMaxTileRows);
}

struct Layout {
    int64_t ld_k, ld_v, q, q_rows, out, s, k, v, total;
    explicit Layout(const AttentionParams& p) {
        const int64_t rows = std::min(tile_rows(p), lines(packed_rows(p, p.seqlen_q)));
        // One line more than a row needs: with rows a power of two apart, a column of V would live in a few sets of the cache.
        ld_k = lines(p.headdim) + kLine, ld_v = lines(p.headdim_v) + kLine;
        q = rows * p.headdim, out = rows * p.headdim_v, s = std::min<int64_t>(rows, kMaxGroupRows) * kTileKeys;
        q_rows = ld_k * kMaxNarrowRows, k = ld_k * kTileKeys, v = ld_v * (kTileKeys + 1);
        total = q + q_rows + out + 2 * s + k + v;
    }
    Scratch at(float* base) const {
        float *const rows = base + q, *const o = rows + q_rows, *const score = o + out, *const seen = score + s, *const key = seen + s;
        return {base, rows, o, score, seen, key, key + k, ld_k, ld_v};
    }
};

// The tile of packed rows `first` .. that share key head `head_k` in sequence b.
void attend(const AttentionParams& p, const TileKernel& kernel, int32_t b, int32_t head_k, int64_t first, int64_t rows,
            const Scratch& scratch) {
    QueryTile tile;
    tile.params = &p;
    tile.sequence = sequence_of(p, b);
    const int64_t end = packed_rows(p, tile.sequence.seqlen_q);
    if (first >= end) return;  // a shorter sequence of a varlen batch
    tile.batch = b, tile.head_k = head_k;
    tile.rows = int32_t(std::min(rows, end - first));
    tile.scratch = scratch;
    for (int32_t r = 0; r < tile.rows; ++r) {
        const int32_t query = int32_t((first + r) / p.group), head = head_k * p.group + int32_t((first + r) % p.group);
        const KeyRange range = key_range(p, tile.sequence, query);
        tile.row[r] = {head, query, range.begin, range.end};
    }
    tile.key_begin = tile.row[0].key_begin, tile.key_end = tile.row[tile.rows - 1].key_end;  // both grow with the query

    kernel.run(tile);

    if (!p.lse) return;
    for (int32_t r = 0; r < tile.rows; ++r) {
        const float sum = tile.row_sum[r];
        p.lse[lse_offset(p, tile.sequence, tile.row[r].head) + tile.row[r].query] = sum == 0 ? -INFINITY : tile.row_max[r] + std::log(sum);
    }
}

// Starting a thread takes tens of microseconds; it has to find a quarter of a millisecond of work.
int useful_threads(const AttentionParams& p, const TileKernel& kernel) {
    const double rows = std::ceil(double(packed_rows(p, p.seqlen_q)) / kernel.lanes) * kernel.lanes * p.nheads_k;
    double keys = p.seqlen_k;
    if (p.window_left >= 0 && p.window_right >= 0) keys = std::min(keys, double(p.window_left) + p.window_right + 1);
    const double work = p.batch * rows * keys * (p.headdim + p.headdim_v);  // multiply-adds
    const double per_thread = 250e3 * 2 * kernel.lanes;                     // at a modest 2 vectors per nanosecond
    return int(std::clamp(work / per_thread, 1.0, double(p.num_threads)));
}

}  // namespace

bool isa_available(Isa isa) {
    switch (isa) {
        case Isa::kPortable: return true;
#if defined(__x86_64__)
        case Isa::kAvx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::kAvx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
        case Isa::kNeon: return true;
#endif
        default: return false;
    }
}

size_t forward_workspace(const AttentionParams& p, Isa) { return size_t(p.num_threads) * Layout(p).total * sizeof(float) + 64; }

void forward(const AttentionParams& p, Isa isa) {
    const TileKernel& kernel = tile_kernel(isa);
    const Layout layout(p);
    float* const workspace = static_cast<float*>(align_up(p.workspace, 64));
    const int64_t rows = tile_rows(p), tiles = (packed_rows(p, p.seqlen_q) + rows - 1) / rows;
    // The tiles of one head follow each other, so that its keys stay in the cache; within it the causal mask's longest come first.
    parallel_for(p.batch * tiles * p.nheads_k, useful_threads(p, kernel), [&](int64_t task, int thread) {
        const int64_t head = task / tiles, first = (tiles - 1 - task % tiles) * rows;
        attend(p, kernel, int32_t(head / p.nheads_k), int32_t(head % p.nheads_k), first, rows,
               layout.at(workspace + thread * layout.total));
    });
}

}  // namespace fa::cpu
