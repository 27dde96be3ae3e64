// bias_copy.h: a copy of a bias, of 16 bits or float32, in the workspace, for Hopper's plans with a bias, which load it by the copy engine.
// A call gets one where the copy engine cannot load the bias from where it lies (its rows are not whole 16 bytes, or do not begin at such
// places), or where a mask of pairs stands beside the bias: the copy is -inf where the mask hides a pair, and a bias of -inf hides as a
// mask does. So a mask of pairs alone may become a bias, too: zeros and -inf. That serves its calls with dropout, which the plans for masks
// do not take.
//
// An axis on which the bias (and the mask) is shared has one entry in the copy, too. Rows are padded to whole 16 bytes. Where the copy of
// all sequences is too large, the call is launched in pieces of as many sequences as fit, one after the other in the same memory.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "attention/common/bias_tiles.h"
#include "attention/common/mask.h"
#include "attention/common/params.h"

namespace fa {

constexpr int kBiasChunkBytes = 16;

struct BiasCopy {
    ScoreView bias, mask;  // data = nullptr: not in the copy, which has one of the two at least
    uint32_t hidden;       // -inf, or two of it in 16 bits
    int32_t elements;      // of a chunk of 16 bytes
    int32_t batches, heads, rows, keys;
    int64_t batch, head, row;  // strides of the copy; 0 on a shared axis

    FA_HOST_DEVICE int32_t chunks() const { return (keys + elements - 1) / elements; }  // of a row
    FA_HOST_DEVICE int64_t all_rows() const { return int64_t(batches) * heads * rows; }
    FA_HOST_DEVICE int64_t bytes() const { return all_rows() * chunks() * kBiasChunkBytes; }
};
// with_mask: the mask goes into the copy.
inline BiasCopy bias_copy(const AttentionParams& p, bool with_mask) {
    BiasCopy copy{};
    if (p.bias.data) copy.bias = p.bias;
    if (with_mask) copy.mask = p.mask;
    copy.elements = kBiasChunkBytes / bias_element_bytes(p);
    copy.hidden = bias_is_float32(p) ? 0xFF800000u : p.dtype == DType::kFloat16 ? 0xFC00FC00u : 0xFF80FF80u;
    const bool own_batch = copy.bias.batch || copy.mask.batch, own_head = copy.bias.head || copy.mask.head,
               own_row = copy.bias.row || copy.mask.row;
    copy.batches = own_batch ? p.batch : 1, copy.heads = own_head ? p.nheads : 1, copy.rows = own_row ? p.seqlen_q : 1;
    copy.keys = p.seqlen_k;
    const int64_t row = int64_t(copy.chunks()) * copy.elements;
    copy.row = own_row ? row : 0, copy.head = own_head ? copy.rows * row : 0,
    copy.batch = own_batch ? int64_t(copy.heads) * copy.rows * row : 0;
    return copy;
}
// The call as kernels see it after the copy to `place`, which starts at a multiple of kBiasCopyAlignment.
constexpr uintptr_t kBiasCopyAlignment = 128;
inline AttentionParams with_bias_copy(AttentionParams p, const BiasCopy& copy, const void* place) {
    p.bias = {place, copy.batch, copy.head, copy.row};
    if (!copy.bias.data) p.bias_dtype = p.dtype;
    if (copy.mask.data) p.mask = {};
    return p;
}
inline AttentionParams with_bias_copy(const AttentionParams& p, const BiasCopy& copy) {  // somewhere, for choices
    return with_bias_copy(p, copy, reinterpret_cast<const void*>(kBiasCopyAlignment));
}
inline size_t bias_copy_bytes(const BiasCopy& copy) { return size_t(copy.bytes()) + kBiasCopyAlignment; }

// The pairs of rows and keys that causal and window leave visible, of all heads, as far as the host knows: lengths of packed sequences are
// taken to be equal.
inline double visible_pairs(const AttentionParams& p) {
    if (p.batch == 0) return 0;
    Sequence s{};
    s.seqlen_q = p.cu_seqlens_q ? p.total_q / p.batch : p.seqlen_q, s.seqlen_k = p.cu_seqlens_q ? p.total_k / p.batch : p.seqlen_k;
    s.shift = p.top_left ? 0 : s.seqlen_k - s.seqlen_q;
    constexpr int kSamples = 16;
    double keys = 0;
    for (int x = 0; x < kSamples && s.seqlen_q > 0; ++x) {
        const KeyRange range = window_range(p, s, int32_t(int64_t(s.seqlen_q) * (2 * x + 1) / (2 * kSamples)));
        keys += range.begin < range.end ? range.end - range.begin : 0;
    }
    return keys / kSamples * s.seqlen_q * p.nheads * p.batch;
}
// Whether the workspace may hold the copy. One of more than kSmallBiasCopy bytes has at most a quarter more elements than the memory that
// its bias and its mask reach over. Padding stays below that from 29 keys on. A copy of a mask and a bias that differ on different axes
// does not, nor does one of a bias whose rows overlap.
constexpr int64_t kSmallBiasCopy = int64_t(1) << 30, kMostBiasCopy = int64_t(4) << 30;  // bytes
inline bool bias_copy_fits(const AttentionParams& p, const BiasCopy& copy) {
    const auto reach = [&](const ScoreView& x) {  // elements; in double, because strides may be anything
        const auto axis = [](int64_t stride, int32_t size) { return std::abs(double(stride)) * (size - 1); };
        return x.data ? axis(x.batch, p.batch) + axis(x.head, p.nheads) + axis(x.row, p.seqlen_q) + p.seqlen_k : 0.0;
    };
    const double elements = double(copy.all_rows()) * copy.chunks() * copy.elements;
    const double bytes = elements * (kBiasChunkBytes / copy.elements);
    return bytes <= double(kSmallBiasCopy) || (bytes <= double(kMostBiasCopy) && elements <= 1.25 * (reach(copy.bias) + reach(copy.mask)));
}
// The sequences that a launch may have, so that its copy fits: all, or as many as kSmallBiasCopy holds, in pieces of like size
// (batch_piece.h); 0 = none.
inline int32_t bias_copy_batch(const AttentionParams& p, const BiasCopy& copy) {
    if (bias_copy_fits(p, copy)) return p.batch;
    if (p.cu_seqlens_q || p.cache.entries || p.dropout_threshold || copy.batch == 0) return 0;
    const int64_t most = kSmallBiasCopy / (copy.bytes() / copy.batches);
    return most == 0 ? 0 : int32_t(ceil_div(p.batch, ceil_div(p.batch, most)));
}
// Whether the copy is worth its time. It takes 1.3 ps an element of 16 bits and 3 us. A pair of a general plan takes 3 ps longer forward,
// and 10 ps backward, than one of a plan with a bias (sweep of 2026-11-27, one H200). So at least half of the copy must be read. Those are
// the times of a full GPU: a block of a general plan spends 5 us on a tile forward, and 10 us backward. So short calls gain, too: backward
// from a few tiles on, forward from where blocks have two tiles (2 x 24 heads of 16 rows and 174 keys: 21 us; calls of this size whose
// bias needs no copy: 11 to 14 us).
constexpr double kLeastPairsForward = 1 << 17, kLeastPairsBackward = 1 << 15;
inline bool bias_copy_pays(const AttentionParams& p, const BiasCopy& copy, double least_pairs) {
    const double pairs = visible_pairs(p), halves = double(copy.all_rows()) * copy.keys * (kBiasChunkBytes / copy.elements) / 2;
    return pairs >= least_pairs && 2 * pairs >= halves;
}
// Whether a call of dtype float16 or bfloat16 is to have a copy, of its bias or of its mask, if the plans with a bias then serve it.
// with_mask: these plans do not take the call's mask.
inline bool wants_bias_copy(const AttentionParams& p, bool with_mask, double least_pairs) {
    if (!(p.bias.data || with_mask) || p.seqlen_q <= 0 || p.seqlen_k <= 0) return false;
    if (p.bias.data && !(p.bias_dtype == p.dtype || bias_is_float32(p))) return false;
    const BiasCopy copy = bias_copy(p, with_mask);
    return (with_mask || !bias_has_tiles(p)) && bias_copy_pays(p, copy, least_pairs) && bias_copy_batch(p, copy) > 0;
}

}  // namespace fa
