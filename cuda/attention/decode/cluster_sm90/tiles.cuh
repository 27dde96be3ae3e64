// cluster_sm90/tiles.cuh: how decode_cluster_sm90 loads tiles of keys, and its rows of q, into shared memory.
#pragma once

#include "attention/common/shared_tile.cuh"
#include "attention/decode/common/scores.cuh"
#include "attention/decode/lanes/keys.cuh"

#include <type_traits>

namespace fa {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16;
constexpr int kBlocksOfSm = 3;  // a GPC may have fewer multiprocessors than a cluster has blocks

struct ClusterParams {
    int32_t warp_bytes;  // bytes of a warp's ring, later of its O
    bool scattered;      // the rows of a tile are not contiguous: the page size is not a multiple of a tile's keys
    bool programmatic;   // the previous kernel may still be writing q
    bool bfloat16;       // of q and out, else fp16
    bool scaled_by_key;  // bytes: as in DecodeParams
    LaneParams lanes;
};

// Element: the cache's type. kColumns: the bucket of the head dim. A tile is 16 keys.
template <typename Element, int kColumns>
struct ClusterPlan {
    using E = Element;
    static constexpr bool kBytes = sizeof(E) == 1;
    using T = std::conditional_t<kBytes, __half, E>;  // what the tensor cores multiply
    using TileQ = SharedTile<T, kColumns>;
    static constexpr int kD = kColumns, kKeys = 16;
    static constexpr int kRowBytes = kD * int(sizeof(E)), kTileBytes = kKeys * kRowBytes, kSlotBytes = 2 * kTileBytes;
    using TileK = SharedTile<uint16_t, kRowBytes / 2>;
    static constexpr int kTilesN = kKeys / 8, kTilesV = kD / 8, kStepsD = kD / 16;
    static constexpr int kMostSlots = 24 * 1024 / kSlotBytes;  // slots of a warp; with this many, two blocks fit on an SM
    static constexpr int kSlots = kMostSlots < 4 ? kMostSlots : 4;
    static constexpr int kQuads = kD / 4, kOBytes = kRows * kD * 4;
    static constexpr int warp_bytes(int slots) { return slots * kSlotBytes > kOBytes ? slots * kSlotBytes : kOBytes; }
    static constexpr int bytes(int rows, int slots) { return kWarps * warp_bytes(slots) + kRows * kD * 2 + rows * kD * 4; }
};

// The rows of q, passing through registers. Row r of a key head is head r % group of query r / group. With 8-bit keys, rows of bf16 become
// fp16: a row is divided by the power of two below its largest magnitude, so that nothing overflows, and what underflows is below 2^-24 of
// that magnitude. The power goes to row_factor.
template <typename Plan>
struct ClusterQuery {
    using TileQ = typename Plan::TileQ;
    static constexpr int kPieces = (kRows * TileQ::kPieces + kThreads - 1) / kThreads, kRowsAtOnce = kThreads / TileQ::kPieces;
    uint4 bits[kPieces] = {};

    __device__ __forceinline__ static int row() { return threadIdx.x / TileQ::kPieces; }
    __device__ __forceinline__ static int piece() { return threadIdx.x % TileQ::kPieces; }
    __device__ __forceinline__ void load(const LaneParams& p, int b, int head_k) {
        const int group = int(p.group.divisor);
        grid_dependency_wait();
#pragma unroll
        for (int x = 0; x < kPieces; ++x) {
            const int r = row() + x * kRowsAtOnce, i = p.seqlen_q == 1 ? 0 : p.group.divide(r);
            const uint16_t* const from = static_cast<const uint16_t*>(p.q.data) + b * p.q.batch + i * p.q.row +
                                         (head_k * group + r - i * group) * p.q.head + 8 * piece();
            if (r < p.rows && 8 * piece() < p.headdim) bits[x] = __ldcg(reinterpret_cast<const uint4*>(from));
        }
    }
    __device__ __forceinline__ void narrow(float* row_factor) {
#pragma unroll
        for (int x = 0; x < kPieces; ++x) {
            const __nv_bfloat162* const pairs = reinterpret_cast<const __nv_bfloat162*>(&bits[x]);
            const __nv_bfloat162 most =
                __hmax2(__hmax2(__habs2(pairs[0]), __habs2(pairs[1])), __hmax2(__habs2(pairs[2]), __habs2(pairs[3])));
            float amax = fmaxf(__low2float(most), __high2float(most));
#pragma unroll
            for (int offset = 1; offset < TileQ::kPieces; offset *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
            const uint32_t exponent = min(max(__float_as_uint(amax) >> 23, 1u), 253u);
            const float inverse = __uint_as_float((254 - exponent) << 23);
            uint32_t* const word = &bits[x].x;
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                float two[2];
                unpack_16<__nv_bfloat16>(two, word[w]);
                word[w] = pack_16<__half>(two[0] * inverse, two[1] * inverse);
            }
            const int r = row() + x * kRowsAtOnce;
            if (piece() == 0 && r < kRows) row_factor[r] = __uint_as_float(exponent << 23);
        }
    }
    __device__ __forceinline__ void store(uint32_t q_tile) const {
#pragma unroll
        for (int x = 0; x < kPieces; ++x)
            if (row() + x * kRowsAtOnce < kRows) store_shared_16(q_tile + TileQ::offset(row() + x * kRowsAtOnce, piece()), bits[x]);
    }
};

// A warp's copies of its own tiles.
template <typename Plan>
class ClusterCopies {
    using TileK = typename Plan::TileK;
    static constexpr int kElement = int(sizeof(typename Plan::E)), kKeys = Plan::kKeys, kRowsAtOnce = 32 / TileK::kPieces;

public:
    __device__ __forceinline__ ClusterCopies(const LaneParams& p, int lane, int b, int head_k)
        : lane_(lane), b_(b), head_k_(head_k), piece_(lane % TileK::kPieces), row_(lane / TileK::kPieces) {
        entry_ = !p.entries ? b : p.block_table ? 0 : p.batch_idx ? clamp_to(p.batch_idx[b], 0, p.entries - 1) : b;
        is_k_ = 16 * piece_ < p.headdim * kElement, is_v_ = 16 * piece_ < p.headdim_v * kElement;
        k_ = static_cast<const char*>(p.k.data) + head_k * p.k.head * kElement + 16 * piece_;
        v_ = static_cast<const char*>(p.v.data) + head_k * p.v.head * kElement + 16 * piece_;
        found_entry_ = entry_, found_row_ = 0;
    }

    // The factor of all keys, or of the entry's first key.
    __device__ __forceinline__ float factor(const LaneParams& p, const CacheScale& scale) const {
        return p.seqlen_k > 0 ? scale.data[entry_ * scale.batch + head_k_ * scale.head] : 1;
    }

    // Finds the rows of the tile that is copied next: lane l finds row l % kKeys. `end`: the end of the keys. Table entries past it are not
    // read.
    __device__ __forceinline__ void find(const LaneParams& p, int key0, int end) {
        found_row_ = key0 + lane_ % kKeys;
        if (!p.block_table) return;
        const int key = found_row_, page = p.page.divide(key);
        if (key < end) found_entry_ = clamp_to(p.block_table[b_ * p.table_row + page], 0, p.entries - 1);
        found_row_ = p.page.remainder(key, page);
    }

    // Copies the tile from key0 on to `to`, and its factors to `scales`. Keys outside [begin, end) arrive as zeros.
    __device__ __forceinline__ void copy(const ClusterParams& params, int key0, int begin, int end, uint32_t to, uint32_t scales) const {
        const LaneParams& p = params.lanes;
        const auto found = [&](const TensorView& view, int r, int further) {
            const int at_entry = __shfl_sync(kFullWarp, found_entry_, r), at_row = __shfl_sync(kFullWarp, found_row_, r) + further;
            return (at_entry * view.batch + at_row * view.row) * kElement;
        };
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const TensorView& view = half ? p.v : p.k;
            const char* const head = half ? v_ : k_;
            const char* from = head + found(view, 0, row_);
#pragma unroll
            for (int r = row_; r < kKeys; r += kRowsAtOnce) {
                if (params.scattered) from = head + found(view, r, 0);
                const bool copies = (half ? is_v_ : is_k_) && key0 + r >= begin && key0 + r < end;
                cp_async_16(to + half * Plan::kTileBytes + TileK::offset(r, piece_), copies ? from : head, copies ? 16 : 0);
                from += kRowsAtOnce * view.row * kElement;
            }
            if (Plan::kBytes && params.scaled_by_key && lane_ < kKeys) {
                const CacheScale& scale = half ? p.v_scale : p.k_scale;
                const bool copies = key0 + lane_ >= begin && key0 + lane_ < end;
                const float* const source = scale.data + found_entry_ * scale.batch + found_row_ * scale.row + head_k_ * scale.head;
                cp_async_4(scales + 4 * (half * kKeys + lane_), copies ? source : scale.data, copies ? 4 : 0);
            }
            cp_async_commit();
        }
    }

    // Zeroes the values, and their factors, of a tile's keys from `end` on. They were copied before the length was known and may hold
    // anything, and 0 x NaN is NaN.
    __device__ __forceinline__ void zero_values(int key0, int end, uint32_t v_tile, uint32_t v_scales) const {
#pragma unroll
        for (int r = row_; r < kKeys; r += kRowsAtOnce)
            if (key0 + r >= end) store_shared_16(v_tile + TileK::offset(r, piece_), uint4{});
        if (Plan::kBytes && lane_ < kKeys && key0 + lane_ >= end) store_shared_4(v_scales + 4 * lane_, 0);
        __syncwarp();
    }

private:
    int lane_, b_, head_k_;
    int piece_, row_;  // this lane's 16 bytes of a key's row; its first key in a tile
    int entry_;
    bool is_k_, is_v_;  // the piece lies in the head dim
    const char *k_, *v_;
    int found_entry_, found_row_;
};

}  // namespace
}  // namespace fa
