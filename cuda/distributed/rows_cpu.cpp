// rows_cpu.cpp: the operations of rows.h on the CPU, and the choice of the device.
#include "distributed/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/half.h"
#include "cpu/common/parallel.h"

namespace fa::distributed {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// Calls body(i, h) for every row of every head.
template <typename Body>
fa_status each_row(const RowsShape& s, const Body& body) {
    constexpr int64_t kRows = 64;
    const int threads = cpu::worthwhile_threads(2.0 * double(s.rows) * s.heads * s.dim, s.threads);
    cpu::parallel_for(ceil_div(s.rows, kRows), threads, [&](int64_t task, int) {
        for (int64_t i = task * kRows; i < std::min(s.rows, (task + 1) * kRows); ++i)
            for (int32_t h = 0; h < s.heads; ++h) body(i, h);
    });
    return FA_OK;
}

int64_t packed(const RowsShape& s, int64_t i, int32_t h) { return (i * s.heads + h) * s.dim; }

}  // namespace

#if FA_WITH_CUDA
#define FA_ON_GPU(call) \
    if (s.device == FA_CUDA) return cuda::call
#else
#define FA_ON_GPU(call) static_cast<void>(stream)
#endif

fa_status launch_negative_delta(const RowsShape& s, HeadRows out, HeadRows dout, const float* dlse, float* to, void* stream) {
    FA_ON_GPU(negative_delta(s, out, dout, dlse, to, stream));
    return each_row(s, [&](int64_t i, int32_t h) {
        const int64_t x = i * out.row + h * out.head, y = i * dout.row + h * dout.head, place = h * s.rows + i;
        float sum = 0;
        for (int32_t d = 0; d < s.dim; ++d) sum += cpu::load(out.data, x + d, s.dtype) * cpu::load(dout.data, y + d, s.dtype);
        to[place] = (dlse ? dlse[place] : 0) - sum;
    });
}

fa_status launch_sum(const RowsShape& s, HeadRows to, const void* parts, int64_t stride, int32_t count, void* stream) {
    FA_ON_GPU(sum(s, to, parts, stride, count, stream));
    return each_row(s, [&](int64_t i, int32_t h) {
        for (int32_t d = 0; d < s.dim; ++d) {
            float sum = 0;
            for (int32_t n = 0; n < count; ++n) sum += cpu::load(parts, n * stride + packed(s, i, h) + d, s.dtype);
            cpu::store(to.data, i * to.row + h * to.head + d, s.dtype, sum);
        }
    });
}

fa_status launch_merge_parts(const RowsShape& s, const TensorView& to, float* lse, int64_t seqlen, const void* outs, int64_t out_stride,
                             const float* lses, int64_t lse_stride, int32_t count, void* stream) {
    FA_ON_GPU(merge_parts(s, to, lse, seqlen, outs, out_stride, lses, lse_stride, count, stream));
    return each_row(s, [&](int64_t i, int32_t h) {
        const int64_t b = i / seqlen, row = i % seqlen, place = (b * s.heads + h) * seqlen + row;
        float max = kEmpty, sum = 0;
        for (int32_t n = 0; n < count; ++n) max = std::max(max, lses[n * lse_stride + place]);
        for (int32_t n = 0; n < count && max != kEmpty; ++n) sum += std::exp(lses[n * lse_stride + place] - max);
        for (int32_t d = 0; d < s.dim; ++d) {
            float value = 0;
            for (int32_t n = 0; n < count; ++n)
                if (const float own = lses[n * lse_stride + place]; own != kEmpty)
                    value += std::exp(own - max) / sum * cpu::load(outs, n * out_stride + packed(s, i, h) + d, s.dtype);
            cpu::store(to.data, b * to.batch + row * to.row + h * to.head + d, s.dtype, value);
        }
        if (lse) lse[place] = max == kEmpty ? kEmpty : max + std::log(sum);
    });
}

fa_status launch_store(fa_device device, void* to, const void* from, size_t bytes, void* stream) {
#if FA_WITH_CUDA
    if (device == FA_CUDA) return cuda::store(to, from, bytes, stream);
#endif
    static_cast<void>(device), static_cast<void>(stream);
    std::memcpy(to, from, bytes);
    return FA_OK;
}

fa_status launch_subtract(const RowsShape& s, HeadRows from, int32_t n, int32_t* to, void* stream) {
#if FA_WITH_CUDA
    if (s.device == FA_CUDA) return cuda::subtract(s, from, n, to, stream);
#endif
    static_cast<void>(stream);
    for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < s.rows; ++i)
            for (int32_t d = 0; d < s.dim; ++d) {
                const int64_t x = int64_t(static_cast<const int32_t*>(from.data)[i * from.row + h * from.head + d]) - n;
                to[(h * s.rows + i) * s.dim + d] = int32_t(std::clamp<int64_t>(x, INT32_MIN, INT32_MAX));
            }
    return FA_OK;
}
fa_status launch_zero(fa_device device, void* to, size_t bytes, void* stream) {
#if FA_WITH_CUDA
    if (device == FA_CUDA) return cuda::zero(to, bytes, stream);
#endif
    static_cast<void>(device), static_cast<void>(stream);
    std::memset(to, 0, bytes);
    return FA_OK;
}

}  // namespace fa::distributed
