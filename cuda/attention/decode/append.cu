// append.cu: appends new keys and values to the cache, rotated and rounded to its dtype, and writes the rotated q to the workspace.
//     append_kernel   one warp per row, which is one head of one token
//     copy_kernel     what is neither rotated nor rounded: one warp for all heads of one token, so that its place is looked up once
// A few tokens are bound by the launch, thousands by memory.
#include <cuda_fp8.h>

#include "attention/decode/append.h"
#include "attention/kernels.h"
#include "common/element.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

// x, already divided by its factor, rounded to the cache's type; saturates at the largest number.
__device__ uint8_t to_byte(DType dtype, float x) {
    if (dtype == DType::kFloat8E4M3) return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
    return uint8_t(int8_t(fminf(fmaxf(rintf(x), -127.0f), 127.0f)));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ AppendParams a) {
    launch_dependents();  // the next kernel may start, but waits for this one before it reads (grid_dependency_wait)
    grid_dependency_wait();
    const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (index >= append_rows(a)) return;
    const AttentionParams& p = a.attention;
    const int lane = threadIdx.x % 32;
    const AppendRow row = append_row(a, index);
    if (row.skip) return;
    const bool query = row.of == RowOf::kQuery, key = row.of == RowOf::kKey;
    const int dim = row.of == RowOf::kValue ? p.headdim_v : p.headdim;
    const T* from = static_cast<const T*>((query ? p.q : key ? a.k_new : a.v_new).data) + row.from;
    const auto value = [&](int d) { return to_float(from[d]); };
    const auto angle = [&](const void* table, int64_t i) {
        return a.rotary_dtype == DType::kFloat32 ? static_cast<const float*>(table)[i] : to_float(static_cast<const T*>(table)[i]);
    };
    void* const to = query ? a.q_rotated.data : key ? p.k.data : p.v.data;
    if (query || p.cache.dtype == p.dtype) {
        for (int d = lane; d < dim; d += 32) static_cast<T*>(to)[row.to + d] = from_float<T>(rotated(a, row.position, d, value, angle));
        return;
    }
    const CacheScale& scales = key ? p.cache.k_scale : p.cache.v_scale;
    float scale;
    if (scales.row == 0) {
        scale = scales.data[row.scale];
    } else {
        float amax = 0;
        for (int d = lane; d < dim; d += 32) amax = fmaxf(amax, fabsf(rotated(a, row.position, d, value, angle)));
        for (int offset = 16; offset; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, offset));
        scale = token_scale(p.cache.dtype, amax);
        if (lane == 0) scales.data[row.scale] = scale;
    }
    for (int d = lane; d < dim; d += 32)
        static_cast<uint8_t*>(to)[row.to + d] = to_byte(p.cache.dtype, rotated(a, row.position, d, value, angle) / scale);
}

// Warps 0 .. tokens - 1 copy keys, the others values.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ AppendParams a, int32_t element_bytes) {
    launch_dependents();
    grid_dependency_wait();
    const AttentionParams& p = a.attention;
    const int64_t tokens = int64_t(p.batch) * a.seqlen_new, warp = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (warp >= 2 * tokens) return;
    const bool key = warp < tokens;
    const int64_t token = key ? warp : warp - tokens;
    const int32_t b = int32_t(token / a.seqlen_new), i = int32_t(token % a.seqlen_new);
    const AppendPlace at = append_place(a, b, i);
    if (at.skip) return;
    const TensorView &source = key ? a.k_new : a.v_new, &cache = key ? p.k : p.v;
    const char* const from = static_cast<const char*>(source.data) + (b * source.batch + i * source.row) * element_bytes;
    char* const to = static_cast<char*>(cache.data) + (at.entry * cache.batch + at.row * cache.row) * element_bytes;
    const int32_t pieces = (key ? p.headdim : p.headdim_v) * element_bytes / 16;  // of a head
    for (int32_t at_piece = threadIdx.x % 32; at_piece < p.nheads_k * pieces; at_piece += 32) {
        const int32_t head = at_piece / pieces, piece = at_piece % pieces;
        const uint4 bytes = *reinterpret_cast<const uint4*>(from + head * source.head * element_bytes + piece * 16);
        *reinterpret_cast<uint4*>(to + head * cache.head * element_bytes + piece * 16) = bytes;
    }
}

// Whether every head of a tensor is whole pieces of 16 bytes that start on 16 bytes.
bool is_in_pieces(const TensorView& t, int32_t dim, int64_t element_bytes) {
    const int64_t all = t.batch | t.row | t.head | dim;
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && all * element_bytes % 16 == 0;
}

}  // namespace

int64_t kvcache_append_blocks(const AppendParams& a) { return (append_rows(a) + kWarps - 1) / kWarps; }

cudaError_t kvcache_append(const AppendParams& a, const DeviceInfo&, cudaStream_t stream) {
    return with_dtype(a.attention.dtype, [&](auto zero) {
        const AttentionParams& p = a.attention;
        constexpr int32_t kBytes = sizeof(zero);
        if (!a.rotary_cos && p.cache.dtype == p.dtype && is_in_pieces(a.k_new, p.headdim, kBytes) && is_in_pieces(p.k, p.headdim, kBytes) &&
            is_in_pieces(a.v_new, p.headdim_v, kBytes) && is_in_pieces(p.v, p.headdim_v, kBytes)) {
            const int64_t blocks = (2 * int64_t(p.batch) * a.seqlen_new + kWarps - 1) / kWarps;
            LaunchOptions options;
            options.programmatic = p.cache.programmatic;
            return launch_kernel(copy_kernel, unsigned(blocks), kThreads, 0, stream, options, a, kBytes);
        }
        return launch_kernel(append_kernel<decltype(zero)>, unsigned(kvcache_append_blocks(a)), kThreads, 0, stream, a,
                             a.attention.cache.programmatic);
    });
}

}  // namespace fa
