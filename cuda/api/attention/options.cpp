// options.cpp: the options of attention, from the caller's struct to the parameters of the kernels: the check of each, where it goes, the
// memory of its array, and which calls do not take it.
#include <algorithm>
#include <cfloat>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "api/attention/validate.h"
#include "api/common/checks.h"
#include "api/common/options.h"
#include "attention/common/dropout.h"

namespace fa {
namespace {

// ---- which calls take which option ----

// How an option stands in the struct of a call. Numbers are 0, and arrays NULL, where it is off.
enum class Kind {
    kInteger,  // int32_t
    kWide,     // uint64_t
    kReal,     // float
    kPointer,  // to an array
    kTensor    // the address in a struct with strides
};

// A reason against an option follows its name and value in the text of the error; nullptr: such calls take it.
struct Row {
    const char* name;
    Kind kind;
    size_t at;                         // of the number or the address in the struct
    bool agreed = false;               // all ranks give the same, and each launch on a rank gets it
    bool of_rows = false;              // see Agreed
    const char* positions = nullptr;   // it counts positions in a row: no trees of draft tokens, no shards of a cache
    const char* on_parts = nullptr;    // it counts from the start of whole sequences
    const char* over_ranks = nullptr;  // the same
    const char* on_cache = nullptr;

    template <typename T>
    T read(const fa_attention_args& a) const {
        T value;
        std::memcpy(&value, reinterpret_cast<const char*>(&a) + at, sizeof value);
        return value;
    }
    bool is_array() const { return kind == Kind::kPointer || kind == Kind::kTensor; }
    bool given(const fa_attention_args& a) const {
        if (kind == Kind::kInteger) return read<int32_t>(a) != 0;
        if (kind == Kind::kReal) return read<float>(a) != 0;
        return read<uint64_t>(a) != 0;
    }
    int64_t word(const fa_attention_args& a) const {  // see Agreed
        if (kind == Kind::kInteger) return read<int32_t>(a);
        if (kind == Kind::kReal) return read<uint32_t>(a);
        return is_array() ? given(a) : int64_t(read<uint64_t>(a));
    }
};
static_assert(sizeof(void*) == sizeof(uint64_t), "given reads addresses as words");

using A = fa_attention_args;
constexpr Row kRows[] = {
    {.name = "softcap", .kind = Kind::kReal, .at = offsetof(A, softcap), .agreed = true},
    {.name = "alibi_slopes",
     .kind = Kind::kPointer,
     .at = offsetof(A, alibi_slopes),
     .agreed = true,
     .positions = "ALiBi counts positions in a row"},
    {.name = "bias",
     .kind = Kind::kTensor,
     .at = offsetof(A, bias.data),
     .agreed = true,
     .of_rows = true,
     .on_cache = ": a call with a cache takes no bias"},
    {.name = "mask",
     .kind = Kind::kTensor,
     .at = offsetof(A, mask.data),
     .agreed = true,
     .of_rows = true,
     .on_cache = ": a call with a cache takes no mask"},
    {.name = "startend_row_indices",
     .kind = Kind::kTensor,
     .at = offsetof(A, startend_row_indices.data),
     .agreed = true,
     .of_rows = true,
     .on_cache = ": a call with a cache takes no startend_row_indices"},
    {.name = "startend_row_indices.heads",
     .kind = Kind::kInteger,
     .at = offsetof(A, startend_row_indices.heads),
     .agreed = true,
     .of_rows = true},
    {.name = "startend_row_indices.numbers",
     .kind = Kind::kInteger,
     .at = offsetof(A, startend_row_indices.numbers),
     .agreed = true,
     .of_rows = true},
    {.name = "block_mask",
     .kind = Kind::kTensor,
     .at = offsetof(A, block_mask.data),
     .on_parts = " with parts: its blocks count from the start of whole sequences",
     .over_ranks = ": its blocks count from the start of whole sequences, not of a rank's part",
     .on_cache = ": a call with a cache takes no block_mask"},
    {.name = "attention_chunk",
     .kind = Kind::kInteger,
     .at = offsetof(A, attention_chunk),
     .positions = "chunks count positions in a row",
     .on_parts = " with parts, whose keys may begin inside a chunk",
     .over_ranks = ": a rank's part of a sequence may begin inside a chunk"},
    {.name = "sinks", .kind = Kind::kPointer, .at = offsetof(A, sinks), .agreed = true},
    {.name = "dropout_p",
     .kind = Kind::kReal,
     .at = offsetof(A, dropout_p),
     .agreed = true,
     .on_cache = ": a call with a cache has no dropout"},
    {.name = "dropout_seed", .kind = Kind::kWide, .at = offsetof(A, dropout_seed), .agreed = true},
    {.name = "dropout_offset", .kind = Kind::kWide, .at = offsetof(A, dropout_offset), .agreed = true},
};
static_assert(sizeof kRows / sizeof kRows[0] <= kMostAgreed, "room for the options of a call over ranks");

constexpr const char* Row::* reason_against(Calls calls) {
    switch (calls) {
        case Calls::kOnParts: return &Row::on_parts;
        case Calls::kOverRanks: return &Row::over_ranks;
        case Calls::kOnCache: return &Row::on_cache;
        case Calls::kOnTree:
        case Calls::kOverShards: break;
    }
    return &Row::positions;
}

}  // namespace

fa_status refuse_options(const fa_attention_args& a, Calls calls, int32_t tree_keys) {
    const char* Row::* const against = reason_against(calls);
    for (const Row& row : kRows) {
        const char* const reason = row.*against;
        if (!reason || !row.given(a)) continue;
        if (calls == Calls::kOverShards)
            return fail(FA_UNSUPPORTED,
                        "%s is set: it needs positions in the whole sequence, which a rank's shard of the cache does not have", row.name);
        char with[32] = "";
        if (calls == Calls::kOnTree) std::snprintf(with, sizeof with, " with tree_keys=%d: ", tree_keys);
        if (row.is_array())
            return fail(FA_UNSUPPORTED, "%s%s is set%s%s", row.name, row.kind == Kind::kTensor ? ".data" : "", with, reason);
        if (row.kind == Kind::kReal) return fail(FA_UNSUPPORTED, "%s=%g%s%s", row.name, double(row.read<float>(a)), with, reason);
        return fail(FA_UNSUPPORTED, "%s=%" PRId64 "%s%s", row.name, row.word(a), with, reason);
    }
    return FA_OK;
}

int agreed_options(const fa_attention_args& a, Agreed (&found)[kMostAgreed]) {
    int count = 0;
    for (const Row& row : kRows) {
        if (!row.agreed) continue;
        found[count++] = {row.name, row.word(a), row.kind == Kind::kReal, row.is_array(), row.of_rows};
    }
    return count;
}

// ---- checks ----

namespace {

fa_status check_row_indices(const fa_attention_args& a) {
    const fa_row_indices& x = a.startend_row_indices;
    if (!x.data) return FA_OK;  // off, or an array without elements
    FA_RETURN_IF_ERROR(check_pointer("startend_row_indices", x.data, 4, false));
    if (x.heads != 1 && x.heads != a.nheads_k && x.heads != a.nheads)
        return fail(FA_BAD_ARGUMENT, "startend_row_indices.heads=%d is none of 1, nheads_k=%d, nheads=%d", x.heads, a.nheads_k, a.nheads);
    if (x.numbers != 1 && x.numbers != 2 && x.numbers != 4)
        return fail(FA_BAD_ARGUMENT, "startend_row_indices.numbers=%d is none of 1, 2, 4", x.numbers);
    if (x.numbers == 1 && !a.causal) return fail(FA_BAD_ARGUMENT, "startend_row_indices.numbers=1 without causal: it is 2 or 4 there");
    if (x.numbers == 4 && a.causal) return fail(FA_BAD_ARGUMENT, "startend_row_indices.numbers=4 with causal=1: it is 1 or 2 there");
    return FA_OK;
}

fa_status check_block_mask(const fa_attention_args& a) {
    const fa_block_mask& x = a.block_mask;
    if (!x.data) return FA_OK;
    if (x.heads != 1 && x.heads != a.nheads_k && x.heads != a.nheads)
        return fail(FA_BAD_ARGUMENT, "block_mask.heads=%d is none of 1, nheads_k=%d, nheads=%d", x.heads, a.nheads_k, a.nheads);
    if (x.row_block != 64 && x.row_block != 128) return fail(FA_BAD_ARGUMENT, "block_mask.row_block=%d is neither 64 nor 128", x.row_block);
    if (x.key_block != 64 && x.key_block != 128) return fail(FA_BAD_ARGUMENT, "block_mask.key_block=%d is neither 64 nor 128", x.key_block);
    if (x.reserved) return fail(FA_BAD_ARGUMENT, "block_mask.reserved=%d is not 0", x.reserved);
    return FA_OK;
}

}  // namespace

fa_status check_options(const fa_attention_args& a) {
    if (a.has_softmax_scale != 0) {
        FA_RETURN_IF_ERROR(check_bool("has_softmax_scale", a.has_softmax_scale));
        if (!std::isfinite(a.softmax_scale)) return fail(FA_BAD_ARGUMENT, "softmax_scale=%g is not finite", a.softmax_scale);
    } else if (a.softmax_scale != 0) {
        return fail(FA_BAD_ARGUMENT, "softmax_scale=%g is set but has_softmax_scale is 0", a.softmax_scale);
    }
    if (!std::isfinite(a.softcap) || a.softcap < 0) return fail(FA_BAD_ARGUMENT, "softcap=%g is not a finite number >= 0", a.softcap);
    if (a.softcap > 0 && a.softcap < FLT_MIN)  // its reciprocal would be infinite
        return fail(FA_BAD_ARGUMENT, "softcap=%g is below %g, the smallest normal float", a.softcap, FLT_MIN);
    FA_RETURN_IF_ERROR(check_pointer("alibi_slopes", a.alibi_slopes, 4, false));
    if (a.bias_dtype && a.bias_dtype != FA_FLOAT32 && a.bias_dtype != a.dtype)
        return fail(FA_BAD_ARGUMENT, "bias_dtype=%s (%d) is neither float32 nor dtype=%s", dtype_name(a.bias_dtype), a.bias_dtype,
                    dtype_name(a.dtype));
    FA_RETURN_IF_ERROR(check_pointer("bias", a.bias.data, dtype_size(a.bias_dtype ? a.bias_dtype : a.dtype), false));
    FA_RETURN_IF_ERROR(check_pointer("sinks", a.sinks, 4, false));
    FA_RETURN_IF_ERROR(check_row_indices(a));
    FA_RETURN_IF_ERROR(check_block_mask(a));
    FA_RETURN_IF_ERROR(check_bool("causal", a.causal));
    FA_RETURN_IF_ERROR(check_bool("top_left", a.top_left));
    FA_RETURN_IF_ERROR(check_bool("has_window", a.has_window));
    FA_RETURN_IF_ERROR(check_bool("deterministic", a.deterministic));
    FA_RETURN_IF_ERROR(check_bool("allow_tf32", a.allow_tf32));
    FA_RETURN_IF_ERROR(check_bool("fast_accum", a.fast_accum));
    if (a.fast_accum && a.dtype != FA_FLOAT8_E4M3)
        return fail(FA_BAD_ARGUMENT, "fast_accum=1, but only dtype=float8_e4m3 has sums of 8-bit products");
    if (a.has_window) {
        if (a.window_left < -1) return fail(FA_BAD_ARGUMENT, "window_left=%" PRId64 " is below -1 (open)", a.window_left);
        if (a.window_right < -1) return fail(FA_BAD_ARGUMENT, "window_right=%" PRId64 " is below -1 (open)", a.window_right);
    } else if (a.window_left || a.window_right) {
        return fail(FA_BAD_ARGUMENT, "window_left=%" PRId64 ", window_right=%" PRId64 " are set but has_window is 0", a.window_left,
                    a.window_right);
    }
    if (a.attention_chunk < 0) return fail(FA_BAD_ARGUMENT, "attention_chunk=%d is negative", a.attention_chunk);
    if (!(a.dropout_p >= 0 && a.dropout_p < 1)) return fail(FA_BAD_ARGUMENT, "dropout_p=%g is outside 0 <= p < 1", a.dropout_p);
    if (a.num_threads < 0 || a.num_threads > 4096) return fail(FA_BAD_ARGUMENT, "num_threads=%d is outside 0 .. 4096", a.num_threads);
    FA_RETURN_IF_ERROR(check_range("first_head", a.first_head, 0, INT32_MAX - a.nheads));
    return FA_OK;
}

// ---- to the kernels ----

namespace {

ScoreView view(const fa_score_tensor& t) { return {t.data, t.batch_stride, t.head_stride, t.row_stride}; }
RowIndicesView view(const fa_row_indices& t, const fa_attention_args& a) {
    if (!t.data) return {};
    const RowIndicesForm form = t.numbers == 1   ? RowIndicesForm::kFrom
                                : t.numbers == 4 ? RowIndicesForm::kTwoIntervals
                                : a.causal       ? RowIndicesForm::kBetween
                                                 : RowIndicesForm::kOutside;
    return {t.data, t.batch_stride, t.head_stride, t.key_stride, a.nheads / t.heads, form};
}
BlockMaskView view(const fa_block_mask& t, const fa_attention_args& a) {
    if (!t.data) return {};
    const auto shift = [](int32_t block) { return block == 64 ? 6 : 7; };
    return {static_cast<const uint8_t*>(t.data),
            t.batch_stride,
            t.head_stride,
            t.row_stride,
            a.nheads / t.heads,
            shift(t.row_block),
            shift(t.key_block)};
}

}  // namespace

float softmax_scale_of(const fa_attention_args& a) {
    return a.has_softmax_scale ? a.softmax_scale : float(1.0 / std::sqrt(double(a.headdim)));
}

void put_options(const fa_attention_args& a, AttentionParams* params) {
    AttentionParams& p = *params;
    p.scale = softmax_scale_of(a);
    p.softcap = a.softcap;
    p.alibi_slopes = a.alibi_slopes, p.alibi_batch = a.alibi_batch_stride;
    p.bias = view(a.bias), p.bias_dtype = DType(a.bias_dtype ? a.bias_dtype : a.dtype), p.mask = view(a.mask);
    p.intervals = view(a.startend_row_indices, a);
    p.blocks = view(a.block_mask, a);
    p.top_left = a.top_left;
    const auto edge = [](int64_t w) { return int32_t(std::min<int64_t>(w, INT32_MAX)); };
    p.window_left = a.has_window ? edge(a.window_left) : -1;
    p.window_right = a.causal ? 0 : a.has_window ? edge(a.window_right) : -1;
    if (a.attention_chunk) p.chunk = divisor_of(a.attention_chunk);
    p.sinks = a.sinks;
    if (a.dropout_p > 0) {
        p.dropout_threshold = uint32_t(std::lround(double(a.dropout_p) * kDropoutChances));
        p.dropout_threshold = std::clamp(p.dropout_threshold, 1u, kDropoutChances - 1u);
        p.dropout_scale = float(kDropoutChances / (double(kDropoutChances) - p.dropout_threshold));
        dropout_key(a.dropout_seed, a.dropout_offset, p.dropout_key);
    }
    p.first_head = a.first_head;
    p.allow_tf32 = a.allow_tf32;
    p.fast_accum = a.fast_accum;
}

void add_arrays_of_options(const fa_attention_args& a, int64_t batch, int64_t rows_k, Regions<kMostRead>* read) {
    read->add(region("bias", a.bias, a.batch, a.seqlen_q, a.nheads, a.seqlen_k, dtype_size(a.bias_dtype ? a.bias_dtype : a.dtype)));
    read->add(region("mask", a.mask, a.batch, a.seqlen_q, a.nheads, a.seqlen_k, 1));
    const fa_row_indices& indices = a.startend_row_indices;
    read->add(Region{"startend_row_indices",
                     indices.data,
                     {{"batch", "batch", a.parts ? a.batch : batch, indices.batch_stride},
                      {"key", "keys", a.parts ? a.seqlen_k : rows_k, indices.key_stride},
                      {"head", "heads", indices.heads, indices.head_stride}},
                     indices.numbers,
                     4});
    const fa_block_mask& blocks = a.block_mask;
    if (blocks.data)
        read->add(Region{"block_mask",
                         blocks.data,
                         {{"batch", "batch", a.batch, blocks.batch_stride},
                          {"row", "blocks of rows", ceil_div(a.seqlen_q, blocks.row_block), blocks.row_stride},
                          {"head", "heads", blocks.heads, blocks.head_stride}},
                         ceil_div(a.seqlen_k, blocks.key_block),
                         1});
    read->add(Region{"alibi_slopes",
                     a.alibi_slopes,
                     {{"batch", "batch", a.batch, a.alibi_batch_stride}, {"row", "rows", 1, 0}, {"head", "nheads", 1, 0}},
                     a.nheads,
                     4});
    read->add(region("sinks", a.sinks, a.nheads, 4));
}

}  // namespace fa
