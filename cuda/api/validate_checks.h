// validate_checks.h: checks that several validations share. Each names the argument and quotes its value.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "attention/params.h"
#include "flash_attn.h"
#include "ops/ops.h"
#include "regions.h"
#include "status.h"

namespace fa {

constexpr int64_t kMaxLength = (int64_t(1) << 31) - 4096;  // tile arithmetic may step a tile beyond the end in int32

inline const char* dtype_name(int32_t dtype) {
    switch (dtype) {
        case FA_FLOAT32: return "float32";
        case FA_FLOAT16: return "float16";
        case FA_BFLOAT16: return "bfloat16";
        case FA_FLOAT8_E4M3: return "float8_e4m3";
        case FA_INT8: return "int8";
    }
    return "unknown";
}

inline size_t dtype_size(int32_t dtype) { return dtype == FA_FLOAT32 ? 4 : dtype == FA_FLOAT8_E4M3 || dtype == FA_INT8 ? 1 : 2; }

inline fa_status check_pointer(const char* name, const void* data, size_t alignment, bool required) {
    if (!data) return required ? fail(FA_BAD_ARGUMENT, "%s.data is NULL", name) : FA_OK;
    if (reinterpret_cast<uintptr_t>(data) % alignment)
        return fail(FA_BAD_ARGUMENT, "%s.data=%p is not aligned to its element size of %zu bytes", name, data, alignment);
    return FA_OK;
}

inline fa_status check_bool(const char* name, int32_t value) {
    return value == 0 || value == 1 ? FA_OK : fail(FA_BAD_ARGUMENT, "%s=%d is neither 0 nor 1", name, value);
}

inline fa_status check_length(const char* name, int64_t value) {
    if (value < 0) return fail(FA_BAD_ARGUMENT, "%s=%" PRId64 " is negative", name, value);
    if (value > kMaxLength) return fail(FA_UNSUPPORTED, "%s=%" PRId64 " is above %" PRId64, name, value, kMaxLength);
    return FA_OK;
}

// Rows of all heads together: few enough that no size derived from them wraps, and far more than any memory holds.
constexpr int64_t kMaxTotalRows = int64_t(1) << 42;

inline fa_status check_total(int64_t batch, const char* heads_name, int64_t heads, const char* rows_name, int64_t rows) {
    if (heads <= kMaxTotalRows / std::max<int64_t>(batch, 1) / std::max<int64_t>(rows, 1)) return FA_OK;
    return fail(FA_UNSUPPORTED, "batch=%" PRId64 " x %s=%" PRId64 " x %s=%" PRId64 " is above 2^42 rows", batch, heads_name, heads,
                rows_name, rows);
}

inline int32_t default_threads() {
    if (const char* text = std::getenv("FLASH_ATTN_NUM_THREADS")) {
        const long n = std::strtol(text, nullptr, 10);
        if (n >= 1 && n <= 4096) return int32_t(n);
    }
    return int32_t(std::max(1u, std::thread::hardware_concurrency()));
}

// A caller compiled against an older, shorter struct: the fields it does not know are zero, which means the default.
template <typename Args>
fa_status copy_args(const Args* args, const char* name, size_t smallest, Args* full) {
    if (!args) return fail(FA_BAD_ARGUMENT, "%s is NULL", name);
    if (args->struct_size < smallest || args->struct_size > 65536)
        return fail(FA_BAD_ARGUMENT, "%s.struct_size=%zu: set it to sizeof(%s) = %zu", name, args->struct_size, name, sizeof(Args));
    std::memset(full, 0, sizeof(Args));
    std::memcpy(full, args, std::min(args->struct_size, sizeof(Args)));
    const auto* bytes = reinterpret_cast<const unsigned char*>(args);
    for (size_t i = sizeof(Args); i < args->struct_size; ++i)
        if (bytes[i])
            return fail(FA_UNSUPPORTED, "%s sets a field this library (%s) does not know: byte %zu is not zero", name, fa_version(), i);
    return FA_OK;
}

#define FA_RETURN_IF_ERROR(call)                                                \
    do {                                                                        \
        if (const fa_status status_ = (call); status_ != FA_OK) return status_; \
    } while (0)

inline TensorView view(const fa_tensor& t) { return {t.data, t.batch_stride, t.row_stride, t.head_stride}; }
inline fa_status check_device(int32_t device) {
    if (device == FA_CPU || device == FA_CUDA) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "device=%d is neither FA_CPU (1) nor FA_CUDA (2)", device);
}

// ---- of the small operations and of products ----

constexpr int32_t kMaxColumns = 1 << 24;
constexpr int64_t kMaxRows = (int64_t(1) << 31) - 1;

// A dtype field: its value, `otherwise` when it is 0.
inline fa_status check_dtype(const char* name, int32_t dtype, int32_t otherwise, DType* found) {
    if (!dtype) dtype = otherwise;
    if (dtype < FA_FLOAT32 || dtype > FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "%s=%d is none of float32 (1), float16 (2), bfloat16 (3)", name, dtype);
    *found = DType(dtype);
    return FA_OK;
}

inline fa_status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (low <= value && value <= high) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "%s=%" PRId64 " is outside %" PRId64 " .. %" PRId64, name, value, low, high);
}

inline size_t size_of(DType dtype) { return dtype_size(int32_t(dtype)); }

inline fa_status check_array(const char* name, const void* data, DType dtype, bool required) {
    return check_pointer(name, data, size_of(dtype), required);
}

inline fa_status check_eps(float eps) {
    if (std::isfinite(eps) && eps >= 0) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "eps=%g is not a finite number >= 0", eps);
}

inline fa_status check_launch(int32_t programmatic, int32_t num_threads) {
    FA_RETURN_IF_ERROR(check_bool("programmatic", programmatic));
    return check_range("num_threads", num_threads, 0, 4096);
}

inline fa_status check_reserved(int32_t reserved) { return reserved ? fail(FA_BAD_ARGUMENT, "reserved=%d must be 0", reserved) : FA_OK; }

inline int32_t threads_of(int32_t device, int32_t num_threads) {
    return num_threads ? num_threads : device == FA_CPU ? default_threads() : 1;
}

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

// What fa_linear and fa_w4_linear have in common: all but the weight, which check_weight(required) looks at. `dtype` and the device are
// done; bias_dtype is `weight_dtype` when it is not given. Without `pointers` nothing has to be there yet.
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
    p.programmatic = a.programmatic, p.num_threads = threads_of(a.device, a.num_threads);
    return FA_OK;
}

}  // namespace fa
