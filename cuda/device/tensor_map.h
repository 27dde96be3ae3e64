// tensor_map.h: how the copy engine sees a strided tensor. Built on the host for every call: under a microsecond, nothing cached.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace fa {

// (batch, heads, rows, columns) of 16-bit elements; columns contiguous, the other strides in bytes, positive multiples of 16.
struct TensorTiles {
    const char* name;  // of the argument, for the text of a failure
    const void* data;
    bool half;  // __half, else __nv_bfloat16
    int64_t columns, rows, heads, batch;
    int64_t row_stride, head_stride, batch_stride;
    int box_rows;           // rows of a tile
    int padded_columns;     // columns of a tile, a multiple of 64; those past `columns` read as zero
    bool by_chunk = false;  // a box for every chunk in any case: where boxes of fewer rows make a tile, its chunks are not neighbours
    int box_chunks = 0;     // > 0: a box has so many chunks, not all of a tile; `columns` is a multiple of 64, padded_columns unused
    int box_heads = 0;  // > 0: a box has that many heads of each row, row by row, and the coordinates are {column, head, row, chunk, batch}
};

// The map's coordinates are {column, row, chunk, head, batch} (but see box_heads), its boxes chunks of 64 columns in the 128-byte swizzle
// of wgmma.cuh. Returns in *loads how many boxes make a tile: 1 when a box holds every chunk (columns = padded_columns, not by_chunk), else
// one per chunk, at columns 64 c and chunk 0. Rows and columns out of bounds arrive as zeros.
cudaError_t encode_tiles(const TensorTiles& tiles, CUtensorMap* map, int* loads);

// Rows of 32-bit words, no swizzle: boxes of box_rows x box_words, packed, at the coordinates {word, row, 0, 0, 0}.
struct WordTiles {
    const char* name;
    const void* data;
    int64_t words, rows, row_stride;  // of a row; bytes, a multiple of 16
    int box_words, box_rows;          // at most 256; words a multiple of four
};
cudaError_t encode_words(const WordTiles& tiles, CUtensorMap* map);

// Which tensor the last encoding of this thread failed for, and what the driver said; "" when none has since this was asked last.
const char* tensor_map_failure();

}  // namespace fa
