// decode.cu: a decode call: launches the kernel that the registry has chosen, then merges the partial results.
#include "attention/decode/common/decode.h"

#include <cmath>

namespace fa {

// A merge is a launch of its own. Microseconds on an H200: a tile of keys of a block alone on its multiprocessor; the bytes of all units;
// the merge, with 5 ns for each row of 128 columns. The merge of decode_ring_sm90 finds no room beside its blocks if these fill the GPU.
// Sequences as long as the cache allows are assumed: with more room the lengths decide on the device (schedule.h). Not inline: the
// workspace and the launch ask the same code.
bool decode_units_stay_whole(const DecodeShape& s, const AttentionParams& p, const DeviceInfo& device) {
    const bool ring = s.kernel == DecodeKernel::kRing, large = s.kernel == DecodeKernel::kWide || decode_bucket(p) == 256;
    if (s.cluster || s.row_warps || p.cache.batch_invariant) return false;
    const double tiles = double(((decode_span(p) - 1) >> s.tile_shift) + 1), units = double(decode_units(s, p)),
                 places = decode_resident(s, p, device);
    // The numbers below are of up to 1024 keys. Half of the multiprocessors do not read long caches at the memory's rate.
    if (decode_span(p) > 2048 && 4 * units < 3 * places) return false;
    const double step = (ring ? 0.4 : large ? 1.7 : 0.85) * (s.rows > 16 ? 4 : 1) * (decode_reads_scores(p) ? 1.5 : 1);
    const double bytes_of_unit = double(decode_span(p)) * (p.headdim + p.headdim_v) * (has_8bit_cache(p) ? 1 : 2);
    const auto time = [&](double blocks, double steps, double of_units) {
        return blocks > 0 ? std::max(steps * step, of_units * bytes_of_unit / 5e6) : 0.0;
    };
    const double rounds = std::floor(units / places), rest = units - rounds * places;
    const double whole = rounds * time(1, tiles, places) + time(rest, tiles, rest);
    const double cut = time(1, std::max(1.0, std::ceil(units * tiles / places)), units);
    const double merge = (large ? 2.0 : 1.4) + 0.005 * double(p.batch) * p.seqlen_q * p.nheads * std::max(1.0, p.headdim_v / 128.0) +
                         (ring && 10 * units * tiles >= 9 * places ? 2.0 : 0.0);
    return whole <= cut + merge;
}

size_t decode_workspace(DecodeKernel kernel, const AttentionParams& p, const DeviceInfo& device) {
    const DecodeShape s = decode_shape(kernel, p, device);
    return s.combines ? size_t(decode_slots(s, p)) * s.rows * decode_row_floats(p) * sizeof(float) + 128 : 0;
}

bool decode_fits(DecodeKernel kernel, const AttentionParams& p, const DeviceInfo& device) {
    constexpr int64_t kMost = int64_t(1) << 30;
    const int64_t rows = rows_of_key_head(p);
    if (int64_t(p.seqlen_q) + p.seqlen_k >= kMost || rows >= kMost || rows * p.nheads_k >= kMost || rows * p.nheads_k * p.batch >= kMost)
        return false;
    const DecodeShape s = decode_shape(kernel, p, device);
    const int64_t units = decode_units(s, p);
    return units * decode_tiles(s, p) < kMost && units * (s.uniform ? s.pieces : 1) < kMost && units * s.cluster < kMost;
}

cudaError_t decode(DecodeKernel kernel, const AttentionParams& p, const AppendParams* append, const DeviceInfo& device,
                   cudaStream_t stream) {
    const DecodeShape shape = decode_shape(kernel, p, device);
    DecodeParams d = decode_params(shape, p);
    d.partial = static_cast<float*>(align_up(p.workspace, 128));
    d.partial_lse = d.partial + decode_slots(shape, p) * d.shape.rows * p.headdim_v;
    d.after_append = device.compute >= 90 && (p.cache.programmatic || (p.cache.added > 0 && !append));
    cudaError_t error = cudaErrorInvalidValue;
    switch (kernel) {
        case DecodeKernel::kLanes:
        case DecodeKernel::kLanesCluster: error = decode_lanes(d, append, device, stream); break;
        case DecodeKernel::kSplit: error = decode_split_sm80(d, device, stream); break;
        case DecodeKernel::kWide: error = decode_wide_sm80(d, device, stream); break;
#if FA_WITH_WGMMA_SM90
        case DecodeKernel::kCluster: error = decode_cluster_sm90(d, stream); break;
        case DecodeKernel::kRing: error = decode_ring_sm90(d, device, stream); break;
#else
        default: break;
#endif
    }
    const int64_t beside = 2 * device.multiprocessors;  // blocks of the merge that fit next to those of the kernel, and wait there
    return error == cudaSuccess && d.shape.combines ? decode_combine(d, beside, device, stream) : error;
}

}  // namespace fa
