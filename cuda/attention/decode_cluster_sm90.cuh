// decode_cluster_sm90.cuh: up to 16 rows of q against few keys, on tensor cores and in one launch, on Hopper. The time is that of one trip
// to memory and of the way from there to the result. New against decode_ring_sm90.cuh and decode_lanes.cuh:
//   - The tiles of a key head are dealt to the blocks of a cluster, and there to the warps, one after the other: whose a tile is does not
//     depend on the length. Its first tile a warp therefore fetches before it knows how many keys there are.
//   - A warp copies its tiles itself (cp.async) and attends to them without meeting the others: no tensor map, no barrier.
//   - A block adds up its warps' results, and sends every block of the cluster those columns that it finishes (st.async).
//
// Bound by latency: lengths -> keys -> scores -> the other blocks -> result.
//
// Shared memory     warps x ring of (K tile | V tile), later the warp's O (kRows, d) float | q (kRows, d) |
//                   what the cluster sends: O (rows, quads of this block, cluster) float4
#pragma once

#include "attention/decode_lanes.h"
#include "attention/decode_scores.cuh"
#include "attention/shared_tile.cuh"
#include "device/cluster.cuh"
#include "device/launch.h"

#include <algorithm>
#include <cfloat>
#include <type_traits>

namespace fa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16, kMostCluster = 16;
constexpr int kBlocksOfSm = 3;  // a GPC may have fewer multiprocessors than a cluster has blocks

struct ClusterParams {
    int32_t warp_bytes;  // of a warp's ring and O
    bool scattered;      // the rows of a tile do not follow each other: pages of no multiple of its keys
    bool programmatic;   // the kernel before may still be making q
    bool bfloat16;       // of q and out, else fp16
    LaneParams lanes;
    CacheScale k_scale, v_scale;  // of bytes
};

// E: the cache's elements. A tile is 16 keys.
template <typename E, int kD>
struct ClusterShape {
    static constexpr int kKeys = 16, kRowBytes = kD * int(sizeof(E)), kTileBytes = kKeys * kRowBytes, kSlotBytes = 2 * kTileBytes;
    static constexpr int kSlots = 24 * 1024 / kSlotBytes;  // of a warp, with which two blocks fit on an SM
    static constexpr int kQuads = kD / 4, kOBytes = kRows * kD * 4;
    static constexpr int warp_bytes(int slots) { return slots * kSlotBytes > kOBytes ? slots * kSlotBytes : kOBytes; }
    static constexpr int bytes(int rows, int slots) { return kWarps * warp_bytes(slots) + kRows * kD * 2 + rows * kD * 4; }
};

template <typename E, int kD>
__global__ void __launch_bounds__(kThreads, kBlocksOfSm) decode_cluster_kernel(const __grid_constant__ ClusterParams params) {
    using Shape = ClusterShape<E, kD>;
    constexpr bool kBytes = sizeof(E) == 1;
    using T = std::conditional_t<kBytes, __half, E>;  // what the tensor cores multiply
    using TileQ = SharedTile<T, kD>;
    using TileK = SharedTile<uint16_t, Shape::kRowBytes / 2>;
    constexpr int kKeys = Shape::kKeys, kTilesN = kKeys / 8, kTilesV = kD / 8, kStepsD = kD / 16, kSlots = Shape::kSlots;
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float2 stat_of[kWarps][kRows];        // maximum and sum of each warp's rows
    __shared__ float2 sent_of[kRows][kMostCluster];  // of each block's
    __shared__ float scale_of[kBytes ? kSlots : 1][kWarps][2][kKeys];
    __shared__ __align__(8) uint64_t received_all;
    const LaneParams& p = params.lanes;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const int cluster = 1 << p.cluster_log, rank = int(cluster_rank()), rows = p.rows;
    const int own_quads = Shape::kQuads >> p.cluster_log;  // of each row, which this block finishes
    unsigned char* const own_memory = shared + warp * params.warp_bytes;
    unsigned char* const q_tile = shared + kWarps * params.warp_bytes;
    const uint32_t ring = shared_address(own_memory), barrier = shared_address(&received_all);
    float4* const received = reinterpret_cast<float4*>(q_tile + kRows * kD * 2);

    launch_dependents();
    if (threadIdx.x == 0) {  // a block sends nothing before all have started
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(barrier, (rows * (16 * own_quads + 8)) << p.cluster_log);
    }
    cluster_arrive();

    const int unit = blockIdx.x >> p.cluster_log, b = p.units.divide(unit), head_k = p.units.remainder(unit, b);
    const int before = p.seqlens ? p.seqlens[b] : p.seqlen_k - p.added;

    // ---- q: before the keys, which would hold it up; behind another kernel after them ----
    constexpr int kQPieces = (kRows * TileQ::kPieces + kThreads - 1) / kThreads, kQRows = kThreads / TileQ::kPieces;
    const int q_row = threadIdx.x / TileQ::kPieces, q_piece = threadIdx.x % TileQ::kPieces, group = int(p.group.divisor);
    uint4 q_bits[kQPieces] = {};
    const auto load_q = [&] {
        grid_dependency_wait();
#pragma unroll
        for (int x = 0; x < kQPieces; ++x) {
            const int r = q_row + x * kQRows, i = p.seqlen_q == 1 ? 0 : p.group.divide(r);
            const uint16_t* const from = static_cast<const uint16_t*>(p.q.data) + b * p.q.batch + i * p.q.row +
                                         (head_k * group + r - i * group) * p.q.head + 8 * q_piece;
            if (r < rows && 8 * q_piece < p.headdim) q_bits[x] = __ldcg(reinterpret_cast<const uint4*>(from));
        }
    };
    if (!params.programmatic) load_q();

    // ---- where the keys are, and copies of a tile ----
    const int entry = !p.entries ? b : p.block_table ? 0 : p.batch_idx ? clamp_to(p.batch_idx[b], 0, p.entries - 1) : b;
    const int piece = lane % TileK::kPieces, row = lane / TileK::kPieces;
    constexpr int kRowsAtOnce = 32 / TileK::kPieces;
    const bool is_k = 16 * piece < p.headdim * int(sizeof(E)), is_v = 16 * piece < p.headdim_v * int(sizeof(E));
    const char* const k = static_cast<const char*>(p.k.data) + head_k * p.k.head * int(sizeof(E)) + 16 * piece;
    const char* const v = static_cast<const char*>(p.v.data) + head_k * p.v.head * int(sizeof(E)) + 16 * piece;

    const int first = rank + (warp << p.cluster_log), step = kWarps << p.cluster_log;  // this warp's tiles of the sequence's
    // Of the tile that is copied next lane l finds row l % kKeys.
    int found_entry = entry, found_row = 0;
    const auto find = [&](int key0) {
        found_row = key0 + lane % kKeys;
        if (!p.block_table) return;
        const int key = min(found_row, p.seqlen_k - 1), page = p.page.divide(key);
        found_entry = clamp_to(p.block_table[b * p.table_row + page], 0, p.entries - 1), found_row = p.page.remainder(key, page);
    };
    // Keys outside [begin, end) arrive as zeros.
    const auto copy = [&](int key0, int begin, int end, uint32_t to, uint32_t scales) {
        const auto found = [&](const TensorView& view, int r, int further) {
            const int at_entry = __shfl_sync(kFullWarp, found_entry, r), at_row = __shfl_sync(kFullWarp, found_row, r) + further;
            return (at_entry * view.batch + at_row * view.row) * int(sizeof(E));
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const TensorView& view = half ? p.v : p.k;
            const char* const head = half ? v : k;
            const char* from = head + found(view, 0, row);
#pragma unroll
            for (int r = row; r < kKeys; r += kRowsAtOnce) {
                if (params.scattered) from = head + found(view, r, 0);
                const bool copies = (half ? is_v : is_k) && key0 + r >= begin && key0 + r < end;
                cp_async_16(to + half * Shape::kTileBytes + TileK::offset(r, piece), copies ? from : head, copies ? 16 : 0);
                from += kRowsAtOnce * view.row * int(sizeof(E));
            }
            if (kBytes && lane < kKeys) {
                const CacheScale& scale = half ? params.v_scale : params.k_scale;
                const bool copies = key0 + lane >= begin && key0 + lane < end;
                const float* const source = scale.data + found_entry * scale.batch + found_row * scale.row + head_k * scale.head;
                cp_async_4(scales + 4 * (half * kKeys + lane), copies ? source : scale.data, copies ? 4 : 0);
            }
            cp_async_commit();
        }
    };
    const bool early = p.window_left < 0 && !p.added && first * kKeys < p.seqlen_k;
    if (early) find(first * kKeys), copy(first * kKeys, 0, p.seqlen_k, ring, kBytes ? shared_address(scale_of[0][warp]) : 0);

    // ---- the keys that some row sees, as sequence_keys ----
    SequenceKeys keys;
    keys.count = before < 0 ? 0 : min(before, p.seqlen_k - p.added) + p.added;
    keys.shift = p.top_left ? 0 : keys.count - p.seqlen_q;
    keys.begin = p.window_left >= 0 ? min(max(keys.shift - p.window_left, 0), keys.count) : 0;
    keys.end = max(p.window_right >= 0 ? min(p.seqlen_q + keys.shift + p.window_right, keys.count) : keys.count, keys.begin);
    keys.first_tile = keys.begin / kKeys;
    keys.tiles = (keys.end + kKeys - 1) / kKeys - keys.first_tile;
    const auto key_of = [&](int tile) { return (keys.first_tile + tile) * kKeys; };

    uint32_t Q[kStepsD][4];
    float row_scale[2] = {p.scale, p.scale};
    const auto row_of = [&](int half) { return min(lane / 4 + 8 * half, rows - 1); };
    const struct {
        float softcap;
        const float* alibi_slopes;
        int seqlen_q, group, window_left, window_right;
    } options{p.softcap, p.alibi_slopes, p.seqlen_q, int(p.group.divisor), p.window_left, p.window_right};
    float O[kTilesV][4] = {};
    float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // log2 units; this thread's share
    float v_unit = 1e-30f;                                         // bytes: O counts in units of the largest factor of V so far
    const uint32_t k_lane = TileK::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2), v_lane = TileK::offset(lane % 16, lane / 16);

    bool waited = !p.added;  // no other kernel puts keys into the cache
    if (first < keys.tiles) find(key_of(first));
    int slot = 0;
    // A tile is copied kSlots rounds before it is due: below 0 are the rounds before the first. Every round commits two groups.
#pragma unroll 1
    for (int tile = first - kSlots * step; tile < keys.tiles; tile += step) {
        const uint32_t k_tile = ring + slot * Shape::kSlotBytes, v_tile = k_tile + Shape::kTileBytes;
        const uint32_t scales = kBytes ? shared_address(scale_of[slot][warp]) : 0;
        if (tile >= 0) {
            const int key0 = key_of(tile);
            // ---- S = Q K^T ----
            float S[kTilesN][4] = {};
            cp_async_wait_group<2 * kSlots - 1>();
            __syncwarp();
            multiply_keys<E, T>(S, Q, [&](int step, int i) { return TileK::advance(k_tile + k_lane, step) + 8 * i * Shape::kRowBytes; });
            if (kBytes) scale_keys(S, scales, lane);
#pragma unroll
            for (int i = 0; i < kTilesN; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[i][e] *= row_scale[e / 2];
            score_options(options, keys, key0, lane, row_of, [&] { return b * p.alibi_batch + head_k * int(p.group.divisor); }, S);
            softmax_step(S, O, row_max, row_sum);

            // ---- O += P V ----
            cp_async_wait_group<2 * kSlots - 2>();
            __syncwarp();
            if (early && key0 + kKeys > keys.end) {  // came before the length, and may hold anything: 0 x NaN is NaN
#pragma unroll
                for (int r = row; r < kKeys; r += kRowsAtOnce)
                    if (key0 + r >= keys.end) store_shared_16(v_tile + TileK::offset(r, piece), uint4{});
                if (kBytes && lane < kKeys && key0 + lane >= keys.end) store_shared_4(scales + 4 * (kKeys + lane), 0);
                __syncwarp();
            }
            if (kBytes) scale_values(S, scales + 4 * kKeys, lane, v_unit, O);
            add_values<E, T>(O, S, [&](int step, int i) { return TileK::advance(v_tile + v_lane, i) + 16 * step * Shape::kRowBytes; });
            __syncwarp();
        }
        if (const int next = tile + kSlots * step; next < keys.tiles) {
            if (!waited && key_of(next) + kKeys > keys.count - p.added) grid_dependency_wait(), waited = true;
            if (!early || next != first) copy(key_of(next), keys.begin, keys.end, k_tile, scales);
            if (next + step < keys.tiles) find(key_of(next + step));
        } else if (!early || next != first) {
            cp_async_commit(), cp_async_commit();
        }
        slot = slot + 1 == kSlots ? 0 : slot + 1;
        if (tile + step == first) {  // the first copies are on their way
            if (params.programmatic) load_q();
#pragma unroll
            for (int x = 0; x < kQPieces; ++x)
                if (q_row + x * kQRows < kRows)
                    store_shared_16(shared_address(q_tile) + TileQ::offset(q_row + x * kQRows, q_piece), q_bits[x]);
            __syncthreads();
            load_query<kBytes, TileQ>(Q, row_scale, shared_address(q_tile), lane, params.bfloat16);
        }
    }

    // ---- the warps' results ----
    float* const o = reinterpret_cast<float*>(own_memory);
    if (first < keys.tiles) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (8 * half >= rows) break;
            const float sum = quad_sum(row_sum[half]);
            if (lane % 4 == 0) stat_of[warp][lane / 4 + 8 * half] = make_float2(row_max[half], sum);
#pragma unroll
            for (int i = 0; i < kTilesV; i += 2) put_o<kBytes>(o, lane / 4 + 8 * half, i, half, lane, O, v_unit);
        }
    }
    __syncthreads();
    cluster_wait();  // all have started
    // Warps that have keys.
    const int with_keys = min(max((keys.tiles - rank + cluster - 1) >> p.cluster_log, 0), kWarps);
#pragma unroll 1
    for (int x = threadIdx.x; x < rows * Shape::kQuads; x += kThreads) {
        const int r = x / Shape::kQuads, quad = x % Shape::kQuads;
        float top = -FLT_MAX, sum = 0;
        float4 total = make_float4(0, 0, 0, 0);
        for (int w = 0; w < with_keys; ++w) top = fmaxf(top, stat_of[w][r].x);
#pragma unroll 4
        for (int w = 0; w < with_keys; ++w) {
            const float2 stat = stat_of[w][r];
            const float weight = exp2_approx(stat.x - top);
            const float4 y =
                *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(shared + w * params.warp_bytes) + o_place<kD>(r, 4 * quad));
            sum += weight * stat.y;
            total.x += weight * y.x, total.y += weight * y.y, total.z += weight * y.z, total.w += weight * y.w;
        }
        const int to = quad / own_quads, own = quad - to * own_quads;  // a power of two
        const uint32_t there = cluster_address(barrier, to);
        store_async_16(cluster_address(shared_address(received + ((r * own_quads + own) << p.cluster_log) + rank), to), total, there);
        if (own == 0) store_async_8(cluster_address(shared_address(&sent_of[r][rank]), to), top, sum, there);
    }

    // ---- the blocks' results: eight lanes add up four columns of a row ----
#pragma unroll 1
    for (int x = threadIdx.x / 8; x / 4 * 4 < rows * own_quads; x += kThreads / 8) {
        mbarrier_wait_cluster(barrier, 0);
        const bool is = x < rows * own_quads;
        const int r = is ? x / own_quads : 0, own = is ? x - r * own_quads : 0, column = 4 * (rank * own_quads + own);
        float top = -FLT_MAX, sum = 0;
        float4 total = make_float4(0, 0, 0, 0);
        for (int i = lane % 8; i < cluster; i += 8) top = fmaxf(top, sent_of[r][i].x);
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, offset));
        for (int i = lane % 8; i < cluster; i += 8) {
            const float2 stat = sent_of[r][i];
            const float weight = exp2_approx(stat.x - top);
            const float4 y = received[((r * own_quads + own) << p.cluster_log) + i];
            sum += weight * stat.y;
            total.x += weight * y.x, total.y += weight * y.y, total.z += weight * y.z, total.w += weight * y.w;
        }
#pragma unroll
        for (int offset = 1; offset < 8; offset *= 2) {
            sum += __shfl_xor_sync(kFullWarp, sum, offset);
            total.x += __shfl_xor_sync(kFullWarp, total.x, offset), total.y += __shfl_xor_sync(kFullWarp, total.y, offset);
            total.z += __shfl_xor_sync(kFullWarp, total.z, offset), total.w += __shfl_xor_sync(kFullWarp, total.w, offset);
        }
        if (lane % 8 || !is || column >= p.headdim_v) continue;
        const int i = p.seqlen_q == 1 ? 0 : p.group.divide(r), head = head_k * group + r - i * group;
        float inverse = sum == 0 ? 0 : __fdividef(1.0f, sum);
        if (const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY; sink != -INFINITY) {
            const float next = fmaxf(top, sink), factor = exp2_approx(top - next);
            sum = sum * factor + exp2_approx(sink - next), top = next, inverse = factor / sum;
        }
        if (p.lse && column == 0) p.lse[(int64_t(b) * p.nheads + head) * p.seqlen_q + i] = sum == 0 ? -INFINITY : (top + log2f(sum)) * kLn2;
        uint16_t* const out = static_cast<uint16_t*>(p.out.data) + b * p.out.batch + i * p.out.row + head * p.out.head + column;
        total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
        *reinterpret_cast<uint2*>(out) =
            params.bfloat16 ? make_uint2(pack_16<__nv_bfloat16>(total.x, total.y), pack_16<__nv_bfloat16>(total.z, total.w))
                            : make_uint2(pack_16<__half>(total.x, total.y), pack_16<__half>(total.z, total.w));
    }
}

template <typename E, int kD>
cudaError_t launch_cluster(const DecodeParams& d, cudaStream_t stream) {
    using Shape = ClusterShape<E, kD>;
    const AttentionParams& p = d.attention;
    ClusterParams params{};
    params.lanes = lane_params(d, nullptr);
    params.scattered = p.cache.block_table && p.cache.page_size % Shape::kKeys;
    params.programmatic = d.after_append, params.bfloat16 = p.dtype == DType::kBFloat16;
    params.k_scale = p.cache.k_scale, params.v_scale = p.cache.v_scale;
    const int64_t tiles = (int64_t(p.seqlen_k) + Shape::kKeys - 1) / Shape::kKeys, at_once = int64_t(kWarps) * d.cluster;
    const int slots = int(std::min<int64_t>((tiles + at_once - 1) / at_once, Shape::kSlots));  // with fewer none is used twice
    params.warp_bytes = Shape::warp_bytes(slots);
    LaunchOptions options;
    options.programmatic = d.after_append, options.cluster = unsigned(d.cluster);
    const unsigned blocks = unsigned(decode_units(d) * d.cluster);
    return launch_kernel(decode_cluster_kernel<E, kD>, blocks, kThreads, size_t(Shape::bytes(params.lanes.rows, slots)), stream, params,
                         options);
}

}  // namespace
}  // namespace fa
