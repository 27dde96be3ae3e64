// forward_wgmma_sm90_pages.cuh: the producer of forward_wgmma_sm90 where K and V lie in pages that its tiles do not divide, so that no one
// box holds a tile. It takes the producer's whole warpgroup:
//
//     pages of a multiple of 8 rows    a box for each page, or the largest part of one that divides a tile, and each 64 columns of it
//     any other page size              row by row with cp.async, 16 bytes a thread
//
// A warp takes some 90 cycles to issue a box, so the boxes of a tile are dealt to four warps. On an H200, without the consumers, a tile of
// 128 x 128 then takes 1000 cycles in 16 boxes, 1470 from one warp, 930 in one box: what L2 gives. Row by row it takes 1000 too, but beside
// the consumers the kernel runs at 0.63 .. 0.80 of its speed.
#pragma once

#include "attention/forward_wgmma_sm90_work.cuh"
#include "attention/params.h"
#include "attention/tiles.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// Row by row; rows past the sequence are zeros.
template <typename T, int kBlockN>
struct PageCopies {
    static constexpr int kPasses = kBlockN / 16;  // of 16 rows, four for each warp, eight lanes for the 128 bytes of a chunk
    static_assert(4 * kPasses <= 32, "each lane looks one row up");
    const AttentionParams& p;
    int page, row;  // of row 16 (lane / 4) + 4 warp + lane % 4 of the tile: the table's entry, not yet looked at; row -1: past the sequence

    __device__ __forceinline__ void find(const WgmmaWork& w, int tile) {
        const int lane = threadIdx.x % 32, key = tile * kBlockN + lane / 4 * 16 + threadIdx.x / 32 * 4 + lane % 4;
        row = -1;
        if (tile < 0 || lane >= 4 * kPasses || key >= w.seqlen_k) return;
        const int index = key / p.cache.page_size;
        page = p.cache.block_table[w.batch * p.cache.table_row + index], row = key - index * p.cache.page_size;
    }
    // Rows of the head that starts at `head` to the tile at `tile`; kChunks of 64 columns, zeros from `columns` on.
    template <int kChunks>
    __device__ __forceinline__ void copy(uint32_t tile, const T* head, const TensorView& view, int columns) const {
        constexpr int kBatch = kPasses % 4 == 0 ? 4 : 1;  // offsets that are on their way from other lanes together
        const int lane = threadIdx.x % 32, r = threadIdx.x / 32 * 4 + lane / 8, left = columns - lane % 8 * 8;
        const int64_t known = row < 0 ? -1 : clamp_to(page, 0, p.cache.entries - 1) * view.batch + row * view.row;
        tile += r * kChunkRowBytes + ((lane % 8 ^ r % 8) << 4);
        head += lane % 8 * 8;
#pragma unroll 1
        for (int pass = 0; pass < kPasses; pass += kBatch) {
            int64_t offset[kBatch];
#pragma unroll
            for (int x = 0; x < kBatch; ++x) offset[x] = __shfl_sync(~0u, known, 4 * (pass + x) + lane / 8);
#pragma unroll
            for (int x = 0; x < kBatch; ++x) {
                const T* from = head + (offset[x] < 0 ? 0 : offset[x]);
                const int exist = offset[x] < 0 ? 0 : left;
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
                    cp_async_16(tile + (16 * x + c * kBlockN) * kChunkRowBytes, from + c * kChunkColumns,
                                exist > c * kChunkColumns ? 16 : 0);
            }
            tile += kBatch * 16 * kChunkRowBytes;
        }
    }
};

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void produce_from_pages(const CUtensorMap& map_q, const AttentionParams& p, const WgmmaSchedule& schedule,
                                                   WgmmaSmem<T, kId>& smem) {
    constexpr WgmmaPlan kPlan = wgmma_plan(kId);
    constexpr int kBlockM = kPlan.block_m(), kBlockN = kPlan.block_n, kStages = kPlan.stages;
    constexpr uint32_t kSlabBytes = sizeof(smem.q[0]);
    const uint32_t q_full = shared_address(&smem.q_full), q_empty = shared_address(&smem.q_empty);
    Ring ring, work;
    uint32_t q_phase = 0;
    for (int index = blockIdx.x;; bar_sync(kProducer, 128)) {  // thread 0 finds the work, whose slot nobody reads any more
        WgmmaItem& w = smem.work[work.slot];
        mbarrier_wait(shared_address(smem.work_empty) + 8 * work.slot, work.phase ^ 1);
        if (threadIdx.x == 0) {
            w.has_rows = find_work<kBlockM, kBlockN>(p, schedule, index, w);
            if (w.has_rows || !w.valid) mbarrier_arrive(shared_address(smem.work_full) + 8 * work.slot);
            if (schedule.order == WorkOrder::kCounter) index = gridDim.x + atomicAdd(schedule.counter, 1);
            else index += gridDim.x;
        }
        bar_sync(kProducer, 128);
        if (!w.valid) return;
        if (!w.has_rows) continue;
        work.next(WgmmaSmem<T, kId>::kWorkSlots);
        PageCopies<T, kBlockN> rows{p, 0, 0};
        uint32_t landing = 0;  // the barrier of the newest tile's copies, which may still be on their way
        // After each tile's copies, with its barrier: says of the tile before it that it has landed.
        const auto issued = [&](uint32_t barrier) {
            cp_async_commit();
            cp_async_wait_group<1>();
            fence_proxy_async();
            __syncwarp();
            if (landing && arrives(threadIdx.x % 32)) mbarrier_arrive(landing);
            landing = barrier;
        };
        const auto load_k = [&](const Ring& at) {
            mbarrier_wait(shared_address(smem.k_empty) + 8 * at.slot, at.phase ^ 1);
            rows.template copy<kPlan.columns() / kChunkColumns>(
                shared_address(smem.k[at.slot]), static_cast<const T*>(p.k.data) + w.head / p.group * p.k.head, p.k, p.headdim);
            issued(shared_address(smem.k_full) + 8 * at.slot);
        };
        const auto load_v = [&](const Ring& at, const PageCopies<T, kBlockN>& rows) {
            mbarrier_wait(shared_address(smem.v_empty) + 8 * at.slot, at.phase ^ 1);
            rows.template copy<kPlan.columns_v() / kChunkColumns>(
                shared_address(smem.v[at.slot]), static_cast<const T*>(p.v.data) + w.head / p.group * p.v.head, p.v, p.headdim_v);
            issued(shared_address(smem.v_full) + 8 * at.slot);
        };
        int tile = w.last_tile;
        rows.find(w, tile);
        load_k(ring);                           // does not wait for the Q buffer
        PageCopies<T, kBlockN> next{p, 0, -1};  // looked up while copies are issued
        next.find(w, tile - 1);
        mbarrier_wait(q_empty, q_phase ^ 1);
        q_phase ^= 1;
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(q_full, kPlan.warpgroups * kSlabBytes);
#pragma unroll 1
            for (int slab = 0; slab < kPlan.warpgroups; ++slab)
#pragma unroll 1
                for (int c = 0; c < schedule.q_loads; ++c)
                    tma_load(shared_address(smem.q) + slab * kSlabBytes + c * 64 * kChunkRowBytes, &map_q, q_full, c * kChunkColumns,
                             w.row0 + slab * 64, 0, w.head, w.batch, kEvictFirst);
        }
        __syncwarp();
        while (tile > w.first_tile) {  // K one tile ahead of V
            const int page_v = rows.page, row_v = rows.row;
            rows.page = next.page, rows.row = next.row;
            Ring ahead = ring;
            ahead.next(kStages);
            load_k(ahead);
            next.find(w, --tile - 1);
            load_v(ring, PageCopies<T, kBlockN>{p, page_v, row_v});
            ring = ahead;
        }
        load_v(ring, rows);
        ring.next(kStages);
        cp_async_wait_all();
        fence_proxy_async();
        __syncwarp();
        if (arrives(threadIdx.x % 32)) mbarrier_arrive(landing);
    }
}

// Box by box. A thread has one box of a tile at most.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void produce_boxes(const CUtensorMap& map_q, const CUtensorMap& map_k, const CUtensorMap& map_v,
                                              const AttentionParams& p, const WgmmaSchedule& schedule, WgmmaSmem<T, kId>& smem) {
    constexpr WgmmaPlan kPlan = wgmma_plan(kId);
    constexpr int kBlockM = kPlan.block_m(), kBlockN = kPlan.block_n, kStages = kPlan.stages;
    constexpr int kChunks = kPlan.columns() / kChunkColumns, kChunksV = kPlan.columns_v() / kChunkColumns;
    static_assert(kBlockN / 8 * (kChunks > kChunksV ? kChunks : kChunksV) <= 128, "a box a thread");
    constexpr uint32_t kSlabBytes = sizeof(smem.q[0]);
    const uint32_t q_full = shared_address(&smem.q_full), q_empty = shared_address(&smem.q_empty);
    const int box = threadIdx.x % 32 * 4 + threadIdx.x / 32, boxes = kBlockN / schedule.page_boxes;
    const int chunk = box / boxes, box_row = (box - chunk * boxes) * schedule.page_boxes;
    Ring ring, work;
    uint32_t q_phase = 0;
    for (int index = blockIdx.x;; bar_sync(kProducer, 128)) {  // thread 0 finds the work, whose slot nobody reads any more
        WgmmaItem& w = smem.work[work.slot];
        mbarrier_wait(shared_address(smem.work_empty) + 8 * work.slot, work.phase ^ 1);
        if (threadIdx.x == 0) {
            w.has_rows = find_work<kBlockM, kBlockN>(p, schedule, index, w);
            if (w.has_rows || !w.valid) mbarrier_arrive(shared_address(smem.work_full) + 8 * work.slot);
            if (schedule.order == WorkOrder::kCounter) index = gridDim.x + atomicAdd(schedule.counter, 1);
            else index += gridDim.x;
        }
        bar_sync(kProducer, 128);
        if (!w.valid) return;
        if (!w.has_rows) continue;
        work.next(WgmmaSmem<T, kId>::kWorkSlots);
        const int head = w.head / p.group;
        struct Place {
            int page, row;
        };
        // The table's entry, not yet looked at, and the row in that page; row -1: past the sequence.
        const auto find = [&](int key) {
            Place at{0, -1};
            if (key < 0 || key >= w.seqlen_k) return at;
            const int index = key / p.cache.page_size;
            at.page = p.cache.block_table[w.batch * p.cache.table_row + index], at.row = key - index * p.cache.page_size;
            return at;
        };
        const auto load = [&](const CUtensorMap& map, int chunks, uint32_t tile, uint32_t full, const Place& at) {
            if (threadIdx.x == 0) mbarrier_arrive_expect_tx(full, chunks * kBlockN * kChunkRowBytes);
            const int page = at.row < 0 ? p.cache.entries : clamp_to(at.page, 0, p.cache.entries - 1);  // past the sequence: zeros
            if (chunk < chunks)
                tma_load(tile + (chunk * kBlockN + box_row) * kChunkRowBytes, &map, full, chunk * kChunkColumns, at.row, 0, head, page);
            __syncwarp();
        };
        const auto load_k = [&](const Ring& at, const Place& place) {
            mbarrier_wait(shared_address(smem.k_empty) + 8 * at.slot, at.phase ^ 1);
            load(map_k, kChunks, shared_address(smem.k[at.slot]), shared_address(smem.k_full) + 8 * at.slot, place);
        };
        const auto load_v = [&](const Ring& at, const Place& place) {
            mbarrier_wait(shared_address(smem.v_empty) + 8 * at.slot, at.phase ^ 1);
            load(map_v, kChunksV, shared_address(smem.v[at.slot]), shared_address(smem.v_full) + 8 * at.slot, place);
        };
        int key = w.last_tile * kBlockN + box_row;
        Place place = find(key);
        load_k(ring, place);                // does not wait for the Q buffer
        Place next = find(key -= kBlockN);  // looked up while a tile is on its way
        mbarrier_wait(q_empty, q_phase ^ 1);
        q_phase ^= 1;
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(q_full, kPlan.warpgroups * kSlabBytes);
#pragma unroll 1
            for (int slab = 0; slab < kPlan.warpgroups; ++slab)
#pragma unroll 1
                for (int c = 0; c < schedule.q_loads; ++c)
                    tma_load(shared_address(smem.q) + slab * kSlabBytes + c * 64 * kChunkRowBytes, &map_q, q_full, c * kChunkColumns,
                             w.row0 + slab * 64, 0, w.head, w.batch, kEvictFirst);
        }
        __syncwarp();
#pragma unroll 1
        for (int tile = w.last_tile; tile > w.first_tile; --tile) {  // K one tile ahead of V
            const Place place_v = place;
            place = next;
            Ring ahead = ring;
            ahead.next(kStages);
            load_k(ahead, place);
            next = find(key -= kBlockN);
            load_v(ring, place_v);
            ring = ahead;
        }
        load_v(ring, place);
        ring.next(kStages);
    }
}

}  // namespace fa
