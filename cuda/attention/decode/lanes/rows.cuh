// lanes/rows.cuh: how q, and the key and value that join the cache, are rotated (rotary embedding), rounded and stored in shared memory.
#pragma once

#include "attention/decode/lanes/keys.cuh"
#include "common/element.cuh"
#include "device/ptx.cuh"

namespace fa {
namespace {

// Row r of a key head is head r % group of this query.
__device__ __forceinline__ int lane_query(const LaneParams& p, int r) { return p.seqlen_q == 1 ? 0 : p.group.divide(r); }
__device__ __forceinline__ int lane_head(const LaneParams& p, int head_k, int r, int query) {
    const int group = int(p.group.divisor);
    return head_k * group + r - query * group;
}

// The rotary embedding of one column c: x[c] cosine + x[pair] sine.
struct LaneRotation {
    int pair;
    float cosine, sine;
};
template <typename T>
__device__ __forceinline__ LaneRotation lane_rotation(const LaneParams& p, int position, int c) {
    const auto angle = [&](const void* table, int64_t at) {
        return p.rotary_float32 ? static_cast<const float*>(table)[at] : to_float(static_cast<const T*>(table)[at]);
    };
    const int half = p.rotary_dim / 2;
    const bool first = p.rotary_interleaved ? c % 2 == 0 : c < half;
    LaneRotation rotation;
    rotation.pair = p.rotary_interleaved ? c ^ 1 : first ? c + half : c - half;
    const int64_t at = int64_t(clamp_to(position, 0, p.rotary_rows - 1)) * half + (p.rotary_interleaved ? c / 2 : min(c, rotation.pair));
    rotation.cosine = angle(p.rotary_cos, at), rotation.sine = angle(p.rotary_sin, at);
    if (first) rotation.sine = -rotation.sine;
    return rotation;
}

// Writes q times `scale` to q_tile. With kAppends, the block that has the new key also writes the key and its value to added_k and to the
// cache.
//
// A thread has every kLaneThreads-th element. The place of its first element, and its rotation, are known before the previous kernel has
// ended. `waited`: this thread has waited for that kernel.
template <typename Plan, bool kAppends>
__device__ __forceinline__ void stage_rows(const LaneParams& p, const LaneUnit& unit, const AddedKey& added, int before, float scale,
                                           float* q_tile, typename Plan::T* added_k, bool& waited) {
    using T = typename Plan::T;
    constexpr int kD = Plan::kD;
    const int b = unit.b, head_k = unit.head_k, slots = (p.tile_rows + (kAppends && added.here ? 2 : 0)) * kD;
    const bool ordered = p.window_left >= 0 || p.window_right >= 0;  // as in append_position
    int x = threadIdx.x;
#pragma unroll 1
    do {
        const int slot = x / kD, c = x % kD, r = unit.row0 + slot;
        const bool query = slot < p.tile_rows, key = slot == p.tile_rows;
        const int i = query ? lane_query(p, r) : 0, columns = query ? (r < p.rows ? p.headdim : 0) : key ? p.headdim : p.headdim_v;
        const T* from;
        if (query) from = static_cast<const T*>(p.q.data) + b * p.q.batch + i * p.q.row + lane_head(p, head_k, r, i) * p.q.head;
        else if (key) from = static_cast<const T*>(p.k_new) + b * p.k_new_batch + head_k * p.k_new_head;
        else from = static_cast<const T*>(p.v_new) + b * p.v_new_batch + head_k * p.v_new_head;
        const bool is = x < slots && c < columns, rotates = kAppends && p.rotary_cos && (query || key) && c < p.rotary_dim && is;
        LaneRotation rotation{c, 1, 0};
        if (rotates) rotation = lane_rotation<T>(p, max(before, 0) + ordered * i, c);
        if (!waited) grid_dependency_wait();
        waited = true;
        if (x < slots) {
            T result = from_float<T>(0.0f);
            if (is) result = __ldcg(from + c);
            if (rotates)
                result = from_float<T>(to_float(result) * rotation.cosine + to_float(__ldcg(from + rotation.pair)) * rotation.sine);
            if (query) q_tile[x] = to_float(result) * scale;
            else added_k[x - p.tile_rows * kD] = result;
            if (!query && is) {
                const TensorView& view = key ? p.k : p.v;
                static_cast<T*>(view.data)[added.entry * view.batch + added.row * view.row + head_k * view.head + c] = result;
            }
        }
        x += kLaneThreads;
    } while (x < slots);
    __syncthreads();
}

}  // namespace
}  // namespace fa
