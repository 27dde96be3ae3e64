// w4_store.cuh: the epilogue of the mma.sync products with 4-bit weights: scaling, bias, SwiGLU, residual, store.
#pragma once

#include "transformer/common/elements.cuh"
#include "transformer/w4/common/params.h"

namespace fa::w4 {

// Stores four sums of row tile `tile`: sum.x and sum.y belong to its row g, sum.z and sum.w to its row g + 8 (in a pair, a gate row and its
// up row), each for rows 2 pair and 2 pair + 1 of the `rows` rows of x that begin at row0. `factor` is PackedHeader::factor.
__device__ __forceinline__ void store_sums(const W4LinearParams& p, int64_t row0, int rows, int tile, int g, int pair, float4 sum,
                                           float factor) {
    const int64_t column = p.swiglu ? int64_t(tile) * 8 + g : int64_t(tile) * kTileRows + g;
    float value[2][2] = {{sum.x * factor, sum.y * factor}, {sum.z * factor, sum.w * factor}};  // [row g or g + 8][row of x]
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
