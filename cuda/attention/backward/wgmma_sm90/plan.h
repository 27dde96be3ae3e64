// wgmma_sm90/plan.h: the instantiations of the Hopper backward and their shapes, with the reason for each number.
#pragma once

#include "attention/common/bias_copy.h"
#include "attention/common/bias_tiles.h"
#include "attention/common/dropout.h"
#include "attention/common/params.h"
#include "attention/common/seen_blocks.h"

namespace fa {

// Bare plans serve causal and full attention. Plans with options have the tiles and products of the bare plans, and serve options that
// change S before the exponential (backward_serves_options), some of them also a 16-bit bias or dropout; plans for intervals and for masks
// serve masks that hide whole tiles. General plans serve everything else.
enum class BackwardPlanId {
    kD64,
    kD64General,
    kD128,
    kD128General,
    kD192V128,
    kD192V128General,
    kD192,
    kD192General,
    kD256,
    kD256General,
    kD64Options,
    kD128Options,
    kD64Softcap,
    kD128Softcap,
    kD64Intervals,
    kD128Intervals,
    kD64Bias,
    kD128Bias,
    kD64Dropout,
    kD128Dropout,
    kD64Masks,
    kD128Masks,
    kD64BiasDropout,
    kD128BiasDropout,
    kD64BiasFloat32,
    kD128BiasFloat32,
    kD192V128Options,
    kD192Options,
    kD256Options,
    kD192Softcap,
    kD256Softcap,
    kD192V128Intervals,
    kD192Intervals,
    kD256Intervals,
    kD192V128Masks,
    kD192Masks,
    kD256Masks,
    kD192Dropout,
    kD256Dropout,
    kD192Bias,
    kD256Bias,
    kD192BiasFloat32,
    kD256BiasFloat32,
    kD64BiasFloat32Dropout,
    kD128BiasFloat32Dropout,
    kD192BiasDropout,
    kD256BiasDropout,
    kD256BiasFloat32Dropout
};

// The warpgroups of a block: one copies, two are the main warpgroups, which own 64 keys each, and one multiplies dQ.
constexpr int kWarpgroupWarps = 4, kMainWarps = 2 * kWarpgroupWarps, kDqWarps = kWarpgroupWarps;
constexpr int kBackwardThreads = 4 * 32 * kWarpgroupWarps;
constexpr int kBackwardLoaderRegisters = 32;
constexpr int kBackwardWgmmaMaxHeadDim = 256;

struct BackwardPlan {
    int headdim = 0, headdim_v = 0;  // the largest head dims; the copy engine pads smaller ones with zeros
    int block_m = 64;                // queries per tile
    int block_n = 128;               // keys of a block, or of two blocks that share them: 64 for each main warpgroup
    int stages = 2;                  // slots of Q and of dout
    int dq_stages = 0;               // slots for 64 x 64 pieces of dQ on their way through shared memory; 0: dQ leaves from registers
    bool general = false;
    bool options = false;       // windows with a left edge, masks of keys, and ALiBi or softcap
    bool softcap = false;       // with options: softcap, always, and no ALiBi
    bool intervals = false;     // with options: masks by intervals and a left edge, and no other option
    bool masks = false;         // with options: a mask by blocks, a mask of pairs or both, a left edge, and no other option
    bool dropout = false;       // with options: dropout, always
    int bias_stages = 0;        // with options: a bias, always, and no ALiBi: slots for its tiles. Scores are in natural units
    bool bias_float32 = false;  // with a bias: it is float32, else of 16 bits

    FA_HOST_DEVICE constexpr bool bias() const { return bias_stages != 0; }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 63) / 64 * 64; }  // in shared memory, in chunks of 64
    FA_HOST_DEVICE constexpr int columns_v() const { return (headdim_v + 63) / 64 * 64; }
    // Slots of K and V. A block takes one set of 128 keys after another. With two slots, the next set is loaded while the block works on
    // the current one. Two fit up to head dim 64, unless a bias in float32, or
    // bias and dropout, need room.
    FA_HOST_DEVICE constexpr int key_stages() const { return headdim <= 64 && !(bias() && (bias_float32 || dropout)) ? 2 : 1; }
    // Blocks of a cluster that share the keys.
    FA_HOST_DEVICE constexpr int blocks() const { return headdim > 128 ? 2 : 1; }
    // 16-key steps of K^T that dQ's warpgroup keeps in registers. In fp16 the main warpgroups need those registers.
    FA_HOST_DEVICE constexpr int held_steps(bool half) const { return headdim <= 64 && !general && !half ? 4 : 0; }
    // Registers per thread. The register file has 64 Ki, so loader + 2 main + dQ = 512 = 4 x 128. Below 208 registers (200 at headdim 64),
    // ptxas serialises the products of the main warpgroups (C7512). dQ needs 64 for a piece.
    FA_HOST_DEVICE constexpr int main_registers(bool half) const { return held_steps(half) ? 200 : 208; }
    FA_HOST_DEVICE constexpr int dq_registers(bool half) const { return held_steps(half) ? 80 : 64; }
    // Chunks of 64 columns of dQ. Of two blocks that share the keys, the first computes dq_chunks_of_keys() of them.
    FA_HOST_DEVICE constexpr int dq_chunks() const { return columns() / 64; }
    FA_HOST_DEVICE constexpr int dq_chunks_of_keys() const { return dq_chunks() / 2; }
    // Slots of Q where two blocks share keys: for the tile whose dK is due, the tile whose S is due, and two in flight. At head dim 256
    // tiles of bias take the place of one.
    FA_HOST_DEVICE constexpr int pair_q_stages() const { return bias() && headdim > 192 ? 3 : 4; }
};

// It calls itself, so it cannot be FA_HOST_DEVICE, which insists on inlining.
constexpr BackwardPlan backward_plan(BackwardPlanId id) {
    BackwardPlan plan;
    switch (id) {
        // S and dP of 128 x 128 take 64 registers each, which leaves room for the 32 each of dK and dV. K or V as A operands would take 16
        // more, and ptxas could not run the exponentials under dP.
        case BackwardPlanId::kD64: plan.headdim = plan.headdim_v = 64, plan.block_m = 128; break;
        case BackwardPlanId::kD64Options: plan = backward_plan(BackwardPlanId::kD64), plan.options = true; break;
        case BackwardPlanId::kD64Softcap: plan = backward_plan(BackwardPlanId::kD64Options), plan.softcap = true; break;
        case BackwardPlanId::kD64Dropout: plan = backward_plan(BackwardPlanId::kD64Options), plan.dropout = true; break;
        case BackwardPlanId::kD128Dropout: plan = backward_plan(BackwardPlanId::kD128Options), plan.dropout = true; break;
        // A tile of bias takes the last 32 KiB of shared memory.
        case BackwardPlanId::kD64Bias: plan = backward_plan(BackwardPlanId::kD64Options), plan.bias_stages = 1; break;
        case BackwardPlanId::kD64BiasDropout: plan = backward_plan(BackwardPlanId::kD64Bias), plan.dropout = true; break;
        case BackwardPlanId::kD128BiasDropout: plan = backward_plan(BackwardPlanId::kD128Bias), plan.dropout = true; break;
        // 128 queries would take 3 KB more than there is.
        case BackwardPlanId::kD64BiasFloat32Dropout:
            plan = backward_plan(BackwardPlanId::kD64BiasFloat32), plan.block_m = 64, plan.bias_stages = 2, plan.dropout = true;
            break;
        case BackwardPlanId::kD128BiasFloat32Dropout: plan = backward_plan(BackwardPlanId::kD128BiasFloat32), plan.dropout = true; break;
        case BackwardPlanId::kD64BiasFloat32: plan = backward_plan(BackwardPlanId::kD64Bias), plan.bias_float32 = true; break;
        case BackwardPlanId::kD128BiasFloat32:
            plan = backward_plan(BackwardPlanId::kD128Bias), plan.bias_float32 = true, plan.bias_stages = 1;
            break;
        case BackwardPlanId::kD64General: plan.headdim = plan.headdim_v = 64, plan.general = true; break;
        case BackwardPlanId::kD64Intervals: plan = backward_plan(BackwardPlanId::kD64Options), plan.intervals = true; break;
        case BackwardPlanId::kD64Masks: plan = backward_plan(BackwardPlanId::kD64Options), plan.masks = true; break;
        // 64 queries: dK and dV fill 128 registers, S and dP 32 each. Four pieces of dQ fill shared memory.
        case BackwardPlanId::kD128: plan.headdim = plan.headdim_v = 128, plan.dq_stages = 4; break;
        case BackwardPlanId::kD128Options: plan = backward_plan(BackwardPlanId::kD128), plan.options = true; break;
        case BackwardPlanId::kD128Softcap: plan = backward_plan(BackwardPlanId::kD128Options), plan.softcap = true; break;
        // Tiles of bias take the place of dQ.
        case BackwardPlanId::kD128Bias: plan = backward_plan(BackwardPlanId::kD128Options), plan.dq_stages = 0, plan.bias_stages = 2; break;
        case BackwardPlanId::kD128General: plan.headdim = plan.headdim_v = 128, plan.general = true; break;
        case BackwardPlanId::kD128Intervals: plan = backward_plan(BackwardPlanId::kD128Options), plan.intervals = true; break;
        case BackwardPlanId::kD128Masks: plan = backward_plan(BackwardPlanId::kD128Options), plan.masks = true; break;
        // dK of 64 keys alone fills 96 or 128 registers, and K and Q fill shared memory: two blocks share the keys
        // (wgmma_pair_sm90/kernel.cuh).
        case BackwardPlanId::kD192V128: plan.headdim = 192, plan.headdim_v = 128; break;
        case BackwardPlanId::kD192V128General: plan.headdim = 192, plan.headdim_v = 128, plan.general = true; break;
        case BackwardPlanId::kD192V128Options: plan = backward_plan(BackwardPlanId::kD192V128), plan.options = true; break;
        case BackwardPlanId::kD192V128Intervals: plan = backward_plan(BackwardPlanId::kD192V128Options), plan.intervals = true; break;
        case BackwardPlanId::kD192V128Masks: plan = backward_plan(BackwardPlanId::kD192V128Options), plan.masks = true; break;
        case BackwardPlanId::kD192: plan.headdim = plan.headdim_v = 192; break;
        case BackwardPlanId::kD192Options: plan = backward_plan(BackwardPlanId::kD192), plan.options = true; break;
        case BackwardPlanId::kD192Intervals: plan = backward_plan(BackwardPlanId::kD192Options), plan.intervals = true; break;
        case BackwardPlanId::kD192Masks: plan = backward_plan(BackwardPlanId::kD192Options), plan.masks = true; break;
        case BackwardPlanId::kD192Dropout: plan = backward_plan(BackwardPlanId::kD192Options), plan.dropout = true; break;
        // A tile of bias in float32 takes the memory of two in 16 bits.
        case BackwardPlanId::kD192Bias: plan = backward_plan(BackwardPlanId::kD192Options), plan.bias_stages = 2; break;
        case BackwardPlanId::kD192BiasFloat32:
            plan = backward_plan(BackwardPlanId::kD192Options), plan.bias_float32 = true, plan.bias_stages = 1;
            break;
        case BackwardPlanId::kD192BiasDropout: plan = backward_plan(BackwardPlanId::kD192Bias), plan.dropout = true; break;
        case BackwardPlanId::kD192Softcap: plan = backward_plan(BackwardPlanId::kD192Options), plan.softcap = true; break;
        case BackwardPlanId::kD192General: plan.headdim = plan.headdim_v = 192, plan.general = true; break;
        case BackwardPlanId::kD256: plan.headdim = plan.headdim_v = 256; break;
        case BackwardPlanId::kD256Options: plan = backward_plan(BackwardPlanId::kD256), plan.options = true; break;
        case BackwardPlanId::kD256Intervals: plan = backward_plan(BackwardPlanId::kD256Options), plan.intervals = true; break;
        case BackwardPlanId::kD256Masks: plan = backward_plan(BackwardPlanId::kD256Options), plan.masks = true; break;
        case BackwardPlanId::kD256Dropout: plan = backward_plan(BackwardPlanId::kD256Options), plan.dropout = true; break;
        case BackwardPlanId::kD256Bias: plan = backward_plan(BackwardPlanId::kD256Options), plan.bias_stages = 2; break;
        case BackwardPlanId::kD256BiasFloat32:
            plan = backward_plan(BackwardPlanId::kD256Options), plan.bias_float32 = true, plan.bias_stages = 1;
            break;
        case BackwardPlanId::kD256BiasDropout: plan = backward_plan(BackwardPlanId::kD256Bias), plan.dropout = true; break;
        case BackwardPlanId::kD256BiasFloat32Dropout: plan = backward_plan(BackwardPlanId::kD256BiasFloat32), plan.dropout = true; break;
        case BackwardPlanId::kD256Softcap: plan = backward_plan(BackwardPlanId::kD256Options), plan.softcap = true; break;
        case BackwardPlanId::kD256General: plan.headdim = plan.headdim_v = 256, plan.general = true; break;
    }
    return plan;
}
// The plan of an instantiation. The experiments (ladder/variants) specialise it for their own ids.
template <BackwardPlanId kId>
inline constexpr BackwardPlan kBackwardPlan = backward_plan(kId);

// Bare plans mask a score before they multiply it by the scale. A scale that is not positive would turn -inf into +inf or NaN.
FA_HOST_DEVICE bool backward_scores_are_natural(const AttentionParams& p) { return p.general_scores() || !(p.scale > 0); }

// Whether the boolean mask hides whole keys: from all rows, and from all query heads that share them.
FA_HOST_DEVICE bool backward_masks_keys(const AttentionParams& p) {
    return p.mask.data && p.mask.row == 0 && (p.mask.head == 0 || p.group == 1);
}
// Whether the plans with options serve the call.
//     softcap    The derivative needs t = tanh(score / softcap), which is found again from P, in bfloat16 to 0.03 / softcap
//                (softcap_slope). Scores and lse stay below kLargeLse (attention/common/large_rows.cuh), unless a sink lies above:
//                then P is 0.
//     ALiBi      It is added to products, as slope / softmax_scale.
inline bool backward_serves_options(const AttentionParams& p) {
    AttentionParams rest = p;
    rest.softcap = 0, rest.alibi_slopes = nullptr;
    if (backward_masks_keys(p)) rest.mask.data = nullptr;
    const bool softcap = p.softcap == 0 || (p.softcap >= 30 && p.softcap <= 2000 && !p.alibi_slopes);
    return softcap && !rest.general_scores() && p.scale > (p.alibi_slopes ? 1e-6f : 0.0f);
}

// Whether a plan for intervals serves a call with intervals. No other plan does.
inline bool backward_serves_intervals(const AttentionParams& p) { return !p.changes_scores() && p.scale > 0; }
// Whether the plans for masks serve the call: a mask by blocks, or a mask of pairs. No other plan takes a mask by blocks.
inline bool backward_serves_masks(const AttentionParams& p) {
    constexpr int kMost = 1 << 22;  // rows, keys: SeenTile has 16 bits for tiles of 64 rows and 15 for blocks of 128 keys
    AttentionParams rest = p;
    rest.mask.data = nullptr;
    return has_seen_blocks(p) && !rest.changes_scores() && p.scale > 0 && p.seqlen_q <= kMost && p.seqlen_k <= kMost;
}
// Whether the plans with dropout serve the call.
inline bool backward_serves_dropout(const AttentionParams& p) {
    AttentionParams rest = p;
    rest.dropout_threshold = 0;
    return drops_in_pairs(p) && backward_serves_options(rest) && p.softcap == 0;
}
// Whether the plans with a bias serve the call: alone or with dropout.
inline bool backward_serves_bias(const AttentionParams& p) {
    AttentionParams rest = p;
    rest.bias.data = nullptr;
    if (drops_in_pairs(p)) rest.dropout_threshold = 0;
    rest.scale = 1.0f;  // any scale
    return bias_has_tiles(p) && backward_serves_options(rest) && p.softcap == 0 && !p.alibi_slopes;
}

// Whether they serve it with a copy of the bias (attention/common/bias_copy.h), which takes in a mask that does not hide whole keys, or is
// one of that mask alone.
inline bool backward_mask_of_pairs(const AttentionParams& p) { return p.mask.data && !backward_masks_keys(p); }
inline BiasCopy backward_bias_copy(const AttentionParams& p) { return bias_copy(p, backward_mask_of_pairs(p)); }
inline bool backward_copies_bias(const AttentionParams& p) {
    return wants_bias_copy(p, backward_mask_of_pairs(p), kLeastPairsBackward) &&
           backward_serves_bias(with_bias_copy(p, backward_bias_copy(p)));
}
// The sequences that one launch of a plan with a bias takes.
inline int32_t backward_batch_of_launch(const AttentionParams& p) {
    return backward_copies_bias(p) ? bias_copy_batch(p, backward_bias_copy(p)) : p.batch;
}

inline BackwardPlanId backward_choose(const AttentionParams& p) {
    using Id = BackwardPlanId;
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    const auto choose = [&](Id d64, Id d128, Id d192_v128, Id d192, Id d256) {
        return d <= 64 ? d64 : d <= 128 ? d128 : d > 192 ? d256 : p.headdim_v <= 128 ? d192_v128 : d192;
    };
    const bool general = backward_scores_are_natural(p) || p.window_left >= 0;
    if (p.intervals.data)
        return choose(Id::kD64Intervals, Id::kD128Intervals, Id::kD192V128Intervals, Id::kD192Intervals, Id::kD256Intervals);
    if (backward_serves_masks(p)) return choose(Id::kD64Masks, Id::kD128Masks, Id::kD192V128Masks, Id::kD192Masks, Id::kD256Masks);
    if (backward_serves_bias(p) || backward_copies_bias(p)) {
        const bool wide = bias_is_float32(p);
        if (wide && p.dropout_threshold)
            return choose(Id::kD64BiasFloat32Dropout, Id::kD128BiasFloat32Dropout, Id::kD256BiasFloat32Dropout, Id::kD256BiasFloat32Dropout,
                          Id::kD256BiasFloat32Dropout);
        if (wide)
            return choose(Id::kD64BiasFloat32, Id::kD128BiasFloat32, Id::kD192BiasFloat32, Id::kD192BiasFloat32, Id::kD256BiasFloat32);
        if (p.dropout_threshold)
            return choose(Id::kD64BiasDropout, Id::kD128BiasDropout, Id::kD192BiasDropout, Id::kD192BiasDropout, Id::kD256BiasDropout);
        return choose(Id::kD64Bias, Id::kD128Bias, Id::kD192Bias, Id::kD192Bias, Id::kD256Bias);
    }
    if (backward_serves_dropout(p)) return choose(Id::kD64Dropout, Id::kD128Dropout, Id::kD192Dropout, Id::kD192Dropout, Id::kD256Dropout);
    if (general && backward_serves_options(p))
        return p.softcap != 0 ? choose(Id::kD64Softcap, Id::kD128Softcap, Id::kD192Softcap, Id::kD192Softcap, Id::kD256Softcap)
                              : choose(Id::kD64Options, Id::kD128Options, Id::kD192V128Options, Id::kD192Options, Id::kD256Options);
    if (general) return choose(Id::kD64General, Id::kD128General, Id::kD192V128General, Id::kD192General, Id::kD256General);
    return choose(Id::kD64, Id::kD128, Id::kD192V128, Id::kD192, Id::kD256);
}

}  // namespace fa
