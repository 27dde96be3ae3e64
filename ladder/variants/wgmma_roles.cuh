// wgmma_roles.cuh: shared parts of the variants of wgmma_sm90: a block with its own roles, a consumer that does one thing after another,
// and the launch of a variant.
#pragma once

#include "attention/forward/wgmma_sm90/kernel.cuh"
#include "ladder/variants/variant.h"

namespace fa {

using Bf16 = __nv_bfloat16;

// The block of forward_wgmma_kernel: sets the barriers up, then runs produce(smem) in one thread and consume(smem, me) in the other
// warpgroups.
template <typename T, WgmmaPlanId kId, bool kMovesRegisters, typename Produce, typename Consume>
__device__ __forceinline__ void run_roles(const Produce& produce, const Consume& consume) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    using Smem = WgmmaSmem<T, kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    static_assert(!kPlan.general && !kPlan.paged, "plain calls alone");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) init_barriers(smem, false);
    __syncthreads();
    if (warpgroup == 0) {
        if constexpr (kMovesRegisters) setmaxnreg_dec<kPlan.producer_registers()>();
        if (threadIdx.x == 0) produce(smem);
        return;
    }
    if constexpr (kMovesRegisters) setmaxnreg_inc<kPlan.consumer_registers()>();
    consume(smem, Consumer{warpgroup - 1, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)});
}

// A consumer without overlap: S = Q K^T, then the softmax, then O += P V, each to its end. Only the copies run at the same time.
template <typename T, WgmmaPlanId kId, typename Waits = ConsumerWaits<kId>>
__device__ __forceinline__ void consume_in_order(const AttentionParams& p, WgmmaSmem<T, kId>& smem, const Consumer& me,
                                                 Waits wait = Waits()) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n;
    static_assert(!kPlan.q_in_registers && !kPlan.ping_pong && kPlan.maximum == RowMaximum::kLazy, "no part of it is in this loop");
    const uint64_t k_step = descriptor_step(sizeof smem.k[0]), v_step = descriptor_step(sizeof smem.v[0]);
    float S[kBlockN / 2], O[kPlan.headdim_v / 2];
    uint32_t P[kBlockN / 4], no_q[1] = {};
    RowStatistics rows;
    Ring<1> q(smem.q_full, smem.q_empty);
    Ring<kPlan.stages> k(smem.k_full, smem.k_empty), v(smem.v_full, smem.v_empty);
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    const uint64_t desc_q = wgmma_descriptor(shared_address(smem.q) + me.wg * sizeof smem.q[0], 16),
                   desc_k = wgmma_descriptor(shared_address(smem.k), 16),
                   desc_v = wgmma_descriptor(shared_address(smem.v), kBlockN * kChunkRowBytes);
    const float scale_log2 = p.scale * kLog2e;

    for (;;) {
        wait.item(work);
        const ForwardWork& w = smem.work[work.slot];
        if (w.state == WorkState::kEnd) return;
        const MaskedTiles masked = masked_tiles<kId>(w, me.wg);
        const int last_tile = w.last_tile;
#pragma unroll
        for (int i = 0; i < kPlan.headdim_v / 2; ++i) O[i] = 0.0f;
        q.wait_full();
#pragma unroll 1
        for (int n = last_tile; n >= 0; --n) {
            wait.keys(k, n);
            wait.turn(me.wg, n);
            multiply_qk<T, kId>(S, no_q, desc_q, desc_k + k.slot * k_step);
            wait.first_scores(S, n);
            k.release(me.lane);
            mask_scores<kId>(S, w, masked, n, me);
            if (n == last_tile) {
                softmax_first<kId>(S, exponent_of_products(scale_log2), rows);
                zero_values_outside<kBlockN>(p, w, n, smem.v, v, me.wg);
            } else if (softmax_lazy<kId>(S, exponent_of_products(scale_log2), rows)) {
                rescale_output(O, rows.o_scale);
            }
            pack_probabilities<T>(P, S);
            wait.values(v, n);
            multiply_pv<T>(O, P, desc_v + v.slot * v_step);
            wait.last_product(O, n);
            v.release(me.lane);
        }
        q.release(me.lane);
        finish_rows<T, kId>(p, w, O, rows, me);
        __syncwarp();
        if (arrives(me.lane)) mbarrier_arrive(work.empty_barrier());
        work.next();
    }
}

template <typename T, WgmmaPlanId kId, bool kMovesRegisters>
__global__ void __launch_bounds__(128 * (kWgmmaPlan<kId>.warpgroups + 1), 1)
    in_order_wgmma_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                          const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                          const __grid_constant__ WgmmaSchedule schedule) {
    run_roles<T, kId, kMovesRegisters>(
        [&](WgmmaSmem<T, kId>& smem) { produce(map_q, p, schedule, smem, ThreadTiles<T, kId>(map_k, map_v, p, schedule, smem)); },
        [&](WgmmaSmem<T, kId>& smem, const Consumer& me) { consume_in_order(p, smem, me); });
}

// How a variant distributes its work items over blocks.
enum class Grid {
    kBlockPerItem,             // a block computes 64 rows for each consumer warpgroup and ends; blocks start head by head
    kBlockPerItemLongestFirst  // the same; of the heads that share L2 the items with most keys start first
};
template <WgmmaPlanId kId, Grid kGrid>
ForwardWorkList block_per_item(const AttentionParams& p, int multiprocessors) {
    ForwardWorkList list = forward_work_list(p, kWgmmaPlan<kId>.block_m(), multiprocessors);
    add_leading_sections(p, multiprocessors, &list);
    list.blocks = list.items, list.order = WorkOrder::kStride, list.counter = nullptr;
    if (kGrid == Grid::kBlockPerItem) list.longest_first = false;
    return list;
}

// A variant of plan kId, without its name and its launch.
template <WgmmaPlanId kId>
Variant wgmma_variant(const char* experiment, int order, std::string about, WgmmaKernel kernel) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    Variant v;
    v.experiment = experiment, v.kernel = "wgmma_sm90", v.about = std::move(about), v.order = order, v.headdim = kPlan.headdim;
    v.tile_m = kPlan.block_m(), v.tile_n = kPlan.block_n, v.stages = kPlan.stages, v.threads = 128 * (kPlan.warpgroups + 1);
    v.shared_bytes = sizeof(WgmmaSmem<Bf16, kId>), v.compute = 90, v.copies = true;
    v.function = reinterpret_cast<const void*>(kernel);
    v.workspace = [](const AttentionParams&, int) -> size_t { return 0; };
    return v;
}

}  // namespace fa
