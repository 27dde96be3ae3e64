// validate_w4.cpp: checks the arguments of the operations with 4-bit weights before any launch.
#include <cstdio>

#include "api/transformer/checks.h"
#include "api/transformer/validate.h"

namespace fa {
namespace {

fa_status check_format(const char* name, int32_t format, w4::Format* found) {
    if (format < FA_NVFP4 || format > FA_INT4)
        return fail(FA_BAD_ARGUMENT, "%s=%d is none of nvfp4 (1), mxfp4 (2), int4 (3)", name, format);
    *found = w4::Format(format);
    return FA_OK;
}

fa_status check_compute_dtype(const char* name, int32_t dtype, DType* found) {
    if (dtype != FA_FLOAT16 && dtype != FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "%s=%d is neither float16 (2) nor bfloat16 (3), which products are made in", name, dtype);
    *found = DType(dtype);
    return FA_OK;
}

fa_status check_weight(const fa_w4_weight& w, W4View* found) {
    FA_RETURN_IF_ERROR(check_format("format", w.format, &found->format));
    FA_RETURN_IF_ERROR(check_features(w.out_features, w.in_features));
    FA_RETURN_IF_ERROR(check_reserved(w.reserved));
    FA_RETURN_IF_ERROR(check_pointer("codes", w.codes, 1, true));
    FA_RETURN_IF_ERROR(check_pointer("scales", w.scales, size_t(w4::scale_bytes_of(found->format)), true));
    FA_RETURN_IF_ERROR(check_pointer("tensor_scale", w.tensor_scale, 4, w.format == FA_NVFP4));
    found->codes = w.codes, found->scales = w.scales, found->tensor_scale = w.tensor_scale;
    found->out_features = w.out_features, found->in_features = w.in_features;
    return FA_OK;
}

// The arrays of a weight with 4-bit elements.
Regions<3> arrays_of(const fa_w4_weight& w, const W4View& view) {
    Regions<3> arrays;
    const int64_t rows = w.out_features, columns = w.in_features, block = w4::block_of(view.format);
    arrays.add(region("codes", w.codes, rows * ((columns + 1) / 2), 1));
    arrays.add(region("scales", w.scales, rows * ((columns + block - 1) / block), size_t(w4::scale_bytes_of(view.format))));
    arrays.add(region("tensor_scale", w.tensor_scale, 1, 4));
    return arrays;
}

fa_status check_packed(const void* packed, bool required) {
    if (!packed) return required ? fail(FA_BAD_ARGUMENT, "packed is NULL") : FA_OK;
    if (reinterpret_cast<uintptr_t>(packed) % 128) return fail(FA_BAD_ARGUMENT, "packed=%p is not aligned to 128 bytes", packed);
    return FA_OK;
}

// Compares the header of a packed weight in host memory with the arguments.
fa_status check_header(const W4LinearParams& p) {
    const auto& header = *static_cast<const w4::PackedHeader*>(p.packed);
    const struct {
        const char* name;
        int32_t packed, given;
    } fields[] = {{"format", header.format, int32_t(p.format)},
                  {"compute_dtype", header.dtype, int32_t(p.compute_dtype)},
                  {"swiglu", header.paired, int32_t(p.swiglu)},
                  {"out_features", header.out_features, p.out_features},
                  {"in_features", header.in_features, p.in_features}};
    for (const auto& field : fields)
        if (field.packed != field.given)
            return fail(FA_BAD_ARGUMENT, "%s=%d, but the weight was packed with %d", field.name, field.given, field.packed);
    return FA_OK;
}

}  // namespace

fa_status validate(const fa_w4_quantize_args* args, W4QuantizeParams* params) {
    fa_w4_quantize_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_w4_quantize_args", sizeof a, &a));
    W4QuantizeParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_weight(a.out, &p.out));
    FA_RETURN_IF_ERROR(check_array("w", a.w.data, p.dtype, true));
    FA_RETURN_IF_ERROR(check_bool("search", a.search));
    FA_RETURN_IF_ERROR(check_launch(0, a.num_threads));
    Regions<1> read;
    read.add(region("w", a.w, a.out.out_features, a.out.in_features, size_of(p.dtype)));
    FA_RETURN_IF_ERROR(check_apart(arrays_of(a.out, p.out), read));
    p.w = view(a.w), p.search = a.search;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status validate(const fa_w4_dequantize_args* args, W4DequantizeParams* params) {
    fa_w4_dequantize_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_w4_dequantize_args", sizeof a, &a));
    W4DequantizeParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("out_dtype", a.out_dtype, 0, &p.out_dtype));
    FA_RETURN_IF_ERROR(check_weight(a.weight, &p.weight));
    FA_RETURN_IF_ERROR(check_array("out", a.out.data, p.out_dtype, true));
    const Region out = region("out", a.out, a.weight.out_features, a.weight.in_features, size_of(p.out_dtype));
    FA_RETURN_IF_ERROR(check_output(out));
    for (const Region& read : arrays_of(a.weight, p.weight)) FA_RETURN_IF_ERROR(check_apart(out, read));
    FA_RETURN_IF_ERROR(check_launch(0, a.num_threads));
    FA_RETURN_IF_ERROR(check_reserved(a.reserved));
    p.out = view(a.out);
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status packed_bytes(int32_t format, int32_t out_features, int32_t in_features, int32_t pair, int64_t* bytes) {
    w4::Format found{};
    if (!bytes) return fail(FA_BAD_ARGUMENT, "bytes is NULL");
    FA_RETURN_IF_ERROR(check_format("format", format, &found));
    FA_RETURN_IF_ERROR(check_features(out_features, in_features));
    FA_RETURN_IF_ERROR(check_pair("pair", pair, out_features));
    *bytes = w4::packed_bytes(found, out_features, in_features, pair);
    return FA_OK;
}

fa_status validate(const fa_w4_pack_args* args, W4PackParams* params) {
    fa_w4_pack_args a;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_w4_pack_args", sizeof a, &a));
    W4PackParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_compute_dtype("dtype", a.dtype, &p.dtype));
    FA_RETURN_IF_ERROR(check_weight(a.weight, &p.weight));
    int64_t bytes;
    FA_RETURN_IF_ERROR(packed_bytes(a.weight.format, a.weight.out_features, a.weight.in_features, a.pair, &bytes));
    FA_RETURN_IF_ERROR(check_packed(a.packed, true));
    if (a.packed_bytes < bytes)
        return fail(FA_BAD_ARGUMENT, "packed_bytes=%" PRId64 ", but the packed weight has %" PRId64, a.packed_bytes, bytes);
    for (const Region& read : arrays_of(a.weight, p.weight)) FA_RETURN_IF_ERROR(check_apart(region("packed", a.packed, bytes, 1), read));
    FA_RETURN_IF_ERROR(check_launch(0, a.num_threads));
    p.packed = a.packed, p.pair = a.pair;
    FA_RETURN_IF_ERROR(find_threads(a.device, a.num_threads, &p.num_threads));
    return FA_OK;
}

fa_status validate(const fa_w4_linear_args* args, Pointers pointers, fa_w4_linear_args* full, W4LinearParams* params) {
    fa_w4_linear_args& a = *full;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_w4_linear_args", sizeof a, &a));
    W4LinearParams& p = *params;
    p = {};
    FA_RETURN_IF_ERROR(check_device(a.device));
    FA_RETURN_IF_ERROR(check_dtype("dtype", a.dtype, 0, &p.dtype));
    FA_RETURN_IF_ERROR(check_compute_dtype("compute_dtype", a.compute_dtype, &p.compute_dtype));
    FA_RETURN_IF_ERROR(check_format("format", a.format, &p.format));
    const auto check_weight = [&](bool required) { return check_packed(a.packed, required); };
    FA_RETURN_IF_ERROR(check_product(a, p.compute_dtype, pointers == Pointers::kRequired, check_weight, &p));
    const int64_t bytes = w4::packed_bytes(p.format, p.out_features, p.in_features, p.swiglu);
    FA_RETURN_IF_ERROR(check_apart(region("out", a.out, a.rows, a.swiglu ? a.out_features / 2 : a.out_features, size_of(p.out_dtype)),
                                   region("packed", a.packed, bytes, 1)));
    p.packed = a.packed;
    return a.device == FA_CPU && p.packed && a.rows > 0 ? check_header(p) : FA_OK;
}

fa_status check_workspace_apart(const void* workspace, const W4LinearParams& p, size_t bytes) {
    const auto rows_of = [&](const char* name, const MatrixView& m, int64_t columns, DType dtype) {
        return region(name, fa_matrix{m.data, m.row}, p.rows, columns, size_of(dtype));
    };
    Regions<6> arrays;
    arrays.add(rows_of("x", p.x, p.in_features, p.dtype));
    arrays.add(rows_of("residual", p.residual, p.columns(), p.residual_dtype));
    arrays.add(rows_of("out", p.out, p.columns(), p.out_dtype));
    arrays.add(region("packed", p.packed, w4::packed_bytes(p.format, p.out_features, p.in_features, p.swiglu), 1));
    arrays.add(region("bias", p.bias, p.out_features, size_of(p.bias_dtype)));
    arrays.add(region("norm_weight", p.norm_weight, p.in_features, size_of(p.norm_dtype)));
    for (const Region& array : arrays) FA_RETURN_IF_ERROR(check_apart(region("workspace", workspace, int64_t(bytes), 1), array));
    return FA_OK;
}

fa_status check_workspace_apart(const void* workspace, const W4ChainParams& chain, size_t bytes) {
    for (int i = 0; i < chain.count; ++i) FA_RETURN_IF_ERROR(check_workspace_apart(workspace, chain.products[i], bytes));
    return FA_OK;
}

fa_status validate(const fa_w4_linear_chain_args* args, Pointers pointers, fa_w4_linear_chain_args* full, W4ChainParams* params) {
    fa_w4_linear_chain_args& a = *full;
    FA_RETURN_IF_ERROR(copy_args(args, "fa_w4_linear_chain_args", sizeof a, &a));
    W4ChainParams& chain = *params;
    chain = {};
    FA_RETURN_IF_ERROR(check_range("count", a.count, 1, W4ChainParams::kMost));
    FA_RETURN_IF_ERROR(check_range("ahead_count", a.ahead_count, 0, W4ChainParams::kMostAhead));
    for (int i = 0; i < a.ahead_count; ++i) {
        if (reinterpret_cast<uintptr_t>(a.ahead[i]) % 16 || !a.ahead[i])
            return fail(FA_BAD_ARGUMENT, "ahead[%d]=%p is NULL or not aligned to 16 bytes", i, a.ahead[i]);
        if (a.ahead_bytes[i] < 0) return fail(FA_BAD_ARGUMENT, "ahead_bytes[%d]=%" PRId64 " is negative", i, a.ahead_bytes[i]);
        chain.ahead[i] = a.ahead[i], chain.ahead_bytes[i] = a.ahead_bytes[i];
    }
    chain.ahead_count = a.ahead_count;
    if (!a.products) return fail(FA_BAD_ARGUMENT, "products is NULL");
    chain.count = a.count;
    for (int i = 0; i < a.count; ++i) {
        const auto* at = reinterpret_cast<const unsigned char*>(a.products) + size_t(i) * a.products->struct_size;
        const auto* const product = reinterpret_cast<const fa_w4_linear_args*>(at);
        if (product->struct_size != a.products->struct_size)
            return fail(FA_BAD_ARGUMENT, "products[%d].struct_size=%zu, but products[0] has %zu", i, product->struct_size,
                        a.products->struct_size);
        fa_w4_linear_args one;
        if (const fa_status status = validate(product, pointers, &one, &chain.products[i]); status != FA_OK) {
            char text[512];
            std::snprintf(text, sizeof text, "%s", last_error());
            return fail(status, "products[%d]: %s", i, text);
        }
        if (one.device != a.products->device)
            return fail(FA_BAD_ARGUMENT, "products[%d].device=%d, but products[0] has %d", i, one.device, a.products->device);
        if (one.kernel) return fail(FA_BAD_ARGUMENT, "products[%d].kernel=%s must be NULL", i, one.kernel);
        if (one.workspace) return fail(FA_BAD_ARGUMENT, "products[%d].workspace=%p must be NULL: the chain has one", i, one.workspace);
    }
    return FA_OK;
}

}  // namespace fa
