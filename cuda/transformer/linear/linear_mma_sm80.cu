// linear_mma_sm80.cu: the product of linear_gemv_sm80.cu on tensor cores, for 2 to 8 rows of x and a 16-bit matrix that fits into the
// registers of the GPU. Bound by latency. New against linear_small_sm80.cu, which is faster for one row:
//
//     weights  are loaded into registers, before the kernel waits for x, as B fragments of mma.m16n8k16: tiles of 8 rows of W. A block has
//              kTiles tiles, a warp kChunks x 32 columns of them. Of 32 columns, each lane of a quad takes 8 adjacent ones, 16 contiguous
//              bytes, of W and of x alike: the order in which columns are summed does not matter.
//     x        Each warp copies its own columns to shared memory and waits for no other warp. Row m of x is row m of operand A. An x that
//              is more precise than the weights is split into a sum of two or three 16-bit numbers: row m holds the first, row 8 + m the
//              second, and a second product uses the third.
//     sum      The partial sums of the warps are added once, at the end, together with the squares for the norm.
//
// float16 has a small range, so a warp first multiplies its part of a row by a power of two. An infinity in a float32 x, or in the
// weights, gives NaN.
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

#include <type_traits>

namespace fa {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kMaxRows = 8;

struct Launch {
    LinearParams p;
    float per_feature;  // 1 / in_features
};

template <typename W>
constexpr int kFloatParts = std::is_same_v<W, __half> ? 2 : 3;  // number of 16-bit numbers that add up to a float32
template <int kChunks>
constexpr int kPitch = (kChunks + 1) * 32;  // elements between rows of a warp's part of x, without bank conflicts

// Splits each x into kParts 16-bit numbers. `to` is the address of the first parts; the next parts lie `part_elements` further on.
template <typename W, int kParts>
__device__ __forceinline__ void store_parts(W* to, int part_elements, float (&v)[8]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[i] = pack_16<W>(v[2 * i], v[2 * i + 1]);
            float taken[2];
            unpack_16<W>(taken, packed[i]);
            v[2 * i] -= taken[0], v[2 * i + 1] -= taken[1];
        }
        *reinterpret_cast<uint4*>(to + part * part_elements) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
    }
}

template <typename T>
__device__ __forceinline__ void widen_8(float (&v)[8], uint4 bits, uint4 more) {
    if constexpr (sizeof(T) == 4) {
        const uint32_t x[8] = {bits.x, bits.y, bits.z, bits.w, more.x, more.y, more.z, more.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(x[i]);
    } else {
        const uint32_t x[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) unpack_16<T>(reinterpret_cast<float(&)[2]>(v[2 * i]), x[i]);
    }
}

// kParts: number of 16-bit numbers that represent an element of x. 1: x has the type of the weights.
template <typename W, int kParts, int kTiles, int kChunks>
__global__ void __launch_bounds__(kThreads, 2) linear_mma_kernel(const __grid_constant__ Launch launch) {
    constexpr bool kExact = kParts == 1;
    constexpr int kGroups = 4 * kChunks;                // groups of 8 columns per warp in a row of x
    constexpr int kSets = kTiles < 4 ? 4 / kTiles : 1;  // independent chains of products
    static_assert(32 % kGroups == 0, "a lane takes the same columns in every row");
    extern __shared__ uint4 shared[];
    __shared__ float inverse_of[kWarps][kMaxRows], squares_of[kWarps][kMaxRows], sums_of[kWarps][kMaxRows][8 * kTiles];
    launch_dependents();
    const LinearParams& p = launch.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, q = lane % 4, rows = int(p.rows);
    const int columns = p.columns(), per_block = p.swiglu ? 4 * kTiles : 8 * kTiles, first = blockIdx.x * per_block;

    uint4 w[kTiles][kChunks];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
        const int n = 8 * tile + g, column = min(first + n % per_block, columns - 1) + (n < per_block ? 0 : columns);
        const W* row = static_cast<const W*>(p.weight.data) + column * p.weight.row;
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const int k = (warp * kChunks + c) * 32 + 8 * q;
            w[tile][c] = k < p.in_features ? __ldcg(reinterpret_cast<const uint4*>(row + k)) : make_uint4(0, 0, 0, 0);
        }
    }

    const int group = lane % kGroups, k = (warp * kGroups + group) * 8;  // the first of 8 columns of x that this lane copies
    const bool inside = k < p.in_features;
    float4 norm[2] = {make_float4(1, 1, 1, 1), make_float4(1, 1, 1, 1)};
    if (p.norm_weight && inside) norm[0] = load_4(p.norm_weight, k, p.norm_dtype), norm[1] = load_4(p.norm_weight, k + 4, p.norm_dtype);
    // The element of out that this thread finishes.
    const int n = threadIdx.x % per_block, row = threadIdx.x / per_block, column = first + n;
    const bool mine = row < rows && column < columns;
    W* const x = reinterpret_cast<W*>(shared) + warp * kParts * rows * kPitch<kChunks>;  // (parts, rows, pitch)
    const int part_elements = rows * kPitch<kChunks>, own_row = lane / kGroups;
    const bool wide = p.dtype == DType::kFloat32;
    const char* source = static_cast<const char*>(p.x.data) + (own_row * p.x.row + k) * (wide ? 4 : 2);
    grid_dependency_wait();

    float bias[2] = {}, residual = 0.0f;
    if (p.bias && mine) {
        bias[0] = load_element(p.bias, column, p.bias_dtype);
        if (p.swiglu) bias[1] = load_element(p.bias, column + columns, p.bias_dtype);
    }
    if (p.residual.data && mine) residual = load_element(p.residual.data, row * p.residual.row + column, p.residual_dtype);
#pragma unroll 4
    for (int m = own_row; m - own_row < rows; m += 32 / kGroups) {
        const bool there = inside && m < rows;
        const uint4* const from = reinterpret_cast<const uint4*>(source + (m - own_row) * p.x.row * (wide ? 4 : 2));
        W* const to = x + m * kPitch<kChunks> + 8 * group;
        const uint4 zero = make_uint4(0, 0, 0, 0), bits = there ? __ldcg(from) : zero;
        if constexpr (kExact) {
            if (m < rows) *reinterpret_cast<uint4*>(to) = bits;
        } else {
            float v[8];
            if (wide) {
                const uint4 more = there ? __ldcg(from + 1) : zero;
                widen_8<float>(v, bits, more);
            } else {
                widen_8<W>(v, bits, zero);
            }
            const float by[8] = {norm[0].x, norm[0].y, norm[0].z, norm[0].w, norm[1].x, norm[1].y, norm[1].z, norm[1].w};
            float squares = 0, largest = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) squares += v[i] * v[i], v[i] *= by[i], largest = fmaxf(largest, fabsf(v[i]));
#pragma unroll
            for (int offset = kGroups / 2; offset; offset /= 2) {
                squares += __shfl_xor_sync(~0u, squares, offset);
                if (kParts == 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, offset));
            }
            float inverse = 1;
            if (kParts == 2) {  // 2^14 <= largest * factor < 2^15
                const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 15u), 254u);
                const float factor = __uint_as_float((268 - exponent) << 23);
                inverse = __uint_as_float((exponent - 14) << 23);
#pragma unroll
                for (int i = 0; i < 8; ++i) v[i] *= factor;
            }
            if (m < rows) {
                if (group == 0) inverse_of[warp][m] = inverse, squares_of[warp][m] = squares;
                store_parts<W, kParts>(to, part_elements, v);
            }
        }
    }
    __syncwarp();

    float acc[kTiles][kSets][4] = {};
    const W* const from = x + (g < rows ? g * kPitch<kChunks> : 0) + 8 * q;  // A's rows past the rows of x: results not used
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
        if ((warp * kChunks + c) * 32 >= p.in_features) break;
        uint4 part[3] = {};
        part[0] = *reinterpret_cast<const uint4*>(from + 32 * c);
#pragma unroll
        for (int i = 1; i < kParts; ++i) part[i] = *reinterpret_cast<const uint4*>(from + i * part_elements + 32 * c);
        const uint32_t a[2][4] = {{part[0].x, part[1].x, part[0].y, part[1].y}, {part[0].z, part[1].z, part[0].w, part[1].w}};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            mma<W>(acc[tile][2 * c % kSets], a[0], w[tile][c].x, w[tile][c].y);
            mma<W>(acc[tile][(2 * c + 1) % kSets], a[1], w[tile][c].z, w[tile][c].w);
        }
        if (kParts == 3) {
            const uint32_t third[2][4] = {{part[2].x, 0, part[2].y, 0}, {part[2].z, 0, part[2].w, 0}};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
                mma<W>(acc[tile][2 * c % kSets], third[0], w[tile][c].x, w[tile][c].y);
                mma<W>(acc[tile][(2 * c + 1) % kSets], third[1], w[tile][c].z, w[tile][c].w);
            }
        }
    }
    if (g < rows) {
        const float inverse = kExact ? 1.0f : inverse_of[warp][g];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
            float sum[4] = {};
#pragma unroll
            for (int set = 0; set < kSets; ++set)
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] += acc[tile][set][i];
            *reinterpret_cast<float2*>(&sums_of[warp][g][8 * tile + 2 * q]) =
                kExact ? make_float2(sum[0], sum[1]) : make_float2((sum[0] + sum[2]) * inverse, (sum[1] + sum[3]) * inverse);
        }
    }
    __syncthreads();

    if (!mine) return;
    float value = 0, up = 0, squares = 0;
#pragma unroll
    for (int other = 0; other < kWarps; ++other) {
        value += sums_of[other][row][n];
        if (p.swiglu) up += sums_of[other][row][n + per_block];
        if (p.norm_weight) squares += squares_of[other][row];
    }
    const float scale = p.norm_weight ? rsqrtf(squares * launch.per_feature + p.eps) : 1.0f;
    value = value * scale + bias[0];
    if (p.swiglu) value = silu(value) * (up * scale + bias[1]);
    store_element(p.out.data, row * p.out.row + column, p.out_dtype, value + residual);
}

struct Plan {
    int tiles, chunks, blocks;  // blocks is 0 if the weights do not fit into the registers
};

// Chooses the fewest tiles per block that give at most 1.5 blocks per SM. If none do, the most tiles, if that gives at most two
// blocks per SM.
Plan plan_of(const LinearParams& p, const DeviceInfo& gpu) {
    Plan plan{};
    plan.tiles = p.swiglu ? 2 : 1, plan.chunks = p.in_features <= 1024 ? 4 : 8;
    const int most = plan.chunks == 4 ? 4 : 2;
    const auto blocks = [&] { return (p.out_features + 8 * plan.tiles - 1) / (8 * plan.tiles); };
    while (plan.tiles < most && 2 * blocks() > 3 * gpu.multiprocessors) plan.tiles *= 2;
    if (blocks() <= 2 * gpu.multiprocessors) plan.blocks = blocks();
    return plan;
}

template <typename W, int kParts, int kTiles, int kChunks>
cudaError_t launch_tiles(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    const Launch launch{p, 1.0f / float(p.in_features)};
    const size_t bytes = sizeof(W) * kWarps * kParts * size_t(p.rows) * kPitch<kChunks>;
    return launch_kernel(linear_mma_kernel<W, kParts, kTiles, kChunks>, unsigned(plan.blocks), kThreads, bytes, stream, launch,
                         p.programmatic);
}

template <typename W, int kParts>
cudaError_t launch_shape(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    if (plan.chunks == 4) {
        if (plan.tiles == 1) return launch_tiles<W, kParts, 1, 4>(p, plan, stream);
        if (plan.tiles == 2) return launch_tiles<W, kParts, 2, 4>(p, plan, stream);
        return launch_tiles<W, kParts, 4, 4>(p, plan, stream);
    }
    if (plan.tiles == 1) return launch_tiles<W, kParts, 1, 8>(p, plan, stream);
    return launch_tiles<W, kParts, 2, 8>(p, plan, stream);
}

template <typename W>
cudaError_t launch_type(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    if (p.dtype == p.weight_dtype && !p.norm_weight) return launch_shape<W, 1>(p, plan, stream);
    return launch_shape<W, kFloatParts<W>>(p, plan, stream);
}

}  // namespace

bool linear_mma_serves(const LinearParams& p, const DeviceInfo& gpu) {
    const auto aligned = [](const void* data, int64_t row, DType dtype) {
        return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row * element_bytes(dtype) % 16 == 0;
    };
    if (p.weight_dtype == DType::kFloat32 || p.rows < 2 || p.rows > kMaxRows || p.in_features > 2048 || p.in_features % 8) return false;
    if (p.dtype != DType::kFloat32 && p.dtype != p.weight_dtype) return false;
    if (!aligned(p.weight.data, p.weight.row, p.weight_dtype) || !aligned(p.x.data, p.x.row, p.dtype)) return false;
    return aligned(p.norm_weight, 0, p.norm_dtype) && plan_of(p, gpu).blocks > 0;
}

int64_t linear_mma_blocks(const LinearParams& p, const DeviceInfo& gpu) { return plan_of(p, gpu).blocks; }

cudaError_t linear_mma(const LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    const Plan plan = plan_of(p, gpu);
    return p.weight_dtype == DType::kFloat16 ? launch_type<__half>(p, plan, stream) : launch_type<__nv_bfloat16>(p, plan, stream);
}

}  // namespace fa
