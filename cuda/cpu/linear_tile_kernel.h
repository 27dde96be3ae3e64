// linear_tile_kernel.h: dot products of a few rows of x with rows of weight, the inner part of the CPU's linear. Compiled once per
// instruction set by tiles_<isa>.cpp, after tile_kernel.h, which brings rows.h; it also says
//     FA_LINEAR  the LinearKernel to define
// Bound by the memory the weights come from.
#include "linear_tile.h"

namespace fa::cpu::FA_ISA {
namespace {

// kWeights rows of weight from row n on, each number of x read once for all of them.
template <DType dtype, int kWeights>
FA_INLINE void dot(LinearTile& t, int n) {
    constexpr int size = dtype == DType::kFloat32 ? 4 : 2;
    const char* const weight = t.weight + n * t.weight_bytes;
    for (int m = 0; m < t.rows; ++m) {
        Vec sum[kWeights] = {};
        int d = 0;
        for (; d + L <= t.columns; d += L) {
            const Vec x = load_unaligned<Vec>(t.x[m] + d);
            for (int i = 0; i < kWeights; ++i) sum[i] += load_vector<dtype>(weight + i * t.weight_bytes + int64_t(d) * size) * x;
        }
        if (d < t.columns) {
            const Vec x = load_unaligned<Vec>(t.x[m] + d);
            for (int i = 0; i < kWeights; ++i)
                sum[i] += load_partial<dtype>(weight + i * t.weight_bytes + int64_t(d) * size, t.columns - d) * x;
        }
        for (int i = 0; i < kWeights; ++i)
            for (int l = 0; l < L; ++l) t.sums[m][n + i] += sum[i][l];
    }
}

template <DType dtype>
void linear_rows(LinearTile& t) {
    int n = 0;
    for (; n + 4 <= t.outputs; n += 4) dot<dtype, 4>(t, n);
    for (; n < t.outputs; ++n) dot<dtype, 1>(t, n);
}

void run_linear(LinearTile& t) {
    if (t.dtype == DType::kFloat32) linear_rows<DType::kFloat32>(t);
    else if (t.dtype == DType::kFloat16) linear_rows<DType::kFloat16>(t);
    else linear_rows<DType::kBFloat16>(t);
}

}  // namespace
}  // namespace fa::cpu::FA_ISA

namespace fa::cpu {
const LinearKernel FA_LINEAR = FA_ISA::run_linear;
}
