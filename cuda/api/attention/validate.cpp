#include "api/attention/validate.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>

#include "api/common/checks.h"
#include "api/common/options.h"
#include "api/common/status.h"
#include "attention/common/dropout.h"

namespace fa {
namespace {

constexpr int32_t kMaxHeadDim = 512;

fa_status check_descale(const char* name, const fa_descale& d, bool fp8, bool need) {
    if (!fp8 && d.data) return fail(FA_BAD_ARGUMENT, "%s.data is set, but only dtype=float8_e4m3 has factors", name);
    if (fp8 && need && !d.data) return fail(FA_BAD_ARGUMENT, "%s.data is NULL: dtype=float8_e4m3 needs the factors of q, k and v", name);
    if (reinterpret_cast<uintptr_t>(d.data) % 4)
        return fail(FA_BAD_ARGUMENT, "%s.data=%p is not aligned to its element size of 4 bytes", name, static_cast<const void*>(d.data));
    return FA_OK;
}

// With `parts` the first sequence may begin after rows that belong to no part, and check_part checks each length.
fa_status check_cu_seqlens(const char* name, const int32_t* cu, int32_t batch, int64_t total, int64_t longest, const char* longest_name,
                           bool parts = false) {
    if (parts ? cu[0] < 0 : cu[0] != 0) return fail(FA_BAD_ARGUMENT, "%s[0]=%d is %s", name, cu[0], parts ? "negative" : "not 0");
    for (int32_t b = 0; b < batch; ++b) {
        const int64_t length = int64_t(cu[b + 1]) - cu[b];
        if (length < 0)
            return fail(FA_BAD_ARGUMENT, "%s[%d]=%d is below %s[%d]=%d: it must not decrease", name, b + 1, cu[b + 1], name, b, cu[b]);
        if (length > longest && !parts)
            return fail(FA_BAD_ARGUMENT, "%s: sequence %d has %" PRId64 " rows, more than %s=%" PRId64, name, b, length, longest_name,
                        longest);
    }
    if (cu[batch] > total) return fail(FA_BAD_ARGUMENT, "%s[%d]=%d is above the %" PRId64 " rows there are", name, batch, cu[batch], total);
    return FA_OK;
}

static_assert(sizeof(Part) == sizeof(fa_part) && offsetof(Part, key_begin) == offsetof(fa_part, key_begin) &&
                  offsetof(Part, seqlen_k) == offsetof(fa_part, seqlen_k) && offsetof(Part, shift) == offsetof(fa_part, shift) &&
                  offsetof(Part, first_row) == offsetof(fa_part, first_row) && offsetof(Part, first_key) == offsetof(fa_part, first_key) &&
                  offsetof(Part, sequence) == offsetof(fa_part, sequence) && offsetof(Part, seqlen_q) == offsetof(fa_part, seqlen_q),
              "the kernels read the caller's array");

fa_status check_part(const fa_attention_args& a, int32_t b) {
    const fa_part& part = a.parts[b];
    const auto check = [b](const char* field, int64_t value, int64_t low, int64_t high) {
        if (low <= value && value <= high) return FA_OK;
        return fail(FA_BAD_ARGUMENT, "parts[%d].%s=%" PRId64 " is outside %" PRId64 " .. %" PRId64, b, field, value, low, high);
    };
    FA_RETURN_IF_ERROR(check("key_begin", part.key_begin, 0, a.total_k));
    FA_RETURN_IF_ERROR(check("seqlen_k", part.seqlen_k, 0, std::min(a.seqlen_k, a.total_k - part.key_begin)));
    FA_RETURN_IF_ERROR(check("shift", part.shift, -kMostShift, kMostShift));
    const int64_t room = int64_t(a.cu_seqlens_q[b + 1]) - a.cu_seqlens_q[b], rows = part.seqlen_q ? part.seqlen_q : room;
    FA_RETURN_IF_ERROR(check("seqlen_q", part.seqlen_q, 0, room));
    if (rows > a.seqlen_q)
        return fail(FA_BAD_ARGUMENT, "cu_seqlens_q: sequence %d has %" PRId64 " rows, more than seqlen_q=%" PRId64, b, rows, a.seqlen_q);
    FA_RETURN_IF_ERROR(check("reserved", part.reserved, 0, 0));
    if (!(a.dropout_p > 0)) return FA_OK;
    FA_RETURN_IF_ERROR(check("first_row", part.first_row, 0, kMaxLength));
    FA_RETURN_IF_ERROR(check("first_key", part.first_key, 0, kMaxLength));
    FA_RETURN_IF_ERROR(check("sequence", part.sequence, 0, INT32_MAX));
    if (part.first_key % kDropoutColumns)
        return fail(FA_BAD_ARGUMENT, "parts[%d].first_key=%d is not a multiple of %d, which dropout needs", b, part.first_key,
                    kDropoutColumns);
    return FA_OK;
}

// In the backward pass parts must not share keys: the gradients of a key are written once.
fa_status check_ascending(const fa_attention_args& a) {
    for (int32_t b = 1; b < a.batch; ++b)
        if (const int64_t end = int64_t(a.parts[b - 1].key_begin) + a.parts[b - 1].seqlen_k; a.parts[b].key_begin < end)
            return fail(FA_BAD_ARGUMENT,
                        "parts[%d].key_begin=%d is below %" PRId64 ", where the keys of parts[%d] end: gradients need keys in order", b,
                        a.parts[b].key_begin, end, b - 1);
    return FA_OK;
}

// The shapes of a call's arrays in memory: a varlen call has one batch entry for all sequences. k and v of a cache have other entries.
struct Shapes {
    int64_t batch, rows_q, rows_k, entries, entry_rows;
    int32_t headdim_v;
    size_t element, key_element, out_element;  // bytes
};
Shapes shapes_of(const fa_attention_args& a, const CacheView* cache = nullptr) {
    const bool varlen = a.cu_seqlens_q;
    const int64_t batch = varlen ? 1 : a.batch, rows_k = varlen ? a.total_k : a.seqlen_k;
    const size_t element = dtype_size(a.dtype), out_element = dtype_size(a.dtype == FA_FLOAT8_E4M3 ? FA_BFLOAT16 : a.dtype);
    Shapes s{batch,      varlen ? a.total_q : a.seqlen_q, rows_k, batch, rows_k, a.headdim_v ? a.headdim_v : a.headdim, element, element,
             out_element};
    if (cache && cache->entries) s.entries = cache->entries, s.key_element = dtype_size(int32_t(cache->dtype));
    if (cache && cache->page_size) s.entry_rows = cache->page_size;
    return s;
}

// What a forward pass writes. A query sets only whether statistics are wanted, not their addresses.
Regions<4> outputs_of(const fa_attention_args& a, const Shapes& s, bool statistics = true) {
    Regions<4> written;
    written.add(region("out", a.out, s.batch, s.rows_q, a.nheads, s.headdim_v, s.out_element));
    if (!statistics) return written;
    written.add(region("lse", a.lse, s.batch * a.nheads * s.rows_q, 4));
    written.add(region("max_score", a.max_score, int64_t(a.batch) * a.nheads, 4));
    written.add(region("key_sums", a.key_sums, s.batch * a.nheads * s.rows_k, 4));
    return written;
}

// What a forward pass reads.
Regions<kMostRead> inputs_of(const fa_attention_args& a, const Shapes& s) {
    Regions<kMostRead> read;
    read.add(region("q", a.q, s.batch, s.rows_q, a.nheads, a.headdim, s.element));
    read.add(region("k", a.k, s.entries, s.entry_rows, a.nheads_k, a.headdim, s.key_element));
    read.add(region("v", a.v, s.entries, s.entry_rows, a.nheads_k, s.headdim_v, s.key_element));
    const auto factors = [&](const char* name, const fa_descale& d, int64_t heads) {
        read.add(Region{name,
                        d.data,
                        {{"batch", "batch", a.batch, d.batch_stride}, {"row", "rows", 1, 0}, {"head", "nheads", heads, d.head_stride}},
                        1,
                        4});
    };
    add_arrays_of_options(a, s.batch, s.rows_k, &read);
    read.add(region("cu_seqlens_q", a.cu_seqlens_q, int64_t(a.batch) + 1, 4));
    read.add(region("cu_seqlens_k", a.cu_seqlens_k, int64_t(a.batch) + 1, 4));
    read.add(region("parts", a.parts, a.batch, sizeof(fa_part)));
    factors("q_descale", a.q_descale, a.nheads);
    factors("k_descale", a.k_descale, a.nheads_k);
    factors("v_descale", a.v_descale, a.nheads_k);
    return read;
}

DescaleView view(const fa_descale& d) { return {d.data, d.batch_stride, d.head_stride}; }

}  // namespace

fa_status validate(const fa_attention_args* args, Pointers pointers, fa_attention_args* full, AttentionParams* params, const Keys* keys,
                   bool writes_out) {
    FA_RETURN_IF_ERROR(copy_args(args, "fa_attention_args", sizeof(fa_attention_args), full));
    const fa_attention_args& a = *full;
    const bool need = pointers == Pointers::kRequired;

    FA_RETURN_IF_ERROR(check_device(a.device));
    if (a.dtype < FA_FLOAT32 || a.dtype > FA_FLOAT8_E4M3) return fail(FA_BAD_ARGUMENT, "dtype=%d is not an fa_dtype", a.dtype);
    if (a.out_dtype && (a.out_dtype < FA_FLOAT32 || a.out_dtype > FA_FLOAT8_E4M3))
        return fail(FA_BAD_ARGUMENT, "out_dtype=%d is not an fa_dtype", a.out_dtype);
    const bool fp8 = a.dtype == FA_FLOAT8_E4M3;
    const int32_t out_dtype = a.out_dtype ? a.out_dtype : fp8 ? int32_t(FA_BFLOAT16) : a.dtype;
    if (fp8 ? out_dtype != FA_BFLOAT16 && out_dtype != FA_FLOAT16 : out_dtype != a.dtype)
        return fail(FA_UNSUPPORTED, "out_dtype=%s with dtype=%s: not served by any kernel of this release", dtype_name(out_dtype),
                    dtype_name(a.dtype));
    const bool need_descale = need && a.batch > 0;
    FA_RETURN_IF_ERROR(check_descale("q_descale", a.q_descale, fp8, need_descale));
    FA_RETURN_IF_ERROR(check_descale("k_descale", a.k_descale, fp8, need_descale));
    FA_RETURN_IF_ERROR(check_descale("v_descale", a.v_descale, fp8, need_descale));

    if (a.batch < 0) return fail(FA_BAD_ARGUMENT, "batch=%d is negative", a.batch);
    if (a.nheads < 1) return fail(FA_BAD_ARGUMENT, "nheads=%d is below 1", a.nheads);
    if (a.nheads_k < 1) return fail(FA_BAD_ARGUMENT, "nheads_k=%d is below 1", a.nheads_k);
    if (a.nheads % a.nheads_k) return fail(FA_BAD_ARGUMENT, "nheads=%d is not a multiple of nheads_k=%d", a.nheads, a.nheads_k);
    const int32_t max_headdim = keys ? keys->max_headdim : kMaxHeadDim;
    if (a.headdim < 1 || a.headdim > max_headdim) return fail(FA_BAD_ARGUMENT, "headdim=%d is outside 1 .. %d", a.headdim, max_headdim);
    if (a.headdim_v < 0 || a.headdim_v > kMaxHeadDim)
        return fail(FA_BAD_ARGUMENT, "headdim_v=%d is outside 1 .. %d", a.headdim_v, kMaxHeadDim);
    FA_RETURN_IF_ERROR(check_length("seqlen_q", a.seqlen_q));
    FA_RETURN_IF_ERROR(check_length("seqlen_k", a.seqlen_k));
    FA_RETURN_IF_ERROR(check_total(a.batch, "nheads", a.nheads, "seqlen_q", a.seqlen_q));
    FA_RETURN_IF_ERROR(check_total(a.batch, "nheads_k", a.nheads_k, "seqlen_k", a.seqlen_k));

    const void* const parts = a.parts;
    if (parts && !a.cu_seqlens_q) return fail(FA_BAD_ARGUMENT, "parts=%p, but cu_seqlens_q is NULL: only a varlen call has parts", parts);
    if (parts && a.cu_seqlens_k) return fail(FA_BAD_ARGUMENT, "parts=%p and cu_seqlens_k are both set: parts name their keys", parts);
    if (parts && a.top_left) return fail(FA_BAD_ARGUMENT, "top_left=%d with parts, which have a shift of their own", a.top_left);
    if (parts) FA_RETURN_IF_ERROR(refuse_options(a, Calls::kOnParts));
    const bool varlen = a.cu_seqlens_q || a.cu_seqlens_k;
    if (varlen) {
        if (!a.cu_seqlens_q || (!a.cu_seqlens_k && !parts))
            return fail(FA_BAD_ARGUMENT, "%s is NULL and %s is not: a varlen call needs both",
                        a.cu_seqlens_q ? "cu_seqlens_k" : "cu_seqlens_q", a.cu_seqlens_q ? "cu_seqlens_q" : "cu_seqlens_k");
        FA_RETURN_IF_ERROR(check_length("total_q", a.total_q));
        FA_RETURN_IF_ERROR(check_length("total_k", a.total_k));
        if (a.batch + std::max(a.total_q, a.total_k) > kMaxLength)  // the tiles of all sequences are counted in int32
            return fail(FA_UNSUPPORTED, "batch=%d with total_q=%" PRId64 ", total_k=%" PRId64 ": together above %" PRId64, a.batch,
                        a.total_q, a.total_k, kMaxLength);
        FA_RETURN_IF_ERROR(check_total(1, "nheads", a.nheads, "total_q", a.total_q));
        FA_RETURN_IF_ERROR(check_total(1, "nheads_k", a.nheads_k, "total_k", a.total_k));
        FA_RETURN_IF_ERROR(check_pointer("cu_seqlens_q", a.cu_seqlens_q, 4, need));
        FA_RETURN_IF_ERROR(check_pointer("cu_seqlens_k", a.cu_seqlens_k, 4, need && !parts));
        FA_RETURN_IF_ERROR(check_pointer("parts", parts, 4, false));
        if (a.device == FA_CPU && need) {
            FA_RETURN_IF_ERROR(
                check_cu_seqlens("cu_seqlens_q", a.cu_seqlens_q, a.batch, a.total_q, a.seqlen_q, "seqlen_q", parts != nullptr));
            if (!parts) FA_RETURN_IF_ERROR(check_cu_seqlens("cu_seqlens_k", a.cu_seqlens_k, a.batch, a.total_k, a.seqlen_k, "seqlen_k"));
            for (int32_t b = 0; parts && b < a.batch; ++b) FA_RETURN_IF_ERROR(check_part(a, b));
        }
    } else if (a.total_q || a.total_k) {
        return fail(FA_BAD_ARGUMENT, "total_q=%" PRId64 ", total_k=%" PRId64 " without cu_seqlens_q and cu_seqlens_k", a.total_q,
                    a.total_k);
    }

    const int32_t headdim_v = a.headdim_v ? a.headdim_v : a.headdim;
    const int64_t rows_q = varlen ? a.total_q : a.seqlen_q, rows_k = varlen ? a.total_k : a.seqlen_k;
    const bool has_q = need && a.batch > 0 && rows_q > 0, has_k = has_q && rows_k > 0 && !(keys && keys->none);
    const size_t element = dtype_size(a.dtype);
    FA_RETURN_IF_ERROR(check_pointer("q", a.q.data, element, has_q));
    FA_RETURN_IF_ERROR(check_pointer("k", a.k.data, keys ? keys->element : element, has_k));
    FA_RETURN_IF_ERROR(check_pointer("v", a.v.data, keys ? keys->element : element, has_k));
    FA_RETURN_IF_ERROR(check_pointer("out", a.out.data, dtype_size(out_dtype), has_q));
    FA_RETURN_IF_ERROR(check_pointer("lse", a.lse, 4, false));
    FA_RETURN_IF_ERROR(check_pointer("max_score", a.max_score, 4, false));
    FA_RETURN_IF_ERROR(check_pointer("key_sums", a.key_sums, 4, false));
    if (parts && a.key_sums && writes_out)
        return fail(FA_BAD_ARGUMENT, "key_sums=%p with parts=%p, which may share keys", static_cast<void*>(a.key_sums), parts);
    FA_RETURN_IF_ERROR(check_options(a));
    if (writes_out) {  // the backward pass reads out, which may then have strides of 0
        Shapes shapes = shapes_of(a);
        if (keys) shapes.entries = 0;  // validate_kvcache.cpp checks a cache
        FA_RETURN_IF_ERROR(check_output(region("out", a.out, shapes.batch, rows_q, a.nheads, headdim_v, shapes.out_element)));
        FA_RETURN_IF_ERROR(check_apart(outputs_of(a, shapes, need), inputs_of(a, shapes)));
    }

    AttentionParams& p = *params;
    p = {};
    p.q = view(a.q), p.k = view(a.k), p.v = view(a.v), p.out = view(a.out);
    p.lse = a.lse, p.max_score = a.max_score, p.key_sums = a.key_sums;
    p.dtype = DType(a.dtype), p.out_dtype = DType(out_dtype);
    p.batch = a.batch, p.nheads = a.nheads, p.nheads_k = a.nheads_k, p.group = a.nheads / a.nheads_k;
    p.headdim = a.headdim, p.headdim_v = headdim_v;
    p.seqlen_q = int32_t(a.seqlen_q), p.seqlen_k = int32_t(a.seqlen_k);
    p.cu_seqlens_q = a.cu_seqlens_q, p.cu_seqlens_k = a.cu_seqlens_k;
    p.parts = reinterpret_cast<const Part*>(a.parts);
    p.total_q = int32_t(a.total_q), p.total_k = int32_t(a.total_k);
    put_options(a, params);
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    p.workspace = a.workspace;
    p.q_descale = view(a.q_descale), p.k_descale = view(a.k_descale), p.v_descale = view(a.v_descale);
    return FA_OK;
}

namespace {
// The region of a view that validate has filled.
template <typename View>
Region region_of(const char* name, const View& v, int64_t batch, int64_t rows, int64_t heads, int64_t columns, size_t element) {
    return {name,
            v.data,
            {{"batch", "batch", batch, v.batch}, {"row", "rows", rows, v.row}, {"head", "nheads", heads, v.head}},
            columns,
            int64_t(element)};
}

// What a backward pass writes.
Regions<5> gradients_of(const fa_attention_args& a, const BackwardParams& p, const Shapes& s) {
    Regions<5> written;
    written.add(region_of("dq", p.dq, s.batch, s.rows_q, a.nheads, a.headdim, s.element));
    written.add(region_of("dk", p.dk, s.batch, s.rows_k, a.nheads_k, a.headdim, s.element));
    written.add(region_of("dv", p.dv, s.batch, s.rows_k, a.nheads_k, s.headdim_v, s.element));
    written.add(region_of("dbias", p.dbias, a.batch, a.seqlen_q, a.nheads, a.seqlen_k, 4));  // strides of 0 sum over an axis
    written.add(region("dsinks", p.dsinks, a.nheads, 4));
    return written;
}
// What it reads.
Regions<kMostRead> inputs_of(const fa_attention_args& a, const BackwardParams& p, const Shapes& s) {
    Regions<kMostRead> read = inputs_of(a, s);
    read.add(region("out", a.out, s.batch, s.rows_q, a.nheads, s.headdim_v, s.element));
    read.add(region("lse", a.lse, s.batch * a.nheads * s.rows_q, 4));
    read.add(region_of("dout", p.dout, s.batch, s.rows_q, a.nheads, s.headdim_v, s.element));
    read.add(region("dlse", p.dlse, s.batch * a.nheads * s.rows_q, 4));
    return read;
}

template <int kMost>
fa_status check_apart_from(const void* workspace, size_t bytes, const Regions<kMost>& arrays) {
    for (const Region& array : arrays) FA_RETURN_IF_ERROR(check_apart(region("workspace", workspace, int64_t(bytes), 1), array));
    return FA_OK;
}
}  // namespace

fa_status check_workspace_apart(const fa_attention_args& a, const AttentionParams& p, size_t bytes) {
    const Shapes shapes = shapes_of(a, &p.cache);
    FA_RETURN_IF_ERROR(check_apart_from(a.workspace, bytes, inputs_of(a, shapes)));
    FA_RETURN_IF_ERROR(check_apart_from(a.workspace, bytes, outputs_of(a, shapes)));
    Regions<1> lengths;
    lengths.add(region("cache_seqlens", p.cache.seqlens, p.batch, 4));
    return check_apart_from(a.workspace, bytes, lengths);
}

fa_status check_workspace_apart(const fa_attention_args& a, const AppendParams& p, size_t bytes) {
    const AttentionParams& f = p.attention;
    Regions<2> added;
    added.add(region_of("k_new", p.k_new, f.batch, p.seqlen_new, f.nheads_k, f.headdim, dtype_size(a.dtype)));
    added.add(region_of("v_new", p.v_new, f.batch, p.seqlen_new, f.nheads_k, f.headdim_v, dtype_size(a.dtype)));
    FA_RETURN_IF_ERROR(check_apart_from(a.workspace, bytes, added));
    return check_workspace_apart(a, f, bytes);
}

fa_status check_workspace_apart(const fa_attention_args& a, const BackwardParams& p, size_t bytes) {
    const Shapes shapes = shapes_of(a);
    FA_RETURN_IF_ERROR(check_apart_from(a.workspace, bytes, gradients_of(a, p, shapes)));
    return check_apart_from(a.workspace, bytes, inputs_of(a, p, shapes));
}

namespace {
// Stride 0 sums the gradient over an axis. If the bias does not repeat that axis, the sum is not the gradient of the bias.
fa_status check_gradient_axis(const char* axis, int64_t extent, int64_t bias, int64_t gradient) {
    if (extent <= 1 || bias == 0 || gradient != 0) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "dbias.%s_stride=0 with bias.%s_stride=%" PRId64 ": the bias does not repeat this axis", axis, axis, bias);
}
}  // namespace

fa_status validate(const fa_attention_backward_args* args, Pointers pointers, fa_attention_args* forward, BackwardParams* params) {
    fa_attention_backward_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_attention_backward_args", sizeof(fa_attention_backward_args), &a));
    BackwardParams& p = *params;
    p.head_parts = p.row_parts = 0;
    FA_RETURN_IF_ERROR(validate(a.forward, pointers, forward, &p.forward, nullptr, false));
    const fa_attention_args& f = *forward;
    if (f.dtype == FA_FLOAT8_E4M3) return fail(FA_UNSUPPORTED, "dtype=float8_e4m3 has no backward pass");
    const bool varlen = f.cu_seqlens_q;
    const int64_t rows_q = varlen ? f.total_q : f.seqlen_q, rows_k = varlen ? f.total_k : f.seqlen_k;
    const bool need = pointers == Pointers::kRequired && f.batch > 0;
    const bool has_q = need && rows_q > 0, has_k = need && rows_k > 0;
    if (f.parts && need && f.device == FA_CPU) FA_RETURN_IF_ERROR(check_ascending(f));
    const size_t element = dtype_size(f.dtype);
    FA_RETURN_IF_ERROR(check_pointer("lse", f.lse, 4, has_q));
    FA_RETURN_IF_ERROR(check_pointer("dout", a.dout.data, element, has_q));
    FA_RETURN_IF_ERROR(check_pointer("dq", a.dq.data, element, has_q));
    FA_RETURN_IF_ERROR(check_pointer("dk", a.dk.data, element, has_k));
    FA_RETURN_IF_ERROR(check_pointer("dv", a.dv.data, element, has_k));
    FA_RETURN_IF_ERROR(check_pointer("dbias", a.dbias.data, 4, false));
    if (a.dbias.data) {
        if (!f.bias.data) return fail(FA_BAD_ARGUMENT, "dbias.data=%p is set, but bias.data is NULL", static_cast<void*>(a.dbias.data));
        FA_RETURN_IF_ERROR(check_gradient_axis("batch", f.batch, f.bias.batch_stride, a.dbias.batch_stride));
        FA_RETURN_IF_ERROR(check_gradient_axis("head", f.nheads, f.bias.head_stride, a.dbias.head_stride));
        FA_RETURN_IF_ERROR(check_gradient_axis("row", f.seqlen_q, f.bias.row_stride, a.dbias.row_stride));
    }
    FA_RETURN_IF_ERROR(check_pointer("dsinks", a.dsinks, 4, false));
    if (a.dsinks && !f.sinks) return fail(FA_BAD_ARGUMENT, "dsinks=%p is set, but sinks is NULL", static_cast<void*>(a.dsinks));
    FA_RETURN_IF_ERROR(check_pointer("dlse", a.dlse, 4, false));
    p.dout = view(a.dout), p.dq = view(a.dq), p.dk = view(a.dk), p.dv = view(a.dv);
    p.dbias = {a.dbias.data, a.dbias.batch_stride, a.dbias.head_stride, a.dbias.row_stride};
    p.dsinks = a.dsinks, p.dlse = a.dlse;
    const Shapes shapes = shapes_of(f);
    for (const Region& gradient : {region("dq", a.dq, shapes.batch, rows_q, f.nheads, f.headdim, element),
                                   region("dk", a.dk, shapes.batch, rows_k, f.nheads_k, f.headdim, element),
                                   region("dv", a.dv, shapes.batch, rows_k, f.nheads_k, shapes.headdim_v, element)})
        FA_RETURN_IF_ERROR(check_output(gradient));  // also for a query without addresses
    FA_RETURN_IF_ERROR(check_apart(gradients_of(f, p, shapes), inputs_of(f, p, shapes)));
    FA_RETURN_IF_ERROR(check_bool("accumulate", a.accumulate));
    if (a.reserved) return fail(FA_BAD_ARGUMENT, "reserved=%d must be 0", a.reserved);
    p.accumulate = a.accumulate, p.deterministic = f.deterministic;
    return FA_OK;
}

fa_status validate(const fa_merge_args* args, MergeParams* params) {
    fa_merge_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_merge_args", sizeof(fa_merge_args), &a));
    FA_RETURN_IF_ERROR(check_device(a.device));
    if (a.dtype < FA_FLOAT32 || a.dtype > FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "dtype=%d is none of float32 (1), float16 (2), bfloat16 (3)", a.dtype);
    if (a.batch < 0) return fail(FA_BAD_ARGUMENT, "batch=%d is negative", a.batch);
    if (a.nheads < 1) return fail(FA_BAD_ARGUMENT, "nheads=%d is below 1", a.nheads);
    if (a.headdim_v < 1 || a.headdim_v > kMaxHeadDim)
        return fail(FA_BAD_ARGUMENT, "headdim_v=%d is outside 1 .. %d", a.headdim_v, kMaxHeadDim);
    FA_RETURN_IF_ERROR(check_length("seqlen", a.seqlen));
    FA_RETURN_IF_ERROR(check_total(a.batch, "nheads", a.nheads, "seqlen", a.seqlen));
    if (a.reserved) return fail(FA_BAD_ARGUMENT, "reserved=%d must be 0", a.reserved);
    const bool any = a.batch > 0 && a.seqlen > 0;
    const size_t element = dtype_size(a.dtype);
    FA_RETURN_IF_ERROR(check_pointer("out_a", a.out_a.data, element, any));
    FA_RETURN_IF_ERROR(check_pointer("out_b", a.out_b.data, element, any));
    FA_RETURN_IF_ERROR(check_pointer("out", a.out.data, element, any));
    FA_RETURN_IF_ERROR(check_pointer("lse_a", a.lse_a, 4, any));
    FA_RETURN_IF_ERROR(check_pointer("lse_b", a.lse_b, 4, any));
    FA_RETURN_IF_ERROR(check_pointer("lse", a.lse, 4, any));
    const auto tensor = [&](const char* name, const fa_tensor& t) {
        return region(name, t, a.batch, a.seqlen, a.nheads, a.headdim_v, element);
    };
    const Region out = tensor("out", a.out);
    FA_RETURN_IF_ERROR(check_output(out));
    FA_RETURN_IF_ERROR(check_apart(out, tensor("out_a", a.out_a), true));
    FA_RETURN_IF_ERROR(check_apart(out, tensor("out_b", a.out_b), true));
    const auto statistics = [&](const char* name, const float* lse) {
        return region(name, lse, int64_t(a.batch) * a.nheads * a.seqlen, 4);
    };
    const Region lse = statistics("lse", a.lse), lse_a = statistics("lse_a", a.lse_a), lse_b = statistics("lse_b", a.lse_b);
    FA_RETURN_IF_ERROR(check_apart(lse, lse_a, true));
    FA_RETURN_IF_ERROR(check_apart(lse, lse_b, true));
    for (const Region& other : {out, tensor("out_a", a.out_a), tensor("out_b", a.out_b)}) FA_RETURN_IF_ERROR(check_apart(lse, other));
    for (const Region& other : {lse_a, lse_b}) FA_RETURN_IF_ERROR(check_apart(out, other));
    int32_t threads;
    FA_RETURN_IF_ERROR(find_threads(a.device, 0, &threads));
    *params = {view(a.out_a),  view(a.out_b), view(a.out), a.lse_a,     a.lse_b,           a.lse,
               DType(a.dtype), a.batch,       a.nheads,    a.headdim_v, int32_t(a.seqlen), threads};
    return FA_OK;
}

fa_status validate(const fa_quantize_args* args, QuantizeParams* params) {
    fa_quantize_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_quantize_args", sizeof(fa_quantize_args), &a));
    FA_RETURN_IF_ERROR(check_device(a.device));
    if (a.dtype < FA_FLOAT32 || a.dtype > FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "dtype=%d is none of float32 (1), float16 (2), bfloat16 (3)", a.dtype);
    if (a.batch < 0) return fail(FA_BAD_ARGUMENT, "batch=%d is negative", a.batch);
    if (a.nheads < 1) return fail(FA_BAD_ARGUMENT, "nheads=%d is below 1", a.nheads);
    if (a.headdim < 1 || a.headdim > kMaxQuantizedHeadDim)
        return fail(FA_BAD_ARGUMENT, "headdim=%d is outside 1 .. %d", a.headdim, kMaxQuantizedHeadDim);
    FA_RETURN_IF_ERROR(check_bool("hadamard", a.hadamard));
    if (a.hadamard && (a.headdim & (a.headdim - 1)))
        return fail(FA_BAD_ARGUMENT, "headdim=%d with hadamard=1: it must be a power of two", a.headdim);
    FA_RETURN_IF_ERROR(check_length("seqlen", a.seqlen));
    FA_RETURN_IF_ERROR(check_total(a.batch, "nheads", a.nheads, "seqlen", a.seqlen));
    const bool any = a.batch > 0 && a.seqlen > 0;
    FA_RETURN_IF_ERROR(check_pointer("x", a.x.data, dtype_size(a.dtype), any));
    FA_RETURN_IF_ERROR(check_pointer("out", a.out.data, 1, any));
    FA_RETURN_IF_ERROR(check_pointer("descale", a.descale, 4, a.batch > 0));
    const Region out = region("out", a.out, a.batch, a.seqlen, a.nheads, a.headdim, 1);
    FA_RETURN_IF_ERROR(check_output(out));
    const Region x = region("x", a.x, a.batch, a.seqlen, a.nheads, a.headdim, dtype_size(a.dtype));
    const Region descale = region("descale", a.descale, int64_t(a.batch) * a.nheads, 4);
    FA_RETURN_IF_ERROR(check_apart(out, x));
    FA_RETURN_IF_ERROR(check_apart(descale, x));
    FA_RETURN_IF_ERROR(check_apart(descale, out));
    int32_t threads;
    FA_RETURN_IF_ERROR(find_threads(a.device, 0, &threads));
    *params = {view(a.x),
               view(a.out),
               a.descale,
               DType(a.dtype),
               a.batch,
               a.nheads,
               a.headdim,
               int32_t(a.seqlen),
               a.hadamard != 0,
               float(1.0 / std::sqrt(double(a.headdim))),
               {uint32_t(a.seed), uint32_t(a.seed >> 32)},
               threads};
    return FA_OK;
}

}  // namespace fa
