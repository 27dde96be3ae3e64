// backward_wgmma_sm90_rows.cu: what the Hopper backward does row by row, around its main kernel.
//     before   delta = rowsum(dout * out); lse in units of log2, +inf past the end so that P = 0; zeros to add dQ to, where blocks add when
//              they come
//     after    dQ from the order of the accumulators to rows, times softmax_scale
// Both are bound by memory: 16 bytes a lane, a block for every tile of queries.
#include <cmath>
#include <type_traits>

#include "attention/backward_wgmma_sm90_rows.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kThreads = 256;

struct RowsParams {
    BackwardParams b;
    QueryTiles tiles;
};

// The block's tile: sequence, head, first row. False for a tile that no sequence owns.
struct TilePlace {
    int64_t tile;  // in QueryTiles
    int batch, head, row0;
    Sequence s;
};
__device__ bool find_tile(const RowsParams& params, TilePlace& at) {
    const AttentionParams& p = params.b.forward;
    const QueryTiles& t = params.tiles;
    at.tile = blockIdx.x;
    const int sequence_head = blockIdx.x / unsigned(t.tiles);
    int m = blockIdx.x - sequence_head * t.tiles;
    at.batch = sequence_head / p.nheads, at.head = sequence_head % p.nheads;
    if (p.cu_seqlens_q) {
        at.head = sequence_head;
        const auto first_tile = [&](int b) { return clamp_to(p.cu_seqlens_q[b], 0, p.total_q) / t.block_m + b; };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (first_tile(middle) <= m) low = middle;
            else high = middle - 1;
        }
        at.batch = low, m -= first_tile(low);
    }
    at.row0 = m * t.block_m;
    at.s = sequence_of(p, at.batch);
    return at.row0 >= 0 && at.row0 < at.s.seqlen_q;
}

template <typename T, int kColumns, int kBlockM>
__global__ void __launch_bounds__(kThreads) before_kernel(const __grid_constant__ RowsParams params) {
    constexpr float kLog2E = 1.4426950408889634f;
    constexpr int kLanes = kColumns == 64 ? 8 : kColumns == 128 ? 16 : 32, kRows = kThreads / kLanes;  // lanes of a row, rows at a time
    const AttentionParams& p = params.b.forward;
    TilePlace at;
    if (!find_tile(params, at)) return;
    const int lane = threadIdx.x % kLanes;
    const T* out = static_cast<const T*>(p.out.data) + at.s.out + at.head * p.out.head + 8 * lane;
    const T* dout =
        static_cast<const T*>(params.b.dout.data) + gradients_of(params.b, at.batch).dout + at.head * params.b.dout.head + 8 * lane;
#pragma unroll
    for (int r = threadIdx.x / kLanes; r < kBlockM; r += kRows) {
        const int row = at.row0 + r;
        float sum = 0.0f;
        if (row < at.s.seqlen_q && 8 * lane < p.headdim_v) {
            const uint4 x = *reinterpret_cast<const uint4*>(out + row * p.out.row);
            const uint4 y = *reinterpret_cast<const uint4*>(dout + row * params.b.dout.row);
            const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 a = unpack_16<T>(xs[i]), b = unpack_16<T>(ys[i]);
                sum += a.x * b.x + a.y * b.y;
            }
        }
#pragma unroll
        for (int i = kLanes / 2; i > 0; i /= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (lane == 0) {
            const int64_t place = at.tile * kBlockM + quad_order(r);
            const float lse = row < at.s.seqlen_q ? p.lse[lse_offset(p, at.s, at.head) + row] : -INFINITY;
            params.tiles.lse[place] = lse == -INFINITY ? INFINITY : lse * kLog2E;
            params.tiles.delta[place] = lse == -INFINITY ? 0.0f : sum;
        }
    }
    if (threadIdx.x == 0) params.tiles.turn[at.tile] = 0;
    if (!params.tiles.zeroed) return;
    float4* dq = reinterpret_cast<float4*>(params.tiles.dq) + at.tile * (kBlockM * kColumns / 4);
#pragma unroll
    for (int i = threadIdx.x; i < kBlockM * kColumns / 4; i += kThreads) dq[i] = make_float4(0, 0, 0, 0);
}

template <typename T, int kColumns, int kBlockM>
__global__ void __launch_bounds__(kThreads) after_kernel(const __grid_constant__ RowsParams params) {
    constexpr int kGroups = kColumns / 8;  // of eight columns, 16 bytes
    const AttentionParams& p = params.b.forward;
    TilePlace at;
    if (!find_tile(params, at)) return;
    const Range blocks = key_blocks_of(visible_band(p, at.s), at.row0, kBlockM, params.tiles.block_n);
    const bool written = params.tiles.zeroed || blocks.begin < blocks.end;  // else no key block meets the tile: its gradient is zero
    const float4* dq = reinterpret_cast<const float4*>(params.tiles.dq) + at.tile * (kBlockM * kColumns / 4);
    T* rows = static_cast<T*>(params.b.dq.data) + gradients_of(params.b, at.batch).dq + at.head * params.b.dq.head;
#pragma unroll
    for (int i = threadIdx.x; i < kBlockM / 2 * kGroups; i += kThreads) {
        // Columns 8 group .. + 7 of rows g and g + 8 of a warp's sixteen: the quad's four accumulator groups.
        const int group = i % kGroups, g = i / kGroups % 8, warp = i / kGroups / 8 % 4, chunk = i / kGroups / 32;
        const int piece = chunk * (kColumns / 64) + group / 8;
        const float4* quad = dq + piece * (kDqPiece / 4) + group % 8 * 128 + warp * 32 + g * 4;
        float4 x[4] = {};
        if (written) x[0] = quad[0], x[1] = quad[1], x[2] = quad[2], x[3] = quad[3];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = at.row0 + chunk * 64 + warp * 16 + g + 8 * r;
            if (row >= at.s.seqlen_q || 8 * group >= p.headdim) continue;
            uint4* place = reinterpret_cast<uint4*>(rows + row * params.b.dq.row + 8 * group);
            uint32_t old[4] = {};
            if (params.b.accumulate) reinterpret_cast<uint4&>(old) = *place;
            uint32_t packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 before = unpack_16<T>(old[j]);
                const float low = (r ? x[j].z : x[j].x) * p.scale, high = (r ? x[j].w : x[j].y) * p.scale;
                packed[j] = params.b.accumulate ? pack_16<T>(before.x + low, before.y + high) : pack_16<T>(low, high);
            }
            *place = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

enum class Rows { kBefore, kAfter };

template <Rows kWhich>
cudaError_t launch(const BackwardParams& b, const QueryTiles& tiles, cudaStream_t stream) {
    const RowsParams params{b, tiles};
    const auto start = [&](auto element, auto columns, auto block_m) {
        using T = decltype(element);
        const auto kernel = kWhich == Rows::kBefore ? before_kernel<T, columns(), block_m()> : after_kernel<T, columns(), block_m()>;
        return launch_kernel(kernel, unsigned(tiles.count()), kThreads, 0, stream, params);
    };
    const auto shape = [&](auto element) {
        using std::integral_constant;
        if (tiles.block_m == 128) return start(element, integral_constant<int, 64>{}, integral_constant<int, 128>{});
        switch (tiles.columns) {
            case 64: return start(element, integral_constant<int, 64>{}, integral_constant<int, 64>{});
            case 128: return start(element, integral_constant<int, 128>{}, integral_constant<int, 64>{});
            case 192: return start(element, integral_constant<int, 192>{}, integral_constant<int, 64>{});
            default: return start(element, integral_constant<int, 256>{}, integral_constant<int, 64>{});
        }
    };
    return b.forward.dtype == DType::kFloat16 ? shape(__half{}) : shape(__nv_bfloat16{});
}

}  // namespace

cudaError_t backward_rows_before(const BackwardParams& b, const QueryTiles& tiles, cudaStream_t stream) {
    return launch<Rows::kBefore>(b, tiles, stream);
}
cudaError_t backward_rows_after(const BackwardParams& b, const QueryTiles& tiles, cudaStream_t stream) {
    return launch<Rows::kAfter>(b, tiles, stream);
}

}  // namespace fa
