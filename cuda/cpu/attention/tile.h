// tile.h: the interface between forward.cpp, which is compiled for any processor, and the tile kernel, which is compiled once
// per instruction set.
//
// One task is a tile of queries against every key that the tile sees. The rows of a tile are packed: row r of a key head is query r / group
// of query head head_k * group + r % group. So query heads that share a key head share tiles, and each key is read once for all. Where each
// query head has intervals or blocks of its own, it has tiles of its own, too: all rows of a tile are under the same ones.
#pragma once

#include <cstdint>

#include "attention/common/dropout.h"
#include "attention/common/mask.h"
#include "cpu/attention/statistics.h"

namespace fa::cpu {

constexpr int kMaxTileRows = 512;  // packed rows; they share one copy of a key tile, which stays in the L2 cache
constexpr int kMaxGroupRows = 64;  // rows of the widest group of query vectors
constexpr int kTileKeys = 96;

struct QueryRow {
    int32_t head, query;
    int32_t key_begin, key_end;  // the keys that causal and window leave to the row
};

// Float32 scratch of one thread. The transposed matrices are stored group by group; each group of queries is contiguous.
struct Scratch {
    float* q;     // Q^T (groups, headdim, queries)
    float* out;   // O^T (groups, headdim_v, queries), not normalised
    float* s;     // S^T (kTileKeys, queries) of one group, then P^T
    float* seen;  // S^T before the softmax, kept only for a tile with infinities or NaN in V
    float* k;     // (kTileKeys, ld_k)
    float* v;     // (kTileKeys + 1, ld_v)
    int64_t ld_k, ld_v;
    // For AMX, the operands in bfloat16 (amx_kernel.h); p16 is of one group
    uint32_t *q16, *p16;
    uint16_t *k16, *v16;
};

struct QueryTile {
    const AttentionParams* params;
    Sequence sequence;
    DropoutOrigin origin;
    int32_t batch, head_k;
    int32_t rows;                // 1 .. kMaxTileRows
    int32_t key_begin, key_end;  // keys that some row sees
    // Of masks by intervals: the bounds of the sequence's tiles of kTileKeys keys, from tile 0 on. nullptr without intervals
    const HiddenBounds* bounds;
    Scratch scratch;
    QueryRow row[kMaxTileRows];
    float row_max[kMaxTileRows];  // written with row_sum: lse = row_max + log(row_sum)
    float row_sum[kMaxTileRows];
    float greatest[kMaxTileRows];     // largest score of the row, -inf if it sees no key; row_max may be the sink instead
    bool spoiled[kMaxTileRows];       // out of the row is not finite, or every score is -inf although no option hid a key: see exact_row.h
    RowStatistics lse[kMaxTileRows];  // read by sum_keys; row_max is +inf for a row that sees no key
    float* key_sums;                  // points to key 0
};

struct TileKernel {
    int lanes;                     // queries per vector
    void (*run)(QueryTile& tile);  // writes the rows of out, row_max, row_sum, greatest and spoiled
    // Adds to key_sums of keys key_begin .. key_end - 1 the sum over all rows of exp(S - lse). All rows belong to one query head.
    void (*sum_keys)(QueryTile& tile);
    // Updates row_max and row_sum of all rows with keys key_begin .. key_end - 1, from the same scores as sum_keys.
    void (*sum_rows)(QueryTile& tile);
};

extern const TileKernel kTilePortable, kTileAvx2, kTileAvx512, kTileAmx, kTileNeon;

}  // namespace fa::cpu
