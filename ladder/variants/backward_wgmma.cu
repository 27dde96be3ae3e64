// backward_wgmma.cu: from the first wgmma gradients to the library's wgmma_sm90, at headdim 128. A step is a plan or a grid; the kernels
// are the library's.
#include <climits>

#include "attention/backward/wgmma_sm90/kernel.cuh"
#include "ladder/variants/variant.h"

namespace fa {

// Without slots for dQ in shared memory: each thread of dQ's warpgroup adds its registers to memory.
template <>
inline constexpr BackwardPlan kBackwardPlan<BackwardPlanId(701)> = [] {
    BackwardPlan plan;
    plan.headdim = plan.headdim_v = 128;
    return plan;
}();

namespace {

template <BackwardPlanId kId, bool kPersistent>
void add_step(Variants* variants, const char* name, int order, const char* about) {
    using T = __nv_bfloat16;
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    Variant v;
    v.name = name, v.experiment = "optimisation", v.kernel = "wgmma_sm90", v.about = about, v.order = order, v.headdim = 128;
    v.backward = v.copies = true, v.compute = 90;
    v.tile_m = kPlan.block_m, v.tile_n = kPlan.block_n, v.stages = kPlan.stages, v.threads = kBackwardThreads;
    v.shared_bytes = sizeof(BackwardSmem<T, kId>), v.function = reinterpret_cast<const void*>(backward_wgmma_kernel<T, kId>);
    v.workspace = [](const AttentionParams& p, int) {
        BackwardParams backward{};
        backward.forward = p;
        return query_tiles_bytes(query_tiles(backward, kBackwardPlan<kId>)) + 128;  // and room to align it
    };
    v.launch_backward = [](const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
        return launch_backward_wgmma<T, kId>(b, kPersistent ? multiprocessors : INT_MAX, stream);
    };
    variants->push_back(std::move(v));
}

}  // namespace

void add_backward_wgmma_variants(Variants* variants) {
    constexpr BackwardPlanId kRegisters = BackwardPlanId(701), kStaged = BackwardPlanId::kD128;
    add_step<kRegisters, false>(variants, "backward_06_wgmma_d128", 6, "TMA, wgmma, roles; a block for every 128 keys");
    add_step<kRegisters, true>(variants, "backward_07_persistent_d128", 7, "a block on each multiprocessor takes keys in turn");
    add_step<kStaged, true>(variants, "backward_08_dq_copies_d128", 8,
                            "dQ leaves through shared memory by the copy engine: the library's wgmma_sm90");
}

}  // namespace fa
