// split_tf32.cuh: products of float32 matrices on tensor cores with float32's accuracy. A float32 x is high + low, two tf32 numbers of 11
// bits each; a product is low * high' + high * low' + high * high'. What is dropped, low * low', is 2^-24 of the product.
//
// Tensor cores add to an accumulator with truncation, and a long chain of such sums is off to one side: 4096 keys cost 8 bits. So each
// chain is three instructions long and starts from zero, the small products first. Float32 additions, which round to nearest, join the
// chains. docs/float32.md has the numbers.
#pragma once

#include "device/mma.cuh"

namespace fa {

// The element type of float32 arrays whose products are made so. (float itself stands for products in tf32.)
struct SplitFloat {
    float value;
};

// kUsual: a value may be any number to 2^127; from infinity and NaN comes NaN, which the caller must notice. kAny: sums are infinite or
// NaN where those of float32 are, for 2 more instructions a value.
enum class SplitRange { kUsual, kAny };

// For `#pragma unroll` of loops whose count is a constant. The code for kAny runs where the inputs have infinity or NaN: it is kept small,
// as loops over arrays in local memory.
template <SplitRange kRange>
inline constexpr int kUnrolled = kRange == SplitRange::kUsual ? 1024 : 1;

// The two parts of values. `cross` is what meets the other operand's low part: the high part, but 0 in place of infinity and NaN, because
// the other low part may be 0.
template <SplitRange kRange, int kCount>
struct SplitParts {
    uint32_t high[kCount], low[kCount];
    uint32_t finite_high[kRange == SplitRange::kAny ? kCount : 1];

    __device__ __forceinline__ void set(int i, float x) {
        constexpr uint32_t kTf32 = 0xFFFFE000u;  // sign, exponent and 10 bits of fraction
        if constexpr (kRange == SplitRange::kUsual) {
            high[i] = (__float_as_uint(x) + 0x1000u) & kTf32;  // to nearest
            low[i] = __float_as_uint(x - __uint_as_float(high[i]));
        } else {
            const bool finite = fabsf(x) < INFINITY;
            // Cut off, a finite number cannot become infinite. But a NaN could, if its low bits alone are set: x + x sets the others.
            high[i] = __float_as_uint(finite ? __uint_as_float(__float_as_uint(x) & kTf32) : x + x);
            const float rest = x - __uint_as_float(high[i]);
            low[i] = !finite ? 0u : fabsf(x) < 0x1p127f ? round_tf32(rest) : __float_as_uint(rest);
            finite_high[i] = finite ? high[i] : 0u;
        }
    }
    __device__ __forceinline__ const uint32_t (&cross() const)[kCount] {
        if constexpr (kRange == SplitRange::kUsual) return high;
        else return finite_high;
    }
};

// volatile: the compiler keeps the order of the products, in which few parts and sums are alive at a time.
__device__ __forceinline__ void mma_in_order(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// C[m][first + n] += A[m] B[n], 16 x 8 by 8 x 8.
template <SplitRange kRange, int kMmas, int kTilesC, int kTiles>
__device__ __forceinline__ void add_split_products(float (&C)[kMmas][kTilesC][4], int first, const SplitParts<kRange, 4> (&A)[kMmas],
                                                   const SplitParts<kRange, 2> (&B)[kTiles]) {
    float sum[kMmas][kTiles][4] = {};
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_in_order(sum[m][n], A[m].low, B[n].cross());
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_in_order(sum[m][n], A[m].cross(), B[n].low);
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n) mma_in_order(sum[m][n], A[m].high, B[n].high);
#pragma unroll
    for (int m = 0; m < kMmas; ++m)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) C[m][first + n][i] += sum[m][n][i];
}

// The parts of a fragment that ldmatrix or mma.sync has left in registers.
template <SplitRange kRange, int kCount>
__device__ __forceinline__ SplitParts<kRange, kCount> split_fragment(const uint32_t* x) {
    SplitParts<kRange, kCount> parts;
#pragma unroll
    for (int i = 0; i < kCount; ++i) parts.set(i, __uint_as_float(x[i]));
    return parts;
}
// fragment_of<float>, in parts.
template <SplitRange kRange>
__device__ __forceinline__ SplitParts<kRange, 4> split_accumulator(const float (&c)[4]) {
    SplitParts<kRange, 4> parts;
    parts.set(0, c[0]), parts.set(1, c[2]), parts.set(2, c[1]), parts.set(3, c[3]);
    return parts;
}

// lse with float32's rounding: log(row_sum e^(row_max unit) + e^sink). sink = -inf: none.
__device__ __forceinline__ float natural_lse(float row_max, float unit, float row_sum, float sink) {
    if (sink != -INFINITY) {
        const float max = row_max * unit, raised = fmaxf(max, sink);
        row_sum = row_sum * expf(max - raised) + expf(sink - raised);
        row_max = raised, unit = 1;
    }
    return row_sum == 0 ? -INFINITY : fmaf(row_max, unit, logf(row_sum));
}

}  // namespace fa
