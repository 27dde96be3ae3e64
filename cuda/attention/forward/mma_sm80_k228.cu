// mma_sm80_k228.cu: the tiles of mma_sm80.cuh for 228 KB of shared memory, of 16 bits and of tf32. Compiled for sm_90 and newer alone.
#include "attention/forward/mma_sm80.cuh"

namespace fa {
namespace {

template <typename T, int kD, int kDv>
cudaError_t launch_k228(const AttentionParams& p, cudaStream_t stream) {
    constexpr const MmaTile &k228 = kTileOf<T, kD, kDv, MmaSm::k228>, &k164 = kTileOf<T, kD, kDv, MmaSm::k164>;
    if constexpr (k228 == k164) {
        return cudaErrorInvalidValue;  // not called: launch_bucket takes k164
    } else {
        MmaParams params = mma_params<T>(p);
        return launch_tile<T, kD, kDv, MmaSm::k228, Options::kNone, KeyRows::kStrided>(params, stream);
    }
}
template <typename T>
cudaError_t launch_k228(const AttentionParams& p, cudaStream_t stream) {
    return with_bucket(p, [&](auto d, auto dv) { return launch_k228<T, decltype(d)::value, decltype(dv)::value>(p, stream); });
}

}  // namespace

cudaError_t forward_mma_sm80_k228(const AttentionParams& p, cudaStream_t stream) {
    if (p.dtype == DType::kFloat32) return launch_k228<float>(p, stream);
    if (p.dtype == DType::kFloat16) return launch_k228<__half>(p, stream);
    return launch_k228<__nv_bfloat16>(p, stream);
}

}  // namespace fa
