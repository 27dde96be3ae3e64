// tiles.h: the launch shapes of the tensor-core kernels, chosen in one place, with the reason beside each number.
#pragma once

#include <cstdint>

#include "params.h"

namespace fa {

// ---- forward_wgmma_sm90 ----

// The instantiations. General ones take every option of a score and windows with a left edge; the others causal or full attention.
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
    kD256General
};

// What to do about the running row maximum. Any value gives the right answer while nothing overflows, so it need not be the maximum:
enum class RowMaximum {
    kLazy,                // raised only when a tile exceeds it by 2^8
    kSpeculative,         // not even computed after the first tile, unless a row sum overflows: then the warp repeats its tile exactly
    kSpeculativeUnmasked  // the same, but exact on tiles with a mask, which may hide a whole row: blocks taller than a key tile
};

struct WgmmaPlan {
    int headdim, headdim_v;  // the largest it serves; smaller ones are padded with zeros by the copy engine
    int block_n;             // keys per tile
    int warpgroups;          // consumer warpgroups, 64 query rows each
    int stages;              // K and V tiles in flight
    bool ping_pong;          // the warpgroups take turns to issue products, one's softmax under the other's products
    bool q_in_registers;     // frees the Q buffer for the next item at once
    RowMaximum maximum;
    bool general;
    // Speculative plans: wait for O before the exponentials instead of after. P's packs then fall between them, each under the next
    // exponential, and this warpgroup's own product no longer does: the other warpgroups' products must fill the tensor cores.
    bool early_pack = false;

    FA_HOST_DEVICE constexpr int block_m() const { return 64 * warpgroups; }
    FA_HOST_DEVICE constexpr bool pages() const { return warpgroups == 2; }  // three leave the producer too few registers for rows
    FA_HOST_DEVICE constexpr bool page_boxes() const { return pages() || headdim == 64; }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 63) / 64 * 64; }  // in shared memory: chunks of 64
    FA_HOST_DEVICE constexpr int columns_v() const { return (headdim_v + 63) / 64 * 64; }
};

// The comparisons are from one H200 with CUDA 13.0, bf16, 16384 tokens, heads x headdim = 2048, in a prototype of the same loop.
FA_HOST_DEVICE constexpr WgmmaPlan wgmma_plan(WgmmaPlanId id) {
    switch (id) {
        // Q in registers lets the next item's first product run under the epilogue: +4 .. 7 % up to 2k causal, 1k full; the speculative
        // path's code and turns cost more than they give there.
        case WgmmaPlanId::kD64Short: return {64, 64, 128, 2, 4, false, true, RowMaximum::kLazy, false};
        // 192 rows read K and V a third less often. The exponentials' unit is as busy as the tensor cores here, so packs under exponentials
        // give +3 .. 6 %. What lost: a polynomial for every 8th, 4th, 2nd exponential (-5, -7, -13 %: nine issue slots for one), both
        // products under the exponentials of shifted scores (-5 % with 64 or 80 keys, -15 % with two warpgroups), the turn handed on
        // between the products (-5 %).
        case WgmmaPlanId::kD64Long: return {64, 64, 128, 3, 4, true, false, RowMaximum::kSpeculativeUnmasked, false, true};
        case WgmmaPlanId::kD64General: return {64, 64, 128, 2, 4, false, false, RowMaximum::kLazy, true};
        // As 128, with a quarter less work; Q in registers and 3 stages fit.
        case WgmmaPlanId::kD96: return {96, 96, 128, 2, 3, true, true, RowMaximum::kLazy, false};
        case WgmmaPlanId::kD96General: return {96, 96, 128, 2, 3, false, false, RowMaximum::kLazy, true};
        // The speculative path's extra code costs more than the maximum on items of a few tiles.
        case WgmmaPlanId::kD128Short: return {128, 128, 128, 2, 3, true, true, RowMaximum::kLazy, false};
        // The third stage pays for K staying until the softmax knows that it needs no second look: +7 .. 10 % over lazy at 16k. Turns: -1
        // %. Early packs: -2 %, in the long plan -6 %.
        case WgmmaPlanId::kD128Middle: return {128, 128, 128, 2, 3, false, false, RowMaximum::kSpeculative, false};
        // A third less traffic from L2: +5 % at the power limit. 96 keys would spill.
        case WgmmaPlanId::kD128Long: return {128, 128, 80, 3, 4, true, false, RowMaximum::kSpeculativeUnmasked, false};
        case WgmmaPlanId::kD128General: return {128, 128, 128, 2, 2, false, false, RowMaximum::kLazy, true};
        // No turns from here on: the softmax is short beside the products. Tiles fill shared memory with two stages.
        case WgmmaPlanId::kD192V128: return {192, 128, 128, 2, 2, false, false, RowMaximum::kLazy, false};
        case WgmmaPlanId::kD192: return {192, 192, 112, 2, 2, false, false, RowMaximum::kLazy, false};
        case WgmmaPlanId::kD192General: return {192, 192, 96, 2, 2, false, false, RowMaximum::kLazy, true};
        // 64 keys beat 80 by 2 .. 5 % up to 4k and equal it beyond; turns +0.5 %.
        case WgmmaPlanId::kD256: return {256, 256, 64, 2, 2, true, false, RowMaximum::kLazy, false};
        case WgmmaPlanId::kD256General: return {256, 256, 64, 2, 2, false, false, RowMaximum::kLazy, true};
    }
    return {};
}

constexpr int kWgmmaMaxHeadDim = 256;

// The scale is folded into the exponential's base, except for scores that are more than scale * (q . k) or scales that turn the order.
FA_HOST_DEVICE bool wgmma_scores_are_natural(const AttentionParams& p) { return p.general_scores() || !(p.scale > 0); }
inline bool wgmma_needs_general(const AttentionParams& p) { return wgmma_scores_are_natural(p) || p.window_left >= 0; }

// Whether blocks of 192 rows take longer than those of 128, which read K and V more often, because they leave more of the GPU idle:
// up to two rounds of blocks. 512 rows x 32 heads over 8192 keys: 124 -> 99 us (those 128 rows on pages of 256 keys).
inline bool wgmma_blocks_of_192_idle(const AttentionParams& p, int multiprocessors) {
    const auto rows = [&](int block_m) {
        const int64_t blocks = (int64_t(p.seqlen_q) + block_m - 1) / block_m * p.deciding_batch() * p.nheads;
        return (blocks + multiprocessors - 1) / multiprocessors * block_m;
    };
    return !p.cu_seqlens_q && rows(192) <= 2 * 192 && 20 * rows(192) > 21 * rows(128);
}

inline WgmmaPlanId wgmma_choose(const AttentionParams& p, int multiprocessors) {
    const bool general = wgmma_needs_general(p), causal = p.window_right >= 0, pages = p.cache.block_table;
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v, keys = p.seqlen_k;
    // With rows and keys 128 by 128 every row sees a key of its first tile when the diagonal starts at a multiple of 128. A row that
    // does not would send its warp down the slow path of the speculative maximum.
    const bool aligned =
        !causal || p.cu_seqlens_q || p.top_left || (!p.cache.seqlens && (int64_t(p.seqlen_k) - p.seqlen_q + p.window_right) % 128 == 0);
    if (d <= 64) {
        if (general) return WgmmaPlanId::kD64General;
        return keys <= (causal ? 2048 : 1024) || (pages && p.cache.page_size % 8) ? WgmmaPlanId::kD64Short : WgmmaPlanId::kD64Long;
    }
    if (d <= 96) return general ? WgmmaPlanId::kD96General : WgmmaPlanId::kD96;
    if (d <= 128) {
        if (general) return WgmmaPlanId::kD128General;
        if (keys >= (causal ? 8192 : 2048))
            return pages || wgmma_blocks_of_192_idle(p, multiprocessors) ? WgmmaPlanId::kD128Middle : WgmmaPlanId::kD128Long;
        return !aligned || keys <= (causal ? 1024 : 512) ? WgmmaPlanId::kD128Short : WgmmaPlanId::kD128Middle;
    }
    if (d <= 192) {
        if (general) return WgmmaPlanId::kD192General;
        return p.headdim_v <= 128 ? WgmmaPlanId::kD192V128 : WgmmaPlanId::kD192;
    }
    return general ? WgmmaPlanId::kD256General : WgmmaPlanId::kD256;
}

// How the blocks, one on each multiprocessor, come by their items, which are ordered longest first when they differ.
enum class WorkOrder {
    kStride,  // block i takes items i, i + blocks, ...: nothing to set up; right when all items are equally long
    kCounter  // a counter in the workspace, zeroed before every launch: whoever is free takes the longest item left
};
inline WorkOrder wgmma_order(const AttentionParams& p, int64_t items, int blocks) {
    // Causal: the counter gains from 1 % (512) to 40 % (d256, 16k) over a stride, but its memset costs 2 us: 8 .. 17 % of calls of 12 to
    // 20 us, 3 % of one of 39 us, which is 10^10 of these.
    const double work = double(p.batch) * p.nheads * p.seqlen_q * p.seqlen_k * (p.headdim + p.headdim_v);
    if (items <= blocks || (!p.cu_seqlens_q && work <= 1e10)) return WorkOrder::kStride;
    const bool uneven = p.cu_seqlens_q || p.cache.seqlens || p.window_left >= 0 || p.window_right >= 0;
    return uneven ? WorkOrder::kCounter : WorkOrder::kStride;
}

// Work items: query blocks of every head. A varlen call cannot know its sequences' lengths here and counts a few that turn out empty.
inline int64_t wgmma_items(const AttentionParams& p, int block_m) {
    const int64_t blocks =
        p.cu_seqlens_q ? int64_t(p.total_q) / block_m + p.batch : (int64_t(p.seqlen_q) + block_m - 1) / block_m * p.batch;
    return blocks * p.nheads;
}

// Query heads whose K and V are walked together so that they stay in L2: 32 of its 50 MB.
inline int64_t wgmma_section_heads(const AttentionParams& p) {
    const int64_t bytes = 2 * int64_t(p.seqlen_k) * (p.headdim + p.headdim_v), all = int64_t(p.batch) * p.nheads;
    int64_t heads = 1;
    while (2 * heads * bytes <= (int64_t(32) << 20) && heads < all) heads *= 2;
    return heads * p.group < all ? heads * p.group : all;
}

// One section of all that fits into L2 reads the K and V of its heads from memory in its first pass and nothing afterwards, but short
// sequences need the memory all the time. There the leading heads go in sections of half a wave of items, and only as many as fit into
// L2, which decide how evenly the blocks finish, together: d128 and d256 causal +3 .. 8 % at 512 and 1k. Longer ones: +1 .. -3 %.
inline void wgmma_sections(const AttentionParams& p, int m_blocks, int multiprocessors, int* leading, int* leading_section) {
    const int64_t all = int64_t(p.batch) * p.nheads, last = wgmma_section_heads(p);
    int64_t heads = p.group;
    while (2 * heads * m_blocks <= multiprocessors / 2) heads *= 2;
    *leading_section = int(heads);
    *leading = p.seqlen_k <= 1024 ? int((all - last) / p.group * p.group) : 0;
}

// ---- decode_mla_sm90 ----

// V is the first columns of K, in the same memory; else it is loaded too, and a tile has half the keys.
inline bool mla_v_is_k(const AttentionParams& p) {
    return p.v.data == p.k.data && p.v.batch == p.k.batch && p.v.row == p.k.row && p.v.head == p.k.head;
}
FA_HOST_DEVICE constexpr int mla_keys(bool own_v) { return own_v ? 32 : 64; }  // of a tile

// Shares into which the keys of every sequence are cut: what the whole grid, one block on each multiprocessor, takes in tiles of `keys`
// keys, when a block costs a few tiles more than those of its share. The capacity of the cache stands for the lengths, which only the
// device knows.
inline int mla_splits(const AttentionParams& p, int keys, int64_t blocks_per_sequence, int multiprocessors) {
    constexpr int kBlockCost = 6, kInvariantTiles = 32, kMostSplits = 128;
    const int64_t tiles = (int64_t(p.seqlen_k) + keys - 1) / keys, most = tiles < kMostSplits ? tiles : kMostSplits;
    if (p.cache.num_splits > 0) return p.cache.num_splits;
    if (most <= 1) return 1;
    if (p.cache.batch_invariant) return int(tiles < kInvariantTiles * most ? (tiles + kInvariantTiles - 1) / kInvariantTiles : most);
    int64_t best = 1, best_cost = -1;
    for (int64_t splits = 1; splits <= most; ++splits) {
        const int64_t waves = (p.batch * blocks_per_sequence * splits + multiprocessors - 1) / multiprocessors;
        const int64_t cost = waves * ((tiles + splits - 1) / splits + kBlockCost);
        if (best_cost < 0 || cost < best_cost) best = splits, best_cost = cost;
    }
    return int(best);
}

// ---- forward_fp8_sm90 ----

enum class Fp8PlanId { kD64Short, kD64Long, kD128Short, kD128Long, kD256, kD256Long };

// The tensor cores cut every 8-bit product off at 2^-13 of the sum it joins, so sums over more than kFp8Promotion keys are promoted to
// additions in float, unless fast_accum allows otherwise.
enum class Fp8Sum {
    kTensorCores,  // never promoted
    kShared,       // every kFp8Promotion keys O is added to what shared memory keeps of it, and starts afresh; never with fast_accum
    kPieces        // tile by tile, 64 head dims at a time, to registers that S leaves: one product has to wait for the other
};
constexpr int kFp8Promotion = 1024;

struct Fp8Plan {
    int headdim;             // the largest of q, k and v that it serves; smaller ones are padded with zeros by the copy engine
    int block_n;             // keys per tile
    int warpgroups;          // consumer warpgroups, 64 query rows each
    int k_stages, v_stages;  // tiles of K in flight; of V, and of V^T
    bool ping_pong;
    bool q_in_registers;
    Fp8Sum sum;

    FA_HOST_DEVICE constexpr int block_m() const { return 64 * warpgroups; }
    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 127) / 128 * 128; }  // of Q, K, V in shared memory: chunks of 128
    // Of the block's 64 Ki registers: 168 x 384 threads or 128 x 512. 128 keys at head dim 128 and 256 take 240, leaving the producer 24.
    FA_HOST_DEVICE constexpr int consumer_registers() const { return warpgroups == 3 ? 160 : headdim >= 128 ? 240 : 232; }
    FA_HOST_DEVICE constexpr int producer_registers() const { return warpgroups == 3 ? 32 : 504 - 2 * consumer_registers(); }
    FA_HOST_DEVICE constexpr int keys() const { return (block_n + 127) / 128 * 128; }  // of V^T, likewise
};

// Numbers measured as above, on e4m3; fast_accum or not changes the long plans only.
FA_HOST_DEVICE constexpr Fp8Plan fp8_plan(Fp8PlanId id) {
    switch (id) {
        // Short items start and end sooner with two warpgroups, and need no turns: 9 .. 10 % over the long plan up to 1k causal.
        case Fp8PlanId::kD64Short: return {64, 128, 2, 4, 3, false, true, Fp8Sum::kTensorCores};
        // 192 rows share a tile's transposition: 11 .. 28 % over 128 rows from 2k on. Promotion: 2 .. 7 %. Without turns -4 .. -6 %, Q in
        // shared memory -10 %, 160 keys -14 % (the products are serialised, C7512), two warpgroups with 192 keys -17 %.
        case Fp8PlanId::kD64Long: return {64, 128, 3, 4, 3, true, true, Fp8Sum::kShared};
        // Room for Q in registers, so that the next item's first product runs under the epilogue.
        case Fp8PlanId::kD128Short: return {128, 128, 2, 4, 3, false, true, Fp8Sum::kTensorCores};
        // 96 keys are what 160 registers hold beside 64 of O. Promotion: 2 .. 8 %, the time that shared memory takes for O; every 512 keys
        // 5 % more. Without turns -1 .. -2 %. Two warpgroups with 160, 192, 224 keys: -2 .. -13 % without promotion.
        case Fp8PlanId::kD128Long: return {128, 96, 3, 3, 2, true, false, Fp8Sum::kShared};
        // Turns +0 .. 2 %. 96 keys -14 %.
        case Fp8PlanId::kD256: return {256, 128, 2, 2, 2, true, false, Fp8Sum::kTensorCores};
        // Shared memory has no room for O. 6 .. 9 % behind the sum in the tensor cores.
        case Fp8PlanId::kD256Long: return {256, 128, 2, 2, 2, false, false, Fp8Sum::kPieces};
    }
    return {};
}

inline Fp8PlanId fp8_choose(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    const bool causal = p.window_right >= 0;
    if (d <= 64) return causal && p.seqlen_k <= 1024 ? Fp8PlanId::kD64Short : Fp8PlanId::kD64Long;
    if (d <= 128) return p.seqlen_k <= 1024 ? Fp8PlanId::kD128Short : Fp8PlanId::kD128Long;
    return p.fast_accum || p.seqlen_k <= kFp8Promotion ? Fp8PlanId::kD256 : Fp8PlanId::kD256Long;
}

}  // namespace fa
