// element.cuh: conversions of elements whose type is a template parameter, and the dispatch from a run-time dtype to that type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "common/types.h"

namespace fa {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
    return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// Calls body with a zero of the element type. Validation has already refused every other dtype.
template <typename Body>
cudaError_t with_dtype(DType dtype, const Body& body) {
    switch (dtype) {
        case DType::kFloat32: return body(float{});
        case DType::kFloat16: return body(__half{});
        case DType::kBFloat16: return body(__nv_bfloat16{});
        default: return cudaErrorInvalidValue;
    }
}

}  // namespace fa
