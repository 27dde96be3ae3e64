// bias_copy.cu: the small kernel before those of Hopper that load a bias by the copy engine, where the engine cannot load it from where it
// lies, or where a mask of pairs goes into it or takes its place. A thread reads 16 bytes. Bound by memory.
#include "attention/common/bias_chunk.h"
#include "attention/common/bias_copy.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kThreads = 256, kBlocksOfMultiprocessor = 6;
struct CopyParams {
    BiasCopy copy;
    BiasCopyWork work;
    BiasChunk* to;
};
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor) bias_copy_kernel(const __grid_constant__ CopyParams params) {
    copy_bias_chunk(params.copy, params.work, int(blockIdx.x * kThreads + threadIdx.x), params.to);
}

}  // namespace

cudaError_t launch_bias_copy(const AttentionParams& p, const BiasCopy& copy, void* workspace, AttentionParams* with_copy,
                             cudaStream_t stream) {
    void* const place = align_up(workspace, kBiasCopyAlignment);
    *with_copy = with_bias_copy(p, copy, place);
    const int64_t threads = bias_copy_threads(copy);
    if (threads == 0) return cudaSuccess;
    return launch_kernel(bias_copy_kernel, unsigned(ceil_div(threads, kThreads)), kThreads, 0, stream,
                         CopyParams{copy, bias_copy_work(copy), static_cast<BiasChunk*>(place)});
}

}  // namespace fa
