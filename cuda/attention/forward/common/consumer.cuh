// consumer.cuh: the position of a consumer thread in the Hopper forward kernels, and its Q as A operand.
#pragma once

#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// A consumer thread's position. It has rows g and g + 8 of its warp's sixteen, lane = 4 g + quad.
struct Consumer {
    int wg, warp, lane;

    __device__ __forceinline__ int quad() const { return lane % 4; }
    __device__ __forceinline__ int row() const { return wg * 64 + warp * 16 + lane / 4; }  // row g, counted from the block's first row
    // For code that few tiles run: the compiler cannot hoist addresses built from this copy out of the main loop.
    __device__ __forceinline__ Consumer rare() const { return {wg, warp, opaque(lane)}; }
};

// Loads Q's 64 rows from shared memory as A operand.
template <int kCount>
__device__ __forceinline__ void load_q_fragment(uint32_t (&q_fragment)[kCount], uint32_t slab, const Consumer& me) {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
        ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(q_fragment[4 * i]),
                    slab + swizzled_offset(64, me.warp * 16 + me.lane % 16, 2 * i + me.lane / 16));
}

}  // namespace fa
