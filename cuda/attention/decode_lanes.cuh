// decode_lanes.cuh: few rows of q against few keys, where the time is that of one trip to memory and of the way from there to the result;
// and float32, which the tensor cores would round. New against decode_split.cuh:
//   - CUDA cores: a lane has 16 bytes of a key and of its value, straight from memory in registers, and the same columns of q and O. Lanes
//     that share a key add up its score by shuffles; nothing is laid out in shared memory, nothing waits for a tile.
//   - A cluster: the keys of a key head are cut into equal pieces for up to 16 blocks, whose results meet in each other's shared memory.
//     One launch, no workspace. Without a cluster (any GPU, float32) the pieces are those of decode_schedule.h, merged by
//     decode_combine.cu.
//   - The step whole: q and the new key and value are turned by the rotary embedding and rounded by the blocks that need them; the last
//     block of a cluster writes the new row to the cache and attends to it from shared memory.
//   - What the kernel before does not write, the keys that the cache has, is on its way before that kernel has ended.
//
// Rows of q: a warp has kRows of them; with more, neighbouring warps take the same keys (the second finds them in L1).
// Shared memory     q (rows, d) float | new key, new value (d) | O of each warp (kRows, d) | what other blocks send (rows of mine, cluster,
// d)
#pragma once

#include "attention/decode.h"
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

template <typename T>
__device__ __forceinline__ void widen_16_bytes(float (&to)[16 / sizeof(T)], uint4 bits) {
    const uint32_t word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if constexpr (sizeof(T) == 4) to[w] = __uint_as_float(word[w]);
        else unpack_16<T>(reinterpret_cast<float(&)[2]>(to[2 * w]), word[w]);
    }
}

// The layout of a block's shared memory, in bytes.
template <typename T, int kD, int kRows>
struct LaneMemory {
    uint32_t added, o, received, bytes;
    __host__ __device__ LaneMemory(int rows, int cluster) {
        added = rows * kD * 4;
        o = added + 2 * kD * uint32_t(sizeof(T));
        received = o + kLaneWarps * kRows * kD * 4;
        bytes = received + (cluster > 1 ? (rows + cluster - 1) / cluster * cluster * kD * 4 : 0);
    }
};

// The work of a block of a cluster: one unit, of which the cluster's blocks have a piece each.
class ClusterUnit {
public:
    __device__ __forceinline__ explicit ClusterUnit(const DecodeParams&) {}
    __device__ __forceinline__ bool next(const DecodeParams& d, Segment& segment) {
        const int unit = blockIdx.x / d.cluster;
        segment = {unit / d.heads(), unit % d.heads(), 0, 0, -1};
        return left_-- > 0;
    }

private:
    int left_ = 1;
};

template <typename T, int kD, int kRows, bool kCluster>
__global__ void __launch_bounds__(kLaneThreads, kD * sizeof(T) > 512 ? 1 : 2) decode_lanes_kernel(const __grid_constant__ DecodeStep step) {
    constexpr int kVec = 16 / int(sizeof(T)), kParts = kD > 32 * kVec ? kD / (32 * kVec) : 1;  // elements of a load, loads of a lane
    constexpr int kLanes = kD / kVec / kParts, kKeys = 32 / kLanes, kDims = kVec * kParts;     // lanes of a key, keys of a warp's pass
    constexpr int kDepth = kRows == 1 ? 4 / kParts : kParts > 1 || sizeof(T) == 2 ? 2 : 3;  // passes on their way together
    constexpr bool kQueryInRegisters = kRows == 1;
    static_assert(kLanes * kKeys == 32 && kDepth >= 1, "lanes share keys evenly");
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ float2 stat_of[kLaneWarps][kRows];                                // maximum and sum of each warp's rows
    __shared__ float2 sent_of[kCluster ? kLaneWarps * kRows : 1][kMostCluster];  // of each block's
    const DecodeParams& d = step.decode;
    const AttentionParams& p = d.attention;
    const CacheView& cache = p.cache;
    const AppendParams& a = step.append;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warps = d.row_warps, key_warps = kLaneWarps / row_warps;
    const int column = lane % kLanes * kVec;  // of part 0; part x is kLanes * kVec further
    const int cluster = kCluster ? d.cluster : 1, rank = kCluster ? int(cluster_rank()) : 0;
    const int rows = p.seqlen_q * p.group;
    const LaneMemory<T, kD, kRows> memory(d.rows, cluster);
    float* const q_tile = reinterpret_cast<float*>(shared);
    T* const added_k = reinterpret_cast<T*>(shared + memory.added);
    T* const added_v = added_k + kD;
    float* const o_tile = reinterpret_cast<float*>(shared + memory.o);
    const float* const received = reinterpret_cast<const float*>(shared + memory.received);

    if (kCluster) cluster_arrive();  // a block sends nothing before all have started
    launch_dependents();
    bool waited = false;
    std::conditional_t<kCluster, ClusterUnit, Segments> segments(d);
#pragma unroll 1
    for (Segment segment; segments.next(d, segment);) {
        const int b = segment.b, head_k = segment.unit / d.row_tiles, row0 = segment.unit % d.row_tiles * d.rows;
        const SequenceKeys keys = sequence_keys(d, b);

        // ---- this block's keys: [first_key, end_key) of the cache, and in one block the key that joins it ----
        int first_key, end_key;
        bool adds = false;
        if constexpr (kCluster) {
            int end = keys.end;
            if (a.seqlen_new && !append_row(a, RowOf::kKey, b, 0, head_k).skip) end = min(end, keys.count - 1), adds = rank == cluster - 1;
            const int per_pass = kKeys * key_warps,
                      each = (max(end - keys.begin, 0) + cluster * per_pass - 1) / (cluster * per_pass) * per_pass;
            first_key = keys.begin + rank * each, end_key = min(first_key + each, end);
        } else {
            first_key = max((keys.first_tile + segment.begin) << d.tile_shift, keys.begin);
            end_key = min((keys.first_tile + segment.end) << d.tile_shift, keys.end);
        }

        // ---- loads: pass i of this lane ----
        const int entry = !cache.entries ? b : cache.block_table ? 0 : cache_entry(cache, b);
        const T* const k = static_cast<const T*>(p.k.data) + entry * p.k.batch + head_k * p.k.head + column;
        const T* const v = static_cast<const T*>(p.v.data) + entry * p.v.batch + head_k * p.v.head + column;
        const int own_key = first_key + warp / row_warps * kKeys + lane / kLanes, key_step = key_warps * kKeys;
        uint4 K[kDepth][kParts], V[kDepth][kParts];
        const auto load = [&](uint4(&to)[kDepth][kParts], const T* from, const TensorView& view, int columns, int pass) {
            int page[kDepth];
            if (cache.block_table) {
#pragma unroll
                for (int i = 0; i < kDepth; ++i) {
                    const int key = own_key + (pass + i) * key_step;
                    page[i] = key < end_key ? cache_page(cache, b, key / cache.page_size) : 0;
                }
            }
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
                const int key = own_key + (pass + i) * key_step;
                const T* at = from;
                if (cache.block_table) at += page[i] * view.batch + key % cache.page_size * view.row;
                else at += key * view.row;
#pragma unroll
                for (int x = 0; x < kParts; ++x) {
                    const bool is = key < end_key && column + x * kLanes * kVec < columns;
                    to[i][x] = is ? *reinterpret_cast<const uint4*>(at + x * kLanes * kVec) : make_uint4(0, 0, 0, 0);
                }
            }
        };

        // ---- this warp's rows ----
        const int tile_row = warp % row_warps * kRows;  // row r of the seqlen_q * group rows is head r % group of query r / group
        const bool ordered = p.seqlen_q > 1 && (p.window_left >= 0 || p.window_right >= 0);
        float Q[kQueryInRegisters ? kParts : 1][kRows][kVec], O[kRows][kDims] = {}, row_max[kRows], row_sum[kRows];
#pragma unroll
        for (int j = 0; j < kRows; ++j) row_max[j] = -FLT_MAX, row_sum[j] = 0;
        const auto aligned = [&](int j) { return (row0 + opaque(tile_row) + j) / p.group + keys.shift; };
        const auto load_q = [&](float(&to)[kRows][kVec], int x) {
#pragma unroll
            for (int j = 0; j < kRows; ++j)
#pragma unroll
                for (int c = 0; c < kVec; c += 4) {
                    const float4 four = load_shared_16(shared_address(q_tile + (tile_row + j) * kD + column + x * kLanes * kVec + c));
                    to[j][c] = four.x, to[j][c + 1] = four.y, to[j][c + 2] = four.z, to[j][c + 3] = four.w;
                }
        };
        const auto stage = [&] {
            if (!waited) grid_dependency_wait();
            waited = true;
            const auto turned = [&](const T* from, int32_t position, int c) {
                const auto value = [&](int x) { return to_float(__ldcg(from + x)); };
                const auto angle = [&](const void* table, int64_t at) {
                    return a.rotary_dtype == DType::kFloat32 ? static_cast<const float*>(table)[at]
                                                             : to_float(static_cast<const T*>(table)[at]);
                };
                return from_float<T>(rotated(a, position, c, value, angle));
            };
            const float scale = p.softcap == 0 ? p.scale * kLog2e : p.scale;
#pragma unroll 1
            for (int x = threadIdx.x; x < d.rows * kD; x += kLaneThreads) {
                const int r = row0 + x / kD, c = x % kD;
                float value = 0;
                if (r < rows && c < p.headdim) {
                    const int i = r / p.group, head = head_k * p.group + r % p.group;
                    const T* const from = static_cast<const T*>(p.q.data) + b * p.q.batch + i * p.q.row + head * p.q.head;
                    const int32_t position = kCluster && a.rotary_cos ? append_row(a, RowOf::kQuery, b, i, head).position : -1;
                    value = to_float(turned(from, position, c)) * scale;
                }
                q_tile[x] = value;
            }
            if (adds) {
#pragma unroll 1
                for (int x = threadIdx.x; x < 2 * kD; x += kLaneThreads) {
                    const bool key = x < kD;
                    const int c = x % kD;
                    T value = from_float<T>(0.0f);
                    if (c < (key ? p.headdim : p.headdim_v)) {
                        const AppendRow row = append_row(a, key ? RowOf::kKey : RowOf::kValue, b, 0, head_k);
                        value = turned(static_cast<const T*>((key ? a.k_new : a.v_new).data) + row.from, row.position, c);
                        static_cast<T*>((key ? p.k : p.v).data)[row.to + c] = value;
                    }
                    added_k[x] = value;
                }
            }
            __syncthreads();
            if constexpr (kQueryInRegisters) {
#pragma unroll
                for (int x = 0; x < kParts; ++x) load_q(Q[x], x);
            }
        };

        // S = Q K^T of so many keys of this lane, in powers of 2.
        const auto scores = [&](auto& S, const auto& keys_of, int key0, int end) {
            constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(S)>>;
#pragma unroll
            for (int x = 0; x < kParts; ++x) {
                if constexpr (!kQueryInRegisters) load_q(Q[0], x);
                const auto& q = Q[kQueryInRegisters ? x : 0];
#pragma unroll
                for (int i = 0; i < kCount; ++i) {
                    float part[kVec];
                    widen_16_bytes<T>(part, keys_of[i][x]);
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
                for (int i = 0; i < kCount; ++i)
#pragma unroll
                    for (int j = 0; j < kRows; ++j) S[i][j] += __shfl_xor_sync(~0u, S[i][j], offset);
            if (p.softcap != 0) {
                const float inverse = 1.0f / p.softcap, cap = p.softcap * kLog2e;
#pragma unroll
                for (int i = 0; i < kCount; ++i)
#pragma unroll
                    for (int j = 0; j < kRows; ++j) S[i][j] = cap * tanh_fast(S[i][j] * inverse);
            }
            if (p.alibi_slopes) {
#pragma unroll
                for (int j = 0; j < kRows; ++j) {
                    const int head = head_k * p.group + min(row0 + tile_row + j, rows - 1) % p.group;
                    const float slope = p.alibi_slopes[b * p.alibi_batch + head] * kLog2e;
#pragma unroll
                    for (int i = 0; i < kCount; ++i) S[i][j] -= slope * fabsf(float(aligned(j) - key0 - i * key_step));
                }
            }
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int j = 0; j < kRows; ++j)
                    if (key0 + i * key_step >= end) S[i][j] = -INFINITY;
            if (ordered) {
#pragma unroll
                for (int j = 0; j < kRows; ++j) {
                    const int first = p.window_left < 0 ? INT_MIN : aligned(j) - p.window_left;
                    const int last = p.window_right < 0 ? INT_MAX : aligned(j) + p.window_right;
#pragma unroll
                    for (int i = 0; i < kCount; ++i)
                        if (key0 + i * key_step < first || key0 + i * key_step > last) S[i][j] = -INFINITY;
                }
            }
        };
        // S becomes P = 2^(S - row_max).
        const auto softmax = [&](auto& S) {
            constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(S)>>;
#pragma unroll
            for (int j = 0; j < kRows; ++j) {
                float next = row_max[j];
#pragma unroll
                for (int i = 0; i < kCount; ++i) next = fmaxf(next, S[i][j]);
                const float factor = exp2_approx(row_max[j] - next);
                row_max[j] = next, row_sum[j] *= factor;
#pragma unroll
                for (int c = 0; c < kDims; ++c) O[j][c] *= factor;
#pragma unroll
                for (int i = 0; i < kCount; ++i) row_sum[j] += S[i][j] = exp2_approx(S[i][j] - next);
            }
        };
        const auto add_values = [&](const auto& S, const auto& values_of) {  // O += P V
            constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(S)>>;
#pragma unroll
            for (int i = 0; i < kCount; ++i)
#pragma unroll
                for (int x = 0; x < kParts; ++x) {
                    float part[kVec];
                    widen_16_bytes<T>(part, values_of[i][x]);
#pragma unroll
                    for (int c = 0; c < kVec; ++c)
#pragma unroll
                        for (int j = 0; j < kRows; ++j) O[j][x * kVec + c] += S[i][j] * part[c];
                }
        };

        // ---- the keys: the next ones are on their way while these are attended to ----
        const int passes = end_key > first_key ? (end_key - first_key + key_step - 1) / key_step : 0;
#pragma unroll 1
        for (int pass = -kDepth; pass < passes; pass += kDepth) {
            float S[kDepth][kRows];
            if (pass >= 0) scores(S, K, own_key + pass * key_step, end_key);
            load(K, k, p.k, p.headdim, pass + kDepth);
            if (pass >= 0) {
                softmax(S);
                add_values(S, V);
            }
            load(V, v, p.v, p.headdim_v, pass + kDepth);
            if (pass < 0) stage();
        }
        if (adds && warp < row_warps) {  // the new key, by the first lanes of the warps of the first keys
            uint4 own[2][1][kParts];
#pragma unroll
            for (int x = 0; x < kParts; ++x) {
                own[0][0][x] = *reinterpret_cast<const uint4*>(added_k + column + x * kLanes * kVec);
                own[1][0][x] = *reinterpret_cast<const uint4*>(added_v + column + x * kLanes * kVec);
            }
            float S[1][kRows];
            const int key = keys.count - 1;
            scores(S, own[0], key, lane < kLanes && key >= keys.begin && key < keys.end ? keys.count : 0);
            softmax(S);
            add_values(S, own[1]);
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

        // Four columns of a row from `count` places: (maximum, sum) and O of each by functions of its index.
        const auto gather = [](int count, const auto& stat, const auto& o, float& top, float& sum) {
            top = -FLT_MAX, sum = 0;
#pragma unroll 4
            for (int i = 0; i < count; ++i) top = fmaxf(top, stat(i).x);
            float4 total = make_float4(0, 0, 0, 0);
#pragma unroll 4
            for (int i = 0; i < count; ++i) {
                const float weight = exp2_approx(stat(i).x - top);
                const float4 x = *reinterpret_cast<const float4*>(o(i));
                sum += weight * stat(i).y;
                total.x += weight * x.x, total.y += weight * x.y, total.z += weight * x.z, total.w += weight * x.w;
            }
            return total;
        };
        const auto finish = [&](int r, int c, float4 x, float top, float sum) {  // row r of the tile, columns c .. c + 3
            if (row0 + r >= rows || c >= p.headdim_v) return;
            const int i = (row0 + r) / p.group, head = head_k * p.group + (row0 + r) % p.group;
            float inverse = sum == 0 ? 0 : 1 / sum;
            if (!kCluster && segment.slot >= 0) {
                if (c == 0) d.partial_lse[int64_t(segment.slot) * d.rows + r] = sum == 0 ? -INFINITY : top + log2f(sum);
                *reinterpret_cast<float4*>(d.partial + (int64_t(segment.slot) * d.rows + r) * p.headdim_v + c) =
                    make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
                return;
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

        if (kCluster && cluster > 1) cluster_wait();  // all have started
#pragma unroll 1
        for (int x = threadIdx.x; x < d.rows * (kD / 4); x += kLaneThreads) {
            const int r = x / (kD / 4), c = x % (kD / 4) * 4, first = r / kRows;
            float top, sum;
            const float4 total = gather(
                key_warps, [&](int i) { return stat_of[i * row_warps + first][r % kRows]; },
                [&](int i) { return o_tile + ((i * row_warps + first) * kRows + r % kRows) * kD + c; }, top, sum);
            if (cluster == 1) {
                finish(r, c, total, top, sum);
            } else {  // to the block that finishes row r
                const int to = r % cluster, place = r / cluster * cluster + rank;
                store_cluster_16(cluster_address(shared_address(received + place * kD + c), to), total);
                if (c == 0) store_cluster_8(cluster_address(shared_address(&sent_of[r / cluster][rank]), to), top, sum);
            }
        }
        if (kCluster && cluster > 1) {
            cluster_arrive();
            cluster_wait();
#pragma unroll 1
            for (int x = threadIdx.x; x < (d.rows + cluster - 1) / cluster * (kD / 4); x += kLaneThreads) {
                const int mine = x / (kD / 4), c = x % (kD / 4) * 4, r = mine * cluster + rank;
                if (r >= d.rows) break;
                float top, sum;
                const float4 total = gather(
                    cluster, [&](int i) { return sent_of[mine][i]; }, [&](int i) { return received + (mine * cluster + i) * kD + c; }, top,
                    sum);
                finish(r, c, total, top, sum);
            }
        }
        if (!kCluster) __syncthreads();  // q and O may be written again
    }
    if (!waited) grid_dependency_wait();  // so that this kernel's end implies the end of the one before
    if (kCluster && cluster == 1) cluster_wait();
}

template <typename T, int kD, int kRows, bool kCluster>
cudaError_t launch_lanes(const DecodeStep& step, const DecodeDevice& device, cudaStream_t stream) {
    const DecodeParams& d = step.decode;
    const int cluster = kCluster ? d.cluster : 1;
    LaunchOptions options;
    options.programmatic = d.after_append, options.cluster = cluster;
    const unsigned blocks = unsigned(kCluster ? decode_units(d) * cluster : decode_blocks(d, device));
    return launch_kernel(decode_lanes_kernel<T, kD, kRows, kCluster>, blocks, kLaneThreads, LaneMemory<T, kD, kRows>(d.rows, cluster).bytes,
                         stream, step, options);
}

template <typename T, int kD>
cudaError_t launch_lanes(const DecodeStep& step, const DecodeDevice& device, cudaStream_t stream) {
    const bool one = step.decode.rows == step.decode.row_warps;
    if (step.decode.cluster)
        return one ? launch_lanes<T, kD, 1, true>(step, device, stream) : launch_lanes<T, kD, 4, true>(step, device, stream);
    if constexpr (sizeof(T) == 4)
        return one ? launch_lanes<T, kD, 1, false>(step, device, stream) : launch_lanes<T, kD, 4, false>(step, device, stream);
    else return cudaErrorInvalidValue;  // 16 bits without a cluster are decode_split.cuh's
}

template <typename T>
cudaError_t launch_lanes(const DecodeStep& step, const DecodeDevice& device, cudaStream_t stream) {
    switch (decode_bucket(step.decode.attention)) {
        case 64: return launch_lanes<T, 64>(step, device, stream);
        case 128: return launch_lanes<T, 128>(step, device, stream);
        default: return launch_lanes<T, 256>(step, device, stream);
    }
}

}  // namespace
}  // namespace fa
