// w4.h: weights of 4 bits. What the formats mean, how their bytes lie in files (plain) and for the kernels (packed). Host and device.
//
//     weight[n][k] = code * scale[n][k / block] * tensor_scale
//
//     format   code                                         block   scale                             tensor_scale
//     nvfp4    E2M1: sign, 2 bits exponent, 1 mantissa        16    float8_e4m3, positive             float32
//     mxfp4    E2M1                                           32    E8M0: 2^(byte - 127), 255 = NaN   1
//     int4     two's complement, -8 .. 7                     128    float16, positive                 float32
//
// E2M1 codes 0 .. 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; 8 more is the same, negative.
// [OCP Microscaling Formats v1.0; NVFP4 as in NVIDIA's PTX ISA, block-scaled mma]
//
// Plain, what files hold:
//     codes   (out_features, ceil(in_features / 2)) bytes: k even in the low nibble, k + 1 in the high one
//     scales  (out_features, ceil(in_features / block)); a row's last block may be short
//
// Packed, what the products read: a header, then tiles of 16 rows x 64 columns, all tiles of 16 rows beside each other. Rows and columns
// beyond the weight's are zeros; rows are padded to 64.
//
//     row     of tile t: 16 t + r; of a pair (SwiGLU: gate above up) rows 0 .. 7 of tile t are gate rows 8 t + r, rows 8 .. 15 up rows
//             8 t + r - 8. A thread that holds rows g and g + 8 of a product, as mma and wgmma give them, so holds both.
//     codes   512 bytes, 16 for each lane 4 g + q of a warp: word j has row g and row g + 8 at the columns 16 q + 4 j + {0, 1, 2, 3}.
//             In step j of four, m16n8k16's operand A at its columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 is that word: the columns of a tile
//             are taken in the order in which a lane has one block of NVFP4 and reads 32 bytes of x in a row. Products do not care, if
//             the other operand follows: column_of().
//     scales  behind the codes: nvfp4 2 bytes a lane (row g, row g + 8; block q of the tile), mxfp4 2 bytes for each (g, q / 2),
//             int4 2 float16 for each g (both tiles of a block have them). scale_at().
//
// w4_bits.h is the order of the bits in a word, and what is stored of a scale.
#pragma once

#include "attention/params.h"

namespace fa::w4 {

enum class Format : int32_t { kNvfp4 = 1, kMxfp4 = 2, kInt4 = 3 };

FA_HOST_DEVICE constexpr int block_of(Format f) { return f == Format::kNvfp4 ? 16 : f == Format::kMxfp4 ? 32 : 128; }
FA_HOST_DEVICE constexpr int scale_bytes_of(Format f) { return f == Format::kInt4 ? 2 : 1; }

constexpr int kTileRows = 16, kTileColumns = 64, kTileCodes = kTileRows * kTileColumns / 2;
constexpr int kRowAlignment = 64;

FA_HOST_DEVICE constexpr int tile_scales(Format f) { return f == Format::kNvfp4 ? 64 : 32; }  // bytes
FA_HOST_DEVICE constexpr int tile_bytes(Format f) { return kTileCodes + tile_scales(f); }

// The column that operand A of step j has at its column c, 0 .. 15, in a tile.
FA_HOST_DEVICE constexpr int column_of(int j, int c) { return 16 * (c % 8 / 2) + 4 * j + 2 * (c / 8) + c % 2; }

// In front of the tiles. The stored scales may differ from the format's by a power of two that keeps them in the range of `dtype`.
struct PackedHeader {
    float factor;          // weight = code * stored scale * factor
    int32_t format;        // Format
    int32_t dtype;         // DType the products are made in, float16 or bfloat16: the order of the bits of a code follows it
    int32_t paired;        // gate and up rows share tiles
    int32_t out_features;  // rows, with a pair gate and up together
    int32_t in_features;
    int32_t reserved[26];
};
static_assert(sizeof(PackedHeader) == 128, "tiles are aligned to 128 bytes");

FA_HOST_DEVICE constexpr int64_t row_tiles(int32_t out_features, bool paired) {
    const int64_t align = paired ? kRowAlignment / 2 : kRowAlignment, rows = paired ? out_features / 2 : out_features;
    return (rows + align - 1) / align * (kRowAlignment / kTileRows);
}
FA_HOST_DEVICE constexpr int64_t column_tiles(int32_t in_features) { return (in_features + kTileColumns - 1) / kTileColumns; }
FA_HOST_DEVICE constexpr int64_t packed_bytes(Format f, int32_t out_features, int32_t in_features, bool paired) {
    return int64_t(sizeof(PackedHeader)) + row_tiles(out_features, paired) * column_tiles(in_features) * tile_bytes(f);
}

}  // namespace fa::w4
