// gemv_w4.cu: up to 16 rows of x with packed 4-bit weights (mma_w4.cuh). Many warps: one can turn weights into operands while another waits
// for its own. On an H200 that work, which takes 60 % of the issue slots, keeps it from the speed of memory.
#include "linear/mma_w4.cuh"

namespace fa {
namespace {

constexpr int kR = 4, kWarps = 16;

w4::MmaShape shape_of(const W4LinearParams& p) { return {p.rows <= 8 ? 1 : 2, kR, kWarps}; }

}  // namespace

int64_t gemv_w4_workspace(const W4LinearParams& p, const GpuSize& gpu) { return w4::mma_workspace(p, w4::plan_of(p, shape_of(p), gpu)); }

cudaError_t gemv_w4(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    const w4::MmaPlan plan = w4::plan_of(p, shape_of(p), gpu);
    return p.rows <= 8 ? w4::launch_mma<1, kR, kWarps>(p, plan, stream) : w4::launch_mma<2, kR, kWarps>(p, plan, stream);
}

}  // namespace fa
