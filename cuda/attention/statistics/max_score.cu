// max_score.cu: sets max_score to -inf; the forward kernels then raise it (max_score.cuh). The next kernel of the stream may start
// meanwhile if it is launched programmatically and waits before it touches what this kernel writes.
#include "attention/common/params.h"
#include "attention/kernels.h"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

constexpr int kThreads = 256;

struct ClearParams {
    float* max_score;
    int64_t count;
    int* counter;  // of dynamic scheduling, set to zero; nullptr = none
};

__global__ void __launch_bounds__(kThreads) clear_kernel(const __grid_constant__ ClearParams p) {
    launch_dependents();
    const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    for (int64_t i = first; i < p.count; i += int64_t(gridDim.x) * kThreads) p.max_score[i] = -INFINITY;
    if (p.counter && first == 0) *p.counter = 0;
}

}  // namespace

cudaError_t clear_max_score(const AttentionParams& p, int* counter, cudaStream_t stream) {
    constexpr int64_t kMostBlocks = 1024;
    const int64_t count = int64_t(p.batch) * p.nheads, blocks = (count + kThreads - 1) / kThreads;
    return launch_kernel(clear_kernel, unsigned(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream,
                         ClearParams{p.max_score, count, counter});
}

}  // namespace fa
