// decode.h: the plan of a decode call on the host, and the launches it may consist of.
#pragma once

#include "attention/decode_schedule.h"
#include "attention/kernels.h"

#include <numeric>

namespace fa {

inline int decode_bucket(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    return d <= 64 ? 64 : d <= 128 ? 128 : 256;
}

inline bool decode_bytes(const AttentionParams& p) { return p.cache.entries && p.cache.dtype != p.dtype; }

constexpr int kLaneWarps = 8;  // of a block of decode_lanes.cuh, which has 1 or 4 rows a warp

// Blocks of a cluster for each of so many units: two on a multiprocessor at most, as clusters cannot use all of them evenly. 0: the call
// wants another number of pieces than a cluster can have blocks.
inline int decode_cluster_blocks(const AttentionParams& p, const DecodeDevice& device) {
    const int most = device.multiprocessors >= 128 ? 16 : 8;  // more than 8 blocks want a GPC of the full GPU
    if (const int wanted = p.cache.num_splits) return wanted > 1 && wanted <= most && !(wanted & (wanted - 1)) ? wanted : 0;
    const int64_t units = int64_t(p.deciding_batch()) * p.nheads_k;
    int cluster = 2;
    while (cluster < 8 && units * cluster * 2 <= 2 * device.multiprocessors) cluster *= 2;
    return most > 8 && units * most <= device.multiprocessors ? most : cluster;
}

// decode_lanes_cluster_sm90: measured on an H200, by the keys and values of a block, clusters are faster than pieces with one row up to
// 128 KB; with up to four rows in 16 bits, which tensor cores multiply faster, up to 64 KB where a key is appended, a launch less.
inline bool decode_lanes_cluster_wins(const AttentionParams& p, const DecodeDevice& device) {
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    const bool tensor_cores = rows > 1 && p.dtype != DType::kFloat32;
    if (tensor_cores && p.cache.added != 1) return false;
    if (p.cache.num_splits) return true;
    const int64_t bytes =
        int64_t(p.seqlen_k) * (p.headdim + p.headdim_v) * (p.dtype == DType::kFloat32 ? 4 : 2) / decode_cluster_blocks(p, device);
    const bool one_round = int64_t(p.deciding_batch()) * p.nheads_k <= device.multiprocessors;  // of clusters of two
    return one_round && (!tensor_cores || rows <= 4) && bytes <= (tensor_cores ? 64 : 128) * 1024;
}

// decode_cluster_sm90: measured on an H200, with more than 256 keys of a block the copy engine, and work for all of the GPU, win more than
// one launch less does. Of more units than clusters of four have room for most are left whole, in one launch. A batch_invariant call would
// choose the same for batches too large for it.
inline bool decode_cluster_wins(const AttentionParams& p, const DecodeDevice& device) {
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    const int cluster = decode_cluster_blocks(p, device);
    if (rows == 1 && !decode_bytes(p)) return false;
    if (p.seqlen_k > 256 * cluster) return false;
    return p.cache.num_splits || (!p.cache.batch_invariant && cluster >= 4);
}

// decode_ring_sm90: keys of a box of the copy engine, for tiles of so many; pages of no multiple of 16 keys have none.
inline int ring_box_rows(const AttentionParams& p, int keys) { return p.cache.block_table ? int(std::gcd(p.cache.page_size, keys)) : keys; }

// 64 rows of 8-bit keys of head dim 256 want more registers than there are.
constexpr bool decode_has_wide(size_t element_bytes, int bucket) { return element_bytes == 2 || bucket <= 128; }

// Of a unit at most.
inline int64_t decode_tiles(const AttentionParams& p, int tile_shift) {
    return p.seqlen_k ? (int64_t(p.seqlen_k - 1) >> tile_shift) + 1 : 1;
}

// Blocks that the GPU holds at a time.
inline int decode_resident(const DecodeParams& d, const DecodeDevice& device) {
    const bool two = d.kernel != DecodeKernel::kRing && (d.row_warps || decode_bucket(d.attention) <= 128);
    return (two ? 2 : 1) * device.multiprocessors;
}

inline int64_t decode_units(const DecodeParams& d) { return int64_t(d.attention.batch) * d.heads(); }

// Everything but the workspace's pointers and the stages.
inline DecodeParams decode_plan(DecodeKernel kernel, const AttentionParams& p, const DecodeDevice& device) {
    constexpr int kInvariantPieces = 16, kInvariantTiles = 4;  // of a unit at most; of a piece at least
    DecodeParams d{};
    d.attention = p;
    const int rows = p.seqlen_q * p.group, bucket = decode_bucket(p);
    d.kernel = kernel;
    if (kernel == DecodeKernel::kCluster || kernel == DecodeKernel::kLanesCluster) d.cluster = decode_cluster_blocks(p, device);
    if (kernel == DecodeKernel::kLanes || kernel == DecodeKernel::kLanesCluster) {
        const int of_warp = rows == 1 ? 1 : 4, most = device.shared_memory < 128 * 1024 ? kLaneWarps / 2 : kLaneWarps;
        for (d.row_warps = 1; d.row_warps < most && d.row_warps * of_warp < rows;) d.row_warps *= 2;
        d.rows = of_warp * d.row_warps;
    } else {
        d.rows = kernel == DecodeKernel::kSplit && rows > 16 && decode_has_wide(decode_bytes(p) ? 1 : 2, bucket) ? 64 : 16;
    }
    d.row_tiles = (rows + d.rows - 1) / d.rows;
    d.tile_shift = decode_bytes(p) || (bucket <= 64 && !d.row_warps) ? 7 : 6;
    const int widest = p.seqlen_q + p.seqlen_k;
    int32_t &left = d.attention.window_left, &right = d.attention.window_right;
    left = left < widest ? left : widest, right = right < widest ? right : widest;
    const int blocks = decode_resident(d, device);
    const int64_t tiles = decode_tiles(p, d.tile_shift);
    const int64_t line = tiles * d.heads() * p.batch;
    d.uniform = p.cache.num_splits > 0 || p.cache.batch_invariant;
    d.least_tiles = p.cache.num_splits > 0 ? 1 : kInvariantTiles;
    const int most = p.cache.num_splits > 0 ? p.cache.num_splits : kInvariantPieces;
    d.pieces = !d.uniform ? int(line < blocks ? line : blocks) : int(most < tiles ? most : tiles);
    const int heads = d.heads() > 0 ? d.heads() : 1;  // a call without rows is planned too, though never launched
    d.page = divisor_of(p.cache.page_size > 0 ? p.cache.page_size : 1), d.group = divisor_of(p.group), d.units = divisor_of(heads);
    if (!d.uniform && line > 0) d.balance = balance_of(int(decode_units(d)), d.pieces);
    d.combines = !d.cluster && tiles > 1 && d.pieces > 1;
    return d;
}

inline int64_t decode_slots(const DecodeParams& d) { return d.uniform ? decode_units(d) * d.pieces : 2 * int64_t(d.pieces); }
inline int64_t decode_blocks(const DecodeParams& d, const DecodeDevice& device) {
    const int64_t work = d.uniform ? decode_units(d) * d.pieces : d.pieces, most = decode_resident(d, device);
    return work < most ? work : most;
}

cudaError_t decode_split_sm80(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_split_8bit(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);  // its 8-bit caches
cudaError_t decode_ring_sm90(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_cluster_sm90(const DecodeParams& d, cudaStream_t stream);
// decode_lanes_sm80, and with d.cluster decode_lanes_cluster_sm90. With `append` the latter does what kvcache_append would have done.
cudaError_t decode_lanes(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_lanes_16bit(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_combine(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);  // behind any of them

}  // namespace fa
