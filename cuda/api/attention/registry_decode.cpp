// registry_decode.cpp: the kernels for few rows of q against many keys, best first: what each takes, and to which calls it yields.
#include <algorithm>

#include "api/attention/limits.h"
#include "api/attention/registry.h"

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
#include "attention/common/tiles_mma_sm80.h"
#include "attention/decode/common/decode.h"
#include "attention/decode/wide_sm80/plan.h"
#endif

namespace fa {
namespace {

#if FA_WITH_CUDA && FA_WITH_MMA_SM80
const char* takes_rows(const AttentionParams& p, int most, char* text, size_t size) {
    if (rows_of_key_head(p) <= most) return nullptr;
    return say(text, size, "seqlen_q=%d x %d heads of a key head: it takes %d rows", p.seqlen_q, p.group, most);
}
const char* takes_pieces(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (decode_cluster_blocks(p, device) > 0) return nullptr;
    return say(text, size, "num_splits=%d: it takes powers of two from 2 to %d, the blocks of a cluster", p.cache.num_splits,
               decode_most_cluster_blocks(device));
}
const char* lanes_cluster_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (has_8bit_cache(p)) {
        if (p.dtype == DType::kFloat32) return "dtype: it takes an 8-bit cache with a q of float16 or bfloat16";
        if (is_scaled_by_key(p.cache)) return "takes an 8-bit cache with one factor for all keys of a key head";
        if (decode_bucket(p) > 128)
            return say(text, size, "headdim=%d, headdim_v=%d: up to 128 with an 8-bit cache", p.headdim, p.headdim_v);
    }
    if (const char* reason = takes_rows(p, has_8bit_cache(p) ? 1 : 4 * kLaneWarps, text, size)) return reason;
    return takes_pieces(p, device, text, size);
}

// Why a kernel outside this table is faster, or nullptr.
const char* others_are_faster(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    const bool options = decode_has_options(p);
    if (p.cache.leftpad && p.cache.block_table) return nullptr;  // faster ones take no padding in pages
    const bool short_window = decode_window_cuts(p) && !p.cache.entries && mma_wins_short_calls(p, device);
    if (has_8bit_cache(p) || (options && !short_window && decode_wins(p, device))) return nullptr;
    if (rows_of_key_head(p) > 64)
        return say(text, size, "seqlen_q=%d x %d heads of a key head: other kernels are faster from 65 rows on", p.seqlen_q, p.group);
    if (wgmma_split_is_best(p, device)) return "wgmma_split_sm90 is faster for so many rows and keys";
    if (p.cache.entries) return nullptr;
    // K and V without a cache.
    // Where mma_sm80 is fast, it still reads the keys of a group once for each head.
    const bool shorter = mma_wins_short_calls(p, device) &&
                         (p.deciding_keys() <= 128 ||
                          (p.group == 1 && (p.deciding_keys() <= 256 || int64_t(p.deciding_batch()) * p.nheads >= device.multiprocessors)));
    if (!options && p.seqlen_q <= 16 && !shorter && decode_wins(p, device)) return nullptr;
    return say(text, size, "batch=%d x nheads=%d, seqlen_q=%d, seqlen_k=%d, no cache: other kernels are faster", p.batch, p.nheads,
               p.seqlen_q, p.seqlen_k);
}
// Each row costs decode_lanes_sm80 as much as the first one; mma_float32_sm80 multiplies 64 rows at once, but divides no keys. Both costs
// are estimates in us for an H200.
const char* lanes_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = others_are_faster(p, device, text, size)) return reason;
    if (device.shared_memory <= kMostSharedSm86 || p.cache.leftpad) return nullptr;  // their tensor cores are slow; it takes no padding
    const double heads = double(p.deciding_batch()) * p.nheads, keys = p.deciding_keys();
    const double row = 4e-6 * heads * keys * (p.headdim > p.headdim_v ? p.headdim : p.headdim_v);
    const double rate = (keys < 512 ? 2.3 : keys < 1024 ? 3.4 : 6.0) / (rows_of_key_head(p) > 16 ? 3 : 1);
    const double lanes = 5 + row * p.seqlen_q / rate;
    const double tiles = 8 + row * 64 * ((p.seqlen_q + 63) / 64) / (50 * std::min(1.0, heads / device.multiprocessors));
    const bool many_rows = rows_of_key_head(p) > 16 && keys <= 256;
    if (!many_rows && lanes <= 1.3 * tiles) return nullptr;
    return say(text, size, "batch=%d x nheads=%d, seqlen_q=%d, seqlen_k=%d: mma_float32_sm80 is faster", p.batch, p.nheads, p.seqlen_q,
               p.seqlen_k);
}
const char* lanes_cluster_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (!p.cache.entries && decode_scores_are_natural(p))
        return "softcap of float32 without allow_tf32: decode_lanes_sm80 is more accurate";
    if (const char* reason = others_are_faster(p, device, text, size)) return reason;
    if (decode_lanes_cluster_wins(p, device)) return nullptr;
    return "a launch with the keys in pieces, or tensor cores, are faster for so many keys or rows";
}

// ---- decode_wide_sm80 ----

const char* wide_refuses(const AttentionParams&, const DeviceInfo& device, char* text, size_t size) {
    if (DecodeWide::stages(device.shared_memory) >= DecodeWide::kLeastStages) return nullptr;
    return say(text, size, "the GPU: it takes %d KB of shared memory a block", int(DecodeWide::bytes(DecodeWide::kLeastStages) >> 10) + 1);
}
const char* wide_yields(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (p.headdim <= 256 && p.headdim_v <= 256) return "decode_split_sm80 is faster for head dims to 256";
    if (rows_of_key_head(p) <= 64) return nullptr;
    return say(text, size, "batch=%d, seqlen_q=%d x %d heads of a key head, seqlen_k=%d: kernels with all keys in a block are faster",
               p.batch, p.seqlen_q, p.group, p.seqlen_k);
}

template <DecodeKernel kernel>
size_t workspace(const AttentionParams& p, const DeviceInfo& device) {
    return decode_workspace(kernel, p, device);
}
template <DecodeKernel kernel>
bool fits(const AttentionParams& p, const DeviceInfo& device) {
    return decode_fits(kernel, p, device);
}
template <DecodeKernel kernel>
cudaError_t run(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return decode(kernel, p, nullptr, device, stream);
}

// ---- decode_prefix_sm90, decode_prefix_sm80 ----

const char* prefix_refuses(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) {
    if (const char* reason = takes_rows(p, 64, text, size)) return reason;
    if (has_8bit_cache(p) && decode_bucket(p) > 128)
        return say(text, size, "headdim=%d, headdim_v=%d: up to 128 with an 8-bit cache", p.headdim, p.headdim_v);
    return nullptr;
}
template <bool wins(const AttentionParams&, const DeviceInfo&)>
const char* prefix_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (wins(p, device)) return nullptr;
    return say(text, size, "batch=%d with %d rows of a key head, seqlen_k=%d: reading shared keys once would save too little", p.batch,
               int(rows_of_key_head(p)), p.seqlen_k);
}

#if FA_WITH_WGMMA_SM90
const char* takes_64_rows(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) { return takes_rows(p, 64, text, size); }
const char* takes_16_rows(const AttentionParams& p, const DeviceInfo&, char* text, size_t size) { return takes_rows(p, 16, text, size); }
const char* cluster_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = takes_16_rows(p, device, text, size)) return reason;
    return takes_pieces(p, device, text, size);
}
const char* cluster_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = others_are_faster(p, device, text, size)) return reason;
    if (decode_cluster_wins(p, device)) return nullptr;
    return "a launch with the keys in pieces is faster for so many keys or sequences, or one row";
}
const char* ring_yields(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = others_are_faster(p, device, text, size)) return reason;
    return decode_split_beats_ring(p, device) ? "decode_split_sm80 is faster with a window, for few keys, or for rows of this length"
                                              : nullptr;
}
const char* ring_refuses(const AttentionParams& p, const DeviceInfo& device, char* text, size_t size) {
    if (const char* reason = takes_16_rows(p, device, text, size)) return reason;
    if (has_8bit_cache(p) && decode_bucket(p) == 64)
        return say(text, size, "headdim=%d, headdim_v=%d: above 64 with an 8-bit cache", p.headdim, p.headdim_v);
    return no_tensor_map_of_keys(p, has_8bit_cache(p) ? 1 : 2, text, size);
}
bool mla_fits(const AttentionParams& p, const DeviceInfo& device) {
    const int64_t rows = int64_t(p.seqlen_q) * p.group * p.batch * p.nheads_k;
    return rows <= kMostBlocks / 64 && decode_mla_sm90_blocks(p, device) <= kMostBlocks && !rows_overflow(p.seqlen_k);
}
#endif
#endif

constexpr uint32_t kReadsScores = kBias | kMask | kIntervals | kBlockMask;  // decode_reads_scores, beside dropout
constexpr uint32_t kOfDecode = kHints | kKeySums | kCache | kPages | kScoresOfDecode | kAnyScale;

constexpr char kLanesCluster[] = "decode_lanes_cluster_sm90";

constexpr Kernel kKernels[] = {
    {.name = "decode_prefix_sm90",
     .summary = "Hopper: shared_prefix: sequences that begin with the same pages share one read of them, on wgmma; up to 64 rows",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(8, 256),
                .takes = kHints | kKeySums | kCache | kPages | kSinks,
                .needs = kSharedPrefix,
                .page_step = 8,
                .memory = Memory::kTensorMaps},
     .refuses = FA_SM90(takes_64_rows),
     .fits = FA_SM90(decode_prefix_sm90_fits),
     .yields = FA_SM90(prefix_yields<decode_prefix_sm90_wins>),
     .workspace = FA_SM90(decode_prefix_sm90_workspace),
     .launch = FA_SM90(decode_prefix_sm90)},
    {.name = "decode_prefix_sm80",
     .summary = "shared_prefix: sequences that begin with the same pages share one read of them; up to 64 rows",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kFromSm80,
                .head_dims = head_dims(1, 256),
                .takes = kHints | kKeySums | kCache | kPages | k8BitCache | kSoftcap | kSinks | kAnyScale,
                .needs = kSharedPrefix,
                .memory = Memory::kWideRows},
     .refuses = FA_SM80(prefix_refuses),
     .fits = FA_SM80(decode_prefix_sm80_fits),
     .yields = FA_SM80(prefix_yields<decode_prefix_sm80_wins>),
     .workspace = FA_SM80(decode_prefix_sm80_workspace),
     .launch = FA_SM80(decode_prefix_sm80)},
    {.name = kLanesCluster,
     .summary = "short caches, up to 32 rows: CUDA cores, clusters of blocks; appends in the same launch",
     .device = FA_CUDA,
     .limits = {.dtypes = kAllButFloat8,
                .gpus = kFromSm90,
                .head_dims = head_dims(1, 256),
                .takes = kOfDecode | k8BitCache | kNoKeys,
                .memory = Memory::kWideRows},
     .refuses = FA_SM80(lanes_cluster_refuses),
     .fits = FA_SM80(fits<DecodeKernel::kLanesCluster>),
     .yields = FA_SM80(lanes_cluster_yields),
     .workspace = FA_SM80(workspace<DecodeKernel::kLanesCluster>),
     .launch = FA_SM80(run<DecodeKernel::kLanesCluster>)},
    {.name = "decode_cluster_sm90",
     .summary = "Hopper, short caches, up to 16 rows: mma.sync, clusters of blocks; float16, bfloat16, 8-bit caches",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(1, 128),
                .takes = kOfDecode | k8BitCache | kNoKeys,
                .memory = Memory::kWideRows},
     .refuses = FA_SM90(cluster_refuses),
     .fits = FA_SM90(fits<DecodeKernel::kCluster>),
     .yields = FA_SM90(cluster_yields),
     .workspace = FA_SM90(workspace<DecodeKernel::kCluster>),
     .launch = FA_SM90(run<DecodeKernel::kCluster>)},
    {.name = "decode_ring_sm90",
     .summary = "Hopper, up to 16 rows: one ring of the copy engine an SM; head dims to 128, pages of multiples of 16",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = head_dims(1, 128),
                .takes = kOfDecode | k8BitCache | kLeftpad,
                .page_step = 16,
                .memory = Memory::kWideRows},
     .refuses = FA_SM90(ring_refuses),
     .fits = FA_SM90(fits<DecodeKernel::kRing>),
     .yields = FA_SM90(ring_yields),
     .workspace = FA_SM90(workspace<DecodeKernel::kRing>),
     .launch = FA_SM90(run<DecodeKernel::kRing>)},
    {.name = "decode_split_sm80",
     .summary = "few rows against many keys: mma.sync; bias, masks, dropout; any pages, 8-bit caches, head dims to 256",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kFromSm80,
                .head_dims = head_dims(1, 256),
                .takes = kOfDecode | k8BitCache | kLeftpad | kNoKeys | kReadsScores | kDropout,
                .memory = Memory::kWideRows},
     .fits = FA_SM80(fits<DecodeKernel::kSplit>),
     .yields = FA_SM80(others_are_faster),
     .workspace = FA_SM80(workspace<DecodeKernel::kSplit>),
     .launch = FA_SM80(run<DecodeKernel::kSplit>)},
    {.name = "decode_wide_sm80",
     .summary = "few rows against many keys above head dim 256: mma.sync, columns shared by the warps; bias, masks, dropout; any pages",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kFromSm80,
                .head_dims = head_dims(1, 512),
                .takes = kOfDecode | kLeftpad | kNoKeys | kReadsScores | kDropout,
                .memory = Memory::kWideRows},
     .refuses = FA_SM80(wide_refuses),
     .fits = FA_SM80(fits<DecodeKernel::kWide>),
     .yields = FA_SM80(wide_yields),
     .workspace = FA_SM80(workspace<DecodeKernel::kWide>),
     .launch = FA_SM80(run<DecodeKernel::kWide>)},
    {.name = "decode_lanes_sm80",
     .summary = "few rows against many keys in float32: CUDA cores; bias, masks; head dims to 256",
     .device = FA_CUDA,
     .limits = {.dtypes = kFloat32,
                .gpus = kFromSm80,
                .head_dims = head_dims(1, 256),
                .takes = kOfDecode | kNoKeys | kReadsScores,
                .memory = Memory::kWideRows},
     .fits = FA_SM80(fits<DecodeKernel::kLanes>),
     .yields = FA_SM80(lanes_yields),
     .workspace = FA_SM80(workspace<DecodeKernel::kLanes>),
     .launch = FA_SM80(run<DecodeKernel::kLanes>)},
    {.name = "decode_mla_sm90",
     .summary = "Hopper: a cache of headdim 576 and 512, fastest where the values are the first columns of the keys; float16, bfloat16",
     .device = FA_CUDA,
     .limits = {.dtypes = k16Bits,
                .gpus = kHopper,
                .head_dims = {1, 576, 576, 512, 512},
                .takes = kHints | kKeySums | kCache | kPages | kLeftEdge,
                .needs = kCache,
                .page_step = 8,
                .memory = Memory::kTensorMaps},
     .fits = FA_SM90(mla_fits),
     .workspace = FA_SM90(decode_mla_sm90_workspace),
     .launch = FA_SM90(decode_mla_sm90)},
};

}  // namespace

Table<Kernel> decode_kernels() { return table_of(kKernels); }

bool appends(const Kernel& kernel, const AppendParams& append) {
    return kernel.name == kLanesCluster && append.seqlen_new == 1 && !has_8bit_keys(append.attention);
}

fa_status launch_whole([[maybe_unused]] const AppendParams& append, [[maybe_unused]] const DeviceInfo& device,
                       [[maybe_unused]] void* stream) {
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
    return launched(kLanesCluster,
                    decode(DecodeKernel::kLanesCluster, append.attention, &append, device, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

}  // namespace fa
