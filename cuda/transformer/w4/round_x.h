// round_x.h: makes a copy of x that every product can read, for an x that needs a norm or rounding, or is not aligned.
#pragma once

#include <cuda_runtime_api.h>

#include "transformer/w4/common/params.h"

namespace fa {

// Elements per row of the rounded x, a whole number of tiles; bytes of all rows.
FA_HOST_DEVICE constexpr int64_t rounded_columns(int32_t in_features) { return w4::column_tiles(in_features) * w4::kTileColumns; }
inline int64_t rounded_bytes(const W4LinearParams& p) { return 2 * p.rows * rounded_columns(p.in_features); }

// to (rows, rounded_columns) = norm(x), rounded to the compute dtype and padded with zeros. `to` is aligned to 16 bytes. For every GPU.
cudaError_t round_x(const W4LinearParams& params, void* to, cudaStream_t stream);

}  // namespace fa
