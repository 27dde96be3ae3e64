// work_loop.cuh: the producer's side of the work list. The producer finds the items of its block and hands them to the consumers through a
// ring.
#pragma once

#include "attention/forward/common/roles_sm90.cuh"
#include "attention/forward/common/work_list.h"
#include "device/ring.cuh"

namespace fa {

// How a producer walks its items.
enum class WalkedBy {
    kThread,          // one thread, which keeps its position in the ring
    kThreadByCounts,  // one thread, which computes its position from the item's number to save registers: fp8's producer has 24
    kWarp,            // the first warp of the block, in the same way; its lane 0 finds the work
    kWarpgroup        // the producer's warpgroup; its thread 0 finds the work
};

// Calls produce(w, item) for every item of the block that has rows; `item` counts them. prepare(w), in the thread that finds the item, adds
// what the consumers need beyond ForwardWork. The last item, in state kEnd, tells the consumers that there are no more.
template <typename Tiles, WalkedBy kWalkedBy, typename Item, int kSlots, typename Prepare, typename Produce>
__device__ __forceinline__ void for_each_item(const AttentionParams& p, const ForwardWorkList& list, Item (&items)[kSlots],
                                              const uint64_t (&full)[kSlots], const uint64_t (&empty)[kSlots], const Prepare& prepare,
                                              const Produce& produce) {
    constexpr bool kWarp = kWalkedBy == WalkedBy::kWarp, kWarpgroup = kWalkedBy == WalkedBy::kWarpgroup;
    const bool finds = !(kWarp || kWarpgroup) || threadIdx.x == 0;
    uint32_t item = 0;
    Ring<kSlots> ring(full, empty);
    for (int index = blockIdx.x;;) {
        if (kWarp || kWalkedBy == WalkedBy::kThreadByCounts) ring = Ring<kSlots>(full, empty, item);
        Item& w = items[ring.slot];
        ring.wait_empty();
        if (finds) {
            find_work<Tiles>(p, list, index, w);
            if (w.state == WorkState::kRows) prepare(w);
            if (w.state != WorkState::kEmpty) mbarrier_arrive(ring.full_barrier());
        }
        if (kWarp) __syncwarp();
        if (kWarpgroup) bar_sync(kProducer, 128);
        if (w.state == WorkState::kEnd) return;
        if (w.state == WorkState::kRows) {
            produce(w, item);
            ++item, ring.next();
        }
        if (finds) index = list.order == WorkOrder::kCounter ? gridDim.x + atomicAdd(list.counter, 1) : index + gridDim.x;
        if (kWarp) __syncwarp();
        if (kWarpgroup) bar_sync(kProducer, 128);  // all have read the state of an item without rows: thread 0 may overwrite it
    }
}

}  // namespace fa
