// prefix_sm80/entry.cu: the entry points of decode_prefix_sm80.
#include "attention/decode/prefix_sm80/kernel.cuh"

namespace fa {
namespace {

cudaError_t attend_to_prefixes(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    if (has_8bit_cache(d.attention)) return attend_to_prefixes_8bit(d, rules, device, stream);
    return d.attention.dtype == DType::kFloat16 ? launch_prefix_of<__half>(d, rules, device, stream)
                                                : launch_prefix_of<__nv_bfloat16>(d, rules, device, stream);
}

// The tiles are those of split_sm80 with 64 rows. They read keys at two thirds of the speed with which the other decode kernels read them
// (H200: 2.8 and 4.2 TB/s).
PrefixPass pass_sm80(const AttentionParams& p, const DeviceInfo& device) {
    const bool half_tiles = !has_8bit_cache(p) && decode_bucket(p) > 64;
    const int blocks_per_sm = decode_bucket(p) <= 128 ? 2 : 1;
    return {6, half_tiles ? 6 : 7, 3, blocks_per_sm * device.multiprocessors, INT64_MAX, attend_to_prefixes};
}

}  // namespace

size_t decode_prefix_sm80_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return prefix_workspace(pass_sm80(p, device), p, device);
}
bool decode_prefix_sm80_wins(const AttentionParams& p, const DeviceInfo& device) { return prefix_can_win(pass_sm80(p, device), p); }
bool decode_prefix_sm80_fits(const AttentionParams& p, const DeviceInfo& device) { return prefix_fits(pass_sm80(p, device), p, device); }
cudaError_t decode_prefix_sm80(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return decode_with_prefixes(pass_sm80(p, device), p, device, stream);
}

}  // namespace fa
