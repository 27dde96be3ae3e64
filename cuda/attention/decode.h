// decode.h: the plan of a decode call on the host, and the two launches it consists of.
#pragma once

#include "attention/decode_schedule.h"
#include "attention/kernels.h"

namespace fa {

inline int decode_bucket(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    return d <= 64 ? 64 : d <= 128 ? 128 : 256;
}

inline bool decode_bytes(const AttentionParams& p) { return p.cache.entries && p.cache.dtype != p.dtype; }

// 64 rows of 8-bit keys of head dim 256 want more registers than there are.
constexpr bool decode_has_wide(size_t element_bytes, int bucket) { return element_bytes == 2 || bucket <= 128; }

// Of a unit at most.
inline int64_t decode_tiles(const AttentionParams& p, int tile_shift) {
    return p.seqlen_k ? (int64_t(p.seqlen_k - 1) >> tile_shift) + 1 : 1;
}

// Everything but the workspace's pointers and the stages.
inline DecodeParams decode_plan(const AttentionParams& p, const DecodeDevice& device) {
    constexpr int kInvariantPieces = 16, kInvariantTiles = 4;  // of a unit at most; of a piece at least
    DecodeParams d{};
    d.attention = p;
    const int rows = p.seqlen_q * p.group, bucket = decode_bucket(p);
    d.rows = rows > 16 && decode_has_wide(decode_bytes(p) ? 1 : 2, bucket) ? 64 : 16;
    d.row_tiles = (rows + d.rows - 1) / d.rows;
    d.tile_shift = decode_bytes(p) || bucket <= 64 ? 7 : 6;
    const int widest = p.seqlen_q + p.seqlen_k;
    int32_t &left = d.attention.window_left, &right = d.attention.window_right;
    left = left < widest ? left : widest, right = right < widest ? right : widest;
    const int blocks = (bucket <= 128 ? 2 : 1) * device.multiprocessors;
    const int64_t tiles = decode_tiles(p, d.tile_shift);
    const int64_t line = tiles * d.heads() * p.batch;
    d.uniform = p.cache.num_splits > 0 || p.cache.batch_invariant;
    d.least_tiles = p.cache.num_splits > 0 ? 1 : kInvariantTiles;
    const int most = p.cache.num_splits > 0 ? p.cache.num_splits : kInvariantPieces;
    d.pieces = !d.uniform ? int(line < blocks ? line : blocks) : int(most < tiles ? most : tiles);
    d.combines = tiles > 1 && d.pieces > 1;
    return d;
}

inline int64_t decode_units(const DecodeParams& d) { return int64_t(d.attention.batch) * d.heads(); }
inline int64_t decode_slots(const DecodeParams& d) { return d.uniform ? decode_units(d) * d.pieces : 2 * int64_t(d.pieces); }
inline int64_t decode_blocks(const DecodeParams& d, const DecodeDevice& device) {
    const int64_t most = (decode_bucket(d.attention) <= 128 ? 2 : 1) * int64_t(device.multiprocessors);
    const int64_t work = d.uniform ? decode_units(d) * d.pieces : d.pieces;
    return work < most ? work : most;
}

cudaError_t decode_split_8bit(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);
cudaError_t decode_combine(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream);

}  // namespace fa
