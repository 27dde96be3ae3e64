// sampling.cpp: draws tokens on the host, the same ones as sampling.cu: transformer/ops/sampling.h has all the arithmetic. Must be
// compiled with -ffp-contract=off.
#include "transformer/ops/sampling.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "common/half.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"

namespace fa::cpu {
namespace {

class Row {
public:
    Row(const SampleParams& p, int32_t b) : p_(p), b_(b), start_(b * p.logits.row) {}

    int32_t draw() {
        uint64_t best = 0;
        for (int32_t i = 0; i < p_.vocab; ++i) best = std::max(best, rank_of(logit(i), uint32_t(i)));
        largest_ = logit_of(best);
        if (largest_ != largest_ || largest_ == -std::numeric_limits<float>::infinity()) return -1;
        if (p_.greedy) return int32_t(index_of(best));

        uint64_t mass = 0;
        std::fill_n(count_, kBins, 0);
        std::fill_n(weight_, kBins, 0);
        for (int32_t i = 0; i < p_.vocab; ++i) {
            const float e = exponent(logit(i));
            const uint64_t weight = weight_of(e);
            ++count_[bin_of(e)], weight_[bin_of(e)] += weight, mass += weight;
        }
        if (p_.top_k && p_.top_k < p_.vocab) find(true, uint64_t(p_.top_k), &mass);
        if (!(p_.top_p >> 32)) find(false, nucleus_target(mass, p_.top_p), &mass);
        return int32_t(index_of(find(false, multiply_high(sample_bits(p_, b_), mass) + 1, &mass)));
    }

private:
    float logit(int32_t i) const { return load(p_.logits.data, start_ + i, p_.dtype); }
    float exponent(float logit) const { return exponent_of(logit, largest_, p_.scale); }

    // The rank of the first token at which the running sum, of counts or of weights, reaches target >= 1. *mass becomes the sum of the
    // weights up to and including that token.
    uint64_t find(bool by_count, uint64_t target, uint64_t* mass) const {
        uint64_t sum = 0, weights = 0;  // over the bins before this one
        int bin = 0;
        while (sum + (by_count ? count_[bin] : weight_[bin]) < target)
            sum += by_count ? count_[bin] : weight_[bin], weights += weight_[bin++];
        uint64_t below = ~0ull;  // ranks from here up have been added
        for (;;) {
            // The bin's next tokens in order of rank, as many as members[] holds.
            uint64_t members[kMembers];
            int count = 0;
            for (int32_t i = 0; i < p_.vocab; ++i) {
                const float value = logit(i);
                const uint64_t rank = rank_of(value, uint32_t(i));
                if (bin_of(exponent(value)) != bin || rank >= below) continue;
                if (count < kMembers) {
                    members[count++] = rank;
                    if (count == kMembers) std::make_heap(members, members + count, std::greater<>());
                } else if (rank > members[0]) {  // replaces the heap's smallest
                    std::pop_heap(members, members + count, std::greater<>());
                    members[count - 1] = rank;
                    std::push_heap(members, members + count, std::greater<>());
                }
            }
            std::sort(members, members + count, std::greater<>());
            for (int i = 0; i < count; ++i) {
                const uint64_t weight = weight_of(exponent(logit_of(members[i])));
                sum += by_count ? 1 : weight, weights += weight;
                if (sum >= target) {
                    *mass = weights;
                    return members[i];
                }
            }
            below = members[count - 1];
        }
    }

    static constexpr int kMembers = 4096;
    const SampleParams& p_;
    const int32_t b_;
    const int64_t start_;
    float largest_ = 0;
    uint32_t count_[kBins];
    uint64_t weight_[kBins];
};

}  // namespace

void sample(const SampleParams& p) {
    const int threads = worthwhile_threads(double(p.batch) * p.vocab * (p.greedy ? 1 : 20), p.num_threads);
    parallel_for(p.batch, threads, [&](int64_t b, int) { p.out[b] = Row(p, int32_t(b)).draw(); });
}

}  // namespace fa::cpu
