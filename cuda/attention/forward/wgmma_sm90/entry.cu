// wgmma_sm90/entry.cu: the entry point of the Hopper kernel. It chooses the instantiation; wgmma_sm90/kernel.cuh is the kernel, and one
// small file per head dim compiles it.
#include "attention/common/batch_piece.h"
#include "attention/common/interval_bounds.h"
#include "attention/common/seen_blocks.h"
#include "attention/forward/common/work_list.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "attention/kernels.h"

namespace fa {

template <WgmmaPlanId kId>
cudaError_t launch_wgmma(const AttentionParams& p, int multiprocessors, cudaStream_t stream);

namespace {

cudaError_t launch_plan(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    switch (wgmma_choose(p, device.multiprocessors)) {
#define FA_WGMMA_CASE(id) \
    case WgmmaPlanId::id: return launch_wgmma<WgmmaPlanId::id>(p, device.multiprocessors, stream);
        FA_WGMMA_CASE(kD64Short)
        FA_WGMMA_CASE(kD64Long)
        FA_WGMMA_CASE(kD64General)
        FA_WGMMA_CASE(kD64Options)
        FA_WGMMA_CASE(kD96)
        FA_WGMMA_CASE(kD96General)
        FA_WGMMA_CASE(kD96Options)
        FA_WGMMA_CASE(kD128Short)
        FA_WGMMA_CASE(kD128Middle)
        FA_WGMMA_CASE(kD128Long)
        FA_WGMMA_CASE(kD128General)
        FA_WGMMA_CASE(kD128Options)
        FA_WGMMA_CASE(kD128MiddleOptions)
        FA_WGMMA_CASE(kD192V128)
        FA_WGMMA_CASE(kD192)
        FA_WGMMA_CASE(kD192General)
        FA_WGMMA_CASE(kD192Options)
        FA_WGMMA_CASE(kD256)
        FA_WGMMA_CASE(kD256General)
        FA_WGMMA_CASE(kD256Options)
        FA_WGMMA_CASE(kD64Intervals)
        FA_WGMMA_CASE(kD128Intervals)
        FA_WGMMA_CASE(kD256Intervals)
        FA_WGMMA_CASE(kD64ShortIntervals)
        FA_WGMMA_CASE(kD128MiddleIntervals)
        FA_WGMMA_CASE(kD64Bias)
        FA_WGMMA_CASE(kD128Bias)
        FA_WGMMA_CASE(kD192Bias)
        FA_WGMMA_CASE(kD256Bias)
        FA_WGMMA_CASE(kD64BiasDropout)
        FA_WGMMA_CASE(kD128BiasDropout)
        FA_WGMMA_CASE(kD256BiasDropout)
        FA_WGMMA_CASE(kD64BiasFloat32)
        FA_WGMMA_CASE(kD128BiasFloat32)
        FA_WGMMA_CASE(kD192BiasFloat32)
        FA_WGMMA_CASE(kD256BiasFloat32)
        FA_WGMMA_CASE(kD64BiasFloat32Dropout)
        FA_WGMMA_CASE(kD128BiasFloat32Dropout)
        FA_WGMMA_CASE(kD256BiasFloat32Dropout)
        FA_WGMMA_CASE(kD64BiasOptions)
        FA_WGMMA_CASE(kD128BiasOptions)
        FA_WGMMA_CASE(kD256BiasOptions)
        FA_WGMMA_CASE(kD64Dropout)
        FA_WGMMA_CASE(kD64ShortBias)
        FA_WGMMA_CASE(kD64ShortDropout)
        FA_WGMMA_CASE(kD128Dropout)
        FA_WGMMA_CASE(kD256Dropout)
        FA_WGMMA_CASE(kD64Blocks)
        FA_WGMMA_CASE(kD128Blocks)
        FA_WGMMA_CASE(kD256Blocks)
        FA_WGMMA_CASE(kD64Blocks64)
        FA_WGMMA_CASE(kD128Blocks64)
#undef FA_WGMMA_CASE
    }
    return cudaErrorInvalidValue;
}

size_t launch_bytes(const AttentionParams& p, const DeviceInfo& device) {
    const WgmmaPlan plan = wgmma_plan(wgmma_choose(p, device.multiprocessors));
    if (plan.intervals) return kWorkListBytes + grouped_interval_bounds_bytes(p, plan.block_n);
    if (plan.blocks) return kWorkListBytes + seen_blocks_bytes(seen_blocks_shape(p));
    if (plan.bias && wgmma_copies_bias(p)) return kWorkListBytes + bias_copy_bytes(wgmma_bias_copy(p));
    return work_list_workspace(p, plan.block_m(), device.multiprocessors);
}

int32_t batch_of_launch(const AttentionParams& p, const DeviceInfo& device) {
    const int32_t count = wgmma_batch_of_launch(p);  // most calls have no copy, and need no plan for the answer
    return count == p.batch || wgmma_plan(wgmma_choose(p, device.multiprocessors)).bias ? count : p.batch;
}

}  // namespace

cudaError_t forward_wgmma_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return for_batch_pieces(p, batch_of_launch(p, device),
                            [&](const AttentionParams& piece) { return launch_plan(piece, device, stream); });
}

size_t forward_wgmma_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return most_of_batch_pieces(p, batch_of_launch(p, device), [&](const AttentionParams& piece) { return launch_bytes(piece, device); });
}

}  // namespace fa
