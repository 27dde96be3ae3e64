// mma_short_sm80.h: how mma_short_sm80 divides a call, and the calls that it serves faster than the kernels for long sequences.
#pragma once

#include "attention/common/params.h"
#include "attention/common/tiles_mma_sm80.h"
#include "device/device_info.h"

namespace fa {

// The head dim that a call is padded to, and the shared memory of a block: K and V, or Q and dO, of 64 rows; stages of Q, dO and O; P and
// dS; statistics.
constexpr int backward_short_bucket(int d) { return d <= 64 ? 64 : d <= 128 ? 128 : 256; }
constexpr int backward_short_bucket(const AttentionParams& p) {
    return backward_short_bucket(p.headdim > p.headdim_v ? p.headdim : p.headdim_v);
}
constexpr int backward_short_stages(int d) { return d <= 64 ? 2 : 1; }
// large_sm: more shared memory than on sm_80, whose multiprocessors hold one block.
constexpr int backward_short_blocks_per_sm(int d, bool large_sm) { return d <= 128 && large_sm ? 2 : 1; }
constexpr size_t backward_short_bytes(int d) {
    return size_t(64) * 2 * d * (2 + 3 * backward_short_stages(d)) + 64 * (2 * 2 * 64 + 2 * 12 + 4);
}

// An owner of keys or of queries is a cluster of blocks.
struct BackwardShortPlan {
    int64_t tiles_q, tiles_k;        // of 64 rows, of the longest sequence
    bool keys_write_dq;              // then there are no owners of queries
    int64_t key_clusters, clusters;  // owners of keys; all owners
    int blocks;                      // of a cluster
    int64_t steps, places;           // the most steps of a block; blocks that the GPU holds at once
};

inline BackwardShortPlan backward_short_plan(const AttentionParams& p, const DeviceInfo& device) {
    BackwardShortPlan plan{};
    plan.tiles_q = (int64_t(p.seqlen_q) + 63) / 64, plan.tiles_k = (int64_t(p.seqlen_k) + 63) / 64;
    plan.places =
        int64_t(device.multiprocessors) * backward_short_blocks_per_sm(backward_short_bucket(p), device.shared_memory > kMostSharedSm80);
    const int64_t queries = plan.tiles_q * p.nheads * p.batch, heads_k = int64_t(p.nheads_k) * p.batch;
    // Two owners that work at once are faster than one after the other.
    const bool may_zero_keys = !p.may_hide_keys() || plan.tiles_q * p.group <= 1;
    plan.keys_write_dq = plan.tiles_k <= 1 && may_zero_keys && queries + heads_k > plan.places;
    if (plan.keys_write_dq) plan.tiles_k = 1;  // without keys, dQ is 0
    plan.key_clusters = plan.tiles_k * heads_k, plan.clusters = plan.key_clusters + (plan.keys_write_dq ? 0 : queries);
    // As many blocks for each owner as fit on the GPU at once, and as have a step.
    const int64_t of_keys = plan.tiles_q * p.group, steps = of_keys > plan.tiles_k ? of_keys : plan.tiles_k;
    plan.blocks = 1;
    if (device.compute >= 90)
        while (plan.blocks < 8 && plan.blocks < steps && 2 * plan.clusters * plan.blocks <= plan.places) plan.blocks *= 2;
    plan.steps = (steps + plan.blocks - 1) / plan.blocks;
    return plan;
}

// Against wgmma_sm90 and wgmma_pair_sm90: 1400 random calls on an H200. Other GPUs have not been measured. There, dense calls without masks
// by intervals or blocks go by estimates (api/attention/short_gradients.h).
inline bool backward_short_is_faster(const AttentionParams& p, const DeviceInfo& device) {
    const BackwardShortPlan plan = backward_short_plan(p, device);
    const int d = backward_short_bucket(p);
    if (plan.keys_write_dq && d > 64) return false;
    return plan.clusters * plan.blocks <= plan.places && plan.steps <= (d <= 64 ? 4 : 2);
}

}  // namespace fa
