// values.cuh: the main warpgroups of block 1: dP, dS and dV.
#pragma once

#include "attention/backward/wgmma_pair_sm90/block.cuh"
#include "attention/backward/wgmma_sm90/fragments.cuh"
#include "attention/backward/wgmma_sm90/hidden.cuh"
#include "attention/backward/wgmma_sm90/scores.cuh"
#include "attention/backward/wgmma_sm90/store.cuh"
#include "common/constants.h"

namespace fa {

// Block 1: dP, dS and dV. `keys`: the addresses of the other block's shared memory.
template <typename T, BackwardPlanId kId>
struct PairValuesMain {
    using Smem = BackwardPairSmem<T, kId>;
    static constexpr int kDV = Smem::kColumnsV, kBlockM = Smem::kBlockM, kBlockN = Smem::kBlockN;
    static constexpr bool kGeneral = Smem::kPlan.general, kOptions = Smem::kPlan.options, kSoftcap = Smem::kPlan.softcap,
                          kDropout = Smem::kPlan.dropout;
    static constexpr bool kSkips = Smem::kPlan.intervals || Smem::kPlan.masks;  // tiles without a visible pair
    static constexpr int kPSlots = Smem::kPSlots;
    static constexpr uint32_t kDoutBytes = kBlockM * kDV * 2;
    static constexpr uint32_t kDout = kBlockN * kDV * 2 >> 4;  // from V, in units of descriptors

    using Scores = float[kBlockM / 2];       // dP: rows are keys, columns queries
    using Fragment = uint32_t[kBlockM / 4];  // P as A operand
    using Gradient = float[kDV / 2];

    const BackwardParams& b;
    const AttentionParams& p;
    const BackwardSchedule& schedule;
    const BackwardWorkOf<kId>& w;
    decltype(Smem::keys)& keys;
    decltype(Smem::values)& values;
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

    __device__ __forceinline__ PairValuesMain(const BackwardParams& b, const BackwardSchedule& schedule, Smem& smem, int wg)
        : b(b),
          p(b.forward),
          schedule(schedule),
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
            if constexpr (kOptions)
                if (const uint32_t hidden = own_hidden(values.hidden); hidden) clear_hidden(dv, hidden);
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
        uint32_t hidden = 0;
        if constexpr (kOptions) hidden = find_hidden<kId>(p, w, values.hidden);
        zero_hidden_keys<kId>(p, w, values.v, own_warpgroup() * 64, hidden);
        zero_hidden_keys<kId>(p, w, values.k, own_warpgroup() * 64, hidden);
        mbarrier_wait(dout_full, 0);
        if constexpr (!kSkips) {
            const bool ragged = w.end_m * w.width > ragged_place(p, w, kBlockM);
            ragged_it = !ragged ? ~0u : w.in_order ? 0 : w.end_m - 1 - w.start_step;
        }
        zero_ragged(0);
        multiply_dp(dp, 0);
        wgmma_wait<0>(dp);
#pragma unroll 1
        for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // dP of this tile is complete, nothing is in flight
            const Step step(it, opaque(self));
            low = opaque(low);
            if (kDropout) low_dout = opaque(low_dout);
            if constexpr (kGeneral || kDropout)
                if (kDropout || p.dropout_threshold) drop(dp, step);
            // The other block sends P of this tile after it has received dS of two tiles ago, so that copy has left its slot of dS, too.
            mbarrier_wait(p_full + step.own / 128 * 8 + 16 * step.p_slot, it / kPSlots & 1);
            if constexpr (!kGeneral) {
                receive(fragment, step, step.p_slot);
                if (!kDropout) multiply_dv(dv, fragment, step);
            }
            store_ds(dp, fragment, step);
            send_ds(step);
            if constexpr (kDropout) drop_probabilities(fragment, step);
            if (it + 1 < uint32_t(tiles)) {
                mbarrier_wait(dout_full + 8 * (step.slot ^ 1), (it + 1) >> 1 & 1);
                zero_ragged(it + 1);
            }
            __syncwarp();
            if constexpr (kGeneral) {
                receive(fragment, step, 1);
                multiply_dv(dv, fragment, step);
            }
            if constexpr (kDropout) multiply_dv(dv, fragment, step);
            multiply_dp(dp, step.slot ^ 1);
            wgmma_wait<0>(dp, dv);
            arrive_as_warp(step.lane, dout_empty + 8 * step.slot);
        }
        wgmma_wait<0>(dv);
    }

    __device__ __forceinline__ void zero_ragged(uint32_t it) {
        if constexpr (kSkips) {
            if (p.cu_seqlens_q && values.place[it & 1] >= ragged_place(p, w, kBlockM)) zero_rows_past_end<kBlockM>(w, values.dout[it & 1]);
        } else if (it == ragged_it) {
            zero_rows_past_end<kBlockM>(w, values.dout[it & 1]);
            ragged_it += !w.in_order ? w.end_m - w.first_m : it + 1 < uint32_t(w.width) ? 1 : tiles;  // in order: all in the first round
        }
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
        if constexpr (kGeneral) drop_gradients<kBlockM>(values.keep + 8 * wg, p.dropout_scale, dp);
    }
    // The signs of a lane's queries 16 i + 2 quad + {0, 1, 8, 9}.
    __device__ __forceinline__ uint2 kept(int i, const Step& step) const {
        const uint32_t own = opaque(uint32_t(step.own));
        return kept_signs(reinterpret_cast<const uint16_t*>(values.keep + 8 * (own / 128)), i, int(own % 128 / 32), int(own % 32));
    }
    // P after dropout.
    __device__ __forceinline__ void drop_probabilities(Fragment& fragment, const Step& step) const {
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const uint2 signs = kept(i, step);
            fragment[4 * i] = keep_pair<0>(fragment[4 * i], signs.x), fragment[4 * i + 1] = keep_pair<1>(fragment[4 * i + 1], signs.x);
            fragment[4 * i + 2] = keep_pair<0>(fragment[4 * i + 2], signs.y),
                             fragment[4 * i + 3] = keep_pair<1>(fragment[4 * i + 3], signs.y);
        }
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
        float4 next_delta = statistic(values.delta[slot], step.quad, 0), next_lse{};
        if constexpr (kSoftcap) next_lse = statistic(values.lse[slot], step.quad, 0);
        mbarrier_wait(ds_empty + 8 * slot, step.phase ^ 1);
        const int ds_row = step.own / 32 * 16 + step.own % 16;
        // delta is read one step ahead, because a read cannot overtake the store before it.
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const float4 delta = next_delta, lse = next_lse;
            if (!kDropout && i + 1 < kBlockM / 16) next_delta = statistic(values.delta[slot], step.quad, i + 1);
            if constexpr (kSoftcap)
                if (i + 1 < kBlockM / 16) next_lse = statistic(values.lse[slot], step.quad, i + 1);
            uint32_t ds[4];
            if constexpr (kGeneral) {
                const uint4 x = values.p[0][i][step.own];
                const uint32_t factor[4] = {x.x, x.y, x.z, x.w};
                score_gradients<T>(ds, factor, dp + 8 * i, delta);
            } else if constexpr (kSoftcap) {
                capped_gradients<T>(ds, fragment + 4 * i, dp + 8 * i, delta, lse, schedule.softcap);
            } else if constexpr (kDropout) {
                dropped_gradients<T>(ds, fragment + 4 * i, dp + 8 * i, delta, p.dropout_scale, kept(i, step));
            } else {
                score_gradients<T>(ds, fragment + 4 * i, dp + 8 * i, delta);
            }
            if (kDropout && i + 1 < kBlockM / 16) next_delta = statistic(values.delta[slot], step.quad, i + 1);  // registers are scarce
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

}  // namespace fa
