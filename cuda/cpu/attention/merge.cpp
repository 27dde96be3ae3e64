// merge.cpp: merges two attention results over disjoint keys into the result over their union.
#include <algorithm>
#include <cmath>

#include "common/half.h"
#include "cpu/attention/kernels.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {
namespace {

// out = weight_a a + weight_b b, for one row. A side with weight 0 is not read.
void merge_row(const MergeParams& p, int64_t a, int64_t b, int64_t out, float weight_a, float weight_b) {
    if (p.dtype == DType::kFloat32 && weight_a != 0 && weight_b != 0) {
        const float *x = static_cast<const float*>(p.out_a.data) + a, *y = static_cast<const float*>(p.out_b.data) + b;
        float* z = static_cast<float*>(p.out.data) + out;
        for (int32_t d = 0; d < p.headdim_v; ++d) z[d] = weight_a * x[d] + weight_b * y[d];
        return;
    }
    for (int32_t d = 0; d < p.headdim_v; ++d) {
        float value = 0;
        if (weight_a != 0) value += weight_a * load(p.out_a.data, a + d, p.dtype);
        if (weight_b != 0) value += weight_b * load(p.out_b.data, b + d, p.dtype);
        store(p.out.data, out + d, p.dtype, value);
    }
}

}  // namespace

void merge(const MergeParams& p) {
    const int64_t rows = int64_t(p.batch) * p.seqlen;
    const double elements = double(rows) * p.nheads * p.headdim_v;
    const int threads = int(std::clamp(elements / 500e3, 1.0, double(p.num_threads)));  // a quarter of a millisecond of work per thread
    constexpr int64_t kRows = 16;
    parallel_for((rows + kRows - 1) / kRows, threads, [&](int64_t task, int) {
        for (int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) {
            const int64_t b = row / p.seqlen, i = row % p.seqlen;
            for (int64_t head = 0; head < p.nheads; ++head) {
                const int64_t at = (b * p.nheads + head) * p.seqlen + i;
                const float lse_a = p.lse_a[at], lse_b = p.lse_b[at];
                const float larger = lse_a > lse_b || std::isnan(lse_a) ? lse_a : lse_b;
                float weight_a = 0, weight_b = 0, lse = -INFINITY;
                if (larger != -INFINITY) {  // otherwise both sides are empty
                    weight_a = std::exp(lse_a - larger), weight_b = std::exp(lse_b - larger);
                    const float sum = weight_a + weight_b;
                    weight_a /= sum, weight_b /= sum, lse = larger + std::log(sum);
                }
                const auto offset = [&](const TensorView& t) { return b * t.batch + i * t.row + head * t.head; };
                merge_row(p, offset(p.out_a), offset(p.out_b), offset(p.out), weight_a, weight_b);
                p.lse[at] = lse;
            }
        }
    });
}

}  // namespace fa::cpu
