// registry_backward.cpp: every kernel of the backward pass, best first on each device, and what each can serve.
#include "api/attention/refusals.h"
#include "api/attention/registry.h"
#include "api/common/serve.h"
#include "cpu/attention/kernels.h"

#if FA_WITH_CUDA
#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/kernels.h"
#endif

namespace fa {
namespace {

const char* serves_all(const BackwardParams&, const DeviceInfo&, char*, size_t) { return nullptr; }

// ---- CPU ----

template <cpu::Isa isa>
const char* needs_isa(const BackwardParams&, const DeviceInfo&, char*, size_t) {
    return cpu::isa_available(isa) ? nullptr : "this processor, or this build, lacks the instruction set";
}
template <cpu::Isa isa>
size_t cpu_workspace(const BackwardParams& b, const DeviceInfo&) {
    return cpu::backward_workspace(b, isa);
}
template <cpu::Isa isa>
fa_status cpu_launch(const BackwardParams& b, const DeviceInfo&, void*) {
    return on_host([&] { cpu::backward(b, isa); });
}
template <cpu::Isa isa>
constexpr BackwardKernel cpu_kernel(const char* name, const char* summary) {
    return {name, summary, FA_CPU, needs_isa<isa>, cpu_workspace<isa>, cpu_launch<isa>};
}
size_t cpu_naive_workspace(const BackwardParams& b, const DeviceInfo&) { return cpu::backward_naive_workspace(b); }
fa_status cpu_naive_launch(const BackwardParams& b, const DeviceInfo&, void*) {
    return on_host([&] {
        cpu::backward_naive(b);
        cpu::backward_scores(b);
    });
}

// ---- CUDA ----

#if FA_WITH_CUDA
// Completes a kernel that computes dq, dk and dv by backward_scores, which computes dbias and dsinks. Used for every GPU kernel.
template <const auto& kernel>
struct WithScores {
    static const char* refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
        const AttentionParams& p = b.forward;
        if (backward_scores_blocks(b) > kMaxGrid)
            return say(text, size, "dbias of batch=%d x nheads=%d x %d x %d needs more blocks than a grid has", p.batch, p.nheads,
                       p.seqlen_q, p.seqlen_k);
        if (const char* reason = too_many_blocks(p, backward_delta_blocks(p), text, size)) return reason;
        return kernel.refuses(b, device, text, size);
    }
    static size_t workspace(const BackwardParams& b, const DeviceInfo& device) {
        return kernel.workspace(b, device) + backward_scores_workspace(b);
    }
    static fa_status launch(const BackwardParams& b, const DeviceInfo& device, void* stream) {
        if (const fa_status status = kernel.launch(b, device, stream); status != FA_OK) return status;
        void* const rest = static_cast<unsigned char*>(b.forward.workspace) + kernel.workspace(b, device);
        return launched("backward_scores", backward_scores(b, rest, static_cast<cudaStream_t>(stream)));
    }
};
template <const auto& kernel>
constexpr BackwardKernel with_scores() {
    using Both = WithScores<kernel>;
    return {kernel.name, kernel.summary, FA_CUDA, Both::refuses, Both::workspace, Both::launch};
}

#if FA_WITH_WGMMA_SM90
template <int blocks>  // blocks that share keys: 1 or 2
const char* wgmma_sm90_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = takes_head_dims(p, 8, kBackwardWgmmaMaxHeadDim, text, size);
    if (!reason) reason = takes_options(p, kOptionsOfTiles, text, size);
    if (reason) return reason;
    const BackwardPlan plan = backward_plan(backward_choose(p));
    if (plan.blocks() != blocks)
        return say(text, size, "headdim=%d, headdim_v=%d: %s", p.headdim, p.headdim_v,
                   blocks > 1 ? "wgmma_sm90 serves up to 128" : "wgmma_pair_sm90 serves those above 128");
    const TensorExtents t = tensor_extents(p);
    if (p.batch == 0 || p.seqlen_q == 0 || t.rows_q == 0 || p.seqlen_k == 0 || t.rows_k == 0)
        return "there are no queries or no keys to load";
    reason =
        overflows(p, backward_blocks(p, plan) > kMaxGrid || query_tiles(b, plan).count() > kMaxGrid || rows_overflow(t.rows_q + t.rows_k),
                  text, size);
    if (!reason) reason = no_tensor_maps(p, 2, text, size);
    if (!reason) reason = no_tensor_map("dout", b.dout, t.batch_q, t.rows_q, p.nheads, 2, text, size);
    if (!reason) reason = no_wide_access("dout", b.dout, text, size);
    if (!reason) reason = no_wide_access("out", p.out, text, size);
    if (!reason) reason = no_wide_access("dq", b.dq, text, size);
    if (!reason) reason = no_wide_access("dk", b.dk, text, size);
    return reason ? reason : no_wide_access("dv", b.dv, text, size);
}
size_t wgmma_sm90_workspace(const BackwardParams& b, const DeviceInfo&) { return backward_wgmma_sm90_workspace(b); }
template <int blocks>
fa_status wgmma_sm90_launch(const BackwardParams& b, const DeviceInfo& device, void* stream) {
    return launched(blocks > 1 ? "wgmma_pair_sm90" : "wgmma_sm90",
                    backward_wgmma_sm90(b, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}
constexpr BackwardKernel kWgmmaSm90 = {"wgmma_sm90",
                                       "Hopper: TMA, wgmma, specialised warps; float16, bfloat16, head dims to 128, every option",
                                       FA_CUDA,
                                       wgmma_sm90_refuses<1>,
                                       wgmma_sm90_workspace,
                                       wgmma_sm90_launch<1>};
constexpr BackwardKernel kWgmmaPairSm90 = {"wgmma_pair_sm90",
                                           "Hopper: as wgmma_sm90, two blocks share keys; head dims above 128, to 256",
                                           FA_CUDA,
                                           wgmma_sm90_refuses<2>,
                                           wgmma_sm90_workspace,
                                           wgmma_sm90_launch<2>};
#endif

const char* simple_refuses(const BackwardParams& b, const DeviceInfo&, char* text, size_t size) {
    if (backward_simple_blocks(b) <= kMaxGrid) return nullptr;
    const AttentionParams& p = b.forward;
    return say(text, size, "batch=%d x nheads=%d x (seqlen_q=%d, seqlen_k=%d) needs more blocks than a grid has", p.batch, p.nheads,
               p.seqlen_q, p.seqlen_k);
}
size_t simple_workspace(const BackwardParams& b, const DeviceInfo&) { return backward_simple_workspace(b); }
fa_status simple_launch(const BackwardParams& b, const DeviceInfo& device, void* stream) {
    return launched("simple", backward_simple(b, device.shared_memory, static_cast<cudaStream_t>(stream)));
}
constexpr BackwardKernel kSimple = {"simple",         "CUDA cores, no atomics: any head dim, dtype, mask and option; deterministic",
                                    FA_CUDA,          simple_refuses,
                                    simple_workspace, simple_launch};

#if FA_WITH_MMA_SM80
const char* mma_sm80_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    const char* reason = needs_sm80(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = takes_head_dims(p, 1, 256, text, size);
    if (!reason) reason = takes_options(p, kOptionsOfTiles, text, size);
    if (reason) return reason;
    const int64_t tiles = ceil_div(p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k, 32);  // the smallest tile
    if (tiles * p.nheads * p.batch <= kMaxGrid) return nullptr;
    return say(text, size, "batch=%d x nheads=%d x seqlen_q=%d over seqlen_k=%d needs more blocks than a grid has", p.batch, p.nheads,
               p.seqlen_q, p.seqlen_k);
}
size_t mma_sm80_workspace(const BackwardParams& b, const DeviceInfo&) { return backward_mma_sm80_workspace(b); }
fa_status mma_sm80_launch(const BackwardParams& b, const DeviceInfo& device, void* stream) {
    return launched("mma_sm80", backward_mma_sm80(b, device.shared_memory, static_cast<cudaStream_t>(stream)));
}
constexpr BackwardKernel kMmaSm80 = {"mma_sm80",
                                     "tensor cores (mma.sync): float16, bfloat16, head dims to 256, every option",
                                     FA_CUDA,
                                     mma_sm80_refuses,
                                     mma_sm80_workspace,
                                     mma_sm80_launch};

const char* mma_wide_sm80_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const char* reason = needs_sm80(device, text, size);
    if (!reason) reason = takes_16_bits(b.forward);
    if (!reason) reason = takes_options(b.forward, kOptionsOfTiles, text, size);
    constexpr int kMost = 1 << 30;  // whole chunks of rows and keys still have 32-bit indices
    return reason ? reason : overflows(b.forward, b.forward.seqlen_q > kMost || b.forward.seqlen_k > kMost, text, size);
}
size_t mma_wide_sm80_workspace(const BackwardParams& b, const DeviceInfo&) { return backward_mma_wide_sm80_workspace(b); }
fa_status mma_wide_sm80_launch(const BackwardParams& b, const DeviceInfo&, void* stream) {
    return launched("mma_wide_sm80", backward_mma_wide_sm80(b, static_cast<cudaStream_t>(stream)));
}
constexpr BackwardKernel kMmaWideSm80 = {"mma_wide_sm80",
                                         "tensor cores (mma.sync), P and dS through memory: float16, bfloat16, any head dim, every option",
                                         FA_CUDA,
                                         mma_wide_sm80_refuses,
                                         mma_wide_sm80_workspace,
                                         mma_wide_sm80_launch};
#endif
#endif

// Best first within a device.
constexpr BackwardKernel kKernels[] = {
#if FA_WITH_CUDA
#if FA_WITH_WGMMA_SM90
    with_scores<kWgmmaSm90>(),
    with_scores<kWgmmaPairSm90>(),
#endif
#if FA_WITH_MMA_SM80
    with_scores<kMmaSm80>(),
    with_scores<kMmaWideSm80>(),
#endif
    with_scores<kSimple>(),
#endif
    cpu_kernel<cpu::Isa::kAvx512>("cpu_avx512", "tiles of keys against blocks of queries, 16 lanes"),
    cpu_kernel<cpu::Isa::kAvx2>("cpu_avx2", "tiles of keys against blocks of queries, 8 lanes"),
    cpu_kernel<cpu::Isa::kNeon>("cpu_neon", "tiles of keys against blocks of queries, 4 lanes"),
    cpu_kernel<cpu::Isa::kPortable>("cpu_portable", "tiles of keys against blocks of queries, whatever the compiler makes of it"),
    {"cpu_naive", "gradients of standard attention, a row of S at a time", FA_CPU, serves_all, cpu_naive_workspace, cpu_naive_launch},
};

}  // namespace

int backward_kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const BackwardKernel* backward_kernel_at(int index) { return index >= 0 && index < backward_kernel_count() ? &kKernels[index] : nullptr; }

}  // namespace fa
