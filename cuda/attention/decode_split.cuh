// decode_split.cuh: few rows of q against a long cache: the memory's speed is the only limit, so every byte of K and V is read once.
//
// The seqlen_q * group rows that share a key head are one tile of 16 or 64 rows (more are several tiles), and its keys are cut into pieces
// for as many blocks as the GPU holds (decode_schedule.h); decode_combine.cu merges what the pieces leave. New against
// forward_mma_sm80.cuh:
//   - A tile of keys is four parts. With 16 rows each of the four warps owns a part, loads it, multiplies it and waits for nobody: a ring
//     of stages of its own keeps 16 KB and more in flight, eight warps an SM. Only at the end of a segment do the warps add up O. With 64
//     rows the warps share the parts instead, 16 rows each.
//   - Pages: a lane looks up the page of one key of its warp's part, a tile ahead, and hands the addresses to the lanes that copy.
//   - 8-bit caches arrive as bytes and become fp16 in registers (device/widen.cuh): ldmatrix takes two neighbouring bytes for one 16-bit
//     value, so Q's columns and O's are permuted instead of the data. K's factor multiplies the score, V's multiplies P.
//
// Shared memory     stages x 4 parts x (K part_keys x d | V part_keys x d | factors), then fragments of Q at head dim 256; at the end of a
// segment O of each warp lies in its part of stage 0
#pragma once

#include "attention/decode.h"
#include "attention/general_scores.cuh"
#include "attention/shared_tile.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/widen.cuh"

#include <cfloat>
#include <type_traits>

namespace fa {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr float kRescaleThreshold = 8;  // of log2: see forward_mma_sm80.cuh
constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps, kMaxStages = 6;

template <typename E, int kD>
struct DecodeTile {
    using Tile = SharedTile<E, kD>;
    static constexpr bool kBytes = sizeof(E) == 1;
    static constexpr int kPartKeys = kBytes || kD <= 64 ? 32 : 16, kKeys = kDecodeWarps * kPartKeys;
    static constexpr int kPartBytes = 2 * kPartKeys * Tile::kPitch;     // K, then V
    static constexpr int kScaleBytes = kBytes ? 2 * kPartKeys * 4 : 0;  // of K's keys, then of V's
    static constexpr int kStageBytes = kDecodeWarps * (kPartBytes + kScaleBytes);
    static constexpr int kBlocksPerSm = kD <= 128 ? 2 : 1;
    static constexpr int kQueryBytes = kD <= 128 ? 0 : kDecodeWarps * 32 * kD;    // beyond 128 the registers have no room for Q
    static constexpr int kRingBytes = kBlocksPerSm == 2 ? 100 << 10 : 194 << 10;  // at most, where the SM has it
    static_assert(16 * kD * 4 <= kPartBytes, "O of a warp fits in its part of a stage");

    static int stages(size_t shared_memory) {
        const size_t most = shared_memory - 1024 - kQueryBytes, room = most < size_t(kRingBytes) ? most : kRingBytes;
        const int stages = int(room / kStageBytes);
        return stages < kMaxStages ? stages : kMaxStages;
    }
};

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
}

__device__ __forceinline__ void wait_for_oldest(int stages) {
    switch (stages) {
        case 1: cp_async_wait_group<0>(); break;
        case 2: cp_async_wait_group<1>(); break;
        case 3: cp_async_wait_group<2>(); break;
        case 4: cp_async_wait_group<3>(); break;
        case 5: cp_async_wait_group<4>(); break;
        default: cp_async_wait_group<5>(); break;
    }
}

// Words of two values of a row of q from global memory.
__device__ __forceinline__ uint32_t word_at(const void* row, int column) {
    return *reinterpret_cast<const uint32_t*>(static_cast<const char*>(row) + 2 * column);
}

// Registers that hold q as pairs of bf16 become pairs of fp16: divided by the power of two below the row's largest magnitude, so that none
// overflows and what underflows is below 2^-24 of that. Returns the power.
template <int kSteps>
__device__ __forceinline__ float narrow_row(uint32_t (&Q)[kSteps][4], int half) {
    float amax = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            float x[2];
            unpack_16<__nv_bfloat16>(x, Q[step][w + half]);
            amax = fmaxf(amax, fmaxf(fabsf(x[0]), fabsf(x[1])));
        }
    const uint32_t exponent = min(max(__float_as_uint(quad_max(amax)) >> 23, 1u), 253u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
            float x[2];
            unpack_16<__nv_bfloat16>(x, Q[step][w + half]);
            Q[step][w + half] = pack_16<__half>(x[0] * inverse, x[1] * inverse);
        }
    return __uint_as_float(exponent << 23);
}

// E: the cache's elements. kWide: tiles of 64 rows instead of 16.
template <typename E, int kD, bool kWide>
__global__ void __launch_bounds__(kDecodeThreads, DecodeTile<E, kD>::kBlocksPerSm) decode_kernel(const __grid_constant__ DecodeParams d) {
    using Plan = DecodeTile<E, kD>;
    using Tile = typename Plan::Tile;
    constexpr bool kBytes = Plan::kBytes;
    using Mma = std::conditional_t<kBytes, __half, E>;  // what the tensor cores multiply
    constexpr int kPartKeys = Plan::kPartKeys, kPieces = Tile::kPieces, kRowsAtOnce = 32 / kPieces, kPasses = kPartKeys / kRowsAtOnce;
    constexpr int kTilesN = kPartKeys / 8, kTilesV = kD / 8, kStepsD = kD / 16, kPitch = Tile::kPitch;
    constexpr bool kQueryShared = Plan::kQueryBytes > 0;
    constexpr int kSources = kWide ? 1 : kDecodeWarps;  // warps whose O add up
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float row_max_of[kDecodeWarps][16], row_sum_of[kDecodeWarps][16];
    const AttentionParams& p = d.attention;
    const CacheView& cache = p.cache;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const uint32_t ring = shared_address(shared);
    const auto part_of = [&](int slot, int part) { return ring + slot * uint32_t(Plan::kStageBytes) + part * uint32_t(Plan::kPartBytes); };
    const auto scales_of = [&](int slot, int part) {
        return ring + slot * uint32_t(Plan::kStageBytes) + kDecodeWarps * Plan::kPartBytes + part * uint32_t(Plan::kScaleBytes);
    };
    const auto meet = [] {  // those who share a part
        if (kWide) __syncthreads();
        else __syncwarp();
    };

    launch_dependents();
    bool waited = !d.after_append;
    const auto wait_for_append = [&] {
        if (!waited) grid_dependency_wait();
        waited = true;
    };

    Segments segments(d, blockIdx.x, gridDim.x);
#pragma unroll 1
    for (Segment segment; segments.next(segment);) {
        const int b = segment.b, head_k = segment.unit / d.row_tiles;
        const Sequence s = sequence_of(p, b);
        const KeyTiles tiles = key_tiles(d, s);
        const int row0 = segment.unit % d.row_tiles * d.rows + (kWide ? 16 * warp : 0), rows = s.seqlen_q * p.group;

        // ---- copies: this warp's part of a tile ----
        const int piece = lane % kPieces;
        const bool k_piece = piece * Tile::kPieceColumns < p.headdim, v_piece = piece * Tile::kPieceColumns < p.headdim_v;
        const E* const k = static_cast<const E*>(p.k.data) + s.k + head_k * p.k.head + piece * Tile::kPieceColumns;
        const E* const v = static_cast<const E*>(p.v.data) + s.v + head_k * p.v.head + piece * Tile::kPieceColumns;
        const auto own_key = [&](int tile) { return tile * Plan::kKeys + warp * kPartKeys + lane % kPartKeys; };
        const auto seen = [&](int key) { return key >= tiles.keys.begin && key < tiles.keys.end; };
        const auto page_of = [&](int tile) {
            const int key = own_key(tile);
            return cache.block_table && tile < segment.end && seen(key) ? cache_page(cache, b, key / cache.page_size) : 0;
        };
        int page = page_of(segment.begin);  // of this lane's key in the tile that is copied next
        const auto copy = [&](int tile, int slot) {
            const int key0 = tile * Plan::kKeys + warp * kPartKeys;
            if (key0 + kPartKeys > s.seqlen_k - cache.added) wait_for_append();
            const uint32_t to_k = part_of(slot, warp), to_v = to_k + kPartKeys * kPitch;
            const int row = lane / kPieces;
            int entry = 0, at = own_key(tile);
            if (cache.block_table) {
                entry = page, at %= cache.page_size;
                page = page_of(tile + 1);
                const int64_t k_own = entry * p.k.batch + at * p.k.row, v_own = entry * p.v.batch + at * p.v.row;
#pragma unroll
                for (int i = 0; i < kPasses; ++i) {
                    const int r = i * kRowsAtOnce + row;
                    const int64_t k_from = __shfl_sync(kFullWarp, k_own, r), v_from = __shfl_sync(kFullWarp, v_own, r);
                    const bool is = seen(key0 + r);
                    cp_async_16(to_k + Tile::offset(r, piece), k + k_from, is && k_piece ? 16 : 0);
                    cp_async_16(to_v + Tile::offset(r, piece), v + v_from, is && v_piece ? 16 : 0);
                }
            } else {
                const E* k_from = k + (key0 + row) * p.k.row;
                const E* v_from = v + (key0 + row) * p.v.row;
#pragma unroll
                for (int i = 0; i < kPasses; ++i) {
                    const int r = i * kRowsAtOnce + row;
                    const bool is = seen(key0 + r);
                    cp_async_16(to_k + Tile::offset(r, piece), k_from, is && k_piece ? 16 : 0);
                    cp_async_16(to_v + Tile::offset(r, piece), v_from, is && v_piece ? 16 : 0);
                    k_from += kRowsAtOnce * p.k.row, v_from += kRowsAtOnce * p.v.row;
                }
                if (kBytes) entry = cache_entry(cache, b);
            }
            if (kBytes && lane < kPartKeys) {
                const bool is = seen(key0 + lane);
                const CacheScale &ks = cache.k_scale, &vs = cache.v_scale;
                const uint32_t to = scales_of(slot, warp) + 4 * lane;
                cp_async_4(to, ks.data + (entry * ks.batch + at * ks.row + head_k * ks.head), is ? 4 : 0);
                cp_async_4(to + 4 * kPartKeys, vs.data + (entry * vs.batch + at * vs.row + head_k * vs.head), is ? 4 : 0);
            }
        };
#pragma unroll 1
        for (int stage = 0; stage < d.stages; ++stage) {
            if (segment.begin + stage < segment.end) copy(segment.begin + stage, stage);
            cp_async_commit();
        }

        // ---- this thread's two rows: q in registers, and what differs from row to row ----
        wait_for_append();
        uint32_t Q[kStepsD][4];
        float row_scale[2], slope[2] = {0, 0};
        int aligned[2];
        KeyRange range[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row0 + lane / 4 + 8 * half, i = r / p.group, head = head_k * p.group + r % p.group;
            const bool is = r < rows;
            const uint16_t* const q = static_cast<const uint16_t*>(p.q.data) + s.q + i * p.q.row + head * p.q.head;
#pragma unroll
            for (int step = 0; step < kStepsD; ++step)
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    // 16-bit keys: columns 8 w + 2 (lane % 4) of a step; bytes: columns 4 (lane % 4) + 2 w, as widen_neighbours gives them
                    const int column = 16 * step + (kBytes ? 4 * (lane % 4) + 2 * w : 8 * w + 2 * (lane % 4));
                    Q[step][2 * w + half] = is && column < p.headdim ? word_at(q, column) : 0;
                }
            row_scale[half] = p.scale;
            if (kBytes && p.dtype == DType::kBFloat16) row_scale[half] *= narrow_row(Q, half);
            if (p.softcap == 0) row_scale[half] *= kLog2e;
            if (p.alibi_slopes && is) slope[half] = p.alibi_slopes[b * p.alibi_batch + head] * kLog2e;
            aligned[half] = i + s.shift;
            range[half] = key_range(p, s, is ? i : 0);
        }
        uint4* const q_words = reinterpret_cast<uint4*>(shared + size_t(d.stages) * Plan::kStageBytes) + warp * kStepsD * 32 + lane;
        if (kQueryShared) {
#pragma unroll
            for (int step = 0; step < kStepsD; ++step) q_words[32 * step] = make_uint4(Q[step][0], Q[step][1], Q[step][2], Q[step][3]);
        }
        const auto fragment_q = [&](uint32_t(&A)[4], int step) {
            if (kQueryShared) {
                const uint4 x = q_words[32 * step];
                A[0] = x.x, A[1] = x.y, A[2] = x.z, A[3] = x.w;
            } else {
                A[0] = Q[step][0], A[1] = Q[step][1], A[2] = Q[step][2], A[3] = Q[step][3];
            }
        };
        const KeyRange every{key_range(p, s, s.seqlen_q - 1).begin, key_range(p, s, 0).end};  // keys that every row sees

        float O[kTilesV][4] = {};
        float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // log2 units; this thread's share
        float v_unit = 1e-30f;                                         // bytes: O counts in units of the largest factor of V so far

        const auto attend = [&](int key0, uint32_t part, uint32_t scales) {
            const uint32_t k_lane = part + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
            const uint32_t v_lane = part + kPartKeys * kPitch + Tile::offset(lane % 16, lane / 16);
            // ---- S = Q K^T ----
            float S[kTilesN][4] = {};
#pragma unroll
            for (int step = 0; step < kStepsD; step += kBytes ? 2 : 1) {
                uint32_t A[2][4];
                fragment_q(A[0], step);
                if (kBytes) fragment_q(A[1], step + 1);
#pragma unroll
                for (int n = 0; n < kTilesN; n += 2) {
                    uint32_t B[4];
                    ldmatrix_x4(B, Tile::advance(k_lane, kBytes ? step / 2 : step) + 8 * n * kPitch);
                    if constexpr (kBytes) {
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            uint32_t wide[2];
                            widen_neighbours<E>(wide, B[x]);
                            mma<Mma>(S[n + x / 2], A[x % 2], wide[0], wide[1]);
                        }
                    } else {
                        mma<Mma>(S[n], A[0], B[0], B[1]);
                        mma<Mma>(S[n + 1], A[0], B[2], B[3]);
                    }
                }
            }
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) S[n][e] *= row_scale[e / 2];
            float v_scale[kBytes ? kTilesN : 1][2];
            if (kBytes) {
                float largest = 0;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const uint32_t at = scales + 4 * (8 * n + mma_column(lane, e));
                        const float k_scale = __uint_as_float(load_shared_4(at));
                        v_scale[n][e] = __uint_as_float(load_shared_4(at + 4 * kPartKeys));
                        largest = fmaxf(largest, v_scale[n][e]);
                        S[n][e] *= k_scale, S[n][2 + e] *= k_scale;
                    }
                largest = quad_max(largest);
                if (largest > v_unit) {  // the same in all lanes: a quad has the part's keys
                    const float factor = v_unit / largest;
#pragma unroll
                    for (int n = 0; n < kTilesV; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e) O[n][e] *= factor;
                    v_unit = largest;
                }
            }
            if (p.softcap != 0) {
                const float inverse = 1.0f / p.softcap, cap = p.softcap * kLog2e;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) S[n][e] = cap * tanh_fast(S[n][e] * inverse);
            }
            if (p.alibi_slopes) {
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        S[n][e] -= slope[e / 2] * fabsf(float(aligned[e / 2] - (key0 + 8 * n + mma_column(lane, e % 2))));
            }
            if (key0 < every.begin || key0 + kPartKeys > every.end) {
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int key = key0 + 8 * n + mma_column(lane, e % 2);
                        if (key < range[e / 2].begin || key >= range[e / 2].end) S[n][e] = -INFINITY;
                    }
            }

            // ---- P = 2^(S - row_max), as in forward_mma_sm80.cuh ----
            float new_max[2];
            bool moved = false;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float x = fmaxf(S[0][2 * half], S[0][2 * half + 1]);
#pragma unroll
                for (int n = 1; n < kTilesN; ++n) x = fmaxf(x, fmaxf(S[n][2 * half], S[n][2 * half + 1]));
                new_max[half] = fmaxf(row_max[half], quad_max(x));
                moved |= new_max[half] - row_max[half] > kRescaleThreshold;
            }
            if (__any_sync(kFullWarp, moved)) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float next = new_max[half] - row_max[half] > kRescaleThreshold ? new_max[half] : row_max[half];
                    const float factor = exp2_approx(row_max[half] - next);
                    row_max[half] = next;
                    row_sum[half] *= factor;
#pragma unroll
                    for (int n = 0; n < kTilesV; ++n) O[n][2 * half] *= factor, O[n][2 * half + 1] *= factor;
                }
            }
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    S[n][e] = exp2_approx(S[n][e] - row_max[e / 2]);
                    row_sum[e / 2] += S[n][e];
                }
            if (kBytes) {
                const float inverse = 1.0f / v_unit;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) S[n][e] *= v_scale[n][e % 2] * inverse;
            }

            // ---- O += P V ----
#pragma unroll
            for (int step = 0; step < kPartKeys / 16; ++step) {
                uint32_t A[4];
                fragment_of<Mma>(A, &S[2 * step]);
#pragma unroll
                for (int n = 0; n < kTilesV; n += kBytes ? 4 : 2) {
                    if constexpr (kBytes) {
                        uint32_t B[4];
                        ldmatrix_x4_trans(B, Tile::advance(v_lane, n / 4) + 16 * step * kPitch);
#pragma unroll
                        for (int x = 0; x < 2; ++x) {
                            uint32_t even[2], odd[2];
                            widen_even_odd<E>(even[0], odd[0], B[2 * x]);
                            widen_even_odd<E>(even[1], odd[1], B[2 * x + 1]);
                            mma<Mma>(O[n + 2 * x], A, even[0], even[1]);
                            mma<Mma>(O[n + 2 * x + 1], A, odd[0], odd[1]);
                        }
                    } else {
                        uint32_t B[2][2];
                        ldmatrix_x4_trans(B, Tile::advance(v_lane, n / 2) + 16 * step * kPitch);
                        mma<Mma>(O[n], A, B[0][0], B[0][1]);
                        mma<Mma>(O[n + 1], A, B[1][0], B[1][1]);
                    }
                }
            }
        };

        // ---- the tiles ----
        int slot = 0;
#pragma unroll 1
        for (int tile = segment.begin; tile < segment.end; ++tile) {
            wait_for_oldest(d.stages);
            meet();  // the parts of this tile are here
#pragma unroll 1
            for (int part = kWide ? 0 : warp; part < (kWide ? kDecodeWarps : warp + 1); ++part) {
                const int key0 = tile * Plan::kKeys + part * kPartKeys;
                if (key0 < tiles.keys.end && key0 + kPartKeys > tiles.keys.begin) attend(key0, part_of(slot, part), scales_of(slot, part));
            }
            meet();  // nobody reads them any more
            if (tile + d.stages < segment.end) copy(tile + d.stages, slot);
            cp_async_commit();
            slot = slot + 1 == d.stages ? 0 : slot + 1;
        }

        // ---- the warps' results, through their parts of stage 0 ----
        if (kWide) __syncthreads();  // a part of stage 0 may still be read by others
        float* const own = reinterpret_cast<float*>(shared + warp * Plan::kPartBytes);
        const auto place = [](int row, int column) { return row * kD + (column ^ row % 4 * 8); };
        const float unit = kBytes ? v_unit : 1.0f;
#pragma unroll
        for (int n = 0; n < kTilesV; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int column = kBytes ? 8 * (n & ~1) + 4 * (lane % 4) + 2 * (e % 2) + n % 2 : 8 * n + mma_column(lane, e % 2);
                own[place(mma_row(lane, e), column)] = O[n][e] * unit;
            }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(row_sum[half]);
            if (lane % 4 == 0) row_max_of[warp][lane / 4 + 8 * half] = row_max[half], row_sum_of[warp][lane / 4 + 8 * half] = sum;
        }
        if (kWide) __syncwarp();
        else __syncthreads();

        constexpr int kThreadsPerRow = 32 * kSources / 16;
        const int thread = kWide ? lane : int(threadIdx.x), source0 = kWide ? warp : 0;
        const int row = thread / kThreadsPerRow, r = row0 + row;
        if (r < rows) {
            float max = -FLT_MAX, sum = 0, weight[kSources];
#pragma unroll
            for (int x = 0; x < kSources; ++x) max = fmaxf(max, row_max_of[source0 + x][row]);
#pragma unroll
            for (int x = 0; x < kSources; ++x) {
                weight[x] = exp2_approx(row_max_of[source0 + x][row] - max);
                sum += weight[x] * row_sum_of[source0 + x][row];
            }
            const int i = r / p.group, head = head_k * p.group + r % p.group;
            const bool whole = segment.slot < 0, first = thread % kThreadsPerRow == 0;
            float inverse = sum == 0 ? 0 : 1 / sum;
            if (whole) {
                if (const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY; sink != -INFINITY) {
                    const float next = fmaxf(max, sink), factor = exp2_approx(max - next);
                    sum = sum * factor + exp2_approx(sink - next), max = next, inverse = factor / sum;
                }
                if (p.lse && first) p.lse[lse_offset(p, s, head) + i] = sum == 0 ? -INFINITY : (max + log2f(sum)) * kLn2;
            } else if (first) {
                d.partial_lse[segment.slot * d.rows + r % d.rows] = sum == 0 ? -INFINITY : max + log2f(sum);
            }
            float* const partial = d.partial + (segment.slot * d.rows + r % d.rows) * p.headdim_v;
            uint16_t* const out = static_cast<uint16_t*>(p.out.data) + s.out + i * p.out.row + head * p.out.head;
#pragma unroll 2
            for (int column = thread % kThreadsPerRow * 4; column < kD; column += 4 * kThreadsPerRow) {
                if (column >= p.headdim_v) continue;
                float4 x{};
#pragma unroll
                for (int source = 0; source < kSources; ++source) {
                    const float* from = reinterpret_cast<const float*>(shared + (source0 + source) * Plan::kPartBytes);
                    const float4 y = *reinterpret_cast<const float4*>(from + place(row, column));
                    const float w = weight[source];
                    x.x += w * y.x, x.y += w * y.y, x.z += w * y.z, x.w += w * y.w;
                }
                x.x *= inverse, x.y *= inverse, x.z *= inverse, x.w *= inverse;
                if (!whole) {
                    *reinterpret_cast<float4*>(partial + column) = x;
                } else {
                    const bool half = p.dtype == DType::kFloat16;
                    *reinterpret_cast<uint2*>(out + column) =
                        half ? make_uint2(pack_16<__half>(x.x, x.y), pack_16<__half>(x.z, x.w))
                             : make_uint2(pack_16<__nv_bfloat16>(x.x, x.y), pack_16<__nv_bfloat16>(x.z, x.w));
                }
            }
        }
        __syncthreads();  // stage 0 may be filled again
    }
    wait_for_append();  // so that this kernel's end implies the end of the one before
}

template <typename E, int kD>
cudaError_t launch_decode(DecodeParams d, const DecodeDevice& device, cudaStream_t stream) {
    using Plan = DecodeTile<E, kD>;
    d.stages = Plan::stages(device.shared_memory);
    const size_t bytes = size_t(d.stages) * Plan::kStageBytes + Plan::kQueryBytes;
    const auto kernel = d.rows == 16 ? decode_kernel<E, kD, false> : decode_kernel<E, kD, true>;
    return launch_kernel(kernel, unsigned(decode_blocks(d, device)), kDecodeThreads, bytes, stream, d, d.after_append);
}

template <typename E>
cudaError_t launch_decode(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream) {
    switch (decode_bucket(d.attention)) {
        case 64: return launch_decode<E, 64>(d, device, stream);
        case 128: return launch_decode<E, 128>(d, device, stream);
        default: return launch_decode<E, 256>(d, device, stream);
    }
}

}  // namespace
}  // namespace fa
