// append.h: how new keys and values are added to a cache before attention, row by row; shared by the GPU and the CPU kernel.
//
// A row is one head of one token: of q (rotated into the workspace), of K or of V (into the cache). Rows are numbered
//     q      (batch, seqlen_q, nheads)        only when the call rotates
//     k, v   (batch, seqlen_new, nheads_k)
#pragma once

#include "attention/common/params.h"

namespace fa {

enum class RowOf { kQuery, kKey, kValue };

struct AppendRow {
    RowOf of;
    int32_t position;  // for the rotary embedding; below 0: the row is not rotated
    int64_t from, to;  // element offsets of its first dim in the source and in the destination
    int64_t scale;     // element offset of its factor in k_scale or v_scale
    bool skip;         // an idle sequence, or a place outside the cache: nothing is written
};

FA_HOST_DEVICE int64_t append_query_rows(const AppendParams& a) {
    return a.rotary_cos ? int64_t(a.attention.batch) * a.attention.seqlen_q * a.attention.nheads : 0;
}
FA_HOST_DEVICE int64_t append_rows(const AppendParams& a) {
    return append_query_rows(a) + 2 * int64_t(a.attention.batch) * a.seqlen_new * a.attention.nheads_k;
}

// The position by which the rotary embedding turns row i of sequence b.
FA_HOST_DEVICE int32_t append_position(const AppendParams& a, RowOf of, int32_t b, int32_t i) {
    const AttentionParams& p = a.attention;
    if (!a.rotary_cos || of == RowOf::kValue) return -1;
    const int32_t before = p.cache.seqlens ? p.cache.seqlens[b] : p.seqlen_k - a.seqlen_new;
    const bool ordered = p.window_left >= 0 || p.window_right >= 0 || p.chunk.divisor;  // without a mask all rows of q have one position
    return clamp_to(clamp_to(before, 0, a.rotary_rows - 1) + (of == RowOf::kKey || ordered ? i : 0), 0, a.rotary_rows - 1);
}

// The place of new key i of sequence b: the cache entry, or the page, and the row in it.
struct AppendPlace {
    int32_t entry, row;
    bool skip;  // no place: nothing is written
};
FA_HOST_DEVICE AppendPlace append_place(const AppendParams& a, int32_t b, int32_t i) {
    const AttentionParams& p = a.attention;
    const CacheView& c = p.cache;
    const int32_t before = c.seqlens ? c.seqlens[b] : p.seqlen_k - a.seqlen_new;
    if (before < 0 || before > p.seqlen_k - a.seqlen_new) return {0, 0, true};
    AppendPlace at{b, before + i, false};
    if (c.block_table) {
        const int32_t page = at.row / c.page_size;
        at.entry = c.block_table[b * c.table_row + page], at.row -= page * c.page_size;
    } else if (c.batch_idx) {
        at.entry = c.batch_idx[b];
    }
    at.skip = at.entry < 0 || at.entry >= c.entries;
    return at;
}

FA_HOST_DEVICE AppendRow append_row(const AppendParams& a, int64_t index) {
    const AttentionParams& p = a.attention;
    const CacheView& c = p.cache;
    const int64_t queries = append_query_rows(a), keys = int64_t(p.batch) * a.seqlen_new * p.nheads_k;
    AppendRow row{};
    const bool query = index < queries;
    if (!query) index -= queries;
    row.of = query ? RowOf::kQuery : index < keys ? RowOf::kKey : RowOf::kValue;
    if (row.of == RowOf::kValue) index -= keys;
    const int32_t heads = query ? p.nheads : p.nheads_k, rows = query ? p.seqlen_q : a.seqlen_new;
    const int32_t head = int32_t(index % heads), i = int32_t(index / heads % rows), b = int32_t(index / heads / rows);
    row.position = append_position(a, row.of, b, i);
    if (query) {
        row.from = b * p.q.batch + i * p.q.row + head * p.q.head;
        row.to = b * a.q_rotated.batch + i * a.q_rotated.row + head * a.q_rotated.head;
        return row;
    }
    const AppendPlace at = append_place(a, b, i);
    row.skip = at.skip;
    if (row.skip) return row;
    const TensorView &source = row.of == RowOf::kKey ? a.k_new : a.v_new, &cache = row.of == RowOf::kKey ? p.k : p.v;
    const CacheScale& scale = row.of == RowOf::kKey ? c.k_scale : c.v_scale;
    row.from = b * source.batch + i * source.row + head * source.head;
    row.to = at.entry * cache.batch + at.row * cache.row + head * cache.head;
    row.scale = at.entry * scale.batch + at.row * scale.row + head * scale.head;
    return row;
}

// Dim d of a row after the rotation. value(d) reads the source, angle(table, i) reads element i of a table; both return floats.
template <typename Append, typename Value, typename Angle>
FA_HOST_DEVICE float rotated(const Append& a, int32_t position, int32_t d, const Value& value, const Angle& angle) {
    if (position < 0 || d >= a.rotary_dim) return value(d);
    const int32_t half = a.rotary_dim / 2;
    const bool first = a.rotary_interleaved ? d % 2 == 0 : d < half;
    const int32_t i = a.rotary_interleaved ? d / 2 : first ? d : d - half;
    const int32_t pair = a.rotary_interleaved ? d ^ 1 : first ? d + half : d - half;
    const int64_t at = int64_t(position) * half + i;
    const float c = angle(a.rotary_cos, at), s = angle(a.rotary_sin, at);
    return first ? value(d) * c - value(pair) * s : value(d) * c + value(pair) * s;
}

// cache_limit: the largest number of an 8-bit type. token_scale: the factor of a token, kept finite for tiny tokens.
FA_HOST_DEVICE float cache_limit(DType dtype) { return dtype == DType::kInt8 ? 127.0f : 448.0f; }
FA_HOST_DEVICE float token_scale(DType dtype, float amax) { return amax > 0x1p-100f ? amax / cache_limit(dtype) : 1.0f; }

}  // namespace fa
