// wgmma_sm90/plan.h: the instantiations of wgmma_sm90 and their shapes, with the reason for each number, and the choice among them for a
// call.
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/common/bias_copy.h"
#include "attention/common/bias_tiles.h"
#include "attention/common/dropout.h"
#include "attention/common/params.h"
#include "attention/common/seen_blocks.h"

namespace fa {

// General plans serve every option of a score and windows with a left edge. Plans with options serve some of them at nearly the speed of
// the bare plans, which serve causal and full attention. Plans for intervals are plans with options that serve masks by intervals and
// windows, and no other option; plans for blocks serve masks by blocks, masks of pairs and windows.
enum class WgmmaPlanId {
    kD64Short,
    kD64Long,
    kD64General,
    kD96,
    kD96General,
    kD128Short,
    kD128Middle,
    kD128Long,
    kD128General,
    kD192V128,
    kD192,
    kD192General,
    kD256,
    kD256General,
    kD64Options,
    kD96Options,
    kD128Options,
    kD128MiddleOptions,
    kD192Options,
    kD256Options,
    kD64Intervals,
    kD128Intervals,
    kD256Intervals,
    kD64Bias,
    kD128Bias,
    kD64Dropout,
    kD128Dropout,
    kD256Dropout,
    kD64Blocks,
    kD128Blocks,
    kD256Blocks,
    kD64Blocks64,
    kD128Blocks64,
    kD192Bias,
    kD256Bias,
    kD64BiasDropout,
    kD128BiasDropout,
    kD256BiasDropout,
    kD64BiasFloat32,
    kD128BiasFloat32,
    kD192BiasFloat32,
    kD256BiasFloat32,
    kD64BiasOptions,
    kD128BiasOptions,
    kD256BiasOptions,
    kD64BiasFloat32Dropout,
    kD128BiasFloat32Dropout,
    kD256BiasFloat32Dropout,
    kD64ShortDropout,
    kD64ShortBias,
    kD64ShortIntervals,
    kD128MiddleIntervals
};

// How the running row maximum is kept. P = 2^(S - m) gives the right answer for any m as long as nothing overflows, so m need not be the
// maximum.
enum class RowMaximum {
    kLazy,                // m rises only when a tile exceeds it by 2^8
    kSpeculative,         // the maximum is computed on the first tile only. When a row sum overflows, the warp repeats the tile exactly
    kSpeculativeUnmasked  // the same, but exact on masked tiles: if a block has more rows than a tile has keys, a row may see none
};

struct WgmmaPlan {
    int headdim = 0, headdim_v = 0;  // the largest head dims; the copy engine pads smaller ones with zeros
    int block_n = 128;               // keys per tile
    int warpgroups = 2;              // consumer warpgroups, 64 query rows each
    int stages = 2;                  // K and V tiles in flight
    bool ping_pong = false;          // the warpgroups take turns to issue products: the softmax of one runs under the products of another
    bool q_in_registers = false;     // Q leaves its buffer at once, so that the next item's Q can arrive during this item
    RowMaximum maximum = RowMaximum::kLazy;
    bool general = false;
    // Serves a left edge, ALiBi, softcap and masks of keys, with the loop in options.cuh. In a bare plan their code costs 1 .. 13 %.
    bool options = false;
    // With options: serves masks by intervals and a left edge instead, with intervals.cuh.
    bool intervals = false;
    // With options: serves masks by blocks, masks of pairs and a left edge instead, with seen_blocks.cuh. Tiles are whole blocks of 64 rows
    // and of 64 keys.
    bool blocks = false;
    // With options, but neither ALiBi nor softcap: also a bias, always (bias.cuh). Scores are in natural units.
    bool bias = false;
    bool bias_options = false;  // with a bias of 16 bits, and without dropout: also softcap and ALiBi
    bool bias_float32 = false;  // with a bias: the bias is float32
    int bias_stages = 2;        // tiles of bias in flight
    bool dropout = false;       // with options: also dropout, always (dropout.cuh)
    // Speculative plans: wait for O before the exponentials instead of after them. The packing of P is then interleaved with the
    // exponentials and hides under them. This warpgroup's own product no longer hides there: the products of other warpgroups must fill the
    // tensor cores.
    bool early_pack = false;
    bool paged = true;    // serves pages of a cache, where registers allow that
    bool pieces = false;  // an item has only some of the keys: its first tile may not be tile 0
    int producer = 0;     // producer registers per thread; 0 = the default below

    FA_HOST_DEVICE constexpr bool skips() const { return intervals || blocks; }  // a tile of which nothing is seen is not loaded
    FA_HOST_DEVICE constexpr int block_m() const { return 64 * warpgroups; }
    // With dropout: keeps a bit for each element instead of eight, where registers are scarce; and where two calls serve a tile, for the
    // loop that draws them so.
    FA_HOST_DEVICE constexpr bool dropout_bits() const { return warpgroups == 3 || bias || block_n == 64; }
    FA_HOST_DEVICE constexpr bool speculative() const { return maximum != RowMaximum::kLazy; }
    // Lazy plans compute the maximum of every tile, so that max_score costs nothing more; but a tile of a piece is not all of a row. The
    // loop of plans with options does not keep it.
    FA_HOST_DEVICE constexpr bool gives_max_score() const { return !pieces && !options && !speculative(); }
    // Pages copied row by row. With three consumer warpgroups the producer has too few registers for that.
    FA_HOST_DEVICE constexpr bool pages() const { return paged && warpgroups == 2; }
    // Pages copied box by box: the plans that calls with such pages choose.
    FA_HOST_DEVICE constexpr bool page_boxes() const { return paged && (warpgroups == 2 || headdim == 64); }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 63) / 64 * 64; }  // in shared memory, in chunks of 64
    FA_HOST_DEVICE constexpr int columns_v() const { return (headdim_v + 63) / 64 * 64; }
    // Registers per thread. The register file has 64 Ki: 168 x 384 threads, 128 x 512 or 96 x 640. With one consumer warpgroup every thread
    // may have as many as an instruction can name, and none are moved.
    FA_HOST_DEVICE constexpr bool moves_registers() const { return warpgroups > 1; }
    FA_HOST_DEVICE constexpr int producer_registers() const {
        return producer ? producer : warpgroups == 2 ? 40 : warpgroups == 3 ? 32 : 24;
    }
    FA_HOST_DEVICE constexpr int consumer_registers() const {
        const int all = warpgroups == 2 ? 504 : warpgroups == 3 ? 512 : 480;
        return (all - producer_registers()) / warpgroups / 8 * 8;
    }
};

FA_HOST_DEVICE constexpr WgmmaPlan with_options(WgmmaPlan plan) {
    plan.options = true, plan.paged = plan.q_in_registers = false;
    return plan;
}
FA_HOST_DEVICE constexpr WgmmaPlan with_intervals(WgmmaPlan plan) {
    plan = with_options(plan), plan.intervals = true;
    return plan;
}
FA_HOST_DEVICE constexpr WgmmaPlan with_blocks(WgmmaPlan plan) {
    plan = with_options(plan), plan.blocks = true, plan.ping_pong = false;
    return plan;
}

// The comparisons are from one H200 with CUDA 13.0, bf16, 16384 tokens, heads x headdim = 2048, in a prototype of the same loop.
// It calls itself, so it cannot be FA_HOST_DEVICE, which insists on inlining.
constexpr WgmmaPlan wgmma_plan(WgmmaPlanId id) {
    WgmmaPlan plan;
    switch (id) {
        // Q in registers lets the next item's first product run under the epilogue: +4 .. 7 % up to 2k causal, 1k full. The code of the
        // speculative path and of turns costs more than it gains there.
        case WgmmaPlanId::kD64Short: plan.headdim = plan.headdim_v = 64, plan.stages = 4, plan.q_in_registers = true; break;
        // 192 rows read K and V a third less often. The exponential units are as busy as the tensor cores here, so packing under the
        // exponentials gives +3 .. 6 %. Slower variants: a polynomial for every 8th, 4th, 2nd exponential (-5, -7, -13 %: nine issue slots
        // for one); both products under the exponentials of shifted scores (-5 % with 64 or 80 keys, -15 % with two warpgroups); handing on
        // the turn between the products (-5 %).
        case WgmmaPlanId::kD64Long:
            plan.headdim = plan.headdim_v = 64, plan.warpgroups = 3, plan.stages = 4, plan.ping_pong = true;
            plan.maximum = RowMaximum::kSpeculativeUnmasked, plan.early_pack = true;
            break;
        case WgmmaPlanId::kD64General: plan.headdim = plan.headdim_v = 64, plan.stages = 4, plan.general = true; break;
        // As head dim 128, with a quarter less work; Q in registers and 3 stages fit.
        case WgmmaPlanId::kD96: plan.headdim = plan.headdim_v = 96, plan.stages = 3, plan.ping_pong = plan.q_in_registers = true; break;
        case WgmmaPlanId::kD96General: plan.headdim = plan.headdim_v = 96, plan.stages = 3, plan.general = true; break;
        // On items of a few tiles the code of the speculative path costs more than computing the maximum. At 1k causal the path already
        // gains 2 .. 3 %.
        case WgmmaPlanId::kD128Short:
            plan.headdim = plan.headdim_v = 128, plan.stages = 3, plan.ping_pong = plan.q_in_registers = true;
            break;
        // +7 .. 10 % over lazy at 16k. K is held until the softmax knows that it needs no exact retry; the third stage hides that wait.
        // Turns: -1 %. Early packs: -2 %, in the long plan -6 %.
        case WgmmaPlanId::kD128Middle: plan.headdim = plan.headdim_v = 128, plan.stages = 3, plan.maximum = RowMaximum::kSpeculative; break;
        // A third less traffic from L2 than 128 rows: +5 % at the power limit. 96 keys would spill.
        case WgmmaPlanId::kD128Long:
            plan.headdim = plan.headdim_v = 128, plan.block_n = 80, plan.warpgroups = 3, plan.stages = 4, plan.ping_pong = true;
            plan.maximum = RowMaximum::kSpeculativeUnmasked;
            break;
        case WgmmaPlanId::kD128General: plan.headdim = plan.headdim_v = 128, plan.general = true; break;
        // No turns from here on: the softmax is short compared with the products. Two stages of these tiles fill shared memory.
        case WgmmaPlanId::kD192V128: plan.headdim = 192, plan.headdim_v = 128; break;
        case WgmmaPlanId::kD192: plan.headdim = plan.headdim_v = 192, plan.block_n = 112; break;
        case WgmmaPlanId::kD192General: plan.headdim = plan.headdim_v = 192, plan.block_n = 96, plan.general = true; break;
        // 64 keys beat 80 by 2 .. 5 % up to 4k and equal it beyond; turns +0.5 %.
        case WgmmaPlanId::kD256: plan.headdim = plan.headdim_v = 256, plan.block_n = 64, plan.ping_pong = true; break;
        case WgmmaPlanId::kD256General: plan.headdim = plan.headdim_v = 256, plan.block_n = 64, plan.general = true; break;
        case WgmmaPlanId::kD64Options: return with_options(wgmma_plan(WgmmaPlanId::kD64Long));
        case WgmmaPlanId::kD96Options: return with_options(wgmma_plan(WgmmaPlanId::kD96));
        case WgmmaPlanId::kD128Options: return with_options(wgmma_plan(WgmmaPlanId::kD128Long));
        // 128 rows: fewer keys outside a short window, and blocks for more multiprocessors.
        case WgmmaPlanId::kD128MiddleOptions: return with_options(wgmma_plan(WgmmaPlanId::kD128Middle));
        case WgmmaPlanId::kD192Options: return with_options(wgmma_plan(WgmmaPlanId::kD192));
        case WgmmaPlanId::kD256Options: return with_options(wgmma_plan(WgmmaPlanId::kD256));
        case WgmmaPlanId::kD64Intervals: return with_intervals(wgmma_plan(WgmmaPlanId::kD64Long));
        case WgmmaPlanId::kD128Intervals: return with_intervals(wgmma_plan(WgmmaPlanId::kD128Long));
        case WgmmaPlanId::kD256Intervals: return with_intervals(wgmma_plan(WgmmaPlanId::kD256));
        // 128 rows: of a mask that leaves each row few keys, fewer lie outside it, and fewer items have rows of two documents. Times over
        // those of 192 rows, documents of an eighth of the keys, a shared prompt, a mask that hides nothing: at head dim 64
        // 0.88, 1.07, 1.13 (8192 keys), 0.95, 1.15, 1.14 (16384); at 128 0.73, 0.89, 1.01 (8192), 0.86, 1.08, 1.05 (32768),
        // 0.92, 1.04, 1.08 (65536), 1.01, 1.06, 1.05 (131072). A choice on the device, by the tiles that are left, costs 15 us. At head dim
        // 128, 112 keys in three stages are slower than 128 keys in two, by up to 30 %; at 64 packing under the exponentials by 3 %, and a
        // loop without turns by 10 to 20 %.
        case WgmmaPlanId::kD64ShortIntervals:
            plan = with_intervals(wgmma_plan(WgmmaPlanId::kD64Long)), plan.warpgroups = 2, plan.early_pack = false;
            break;
        case WgmmaPlanId::kD128MiddleIntervals: plan = with_intervals(wgmma_plan(WgmmaPlanId::kD128Middle)), plan.stages = 2; break;
        // Two tiles of bias take 96 KiB or 64 KiB of shared memory, which K and V give up. At head dim 128 three warpgroups would leave
        // room for tiles of 64 keys, whose products are bound by reads of Q.
        case WgmmaPlanId::kD64Bias: plan = with_options(wgmma_plan(WgmmaPlanId::kD64Long)), plan.stages = 3, plan.bias = true; break;
        // Three warpgroups hide the random numbers best. At head dim 128 they would need tiles of 80 keys, of which random numbers come in
        // 64.
        case WgmmaPlanId::kD64Dropout: plan = with_options(wgmma_plan(WgmmaPlanId::kD64Long)), plan.dropout = true; break;
        // 128 rows, for calls that 192 would leave idle (wgmma_takes_128_rows).
        case WgmmaPlanId::kD64ShortDropout:
            plan = with_options(wgmma_plan(WgmmaPlanId::kD64Short)), plan.maximum = RowMaximum::kSpeculative, plan.dropout = true;
            break;
        case WgmmaPlanId::kD128Dropout: plan = with_options(wgmma_plan(WgmmaPlanId::kD128Middle)), plan.dropout = true; break;
        case WgmmaPlanId::kD256Dropout: plan = with_options(wgmma_plan(WgmmaPlanId::kD256)), plan.dropout = true; break;
        case WgmmaPlanId::kD64ShortBias:  // likewise
            plan = with_options(wgmma_plan(WgmmaPlanId::kD64Short)), plan.maximum = RowMaximum::kSpeculative, plan.bias = true;
            break;
        case WgmmaPlanId::kD128Bias: plan = with_options(wgmma_plan(WgmmaPlanId::kD128Middle)), plan.stages = 2, plan.bias = true; break;
        // Tiles of bias are whole chunks of 64 keys.
        case WgmmaPlanId::kD192Bias:
            plan = with_options(wgmma_plan(WgmmaPlanId::kD192)), plan.block_n = 64, plan.stages = 3, plan.bias = true;
            break;
        case WgmmaPlanId::kD256Bias: plan = with_options(wgmma_plan(WgmmaPlanId::kD256)), plan.bias = true; break;
        case WgmmaPlanId::kD64BiasDropout: plan = wgmma_plan(WgmmaPlanId::kD64Bias), plan.dropout = true; break;
        case WgmmaPlanId::kD128BiasDropout: plan = wgmma_plan(WgmmaPlanId::kD128Bias), plan.dropout = true; break;
        case WgmmaPlanId::kD256BiasDropout: plan = wgmma_plan(WgmmaPlanId::kD256Bias), plan.dropout = true; break;
        // Tiles of 64 keys take the memory that those of 128 keys take in 16 bits.
        case WgmmaPlanId::kD64BiasFloat32:
            plan = wgmma_plan(WgmmaPlanId::kD64Bias), plan.block_n = 64, plan.stages = 5, plan.bias_float32 = true;
            break;
        case WgmmaPlanId::kD128BiasFloat32:
            plan = wgmma_plan(WgmmaPlanId::kD128Bias), plan.block_n = 64, plan.stages = 4, plan.bias_float32 = true;
            break;
        case WgmmaPlanId::kD192BiasFloat32: plan = wgmma_plan(WgmmaPlanId::kD192Bias), plan.stages = 2, plan.bias_float32 = true; break;
        // One tile of bias is all that fits.
        case WgmmaPlanId::kD256BiasFloat32:
            plan = wgmma_plan(WgmmaPlanId::kD256Bias), plan.bias_float32 = true, plan.bias_stages = 1;
            break;
        case WgmmaPlanId::kD64BiasFloat32Dropout: plan = wgmma_plan(WgmmaPlanId::kD64BiasFloat32), plan.dropout = true; break;
        case WgmmaPlanId::kD128BiasFloat32Dropout: plan = wgmma_plan(WgmmaPlanId::kD128BiasFloat32), plan.dropout = true; break;
        case WgmmaPlanId::kD256BiasFloat32Dropout: plan = wgmma_plan(WgmmaPlanId::kD256BiasFloat32), plan.dropout = true; break;
        case WgmmaPlanId::kD64BiasOptions: plan = wgmma_plan(WgmmaPlanId::kD64Bias), plan.bias_options = true; break;
        case WgmmaPlanId::kD128BiasOptions: plan = wgmma_plan(WgmmaPlanId::kD128Bias), plan.bias_options = true; break;
        case WgmmaPlanId::kD256BiasOptions: plan = wgmma_plan(WgmmaPlanId::kD256Bias), plan.bias_options = true; break;
        // Two row blocks, because a tile is loaded for all rows of the item if one row block sees it. No turns, because a warpgroup passes
        // over tiles that its own row block does not see; with turns at those, too, head dim 64 is 2 to 6 % slower.
        // Blocks of 64 keys have tiles of 64: one of 128 would be loaded and multiplied for the sake of either half.
        case WgmmaPlanId::kD64Blocks:
        case WgmmaPlanId::kD64Blocks64:
            plan = with_blocks(wgmma_plan(WgmmaPlanId::kD64Short)), plan.maximum = RowMaximum::kSpeculative;
            if (id == WgmmaPlanId::kD64Blocks64) plan.block_n = 64, plan.stages = 5;
            break;
        case WgmmaPlanId::kD128Blocks: return with_blocks(wgmma_plan(WgmmaPlanId::kD128Middle));
        case WgmmaPlanId::kD128Blocks64:
            plan = with_blocks(wgmma_plan(WgmmaPlanId::kD128Middle)), plan.block_n = 64, plan.stages = 5;
            break;
        case WgmmaPlanId::kD256Blocks: return with_blocks(wgmma_plan(WgmmaPlanId::kD256));
    }
    return plan;
}
// For queries.
constexpr const char* wgmma_plan_name(WgmmaPlanId id) {
    switch (id) {
        case WgmmaPlanId::kD64Short: return "d64_short";
        case WgmmaPlanId::kD64Long: return "d64_long";
        case WgmmaPlanId::kD64General: return "d64_general";
        case WgmmaPlanId::kD96: return "d96";
        case WgmmaPlanId::kD96General: return "d96_general";
        case WgmmaPlanId::kD128Short: return "d128_short";
        case WgmmaPlanId::kD128Middle: return "d128_middle";
        case WgmmaPlanId::kD128Long: return "d128_long";
        case WgmmaPlanId::kD128General: return "d128_general";
        case WgmmaPlanId::kD192V128: return "d192_v128";
        case WgmmaPlanId::kD192: return "d192";
        case WgmmaPlanId::kD192General: return "d192_general";
        case WgmmaPlanId::kD256: return "d256";
        case WgmmaPlanId::kD256General: return "d256_general";
        case WgmmaPlanId::kD64Options: return "d64_options";
        case WgmmaPlanId::kD96Options: return "d96_options";
        case WgmmaPlanId::kD128Options: return "d128_options";
        case WgmmaPlanId::kD128MiddleOptions: return "d128_middle_options";
        case WgmmaPlanId::kD192Options: return "d192_options";
        case WgmmaPlanId::kD256Options: return "d256_options";
        case WgmmaPlanId::kD64Intervals: return "d64_intervals";
        case WgmmaPlanId::kD128Intervals: return "d128_intervals";
        case WgmmaPlanId::kD256Intervals: return "d256_intervals";
        case WgmmaPlanId::kD64Bias: return "d64_bias";
        case WgmmaPlanId::kD128Bias: return "d128_bias";
        case WgmmaPlanId::kD192Bias: return "d192_bias";
        case WgmmaPlanId::kD256Bias: return "d256_bias";
        case WgmmaPlanId::kD64BiasDropout: return "d64_bias_dropout";
        case WgmmaPlanId::kD128BiasDropout: return "d128_bias_dropout";
        case WgmmaPlanId::kD256BiasDropout: return "d256_bias_dropout";
        case WgmmaPlanId::kD64BiasFloat32: return "d64_bias_float32";
        case WgmmaPlanId::kD128BiasFloat32: return "d128_bias_float32";
        case WgmmaPlanId::kD192BiasFloat32: return "d192_bias_float32";
        case WgmmaPlanId::kD256BiasFloat32: return "d256_bias_float32";
        case WgmmaPlanId::kD64ShortDropout: return "d64_short_dropout";
        case WgmmaPlanId::kD64ShortBias: return "d64_short_bias";
        case WgmmaPlanId::kD64ShortIntervals: return "d64_short_intervals";
        case WgmmaPlanId::kD128MiddleIntervals: return "d128_middle_intervals";
        case WgmmaPlanId::kD64BiasFloat32Dropout: return "d64_bias_float32_dropout";
        case WgmmaPlanId::kD128BiasFloat32Dropout: return "d128_bias_float32_dropout";
        case WgmmaPlanId::kD256BiasFloat32Dropout: return "d256_bias_float32_dropout";
        case WgmmaPlanId::kD64BiasOptions: return "d64_bias_options";
        case WgmmaPlanId::kD128BiasOptions: return "d128_bias_options";
        case WgmmaPlanId::kD256BiasOptions: return "d256_bias_options";
        case WgmmaPlanId::kD64Dropout: return "d64_dropout";
        case WgmmaPlanId::kD128Dropout: return "d128_dropout";
        case WgmmaPlanId::kD256Dropout: return "d256_dropout";
        case WgmmaPlanId::kD64Blocks: return "d64_blocks";
        case WgmmaPlanId::kD128Blocks: return "d128_blocks";
        case WgmmaPlanId::kD256Blocks: return "d256_blocks";
        case WgmmaPlanId::kD64Blocks64: return "d64_blocks64";
        case WgmmaPlanId::kD128Blocks64: return "d128_blocks64";
    }
    return "";
}
// The plan of an instantiation. The experiments (ladder/variants) specialise it for their own ids.
template <WgmmaPlanId kId>
inline constexpr WgmmaPlan kWgmmaPlan = wgmma_plan(kId);

constexpr int kWgmmaMaxHeadDim = 256, kWgmmaWideMaxHeadDim = 512;  // of wgmma_sm90, and of wgmma_wide_sm90

// Plain scores stay products q . k; the exponential multiplies them by the scale. General scores are scaled first, to natural units. So are
// products under a scale that is not positive, which would reverse their order.
FA_HOST_DEVICE bool wgmma_scores_are_natural(const AttentionParams& p) { return p.general_scores() || !(p.scale > 0); }
inline bool wgmma_needs_general(const AttentionParams& p) { return wgmma_scores_are_natural(p) || p.window_left >= 0; }

inline bool wgmma_mask_of_pairs(const AttentionParams& p) { return p.mask.data && p.mask.row != 0 && p.seqlen_q > 1; }

// Whether a plan with options serves a call that no bare plan serves. It divides ALiBi's slopes by the unit of the scores before they are
// scaled.
inline bool wgmma_options_serve(const AttentionParams& p) {
    const bool rest = p.cache.entries || p.max_score || p.bias.data || p.tree.rows || p.hides_tiles() || p.dropout_threshold;
    constexpr float kLeastUnit = 1e-6f;
    return !rest && !wgmma_mask_of_pairs(p) && p.scale > kLeastUnit && (p.softcap == 0 || p.softcap > kLeastUnit);
}

// Whether a plan with dropout serves the call. To head dim 64, 128 or 256.
inline bool wgmma_dropout_serves(const AttentionParams& p) {
    AttentionParams rest = p;
    rest.dropout_threshold = 0;
    return drops_in_pairs(p) && wgmma_options_serve(rest);
}
// Whether a plan with a bias serves the call: alone, with dropout or, in 16 bits, with softcap and ALiBi.
inline bool wgmma_bias_serves(const AttentionParams& p) {
    AttentionParams rest = p;
    rest.bias.data = nullptr;
    if (p.softcap != 0 || p.alibi_slopes) return bias_has_tiles(p) && !bias_is_float32(p) && wgmma_options_serve(rest);
    if (drops_in_pairs(p)) rest.dropout_threshold = 0;
    rest.scale = 1.0f;  // any scale
    return bias_has_tiles(p) && wgmma_options_serve(rest);
}

// Whether it serves the call with a copy of the bias (attention/common/bias_copy.h), which takes a mask of pairs in, or is one of that mask
// alone.
inline BiasCopy wgmma_bias_copy(const AttentionParams& p) { return bias_copy(p, wgmma_mask_of_pairs(p)); }
inline bool wgmma_copies_bias(const AttentionParams& p) {
    return wants_bias_copy(p, wgmma_mask_of_pairs(p), kLeastPairsForward) && wgmma_bias_serves(with_bias_copy(p, wgmma_bias_copy(p)));
}
// The sequences that one launch of a plan with a bias takes.
inline int32_t wgmma_batch_of_launch(const AttentionParams& p) {
    return wgmma_copies_bias(p) ? bias_copy_batch(p, wgmma_bias_copy(p)) : p.batch;
}

// Whether a plan for intervals serves a call with intervals. No other plan does.
inline bool wgmma_intervals_serve(const AttentionParams& p) { return !p.max_score && !p.changes_scores() && p.scale > 0; }

// Whether a plan for blocks serves a call with a mask by blocks, which no other plan does, or with a mask of pairs.
inline bool wgmma_blocks_serve(const AttentionParams& p) {
    AttentionParams rest = p;
    rest.mask.data = nullptr;
    return has_seen_blocks(p) && !p.cache.entries && !p.max_score && !rest.changes_scores() && p.scale > 0;
}

// Whether blocks of 192 rows take longer than blocks of 128 rows because they leave more of the GPU idle, although they read K and V less
// often. That happens up to two rounds of blocks. 512 rows x 32 heads over 8192 keys: 124 -> 99 us with 128 rows (on pages of 256 keys).
inline bool wgmma_blocks_of_192_idle(const AttentionParams& p, int multiprocessors) {
    const auto rows = [&](int block_m) {
        const int64_t blocks = (int64_t(p.seqlen_q) + block_m - 1) / block_m * p.deciding_batch() * p.nheads;
        return (blocks + multiprocessors - 1) / multiprocessors * block_m;
    };
    return !p.cu_seqlens_q && rows(192) <= 2 * 192 && 20 * rows(192) > 21 * rows(128);
}

// Whether blocks of 128 rows are faster for that reason, or because in blocks of 192 a seventh more rows would lie past the
// end.
inline bool wgmma_takes_128_rows(const AttentionParams& p, int multiprocessors) {
    const auto rows = [&](int block_m) { return (int64_t(p.seqlen_q) + block_m - 1) / block_m * block_m; };
    return !p.cu_seqlens_q && !p.cache.batch_invariant && (20 * rows(192) > 23 * rows(128) || wgmma_blocks_of_192_idle(p, multiprocessors));
}

// A call that wants max_score takes a lazy plan at any length. At 16k keys and head dim 128 the long plans would be 10 to 15 % faster.
inline WgmmaPlanId wgmma_choose(const AttentionParams& p, int multiprocessors) {
    const bool general = wgmma_needs_general(p), causal = p.window_right >= 0, pages = p.cache.block_table;
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v, keys = p.deciding_keys();
    // With tiles of 128 x 128, every row sees a key of its first tile if the diagonal starts at a multiple of 128. A row that sees none
    // would send its warp down the slow path of the speculative maximum.
    const bool aligned = !causal || p.cu_seqlens_q || p.top_left ||
                         (!p.cache.seqlens && !p.cache.batch_invariant && (int64_t(p.seqlen_k) - p.seqlen_q + p.window_right) % 128 == 0);
    const bool options = general && wgmma_options_serve(p);
    if (p.intervals.data) {  // only the device knows how many keys they leave to a row
        if (d > 128) return WgmmaPlanId::kD256Intervals;
        if (d > 64) return keys <= 65536 ? WgmmaPlanId::kD128MiddleIntervals : WgmmaPlanId::kD128Intervals;
        return keys <= 16384 ? WgmmaPlanId::kD64ShortIntervals : WgmmaPlanId::kD64Intervals;
    }
    if (wgmma_blocks_serve(p)) {
        const bool of_64 = p.blocks.data && p.blocks.key_shift == 6;
        if (d <= 64) return of_64 ? WgmmaPlanId::kD64Blocks64 : WgmmaPlanId::kD64Blocks;
        if (d <= 128) return of_64 ? WgmmaPlanId::kD128Blocks64 : WgmmaPlanId::kD128Blocks;
        return WgmmaPlanId::kD256Blocks;
    }
    if (wgmma_bias_serves(p) || wgmma_copies_bias(p)) {
        if (bias_is_float32(p)) {
            if (p.dropout_threshold)
                return d <= 64    ? WgmmaPlanId::kD64BiasFloat32Dropout
                       : d <= 128 ? WgmmaPlanId::kD128BiasFloat32Dropout
                                  : WgmmaPlanId::kD256BiasFloat32Dropout;
            if (d <= 128) return d <= 64 ? WgmmaPlanId::kD64BiasFloat32 : WgmmaPlanId::kD128BiasFloat32;
            return d <= 192 ? WgmmaPlanId::kD192BiasFloat32 : WgmmaPlanId::kD256BiasFloat32;
        }
        if (p.softcap != 0 || p.alibi_slopes) {
            if (d <= 64) return WgmmaPlanId::kD64BiasOptions;
            return d <= 128 ? WgmmaPlanId::kD128BiasOptions : WgmmaPlanId::kD256BiasOptions;
        }
        if (d <= 64 && p.dropout_threshold) return WgmmaPlanId::kD64BiasDropout;
        if (d <= 64) return wgmma_takes_128_rows(p, multiprocessors) ? WgmmaPlanId::kD64ShortBias : WgmmaPlanId::kD64Bias;
        if (d <= 128) return p.dropout_threshold ? WgmmaPlanId::kD128BiasDropout : WgmmaPlanId::kD128Bias;
        if (p.dropout_threshold) return WgmmaPlanId::kD256BiasDropout;
        return d <= 192 ? WgmmaPlanId::kD192Bias : WgmmaPlanId::kD256Bias;
    }
    if (wgmma_dropout_serves(p) && d <= 64)
        return wgmma_takes_128_rows(p, multiprocessors) ? WgmmaPlanId::kD64ShortDropout : WgmmaPlanId::kD64Dropout;
    if (wgmma_dropout_serves(p)) return d <= 128 ? WgmmaPlanId::kD128Dropout : WgmmaPlanId::kD256Dropout;
    if (d <= 64) {
        if (general) return options ? WgmmaPlanId::kD64Options : WgmmaPlanId::kD64General;
        const bool few_tiles = keys <= (causal ? 2048 : 1024) || wgmma_takes_128_rows(p, multiprocessors);
        return few_tiles || p.max_score || (pages && p.cache.page_size % 8) ? WgmmaPlanId::kD64Short : WgmmaPlanId::kD64Long;
    }
    if (d <= 96) return options ? WgmmaPlanId::kD96Options : general ? WgmmaPlanId::kD96General : WgmmaPlanId::kD96;
    if (d <= 128) {
        if (options) {
            const bool short_window = p.window_left >= 0 && p.window_right >= 0 && int64_t(p.window_left) + p.window_right < 2048;
            const bool middle = short_window || keys < (causal ? 8192 : 2048) || wgmma_blocks_of_192_idle(p, multiprocessors);
            return middle ? WgmmaPlanId::kD128MiddleOptions : WgmmaPlanId::kD128Options;
        }
        if (general) return WgmmaPlanId::kD128General;
        if (p.max_score) return WgmmaPlanId::kD128Short;
        if (keys >= (causal ? 8192 : 2048))
            return pages || wgmma_blocks_of_192_idle(p, multiprocessors) ? WgmmaPlanId::kD128Middle : WgmmaPlanId::kD128Long;
        const bool few_tiles = causal ? keys < 1024 : keys <= 512;
        return !aligned || few_tiles ? WgmmaPlanId::kD128Short : WgmmaPlanId::kD128Middle;
    }
    if (d <= 192) {
        if (general) return options ? WgmmaPlanId::kD192Options : WgmmaPlanId::kD192General;
        return p.headdim_v <= 128 ? WgmmaPlanId::kD192V128 : WgmmaPlanId::kD192;
    }
    return options ? WgmmaPlanId::kD256Options : general ? WgmmaPlanId::kD256General : WgmmaPlanId::kD256;
}

}  // namespace fa
