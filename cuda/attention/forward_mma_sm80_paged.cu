// forward_mma_sm80_paged.cu: the tensor-core kernel of forward_mma_sm80.cuh on the pages of a cache, of any size: every row is looked up.
#include "attention/forward_mma_sm80.cuh"
#include "attention/kernels.h"

namespace fa {
namespace {

template <typename T, int kD>
cudaError_t launch_pages(const AttentionParams& p, cudaStream_t stream) {
    MmaParams params = mma_params<T>(p);
    if (mma_needs_general(p)) return launch_tile<T, kD, kD, MmaSm::kAny, true, true>(params, stream);
    return launch_tile<T, kD, kD, MmaSm::kAny, false, true>(params, stream);
}

// Three buckets: a lookup for each row leaves little to be had from a tile of its own for every head dim.
template <typename T>
cudaError_t launch_pages(const AttentionParams& p, cudaStream_t stream) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (d <= 64) return launch_pages<T, 64>(p, stream);
    if (d <= 128) return launch_pages<T, 128>(p, stream);
    return launch_pages<T, 256>(p, stream);
}

}  // namespace

cudaError_t forward_mma_sm80_paged(const AttentionParams& p, cudaStream_t stream) {
    if (p.dtype == DType::kFloat16) return launch_pages<__half>(p, stream);
    return launch_pages<__nv_bfloat16>(p, stream);
}

}  // namespace fa
