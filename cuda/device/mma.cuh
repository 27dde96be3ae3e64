// mma.cuh: the instructions of the tensor-core path that every GPU from sm_80 on has. One instruction, one function.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"); lane = 4 g + q, every register holds two 16-bit values:
//     A (16 x 16)  a0: row g,     k 2q, 2q + 1     a1: row g + 8, same k     a2: row g, k 2q + 8, 2q + 9     a3: row g + 8, same k
//     B (16 x 8)   b0: k 2q, 2q + 1, column g      b1: k 2q + 8, 2q + 9, column g
//     C (16 x 8)   c0, c1: row g, columns 2q, 2q + 1                         c2, c3: row g + 8, same columns
// Two neighbouring C tiles, packed to 16 bits, are therefore an A fragment: a = {c0c1, c2c3, c0'c1', c2'c3'}.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fa {

// Which element of a 16 x 8 accumulator tile register i of a lane is.
__host__ __device__ constexpr int mma_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
__host__ __device__ constexpr int mma_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// cp.async, sm_80: 16 bytes from global to shared memory without passing through registers; the bytes past `valid` (0 or 16) are zeros.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}
// cp.async.wait_all: every copy this thread has started has landed. Other threads see it after the next barrier.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// st.shared.v4
__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit values; lanes 8m .. 8m + 7 give the addresses of the rows of matrix m (16 bytes each).
// Register m of a lane holds row g, columns 2q and 2q + 1 of matrix m; with .trans rows 2q and 2q + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared)
                 : "memory");
}

// mma.m16n8k16: C += A B, products of 16-bit values summed in fp32. T names the type inside the registers.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rn.{f16x2,bf16x2}.f32: two floats to one register, `low` in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_16(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack_16<__half>(float low, float high) {
    uint32_t d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
template <>
__device__ __forceinline__ uint32_t pack_16<__nv_bfloat16>(float low, float high) {
    uint32_t d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// ex2.approx.ftz: 2^x to 2 ulp; 2^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace fa
