// wgmma_sm90/bias.cuh: plans with a bias, of 16 bits or float32, on top of the plans with options: its tiles, and the values that it hides.
//
// The copy engine brings a tile of bias with each tile of K, to a ring of its own: all rows of the item, or one row where all rows share
// it. An axis on which the bias is broadcast has one element for the copy engine. So a fragment of a 16-bit bias is one ldmatrix for 16
// keys. Reading it from L2 in the order of the fragment would take eight rows a load, 4 bytes of each lane, and registers for what is in
// flight.
//
// A bias of -inf hides a pair, whatever its score is. A key that it hides from all rows may hold NaN in V. Whether V holds any is cheaper
// to find out than what the bias hides: the warps that zero masked values look through every tile of V, and at the bias only for rows that
// are not finite.
#pragma once

#include <type_traits>

#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "common/element.cuh"
#include "device/mma.cuh"
#include "device/ring.cuh"
#include "device/tile_load.cuh"

namespace fa {

template <WgmmaPlanId kId>
using BiasRing = Ring<WgmmaBias<kId>::kStages>;

// One thread loads the bias of tile number `count`, tile n of the sequence.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void load_bias(const CUtensorMap* map, const AttentionParams& p, const ForwardWork& w, WgmmaSmem<T, kId>& smem,
                                          int n, uint32_t count) {
    constexpr int kColumns = kWgmmaPlan<kId>.block_n * (WgmmaBias<kId>::kElementBytes / 2), kChunks = kColumns / kChunkColumns;
    constexpr uint32_t kChunkBytes = kWgmmaPlan<kId>.block_m() * kChunkRowBytes;
    const BiasRing<kId> ring(smem.bias.full, smem.bias.empty, count);
    ring.wait_empty();
    mbarrier_arrive_expect_tx(ring.full_barrier(), kChunks * (p.bias.row ? kChunkBytes : uint32_t(kChunkRowBytes)));
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk)
        tma_load(shared_address(smem.bias.tiles[ring.slot]) + chunk * kChunkBytes, map, ring.full_barrier(),
                 n * kColumns + chunk * kChunkColumns, p.bias.row ? w.row0 : 0, 0, p.bias.head ? w.head : 0, p.bias.batch ? w.batch : 0);
}

// S = scale S + bias, in natural units. `tile`: the shared address of the tile of bias. kStrict: a bias of -inf hides scores
// that are NaN, too. The speculative softmax need not be strict: it rejects a tile with NaN.
enum class Infinities { kAdded, kStrict };
template <Infinities kInfinities>
__device__ __forceinline__ void add_bias_to(float& score, float scale, float bias) {
    if (kInfinities == Infinities::kStrict) score = __uint_as_float(opaque(bias == -INFINITY ? 0u : __float_as_uint(score)));
    score = fmaf(score, scale, bias);
}
template <Infinities kInfinities, typename T, WgmmaPlanId kId, int kCount>
__device__ __forceinline__ void add_bias(float (&S)[kCount], const AttentionParams& p, float scale, uint32_t tile, const Consumer& me) {
    constexpr int kBlockM = kWgmmaPlan<kId>.block_m();
    const int ln = opaque(me.lane), row = p.bias.row != 0 ? me.wg * 64 + me.warp * 16 + ln % 16 : 0;
    const uint32_t place = tile + swizzled_offset(kBlockM, row, ln / 16);  // of the first 16 keys. The next ones change bits 5 and 6
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
        uint32_t pairs[4];
        ldmatrix_x4(pairs, (place ^ i % 4 << 5) + i / 4 * (kBlockM * kChunkRowBytes));
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            float bias[2];
            unpack_16<T>(bias, pairs[x]);
#pragma unroll
            for (int e = 0; e < 2; ++e) add_bias_to<kInfinities>(S[8 * i + 2 * x + e], scale, bias[e]);
        }
    }
}
// The same in float32. A lane reads two keys of its row at a time, and rows that follow each other have these in the same four banks. So
// odd rows read the groups of eight keys of a chunk in the order 2, 3, 0, 1.
template <Infinities kInfinities, WgmmaPlanId kId, int kCount>
__device__ __forceinline__ void add_float32_bias(float (&S)[kCount], const AttentionParams& p, uint32_t tile, const Consumer& me) {
    constexpr int kBlockM = kWgmmaPlan<kId>.block_m();
    constexpr uint32_t kRows8 = 8 * kChunkRowBytes;
    const int ln = opaque(me.lane), quad = ln % 4, row = p.bias.row != 0 ? me.wg * 64 + me.warp * 16 + ln / 4 : 0;
    const bool odd = row % 2;
    // Of the first group; the next ones change bits 5 and 6.
    const uint32_t place = (tile + swizzled_offset(kBlockM, row, quad / 2) + quad % 2 * 8) ^ (odd ? 64u : 0u);
    const uint32_t next_row = p.bias.row != 0 ? kRows8 : 0;
#pragma unroll
    for (int chunk = 0; chunk < kCount / 16; ++chunk)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float2 read[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) read[i] = load_shared_8((place ^ i << 5) + chunk * (kBlockM * kChunkRowBytes) + (r ? next_row : 0));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 bias = odd ? read[i ^ 2] : read[i];
                float* const pair = S + 4 * (4 * chunk + i) + 2 * r;
                add_bias_to<kInfinities>(pair[0], p.scale, bias.x), add_bias_to<kInfinities>(pair[1], p.scale, bias.y);
            }
        }
}

// ---- the warps that zero values ----

// Adds 0 x for eight values: what is not finite makes `sums` NaN.
template <typename T>
__device__ __forceinline__ void add_zero_products(uint32_t (&sums)[2], const uint4& x) {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    const uint32_t zeros = 0;
    const auto add = [&](uint32_t& sum, const uint32_t& pair) {
        reinterpret_cast<Pair&>(sum) =
            __hfma2(reinterpret_cast<const Pair&>(pair), reinterpret_cast<const Pair&>(zeros), reinterpret_cast<const Pair&>(sum));
    };
    add(sums[0], x.x), add(sums[1], x.y), add(sums[0], x.z), add(sums[1], x.w);
}
__device__ __forceinline__ bool all_finite(const uint32_t (&sums)[2]) { return ((sums[0] | sums[1]) & 0x7FFF7FFFu) == 0; }

// Called by a whole warp: whether the edges and the bias leave `key` visible to a row of the item.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ bool any_row_sees(const AttentionParams& p, const ForwardWork& w, int key) {
    bool seen = false;
    if (key < w.seqlen_k) {
        const int end = min(w.row0 + kWgmmaPlan<kId>.block_m(), w.seqlen_q);
        using Bias = std::conditional_t<kWgmmaPlan<kId>.bias_float32, float, T>;
        const Bias* bias = static_cast<const Bias*>(p.bias.data) + (w.batch * p.bias.batch + w.head * p.bias.head + key);
#pragma unroll 1
        for (int i = w.row0 + opaque(int(threadIdx.x)) % 32; i < end && !seen; i += 32)
            seen = key >= i + w.left && key <= i + w.right && to_float(bias[i * p.bias.row]) != -INFINITY;
    }
    return __any_sync(~0u, seen);
}

// Zeroes the rows of V that no row of the item sees, if they hold what is not finite. The warps take four rows in turn, each those that it
// has looked at.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void zero_unseen_values(const AttentionParams& p, WgmmaSmem<T, kId>& smem, const KeyTile& tile,
                                                   uint4* tile_of_v) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n, kChunks = kPlan.columns_v() / kChunkColumns;
    const int lane = opaque(int(threadIdx.x)) % 32, warp = int(threadIdx.x) / 32 - kFirstZeroingWarp;
    uint32_t sums[2] = {0, 0};
#pragma unroll 4
    for (int row = warp * 4; row < kBlockN; row += kZeroingWarps * 4)  // 32 pieces of 16 bytes in each chunk
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) add_zero_products<T>(sums, tile_of_v[(chunk * kBlockN + row) * 8 + lane]);
    if (__all_sync(~0u, all_finite(sums))) return;  // the others have rows of their own
    const ForwardWork& w = smem.work[(tile.work - shared_address(smem.work)) / sizeof(ForwardWork)];
    const int key0 = (tile.place < 0 ? ~tile.place : tile.place) * kBlockN;
#pragma unroll 1
    for (int row = warp * 4; row < kBlockN; row += row % 4 == 3 ? kZeroingWarps * 4 - 3 : 1) {
        uint4* pieces = tile_of_v + row * 8 + lane;  // eight in each chunk
        bool finite = true;
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks && lane < 8; ++chunk) {
            uint32_t sums[2] = {0, 0};
            add_zero_products<T>(sums, pieces[chunk * kBlockN * 8]);
            finite = finite && all_finite(sums);
        }
        if (__all_sync(~0u, finite) || any_row_sees<T, kId>(p, w, key0 + row)) continue;
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks && lane < 8; ++chunk) pieces[chunk * kBlockN * 8] = make_uint4(0, 0, 0, 0);
    }
}

}  // namespace fa
