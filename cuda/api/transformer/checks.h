// checks.h: checks shared by the operations around attention. Each names the argument and quotes its value.
#pragma once

#include "api/common/checks.h"
#include "flash_attn_transformer.h"
#include "transformer/ops/ops.h"

namespace fa {

inline Region region(const char* name, const fa_matrix& t, int64_t rows, int64_t columns, size_t element) {
    return {
        name, t.data, {{"batch", "batch", 1, 0}, {"row", "rows", rows, t.row_stride}, {"head", "nheads", 1, 0}}, columns, int64_t(element)};
}

constexpr int32_t kMaxColumns = 1 << 24;
constexpr int64_t kMaxRows = (int64_t(1) << 31) - 1;

inline fa_status check_eps(float eps) {
    if (std::isfinite(eps) && eps >= 0) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "eps=%g is not a finite number >= 0", eps);
}

inline fa_status check_launch(int32_t programmatic, int32_t num_threads) {
    FA_RETURN_IF_ERROR(check_bool("programmatic", programmatic));
    return check_range("num_threads", num_threads, 0, 4096);
}

inline fa_status check_reserved(int32_t reserved) { return reserved ? fail(FA_BAD_ARGUMENT, "reserved=%d must be 0", reserved) : FA_OK; }

inline MatrixView view(const fa_matrix& t) { return {t.data, t.row_stride}; }

inline fa_status check_features(int32_t out_features, int32_t in_features) {
    FA_RETURN_IF_ERROR(check_range("in_features", in_features, 1, kMaxColumns));
    return check_range("out_features", out_features, 1, kMaxColumns);
}

inline fa_status check_pair(const char* name, int32_t pair, int32_t out_features) {
    FA_RETURN_IF_ERROR(check_bool(name, pair));
    if (pair && out_features % 2)
        return fail(FA_BAD_ARGUMENT, "out_features=%d is odd, but %s=1 takes one half as gate and one as up", out_features, name);
    return FA_OK;
}

// Checks the arguments that fa_linear and fa_w4_linear share and copies them to *params. The caller has checked device and dtype,
// and check_weight(required) checks the weight. `weight_dtype` is the default of bias_dtype. With pointers = false (a query)
// arrays may be NULL.
template <typename Args, typename Params, typename CheckWeight>
fa_status check_product(const Args& a, DType weight_dtype, bool pointers, const CheckWeight& check_weight, Params* params) {
    Params& p = *params;
    FA_RETURN_IF_ERROR(check_dtype("bias_dtype", a.bias_dtype, int32_t(weight_dtype), &p.bias_dtype));
    FA_RETURN_IF_ERROR(check_dtype("norm_dtype", a.norm_dtype, a.dtype, &p.norm_dtype));
    FA_RETURN_IF_ERROR(check_dtype("out_dtype", a.out_dtype, a.dtype, &p.out_dtype));
    FA_RETURN_IF_ERROR(check_dtype("residual_dtype", a.residual_dtype, int32_t(p.out_dtype), &p.residual_dtype));
    FA_RETURN_IF_ERROR(check_features(a.out_features, a.in_features));
    FA_RETURN_IF_ERROR(check_pair("swiglu", a.swiglu, a.out_features));
    FA_RETURN_IF_ERROR(check_range("rows", a.rows, 0, kMaxRows));
    const bool required = a.rows > 0 && pointers;
    FA_RETURN_IF_ERROR(check_array("x", a.x.data, p.dtype, required));
    FA_RETURN_IF_ERROR(check_weight(required));
    FA_RETURN_IF_ERROR(check_array("residual", a.residual.data, p.residual_dtype, false));
    FA_RETURN_IF_ERROR(check_array("out", a.out.data, p.out_dtype, required));
    FA_RETURN_IF_ERROR(check_array("bias", a.bias, p.bias_dtype, false));
    FA_RETURN_IF_ERROR(check_array("norm_weight", a.norm_weight, p.norm_dtype, false));
    const int32_t columns = a.swiglu ? a.out_features / 2 : a.out_features;
    const Region out = region("out", a.out, a.rows, columns, size_of(p.out_dtype));
    FA_RETURN_IF_ERROR(check_output(out));
    if (required && a.out.data == a.x.data) return fail(FA_BAD_ARGUMENT, "out.data is x.data, which is read meanwhile");
    if (required && a.out.data == a.residual.data &&
        (p.out_dtype != p.residual_dtype || (a.rows > 1 && a.out.row_stride != a.residual.row_stride)))
        return fail(FA_BAD_ARGUMENT, "out.data is residual.data, but not with the same dtype and row_stride");
    FA_RETURN_IF_ERROR(check_apart(out, region("x", a.x, a.rows, a.in_features, size_of(p.dtype))));
    FA_RETURN_IF_ERROR(check_apart(out, region("residual", a.residual, a.rows, columns, size_of(p.residual_dtype)), true));
    FA_RETURN_IF_ERROR(check_apart(out, region("bias", a.bias, a.out_features, size_of(p.bias_dtype))));
    FA_RETURN_IF_ERROR(check_apart(out, region("norm_weight", a.norm_weight, a.in_features, size_of(p.norm_dtype))));
    FA_RETURN_IF_ERROR(check_eps(a.eps));
    FA_RETURN_IF_ERROR(check_launch(a.programmatic, a.num_threads));
    p.x = view(a.x), p.residual = view(a.residual), p.out = view(a.out);
    p.bias = a.bias, p.norm_weight = a.norm_weight, p.eps = a.eps;
    p.rows = a.rows, p.in_features = a.in_features, p.out_features = a.out_features, p.swiglu = a.swiglu;
    p.programmatic = a.programmatic;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

}  // namespace fa
