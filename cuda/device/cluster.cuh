// cluster.cuh: thread block clusters, whose blocks run at the same time and reach each other's shared memory. On architectures below sm_90
// these functions do nothing; no kernel is launched with a cluster there. https://docs.nvidia.com/cuda/parallel-thread-execution:
// barrier.cluster, mapa, st.
#pragma once

#include <cstdint>

namespace fa {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t x = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(x));
#endif
    return x;
}
// barrier.cluster: every thread of every block arrives and waits. This relaxed arrival does not order ordinary writes (an arrival that does
// is a fence of the whole GPU). Barriers initialised before it (fence_mbarrier_init) are ready after the wait.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
// The releasing arrival: what a thread wrote before it, in any block's shared memory, is visible after the wait.
__device__ __forceinline__ void cluster_arrive_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// mapa: the address, in the block of the given rank, of what lies at `shared` in this block.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
    uint32_t x = shared;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(x) : "r"(shared), "r"(rank));
#endif
    return x;
}
// mapa: the same object in the block of the given rank, for ordinary reads and writes.
template <typename T>
__device__ __forceinline__ T& cluster_object(T& shared, uint32_t rank) {
    uint64_t x = reinterpret_cast<uint64_t>(&shared);
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(x) : "l"(x), "r"(rank));
#endif
    return *reinterpret_cast<T*>(x);
}
// st.async: an asynchronous store to another block's shared memory. `barrier`, an mbarrier of that block, counts its bytes.
__device__ __forceinline__ void store_async_16(uint32_t address, float4 x, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "f"(x.x),
                 "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
                 : "memory");
#endif
}
__device__ __forceinline__ void store_async_16(uint32_t address, const uint32_t (&x)[4], uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(barrier)
                 : "memory");
#endif
}
__device__ __forceinline__ void store_async_8(uint32_t address, float x, float y, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address), "f"(x), "f"(y),
                 "r"(barrier)
                 : "memory");
#endif
}
// mbarrier_wait for data that other blocks have sent.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// ld.shared::cluster
__device__ __forceinline__ float4 load_cluster_16(uint32_t address) {
    float4 x = make_float4(0, 0, 0, 0);
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
#endif
    return x;
}
// mbarrier.arrive on a barrier of any block of the cluster. Use it to say that something has been read, or to announce bytes. It is not
// meant to order ordinary writes between blocks, which would take a fence of the whole GPU.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t address) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx_cluster(uint32_t address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
#endif
}
// cp.async.bulk from this block's shared memory to that of any block of the cluster; `barrier`, in the receiving block, counts the bytes.
__device__ __forceinline__ void bulk_copy_cluster(uint32_t address, uint32_t shared, uint32_t bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address), "r"(shared),
                 "r"(bytes), "r"(barrier)
                 : "memory");
#endif
}

}  // namespace fa
