// tiles_backward.h: the launch shapes of backward_wgmma_sm90 with the reason beside each number, which of its key blocks and query tiles
// meet, and where its workspace keeps what belongs to a tile of queries.
#pragma once

#include <cstddef>
#include <cstdint>

#include "params.h"

namespace fa {

// General instantiations take every option of a score and windows with a left edge; the others causal or full attention.
enum class BackwardPlanId { kD64, kD64General, kD128, kD128General, kD192V128, kD192V128General, kD192, kD192General, kD256, kD256General };

struct BackwardPlan {
    int headdim, headdim_v;  // the largest of q and of v that it serves; smaller ones are padded with zeros by the copy engine
    int block_m;             // queries per tile
    int block_n;             // keys of a block, or of two that share them: 64 for each main warpgroup
    int stages;              // slots of Q and of dout
    int dq_stages;           // pieces of dQ, 64 queries x 64 columns, on their way through shared memory; 0: from registers
    bool general;

    FA_HOST_DEVICE constexpr int columns() const { return (headdim + 63) / 64 * 64; }  // in shared memory: chunks of 64
    FA_HOST_DEVICE constexpr int columns_v() const { return (headdim_v + 63) / 64 * 64; }
    // Slots of K and V: a block takes one 128 keys after another, and with two the next are loaded while it works on these. There is room
    // for two to head dim 64.
    FA_HOST_DEVICE constexpr int key_stages() const { return headdim <= 64 ? 2 : 1; }
    // Blocks of a cluster that share the keys, and the chunks of 64 columns of dQ that the first of two makes.
    FA_HOST_DEVICE constexpr int blocks() const { return headdim > 128 ? 2 : 1; }
    // Steps of K^T that dQ's warpgroup keeps in registers; in fp16 the main warpgroups do not leave it enough.
    FA_HOST_DEVICE constexpr int held_steps(bool half) const { return headdim <= 64 && !general && !half ? 4 : 0; }
    // Of the 64 Ki registers: 32 for the threads that copy + 2 x main + dQ = 512 = 4 x 128. ptxas serialises the products of the main
    // warpgroups below 208 (C7512), those of headdim 64 below 200; dQ needs 64 for a piece.
    FA_HOST_DEVICE constexpr int main_registers(bool half) const { return held_steps(half) ? 200 : 208; }
    FA_HOST_DEVICE constexpr int dq_registers(bool half) const { return held_steps(half) ? 80 : 64; }
    FA_HOST_DEVICE constexpr int dq_chunks() const { return columns() / 64; }
    FA_HOST_DEVICE constexpr int dq_chunks_of_keys() const { return dq_chunks() / 2; }
};

FA_HOST_DEVICE constexpr BackwardPlan backward_plan(BackwardPlanId id) {
    switch (id) {
        // S and dP of 128 x 128 take 64 registers each and leave room for dK and dV of 32. K or V as A operands, 16 more, would keep ptxas
        // from running the exponentials under dP.
        case BackwardPlanId::kD64: return {64, 64, 128, 128, 2, 0, false};
        case BackwardPlanId::kD64General: return {64, 64, 64, 128, 2, 0, true};
        // 64 queries: dK and dV fill 128 registers, S and dP 32 each. Four pieces of dQ fill shared memory.
        case BackwardPlanId::kD128: return {128, 128, 64, 128, 2, 4, false};
        case BackwardPlanId::kD128General: return {128, 128, 64, 128, 2, 0, true};
        // dK of 64 keys alone fills 96 or 128 registers, and K and Q shared memory: two blocks, backward_wgmma_sm90_pair.cuh.
        case BackwardPlanId::kD192V128: return {192, 128, 64, 128, 2, 0, false};
        case BackwardPlanId::kD192V128General: return {192, 128, 64, 128, 2, 0, true};
        case BackwardPlanId::kD192: return {192, 192, 64, 128, 2, 0, false};
        case BackwardPlanId::kD192General: return {192, 192, 64, 128, 2, 0, true};
        case BackwardPlanId::kD256: return {256, 256, 64, 128, 2, 0, false};
        case BackwardPlanId::kD256General: return {256, 256, 64, 128, 2, 0, true};
    }
    return {};
}

constexpr int kBackwardLoaderRegisters = 32;
constexpr int kBackwardWgmmaMaxHeadDim = 256;

// Plain scores are masked before the scale is applied, which must not turn -inf round.
FA_HOST_DEVICE bool backward_scores_are_natural(const AttentionParams& p) { return p.general_scores() || !(p.scale > 0); }

inline BackwardPlanId backward_choose(const AttentionParams& p) {
    const bool general = backward_scores_are_natural(p) || p.window_left >= 0;
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (d <= 64) return general ? BackwardPlanId::kD64General : BackwardPlanId::kD64;
    if (d <= 128) return general ? BackwardPlanId::kD128General : BackwardPlanId::kD128;
    if (d <= 192 && p.headdim_v <= 128) return general ? BackwardPlanId::kD192V128General : BackwardPlanId::kD192V128;
    if (d <= 192) return general ? BackwardPlanId::kD192General : BackwardPlanId::kD192;
    return general ? BackwardPlanId::kD256General : BackwardPlanId::kD256;
}

// Row i of a sequence sees keys i + left .. i + right of 0 .. seqlen_k - 1.
struct VisibleBand {
    int left, right;
    int seqlen_q, seqlen_k;
};
FA_HOST_DEVICE VisibleBand visible_band(const AttentionParams& p, const Sequence& s) {
    const auto clamp = [](int64_t x, int low, int high) { return x < low ? low : x > high ? high : int(x); };
    return {p.window_left < 0 ? -s.seqlen_q : clamp(int64_t(s.shift) - p.window_left, -s.seqlen_q, s.seqlen_k),
            p.window_right < 0 ? s.seqlen_k : clamp(int64_t(s.shift) + p.window_right, -s.seqlen_q, s.seqlen_k), s.seqlen_q, s.seqlen_k};
}

// Which query tiles a key block meets and which key blocks a query tile: those with a pair of the band between them, the same pairs of
// both from either side, because blocks take turns by it.
struct Range {
    int begin, end;
};
FA_HOST_DEVICE Range query_tiles_of(const VisibleBand& band, int key0, int block_m, int block_n) {
    const int last_key = (key0 + block_n < band.seqlen_k ? key0 + block_n : band.seqlen_k) - 1;
    const int first_row = key0 - band.right, last_row = last_key - band.left;
    if (key0 >= band.seqlen_k || first_row >= band.seqlen_q || last_row < 0 || band.seqlen_q == 0) return {0, 0};
    return {first_row > 0 ? first_row / block_m : 0, (last_row < band.seqlen_q ? last_row : band.seqlen_q - 1) / block_m + 1};
}
FA_HOST_DEVICE Range key_blocks_of(const VisibleBand& band, int row0, int block_m, int block_n) {
    const int last_row = (row0 + block_m < band.seqlen_q ? row0 + block_m : band.seqlen_q) - 1;
    const int first_key = row0 + band.left, last_key = last_row + band.right;
    if (row0 >= band.seqlen_q || first_key >= band.seqlen_k || last_key < 0 || band.seqlen_k == 0) return {0, 0};
    return {first_key > 0 ? first_key / block_n : 0, (last_key < band.seqlen_k ? last_key : band.seqlen_k - 1) / block_n + 1};
}

// What the kernels before, inside and after hand to each other for every tile of block_m queries, in the caller's workspace.
struct QueryTiles {
    float* dq;     // (heads, tiles, block_m * columns): sums of dS K, each tile in the order of the accumulators that hold it
    int* turn;     // (heads, tiles): who may add to dq; backward_wgmma_sm90_dq.cuh
    float* lse;    // (heads, tiles, block_m): in units of log2, +inf for rows without keys and past the end, in the order of quad_order
    float* delta;  // likewise: rowsum(dout * out)
    int block_m, block_n, columns;
    int blocks;     // that share keys and add to a tile, each a part of it
    bool zeroed;    // dq starts as zeros; else the first key block to come writes it and the others wait for that
    int tiles;      // of a sequence; varlen: of all sequences, tile m of sequence b at cu_seqlens_q[b] / block_m + b + m
    int64_t heads;  // batch * nheads; varlen: nheads

    FA_HOST_DEVICE int64_t count() const { return heads * tiles; }
    FA_HOST_DEVICE int* taken() const { return turn + count(); }  // key blocks taken; but in a fixed order beyond the first of every block
};

inline QueryTiles query_tiles(const BackwardParams& b, const BackwardPlan& plan) {
    const AttentionParams& p = b.forward;
    QueryTiles t{};
    t.block_m = plan.block_m, t.block_n = plan.block_n, t.columns = plan.columns(), t.blocks = plan.blocks();
    // Two blocks that share keys: claiming tiles gains 8 % at seqlen 512, nothing at 2048, and loses up to 8 % at 16384 (H200).
    // One block at head dim 128, causal: zeros cost 2 % at 2048, waiting for claimed tiles 2 % at 8192 and 7 % at 16384.
    t.zeroed = plan.blocks() > 1 ? p.seqlen_q > 2048 : plan.dq_stages && !b.deterministic && p.window_right >= 0 && p.seqlen_q >= 8192;
    t.tiles = p.cu_seqlens_q ? p.total_q / plan.block_m + p.batch : (p.seqlen_q + plan.block_m - 1) / plan.block_m;
    t.heads = p.cu_seqlens_q ? p.nheads : int64_t(p.batch) * p.nheads;
    return t;
}
inline size_t query_tiles_bytes(const QueryTiles& t) { return (size_t(t.count()) * (t.block_m * (t.columns + 2) + 1) + 1) * sizeof(float); }
inline void place_query_tiles(QueryTiles* t, void* memory) {
    t->dq = static_cast<float*>(memory);
    t->lse = t->dq + t->count() * t->block_m * t->columns;
    t->delta = t->lse + t->count() * t->block_m;
    t->turn = reinterpret_cast<int*>(t->delta + t->count() * t->block_m);
}

// Where row r of a tile lies in lse and delta. A lane of quad position q owns queries 8 c + 2 q and + 1 of every c: here those of two
// neighbouring c are 16 contiguous bytes, and the four lanes' 64.
FA_HOST_DEVICE constexpr int quad_order(int r) { return r / 16 * 16 + r % 8 / 2 * 4 + r / 8 % 2 * 2 + r % 2; }

// dQ in pieces of 64 queries x 64 columns: piece (query chunk) * columns / 64 + (column chunk), 16 KiB each; inside a piece accumulators
// 4 i .. 4 i + 3 of thread t of the warpgroup at (128 i + t) * 4; with 64 columns accumulators of dQ^T.
constexpr int kDqPiece = 64 * 64;

// Key blocks; a varlen call cannot know its sequences' lengths here and counts a few that turn out empty.
inline int64_t backward_blocks(const AttentionParams& p, const BackwardPlan& plan) {
    const int64_t blocks =
        p.cu_seqlens_k ? int64_t(p.total_k) / plan.block_n + p.batch : (int64_t(p.seqlen_k) + plan.block_n - 1) / plan.block_n * p.batch;
    return blocks * p.nheads_k;
}

// Key heads whose blocks run side by side, so that the q, dout and dq of their query heads stay in L2: 32 of its 50 MB.
inline int64_t backward_section_heads(const AttentionParams& p) {
    const int64_t bytes = int64_t(p.seqlen_q) * p.group * (2 * p.headdim + 2 * p.headdim_v + 4 * p.headdim);
    const int64_t all = int64_t(p.batch) * p.nheads_k;
    int64_t heads = 1;
    while (2 * heads * bytes <= (int64_t(32) << 20) && heads < all) heads *= 2;
    return heads < all ? heads : all;
}

}  // namespace fa
