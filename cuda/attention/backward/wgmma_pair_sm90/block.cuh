// block.cuh: the shared memory of the two blocks that share 128 keys, how they begin, and what their main warpgroups have in common.
#pragma once

#include "attention/backward/wgmma_sm90/block.cuh"
#include "attention/backward/wgmma_sm90/plan.h"
#include "attention/backward/wgmma_sm90/turns.cuh"
#include "attention/backward/wgmma_sm90/work.cuh"
#include "device/cluster.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

constexpr uint32_t kKeysBlock = 0, kValuesBlock = 1;  // ranks in the cluster

template <typename T, BackwardPlanId kId>
struct alignas(1024) BackwardPairSmem {
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kColumns = kPlan.columns(), kColumnsV = kPlan.columns_v();
    static constexpr int kQStages = kPlan.pair_q_stages();
    static constexpr int kKeepRows = kPlan.general || kPlan.dropout ? kBlockN / 8 : 1, kPSlots = kPlan.general ? 1 : 2;
    static constexpr uint32_t kDsBytes = kBlockN * kBlockM * 2, kWarpBytes = kDsBytes / 8;  // a warp's share of P, or of dS
    static constexpr uint64_t kColumnStep = descriptor_step(2 * kBlockM * kChunkRowBytes);  // to the next 128 columns of Q or dout
    struct KeyTiles {
        T k[kBlockN * kColumns];
        T q[kQStages][kBlockM * kColumns];
        T ds[2][kBlockN * kBlockM];  // a row per key
    };
    // Plans with a bias.
    struct BiasTiles : KeyTiles {
        T bias[kPlan.bias() ? kPlan.bias_stages : 1][kBlockM * kBlockN * (kPlan.bias_float32 ? 2 : 1)];  // a row per query
    };
    struct Keys : std::conditional_t<kPlan.bias(), BiasTiles, KeyTiles> {
        alignas(16) float lse[kQStages][kBlockM];
        alignas(16) uint8_t keep[kKeepRows][kBlockM];  // dropout: 8 rows for each warpgroup, kept_bits.h
        uint64_t k_full, q_full[kQStages], q_empty[kQStages], p_empty[2][2], ds_full[2][2];
    };
    struct Values {
        T k[kBlockN * (kPlan.dq_chunks() - kPlan.dq_chunks_of_keys()) * kChunkColumns];  // the last columns
        T v[kBlockN * kColumnsV];
        T dout[2][kBlockM * kColumnsV];
        T ds[2][kBlockN * kBlockM];
        // The fragments of every thread. Plain: P of two tiles. General: of one tile, the factor of dP - delta in dS, and P.
        uint4 p[2][kBlockM / 16][32 * kMainWarps];
        alignas(16) float delta[2][kBlockM];
        alignas(16) uint8_t keep[kKeepRows][kBlockM];
        uint64_t v_full, dout_full[2], dout_empty[2], p_full[2][2], ds_full[2][2], ds_empty[2], ds_empty_there[2];
    };
    // Plans with options.
    struct OptionKeys : Keys {
        std::conditional_t<kPlan.intervals, SkipsSmem<IntervalTile, kQStages>,
                           std::conditional_t<kPlan.masks, SkipsSmem<MaskedTile, kQStages>, OptionsSmem<kQStages>>>
            options;
        int left_place;  // left_place_of
    };
    struct BiasKeys : OptionKeys {
        BiasBarriers<kPlan.bias() ? kPlan.bias_stages : 1> bias_barriers;
    };
    struct OptionValues : Values {
        uint32_t hidden[kMainWarps];                            // as in OptionsSmem
        alignas(16) float lse[kPlan.softcap ? 2 : 1][kBlockM];  // softcap: of the tile of dout in the slot
        int place[2];                                           // intervals and masks: the same
    };
    union {
        std::conditional_t<kPlan.bias(), BiasKeys, std::conditional_t<kPlan.options, OptionKeys, Keys>> keys;
        std::conditional_t<kPlan.options, OptionValues, Values> values;
    };
    DqTurns turns;
    BackwardWorkOf<kId> work;
    int index;  // number of the key block
};

// ---- both blocks ----

struct PairMaps {
    const CUtensorMap &q, &k, &v, &dout;
};

template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void init_barriers(const PairMaps& maps, BackwardPairSmem<T, kId>& smem, uint32_t rank, int turn_takers) {
    using Smem = BackwardPairSmem<T, kId>;
    const auto init = [](auto& barriers, int count) {
        for (uint64_t& barrier : barriers) mbarrier_init(shared_address(&barrier), count);
    };
    if (rank == kKeysBlock) {
        auto& keys = smem.keys;
        prefetch_tensormap(&maps.q), prefetch_tensormap(&maps.k);
        mbarrier_init(shared_address(&keys.k_full), 1);
        init(keys.q_full, 1), init(keys.q_empty, kMainWarps * kWarpArrivals);
        init(keys.p_empty[0], kWarpgroupWarps * kWarpArrivals), init(keys.p_empty[1], kWarpgroupWarps * kWarpArrivals);
        init(keys.ds_full[0], kWarpgroupWarps), init(keys.ds_full[1], kWarpgroupWarps);
        if constexpr (Smem::kPlan.bias()) init(keys.bias_barriers.full, 1), init(keys.bias_barriers.empty, kMainWarps * kWarpArrivals);
    } else {
        auto& values = smem.values;
        prefetch_tensormap(&maps.v), prefetch_tensormap(&maps.dout), prefetch_tensormap(&maps.k);
        mbarrier_init(shared_address(&values.v_full), 1);
        init(values.dout_full, Smem::kPlan.softcap ? 2 : 1), init(values.dout_empty, kMainWarps * kWarpArrivals);
        init(values.p_full[0], kWarpgroupWarps), init(values.p_full[1], kWarpgroupWarps);
        init(values.ds_full[0], kWarpgroupWarps * kWarpArrivals), init(values.ds_full[1], kWarpgroupWarps * kWarpArrivals);
        init(values.ds_empty, kDqWarps * kWarpArrivals), init(values.ds_empty_there, (kMainWarps + kDqWarps) * kWarpArrivals);
    }
    init_turns(smem.turns, turn_takers);
    fence_mbarrier_init();
}

// Plans with options: which tiles the walk leaves out, and which ones the left edge cuts. Called by one thread after find_key_block.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void find_options(const AttentionParams& p, const BackwardSchedule& schedule, BackwardPairSmem<T, kId>& smem,
                                             uint32_t rank) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    auto& w = smem.work;
    if (!w.valid) return;
    if constexpr (kPlan.intervals) leave_out_hidden<kPlan.block_m, kPlan.block_n>(p, schedule, w);
    else if constexpr (kPlan.masks) list_seen_tiles<kPlan.block_n>(p, schedule, w);
    else if (schedule.tiles.skipped && all_hidden<kPlan.block_n>(p, w)) w.rounds = 0;
    if (rank == kKeysBlock) smem.keys.left_place = left_place_of(p, w, kPlan.block_m);
}

// Both blocks learn which keys are theirs, and their barriers are ready.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void begin_pair(const PairMaps& maps, const BackwardParams& b, const BackwardSchedule& schedule,
                                           BackwardPairSmem<T, kId>& smem, uint32_t rank) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    auto& w = smem.work;
    const auto find = [&](int index) {
        const bool large = corrects_large_rows<kId>(schedule.tiles);
        w.valid = find_key_block<kPlan.block_m, kPlan.block_n>(b.forward, schedule, index, w), w.it0 = 0;
        if constexpr (kBackwardPlan<kId>.options) find_options(b.forward, schedule, smem, rank);
        if (large) w.mask_place = w.kEveryTile;
    };
    if (threadIdx.x == 0) {
        init_barriers(maps, smem, rank, schedule.in_order ? 1 : 2);
        // With a fixed order, block 0 takes a number from the counter: blockIdx does not promise that blocks of lower numbers have started.
        if (!schedule.in_order) find(blockIdx.x / 2);
        else if (rank == 0) smem.index = atomicAdd(schedule.tiles.taken(), 1);
    }
    __syncthreads();
    if (schedule.in_order) cluster_arrive_release();
    else cluster_arrive();
    cluster_wait();
    if (schedule.in_order) {
        if (threadIdx.x == 0) find(cluster_object(smem.index, 0));
        __syncthreads();
        cluster_arrive(), cluster_wait();  // block 0 must not end before its number has been read
    }
}

__device__ __forceinline__ void arrive_as_warp(int lane, uint32_t barrier) {
    __syncwarp();
    if (arrives(lane)) mbarrier_arrive(barrier);
    __syncwarp();
}
__device__ __forceinline__ void arrive_there_as_warp(int lane, const uint64_t& barrier, uint32_t block) {
    __syncwarp();
    if (arrives(lane)) mbarrier_arrive_cluster(cluster_address(shared_address(&barrier), block));
    __syncwarp();
}

// ---- for both main roles ----

// d = `operand` (keys x columns) times `rows` (columns x queries). Both run along their columns, 16 a step.
template <typename T, int kBlockM, int kBlockN, int kSteps>
__device__ __forceinline__ void multiply_by_columns(float (&d)[kBlockM / 2], uint32_t operand, uint32_t rows) {
    wgmma_fence();
    wgmma_ss_first<T, kBlockM>(d, descriptor_from(operand), descriptor_from(rows));
#pragma unroll
    for (int i = 1; i < kSteps; ++i)
        wgmma_ss<T, kBlockM>(d, descriptor_from(operand, descriptor_k_step(i, kBlockN)),
                             descriptor_from(rows, descriptor_k_step(i, kBlockM)), 1);
    wgmma_commit();
}
// A gradient is multiplied 128 columns at a time: ptxas does not have the registers for a larger instruction.
template <int kCount, typename Step>
__device__ __forceinline__ void by_columns(float (&gradient)[kCount], const Step& step) {
    constexpr int kRest = kCount % 64;
#pragma unroll
    for (int x = 0; x < kCount / 64; ++x) step(reinterpret_cast<float(&)[64]>(gradient[64 * x]), x);
    if constexpr (kRest) step(reinterpret_cast<float(&)[kRest]>(gradient[kCount - kRest]), kCount / 64);
}
// The warpgroup and the thread's first key, computed again where needed: they would hold registers all that time.
__device__ __forceinline__ int own_warpgroup() { return opaque(int(threadIdx.x)) / 128 - 1; }
__device__ __forceinline__ int own_key(const BackwardWork& w) {
    const int t = opaque(int(threadIdx.x)) - 128;
    return w.key0 + t / 32 * 16 + t % 32 / 4;
}

// Plans with options. Called by a main warp: finds which of its 16 keys no query sees.
template <BackwardPlanId kId>
__device__ __forceinline__ uint32_t find_hidden(const AttentionParams& p, const BackwardWorkOf<kId>& w, uint32_t (&hidden)[kMainWarps]) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    const int warp = opaque(int(threadIdx.x)) / 32 - kWarpgroupWarps, key0 = w.key0 + warp * 16;
    uint32_t own;
    if constexpr (kPlan.intervals) own = unseen_keys(p, w, key0);
    else if constexpr (kPlan.masks) own = w.unseen[warp];
    else own = hidden_keys(p, w, key0);
    hidden[warp] = own;
    __syncwarp();
    return own;
}
// Of these, bits 0 and 8 belong to the thread's two keys.
__device__ __forceinline__ uint32_t own_hidden(const uint32_t (&hidden)[kMainWarps]) {
    const int t = opaque(int(threadIdx.x));
    return hidden[t / 32 - kWarpgroupWarps] >> t % 32 / 4;
}

}  // namespace fa
