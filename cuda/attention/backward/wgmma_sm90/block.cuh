// block.cuh: the shared memory of a block of Hopper's backward, and its barriers.
#pragma once

#include "attention/backward/wgmma_sm90/dq.cuh"
#include "attention/backward/wgmma_sm90/intervals.cuh"
#include "attention/backward/wgmma_sm90/masks.cuh"
#include "attention/backward/wgmma_sm90/options.cuh"
#include "attention/backward/wgmma_sm90/plan.h"
#include "attention/backward/wgmma_sm90/turns.cuh"
#include "attention/backward/wgmma_sm90/work.cuh"

namespace fa {

// What plans with options keep in shared memory, because registers are scarce.
template <int kStages>
struct OptionsSmem {
    uint32_t hidden[kMainWarps];   // which of a warp's 16 keys the mask hides
    AlibiTile alibi[kStages];      // with alibi_slopes: of the tile of Q in the slot
    DropoutTile dropout[kStages];  // in plans with dropout: of the tile of Q in the slot
};

// Plans with dropout: what each main warpgroup keeps of its 64 keys in a tile of Q (kept_bits.h).
template <int kBlockM>
struct alignas(16) KeptBits {
    uint16_t of_warpgroup[2][kKeptCalls * kBlockM];
};

// Tile `it` of bias, with tile `it` of Q, in slot it % kStages of BackwardSmem::bias.
template <int kStages>
struct BiasBarriers {
    uint64_t full[kStages], empty[kStages];
};

// The same in plans for intervals and for masks, with IntervalTile or MaskedTile.
template <typename Tile, int kStages>
struct SkipsSmem {
    uint32_t hidden[kMainWarps];  // which of a warp's 16 keys no query sees
    Tile tile[kStages];           // of the tile of Q in the slot
};

template <typename T, BackwardPlanId kId>
struct alignas(1024) BackwardSmem {
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kColumns = kPlan.columns(), kStages = kPlan.stages;
    static constexpr int kKeyStages = kPlan.key_stages();
    T k[kKeyStages][kBlockN * kColumns], v[kKeyStages][kBlockN * kColumns];
    T q[kStages][kBlockM * kColumns], dout[kStages][kBlockM * kColumns];
    T ds[2][kBlockN * kBlockM];  // a row per key
    union {
        T p[kPlan.general ? kBlockN * kBlockM : 8];  // general: P after dropout, a row per key
        T bias[kPlan.bias() ? kPlan.bias_stages : 1]
              [kPlan.bias() ? kBlockM * kBlockN * (kPlan.bias_float32 ? 2 : 1) : 8];  // a row per query
    };
    alignas(128) std::conditional_t<kPlan.dq_stages != 0, DqStages<kPlan.dq_stages>, char> stages;
    alignas(16) float lse[kStages][kBlockM], delta[kStages][kBlockM];    // in quad order
    alignas(16) uint8_t keep[kPlan.general ? kBlockN / 8 : 1][kBlockM];  // dropout: 8 rows for each warpgroup, kept_bits.h
    uint64_t k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages], q_full[kStages], q_empty[kStages], dout_full[kStages],
        dout_empty[kStages];
    uint64_t ds_full[2], ds_empty[2];
    DqTurns turns;
    WorkListOf<BackwardWorkOf<kId>> list;
    std::conditional_t<
        kPlan.intervals, SkipsSmem<IntervalTile, kStages>,
        std::conditional_t<kPlan.masks, SkipsSmem<MaskedTile, kStages>, std::conditional_t<kPlan.options, OptionsSmem<kStages>, char>>>
        options;
    std::conditional_t<kPlan.dropout, KeptBits<kBlockM>, char> kept;
    std::conditional_t<kPlan.bias(), BiasBarriers<kPlan.bias() ? kPlan.bias_stages : 1>, char> bias_barriers;
};

template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void init_barriers(BackwardSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    const auto init = [](auto& barriers, int count) {
        for (uint64_t& barrier : barriers) mbarrier_init(shared_address(&barrier), count);
    };
    init(smem.k_full, 1), init(smem.v_full, 1), init(smem.keys_empty, (kMainWarps + kDqWarps) * kWarpArrivals);
    init(smem.list.full, 1), init(smem.list.empty, WorkList::kReaders);
    mbarrier_init(shared_address(&smem.list.asked), 1);
    init(smem.q_full, 1), init(smem.q_empty, kMainWarps * kWarpArrivals);
    init(smem.dout_full, 1), init(smem.dout_empty, kMainWarps * kWarpArrivals);
    init(smem.ds_full, kMainWarps * kWarpArrivals), init(smem.ds_empty, kDqWarps * kWarpArrivals);
    init_turns(smem.turns, 1);
    if constexpr (kPlan.dq_stages != 0) init(smem.stages.full, kDqWarps * kWarpArrivals), init(smem.stages.empty, 1);
    if constexpr (kPlan.bias()) init(smem.bias_barriers.full, 1), init(smem.bias_barriers.empty, kMainWarps * kWarpArrivals);
    fence_mbarrier_init();
}

}  // namespace fa
