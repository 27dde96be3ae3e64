// w4.h: 4-bit weights: the meaning of the formats, and the layout of their bytes in files (plain) and for the kernels (packed). For
// host and device.
//
//     weight[n][k] = code * scale[n][k / block] * tensor_scale
//
//     format   code                                         block   scale                             tensor_scale
//     nvfp4    E2M1: sign, 2 bits exponent, 1 mantissa        16    float8_e4m3, positive             float32
//     mxfp4    E2M1                                           32    E8M0: 2^(byte - 127), 255 = NaN   1
//     int4     two's complement, -8 .. 7                     128    float16, positive                 float32
//
// E2M1 codes 0 .. 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; codes 8 .. 15 are their negatives.
// [OCP Microscaling Formats v1.0; NVFP4 as in NVIDIA's PTX ISA, block-scaled mma]
//
// Plain, in files:
//     codes   (out_features, ceil(in_features / 2)) bytes: even k in the low nibble, k + 1 in the high one
//     scales  (out_features, ceil(in_features / block)); a row's last block may be short
//
// Packed, for the products: a header, then tiles of 16 rows x 64 columns. The tiles of the same 16 rows are contiguous. Rows are padded
// with zeros to a multiple of 64, columns to whole tiles.
//
//     row     Row r of tile t is row 16 t + r of the weight. In a pair (SwiGLU: gate rows, then up rows) rows 0 .. 7 of tile t are gate
//             rows 8 t + r, and rows 8 .. 15 are up rows 8 t + r - 8. mma and wgmma give a thread rows g and g + 8 of a product, so one
//             thread has a gate and its up.
//     codes   512 bytes, 16 for each lane 4 g + q of a warp. Word j holds rows g and g + 8 at columns 16 q + 4 j + {0, 1, 2, 3}. It is the
//             lane's operand A of step j of four, where m16n8k16 expects columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9. So the product
//             takes the columns of a tile in another order, column_of(), and the other operand must use the same order. With this order a
//             lane's codes belong to one block of NVFP4, and a lane reads 32 contiguous bytes of x.
//     scales  After the codes. nvfp4: 2 bytes for each lane (rows g and g + 8 of block q of the tile). mxfp4: 2 bytes for each (g, q / 2).
//             int4: two float16 for each g; both tiles of a block repeat them. See scale_at().
//
// w4_bits.h defines the order of the bits in a word and the stored form of a scale.
#pragma once

#include "common/types.h"

namespace fa::w4 {

enum class Format : int32_t { kNvfp4 = 1, kMxfp4 = 2, kInt4 = 3 };

FA_HOST_DEVICE constexpr int block_of(Format f) { return f == Format::kNvfp4 ? 16 : f == Format::kMxfp4 ? 32 : 128; }
FA_HOST_DEVICE constexpr int scale_bytes_of(Format f) { return f == Format::kInt4 ? 2 : 1; }

constexpr int kTileRows = 16, kTileColumns = 64, kTileCodes = kTileRows * kTileColumns / 2;
constexpr int kRowAlignment = 64;

FA_HOST_DEVICE constexpr int tile_scales(Format f) { return f == Format::kNvfp4 ? 64 : 32; }  // bytes
FA_HOST_DEVICE constexpr int tile_bytes(Format f) { return kTileCodes + tile_scales(f); }

// The column of a tile that step j uses as column c (0 .. 15) of operand A.
FA_HOST_DEVICE constexpr int column_of(int j, int c) { return 16 * (c % 8 / 2) + 4 * j + 2 * (c / 8) + c % 2; }

// Precedes the tiles. The stored scales may differ from the format's by a power of two that keeps them in the range of `dtype`.
struct PackedHeader {
    float factor;          // weight = code * stored scale * factor
    int32_t format;        // Format
    int32_t dtype;         // DType of the products, float16 or bfloat16; the order of a code's bits depends on it
    int32_t paired;        // gate and up rows share tiles
    int32_t out_features;  // rows; in a pair the rows of gate and up together
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
