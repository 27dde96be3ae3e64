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

// Blocks of a cluster for each of so many units: two on a multiprocessor at most, as clusters cannot use all of them evenly.
inline int decode_cluster_blocks(const AttentionParams& p, const DecodeDevice& device) {
    const int most = device.multiprocessors >= 128 ? 16 : 8;  // more than 8 blocks want a GPC of the full GPU
    if (const int wanted = p.cache.num_splits) return wanted <= most && !(wanted & (wanted - 1)) ? wanted : 0;
    const int64_t units = int64_t(p.deciding_batch()) * p.nheads_k;
    int cluster = 1;
    while (cluster < 8 && units * cluster * 2 <= 2 * device.multiprocessors) cluster *= 2;
    return most > 8 && units * most <= device.multiprocessors ? most : cluster;
}

// decode_lanes.cuh: blocks for each key head whose results meet in shared memory; 0: the keys are cut by the schedule, and partial results
// merged. Measured on an H200, by the keys and values of a block: clusters are faster with one row up to 128 KB; with up to four rows in
// 16 bits, which tensor cores multiply faster, up to 64 KB where a key is appended, a launch less.
inline int decode_cluster(const AttentionParams& p, const DecodeDevice& device) {
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    const bool tensor_cores = rows > 1 && p.dtype != DType::kFloat32;
    if (device.compute < 90 || decode_bytes(p) || rows > 4 * kLaneWarps || (tensor_cores && p.cache.added != 1)) return 0;
    const int cluster = decode_cluster_blocks(p, device);
    if (p.cache.num_splits) return cluster;
    const int64_t bytes = int64_t(p.seqlen_k) * (p.headdim + p.headdim_v) * (p.dtype == DType::kFloat32 ? 4 : 2) / cluster;
    return cluster > 1 && (!tensor_cores || rows <= 4) && bytes <= (tensor_cores ? 64 : 128) * 1024 ? cluster : 0;
}

// decode_cluster_sm90.cuh, the same on tensor cores. Measured on an H200: with more than 256 keys of a block the copy engine, and work for
// all of the GPU, win more than one launch less does. Of more units than clusters of four have room for most are left whole, in one launch.
inline int decode_tensor_cluster(const AttentionParams& p, const DecodeDevice& device) {
#if FA_WITH_WGMMA_SM90
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    const bool bytes = decode_bytes(p);
    if (device.compute != 90 || p.dtype == DType::kFloat32 || rows < (bytes ? 1 : 2) || rows > 16) return 0;
    if (decode_bucket(p) > 128 || (bytes && decode_bucket(p) < 128)) return 0;
    if (decode_cluster(p, device)) return 0;                       // which appends, too
    if (p.cache.batch_invariant && !p.cache.num_splits) return 0;  // the choice would be the same for batches too large for it
    const int cluster = decode_cluster_blocks(p, device);
    return (cluster >= 4 || p.cache.num_splits) && p.seqlen_k <= 256 * cluster ? cluster : 0;
#else
    (void)p, (void)device;
    return 0;
#endif
}

// decode_ring_sm90.cuh: keys of a box of the copy engine, for tiles of so many; pages of no multiple of 16 keys have none.
inline int ring_box_rows(const AttentionParams& p, int keys) { return p.cache.block_table ? int(std::gcd(p.cache.page_size, keys)) : keys; }
inline bool decode_rings(const AttentionParams& p, const DecodeDevice& device) {
#if FA_WITH_WGMMA_SM90
    const auto has_strides = [](const TensorView& t) { return t.row > 0 && t.head > 0 && t.batch > 0; };
    return device.compute == 90 && p.dtype != DType::kFloat32 && int64_t(p.seqlen_q) * p.group <= 16 && p.seqlen_k > 0 &&
           (decode_bytes(p) ? decode_bucket(p) == 128 : decode_bucket(p) <= 128) && ring_box_rows(p, 64) >= 16 && has_strides(p.k) &&
           has_strides(p.v);
#else
    (void)p, (void)device;
    return false;
#endif
}

// 64 rows of 8-bit keys of head dim 256 want more registers than there are.
constexpr bool decode_has_wide(size_t element_bytes, int bucket) { return element_bytes == 2 || bucket <= 128; }

// Of a unit at most.
inline int64_t decode_tiles(const AttentionParams& p, int tile_shift) {
    return p.seqlen_k ? (int64_t(p.seqlen_k - 1) >> tile_shift) + 1 : 1;
}

// Blocks that the GPU holds at a time.
inline int decode_resident(const DecodeParams& d, const DecodeDevice& device) {
    return (!d.ring && (d.row_warps || decode_bucket(d.attention) <= 128) ? 2 : 1) * device.multiprocessors;
}

inline int64_t decode_units(const DecodeParams& d) { return int64_t(d.attention.batch) * d.heads(); }

// Everything but the workspace's pointers and the stages.
inline DecodeParams decode_plan(const AttentionParams& p, const DecodeDevice& device) {
    constexpr int kInvariantPieces = 16, kInvariantTiles = 4;  // of a unit at most; of a piece at least
    DecodeParams d{};
    d.attention = p;
    const int rows = p.seqlen_q * p.group, bucket = decode_bucket(p);
    d.cluster = decode_tensor_cluster(p, device), d.tensor_cores = d.cluster > 0;
    if (!d.cluster) d.cluster = decode_cluster(p, device);
    if (!d.tensor_cores && (d.cluster || p.dtype == DType::kFloat32)) {
        const int of_warp = rows == 1 ? 1 : 4, most = device.shared_memory < 128 * 1024 ? kLaneWarps / 2 : kLaneWarps;
        for (d.row_warps = 1; d.row_warps < most && d.row_warps * of_warp < rows;) d.row_warps *= 2;
        d.rows = of_warp * d.row_warps;
    } else {
        d.rows = rows > 16 && decode_has_wide(decode_bytes(p) ? 1 : 2, bucket) ? 64 : 16;
    }
    d.ring = !d.row_warps && !d.cluster && decode_rings(p, device);
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

// With `append`, for which there is a cluster, the kernel does what kvcache_append would have done.
cudaError_t decode_lanes(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_lanes_16bit(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_cluster_sm90(const DecodeParams& d, cudaStream_t stream);
cudaError_t decode_ring(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_split_8bit(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_combine(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);

}  // namespace fa
