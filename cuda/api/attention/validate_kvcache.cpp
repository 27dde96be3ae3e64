// validate_kvcache.cpp: checks fa_kvcache_args. Lengths and tables are checked on the CPU only; on a GPU they are in device memory.
#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cstddef>
#include <new>
#include <vector>

#include "api/attention/validate.h"
#include "api/common/checks.h"
#include "api/common/options.h"
#include "api/common/status.h"

namespace fa {
namespace {

constexpr int32_t kMaxCacheHeadDim = 576;  // MLA: 512 latent dims and 64 rotary dims
constexpr int32_t kMaxSplits = 256;

CacheScale view(const fa_cache_scale& s) { return {s.data, s.batch_stride, s.row_stride, s.head_stride}; }

fa_status check_scale(const char* name, const fa_cache_scale& s, bool quantized, bool need) {
    if (!quantized && s.data) return fail(FA_BAD_ARGUMENT, "%s.data is set, but only an 8-bit cache has factors", name);
    if (quantized && need && !s.data) return fail(FA_BAD_ARGUMENT, "%s.data is NULL: an 8-bit cache needs the factors of k and v", name);
    return check_pointer(name, s.data, 4, false);
}

// The small arrays that a call reads beside queries, keys and values: lengths, tables, and the like.
constexpr int kMostSmall = 7;
Regions<kMostSmall> small_arrays(const fa_kvcache_args& a, const fa_attention_args& f) {
    Regions<kMostSmall> arrays;
    const auto rows_of = [&](const char* name, const void* data, int64_t batch, int64_t batch_stride, int64_t rows, int64_t row_stride,
                             int64_t columns, int64_t element) {
        arrays.add(Region{name,
                          data,
                          {{"batch", "batch", batch, batch_stride}, {"row", "rows", rows, row_stride}, {"head", "nheads", 1, 0}},
                          columns,
                          element});
    };
    arrays.add(region("cache_seqlens", a.cache_seqlens, f.batch, 4));
    arrays.add(region("cache_leftpad", a.cache_leftpad, f.batch, 4));
    arrays.add(region("cache_batch_idx", a.cache_batch_idx, f.batch, 4));
    if (a.page_size > 0)
        rows_of("block_table", a.block_table, f.batch, a.block_table_stride, 1, 0, (f.seqlen_k + a.page_size - 1) / a.page_size, 4);
    const int64_t numbers = int64_t(a.rotary_rows) * (a.rotary_dim / 2);
    const size_t element = dtype_size(a.rotary_dtype ? a.rotary_dtype : f.dtype);
    arrays.add(region("rotary_cos", a.rotary_cos, numbers, element));
    arrays.add(region("rotary_sin", a.rotary_sin, numbers, element));
    rows_of("tree_mask", a.tree_mask, f.batch, a.tree_batch_stride, f.seqlen_q, a.tree_row_stride, 1, 8);
    return arrays;
}

// Beside out, a call writes the cache and the factors of the appended tokens. No element may be written twice, or belong to another array
// that the call reads.
fa_status check_appended(const fa_kvcache_args& a, const fa_attention_args& f, size_t cache_element, int32_t headdim_v) {
    const size_t element = dtype_size(f.dtype);
    const int64_t rows = a.page_size ? a.page_size : f.seqlen_k;
    const auto cache = [&](const char* name, const auto& t, int64_t columns, size_t bytes) {
        return region(name, t, a.cache_batch, rows, f.nheads_k, columns, bytes);
    };
    const Region k = cache("k", f.k, f.headdim, cache_element), v = cache("v", f.v, headdim_v, cache_element);
    FA_RETURN_IF_ERROR(check_output(k));
    FA_RETURN_IF_ERROR(check_output(v));
    const bool columns_of_keys = f.v.data == f.k.data;  // v is columns of k: appending k and v writes the same bytes there
    if (columns_of_keys && rows * a.cache_batch > 1 &&
        (f.v.row_stride != f.k.row_stride || f.v.batch_stride != f.k.batch_stride || f.v.head_stride != f.k.head_stride))
        return fail(FA_BAD_ARGUMENT, "v.data is k.data, but not with the same strides");
    if (!columns_of_keys) FA_RETURN_IF_ERROR(check_apart(k, v));
    const Region inputs[] = {region("q", f.q, f.batch, f.seqlen_q, f.nheads, f.headdim, element),
                             region("k_new", a.k_new, f.batch, a.seqlen_new, f.nheads_k, f.headdim, element),
                             region("v_new", a.v_new, f.batch, a.seqlen_new, f.nheads_k, headdim_v, element)};
    const Region outputs[] = {region("out", f.out, f.batch, f.seqlen_q, f.nheads, headdim_v, element),
                              region("lse", f.lse, int64_t(f.batch) * f.nheads * f.seqlen_q, 4)};
    const Region k_scale = cache("k_scale", a.k_scale, 1, 4), v_scale = cache("v_scale", a.v_scale, 1, 4);
    Regions<2> factors;  // written, because appended tokens have their own factors
    if (a.k_scale.row_stride) factors.add(k_scale);
    if (a.v_scale.row_stride) factors.add(v_scale);
    for (const Region& input : inputs) {
        FA_RETURN_IF_ERROR(check_apart(k, input));
        FA_RETURN_IF_ERROR(check_apart(v, input));
        for (const Region& output : outputs) FA_RETURN_IF_ERROR(check_apart(output, input));
        for (const Region& factor : factors) FA_RETURN_IF_ERROR(check_apart(factor, input));
    }
    for (const Region& factor : factors) {
        FA_RETURN_IF_ERROR(check_output(factor));
        for (const Region& input : small_arrays(a, f)) FA_RETURN_IF_ERROR(check_apart(factor, input));
    }
    for (const Region& factor : {k_scale, v_scale}) {  // also those that are only read
        FA_RETURN_IF_ERROR(check_apart(k, factor));
        FA_RETURN_IF_ERROR(check_apart(v, factor));
    }
    return a.k_scale.row_stride || a.v_scale.row_stride ? check_apart(k_scale, v_scale) : FA_OK;
}

// Rows first .. last of cache entry or page `place`, to which sequence b appends.
struct Appended {
    int32_t place, first, last, b;
};

// No two sequences may append to one place: which keys remain would depend on timing.
fa_status check_places(const fa_kvcache_args& a, const fa_attention_args& f) {
    if (!a.seqlen_new || !(a.cache_batch_idx || a.block_table)) return FA_OK;
    const char* const name = a.block_table ? "block_table" : "cache_batch_idx";
    std::vector<Appended> places;
    try {
        for (int32_t b = 0; b < f.batch; ++b) {
            const int64_t before = a.cache_seqlens ? a.cache_seqlens[b] : f.seqlen_k - a.seqlen_new, after = before + a.seqlen_new;
            if (before < 0) continue;
            if (!a.block_table) {
                // the whole entry: other sequences that use it would read the appended keys
                places.push_back({a.cache_batch_idx[b], 0, INT32_MAX, b});
                continue;
            }
            for (int64_t page = before / a.page_size; page * a.page_size < after; ++page) {
                const int64_t start = page * a.page_size, end = std::min(after, start + a.page_size);
                places.push_back({a.block_table[b * a.block_table_stride + page], int32_t(std::max(before, start) - start),
                                  int32_t(end - start - 1), b});
            }
        }
    } catch (const std::bad_alloc&) {
        return fail(FA_OUT_OF_MEMORY, "no host memory left to check %s", name);
    }
    std::sort(places.begin(), places.end(), [](const Appended& x, const Appended& y) {
        return x.place != y.place ? x.place < y.place : x.first != y.first ? x.first < y.first : x.b < y.b;
    });
    for (size_t i = 1; i < places.size(); ++i)
        if (const Appended &x = places[i - 1], &y = places[i]; x.place == y.place && x.last >= y.first)
            return fail(FA_BAD_ARGUMENT, "%s: sequences %d and %d both append to %s %d", name, std::min(x.b, y.b), std::max(x.b, y.b),
                        a.block_table ? "the same rows of page" : "entry", x.place);
    return FA_OK;
}

// Whether the rotary tables have a row for every position in sequence b, which holds `before` keys.
fa_status check_positions(const fa_kvcache_args& a, const AttentionParams& p, int32_t b, int64_t before) {
    if (!a.rotary_cos) return FA_OK;
    const bool ordered = p.window_left >= 0 || p.window_right >= 0 || p.chunk.divisor;  // as in append_position
    const int64_t queries = ordered ? p.seqlen_q : std::min(p.seqlen_q, 1), rows = std::max<int64_t>(queries, a.seqlen_new);
    if (rows == 0 || before + rows <= a.rotary_rows) return FA_OK;
    return fail(FA_BAD_ARGUMENT,
                "rotary_rows=%d: sequence %d turns by the positions %" PRId64 " .. %" PRId64
                ", which rotary_cos and rotary_sin do not have",
                a.rotary_rows, b, before, before + rows - 1);
}

// Checks the contents that only the CPU can read: lengths, entries and pages.
fa_status check_contents(const fa_kvcache_args& a, const fa_attention_args& f, const AttentionParams& p) {
    const int64_t room = f.seqlen_k - a.seqlen_new;
    for (int32_t b = 0; b < f.batch; ++b) {
        const int64_t before = a.cache_seqlens ? a.cache_seqlens[b] : room;
        if (before > room)
            return fail(FA_BAD_ARGUMENT, "cache_seqlens[%d]=%" PRId64 " and seqlen_new=%d are more than the %" PRId64 " keys of %s", b,
                        before, a.seqlen_new, f.seqlen_k, a.block_table ? "a row of block_table" : "a cache entry");
        if (before < 0) continue;
        FA_RETURN_IF_ERROR(check_positions(a, p, b, before));
        if (a.cache_leftpad && (a.cache_leftpad[b] < 0 || a.cache_leftpad[b] > before))
            return fail(FA_BAD_ARGUMENT, "cache_leftpad[%d]=%d is outside 0 .. %" PRId64 ", the keys in the cache", b, a.cache_leftpad[b],
                        before);
        if (a.cache_batch_idx && a.cache_batch > 0 && (a.cache_batch_idx[b] < 0 || a.cache_batch_idx[b] >= a.cache_batch))
            return fail(FA_BAD_ARGUMENT, "cache_batch_idx[%d]=%d is outside 0 .. %d, the entries of the cache", b, a.cache_batch_idx[b],
                        a.cache_batch - 1);
        if (!a.block_table) continue;
        for (int64_t page = 0; page * a.page_size < before + a.seqlen_new; ++page) {
            const int32_t at = a.block_table[b * a.block_table_stride + page];
            if (at < 0 || at >= a.cache_batch)
                return fail(FA_BAD_ARGUMENT, "block_table[%d][%" PRId64 "]=%d is outside 0 .. %d, the pages of the cache", b, page, at,
                            a.cache_batch - 1);
        }
    }
    return check_places(a, f);
}

fa_status check_rotary(const fa_kvcache_args& a, const fa_attention_args& f) {
    if (!a.rotary_cos && !a.rotary_sin) {
        if (a.rotary_dtype || a.rotary_rows || a.rotary_dim || a.rotary_interleaved)
            return fail(FA_BAD_ARGUMENT,
                        "rotary_dtype=%d, rotary_rows=%d, rotary_dim=%d, rotary_interleaved=%d without rotary_cos and rotary_sin",
                        a.rotary_dtype, a.rotary_rows, a.rotary_dim, a.rotary_interleaved);
        return FA_OK;
    }
    if (!a.rotary_cos || !a.rotary_sin)
        return fail(FA_BAD_ARGUMENT, "%s is NULL and %s is not", a.rotary_cos ? "rotary_sin" : "rotary_cos",
                    a.rotary_cos ? "rotary_cos" : "rotary_sin");
    if (a.rotary_dtype && a.rotary_dtype != FA_FLOAT32 && a.rotary_dtype != f.dtype)
        return fail(FA_BAD_ARGUMENT, "rotary_dtype=%s (%d) is neither float32 nor dtype=%s", dtype_name(a.rotary_dtype), a.rotary_dtype,
                    dtype_name(f.dtype));
    const size_t element = dtype_size(a.rotary_dtype ? a.rotary_dtype : f.dtype);
    FA_RETURN_IF_ERROR(check_pointer("rotary_cos", a.rotary_cos, element, true));
    FA_RETURN_IF_ERROR(check_pointer("rotary_sin", a.rotary_sin, element, true));
    if (a.rotary_rows < 1) return fail(FA_BAD_ARGUMENT, "rotary_rows=%d is below 1", a.rotary_rows);
    if (a.rotary_dim < 2 || a.rotary_dim % 2 || a.rotary_dim > f.headdim)
        return fail(FA_BAD_ARGUMENT, "rotary_dim=%d is not an even number in 2 .. headdim=%d", a.rotary_dim, f.headdim);
    return check_bool("rotary_interleaved", a.rotary_interleaved);
}

fa_status check_tree(const fa_kvcache_args& a, const fa_attention_args& f, bool need) {
    constexpr int32_t kMaxTreeKeys = 64;
    if (a.tree_keys < 0 || a.tree_keys > kMaxTreeKeys)
        return fail(FA_BAD_ARGUMENT, "tree_keys=%d is outside 0 .. %d, the bits of a row of tree_mask", a.tree_keys, kMaxTreeKeys);
    if (!a.tree_keys) {
        if (a.tree_mask) return fail(FA_BAD_ARGUMENT, "tree_mask is set with tree_keys=0: it is 1 .. %d", kMaxTreeKeys);
        return FA_OK;
    }
    FA_RETURN_IF_ERROR(check_pointer("tree_mask", a.tree_mask, 8, need && f.seqlen_q > 0));
    if (f.causal)
        return fail(FA_BAD_ARGUMENT, "causal=%d with tree_keys=%d: the tree says which rows see which keys", f.causal, a.tree_keys);
    if (f.has_window)
        return fail(FA_BAD_ARGUMENT,
                    "window_left=%" PRId64 ", window_right=%" PRId64 " with tree_keys=%d: a window counts positions in a row",
                    int64_t(f.window_left), int64_t(f.window_right), a.tree_keys);
    FA_RETURN_IF_ERROR(refuse_options(f, Calls::kOnTree, a.tree_keys));
    if (a.rotary_cos)
        return fail(FA_UNSUPPORTED, "rotary_cos is set with tree_keys=%d: the tokens of a tree stand at positions of their own",
                    a.tree_keys);
    return FA_OK;
}

}  // namespace

fa_status validate(const fa_kvcache_args* args, Pointers pointers, fa_attention_args* forward, AppendParams* params) {
    fa_kvcache_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_kvcache_args", offsetof(fa_kvcache_args, shared_prefix), &a));
    AppendParams& append = *params;
    append = {};
    AttentionParams& p = append.attention;
    if (!a.attention) return fail(FA_BAD_ARGUMENT, "fa_attention_args is NULL");
    const bool quantized = a.cache_dtype == FA_FLOAT8_E4M3 || a.cache_dtype == FA_INT8;
    if (a.attention->dtype != FA_FLOAT32 && a.attention->dtype != FA_FLOAT16 && a.attention->dtype != FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "dtype=%d is none of float32 (1), float16 (2), bfloat16 (3)", a.attention->dtype);
    if (!quantized && a.cache_dtype && a.cache_dtype != a.attention->dtype)
        return fail(FA_BAD_ARGUMENT, "cache_dtype=%s (%d) is none of dtype=%s, float8_e4m3 and int8", dtype_name(a.cache_dtype),
                    a.cache_dtype, dtype_name(a.attention->dtype));
    const int32_t cache_dtype = a.cache_dtype ? a.cache_dtype : a.attention->dtype;
    const Keys keys{kMaxCacheHeadDim, dtype_size(cache_dtype), a.cache_batch == 0};
    FA_RETURN_IF_ERROR(validate(a.attention, pointers, forward, &p, &keys));
    const fa_attention_args& f = *forward;
    if (f.cu_seqlens_q) return fail(FA_UNSUPPORTED, "cu_seqlens_q is set: a call with a cache has seqlen_q rows for every sequence");
    FA_RETURN_IF_ERROR(refuse_options(f, Calls::kOnCache));
    if (f.max_score) return fail(FA_UNSUPPORTED, "max_score is set: a call with a cache does not give it");
    if (f.key_sums) return fail(FA_UNSUPPORTED, "key_sums is set: a call with a cache does not give it");
    if (f.headdim > 512 && f.headdim_v == 0) return fail(FA_BAD_ARGUMENT, "headdim_v=0 with headdim=%d: name it, 1 .. 512", f.headdim);

    const bool need = pointers == Pointers::kRequired && f.batch > 0;
    if (a.cache_batch < 0) return fail(FA_BAD_ARGUMENT, "cache_batch=%d is negative", a.cache_batch);
    if (a.cache_batch == 0 && a.seqlen_new > 0)
        return fail(FA_BAD_ARGUMENT, "cache_batch=0 with seqlen_new=%d: a cache without entries takes no keys", a.seqlen_new);
    if (a.cache_batch == 0 && need && !a.cache_seqlens && f.seqlen_k > 0)
        return fail(FA_BAD_ARGUMENT, "cache_batch=0 without cache_seqlens: whether all %d sequences are empty is not said", f.batch);
    if (a.cache_batch == 0) forward->seqlen_k = p.seqlen_k = 0;  // an empty cache has no keys and is never read, on any device
    if (a.page_size < 0) return fail(FA_BAD_ARGUMENT, "page_size=%d is negative", a.page_size);
    if (a.block_table && !a.page_size) return fail(FA_BAD_ARGUMENT, "block_table is set with page_size=0: it is 1 or more");
    if (!a.block_table && a.page_size && need && f.seqlen_k > 0)  // a table without columns may have no address
        return fail(FA_BAD_ARGUMENT, "page_size=%d without a block_table", a.page_size);
    if (a.block_table && a.cache_batch_idx) return fail(FA_BAD_ARGUMENT, "cache_batch_idx and block_table are both set");
    if (!a.page_size && !a.cache_batch_idx && a.cache_batch < f.batch && a.cache_batch > 0 && need)
        return fail(FA_BAD_ARGUMENT, "cache_batch=%d is below batch=%d without cache_batch_idx", a.cache_batch, f.batch);
    FA_RETURN_IF_ERROR(check_pointer("cache_seqlens", a.cache_seqlens, 4, false));
    FA_RETURN_IF_ERROR(check_pointer("cache_leftpad", a.cache_leftpad, 4, false));
    FA_RETURN_IF_ERROR(check_pointer("cache_batch_idx", a.cache_batch_idx, 4, false));
    FA_RETURN_IF_ERROR(check_pointer("block_table", a.block_table, 4, false));
    if (a.seqlen_new < 0) return fail(FA_BAD_ARGUMENT, "seqlen_new=%d is negative", a.seqlen_new);
    if (a.seqlen_new > f.seqlen_k)
        return fail(FA_BAD_ARGUMENT, "seqlen_new=%d is above seqlen_k=%" PRId64 ", the keys of a cache entry", a.seqlen_new, f.seqlen_k);
    const size_t element = dtype_size(f.dtype);
    const bool appends = need && a.seqlen_new > 0;
    FA_RETURN_IF_ERROR(check_pointer("k_new", a.k_new.data, element, appends));
    FA_RETURN_IF_ERROR(check_pointer("v_new", a.v_new.data, element, appends));
    if (!a.seqlen_new && (a.k_new.data || a.v_new.data)) return fail(FA_BAD_ARGUMENT, "k_new or v_new is set with seqlen_new=0");
    // When v is the first columns of k, the rows of k and of v must write the same bytes to one place.
    if (a.seqlen_new > 0 && f.v.data && f.v.data == f.k.data && (a.rotary_cos || quantized))
        return fail(FA_UNSUPPORTED, "v.data=%p is k.data: values that are columns of the keys join the cache neither rotated nor as 8 bits",
                    f.v.data);
    FA_RETURN_IF_ERROR(check_rotary(a, f));
    FA_RETURN_IF_ERROR(check_tree(a, f, need));
    const bool has_keys = need && a.cache_batch > 0 && f.seqlen_k > 0;  // an array without elements may have no address
    FA_RETURN_IF_ERROR(check_scale("k_scale", a.k_scale, quantized, has_keys));
    FA_RETURN_IF_ERROR(check_scale("v_scale", a.v_scale, quantized, has_keys));
    if (appends) FA_RETURN_IF_ERROR(check_appended(a, f, keys.element, p.headdim_v));
    const int64_t rows = a.page_size ? a.page_size : f.seqlen_k;
    const Region k = region("k", f.k, a.cache_batch, rows, f.nheads_k, f.headdim, keys.element);
    const Region v = region("v", f.v, a.cache_batch, rows, f.nheads_k, p.headdim_v, keys.element);
    const Region out = region("out", f.out, f.batch, f.seqlen_q, f.nheads, p.headdim_v, element);
    const Region lse = region("lse", need ? f.lse : nullptr, int64_t(f.batch) * f.nheads * f.seqlen_q, 4);
    const Regions<kMostSmall> small = small_arrays(a, f);
    const Region k_scale = region("k_scale", a.k_scale, a.cache_batch, rows, f.nheads_k, 1, 4);
    const Region v_scale = region("v_scale", a.v_scale, a.cache_batch, rows, f.nheads_k, 1, 4);
    for (const Region& output : {out, lse}) {
        for (const Region* cached : {&k, &v, &k_scale, &v_scale}) FA_RETURN_IF_ERROR(check_apart(output, *cached));
        for (const Region& input : small) FA_RETURN_IF_ERROR(check_apart(output, input));
    }
    if (appends)
        for (const Region& input : small) {
            FA_RETURN_IF_ERROR(check_apart(k, input));
            FA_RETURN_IF_ERROR(check_apart(v, input));
        }
    FA_RETURN_IF_ERROR(check_bool("batch_invariant", a.batch_invariant));
    FA_RETURN_IF_ERROR(check_bool("programmatic", a.programmatic));
    FA_RETURN_IF_ERROR(check_bool("shared_prefix", a.shared_prefix));
    if (a.reserved) return fail(FA_BAD_ARGUMENT, "reserved=%d is not 0", a.reserved);
    if (a.shared_prefix && !a.page_size)
        return fail(FA_BAD_ARGUMENT, "shared_prefix=1 without a block_table: it tells which sequences begin with the same keys");
    if (a.shared_prefix && a.batch_invariant)
        return fail(FA_UNSUPPORTED, "shared_prefix=1 with batch_invariant=1: which keys are read together depends on the batch");
    if (a.num_splits < 0 || a.num_splits > kMaxSplits)
        return fail(FA_BAD_ARGUMENT, "num_splits=%d is outside 0 .. %d", a.num_splits, kMaxSplits);
    if (need && !a.cache_seqlens) FA_RETURN_IF_ERROR(check_positions(a, p, 0, f.seqlen_k - a.seqlen_new));  // known on every device
    if (f.device == FA_CPU && need) FA_RETURN_IF_ERROR(check_contents(a, f, p));

    CacheView& c = p.cache;
    c.entries = std::max(a.cache_batch, 1), c.seqlens = a.cache_seqlens, c.added = a.seqlen_new, c.batch_idx = a.cache_batch_idx;
    c.leftpad = a.cache_leftpad;
    c.block_table = a.block_table, c.table_row = a.block_table_stride, c.page_size = a.page_size;
    c.dtype = DType(cache_dtype), c.k_scale = view(a.k_scale), c.v_scale = view(a.v_scale);
    c.batch_invariant = a.batch_invariant, c.num_splits = a.num_splits, c.programmatic = a.programmatic;
    c.shared_prefix = a.shared_prefix;
    if (a.tree_keys) {
        // A query may have no addresses; the kernels must still see that there is a tree.
        static const uint64_t kSomeTree = 0;
        p.tree = {a.tree_mask ? a.tree_mask : &kSomeTree, a.tree_batch_stride, a.tree_row_stride, a.tree_keys};
    }
    append.k_new = fa::view(a.k_new), append.v_new = fa::view(a.v_new), append.seqlen_new = a.seqlen_new;
    append.rotary_cos = a.rotary_cos, append.rotary_sin = a.rotary_sin;
    append.rotary_dtype = DType(a.rotary_dtype ? a.rotary_dtype : f.dtype);
    append.rotary_rows = a.rotary_rows, append.rotary_dim = a.rotary_dim, append.rotary_interleaved = a.rotary_interleaved;
    return FA_OK;
}

}  // namespace fa
