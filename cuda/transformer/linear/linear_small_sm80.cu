// linear_small_sm80.cu: the product of linear_gemv_sm80.cu for one row of x and a matrix that fits into the registers of the GPU. Bound by
// latency: the small products of a decoder follow each other so quickly that only the path from x to out counts. New against
// linear_gemv_sm80.cu: everything that does not depend on x is done before the kernel waits for x:
//
//     before x  Every lane loads its weights, kTurns x 16 bytes of each of kR rows, and its part of the norm's weight into registers.
//     x         One or two 16-byte loads per thread. x goes to shared memory as float32, times the norm's weight; the thread keeps
//               the sum of its squares.
//     sum       Dot products of registers with shared memory. The squares are added up at the same time, not before.
//
// A group of `split` warps computes kR columns of out (with SwiGLU kR / 2, from gate and up rows). A block has one or more groups.
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

namespace fa {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMostTurns = 4;               // turns of a warp along a row of W, at most; a turn is 32 lanes x 16 bytes
constexpr int kMaxColumns = 2048;           // of x
constexpr size_t kMost = size_t(14) << 20;  // bytes of weights; larger matrices were not measured

struct Launch {
    LinearParams p;
    int32_t split;      // warps of a group, a power of two
    float per_feature;  // 1 / in_features
};

template <typename W>
__device__ __forceinline__ void widen(uint4 bits, float (&w)[16 / sizeof(W)]) {
    const W* x = reinterpret_cast<const W*>(&bits);
#pragma unroll
    for (int j = 0; j < int(16 / sizeof(W)); ++j) w[j] = to_float(x[j]);
}

// Sums each of kR numbers over the lanes of a warp. The sum of number r goes to lane r * 32 / kR.
template <int kR>
__device__ __forceinline__ float warp_sums(const float (&x)[kR], int lane) {
    float kept[kR];
#pragma unroll
    for (int r = 0; r < kR; ++r) kept[r] = x[r];
    int offset = 16;
#pragma unroll
    for (int half = kR / 2; half; half /= 2, offset /= 2)  // a lane keeps half of its numbers and passes on the other half
#pragma unroll
        for (int r = 0; r < half; ++r) {
            const bool upper = lane & offset;
            const float passed = __shfl_xor_sync(~0u, upper ? kept[r] : kept[r + half], offset);
            kept[r] = (upper ? kept[r + half] : kept[r]) + passed;
        }
#pragma unroll
    for (; offset; offset /= 2) kept[0] += __shfl_xor_sync(~0u, kept[0], offset);
    return kept[0];
}

// X is the type of x, float or W; with a norm it is float. kLoads: 16-byte loads of x per thread.
template <typename W, typename X, Norm kNormOfX, int kLoads, int kR, int kTurns>
__global__ void __launch_bounds__(kThreads, 2) linear_small_kernel(const __grid_constant__ Launch launch) {
    constexpr bool kNorm = kNormOfX == Norm::kRms;
    constexpr int V = 16 / int(sizeof(W));
    // Column k of a turn of 32 V columns is stored in float4 (k % V / 4) * 32 + k / V, so that a quarter warp reads 128 contiguous bytes.
    __shared__ float4 x[kMaxColumns / 4];
    __shared__ float squares_of[kThreads], parts[kWarps][kR];
    launch_dependents();
    const LinearParams& p = launch.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = launch.split, part = warp & (split - 1);
    const int columns = p.columns(), per_group = p.swiglu ? kR / 2 : kR, r = lane / (32 / kR);
    const int first = (blockIdx.x * kWarps + warp) / split * per_group;

    uint4 w[kR][kTurns];
#pragma unroll
    for (int i = 0; i < kR; ++i) {
        const int column = min(first + i % per_group, columns - 1) + (i < per_group ? 0 : columns);
        const W* row = static_cast<const W*>(p.weight.data) + column * p.weight.row;
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
            const int k = ((turn * split + part) * 32 + lane) * V;
            w[i][turn] = k < p.in_features ? __ldcg(reinterpret_cast<const uint4*>(row + k)) : make_uint4(0, 0, 0, 0);
        }
    }

    // Lane r * 32 / kR of the first warp of a group finishes row r of the group. With SwiGLU the lane of a gate row stores to out.
    const int column = first + r % per_group;
    const bool mine = lane % (32 / kR) == 0 && part == 0 && column < columns, stores = mine && r < per_group;
    constexpr int kEach = 16 / int(sizeof(X));
    const int padded = (p.in_features + 32 * V - 1) & -(32 * V);
    float4 g = make_float4(1, 1, 1, 1);
    if (kNorm && 4 * int(threadIdx.x) < p.in_features) g = load_4(p.norm_weight, 4 * threadIdx.x, p.norm_dtype);
    grid_dependency_wait();

    uint4 bits[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int at = i * kThreads + threadIdx.x;
        bits[i] = at * kEach < p.in_features ? __ldcg(static_cast<const uint4*>(p.x.data) + at) : make_uint4(0, 0, 0, 0);
    }
    const float bias = p.bias && mine ? load_element(p.bias, column + (r < per_group ? 0 : columns), p.bias_dtype) : 0.0f;
    const float residual = p.residual.data && stores ? load_element(p.residual.data, column, p.residual_dtype) : 0.0f;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        const int k = (i * kThreads + threadIdx.x) * kEach, in_turn = k % (32 * V);
        float4* const to = x + k / (32 * V) * (8 * V) + in_turn % V / 4 * 32 + in_turn / V;
        float v[kEach];
        widen<X>(bits[i], v);
        if (k < padded) {
            to[0] = make_float4(v[0] * g.x, v[1] * g.y, v[2] * g.z, v[3] * g.w);
            if constexpr (kEach == 8) to[32] = make_float4(v[4], v[5], v[6], v[7]);
        }
        if (kNorm) squares_of[threadIdx.x] = v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3];
    }
    __syncthreads();

    float sums[kR] = {};
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int step = turn * split + part;
        if (turn && step * 32 * V >= p.in_features) break;
        float4 v[V / 4];
#pragma unroll
        for (int quad = 0; quad < V / 4; ++quad) v[quad] = x[step * 8 * V + quad * 32 + lane];
#pragma unroll
        for (int i = 0; i < kR; ++i) {
            float a[V];
            widen<W>(w[i][turn], a);
#pragma unroll
            for (int quad = 0; quad < V / 4; ++quad) {
                const float4 f = v[quad];
                sums[i] += a[4 * quad] * f.x, sums[i] += a[4 * quad + 1] * f.y;
                sums[i] += a[4 * quad + 2] * f.z, sums[i] += a[4 * quad + 3] * f.w;
            }
        }
    }
    float value = warp_sums(sums, lane), scale = 1.0f;
    if (kNorm) {
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < kThreads / 32; ++i) squares += squares_of[32 * i + lane];
        scale = rsqrtf(warp_sum(squares) * launch.per_feature + p.eps);
    }
    if (split > 1) {
        if (lane % (32 / kR) == 0) parts[warp][r] = value;
        __syncthreads();
        if (mine)
            for (int other = 1; other < split; ++other) value += parts[warp + other][r];
    }
    value = value * scale + bias;
    if (p.swiglu) value = silu(value) * __shfl_down_sync(~0u, value, 16);
    if (stores) store_element(p.out.data, column, p.out_dtype, value + residual);
}

struct Plan {
    int r, split, blocks;
};

// A row has as few warps as kMostTurns allows. A warp takes four rows instead of two if two would make more than 1.5 blocks per SM.
Plan plan_of(const LinearParams& p, const DeviceInfo& gpu) {
    const int64_t steps = ceil_div(p.in_features, 32 * p.vector());
    Plan plan{2, 1, 0};
    while (plan.split * kMostTurns < steps) plan.split *= 2;
    const auto blocks = [&] { return int(ceil_div(ceil_div(p.columns(), p.swiglu ? plan.r / 2 : plan.r), kWarps / plan.split)); };
    if (plan.split <= kWarps && 2 * blocks() > 3 * gpu.multiprocessors) plan.r = 4;
    if (plan.split <= kWarps) plan.blocks = blocks();
    return plan;
}

template <typename W, typename X, Norm kNorm, int kLoads>
cudaError_t launch_small(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    const Launch launch{p, plan.split, 1.0f / float(p.in_features)};
    const int64_t turns = ceil_div(ceil_div(p.in_features, 32 * p.vector()), plan.split);
    const auto kernel = plan.r == 2
                            ? turns <= 3 ? linear_small_kernel<W, X, kNorm, kLoads, 2, 3> : linear_small_kernel<W, X, kNorm, kLoads, 2, 4>
                        : turns <= 3 ? linear_small_kernel<W, X, kNorm, kLoads, 4, 3>
                                     : linear_small_kernel<W, X, kNorm, kLoads, 4, 4>;
    return launch_kernel(kernel, unsigned(plan.blocks), kThreads, 0, stream, launch, p.programmatic);
}

template <typename W>
cudaError_t launch_type(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    if (p.norm_weight) return launch_small<W, float, Norm::kRms, 1>(p, plan, stream);
    if constexpr (sizeof(W) == 2)
        if (p.dtype == p.weight_dtype) return launch_small<W, W, Norm::kNone, 1>(p, plan, stream);
    return p.in_features <= 4 * kThreads ? launch_small<W, float, Norm::kNone, 1>(p, plan, stream)
                                         : launch_small<W, float, Norm::kNone, 2>(p, plan, stream);
}

}  // namespace

bool linear_small_serves(const LinearParams& p, const DeviceInfo& gpu) {
    const int64_t x_bytes = int64_t(element_bytes(p.dtype)) * p.in_features;
    const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
    if (p.dtype != DType::kFloat32 && (p.dtype != p.weight_dtype || p.norm_weight)) return false;
    if (p.rows != 1 || x_bytes > 16 * (p.dtype == DType::kFloat32 && !p.norm_weight ? 2 : 1) * kThreads || p.in_features > kMaxColumns ||
        p.in_features % 8)
        return false;
    if (!aligned(p.x.data) || !aligned(p.norm_weight) || !aligned(p.weight.data) || p.weight.row % p.vector()) return false;
    if (size_t(element_bytes(p.weight_dtype)) * p.in_features * p.out_features > kMost) return false;
    const Plan plan = plan_of(p, gpu);
    return plan.blocks > 0 && plan.blocks <= 2 * gpu.multiprocessors;
}

int64_t linear_small_blocks(const LinearParams& p, const DeviceInfo& gpu) { return plan_of(p, gpu).blocks; }

cudaError_t linear_small(const LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    const Plan plan = plan_of(p, gpu);
    return with_dtype(p.weight_dtype, [&](auto zero) { return launch_type<decltype(zero)>(p, plan, stream); });
}

}  // namespace fa
