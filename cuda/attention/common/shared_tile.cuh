// shared_tile.cuh: swizzled tiles in shared memory for ldmatrix, and their copies from global memory; shared by the mma.sync kernels.
#pragma once

#include "attention/common/params.h"
#include "device/mma.cuh"

#include <cstdint>
#include <type_traits>

namespace fa {

// A tile in shared memory. A row is a sequence of 16-byte pieces, permuted within the row so that eight neighbouring rows hold the same
// piece in eight different groups of four banks. No 8 x 8 matrix that ldmatrix reads has a bank conflict.
//     pitch a multiple of 128 bytes            piece ^ row % 8
//     pitch an odd multiple of 64 bytes        piece ^ row / 2 % 4; an even and an odd row already differ by 64 bytes
template <typename T, int kColumns>
struct SharedTile {
    static constexpr int kPitch = kColumns * int(sizeof(T));  // bytes
    static_assert(kPitch % 64 == 0, "a row is a whole number of 64-byte groups");
    static constexpr int kPieces = kPitch / 16, kPieceColumns = 16 / int(sizeof(T));
    static constexpr bool kWide = kPieces % 8 == 0;

    __host__ __device__ static constexpr uint32_t offset(int row, int piece) {
        return row * kPitch + (piece ^ (kWide ? row % 8 : row / 2 % 4)) * 16;
    }
    // Moves an address from piece 0 or 1 of a row to piece 2 k or 2 k + 1, by one XOR and a constant. The tile must start on 128 bytes.
    __device__ static __forceinline__ uint32_t advance(uint32_t address, int k) {
        constexpr int kGroup = kWide ? 4 : 2;
        return (address ^ uint32_t(k % kGroup * 32)) + k / kGroup * kGroup * 32;
    }
    // Rows that `threads` threads copy in one pass, one piece per thread. It is a power of two, so that a thread meets few different XOR
    // patterns; 96 and 192 columns leave a quarter of the threads without work.
    __host__ __device__ static constexpr int rows_at_once(int threads) {
        int rows = 64;
        while (rows * kPieces > threads) rows /= 2;
        return rows;
    }
};

// tile[r] = source row r for r in [begin, end); zeros elsewhere and past `columns`. Copies 16 bytes at a time, asynchronously; rows that do
// not start on 16 bytes are copied element by element at once.
template <int kRows, int kColumns, int kThreads, bool kAnyAlignment, typename T>
__device__ __forceinline__ void load_tile(const T* tile, const T* source, int64_t row_stride, int begin, int end, int columns,
                                          bool aligned) {
    using Tile = SharedTile<T, kColumns>;
    constexpr int kRowsAtOnce = Tile::rows_at_once(kThreads), kPieceColumns = Tile::kPieceColumns;
    static_assert(kRows % kRowsAtOnce == 0, "whole passes");
    const int row0 = threadIdx.x / Tile::kPieces, piece = threadIdx.x % Tile::kPieces;
    if (kRowsAtOnce * Tile::kPieces < kThreads && row0 >= kRowsAtOnce) return;
    const uint32_t shared = shared_address(tile);
    if (!kAnyAlignment || aligned) {
        if (piece * kPieceColumns >= columns) end = begin;
        const T* from = source + row0 * row_stride + piece * kPieceColumns;
#pragma unroll
        for (int r = 0; r < kRows; r += kRowsAtOnce) {
            cp_async_16(shared + Tile::offset(row0 + r, piece), from, unsigned(row0 + r - begin) < unsigned(end - begin) ? 16 : 0);
            from += kRowsAtOnce * row_stride;
        }
    } else {
        using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
#pragma unroll 1
        for (int row = row0; row < kRows; row += kRowsAtOnce) {
            uint32_t word[4] = {};
#pragma unroll
            for (int e = 0; e < kPieceColumns; ++e) {
                const int column = piece * kPieceColumns + e;
                if (row < begin || row >= end || column >= columns) continue;
                const uint32_t bits = reinterpret_cast<const Bits*>(source)[row * row_stride + column];
                word[e * sizeof(T) / 4] |= bits << (e * sizeof(T) % 4 * 8);
            }
            store_shared_16(shared + Tile::offset(row, piece), make_uint4(word[0], word[1], word[2], word[3]));
        }
    }
}

// Page and row of each tile row of a paged cache. A lane of a warp looks up one row (see find). Together the lanes hold all rows that their
// warp copies, in the order of load_tile.
template <int kRows, int kColumns, int kThreads, typename T>
struct PagedRows {
    static constexpr int kPieces = SharedTile<T, kColumns>::kPieces, kRowsAtOnce = SharedTile<T, kColumns>::rows_at_once(kThreads);
    static constexpr int kWarpRowsAtOnce = kPieces > 32 ? 1 : 32 / kPieces, kPasses = kRows / kRowsAtOnce;  // warps may share a row
    static_assert((32 % kPieces == 0 || kPieces % 32 == 0) && kRowsAtOnce * kPieces == kThreads && kPasses * kWarpRowsAtOnce <= 32,
                  "a row for each lane");
    int page, row;

    // Rows outside [begin, end) are not looked up; key0 is the key of row 0.
    __device__ __forceinline__ void find(const AttentionParams& p, int b, int key0, int begin, int end) {
        const int lane = threadIdx.x % 32;
        const int r = lane / kWarpRowsAtOnce * kRowsAtOnce + threadIdx.x / 32 * 32 / kPieces + lane % kWarpRowsAtOnce;
        page = row = 0;
        if (r < begin || r >= end || r >= kRows) return;
        const int index = (key0 + r) / p.cache.page_size;
        page = cache_page(p.cache, b, index), row = key0 + r - index * p.cache.page_size;
    }
};

// load_tile for rows that lie where `rows` says; `source` is the head in page 0.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void load_paged_tile(const T* tile, const T* source, const TensorView& view,
                                                const PagedRows<kRows, kColumns, kThreads, T>& rows, int begin, int end, int columns,
                                                bool aligned) {
    using Tile = SharedTile<T, kColumns>;
    using Rows = PagedRows<kRows, kColumns, kThreads, T>;
    constexpr int kPieceColumns = Tile::kPieceColumns;
    const int row0 = threadIdx.x / Tile::kPieces, piece = threadIdx.x % Tile::kPieces;
    const uint32_t shared = shared_address(tile);
    const bool whole = aligned && (piece + 1) * kPieceColumns <= columns;
#pragma unroll
    for (int pass = 0; pass < Rows::kPasses; ++pass) {
        const int lane = pass * Rows::kWarpRowsAtOnce + row0 % Rows::kWarpRowsAtOnce, r = row0 + pass * Rows::kRowsAtOnce;
        const int page = __shfl_sync(~0u, rows.page, lane), row = __shfl_sync(~0u, rows.row, lane);
        const T* from = source + page * view.batch + row * view.row + piece * kPieceColumns;
        const uint32_t to = shared + Tile::offset(r, piece);
        const int left = r >= begin && r < end ? columns - piece * kPieceColumns : 0;  // columns of the piece that exist
        if (whole || left <= 0) {
            cp_async_16(to, left > 0 ? from : source, left > 0 ? 16 : 0);
        } else {
            using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
            uint32_t word[4] = {};
#pragma unroll
            for (int e = 0; e < kPieceColumns; ++e)
                if (e < left) word[e * sizeof(T) / 4] |= uint32_t(reinterpret_cast<const Bits*>(from)[e]) << (e * sizeof(T) % 4 * 8);
            store_shared_16(to, make_uint4(word[0], word[1], word[2], word[3]));
        }
    }
}

// Whether rows start on 16 bytes and are a multiple of 16 bytes long, for 16-byte copies. The stride of an axis with one entry does not
// matter.
template <typename T>
bool aligned_rows(const AttentionParams& p, const TensorView& t, int heads, int columns) {
    constexpr int kPiece = 16 / int(sizeof(T));
    const bool batch_fits = p.cu_seqlens_q || (p.batch == 1 && !p.cache.entries) || t.batch % kPiece == 0;
    return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && columns % kPiece == 0 && t.row % kPiece == 0 &&
           (heads == 1 || t.head % kPiece == 0) && batch_fits;
}

}  // namespace fa
