// params.h: the parameters of products with 4-bit weights, and of the operations that make such weights: plain data, validated by api/, for
// the kernels of GPU and CPU.
#pragma once

#include "transformer/ops/ops.h"
#include "transformer/w4/common/w4.h"

namespace fa {

// out = residual + act(norm(x) weight^T + bias), like LinearParams (transformer/ops/ops.h), with a packed weight (w4.h).
struct W4LinearParams {
    MatrixView x, residual, out;     // (rows, in_features), (rows, columns()), (rows, columns())
    const void* packed;              // w4::PackedHeader, then tiles
    const void *bias, *norm_weight;  // (out_features), (in_features); nullptr = none
    DType dtype, bias_dtype, norm_dtype, residual_dtype, out_dtype;
    DType compute_dtype;  // float16 or bfloat16, as in the header; x is rounded to it after the norm
    w4::Format format;
    float eps;
    int64_t rows;
    int32_t in_features, out_features;
    bool swiglu;        // the weight was packed as a pair
    bool programmatic;  // true only where the device has programmatic dependent launch (sm_90)
    void* workspace;    // of the size that the kernel requires, uninitialised
    int64_t workspace_bytes;
    int32_t num_threads;

    FA_HOST_DEVICE int32_t columns() const { return swiglu ? out_features / 2 : out_features; }  // of out
};

// A chain of products, in order: each may read what earlier products wrote, and overwrite what they read.
struct W4ChainParams {
    static constexpr int32_t kMost = 8, kMostAhead = 4;
    int32_t count;  // 1 .. kMost
    W4LinearParams products[kMost];
    int32_t ahead_count;            // arrays that a later launch reads first: a hint
    const void* ahead[kMostAhead];  // aligned to 16 bytes
    int64_t ahead_bytes[kMostAhead];

    // Bytes of all weights. From kLarge on, reading the weights takes more of a model's step than the launches do.
    static constexpr int64_t kLarge = 40 << 20;
    int64_t bytes() const {
        int64_t sum = 0;
        for (int i = 0; i < count; ++i)
            sum += w4::packed_bytes(products[i].format, products[i].out_features, products[i].in_features, products[i].swiglu);
        return sum;
    }
};

// A weight in its plain form (w4.h).
struct W4View {
    uint8_t* codes;
    void* scales;
    float* tensor_scale;  // nullptr = 1
    w4::Format format;
    int32_t out_features, in_features;

    FA_HOST_DEVICE int64_t blocks_of_a_row() const { return (int64_t(in_features) + w4::block_of(format) - 1) / w4::block_of(format); }
    FA_HOST_DEVICE int64_t blocks() const { return blocks_of_a_row() * out_features; }
};

struct W4QuantizeParams {
    MatrixView w;
    W4View out;
    DType dtype;
    bool search;
    int32_t num_threads;
};

struct W4DequantizeParams {
    W4View weight;
    MatrixView out;
    DType out_dtype;
    int32_t num_threads;
};

struct W4PackParams {
    W4View weight;
    void* packed;
    DType dtype;  // of the products: float16 or bfloat16
    bool pair;    // for SwiGLU: gate and up rows share tiles
    int32_t num_threads;
};

}  // namespace fa
