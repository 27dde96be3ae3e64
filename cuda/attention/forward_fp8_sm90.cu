// forward_fp8_sm90.cu: the entry of the fp8 kernel, forward_fp8_sm90.cuh, and its instantiations.
#include "forward_fp8_sm90.cuh"

namespace fa {

cudaError_t forward_fp8_sm90(const AttentionParams& p, int device, int multiprocessors, cudaStream_t stream) {
    switch (fp8_choose(p)) {
#define FA_FP8_CASE(id)                                                                    \
    case Fp8PlanId::id:                                                                    \
        return p.lse ? launch_fp8<Fp8PlanId::id, true>(p, device, multiprocessors, stream) \
                     : launch_fp8<Fp8PlanId::id, false>(p, device, multiprocessors, stream);
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

size_t forward_fp8_sm90_workspace(const AttentionParams& p, int multiprocessors) {
    const int64_t items = wgmma_items(p, fp8_plan(fp8_choose(p)).block_m());
    return wgmma_order(p, items, multiprocessors) == WorkOrder::kCounter ? 2 * sizeof(int) : 0;  // the counter and room to align it
}

}  // namespace fa
