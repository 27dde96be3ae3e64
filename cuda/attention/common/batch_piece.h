// batch_piece.h: some sequences of a dense call without a cache, as a call of their own; and a call in such pieces, one after the other.
#pragma once

#include <algorithm>
#include <cstddef>

#include "attention/common/params.h"

namespace fa {

inline void skip_sequences(TensorView& x, int32_t count, int element_bytes) {
    if (x.data) x.data = static_cast<char*>(x.data) + count * x.batch * element_bytes;
}
inline void skip_sequences(ScoreView& x, int32_t count, int element_bytes) {
    if (x.data) x.data = static_cast<const char*>(x.data) + count * x.batch * element_bytes;
}

// Sequences first .. first + count - 1. Not with dropout, whose random numbers count sequences from the first of the call.
inline AttentionParams batch_piece(const AttentionParams& whole, int32_t first, int32_t count) {
    AttentionParams p = whole;
    const int64_t heads = int64_t(first) * p.nheads;
    skip_sequences(p.q, first, size_of(p.dtype)), skip_sequences(p.k, first, size_of(p.dtype));
    skip_sequences(p.v, first, size_of(p.dtype)), skip_sequences(p.out, first, size_of(p.out_dtype));
    skip_sequences(p.bias, first, size_of(p.bias_dtype)), skip_sequences(p.mask, first, 1);
    if (p.lse) p.lse += heads * p.seqlen_q;
    if (p.alibi_slopes) p.alibi_slopes += first * p.alibi_batch;
    if (p.intervals.data) p.intervals.data += first * p.intervals.batch;
    if (p.blocks.data) p.blocks.data += first * p.blocks.batch;
    if (p.max_score) p.max_score += heads;
    if (p.key_sums) p.key_sums += heads * p.seqlen_k;
    p.batch = count;
    return p;
}
// Without dbias and dsinks, which sum over sequences.
inline BackwardParams batch_piece(const BackwardParams& whole, int32_t first, int32_t count) {
    BackwardParams b = whole;
    b.forward = batch_piece(whole.forward, first, count);
    for (TensorView* const x : {&b.dout, &b.dq, &b.dk, &b.dv}) skip_sequences(*x, first, size_of(b.forward.dtype));
    if (b.dlse) b.dlse += int64_t(first) * b.forward.nheads * b.forward.seqlen_q;
    b.dbias = {}, b.dsinks = nullptr;
    return b;
}

inline int32_t batch_of(const AttentionParams& p) { return p.batch; }
inline int32_t batch_of(const BackwardParams& b) { return b.forward.batch; }

// The pieces have `count` sequences, the last one what is left. A call that has no more is its only piece.
template <typename Params, typename Launch>
auto for_batch_pieces(const Params& whole, int32_t count, const Launch& launch) {
    const int32_t batch = batch_of(whole);
    if (count >= batch) return launch(whole);
    for (int32_t first = 0; first + count < batch; first += count)
        if (auto error = launch(batch_piece(whole, first, count)); error != decltype(error){}) return error;
    const int32_t last = (batch - 1) / count * count;
    return launch(batch_piece(whole, last, batch - last));
}
// The most that a piece takes of a workspace that they use in turn.
template <typename Params, typename Bytes>
size_t most_of_batch_pieces(const Params& whole, int32_t count, const Bytes& bytes) {
    const int32_t batch = batch_of(whole);
    if (count >= batch) return bytes(whole);
    return std::max(bytes(batch_piece(whole, 0, count)), bytes(batch_piece(whole, 0, (batch - 1) % count + 1)));
}

}  // namespace fa
