// exact_row.h: recomputes one row of the forward pass in double precision. This serves the few rows whose sums leave the range of
// float32 although the result does not: the kernels add up P v before they divide by the sum of P, and a product q . k may be larger
// than its score.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/common/dropout.h"
#include "common/float8.h"
#include "common/half.h"
#include "common/older_glibc.h"
#include "cpu/attention/score.h"
#include "cpu/attention/tile.h"

FA_FIRST_VERSION(exp);  // of double

namespace fa::cpu {

// The keys of a tile with an infinity or a NaN in K or V, the usual reason why a row is not finite. Holds the first runs of adjacent keys,
// such as the padding after a sequence. Searched for once per tile.
struct SpecialKeys {
    KeyRange run[64];
    int32_t count = -1;

    template <DType dtype>  // of K and V
    void find(const QueryTile& tile) {
        const AttentionParams& p = *tile.params;
        const auto special = [&](const TensorView& t, int64_t first, int32_t j, int32_t dim) {
            const int64_t at = key_row(p, t, first, tile.batch, j) + tile.head_k * t.head;
            for (int32_t d = 0; d < dim; ++d)
                if (!(std::fabs(element<dtype>(t.data, at + d)) < INFINITY)) return true;
            return false;
        };
        count = 0;
        for (int32_t j = tile.key_begin; j < tile.key_end; ++j) {
            if (!special(p.k, tile.sequence.k, j, p.headdim) && !special(p.v, tile.sequence.v, j, p.headdim_v)) continue;
            if (count > 0 && run[count - 1].end == j) ++run[count - 1].end;
            else if (count < 64) run[count++] = {j, j + 1};
            else return;
        }
    }
    bool any_visible(const QueryTile& tile, const QueryRow& row) const {
        for (int32_t x = 0; x < count; ++x)
            for (int32_t j = std::max(run[x].begin, row.key_begin); j < std::min(run[x].end, row.key_end); ++j)
                if (score_of_zero(tile, row, j) != -INFINITY) return true;
        return false;
    }

    // The score that the options give to a key whose product is 0.
    static float score_of_zero(const QueryTile& tile, const QueryRow& row, int32_t j) {
        return transform(*tile.params, tile.sequence, tile.batch, row.head, row.query, j, 0.0f).value;
    }
};

// Whether a sink, or the bias of a key, makes the row's result non-finite whatever its products are: a NaN or +inf.
inline bool options_spoil(const QueryTile& tile, const QueryRow& row) {
    const AttentionParams& p = *tile.params;
    if (p.sinks && !(p.sinks[row.head] < INFINITY)) return true;
    for (int32_t j = row.key_begin; p.bias.data && j < row.key_end; ++j)
        if (!(SpecialKeys::score_of_zero(tile, row, j) < INFINITY)) return true;
    return false;
}

// Writes out, row_max, row_sum and greatest of row r of a tile. If the row sees an infinity or a NaN in any array, everything
// stays as it is.
template <DType dtype>  // of K and V
void attend_exactly_as(QueryTile& tile, int32_t r, SpecialKeys& special) {
    if (special.count < 0) special.find<dtype>(tile);
    if (special.any_visible(tile, tile.row[r]) || options_spoil(tile, tile.row[r])) return;
    constexpr int kMostDim = 576;
    const AttentionParams& p = *tile.params;
    const Sequence& s = tile.sequence;
    const QueryRow& row = tile.row[r];
    const int64_t q0 = s.q + row.head * p.q.head + row.query * p.q.row;
    double row_max = p.sinks ? p.sinks[row.head] : -INFINITY, row_sum = row_max == -INFINITY ? 0 : 1, greatest = -INFINITY;
    double out[kMostDim] = {};
    for (int32_t j = row.key_begin; j < row.key_end; ++j) {
        const int64_t k0 = key_row(p, p.k, s.k, tile.batch, j) + tile.head_k * p.k.head;
        double dot = 0;
        for (int32_t d = 0; d < p.headdim; ++d) dot += double(load(p.q.data, q0 + d, p.dtype)) * element<dtype>(p.k.data, k0 + d);
        dot *= cache_scale(p, p.cache.k_scale, tile.batch, j, tile.head_k);
        const double score = transform(p, s, tile.batch, row.head, row.query, j, dot).value;
        if (score == -INFINITY) continue;
        if (!(std::fabs(score) < INFINITY)) return;
        if (score > row_max) {
            const double correction = std::exp(row_max - score);
            row_sum *= correction, row_max = score;
            for (int32_t d = 0; d < p.headdim_v; ++d) out[d] *= correction;
        }
        greatest = std::fmax(greatest, score);
        double weight = std::exp(score - row_max);
        row_sum += weight;
        if (p.dropout_threshold)
            weight *= dropped(p, dropout_block(p, tile.batch, row.head, row.query, j), j) ? 0 : double(p.dropout_scale);
        weight *= cache_scale(p, p.cache.v_scale, tile.batch, j, tile.head_k);
        const int64_t v0 = key_row(p, p.v, s.v, tile.batch, j) + tile.head_k * p.v.head;
        for (int32_t d = 0; d < p.headdim_v; ++d) {
            const double value = element<dtype>(p.v.data, v0 + d);
            if (!(std::fabs(value) < INFINITY)) return;
            out[d] += weight * value;
        }
    }
    const int64_t out0 = s.out + row.head * p.out.head + row.query * p.out.row;
    for (int32_t d = 0; d < p.headdim_v; ++d) store(p.out.data, out0 + d, p.out_dtype, row_sum == 0 ? 0 : float(out[d] / row_sum));
    tile.row_max[r] = float(row_max), tile.row_sum[r] = float(row_sum), tile.greatest[r] = float(greatest);
}

inline void attend_exactly(QueryTile& tile, int32_t r, SpecialKeys& special) {
    const AttentionParams& p = *tile.params;
    const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
    if (dtype == DType::kFloat32) attend_exactly_as<DType::kFloat32>(tile, r, special);
    else if (dtype == DType::kFloat16) attend_exactly_as<DType::kFloat16>(tile, r, special);
    else if (dtype == DType::kBFloat16) attend_exactly_as<DType::kBFloat16>(tile, r, special);
    else if (dtype == DType::kFloat8E4M3) attend_exactly_as<DType::kFloat8E4M3>(tile, r, special);
    else attend_exactly_as<DType::kInt8>(tile, r, special);
}

}  // namespace fa::cpu
