// wgmma_pair_sm90/kernel.cuh: the Hopper backward for head dims above 128. New against wgmma_sm90/kernel.cuh: two blocks share 128 keys.
//
// The gradients of 128 keys no longer fit into the registers of one multiprocessor. Blocks of 64 keys would send twice as much dQ to L2,
// which adds 15 bytes a clock for each multiprocessor. So a cluster of two blocks owns 128 keys, and each block computes half of the
// products:
//     block 0, "keys": K, Q                                       block 1, "values": V, dout
//     S = K Q^T          P = 2^(scale S - lse)    -> p            dP = V dout^T      dV += P dout
//     dK += dS Q                                  <- ds           dS = P (dP - delta)
//     dQ = dS^T K, the first columns                              dQ = dS^T K, the other columns
//
// P crosses over as registers (st.async), from each thread to the same thread of the other block, because both products have the same
// fragment layout. dS crosses over as the 16 rows of each warp (cp.async.bulk), from the slot that block 1 reads itself. No block loads
// what the other one has, except the columns of K that dQ needs. In each block:
//
//     warp 0, one thread      loads K | V and some columns of K, once; then tiles of Q with lse | of dout with delta
//     warps 1, 2, one thread  the turns of dQ (wgmma_sm90/turns.cuh)
//     main warpgroups 1, 2   64 keys each; dK runs one tile late, so that dS has time to arrive
//     warpgroup 3            dQ in pieces of 64 queries x 64 columns, added from registers to the float sums in global memory
//
//     full: the data is there. empty: every reading warp has arrived once. All scores are transposed, as in wgmma_sm90/kernel.cuh. A block
//     arrives at a barrier of the other block only if that block will still wait for it: otherwise the other block may have ended.
//
// Plans with options share this code (wgmma_sm90/options.cuh). Block 0 changes S before the exponential, and loads the tiles of a bias,
// with warp 3; softcap's derivative is found by block 1, from P and lse. Block 1 also draws dropout's bits, before P comes, and drops P
// after dS. Keys that no query sees are zeroed in K and V, have P = 0, and get no gradient.
//
// Bound by sending P to the other block and dS back. On an H200 (seqlen 4096), tensor cores, shared memory and L2 are each busy between 50
// and 65 % of the time. Beyond head dim 128, single blocks of 64 keys kept L2 busy 90 % of the time.
#pragma once

#include "attention/backward/wgmma_pair_sm90/keys.cuh"
#include "attention/backward/wgmma_pair_sm90/values.cuh"
#include "attention/backward/wgmma_sm90/dq.cuh"
#include "attention/backward/wgmma_sm90/launch.cuh"
#include "attention/backward/wgmma_sm90/loads.cuh"

namespace fa {

// ---- the loading warpgroup, one thread of each warp ----

// Plans with options: writes what the main warpgroups of block 0 need to know of a tile of Q, once its slot is free.
template <typename T, BackwardPlanId kId, typename At>
__device__ __forceinline__ void describe_query_tile(const AttentionParams& p, const BackwardSchedule& schedule,
                                                    BackwardPairSmem<T, kId>& smem, uint32_t it, const At& at) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    if constexpr (kPlan.options) {
        constexpr int kQStages = kPlan.pair_q_stages();
        auto& keys = smem.keys;
        const uint32_t slot = it % kQStages;
        const auto put = [&](auto& place, const auto& tile) {
            mbarrier_wait(shared_address(&keys.q_empty[slot]), it / kQStages & 1 ^ 1);
            place = tile;
        };
        if constexpr (kPlan.intervals) put(keys.options.tile[slot], describe_tile<kPlan.block_m>(p, smem.work, at));
        else if constexpr (kPlan.masks)
            put(keys.options.tile[slot], describe_tile<kPlan.block_m, kPlan.block_n>(schedule.masks, smem.work, at));
        else if (!kPlan.softcap && !kPlan.bias() && p.alibi_slopes)
            put(keys.options.alibi[slot], alibi_tile<kPlan.block_m>(p, smem.work, at));
    }
}
// The same of a tile of dout, for those of block 1. Softcap also loads lse; it arrives at dout_full beside the load of dout.
template <typename T, BackwardPlanId kId, typename At>
__device__ __forceinline__ void describe_dout_tile(const BackwardSchedule& schedule, BackwardPairSmem<T, kId>& smem, uint32_t it,
                                                   const At& at, uint32_t tile) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr bool kSkips = kPlan.intervals || kPlan.masks;
    if constexpr (kPlan.softcap || kSkips) {
        auto& values = smem.values;
        const uint32_t slot = it & 1, full = shared_address(&values.dout_full[slot]);
        mbarrier_wait(shared_address(&values.dout_empty[slot]), it >> 1 & 1 ^ 1);
        if constexpr (kSkips) values.place[slot] = at.m * smem.work.width;
        if constexpr (kPlan.softcap) {
            mbarrier_arrive_expect_tx(full, sizeof values.lse[slot]);
            bulk_load(shared_address(values.lse[slot]), schedule.tiles.lse + int64_t(tile) * kPlan.block_m, sizeof values.lse[slot], full);
        }
    }
}

// Warp 0: the operands of the block, and the tiles of the walk.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_keys_block(const PairMaps& maps, const AttentionParams& p, const BackwardSchedule& schedule,
                                                BackwardPairSmem<T, kId>& smem, int batch) {
    auto& keys = smem.keys;
    const auto& w = smem.work;
    const uint32_t full = shared_address(&keys.k_full);
    mbarrier_arrive_expect_tx(full, sizeof keys.k);
    load_tile(maps.k, schedule.k_loads, 0, keys.k, kBackwardPlan<kId>.block_n, full, w.k_row + w.key0, w.head_k / schedule.head_parts,
              batch, kEvictFirst);
    load_query_tiles(p, schedule, w, maps.q, schedule.q_loads, keys.q, schedule.tiles.lse, keys.lse, keys.q_full, keys.q_empty,
                     [&](uint32_t it, const auto& at, uint32_t) { describe_query_tile(p, schedule, smem, it, at); });
}
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_values_block(const PairMaps& maps, const AttentionParams& p, const BackwardSchedule& schedule,
                                                  BackwardPairSmem<T, kId>& smem, int batch) {
    constexpr int kBlockN = kBackwardPlan<kId>.block_n, kKeysChunks = kBackwardPlan<kId>.dq_chunks_of_keys();
    auto& values = smem.values;
    const auto& w = smem.work;
    const uint32_t full = shared_address(&values.v_full);
    mbarrier_arrive_expect_tx(full, sizeof values.v + sizeof values.k);
    load_tile(maps.v, schedule.v_loads, 0, values.v, kBlockN, full, w.k_row + w.key0, w.head_k / schedule.head_parts, batch, kEvictFirst);
    load_tile(maps.k, schedule.k_loads - kKeysChunks, kKeysChunks, values.k, kBlockN, full, w.k_row + w.key0,
              w.head_k / schedule.head_parts, batch, kEvictFirst);
    load_query_tiles(p, schedule, w, maps.dout, schedule.dout_loads, values.dout, schedule.tiles.delta, values.delta, values.dout_full,
                     values.dout_empty,
                     [&](uint32_t it, const auto& at, uint32_t tile) { describe_dout_tile(schedule, smem, it, at, tile); });
}

// Plans with a bias. Warp 3 of block 0: the tiles of bias of the walk.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_bias_tiles(const CUtensorMap& map, const AttentionParams& p, const BackwardSchedule& schedule,
                                                BackwardPairSmem<T, kId>& smem) {
    auto& keys = smem.keys;
    const auto& w = smem.work;
    for_each_query_tile(p, schedule.tiles, w, [&](uint32_t it, const auto& at, uint32_t) {
        load_bias<kId>(map, p, keys.bias, keys.bias_barriers, it, at.m * kBackwardPlan<kId>.block_m, w.key0, w.head_k * p.group + at.head,
                       w.batch);
    });
}

// Warps 1 and 2: the turns at the query tiles.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void keep_turns(const BackwardParams& b, const BackwardSchedule& schedule, BackwardPairSmem<T, kId>& smem,
                                           uint32_t rank, int tiles) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    if (!takes_turns(b, schedule.tiles)) return;
    if (threadIdx.x == 32 && (rank == 0 || schedule.in_order))
        take_turns<kPlan.block_m, kPlan.block_n, 2>(b, schedule.tiles, smem.work, smem.turns, rank);
    if (threadIdx.x == 64) publish_turns<2>(b, schedule.tiles, smem.work, smem.turns, rank, tiles);
}

// ---- dQ's warpgroup: dQ = dS^T K, of each block some of the columns ----

template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void multiply_dq(const BackwardParams& b, const BackwardSchedule& schedule, BackwardPairSmem<T, kId>& smem,
                                            uint32_t rank, int lane) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kFirst = kPlan.dq_chunks_of_keys();
    auto& keys = smem.keys;
    auto& values = smem.values;
    const auto& w = smem.work;
    const int tiles = count_tiles(w);
    const auto wait = [](auto& full, uint32_t it) {
        for (uint64_t& half : full[it & 1]) mbarrier_wait(shared_address(&half), it >> 1 & 1);
    };
    constexpr bool kStores = !kPlan.masks && !kPlan.intervals;
    const auto wait_of_keys = [&](uint32_t it) { wait(keys.ds_full, it); };
    const auto wait_of_values = [&](uint32_t it) { wait(values.ds_full, it); };
    const auto release_of_keys = [&](uint32_t it) {
        if (it + 2 < uint32_t(tiles)) arrive_there_as_warp(lane, values.ds_empty_there[it & 1], kValuesBlock);
    };
    const auto release_of_values = [&](uint32_t it) { arrive_as_warp(lane, shared_address(&values.ds_empty[it & 1])); };
    constexpr int kSecond = kPlan.dq_chunks() - kFirst;
    if (kStores && schedule.tiles.direct) {
        if (rank == kKeysBlock) store_dq<T, kId, 0, kFirst>(b, schedule.tiles, w, keys.k, keys.ds[0], tiles, wait_of_keys, release_of_keys);
        else store_dq<T, kId, kFirst, kSecond>(b, schedule.tiles, w, values.k, values.ds[0], tiles, wait_of_values, release_of_values);
    } else if (rank == kKeysBlock)
        send_dq<T, kId, 0, kFirst>(b, schedule.tiles, w, smem.turns, keys.k, keys.ds[0], tiles, wait_of_keys, release_of_keys);
    else
        send_dq<T, kId, kFirst, kSecond>(b, schedule.tiles, w, smem.turns, values.k, values.ds[0], tiles, wait_of_values,
                                         release_of_values);
}

// ---- the kernel ----

// map_bias: of plans with a bias.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void run_pair(const PairMaps& maps, [[maybe_unused]] const CUtensorMap* map_bias, const BackwardParams& b,
                                         const BackwardSchedule& schedule) {
    using Smem = BackwardPairSmem<T, kId>;
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr bool kHalf = std::is_same_v<T, __half>;
    static_assert(kPlan.block_m == 64 && kPlan.block_n == 128, "one descriptor base serves every tile");
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");

    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const uint32_t rank = cluster_rank();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    const int lane = threadIdx.x % 32;
    const BackwardWork& w = smem.work;
    begin_pair(maps, b, schedule, smem, rank);
    if (!w.valid) return;

    if (warpgroup == 0) {
        setmaxnreg_dec<kBackwardLoaderRegisters>();
        const int tiles = count_tiles(w);
        if (lane != 0 || tiles == 0) return;
        if constexpr (kPlan.bias()) {
            if (threadIdx.x == 96) {
                if (rank == kKeysBlock) load_bias_tiles(*map_bias, b.forward, schedule, smem);
                return;
            }
        }
        if (threadIdx.x > 0) {
            keep_turns(b, schedule, smem, rank, tiles);
            return;
        }
        const int batch = b.forward.cu_seqlens_q ? 0 : w.batch;
        if (rank == kKeysBlock) load_keys_block(maps, b.forward, schedule, smem, batch), end_direct(schedule.tiles, gridDim.x / 2);
        else load_values_block(maps, b.forward, schedule, smem, batch);
        return;
    }
    if (warpgroup == 3) {
        setmaxnreg_dec<kPlan.dq_registers(kHalf)>();
        multiply_dq(b, schedule, smem, rank, lane);
        return;
    }
    setmaxnreg_inc<kPlan.main_registers(kHalf)>();
    const int wg = warpgroup - 1, quad = lane % 4;
    if (rank == kKeysBlock) {
        PairKeysMain<T, kId>(b, schedule, smem, wg).run(quad);
        return;
    }
    PairValuesMain<T, kId>(b, schedule, smem, wg).run();
}

template <typename T, BackwardPlanId kId>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_pair_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                               const __grid_constant__ BackwardParams b, const __grid_constant__ BackwardSchedule schedule) {
    run_pair<T, kId>({map_q, map_k, map_v, map_dout}, nullptr, b, schedule);
}

// The same for plans with a bias.
template <typename T, BackwardPlanId kId>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_pair_bias_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                                    const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                                    const __grid_constant__ CUtensorMap map_bias, const __grid_constant__ BackwardParams b,
                                    const __grid_constant__ BackwardSchedule schedule) {
    run_pair<T, kId>({map_q, map_k, map_v, map_dout}, &map_bias, b, schedule);
}

template <typename T, BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    constexpr int kBytes = sizeof(BackwardPairSmem<T, kId>);
    if constexpr (kBackwardPlan<kId>.bias()) {
        BackwardParams call;
        CUtensorMap map_bias;
        if (cudaError_t error = prepare_bias<kId>(b, &call, &map_bias, stream)) return error;
        return launch_backward_block<T, kId>(backward_wgmma_pair_bias_kernel<T, kId>, kBytes, call, multiprocessors, stream, map_bias);
    } else {
        return launch_backward_block<T, kId>(backward_wgmma_pair_kernel<T, kId>, kBytes, b, multiprocessors, stream);
    }
}
template <BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch_backward_wgmma<__half, kId>(b, multiprocessors, stream)
                                              : launch_backward_wgmma<__nv_bfloat16, kId>(b, multiprocessors, stream);
}

}  // namespace fa
