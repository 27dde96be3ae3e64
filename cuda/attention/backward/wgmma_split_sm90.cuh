// wgmma_split_sm90.cuh: the Hopper backward for head dims above 128 with values of at most 128. New against wgmma_pair_sm90.cuh: the two
// blocks that share 128 keys split the products so that dS alone crosses, one way.
//
//     block 0, "scores": K, V, Q, dout                            block 1, "gradients": K, Q
//     S = K Q^T          P = 2^(scale S - lse)                    dK += dS Q
//     dP = V dout^T      dS = P (dP - delta)       -> ds          dQ = dS^T K
//     dV += P dout
//
// No product of a tile waits for something that has crossed and comes back. Block 1 runs behind by as many tiles as there are slots for dS;
// block 0 needs nothing but a free slot. dP runs under the exponentials, dV and the next S run under dS. S and dV are drained at the end of
// a tile: ptxas serialises products whose accumulators are read while another one is in flight from the tile before (C7514).
//
// The clusters are persistent. Block 0 takes a number from a counter and sends it to block 1. In block 0:
//
//     warp 0, a thread         takes the next keys, loads K and V when the last products that read them are complete
//     warp 1, a thread         loads tiles of Q with lse and of dout with delta
//     main warpgroups 1, 2     64 keys each; a warp sends its 16 rows of dS
// and in block 1:
//     warp 0, a thread         receives the number, loads K
//     warp 1, a thread         loads tiles of Q
//     warps 2, 3, a thread     the turns of dQ (wgmma_sm90_turns.cuh)
//     main warpgroups 1, 2     dK of 64 keys each
//     warpgroup 3              dQ in pieces of 64 queries x 64 columns, added from registers; the next piece is multiplied meanwhile
//
//     full: the data is there. empty: every reading warp has arrived once. All scores are transposed, as in wgmma_sm90.cuh.
//
// For a tile of 64 queries, products take 1792 cycles of the tensor cores in block 0 and 1536 in block 1; shared memory is read and written
// for 2112 and 1730 cycles. Plain plans only: the options of a score are served by wgmma_pair_sm90.
#pragma once

#include "attention/backward/wgmma_sm90_dq.cuh"
#include "attention/backward/wgmma_sm90_fragments.cuh"
#include "attention/backward/wgmma_sm90_hidden.cuh"
#include "attention/backward/wgmma_sm90_launch.cuh"
#include "attention/backward/wgmma_sm90_loads.cuh"
#include "attention/backward/wgmma_sm90_store.cuh"
#include "common/constants.h"

namespace fa {

constexpr uint32_t kScoresBlock = 0, kGradientsBlock = 1;  // ranks in the cluster
constexpr uint32_t kDsSlots = 4;                           // in both blocks: the copy of a slot goes to the slot of the same number

template <typename T, BackwardPlanId kId>
struct alignas(1024) BackwardSplitSmem {
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kColumns = kPlan.columns(), kColumnsV = kPlan.columns_v();
    struct Scores {
        T k[kBlockN * kColumns], v[kBlockN * kColumnsV];
        T q[2][kBlockM * kColumns], dout[2][kBlockM * kColumnsV];
        T ds[kDsSlots][kBlockN * kBlockM];  // a row per key
        alignas(16) float lse[2][kBlockM], delta[2][kBlockM];
        uint64_t k_full, k_empty, v_full, v_empty, q_full[2], q_empty[2], dout_full[2], dout_empty[2];
        uint64_t ds_empty[kDsSlots];  // block 1 has read its slot, so the copy from the slot here is complete, too
        uint64_t number_empty[2];
    };
    struct Gradients {
        T k[kBlockN * kColumns];
        T q[kDsSlots][kBlockM * kColumns];  // a tile of Q waits in the slot of its dS
        T ds[kDsSlots][kBlockN * kBlockM];
        uint64_t k_full, k_empty, q_full[kDsSlots], q_empty[kDsSlots], ds_full[kDsSlots][2];  // dS: of each main warpgroup
        uint64_t number_full[2];
        alignas(16) int4 number[2];  // of the keys, in x
        DqTurns turns;
    };
    union {
        Scores scores;
        Gradients gradients;
    };
    WorkList list;
};

// ---- the loading warpgroups, a thread of each warp ----

// Block 0, warp 0: takes one set of keys after another, sends its number to block 1, and loads K and V.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void take_keys(const CUtensorMap& map_k, const CUtensorMap& map_v, const AttentionParams& p,
                                          const BackwardSchedule& schedule, BackwardSplitSmem<T, kId>& smem) {
    constexpr int kBlockM = kBackwardPlan<kId>.block_m, kBlockN = kBackwardPlan<kId>.block_n;
    auto& scores = smem.scores;
    auto& there = smem.gradients;  // its addresses, in block 1
    // In order the counter gives the first number, too: blockIdx does not promise that blocks of lower numbers have started.
    const int given = schedule.in_order ? 0 : int(gridDim.x / 2);
    const auto take = [&] { return given + atomicAdd(schedule.tiles.taken(), 1); };
    int index = schedule.in_order ? take() : int(blockIdx.x / 2);
    uint32_t it0 = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        BackwardWork& w = smem.list.work[n & 1];
        mbarrier_wait(shared_address(&smem.list.empty[n & 1]), n >> 1 & 1 ^ 1);
        while (index < schedule.blocks && !find_key_block<kBlockM, kBlockN>(p, schedule, index, w)) index = take();
        w.valid = index < schedule.blocks, w.it0 = it0;
        mbarrier_arrive(shared_address(&smem.list.full[n & 1]));
        mbarrier_wait(shared_address(&scores.number_empty[n & 1]), n >> 1 & 1 ^ 1);
        const uint32_t full = cluster_address(shared_address(&there.number_full[n & 1]), kGradientsBlock);
        mbarrier_arrive_expect_tx_cluster(full, sizeof there.number[0]);
        store_async_16(cluster_address(shared_address(&there.number[n & 1]), kGradientsBlock), {uint32_t(index), 0, 0, 0}, full);
        if (index >= schedule.blocks) return;
        it0 += count_tiles(w);
        const int row = w.k_row + w.key0, head = w.head_k, batch = p.cu_seqlens_q ? 0 : w.batch;
        const uint32_t k_full = shared_address(&scores.k_full), v_full = shared_address(&scores.v_full);
        mbarrier_wait(shared_address(&scores.k_empty), n & 1 ^ 1);
        mbarrier_arrive_expect_tx(k_full, sizeof scores.k);
        load_tile(map_k, schedule.k_loads, 0, scores.k, kBlockN, k_full, row, head, batch, kEvictFirst);
        mbarrier_wait(shared_address(&scores.v_empty), n & 1 ^ 1);
        mbarrier_arrive_expect_tx(v_full, sizeof scores.v);
        load_tile(map_v, schedule.v_loads, 0, scores.v, kBlockN, v_full, row, head, batch, kEvictFirst);
        mbarrier_wait(shared_address(&smem.list.asked), n & 1);
        index = take();
    }
}
// Block 1, warp 0: the same keys.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void follow_keys(const CUtensorMap& map_k, const AttentionParams& p, const BackwardSchedule& schedule,
                                            BackwardSplitSmem<T, kId>& smem) {
    constexpr int kBlockM = kBackwardPlan<kId>.block_m, kBlockN = kBackwardPlan<kId>.block_n;
    auto& gradients = smem.gradients;
    uint32_t it0 = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        BackwardWork& w = smem.list.work[n & 1];
        mbarrier_wait_cluster(shared_address(&gradients.number_full[n & 1]), n >> 1 & 1);
        const int index = gradients.number[n & 1].x;
        // There is a number n + 1, and block 0 waits for the slot of number n - 1 before it sends it.
        if (index < schedule.blocks && n > 0)
            mbarrier_arrive_cluster(cluster_address(shared_address(&smem.scores.number_empty[n & 1 ^ 1]), kScoresBlock));
        mbarrier_wait(shared_address(&smem.list.empty[n & 1]), n >> 1 & 1 ^ 1);
        if (index < schedule.blocks) find_key_block<kBlockM, kBlockN>(p, schedule, index, w);
        w.valid = index < schedule.blocks, w.it0 = it0;
        mbarrier_arrive(shared_address(&smem.list.full[n & 1]));
        if (index >= schedule.blocks) return;
        it0 += count_tiles(w);
        const uint32_t full = shared_address(&gradients.k_full);
        mbarrier_wait(shared_address(&gradients.k_empty), n & 1 ^ 1);
        mbarrier_arrive_expect_tx(full, sizeof gradients.k);
        load_tile(map_k, schedule.k_loads, 0, gradients.k, kBlockN, full, w.k_row + w.key0, w.head_k, p.cu_seqlens_q ? 0 : w.batch,
                  kEvictFirst);
    }
}
// Block 0, warp 1: tiles of Q and dout.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_scores(const CUtensorMap& map_q, const CUtensorMap& map_dout, const AttentionParams& p,
                                            const BackwardSchedule& schedule, BackwardSplitSmem<T, kId>& smem) {
    auto& scores = smem.scores;
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        for_each_query_tile(p, schedule.tiles, w, [&](uint32_t it, Visited at, uint32_t tile) {
            const int row = w.q_row + at.m * kBackwardPlan<kId>.block_m, head = w.head_k * p.group + at.head;
            const int batch = p.cu_seqlens_q ? 0 : w.batch;
            load_query_tile(map_q, schedule.q_loads, scores.q, schedule.tiles.lse, scores.lse, scores.q_full, scores.q_empty, it, row, head,
                            batch, tile);
            load_query_tile(map_dout, schedule.dout_loads, scores.dout, schedule.tiles.delta, scores.delta, scores.dout_full,
                            scores.dout_empty, it, row, head, batch, tile);
        });
        mbarrier_arrive(shared_address(&smem.list.asked));
        release_work(smem.list, n);
    });
}
// Block 1, warp 1: tiles of Q.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void load_gradients(const CUtensorMap& map_q, const AttentionParams& p, const BackwardSchedule& schedule,
                                               BackwardSplitSmem<T, kId>& smem) {
    constexpr int kBlockM = kBackwardPlan<kId>.block_m;
    auto& gradients = smem.gradients;
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        for_each_query_tile(p, schedule.tiles, w, [&](uint32_t it, Visited at, uint32_t) {
            const uint32_t slot = it % kDsSlots, full = shared_address(&gradients.q_full[slot]);
            mbarrier_wait(shared_address(&gradients.q_empty[slot]), it / kDsSlots & 1 ^ 1);
            mbarrier_arrive_expect_tx(full, sizeof gradients.q[0]);
            load_tile(map_q, schedule.q_loads, 0, gradients.q[slot], kBlockM, full, w.q_row + at.m * kBlockM, w.head_k * p.group + at.head,
                      p.cu_seqlens_q ? 0 : w.batch, kEvictLast);
        });
        release_work(smem.list, n);
    });
}

// ---- the arithmetic ----

// Behind a __syncwarp the first lane arrives for its warp.
__device__ __forceinline__ void warp_arrives(uint32_t barrier) {
    __syncwarp();
    if (arrives(threadIdx.x % 32)) mbarrier_arrive(barrier);
    __syncwarp();
}
__device__ __forceinline__ void warp_arrives_there(uint32_t barrier, uint32_t block) {
    __syncwarp();
    if (arrives(threadIdx.x % 32)) mbarrier_arrive_cluster(cluster_address(barrier, block));
    __syncwarp();
}

// Block 1, warpgroup 3: dQ = dS^T K. A piece is added while the next one is multiplied.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void multiply_dq_ahead(const BackwardParams& b, const BackwardSchedule& schedule,
                                                  BackwardSplitSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kPieces = kPlan.dq_chunks();
    constexpr uint32_t kPiece = kBlockN * kChunkRowBytes >> 4;  // from 64 columns of K, or a slot of dS, to the next
    static_assert(kBlockM == 64, "a slot of dS is a chunk of 64 queries");
    auto& gradients = smem.gradients;
    const QueryTiles& tiles = schedule.tiles;
    uint32_t low_keys = descriptor_low(shared_address(gradients.k), kBlockN * kChunkRowBytes);
    uint32_t low_ds = descriptor_low(shared_address(gradients.ds), kBlockN * kChunkRowBytes);
    float dq[2][32];
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        const uint32_t count = uniform(count_tiles(w)), it0 = uniform(w.it0);
        mbarrier_wait(shared_address(&gradients.k_full), n & 1);
        zero_hidden_keys<kId>(b.forward, w, gradients.k, 0), zero_hidden_keys<kId>(b.forward, w, gradients.k, 64);
        int step = w.start_step;
        uint32_t tile0 = first_query_tile(b.forward, tiles, w) + (w.in_order ? w.end_m - 1 : 0);
#pragma unroll 1
        for (uint32_t it = it0; it < it0 + count; ++it) {
            const uint32_t slot = it % kDsSlots, phase = it / kDsSlots & 1;
            low_keys = opaque(low_keys), low_ds = opaque(low_ds);
            const auto multiply = [&](float(&d)[32], int piece) {  // both operands run along their rows, the keys
                const uint32_t rows = low_ds + slot * kPiece, columns = low_keys + piece * kPiece;
                wgmma_fence();
                wgmma_ss_first<T, 64, 1, 1>(d, descriptor_from(rows), descriptor_from(columns));
#pragma unroll
                for (int i = 1; i < kBlockN / 16; ++i)
                    wgmma_ss<T, 64, 1, 1>(d, descriptor_from(rows, descriptor_row_step(i)),
                                          descriptor_from(columns, descriptor_row_step(i)), 1);
                wgmma_commit();
            };
            mbarrier_wait_cluster(shared_address(&gradients.ds_full[slot][0]), phase);
            mbarrier_wait_cluster(shared_address(&gradients.ds_full[slot][1]), phase);
            __syncwarp();
            multiply(dq[0], 0);
            const uint32_t tile = tile0 + (w.in_order ? step * tiles.tiles : step);
            float* sums = tiles.dq + int64_t(tile) * (kBlockM * kPlan.columns()) + opaque(int(threadIdx.x)) % 128 * 4;
            bool writes = false;
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                auto& d = dq[piece & 1];
                if (piece + 1 < kPieces) multiply(dq[piece + 1 & 1], piece + 1), wgmma_wait<1>(d);
                else wgmma_wait<0>(d), warp_arrives_there(shared_address(&smem.scores.ds_empty[slot]), kScoresBlock);
                if (piece == 0 && takes_turns(b, tiles)) {  // the products have not waited for it
                    mbarrier_wait(shared_address(&gradients.turns.turn_full[turn_slot(it)]), turn_phase(it));
                    writes = gradients.turns.turn[turn_slot(it)].writes;
                    __syncwarp();
                }
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    float* place = sums + piece * kDqPiece + i * 512;
                    if (writes) *reinterpret_cast<float4*>(place) = make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
                    else red_add_4(place, d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
                }
            }
            if (takes_turns(b, tiles)) warp_arrives(shared_address(&gradients.turns.sent[turn_slot(it)]));
            step = next_step(step, w.first_step, w.end_step);
            if (step == w.start_step) tile0 += w.in_order ? -1 : tiles.tiles;
        }
        warp_arrives(shared_address(&gradients.k_empty));
        warp_arrives(shared_address(&smem.list.empty[n & 1]));
    });
}

// Block 1, main warpgroups: dK += dS Q. The product of a tile runs while the next one's dS is awaited.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void multiply_dk(const BackwardParams& b, BackwardSplitSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kD = kPlan.columns(), kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    auto& gradients = smem.gradients;
    const int wg = uniform(int(threadIdx.x / 128)) - 1;
    const uint32_t low_q = descriptor_low(shared_address(gradients.q), kBlockM * kChunkRowBytes);
    const uint32_t low_ds = descriptor_low(shared_address(gradients.ds) + wg * 64 * kChunkRowBytes, kBlockM * kChunkRowBytes);
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        const uint32_t count = uniform(count_tiles(w)), it0 = uniform(w.it0);
        if (count == 0) {
            store_zeros<T, kBlockN>(b.dk, b.forward.headdim, b, w);
        } else {
            float dk[kD / 2];
            const int ragged = ragged_place(b.forward, w, kBlockM);
            int place = w.start_place;
            const auto release = [&](uint32_t it) {
                const uint32_t slot = it % kDsSlots;
                warp_arrives(shared_address(&gradients.q_empty[slot]));
                warp_arrives_there(shared_address(&smem.scores.ds_empty[slot]), kScoresBlock);
            };
#pragma unroll 1
            for (uint32_t it = it0; it < it0 + count; ++it) {
                const uint32_t slot = it % kDsSlots, phase = it / kDsSlots & 1;
                mbarrier_wait(shared_address(&gradients.q_full[slot]), phase);
                if (place >= ragged) zero_rows_past_end<kBlockM>(w, gradients.q[slot]);
                mbarrier_wait_cluster(shared_address(&gradients.ds_full[slot][wg]), phase);
                __syncwarp();
                const uint32_t rows = low_q + slot * (kBlockM * kD * 2 >> 4), ds = low_ds + slot * (kBlockN * kBlockM * 2 >> 4);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockM / 16; ++i)
                    wgmma_ss<T, kD, 0, 1>(dk, descriptor_from(ds, descriptor_k_step(i, kBlockN)),
                                          descriptor_from(rows, descriptor_row_step(i)), i ? 1 : int(it > it0));
                wgmma_commit();
                wgmma_wait<1>();
                if (it > it0) release(it - 1);
                place = next_place(place, w.last_place, w.wrap_place);
            }
            wgmma_wait<0>(dk);
            release(it0 + count - 1);
            const int t = opaque(int(threadIdx.x)) - 128;
            store_dk<T>(dk, b, w, w.key0 + t / 32 * 16 + t % 32 / 4);
        }
        warp_arrives(shared_address(&smem.list.empty[n & 1]));
    });
}

// d = `operand` (keys x columns) times `rows` (columns x queries); both run along their columns.
template <typename T, int kColumns, int kBlockN, int kCount>
__device__ __forceinline__ void multiply_keys(float (&d)[kCount], uint32_t operand, uint32_t rows) {
    constexpr int kBlockM = 2 * kCount;
    wgmma_fence();
    wgmma_ss_first<T, kBlockM>(d, descriptor_from(operand), descriptor_from(rows));
#pragma unroll
    for (int i = 1; i < kColumns / 16; ++i)
        wgmma_ss<T, kBlockM>(d, descriptor_from(operand, descriptor_k_step(i, kBlockN)),
                             descriptor_from(rows, descriptor_k_step(i, kBlockM)), 1);
    wgmma_commit();
}

// Block 0, main warpgroups: S, P, dP, dS and dV.
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void multiply_scores(const BackwardParams& b, BackwardSplitSmem<T, kId>& smem) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kD = kPlan.columns(), kDV = kPlan.columns_v(), kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    constexpr uint32_t kQTile = kBlockM * kD * 2 >> 4, kDoutTile = kBlockM * kDV * 2 >> 4;
    constexpr uint32_t kDsBytes = kBlockN * kBlockM * 2, kWarpBytes = kDsBytes / kMainWarps;
    const AttentionParams& p = b.forward;
    auto& scores = smem.scores;
    const int wg = uniform(int(threadIdx.x / 128)) - 1, own = int(threadIdx.x) - 128, lane = own % 32, quad = own % 4;
    const float scale_log2 = p.scale * kLog2e;
    const auto base = [&](const void* tile) { return descriptor_low(shared_address(tile), kBlockM * kChunkRowBytes); };
    const uint32_t low_k = base(scores.k + wg * 64 * kChunkColumns), low_v = base(scores.v + wg * 64 * kChunkColumns);
    const uint32_t low_q = base(scores.q), low_dout = base(scores.dout);
    float s[kBlockM / 2], dp[kBlockM / 2];  // rows are keys, columns queries
    uint32_t prob[kBlockM / 4];             // P as A operand
    float4 lse[2];                          // the first two of the next tile, read while its S is multiplied
    for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
        const uint32_t count = uniform(count_tiles(w)), it0 = uniform(w.it0);
        mbarrier_wait(shared_address(&scores.k_full), n & 1);
        if (count == 0) {
            mbarrier_wait(shared_address(&scores.v_full), n & 1);
            warp_arrives(shared_address(&scores.k_empty)), warp_arrives(shared_address(&scores.v_empty));
            store_zeros<T, kBlockN>(b.dv, p.headdim_v, b, w);
        } else {
            float dv[kDV / 2];
            const int last = w.last_place, wrap = w.wrap_place, mask_place = w.mask_place, ragged = ragged_place(p, w, kBlockM);
            int place = w.start_place;
            const auto multiply_s = [&](uint32_t it, int place) {
                const uint32_t slot = it & 1;
                mbarrier_wait(shared_address(&scores.q_full[slot]), it >> 1 & 1);
                if (place >= ragged) zero_rows_past_end<kBlockM>(w, scores.q[slot]);
                __syncwarp();
                multiply_keys<T, kD, kBlockN>(s, low_k, low_q + slot * kQTile);
                lse[0] = statistic(scores.lse[slot], quad, 0), lse[1] = statistic(scores.lse[slot], quad, 1);
            };
            const auto multiply_dp = [&](uint32_t it, int place) {
                const uint32_t slot = it & 1;
                mbarrier_wait(shared_address(&scores.dout_full[slot]), it >> 1 & 1);
                if (place >= ragged) zero_rows_past_end<kBlockM>(w, scores.dout[slot]);
                __syncwarp();
                multiply_keys<T, kDV, kBlockN>(dp, low_v, low_dout + slot * kDoutTile);
            };
            // One tile. Its S is complete, nothing is in flight.
            const auto step = [&](uint32_t it, bool more) __attribute__((always_inline)) {
                const uint32_t slot = it & 1;
                const int next = next_place(place, last, wrap);
                if (!more) warp_arrives(shared_address(&scores.k_empty));
                multiply_dp(it, place);
                if (place < mask_place) {
                    const int t = opaque(own);
                    mask_fragment(s, w, w.key0 + t / 32 * 16 + t % 32 / 4, place / w.width * kBlockM + t % 4 * 2);
                }
                probabilities<T>(s, prob, scale_log2, lse, scores.lse[slot], quad);
                warp_arrives(shared_address(&scores.q_empty[slot]));
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockM / 16; ++i)
                    wgmma_rs<T, kDV, 1>(dv, prob + 4 * i, descriptor_from(low_dout + slot * kDoutTile, descriptor_row_step(i)),
                                        i ? 1 : int(it > it0));
                wgmma_commit();
                if (more) multiply_s(it + 1, next);
                const uint32_t ds_slot = it % kDsSlots;
                float4 next_delta = statistic(scores.delta[slot], quad, 0);
                mbarrier_wait_cluster(shared_address(&scores.ds_empty[ds_slot]), it / kDsSlots & 1 ^ 1);
                __syncwarp();
                if (more) wgmma_wait<2>(dp);
                else wgmma_wait<1>(dp);
                if (!more) warp_arrives(shared_address(&scores.v_empty));
#pragma unroll
                for (int i = 0; i < kBlockM / 16; ++i) {  // delta is read one step ahead: a read does not pass the store before it
                    const float4 delta = next_delta;
                    if (i + 1 < kBlockM / 16) next_delta = statistic(scores.delta[slot], quad, i + 1);
                    uint32_t ds[4];
                    score_gradients<T>(ds, prob + 4 * i, dp + 8 * i, delta);
                    stmatrix_x4(shared_address(scores.ds[ds_slot]) + matrix_offset<kBlockN>(own / 32 * 16 + own % 16, lane, i), ds);
                }
                fence_proxy_async();
                __syncwarp();
                if (lane == 0) {  // the warp's 16 rows
                    const uint32_t full = cluster_address(shared_address(&smem.gradients.ds_full[ds_slot][wg]), kGradientsBlock);
                    const uint32_t rows = own / 32 * kWarpBytes;
                    mbarrier_arrive_expect_tx_cluster(full, kWarpBytes);
                    bulk_copy_cluster(cluster_address(shared_address(smem.gradients.ds[ds_slot]) + rows, kGradientsBlock),
                                      shared_address(scores.ds[ds_slot]) + rows, kWarpBytes, full);
                }
                __syncwarp();
                if (more) wgmma_wait<0>(s, dv);
                else wgmma_wait<0>(dv);
                warp_arrives(shared_address(&scores.dout_empty[slot]));
                place = next;
            };
            zero_hidden_keys<kId>(p, w, scores.k, wg * 64);
            multiply_s(it0, place);
            mbarrier_wait(shared_address(&scores.v_full), n & 1);
            zero_hidden_keys<kId>(p, w, scores.v, wg * 64);
            wgmma_wait<0>(s);
            const uint32_t final = it0 + count - 1;
#pragma unroll 1
            for (uint32_t it = it0; it < final; ++it) step(it, true);
            step(final, false);
            const int t = opaque(own);
            store_dv<T, kId>(dv, b, w, w.key0 + t / 32 * 16 + t % 32 / 4);
        }
        warp_arrives(shared_address(&smem.list.empty[n & 1]));
    });
}

template <typename T, BackwardPlanId kId>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_split_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                                const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                                const __grid_constant__ BackwardParams b, const __grid_constant__ BackwardSchedule schedule) {
    using Smem = BackwardSplitSmem<T, kId>;
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static_assert(kPlan.block_m == 64 && kPlan.block_n == 128 && !kPlan.general);
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    const AttentionParams& p = b.forward;

    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const uint32_t rank = cluster_rank();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that the value is uniform
    if (threadIdx.x == 0) {
        const auto init_one = [](uint64_t& barrier, int count) { mbarrier_init(shared_address(&barrier), count); };
        const auto init = [&](auto& barriers, int count) {
            for (uint64_t& barrier : barriers) init_one(barrier, count);
        };
        constexpr int kMain = kMainWarps * kWarpArrivals, kDq = kDqWarps * kWarpArrivals;
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k);
        init(smem.list.full, 1), init_one(smem.list.asked, 1);
        if (rank == kScoresBlock) {
            auto& scores = smem.scores;
            prefetch_tensormap(&map_v), prefetch_tensormap(&map_dout);
            init(smem.list.empty, 1 + kMain);  // the thread that loads queries, and the warps
            init_one(scores.k_full, 1), init_one(scores.v_full, 1), init_one(scores.k_empty, kMain), init_one(scores.v_empty, kMain);
            init(scores.q_full, 1), init(scores.q_empty, kMain), init(scores.dout_full, 1), init(scores.dout_empty, kMain);
            init(scores.ds_empty, kMain + kDq), init(scores.number_empty, 1);
        } else {
            auto& gradients = smem.gradients;
            init(smem.list.empty, WorkList::kReaders);
            init_one(gradients.k_full, 1), init_one(gradients.k_empty, kDq);
            init(gradients.q_full, 1), init(gradients.q_empty, kMain), init(gradients.number_full, 1);
            for (auto& halves : gradients.ds_full) init(halves, kWarpgroupWarps);
            init_turns(gradients.turns, 1);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    cluster_arrive(), cluster_wait();

    if (warpgroup == 0) {
        setmaxnreg_dec<40>();
        if (threadIdx.x % 32 != 0) return;
        const int warp = threadIdx.x / 32;
        if (rank == kScoresBlock) {
            if (warp == 0) take_keys(map_k, map_v, p, schedule, smem);
            if (warp == 1) load_scores(map_q, map_dout, p, schedule, smem);
            return;
        }
        if (warp == 0) follow_keys(map_k, p, schedule, smem);
        else if (warp == 1) load_gradients(map_q, p, schedule, smem);
        else
            for_each_work(smem.list, [&](const BackwardWork& w, uint32_t n) {
                if (takes_turns(b, schedule.tiles)) {
                    if (warp == 2) take_turns<kPlan.block_m, kPlan.block_n, 1>(b, schedule.tiles, w, smem.gradients.turns, 0);
                    else publish_turns<1>(b, schedule.tiles, w, smem.gradients.turns, 0, count_tiles(w));
                }
                release_work(smem.list, n);
            });
        return;
    }
    // Loaders 40, and of 512 the rest: 2 x 208 + 56 in block 0, 2 x 152 + 168 in block 1.
    if (rank == kScoresBlock) {
        if (warpgroup == 3) {
            setmaxnreg_dec<56>();
        } else {
            setmaxnreg_inc<208>();
            multiply_scores(b, smem);
        }
    } else if (warpgroup == 3) {
        setmaxnreg_inc<168>();
        multiply_dq_ahead(b, schedule, smem);
    } else {
        setmaxnreg_inc<152>();
        multiply_dk(b, smem);
    }
    cluster_arrive_release();  // dS is read from block 0, and slots of block 0 are released from block 1, until here
    cluster_wait();
}

template <BackwardPlanId kId>
cudaError_t launch_backward_split(const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    const auto launch = [&](auto element) {
        using T = decltype(element);
        return launch_backward_block<T, kId>(backward_wgmma_split_kernel<T, kId>, sizeof(BackwardSplitSmem<T, kId>), b, multiprocessors,
                                             stream);
    };
    return b.forward.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

}  // namespace fa
