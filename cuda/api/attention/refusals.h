// refusals.h: reasons for which several attention kernels refuse a call. Each function returns the reason, or nullptr for no objection. A
// reason is a constant, or text with values, written to `text`.
#pragma once

#include "api/common/device.h"
#include "api/common/serve.h"
#include "attention/common/params.h"

namespace fa {

constexpr const char* kNoFloat8 = "takes no float8_e4m3: of all kernels only fp8_sm90 (Hopper) does";
inline bool is_float8(const AttentionParams& p) { return p.dtype == DType::kFloat8E4M3; }

inline const char* takes_no_8bit_cache(const AttentionParams& p) {
    return p.cache.entries && p.cache.dtype != p.dtype ? "cache_dtype: it takes no 8-bit cache" : nullptr;
}
// For kernels that return only out and lse.
inline const char* gives_no_max_score(const AttentionParams& p) { return p.max_score ? "gives no max_score" : nullptr; }

#if FA_WITH_CUDA
inline const char* takes_16_bits(const AttentionParams& p) {
    return p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16 ? nullptr : "takes float16 and bfloat16 only";
}
inline const char* takes_head_dims(const AttentionParams& p, int step, int most, char* text, size_t size) {
    if (p.headdim <= most && p.headdim_v <= most && p.headdim % step == 0 && p.headdim_v % step == 0) return nullptr;
    if (step == 1) return say(text, size, "headdim=%d, headdim_v=%d: at most %d", p.headdim, p.headdim_v, most);
    return say(text, size, "headdim=%d, headdim_v=%d: multiples of %d up to %d", p.headdim, p.headdim_v, step, most);
}

// Score options, as bit sets. A kernel lists the options that it supports and refuses a call with any other, so a new option is
// refused until the kernel supports it. Kernels that evaluate mask.h for every (row, key) pair (naive, minimal, mma_sm80, simple, the
// CPU's) support all.
enum ScoreOption : uint32_t {
    kLeftEdge = 1,
    kSoftcap = 2,
    kAlibi = 4,
    kBias = 8,
    kMask = 16,
    kSinks = 32,
    kDropout = 64,
    kTree = 128,
    kChunk = 256,
    kLeftpad = 512
};
constexpr uint32_t kOptionsOfTiles = kLeftEdge | kSoftcap | kAlibi | kBias | kMask | kSinks | kDropout;  // wgmma kernels and
                                                                                                         // the backward pass
constexpr uint32_t kOptionsOfDecode = kLeftEdge | kSoftcap | kAlibi | kSinks;
inline const char* takes_options(const AttentionParams& p, uint32_t known, char* text, size_t size) {
    const struct {
        uint32_t option;
        bool used;
        const char* name;
    } options[] = {{kLeftEdge, p.window_left >= 0, "window_left"},    {kSoftcap, p.softcap != 0, "softcap"},
                   {kAlibi, p.alibi_slopes != nullptr, "ALiBi"},      {kBias, p.bias.data != nullptr, "bias"},
                   {kMask, p.mask.data != nullptr, "mask"},           {kSinks, p.sinks != nullptr, "sinks"},
                   {kDropout, p.dropout_threshold != 0, "dropout"},   {kTree, p.tree.rows != nullptr, "tree_mask"},
                   {kChunk, p.chunk.divisor != 0, "attention_chunk"}, {kLeftpad, p.cache.leftpad != nullptr, "cache_leftpad"}};
    for (const auto& o : options)
        if (o.used && !(known & o.option)) return say(text, size, "takes no %s", o.name);
    return nullptr;
}
inline const char* takes_positive_scale(const AttentionParams& p, char* text, size_t size) {
    return p.scale > 0 ? nullptr : say(text, size, "softmax_scale=%g: it takes positive ones", double(p.scale));
}

inline const char* too_many_blocks(const AttentionParams& p, int64_t blocks, char* text, size_t size) {
    if (blocks <= kMaxGrid) return nullptr;
    return say(text, size, "batch=%d x nheads=%d x seqlen_q=%d needs more blocks than a grid has", p.batch, p.nheads, p.seqlen_q);
}
inline const char* overflows(const AttentionParams& p, bool does, char* text, size_t size) {
    if (!does) return nullptr;
    return say(text, size, "batch=%d x nheads=%d x seqlen_q=%d over seqlen_k=%d overflows its 32-bit indices", p.batch, p.nheads,
               p.seqlen_q, p.seqlen_k);
}
// Row indices are 32-bit, and tiles reach past the last row.
inline bool rows_overflow(int64_t rows) { return rows > kMaxGrid - 1024; }

// Extents of q, k and v in memory: a varlen call has one batch entry for all sequences, a paged cache has one entry per page.
struct TensorExtents {
    int64_t batch_q, rows_q, batch_k, rows_k;
};
inline TensorExtents tensor_extents(const AttentionParams& p) {
    if (p.cu_seqlens_q) return {1, p.total_q, 1, p.total_k};
    return {p.batch, p.seqlen_q, p.cache.entries ? p.cache.entries : p.batch, p.cache.block_table ? p.cache.page_size : p.seqlen_k};
}
// For kernels that load q, k and v by TMA; k and v without rows are not loaded.
inline const char* no_tensor_maps(const AttentionParams& p, int element_bytes, char* text, size_t size) {
    const TensorExtents t = tensor_extents(p);
    const char* reason = no_tensor_map("q", p.q, t.batch_q, t.rows_q, p.nheads, element_bytes, text, size);
    if (!reason && t.rows_k) reason = no_tensor_map("k", p.k, t.batch_k, t.rows_k, p.nheads_k, element_bytes, text, size);
    if (!reason && t.rows_k) reason = no_tensor_map("v", p.v, t.batch_k, t.rows_k, p.nheads_k, element_bytes, text, size);
    return reason;
}

// Boxes of TMA must consist of whole groups of 8 rows, the period of the swizzle.
inline const char* takes_pages_of_8(const AttentionParams& p, char* text, size_t size) {
    if (!p.cache.block_table || p.cache.page_size % 8 == 0) return nullptr;
    return say(text, size, "page_size=%d: it takes pages of a multiple of 8 keys", p.cache.page_size);
}

// For rows that ordinary instructions read or write 16 bytes at a time. `step`: elements in 16 bytes.
inline const char* no_wide_access(const char* name, const TensorView& t, int step, char* text, size_t size) {
    if (!(reinterpret_cast<uintptr_t>(t.data) % 16 || t.batch % step || t.row % step || t.head % step)) return nullptr;
    return say(text, size, "%s.data=%p with strides (%lld, %lld, %lld): it moves 16 bytes at a time", name, t.data,
               static_cast<long long>(t.batch), static_cast<long long>(t.row), static_cast<long long>(t.head));
}
inline const char* no_wide_access(const char* name, const TensorView& t, char* text, size_t size) {
    return no_wide_access(name, t, 8, text, size);
}
#endif

}  // namespace fa
