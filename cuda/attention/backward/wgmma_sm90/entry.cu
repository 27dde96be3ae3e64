// wgmma_sm90/entry.cu: the entry point of the Hopper backward. It chooses the instantiation; wgmma_sm90/kernel.cuh is the kernel for head
// dims up to 128, wgmma_pair_sm90/kernel.cuh the one above, and one small file per head dim compiles them.
#include "attention/backward/wgmma_sm90/interval_order.h"
#include "attention/backward/wgmma_sm90/masked_tiles.h"
#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/backward/wgmma_sm90/walk_parts.h"
#include "attention/common/batch_piece.h"
#include "attention/common/interval_bounds.h"
#include "attention/kernels.h"

namespace fa {

template <BackwardPlanId kId>
cudaError_t launch_backward_wgmma(const BackwardParams& b, int multiprocessors, cudaStream_t stream);

namespace {

cudaError_t launch_plan(BackwardPlanId plan, const BackwardParams& b, int multiprocessors, cudaStream_t stream) {
    switch (plan) {
#define FA_BACKWARD_CASE(id) \
    case BackwardPlanId::id: return launch_backward_wgmma<BackwardPlanId::id>(b, multiprocessors, stream);
        FA_BACKWARD_CASE(kD64)
        FA_BACKWARD_CASE(kD64Options)
        FA_BACKWARD_CASE(kD64Softcap)
        FA_BACKWARD_CASE(kD64Intervals)
        FA_BACKWARD_CASE(kD64Masks)
        FA_BACKWARD_CASE(kD64Bias)
        FA_BACKWARD_CASE(kD64BiasDropout)
        FA_BACKWARD_CASE(kD64BiasFloat32)
        FA_BACKWARD_CASE(kD64BiasFloat32Dropout)
        FA_BACKWARD_CASE(kD64Dropout)
        FA_BACKWARD_CASE(kD64General)
        FA_BACKWARD_CASE(kD128)
        FA_BACKWARD_CASE(kD128Options)
        FA_BACKWARD_CASE(kD128Softcap)
        FA_BACKWARD_CASE(kD128Intervals)
        FA_BACKWARD_CASE(kD128Masks)
        FA_BACKWARD_CASE(kD128Bias)
        FA_BACKWARD_CASE(kD128BiasDropout)
        FA_BACKWARD_CASE(kD128BiasFloat32)
        FA_BACKWARD_CASE(kD128BiasFloat32Dropout)
        FA_BACKWARD_CASE(kD128Dropout)
        FA_BACKWARD_CASE(kD128General)
        FA_BACKWARD_CASE(kD192V128)
        FA_BACKWARD_CASE(kD192V128Options)
        FA_BACKWARD_CASE(kD192V128Intervals)
        FA_BACKWARD_CASE(kD192V128Masks)
        FA_BACKWARD_CASE(kD192V128General)
        FA_BACKWARD_CASE(kD192)
        FA_BACKWARD_CASE(kD192Options)
        FA_BACKWARD_CASE(kD192Softcap)
        FA_BACKWARD_CASE(kD192Dropout)
        FA_BACKWARD_CASE(kD192Bias)
        FA_BACKWARD_CASE(kD192BiasDropout)
        FA_BACKWARD_CASE(kD192BiasFloat32)
        FA_BACKWARD_CASE(kD192Intervals)
        FA_BACKWARD_CASE(kD192Masks)
        FA_BACKWARD_CASE(kD192General)
        FA_BACKWARD_CASE(kD256)
        FA_BACKWARD_CASE(kD256Options)
        FA_BACKWARD_CASE(kD256Softcap)
        FA_BACKWARD_CASE(kD256Dropout)
        FA_BACKWARD_CASE(kD256Bias)
        FA_BACKWARD_CASE(kD256BiasDropout)
        FA_BACKWARD_CASE(kD256BiasFloat32)
        FA_BACKWARD_CASE(kD256BiasFloat32Dropout)
        FA_BACKWARD_CASE(kD256Intervals)
        FA_BACKWARD_CASE(kD256Masks)
        FA_BACKWARD_CASE(kD256General)
#undef FA_BACKWARD_CASE
    }
    return cudaErrorInvalidValue;
}

// Of a launch, without the sums of parts.
size_t launch_bytes(const BackwardParams& b, const BackwardPlan& plan) {
    size_t bounds = plan.intervals ? interval_bounds_bytes(b.forward, plan.block_n) : 0;
    if (has_interval_tiles(b.forward, plan, b.deterministic)) bounds += interval_tiles_bytes(b.forward, plan);
    else bounds += interval_order_bytes(b.forward, plan.block_n);
    const size_t masks = plan.masks ? masked_tiles_bytes(b.forward, plan) : 0;
    const AttentionParams whole = call_of_groups(b).forward;
    const size_t copy = plan.bias() && backward_copies_bias(whole) ? bias_copy_bytes(backward_bias_copy(whole)) : 0;
    return query_tiles_bytes(query_tiles(b, plan)) + 128 + bounds + masks + copy;  // and room to align the first
}

cudaError_t launch(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    const BackwardPlanId plan = backward_choose(b.forward);
    PartSums sums = part_sums(b, backward_plan(plan), device.multiprocessors);
    if (sums.parts.count() == 1) return launch_plan(plan, b, device.multiprocessors, stream);
    BackwardParams call = call_of_parts(b, &sums, nullptr);
    const size_t bytes = launch_bytes(call, backward_plan(plan));  // the same for every place of the sums
    call = call_of_parts(b, &sums, static_cast<char*>(b.forward.workspace) + bytes);
    if (cudaError_t error = launch_plan(plan, call, device.multiprocessors, stream)) return error;
    return add_parts(b, sums, stream);
}

size_t workspace_bytes(const BackwardParams& b, const DeviceInfo& device) {
    const BackwardPlan plan = backward_plan(backward_choose(b.forward));
    PartSums sums = part_sums(b, plan, device.multiprocessors);
    if (sums.parts.count() == 1) return launch_bytes(b, plan);
    return launch_bytes(call_of_parts(b, &sums, nullptr), plan) + sums.bytes(b.forward);
}

int32_t batch_of_launch(const AttentionParams& p) {
    const int32_t count = backward_batch_of_launch(p);  // most calls have no copy, and need no plan for the answer
    return count == p.batch || backward_plan(backward_choose(p)).bias() ? count : p.batch;
}

}  // namespace

cudaError_t backward_wgmma_sm90(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    return for_batch_pieces(b, batch_of_launch(b.forward), [&](const BackwardParams& piece) { return launch(piece, device, stream); });
}

size_t backward_wgmma_sm90_workspace(const BackwardParams& b, const DeviceInfo& device) {
    return most_of_batch_pieces(b, batch_of_launch(b.forward), [&](const BackwardParams& piece) { return workspace_bytes(piece, device); });
}

}  // namespace fa
