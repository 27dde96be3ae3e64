// prefix_call.h: a call of a kernel for shared prefixes on the host: what sharing has to save, the kernel for the other keys, the workspace
// and the launches. The kernels differ in their prefix pass alone.
#pragma once

#include "attention/decode/common/decode.h"
#include "attention/decode/common/sharing.h"

#include <algorithm>

namespace fa {

constexpr int kPrefixMostSequences = 1024;  // the shared memory of sharing.cu

// Sharing has to save the time in which a GPU reads so many bytes: about 4 us on an H200, what the prefix pass takes beside its reads.
constexpr int64_t kPrefixLeastBytes = 16 << 20;

// A prefix pass: the tiles of its kernel, and its launch, which gets the parameters of the decode kernel for the other keys.
struct PrefixPass {
    int32_t row_shift, tile_shift;  // a tile has 2^row_shift rows and 2^tile_shift keys
    int32_t tile_cost;              // SharingRules::tile_cost
    int32_t blocks;                 // that the GPU holds
    int64_t most_bytes;             // of its partial results
    cudaError_t (*attend)(const DecodeParams& suffix, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream);
};

// With num_splits keys are shared wherever two sequences have some, so that small calls can be made to share.
inline SharingRules sharing_rules(const PrefixPass& pass, const AttentionParams& p) {
    constexpr int kMostPieces = 64;
    SharingRules x{};
    x.rows = int32_t(rows_of_key_head(p)), x.row_shift = pass.row_shift, x.tile_shift = pass.tile_shift, x.tile_cost = pass.tile_cost;
    x.blocks = pass.blocks, x.most_pieces = p.cache.num_splits ? p.cache.num_splits : kMostPieces;
    const int64_t row_tiles = (int64_t(p.batch) * x.rows >> pass.row_shift) + p.batch / 2;  // of all groups, at most
    x.most_items = int32_t(std::max<int64_t>(2 * x.blocks, row_tiles * p.nheads_k));
    const int64_t key_bytes = int64_t(p.headdim + p.headdim_v) * (has_8bit_cache(p) ? 1 : 2) * p.nheads_k;
    x.least_saved = p.cache.num_splits ? 1 : std::max<int64_t>(1, kPrefixLeastBytes / (kPrefixStep / 2 * key_bytes));
    return x;
}

// Whether a call of this shape can save enough: if all sequences share all keys that they can hold.
inline bool prefix_can_win(const PrefixPass& pass, const AttentionParams& p) {
    const SharingRules rules = sharing_rules(pass, p);
    return saving(p.seqlen_k / kPrefixStep, p.batch, rules) >= rules.least_saved;
}

// The decode kernel that attends to the keys which are not shared: the one that a call of several thousand keys gets.
DecodeKernel suffix_kernel(const AttentionParams& p, const DeviceInfo& device);

// Bytes of workspace: the plan, and partial results. `fits`: 32-bit indices, the planning block and most_bytes suffice.
size_t prefix_workspace(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device);
bool prefix_fits(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device);
cudaError_t decode_with_prefixes(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream);

cudaError_t plan_prefixes(const AttentionParams& p, const SharingRules& rules, const PrefixPlan& plan, bool programmatic,
                          cudaStream_t stream);

}  // namespace fa
