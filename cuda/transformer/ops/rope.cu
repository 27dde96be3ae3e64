// rope.cu: rotary position embedding in both conventions of flash-attn: the pairs of a head are (j, j + rotary_dim / 2) or, interleaved,
// (2 j, 2 j + 1). A block takes one token. A thread reads whole pairs before it writes them, so out may be x. Bound by memory.
#include "device/launch.h"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

namespace fa {
namespace {

constexpr int kThreads = 256;

// kWidth: pairs per step, 1 or 4.
template <int kWidth>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeParams p) {
    launch_dependents();
    grid_dependency_wait();
    const int half = p.rotary_dim / 2, pairs = (p.headdim + 1) / 2, per_head = pairs / kWidth;
    const int b = int(blockIdx.x / p.seqlen), i = int(blockIdx.x % p.seqlen);
    const int64_t table = rope_row(p, b, i) * p.table_row;
    const float sign = p.inverse ? -1.0f : 1.0f;
    for (int index = threadIdx.x; index < p.nheads * per_head; index += kThreads) {
        const int head = index / per_head, pair = index % per_head * kWidth;
        const int64_t x = b * p.x.batch + i * p.x.row + head * p.x.head, out = b * p.out.batch + i * p.out.row + head * p.out.head;
        const int first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? first + kWidth : pair + half;
        if (pair >= half) {  // past rotary_dim: copied
            if (p.out.data == p.x.data) continue;
            for (int d = 2 * pair; d < 2 * pair + 2 * kWidth && d < p.headdim; ++d)
                store_element(p.out.data, out + d, p.dtype, load_element(p.x.data, x + d, p.dtype));
        } else if constexpr (kWidth == 4) {
            const float4 c = load_4(p.cos, table + pair, p.table_dtype), t = load_4(p.sin, table + pair, p.table_dtype);
            const float4 s = make_float4(sign * t.x, sign * t.y, sign * t.z, sign * t.w);
            float4 a = load_4(p.x.data, x + first, p.dtype), z = load_4(p.x.data, x + second, p.dtype);
            if (p.interleaved) {
                const float4 l = a, r = z;
                a = make_float4(l.x * c.x - l.y * s.x, l.x * s.x + l.y * c.x, l.z * c.y - l.w * s.y, l.z * s.y + l.w * c.y);
                z = make_float4(r.x * c.z - r.y * s.z, r.x * s.z + r.y * c.z, r.z * c.w - r.w * s.w, r.z * s.w + r.w * c.w);
            } else {
                const float4 l = a, r = z;
                a = make_float4(l.x * c.x - r.x * s.x, l.y * c.y - r.y * s.y, l.z * c.z - r.z * s.z, l.w * c.w - r.w * s.w);
                z = make_float4(l.x * s.x + r.x * c.x, l.y * s.y + r.y * c.y, l.z * s.z + r.z * c.z, l.w * s.w + r.w * c.w);
            }
            store_4(p.out.data, out + first, p.dtype, a);
            store_4(p.out.data, out + second, p.dtype, z);
        } else {
            const float c = load_element(p.cos, table + pair, p.table_dtype), s = sign * load_element(p.sin, table + pair, p.table_dtype);
            const float a = load_element(p.x.data, x + first, p.dtype), z = load_element(p.x.data, x + second, p.dtype);
            store_element(p.out.data, out + first, p.dtype, a * c - z * s);
            store_element(p.out.data, out + second, p.dtype, a * s + z * c);
        }
    }
}

bool in_fours(const RopeParams& p) {
    const auto aligned = [&](const TensorView& t) { return by_fours(t.data, t.batch | t.row | t.head, p.dtype); };
    return p.headdim % 8 == 0 && p.rotary_dim % 8 == 0 && aligned(p.x) && aligned(p.out) && by_fours(p.cos, p.table_row, p.table_dtype) &&
           by_fours(p.sin, p.table_row, p.table_dtype);
}

}  // namespace

int64_t rope_blocks(const RopeParams& p) { return int64_t(p.batch) * p.seqlen; }

cudaError_t rope(const RopeParams& p, const DeviceInfo&, cudaStream_t stream) {
    return launch_kernel(in_fours(p) ? rope_kernel<4> : rope_kernel<1>, unsigned(rope_blocks(p)), kThreads, 0, stream, p, p.programmatic);
}

}  // namespace fa
