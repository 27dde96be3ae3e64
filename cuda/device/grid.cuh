// grid.cuh: a barrier over all blocks of a cooperative launch. It works like the grid barrier of cooperative groups and uses the same word
// of the driver, but some warps of a block can wait while the others run on.
#pragma once

#include <cooperative_groups.h>

#include <cstdint>

#include "device/ptx.cuh"

namespace fa {

// The word counts arrivals. The last arrival flips its highest bit and leaves the other bits zero.
class GridBarrier {
public:
    // Called by one thread of each block, after earlier launches have ended and before it arrives: the bit cannot flip without it.
    __device__ __forceinline__ void begin() {
        word_ = &cooperative_groups::details::get_grid_workspace()->barrier;
        round_ = load_acquire(word_) & kFlip;
    }
    // Called by that thread after a barrier of its block. What the block's threads wrote before is visible to everyone who has waited.
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
