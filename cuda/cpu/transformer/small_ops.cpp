// small_ops.cpp: RMSNorm, RoPE and SwiGLU on the host, row by row. Bound by memory when there are many rows.
#include <algorithm>
#include <cmath>

#include "common/half.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"

namespace fa::cpu {
namespace {

// Calls body(row) for every row, in pieces; assumes about 2 ns per element.
template <typename Body>
void for_rows(int64_t rows, int64_t elements_each, int threads, const Body& body) {
    const int64_t piece = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, elements_each));
    parallel_for((rows + piece - 1) / piece, worthwhile_threads(2.0 * double(rows) * double(elements_each), threads),
                 [&](int64_t task, int) {
                     for (int64_t row = task * piece; row < std::min(rows, (task + 1) * piece); ++row) body(row);
                 });
}

}  // namespace

void rms_norm(const RmsNormParams& p) {
    for_rows(p.rows, p.dim, p.num_threads, [&](int64_t row) {
        const int64_t x = row * p.x.row, out = row * p.out.row;
        if (p.residual.data)
            for (int d = 0; d < p.dim; ++d)
                store(p.x.data, x + d, p.dtype,
                      load(p.x.data, x + d, p.dtype) + load(p.residual.data, row * p.residual.row + d, p.residual_dtype));
        float sum = 0;
        for (int first = 0; first < p.dim; first += 256) {  // sums of short sums: rounding does not grow with dim
            float part = 0;
            for (int d = first; d < std::min(p.dim, first + 256); ++d) {
                const float value = load(p.x.data, x + d, p.dtype);
                part += value * value;
            }
            sum += part;
        }
        const float scale = 1.0f / std::sqrt(sum / float(p.dim) + p.eps);
        for (int d = 0; d < p.dim; ++d)
            store(p.out.data, out + d, p.out_dtype, load(p.x.data, x + d, p.dtype) * scale * load(p.weight, d, p.weight_dtype));
    });
}

void rope(const RopeParams& p) {
    const int half = p.rotary_dim / 2;
    for_rows(int64_t(p.batch) * p.seqlen, int64_t(p.nheads) * p.headdim, p.num_threads, [&](int64_t token) {
        const int32_t b = int32_t(token / p.seqlen), i = int32_t(token % p.seqlen);
        const int64_t table = rope_row(p, b, i) * p.table_row;
        for (int head = 0; head < p.nheads; ++head) {
            const int64_t x = b * p.x.batch + i * p.x.row + head * p.x.head, out = b * p.out.batch + i * p.out.row + head * p.out.head;
            for (int pair = 0; pair < half; ++pair) {
                const float c = load(p.cos, table + pair, p.table_dtype), s = load(p.sin, table + pair, p.table_dtype);
                const float sine = p.inverse ? -s : s;
                const int first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? first + 1 : pair + half;
                const float a = load(p.x.data, x + first, p.dtype), z = load(p.x.data, x + second, p.dtype);
                store(p.out.data, out + first, p.dtype, a * c - z * sine);
                store(p.out.data, out + second, p.dtype, a * sine + z * c);
            }
            if (p.out.data != p.x.data)
                for (int d = p.rotary_dim; d < p.headdim; ++d) store(p.out.data, out + d, p.dtype, load(p.x.data, x + d, p.dtype));
        }
    });
}

void swiglu(const SwigluParams& p) {
    for_rows(p.rows, p.dim, p.num_threads, [&](int64_t row) {
        const int64_t gate = row * p.gate_up.row, up = gate + p.dim, out = row * p.out.row;
        for (int d = 0; d < p.dim; ++d) {
            const float g = load(p.gate_up.data, gate + d, p.dtype);
            store(p.out.data, out + d, p.out_dtype, g / (1.0f + std::exp(-g)) * load(p.gate_up.data, up + d, p.dtype));
        }
    });
}

}  // namespace fa::cpu
