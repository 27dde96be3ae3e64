// wgmma_sm90/tiles.h: which key blocks and query tiles of the Hopper backward meet, and the workspace's data for each query tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/backward/wgmma_sm90/plan.h"
#include "attention/common/params.h"

namespace fa {

// Row i of a sequence sees keys i + left .. i + right, within 0 .. seqlen_k - 1.
struct VisibleBand {
    int left, right;
    int seqlen_q, seqlen_k;
};
FA_HOST_DEVICE VisibleBand visible_band(const AttentionParams& p, const Sequence& s) {
    const auto clamp = [](int64_t x, int low, int high) { return x < low ? low : x > high ? high : int(x); };
    return {p.window_left < 0 ? -s.seqlen_q : clamp(int64_t(s.shift) - p.window_left, -s.seqlen_q, s.seqlen_k),
            p.window_right < 0 ? s.seqlen_k : clamp(int64_t(s.shift) + p.window_right, -s.seqlen_q, s.seqlen_k), s.seqlen_q, s.seqlen_k};
}

// The query tiles that a key block meets, and the key blocks that a query tile meets: those with a visible pair in common. The two
// functions must agree on every pair of tiles, because deterministic blocks take their turns by them.
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

// The data of each tile of block_m queries that the three kernels (before, main, after) hand to each other in the caller's workspace.
struct QueryTiles {
    float* dq;   // (heads, tiles, block_m * columns): sums of dS K, each tile in the order of the accumulators that hold it
    int* turn;   // (heads, tiles, blocks): counters that decide who may add to dq (wgmma_sm90/turns.cuh)
    float* lse;  // (heads, tiles, block_m), in quad_order: exponents of 2, or kLargeRow (large_rows.cuh); +inf for rows that see no key and
                 // rows past the end
    float* delta;  // (heads, tiles, block_m), in quad_order: rowsum(dout * out) - dlse
    float* large;  // (heads, tiles, block_m, 2), in quad_order: RowBase of rows whose lse is kLargeRow; other rows are not written
    int block_m, block_n, columns;
    int blocks;     // blocks that share keys; each adds its own columns of dq
    bool natural;   // scores are in natural units, as in general plans and under a bias
    bool direct;    // dq is not used: the only key block that meets a tile stores rows of dQ (stores_dq). Then `zeroed` is true
    bool zeroed;    // dq starts as zeros; else the first key block that reaches a tile writes it, and the others wait for that
    bool skipped;   // key blocks do not walk over tiles that a mask hides, so a tile may meet no block although its rows see keys
    int tiles;      // of a sequence; varlen: of all sequences; tile m of sequence b is number cu_seqlens_q[b] / block_m + b + m
    int64_t heads;  // batch * nheads; varlen: nheads

    FA_HOST_DEVICE int64_t count() const { return heads * tiles; }
    // The number of key blocks, or parts of their walks, that the grid has taken so far. Without a fixed order, the first of each thread
    // block is not counted, and two blocks that share keys count none.
    FA_HOST_DEVICE int* taken() const { return turn + count() * blocks; }
    // Varlen, in order: 1 where every query tile and every key block belongs to exactly one sequence, the one that find_key_block finds.
    // That holds for lengths in order. Only the device can see other lengths; with them blocks must not wait for each other, because some
    // do not exist.
    FA_HOST_DEVICE int* has_order() const { return taken() + 1; }
    // The same place in a dense call, with `direct`: thread blocks, or pairs of them, that have read some_large for the last time.
    FA_HOST_DEVICE int* ended() const { return taken() + 1; }
    // kSomeLarge while some row of the call may be large. The kernel before the main one sets it, and the kernel after clears it, or with
    // `direct` the main one. Another call that finds it set, even by chance, only takes a slower path.
    FA_HOST_DEVICE int* some_large() const { return taken() + 2; }
    static constexpr int kSomeLarge = 0x6C617267;
};

// Whether the first key block of a head meets all its query tiles, and no other block does: up to block_n keys, of which every row sees one
// as far as the host knows. Without the float sums and the kernel after, 64 x 32 rows of 16 heads take a sixth less time.
inline bool stores_dq(const BackwardParams& b, const BackwardPlan& plan) {
    const AttentionParams& p = b.forward;
    const int64_t last_key_of_row_0 = int64_t(p.top_left ? 0 : p.seqlen_k - p.seqlen_q) + p.window_right;
    return !p.cu_seqlens_q && !b.accumulate && p.seqlen_k > 0 && p.seqlen_k <= plan.block_n && p.window_left < 0 && !p.chunk.divisor &&
           (p.window_right < 0 || last_key_of_row_0 >= 0);
}

inline QueryTiles query_tiles(const BackwardParams& b, const BackwardPlan& plan) {
    const AttentionParams& p = b.forward;
    QueryTiles t{};
    t.block_m = plan.block_m, t.block_n = plan.block_n, t.columns = plan.columns(), t.blocks = plan.blocks(),
    t.natural = plan.general || plan.bias();
    // Measured on an H200. Two blocks that share keys: claiming tiles instead of zeroing first gains 8 % at seqlen 512, nothing at 2048,
    // and loses up to 8 % at 16384. One block at head dim 128, causal: zeroing costs 2 % at 2048; waiting for claimed tiles costs 2 % at
    // 8192 and 7 % at 16384.
    // A window limits the blocks that meet a tile, as a short sequence does.
    const bool window = p.window_left >= 0 && p.window_right >= 0;
    const int64_t span = window ? int64_t(p.window_left) + p.window_right + plan.block_n : p.seqlen_q;
    const int64_t rows = span < p.seqlen_q ? span : p.seqlen_q;
    t.zeroed = plan.blocks() > 1 ? rows > 2048 : plan.dq_stages && !b.deterministic && p.window_right >= 0 && rows >= 8192;
    // In order, a block waits for all blocks before it, and only lists say which these are. Masks of keys have none.
    t.skipped = plan.masks || plan.intervals || (plan.options && p.mask.data && !b.deterministic);
    t.direct = !t.skipped && stores_dq(b, plan);
    if (t.direct) t.zeroed = true;  // no block waits for another
    t.tiles = p.cu_seqlens_q ? p.total_q / plan.block_m + p.batch : (p.seqlen_q + plan.block_m - 1) / plan.block_m;
    t.heads = p.cu_seqlens_q ? p.nheads : int64_t(p.batch) * p.nheads;
    return t;
}
inline size_t query_tiles_bytes(const QueryTiles& t) {
    return (size_t(t.count()) * (t.block_m * (t.columns + 4) + t.blocks) + 3) * sizeof(float);
}
inline void place_query_tiles(QueryTiles* t, void* memory) {
    t->dq = static_cast<float*>(memory);
    t->lse = t->dq + t->count() * t->block_m * t->columns;
    t->delta = t->lse + t->count() * t->block_m;
    t->large = t->delta + t->count() * t->block_m;
    t->turn = reinterpret_cast<int*>(t->large + t->count() * t->block_m * 2);
}

// For sequence b of a varlen call: the number of its first query tile in QueryTiles, and the number of its first key block.
FA_HOST_DEVICE int first_tile_of(const AttentionParams& p, int block_m, int b) {
    return clamp_to(p.cu_seqlens_q[b], 0, p.total_q) / block_m + b;
}
FA_HOST_DEVICE int first_block_of(const AttentionParams& p, int block_n, int b) { return first_key_row(p, b) / block_n + b; }
// Whether the query tiles and key blocks of sequence b end before those of sequence b + 1 begin.
FA_HOST_DEVICE bool ends_before_next(const AttentionParams& p, int block_m, int block_n, int b) {
    const Sequence s = sequence_of(p, b);
    return first_tile_of(p, block_m, b) + (s.seqlen_q + block_m - 1) / block_m <= first_tile_of(p, block_m, b + 1) &&
           first_block_of(p, block_n, b) + (s.seqlen_k + block_n - 1) / block_n <= first_block_of(p, block_n, b + 1);
}

// The place of row r of a tile in lse and delta. Lane q of a quad owns queries 8 c + 2 q and 8 c + 2 q + 1 for every c. In this order, a
// lane's queries of two neighbouring c are 16 contiguous bytes, and those of four lanes are 64.
FA_HOST_DEVICE constexpr int quad_order(int r) { return r / 16 * 16 + r % 8 / 2 * 4 + r / 8 % 2 * 2 + r % 2; }

// dQ is stored in pieces of 64 queries x 64 columns, 16 KiB each; a piece's number is (query chunk) * columns / 64 + (column chunk).
// Inside a piece, accumulators 4 i .. 4 i + 3 of thread t of the warpgroup lie at (128 i + t) * 4. With 64 columns these are accumulators
// of dQ^T.
constexpr int kDqPiece = 64 * 64;

// Key blocks of the call. The host does not know the lengths of a varlen call's sequences, so it counts a few blocks that turn out empty.
inline int64_t backward_blocks(const AttentionParams& p, const BackwardPlan& plan) {
    const int64_t blocks =
        p.cu_seqlens_q ? int64_t(p.total_k) / plan.block_n + p.batch : (int64_t(p.seqlen_k) + plan.block_n - 1) / plan.block_n * p.batch;
    return blocks * p.nheads_k;
}

// Key heads whose blocks run side by side: as many as keep the q, dout and dq of their query heads in 32 MB of the 50 MB of L2. Where query
// heads share keys, at least two: walks are long then, and with one head after another the longest walks of the last head would begin late
// (causal, 64 query heads on 8, seqlen 8192: a fifth of the time).
inline int64_t backward_section_heads(const AttentionParams& p) {
    const int64_t bytes = int64_t(p.seqlen_q) * p.group * (2 * p.headdim + 2 * p.headdim_v + 4 * p.headdim);
    const int64_t all = int64_t(p.batch) * p.nheads_k;
    int64_t heads = p.group > 1 ? 2 : 1;
    while (2 * heads * bytes <= (int64_t(32) << 20) && heads < all) heads *= 2;
    return heads < all ? heads : all;
}
// The same with a fixed order. There, consecutive blocks of a head share the head's tiles while these are in L2, however long the head is.
// With few heads side by side, many blocks follow each other and the last one starts late; with many heads, few blocks share a tile.
// Measured on an H200: best are 2048 columns of K at a time, but at least 16 heads, and 8 where query heads share keys, which makes walks
// longer.
inline int64_t backward_section_heads_in_order(const AttentionParams& p) {
    const int64_t least = p.group > 1 ? 8 : p.headdim <= 64 ? 32 : 16;
    const int64_t heads = backward_section_heads(p), all = int64_t(p.batch) * p.nheads_k;
    return heads >= least ? heads : least < all ? least : all;
}

}  // namespace fa
