// mma_sm80/paged.cu: the tensor-core kernel of mma_sm80/kernel.cuh on a paged cache. Pages may have any size: every row is looked up.
#include "attention/forward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {
namespace {

template <typename T, int kD>
cudaError_t launch_pages(const AttentionParams& p, int multiprocessors, size_t tile_memory, cudaStream_t stream) {
    MmaParams params = mma_params<T>(p);
    if (mma_needs_general(p)) return launch_tile<T, kD, kD, MmaSm::kAny, Options::kAll, KeyRows::kInPages>(params, stream);
    constexpr const MmaTile& kLarge = kTileOf<T, kD, kD, MmaSm::k164>;
    if (params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_out &&
        tile_is_taken<T, kD, kD, MmaSm::k164, KeyRows::kInPages>(tile_memory) &&
        mma_tile_fills(kLarge, int64_t(p.nheads) * p.deciding_batch(), p.seqlen_q, multiprocessors))
        return launch_tile<T, kD, kD, MmaSm::k164, Options::kNone, KeyRows::kInPages>(params, stream);
    return launch_tile<T, kD, kD, MmaSm::kAny, Options::kNone, KeyRows::kInPages>(params, stream);
}

// Three buckets of head dims and the tile of sm_80 keep this file small.
template <typename T>
cudaError_t launch_pages(const AttentionParams& p, int multiprocessors, size_t tile_memory, cudaStream_t stream) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (d <= 64) return launch_pages<T, 64>(p, multiprocessors, tile_memory, stream);
    if (d <= 128) return launch_pages<T, 128>(p, multiprocessors, tile_memory, stream);
    return launch_pages<T, 256>(p, multiprocessors, tile_memory, stream);
}

}  // namespace

cudaError_t forward_mma_sm80_paged(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    if (p.dtype == DType::kFloat16) return launch_pages<__half>(p, device.multiprocessors, tile_memory(device), stream);
    return launch_pages<__nv_bfloat16>(p, device.multiprocessors, tile_memory(device), stream);
}

}  // namespace fa
