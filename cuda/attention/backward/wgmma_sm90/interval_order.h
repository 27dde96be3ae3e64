// wgmma_sm90/interval_order.h: masks by intervals in the Hopper backward: the order in which thread blocks take the blocks of keys of a
// sequence. Only the device knows how many tiles of queries a mask leaves to a block. In the order of the keys, long walks may begin last,
// and multiprocessors wait for their end. Eight documents in 8192 tokens, 64 heads on 8: 0.94 of the time at head dim 128, 0.85 at 64.
// (Forward, blocks of rows in the order of their lengths gained nothing: items are shorter, and their order costs 4 us and L2 hits.)
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "attention/backward/wgmma_sm90/plan.h"
#include "attention/common/interval_bounds.cuh"
#include "attention/common/params.h"

namespace fa {

// In the workspace: the blocks of keys of a sequence, the longest walk first. Walks of equal length keep their order.
struct IntervalOrder {
    const uint16_t* data;  // (batch, heads, blocks); nullptr: blocks are taken in the order of their keys
    int heads;             // 1, or the key heads of the call
    int blocks;            // of a sequence

    FA_HOST_DEVICE int block(int batch, int head_k, int place) const {
        return data[uint32_t((heads == 1 ? batch : batch * heads + head_k) * blocks + place)];  // as many as blocks of the call
    }
};

inline IntervalOrder interval_order(const AttentionParams& p, int block_n) {
    return {nullptr, p.intervals.heads_of_entry == p.nheads ? 1 : p.nheads_k, int((int64_t(p.seqlen_k) + block_n - 1) / block_n)};
}
constexpr int kMostOrderedBlocks = 8192;  // whose lengths fit in shared memory
inline bool can_order_intervals(const AttentionParams& p, int block_n) {
    return p.intervals.data && !p.cu_seqlens_q && interval_order(p, block_n).blocks <= kMostOrderedBlocks;
}
inline size_t interval_order_bytes(const AttentionParams& p, int block_n) {
    if (!can_order_intervals(p, block_n)) return 0;
    const IntervalOrder order = interval_order(p, block_n);
    return size_t(p.batch) * order.heads * order.blocks * sizeof(uint16_t) + alignof(uint16_t);
}

// bounds: of block_n keys each. workspace: interval_order_bytes.
cudaError_t launch_interval_order(const AttentionParams& p, const BackwardPlan& plan, const IntervalBounds& bounds, void* workspace,
                                  IntervalOrder* order, cudaStream_t stream);

}  // namespace fa
