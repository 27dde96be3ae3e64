// wgmma_sm90/options.cuh: the options of the Hopper backward's plans with options, on a thread's fragment of the transposed S (layout:
// wgmma_sm90/fragments.cuh). S changes in place, before the exponential. Except under softcap, P is then also the factor of dP - delta in
// dS. Tiles and products are those of the bare plans.
//     window        the left edge is compared only in tiles that it cuts
//     mask of keys  nothing is compared. Hidden rows of K and V are zeroed, so a hidden key adds nothing to dQ if its dS is finite. P of a
//                   hidden key may be anything. Its dS, packed, is cleared in every tile, and its dK and dV once, before they are stored.
//                   Blocks whose keys are all hidden walk no tiles, except in order.
//     ALiBi         two operations a score
//     bias          S becomes a score in natural units. The copy engine brings its tiles; ldmatrix transposes those of 16 bits.
//     dropout       a warpgroup draws for its keys while dP is multiplied (dropout.cuh). P is dropped after dS has been stored, and dV is
//                   multiplied with S of the next tile.
//     softcap       S becomes tanh. Its derivative is found again from P and lse, without registers or shared memory for it.
#pragma once

#include "attention/backward/wgmma_sm90/dropout.cuh"
#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/large_rows.cuh"
#include "common/constants.h"
#include "device/approximate.cuh"
#include "device/mma.cuh"
#include "device/prmt.cuh"
#include "device/wgmma.cuh"

namespace fa {

// ---- windows ----

// Sets pairs before the left edge to -inf. `key` and `query` belong to element 0.
template <int kCount>
__device__ __forceinline__ void mask_left_edge(float (&S)[kCount], const BackwardWork& w, int key, int query) {
    const int last0 = key - w.left - query, last1 = last0 + 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 > (i / 2 % 2 ? last1 : last0)) S[i] = -INFINITY;
}

// ---- masks of keys ----

__device__ __forceinline__ const uint8_t* key_mask_of(const AttentionParams& p, const BackwardWork& w) {
    return static_cast<const uint8_t*>(p.mask.data) + w.batch * p.mask.batch + w.head_k * p.group * p.mask.head;
}
// Called by a whole warp: bit i says that the mask hides key0 + i, one of 16 keys. Keys past the end have no bit.
__device__ __forceinline__ uint32_t hidden_keys(const AttentionParams& p, const BackwardWork& w, int key0) {
    if (!p.mask.data) return 0;
    const int key = key0 + opaque(int(threadIdx.x % 16));
    return __ballot_sync(~0u, key < w.seqlen_k && !key_mask_of(p, w)[key]) & 0xFFFF;
}
// Called by one thread: whether the mask hides all keys of a block.
template <int kBlockN>
__device__ __forceinline__ bool all_hidden(const AttentionParams& p, const BackwardWork& w) {
    const uint8_t* attend = key_mask_of(p, w) + w.key0;
    uint32_t seen = 0;
#pragma unroll 4
    for (int left = min(kBlockN, w.seqlen_k - w.key0); left > 0 && !seen; --left) seen = *attend++;
    return !seen;
}
// Clears the rows of hidden keys. `hidden`: bits 0 and 8 belong to the keys of the thread's two rows.
template <int kCount>
__device__ __forceinline__ void clear_hidden(float (&d)[kCount], uint32_t hidden) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (hidden >> i / 2 % 2 * 8 & 1) d[i] = 0.0f;
}
// Clears them in packed pairs of queries, even where they hold NaN.
__device__ __forceinline__ void clear_hidden(uint32_t (&pairs)[4], uint32_t hidden) {
#pragma unroll
    for (int x = 0; x < 4; ++x) pairs[x] &= (hidden >> x % 2 * 8 & 1) - 1;
}

// ---- ALiBi ----

// What ALiBi needs to know of a tile of Q.
struct AlibiTile {
    float slope;        // alibi_of_products; 0 where rows of the call may be large
    float large_slope;  // the slope there
    int row0;           // first query + shift
};
// Called by one thread: of a tile of kBlockM queries.
template <int kBlockM>
__device__ __forceinline__ AlibiTile alibi_tile(const AttentionParams& p, const BackwardWork& w, Visited at) {
    const float slope = alibi_of_products(p, w.batch, w.head_k * p.group + at.head);
    return {w.has_large_rows() ? 0.0f : slope, slope, at.m * kBlockM + w.shift};
}
// Subtracts slope |i + shift - j|. `key` and `query` belong to element 0; `query` counts from the tile's first query.
template <int kCount>
__device__ __forceinline__ void add_alibi(float (&S)[kCount], const AlibiTile& tile, int key, int query) {
    const float slope = tile.slope, base0 = slope * float(tile.row0 + query - key), base1 = fmaf(slope, -8.0f, base0);
    const auto distance = [&](int i) { return fabsf(fmaf(slope, float(i / 4 * 8 + i % 2), i / 2 % 2 ? base1 : base0)); };
    if (slope >= 0) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) S[i] -= distance(i);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) S[i] += distance(i);
    }
}
// Subtracts it with the rounding of find_large_rows.
template <int kCount>
__device__ __forceinline__ void add_large_alibi(float (&S)[kCount], const AlibiTile& tile, int key, int query) {
    const int distance = tile.row0 + query - key;
#pragma unroll
    for (int i = 0; i < kCount; ++i) S[i] = alibi_product(S[i], tile.large_slope, distance + i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
}

// ---- bias ----

// S = scale S + bias, in natural units, with the rounding of find_large_rows; -inf where the bias is. `tile`: the shared address of a tile
// of bias, whose rows are queries. key0: the warp's first key in the tile.
template <typename T, int kBlockM, int kCount>
__device__ __forceinline__ void add_bias(float (&S)[kCount], const AttentionParams& p, uint32_t tile, int key0, int ln) {
    const bool rows = p.bias.row != 0;
    const uint32_t place = tile + swizzled_offset(kBlockM, rows ? ln / 16 * 8 + ln % 8 : 0, key0 / 8 + ln / 8 % 2);
    const uint32_t step = rows ? 16 * kChunkRowBytes : 0;
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
        uint32_t pairs[4];
        ldmatrix_x4_trans(pairs, place + i * step);
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const float2 bias = unpack_16<T>(pairs[x]);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float own = e ? bias.y : bias.x;
                float& score = S[8 * i + 2 * x + e];
                const uint32_t product = opaque(own == -INFINITY ? 0u : __float_as_uint(score));  // it may be NaN
                score = __fadd_rn(__fmul_rn(__uint_as_float(product), p.scale), own);
            }
        }
    }
}

// The same in float32, without ldmatrix: eight keys of four queries are 32 different banks.
template <int kBlockM, int kCount>
__device__ __forceinline__ void add_float32_bias(float (&S)[kCount], const AttentionParams& p, uint32_t tile, int key0, int ln) {
    const bool rows = p.bias.row != 0;
    const int key = key0 + ln / 4, quad = ln % 4;
    // Of elements 0 and 1; elements 2 and 3 are 8 keys further: two pieces of four floats.
    const auto place_of = [&](int e) { return tile + swizzled_offset(kBlockM, rows ? 2 * quad + e : 0, key / 4) + key % 4 * 4; };
    const uint32_t place[2] = {place_of(0), place_of(1)}, step = rows ? 8 * kChunkRowBytes : 0;
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i)
#pragma unroll
        for (int x = 0; x < 2; ++x)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const float own = __uint_as_float(load_shared_4((place[e] ^ x << 5) + i * step));
                float& score = S[4 * i + 2 * x + e];
                const uint32_t product = opaque(own == -INFINITY ? 0u : __float_as_uint(score));  // it may be NaN
                score = __fadd_rn(__fmul_rn(__uint_as_float(product), p.scale), own);
            }
}

// Sets the scores of queries past the end of a sequence to -inf: the rows of their bias may hold anything (ragged_place). `rows`: the
// sequence's queries from that of element 0 on.
template <int kCount>
__device__ __forceinline__ void hide_rows_past_end(float (&S)[kCount], int rows) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 >= rows) S[i] = -INFINITY;
}

// ---- dropout ----

// dS = P (scale dP - delta), packed as A operand, where dP is 0 for dropped pairs.
template <typename T>
__device__ __forceinline__ void dropped_gradients(uint32_t (&dS)[4], const uint32_t* P, const float* dP, const float4& delta, float scale,
                                                  const uint2& signs) {
    const auto of_key = [&](auto key) {
        constexpr int n = decltype(key)::value;
        const float2 low = unpack_16<T>(P[n]), high = unpack_16<T>(P[2 + n]);
        dS[n] = pack_16<T>(low.x * fmaf(keep_if<0, n>(dP[2 * n], signs.x), scale, -delta.x),
                           low.y * fmaf(keep_if<1, n>(dP[2 * n + 1], signs.x), scale, -delta.y));
        dS[2 + n] = pack_16<T>(high.x * fmaf(keep_if<0, n>(dP[4 + 2 * n], signs.y), scale, -delta.z),
                               high.y * fmaf(keep_if<1, n>(dP[5 + 2 * n], signs.y), scale, -delta.w));
    };
    of_key(std::integral_constant<int, 0>{}), of_key(std::integral_constant<int, 1>{});
}

// ---- softcap ----

// For bfloat16, log2 P comes without the special function unit, which the exponentials keep busy. The bits of a float, read as an
// integer, are 2^23 (log2 + 127), except that log2(1 + m) of the mantissa is replaced by m: up to 0.086 too small. kMiddle makes that 0.043
// either way.
constexpr float kMiddle = 0.043f;
inline SoftcapFactors softcap_factors(const AttentionParams& p) {
    const float exponent = p.softcap * kLog2e, inverse = 1.0f / exponent;
    const float offset = p.dtype == DType::kFloat16 ? 0.0f : (kMiddle - 383.0f) * inverse;
    return {p.scale / p.softcap, exponent, inverse, inverse * 0x1p-15f, offset};
}
// tanh x for |x| <= kSmallTanh to 1.2e-6, by multiply-adds alone: a polynomial at the Chebyshev nodes of x^2.
constexpr float kSmallTanh = 0.6f;
__device__ __forceinline__ float small_tanh(float x) {
    const float y = x * x;
    return x * fmaf(fmaf(fmaf(-0.040959207f, y, 0.13059473f), y, -0.33314261f), y, 0.99999791f);
}
// S becomes tanh(S scale / softcap). The special function unit is the bound, so a warp goes without it where all of its scores are small.
// Called by a whole warp.
template <int kCount>
__device__ __forceinline__ void cap_scores(float (&S)[kCount], const SoftcapFactors& factors) {
    float most = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) S[i] *= factors.argument, most = fmaxf(most, fabsf(S[i]));
    if (__any_sync(~0u, most > kSmallTanh)) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) S[i] = fmaf(-2.0f, rcp_approx(1.0f + exp2_approx(S[i] * (2 * kLog2e))), 1.0f);
    } else {
#pragma unroll
        for (int i = 0; i < kCount; ++i) S[i] = small_tanh(S[i]);
    }
}
// 1 - t^2, where t = tanh(score / softcap) = (log2 P + lse) inverse. row = lse inverse + offset. P = 0 gives anything from 0 to 1.
template <typename T>
__device__ __forceinline__ float softcap_slope(float P, float row, const SoftcapFactors& factors) {
    float t;
    if constexpr (std::is_same_v<T, __half>) {
        t = fmaf(log2_approx(P), factors.inverse, row);
    } else {  // the upper bits of P below the exponent of 2^23: a float of the integer 2^23 + bits / 2^8
        t = fmaf(__uint_as_float(__byte_perm(__float_as_uint(P), 0x4Bu, 0x4321)), factors.bits, row);
    }
    return __saturatef(fmaf(-t, t, 1.0f));
}
// dS = P (dP - delta) (1 - t^2) for queries 16 i .. 16 i + 15, packed as A operand.
template <typename T>
__device__ __forceinline__ void capped_gradients(uint32_t (&dS)[4], const uint32_t* P, const float* dP, const float4& delta,
                                                 const float4& lse, const SoftcapFactors& factors) {
    const auto row = [&](float lse) { return fmaf(lse, factors.inverse, factors.offset); };
    const float rows[4] = {row(lse.x), row(lse.y), row(lse.z), row(lse.w)};
#pragma unroll
    for (int x = 0; x < 4; ++x) {
        const float2 p = unpack_16<T>(P[x]);
        const float low = p.x * (dP[2 * x] - (x < 2 ? delta.x : delta.z)), high = p.y * (dP[2 * x + 1] - (x < 2 ? delta.y : delta.w));
        dS[x] =
            pack_16<T>(low * softcap_slope<T>(p.x, rows[x / 2 * 2], factors), high * softcap_slope<T>(p.y, rows[x / 2 * 2 + 1], factors));
    }
}

}  // namespace fa
