// w4.cpp: 4-bit weights on the host: quantised, dequantised, packed. Writes the same bytes as quantize_w4.cu
// (transformer/w4/common/w4_quantize.h has the arithmetic of both). Compiled without fused multiply-adds.
#include <algorithm>
#include <atomic>
#include <cmath>

#include "common/half.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"
#include "transformer/w4/common/w4_quantize.h"

namespace fa::cpu {
namespace {

using namespace fa::w4;

// Calls body with the format as a template argument.
template <typename Body>
void with_format(Format format, const Body& body) {
    if (format == Format::kNvfp4) body(std::integral_constant<Format, Format::kNvfp4>{});
    else if (format == Format::kMxfp4) body(std::integral_constant<Format, Format::kMxfp4>{});
    else body(std::integral_constant<Format, Format::kInt4>{});
}

// The largest finite magnitude of the matrix.
float largest_of(const W4QuantizeParams& p) {
    std::atomic<uint32_t> largest{0};
    parallel_for(p.out.out_features, p.num_threads, [&](int64_t row, int) {
        uint32_t most = 0;
        for (int32_t k = 0; k < p.out.in_features; ++k) {
            const uint32_t magnitude = bits_of(load(p.w.data, row * p.w.row + k, p.dtype)) & 0x7FFFFFFFu;
            most = std::max(most, magnitude < 0x7F800000u ? magnitude : 0u);
        }
        for (uint32_t seen = largest; seen < most && !largest.compare_exchange_weak(seen, most);) {
        }
    });
    return float_of(largest);
}

template <Format format>
void quantize_row(const W4QuantizeParams& p, float tensor_scale, int64_t row) {
    constexpr int kBlock = block_of(format);
    const int64_t row_bytes = (int64_t(p.out.in_features) + 1) / 2, blocks = p.out.blocks_of_a_row();
    uint8_t* const codes = p.out.codes + row * row_bytes;
    for (int64_t b = 0; b < blocks; ++b) {
        const int count = int(std::min<int64_t>(kBlock, p.out.in_features - b * kBlock));
        float x[kBlock] = {};
        for (int i = 0; i < count; ++i) x[i] = load(p.w.data, row * p.w.row + b * kBlock + i, p.dtype);
        const uint16_t scale = block_scale<format>(x, tensor_scale, p.search);
        store_scale<format>(p.out.scales, row * blocks + b, scale);
        const float factor = multiply(decode_scale<format>(scale), tensor_scale);
        for (int i = 0; i < count; i += 2)
            codes[(b * kBlock + i) / 2] = uint8_t(encode_in<format>(x[i], factor) | encode_in<format>(x[i + 1], factor) << 4);
    }
}

}  // namespace

void w4_quantize(const W4QuantizeParams& p) {
    const float tensor_scale = p.out.format == Format::kNvfp4 ? tensor_scale_of(largest_of(p)) : 1.0f;
    if (p.out.tensor_scale) *p.out.tensor_scale = tensor_scale;
    with_format(p.out.format, [&](auto format) {
        parallel_for(p.out.out_features, p.num_threads, [&](int64_t row, int) { quantize_row<format()>(p, tensor_scale, row); });
    });
}

void w4_dequantize(const W4DequantizeParams& p) {
    const W4View& w = p.weight;
    const float tensor_scale = w.tensor_scale ? *w.tensor_scale : 1.0f;
    with_format(w.format, [&](auto format) {
        parallel_for(w.out_features, p.num_threads, [&](int64_t row, int) {
            const uint8_t* const codes = w.codes + row * ((int64_t(w.in_features) + 1) / 2);
            const int64_t blocks = w.blocks_of_a_row();
            for (int32_t k = 0; k < w.in_features; ++k) {
                const float scale = decode_scale<format()>(load_scale<format()>(w.scales, row * blocks + k / block_of(format())));
                const float value = decode<format()>(uint8_t(codes[k / 2] >> (k % 2 * 4) & 15));
                store(p.out.data, row * p.out.row + k, p.out_dtype, multiply(multiply(value, scale), tensor_scale));
            }
        });
    });
}

void w4_pack(const W4PackParams& p) {
    const W4View& w = p.weight;
    Packing packing{p.dtype, p.pair, 0};
    if (w.format == Format::kMxfp4) {
        const uint8_t* const scales = static_cast<const uint8_t*>(w.scales);
        for (int64_t i = 0; i < w.blocks(); ++i)
            if (scales[i] != 255) packing.largest = std::max<int>(packing.largest, scales[i]);
    }
    const PackedHeader header = header_of(w, packing);
    std::memcpy(p.packed, &header, sizeof header);
    uint8_t* const tiles = static_cast<uint8_t*>(p.packed) + sizeof header;
    const int64_t across = column_tiles(w.in_features);
    with_format(w.format, [&](auto format) {
        parallel_for(row_tiles(w.out_features, p.pair), p.num_threads, [&](int64_t row_tile, int) {
            for (int64_t column_tile = 0; column_tile < across; ++column_tile)
                for (int lane = 0; lane < 32; ++lane)
                    pack_lane<format()>(w, packing, row_tile, column_tile, lane,
                                        tiles + (row_tile * across + column_tile) * tile_bytes(format()));
        });
    });
}

}  // namespace fa::cpu
