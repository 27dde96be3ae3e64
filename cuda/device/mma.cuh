// mma.cuh: the instructions for the tensor-core path that every GPU from sm_80 on has. One function per instruction.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix fragments for mma.m16n8k16"); lane = 4 g + q, every register holds two 16-bit values:
//     A (16 x 16)  a0: row g,     k 2q, 2q + 1     a1: row g + 8, same k     a2: row g, k 2q + 8, 2q + 9     a3: row g + 8, same k
//     B (16 x 8)   b0: k 2q, 2q + 1, column g      b1: k 2q + 8, 2q + 9, column g
//     C (16 x 8)   c0, c1: row g, columns 2q, 2q + 1                         c2, c3: row g + 8, same columns
// Two neighbouring C tiles, packed to 16 bits, are therefore an A fragment: a = {c0c1, c2c3, c0'c1', c2'c3'}.
//
// mma.m16n8k8 on tf32. Each register holds one value; C is as above:
//     A (16 x 8)   a0: row g, k q    a1: row g + 8, k q    a2: row g, k q + 4    a3: row g + 8, k q + 4
//     B (8 x 8)    b0: k q, column g    b1: k q + 4, column g
// A C tile is an A fragment, a = {c0, c2, c1, c3}, if its column 2q is taken as k = q and its column 2q + 1 as k = q + 4.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fa {

// Row and column, in a 16 x 8 accumulator tile, of register i of a lane.
__host__ __device__ constexpr int mma_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
__host__ __device__ constexpr int mma_column(int lane, int i) { return 2 * (lane % 4) + i % 2; }

// Maximum and sum over the four lanes that share the rows of an accumulator tile.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) { return uint32_t(__cvta_generic_to_shared(pointer)); }

// cp.async, sm_80: 16 bytes from global to shared memory without passing through registers; the bytes past `valid` (0 or 16) are zeros.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* global, int valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}
// The same for 4 bytes.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* global, int valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}
// cp.async.wait_all: every copy this thread has started has landed. Other threads see it after the next barrier.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// cp.async.commit_group: the copies started since the last commit form a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// cp.async.wait_group: all of this thread's groups except the newest kPending have landed.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ld.shared.v4
__device__ __forceinline__ float4 load_shared_16(uint32_t shared) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(shared) : "memory");
    return x;
}

// ld.shared.v2
__device__ __forceinline__ float2 load_shared_8(uint32_t shared) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(x.x), "=f"(x.y) : "r"(shared) : "memory");
    return x;
}

// st.shared.v4
__device__ __forceinline__ void store_shared_16(uint32_t shared, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// st.global.v4. The compiler splits some assignments of a uint4 whose parts it has computed one by one into four stores.
__device__ __forceinline__ void store_global_16(void* global, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"l"(global), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// ld.shared.b32, st.shared.b32: two 16-bit values.
__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(x) : "r"(shared) : "memory");
    return x;
}
__device__ __forceinline__ void store_shared_4(uint32_t shared, uint32_t x) {
    asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(shared), "r"(x) : "memory");
}

// Adds four values of every lane of a warp to 128 floats in global memory, in the order that the GPU's atomics handle fastest. From sm_90
// on, red.global.add.v4.f32 takes a lane's four values together; before, each red.global.add.f32 takes one value of every lane.
// load_fragment reads the same order.
__device__ __forceinline__ void red_add_fragment(float* to, const float (&x)[4], int lane) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"l"(to + 4 * lane), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;\n" ::"l"(to + 32 * e + lane), "f"(x[e]) : "memory");
#endif
}
__device__ __forceinline__ void load_fragment(float (&x)[4], const float* from, int lane) {
#if __CUDA_ARCH__ >= 900
    const float4 four = reinterpret_cast<const float4*>(from)[lane];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = from[32 * e + lane];
#endif
}

// ldmatrix.x4: four 8 x 8 matrices of 16-bit values; lanes 8m .. 8m + 7 give the addresses of the rows of matrix m (16 bytes each).
// Register m of a lane holds row g, columns 2q and 2q + 1 of matrix m; with .trans rows 2q and 2q + 1 of column g.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared)
                 : "memory");
}
// The transposed matrices, as the A fragment of an operand that lies transposed in shared memory.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(shared)
                 : "memory");
}
// The transposed matrices as two B fragments: d[t][i] is register i of tile t.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&d)[2][2], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(d[0][0]), "=r"(d[0][1]), "=r"(d[1][0]), "=r"(d[1][1])
                 : "r"(shared)
                 : "memory");
}
// Four columns of two rows as four tf32 B fragments: d[t] = {column t of `row`, column t of `other_row`}.
__device__ __forceinline__ void load_two_rows(uint32_t (&d)[4][2], uint32_t row, uint32_t other_row) {
    const float4 x = load_shared_16(row), y = load_shared_16(other_row);
    d[0][0] = __float_as_uint(x.x), d[1][0] = __float_as_uint(x.y), d[2][0] = __float_as_uint(x.z), d[3][0] = __float_as_uint(x.w);
    d[0][1] = __float_as_uint(y.x), d[1][1] = __float_as_uint(y.y), d[2][1] = __float_as_uint(y.z), d[3][1] = __float_as_uint(y.w);
}

// mma.m16n8k16 (16-bit T) and mma.m16n8k8 (float: tf32): C += A B, summed in fp32. T names the type inside the registers.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void mma<__half>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ __forceinline__ void mma<float>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// cvt.rna.tf32.f32: to the nearest tf32, ties away from zero. Without it, the tensor cores would truncate.
__device__ __forceinline__ uint32_t round_tf32(float x) {
    uint32_t d;
    asm("cvt.rna.tf32.f32 %0, %1;\n" : "=r"(d) : "f"(x));
    return d;
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

// The inverse of pack_16.
template <typename T>
__device__ __forceinline__ void unpack_16(float (&x)[2], uint32_t packed);
template <>
__device__ __forceinline__ void unpack_16<__half>(float (&x)[2], uint32_t packed) {
    x[0] = __half2float(__ushort_as_half(uint16_t(packed))), x[1] = __half2float(__ushort_as_half(uint16_t(packed >> 16)));
}
template <>
__device__ __forceinline__ void unpack_16<__nv_bfloat16>(float (&x)[2], uint32_t packed) {
    x[0] = __uint_as_float(packed << 16), x[1] = __uint_as_float(packed & 0xFFFF0000u);
}

// The A fragment of an mma<T> from accumulators of the same rows: 16 columns of them or, for float, 8 columns in the order given above.
template <typename T>
__device__ __forceinline__ void fragment_of(uint32_t (&a)[4], const float (*c)[4]) {
    a[0] = pack_16<T>(c[0][0], c[0][1]), a[1] = pack_16<T>(c[0][2], c[0][3]);
    a[2] = pack_16<T>(c[1][0], c[1][1]), a[3] = pack_16<T>(c[1][2], c[1][3]);
}
template <>
__device__ __forceinline__ void fragment_of<float>(uint32_t (&a)[4], const float (*c)[4]) {
    a[0] = round_tf32(c[0][0]), a[1] = round_tf32(c[0][2]), a[2] = round_tf32(c[0][1]), a[3] = round_tf32(c[0][3]);
}

// A thread's elements of neighbouring tiles of the same rows, as one array: element i is row mma_row(lane, i % 4), column 8 (i / 4) +
// mma_column(lane, i % 4).
template <int kTilesN>
__device__ __forceinline__ float (&flat(float (&c)[kTilesN][4]))[kTilesN * 4] {
    return reinterpret_cast<float(&)[kTilesN * 4]>(c);
}

// ex2.approx.ftz: 2^x to 2 ulp; 2^-inf = 0, NaN stays NaN.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace fa
