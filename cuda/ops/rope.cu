// rope.cu: rotary position embedding, both conventions of flash-attn: the pairs of a head are (j, j + rotary_dim / 2), or neighbours
// when interleaved. A block takes a token; a thread reads a
// pair and writes it, so that out may be x. Bound by memory.
#include "device/ptx.cuh"
#include "ops/elements.cuh"
#include "ops/kernels.h"

namespace fa {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeParams p) {
    launch_dependents();
    grid_dependency_wait();
    const int pairs = (p.headdim + 1) / 2, half = p.rotary_dim / 2;
    const int b = int(blockIdx.x / p.seqlen), i = int(blockIdx.x % p.seqlen);
    const int64_t table = rope_row(p, b, i) * p.table_row;
    for (int index = threadIdx.x; index < p.nheads * pairs; index += kThreads) {
        const int head = index / pairs, pair = index % pairs;
        const int64_t x = b * p.x.batch + i * p.x.row + head * p.x.head, out = b * p.out.batch + i * p.out.row + head * p.out.head;
        if (pair < half) {
            const float c = load_element(p.cos, table + pair, p.table_dtype), s = load_element(p.sin, table + pair, p.table_dtype);
            const float sine = p.inverse ? -s : s;
            const int first = p.interleaved ? 2 * pair : pair, second = p.interleaved ? first + 1 : pair + half;
            const float a = load_element(p.x.data, x + first, p.dtype), z = load_element(p.x.data, x + second, p.dtype);
            store_element(p.out.data, out + first, p.dtype, a * c - z * sine);
            store_element(p.out.data, out + second, p.dtype, a * sine + z * c);
        } else if (p.out.data != p.x.data) {  // what is not rotated is copied
            for (int d = 2 * pair; d < 2 * pair + 2 && d < p.headdim; ++d)
                store_element(p.out.data, out + d, p.dtype, load_element(p.x.data, x + d, p.dtype));
        }
    }
}

}  // namespace

int64_t rope_blocks(const RopeParams& p) { return int64_t(p.batch) * p.seqlen; }

cudaError_t rope(const RopeParams& p, cudaStream_t stream) {
    return launch_kernel(rope_kernel, unsigned(rope_blocks(p)), kThreads, 0, stream, p, p.programmatic);
}

}  // namespace fa
