// wgmma_sm90_plan.h: the instantiations of wgmma_sm90 and their shapes, with the reason beside each number, and which of them a call takes.
#pragma once

#include <cstdint>

#include "attention/common/params.h"

namespace fa {

// General plans serve every option of a score and windows with a left edge; the others serve causal and full attention.
enum class WgmmaPlanId {
    kD64Short,
    kD64Long,
    kD64LongMax,
    kD64General,
    kD96,
    kD96General,
    kD128Short,
    kD128Middle,
    kD128MiddleMax,
    kD128Long,
    kD128LongMax,
    kD128General,
    kD192V128,
    kD192,
    kD192General,
    kD256,
    kD256General
};

// What to do about the running row maximum. P = 2^(S - m) gives the right answer with any m as long as nothing overflows, so m need not be
// the maximum.
enum class RowMaximum {
    kLazy,                // m rises only when a tile exceeds it by 2^8
    kSpeculative,         // after the first tile the maximum is not computed. When a row sum overflows, the warp repeats its tile exactly
    kSpeculativeUnmasked  // the same, but exact on masked tiles. In blocks taller than a key tile a mask may hide a whole row of a tile
};

struct WgmmaPlan {
    int headdim = 0, headdim_v = 0;  // the largest it serves; smaller ones are padded with zeros by the copy engine
    int block_n = 128;               // keys per tile
    int warpgroups = 2;              // consumer warpgroups, 64 query rows each
    int stages = 2;                  // K and V tiles in flight
    bool ping_pong = false;          // the warpgroups take turns to issue products: one's softmax runs under the other's products
    bool q_in_registers = false;     // Q leaves its buffer at once, so that the next item's Q can arrive during this item
    RowMaximum maximum = RowMaximum::kLazy;
    bool general = false;
    // Speculative plans: wait for O before the exponentials instead of after them. The packing of P then falls between the exponentials
    // and hides under them. This warpgroup's own product no longer does: the products of the other warpgroups must fill the tensor cores.
    bool early_pack = false;
    bool paged = true;    // whether it serves the pages of a cache, where its registers allow that
    bool pieces = false;  // an item has some of the keys: it may begin behind the first one
    int producer = 0;     // registers of a producer's thread, where not as many as below
    // Speculative plans: finds the greatest probability of each row, from which max_score follows. The other plans have the maximum of
    // every tile, and give max_score without more, but for those of pieces.
    bool finds_maximum = false;

    FA_HOST_DEVICE constexpr int block_m() const { return 64 * warpgroups; }
    FA_HOST_DEVICE constexpr bool speculative() const { return maximum != RowMaximum::kLazy; }
    FA_HOST_DEVICE constexpr bool gives_max_score() const { return !pieces && (!speculative() || finds_maximum); }
    // Pages copied row by row: with three consumer warpgroups the producer has too few registers for it.
    FA_HOST_DEVICE constexpr bool pages() const { return paged && warpgroups == 2; }
    // Pages copied box by box: the plans that page-sized tiles are chosen for.
    FA_HOST_DEVICE constexpr bool page_boxes() const { return paged && (warpgroups == 2 || headdim == 64); }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 63) / 64 * 64; }  // in shared memory: chunks of 64
    FA_HOST_DEVICE constexpr int columns_v() const { return (headdim_v + 63) / 64 * 64; }
    // Of a thread. The register file has 64 Ki: 168 x 384 threads, 128 x 512 or 96 x 640. With one consumer warpgroup every thread may have
    // all that an instruction can name, and nothing moves.
    FA_HOST_DEVICE constexpr bool moves_registers() const { return warpgroups > 1; }
    FA_HOST_DEVICE constexpr int producer_registers() const {
        return producer ? producer : warpgroups == 2 ? 40 : warpgroups == 3 ? 32 : 24;
    }
    FA_HOST_DEVICE constexpr int consumer_registers() const {
        const int all = warpgroups == 2 ? 504 : warpgroups == 3 ? 512 : 480;
        return (all - producer_registers()) / warpgroups / 8 * 8;
    }
};

// A speculative plan that gives max_score. A cache does not ask for it.
FA_HOST_DEVICE constexpr WgmmaPlan that_finds_maximum(WgmmaPlan plan) {
    plan.finds_maximum = true, plan.paged = false;
    return plan;
}

// The comparisons are from one H200 with CUDA 13.0, bf16, 16384 tokens, heads x headdim = 2048, in a prototype of the same loop.
FA_HOST_DEVICE constexpr WgmmaPlan wgmma_plan(WgmmaPlanId id) {
    WgmmaPlan plan;
    switch (id) {
        // Q in registers lets the next item's first product run under the epilogue: +4 .. 7 % up to 2k causal, 1k full. The code of the
        // speculative path, and turns, cost more than they give there.
        case WgmmaPlanId::kD64Short: plan.headdim = plan.headdim_v = 64, plan.stages = 4, plan.q_in_registers = true; break;
        // 192 rows read K and V a third less often. The exponentials' unit is as busy as the tensor cores here, so packs under exponentials
        // give +3 .. 6 %. What lost: a polynomial for every 8th, 4th, 2nd exponential (-5, -7, -13 %: nine issue slots for one), both
        // products under the exponentials of shifted scores (-5 % with 64 or 80 keys, -15 % with two warpgroups), the turn handed on
        // between the products (-5 %).
        case WgmmaPlanId::kD64Long:
            plan.headdim = plan.headdim_v = 64, plan.warpgroups = 3, plan.stages = 4, plan.ping_pong = true;
            plan.maximum = RowMaximum::kSpeculativeUnmasked, plan.early_pack = true;
            break;
        case WgmmaPlanId::kD64LongMax: return that_finds_maximum(wgmma_plan(WgmmaPlanId::kD64Long));
        case WgmmaPlanId::kD64General: plan.headdim = plan.headdim_v = 64, plan.stages = 4, plan.general = true; break;
        // As 128, with a quarter less work; Q in registers and 3 stages fit.
        case WgmmaPlanId::kD96: plan.headdim = plan.headdim_v = 96, plan.stages = 3, plan.ping_pong = plan.q_in_registers = true; break;
        case WgmmaPlanId::kD96General: plan.headdim = plan.headdim_v = 96, plan.stages = 3, plan.general = true; break;
        // On items of a few tiles the code of the speculative path costs more than the maximum. At 1k causal it gives 2 .. 3 % already.
        case WgmmaPlanId::kD128Short:
            plan.headdim = plan.headdim_v = 128, plan.stages = 3, plan.ping_pong = plan.q_in_registers = true;
            break;
        // +7 .. 10 % over lazy at 16k. K is held until the softmax knows that it needs no exact retry; the third stage hides that wait.
        // Turns: -1 %. Early packs: -2 %, in the long plan -6 %.
        case WgmmaPlanId::kD128Middle: plan.headdim = plan.headdim_v = 128, plan.stages = 3, plan.maximum = RowMaximum::kSpeculative; break;
        case WgmmaPlanId::kD128MiddleMax: return that_finds_maximum(wgmma_plan(WgmmaPlanId::kD128Middle));
        // A third less traffic from L2: +5 % at the power limit. 96 keys would spill.
        case WgmmaPlanId::kD128Long:
            plan.headdim = plan.headdim_v = 128, plan.block_n = 80, plan.warpgroups = 3, plan.stages = 4, plan.ping_pong = true;
            plan.maximum = RowMaximum::kSpeculativeUnmasked;
            break;
        case WgmmaPlanId::kD128LongMax: return that_finds_maximum(wgmma_plan(WgmmaPlanId::kD128Long));
        case WgmmaPlanId::kD128General: plan.headdim = plan.headdim_v = 128, plan.general = true; break;
        // No turns from here on: the softmax is short beside the products. Two stages of these tiles fill shared memory.
        case WgmmaPlanId::kD192V128: plan.headdim = 192, plan.headdim_v = 128; break;
        case WgmmaPlanId::kD192: plan.headdim = plan.headdim_v = 192, plan.block_n = 112; break;
        case WgmmaPlanId::kD192General: plan.headdim = plan.headdim_v = 192, plan.block_n = 96, plan.general = true; break;
        // 64 keys beat 80 by 2 .. 5 % up to 4k and equal it beyond; turns +0.5 %.
        case WgmmaPlanId::kD256: plan.headdim = plan.headdim_v = 256, plan.block_n = 64, plan.ping_pong = true; break;
        case WgmmaPlanId::kD256General: plan.headdim = plan.headdim_v = 256, plan.block_n = 64, plan.general = true; break;
    }
    return plan;
}
// The plan of an instantiation. The experiments (ladder/variants) specialise it for ids of their own.
template <WgmmaPlanId kId>
inline constexpr WgmmaPlan kWgmmaPlan = wgmma_plan(kId);

constexpr int kWgmmaMaxHeadDim = 256, kWgmmaWideMaxHeadDim = 512;  // of wgmma_sm90, and of wgmma_wide_sm90

// Plain scores stay products q . k; the exponential multiplies them by the scale. General scores are scaled before, in natural units, and
// so are products under a scale that is not positive: it would turn their order.
FA_HOST_DEVICE bool wgmma_scores_are_natural(const AttentionParams& p) { return p.general_scores() || !(p.scale > 0); }
inline bool wgmma_needs_general(const AttentionParams& p) { return wgmma_scores_are_natural(p) || p.window_left >= 0; }

// Whether blocks of 192 rows take longer than those of 128, which read K and V more often, because they leave more of the GPU idle. That
// happens up to two rounds of blocks. 512 rows x 32 heads over 8192 keys: 124 -> 99 us (the 128 rows on pages of 256 keys).
inline bool wgmma_blocks_of_192_idle(const AttentionParams& p, int multiprocessors) {
    const auto rows = [&](int block_m) {
        const int64_t blocks = (int64_t(p.seqlen_q) + block_m - 1) / block_m * p.deciding_batch() * p.nheads;
        return (blocks + multiprocessors - 1) / multiprocessors * block_m;
    };
    return !p.cu_seqlens_q && rows(192) <= 2 * 192 && 20 * rows(192) > 21 * rows(128);
}

inline WgmmaPlanId wgmma_choose(const AttentionParams& p, int multiprocessors) {
    const bool general = wgmma_needs_general(p), causal = p.window_right >= 0, pages = p.cache.block_table;
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v, keys = p.deciding_keys();
    // In tiles of 128 x 128 every row sees a key of its first tile when the diagonal starts at a multiple of 128. A row that does not would
    // send its warp down the slow path of the speculative maximum.
    const bool aligned = !causal || p.cu_seqlens_q || p.top_left ||
                         (!p.cache.seqlens && !p.cache.batch_invariant && (int64_t(p.seqlen_k) - p.seqlen_q + p.window_right) % 128 == 0);
    if (d <= 64) {
        if (general) return WgmmaPlanId::kD64General;
        if (keys <= (causal ? 2048 : 1024) || (pages && p.cache.page_size % 8)) return WgmmaPlanId::kD64Short;
        return p.max_score ? WgmmaPlanId::kD64LongMax : WgmmaPlanId::kD64Long;
    }
    if (d <= 96) return general ? WgmmaPlanId::kD96General : WgmmaPlanId::kD96;
    if (d <= 128) {
        if (general) return WgmmaPlanId::kD128General;
        const WgmmaPlanId middle = p.max_score ? WgmmaPlanId::kD128MiddleMax : WgmmaPlanId::kD128Middle;
        if (keys >= (causal ? 8192 : 2048)) {
            if (pages || wgmma_blocks_of_192_idle(p, multiprocessors)) return middle;
            return p.max_score ? WgmmaPlanId::kD128LongMax : WgmmaPlanId::kD128Long;
        }
        const bool few_tiles = causal ? keys < 1024 : keys <= 512;
        return !aligned || few_tiles ? WgmmaPlanId::kD128Short : middle;
    }
    if (d <= 192) {
        if (general) return WgmmaPlanId::kD192General;
        return p.headdim_v <= 128 ? WgmmaPlanId::kD192V128 : WgmmaPlanId::kD192;
    }
    return general ? WgmmaPlanId::kD256General : WgmmaPlanId::kD256;
}

}  // namespace fa
