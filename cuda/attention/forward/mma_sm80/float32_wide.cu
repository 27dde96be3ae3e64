// mma_sm80/float32_wide.cu: mma_sm80/float32.cu for head dims above 256, up to 512, on strided rows and on pages. New against it: several
// warps share rows (MmaTile::column_parts). Each sums S over a part of the columns of Q and K, they add up their sums through shared
// memory, and each multiplies P by a part of the columns of V. So S is computed once, as below head dim 257, and O fits into the registers.
#include "attention/forward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {
namespace {

template <int kD, MmaSm kSm>
constexpr size_t kSharedBytes = sizeof(Smem<SplitFloat, kTileOf<SplitFloat, kD, kD, kSm>, kD, kD>);
static_assert(kSharedBytes<384, MmaSm::k228> <= 227 * 1024 && kSharedBytes<512, MmaSm::k228> <= 227 * 1024, "a block of sm_90 has no more");
static_assert(kSharedBytes<512, MmaSm::kAny> == kSplitWideBytes && kSplitWideBytes <= kMostSharedSm80,
              "what the table of kernels asks for");

}  // namespace

// Options, rows that do not start on 16 bytes, and SMs with less shared memory have one tile, which keeps this file small.
cudaError_t forward_mma_float32_sm80_wide(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    MmaParams params = mma_params<SplitFloat>(p);
    params.attention.workspace = nullptr;  // no word says that another kernel has served the call
    const bool general = mma_needs_general(p), pages = p.cache.block_table;
    const bool large = !general && params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_out;
    const size_t memory = tile_memory(device);
    constexpr auto kNone = Options::kNone, kAll = Options::kAll;
    constexpr auto kStrided = KeyRows::kStrided, kInPages = KeyRows::kInPages;
    if (large && !pages && p.headdim <= 384 && p.headdim_v <= 384 && tile_is_taken<SplitFloat, 384, 384, MmaSm::k228, kStrided>(memory))
        return launch_tile<SplitFloat, 384, 384, MmaSm::k228, kNone, kStrided>(params, stream);
    if (large && tile_is_taken<SplitFloat, 512, 512, MmaSm::k228, kStrided>(memory)) {
        if (pages) return launch_tile<SplitFloat, 512, 512, MmaSm::k228, kNone, kInPages>(params, stream);
        return launch_tile<SplitFloat, 512, 512, MmaSm::k228, kNone, kStrided>(params, stream);
    }
    if (pages) return launch_tile<SplitFloat, 512, 512, MmaSm::kAny, kAll, kInPages>(params, stream);
    if (general) return launch_tile<SplitFloat, 512, 512, MmaSm::kAny, kAll, kStrided>(params, stream);
    return launch_tile<SplitFloat, 512, 512, MmaSm::kAny, kNone, kStrided>(params, stream);
}

}  // namespace fa
