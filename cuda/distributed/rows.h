// rows.h: the arithmetic between ranks: small operations on (rows, heads, dim) arrays, in float32, in the order of the ranks. On a GPU one
// warp per row of a head (rows.cu), on the CPU one task per range of rows (rows_cpu.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/types.h"
#include "flash_attn.h"

namespace fa::distributed {

// A (rows, heads, dim) array: element (i, h, d) is data[i * row + h * head + d].
struct HeadRows {
    void* data;
    int64_t row, head;
};

// The shape of an operation, and where it runs.
struct RowsShape {
    DType dtype;  // of all arrays that are not float32
    int64_t rows;
    int32_t heads, dim;
    fa_device device;
    int32_t threads;
};

// to[h * rows + i] = dlse[h * rows + i] - sum over d of dout[i, h, d] out[i, h, d]; dlse may be NULL. The backward pass adds this to dP.
fa_status launch_negative_delta(const RowsShape& s, HeadRows out, HeadRows dout, const float* dlse, float* to, void* stream);

// to[i, h, d] = the sum over n of parts[n * stride + (i * heads + h) * dim + d], rounded once.
fa_status launch_sum(const RowsShape& s, HeadRows to, const void* parts, int64_t stride, int32_t count, void* stream);

// Merges results over disjoint keys, for (batch, seqlen) rows with rows = batch * seqlen. Part n has
//     out at outs[n * out_stride + (i * heads + h) * dim + d]  and  lse (batch, heads, seqlen) at lses + n * lse_stride.
// A part with lse = -inf changes nothing, whatever its out holds. lse may be NULL.
fa_status launch_merge_parts(const RowsShape& s, const TensorView& to, float* lse, int64_t seqlen, const void* outs, int64_t out_stride,
                             const float* lses, int64_t lse_stride, int32_t count, void* stream);

// to[(h * rows + i) * dim + d] = from[i, h, d] - n for int32 from, held to the int32 range.
fa_status launch_subtract(const RowsShape& s, HeadRows from, int32_t n, int32_t* to, void* stream);

// Copies `bytes` (a multiple of 4) of host memory, which may change as soon as the call returns; on a GPU the bytes are passed
// as kernel arguments.
fa_status launch_store(fa_device device, void* to, const void* from, size_t bytes, void* stream);
fa_status launch_zero(fa_device device, void* to, size_t bytes, void* stream);

#if FA_WITH_CUDA
// `rows` pieces of `width` bytes, from_pitch and to_pitch bytes apart, in memory that this GPU can read and write.
struct RowsCopy {
    char* to;
    const char* from;
    int64_t to_pitch, from_pitch, width, rows;
};
// Makes all copies by one kernel (several, if there are very many): on all SMs, or on a few that it takes from concurrent attention.
enum class Beside { kNothing, kAttention };
fa_status launch_copies(const std::vector<RowsCopy>& copies, Beside beside, void* stream);

namespace cuda {
fa_status negative_delta(const RowsShape& s, HeadRows out, HeadRows dout, const float* dlse, float* to, void* stream);
fa_status sum(const RowsShape& s, HeadRows to, const void* parts, int64_t stride, int32_t count, void* stream);
fa_status merge_parts(const RowsShape& s, const TensorView& to, float* lse, int64_t seqlen, const void* outs, int64_t out_stride,
                      const float* lses, int64_t lse_stride, int32_t count, void* stream);
fa_status subtract(const RowsShape& s, HeadRows from, int32_t n, int32_t* to, void* stream);
fa_status store(void* to, const void* from, size_t bytes, void* stream);
fa_status zero(void* to, size_t bytes, void* stream);
}  // namespace cuda
#endif

}  // namespace fa::distributed
