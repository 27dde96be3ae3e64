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
    const int64_t first = p.cu_seqlens_k ? first_key_row(p, b) / keys + b : int64_t(tiles) * b;
    if (lane == 0) params.to.data[head * params.to.head + first + tile] = bounds;
}

}  // namespace

cudaError_t launch_interval_bounds(const AttentionParams& p, int keys, void* workspace, IntervalBounds* bounds, cudaStream_t stream) {
    *bounds = {static_cast<HiddenBounds*>(align_up(workspace, alignof(HiddenBounds))), interval_bounds_of_head(p, keys),
               int(ceil_div(p.seqlen_k, keys))};
    const int64_t warps = ceil_div(p.seqlen_k, keys) * p.batch * (p.nheads / p.intervals.heads_of_entry);
    if (warps == 0) return cudaSuccess;
    return launch_kernel(interval_bounds_kernel, unsigned(ceil_div(warps, kThreads / 32)), kThreads, 0, stream,
                         BoundsParams{p, *bounds, keys});
}

}  // namespace fa
