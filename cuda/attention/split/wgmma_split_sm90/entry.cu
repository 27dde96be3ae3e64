// wgmma_split_sm90/entry.cu: the entry point of the split kernel. It divides the call into work, chooses the instantiation and merges the
// pieces; wgmma_split_sm90/kernel.cuh is the kernel, and one small file per head dim compiles it.
#include "attention/kernels.h"
#include "attention/split/wgmma_split_sm90/plan.h"

namespace fa {

template <SplitTile kTile>
cudaError_t launch_split(const DecodeParams& d, const SplitShape& shape, unsigned teams, cudaStream_t stream);

namespace {

// Pieces end at the ends of units, or units stay whole, only where that leaves hardly any block idle.
Balance split_balance(int units, int pieces) {
    Balance x = balance_of(units, pieces);
    const auto fills = [&](int64_t used) { return 100 * used >= 96 * int64_t(pieces); };
    x.whole = fills((units + x.units_each - 1) / x.units_each);
    if (!fills(int64_t(units) * x.of_unit.divisor)) x.of_unit = divisor_of(1);
    return x;
}

}  // namespace

cudaError_t forward_wgmma_split_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    const SplitShape shape = split_shape(p, device);
    DecodeParams d = decode_params(shape.work, p);
    if (!shape.work.uniform && shape.work.pieces > 0) d.balance = split_balance(int(decode_units(shape.work, p)), shape.work.pieces);
    d.partial = static_cast<float*>(align_up(p.workspace, 128));
    d.partial_lse = d.partial + decode_slots(shape.work, p) * shape.work.rows * p.headdim_v;
    const unsigned teams = unsigned(split_teams(shape, p, device));
    cudaError_t error = cudaErrorInvalidValue;
    switch (shape.tile) {
#define FA_SPLIT_CASE(tile) \
    case SplitTile::tile: error = launch_split<SplitTile::tile>(d, shape, teams, stream); break;
        FA_SPLIT_CASE(kD64Rows64)
        FA_SPLIT_CASE(kD64Rows128)
        FA_SPLIT_CASE(kD128Rows64)
        FA_SPLIT_CASE(kD128Rows128)
        FA_SPLIT_CASE(kD128Rows192)
        FA_SPLIT_CASE(kD256Rows64)
        FA_SPLIT_CASE(kD256Rows128)
#undef FA_SPLIT_CASE
    }
    constexpr int kCombineBlocks = 8;  // blocks per multiprocessor: there are many rows here, and each waits for memory
    return error == cudaSuccess && shape.work.combines ? decode_combine(d, kCombineBlocks * device.multiprocessors, device, stream) : error;
}

size_t forward_wgmma_split_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    const DecodeShape s = split_shape(p, device).work;
    return s.combines ? size_t(decode_slots(s, p)) * s.rows * (p.headdim_v + 1) * sizeof(float) + 128 : 0;
}

bool forward_wgmma_split_sm90_fits(const AttentionParams& p, const DeviceInfo& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    const int64_t rows = rows_of_key_head(p);
    if (int64_t(p.seqlen_q) + p.seqlen_k >= kMost || rows >= kMost || rows * p.nheads_k >= kMost || rows * p.nheads_k * p.batch >= kMost)
        return false;
    const DecodeShape s = split_shape(p, device).work;
    const int64_t units = decode_units(s, p);
    return units * decode_tiles(s, p) < kMost && units * (s.uniform ? s.pieces : 1) < kMost;
}

bool forward_wgmma_split_sm90_wins(const AttentionParams& p, const DeviceInfo& device) { return split_wins(p, device); }

}  // namespace fa
