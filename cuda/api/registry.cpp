#include "registry.h"

#include <cstdio>
#include <mutex>

#include "cpu/kernels.h"
#include "serve.h"
#include "status.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>

#include "attention/kernels.h"
#include "attention/tiles.h"
#include "attention/tiles_mma_sm80.h"
#include "device/driver.h"
#endif

namespace fa {
namespace {

// What a kernel that takes every cache refuses.
const char* general_refuses(const AttentionParams& p) { return is_float8(p) ? kNoFloat8 : nullptr; }

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
    return {name, summary, FA_CPU, needs_isa<isa>, cpu_workspace<isa>, cpu_launch<isa>};
}
const char* cpu_naive_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = general_refuses(p)) return reason;
    if (cpu::forward_naive_workspace(p) < cpu::kMostWorkspace) return nullptr;
    std::snprintf(text, size, "S of seqlen_q=%d x seqlen_k=%d for each of num_threads=%d is beyond all memory", p.seqlen_q, p.seqlen_k,
                  p.num_threads);
    return text;
}
size_t cpu_naive_workspace(const AttentionParams& p, const DeviceInfo&) { return cpu::forward_naive_workspace(p); }
fa_status cpu_naive_launch(const AttentionParams& p, const DeviceInfo&, void*) {
    return on_host([&] { cpu::forward_naive(p); });
}

// ---- CUDA ----

#if FA_WITH_CUDA
size_t no_workspace(const AttentionParams&, const DeviceInfo&) { return 0; }

const char* minimal_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = general_refuses(p)) return reason;
    const int64_t blocks = (int64_t(p.seqlen_q) + 63) / 64 * p.nheads * p.batch;
    if (blocks <= kMaxGrid) return nullptr;
    std::snprintf(text, size, "batch=%d x nheads=%d x seqlen_q=%d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q);
    return text;
}
fa_status minimal_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("minimal", forward_minimal(p, static_cast<cudaStream_t>(stream)));
}

#if FA_WITH_WGMMA_SM90
const char* no_wide_stores(const AttentionParams& p, char* text, size_t size) {
    if (!(reinterpret_cast<uintptr_t>(p.out.data) % 16 || p.out.batch % 8 || p.out.row % 8 || p.out.head % 8)) return nullptr;
    std::snprintf(text, size, "out.data=%p with strides (%lld, %lld, %lld): it stores 16 bytes at a time", p.out.data,
                  static_cast<long long>(p.out.batch), static_cast<long long>(p.out.row), static_cast<long long>(p.out.head));
    return text;
}

const char* wgmma_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (device.compute != 90) {
        std::snprintf(text, size, "needs sm_90 (Hopper), this device is sm_%d", device.compute);
        return text;
    }
    if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "takes float16 and bfloat16 only";
    if (p.cache.entries && p.cache.dtype != p.dtype) return kNo8BitCache;
    if (p.headdim > kWgmmaMaxHeadDim || p.headdim_v > kWgmmaMaxHeadDim || p.headdim % 8 || p.headdim_v % 8) {
        std::snprintf(text, size, "headdim=%d, headdim_v=%d: multiples of 8 up to %d", p.headdim, p.headdim_v, kWgmmaMaxHeadDim);
        return text;
    }
    const bool varlen = p.cu_seqlens_q;
    const int64_t batch = varlen ? 1 : p.batch, rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
    if (p.seqlen_k == 0 || rows_k == 0) return "there are no keys to load";
    if (wgmma_items(p, 64) > kMaxGrid || rows_q + rows_k > kMaxGrid - 1024) {
        std::snprintf(text, size, "batch=%d x nheads=%d x seqlen_q=%d over seqlen_k=%d overflows its 32-bit indices", p.batch, p.nheads,
                      p.seqlen_q, p.seqlen_k);
        return text;
    }
    const int64_t batch_k = p.cache.entries ? p.cache.entries : batch, rows = p.cache.block_table ? p.cache.page_size : rows_k;
    const char* reason = no_tensor_map("q", p.q, batch, rows_q, p.nheads, 2, text, size);
    if (!reason) reason = no_tensor_map("k", p.k, batch_k, rows, p.nheads_k, 2, text, size);
    if (!reason) reason = no_tensor_map("v", p.v, batch_k, rows, p.nheads_k, 2, text, size);
    return reason ? reason : no_wide_stores(p, text, size);
}
const char* wgmma_sm90_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
#if FA_WITH_MMA_SM80
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    if (!wgmma_scores_are_natural(p) &&
        mma_is_faster_than_wgmma(d, int64_t(p.deciding_batch()) * p.nheads, p.seqlen_q, p.seqlen_k, device.multiprocessors)) {
        std::snprintf(text, size, "seqlen_q=%d, seqlen_k=%d: mma_sm80 is faster for short sequences", p.seqlen_q, p.seqlen_k);
        return text;
    }
#endif
    return nullptr;
}
size_t wgmma_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return forward_wgmma_sm90_workspace(p, device.multiprocessors);
}
fa_status wgmma_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("wgmma_sm90", forward_wgmma_sm90(p, device.index, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

const char* mla_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.headdim != 576 || p.headdim_v != 512 || !p.cache.entries) {
        std::snprintf(text, size, "headdim=%d, headdim_v=%d: it serves a cache of 576 and 512", p.headdim, p.headdim_v);
        return text;
    }
    if (device.compute != 90) {
        std::snprintf(text, size, "needs sm_90 (Hopper), this device is sm_%d", device.compute);
        return text;
    }
    if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "takes float16 and bfloat16 only";
    if (p.cache.dtype != p.dtype) return kNo8BitCache;
    if (p.cache.block_table && p.cache.page_size % 8) {
        std::snprintf(text, size, "page_size=%d: it takes pages of a multiple of 8 keys", p.cache.page_size);
        return text;
    }
    if (p.general_scores() || p.sinks) return "takes no softcap, ALiBi, bias, mask, sinks or dropout";
    if (!(p.scale > 0)) {
        std::snprintf(text, size, "softmax_scale=%g: it takes positive ones", double(p.scale));
        return text;
    }
    if (p.seqlen_k == 0) return "there are no keys to load";
    const int64_t rows = int64_t(p.seqlen_q) * p.group;
    if (rows * p.batch * p.nheads_k > kMaxGrid / 64 || decode_mla_sm90_blocks(p, device.multiprocessors) > kMaxGrid ||
        p.seqlen_k > kMaxGrid - 1024) {
        std::snprintf(text, size, "batch=%d x nheads=%d x seqlen_q=%d over seqlen_k=%d overflows its 32-bit indices", p.batch, p.nheads,
                      p.seqlen_q, p.seqlen_k);
        return text;
    }
    const int64_t rows_k = p.cache.block_table ? p.cache.page_size : p.seqlen_k;
    const char* reason = no_tensor_map("q", p.q, p.batch, p.seqlen_q, p.nheads, 2, text, size);
    if (!reason) reason = no_tensor_map("k", p.k, p.cache.entries, rows_k, p.nheads_k, 2, text, size);
    if (!reason) reason = no_tensor_map("v", p.v, p.cache.entries, rows_k, p.nheads_k, 2, text, size);
    return reason ? reason : no_wide_stores(p, text, size);
}
size_t mla_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return decode_mla_sm90_workspace(p, device.multiprocessors);
}
fa_status mla_sm90_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("mla_sm90", decode_mla_sm90(p, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}

const char* fp8_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (!is_float8(p)) return "takes float8_e4m3 only";
    if (device.compute != 90) {
        std::snprintf(text, size, "needs sm_90 (Hopper), this device is sm_%d", device.compute);
        return text;
    }
    if (p.headdim > kWgmmaMaxHeadDim || p.headdim_v > kWgmmaMaxHeadDim || p.headdim % 16 || p.headdim_v % 16) {
        std::snprintf(text, size, "headdim=%d, headdim_v=%d: multiples of 16 up to %d", p.headdim, p.headdim_v, kWgmmaMaxHeadDim);
        return text;
    }
    if (p.general_scores() || p.sinks) return "takes no softcap, ALiBi, bias, mask, sinks or dropout";
    if (p.window_left >= 0) {
        std::snprintf(text, size, "window_left=%d: windows have no left edge here", p.window_left);
        return text;
    }
    if (!(p.scale > 0)) {
        std::snprintf(text, size, "softmax_scale=%g: it takes positive ones", double(p.scale));
        return text;
    }
    const bool varlen = p.cu_seqlens_q;
    const int64_t batch = varlen ? 1 : p.batch, rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
    if (wgmma_items(p, 64) > kMaxGrid || rows_q + rows_k > kMaxGrid - 1024) {
        std::snprintf(text, size, "batch=%d x nheads=%d x seqlen_q=%d over seqlen_k=%d overflows its 32-bit indices", p.batch, p.nheads,
                      p.seqlen_q, p.seqlen_k);
        return text;
    }
    const char* reason = no_tensor_map("q", p.q, batch, rows_q, p.nheads, 1, text, size);
    if (!reason && rows_k) reason = no_tensor_map("k", p.k, batch, rows_k, p.nheads_k, 1, text, size);
    if (!reason && rows_k) reason = no_tensor_map("v", p.v, batch, rows_k, p.nheads_k, 1, text, size);
    return reason ? reason : no_wide_stores(p, text, size);
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
                    forward_fp8_sm90(fp8_params(p, kFastAccum), device.index, device.multiprocessors, static_cast<cudaStream_t>(stream)));
}
const char* fp8_fast_sm90_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (is_float8(p) && !p.fast_accum) return "fast_accum=0: the tensor cores keep 14 bits of its sums, which the call must allow";
    return fp8_sm90_refuses(p, device, text, size);
}
#endif

#if FA_WITH_MMA_SM80
// What a kernel that reads K and V by strides refuses of a cache.
const char* strided_refuses(const AttentionParams& p) {
    if (is_float8(p)) return kNoFloat8;
    if (p.cache.block_table) return "block_table is set: it takes no pages";
    if (p.cache.entries && p.cache.dtype != p.dtype) return "cache_dtype: it takes no 8-bit cache";
    if (p.headdim > 512) return "headdim is above 512";
    return nullptr;
}
const char* mma_shape_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (device.compute < 80) {
        std::snprintf(text, size, "needs sm_80 or newer, this device is sm_%d", device.compute);
        return text;
    }
    if (p.headdim > 256 || p.headdim_v > 256) {
        std::snprintf(text, size, "headdim=%d, headdim_v=%d: at most 256", p.headdim, p.headdim_v);
        return text;
    }
    const int64_t blocks = (int64_t(p.seqlen_q) + 31) / 32 * p.nheads * p.batch;  // its smallest tile has 32 rows
    if (blocks <= kMaxGrid) return nullptr;
    std::snprintf(text, size, "batch=%d x nheads=%d x seqlen_q=%d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q);
    return text;
}
const char* mma_sm80_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return "takes float16 and bfloat16 only";
    if (p.cache.entries && p.cache.dtype != p.dtype) return kNo8BitCache;
    return mma_shape_refuses(p, device, text, size);
}
const char* mma_tf32_sm80_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (p.dtype != DType::kFloat32) return "takes float32 only, with allow_tf32";
    if (!p.allow_tf32) return "allow_tf32=0: its products are rounded to tf32, which float32 inputs must allow";
    if (const char* reason = strided_refuses(p)) return reason;
    return mma_shape_refuses(p, device, text, size);
}
fa_status mma_sm80_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("mma_sm80", forward_mma_sm80(p, device.multiprocessors, device.shared_memory, static_cast<cudaStream_t>(stream)));
}
fa_status mma_tf32_sm80_launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
    return launched("mma_tf32_sm80",
                    forward_mma_tf32_sm80(p, device.multiprocessors, device.shared_memory, static_cast<cudaStream_t>(stream)));
}
#endif

const char* naive_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = general_refuses(p)) return reason;
    const int64_t tiles = ((int64_t(p.seqlen_q) + 15) / 16) * ((int64_t(p.seqlen_k > p.headdim_v ? p.seqlen_k : p.headdim_v) + 15) / 16);
    const int64_t heads = int64_t(p.batch) * p.nheads;
    if (heads == 0 || tiles <= kMaxGrid / heads) return nullptr;
    std::snprintf(text, size, "S of %d x %d x %d x %d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q, p.seqlen_k);
    return text;
}
size_t naive_workspace(const AttentionParams& p, const DeviceInfo&) { return forward_naive_workspace(p); }
fa_status naive_launch(const AttentionParams& p, const DeviceInfo&, void* stream) {
    return launched("naive", forward_naive(p, static_cast<cudaStream_t>(stream)));
}
#endif

// Best first within a device, behind those of registry_decode.cpp.
constexpr Kernel kKernels[] = {
#if FA_WITH_CUDA
#if FA_WITH_WGMMA_SM90
    {"mla_sm90", "Hopper: a cache of headdim 576 and 512, fastest where the values are the first columns of the keys; float16, bfloat16",
     FA_CUDA, mla_sm90_refuses, mla_sm90_workspace, mla_sm90_launch},
    {"wgmma_sm90", "Hopper: TMA, wgmma, specialised warps; float16, bfloat16, head dims to 256, every option", FA_CUDA, wgmma_sm90_refuses,
     wgmma_sm90_workspace, wgmma_sm90_launch, wgmma_sm90_yields},
#endif
#if FA_WITH_MMA_SM80
    {"mma_sm80", "tensor cores (mma.sync): float16, bfloat16, head dims to 256, every option", FA_CUDA, mma_sm80_refuses, no_workspace,
     mma_sm80_launch},
    {"mma_tf32_sm80", "tensor cores (mma.sync): float32 with allow_tf32, head dims to 256, every option", FA_CUDA, mma_tf32_sm80_refuses,
     no_workspace, mma_tf32_sm80_launch},
#endif
    {"minimal", "online softmax on CUDA cores: any head dim, dtype, mask and option", FA_CUDA, minimal_refuses, no_workspace,
     minimal_launch},
    {"naive", "standard attention in three steps, S in the workspace", FA_CUDA, naive_refuses, naive_workspace, naive_launch},
#if FA_WITH_WGMMA_SM90
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
    {"cpu_naive", "standard attention in three steps, S in the workspace", FA_CPU, cpu_naive_refuses, cpu_naive_workspace,
     cpu_naive_launch},
};

}  // namespace

int kernel_count() { return decode_kernel_count() + int(sizeof kKernels / sizeof kKernels[0]); }
const Kernel* kernel_at(int index) {
    if (index < 0 || index >= kernel_count()) return nullptr;
    return index < decode_kernel_count() ? decode_kernel_at(index) : &kKernels[index - decode_kernel_count()];
}

#if FA_WITH_CUDA

int cuda_device_count() {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();  // a machine without a GPU is not an error state
        return 0;
    }
    return count;
}

namespace {
// Facts of a device never change, so every thread would write the same values.
fa_status device_facts(int index, DeviceInfo* info) {
    constexpr int kMaxDevices = 64;
    static DeviceInfo known[kMaxDevices];
    static std::once_flag once[kMaxDevices];
    if (index < 0 || index >= kMaxDevices) return fail(FA_UNSUPPORTED, "CUDA device %d: only %d devices are supported", index, kMaxDevices);
    std::call_once(once[index], [index] {
        int major = 0, minor = 0, sms = 0, shared = 0;
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, index);
        cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
        known[index] = {index, 10 * major + minor, sms, size_t(shared)};
    });
    *info = known[index];
    return info->compute ? FA_OK : fail(FA_CUDA_ERROR, "CUDA device %d does not answer", index);
}
}  // namespace

fa_status find_device(fa_device device, const void* data, DeviceInfo* info, const char* name) {
    *info = {-1, 0, 0, 0};
    if (device == FA_CPU) return FA_OK;
    int index = -1;
    if (data) {
        cudaPointerAttributes attributes{};
        if (const cudaError_t error = cudaPointerGetAttributes(&attributes, data); error != cudaSuccess) {
            cudaGetLastError();
            return fail(FA_CUDA_ERROR, "device=FA_CUDA: %s", cudaGetErrorString(error));
        }
        if (attributes.type == cudaMemoryTypeUnregistered)
            return fail(FA_BAD_ARGUMENT, "%s.data=%p is host memory, but device is FA_CUDA", name, data);
        if (attributes.type == cudaMemoryTypeDevice) index = attributes.device;
    }
    if (index < 0)
        if (const cudaError_t error = cudaGetDevice(&index); error != cudaSuccess) {
            cudaGetLastError();
            return fail(FA_CUDA_ERROR, "device=FA_CUDA: %s", cudaGetErrorString(error));
        }
    if (!data && cuda_device_count() == 0) return fail(FA_CUDA_ERROR, "device=FA_CUDA: no CUDA device or driver on this machine");
    return device_facts(index, info);
}

namespace {
bool has_context() {  // 20 ns; setting the device anyway is many times that
    static const auto current = driver_function<decltype(cuCtxGetCurrent)>("cuCtxGetCurrent");
    CUcontext context = nullptr;
    return current && current(&context) == CUDA_SUCCESS && context;
}
}  // namespace

CurrentDevice::CurrentDevice(int index) {
    int current = -1;
    if (index < 0) return;
    cudaError_t error = cudaGetDevice(&current);
    if (error == cudaSuccess && current == index && has_context()) return;
    if (error == cudaSuccess) error = cudaSetDevice(index);
    if (error != cudaSuccess) {
        cudaGetLastError();
        status_ = fail(FA_CUDA_ERROR, "CUDA device %d: %s (%s)", index, cudaGetErrorString(error), cudaGetErrorName(error));
    } else if (current != index) {
        previous_ = current;
    }
}
CurrentDevice::~CurrentDevice() {
    if (previous_ >= 0) cudaSetDevice(previous_);
}

#else

int cuda_device_count() { return 0; }

fa_status find_device(fa_device device, const void*, DeviceInfo* info, const char*) {
    *info = {-1, 0, 0, 0};
    return device == FA_CPU ? FA_OK : fail(FA_UNSUPPORTED, "device=FA_CUDA: this build has the CPU backend only");
}

CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}

#endif

fa_status launch_append(const AppendParams& params, const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (device.index < 0) return on_host([&] { cpu::kvcache_append(params); });
#if FA_WITH_CUDA
    if (kvcache_append_blocks(params) > kMaxGrid)
        return fail(FA_UNSUPPORTED, "batch=%d x seqlen_new=%d rows of %d heads need more blocks than a grid has", params.attention.batch,
                    params.seqlen_new, params.attention.nheads_k);
    return launched("kvcache_append", kvcache_append(params, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

fa_status launch_merge(const MergeParams& params, fa_device device, [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(device, params.out_a.data, &info); status != FA_OK) return status;
    if (params.batch == 0 || params.seqlen == 0) return FA_OK;
    if (device == FA_CPU) return on_host([&] { cpu::merge(params); });
#if FA_WITH_CUDA
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return launched("merge", merge(params, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

fa_status launch_quantize(const QuantizeParams& params, fa_device device, [[maybe_unused]] void* stream) {
    DeviceInfo info;
    if (const fa_status status = find_device(device, params.x.data, &info); status != FA_OK) return status;
    if (params.batch == 0) return FA_OK;
    if (device == FA_CPU) return on_host([&] { cpu::quantize_fp8(params); });
#if FA_WITH_CUDA
    if (quantize_fp8_blocks(params) > kMaxGrid)
        return fail(FA_UNSUPPORTED, "batch=%d x nheads=%d x seqlen=%d needs more blocks than a grid has", params.batch, params.nheads,
                    params.seqlen);
    const CurrentDevice scope(info.index);
    if (scope.status() != FA_OK) return scope.status();
    return launched("quantize_fp8", quantize_fp8(params, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

}  // namespace fa
