// wgmma_sm90/key_tiles.cuh: the producer's side of plans with options: which tiles of keys an item needs, in which order, and what a mask
// of keys hides in them.
//
// A mask of keys is (batch, heads, 1, seqlen_k), so it is the same for all rows of an item. Its bytes are read once for a tile and sort the
// tile into one of three classes:
//
//     empty   all keys are hidden: the tile is not loaded, and the consumers never hear of it
//     whole   no key is hidden: the consumers treat it as in a call without a mask
//     cut     the consumers get one bit for each key, and V is zeroed where keys are hidden, because P = 0 times NaN is NaN
//
// The warps of the producer have a role each. To find a tile takes a warp 150 instructions, each of which waits for the one before, and to
// load it 100. One warp that did both in turn would be slower than the consumers at head dim 128.
//
//     finder   finds items and tiles, and writes what is known of them to shared memory
//     loader   copies the tiles that the finder has found: Q, K, V, and tiles of bias
//     zeroing  two warps zero rows of V, once for all consumers, while other tiles are multiplied. In plans with a bias they look through
//              every tile of V (bias.cuh)
#pragma once

#include "attention/forward/common/work_loop.cuh"
#include "attention/forward/wgmma_sm90/bias.cuh"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/intervals.cuh"
#include "attention/forward/wgmma_sm90/produce.cuh"
#include "attention/forward/wgmma_sm90/seen_blocks.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"

namespace fa {

constexpr uint32_t kNoMoreTiles = ~0u;

// ---- the finder ----

// Finds the tiles of one item in their order, by a whole warp. Keys are walked downwards, as in the bare plans. But under
// ALiBi scores fall on both sides of the diagonal: the walk goes down from the diagonal of the item's last row, and then up from there. So
// a row's first tiles hold its greatest scores as far as the distance decides, and later tiles need no new maximum.
//
// A tile of K, and its V, has a number, `count`: tiles count over all items. The registers of a producer are few, so what is known of a
// tile goes to its entry in shared memory at once, and the item is read from there.
template <typename T, WgmmaPlanId kId>
struct TileFinder {
    static constexpr int kBlockN = kWgmmaPlan<kId>.block_n;
    static constexpr bool kBias = kWgmmaPlan<kId>.bias, kSkips = kWgmmaPlan<kId>.skips();
    static constexpr int kStride = 32 * 16 / kBlockN;  // tiles whose bytes of the mask the lanes read at once, 16 bytes each
    const AttentionParams& p;
    WgmmaSmem<T, kId>& smem;

    // Opaque: what follows from these is computed where it is used, and takes no register or predicate elsewhere.
    __device__ __forceinline__ int lane() const { return opaque(int(threadIdx.x % 32)); }
    __device__ __forceinline__ bool has_mask() const { return opaque(static_cast<const uint8_t*>(p.mask.data)); }
    __device__ __forceinline__ bool has_slopes() const { return !kBias && !kSkips && opaque(p.alibi_slopes); }
    __device__ __forceinline__ FoundRing<kId> found(uint32_t count) const { return {smem.keys.found, smem.keys.loaded, count}; }
    // The entry of tile number `count`, which the loader and the consumers have done with.
    __device__ __forceinline__ KeyTileOf<kId>& next_entry(uint32_t count) const {
        found(count).wait_empty();
        return smem.keys.entry(count);
    }
    // Waits until only few tiles before number `count` are left to load. Earlier the next item must not be taken: short items would wait in
    // one block while others have nothing to do.
    __device__ __forceinline__ void wait_before_item(uint32_t count) const {
        constexpr uint32_t kLeft = 4;
        static_assert(kLeft < uint32_t(WgmmaKeyTiles<kId>::kAhead));
        found(count + WgmmaKeyTiles<kId>::kAhead - kLeft).wait_empty();
    }
    // Tile number `count` may be loaded. Its entry is complete, so the consumers know whether it is the item's last one.
    __device__ __forceinline__ void publish(uint32_t count, bool is_last) const {
        __syncwarp();
        if (lane() != 0) return;
        if (is_last) smem.keys.entry(count).place = ~smem.keys.entry(count).place;
        mbarrier_arrive(found(count).full_barrier());
    }
    // The mask's byte of key 0.
    __device__ __forceinline__ const uint8_t* mask_of(const ForwardWork& w) const {
        return static_cast<const uint8_t*>(p.mask.data) + w.batch * p.mask.batch + w.head * p.mask.head;
    }
    // The walk goes from here down to the first tile, and then from the next tile above up to the last one.
    __device__ __forceinline__ int start_of(const ForwardWork& w) const {
        if (!has_slopes()) return w.last_tile;
        const int last_row = min(w.row0 + kWgmmaPlan<kId>.block_m(), w.seqlen_q) - 1;
        return clamp_to((last_row + w.shift) / kBlockN, w.first_tile, w.last_tile);
    }
    __device__ __forceinline__ int after(const ForwardWork& w, int n) const {
        const int start = start_of(w);
        if (w.first_tile < n && n <= start) return n - 1;
        n = max(n, start) + 1;
        return n <= w.last_tile ? n : kNoTile;
    }
    // Reads the mask of tile n into its entry. Returns whether any key is visible.
    __device__ __forceinline__ bool read(const ForwardWork& w, int n, KeyTile& tile) const {
        const int lane = this->lane();
        const int key = n * kBlockN + lane / 2 * 8 + lane % 2, keys = lane / 2 * 8 < kBlockN ? w.seqlen_k - key : 0;
        const uint8_t* attend = mask_of(w) + key;
        uint8_t sees[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) sees[q] = 2 * q < keys ? attend[2 * q] : 0;
        const bool visible = __any_sync(~0u, sees[0] | sees[1] | sees[2] | sees[3]);
        uint32_t any = 0;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const uint32_t word = __ballot_sync(~0u, 2 * q < keys && !sees[q]);
            if (lane == q) tile.hidden[q] = word;
            any |= word;
        }
        tile.cut = any != 0;
        return visible;
    }
    // Passes over hidden tiles, kStride at a time, from tile n downwards. All keys of these tiles exist.
    __device__ __forceinline__ int pass_hidden(const ForwardWork& w, int n) const {
        for (; n - kStride >= w.first_tile; n -= kStride) {
            const int lane = this->lane();
            const uint8_t* bytes = mask_of(w) + (n + 1 - kStride) * kBlockN + lane * 16;
            if (reinterpret_cast<uintptr_t>(bytes) % 16) return n;
            uint4 x{};
            if (lane * 16 < kStride * kBlockN) x = *reinterpret_cast<const uint4*>(bytes);
            if (__any_sync(~0u, x.x | x.y | x.z | x.w)) return n;
        }
        return n;
    }
    // The first tile from n on that has a visible key, or kNoTile. Its number is `count`.
    __device__ __forceinline__ int find(const ForwardWork& w, int n, uint32_t count) const {
        KeyTile& tile = next_entry(count);
        if (has_mask()) {
#pragma unroll 1
            while (n != kNoTile && !read(w, n, tile)) {
                n = after(w, n);
                if (w.first_tile < n && n < start_of(w)) n = pass_hidden(w, n);
            }
        } else {
            tile.cut = false;
        }
        tile.place = n;
        return n;
    }
    // An item has at least one tile, so that rows without keys need no code path.
    __device__ __forceinline__ int find_first(const ForwardWork& w, uint32_t count) const {
        const int n = find(w, start_of(w), count);
        if (n != kNoTile) return n;
        read(w, start_of(w), smem.keys.entry(count));
        return smem.keys.entry(count).place = start_of(w);
    }
};

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void find_tiles(const AttentionParams& p, const WgmmaSchedule& schedule, WgmmaSmem<T, kId>& smem) {
    const TileFinder<T, kId> finder{p, smem};
    uint32_t count = 0;
    const auto prepare = [&](ForwardWork& w) {
        if constexpr (kWgmmaPlan<kId>.bias_options)
            if (p.alibi_slopes) smem.keys.slope[&w - smem.work] = p.alibi_slopes[w.batch * p.alibi_batch + w.head];
        if (!finder.has_slopes()) return;
        const float softcap = __int_as_float(opaque(__float_as_int(p.softcap))), unit = softcap != 0 ? softcap : p.scale;
        smem.keys.slope[&w - smem.work] = __fdividef(p.alibi_slopes[w.batch * p.alibi_batch + w.head], unit);
    };
    const auto find = [&](const ForwardWork& w, uint32_t /* item */) {
        int n = finder.find_first(w, count);
#pragma unroll 1
        while (n != kNoTile) {
            n = finder.after(w, n);
            // Without a mask every tile has keys that are seen: the loader need not wait until the next one is found.
            const bool at_once = !finder.has_mask();
            if (at_once) finder.publish(count, n == kNoTile);
            n = finder.find(w, n, count + 1);
            if (!at_once) finder.publish(count, n == kNoTile);
            ++count;
        }
        finder.wait_before_item(count);
    };
    for_each_item<WgmmaWorkTiles<kId>, WalkedBy::kWarp>(p, schedule.list, smem.work, smem.work_full, smem.work_empty, prepare, find);
}

// The first tile from n downwards of which a row of the item sees a key; its entry is `tile`. If there is none: kNoTile, or, for the first
// tile of an item, n, because an item has at least one tile.
template <int kBlockM, int kBlockN, typename Source, typename Known, typename Tile>
__device__ __forceinline__ int find_seen_tile(const AttentionParams& p, const Source& seen, const ForwardWork& w, int n, bool is_first,
                                              Known& known, Tile& tile) {
    const int start = n;
    bool cut = true;
#pragma unroll 1
    for (;; n = known.from - 1) {
        if (n < w.first_tile) {
            if (!is_first) return kNoTile;
            n = start;
            break;
        }
        if (n < known.from) n = look_at_tiles<kBlockM, kBlockN>(seen, w, n, known);
        const uint32_t up_to_n = known.seen << (31 - (n - known.from));
        if (up_to_n == 0) continue;
        n -= __clz(up_to_n), cut = known.cut >> (n - known.from) & 1;
        break;
    }
    tile.place = n, tile.cut = cut, tile.hides = false;
    describe_tile<kBlockM, kBlockN>(p, seen, w, n, cut, known, tile);
    return n;
}

// The same with masks by intervals, by blocks or of pairs. Tiles are found at one place of the code, because registers are few. `seen`:
// what a small kernel has written.
template <typename T, WgmmaPlanId kId, typename Source>
__device__ __forceinline__ void find_seen_tiles(const AttentionParams& p, const WgmmaSchedule& schedule, const Source& seen,
                                                WgmmaSmem<T, kId>& smem) {
    constexpr int kBlockM = kWgmmaPlan<kId>.block_m(), kBlockN = kWgmmaPlan<kId>.block_n;
    const TileFinder<T, kId> finder{p, smem};
    uint32_t count = 0;  // the tile that is looked for
    const auto prepare = [&](ForwardWork& w) { describe_item<kBlockN>(p, seen, w, int(&w - smem.work), smem.keys.seen); };
    const auto find = [&](const ForwardWork& w, uint32_t /* item */) {
        __syncwarp();
        bool is_first = true;
        int n = w.last_tile;
#pragma unroll 1
        while (true) {
            n = find_seen_tile<kBlockM, kBlockN>(p, seen, w, n, is_first, smem.keys.seen, finder.next_entry(count));
            __syncwarp();  // no lane reads what is known of the tiles any more
            if (!is_first) finder.publish(count - 1, n == kNoTile);
            if (n == kNoTile) break;
            is_first = false, ++count, --n;
        }
        finder.wait_before_item(count);
    };
    for_each_item<WgmmaWorkTiles<kId>, WalkedBy::kWarp>(p, schedule.list, smem.work, smem.work_full, smem.work_empty, prepare, find);
}

// ---- the loader ----

// Loads the tiles that the finder has published, by one thread. A tile of K, and its V, has a number, `count`: tiles count over all items.
template <typename T, WgmmaPlanId kId>
struct TileLoader {
    static constexpr int kStages = kWgmmaPlan<kId>.stages;
    static constexpr bool kBias = kWgmmaPlan<kId>.bias;
    // With one slot, a tile of bias waits for the consumers' last one, for which V must not wait.
    static constexpr bool kLateBias = kBias && kWgmmaPlan<kId>.bias_stages == 1;
    using Stages = Ring<kStages>;
    const AttentionParams& p;
    WgmmaSmem<T, kId>& smem;
    ThreadTiles<T, kId>& tiles;
    const CUtensorMap* map_bias;

    __device__ __forceinline__ void load_k(const ForwardWork& w, int n, uint32_t count) const {
        tiles.load_k(w, n, Stages(smem.k_full, smem.k_empty, count));
        if constexpr (kBias && !kLateBias) load_bias<T, kId>(map_bias, p, w, smem, n, count);
    }
    // The bias of tile number `count`, if load_k has not loaded it.
    __device__ __forceinline__ void load_late_bias(const ForwardWork& w, int n, uint32_t count) const {
        if constexpr (kLateBias) load_bias<T, kId>(map_bias, p, w, smem, n, count);
    }
    __device__ __forceinline__ void load_q(const CUtensorMap& map, const ForwardWork& w, uint32_t item) const {
        const Ring<1> q(smem.q_full, smem.q_empty, item);
        q.wait_empty();
        fa::load_q(map, p, tiles.schedule, w, smem, q.full_barrier());
    }
    // V of a cut tile goes through the zeroing warps; beside a bias that of every tile.
    __device__ __forceinline__ void load_v(const ForwardWork& w, int n, uint32_t count) const {
        Stages v(smem.v_full, smem.v_empty, count);
        if (kBias || smem.keys.entry(count).zeroes_values()) {
            v.wait_empty();
            if constexpr (kBias) smem.keys.entry(count).work = shared_address(&w);
            v.full = next_landing(count) - 8 * v.slot;
        }
        tiles.load_v(w, n, v);
    }
    // The barrier for the next cut tile. Its slot is free once there is room for V, because the cut tile that had it before lies at least
    // kStages tiles back.
    __device__ __forceinline__ uint32_t next_landing(uint32_t count) const {
        const uint32_t slot = smem.keys.cuts++ % kStages;
        smem.keys.cut[slot] = count;
        return shared_address(smem.keys.v_landed + slot);
    }
    // Tells the zeroing warps that no more tiles come, after they have done all.
    __device__ __forceinline__ void end(uint32_t count) const {
        for (int i = 0; i < kStages; ++i) Stages(smem.v_full, smem.v_empty, count + i).wait_empty();
        mbarrier_arrive(next_landing(kNoMoreTiles));
    }
};

// Whether any tile may go through the zeroing warps.
template <WgmmaPlanId kId>
__device__ __forceinline__ bool zeroes_values(const AttentionParams& p) {
    return kWgmmaPlan<kId>.bias || kWgmmaPlan<kId>.skips() || p.mask.data;
}

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void load_found_tiles(const CUtensorMap& map_q, const AttentionParams& p, WgmmaSmem<T, kId>& smem,
                                                 ThreadTiles<T, kId> tiles, const CUtensorMap* map_bias) {
    const TileLoader<T, kId> loader{p, smem, tiles, map_bias};
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    FoundRing<kId> found(smem.keys.found, smem.keys.loaded);
    uint32_t count = 0;
#pragma unroll 1
    for (uint32_t item = 0;; ++item, work.next()) {
        work.wait_full();
        const ForwardWork& w = smem.work[work.slot];
        if (w.state == WorkState::kEnd) break;
        tiles.begin_item(w);
        if (item == 0) loader.load_q(map_q, w, item);  // its buffer is free, and the first tile is still being looked for
        int before = kNoTile;
        bool more = true;
#pragma unroll 1
        for (; more; ++count) {
            found.wait_full();
            const int place = smem.keys.entry(count).place, n = place < 0 ? ~place : place;
            more = place >= 0;
            loader.load_k(w, n, count);
            mbarrier_arrive(found.empty_barrier());
            found.next();
            if (before != kNoTile) loader.load_v(w, before, count - 1);
            else if (item > 0) loader.load_q(map_q, w, item);  // after K, which does not wait for the buffer of Q
            loader.load_late_bias(w, n, count);
            before = n;
        }
        loader.load_v(w, before, count - 1);
    }
    if (zeroes_values<kId>(p)) loader.end(count);
}

// ---- the zeroing warps ----

// Zeroes the rows of V that the mask hides. Eight lanes share a row, so a warp takes four rows at a time.
template <WgmmaPlanId kId>
__device__ __forceinline__ void zero_masked_values(const KeyTile& tile, uint4* tile_of_v) {
    constexpr int kBlockN = kWgmmaPlan<kId>.block_n, kChunks = kWgmmaPlan<kId>.columns_v() / kChunkColumns;
    const int warp = int(threadIdx.x) / 32 - kFirstZeroingWarp, r = threadIdx.x % 32 / 8, piece = threadIdx.x % 8;
    const uint32_t even = tile.hidden[r / 2] >> r % 2, odd = tile.hidden[2 + r / 2] >> r % 2;  // of rows 8 x + r, and 8 x + 4 + r
    uint4* pieces = tile_of_v + piece;
#pragma unroll(kWgmmaPlan<kId>.bias ? 1 : kBlockN)
    for (int k = 0; k < kBlockN / 4; k += kZeroingWarps) {
        const int four = k + warp;  // rows 4 four .. 4 four + 3
        if (four >= kBlockN / 4 || !((four % 2 ? odd : even) >> four / 2 * 2 & 1)) continue;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) pieces[(chunk * kBlockN + 4 * four + r) * 8] = make_uint4(0, 0, 0, 0);
    }
}

// Hidden rows of V become zeros before the consumers see the tile.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void zero_hidden_values(const AttentionParams& p, WgmmaSmem<T, kId>& smem) {
    constexpr int kStages = kWgmmaPlan<kId>.stages;
#pragma unroll 1
    for (uint32_t c = 0;; ++c) {
        mbarrier_wait(shared_address(smem.keys.v_landed + c % kStages), c / kStages % 2);
        const uint32_t count = smem.keys.cut[c % kStages];
        if (count == kNoMoreTiles) return;
        const KeyTileOf<kId>& tile = smem.keys.entry(count);
        uint4* tile_of_v = reinterpret_cast<uint4*>(smem.v[count % kStages]);
        if (!kWgmmaPlan<kId>.bias || tile.cut) zero_masked_values<kId>(tile, tile_of_v);
        if constexpr (kWgmmaPlan<kId>.bias) zero_unseen_values(p, smem, tile, tile_of_v);
        fence_proxy_async();
        bar_sync(kProducer, 32 * kZeroingWarps);
        if (threadIdx.x == 32 * kFirstZeroingWarp) mbarrier_arrive(shared_address(smem.v_full + count % kStages));
    }
}

// ---- all roles ----

// Called by the producer's four warps. find(): what the finder does.
template <typename T, WgmmaPlanId kId, typename Find>
__device__ __forceinline__ void produce_with_options(const CUtensorMap& map_q, const CUtensorMap& map_k, const CUtensorMap& map_v,
                                                     const AttentionParams& p, const WgmmaSchedule& schedule, WgmmaSmem<T, kId>& smem,
                                                     const Find& find, const CUtensorMap* map_bias = nullptr) {
    if (threadIdx.x < 32) {
        find();
    } else if (threadIdx.x < 32 * kFirstZeroingWarp) {
        if (threadIdx.x == 32) load_found_tiles(map_q, p, smem, ThreadTiles<T, kId>(map_k, map_v, p, schedule, smem), map_bias);
    } else if (zeroes_values<kId>(p)) {
        zero_hidden_values(p, smem);
    }
}

}  // namespace fa
