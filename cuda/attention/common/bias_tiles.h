// bias_tiles.h: whether the copy engine can load tiles of a bias.
#pragma once

#include "attention/common/params.h"

namespace fa {

// For calls of dtype float16 or bfloat16.
FA_HOST_DEVICE bool bias_is_float32(const AttentionParams& p) { return p.bias.data && p.bias_dtype == DType::kFloat32; }
FA_HOST_DEVICE int bias_element_bytes(const AttentionParams& p) { return bias_is_float32(p) ? 4 : 2; }

// The copy engine takes strides of 16 bytes and their multiples below 2^40; on an axis whose stride is 0 it sees one element. A packed call
// may say max_seqlen_q=0: no tile has 0 rows. A float32 bias is loaded as 16-bit numbers, whose places in a row are int32.
inline bool bias_has_tiles(const AttentionParams& p) {
    constexpr int64_t kEnd = int64_t(1) << 40;
    constexpr int32_t kMostFloat32Keys = 1 << 30;
    const int bytes = bias_element_bytes(p);
    const auto fits = [&](int64_t stride) { return stride >= 0 && stride < kEnd / bytes && stride * bytes % 16 == 0; };
    return p.bias.data && p.seqlen_q > 0 && (p.bias_dtype == p.dtype || (bias_is_float32(p) && p.seqlen_k <= kMostFloat32Keys)) &&
           reinterpret_cast<uintptr_t>(p.bias.data) % 16 == 0 && fits(p.bias.batch) && fits(p.bias.head) && fits(p.bias.row);
}

}  // namespace fa
