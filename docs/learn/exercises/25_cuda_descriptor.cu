// 25_cuda_descriptor.cu: one product of Hopper's tensor cores, C = A B^T with A and B of 64 x 64 bf16. wgmma reads both from shared memory,
// and learns from a 64-bit descriptor how they lie there. The slow lines multiply without it. The exercise and its judge are in
// 25_cuda_descriptor.py.
#include "cuda_tools.cuh"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

constexpr int kSize = 64, kTileBytes = kSize * kSize * 2;

// The descriptor of columns 16 * step to 16 * step + 15 of a tile at shared address `tile`, a multiple of 1024. Rows have 128 bytes and lie
// in the 128-byte swizzle: piece j of row r at piece j ^ (r & 7).
__host__ __device__ inline uint64_t descriptor(uint32_t tile, int step) {
#ifdef SLOW
    return 0 * (tile + step);
#else
    (void)tile, (void)step;
    return 0;  // yours: kNotWritten
#endif
}

extern "C" uint64_t descriptor_on_host(uint32_t tile, int step) { return descriptor(tile, step); }

__global__ void __launch_bounds__(128) product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c) {
    __shared__ alignas(1024) unsigned char smem[2 * kTileBytes];
    const uint32_t tile_a = fa::shared_address(smem), tile_b = tile_a + kTileBytes;
    for (uint32_t i = threadIdx.x; i < kSize * 8; i += 128) {
        fa::store_shared_16(tile_a + fa::swizzled_offset(kSize, i / 8, i % 8), reinterpret_cast<const uint4*>(a)[i]);
        fa::store_shared_16(tile_b + fa::swizzled_offset(kSize, i / 8, i % 8), reinterpret_cast<const uint4*>(b)[i]);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // ordinary stores, then reads by the tensor cores
    __syncthreads();
    float d[kSize / 2];
#ifdef SLOW
    for (int i = 0; i < kSize / 2; ++i) {
        d[i] = 0;
        const int row = fa::accumulator_row(threadIdx.x, i), column = fa::accumulator_column(threadIdx.x, i);
        for (int k = 0; k < kSize; ++k) d[i] = fmaf(__bfloat162float(a[row * kSize + k]), __bfloat162float(b[column * kSize + k]), d[i]);
    }
#else
    for (int i = 0; i < kSize / 2; ++i) d[i] = 0;
    fa::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSize / 16; ++step)
        fa::wgmma_ss<__nv_bfloat16, kSize>(d, descriptor(tile_a, step), descriptor(tile_b, step), 1);
    fa::wgmma_commit();
    fa::wgmma_wait<0>(d);
#endif
    for (int i = 0; i < kSize / 2; ++i) c[fa::accumulator_row(threadIdx.x, i) * kSize + fa::accumulator_column(threadIdx.x, i)] = d[i];
}

static void launch(const Arguments& a) {
    product<<<1, 128>>>((const __nv_bfloat16*)a.in[0], (const __nv_bfloat16*)a.in[1], (float*)a.out[0]);
}
