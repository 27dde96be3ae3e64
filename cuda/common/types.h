// types.h: element types and views, used by host and device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FA_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FA_HOST_DEVICE inline
#endif

namespace fa {

enum class DType : int32_t { kFloat32 = 1, kFloat16 = 2, kBFloat16 = 3, kFloat8E4M3 = 4, kInt8 = 5 };
constexpr int size_of(DType dtype) {  // bytes
    return dtype == DType::kFloat32 ? 4 : dtype == DType::kFloat8E4M3 || dtype == DType::kInt8 ? 1 : 2;
}

// A (batch, row, head, dim) array: element data[b * batch + r * row + h * head + d], strides in elements.
struct TensorView {
    void* data;
    int64_t batch, row, head;
};

FA_HOST_DEVICE int32_t clamp_to(int32_t x, int32_t low, int32_t high) { return x < low ? low : x > high ? high : x; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// `pointer` rounded up to a multiple of `alignment`. A workspace may start at any address, so a kernel that needs an alignment asks for
// that many extra bytes.
inline void* align_up(void* pointer, uintptr_t alignment) {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(pointer) + alignment - 1) / alignment * alignment);
}

}  // namespace fa
