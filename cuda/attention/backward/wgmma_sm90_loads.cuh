// wgmma_sm90_loads.cuh: the threads of the Hopper backward that load: tiles of K and V once, tiles of Q and dout in the order of the walk.
#pragma once

#include "attention/backward/wgmma_sm90_work.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// One thread loads `rows` rows from `row` on to `tile`, in `loads` boxes. `first` is the first 64-column chunk that is loaded.
__device__ __forceinline__ void load_tile(const CUtensorMap& map, int loads, int first, const void* tile, uint32_t rows, uint32_t barrier,
                                          int row, int head, int batch, uint64_t policy) {
#pragma unroll 1
    for (int c = 0; c < loads; ++c)
        tma_load(shared_address(tile) + c * rows * kChunkRowBytes, &map, barrier, (first + c) * kChunkColumns, row, 0, head, batch, policy);
}
// Calls visit(it, row, head, tile) for the block's query tiles in the order of the walk. it: the iteration, from it0 on. row and head:
// where the tile lies in Q and dout. tile: its number in QueryTiles.
template <typename Visit>
__device__ __forceinline__ void for_each_query_tile(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w, uint32_t it0,
                                                    const Visit& visit) {
    uint32_t it = it0;
    const int q_row = w.q_row, first_m = w.first_m, end_m = w.end_m,
              start_m = w.start_m;  // copies: shared memory is slow while products read it
    for (int head = w.head_k * p.group, end = head + p.group; head < end; ++head) {
        const int64_t first_tile = first_query_tile(p, tiles, w, head);
        for (int m = start_m, left = end_m - first_m; left > 0; --left, m = next_tile(m, first_m, end_m), ++it)
            visit(it, q_row + m * tiles.block_m, head, first_tile + m);
    }
}
// One thread loads a tile of Q with its lse, or of dout with its delta, into the slot of iteration `it`.
template <typename T, int kStages, int kCount, int kBlockM>
__device__ __forceinline__ void load_query_tile(const CUtensorMap& map, int loads, T (&tiles)[kStages][kCount], const float* rows,
                                                float (&statistics)[kStages][kBlockM], uint64_t (&full)[kStages],
                                                uint64_t (&empty)[kStages], uint32_t it, int row, int head, int batch, int64_t tile) {
    const uint32_t slot = it % kStages, barrier = shared_address(&full[slot]);
    mbarrier_wait(shared_address(&empty[slot]), it / kStages & 1 ^ 1);
    mbarrier_arrive_expect_tx(barrier, sizeof tiles[0] + sizeof statistics[0]);
    load_tile(map, loads, 0, tiles[slot], kBlockM, barrier, row, head, batch, kEvictLast);
    bulk_load(shared_address(statistics[slot]), rows + tile * kBlockM, sizeof statistics[0], barrier);
}
// The same for all query tiles of the block.
template <typename T, int kStages, int kCount, int kBlockM>
__device__ __forceinline__ void load_query_tiles(const AttentionParams& p, const BackwardSchedule& schedule, const BackwardWork& w,
                                                 const CUtensorMap& map, int loads, T (&tiles)[kStages][kCount], const float* rows,
                                                 float (&statistics)[kStages][kBlockM], uint64_t (&full)[kStages],
                                                 uint64_t (&empty)[kStages]) {
    const int batch = p.cu_seqlens_q ? 0 : w.batch;
    for_each_query_tile(p, schedule.tiles, w, 0, [&](uint32_t it, int row, int head, int64_t tile) {
        load_query_tile(map, loads, tiles, rows, statistics, full, empty, it, row, head, batch, tile);
    });
}

}  // namespace fa
