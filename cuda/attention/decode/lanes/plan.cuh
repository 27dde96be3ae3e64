// lanes/plan.cuh: how the kernels of lanes/kernel.cuh divide rows, keys and columns among threads, and the layout of a block's shared
// memory.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/decode/lanes/params.h"

#include <cstdint>

namespace fa {
namespace {

constexpr int kLaneThreads = 32 * kLaneWarps, kMostCluster = 16;

// Element: the type of q and out. Cached: the type of K and V, the same or bytes. kColumns: the bucket of the head dim. kWarpRows: rows of
// q per warp, 1 or 4. With more rows, neighbouring warps take the same keys, which the second warp finds in L2. kNaturalScores: for calls
// of decode_scores_are_natural.
template <typename Element, int kColumns, int kWarpRows, typename Cached = Element, bool kNaturalScores = false>
struct LanePlan {
    static constexpr ScoreUnit kUnit = kNaturalScores ? ScoreUnit::kNatural : ScoreUnit::kLog2;
    static constexpr bool kNatural = kNaturalScores;
    using T = Element;
    using E = Cached;
    static constexpr bool kBytes = sizeof(E) == 1;
    static constexpr int kD = kColumns, kRows = kWarpRows;
    // A row of K or V in a warp.
    static constexpr int kVec = 16 / int(sizeof(E));                        // elements per copy
    static constexpr int kParts = kD > 32 * kVec ? kD / (32 * kVec) : 1;    // copies of a lane per key
    static constexpr int kLanes = kD / kVec / kParts, kKeys = 32 / kLanes;  // lanes per key; keys per pass
    static_assert(kLanes * kKeys == 32, "lanes share keys evenly");
    static constexpr int kDims = kVec * kParts;         // columns per lane
    static constexpr int kPartColumns = kLanes * kVec;  // distance from one part of a lane to its next
    // One group of passes is copied at a time.
    static constexpr int kAtOnce = kParts > 1 ? 1 : 2, kGroups = 3;  // passes per group; groups in flight
    static constexpr uint32_t kPartBytes = kLaneThreads * 16, kGroupBytes = kAtOnce * 2 * kParts * kPartBytes;
    static constexpr bool kQueryInRegisters = kRows == 1;
    // The launch bounds leave a thread as many registers as two blocks on a multiprocessor allow. With kBesideChain they claim 896 threads,
    // which gives 72 registers, so that the block also fits next to one of chain_w4_sm90.cu: where the two kernels follow each other
    // programmatically, the first keys have arrived before the products have ended. Both kernels must then ask for the same shared-memory
    // carveout (prefers_shared). Kernels of single products do not ask for it. Small models, whose heads are smaller, have those around
    // attention, and there a changing carveout took up to 10 % of a step of stories110M.
    static constexpr bool kBesideChain = sizeof(E) == 2 && kD == 128 && kRows == 1;
    static constexpr int kBoundThreads = kBesideChain ? 896 : kLaneThreads, kBoundBlocks = kBesideChain || kD * sizeof(T) > 512 ? 1 : 2;
};

// Byte offsets in a block's shared memory, for a tile of `rows` rows. The ring comes first:
//     ring groups x passes x (K | V) x parts x threads x 16 bytes | q (rows, d) float | new key, new value (d) |
//     O of each warp (kRows, d) float | received from the cluster (own rows, cluster, d) float
template <typename Plan>
struct LaneMemory {
    uint32_t q, added, o, received, bytes;
    __host__ __device__ LaneMemory(int rows, int cluster) {
        q = Plan::kGroups * Plan::kGroupBytes;
        added = q + rows * Plan::kD * 4;
        o = added + 2 * Plan::kD * uint32_t(sizeof(typename Plan::T));
        received = o + kLaneWarps * Plan::kRows * Plan::kD * 4;
        bytes = received + (cluster > 0 ? (rows + cluster - 1) / cluster * cluster * Plan::kD * 4 : 0);
    }
};

#if defined(__CUDACC__)

// A thread's place in its block.
template <typename Plan>
struct LanePlace {
    int lane, warp;
    int column;          // first column of this lane's part 0
    int key_warps;       // number of warps, or groups of warps, that divide the keys
    int row_warps;       // warps that share their keys, each with its own rows
    int tile_row;        // this warp's first row in the tile
    int key0, key_step;  // this lane's first key among those of the block; the step to the next pass

    __device__ __forceinline__ explicit LanePlace(const LaneParams& p) {
        lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = lane % Plan::kLanes * Plan::kVec;
        key_warps = 1 << p.key_warps_log, row_warps = kLaneWarps >> p.key_warps_log;
        tile_row = (warp & (row_warps - 1)) * Plan::kRows;
        key0 = (warp >> (3 - p.key_warps_log)) * Plan::kKeys + lane / Plan::kLanes, key_step = Plan::kKeys << p.key_warps_log;
    }
};

#endif

}  // namespace
}  // namespace fa
