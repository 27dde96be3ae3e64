// mbarrier_sm80.cuh: the mbarrier operations that every GPU from sm_80 on has; ptx.cuh has those of sm_90.
// https://docs.nvidia.com/cuda/parallel-thread-execution: mbarrier.test_wait, cp.async.mbarrier.arrive.
#pragma once

#include <cstdint>

namespace fa {

// mbarrier.test_wait: mbarrier_wait as a busy loop.
__device__ __forceinline__ void mbarrier_spin(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "retry:\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra retry;\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}
// cp.async.mbarrier.arrive.noinc: one arrival, once all copies that this thread started with cp.async have landed.
__device__ __forceinline__ void cp_async_mbarrier_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace fa
