// grid.cuh: the blocks of a cooperative launch wait for each other. It is cooperative groups' barrier of a grid, in the word that the
// driver provides for it, but a part of a block's warps can wait while others run on.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace fa {

// The word counts arrivals; the last one of all flips its highest bit and leaves the others zero.
class GridBarrier {
public:
    // One thread of each block, when the launches before have ended and before it arrives: without it the bit cannot flip.
    __device__ __forceinline__ void begin() {
        word_ = &cooperative_groups::details::get_grid_workspace()->barrier;
        round_ = load_acquire(word_) & kFlip;
    }
    // That thread, behind a barrier of the block: what its threads wrote before is visible to all who have waited.
    __device__ __forceinline__ void arrive() { add_release(word_, blockIdx.x == 0 ? kFlip - (gridDim.x - 1) : 1u); }
    __device__ __forceinline__ void wait() {
        while ((load_acquire(word_) & kFlip) == round_) {
        }
        round_ ^= kFlip;
    }

private:
    static constexpr uint32_t kFlip = 0x80000000u;
    uint32_t* word_ = nullptr;
    uint32_t round_ = 0;
};

}  // namespace fa
