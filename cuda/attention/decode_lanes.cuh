// decode_lanes.cuh: few rows of q against few keys, where the time is that of one trip to memory and of the way from there to the result;
// and float32, which the tensor cores would round. New against decode_split.cuh:
//   - CUDA cores: a lane has 16 bytes of a key and of its value, and the same columns of q and O. Lanes that share a key add up its
//     score by shuffles. Every thread copies (cp.async) what it will use itself into a ring of its own: no barrier, a short loop.
//   - A cluster: the keys of a key head are cut into equal pieces for up to 16 blocks, which send their results to the blocks that
//     finish the rows (st.async). One launch, no workspace. Without a cluster (any GPU, float32) the pieces are those of
//     decode_schedule.h, merged by decode_combine.cu.
//   - The step whole: q and the new key and value are turned by the rotary embedding and rounded by the blocks that need them; the
//     last block of a cluster writes the new row to the cache and attends to it from shared memory.
//   - The keys that the cache has are on their way before the kernel ahead has ended, if that does not write them (`programmatic`).
//
// Bound by latency: the parameters, lengths -> keys, and after the kernel ahead q -> scores -> result. The length of the code, which has
// to be read as well, and the number of parameters matter there.
//
// Rows of q: a warp has kRows of them; with more, neighbouring warps take the same keys, which the second finds in L2.
// Shared memory     ring groups x passes x (K | V) x parts x threads x 16 bytes | q (rows, d) float | new key, new value (d) |
//                   O of each warp (kRows, d) | what other blocks send (own rows, cluster, d)
#pragma once

#include "attention/decode_lanes.h"
#include "attention/general_scores.cuh"
#include "attention/kvcache_append.h"
#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <cfloat>
#include <climits>
#include <type_traits>

namespace fa {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kLaneThreads = 32 * kLaneWarps, kMostCluster = 16;

__device__ __forceinline__ uint4 load_shared_bits(uint32_t shared) {
    const float4 x = load_shared_16(shared);
    return make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w));
}

template <typename T>
__device__ __forceinline__ void widen_16_bytes(float (&to)[16 / sizeof(T)], uint4 bits) {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if constexpr (sizeof(T) == 4) to[w] = __uint_as_float(word[w]);
        else unpack_16<T>(reinterpret_cast<float(&)[2]>(to[2 * w]), word[w]);
    }
}

// How a row of K or V lies in a warp: elements of a copy, copies of a lane, lanes of a key, keys of a pass.
template <typename T, int kD>
struct LaneShape {
    static constexpr int kVec = 16 / int(sizeof(T)), kParts = kD > 32 * kVec ? kD / (32 * kVec) : 1;
    static constexpr int kLanes = kD / kVec / kParts, kKeys = 32 / kLanes;
    static_assert(kLanes * kKeys == 32, "lanes share keys evenly");
    static constexpr int kAtOnce = kParts > 1 ? 1 : 2, kGroups = 3;  // passes of a group, groups on their way
    static constexpr uint32_t kGroupBytes = kAtOnce * 2 * kParts * kLaneThreads * 16;
};

// The layout of a block's shared memory, in bytes.
template <typename T, int kD, int kRows>
struct LaneMemory {
    uint32_t q, added, o, received, bytes;
    __host__ __device__ LaneMemory(int rows, int cluster) {
        q = LaneShape<T, kD>::kGroups * LaneShape<T, kD>::kGroupBytes;
        added = q + rows * kD * 4;
        o = added + 2 * kD * uint32_t(sizeof(T));
        received = o + kLaneWarps * kRows * kD * 4;
        bytes = received + (cluster > 0 ? (rows + cluster - 1) / cluster * cluster * kD * 4 : 0);
    }
};

// Bounds of the launch, which say how many registers a thread may have: as many as leave room for two blocks on a multiprocessor. As if a
// block had 896 threads it is 72: then one also finds room beside one of chain_w4_sm90.cu, and where the two follow each other
// programmatically, the first keys are there before the products have ended. Both have to divide an SM's memory alike (prefers_shared),
// which kernels of single products do not: in small models, of smaller heads, these follow, and changing the division took up to 10 % of a
// step of stories110M.
template <typename T, int kD, int kRows>
struct LaneBounds {
    static constexpr bool kBesideChain = sizeof(T) == 2 && kD == 128 && kRows == 1;
    static constexpr int kThreads = kBesideChain ? 896 : kLaneThreads, kBlocks = kBesideChain || kD * sizeof(T) > 512 ? 1 : 2;
};

// Without a cluster a block's work are segments of the schedule.
struct LaneSegments {
    LaneParams lanes;
    DecodeParams decode;
};
__device__ __forceinline__ const LaneParams& lanes_of(const LaneParams& params) { return params; }
__device__ __forceinline__ const LaneParams& lanes_of(const LaneSegments& params) { return params.lanes; }
__device__ __forceinline__ const DecodeParams& decode_of(const LaneSegments& params) { return params.decode; }

// With a cluster it is a piece of one unit.
class ClusterUnit {
public:
    __device__ __forceinline__ explicit ClusterUnit(const LaneParams&) {}
    __device__ __forceinline__ bool next(const LaneParams& p, Segment& segment) {
        const int unit = blockIdx.x >> p.cluster_log, b = p.units.divide(unit);
        segment = {b, p.units.remainder(unit, b), 0, 0, -1};
        return left_-- > 0;
    }

private:
    int left_ = 1;
};
__device__ __forceinline__ const LaneParams& decode_of(const LaneParams& params) { return params; }

template <typename T, int kD, int kRows, bool kCluster>
__global__ void __launch_bounds__(LaneBounds<T, kD, kRows>::kThreads, LaneBounds<T, kD, kRows>::kBlocks)
    decode_lanes_kernel(const __grid_constant__ std::conditional_t<kCluster, LaneParams, LaneSegments> params) {
    if constexpr (kCluster && !kHasClusters) return;
    using Shape = LaneShape<T, kD>;
    constexpr int kVec = Shape::kVec, kParts = Shape::kParts, kLanes = Shape::kLanes, kKeys = Shape::kKeys, kDims = kVec * kParts;
    constexpr int kAtOnce = Shape::kAtOnce, kGroups = Shape::kGroups;
    constexpr bool kQueryInRegisters = kRows == 1;
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float2 stat_of[kLaneWarps][kRows];                                 // maximum and sum of each warp's rows
    __shared__ float2 sent_of[kCluster ? kLaneWarps * kRows + kMostCluster : 1];  // of each block's
    __shared__ __align__(8) uint64_t received_all;
    const LaneParams& p = lanes_of(params);
    const auto& d = decode_of(params);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key_warps = 1 << p.key_warps_log, row_warps = kLaneWarps >> p.key_warps_log;
    const int column = lane % kLanes * kVec;  // of part 0; part x is kLanes * kVec further
    const int cluster = kCluster ? 1 << p.cluster_log : 0, rank = kCluster ? int(cluster_rank()) : 0;
    const LaneMemory<T, kD, kRows> memory(p.tile_rows, cluster);
    float* const q_tile = reinterpret_cast<float*>(shared + memory.q);
    T* const added_k = reinterpret_cast<T*>(shared + memory.added);
    const uint32_t ring = shared_address(shared) + 16 * threadIdx.x, added_row_at = shared_address(added_k);
    float* const o_tile = reinterpret_cast<float*>(shared + memory.o);
    const float* const received = reinterpret_cast<const float*>(shared + memory.received);
    const uint32_t barrier = shared_address(&received_all);

    launch_dependents();
    if constexpr (kCluster) {  // a block sends nothing before all have started
        if (threadIdx.x == 0) {
            mbarrier_init(barrier, 1);
            fence_mbarrier_init();
            const int own = max(p.tile_rows - rank + cluster - 1, 0) >> p.cluster_log;  // rows that this block finishes
            mbarrier_arrive_expect_tx(barrier, (own << p.cluster_log) * (kD * 4 + 8));
        }
        cluster_arrive();
    }
    bool waited = p.added && !p.appends;  // another kernel puts keys into the cache
    if (waited) grid_dependency_wait();
    std::conditional_t<kCluster, ClusterUnit, Segments> segments(d);
#pragma unroll 1
    for (Segment segment; segments.next(d, segment);) {
        int b = segment.b, head_k = segment.unit, row0 = 0;  // a cluster has all rows of a key head
        if constexpr (!kCluster) head_k = segment.unit / d.row_tiles, row0 = segment.unit % d.row_tiles * p.tile_rows;
        const auto query_of = [&](int r) { return p.seqlen_q == 1 ? 0 : p.group.divide(r); };  // row r is head r % group of it

        // ---- this block's keys: [first_key, end_key) of the cache, and in one block the key that joins it; as sequence_keys ----
        const int before = p.seqlens ? p.seqlens[b] : p.seqlen_k - p.added;
        const int count = before < 0 ? 0 : min(before, p.seqlen_k - p.added) + p.added;
        const int shift = p.top_left ? 0 : count - p.seqlen_q;
        const int begin = p.window_left >= 0 ? min(max(shift - p.window_left, 0), count) : 0;
        const int end = max(p.window_right >= 0 ? min(p.seqlen_q + shift + p.window_right, count) : count, begin);
        const int entry = !p.entries ? b : p.block_table ? 0 : p.batch_idx ? p.batch_idx[b] : b;
        const int entry_read = p.entries ? clamp_to(entry, 0, p.entries - 1) : b;
        int first_key, end_key;
        bool adds = false;
        int added_entry = entry, added_row = before;
        if constexpr (kCluster) {
            int cached = end;
            if (p.appends && before >= 0 && before <= p.seqlen_k - 1) {
                if (p.block_table) {
                    const int page = p.page.divide(before);
                    added_entry = p.block_table[b * p.table_row + page], added_row = p.page.remainder(before, page);
                }
                if (unsigned(added_entry) < unsigned(p.entries)) cached = min(end, before), adds = rank == cluster - 1;
            }
            const int log = p.key_warps_log + p.cluster_log;
            const int passes = (max(cached - begin, 0) + (kKeys << log) - 1) / kKeys >> log;  // of every warp
            first_key = begin + ((rank * passes) << p.key_warps_log) * kKeys;
            end_key = min(first_key + (passes << p.key_warps_log) * kKeys, cached);
        } else {
            const int first_tile = begin >> d.tile_shift;
            first_key = max((first_tile + segment.begin) << d.tile_shift, begin);
            end_key = min((first_tile + segment.end) << d.tile_shift, end);
        }

        // ---- copies: group g of this lane's keys, each thread to places of its own that no other reads ----
        const T* const k = static_cast<const T*>(p.k.data) + entry_read * p.k.batch + head_k * p.k.head + column;
        const T* const v = static_cast<const T*>(p.v.data) + entry_read * p.v.batch + head_k * p.v.head + column;
        const int row_warp = warp & (row_warps - 1), key_step = kKeys << p.key_warps_log;
        const int own_key = first_key + (warp >> (3 - p.key_warps_log)) * kKeys + lane / kLanes;
        const auto key_of = [&](int g, int i) { return own_key + (g * kAtOnce + i) * key_step; };
        int page[kAtOnce] = {};  // of the group that is copied next
        const auto find = [&](int g) {
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (const int key = key_of(g, i); p.block_table && key < end_key)
                    page[i] = clamp_to(p.block_table[b * p.table_row + p.page.divide(key)], 0, p.entries - 1);
        };
        const auto copy = [&](int g, int slot) {
            const uint32_t to = ring + slot * Shape::kGroupBytes;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
                const int key = key_of(g, i), row = p.block_table ? p.page.remainder(key, p.page.divide(key)) : key;
                const T* const from_k = k + (page[i] * p.k.batch + row * p.k.row);
                const T* const from_v = v + (page[i] * p.v.batch + row * p.v.row);
#pragma unroll
                for (int x = 0; x < kParts; ++x) {
                    const int c = x * kLanes * kVec;
                    const bool is_k = key < end_key && column + c < p.headdim, is_v = key < end_key && column + c < p.headdim_v;
                    cp_async_16(to + ((i * 2 + 0) * kParts + x) * kLaneThreads * 16, is_k ? from_k + c : k, is_k ? 16 : 0);
                    cp_async_16(to + ((i * 2 + 1) * kParts + x) * kLaneThreads * 16, is_v ? from_v + c : v, is_v ? 16 : 0);
                }
            }
            find(g + 1);
        };

        // ---- this warp's rows ----
        const int tile_row = row_warp * kRows;
        const bool ordered = p.seqlen_q > 1 && (p.window_left >= 0 || p.window_right >= 0);
        float Q[kQueryInRegisters ? kParts : 1][kRows][kVec], O[kRows][kDims] = {}, row_max[kRows], row_sum[kRows];
#pragma unroll
        for (int j = 0; j < kRows; ++j) row_max[j] = -FLT_MAX, row_sum[j] = 0;
        const auto aligned = [&](int j) { return query_of(row0 + opaque(tile_row) + j) + shift; };
        const auto load_q = [&](float(&to)[kRows][kVec], int x) {
#pragma unroll
            for (int j = 0; j < kRows; ++j)
#pragma unroll
                for (int c = 0; c < kVec; c += 4) {
                    const float4 four = load_shared_16(shared_address(q_tile + (tile_row + j) * kD + column + x * kLanes * kVec + c));
                    to[j][c] = four.x, to[j][c + 1] = four.y, to[j][c + 2] = four.z, to[j][c + 3] = four.w;
                }
        };
        // q, scaled, and the new key and value, turned and rounded: a thread has every so manyth element, and where its first one lies and
        // by what it turns is known before the kernel ahead has ended.
        const auto stage = [&] {
            const int slots = (p.tile_rows + (adds ? 2 : 0)) * kD, group = int(p.group.divisor);
            const bool ordered = p.window_left >= 0 || p.window_right >= 0;  // as in append_position
            int x = threadIdx.x;
#pragma unroll 1
            do {
                const int slot = x / kD, c = x % kD, r = row0 + slot;
                const bool query = slot < p.tile_rows, key = slot == p.tile_rows;
                const int i = query ? query_of(r) : 0, columns = query ? (r < p.rows ? p.headdim : 0) : key ? p.headdim : p.headdim_v;
                const T* from;
                if (query)
                    from = static_cast<const T*>(p.q.data) + b * p.q.batch + i * p.q.row + (head_k * group + r - i * group) * p.q.head;
                else if (key) from = static_cast<const T*>(p.k_new) + b * p.k_new_batch + head_k * p.k_new_head;
                else from = static_cast<const T*>(p.v_new) + b * p.v_new_batch + head_k * p.v_new_head;
                const bool is = x < slots && c < columns, turns = kCluster && p.rotary_cos && (query || key) && c < p.rotary_dim && is;
                int pair = c;
                float cosine = 1, sine = 0;
                if (turns) {
                    const int half = p.rotary_dim / 2;
                    const bool first = p.rotary_interleaved ? c % 2 == 0 : c < half;
                    pair = p.rotary_interleaved ? c ^ 1 : first ? c + half : c - half;
                    const int64_t at = int64_t(clamp_to(max(before, 0) + ordered * i, 0, p.rotary_rows - 1)) * half +
                                       (p.rotary_interleaved ? c / 2 : min(c, pair));
                    cosine =
                        p.rotary_float32 ? static_cast<const float*>(p.rotary_cos)[at] : to_float(static_cast<const T*>(p.rotary_cos)[at]);
                    sine =
                        p.rotary_float32 ? static_cast<const float*>(p.rotary_sin)[at] : to_float(static_cast<const T*>(p.rotary_sin)[at]);
                    if (first) sine = -sine;
                }
                if (!waited) grid_dependency_wait();
                waited = true;
                if (x < slots) {
                    T result = from_float<T>(0.0f);
                    if (is) result = __ldcg(from + c);
                    if (turns) result = from_float<T>(to_float(result) * cosine + to_float(__ldcg(from + pair)) * sine);
                    if (query) q_tile[x] = to_float(result) * p.scale;
                    else added_k[x - p.tile_rows * kD] = result;
                    if (!query && is) {
                        const TensorView& view = key ? p.k : p.v;
                        static_cast<T*>(view.data)[added_entry * view.batch + added_row * view.row + head_k * view.head + c] = result;
                    }
                }
                x += kLaneThreads;
            } while (x < slots);
            __syncthreads();
            if constexpr (kQueryInRegisters) {
#pragma unroll
                for (int x = 0; x < kParts; ++x) load_q(Q[x], x);
            }
        };

        // S = Q K^T of so many keys of this lane, in powers of 2.
        const auto scores = [&](float(&S)[kAtOnce][kRows], const uint4(&K)[kAtOnce][kParts], int key0, int end) {
#pragma unroll
            for (int x = 0; x < kParts; ++x) {
                if constexpr (!kQueryInRegisters) load_q(Q[0], x);
                const auto& q = Q[kQueryInRegisters ? x : 0];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) {
                    float part[kVec];
                    widen_16_bytes<T>(part, K[i][x]);
#pragma unroll
                    for (int j = 0; j < kRows; ++j) {
                        float sum = x ? S[i][j] : 0;
#pragma unroll
                        for (int c = 0; c < kVec; ++c) sum += q[j][c] * part[c];
                        S[i][j] = sum;
                    }
                }
            }
#pragma unroll
            for (int offset = kLanes / 2; offset; offset /= 2)
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                    for (int j = 0; j < kRows; ++j) S[i][j] += __shfl_xor_sync(~0u, S[i][j], offset);
            if (p.softcap != 0) {
                const float inverse = __fdividef(1.0f, p.softcap), cap = p.softcap * kLog2e;
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                    for (int j = 0; j < kRows; ++j) S[i][j] = cap * tanh_fast(S[i][j] * inverse);
            }
            if (p.alibi_slopes) {
#pragma unroll
                for (int j = 0; j < kRows; ++j) {
                    const int r = min(row0 + tile_row + j, p.rows - 1),
                              head = head_k * int(p.group.divisor) + r - query_of(r) * int(p.group.divisor);
                    const float slope = p.alibi_slopes[b * p.alibi_batch + head] * kLog2e;
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i) S[i][j] -= slope * fabsf(float(aligned(j) - key0 - i * key_step));
                }
            }
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int j = 0; j < kRows; ++j)
                    if (key0 + i * key_step >= end) S[i][j] = -INFINITY;
            if (ordered) {
#pragma unroll
                for (int j = 0; j < kRows; ++j) {
                    const int first = p.window_left < 0 ? INT_MIN : aligned(j) - p.window_left;
                    const int last = p.window_right < 0 ? INT_MAX : aligned(j) + p.window_right;
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i)
                        if (key0 + i * key_step < first || key0 + i * key_step > last) S[i][j] = -INFINITY;
                }
            }
        };
        // S becomes P = 2^(S - row_max).
        const auto softmax = [&](float(&S)[kAtOnce][kRows]) {
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
                float next = row_max[j];
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) next = fmaxf(next, S[i][j]);
                const float factor = exp2_approx(row_max[j] - next);
                row_max[j] = next, row_sum[j] *= factor;
                if (__any_sync(~0u, factor != 1)) {
#pragma unroll
                    for (int c = 0; c < kDims; ++c) O[j][c] *= factor;
                }
#pragma unroll
                for (int i = 0; i < kAtOnce; ++i) row_sum[j] += S[i][j] = exp2_approx(S[i][j] - next);
            }
        };
        const auto add_values = [&](const float(&S)[kAtOnce][kRows], const uint4(&V)[kAtOnce][kParts]) {  // O += P V
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                for (int x = 0; x < kParts; ++x) {
                    float part[kVec];
                    widen_16_bytes<T>(part, V[i][x]);
#pragma unroll
                    for (int c = 0; c < kVec; ++c)
#pragma unroll
                        for (int j = 0; j < kRows; ++j) O[j][x * kVec + c] += S[i][j] * part[c];
                }
        };

        // ---- the keys; last, by one warp for each row, the new one ----
        const int passes = end_key > first_key ? (end_key - first_key + key_step - 1) / unsigned(key_step) : 0;
        const int groups = (passes + kAtOnce - 1) / kAtOnce;
        const bool sees_added = adds && lane < kLanes && warp < row_warps && count > begin && count <= end;
        find(0);
        int slot = 0;
#pragma unroll 1
        for (int g = -kGroups; g < groups + adds; ++g) {
            if (g >= 0) {
                cp_async_wait_group<kGroups - 1>();
                const bool whole = g < groups;  // else the new key alone
                uint32_t from = ring + slot * Shape::kGroupBytes, part_step = kLaneThreads * 16;
                if (!whole) from = added_row_at + column * uint32_t(sizeof(T)), part_step = kLanes * 16;
                const uint32_t v_from = from + (whole ? kParts * part_step : kD * uint32_t(sizeof(T)));
                uint4 part[kAtOnce][kParts];
                const auto load = [&](uint32_t at) {
#pragma unroll
                    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
                        for (int x = 0; x < kParts; ++x) {
                            part[i][x] = make_uint4(0, 0, 0, 0);
                            if (whole || i == 0) part[i][x] = load_shared_bits(at + (i * 2 * kParts + x) * part_step);
                        }
                };
                float S[kAtOnce][kRows];
                load(from);
                scores(S, part, whole ? key_of(g, 0) : count - 1, whole ? end_key : sees_added ? count : 0);
                softmax(S);
                load(v_from);
                add_values(S, part);
            }
            if (g + kGroups < groups) copy(g + kGroups, slot);
            cp_async_commit();
            slot = slot + 1 == kGroups ? 0 : slot + 1;
            if (g == -1) stage();
        }

        // ---- the lanes of a column, then the warps ----
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
            float top = row_max[j];
#pragma unroll
            for (int offset = kLanes; offset < 32; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
            const float factor = exp2_approx(row_max[j] - top);
            row_sum[j] *= factor;
#pragma unroll
            for (int c = 0; c < kDims; ++c) O[j][c] *= factor;
#pragma unroll
            for (int offset = kLanes; offset < 32; offset *= 2) {
                row_sum[j] += __shfl_xor_sync(~0u, row_sum[j], offset);
#pragma unroll
                for (int c = 0; c < kDims; ++c) O[j][c] += __shfl_xor_sync(~0u, O[j][c], offset);
            }
            if (lane == 0) stat_of[warp][j] = make_float2(top, row_sum[j]);
            if (lane < kLanes)
#pragma unroll
                for (int x = 0; x < kDims; x += 4) {
                    const int c = column + x / kVec * kLanes * kVec + x % kVec;
                    *reinterpret_cast<float4*>(o_tile + (warp * kRows + j) * kD + c) =
                        make_float4(O[j][x], O[j][x + 1], O[j][x + 2], O[j][x + 3]);
                }
        }
        __syncthreads();

        // Eight lanes add up four columns of a row from `count` places: the maximum and the sum there, and O, by functions of the place.
        const auto gather = [&](int count, const auto& stat, const auto& o, float& top, float& sum) {
            top = -FLT_MAX, sum = 0;
            float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 1
            for (int i = lane / 4; i < count; i += 8) {
                const float2 s = stat(i);
                const float4 x = *reinterpret_cast<const float4*>(o(i));
                const float next = fmaxf(top, s.x), factor = exp2_approx(top - next), weight = exp2_approx(s.x - next);
                top = next, sum = sum * factor + weight * s.y;
                total.x = total.x * factor + weight * x.x, total.y = total.y * factor + weight * x.y;
                total.z = total.z * factor + weight * x.z, total.w = total.w * factor + weight * x.w;
            }
            float all = top;
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, offset));
            const float factor = exp2_approx(top - all);
            top = all, sum *= factor, total.x *= factor, total.y *= factor, total.z *= factor, total.w *= factor;
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) {
                sum += __shfl_xor_sync(~0u, sum, offset);
                total.x += __shfl_xor_sync(~0u, total.x, offset), total.y += __shfl_xor_sync(~0u, total.y, offset);
                total.z += __shfl_xor_sync(~0u, total.z, offset), total.w += __shfl_xor_sync(~0u, total.w, offset);
            }
            return total;
        };
        const auto finish = [&](int r, int c, float4 x, float top, float sum) {  // row r of the tile, columns c .. c + 3
            if (row0 + r >= p.rows || c >= p.headdim_v) return;
            const int i = query_of(row0 + r), head = head_k * int(p.group.divisor) + row0 + r - i * int(p.group.divisor);
            float inverse = sum == 0 ? 0 : __fdividef(1.0f, sum);
            if constexpr (!kCluster) {
                if (segment.slot >= 0) {
                    const int64_t at = int64_t(segment.slot) * p.tile_rows + r;
                    if (c == 0) d.partial_lse[at] = sum == 0 ? -INFINITY : top + log2f(sum);
                    *reinterpret_cast<float4*>(d.partial + at * p.headdim_v + c) =
                        make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
                    return;
                }
            }
            if (const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY; sink != -INFINITY) {
                const float next = fmaxf(top, sink), factor = exp2_approx(top - next);
                sum = sum * factor + exp2_approx(sink - next), top = next, inverse = factor / sum;
            }
            if (p.lse && c == 0) p.lse[(int64_t(b) * p.nheads + head) * p.seqlen_q + i] = sum == 0 ? -INFINITY : (top + log2f(sum)) * kLn2;
            T* const out = static_cast<T*>(p.out.data) + b * p.out.batch + i * p.out.row + head * p.out.head + c;
            if constexpr (sizeof(T) == 4) {
                *reinterpret_cast<float4*>(out) = make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
            } else {
                *reinterpret_cast<uint2*>(out) =
                    make_uint2(pack_16<T>(x.x * inverse, x.y * inverse), pack_16<T>(x.z * inverse, x.w * inverse));
            }
        };

        if (kCluster) cluster_wait();                                                               // all have started
        constexpr int kQuads = kD / 4, kQuadsOfWarp = 4, kQuadsAtOnce = kQuadsOfWarp * kLaneWarps;  // a warp has those of one row
        const int own_quad = kQuadsOfWarp * warp + lane % 4;
#pragma unroll 1
        for (int x = own_quad; x < p.tile_rows * kQuads; x += kQuadsAtOnce) {
            const int r = x / kQuads, c = x % kQuads * 4, first = r / kRows;
            float top, sum;
            const float4 total = gather(
                key_warps, [&](int i) { return stat_of[i * row_warps + first][r % kRows]; },
                [&](int i) { return o_tile + ((i * row_warps + first) * kRows + r % kRows) * kD + c; }, top, sum);
            if (lane / 4) continue;
            if constexpr (kCluster) {  // to the block that finishes row r
                const int to = r & (cluster - 1), slot = (r & -cluster) + rank;
                store_async_16(cluster_address(shared_address(received + slot * kD + c), to), total, cluster_address(barrier, to));
                if (c == 0) store_async_8(cluster_address(shared_address(&sent_of[slot]), to), top, sum, cluster_address(barrier, to));
            } else {
                finish(r, c, total, top, sum);
            }
        }
        if constexpr (kCluster) {
#pragma unroll 1
            for (int x = own_quad; (x / kQuads << p.cluster_log) + rank < p.tile_rows; x += kQuadsAtOnce) {
                mbarrier_wait_cluster(barrier, 0);
                const int first = x / kQuads << p.cluster_log, c = x % kQuads * 4;
                float top, sum;
                const float4 total = gather(
                    cluster, [&](int i) { return sent_of[first + i]; }, [&](int i) { return received + (first + i) * kD + c; }, top, sum);
                if (lane / 4 == 0) finish(first + rank, c, total, top, sum);
            }
        }
        if (!kCluster) __syncthreads();  // q and O may be written again
    }
    if (!kCluster && !waited) grid_dependency_wait();  // so that this kernel's end implies the end of the one before
}

template <typename T, int kD, int kRows, bool kCluster>
cudaError_t launch_lanes(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream) {
    LaunchOptions options;
    options.programmatic = d.after_append;
    options.prefers_shared = d.after_append && LaneBounds<T, kD, kRows>::kBesideChain;
    const size_t bytes = LaneMemory<T, kD, kRows>(d.rows, d.cluster).bytes;
    const LaneParams params = lane_params(d, append);
    if constexpr (kCluster) {
        options.cluster = d.cluster;
        const unsigned blocks = unsigned(decode_units(d) * d.cluster);
        return launch_kernel(decode_lanes_kernel<T, kD, kRows, true>, blocks, kLaneThreads, bytes, stream, params, options);
    } else {
        const unsigned blocks = unsigned(decode_blocks(d, device));
        return launch_kernel(decode_lanes_kernel<T, kD, kRows, false>, blocks, kLaneThreads, bytes, stream, LaneSegments{params, d},
                             options);
    }
}

template <typename T, int kD>
cudaError_t launch_lanes(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream) {
    const bool one = d.rows == d.row_warps;
    if (d.cluster)
        return one ? launch_lanes<T, kD, 1, true>(d, append, device, stream) : launch_lanes<T, kD, 4, true>(d, append, device, stream);
    if constexpr (sizeof(T) == 4)
        return one ? launch_lanes<T, kD, 1, false>(d, append, device, stream) : launch_lanes<T, kD, 4, false>(d, append, device, stream);
    else return cudaErrorInvalidValue;  // 16 bits without a cluster are decode_split.cuh's
}

template <typename T>
cudaError_t launch_lanes(const DecodeParams& d, const AppendParams* append, const DecodeDevice& device, cudaStream_t stream) {
    switch (decode_bucket(d.attention)) {
        case 64: return launch_lanes<T, 64>(d, append, device, stream);
        case 128: return launch_lanes<T, 128>(d, append, device, stream);
        default: return launch_lanes<T, 256>(d, append, device, stream);
    }
}

}  // namespace
}  // namespace fa
