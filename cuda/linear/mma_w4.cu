// mma_w4.cu: more rows of x with packed 4-bit weights (mma_w4.cuh), 32 to a block. Few warps with four tiles each: a fragment of x, read
// from shared memory, serves four products, and what turns weights into operands is spread over all rows of x.
#include "linear/mma_w4.cuh"

namespace fa {
namespace {

constexpr int kR = 4, kWarps = 8;

constexpr w4::MmaShape kShape{4, kR, kWarps};

}  // namespace

int64_t mma_w4_workspace(const W4LinearParams& p, const GpuSize& gpu) { return w4::mma_workspace(p, w4::plan_of(p, kShape, gpu)); }

cudaError_t mma_w4(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    return w4::launch_mma<4, kR, kWarps>(p, w4::plan_of(p, kShape, gpu), stream);
}

}  // namespace fa
