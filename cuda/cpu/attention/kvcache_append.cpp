// kvcache_append.cpp: rotates new keys and q, and appends new keys and values to the cache, as attention/decode/append.cu does.
#include "attention/decode/append.h"

#include <algorithm>
#include <cmath>

#include "common/float8.h"
#include "common/half.h"
#include "cpu/attention/kernels.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

uint8_t to_byte(DType dtype, float x) {
    if (dtype == DType::kFloat8E4M3) return float_to_e4m3_saturating(x);
    return uint8_t(int8_t(std::fmin(std::fmax(std::nearbyint(x), -127.0f), 127.0f)));
}

// Rotates the pairs of a row whose elements keep their type, and copies the other elements.
template <typename Load, typename Store>
void turn(const AppendParams& a, const AppendRow& row, int dim, const Load& load, const Store& store) {
    const int half = row.position < 0 ? 0 : a.rotary_dim / 2;
    const int64_t at = int64_t(row.position) * half;
    for (int i = 0; i < half; ++i) {
        const int first = a.rotary_interleaved ? 2 * i : i, second = a.rotary_interleaved ? first + 1 : i + half;
        const float c = fa::cpu::load(a.rotary_cos, at + i, a.rotary_dtype), s = fa::cpu::load(a.rotary_sin, at + i, a.rotary_dtype);
        const float x = load(first), y = load(second);
        store(first, x * c - y * s), store(second, y * c + x * s);
    }
    for (int d = 2 * half; d < dim; ++d) store(d, load(d));
}

void append(const AppendParams& a, const AppendRow& row) {
    const AttentionParams& p = a.attention;
    const bool query = row.of == RowOf::kQuery, key = row.of == RowOf::kKey;
    const int dim = row.of == RowOf::kValue ? p.headdim_v : p.headdim;
    const void* const from = (query ? p.q : key ? a.k_new : a.v_new).data;
    void* const to = query ? a.q_rotated.data : key ? p.k.data : p.v.data;
    if (query || p.cache.dtype == p.dtype) {
        if (p.dtype == DType::kFloat32 && a.rotary_dtype == DType::kFloat32) {
            const float* const x = static_cast<const float*>(from) + row.from;
            float* const y = static_cast<float*>(to) + row.to;
            turn(a, row, dim, [=](int d) { return x[d]; }, [=](int d, float number) { y[d] = number; });
        } else {
            turn(
                a, row, dim, [&](int d) { return load(from, row.from + d, p.dtype); },
                [&](int d, float number) { store(to, row.to + d, p.dtype, number); });
        }
        return;
    }
    const auto value = [&](int d) { return load(from, row.from + d, p.dtype); };
    const auto angle = [&](const void* table, int64_t i) { return load(table, i, a.rotary_dtype); };
    const CacheScale& scales = key ? p.cache.k_scale : p.cache.v_scale;
    float& scale = scales.data[row.scale];
    if (scales.row != 0) {
        float amax = 0;
        for (int d = 0; d < dim; ++d) amax = std::fmax(amax, std::fabs(rotated(a, row.position, d, value, angle)));
        scale = token_scale(p.cache.dtype, amax);
    }
    for (int d = 0; d < dim; ++d)
        static_cast<uint8_t*>(to)[row.to + d] = to_byte(p.cache.dtype, rotated(a, row.position, d, value, angle) / scale);
}

}  // namespace

void kvcache_append(const AppendParams& a) {
    const int64_t rows = append_rows(a), block = 64;
    const int threads = worthwhile_threads(2.0 * double(rows) * a.attention.headdim, a.attention.num_threads);
    parallel_for((rows + block - 1) / block, threads, [&](int64_t task, int) {
        for (int64_t index = task * block; index < std::min(rows, (task + 1) * block); ++index)
            if (const AppendRow row = append_row(a, index); !row.skip) append(a, row);
    });
}

}  // namespace fa::cpu
