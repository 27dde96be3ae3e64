// forward.cpp: the CPU forward pass outside the tile kernel: it divides the work into tiles, hands them to threads and lays
// out their scratch.
//
// The order is FlashAttention's: one task owns a tile of queries and walks over the keys with an online softmax. The memory of a thread
// does not depend on the sequence length, and the result does not depend on which thread runs a task or how many threads there are. A
// decode step has few queries. There the keys are cut into pieces, whose number depends on the length of the cache alone, and threads share
// the pieces when there are fewer tiles than threads.
#include <algorithm>
#include <cmath>

#include "attention/common/mask.h"
#include "common/half.h"
#include "cpu/attention/exact_row.h"
#include "cpu/attention/interval_tiles.h"
#include "cpu/attention/kernels.h"
#include "cpu/attention/tile.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

const TileKernel& tile_kernel(Isa isa) {
#if FA_WITH_AMX
    if (isa == Isa::kAmx) return kTileAmx;
#endif
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return kTileAvx512;
    if (isa == Isa::kAvx2) return kTileAvx2;
#elif defined(__aarch64__)
    if (isa == Isa::kNeon) return kTileNeon;
#endif
    (void)isa;
    return kTilePortable;
}

// Query heads whose rows share tiles: those of a key head, or one where each has a mask of its own by which tiles are skipped.
int32_t packed_heads(const AttentionParams& p) {
    const bool own = (p.intervals.data && p.intervals.heads_of_entry < p.group) || (p.blocks.data && p.blocks.heads_of_entry < p.group);
    return own ? 1 : p.group;
}
int64_t packed_rows(const AttentionParams& p, int32_t seqlen_q) { return int64_t(seqlen_q) * packed_heads(p); }

// Sizes of one thread's scratch, in floats; each part is a whole number of cache lines.
constexpr int64_t kLine = 64 / sizeof(float);
int64_t whole(int64_t count, int64_t step) { return (count + step - 1) / step * step; }
int64_t lines(int64_t floats) { return whole(floats, kLine); }

// Rows per tile. With more rows, K and V are copied less often. Q^T and O^T should take at most half of a usual L2 cache, and every thread
// should get several tiles. The result of a row does not depend on its tile, so the choice is free.
int64_t tile_rows(const AttentionParams& p) {
    const int64_t fit = (int64_t(1) << 18) / (p.headdim + p.headdim_v);
    const int64_t share = int64_t(p.seqlen_q) * p.nheads * p.batch / (int64_t(8) * p.num_threads);
    return std::clamp<int64_t>(std::min(fit, share) / kMaxGroupRows * kMaxGroupRows, kMaxGroupRows, kMaxTileRows);
}

struct Layout {
    int64_t ld_k, ld_v, q, out, s, k, v, total;
    int64_t q16 = 0, p16 = 0, k16 = 0, v16 = 0;  // for AMX
    Layout(const AttentionParams& p, Isa isa) {
        const int64_t rows = std::min(tile_rows(p), lines(packed_rows(p, p.seqlen_q)));
        // Each row has one cache line more than it needs: with rows a power of two apart, a column of V would use only a few sets
        // of the cache.
        ld_k = lines(p.headdim) + kLine, ld_v = lines(p.headdim_v) + kLine;
        q = rows * p.headdim, out = rows * p.headdim_v, s = std::min<int64_t>(rows, kMaxGroupRows) * kTileKeys;
        k = ld_k * kTileKeys, v = ld_v * (kTileKeys + 1);
        if (isa == Isa::kAmx) {  // two elements for each float
            const int64_t headdim = whole(p.headdim, 32) / 2, headdim_v = whole(p.headdim_v, 16);
            out = rows * headdim_v;
            q16 = rows * headdim, k16 = kTileKeys * headdim, v16 = headdim_v * kTileKeys / 2, p16 = s / 2;
        }
        total = q + out + 2 * s + k + v + q16 + p16 + k16 + v16;
    }
    Scratch at(float* base) const {
        float *const o = base + q, *const score = o + out, *const seen = score + s, *const key = seen + s, *const value = key + k;
        float *const pairs_q = value + v, *const pairs_p = pairs_q + q16, *const half_k = pairs_p + p16, *const half_v = half_k + k16;
        return {base,
                o,
                score,
                seen,
                key,
                value,
                ld_k,
                ld_v,
                reinterpret_cast<uint32_t*>(pairs_q),
                reinterpret_cast<uint32_t*>(pairs_p),
                reinterpret_cast<uint16_t*>(half_k),
                reinterpret_cast<uint16_t*>(half_v)};
    }
};

// Fills `tile` with the packed rows from `first` on of query head `head` and those after it, in sequence b. Returns false if sequence b of
// a varlen batch has no such row.
bool set_tile(const AttentionParams& p, int32_t b, int32_t head, int64_t first, int64_t rows, const Scratch& scratch, QueryTile& tile) {
    tile.params = &p;
    tile.sequence = sequence_of(p, b), tile.origin = dropout_origin(p, b);
    const int64_t end = packed_rows(p, tile.sequence.seqlen_q);
    if (first >= end) return false;
    const int32_t heads = packed_heads(p);
    tile.batch = b, tile.head_k = head / p.group;
    tile.rows = int32_t(std::min(rows, end - first));
    tile.scratch = scratch;
    for (int32_t r = 0; r < tile.rows; ++r) {
        const int32_t query = int32_t((first + r) / heads);
        const KeyRange range = key_range(p, tile.sequence, query);
        tile.row[r] = {head + int32_t((first + r) % heads), query, range.begin, range.end};
    }
    tile.key_begin = tile.row[0].key_begin, tile.key_end = tile.row[tile.rows - 1].key_end;  // both grow with the query
    tile.bounds = nullptr;
    return true;
}

// *to = max(*to, score), atomically.
void raise_to(float& to, float score) {
    score += 0.0f;  // turns -0 into 0: otherwise the sign of a zero would depend on the order of the threads
    float old;
    __atomic_load(&to, &old, __ATOMIC_RELAXED);
    while (score > old && !__atomic_compare_exchange(&to, &old, &score, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

void run(const TileKernel& kernel, QueryTile& tile) {
    kernel.run(tile);
    SpecialKeys special;
    for (int32_t r = 0; r < tile.rows; ++r)
        if (tile.spoiled[r]) attend_exactly(tile, r, special);
}

void attend(const AttentionParams& p, const TileKernel& kernel, const IntervalTiles& intervals, int32_t b, int32_t head, int64_t first,
            int64_t rows, const Scratch& scratch) {
    QueryTile tile;
    if (!set_tile(p, b, head, first, rows, scratch, tile)) return;
    tile.bounds = intervals.of(b, head);
    run(kernel, tile);

    for (int32_t r = 0; p.max_score && r < tile.rows; ++r)
        raise_to(p.max_score[int64_t(b) * p.nheads + tile.row[r].head], tile.greatest[r]);
    if (!p.lse) return;
    for (int32_t r = 0; r < tile.rows; ++r) {
        const float sum = tile.row_sum[r];
        p.lse[lse_offset(p, tile.sequence, tile.row[r].head) + tile.row[r].query] = sum == 0 ? -INFINITY : tile.row_max[r] + std::log(sum);
    }
}

// ---- few queries against a cache: the keys are cut into pieces ----

constexpr int kPieceKeys = 32 * kTileKeys;  // about 0.2 ms of reading at headdim 128, enough to be worth a thread
constexpr int kMaxPieces = 16;

int piece_count(const AttentionParams& p, int64_t keys) {
    if (!p.cache.entries || packed_rows(p, p.seqlen_q) > kMaxGroupRows) return 1;
    if (p.cache.num_splits || p.cache.batch_invariant)
        return std::max(p.cache.num_splits, 1);  // one piece has the bits of a call with many rows
    return int(std::clamp<int64_t>((keys + kPieceKeys - 1) / kPieceKeys, 1, kMaxPieces));
}

// The result of one piece for all rows of a key head: out over the keys of the piece, normalised, and the statistics of the softmax.
struct Piece {
    float *out, *row_max, *row_sum;  // (rows, headdim_v), (rows), (rows)
    Piece(const AttentionParams& p, float* pieces, int index) {
        const int64_t rows = packed_rows(p, p.seqlen_q);
        out = pieces + index * rows * (p.headdim_v + 2), row_max = out + rows * p.headdim_v, row_sum = row_max + rows;
    }
};
int64_t pieces_size(const AttentionParams& p) {
    const int count = piece_count(p, p.seqlen_k);
    return count == 1 ? 0 : lines(count * packed_rows(p, p.seqlen_q) * (p.headdim_v + 2));
}

// Attends to piece `index` of the visible keys of key head `head_k` in sequence b. A short sequence has fewer pieces; its remaining
// pieces are empty.
void attend_piece(const AttentionParams& p, const TileKernel& kernel, int32_t b, int32_t head_k, int index, const Scratch& scratch,
                  float* pieces) {
    QueryTile tile;
    set_tile(p, b, head_k * p.group, 0, kMaxGroupRows, scratch, tile);
    const int32_t first = tile.key_begin / kTileKeys * kTileKeys, keys = std::max(tile.key_end - first, 0);
    const int count = piece_count(p, keys);
    const Piece piece(p, pieces, index);
    if (index >= count) {
        std::fill_n(piece.row_max, tile.rows, -INFINITY);
        std::fill_n(piece.row_sum, tile.rows, 0.0f);
        return;
    }
    const int32_t tiles = (keys + kTileKeys - 1) / kTileKeys, length = (tiles + count - 1) / count * kTileKeys;
    const int32_t begin = int32_t(std::min<int64_t>(tile.key_end, first + int64_t(index) * length));
    const int32_t end = int32_t(std::min<int64_t>(tile.key_end, begin + int64_t(length)));
    const auto cut = [&](int32_t& key) { key = std::clamp(key, begin, std::max(begin, end)); };
    for (int32_t r = 0; r < tile.rows; ++r) cut(tile.row[r].key_begin), cut(tile.row[r].key_end);
    cut(tile.key_begin), cut(tile.key_end);

    AttentionParams part = p;
    part.out = {piece.out, 0, int64_t(p.group) * p.headdim_v, p.headdim_v}, part.out_dtype = DType::kFloat32;
    if (index > 0) part.sinks = nullptr;  // a sink counts once, in the first piece
    tile.params = &part;
    tile.sequence.out = -int64_t(head_k) * p.group * p.headdim_v;
    run(kernel, tile);
    std::copy_n(tile.row_max, tile.rows, piece.row_max);
    std::copy_n(tile.row_sum, tile.rows, piece.row_sum);
}

// Merges the pieces, in order, into out and lse of all rows. A row whose visible keys all lie in one piece gets exactly the bits of that
// piece: the number of pieces depends on the capacity of the cache, but the result of a row must not.
void merge_pieces(const AttentionParams& p, int32_t b, int32_t head_k, float* pieces) {
    const Sequence s = sequence_of(p, b);
    const int count = piece_count(p, p.seqlen_k);
    for (int64_t r = 0; r < packed_rows(p, s.seqlen_q); ++r) {
        float row_max = -INFINITY, row_sum = 0, weight[256];
        for (int i = 0; i < count; ++i) row_max = std::fmax(row_max, Piece(p, pieces, i).row_max[r]);
        for (int i = 0; i < count; ++i) {
            const Piece piece(p, pieces, i);
            row_sum += weight[i] = piece.row_sum[r] == 0 ? 0 : piece.row_sum[r] * std::exp(piece.row_max[r] - row_max);
        }
        for (int i = 0; i < count; ++i) weight[i] = weight[i] == 0 ? 0 : weight[i] / row_sum;
        const int32_t head = head_k * p.group + int32_t(r % p.group), query = int32_t(r / p.group);
        const int64_t at = s.out + head * p.out.head + query * p.out.row;
        for (int32_t d = 0; d < p.headdim_v; ++d) {
            float sum = -0.0f;  // x + -0 is x, for both zeros
            for (int i = 0; i < count; ++i)
                if (weight[i] != 0) sum += weight[i] * Piece(p, pieces, i).out[r * p.headdim_v + d];
            store(p.out.data, at + d, p.out_dtype, row_sum == 0 ? 0 : sum);
        }
        if (p.lse) p.lse[lse_offset(p, s, head) + query] = row_sum == 0 ? -INFINITY : row_max + std::log(row_sum);
    }
}

int useful_threads(const AttentionParams& p, const TileKernel& kernel) {
    double keys = p.seqlen_k;
    if (p.cache.seqlens) {
        keys = 0;
        for (int32_t b = 0; b < p.batch; ++b) keys += double(cached_keys(p, b)) / p.batch;
    }
    if (p.window_left >= 0 && p.window_right >= 0) keys = std::min(keys, double(p.window_left) + p.window_right + 1);
    if (p.chunk.divisor) keys = std::min(keys, double(p.chunk.divisor));
    // Many rows are bound by multiply-adds, 5 vectors per nanosecond; few rows by reading K and V, 20 bytes per nanosecond.
    const double rows = double(packed_rows(p, p.seqlen_q)), elements = p.batch * p.nheads_k * keys * (p.headdim + p.headdim_v);
    return worthwhile_threads(elements * std::max(std::ceil(rows / kernel.lanes) / 5, 0.2), p.num_threads);
}

// ---- key_sums: a second pass, in which each task owns some keys ----

constexpr int kSumKeys = 4 * kTileKeys;  // keys per task
constexpr int kSumRows = kMaxGroupRows;  // rows per tile, a constant: the order of a sum must not depend on the number of threads

int64_t query_rows(const AttentionParams& p) { return p.nheads * (p.cu_seqlens_q ? p.total_q : int64_t(p.batch) * p.seqlen_q); }
int64_t statistics_size(const AttentionParams& p) { return p.key_sums ? lines(2 * query_rows(p)) : 0; }

// The statistics of rows row0 .. row0 + kSumRows - 1 of a head. A large lse is split into row_max and log_sum, from the same S
// as in sum_keys.
void part_statistics(const AttentionParams& p, const TileKernel& kernel, const IntervalTiles& intervals, int32_t b, int32_t head,
                     int64_t row0, RowStatistics* rows, const Scratch& scratch) {
    QueryTile tile;
    tile.params = &p, tile.sequence = sequence_of(p, b), tile.origin = dropout_origin(p, b), tile.scratch = scratch;
    tile.batch = b, tile.head_k = head / p.group;
    tile.bounds = intervals.of(b, head);
    const Sequence& s = tile.sequence;
    tile.rows = int32_t(std::min<int64_t>(kSumRows, s.seqlen_q - row0));
    if (tile.rows <= 0) return;
    const float* const lse = p.lse + lse_offset(p, s, head) + row0;
    rows += lse_offset(p, s, head) + row0;
    const float sink = p.sinks ? p.sinks[head] : -INFINITY;
    bool any_large = false;
    for (int32_t r = 0; r < tile.rows; ++r) {
        const KeyRange range = key_range(p, s, int32_t(row0) + r);
        tile.row[r] = {head, int32_t(row0) + r, range.begin, range.end};
        tile.row_max[r] = sink, tile.row_sum[r] = sink == -INFINITY ? 0 : 1;
        rows[r] = {lse[r] == -INFINITY ? INFINITY : lse[r], 0}, any_large |= is_large(lse[r]);
    }
    tile.key_begin = tile.row[0].key_begin, tile.key_end = tile.row[tile.rows - 1].key_end;
    if (!any_large || tile.key_begin >= tile.key_end) return;
    kernel.sum_rows(tile);
    for (int32_t r = 0; r < tile.rows; ++r)
        if (is_large(lse[r])) rows[r] = apart(lse[r], tile.row_max[r], tile.row_sum[r]);
}

void sum_keys(const AttentionParams& p, const TileKernel& kernel, const IntervalTiles& intervals, int32_t b, int32_t head,
              int64_t first_key, const RowStatistics* rows, const Scratch& scratch) {
    QueryTile tile;
    tile.params = &p, tile.sequence = sequence_of(p, b), tile.origin = dropout_origin(p, b), tile.scratch = scratch;
    tile.batch = b, tile.head_k = head / p.group;
    tile.bounds = intervals.of(b, head);
    const Sequence& s = tile.sequence;
    if (first_key >= s.seqlen_k) return;
    const int32_t begin = int32_t(first_key), end = int32_t(std::min<int64_t>(first_key + kSumKeys, s.seqlen_k));
    tile.key_sums = p.key_sums + key_sums_offset(p, b, head);
    const RowStatistics* const statistics = rows + lse_offset(p, s, head);
    const int32_t end_row = query_range(p, s, end - 1).end;
    for (int64_t row0 = query_range(p, s, begin).begin / kSumRows * kSumRows; row0 < end_row; row0 += kSumRows) {
        tile.rows = int32_t(std::min<int64_t>(kSumRows, end_row - row0));
        for (int32_t r = 0; r < tile.rows; ++r) {
            const int32_t query = int32_t(row0) + r;
            const KeyRange range = key_range(p, s, query);
            tile.row[r] = {head, query, std::clamp(range.begin, begin, end), std::clamp(range.end, begin, end)};
            tile.lse[r] = statistics[query];
        }
        tile.key_begin = tile.row[0].key_begin, tile.key_end = tile.row[tile.rows - 1].key_end;
        if (tile.key_begin < tile.key_end) kernel.sum_keys(tile);
    }
}

}  // namespace

size_t forward_workspace(const AttentionParams& p, Isa isa) {
    const int64_t floats =
        int64_t(p.num_threads) * (Layout(p, isa).total + pieces_size(p)) + statistics_size(p) + IntervalTiles::size(p, kTileKeys);
    return size_t(floats) * sizeof(float) + 64;
}

void clear_max_score(const AttentionParams& p) { std::fill_n(p.max_score, int64_t(p.batch) * p.nheads, -INFINITY); }

void clear_key_sums(const AttentionParams& p) {
    for (int32_t b = 0; b < p.batch; ++b)
        for (int32_t head = 0; head < p.nheads; ++head)
            std::fill_n(p.key_sums + key_sums_offset(p, b, head), sequence_of(p, b).seqlen_k, 0.0f);
}

void forward(const AttentionParams& p, Isa isa) {
    if (p.max_score) clear_max_score(p);
    const TileKernel& kernel = tile_kernel(isa);
    const Layout layout(p, isa);
    float* const workspace = static_cast<float*>(align_up(p.workspace, 64));
    float* const pieces = workspace + p.num_threads * layout.total;
    const int threads = useful_threads(p, kernel);
    if (const int count = piece_count(p, p.seqlen_k); count > 1) {
        const int64_t heads = int64_t(p.batch) * p.nheads_k;
        const auto attend = [&](int64_t head, int index, int thread, int64_t slot) {
            attend_piece(p, kernel, int32_t(head / p.nheads_k), int32_t(head % p.nheads_k), index,
                         layout.at(workspace + thread * layout.total), pieces + slot * pieces_size(p));
        };
        const auto merge = [&](int64_t head, int64_t slot) {
            merge_pieces(p, int32_t(head / p.nheads_k), int32_t(head % p.nheads_k), pieces + slot * pieces_size(p));
        };
        if (heads >= threads) {  // each thread takes a head and does all its pieces
            parallel_for(heads, threads, [&](int64_t head, int thread) {
                for (int index = 0; index < count; ++index) attend(head, index, thread, thread);
                merge(head, thread);
            });
        } else {
            parallel_for(heads * count, threads,
                         [&](int64_t task, int thread) { attend(task / count, int(task % count), thread, task / count); });
            for (int64_t head = 0; head < heads; ++head) merge(head, head);
        }
        return;
    }
    const IntervalTiles intervals(p, kTileKeys, pieces + p.num_threads * pieces_size(p) + statistics_size(p));
    intervals.fill(threads);
    const int64_t rows = tile_rows(p), tiles = (packed_rows(p, p.seqlen_q) + rows - 1) / rows, groups = p.nheads / packed_heads(p);
    // The tiles of one head are consecutive tasks, so its keys stay in the cache. Within a head the tiles with the most causal
    // keys come first.
    parallel_for(p.batch * tiles * groups, threads, [&](int64_t task, int thread) {
        const int64_t head = task / tiles, first = (tiles - 1 - task % tiles) * rows;
        attend(p, kernel, intervals, int32_t(head / groups), int32_t(head % groups) * packed_heads(p), first, rows,
               layout.at(workspace + thread * layout.total));
    });
    if (!p.key_sums) return;
    clear_key_sums(p);
    RowStatistics* const statistics = reinterpret_cast<RowStatistics*>(pieces);
    const int64_t blocks = (p.seqlen_q + int64_t(kSumRows) - 1) / kSumRows;
    parallel_for(blocks * p.batch * p.nheads, threads, [&](int64_t task, int thread) {
        const int64_t head = task / blocks;
        part_statistics(p, kernel, intervals, int32_t(head / p.nheads), int32_t(head % p.nheads), task % blocks * kSumRows, statistics,
                        layout.at(workspace + thread * layout.total));
    });
    const int64_t tasks = (p.seqlen_k + int64_t(kSumKeys) - 1) / kSumKeys;
    parallel_for(tasks * p.batch * p.nheads, threads, [&](int64_t task, int thread) {
        const int64_t head = task / tasks;
        sum_keys(p, kernel, intervals, int32_t(head / p.nheads), int32_t(head % p.nheads), task % tasks * kSumKeys, statistics,
                 layout.at(workspace + thread * layout.total));
    });
}

}  // namespace fa::cpu
