// wgmma_sm90/produce.cuh: the producer of wgmma_sm90. It finds work items and copies their tiles: Q to its buffer, K and V to their rings.
//
// How a tile of K or V is copied depends on where its rows are:
//
//     ThreadTiles     in one tensor, or in pages that are whole tiles: one thread copies a tile, in one box or in one per 64 columns
//     WarpgroupBoxes  in pages of a multiple of 8 rows: a box holds 64 columns of a page, or of the largest part of a page that divides
//                     a tile
//     WarpgroupRows   in pages of any other size: row by row with cp.async, 16 bytes per thread
//
// The last two take all four warps of the producer. A warp takes about 90 cycles to issue a box, so the boxes of a tile are dealt to four
// warps. On an H200, without the consumers, a tile of 128 x 128 in 16 boxes then takes 1000 cycles, against 1470 from one warp and 930 in a
// single box, which is the rate of L2. Row by row it takes 1000 cycles, too, but next to the consumers the kernel runs at 0.63 .. 0.80 of
// its speed.
#pragma once

#include "attention/forward/common/work_loop.cuh"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/tile_load.cuh"

namespace fa {

// ---- one thread ----

template <typename T, WgmmaPlanId kId>
struct ThreadTiles {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr WalkedBy kWalkedBy = WalkedBy::kThread;
    const CUtensorMap &map_k, &map_v;
    const AttentionParams& p;
    const WgmmaSchedule& schedule;
    WgmmaSmem<T, kId>& smem;
    int head, entry;  // of K and V, for the current item

    __device__ __forceinline__ ThreadTiles(const CUtensorMap& map_k, const CUtensorMap& map_v, const AttentionParams& p,
                                           const WgmmaSchedule& schedule, WgmmaSmem<T, kId>& smem)
        : map_k(map_k), map_v(map_v), p(p), schedule(schedule), smem(smem) {}

    __device__ __forceinline__ void begin_item(const ForwardWork& w) {
        const int batch = p.cu_seqlens_q ? 0 : w.batch;
        head = w.head / p.group, entry = !kPlan.options && p.cache.entries ? cache_entry(p.cache, batch) : batch;
    }
    template <int kCount>
    __device__ __forceinline__ void load(const ForwardWork& w, int n, const CUtensorMap& map, int loads, const Ring<kPlan.stages>& ring,
                                         T (&tiles)[kPlan.stages][kCount]) const {
        int row = w.k_row + n * kPlan.block_n, page = entry;
        if constexpr (kPlan.pages())
            if (p.cache.block_table) {  // pages of a multiple of block_n rows; a page past the sequence arrives as zeros
                const int index = row / p.cache.page_size;
                page = row < w.seqlen_k ? cache_page(p.cache, w.batch, index) : p.cache.entries;
                row -= index * p.cache.page_size;
            }
        ring.wait_empty();
        mbarrier_arrive_expect_tx(ring.full_barrier(), sizeof tiles[0]);
        load_tile(map, loads, shared_address(tiles[ring.slot]), kPlan.block_n, ring.full_barrier(), row, head, page);
    }
    __device__ __forceinline__ void load_k(const ForwardWork& w, int n, const Ring<kPlan.stages>& k) const {
        load(w, n, map_k, schedule.k_loads, k, smem.k);
    }
    __device__ __forceinline__ void load_v(const ForwardWork& w, int n, const Ring<kPlan.stages>& v) const {
        load(w, n, map_v, schedule.v_loads, v, smem.v);
    }
    __device__ __forceinline__ void end_item() const {}
};

// ---- four warps ----

// A page of a cache as the block table has it, not range-checked yet, and a row in it. Row -1: past the sequence.
struct PageRow {
    int page, row;
};
__device__ __forceinline__ PageRow page_row(const AttentionParams& p, const ForwardWork& w, int key) {
    if (key < 0 || key >= w.seqlen_k) return {0, -1};
    const int index = key / p.cache.page_size;
    return {p.cache.block_table[w.batch * p.cache.table_row + index], key - index * p.cache.page_size};
}

// A thread's row in up to three consecutive tiles. The block table is read one tile ahead, while another tile is being copied.
struct PageRows {
    PageRow next, k, before;  // in the tile whose K comes next; in the tile whose K came last; in the tile before that
    int k_tile;               // the tile whose K came last

    __device__ __forceinline__ void step(int n) { before = k, k = next, k_tile = n; }
    __device__ __forceinline__ PageRow of_v(int n) const { return n == k_tile ? k : before; }
};

// Copies box by box. A thread issues at most one box of a tile.
template <typename T, WgmmaPlanId kId>
struct WarpgroupBoxes {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr WalkedBy kWalkedBy = WalkedBy::kWarpgroup;
    static constexpr int kBlockN = kPlan.block_n;
    static constexpr int kChunks = kPlan.columns() / kChunkColumns, kChunksV = kPlan.columns_v() / kChunkColumns;
    static_assert(kBlockN / 8 * (kChunks > kChunksV ? kChunks : kChunksV) <= 128, "a box a thread");
    const CUtensorMap &map_k, &map_v;
    const AttentionParams& p;
    WgmmaSmem<T, kId>& smem;
    int chunk, box_row;  // of this thread's box: its 64-column chunk, and its first row in the tile
    int head;            // of K and V, for the current item
    PageRows rows;       // first rows of this thread's boxes

    __device__ __forceinline__ WarpgroupBoxes(const CUtensorMap& map_k, const CUtensorMap& map_v, const AttentionParams& p,
                                              const WgmmaSchedule& schedule, WgmmaSmem<T, kId>& smem)
        : map_k(map_k), map_v(map_v), p(p), smem(smem) {
        const int box = threadIdx.x % 32 * 4 + threadIdx.x / 32, boxes = kBlockN / schedule.page_boxes;  // dealt to the warps
        chunk = box / boxes, box_row = (box - chunk * boxes) * schedule.page_boxes;
    }
    __device__ __forceinline__ PageRow find(const ForwardWork& w, int n) const { return page_row(p, w, n * kBlockN + box_row); }
    __device__ __forceinline__ void begin_item(const ForwardWork& w) { head = w.head / p.group, rows.next = find(w, w.last_tile); }
    // Whether this warp copies any box of a tile. A warp that copies none must not wait for the buffer either: nobody waits for that warp,
    // so the buffer might be filled and released again before it looks.
    __device__ __forceinline__ bool has_boxes(int chunks) const { return __any_sync(~0u, chunk < chunks); }
    __device__ __forceinline__ void load(const CUtensorMap& map, int chunks, uint32_t tile, uint32_t barrier, const PageRow& at) {
        if (threadIdx.x == 0) mbarrier_arrive_expect_tx(barrier, chunks * kBlockN * kChunkRowBytes);
        const int page = at.row < 0 ? p.cache.entries : clamp_to(at.page, 0, p.cache.entries - 1);  // past the sequence: zeros
        if (chunk < chunks)
            tma_load(tile + (chunk * kBlockN + box_row) * kChunkRowBytes, &map, barrier, chunk * kChunkColumns, at.row, 0, head, page);
        __syncwarp();
    }
    __device__ __forceinline__ void load_k(const ForwardWork& w, int n, const Ring<kPlan.stages>& k) {
        rows.step(n);
        if (has_boxes(kChunks)) k.wait_empty();
        load(map_k, kChunks, shared_address(smem.k[k.slot]), k.full_barrier(), rows.k);
        rows.next = find(w, n - 1);
    }
    __device__ __forceinline__ void load_v(const ForwardWork&, int n, const Ring<kPlan.stages>& v) {
        if (has_boxes(kChunksV)) v.wait_empty();
        load(map_v, kChunksV, shared_address(smem.v[v.slot]), v.full_barrier(), rows.of_v(n));
    }
    __device__ __forceinline__ void end_item() const {}
};

// Copies row by row.
template <typename T, WgmmaPlanId kId>
struct WarpgroupRows {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr WalkedBy kWalkedBy = WalkedBy::kWarpgroup;
    static constexpr int kBlockN = kPlan.block_n;
    static constexpr int kPasses = kBlockN / 16;  // a pass is 16 rows: four per warp, eight lanes for the 128 bytes of a chunk
    static_assert(4 * kPasses <= 32, "each lane looks one row up");
    const AttentionParams& p;
    WgmmaSmem<T, kId>& smem;
    int head;              // of K and V, for the current item
    PageRows rows;         // the row that this lane looks up
    uint32_t landing = 0;  // full barrier of the newest tile, whose copies may still be in flight; 0 = none

    __device__ __forceinline__ WarpgroupRows(const AttentionParams& p, WgmmaSmem<T, kId>& smem) : p(p), smem(smem) {}

    // Each lane looks up row 16 (lane / 4) + 4 warp + lane % 4 of the tile; copy() passes it on to the lanes that copy that row.
    __device__ __forceinline__ PageRow find(const ForwardWork& w, int n) const {
        const int lane = threadIdx.x % 32;
        if (n < 0 || lane >= 4 * kPasses) return {0, -1};
        return page_row(p, w, n * kBlockN + lane / 4 * 16 + threadIdx.x / 32 * 4 + lane % 4);
    }
    __device__ __forceinline__ void begin_item(const ForwardWork& w) { head = w.head / p.group, rows.next = find(w, w.last_tile); }
    // Copies the rows to the tile at `tile`. `from_head`: row 0 of the head in page 0. kChunks of 64 columns; zeros from `columns` on and
    // past the sequence.
    template <int kChunks>
    __device__ __forceinline__ void copy(uint32_t tile, const T* from_head, const TensorView& view, int columns, const PageRow& at) const {
        constexpr int kBatch = kPasses % 4 == 0 ? 4 : 1;  // offsets that other lanes send at once
        const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 4 + lane / 8, left = columns - lane % 8 * 8;
        const int64_t known = at.row < 0 ? -1 : clamp_to(at.page, 0, p.cache.entries - 1) * view.batch + at.row * view.row;
        tile += r * kChunkRowBytes + ((lane % 8 ^ r % 8) << 4);
        from_head += lane % 8 * 8;
#pragma unroll 1
        for (int pass = 0; pass < kPasses; pass += kBatch) {
            int64_t offset[kBatch];
#pragma unroll
            for (int x = 0; x < kBatch; ++x) offset[x] = __shfl_sync(~0u, known, 4 * (pass + x) + lane / 8);
#pragma unroll
            for (int x = 0; x < kBatch; ++x) {
                const T* from = from_head + (offset[x] < 0 ? 0 : offset[x]);
                const int exist = offset[x] < 0 ? 0 : left;
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
                    cp_async_16(tile + (16 * x + c * kBlockN) * kChunkRowBytes, from + c * kChunkColumns,
                                exist > c * kChunkColumns ? 16 : 0);
            }
            tile += kBatch * 16 * kChunkRowBytes;
        }
    }
    // Tells barrier `landing` that this warp's copies of its tile have landed.
    __device__ __forceinline__ void announce() const {
        fence_proxy_async();
        __syncwarp();
        if (landing && arrives(threadIdx.x % 32)) mbarrier_arrive(landing);
    }
    // Called after the copies of each tile are issued, with the tile's barrier. Waits until the copies of the previous tile have landed.
    __device__ __forceinline__ void issued(uint32_t barrier) {
        cp_async_commit();
        cp_async_wait_group<1>();
        announce();
        landing = barrier;
    }
    __device__ __forceinline__ void load_k(const ForwardWork& w, int n, const Ring<kPlan.stages>& k) {
        rows.step(n);
        k.wait_empty();
        copy<kPlan.columns() / kChunkColumns>(shared_address(smem.k[k.slot]), static_cast<const T*>(p.k.data) + head * p.k.head, p.k,
                                              p.headdim, rows.k);
        issued(k.full_barrier());
        rows.next = find(w, n - 1);
    }
    __device__ __forceinline__ void load_v(const ForwardWork&, int n, const Ring<kPlan.stages>& v) {
        v.wait_empty();
        copy<kPlan.columns_v() / kChunkColumns>(shared_address(smem.v[v.slot]), static_cast<const T*>(p.v.data) + head * p.v.head, p.v,
                                                p.headdim_v, rows.of_v(n));
        issued(v.full_barrier());
    }
    __device__ __forceinline__ void end_item() {
        cp_async_wait_all();
        announce();
        landing = 0;
    }
};

// ---- common to all three: the order of an item's tiles ----

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void load_q(const CUtensorMap& map, const AttentionParams& p, const WgmmaSchedule& schedule,
                                       const ForwardWork& w, WgmmaSmem<T, kId>& smem, uint32_t barrier) {
    mbarrier_arrive_expect_tx(barrier, sizeof smem.q);
#pragma unroll 1
    for (int slab = 0; slab < kWgmmaPlan<kId>.warpgroups; ++slab)
        load_tile(map, schedule.q_loads, shared_address(smem.q[slab]), 64, barrier, w.q_row + w.row0 + slab * 64, w.head,
                  p.cu_seqlens_q ? 0 : w.batch, kEvictFirst);
}

template <WgmmaPlanId kId>
struct WgmmaWorkTiles {
    static constexpr int kBlockM = kWgmmaPlan<kId>.block_m(), kBlockN = kWgmmaPlan<kId>.block_n;
    static constexpr bool kCaches = !kWgmmaPlan<kId>.options;
};

// Loads the tiles of one item, last keys first. K is one tile ahead of V, because the consumers multiply S(n) before P(n + 1) V(n + 1).
// `tile` counts the tiles of K, and of V, over all items. load_q() waits for the buffer of Q and fills it.
template <typename T, WgmmaPlanId kId, typename Tiles, typename LoadQ>
__device__ __forceinline__ void load_item(const ForwardWork& w, WgmmaSmem<T, kId>& smem, Tiles& tiles, uint32_t& tile,
                                          const LoadQ& load_q) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    const auto k_ring = [&](uint32_t count) { return Ring<kPlan.stages>(smem.k_full, smem.k_empty, count); };
    const auto v_ring = [&](uint32_t count) { return Ring<kPlan.stages>(smem.v_full, smem.v_empty, count); };
    tiles.begin_item(w);
    tiles.load_k(w, w.last_tile, k_ring(tile));  // does not wait for the Q buffer
    load_q();
#pragma unroll 1
    for (int n = w.last_tile; n > w.first_tile; --n, ++tile) {
        tiles.load_k(w, n - 1, k_ring(tile + 1));
        tiles.load_v(w, n, v_ring(tile));
    }
    tiles.load_v(w, w.first_tile, v_ring(tile++));
    tiles.end_item();
}

template <typename T, WgmmaPlanId kId, typename Tiles>
__device__ __forceinline__ void produce(const CUtensorMap& map_q, const AttentionParams& p, const WgmmaSchedule& schedule,
                                        WgmmaSmem<T, kId>& smem, Tiles tiles) {
    constexpr bool kWarpgroup = Tiles::kWalkedBy == WalkedBy::kWarpgroup;
    const bool clears = kWgmmaPlan<kId>.gives_max_score() && p.max_score;
    if (clears && schedule.list.counter) grid_dependency_wait();  // on clear_max_score, which zeroes the counter
    uint32_t tile = 0;
    const auto prepare = [](ForwardWork&) {};
    const auto load = [&](const ForwardWork& w, uint32_t item) {
        load_item<T, kId>(w, smem, tiles, tile, [&] {
            const Ring<1> q(smem.q_full, smem.q_empty, item);
            q.wait_empty();
            if (kWarpgroup) bar_sync(kProducer, 128);  // no warp may still wait for this phase when Q arrives
            if (!kWarpgroup || threadIdx.x == 0) load_q(map_q, p, schedule, w, smem, q.full_barrier());
            if (kWarpgroup) __syncwarp();
        });
    };
    for_each_item<WgmmaWorkTiles<kId>, Tiles::kWalkedBy>(p, schedule.list, smem.work, smem.work_full, smem.work_empty, prepare, load);
    // In every block at least one thread waits, even if no item has rows: so this kernel ends after clear_max_score.
    if (clears) grid_dependency_wait();
}

}  // namespace fa
