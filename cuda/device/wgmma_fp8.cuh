// wgmma_fp8.cuh: Hopper's matrix products of 8-bit floats (e4m3), and the packing of their operands.
//
// Both operands of an 8-bit product must have their rows along k: there is no transpose bit. In shared memory a row of bytes is a row of
// half as many 16-bit pairs, so tiles, swizzle and descriptors are those of wgmma.cuh, with 128 elements in a chunk; a k32 step of bytes is
// a k16 step of pairs. The A fragment (k32), lane = 4 g + q, four bytes in every register:
//     a0: row g, k 4q .. 4q + 3     a1: row g + 8, same k     a2: row g, k 4q + 16 .. 4q + 19     a3: row g + 8, same k
// Accumulators instead give a lane columns 8 c + 2 q and 8 c + 2 q + 1. A product may sum over k in any order on which A and B agree. So
// the lane packs the columns that it has, and byte k of each sixteen stands for column fp8_key(k).
#pragma once

#include "device/mma.cuh"
#include "device/wgmma.cuh"

namespace fa {

// The order of keys within each sixteen, in P (from pack_p) and in V^T (from the transposer): 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15.
__host__ __device__ constexpr int fp8_key(int k) { return k / 4 * 2 + k % 2 + k / 2 % 2 * 8; }
// V^T keeps the even head dims of each sixteen before the odd ones, so that the transposer has no bank conflicts.
__host__ __device__ constexpr int fp8_head_dim(int row) { return row / 16 * 16 + row % 8 * 2 + row / 8 % 2; }

// cvt.rn.satfinite.e4m3x2.f32, twice: four floats to four bytes, x0 lowest. Saturates at +-448; NaN stays NaN.
__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
    uint32_t d;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}\n"
        : "=r"(d)
        : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return d;
}

// Packs scores or probabilities in accumulator layout into the A fragment of step i (keys 32 i .. 32 i + 31).
template <int kCount>
__device__ __forceinline__ void pack_p(const float (&s)[kCount], int i, uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const float* x = s + 16 * i + r / 2 * 8 + r % 2 * 2;
        a[r] = pack_e4m3(x[0], x[1], x[4], x[5]);
    }
}

// prmt.b32: byte n of the result is the byte that nibble n of the selector names: 0 .. 3 of a, 4 .. 7 of b.
template <uint32_t kSelector>
__device__ __forceinline__ uint32_t permute_bytes(uint32_t a, uint32_t b) {
    return __byte_perm(a, b, kSelector);
}

// stmatrix.x4: the reverse of ldmatrix_x4.
__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t d0, uint32_t d1, uint32_t d2, uint32_t d3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(shared), "r"(d0), "r"(d1), "r"(d2), "r"(d3)
                 : "memory");
}

#define FA_TEXT_36 FA_TEXT_32 ",%32,%33,%34,%35"
#define FA_BIND_36 FA_BIND_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define FA_TEXT_68 FA_TEXT_64 ",%64,%65,%66,%67"
#define FA_BIND_68 FA_BIND_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])

// Operand numbers after the R accumulators. SS: descriptors A and B, accumulate flag. RS: four A registers, descriptor B, flag.
#undef FA_WGMMA_SS
#undef FA_WGMMA_RS
#define FA_WGMMA_SS(N, R, A, B, FLAG)                                                                                              \
    if constexpr (kN == N)                                                                                                         \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #FLAG                                                                    \
                     ", 0;\n"                                                                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FA_TEXT_##R "}, %" #A ", %" #B ", p, 1, 1;\n}\n" \
                     : FA_BIND_##R                                                                                                 \
                     : "l"(a), "l"(b), "r"(accumulate));
#define FA_WGMMA_RS(N, R, A0, A1, A2, A3, B, FLAG)                                                                                      \
    if constexpr (kN == N)                                                                                                              \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #FLAG                                                                         \
                     ", 0;\n"                                                                                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" FA_TEXT_##R "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 \
                                                                                              "}, %" #B ", p, 1, 1;\n}\n"               \
                     : FA_BIND_##R                                                                                                      \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));

// d (64 x N, kN / 2 registers) = A (64 x 32) B (32 x N), plus d when accumulate; A and B in shared memory.
template <int kN>
__device__ __forceinline__ void wgmma_fp8_ss(float* d, uint64_t a, uint64_t b, int accumulate) {
    static_assert(kN == 96 || kN == 128, "add this N");
    FA_WGMMA_SS(96, 48, 48, 49, 50)
    FA_WGMMA_SS(128, 64, 64, 65, 66)
}

// The same with A in registers.
template <int kN>
__device__ __forceinline__ void wgmma_fp8_rs(float* d, const uint32_t* a, uint64_t b, int accumulate) {
    static_assert(kN == 64 || kN == 72 || kN == 128 || kN == 136, "add this N");
    FA_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37)
    FA_WGMMA_RS(72, 36, 36, 37, 38, 39, 40, 41)
    FA_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69)
    FA_WGMMA_RS(136, 68, 68, 69, 70, 71, 72, 73)
}

#undef FA_WGMMA_SS
#undef FA_WGMMA_RS

}  // namespace fa
