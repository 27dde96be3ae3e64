// wgmma_sm90/kernel.cuh: the gradients of attention at Hopper's speed, fp16 and bf16, head dims up to 128. New against mma_sm80/kernel.cuh:
// TMA, wgmma, warp specialisation, persistent blocks.
//
// Each block repeatedly takes 128 keys of one key head from a counter. It walks over every query tile that sees them, of every query head
// of the group; dK and dV stay in registers. All scores are transposed: rows are keys, columns are queries. P^T and dS^T are then A
// operands without rearrangement.
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
// Bound by shared memory: on an H200 at head dim 128 (seqlen 16384), it is busy 86 % of the time, the tensor cores 77 %. Short sequences
// are bound by the memory traffic of the kernels before and after, wgmma_sm90/rows.cu.
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

template <typename T, BackwardPlanId kId>
struct alignas(1024) BackwardSmem {
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kColumns = kPlan.columns(), kStages = kPlan.stages;
    static constexpr int kKeyStages = kPlan.key_stages();
    T k[kKeyStages][kBlockN * kColumns], v[kKeyStages][kBlockN * kColumns];
    T q[kStages][kBlockM * kColumns], dout[kStages][kBlockM * kColumns];
    T ds[2][kBlockN * kBlockM];                  // a row per key
    T p[kPlan.general ? kBlockN * kBlockM : 8];  // general: P after dropout, a row per key
    alignas(128) std::conditional_t<kPlan.dq_stages != 0, DqStages<kPlan.dq_stages>, char> stages;
    alignas(16) float lse[kStages][kBlockM], delta[kStages][kBlockM];    // in quad order
    alignas(16) uint8_t keep[kPlan.general ? kBlockN / 8 : 1][kBlockM];  // dropout: bit j of [n][query] keeps key 8 n + j
    uint64_t k_full[kKeyStages], v_full[kKeyStages], keys_empty[kKeyStages], q_full[kStages], q_empty[kStages], dout_full[kStages],
        dout_empty[kStages];
    uint64_t ds_full[2], ds_empty[2];
    DqTurns turns;
    WorkList list;
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
    fence_mbarrier_init();
}

// ---- the loading warpgroup, one thread of each warp ----

// Warp 0: takes one set of keys after another, publishes it in the WorkList, and loads it.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void take_and_load_keys(const CUtensorMap& map_k, const CUtensorMap& map_v, const AttentionParams& p,
                                                   const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kKeyStages = kPlan.key_stages();
    const auto load_keys = [&](const BackwardWork& w, uint32_t slot) {
        const int row = w.k_row + w.key0, head = w.head_k, batch = p.cu_seqlens_q ? 0 : w.batch;
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
        BackwardWork& w = smem.list.work[n & 1];
        mbarrier_wait(shared_address(&smem.list.empty[n & 1]), n >> 1 & 1 ^ 1);
        while (index < schedule.blocks && !find_key_block<kBlockM, kBlockN>(p, schedule, index, w)) index = take();
        w.valid = index < schedule.blocks, w.it0 = it0;
        mbarrier_arrive(shared_address(&smem.list.full[n & 1]));
        if (index >= schedule.blocks) return;
        it0 += count_tiles(w);
        mbarrier_wait(shared_address(&smem.keys_empty[n % kKeyStages]), n / kKeyStages & 1 ^ 1);
        load_keys(w, n % kKeyStages);
        mbarrier_wait(shared_address(&smem.list.asked), n & 1);
        index = take();
    }
}

// Warp 1: loads the query tiles of the walk.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_queries(const CUtensorMap& map_q, const CUtensorMap& map_dout, const AttentionParams& p,
                                             const BackwardSchedule& schedule, BackwardSmem<T, kId>& smem) {
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        const auto visit = [&](uint32_t it, Visited at, uint32_t tile) {
            const int row = w.q_row + at.m * kBackwardPlan<kId>.block_m, head = w.head_k * p.group + at.head;
            const int batch = p.cu_seqlens_q ? 0 : w.batch;
            load_query_tile(map_q, schedule.q_loads, smem.q, schedule.tiles.lse, smem.lse, smem.q_full, smem.q_empty, it, row, head, batch,
                            tile);
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
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
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
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
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
    constexpr bool kStaged = kPlan.dq_stages != 0;
    const int lane = threadIdx.x % 32;
    const auto wait = [&](uint32_t it) { mbarrier_wait(shared_address(&smem.ds_full[it & 1]), it >> 1 & 1); };
    const auto release = [&](uint32_t it) {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(shared_address(&smem.ds_empty[it & 1]));
    };
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        const uint32_t slot = n % kKeyStages, tiles = uniform(count_tiles(w)), it0 = uniform(w.it0);
        mbarrier_wait(shared_address(&smem.k_full[slot]), n / kKeyStages & 1);
        if constexpr (kStaged) stage_dq<T, kId>(smem.stages, smem.k[slot], smem.ds[0], tiles, wait, release, it0);
        else send_dq<T, kId, 0, kPieces>(b, schedule.tiles, w, smem.turns, smem.k[slot], smem.ds[0], tiles, wait, release);
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(shared_address(&smem.keys_empty[slot])), release_work(smem.list, n);
        __syncwarp();
    });
}

// ---- the main warpgroups: S, P, dP, dS, dV and dK ----

// A thread of a main warpgroup. The register tiles are arguments of its functions.
template <typename T, BackwardPlanId kId>
struct MainWarpgroup {
    using Smem = BackwardSmem<T, kId>;
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kD = kPlan.columns(), kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    static constexpr bool kGeneral = kPlan.general;
    static constexpr int kStages = kPlan.stages, kKeyStages = kPlan.key_stages();
    static constexpr uint32_t kTileBytes = kBlockM * kD * 2, kKeysBytes = kBlockN * kD * 2, kDsBytes = kBlockN * kBlockM * 2;
    using Scores = float[kBlockM / 2];       // rows are keys, columns queries
    using Fragment = uint32_t[kBlockM / 4];  // P as A operand; general: P d(score) / d(scaled product)
    using Gradient = float[kD / 2];          // row g + 8 r of the warp's 16 keys: elements with i / 2 % 2 = r
    using Statistics = float4[2];            // the first values of lse
    // Q, dout, K, V and dS lie at fixed distances from low_k and low_q, in units of descriptors. 64 keys take as many bytes in K as in dS.
    static constexpr uint32_t kV = kKeyStages * kKeysBytes >> 4, kDout = kStages * kTileBytes >> 4;
    static constexpr uint32_t kDs = (2 * kKeyStages * kKeysBytes + 2 * kStages * kTileBytes) >> 4, kP = kDs + (2 * kDsBytes >> 4);

    const BackwardParams& b;
    const AttentionParams& p;
    const BackwardSchedule& schedule;
    Smem& smem;
    uint32_t q_full, q_empty, dout_full, dout_empty, ds_full, ds_empty;
    uint32_t smem_ds, smem_p;
    int wg, warp, lane, quad;
    float scale_log2;
    // The hardware reads the chunk stride only for operands that run along their rows: Q and dout.
    uint32_t low_k, low_q;
    uint32_t ds_row;

    __device__ __forceinline__ MainWarpgroup(const BackwardParams& b, const BackwardSchedule& schedule, Smem& smem, int wg)
        : b(b), p(b.forward), schedule(schedule), smem(smem), wg(wg) {
        q_full = shared_address(smem.q_full), q_empty = shared_address(smem.q_empty);
        dout_full = shared_address(smem.dout_full), dout_empty = shared_address(smem.dout_empty);
        ds_full = shared_address(smem.ds_full), ds_empty = shared_address(smem.ds_empty);
        smem_ds = shared_address(smem.ds), smem_p = shared_address(smem.p);
        warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, quad = lane % 4;
        scale_log2 = p.scale * kLog2e;
        low_k = descriptor_low(shared_address(smem.k) + wg * 64 * kChunkRowBytes, kBlockM * kChunkRowBytes);
        low_q = descriptor_low(shared_address(smem.q), kBlockM * kChunkRowBytes);
        ds_row = wg * 64 + warp * 16 + lane % 16;
    }

    __device__ __forceinline__ void run() {
        Scores s, dp;
        Fragment prob;
        Statistics lse;
        for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
            const uint32_t key_slot = n % kKeyStages, key_phase = n / kKeyStages & 1;
            const uint32_t tiles = uniform(count_tiles(w)), it0 = uniform(w.it0);
            mbarrier_wait(shared_address(&smem.k_full[key_slot]), key_phase),
                mbarrier_wait(shared_address(&smem.v_full[key_slot]), key_phase);
            if (tiles == 0) {
                release_keys(key_slot);
                store_zeros<T, kBlockN>(b.dk, p.headdim, b, w), store_zeros<T, kBlockN>(b.dv, p.headdim_v, b, w);
            } else {
                Gradient dk, dv;
                walk(w, key_slot, it0, tiles, s, dp, prob, lse, dk, dv);
                release_keys(key_slot);
                const int key = w.key0 + wg * 64 + warp * 16 + lane / 4;
                store_dv<T, kId>(dv, b, w, key);
                store_dk<T>(dk, b, w, key);
            }
            __syncwarp();
            if (arrives(lane)) release_work(smem.list, n);
            __syncwarp();
        });
    }

    // The query tiles that see the keys.
    __device__ __forceinline__ void walk(const BackwardWork& w, uint32_t key_slot, uint32_t it0, uint32_t tiles, Scores& s, Scores& dp,
                                         Fragment& prob, Statistics& lse, Gradient& dk, Gradient& dv) {
        const uint32_t keys = key_slot * (kKeysBytes >> 4);
        const int last = w.last_place, wrap = w.wrap_place, ragged = ragged_place(p, w, kBlockM);
        int place = w.start_place;
        // Where rows may be large, every tile takes the path of masked tiles.
        const int mask_place = !kGeneral && some_large(schedule.tiles) ? INT_MAX : w.mask_place;
        zero_hidden_keys<kId>(p, w, smem.k[key_slot], wg * 64);
        zero_hidden_keys<kId>(p, w, smem.v[key_slot], wg * 64);
        const uint32_t slot0 = it0 % kStages;
        mbarrier_wait(q_full + 8 * slot0, it0 / kStages & 1);
        if (place >= ragged) zero_rows_past_end<kBlockM>(w, smem.q[slot0]);
        multiply_s(s, slot0, keys);
        if (!kGeneral) read_lse(lse, slot0);
        wgmma_wait<0>(s);
#pragma unroll 1
        for (uint32_t it = it0; it < it0 + tiles; ++it) {  // S of this tile is complete, nothing is in flight
            const uint32_t slot = it % kStages, phase = it / kStages & 1, ds_slot = it & 1;
            // The last iteration multiplies its own tile again (see below): the next slot may already hold a tile of the next keys.
            const uint32_t next_slot = kGeneral || it + 1 < it0 + tiles ? (it + 1) % kStages : slot;
            const int next = next_place(place, last, wrap);
            low_k = opaque(low_k), low_q = opaque(low_q);
            if (place >= ragged) {
                mbarrier_wait(dout_full + 8 * slot, phase);
                zero_rows_past_end<kBlockM>(w, smem.dout[slot]);
            }
            // No branch from here to dP, so that ptxas starts dP under the exponentials: that is worth several per cent.
            if constexpr (kGeneral) general_p(w, s, prob, slot, it - it0);
            else plain_p(w, s, prob, lse, slot, place, mask_place, it - it0);
            mbarrier_wait(dout_full + 8 * slot, phase);
            multiply_dp(dp, slot, keys);
            if (kBlockM == 64) multiply_dv(dv, prob, slot, it == it0);
            const float4 delta = statistic(smem.delta[slot], quad, 0);
            mbarrier_wait(ds_empty + 8 * ds_slot, it >> 1 & 1 ^ 1);
            if (kBlockM == 64) wgmma_wait<1>(dp);
            else wgmma_wait<0>(dp), multiply_dv(dv, prob, slot, it == it0);  // drained alone, dP frees its registers one by one
            if constexpr (kGeneral)
                if (p.dropout_threshold) drop_gradients<kBlockM>(smem.keep + 8 * wg, p.dropout_scale, dp);
            store_ds(dp, prob, slot, ds_slot, delta);  // while dV is multiplied
            if (it + 1 < it0 + tiles) {
                mbarrier_wait(q_full + 8 * next_slot, (it + 1) / kStages & 1);
                if (next >= ragged) zero_rows_past_end<kBlockM>(w, smem.q[next_slot]);
            }
            announce_ds(ds_slot);
            wgmma_wait<0>(dv);
            multiply_s(s, next_slot, keys);  // unused after the last tile: making the product conditional would cost copies of registers
            release(dout_empty, slot);
            multiply_dk(dk, slot, ds_slot, it == it0);
            if (!kGeneral) read_lse(lse, next_slot);
            wgmma_wait<0>(dk, s);
            release(q_empty, slot);
            place = next;
        }
        wgmma_wait<0>(dk, dv);
    }

    // ---- products ----

    // Both forms compute the same. One takes a register less with 64 columns, the other takes fewer instructions with 128.
    static __device__ __forceinline__ uint64_t moved(uint32_t low, uint64_t step) {
        return kD == 128 ? descriptor_from(low) + step : descriptor_from(low, step);
    }
    // d = `operand` (keys x D) times the tile's `rows` (D x queries). Both run along their columns.
    static __device__ __forceinline__ void multiply_by_columns(Scores& d, uint32_t operand, uint32_t rows) {
        wgmma_fence();
        wgmma_ss_first<T, kBlockM>(d, descriptor_from(operand), descriptor_from(rows));
#pragma unroll
        for (int i = 1; i < kD / 16; ++i)
            wgmma_ss<T, kBlockM>(d, moved(operand, descriptor_k_step(i, kBlockN)), moved(rows, descriptor_k_step(i, kBlockM)), 1);
        wgmma_commit();
    }
    // d (keys x D) += `operand` (keys x queries, in shared memory) times the tile's `rows` (queries x D).
    static __device__ __forceinline__ void accumulate_rows(Gradient& d, uint32_t operand, uint32_t rows, bool first) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i)
            wgmma_ss<T, kD, 0, 1>(d, moved(operand, descriptor_k_step(i, kBlockN)), moved(rows, descriptor_row_step(i)), i ? 1 : !first);
        wgmma_commit();
    }
    __device__ __forceinline__ void multiply_s(Scores& s, uint32_t slot, uint32_t keys) const {
        multiply_by_columns(s, low_k + keys, low_q + slot * (kTileBytes >> 4));
    }
    __device__ __forceinline__ void multiply_dp(Scores& dp, uint32_t slot, uint32_t keys) const {
        multiply_by_columns(dp, low_k + keys + kV, low_q + kDout + slot * (kTileBytes >> 4));
    }
    __device__ __forceinline__ void multiply_dv(Gradient& dv, const Fragment& prob, uint32_t slot, bool first) const {
        const uint32_t rows = low_q + kDout + slot * (kTileBytes >> 4);
        if constexpr (kGeneral) {
            accumulate_rows(dv, low_k + kP, rows, first);
        } else {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlockM / 16; ++i)
                wgmma_rs<T, kD, 1>(dv, prob + 4 * i, moved(rows, descriptor_row_step(i)), i ? 1 : !first);
            wgmma_commit();
        }
    }
    __device__ __forceinline__ void multiply_dk(Gradient& dk, uint32_t slot, uint32_t ds_slot, bool first) const {
        accumulate_rows(dk, low_k + kDs + ds_slot * (kDsBytes >> 4), low_q + slot * (kTileBytes >> 4), first);
    }

    // ---- scores ----

    // A read of shared memory takes 300 cycles while products read their operands. The first values of lse and delta are therefore read
    // before the waits for S and dP.
    __device__ __forceinline__ void read_lse(Statistics& lse, uint32_t slot) const {
        lse[0] = statistic(smem.lse[slot], quad, 0), lse[1] = statistic(smem.lse[slot], quad, 1);
    }
    __device__ __forceinline__ void general_p(const BackwardWork& w, Scores& s, Fragment& prob, uint32_t slot, uint32_t walked) const {
        const Visited at = visited(w, int(walked));
        const int head = w.head_k * p.group + at.head;
        main_warpgroup_sync(wg);  // all have read the previous tile's P and dropout bits
        if (p.dropout_threshold) {
            draw_dropout(p, w, smem.keep + 8 * wg, w.key0 + wg * 64, at.m * kBlockM, head);
            main_warpgroup_sync(wg);
        }
        general_probabilities<T, kBlockM>(p, w, s, smem.lse[slot], large_rows_of<kBlockM>(p, schedule.tiles, w, at), smem.keep + 8 * wg,
                                          w.key0 + wg * 64, at.m * kBlockM, head,
                                          [&](int i, const uint32_t(&factor)[4], const uint32_t(&P)[4]) {
#pragma unroll
                                              for (int x = 0; x < 4; ++x) prob[4 * i + x] = factor[x];
                                              stmatrix_x4(smem_p + matrix_offset<kBlockN>(ds_row, lane, i), P);
                                          });
        fence_proxy_async();
        main_warpgroup_sync(wg);
    }
    __device__ __forceinline__ void plain_p(const BackwardWork& w, Scores& s, Fragment& prob, const Statistics& lse, uint32_t slot,
                                            int place, int mask_place, uint32_t walked) const {
        if (place < mask_place) {
            const int ln = opaque(lane);
            mask_fragment(s, w, w.key0 + wg * 64 + warp * 16 + ln / 4, place / w.width * kBlockM + ln % 4 * 2);
            if (some_large(schedule.tiles))
                adjust_products(s, smem.lse[slot], large_rows_of<kBlockM>(p, schedule.tiles, w, visited(w, int(walked))), ln % 4);
        }
        probabilities<T>(s, prob, scale_log2, lse, smem.lse[slot], quad);
    }
    // Stores dS to its slot. P is unpacked from its 16 bits, because its float registers are needed elsewhere. `delta` holds the values for
    // i = 0. Later values are read one step ahead, because a read cannot overtake the store before it.
    __device__ __forceinline__ void store_ds(const Scores& dp, const Fragment& prob, uint32_t slot, uint32_t ds_slot, float4 delta) const {
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            uint32_t ds[4];
            const float4 own = delta;
            if (i + 1 < kBlockM / 16) delta = statistic(smem.delta[slot], quad, i + 1);
            score_gradients<T>(ds, prob + 4 * i, dp + 8 * i, own);
            stmatrix_x4(smem_ds + ds_slot * kDsBytes + matrix_offset<kBlockN>(ds_row, lane, i), ds);
        }
        fence_proxy_async();
    }

    // ---- barriers ----

    __device__ __forceinline__ void announce_ds(uint32_t ds_slot) const {
        __syncwarp();
        main_warpgroup_sync(wg);  // the warpgroup's 64 rows of dS are written
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(ds_full + 8 * ds_slot);
        __syncwarp();
    }
    __device__ __forceinline__ void release(uint32_t empty, uint32_t slot) const {
        if (arrives(lane)) mbarrier_arrive(empty + 8 * slot);
        __syncwarp();
    }
    __device__ __forceinline__ void release_keys(uint32_t key_slot) const {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(shared_address(&smem.keys_empty[key_slot]));
        __syncwarp();
    }
};

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
        else if (threadIdx.x == 64) take_turns_ahead(b, schedule, smem);
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
    return launch_backward_block<T, kId>(backward_wgmma_kernel<T, kId>, sizeof(BackwardSmem<T, kId>), b, multiprocessors, stream);
}
template <BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch_backward_wgmma<__half, kId>(b, multiprocessors, stream)
                                              : launch_backward_wgmma<__nv_bfloat16, kId>(b, multiprocessors, stream);
}

}  // namespace fa
