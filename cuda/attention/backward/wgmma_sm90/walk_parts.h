// wgmma_sm90/walk_parts.h: the Hopper backward where few key blocks have long walks. A block walks over all query tiles of all query heads
// that share its keys. With few key heads and short or few sequences there are fewer such blocks than multiprocessors: 24 for 4 x 269
// tokens with 32 heads on 2, 8 for 8 x 32768 queries on 128 keys of one head. So a walk is cut into parts, each with a block of its own:
//     main kernel        parts of heads: sees nheads_k * heads key heads of group / heads query heads; key head h reads K and V of head
//                        h / heads. Parts of rows: block i has part i % rows of the walk of block i / rows. Each part writes its dK and
//                        dV in float32 to the workspace
//     walk_parts.cu      adds the parts of each key head, in their order, and rounds once
// dQ has the same sums as before. The number of parts follows the shape and the GPU alone, so that results can be repeated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <initializer_list>

#include "attention/backward/wgmma_sm90/tiles.h"

namespace fa {

// heads: a divisor of the group. rows: of the walk over one part of the heads.
struct WalkParts {
    int heads = 1, rows = 1;
    FA_HOST_DEVICE int count() const { return heads * rows; }
};

// How many query tiles the longest walk over one head has, and the mean walk, as far as causal and windows say: of at most 16 key blocks,
// from the first to the last. Varlen: those of a sequence with the longest lengths.
struct HeadWalk {
    int longest;
    double mean;
    bool equal() const { return mean > 0.9 * longest; }
};
inline HeadWalk head_walk(const AttentionParams& p, const BackwardPlan& plan) {
    constexpr int kSamples = 16;
    Sequence s{};
    s.seqlen_q = p.seqlen_q, s.seqlen_k = p.seqlen_k, s.shift = p.top_left ? 0 : p.seqlen_k - p.seqlen_q;
    const VisibleBand band = visible_band(p, s);
    const int64_t blocks = ceil_div(p.seqlen_k, plan.block_n), samples = blocks < kSamples ? blocks : kSamples;
    HeadWalk walk{};
    for (int64_t x = 0; x < samples; ++x) {
        const int64_t block = samples > 1 ? x * (blocks - 1) / (samples - 1) : 0;
        const Range range = query_tiles_of(band, int(block * plan.block_n), plan.block_m, plan.block_n);
        const int tiles = range.end - range.begin;
        if (tiles > walk.longest) walk.longest = tiles;
        walk.mean += tiles;
    }
    if (samples) walk.mean /= double(samples);
    return walk;
}

// The time of the main kernel, in tiles of queries, when blocks take the parts of the walks in turn. Taking keys, loading them and storing
// their gradients costs as much as kTilesOfKeys tiles. The numbers here and below are those that chose best among 168 calls in up to 16
// ways each, on an H200 (docs/benchmarks/h200/walk_parts.json): 0.8 % slower than the best way in the geometric mean.
inline double time_of_parts(const AttentionParams& p, const BackwardPlan& plan, int multiprocessors, const HeadWalk& walk,
                            const WalkParts& parts) {
    constexpr double kTilesOfKeys = 2, kTail = 0.6;
    const double slower = parts.rows > 1 && p.group > 1 ? 1.03 : 1;  // than parts of heads
    const int slots = multiprocessors / plan.blocks() > 0 ? multiprocessors / plan.blocks() : 1;
    const double heads = double(p.group) / parts.heads, items = double(backward_blocks(p, plan)) * parts.count();
    const double longest = double(ceil_div(walk.longest, parts.rows)) * heads + kTilesOfKeys;
    const double mean = walk.mean / parts.rows * heads + kTilesOfKeys;
    const int64_t rounds = ceil_div(int64_t(items), slots);
    // Equal walks end together, in whole rounds. Others fill the gaps, but the last of them begin late.
    if (walk.equal() || rounds <= 1) return slower * rounds * longest;
    const double filled = items * mean / slots + kTail * mean;
    return slower * (filled > longest ? filled : longest);
}

// The parts of a walk. More of them must gain more than the addition costs, and a little more by rows: its launch, and the traffic of the
// sums, which at most kMostBlocks blocks for each multiprocessor have (128 keys x 256 columns: 277 MB; usually far less).
inline WalkParts backward_walk_parts(const BackwardParams& b, const BackwardPlan& plan, int multiprocessors) {
    const AttentionParams& p = b.forward;
    constexpr int kMostBlocks = 8;
    constexpr double kTilesOfAddition = 1.5, kTilesOfRowParts = 1.5, kGain = 0.95, kCached = 40e6, kCachedOfTile = 20e6,
                     kOfTile = 5e6;  // bytes
    WalkParts best;
    const HeadWalk walk = head_walk(p, plan);
    double best_time = kGain * time_of_parts(p, plan, multiprocessors, walk, best);
    const int64_t blocks = backward_blocks(p, plan), most = kMostBlocks * int64_t(multiprocessors);
    const auto consider = [&](const WalkParts& parts) {
        const double columns = double(plan.columns() + plan.columns_v());
        // A tile of 64 x 128 scores at head dim 128 takes 2 us; so do 5 MB, written and read, or 20 MB that stay in L2.
        const double bytes = double(blocks) * parts.count() * plan.block_n * columns * 8;
        const double cached = bytes < kCached ? bytes : kCached, traffic = cached / kCachedOfTile + (bytes - cached) / kOfTile;
        const double addition = kTilesOfAddition + (parts.rows > 1 ? kTilesOfRowParts : 0);
        const double time = time_of_parts(p, plan, multiprocessors, walk, parts) + addition + traffic;
        if (time < best_time) best = parts, best_time = time;
    };
    if (2 * blocks > most) return best;
    for (int heads = 1; heads <= p.group && blocks * heads <= most; ++heads) {
        if (p.group % heads) continue;
        if (heads > 1) consider({heads, 1});
        if (heads > 1 && heads < p.group) continue;             // to cut some heads and some rows gains nothing more
        for (const int rows : {2, 3, 4, 6, 8, 12, 16, 24, 32})  // of two tiles at least
            if (2 * rows <= walk.longest && blocks * heads * rows <= most) consider({heads, rows});
    }
    return best;
}

// In the workspace: dK and dV of each part, float32, not yet scaled, laid out as (nheads_k * count, rows, columns).
struct PartSums {
    WalkParts parts;
    int columns, columns_v;  // those of the plan
    int64_t rows;            // of all sequences
    float *dk, *dv;

    size_t bytes(const AttentionParams& p) const {
        return size_t(parts.count()) * p.nheads_k * rows * (columns + columns_v) * sizeof(float) + kAlignment;
    }
    static constexpr int kAlignment = 16;
};
inline PartSums part_sums(const BackwardParams& b, const BackwardPlan& plan, int multiprocessors) {
    const AttentionParams& p = b.forward;
    PartSums sums{};
    sums.parts = backward_walk_parts(b, plan, multiprocessors);
    sums.columns = plan.columns(), sums.columns_v = plan.columns_v();
    sums.rows = p.cu_seqlens_q ? int64_t(p.total_k) : int64_t(p.batch) * p.seqlen_k;
    return sums;
}
// The call whose blocks walk over parts. `memory` has PartSums::bytes.
inline BackwardParams call_of_parts(const BackwardParams& b, PartSums* sums, void* memory) {
    BackwardParams call = b;
    AttentionParams& p = call.forward;
    sums->dk = static_cast<float*>(align_up(memory, PartSums::kAlignment));
    sums->dv = sums->dk + sums->parts.count() * p.nheads_k * sums->rows * sums->columns;
    p.nheads_k *= sums->parts.heads, p.group /= sums->parts.heads;
    const auto view = [&](float* data, int columns) {
        TensorView x{};
        x.data = data, x.batch = int64_t(p.seqlen_k) * columns, x.row = columns, x.head = sums->rows * columns;
        return x;
    };
    call.dk = view(sums->dk, sums->columns), call.dv = view(sums->dv, sums->columns_v);
    call.head_parts = sums->parts.heads, call.row_parts = sums->parts.rows;
    return call;
}
// The call that `call_of_parts` began with, as far as K, V and their heads are concerned.
inline BackwardParams call_of_groups(const BackwardParams& b) {
    BackwardParams call = b;
    if (b.head_parts > 1) call.forward.nheads_k /= b.head_parts, call.forward.group *= b.head_parts;
    return call;
}

// A block of the addition has kAddedKeys keys of a sequence. A packed call's seqlen_k may be far above the keys that there are.
constexpr int kAddedKeys = 16;
FA_HOST_DEVICE int addition_chunks(const AttentionParams& p) {
    const int most = p.cu_seqlens_q && p.total_k < p.seqlen_k ? p.total_k : p.seqlen_k;
    return (most + kAddedKeys - 1) / kAddedKeys;
}
inline int64_t addition_blocks(const AttentionParams& p) { return int64_t(2) * addition_chunks(p) * p.batch * p.nheads_k; }

// dk and dv of the call from those of its parts.
cudaError_t add_parts(const BackwardParams& b, const PartSums& sums, cudaStream_t stream);

}  // namespace fa
