// few_queries.h: estimates of how long each kernel takes for a few queries over 16-bit keys, from which the library chooses one.
//
// The numbers of kFewTimes come from tests/few_queries.py, which fits them to the times of 2300 random calls (up to 64 queries, caches and
// biases included) in every kernel that takes them, on an H200. A time is the geometric mean of two: of keys that lie in L2, and of keys
// in memory. The kernel with the least estimate takes 1.4 % longer than the best kernel in the geometric mean, 2.7 % in calls that the fit
// has not seen, more than 25 % in one call of seventy. Calls beyond the data (32,768 keys, 64 sequences) are extrapolated.
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
    float step_pages;                   // what pages below 64 rows, of mma_sm80 any pages, add to a step
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
     {2.993, 0.683, 0.612, 0.798, 0.244, 3.541, 2.883, 1.039, 2.808, 1.819, 0, 0, 0, 0.102, 0.377, 0.798},
     {1.375, 2.276, 0.88, 0.735, 0.324, 5.145, 2.969, 1.72, 5.184, 1.094, 0, 0, 0, 0.095, 0.124, 0.584},
     {1.146, 3.137, 0.787, 0.634, 0.305, 3.48, 2.073, 2.114, 3.01, 0.828, 0, 0, 0, 0.136, 0.189, 0.319},
     {2.304, 2.768, 1.506, 0.702, 0.352, 0.559, 2.054, 2.18, 0.313, 0.94, 0, 0, 0, 0.1, 0.216, 0.299}},
    {  // wgmma_sm90
     {4.735, 1.796, 1.03, 0.533, 0.288, 2.407, 0.585, 0.095, 0.338, 1.425, 0, 0, 0, 0.1, 0.154, 0.265},
     {5.714, 1.56, 1.171, 0.636, 0.29, 2.638, 0.559, 0.099, 2.184, 0.417, 0, 0, 0, 0.094, 0.113, 1.047},
     {7.04, 1.715, 1.897, 0.561, 0.4, 0.553, 0.628, 0.1, 0.326, 0.645, 0, 0, 0, 0.082, 0.132, 0.328},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // wgmma_wide_sm90
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {7.655, 2.029, 2.295, 0.607, 0.934, 0.614, 1.099, 0.103, 0.305, 0.109, 0, 0, 0, 0.1, 0.15, 0.266}},
    {  // wgmma_split_sm90
     {3.769, 1.373, 0.857, 0.689, 0, 0, 0, 0.096, 0.3, 0.1, 2.292, 0.155, 0.883, 0.116, 0.162, 2.741},
     {4.098, 1.588, 0.803, 0.603, 0, 0, 0, 0.099, 0.3, 0.1, 2.108, 0.188, 0.916, 0.244, 0.2, 1.044},
     {2.861, 3.376, 0.522, 0.718, 0, 0, 0, 0.101, 0.3, 0.1, 4.072, 0.299, 2.497, 0.108, 0.182, 1.096},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_split_sm80
     {1.697, 2.344, 0.879, 0.887, 0, 0.539, 1.249, 0.387, 0.442, 0.101, 3.017, 2.12, 0.714, 0.55, 0.228, 0.958},
     {1.986, 2.718, 0.673, 0.907, 0, 0.595, 1.108, 0.091, 0.437, 0.104, 2.907, 3.931, 0.781, 0.071, 0.22, 1.438},
     {2.406, 3.652, 1.171, 0.67, 0, 0.4, 0.734, 0.105, 0.289, 0.094, 3.328, 2.526, 1.221, 0.091, 0.149, 1.215},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_wide_sm80
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {3.426, 2.72, 1.611, 0.709, 0, 0.477, 0.671, 0.111, 0.295, 0.106, 2.266, 0, 0, 0.1, 0.166, 0.337}},
    {  // decode_ring_sm90
     {4.439, 1.177, 0.39, 0.808, 0, 0, 0, 0.116, 0.299, 0.088, 2.435, 0, 0, 0.773, 0.232, 0.567},
     {4.495, 0.894, 0.351, 0.824, 0, 0, 0, 0.108, 0.199, 0.107, 3.029, 0, 0, 0.197, 0.24, 1.23},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_cluster_sm90
     {3.308, 0.529, 1.313, 0.915, 0, 0, 0, 0.109, 0.235, 0.153, 0, 0.078, 1.284, 0.981, 0.094, 0.581},
     {5.191, 0.215, 0.57, 1.01, 0, 0, 0, 0.3, 0.282, 0.107, 0, 0.087, 0.926, 0.099, 0.144, 0.237},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
     {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}},
    {  // decode_lanes_cluster_sm90
     {6.202, 0.205, 0.612, 0.99, 0, 0, 0, 0.087, 0.282, 0.105, 0, 0.182, 3.356, 0.1, 0.225, 0.303},
     {4.401, 0.303, 0.869, 0.839, 0, 0, 0, 0.098, 0.289, 0.099, 0, 0.279, 8.237, 0.094, 0.246, 0.306},
     {3.925, 0.342, 1.494, 0.935, 0, 0, 0, 0.097, 0.286, 0.091, 0, 0.457, 18.602, 0.095, 0.18, 0.333},
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
            const double heads = double(p.batch) * p.nheads, blocks = kernel == FewKernel::kWgmmaWide ? 2 * heads : heads;
            rounds = ceil_of(blocks, sms * (mma && bucket <= 2 ? 2 : 1));
            steps = rounds * ceil_of(keys, !mma ? 128 : bucket <= 1 ? 64 : 32);
            again = heads * bytes / 6.5e6;
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
    const bool slow_pages = p.cache.block_table && (kernel == FewKernel::kMma || p.cache.page_size < 64);
    const double shorter = cached ? 1 - 0.5 * t.cache : 1;
    steps *= shorter * t.of_step *
             (1 + t.step_scores * scores + t.step_pages * slow_pages + t.step_rows * rows_added + t.step_natural * natural);
    read *= shorter * t.reads * (1 + t.ragged * ragged), again *= t.reads_again;
    return t.start + t.cache_start * cached + t.of_round * rounds + t.start_scores * scores + t.start_natural * natural + t.merge * merges +
           t.start_rows * rows_added + std::sqrt(steps * steps + read * read + again * again);
}

}  // namespace fa
