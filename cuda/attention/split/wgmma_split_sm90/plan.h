// wgmma_split_sm90/plan.h: the tiles of wgmma_split_sm90, how a call is divided into work, and when that beats the other kernels.
//
// The query rows that share a key head form one matrix: packed row r is head r % group of query r / group. A block has 64 of them per
// consumer warpgroup, or a few less: a warpgroup's rows are whole queries, or whole parts of one query's heads (slab_rows).
//
//     row group   the rows of `team` blocks, which walk through the same keys at the same time: one block reads a tile from memory, the
//                 others find it in L2
//     unit        a row group and the keys that it sees
//     piece       some tiles of a unit. The units of a call form a line, which is divided evenly among the teams (common/schedule.h of
//                 the decode kernels)
#pragma once

#include <algorithm>

#include "attention/decode/common/decode.h"
#include "attention/forward/wgmma_sm90/plan.h"

namespace fa {

enum class SplitTile { kD64Rows64, kD64Rows128, kD128Rows64, kD128Rows128, kD128Rows192, kD256Rows64, kD256Rows128 };

// Plan ids after those of wgmma_sm90, whose consumer loop runs here.
constexpr WgmmaPlanId split_id(SplitTile tile) { return WgmmaPlanId(64 + int(tile)); }

// Plans of 64 rows are bound by memory: shared memory is full of tiles in flight, and Q's buffer is free for the next item at once. Plans
// of 128 rows are those of wgmma_sm90 for long sequences; head dim 64 takes the one for short sequences, because the speculative path
// spills.
FA_HOST_DEVICE constexpr WgmmaPlan split_plan(SplitTile tile) {
    WgmmaPlan plan;
    plan.paged = false, plan.pieces = true;  // pages are loaded only as boxes
    plan.producer = 72;                      // the producer walks along the line of pieces
    switch (tile) {
        case SplitTile::kD64Rows64:
            plan.headdim = plan.headdim_v = 64, plan.warpgroups = 1, plan.stages = 6, plan.q_in_registers = true;
            break;
        case SplitTile::kD64Rows128: plan.headdim = plan.headdim_v = 64, plan.stages = 6, plan.q_in_registers = true; break;
        case SplitTile::kD128Rows64:
            plan.headdim = plan.headdim_v = 128, plan.block_n = 64, plan.warpgroups = 1, plan.stages = 6, plan.q_in_registers = true;
            break;
        case SplitTile::kD128Rows128: plan.headdim = plan.headdim_v = 128, plan.stages = 3, plan.maximum = RowMaximum::kSpeculative; break;
        // 64 keys, not the 80 of kD128Long: a tile of the line has a power of two of keys (tile_shift).
        case SplitTile::kD128Rows192:
            plan.headdim = plan.headdim_v = 128, plan.block_n = 64, plan.warpgroups = 3, plan.stages = 5, plan.ping_pong = true;
            plan.maximum = RowMaximum::kSpeculativeUnmasked, plan.producer = 56;
            break;
        case SplitTile::kD256Rows64: plan.headdim = plan.headdim_v = 256, plan.block_n = 64, plan.warpgroups = 1, plan.stages = 3; break;
        case SplitTile::kD256Rows128:
            plan.headdim = plan.headdim_v = 256, plan.block_n = 64, plan.ping_pong = true, plan.producer = 56;
            break;
    }
    return plan;
}
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD64Rows64)> = split_plan(SplitTile::kD64Rows64);
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD64Rows128)> = split_plan(SplitTile::kD64Rows128);
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD128Rows64)> = split_plan(SplitTile::kD128Rows64);
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD128Rows128)> = split_plan(SplitTile::kD128Rows128);
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD128Rows192)> = split_plan(SplitTile::kD128Rows192);
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD256Rows64)> = split_plan(SplitTile::kD256Rows64);
template <>
inline constexpr WgmmaPlan kWgmmaPlan<split_id(SplitTile::kD256Rows128)> = split_plan(SplitTile::kD256Rows128);

// Packed rows of a warpgroup: as many whole queries as fit in 64 rows, or the largest divisor of a query's heads up to 64.
inline int split_slab_rows(int group) {
    if (group <= 64) return 64 / group * group;
    int rows = 64;
    while (group % rows) --rows;
    return rows;
}

// ---- times on an H200, in microseconds ----

constexpr double kMemoryRate = 4.2e6, kL2Rate = 6.5e6;  // bytes per microsecond
// Time of one tile of keys in a block, products and softmax, once its keys have arrived.
constexpr double split_tile_time(SplitTile tile) {
    constexpr double kTimes[] = {0.52, 0.99, 0.46, 1.45, 1.15, 0.86, 1.46};
    return kTimes[int(tile)];
}
// Keys that a row sees on average.
inline double visible_keys_on_average(const AttentionParams& p) {
    const int32_t keys = p.deciding_keys();
    if (p.window_right < 0 || keys <= p.seqlen_q) return keys;
    return p.top_left ? double(p.seqlen_q) / 2 + p.window_right : keys - double(p.seqlen_q) / 2;
}
inline double key_bytes(const AttentionParams& p) { return 2.0 * (p.headdim + p.headdim_v); }  // K and V of a key

// ---- how the work is divided ----

struct SplitShape {
    SplitTile tile;
    int slab_rows, team;
    DecodeShape work;  // `rows` are those of a row group; `pieces` are distributed over teams
    double time;
};

inline SplitShape split_shape(const AttentionParams& p, const DeviceInfo& device) {
    constexpr int kInvariantPieces = 16, kInvariantTiles = 4;  // batch_invariant: most pieces of a unit; least tiles of a piece
    const int bucket = decode_bucket(p), wanted = p.cache.num_splits;
    const int64_t rows = rows_of_key_head(p), heads = int64_t(p.deciding_batch()) * p.nheads_k;
    const SplitTile narrow = bucket == 64    ? SplitTile::kD64Rows64
                             : bucket == 128 ? SplitTile::kD128Rows64
                                             : SplitTile::kD256Rows64,
                    wide = bucket == 64    ? SplitTile::kD64Rows128
                           : bucket == 128 ? SplitTile::kD128Rows192
                                           : SplitTile::kD256Rows128;
    const bool uniform = wanted > 0 || p.cache.batch_invariant;
    SplitShape best{};
    best.slab_rows = split_slab_rows(p.group);
    best.time = -1;
    for (SplitTile tile = narrow; tile <= wide; tile = SplitTile(int(tile) + 1)) {
        const WgmmaPlan plan = split_plan(tile);
        const int block_rows = plan.warpgroups * best.slab_rows;
        const int64_t blocks = std::max<int64_t>(1, (rows + block_rows - 1) / block_rows);
        const double tiles = visible_keys_on_average(p) / plan.block_n, bytes = key_bytes(p) * plan.block_n;
        int team = int(blocks < device.multiprocessors ? blocks : device.multiprocessors);
        while (team > 0) {
            const int64_t units = heads * ((blocks + team - 1) / team);
            const int teams = device.multiprocessors / team;
            double steps = units * tiles / teams;  // tiles of the longest team
            if (uniform) {
                const double pieces = wanted > 0 ? wanted : kInvariantPieces;
                steps = double(int64_t((units * pieces + teams - 1) / teams)) * (tiles / pieces);
            }
            if (steps < 1) steps = 1;
            const double busy = units * tiles < teams ? units * tiles : teams;
            const double memory = busy * bytes / kMemoryRate, l2 = busy * team * bytes / kL2Rate;
            const double time = steps * std::max(split_tile_time(tile), std::max(memory, l2));
            // Smaller teams read keys more often, which costs energy: they must be 2 % faster.
            if (best.time < 0 || time < 0.98 * best.time) best.time = time, best.tile = tile, best.team = team;
            team = team > 8 ? 8 : team - 1;
        }
    }
    const WgmmaPlan plan = split_plan(best.tile);
    DecodeShape& s = best.work;
    s.rows = best.team * plan.warpgroups * best.slab_rows;
    s.row_tiles = int((rows + s.rows - 1) / s.rows);
    while ((1 << s.tile_shift) < plan.block_n) ++s.tile_shift;
    s.uniform = uniform;
    s.least_tiles = wanted > 0 ? 1 : kInvariantTiles;
    const int64_t tiles = decode_tiles(s, p), line = tiles * decode_units(s, p);
    const int64_t most = uniform ? (wanted > 0 ? wanted : kInvariantPieces) : device.multiprocessors / best.team;
    const int64_t work = uniform ? tiles : line;
    s.pieces = int(work < most ? work : most);
    s.combines = tiles > 1 && s.pieces > 1;
    return best;
}

// Teams of the grid.
inline int64_t split_teams(const SplitShape& shape, const AttentionParams& p, const DeviceInfo& device) {
    if (!shape.work.uniform) return shape.work.pieces;
    return std::min<int64_t>(device.multiprocessors / shape.team, decode_units(shape.work, p) * shape.work.pieces);
}

// ---- when this kernel is chosen ----

// The time of wgmma_sm90, whose blocks have all keys of their rows.
inline double wgmma_time(const AttentionParams& p, const DeviceInfo& device) {
    const int bucket = decode_bucket(p);
    const SplitTile tile = bucket == 64 ? SplitTile::kD64Rows128 : bucket == 128 ? SplitTile::kD128Rows128 : SplitTile::kD256Rows128;
    const double tiles = visible_keys_on_average(p) / split_plan(tile).block_n;
    const auto of_rows = [&](int rows) {
        const int64_t blocks = (int64_t(p.seqlen_q) + rows - 1) / rows * p.deciding_batch() * p.nheads;
        return double((blocks + device.multiprocessors - 1) / device.multiprocessors) * rows / 128 * tiles * split_tile_time(tile);
    };
    return bucket == 256 ? of_rows(128) : std::min(of_rows(128), of_rows(192));
}

// Whether this kernel is the fastest of those that serve the call.
inline bool split_wins(const AttentionParams& p, const DeviceInfo& device) {
    constexpr double kOverhead = 10, kWgmmaOverhead = 6, kDecodeOverhead = 12;  // launch, first tile, merge; measured
    constexpr double kDecodeRate = 2.8e6;                                       // decode_split_sm80 with 17 to 64 rows; measured
    if (p.tree.rows) return true;  // the other kernels with trees give a block all keys of its rows
    const int64_t rows = rows_of_key_head(p);
    // Above head dim 128 a tile of decode_split_sm80 takes as long as reading its keys: 8 x 4096, 64/32 heads, head dim 192: 207 -> 194 us.
    if (!p.cache.batch_invariant && rows > 1 && rows <= 16 && decode_bucket(p) == 256 && p.seqlen_k >= 512 &&
        int64_t(p.batch) * p.nheads_k >= 16 && !decode_lanes_cluster_wins(p, device))
        return true;
    // Packed rows of a group may be half of what blocks of 128 rows of one head have: 64 x 20 over 499 keys, 28/4 heads: 82 -> 38 us.
    const auto whole = [](int64_t rows, int64_t of) { return (rows + of - 1) / of * of; };
    const bool packs = !p.cu_seqlens_q && p.group > 1 && rows > 16 && whole(p.seqlen_q, 128) * p.group >= 2 * whole(rows, 64) &&
                       int64_t(p.deciding_batch()) * p.nheads > device.multiprocessors;
    if (p.deciding_keys() < (packs ? 256 : 1024)) return false;
    // decode_ring_sm90 reads long caches at the speed of memory, but is slow to start.
    if (rows <= 16) return rows > 8 && int64_t(p.deciding_batch()) * p.nheads_k * p.deciding_keys() < 65536;
    if (p.window_right >= 0 && p.deciding_keys() < 4 * int64_t(p.seqlen_q)) return false;  // rows see very different numbers of keys
    const int64_t full_blocks = int64_t(p.seqlen_q / 128) * p.nheads * p.deciding_batch();
    if (full_blocks > 4 * device.multiprocessors) return false;
    const double wgmma = kWgmmaOverhead + wgmma_time(p, device);
    const double keys = double(p.deciding_batch()) * p.nheads_k * visible_keys_on_average(p),
                 decode = rows <= 64 && (p.cache.entries || p.seqlen_q <= 16) ? kDecodeOverhead + keys * key_bytes(p) / kDecodeRate : wgmma;
    return split_shape(p, device).time + kOverhead < 0.85 * std::min(decode, wgmma);
}

}  // namespace fa
