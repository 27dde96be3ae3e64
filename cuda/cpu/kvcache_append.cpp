// kvcache_append.cpp: new keys and values join the cache, and q turns; what kvcache_append.cu does.
#include "attention/kvcache_append.h"

#include <algorithm>
#include <cmath>

#include "float8.h"
#include "half.h"
#include "kernels.h"
#include "parallel.h"

namespace fa::cpu {
namespace {

uint8_t to_byte(DType dtype, float x) {
    if (dtype == DType::kFloat8E4M3) return float_to_e4m3_saturating(x);
    return uint8_t(int8_t(std::fmin(std::fmax(std::nearbyint(x), -127.0f), 127.0f)));
}

void append(const AppendParams& a, const AppendRow& row) {
    const AttentionParams& p = a.attention;
    const bool query = row.of == RowOf::kQuery, key = row.of == RowOf::kKey;
    const int dim = row.of == RowOf::kValue ? p.headdim_v : p.headdim;
    const void* const from = (query ? p.q : key ? a.k_new : a.v_new).data;
    void* const to = query ? a.q_rotated.data : key ? p.k.data : p.v.data;
    const auto value = [&](int d) { return load(from, row.from + d, p.dtype); };
    const auto angle = [&](const void* table, int64_t i) { return load(table, i, a.rotary_dtype); };
    if (query || p.cache.dtype == p.dtype) {
        for (int d = 0; d < dim; ++d) store(to, row.to + d, p.dtype, rotated(a, row.position, d, value, angle));
        return;
    }
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
    const int64_t rows = append_rows(a), block = 64;  // a thread is worth starting for some 256 rows
    const int threads = int(std::min<int64_t>(a.attention.num_threads, rows / 256 + 1));
    parallel_for((rows + block - 1) / block, threads, [&](int64_t task, int) {
        for (int64_t index = task * block; index < std::min(rows, (task + 1) * block); ++index)
            if (const AppendRow row = append_row(a, index); !row.skip) append(a, row);
    });
}

}  // namespace fa::cpu
