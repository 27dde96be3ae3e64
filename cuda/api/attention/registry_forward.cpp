// registry_forward.cpp: the kernels of the forward pass, best first on each device: what each takes, and to which calls it yields. Those of
// registry_decode.cpp come before them.
#include <algorithm>

#include "api/attention/limits.h"
#include "api/attention/registry.h"
#include "attention/common/float16_parts.h"
#include "attention/common/interval_bounds.h"
#include "attention/common/tiles_mma_sm80.h"
#include "attention/forward/common/work_list.h"
#include "attention/forward/fp8_sm90/plan.h"
#include "attention/forward/mma_sm80/tiles_split.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "cpu/attention/kernels.h"

#if FA_WITH_CUDA
#include "attention/kernels.h"
#endif

namespace fa {
namespace {

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
bool wgmma_float32_is_best(const AttentionParams&, const DeviceInfo&);  // needs the table
#endif

// ---- CPU ----

template <cpu::Isa isa>
const char* lacks(const AttentionParams&, const DeviceInfo&, char*, size_t) {
    return cpu::isa_available(isa) ? nullptr : "this processor, or this build, lacks the instruction set";
}
template <cpu::Isa isa>
constexpr Kernel cpu_kernel(const char* name, const char* summary, uint32_t dtypes = kAllButFloat8, uint32_t takes = kAllFeatures) {
    return {.name = name,
            .summary = summary,
            .device = FA_CPU,
            .limits = {.dtypes = dtypes, .takes = takes, .sums_keys = true},
            .refuses = lacks<isa>,
            .workspace = [](const AttentionParams& p, const DeviceInfo&) { return cpu::forward_workspace(p, isa); },
            .run = [](const AttentionParams& p) { cpu::forward(p, isa); }};
}
const char* beyond_all_memory(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (cpu::forward_naive_workspace(p) < cpu::kMostWorkspace) return nullptr;
    return say(text, size, "S of seqlen_q=%d x seqlen_k=%d for each of num_threads=%d is beyond all memory", p.seqlen_q, p.seqlen_k,
               p.num_threads);
}

// ---- any GPU ----

#if FA_WITH_CUDA
bool has_blocks_for_tiles_of_64(const AttentionParams& p, const DeviceInfo&) {
    return ceil_div(p.seqlen_q, 64) * p.nheads * p.batch <= kMostBlocks;
}
bool has_blocks_for_all_of_S(const AttentionParams& p, const DeviceInfo&) {
    const int64_t tiles = ceil_div(p.seqlen_q, 16) * ceil_div(p.seqlen_k > p.headdim_v ? p.seqlen_k : p.headdim_v, 16);
    const int64_t heads = int64_t(p.batch) * p.nheads;
    return heads == 0 || tiles <= kMostBlocks / heads;
}
#endif

// ---- sm_80 ----

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
// The smallest tile has 32 rows; above 192 columns it may cover half of them. In float32 it has 16 rows above head dim 256.
bool has_blocks_for_tiles_of_32(const AttentionParams& p, const DeviceInfo&) {
    return ceil_div(p.seqlen_q, 32) * p.nheads * p.batch * (p.headdim_v > 192 || p.headdim > 256 ? 2 : 1) <= kMostBlocks;
}
// Whether mma_sm80 is faster than wgmma_sm90 for a short call, if it serves the call.
bool mma_is_faster(const AttentionParams& p, const DeviceInfo& device) {
    if (p.dtype == DType::kFloat32) return false;
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    const int64_t heads = int64_t(p.deciding_batch()) * p.nheads, left = p.window_left, right = p.window_right;
    // Of packed sequences the average, unless a few are much longer: the grid has blocks for the longest in every sequence.
    int64_t rows = p.cu_seqlens_q && p.batch ? (int64_t(p.total_q) + p.batch - 1) / p.batch : p.seqlen_q;
    if (ceil_div(p.seqlen_q, 64) > 2 * ceil_div(rows, 64)) rows = p.seqlen_q;
    int64_t keys = p.deciding_keys();
    if (left >= 0) keys = std::min(keys, left + std::min<int64_t>(rows, 64) + (right >= 0 ? right : keys));
    int64_t steps = ceil_div(keys, 64);
    // Plans with options of the scores start as fast as others, but a tile takes this kernel far longer.
    if (wgmma_scores_are_natural(p))
        return keys <= (d <= 128 ? 64 : 32) && (rows <= 64 || ceil_div(rows, 64) * heads <= 4 * int64_t(device.multiprocessors));
    if (d <= 64 && left < 0 && right == 0 && rows == keys && steps > 4) steps = steps / 2 + 1;  // 2 x 8 x 378: 8.6 -> 7.3 us
    // 11 x 16 queries over 2048 keys, 16 heads of 80, a window of 1040 keys: 21.9 -> 12.7 us.
    if (left >= 0 && d <= 128 && rows <= 16 && p.group == 1 && steps <= 20 && heads >= device.multiprocessors) return true;
    return mma_is_faster_than_wgmma(d, p.group, heads, rows, steps, device.multiprocessors);
}
size_t bounds_workspace(const AttentionParams& p, const DeviceInfo&) { return interval_bounds_bytes(p, kBoundsKeys); }
const char* takes_no_padding_in_pages(const AttentionParams& p, const DeviceInfo&, char*, size_t) {
    return p.cache.leftpad && p.cache.block_table ? "cache_leftpad is set: it takes none with pages" : nullptr;
}
// Tensor cores with float32's accuracy are ahead of the CUDA cores of sm_80, 90 and 100, but not of their smaller relatives, whose tensor
// cores have a quarter of the rate.
const char* split_products_yield(const AttentionParams&, const DeviceInfo& device, char*, size_t) {
    return device.shared_memory > kMostSharedSm86 ? nullptr : "the CUDA cores of this GPU are faster";
}
const char* split_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (d > 256 && device.shared_memory < kSplitWideBytes)
        return say(text, size, "headdim=%d, headdim_v=%d: above 256 a block needs %zu bytes of shared memory, and this GPU has %zu",
                   p.headdim, p.headdim_v, kSplitWideBytes, device.shared_memory);
    return takes_no_padding_in_pages(p, device, text, size);
}
const char* needs_shared_memory(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const size_t bytes = forward_float32_sm80_shared(p);
    if (bytes <= device.shared_memory) return nullptr;
    return say(text, size, "headdim=%d: a block needs %zu bytes of shared memory, and this GPU has %zu", p.headdim, bytes,
               device.shared_memory);
}
#endif

// ---- Hopper ----

#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
bool has_items_for_tiles_of_64(const AttentionParams& p, const DeviceInfo&) {
    const int64_t rows = p.cu_seqlens_q ? int64_t(p.total_q) + p.total_k : int64_t(p.seqlen_q) + p.seqlen_k;
    return work_items(p, 64) <= kMostBlocks && !rows_overflow(rows);
}
const char* wgmma_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (!mma_wins_short_calls(p, device)) return nullptr;
    return say(text, size, "seqlen_q=%d, seqlen_k=%d: mma_sm80 is faster for short sequences", p.seqlen_q, p.seqlen_k);
}
const char* wgmma_refuses(const AttentionParams& p, const DeviceInfo&, char*, size_t) {
    if (p.intervals.data && (p.blocks.data || !wgmma_intervals_serve(p)))
        return "takes no startend_row_indices beside softcap, ALiBi, bias, mask, block_mask or dropout, with return_max_score or "
               "softmax_scale <= 0";
    if (p.blocks.data && !wgmma_blocks_serve(p))
        return "takes no block_mask beside softcap, ALiBi, bias or dropout, beside mask in packed sequences, with return_max_score or "
               "softmax_scale <= 0";
    return nullptr;
}
const char* wgmma_variant(const AttentionParams& p, const DeviceInfo& device) {
    return wgmma_plan_name(wgmma_choose(p, device.multiprocessors));
}
bool has_blocks_for_parts(const AttentionParams& p, const DeviceInfo&) {
    return p.batch * (ceil_div(p.seqlen_q, 32) * p.nheads + ceil_div(p.seqlen_k, 16) * p.nheads_k) <= kMostBlocks;
}
const char* tf32_yields(const AttentionParams& p, const DeviceInfo& device, char*, size_t) {
    // 8 x 2048, 2 heads, head dim 160: 477 -> 254 us; 1 x 256 over 2061 keys, causal, head dim 192: 238 -> 113 us. At head dim 128 options
    // decide: 8 x 1024, 24/12 heads with a mask of pairs 1895 -> 1022 us; 8 x 1025, 4 heads without 224 -> 489 us.
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if ((d > 128 || (d > 96 && wgmma_scores_are_natural(p))) && p.seqlen_q >= 256 && p.seqlen_k >= 768 && wgmma_float32_is_best(p, device))
        return "wgmma_float32_sm90 is faster, and more accurate";
    return nullptr;
}
const char* float16_parts_yield(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (float16_parts_are_faster(p, false)) return nullptr;
    return say(text, size, "seqlen_q=%d, seqlen_k=%d: mma_float32_sm80 is faster for short calls", p.seqlen_q, p.seqlen_k);
}
const char* wide_yields(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    // 4 x 5 queries over 128 keys of 128 / 8 heads, head dim 384: 44.7 -> 24.4 us.
    if ((p.seqlen_q <= 16 && p.deciding_keys() <= 256) || (p.seqlen_q <= 32 && p.deciding_keys() <= 64))
        return say(text, size, "seqlen_q=%d, seqlen_k=%d: mma_sm80 is faster for so few queries and keys", p.seqlen_q, p.seqlen_k);
    if (p.headdim > kWgmmaMaxHeadDim || p.headdim_v > kWgmmaMaxHeadDim) return nullptr;
    return say(text, size, "headdim=%d, headdim_v=%d: up to %d other kernels are faster", p.headdim, p.headdim_v, kWgmmaMaxHeadDim);
}
const char* split_yields(const AttentionParams& p, const DeviceInfo& device, char*, size_t) {
    return forward_wgmma_split_sm90_wins(p, device) ? nullptr : "other kernels are faster where rows fill the GPU, or are few";
}
AttentionParams with_fast_accum(AttentionParams p, bool fast_accum) {
    p.fast_accum = fast_accum;
    return p;
}
template <bool kFastAccum>
size_t fp8_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return forward_fp8_sm90_workspace(with_fast_accum(p, kFastAccum), device);
}
template <bool kFastAccum>
cudaError_t fp8_launch(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return forward_fp8_sm90(with_fast_accum(p, kFastAccum), device, stream);
}
#endif
#if FA_WITH_CUTE
const char* takes_64_or_128(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (p.headdim == p.headdim_v && (p.headdim == 64 || p.headdim == 128))
        return no_tensor_map("out", p.out, p.batch, p.seqlen_q, p.nheads, 2, text, size);
    return say(text, size, "headdim=%d, headdim_v=%d: 64 or 128, the same for both", p.headdim, p.headdim_v);
}
bool cute_fits(const AttentionParams& p, const DeviceInfo&) {
    return ceil_div(p.seqlen_q, 128) * p.nheads * p.batch <= kMostBlocks && !rows_overflow(int64_t(p.seqlen_q) + p.seqlen_k);
}
const char* cute_yields(const AttentionParams&, const DeviceInfo&, char*, size_t) {
    return "it is there to be read beside wgmma_sm90, and runs when it is asked for by name";
}
#endif

constexpr uint32_t kResults = kMaxScore | kKeySums;  // beside out and lse

// Best first within a device; those of registry_decode.cpp come before these.
constexpr Kernel kKernels[] = {
    {.name = "wgmma_split_sm90",
     .summary = "Hopper: as wgmma_sm90 where rows do not fill the GPU: keys in pieces, the heads of a key head packed; plain, causal",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(8, kWgmmaMaxHeadDim),
                .takes = kHints | kKeySums | kCache | kPages | kSinks | kTree,
                .page_step = 8,
                .memory = Memory::kTensorMaps},
     .fits = FA_SM90(forward_wgmma_split_sm90_fits),
     .yields = FA_SM90(split_yields),
     .workspace = FA_SM90(forward_wgmma_split_sm90_workspace),
     .launch = FA_SM90(forward_wgmma_split_sm90)},
    {.name = "wgmma_sm90",
     .summary = "Hopper: TMA, wgmma, specialised warps; float16, bfloat16, head dims to 256, every option but chunks and trees",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(8, kWgmmaMaxHeadDim),
                .takes = kHints | kResults | kVarlen | kCache | kPages | kScoresOfTiles | kAnyScale | kIntervals | kBlockMask,
                .memory = Memory::kTensorMaps},
     .refuses = FA_SM90(wgmma_refuses),
     .fits = FA_SM90(has_items_for_tiles_of_64),
     .yields = FA_SM90(wgmma_yields),
     .workspace = FA_SM90(forward_wgmma_sm90_workspace),
     .launch = FA_SM90(forward_wgmma_sm90),
     .variant = FA_SM90(wgmma_variant)},
    {.name = "wgmma_wide_sm90",
     .summary = "Hopper: pairs of blocks that share K and V; float16, bfloat16, head dims to 512, options of scores",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(8, kWgmmaWideMaxHeadDim),
                .takes = kHints | kKeySums | kVarlen | kCache | kPages | kScoresOfTiles | kAnyScale,
                .page_step = 8,
                .memory = Memory::kTensorMaps},
     .fits = FA_SM90(has_items_for_tiles_of_64),
     .yields = FA_SM90(wide_yields),
     .workspace = FA_SM90(forward_wgmma_wide_sm90_workspace),
     .launch = FA_SM90(forward_wgmma_wide_sm90)},
    {.name = "mma_sm80",
     .summary = "tensor cores (mma.sync): float16, bfloat16, head dims to 512, every option",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits, .gpus = kFromSm80, .head_dims = head_dims(1, 512), .takes = kAllFeatures & ~k8BitCache},
     .refuses = FA_SM80(takes_no_padding_in_pages),
     .fits = FA_SM80(has_blocks_for_tiles_of_32),
     .workspace = FA_SM80(bounds_workspace),
     .launch = FA_SM80(forward_mma_sm80)},
    {.name = "mma_tf32_sm80",
     .summary = "tensor cores (mma.sync): float32 with allow_tf32, head dims to 256, every option",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32,
                .gpus = kFromSm80,
                .head_dims = head_dims(1, 256),
                .takes = kAllFeatures & ~(k8BitCache | kPages),
                .needs = kTf32},
     .fits = FA_SM80(has_blocks_for_tiles_of_32),
     .yields = FA_SM90(tf32_yields),
     .workspace = FA_SM80(bounds_workspace),
     .launch = FA_SM80(forward_mma_tf32_sm80)},
    {.name = "wgmma_float32_sm90",
     .summary = "Hopper: float32 with float32's accuracy, wgmma on float16 parts; head dims to 256, every option of scores",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32,
                .gpus = kHopper,
                .head_dims = head_dims(4, 256),
                .takes = kHints | kKeySums | kScoresOfTiles | kChunk | kAnyScale | kIntervals | kBlockMask,
                .memory = Memory::kWideRows},
     .fits = FA_SM90(has_blocks_for_parts),
     .yields = FA_SM90(float16_parts_yield),
     .workspace = FA_SM90(forward_wgmma_float32_sm90_workspace),
     .launch = FA_SM90(forward_wgmma_float32_sm90)},
    {.name = "mma_float32_sm80",
     .summary = "tensor cores (mma.sync): float32 with float32's accuracy, three products of tf32 parts; head dims to 512, every option",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32, .gpus = kFromSm80, .head_dims = head_dims(1, 512), .takes = kAllFeatures & ~k8BitCache},
     .refuses = FA_SM80(split_refuses),
     .fits = FA_SM80(has_blocks_for_tiles_of_32),
     .yields = FA_SM80(split_products_yield),
     .launch = FA_SM80(forward_mma_float32_sm80)},
    {.name = "float32_sm80",
     .summary = "CUDA cores: float32 without tf32, head dims to 256, plain, causal and windowed calls",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32,
                .gpus = kFromSm80,
                .head_dims = head_dims(4, 256),
                .takes = kHints | kKeySums | kVarlen | kCache | kLeftEdge | kSinks | kAnyScale | kNoKeys,
                .memory = Memory::kWideRows},
     .refuses = FA_SM80(needs_shared_memory),
     .fits = FA_SM80(has_blocks_for_tiles_of_64),
     .launch = FA_SM80(forward_float32_sm80)},
    {.name = "minimal",
     .summary = "online softmax on CUDA cores: any head dim, dtype, mask and option",
     .device = FA_CUDA,
     .limits = {.dtypes = kAllButFloat8},
     .fits = FA_GPU(has_blocks_for_tiles_of_64),
     .launch = FA_GPU(forward_minimal)},
    {.name = "naive",
     .summary = "standard attention in three steps, S in the workspace",
     .device = FA_CUDA,
     .limits = {.dtypes = kAllButFloat8, .sums_keys = true},
     .fits = FA_GPU(has_blocks_for_all_of_S),
     .workspace = FA_GPU(forward_naive_workspace),
     .launch = FA_GPU(forward_naive)},
    {.name = "cute_sm90",
     .summary = "Hopper: the loop of wgmma_sm90 in CuTe C++; float16, bfloat16, head dims 64 and 128, plain or causal",
     .device = FA_CUDA,
     .limits =
         {.dtypes = k16Bits, .gpus = kHopper, .head_dims = head_dims(64, 128), .takes = kHints | kKeySums, .memory = Memory::kTensorMaps},
     .refuses = FA_CUTE(takes_64_or_128),
     .fits = FA_CUTE(cute_fits),
     .yields = FA_CUTE(cute_yields),
     .launch = FA_CUTE(forward_cute_sm90)},
    {.name = "fp8_fast_sm90",
     .summary = "Hopper: as fp8_sm90, with fast_accum: P v summed in the tensor cores",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat8,
                .gpus = kHopper,
                .head_dims = head_dims(16, kFp8MaxHeadDim),
                .takes = kHints | kVarlen | kNoKeys,
                .needs = kFastAccum,
                .memory = Memory::kTensorMaps},
     .fits = FA_SM90(has_items_for_tiles_of_64),
     .workspace = FA_SM90(fp8_workspace<true>),
     .launch = FA_SM90(fp8_launch<true>)},
    {.name = "fp8_sm90",
     .summary = "Hopper: float8_e4m3 inputs with a factor for every head, head dims to 256, plain or causal",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat8,
                .gpus = kHopper,
                .head_dims = head_dims(16, kFp8MaxHeadDim),
                .takes = kHints | kVarlen | kNoKeys,
                .memory = Memory::kTensorMaps},
     .fits = FA_SM90(has_items_for_tiles_of_64),
     .workspace = FA_SM90(fp8_workspace<false>),
     .launch = FA_SM90(fp8_launch<false>)},
    cpu_kernel<cpu::Isa::kAmx>("cpu_amx", "tiled online softmax, 16 lanes, products of bfloat16 in tile registers (AMX)",
                               one(DType::kBFloat16), kAllFeatures & ~k8BitCache),
    cpu_kernel<cpu::Isa::kAvx512>("cpu_avx512", "tiled online softmax, 16 lanes"),
    cpu_kernel<cpu::Isa::kAvx2>("cpu_avx2", "tiled online softmax, 8 lanes"),
    cpu_kernel<cpu::Isa::kNeon>("cpu_neon", "tiled online softmax, 4 lanes"),
    cpu_kernel<cpu::Isa::kPortable>("cpu_portable", "tiled online softmax, whatever the compiler makes of it"),
    {.name = "cpu_naive",
     .summary = "standard attention in three steps, S in the workspace",
     .device = FA_CPU,
     .limits = {.dtypes = kAllButFloat8, .sums_keys = true},
     .refuses = beyond_all_memory,
     .workspace = [](const AttentionParams& p, const DeviceInfo&) { return cpu::forward_naive_workspace(p); },
     .run = [](const AttentionParams& p) { cpu::forward_naive(p); }},
};

constexpr bool is_named(const Kernel& kernel, const char* name) {
    const char* at = kernel.name;
    while (*at && *at == *name) ++at, ++name;
    return *at == *name;
}
constexpr const Kernel& kernel_called(const char* name) {
    const Kernel* kernel = kKernels;
    while (!is_named(*kernel, name)) ++kernel;
    return *kernel;
}
constexpr const Kernel &kSplit = kernel_called("wgmma_split_sm90"), &kFloat32Parts = kernel_called("wgmma_float32_sm90"),
                       &kMma = kernel_called("mma_sm80");
bool serves_well(const Kernel& kernel, const AttentionParams& p, const DeviceInfo& device) {
    char text[1];
    if (!kernel.built() || (kernel.yields && kernel.yields(p, device, text, 0))) return false;
    return !refusal(kernel, features_of(p), p, device, text, 0).reason;
}
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
bool wgmma_float32_is_best(const AttentionParams& p, const DeviceInfo& device) { return serves_well(kFloat32Parts, p, device); }
#endif

}  // namespace

bool wgmma_split_is_best(const AttentionParams& p, const DeviceInfo& device) { return serves_well(kSplit, p, device); }

bool mma_wins_short_calls([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] const DeviceInfo& device) {
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    return mma_is_faster(p, device) && serves_well(kMma, p, device);
#else
    return false;
#endif
}

Table<Kernel> forward_kernels() {
    const Table<Kernel> first = decode_kernels(), then = table_of(kKernels);
    return {first.rows, first.count, then.rows, then.count, fastest_for_few_queries};
}

}  // namespace fa
