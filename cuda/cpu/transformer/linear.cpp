// linear.cpp: out = residual + act(norm(x) weight^T + bias) on the host: distributes the columns of out over the threads.
#include <algorithm>

#include "cpu/common/isa.h"
#include "cpu/common/parallel.h"
#include "cpu/transformer/kernels.h"
#include "cpu/transformer/linear_tile.h"

namespace fa::cpu {
namespace {

LinearKernel linear_kernel() {
#if defined(__x86_64__)
    if (isa_available(Isa::kAvx512)) return kLinearAvx512;
    if (isa_available(Isa::kAvx2)) return kLinearAvx2;
#elif defined(__aarch64__)
    return kLinearNeon;
#endif
    return kLinearPortable;
}

}  // namespace

void linear(const LinearParams& p) {
    const LinearKernel kernel = linear_kernel();
    const int32_t columns = p.columns();
    const int64_t blocks = ceil_div(columns, kLinearOutputs);
    const double weights = double(p.in_features) * p.out_features, bytes = p.weight_dtype == DType::kFloat32 ? 4 : 2;
    // 20 bytes of weights from memory, or 20 multiply-adds, per nanosecond.
    const int threads = worthwhile_threads(weights * std::max(bytes, double(p.rows)) / 20, p.num_threads);
    // Each task prepares x once, so one thread gets one task. Several threads get up to 8 tasks each, because a thread may be interrupted.
    const int64_t tasks = threads == 1 ? 1 : std::min<int64_t>(blocks, 8 * threads);
    parallel_for(tasks, threads, [&](int64_t task, int) {
        const auto start = [&](int64_t i) { return int32_t(std::min<int64_t>(columns, blocks * i / tasks * kLinearOutputs)); };
        kernel({&p, columns, start(task), start(task + 1)});
    });
}

}  // namespace fa::cpu
