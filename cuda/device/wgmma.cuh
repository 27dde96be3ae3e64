// wgmma.cuh: Hopper's warpgroup matrix product, m64nNk16, with 16-bit operands and float accumulators, and the layouts of its operands.
//
// Shared tiles are stored as TMA writes them with the 128-byte swizzle: the columns in chunks of 64 (128 bytes), chunk c of a
// tile of `rows` rows at c * rows * 128 bytes, row r of a chunk at r * 128, and 16-byte piece j of a row at piece j ^ (r & 7).
// Tile addresses are multiples of 1024 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace fa {

constexpr int kChunkColumns = 64;         // 16-bit elements in 128 bytes
constexpr uint32_t kChunkRowBytes = 128;  // one row of a chunk
constexpr uint32_t kSwizzleRows = 8;      // the swizzle pattern repeats after 8 rows, 1024 bytes

// Byte offset of 16-byte piece `piece` (eight columns) of row `row` in a tile of `rows` rows.
__host__ __device__ constexpr uint32_t swizzled_offset(uint32_t rows, uint32_t row, uint32_t piece) {
    return piece / 8 * rows * kChunkRowBytes + row * kChunkRowBytes + ((piece % 8 ^ row % 8) << 4);
}

// Row and column, in the 64 x N product, of accumulator element i of thread t of the warpgroup.
__host__ __device__ constexpr int accumulator_row(int t, int i) { return t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8; }
__host__ __device__ constexpr int accumulator_column(int t, int i) { return i / 4 * 8 + t % 4 * 2 + i % 2; }

// The low half of a descriptor holds the tile's address; the high half is the same for every tile here. A loop that keeps only the low half
// needs one register.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t tile, uint32_t chunk_stride) {
    return (tile & 0x3FFFF) >> 4 | chunk_stride >> 4 << 16;
}
__device__ __forceinline__ uint64_t descriptor_from(uint32_t low) {
    constexpr uint32_t kSwizzle128 = 1u << 30, kGroupStride = kSwizzleRows * kChunkRowBytes >> 4;
    return uint64_t(kSwizzle128 | kGroupStride) << 32 | low;
}
// The descriptor moved on by a step from below. 32-bit arithmetic is enough: the address field covers all shared memory, so nothing
// carries.
__device__ __forceinline__ uint64_t descriptor_from(uint32_t low, uint64_t step) { return descriptor_from(low + uint32_t(step)); }
// Shared-memory matrix descriptor for the tiles above. Eight-row groups lie 1024 bytes apart; chunk_stride, the bytes between
// 64-column chunks, is read only for operands whose rows run along k (V in P V).
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t tile, uint32_t chunk_stride) {
    return descriptor_from(descriptor_low(tile, chunk_stride));
}
// A tile of one k16 step: rows of 16 columns (32 bytes) in the 32-byte swizzle, which repeats after 8 rows. Its address is a multiple of
// 256.
__host__ __device__ constexpr uint32_t narrow_swizzled_offset(uint32_t row, uint32_t piece) {
    return row * 32 + ((piece ^ row / 4 % 2) << 4);
}
__device__ __forceinline__ uint64_t narrow_descriptor(uint32_t tile) {
    constexpr uint32_t kSwizzle32 = 3u << 30, kGroupStride = kSwizzleRows * 32 >> 4;
    return uint64_t(kSwizzle32 | kGroupStride) << 32 | descriptor_low(tile, 16);
}
// What to add to a descriptor to move it by `bytes`. Shared memory ends below 256 KiB, so the field never overflows.
__device__ __forceinline__ constexpr uint64_t descriptor_step(uint32_t bytes) { return bytes >> 4; }
// Step k16 (16 columns) of a tile read along its columns: 32 bytes inside a chunk, then the next chunk.
__device__ __forceinline__ constexpr uint64_t descriptor_k_step(int k16, uint32_t rows) {
    return descriptor_step(k16 / 4 * rows * kChunkRowBytes + k16 % 4 * 32);
}
// Step k16 (16 rows) of a tile read along its rows.
__device__ __forceinline__ constexpr uint64_t descriptor_row_step(int k16) { return descriptor_step(k16 * 16 * kChunkRowBytes); }

// Makes registers written by ordinary code safe to use in the wgmmas that follow. Needed once before each product.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from reading or moving x across this point. Emits no instruction.
__device__ __forceinline__ void hold(float& x) { asm volatile("" : "+f"(x)::"memory"); }
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) hold(d[i]);
}
// Makes the compiler read memory again instead of keeping its values in registers.
__host__ __device__ __forceinline__ void forget_registers() { asm volatile("" ::: "memory"); }

// Waits until at most kPending of the newest groups of products are still running. Naming the accumulators keeps the compiler from reading
// them earlier: the instruction itself does not mention them.
template <int kPending, int... kCounts>
__device__ __forceinline__ void wgmma_wait(float (&... d)[kCounts]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (hold(d), ...);
}

// The two 16-bit values of a register as floats, the low one first.
template <typename T>
__device__ __forceinline__ float2 unpack_16(uint32_t x) {
    if constexpr (std::is_same_v<T, __half>) return __half22float2(reinterpret_cast<const __half2&>(x));
    else return {__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u)};
}

// ---- the instruction, for every N in use: FA_TEXT_n names accumulators %0 .. %n-1, FA_BIND_n binds them ----

#define FA_TEXT_8(a, b, c, d, e, f, g, h) "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h
#define FA_TEXT_16 FA_TEXT_8(0, 1, 2, 3, 4, 5, 6, 7) "," FA_TEXT_8(8, 9, 10, 11, 12, 13, 14, 15)
#define FA_TEXT_32                    \
    FA_TEXT_8(0, 1, 2, 3, 4, 5, 6, 7) \
    "," FA_TEXT_8(8, 9, 10, 11, 12, 13, 14, 15) "," FA_TEXT_8(16, 17, 18, 19, 20, 21, 22, 23) "," FA_TEXT_8(24, 25, 26, 27, 28, 29, 30, 31)
#define FA_TEXT_40 FA_TEXT_32 "," FA_TEXT_8(32, 33, 34, 35, 36, 37, 38, 39)
#define FA_TEXT_48 FA_TEXT_40 "," FA_TEXT_8(40, 41, 42, 43, 44, 45, 46, 47)
#define FA_TEXT_56 FA_TEXT_48 "," FA_TEXT_8(48, 49, 50, 51, 52, 53, 54, 55)
#define FA_TEXT_64 FA_TEXT_56 "," FA_TEXT_8(56, 57, 58, 59, 60, 61, 62, 63)
#define FA_TEXT_96                                                                                                        \
    FA_TEXT_64 "," FA_TEXT_8(64, 65, 66, 67, 68, 69, 70, 71) "," FA_TEXT_8(72, 73, 74, 75, 76, 77, 78, 79) "," FA_TEXT_8( \
        80, 81, 82, 83, 84, 85, 86, 87) "," FA_TEXT_8(88, 89, 90, 91, 92, 93, 94, 95)
#define FA_TEXT_128                                                                                                                   \
    FA_TEXT_96 "," FA_TEXT_8(96, 97, 98, 99, 100, 101, 102, 103) "," FA_TEXT_8(104, 105, 106, 107, 108, 109, 110, 111) "," FA_TEXT_8( \
        112, 113, 114, 115, 116, 117, 118, 119) "," FA_TEXT_8(120, 121, 122, 123, 124, 125, 126, 127)

#define FA_BIND_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define FA_BIND_16 FA_BIND_8(0), FA_BIND_8(8)
#define FA_BIND_32 FA_BIND_8(0), FA_BIND_8(8), FA_BIND_8(16), FA_BIND_8(24)
#define FA_BIND_40 FA_BIND_32, FA_BIND_8(32)
#define FA_BIND_48 FA_BIND_40, FA_BIND_8(40)
#define FA_BIND_56 FA_BIND_48, FA_BIND_8(48)
#define FA_BIND_64 FA_BIND_56, FA_BIND_8(56)
#define FA_BIND_96 FA_BIND_64, FA_BIND_8(64), FA_BIND_8(72), FA_BIND_8(80), FA_BIND_8(88)
#define FA_BIND_128 FA_BIND_96, FA_BIND_8(96), FA_BIND_8(104), FA_BIND_8(112), FA_BIND_8(120)

#define FA_WRITE_8(i) \
    "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3]), "=f"(d[i + 4]), "=f"(d[i + 5]), "=f"(d[i + 6]), "=f"(d[i + 7])
#define FA_WRITE_32 FA_WRITE_8(0), FA_WRITE_8(8), FA_WRITE_8(16), FA_WRITE_8(24)
#define FA_WRITE_64 FA_WRITE_32, FA_WRITE_8(32), FA_WRITE_8(40), FA_WRITE_8(48), FA_WRITE_8(56)

// Operand numbers after the R accumulators. SS: descriptors A and B, accumulate flag, transposes of A and B. SS_FIRST: descriptors A and B,
// their transposes. RS: four A registers, descriptor B, flag, transpose of B.
#define FA_WGMMA_SS(N, R, TYPE, A, B, FLAG, TA, TB)                                                   \
    if constexpr (kN == N)                                                                            \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #FLAG                                       \
                     ", 0;\n"                                                                         \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_TEXT_##R \
                     "}, %" #A ", %" #B ", p, 1, 1, %" #TA ", %" #TB ";\n}\n"                         \
                     : FA_BIND_##R                                                                    \
                     : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));
#define FA_WGMMA_SS_FIRST(N, R, TYPE, A, B, TA, TB)                                                                                \
    if constexpr (kN == N)                                                                                                         \
        asm volatile(                                                                                                              \
            "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                                                             \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_TEXT_##R "}, %" #A ", %" #B ", p, 1, 1, %" #TA \
                                                                                             ", %" #TB ";\n}\n"                    \
            : FA_WRITE_##R                                                                                                         \
            : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
#define FA_WGMMA_RS(N, R, TYPE, A0, A1, A2, A3, B, FLAG, TRANSPOSE)                                         \
    if constexpr (kN == N)                                                                                  \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #FLAG                                             \
                     ", 0;\n"                                                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FA_TEXT_##R       \
                     "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1, %" #TRANSPOSE ";\n}\n" \
                     : FA_BIND_##R                                                                          \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposeB));

#define FA_WGMMA_SS_ALL(TYPE)                       \
    FA_WGMMA_SS(32, 16, TYPE, 16, 17, 18, 19, 20)   \
    FA_WGMMA_SS(64, 32, TYPE, 32, 33, 34, 35, 36)   \
    FA_WGMMA_SS(80, 40, TYPE, 40, 41, 42, 43, 44)   \
    FA_WGMMA_SS(96, 48, TYPE, 48, 49, 50, 51, 52)   \
    FA_WGMMA_SS(112, 56, TYPE, 56, 57, 58, 59, 60)  \
    FA_WGMMA_SS(128, 64, TYPE, 64, 65, 66, 67, 68)  \
    FA_WGMMA_SS(192, 96, TYPE, 96, 97, 98, 99, 100) \
    FA_WGMMA_SS(256, 128, TYPE, 128, 129, 130, 131, 132)
#define FA_WGMMA_SS_FIRST_ALL(TYPE)                 \
    FA_WGMMA_SS_FIRST(64, 32, TYPE, 32, 33, 34, 35) \
    FA_WGMMA_SS_FIRST(128, 64, TYPE, 64, 65, 66, 67)
#define FA_WGMMA_RS_ALL(TYPE)                                 \
    FA_WGMMA_RS(32, 16, TYPE, 16, 17, 18, 19, 20, 21, 22)     \
    FA_WGMMA_RS(64, 32, TYPE, 32, 33, 34, 35, 36, 37, 38)     \
    FA_WGMMA_RS(96, 48, TYPE, 48, 49, 50, 51, 52, 53, 54)     \
    FA_WGMMA_RS(128, 64, TYPE, 64, 65, 66, 67, 68, 69, 70)    \
    FA_WGMMA_RS(192, 96, TYPE, 96, 97, 98, 99, 100, 101, 102) \
    FA_WGMMA_RS(256, 128, TYPE, 128, 129, 130, 131, 132, 133, 134)

// d (64 x N) = A (64 x 16) B (16 x N), plus d when accumulate; A and B in shared memory. kTranspose 0: the operand's stored rows run along
// k (Q and K in Q K^T); 1: along m or n (V in P V, dS^T in dS K).
template <typename T, int kN, int kTransposeA = 0, int kTransposeB = 0>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int accumulate) {
    static_assert(kN == 32 || kN == 64 || kN == 80 || kN == 96 || kN == 112 || kN == 128 || kN == 192 || kN == 256,
                  "add this N to FA_WGMMA_SS_ALL");
    if constexpr (std::is_same_v<T, __half>) {
        FA_WGMMA_SS_ALL("f16")
    } else {
        FA_WGMMA_SS_ALL("bf16")
    }
}

// The first step of a product: d = A B. The compiler sees d as written only, so its previous value needs no registers.
template <typename T, int kN, int kTransposeA = 0, int kTransposeB = 0>
__device__ __forceinline__ void wgmma_ss_first(float (&d)[kN / 2], uint64_t a, uint64_t b) {
    static_assert(kN == 64 || kN == 128, "add this N to FA_WGMMA_SS_FIRST_ALL");
    if constexpr (std::is_same_v<T, __half>) {
        FA_WGMMA_SS_FIRST_ALL("f16")
    } else {
        FA_WGMMA_SS_FIRST_ALL("bf16")
    }
}

// The same with A in registers: element pairs of rows g and g + 8, columns 2q and 2q + 8 of the lane's (g, q). Packing neighbouring
// accumulators gives this order. kTransposeB 1: B's rows run along n (V in P V); 0: along k (K).
template <typename T, int kN, int kTransposeB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], const uint32_t* a, uint64_t b, int accumulate) {
    static_assert(kN == 32 || kN == 64 || kN == 96 || kN == 128 || kN == 192 || kN == 256, "add this N to FA_WGMMA_RS_ALL");
    if constexpr (std::is_same_v<T, __half>) {
        FA_WGMMA_RS_ALL("f16")
    } else {
        FA_WGMMA_RS_ALL("bf16")
    }
}

}  // namespace fa
