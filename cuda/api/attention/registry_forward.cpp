// registry_forward.cpp: the kernels of the forward pass, best first on each device. Those of registry_decode.cpp come before them.
#include "api/attention/registry.h"

#include <cstdio>
#include <utility>

#include "api/attention/refusals.h"
#include "api/common/serve.h"
#include "api/common/status.h"
#include "cpu/attention/kernels.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>

#include "attention/common/tiles_mma_sm80.h"
#include "attention/forward/common/work_list.h"
#include "attention/forward/fp8_sm90/plan.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "attention/kernels.h"
#endif

namespace fa {
namespace {

// For kernels that accept every kind of cache.
const char* general_refuses(const AttentionParams& p) { return is_float8(p) ? kNoFloat8 : nullptr; }

// Marks a kernel whose launch computes key_sums too.
constexpr Kernel with_key_sums(Kernel kernel) {
    kernel.gives_key_sums = true;
    return kernel;
}

// ---- CPU ----

template <cpu::Isa isa>
const char* needs_isa(const AttentionParams& p, const DeviceInfo&, char*, size_t) {
    if (const char* reason = general_refuses(p)) return reason;
    return cpu::isa_available(isa) ? nullptr : "this processor, or this build, lacks the instruction set";
}
template <cpu::Isa isa>
size_t cpu_workspace(const AttentionParams& p, const DeviceInfo&) {
    return cpu::forward_workspace(p, isa);
}
template <cpu::Isa isa>
fa_status cpu_launch(const AttentionParams& p, const DeviceInfo&, void*) {
    return on_host([&] { cpu::forward(p, isa); });
}
template <cpu::Isa isa>
constexpr Kernel cpu_kernel(const char* name, const char* summary) {
    return with_key_sums({{name, summary, FA_CPU, needs_isa<isa>, cpu_workspace<isa>, cpu_launch<isa>}});
}
const char* cpu_naive_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = general_refuses(p)) return reason;
    if (cpu::forward_naive_workspace(p) < cpu::kMostWorkspace) return nullptr;
    return say(text, size, "S of seqlen_q=%d x seqlen_k=%d for each of num_threads=%d is beyond all memory", p.seqlen_q, p.seqlen_k,
               p.num_threads);
}
size_t cpu_naive_workspace(const AttentionParams& p, const DeviceInfo&) { return cpu::forward_naive_workspace(p); }
fa_status cpu_naive_launch(const AttentionParams& p, const DeviceInfo&, void*) {
    return on_host([&] { cpu::forward_naive(p); });
}

// ---- CUDA: any GPU ----

#if FA_WITH_CUDA
size_t no_workspace(const AttentionParams&, const DeviceInfo&) { return 0; }

const char* minimal_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = general_refuses(p)) return reason;
    return too_many_blocks(p, ceil_div(p.seqlen_q, 64) * p.nheads * p.batch, text, size);
}
fa_status minimal_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("minimal", forward_minimal(p, static_cast<cudaStream_t>(stream)));
}

const char* naive_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = general_refuses(p)) return reason;
    const int64_t tiles = ceil_div(p.seqlen_q, 16) * ceil_div(p.seqlen_k > p.headdim_v ? p.seqlen_k : p.headdim_v, 16);
    const int64_t heads = int64_t(p.batch) * p.nheads;
    if (heads == 0 || tiles <= kMaxGrid / heads) return nullptr;
    return say(text, size, "S of %d x %d x %d x %d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q, p.seqlen_k);
}
size_t naive_workspace(const AttentionParams& p, const DeviceInfo&) { return forward_naive_workspace(p); }
fa_status naive_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("naive", forward_naive(p, static_cast<cudaStream_t>(stream)));
}

// ---- sm_80 ----

#if FA_WITH_MMA_SM80
const char* mma_shape_refuses(const AttentionParams& p, const DeviceInfo& device, int most, char* text, size_t size) {
    const char* reason = needs_sm80(device, text, size);
    if (!reason) reason = takes_head_dims(p, 1, most, text, size);
    const int64_t parts = p.headdim_v > 192 ? 2 : 1;  // the smallest tile has 32 rows; above 192 columns it may cover half of them
    if (!reason) reason = too_many_blocks(p, ceil_div(p.seqlen_q, 32) * p.nheads * p.batch * parts, text, size);
    return reason;
}
const char* mma_sm80_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = takes_16_bits(p)) return reason;
    if (const char* reason = takes_no_8bit_cache(p)) return reason;
    if (p.cache.leftpad && p.cache.block_table) return "cache_leftpad is set: it takes none with pages";
    return mma_shape_refuses(p, device, 512, text, size);
}
fa_status mma_sm80_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("mma_sm80", forward_mma_sm80(p, device.multiprocessors, device.shared_memory, static_cast<cudaStream_t>(stream)));
}
const char* mma_tf32_sm80_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.dtype != DType::kFloat32) return "takes float32 only, with allow_tf32";
    if (!p.allow_tf32) return "allow_tf32=0: its products are rounded to tf32, which float32 inputs must allow";
    if (p.cache.block_table) return "block_table is set: it takes no pages";
    if (const char* reason = takes_no_8bit_cache(p)) return reason;
    return mma_shape_refuses(p, device, 256, text, size);
}
fa_status mma_tf32_sm80_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("mma_tf32_sm80",
                    forward_mma_tf32_sm80(p, device.multiprocessors, device.shared_memory, static_cast<cudaStream_t>(stream)));
}

const char* float32_sm80_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.dtype != DType::kFloat32) return "takes float32 only";
    const char* reason = needs_sm80(device, text, size);
    if (!reason) reason = gives_no_max_score(p);
    if (!reason) reason = takes_head_dims(p, 4, 256, text, size);
    if (!reason) reason = takes_options(p, kLeftEdge | kSinks, text, size);
    if (reason) return reason;
    if (p.cache.block_table) return "block_table is set: it takes no pages";
    if ((reason = takes_no_8bit_cache(p))) return reason;
    for (const auto& [name, view] : {std::pair{"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"out", &p.out}})
        if ((reason = no_wide_access(name, *view, 4, text, size))) return reason;
    if (const size_t bytes = forward_float32_sm80_shared(p); bytes > device.shared_memory)
        return say(text, size, "headdim=%d: a block needs %zu bytes of shared memory, and this GPU has %zu", p.headdim, bytes,
                   device.shared_memory);
    return too_many_blocks(p, ceil_div(p.seqlen_q, 64) * p.nheads * p.batch, text, size);
}
fa_status float32_sm80_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("float32_sm80",
                    forward_float32_sm80(p, device.multiprocessors, device.shared_memory, static_cast<cudaStream_t>(stream)));
}
#endif

// ---- Hopper ----

#if FA_WITH_WGMMA_SM90
// Limits of extents and memory for kernels that load by TMA.
const char* hopper_memory_refuses(const AttentionParams& p, int element_bytes, char* text, size_t size) {
    const int64_t rows = p.cu_seqlens_q ? int64_t(p.total_q) + p.total_k : int64_t(p.seqlen_q) + p.seqlen_k;
    const char* reason = overflows(p, work_items(p, 64) > kMaxGrid || rows_overflow(rows), text, size);
    if (!reason) reason = no_tensor_maps(p, element_bytes, text, size);
    if (!reason) reason = no_wide_access("out", p.out, text, size);
    return reason;
}

const char* wgmma_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = takes_no_8bit_cache(p);
    if (!reason) reason = takes_head_dims(p, 8, kWgmmaMaxHeadDim, text, size);
    if (!reason) reason = takes_options(p, kOptionsOfTiles, text, size);
    if (!reason && (p.seqlen_k == 0 || (p.cu_seqlens_q && p.total_k == 0))) reason = "there are no keys to load";
    if (!reason) reason = hopper_memory_refuses(p, 2, text, size);
    return reason;
}
const char* wgmma_sm90_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
#if FA_WITH_MMA_SM80
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (!wgmma_scores_are_natural(p) &&
        mma_is_faster_than_wgmma(d, int64_t(p.deciding_batch()) * p.nheads, p.seqlen_q, p.deciding_keys(), device.multiprocessors))
        return say(text, size, "seqlen_q=%d, seqlen_k=%d: mma_sm80 is faster for short sequences", p.seqlen_q, p.seqlen_k);
#endif
    return nullptr;
}
size_t wgmma_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return forward_wgmma_sm90_workspace(p, device.multiprocessors);
}
fa_status wgmma_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("wgmma_sm90", forward_wgmma_sm90(p, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

const char* wgmma_wide_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = gives_no_max_score(p);
    if (!reason) reason = takes_no_8bit_cache(p);
    if (!reason) reason = takes_head_dims(p, 8, kWgmmaWideMaxHeadDim, text, size);
    if (!reason) reason = takes_pages_of_8(p, text, size);
    if (!reason) reason = takes_options(p, kLeftEdge | kSoftcap | kAlibi | kSinks, text, size);
    if (!reason && (p.seqlen_k == 0 || (p.cu_seqlens_q && p.total_k == 0))) reason = "there are no keys to load";
    if (!reason) reason = hopper_memory_refuses(p, 2, text, size);
    return reason;
}
const char* wgmma_wide_sm90_yields(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (p.headdim > kWgmmaMaxHeadDim || p.headdim_v > kWgmmaMaxHeadDim) return nullptr;
    return say(text, size, "headdim=%d, headdim_v=%d: up to %d other kernels are faster", p.headdim, p.headdim_v, kWgmmaMaxHeadDim);
}
size_t wgmma_wide_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return forward_wgmma_wide_sm90_workspace(p, device.multiprocessors);
}
fa_status wgmma_wide_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("wgmma_wide_sm90", forward_wgmma_wide_sm90(p, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

const char* wgmma_split_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = gives_no_max_score(p);
    if (!reason && p.cu_seqlens_q) reason = "takes no packed sequences";
    if (!reason) reason = takes_no_8bit_cache(p);
    if (!reason) reason = takes_head_dims(p, 8, kWgmmaMaxHeadDim, text, size);
    if (!reason) reason = takes_options(p, kSinks | kTree, text, size);
    if (!reason) reason = takes_positive_scale(p, text, size);
    if (!reason) reason = takes_pages_of_8(p, text, size);
    if (!reason && p.seqlen_k == 0) reason = "there are no keys to load";
    if (!reason) reason = overflows(p, !forward_wgmma_split_sm90_fits(p, device), text, size);
    if (!reason) reason = no_tensor_maps(p, 2, text, size);
    if (!reason) reason = no_wide_access("out", p.out, text, size);
    return reason;
}
const char* wgmma_split_sm90_yields(const AttentionParams& p, const DeviceInfo& device, char*, size_t) {
    return forward_wgmma_split_sm90_wins(p, device) ? nullptr : "other kernels are faster where rows fill the GPU, or are few";
}
size_t wgmma_split_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return forward_wgmma_split_sm90_workspace(p, device);
}
fa_status wgmma_split_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("wgmma_split_sm90", forward_wgmma_split_sm90(p, device, static_cast<cudaStream_t>(stream)));
}

const char* mla_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.headdim != 576 || p.headdim_v != 512 || !p.cache.entries)
        return say(text, size, "headdim=%d, headdim_v=%d: it serves a cache of 576 and 512", p.headdim, p.headdim_v);
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = takes_no_8bit_cache(p);
    if (!reason) reason = takes_pages_of_8(p, text, size);
    if (!reason) reason = takes_options(p, kLeftEdge, text, size);
    if (!reason) reason = takes_positive_scale(p, text, size);
    if (!reason && p.seqlen_k == 0) reason = "there are no keys to load";
    if (!reason) {
        const int64_t rows = int64_t(p.seqlen_q) * p.group * p.batch * p.nheads_k,
                      blocks = decode_mla_sm90_blocks(p, device.multiprocessors);
        reason = overflows(p, rows > kMaxGrid / 64 || blocks > kMaxGrid || rows_overflow(p.seqlen_k), text, size);
    }
    if (!reason) reason = no_tensor_maps(p, 2, text, size);
    if (!reason) reason = no_wide_access("out", p.out, text, size);
    return reason;
}
size_t mla_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return decode_mla_sm90_workspace(p, device.multiprocessors);
}
fa_status mla_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("mla_sm90", decode_mla_sm90(p, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

const char* fp8_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (!is_float8(p)) return "takes float8_e4m3 only";
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = gives_no_max_score(p);
    if (!reason && p.key_sums) reason = "gives no key_sums";
    if (!reason) reason = takes_head_dims(p, 16, kFp8MaxHeadDim, text, size);
    if (!reason) reason = takes_options(p, 0, text, size);
    if (!reason) reason = takes_positive_scale(p, text, size);
    if (!reason) reason = hopper_memory_refuses(p, 1, text, size);
    return reason;
}
const char* fp8_fast_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (is_float8(p) && !p.fast_accum) return "fast_accum=0: the tensor cores keep 14 bits of its sums, which the call must allow";
    return fp8_sm90_refuses(p, device, text, size);
}
AttentionParams fp8_params(AttentionParams p, bool fast_accum) {
    p.fast_accum = fast_accum;
    return p;
}
template <bool kFastAccum>
size_t fp8_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return forward_fp8_sm90_workspace(fp8_params(p, kFastAccum), device.multiprocessors);
}
template <bool kFastAccum>
fa_status fp8_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched(kFastAccum ? "fp8_fast_sm90" : "fp8_sm90",
                    forward_fp8_sm90(fp8_params(p, kFastAccum), device.multiprocessors, static_cast<cudaStream_t>(stream)));
}
#if FA_WITH_CUTE
const char* cute_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const char* reason = needs_hopper(device, text, size);
    if (!reason) reason = takes_16_bits(p);
    if (!reason) reason = gives_no_max_score(p);
    if (!reason && p.cu_seqlens_q) reason = "takes no packed sequences";
    if (!reason && p.cache.entries) reason = "takes no cache";
    if (!reason && (p.headdim != p.headdim_v || (p.headdim != 64 && p.headdim != 128)))
        reason = say(text, size, "headdim=%d, headdim_v=%d: 64 or 128, the same for both", p.headdim, p.headdim_v);
    if (!reason) reason = takes_options(p, 0, text, size);
    if (!reason) reason = takes_positive_scale(p, text, size);
    if (!reason && p.seqlen_k == 0) reason = "there are no keys to load";
    if (!reason) reason = too_many_blocks(p, ceil_div(p.seqlen_q, 128) * p.nheads * p.batch, text, size);
    if (!reason) reason = overflows(p, rows_overflow(int64_t(p.seqlen_q) + p.seqlen_k), text, size);
    if (!reason) reason = no_tensor_maps(p, 2, text, size);
    if (!reason) reason = no_tensor_map("out", p.out, p.batch, p.seqlen_q, p.nheads, 2, text, size);
    return reason;
}
const char* cute_sm90_yields(const AttentionParams&, const DeviceInfo&, char*, size_t) {
    return "it is there to be read beside wgmma_sm90, and runs when it is asked for by name";
}
fa_status cute_sm90_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("cute_sm90", forward_cute_sm90(p, static_cast<cudaStream_t>(stream)));
}
#endif
#endif
#endif

// Best first within a device; those of registry_decode.cpp come before these.
constexpr Kernel kKernels[] = {
#if FA_WITH_CUDA
#if FA_WITH_WGMMA_SM90
    {"mla_sm90", "Hopper: a cache of headdim 576 and 512, fastest where the values are the first columns of the keys; float16, bfloat16",
     FA_CUDA, mla_sm90_refuses, mla_sm90_workspace, mla_sm90_launch},
    {"wgmma_split_sm90",
     "Hopper: as wgmma_sm90 where rows do not fill the GPU: keys in pieces, the heads of a key head packed; plain, causal", FA_CUDA,
     wgmma_split_sm90_refuses, wgmma_split_sm90_workspace, wgmma_split_sm90_launch, wgmma_split_sm90_yields},
    {"wgmma_sm90", "Hopper: TMA, wgmma, specialised warps; float16, bfloat16, head dims to 256, every option", FA_CUDA, wgmma_sm90_refuses,
     wgmma_sm90_workspace, wgmma_sm90_launch, wgmma_sm90_yields},
    {"wgmma_wide_sm90", "Hopper: pairs of blocks that share K and V; float16, bfloat16, head dims to 512, no bias, mask or dropout",
     FA_CUDA, wgmma_wide_sm90_refuses, wgmma_wide_sm90_workspace, wgmma_wide_sm90_launch, wgmma_wide_sm90_yields},
#endif
#if FA_WITH_MMA_SM80
    {"mma_sm80", "tensor cores (mma.sync): float16, bfloat16, head dims to 512, every option", FA_CUDA, mma_sm80_refuses, no_workspace,
     mma_sm80_launch},
    {"mma_tf32_sm80", "tensor cores (mma.sync): float32 with allow_tf32, head dims to 256, every option", FA_CUDA, mma_tf32_sm80_refuses,
     no_workspace, mma_tf32_sm80_launch},
    {"float32_sm80", "CUDA cores: float32 without tf32, head dims to 256, plain, causal and windowed calls", FA_CUDA, float32_sm80_refuses,
     no_workspace, float32_sm80_launch},
#endif
    {"minimal", "online softmax on CUDA cores: any head dim, dtype, mask and option", FA_CUDA, minimal_refuses, no_workspace,
     minimal_launch},
    with_key_sums(
        {{"naive", "standard attention in three steps, S in the workspace", FA_CUDA, naive_refuses, naive_workspace, naive_launch}}),
#if FA_WITH_WGMMA_SM90
#if FA_WITH_CUTE
    {"cute_sm90", "Hopper: the loop of wgmma_sm90 in CuTe C++; float16, bfloat16, head dims 64 and 128, plain or causal", FA_CUDA,
     cute_sm90_refuses, no_workspace, cute_sm90_launch, cute_sm90_yields},
#endif
    {"fp8_fast_sm90", "Hopper: as fp8_sm90, with fast_accum: P v summed in the tensor cores", FA_CUDA, fp8_fast_sm90_refuses,
     fp8_sm90_workspace<true>, fp8_sm90_launch<true>},
    {"fp8_sm90", "Hopper: float8_e4m3 inputs with a factor for every head, head dims to 256, plain or causal", FA_CUDA, fp8_sm90_refuses,
     fp8_sm90_workspace<false>, fp8_sm90_launch<false>},
#endif
#endif
    cpu_kernel<cpu::Isa::kAvx512>("cpu_avx512", "tiled online softmax, 16 lanes"),
    cpu_kernel<cpu::Isa::kAvx2>("cpu_avx2", "tiled online softmax, 8 lanes"),
    cpu_kernel<cpu::Isa::kNeon>("cpu_neon", "tiled online softmax, 4 lanes"),
    cpu_kernel<cpu::Isa::kPortable>("cpu_portable", "tiled online softmax, whatever the compiler makes of it"),
    with_key_sums({{"cpu_naive", "standard attention in three steps, S in the workspace", FA_CPU, cpu_naive_refuses, cpu_naive_workspace,
                    cpu_naive_launch}}),
};

}  // namespace

bool wgmma_split_is_best([[maybe_unused]] const AttentionParams& p, [[maybe_unused]] const DeviceInfo& device) {
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
    char text[256];
    return device.compute == 90 && forward_wgmma_split_sm90_wins(p, device) && !wgmma_split_sm90_refuses(p, device, text, sizeof text);
#else
    return false;
#endif
}

int kernel_count() { return decode_kernel_count() + int(sizeof kKernels / sizeof kKernels[0]); }
const Kernel* kernel_at(int index) {
    if (index < 0 || index >= kernel_count()) return nullptr;
    return index < decode_kernel_count() ? decode_kernel_at(index) : &kKernels[index - decode_kernel_count()];
}

}  // namespace fa
