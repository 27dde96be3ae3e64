// short_gradients.h: estimates of how long the gradients of short sequences take in mma_short_sm80 and in Hopper's kernels for long ones,
// from which the library chooses.
//
// The numbers come from tests/short_gradients.py, which fits them to the times of 1778 random calls (up to 640 rows, every option) in both,
// on an H200. The kernel with the lower estimate takes 0.5 % longer than the faster one in the geometric mean.
#pragma once

#include <algorithm>

#include "attention/backward/mma_short_sm80.h"
#include "attention/backward/wgmma_sm90/walk_parts.h"

namespace fa {

// Microseconds, and factors.
struct GradientTimes {
    float start, of_round, of_step;             // the launches; each time that the GPU is filled with blocks; a step of a block
    float extra;                                // of clusters, or of the addition of parts
    float rows;                                 // of a step that adds dq, or of 2^20 elements of dq before and after the main kernel
    float bias, mask, natural, dropout, pairs;  // what these add to a step; natural: softcap, ALiBi; mask: of keys
    float lists;                                // what a mask of pairs adds to the launches
};
// Head dims to 64, to 128, to 256.
constexpr GradientTimes kShortGradients[3] = {{2.8, 4.642, 2.467, 1.15, 2.894, 1.07, 0.655, 0.587, 0.718, 1.014, 0.868},
                                              {2.283, 7.831, 4.483, 0.851, 6.057, 0.698, 0.493, 0.62, 0.484, 0.678, 0.793},
                                              {2.895, 10.529, 3.682, 0.761, 5.832, 1.149, 0.529, 0.718, 0.354, 0.979, 1.011}};
constexpr GradientTimes kLongGradients[3] = {{9.335, 0.099, 1.981, 8.703, 3.623, 0.563, 0.104, 0.169, 0.457, 0.207, 8.619},
                                             {8.412, 1.136, 2.07, 12.836, 3.201, 0.47, 0.081, 0.166, 0.285, 0.125, 6.134},
                                             {9.682, 3.977, 1.911, 15.25, 3.901, 0.415, 0.074, 0.119, 0.443, 0.097, 6.905}};

// Whether the estimates are for such calls.
inline bool short_gradients_known(const AttentionParams& p, const DeviceInfo& device) {
    constexpr int32_t kMostRows = 640;
    return device.compute == 90 && p.batch > 0 && p.seqlen_q > 0 && p.seqlen_q <= kMostRows && p.seqlen_k > 0 && !p.cu_seqlens_q &&
           !p.hides_tiles() && !backward_plan(backward_choose(p)).general;
}

inline double gradients_time(const GradientTimes (&times)[3], const AttentionParams& p, double rounds, double steps, double extra,
                             double rows) {
    const int bucket = backward_short_bucket(p);
    const GradientTimes& t = times[bucket == 64 ? 0 : bucket == 128 ? 1 : 2];
    const bool pairs = p.mask.data && p.mask.row != 0, keys = p.mask.data && !pairs, natural = p.softcap != 0 || p.alibi_slopes;
    const double options = 1 + t.bias * (p.bias.data != nullptr) + t.mask * keys + t.natural * natural +
                           t.dropout * (p.dropout_threshold != 0) + t.pairs * pairs;
    return t.start + t.lists * pairs + t.of_round * rounds + t.of_step * steps * options + t.extra * extra + t.rows * rows;
}
inline double short_gradients_time(const AttentionParams& p, const DeviceInfo& device) {
    const BackwardShortPlan plan = backward_short_plan(p, device);
    const double owners = double(plan.key_clusters) * plan.tiles_q * p.group +
                          (plan.keys_write_dq ? 0.0 : double(plan.clusters - plan.key_clusters) * plan.tiles_k);  // steps of all
    const double steps = std::max(double(plan.steps), owners / plan.places);
    return gradients_time(kShortGradients, p, double(ceil_div(plan.clusters * plan.blocks, plan.places)), steps, plan.blocks > 1,
                          plan.keys_write_dq ? steps : 0);
}
inline double long_gradients_time(const BackwardParams& b, const DeviceInfo& device) {
    const AttentionParams& p = b.forward;
    const BackwardPlan plan = backward_plan(backward_choose(p));
    const WalkParts parts = backward_walk_parts(b, plan, device.multiprocessors);
    const int64_t blocks = backward_blocks(p, plan) * parts.count(), slots = std::max(1, device.multiprocessors / plan.blocks());
    const double elements = double(p.batch) * p.nheads * p.seqlen_q * plan.columns() / 1e6;
    return gradients_time(kLongGradients, p, double(ceil_div(blocks, slots)),
                          time_of_parts(p, plan, device.multiprocessors, head_walk(p, plan), parts), parts.count() > 1,
                          query_tiles(b, plan).direct ? elements / 2 : elements);
}

inline bool short_gradients_are_faster(const BackwardParams& b, const DeviceInfo& device) {
    return short_gradients_time(b.forward, device) < long_gradients_time(b, device);
}

}  // namespace fa
