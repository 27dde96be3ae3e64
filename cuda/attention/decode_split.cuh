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
// Shared memory     stages x 4 parts x (K part_keys x d | V part_keys x d) and their factors | Q rows x d; at the end of a segment O of
// each warp lies in its part of stage 0
//
// A call of few keys takes as long as the chain lengths -> first keys -> result, and as the code that is read from memory on the way: the
// integer work before the first copy and the length of the code matter there, not the arithmetic.
#pragma once

#include "attention/decode.h"
#include "attention/decode_scores.cuh"
#include "attention/shared_tile.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

#include <cfloat>
#include <type_traits>

namespace fa {
namespace {

constexpr int kDecodeWarps = 4, kDecodeThreads = 32 * kDecodeWarps, kMaxStages = 6;

// The shared memory of a block; the numbers of stages are what fits beside another block, or alone, on an SM of 228 KB.
template <typename E, int kD, bool kWide>
struct DecodeTile {
    using Tile = SharedTile<E, kD>;
    static constexpr bool kBytes = sizeof(E) == 1;
    static constexpr int kRows = kWide ? 64 : 16;
    static constexpr int kPartKeys = kBytes || kD <= 64 ? 32 : 16, kKeys = kDecodeWarps * kPartKeys;
    static constexpr int kPartBytes = 2 * kPartKeys * Tile::kPitch;     // K, then V
    static constexpr int kScaleBytes = kBytes ? 2 * kPartKeys * 4 : 0;  // of K's keys, then of V's
    static constexpr int kStageBytes = kDecodeWarps * (kPartBytes + kScaleBytes);
    static constexpr int kQueryBytes = kRows * kD * 2;
    static constexpr int kBlocksPerSm = kD <= 128 ? 2 : 1;
    static constexpr int kMostBytes = (kBlocksPerSm == 2 ? 112 : 225) << 10;
    static_assert(16 * kD * 4 <= kPartBytes, "O of a warp fits in its part of a stage");

    static int stages(size_t shared_memory) {
        const int room = (shared_memory - 1024 < size_t(kMostBytes) ? int(shared_memory) - 1024 : kMostBytes) - kQueryBytes;
        const int stages = room / kStageBytes;
        return stages < kMaxStages ? stages : kMaxStages;
    }
};

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

// Rows of q as bf16 in shared memory become fp16 in place: divided by the power of two below the row's largest magnitude, so that none
// overflows and what underflows is below 2^-24 of that. The power goes to row_factor.
template <int kRows, int kD>
__device__ __forceinline__ void narrow_rows(uint32_t q, float* row_factor) {
    using Tile = SharedTile<__half, kD>;
    constexpr int kThreadsPerRow = kDecodeThreads / kRows, kEach = Tile::kPieces / kThreadsPerRow;
    const int row = threadIdx.x / kThreadsPerRow, piece0 = threadIdx.x % kThreadsPerRow * kEach;
    float amax = 0;
#pragma unroll 1
    for (int piece = piece0; piece < piece0 + kEach; ++piece) {
        const float4 bits = load_shared_16(q + Tile::offset(row, piece));
        const float word[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float x[2];
            unpack_16<__nv_bfloat16>(x, __float_as_uint(word[w]));
            amax = fmaxf(amax, fmaxf(fabsf(x[0]), fabsf(x[1])));
        }
    }
    for (int offset = 1; offset < kThreadsPerRow; offset *= 2) amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, offset));
    const uint32_t exponent = min(max(__float_as_uint(amax) >> 23, 1u), 253u);
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll 1
    for (int piece = piece0; piece < piece0 + kEach; ++piece) {
        const float4 bits = load_shared_16(q + Tile::offset(row, piece));
        const float word[4] = {bits.x, bits.y, bits.z, bits.w};
        uint32_t half[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float x[2];
            unpack_16<__nv_bfloat16>(x, __float_as_uint(word[w]));
            half[w] = pack_16<__half>(x[0] * inverse, x[1] * inverse);
        }
        store_shared_16(q + Tile::offset(row, piece), make_uint4(half[0], half[1], half[2], half[3]));
    }
    if (threadIdx.x % kThreadsPerRow == 0) row_factor[row] = __uint_as_float(exponent << 23);
}

// E: the cache's elements. kWide: tiles of 64 rows instead of 16.
template <typename E, int kD, bool kWide>
__global__ void __launch_bounds__(kDecodeThreads, DecodeTile<E, kD, kWide>::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeParams d) {
    using Plan = DecodeTile<E, kD, kWide>;
    using Tile = typename Plan::Tile;
    using TileQ = SharedTile<__half, kD>;  // of 16-bit values
    constexpr bool kBytes = Plan::kBytes;
    using Mma = std::conditional_t<kBytes, __half, E>;  // what the tensor cores multiply
    constexpr int kPartKeys = Plan::kPartKeys, kPieces = Tile::kPieces, kRowsAtOnce = 32 / kPieces, kPasses = kPartKeys / kRowsAtOnce;
    constexpr int kTilesN = kPartKeys / 8, kTilesV = kD / 8, kStepsD = kD / 16, kPitch = Tile::kPitch;
    constexpr bool kQueryInRegisters = kD <= 128;
    constexpr int kSources = kWide ? 1 : kDecodeWarps;  // warps whose O add up
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ float row_max_of[kDecodeWarps][16], row_sum_of[kDecodeWarps][16], row_factor[Plan::kRows];
    constexpr bool kFull = kD > 128;  // O fills the registers: what is needed before and after the tiles alone waits in shared memory
    struct Kept {                     // the same in every lane; Segments is not, and stays each lane's own
        Segment segment;
        SequenceKeys keys;
        int head_k, row_tile0;
    };
    __shared__ __align__(8) unsigned char kept_bytes[kFull ? kDecodeWarps * sizeof(Kept) : 8];
    Kept* const kept = reinterpret_cast<Kept*>(kept_bytes);
    const AttentionParams& p = d.attention;
    const CacheView& cache = p.cache;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const uint32_t ring = shared_address(shared), q_tile = ring + d.stages * uint32_t(Plan::kStageBytes);
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

    Segments segments(d);
#pragma unroll 1
    for (Segment segment; segments.next(d, segment);) {
        const int b0 = segment.b, head_k0 = segment.unit / d.row_tiles, row_tile00 = segment.unit % d.row_tiles * Plan::kRows;
        const SequenceKeys found = sequence_keys(d, b0);
        if (kFull && lane == 0) kept[warp] = {segment, found, segment.unit / d.row_tiles, segment.unit % d.row_tiles * Plan::kRows};
        if (kFull) __syncwarp();
        const auto sequence_now = [&] { return kFull ? (opaque(kept) + warp)->segment.b : b0; };
        const auto head_now = [&] { return kFull ? (opaque(kept) + warp)->head_k : head_k0; };
        const auto row_tile_now = [&] { return kFull ? (opaque(kept) + warp)->row_tile0 : row_tile00; };
        const auto keys_now = [&] { return kFull ? (opaque(kept) + warp)->keys : found; };
        // Row r of the seqlen_q * group rows of a key head is head r % group of query r / group.
        const int first_tile = found.first_tile + segment.begin, end_tile = found.first_tile + segment.end;

        // ---- copies: this warp's part of a tile ----
        const auto seen = [](const SequenceKeys& keys, int key) { return unsigned(key - keys.begin) < unsigned(keys.end - keys.begin); };
        const auto own_key = [&](int tile) { return tile * Plan::kKeys + warp * kPartKeys + lane % kPartKeys; };
        const auto page_of = [&](const SequenceKeys& keys, int tile) {
            const int key = own_key(tile);
            return tile < end_tile && seen(keys, key) ? cache_page(cache, sequence_now(), key / cache.page_size) : 0;
        };
        int page = cache.block_table ? page_of(found, first_tile) : 0;  // of this lane's key in the tile that is copied next
        const auto copy = [&](int tile, int slot) {
            const SequenceKeys keys = keys_now();
            const int b = sequence_now(), head_k = head_now();
            const int here = kFull ? opaque(lane) : lane, piece = here % kPieces, row = here / kPieces;
            const bool k_piece = piece * Tile::kPieceColumns < p.headdim, v_piece = piece * Tile::kPieceColumns < p.headdim_v;
            const int entry_of = !cache.entries ? b : cache.block_table ? 0 : cache_entry(cache, b);
            const E* const k = static_cast<const E*>(p.k.data) + entry_of * p.k.batch + head_k * p.k.head + piece * Tile::kPieceColumns;
            const E* const v = static_cast<const E*>(p.v.data) + entry_of * p.v.batch + head_k * p.v.head + piece * Tile::kPieceColumns;
            const int key0 = tile * Plan::kKeys + warp * kPartKeys;
            if (key0 + kPartKeys > keys.count - cache.added) wait_for_append();
            const uint32_t to_k = part_of(slot, warp), to_v = to_k + kPartKeys * kPitch;
            int entry = entry_of, at = own_key(tile);
            if (cache.block_table) {
                entry = page, at %= cache.page_size;
                page = page_of(keys, tile + 1);
                const int64_t k_own = entry * p.k.batch + at * p.k.row, v_own = entry * p.v.batch + at * p.v.row;
#pragma unroll(kFull ? 2 : 4)
                for (int i = 0; i < kPasses; ++i) {
                    const int r = i * kRowsAtOnce + row;
                    const int64_t k_from = __shfl_sync(kFullWarp, k_own, r), v_from = __shfl_sync(kFullWarp, v_own, r);
                    const bool is = seen(keys, key0 + r);
                    cp_async_16(to_k + Tile::offset(r, piece), k + k_from, is && k_piece ? 16 : 0);
                    cp_async_16(to_v + Tile::offset(r, piece), v + v_from, is && v_piece ? 16 : 0);
                }
            } else {
                const E* k_from = k + (key0 + row) * p.k.row;
                const E* v_from = v + (key0 + row) * p.v.row;
#pragma unroll(kFull ? 2 : 4)
                for (int i = 0; i < kPasses; ++i) {
                    const int r = i * kRowsAtOnce + row;
                    const bool is = seen(keys, key0 + r);
                    cp_async_16(to_k + Tile::offset(r, piece), k_from, is && k_piece ? 16 : 0);
                    cp_async_16(to_v + Tile::offset(r, piece), v_from, is && v_piece ? 16 : 0);
                    k_from += kRowsAtOnce * p.k.row, v_from += kRowsAtOnce * p.v.row;
                }
            }
            if (kBytes && lane < kPartKeys) {
                const bool is = seen(keys, key0 + lane);
                const CacheScale &ks = cache.k_scale, &vs = cache.v_scale;
                const uint32_t to = scales_of(slot, warp) + 4 * lane;
                cp_async_4(to, ks.data + (entry * ks.batch + at * ks.row + head_k * ks.head), is ? 4 : 0);
                cp_async_4(to + 4 * kPartKeys, vs.data + (entry * vs.batch + at * vs.row + head_k * vs.head), is ? 4 : 0);
            }
        };
        const auto copy_q = [&] {
            const int b = sequence_now(), head_k = head_now(), row_tile0 = row_tile_now();
            constexpr int kRowsOfPass = kDecodeThreads / TileQ::kPieces;
            const int q_piece = threadIdx.x % TileQ::kPieces;
#pragma unroll 1
            for (int row = threadIdx.x / TileQ::kPieces; row < Plan::kRows; row += kRowsOfPass) {
                const int r = row_tile0 + row, i = r / p.group, head = head_k * p.group + r % p.group;
                const uint16_t* const from =
                    static_cast<const uint16_t*>(p.q.data) + b * p.q.batch + i * p.q.row + head * p.q.head + 8 * q_piece;
                cp_async_16(q_tile + TileQ::offset(row, q_piece), from, r < p.seqlen_q * p.group && 8 * q_piece < p.headdim ? 16 : 0);
            }
        };

        // ---- this thread's two rows ----
        uint32_t Q[kQueryInRegisters ? kStepsD : 1][4];
        const int warp_row = kWide ? 16 * warp : 0;
        const auto load_q = [&](uint32_t(&A)[4], int step) {
            if constexpr (kBytes) {  // columns 4 (lane % 4) .. + 3 of a step are a lane's, as widen_neighbours gives those of K
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint32_t at = q_tile + TileQ::offset(warp_row + lane / 4 + 8 * half, 2 * step + lane % 4 / 2) + lane % 2 * 8;
                    A[half] = load_shared_4(at), A[2 + half] = load_shared_4(at + 4);
                }
            } else {
                ldmatrix_x4(A, TileQ::advance(q_tile + TileQ::offset(warp_row + lane % 16, lane / 16), step));
            }
        };
        float row_scale[2];
        const auto row_of = [&](int half) {
            return min(row_tile_now() + warp_row + opaque(lane) / 4 + 8 * half, p.seqlen_q * p.group - 1);
        };
        const auto prepare_rows = [&] {
            if (kBytes && p.dtype == DType::kBFloat16) {
                narrow_rows<Plan::kRows, kD>(q_tile, row_factor);
                __syncthreads();
            }
            if (kQueryInRegisters) {
#pragma unroll
                for (int step = 0; step < kStepsD; ++step) load_q(Q[step], step);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                row_scale[half] = p.softcap == 0 ? p.scale * kLog2e : p.scale;
                if (kBytes && p.dtype == DType::kBFloat16) row_scale[half] *= row_factor[warp_row + lane / 4 + 8 * half];
            }
        };
        float O[kTilesV][4] = {};
        float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // log2 units; this thread's share
        float v_unit = 1e-30f;                                         // bytes: O counts in units of the largest factor of V so far

        const auto attend = [&](int key0, uint32_t part, uint32_t scales) {
            const int here = kFull && !kWide ? opaque(lane) : lane;
            const uint32_t k_lane = part + Tile::offset(here % 8 + here / 16 * 8, here / 8 % 2);
            const uint32_t v_lane = part + kPartKeys * kPitch + Tile::offset(here % 16, here / 16);
            // ---- S = Q K^T ----
            float S[kTilesN][4] = {};
#pragma unroll
            for (int step = 0; step < kStepsD; step += kBytes ? 2 : 1) {
                if (!kQueryInRegisters) load_q(Q[0], step);
                uint32_t next[4];
                if (!kQueryInRegisters && kBytes) load_q(next, step + 1);
                const auto& A = Q[kQueryInRegisters ? step : 0];
                const auto& A1 = kQueryInRegisters && kBytes ? Q[step + 1] : next;
#pragma unroll
                for (int n = 0; n < kTilesN; n += 2) {
                    uint32_t B[4];
                    ldmatrix_x4(B, Tile::advance(k_lane, kBytes ? step / 2 : step) + 8 * n * kPitch);
                    if constexpr (kBytes) {
#pragma unroll
                        for (int x = 0; x < 4; ++x) {
                            uint32_t wide[2];
                            widen_neighbours<E>(wide, B[x]);
                            mma<Mma>(S[n + x / 2], x % 2 ? A1 : A, wide[0], wide[1]);
                        }
                    } else {
                        mma<Mma>(S[n], A, B[0], B[1]);
                        mma<Mma>(S[n + 1], A, B[2], B[3]);
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
                raise_unit(largest, v_unit, O);
            }
            score_options(p, keys_now(), key0, lane, row_of, [&] { return sequence_now() * p.alibi_batch + head_now() * p.group; }, S);
            softmax_step(S, O, row_max, row_sum);
            if (kBytes) {
                const float inverse = 1.0f / v_unit;
#pragma unroll
                for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) S[n][e] *= v_scale[n][e % 2] * inverse;
            }

            add_values<E, Mma>(O, S, [&](int step, int i) { return Tile::advance(v_lane, i) + 16 * step * kPitch; });
        };

        // ---- the tiles: copied `stages` steps before they are attended to ----
        const int query_step = d.after_append ? first_tile - 1 : first_tile - d.stages;
        int slot = 0;
#pragma unroll 1
        for (int step = first_tile - d.stages; step < end_tile; ++step) {
            if (step >= first_tile) {
                if (d.after_append && step == first_tile) cp_async_wait_all();
                wait_for_oldest(d.stages);
                if (step == first_tile) {
                    __syncthreads();  // the rows of q are here
                    prepare_rows();
                } else {
                    meet();  // the parts of this tile are here
                }
#pragma unroll 1
                for (int part = kWide ? 0 : warp; part < (kWide ? kDecodeWarps : warp + 1); ++part) {
                    const int key0 = step * Plan::kKeys + part * kPartKeys;
                    if (const SequenceKeys keys = keys_now(); key0 < keys.end && key0 + kPartKeys > keys.begin)
                        attend(key0, part_of(slot, part), scales_of(slot, part));
                }
                meet();  // nobody reads them any more
            }
            if (step + d.stages < end_tile) copy(step + d.stages, slot);
            if (step == query_step) {
                wait_for_append();
                copy_q();
            }
            cp_async_commit();
            slot = slot + 1 == d.stages ? 0 : slot + 1;
        }

        // ---- the warps' results, through their parts of stage 0 ----
        Segment done = segment;
        if (kFull) {
            __syncwarp();
            done = (opaque(kept) + warp)->segment;
        }
        float* const own = reinterpret_cast<float*>(shared + warp * Plan::kPartBytes);
        const float unit = kBytes ? v_unit : 1.0f;
#pragma unroll
        for (int n = 0; n < kTilesV; n += 2)
#pragma unroll
            for (int half = 0; half < 2; ++half) put_o<kBytes>(own, lane / 4 + 8 * half, n, half, lane, O, unit);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = quad_sum(row_sum[half]);
            if (lane % 4 == 0) row_max_of[warp][lane / 4 + 8 * half] = row_max[half], row_sum_of[warp][lane / 4 + 8 * half] = sum;
        }
        if (kWide) __syncwarp();
        else __syncthreads();

        constexpr int kThreadsPerRow = 32 * kSources / 16;
        const int thread = kWide ? lane : int(threadIdx.x), source0 = kWide ? warp : 0;
        const int row = thread / kThreadsPerRow, tile_row = warp_row + row, r = done.unit % d.row_tiles * Plan::kRows + tile_row;
        if (r < p.seqlen_q * p.group) {
            float max = -FLT_MAX, sum = 0, weight[kSources];
#pragma unroll
            for (int x = 0; x < kSources; ++x) max = fmaxf(max, row_max_of[source0 + x][row]);
#pragma unroll
            for (int x = 0; x < kSources; ++x) {
                weight[x] = exp2_approx(row_max_of[source0 + x][row] - max);
                sum += weight[x] * row_sum_of[source0 + x][row];
            }
            const int i = r / p.group, head = done.unit / d.row_tiles * p.group + r % p.group;
            const bool whole = done.slot < 0, first = thread % kThreadsPerRow == 0;
            float inverse = sum == 0 ? 0 : 1 / sum;
            if (whole) {
                if (const float sink = p.sinks ? p.sinks[head] * kLog2e : -INFINITY; sink != -INFINITY) {
                    const float next = fmaxf(max, sink), factor = exp2_approx(max - next);
                    sum = sum * factor + exp2_approx(sink - next), max = next, inverse = factor / sum;
                }
                if (p.lse && first)
                    p.lse[(int64_t(done.b) * p.nheads + head) * p.seqlen_q + i] = sum == 0 ? -INFINITY : (max + log2f(sum)) * kLn2;
            } else if (first) {
                d.partial_lse[int64_t(done.slot) * Plan::kRows + tile_row] = sum == 0 ? -INFINITY : max + log2f(sum);
            }
            float* const partial = d.partial + (int64_t(done.slot) * Plan::kRows + tile_row) * p.headdim_v;
            uint16_t* const out = static_cast<uint16_t*>(p.out.data) + done.b * p.out.batch + i * p.out.row + head * p.out.head;
#pragma unroll 1
            for (int column = opaque(thread) % kThreadsPerRow * 4; column < kD; column += 4 * kThreadsPerRow) {
                if (column >= p.headdim_v) continue;
                float4 x{};
#pragma unroll
                for (int source = 0; source < kSources; ++source) {
                    const float* from = reinterpret_cast<const float*>(shared + (source0 + source) * Plan::kPartBytes);
                    const float4 y = *reinterpret_cast<const float4*>(from + o_place<kD>(row, column));
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

template <typename E, int kD, bool kWide>
cudaError_t launch_decode(DecodeParams d, const DecodeDevice& device, cudaStream_t stream) {
    using Plan = DecodeTile<E, kD, kWide>;
    d.stages = Plan::stages(device.shared_memory);
    const size_t bytes = size_t(d.stages) * Plan::kStageBytes + Plan::kQueryBytes;
    const unsigned blocks = unsigned(decode_blocks(d, device));
    return launch_kernel(decode_kernel<E, kD, kWide>, blocks, kDecodeThreads, bytes, stream, d, d.after_append);
}

template <typename E, int kD>
cudaError_t launch_decode(const DecodeParams& d, const DecodeDevice& device, cudaStream_t stream) {
    if constexpr (decode_has_wide(sizeof(E), kD))
        if (d.rows == 64) return launch_decode<E, kD, true>(d, device, stream);
    return launch_decode<E, kD, false>(d, device, stream);
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
