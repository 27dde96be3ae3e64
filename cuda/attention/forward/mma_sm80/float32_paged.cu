// mma_sm80/float32_paged.cu: mma_sm80/float32.cu on a paged cache, as mma_sm80/paged.cu is for 16 bits: every row is looked up.
#include "attention/forward/mma_sm80/kernel.cuh"
#include "attention/kernels.h"

namespace fa {

// Three buckets of head dims keep this file small.
cudaError_t forward_mma_float32_sm80_paged(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    const auto run = [&](auto launch) {
        AttentionParams params = p;
        params.workspace = nullptr;  // no word says that another kernel has served the call
        return launch(params, device.multiprocessors, tile_memory(device), stream);
    };
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (d <= 64) return run(launch_bucket<SplitFloat, 64, 64, KeyRows::kInPages>);
    if (d <= 128) return run(launch_bucket<SplitFloat, 128, 128, KeyRows::kInPages>);
    return run(launch_bucket<SplitFloat, 256, 256, KeyRows::kInPages>);
}

}  // namespace fa
