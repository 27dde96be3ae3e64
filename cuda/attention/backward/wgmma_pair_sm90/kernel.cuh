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
    static constexpr int kKeepRows = kPlan.general ? kBlockN / 8 : 1;
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

template <typename T, BackwardPlanId kId>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma_pair_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                               const __grid_constant__ BackwardParams b, const __grid_constant__ BackwardSchedule schedule) {
    using Smem = BackwardPairSmem<T, kId>;
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kD = kPlan.columns(), kDV = kPlan.columns_v(), kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    constexpr bool kGeneral = kPlan.general, kHalf = std::is_same_v<T, __half>;
    constexpr uint32_t kQBytes = kBlockM * kD * 2, kDoutBytes = kBlockM * kDV * 2, kDsBytes = kBlockN * kBlockM * 2;
    constexpr uint32_t kWarpBytes = kDsBytes / 8;  // a warp's share of P, or of dS
    constexpr int kPSlots = kGeneral ? 1 : 2;
    static_assert(kBlockM == 64 && kBlockN == 128, "one descriptor base serves every tile");
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    const AttentionParams& p = b.forward;

    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    auto& keys = smem.keys;
    auto& values = smem.values;
    const uint32_t rank = cluster_rank();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    const int lane = threadIdx.x % 32;
    BackwardWork& w = smem.work;
    const auto find = [&](int index) {
        w.valid = find_key_block<kBlockM, kBlockN>(p, schedule, index, w), w.it0 = 0;
        if (!kGeneral && some_large(schedule.tiles)) w.mask_place = INT_MAX;  // every tile takes the path of masked tiles
    };
    if (threadIdx.x == 0) {
        const auto init = [](auto& barriers, int count) {
            for (uint64_t& barrier : barriers) mbarrier_init(shared_address(&barrier), count);
        };
        if (rank == kKeysBlock) {
            prefetch_tensormap(&map_q), prefetch_tensormap(&map_k);
            mbarrier_init(shared_address(&keys.k_full), 1);
            init(keys.q_full, 1), init(keys.q_empty, kMainWarps * kWarpArrivals);
            init(keys.p_empty[0], kWarpgroupWarps * kWarpArrivals), init(keys.p_empty[1], kWarpgroupWarps * kWarpArrivals);
            init(keys.ds_full[0], kWarpgroupWarps), init(keys.ds_full[1], kWarpgroupWarps);
        } else {
            prefetch_tensormap(&map_v), prefetch_tensormap(&map_dout), prefetch_tensormap(&map_k);
            mbarrier_init(shared_address(&values.v_full), 1);
            init(values.dout_full, 1), init(values.dout_empty, kMainWarps * kWarpArrivals);
            init(values.p_full[0], kWarpgroupWarps), init(values.p_full[1], kWarpgroupWarps);
            init(values.ds_full[0], kWarpgroupWarps * kWarpArrivals), init(values.ds_full[1], kWarpgroupWarps * kWarpArrivals);
            init(values.ds_empty, kDqWarps * kWarpArrivals), init(values.ds_empty_there, (kMainWarps + kDqWarps) * kWarpArrivals);
        }
        init_turns(smem.turns, schedule.in_order ? 1 : 2);
        fence_mbarrier_init();
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
    if (!w.valid) return;

    // ------------------------------------------------------------------------------------------------ loads and turns, one thread each
    if (warpgroup == 0) {
        setmaxnreg_dec<kBackwardLoaderRegisters>();
        const int tiles = count_tiles(w);
        if (lane != 0 || tiles == 0) return;
        if (threadIdx.x > 0) {
            if (!takes_turns(b, schedule.tiles)) return;
            if (threadIdx.x == 32 && (rank == 0 || schedule.in_order))
                take_turns<kBlockM, kBlockN, 2>(b, schedule.tiles, w, smem.turns, rank);
            if (threadIdx.x == 64) publish_turns<2>(b, schedule.tiles, w, smem.turns, rank, tiles);
            return;
        }
        const int batch = p.cu_seqlens_q ? 0 : w.batch;
        constexpr int kKeysChunks = kPlan.dq_chunks_of_keys();
        if (rank == kKeysBlock) {
            const uint32_t full = shared_address(&keys.k_full);
            mbarrier_arrive_expect_tx(full, sizeof keys.k);
            load_tile(map_k, schedule.k_loads, 0, keys.k, kBlockN, full, w.k_row + w.key0, w.head_k, batch, kEvictFirst);
            load_query_tiles(p, schedule, w, map_q, schedule.q_loads, keys.q, schedule.tiles.lse, keys.lse, keys.q_full, keys.q_empty);
        } else {
            const uint32_t full = shared_address(&values.v_full);
            mbarrier_arrive_expect_tx(full, sizeof values.v + sizeof values.k);
            load_tile(map_v, schedule.v_loads, 0, values.v, kBlockN, full, w.k_row + w.key0, w.head_k, batch, kEvictFirst);
            load_tile(map_k, schedule.k_loads - kKeysChunks, kKeysChunks, values.k, kBlockN, full, w.k_row + w.key0, w.head_k, batch,
                      kEvictFirst);
            load_query_tiles(p, schedule, w, map_dout, schedule.dout_loads, values.dout, schedule.tiles.delta, values.delta,
                             values.dout_full, values.dout_empty);
        }
        return;
    }

    const auto arrive = [](int lane, uint32_t barrier) {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(barrier);
        __syncwarp();
    };
    const auto arrive_there = [](int lane, const uint64_t& barrier, uint32_t block) {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive_cluster(cluster_address(shared_address(&barrier), block));
        __syncwarp();
    };

    // ------------------------------------------------------------------------------------------------ dQ = dS^T K
    if (warpgroup == 3) {
        setmaxnreg_dec<kPlan.dq_registers(kHalf)>();
        constexpr int kFirst = kPlan.dq_chunks_of_keys();
        const int tiles = count_tiles(w);
        const auto wait = [](auto& full, uint32_t it) {
            for (uint64_t& half : full[it & 1]) mbarrier_wait(shared_address(&half), it >> 1 & 1);
        };
        if (rank == kKeysBlock)
            send_dq<T, kId, 0, kFirst>(
                b, schedule.tiles, w, smem.turns, keys.k, keys.ds[0], tiles, [&](uint32_t it) { wait(keys.ds_full, it); },
                [&](uint32_t it) {
                    if (it + 2 < uint32_t(tiles)) arrive_there(lane, values.ds_empty_there[it & 1], kValuesBlock);
                });
        else
            send_dq<T, kId, kFirst, kPlan.dq_chunks() - kFirst>(
                b, schedule.tiles, w, smem.turns, values.k, values.ds[0], tiles, [&](uint32_t it) { wait(values.ds_full, it); },
                [&](uint32_t it) { arrive(lane, shared_address(&values.ds_empty[it & 1])); });
        return;
    }

    setmaxnreg_inc<kPlan.main_registers(kHalf)>();
    const int wg = warpgroup - 1, quad = lane % 4;
    float d[kBlockM / 2];            // S or dP: rows are keys, columns queries
    uint32_t fragment[kBlockM / 4];  // P as A operand
    // d = `operand` (keys x columns) times `rows` (columns x queries). Both run along their columns.
    const auto multiply = [&](uint32_t operand, uint32_t rows, auto steps) {
        wgmma_fence();
        wgmma_ss_first<T, kBlockM>(d, descriptor_from(operand), descriptor_from(rows));
#pragma unroll
        for (int i = 1; i < steps(); ++i)
            wgmma_ss<T, kBlockM>(d, descriptor_from(operand, descriptor_k_step(i, kBlockN)),
                                 descriptor_from(rows, descriptor_k_step(i, kBlockM)), 1);
        wgmma_commit();
    };
    // The warpgroup, computed again: `wg` would hold a register all that time.
    const auto own_warpgroup = [] { return opaque(int(threadIdx.x)) / 128 - 1; };
    const auto own_key = [&] {
        const int t = opaque(int(threadIdx.x)) - 128;
        return w.key0 + t / 32 * 16 + t % 32 / 4;
    };
    // A gradient is multiplied 128 columns at a time: ptxas does not have the registers for a larger instruction.
    constexpr uint64_t kColumnStep = descriptor_step(2 * kBlockM * kChunkRowBytes);
    const auto by_columns = [](auto& gradient, const auto& step) {
        constexpr int kCount = sizeof gradient / sizeof(float), kRest = kCount % 64;
#pragma unroll
        for (int x = 0; x < kCount / 64; ++x) step(reinterpret_cast<float(&)[64]>(gradient[64 * x]), x);
        if constexpr (kRest) step(reinterpret_cast<float(&)[kRest]>(gradient[kCount - kRest]), kCount / 64);
    };
    // Q and dout are read along their rows; their chunks are 64 rows apart.
    const auto base = [&](const void* tile) { return descriptor_low(shared_address(tile), kBlockM * kChunkRowBytes); };

    // ------------------------------------------------------------------------------------------------ S, P and dK
    if (rank == kKeysBlock) {
        const float scale_log2 = p.scale * kLog2e;
        const uint32_t q_full = shared_address(keys.q_full), q_empty = shared_address(keys.q_empty);
        constexpr uint32_t kQ = kBlockN * kD * 2 >> 4, kDs = kQ + (kQStages * kQBytes >> 4);
        uint32_t low = base(keys.k + wg * 64 * kChunkColumns);
        uint32_t low_q = base(keys.k);
        const int tiles = count_tiles(w);
        float dk[kD / 2];
        float4 lse[2];  // the first two statistics of the next tile, read while its S is multiplied
        const auto read_lse = [&](uint32_t slot, int quad) {
            lse[0] = statistic(keys.lse[slot], quad, 0), lse[1] = statistic(keys.lse[slot], quad, 1);
        };
        const auto multiply_s = [&](uint32_t slot) {
            multiply(low, low_q + kQ + slot * (kQBytes >> 4), std::integral_constant<int, kD / 16>{});
        };
        const auto multiply_dk = [&](uint32_t ds_slot, uint32_t q_slot, bool add) {
            const uint32_t tile = low_q + kQ + q_slot * (kQBytes >> 4), own_ds = low + kDs + ds_slot * (kDsBytes >> 4);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlockM / 16; ++i) {
                const uint64_t ds = descriptor_from(own_ds, descriptor_k_step(i, kBlockN));
                const uint32_t rows = tile + uint32_t(descriptor_row_step(i));
                by_columns(dk, [&](auto& columns, int x) {
                    constexpr int kN = 2 * (sizeof columns / sizeof(float));
                    wgmma_ss<T, kN, 0, 1>(columns, ds, descriptor_from(rows, x * kColumnStep), i ? 1 : int(add));
                });
            }
            wgmma_commit();
        };
        if (tiles == 0) {
#pragma unroll
            for (int i = 0; i < kD / 2; ++i) dk[i] = 0.0f;
        } else {
            const int last = w.last_place, wrap = w.wrap_place, ragged = ragged_place(p, w, kBlockM);
            int place = w.start_place;
            const int self =
                opaque(int(threadIdx.x) - 128);  // index among the main warpgroups' threads; the only register that the loop spends on it
            mbarrier_wait(shared_address(&keys.k_full), 0);
            zero_hidden_keys<kId>(p, w, keys.k, own_warpgroup() * 64);
            mbarrier_wait(q_full, 0);
            if (place >= ragged) zero_rows_past_end<kBlockM>(w, keys.q[0]);
            multiply_s(0);
            if (!kGeneral) read_lse(0, quad);
            wgmma_wait<0>(d);
#pragma unroll 1
            for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // S of this tile is complete, nothing is in flight
                const int own = opaque(self), lane = own % 32, quad = own % 4, wg = own / 128;
                const uint32_t slot = it % kQStages, next_slot = (it + 1) % kQStages, previous = (it + kQStages - 1) % kQStages;
                const uint32_t p_slot = it % kPSlots, ds_slot = it & 1 ^ 1;  // slot of the previous tile's dS
                const int next = kGeneral ? next_place(place, w.last_place, w.wrap_place) : next_place(place, last, wrap);
                if (kGeneral) low = opaque(low), low_q = opaque(low_q);
                const auto p_full = [&] { return cluster_address(shared_address(&values.p_full[p_slot][wg]), kValuesBlock); };
                const auto send = [&](uint32_t to, int i, const uint32_t(&x)[4]) {
                    store_async_16(cluster_address(shared_address(&values.p[to][i][own]), kValuesBlock), x, p_full());
                };
                mbarrier_wait(shared_address(&keys.p_empty[p_slot][wg]), it / kPSlots & 1 ^ 1);
                __syncwarp();
                if (lane == 0) mbarrier_arrive_expect_tx_cluster(p_full(), kGeneral ? 2 * kWarpBytes : kWarpBytes);
                __syncwarp();
                if constexpr (kGeneral) {
                    const Visited at = visited(w, int(it));
                    const int head = w.head_k * p.group + at.head;
                    main_warpgroup_sync(wg);  // all have read the previous tile's dropout bits
                    if (p.dropout_threshold) {
                        draw_dropout(p, w, keys.keep + 8 * wg, w.key0 + wg * 64, at.m * kBlockM, head);
                        main_warpgroup_sync(wg);
                    }
                    general_probabilities<T, kBlockM>(
                        p, w, d, keys.lse[slot], large_rows_of<kBlockM>(p, schedule.tiles, w, at), keys.keep + 8 * wg, w.key0 + wg * 64,
                        at.m * kBlockM, head,
                        [&](int i, const uint32_t(&factor)[4], const uint32_t(&P)[4]) { send(0, i, factor), send(1, i, P); });
                } else {
                    if (place < w.mask_place) {
                        const int ln = opaque(lane);
                        mask_fragment(d, w, w.key0 + own / 32 * 16 + ln / 4, place / w.width * kBlockM + ln % 4 * 2);
                        if (some_large(schedule.tiles))
                            adjust_products(d, keys.lse[slot], large_rows_of<kBlockM>(p, schedule.tiles, w, visited(w, int(it))), ln % 4);
                    }
                    probabilities<T>(d, fragment, scale_log2, lse, keys.lse[slot], quad);
#pragma unroll
                    for (int i = 0; i < kBlockM / 16; ++i) send(p_slot, i, reinterpret_cast<const uint32_t(&)[4]>(fragment[4 * i]));
                }
                wgmma_wait<0>(dk);
                if (it > 1)
                    arrive_there(lane, values.ds_empty_there[slot & 1], kValuesBlock),
                        arrive(lane, q_empty + 8 * ((it + kQStages - 2) % kQStages));
                if (it + 1 < uint32_t(tiles)) {
                    mbarrier_wait(q_full + 8 * next_slot, (it + 1) / kQStages & 1);
                    if (next >= ragged) zero_rows_past_end<kBlockM>(w, keys.q[next_slot]);
                }
                __syncwarp();
                multiply_s(next_slot);  // unused after the last tile: making the product conditional would cost copies of registers
                if (!kGeneral) read_lse(next_slot, quad);
                if (it > 0) mbarrier_wait(shared_address(&keys.ds_full[ds_slot][wg]), (it - 1) >> 1 & 1);
                __syncwarp();
                multiply_dk(ds_slot, previous, it > 1);  // unused at it = 0: at it = 1 the sum starts from zero again
                wgmma_wait<1>(d);
                place = next;
            }
            wgmma_wait<0>(d, dk);
            const uint32_t final = count_tiles(w) - 1;
            mbarrier_wait(shared_address(&keys.ds_full[final & 1][own_warpgroup()]), final >> 1 & 1);
            __syncwarp();
            multiply_dk(final & 1, final % kQStages, final > 0);
            wgmma_wait<0>(dk);
        }
        cluster_arrive();
        store_dk<T>(dk, b, w, own_key());
        cluster_wait();
        return;
    }

    // ------------------------------------------------------------------------------------------------ dP, dS and dV
    const uint32_t dout_full = shared_address(values.dout_full), dout_empty = shared_address(values.dout_empty);
    const uint32_t p_full = shared_address(values.p_full), ds_full = shared_address(values.ds_full);
    const uint32_t own_ds_empty = shared_address(values.ds_empty);
    constexpr uint32_t kDout = kBlockN * kDV * 2 >> 4;
    uint32_t low = base(values.v + wg * 64 * kChunkColumns), low_dout = base(values.v);
    const int tiles = count_tiles(w);
    float dv[kDV / 2];
    const auto multiply_dp = [&](uint32_t slot) {
        multiply(low, low_dout + kDout + slot * (kDoutBytes >> 4), std::integral_constant<int, kDV / 16>{});
    };
    if (tiles == 0) {
#pragma unroll
        for (int i = 0; i < kDV / 2; ++i) dv[i] = 0.0f;
    } else {
        const int self = opaque(int(threadIdx.x) - 128);  // index among the main warpgroups' threads
        mbarrier_wait(shared_address(&values.v_full), 0);
        zero_hidden_keys<kId>(p, w, values.v, own_warpgroup() * 64);
        zero_hidden_keys<kId>(p, w, values.k, own_warpgroup() * 64);
        mbarrier_wait(dout_full, 0);
        // The iteration of the next ragged tile, one that reaches past the end of its sequence. Comparing iterations takes one register
        // less than counting tiles. Only the last tile of a head can be ragged.
        const bool ragged = w.end_m * w.width > ragged_place(p, w, kBlockM);
        uint32_t ragged_it = !ragged ? ~0u : w.in_order ? 0 : w.end_m - 1 - w.start_step;
        const auto zero_ragged = [&](uint32_t it) {
            if (it != ragged_it) return;
            zero_rows_past_end<kBlockM>(w, values.dout[it & 1]);
            ragged_it += !w.in_order ? w.end_m - w.first_m : it + 1 < uint32_t(w.width) ? 1 : tiles;  // in order: all in the first round
        };
        zero_ragged(0);
        multiply_dp(0);
        wgmma_wait<0>(d);
#pragma unroll 1
        for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // dP of this tile is complete, nothing is in flight
            const uint32_t slot = it & 1, phase = it >> 1 & 1, p_slot = it % kPSlots;
            const int own = opaque(self), lane = own % 32, quad = own % 4;
            low = opaque(low);
            if constexpr (kGeneral)
                if (p.dropout_threshold) {
                    main_warpgroup_sync(own / 128);
                    const Visited at = visited(w, int(it));
                    draw_dropout(p, w, values.keep + 8 * (own / 128), w.key0 + own / 128 * 64, at.m * kBlockM,
                                 w.head_k * p.group + at.head);
                    main_warpgroup_sync(own / 128);
                    drop_gradients<kBlockM>(values.keep + 8 * (own / 128), p.dropout_scale, d);
                }
            // The other block sends P of this tile after it has received dS of two tiles ago, so that copy has left its slot of dS, too.
            mbarrier_wait(p_full + own / 128 * 8 + 16 * p_slot, it / kPSlots & 1);
            const auto receive = [&](uint32_t from, uint32_t(&P)[kBlockM / 4]) {
#pragma unroll
                for (int i = 0; i < kBlockM / 16; ++i) {
                    const uint4 x = values.p[from][i][own];
                    P[4 * i] = x.x, P[4 * i + 1] = x.y, P[4 * i + 2] = x.z, P[4 * i + 3] = x.w;
                }
            };
            const auto received = [&] {
                if (it + kPSlots < uint32_t(tiles)) arrive_there(lane, keys.p_empty[p_slot][own / 128], kKeysBlock);
            };
            const auto multiply_dv = [&] {
                const uint32_t tile = low_dout + kDout + slot * (kDoutBytes >> 4);
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kBlockM / 16; ++i) {
                    const uint32_t rows = tile + uint32_t(descriptor_row_step(i));
                    by_columns(dv, [&](auto& columns, int x) {
                        constexpr int kN = 2 * (sizeof columns / sizeof(float));
                        wgmma_rs<T, kN, 1>(columns, fragment + 4 * i, descriptor_from(rows, x * kColumnStep), i ? 1 : int(it));
                    });
                }
                wgmma_commit();
            };
            if constexpr (!kGeneral) {
                receive(p_slot, fragment);
                received();
                multiply_dv();
            }
            float4 next_delta = statistic(values.delta[slot], quad, 0);
            mbarrier_wait(own_ds_empty + 8 * slot, phase ^ 1);
            const int ds_row = own / 32 * 16 + own % 16;
            // delta is read one step ahead, because a read cannot overtake the store before it.
#pragma unroll
            for (int i = 0; i < kBlockM / 16; ++i) {
                const float4 delta = next_delta;
                if (i + 1 < kBlockM / 16) next_delta = statistic(values.delta[slot], quad, i + 1);
                uint32_t ds[4];
                if constexpr (kGeneral) {
                    const uint4 x = values.p[0][i][own];
                    const uint32_t factor[4] = {x.x, x.y, x.z, x.w};
                    score_gradients<T>(ds, factor, d + 8 * i, delta);
                } else {
                    score_gradients<T>(ds, fragment + 4 * i, d + 8 * i, delta);
                }
                stmatrix_x4(shared_address(values.ds[slot]) + matrix_offset<kBlockN>(ds_row, lane, i), ds);
            }
            fence_proxy_async();
            arrive(lane, ds_full + own / 128 * 8 + 16 * slot);
            mbarrier_wait(own_ds_empty + 16 + 8 * slot, phase ^ 1);
            __syncwarp();
            if (lane == 0) {  // the warp's 16 rows
                const uint32_t full = cluster_address(shared_address(&keys.ds_full[slot][own / 128]), kKeysBlock),
                               rows = own / 32 * kWarpBytes;
                mbarrier_arrive_expect_tx_cluster(full, kWarpBytes);
                bulk_copy_cluster(cluster_address(shared_address(keys.ds[slot]) + rows, kKeysBlock), shared_address(values.ds[slot]) + rows,
                                  kWarpBytes, full);
            }
            __syncwarp();
            if (it + 1 < uint32_t(tiles)) {
                mbarrier_wait(dout_full + 8 * (slot ^ 1), (it + 1) >> 1 & 1);
                zero_ragged(it + 1);
            }
            __syncwarp();
            if constexpr (kGeneral) {
                receive(1, fragment);
                received();
                multiply_dv();
            }
            multiply_dp(slot ^ 1);
            wgmma_wait<0>(d, dv);
            arrive(lane, dout_empty + 8 * slot);
        }
        wgmma_wait<0>(dv);
    }
    cluster_arrive();
    store_dv<T, kId>(dv, b, w, own_key());
    cluster_wait();  // the other block may still be copying the last dS from here
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
