// few_queries.h: estimates of how long each kernel takes for a few queries over 16-bit keys, from which the library chooses one.
//
// The numbers of kFewTimes come from tests/few_queries.py, which fits them to the times of 2300 random calls (up to 64 queries, caches and
// biases included) in every kernel that takes them, on an H200. A time is the geometric mean of two: of keys that lie in L2, and of keys
// in memory. The kernel with the least estimate takes 2.0 % longer than the best kernel in the geometric mean, 3.1 % in calls that the fit
// has not seen, more than 25 % in one call of forty-five. Calls beyond the data (32,768 keys, 64 sequences) are extrapolated.
//
// The form of an estimate: launches and merges, then the longer of the products of the busiest block and the reads, as the root of the sum
// of their squares. Kernels differ in what a block has: mma_sm80, wgmma_sm90 and wgmma_wide_sm90 all keys of a query head, so that a
// group's keys are read once for each of its heads; the others a share of the keys of a key head.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/decode/common/decode.h"

namespace fa {

enum class FewKernel { kMma, kWgmma, kWgmmaWide, kWgmmaSplit, kSplit, kWide, kRing, kCluster, kLanesCluster };
constexpr int kFewKernels = 9, kFewBuckets = 4;

// Microseconds, and factors.
struct FewTimes {
    float start, of_round, of_step;     // a launch; each time that the GPU is filled with blocks; a tile of keys in a block
    float reads, reads_again;           // of one read of K and V at 4.2 TB/s; of the reads of each query head at 6.5 TB/s
    float start_scores, step_scores;    // what bias, masks and dropout add to a launch, and to a step
    float step_pages;                   // what pages below 64 rows add to a step
    float start_natural, step_natural;  // what softcap and ALiBi add
    float merge;                        // of pieces of keys
    float step_rows, start_rows;        // what more than 16 rows of a key head add; in clusters, 16 rows, if there is more than one
    float ragged;                       // what rows that are no whole lines of memory add to the reads
    float cache, cache_start;           // of a cache, whose sequences are shorter than the longest: off the steps and reads; on the start
};
// Head dims to 64, to 128, to 256, to 512. A kernel without numbers is not chosen.
// clang-format off
constexpr FewTimes kFewTimes[kFewKernels][kFewBuckets] = {
    {  // mma_sm80
     {3.182, 0.432, 0.641, 0.779, 0.229, 3.957, 2.706, 1.172, 1.493, 1.993, 0, 0, 0, 0.1, 0.165, 1.564},
     {1.642, 2.071, 0.887, 0.747, 0.3, 5.307, 2.912, 1.231, 4.298, 1.154, 0, 0, 0, 0.084, 0.102, 1.516},
     {3.89, 0.473, 1.72, 0.47, 0.272, 5.338, 1.074, 0.984, 4.204, 0.107, 0, 0, 0, 0.098, 0.163, 2.001},
     {10.997, 0.847, 1.573, 0.581, 0.212, 0.569, 1.882, 0.115, 0.316, 1.101, 0, 0, 0, 0.1, 0.109, 0.315}},
    {  // wgmma_sm90
     {4.735, 1.796, 1.03, 0.533, 0.288, 2.407, 0.585, 0.095, 0.338, 1.425, 0, 0, 0, 0.1, 0.154, 0.378},
     {6.228, 1.7, 1.077, 0.585, 0.29, 2.638, 0.559, 0.099, 2.381, 0.384, 0, 0, 0, 0.094, 0.113, 1.047},
     {7.04, 2.381, 1.897, 0.561, 0.56, 0.553, 0.741, 0.14, 0.326, 0.461, 0, 0, 0, 0.096, 0.132, 0.328},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // wgmma_wide_sm90
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {9.038, 2.028, 2.292, 0.604, 0.47, 0.519, 1.101, 0.103, 0.305, 0.109, 0, 0, 0, 0.1, 0.124, 0.313}},
    {  // wgmma_split_sm90
     {3.769, 1.167, 0.857, 0.689, 0, 0, 0, 0.096, 0.3, 0.1, 2.696, 0.311, 0.883, 0.116, 0.19, 2.741},
     {4.098, 1.588, 0.625, 0.91, 0, 0, 0, 0.099, 0.3, 0.1, 2.291, 0.188, 0.779, 0.244, 0.19, 1.754},
     {2.861, 3.675, 0.311, 0.918, 0, 0, 0, 0.101, 0.3, 0.1, 3.461, 0.299, 2.497, 0.064, 0.182, 1.841},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_split_sm80
     {1.697, 2.344, 0.879, 0.887, 0, 0.539, 1.249, 0.356, 0.268, 0.101, 3.017, 2.12, 0.714, 0.55, 0.228, 0.958},
     {1.822, 2.718, 0.572, 0.907, 0, 0.504, 1.108, 0.091, 0.339, 0.104, 2.667, 4.639, 0.547, 0.11, 0.26, 1.69},
     {2.406, 3.652, 1.171, 0.788, 0, 0.4, 0.863, 0.105, 0.289, 0.094, 3.328, 3.608, 1.221, 0.077, 0.149, 1.215},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_wide_sm80
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {3.426, 2.72, 1.611, 0.709, 0, 0.477, 0.47, 0.111, 0.295, 0.106, 3.237, 0, 0, 0.1, 0.141, 0.337}},
    {  // decode_ring_sm90
     {4.439, 1.177, 0.39, 0.808, 0, 0, 0, 0.116, 0.299, 0.103, 3.132, 0, 0, 0.773, 0.254, 0.567},
     {4.495, 0.894, 0.351, 0.824, 0, 0, 0, 0.064, 0.199, 0.107, 3.029, 0, 0, 0.215, 0.24, 0.806},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_cluster_sm90
     {3.308, 0.529, 1.313, 1.281, 0, 0, 0, 0.076, 0.194, 0.109, 0, 0.111, 0.764, 0.827, 0.183, 0.407},
     {4.776, 0.363, 0.483, 1.01, 0, 0, 0, 0.393, 0.282, 0.107, 0, 0.087, 1.285, 0.099, 0.133, 0.339},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_lanes_cluster_sm90
     {6.202, 0.205, 0.667, 0.99, 0, 0, 0, 0.087, 0.282, 0.105, 0, 0.182, 3.356, 0.1, 0.191, 0.303},
     {3.73, 0.303, 0.947, 0.839, 0, 0, 0, 0.098, 0.289, 0.099, 0, 0.279, 8.978, 0.094, 0.246, 0.306},
     {4.632, 0.342, 1.494, 1.544, 0, 0, 0, 0.097, 0.286, 0.091, 0, 0.457, 15.812, 0.066, 0.18, 0.333},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
};
// clang-format on

constexpr int kFewQueries = 64;

// Whether the estimates are for such calls.
inline bool few_queries_known(const AttentionParams& p, const DeviceInfo& device) {
    return device.compute == 90 && p.dtype != DType::kFloat32 && p.out_dtype == p.dtype && p.seqlen_q <= kFewQueries && p.seqlen_k > 0 &&
           p.batch > 0 && p.seqlen_q > 0 && p.headdim <= 512 && p.headdim_v <= 512 && !p.cu_seqlens_q && !has_8bit_cache(p) &&
           !p.cache.num_splits && !p.cache.batch_invariant && !p.cache.leftpad && !p.cache.added && !p.cache.shared_prefix &&
           !p.tree.rows && !p.intervals.data && !p.blocks.data;
}

// Whether a sequence much longer than the others would keep one block at work: the lengths of a cache are on the device, and the estimates
// take them for half to all of the longest. Kernels that divide the sum of the keys do not mind.
inline bool few_queries_need_balance(FewKernel kernel, const AttentionParams& p) {
    if (!p.cache.seqlens) return false;
    const bool whole = kernel == FewKernel::kMma || kernel == FewKernel::kWgmma || kernel == FewKernel::kWgmmaWide;
    const bool cluster = kernel == FewKernel::kCluster || kernel == FewKernel::kLanesCluster;
    return (whole && p.seqlen_k > 1024) || (cluster && p.seqlen_k > 4096);
}

inline double few_queries_time(FewKernel kernel, const AttentionParams& p, const DeviceInfo& device) {
    const auto ceil_of = [](double x, double y) { return std::ceil(x / y); };
    const int width = std::max(p.headdim, p.headdim_v), bucket = width <= 64 ? 0 : width <= 128 ? 1 : width <= 256 ? 2 : 3;
    const FewTimes& t = kFewTimes[int(kernel)][bucket];
    if (t.of_step == 0) return HUGE_VAL;
    const double units = double(p.batch) * p.nheads_k, rows = double(rows_of_key_head(p)), keys = double(decode_span(p));
    const double bytes = keys * 2 * (p.headdim + p.headdim_v), tiles = ceil_of(keys, bucket == 0 ? 128 : 64), sms = device.multiprocessors;
    const bool wide = rows > 16, scores = decode_reads_scores(p), natural = p.softcap != 0 || p.alibi_slopes;
    double rounds, steps, read = units * bytes / 4.2e6, again = 0;
    double rows_added = 0;
    bool merges = false;
    switch (kernel) {
        case FewKernel::kMma:
        case FewKernel::kWgmma:
        case FewKernel::kWgmmaWide: {
            const bool mma = kernel == FewKernel::kMma;
            const double blocks = double(p.batch) * p.nheads * (bucket == 3 ? 2 : 1);  // above 256, halves of the columns of V
            rounds = ceil_of(blocks, sms * (mma && bucket <= 1 ? 2 : 1)), steps = rounds * ceil_of(keys, mma ? 64 : 128);
            again = blocks * bytes / 6.5e6;
            break;
        }
        case FewKernel::kCluster:
        case FewKernel::kLanesCluster: {
            const bool lanes = kernel == FewKernel::kLanesCluster;
            const double blocks = decode_cluster_blocks(p, device);
            rounds = ceil_of(units * blocks, std::floor(sms * (lanes || bucket > 0 ? 0.95 : 2)));
            steps = rounds * ceil_of(tiles, blocks) * (lanes ? ceil_of(rows, 4) : 1);
            rows_added = rows > 1 ? rounds * rows / 16 : 0;
            break;
        }
        case FewKernel::kWgmmaSplit: {
            const double row_tiles = ceil_of(rows, 64), filled = units * row_tiles / sms;
            rounds = std::max(1.0, filled), steps = std::max(1.0, filled * tiles), read *= row_tiles;
            merges = tiles > 1 && std::fmod(units * row_tiles, sms) != 0;
            rows_added = wide;
            break;
        }
        default: {
            const bool split = kernel == FewKernel::kSplit;
            const DecodeShape s = decode_shape(split                        ? DecodeKernel::kSplit
                                               : kernel == FewKernel::kWide ? DecodeKernel::kWide
                                                                            : DecodeKernel::kRing,
                                               p, device);
            const double own_tiles = ceil_of(keys, 1 << s.tile_shift), places = decode_resident(s, p, device),
                         filled = units * s.row_tiles / places;
            const bool whole = s.uniform;  // decode_units_stay_whole
            rounds = whole ? ceil_of(units * s.row_tiles, places) : std::max(1.0, filled);
            steps = whole ? rounds * own_tiles : std::max(1.0, filled * own_tiles), read *= s.row_tiles;
            merges = !whole && own_tiles > 1 && std::fmod(units * s.row_tiles, places) != 0;
            rows_added = split ? wide : 0;
        }
    }
    const bool cached = p.cache.entries > 0, ragged = p.headdim * 2 % 128 || p.headdim_v * 2 % 128;
    const bool small_pages = p.cache.block_table && p.cache.page_size < 64;
    const double shorter = cached ? 1 - 0.5 * t.cache : 1;
    steps *= shorter * t.of_step *
             (1 + t.step_scores * scores + t.step_pages * small_pages + t.step_rows * rows_added + t.step_natural * natural);
    read *= shorter * t.reads * (1 + t.ragged * ragged), again *= t.reads_again;
    return t.start + t.cache_start * cached + t.of_round * rounds + t.start_scores * scores + t.start_natural * natural + t.merge * merges +
           t.start_rows * rows_added + std::sqrt(steps * steps + read * read + again * again);
}

}  // namespace fa
