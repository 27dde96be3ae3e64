// prefix_sm80/entry.cu: the launches of decode_prefix_sm80: plan, prefix pass, the decode kernel for the other keys, merge.
#include "attention/decode/prefix_sm80/kernel.cuh"

namespace fa {

cudaError_t attend_to_prefixes(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    if (has_8bit_cache(d.attention)) return attend_to_prefixes_8bit(d, rules, device, stream);
    return d.attention.dtype == DType::kFloat16 ? launch_prefix_of<__half>(d, rules, device, stream)
                                                : launch_prefix_of<__nv_bfloat16>(d, rules, device, stream);
}

size_t decode_prefix_sm80_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return size_t(prefix_room(decode_shape(suffix_kernel(p, device), p, device), sharing_rules(p, device), p).bytes);
}

bool decode_prefix_sm80_wins(const AttentionParams& p, const DeviceInfo& device) { return prefix_can_win(p, device); }

bool decode_prefix_sm80_fits(const AttentionParams& p, const DeviceInfo& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    if (p.batch > kPrefixMostSequences || !decode_fits(suffix_kernel(p, device), p, device)) return false;
    return prefix_room(decode_shape(suffix_kernel(p, device), p, device), sharing_rules(p, device), p).slots < kMost;
}

cudaError_t decode_prefix_sm80(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    const DecodeKernel kernel = suffix_kernel(p, device);
    const DecodeShape shape = decode_shape(kernel, p, device);
    const SharingRules rules = sharing_rules(p, device);
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
    plan.partial = floats(room.prefix), plan.partial_lse = floats(room.prefix_lse);

    const bool follows = device.compute >= 90;
    if (cudaError_t error = plan_prefixes(p, rules, plan, follows && (p.cache.programmatic || p.cache.added > 0), stream)) return error;
    if (cudaError_t error = attend_to_prefixes(d, rules, device, stream)) return error;
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
