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
#include <cstring>

#include "attention/common/bias_tiles.h"
#include "attention/common/mask.h"
#include "attention/common/params.h"
#include "common/divisor.h"

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

// ---- one chunk of the copy ----

template <typename Word>
FA_HOST_DEVICE Word load_word(const void* address) {
#if defined(__CUDA_ARCH__)
    return __ldg(static_cast<const Word*>(address));
#else
    Word word;
    std::memcpy(&word, address, sizeof word);
    return word;
#endif
}
struct alignas(kBiasChunkBytes) BiasChunk {
    uint32_t pair[4];  // the elements of two neighbouring keys each, the even key in the low half; in float32 of one key each
};
// 16 bytes from anywhere, by the widest loads that read nothing beside them.
FA_HOST_DEVICE BiasChunk load_bias_chunk(const char* bytes) {
    BiasChunk chunk;
    if (reinterpret_cast<uintptr_t>(bytes) % 4 == 0) {
        for (int x = 0; x < 4; ++x) chunk.pair[x] = load_word<uint32_t>(bytes + 4 * x);
        return chunk;
    }
    uint32_t before = load_word<uint16_t>(bytes);
    for (int x = 0; x < 4; ++x) {
        const uint32_t word = x < 3 ? load_word<uint32_t>(bytes + 2 + 4 * x) : load_word<uint16_t>(bytes + 14);
        chunk.pair[x] = before | word << 16;
        before = word >> 16;
    }
    return chunk;
}
// Chunk `place` of a row, from the bias alone, with zeros past the last key.
FA_HOST_DEVICE BiasChunk chunk_of_bias(const BiasCopy& copy, int32_t batch, int32_t head, int32_t row, int32_t place) {
    const bool wide = copy.elements == 4;  // float32
    const int32_t key = place * copy.elements, left = copy.keys - key;
    const int64_t first = batch * copy.bias.batch + head * copy.bias.head + row * copy.bias.row + key;
    const char* const from = static_cast<const char*>(copy.bias.data) + first * (wide ? 4 : 2);
    if (left >= copy.elements) return load_bias_chunk(from);
    BiasChunk chunk;
    for (int x = 0; x < 4; ++x) {
        if (wide) {
            chunk.pair[x] = x < left ? load_word<uint32_t>(from + 4 * x) : 0;
            continue;
        }
        const uint32_t low = 2 * x < left ? load_word<uint16_t>(from + 4 * x) : 0;
        chunk.pair[x] = low | (2 * x + 1 < left ? uint32_t(load_word<uint16_t>(from + 4 * x + 2)) << 16 : 0);
    }
    return chunk;
}
// Bit 7 of byte `low` in all bits of the low half, that of byte `high` in all bits of the high half.
FA_HOST_DEVICE uint32_t two_signs(uint32_t bytes, int32_t low, int32_t high) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(bytes, 0, uint32_t(0x8 | low) * 0x11 | uint32_t(0x8 | high) * 0x1100);
#else
    return (bytes >> (8 * low + 7) & 1 ? 0xFFFFu : 0) | (bytes >> (8 * high + 7) & 1 ? 0xFFFF0000u : 0);
#endif
}
// The same with -inf where the mask hides a pair.
FA_HOST_DEVICE BiasChunk hide_in_chunk(const BiasCopy& copy, BiasChunk chunk, int32_t batch, int32_t head, int32_t row, int32_t place) {
    if (!copy.mask.data) return chunk;
    const bool wide = copy.elements == 4;  // float32
    const int32_t key = place * copy.elements, left = copy.keys - key;
    const uint8_t* const attend =
        static_cast<const uint8_t*>(copy.mask.data) + batch * copy.mask.batch + head * copy.mask.head + row * copy.mask.row + key;
    uint32_t sees[2] = {~0u, ~0u};  // a byte for each key; keys past the end keep their zero
    if (left >= copy.elements && reinterpret_cast<uintptr_t>(attend) % 4 == 0) {
        sees[0] = load_word<uint32_t>(attend);
        if (!wide) sees[1] = load_word<uint32_t>(attend + 4);
    } else {
        for (int x = 0; x < 8; ++x)
            if (x < left && x < copy.elements && load_word<uint8_t>(attend + x) == 0) sees[x / 4] &= ~(0xFFu << x % 4 * 8);
    }
    for (uint32_t& four : sees) four |= (four & 0x7F7F7F7Fu) + 0x7F7F7F7Fu;  // bit 7 of each byte: whether it is not zero
    for (int y = 0; y < 4; ++y) {
        const uint32_t seen = wide ? two_signs(sees[0], y, y) : two_signs(sees[y / 2], y % 2 * 2, y % 2 * 2 + 1);
        chunk.pair[y] = (chunk.pair[y] & seen) | (copy.hidden & ~seen);
    }
    return chunk;
}

// ---- the work of a thread: a chunk of the bias, in the copies of all sequences that share it ----

// Neighbouring threads have the chunks of a row, then those of the row in the other heads, which may share the row of a mask.
struct BiasCopyWork {
    Divisor chunks, heads, rows;
    int32_t together;  // sequences that share the bias: all of them, where masks alone differ
};
inline int32_t sequences_of_bias(const BiasCopy& copy) {
    return copy.bias.data && copy.bias.batch == 0 && copy.batches > 1 ? copy.batches : 1;
}
inline int64_t bias_copy_threads(const BiasCopy& copy) { return copy.all_rows() / sequences_of_bias(copy) * copy.chunks(); }
inline BiasCopyWork bias_copy_work(const BiasCopy& copy) {  // of a copy that is not empty
    return {divisor_of(copy.chunks()), divisor_of(copy.heads), divisor_of(copy.rows), sequences_of_bias(copy)};
}
FA_HOST_DEVICE void copy_bias_chunk(const BiasCopy& copy, const BiasCopyWork& work, int32_t thread, BiasChunk* to) {
    static_assert(kMostBiasCopy / kBiasChunkBytes <= 1 << 28, "the number of a chunk is an int");
    const int32_t line = work.chunks.divide(thread), place = work.chunks.remainder(thread, line);
    const int32_t all_rows = work.heads.divide(line), head = work.heads.remainder(line, all_rows);
    const int32_t first = work.rows.divide(all_rows), row = work.rows.remainder(all_rows, first);
    if (first * work.together >= copy.batches) return;
    BiasChunk chunk{};
    if (copy.bias.data) chunk = chunk_of_bias(copy, first, head, row, place);
    const int32_t of_head = copy.rows * copy.chunks(), of_batch = copy.heads * of_head;
    to += first * of_batch + head * of_head + row * copy.chunks() + place;
#pragma unroll 4
    for (int32_t batch = first; batch < first + work.together; ++batch, to += of_batch)
        *to = hide_in_chunk(copy, chunk, batch, head, row, place);
}

}  // namespace fa
