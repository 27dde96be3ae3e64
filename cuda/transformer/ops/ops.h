// ops.h: the parameters of the operations around attention: plain data, validated by api/, for the kernels of GPU and CPU.
// flash_attn_transformer.h defines each field. Matrices are data[row * stride + column].
#pragma once

#include "common/types.h"

namespace fa {

// Reads data that an earlier kernel may have written while this kernel was starting: bypasses the L1 cache.
template <typename T>
FA_HOST_DEVICE T load_fresh(const T* data) {
#if defined(__CUDA_ARCH__)
    return __ldcg(data);
#else
    return *data;
#endif
}

struct MatrixView {
    void* data;
    int64_t row;  // stride in elements
};

// out = (x + residual) / rms(x + residual) * weight; x + residual is stored in x.
struct RmsNormParams {
    MatrixView x, residual, out;  // (rows, dim); residual.data nullptr = none
    const void* weight;           // (dim)
    DType dtype, residual_dtype, weight_dtype, out_dtype;
    int64_t rows;
    int32_t dim;
    float eps;
    bool programmatic;
    int32_t num_threads;
};

struct RopeParams {
    TensorView x, out;         // (batch, seqlen, nheads, headdim)
    const void *cos, *sin;     // (table_rows, rotary_dim / 2)
    int64_t table_row;         // stride
    const int32_t* positions;  // (batch, seqlen), (batch) or nullptr
    DType dtype, table_dtype;
    int32_t batch, seqlen, nheads, headdim, rotary_dim, table_rows;
    bool per_token, interleaved, inverse, programmatic;
    int32_t num_threads;
};

// The row of the tables for token i of batch entry b. Positions in device memory cannot be checked before the launch. A position outside
// the tables takes the nearest row, so no address outside the tables is read.
FA_HOST_DEVICE int64_t rope_row(const RopeParams& p, int32_t b, int32_t i) {
    const int64_t position = !p.positions  ? i
                             : p.per_token ? int64_t(load_fresh(p.positions + int64_t(b) * p.seqlen + i))
                                           : int64_t(load_fresh(p.positions + b)) + i;
    return position < 0 ? 0 : position < p.table_rows ? position : p.table_rows - 1;
}

// out = silu(gate) * up; gate is the first dim columns of gate_up, up the last dim columns.
struct SwigluParams {
    MatrixView gate_up, out;  // (rows, 2 dim), (rows, dim)
    DType dtype, out_dtype;
    int64_t rows;
    int32_t dim;
    bool programmatic;
    int32_t num_threads;
};

// out = residual + act(norm(x) weight^T + bias); act is the identity, or silu(first half) * second half.
struct LinearParams {
    MatrixView x, weight, residual, out;  // (rows, in_features), (out_features, in_features), (rows, columns of out) twice
    const void *bias, *norm_weight;       // (out_features), (in_features); nullptr = none
    DType dtype, weight_dtype, bias_dtype, norm_dtype, residual_dtype, out_dtype;
    float eps;
    int64_t rows;
    int32_t in_features, out_features;
    bool swiglu, programmatic;
    int32_t num_threads;

    int32_t vector() const { return weight_dtype == DType::kFloat32 ? 4 : 8; }                   // elements of weight in 16 bytes
    FA_HOST_DEVICE int32_t columns() const { return swiglu ? out_features / 2 : out_features; }  // of out
};

}  // namespace fa
