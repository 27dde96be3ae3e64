// cluster.cuh: blocks that run at the same time and reach into each other's shared memory (sm_90; nothing elsewhere, where no kernel is
// launched with a cluster). https://docs.nvidia.com/cuda/parallel-thread-execution: barrier.cluster, mapa, st.
#pragma once

#include <cstdint>

namespace fa {

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t x = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
#endif
    return x;
}
// barrier.cluster: every thread of every block arrives, and waits. What a thread wrote before it arrived, in any block's shared memory,
// is visible to all behind the wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// mapa: where what this block has at `shared` lies in the block of that rank.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
    uint32_t x = shared;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(shared), "r"(rank));
#endif
    return x;
}
// st.shared::cluster
__device__ __forceinline__ void store_cluster_16(uint32_t address, float4 x) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
#endif
}
__device__ __forceinline__ void store_cluster_8(uint32_t address, float x, float y) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
#endif
}

}  // namespace fa
