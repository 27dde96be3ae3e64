// gemv_w4_sm90.cu: up to 8 rows of x with packed 4-bit weights on Hopper (gemv_w4_sm90.cuh).
#include "linear/gemv_w4_sm90.cuh"

namespace fa {

bool gemv_w4_sm90_fits(const W4LinearParams& p, const GpuSize& gpu) {
    return p.rows <= w4::kGemvRows && w4::gemv_plan_of(p, gpu).stages > 0;
}

cudaError_t gemv_w4_sm90(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    const w4::GemvPlan plan = w4::gemv_plan_of(p, gpu);
    if (plan.interleaved) return w4::launch_gemv<4, true>(p, plan, stream);
    return plan.chunk == 4 ? w4::launch_gemv<4, false>(p, plan, stream) : w4::launch_gemv<2, false>(p, plan, stream);
}

}  // namespace fa
