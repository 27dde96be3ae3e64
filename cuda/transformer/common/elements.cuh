// elements.cuh: loads and stores of elements whose type is known at run time, and small computations on them that several kernels here
// share. The branch on the type is the same for a whole grid and costs nothing beside the memory access.
#pragma once

#include "common/element.cuh"

namespace fa {

// Loads bypass the L1 cache: after a programmatic launch L1 may still hold data that an earlier kernel has overwritten since.
__device__ __forceinline__ float load_element(const void* data, int64_t at, DType dtype) {
    if (dtype == DType::kFloat32) return __ldcg(static_cast<const float*>(data) + at);
    if (dtype == DType::kFloat16) return to_float(__ldcg(static_cast<const __half*>(data) + at));
    return to_float(__ldcg(static_cast<const __nv_bfloat16*>(data) + at));
}
__device__ __forceinline__ void store_element(void* data, int64_t at, DType dtype, float x) {
    if (dtype == DType::kFloat32) static_cast<float*>(data)[at] = x;
    else if (dtype == DType::kFloat16) static_cast<__half*>(data)[at] = from_float<__half>(x);
    else static_cast<__nv_bfloat16*>(data)[at] = from_float<__nv_bfloat16>(x);
}

// The value that store_element would store for x.
__device__ __forceinline__ float round_to(float x, DType dtype) {
    if (dtype == DType::kFloat32) return x;
    return dtype == DType::kFloat16 ? to_float(from_float<__half>(x)) : to_float(from_float<__nv_bfloat16>(x));
}

template <typename T>
__device__ __forceinline__ float4 widen_4(uint2 bits) {
    const T* x = reinterpret_cast<const T*>(&bits);
    return make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3]));
}
template <typename T>
__device__ __forceinline__ uint2 narrow_4(float4 x) {
    uint2 bits;
    T* to = reinterpret_cast<T*>(&bits);
    to[0] = from_float<T>(x.x), to[1] = from_float<T>(x.y), to[2] = from_float<T>(x.z), to[3] = from_float<T>(x.w);
    return bits;
}

// Four neighbouring elements; `at` is a multiple of four.
__device__ __forceinline__ float4 load_4(const void* data, int64_t at, DType dtype) {
    if (dtype == DType::kFloat32) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(data) + at));
    const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(static_cast<const __half*>(data) + at));
    return dtype == DType::kFloat16 ? widen_4<__half>(bits) : widen_4<__nv_bfloat16>(bits);
}
// Calls body with a value of the element type, so that a loop inside it does not branch at each load.
template <typename Body>
__device__ __forceinline__ void with_element(DType dtype, const Body& body) {
    if (dtype == DType::kFloat32) body(float{});
    else if (dtype == DType::kFloat16) body(__half{});
    else body(__nv_bfloat16{});
}
// load_4 for a type that is known.
template <typename From>
__device__ __forceinline__ float4 load_4(const void* data, int64_t at) {
    if constexpr (sizeof(From) == 4) return __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(data) + at));
    else return widen_4<From>(__ldcg(reinterpret_cast<const uint2*>(static_cast<const From*>(data) + at)));
}
// Elements k .. k + 3 (k is a multiple of four) of a row of `count` elements that starts at `begin`, with zeros past its end. fours: load_4
// can read the row.
__device__ __forceinline__ float4 load_up_to_4(const void* data, int64_t begin, DType dtype, int k, int count, bool fours) {
    float4 x = make_float4(0, 0, 0, 0);
    if (fours) {
        if (k < count) x = load_4(data, begin + k, dtype);
    } else {
        for (int i = 0; i < 4; ++i)
            if (k + i < count) (&x.x)[i] = load_element(data, begin + k + i, dtype);
    }
    return x;
}
__device__ __forceinline__ void add_4(float4& sum, const float4& x) { sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w; }
__device__ __forceinline__ float sum_of_squares(float4 x) { return x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w; }
// x times the reciprocal of its root mean square (`scale`), times the norm's weight.
__device__ __forceinline__ float4 norm_4(float4 x, float scale, float4 weight) {
    return make_float4(x.x * scale * weight.x, x.y * scale * weight.y, x.z * scale * weight.z, x.w * scale * weight.w);
}
__device__ __forceinline__ void store_4(void* data, int64_t at, DType dtype, float4 x) {
    if (dtype == DType::kFloat32) {
        *reinterpret_cast<float4*>(static_cast<float*>(data) + at) = x;
    } else {
        const uint2 bits = dtype == DType::kFloat16 ? narrow_4<__half>(x) : narrow_4<__nv_bfloat16>(x);
        *reinterpret_cast<uint2*>(static_cast<__half*>(data) + at) = bits;
    }
}

// Whether a kernel is compiled to apply RMSNorm to x first.
enum class Norm { kNone, kRms };

inline int element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Whether load_4 can read every row of a matrix.
inline bool by_fours(const void* data, int64_t row_stride, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % (4 * element_bytes(dtype)) == 0 && row_stride % 4 == 0;
}

// v / (1 + e^-v)
__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + expf(-v)); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}

}  // namespace fa
