// w4_store.cuh: the end of a product with 4-bit weights: sums of a row tile become numbers of out.
#pragma once

#include "linear/linear.h"
#include "ops/elements.cuh"

namespace fa::w4 {

// Rows g and g + 8 of a tile (with a pair a gate and its up row), rows 2 pair and 2 pair + 1 of the `rows` of x that begin at row0:
// sum.x, .y are row g, sum.z, .w row g + 8. `factor` is the header's.
__device__ __forceinline__ void store_sums(const W4LinearParams& p, int64_t row0, int rows, int tile, int g, int pair, float4 sum,
                                           float factor) {
    const int64_t column = p.swiglu ? int64_t(tile) * 8 + g : int64_t(tile) * kTileRows + g;
    float value[2][2] = {{sum.x * factor, sum.y * factor}, {sum.z * factor, sum.w * factor}};  // [row g, g + 8][row of x]
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t feature = p.swiglu ? column + (r ? p.columns() : 0) : column + 8 * r;
        if (p.bias && feature < p.out_features && (!p.swiglu || column < p.columns())) {
            const float bias = load_element(p.bias, feature, p.bias_dtype);
            value[r][0] += bias, value[r][1] += bias;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int m = 2 * pair + i;
        if (p.swiglu) value[0][i] = silu(value[0][i]) * value[1][i];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (m >= rows || column + 8 * r >= p.columns() || (p.swiglu && r)) continue;
            const int64_t row = row0 + m;
            const float added =
                p.residual.data ? load_element(p.residual.data, row * p.residual.row + column + 8 * r, p.residual_dtype) : 0.0f;
            store_element(p.out.data, row * p.out.row + column + 8 * r, p.out_dtype, value[r][i] + added);
        }
    }
}

}  // namespace fa::w4
