// wgmma_sm90/block.cuh: the shared memory of a block of wgmma_sm90, and the barriers between its roles.
#pragma once

#include <type_traits>

#include "attention/common/interval_bounds.cuh"
#include "attention/common/seen_blocks.h"
#include "attention/common/softcap.h"
#include "attention/common/tile_intervals.h"
#include "attention/forward/common/roles_sm90.cuh"
#include "attention/forward/common/work_list.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/ring.cuh"
#include "device/wgmma.cuh"

namespace fa {

struct WgmmaSchedule {
    ForwardWorkList list;
    int q_loads, k_loads, v_loads;  // boxes of a tile
    int page_boxes;                 // paged cache whose pages are not whole tiles: rows of a box, several of which make a tile; else 0
    bool page_copies;               // the same without a common divisor of 8 rows or more: rows are copied one by one
    float cap_inverse;              // plans with options: softmax_scale / softcap
    IntervalBounds bounds, groups;  // plans for intervals: of each tile of keys, and of groups of tiles
    CappedExponent capped;          // plans with options, beside softcap
};

// The work item that consumers read. wgmma_split_sm90 specialises it for its ids, where an item has only some of a row's keys.
template <WgmmaPlanId kId>
struct WgmmaItem {
    using Type = ForwardWork;
};

// Plans with options: the warps of the producer that zero rows of V. Before them come the finder and the loader (key_tiles.cuh).
constexpr int kFirstZeroingWarp = 2, kZeroingWarps = 2;

// Plans with options: what the finder tells the other roles about a tile of keys.
struct alignas(16) KeyTile {
    // The keys that the mask hides. Bit 2 i + e of word q: key 8 i + 2 q + e. A lane with quad q has it in elements 4 i + e, 4 i + 2 + e.
    uint32_t hidden[4];
    int place;      // n: tile n of the sequence; ~n: the same, and the last one of its item
    int cut;        // whether the mask hides any of its keys
    uint32_t work;  // plans with a bias: shared address of the item, for the warps that zero values

    __device__ __forceinline__ bool zeroes_values() const { return cut; }
};
constexpr int kNoTile = -1;

// The same in plans for intervals. `hidden`: the keys that no row of the item sees; `cut`: some row of the item does not see some key.
template <int kBlockN>
struct IntervalKeyTile : KeyTile {
    HiddenBounds bounds;        // of its keys, in cut tiles
    uint32_t rows[2][kBlockN];  // in cut tiles: the rows of the item that do not see a key, TileRows for each interval
    int hides;                  // whether there are such keys

    __device__ __forceinline__ bool zeroes_values() const { return hides; }
};
// The same in plans for blocks.
struct BlockKeyTile : KeyTile {
    uint32_t seen, pairs;  // BlocksOfTile: seen, cut
    int hides;

    __device__ __forceinline__ bool zeroes_values() const { return hides; }
};
template <WgmmaPlanId kId>
using KeyTileOf = std::conditional_t<kWgmmaPlan<kId>.intervals, IntervalKeyTile<kWgmmaPlan<kId>.block_n>,
                                     std::conditional_t<kWgmmaPlan<kId>.blocks, BlockKeyTile, KeyTile>>;

constexpr int kWgmmaWorkSlots = 3;  // consumers keep an item until its last store, and the producer is one item ahead

// What the finder of a plan for intervals knows of the item. For 32 tiles, `from` and those after it, it has a bit each.
struct SeenKeyTiles {
    const HiddenBounds* bounds;  // of the tiles of the item's keys
    const HiddenBounds* groups;  // of groups of these tiles; nullptr = none
    const int32_t* numbers;      // of these keys
    int from;
    uint32_t seen, cut, equal;  // equal: all keys of the tile have the same intervals
    HiddenBounds of_tiles[32];  // of these tiles; only of those that are seen
};
// The same in plans for blocks. `words`, `keys`: of the item's first row block.
struct SeenBlockTiles {
    const uint64_t* pairs[kWgmmaWorkSlots];  // for the consumers of each item: SeenBlocks::pairs of its first row block
    const SeenWord* words;
    const uint64_t* keys;  // nullptr without pairs
    int from;
    uint32_t seen, cut;
};
struct NoSeenKeyTiles {};
template <WgmmaPlanId kId>
using SeenKeyTilesOf =
    std::conditional_t<kWgmmaPlan<kId>.intervals, SeenKeyTiles, std::conditional_t<kWgmmaPlan<kId>.blocks, SeenBlockTiles, NoSeenKeyTiles>>;

// Plans with options have this in shared memory, too. Tiles count over all items.
template <WgmmaPlanId kId, bool kOptions = kWgmmaPlan<kId>.options>
struct WgmmaKeyTiles {};
template <WgmmaPlanId kId>
struct WgmmaKeyTiles<kId, true> {
    static constexpr int kStages = kWgmmaPlan<kId>.stages;
    // The entry of tile i is number i % kEntries. It is written when K of tile i - kAhead has been loaded. Consumers, and the warps that
    // zero V, are then done with tile i - kAhead - kStages - 1.
    static constexpr uint32_t kEntries = 16;
    static constexpr int kAhead = 8;  // the first tiles of an item are found before the last ones of the item before it are loaded
    static_assert(kEntries >= kAhead + kStages + 1, "the last user of an entry is done before it is written again");
    KeyTileOf<kId> tiles[kEntries];
    __device__ __forceinline__ KeyTileOf<kId>& entry(uint32_t count) { return tiles[count % kEntries]; }
    uint64_t found[kAhead], loaded[kAhead];  // barriers: entry i may be read, and K of tile i has been loaded
    // Tiles that a mask cuts, counted by themselves: V of cut tile c, which is tile cut[c % kStages], lands at v_landed[c % kStages]. Its
    // barrier in v_full follows when the hidden rows are zero.
    uint64_t v_landed[kStages];
    uint32_t cut[kStages], cuts;
    float slope[kWgmmaWorkSlots];  // of ALiBi, in the unit of the scores before they are scaled
    SeenKeyTilesOf<kId> seen;
};

template <WgmmaPlanId kId>
using FoundRing = Ring<WgmmaKeyTiles<kId>::kAhead>;

// Plans with a bias have this in shared memory, too: tiles of bias, which count as tiles of K do. The rows of the item, as chunks of 128
// bytes in the swizzle of wgmma.cuh; of a bias that all rows share, the first row.
template <WgmmaPlanId kId, bool kBias = kWgmmaPlan<kId>.bias>
struct WgmmaBias {};
template <WgmmaPlanId kId>
struct WgmmaBias<kId, true> {
    static constexpr int kStages = kWgmmaPlan<kId>.bias_stages;
    static constexpr int kElementBytes = kWgmmaPlan<kId>.bias_float32 ? 4 : 2;
    alignas(1024) uint8_t tiles[kStages][kWgmmaPlan<kId>.block_m() * kWgmmaPlan<kId>.block_n * kElementBytes];
    uint64_t full[kStages], empty[kStages];
};

template <typename T, WgmmaPlanId kId>
struct alignas(1024) WgmmaSmem {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    T q[kPlan.warpgroups][64 * kPlan.columns()];
    T k[kPlan.stages][kPlan.block_n * kPlan.columns()];
    T v[kPlan.stages][kPlan.block_n * kPlan.columns_v()];
    uint64_t q_full[1], q_empty[1];
    uint64_t k_full[kPlan.stages], k_empty[kPlan.stages], v_full[kPlan.stages], v_empty[kPlan.stages];
    static constexpr int kWorkSlots = kWgmmaWorkSlots;
    uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
    typename WgmmaItem<kId>::Type work[kWorkSlots];
    uint8_t seen[2][kPlan.general ? kPlan.block_n : 1];  // does any row of the block see this key? One slot each for two consecutive tiles
    WgmmaKeyTiles<kId> keys;
    WgmmaBias<kId> bias;
};

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void init_barriers(WgmmaSmem<T, kId>& smem, bool page_copies) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kConsumerArrivals = 4 * kPlan.warpgroups * kWarpArrivals;  // one per warp, after its wgmmas have read the buffer
    const int landings = page_copies ? 4 * kWarpArrivals : 1;                // one per producer warp, or one by the copying thread
    mbarrier_init(shared_address(smem.q_full), 1), mbarrier_init(shared_address(smem.q_empty), kConsumerArrivals);
    for (int i = 0; i < kPlan.stages; ++i) {
        mbarrier_init(shared_address(smem.k_full + i), landings), mbarrier_init(shared_address(smem.k_empty + i), kConsumerArrivals);
        mbarrier_init(shared_address(smem.v_full + i), landings), mbarrier_init(shared_address(smem.v_empty + i), kConsumerArrivals);
    }
    for (int i = 0; i < WgmmaSmem<T, kId>::kWorkSlots; ++i)
        mbarrier_init(shared_address(smem.work_full + i), 1), mbarrier_init(shared_address(smem.work_empty + i), kConsumerArrivals);
    if constexpr (kPlan.options) {
        for (int i = 0; i < kPlan.stages; ++i) mbarrier_init(shared_address(smem.keys.v_landed + i), 1);
        for (int i = 0; i < WgmmaKeyTiles<kId>::kAhead; ++i)
            mbarrier_init(shared_address(smem.keys.found + i), 1), mbarrier_init(shared_address(smem.keys.loaded + i), 1);
        smem.keys.cuts = 0;
    }
    if constexpr (kPlan.bias)
        for (int i = 0; i < WgmmaBias<kId>::kStages; ++i)
            mbarrier_init(shared_address(smem.bias.full + i), 1), mbarrier_init(shared_address(smem.bias.empty + i), kConsumerArrivals);
    fence_mbarrier_init();
}

}  // namespace fa
