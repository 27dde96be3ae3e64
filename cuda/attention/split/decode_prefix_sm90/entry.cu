// decode_prefix_sm90/entry.cu: the entry points of decode_prefix_sm90.
#include "attention/split/decode_prefix_sm90/kernel.cuh"

namespace fa {
namespace {

SplitTile tile_of(const AttentionParams& p) {
    const int bucket = decode_bucket(p);
    return bucket == 64 ? SplitTile::kD64Rows128 : bucket == 128 ? SplitTile::kD128Rows128 : SplitTile::kD256Rows128;
}

template <typename T>
cudaError_t attend_of(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    switch (tile_of(d.attention)) {
        case SplitTile::kD64Rows128: return launch_prefix_wgmma<T, SplitTile::kD64Rows128>(d, rules, device, stream);
        case SplitTile::kD128Rows128: return launch_prefix_wgmma<T, SplitTile::kD128Rows128>(d, rules, device, stream);
        default: return launch_prefix_wgmma<T, SplitTile::kD256Rows128>(d, rules, device, stream);
    }
}
cudaError_t attend_to_prefixes(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    return d.attention.dtype == DType::kFloat16 ? attend_of<__half>(d, rules, device, stream)
                                                : attend_of<__nv_bfloat16>(d, rules, device, stream);
}

// A tile takes two thirds of the time in which a decode kernel reads as many keys, and the group's first one waits for its keys. Tiles of
// 128 rows leave twice the partial results of those of decode_prefix_sm80, which serves what needs too much.
PrefixPass pass_sm90(const AttentionParams& p, const DeviceInfo& device) {
    constexpr int64_t kMostBytes = int64_t(512) << 20;
    PrefixPass pass{7, 0, 2, device.multiprocessors, kMostBytes, attend_to_prefixes};
    while (1 << pass.tile_shift < split_plan(tile_of(p)).block_n) ++pass.tile_shift;
    return pass;
}

}  // namespace

size_t decode_prefix_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return prefix_workspace(pass_sm90(p, device), p, device);
}
bool decode_prefix_sm90_wins(const AttentionParams& p, const DeviceInfo& device) { return prefix_can_win(pass_sm90(p, device), p); }
bool decode_prefix_sm90_fits(const AttentionParams& p, const DeviceInfo& device) { return prefix_fits(pass_sm90(p, device), p, device); }
cudaError_t decode_prefix_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return decode_with_prefixes(pass_sm90(p, device), p, device, stream);
}

}  // namespace fa
