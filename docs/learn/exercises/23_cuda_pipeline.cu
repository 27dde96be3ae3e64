// 23_cuda_pipeline.cu: a block reads tile after tile and computes with each. The slow lines copy a tile, wait for it, and then compute.
// Yours keep kStages - 1 copies under way while they compute. The exercise and its judge are in 23_cuda_pipeline.py.
#include "cuda_tools.cuh"
#include "device/mma.cuh"

constexpr int kThreads = 128, kFloats = 4 * kThreads, kStages = 4;  // floats of a tile: one copy of 16 bytes for each thread

// Each thread brings its 16 bytes of a tile; past the last tile it brings nothing, but the group that it commits counts.
__device__ __forceinline__ void copy_tile(float* stage, const float* x, int tile, int tiles) {
    if (tile < tiles) fa::cp_async_16(fa::shared_address(stage + 4 * threadIdx.x), x + (size_t)tile * kFloats + 4 * threadIdx.x, 16);
    fa::cp_async_commit();
}

// Every thread uses numbers that other threads have copied.
__device__ __forceinline__ float work(const float* stage) {
    float sum = 0;
#pragma unroll 8
    for (int i = 0; i < 64; ++i) sum = fmaf(sum, 0.5f, stage[(threadIdx.x + 4 * i) % kFloats]);
    return sum;
}

// x (blocks, tiles, kFloats) -> y (blocks, kThreads): the sum of work() over the block's tiles.
__global__ void __launch_bounds__(kThreads) stream(const float* x, float* y, int tiles) {
    __shared__ alignas(16) float stages[kStages][kFloats];
    x += (size_t)blockIdx.x * tiles * kFloats;
    float sum = 0;
#ifdef SLOW
    for (int tile = 0; tile < tiles; ++tile) {
        copy_tile(stages[0], x, tile, tiles);
        fa::cp_async_wait_group<0>();
        __syncthreads();
        sum += work(stages[0]);
        __syncthreads();
    }
#else
    (void)x, (void)tiles, (void)stages;  // yours: kNotWritten
#endif
    y[blockIdx.x * kThreads + threadIdx.x] = sum;
}

static void launch(const Arguments& a) { stream<<<a.sizes[0], kThreads>>>((const float*)a.in[0], (float*)a.out[0], a.sizes[1]); }
