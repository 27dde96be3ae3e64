// prefix_sm80/plan.h: a call of decode_prefix_sm80 on the host: what sharing has to save, the kernel for the other keys, and the workspace.
#pragma once

#include "attention/decode/common/decode.h"
#include "attention/decode/prefix_sm80/sharing.h"

#include <algorithm>

namespace fa {

constexpr int kPrefixMostSequences = 1024;  // the shared memory of sharing.cu

// Sharing has to save the time in which a GPU reads so many bytes: about 4 us on an H200, what the prefix pass takes beside its reads.
constexpr int64_t kPrefixLeastBytes = 16 << 20;

inline bool prefix_reads_half_tiles(const AttentionParams& p) { return !has_8bit_cache(p) && decode_bucket(p) > 64; }

// Blocks of the prefix pass that the GPU holds: those of split_sm80 with tiles of 64 rows.
inline int prefix_blocks(const AttentionParams& p, const DeviceInfo& device) {
    return (decode_bucket(p) <= 128 ? 2 : 1) * device.multiprocessors;
}

// With num_splits keys are shared wherever two sequences have some, so that small calls can be made to share.
inline SharingRules sharing_rules(const AttentionParams& p, const DeviceInfo& device) {
    constexpr int kMostPieces = 64;
    SharingRules x{};
    x.rows = int32_t(rows_of_key_head(p)), x.tile_shift = prefix_reads_half_tiles(p) ? 6 : 7;
    x.blocks = prefix_blocks(p, device), x.most_pieces = p.cache.num_splits ? p.cache.num_splits : kMostPieces;
    const int64_t row_tiles = int64_t(p.batch) * x.rows / kPrefixRows + p.batch / 2;  // of all groups, at most
    x.most_items = int32_t(std::max<int64_t>(2 * x.blocks, row_tiles * p.nheads_k));
    const int64_t key_bytes = int64_t(p.headdim + p.headdim_v) * (has_8bit_cache(p) ? 1 : 2) * p.nheads_k;
    x.least_saved = p.cache.num_splits ? 1 : std::max<int64_t>(1, kPrefixLeastBytes / (kPrefixStep / 2 * key_bytes));
    return x;
}

// Whether a call of this shape can save enough: if all sequences share all keys that they can hold.
inline bool prefix_can_win(const AttentionParams& p, const DeviceInfo& device) {
    return saving(p.seqlen_k / kPrefixStep, p.batch, int32_t(rows_of_key_head(p))) >= sharing_rules(p, device).least_saved;
}

// The decode kernel that attends to the keys which are not shared: the one that a call of several thousand keys gets.
inline DecodeKernel suffix_kernel(const AttentionParams& p, [[maybe_unused]] const DeviceInfo& device) {
#if FA_WITH_WGMMA_SM90
    const auto is_mapped = [&](const TensorView& x) {
        constexpr int64_t kEnd = int64_t(1) << 39;  // elements; no_tensor_map of api/attention/limits.h has the exact rule
        return x.batch > 0 && x.row > 0 && x.head > 0 && x.batch < kEnd && x.row < kEnd && x.head < kEnd;
    };
    if (device.compute == 90 && rows_of_key_head(p) <= 16 && decode_bucket(p) <= 128 && p.cache.page_size % 16 == 0 &&
        !(has_8bit_cache(p) && decode_bucket(p) == 64) && is_mapped(p.k) && is_mapped(p.v))
        return DecodeKernel::kRing;
#endif
    return DecodeKernel::kSplit;
}

// The workspace, in bytes from its start: the decode kernel's partial results, and those of units in one piece; the prefix pass's; the
// plan.
struct PrefixRoom {
    int64_t slots, rows;  // of the decode kernel: slots, and rows of a slot. The units in one piece follow the slots
    int64_t partial, partial_lse, prefix, prefix_lse, plan, bytes;
};
inline PrefixRoom prefix_room(const DecodeShape& suffix, const SharingRules& rules, const AttentionParams& p) {
    constexpr int64_t kAlign = 128;
    PrefixRoom x{};
    const auto take = [&](int64_t bytes) {
        const int64_t at = x.bytes;
        x.bytes += (bytes + kAlign - 1) / kAlign * kAlign;
        return at;
    };
    x.slots = decode_slots(suffix, p), x.rows = suffix.rows;
    const int64_t rows = (x.slots + decode_units(suffix, p)) * x.rows, prefix_rows = int64_t(rules.most_items) * kPrefixRows;
    x.partial = take(4 * rows * p.headdim_v), x.partial_lse = take(4 * rows);
    x.prefix = take(4 * prefix_rows * p.headdim_v), x.prefix_lse = take(4 * prefix_rows);
    x.plan = take(4 * (2 + 4 * int64_t(p.batch)) + int64_t(sizeof(PrefixGroup)) * (p.batch / 2));
    x.bytes += kAlign;  // the workspace may start anywhere
    return x;
}

cudaError_t plan_prefixes(const AttentionParams& p, const SharingRules& rules, const PrefixPlan& plan, bool programmatic,
                          cudaStream_t stream);
// The prefix pass. `d`: the parameters of the decode kernel for the other keys.
cudaError_t attend_to_prefixes(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream);
cudaError_t attend_to_prefixes_8bit(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream);

}  // namespace fa
