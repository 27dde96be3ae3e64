// forward_fp8_sm90.cuh: attention on 8-bit floats.   out = softmax(q k^T * softmax_scale) v,   q, k, v e4m3 with a factor for every head.
//
// New against forward_wgmma_sm90.cuh, whose roles, rings and loop it shares:
//
//     producer, warp 0      Q -> q;  K tiles -> ring k;  V tiles -> ring v, as they lie in memory: a row for each key
//     transposer, warps 1-3 ring v -> ring vt: a row for each head dim, keys along it, for 8-bit products know no other order
//     consumers             S(n) = Q K(n)^T, O += P(n+1) V(n+1), softmax(n) -> P(n) in e4m3; now and then O -> sums in float
//
//     v_full: the copy has landed     v_empty, vt_full: one arrival per transposer warp     vt_empty, k_empty: one per consumer warp
//
// The transposer moves pairs of bytes: ldmatrix.trans brings a lane two keys of two neighbouring head dims, prmt parts the two head
// dims, stmatrix writes sixteen keys of each. The keys come out in the order in which accumulators leave P (wgmma_fp8.cuh), so P needs
// no shuffle; the head dims come out even ones first, which the epilogue undoes while it packs.
//
// P is at most 448, e4m3's largest number, and below 2^-9 there is nothing, so the lazy maximum m stands 2^6 below the largest score of
// the first tile: P reaches 64, a row may rise by 2^2.75 before O is rescaled, and 2^-16 of the maximum still counts. The largest P is then
// no power of two, and rounding it would tilt rows that one key dominates; so out = O / (sum of P as rounded), which comes with P V: below
// its head dims V^T has eight more rows of constants. lse has the sum before rounding, worth 3 .. 7 % to calls without lse. The factors
// of q and k belong to the exponential's scale, that of v to the last division.
//
// The tensor cores cut every product off at 2^-13 of the sum it joins: summed there, out falls short of a mean of V by 8 % at 4k keys and
// up to 43 % at 16k (measured). So by default a sum grows over at most 1024 keys and is promoted to additions in float, in the way that the
// plan has room for (Fp8Sum, tiles.h). What a sum of 1024 keys loses, 1.5 %, depends on how many bits its products have. The constants are
// 1 and 1.375, few bits and many: the mean of the two sums of P loses about as much as V's mean does, and out = O / that mean is off by
// up to 0.6 % of V's mean at any length, with 512 keys by 0.2 % (measured, 0.0 to 3.0 of scores' spread); rounding out to bfloat16 takes up
// to 0.4 %. With fast_accum O stays in the tensor cores for all keys and the sums of P alone are promoted: right for values of either sign,
// and a mean of V fades.
//
// Bound by the softmax at head dim 64, where the exponentials alone take twice the tensor cores' time, and at 128, as long; at 256 by the
// tensor cores and shared memory.
#pragma once

#include "attention/forward_wgmma_sm90.cuh"
#include "device/wgmma_fp8.cuh"

namespace fa {

struct Fp8Work : WgmmaWork {
    float scale_log2;  // softmax_scale * q_descale * k_descale * log2(e)
    float v_descale;
};

template <Fp8PlanId kId>
constexpr int kVtRows = fp8_plan(kId).headdim + 8;  // the last eight sum P

template <Fp8PlanId kId>
struct alignas(1024) Fp8Smem {
    static constexpr Fp8Plan kPlan = fp8_plan(kId);
    uint8_t q[kPlan.warpgroups][64 * kPlan.columns()];
    uint8_t k[kPlan.k_stages][kPlan.block_n * kPlan.columns()];
    uint8_t v[kPlan.v_stages][kPlan.block_n * kPlan.columns()];
    uint8_t vt[kPlan.v_stages][kVtRows<kId> * kPlan.keys()];
    // Fp8Sum::kShared: a thread's registers lie 2 KiB apart
    float4 o[kPlan.warpgroups][kPlan.sum == Fp8Sum::kShared ? kPlan.headdim / 8 : 1][kPlan.sum == Fp8Sum::kShared ? 128 : 1];
    uint64_t q_full, q_empty;
    uint64_t k_full[kPlan.k_stages], k_empty[kPlan.k_stages], v_full[kPlan.v_stages], v_empty[kPlan.v_stages];
    uint64_t vt_full[kPlan.v_stages], vt_empty[kPlan.v_stages];
    static constexpr int kWorkSlots = 3;
    uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
    Fp8Work work[kWorkSlots];
};

constexpr int kTransposerWarps = 3;
constexpr uint32_t kEvenRow = 0x38383838, kOddRow = 0x3B3B3B3B;  // of V^T's last eight: four times 1.0 and 1.375 in e4m3

// One tile of V to V^T, by warps 0 .. kTransposerWarps - 1: a warp takes every third of the 16-byte pieces of the keys' rows.
template <int kHeadDim, int kBlockN, int kBatch>  // kBatch: steps of 32 keys on their way at a time
struct Transposer {
    static_assert(kBlockN / 32 % kBatch == 0, "whole batches");
    static constexpr int kPieces = kHeadDim / 16, kSteps = kBlockN / 32;
    uint32_t from, to;  // this lane's row of 16 bytes in the first step of piece 0

    __device__ __forceinline__ Transposer(uint32_t v, uint32_t vt, int lane)
        : from(v + lane * kChunkRowBytes), to(vt + (lane / 8 % 2 * 8 + lane % 8) * kChunkRowBytes + ((lane / 16 ^ lane % 8) << 4)) {}

    // x[h / 2][h % 2]: keys 32 i + 8 h + 2 quad and the next, head dims 16 piece + 2 g and the next
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
    // The same for the tile that holds the last visible key: later ones become zeros, for 0 x NaN is NaN.
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

template <Fp8PlanId kId, bool kLse>
__global__ void __launch_bounds__(128 * (fp8_plan(kId).warpgroups + 1), 1)
    forward_fp8_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                       const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                       const __grid_constant__ WgmmaSchedule schedule) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr int kD = kPlan.headdim, kBlockM = kPlan.block_m(), kBlockN = kPlan.block_n, kWarpgroups = kPlan.warpgroups;
    constexpr bool kPingPong = kPlan.ping_pong, kQInRegisters = kPlan.q_in_registers;
    constexpr uint32_t kSlabBytes = 64 * kPlan.columns(), kTileBytes = kBlockN * kPlan.columns(), kVtBytes = kVtRows<kId> * kPlan.keys();
    static_assert(kBlockN % 32 == 0, "whole steps of 32 keys");
    using Smem = Fp8Smem<kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");

    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const uint32_t q_full = shared_address(&smem.q_full), q_empty = shared_address(&smem.q_empty);
    const uint32_t k_full = shared_address(smem.k_full), k_empty = shared_address(smem.k_empty);
    const uint32_t v_full = shared_address(smem.v_full), v_empty = shared_address(smem.v_empty);
    const uint32_t vt_full = shared_address(smem.vt_full), vt_empty = shared_address(smem.vt_empty);
    const uint32_t work_full = shared_address(smem.work_full), work_empty = shared_address(smem.work_empty);
    const uint32_t smem_q = shared_address(smem.q), smem_k = shared_address(smem.k), smem_v = shared_address(smem.v),
                   smem_vt = shared_address(smem.vt);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        constexpr int kConsumerWarps = 4 * kWarpgroups;
        mbarrier_init(q_full, 1), mbarrier_init(q_empty, kConsumerWarps * kWarpArrivals);
        for (int i = 0; i < kPlan.k_stages; ++i)
            mbarrier_init(k_full + 8 * i, 1), mbarrier_init(k_empty + 8 * i, kConsumerWarps * kWarpArrivals);
        for (int i = 0; i < kPlan.v_stages; ++i)
            mbarrier_init(v_full + 8 * i, 1), mbarrier_init(v_empty + 8 * i, kTransposerWarps * kWarpArrivals);
        for (int i = 0; i < kPlan.v_stages; ++i)
            mbarrier_init(vt_full + 8 * i, kTransposerWarps * kWarpArrivals),
                mbarrier_init(vt_empty + 8 * i, kConsumerWarps * kWarpArrivals);
        for (int i = 0; i < Smem::kWorkSlots; ++i)
            mbarrier_init(work_full + 8 * i, 1), mbarrier_init(work_empty + 8 * i, (kConsumerWarps + kTransposerWarps) * kWarpArrivals);
        fence_mbarrier_init();
    }
    constexpr uint32_t kVtChunkBytes = kVtRows<kId> * kChunkRowBytes;
    for (uint32_t i = threadIdx.x; i < 64 * kPlan.v_stages * (kPlan.keys() / 128); i += blockDim.x) {  // the swizzle stays within a row
        const uint32_t x = i / 8 % 2 ? kOddRow : kEvenRow;
        store_shared_16(smem_vt + i / 64 * kVtChunkBytes + kD * kChunkRowBytes + i % 64 * 16, make_uint4(x, x, x, x));
    }
    fence_proxy_async();
    __syncthreads();

    if (warpgroup == 0) {
        setmaxnreg_dec<kPlan.producer_registers()>();
        const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
        if (warp > 0) {
            // ------------------------------------------------------------------------------------------------ transposer
            Ring work, v;  // v: of V and V^T
            for (;;) {
                mbarrier_wait(work_full + 8 * work.slot, work.phase);
                const Fp8Work& w = smem.work[work.slot];
                if (!w.valid) return;
                int tiles = w.last_tile - w.first_tile + 1;
                int visible = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k) - w.last_tile * kBlockN;  // later keys are nobody's
                __syncwarp();
                if (arrives(lane)) mbarrier_arrive(work_empty + 8 * work.slot);
                work.next(Smem::kWorkSlots);
#pragma unroll 1
                for (; tiles > 0; --tiles, visible += kBlockN) {
                    mbarrier_wait(v_full + 8 * v.slot, v.phase);
                    mbarrier_wait(vt_empty + 8 * v.slot, v.phase ^ 1);
                    const Transposer<kD, kBlockN, kPlan.producer_registers() < 32 ? 2 : kBlockN / 32> transposer(
                        smem_v + v.slot * kTileBytes, smem_vt + v.slot * kVtBytes, lane);
                    if (visible >= kBlockN) transposer.whole(warp - 1, lane);
                    else transposer.part(warp - 1, lane, visible);
                    fence_proxy_async();
                    __syncwarp();
                    if (arrives(lane)) mbarrier_arrive(vt_full + 8 * v.slot), mbarrier_arrive(v_empty + 8 * v.slot);
                    v.next(kPlan.v_stages);
                }
            }
        }
        // ------------------------------------------------------------------------------------------------ producer
        if (lane != 0) return;
        // Counts of what has been loaded give slot and phase: registers are scarce here.
        uint32_t item = 0, tile = 0;
        // One tile: `rows` rows from `row` on, to `tile`, in as many boxes as the map needs.
        const auto load = [&](const CUtensorMap& map, int loads, uint32_t tile, uint32_t rows, uint32_t barrier, int row, int head,
                              int batch, uint64_t policy) {
#pragma unroll 1
            for (int c = 0; c < loads; ++c)
                tma_load(tile + c * rows * kChunkRowBytes, &map, barrier, c * kChunkColumns, row, 0, head, batch, policy);
        };
        for (int index = blockIdx.x;;) {
            const uint32_t work_slot = item % Smem::kWorkSlots;
            Fp8Work& w = smem.work[work_slot];
            mbarrier_wait(work_empty + 8 * work_slot, item / Smem::kWorkSlots % 2 ^ 1);
            const bool rows = find_work<kBlockM, kBlockN, false>(p, schedule, index, w);
            if (rows || !w.valid) {
                const int head_k = w.head / p.group, batch = p.cu_seqlens_q ? 0 : w.batch;
                if (rows) {
                    const auto descale = [&](const DescaleView& d, int head) { return d.data[w.batch * d.batch + head * d.head]; };
                    w.scale_log2 = p.scale * 1.4426950408889634f * descale(p.q_descale, w.head) * descale(p.k_descale, head_k);
                    w.v_descale = descale(p.v_descale, head_k);
                }
                mbarrier_arrive(work_full + 8 * work_slot);
                if (!rows) return;

                const auto load_k = [&](int row, uint32_t count) {
                    const uint32_t slot = count % kPlan.k_stages, barrier = k_full + 8 * slot;
                    mbarrier_wait(k_empty + 8 * slot, count / kPlan.k_stages % 2 ^ 1);
                    mbarrier_arrive_expect_tx(barrier, kTileBytes);
                    load(map_k, schedule.k_loads, smem_k + slot * kTileBytes, kBlockN, barrier, row, head_k, batch, kEvictLast);
                };
                const auto load_v = [&](int row, uint32_t count) {
                    const uint32_t slot = count % kPlan.v_stages, barrier = v_full + 8 * slot;
                    mbarrier_wait(v_empty + 8 * slot, count / kPlan.v_stages % 2 ^ 1);
                    mbarrier_arrive_expect_tx(barrier, kTileBytes);
                    load(map_v, schedule.v_loads, smem_v + slot * kTileBytes, kBlockN, barrier, row, head_k, batch, kEvictLast);
                };
                int row = w.k_row + w.last_tile * kBlockN;
                load_k(row, tile);  // does not wait for the Q buffer
                mbarrier_wait(q_empty, item % 2 ^ 1);
                ++item;
                mbarrier_arrive_expect_tx(q_full, kWarpgroups * kSlabBytes);
                for (int g = 0, row_q = w.q_row + w.row0; g < kWarpgroups; ++g)
                    load(map_q, schedule.q_loads, smem_q + g * kSlabBytes, 64, q_full, row_q + g * 64, w.head, batch, kEvictFirst);
                for (const int last = w.k_row + w.first_tile * kBlockN; row > last; row -= kBlockN, ++tile)
                    load_v(row, tile), load_k(row - kBlockN, tile + 1);
                load_v(row, tile++);
            }
            if (schedule.order == WorkOrder::kCounter) index = gridDim.x + atomicAdd(schedule.counter, 1);
            else index += gridDim.x;
        }
    }

    // ------------------------------------------------------------------------------------------------ consumers
    setmaxnreg_inc<kPlan.consumer_registers()>();
    constexpr float kLn2 = 0.6931471805599453f;
    constexpr float kOffset = 6.0f, kRise = 2.75f;                 // 2^8.75 = 431
    constexpr float kEvenShare = 0.5f, kOddShare = 0.5f / 1.375f;  // of the sums over kEvenRow and kOddRow in the sum of P
    constexpr int kCarry = kFp8Promotion / kBlockN;
    const int wg = warpgroup - 1, warp = threadIdx.x % 128 / 32, g = lane / 4, quad = lane % 4;
    Ring k, v, work;  // v: the ring of V^T
    uint32_t q_phase = 0;
    constexpr bool kShared = kPlan.sum == Fp8Sum::kShared, kInPieces = kPlan.sum == Fp8Sum::kPieces;
    constexpr int kPiece = kInPieces ? 64 : kD < 128 ? kD : 128, kPieces = kD / kPiece;  // head dims of one product
    constexpr int kRegisters = kVtRows<kId> / 2;
    float s[kBlockN / 2];                             // row g + 8 r of the warp's 16: elements with i / 2 % 2 = r
    float o[kRegisters];                              // likewise; the last four are the sums of P
    float sum[2];                                     // of P, in float
    float part[2][kInPieces ? kPiece / 2 + 4 : 1];    // P V on its way to O
    float m[2], l[2], alpha[2];                       // see the header; l: this thread's share of the row sum; alpha: what O is off by
    int carried;                                      // tiles in the sums that o holds; kInPieces: 0
    bool stored;                                      // smem.o has something
    uint32_t prob[kBlockN / 8];                       // P as A operand
    uint32_t q_fragment[kQInRegisters ? kD / 8 : 1];  // Q as A operand
    const uint32_t slab = smem_q + wg * kSlabBytes;
    const uint64_t desc_q = wgmma_descriptor(slab, 16), desc_k = wgmma_descriptor(smem_k, 16), desc_v = wgmma_descriptor(smem_vt, 16);

    const auto take_turn = [&] {
        if (kPingPong) bar_sync(kTurn + wg, 256);
    };
    const auto give_turn = [&] {
        if (kPingPong) bar_arrive(kTurn + (wg + 1) % kWarpgroups, 256);
    };
    const auto release = [&](uint32_t empty, Ring& ring, int stages) {
        if (arrives(lane)) mbarrier_arrive(empty + 8 * ring.slot);
        ring.next(stages);
    };
    if (wg == kWarpgroups - 1) give_turn();  // the first turn is warpgroup 0's

    for (;;) {
        mbarrier_wait(work_full + 8 * work.slot, work.phase);
        const Fp8Work& w = smem.work[work.slot];
        if (!w.valid) return;
        int n = w.last_tile;
        const float c = w.scale_log2 == 0.0f ? 0x1p-126f : w.scale_log2;  // hidden scores are -inf, and 0 x inf is NaN
        // Tiles from right_tile on need the right edge masked.
        const int right_tile = clamp_to(w.row0 + wg * 64 + w.right + 1, 0, w.seqlen_k) / kBlockN;

        const auto gemm_qk = [&] {  // S = Q K^T
            const uint64_t desc = desc_k + k.slot * descriptor_step(kTileBytes);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kD / 32; ++i) {
                if constexpr (kQInRegisters) wgmma_fp8_rs<kBlockN>(s, q_fragment + 4 * i, desc + descriptor_k_step(i, kBlockN), i != 0);
                else wgmma_fp8_ss<kBlockN>(s, desc_q + descriptor_k_step(i, 64), desc + descriptor_k_step(i, kBlockN), i != 0);
            }
            wgmma_commit();
        };
        float4* const mine = smem.o[wg][0] + threadIdx.x % 128;
        const auto add_stored = [&] {
            if (!stored) return;
#pragma unroll
            for (int i = 0; i < kD / 8; ++i) {
                const float4 x = mine[i * 128];
                o[4 * i] += x.x, o[4 * i + 1] += x.y, o[4 * i + 2] += x.z, o[4 * i + 3] += x.w;
            }
        };
        const auto add_sums = [&] {
#pragma unroll
            for (int r = 0; r < 2; ++r) sum[r] += kEvenShare * o[kD / 2 + 2 * r] + kOddShare * o[kD / 2 + 2 * r + 1];
        };
        const auto promote = [&] {  // with fast_accum the sums of P alone
            add_sums();
            if (kShared && !p.fast_accum) {
                add_stored();
#pragma unroll
                for (int i = 0; i < kD / 8; ++i) mine[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
                stored = true, carried = 0;
            } else {
#pragma unroll
                for (int i = kD / 2; i < kRegisters; ++i) o[i] = 0.0f;
                carried = 1;
            }
        };
        // Head dims kPiece * piece and following of P V, the last piece with the sums of P, on top of the tiles carried.
        const auto gemm_piece = [&](int piece) {
            const uint64_t desc = desc_v + v.slot * descriptor_step(kVtBytes) + descriptor_step(piece * kPiece * kChunkRowBytes);
            float* d = kInPieces ? part[piece % 2] : o + piece * kPiece / 2;
#pragma unroll
            for (int i = 0; i < kBlockN / 32; ++i) {
                const uint64_t keys = desc + descriptor_k_step(i, kVtRows<kId>);
                if (piece == kPieces - 1) wgmma_fp8_rs<kPiece + 8>(d, prob + 4 * i, keys, i != 0 ? 1 : carried);
                else wgmma_fp8_rs<kPiece>(d, prob + 4 * i, keys, i != 0 ? 1 : carried);
            }
        };
        const auto gemm_pv = [&] {
            wgmma_fence();
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) gemm_piece(piece);
            wgmma_commit();
        };
        const auto add_piece = [&](int piece) {
#pragma unroll
            for (int i = 0; i < (piece == kPieces - 1 ? kPiece / 2 + 4 : kPiece / 2); ++i) o[piece * kPiece / 2 + i] += part[piece % 2][i];
        };
        const auto multiply_pv_in_pieces = [&] {  // all but the last, which is still to be added, are in O then
            wgmma_fence();
            gemm_piece(0);
            wgmma_commit();
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                if (piece + 1 < kPieces) {
                    wgmma_fence();
                    gemm_piece(piece + 1);
                    wgmma_commit();
                    wgmma_wait<1>(part[piece % 2]);
                    add_piece(piece);
                } else wgmma_wait<0>(part[piece % 2]);
            }
        };
        const auto mask = [&] {
            if (n < right_tile) return;
            const int ln = opaque(lane), row = w.row0 + wg * 64 + warp * 16 + ln / 4, key = n * kBlockN + ln % 4 * 2;
            mask_right(s, min(row + w.right, w.seqlen_k - 1) - key, min(row + 8 + w.right, w.seqlen_k - 1) - key);
        };
        // Online softmax of the scores in s: S becomes P, l grows; returns whether O must be multiplied by alpha.
        const auto softmax = [&](bool first) -> bool {
            float tile_max[2], share[2];
            bool moved = false;
            fragment_max(s, tile_max);
#pragma unroll
            for (int r = 0; r < 2; ++r) tile_max[r] = fmaf(tile_max[r], c, -kOffset);
            if (first) {
                m[0] = tile_max[0], m[1] = tile_max[1], l[0] = l[1] = 0.0f;
            } else {
                moved = raise_max(tile_max, kRise, m, l, alpha);
            }
            exponentials(s, c, m, share);
            if constexpr (kLse) l[0] += share[0], l[1] += share[1];  // l is 0 otherwise; leaving it out altogether makes ptxas spill
            return moved;
        };
        const auto rescale_o = [&] {
            sum[0] *= alpha[0], sum[1] *= alpha[1];
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) o[i] *= alpha[i / 2 % 2];
            if constexpr (kShared) {
#pragma unroll 4
                for (int i = 0; i < (stored ? kD / 8 : 0); ++i) {
                    const float4 x = mine[i * 128];
                    mine[i * 128] = make_float4(x.x * alpha[0], x.y * alpha[0], x.z * alpha[1], x.w * alpha[1]);
                }
            }
        };
        const auto convert_p = [&] {
#pragma unroll
            for (int i = 0; i < kBlockN / 32; ++i) pack_p(s, i, reinterpret_cast<uint32_t(&)[4]>(prob[4 * i]));
        };

        if constexpr (kInPieces) {
#pragma unroll
            for (int i = 0; i < kRegisters; ++i) o[i] = 0.0f;
        }
        sum[0] = sum[1] = 0.0f;
        carried = 0, stored = false;
        mbarrier_wait(q_full, q_phase);
        q_phase ^= 1;
        if constexpr (kQInRegisters) {
#pragma unroll
            for (int i = 0; i < kD / 32; ++i)
                ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(q_fragment[4 * i]),
                            slab + swizzled_offset(64, warp * 16 + lane % 16, 2 * i + lane / 16));
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(q_empty);
        }

        mbarrier_wait(k_full + 8 * k.slot, k.phase);
        gemm_qk();
        wgmma_wait<0>(s);
        release(k_empty, k, kPlan.k_stages);
        mask();
        softmax(true);
        convert_p();
        const int first_tile = w.first_tile;
#pragma unroll 1
        for (--n; n >= first_tile; --n) {
            mbarrier_wait(k_full + 8 * k.slot, k.phase);
            if constexpr (kInPieces) {
                mbarrier_wait(vt_full + 8 * v.slot, v.phase);
                multiply_pv_in_pieces();
                gemm_qk();
                release(vt_empty, v, kPlan.v_stages);
                add_piece(kPieces - 1);
                wgmma_wait<0>(s);
            } else {
                take_turn();
                gemm_qk();  // S(n)
                mbarrier_wait(vt_full + 8 * v.slot, v.phase);
                gemm_pv();  // P(n + 1) V(n + 1)
                give_turn();
                wgmma_wait<1>(s);
            }
            release(k_empty, k, kPlan.k_stages);
            mask();
            const bool moved = softmax(false);
            if constexpr (!kInPieces) {
                wgmma_wait<0>(o);
                release(vt_empty, v, kPlan.v_stages);
                ++carried;
                if (carried == kCarry) promote();
            }
            convert_p();  // not before the wait: P(n + 1) was still being read
            if (moved) rescale_o();
        }
        if (!kQInRegisters && arrives(lane)) mbarrier_arrive(q_empty);  // the next Q arrives during the last product and the epilogue
        mbarrier_wait(vt_full + 8 * v.slot, v.phase);
        if constexpr (kInPieces) multiply_pv_in_pieces();
        else {
            gemm_pv();
            wgmma_wait<0>(o);
        }
        release(vt_empty, v, kPlan.v_stages);
        if constexpr (kInPieces) add_piece(kPieces - 1);
        if constexpr (kShared) add_stored();
        add_sums();

        // ---- out = O / l, lse = ln(l) + m ----
        const int row = w.row0 + wg * 64 + warp * 16 + g;
        const int64_t lse_row =
            (int64_t(p.cu_seqlens_q ? 0 : w.batch) * p.nheads + w.head) * (p.cu_seqlens_q ? p.total_q : p.seqlen_q) + w.q_row;
        uint16_t* out =
            static_cast<uint16_t*>(p.out.data) + (p.cu_seqlens_q ? 0 : w.batch * p.out.batch) + w.q_row * p.out.row + w.head * p.out.head;
        const bool half = p.out_dtype == DType::kFloat16;
        const auto pack = [&](float low, float high) { return half ? pack_16<__half>(low, high) : pack_16<__nv_bfloat16>(low, high); };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + 8 * r;
            if (p.lse) {
                l[r] = quad_sum(l[r]);
                const bool empty = l[r] == 0.0f;  // no visible key
                if (quad == 0 && i < w.seqlen_q) p.lse[lse_row + i] = empty ? -INFINITY : m[r] * kLn2 + __logf(l[r]);
            }
            const float inverse = sum[r] == 0.0f ? 0.0f : w.v_descale / sum[r];
            // Of the sixteen head dims of column groups 2 j and 2 j + 1 the lane has 4 quad .. 4 quad + 3. Even lanes complete theirs to
            // eight with their neighbour's of the same sixteen, odd lanes those of the next sixteen.
            uint16_t* out_row = out + i * p.out.row;
            const bool odd = quad & 1;
#pragma unroll
            for (int j = 0; j < kD / 16; j += 2) {
                const float* x = o + 8 * j + 2 * r;
                const uint32_t a0 = pack(x[0] * inverse, x[4] * inverse), a1 = pack(x[1] * inverse, x[5] * inverse);
                const uint32_t b0 = pack(x[8] * inverse, x[12] * inverse), b1 = pack(x[9] * inverse, x[13] * inverse);
                const uint32_t got0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), got1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
                const int column = 16 * (j + odd) + 4 * (quad & 2);
                if (i < w.seqlen_q && column < p.headdim_v)
                    *reinterpret_cast<uint4*>(out_row + column) = odd ? make_uint4(got0, got1, b0, b1) : make_uint4(a0, a1, got0, got1);
            }
        }
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(work_empty + 8 * work.slot);
        work.next(Smem::kWorkSlots);
    }
}

template <Fp8PlanId kId, bool kLse>
cudaError_t launch_fp8(const AttentionParams& p, int device, int multiprocessors, cudaStream_t stream) {
    constexpr Fp8Plan kPlan = fp8_plan(kId);
    constexpr int kBytes = sizeof(Fp8Smem<kId>);
    const int64_t items = wgmma_items(p, kPlan.block_m());
    if (items == 0) return cudaSuccess;
    const bool varlen = p.cu_seqlens_q;

    WgmmaSchedule schedule{};
    schedule.items = int(items);
    schedule.m_blocks = (p.seqlen_q + kPlan.block_m() - 1) / kPlan.block_m();
    schedule.section_heads = int(wgmma_section_heads(p));
    schedule.longest_first = p.window_right >= 0;
    const int blocks = int(items < multiprocessors ? items : multiprocessors);
    schedule.order = wgmma_order(p, items, blocks);

    CUtensorMap map_q, map_k, map_v;
    // Pairs of bytes, half as many, are what these maps describe.
    const auto encode = [&](const char* name, const TensorView& x, int columns, int64_t rows, int heads, int box_rows, CUtensorMap* map,
                            int* loads) {
        return encode_tiles(
            {name, x.data, true, columns / 2, rows, heads, varlen ? 1 : p.batch, x.row, x.head, x.batch, box_rows, kPlan.columns() / 2},
            map, loads);
    };
    const int64_t rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
    if (cudaError_t error = encode("q", p.q, p.headdim, rows_q, p.nheads, 64, &map_q, &schedule.q_loads)) return error;
    // Without keys every one that is loaded is hidden: any memory will do.
    const bool keys = rows_k > 0;
    if (cudaError_t error = encode("k", keys ? p.k : p.q, p.headdim, keys ? rows_k : rows_q, keys ? p.nheads_k : p.nheads, kPlan.block_n,
                                   &map_k, &schedule.k_loads))
        return error;
    if (cudaError_t error = encode("v", keys ? p.v : p.q, keys ? p.headdim_v : p.headdim, keys ? rows_k : rows_q,
                                   keys ? p.nheads_k : p.nheads, kPlan.block_n, &map_v, &schedule.v_loads))
        return error;

    const void* kernel = reinterpret_cast<const void*>(forward_fp8_kernel<kId, kLse>);
    static std::atomic<uint64_t> opted_in{0};  // devices on which this kernel may use its shared memory: asking again would be harmless
    if (!(opted_in.load(std::memory_order_relaxed) >> device & 1)) {
        if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
            return cudaGetLastError(), error;
        opted_in.fetch_or(uint64_t(1) << device, std::memory_order_relaxed);
    }
    if (schedule.order == WorkOrder::kCounter) {
        schedule.counter = static_cast<int*>(align_up(p.workspace, sizeof(int)));
        if (cudaError_t error = cudaMemsetAsync(schedule.counter, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    }
    void* arguments[] = {&map_q, &map_k, &map_v, const_cast<AttentionParams*>(&p), &schedule};
    const cudaError_t error =
        cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(128 * (kPlan.warpgroups + 1)), arguments, kBytes, stream);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

}  // namespace fa
