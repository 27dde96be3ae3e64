// backward_wgmma_sm90_wide.cuh: the Hopper backward for head dims above 128.
//
// The gradients of 128 keys no longer fit into the registers of two warpgroups. A block owns 64 keys, and each main warpgroup the whole of
// one gradient; the products are those of backward_wgmma_sm90.cuh, transposed in the same way:
//
//     warp 0, one thread     K, V once;  tile i of Q with lse and of dout with delta -> two slots each
//                               |  kv_full,  q_full/q_empty,  dout_full/dout_empty
//     main warpgroup 0       S = K Q^T           P = 2^(c S - lse) -> slot of p        dV += P dout
//                               |  p_full/p_empty        the fragments agree: every thread leaves 16 registers for one of the other
//                               warpgroup
//     main warpgroup 1       dP = V dout^T       dS = P (dP - delta) -> slot of ds     dK += dS Q
//                               |  ds_full/ds_empty
//     warpgroup 3            dQ = dS^T K, in pieces of 64 queries x 64 columns, added from registers to the float sums in global memory
//
// What bounds it: L2 adds about 15 bytes a clock for each multiprocessor, and 64 keys make 64 KiB of dQ of every query tile at head dim
// 256, 4370 cycles beside 2560 of tensor cores.
#pragma once

#include "attention/backward_wgmma_sm90_block.cuh"
#include "attention/backward_wgmma_sm90_scores.cuh"

namespace fa {

template <typename T, BackwardPlanId kId>
struct alignas(1024) BackwardWideSmem {
    static constexpr BackwardPlan kPlan = backward_plan(kId);
    static constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kColumns = kPlan.columns(), kColumnsV = kPlan.columns_v();
    T k[kBlockN * kColumns], v[kBlockN * kColumnsV];
    T q[2][kBlockM * kColumns], dout[2][kBlockM * kColumnsV];
    T ds[2][kBlockN * kBlockM];                            // a row per key
    uint4 p[2][kBlockM / 16][128];                         // P, or with options its factor of dP - delta: the fragment of every thread
    alignas(16) float lse[2][kBlockM], delta[2][kBlockM];  // in quad order
    alignas(16) uint8_t keep[kPlan.general ? 2 : 1][kBlockN / 8][kBlockM];  // dropout: bit j of [n][query] keeps key 8 n + j
    uint64_t kv_full, q_full[2], q_empty[2], dout_full[2], dout_empty[2];
    uint64_t p_full[2], p_empty[2], ds_full[2], ds_empty[2];
    BackwardWork work;
};

template <typename T, BackwardPlanId kId>
__global__ void __launch_bounds__(512, 1)
    backward_wgmma_wide_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                               const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_dout,
                               const __grid_constant__ BackwardParams b, const __grid_constant__ BackwardSchedule schedule) {
    using Smem = BackwardWideSmem<T, kId>;
    constexpr BackwardPlan kPlan = backward_plan(kId);
    constexpr int kD = kPlan.columns(), kDV = kPlan.columns_v(), kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    constexpr bool kGeneral = kPlan.general;
    constexpr uint32_t kQBytes = kBlockM * kD * 2, kDoutBytes = kBlockM * kDV * 2, kDsBytes = kBlockN * kBlockM * 2;
    static_assert(kBlockM == 64 && kBlockN == 64, "one descriptor base serves every tile");
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    const AttentionParams& p = b.forward;

    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const uint32_t kv_full = shared_address(&smem.kv_full), q_full = shared_address(smem.q_full), q_empty = shared_address(smem.q_empty);
    const uint32_t dout_full = shared_address(smem.dout_full), dout_empty = shared_address(smem.dout_empty);
    const uint32_t p_full = shared_address(smem.p_full), p_empty = shared_address(smem.p_empty);
    const uint32_t ds_full = shared_address(smem.ds_full), ds_empty = shared_address(smem.ds_empty);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    const int lane = threadIdx.x % 32;
    BackwardWork& w = smem.work;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v), prefetch_tensormap(&map_dout);
        mbarrier_init(kv_full, 1);
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(q_full + 8 * i, 1), mbarrier_init(q_empty + 8 * i, 8);
            mbarrier_init(dout_full + 8 * i, 1), mbarrier_init(dout_empty + 8 * i, 8);
            mbarrier_init(p_full + 8 * i, 4), mbarrier_init(p_empty + 8 * i, 4);
            mbarrier_init(ds_full + 8 * i, 4), mbarrier_init(ds_empty + 8 * i, 4);
        }
        fence_mbarrier_init();
        w.valid = find_key_block<kBlockM, kBlockN>(p, schedule, blockIdx.x, w);
    }
    __syncthreads();
    if (!w.valid) return;
    const int first_m = w.first_m, end_m = w.end_m, tiles = (end_m - first_m) * p.group;

    if (warpgroup == 0) {
        setmaxnreg_dec<kBackwardLoaderRegisters>();
        if (threadIdx.x == 0 && tiles) load_block(p, schedule, w, smem, map_q, map_k, map_v, map_dout);
        return;
    }

    const int warp = threadIdx.x % 128 / 32, quad = lane % 4, thread = threadIdx.x % 128;
    // Every tile at a fixed distance from this one; all have 64 rows, and so the same distance between chunks of columns.
    uint32_t low = descriptor_low(shared_address(smem.k), 64 * kChunkRowBytes);
    constexpr uint32_t kV = kBlockN * kD * 2 >> 4, kQ = kV + (kBlockN * kDV * 2 >> 4), kDout = kQ + (2 * kQBytes >> 4),
                       kDs = kDout + (2 * kDoutBytes >> 4);
    const auto arrive = [&](uint32_t barrier, uint32_t slot) {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(barrier + 8 * slot);
        __syncwarp();
    };

    // ------------------------------------------------------------------------------------------------ dQ = dS^T K
    if (warpgroup == 3) {
        setmaxnreg_dec<kBackwardDqRegisters>();
        float dq[32];
        uint32_t it = 0;
        if (tiles == 0) return;
#pragma unroll 1
        for (int head = w.head_k * p.group, end = head + p.group; head < end; ++head)
#pragma unroll 1
            for (int m = w.start_m, left = end_m - first_m; left > 0; --left, m = next_tile(m, first_m, end_m), ++it) {
                const uint32_t slot = it & 1;
                const auto tile = [&] { return first_query_tile(p, schedule.tiles, w, head) + m; };
                float* sums = schedule.tiles.dq + tile() * (kBlockM * kD) + thread * 4;
                low = opaque(low);
                const uint32_t rows = low + kDs + slot * (kDsBytes >> 4);
                uint32_t columns = low;
                if (b.deterministic) {
                    const int* counter = schedule.tiles.turn + tile();
                    wait_for_counter(counter, load_acquire(counter), place_in_order<kBlockM, kBlockN>(p, w, m));
                }
                mbarrier_wait(ds_full + 8 * slot, it >> 1 & 1);
                __syncwarp();
#pragma unroll 1
                for (int piece = 0; piece < kD / 64; ++piece, sums += kDqPiece, columns += kBlockN * kChunkRowBytes >> 4) {
                    wgmma_fence();
                    wgmma_ss_first<T, 64, 1, 1>(dq, descriptor_from(rows), descriptor_from(columns));
#pragma unroll
                    for (int i = 1; i < kBlockN / 16; ++i)
                        wgmma_ss<T, 64, 1, 1>(dq, descriptor_from(rows) + descriptor_row_step(i),
                                              descriptor_from(columns) + descriptor_row_step(i), 1);
                    wgmma_commit();
                    wgmma_wait<0>(dq);
                    if (piece == kD / 64 - 1) arrive(ds_empty, slot);
#pragma unroll
                    for (int i = 0; i < 8; ++i) red_add_4(sums + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
                }
                if (b.deterministic) {
                    __threadfence();
                    bar_sync(3, 128);
                    if (thread == 0) store_release(schedule.tiles.turn + tile(), place_in_order<kBlockM, kBlockN>(p, w, m) + 1);
                }
            }
        return;
    }

    setmaxnreg_inc<kBackwardMainRegisters>();
    const int wg = warpgroup - 1, key = w.key0 + warp * 16 + lane / 4, ragged = ragged_tile(p, w, kBlockM);
    float d[32];            // S or dP: rows are keys, columns queries
    uint32_t fragment[16];  // P or dS, as A operand
    // d = `operand` (keys x columns) times `rows` (columns x queries), both along their columns.
    const auto multiply = [&](uint32_t operand, uint32_t rows, auto steps) {
        wgmma_fence();
        wgmma_ss_first<T, kBlockM>(d, descriptor_from(operand), descriptor_from(rows));
#pragma unroll
        for (int i = 1; i < steps(); ++i)
            wgmma_ss<T, kBlockM>(d, descriptor_from(operand) + descriptor_k_step(i, 64), descriptor_from(rows) + descriptor_k_step(i, 64),
                                 1);
        wgmma_commit();
    };
    // gradient (keys x columns) += fragment (keys x queries) times `rows` (queries x columns).
    const auto accumulate = [&](auto& gradient, uint32_t rows, uint32_t it) {
        constexpr int kCount = sizeof gradient / sizeof(float), kRest = kCount % 64;  // 128 columns at a time: 64 registers
        constexpr uint64_t kStep = descriptor_step(2 * 64 * kChunkRowBytes);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const uint64_t row = descriptor_from(rows) + descriptor_row_step(i);
#pragma unroll
            for (int x = 0; x < kCount / 64; ++x)
                wgmma_rs<T, 128, 1>(reinterpret_cast<float(&)[64]>(gradient[64 * x]), fragment + 4 * i, row + x * kStep, i ? 1 : int(it));
            if constexpr (kRest)
                wgmma_rs<T, 2 * kRest, 1>(reinterpret_cast<float(&)[kRest]>(gradient[kCount - kRest]), fragment + 4 * i,
                                          row + kCount / 64 * kStep, i ? 1 : int(it));
        }
        wgmma_commit();
    };

    // ------------------------------------------------------------------------------------------------ P and dV
    if (wg == 0) {
        const float c = p.scale * 1.4426950408889634f;
        const int mask_end = w.mask_end;
        float dv[kDV / 2];
        float4 lse[2];  // the first two of the next tile, read while its S is multiplied
        const auto read_lse = [&](uint32_t slot) {
            lse[0] = statistic(smem.lse[slot], quad, 0), lse[1] = statistic(smem.lse[slot], quad, 1);
        };
        const auto multiply_s = [&](uint32_t slot) {
            multiply(low, low + kQ + slot * (kQBytes >> 4), std::integral_constant<int, kD / 16>{});
        };
        if (tiles == 0) {
#pragma unroll
            for (int i = 0; i < kDV / 2; ++i) dv[i] = 0.0f;
        } else {
            const int start_m = w.start_m;
            int m = start_m, head = w.head_k * p.group;
            mbarrier_wait(kv_full, 0);
            zero_hidden_keys<kGeneral, kBlockN>(p, w, smem.k, 0, wg);
            mbarrier_wait(q_full, 0);
            if (m == ragged) zero_rows_past_end<kBlockM>(w, smem.q[0], wg);
            multiply_s(0);
            if (!kGeneral) read_lse(0);
            wgmma_wait<0>(d);
#pragma unroll 1
            for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // S of this tile is complete, nothing is in flight
                const uint32_t slot = it & 1, phase = it >> 1 & 1;
                const int next_m = next_tile(m, first_m, end_m);
                low = opaque(low);
                const auto hand_over = [&](int i, const uint32_t* x) { smem.p[slot][i][thread] = make_uint4(x[0], x[1], x[2], x[3]); };
                mbarrier_wait(p_empty + 8 * slot, phase ^ 1);
                if constexpr (kGeneral) {
                    if (p.dropout_threshold) {
                        draw_dropout(p, w, smem.keep[slot], w.key0, m * kBlockM, head);
                        main_warpgroup_sync(wg);
                    }
                    general_probabilities<T, kBlockM>(p, w, d, smem.lse[slot], smem.keep[slot], w.key0, m * kBlockM, head,
                                                      [&](int i, const uint32_t(&factor)[4], const uint32_t(&P)[4]) {
#pragma unroll
                                                          for (int x = 0; x < 4; ++x) fragment[4 * i + x] = P[x];
                                                          hand_over(i, factor);
                                                      });
                } else {
                    if (m < mask_end) {
                        const int ln = opaque(lane);
                        mask_fragment(d, w, w.key0 + warp * 16 + ln / 4, m * kBlockM + ln % 4 * 2);
                    }
                    probabilities<T>(d, fragment, c, lse, smem.lse[slot], quad);
#pragma unroll
                    for (int i = 0; i < kBlockM / 16; ++i) hand_over(i, fragment + 4 * i);
                }
                arrive(p_full, slot);
                arrive(q_empty, slot);
                mbarrier_wait(dout_full + 8 * slot, phase);
                if (m == ragged) zero_rows_past_end<kBlockM>(w, smem.dout[slot], wg);
                if (it + 1 < uint32_t(tiles)) {
                    mbarrier_wait(q_full + 8 * (slot ^ 1), (it + 1) >> 1 & 1);
                    if (next_m == ragged) zero_rows_past_end<kBlockM>(w, smem.q[slot ^ 1], wg);
                }
                __syncwarp();
                multiply_s(slot ^ 1);  // after the last tile of what lies there, for nobody: a conditional product would cost copies
                accumulate(dv, low + kDout + slot * (kDoutBytes >> 4), it);
                if (!kGeneral) read_lse(slot ^ 1);
                wgmma_wait<0>(d, dv);
                arrive(dout_empty, slot);
                if (kGeneral && next_m == start_m) ++head;
                m = next_m;
            }
            wgmma_wait<0>(dv);
        }
        store_dv<T, kGeneral>(dv, b, w, key);
        return;
    }

    // ------------------------------------------------------------------------------------------------ dS and dK
    float dk[kD / 2];
    const int ds_row = warp * 16 + lane % 16;
    const auto multiply_dp = [&](uint32_t slot) {
        multiply(low + kV, low + kDout + slot * (kDoutBytes >> 4), std::integral_constant<int, kDV / 16>{});
    };
    if (tiles == 0) {
#pragma unroll
        for (int i = 0; i < kD / 2; ++i) dk[i] = 0.0f;
    } else {
        int m = w.start_m;
        mbarrier_wait(kv_full, 0);
        zero_hidden_keys<kGeneral, kBlockN>(p, w, smem.v, 0, wg);
        mbarrier_wait(dout_full, 0);
        if (m == ragged) zero_rows_past_end<kBlockM>(w, smem.dout[0], wg);
        multiply_dp(0);
        wgmma_wait<0>(d);
#pragma unroll 1
        for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // dP of this tile is complete, nothing is in flight
            const uint32_t slot = it & 1, phase = it >> 1 & 1;
            const int next_m = next_tile(m, first_m, end_m);
            low = opaque(low);
            mbarrier_wait(p_full + 8 * slot, phase);
            mbarrier_wait(ds_empty + 8 * slot, phase ^ 1);
            __syncwarp();
            if constexpr (kGeneral)
                if (p.dropout_threshold) drop_gradients<kBlockM>(smem.keep[slot], p.dropout_scale, d);
            // P and delta are read one step ahead, because a read does not pass the store before it.
            uint4 next_p = smem.p[slot][0][thread];
            float4 next_delta = statistic(smem.delta[slot], quad, 0);
#pragma unroll
            for (int i = 0; i < kBlockM / 16; ++i) {
                const uint32_t P[4] = {next_p.x, next_p.y, next_p.z, next_p.w};
                const float4 delta = next_delta;
                if (i + 1 < kBlockM / 16) next_p = smem.p[slot][i + 1][thread], next_delta = statistic(smem.delta[slot], quad, i + 1);
                uint32_t(&ds)[4] = reinterpret_cast<uint32_t(&)[4]>(fragment[4 * i]);
                score_gradients<T>(ds, P, d + 8 * i, delta);
                stmatrix_x4(shared_address(smem.ds[slot]) + matrix_offset<kBlockN>(ds_row, lane, i), ds);
            }
            fence_proxy_async();
            arrive(ds_full, slot);
            arrive(p_empty, slot);
            arrive(dout_empty, slot);
            mbarrier_wait(q_full + 8 * slot, phase);
            if (m == ragged) zero_rows_past_end<kBlockM>(w, smem.q[slot], wg);
            if (it + 1 < uint32_t(tiles)) {
                mbarrier_wait(dout_full + 8 * (slot ^ 1), (it + 1) >> 1 & 1);
                if (next_m == ragged) zero_rows_past_end<kBlockM>(w, smem.dout[slot ^ 1], wg);
            }
            __syncwarp();
            multiply_dp(slot ^ 1);
            accumulate(dk, low + kQ + slot * (kQBytes >> 4), it);
            wgmma_wait<0>(d, dk);
            arrive(q_empty, slot);
            m = next_m;
        }
        wgmma_wait<0>(dk);
    }
    store_dk<T>(dk, b, w, key);
}

template <typename T, BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int device, cudaStream_t stream) {
    return launch_backward_block<T, kId>(backward_wgmma_wide_kernel<T, kId>, sizeof(BackwardWideSmem<T, kId>), b, device, stream);
}
template <BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int device, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch_backward_wgmma<__half, kId>(b, device, stream)
                                              : launch_backward_wgmma<__nv_bfloat16, kId>(b, device, stream);
}

}  // namespace fa
