// mma_w4/entry.cu: any number of rows of x with packed 4-bit weights (mma_w4/kernel.cuh), with the shape that suits the number of rows
// (mma_w4/plan.h).
#include "transformer/w4/mma_w4/kernel.cuh"

namespace fa {

size_t mma_w4_workspace(const W4LinearParams& p, const DeviceInfo& gpu) {
    return w4::mma_plan(p, w4::mma_shape(p.rows), gpu).resident || w4::copies_x(p) ? 0 : rounded_bytes(p);
}

cudaError_t mma_w4(const W4LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    const w4::MmaShape shape = w4::mma_shape(p.rows);
    const w4::MmaPlan plan = w4::mma_plan(p, shape, gpu);
    return w4::with_format_and_type(p, [&](auto format, auto zero) {
        using T = decltype(zero);
        switch (shape.token_tiles) {
            case 1: return w4::launch_mma<format.value, T, 1>(p, plan, stream);
            case 2: return w4::launch_mma<format.value, T, 2>(p, plan, stream);
            default: return w4::launch_mma<format.value, T, 4>(p, plan, stream);
        }
    });
}

}  // namespace fa
