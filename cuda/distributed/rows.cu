// rows.cu: the operations of rows.h on a GPU. One warp per row of a head; all are bound by memory.
#include "distributed/rows.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "api/common/checks.h"
#include "api/common/serve.h"
#include "common/element.cuh"
#include "device/launch.h"

namespace fa::distributed {
namespace {

constexpr int kThreads = 256, kWarp = 32, kRowsOfBlock = kThreads / kWarp;

// The row of a warp, in memory order: the heads of a token follow each other.
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

// Launches kernel(params) with one warp per row.
template <typename... Params>
cudaError_t launch(const RowsShape& s, void* stream, void (*kernel)(Params...), const std::common_type_t<Params>&... params) {
    const int64_t blocks = (s.rows * s.heads + kRowsOfBlock - 1) / kRowsOfBlock;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(kernel, unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream), LaunchOptions{}, params...);
}

// Four elements, loaded at once.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
    T x[4];
};

// kWide: rows can be read in quads.
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

// Bytes that are passed as a kernel argument, of which there are at most 4 KB.
constexpr int kWords = 960;
struct Words {
    uint32_t word[kWords];
};
__global__ void __launch_bounds__(kThreads) store_kernel(const __grid_constant__ Words words, uint32_t* to, int count) {
    for (int i = threadIdx.x; i < count; i += kThreads) to[i] = words.word[i];
}

// Copies that are passed as a kernel argument, cut into tiles; each block copies one tile after another. Filling an NVLink takes more than
// 1 MB in flight: 16 blocks of 64 KB reach 190 to 280 GB/s, 32 or more blocks 230 to 330 GB/s (H100).
constexpr int kMostCopies = 80, kCopyThreads = 512, kWordsOfThread = 8, kWordsOfTile = kCopyThreads * kWordsOfThread;
constexpr unsigned kBlocksBesideNothing = 132 * 2, kBlocksBesideAttention = 16;
struct Copies {
    struct One {
        char* to;
        const char* from;
        int64_t to_pitch, from_pitch;
        int64_t rows;
        uint32_t words;      // words per row
        int32_t first_tile;  // index of its first tile among the tiles of all copies
    } one[kMostCopies];
    int32_t count, tiles;
};
static_assert(sizeof(Copies) <= 4096, "a kernel has at most 4 KB of arguments");

template <typename Word>
__global__ void __launch_bounds__(kCopyThreads) copies_kernel(const __grid_constant__ Copies copies) {
    int n = 0;
    for (int tile = blockIdx.x; tile < copies.tiles; tile += gridDim.x) {
        while (n + 1 < copies.count && copies.one[n + 1].first_tile <= tile) ++n;
        const Copies::One& c = copies.one[n];
        const uint64_t first = uint64_t(tile - c.first_tile) * kWordsOfTile + threadIdx.x;
        auto row = int64_t(first / c.words);
        auto column = uint32_t(first % c.words);
        const uint32_t rows_on = kCopyThreads / c.words, words_on = kCopyThreads % c.words;  // from a thread's word to its next
        Word word[kWordsOfThread];
        char* place[kWordsOfThread];
#pragma unroll
        for (int i = 0; i < kWordsOfThread; ++i) {
            const int64_t byte = int64_t(column) * int64_t(sizeof(Word));
            place[i] = row < c.rows ? c.to + row * c.to_pitch + byte : nullptr;
            if (place[i]) word[i] = *reinterpret_cast<const Word*>(c.from + row * c.from_pitch + byte);
            row += rows_on, column += words_on;
            if (column >= c.words) column -= c.words, ++row;
        }
#pragma unroll
        for (int i = 0; i < kWordsOfThread; ++i)
            if (place[i]) *reinterpret_cast<Word*>(place[i]) = word[i];
    }
}

// Launches those of the copies whose addresses, pitches and widths are multiples of this word, but not of a wider one.
template <typename Word>
fa_status launch_copies_of(const std::vector<RowsCopy>& copies, Beside beside, void* stream) {
    const unsigned most = beside == Beside::kNothing ? kBlocksBesideNothing : kBlocksBesideAttention;
    Copies now;
    now.count = now.tiles = 0;
    const auto launch_now = [&] {
        const auto blocks = std::min(unsigned(now.tiles), most);
        const fa_status status = blocks ? launched("copies", launch_kernel(copies_kernel<Word>, blocks, kCopyThreads, 0,
                                                                           static_cast<cudaStream_t>(stream), LaunchOptions{}, now))
                                        : FA_OK;
        now.count = now.tiles = 0;
        return status;
    };
    for (const RowsCopy& c : copies) {
        if (c.width == 0 || c.rows == 0) continue;
        const uintptr_t all = reinterpret_cast<uintptr_t>(c.to) | reinterpret_cast<uintptr_t>(c.from) | uintptr_t(c.width) |
                              (c.rows > 1 ? uintptr_t(c.to_pitch) | uintptr_t(c.from_pitch) : 0);
        const size_t word = all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : all % 2 == 0 ? 2 : 1;
        if (word != sizeof(Word)) continue;
        const auto words = uint64_t(c.width) / word;
        const uint64_t tiles = (words * uint64_t(c.rows) + kWordsOfTile - 1) / kWordsOfTile;
        if (words > INT32_MAX || tiles > INT32_MAX / 2)
            return fail(FA_UNSUPPORTED, "a copy of %" PRId64 " rows of %" PRId64 " bytes", c.rows, c.width);
        if (now.count == kMostCopies || uint64_t(now.tiles) + tiles > INT32_MAX / 2) FA_RETURN_IF_ERROR(launch_now());
        now.one[now.count++] = {c.to, c.from, c.to_pitch, c.from_pitch, c.rows, uint32_t(words), now.tiles};
        now.tiles += int32_t(tiles);
    }
    return launch_now();
}

__global__ void __launch_bounds__(kThreads) subtract_kernel(RowsShape s, HeadRows from, int32_t n, int32_t* to) {
    const Place at = place_of(s);
    if (!at.valid) return;
    for (int d = at.lane; d < s.dim; d += kWarp) {
        const int64_t x = int64_t(row_of<const int32_t>(from, at)[d]) - n;
        to[(at.h * s.rows + at.i) * s.dim + d] = int32_t(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x);
    }
}

}  // namespace

fa_status launch_copies(const std::vector<RowsCopy>& copies, Beside beside, void* stream) {
    FA_RETURN_IF_ERROR(launch_copies_of<uint4>(copies, beside, stream));
    FA_RETURN_IF_ERROR(launch_copies_of<uint32_t>(copies, beside, stream));
    FA_RETURN_IF_ERROR(launch_copies_of<uint16_t>(copies, beside, stream));
    return launch_copies_of<uint8_t>(copies, beside, stream);
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
fa_status subtract(const RowsShape& s, HeadRows from, int32_t n, int32_t* to, void* stream) {
    return launched("subtract", launch(s, stream, subtract_kernel, s, from, n, to));
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
