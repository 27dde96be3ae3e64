// ring.cuh: one thread's position in a ring of shared-memory buffers. Each buffer has a full and an empty mbarrier.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {

// The threads that fill a ring and those that empty it start at slot 0, phase 0, and never reset. A barrier tells its phase by one bit. So
// a thread that waits for a buffer has to wait for each of its phases, and the barrier must not complete the phase after the awaited one
// without the thread's arrival or copy. Otherwise the thread mistakes one phase for another, or waits for one that has passed.
template <int kSlots>
struct Ring {
    uint32_t full, empty;  // shared addresses of the barriers of slot 0
    uint32_t slot, phase;

    // Starts `count` buffers after the first. Where registers are scarce, the positions in several rings can be derived from one count.
    __device__ __forceinline__ Ring(const uint64_t (&full)[kSlots], const uint64_t (&empty)[kSlots], uint32_t count = 0)
        : full(shared_address(full)), empty(shared_address(empty)), slot(count % kSlots), phase(count / kSlots % 2) {}

    __device__ __forceinline__ uint32_t full_barrier() const { return full + 8 * slot; }
    __device__ __forceinline__ uint32_t empty_barrier() const { return empty + 8 * slot; }
    __device__ __forceinline__ void wait_full() const { mbarrier_wait(full_barrier(), phase); }
    __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty_barrier(), phase ^ 1); }
    __device__ __forceinline__ void next() {
        if (++slot == kSlots) slot = 0, phase ^= 1;
    }
    // The warp has read the buffer: it may be filled again.
    __device__ __forceinline__ void release(int lane) {
        if (arrives(lane)) mbarrier_arrive(empty_barrier());
        next();
    }
};

}  // namespace fa
