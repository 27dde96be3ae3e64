// lanes/kernel.cuh: few rows of q against few keys, where the time is that of one trip to memory and of the way from there to the result;
// and float32, which tensor cores would round. New against split_sm80/kernel.cuh:
//   - CUDA cores: a lane has 16 bytes of a key and of its value, and the same columns of q and O. Lanes that share a key add up its score
//     by shuffles. Every thread copies the data that it will use (cp.async) into its own ring: no barrier, and a short loop.
//   - Clusters (decode_lanes_cluster_sm90): the keys of a key head are divided into equal pieces for up to 16 blocks, which send their
//     results to the blocks that finish the rows (st.async). One launch, no workspace. Without clusters (decode_lanes_sm80, float32 on any
//     GPU) the pieces are those of schedule.h, and combine.cu merges them.
//   - A whole decode step: the blocks rotate q and the new key and value (rotary embedding) and round them. The last block of a
//     cluster writes the new key and value to the cache and attends to them from shared memory.
//   - 8-bit caches, for one row, where all keys of a key head have one factor: K's factor is folded into q, V's into the sums.
//   - With `programmatic`, the keys already in the cache are in flight before the previous kernel has ended.
//
// Bound by latency: parameters and lengths -> keys; and, after the previous kernel, q -> scores -> result. The code and the parameters are
// read from memory on the way, so their lengths matter.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/decode/append.h"
#include "attention/decode/lanes/options.cuh"
#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"

#include <type_traits>

namespace fa {
namespace {

// Attends to the block's keys, group by group. With kAppends, the key that joins the cache comes last, by one warp for each row. The copies
// of kGroups groups are in flight before `stage` brings q, and the new key and value, to shared memory.
template <typename Plan, bool kAppends, typename Stage>
__device__ __forceinline__ void attend_to_keys(LaneSums<Plan>& sums, const LaneParams& p, const LanePlace<Plan>& place,
                                               const LaneUnit& unit, const LaneKeys& keys, const AddedKey& added, int entry,
                                               const float* q_tile, const typename Plan::T* added_k, uint32_t ring, const Stage& stage,
                                               const DecodeParams* d = nullptr) {
    constexpr int kElement = int(sizeof(typename Plan::T));
    const bool adds = kAppends && added.here;
    const bool sees_added =
        adds && place.lane < Plan::kLanes && place.warp < place.row_warps && keys.count > keys.begin && keys.count <= keys.end;
    LaneCopies<Plan> copies(p, place, unit, keys, entry);
    LaneQuery<Plan> Q;
    const int own = keys.own_end - keys.own_begin, passes = own > 0 ? (own + place.key_step - 1) / unsigned(place.key_step) : 0;
    const int groups = (passes + Plan::kAtOnce - 1) / Plan::kAtOnce;
    copies.find_pages(p, 0);
    int slot = 0;
#pragma unroll 1
    for (int g = -Plan::kGroups; g < groups + adds; ++g) {
        if (g >= 0) {
            cp_async_wait_group<Plan::kGroups - 1>();
            const bool whole = g < groups;  // else only the new key
            uint32_t k_from = ring + slot * Plan::kGroupBytes, part_step = Plan::kPartBytes;
            if (!whole) k_from = shared_address(added_k) + place.column * kElement, part_step = Plan::kLanes * 16;
            const uint32_t v_from = k_from + (whole ? Plan::kParts * part_step : Plan::kD * kElement);
            LaneKeyBits<Plan> bits;
            LaneScores<Plan> S;
            load_bits<Plan>(bits, k_from, part_step, whole);
            if constexpr (Plan::kNatural) {
                const int key0 = copies.key(g, 0);
                LaneScores<Plan> addends;
                load_lane_addends<Plan>(addends, d->attention, p, place, unit, key0, keys.own_end - 1);
                multiply_keys<Plan>(S, Q, bits, place, q_tile);
                transform_lane_scores<Plan>(S, addends, d->attention, p, place, unit, keys.shift, key0);
                lane_score_options<Plan>(S, p, place, unit, keys.shift, key0, keys.own_end);
                const LaneSeen<Plan> seen(S);
                sums.softmax(S);
                load_bits<Plan>(bits, v_from, part_step, whole);
                seen.clear_others(bits);
                sums.add_values(S, bits);
            } else {
                multiply_keys<Plan>(S, Q, bits, place, q_tile);
                const int key0 = whole ? copies.key(g, 0) : keys.count - 1, end = whole ? keys.own_end : sees_added ? keys.count : 0;
                lane_score_options<Plan>(S, p, place, unit, keys.shift, key0, end);
                sums.softmax(S);
                load_bits<Plan>(bits, v_from, part_step, whole);
                sums.add_values(S, bits);
            }
        }
        if (g + Plan::kGroups < groups) copies.copy(p, place.column, g + Plan::kGroups, ring + slot * Plan::kGroupBytes);
        cp_async_commit();
        slot = slot + 1 == Plan::kGroups ? 0 : slot + 1;
        if (g == -1) {
            stage();
            Q.hold(place, q_tile);
        }
    }
}

// Calls take(r, c, result) for columns c .. c + 3 of row r of the tile, summed over the block's warps; in one lane.
template <typename Plan, typename Take>
__device__ __forceinline__ void for_each_quad(const LaneParams& p, const LanePlace<Plan>& place,
                                              const float2 (&stat_of)[kLaneWarps][Plan::kRows], const float* o_tile, const Take& take) {
    constexpr int kRows = Plan::kRows, kD = Plan::kD, kQuads = kD / 4;
#pragma unroll 1
    for (int x = 4 * place.warp + place.lane % 4; x < p.tile_rows * kQuads; x += 4 * kLaneWarps) {  // a warp has four quads of a row
        const int r = x / kQuads, c = x % kQuads * 4, first = r / kRows;
        const LaneResult result = gather_results<Plan::kUnit>(
            place.lane, place.key_warps, [&](int i) { return stat_of[i * place.row_warps + first][r % kRows]; },
            [&](int i) { return o_tile + ((i * place.row_warps + first) * kRows + r % kRows) * kD + c; });
        if (place.lane / 4 == 0) take(r, c, result);
    }
}

// Stores columns c .. c + 3 of row r of the tile. They go to out, with the row's lse; or, if the result is for one piece of the keys, to
// the piece's slot in the workspace.
template <typename T, ScoreUnit kUnit = ScoreUnit::kLog2>
__device__ __forceinline__ void store_row(const LaneParams& p, const LaneUnit& unit, int r, int c, const LaneResult& result,
                                          const DecodeParams* d = nullptr, int slot = -1) {
    if (unit.row0 + r >= p.rows || c >= p.headdim_v) return;
    const bool whole = !d || slot < 0;
    const int i = lane_query(p, unit.row0 + r), head = lane_head(p, unit.head_k, unit.row0 + r, i);
    const RowEnd end = finish_row<kUnit>(result.row_max, result.row_sum, whole ? sink_of(p.sinks, head) : -INFINITY);
    const float4 x = end.output(result.o);
    if (!whole) {
        const int64_t at = int64_t(slot) * p.tile_rows + r;
        if (c == 0) {
            if constexpr (kUnit == ScoreUnit::kNatural)
                reinterpret_cast<float2*>(d->partial_lse)[at] = make_float2(result.row_max, result.row_sum);
            else d->partial_lse[at] = end.lse;
        }
        *reinterpret_cast<float4*>(d->partial + at * p.headdim_v + c) = x;
        return;
    }
    if (p.lse && c == 0) p.lse[(int64_t(unit.b) * p.nheads + head) * p.seqlen_q + i] = end.lse * (kUnit == ScoreUnit::kLog2 ? kLn2 : 1.0f);
    T* const out = static_cast<T*>(p.out.data) + unit.b * p.out.batch + i * p.out.row + head * p.out.head + c;
    if constexpr (sizeof(T) == 4) *reinterpret_cast<float4*>(out) = x;
    else *reinterpret_cast<uint2*>(out) = make_uint2(pack_16<T>(x.x, x.y), pack_16<T>(x.z, x.w));
}

// ---- decode_lanes_cluster_sm90: the blocks of a cluster share a unit ----

template <typename Plan>
__global__ void __launch_bounds__(Plan::kBoundThreads, Plan::kBoundBlocks)
    decode_lanes_cluster_kernel(const __grid_constant__ LaneParams p) {
    if constexpr (!kHasClusters) return;
    using T = typename Plan::T;
    constexpr int kD = Plan::kD, kQuads = kD / 4;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float2 stat_of[kLaneWarps][Plan::kRows];                  // maximum and sum of each warp's rows
    __shared__ float2 sent_of[kLaneWarps * Plan::kRows + kMostCluster];  // maximum and sum of each block's rows
    __shared__ __align__(8) uint64_t received_all;
    const LanePlace<Plan> place(p);
    const int cluster = 1 << p.cluster_log, rank = int(cluster_rank());
    const LaneMemory<Plan> memory(p.tile_rows, cluster);
    float *const q_tile = reinterpret_cast<float*>(shared + memory.q), *const o_tile = reinterpret_cast<float*>(shared + memory.o);
    T* const added_k = reinterpret_cast<T*>(shared + memory.added);
    const float* const received = reinterpret_cast<const float*>(shared + memory.received);
    const uint32_t ring = shared_address(shared) + 16 * threadIdx.x, barrier = shared_address(&received_all);

    launch_dependents();
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        fence_mbarrier_init();
        const int own = max(p.tile_rows - rank + cluster - 1, 0) >> p.cluster_log;  // rows that this block finishes
        mbarrier_arrive_expect_tx(barrier, (own << p.cluster_log) * (kD * 4 + 8));
    }
    cluster_arrive();                     // no block may send anything before all have started
    bool waited = p.added && !p.appends;  // another kernel adds keys to the cache
    if (waited) grid_dependency_wait();

    LaneUnit unit{0, 0, 0};  // a cluster has all rows of a key head
    const int index = blockIdx.x >> p.cluster_log;
    unit.b = p.units.divide(index), unit.head_k = p.units.remainder(index, unit.b);
    const int before = lane_keys_before(p, unit.b), entry = lane_entry(p, unit.b);
    float k_factor = 1, v_factor = 1;  // bytes: factors of all keys; loaded while the length is in flight, without a branch
    if constexpr (Plan::kBytes) {
        const int at = clamp_to(entry, 0, p.entries - 1);
        const auto factor = [&](const CacheScale& s) { return p.seqlen_k > 0 ? s.data[at * s.batch + unit.head_k * s.head] : 1; };
        k_factor = factor(p.k_scale), v_factor = factor(p.v_scale);
    }
    LaneKeys keys = lane_keys(p, before);
    const AddedKey added = cut_for_cluster<Plan>(p, unit.b, entry, rank, keys);
    LaneSums<Plan> sums;
    constexpr bool kAppends = !Plan::kBytes;
    attend_to_keys<Plan, kAppends>(sums, p, place, unit, keys, added, entry, q_tile, added_k, ring, [&] {
        float scale = p.scale_log2;
        if (Plan::kBytes) scale *= __int_as_float(opaque(__float_as_int(k_factor)));  // opaque: the copies must not wait for the factor
        stage_rows<Plan, kAppends>(p, unit, added, keys.before, scale, q_tile, added_k, waited);
    });
    sums.store(place, o_tile, stat_of[place.warp], v_factor);
    __syncthreads();

    cluster_wait();  // all blocks have started
    for_each_quad<Plan>(p, place, stat_of, o_tile, [&](int r, int c, const LaneResult& result) {
        const int to = r & (cluster - 1), slot = (r & -cluster) + rank;  // the block that finishes row r
        const uint32_t there = cluster_address(barrier, to);
        store_async_16(cluster_address(shared_address(received + slot * kD + c), to), result.o, there);
        if (c == 0) store_async_8(cluster_address(shared_address(&sent_of[slot]), to), result.row_max, result.row_sum, there);
    });
#pragma unroll 1
    for (int x = 4 * place.warp + place.lane % 4; (x / kQuads << p.cluster_log) + rank < p.tile_rows; x += 4 * kLaneWarps) {
        mbarrier_wait_cluster(barrier, 0);
        const int first = x / kQuads << p.cluster_log, c = x % kQuads * 4;
        const LaneResult result = gather_results(
            place.lane, cluster, [&](int i) { return sent_of[first + i]; }, [&](int i) { return received + (first + i) * kD + c; });
        if (place.lane / 4 == 0) store_row<T>(p, unit, first + rank, c, result);
    }
}

// ---- decode_lanes_sm80: a block works on segments of the schedule ----

struct LaneSegments {
    LaneParams lanes;
    DecodeParams decode;
};

template <typename Plan>
__global__ void __launch_bounds__(Plan::kBoundThreads, Plan::kBoundBlocks)
    decode_lanes_kernel(const __grid_constant__ LaneSegments params) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float2 stat_of[kLaneWarps][Plan::kRows];  // maximum and sum of each warp's rows
    const LaneParams& p = params.lanes;
    const DecodeParams& d = params.decode;
    const LanePlace<Plan> place(p);
    const LaneMemory<Plan> memory(p.tile_rows, 0);
    float *const q_tile = reinterpret_cast<float*>(shared + memory.q), *const o_tile = reinterpret_cast<float*>(shared + memory.o);
    const uint32_t ring = shared_address(shared) + 16 * threadIdx.x;
    constexpr typename Plan::T* kNone = nullptr;

    launch_dependents();
    bool waited = p.added;  // another kernel adds keys to the cache
    if (waited) grid_dependency_wait();
    Segments segments(d);
#pragma unroll 1
    for (Segment segment; segments.next(d, segment);) {
        const LaneUnit unit{segment.b, segment.unit / d.shape.row_tiles, segment.unit % d.shape.row_tiles * p.tile_rows};
        LaneKeys keys = lane_keys(p, lane_keys_before(p, unit.b));
        cut_to_segment(d.shape.tile_shift, segment, keys);
        LaneSums<Plan> sums;
        const auto stage = [&] {
            const float scale = Plan::kNatural ? 1.0f : p.scale_log2;
            stage_rows<Plan, false>(p, unit, AddedKey{}, keys.before, scale, q_tile, kNone, waited);
        };
        attend_to_keys<Plan, false>(sums, p, place, unit, keys, AddedKey{}, lane_entry(p, unit.b), q_tile, kNone, ring, stage, &d);
        sums.store(place, o_tile, stat_of[place.warp]);
        __syncthreads();
        for_each_quad<Plan>(p, place, stat_of, o_tile, [&](int r, int c, const LaneResult& result) {
            store_row<typename Plan::T, Plan::kUnit>(p, unit, r, c, result, &d, segment.slot);
        });
        __syncthreads();  // q and O may be written again
    }
    if (!waited) grid_dependency_wait();  // so the end of this kernel is also the end of the one before
}

// ---- launches ----

template <typename Plan>
cudaError_t launch_lanes_cluster(const DecodeParams& d, const AppendParams* append, cudaStream_t stream) {
    LaunchOptions options;
    options.programmatic = d.after_append, options.cluster = d.shape.cluster;
    options.prefers_shared = d.after_append && Plan::kBesideChain;
    const unsigned blocks = unsigned(decode_units(d.shape, d.attention) * d.shape.cluster);
    const size_t bytes = LaneMemory<Plan>(d.shape.rows, d.shape.cluster).bytes;
    return launch_kernel(decode_lanes_cluster_kernel<Plan>, blocks, kLaneThreads, bytes, stream, lane_params(d, append), options);
}

template <typename Plan>
cudaError_t launch_lanes(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream) {
    if constexpr (!Plan::kNatural)
        if (d.shape.cluster) return launch_lanes_cluster<Plan>(d, append, stream);
    if constexpr (sizeof(typename Plan::T) == 4) {
        const unsigned blocks = unsigned(decode_blocks(d.shape, d.attention, device));
        const size_t bytes = LaneMemory<Plan>(d.shape.rows, 0).bytes;
        return launch_kernel(decode_lanes_kernel<Plan>, blocks, kLaneThreads, bytes, stream, LaneSegments{lane_params(d, nullptr), d},
                             d.after_append);
    } else {
        return cudaErrorInvalidValue;  // 16 bits without a cluster are served by split_sm80/kernel.cuh
    }
}

// One row of q over an 8-bit cache, in clusters.
template <typename T, typename E>
cudaError_t launch_lanes_8bit(const DecodeParams& d, cudaStream_t stream) {
    return decode_bucket(d.attention) == 64 ? launch_lanes_cluster<LanePlan<T, 64, 1, E>>(d, nullptr, stream)
                                            : launch_lanes_cluster<LanePlan<T, 128, 1, E>>(d, nullptr, stream);
}

template <typename T, bool kNatural = false>
cudaError_t launch_lanes_of(const DecodeParams& d, const AppendParams* append, const DeviceInfo& device, cudaStream_t stream) {
    const auto with_columns = [&](auto columns) {
        constexpr int kD = decltype(columns)::value;
        return d.shape.rows == d.shape.row_warps ? launch_lanes<LanePlan<T, kD, 1, T, kNatural>>(d, append, device, stream)
                                                 : launch_lanes<LanePlan<T, kD, 4, T, kNatural>>(d, append, device, stream);
    };
    using std::integral_constant;
    switch (decode_bucket(d.attention)) {
        case 64: return with_columns(integral_constant<int, 64>{});
        case 128: return with_columns(integral_constant<int, 128>{});
        default: return with_columns(integral_constant<int, 256>{});
    }
}

}  // namespace
}  // namespace fa
