// few_queries.h: estimates of how long each kernel takes for a few queries over 16-bit keys, from which the library chooses one.
//
// The numbers of kFewTimes come from tests/few_queries.py, which fits them to the times of 2407 random calls (up to 16 queries, caches and
// biases included) in every kernel that takes them, on an H200. Estimates are off by 13 to 52 % (root mean square of the logarithm, by
// kernel and head dim). The kernel with the least one takes 2.8 % longer than the best kernel in the geometric mean, 3.6 % in calls that
// the fit has not seen, more than 25 % in one call of twenty-five. Calls beyond the data (32,768 keys, 64 sequences) are extrapolated.
//
// The form of an estimate: launches and merges, then the longer of the products of the busiest block and the reads, as the root of the sum
// of their squares. Kernels differ in what a block has: mma_sm80 and wgmma_sm90 all keys of a query head, so that a group's keys are read
// once for each of its heads; the others a share of the keys of a key head.
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
     {2.305, 0.67, 0.637, 0.581, 0.253, 1.113, 2.709, 0.61, 0.455, 1.882, 0, 0, 0, 0.1, 0.157, 1.676},
     {0.942, 2.081, 0.897, 0.598, 0.44, 0.681, 2.93, 1.46, 1.61, 1.046, 0, 0, 0, 0.099, 0.072, 1.211},
     {4.567, 0.228, 1.361, 0.704, 0.252, 3.282, 1.171, 2.122, 3.662, 0.136, 0, 0, 0, 0.099, 0.1, 0.614},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // wgmma_sm90
     {4.465, 1.677, 1.173, 0.624, 0.29, 1.005, 0.895, 0.094, 0.323, 0.775, 0, 0, 0, 0.1, 0.149, 0.389},
     {4.397, 1.768, 1.261, 0.599, 0.392, 0.966, 0.6, 0.099, 0.294, 0.571, 0, 0, 0, 0.092, 0.112, 1.234},
     {5.987, 1.833, 1.858, 0.606, 0.44, 0.485, 0.657, 0.103, 0.319, 0.413, 0, 0, 0, 0.096, 0.113, 0.345},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // wgmma_wide_sm90
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // wgmma_split_sm90
     {3.406, 1.659, 0.888, 0.645, 0, 0, 0, 0.097, 0.3, 0.1, 2.023, 0.158, 0.907, 0.124, 0.218, 1.561},
     {3.657, 1.47, 0.718, 0.689, 0, 0, 0, 0.098, 0.3, 0.1, 1.831, 0.138, 0.997, 0.126, 0.205, 1.558},
     {3.309, 2.581, 0.506, 0.938, 0, 0, 0, 0.101, 0.3, 0.1, 2.172, 0.296, 2.578, 0.096, 0.257, 1.729},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_split_sm80
     {1.725, 1.991, 0.955, 0.901, 0, 0.504, 1.023, 0.123, 0.24, 0.098, 2.215, 3.955, 0.719, 0.481, 0.15, 1.003},
     {2.154, 1.985, 0.562, 0.81, 0, 0.46, 1.436, 0.102, 0.347, 0.098, 2.382, 7.788, 1.675, 0.179, 0.195, 1.022},
     {2.256, 3.631, 1.218, 0.773, 0, 0.362, 0.763, 0.112, 0.275, 0.092, 2.137, 2.665, 3.906, 0.12, 0.134, 1.33},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_wide_sm80
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_ring_sm90
     {3.887, 1.391, 0.45, 0.844, 0, 0, 0, 0.154, 0.303, 0.102, 1.416, 0, 0, 0.878, 0.133, 0.85},
     {4.263, 0.799, 0.514, 0.611, 0, 0, 0, 0.17, 0.274, 0.095, 2.321, 0, 0, 0.082, 0.175, 1.102},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_cluster_sm90
     {2.941, 0.582, 1.349, 0.892, 0, 0, 0, 0.107, 0.278, 0.122, 0, 0.123, 1.441, 0.673, 0.12, 0.416},
     {3.967, 0.21, 0.522, 0.822, 0, 0, 0, 0.304, 0.264, 0.108, 0, 0.061, 1.381, 0.099, 0.153, 0.444},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_lanes_cluster_sm90
     {5.627, 0.218, 0.881, 0.975, 0, 0, 0, 0.089, 0.285, 0.112, 0, 0.204, 3.548, 0.1, 0.287, 0.295},
     {3.508, 0.19, 0.876, 0.817, 0, 0, 0, 0.134, 0.277, 0.095, 0, 0.288, 8.179, 0.091, 0.246, 0.278},
     {4.675, 0.336, 1.449, 0.915, 0, 0, 0, 0.095, 0.281, 0.087, 0, 0.607, 17.869, 0.098, 0.197, 0.33},
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
