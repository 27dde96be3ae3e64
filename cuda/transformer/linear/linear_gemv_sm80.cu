// linear_gemv_sm80.cu: out = residual + act(norm(x) W^T + bias) for a few rows of x and any types: a product with RMSNorm, bias, SwiGLU and
// residual fused. Bound by reading W from memory; with a small W by latency.
//
//     group   kR columns of out, computed by `split` warps that divide the columns of W. In one turn a warp takes 32 lanes x 16 bytes of
//             each of kR rows of W. A block has one group per `split` warps, and walks over the matrix with the stride of the grid.
//     ring    Every thread copies (cp.async) the weights that it will use itself, kRing x 16 bytes ahead, to its own part of shared memory.
//             That takes no barrier and no registers, and the copies continue from group to group.
//     x       is widened to float32 once, in shared memory, in an order that lets neighbouring lanes read neighbouring groups of four.
//     norm    sum(w x g) / rms(x): the dot product does not wait for rms(x). The squares are summed while x is copied.
//     SwiGLU  A group takes kR / 2 gate rows and the matching up rows.
//
// W does not depend on the kernel before this one, so a programmatic launch (ptx.cuh) fills the ring before it waits for x. With a small x,
// the ring and x take less than half of an SM's shared memory. Then this kernel and the next are on the SM together, so memory is read even
// while the result of one becomes the input of the next.
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

namespace fa {
namespace {

constexpr int kMaxWarps = 8;
constexpr size_t kStaticShared = 4096;  // upper limit in bytes: static shared memory and the system's reserve
constexpr int kRing = 20;               // 16-byte vectors in flight per thread

struct Launch {
    LinearParams p;
    int32_t split;       // warps of a group, which divide the columns of W
    int32_t steps;       // of 32 x 16 bytes along a row of W
    int64_t walks;       // steps of all blocks together over the columns of out
    float per_feature;   // 1 / in_features
    int32_t row_blocks;  // ceil(rows / kM); blocks with consecutive indices that use the same weights
};

template <typename W>
constexpr int kVector = 16 / int(sizeof(W));

template <typename W>
__device__ __forceinline__ void widen(uint4 bits, float (&w)[kVector<W>]) {
    const W* x = reinterpret_cast<const W*>(&bits);
#pragma unroll
    for (int j = 0; j < kVector<W>; ++j) w[j] = to_float(x[j]);
}

// kCopy: elements per copy. kVector<W> requires that every row of W starts at a multiple of 16 bytes and consists of whole
// vectors; 1 does not.
template <typename W, int kCopy>
__device__ __forceinline__ void copy_weights(uint4* shared, const W* row, int column, int in_features) {
    if constexpr (kCopy == kVector<W>) {
        const bool inside = column < in_features;
        cp_async_16(uint32_t(__cvta_generic_to_shared(shared)), inside ? row + column : row, inside ? 16 : 0);
    } else {
        uint4 bits = make_uint4(0, 0, 0, 0);
        W* x = reinterpret_cast<W*>(&bits);
#pragma unroll
        for (int j = 0; j < kVector<W>; ++j)
            if (column + j < in_features) x[j] = row[column + j];
        *shared = bits;
    }
}

// Copies x, times the norm's weight, to shared memory, and adds the squares of x to `squares`. Column k of a step of 32 V columns goes to
// float4 (k % V / 4) * 32 + k / V, so that a quarter warp reads 128 contiguous bytes.
template <int V, int kM>
__device__ __forceinline__ void stage_x(const LinearParams& p, int64_t row0, int steps, float4* shared, float (&squares)[kM]) {
    const int quads = steps * 8 * V;
    const bool fours = p.in_features % 4 == 0 && (p.rows == 1 || p.x.row % 4 == 0) &&
                       reinterpret_cast<uintptr_t>(p.x.data) % (p.dtype == DType::kFloat32 ? 16 : 8) == 0 &&
                       reinterpret_cast<uintptr_t>(p.norm_weight) % (p.norm_dtype == DType::kFloat32 ? 16 : 8) == 0;
#pragma unroll 2
    for (int j = threadIdx.x; j < quads; j += blockDim.x) {
        const int k = 4 * j, in_step = k % (32 * V), at = k / (32 * V) * (8 * V) + in_step % V / 4 * 32 + in_step / V;
        float4 x[kM], g = make_float4(1, 1, 1, 1);
        if (fours) {
            const bool inside = k < p.in_features;
#pragma unroll
            for (int m = 0; m < kM; ++m)
                x[m] = inside && row0 + m < p.rows ? load_4(p.x.data, (row0 + m) * p.x.row + k, p.dtype) : make_float4(0, 0, 0, 0);
            if (p.norm_weight && inside) g = load_4(p.norm_weight, k, p.norm_dtype);
        } else {
            for (int i = 0; i < 4; ++i) {
                const bool inside = k + i < p.in_features;
#pragma unroll
                for (int m = 0; m < kM; ++m)
                    (&x[m].x)[i] = inside && row0 + m < p.rows ? load_element(p.x.data, (row0 + m) * p.x.row + k + i, p.dtype) : 0.0f;
                if (p.norm_weight) (&g.x)[i] = inside ? load_element(p.norm_weight, k + i, p.norm_dtype) : 0.0f;
            }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) {
            if (p.norm_weight) {
                squares[m] += sum_of_squares(x[m]);
                x[m] = make_float4(x[m].x * g.x, x[m].y * g.y, x[m].z * g.z, x[m].w * g.w);
            }
            shared[m * quads + at] = x[m];
        }
    }
}

// kM: rows of x per block.
template <typename W, int kM, int kR, int kCopy>
__global__ void __launch_bounds__(32 * kMaxWarps, 2) linear_gemv_kernel(const __grid_constant__ Launch launch) {
    constexpr int V = kVector<W>, kTurns = kRing / kR;
    static_assert(kM * kR <= 32, "each lane finishes at most one number of a group");
    extern __shared__ uint4 shared[];
    __shared__ float parts[2][kMaxWarps][kM * kR], squares_of[kMaxWarps][kM];
    const LinearParams& p = launch.p;
    const int threads = blockDim.x, warps = threads / 32, lane = threadIdx.x % 32, warp = threadIdx.x / 32, split = launch.split,
              part = warp % split, steps = launch.steps;
    uint4* const ring = shared + threadIdx.x;                               // (kTurns, kR) vectors, `threads` apart
    float4* const x = reinterpret_cast<float4*>(shared + kRing * threads);  // (kM, steps * 32 V) floats
    const int columns = p.columns(), per_group = p.swiglu ? kR / 2 : kR, stride = gridDim.x / launch.row_blocks;
    const int64_t row0 = int64_t(blockIdx.x % launch.row_blocks) * kM, walk0 = blockIdx.x / launch.row_blocks;
    const auto first_column = [&](int64_t walk) { return (walk * (warps / split) + warp / split) * per_group; };

    // The next weights to copy.
    int64_t next_walk = walk0;
    int next_step = part, slot = 0;
    const W* rows[kR];
    const auto find_rows = [&] {
#pragma unroll
        for (int r = 0; r < kR; ++r) {
            const int64_t column = first_column(next_walk) + r % per_group;  // past the last column: the last column again, not stored
            rows[r] = static_cast<const W*>(p.weight.data) +
                      ((column < columns ? column : columns - 1) + (r < per_group ? 0 : columns)) * p.weight.row;
        }
    };
    const auto copy_turn = [&] {
        if (next_walk < launch.walks) {
#pragma unroll
            for (int r = 0; r < kR; ++r)
                copy_weights<W, kCopy>(ring + (slot * kR + r) * threads, rows[r], (next_step * 32 + lane) * V, p.in_features);
            next_step += split;
            if (next_step >= steps) {
                next_step = part, next_walk += stride;
                find_rows();
            }
        }
        cp_async_commit();  // also for an empty turn, to keep the number of groups right
        slot = slot + 1 == kTurns ? 0 : slot + 1;
    };
    find_rows();
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) copy_turn();
    launch_dependents();
    if (p.norm_weight && p.programmatic)
        for (int k = 32 * threadIdx.x; k < p.in_features; k += 32 * threads)
            prefetch_l2(static_cast<const char*>(p.norm_weight) + k * (p.norm_dtype == DType::kFloat32 ? 4 : 2));
    grid_dependency_wait();

    // Lane m * kR + r finishes row m, column r of a group.
    const int m = lane / kR % kM, r = lane % kR;
    const int64_t row = row0 + m;
    const auto added_to = [&](int64_t column) {  // the residual, loaded early to hide the latency of memory
        if (!p.residual.data || lane >= kM * kR || r >= per_group || row >= p.rows || column >= columns) return 0.0f;
        return load_element(p.residual.data, row * p.residual.row + column, p.residual_dtype);
    };
    float residual = added_to(first_column(walk0) + r);
    float squares[kM] = {}, scale = 1.0f;
    stage_x<V, kM>(p, row0, steps, x, squares);
    if (p.norm_weight) {
#pragma unroll
        for (int i = 0; i < kM; ++i)
            if (const float sum = warp_sum(squares[i]); lane == 0) squares_of[warp][i] = sum;
    }
    __syncthreads();
    if (p.norm_weight) {
        float sum = 0.0f;
        for (int other = 0; other < warps; ++other) sum += squares_of[other][m];
        scale = rsqrtf(sum * launch.per_feature + p.eps);
    }

    int buffer = 0;
    for (int64_t walk = walk0; walk < launch.walks; walk += stride) {
        float sums[kM][kR] = {};
        for (int step = part; step < steps; step += split) {
            cp_async_wait_group<kTurns - 1>();
            float w[kR][V];
#pragma unroll
            for (int i = 0; i < kR; ++i) widen<W>(ring[(slot * kR + i) * threads], w[i]);
            copy_turn();  // into the slot that was just read
            const float4* from = x + step * 8 * V + lane;
#pragma unroll
            for (int i = 0; i < kM; ++i) {
                float sum[kR] = {};
#pragma unroll
                for (int quad = 0; quad < V / 4; ++quad) {
                    const float4 v = from[i * steps * 8 * V + quad * 32];
#pragma unroll
                    for (int j = 0; j < kR; ++j) {
                        const float* a = w[j] + 4 * quad;
                        sum[j] += a[0] * v.x, sum[j] += a[1] * v.y, sum[j] += a[2] * v.z, sum[j] += a[3] * v.w;
                    }
                }
#pragma unroll
                for (int j = 0; j < kR; ++j) sums[i][j] += sum[j];
            }
        }

        float value = 0.0f;
#pragma unroll
        for (int i = 0; i < kM; ++i)
#pragma unroll
            for (int j = 0; j < kR; ++j)
                if (const float sum = warp_sum(sums[i][j]); lane == i * kR + j) value = sum;
        if (split > 1) {
            if (lane < kM * kR) parts[buffer][warp][lane] = value;
            __syncthreads();  // one barrier per walk suffices, because it also orders reads of the other buffer
            if (part == 0 && lane < kM * kR)
                for (int other = 1; other < split; ++other) value += parts[buffer][warp + other][lane];
            buffer ^= 1;
        }
        const int64_t column = first_column(walk) + r % per_group;
        const bool mine = part == 0 && lane < kM * kR && row < p.rows && column < columns;
        value *= scale;
        if (p.bias && mine) value += load_element(p.bias, column + (r < per_group ? 0 : columns), p.bias_dtype);
        if (p.swiglu) value = silu(value) * __shfl_down_sync(~0u, value, per_group);
        if (mine && r < per_group) store_element(p.out.data, row * p.out.row + column, p.out_dtype, value + residual);
        if (walk + stride < launch.walks) residual = added_to(first_column(walk + stride) + r);
    }
}

struct Plan {
    int m, r;  // kM, kR
    int warps, split, blocks_per_sm;
    bool vectors;  // a copy takes kVector<W> elements, not 1
};

int64_t steps_of(const LinearParams& p) { return ceil_div(p.in_features, 32 * p.vector()); }
size_t shared_of(const LinearParams& p, int m, int warps) {
    return size_t(kRing) * 32 * warps * 16 + sizeof(float) * 32 * p.vector() * size_t(m) * size_t(steps_of(p));
}

int64_t walks_of(const LinearParams& p, const Plan& plan) {
    const int per_group = p.swiglu ? plan.r / 2 : plan.r;
    return ceil_div(ceil_div(p.columns(), per_group), plan.warps / plan.split);
}

// How the work is divided. With more rows of W per warp, each element of x is read less often, but a small matrix must first be spread over
// the GPU. All rows of x in a block must fit into shared memory beside the ring. The limits were measured on an H200.
Plan plan_of(const LinearParams& p, const DeviceInfo& gpu) {
    const size_t room = gpu.shared_memory - kStaticShared;
    const int64_t steps = steps_of(p), sms = gpu.multiprocessors;
    Plan plan{};
    plan.m = p.rows == 1 ? 1 : p.rows == 2 ? 2 : 4;
    plan.warps = kMaxWarps;
    while (plan.m > 1 && shared_of(p, plan.m, plan.warps) > room) plan.m /= 2;
    while (plan.warps > 1 && shared_of(p, plan.m, plan.warps) > room) plan.warps /= 2;
    plan.vectors =
        reinterpret_cast<uintptr_t>(p.weight.data) % 16 == 0 && p.weight.row % p.vector() == 0 && p.in_features % p.vector() == 0;
    plan.r = plan.vectors && p.out_features >= 24 * sms ? 4 : 2;
    plan.blocks_per_sm = 2 * (shared_of(p, plan.m, plan.warps) + kStaticShared) <= gpu.shared_memory ? 2 : 1;

    // Groups of several warps make smaller pieces of work. A small matrix needs them to reach half of the SMs; beyond that, more blocks
    // cost more than they gain. A large matrix needs them where larger pieces would leave some blocks with less work than others.
    const bool large = p.out_features * steps >= 32768;  // 16 MB
    const double places = double(sms * plan.blocks_per_sm);
    double best = 0;
    Plan cut = plan;
    for (cut.split = 1; cut.split <= plan.warps && (cut.split == 1 || steps >= 4 * cut.split); cut.split *= 2) {
        const int64_t walks = walks_of(p, cut);
        const double used = large ? double(walks) / (places * double(ceil_div(walks, int64_t(places)))) : walks >= sms / 2 ? 1 : 0;
        if (cut.split == 1 || used > 1.02 * best || (!large && best == 0)) best = used, plan.split = cut.split;
    }
    return plan;
}

// Blocks along the columns of out: the fewest that do not lengthen the longest walk. Every block walks that far, or one step less.
int64_t stride_of(const LinearParams& p, const Plan& plan, const DeviceInfo& gpu) {
    const int64_t walks = walks_of(p, plan), places = int64_t(gpu.multiprocessors) * plan.blocks_per_sm;
    return ceil_div(walks, ceil_div(walks, places));
}

template <typename W, int kM, int kR, int kCopy>
cudaError_t launch_gemv(const LinearParams& p, const Plan& plan, const DeviceInfo& gpu, cudaStream_t stream) {
    Launch launch{};
    launch.p = p, launch.split = plan.split, launch.steps = int32_t(steps_of(p)), launch.walks = walks_of(p, plan);
    launch.per_feature = 1.0f / float(p.in_features), launch.row_blocks = int32_t(ceil_div(p.rows, kM));
    return launch_kernel(linear_gemv_kernel<W, kM, kR, kCopy>, unsigned(stride_of(p, plan, gpu) * launch.row_blocks), 32 * plan.warps,
                         shared_of(p, kM, plan.warps), stream, launch, p.programmatic);
}

template <typename W, int kM>
cudaError_t launch_rows(const LinearParams& p, const Plan& plan, const DeviceInfo& gpu, cudaStream_t stream) {
    if (!plan.vectors) return launch_gemv<W, kM, 2, 1>(p, plan, gpu, stream);
    if (plan.r == 4) return launch_gemv<W, kM, 4, kVector<W>>(p, plan, gpu, stream);
    return launch_gemv<W, kM, 2, kVector<W>>(p, plan, gpu, stream);
}

}  // namespace

int64_t linear_gemv_blocks(const LinearParams& p, const DeviceInfo& gpu) {
    const Plan plan = plan_of(p, gpu);
    return stride_of(p, plan, gpu) * ceil_div(p.rows, plan.m);
}

bool linear_gemv_fits(const LinearParams& p, const DeviceInfo& gpu) { return shared_of(p, 1, 1) <= gpu.shared_memory - kStaticShared; }

cudaError_t linear_gemv(const LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    const Plan plan = plan_of(p, gpu);
    return with_dtype(p.weight_dtype, [&](auto zero) {
        using W = decltype(zero);
        switch (plan.m) {
            case 1: return launch_rows<W, 1>(p, plan, gpu, stream);
            case 2: return launch_rows<W, 2>(p, plan, gpu, stream);
            default: return launch_rows<W, 4>(p, plan, gpu, stream);
        }
    });
}

}  // namespace fa
