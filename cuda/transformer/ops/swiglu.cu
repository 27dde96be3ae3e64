// swiglu.cu: out = silu(gate) * up for every row; gate is the first half of a row, up the second. Bound by memory.
#include "device/launch.h"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

namespace fa {
namespace {

constexpr int kThreads = 256;

bool in_fours(const SwigluParams& p) {
    return p.dim % 4 == 0 && by_fours(p.gate_up.data, p.gate_up.row, p.dtype) && by_fours(p.out.data, p.out.row, p.out_dtype);
}

// kWidth: elements per load, 1 or 4.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const __grid_constant__ SwigluParams p) {
    launch_dependents();
    grid_dependency_wait();
    const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int columns = p.dim / kWidth;
    const int64_t row = index / columns;
    if (row >= p.rows) return;
    const int64_t d = kWidth * (index % columns), gate = row * p.gate_up.row + d, up = gate + p.dim, out = row * p.out.row + d;
    if constexpr (kWidth == 4) {
        const float4 g = load_4(p.gate_up.data, gate, p.dtype), u = load_4(p.gate_up.data, up, p.dtype);
        store_4(p.out.data, out, p.out_dtype, make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w));
    } else {
        const float g = load_element(p.gate_up.data, gate, p.dtype), u = load_element(p.gate_up.data, up, p.dtype);
        store_element(p.out.data, out, p.out_dtype, silu(g) * u);
    }
}

}  // namespace

int64_t swiglu_blocks(const SwigluParams& p) { return (p.rows * (in_fours(p) ? p.dim / 4 : p.dim) + kThreads - 1) / kThreads; }

cudaError_t swiglu(const SwigluParams& p, const DeviceInfo&, cudaStream_t stream) {
    return launch_kernel(in_fours(p) ? swiglu_kernel<4> : swiglu_kernel<1>, unsigned(swiglu_blocks(p)), kThreads, 0, stream, p,
                         p.programmatic);
}

}  // namespace fa
