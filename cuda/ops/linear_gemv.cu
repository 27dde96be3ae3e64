// linear_gemv.cu: out = x W^T for a few rows of x, with what stands around a product in a decoder fused to it: RMSNorm of x before,
// bias, SwiGLU and residual after. Bound by the memory W comes from; by latency when W is small.
//
//     block   kWarps warps; a group of `split` warps makes kR columns of out, for kM rows of x. The warps of a group take turns at W's
//             columns, 32 lanes x 16 bytes of each of kR rows at a time, and add up through shared memory.
//     x       widened to float32 in shared memory, so that a lane's four numbers lie beside its neighbour's.
//     norm    sum(w x g) / rms(x): the dot product does not wait for rms(x), whose squares are summed while x is copied.
//     SwiGLU  a group takes kR / 2 gate rows and the up rows that belong to them.
//
// W does not depend on the kernel before this one, so a programmatic launch (ptx.cuh) loads the first kStages x kLoads x kR vectors of W
// into registers and asks for the rest to come to L2 before it waits for x.
#include "device/ptx.cuh"
#include "ops/elements.cuh"
#include "ops/kernels.h"

namespace fa {
namespace {

constexpr int kMaxWarps = 8;
constexpr int kMaxChunkBytes = 64 * 1024;  // where the warps of a group need more
constexpr int kChunkFloats = 12288;        // of x in shared memory at a time: 48 KB, so that four blocks fit on an SM

struct Launch {
    LinearParams p;
    int32_t split;        // warps that share a group's columns of W
    int32_t steps;        // of 32 x 16 bytes along a row of W
    int32_t chunk_steps;  // whose x is in shared memory at a time; a multiple of split * kStages * kLoads, unless it is all steps
    int32_t row_groups;   // ceil(rows / kM)
};

template <typename W>
constexpr int kVector = 16 / int(sizeof(W));

template <typename W>
__device__ __forceinline__ void widen(uint4 bits, float (&w)[kVector<W>]) {
    const W* x = reinterpret_cast<const W*>(&bits);
#pragma unroll
    for (int j = 0; j < kVector<W>; ++j) w[j] = to_float(x[j]);
}

// kVectors: every row of W starts at a multiple of 16 bytes and has whole vectors.
template <typename W, bool kVectors>
__device__ __forceinline__ uint4 load_weights(const W* row, int column, int in_features) {
    constexpr int V = kVector<W>;
    if constexpr (kVectors) {
        return column < in_features ? load_stream(row + column) : make_uint4(0, 0, 0, 0);
    } else {
        uint4 bits = make_uint4(0, 0, 0, 0);
        W* x = reinterpret_cast<W*>(&bits);
#pragma unroll
        for (int j = 0; j < V; ++j)
            if (column + j < in_features) x[j] = row[column + j];
        return bits;
    }
}

// Columns first .. first + columns - 1 of x, times the norm's weight, to shared memory; squares of x are added to `squares`.
// Column k of a step of 32 V columns goes to the float4 (k % V / 4) * 32 + k / V: a quarter warp then reads 128 bytes in a row.
template <int V, int kM>
__device__ __forceinline__ void stage_x(const LinearParams& p, int64_t row0, int first, int columns, bool fours, float4* shared,
                                        float (&squares)[kM]) {
    const int quads = columns / 4;
#pragma unroll 2
    for (int j = threadIdx.x; j < quads; j += blockDim.x) {
        const int k = first + 4 * j, in_step = 4 * j % (32 * V);
        float4 x[kM], g = make_float4(1, 1, 1, 1);
        if (fours) {
            const bool inside = k < p.in_features;
#pragma unroll
            for (int m = 0; m < kM; ++m)
                x[m] = inside && row0 + m < p.rows ? load_4(p.x.data, (row0 + m) * p.x.row + k, p.dtype) : make_float4(0, 0, 0, 0);
            if (p.norm_weight && inside) g = load_4(p.norm_weight, k, p.norm_dtype);
        } else {
#pragma unroll
            for (int m = 0; m < kM; ++m) {
                float* to = &x[m].x;
                for (int i = 0; i < 4; ++i)
                    to[i] =
                        k + i < p.in_features && row0 + m < p.rows ? load_element(p.x.data, (row0 + m) * p.x.row + k + i, p.dtype) : 0.0f;
            }
            if (p.norm_weight)
                for (int i = 0; i < 4; ++i) (&g.x)[i] = k + i < p.in_features ? load_element(p.norm_weight, k + i, p.norm_dtype) : 0.0f;
        }
        const int at = 4 * j / (32 * V) * (8 * V) + in_step % V / 4 * 32 + in_step / V;
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            if (p.norm_weight) {
                squares[m] += x[m].x * x[m].x + x[m].y * x[m].y + x[m].z * x[m].z + x[m].w * x[m].w;
                x[m] = make_float4(x[m].x * g.x, x[m].y * g.y, x[m].z * g.z, x[m].w * g.w);
            }
            shared[m * quads + at] = x[m];
        }
    }
}

template <typename W, int kM, int kR, bool kVectors>
__global__ void __launch_bounds__(32 * kMaxWarps, kM <= 4 ? 2 : 1) linear_gemv_kernel(const __grid_constant__ Launch launch) {
    constexpr int V = kVector<W>, kStages = 2, kLoads = kR == 1 ? 4 : kR == 2 ? 2 : 1;
    static_assert(kM * kR <= 32, "a lane for each number a warp makes");
    extern __shared__ float4 x_shared[];  // (kM, chunk_steps * 32 V) floats
    __shared__ float parts[kMaxWarps][kM * kR], squares_of[kMaxWarps][kM];

    const LinearParams& p = launch.p;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, split = launch.split, part = warp % split;
    const int64_t row0 = int64_t(blockIdx.x % launch.row_groups) * kM;
    const int columns = p.columns(), per_group = p.swiglu ? kR / 2 : kR;
    const int64_t group = int64_t(blockIdx.x / launch.row_groups) * (warps / split) + warp / split, first = group * per_group;
    const W* rows[kR];
#pragma unroll
    for (int r = 0; r < kR; ++r) {
        const int64_t column = first + r % per_group;  // beyond the last: the last once more, and nothing is stored
        rows[r] = static_cast<const W*>(p.weight.data) +
                  ((column < columns ? column : columns - 1) + (r < per_group ? 0 : columns)) * p.weight.row;
    }

    uint4 w[kStages][kLoads][kR];
    const auto load = [&](uint4(&to)[kLoads][kR], int turn) {
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
            const int step = part + (turn + u) * split;
            if (step < launch.steps)
#pragma unroll
                for (int r = 0; r < kR; ++r) to[u][r] = load_weights<W, kVectors>(rows[r], (step * 32 + lane) * V, p.in_features);
        }
    };
    for (int s = 0; s < kStages; ++s) load(w[s], s * kLoads);
    launch_dependents();
    if (p.programmatic) {
        for (int step = part + kStages * kLoads * split; step < launch.steps; step += split)
            if (const int column = (step * 32 + lane) * V; lane % 8 == 0 && column < p.in_features)
                for (int r = 0; r < kR; ++r) prefetch_l2(rows[r] + column);
        if (p.norm_weight && threadIdx.x * 32 < p.in_features)
            prefetch_l2(static_cast<const char*>(p.norm_weight) + threadIdx.x * 32 * (p.norm_dtype == DType::kFloat32 ? 4 : 2));
    }
    grid_dependency_wait();

    float sums[kM][kR] = {}, squares[kM] = {};
    const int chunks = (launch.steps + launch.chunk_steps - 1) / launch.chunk_steps, quads = launch.chunk_steps * 8 * V;
    const bool fours = p.in_features % 4 == 0 && p.x.row % (p.rows > 1 ? 4 : 1) == 0 &&
                       reinterpret_cast<uintptr_t>(p.x.data) % (p.dtype == DType::kFloat32 ? 16 : 8) == 0 &&
                       reinterpret_cast<uintptr_t>(p.norm_weight) % (p.norm_dtype == DType::kFloat32 ? 16 : 8) == 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk) __syncthreads();  // the last chunk has been read
        stage_x<V, kM>(p, row0, chunk * launch.chunk_steps * 32 * V, 4 * quads, fours, x_shared, squares);
        if (p.norm_weight && chunk == chunks - 1)
#pragma unroll
            for (int m = 0; m < kM; ++m)
                if (const float sum = warp_sum(squares[m]); lane == 0) squares_of[warp][m] = sum;
        __syncthreads();

        const int turns_before = chunk * (launch.chunk_steps / split);  // chunks > 1: a whole number
        const int end = min(launch.steps, (chunk + 1) * launch.chunk_steps);
        for (int turn = turns_before; part + turn * split < end; turn += kStages * kLoads) {
#pragma unroll
            for (int s = 0; s < kStages; ++s) {
#pragma unroll
                for (int u = 0; u < kLoads; ++u) {
                    const int step = part + (turn + s * kLoads + u) * split;
                    if (step >= end) break;
                    const float4* x = x_shared + (step - chunk * launch.chunk_steps) * 8 * V + lane;
                    float wide[kR][V];
#pragma unroll
                    for (int r = 0; r < kR; ++r) widen<W>(w[s][u][r], wide[r]);
#pragma unroll
                    for (int m = 0; m < kM; ++m) {
                        float sum[kR] = {};
#pragma unroll
                        for (int quad = 0; quad < V / 4; ++quad) {
                            const float4 v = x[m * quads + quad * 32];
#pragma unroll
                            for (int r = 0; r < kR; ++r) {
                                const float* a = wide[r] + 4 * quad;
                                sum[r] += a[0] * v.x, sum[r] += a[1] * v.y, sum[r] += a[2] * v.z, sum[r] += a[3] * v.w;
                            }
                        }
#pragma unroll
                        for (int r = 0; r < kR; ++r) sums[m][r] += sum[r];
                    }
                }
                load(w[s], turn + (kStages + s) * kLoads);
            }
        }
    }

    // Lane m * kR + r finishes row m, column r.
    float value = 0.0f;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int r = 0; r < kR; ++r)
            if (const float sum = warp_sum(sums[m][r]); lane == m * kR + r) value = sum;
    if (split > 1) {
        if (lane < kM * kR) parts[warp][lane] = value;
        __syncthreads();
        if (part) return;
        if (lane < kM * kR)
            for (int other = 1; other < split; ++other) value += parts[warp + other][lane];
    }
    const int m = lane / kR % kM, r = lane % kR;
    const int64_t row = row0 + m, column = first + r % per_group;
    const bool mine = lane < kM * kR && row < p.rows && column < columns;
    if (p.norm_weight) {
        float sum = 0.0f;
        for (int other = 0; other < warps; ++other) sum += squares_of[other][m];
        value *= 1.0f / sqrtf(sum / p.in_features + p.eps);
    }
    if (p.bias && mine) value += load_element(p.bias, column + (r < per_group ? 0 : columns), p.bias_dtype);
    if (p.swiglu) value = silu(value) * __shfl_down_sync(~0u, value, per_group);
    if (!mine || r >= per_group) return;
    if (p.residual.data) value += load_element(p.residual.data, row * p.residual.row + column, p.residual_dtype);
    store_element(p.out.data, row * p.out.row + column, p.out_dtype, value);
}

struct Plan {
    int m, r, split, warps;  // kM, kR, and what the launch decides
    bool vectors;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int vector_of(const LinearParams& p) { return p.weight_dtype == DType::kFloat32 ? 4 : 8; }

// How the work is cut. Rows of W a warp reads together share each number of x, and keep more bytes on their way from memory; but a small
// matrix has to be spread over the whole GPU first.
Plan plan_of(const LinearParams& p, int multiprocessors) {
    Plan plan{};
    plan.m = p.rows == 1 ? 1 : p.rows == 2 ? 2 : p.rows <= 4 ? 4 : 8;
    plan.vectors =
        reinterpret_cast<uintptr_t>(p.weight.data) % 16 == 0 && p.weight.row % vector_of(p) == 0 && p.in_features % vector_of(p) == 0;
    const int64_t warps_wanted = 16 * int64_t(multiprocessors);
    plan.r = plan.m == 1 && plan.vectors && !p.swiglu && p.out_features < 2 * warps_wanted ? 1 : 2;
    if (plan.vectors && plan.m <= 4 && p.out_features >= 8 * warps_wanted) plan.r = 4;
    plan.warps = kMaxWarps;
    plan.split = 1;
    const int64_t steps = ceil_div(p.in_features, 32 * vector_of(p));
    const int step_bytes = plan.m * 32 * vector_of(p) * int(sizeof(float)), turns = plan.r == 4 ? 2 : plan.r == 2 ? 4 : 8;
    while (plan.split < plan.warps && 2 * plan.split * turns * step_bytes <= kMaxChunkBytes &&
           plan.split * p.out_features / plan.r < warps_wanted && steps >= 4 * plan.split)
        plan.split *= 2;
    return plan;
}

int64_t blocks_of(const LinearParams& p, const Plan& plan) {
    const int per_group = p.swiglu ? plan.r / 2 : plan.r;
    return ceil_div(ceil_div(p.columns(), per_group), plan.warps / plan.split) * ceil_div(p.rows, plan.m);
}

template <typename W, int kM, int kR, bool kVectors>
cudaError_t launch_gemv(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    constexpr int kTurns = kR == 4 ? 2 : kR == 2 ? 4 : 8;  // kStages * kLoads
    Launch launch{p, plan.split, int32_t(ceil_div(p.in_features, 32 * kVector<W>)), 0, int32_t(ceil_div(p.rows, kM))};
    const int unit = plan.split * kTurns, fitting = kChunkFloats / (kM * 32 * kVector<W>);
    launch.chunk_steps = launch.steps <= fitting ? launch.steps : (fitting / unit > 1 ? fitting / unit : 1) * unit;
    if (launch.chunk_steps > launch.steps) launch.chunk_steps = launch.steps;
    const size_t shared = sizeof(float) * kM * 32 * kVector<W> * size_t(launch.chunk_steps);
    return launch_kernel(linear_gemv_kernel<W, kM, kR, kVectors>, unsigned(blocks_of(p, plan)), 32 * plan.warps, shared, stream, launch,
                         p.programmatic);
}

template <typename W, int kM>
cudaError_t launch_rows(const LinearParams& p, const Plan& plan, cudaStream_t stream) {
    if (!plan.vectors) return launch_gemv<W, kM, 2, false>(p, plan, stream);
    if constexpr (kM == 1)
        if (plan.r == 1) return launch_gemv<W, kM, 1, true>(p, plan, stream);
    if constexpr (kM <= 4)
        if (plan.r == 4) return launch_gemv<W, kM, 4, true>(p, plan, stream);
    return launch_gemv<W, kM, 2, true>(p, plan, stream);
}

}  // namespace

int64_t linear_gemv_blocks(const LinearParams& p, int multiprocessors) { return blocks_of(p, plan_of(p, multiprocessors)); }

cudaError_t linear_gemv(const LinearParams& p, int multiprocessors, cudaStream_t stream) {
    const Plan plan = plan_of(p, multiprocessors);
    return with_dtype(p.weight_dtype, [&](auto zero) {
        using W = decltype(zero);
        switch (plan.m) {
            case 1: return launch_rows<W, 1>(p, plan, stream);
            case 2: return launch_rows<W, 2>(p, plan, stream);
            case 4: return launch_rows<W, 4>(p, plan, stream);
            default: return launch_rows<W, 8>(p, plan, stream);
        }
    });
}

}  // namespace fa
