// quantize_w4.cu: quantises, dequantises and packs 4-bit weights on the GPU, to the same bytes as cpu/transformer/w4.cpp (w4_quantize.h has
// the arithmetic of both). It runs once per weight, so the code is kept simple: a thread takes a block of the weight, a warp a packed tile.
// Maxima over the whole weight (its largest magnitude, its largest scale) are collected by atomics in the memory of the result, so nothing
// is allocated and nothing waits.
#include "device/launch.h"
#include "transformer/common/elements.cuh"
#include "transformer/w4/common/product.h"
#include "transformer/w4/common/w4_quantize.h"
#include "transformer/w4/kernels.h"

namespace fa {
namespace {

using namespace fa::w4;

constexpr int kThreads = 128;

// Thread blocks for `count` items, `per_block` items each. At the limit of 65536 blocks a thread takes several items.
unsigned blocks_for(int64_t count, int64_t per_block) {
    const int64_t blocks = (count + per_block - 1) / per_block;
    return unsigned(blocks < 65536 ? blocks : 65536);
}
__device__ __forceinline__ int64_t first_thread() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t all_threads() { return int64_t(gridDim.x) * blockDim.x; }

__device__ __forceinline__ void keep_largest(uint32_t most, uint32_t* largest) {
    for (int offset = 16; offset; offset /= 2) most = max(most, __shfl_xor_sync(~0u, most, offset));
    if (threadIdx.x % 32 == 0 && most) atomicMax(largest, most);
}

// ---- quantise ----

__global__ void __launch_bounds__(kThreads) largest_kernel(const __grid_constant__ W4QuantizeParams p) {
    uint32_t most = 0;
    const int64_t count = int64_t(p.out.out_features) * p.out.in_features;
    for (int64_t i = first_thread(); i < count; i += all_threads()) {
        const int64_t row = i / p.out.in_features, column = i - row * p.out.in_features;
        const uint32_t magnitude = bits_of(load_element(p.w.data, row * p.w.row + column, p.dtype)) & 0x7FFFFFFFu;
        if (magnitude < 0x7F800000u) most = max(most, magnitude);
    }
    keep_largest(most, reinterpret_cast<uint32_t*>(p.out.tensor_scale));
}

__global__ void tensor_scale_kernel(const __grid_constant__ W4QuantizeParams p) {
    *p.out.tensor_scale = p.out.format == Format::kNvfp4 ? tensor_scale_of(*p.out.tensor_scale) : 1.0f;
}

template <Format format>
__global__ void __launch_bounds__(kThreads) quantize_kernel(const __grid_constant__ W4QuantizeParams p) {
    constexpr int kBlock = block_of(format);
    const int64_t per_row = p.out.blocks_of_a_row(), row_bytes = (int64_t(p.out.in_features) + 1) / 2;
    const float tensor_scale = format == Format::kNvfp4 ? *p.out.tensor_scale : 1.0f;
    for (int64_t block = first_thread(); block < p.out.blocks(); block += all_threads()) {
        const int64_t row = block / per_row, column = (block - row * per_row) * kBlock;
        const int64_t left = p.out.in_features - column;
        float x[kBlock];
        for (int i = 0; i < kBlock; ++i) x[i] = i < left ? load_element(p.w.data, row * p.w.row + column + i, p.dtype) : 0.0f;
        const uint16_t scale = block_scale<format>(x, tensor_scale, p.search);
        store_scale<format>(p.out.scales, block, scale);
        const float factor = multiply(decode_scale<format>(scale), tensor_scale);
        uint8_t* const codes = p.out.codes + row * row_bytes + column / 2;
        for (int i = 0; i < kBlock; i += 2)
            if (i < left) codes[i / 2] = uint8_t(encode_in<format>(x[i], factor) | encode_in<format>(x[i + 1], factor) << 4);
    }
}

// ---- dequantise ----

template <Format format>
__global__ void __launch_bounds__(kThreads) dequantize_kernel(const __grid_constant__ W4DequantizeParams p) {
    const W4View& w = p.weight;
    const float tensor_scale = w.tensor_scale ? *w.tensor_scale : 1.0f;
    const int64_t row_bytes = (int64_t(w.in_features) + 1) / 2, per_row = w.blocks_of_a_row();
    for (int64_t i = first_thread(); i < row_bytes * w.out_features; i += all_threads()) {
        const int64_t row = i / row_bytes, column = (i - row * row_bytes) * 2;
        const float scale = decode_scale<format>(load_scale<format>(w.scales, row * per_row + column / block_of(format)));
        for (int64_t k = column; k < column + 2 && k < w.in_features; ++k) {
            const float value = decode<format>(uint8_t(w.codes[i] >> (k % 2 * 4) & 15));
            store_element(p.out.data, row * p.out.row + k, p.out_dtype, multiply(multiply(value, scale), tensor_scale));
        }
    }
}

// ---- pack: the largest scale is collected in the first reserved word of the header ----

__device__ __forceinline__ PackedHeader* header_in(const W4PackParams& p) { return static_cast<PackedHeader*>(p.packed); }

__global__ void __launch_bounds__(kThreads) largest_scale_kernel(const __grid_constant__ W4PackParams p) {
    uint32_t most = 0;
    for (int64_t i = first_thread(); i < p.weight.blocks(); i += all_threads()) {
        const uint32_t scale = static_cast<const uint8_t*>(p.weight.scales)[i];
        if (scale != 255) most = max(most, scale);
    }
    keep_largest(most, reinterpret_cast<uint32_t*>(header_in(p)->reserved));
}

template <Format format>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ W4PackParams p) {
    const int64_t across = column_tiles(p.weight.in_features), tiles = row_tiles(p.weight.out_features, p.pair) * across;
    const Packing packing{p.dtype, p.pair, header_in(p)->reserved[0]};
    uint8_t* const to = static_cast<uint8_t*>(p.packed) + sizeof(PackedHeader);
    for (int64_t i = first_thread(); i < 32 * tiles; i += all_threads())
        pack_lane<format>(p.weight, packing, i / 32 / across, i / 32 % across, int(i % 32), to + i / 32 * tile_bytes(format));
}

__global__ void header_kernel(const __grid_constant__ W4PackParams p) {
    PackedHeader* const header = header_in(p);
    *header = header_of(p.weight, Packing{p.dtype, p.pair, header->reserved[0]});
}

}  // namespace

cudaError_t w4_quantize(const W4QuantizeParams& p, const DeviceInfo&, cudaStream_t stream) {
    if (p.out.format == Format::kNvfp4) {
        const int64_t count = int64_t(p.out.out_features) * p.out.in_features;
        if (const cudaError_t error = cudaMemsetAsync(p.out.tensor_scale, 0, sizeof(float), stream)) return cudaGetLastError(), error;
        if (const cudaError_t error = launch_kernel(largest_kernel, blocks_for(count, 16 * kThreads), kThreads, 0, stream, p)) return error;
    }
    if (p.out.tensor_scale)
        if (const cudaError_t error = launch_kernel(tensor_scale_kernel, 1, 1, 0, stream, p)) return error;
    return with_format(p.out.format, [&](auto format) {
        return launch_kernel(quantize_kernel<format()>, blocks_for(p.out.blocks(), kThreads), kThreads, 0, stream, p);
    });
}

cudaError_t w4_dequantize(const W4DequantizeParams& p, const DeviceInfo&, cudaStream_t stream) {
    const int64_t bytes = (int64_t(p.weight.in_features) + 1) / 2 * p.weight.out_features;
    return with_format(p.weight.format, [&](auto format) {
        return launch_kernel(dequantize_kernel<format()>, blocks_for(bytes, kThreads), kThreads, 0, stream, p);
    });
}

cudaError_t w4_pack(const W4PackParams& p, const DeviceInfo&, cudaStream_t stream) {
    if (const cudaError_t error = cudaMemsetAsync(p.packed, 0, sizeof(PackedHeader), stream)) return cudaGetLastError(), error;
    if (p.weight.format == Format::kMxfp4)
        if (const cudaError_t error =
                launch_kernel(largest_scale_kernel, blocks_for(p.weight.blocks(), 16 * kThreads), kThreads, 0, stream, p))
            return error;
    const int64_t tiles = row_tiles(p.weight.out_features, p.pair) * column_tiles(p.weight.in_features);
    if (const cudaError_t error = with_format(p.weight.format, [&](auto format) {
            return launch_kernel(pack_kernel<format()>, blocks_for(32 * tiles, kThreads), kThreads, 0, stream, p);
        }))
        return error;
    return launch_kernel(header_kernel, 1, 1, 0, stream, p);
}

}  // namespace fa
