// simple_tiles.cuh: 64 x 64 tiles of fp32 in shared memory and their products in registers, for kernels on CUDA cores whose blocks own rows
// of one operand and walk over those of another.
#pragma once

#include "attention/common/large_rows.cuh"
#include "attention/common/mask.h"
#include "common/element.cuh"

namespace fa {

constexpr int kTile = 64;      // rows, and head-dim columns per chunk
constexpr int kThreads = 256;  // 16 x 16: thread (tx, ty) has rows 4 ty .. + 3 and columns 4 tx .. + 3 of a 64 x 64 tile

// Rows of 16 groups of four floats. A group's place depends on its row, so that 8 threads hit 32 different banks when they read the same
// group of 8 rows that are 4 apart, and also when they read 8 groups of one row.
template <int kRows>
struct Tile {
    float4 place[kRows][kTile / 4];
    __device__ float4& at(int row, int group) { return place[row][group ^ (row / 4 % 8)]; }
    __device__ float& element(int row, int column) { return reinterpret_cast<float*>(&at(row, column / 4))[column % 4]; }
};

// A query of a tile. A query that sees no key, or does not exist, has an empty range.
struct Query {
    int begin, end;   // keys that causal and window leave visible
    float max, rest;  // RowBase: large_rows.cuh
    float delta;
};
// The arrays in the workspace with an entry for each row of a call, laid out like lse: delta and RowBase.
struct RowsOfCall {
    float* delta;
    float2* bases;
};
FA_HOST_DEVICE RowsOfCall rows_of_call(const AttentionParams& p) {
    float2* const bases = static_cast<float2*>(p.workspace);
    return {reinterpret_cast<float*>(bases + row_count(p)), bases};
}
inline size_t rows_of_call_bytes(const AttentionParams& p) { return row_count(p) * 3 * sizeof(float) + alignof(float2); }

// Fills query[0 .. count) with queries i0 .. i0 + count - 1.
__device__ __forceinline__ void load_queries(Query* query, int count, const AttentionParams& p, const RowsOfCall& rows, const Sequence& s,
                                             int head, int i0) {
    if (threadIdx.x >= count) return;
    query[threadIdx.x] = {0, 0, 0, 0, 0};
    const int i = i0 + threadIdx.x;
    if (i >= s.seqlen_q) return;
    const KeyRange range = key_range(p, s, i);
    const int64_t row = lse_offset(p, s, head) + i;
    if (p.lse[row] == -INFINITY) return;
    const float2 base = rows.bases[row];
    query[threadIdx.x] = {range.begin, range.end, base.x, base.y, rows.delta[row]};
}

// The rows of one head.
template <typename T>
struct Rows {
    const T* data;
    int64_t stride;
    int columns;
    __device__ Rows(const TensorView& t, int64_t offset, int head, int columns)
        : data(static_cast<const T*>(t.data) + offset + head * t.head), stride(t.row), columns(columns) {}
    __device__ int chunks() const { return (columns + kTile - 1) / kTile; }
};

// tile[r] = row row0 + r of the source as float, the columns of one chunk; zeros where keep(r) is false and past the head dim.
template <int kRows, typename T, typename Keep>
__device__ __forceinline__ void load_tile(Tile<kRows>& tile, const Rows<T>& source, int row0, int chunk, const Keep& keep) {
    struct alignas(4 * sizeof(T)) Four {
        T x[4];
    };
    const int column0 = chunk * kTile;
    const T* data = source.data + row0 * source.stride + column0;
    const bool wide = column0 + kTile <= source.columns && reinterpret_cast<uintptr_t>(data) % sizeof(Four) == 0 && source.stride % 4 == 0;
    const int c = threadIdx.x % 16 * 4, left = source.columns - column0 - c;
    constexpr int kStep = kThreads / 16;  // rows at a time
    int r = threadIdx.x / 16;
    const T* from = data + r * source.stride + c;
    if (wide) {
#pragma unroll
        for (int e = 0; e < kRows; e += kStep, from += kStep * source.stride) {
            float4 x = make_float4(0, 0, 0, 0);
            if (keep(r + e)) {
                const Four four = *reinterpret_cast<const Four*>(from);
                x = make_float4(to_float(four.x[0]), to_float(four.x[1]), to_float(four.x[2]), to_float(four.x[3]));
            }
            tile.at(r + e, c / 4) = x;
        }
    } else {
#pragma unroll 1
        for (; r < kRows; r += kStep, from += kStep * source.stride) {
            float4 x = make_float4(0, 0, 0, 0);
            if (keep(r)) {
                if (left > 0) x.x = to_float(from[0]);
                if (left > 1) x.y = to_float(from[1]);
                if (left > 2) x.z = to_float(from[2]);
                if (left > 3) x.w = to_float(from[3]);
            }
            tile.at(r, c / 4) = x;
        }
    }
}

__device__ __forceinline__ void fma4(float& sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum);
    sum = fmaf(a.y, b.y, sum);
    sum = fmaf(a.z, b.z, sum);
    sum = fmaf(a.w, b.w, sum);
}

// S[r][c] += walked row . own row over one chunk.
template <int kRows, int kWalkedRows>
__device__ __forceinline__ void multiply_rows(float (&S)[kRows][4], Tile<kWalkedRows>& walked, Tile<kTile>& own, int tx, int ty) {
#pragma unroll 1
    for (int d = 0; d < kTile / 4; ++d) {
        float4 a[kRows];
#pragma unroll
        for (int r = 0; r < kRows; ++r) a[r] = walked.at(kRows * ty + r, d);
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float4 x = own.at(4 * tx + c, d);
#pragma unroll
            for (int r = 0; r < kRows; ++r) fma4(S[r][c], a[r], x);
        }
    }
}

}  // namespace fa
