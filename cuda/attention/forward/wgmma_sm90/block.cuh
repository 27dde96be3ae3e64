// wgmma_sm90/block.cuh: the shared memory of a block of wgmma_sm90, and the barriers between its roles.
#pragma once

#include "attention/forward/common/roles_sm90.cuh"
#include "attention/forward/common/work_list.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

struct WgmmaSchedule {
    ForwardWorkList list;
    int q_loads, k_loads, v_loads;  // boxes of a tile
    int page_boxes;                 // paged cache whose pages are not whole tiles: rows of a box, several of which make a tile; else 0
    bool page_copies;               // the same without a common divisor of 8 rows or more: rows are copied one by one
};

// The work item that consumers read. wgmma_split_sm90 specialises it for its ids, where an item has only some of a row's keys.
template <WgmmaPlanId kId>
struct WgmmaItem {
    using Type = ForwardWork;
};

template <typename T, WgmmaPlanId kId>
struct alignas(1024) WgmmaSmem {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    T q[kPlan.warpgroups][64 * kPlan.columns()];
    T k[kPlan.stages][kPlan.block_n * kPlan.columns()];
    T v[kPlan.stages][kPlan.block_n * kPlan.columns_v()];
    uint64_t q_full[1], q_empty[1];
    uint64_t k_full[kPlan.stages], k_empty[kPlan.stages], v_full[kPlan.stages], v_empty[kPlan.stages];
    static constexpr int kWorkSlots = 3;  // consumers keep an item until its last store, and the producer is one item ahead
    uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
    typename WgmmaItem<kId>::Type work[kWorkSlots];
    uint8_t seen[2][kPlan.general ? kPlan.block_n : 1];  // does any row of the block see this key? One slot each for two consecutive tiles
};

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void init_barriers(WgmmaSmem<T, kId>& smem, bool page_copies) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kConsumerArrivals = 4 * kPlan.warpgroups * kWarpArrivals;  // one per warp, after its wgmmas have read the buffer
    const int landings = page_copies ? 4 * kWarpArrivals : 1;                // one per producer warp, or one by the copying thread
    mbarrier_init(shared_address(smem.q_full), 1), mbarrier_init(shared_address(smem.q_empty), kConsumerArrivals);
    for (int i = 0; i < kPlan.stages; ++i) {
        mbarrier_init(shared_address(smem.k_full + i), landings), mbarrier_init(shared_address(smem.k_empty + i), kConsumerArrivals);
        mbarrier_init(shared_address(smem.v_full + i), landings), mbarrier_init(shared_address(smem.v_empty + i), kConsumerArrivals);
    }
    for (int i = 0; i < WgmmaSmem<T, kId>::kWorkSlots; ++i)
        mbarrier_init(shared_address(smem.work_full + i), 1), mbarrier_init(shared_address(smem.work_empty + i), kConsumerArrivals);
    fence_mbarrier_init();
}

}  // namespace fa
