// tensor_map.h: how the copy engine sees a strided tensor. Encoded on the host in every call: under a microsecond, nothing cached.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fa {

// (batch, heads, rows, columns) of 16-bit elements. Columns are contiguous; the other strides are in bytes, positive multiples of 16.
struct TensorTiles {
    const char* name;  // of the argument, for error messages
    const void* data;
    bool half;  // __half, else __nv_bfloat16
    int64_t columns, rows, heads, batch;
    int64_t row_stride, head_stride, batch_stride;
    int box_rows;           // rows of a tile
    int padded_columns;     // columns of a tile, a multiple of 64; those past `columns` read as zero
    bool by_chunk = false;  // always one box per chunk: if several boxes of fewer rows make a tile, the chunks of a box are not adjacent
    int box_chunks = 0;     // > 0: chunks of a box, instead of all of a tile; `columns` is a multiple of 64, padded_columns unused
    int box_heads = 0;      // > 0: heads of a box, innermost after the columns; the coordinates are then {column, head, row, chunk, batch}
};

// The map's coordinates are {column, row, chunk, head, batch} (but see box_heads). Its boxes are chunks of 64 columns in the 128-byte
// swizzle of wgmma.cuh. *loads is the number of boxes in a tile: 1 when a box holds all chunks (columns = padded_columns, not by_chunk),
// else one per chunk, at column 64 c and chunk 0. Rows and columns out of bounds arrive as zeros.
cudaError_t encode_tiles(const TensorTiles& tiles, CUtensorMap* map, int* loads);

// Rows of 32-bit words, no swizzle. Boxes of box_rows x box_words, packed, at the coordinates {word, row, 0, 0, 0}.
struct WordTiles {
    const char* name;
    const void* data;
    int64_t words, rows, row_stride;  // words per row; row_stride in bytes, a multiple of 16
    int box_words, box_rows;          // at most 256 each; box_words a multiple of four
};
cudaError_t encode_words(const WordTiles& tiles, CUtensorMap* map);

// The tensor for which this thread's last encoding failed, and what the driver said. Asking clears it; "" when nothing failed since.
const char* tensor_map_failure();

}  // namespace fa
