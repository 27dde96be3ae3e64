// few_queries.cpp: which of the kernels for 16-bit keys is the fastest for a few queries.
#include <cmath>
#include <cstring>

#include "api/attention/registry.h"
#include "api/common/dispatch.h"

#if FA_WITH_CUDA && FA_WITH_MMA_SM80 && FA_WITH_WGMMA_SM90
#include "attention/decode/common/few_queries.h"

namespace fa {
namespace {

// In the order of FewKernel.
constexpr const char* kNames[kFewKernels] = {"mma_sm80",         "wgmma_sm90",          "wgmma_wide_sm90",
                                             "wgmma_split_sm90", "decode_split_sm80",   "decode_wide_sm80",
                                             "decode_ring_sm90", "decode_cluster_sm90", "decode_lanes_cluster_sm90"};
struct Rows {
    const Kernel* of[kFewKernels] = {};
    Rows() {
        const Table<Kernel> table = forward_kernels();
        for (int i = 0; const Kernel* const kernel = table.row(i); ++i)
            for (int k = 0; k < kFewKernels; ++k)
                if (!std::strcmp(kernel->name, kNames[k])) of[k] = kernel;
    }
};

}  // namespace

const Kernel* fastest_for_few_queries(const AttentionParams& p, const DeviceInfo& device) {
    if (!few_queries_known(p, device)) return nullptr;
    static const Rows rows;
    double times[kFewKernels];
    for (int k = 0; k < kFewKernels; ++k)
        times[k] = few_queries_need_balance(FewKernel(k), p) ? HUGE_VAL : few_queries_time(FewKernel(k), p, device);
    const uint32_t call = features_of(p);
    for (int tries = 0; tries < kFewKernels; ++tries) {
        int best = 0;
        for (int k = 1; k < kFewKernels; ++k)
            if (times[k] < times[best]) best = k;
        if (times[best] == HUGE_VAL) return nullptr;
        char text[1];
        const Kernel* const kernel = rows.of[best];
        if (kernel && kernel->built() && !refusal(*kernel, call, p, device, text, 0).reason) return kernel;
        times[best] = HUGE_VAL;
    }
    return nullptr;
}

}  // namespace fa
#else
namespace fa {
const Kernel* fastest_for_few_queries(const AttentionParams&, const DeviceInfo&) { return nullptr; }
}  // namespace fa
#endif
