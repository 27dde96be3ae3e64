// main.cuh: the main warpgroups of Hopper's backward: S, P, dP, dS, dV and dK.
#pragma once

#include "attention/backward/wgmma_sm90/block.cuh"
#include "attention/backward/wgmma_sm90/fragments.cuh"
#include "attention/backward/wgmma_sm90/hidden.cuh"
#include "attention/backward/wgmma_sm90/intervals.cuh"
#include "attention/backward/wgmma_sm90/masks.cuh"
#include "attention/backward/wgmma_sm90/options.cuh"
#include "attention/backward/wgmma_sm90/scores.cuh"
#include "attention/backward/wgmma_sm90/store.cuh"
#include "common/constants.h"

namespace fa {

// A thread of a main warpgroup. The register tiles are arguments of its functions.
template <typename T, BackwardPlanId kId>
struct MainWarpgroup {
    using Smem = BackwardSmem<T, kId>;
    static constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    static constexpr int kD = kPlan.columns(), kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    static constexpr bool kGeneral = kPlan.general, kOptions = kPlan.options, kSoftcap = kPlan.softcap, kIntervals = kPlan.intervals,
                          kMasks = kPlan.masks, kBias = kPlan.bias(), kDropout = kPlan.dropout;
    static constexpr bool kSkips = kIntervals || kMasks;  // tiles without a visible pair
    static constexpr int kStages = kPlan.stages, kKeyStages = kPlan.key_stages();
    static constexpr uint32_t kTileBytes = kBlockM * kD * 2, kKeysBytes = kBlockN * kD * 2, kDsBytes = kBlockN * kBlockM * 2;
    using Scores = float[kBlockM / 2];         // rows are keys, columns queries
    using Fragment = uint32_t[kBlockM / 4];    // P as A operand; general: P d(score) / d(scaled product)
    using Gradient = float[kD / 2];            // row g + 8 r of the warp's 16 keys: elements with i / 2 % 2 = r
    using Statistics = float4[2];              // the first values of lse
    using SeenPairs = uint32_t[kBlockM / 64];  // masks: read_seen_pairs
    // What dS needs beside P, dP and delta. softcap: the first values of lse; options: own_hidden.
    struct OptionInputs {
        float4 lse;
        uint32_t hidden;
    };
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
                if constexpr (kOptions)
                    if (const uint32_t hidden = own_hidden(lane); hidden) clear_hidden(dv, hidden), clear_hidden(dk, hidden);
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
        const int last = w.last_place, wrap = w.wrap_place, ragged = ragged_place<kBias>(p, w, kBlockM);
        const int left_place = kOptions ? left_place_of(p, w, kBlockM) : INT_MAX;
        int place = w.start_place;
        const int mask_place = w.mask_place;
        uint32_t hidden = 0;
        if constexpr (kOptions) {
            const int own = w.key0 + wg * 64 + warp * 16;
            if constexpr (kIntervals) hidden = unseen_keys(p, static_cast<const BackwardIntervalWork&>(w), own);
            else if constexpr (kMasks) hidden = static_cast<const BackwardMaskedWork&>(w).unseen[4 * wg + warp];
            else hidden = hidden_keys(p, w, own);
            smem.options.hidden[4 * wg + warp] = hidden;
            __syncwarp();
        }
        zero_hidden_keys<kId>(p, w, smem.k[key_slot], wg * 64, hidden);
        zero_hidden_keys<kId>(p, w, smem.v[key_slot], wg * 64, hidden);
        const uint32_t slot0 = it0 % kStages;
        mbarrier_wait(q_full + 8 * slot0, it0 / kStages & 1);
        int code = 0;  // IntervalTile::place_and_cut or MaskedTile::place_and_cut
        SeenPairs seen{};
        if constexpr (kSkips) code = smem.options.tile[slot0].place_and_cut, place = code >> 1;
        if (place >= ragged) zero_rows_past_end<kBlockM>(w, smem.q[slot0]);
        multiply_s(s, slot0, keys);
        if (!kGeneral) read_lse(lse, slot0);
        if constexpr (kMasks) read_seen(seen, slot0, code & 1);
        wgmma_wait<0>(s);
        if constexpr (kOptions) change_scores(w, s, seen, slot0, place, code & 1, mask_place, left_place, ragged, it0, 0);
#pragma unroll 1
        for (uint32_t it = it0; it < it0 + tiles; ++it) {  // S of this tile is complete, nothing is in flight
            const uint32_t slot = it % kStages, phase = it / kStages & 1, ds_slot = it & 1;
            // The last iteration multiplies its own tile again (see below): the next slot may already hold a tile of the next keys.
            const uint32_t next_slot = kGeneral || it + 1 < it0 + tiles ? (it + 1) % kStages : slot;
            int next = kSkips ? 0 : next_place(place, last, wrap);
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
            if (kBlockM == 64 && !kDropout) multiply_dv(dv, prob, slot, it == it0);
            if constexpr (kDropout) draw(slot);  // while dP is multiplied
            const float4 delta = statistic(smem.delta[slot], quad, 0);
            OptionInputs first{};
            if constexpr (kSoftcap) first = {statistic(smem.lse[slot], quad, 0), own_hidden(opaque(int(threadIdx.x)) % 32)};
            mbarrier_wait(ds_empty + 8 * ds_slot, it >> 1 & 1 ^ 1);
            if constexpr (kOptions && !kSoftcap && !kSkips)
                first.hidden = own_hidden(opaque(int(threadIdx.x)) % 32);  // earlier, registers spill
            if (kDropout) main_warpgroup_sync(wg), wgmma_wait<0>(dp);      // all warps have drawn
            else if (kBlockM == 64) wgmma_wait<1>(dp);
            else wgmma_wait<0>(dp), multiply_dv(dv, prob, slot, it == it0);  // drained alone, dP frees its registers one by one
            if constexpr (kGeneral)
                if (p.dropout_threshold) drop_gradients<kBlockM>(smem.keep + 8 * wg, p.dropout_scale, dp);
            store_ds(dp, prob, slot, ds_slot, delta, first);  // while dV is multiplied; with dropout before
            if constexpr (kDropout) drop(prob);
            if (it + 1 < it0 + tiles) {
                mbarrier_wait(q_full + 8 * next_slot, (it + 1) / kStages & 1);
                if constexpr (kSkips) code = smem.options.tile[next_slot].place_and_cut, next = code >> 1;
                // With masks that skip tiles, only a varlen call waits for that read here.
                if ((!kSkips || p.cu_seqlens_q) && next >= ragged) zero_rows_past_end<kBlockM>(w, smem.q[next_slot]);
            }
            announce_ds(ds_slot);
            if (!kDropout) wgmma_wait<0>(dv);
            multiply_s(s, next_slot, keys);  // unused after the last tile: making the product conditional would cost copies of registers
            if (kDropout) multiply_dv(dv, prob, slot, it == it0);
            else release(dout_empty, slot);
            multiply_dk(dk, slot, ds_slot, it == it0);
            if (!kGeneral && !kDropout) read_lse(lse, next_slot);
            if constexpr (kMasks) read_seen(seen, next_slot, code & 1);
            if constexpr (kOptions) {  // while dK is multiplied
                wgmma_wait<kDropout ? 2 : 1>(s);
                if (it + 1 < it0 + tiles)
                    change_scores(w, s, seen, next_slot, next, code & 1, mask_place, left_place, ragged, it + 1, it + 1 - it0);
            }
            if constexpr (kDropout) wgmma_wait<0>(dk, dv), release(dout_empty, slot), read_lse(lse, next_slot);
            else wgmma_wait<0>(dk, s);
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
        if (!kOptions && place < mask_place) mask_scores(w, s, slot, place, walked);
        probabilities<T>(s, prob, kSoftcap ? schedule.softcap.exponent : kBias ? kLog2e : scale_log2, lse, smem.lse[slot], quad);
    }
    // Hides pairs beyond the right edge, and corrects the scores of large rows.
    __device__ __forceinline__ void mask_scores(const BackwardWork& w, Scores& s, uint32_t slot, int place, uint32_t walked) const {
        const int ln = opaque(lane);
        mask_fragment(s, w, first_key(w, ln), tile_of_place(w, place) * kBlockM + ln % 4 * 2);
        if (!kSoftcap && w.has_large_rows()) {  // read from shared memory: masked tiles are many in short causal calls
            if constexpr (kOptions && !kSkips)
                if (!kBias && p.alibi_slopes) add_large_alibi(s, smem.options.alibi[slot], first_key(w, ln), ln % 4 * 2);
            adjust_products(s, smem.lse[slot], large_rows_of<kBlockM>(p, schedule.tiles, w, visited_at(w, slot, walked)), ln % 4);
        }
    }
    // All options of a tile's scores that change S. cut: whether intervals or a mask cut the tile.
    __device__ __forceinline__ void change_scores(const BackwardWork& w, Scores& s, const SeenPairs& seen, uint32_t slot, int place,
                                                  bool cut, int mask_place, int left_place, int ragged, uint32_t it,
                                                  uint32_t walked) const {
        if constexpr (kBias) {
            add_tile_of_bias(s, it);
            if (place >= ragged) hide_rows_past_end(s, w.seqlen_q - tile_of_place(w, place) * kBlockM - opaque(lane) % 4 * 2);
        }
        if constexpr (kSoftcap) cap_scores(s, schedule.softcap);
        if (place < mask_place) mask_scores(w, s, slot, place, walked);
        if (place >= left_place) {
            const int ln = opaque(lane);
            mask_left_edge(s, w, first_key(w, ln), tile_of_place(w, place) * kBlockM + ln % 4 * 2);
        }
        if constexpr (kIntervals) {
            if (cut) {
                const int ln = opaque(lane);
                hide_rows<kBlockM>(p, s, w, smem.options.tile[slot].entry, first_key(w, ln), tile_of_place(w, place) * kBlockM, ln % 4 * 2);
            }
        } else if constexpr (kMasks) {
            hide_pairs(s, seen);
        } else if (!kSoftcap && !kBias && p.alibi_slopes) {
            const int ln = opaque(lane);
            add_alibi(s, smem.options.alibi[slot], first_key(w, ln), ln % 4 * 2);
        }
    }
    // The bits of the thread's scores of the tile in a slot.
    __device__ __forceinline__ void read_seen(SeenPairs& seen, uint32_t slot, bool cut) const {
        read_seen_pairs<kBlockM>(seen, schedule.masks.seen, smem.options.tile[slot], cut, opaque(int(threadIdx.x)) - 128);
    }
    // The tile of Q in a slot. walked: its number in the walk.
    __device__ __forceinline__ Visited visited_at(const BackwardWork& w, uint32_t slot, uint32_t walked) const {
        if constexpr (kSkips) return {tile_of_place(w, smem.options.tile[slot].place_and_cut >> 1), smem.options.tile[slot].head};
        else return visited(w, int(walked));
    }
    __device__ __forceinline__ void add_tile_of_bias(Scores& s, uint32_t it) const {
        const uint32_t slot = it % kPlan.bias_stages;
        mbarrier_wait(shared_address(&smem.bias_barriers.full[slot]), it / kPlan.bias_stages & 1);
        if constexpr (kPlan.bias_float32)
            add_float32_bias<kBlockM>(s, p, shared_address(smem.bias[slot]), wg * 64 + warp * 16, opaque(lane));
        else add_bias<T, kBlockM>(s, p, shared_address(smem.bias[slot]), wg * 64 + warp * 16, opaque(lane));
        __syncwarp();
        release(shared_address(smem.bias_barriers.empty), slot);
    }
    // Draws the tile's dropout for the warpgroup's keys. All warps read the bits of the tile before until they announced its dS. They have
    // to meet before they read these.
    __device__ __forceinline__ void draw(uint32_t slot) const {
        draw_kept<kBlockM, true>(p, smem.options.dropout[slot], wg * dropout_call(64), smem.kept.of_warpgroup[wg]);
    }
    __device__ __forceinline__ uint2 kept(int i) const { return kept_signs(smem.kept.of_warpgroup[wg], i, warp, lane); }
    // P after dropout.
    __device__ __forceinline__ void drop(Fragment& prob) const {
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            const uint2 signs = kept(i);
            prob[4 * i] = keep_pair<0>(prob[4 * i], signs.x), prob[4 * i + 1] = keep_pair<1>(prob[4 * i + 1], signs.x);
            prob[4 * i + 2] = keep_pair<0>(prob[4 * i + 2], signs.y), prob[4 * i + 3] = keep_pair<1>(prob[4 * i + 3], signs.y);
        }
    }
    // The key of element 0 of lane `ln`.
    __device__ __forceinline__ int first_key(const BackwardWork& w, int ln) const { return w.key0 + wg * 64 + warp * 16 + ln / 4; }
    // Bits 0 and 8: whether the mask hides the thread's two keys.
    __device__ __forceinline__ uint32_t own_hidden(int ln) const { return smem.options.hidden[4 * wg + warp] >> ln / 4; }
    // Stores dS to its slot. P is unpacked from its 16 bits, because its float registers are needed elsewhere. `delta` and `next.lse`
    // hold the values for i = 0. Later values are read one step ahead, because a read cannot overtake the store before it. Softcap reads
    // them as late as that allows, because registers are scarce.
    __device__ __forceinline__ void store_ds(const Scores& dp, const Fragment& prob, uint32_t slot, uint32_t ds_slot, float4 delta,
                                             OptionInputs next) const {
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) {
            uint32_t ds[4];
            const float4 own = delta, lse = next.lse;
            if (!kSoftcap && i + 1 < kBlockM / 16) delta = statistic(smem.delta[slot], quad, i + 1);
            if constexpr (kSoftcap) capped_gradients<T>(ds, prob + 4 * i, dp + 8 * i, own, lse, schedule.softcap);
            else if constexpr (kDropout) dropped_gradients<T>(ds, prob + 4 * i, dp + 8 * i, own, p.dropout_scale, kept(i));
            else score_gradients<T>(ds, prob + 4 * i, dp + 8 * i, own);
            if constexpr (kOptions && !kSkips) clear_hidden(ds, next.hidden);  // else P of a hidden key is 0
            if constexpr (kSoftcap)
                if (i + 1 < kBlockM / 16)
                    delta = statistic(smem.delta[slot], quad, i + 1), next.lse = statistic(smem.lse[slot], quad, i + 1);
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

}  // namespace fa
