// ring_sm90/attend.cuh: the shared memory of a block of decode_ring_sm90, and the warps that attend to the keys in it.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/common/shared_tile.cuh"
#include "attention/decode/common/decode.h"
#include "attention/decode/common/scores.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <cfloat>
#include <type_traits>

namespace fa {
namespace {

constexpr int kParts = 4, kGroups = 2;    // parts of a tile; groups of warps that take tiles in turn
constexpr int kWarps = kParts * kGroups;  // warps that attend; two more load
constexpr int kRows = 16, kThreads = 32 * (kWarps + 2);
constexpr int kAttending = 1;  // named barrier of the attending warps

struct RingParams {
    DecodeParams decode;
    int box_rows, boxes;   // keys per TMA box, gcd(page, tile); boxes per tile
    int k_boxes, v_boxes;  // boxes side by side: 1 for all columns, or one per 128 bytes
    CUtensorMap k_map, v_map;
};

// The data of a segment that the warp that loads K hands to the others, together with the rows of q.
struct RingWork {
    Segment segment;  // b < 0: no more segments
    SequenceKeys keys;
    float k_factor, v_factor;  // 8-bit caches with one factor for all keys
};

template <typename E, int kD>
struct RingSmem {
    static constexpr bool kBytes = sizeof(E) == 1;
    static constexpr int kRowBytes = kD * int(sizeof(E)), kPartKeys = kRowBytes <= 128 ? 32 : 16, kKeys = kParts * kPartKeys;
    static_assert(kRowBytes % 128 == 0, "a row is whole chunks");
    static constexpr int kSlotBytes = kKeys * kRowBytes, kScales = kBytes ? kKeys : 0;
    static constexpr int kRest = 2 * kRows * kD * 2 + kWarps * 8 * kD * 4 + 2 * kWarps * kRows * 4 + 1024;
    // A multiple of the slots that all groups need for one tile each, so that within a segment a slot always belongs to the same group;
    // between segments all groups meet. A barrier's parity tells only two phases apart: a group that missed a phase would take an older
    // phase for the one it waits for. The memory that is left is for blocks of combine.cu, which wait on the same SMs.
    static constexpr int kSlots = ((222 << 10) - kRest) / (kSlotBytes + 4 * kScales) / (2 * kGroups) * (2 * kGroups);
    alignas(1024) unsigned char slots[kSlots][kSlotBytes];  // K of a tile, its V, K of the next tile, ...; chunks of 128 bytes, swizzled
    float scales[kSlots][kBytes ? kScales : 1];             // bytes: the factors of the keys
    alignas(128) unsigned char q[2][kRows * kD * 2];        // for this segment and the next
    alignas(16) float o[kWarps][8 * kD];                    // eight rows of each warp, while the warps' results are added up
    float row_max[kWarps][kRows], row_sum[kWarps][kRows];
    RingWork work[2];
    alignas(8) uint64_t full[kSlots], empty[kSlots], q_full[2], q_empty[2];
};

// A place in the ring: the slot and the parity of its phase.
template <int kSlots>
struct RingPlace {
    int slot = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void advance(int by) {
        slot += by;
        if (slot >= kSlots) slot -= kSlots, phase ^= 1;
    }
};

// Adds up row r of all warps, which is row `row` in smem.o, and stores it: to out, with lse; or, if the segment is not the whole unit, to
// its slot in the workspace. Called by all 32 lanes.
template <typename E, int kD>
__device__ __forceinline__ void store_row(const DecodeParams& d, const RingSmem<E, kD>& smem, const Segment& segment, int r, int lane,
                                          int row) {
    const AttentionParams& p = d.attention;
    float row_max = -FLT_MAX, row_sum = 0, weight[kWarps];
#pragma unroll
    for (int x = 0; x < kWarps; ++x) row_max = fmaxf(row_max, smem.row_max[x][r]);
#pragma unroll
    for (int x = 0; x < kWarps; ++x) {
        weight[x] = exp2_approx(smem.row_max[x][r] - row_max);
        row_sum += weight[x] * smem.row_sum[x][r];
    }
    const int i = r / p.group, head = segment.unit * p.group + r % p.group;
    const bool whole = segment.slot < 0;
    const RowEnd end = finish_row<ScoreUnit::kLog2>(row_max, row_sum, whole ? sink_of(p.sinks, head) : -INFINITY);
    if (lane == 0) {
        if (!whole) d.partial_lse[int64_t(segment.slot) * kRows + r] = end.lse;
        else if (p.lse) p.lse[(int64_t(segment.b) * p.nheads + head) * p.seqlen_q + i] = end.lse * kLn2;
    }
    float* const partial = d.partial + (int64_t(segment.slot) * kRows + r) * p.headdim_v;
    uint16_t* const out = static_cast<uint16_t*>(p.out.data) + segment.b * p.out.batch + i * p.out.row + head * p.out.head;
#pragma unroll
    for (int column = 4 * lane; column < kD; column += 128) {
        if (column >= p.headdim_v) continue;
        float4 x{};
#pragma unroll
        for (int source = 0; source < kWarps; ++source) {
            const float4 y = *reinterpret_cast<const float4*>(smem.o[source] + o_place<kD>(row, column));
            const float w = weight[source];
            x.x += w * y.x, x.y += w * y.y, x.z += w * y.z, x.w += w * y.w;
        }
        x = end.output(x);
        if (!whole) *reinterpret_cast<float4*>(partial + column) = x;
        else *reinterpret_cast<uint2*>(out + column) = pack_row(x, p.dtype == DType::kFloat16);
    }
}

// The work of an attending warp.
template <typename E, int kD>
__device__ __forceinline__ void attend_ring(const RingParams& params, RingSmem<E, kD>& smem) {
    using Smem = RingSmem<E, kD>;
    constexpr bool kBytes = Smem::kBytes;
    using T = std::conditional_t<kBytes, __half, E>;  // what the tensor cores multiply
    using TileQ = SharedTile<T, kD>;
    constexpr int kRowBytes = Smem::kRowBytes, kPartKeys = Smem::kPartKeys, kTilesN = kPartKeys / 8, kTilesV = kD / 8, kStepsD = kD / 16;
    static_assert(kD <= 128, "Q fits in registers");
    const DecodeParams& d = params.decode;
    const AttentionParams& p = d.attention;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0), part = warp % kParts,
              rows = p.seqlen_q * p.group;
    const uint32_t slots = shared_address(smem.slots), full = shared_address(smem.full), empty = shared_address(smem.empty);
    const uint32_t q_full = shared_address(smem.q_full), q_empty = shared_address(smem.q_empty);
    // A part lies in boxes of box_rows keys, a box in chunks of 128 bytes. Piece x of key r is at chunk x / 8, row r, piece x % 8 ^ r % 8.
    const int chunk_bytes = params.box_rows * 128;
    const uint32_t part_at = part * kPartKeys / params.box_rows * params.box_rows * kRowBytes + part * kPartKeys % params.box_rows * 128;
    const uint32_t k_lane = part_at + (lane % 8 + lane / 16 * 8) * 128 + (lane / 8 % 2 ^ lane % 8) * 16;
    const uint32_t v_lane = part_at + lane % 16 * 128 + (lane / 16 ^ lane % 8) * 16;
    // The keys of a part are contiguous even where they are two boxes of 16 keys, because the rows of a part of 32 keys are one chunk long.
    const auto step_to = [&](uint32_t address, int step) { return (address ^ step % 4 * 32) + step / 4 * chunk_bytes; };

    const ScoreOptions options = score_options_of(d);

    RingPlace<Smem::kSlots> ring;
#pragma unroll 1
    for (int n = 0;; ++n) {
        const int buffer = n & 1;
        mbarrier_wait(q_full + 8 * buffer, n / 2 & 1);
        const RingWork work = smem.work[buffer];
        const int b = work.segment.b, head_k = work.segment.unit;  // the rows of a key head are one tile
        if (b < 0) break;
        if (n == 0 && d.after_append) grid_dependency_wait();  // that kernel has ended: this thread may now write, too
        const SequenceKeys keys = work.keys;
        const uint32_t q_tile = shared_address(smem.q[buffer]);
        uint32_t Q[kStepsD][4];
        float row_scale[2] = {d.scale_log2, d.scale_log2};
        load_query<kBytes, TileQ>(Q, q_tile, lane);
        if (kBytes && p.dtype == DType::kBFloat16) narrow_rows(Q, row_scale, rows);
        const auto row_of = [&](int half) { return min(lane / 4 + 8 * half, rows - 1); };
        float O[kTilesV][4] = {};
        float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // max: log2 units; sum: this thread's share
        float v_unit = 1e-30f;                                         // bytes: O is in units of V's factor, or the largest so far
        if (kBytes && !d.scaled_by_key) row_scale[0] *= work.k_factor, row_scale[1] *= work.k_factor, v_unit = work.v_factor;

        const int tiles = work.segment.end - work.segment.begin;
        // turn: tiles until this warp's next one. Turns are counted from the segment's first tile, so that the bits of a result do not
        // depend on earlier segments.
        int tile = 0, turn = warp / kParts;
#pragma unroll 1
        while (tile + turn < tiles) {
            tile += turn, ring.advance(2 * turn), turn = kGroups - 1;
            const int key0 = (keys.first_tile + work.segment.begin + tile) * Smem::kKeys + part * kPartKeys;
            const bool seen = key0 < keys.end && key0 + kPartKeys > keys.begin;
            // ---- S = Q K^T ----
            float S[kTilesN][4] = {};
            mbarrier_wait(full + 8 * ring.slot, ring.phase);
            if (seen) {
                const uint32_t k_part = slots + ring.slot * Smem::kSlotBytes + k_lane;
                multiply_keys<E, T>(S, Q, [&](int step, int i) { return step_to(k_part, step) + 8 * i * 128; });
                if (kBytes && d.scaled_by_key) scale_keys(S, shared_address(smem.scales[ring.slot] + part * kPartKeys), lane);
            }
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(empty + 8 * ring.slot);
            ring.advance(1);

            bool zeroes = false;
            if (seen) {
#pragma unroll
                for (int i = 0; i < kTilesN; ++i)
#pragma unroll
                    for (int e = 0; e < 4; ++e) S[i][e] *= row_scale[e / 2];
                zeroes = key0 < keys.begin || key0 + kPartKeys > keys.end;
                score_options(options, keys, key0, lane, row_of, [&] { return b * p.alibi_batch + head_k * p.group; }, S);
                softmax_step(S, O, row_max, row_sum);
            }

            // ---- O += P V ----
            mbarrier_wait(full + 8 * ring.slot, ring.phase);
            if (seen) {
                const uint32_t v_slot = slots + ring.slot * Smem::kSlotBytes, v_part = v_slot + v_lane;
                if (zeroes) {  // values that nobody sees may hold anything, and 0 x NaN is NaN
                    for (int x = lane; x < kPartKeys * kRowBytes / 16; x += 32) {
                        const int row = x / (kRowBytes / 16), piece = x % (kRowBytes / 16), key = key0 + row;
                        if (key < keys.begin || key >= keys.end)
                            store_shared_16(v_slot + part_at + piece / 8 * chunk_bytes + row * 128 + (piece ^ row) % 8 * 16, uint4{});
                    }
                    fence_proxy_async();  // the copy engine writes there next
                    __syncwarp();
                }
                if (kBytes && d.scaled_by_key) scale_values(S, shared_address(smem.scales[ring.slot] + part * kPartKeys), lane, v_unit, O);
                add_values<E, T>(O, S, [&](int step, int i) { return step_to(v_part, i) + 16 * step * 128; });
            }
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(empty + 8 * ring.slot);
            ring.advance(1);
            ++tile;
        }
        ring.advance(2 * (tiles - tile));

        // ---- the warps' results ----
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(row_sum[half]);
            if (lane % 4 == 0) smem.row_max[warp][lane / 4 + 8 * half] = row_max[half], smem.row_sum[warp][lane / 4 + 8 * half] = sum;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (8 * half >= rows) break;
#pragma unroll
            for (int i = 0; i < kTilesV; i += 2) put_o<E>(smem.o[warp], lane / 4, i, half, lane, O, v_unit);
            bar_sync(kAttending, 32 * kWarps);
            const int r = 8 * half + warp;  // each warp finishes one row
            if (r < rows) store_row(d, smem, work.segment, r, lane, warp);
            bar_sync(kAttending, 32 * kWarps);
        }
        if (arrives(lane)) mbarrier_arrive(q_empty + 8 * buffer);
    }
}

}  // namespace
}  // namespace fa
