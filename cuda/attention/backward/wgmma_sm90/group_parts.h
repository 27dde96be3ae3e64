// wgmma_sm90/group_parts.h: the Hopper backward where few key blocks have long walks. A block walks over all query heads that share its
// keys. With few key heads and short sequences there are fewer such blocks than multiprocessors: 24 for 4 x 269 tokens with 32 heads on 2.
// So a group of query heads is cut into parts, each with blocks of its own:
//     main kernel        sees nheads_k * parts key heads of group / parts query heads; key head h reads K and V of head h / parts, and
//     writes
//                        dK and dV in float32 to the workspace
//     group_parts.cu     adds the parts of each key head, in their order, and rounds once
// dQ has the same sums as before. The number of parts follows the shape and the GPU alone, so that results can be repeated.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "attention/backward/wgmma_sm90/tiles.h"

namespace fa {

// How many query tiles the longest walk over one head has, and the mean walk, in tiles. Varlen: those of the longest sequence.
struct HeadWalk {
    double longest, mean;
};
inline HeadWalk head_walk(const AttentionParams& p, const BackwardPlan& plan) {
    const double tiles = double((p.seqlen_q + plan.block_m - 1) / plan.block_m);
    if (p.window_right < 0 && p.window_left < 0) return {tiles, tiles};
    if (p.window_left < 0) return {tiles, (tiles + 1) / 2};
    const double window =
        double(int64_t(p.window_left) + (p.window_right < 0 ? p.seqlen_k : p.window_right) + plan.block_n) / plan.block_m + 1;
    return {window < tiles ? window : tiles, window < tiles ? window : tiles};
}

// The time of the main kernel, in tiles of queries, when blocks take `parts` parts of each group in turn. Taking keys, loading them and
// storing their gradients costs as much as kTilesOfKeys tiles.
inline double time_of_parts(const AttentionParams& p, const BackwardPlan& plan, int multiprocessors, int parts) {
    constexpr double kTilesOfKeys = 3;
    const int slots = multiprocessors / plan.blocks() > 0 ? multiprocessors / plan.blocks() : 1;
    const HeadWalk walk = head_walk(p, plan);
    const double heads = double(p.group) / parts, items = double(backward_blocks(p, plan)) * parts;
    const double longest = walk.longest * heads + kTilesOfKeys, mean = walk.mean * heads + kTilesOfKeys;
    const int64_t rounds = (int64_t(items) + slots - 1) / slots;
    // Equal walks end together, in whole rounds. Others fill the gaps, but the last of them begin late.
    if (walk.longest == walk.mean) return rounds * longest;
    const double filled = items * mean / slots + mean / 2;
    return filled > longest ? filled : longest;
}

// The number of parts: 1, or a divisor of the group. More parts must gain more than the addition costs: its launch, and the traffic of the
// sums, which at most 4 blocks for each multiprocessor have (128 keys x 256 columns: 70 MB; usually far less).
inline int backward_group_parts(const BackwardParams& b, const BackwardPlan& plan, int multiprocessors) {
    const AttentionParams& p = b.forward;
    constexpr double kTilesOfAddition = 1.5, kGain = 0.95, kCached = 40e6;
    int best = 1;
    double best_time = kGain * time_of_parts(p, plan, multiprocessors, 1);
    const int64_t blocks = backward_blocks(p, plan);
    for (int parts = 2; parts <= p.group && blocks * parts <= 4 * int64_t(multiprocessors); ++parts) {
        if (p.group % parts) continue;
        const double columns = double(plan.columns() + plan.columns_v());
        // A tile of 64 x 128 scores at head dim 128 takes 2 us; so do 5 MB, written and read, or 10 MB that stay in L2.
        const double bytes = double(blocks) * parts * plan.block_n * columns * 8;
        const double traffic = bytes < kCached ? bytes / 10e6 : (bytes - kCached / 2) / 5e6;
        const double time = time_of_parts(p, plan, multiprocessors, parts) + kTilesOfAddition + traffic;
        if (time < best_time) best = parts, best_time = time;
    }
    return best;
}

// In the workspace: dK and dV of each part, float32, not yet scaled, laid out as (nheads_k * count, rows, columns).
struct GroupParts {
    int count;
    int columns, columns_v;  // those of the plan
    int64_t rows;            // of all sequences
    float *dk, *dv;

    size_t bytes(const AttentionParams& p) const {
        return size_t(count) * p.nheads_k * rows * (columns + columns_v) * sizeof(float) + kAlignment;
    }
    static constexpr int kAlignment = 16;
};
inline GroupParts group_parts(const BackwardParams& b, const BackwardPlan& plan, int multiprocessors) {
    const AttentionParams& p = b.forward;
    GroupParts parts{};
    parts.count = backward_group_parts(b, plan, multiprocessors);
    parts.columns = plan.columns(), parts.columns_v = plan.columns_v();
    parts.rows = p.cu_seqlens_q ? int64_t(p.total_k) : int64_t(p.batch) * p.seqlen_k;
    return parts;
}
// The call whose key heads are the parts. `memory` has GroupParts::bytes.
inline BackwardParams call_of_parts(const BackwardParams& b, GroupParts* parts, void* memory) {
    BackwardParams call = b;
    AttentionParams& p = call.forward;
    parts->dk = static_cast<float*>(align_up(memory, GroupParts::kAlignment));
    parts->dv = parts->dk + parts->count * p.nheads_k * parts->rows * parts->columns;
    p.nheads_k *= parts->count, p.group /= parts->count;
    const auto view = [&](float* data, int columns) {
        TensorView x{};
        x.data = data, x.batch = int64_t(p.seqlen_k) * columns, x.row = columns, x.head = parts->rows * columns;
        return x;
    };
    call.dk = view(parts->dk, parts->columns), call.dv = view(parts->dv, parts->columns_v);
    call.group_parts = parts->count;
    return call;
}
// The call that `call_of_parts` began with, as far as K, V and their heads are concerned.
inline BackwardParams call_of_groups(const BackwardParams& b) {
    BackwardParams call = b;
    if (b.group_parts > 1) call.forward.nheads_k /= b.group_parts, call.forward.group *= b.group_parts;
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
cudaError_t add_group_parts(const BackwardParams& b, const GroupParts& parts, cudaStream_t stream);

}  // namespace fa
