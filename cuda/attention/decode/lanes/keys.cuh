// lanes/keys.cuh: which keys a block of lanes/kernel.cuh attends to, and how it loads them into shared memory.
#pragma once

#include "attention/decode/lanes/plan.cuh"
#include "device/mma.cuh"

namespace fa {
namespace {

// A unit: a tile of rows of one key head of one sequence.
struct LaneUnit {
    int b, head_k, row0;
};

// The keys of a unit; the block's share of them is [own_begin, own_end) of the cache.
struct LaneKeys : VisibleKeys {
    int before;  // keys in the cache before those of the call; below 0: an idle sequence
    int own_begin, own_end;
};
__device__ __forceinline__ int lane_keys_before(const LaneParams& p, int b) { return p.seqlens ? p.seqlens[b] : p.seqlen_k - p.added; }
__device__ __forceinline__ int lane_key_count(const LaneParams& p, int before) {
    return before < 0 ? 0 : min(before, p.seqlen_k - p.added) + p.added;
}
__device__ __forceinline__ LaneKeys lane_keys(const LaneParams& p, int before) {
    LaneKeys keys;
    keys.before = before;
    static_cast<VisibleKeys&>(keys) = visible_keys(p, lane_key_count(p, before));
    return keys;
}

// The entry of a contiguous cache, not range-checked yet; 0 for pages.
__device__ __forceinline__ int lane_entry(const LaneParams& p, int b) {
    return !p.entries ? b : p.block_table ? 0 : p.batch_idx ? p.batch_idx[b] : b;
}

// The key that joins the cache.
struct AddedKey {
    bool here;       // this block appends it and attends to it
    int entry, row;  // its place in the cache
};

// Divides the keys into equal pieces, one for each block of a cluster. The last block also gets the key that joins the cache.
template <typename Plan>
__device__ __forceinline__ AddedKey cut_for_cluster(const LaneParams& p, int b, int entry, int rank, LaneKeys& keys) {
    AddedKey added{false, entry, keys.before};
    int cached = keys.end;
    if (p.appends && keys.before >= 0 && keys.before <= p.seqlen_k - 1) {
        if (p.block_table) {
            const int page = p.page.divide(keys.before);
            added.entry = p.block_table[b * p.table_row + page], added.row = p.page.remainder(keys.before, page);
        }
        if (unsigned(added.entry) < unsigned(p.entries)) cached = min(keys.end, keys.before), added.here = rank == (1 << p.cluster_log) - 1;
    }
    const int log = p.key_warps_log + p.cluster_log;
    const int passes = (max(cached - keys.begin, 0) + (Plan::kKeys << log) - 1) / Plan::kKeys >> log;  // passes of every warp
    keys.own_begin = keys.begin + ((rank * passes) << p.key_warps_log) * Plan::kKeys;
    keys.own_end = min(keys.own_begin + (passes << p.key_warps_log) * Plan::kKeys, cached);
    return added;
}

// A segment of the schedule is a number of whole tiles.
__device__ __forceinline__ void cut_to_segment(int tile_shift, const Segment& segment, LaneKeys& keys) {
    const int first_tile = keys.begin >> tile_shift;
    keys.own_begin = max((first_tile + segment.begin) << tile_shift, keys.begin);
    keys.own_end = min((first_tile + segment.end) << tile_shift, keys.end);
}

// A lane copies the columns of K and V that it will use to its own places in the ring. No other thread reads them, so none waits.
template <typename Plan>
struct LaneCopies {
    using E = typename Plan::E;
    const E *k, *v;              // row 0 of the key head, this lane's first column
    int b, key0, key_step, end;  // this lane's first key, the step to the next pass, the end of the block's keys
    int page[Plan::kAtOnce];     // pages of the group that is copied next

    __device__ __forceinline__ LaneCopies(const LaneParams& p, const LanePlace<Plan>& place, const LaneUnit& unit, const LaneKeys& keys,
                                          int entry)
        : b(unit.b), key0(keys.own_begin + place.key0), key_step(place.key_step), end(keys.own_end), page{} {
        const int entry_read = p.entries ? clamp_to(entry, 0, p.entries - 1) : b;
        k = static_cast<const E*>(p.k.data) + entry_read * p.k.batch + unit.head_k * p.k.head + place.column;
        v = static_cast<const E*>(p.v.data) + entry_read * p.v.batch + unit.head_k * p.v.head + place.column;
    }
    // This lane's key in pass i of group g.
    __device__ __forceinline__ int key(int g, int i) const { return key0 + (g * Plan::kAtOnce + i) * key_step; }

    __device__ __forceinline__ void find_pages(const LaneParams& p, int g) {
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i)
            if (const int own = key(g, i); p.block_table && own < end)
                page[i] = clamp_to(p.block_table[b * p.table_row + p.page.divide(own)], 0, p.entries - 1);
    }
    // Copies group g to `to`, this thread's place in a slot of the ring.
    __device__ __forceinline__ void copy(const LaneParams& p, int column, int g, uint32_t to) {
#pragma unroll
        for (int i = 0; i < Plan::kAtOnce; ++i) {
            const int own = key(g, i), row = p.block_table ? p.page.remainder(own, p.page.divide(own)) : own;
            const E* const from_k = k + (page[i] * p.k.batch + row * p.k.row);
            const E* const from_v = v + (page[i] * p.v.batch + row * p.v.row);
#pragma unroll
            for (int x = 0; x < Plan::kParts; ++x) {
                const int c = x * Plan::kPartColumns;
                const bool is_k = own < end && column + c < p.headdim, is_v = own < end && column + c < p.headdim_v;
                cp_async_16(to + ((i * 2 + 0) * Plan::kParts + x) * Plan::kPartBytes, is_k ? from_k + c : k, is_k ? 16 : 0);
                cp_async_16(to + ((i * 2 + 1) * Plan::kParts + x) * Plan::kPartBytes, is_v ? from_v + c : v, is_v ? 16 : 0);
            }
        }
        find_pages(p, g + 1);
    }
};

}  // namespace
}  // namespace fa
