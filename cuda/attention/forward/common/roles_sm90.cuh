// roles_sm90.cuh: how the warpgroups of a block of the Hopper forward kernels wait for each other. Warpgroup 0 produces; the others
// consume.
#pragma once

#include "device/ptx.cuh"

namespace fa {

// Named barriers. 0 is __syncthreads.
enum RoleBarrier : int {
    kTurn = 1,       // 1, 2, 3: a consumer warpgroup's turn to issue products
    kWarpgroup = 4,  // 4, 5, 6: the threads of one consumer warpgroup
    kConsumers = 7,  // all consumers
    kProducer = 8    // the producer's warpgroup
};

// The consumer warpgroups take turns to issue their products, so that the softmax of one runs under the products of the others. Each ends
// its turn by arriving at the barrier of the next; the last one arrives at that of warpgroup 0.
template <bool kPingPong>
__device__ __forceinline__ void take_turn(int wg) {
    if (kPingPong) bar_sync(kTurn + wg, 256);
}
template <bool kPingPong, int kWarpgroups>
__device__ __forceinline__ void give_turn(int wg) {
    if (kPingPong) bar_arrive(kTurn + (wg + 1) % kWarpgroups, 256);
}

}  // namespace fa
