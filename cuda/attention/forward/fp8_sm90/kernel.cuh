// fp8_sm90/kernel.cuh: attention on 8-bit floats.   out = softmax(q k^T * softmax_scale) v,   q, k, v e4m3 with one factor per head.
//
// New against wgmma_sm90/kernel.cuh (roles, rings and loop are the same):
//
//     producer, warp 0      Q -> q;  K tiles -> ring k;  V tiles -> ring v, as in memory: one row per key
//     transposer, warps 1-3 ring v -> ring vt: one row per head dim, keys along it, the only order that 8-bit products take
//     consumers             S(n) = Q K(n)^T, O += P(n+1) V(n+1), softmax(n) -> P(n) in e4m3; now and then O -> sums in float
//
//     v_full: the copy has landed     v_empty, vt_full: one arrival per transposer warp     vt_empty, k_empty: one per consumer warp
//
// The transposer moves pairs of bytes. ldmatrix.trans gives a lane two keys of two neighbouring head dims, prmt separates the two head
// dims, and stmatrix writes sixteen keys of each. The keys come out in the order in which accumulators hold P (wgmma_fp8.cuh), so P needs
// no shuffle. The head dims come out with even ones first; the epilogue undoes this while it packs.
//
// The range of P. e4m3 ends at 448, and below 2^-9 everything rounds to zero. The lazy maximum is therefore set 2^6 below the largest score
// of the first tile: P reaches 64, a row may rise by 2^2.75 before O is rescaled, and 2^-16 of the maximum still counts. The largest P is
// then no power of two, and its rounding error would bias rows that one key dominates. So out = O / (sum of the rounded P). That sum comes
// out of P V: V^T has eight more rows, of constants, below its head dims. lse needs the sum before rounding, which costs 3 .. 7 %; calls
// without lse skip it. The factors of q and k are folded into the scale of the exponential, that of v into the last division.
//
// The length of sums. The tensor cores truncate every product at 2^-13 of the sum that it is added to. If all keys were summed there, out
// would fall short of a mean of V by 8 % at 4k keys and by up to 43 % at 16k (measured). So by default a sum takes at most 1024 keys and is
// then promoted to additions in float, in the way that the plan has room for (Fp8Sum). A sum of 1024 keys loses 1.5 %, depending on how
// many bits its products have. V^T's rows of constants hold 1, with few bits, and 1.375, with many: the mean of the two sums of P loses
// about as much as a mean of V does. out = O / that mean is off by up to 0.6 % of V's mean at any length, with sums of 512 keys by 0.2 %
// (measured, scores' spread 0.0 to 3.0); rounding out to bfloat16 adds up to 0.4 %. With fast_accum, O stays in the tensor cores for all
// keys and only the sums of P are promoted: right for values of either sign, but a mean of V fades.
//
// Bound by the softmax at head dim 64, where the exponentials alone take twice the time of the tensor cores, and at 128, where they take as
// long; at 256 by the tensor cores and shared memory.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/common/score_fragment.cuh"
#include "attention/forward/common/consumer.cuh"
#include "attention/forward/common/roles_sm90.cuh"
#include "attention/forward/common/work_list.h"
#include "attention/forward/common/work_loop.cuh"
#include "attention/forward/fp8_sm90/plan.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/ring.cuh"
#include "device/tensor_map.h"
#include "device/tile_load.cuh"
#include "device/wgmma_fp8.cuh"

namespace fa {

struct Fp8Schedule {
    ForwardWorkList list;
    int q_loads, k_loads, v_loads;  // boxes of a tile
};

struct Fp8Work : ForwardWork {
    float scale_log2;  // softmax_scale * q_descale * k_descale * log2(e)
    float v_descale;
};

template <Fp8PlanId kId>
constexpr int kVtRows = fp8_plan(kId).headdim + 8;  // the last eight rows sum P

template <Fp8PlanId kId>
struct alignas(1024) Fp8Smem {
    static constexpr Fp8Plan kPlan = fp8_plan(kId);
    static constexpr bool kShared = kPlan.sum == Fp8Sum::kShared;
    uint8_t q[kPlan.warpgroups][64 * kPlan.columns()];
    uint8_t k[kPlan.k_stages][kPlan.block_n * kPlan.columns()];
    uint8_t v[kPlan.v_stages][kPlan.block_n * kPlan.columns()];
    uint8_t vt[kPlan.v_stages][kVtRows<kId> * kPlan.keys()];
    float4 o[kPlan.warpgroups][kShared ? kPlan.headdim / 8 : 1][kShared ? 128 : 1];  // a thread's float4s are 2 KiB apart
    uint64_t q_full[1], q_empty[1];
    uint64_t k_full[kPlan.k_stages], k_empty[kPlan.k_stages], v_full[kPlan.v_stages], v_empty[kPlan.v_stages];
    uint64_t vt_full[kPlan.v_stages], vt_empty[kPlan.v_stages];
    static constexpr int kWorkSlots = 3;
    uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
    Fp8Work work[kWorkSlots];
};

constexpr int kTransposerWarps = 3;
constexpr uint32_t kEvenRow = 0x38383838, kOddRow = 0x3B3B3B3B;  // V^T's last eight rows: four times 1.0 and four times 1.375 in e4m3

// Transposes one tile of V to V^T, by warps 0 .. kTransposerWarps - 1: a warp takes every third 16-byte piece of the keys' rows.
template <int kHeadDim, int kBlockN, int kBatch>  // kBatch: steps of 32 keys in flight at a time
struct Transposer {
    static_assert(kBlockN / 32 % kBatch == 0, "whole batches");
    static constexpr int kPieces = kHeadDim / 16, kSteps = kBlockN / 32;
    uint32_t from, to;  // this lane's row of 16 bytes in the first step of piece 0

    __device__ __forceinline__ Transposer(uint32_t v, uint32_t vt, int lane)
        : from(v + lane * kChunkRowBytes), to(vt + (lane / 8 % 2 * 8 + lane % 8) * kChunkRowBytes + ((lane / 16 ^ lane % 8) << 4)) {}

    // x[h / 2][h % 2]: keys 32 i + 8 h + 2 quad and + 1, head dims 16 piece + 2 g and + 1
    __device__ __forceinline__ void load_step(uint32_t (&x)[2][2], int piece, int lane, int i) const {
        ldmatrix_x4_trans(x, from + piece / 8 * kBlockN * kChunkRowBytes + ((piece ^ lane) % 8 << 4) + i * 32 * kChunkRowBytes);
    }
    __device__ __forceinline__ void store_step(const uint32_t (&x)[2][2], int piece, int i) const {
        stmatrix_x4((to + piece * 16 * kChunkRowBytes ^ i % 4 << 5) + i / 4 * (kHeadDim + 8) * kChunkRowBytes,
                    permute_bytes<0x6420>(x[0][0], x[0][1]), permute_bytes<0x7531>(x[0][0], x[0][1]),
                    permute_bytes<0x6420>(x[1][0], x[1][1]), permute_bytes<0x7531>(x[1][0], x[1][1]));
    }
    __device__ __forceinline__ void whole(int warp, int lane) const {
#pragma unroll 1
        for (int piece = warp; piece < kPieces; piece += kTransposerWarps) {
#pragma unroll
            for (int first = 0; first < kSteps; first += kBatch) {
                uint32_t x[kBatch][2][2];
#pragma unroll
                for (int i = 0; i < kBatch; ++i) load_step(x[i], piece, lane, first + i);
#pragma unroll
                for (int i = 0; i < kBatch; ++i) store_step(x[i], piece, first + i);
            }
        }
    }
    // The same for the tile with the last visible key: later keys become zeros, because 0 x NaN is NaN.
    __device__ __forceinline__ void part(int warp, int lane, int visible) const {
#pragma unroll 1
        for (int unit = warp; unit < kPieces * kSteps; unit += kTransposerWarps) {
            uint32_t x[2][2];
            const int piece = unit / kSteps, i = unit % kSteps;
            load_step(x, piece, lane, i);
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                const int left = visible - (i * 32 + 8 * h + lane % 4 * 2);
                x[h / 2][h % 2] &= left >= 2 ? ~0u : left == 1 ? 0xFFFFu : 0u;
            }
            store_step(x, piece, i);
        }
    }
};

template <Fp8PlanId kId>
__device__ __forceinline__ void init_barriers(Fp8Smem<kId>& smem) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr int kConsumerArrivals = 4 * kPlan.warpgroups * kWarpArrivals, kTransposerArrivals = kTransposerWarps * kWarpArrivals;
    const auto init = [](uint64_t& barrier, int arrivals) { mbarrier_init(shared_address(&barrier), arrivals); };
    init(smem.q_full[0], 1), init(smem.q_empty[0], kConsumerArrivals);
    for (int i = 0; i < kPlan.k_stages; ++i) init(smem.k_full[i], 1), init(smem.k_empty[i], kConsumerArrivals);
    for (int i = 0; i < kPlan.v_stages; ++i) {
        init(smem.v_full[i], 1), init(smem.v_empty[i], kTransposerArrivals);
        init(smem.vt_full[i], kTransposerArrivals), init(smem.vt_empty[i], kConsumerArrivals);
    }
    for (int i = 0; i < Fp8Smem<kId>::kWorkSlots; ++i)
        init(smem.work_full[i], 1), init(smem.work_empty[i], kConsumerArrivals + kTransposerArrivals);
    fence_mbarrier_init();
}

// Writes the rows of V^T that sum P. Called by all threads of the block. The rows are constant, so the swizzle within a row does not
// matter.
template <Fp8PlanId kId>
__device__ __forceinline__ void write_sum_rows(Fp8Smem<kId>& smem) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr uint32_t kChunkBytes = kVtRows<kId> * kChunkRowBytes;
    for (uint32_t i = threadIdx.x; i < 64 * kPlan.v_stages * (kPlan.keys() / 128); i += blockDim.x) {
        const uint32_t x = i / 8 % 2 ? kOddRow : kEvenRow;
        store_shared_16(shared_address(smem.vt) + i / 64 * kChunkBytes + kPlan.headdim * kChunkRowBytes + i % 64 * 16,
                        make_uint4(x, x, x, x));
    }
    fence_proxy_async();
}

// ---- producer: one thread ----

template <Fp8PlanId kId>
struct Fp8WorkTiles {
    static constexpr int kBlockM = fp8_plan(kId).block_m(), kBlockN = fp8_plan(kId).block_n;
    static constexpr bool kCaches = false;
};

template <Fp8PlanId kId>
__device__ __forceinline__ void produce(const CUtensorMap& map_q, const CUtensorMap& map_k, const CUtensorMap& map_v,
                                        const AttentionParams& p, const Fp8Schedule& schedule, Fp8Smem<kId>& smem) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr int kBlockN = kPlan.block_n;
    uint32_t tile = 0;  // tiles of K and V so far, over all items: one count saves the registers of several rings
    const auto prepare = [&](Fp8Work& w) {
        const auto descale = [&](const DescaleView& d, int head) { return d.data[w.batch * d.batch + head * d.head]; };
        w.scale_log2 = p.scale * kLog2e * descale(p.q_descale, w.head) * descale(p.k_descale, w.head / p.group);
        w.v_descale = descale(p.v_descale, w.head / p.group);
    };
    for_each_item<Fp8WorkTiles<kId>, WalkedBy::kThreadByCounts>(
        p, schedule.list, smem.work, smem.work_full, smem.work_empty, prepare, [&](const Fp8Work& w, uint32_t item) {
            const Ring<1> q(smem.q_full, smem.q_empty, item);
            const int head_k = w.head / p.group, batch = p.cu_seqlens_q ? 0 : w.batch;
            const auto load_k = [&](int row, uint32_t count) {
                const Ring<kPlan.k_stages> k(smem.k_full, smem.k_empty, count);
                k.wait_empty();
                mbarrier_arrive_expect_tx(k.full_barrier(), sizeof smem.k[0]);
                load_tile(map_k, schedule.k_loads, shared_address(smem.k[k.slot]), kBlockN, k.full_barrier(), row, head_k, batch,
                          kEvictLast);
            };
            const auto load_v = [&](int row, uint32_t count) {
                const Ring<kPlan.v_stages> v(smem.v_full, smem.v_empty, count);
                v.wait_empty();
                mbarrier_arrive_expect_tx(v.full_barrier(), sizeof smem.v[0]);
                load_tile(map_v, schedule.v_loads, shared_address(smem.v[v.slot]), kBlockN, v.full_barrier(), row, head_k, batch,
                          kEvictLast);
            };
            int row = w.k_row + w.last_tile * kBlockN;
            load_k(row, tile);  // does not wait for the Q buffer
            q.wait_empty();
            mbarrier_arrive_expect_tx(q.full_barrier(), sizeof smem.q);
            for (int slab = 0, row_q = w.q_row + w.row0; slab < kPlan.warpgroups; ++slab)
                load_tile(map_q, schedule.q_loads, shared_address(smem.q[slab]), 64, q.full_barrier(), row_q + slab * 64, w.head, batch,
                          kEvictFirst);
            for (const int last = w.k_row + w.first_tile * kBlockN; row > last; row -= kBlockN, ++tile)
                load_v(row, tile), load_k(row - kBlockN, tile + 1);
            load_v(row, tile++);
        });
}

// ---- transposer: three warps ----

template <Fp8PlanId kId>
__device__ __forceinline__ void transpose_values(Fp8Smem<kId>& smem, int warp, int lane) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr int kBlockN = kPlan.block_n, kBatch = kPlan.producer_registers() < 32 ? 2 : kBlockN / 32;
    Ring<Fp8Smem<kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    Ring<kPlan.v_stages> v(smem.v_full, smem.v_empty), vt(smem.vt_full, smem.vt_empty);  // both at the same slot
    for (;;) {
        work.wait_full();
        const Fp8Work& w = smem.work[work.slot];
        if (w.state == WorkState::kEnd) return;
        int tiles = w.last_tile - w.first_tile + 1;
        int visible = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k) - w.last_tile * kBlockN;  // no row sees later keys
        __syncwarp();
        work.release(lane);
#pragma unroll 1
        for (; tiles > 0; --tiles, visible += kBlockN) {
            v.wait_full();
            mbarrier_wait(vt.empty + 8 * v.slot, v.phase ^ 1);
            const Transposer<kPlan.headdim, kBlockN, kBatch> transposer(shared_address(smem.v[v.slot]), shared_address(smem.vt[v.slot]),
                                                                        lane);
            if (visible >= kBlockN) transposer.whole(warp, lane);
            else transposer.part(warp, lane, visible);
            fence_proxy_async();
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(vt.full + 8 * v.slot);
            v.release(lane);
        }
    }
}

// ---- consumers ----

// A consumer thread's part of O. Elements with i / 2 % 2 = r belong to row g + 8 r of the warp's sixteen. The last four are the sums of P
// from the products.
template <Fp8PlanId kId>
struct Fp8Output {
    static constexpr Fp8Plan kPlan = fp8_plan(kId);
    static constexpr int kD = kPlan.headdim, kRegisters = kVtRows<kId> / 2;
    static constexpr bool kShared = kPlan.sum == Fp8Sum::kShared, kInPieces = kPlan.sum == Fp8Sum::kPieces;
    static constexpr int kPiece = kInPieces ? 64 : kD < 128 ? kD : 128, kPieces = kD / kPiece;  // head dims of one product
    float o[kRegisters];
    float sum[2];                                   // of P, in float
    float part[2][kInPieces ? kPiece / 2 + 4 : 1];  // kInPieces: P V before it is added to O
    int carried;                                    // tiles summed in o so far; kInPieces: 0
    bool stored;                                    // kShared: shared memory holds earlier tiles of O
};

template <Fp8PlanId kId, int kScores, int kQ>
__device__ __forceinline__ void multiply_qk(float (&S)[kScores], const uint32_t (&q_fragment)[kQ], uint64_t desc_q, uint64_t desc_k) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr int kBlockN = kPlan.block_n;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPlan.headdim / 32; ++i) {
        if constexpr (kPlan.q_in_registers) wgmma_fp8_rs<kBlockN>(S, q_fragment + 4 * i, desc_k + descriptor_k_step(i, kBlockN), i != 0);
        else wgmma_fp8_ss<kBlockN>(S, desc_q + descriptor_k_step(i, 64), desc_k + descriptor_k_step(i, kBlockN), i != 0);
    }
    wgmma_commit();
}

// Head dims from kPiece * piece on of P V, added to the tiles carried in d; the last piece includes the sums of P.
template <Fp8PlanId kId, int kProbabilities>
__device__ __forceinline__ void multiply_piece(Fp8Output<kId>& out, const uint32_t (&P)[kProbabilities], uint64_t desc_vt, int piece) {
    using Output = Fp8Output<kId>;
    const uint64_t desc = desc_vt + descriptor_step(piece * Output::kPiece * kChunkRowBytes);
    float* d = Output::kInPieces ? out.part[piece % 2] : out.o + piece * Output::kPiece / 2;
#pragma unroll
    for (int i = 0; i < kProbabilities / 4; ++i) {
        const uint64_t keys = desc + descriptor_k_step(i, kVtRows<kId>);
        if (piece == Output::kPieces - 1) wgmma_fp8_rs<Output::kPiece + 8>(d, P + 4 * i, keys, i != 0 ? 1 : out.carried);
        else wgmma_fp8_rs<Output::kPiece>(d, P + 4 * i, keys, i != 0 ? 1 : out.carried);
    }
}
// O += P V
template <Fp8PlanId kId, int kProbabilities>
__device__ __forceinline__ void multiply_pv(Fp8Output<kId>& out, const uint32_t (&P)[kProbabilities], uint64_t desc_vt) {
    wgmma_fence();
#pragma unroll
    for (int piece = 0; piece < Fp8Output<kId>::kPieces; ++piece) multiply_piece(out, P, desc_vt, piece);
    wgmma_commit();
}
template <Fp8PlanId kId>
__device__ __forceinline__ void add_piece(Fp8Output<kId>& out, int piece) {
    using Output = Fp8Output<kId>;
#pragma unroll
    for (int i = 0; i < (piece == Output::kPieces - 1 ? Output::kPiece / 2 + 4 : Output::kPiece / 2); ++i)
        out.o[piece * Output::kPiece / 2 + i] += out.part[piece % 2][i];
}
// Fp8Sum::kPieces: adds one piece to O while the next is multiplied. The last piece is complete on return, but the caller adds it.
template <Fp8PlanId kId, int kProbabilities>
__device__ __forceinline__ void multiply_pv_in_pieces(Fp8Output<kId>& out, const uint32_t (&P)[kProbabilities], uint64_t desc_vt) {
    constexpr int kPieces = Fp8Output<kId>::kPieces;
    wgmma_fence();
    multiply_piece(out, P, desc_vt, 0);
    wgmma_commit();
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
        if (piece + 1 < kPieces) {
            wgmma_fence();
            multiply_piece(out, P, desc_vt, piece + 1);
            wgmma_commit();
            wgmma_wait<1>(out.part[piece % 2]);
            add_piece(out, piece);
        } else wgmma_wait<0>(out.part[piece % 2]);
    }
}

// Adds the sums of P in the last four registers to `sum`: half of the mean from each constant.
template <Fp8PlanId kId>
__device__ __forceinline__ void add_sums(Fp8Output<kId>& out) {
    constexpr float kEvenShare = 0.5f, kOddShare = 0.5f / 1.375f;
    constexpr int kSums = Fp8Output<kId>::kD / 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) out.sum[r] += kEvenShare * out.o[kSums + 2 * r] + kOddShare * out.o[kSums + 2 * r + 1];
}
// Fp8Sum::kShared: `kept` is this thread's part of O in shared memory.
template <Fp8PlanId kId>
__device__ __forceinline__ void add_stored(Fp8Output<kId>& out, const float4* kept) {
    if (!out.stored) return;
#pragma unroll
    for (int i = 0; i < Fp8Output<kId>::kD / 8; ++i) {
        const float4 x = kept[i * 128];
        out.o[4 * i] += x.x, out.o[4 * i + 1] += x.y, out.o[4 * i + 2] += x.z, out.o[4 * i + 3] += x.w;
    }
}
// Called when the sums in the tensor cores have reached kFp8Promotion keys: they start afresh. With fast_accum only the sums of P are
// promoted.
template <Fp8PlanId kId>
__device__ __forceinline__ void promote(Fp8Output<kId>& out, float4* kept, bool fast_accum) {
    using Output = Fp8Output<kId>;
    add_sums(out);
    if (Output::kShared && !fast_accum) {
        add_stored(out, kept);
#pragma unroll
        for (int i = 0; i < Output::kD / 8; ++i)
            kept[i * 128] = make_float4(out.o[4 * i], out.o[4 * i + 1], out.o[4 * i + 2], out.o[4 * i + 3]);
        out.stored = true, out.carried = 0;
    } else {
#pragma unroll
        for (int i = Output::kD / 2; i < Output::kRegisters; ++i) out.o[i] = 0.0f;
        out.carried = 1;
    }
}
template <Fp8PlanId kId>
__device__ __forceinline__ void rescale_output(Fp8Output<kId>& out, float4* kept, const float (&o_scale)[2]) {
    using Output = Fp8Output<kId>;
    out.sum[0] *= o_scale[0], out.sum[1] *= o_scale[1];
#pragma unroll
    for (int i = 0; i < Output::kRegisters; ++i) out.o[i] *= o_scale[i / 2 % 2];
    if constexpr (Output::kShared) {
#pragma unroll 4
        for (int i = 0; i < (out.stored ? Output::kD / 8 : 0); ++i) {
            const float4 x = kept[i * 128];
            kept[i * 128] = make_float4(x.x * o_scale[0], x.y * o_scale[0], x.z * o_scale[1], x.w * o_scale[1]);
        }
    }
}

// S becomes P. row_max stands kOffset below the true maximum. Returns whether O must be multiplied by o_scale. Without lse, row_sum is 0
// (leaving it out altogether makes ptxas spill).
constexpr float kOffset = 6.0f, kRise = 2.75f;  // in log2: P reaches at most 2^8.75 = 431
template <bool kLse, int kScores>
__device__ __forceinline__ bool softmax(float (&S)[kScores], bool first, float scale_log2, float (&row_max)[2], float (&row_sum)[2],
                                        float (&o_scale)[2]) {
    float tile_max[2], share[2];
    bool moved = false;
    tile_maximum(S, tile_max);
#pragma unroll
    for (int r = 0; r < 2; ++r) tile_max[r] = fmaf(tile_max[r], scale_log2, -kOffset);
    if (first) row_max[0] = tile_max[0], row_max[1] = tile_max[1], row_sum[0] = row_sum[1] = 0.0f;
    else moved = raise_maximum(tile_max, kRise, row_max, row_sum, o_scale);
    exponentials(S, scale_log2, row_max, share);
    if constexpr (kLse) row_sum[0] += share[0], row_sum[1] += share[1];
    return moved;
}

template <int kScores>
__device__ __forceinline__ void pack_probabilities(uint32_t (&P)[kScores / 4], const float (&S)[kScores]) {
#pragma unroll
    for (int i = 0; i < kScores / 16; ++i) pack_p(S, i, reinterpret_cast<uint32_t(&)[4]>(P[4 * i]));
}

// out = O / sum of P, lse = log of row_sum, for the thread's two rows.
template <Fp8PlanId kId>
__device__ __forceinline__ void finish_rows(const AttentionParams& p, const Fp8Work& w, const Fp8Output<kId>& out,
                                            const float (&row_max)[2], const float (&row_sum)[2], const Consumer& me) {
    // opaque: the row is computed here instead of being kept through the loop. At head dim 256 no register is free for it.
    const int row0 = w.row0 + opaque(me.wg) * 64 + me.warp * 16 + me.lane / 4;
    const bool varlen = p.cu_seqlens_q, half = p.out_dtype == DType::kFloat16, odd = me.quad() & 1;
    const int64_t lse_row = (int64_t(varlen ? 0 : w.batch) * p.nheads + w.head) * (varlen ? p.total_q : p.seqlen_q) + w.q_row;
    uint16_t* rows = static_cast<uint16_t*>(p.out.data) + (varlen ? 0 : w.batch * p.out.batch) + w.q_row * p.out.row + w.head * p.out.head;
    const auto pack = [&](float low, float high) { return half ? pack_16<__half>(low, high) : pack_16<__nv_bfloat16>(low, high); };
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row0 + 8 * r;
        if (p.lse) {
            const RowEnd end = finish_row<ScoreUnit::kLog2>(row_max[r], quad_sum(row_sum[r]));
            if (me.quad() == 0 && i < w.seqlen_q) p.lse[lse_row + i] = end.lse * kLn2;
        }
        const bool empty = out.sum[r] == 0.0f;  // zeros, although 0 x V may be NaN
        const float inverse = w.v_descale / out.sum[r];
        const auto value = [&](float sum) { return empty ? 0.0f : sum * inverse; };
        // Of the sixteen head dims of column groups 2 j and 2 j + 1, the lane has 4 quad .. 4 quad + 3. Even lanes complete their four to
        // eight with those of their neighbour; odd lanes do so for the next sixteen.
        uint16_t* row = rows + i * p.out.row;
#pragma unroll
        for (int j = 0; j < fp8_plan(kId).headdim / 16; j += 2) {
            const float* x = out.o + 8 * j + 2 * r;
            const uint32_t a0 = pack(value(x[0]), value(x[4])), a1 = pack(value(x[1]), value(x[5]));
            const uint32_t b0 = pack(value(x[8]), value(x[12])), b1 = pack(value(x[9]), value(x[13]));
            const uint32_t got0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), got1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
            const int column = 16 * (j + odd) + 4 * (me.quad() & 2);
            if (i < w.seqlen_q && column < p.headdim_v)
                *reinterpret_cast<uint4*>(row + column) = odd ? make_uint4(got0, got1, b0, b1) : make_uint4(a0, a1, got0, got1);
        }
    }
}

// The number of the block's last tiles that the causal mask hides from all rows of warpgroup wg. The warpgroup skips them. A warpgroup
// without rows skips none.
//
// No deadlock: each ring holds all of these tiles, so a warpgroup can skip them however far the others lag. It hands on the turns of the
// skipped tiles as soon as its first product is issued.
template <Fp8PlanId kId>
__device__ __forceinline__ int hidden_tiles(const Fp8Work& w, int wg) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    static_assert(kPlan.block_m() - 64 <= kPlan.k_stages * kPlan.block_n && kPlan.block_m() - 64 <= kPlan.v_stages * kPlan.block_n,
                  "the rings hold all tiles that the first warpgroup passes by");
    if (!kPlan.passes_hidden_tiles()) return 0;
    const int end = clamp_to(min(w.row0 + wg * 64 + 64, w.seqlen_q) + w.right, 0, w.seqlen_k);
    return w.last_tile - max(w.first_tile, (end + kPlan.block_n - 1) / kPlan.block_n - 1);
}
template <int kSlots>
__device__ __forceinline__ void pass_by(Ring<kSlots>& ring, int tiles, int lane) {
#pragma unroll 1
    for (; tiles > 0; --tiles) {
        ring.wait_full();
        __syncwarp();  // all lanes have seen that the buffer is full before it may be filled again
        ring.release(lane);
    }
}

template <Fp8PlanId kId, bool kLse>
__device__ __forceinline__ void consume(const AttentionParams& p, Fp8Smem<kId>& smem, const Consumer& me) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    using Output = Fp8Output<kId>;
    constexpr int kBlockN = kPlan.block_n, kWarpgroups = kPlan.warpgroups, kCarry = kFp8Promotion / kBlockN;
    constexpr bool kQInRegisters = kPlan.q_in_registers, kInPieces = Output::kInPieces;
    float S[kBlockN / 2];                                        // row g + 8 r of the warp's 16: elements with i / 2 % 2 = r
    uint32_t P[kBlockN / 8];                                     // as A operand
    uint32_t q_fragment[kQInRegisters ? kPlan.headdim / 8 : 1];  // as A operand
    Output out;
    float row_max[2], row_sum[2], o_scale[2];  // row_sum: this thread's share
    Ring<1> q(smem.q_full, smem.q_empty);
    Ring<kPlan.k_stages> k(smem.k_full, smem.k_empty);
    Ring<kPlan.v_stages> vt(smem.vt_full, smem.vt_empty);
    Ring<Fp8Smem<kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    const uint32_t slab = shared_address(smem.q) + me.wg * sizeof smem.q[0];
    const uint64_t desc_q = wgmma_descriptor(slab, 16), desc_k = wgmma_descriptor(shared_address(smem.k), 16),
                   desc_vt = wgmma_descriptor(shared_address(smem.vt), 16), k_step = descriptor_step(sizeof smem.k[0]),
                   vt_step = descriptor_step(sizeof smem.vt[0]);
    float4* const kept = smem.o[me.wg][0] + threadIdx.x % 128;

    if (me.wg == kWarpgroups - 1) give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);  // the first turn is warpgroup 0's
    for (;;) {
        work.wait_full();
        const Fp8Work& w = smem.work[work.slot];
        if (w.state == WorkState::kEnd) return;
        const int first_tile = w.first_tile;
        const int hidden = hidden_tiles<kId>(w, me.wg);
        int n = w.last_tile - hidden;
        const float scale_log2 = w.scale_log2 == 0.0f ? 0x1p-126f : w.scale_log2;  // hidden scores are -inf, and 0 x inf is NaN
        // Tiles from right_tile on need the right edge masked.
        const int right_tile = clamp_to(w.row0 + me.wg * 64 + w.right + 1, 0, w.seqlen_k) / kBlockN;
        const auto mask = [&] {
            if (n < right_tile) return;
            const Consumer at = me.rare();
            const int row = w.row0 + at.row(), key = n * kBlockN + 2 * at.quad();
            mask_right(S, min(row + w.right, w.seqlen_k - 1) - key, min(row + 8 + w.right, w.seqlen_k - 1) - key);
        };

        if constexpr (kInPieces) {
#pragma unroll
            for (int i = 0; i < Output::kRegisters; ++i) out.o[i] = 0.0f;
        }
        out.sum[0] = out.sum[1] = 0.0f;
        out.carried = 0, out.stored = false;
        q.wait_full();
        if constexpr (kQInRegisters) {
            load_q_fragment(q_fragment, slab, me);
            __syncwarp();
            q.release(me.lane);
        }
        pass_by(k, hidden, me.lane);
        k.wait_full();
        multiply_qk<kId>(S, q_fragment, desc_q, desc_k + k.slot * k_step);
#pragma unroll 1
        for (int turns = hidden; turns > 0; --turns) {
            take_turn<kPlan.ping_pong>(me.wg);
            give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);
        }
        wgmma_wait<0>(S);
        k.release(me.lane);
        mask();
        softmax<kLse>(S, true, scale_log2, row_max, row_sum, o_scale);
        pack_probabilities(P, S);
        pass_by(vt, hidden, me.lane);
#pragma unroll 1
        for (--n; n >= first_tile; --n) {
            k.wait_full();
            if constexpr (kInPieces) {
                vt.wait_full();
                multiply_pv_in_pieces(out, P, desc_vt + vt.slot * vt_step);
                multiply_qk<kId>(S, q_fragment, desc_q, desc_k + k.slot * k_step);
                vt.release(me.lane);
                add_piece(out, Output::kPieces - 1);
                wgmma_wait<0>(S);
            } else {
                take_turn<kPlan.ping_pong>(me.wg);
                multiply_qk<kId>(S, q_fragment, desc_q, desc_k + k.slot * k_step);  // S(n)
                vt.wait_full();
                multiply_pv(out, P, desc_vt + vt.slot * vt_step);  // O += P(n + 1) V(n + 1)
                give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);
                wgmma_wait<1>(S);
            }
            k.release(me.lane);
            mask();
            const bool moved = softmax<kLse>(S, false, scale_log2, row_max, row_sum, o_scale);
            if constexpr (!kInPieces) {
                wgmma_wait<0>(out.o);
                vt.release(me.lane);
                ++out.carried;
                if (out.carried == kCarry) promote(out, kept, p.fast_accum);
            }
            pack_probabilities(P, S);  // not before the wait: P(n + 1) was still being read
            if (moved) rescale_output(out, kept, o_scale);
        }
        if constexpr (!kQInRegisters) q.release(me.lane);  // the next Q arrives during the last product and the epilogue
        vt.wait_full();
        if constexpr (kInPieces) multiply_pv_in_pieces(out, P, desc_vt + vt.slot * vt_step);
        else {
            multiply_pv(out, P, desc_vt + vt.slot * vt_step);
            wgmma_wait<0>(out.o);
        }
        vt.release(me.lane);
        if constexpr (kInPieces) add_piece(out, Output::kPieces - 1);
        if constexpr (Output::kShared) add_stored(out, kept);
        add_sums(out);
        finish_rows(p, w, out, row_max, row_sum, me);
        __syncwarp();
        work.release(me.lane);
    }
}

template <Fp8PlanId kId, bool kLse>
__global__ void __launch_bounds__(128 * (fp8_plan(kId).warpgroups + 1), 1)
    forward_fp8_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                       const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                       const __grid_constant__ Fp8Schedule schedule) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    static_assert(kPlan.block_n % 32 == 0, "whole steps of 32 keys");
    using Smem = Fp8Smem<kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        init_barriers(smem);
    }
    write_sum_rows(smem);
    __syncthreads();

    if (warpgroup == 0) {
        setmaxnreg_dec<kPlan.producer_registers()>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp > 0) transpose_values(smem, warp - 1, lane);
        else if (lane == 0) produce(map_q, map_k, map_v, p, schedule, smem);
        return;
    }
    setmaxnreg_inc<kPlan.consumer_registers()>();
    consume<kId, kLse>(p, smem, Consumer{warpgroup - 1, int(threadIdx.x % 128 / 32), lane});
}

// ---- launch ----

template <Fp8PlanId kId, bool kLse>
cudaError_t launch_fp8(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    if (work_items(p, kPlan.block_m()) == 0) return cudaSuccess;
    const bool varlen = p.cu_seqlens_q;
    Fp8Schedule schedule{};
    schedule.list = forward_work_list(p, kPlan.block_m(), multiprocessors);

    CUtensorMap map_q, map_k, map_v;
    // The maps describe pairs of bytes as 16-bit elements, half as many.
    const auto encode = [&](const char* name, const TensorView& x, int columns, int64_t rows, int heads, int box_rows, CUtensorMap* map,
                            int* loads) {
        return encode_tiles(
            {name, x.data, true, columns / 2, rows, heads, varlen ? 1 : p.batch, x.row, x.head, x.batch, box_rows, kPlan.columns() / 2},
            map, loads);
    };
    const int64_t rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
    if (cudaError_t error = encode("q", p.q, p.headdim, rows_q, p.nheads, 64, &map_q, &schedule.q_loads)) return error;
    // Without keys, everything that is loaded is hidden: any memory will do.
    const bool keys = rows_k > 0;
    if (cudaError_t error = encode("k", keys ? p.k : p.q, p.headdim, keys ? rows_k : rows_q, keys ? p.nheads_k : p.nheads, kPlan.block_n,
                                   &map_k, &schedule.k_loads))
        return error;
    if (cudaError_t error = encode("v", keys ? p.v : p.q, keys ? p.headdim_v : p.headdim, keys ? rows_k : rows_q,
                                   keys ? p.nheads_k : p.nheads, kPlan.block_n, &map_v, &schedule.v_loads))
        return error;

    if (schedule.list.counter)
        if (cudaError_t error = cudaMemsetAsync(schedule.list.counter, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    return launch_kernel(forward_fp8_kernel<kId, kLse>, unsigned(schedule.list.blocks), 128 * (kPlan.warpgroups + 1), sizeof(Fp8Smem<kId>),
                         stream, LaunchOptions{}, map_q, map_k, map_v, p, schedule);
}

}  // namespace fa
