// forward_wgmma_sm90.cuh: attention at Hopper's speed.   out = softmax(q k^T * softmax_scale + ...) v,   fp16 and bf16.
//
// New against forward_mma_sm80.cu: whole tiles arrive by TMA while others are computed on, wgmma reads them straight from
// swizzled shared memory, and the warps have roles. A block stays on its multiprocessor and takes one work item (64 query rows per
// consumer warpgroup, of one head) after another:
//
//     producer, one thread     work items -> work ring;  Q -> q;  K, V tiles -> rings k, v     last keys first, K one tile ahead of V
//                                  |                     |         |
//                              work_full/empty      q_full/empty   k_full/empty, v_full/empty  an mbarrier pair guards each buffer
//                                  |                     |         |
//     consumer warpgroups      S(n) = Q K(n)^T     and while the tensor cores are busy with it and with
//     64 rows each             O += P(n+1) V(n+1), both in one turn of the ping-pong, the other warpgroup has the exponentials:
//                              softmax(n) -> P(n), O *= alpha when the maximum rose
//                              after the last tile O / l -> out, 16 bytes a thread; lse; with Q in registers under the next item's first S
//
//     full:  arrives when the copy has landed      empty: one arrival per consumer warp once its wgmmas have read the buffer
//
// P goes from accumulators to the A operand in registers: the two layouts agree, a pack is all it takes. The running maximum is lazy or
// speculative (tiles.h): exp2(c S - m) is as good with any m as long as nothing overflows, so the common tile computes no maximum.
//
// Long sequences are bound by the energy of the tensor cores and of K and V from L2, at the card's power limit; short ones by what an item
// costs before its first and after its last product.
//
// V rows that no query of the sequence may see (the next sequence of a varlen call, keys cut off by a mask) have P = 0, but 0 x NaN
// is NaN: where a tile can hold such rows they are zeroed in shared memory before the product.
#pragma once

#include <atomic>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "attention/forward_wgmma_sm90_pages.cuh"
#include "attention/forward_wgmma_sm90_work.cuh"
#include "attention/general_scores.cuh"
#include "attention/kernels.h"
#include "attention/params.h"
#include "attention/tiles.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"

namespace fa {

// ---- a thread's fragment of S: element i is row g + 8 (i / 2 % 2), key 8 (i / 4) + 2 quad + i % 2 ----

// Hides keys above `last0` (rows g) and `last1` (rows g + 8), counted from the thread's element 0.
template <int kCount>
__device__ __forceinline__ void mask_right(float (&S)[kCount], int last0, int last1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 > (i / 2 % 2 ? last1 : last0)) S[i] = -INFINITY;
}
template <int kCount>
__device__ __forceinline__ void mask_left(float (&S)[kCount], int first0, int first1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
        if (i / 4 * 8 + i % 2 < (i / 2 % 2 ? first1 : first0)) S[i] = -INFINITY;
}

template <int kCount>
__device__ __forceinline__ void fragment_max(const float (&S)[kCount], float (&row_max)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float a = S[2 * r], b = S[2 * r + 1];  // two chains
#pragma unroll
        for (int i = 4; i < kCount; i += 4) a = fmaxf(a, S[i + 2 * r]), b = fmaxf(b, S[i + 2 * r + 1]);
        row_max[r] = quad_max(fmaxf(a, b));
    }
}

// Where a row's maximum has risen by more than `rise`, or that of another row of the warp, m follows, l is counted in the new unit, and
// alpha is what O must be multiplied by: returns true. Else P is at most 2^rise.
__device__ __forceinline__ bool raise_max(const float (&tile_max)[2], float rise, float (&m)[2], float (&l)[2], float (&alpha)[2]) {
    const bool moved = __any_sync(~0u, tile_max[0] - m[0] > rise || tile_max[1] - m[1] > rise);
    if (moved) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = fmaxf(m[r], tile_max[r]);
            alpha[r] = raised == -INFINITY ? 1.0f : exp2_approx(m[r] - raised);
            m[r] = raised, l[r] *= alpha[r];
        }
    }
    return moved;
}

// S becomes P = 2^(c S - m); sum is the thread's share of the rows' sums. A row that has seen nothing subtracts 0 instead of -inf.
// The sums take P before it is rounded: rounding first would give a row that one key decides exactly that key's V under a speculative
// maximum too, and costs 3 .. 14 %.
template <int kCount>
__device__ __forceinline__ void exponentials(float (&S)[kCount], float c, const float (&m)[2], float (&sum)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float base = m[r] == -INFINITY ? 0.0f : m[r];
        float a = 0.0f, b = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < kCount; i += 4) {
            S[i] = exp2_approx(fmaf(S[i], c, -base));
            S[i + 1] = exp2_approx(fmaf(S[i + 1], c, -base));
            a += S[i], b += S[i + 1];
        }
        sum[r] = a + b;
    }
}

// kBoxes: K and V in boxes of schedule.page_boxes rows. A kernel of its own: in one with the others its code moves theirs.
template <typename T, WgmmaPlanId kId, bool kBoxes>
__global__ void __launch_bounds__(128 * (wgmma_plan(kId).warpgroups + 1), 1)
    forward_wgmma_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                         const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                         const __grid_constant__ WgmmaSchedule schedule) {
    constexpr WgmmaPlan kPlan = wgmma_plan(kId);
    constexpr int kD = kPlan.headdim, kDV = kPlan.headdim_v, kBlockM = kPlan.block_m(), kBlockN = kPlan.block_n, kStages = kPlan.stages;
    constexpr int kWarpgroups = kPlan.warpgroups, kVPieces = kBlockN * kPlan.columns_v() / 8;
    constexpr bool kPages = kPlan.pages();
    constexpr bool kGeneral = kPlan.general, kPingPong = kPlan.ping_pong, kQInRegisters = kPlan.q_in_registers,
                   kEarlyPack = kPlan.early_pack;
    constexpr uint32_t kSlabBytes = 64 * kPlan.columns() * 2, kKBytes = kBlockN * kPlan.columns() * 2,
                       kVBytes = kBlockN * kPlan.columns_v() * 2;
    static_assert(kBlockN % 16 == 0 && kD % 32 == 0 && kDV % 32 == 0, "whole steps of 16 and whole quads of column groups");
    using Smem = WgmmaSmem<T, kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");

    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const uint32_t q_full = shared_address(&smem.q_full), q_empty = shared_address(&smem.q_empty);
    const uint32_t k_full = shared_address(smem.k_full), k_empty = shared_address(smem.k_empty);
    const uint32_t v_full = shared_address(smem.v_full), v_empty = shared_address(smem.v_empty);
    const uint32_t work_full = shared_address(smem.work_full), work_empty = shared_address(smem.work_empty);
    const uint32_t smem_q = shared_address(smem.q), smem_k = shared_address(smem.k), smem_v = shared_address(smem.v);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        constexpr int kConsumerWarps = 4 * kWarpgroups;
        mbarrier_init(q_full, 1), mbarrier_init(q_empty, kConsumerWarps * kWarpArrivals);
        for (int i = 0; i < kStages; ++i) {
            const int arrivals = schedule.page_copies ? 4 * kWarpArrivals : 1;
            mbarrier_init(k_full + 8 * i, arrivals), mbarrier_init(k_empty + 8 * i, kConsumerWarps * kWarpArrivals);
            mbarrier_init(v_full + 8 * i, arrivals), mbarrier_init(v_empty + 8 * i, kConsumerWarps * kWarpArrivals);
        }
        for (int i = 0; i < Smem::kWorkSlots; ++i)
            mbarrier_init(work_full + 8 * i, 1), mbarrier_init(work_empty + 8 * i, kConsumerWarps * kWarpArrivals);
        fence_mbarrier_init();
    }
    if constexpr (kGeneral)
        if (threadIdx.x < kBlockN) smem.seen[0][threadIdx.x] = smem.seen[1][threadIdx.x] = 0;
    __syncthreads();

    // ------------------------------------------------------------------------------------------------ producer
    if (warpgroup == 0) {
        setmaxnreg_dec<kWarpgroups == 2 ? 40 : 32>();
        if constexpr (kBoxes) {
            produce_boxes(map_q, map_k, map_v, p, schedule, smem);
            return;
        }
        if constexpr (kPages)
            if (schedule.page_copies) {
                produce_from_pages(map_q, p, schedule, smem);
                return;
            }
        if (threadIdx.x != 0) return;
        Ring ring, work;  // the K and V rings stand at the same slot between items
        uint32_t q_phase = 0;
        // One tile: `rows` rows from `row` on, to `tile`, in as many boxes as the map needs.
        const auto load = [&](const CUtensorMap& map, int loads, uint32_t tile, uint32_t rows, uint32_t barrier, int row, int head,
                              int batch, auto... policy) {
#pragma unroll 1
            for (int c = 0; c < loads; ++c)
                tma_load(tile + c * rows * kChunkRowBytes, &map, barrier, c * kChunkColumns, row, 0, head, batch, policy...);
        };
        for (int index = blockIdx.x;;) {
            WgmmaWork& w = smem.work[work.slot];
            mbarrier_wait(work_empty + 8 * work.slot, work.phase ^ 1);
            const bool rows = find_work<kBlockM, kBlockN>(p, schedule, index, w);
            if (rows || !w.valid) {
                mbarrier_arrive(work_full + 8 * work.slot);
                work.next(Smem::kWorkSlots);
                if (!rows) return;

                Ring k = ring, v = ring;
                const int head = w.head, head_k = head / p.group, batch = p.cu_seqlens_q ? 0 : w.batch;
                int row, entry = p.cache.entries ? cache_entry(p.cache, batch) : batch;  // where a tile lies in the tensor
                const auto find = [&](int key) {
                    row = key;
                    if constexpr (kPages)
                        if (p.cache.block_table) {  // of a multiple of kBlockN rows; a page that the sequence lacks arrives as zeros
                            const int page = key / p.cache.page_size;
                            entry = key < w.seqlen_k ? cache_page(p.cache, w.batch, page) : p.cache.entries;
                            row -= page * p.cache.page_size;
                        }
                };
                const auto load_k = [&] {
                    mbarrier_wait(k_empty + 8 * k.slot, k.phase ^ 1);
                    mbarrier_arrive_expect_tx(k_full + 8 * k.slot, kKBytes);
                    load(map_k, schedule.k_loads, smem_k + k.slot * kKBytes, kBlockN, k_full + 8 * k.slot, row, head_k, entry);
                    k.next(kStages);
                };
                const auto load_v = [&](int row, int entry) {
                    mbarrier_wait(v_empty + 8 * v.slot, v.phase ^ 1);
                    mbarrier_arrive_expect_tx(v_full + 8 * v.slot, kVBytes);
                    load(map_v, schedule.v_loads, smem_v + v.slot * kVBytes, kBlockN, v_full + 8 * v.slot, row, head_k, entry);
                    v.next(kStages);
                };
                int key = w.k_row + w.last_tile * kBlockN;
                find(key);
                load_k();  // does not wait for the Q buffer
                mbarrier_wait(q_empty, q_phase ^ 1);
                q_phase ^= 1;
                mbarrier_arrive_expect_tx(q_full, kWarpgroups * kSlabBytes);
                for (int g = 0, row_q = w.q_row + w.row0; g < kWarpgroups; ++g)
                    load(map_q, schedule.q_loads, smem_q + g * kSlabBytes, 64, q_full, row_q + g * 64, head, batch, kEvictFirst);
                for (const int last = w.k_row + w.first_tile * kBlockN; key > last;) {
                    const int row_v = row, entry_v = entry;
                    find(key -= kBlockN);
                    load_k();
                    load_v(row_v, entry_v);
                }
                load_v(row, entry);
                ring = v;
            }
            if (schedule.order == WorkOrder::kCounter) index = gridDim.x + atomicAdd(schedule.counter, 1);
            else index += gridDim.x;
        }
    }

    // ------------------------------------------------------------------------------------------------ consumers
    setmaxnreg_inc<kWarpgroups == 2 ? 232 : 160>();
    constexpr bool kSpeculative = kPlan.maximum != RowMaximum::kLazy, kExactMasked = kPlan.maximum == RowMaximum::kSpeculativeUnmasked;
    constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
    constexpr float kRise = 8.0f;                                            // P stays below 2^8: safe in fp16 too
    constexpr float kLimit = std::is_same_v<T, __half> ? 0x1p15f : 0x1p60f;  // P below 65504 in fp16; O and l far from 2^127 in fp32
    const int wg = warpgroup - 1, warp = threadIdx.x % 128 / 32, g = lane / 4, quad = lane % 4;
    const float c = kGeneral && wgmma_scores_are_natural(p) ? kLog2E : p.scale * kLog2E;
    const bool hides_keys = kGeneral && (p.bias.data || p.mask.data);
    Ring k, v, work;
    uint32_t q_phase = 0;
    int seen_slot = 0;
    float s[kBlockN / 2], o[kDV / 2];                 // row g + 8 r of the warp's 16: elements with i / 2 % 2 = r
    float m[2], l[2], alpha[2];                       // row maximum (of c S), this thread's share of the row sum, what O is off by
    uint32_t prob[kBlockN / 4];                       // P as A operand
    uint32_t q_fragment[kQInRegisters ? kD / 4 : 1];  // Q as A operand
    const uint32_t slab = smem_q + wg * kSlabBytes;
    const uint64_t desc_q = wgmma_descriptor(slab, 16), desc_k = wgmma_descriptor(smem_k, 16),
                   desc_v = wgmma_descriptor(smem_v, kBlockN * kChunkRowBytes);

    const auto take_turn = [&] {
        if (kPingPong) bar_sync(kTurn + wg, 256);
    };
    const auto give_turn = [&] {
        if (kPingPong) bar_arrive(kTurn + (wg + 1) % kWarpgroups, 256);
    };
    const auto release = [&](uint32_t empty, Ring& ring) {
        if (arrives(lane)) mbarrier_arrive(empty + 8 * ring.slot);
        ring.next(kStages);
    };
    if (wg == kWarpgroups - 1) give_turn();  // the first turn is warpgroup 0's

    const auto gemm_qk = [&] {  // S = Q K^T
        const uint64_t desc = desc_k + k.slot * descriptor_step(kKBytes);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kD / 16; ++i) {
            if constexpr (kQInRegisters) wgmma_rs<T, kBlockN, 0>(s, q_fragment + 4 * i, desc + descriptor_k_step(i, kBlockN), i != 0);
            else wgmma_ss<T, kBlockN>(s, desc_q + descriptor_k_step(i, 64), desc + descriptor_k_step(i, kBlockN), i != 0);
        }
        wgmma_commit();
    };
    // S of the item's last tile, which comes first.
    const auto first_product = [&] {
        mbarrier_wait(q_full, q_phase);
        q_phase ^= 1;
        if constexpr (kQInRegisters) {
#pragma unroll
            for (int i = 0; i < kD / 16; ++i)
                ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(q_fragment[4 * i]),
                            slab + swizzled_offset(64, warp * 16 + lane % 16, 2 * i + lane / 16));
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(q_empty);
        }
        mbarrier_wait(k_full + 8 * k.slot, k.phase);
        gemm_qk();
    };
    // With Q in registers an item's first product is issued before the previous item's epilogue and runs under it.
    constexpr bool kAhead = kQInRegisters;
    const auto next_work = [&]() -> bool {
        mbarrier_wait(work_full + 8 * work.slot, work.phase);
        return smem.work[work.slot].valid;
    };
    if constexpr (kAhead) {
        if (!next_work()) return;
        first_product();
    }
    for (;;) {
        if (!kAhead && !next_work()) return;
        const int work_slot = work.slot;
        const WgmmaWork& w = smem.work[work_slot];
        const int first_tile = kGeneral ? w.first_tile : 0;
        int n = w.last_tile;
        // Tiles from right_tile on need the right edge masked, those before left_tile the left one.
        const int right_tile = clamp_to(w.row0 + wg * 64 + w.right + 1, 0, w.seqlen_k) / kBlockN;
        const int left_tile = kGeneral ? (clamp_to(w.row0 + wg * 64 + 63 + w.left, 0, w.seqlen_k) + kBlockN - 1) / kBlockN : 0;

        const auto gemm_pv = [&] {  // O += P V
            const uint64_t desc = desc_v + v.slot * descriptor_step(kVBytes);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kBlockN / 16; ++i) wgmma_rs<T, kDV, 1>(o, prob + 4 * i, desc + descriptor_row_step(i), 1);
            wgmma_commit();
        };
        // This warp's scores once more, with mma.sync: rare, and needs nobody else. The K tile is still there.
        const auto recompute_s = [&] {
            constexpr int kRecomputeUnroll = kQInRegisters ? kD / 32 : 1;  // Q's registers cannot be indexed at run time
            const int ln = opaque(lane), row = opaque(warp) * 16 + ln % 16;
            const uint32_t tile = smem_k + k.slot * kKBytes;
#pragma unroll
            for (int i = 0; i < kBlockN / 2; ++i) s[i] = 0.0f;
#pragma unroll(kRecomputeUnroll)
            for (int kk = 0; kk < kD / 32; ++kk) {
                uint32_t a[2][4], b[4];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if constexpr (kQInRegisters) {
#pragma unroll
                        for (int x = 0; x < 4; ++x) a[h][x] = q_fragment[4 * (2 * kk + h) + x];
                    } else {
                        ldmatrix_x4(a[h], slab + swizzled_offset(64, row, 2 * (2 * kk + h) + ln / 16));
                    }
                }
#pragma unroll
                for (int i = 0; i < kBlockN / 8; ++i) {
                    ldmatrix_x4(b, tile + swizzled_offset(kBlockN, 8 * i + ln % 8, 4 * kk + ln / 8));
                    float(&d)[4] = reinterpret_cast<float(&)[4]>(s[4 * i]);
                    mma<T>(d, a[0], b[0], b[1]);
                    mma<T>(d, a[1], b[2], b[3]);
                }
            }
        };
        // Rare paths read the item again and take the lane through opaque(): what they need is not carried through the loop.
        const auto mask = [&] {
            if (n < right_tile && (!kGeneral || n >= left_tile)) return;
            const int ln = opaque(lane), row = w.row0 + wg * 64 + warp * 16 + ln / 4, key = n * kBlockN + ln % 4 * 2;
            if (n >= right_tile) mask_right(s, min(row + w.right, w.seqlen_k - 1) - key, min(row + 8 + w.right, w.seqlen_k - 1) - key);
            if (kGeneral && n < left_tile) mask_left(s, row + w.left - key, row + 8 + w.left - key);
        };
        const auto place = [&] {
            const int ln = opaque(lane);
            return FragmentPlace{w.batch,    w.head,     w.row0 + wg * 64 + warp * 16 + ln / 4,   n * kBlockN + 2 * (ln % 4),
                                 w.seqlen_q, w.seqlen_k, p.top_left ? 0 : w.seqlen_k - w.seqlen_q};
        };
        const auto prepare_scores = [&] {
            if constexpr (kGeneral)
                if (wgmma_scores_are_natural(p)) transform_fragment<T>(p, place(), s);
            mask();
            if constexpr (kGeneral)
                if (hides_keys) {
                    const FragmentPlace at = place();
                    uint8_t* seen = smem.seen[seen_slot] + 2 * (opaque(lane) % 4);
#pragma unroll
                    for (int i = 0; i < kBlockN / 2; ++i)
                        if (s[i] != -INFINITY && at.row + i / 2 % 2 * 8 < at.seqlen_q) seen[i / 4 * 8 + i % 2] = 1;
                }
        };
        const auto convert_p = [&] {
#pragma unroll
            for (int i = 0; i < kBlockN / 4; ++i) prob[i] = pack_16<T>(s[2 * i], s[2 * i + 1]);
        };
        // Online softmax of the scores in s: S becomes P, l grows; returns whether O must be multiplied by alpha. With kEarlyPack prob
        // is P too, and O includes the product before.
        const auto softmax = [&](bool first) -> bool {
            float sum[2];
            if (kSpeculative && !first && (!kExactMasked || n < right_tile)) {
                if constexpr (kEarlyPack) wgmma_wait<0>(o);
                exponentials(s, c, m, sum);
                if constexpr (kEarlyPack) convert_p();
                // NaN, infinities and rows without a maximum fail the test.
                if (__all_sync(~0u, sum[0] < kLimit && sum[1] < kLimit && m[0] > -INFINITY && m[1] > -INFINITY)) {
                    l[0] += sum[0], l[1] += sum[1];
                    return false;
                }
                recompute_s();
                if (!kExactMasked) mask();
            }
            float tile_max[2];
            bool moved = false;
            fragment_max(s, tile_max);
            tile_max[0] *= c, tile_max[1] *= c;
            if (first) {
                m[0] = tile_max[0], m[1] = tile_max[1], l[0] = l[1] = 0.0f;
            } else {
                moved = raise_max(tile_max, kRise, m, l, alpha);
            }
            exponentials(s, c, m, sum);
            l[0] += sum[0], l[1] += sum[1];
            if constexpr (kGeneral)
                if (p.dropout_threshold) drop_fragment(p, place(), quad, s);
            if constexpr (kEarlyPack) {
                wgmma_wait<0>(o);
                convert_p();
            }
            return moved;
        };
        const auto rescale_o = [&] {
#pragma unroll
            for (int i = 0; i < kDV / 2; ++i) o[i] *= alpha[i / 2 % 2];
        };
        // Zeroes the rows of the V tile at hand for which hidden(row) holds. Every warpgroup may do it: they write the same zeros.
        const auto zero_v = [&](const auto& hidden) {
            uint4* tile = reinterpret_cast<uint4*>(smem.v[v.slot]);
            for (int i = opaque(threadIdx.x % 128); i < kVPieces; i += 128)
                if (hidden(i / 8 % kBlockN)) tile[i] = make_uint4(0, 0, 0, 0);
            fence_proxy_async();
        };
        // Keys outside those that the sequence's rows see between them; past the end of a dense tensor the copy engine wrote zeros, but in
        // a varlen call the next sequence follows, and in a cache whatever lies there.
        const auto zero_v_outside = [&](int tile) {
            const int begin = clamp_to(w.left, 0, w.seqlen_k), end = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
            const bool hidden_end = (tile + 1) * kBlockN > end && (p.cu_seqlens_q || p.cache.entries || end < w.seqlen_k);
            if (!hidden_end && tile * kBlockN >= begin) return;
            mbarrier_wait(v_full + 8 * v.slot, v.phase);
            zero_v([&](int j) { return tile * kBlockN + j < begin || tile * kBlockN + j >= end; });
            bar_sync(kWarpgroup + wg, 128);
        };
        // Keys that a boolean mask or a bias hides from every row of the block.
        const auto zero_v_unseen = [&] {
            if (!hides_keys) return;
            bar_sync(kConsumers, 128 * kWarpgroups);  // seen[] is complete
            zero_v([&](int j) { return !smem.seen[seen_slot][j]; });
            seen_slot ^= 1;
            if (threadIdx.x - 128 < kBlockN) smem.seen[seen_slot][threadIdx.x - 128] = 0;
            bar_sync(kConsumers, 128 * kWarpgroups);
        };

#pragma unroll
        for (int i = 0; i < kDV / 2; ++i) o[i] = 0.0f;
        if constexpr (!kAhead) first_product();
        wgmma_wait<0>(s);
        release(k_empty, k);
        prepare_scores();
        softmax(true);
        if constexpr (!kEarlyPack) convert_p();
        zero_v_outside(n);
#pragma unroll 1
        for (--n; n >= first_tile; --n) {
            mbarrier_wait(k_full + 8 * k.slot, k.phase);
            take_turn();
            gemm_qk();  // S(n)
            mbarrier_wait(v_full + 8 * v.slot, v.phase);
            if constexpr (kGeneral) zero_v_unseen();
            gemm_pv();  // O += P(n + 1) V(n + 1)
            give_turn();
            wgmma_wait<1>(s);
            if (!kSpeculative) release(k_empty, k);
            prepare_scores();
            const bool moved = softmax(false);
            if (kSpeculative) release(k_empty, k);
            if constexpr (!kEarlyPack) wgmma_wait<0>(o);
            release(v_empty, v);
            if constexpr (!kEarlyPack) convert_p();  // not before the wait: P(n + 1) was still being read
            if (moved) rescale_o();
        }
        if (!kQInRegisters && arrives(lane)) mbarrier_arrive(q_empty);  // the next Q arrives during the last product and the epilogue
        mbarrier_wait(v_full + 8 * v.slot, v.phase);
        if constexpr (kGeneral) {
            if (first_tile != w.last_tile) zero_v_outside(first_tile);
            zero_v_unseen();
        }
        gemm_pv();
        work.next(Smem::kWorkSlots);
        bool more = true;
        if constexpr (kAhead) {
            more = next_work();
            if (more) first_product();
            else gemm_qk();  // of what lies there, so that one path waits for one product more
            wgmma_wait<1>(o);
        } else {
            wgmma_wait<0>(o);
        }
        release(v_empty, v);

        // ---- out = O / l, lse = ln(l) + m ----
        const int row = w.row0 + wg * 64 + warp * 16 + g;
        const int64_t lse_row =
            (int64_t(p.cu_seqlens_q ? 0 : w.batch) * p.nheads + w.head) * (p.cu_seqlens_q ? p.total_q : p.seqlen_q) + w.q_row;
        T* out = static_cast<T*>(p.out.data) + (p.cu_seqlens_q ? 0 : w.batch * p.out.batch) + w.q_row * p.out.row + w.head * p.out.head;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + 8 * r;
            l[r] = quad_sum(l[r]);
            const bool empty = l[r] == 0.0f;  // no visible key: zero, whatever 0 x V came to
            float scale = 1.0f;
            if (p.sinks) {  // one more logit in the denominator
                const float sink = p.sinks[w.head] * kLog2E;
                if (sink != -INFINITY) {
                    const float raised = fmaxf(m[r], sink);
                    scale = exp2_approx(m[r] - raised);
                    l[r] = l[r] * scale + exp2_approx(sink - raised);
                    m[r] = raised;
                }
            }
            if (p.lse && quad == 0 && i < w.seqlen_q) p.lse[lse_row + i] = l[r] == 0.0f ? -INFINITY : m[r] * kLn2 + __logf(l[r]);
            const float inverse = empty ? 0.0f : scale * (kGeneral && p.dropout_threshold ? p.dropout_scale : 1.0f) / l[r];
            // The quad transposes its pairs, so that every lane owns 16 contiguous bytes: column group 4 x + quad.
            T* out_row = out + i * p.out.row;
#pragma unroll
            for (int x = 0; x < kDV / 32; ++x) {
                uint32_t pairs[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float* pair = o + 4 * (4 * x + j) + 2 * r;
                    pairs[j] = empty ? 0u : pack_16<T>(pair[0] * inverse, pair[1] * inverse);
                }
                transpose_quad(pairs, quad);
                const int column = 8 * (4 * x + quad);
                if (i < w.seqlen_q && column < p.headdim_v)
                    *reinterpret_cast<uint4*>(out_row + column) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(work_empty + 8 * work_slot);
        if (!more) {
            wgmma_wait<0>(s);
            return;
        }
    }
}

template <typename T, WgmmaPlanId kId>
cudaError_t launch_wgmma(const AttentionParams& p, int device, int multiprocessors, cudaStream_t stream) {
    constexpr WgmmaPlan kPlan = wgmma_plan(kId);
    constexpr int kBytes = sizeof(WgmmaSmem<T, kId>);
    const int64_t items = wgmma_items(p, kPlan.block_m());
    if (items == 0) return cudaSuccess;
    const bool varlen = p.cu_seqlens_q;

    WgmmaSchedule schedule{};
    schedule.items = int(items);
    schedule.m_blocks = (p.seqlen_q + kPlan.block_m() - 1) / kPlan.block_m();
    schedule.section_heads = int(wgmma_section_heads(p));
    if (p.window_right >= 0 && !varlen) wgmma_sections(p, schedule.m_blocks, multiprocessors, &schedule.leading, &schedule.leading_section);
    schedule.longest_first = p.window_right >= 0;
    const int blocks = int(items < multiprocessors ? items : multiprocessors);
    schedule.order = wgmma_order(p, items, blocks);

    CUtensorMap map_q, map_k, map_v;
    const bool paged = p.cache.block_table;
    const int common = paged ? std::gcd(p.cache.page_size, kPlan.block_n) : kPlan.block_n;  // rows that a tile and a page are made of
    if (paged && common % 8 == 0 && (common < kPlan.block_n || !kPlan.pages())) schedule.page_boxes = common;
    schedule.page_copies = common < kPlan.block_n && !schedule.page_boxes;
    const auto encode = [&](const char* name, const TensorView& x, int columns, int64_t batch, int64_t rows, int heads, int box_rows,
                            int padded, bool by_chunk, CUtensorMap* map, int* loads) {
        return encode_tiles({name, x.data, std::is_same_v<T, __half>, columns, rows, heads, batch, 2 * x.row, 2 * x.head, 2 * x.batch,
                             box_rows, padded, by_chunk},
                            map, loads);
    };
    const int64_t batch_q = varlen ? 1 : p.batch, batch_k = varlen ? 1 : p.cache.entries ? p.cache.entries : p.batch;
    const int64_t rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : paged ? p.cache.page_size : p.seqlen_k;
    const int box_rows = schedule.page_boxes ? schedule.page_boxes : kPlan.block_n;
    const bool boxes = schedule.page_boxes;
    if (cudaError_t error = encode("q", p.q, p.headdim, batch_q, rows_q, p.nheads, 64, kPlan.columns(), false, &map_q, &schedule.q_loads))
        return error;
    if (cudaError_t error =
            encode("k", p.k, p.headdim, batch_k, rows_k, p.nheads_k, box_rows, kPlan.columns(), boxes, &map_k, &schedule.k_loads))
        return error;
    if (cudaError_t error =
            encode("v", p.v, p.headdim_v, batch_k, rows_k, p.nheads_k, box_rows, kPlan.columns_v(), boxes, &map_v, &schedule.v_loads))
        return error;

    const void* kernel = reinterpret_cast<const void*>(forward_wgmma_kernel<T, kId, false>);
    if constexpr (kPlan.page_boxes())
        if (boxes) kernel = reinterpret_cast<const void*>(forward_wgmma_kernel<T, kId, true>);
    // Devices on which the two kernels may use their shared memory: asking again would be harmless.
    static std::atomic<uint64_t> opted_in[2]{};
    if (!(opted_in[boxes].load(std::memory_order_relaxed) >> device & 1)) {
        if (cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes))
            return cudaGetLastError(), error;
        opted_in[boxes].fetch_or(uint64_t(1) << device, std::memory_order_relaxed);
    }
    if (schedule.order == WorkOrder::kCounter) {
        schedule.counter = static_cast<int*>(align_up(p.workspace, alignof(int)));
        if (cudaError_t error = cudaMemsetAsync(schedule.counter, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    }
    void* arguments[] = {&map_q, &map_k, &map_v, const_cast<AttentionParams*>(&p), &schedule};
    const cudaError_t error =
        cudaLaunchKernel(kernel, dim3(unsigned(blocks)), dim3(128 * (kPlan.warpgroups + 1)), arguments, kBytes, stream);
    if (error != cudaSuccess) cudaGetLastError();
    return error;
}

template <WgmmaPlanId kId>
cudaError_t launch_wgmma(const AttentionParams& p, int device, int multiprocessors, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_wgmma<__half, kId>(p, device, multiprocessors, stream)
                                      : launch_wgmma<__nv_bfloat16, kId>(p, device, multiprocessors, stream);
}

}  // namespace fa
