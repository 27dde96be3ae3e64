// short_gradients.h: estimates of how long the gradients of short sequences take in mma_short_sm80 and in Hopper's kernels for long ones,
// from which the library chooses.
//
// The numbers come from tests/short_gradients.py, which fits them to the times of 1300 random calls (up to 640 rows, every option) in both,
// on an H200. The kernel with the lower estimate takes 0.4 % longer than the faster one in the geometric mean.
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
constexpr GradientTimes kShortGradients[3] = {{2.855, 4.072, 2.697, 0.914, 2.945, 1.04, 0.462, 0.763, 0.48, 0.665, 0.86},
                                              {2.434, 5.967, 4.644, 1.714, 5.847, 0.906, 0.674, 0.643, 0.501, 0.821, 0.944},
                                              {4.685, 8.21, 4.645, 0.882, 5.333, 0.684, 0.222, 0.405, 0.391, 0.582, 1.002}};
constexpr GradientTimes kLongGradients[3] = {{8.295, 0.114, 1.572, 7.783, 4.885, 0.731, 0.103, 0.257, 0.524, 0.34, 13.612},
                                             {7.974, 0.242, 1.941, 10.168, 3.374, 0.36, 0.096, 0.159, 0.288, 0.152, 14.013},
                                             {8.411, 1.198, 2.196, 10.974, 3.383, 0.278, 0.068, 0.045, 0.278, 0.077, 12.696}};

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
    return gradients_time(kLongGradients, p, double(ceil_div(blocks, slots)), time_of_parts(p, plan, device.multiprocessors, parts),
                          parts.count() > 1, query_tiles(b, plan).direct ? elements / 2 : elements);
}

inline bool short_gradients_are_faster(const BackwardParams& b, const DeviceInfo& device) {
    return short_gradients_time(b.forward, device) < long_gradients_time(b, device);
}

}  // namespace fa
