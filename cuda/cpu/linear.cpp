// linear.cpp: out = residual + act(norm(x) weight^T + bias) on the host. A task takes a few rows of weight, walks along them in pieces of
// kLinearColumns, and for each piece widens the rows of x: that is little beside the weights.
#include <algorithm>
#include <cmath>

#include "half.h"
#include "kernels.h"
#include "linear_tile.h"
#include "parallel.h"

namespace fa::cpu {
namespace {

LinearKernel linear_kernel() {
#if defined(__x86_64__)
    if (isa_available(Isa::kAvx512)) return kLinearAvx512;
    if (isa_available(Isa::kAvx2)) return kLinearAvx2;
#elif defined(__aarch64__)
    return kLinearNeon;
#endif
    return kLinearPortable;
}

float silu(float v) { return v / (1.0f + std::exp(-v)); }

// tile.sums of rows first .. first + outputs - 1 of weight with rows row0 .. of x; without the norm's 1 / rms, which is scale[m].
void dot_products(const LinearParams& p, LinearKernel kernel, int64_t row0, int64_t first, int outputs, LinearTile& tile, float* scale) {
    const int64_t element = p.weight_dtype == DType::kFloat32 ? 4 : 2;
    tile.rows = int32_t(std::min<int64_t>(kLinearRows, p.rows - row0)), tile.outputs = outputs;
    tile.dtype = p.weight_dtype, tile.weight_bytes = p.weight.row * element;
    std::fill_n(&tile.sums[0][0], kLinearRows * kLinearOutputs, 0.0f);
    float squares[kLinearRows] = {};
    for (int32_t k = 0; k < p.in_features; k += kLinearColumns) {
        tile.columns = std::min(kLinearColumns, p.in_features - k);
        tile.weight = static_cast<const char*>(p.weight.data) + (first * p.weight.row + k) * element;
        for (int m = 0; m < tile.rows; ++m) {
            float* const x = tile.x[m];
            float sum = 0;
            for (int d = 0; d < tile.columns; ++d) x[d] = load(p.x.data, (row0 + m) * p.x.row + k + d, p.dtype);
            if (p.norm_weight)
                for (int d = 0; d < tile.columns; ++d) sum += x[d] * x[d], x[d] *= load(p.norm_weight, k + d, p.norm_dtype);
            squares[m] += sum;
            std::fill(x + tile.columns, x + std::min(kLinearColumns, (tile.columns + 15) / 16 * 16), 0.0f);
        }
        kernel(tile);
    }
    for (int m = 0; m < tile.rows; ++m) scale[m] = p.norm_weight ? 1.0f / std::sqrt(squares[m] / float(p.in_features) + p.eps) : 1.0f;
}

}  // namespace

void linear(const LinearParams& p) {
    const LinearKernel kernel = linear_kernel();
    const int32_t columns = p.columns();
    const int64_t blocks = (columns + kLinearOutputs - 1) / kLinearOutputs, row_groups = (p.rows + kLinearRows - 1) / kLinearRows;
    // All rows of x with the same weights follow each other: the weights are then in the cache.
    parallel_for(blocks * row_groups, p.num_threads, [&](int64_t task, int) {
        const int64_t first = task / row_groups * kLinearOutputs, row0 = task % row_groups * kLinearRows;
        const int outputs = int(std::min<int64_t>(kLinearOutputs, columns - first));
        float scale[kLinearRows], up[kLinearRows][kLinearOutputs];
        LinearTile tile;
        if (p.swiglu) {
            dot_products(p, kernel, row0, columns + first, outputs, tile, scale);
            std::copy_n(&tile.sums[0][0], kLinearRows * kLinearOutputs, &up[0][0]);
        }
        dot_products(p, kernel, row0, first, outputs, tile, scale);
        for (int m = 0; m < tile.rows; ++m)
            for (int n = 0; n < outputs; ++n) {
                const int64_t row = row0 + m, column = first + n;
                const auto with_bias = [&](float sum, int64_t at) {
                    return sum * scale[m] + (p.bias ? load(p.bias, at, p.bias_dtype) : 0.0f);
                };
                float value = with_bias(tile.sums[m][n], column);
                if (p.swiglu) value = silu(value) * with_bias(up[m][n], columns + column);
                if (p.residual.data) value += load(p.residual.data, row * p.residual.row + column, p.residual_dtype);
                store(p.out.data, row * p.out.row + column, p.out_dtype, value);
            }
    });
}

}  // namespace fa::cpu
