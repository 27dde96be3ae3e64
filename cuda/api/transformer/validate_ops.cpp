// validate_ops.cpp: checks the arguments of the small operations before any launch.
#include <cmath>

#include "api/transformer/checks.h"
#include "api/transformer/validate.h"
#include "common/constants.h"

namespace fa {
fa_status validate(const fa_rms_norm_args* args, RmsNormParams* params) {
    fa_rms_norm_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_rms_norm_args", sizeof a, &a));
    RmsNormParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_dtype("weight_dtype", a.weight_dtype, a.dtype, &p.weight_dtype));
    FA_RETURN_IF_ERROR(check_dtype("residual_dtype", a.residual_dtype, a.dtype, &p.residual_dtype));
    FA_RETURN_IF_ERROR(check_dtype("out_dtype", a.out_dtype, a.dtype, &p.out_dtype));
    FA_RETURN_IF_ERROR(check_range("dim", a.dim, 1, kMaxColumns));
    FA_RETURN_IF_ERROR(check_range("rows", a.rows, 0, kMaxRows));
    const bool any = a.rows > 0;
    FA_RETURN_IF_ERROR(check_array("x", a.x.data, p.dtype, any));
    FA_RETURN_IF_ERROR(check_array("residual", a.residual.data, p.residual_dtype, false));
    FA_RETURN_IF_ERROR(check_array("out", a.out.data, p.out_dtype, any));
    FA_RETURN_IF_ERROR(check_array("weight", a.weight, p.weight_dtype, any));
    const Region x = region("x", a.x, a.rows, a.dim, size_of(p.dtype)), out = region("out", a.out, a.rows, a.dim, size_of(p.out_dtype));
    const Region residual = region("residual", a.residual, a.rows, a.dim, size_of(p.residual_dtype));
    FA_RETURN_IF_ERROR(check_output(out));
    const Region weight = region("weight", a.weight, a.dim, size_of(p.weight_dtype));
    if (a.residual.data) {  // x is an output too
        FA_RETURN_IF_ERROR(check_output(x));
        FA_RETURN_IF_ERROR(check_apart(x, residual, true));
        FA_RETURN_IF_ERROR(check_apart(x, weight));
    }
    if (any && a.out.data == a.x.data && (p.out_dtype != p.dtype || (a.rows > 1 && a.out.row_stride != a.x.row_stride)))
        return fail(FA_BAD_ARGUMENT, "out.data is x.data, but not with the same dtype and row_stride");
    FA_RETURN_IF_ERROR(check_apart(out, x, true));
    FA_RETURN_IF_ERROR(check_apart(out, residual, true));
    FA_RETURN_IF_ERROR(check_apart(out, weight));
    FA_RETURN_IF_ERROR(check_eps(a.eps));
    FA_RETURN_IF_ERROR(check_launch(a.programmatic, a.num_threads));
    FA_RETURN_IF_ERROR(check_reserved(a.reserved));
    p.x = view(a.x), p.residual = view(a.residual), p.out = view(a.out), p.weight = a.weight;
    p.rows = a.rows, p.dim = a.dim, p.eps = a.eps;
    p.programmatic = a.programmatic;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status validate(const fa_rope_args* args, RopeParams* params) {
    fa_rope_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_rope_args", sizeof a, &a));
    RopeParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_dtype("table_dtype", a.table_dtype, a.dtype, &p.table_dtype));
    FA_RETURN_IF_ERROR(check_range("batch", a.batch, 0, INT32_MAX));
    FA_RETURN_IF_ERROR(check_range("nheads", a.nheads, 1, INT32_MAX));
    FA_RETURN_IF_ERROR(check_range("headdim", a.headdim, 1, kMaxColumns));
    FA_RETURN_IF_ERROR(check_range("rotary_dim", a.rotary_dim, 0, a.headdim));
    const int32_t rotary_dim = a.rotary_dim ? a.rotary_dim : a.headdim;
    if (rotary_dim % 2) return fail(FA_BAD_ARGUMENT, "rotary_dim=%d is odd: it counts both numbers of each pair", rotary_dim);
    FA_RETURN_IF_ERROR(check_length("seqlen", a.seqlen));
    FA_RETURN_IF_ERROR(check_total(a.batch, "nheads", a.nheads, "seqlen", a.seqlen));
    FA_RETURN_IF_ERROR(check_bool("interleaved", a.interleaved));
    FA_RETURN_IF_ERROR(check_bool("inverse", a.inverse));
    FA_RETURN_IF_ERROR(check_bool("per_token", a.per_token));
    FA_RETURN_IF_ERROR(check_range("table_rows", a.table_rows, 1, INT32_MAX));
    const bool any = a.batch > 0 && a.seqlen > 0;
    FA_RETURN_IF_ERROR(check_array("x", a.x.data, p.dtype, any));
    FA_RETURN_IF_ERROR(check_array("out", a.out.data, p.dtype, any));
    FA_RETURN_IF_ERROR(check_array("cos", a.cos, p.table_dtype, any));
    FA_RETURN_IF_ERROR(check_array("sin", a.sin, p.table_dtype, any));
    FA_RETURN_IF_ERROR(check_pointer("positions", a.positions, 4, a.per_token && any));
    const Region out = region("out", a.out, a.batch, a.seqlen, a.nheads, a.headdim, size_of(p.dtype));
    FA_RETURN_IF_ERROR(check_output(out));
    if (any && a.out.data == a.x.data &&
        ((a.batch > 1 && a.out.batch_stride != a.x.batch_stride) || (a.seqlen > 1 && a.out.row_stride != a.x.row_stride) ||
         (a.nheads > 1 && a.out.head_stride != a.x.head_stride)))
        return fail(FA_BAD_ARGUMENT, "out.data is x.data, but not with the same strides");
    FA_RETURN_IF_ERROR(check_apart(out, region("x", a.x, a.batch, a.seqlen, a.nheads, a.headdim, size_of(p.dtype)), true));
    Regions<1> written;
    Regions<3> read;
    written.add(out);
    const auto table = [&](const char* name, const void* data) {
        return region(name, fa_matrix{const_cast<void*>(data), a.table_row_stride}, a.table_rows, rotary_dim / 2, size_of(p.table_dtype));
    };
    read.add(table("cos", a.cos));
    read.add(table("sin", a.sin));
    read.add(region("positions", a.positions, a.per_token ? a.batch * a.seqlen : int64_t(a.batch), 4));
    FA_RETURN_IF_ERROR(check_apart(written, read));
    FA_RETURN_IF_ERROR(check_launch(a.programmatic, a.num_threads));
    if (!a.positions && a.seqlen > a.table_rows)
        return fail(FA_BAD_ARGUMENT, "seqlen=%" PRId64 " goes beyond table_rows=%" PRId64, a.seqlen, a.table_rows);
    if (a.positions && a.device == FA_CPU)
        for (int64_t i = 0, n = a.per_token ? a.batch * a.seqlen : int64_t(a.batch); i < n; ++i) {
            const int64_t last = a.positions[i] + (a.per_token || !any ? 0 : a.seqlen - 1);
            if (any && (a.positions[i] < 0 || last >= a.table_rows))
                return fail(FA_BAD_ARGUMENT,
                            "positions[%" PRId64 "]=%d reaches row %" PRId64 " of cos and sin, which have table_rows=%" PRId64, i,
                            a.positions[i], last, a.table_rows);
        }
    p.x = view(a.x), p.out = view(a.out);
    p.cos = a.cos, p.sin = a.sin, p.table_row = a.table_row_stride, p.positions = a.positions;
    p.batch = a.batch, p.seqlen = int32_t(a.seqlen), p.nheads = a.nheads, p.headdim = a.headdim;
    p.rotary_dim = rotary_dim, p.table_rows = int32_t(a.table_rows);
    p.per_token = a.per_token, p.interleaved = a.interleaved, p.inverse = a.inverse;
    p.programmatic = a.programmatic;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status validate(const fa_swiglu_args* args, SwigluParams* params) {
    fa_swiglu_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_swiglu_args", sizeof a, &a));
    SwigluParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_dtype("out_dtype", a.out_dtype, a.dtype, &p.out_dtype));
    FA_RETURN_IF_ERROR(check_range("dim", a.dim, 1, kMaxColumns));
    FA_RETURN_IF_ERROR(check_range("rows", a.rows, 0, kMaxRows));
    FA_RETURN_IF_ERROR(check_array("gate_up", a.gate_up.data, p.dtype, a.rows > 0));
    FA_RETURN_IF_ERROR(check_array("out", a.out.data, p.out_dtype, a.rows > 0));
    const Region out = region("out", a.out, a.rows, a.dim, size_of(p.out_dtype));
    FA_RETURN_IF_ERROR(check_output(out));
    if (a.rows > 0 && a.out.data == a.gate_up.data) return fail(FA_BAD_ARGUMENT, "out.data is gate_up.data, which is read meanwhile");
    FA_RETURN_IF_ERROR(check_apart(out, region("gate_up", a.gate_up, a.rows, 2 * int64_t(a.dim), size_of(p.dtype))));
    FA_RETURN_IF_ERROR(check_launch(a.programmatic, a.num_threads));
    p.gate_up = view(a.gate_up), p.out = view(a.out);
    p.rows = a.rows, p.dim = a.dim;
    p.programmatic = a.programmatic;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status validate(const fa_sample_args* args, SampleParams* params) {
    fa_sample_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_sample_args", sizeof a, &a));
    SampleParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_range("batch", a.batch, 0, INT32_MAX));
    FA_RETURN_IF_ERROR(check_range("vocab", a.vocab, 1, kMaxVocab));
    FA_RETURN_IF_ERROR(check_array("logits", a.logits.data, p.dtype, a.batch > 0));
    FA_RETURN_IF_ERROR(check_pointer("out", a.out, 4, a.batch > 0));
    FA_RETURN_IF_ERROR(check_pointer("seeds", a.seeds, 8, false));
    FA_RETURN_IF_ERROR(check_pointer("step", a.step, 4, false));
    if (!std::isfinite(a.temperature) || a.temperature < 0)
        return fail(FA_BAD_ARGUMENT, "temperature=%g is not a finite number >= 0", a.temperature);
    if (!(a.top_p >= 0 && a.top_p <= 1)) return fail(FA_BAD_ARGUMENT, "top_p=%g is outside 0 < top_p <= 1", a.top_p);
    if (a.top_k < 0) return fail(FA_BAD_ARGUMENT, "top_k=%d is negative", a.top_k);
    FA_RETURN_IF_ERROR(check_launch(a.programmatic, a.num_threads));
    FA_RETURN_IF_ERROR(check_reserved(a.reserved));
    const Region out = region("out", a.out, a.batch, 4);
    FA_RETURN_IF_ERROR(check_apart(out, region("logits", a.logits, a.batch, a.vocab, size_of(p.dtype))));
    FA_RETURN_IF_ERROR(check_apart(out, region("seeds", a.seeds, a.batch, 8)));
    p.logits = view(a.logits), p.out = a.out;
    p.seeds = a.seeds, p.step = a.step, p.step_stride = a.step_stride, p.seed = a.seed, p.offset = a.offset;
    p.batch = a.batch, p.vocab = a.vocab, p.top_k = a.top_k;
    const double scale = kLog2eDouble / double(a.temperature);
    p.greedy = !(scale <= 1e30);  // at such a low temperature only the largest logit has weight
    p.scale = p.greedy ? 0.0f : float(scale);
    p.top_p = a.top_p == 0 ? uint64_t(1) << 32 : uint64_t(std::ceil(double(a.top_p) * 4294967296.0));
    p.programmatic = a.programmatic;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status validate(const fa_linear_args* args, Pointers pointers, fa_linear_args* full, LinearParams* params) {
    fa_linear_args& a = *full;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_linear_args", sizeof a, &a));
    LinearParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_dtype("weight_dtype", a.weight_dtype, a.dtype, &p.weight_dtype));
    const auto check_weight = [&](bool required) { return check_array("weight", a.weight.data, p.weight_dtype, required); };
    FA_RETURN_IF_ERROR(check_product(a, p.weight_dtype, pointers == Pointers::kRequired, check_weight, &p));
    FA_RETURN_IF_ERROR(check_apart(region("out", a.out, a.rows, p.columns(), size_of(p.out_dtype)),
                                   region("weight", a.weight, a.out_features, a.in_features, size_of(p.weight_dtype))));
    FA_RETURN_IF_ERROR(check_reserved(a.reserved));
    p.weight = view(a.weight);
    return FA_OK;
}

}  // namespace fa
