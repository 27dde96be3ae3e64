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
// Bound by sending P to the other block and dS back. On an H200 (seqlen 4096), tensor cores, shared memory and L2 are each busy between 50
// and 65 % of the time. Beyond head dim 128, single blocks of 64 keys kept L2 busy 90 % of the time.
#pragma once

#include "attention/backward/wgmma_sm90/dq.cuh"
#include "attention/backward/wgmma_sm90/fragments.cuh"
#include "attention/backward/wgmma_sm90/hidden.cuh"
#include "attention/backward/wgmma_sm90/launch.cuh"
#include "attention/backward/wgmma_sm90/loads.cuh"
#include "attention/backward/wgmma_sm90/scores.cuh"
#include "attention/backward/wgmma_sm90/store.cuh"
#include "common/constants.h"

namespace fa {

constexpr uint32_t kKeysBlock = 0, kValuesBlock = 1;  // ranks in the cluster
constexpr int kQStages = 4;                           // the tile whose dK is due, the tile whose S is due, and two in flight

template <typename T, BackwardPlanId kId>
struct alignas(1024) BackwardPairSmem {
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kColumns = kPlan.columns(), kColumnsV = kPlan.columns_v();
    static constexpr int kKeepRows = kPlan.general ? kBlockN / 8 : 1, kPSlots = kPlan.general ? 1 : 2;
    static constexpr uint32_t kDsBytes = kBlockN * kBlockM * 2, kWarpBytes = kDsBytes / 8;  // a warp's share of P, or of dS
    static constexpr uint64_t kColumnStep = descriptor_step(2 * kBlockM * kChunkRowBytes);  // to the next 128 columns of Q or dout
    struct Keys {
        T k[kBlockN * kColumns];
        T q[kQStages][kBlockM * kColumns];
        T ds[2][kBlockN * kBlockM];  // a row per key
        alignas(16) float lse[kQStages][kBlockM];
        alignas(16) uint8_t keep[kKeepRows][kBlockM];  // dropout: bit j of [n][query] keeps key 8 n + j
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
    union {
        Keys keys;
        Values values;
    };
    DqTurns turns;
    BackwardWork work;
    int index;  // number of the key block
};

// ---- both blocks ----

struct PairMaps {
    const CUtensorMap &q, &k, &v, &dout;
};

template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void init_barriers(const PairMaps& maps, BackwardPairSmem<T, kId>& smem, uint32_t rank, int turn_takers) {
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
    } else {
        auto& values = smem.values;
        prefetch_tensormap(&maps.v), prefetch_tensormap(&maps.dout), prefetch_tensormap(&maps.k);
        mbarrier_init(shared_address(&values.v_full), 1);
        init(values.dout_full, 1), init(values.dout_empty, kMainWarps * kWarpArrivals);
        init(values.p_full[0], kWarpgroupWarps), init(values.p_full[1], kWarpgroupWarps);
        init(values.ds_full[0], kWarpgroupWarps * kWarpArrivals), init(values.ds_full[1], kWarpgroupWarps * kWarpArrivals);
        init(values.ds_empty, kDqWarps * kWarpArrivals), init(values.ds_empty_there, (kMainWarps + kDqWarps) * kWarpArrivals);
    }
    init_turns(smem.turns, turn_takers);
    fence_mbarrier_init();
}

// Both blocks learn which keys are theirs, and their barriers are ready.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void begin_pair(const PairMaps& maps, const BackwardParams& b, const BackwardSchedule& schedule,
                                           BackwardPairSmem<T, kId>& smem, uint32_t rank) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    BackwardWork& w = smem.work;
    const auto find = [&](int index) {
        w.valid = find_key_block<kPlan.block_m, kPlan.block_n>(b.forward, schedule, index, w), w.it0 = 0;
        if (!kPlan.general && some_large(schedule.tiles)) w.mask_place = INT_MAX;  // every tile takes the path of masked tiles
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

// ---- the loading warpgroup, one thread of each warp ----

// Warp 0: the operands of the block, and the tiles of the walk.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_keys_block(const PairMaps& maps, const AttentionParams& p, const BackwardSchedule& schedule,
                                                BackwardPairSmem<T, kId>& smem, int batch) {
    auto& keys = smem.keys;
    const BackwardWork& w = smem.work;
    const uint32_t full = shared_address(&keys.k_full);
    mbarrier_arrive_expect_tx(full, sizeof keys.k);
    load_tile(maps.k, schedule.k_loads, 0, keys.k, kBackwardPlan<kId>.block_n, full, w.k_row + w.key0, w.head_k, batch, kEvictFirst);
    load_query_tiles(p, schedule, w, maps.q, schedule.q_loads, keys.q, schedule.tiles.lse, keys.lse, keys.q_full, keys.q_empty);
}
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_values_block(const PairMaps& maps, const AttentionParams& p, const BackwardSchedule& schedule,
                                                  BackwardPairSmem<T, kId>& smem, int batch) {
    constexpr int kBlockN = kBackwardPlan<kId>.block_n, kKeysChunks = kBackwardPlan<kId>.dq_chunks_of_keys();
    auto& values = smem.values;
    const BackwardWork& w = smem.work;
    const uint32_t full = shared_address(&values.v_full);
    mbarrier_arrive_expect_tx(full, sizeof values.v + sizeof values.k);
    load_tile(maps.v, schedule.v_loads, 0, values.v, kBlockN, full, w.k_row + w.key0, w.head_k, batch, kEvictFirst);
    load_tile(maps.k, schedule.k_loads - kKeysChunks, kKeysChunks, values.k, kBlockN, full, w.k_row + w.key0, w.head_k, batch, kEvictFirst);
    load_query_tiles(p, schedule, w, maps.dout, schedule.dout_loads, values.dout, schedule.tiles.delta, values.delta, values.dout_full,
                     values.dout_empty);
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
    const BackwardWork& w = smem.work;
    const int tiles = count_tiles(w);
    const auto wait = [](auto& full, uint32_t it) {
        for (uint64_t& half : full[it & 1]) mbarrier_wait(shared_address(&half), it >> 1 & 1);
    };
    if (rank == kKeysBlock)
        send_dq<T, kId, 0, kFirst>(
            b, schedule.tiles, w, smem.turns, keys.k, keys.ds[0], tiles, [&](uint32_t it) { wait(keys.ds_full, it); },
            [&](uint32_t it) {
                if (it + 2 < uint32_t(tiles)) arrive_there_as_warp(lane, values.ds_empty_there[it & 1], kValuesBlock);
            });
    else
        send_dq<T, kId, kFirst, kPlan.dq_chunks() - kFirst>(
            b, schedule.tiles, w, smem.turns, values.k, values.ds[0], tiles, [&](uint32_t it) { wait(values.ds_full, it); },
            [&](uint32_t it) { arrive_as_warp(lane, shared_address(&values.ds_empty[it & 1])); });
}

// ---- the main warpgroups ----

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

// Block 0: S, P and dK. `values`: the addresses of the other block's shared memory.
template <typename T, BackwardPlanId kId>
struct PairKeysMain {
    using Smem = BackwardPairSmem<T, kId>;
    static constexpr int kD = Smem::kColumns, kBlockM = Smem::kBlockM, kBlockN = Smem::kBlockN;
    static constexpr bool kGeneral = Smem::kPlan.general;
    static constexpr int kPSlots = Smem::kPSlots;
    static constexpr uint32_t kQBytes = kBlockM * kD * 2;
    static constexpr uint32_t kQ = kBlockN * kD * 2 >> 4, kDs = kQ + (kQStages * kQBytes >> 4);  // from K, in units of descriptors

    using Scores = float[kBlockM / 2];       // S: rows are keys, columns queries
    using Fragment = uint32_t[kBlockM / 4];  // P as A operand
    using Gradient = float[kD / 2];
    using Statistics = float4[2];  // lse: the first two of the next tile, read while its S is multiplied

    const BackwardParams& b;
    const AttentionParams& p;
    const BackwardSchedule& schedule;
    const BackwardWork& w;
    typename Smem::Keys& keys;
    typename Smem::Values& values;
    float scale_log2;
    uint32_t q_full, q_empty;
    uint32_t low, low_q;  // descriptors of the warpgroup's rows of K, and of K
    int tiles;

    // A tile of the walk, as one thread sees it.
    struct Step {
        uint32_t it;
        int own, lane, quad, wg;
        uint32_t slot, next_slot, previous, p_slot, ds_slot;  // previous, ds_slot: slots of Q and dS of the tile before
        __device__ __forceinline__ Step(uint32_t it, int own)
            : it(it),
              own(own),
              lane(own % 32),
              quad(own % 4),
              wg(own / 128),
              slot(it % kQStages),
              next_slot((it + 1) % kQStages),
              previous((it + kQStages - 1) % kQStages),
              p_slot(it % kPSlots),
              ds_slot(it & 1 ^ 1) {}
    };

    __device__ __forceinline__ PairKeysMain(const BackwardParams& b, const BackwardSchedule& schedule, Smem& smem, int wg)
        : b(b),
          p(b.forward),
          schedule(schedule),
          w(smem.work),
          keys(smem.keys),
          values(smem.values),
          scale_log2(p.scale * kLog2e),
          q_full(shared_address(keys.q_full)),
          q_empty(shared_address(keys.q_empty)),
          low(descriptor_low(shared_address(keys.k + wg * 64 * kChunkColumns), kBlockM * kChunkRowBytes)),
          low_q(descriptor_low(shared_address(keys.k), kBlockM * kChunkRowBytes)),
          tiles(count_tiles(w)) {}

    __device__ __forceinline__ void run(int quad) {
        Gradient dk;
        if (tiles == 0) {
#pragma unroll
            for (int i = 0; i < kD / 2; ++i) dk[i] = 0.0f;
        } else {
            walk(dk, quad);
        }
        cluster_arrive();
        store_dk<T>(dk, b, w, own_key(w));
        cluster_wait();
    }

    __device__ __forceinline__ void walk(Gradient& dk, int quad) {
        Scores s;
        Statistics lse;
        const int last = w.last_place, wrap = w.wrap_place, ragged = ragged_place(p, w, kBlockM);
        int place = w.start_place;
        const int self = opaque(int(threadIdx.x) - 128);  // index among the main threads; the one register that the loop spends on it
        mbarrier_wait(shared_address(&keys.k_full), 0);
        zero_hidden_keys<kId>(p, w, keys.k, own_warpgroup() * 64);
        mbarrier_wait(q_full, 0);
        if (place >= ragged) zero_rows_past_end<kBlockM>(w, keys.q[0]);
        multiply_s(s, 0);
        if (!kGeneral) read_lse(lse, 0, quad);
        wgmma_wait<0>(s);
#pragma unroll 1
        for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // S of this tile is complete, nothing is in flight
            const Step step(it, opaque(self));
            const int next = kGeneral ? next_place(place, w.last_place, w.wrap_place) : next_place(place, last, wrap);
            if (kGeneral) low = opaque(low), low_q = opaque(low_q);
            announce_p(step);
            if constexpr (kGeneral) send_general(s, step);
            else send_plain(s, lse, step, place);
            wgmma_wait<0>(dk);
            if (it > 1) release(step);
            if (it + 1 < uint32_t(tiles)) {
                mbarrier_wait(q_full + 8 * step.next_slot, (it + 1) / kQStages & 1);
                if (next >= ragged) zero_rows_past_end<kBlockM>(w, keys.q[step.next_slot]);
            }
            __syncwarp();
            multiply_s(s, step.next_slot);  // unused after the last tile: making the product conditional would cost copies of registers
            if (!kGeneral) read_lse(lse, step.next_slot, step.quad);
            if (it > 0) mbarrier_wait(shared_address(&keys.ds_full[step.ds_slot][step.wg]), (it - 1) >> 1 & 1);
            __syncwarp();
            multiply_dk(dk, step.ds_slot, step.previous, it > 1);  // unused at it = 0: at it = 1 the sum starts from zero again
            wgmma_wait<1>(s);
            place = next;
        }
        wgmma_wait<0>(s, dk);
        const uint32_t final = count_tiles(w) - 1;
        mbarrier_wait(shared_address(&keys.ds_full[final & 1][own_warpgroup()]), final >> 1 & 1);
        __syncwarp();
        multiply_dk(dk, final & 1, final % kQStages, final > 0);
        wgmma_wait<0>(dk);
    }

    __device__ __forceinline__ void read_lse(Statistics& lse, uint32_t slot, int quad) {
        lse[0] = statistic(keys.lse[slot], quad, 0), lse[1] = statistic(keys.lse[slot], quad, 1);
    }
    __device__ __forceinline__ void multiply_s(Scores& s, uint32_t slot) {
        multiply_by_columns<T, kBlockM, kBlockN, kD / 16>(s, low, low_q + kQ + slot * (kQBytes >> 4));
    }
    __device__ __forceinline__ void multiply_dk(Gradient& dk, uint32_t ds_slot, uint32_t q_slot, bool add) {
        const uint32_t tile = low_q + kQ + q_slot * (kQBytes >> 4), own_ds = low + kDs + ds_slot * (Smem::kDsBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const uint64_t ds = descriptor_from(own_ds, descriptor_k_step(i, kBlockN));
            const uint32_t rows = tile + uint32_t(descriptor_row_step(i));
            by_columns(dk, [&](auto& columns, int x) {
                constexpr int kN = 2 * (sizeof columns / sizeof(float));
                wgmma_ss<T, kN, 0, 1>(columns, ds, descriptor_from(rows, x * Smem::kColumnStep), i ? 1 : int(add));
            });
        }
        wgmma_commit();
    }

    __device__ __forceinline__ uint32_t p_full(const Step& step) const {
        return cluster_address(shared_address(&values.p_full[step.p_slot][step.wg]), kValuesBlock);
    }
    __device__ __forceinline__ void send(const Step& step, uint32_t to, int i, const uint32_t (&x)[4]) {
        store_async_16(cluster_address(shared_address(&values.p[to][i][step.own]), kValuesBlock), x, p_full(step));
    }
    // Waits until the other block has room for P, and tells it how many bytes will come.
    __device__ __forceinline__ void announce_p(const Step& step) {
        mbarrier_wait(shared_address(&keys.p_empty[step.p_slot][step.wg]), step.it / kPSlots & 1 ^ 1);
        __syncwarp();
        if (step.lane == 0) mbarrier_arrive_expect_tx_cluster(p_full(step), kGeneral ? 2 * Smem::kWarpBytes : Smem::kWarpBytes);
        __syncwarp();
    }
    __device__ __forceinline__ void send_general(Scores& s, const Step& step) {
        const Visited at = visited(w, int(step.it));
        const int head = w.head_k * p.group + at.head, key0 = w.key0 + step.wg * 64, row0 = at.m * kBlockM;
        uint8_t(*const keep)[kBlockM] = keys.keep + 8 * step.wg;
        main_warpgroup_sync(step.wg);  // all have read the previous tile's dropout bits
        if (p.dropout_threshold) {
            draw_dropout(p, w, keep, key0, row0, head);
            main_warpgroup_sync(step.wg);
        }
        general_probabilities<T, kBlockM>(
            p, w, s, keys.lse[step.slot], large_rows_of<kBlockM>(p, schedule.tiles, w, at), keep, key0, row0, head,
            [&](int i, const uint32_t(&factor)[4], const uint32_t(&P)[4]) { send(step, 0, i, factor), send(step, 1, i, P); });
    }
    __device__ __forceinline__ void send_plain(Scores& s, const Statistics& lse, const Step& step, int place) {
        if (place < w.mask_place) {
            const int ln = opaque(step.lane);
            mask_fragment(s, w, w.key0 + step.own / 32 * 16 + ln / 4, place / w.width * kBlockM + ln % 4 * 2);
            if (some_large(schedule.tiles))
                adjust_products(s, keys.lse[step.slot], large_rows_of<kBlockM>(p, schedule.tiles, w, visited(w, int(step.it))), ln % 4);
        }
        Fragment fragment;
        probabilities<T>(s, fragment, scale_log2, lse, keys.lse[step.slot], step.quad);
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) send(step, step.p_slot, i, reinterpret_cast<const uint32_t(&)[4]>(fragment[4 * i]));
    }
    // dK of the tile two steps back is complete: its Q and its dS may be overwritten.
    __device__ __forceinline__ void release(const Step& step) {
        arrive_there_as_warp(step.lane, values.ds_empty_there[step.slot & 1], kValuesBlock);
        arrive_as_warp(step.lane, q_empty + 8 * ((step.it + kQStages - 2) % kQStages));
    }
};

// Block 1: dP, dS and dV. `keys`: the addresses of the other block's shared memory.
template <typename T, BackwardPlanId kId>
struct PairValuesMain {
    using Smem = BackwardPairSmem<T, kId>;
    static constexpr int kDV = Smem::kColumnsV, kBlockM = Smem::kBlockM, kBlockN = Smem::kBlockN;
    static constexpr bool kGeneral = Smem::kPlan.general;
    static constexpr int kPSlots = Smem::kPSlots;
    static constexpr uint32_t kDoutBytes = kBlockM * kDV * 2;
    static constexpr uint32_t kDout = kBlockN * kDV * 2 >> 4;  // from V, in units of descriptors

    using Scores = float[kBlockM / 2];       // dP: rows are keys, columns queries
    using Fragment = uint32_t[kBlockM / 4];  // P as A operand
    using Gradient = float[kDV / 2];

    const BackwardParams& b;
    const AttentionParams& p;
    const BackwardWork& w;
    typename Smem::Keys& keys;
    typename Smem::Values& values;
    uint32_t dout_full, dout_empty, p_full, ds_full, ds_empty;
    uint32_t low, low_dout;  // descriptors of the warpgroup's rows of V, and of V
    int tiles;
    // The iteration of the next ragged tile, one that reaches past the end of its sequence. Comparing iterations takes one register less
    // than counting tiles. Only the last tile of a head can be ragged.
    uint32_t ragged_it;

    // A tile of the walk, as one thread sees it.
    struct Step {
        uint32_t it, slot, phase, p_slot;
        int own, lane, quad;
        __device__ __forceinline__ Step(uint32_t it, int own)
            : it(it), slot(it & 1), phase(it >> 1 & 1), p_slot(it % kPSlots), own(own), lane(own % 32), quad(own % 4) {}
    };

    __device__ __forceinline__ PairValuesMain(const BackwardParams& b, Smem& smem, int wg)
        : b(b),
          p(b.forward),
          w(smem.work),
          keys(smem.keys),
          values(smem.values),
          dout_full(shared_address(values.dout_full)),
          dout_empty(shared_address(values.dout_empty)),
          p_full(shared_address(values.p_full)),
          ds_full(shared_address(values.ds_full)),
          ds_empty(shared_address(values.ds_empty)),
          low(descriptor_low(shared_address(values.v + wg * 64 * kChunkColumns), kBlockM * kChunkRowBytes)),
          low_dout(descriptor_low(shared_address(values.v), kBlockM * kChunkRowBytes)),
          tiles(count_tiles(w)) {}

    __device__ __forceinline__ void run() {
        Gradient dv;
        if (tiles == 0) {
#pragma unroll
            for (int i = 0; i < kDV / 2; ++i) dv[i] = 0.0f;
        } else {
            walk(dv);
        }
        cluster_arrive();
        store_dv<T, kId>(dv, b, w, own_key(w));
        cluster_wait();  // the other block may still be copying the last dS from here
    }

    __device__ __forceinline__ void walk(Gradient& dv) {
        Scores dp;
        Fragment fragment;
        const int self = opaque(int(threadIdx.x) - 128);  // index among the main warpgroups' threads
        mbarrier_wait(shared_address(&values.v_full), 0);
        zero_hidden_keys<kId>(p, w, values.v, own_warpgroup() * 64);
        zero_hidden_keys<kId>(p, w, values.k, own_warpgroup() * 64);
        mbarrier_wait(dout_full, 0);
        const bool ragged = w.end_m * w.width > ragged_place(p, w, kBlockM);
        ragged_it = !ragged ? ~0u : w.in_order ? 0 : w.end_m - 1 - w.start_step;
        zero_ragged(0);
        multiply_dp(dp, 0);
        wgmma_wait<0>(dp);
#pragma unroll 1
        for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // dP of this tile is complete, nothing is in flight
            const Step step(it, opaque(self));
            low = opaque(low);
            if constexpr (kGeneral)
                if (p.dropout_threshold) drop(dp, step);
            // The other block sends P of this tile after it has received dS of two tiles ago, so that copy has left its slot of dS, too.
            mbarrier_wait(p_full + step.own / 128 * 8 + 16 * step.p_slot, it / kPSlots & 1);
            if constexpr (!kGeneral) {
                receive(fragment, step, step.p_slot);
                multiply_dv(dv, fragment, step);
            }
            store_ds(dp, fragment, step);
            send_ds(step);
            if (it + 1 < uint32_t(tiles)) {
                mbarrier_wait(dout_full + 8 * (step.slot ^ 1), (it + 1) >> 1 & 1);
                zero_ragged(it + 1);
            }
            __syncwarp();
            if constexpr (kGeneral) {
                receive(fragment, step, 1);
                multiply_dv(dv, fragment, step);
            }
            multiply_dp(dp, step.slot ^ 1);
            wgmma_wait<0>(dp, dv);
            arrive_as_warp(step.lane, dout_empty + 8 * step.slot);
        }
        wgmma_wait<0>(dv);
    }

    __device__ __forceinline__ void zero_ragged(uint32_t it) {
        if (it != ragged_it) return;
        zero_rows_past_end<kBlockM>(w, values.dout[it & 1]);
        ragged_it += !w.in_order ? w.end_m - w.first_m : it + 1 < uint32_t(w.width) ? 1 : tiles;  // in order: all in the first round
    }
    __device__ __forceinline__ void multiply_dp(Scores& dp, uint32_t slot) {
        multiply_by_columns<T, kBlockM, kBlockN, kDV / 16>(dp, low, low_dout + kDout + slot * (kDoutBytes >> 4));
    }
    __device__ __forceinline__ void multiply_dv(Gradient& dv, const Fragment& fragment, const Step& step) {
        const uint32_t tile = low_dout + kDout + step.slot * (kDoutBytes >> 4);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const uint32_t rows = tile + uint32_t(descriptor_row_step(i));
            by_columns(dv, [&](auto& columns, int x) {
                constexpr int kN = 2 * (sizeof columns / sizeof(float));
                wgmma_rs<T, kN, 1>(columns, fragment + 4 * i, descriptor_from(rows, x * Smem::kColumnStep), i ? 1 : int(step.it));
            });
        }
        wgmma_commit();
    }
    __device__ __forceinline__ void drop(Scores& dp, const Step& step) {
        const int wg = step.own / 128;
        main_warpgroup_sync(wg);
        const Visited at = visited(w, int(step.it));
        draw_dropout(p, w, values.keep + 8 * wg, w.key0 + wg * 64, at.m * kBlockM, w.head_k * p.group + at.head);
        main_warpgroup_sync(wg);
        drop_gradients<kBlockM>(values.keep + 8 * wg, p.dropout_scale, dp);
    }
    // Takes P out of its slot, which the other block may then fill again.
    __device__ __forceinline__ void receive(Fragment& fragment, const Step& step, uint32_t from) {
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const uint4 x = values.p[from][i][step.own];
            fragment[4 * i] = x.x, fragment[4 * i + 1] = x.y, fragment[4 * i + 2] = x.z, fragment[4 * i + 3] = x.w;
        }
        if (step.it + kPSlots < uint32_t(tiles)) arrive_there_as_warp(step.lane, keys.p_empty[step.p_slot][step.own / 128], kKeysBlock);
    }
    __device__ __forceinline__ void store_ds(const Scores& dp, const Fragment& fragment, const Step& step) {
        const uint32_t slot = step.slot;
        float4 next_delta = statistic(values.delta[slot], step.quad, 0);
        mbarrier_wait(ds_empty + 8 * slot, step.phase ^ 1);
        const int ds_row = step.own / 32 * 16 + step.own % 16;
        // delta is read one step ahead, because a read cannot overtake the store before it.
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const float4 delta = next_delta;
            if (i + 1 < kBlockM / 16) next_delta = statistic(values.delta[slot], step.quad, i + 1);
            uint32_t ds[4];
            if constexpr (kGeneral) {
                const uint4 x = values.p[0][i][step.own];
                const uint32_t factor[4] = {x.x, x.y, x.z, x.w};
                score_gradients<T>(ds, factor, dp + 8 * i, delta);
            } else {
                score_gradients<T>(ds, fragment + 4 * i, dp + 8 * i, delta);
            }
            stmatrix_x4(shared_address(values.ds[slot]) + matrix_offset<kBlockN>(ds_row, step.lane, i), ds);
        }
        fence_proxy_async();
        arrive_as_warp(step.lane, ds_full + step.own / 128 * 8 + 16 * slot);
    }
    // The warp's 16 rows of dS go to the other block.
    __device__ __forceinline__ void send_ds(const Step& step) {
        const uint32_t slot = step.slot;
        mbarrier_wait(ds_empty + 16 + 8 * slot, step.phase ^ 1);
        __syncwarp();
        if (step.lane == 0) {
            const uint32_t full = cluster_address(shared_address(&keys.ds_full[slot][step.own / 128]), kKeysBlock),
                           rows = step.own / 32 * Smem::kWarpBytes;
            mbarrier_arrive_expect_tx_cluster(full, Smem::kWarpBytes);
            bulk_copy_cluster(cluster_address(shared_address(keys.ds[slot]) + rows, kKeysBlock), shared_address(values.ds[slot]) + rows,
                              Smem::kWarpBytes, full);
        }
        __syncwarp();
    }
};

// ---- the kernel ----

template <typename T, BackwardPlanId kId>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_pair_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                               const __grid_constant__ BackwardParams b, const __grid_constant__ BackwardSchedule schedule) {
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
    const PairMaps maps{map_q, map_k, map_v, map_dout};
    begin_pair(maps, b, schedule, smem, rank);
    if (!w.valid) return;

    if (warpgroup == 0) {
        setmaxnreg_dec<kBackwardLoaderRegisters>();
        const int tiles = count_tiles(w);
        if (lane != 0 || tiles == 0) return;
        if (threadIdx.x > 0) {
            keep_turns(b, schedule, smem, rank, tiles);
            return;
        }
        const int batch = b.forward.cu_seqlens_q ? 0 : w.batch;
        if (rank == kKeysBlock) load_keys_block(maps, b.forward, schedule, smem, batch);
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
    PairValuesMain<T, kId>(b, smem, wg).run();
}

template <typename T, BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    return launch_backward_block<T, kId>(backward_wgmma_pair_kernel<T, kId>, sizeof(BackwardPairSmem<T, kId>), b, multiprocessors, stream);
}
template <BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch_backward_wgmma<__half, kId>(b, multiprocessors, stream)
                                              : launch_backward_wgmma<__nv_bfloat16, kId>(b, multiprocessors, stream);
}

}  // namespace fa
