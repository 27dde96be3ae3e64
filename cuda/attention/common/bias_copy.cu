// bias_copy.cu: the small kernel before those of Hopper that load a bias by the copy engine, where the engine cannot load it from where it
// lies, or where a mask of pairs goes into it or takes its place. A thread copies 16 bytes. Bound by memory.
#include "attention/common/bias_copy.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kThreads = 256, kBlocksOfMultiprocessor = 8;
struct CopyParams {
    BiasCopy copy;
    BiasChunk* to;
    Divisor chunks, rows, heads;
};
__global__ void __launch_bounds__(kThreads, kBlocksOfMultiprocessor) bias_copy_kernel(const __grid_constant__ CopyParams params) {
    static_assert(kMostBiasCopy / kBiasChunkBytes <= 1 << 28, "the number of a chunk is an int");
    const int index = blockIdx.x * kThreads + threadIdx.x;
    const int all_rows = params.chunks.divide(index), chunk = params.chunks.remainder(index, all_rows);
    const int entry = params.rows.divide(all_rows), row = params.rows.remainder(all_rows, entry);
    const int batch = params.heads.divide(entry), head = params.heads.remainder(entry, batch);
    if (batch < params.copy.batches) params.to[index] = bias_chunk(params.copy, batch, head, row, chunk);
}

}  // namespace

cudaError_t launch_bias_copy(const AttentionParams& p, const BiasCopy& copy, void* workspace, AttentionParams* with_copy,
                             cudaStream_t stream) {
    void* const place = align_up(workspace, kBiasCopyAlignment);
    *with_copy = with_bias_copy(p, copy, place);
    const int64_t chunks = copy.all_rows() * copy.chunks();
    if (chunks == 0) return cudaSuccess;
    return launch_kernel(
        bias_copy_kernel, unsigned(ceil_div(chunks, kThreads)), kThreads, 0, stream,
        CopyParams{copy, static_cast<BiasChunk*>(place), divisor_of(copy.chunks()), divisor_of(copy.rows), divisor_of(copy.heads)});
}

}  // namespace fa
