// normed_x.h: x as the tensor cores take it.
#pragma once

#include <cuda_runtime_api.h>

#include "linear/linear.h"

namespace fa {

// Elements from one row of normed x to the next: rows of 16-byte pieces.
FA_HOST_DEVICE constexpr int64_t normed_row(int32_t in_features) { return (int64_t(in_features) + 7) / 8 * 8; }

// to (rows, in_features) = norm(x) rounded to the compute dtype, aligned to 16 bytes. Every GPU; a block for each row.
cudaError_t normed_x(const W4LinearParams& params, void* to, cudaStream_t stream);

}  // namespace fa
