// keys.cuh: the main warpgroups of block 0: S, P and dK.
#pragma once

#include "attention/backward/wgmma_pair_sm90/block.cuh"
#include "attention/backward/wgmma_sm90/fragments.cuh"
#include "attention/backward/wgmma_sm90/hidden.cuh"
#include "attention/backward/wgmma_sm90/scores.cuh"
#include "attention/backward/wgmma_sm90/store.cuh"
#include "common/constants.h"

namespace fa {

// Block 0: S, P and dK. `values`: the addresses of the other block's shared memory.
template <typename T, BackwardPlanId kId>
struct PairKeysMain {
    using Smem = BackwardPairSmem<T, kId>;
    static constexpr int kD = Smem::kColumns, kBlockM = Smem::kBlockM, kBlockN = Smem::kBlockN;
    static constexpr bool kGeneral = Smem::kPlan.general, kOptions = Smem::kPlan.options, kSoftcap = Smem::kPlan.softcap,
                          kIntervals = Smem::kPlan.intervals, kMasks = Smem::kPlan.masks, kBias = Smem::kPlan.bias();
    static constexpr bool kSkips = kIntervals || kMasks;   // tiles without a visible pair
    static constexpr bool kScarce = kGeneral || kOptions;  // registers: what shared memory holds is read again
    static constexpr int kPSlots = Smem::kPSlots, kQStages = Smem::kQStages;
    static constexpr uint32_t kQBytes = kBlockM * kD * 2;
    static constexpr uint32_t kQ = kBlockN * kD * 2 >> 4, kDs = kQ + (kQStages * kQBytes >> 4);  // from K, in units of descriptors

    using Scores = float[kBlockM / 2];       // S: rows are keys, columns queries
    using Fragment = uint32_t[kBlockM / 4];  // P as A operand
    using Gradient = float[kD / 2];
    using Statistics = float4[2];   // lse: the first two of the next tile, read while its S is multiplied
    using SeenPairs = uint32_t[1];  // masks: read_seen_pairs

    const BackwardParams& b;
    const AttentionParams& p;
    const BackwardSchedule& schedule;
    const BackwardWorkOf<kId>& w;
    decltype(Smem::keys)& keys;
    decltype(Smem::values)& values;
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
            if constexpr (kOptions)
                if (const uint32_t hidden = own_hidden(keys.options.hidden); hidden) clear_hidden(dk, hidden);
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
        if constexpr (kOptions) zero_hidden_keys<kId>(p, w, keys.k, own_warpgroup() * 64, find_hidden<kId>(p, w, keys.options.hidden));
        else zero_hidden_keys<kId>(p, w, keys.k, own_warpgroup() * 64);
        mbarrier_wait(q_full, 0);
        int code = 0;  // IntervalTile::place_and_cut or MaskedTile::place_and_cut
        SeenPairs seen{};
        if constexpr (kSkips) code = keys.options.tile[0].place_and_cut, place = code >> 1;
        if (place >= ragged) zero_rows_past_end<kBlockM>(w, keys.q[0]);
        multiply_s(s, 0);
        if (!kGeneral) read_lse(lse, 0, quad);
        if constexpr (kMasks) read_seen(seen, 0, code & 1, self);
        wgmma_wait<0>(s);
#pragma unroll 1
        for (uint32_t it = 0; it < uint32_t(tiles); ++it) {  // S of this tile is complete, nothing is in flight
            const Step step(it, opaque(self));
            int next = kSkips ? 0 : kScarce ? next_place(place, w.last_place, w.wrap_place) : next_place(place, last, wrap);
            if (kScarce) low = opaque(low), low_q = opaque(low_q);
            announce_p(step);
            if constexpr (kGeneral) send_general(s, step);
            else send_plain(s, lse, step, place, code & 1, seen);
            wgmma_wait<0>(dk);
            if (it > 1) release(step);
            if (it + 1 < uint32_t(tiles)) {
                mbarrier_wait(q_full + 8 * step.next_slot, (it + 1) / kQStages & 1);
                if constexpr (kSkips) code = keys.options.tile[step.next_slot].place_and_cut, next = code >> 1;
                // With masks that skip tiles, only a varlen call waits for that read here.
                if ((!kSkips || p.cu_seqlens_q) && next >= ragged) zero_rows_past_end<kBlockM>(w, keys.q[step.next_slot]);
            }
            __syncwarp();
            multiply_s(s, step.next_slot);  // unused after the last tile: making the product conditional would cost copies of registers
            if (!kGeneral) read_lse(lse, step.next_slot, step.quad);
            if constexpr (kMasks) read_seen(seen, step.next_slot, it + 1 < uint32_t(tiles) && code & 1, self);
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
    // Hides pairs beyond the right edge, and corrects the scores of large rows.
    __device__ __forceinline__ void mask_scores(Scores& s, const Step& step, int place) {
        const int ln = opaque(step.lane);
        // Divided: tile_of_place would cost head dim 256 a register.
        mask_fragment(s, w, first_key(step, ln), place / w.width * kBlockM + ln % 4 * 2);
        if (kSoftcap || !w.has_large_rows()) return;
        if constexpr (kOptions && !kSkips && !kBias)
            if (p.alibi_slopes) add_large_alibi(s, keys.options.alibi[step.slot], first_key(step, ln), ln % 4 * 2);
        adjust_products(s, keys.lse[step.slot], large_rows_of<kBlockM>(p, schedule.tiles, w, visited_at(step)), ln % 4);
    }
    // The options that change S, beside the right edge. cut: whether intervals or a mask cut the tile.
    __device__ __forceinline__ void change_scores(Scores& s, const Step& step, int place, bool cut, const SeenPairs& seen) {
        if (place >= keys.left_place) {
            const int ln = opaque(step.lane);
            mask_left_edge(s, w, first_key(step, ln), place / w.width * kBlockM + ln % 4 * 2);
        }
        if constexpr (kIntervals) {
            if (cut) {
                const int ln = opaque(step.lane);
                hide_rows<kBlockM>(p, s, w, keys.options.tile[step.slot].entry, first_key(step, ln), place / w.width * kBlockM, ln % 4 * 2);
            }
        } else if constexpr (kMasks) {
            hide_pairs(s, seen);
        } else if (!kSoftcap && !kBias && p.alibi_slopes) {
            const int ln = opaque(step.lane);
            add_alibi(s, keys.options.alibi[step.slot], first_key(step, ln), ln % 4 * 2);
        }
    }
    // S becomes scores in natural units.
    __device__ __forceinline__ void add_tile_of_bias(Scores& s, const Step& step, int place) {
        constexpr int kBiasStages = Smem::kPlan.bias_stages;
        const uint32_t slot = step.it % kBiasStages, tile = shared_address(keys.bias[slot]);
        const int key0 = step.own / 32 * 16;
        mbarrier_wait(shared_address(&keys.bias_barriers.full[slot]), step.it / kBiasStages & 1);
        if constexpr (Smem::kPlan.bias_float32) add_float32_bias<kBlockM>(s, p, tile, key0, opaque(step.lane));
        else add_bias<T, kBlockM>(s, p, tile, key0, opaque(step.lane));
        arrive_as_warp(step.lane, shared_address(&keys.bias_barriers.empty[slot]));
        if (place >= ragged_place<true>(p, w, kBlockM))
            hide_rows_past_end(s, w.seqlen_q - place / w.width * kBlockM - opaque(step.lane) % 4 * 2);
    }
    // The bits of the thread's scores of the tile in a slot.
    __device__ __forceinline__ void read_seen(SeenPairs& seen, uint32_t slot, bool cut, int self) const {
        read_seen_pairs<kBlockM>(seen, schedule.masks.seen, keys.options.tile[slot], cut, opaque(self));
    }
    // The tile of the walk.
    __device__ __forceinline__ Visited visited_at(const Step& step) const {
        if constexpr (kSkips) return {tile_of_place(w, keys.options.tile[step.slot].place_and_cut >> 1), keys.options.tile[step.slot].head};
        else return visited(w, int(step.it));
    }
    // The key of element 0 of lane `ln`.
    __device__ __forceinline__ int first_key(const Step& step, int ln) const { return w.key0 + step.own / 32 * 16 + ln / 4; }
    __device__ __forceinline__ void send_plain(Scores& s, const Statistics& lse, const Step& step, int place, bool cut,
                                               const SeenPairs& seen) {
        if constexpr (kBias) add_tile_of_bias(s, step, place);
        if constexpr (kSoftcap) cap_scores(s, schedule.softcap);
        if (place < w.mask_place) mask_scores(s, step, place);
        if constexpr (kOptions) change_scores(s, step, place, cut, seen);
        Fragment fragment;
        probabilities<T>(s, fragment,
                         kSoftcap ? schedule.softcap.exponent
                         : kBias  ? kLog2e
                                  : scale_log2,
                         lse, keys.lse[step.slot], step.quad);
        if constexpr (kOptions && !kSkips) {
            if (p.mask.data) {  // P of a hidden key is 0, even where it would be NaN
                const uint32_t hidden = own_hidden(keys.options.hidden);
#pragma unroll
                for (int i = 0; i < kBlockM / 16; ++i) clear_hidden(reinterpret_cast<uint32_t(&)[4]>(fragment[4 * i]), hidden);
            }
        }
#pragma unroll
        for (int i = 0; i < kBlockM / 16; ++i) send(step, step.p_slot, i, reinterpret_cast<const uint32_t(&)[4]>(fragment[4 * i]));
    }
    // dK of the tile two steps back is complete: its Q and its dS may be overwritten.
    __device__ __forceinline__ void release(const Step& step) {
        arrive_there_as_warp(step.lane, values.ds_empty_there[(kQStages % 2 ? step.it : step.slot) & 1], kValuesBlock);
        arrive_as_warp(step.lane, q_empty + 8 * ((step.it + kQStages - 2) % kQStages));
    }
};

}  // namespace fa
