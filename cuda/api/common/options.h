// options.h: checks of the fields of fa_attention_args that say what is computed, not where arrays are or how long they are.
#pragma once

#include <cfloat>
#include <cinttypes>
#include <cmath>

#include "api/common/checks.h"

namespace fa {

inline fa_status check_row_indices(const fa_attention_args& a) {
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

inline fa_status check_block_mask(const fa_attention_args& a) {
    const fa_block_mask& x = a.block_mask;
    if (!x.data) return FA_OK;
    if (x.heads != 1 && x.heads != a.nheads_k && x.heads != a.nheads)
        return fail(FA_BAD_ARGUMENT, "block_mask.heads=%d is none of 1, nheads_k=%d, nheads=%d", x.heads, a.nheads_k, a.nheads);
    if (x.row_block != 64 && x.row_block != 128) return fail(FA_BAD_ARGUMENT, "block_mask.row_block=%d is neither 64 nor 128", x.row_block);
    if (x.key_block != 64 && x.key_block != 128) return fail(FA_BAD_ARGUMENT, "block_mask.key_block=%d is neither 64 nor 128", x.key_block);
    if (x.reserved) return fail(FA_BAD_ARGUMENT, "block_mask.reserved=%d is not 0", x.reserved);
    if (a.parts) return fail(FA_UNSUPPORTED, "block_mask.data is set with parts: its blocks count from the start of whole sequences");
    return FA_OK;
}

inline fa_status check_options(const fa_attention_args& a) {
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

}  // namespace fa
