// float16_parts.cuh: float32 tensors as two float16 numbers each, high + low, scaled by powers of 2: what wgmma_float32_sm90 multiplies
// (docs/float32.md). Tiles lie in the workspace in the order of shared memory.
#pragma once

#include <cfloat>

#include "attention/common/params.h"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kLargestExponent = 15;                 // scaled numbers are below 2^15
constexpr int kPreciseBits = 16;                     // numbers from 2^-16 of the largest on keep 23 bits
constexpr int kNumbersOfSmall = 8;                   // of so many numbers of a row one may be smaller; a single one of four or more
constexpr float kPreciseMean = 0x1p-13f;             // the least mean of a column, of the largest number
constexpr int kValueBits = 10;                       // of V, a row's largest number is at least 2^-10 of the tile's, or the row is zeros
constexpr float kLeast = 0x1p-45f, kMost = 0x1p44f;  // of the largest numbers: quotients of products, and dS, stay finite

// A tensor, and where its parts go: for each tile of a head, the high parts and then the low parts, in the order of shared memory.
struct SplitTensor {
    const float* data;
    int64_t batch, head, row;  // strides
    int heads, rows, columns, tiles;
    __half* parts;
    float* scales;    // of Q one for each row, of K and V one for each tile; negative: some rows of the tile are zeros and others are not
    uint32_t* zeros;  // V of the forward pass: which rows are zeros, kRows bits a tile; else null
};
constexpr int kSplitThreads = 256;
constexpr int split_words(int d) { return kSplitThreads / 32 + d + 4; }  // of shared memory: the warps, the columns, the bits of 128 rows

// 2^-x and 2^x bring `largest` to 2^14 .. 2^15 and back.
struct Scale {
    float down, up;
};
__device__ __forceinline__ Scale scale_of(float largest) {
    const int exponent = largest > 0 ? int(__float_as_uint(largest) >> 23) - 126 - kLargestExponent : 0;
    return {__uint_as_float(uint32_t(127 - exponent) << 23), __uint_as_float(uint32_t(127 + exponent) << 23)};
}

// 1 / a power of 2.
__device__ __forceinline__ float inverse_of(float power) { return __uint_as_float(0x7F000000u - __float_as_uint(power)); }

__device__ __forceinline__ uint32_t bits_of_magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// kRowScales: each row has a scale (Q). kTestsColumns: columns are tested, too (V).
template <int kD, int kRows, bool kRowScales, bool kTestsColumns>
__device__ __forceinline__ void split_tile(const SplitTensor& t, int index, int* out_of_range, uint32_t* shared) {
    constexpr int kLanes = kD < 128 ? kD / 4 : 32, kFours = (kD / 4 + kLanes - 1) / kLanes;  // lanes of a row; a lane's groups of 4 columns
    constexpr int kRowsAtOnce = kSplitThreads / kLanes, kPasses = kRows / kRowsAtOnce;
    const int tile = index % t.tiles, head = index / t.tiles % t.heads, b = index / t.tiles / t.heads;
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
    const float* const from = t.data + b * t.batch + head * t.head;
    float4 x[kPasses][kFours];
    uint32_t most[kPasses], tile_most = 0;  // bits of |x|: as integers, infinity and NaN are the largest
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int row = tile * kRows + first + i * kRowsAtOnce;
        most[i] = 0;
#pragma unroll
        for (int g = 0; g < kFours; ++g) {
            const int column = 4 * (lane + g * kLanes);
            const bool exists = row < t.rows && column < t.columns;
            x[i][g] = exists ? *reinterpret_cast<const float4*>(from + row * t.row + column) : float4{};
            most[i] = max(most[i], max(max(bits_of_magnitude(x[i][g].x), bits_of_magnitude(x[i][g].y)),
                                       max(bits_of_magnitude(x[i][g].z), bits_of_magnitude(x[i][g].w))));
        }
#pragma unroll
        for (int other = kLanes / 2; other > 0; other /= 2) most[i] = max(most[i], __shfl_xor_sync(~0u, most[i], other));
        tile_most = max(tile_most, most[i]);
    }
    if (!kRowScales) {
        // Sums of integers, rounded up: they do not depend on the order, so neither does the choice of a kernel. A scaled column is below
        // 128 x 2^15 units.
        constexpr float kUnits = 512;
        uint32_t* const column_sums = shared + kSplitThreads / 32;
        const int tile_rows = min(kRows, t.rows - tile * kRows);
        tile_most = max(tile_most, __shfl_xor_sync(~0u, tile_most, 16));
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = tile_most;
        uint32_t* const zeros = column_sums + kD;
        if (kTestsColumns && threadIdx.x < kD) column_sums[threadIdx.x] = 0;
        if (kTestsColumns && threadIdx.x < kRows / 32) zeros[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSplitThreads / 32; ++i) tile_most = max(tile_most, shared[i]);
        bool has_zeros = false;
        if (kTestsColumns) {
            static_assert(kRows <= 128 && kRows % 32 == 0, "32 bits hold a column");
            const float largest = __uint_as_float(tile_most), unit = scale_of(largest).down * kUnits;
#pragma unroll
            for (int g = 0; g < kFours; ++g) {
                float own[4] = {};
#pragma unroll
                for (int i = 0; i < kPasses; ++i)
                    own[0] += fabsf(x[i][g].x), own[1] += fabsf(x[i][g].y), own[2] += fabsf(x[i][g].z), own[3] += fabsf(x[i][g].w);
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (4 * (lane + g * kLanes) < kD) atomicAdd(column_sums + 4 * (lane + g * kLanes) + e, __float2uint_ru(own[e] * unit));
            }
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int row = first + i * kRowsAtOnce;
                if (lane == 0 && row < tile_rows && most[i] == 0) atomicOr(zeros + row / 32, 1u << row % 32);
                // A key with a large P and a small row of V would take the bits of the others' P, and not make up for them.
                if (t.zeros && most[i] - 1 < tile_most - (kValueBits << 23) - 1) *out_of_range = 1;
            }
            __syncthreads();
            if (t.zeros && tile_most != 0 && threadIdx.x < kRows / 32) {
                const uint32_t word = zeros[threadIdx.x];
                t.zeros[int64_t(index) * (kRows / 32) + threadIdx.x] = word;
                has_zeros = __any_sync((1u << kRows / 32) - 1, word != 0);
            }
            const float sum = column_sums[threadIdx.x % kD], least = kPreciseMean * largest * unit * tile_rows;
            // A sum of 0: a column of zeros, or no rows. One row is no column: some number of it is often small.
            if (tile_rows > 1 && sum != 0 && !(sum >= least)) *out_of_range = 1;
        }
        if (threadIdx.x == 0) t.scales[index] = copysignf(scale_of(__uint_as_float(tile_most)).up, has_zeros ? -1.0f : 1.0f);
    }
    unsigned char* const high = reinterpret_cast<unsigned char*>(t.parts + int64_t(index) * (2 * kRows * kD));
    bool precise = true;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int row = first + i * kRowsAtOnce;
        const uint32_t largest_bits = kRowScales ? most[i] : tile_most;
        const float largest = __uint_as_float(largest_bits);
        precise &= most[i] == 0 || (largest > kLeast && largest < kMost);
        int counts = 0;  // of the row's numbers: those that lose bits, and in the upper half those that are not 0
#pragma unroll
        for (int g = 0; g < kFours; ++g)
            for (const float e : {x[i][g].x, x[i][g].y, x[i][g].z, x[i][g].w})
                counts += (bits_of_magnitude(e) - 1 < largest_bits - (kPreciseBits << 23) - 1)  // 0 wraps around: it loses none
                          + (e != 0 ? 1 << 16 : 0);
#pragma unroll
        for (int other = kLanes / 2; other > 0; other /= 2) counts += __shfl_xor_sync(~0u, counts, other);
        const int small = counts & 0xFFFF, numbers = counts >> 16;
        precise &= 4 * small <= numbers && kNumbersOfSmall * small < numbers + kNumbersOfSmall;
        const Scale scale = scale_of(largest);
        if (kRowScales && lane == 0) t.scales[int64_t(index) * kRows + row] = scale.up;
#pragma unroll
        for (int g = 0; g < kFours; ++g) {
            const int column = 4 * (lane + g * kLanes);
            if (column >= kD) continue;
            const float y[4] = {x[i][g].x * scale.down, x[i][g].y * scale.down, x[i][g].z * scale.down, x[i][g].w * scale.down};
            uint32_t word[2][2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                word[0][e] = pack_16<__half>(y[2 * e], y[2 * e + 1]);
                const float2 rounded = unpack_16<__half>(word[0][e]);
                word[1][e] = pack_16<__half>(y[2 * e] - rounded.x, y[2 * e + 1] - rounded.y);
            }
            const uint32_t place = swizzled_offset(kRows, row, column / 8) + column % 8 * 2;
#pragma unroll
            for (int part = 0; part < 2; ++part)
                *reinterpret_cast<uint2*>(high + part * (kRows * kD * 2) + place) = make_uint2(word[part][0], word[part][1]);
        }
    }
    if (!precise) *out_of_range = 1;
}

}  // namespace
}  // namespace fa
