// general_scores.cuh: the options of a score, applied to a thread's fragment of S. In the accumulator layout of wgmma and of mma.m16n8k16,
// element i is row + 8 (i / 2 % 2), key + 8 (i / 4) + i % 2. The arithmetic is that of transform_score in mask.h, but one option at a time,
// so that each option is tested once per tile.
#pragma once

#include <type_traits>

#include "attention/common/dropout.h"
#include "attention/common/mask.h"
#include "common/element.cuh"
#include "device/ptx.cuh"

namespace fa {

// tanh with an absolute error of a few 1e-7, which softcap then multiplies. Large |x| gives +-1, NaN stays NaN.
__device__ __forceinline__ float tanh_fast(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }

struct FragmentPlace {
    int batch, head;
    int row, key;  // of element 0, counted from the start of the sequence
    int seqlen_q, seqlen_k;
    int shift;  // i_aligned = i + shift
};

// S = softcap(scale S) + alibi, natural units. Of float32 scores (T) tanh is exact: softcap times the error of tanh_fast is many times what
// float32 sums lose.
template <typename T, int kCount>
__device__ __forceinline__ void transform_products(const AttentionParams& p, const FragmentPlace& at, float (&S)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) S[i] = __fmul_rn(S[i], p.scale);  // never fused: every kernel needs the same bits, large_rows.cuh
    if (p.softcap != 0) {
        const float inverse = 1.0f / p.softcap;
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
            const float x = S[i] * inverse;
            S[i] = p.softcap * (std::is_same_v<T, float> ? tanhf(x) : tanh_fast(x));
        }
    }
    if (p.alibi_slopes) {
        const float slope = p.alibi_slopes[at.batch * p.alibi_batch + at.head];
        const int distance = at.row + at.shift - at.key;
#pragma unroll
        for (int i = 0; i < kCount; ++i) S[i] -= slope * fabsf(float(distance + i / 2 % 2 * 8 - i / 4 * 8 - i % 2));
    }
}

// S = bias + alibi + softcap(scale S), natural units; -inf where the boolean mask or a bias of -inf hides the pair.
template <typename T, int kCount>
__device__ __forceinline__ void transform_fragment(const AttentionParams& p, const FragmentPlace& at, float (&S)[kCount]) {
    transform_products<T>(p, at, S);
    // Row by row, eight keys at a time. The opaque pointer keeps the compiler from issuing all loads of a fragment at once, which takes
    // registers.
    const auto walk = [&](const auto* data, int64_t batch, int64_t head, int64_t row, const auto& element) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (at.row + 8 * r >= at.seqlen_q) continue;
            const auto* place = data + (at.batch * batch + at.head * head + (at.row + 8 * r) * row + at.key);
            int keys = at.seqlen_k - at.key;  // keys that exist from `place` on
#pragma unroll
            for (int i = 2 * r; i < kCount; i += 4) {
                if (keys > 0) element(S[i], place[0]);
                if (keys > 1) element(S[i + 1], place[1]);
                place = opaque(place + 8);
                keys -= 8;
            }
        }
    };
    if (p.bias.data) {
        const auto add = [](float& score, auto x) {
            const float bias = to_float(x);
            score = bias == -INFINITY ? bias : score + bias;  // even when the score is NaN or infinite: the pair is hidden
        };
        if (p.bias_dtype == DType::kFloat32) walk(static_cast<const float*>(p.bias.data), p.bias.batch, p.bias.head, p.bias.row, add);
        else walk(static_cast<const T*>(p.bias.data), p.bias.batch, p.bias.head, p.bias.row, add);
    }
    if (p.mask.data) {
        const auto hide = [](float& score, uint8_t attend) {
            if (!attend) score = -INFINITY;
        };
        walk(static_cast<const uint8_t*>(p.mask.data), p.mask.batch, p.mask.head, p.mask.row, hide);
    }
}

// Sets scores that the tree of draft tokens hides to -inf (mask.h: tree_shows). Scores of keys past the sequence may get any value.
template <int kCount>
__device__ __forceinline__ void hide_by_tree(const AttentionParams& p, const FragmentPlace& at, float (&S)[kCount]) {
    const int first = at.key - (at.seqlen_k - p.tree.keys);  // the bit of element 0
    if (first + 2 * kCount <= 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const uint64_t bits = p.tree.rows[at.batch * p.tree.batch + min(at.row + 8 * r, at.seqlen_q - 1) * p.tree.row];
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int bit = first + 2 * i - 4 * r + e;
                if (bit >= 0 && !(bits >> (bit & 63) & 1)) S[i + e] = -INFINITY;
            }
    }
}

// Sets scores that masks by intervals hide to -inf (mask.h: hidden_rows). Scores of rows past the sequence may get any value.
template <int kCount>
__device__ __forceinline__ void hide_by_intervals(const AttentionParams& p, const FragmentPlace& at, float (&S)[kCount]) {
    const int32_t* numbers = row_indices_of(p, at.batch, at.head) + at.key * p.intervals.key;
    int keys = at.seqlen_k - at.key;  // keys that exist from `numbers` on
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (keys <= e) continue;
            const HiddenRows hidden = hidden_rows(p, numbers + e * p.intervals.key);
            if (hidden.hides(at.row)) S[i + e] = -INFINITY;
            if (hidden.hides(at.row + 8)) S[i + 2 + e] = -INFINITY;
        }
        numbers = opaque(numbers + 8 * p.intervals.key);  // as in transform_fragment
        keys -= 8;
    }
}

// The same for masks by blocks. The 16 rows of a fragment lie in one block, and so do 8 of its keys.
template <int kCount>
__device__ __forceinline__ void hide_by_blocks(const AttentionParams& p, const FragmentPlace& at, float (&S)[kCount]) {
    const uint8_t* const shown = blocks_of_row(p, at.batch, at.head, min(at.row, at.seqlen_q - 1));
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const int key = at.key + 2 * i;
        if (key < at.seqlen_k && !shown[key >> p.blocks.key_shift]) S[i] = S[i + 1] = S[i + 2] = S[i + 3] = -INFINITY;
    }
}

// Zeroes the dropped probabilities. One Philox call decides 16 elements of a row in 64 keys, which all are this lane's. Fragments of fewer
// keys use a half or a quarter of it. Of n keys, the first has to be a multiple of n, or of the greatest power of two that divides n.
template <int kCount>
__device__ __forceinline__ void drop_fragment(const AttentionParams& p, const FragmentPlace& at, int quad, float (&P)[kCount]) {
    static_assert(kCount % 8 == 0, "a word decides two groups of eight keys");
    constexpr int kWords = kCount % 32 == 0 ? 4 : kCount % 16 == 0 ? 2 : 1;  // of a call
    const DropoutOrigin origin = dropout_origin(p, at.batch);
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int first = 0; first < kCount / 8; first += kWords) {
            const uint32_t key = uint32_t(at.key) + 16 * first;
            const Philox4 block = philox<kDropoutRounds>(origin.calls + key / kDropoutColumns * 4 + quad, origin.row + at.row + 8 * r,
                                                         origin.head + at.head, origin.sequence, p.dropout_key[0], p.dropout_key[1]);
#pragma unroll
            for (int x = 0; x < kWords; ++x) {
                const uint32_t word = kWords == 4 ? block.word[x] : word_of(block, key + 16 * x), swapped = swapped_halves(word);
                float* pairs = P + 8 * (first + x) + 2 * r;
                if (drops(p, word, false)) pairs[0] = 0.0f;
                if (drops(p, word, true)) pairs[1] = 0.0f;
                if (drops(p, swapped, false)) pairs[4] = 0.0f;
                if (drops(p, swapped, true)) pairs[5] = 0.0f;
            }
        }
}

}  // namespace fa
