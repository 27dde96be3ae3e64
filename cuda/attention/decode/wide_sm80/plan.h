// wide_sm80/plan.h: the sizes of decode_wide_sm80 and a block's shared memory.
#pragma once

#include <cstddef>

namespace fa {

// The block's shared memory, drawn for two stages:
//     2 x (K 32 x 512 | V 32 x 512) | Q 16 x 512 | scores 2 x 16 x 40
// The tiles have 16 bits and the swizzle of SharedTile. `scores`: the two halves of q . k, in float32; rows of 32 keys are padded to 40, so
// that the accesses of a warp meet every bank once.
struct DecodeWide {
    static constexpr int kColumns = 512, kRows = 16, kKeys = 32, kWarps = 8, kThreads = 32 * kWarps;
    static constexpr int kWarpColumns = kColumns / kWarps;  // of O
    static constexpr int kTileBytes = kKeys * kColumns * 2, kStageBytes = 2 * kTileBytes, kQueryBytes = kRows * kColumns * 2;
    static constexpr int kScorePitch = 40, kScoreBytes = 2 * kRows * kScorePitch * 4;
    static constexpr int kLeastStages = 2, kMostStages = 3;

    static constexpr size_t bytes(int stages) { return size_t(stages) * kStageBytes + kQueryBytes + kScoreBytes; }
    // Stages that fit, next to 1 KB that the driver takes; fewer than kLeastStages: the kernel can't run.
    static constexpr int stages(size_t shared_memory) {
        int stages = kMostStages;
        while (stages > 0 && bytes(stages) + 1024 > shared_memory) --stages;
        return stages;
    }
};

}  // namespace fa
