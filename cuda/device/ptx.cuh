// ptx.cuh: Hopper's asynchronous copies and barriers, one function per instruction, named after its mnemonic.
// Shared-memory addresses are uint32_t. Whatever orders memory tells the compiler so with a "memory" clobber.
// https://docs.nvidia.com/cuda/parallel-thread-execution: mbarrier, cp.async.bulk.tensor, barrier, setmaxnreg.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fa {

// ---- mbarrier: a phase ends when `count` arrivals and all announced bytes have come in ----

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Makes initialised barriers visible to the copy engine; a block barrier must follow before other threads use them.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// True in the lanes that arrive for their warp: lane 0, after a __syncwarp. racecheck of compute-sanitizer does not follow that order and
// reports accesses after the wait, so in a build for racecheck every lane arrives.
#ifdef FLASH_ATTN_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ bool arrives(int lane) { return kWarpArrivals > 1 || lane == 0; }
// One arrival that also announces bytes still to be written by copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Waits until the phase with this parity has completed. A fresh barrier counts its previous phase, parity 1, as complete.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"  // suspends the thread for a limited time, then returns the state
        "@!done bra retry;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// Whether that phase has completed, without waiting.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// ---- named barriers: 1 .. 15 (0 is __syncthreads); `threads` counts both the threads that wait and those that only arrive ----

__device__ __forceinline__ void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// ---- tensor memory access ----

// createpolicy.fractional of the whole access: data read once should leave L2 first, data that many blocks read should stay.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;

// Copies a box of a five-dimensional tensor map to shared memory. The barrier receives the bytes of the whole box, also those out of
// bounds.
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4,
                                         uint64_t policy) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2], %8;" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void tma_load(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3,
                                         int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
// Copies a box to the same address in several blocks of the cluster, those whose bit is set in `blocks`. In each of them, the barrier at
// the same address receives the bytes.
__device__ __forceinline__ void tma_load_multicast(uint32_t shared, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2,
                                                   int c3, int c4, uint16_t blocks) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(blocks)
        : "memory");
}
// Copies a box from shared memory; elements out of bounds are not written. Part of the thread's bulk group.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t shared, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map), "r"(shared), "r"(c0),
                 "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// cp.async.bulk: copies contiguous bytes, a multiple of 16, from global to shared memory; the barrier receives them.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared), "l"(global),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(shared),
                 "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}
// cp.async.bulk.prefetch: brings the bytes to L2 only; nothing signals when they are there.
__device__ __forceinline__ void bulk_prefetch(const void* global, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}
// cp.reduce.async.bulk: adds floats in shared memory to as many in global memory.
__device__ __forceinline__ void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
                 : "memory");
}
// cp.async.bulk from shared to global memory: overwrites instead of adding.
__device__ __forceinline__ void bulk_store(void* global, uint32_t shared, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes) : "memory");
}
// red.global.add.v4.f32 from registers. Consecutive lanes of a warp should write consecutive 16 bytes: 512 contiguous bytes.
__device__ __forceinline__ void red_add_4(float* global, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's newest groups still read their source in shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until at most kPending of this thread's newest groups are unfinished; the writes of the finished ones are visible to this thread.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later reads by wgmma and the copy engine.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// stmatrix.x4: four 8 x 8 matrices of 16-bit values from registers; lanes 8m .. 8m + 7 give the addresses of the rows of matrix m
// (16 bytes each). Register m of a lane holds row lane / 4, columns 2 (lane % 4) and 2 (lane % 4) + 1, of matrix m.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, const uint32_t (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                 "r"(d[3])
                 : "memory");
}

// The same with every matrix transposed: register m of a lane holds rows 2 (lane % 4) and 2 (lane % 4) + 1 of column lane / 4.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t shared, const uint32_t (&d)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(d[0]), "r"(d[1]), "r"(d[2]),
                 "r"(d[3])
                 : "memory");
}

// ---- one block tells another, in global memory ----

// ld.acquire.gpu: what the releasing block wrote before it released the value is visible afterwards.
template <typename Int>
__device__ __forceinline__ Int load_acquire(const Int* global) {
    static_assert(sizeof(Int) == 4, "a word");
    uint32_t x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(global) : "memory");
    return Int(x);
}
// red.release.gpu.add
template <typename Int>
__device__ __forceinline__ void add_release(Int* global, Int x) {
    static_assert(sizeof(Int) == 4, "a word");
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}
// atom.acquire.gpu.cas: returns the old value and stores `value` if the old one was `expected`.
__device__ __forceinline__ int compare_exchange_acquire(int* global, int expected, int value) {
    int x;
    asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(x) : "l"(global), "r"(expected), "r"(value) : "memory");
    return x;
}
// fence.proxy.async: orders ordinary accesses and those of the copy engine, in global memory too.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async;" ::: "memory"); }

// ---- programmatic dependent launch (sm_90; elsewhere these do nothing and the launch is a plain one) ----

// griddepcontrol.launch_dependents: once every block has called this or ended, the next kernel of the stream may start, if it was launched
// programmatically.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// griddepcontrol.wait: waits until all kernels that this one depends on have ended and their writes are visible. Returns at once in a
// kernel that was launched plainly. Every thread that reads or writes memory that those kernels use has to call it first.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- prefetching ----

// prefetch.global.L2: the cache line around the address.
__device__ __forceinline__ void prefetch_l2(const void* global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

// ---- registers: setmaxnreg, by a whole warpgroup; registers freed by dec feed the inc of other warpgroups ----

template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- compiler and lanes ----

// The same value in a register about which the compiler knows nothing: addresses built from it are computed in the branch that uses them
// instead of being hoisted out of the loop around it.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

__device__ __forceinline__ uint32_t opaque(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
}

template <typename T>
__device__ __forceinline__ const T* opaque(const T* x) {
    asm volatile("" : "+l"(x));
    return x;
}

// 4 x 4 transpose among the four lanes of a quad: x[j] of lane i becomes x[i] of lane j.
__device__ __forceinline__ void transpose_quad(uint32_t (&x)[4], int quad) {
    const bool odd = quad & 1, high = quad & 2;
    const uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    if (odd) x[0] = a, x[2] = b;
    else x[1] = a, x[3] = b;
    const uint32_t c = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2), d = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
    if (high) x[0] = c, x[1] = d;
    else x[2] = c, x[3] = d;
}

}  // namespace fa
