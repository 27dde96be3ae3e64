// few_w4_sm90.cu: up to 32 rows of x with packed 4-bit weights on Hopper (few_w4_sm90.cuh).
#include "linear/few_w4_sm90.cuh"

namespace fa {
namespace {

cudaError_t launch(const W4LinearParams& p, const w4::FewPlan& plan, cudaStream_t stream) {
    switch (w4::few_tokens(p)) {
        case 8: return w4::launch_few<1>(p, plan, stream);
        case 16: return w4::launch_few<2>(p, plan, stream);
        case 24: return w4::launch_few<3>(p, plan, stream);
        case 32: return w4::launch_few<4>(p, plan, stream);
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace

bool few_w4_sm90_fits(const W4LinearParams& p, const GpuSize& gpu) {
    return p.rows <= w4::kFewRows && w4::few_plan_of(p, gpu, true).stages > 0;
}
int64_t few_w4_sm90_workspace(const W4LinearParams& p, const GpuSize&) {
    return w4::few_reads_x(p) ? 0 : 2 * p.rows * rounded_columns(p.in_features);
}
cudaError_t few_w4_sm90(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    return launch(p, w4::few_plan_of(p, gpu, false), stream);
}
cudaError_t few_w4_sm90_half(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    return launch(p, w4::few_plan_of(p, gpu, true), stream);
}

}  // namespace fa
