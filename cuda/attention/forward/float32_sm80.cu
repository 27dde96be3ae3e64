// float32_sm80.cu: true float32 arithmetic at the speed of the CUDA cores.   out = softmax(q k^T * softmax_scale) v,   fp32.
//
// The loop of flash_attn_minimal.cu. New against that rung:
//   - A thread owns 8 rows instead of 4. A product of 8 x 4 scores needs 12 reads of 16 bytes for 128 multiply-adds, which is 10.7 per
//     read; 8 x 8 scores give 16, the 4 x 4 of flash_attn_minimal.cu only 8. In one cycle an SM reads 128 bytes of shared memory (8 such
//     reads) and makes 128 multiply-adds, so those 8 per read were the bound of flash_attn_minimal.cu.
//   - cp.async: K of the next tile arrives during the softmax and O += P V, V during S = Q K^T. No thread waits for memory.
//   - Q stays in shared memory with all its columns, and a tile costs two barriers instead of two for each 64 columns.
//
//     copy       | V(n)  .  .  .  .  . | K(n + 1)  .  .  .  .  .  .  .  . |      |: block barrier
//     CUDA cores | S = Q K(n)^T        | softmax        O += P V(n)       |
//
// 256 threads are 16 x 16: thread (tx, ty) has rows ty + 16 r, keys tx + 16 c of a tile, and columns 64 chunk + 4 tx .. + 3 of O. A warp
// has two neighbouring ty, so no other warp reads its rows of P. Rows are padded by 4 floats, so 8 neighbouring rows lie in different
// banks.
//
// Bound by fp32 multiply-adds and the shared-memory reads for them. Results do not depend on timing.
#include "attention/common/epilogue.cuh"
#include "attention/common/mask.h"
#include "attention/common/online_softmax.cuh"
#include "attention/common/tiles_mma_sm80.h"
#include "attention/kernels.h"
#include "device/launch.h"
#include "device/mma.cuh"

#include <type_traits>

namespace fa {
namespace {

constexpr int kLanes = 16, kThreads = kLanes * kLanes, kChunk = 4 * kLanes;  // kChunk: columns of 16 lanes, 4 each

struct Float32Tile {
    int columns;           // of q, k, v and out: the head dim, padded with zeros
    int block_m, block_n;  // query rows per block, keys per tile
};
// Shared memory for 64, 128 and 256 columns: large tiles 170, 169 and 218 KB; small tiles 69, 76 and 143 KB.
constexpr Float32Tile large_tile(int columns) { return {columns, 128, columns == 64 ? 128 : columns == 128 ? 64 : 32}; }
constexpr Float32Tile small_tile(int columns) { return {columns, 64, columns == 64 ? 64 : 32}; }

template <int kColumns, int kBlockM, int kBlockN>
struct alignas(16) Smem {
    float q[kBlockM][kColumns + 4];
    float k[kBlockN][kColumns + 4];
    float v[kBlockN][kColumns];
    float p[kBlockM][kBlockN + 4];  // a row is written and read by the same warp
};

// tile[r] = row r of `from`, for r in begin .. end - 1; other rows, and columns from `columns` on, are zeros.
template <int kRows, int kPitch, int kColumns>
__device__ __forceinline__ void load_rows(float (&tile)[kRows][kPitch], const float* from, int64_t stride, int begin, int end,
                                          int columns) {
    constexpr int kPieces = kColumns / 4, kRowsAtOnce = kThreads / kPieces;
    static_assert(kThreads % kPieces == 0, "a thread has the same columns of every row");
    const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
    const bool inside = 4 * piece < columns;
#pragma unroll 4
    for (int r = first; r < kRows; r += kRowsAtOnce) {
        const bool exists = inside && r >= begin && r < end;
        cp_async_16(shared_address(&tile[r][4 * piece]), exists ? from + r * stride + 4 * piece : from, exists ? 16 : 0);
    }
}

__device__ __forceinline__ void fma4(float& sum, float4 a, float4 b) {
    sum = fmaf(a.x, b.x, sum), sum = fmaf(a.y, b.y, sum), sum = fmaf(a.z, b.z, sum), sum = fmaf(a.w, b.w, sum);
}
__device__ __forceinline__ float4 four(const float* at) { return *reinterpret_cast<const float4*>(at); }

struct Float32Params {
    AttentionParams attention;
    int tiles;    // query tiles per head
    int section;  // heads whose K and V share L2, tiles_mma_sm80.h
};

template <int kColumns, int kBlockM, int kBlockN>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ Float32Params params) {
#if defined(__CUDA_ARCH__)
    if (kBlockM == 128 && !runs_where(kTarget, kMostSharedSm90)) {
        __trap();
        return;
    }
#endif
    constexpr int kRows = kBlockM / kLanes, kKeys = kBlockN / kLanes, kChunks = kColumns / kChunk;
    constexpr int kUnroll = kRows * kKeys + kRows * kColumns / kLanes >= 96 ? 1 : 2;  // unroll where S and O leave registers for it
    extern __shared__ __align__(16) unsigned char shared[];
    auto& smem = *reinterpret_cast<Smem<kColumns, kBlockM, kBlockN>*>(shared);
    const AttentionParams& p = params.attention;

    // Blocks start in order of their index: section by section and, in a section, the last rows of every head first, which see the most
    // keys.
    const int before = blockIdx.x / (params.section * params.tiles) * params.section, index = blockIdx.x - before * params.tiles;
    const int heads = min(params.section, p.nheads * p.batch - before), at = before + index % heads;
    const int b = at / p.nheads, head = at % p.nheads, row0 = (params.tiles - 1 - index / heads) * kBlockM;
    const Sequence s = sequence_of(p, b);
    if (row0 >= s.seqlen_q) return;
    const float* q = static_cast<const float*>(p.q.data) + s.q + head * p.q.head + row0 * p.q.row;
    const float* k = static_cast<const float*>(p.k.data) + s.k + head / p.group * p.k.head;
    const float* v = static_cast<const float*>(p.v.data) + s.v + head / p.group * p.v.head;

    const int tx = threadIdx.x % kLanes, ty = threadIdx.x / kLanes, last_row = min(row0 + kBlockM, s.seqlen_q) - 1;
    const KeyRange first = window_range(p, s, row0), last = window_range(p, s, last_row);
    const int first_tile = first.begin / kBlockN, end_tile = last.end > first.begin ? (last.end - 1) / kBlockN + 1 : first_tile;
    const auto load_k = [&](int n) {
        const int key0 = n * kBlockN;
        load_rows<kBlockN, kColumns + 4, kColumns>(smem.k, k + key0 * p.k.row, p.k.row, first.begin - key0, last.end - key0, p.headdim);
    };
    const auto load_v = [&](int n) {
        const int key0 = n * kBlockN;
        load_rows<kBlockN, kColumns, kColumns>(smem.v, v + key0 * p.v.row, p.v.row, first.begin - key0, last.end - key0, p.headdim_v);
    };

    SoftmaxRow row[kRows];
    float O[kRows][kChunks][4] = {};
    if (first_tile < end_tile) {
        load_rows<kBlockM, kColumns + 4, kColumns>(smem.q, q, p.q.row, 0, s.seqlen_q - row0, p.headdim);
        load_k(first_tile);
        cp_async_wait_all();
        __syncthreads();
        load_v(first_tile);
    }
#pragma unroll 1
    for (int n = first_tile; n < end_tile; ++n) {
        const int key0 = n * kBlockN;
        // ---- S = Q K^T ----
        float S[kRows][kKeys] = {};
#pragma unroll kUnroll
        for (int d = 0; d < kColumns; d += 4) {
            float4 a[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) a[r] = four(&smem.q[ty + kLanes * r][d]);
#pragma unroll
            for (int c = 0; c < kKeys; ++c) {
                const float4 y = four(&smem.k[tx + kLanes * c][d]);
#pragma unroll
                for (int r = 0; r < kRows; ++r) fma4(S[r][c], a[r], y);
            }
        }
        cp_async_wait_all();
        __syncthreads();  // V of this tile is here; nobody reads its K any more
        if (n + 1 < end_tile) load_k(n + 1);

        // ---- scale and mask, then the softmax of this tile ----
        const bool cut = key0 < last.begin || key0 + kBlockN > first.end;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
            for (int c = 0; c < kKeys; ++c) S[r][c] *= p.scale;
            if (cut) {
                const KeyRange seen = window_range(p, s, min(row0 + ty + kLanes * r, last_row));
#pragma unroll
                for (int c = 0; c < kKeys; ++c) {
                    const int key = key0 + tx + kLanes * c;
                    if (key < seen.begin || key >= seen.end) S[r][c] = -INFINITY;
                }
            }
            const float factor = row[r].update(S[r], [](float x) { return reduce_max<kLanes>(x); });
#pragma unroll
            for (int c = 0; c < kKeys; ++c) smem.p[ty + kLanes * r][tx + kLanes * c] = S[r][c];
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk)
#pragma unroll
                for (int x = 0; x < 4; ++x) O[r][chunk][x] *= factor;
        }
        __syncwarp();

        // ---- O += P V ----
#pragma unroll 1
        for (int j = 0; j < kBlockN; j += 4) {
            float4 a[kRows];
#pragma unroll
            for (int r = 0; r < kRows; ++r) a[r] = four(&smem.p[ty + kLanes * r][j]);
#pragma unroll
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                float4 y[4];
#pragma unroll
                for (int x = 0; x < 4; ++x) y[x] = four(&smem.v[j + x][kChunk * chunk + 4 * tx]);
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    fma4(O[r][chunk][0], a[r], make_float4(y[0].x, y[1].x, y[2].x, y[3].x));
                    fma4(O[r][chunk][1], a[r], make_float4(y[0].y, y[1].y, y[2].y, y[3].y));
                    fma4(O[r][chunk][2], a[r], make_float4(y[0].z, y[1].z, y[2].z, y[3].z));
                    fma4(O[r][chunk][3], a[r], make_float4(y[0].w, y[1].w, y[2].w, y[3].w));
                }
            }
        }
        cp_async_wait_all();
        __syncthreads();  // K of the next tile is here; nobody reads this tile's V any more
        if (n + 1 < end_tile) load_v(n + 1);
    }

    // ---- out = O / row_sum ----
    float* out = static_cast<float*>(p.out.data) + s.out + head * p.out.head + row0 * p.out.row;
    const float sink = sink_of(p.sinks, head);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const int i = ty + kLanes * r;
        const RowEnd end = finish_row<ScoreUnit::kNatural>(row[r].max, reduce_sum<kLanes>(row[r].sum), sink);
        if (row0 + i > last_row) continue;
        if (tx == 0 && p.lse) p.lse[lse_offset(p, s, head) + row0 + i] = end.lse;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int column = kChunk * chunk + 4 * tx;
            const float(&x)[4] = O[r][chunk];
            if (column < p.headdim_v)
                *reinterpret_cast<float4*>(out + i * p.out.row + column) = end.output(make_float4(x[0], x[1], x[2], x[3]));
        }
    }
}

template <int kColumns, int kBlockM, int kBlockN>
cudaError_t launch(const AttentionParams& p, cudaStream_t stream) {
    const int tiles = (p.seqlen_q + kBlockM - 1) / kBlockM;
    const int64_t section = heads_per_section(p.seqlen_k, 4 * int64_t(p.headdim + p.headdim_v), p.group),
                  heads = int64_t(p.nheads) * p.batch;
    const Float32Params params{p, tiles, int(section < heads ? section : heads)};
    return launch_kernel(attention_kernel<kColumns, kBlockM, kBlockN>, unsigned(tiles * heads), kThreads,
                         sizeof(Smem<kColumns, kBlockM, kBlockN>), stream, params);
}

template <int kColumns>
cudaError_t launch(const AttentionParams& p, int multiprocessors, size_t tile_memory, cudaStream_t stream) {
    constexpr Float32Tile kLarge = large_tile(kColumns), kSmall = small_tile(kColumns);
    static_assert(sizeof(Smem<kColumns, kLarge.block_m, kLarge.block_n>) > kMostSharedSm80,
                  "its code is left out where a block has no more");
    const bool fits = sizeof(Smem<kColumns, kLarge.block_m, kLarge.block_n>) <= tile_memory;
    const int64_t blocks = (int64_t(p.seqlen_q) + kLarge.block_m - 1) / kLarge.block_m * p.nheads * p.deciding_batch();
    if (fits && p.seqlen_q > kSmall.block_m && 2 * blocks > multiprocessors)
        return launch<kColumns, kLarge.block_m, kLarge.block_n>(p, stream);
    return launch<kColumns, kSmall.block_m, kSmall.block_n>(p, stream);
}

constexpr int bucket(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    return d <= 64 ? 64 : d <= 128 ? 128 : 256;
}

}  // namespace

size_t forward_float32_sm80_shared(const AttentionParams& p) {
    const auto bytes = [](auto columns) {
        constexpr Float32Tile kSmall = small_tile(columns());
        return sizeof(Smem<columns(), kSmall.block_m, kSmall.block_n>);
    };
    const int columns = bucket(p);
    return columns == 64    ? bytes(std::integral_constant<int, 64>{})
           : columns == 128 ? bytes(std::integral_constant<int, 128>{})
                            : bytes(std::integral_constant<int, 256>{});
}

cudaError_t forward_float32_sm80(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    switch (bucket(p)) {
        case 64: return launch<64>(p, device.multiprocessors, tile_memory(device), stream);
        case 128: return launch<128>(p, device.multiprocessors, tile_memory(device), stream);
        default: return launch<256>(p, device.multiprocessors, tile_memory(device), stream);
    }
}

}  // namespace fa
