// output_fragment.cuh: stores one thread's fragment of O. Its layout is that of score_fragment.cuh, with head dims in place of keys.
#pragma once

#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {

// Multiplies row g + 8 r of O by `inverse`, rounds it to T and stores it, 16 bytes at a time: the lanes of a quad exchange their pairs of
// columns, so that lane `quad` has columns 8 (4 x + quad) .. + 7. Lanes of rows that do not exist take part in the exchange. `empty`: the
// row has seen no key and is stored as zeros, because 0 x V may have given NaN.
template <typename T, int kCount>
__device__ __forceinline__ void store_row(T* row, const float (&O)[kCount], int r, float inverse, bool empty, bool exists, int columns,
                                          int quad) {
#pragma unroll
    for (int x = 0; x < kCount / 16; ++x) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float* pair = O + 4 * (4 * x + j) + 2 * r;
            pairs[j] = empty ? 0u : pack_16<T>(pair[0] * inverse, pair[1] * inverse);
        }
        transpose_quad(pairs, quad);
        const int column = 8 * (4 * x + quad);
        if (exists && column < columns) store_global_16(row + column, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
}

}  // namespace fa
