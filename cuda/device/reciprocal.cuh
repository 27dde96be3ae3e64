// reciprocal.cuh: the hardware's reciprocal.
#pragma once

namespace fa {

// rcp.approx.ftz: 1 / x to 1 ulp; 1 / inf = 0, NaN stays NaN.
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace fa
