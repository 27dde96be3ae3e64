// round_x.h: x as the kernels read it when it is normed, or not of their dtype, or not aligned.
#pragma once

#include <cuda_runtime_api.h>

#include "linear/linear.h"

namespace fa {

// Elements in a row of rounded x: whole tiles.
FA_HOST_DEVICE constexpr int64_t rounded_columns(int32_t in_features) { return w4::column_tiles(in_features) * w4::kTileColumns; }

// to (rows, rounded_columns) = norm(x), rounded to the compute dtype, zeros behind its columns. `to` is aligned to 16 bytes. Every GPU.
cudaError_t round_x(const W4LinearParams& params, void* to, cudaStream_t stream);

}  // namespace fa
