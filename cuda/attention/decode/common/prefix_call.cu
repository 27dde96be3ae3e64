// prefix_call.cu: the launches of a call with shared prefixes:
//
//     sharing.cu      finds the groups of sequences and the keys that each group shares: one block, on the device, so that a captured call
//                     may be replayed with other tables and lengths
//     prefix pass     the rows of a group's sequences are one matrix, which attends to the shared keys (prefix_sm80, prefix_sm90)
//     split_sm80 or   attends to the other keys of every sequence: where a sequence shares keys, they begin after these
//     ring_sm90
//     combine.cu      merges the results of both
//
// Four launches of fixed shape; each starts while the one before ends. Where nothing is shared, the first two find that out in about 5 us,
// and the others do what they do without a plan.
#include "attention/decode/common/prefix_call.h"

namespace fa {
namespace {

// The workspace, in bytes from its start: the decode kernel's partial results, and those of units in one piece; the prefix pass's; the
// plan.
struct PrefixRoom {
    int64_t slots, rows;  // of the decode kernel: slots, and rows of a slot. The units in one piece follow the slots
    int64_t partial, partial_lse, prefix, prefix_lse, plan, bytes;
};
PrefixRoom prefix_room(const DecodeShape& suffix, const SharingRules& rules, const AttentionParams& p) {
    constexpr int64_t kAlign = 128;
    PrefixRoom x{};
    const auto take = [&](int64_t bytes) {
        const int64_t at = x.bytes;
        x.bytes += (bytes + kAlign - 1) / kAlign * kAlign;
        return at;
    };
    x.slots = decode_slots(suffix, p), x.rows = suffix.rows;
    const int64_t rows = (x.slots + decode_units(suffix, p)) * x.rows, prefix_rows = int64_t(rules.most_items) << rules.row_shift;
    x.partial = take(4 * rows * p.headdim_v), x.partial_lse = take(4 * rows);
    x.prefix = take(4 * prefix_rows * p.headdim_v), x.prefix_lse = take(4 * prefix_rows);
    x.plan = take(4 * (2 + 4 * int64_t(p.batch)) + int64_t(sizeof(PrefixGroup)) * (p.batch / 2));
    x.bytes += kAlign;  // the workspace may start anywhere
    return x;
}
PrefixRoom prefix_room(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device) {
    return prefix_room(decode_shape(suffix_kernel(p, device), p, device), sharing_rules(pass, p), p);
}

}  // namespace

DecodeKernel suffix_kernel(const AttentionParams& p, [[maybe_unused]] const DeviceInfo& device) {
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

size_t prefix_workspace(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device) {
    return size_t(prefix_room(pass, p, device).bytes);
}

bool prefix_fits(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    if (p.batch > kPrefixMostSequences || !decode_fits(suffix_kernel(p, device), p, device)) return false;
    const PrefixRoom room = prefix_room(pass, p, device);
    return room.slots < kMost && room.plan - room.prefix <= pass.most_bytes;
}

cudaError_t decode_with_prefixes(const PrefixPass& pass, const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    const DecodeKernel kernel = suffix_kernel(p, device);
    const DecodeShape shape = decode_shape(kernel, p, device);
    const SharingRules rules = sharing_rules(pass, p);
    const PrefixRoom room = prefix_room(shape, rules, p);
    char* const workspace = static_cast<char*>(align_up(p.workspace, 128));
    const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(workspace + at); };
    DecodeParams d = decode_params(shape, p);
    d.partial = floats(room.partial), d.partial_lse = floats(room.partial_lse);
    d.whole_slots = int(room.slots);
    PrefixPlan& plan = d.prefix;
    plan.groups = reinterpret_cast<PrefixGroup*>(workspace + room.plan);
    plan.counts = reinterpret_cast<int32_t*>(plan.groups + p.batch / 2);
    plan.keys = plan.counts + 2, plan.group_of = plan.keys + p.batch, plan.rank = plan.group_of + p.batch;
    plan.order = plan.rank + p.batch;
    plan.row_shift = rules.row_shift;
    plan.partial = floats(room.prefix), plan.partial_lse = floats(room.prefix_lse);

    const bool follows = device.compute >= 90;
    if (cudaError_t error = plan_prefixes(p, rules, plan, follows && (p.cache.programmatic || p.cache.added > 0), stream)) return error;
    if (cudaError_t error = pass.attend(d, rules, device, stream)) return error;
    d.after_append = follows;  // it waits for the prefix pass, and so for the plan and for what is in front of it
    cudaError_t error = cudaErrorInvalidValue;
    switch (kernel) {
        case DecodeKernel::kSplit: error = decode_split_sm80(d, device, stream); break;
#if FA_WITH_WGMMA_SM90
        case DecodeKernel::kRing: error = decode_ring_sm90(d, device, stream); break;
#endif
        default: break;
    }
    constexpr int kCombineBlocks = 8;  // blocks per multiprocessor: a row has up to five loads that wait for each other
    return error == cudaSuccess ? decode_combine(d, kCombineBlocks * device.multiprocessors, device, stream) : error;
}

}  // namespace fa
