// linear_tile_kernel.h: some columns of the CPU's linear for all rows of x. Compiled once per instruction set by tiles_<isa>.cpp, after
// tile_kernel.h, which includes rows.h. tiles_<isa>.cpp also defines
//     FA_LINEAR  the LinearKernel to define
//
// Rows of x are widened to float32 and multiplied by norm_weight; the factor 1 / rms is applied to the sums. Then, for each block of
// kLinearOutputs rows of weight, come the dot products and what follows them (bias, activation, residual). Every element of out is summed
// in one order, whatever the rows beside it and the number of threads. For few rows, bound by reading the weights from memory.
#include "cpu/transformer/linear_tile.h"

namespace fa::cpu::FA_ISA {
namespace {

// ---- sums[m][i] += x[m] . weight[i] ----

constexpr int kTileRows = kVectors == 4 ? 4 : 2;  // rows of x, with 4 weights each: as many accumulators as the registers hold
                                                  // beside the operands
constexpr int kSingleWeights = L < 8 ? L : 8;     // with one row of x: enough sums to hide the latency of an addition

template <DType dtype, int kRows, int kWeights>
FA_INLINE void dot(const char* weight, int64_t weight_bytes, const float* x, int64_t ld, int columns, float* sums) {
    constexpr int size = int(element_size(dtype));
    Vec sum[kRows][kWeights] = {};
    const auto multiply = [&](int d, auto load_weights) __attribute__((always_inline)) {
        Vec row[kRows];
#pragma GCC unroll 4
        for (int m = 0; m < kRows; ++m) row[m] = load_unaligned<Vec>(x + m * ld + d);
#pragma GCC unroll 8
        for (int i = 0; i < kWeights; ++i) {
            const char* const from = weight + i * weight_bytes + int64_t(d) * size;
            // With one row of x memory is the bound, so prefetch the same columns of the next weights.
            if (kRows == 1) __builtin_prefetch(from + kWeights * weight_bytes, 0, 2);
            Vec w = load_weights(from);
            if (kRows > 1) keep_in_register(w);
#pragma GCC unroll 4
            for (int m = 0; m < kRows; ++m) sum[m][i] += w * row[m];
        }
    };
    int d = 0;
    for (; d + L <= columns; d += L) multiply(d, [](const char* from) { return load_vector<dtype>(from); });
    if (d < columns) multiply(d, [=](const char* from) { return load_partial<dtype>(from, columns - d); });
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) add_sums<kWeights>(sum[m], sums + m * kLinearOutputs);
}

// kWeights rows of weight, the first at `weight`, with all rows of x.
template <DType dtype, int kWeights>
FA_INLINE void dots(const char* weight, int64_t weight_bytes, const float* x, int64_t ld, int rows, int columns, float* sums) {
    constexpr int kStep = kWeights < 4 ? 1 : 4;
    int m = 0;
    for (; m + kTileRows <= rows; m += kTileRows)
        for (int i = 0; i < kWeights; i += kStep)
            dot<dtype, kTileRows, kStep>(weight + i * weight_bytes, weight_bytes, x + m * ld, ld, columns, sums + m * kLinearOutputs + i);
    for (; m < rows; ++m) dot<dtype, 1, kWeights>(weight, weight_bytes, x + m * ld, ld, columns, sums + m * kLinearOutputs);
}

template <DType dtype>
void dots_of_block(const char* weight, int64_t weight_bytes, const float* x, int64_t ld, int rows, int columns, int outputs, float* sums) {
    for (int first = 0; first < columns; first += kLinearColumns) {
        const int part = columns - first < kLinearColumns ? columns - first : kLinearColumns;
        const char* const from = address(weight, first, dtype);
        int n = 0;
        for (; n + kSingleWeights <= outputs; n += kSingleWeights)
            dots<dtype, kSingleWeights>(from + n * weight_bytes, weight_bytes, x + first, ld, rows, part, sums + n);
        for (; n < outputs; ++n) dots<dtype, 1>(from + n * weight_bytes, weight_bytes, x + first, ld, rows, part, sums + n);
    }
}

// ---- before and after the products ----

FA_INLINE Vec silu(Vec x) {
    const Vec power = -x > 88.0f ? splat(kInfinity) : exp(-x);
    return x / (1.0f + power);
}

struct Linear {
    const LinearParams& p;
    const int32_t columns;  // of out
    int64_t prepared_row = -1;
    int32_t prepared_column = -1;  // the row and column that x begins with
    int ld = 0;                    // floats between rows of x
    Vec squares[kLinearRows];      // sums of the squares of x before the norm's weight, one per lane
    alignas(64) float x[kLinearFloats];
    float gate[kLinearRows][kLinearOutputs], up[kLinearRows][kLinearOutputs];

    Linear(const LinearTask& task) : p(*task.params), columns(task.columns) {}

    // Fills x with columns k .. k + count - 1, and zeros up to the next whole vector.
    void prepare(int64_t row0, int rows, int32_t k, int count) {
        if (row0 == prepared_row && k == prepared_column) return;
        prepared_row = row0, prepared_column = k;
        for (int m = 0; m < rows; ++m) {
            const char* const from = address(p.x.data, (row0 + m) * p.x.row + k, p.dtype);
            Vec sum = k == 0 ? Vec{} : squares[m];
            for (int d = 0; d < count; d += L) {
                Vec value = load_any(from + d * element_size(p.dtype), count - d, p.dtype);
                if (p.norm_weight) {
                    sum += value * value;
                    value *= load_any(address(p.norm_weight, k + d, p.norm_dtype), count - d, p.norm_dtype);
                }
                __builtin_memcpy(x + m * ld + d, &value, sizeof value);
            }
            squares[m] = sum;
        }
    }

    void products(int64_t first, int outputs, int rows, int32_t k, int count, float* sums) const {
        const int64_t weight_bytes = p.weight.row * element_size(p.weight_dtype);
        const char* const weight = address(p.weight.data, first * p.weight.row + k, p.weight_dtype);
        if (p.weight_dtype == DType::kFloat32) dots_of_block<DType::kFloat32>(weight, weight_bytes, x, ld, rows, count, outputs, sums);
        else if (p.weight_dtype == DType::kFloat16) dots_of_block<DType::kFloat16>(weight, weight_bytes, x, ld, rows, count, outputs, sums);
        else dots_of_block<DType::kBFloat16>(weight, weight_bytes, x, ld, rows, count, outputs, sums);
    }

    void store(int64_t row0, int rows, int64_t first, int outputs) const {
        for (int m = 0; m < rows; ++m) {
            float scale = 1;
            if (p.norm_weight) {
                Vec sum[1] = {squares[m]};
                float square = 0;
                add_sums<1>(sum, &square);
                scale = 1 / __builtin_sqrtf(square / float(p.in_features) + p.eps);
            }
            for (int n = 0; n < outputs; n += L) {
                const int64_t row = row0 + m, column = first + n;
                const int left = outputs - n;
                const auto with_bias = [&](const float* sums, int64_t at) {
                    const Vec sum = load_unaligned<Vec>(sums + n) * scale;
                    return p.bias ? sum + load_any(address(p.bias, at, p.bias_dtype), left, p.bias_dtype) : sum;
                };
                Vec value = with_bias(gate[m], column);
                if (p.swiglu) value = silu(value) * with_bias(up[m], columns + column);
                if (p.residual.data)
                    value += load_any(address(p.residual.data, row * p.residual.row + column, p.residual_dtype), left, p.residual_dtype);
                store_any(const_cast<char*>(address(p.out.data, row * p.out.row + column, p.out_dtype)), left, p.out_dtype, value);
            }
        }
    }

    void run(int32_t begin, int32_t end) {
        const int64_t padded = (int64_t(p.in_features) + L - 1) / L * L;
        const int64_t least = p.rows < kTileRows ? p.rows : kTileRows, most = p.rows < kLinearRows ? p.rows : kLinearRows;
        const int64_t fit = kLinearFloats / padded;
        const bool whole = fit >= least;  // otherwise x is processed in pieces of columns
        const int group = int(!whole ? least : fit < most ? fit : most);
        const int32_t piece = whole ? p.in_features : kLinearFloats / group / kLinearColumns * kLinearColumns;
        ld = int(whole ? padded : piece);
        for (int32_t first = begin; first < end; first += kLinearOutputs) {
            const int outputs = end - first < kLinearOutputs ? end - first : kLinearOutputs;
            for (int64_t row0 = 0; row0 < p.rows; row0 += group) {
                const int rows = p.rows - row0 < group ? int(p.rows - row0) : group;
                for (int m = 0; m < rows; ++m)
                    for (int n = 0; n < kLinearOutputs; ++n) gate[m][n] = up[m][n] = 0;
                for (int32_t k = 0; k < p.in_features; k += piece) {
                    const int count = p.in_features - k < piece ? p.in_features - k : piece;
                    prepare(row0, rows, k, count);
                    products(first, outputs, rows, k, count, gate[0]);
                    if (p.swiglu) products(int64_t(columns) + first, outputs, rows, k, count, up[0]);
                }
                store(row0, rows, first, outputs);
            }
        }
    }
};

void run_linear(const LinearTask& task) { Linear(task).run(task.first, task.last); }

}  // namespace
}  // namespace fa::cpu::FA_ISA

namespace fa::cpu {
const LinearKernel FA_LINEAR = FA_ISA::run_linear;
}
