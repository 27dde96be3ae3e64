// wgmma_sm90/options.cuh: the consumers' loop of plans with options: windows with a left edge, ALiBi, softcap, masks of keys. It is the
// loop of kernel.cuh, with the tiles that key_tiles.cuh hands out and with scores that change before the softmax.
//
// S stays a product q . k as far as possible, so that a tile that no option changes costs what it costs in the bare plan:
//
//     softcap   S = tanh(S scale / softcap), in all tiles; the exponential multiplies by softcap instead of scale
//     ALiBi     scores fall with the distance from the diagonal. Beside the diagonal the distance is a number of the row plus or minus one
//               of the key: S += slope j, one operation a score, and the row's number goes to the maximum that the exponentials subtract.
//               On the diagonal S -= slope |i + shift - j|
//     mask      -inf where a bit of the tile says so, in cut tiles
//     edges     -inf, in the tiles that they cross
#pragma once

#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "common/constants.h"
#include "device/reciprocal.cuh"
#include "device/ring.cuh"

namespace fa {

// How the distance |i + shift - j| depends on key j, for all rows of a warpgroup.
enum class AlibiSide {
    kNone,  // no ALiBi, or falls and rises, or that does not matter because the maximum is found: S gets the whole distance
    kLeft,  // all keys of the tile lie before the diagonal: it falls
    kRight  // all lie behind it: it rises
};

// S = tanh(S inverse). As far as the scores of a warp stay below 3/4 of softcap, a polynomial gives tanh to 1.1e-5 of itself. The
// exponentials' unit, which is as busy as the tensor cores at head dim 64, has nothing to do for it. Two halves, each behind a branch of
// its own: all elements at once would take too many registers.
template <int kCount>
__device__ __forceinline__ void cap(float (&S)[kCount], float inverse) {
    constexpr int kHalf = kCount / 2;
#pragma unroll
    for (int begin = 0; begin < kCount; begin += kHalf) {
        float greatest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int i = begin; i < begin + kHalf; ++i) greatest[i % 2] = fmaxf(greatest[i % 2], fabsf(S[i]));
        if (__all_sync(~0u, fmaxf(greatest[0], greatest[1]) * inverse < 0.75f)) {
#pragma unroll
            for (int i = begin; i < begin + kHalf; ++i) {
                const float x = S[i] * inverse, square = x * x;
                S[i] = x * fmaf(square, fmaf(square, fmaf(square, -0.03545279f, 0.12742697f), -0.33269671f), 0.99998898f);
            }
        } else {  // 1 - 2 / (1 + e^2x)
            const float twice = 2.0f * kLog2e * inverse;
#pragma unroll
            for (int i = begin; i < begin + kHalf; ++i) S[i] = fmaf(-2.0f, reciprocal_approx(1.0f + exp2_approx(S[i] * twice)), 1.0f);
        }
    }
}

// What the options do to the tiles of one item. Each of them is behind a branch that all lanes of a warp take alike.
template <typename T, WgmmaPlanId kId>
struct TileOptions {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr int kBlockN = kPlan.block_n;
    using Scores = float[kBlockN / 2];
    const AttentionParams& p;
    const ForwardWork& w;
    const float& slope_of_item;
    const Consumer& me;
    const MaskedTiles masked;

    __device__ __forceinline__ float slope() const { return *static_cast<const volatile float*>(&slope_of_item); }
    // From row g of the thread to its element 0.
    __device__ __forceinline__ float distance(int n) const {
        const Consumer at = me.rare();
        return float(w.row0 + at.row() + w.shift - n * kBlockN - 2 * at.quad());
    }
    // Of tile n, which follows tile `before`. Under a negative slope scores rise with the distance, and every maximum is found.
    __device__ __forceinline__ AlibiSide side(int n, int before) const {
        if (!p.alibi_slopes || slope() < 0) return AlibiSide::kNone;
        if (n > before) return AlibiSide::kRight;
        return (n + 1) * kBlockN - 1 <= w.row0 + me.wg * 64 + w.shift ? AlibiSide::kLeft : AlibiSide::kNone;
    }
    // Whether the maximum of tile n must be found: scores may rise there, or a row may see its first key.
    __device__ __forceinline__ bool is_exact(int n, AlibiSide side) const {
        return n >= masked.right_tile || (p.alibi_slopes && side == AlibiSide::kNone);
    }
    // Applies the options to S of a tile; beside the diagonal, a number of the row is left of ALiBi for rows_at().
    __device__ __forceinline__ void apply(Scores& S, const KeyTile& tile, int n, AlibiSide side) const {
        if (p.softcap != 0) cap(S, __fdividef(p.scale, p.softcap));
        if (p.alibi_slopes) {
            if (side == AlibiSide::kNone) {
                const float slope = this->slope(), to_key0 = distance(n);
#pragma unroll
                for (int i = 0; i < kBlockN / 2; ++i) S[i] = fmaf(-slope, fabsf(to_key0 + float(i / 2 % 2 * 8 - i / 4 * 8 - i % 2)), S[i]);
            } else {
                const float slope = side == AlibiSide::kLeft ? this->slope() : -this->slope();
#pragma unroll
                for (int i = 0; i < kBlockN / 2; ++i) S[i] = fmaf(slope, float(i / 4 * 8 + i % 2), S[i]);
            }
        }
        if (tile.cut) {
            const uint32_t hidden = tile.hidden[me.rare().quad()];
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i)
                if (hidden >> (i / 4 * 2 + i % 2) & 1) S[i] = -INFINITY;
        }
        mask_scores<kId>(S, w, masked, n, me);
    }
    // The state of the rows for tile n as apply() has left it: what is left of ALiBi raises or lowers the maximum.
    __device__ __forceinline__ RowStatistics rows_at(int n, AlibiSide side, const RowStatistics& rows, const Exponent& exponent) const {
        RowStatistics here = rows;
        if (side != AlibiSide::kNone) {
            const float slope = (side == AlibiSide::kLeft ? this->slope() : -this->slope()) * exponent.scale, to_key0 = distance(n);
            here.row_max[0] = fmaf(slope, to_key0, rows.row_max[0]), here.row_max[1] = fmaf(slope, to_key0 + 8.0f, rows.row_max[1]);
        }
        return here;
    }
    // Whether the tile may have keys that the window hides from all rows of the sequence.
    __device__ __forceinline__ bool has_edge(int n) const { return n >= masked.right_tile || n < masked.left_tile; }
};

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void consume_with_options(const AttentionParams& p, WgmmaSmem<T, kId>& smem, const Consumer& me) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n, kWarpgroups = kPlan.warpgroups;
    constexpr bool kSpeculative = kPlan.speculative(), kEarlyPack = kPlan.early_pack;
    static_assert(!kPlan.q_in_registers && !kPlan.general && !kPlan.pieces, "what this loop lacks");
    const uint64_t k_step = descriptor_step(sizeof smem.k[0]), v_step = descriptor_step(sizeof smem.v[0]);

    float S[kBlockN / 2], O[kPlan.headdim_v / 2];
    uint32_t P[kBlockN / 4], no_fragment[1];
    RowStatistics rows;
    Ring<1> q(smem.q_full, smem.q_empty);
    Ring<kPlan.stages> k(smem.k_full, smem.k_empty), v(smem.v_full, smem.v_empty);
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    const uint32_t slab = shared_address(smem.q) + me.wg * sizeof smem.q[0];
    const uint64_t desc_q = wgmma_descriptor(slab, 16), desc_k = wgmma_descriptor(shared_address(smem.k), 16),
                   desc_v = wgmma_descriptor(shared_address(smem.v), kBlockN * kChunkRowBytes);
    const Exponent exponent = exponent_of_products((p.softcap != 0 ? p.softcap : p.scale) * kLog2e);

    if (me.wg == kWarpgroups - 1) give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);  // the first turn is warpgroup 0's
    for (;; work.next()) {
        work.wait_full();
        const auto& w = smem.work[work.slot];
        if (w.state == WorkState::kEnd) return;
        const TileOptions<T, kId> options{p, w, smem.keys.slope[work.slot], me, masked_tiles<kId>(w, me.wg)};

#pragma unroll
        for (int i = 0; i < kPlan.headdim_v / 2; ++i) O[i] = 0.0f;
        q.wait_full();
        k.wait_full();
        multiply_qk<T, kId>(S, no_fragment, desc_q, desc_k + k.slot * k_step);
        const KeyTile* tile = &smem.keys.tiles[k.phase][k.slot];
        int n = tile->n;
        wgmma_wait<0>(S);
        k.release(me.lane);
        options.apply(S, *tile, n, AlibiSide::kNone);
        softmax_first<kId>(S, exponent, rows);
        pack_probabilities<T>(P, S);
#pragma unroll 1
        while (!tile->last) {
            const int before = n;
            k.wait_full();
            take_turn<kPlan.ping_pong>(me.wg);
            multiply_qk<T, kId>(S, no_fragment, desc_q, desc_k + k.slot * k_step);  // S(n)
            v.wait_full();
            if (options.has_edge(before)) zero_values_outside<kBlockN>(p, w, before, smem.v, v, me.wg);
            multiply_pv<T>(O, P, desc_v + v.slot * v_step);  // O += P(before) V(before)
            give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);
            tile = &smem.keys.tiles[k.phase][k.slot];
            n = tile->n;
            const AlibiSide side = options.side(n, before);
            wgmma_wait<1>(S);
            if (!kSpeculative) k.release(me.lane);
            bool done = false, moved = false;
            const bool exact = !kSpeculative || options.is_exact(n, side);
            options.apply(S, *tile, n, exact ? AlibiSide::kNone : side);
            if (!exact) {
                if constexpr (kEarlyPack) wgmma_wait<0>(O);
                RowStatistics here = options.rows_at(n, side, rows, exponent);
                done = softmax_speculative<T, kId>(S, exponent, here, [&] {
                    if constexpr (kEarlyPack) pack_probabilities<T>(P, S);
                });
                rows.row_sum[0] = here.row_sum[0], rows.row_sum[1] = here.row_sum[1];
                if (!done) {
                    recompute_scores<T, kId>(S, no_fragment, slab, shared_address(smem.k[k.slot]), me);
                    options.apply(S, *tile, n, AlibiSide::kNone);
                }
            }
            if (!done) {
                moved = softmax_lazy<kId>(S, exponent, rows);
                if constexpr (kEarlyPack) {
                    wgmma_wait<0>(O);
                    pack_probabilities<T>(P, S);
                }
            }
            if (kSpeculative) k.release(me.lane);
            if constexpr (!kEarlyPack) wgmma_wait<0>(O);
            v.release(me.lane);
            if constexpr (!kEarlyPack) pack_probabilities<T>(P, S);  // not before the wait: P(before) was still being read
            if (moved) rescale_output(O, rows.o_scale);
        }
        q.release(me.lane);  // the next Q arrives during the last product and the epilogue
        v.wait_full();
        if (options.has_edge(n)) zero_values_outside<kBlockN>(p, w, n, smem.v, v, me.wg);
        multiply_pv<T>(O, P, desc_v + v.slot * v_step);
        wgmma_wait<0>(O);
        v.release(me.lane);
        finish_rows<T, kId>(p, w, O, rows, me);
        __syncwarp();
        if (arrives(me.lane)) mbarrier_arrive(work.empty_barrier());
    }
}

}  // namespace fa
