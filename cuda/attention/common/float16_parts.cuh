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
constexpr float kPreciseMean = 0x1p-13f;             // the least mean of a row, of the largest number
constexpr float kLeast = 0x1p-45f, kMost = 0x1p60f;  // of the largest numbers: the product of two scales has an inverse

// A tensor, and where its parts go: for each tile of a head, the high parts and then the low parts, in the order of shared memory.
struct SplitTensor {
    const float* data;
    int64_t batch, head, row;  // strides
    int heads, rows, columns, tiles;
    __half* parts;
    float* scales;  // of Q one for each row, of K and V one for each tile
};
constexpr int kSplitThreads = 256;

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

// kRowScales: each row has a scale (Q). kColumns: columns are tested, too (V).
template <int kD, int kRows, bool kRowScales, bool kTestsColumns>
__device__ __forceinline__ void split_tile(const SplitTensor& t, int index, int* out_of_range, float* shared) {
    constexpr int kLanes = kD < 128 ? kD / 4 : 32, kFours = (kD / 4 + kLanes - 1) / kLanes;  // lanes of a row; a lane's groups of 4 columns
    constexpr int kRowsAtOnce = kSplitThreads / kLanes, kPasses = kRows / kRowsAtOnce;
    const int tile = index % t.tiles, head = index / t.tiles % t.heads, b = index / t.tiles / t.heads;
    const int lane = threadIdx.x % kLanes, first = threadIdx.x / kLanes;
    const float* const from = t.data + b * t.batch + head * t.head;
    float4 x[kPasses][kFours];
    float most[kPasses], sum[kPasses], tile_most = 0;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int row = tile * kRows + first + i * kRowsAtOnce;
        most[i] = sum[i] = 0;
#pragma unroll
        for (int g = 0; g < kFours; ++g) {
            const int column = 4 * (lane + g * kLanes);
            const bool exists = row < t.rows && column < t.columns;
            x[i][g] = exists ? *reinterpret_cast<const float4*>(from + row * t.row + column) : float4{};
            const float a = fabsf(x[i][g].x), b2 = fabsf(x[i][g].y), c = fabsf(x[i][g].z), d = fabsf(x[i][g].w);
            most[i] = fmaxf(most[i], fmaxf(fmaxf(a, b2), fmaxf(c, d))), sum[i] += (a + b2) + (c + d);
        }
#pragma unroll
        for (int other = kLanes / 2; other > 0; other /= 2) {
            most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], other));
            sum[i] += __shfl_xor_sync(~0u, sum[i], other);
        }
        tile_most = fmaxf(tile_most, most[i]);
    }
    if (!kRowScales) {
        // Sums of integers, rounded up: they do not depend on the order, so neither does the choice of a kernel. A scaled column is below
        // 128 x 2^15 units.
        constexpr float kUnits = 512;
        uint32_t* const column_sums = reinterpret_cast<uint32_t*>(shared) + kSplitThreads / 32;
        tile_most = fmaxf(tile_most, __shfl_xor_sync(~0u, tile_most, 16));
        if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = tile_most;
        if (kTestsColumns && threadIdx.x < kD) column_sums[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kSplitThreads / 32; ++i) tile_most = fmaxf(tile_most, shared[i]);
        if (kTestsColumns) {
            static_assert(kRows <= 128, "32 bits hold a column");
            const float unit = scale_of(tile_most).down * kUnits;
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
            __syncthreads();
            const float sum = column_sums[threadIdx.x % kD], least = kPreciseMean * tile_most * unit * min(kRows, t.rows - tile * kRows);
            if (sum != 0 && !(sum >= least)) *out_of_range = 1;  // 0: a column of zeros, or no rows
        }
        if (threadIdx.x == 0) t.scales[index] = scale_of(tile_most).up;
    }
    unsigned char* const high = reinterpret_cast<unsigned char*>(t.parts + int64_t(index) * (2 * kRows * kD));
    bool precise = true;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
        const int row = first + i * kRowsAtOnce;
        const float largest = kRowScales ? most[i] : tile_most;
        const bool fits = largest > kLeast && largest < kMost && sum[i] >= kPreciseMean * largest * float(t.columns) && sum[i] < INFINITY;
        precise &= sum[i] == 0 || fits;
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
