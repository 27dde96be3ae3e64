// mma_sm80/entry.cu: the entry points of mma_sm80/kernel.cuh, and its kernels for fp16 and bf16. In one file: the code of one compresses
// the code of the other, 1 MB of the library.
#include "attention/backward/mma_sm80/kernel.cuh"

#include <algorithm>

#include "attention/kernels.h"

namespace fa {

cudaError_t backward_mma_sm80(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    if (b.forward.dtype == DType::kFloat16) return launch<__half>(b, tile_memory(device), stream);
    return launch<__nv_bfloat16>(b, tile_memory(device), stream);
}

// Room for any tile that the launch may take: the alignment of rows may not be known yet.
size_t backward_mma_sm80_workspace(const BackwardParams& b, const DeviceInfo&) {
    return with_backward_bucket(b.forward.headdim, b.forward.headdim_v, [&](auto d, auto dv) {
        size_t most = 0;
        for (const MmaSm sm : {MmaSm::kAny, MmaSm::kShort, MmaSm::k164, MmaSm::k228})
            most = std::max(most, workspace_bytes(b, backward_mma_tile(d, sm).block_m, d));
        return most;
    });
}

}  // namespace fa
