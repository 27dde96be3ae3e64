// approximate.cuh: approximate functions of the special function unit; exp2_approx stands in mma.cuh.
#pragma once

namespace fa {

// rcp.approx.ftz: 1 / x to 1 ulp; 1 / inf = 0, NaN stays NaN.
__device__ __forceinline__ float rcp_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

// lg2.approx.ftz: log2 x to 2^-22; log2 0 = -inf.
__device__ __forceinline__ float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace fa
