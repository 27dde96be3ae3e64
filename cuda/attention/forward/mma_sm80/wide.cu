// mma_sm80/wide.cu: the tensor-core kernel of mma_sm80/kernel.cuh for head dims above 256, up to 512, on strided rows and on pages. A block
// computes a part of V's columns. Options and rows that do not start on 16 bytes share one tile, which keeps this file small.
#include "attention/forward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {
namespace {

template <typename T>
cudaError_t launch_wide(const AttentionParams& p, size_t tile_memory, cudaStream_t stream) {
    MmaParams params = mma_params<T>(p);
    const bool plain = !mma_needs_general(p) && params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_out;
    const bool large = plain && tile_is_taken<T, 512, 256, MmaSm::k164, KeyRows::kStrided>(tile_memory);
    if (p.cache.block_table) {
        if (large) return launch_tile<T, 512, 256, MmaSm::k164, Options::kNone, KeyRows::kInPages>(params, stream);
        return launch_tile<T, 512, 256, MmaSm::kAny, Options::kAll, KeyRows::kInPages>(params, stream);
    }
    // One part of 256 columns costs less than two of 192.
    if (plain && p.headdim <= 384 && p.headdim_v <= 384 && (p.headdim_v <= 192 || p.headdim_v > 256))
        return launch_tile<T, 384, 192, MmaSm::k164, Options::kNone, KeyRows::kStrided>(params, stream);
    if (large) return launch_tile<T, 512, 256, MmaSm::k164, Options::kNone, KeyRows::kStrided>(params, stream);
    if (plain) return launch_tile<T, 512, 256, MmaSm::k99, Options::kNone, KeyRows::kStrided>(params, stream);
    return launch_tile<T, 512, 256, MmaSm::kAny, Options::kAll, KeyRows::kStrided>(params, stream);
}

}  // namespace

cudaError_t forward_mma_sm80_wide(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    if (p.dtype == DType::kFloat16) return launch_wide<__half>(p, tile_memory(device), stream);
    return launch_wide<__nv_bfloat16>(p, tile_memory(device), stream);
}

}  // namespace fa
