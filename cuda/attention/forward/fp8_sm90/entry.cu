// fp8_sm90/entry.cu: the entry point of the fp8 kernel, fp8_sm90/kernel.cuh, and its instantiations.
#include "attention/forward/fp8_sm90/kernel.cuh"

namespace fa {

cudaError_t forward_fp8_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    switch (fp8_choose(p)) {
#define FA_FP8_CASE(id)                                                                   \
    case Fp8PlanId::id:                                                                   \
        return p.lse ? launch_fp8<Fp8PlanId::id, true>(p, device.multiprocessors, stream) \
                     : launch_fp8<Fp8PlanId::id, false>(p, device.multiprocessors, stream);
        FA_FP8_CASE(kD64Short)
        FA_FP8_CASE(kD64Long)
        FA_FP8_CASE(kD128Short)
        FA_FP8_CASE(kD128Long)
        FA_FP8_CASE(kD256)
        FA_FP8_CASE(kD256Long)
#undef FA_FP8_CASE
    }
    return cudaErrorInvalidValue;
}

size_t forward_fp8_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return work_list_workspace(p, fp8_plan(fp8_choose(p)).block_m(), device.multiprocessors);
}

}  // namespace fa
