// cluster_sm90/kernel.cuh: up to 16 rows of q against few keys, on tensor cores and in one launch, on Hopper. The time is that of one trip
// to memory and of the way from there to the result. New against ring_sm90/kernel.cuh and lanes/kernel.cuh:
//   - The tiles of a key head are dealt in turn to the blocks of a cluster and, within a block, to the warps. Which warp has a tile does
//     not depend on the length, so a warp fetches its first tile before it knows how many keys there are. With pages, it prefetches the
//     block table's entry to L2, and reads the entry once the length shows that it belongs to the sequence.
//   - A warp copies its tiles itself (cp.async) and attends to them without meeting the other warps: no tensor map, no barrier.
//   - A block adds up its warps' results and sends to each block of the cluster the columns that the receiver finishes (st.async).
//
// Bound by latency: lengths -> keys -> scores -> the other blocks -> result.
//
// Shared memory     warps x ring of (K tile | V tile), later the warp's O (kRows, d) float | q (kRows, d) |
//                   received from the cluster: O (rows, quads of this block, cluster) float4
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/decode/cluster_sm90/tiles.cuh"
#include "device/cluster.cuh"
#include "device/launch.h"

#include <algorithm>
#include <cfloat>

namespace fa {
namespace {

// Results that the warps of a block, and the blocks of a cluster, exchange.
template <typename Plan>
struct ClusterStats {
    float2 of_warp[kWarps][kRows];         // maximum and sum of each warp's rows
    float2 of_block[kRows][kMostCluster];  // maximum and sum of each block's rows
};

// Columns 4 quad .. 4 quad + 3 of a row, summed over several sources. A source has a maximum and a sum, and O in units of that maximum.
struct ClusterSum {
    float row_max, row_sum;
    float4 o;
    __device__ __forceinline__ void add(float2 stat, float4 y) {
        const float weight = exp2_approx(stat.x - row_max);
        row_sum += weight * stat.y;
        o.x += weight * y.x, o.y += weight * y.y, o.z += weight * y.z, o.w += weight * y.w;
    }
};

// Adds up the results of those of the block's warps that have keys (`with_keys` of them), and sends each block the columns that it
// finishes.
template <typename Plan>
__device__ __forceinline__ void send_results(const ClusterParams& params, const unsigned char* shared, const ClusterStats<Plan>& stats,
                                             const float4* received, uint32_t barrier, int own_quads, int rank, int with_keys) {
    const LaneParams& p = params.lanes;
#pragma unroll 1
    for (int x = threadIdx.x; x < p.rows * Plan::kQuads; x += kThreads) {
        const int r = x / Plan::kQuads, quad = x % Plan::kQuads;
        ClusterSum sum{-FLT_MAX, 0, make_float4(0, 0, 0, 0)};
        for (int w = 0; w < with_keys; ++w) sum.row_max = fmaxf(sum.row_max, stats.of_warp[w][r].x);
#pragma unroll 4
        for (int w = 0; w < with_keys; ++w) {
            const float* const o = reinterpret_cast<const float*>(shared + w * params.warp_bytes);
            sum.add(stats.of_warp[w][r], *reinterpret_cast<const float4*>(o + o_place<Plan::kD>(r, 4 * quad)));
        }
        const int to = quad / own_quads, own = quad - to * own_quads;  // division by a power of two
        const uint32_t there = cluster_address(barrier, to);
        store_async_16(cluster_address(shared_address(received + ((r * own_quads + own) << p.cluster_log) + rank), to), sum.o, there);
        if (own == 0) store_async_8(cluster_address(shared_address(&stats.of_block[r][rank]), to), sum.row_max, sum.row_sum, there);
    }
}

// Adds up the results of all blocks and stores the columns that this block finishes. Eight lanes work on four columns of a row.
template <typename Plan>
__device__ __forceinline__ void finish_results(const ClusterParams& params, const ClusterStats<Plan>& stats, const float4* received,
                                               uint32_t barrier, int own_quads, int rank, int lane, int b, int head_k) {
    const LaneParams& p = params.lanes;
    const int cluster = 1 << p.cluster_log, group = int(p.group.divisor);
#pragma unroll 1
    for (int x = threadIdx.x / 8; x / 4 * 4 < p.rows * own_quads; x += kThreads / 8) {
        mbarrier_wait_cluster(barrier, 0);
        const bool is = x < p.rows * own_quads;
        const int r = is ? x / own_quads : 0, own = is ? x - r * own_quads : 0, column = 4 * (rank * own_quads + own);
        ClusterSum sum{-FLT_MAX, 0, make_float4(0, 0, 0, 0)};
        for (int i = lane % 8; i < cluster; i += 8) sum.row_max = fmaxf(sum.row_max, stats.of_block[r][i].x);
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) sum.row_max = fmaxf(sum.row_max, __shfl_xor_sync(kFullWarp, sum.row_max, offset));
        for (int i = lane % 8; i < cluster; i += 8) sum.add(stats.of_block[r][i], received[((r * own_quads + own) << p.cluster_log) + i]);
        float4& o = sum.o;
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) {
            sum.row_sum += __shfl_xor_sync(kFullWarp, sum.row_sum, offset);
            o.x += __shfl_xor_sync(kFullWarp, o.x, offset), o.y += __shfl_xor_sync(kFullWarp, o.y, offset);
            o.z += __shfl_xor_sync(kFullWarp, o.z, offset), o.w += __shfl_xor_sync(kFullWarp, o.w, offset);
        }
        if (lane % 8 || !is || column >= p.headdim_v) continue;
        const int i = p.seqlen_q == 1 ? 0 : p.group.divide(r), head = head_k * group + r - i * group;
        const RowEnd end = finish_row<ScoreUnit::kLog2>(sum.row_max, sum.row_sum, sink_of(p.sinks, head));
        if (p.lse && column == 0) p.lse[(int64_t(b) * p.nheads + head) * p.seqlen_q + i] = end.lse * kLn2;
        uint16_t* const out = static_cast<uint16_t*>(p.out.data) + b * p.out.batch + i * p.out.row + head * p.out.head + column;
        *reinterpret_cast<uint2*>(out) = pack_row(end.output(o), !params.bfloat16);
    }
}

template <typename Plan>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) decode_cluster_kernel(const __grid_constant__ ClusterParams params) {
    using E = typename Plan::E;
    using T = typename Plan::T;
    using TileK = typename Plan::TileK;
    constexpr bool kBytes = Plan::kBytes;
    constexpr int kKeys = Plan::kKeys, kTilesN = Plan::kTilesN, kTilesV = Plan::kTilesV, kSlots = Plan::kSlots;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ ClusterStats<Plan> stats;
    __shared__ float scale_of[kBytes ? kSlots : 1][kWarps][2][kKeys];
    __shared__ float row_factor[kBytes ? kRows : 1];
    __shared__ __align__(8) uint64_t received_all;
    const LaneParams& p = params.lanes;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const int cluster = 1 << p.cluster_log, rank = int(cluster_rank());
    const int own_quads = Plan::kQuads >> p.cluster_log;  // quads of each row that this block finishes
    unsigned char *const own_memory = shared + warp * params.warp_bytes, *const q_tile = shared + kWarps * params.warp_bytes;
    const uint32_t ring = shared_address(own_memory), barrier = shared_address(&received_all);
    const float4* const received = reinterpret_cast<const float4*>(q_tile + kRows * Plan::kD * 2);

    launch_dependents();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, (p.rows * (16 * own_quads + 8)) << p.cluster_log);
    }
    cluster_arrive();  // no block may send anything before all have started

    const int unit = blockIdx.x >> p.cluster_log, b = p.units.divide(unit), head_k = p.units.remainder(unit, b);
    const int before = lane_keys_before(p, b);
    if (const int key = (rank + (warp << p.cluster_log)) * kKeys; p.block_table && lane == 0 && key < p.seqlen_k)
        prefetch_l2(p.block_table + b * p.table_row + p.page.divide(key));  // read once the length shows that it belongs to the sequence
    ClusterQuery<Plan> query;
    if (!params.programmatic) query.load(p, b, head_k);  // before the keys, which would delay it; with `programmatic` after them
    ClusterCopies<Plan> copies(p, lane, b, head_k);
    const int first = rank + (warp << p.cluster_log), step = kWarps << p.cluster_log;  // this warp's tiles among the sequence's
    const bool early = p.window_left < 0 && !p.added && !p.block_table && first * kKeys < p.seqlen_k;
    if (early) {
        copies.find(p, first * kKeys, p.seqlen_k);
        copies.copy(params, first * kKeys, 0, p.seqlen_k, ring, kBytes ? shared_address(scale_of[0][warp]) : 0);
    }
    float k_factor = 1, v_factor = 1;  // bytes: factor of all keys, or of key 0; loaded while the length is in flight, without a branch
    if (kBytes) k_factor = copies.factor(p, p.k_scale), v_factor = copies.factor(p, p.v_scale);

    const VisibleKeys keys = visible_keys(p, lane_key_count(p, before));
    const int first_tile = keys.begin / kKeys, tiles = (keys.end + kKeys - 1) / kKeys - first_tile;
    const auto key_of = [&](int tile) { return (first_tile + tile) * kKeys; };

    uint32_t Q[Plan::kStepsD][4];
    float row_scale[2] = {p.scale_log2, p.scale_log2};
    const bool by_key = kBytes && params.scaled_by_key;
    float v_unit = 1e-30f;  // bytes: O is in units of V's factor, or of the largest factor so far
    const auto row_of = [&](int half) { return min(lane / 4 + 8 * half, p.rows - 1); };
    const ScoreOptions options{p.softcap_log2, p.alibi_slopes, p.seqlen_q, int(p.group.divisor), p.window_left, p.window_right};
    float O[kTilesV][4] = {};
    float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // max: exponents of 2; sum: this thread's share
    const uint32_t k_lane = TileK::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), v_lane = TileK::offset(lane % 16, lane / 16);

    bool waited = !p.added;  // no other kernel adds keys to the cache
    if (first < tiles) copies.find(p, key_of(first), keys.end);
    int slot = 0;
    // A tile is copied kSlots rounds before it is attended to, so rounds before the first tile only copy. Every round commits two groups.
#pragma unroll 1
    for (int tile = first - kSlots * step; tile < tiles; tile += step) {
        const uint32_t k_tile = ring + slot * Plan::kSlotBytes, v_tile = k_tile + Plan::kTileBytes;
        const uint32_t scales = kBytes ? shared_address(scale_of[slot][warp]) : 0;
        if (tile >= 0) {
            const int key0 = key_of(tile);
            // ---- S = Q K^T ----
            float S[kTilesN][4] = {};
            cp_async_wait_group<2 * kSlots - 1>();
            __syncwarp();
            multiply_keys<E, T>(S, Q, [&](int step, int i) { return TileK::advance(k_tile + k_lane, step) + 8 * i * Plan::kRowBytes; });
            if (by_key) scale_keys(S, scales, lane);
#pragma unroll
            for (int i = 0; i < kTilesN; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[i][e] *= row_scale[e / 2];
            score_options(options, keys, key0, lane, row_of, [&] { return b * p.alibi_batch + head_k * int(p.group.divisor); }, S);
            softmax_step(S, O, row_max, row_sum);

            // ---- O += P V ----
            cp_async_wait_group<2 * kSlots - 2>();
            __syncwarp();
            if (early && key0 + kKeys > keys.end) copies.zero_values(key0, keys.end, v_tile, scales + 4 * kKeys);
            if (by_key) scale_values(S, scales + 4 * kKeys, lane, v_unit, O);
            add_values<E, T>(O, S, [&](int step, int i) { return TileK::advance(v_tile + v_lane, i) + 16 * step * Plan::kRowBytes; });
            __syncwarp();
        }
        if (const int next = tile + kSlots * step; next < tiles) {
            if (!waited && key_of(next) + kKeys > keys.count - p.added) grid_dependency_wait(), waited = true;
            if (!early || next != first) copies.copy(params, key_of(next), keys.begin, keys.end, k_tile, scales);
            if (next + step < tiles) copies.find(p, key_of(next + step), keys.end);
        } else if (!early || next != first) {
            cp_async_commit(), cp_async_commit();
        }
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        if (tile + step == first) {  // the first copies are in flight
            if (params.programmatic) query.load(p, b, head_k);
            const bool narrows = kBytes && params.bfloat16;
            if (narrows) query.narrow(row_factor);
            query.store(shared_address(q_tile));
            __syncthreads();
            load_query<kBytes, typename Plan::TileQ>(Q, shared_address(q_tile), lane);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (narrows) row_scale[half] *= row_factor[lane / 4 + 8 * half];
            if (kBytes && !by_key) row_scale[0] *= k_factor, row_scale[1] *= k_factor, v_unit = v_factor;
        }
    }

    if (first < tiles) {  // the warp's results
        float* const o = reinterpret_cast<float*>(own_memory);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (8 * half >= p.rows) break;
            const float sum = quad_sum(row_sum[half]);
            if (lane % 4 == 0) stats.of_warp[warp][lane / 4 + 8 * half] = make_float2(row_max[half], sum);
#pragma unroll
            for (int i = 0; i < kTilesV; i += 2) put_o<E>(o, lane / 4 + 8 * half, i, half, lane, O, v_unit);
        }
    }
    __syncthreads();
    cluster_wait();  // all blocks have started
    const int with_keys = min(max((tiles - rank + cluster - 1) >> p.cluster_log, 0), kWarps);
    send_results<Plan>(params, shared, stats, received, barrier, own_quads, rank, with_keys);
    finish_results<Plan>(params, stats, received, barrier, own_quads, rank, lane, b, head_k);
}

template <typename E, int kD>
cudaError_t launch_cluster(const DecodeParams& d, cudaStream_t stream) {
    using Plan = ClusterPlan<E, kD>;
    const AttentionParams& p = d.attention;
    ClusterParams params{};
    params.lanes = lane_params(d, nullptr);
    params.scattered = p.cache.block_table && p.cache.page_size % Plan::kKeys;
    params.programmatic = d.after_append, params.bfloat16 = p.dtype == DType::kBFloat16;
    params.scaled_by_key = d.scaled_by_key;
    const int64_t tiles = (int64_t(p.seqlen_k) + Plan::kKeys - 1) / Plan::kKeys, at_once = int64_t(kWarps) * d.shape.cluster;
    const int slots = int(std::min<int64_t>((tiles + at_once - 1) / at_once, Plan::kSlots));  // with fewer slots none is used twice
    params.warp_bytes = Plan::warp_bytes(slots);
    LaunchOptions options;
    options.programmatic = d.after_append, options.cluster = unsigned(d.shape.cluster);
    const unsigned blocks = unsigned(decode_units(d.shape, p) * d.shape.cluster);
    return launch_kernel(decode_cluster_kernel<Plan>, blocks, kThreads, size_t(Plan::bytes(params.lanes.rows, slots)), stream, params,
                         options);
}

}  // namespace
}  // namespace fa
