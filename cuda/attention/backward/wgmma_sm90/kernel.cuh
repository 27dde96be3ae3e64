// wgmma_sm90/kernel.cuh: the gradients of attention at Hopper's speed, fp16 and bf16, head dims up to 128. New against mma_sm80/kernel.cuh:
// TMA, wgmma, warp specialisation, persistent blocks.
//
// Each block repeatedly takes 128 keys of one key head from a counter. It walks over every query tile that sees them, of every query head
// of the group, or over a part of these (walk_parts.h); dK and dV stay in registers. All scores are transposed: rows are keys, columns are
// queries. P^T and dS^T are then A operands without rearrangement.
//
//     warp 0, one thread       takes the next keys, loads K and V -> WorkList, k_full, v_full/keys_empty
//     warp 1, one thread       loads tiles of Q with lse and of dout with delta -> q_full/q_empty, dout_full/dout_empty; it runs ahead into
//                              the tiles of the next keys
//     main warpgroups 1, 2     S = K Q^T       P = 2^(scale S - lse), under dP = V dout^T      dS = P (dP - delta) -> slot of ds, under
//     64 keys each             dV += P dout    dK += dS Q, with S of the next tile
//                                 |  ds_full/ds_empty
//     warpgroup 3              dQ = dS^T K, in pieces of 64 queries x 64 columns, added to the float sums in global memory when it is the
//     warps 2, 3, one thread   block's turn: wgmma_sm90/turns.cuh, wgmma_sm90/dq.cuh
//
//     full: the data is there. empty: every reading warp has arrived once. Each slot has both; slots are used in turn, from 0.
//
// The main warpgroups never wait for each other: they drift apart and fill each other's gaps. dQ needs the dS of both and would tie them
// together, so a separate warpgroup computes it. The accumulators of a product cannot be read until all products issued with it are
// complete. The products therefore come in two batches, {dP, dV} and {S of the next tile, dK}, and all products are drained twice per tile.
// Where registers are scarce, dP is drained alone, too.
//
// One block for every 128 keys would compute the same, but starting and ending a block costs as much as two to three tiles. With a causal
// mask on an H200 that took 18 % longer at seqlen 512 and head dim 64 (where a second K and V fit), 9 % at seqlen 512 and head dim 128, and
// 3 % at seqlen 2048.
//
// Plans with options (wgmma_sm90/options.cuh) share this code and its tiles. They are instantiations of their own, because a branch in the
// loop would cost the bare plans 1 to 3 % (H200). They change S of the next tile while dK is multiplied. General plans keep P and the
// factor of dP - delta apart (wgmma_sm90/scores.cuh).
//
// Bound by shared memory: on an H200 at head dim 128 (seqlen 16384), it is busy 86 % of the time, the tensor cores 77 %. Short sequences
// are bound by the memory traffic of the kernels before and after, wgmma_sm90/rows.cu.
#pragma once

#include "attention/backward/wgmma_sm90/block.cuh"
#include "attention/backward/wgmma_sm90/dq.cuh"
#include "attention/backward/wgmma_sm90/launch.cuh"
#include "attention/backward/wgmma_sm90/loads.cuh"
#include "attention/backward/wgmma_sm90/main.cuh"

namespace fa {

// ---- the loading warpgroup, one thread of each warp ----

// Warp 0: takes one set of keys after another, publishes it in the WorkList, and loads it.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void take_and_load_keys(const CUtensorMap& map_k, const CUtensorMap& map_v, const AttentionParams& p,
                                                   const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kKeyStages = kPlan.key_stages();
    const auto load_keys = [&](const BackwardWork& w, uint32_t slot) {
        const int row = w.k_row + w.key0, head = w.head_k / schedule.head_parts, batch = p.cu_seqlens_q ? 0 : w.batch;
        const uint32_t k_full = shared_address(&smem.k_full[slot]), v_full = shared_address(&smem.v_full[slot]);
        mbarrier_arrive_expect_tx(k_full, sizeof smem.k[slot]);
        load_tile(map_k, schedule.k_loads, 0, smem.k[slot], kBlockN, k_full, row, head, batch, kEvictFirst);
        mbarrier_arrive_expect_tx(v_full, sizeof smem.v[slot]);
        load_tile(map_v, schedule.v_loads, 0, smem.v[slot], kBlockN, v_full, row, head, batch, kEvictFirst);
    };
    // Deterministic: a block waits for key blocks of lower numbers, so these must belong to thread blocks that already run. If the GPU does
    // not hold the whole grid at once, blockIdx does not promise that. The counter does, so it gives the first number, too.
    const int given = schedule.in_order ? 0 : int(gridDim.x);
    const auto take = [&] { return given + atomicAdd(schedule.tiles.taken(), 1); };
    int index = schedule.in_order ? take() : int(blockIdx.x);
    uint32_t it0 = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        BackwardWorkOf<kId>& w = smem.list.work[n & 1];
        const bool large = corrects_large_rows<kId>(schedule.tiles);
        mbarrier_wait(shared_address(&smem.list.empty[n & 1]), n >> 1 & 1 ^ 1);
        while (index < schedule.blocks && !find_key_block<kBlockM, kBlockN>(p, schedule, index, w)) index = take();
        w.valid = index < schedule.blocks, w.it0 = it0;
        if (large) w.mask_place = w.kEveryTile;
        if constexpr (kPlan.intervals) {
            if (w.valid) leave_out_hidden<kBlockM, kBlockN>(p, schedule, w);
        } else if constexpr (kPlan.masks) {
            if (w.valid) list_seen_tiles<kBlockN>(p, schedule, w);
        } else if constexpr (kPlan.options)
            if (w.valid && schedule.tiles.skipped && all_hidden<kBlockN>(p, w)) w.rounds = 0;
        mbarrier_arrive(shared_address(&smem.list.full[n & 1]));
        if (index >= schedule.blocks) return end_direct(schedule.tiles, gridDim.x);
        it0 += count_tiles(w);
        mbarrier_wait(shared_address(&smem.keys_empty[n % kKeyStages]), n / kKeyStages & 1 ^ 1);
        load_keys(w, n % kKeyStages);
        mbarrier_wait(shared_address(&smem.list.asked), n & 1);
        index = take();
    }
}

// Writes what ALiBi needs to know of a tile of Q, once its slot is free.
template <BackwardPlanId kId, typename T>
__device__ __forceinline__ void describe_alibi(const AttentionParams& p, const BackwardWork& w, BackwardSmem<T, kId>& smem, uint32_t it,
                                               Visited at) {
    constexpr int kStages = kBackwardPlan<kId>.stages;
    const AlibiTile alibi = alibi_tile<kBackwardPlan<kId>.block_m>(p, w, at);
    mbarrier_wait(shared_address(&smem.q_empty[it % kStages]), it / kStages & 1 ^ 1);
    smem.options.alibi[it % kStages] = alibi;
}

// The same for dropout.
template <BackwardPlanId kId, typename T>
__device__ __forceinline__ void describe_dropout(const AttentionParams& p, const BackwardWork& w, BackwardSmem<T, kId>& smem, uint32_t it,
                                                 Visited at) {
    constexpr int kStages = kBackwardPlan<kId>.stages;
    const DropoutOrigin origin = dropout_origin(p, w.batch);
    mbarrier_wait(shared_address(&smem.q_empty[it % kStages]), it / kStages & 1 ^ 1);
    smem.options.dropout[it % kStages] = {origin.row + uint32_t(at.m * kBackwardPlan<kId>.block_m),
                                          origin.head + uint32_t(w.head_k * p.group + at.head), origin.sequence,
                                          origin.calls + dropout_call(uint32_t(w.key0))};
}

// Warp 1: loads the query tiles of the walk.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_queries(const CUtensorMap& map_q, const CUtensorMap& map_dout, const AttentionParams& p,
                                             const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem,
                                             const CUtensorMap* map_bias = nullptr) {
    for_each_work(smem.list, [&](const BackwardWorkOf<kId>& w, uint32_t n) {
        const auto visit = [&](uint32_t it, auto at, uint32_t tile) {
            const int row = w.q_row + at.m * kBackwardPlan<kId>.block_m, head = w.head_k * p.group + at.head;
            const int batch = p.cu_seqlens_q ? 0 : w.batch;
            if constexpr (kBackwardPlan<kId>.intervals) {
                constexpr int kStages = kBackwardPlan<kId>.stages;
                const IntervalTile seen = describe_tile<kBackwardPlan<kId>.block_m>(p, w, at);  // while the slot is in use
                mbarrier_wait(shared_address(&smem.q_empty[it % kStages]), it / kStages & 1 ^ 1);
                smem.options.tile[it % kStages] = seen;
            } else if constexpr (kBackwardPlan<kId>.masks) {
                constexpr int kStages = kBackwardPlan<kId>.stages;
                const MaskedTile seen = describe_tile<kBackwardPlan<kId>.block_m, kBackwardPlan<kId>.block_n>(schedule.masks, w, at);
                mbarrier_wait(shared_address(&smem.q_empty[it % kStages]), it / kStages & 1 ^ 1);
                smem.options.tile[it % kStages] = seen;
            } else if constexpr (kBackwardPlan<kId>.options)
                if (p.alibi_slopes) describe_alibi<kId>(p, w, smem, it, at);
            if constexpr (kBackwardPlan<kId>.dropout) describe_dropout<kId>(p, w, smem, it, at);
            load_query_tile(map_q, schedule.q_loads, smem.q, schedule.tiles.lse, smem.lse, smem.q_full, smem.q_empty, it, row, head, batch,
                            tile);
            if constexpr (kBackwardPlan<kId>.bias())
                load_bias<kId>(*map_bias, p, smem.bias, smem.bias_barriers, it, at.m * kBackwardPlan<kId>.block_m, w.key0, head, w.batch);
            load_query_tile(map_dout, schedule.dout_loads, smem.dout, schedule.tiles.delta, smem.delta, smem.dout_full, smem.dout_empty, it,
                            row, head, batch, tile);
        };
        for_each_query_tile(p, schedule.tiles, w, visit);
        mbarrier_arrive(shared_address(&smem.list.asked));
        release_work(smem.list, n);
    });
}

// Warp 2: takes the turns at the query tiles, unless warp 3 takes them itself. In order with dq_stages, it sends every other tile.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void take_turns_ahead(const BackwardParams& b, const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    for_each_work(smem.list, [&](const BackwardWorkOf<kId>& w, uint32_t n) {
        if constexpr (kBackwardPlan<kId>.dq_stages != 0) {
            if (schedule.in_order) copy_dq_in_order<kId>(b, schedule.tiles, w, smem.stages, 0);
        } else if (takes_turns(b, schedule.tiles)) {
            take_turns<kPlan.block_m, kPlan.block_n, 1>(b, schedule.tiles, w, smem.turns, 0);
        }
        release_work(smem.list, n);
    });
}

// Warp 3: counts the block's dQ of a query tile as added; with dq_stages it also sends dQ.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void publish_dq(const BackwardParams& b, const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem) {
    for_each_work(smem.list, [&](const BackwardWorkOf<kId>& w, uint32_t n) {
        if constexpr (kBackwardPlan<kId>.dq_stages != 0) {
            if (schedule.in_order) copy_dq_in_order<kId>(b, schedule.tiles, w, smem.stages, 1);
            else copy_dq<kId>(b, schedule.tiles, w, smem.stages);
        } else if (takes_turns(b, schedule.tiles)) {
            publish_turns<1>(b, schedule.tiles, w, smem.turns, 0, count_tiles(w));
        }
        release_work(smem.list, n);
    });
}

// ---- dQ's warpgroup: dQ = dS^T K ----

template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void multiply_dq(const BackwardParams& b, const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kKeyStages = kPlan.key_stages(), kPieces = kPlan.block_m / 64 * kPlan.dq_chunks();
    constexpr bool kStaged = kPlan.dq_stages != 0, kStores = !kPlan.masks && !kPlan.intervals;
    const int lane = threadIdx.x % 32;
    const auto wait = [&](uint32_t it) { mbarrier_wait(shared_address(&smem.ds_full[it & 1]), it >> 1 & 1); };
    const auto release = [&](uint32_t it) {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(shared_address(&smem.ds_empty[it & 1]));
    };
    for_each_work(smem.list, [&](const BackwardWorkOf<kId>& w, uint32_t n) {
        const uint32_t slot = n % kKeyStages, tiles = uniform(count_tiles(w)), it0 = uniform(w.it0);
        mbarrier_wait(shared_address(&smem.k_full[slot]), n / kKeyStages & 1);
        if (kStores && schedule.tiles.direct)
            store_dq<T, kId, 0, kPieces>(b, schedule.tiles, w, smem.k[slot], smem.ds[0], tiles, wait, release);
        else if constexpr (kStaged) stage_dq<T, kId>(smem.stages, smem.k[slot], smem.ds[0], tiles, wait, release, it0);
        else send_dq<T, kId, 0, kPieces>(b, schedule.tiles, w, smem.turns, smem.k[slot], smem.ds[0], tiles, wait, release);
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(shared_address(&smem.keys_empty[slot])), release_work(smem.list, n);
        __syncwarp();
    });
}

// ---- the kernel ----

template <typename T, BackwardPlanId kId>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                          const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                          const __grid_constant__ BackwardParams b, const __grid_constant__ BackwardSchedule schedule) {
    using Smem = BackwardSmem<T, kId>;
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr bool kHalf = std::is_same_v<T, __half>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    const AttentionParams& p = b.forward;
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v), prefetch_tensormap(&map_dout);
        init_barriers(smem);
    }
    __syncthreads();

    if (warpgroup == 0) {  // loads and turns, one thread each
        setmaxnreg_dec<kBackwardLoaderRegisters>();
        if (threadIdx.x % 32 != 0) return;
        if (threadIdx.x == 0) take_and_load_keys(map_k, map_v, p, schedule, smem);
        else if (threadIdx.x == 32) load_queries(map_q, map_dout, p, schedule, smem);
        else if (threadIdx.x == 64 || schedule.tiles.direct) take_turns_ahead(b, schedule, smem);  // `direct`: nothing to count
        else publish_dq(b, schedule, smem);
        return;
    }
    if (warpgroup == 3) {
        setmaxnreg_dec<kPlan.dq_registers(kHalf)>();
        multiply_dq(b, schedule, smem);
        return;
    }
    setmaxnreg_inc<kPlan.main_registers(kHalf)>();
    MainWarpgroup<T, kId>(b, schedule, smem, warpgroup - 1).run();
}

// The same for plans with a bias.
template <typename T, BackwardPlanId kId>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_bias_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                               const __grid_constant__ CUtensorMap map_bias, const __grid_constant__ BackwardParams b,
                               const __grid_constant__ BackwardSchedule schedule) {
    using Smem = BackwardSmem<T, kId>;
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr bool kHalf = std::is_same_v<T, __half>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    const AttentionParams& p = b.forward;
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v), prefetch_tensormap(&map_dout);
        prefetch_tensormap(&map_bias);
        init_barriers(smem);
    }
    __syncthreads();

    if (warpgroup == 0) {  // loads and turns, one thread each
        setmaxnreg_dec<kBackwardLoaderRegisters>();
        if (threadIdx.x % 32 != 0) return;
        if (threadIdx.x == 0) take_and_load_keys(map_k, map_v, p, schedule, smem);
        else if (threadIdx.x == 32) load_queries(map_q, map_dout, p, schedule, smem, &map_bias);
        else if (threadIdx.x == 64 || schedule.tiles.direct) take_turns_ahead(b, schedule, smem);  // `direct`: nothing to count
        else publish_dq(b, schedule, smem);
        return;
    }
    if (warpgroup == 3) {
        setmaxnreg_dec<kPlan.dq_registers(kHalf)>();
        multiply_dq(b, schedule, smem);
        return;
    }
    setmaxnreg_inc<kPlan.main_registers(kHalf)>();
    MainWarpgroup<T, kId>(b, schedule, smem, warpgroup - 1).run();
}

template <typename T, BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    if constexpr (kBackwardPlan<kId>.bias()) {
        BackwardParams call;
        CUtensorMap map_bias;
        if (cudaError_t error = prepare_bias<kId>(b, &call, &map_bias, stream)) return error;
        return launch_backward_block<T, kId>(backward_wgmma_bias_kernel<T, kId>, sizeof(BackwardSmem<T, kId>), call, multiprocessors,
                                             stream, map_bias);
    } else {
        return launch_backward_block<T, kId>(backward_wgmma_kernel<T, kId>, sizeof(BackwardSmem<T, kId>), b, multiprocessors, stream);
    }
}
template <BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch_backward_wgmma<__half, kId>(b, multiprocessors, stream)
                                              : launch_backward_wgmma<__nv_bfloat16, kId>(b, multiprocessors, stream);
}

}  // namespace fa
