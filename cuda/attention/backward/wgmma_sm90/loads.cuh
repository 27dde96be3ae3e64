// wgmma_sm90/loads.cuh: the loading threads of the Hopper backward: tiles of K and V once, tiles of Q and dout in the order of the walk.
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// One thread loads `rows` rows, from `row` on, to `tile`, in `loads` boxes. `first` is the first 64-column chunk to load.
__device__ __forceinline__ void load_tile(const CUtensorMap& map, int loads, int first, const void* tile, uint32_t rows, uint32_t barrier,
                                          int row, int head, int batch, uint64_t policy) {
#pragma unroll 1
    for (int c = 0; c < loads; ++c)
        tma_load(shared_address(tile) + c * rows * kChunkRowBytes, &map, barrier, (first + c) * kChunkColumns, row, 0, head, batch, policy);
}
// One thread loads a tile of Q with its lse, or of dout with its delta, into the slot of iteration `it`.
template <typename T, int kStages, int kCount, int kBlockM>
__device__ __forceinline__ void load_query_tile(const CUtensorMap& map, int loads, T (&tiles)[kStages][kCount], const float* rows,
                                                float (&statistics)[kStages][kBlockM], uint64_t (&full)[kStages],
                                                uint64_t (&empty)[kStages], uint32_t it, int row, int head, int batch, uint32_t tile) {
    const uint32_t slot = it % kStages, barrier = shared_address(&full[slot]);
    mbarrier_wait(shared_address(&empty[slot]), it / kStages & 1 ^ 1);
    mbarrier_arrive_expect_tx(barrier, sizeof tiles[0] + sizeof statistics[0]);
    load_tile(map, loads, 0, tiles[slot], kBlockM, barrier, row, head, batch, kEvictLast);
    bulk_load(shared_address(statistics[slot]), rows + int64_t(tile) * kBlockM, sizeof statistics[0], barrier);
}
// The same for all query tiles of the block. describe(it, at) is called before each load.
template <typename Work, typename T, int kStages, int kCount, int kBlockM, typename Describe>
__device__ __forceinline__ void load_query_tiles(const AttentionParams& p, const BackwardSchedule& schedule, const Work& w,
                                                 const CUtensorMap& map, int loads, T (&tiles)[kStages][kCount], const float* rows,
                                                 float (&statistics)[kStages][kBlockM], uint64_t (&full)[kStages],
                                                 uint64_t (&empty)[kStages], const Describe& describe) {
    for_each_query_tile(p, schedule.tiles, w, [&](uint32_t it, auto at, uint32_t tile) {
        describe(it, at, tile);
        const int row = w.q_row + at.m * kBlockM, head = w.head_k * p.group + at.head, batch = p.cu_seqlens_q ? 0 : w.batch;
        load_query_tile(map, loads, tiles, rows, statistics, full, empty, it, row, head, batch, tile);
    });
}

// One thread loads the bias of a tile of Q and the block's keys, from `row` and `key` on, into the slot of iteration `it`.
template <BackwardPlanId kId, typename T, int kStages, int kCount, typename Barriers>
__device__ __forceinline__ void load_bias(const CUtensorMap& map, const AttentionParams& p, T (&tiles)[kStages][kCount], Barriers& barriers,
                                          uint32_t it, int row, int key, int head, int batch) {
    constexpr int kPlaces = kBackwardPlan<kId>.bias_float32 ? 2 : 1;  // of 16 bits in an element
    constexpr uint32_t kChunks = kPlaces * kBackwardPlan<kId>.block_n / kChunkColumns,
                       kChunkBytes = kBackwardPlan<kId>.block_m * kChunkRowBytes;
    const uint32_t slot = it % kStages, full = shared_address(&barriers.full[slot]);
    mbarrier_wait(shared_address(&barriers.empty[slot]), it / kStages & 1 ^ 1);
    mbarrier_arrive_expect_tx(full, kChunks * (p.bias.row ? kChunkBytes : uint32_t(kChunkRowBytes)));
#pragma unroll 1
    for (uint32_t c = 0; c < kChunks; ++c)
        tma_load(shared_address(tiles[slot]) + c * kChunkBytes, &map, full, kPlaces * key + c * kChunkColumns, p.bias.row ? row : 0, 0,
                 p.bias.head ? head : 0, p.bias.batch ? batch : 0);
}

}  // namespace fa
