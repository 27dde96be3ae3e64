// small_w4.cu: out = residual + act(norm(x) W^T + bias) for one row of x with up to 4096 columns and packed 4-bit weights: the counterpart
// of transformer/linear/linear_small_sm80.cu. A block holds all of its weights in registers. If all blocks run at once, latency is the
// bound: such products follow each other so quickly that only the path from x to out counts, and everything else is done before the kernel
// waits for x. With a larger W, blocks follow each other on an SM, and memory is the bound.
//
//     before x  A warp loads its tiles of 16 rows x 64 columns and its part of the norm's weight. It widens up to two tiles into operands
//               of mma, 16 registers each; further tiles stay codes. A block has kR row tiles; each of its warps has kC of their columns.
//     x         If x has the product's type, the 32 bytes of a lane are operand B of a tile's four steps. If x is float32, or needs a norm,
//               a lane reads two elements, and the lanes of the warp exchange them. A warp reads only the part of x that it multiplies.
//     product   mma.m16n8k16; all columns of operand B are the same x. The result, not x, is divided by the root mean square.
//     sum       The warps put their sums, of the product and of the squares of x, into shared memory, where the first warp adds them.
#include <type_traits>

#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/w4/common/product.h"
#include "transformer/w4/common/w4.cuh"
#include "transformer/w4/kernels.h"

namespace fa {
namespace {

using w4::Format, w4::kTileColumns, w4::kTileRows;

constexpr int kMaxWarps = 16, kMaxTiles = 4;  // warps of a block; column tiles of a warp
// The most warps per block if each warp has rows x columns tiles. Two blocks must fit on an SM, so that the blocks of the next kernel load
// while those of this one compute: 14 warps with 72 registers, which two row tiles need, or 16 warps with 64.
constexpr int most_warps(int rows, int columns) { return rows == 2 && columns == 1 ? 14 : kMaxWarps; }
constexpr int kStride = kMaxWarps + 4;  // floats between rows of parts; the 4 avoid bank conflicts

struct Launch {
    W4LinearParams p;
    int32_t column_tiles;
    float per_feature;  // 1 / in_features
};

// Two adjacent elements; `at` is even.
__device__ __forceinline__ float2 load_2(const void* data, int at, DType dtype) {
    if (dtype == DType::kFloat32) return __ldcg(reinterpret_cast<const float2*>(static_cast<const float*>(data) + at));
    const uint32_t bits = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const __half*>(data) + at));
    float x[2];
    if (dtype == DType::kFloat16) unpack_16<__half>(x, bits);
    else unpack_16<__nv_bfloat16>(x, bits);
    return make_float2(x[0], x[1]);
}

// load_element in two steps: the load, and the conversion where the element is needed.
__device__ __forceinline__ uint32_t load_bits(const void* data, int at, DType dtype) {
    return dtype == DType::kFloat32 ? __ldcg(static_cast<const uint32_t*>(data) + at) : __ldcg(static_cast<const uint16_t*>(data) + at);
}
__device__ __forceinline__ float value_of(uint32_t bits, DType dtype) {
    const float half = __half2float(__ushort_as_half(uint16_t(bits)));
    return dtype == DType::kFloat16 ? half : __uint_as_float(dtype == DType::kFloat32 ? bits : bits << 16);
}

__device__ __forceinline__ float sum_of_warps(const float (&parts)[kStride]) {
    float4 sum = *reinterpret_cast<const float4*>(parts);
#pragma unroll
    for (int i = 4; i < kMaxWarps; i += 4) add_4(sum, *reinterpret_cast<const float4*>(parts + i));
    return (sum.x + sum.y) + (sum.z + sum.w);
}

// The codes and scales of a warp's tiles, the lane's share. first: the first tile of the weight. Row tiles are always inside, because the
// packed weight is padded to four.
template <Format kFormat, int kR, int kC>
__device__ __forceinline__ void load_weights(const Launch& launch, const uint8_t* first, int first_row, int first_column, int lane,
                                             uint4 (&codes)[kR][kC], uint32_t (&stored)[kR][kC]) {
#pragma unroll
    for (int r = 0; r < kR; ++r) {
        const uint8_t* tile = first + (int64_t(first_row + r) * launch.column_tiles + first_column) * w4::tile_bytes(kFormat);
#pragma unroll
        for (int c = 0; c < kC; ++c, tile += w4::tile_bytes(kFormat)) {
            const bool inside = first_column + c < launch.column_tiles;
            codes[r][c] = inside ? __ldcg(reinterpret_cast<const uint4*>(tile) + lane) : make_uint4(0, 0, 0, 0);
            stored[r][c] = inside ? w4::load_scales<kFormat>(tile, lane) : 0;
        }
    }
}
// Word j of a tile's codes as an operand of mma.
template <Format kFormat, typename T>
__device__ __forceinline__ void widen(uint32_t (&to)[4], const uint4& codes, int j, uint32_t stored) {
    const uint32_t word = opaque((&codes.x)[j]);
    if constexpr (kFormat == Format::kInt4) {
        w4::unpack_word<kFormat, T>(to, word);
    } else {
        uint32_t scale[2];
        w4::widen_scales<kFormat, T>(scale, stored);
        w4::dequantize_word<kFormat, T>(to, word, scale);
    }
}
// v is multiplied by the norm's weight. Before the division by the root mean square x may overflow or underflow float16. If so, the warp
// multiplies its part by a power of two that brings its largest element to about 2^14, and `back` undoes that. Returns the sum of squares.
template <typename T, int kC>
__device__ __forceinline__ float apply_norm(float2 (&v)[kC], const float2 (&norm)[kC], float& back) {
    float squares = 0.0f, largest = 0.0f;
#pragma unroll
    for (int c = 0; c < kC; ++c) {
        squares += v[c].x * v[c].x + v[c].y * v[c].y;
        v[c].x *= norm[c].x, v[c].y *= norm[c].y;
        largest = fmaxf(largest, fmaxf(fabsf(v[c].x), fabsf(v[c].y)));
    }
    if constexpr (std::is_same_v<T, __half>)
        if (__any_sync(~0u, !(largest < 0x1p15f)) || !__any_sync(~0u, largest > 0x1p-8f)) {
            const int shift = max(-100, int(__reduce_max_sync(~0u, __float_as_uint(largest)) >> 23) - 141);
            const float scale = __int_as_float((127 - shift) << 23);
            back = __int_as_float((127 + shift) << 23);
#pragma unroll
            for (int c = 0; c < kC; ++c) v[c].x *= scale, v[c].y *= scale;
        }
    return squares;
}

// X is the type of x: T, or float, with or without a norm.
template <Format kFormat, typename T, typename X, Norm kNormOfX, int kR, int kC>
__global__ void __launch_bounds__(32 * most_warps(kR, kC), 2) small_w4_kernel(const __grid_constant__ Launch launch) {
    constexpr bool kNorm = kNormOfX == Norm::kRms;
    constexpr bool kWide = kR * kC <= 2;                             // weights are widened before x has arrived
    constexpr bool kExchanged = std::is_same_v<X, float> || !kWide;  // a lane loads pairs of x, which go through shared memory
    constexpr bool kHeld = kWide && (kC == 1 || (!kExchanged && kFormat != Format::kInt4));  // there are registers enough to
                                                                                             // force that order
    constexpr int kRows = kTileRows * kR;
    static_assert(kRows <= 32, "each lane of the first warp finishes at most one row");
    __shared__ struct {
        alignas(16) uint32_t x[kExchanged ? kMaxWarps : 1][kC][kTileColumns / 2];
        alignas(16) float parts[kRows + 1][kStride];  // each warp's part of a row's sum; last row: of the sum of squares of x
    } shared;
    launch_dependents();
    const W4LinearParams& p = launch.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, q = lane % 4;
    const int first_row = blockIdx.x * kR, first_column = warp * kC;  // tiles

    const auto* const header = static_cast<const w4::PackedHeader*>(p.packed);
    uint4 codes[kR][kC];
    uint32_t stored[kR][kC];
    load_weights<kFormat>(launch, reinterpret_cast<const uint8_t*>(header + 1), first_row, first_column, lane, codes, stored);
    const int k0 = first_column * kTileColumns + (kExchanged ? 2 * lane : 16 * q);  // the first element of x that the lane loads
    float2 norm[kC];
    if constexpr (kNorm)
#pragma unroll
        for (int c = 0; c < kC; ++c) {
            const int k = k0 + c * kTileColumns;
            norm[c] = k < p.in_features ? load_2(p.norm_weight, k, p.norm_dtype) : make_float2(0, 0);
        }

    // The row that a lane of the first warp finishes. In a paired weight the lane of the gate row stores to out.
    const int row = lane % kRows, tile = first_row + row / kTileRows;
    const int column = p.swiglu ? 8 * tile + row % 8 : kTileRows * tile + row % kTileRows;
    const bool up = p.swiglu && row % kTileRows >= 8, mine = warp == 0 && lane < kRows && column < p.columns(), stores = mine && !up;
    const float factor = warp == 0 ? header->factor : 0.0f;
    for (int i = warp + warps; i < kMaxWarps; i += warps) {  // zeros for the warps that the block lacks
        shared.parts[row][i] = 0;
        if (lane == 0) shared.parts[kRows][i] = 0;
    }

    uint32_t a[kWide ? kR : 1][kWide ? kC : 1][4][4];
    if constexpr (kWide)
#pragma unroll
        for (int r = 0; r < kR; ++r)
#pragma unroll
            for (int c = 0; c < kC; ++c)
#pragma unroll
                for (int j = 0; j < 4; ++j) widen<kFormat, T>(a[r][c][j], codes[r][c], j, stored[r][c]);

    // To the compiler this may be a loop, so it does not move code from before the wait to after it.
#pragma unroll 1
    for (int once = kHeld ? opaque(1) : 1; once > 0; --once) {
        grid_dependency_wait();
        uint32_t bias = 0, residual = 0;
        const auto load_others = [&] {
            if (stores && p.residual.data) residual = load_bits(p.residual.data, column, p.residual_dtype);
            if (mine && p.bias) bias = load_bits(p.bias, column + (up ? p.columns() : 0), p.bias_dtype);
        };
        if constexpr (kNorm || !kWide) load_others();  // here, because otherwise the compiler delays these loads until x has arrived
        uint4 x[kWide ? kC : 1][2];                    // for steps 0 and 1, and for steps 2 and 3
        uint32_t pairs[kC];
        float2 v[kC];
#pragma unroll
        for (int c = 0; c < kC; ++c) {
            const int k = k0 + c * kTileColumns;
            const X* const from = static_cast<const X*>(p.x.data) + k;
            if constexpr (!kExchanged) {
                x[c][0] = k < p.in_features ? __ldcg(reinterpret_cast<const uint4*>(from)) : make_uint4(0, 0, 0, 0);
                x[c][1] = k + 8 < p.in_features ? __ldcg(reinterpret_cast<const uint4*>(from + 8)) : make_uint4(0, 0, 0, 0);
            } else if constexpr (std::is_same_v<X, float>) {
                v[c] = k < p.in_features ? __ldcg(reinterpret_cast<const float2*>(from)) : make_float2(0, 0);
            } else {
                pairs[c] = k < p.in_features ? __ldcg(reinterpret_cast<const uint32_t*>(from)) : 0;
            }
        }
        if constexpr (!kNorm && kWide) load_others();

        float squares = 0.0f, back = 1.0f;
        if constexpr (kNorm) squares = apply_norm<T>(v, norm, back);
        const auto read = [&](uint4(&to)[2], int c) {
            const auto* const from = reinterpret_cast<const uint4*>(shared.x[kExchanged ? warp : 0][c]) + 2 * q;
            to[0] = from[0], to[1] = from[1];
        };
        if constexpr (kExchanged) {
#pragma unroll
            for (int c = 0; c < kC; ++c) {
                if constexpr (std::is_same_v<X, float>) pairs[c] = pack_16<T>(v[c].x, v[c].y);
                shared.x[warp][c][lane] = pairs[c];
            }
            __syncwarp();
            if constexpr (kWide)
#pragma unroll
                for (int c = 0; c < kC; ++c) read(x[c], c);
        }
        if constexpr (kNorm) squares = warp_sum(squares);  // overlaps the products

        float sums[kR][2] = {};                                    // for rows g and g + 8
        constexpr int kChains = kR * kC == 1 ? 4 : kWide ? 2 : 1;  // independent chains of dependent products
#pragma unroll
        for (int c = 0; c < kC; ++c) {
            uint4(&columns)[2] = x[kWide ? c : 0];
            if constexpr (!kWide) read(columns, c);
#pragma unroll
            for (int r = 0; r < kR; ++r) {
                float chains[kChains][4] = {};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    uint32_t now[4];
                    if constexpr (!kWide) widen<kFormat, T>(now, codes[r][c], j, stored[r][c]);
                    mma<T>(chains[j % kChains], kWide ? a[kWide ? r : 0][kWide ? c : 0][j] : now, (&columns[j / 2].x)[j % 2 * 2],
                           (&columns[j / 2].x)[j % 2 * 2 + 1]);
                }
                float scale[2] = {1.0f, 1.0f};
                if constexpr (kFormat == Format::kInt4) w4::float_scales<kFormat, T>(scale[0], scale[1], stored[r][c]);
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float sum = chains[0][2 * i];
                    if constexpr (kChains > 1) sum += chains[1][2 * i];
                    if constexpr (kChains == 4) sum += chains[2][2 * i] + chains[3][2 * i];
                    sums[r][i] += sum * scale[i];
                }
            }
            if constexpr (!kWide) __syncwarp();  // delays the next loads, for which there are no registers yet
        }
        float part = sums[0][0];  // lane 4 g + q stores row 8 q + g of the block
#pragma unroll
        for (int i = 1; i < 2 * kR; ++i)
            if (q == i) part = sums[i / 2][i % 2];
        if (q < 2 * kR) shared.parts[8 * q + lane / 4][warp] = part * back;
        if (kNorm && lane == 0) shared.parts[kRows][warp] = squares;
        if (warp > 0) {
            bar_arrive(1, blockDim.x);
            return;
        }
        bar_sync(1, blockDim.x);

        float value = sum_of_warps(shared.parts[row]) * factor;
        if constexpr (kNorm) value *= rsqrtf(sum_of_warps(shared.parts[kRows]) * launch.per_feature + p.eps);
        value += value_of(bias, p.bias_dtype);
        if (p.swiglu) value = silu(value) * __shfl_down_sync(~0u, value, 8);
        if (stores) store_element(p.out.data, column, p.out_dtype, value + value_of(residual, p.residual_dtype));
    }
}

struct Plan {
    int rows, columns;  // tiles per warp
    int warps, blocks;
};

// A warp has as few column tiles as the number of warps allows, and two row tiles if one would make more than 1.5 blocks per SM.
Plan plan_of(const W4LinearParams& p, const DeviceInfo& gpu) {
    const int64_t rows = p.swiglu ? ceil_div(p.columns(), 8) : ceil_div(p.out_features, kTileRows),
                  columns = w4::column_tiles(p.in_features);
    Plan plan{1, 1, 0, 0};
    if (2 * rows > 3 * gpu.multiprocessors) plan.rows = 2;
    while (plan.columns * most_warps(plan.rows, plan.columns) < columns) plan.columns *= 2;
    if (plan.columns == kMaxTiles) plan.rows = 1;
    plan.warps = int(ceil_div(columns, plan.columns)), plan.blocks = int(ceil_div(rows, plan.rows));
    return plan;
}

template <Format kFormat, typename T, typename X, Norm kNorm>
cudaError_t launch_x(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    const auto kernel = plan.columns == 4 ? small_w4_kernel<kFormat, T, X, kNorm, 1, 4>
                        : plan.columns == 2
                            ? plan.rows == 1 ? small_w4_kernel<kFormat, T, X, kNorm, 1, 2> : small_w4_kernel<kFormat, T, X, kNorm, 2, 2>
                        : plan.rows == 1 ? small_w4_kernel<kFormat, T, X, kNorm, 1, 1>
                                         : small_w4_kernel<kFormat, T, X, kNorm, 2, 1>;
    const Launch launch{p, int32_t(w4::column_tiles(p.in_features)), 1.0f / float(p.in_features)};
    LaunchOptions options;
    options.programmatic = p.programmatic, options.prefers_shared = true;
    return launch_kernel(kernel, unsigned(plan.blocks), unsigned(32 * plan.warps), 0, stream, launch, options);
}

template <Format kFormat, typename T>
cudaError_t launch_format(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    if (p.norm_weight) return launch_x<kFormat, T, float, Norm::kRms>(p, plan, stream);
    if (p.dtype == p.compute_dtype) return launch_x<kFormat, T, T, Norm::kNone>(p, plan, stream);
    return launch_x<kFormat, T, float, Norm::kNone>(p, plan, stream);
}

}  // namespace

const char* small_w4_refuses(const W4LinearParams& p, const DeviceInfo&, char*, size_t) {
    const auto aligned = [](const void* data, size_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; };
    if (p.rows != 1) return "is for one row of x";
    if (p.in_features % 8 || p.in_features > kMaxWarps * kMaxTiles * kTileColumns) return "in_features are above 4096 or no multiple of 8";
    if (p.dtype != DType::kFloat32 && (p.norm_weight || p.dtype != p.compute_dtype))
        return "takes x in float32, or without a norm in the type that the weight is packed for";
    if (!aligned(p.x.data, 16) || !aligned(p.norm_weight, 8)) return "x is not aligned to 16 bytes, or norm_weight not to 8";
    return nullptr;
}

int64_t small_w4_blocks(const W4LinearParams& p, const DeviceInfo& gpu) { return plan_of(p, gpu).blocks; }

cudaError_t small_w4(const W4LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    const Plan plan = plan_of(p, gpu);
    return w4::with_format_and_type(p,
                                    [&](auto format, auto zero) { return launch_format<format.value, decltype(zero)>(p, plan, stream); });
}

}  // namespace fa
