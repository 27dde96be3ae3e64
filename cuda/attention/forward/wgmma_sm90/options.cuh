// wgmma_sm90/options.cuh: the consumers' loop of plans with options: windows with a left edge, ALiBi, softcap, masks of keys. It is the
// loop of kernel.cuh, with the tiles that key_tiles.cuh hands out and with scores that change before the softmax.
//
// S stays a product q . k as far as possible, so that a tile that no option changes costs what it costs in the bare plan:
//
//     softcap   S = tanh(S scale / softcap), in all tiles; the exponential multiplies by softcap instead of scale
//     ALiBi     scores fall with the distance from the diagonal. Beside the diagonal the distance is a number of the row plus or minus one
//               of the key: S += slope j, one operation a score, and the row's number goes to the maximum that the exponentials subtract.
//               On the diagonal S -= slope |i + shift - j|
//     bias      S becomes a score in natural units (bias.cuh)
//     mask      -inf where a bit of the tile says so, in cut tiles
//     edges     -inf, in the tiles that they cross
#pragma once

#include "attention/common/softcap.h"
#include "attention/forward/wgmma_sm90/bias.cuh"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "attention/forward/wgmma_sm90/dropout.cuh"
#include "attention/forward/wgmma_sm90/intervals.cuh"
#include "attention/forward/wgmma_sm90/seen_blocks.cuh"
#include "common/constants.h"
#include "device/approximate.cuh"
#include "device/ring.cuh"

namespace fa {

// As exponentials() in score_fragment.cuh: S becomes P = 2^exponent(S, i, r), for element i in row g + 8 r.
template <int kCount, typename Function>
__device__ __forceinline__ void exponentials_of(float (&S)[kCount], float (&sum)[2], const Function& exponent) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4) {
            S[i] = exp2_approx(exponent(S[i], i, r)), S[i + 1] = exp2_approx(exponent(S[i + 1], i + 1, r));
            a += S[i], b += S[i + 1];
        }
        sum[r] = a + b;
    }
}

// S = tanh(S inverse). While the scores of a warp stay below kTanhLimit of softcap, the polynomial does it. The exponentials' unit, which
// is as busy as the tensor cores at head dim 64, has nothing to do then. Two halves, each behind a branch of its own: all elements at once
// would take too many registers.
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ bool all_small(const float (&S)[kCount], float inverse) {
    float greatest[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = kBegin; i < kEnd; ++i) greatest[i % 2] = fmaxf(greatest[i % 2], fabsf(S[i]));
    return __all_sync(~0u, fmaxf(greatest[0], greatest[1]) * inverse < kTanhLimit);
}
template <int kBegin, int kEnd, int kCount>
__device__ __forceinline__ void cap_part(float (&S)[kCount], float inverse) {
    if (all_small<kBegin, kEnd>(S, inverse)) {
#pragma unroll
        for (int i = kBegin; i < kEnd; ++i) S[i] = tanh_polynomial(S[i] * inverse);
    } else {
#pragma unroll
        for (int i = kBegin; i < kEnd; ++i)
            S[i] = tanh_any(S[i] * inverse, [](float x) { return exp2_approx(x); }, [](float x) { return rcp_approx(x); });
    }
}
template <int kCount>
__device__ __forceinline__ void cap(float (&S)[kCount], float inverse) {
    cap_part<0, kCount / 2>(S, inverse);
    cap_part<kCount / 2, kCount>(S, inverse);
}

// What the options do to the tiles of one item. Each of them is behind a branch that all lanes of a warp take alike.
template <typename T, WgmmaPlanId kId>
struct TileOptions {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr int kBlockN = kPlan.block_n;
    static constexpr bool kBias = kPlan.bias, kBiasOptions = kPlan.bias_options;
    using Scores = float[kBlockN / 2];
    const AttentionParams& p;
    const ForwardWork& w;
    const WgmmaSchedule& schedule;
    WgmmaSmem<T, kId>& smem;
    const uint32_t& entry;  // one more than the number of the tile
    const float& slope_of_item;
    const Consumer& me;
    const MaskedTiles masked;
    // What ALiBi needs to know. diagonal: the key that row 0 of the item is aligned with. Beside dropout registers are too few, and these
    // are read where they are used. Volatile: the registers are free again after the tile.
    struct Slope {
        float slope;
        int diagonal;
    } early;
    __device__ __forceinline__ Slope read_slope() const {
        const volatile ForwardWork& item = w;
        return {*static_cast<const volatile float*>(&slope_of_item), item.row0 + item.shift};
    }
    // Called for every tile before the wait for its scores: a read of shared memory takes 300 cycles while products read their operands.
    __device__ __forceinline__ void fetch(const KeyTile&, int /* n */) {
        if (!(kBias && !kBiasOptions) && !kPlan.dropout && p.alibi_slopes) early = read_slope();
    }
    __device__ __forceinline__ float slope() const { return kPlan.dropout ? read_slope().slope : early.slope; }
    __device__ __forceinline__ int diagonal() const { return kPlan.dropout ? w.row0 + w.shift : early.diagonal; }
    // From row g of the thread to its element 0.
    __device__ __forceinline__ float distance(int n) const {
        const Consumer at = me.rare();
        return float(diagonal() + at.row() - n * kBlockN - 2 * at.quad());
    }
    // Whether the tile may have keys that a row of the warpgroup does not see.
    __device__ __forceinline__ bool has_edge(int n) const { return n >= masked.right_tile || n < masked.left_tile; }
    // Whether no option changes S in tile n.
    __device__ __forceinline__ bool is_plain(int cut, int n) const {
        return !(kBias || p.softcap != 0 || p.alibi_slopes || cut || has_edge(n));
    }
    // Whether the maximum of tile n, which follows tile `before`, must be found: a row may see its first key, or scores may rise. Under
    // ALiBi they fall from the diagonal on, downwards and later upwards; under a negative slope they rise.
    __device__ __forceinline__ bool is_exact(const KeyTile&, int n, int before, const RowStatistics&) const {
        if (n >= masked.right_tile) return true;
        if ((kBias && !kBiasOptions) || !p.alibi_slopes) return false;
        const bool beside = n > before || (n + 1) * kBlockN - 1 <= diagonal() + me.wg * 64;
        return !beside || slope() < 0;
    }
    __device__ __forceinline__ void hide(Scores& S, const KeyTile& tile) const {
        if (!tile.cut) return;
        const uint32_t hidden = tile.hidden[me.rare().quad()];
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i)
            if (hidden >> (i / 4 * 2 + i % 2) & 1) S[i] = -INFINITY;
    }
    __device__ __forceinline__ void add_slopes(Scores& S, int n) const {
        const float slope = this->slope(), to_key0 = distance(n);
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) S[i] = fmaf(-slope, fabsf(to_key0 + float(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), S[i]);
    }
    template <Infinities kInfinities>
    __device__ __forceinline__ void add_tile_of_bias(Scores& S, int n) const {
        const BiasRing<kId> ring(smem.bias.full, smem.bias.empty, entry - 1);
        float scale = p.scale;
        if constexpr (kBiasOptions)
            if (p.softcap != 0) scale = p.softcap, cap(S, schedule.cap_inverse);
        ring.wait_full();
        const uint32_t tile = shared_address(smem.bias.tiles[ring.slot]);
        if constexpr (kPlan.bias_float32) add_float32_bias<kInfinities, kId>(S, p, tile, me);
        else add_bias<kInfinities, T, kId>(S, p, scale, tile, me);
        if constexpr (kBiasOptions)
            if (p.alibi_slopes) add_slopes(S, n);
    }
    // The warp is done with the tile's bias.
    __device__ __forceinline__ void release_bias() const {
        __syncwarp();
        if (arrives(me.lane)) mbarrier_arrive(BiasRing<kId>(smem.bias.full, smem.bias.empty, entry - 1).empty_barrier());
    }
    // Applies all options to S.
    __device__ __forceinline__ void apply(Scores& S, const KeyTile& tile, int n) const {
        if constexpr (kBias) {
            add_tile_of_bias<Infinities::kStrict>(S, n);
            hide(S, tile);
            mask_scores<kId>(S, w, masked, n, me);
            return;
        }
        if (p.softcap != 0) cap(S, schedule.cap_inverse);
        if (p.alibi_slopes) add_slopes(S, n);
        hide(S, tile);
        mask_scores<kId>(S, w, masked, n, me);
    }
    // Applies all but one, which the exponentials will apply.
    __device__ __forceinline__ InExponent prepare(Scores& S, const KeyTile& tile, int n) const {
        if constexpr (kBias) {
            add_tile_of_bias<Infinities::kAdded>(S, n);
            hide(S, tile);
            mask_scores<kId>(S, w, masked, n, me);
            return InExponent::kNothing;
        }
        if (p.softcap != 0) {
            if (!p.alibi_slopes && !tile.cut && !has_edge(n) && schedule.capped.is_exact() &&
                all_small<0, kBlockN / 2>(S, schedule.cap_inverse))
                return InExponent::kCap;
            cap(S, schedule.cap_inverse);
        }
        mask_scores<kId>(S, w, masked, n, me);
        if (p.alibi_slopes) {
            hide(S, tile);
            return InExponent::kSlope;
        }
        return tile.cut ? InExponent::kMask : InExponent::kNothing;
    }
    // S becomes P under the current maximum. pack() follows in each branch, so that it can run under the exponentials.
    template <typename Pack>
    __device__ __forceinline__ void take_exponentials(Scores& S, float scale, const RowStatistics& rows, const KeyTile& tile, int n,
                                                      int before, InExponent option, float (&sum)[2], const Pack& pack) const {
        if constexpr (kBias) exponentials(S, exponent_of_natural(), rows.row_max, sum), pack();
        else take_exponentials_of_products(S, scale, rows, tile, n, before, option, sum, pack);
    }
    template <typename Pack>
    __device__ __forceinline__ void take_exponentials_of_products(Scores& S, float scale, const RowStatistics& rows, const KeyTile& tile,
                                                                  int n, int before, InExponent option, float (&sum)[2],
                                                                  const Pack& pack) const {
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) base[r] = rows.row_max[r] == -INFINITY ? 0.0f : rows.row_max[r];
        if (option == InExponent::kCap) {
            exponentials_of(S, sum, [&](float x, int, int r) { return fmaf(x, schedule.capped.of(x * x), -base[r]); });
            pack();
        } else if (option == InExponent::kSlope) {
            const float of_key = (n < before ? slope() : -slope()) * scale, to_key0 = distance(n);
            base[0] = fmaf(of_key, to_key0, base[0]), base[1] = fmaf(of_key, to_key0 + 8.0f, base[1]);
            exponentials_of(S, sum,
                            [&](float x, int i, int r) { return fmaf(x, scale, fmaf(of_key, float(i / 4 * 8 + i % 2), -base[r])); });
            pack();
        } else if (option == InExponent::kMask) {
            const uint32_t hidden = tile.hidden[me.rare().quad()];
            exponentials_of(
                S, sum, [&](float x, int i, int r) { return hidden >> (i / 4 * 2 + i % 2) & 1 ? -INFINITY : fmaf(x, scale, -base[r]); });
            pack();
        } else {
            exponentials_of(S, sum, [&](float x, int, int r) { return fmaf(x, scale, -base[r]); });
            pack();
        }
    }
};

// The number of a tile, from KeyTile::place.
__device__ __forceinline__ int index_of(int place) { return place < 0 ? ~place : place; }

// What the exponentials multiply the scores of a plan by.
template <WgmmaPlanId kId>
__device__ __forceinline__ Exponent exponent_of_plan(const AttentionParams& p) {
    if (kWgmmaPlan<kId>.bias) return exponent_of_natural();
    return exponent_of_products((!kWgmmaPlan<kId>.skips() && p.softcap != 0 ? p.softcap : p.scale) * kLog2e);
}

// What the loop below lacks. In plans for blocks a warpgroup that passes over a tile takes no turn.
constexpr bool loop_serves(const WgmmaPlan& plan) {
    return !plan.q_in_registers && !plan.general && !plan.pieces && !(plan.blocks && plan.ping_pong);
}

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void consume_with_options(const AttentionParams& p, const WgmmaSchedule& schedule, WgmmaSmem<T, kId>& smem,
                                                     const Consumer& me, const SeenBlocks* blocks = nullptr) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n, kWarpgroups = kPlan.warpgroups;
    constexpr bool kSpeculative = kPlan.speculative(), kEarlyPack = kPlan.early_pack;
    // The options of an exact tile in one place for both ways to it, or in two: the registers suffice so.
    constexpr bool kAppliesTwice = !kEarlyPack;
    static_assert(loop_serves(kPlan));
    const uint64_t k_step = descriptor_step(sizeof smem.k[0]), v_step = descriptor_step(sizeof smem.v[0]);

    float S[kBlockN / 2], O[kPlan.headdim_v / 2];
    uint32_t P[kBlockN / 4], no_fragment[1];
    RowStatistics rows;
    typename TileBlocks<kId>::Words words;  // plans for blocks
    KeptPairs<kId> kept;                    // plans with dropout
    Ring<1> q(smem.q_full, smem.q_empty);
    Ring<kPlan.stages> k(smem.k_full, smem.k_empty), v(smem.v_full, smem.v_empty);
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    const uint32_t slab = shared_address(smem.q) + me.wg * sizeof smem.q[0];
    const uint64_t desc_q = wgmma_descriptor(slab, 16), desc_k = wgmma_descriptor(shared_address(smem.k), 16),
                   desc_v = wgmma_descriptor(shared_address(smem.v), kBlockN * kChunkRowBytes);
    const Exponent exponent = exponent_of_plan<kId>(p);

    uint32_t entry = 0;  // of the next tile
    const auto next_tile = [&] { return &smem.keys.entry(entry++); };
    // Intervals and dropout leave too few registers to carry the positions in the rings of K and V: they follow from the tile's number.
    const auto find_stages = [&] {
        if constexpr (kWgmmaPlan<kId>.intervals || kWgmmaPlan<kId>.dropout)
            k = {smem.k_full, smem.k_empty, entry}, v = {smem.v_full, smem.v_empty, entry - 1};
    };

    if (me.wg == kWarpgroups - 1) give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);  // the first turn is warpgroup 0's
    for (;; work.next()) {
        work.wait_full();
        const auto& w = smem.work[work.slot];
        if (w.state == WorkState::kEnd) return;
        auto options = [&] {
            const MaskedTiles masked = masked_tiles<kId>(w, me.wg);
            if constexpr (kWgmmaPlan<kId>.intervals) return TileIntervals<kId>{p, w, me, masked};
            else if constexpr (kWgmmaPlan<kId>.blocks)
                return TileBlocks<kId>{p, w, me, *blocks, smem.keys.seen.pairs[work.slot], words, masked};
            else return TileOptions<T, kId>{p, w, schedule, smem, entry, smem.keys.slope[work.slot], me, masked};
        }();

#pragma unroll
        for (int i = 0; i < kPlan.headdim_v / 2; ++i) O[i] = 0.0f;
        q.wait_full();
        find_stages();
        k.wait_full();
        const KeyTileOf<kId>* tile = next_tile();
        int place = tile->place;
        multiply_qk<T, kId>(S, no_fragment, desc_q, desc_k + k.slot * k_step);
        options.fetch(*tile, index_of(place));
        if constexpr (kPlan.dropout) kept.draw(p, w, index_of(place), me);
        wgmma_wait<0>(S);
        k.release(me.lane);
        if constexpr (kPlan.blocks) options.align(*tile);
        options.apply(S, *tile, index_of(place));
        if constexpr (kPlan.bias) options.release_bias();
        softmax_first<kId>(S, exponent, rows);
        pack_probabilities<T>(P, S);
        if constexpr (kPlan.dropout) kept.apply(p, P);
        bool pending = true;  // whether P of tile `before` waits for its product
#pragma unroll 1
        while (place >= 0) {
            const int before = place;
            find_stages();
            k.wait_full();
            tile = next_tile();
            place = tile->place;
            const int n = index_of(place);
            if constexpr (kPlan.blocks)
                if (!options.sees(*tile)) {  // the warpgroup passes over the tile, and multiplies P before it does
                    v.wait_full();
                    k.release(me.lane);
                    if (pending) {
                        if (options.has_edge(before)) zero_values_outside<kBlockN>(p, w, before, smem.v, v, me.wg);
                        multiply_pv<T>(O, P, desc_v + v.slot * v_step);
                        wgmma_wait<0>(O);
                    }
                    v.release(me.lane);
                    pending = false;
                    continue;
                }
            const bool plain = options.is_plain(tile->cut, n);
            take_turn<kPlan.ping_pong>(me.wg);
            multiply_qk<T, kId>(S, no_fragment, desc_q, desc_k + k.slot * k_step);  // S(n)
            v.wait_full();
            if (!kPlan.blocks || pending) {
                if (options.has_edge(before)) zero_values_outside<kBlockN>(p, w, before, smem.v, v, me.wg);
                multiply_pv<T>(O, P, desc_v + v.slot * v_step);  // O += P(before) V(before)
            } else {
                wgmma_fence(), wgmma_commit();  // nothing, so that the products count alike
            }
            give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);
            options.fetch(*tile, n), pending = true;
            if constexpr (kPlan.dropout) kept.draw(p, w, n, me);
            wgmma_wait<1>(S);
            if (!kSpeculative) k.release(me.lane);
            if constexpr (kPlan.blocks) options.align(*tile);
            if constexpr (kPlan.dropout) tile = &smem.keys.entry(opaque(entry) - 1);
            bool done = false, moved = false;
            // Plans for blocks: the first tile of the item may be one that the warpgroup does not see.
            if (!kSpeculative || ((kPlan.blocks || !plain) && options.is_exact(*tile, n, before, rows))) {
                if (kAppliesTwice) options.apply(S, *tile, opaque(n));
            } else {
                const InExponent option = plain ? InExponent::kNothing : options.prepare(S, *tile, opaque(n));
                if constexpr (kEarlyPack) wgmma_wait<0>(O);
                float sum[2];
                options.take_exponentials(S, exponent.scale, rows, *tile, n, before, option, sum, [&] {
                    if constexpr (kEarlyPack && !kWgmmaPlan<kId>.dropout) pack_probabilities<T>(P, S);
                });
                if constexpr (kEarlyPack && kPlan.dropout) pack_probabilities<T>(P, S);  // in each branch, registers spill
                done = accept_sums<T>(sum, rows);
                if (!done) {
                    recompute_scores<T, kId>(S, no_fragment, slab, shared_address(smem.k[k.slot]), me);
                    if (kAppliesTwice) options.apply(S, *tile, opaque(n));
                }
            }
            if (!done) {
                if constexpr (kPlan.bias && kEarlyPack) wgmma_wait<0>(O);  // frees the registers of P
                if (!kAppliesTwice) options.apply(S, *tile, opaque(n));
                moved = softmax_lazy<kId>(S, exponent, rows);
                if constexpr (kEarlyPack) {
                    wgmma_wait<0>(O);
                    pack_probabilities<T>(P, S);
                }
            }
            if (kSpeculative) k.release(me.lane);
            if constexpr (kPlan.bias) options.release_bias();
            if constexpr (!kEarlyPack) wgmma_wait<0>(O);
            v.release(me.lane);
            if constexpr (!kEarlyPack) pack_probabilities<T>(P, S);  // not before the wait: P(before) was still being read
            if constexpr (kPlan.dropout) kept.apply(p, P);
            if (moved) rescale_output(O, rows.o_scale);
        }
        q.release(me.lane);  // the next Q arrives during the last product and the epilogue
        find_stages();
        v.wait_full();
        if (!kPlan.blocks || pending) {
            if (options.has_edge(~place)) zero_values_outside<kBlockN>(p, w, ~place, smem.v, v, me.wg);
            multiply_pv<T>(O, P, desc_v + v.slot * v_step);
            wgmma_wait<0>(O);
        }
        v.release(me.lane);
        finish_rows<T, kId>(p, w, O, rows, me);
        __syncwarp();
        if (arrives(me.lane)) mbarrier_arrive(work.empty_barrier());
    }
}

}  // namespace fa
