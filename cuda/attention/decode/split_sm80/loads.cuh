// split_sm80/loads.cuh: how decode_split_sm80 loads keys, values and rows of q into shared memory.
#pragma once

#include "attention/decode/split_sm80/plan.cuh"
#include "device/mma.cuh"

namespace fa {
namespace {

__device__ __forceinline__ void wait_for_oldest(int stages) {
    switch (stages) {
        case 1: cp_async_wait_group<0>(); break;
        case 2: cp_async_wait_group<1>(); break;
        case 3: cp_async_wait_group<2>(); break;
        case 4: cp_async_wait_group<3>(); break;
        case 5: cp_async_wait_group<4>(); break;
        default: cp_async_wait_group<5>(); break;
    }
}

// A warp's copies of its own part of each tile.
template <typename Plan>
class SplitCopies {
    using E = typename Plan::E;
    using Tile = typename Plan::Tile;
    static constexpr int kPartKeys = Plan::kPartKeys, kRowsAtOnce = 32 / Tile::kPieces, kPasses = kPartKeys / kRowsAtOnce;
    static constexpr int kUnroll = Plan::kRegistersFull ? 2 : 4;
    static constexpr bool kCache = !Plan::kGeneral;  // K and V may lie in a cache

public:
    __device__ __forceinline__ SplitCopies(const CacheView& cache, const SplitPlace<Plan>& place, const SplitWorkAt<Plan>& work,
                                           const SequenceKeys& keys, int first_tile) {
        page_ = kCache && cache.block_table ? page_of(cache, place, work, keys, first_tile) : 0;
    }

    template <typename Wait>
    __device__ __forceinline__ void copy(const AttentionParams& p, const SplitPlace<Plan>& place, const SplitWorkAt<Plan>& work, int tile,
                                         int slot, const Wait& wait_for_append) {
        const CacheView& cache = p.cache;
        const SequenceKeys keys = work.keys();
        const int b = work.b(), head_k = work.head_k();
        const int lane = Plan::kRegistersFull ? opaque(place.lane) : place.lane, piece = lane % Tile::kPieces, row = lane / Tile::kPieces;
        const bool k_piece = piece * Tile::kPieceColumns < p.headdim, v_piece = piece * Tile::kPieceColumns < p.headdim_v;
        const int entry_of = !kCache || !cache.entries ? b : cache.block_table ? 0 : cache_entry(cache, b);
        const E* const k = static_cast<const E*>(p.k.data) + entry_of * p.k.batch + head_k * p.k.head + piece * Tile::kPieceColumns;
        const E* const v = static_cast<const E*>(p.v.data) + entry_of * p.v.batch + head_k * p.v.head + piece * Tile::kPieceColumns;
        const int key0 = tile * Plan::kKeys + place.warp * kPartKeys;
        if (key0 + kPartKeys > keys.count - cache.added) wait_for_append();
        const uint32_t to_k = place.part(slot, place.warp), to_v = to_k + kPartKeys * Tile::kPitch;
        int entry = entry_of, at = own_key(place, tile);
        if (kCache && cache.block_table) {  // each lane knows the page of one key and passes it to the lanes that copy this key
            entry = page_, at %= cache.page_size;
            page_ = page_of(cache, place, work, keys, tile + 1);
            const int64_t k_own = entry * p.k.batch + at * p.k.row, v_own = entry * p.v.batch + at * p.v.row;
#pragma unroll(kUnroll)
            for (int i = 0; i < kPasses; ++i) {
                const int r = i * kRowsAtOnce + row;
                const int64_t k_from = __shfl_sync(kFullWarp, k_own, r), v_from = __shfl_sync(kFullWarp, v_own, r);
                const bool is = seen(keys, key0 + r);
                cp_async_16(to_k + Tile::offset(r, piece), k + k_from, is && k_piece ? 16 : 0);
                cp_async_16(to_v + Tile::offset(r, piece), v + v_from, is && v_piece ? 16 : 0);
            }
        } else {
            const E* k_from = k + (key0 + row) * p.k.row;
            const E* v_from = v + (key0 + row) * p.v.row;
#pragma unroll(kUnroll)
            for (int i = 0; i < kPasses; ++i) {
                const int r = i * kRowsAtOnce + row;
                const bool is = seen(keys, key0 + r);
                cp_async_16(to_k + Tile::offset(r, piece), k_from, is && k_piece ? 16 : 0);
                cp_async_16(to_v + Tile::offset(r, piece), v_from, is && v_piece ? 16 : 0);
                k_from += kRowsAtOnce * p.k.row, v_from += kRowsAtOnce * p.v.row;
            }
        }
        if (Plan::kBytes && place.lane < kPartKeys) {
            const bool is = seen(keys, key0 + place.lane);
            const CacheScale &ks = cache.k_scale, &vs = cache.v_scale;
            const uint32_t to = place.scales(slot, place.warp) + 4 * place.lane;
            cp_async_4(to, ks.data + (entry * ks.batch + at * ks.row + head_k * ks.head), is ? 4 : 0);
            cp_async_4(to + 4 * kPartKeys, vs.data + (entry * vs.batch + at * vs.row + head_k * vs.head), is ? 4 : 0);
        }
    }

private:
    __device__ __forceinline__ static bool seen(const SequenceKeys& keys, int key) {
        return unsigned(key - keys.begin) < unsigned(keys.end - keys.begin);
    }
    // The key of the warp's part whose page this lane looks up.
    __device__ __forceinline__ static int own_key(const SplitPlace<Plan>& place, int tile) {
        return tile * Plan::kKeys + place.warp * kPartKeys + place.lane % kPartKeys;
    }
    __device__ __forceinline__ int page_of(const CacheView& cache, const SplitPlace<Plan>& place, const SplitWorkAt<Plan>& work,
                                           const SequenceKeys& keys, int tile) const {
        const int key = own_key(place, tile);
        return tile < work.end_tile() && seen(keys, key) ? cache_page(cache, work.b(), key / cache.page_size) : 0;
    }
    int page_;  // page of this lane's key in the tile that is copied next
};

// Copies the tile's rows of q. Row r of the seqlen_q * group rows of a key head is head r % group of query r / group.
template <typename Plan>
__device__ __forceinline__ void copy_query(const AttentionParams& p, const SplitPlace<Plan>& place, const SplitWorkAt<Plan>& work) {
    using TileQ = typename Plan::TileQ;
    const int b = work.b(), head_k = work.head_k(), row_tile0 = work.row_tile0();
    constexpr int kRowsOfPass = kDecodeThreads / TileQ::kPieces;
    const int piece = threadIdx.x % TileQ::kPieces;
#pragma unroll 1
    for (int row = threadIdx.x / TileQ::kPieces; row < Plan::kRows; row += kRowsOfPass) {
        const int r = row_tile0 + row, i = r / p.group, head = head_k * p.group + r % p.group;
        const uint16_t* const from = static_cast<const uint16_t*>(p.q.data) + b * p.q.batch + i * p.q.row + head * p.q.head + 8 * piece;
        cp_async_16(place.q_tile() + TileQ::offset(row, piece), from, r < p.seqlen_q * p.group && 8 * piece < p.headdim ? 16 : 0);
    }
}

// Converts rows of q in shared memory from bf16 to fp16, in place. A row is divided by the power of two below its largest magnitude, so
// that nothing overflows, and what underflows is below 2^-24 of that magnitude. The power goes to row_factor.
template <int kRows, int kD>
__device__ __forceinline__ void narrow_rows(uint32_t q, float* row_factor) {
    using Tile = SharedTile<__half, kD>;
    constexpr int kThreadsPerRow = kDecodeThreads / kRows, kEach = Tile::kPieces / kThreadsPerRow;
    const int row = threadIdx.x / kThreadsPerRow, piece0 = threadIdx.x % kThreadsPerRow * kEach;
    float amax = 0;
#pragma unroll 1
    for (int piece = piece0; piece < piece0 + kEach; ++piece) {
        const float4 bits = load_shared_16(q + Tile::offset(row, piece));
        const float word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float x[2];
            unpack_16<__nv_bfloat16>(x, __float_as_uint(word[w]));
            amax = fmaxf(amax, fmaxf(fabsf(x[0]), fabsf(x[1])));
        }
    }
    for (int offset = 1; offset < kThreadsPerRow; offset *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    const uint32_t exponent = min(max(__float_as_uint(amax) >> 23, 1u), 253u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll 1
    for (int piece = piece0; piece < piece0 + kEach; ++piece) {
        const float4 bits = load_shared_16(q + Tile::offset(row, piece));
        const float word[4] = {bits.x, bits.y, bits.z, bits.w};
        uint32_t half[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float x[2];
            unpack_16<__nv_bfloat16>(x, __float_as_uint(word[w]));
            half[w] = pack_16<__half>(x[0] * inverse, x[1] * inverse);
        }
        store_shared_16(q + Tile::offset(row, piece), make_uint4(half[0], half[1], half[2], half[3]));
    }
    if (threadIdx.x % kThreadsPerRow == 0) row_factor[row] = __uint_as_float(exponent << 23);
}

}  // namespace
}  // namespace fa
