// backward_tile.h: the interface between backward.cpp, which is compiled for any processor, and the backward tile kernel, which is compiled
// once per instruction set.
//
// One task is a tile of keys with every query that sees the tile, one block of queries of one head at a time. The task accumulates dK and
// dV of the tile. It returns the tile's part of a block's dQ to backward.cpp, which adds these parts in the order of the tiles.
#pragma once

#include <cstdint>

#include "attention/common/dropout.h"
#include "attention/common/mask.h"
#include "cpu/attention/statistics.h"

namespace fa::cpu {

constexpr int kBlockRows = 96;     // queries; a multiple of the height of every register tile
constexpr int kPanelKeys = 64;     // S, P and dS exist for one block of queries and one panel of the tile's keys at a time
constexpr int kMaxTileKeys = 256;  // a whole number of panels
// If a sequence has few rows, counting all query heads that see a key head, they are not worth the transposition of K and V: S and dP are
// sums along head dims. Such rows of float32 are read and written in place. Measured on 256 to 1024 keys, headdim 64, float32: with AVX2 a
// call takes 0.6 to 0.8 of the time up to 8 rows; with AVX-512 0.8 to 0.95 up to 3 rows, and 1.05 to 1.2 from 4 rows on. The number belongs
// to the sequence, not to the call, so that its gradients have the same bits alone and packed.
constexpr int kFewRows = 4, kFewRowsInPlace = 8, kFewWideRowsInPlace = 3;  // 16 bits, float32, float32 with AVX-512

struct Matrix {
    float* data;
    int64_t ld;
    Matrix at(int64_t row, int64_t column) const { return {data + row * ld + column, ld}; }
};

// Matrices are float32, in the scratch of one thread. Rows are a whole number of cache lines apart.
struct KeyTile {
    const BackwardParams* params;
    Sequence sequence;
    DropoutOrigin origin;
    GradientSequence gradients;
    int32_t batch, head_k;
    int32_t first, keys;  // keys first .. first + keys - 1 of the sequence; first is a multiple of kPanelKeys
    bool few_rows;        // see kFewRows; the same for all tiles of a sequence
    Matrix k, dk, dv, v;  // (keys, headdim or headdim_v); with few_rows they may be the caller's, and only then is there a v
    float *k_t, *v_t;     // without few_rows K^T, V^T: (panels, headdim or headdim_v, kPanelKeys), zero past the last key
    int64_t ld_k, ld_v;
    bool finite_k;  // false: not known
};

struct QueryBlock {
    int32_t head, first, rows;
    int32_t begin[kBlockRows], end[kBlockRows];  // the keys that causal and window leave to a row; begin >= end if the row sees no key
    const HiddenBounds* bounds;                  // of masks by intervals, for each panel of the tile; nullptr without intervals
    const float *row_max, *log_sum;              // P = exp(S - row_max - log_sum): see statistics.h
    const float* delta;                          // rowsum(dout * out) - dlse
    float *q, *dq;                               // (rows, ld_k); dq without softmax_scale, except with few_rows
    float* dout;                                 // (rows, ld_v)
    float *p, *ds;                               // (rows, kPanelKeys)
    int32_t next, next_rows;                     // the next block of the same head; next_rows may be 0
    const float* next_dq;                        // partial dQ of the next block, summed over earlier tiles: (next_rows, next_ld)
    int64_t next_ld;
};

struct BackwardTileKernel {
    int lanes;
    void (*delta)(const BackwardParams&, int64_t out, int64_t dout, int rows, float* delta);  // rowsum(dout * out); offsets of row 0
    void (*load_keys)(KeyTile&, bool gradients);                                              // with gradients also dK = dV = 0
    void (*add_block)(const KeyTile&, QueryBlock&);                                   // dK, dV += the block's part; dQ = the tile's part
    void (*add_bias)(const KeyTile&, QueryBlock&, float* dbias, int64_t row_stride);  // dbias[block, tile] += dS
    // Updates row_max and row_sum of the block's rows with the tile's keys.
    void (*sum_rows)(const KeyTile&, QueryBlock&, float* row_max, float* row_sum);
    // to = factor * from, or to += factor * from. Nothing is left to do where `from` lies in `to`.
    void (*store_rows)(const TensorView& to, int64_t first, DType dtype, int rows, int dim, Matrix from, float factor, bool accumulate);
};

extern const BackwardTileKernel kBackwardTilePortable, kBackwardTileAvx2, kBackwardTileAvx512, kBackwardTileNeon;

}  // namespace fa::cpu
