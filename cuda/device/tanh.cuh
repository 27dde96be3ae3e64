// tanh.cuh: the hardware's hyperbolic tangent.
#pragma once

namespace fa {

// tanh.approx.f32: a relative error of 2^-11; NaN stays NaN.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace fa
