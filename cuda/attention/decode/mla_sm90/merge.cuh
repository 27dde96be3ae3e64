// mla_sm90/merge.cuh: merges the results of decode_mla_sm90 for the shares of the keys of a row:
//
//     lse = log sum exp(lse_i)      out = sum exp(lse_i - lse) O_i
//
// One block per row, four columns per thread. A share without keys has lse -inf and counts as zero.
//   merge_few_shares_kernel  at most kFewShares shares, and many rows: small blocks, many of them on a multiprocessor
//   merge_shares_kernel      many shares: groups of threads divide them; the weights are computed once per block
// The kernels are launched while decode_mla_sm90 runs and wait for its end.
#pragma once

#include "attention/common/params.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {

constexpr int kMlaColumns = 512;  // headdim_v
constexpr int kMostShares = 256;  // the limit that validation enforces
constexpr int kMergeThreads = kMlaColumns / 4;

struct MlaShares {
    AttentionParams attention;
    int rows, splits;             // rows of a key head, seqlen_q x group; shares of a sequence's keys
    bool invariant;               // the order of the sum must not depend on `splits`: always the same kernel and number of groups
    const float *partial, *lses;  // (batch, nheads_k, splits, rows, headdim_v) and (batch, nheads_k, splits, rows)
};

// Stores columns 4 * column .. + 3 of a row. `heads` counts key heads over the batch.
template <typename T>
__device__ __forceinline__ void store_merged(const AttentionParams& p, int heads, int row, int column, float4 sum, float lse) {
    const int b = heads / p.nheads_k, head = heads % p.nheads_k * p.group + row % p.group;
    const Sequence s = sequence_of(p, b);
    T* to = static_cast<T*>(p.out.data) + s.out + row / p.group * p.out.row + head * p.out.head + 4 * column;
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_16<T>(sum.x, sum.y), pack_16<T>(sum.z, sum.w));
    if (p.lse && column == 0) p.lse[lse_offset(p, s, head) + row / p.group] = lse;
}

// Every thread reads all lses together with its columns, so that it waits only once.
constexpr int kFewShares = 4;
template <typename T>
__global__ void __launch_bounds__(kMergeThreads, 12) merge_few_shares_kernel(const __grid_constant__ MlaShares shares) {
    grid_dependency_wait();
    const int row = blockIdx.x % shares.rows, heads = blockIdx.x / shares.rows, splits = shares.splits, column = threadIdx.x;
    const int64_t first = int64_t(heads) * splits * shares.rows + row;
    float lses[kFewShares], m = -INFINITY, l = 0;
    float4 x[kFewShares];
#pragma unroll
    for (int i = 0; i < kFewShares; ++i) {
        const int64_t at = first + min(i, splits - 1) * shares.rows;
        lses[i] = i < splits ? shares.lses[at] : -INFINITY;
        x[i] = i < splits ? *reinterpret_cast<const float4*>(shares.partial + at * kMlaColumns + 4 * column) : float4{};
    }
#pragma unroll
    for (int i = 0; i < kFewShares; ++i) m = fmaxf(m, lses[i]);
    float4 sum{};
#pragma unroll
    for (int i = 0; i < kFewShares; ++i) {  // a share without keys is zero
        const float w = lses[i] == -INFINITY ? 0.0f : __expf(lses[i] - m);
        l += w, sum.x += w * x[i].x, sum.y += w * x[i].y, sum.z += w * x[i].z, sum.w += w * x[i].w;
    }
    const float inverse = l == 0.0f ? 0.0f : 1.0f / l;
    store_merged<T>(shares.attention, heads, row, column, make_float4(sum.x * inverse, sum.y * inverse, sum.z * inverse, sum.w * inverse),
                    l == 0.0f ? -INFINITY : m + __logf(l));
}

// Up to kMergeLoads shares of a thread are in flight before their weights are known. Many shares are dealt to kMergeGroups groups of
// threads.
constexpr int kMergeGroups = 4, kMergeLoads = 16;
FA_HOST_DEVICE constexpr int merge_groups(const MlaShares& shares) {
    return shares.invariant || shares.splits > kMergeLoads ? kMergeGroups : 1;
}
template <typename T>
__global__ void __launch_bounds__(kMergeGroups* kMergeThreads) merge_shares_kernel(const __grid_constant__ MlaShares shares) {
    __shared__ float weight[kMostShares], lse;
    __shared__ float4 sums[kMergeGroups][kMergeThreads];
    grid_dependency_wait();
    const int row = blockIdx.x % shares.rows, heads = blockIdx.x / shares.rows, splits = shares.splits;
    const int column = threadIdx.x % kMergeThreads, group = threadIdx.x / kMergeThreads, groups = merge_groups(shares);
    const float* from = shares.partial + (int64_t(heads) * splits * shares.rows + row) * kMlaColumns + 4 * column;
    float4 x[kMergeLoads];
    const auto load = [&](int begin) {
#pragma unroll
        for (int i = 0; i < kMergeLoads; ++i) {
            const int share = begin + i * groups;
            if (share < splits) x[i] = *reinterpret_cast<const float4*>(from + int64_t(share) * shares.rows * kMlaColumns);
        }
    };
    const float* lses = shares.lses + int64_t(heads) * splits * shares.rows + row;
    for (int i = threadIdx.x; i < splits; i += groups * kMergeThreads) weight[i] = lses[int64_t(i) * shares.rows];
    load(group);
    __syncthreads();
    if (threadIdx.x < 32) {
        float m = -INFINITY, l = 0;
        for (int i = threadIdx.x; i < splits; i += 32) m = fmaxf(m, weight[i]);
        for (int x = 16; x > 0; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
        for (int i = threadIdx.x; i < splits; i += 32) l += weight[i] = weight[i] == -INFINITY ? 0.0f : __expf(weight[i] - m);
        for (int x = 16; x > 0; x /= 2) l += __shfl_xor_sync(~0u, l, x);
        for (int i = threadIdx.x; i < splits; i += 32) weight[i] = l == 0.0f ? 0.0f : weight[i] / l;
        if (threadIdx.x == 0) lse = l == 0.0f ? -INFINITY : m + __logf(l);
    }
    __syncthreads();
    float4 sum{};
#pragma unroll 1
    for (int begin = group; begin < splits; begin += kMergeLoads * groups) {  // a share without keys is zero
        if (begin > group) load(begin);
#pragma unroll
        for (int i = 0; i < kMergeLoads; ++i) {
            const int share = begin + i * groups;
            if (share >= splits) continue;
            const float w = weight[share];
            sum.x += w * x[i].x, sum.y += w * x[i].y, sum.z += w * x[i].z, sum.w += w * x[i].w;
        }
    }
    if (groups > 1) {
        sums[group][column] = sum;
        __syncthreads();
        if (group > 0) return;
        for (int i = 1; i < groups; ++i) {
            const float4 other = sums[i][column];
            sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
        }
    }
    store_merged<T>(shares.attention, heads, row, column, sum, lse);
}

template <typename T>
cudaError_t merge_mla_shares(const MlaShares& shares, cudaStream_t stream) {
    LaunchOptions options;
    options.programmatic = options.prefers_shared = true;  // prefers_shared: keeps the carveout of decode_mla_sm90
    const unsigned rows = unsigned(shares.attention.batch * shares.attention.nheads_k * shares.rows);
    if (shares.splits <= kFewShares && !shares.invariant)
        return launch_kernel(merge_few_shares_kernel<T>, rows, kMergeThreads, 0, stream, shares, options);
    return launch_kernel(merge_shares_kernel<T>, rows, unsigned(merge_groups(shares) * kMergeThreads), 0, stream, shares, options);
}

}  // namespace fa
