// decode.h: a decode call on the host: which kernel wins, how the call is divided into work, and the launches of a call.
#pragma once

#include "attention/decode/common/schedule.h"
#include "attention/kernels.h"
#include "common/constants.h"

#include <algorithm>
#include <numeric>

namespace fa {

// Head dims share an instantiation up to 64, 128 and 256 columns.
inline int decode_bucket(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    return d <= 64 ? 64 : d <= 128 ? 128 : 256;
}

// Whether the cache's elements are bytes: e4m3 or int8.
inline bool has_8bit_cache(const AttentionParams& p) { return p.cache.entries && p.cache.dtype != p.dtype; }

// 8-bit caches: whether the factors may differ between the keys of a key head of one sequence.
inline bool is_scaled_by_key(const CacheView& cache) {
    return cache.k_scale.row || cache.v_scale.row || (cache.block_table && (cache.k_scale.batch || cache.v_scale.batch));
}

// Whether a decode kernel reads elements of memory for each score: bias, a mask of any form, dropout. Such calls have no cache.
inline bool decode_reads_scores(const AttentionParams& p) {
    return p.bias.data || p.mask.data || p.intervals.data || p.blocks.data || p.dropout_threshold;
}

// Whether the scores of a call stay in natural units, in plans of their own. A softcap of float32 does, too: its tanh is exact there,
// unless the call allows what is coarser.
inline bool decode_scores_are_natural(const AttentionParams& p) {
    return decode_reads_scores(p) || (p.dtype == DType::kFloat32 && p.softcap != 0 && !p.allow_tf32);
}

// Rows of q that share a key head.
inline int64_t rows_of_key_head(const AttentionParams& p) { return int64_t(p.seqlen_q) * p.group; }

constexpr int kWideTileShift = 5;  // a tile of decode_wide_sm80 has 32 keys
constexpr int kLaneWarps = 8;      // warps of a block of lanes/kernel.cuh; a warp has 1 or 4 rows

// The most blocks of a cluster: 8 on every GPU with clusters; 16, a whole GPC, where a GPU of at least 128 multiprocessors can hold such a
// cluster. The GPU is asked once per process, when it has a context.
int decode_most_cluster_blocks(const DeviceInfo& device);

// Blocks of a cluster; a cluster has one unit. There are at most two blocks per multiprocessor, because clusters cannot use all
// multiprocessors evenly. 0: num_splits asks for a number of pieces for which there is no cluster size.
inline int decode_cluster_blocks(const AttentionParams& p, const DeviceInfo& device) {
    const int most = decode_most_cluster_blocks(device);
    if (const int wanted = p.cache.num_splits) return wanted > 1 && wanted <= most && !(wanted & (wanted - 1)) ? wanted : 0;
    const int64_t units = int64_t(p.deciding_batch()) * p.nheads_k;
    int cluster = 2;
    while (cluster < 8 && units * cluster * 2 <= 2 * device.multiprocessors) cluster *= 2;
    return most > 8 && units * most <= device.multiprocessors ? most : cluster;
}

// Whether decode_lanes_cluster_sm90 is faster than dividing units into pieces, measured on an H200 by the bytes of K and V per block. One
// row: up to 128 KB, or 64 KB of 16 bits where no key is appended in the same launch. More than four rows in float32: 256 KB over
// the number of rows. Up to four rows of 16 bits, which tensor cores multiply faster: up to 64 KB, and only where a key is appended, which
// saves a launch. 8-bit caches: up to as many elements as of 16 bits, but a quarter of that with two blocks per multiprocessor, where
// widening the bytes is the bound.
inline bool decode_lanes_cluster_wins(const AttentionParams& p, const DeviceInfo& device) {
    const int64_t rows = rows_of_key_head(p);
    const bool tensor_cores = rows > 1 && p.dtype != DType::kFloat32;
    // With batch_invariant a sequence takes the same kernel, whether a key is appended in the call or stands in the cache already.
    const bool appends = p.cache.added == 1 && !p.cache.batch_invariant;
    if (tensor_cores && !appends) return false;
    if (p.cache.num_splits) return true;
    const int64_t units = int64_t(p.deciding_batch()) * p.nheads_k, cluster = decode_cluster_blocks(p, device);
    const int64_t columns = std::max(p.headdim, 64) + std::max(p.headdim_v, 64);  // a short row takes the time of 64 columns
    const int64_t bytes = int64_t(p.deciding_keys()) * columns * (p.dtype == DType::kFloat32 ? 4 : 2) / cluster;
    const bool two_blocks = units * cluster > device.multiprocessors;
    const bool half = p.dtype != DType::kFloat32 && !has_8bit_cache(p) && !appends && !p.cache.batch_invariant;
    const int64_t most = tensor_cores || half ? 64 : has_8bit_cache(p) && two_blocks ? 32 : rows > 4 ? 256 / rows : 128;
    // With clusters of two, in one round; above head dim 128, where others start late, in two.
    const bool few =
        units <= device.multiprocessors || (decode_bucket(p) == 256 && units <= 2 * device.multiprocessors && bytes <= 64 * 1024);
    return few && (!tensor_cores || rows <= 4) && bytes <= most * 1024;
}

// Whether decode_cluster_sm90 is faster than decode_ring_sm90 (H200): it is for short caches, because it needs one launch. With more than
// 256 keys per block, or 512 to head dim 64, the copy engine and work for the whole GPU gain more than that. With more units than clusters
// of two fit, the ring leaves most units whole and needs one launch, too. A batch_invariant call must make the same choice for every batch,
// large ones included.
inline bool decode_cluster_wins(const AttentionParams& p, const DeviceInfo& device) {
    const int64_t rows = rows_of_key_head(p);
    const int cluster = decode_cluster_blocks(p, device);
    if (rows == 1 && !has_8bit_cache(p)) return false;
    if (p.deciding_keys() > (decode_bucket(p) == 64 ? 512 : 256) * cluster) return false;
    const bool one_round = int64_t(p.deciding_batch()) * p.nheads_k <= device.multiprocessors;  // with clusters of two
    return p.cache.num_splits || (!p.cache.batch_invariant && (cluster >= 4 || one_round));
}

// decode_ring_sm90: keys per TMA box, in tiles of `keys` keys. Below 16 the pages are too small for boxes.
inline int ring_box_rows(const AttentionParams& p, int keys) { return p.cache.block_table ? int(std::gcd(p.cache.page_size, keys)) : keys; }

// decode_split_sm80 has tiles of 64 rows, except for 8-bit keys of head dim 256, where registers are too few.
constexpr bool decode_has_wide(size_t element_bytes, int bucket) { return element_bytes == 2 || bucket <= 128; }

inline int64_t decode_units(const DecodeShape& s, const AttentionParams& p) { return int64_t(p.batch) * p.nheads_k * s.row_tiles; }
// The most tiles of keys of a unit.
inline int64_t decode_tiles(const DecodeShape& s, const AttentionParams& p) {
    return p.seqlen_k ? (int64_t(p.seqlen_k - 1) >> s.tile_shift) + 1 : 1;
}
// Blocks that the GPU holds at a time.
inline int decode_resident(const DecodeShape& s, const AttentionParams& p, const DeviceInfo& device) {
    const bool two = s.kernel != DecodeKernel::kRing && s.kernel != DecodeKernel::kWide && (s.row_warps || decode_bucket(p) <= 128);
    return (two ? 2 : 1) * device.multiprocessors;
}
// Blocks of the grid, for kernels without clusters.
inline int64_t decode_blocks(const DecodeShape& s, const AttentionParams& p, const DeviceInfo& device) {
    const int64_t work = s.uniform ? decode_units(s, p) * s.pieces : s.pieces, most = decode_resident(s, p, device);
    return work < most ? work : most;
}
// Partial results in the workspace.
inline int64_t decode_slots(const DecodeShape& s, const AttentionParams& p) {
    return s.uniform ? decode_units(s, p) * s.pieces : 2 * int64_t(s.pieces);
}
// The keys that some row of the longest sequence may see under causal and window.
inline int64_t decode_span(const AttentionParams& p) {
    const int64_t keys = p.deciding_keys(), left = p.window_left, right = p.window_right;
    const int64_t end = p.top_left && right >= 0 ? std::min(keys, p.seqlen_q + right) : keys;
    return left < 0 ? end : std::min(end, left + p.seqlen_q + (right >= 0 ? right : end));
}

// Whether every unit is one piece, because its keys are too few to be worth a merge.
bool decode_units_stay_whole(const DecodeShape& s, const AttentionParams& p, const DeviceInfo& device);

// Floats of a row of a partial result: its O, and its lse or, of natural scores, its maximum and its sum.
inline int decode_row_floats(const AttentionParams& p) { return p.headdim_v + (decode_scores_are_natural(p) ? 2 : 1); }

inline DecodeShape decode_shape(DecodeKernel kernel, const AttentionParams& p, const DeviceInfo& device) {
    constexpr int kInvariantPieces = 16, kInvariantTiles = 4;  // batch_invariant: most pieces of a unit; least tiles of a piece
    const int rows = p.seqlen_q * p.group, bucket = decode_bucket(p), splits = p.cache.num_splits;
    DecodeShape s{};
    s.kernel = kernel;
    if (kernel == DecodeKernel::kCluster || kernel == DecodeKernel::kLanesCluster) s.cluster = decode_cluster_blocks(p, device);
    if (kernel == DecodeKernel::kLanes || kernel == DecodeKernel::kLanesCluster) {
        const int of_warp = rows == 1 ? 1 : 4, most = device.shared_memory < 128 * 1024 ? kLaneWarps / 2 : kLaneWarps;
        for (s.row_warps = 1; s.row_warps < most && s.row_warps * of_warp < rows;) s.row_warps *= 2;
        s.rows = of_warp * s.row_warps;
    } else {
        s.rows = kernel == DecodeKernel::kSplit && rows > 16 && decode_has_wide(has_8bit_cache(p) ? 1 : 2, bucket) ? 64 : 16;
    }
    s.row_tiles = (rows + s.rows - 1) / s.rows;
    s.tile_shift = kernel == DecodeKernel::kWide ? kWideTileShift : has_8bit_cache(p) || (bucket <= 64 && !s.row_warps) ? 7 : 6;
    const int64_t tiles = decode_tiles(s, p), line = tiles * decode_units(s, p);
    const bool whole = splits == 0 && decode_units_stay_whole(s, p, device);
    s.uniform = splits > 0 || p.cache.batch_invariant || whole;
    s.least_tiles = splits > 0 || whole ? 1 : kInvariantTiles;
    const int64_t most = s.uniform ? (splits > 0 ? splits : whole ? 1 : kInvariantPieces) : decode_resident(s, p, device);
    const int64_t work = s.uniform ? tiles : line;
    s.pieces = int(work < most ? work : most);
    s.combines = !s.cluster && tiles > 1 && s.pieces > 1;
    return s;
}

// All parameters except the workspace's pointers, `after_append` and the stages.
inline DecodeParams decode_params(const DecodeShape& shape, const AttentionParams& p) {
    DecodeParams d{};
    d.attention = p, d.shape = shape, d.scaled_by_key = is_scaled_by_key(p.cache);
    const int widest = p.seqlen_q + p.seqlen_k;
    int32_t &left = d.attention.window_left, &right = d.attention.window_right;
    left = left < widest ? left : widest, right = right < widest ? right : widest;
    d.scale_log2 = p.scale * kLog2e, d.softcap_log2 = p.softcap * kLog2e;
    d.page = divisor_of(p.cache.page_size > 0 ? p.cache.page_size : 1), d.group = divisor_of(p.group), d.units = divisor_of(d.heads());
    if (!shape.uniform && shape.pieces > 0) d.balance = balance_of(int(decode_units(shape, p)), shape.pieces);
    return d;
}

// Whether a window hides keys from the last rows.
inline bool decode_window_cuts(const AttentionParams& p) {
    return p.window_left >= 0 && int64_t(p.window_left) + p.seqlen_q < p.deciding_keys();
}
// Whether a call has options of its scores, which only some kernels take: what decode_reads_scores says, softcap, ALiBi, such a window.
inline bool decode_has_options(const AttentionParams& p) {
    return decode_reads_scores(p) || p.softcap != 0 || p.alibi_slopes || decode_window_cuts(p);
}

// Where decode_split_sm80 is faster than decode_ring_sm90 for 16-bit keys (H200): with a window that leaves half of
// the tiles or fewer; with few keys and
// more sequences and heads than multiprocessors; and where the rows of many keys are no whole lines of memory (head dim 96: 131 us instead
// of 184).
inline bool decode_split_beats_ring(const AttentionParams& p, const DeviceInfo& device) {
    const auto ragged = [&](int columns) {
        return (columns > 32 && columns < 64 && p.deciding_keys() >= 2048) || (columns > 80 && columns < 128 && p.deciding_keys() >= 8192);
    };
    if (has_8bit_cache(p)) return false;
    return 2 * decode_span(p) <= p.deciding_keys() || ragged(p.headdim) || ragged(p.headdim_v) ||
           (p.deciding_keys() <= 256 && int64_t(p.deciding_batch()) * p.nheads_k > device.multiprocessors);
}

// The time of decode_split_sm80 in microseconds (H200): launches, the first tile and the merge; then tiles of keys, which a block has one
// after another, or the bytes of K and V. Kernels that read nothing for a score start faster.
inline double decode_split_time(const AttentionParams& p, const DeviceInfo& device) {
    const bool reads = decode_reads_scores(p), wide = rows_of_key_head(p) > 16;
    const int bucket = decode_bucket(p), tile_keys = bucket == 64 ? 128 : 64;
    const int64_t row_tiles = wide ? (rows_of_key_head(p) + 63) / 64 : 1, span = decode_span(p);
    const double units = double(p.deciding_batch()) * p.nheads_k, resident = (bucket == 256 ? 1.0 : 2.0) * device.multiprocessors;
    const double rounds = units * double(row_tiles) * double((span + tile_keys - 1) / tile_keys) / resident;
    double tile = bucket == 64 ? (reads ? 6.0 : 4.0) : bucket == 128 ? (reads ? 6.0 : 3.7) : (reads ? 8.0 : 5.2);
    if (!wide) tile = bucket == 256 && reads ? 2.4 + 0.1 * double(rows_of_key_head(p)) : 2.0;
    const double bytes = units * double(span) * (p.headdim + p.headdim_v) * 2;
    const double start = span <= tile_keys ? 4 : wide ? 9 : reads ? 7 : span <= 2048 ? 4 : 6;
    return start + std::max((rounds > 1 ? rounds : 1) * tile, bytes / 4.3e6);
}
// The same of decode_lanes_sm80, float32: bound by its multiplications from a few rows on.
inline double decode_lanes_time(const AttentionParams& p) {
    const double bytes = double(p.deciding_batch()) * p.nheads_k * double(decode_span(p)) * (p.headdim + p.headdim_v) * 4;
    return (decode_span(p) <= 64 ? 4 : decode_scores_are_natural(p) ? 12 : 6) + (1 + double(rows_of_key_head(p)) / 16) * bytes / 3.8e6;
}
// The same of kernels whose blocks have 128 rows of one head and all their keys.
inline double whole_rows_time(const AttentionParams& p, const DeviceInfo& device) {
    const bool single = p.dtype == DType::kFloat32;
    const int bucket = decode_bucket(p);
    const int64_t blocks = (int64_t(p.seqlen_q) + 127) / 128 * p.nheads * p.deciding_batch(), span = decode_span(p);
    const int64_t rounds = (blocks + device.multiprocessors - 1) / device.multiprocessors;
    const double tile = (bucket == 64    ? 1.0
                         : bucket == 128 ? 1.45
                                         : 2.9) *
                        (decode_reads_scores(p) ? 1.6 : 1.0) * (single ? p.allow_tf32 ? 2.0 : 5.0 : 1.0);
    const double bytes = double(p.deciding_batch()) * p.nheads_k * double(span) * (p.headdim + p.headdim_v) * (single ? 4 : 2);
    return std::max(2 + double(rounds) * std::max(5.5, double(span) / 128 * tile + 1.5), bytes / (bucket == 64    ? 2.9e6
                                                                                                  : bucket == 128 ? 3.4e6
                                                                                                                  : 4e6));
}

// Whether the kernels of this folder are faster for a call than those whose blocks have all keys of their rows: a call with options of its
// scores (wgmma_split_sm90, which divides the keys, too, takes none), or one without a cache.
inline bool decode_wins(const AttentionParams& p, const DeviceInfo& device) {
    const int64_t rows = rows_of_key_head(p);
    const bool single = p.dtype == DType::kFloat32;
    if (single && rows > 32) return false;
    if (rows > 64 && (rows > 256 || decode_span(p) < 8192)) return false;  // products take longer than reads
    return (single ? decode_lanes_time(p) : decode_split_time(p, device)) < whole_rows_time(p, device);
}

cudaError_t decode_split_sm80(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream);
cudaError_t decode_split_8bit(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream);  // decode_split_sm80 for 8-bit caches
cudaError_t decode_split_options(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream);  // for decode_reads_scores
cudaError_t decode_wide_sm80(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream);
cudaError_t decode_ring_sm90(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream);
cudaError_t decode_cluster_sm90(const DecodeParams& d, cudaStream_t stream);
// decode_lanes_sm80 or, with a cluster, decode_lanes_cluster_sm90. With `append` the latter also does the work of kvcache_append.
cudaError_t decode_lanes(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream);
cudaError_t decode_lanes_8bit(const DecodeParams& d, cudaStream_t stream);
cudaError_t decode_lanes_options(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream);  // of natural scores
cudaError_t decode_lanes_16bit(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream);
// Merges the pieces that a kernel has left, with that many blocks at most.
cudaError_t decode_combine(const DecodeParams& d, int64_t most_blocks, const DeviceInfo& device, cudaStream_t stream);

}  // namespace fa
