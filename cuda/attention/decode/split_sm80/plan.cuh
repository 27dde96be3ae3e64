// split_sm80/plan.cuh: the tiles of decode_split_sm80, a block's shared memory, and the segment of the schedule that a warp works on.
#pragma once

#include "attention/common/shared_tile.cuh"
#include "attention/decode/common/decode.h"
#include "attention/decode/common/scores.cuh"

#include <type_traits>

namespace fa {
namespace {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps, kMaxStages = 6;

// Element: the cache's type. kColumns: the bucket of the head dim. kTileRows: rows of q per tile, 16 or 64. kReadsScores: for the options
// of decode_reads_scores; such calls have no cache.
template <typename Element, int kColumns, int kTileRows, bool kReadsScores = false>
struct SplitPlan {
    using E = Element;
    static constexpr bool kBytes = sizeof(E) == 1, kGeneral = kReadsScores;
    static_assert(!(kBytes && kGeneral), "calls with a cache have none of these options");
    // General scores stay in natural units, where a mask written as a bias of -FLT_MAX does not overflow.
    static constexpr ScoreUnit kUnit = kGeneral ? ScoreUnit::kNatural : ScoreUnit::kLog2;
    using Mma = std::conditional_t<kBytes, __half, E>;  // what the tensor cores multiply
    using Tile = SharedTile<E, kColumns>;
    using TileQ = SharedTile<__half, kColumns>;  // of 16-bit values
    static constexpr int kD = kColumns, kRows = kTileRows;
    static_assert(kRows == 16 || kRows == 64, "a warp has 16 rows: all of the tile, or a quarter");
    // A tile of keys has one part per warp. With 16 rows a warp attends to its own part; with 64 every warp attends to all parts.
    static constexpr bool kSharedParts = kRows == 64;
    static constexpr int kPartKeys = kBytes || kD <= 64 ? 32 : 16, kKeys = kDecodeWarps * kPartKeys;
    static constexpr int kSources = kSharedParts ? 1 : kDecodeWarps;  // warps whose O of a row is added up
    // Tiles of the products: 8 keys, 8 columns of V, 16 columns of K.
    static constexpr int kTilesN = kPartKeys / 8, kTilesV = kD / 8, kStepsD = kD / 16;
    static constexpr bool kQueryInRegisters = kD <= 128;
    // O fills the registers: data needed only before and after the tiles waits in shared memory.
    static constexpr bool kRegistersFull = kD > 128;

    static constexpr int kPartBytes = 2 * kPartKeys * Tile::kPitch;     // K, then V
    static constexpr int kScaleBytes = kBytes ? 2 * kPartKeys * 4 : 0;  // factors of K's keys, then of V's
    static constexpr int kStageBytes = kDecodeWarps * (kPartBytes + kScaleBytes);
    static constexpr int kQueryBytes = kRows * kD * 2;
    static_assert(16 * kD * 4 <= kPartBytes, "O of a warp fits in its part of a stage");
    // As many stages as fit on an SM of 228 KB, next to another block or alone.
    static constexpr int kBlocksPerSm = kD <= 128 ? 2 : 1, kMostBytes = (kBlocksPerSm == 2 ? 112 : 225) << 10;
    static int stages(size_t shared_memory) {
        const int room = (shared_memory - 1024 < size_t(kMostBytes) ? int(shared_memory) - 1024 : kMostBytes) - kQueryBytes;
        const int stages = room / kStageBytes;
        return stages < kMaxStages ? stages : kMaxStages;
    }
};

// A thread's place, and the block's shared memory:
//     stages x (4 parts x (K kPartKeys x d | V kPartKeys x d) | 4 x the factors of their keys) | Q rows x d
// At the end of a segment, O of each warp lies in its part of stage 0.
template <typename Plan>
struct SplitPlace {
    int lane, warp;
    uint32_t ring;
    int stages;  // of the ring

    __device__ __forceinline__ int warp_row() const { return Plan::kSharedParts ? 16 * warp : 0; }  // the warp's first row in the tile
    __device__ __forceinline__ uint32_t q_tile() const { return ring + stages * uint32_t(Plan::kStageBytes); }
    __device__ __forceinline__ uint32_t part(int slot, int part) const {
        return ring + slot * uint32_t(Plan::kStageBytes) + part * uint32_t(Plan::kPartBytes);
    }
    __device__ __forceinline__ uint32_t scales(int slot, int part) const {
        return ring + slot * uint32_t(Plan::kStageBytes) + kDecodeWarps * Plan::kPartBytes + part * uint32_t(Plan::kScaleBytes);
    }
    // Lets the warps that read a part wait for each other.
    __device__ __forceinline__ void meet() const {
        if (Plan::kSharedParts) __syncthreads();
        else __syncwarp();
    }
};

// The segment that a block works on, and the keys of its sequence.
struct SplitWork {
    Segment segment;
    SequenceKeys keys;
    int head_k, row_tile0;  // the key head; the first of its rows in this tile
};

// SplitWork, read again whenever it is needed: from registers or, where these are full, from shared memory.
template <typename Plan>
class SplitWorkAt {
public:
    // `kept`: shared memory for one SplitWork per warp.
    __device__ __forceinline__ SplitWorkAt(const SplitPlace<Plan>& place, const SplitWork& work, SplitWork* kept)
        : work_(work), kept_(kept), warp_(place.warp) {
        if (!Plan::kRegistersFull) return;
        if (place.lane == 0) kept[place.warp] = work;  // the same in every lane
        __syncwarp();
    }
    __device__ __forceinline__ int b() const { return Plan::kRegistersFull ? here()->segment.b : work_.segment.b; }
    __device__ __forceinline__ int head_k() const { return Plan::kRegistersFull ? here()->head_k : work_.head_k; }
    __device__ __forceinline__ int row_tile0() const { return Plan::kRegistersFull ? here()->row_tile0 : work_.row_tile0; }
    __device__ __forceinline__ SequenceKeys keys() const { return Plan::kRegistersFull ? here()->keys : work_.keys; }
    // The segment's tiles, counted from the sequence's first key.
    __device__ __forceinline__ int first_tile() const { return keys().first_tile + segment().begin; }
    __device__ __forceinline__ int end_tile() const { return keys().first_tile + segment().end; }
    __device__ __forceinline__ Segment segment() const { return Plan::kRegistersFull ? here()->segment : work_.segment; }

private:
    __device__ __forceinline__ const SplitWork* here() const { return opaque(static_cast<const SplitWork*>(kept_)) + warp_; }
    SplitWork work_;
    const SplitWork* kept_;
    int warp_;
};

}  // namespace
}  // namespace fa
