// linear_w4.cpp: out = residual + act(norm(x) weight^T + bias) on the host, with the weight in packed tiles of 4 bits
// (transformer/w4/common/w4.h). The workspace holds a few rows of x at a time, normalised and rounded, in the order of the tiles' words.
// Each task then computes one row of tiles.
#include <algorithm>
#include <cmath>

#include "common/half.h"
#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"
#include "cpu/transformer/linear_w4_tile.h"

namespace fa::cpu {
namespace {

W4Kernel w4_kernel() {
#if defined(__x86_64__)
    if (isa_available(Isa::kAvx512)) return kLinearW4Avx512;
    if (isa_available(Isa::kAvx2)) return kLinearW4Avx2;
#elif defined(__aarch64__)
    return kLinearW4Neon;
#endif
    return kLinearW4Portable;
}

float silu(float v) { return v / (1.0f + std::exp(-v)); }

// Stores row `row` of x as the products read it, with zeros after its end.
void stage_row(const W4LinearParams& p, int64_t row, int64_t tiles, float* to) {
    float scale = 1.0f;
    if (p.norm_weight) {
        float squares = 0;
        for (int32_t k = 0; k < p.in_features; ++k) {
            const float x = load(p.x.data, row * p.x.row + k, p.dtype);
            squares += x * x;
        }
        scale = 1.0f / std::sqrt(squares / float(p.in_features) + p.eps);
    }
    std::fill_n(to + (tiles - 1) * w4::kTileColumns, w4::kTileColumns, 0.0f);
    for (int32_t k = 0; k < p.in_features; ++k) {
        float x = load(p.x.data, row * p.x.row + k, p.dtype);
        if (p.norm_weight) x = x * scale * load(p.norm_weight, k, p.norm_dtype);
        if (p.compute_dtype == DType::kFloat16) x = float16_to_float(float_to_float16(x));
        else x = bfloat16_to_float(float_to_bfloat16(x));
        to[k / w4::kTileColumns * w4::kTileColumns + k % 4 * 16 + k % w4::kTileColumns / 4] = x;
    }
}

}  // namespace

int64_t w4_linear_workspace(const W4LinearParams& p) {
    return std::min<int64_t>(kW4Rows, p.rows) * w4::column_tiles(p.in_features) * w4::kTileColumns * int64_t(sizeof(float));
}

void w4_linear(const W4LinearParams& p) {
    const W4Kernel kernel = w4_kernel();
    const auto* const header = static_cast<const w4::PackedHeader*>(p.packed);
    const auto* const packed = reinterpret_cast<const uint8_t*>(header + 1);
    const int64_t tiles = w4::column_tiles(p.in_features);
    const int32_t columns = p.columns();
    const int outputs = p.swiglu ? 8 : w4::kTileRows;  // columns of out per row of tiles
    float* const x = static_cast<float*>(p.workspace);
    // Widening a weight takes about 0.1 ns, its products 0.05 ns per row of x.
    const double weights = double(p.in_features) * p.out_features, many = std::min<double>(kW4Rows, double(p.rows));
    const int threads = worthwhile_threads(weights * (0.1 + 0.05 * many), p.num_threads);
    const int stagers = worthwhile_threads(2.0 * p.in_features * many, p.num_threads);
    for (int64_t row0 = 0; row0 < p.rows; row0 += kW4Rows) {
        const int rows = int(std::min<int64_t>(kW4Rows, p.rows - row0));
        parallel_for(rows, stagers, [&](int64_t m, int) { stage_row(p, row0 + m, tiles, x + m * tiles * w4::kTileColumns); });
        parallel_for((columns + outputs - 1) / outputs, threads, [&](int64_t task, int) {
            W4RowTile tile;
            tile.tiles = packed + task * tiles * w4::tile_bytes(p.format), tile.count = tiles;
            tile.format = p.format, tile.dtype = p.compute_dtype, tile.x = x, tile.rows = rows;
            kernel(tile);
            for (int m = 0; m < rows; ++m)
                for (int r = 0; r < outputs && task * outputs + r < columns; ++r) {
                    const int64_t row = row0 + m, column = task * outputs + r;
                    const auto with_bias = [&](float sum, int64_t at) {
                        return sum * header->factor + (p.bias ? load(p.bias, at, p.bias_dtype) : 0.0f);
                    };
                    float value = with_bias(tile.sums[m][r], column);
                    if (p.swiglu) value = silu(value) * with_bias(tile.sums[m][r + 8], columns + column);
                    if (p.residual.data) value += load(p.residual.data, row * p.residual.row + column, p.residual_dtype);
                    store(p.out.data, row * p.out.row + column, p.out_dtype, value);
                }
        });
    }
}

}  // namespace fa::cpu
