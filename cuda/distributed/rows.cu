// rows.cu: the operations of rows.h on a GPU. One warp a row of a head; all are bound by memory.
#include "distributed/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "api/common/serve.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa::distributed {
namespace {

constexpr int kThreads = 256, kWarp = 32, kRowsOfBlock = kThreads / kWarp;

// The row of a warp, in the order of memory: the heads of a token follow each other.
struct Place {
    int64_t i;
    int32_t h, lane;
    bool valid;
};
__device__ __forceinline__ Place place_of(const RowsShape& s) {
    const int64_t row = int64_t(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarp;
    return {row / s.heads, int32_t(row % s.heads), int32_t(threadIdx.x % kWarp), row < s.rows * s.heads};
}
template <typename T>
__device__ __forceinline__ T* row_of(const HeadRows& t, const Place& at) {
    return static_cast<T*>(t.data) + at.i * t.row + at.h * t.head;
}

// kernel(params) with a warp for every row.
template <typename... Params>
cudaError_t launch(const RowsShape& s, void* stream, void (*kernel)(Params...), const std::common_type_t<Params>&... params) {
    const int64_t blocks = (s.rows * s.heads + kRowsOfBlock - 1) / kRowsOfBlock;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(kernel, unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream), LaunchOptions{}, params...);
}

// Four elements, read at once.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
    T x[4];
};

// kWide: rows may be read in quads.
template <typename T, bool kWide>
__global__ void __launch_bounds__(kThreads) negative_delta_kernel(RowsShape s, HeadRows out, HeadRows dout, const float* dlse, float* to) {
    const Place at = place_of(s);
    if (!at.valid) return;
    const T *x = row_of<const T>(out, at), *y = row_of<const T>(dout, at);
    float sum = 0;
    if constexpr (kWide) {
        for (int d = 4 * at.lane; d < s.dim; d += 4 * kWarp) {
            const auto a = *reinterpret_cast<const Quad<T>*>(x + d), b = *reinterpret_cast<const Quad<T>*>(y + d);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum = fmaf(to_float(a.x[i]), to_float(b.x[i]), sum);
        }
    } else {
        for (int d = at.lane; d < s.dim; d += kWarp) sum = fmaf(to_float(x[d]), to_float(y[d]), sum);
    }
    for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const int64_t place = at.h * s.rows + at.i;
    if (at.lane == 0) to[place] = (dlse ? dlse[place] : 0.0f) - sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(RowsShape s, HeadRows to, const T* parts, int64_t stride, int32_t count) {
    const Place at = place_of(s);
    if (!at.valid) return;
    const T* from = parts + (at.i * s.heads + at.h) * s.dim;
    T* row = row_of<T>(to, at);
    for (int d = at.lane; d < s.dim; d += kWarp) {
        float sum = 0;
        for (int n = 0; n < count; ++n) sum += to_float(from[n * stride + d]);
        row[d] = from_float<T>(sum);
    }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) merge_parts_kernel(RowsShape s, TensorView to, float* lse, int64_t seqlen, const T* outs,
                                                               int64_t out_stride, const float* lses, int64_t lse_stride, int32_t count) {
    const Place at = place_of(s);
    if (!at.valid) return;
    const int64_t b = at.i / seqlen, i = at.i % seqlen, place = (b * s.heads + at.h) * seqlen + i;
    float max = -INFINITY, sum = 0;
    for (int n = 0; n < count; ++n) max = fmaxf(max, lses[n * lse_stride + place]);
    const bool empty = max == -INFINITY;
    for (int n = 0; n < count; ++n) sum += empty ? 0.0f : expf(lses[n * lse_stride + place] - max);
    const T* from = outs + (at.i * s.heads + at.h) * s.dim;
    T* row = static_cast<T*>(to.data) + b * to.batch + i * to.row + at.h * to.head;
    for (int d = at.lane; d < s.dim; d += kWarp) {
        float value = 0;
        for (int n = 0; n < count; ++n) {
            const float own = lses[n * lse_stride + place];
            if (own != -INFINITY) value += expf(own - max) / sum * to_float(from[n * out_stride + d]);
        }
        row[d] = from_float<T>(value);
    }
    if (lse && at.lane == 0) lse[place] = empty ? -INFINITY : max + logf(sum);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    add_part_kernel(RowsShape s, float* sum, float* lse, HeadRows part, const float* part_lse, bool first) {
    const Place at = place_of(s);
    if (!at.valid) return;
    const int64_t place = at.h * s.rows + at.i;
    const float before = first ? -INFINITY : lse[place], more = part_lse[place], max = fmaxf(before, more);
    const float old = before == -INFINITY ? 0.0f : expf(before - max), add = more == -INFINITY ? 0.0f : expf(more - max), total = old + add;
    float* row = sum + (at.i * s.heads + at.h) * s.dim;
    const T* from = row_of<const T>(part, at);
    for (int d = at.lane; d < s.dim; d += kWarp) {
        float value = before == -INFINITY ? 0.0f : old / total * row[d];
        if (more != -INFINITY) value += add / total * to_float(from[d]);
        row[d] = value;
    }
    __syncwarp();  // every lane has read lse before one writes it
    if (at.lane == 0) lse[place] = max == -INFINITY ? -INFINITY : max + logf(total);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) add_kernel(RowsShape s, float* sum, HeadRows part, bool first) {
    const Place at = place_of(s);
    if (!at.valid) return;
    float* row = sum + (at.i * s.heads + at.h) * s.dim;
    const T* from = row_of<const T>(part, at);
    for (int d = at.lane; d < s.dim; d += kWarp) row[d] = (first ? 0.0f : row[d]) + to_float(from[d]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) round_kernel(RowsShape s, HeadRows to, const float* sum) {
    const Place at = place_of(s);
    if (!at.valid) return;
    const float* from = sum + (at.i * s.heads + at.h) * s.dim;
    T* row = row_of<T>(to, at);
    for (int d = at.lane; d < s.dim; d += kWarp) row[d] = from_float<T>(from[d]);
}

// Bytes that travel as an argument; a kernel has at most 4 KB of them.
constexpr int kWords = 960;
struct Words {
    uint32_t word[kWords];
};
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ Words words, uint32_t* to, int count) {
    for (int i = threadIdx.x; i < count; i += kThreads) to[i] = words.word[i];
}

// Index: counts the words of all rows.
template <typename Word, typename Index>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(char* to, int64_t to_pitch, const char* from, int64_t from_pitch, Index words, Index all) {
    const Index step = Index(gridDim.x) * kThreads;
    constexpr int kAtOnce = 4;  // loads in flight
    const auto at = [&](Index x, int64_t pitch) { return int64_t(x / words) * pitch + int64_t(x % words) * int64_t(sizeof(Word)); };
    for (Index i = Index(blockIdx.x) * kThreads + threadIdx.x; i < all; i += kAtOnce * step) {
        Word word[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (i + j * step < all) word[j] = *reinterpret_cast<const Word*>(from + at(i + j * step, from_pitch));
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (i + j * step < all) *reinterpret_cast<Word*>(to + at(i + j * step, to_pitch)) = word[j];
    }
}

template <typename Word>
cudaError_t copy_words(const Rows& to, const void* from, int64_t from_pitch, void* stream) {
    const int64_t words = to.width / int64_t(sizeof(Word)), all = words * to.rows, blocks = (all + 4 * kThreads - 1) / (4 * kThreads);
    constexpr int64_t kMostBlocks = 132 * 8;
    const auto launch_with = [&](auto kernel, auto zero) {
        using Index = decltype(zero);
        return launch_kernel(kernel, unsigned(std::min(blocks, kMostBlocks)), kThreads, 0, static_cast<cudaStream_t>(stream),
                             LaunchOptions{}, static_cast<char*>(to.data), to.pitch, static_cast<const char*>(from), from_pitch,
                             Index(words), Index(all));
    };
    // Room for the steps of one pass beyond the end.
    return all < (int64_t(1) << 31) ? launch_with(copy_kernel<Word, uint32_t>, uint32_t{})
                                    : launch_with(copy_kernel<Word, uint64_t>, uint64_t{});
}

}  // namespace

fa_status launch_copy(const Rows& to, const void* from, int64_t from_pitch, void* stream) {
    if (to.width == 0 || to.rows == 0) return FA_OK;
    // Rows without gaps are one, cut so that its words can be counted in 32 bits.
    Rows rows = to;
    if (to.pitch == to.width && from_pitch == to.width && to.width * to.rows % 4096 == 0)
        rows = {to.data, 4096, 4096, to.width * to.rows / 4096}, from_pitch = 4096;
    const auto all = reinterpret_cast<uintptr_t>(to.data) | reinterpret_cast<uintptr_t>(from) | uintptr_t(rows.pitch) |
                     uintptr_t(from_pitch) | uintptr_t(rows.width);
    return launched("copy", all % 16 == 0  ? copy_words<uint4>(rows, from, from_pitch, stream)
                            : all % 4 == 0 ? copy_words<uint32_t>(rows, from, from_pitch, stream)
                            : all % 2 == 0 ? copy_words<uint16_t>(rows, from, from_pitch, stream)
                                           : copy_words<uint8_t>(rows, from, from_pitch, stream));
}

namespace cuda {

fa_status negative_delta(const RowsShape& s, HeadRows out, HeadRows dout, const float* dlse, float* to, void* stream) {
    return launched("negative_delta", with_dtype(s.dtype, [&](auto zero) {
                        using T = decltype(zero);
                        const auto in_quads = [&](const HeadRows& t) {
                            return reinterpret_cast<uintptr_t>(t.data) % sizeof(Quad<T>) == 0 && t.row % 4 == 0 && t.head % 4 == 0;
                        };
                        const bool wide = s.dim % 4 == 0 && in_quads(out) && in_quads(dout);
                        return launch(s, stream, wide ? negative_delta_kernel<T, true> : negative_delta_kernel<T, false>, s, out, dout,
                                      dlse, to);
                    }));
}
fa_status sum(const RowsShape& s, HeadRows to, const void* parts, int64_t stride, int32_t count, void* stream) {
    return launched("sum", with_dtype(s.dtype, [&](auto zero) {
                        using T = decltype(zero);
                        return launch(s, stream, sum_kernel<T>, s, to, static_cast<const T*>(parts), stride, count);
                    }));
}
fa_status merge_parts(const RowsShape& s, const TensorView& to, float* lse, int64_t seqlen, const void* outs, int64_t out_stride,
                      const float* lses, int64_t lse_stride, int32_t count, void* stream) {
    return launched("merge_parts", with_dtype(s.dtype, [&](auto zero) {
                        using T = decltype(zero);
                        return launch(s, stream, merge_parts_kernel<T>, s, to, lse, seqlen, static_cast<const T*>(outs), out_stride, lses,
                                      lse_stride, count);
                    }));
}
fa_status add_part(const RowsShape& s, float* sum, float* lse, HeadRows part, const float* part_lse, bool first, void* stream) {
    return launched("add_part", with_dtype(s.dtype, [&](auto zero) {
                        return launch(s, stream, add_part_kernel<decltype(zero)>, s, sum, lse, part, part_lse, first);
                    }));
}
fa_status add(const RowsShape& s, float* sum, HeadRows part, bool first, void* stream) {
    return launched("add",
                    with_dtype(s.dtype, [&](auto zero) { return launch(s, stream, add_kernel<decltype(zero)>, s, sum, part, first); }));
}
fa_status round(const RowsShape& s, HeadRows to, const float* sum, void* stream) {
    return launched("round", with_dtype(s.dtype, [&](auto zero) { return launch(s, stream, round_kernel<decltype(zero)>, s, to, sum); }));
}
fa_status store(void* to, const void* from, size_t bytes, void* stream) {
    for (size_t done = 0; done < bytes; done += sizeof(Words)) {
        Words words;
        const size_t now = std::min(bytes - done, sizeof words);
        memcpy(&words, static_cast<const char*>(from) + done, now);
        const fa_status status =
            launched("store", launch_kernel(store_kernel, 1u, kThreads, 0, static_cast<cudaStream_t>(stream), LaunchOptions{}, words,
                                            reinterpret_cast<uint32_t*>(static_cast<char*>(to) + done), int(now / 4)));
        if (status != FA_OK) return status;
    }
    return FA_OK;
}
fa_status zero(void* to, size_t bytes, void* stream) {
    return bytes ? launched("zero", cudaMemsetAsync(to, 0, bytes, static_cast<cudaStream_t>(stream))) : FA_OK;
}

}  // namespace cuda
}  // namespace fa::distributed
