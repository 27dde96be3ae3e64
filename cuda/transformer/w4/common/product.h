// product.h: host functions that the kernels for products with 4-bit weights share: how x can be read, and the template arguments that
// follow from the format and the type.
#pragma once

#include <cuda_runtime_api.h>

#include <type_traits>

#include "transformer/common/elements.cuh"
#include "transformer/w4/common/params.h"

namespace fa::w4 {

// Row tiles that hold rows of W. The packed weight is padded to more tiles.
inline int used_row_tiles(const W4LinearParams& p) {
    return int(p.swiglu ? ceil_div(p.columns(), 8) : ceil_div(p.out_features, kTileRows));
}

// Whether x needs no norm and no rounding, and every row starts at a multiple of 16 bytes.
inline bool x_is_ready(const W4LinearParams& p) {
    return !p.norm_weight && p.dtype == p.compute_dtype && reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 &&
           (p.rows == 1 || p.x.row % 8 == 0);
}
// Whether x can be copied to shared memory in pieces of 16 bytes.
inline bool copies_x(const W4LinearParams& p) { return x_is_ready(p) && p.in_features % 8 == 0; }
// Whether x and the norm's weight can be read four elements at a time.
inline bool reads_by_fours(const W4LinearParams& p) {
    return p.in_features % 4 == 0 && by_fours(p.x.data, p.rows > 1 ? p.x.row : 0, p.dtype) &&
           (!p.norm_weight || by_fours(p.norm_weight, 0, p.norm_dtype));
}
// TMA requires rows of 16-bit elements that follow each other in memory, do not overlap, and lie less than 2^40 bytes apart.
inline bool copy_engine_takes_rows(const W4LinearParams& p, const MatrixView& view, int64_t columns) {
    constexpr int64_t kMost = (int64_t(1) << 40) / 2;
    return p.rows == 1 || (view.row >= columns && view.row < kMost);
}
inline bool fetches_x(const W4LinearParams& p) { return x_is_ready(p) && copy_engine_takes_rows(p, p.x, p.in_features); }

// Calls body with the format as a std::integral_constant.
template <typename Body>
cudaError_t with_format(Format format, const Body& body) {
    if (format == Format::kNvfp4) return body(std::integral_constant<Format, Format::kNvfp4>{});
    if (format == Format::kMxfp4) return body(std::integral_constant<Format, Format::kMxfp4>{});
    return body(std::integral_constant<Format, Format::kInt4>{});
}
// Calls body with the format as above, and with a value of the product's type.
template <typename Body>
cudaError_t with_format_and_type(const W4LinearParams& p, const Body& body) {
    return with_format(
        p.format, [&](auto format) { return p.compute_dtype == DType::kFloat16 ? body(format, __half{}) : body(format, __nv_bfloat16{}); });
}

}  // namespace fa::w4
