// wgmma_sm90/interval_order.cu: the small kernel after interval_bounds.cu that orders blocks of keys by the tiles of queries that they walk
// over (interval_order.h). Every thread block finds the lengths of all walks of its sequence and head; then each of its warps finds the
// place of one: the number of longer ones.
#include "attention/backward/wgmma_sm90/interval_order.h"

#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/tile_intervals.h"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kKeys = BackwardPlan{}.block_n;  // of a block, in every plan
struct OrderParams {
    AttentionParams attention;
    IntervalBounds bounds;
    IntervalOrder order;
    uint16_t* to;  // order.data
    int block_m;
};

__global__ void __launch_bounds__(kThreads) interval_order_kernel(const __grid_constant__ OrderParams params) {
    const AttentionParams& p = params.attention;
    const int count = params.order.blocks, parts = (count + kWarps - 1) / kWarps;
    const int entry = blockIdx.x / parts, head = entry % params.order.heads, b = entry / params.order.heads;
    __shared__ int length[kMostOrderedBlocks];
    const VisibleBand band = visible_band(p, sequence_of(p, b));
    for (int n = threadIdx.x; n < count; n += kThreads) {
        const Range tiles = query_tiles_of(band, n * kKeys, params.block_m, kKeys);
        const HiddenBounds bounds = params.bounds.of_group<kKeys>(p, b, head, n);
        length[n] = tiles.end - tiles.begin - tile_gaps(bounds, tiles.begin, tiles.end, params.block_m, p.seqlen_q).tiles();
    }
    __syncthreads();
    const int own = (blockIdx.x - entry * parts) * kWarps + threadIdx.x / 32;
    if (own >= count) return;
    int before = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32) before += length[i] > length[own] || (length[i] == length[own] && i < own);
    before = __reduce_add_sync(~0u, before);
    if (threadIdx.x % 32 == 0) params.to[int64_t(entry) * count + before] = uint16_t(own);
}

}  // namespace

cudaError_t launch_interval_order(const AttentionParams& p, const BackwardPlan& plan, const IntervalBounds& bounds, void* workspace,
                                  IntervalOrder* order, cudaStream_t stream) {
    *order = interval_order(p, plan.block_n);
    uint16_t* const to = static_cast<uint16_t*>(align_up(workspace, alignof(uint16_t)));
    order->data = to;
    const int64_t blocks = ceil_div(order->blocks, kWarps) * p.batch * order->heads;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(interval_order_kernel, unsigned(blocks), kThreads, 0, stream, OrderParams{p, bounds, *order, to, plan.block_m});
}

}  // namespace fa
