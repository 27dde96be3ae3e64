// params.h: the arguments of every kernel. Plain data, validated by api/ and passed by value to every kernel, host or device. Inputs are
// (batch, seqlen, heads, dim) with strides in elements; the last axis is contiguous. See flash_attn.h for the meaning of each option.
#pragma once

#include "common/divisor.h"
#include "common/types.h"

namespace fa {

struct ScoreView {
    const void* data;  // nullptr = option off
    int64_t batch, head, row;
};

// What the numbers of a key say: see fa_row_indices in flash_attn.h.
enum class RowIndicesForm : int32_t { kFrom, kBetween, kOutside, kTwoIntervals };

// startend_row_indices: `data` is int32, (batch, heads, keys, numbers). In a varlen call without parts keys count
// through all sequences.
struct RowIndicesView {
    const int32_t* data;       // nullptr = option off
    int64_t batch, head, key;  // strides
    int32_t heads_of_entry;    // query heads that share an entry of the head axis
    RowIndicesForm form;
};

// block_mask: `data` is uint8, (batch, heads, blocks of rows, blocks of keys).
struct BlockMaskView {
    const uint8_t* data;           // nullptr = option off
    int64_t batch, head, row;      // strides
    int32_t heads_of_entry;        // query heads that share an entry of the head axis
    int32_t row_shift, key_shift;  // a block has 1 << row_shift rows and 1 << key_shift keys, 64 or 128
};

struct DescaleView {
    const float* data;
    int64_t batch, head;  // strides
};

struct CacheScale {
    float* data;               // nullptr = 1
    int64_t batch, row, head;  // strides; indexed like the cache itself
};

// K and V in a cache: k.batch and v.batch are the strides between entries, or between pages. All zero for plain K and V.
struct CacheView {
    int32_t entries;             // cache entries, or pages; 0 = no cache
    const int32_t* seqlens;      // (batch) keys before the call's own; below 0 = an idle sequence; nullptr = the cache is full
    int32_t added;               // keys that the call itself has appended to them
    const int32_t* leftpad;      // (batch) rows in front of a sequence's first key; nullptr = none
    const int32_t* batch_idx;    // (batch) entry of each sequence; nullptr = entry b
    const int32_t* block_table;  // (batch, pages) the page that holds each page_size keys; nullptr = contiguous
    int64_t table_row;           // its row stride
    int32_t page_size;
    DType dtype;                  // of K and V: that of q, or an 8-bit type
    CacheScale k_scale, v_scale;  // of 8-bit elements
    bool batch_invariant;
    bool programmatic;   // earlier kernels may still run, but write neither to the cache nor to its lengths and tables; true only where the
                         // device has programmatic dependent launch (sm_90)
    bool shared_prefix;  // kernels may read pages that several sequences begin with once for all of them
    int32_t num_splits;  // 0 = the kernel's choice
};

// A tree of draft tokens: row i of sequence b sees all keys before the last `keys`, and those of the last `keys` whose bits are set. Bit 0
// is the first of these.
struct TreeView {
    const uint64_t* rows;  // nullptr = no tree
    int64_t batch, row;    // strides
    int32_t keys;          // 1 .. 64
};

// fa_part of flash_attn.h: the part of a longer sequence that a varlen call has.
struct Part {
    int32_t key_begin, seqlen_k, shift;
    int32_t first_row, first_key, sequence;  // for dropout
    int32_t seqlen_q;                        // 0 = every row up to the next part
    int32_t reserved;
};

struct AttentionParams {
    TensorView q, k, v, out;
    float* lse;  // (batch, nheads, seqlen_q), varlen (nheads, total_q); nullptr = not wanted
    DType dtype, out_dtype;

    int32_t batch, nheads, nheads_k;
    int32_t group;  // nheads / nheads_k: query head h reads key head h / group
    int32_t headdim, headdim_v;
    int32_t seqlen_q, seqlen_k;  // varlen: upper bounds over the batch

    const int32_t* cu_seqlens_q;  // nullptr = dense
    const int32_t* cu_seqlens_k;  // nullptr = dense, or parts
    const Part* parts;            // (batch), varlen: replaces cu_seqlens_k; nullptr = whole sequences
    int32_t total_q, total_k;

    float scale;    // softmax_scale, always set
    float softcap;  // 0 = off
    const float* alibi_slopes;
    int64_t alibi_batch;
    ScoreView bias;
    DType bias_dtype;
    ScoreView mask;  // uint8
    bool top_left;
    int32_t window_left, window_right;  // -1 = open; causal is window_right = 0
    Divisor chunk;                      // divides by the keys per chunk; divisor 0 = no chunks
    const float* sinks;

    uint32_t dropout_threshold;  // an element is dropped iff its 8 random bits are below this; 0 = no dropout
    float dropout_scale;         // 256 / (256 - threshold)
    uint32_t dropout_key[2];     // philox.h: dropout_key(seed, offset)
    int32_t first_head;          // dropout counts head h as first_head + h

    bool allow_tf32;
    bool fast_accum;  // fp8 only
    int32_t num_threads;
    void* workspace;

    DescaleView q_descale, k_descale, v_descale;  // fp8 only; q by query head, k and v by key head
    CacheView cache;
    float* max_score;          // (batch, nheads); nullptr = not wanted
    float* key_sums;           // (batch, nheads, seqlen_k), varlen (nheads, total_k); nullptr = not wanted. Needs lse
    TreeView tree;             // only with a cache, and then without causal and window
    RowIndicesView intervals;  // never with a cache
    BlockMaskView blocks;      // never with a cache or parts

    // Whether scores are more than scale * (q . k) under a window; such calls take the general instantiation of a kernel.
    FA_HOST_DEVICE bool general_scores() const { return changes_scores() || hides_tiles(); }
    // The masks that may leave nothing of a tile, which is then skipped.
    FA_HOST_DEVICE bool hides_tiles() const { return intervals.data || blocks.data; }
    // Whether scores are more than that without the masks of hides_tiles.
    FA_HOST_DEVICE bool changes_scores() const {
        return softcap != 0 || alibi_slopes || bias.data || mask.data || tree.rows || dropout_threshold;
    }
    // Whether an option beside causal, window and chunks may hide a key from all rows, in a call without a cache.
    FA_HOST_DEVICE bool may_hide_keys() const { return mask.data || bias.data || hides_tiles(); }
    // The batch size and the number of keys by which kernels, tiles and splits may be chosen. With batch_invariant they are constants,
    // because the capacity of a cache, or the width of a block table, follows the longest sequence of a batch.
    static constexpr int32_t kInvariantKeys = 8192;
    FA_HOST_DEVICE int32_t deciding_batch() const { return cache.batch_invariant ? 1 : batch; }
    FA_HOST_DEVICE int32_t deciding_keys() const { return cache.batch_invariant ? kInvariantKeys : seqlen_k; }
    // Whether K and V have q's dtype and the rows of a sequence have a fixed stride: no cache, or a contiguous one.
    FA_HOST_DEVICE bool strided_keys() const { return !cache.block_table && (!cache.entries || cache.dtype == dtype); }
};

struct ScoreGradient {
    float* data;               // nullptr = not wanted
    int64_t batch, head, row;  // strides; 0 = summed over the axis
};

struct BackwardParams {
    AttentionParams forward;  // out and lse are inputs now; workspace and num_threads are the backward call's
    TensorView dout, dq, dk, dv;
    ScoreGradient dbias;
    float* dsinks;      // (nheads)
    const float* dlse;  // laid out like lse; nullptr = zero
    bool accumulate, deterministic;
    int32_t head_parts, row_parts;  // 0, but in launches of wgmma_sm90 for parts of walks (attention/backward/wgmma_sm90/walk_parts.h)
};

// Rows of sequence b in a cache, from row 0 to the last key. A length on the device cannot be checked before the launch, so it is clamped.
FA_HOST_DEVICE int32_t cached_rows(const AttentionParams& p, int32_t b) {
    if (!p.cache.seqlens) return p.seqlen_k;
    const int32_t before = p.cache.seqlens[b];
    return before < 0 ? 0 : clamp_to(before, 0, p.seqlen_k - p.cache.added) + p.cache.added;
}

// The rows of padding before the first key.
FA_HOST_DEVICE int32_t padded_rows(const CacheView& cache, int32_t b, int32_t rows) {
    return cache.leftpad ? clamp_to(cache.leftpad[b], 0, rows) : 0;
}

// Keys of sequence b in a call with a cache.
FA_HOST_DEVICE int32_t cached_keys(const AttentionParams& p, int32_t b) {
    const int32_t rows = cached_rows(p, b);
    return rows - padded_rows(p.cache, b, rows);
}

// Cache entry of sequence b of a contiguous cache.
FA_HOST_DEVICE int32_t cache_entry(const CacheView& cache, int32_t b) {
    return cache.batch_idx ? clamp_to(cache.batch_idx[b], 0, cache.entries - 1) : b;
}

// The page that holds keys page * page_size .. of sequence b of a paged cache.
FA_HOST_DEVICE int32_t cache_page(const CacheView& cache, int32_t b, int32_t page) {
    return clamp_to(cache.block_table[b * cache.table_row + page], 0, cache.entries - 1);
}

// Sequence b of a dense or varlen call: element offsets of its first row in each tensor, and its true lengths.
struct Sequence {
    int64_t q, k, v, out, lse;  // add head * stride (lse: row) to reach a row of a head; k and v of a paged cache are 0
    int32_t seqlen_q, seqlen_k;
    int32_t shift;  // i_aligned = i + shift
};

// Device-side cu_seqlens and parts cannot be checked before the launch, so out-of-range entries are clamped: wrong lengths, never a wild
// address.

// The row of k and v that holds the first key of sequence b of a varlen call.
FA_HOST_DEVICE int32_t first_key_row(const AttentionParams& p, int32_t b) {
    return clamp_to(p.parts ? p.parts[b].key_begin : p.cu_seqlens_k[b], 0, p.total_k);
}

// How many rows sequence b of a varlen call has, from row q0 = cu_seqlens_q[b] on.
FA_HOST_DEVICE int32_t count_rows(const AttentionParams& p, int32_t b, int32_t q0) {
    const int32_t rows = clamp_to(clamp_to(p.cu_seqlens_q[b + 1], q0, p.total_q) - q0, 0, p.seqlen_q);
    return p.parts && p.parts[b].seqlen_q > 0 ? clamp_to(p.parts[b].seqlen_q, 0, rows) : rows;
}

constexpr int32_t kMostShift = 1 << 30;  // largest |shift| of a part

// Where the keys of sequence b of a varlen call lie. The sequence has seqlen_q query rows.
struct KeySpan {
    int32_t first_row, count;
    int32_t shift;
};
FA_HOST_DEVICE KeySpan keys_of(const AttentionParams& p, int32_t b, int32_t seqlen_q) {
    KeySpan keys;
    if (p.parts) {
        const Part& part = p.parts[b];
        keys.first_row = clamp_to(part.key_begin, 0, p.total_k);
        keys.count = clamp_to(clamp_to(part.seqlen_k, 0, p.seqlen_k), 0, p.total_k - keys.first_row);
        keys.shift = clamp_to(part.shift, -kMostShift, kMostShift);
    } else {
        keys.first_row = clamp_to(p.cu_seqlens_k[b], 0, p.total_k);
        keys.count = clamp_to(clamp_to(p.cu_seqlens_k[b + 1], keys.first_row, p.total_k) - keys.first_row, 0, p.seqlen_k);
        keys.shift = p.top_left ? 0 : keys.count - seqlen_q;
    }
    return keys;
}

FA_HOST_DEVICE Sequence sequence_of(const AttentionParams& p, int32_t b) {
    Sequence s;
    if (p.cu_seqlens_q) {
        const int32_t q0 = clamp_to(p.cu_seqlens_q[b], 0, p.total_q);
        s.seqlen_q = count_rows(p, b, q0);
        const KeySpan keys = keys_of(p, b, s.seqlen_q);
        s.seqlen_k = keys.count, s.shift = keys.shift;
        s.q = q0 * p.q.row, s.out = q0 * p.out.row, s.lse = q0;
        s.k = keys.first_row * p.k.row, s.v = keys.first_row * p.v.row;
    } else {
        s.seqlen_q = p.seqlen_q, s.seqlen_k = p.seqlen_k;
        s.q = b * p.q.batch, s.out = b * p.out.batch, s.lse = int64_t(b) * p.nheads * p.seqlen_q;
        int64_t entry = b;
        int32_t first = 0;
        if (p.cache.entries) {
            const int32_t rows = cached_rows(p, b), padding = padded_rows(p.cache, b, rows);
            s.seqlen_k = rows - padding;
            entry = p.cache.block_table ? 0 : cache_entry(p.cache, b), first = p.cache.block_table ? 0 : padding;
        }
        s.k = entry * p.k.batch + first * p.k.row, s.v = entry * p.v.batch + first * p.v.row;
        s.shift = p.top_left ? 0 : s.seqlen_k - s.seqlen_q;
    }
    return s;
}

// The offsets in the tensors that only the backward pass has.
struct GradientSequence {
    int64_t dout, dq, dk, dv;
};

FA_HOST_DEVICE GradientSequence gradients_of(const BackwardParams& p, int32_t b) {
    if (!p.forward.cu_seqlens_q) return {b * p.dout.batch, b * p.dq.batch, b * p.dk.batch, b * p.dv.batch};
    const int64_t q0 = clamp_to(p.forward.cu_seqlens_q[b], 0, p.forward.total_q), k0 = first_key_row(p.forward, b);
    return {q0 * p.dout.row, q0 * p.dq.row, k0 * p.dk.row, k0 * p.dv.row};
}

// The place of key j of sequence b in a cache: entry or page, and row in it. The sequence must have key j.
struct CachePlace {
    int64_t entry, row;
};
FA_HOST_DEVICE CachePlace cache_place(const CacheView& cache, int32_t b, int32_t j) {
    j += padded_rows(cache, b, INT32_MAX - j);
    if (!cache.block_table) return {cache_entry(cache, b), j};
    return {cache_page(cache, b, j / cache.page_size), j % cache.page_size};
}

// Offset of key j of sequence b in k (or v) of a cache, head 0.
FA_HOST_DEVICE int64_t cached_row(const AttentionParams& p, const TensorView& kv, int32_t b, int32_t j) {
    const CachePlace at = cache_place(p.cache, b, j);
    return at.entry * kv.batch + at.row * kv.row;
}

// Offset of key j in any k (or v), head 0. `first`: where the sequence's rows start, unless they lie in pages.
FA_HOST_DEVICE int64_t key_row(const AttentionParams& p, const TensorView& kv, int64_t first, int32_t b, int32_t j) {
    return p.cache.block_table ? cached_row(p, kv, b, j) : first + j * kv.row;
}

// The factor of the 8-bit elements of that row in a head.
FA_HOST_DEVICE float cache_scale(const AttentionParams& p, const CacheScale& scale, int32_t b, int32_t j, int32_t head) {
    if (!scale.data) return 1;
    const CachePlace at = cache_place(p.cache, b, j);
    return scale.data[at.entry * scale.batch + at.row * scale.row + head * scale.head];
}

// Offset of lse[b, head, row 0]: rows of one head are contiguous.
FA_HOST_DEVICE int64_t lse_offset(const AttentionParams& p, const Sequence& s, int32_t head) {
    return s.lse + int64_t(head) * (p.cu_seqlens_q ? p.total_q : p.seqlen_q);
}

// Offset of key_sums[b, head, key 0]: keys of one head are contiguous.
FA_HOST_DEVICE int64_t key_sums_offset(const AttentionParams& p, int32_t b, int32_t head) {
    if (p.cu_seqlens_q) return int64_t(head) * p.total_k + first_key_row(p, b);
    return (int64_t(b) * p.nheads + head) * p.seqlen_k;
}

// The step before attention over a cache: appends new keys and values to it, and applies the rotary embedding to them and to q.
struct AppendParams {
    AttentionParams attention;  // of the call, with q as the caller gave it; cache.added = seqlen_new
    TensorView k_new, v_new;    // (batch, seqlen_new, nheads_k, dim) of attention.dtype
    int32_t seqlen_new;         // 0 = nothing to append
    // Rotary: dims 0 .. rotary_dim - 1 of a head at position t are rotated by the angles whose cosines and sines are row t.
    const void *rotary_cos, *rotary_sin;  // (rotary_rows, rotary_dim / 2), contiguous; nullptr = off
    DType rotary_dtype;
    int32_t rotary_rows, rotary_dim;
    bool rotary_interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    TensorView q_rotated;     // where the rotated q goes: (batch, seqlen_q, nheads, headdim), contiguous
};

struct MergeParams {
    TensorView out_a, out_b, out;  // (batch, seqlen, nheads, headdim_v)
    const float *lse_a, *lse_b;    // (batch, nheads, seqlen)
    float* lse;
    DType dtype;
    int32_t batch, nheads, headdim_v, seqlen;
    int32_t num_threads;
};

}  // namespace fa
