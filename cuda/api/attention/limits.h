// limits.h: what an attention kernel can serve, as data, and the reasons against calls that it cannot.
#pragma once

#include <cstdint>

#include "api/common/kernel.h"
#include "attention/common/params.h"

namespace fa {

constexpr uint32_t one(DType dtype) { return uint32_t(1) << int(dtype); }
constexpr uint32_t kFloat32 = one(DType::kFloat32), k16Bits = one(DType::kFloat16) | one(DType::kBFloat16),
                   kFloat8 = one(DType::kFloat8E4M3), kAllButFloat8 = kFloat32 | k16Bits;

// What a call may ask for. Rows with kAllFeatures, those of the general kernels, of the CPU and of the mma_sm80 forward pass, take a new
// feature at once. Every other kernel names what it takes, so it refuses a new feature until it is added to its row.
enum Feature : uint32_t {
    kMaxScore = 1,
    kKeySums = 1 << 1,
    kVarlen = 1 << 2,
    kCache = 1 << 3,
    kPages = 1 << 4,
    k8BitCache = 1 << 5,
    kTf32 = 1 << 6,
    kFastAccum = 1 << 7,
    kLeftEdge = 1 << 8,
    kSoftcap = 1 << 9,
    kAlibi = 1 << 10,
    kBias = 1 << 11,
    kMask = 1 << 12,
    kSinks = 1 << 13,
    kDropout = 1 << 14,
    kTree = 1 << 15,
    kChunk = 1 << 16,
    kLeftpad = 1 << 17,
    kAnyScale = 1 << 18,
    kNoKeys = 1 << 19,
    kIntervals = 1 << 20,
    kBlockMask = 1 << 21,
    kSharedPrefix = 1 << 22,
    kAllFeatures = (1 << 23) - 1
};
constexpr uint32_t kOnlyOfCaches = kPages | k8BitCache | kTree | kLeftpad;
constexpr uint32_t kHints = kTf32 | kFastAccum | kSharedPrefix;  // permissions, which a kernel need not use
constexpr uint32_t kScoresOfTiles = kLeftEdge | kSoftcap | kAlibi | kBias | kMask | kSinks | kDropout;  // wgmma kernels, the backward pass
constexpr uint32_t kScoresOfDecode = kLeftEdge | kSoftcap | kAlibi | kSinks;

inline bool has_8bit_keys(const AttentionParams& p) { return p.cache.entries && p.cache.dtype != p.dtype; }
inline bool has_no_keys(const AttentionParams& p) { return p.seqlen_k == 0 || (p.cu_seqlens_q && p.total_k == 0); }

inline uint32_t features_of(const AttentionParams& p) {
    const auto when = [](bool asked, uint32_t feature) { return asked ? feature : 0; };
    return when(p.max_score, kMaxScore) | when(p.key_sums, kKeySums) | when(p.cu_seqlens_q, kVarlen) | when(p.cache.entries, kCache) |
           when(p.cache.block_table, kPages) | when(has_8bit_keys(p), k8BitCache) | when(p.allow_tf32, kTf32) |
           when(p.fast_accum, kFastAccum) | when(p.window_left >= 0, kLeftEdge) | when(p.softcap != 0, kSoftcap) |
           when(p.alibi_slopes, kAlibi) | when(p.bias.data, kBias) | when(p.mask.data, kMask) | when(p.sinks, kSinks) |
           when(p.dropout_threshold, kDropout) | when(p.tree.rows, kTree) | when(p.chunk.divisor, kChunk) |
           when(p.cache.leftpad, kLeftpad) | when(!(p.scale > 0), kAnyScale) | when(has_no_keys(p), kNoKeys) |
           when(p.intervals.data, kIntervals) | when(p.blocks.data, kBlockMask) | when(p.cache.shared_prefix, kSharedPrefix);
}
inline uint32_t features_of(const BackwardParams& b) { return features_of(b.forward); }

// How each feature is called, and the reason where a kernel does not take it. In the order of the bits.
struct FeatureText {
    const char *name, *refusal;
};
constexpr FeatureText kFeatureTexts[] = {{"max_score", "gives no max_score"},
                                         {"key_sums", "gives no key_sums"},
                                         {"packed sequences", "takes no packed sequences"},
                                         {"cache", "takes no cache"},
                                         {"pages", "block_table is set: it takes no pages"},
                                         {"8-bit cache", "cache_dtype: it takes no 8-bit cache"},
                                         {"tf32", ""},
                                         {"fast_accum", ""},
                                         {"window_left", "takes no window_left"},
                                         {"softcap", "takes no softcap"},
                                         {"ALiBi", "takes no ALiBi"},
                                         {"bias", "takes no bias"},
                                         {"mask", "takes no mask"},
                                         {"sinks", "takes no sinks"},
                                         {"dropout", "takes no dropout"},
                                         {"tree_mask", "takes no tree_mask"},
                                         {"attention_chunk", "takes no attention_chunk"},
                                         {"cache_leftpad", "takes no cache_leftpad"},
                                         {"softmax_scale <= 0", ""},  // the reason quotes it
                                         {"calls without keys", "there are no keys to load"},
                                         {"startend_row_indices", "takes no startend_row_indices"},
                                         {"block_mask", "takes no block_mask"},
                                         {"shared_prefix", ""}};
static_assert(sizeof kFeatureTexts / sizeof kFeatureTexts[0] == 23 && kAllFeatures == (1 << 23) - 1, "a text for every feature");

// Head dims: multiples of `step`, q and k from `least` to `most`, v from `least_v` to `most_v`.
struct HeadDims {
    int step, least, most, least_v, most_v;
};
constexpr HeadDims head_dims(int step, int most) { return {step, step, most, step, most}; }
constexpr HeadDims kAnyHeadDim = head_dims(1, 1024);

// How the rows of q, k, v and out, in the backward pass of dout and the gradients too, must lie in memory.
enum class Memory {
    kAny,
    kWideRows,   // they start at, and have, multiples of 16 bytes
    kTensorMaps  // that, and q, k, v and dout can be described to the copy engine
};

struct Limits {
    uint32_t dtypes;
    Gpus gpus = kAnyGpu;
    HeadDims head_dims = kAnyHeadDim;
    uint32_t takes = kAllFeatures;
    uint32_t needs = 0;  // features that a call must ask for
    int page_step = 1;   // pages of a multiple of so many keys
    Memory memory = Memory::kAny;
    bool sums_keys = false;  // computes key_sums itself; otherwise another kernel follows, which computes them from lse

    Refusal refuses(uint32_t call, const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) const;
    Refusal refuses(uint32_t call, const BackwardParams& b, const DeviceInfo& device, char* text, size_t size) const {
        return refuses(call, b.forward, device, text, size);
    }
    const char* misplaces(const AttentionParams& p, char* text, size_t size) const;
    const char* misplaces(const BackwardParams& b, char* text, size_t size) const;
    static const char* too_large(const AttentionParams& p, char* text, size_t size) {
        return say(text, size, "batch=%d x nheads=%d x seqlen_q=%d over seqlen_k=%d: too large for its 32-bit indices or a grid of blocks",
                   p.batch, p.nheads, p.seqlen_q, p.seqlen_k);
    }
    static const char* too_large(const BackwardParams& b, char* text, size_t size) { return too_large(b.forward, text, size); }
};

// Extents of q, k and v in memory: a varlen call has one batch entry for all sequences, a paged cache has one entry per page.
struct TensorExtents {
    int64_t batch_q, rows_q, batch_k, rows_k;
};
inline TensorExtents tensor_extents(const AttentionParams& p) {
    if (p.cu_seqlens_q) return {1, p.total_q, 1, p.total_k};
    return {p.batch, p.seqlen_q, p.cache.entries ? p.cache.entries : p.batch, p.cache.block_table ? p.cache.page_size : p.seqlen_k};
}

// nullptr if TMA can read the tensor: 16-byte aligned, with strides that are positive multiples of 16 bytes below 2^40. Otherwise the
// reason why not. The stride of an axis with one element does not matter.
const char* no_tensor_map(const char* name, const TensorView& t, int64_t batch, int64_t rows, int64_t heads, int element_bytes, char* text,
                          size_t size);
const char* no_tensor_map_of_keys(const AttentionParams& p, int element_bytes, char* text, size_t size);  // of k and v
// nullptr if rows start at, and have, multiples of 16 bytes, so that ordinary instructions can move so many at a time.
const char* no_wide_rows(const char* name, const TensorView& t, int columns, int element_bytes, char* text, size_t size);

// Row indices are 32-bit, and tiles reach past the last row.
inline bool rows_overflow(int64_t rows) { return rows > kMostBlocks - 1024; }

}  // namespace fa
