// registry_decode.cpp: the kernels for few rows of q against many keys, best first, and what each can serve.

#include "api/attention/refusals.h"
#include "api/attention/registry.h"
#include "api/common/serve.h"

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
#include "attention/decode/common/decode.h"
#endif

namespace fa {

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
namespace {

// Whether rows begin at multiples of 16 bytes and have a multiple of 16 bytes: the kernels copy and store 16 bytes at a time. If not,
// `text` says so.
bool has_wide_rows(const char* name, const TensorView& t, int columns, int element_bytes, char* text, size_t size) {
    const int step = 16 / element_bytes;  // a power of two, so that a mask replaces divisions, which would slow down every call
    if (!(reinterpret_cast<uintptr_t>(t.data) % 16) && !((columns | t.batch | t.row | t.head) & (step - 1))) return true;
    say(text, size, "%s of %d columns, data=%p, strides (%lld, %lld, %lld): it takes multiples of 16 bytes", name, columns, t.data,
        static_cast<long long>(t.batch), static_cast<long long>(t.row), static_cast<long long>(t.head));
    return false;
}
// Reasons that hold for all decode kernels. `options`: the score options that this kernel supports.
const char* any_refuses(const AttentionParams& p, const DeviceInfo& device, uint32_t options, char* text, size_t size) {
    if (const char* reason = needs_sm80(device, text, size)) return reason;
    if (is_float8(p)) return kNoFloat8;
    if (has_8bit_cache(p) && p.dtype == DType::kFloat32) return "dtype: it takes an 8-bit cache with a q of float16 or bfloat16";
    if (const char* reason = takes_head_dims(p, 1, 256, text, size)) return reason;
    if (p.cu_seqlens_q) return "takes no packed sequences";
    if (const char* reason = gives_no_max_score(p)) return reason;
    if (const char* reason = takes_options(p, options, text, size)) return reason;
    const int own = p.dtype == DType::kFloat32 ? 4 : 2, element = has_8bit_cache(p) ? 1 : own;
    const struct {
        const char* name;
        const TensorView& view;
        int columns, element;
    } tensors[] = {
        {"q", p.q, p.headdim, own}, {"k", p.k, p.headdim, element}, {"v", p.v, p.headdim_v, element}, {"out", p.out, p.headdim_v, own}};
    for (const auto& t : tensors)
        if (!has_wide_rows(t.name, t.view, t.columns, t.element, text, size)) return text;
    return nullptr;
}

// Reasons that hold for some decode kernels.
const char* takes_rows(const AttentionParams& p, int most, char* text, size_t size) {
    if (rows_of_key_head(p) <= most) return nullptr;
    return say(text, size, "seqlen_q=%d x %d heads of a key head: it takes %d rows", p.seqlen_q, p.group, most);
}
const char* takes_pieces(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (decode_cluster_blocks(p, device) > 0) return nullptr;
    return say(text, size, "num_splits=%d: it takes powers of two from 2 to %d, the blocks of a cluster", p.cache.num_splits,
               decode_most_cluster_blocks(device));
}
#if FA_WITH_WGMMA_SM90
const char* takes_tensor_cores(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = needs_hopper(device, text, size)) return reason;
    if (p.dtype == DType::kFloat32) return "takes float16 and bfloat16 only";
    if (decode_bucket(p) <= 128) return takes_rows(p, 16, text, size);
    return say(text, size, "headdim=%d, headdim_v=%d: up to 128", p.headdim, p.headdim_v);
}
#endif
template <DecodeKernel kernel>
const char* own_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if constexpr (kernel == DecodeKernel::kLanesCluster) {
        if (device.compute < 90) {
            return say(text, size, "needs sm_90 or newer for clusters of blocks, this device is sm_%d", device.compute);
        }
        if (has_8bit_cache(p)) {
            if (is_scaled_by_key(p.cache)) return "takes an 8-bit cache with one factor for all keys of a key head";
            if (decode_bucket(p) > 128)
                return say(text, size, "headdim=%d, headdim_v=%d: up to 128 with an 8-bit cache", p.headdim, p.headdim_v);
            if (const char* reason = takes_rows(p, 1, text, size)) return reason;
        }
        if (const char* reason = takes_rows(p, 4 * kLaneWarps, text, size)) return reason;
        return takes_pieces(p, device, text, size);
#if FA_WITH_WGMMA_SM90
    } else if constexpr (kernel == DecodeKernel::kCluster) {
        if (const char* reason = takes_tensor_cores(p, device, text, size)) return reason;
        return takes_pieces(p, device, text, size);
    } else if constexpr (kernel == DecodeKernel::kRing) {
        if (const char* reason = takes_tensor_cores(p, device, text, size)) return reason;
        if (has_8bit_cache(p) && decode_bucket(p) == 64)
            return say(text, size, "headdim=%d, headdim_v=%d: above 64 with an 8-bit cache", p.headdim, p.headdim_v);
        if (p.seqlen_k == 0) return "there are no keys to load";
        if (ring_box_rows(p, 64) < 16) {
            return say(text, size, "page_size=%d: it takes pages of a multiple of 16 keys", p.cache.page_size);
        }
        const int bytes = has_8bit_cache(p) ? 1 : 2;
        const TensorExtents t = tensor_extents(p);
        const char* reason = no_tensor_map("k", p.k, t.batch_k, t.rows_k, p.nheads_k, bytes, text, size);
        return reason ? reason : no_tensor_map("v", p.v, t.batch_k, t.rows_k, p.nheads_k, bytes, text, size);
#endif
    } else if constexpr (kernel == DecodeKernel::kLanes) {
        return p.dtype == DType::kFloat32 ? nullptr : "takes float32 only";
    } else {
        return p.dtype != DType::kFloat32 ? nullptr : "takes float16 and bfloat16 only";
    }
}

// Why a kernel outside this table is faster, or nullptr.
const char* any_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (has_8bit_cache(p)) return nullptr;
    if (rows_of_key_head(p) > 64) {
        return say(text, size, "seqlen_q=%d x %d heads of a key head: other kernels are faster from 65 rows on", p.seqlen_q, p.group);
    }
    if (wgmma_split_is_best(p, device)) return "wgmma_split_sm90 is faster for so many rows and keys";
    if (p.cache.entries) return nullptr;
    // K and V without a cache: decode kernels win where the heads alone leave half of the SMs idle, or share keys and have one
    // row each (H200).
    if (p.seqlen_k >= 512 && p.seqlen_q <= 16 &&
        (int64_t(p.batch) * p.nheads * 2 <= device.multiprocessors || (p.seqlen_q == 1 && p.group > 1)))
        return nullptr;
    return say(text, size, "batch=%d x nheads=%d, seqlen_q=%d, seqlen_k=%d, no cache: other kernels are faster", p.batch, p.nheads,
               p.seqlen_q, p.seqlen_k);
}

constexpr const char* name_of(DecodeKernel kernel) {
    switch (kernel) {
        case DecodeKernel::kLanesCluster: return "decode_lanes_cluster_sm90";
        case DecodeKernel::kCluster: return "decode_cluster_sm90";
        case DecodeKernel::kRing: return "decode_ring_sm90";
        case DecodeKernel::kSplit: return "decode_split_sm80";
        case DecodeKernel::kLanes: return "decode_lanes_sm80";
    }
    return "";
}

template <DecodeKernel kernel>
struct Row {
    static const char* refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
        constexpr bool kByTiles = kernel == DecodeKernel::kRing || kernel == DecodeKernel::kSplit;
        constexpr uint32_t kOptions = kByTiles ? kOptionsOfDecode | kLeftpad : kOptionsOfDecode;
        if (const char* reason = any_refuses(p, device, kOptions, text, size)) return reason;
        if (const char* reason = own_refuses<kernel>(p, device, text, size)) return reason;
        return overflows(p, !decode_fits(kernel, p, device), text, size);
    }
    static const char* yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
        if (const char* reason = any_yields(p, device, text, size)) return reason;
        if (kernel == DecodeKernel::kLanesCluster && !decode_lanes_cluster_wins(p, device))
            return "a launch with the keys in pieces, or tensor cores, are faster for so many keys or rows";
        if (kernel == DecodeKernel::kCluster && !decode_cluster_wins(p, device))
            return "a launch with the keys in pieces is faster for so many keys or sequences, or one row";
        return nullptr;
    }
    static size_t workspace(const AttentionParams& p, const DeviceInfo& device) { return decode_workspace(kernel, p, device); }
    static fa_status launch(const AttentionParams& p, const DeviceInfo& device, void* stream) {
        return launched(name_of(kernel), decode(kernel, p, nullptr, device, static_cast<cudaStream_t>(stream)));
    }
    static bool appends(const AppendParams& append, const DeviceInfo&) {
        return append.seqlen_new == 1 && !has_8bit_cache(append.attention);
    }
    static fa_status launch_whole(const AppendParams& append, const DeviceInfo& device, void* stream) {
        return launched(name_of(kernel), decode(kernel, append.attention, &append, device, static_cast<cudaStream_t>(stream)));
    }
};

template <DecodeKernel kernel>
constexpr Kernel row(const char* summary) {
    using This = Row<kernel>;
    Kernel row{name_of(kernel), summary, FA_CUDA, This::refuses, This::workspace, This::launch, This::yields};
    if (kernel == DecodeKernel::kLanesCluster) row.appends = This::appends, row.launch_whole = This::launch_whole;
    return row;
}

constexpr Kernel kDecodeKernels[] = {
    row<DecodeKernel::kLanesCluster>("short caches, up to 32 rows: CUDA cores, clusters of blocks; appends in the same launch"),
#if FA_WITH_WGMMA_SM90
    row<DecodeKernel::kCluster>("Hopper, short caches, up to 16 rows: mma.sync, clusters of blocks; float16, bfloat16, 8-bit caches"),
    row<DecodeKernel::kRing>("Hopper, up to 16 rows: one ring of the copy engine an SM; head dims to 128, pages of multiples of 16"),
#endif
    row<DecodeKernel::kSplit>("few rows against a long cache: mma.sync; any pages, 8-bit caches, head dims to 256"),
    row<DecodeKernel::kLanes>("few rows against a long cache in float32: CUDA cores, head dims to 256"),
};

}  // namespace

int decode_kernel_count() { return int(sizeof kDecodeKernels / sizeof kDecodeKernels[0]); }
const Kernel* decode_kernel_at(int index) { return &kDecodeKernels[index]; }

#else

int decode_kernel_count() { return 0; }
const Kernel* decode_kernel_at(int) { return nullptr; }

#endif

}  // namespace fa
