// mask.h: which keys a query row sees, and what happens to a score before the softmax. One definition for host and device.
#pragma once

#include "attention/common/params.h"

#include <cmath>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace fa {

struct KeyRange {
    int32_t begin, end;  // keys begin .. end - 1
};

// Keys that row i sees under causal and window, for kernels without chunks.
FA_HOST_DEVICE KeyRange window_range(const AttentionParams& p, const Sequence& s, int32_t i) {
    const int64_t aligned = int64_t(i) + s.shift;
    int64_t begin = 0, end = s.seqlen_k;
    if (p.window_left >= 0 && aligned - p.window_left > begin) begin = aligned - p.window_left;
    if (p.window_right >= 0 && aligned + p.window_right + 1 < end) end = aligned + p.window_right + 1;
    if (begin > s.seqlen_k) begin = s.seqlen_k;
    if (end < 0) end = 0;
    return {int32_t(begin), int32_t(end)};
}

// The first key of the chunk that key j lies in.
FA_HOST_DEVICE int32_t chunk_begin(const AttentionParams& p, int32_t j) { return p.chunk.divide(j) * int32_t(p.chunk.divisor); }

// Keys that row i sees under causal, window and chunks. Both ends grow with i, so a tile of rows i0 .. i1 sees key_range(i0).begin ..
// key_range(i1).end - 1. An empty range has begin >= end.
FA_HOST_DEVICE KeyRange key_range(const AttentionParams& p, const Sequence& s, int32_t i) {
    KeyRange range = window_range(p, s, i);
    if (!p.chunk.divisor) return range;
    const int32_t aligned = i + s.shift;
    if (aligned < 0) return {0, 0};  // before the first chunk
    const int32_t first = chunk_begin(p, aligned);
    if (first > range.begin) range.begin = first < s.seqlen_k ? first : s.seqlen_k;
    if (int64_t(first) + p.chunk.divisor < range.end) range.end = first + int32_t(p.chunk.divisor);
    return range;
}

// Whether the tree of draft tokens lets row i of sequence b see key j. Like a mask, it only hides keys inside key_range.
FA_HOST_DEVICE bool tree_shows(const AttentionParams& p, const Sequence& s, int32_t b, int32_t i, int32_t j) {
    const int32_t bit = j - (s.seqlen_k - p.tree.keys);
    return bit < 0 || (p.tree.rows[b * p.tree.batch + i * p.tree.row] >> bit & 1);
}

// ---- masks by intervals ----

// Always inlined: the CPU's tile kernels, which are compiled for one instruction set each, use these functions, too.
#if defined(__CUDACC__)
#define FA_INLINED __host__ __device__ __forceinline__
#else
#define FA_INLINED inline __attribute__((always_inline))
#endif

// The rows that do not see a key: begin[x] .. end[x] - 1 for x = 0 and 1. Either may be empty, with begin[x] >= end[x]. Of::Rows is a
// number, or a vector with a number for each of several keys. (A vector type as an argument of a template loses its attributes.)
template <typename Of>
struct HiddenRowsOf {
    typename Of::Rows begin[2], end[2];
    // Whether row i is hidden: a bool, or a mask of lanes where one of the two is a vector.
    template <typename Row>
    FA_INLINED auto hides(Row i) const {
        return ((i >= begin[0]) & (i < end[0])) | ((i >= begin[1]) & (i < end[1]));
    }
};
struct OneKey {
    using Rows = int32_t;
};
using HiddenRows = HiddenRowsOf<OneKey>;

// The numbers of key 0 of sequence b, for a query head.
FA_INLINED const int32_t* row_indices_of(const AttentionParams& p, int32_t b, int32_t head) {
    const int64_t sequence = p.cu_seqlens_k ? clamp_to(p.cu_seqlens_k[b], 0, p.total_k) * p.intervals.key : b * p.intervals.batch;
    return p.intervals.data + sequence + head / p.intervals.heads_of_entry * p.intervals.head;
}

// `of`: the numbers of one key. Rows are only compared, so numbers beyond 0 .. seqlen_q act as the nearer end.
FA_INLINED HiddenRows hidden_rows(const AttentionParams& p, const int32_t* of) {
    HiddenRows rows{{of[0], 0}, {INT32_MAX, 0}};
    if (p.intervals.form == RowIndicesForm::kFrom) return rows;
    if (p.intervals.form == RowIndicesForm::kOutside) {
        rows.end[1] = of[1];
        return rows;
    }
    rows.end[0] = of[1];
    if (p.intervals.form == RowIndicesForm::kTwoIntervals) rows.begin[1] = of[2], rows.end[1] = of[3];
    return rows;
}

FA_INLINED bool interval_hides(const AttentionParams& p, int32_t b, int32_t head, int32_t i, int32_t j) {
    return hidden_rows(p, row_indices_of(p, b, head) + j * p.intervals.key).hides(i);
}

// What the intervals of a tile of keys leave to a range of rows.
enum class Seen { kNothing, kSome, kEverything };

// The extremes of the hidden rows of several keys, of each of the two intervals by itself. An empty interval counts as one that begins
// after all rows and ends before them.
struct HiddenBounds {
    int32_t max_begin[2], min_begin[2], max_end[2], min_end[2];

    FA_INLINED void clear() {
        for (int x = 0; x < 2; ++x) max_begin[x] = max_end[x] = INT32_MIN, min_begin[x] = min_end[x] = INT32_MAX;
    }
    // With these seen_by is always kSome.
    FA_INLINED void decide_nothing() {
        for (int x = 0; x < 2; ++x) max_begin[x] = max_end[x] = INT32_MAX, min_begin[x] = min_end[x] = INT32_MIN;
    }
    FA_INLINED void add(const HiddenRows& rows) {
        for (int x = 0; x < 2; ++x) {
            const bool none = rows.begin[x] >= rows.end[x];
            const int32_t begin = none ? INT32_MAX : rows.begin[x], end = none ? INT32_MIN : rows.end[x];
            if (begin > max_begin[x]) max_begin[x] = begin;
            if (begin < min_begin[x]) min_begin[x] = begin;
            if (end > max_end[x]) max_end[x] = end;
            if (end < min_end[x]) min_end[x] = end;
        }
    }
    // Whether one of the intervals hides row i from every key. Such rows are max_begin .. min_end - 1.
    FA_INLINED bool hides_from_all(int32_t i) const {
        return (max_begin[0] <= i && i < min_end[0]) || (max_begin[1] <= i && i < min_end[1]);
    }
    // Whether all keys have the same intervals.
    FA_INLINED bool are_equal() const {
        return max_begin[0] == min_begin[0] && max_begin[1] == min_begin[1] && max_end[0] == min_end[0] && max_end[1] == min_end[1];
    }
    // What rows first .. last see of the keys. kSome where these numbers do not decide.
    FA_INLINED Seen seen_by(int32_t first, int32_t last) const {
        for (int x = 0; x < 2; ++x)
            if (max_begin[x] <= first && last < min_end[x]) return Seen::kNothing;
        for (int x = 0; x < 2; ++x)
            if (min_begin[x] <= last && first < max_end[x]) return Seen::kSome;
        return Seen::kEverything;
    }
};

// ---- masks by blocks ----

// What a mask by blocks shows to row i of sequence b: element j >> key_shift decides on key j.
FA_INLINED const uint8_t* blocks_of_row(const AttentionParams& p, int32_t b, int32_t head, int32_t i) {
    const BlockMaskView& x = p.blocks;
    return x.data + b * x.batch + head / x.heads_of_entry * x.head + (i >> x.row_shift) * x.row;
}

FA_INLINED bool block_hides(const AttentionParams& p, int32_t b, int32_t head, int32_t i, int32_t j) {
    return !blocks_of_row(p, b, head, i)[j >> p.blocks.key_shift];
}

// What a mask by blocks leaves to rows first .. last of a query head.
struct BlockRows {
    const AttentionParams& p;
    int32_t b, head, first, last;

    // Of keys begin .. end - 1, at least one.
    FA_INLINED Seen of_keys(int32_t begin, int32_t end) const {
        const BlockMaskView& x = p.blocks;
        bool some = false, every = true;
        for (int32_t i = first >> x.row_shift; i <= last >> x.row_shift; ++i) {
            const uint8_t* const row = blocks_of_row(p, b, head, i << x.row_shift);
            for (int32_t j = begin >> x.key_shift; j <= (end - 1) >> x.key_shift; ++j) some |= row[j] != 0, every &= row[j] != 0;
        }
        return every ? Seen::kEverything : some ? Seen::kSome : Seen::kNothing;
    }
    // Keys begin .. end - 1 without the first and the last ones of which no row sees any.
    FA_INLINED KeyRange seen_keys(int32_t begin, int32_t end) const {
        const int32_t shift = p.blocks.key_shift;
        while (begin < end && of_keys(begin, begin + 1) == Seen::kNothing) begin = ((begin >> shift) + 1) << shift;
        while (begin < end && of_keys(end - 1, end) == Seen::kNothing) end = ((end - 1) >> shift) << shift;
        return {begin, end};
    }
};

struct QueryRange {
    int32_t begin, end;  // queries begin .. end - 1
};

// The inverse of key_range: the queries that see key j under causal, window and chunks. Both ends grow with j.
FA_HOST_DEVICE QueryRange query_range(const AttentionParams& p, const Sequence& s, int32_t j) {
    const int64_t aligned = int64_t(j) - s.shift;
    int64_t begin = 0, end = s.seqlen_q;
    if (p.window_right >= 0 && aligned - p.window_right > begin) begin = aligned - p.window_right;
    if (p.window_left >= 0 && aligned + p.window_left + 1 < end) end = aligned + p.window_left + 1;
    if (p.chunk.divisor) {
        const int64_t first = int64_t(chunk_begin(p, j)) - s.shift;
        if (first > begin) begin = first;
        if (first + p.chunk.divisor < end) end = first + p.chunk.divisor;
    }
    if (begin > s.seqlen_q) begin = s.seqlen_q;
    if (end < 0) end = 0;
    return {int32_t(begin), int32_t(end)};
}

// On the host, common/half.h converts half and bfloat16; on the device each conversion is one instruction.
#if defined(__CUDACC__)
__device__ __forceinline__ float load_as_float(const void* data, int64_t index, DType dtype) {
    if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(data)[index]);
    if (dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    return static_cast<const float*>(data)[index];
}

// The score of a visible pair (i, j), natural units: scale, softcap, ALiBi, bias, the masks, in the order of docs/contract.md.
__device__ __forceinline__ float transform_score(const AttentionParams& p, const Sequence& s, int32_t b, int32_t head, int32_t i, int32_t j,
                                                 float dot) {
    float score = __fmul_rn(dot, p.scale);  // never fused with what follows: large_rows.cuh needs the same bits in every kernel
    if (p.softcap != 0) score = p.softcap * tanhf(score / p.softcap);
    if (p.alibi_slopes) score -= p.alibi_slopes[b * p.alibi_batch + head] * fabsf(float(int64_t(i) + s.shift - j));
    if (p.bias.data) {
        const float bias = load_as_float(p.bias.data, b * p.bias.batch + head * p.bias.head + i * p.bias.row + j, p.bias_dtype);
        score = bias == -INFINITY ? -INFINITY : score + bias;  // hidden, even where the product is NaN
    }
    if (p.mask.data && !static_cast<const uint8_t*>(p.mask.data)[b * p.mask.batch + head * p.mask.head + i * p.mask.row + j])
        score = -INFINITY;
    if (p.intervals.data && interval_hides(p, b, head, i, j)) score = -INFINITY;
    if (p.blocks.data && block_hides(p, b, head, i, j)) score = -INFINITY;
    if (p.tree.rows && !tree_shows(p, s, b, i, j)) score = -INFINITY;
    return score;
}
#endif

}  // namespace fa
