// limits.cpp: compares the limits of an attention kernel with a call.
#include "api/attention/limits.h"

#include "api/common/checks.h"

namespace fa {
namespace {

int lowest(uint32_t bits) {
    int i = 0;
    while (!(bits >> i & 1)) ++i;
    return i;
}

const char* takes_others(uint32_t dtypes, char* text, size_t size) {
    if (dtypes == kAllButFloat8) return "takes no float8_e4m3: of all kernels only fp8_sm90 (Hopper) does";
    const int first = lowest(dtypes);
    const uint32_t rest = dtypes & ~(uint32_t(1) << first);
    return say(text, size, "takes %s%s%s only", dtype_name(first), rest ? " and " : "", rest ? dtype_name(lowest(rest)) : "");
}

const char* other_head_dims(const HeadDims& dims, const AttentionParams& p, char* text, size_t size) {
    const auto inside = [&](int d, int least, int most) { return least <= d && d <= most && d % dims.step == 0; };
    if (inside(p.headdim, dims.least, dims.most) && inside(p.headdim_v, dims.least_v, dims.most_v)) return nullptr;
    if (dims.least == dims.most)
        return say(text, size, "headdim=%d, headdim_v=%d: %d and %d alone", p.headdim, p.headdim_v, dims.most, dims.most_v);
    if (dims.step == 1) return say(text, size, "headdim=%d, headdim_v=%d: at most %d", p.headdim, p.headdim_v, dims.most);
    return say(text, size, "headdim=%d, headdim_v=%d: multiples of %d up to %d", p.headdim, p.headdim_v, dims.step, dims.most);
}

const char* needs_feature(uint32_t feature) {
    switch (feature) {
        case kCache: return "serves a cache alone";
        case kTf32: return "allow_tf32=0: its products are rounded to tf32, which float32 inputs must allow";
        case kSharedPrefix: return "shared_prefix=0: it looks for pages that sequences share, which the call must ask for";
        case kFastAccum: return "fast_accum=0: the tensor cores keep 14 bits of its sums, which the call must allow";
    }
    return "the call lacks what it is for";
}

}  // namespace

Refusal Limits::refuses(uint32_t call, const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) const {
    if (!(dtypes & one(p.dtype))) return {takes_others(dtypes, text, size), Check::kType};
    if (const Refusal found = outside(gpus, device, text, size); found.reason) return found;
    if (const char* reason = other_head_dims(head_dims, p, text, size)) return {reason, Check::kHeadDim};
    if (const uint32_t lacking = needs & ~call) return {needs_feature(lacking & -lacking), Check::kOption};
    if (const uint32_t others = call & ~takes) {
        const uint32_t first = others & -others;
        if (first == kAnyScale) return {say(text, size, "softmax_scale=%g: it takes positive ones", double(p.scale)), Check::kOption};
        return {kFeatureTexts[lowest(first)].refusal, Check::kOption};
    }
    if (p.cache.block_table && p.cache.page_size % page_step)
        return {say(text, size, "page_size=%d: it takes pages of a multiple of %d keys", p.cache.page_size, page_step), Check::kOption};
    return {};
}

const char* no_tensor_map(const char* name, const TensorView& t, int64_t batch, int64_t rows, int64_t heads, int element_bytes, char* text,
                          size_t size) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16) return say(text, size, "%s.data=%p is not aligned to 16 bytes", name, t.data);
    const struct {
        const char* axis;
        int64_t extent, stride;
    } axes[] = {{"batch", batch, t.batch}, {"row", rows, t.row}, {"head", heads, t.head}};
    const int64_t step = 16 / element_bytes, end = (int64_t(1) << 40) / element_bytes;
    for (const auto& [axis, extent, stride] : axes)
        if (extent > 1 && (stride <= 0 || stride % step || stride >= end))
            return say(text, size, "%s.%s_stride=%lld: TMA takes positive multiples of %d elements below 2^40 bytes", name, axis,
                       static_cast<long long>(stride), int(step));
    return nullptr;
}

const char* no_tensor_map_of_keys(const AttentionParams& p, int element_bytes, char* text, size_t size) {
    const TensorExtents t = tensor_extents(p);
    if (!t.rows_k) return nullptr;  // k and v without rows are not loaded
    const char* reason = no_tensor_map("k", p.k, t.batch_k, t.rows_k, p.nheads_k, element_bytes, text, size);
    return reason ? reason : no_tensor_map("v", p.v, t.batch_k, t.rows_k, p.nheads_k, element_bytes, text, size);
}

const char* no_wide_rows(const char* name, const TensorView& t, int columns, int element_bytes, char* text, size_t size) {
    const int step = 16 / element_bytes;  // a power of two, so that a mask replaces divisions, which would slow down every call
    if (!(reinterpret_cast<uintptr_t>(t.data) % 16) && !((columns | t.batch | t.row | t.head) & (step - 1))) return nullptr;
    return say(text, size, "%s of %d columns, data=%p, strides (%lld, %lld, %lld): it takes multiples of 16 bytes", name, columns, t.data,
               static_cast<long long>(t.batch), static_cast<long long>(t.row), static_cast<long long>(t.head));
}

const char* Limits::misplaces(const AttentionParams& p, char* text, size_t size) const {
    if (memory == Memory::kAny) return nullptr;
    const int own = size_of(p.dtype), of_keys = p.cache.entries ? size_of(p.cache.dtype) : own;
    if (memory == Memory::kTensorMaps) {
        const TensorExtents t = tensor_extents(p);
        const char* reason = no_tensor_map("q", p.q, t.batch_q, t.rows_q, p.nheads, own, text, size);
        if (!reason) reason = no_tensor_map_of_keys(p, of_keys, text, size);
        if (reason) return reason;
    } else {
        const char* reason = no_wide_rows("q", p.q, p.headdim, own, text, size);
        if (!reason) reason = no_wide_rows("k", p.k, p.headdim, of_keys, text, size);
        if (!reason) reason = no_wide_rows("v", p.v, p.headdim_v, of_keys, text, size);
        if (reason) return reason;
    }
    return no_wide_rows("out", p.out, p.headdim_v, size_of(p.out_dtype), text, size);
}

const char* Limits::misplaces(const BackwardParams& b, char* text, size_t size) const {
    const AttentionParams& p = b.forward;
    if (const char* reason = misplaces(p, text, size)) return reason;
    if (memory == Memory::kAny) return nullptr;
    const int own = size_of(p.dtype);
    const TensorExtents t = tensor_extents(p);
    if (memory == Memory::kTensorMaps)
        if (const char* reason = no_tensor_map("dout", b.dout, t.batch_q, t.rows_q, p.nheads, own, text, size)) return reason;
    const char* reason = no_wide_rows("dout", b.dout, p.headdim_v, own, text, size);
    if (!reason) reason = no_wide_rows("dq", b.dq, p.headdim, own, text, size);
    if (!reason) reason = no_wide_rows("dk", b.dk, p.headdim, own, text, size);
    return reason ? reason : no_wide_rows("dv", b.dv, p.headdim_v, own, text, size);
}

}  // namespace fa
