// few_w4_sm90/entry.cu: up to 32 rows of x with packed 4-bit weights on Hopper (few_w4_sm90/kernel.cuh).
#include "transformer/w4/few_w4_sm90/kernel.cuh"

namespace fa {

bool few_w4_sm90_fits(const W4LinearParams& p, const DeviceInfo& gpu) {
    return p.rows <= w4::kFewRows && w4::few_plan_of(p, gpu).stages > 0;
}
int few_w4_sm90_blocks_per_sm(const W4LinearParams& p, const DeviceInfo& gpu) { return w4::few_plan_of(p, gpu).blocks_per_sm; }
size_t few_w4_sm90_workspace(const W4LinearParams& p, const DeviceInfo&) { return w4::few_reads_x(p) ? 0 : rounded_bytes(p); }
cudaError_t few_w4_sm90(const W4LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    const w4::FewPlan plan = w4::few_plan_of(p, gpu);
    return w4::with_format_and_type(p, [&](auto format, auto zero) {
        using T = decltype(zero);
        switch (w4::few_tokens(p)) {
            case 8: return w4::launch_few<format.value, T, 1>(p, plan, stream);
            case 16: return w4::launch_few<format.value, T, 2>(p, plan, stream);
            case 24: return w4::launch_few<format.value, T, 3>(p, plan, stream);
            case 32: return w4::launch_few<format.value, T, 4>(p, plan, stream);
            default: return cudaErrorInvalidValue;
        }
    });
}

}  // namespace fa
