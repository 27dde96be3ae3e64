// interval_bounds.cu: the small kernel before those that skip tiles of masks by intervals: it reads the numbers of each key once and writes
// the bounds of every `keys` keys.
#include "attention/common/interval_bounds.cuh"
#include "attention/common/tile_intervals.h"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kThreads = 128;
struct BoundsParams {
    AttentionParams attention;
    IntervalBounds to;
    int keys;
};
// A warp reduces the numbers of `keys` keys.
__global__ void __launch_bounds__(kThreads) interval_bounds_kernel(const __grid_constant__ BoundsParams params) {
    const AttentionParams& p = params.attention;
    const int keys = params.keys, lane = threadIdx.x % 32, tiles = (p.seqlen_k + keys - 1) / keys;
    const int64_t index = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    const int tile = int(index % tiles), b = int(index / tiles % p.batch), head = int(index / tiles / p.batch);
    if (head >= p.nheads / p.intervals.heads_of_entry) return;
    const Sequence s = sequence_of(p, b);
    const int key0 = tile * keys, end = min(key0 + keys, s.seqlen_k);
    if (key0 >= s.seqlen_k) return;
    const int32_t* const numbers = row_indices_of(p, b, head * p.intervals.heads_of_entry);
    HiddenBounds bounds;
    bounds.clear();
    for (int key = key0 + lane; key < end; key += 32) add_key(bounds, p, s, hidden_rows(p, numbers + key * p.intervals.key), key);
    reduce_bounds(bounds);
    // Sequences that are out of order may overlap, and so do the places of their bounds.
    bool ordered = true;
    for (int i = lane; p.cu_seqlens_k && i < p.batch; i += 32) ordered &= p.cu_seqlens_k[i] <= p.cu_seqlens_k[i + 1];
    if (!__all_sync(~0u, ordered)) bounds.decide_nothing();
    if (lane == 0) params.to.data[head * params.to.head + params.to.first(p, keys, b) + tile] = bounds;
}

IntervalBounds place_bounds(const AttentionParams& p, int keys, void* workspace) {
    return {static_cast<HiddenBounds*>(align_up(workspace, kBoundsAlignment)), interval_bounds_of_head(p, keys),
            int(ceil_div(p.seqlen_k, keys))};
}

// A warp reduces the bounds of a group.
struct GroupsParams {
    AttentionParams attention;
    IntervalBounds from, to;
    int keys;  // of a bound in `from`
};
__global__ void __launch_bounds__(kThreads) interval_groups_kernel(const __grid_constant__ GroupsParams params) {
    const AttentionParams& p = params.attention;
    const int keys = params.keys, group_keys = keys * kBoundsOfGroup, lane = threadIdx.x % 32;
    const int groups = (p.seqlen_k + group_keys - 1) / group_keys;
    const int64_t index = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
    const int group = int(index % groups), b = int(index / groups % p.batch), head = int(index / groups / p.batch);
    if (head >= p.nheads / p.intervals.heads_of_entry) return;
    const Sequence s = sequence_of(p, b);
    const int own = group * kBoundsOfGroup + lane;
    if (group * kBoundsOfGroup * keys >= s.seqlen_k) return;
    HiddenBounds bounds;
    bounds.clear();
    if (own * keys < s.seqlen_k) bounds = load_bounds(params.from.data + head * params.from.head + params.from.first(p, keys, b) + own);
    reduce_bounds(bounds);
    if (lane == 0) params.to.data[head * params.to.head + params.to.first(p, group_keys, b) + group] = bounds;
}

}  // namespace

cudaError_t launch_interval_bounds(const AttentionParams& p, int keys, void* workspace, IntervalBounds* bounds, cudaStream_t stream) {
    *bounds = place_bounds(p, keys, workspace);
    const int64_t warps = ceil_div(p.seqlen_k, keys) * p.batch * (p.nheads / p.intervals.heads_of_entry);
    if (warps == 0) return cudaSuccess;
    return launch_kernel(interval_bounds_kernel, unsigned(ceil_div(warps, kThreads / 32)), kThreads, 0, stream,
                         BoundsParams{p, *bounds, keys});
}

cudaError_t launch_grouped_interval_bounds(const AttentionParams& p, int keys, void* workspace, IntervalBounds* bounds,
                                           IntervalBounds* groups, cudaStream_t stream) {
    *groups = {};
    if (const cudaError_t error = launch_interval_bounds(p, keys, workspace, bounds, stream)) return error;
    if (!has_bounds_of_groups(p, keys)) return cudaSuccess;
    const int group_keys = keys * kBoundsOfGroup;
    *groups = place_bounds(p, group_keys, static_cast<char*>(workspace) + interval_bounds_bytes(p, keys));
    const int64_t warps = ceil_div(p.seqlen_k, group_keys) * p.batch * (p.nheads / p.intervals.heads_of_entry);
    if (warps == 0) return cudaSuccess;
    return launch_kernel(interval_groups_kernel, unsigned(ceil_div(warps, kThreads / 32)), kThreads, 0, stream,
                         GroupsParams{p, *bounds, *groups, keys});
}

}  // namespace fa
