// registry_backward.cpp: the kernels of the backward pass, best first on each device, and what each takes. On a GPU they give dq, dk and
// dv; launch_scores (launch.cpp) follows each of them.
#include "api/attention/limits.h"
#include "api/attention/registry.h"
#include "attention/backward/mma_short_sm80.h"
#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/float16_parts.h"
#include "attention/common/tiles_mma_sm80.h"
#include "cpu/attention/kernels.h"

#if FA_WITH_CUDA
#include "attention/kernels.h"
#endif
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
#include "api/attention/short_gradients.h"
#endif

namespace fa {
namespace {

// ---- CPU ----

template <cpu::Isa isa>
const char* lacks(const BackwardParams&, const DeviceInfo&, char*, size_t) {
    return cpu::isa_available(isa) ? nullptr : "this processor, or this build, lacks the instruction set";
}
template <cpu::Isa isa>
constexpr BackwardKernel cpu_kernel(const char* name, const char* summary) {
    return {.name = name,
            .summary = summary,
            .device = FA_CPU,
            .limits = {.dtypes = kAllButFloat8},
            .refuses = lacks<isa>,
            .workspace = [](const BackwardParams& b, const DeviceInfo&) { return cpu::backward_workspace(b, isa); },
            .run = [](const BackwardParams& b) { cpu::backward(b, isa); }};
}

// ---- any GPU ----

#if FA_WITH_CUDA
bool simple_fits(const BackwardParams& b, const DeviceInfo&) { return backward_simple_blocks(b) <= kMostBlocks; }
#endif

// ---- sm_80 ----

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
bool has_blocks_for_tiles_of_32(const BackwardParams& b, const DeviceInfo&) {
    const AttentionParams& p = b.forward;
    return ceil_div(p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k, 32) * p.nheads * p.batch <= kMostBlocks;
}
bool has_blocks_for_halves_of_32(const BackwardParams& b, const DeviceInfo&) {
    const AttentionParams& p = b.forward;
    return 2 * ceil_div(p.seqlen_q > p.seqlen_k ? p.seqlen_q : p.seqlen_k, 32) * p.nheads * p.batch <= kMostBlocks;
}
// As in registry_forward.cpp.
const char* split_products_yield(const BackwardParams&, const DeviceInfo& device, char*, size_t) {
    return device.shared_memory > kMostSharedSm86 ? nullptr : "the CUDA cores of this GPU are faster";
}
const char* split_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    if ((p.headdim <= 256 && p.headdim_v <= 256) || device.shared_memory >= kBackwardSplitWideBytes) return nullptr;
    return say(text, size, "headdim=%d, headdim_v=%d: above 256 a block needs %zu bytes of shared memory, and this GPU has %zu", p.headdim,
               p.headdim_v, kBackwardSplitWideBytes, device.shared_memory);
}
const char* short_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    const size_t bytes = backward_short_bytes(backward_short_bucket(p));
    if (bytes <= device.shared_memory) return nullptr;
    return say(text, size, "headdim=%d, headdim_v=%d: a block needs %zu bytes of shared memory, and this GPU has %zu", p.headdim,
               p.headdim_v, bytes, device.shared_memory);
}
bool has_blocks_for_clusters_of_8(const BackwardParams& b, const DeviceInfo&) {
    const AttentionParams& p = b.forward;
    return (ceil_div(p.seqlen_q, 64) * p.nheads + (ceil_div(p.seqlen_k, 64) + 1) * p.nheads_k) * p.batch <= kMostBlocks / 8;
}
const char* short_yields(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    bool faster = backward_short_is_faster(p, device);
#if FA_WITH_WGMMA_SM90
    if (short_gradients_known(p, device)) faster = short_gradients_are_faster(b, device);
#endif
    if (faster) return nullptr;
    return say(text, size, "seqlen_q=%d, seqlen_k=%d: made for short calls", p.seqlen_q, p.seqlen_k);
}
bool has_indices_for_chunks(const BackwardParams& b, const DeviceInfo&) {
    constexpr int kMost = 1 << 30;  // whole chunks of rows and keys still have 32-bit indices
    return b.forward.seqlen_q <= kMost && b.forward.seqlen_k <= kMost;
}
#endif

// ---- Hopper ----

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
const char* needs_queries(const BackwardParams& b, const DeviceInfo&, char*, size_t) {
    return b.forward.batch == 0 || b.forward.seqlen_q == 0 || tensor_extents(b.forward).rows_q == 0 ? "there are no queries to load"
                                                                                                    : nullptr;
}
const char* masks_refuse(const BackwardParams& b) {
    if (b.forward.intervals.data && !backward_serves_intervals(b.forward))
        return "takes no startend_row_indices beside softcap, ALiBi, bias, mask or dropout, or with softmax_scale <= 0";
    if (b.forward.blocks.data && !backward_serves_masks(b.forward))
        return "takes no block_mask beside softcap, ALiBi, bias, dropout or startend_row_indices, beside mask in a varlen call, with "
               "softmax_scale <= 0, or with more than 2^22 rows or keys";
    return nullptr;
}
const char* wgmma_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = masks_refuse(b)) return reason;
    return needs_queries(b, device, text, size);
}
const char* pair_refuses(const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    if (p.headdim <= 128 && p.headdim_v <= 128)
        return say(text, size, "headdim=%d, headdim_v=%d: wgmma_sm90 serves up to 128", p.headdim, p.headdim_v);
    if (const char* reason = masks_refuse(b)) return reason;
    return needs_queries(b, device, text, size);
}
const char* wide_float32_refuses(const BackwardParams& b, const DeviceInfo&, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    if (p.headdim > 128 || p.headdim_v > 128) return nullptr;
    return say(text, size, "headdim=%d, headdim_v=%d: wgmma_float32_sm90 serves up to 128", p.headdim, p.headdim_v);
}
bool has_blocks_for_parts(const BackwardParams& b, const DeviceInfo&) {
    const AttentionParams& p = b.forward;
    return int64_t(2) * p.batch * (ceil_div(p.seqlen_q + 128, 16) * p.nheads + ceil_div(p.seqlen_k + 128, 16) * p.nheads_k) <= kMostBlocks;
}
const char* float16_parts_yield(const BackwardParams& b, const DeviceInfo&, char* text, size_t size) {
    const AttentionParams& p = b.forward;
    if (float16_parts_are_faster(p, true)) return nullptr;
    return say(text, size, "seqlen_q=%d, seqlen_k=%d: mma_float32_sm80 is faster for short calls", p.seqlen_q, p.seqlen_k);
}
bool wgmma_fits(const BackwardParams& b, const DeviceInfo&) {
    const BackwardPlan plan = backward_plan(backward_choose(b.forward));
    const TensorExtents t = tensor_extents(b.forward);
    return backward_blocks(b.forward, plan) <= kMostBlocks && query_tiles(b, plan).count() <= kMostBlocks &&
           !rows_overflow(t.rows_q + t.rows_k);
}
#endif

constexpr uint32_t kOfTiles = kHints | kMaxScore | kKeySums | kVarlen | kScoresOfTiles | kAnyScale;

// Best first within a device.
constexpr BackwardKernel kKernels[] = {
    {.name = "mma_short_sm80",
     .summary = "short sequences in one launch (mma.sync): float16, bfloat16, head dims to 256, every option but chunks; deterministic",
     .device = FA_CUDA,
     .limits =
         {.dtypes = k16Bits, .gpus = kSm80ToSm90, .head_dims = head_dims(1, 256), .takes = kOfTiles | kNoKeys | kIntervals | kBlockMask},
     .refuses = FA_SM80(short_refuses),
     .fits = FA_SM80(has_blocks_for_clusters_of_8),
     .yields = FA_SM80(short_yields),
     .launch = FA_SM80(backward_mma_short_sm80)},
    {.name = "wgmma_sm90",
     .summary = "Hopper: TMA, wgmma, specialised warps; float16, bfloat16, head dims to 128, every option but chunks",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(8, 128),
                .takes = kOfTiles | kIntervals | kBlockMask,
                .memory = Memory::kTensorMaps},
     .refuses = FA_SM90(wgmma_refuses),
     .fits = FA_SM90(wgmma_fits),
     .workspace = FA_SM90(backward_wgmma_sm90_workspace),
     .launch = FA_SM90(backward_wgmma_sm90)},
    {.name = "wgmma_pair_sm90",
     .summary = "Hopper: as wgmma_sm90, two blocks share keys; head dims above 128, to 256",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(8, kBackwardWgmmaMaxHeadDim),
                .takes = kOfTiles | kIntervals | kBlockMask,
                .memory = Memory::kTensorMaps},
     .refuses = FA_SM90(pair_refuses),
     .fits = FA_SM90(wgmma_fits),
     .workspace = FA_SM90(backward_wgmma_sm90_workspace),
     .launch = FA_SM90(backward_wgmma_sm90)},
    {.name = "mma_sm80",
     .summary = "tensor cores (mma.sync): float16, bfloat16, head dims to 256, every option but chunks",
     .device = FA_CUDA,
     .limits =
         {.dtypes = k16Bits, .gpus = kFromSm80, .head_dims = head_dims(1, 256), .takes = kOfTiles | kNoKeys | kIntervals | kBlockMask},
     .fits = FA_SM80(has_blocks_for_tiles_of_32),
     .workspace = FA_SM80(backward_mma_sm80_workspace),
     .launch = FA_SM80(backward_mma_sm80)},
    {.name = "mma_wide_sm80",
     .summary = "tensor cores (mma.sync), P and dS through memory: float16, bfloat16, any head dim, every option but chunks",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits, .gpus = kFromSm80, .takes = kOfTiles | kNoKeys | kIntervals | kBlockMask},
     .fits = FA_SM80(has_indices_for_chunks),
     .workspace = FA_SM80(backward_mma_wide_sm80_workspace),
     .launch = FA_SM80(backward_mma_wide_sm80)},
    {.name = "wgmma_float32_sm90",
     .summary = "Hopper: float32 with float32's accuracy, wgmma on float16 parts; head dims to 128, every option except dropout",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32,
                .gpus = kHopper,
                .head_dims = head_dims(4, 128),
                .takes = kHints | kMaxScore | kKeySums | (kScoresOfTiles & ~kDropout) | kChunk | kIntervals | kBlockMask,
                .memory = Memory::kWideRows},
     .fits = FA_SM90(has_blocks_for_parts),
     .yields = FA_SM90(float16_parts_yield),
     .workspace = FA_SM90(backward_wgmma_float32_sm90_workspace),
     .launch = FA_SM90(backward_wgmma_float32_sm90)},
    {.name = "wgmma_float32_wide_sm90",
     .summary = "Hopper: as wgmma_float32_sm90, warpgroups divide the products; head dims above 128, to 256, no softcap or dropout",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32,
                .gpus = kHopper,
                .head_dims = head_dims(4, 256),
                .takes = kHints | kMaxScore | kKeySums | (kScoresOfTiles & ~(kSoftcap | kDropout)) | kChunk | kIntervals | kBlockMask,
                .memory = Memory::kWideRows},
     .refuses = FA_SM90(wide_float32_refuses),
     .fits = FA_SM90(has_blocks_for_parts),
     .yields = FA_SM90(float16_parts_yield),
     .workspace = FA_SM90(backward_wgmma_float32_wide_sm90_workspace),
     .launch = FA_SM90(backward_wgmma_float32_wide_sm90)},
    {.name = "mma_float32_sm80",
     .summary = "tensor cores (mma.sync): float32 with float32's accuracy, three products of tf32 parts; head dims to 512, every option",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32, .gpus = kFromSm80, .head_dims = head_dims(1, 512)},
     .refuses = FA_SM80(split_refuses),
     .fits = FA_SM80(has_blocks_for_halves_of_32),
     .yields = FA_SM80(split_products_yield),
     .workspace = FA_SM80(backward_mma_float32_sm80_workspace),
     .launch = FA_SM80(backward_mma_float32_sm80)},
    {.name = "simple",
     .summary = "CUDA cores, no atomics: any head dim, dtype, mask and option; deterministic",
     .device = FA_CUDA,
     .limits = {.dtypes = kAllButFloat8},
     .fits = FA_GPU(simple_fits),
     .workspace = FA_GPU(backward_simple_workspace),
     .launch = FA_GPU(backward_simple)},
    cpu_kernel<cpu::Isa::kAvx512>("cpu_avx512", "tiles of keys against blocks of queries, 16 lanes"),
    cpu_kernel<cpu::Isa::kAvx2>("cpu_avx2", "tiles of keys against blocks of queries, 8 lanes"),
    cpu_kernel<cpu::Isa::kNeon>("cpu_neon", "tiles of keys against blocks of queries, 4 lanes"),
    cpu_kernel<cpu::Isa::kPortable>("cpu_portable", "tiles of keys against blocks of queries, whatever the compiler makes of it"),
    {.name = "cpu_naive",
     .summary = "gradients of standard attention, a row of S at a time",
     .device = FA_CPU,
     .limits = {.dtypes = kAllButFloat8},
     .workspace = [](const BackwardParams& b, const DeviceInfo&) { return cpu::backward_naive_workspace(b); },
     .run =
         [](const BackwardParams& b) {
             cpu::backward_naive(b);
             cpu::backward_scores(b);
         }},
};

}  // namespace

Table<BackwardKernel> backward_kernels() { return table_of(kKernels); }

}  // namespace fa
