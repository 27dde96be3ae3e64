// wgmma_sm90/kernel.cuh: attention at Hopper's speed.   out = softmax(q k^T * softmax_scale + ...) v,   fp16 and bf16.
//
// New against mma_sm80/kernel.cuh: TMA copies whole tiles while others are in use, wgmma reads them straight from swizzled shared memory,
// and warps have roles. A block stays on its multiprocessor and takes one work item after another. An item is 64 query rows of one head per
// consumer warpgroup.
//
//     producer, one thread     work items -> work ring;  Q -> q;  K, V tiles -> rings k, v     last keys first, K one tile ahead of V
//                                  |                     |         |
//                              work_full/empty      q_full/empty   k_full/empty, v_full/empty  an mbarrier pair guards each buffer
//                                  |                     |         |
//     consumer warpgroups      S(n) = Q K(n)^T  and  O += P(n+1) V(n+1)   in one turn of the ping-pong. While the tensor cores compute
//     64 rows each                                                        them, another warpgroup computes its exponentials
//                              softmax(n) -> P(n);  O *= o_scale when the maximum rose
//                              after the last tile  O / row_sum -> out, 16 bytes a thread; lse. With Q in registers this runs under the
//                              first S of the next item
//
//     full:  arrives when the copy has landed      empty: one arrival per consumer warp once its wgmmas have read the buffer
//
// P goes from accumulators to the A operand in registers: the two layouts agree, so packing to 16 bits is all it takes. The running maximum
// is lazy or speculative (wgmma_sm90/plan.h): 2^(S - m) is right for any m as long as nothing overflows, so most tiles compute no maximum.
//
// Long sequences are bound by energy: that of the tensor cores and of reading K and V from L2, at the card's power limit. Short ones are
// bound by the cost of an item before its first and after its last product.
//
// The parts: wgmma_sm90/plan.h: the shapes; work_list.h: the items; wgmma_sm90/block.cuh: shared memory and barriers;
// wgmma_sm90/produce.cuh: the copies; wgmma_sm90/consume.cuh: the steps of the loop below. Plans with options have loops of their own, of
// the producer in wgmma_sm90/key_tiles.cuh and of the consumers in wgmma_sm90/options.cuh. Some of them also have a bias (bias.cuh) or
// dropout (dropout.cuh); others have masks by intervals (intervals.cuh), or by blocks and of pairs (seen_blocks.cuh), in place of the
// options.
#pragma once

#include <numeric>
#include <type_traits>

#include "attention/common/bias_copy.cuh"
#include "attention/common/seen_blocks.cuh"
#include "attention/forward/wgmma_sm90/block.cuh"
#include "attention/forward/wgmma_sm90/consume.cuh"
#include "attention/forward/wgmma_sm90/key_tiles.cuh"
#include "attention/forward/wgmma_sm90/options.cuh"
#include "attention/forward/wgmma_sm90/plan.h"
#include "attention/forward/wgmma_sm90/produce.cuh"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"

namespace fa {

// How a consumer waits. n: the tile of keys that it waits for. The experiments put their own type in its place, which also records when
// (ladder/variants/trace.cu).
template <WgmmaPlanId kId>
struct ConsumerWaits {
    static constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static constexpr bool kAhead = kPlan.q_in_registers;  // an item's first S is multiplied under the end of the previous item
    using Stages = Ring<kPlan.stages>;
    using Scores = float[kPlan.block_n / 2];
    using Output = float[kPlan.headdim_v / 2];

    template <int kSlots>
    __device__ __forceinline__ void item(const Ring<kSlots>& work) {
        work.wait_full();
    }
    __device__ __forceinline__ void first_keys(const Stages& k, int /* n */) { k.wait_full(); }
    __device__ __forceinline__ void keys(const Stages& k, int /* n */) { k.wait_full(); }
    __device__ __forceinline__ void values(const Stages& v, int /* n */) { v.wait_full(); }
    __device__ __forceinline__ void turn(int wg, int /* n */) { take_turn<kPlan.ping_pong>(wg); }
    __device__ __forceinline__ void first_scores(Scores& S, int /* n */) { wgmma_wait<0>(S); }
    __device__ __forceinline__ void scores(Scores& S, int /* n */) { wgmma_wait<1>(S); }  // O += P V goes on
    __device__ __forceinline__ void product(Output& O, int /* n */) { wgmma_wait<0>(O); }
    __device__ __forceinline__ void last_product(Output& O, int /* n */) { wgmma_wait<kAhead ? 1 : 0>(O); }
};

template <typename T, WgmmaPlanId kId, typename Waits = ConsumerWaits<kId>>
__device__ __forceinline__ void consume(const AttentionParams& p, WgmmaSmem<T, kId>& smem, const Consumer& me, Waits wait = Waits()) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    constexpr int kBlockN = kPlan.block_n, kWarpgroups = kPlan.warpgroups;
    constexpr bool kGeneral = kPlan.general, kSpeculative = kPlan.speculative(), kEarlyPack = kPlan.early_pack;
    constexpr bool kExactMasked = kPlan.maximum == RowMaximum::kSpeculativeUnmasked;
    // With Q in registers, an item's first product is issued before the epilogue of the previous item and runs under it.
    constexpr bool kQInRegisters = kPlan.q_in_registers, kAhead = kQInRegisters;
    const uint64_t k_step = descriptor_step(sizeof smem.k[0]), v_step = descriptor_step(sizeof smem.v[0]);

    float S[kBlockN / 2], O[kPlan.headdim_v / 2];                // row g + 8 r of the warp's 16: elements with i / 2 % 2 = r
    uint32_t P[kBlockN / 4];                                     // as A operand
    uint32_t q_fragment[kQInRegisters ? kPlan.headdim / 4 : 1];  // as A operand
    RowStatistics rows;
    Ring<1> q(smem.q_full, smem.q_empty);
    Ring<kPlan.stages> k(smem.k_full, smem.k_empty), v(smem.v_full, smem.v_empty);
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    const uint32_t slab = shared_address(smem.q) + me.wg * sizeof smem.q[0];
    const uint64_t desc_q = wgmma_descriptor(slab, 16), desc_k = wgmma_descriptor(shared_address(smem.k), 16),
                   desc_v = wgmma_descriptor(shared_address(smem.v), kBlockN * kChunkRowBytes);
    const Exponent exponent = kGeneral && wgmma_scores_are_natural(p) ? exponent_of_natural() : exponent_of_products(p.scale * kLog2e);
    const bool hides_keys = kGeneral && (p.bias.data || p.mask.data);
    int seen_slot = 0;

    const auto next_work = [&]() -> bool {
        wait.item(work);
        return smem.work[work.slot].state != WorkState::kEnd;
    };
    const auto first_product = [&] {  // S of the item's last tile, which is computed first
        q.wait_full();
        if constexpr (kQInRegisters) {
            load_q_fragment(q_fragment, slab, me);
            __syncwarp();
            q.release(me.lane);
        }
        wait.first_keys(k, smem.work[work.slot].last_tile);
        multiply_qk<T, kId>(S, q_fragment, desc_q, desc_k + k.slot * k_step);
    };

    if (me.wg == kWarpgroups - 1) give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);  // the first turn is warpgroup 0's
    if constexpr (kAhead) {
        if (!next_work()) return;
        first_product();
    }
    for (;;) {
        if (!kAhead && !next_work()) return;
        const uint32_t work_slot = work.slot;
        const auto& w = smem.work[work_slot];
        const int first_tile = kGeneral || kPlan.pieces ? w.first_tile : 0;
        const MaskedTiles masked = masked_tiles<kId>(w, me.wg);
        int n = w.last_tile;

        // Applies options and masks to the scores of tile n.
        const auto prepare_scores = [&] {
            if constexpr (kGeneral)
                if (wgmma_scores_are_natural(p)) transform_fragment<T>(p, place_of<kId>(w, n, me), S);
            mask_scores<kId>(S, w, masked, n, me);
            if constexpr (kGeneral)
                if (hides_keys) mark_seen(S, place_of<kId>(w, n, me), smem.seen[seen_slot], me);
        };
        const auto drop = [&] {
            if constexpr (kGeneral)
                if (p.dropout_threshold) drop_fragment(p, place_of<kId>(w, n, me), me.quad(), S);
        };

#pragma unroll
        for (int i = 0; i < kPlan.headdim_v / 2; ++i) O[i] = 0.0f;
        if constexpr (!kAhead) first_product();
        wait.first_scores(S, n);
        k.release(me.lane);
        prepare_scores();
        softmax_first<kId>(S, exponent, rows);
        drop();
        pack_probabilities<T>(P, S);
        if constexpr (!kPlan.pieces) zero_values_outside<kBlockN>(p, w, n, smem.v, v, me.wg);
#pragma unroll 1
        for (--n; n >= first_tile; --n) {
            wait.keys(k, n);
            wait.turn(me.wg, n);
            multiply_qk<T, kId>(S, q_fragment, desc_q, desc_k + k.slot * k_step);  // S(n)
            wait.values(v, n + 1);
            if constexpr (kGeneral)
                if (hides_keys) zero_values_unseen<kBlockN, kWarpgroups>(smem.v[v.slot], smem.seen, seen_slot);
            if constexpr (kPlan.pieces)
                if (n + 1 >= masked.right_tile) zero_values_outside<kBlockN>(p, w, n + 1, smem.v, v, me.wg);
            multiply_pv<T>(O, P, desc_v + v.slot * v_step);  // O += P(n + 1) V(n + 1)
            give_turn<kPlan.ping_pong, kWarpgroups>(me.wg);
            wait.scores(S, n);
            if (!kSpeculative) k.release(me.lane);
            prepare_scores();
            bool done = false, moved = false;
            if (kSpeculative && (!kExactMasked || n < masked.right_tile)) {
                if constexpr (kEarlyPack) wait.product(O, n + 1);
                done = softmax_speculative<T, kId>(S, exponent, rows, [&] {
                    if constexpr (kEarlyPack) pack_probabilities<T>(P, S);
                });
                if (!done) {
                    recompute_scores<T, kId>(S, q_fragment, slab, shared_address(smem.k[k.slot]), me);
                    if (!kExactMasked) mask_scores<kId>(S, w, masked, n, me);
                }
            }
            if (!done) {
                moved = softmax_lazy<kId>(S, exponent, rows);
                drop();
                if constexpr (kEarlyPack) {
                    wait.product(O, n + 1);
                    pack_probabilities<T>(P, S);
                }
            }
            if (kSpeculative) k.release(me.lane);
            if constexpr (!kEarlyPack) wait.product(O, n + 1);
            v.release(me.lane);
            if constexpr (!kEarlyPack) pack_probabilities<T>(P, S);  // not before the wait: P(n + 1) was still being read
            if (moved) rescale_output(O, rows.o_scale);
        }
        if constexpr (!kQInRegisters) q.release(me.lane);  // the next Q arrives during the last product and the epilogue
        wait.values(v, first_tile);
        if constexpr (kPlan.pieces)
            if (first_tile >= masked.right_tile) zero_values_outside<kBlockN>(p, w, first_tile, smem.v, v, me.wg);
        if constexpr (kGeneral) {
            if (first_tile != w.last_tile) zero_values_outside<kBlockN>(p, w, first_tile, smem.v, v, me.wg);
            if (hides_keys) zero_values_unseen<kBlockN, kWarpgroups>(smem.v[v.slot], smem.seen, seen_slot);
        }
        multiply_pv<T>(O, P, desc_v + v.slot * v_step);
        work.next();
        bool more = true;
        if constexpr (kAhead) {
            more = next_work();
            if (more) first_product();
            else
                multiply_qk<T, kId>(S, q_fragment, desc_q,
                                    desc_k + k.slot * k_step);  // any K will do: both paths wait for one more product
        }
        wait.last_product(O, first_tile);
        v.release(me.lane);
        finish_rows<T, kId>(p, w, O, rows, me);
        if constexpr (kPlan.gives_max_score())
            if (p.max_score) raise_max_score<kId>(p, w, rows, me);
        __syncwarp();
        if (arrives(me.lane)) mbarrier_arrive(work.empty + 8 * work_slot);
        if (!more) {
            wgmma_wait<0>(S);
            return;
        }
    }
}

// How K and V are loaded. Page boxes are a kernel of their own: in one kernel with the other loaders, the compiler schedules those worse.
enum class KeyLoads {
    kTilesOrRows,  // as whole tiles, or row by row
    kPageBoxes     // in boxes of schedule.page_boxes rows
};

template <typename T, WgmmaPlanId kId, KeyLoads kLoads>
__global__ void __launch_bounds__(128 * (kWgmmaPlan<kId>.warpgroups + 1), 1)
    forward_wgmma_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                         const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                         const __grid_constant__ WgmmaSchedule schedule) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    static_assert(kPlan.block_n % 16 == 0 && kPlan.headdim % 32 == 0 && kPlan.headdim_v % 32 == 0,
                  "whole steps of 16 and whole quads of column groups");
    using Smem = WgmmaSmem<T, kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        init_barriers(smem, schedule.page_copies);
    }
    if constexpr (kPlan.general)
        if (threadIdx.x < kPlan.block_n) smem.seen[0][threadIdx.x] = smem.seen[1][threadIdx.x] = 0;
    __syncthreads();

    if (warpgroup == 0) {
        if constexpr (kPlan.moves_registers()) setmaxnreg_dec<kPlan.producer_registers()>();
        if constexpr (kPlan.options) {
            produce_with_options(map_q, map_k, map_v, p, schedule, smem, [&] {
                if constexpr (kWgmmaPlan<kId>.intervals)
                    find_seen_tiles(p, schedule, BoundsOfTiles{schedule.bounds, schedule.groups}, smem);
                else find_tiles(p, schedule, smem);
            });
            return;
        }
        if constexpr (kLoads == KeyLoads::kPageBoxes) {
            produce(map_q, p, schedule, smem, WarpgroupBoxes<T, kId>(map_k, map_v, p, schedule, smem));
            return;
        }
        if constexpr (kPlan.pages())
            if (schedule.page_copies) {
                produce(map_q, p, schedule, smem, WarpgroupRows<T, kId>(p, smem));
                return;
            }
        if (threadIdx.x == 0) produce(map_q, p, schedule, smem, ThreadTiles<T, kId>(map_k, map_v, p, schedule, smem));
        return;
    }
    if constexpr (kPlan.moves_registers()) setmaxnreg_inc<kPlan.consumer_registers()>();
    const Consumer me{warpgroup - 1, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)};
    if constexpr (kPlan.options) consume_with_options(p, schedule, smem, me);
    else consume(p, smem, me);
}

// The same for plans with a bias.
template <typename T, WgmmaPlanId kId>
__global__ void __launch_bounds__(128 * (kWgmmaPlan<kId>.warpgroups + 1), 1)
    forward_wgmma_bias_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                              const __grid_constant__ CUtensorMap map_v, const __grid_constant__ CUtensorMap map_bias,
                              const __grid_constant__ AttentionParams p, const __grid_constant__ WgmmaSchedule schedule) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    using Smem = WgmmaSmem<T, kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v), prefetch_tensormap(&map_bias);
        init_barriers(smem, false);
    }
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<kPlan.producer_registers()>();
        produce_with_options(map_q, map_k, map_v, p, schedule, smem, [&] { find_tiles(p, schedule, smem); }, &map_bias);
        return;
    }
    setmaxnreg_inc<kPlan.consumer_registers()>();
    consume_with_options(p, schedule, smem, Consumer{warpgroup - 1, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)});
}

// The same for plans for blocks.
template <typename T, WgmmaPlanId kId>
__global__ void __launch_bounds__(128 * (kWgmmaPlan<kId>.warpgroups + 1), 1)
    forward_wgmma_blocks_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                                const __grid_constant__ CUtensorMap map_v, const __grid_constant__ SeenBlocks blocks,
                                const __grid_constant__ AttentionParams p, const __grid_constant__ WgmmaSchedule schedule) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    using Smem = WgmmaSmem<T, kId>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);

    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        init_barriers(smem, false);
    }
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<kPlan.producer_registers()>();
        produce_with_options(map_q, map_k, map_v, p, schedule, smem, [&] { find_seen_tiles(p, schedule, blocks, smem); });
        return;
    }
    setmaxnreg_inc<kPlan.consumer_registers()>();
    consume_with_options(p, schedule, smem, Consumer{warpgroup - 1, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)}, &blocks);
}

// ---- launch ----

using WgmmaKernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, AttentionParams, WgmmaSchedule);

// `more`: what the kernel takes beside the maps of q, k and v.
template <typename T, WgmmaPlanId kId, typename Kernel, typename... More>
cudaError_t launch_wgmma(const AttentionParams& p, const ForwardWorkList& list, Kernel kernel, cudaStream_t stream, const More&... more) {
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    const bool varlen = p.cu_seqlens_q;

    WgmmaSchedule schedule{};
    schedule.list = list;
    if (p.softcap != 0) schedule.cap_inverse = p.scale / p.softcap, schedule.capped = capped_exponent(p.scale, p.softcap);
    CUtensorMap map_q, map_k, map_v;
    const bool paged = p.cache.block_table;
    const int common = paged ? std::gcd(p.cache.page_size, kPlan.block_n) : kPlan.block_n;  // gcd of the rows of page and tile
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

    LaunchOptions options;
    if (p.max_score) {  // clear_max_score also zeroes the counter; this kernel may start while it runs
        options.programmatic = true;
        if (cudaError_t error = clear_max_score(p, schedule.list.counter, stream)) return error;
    } else if (schedule.list.counter) {
        if (cudaError_t error = cudaMemsetAsync(schedule.list.counter, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    }
    if constexpr (kPlan.intervals) {
        void* const bounds = static_cast<char*>(p.workspace) + kWorkListBytes;
        if (cudaError_t error = launch_grouped_interval_bounds(p, kPlan.block_n, bounds, &schedule.bounds, &schedule.groups, stream))
            return error;
    }
    if constexpr (kPlan.page_boxes())
        if (boxes) kernel = forward_wgmma_kernel<T, kId, KeyLoads::kPageBoxes>;
    return launch_kernel(kernel, unsigned(schedule.list.blocks), 128 * (kPlan.warpgroups + 1), sizeof(WgmmaSmem<T, kId>), stream, options,
                         map_q, map_k, map_v, more..., p, schedule);
}

// Tiles of block_m rows and block_n keys; or of one row.
template <WgmmaPlanId kId>
cudaError_t encode_bias(const AttentionParams& p, CUtensorMap* map) {
    const ScoreView& bias = p.bias;
    int loads;
    constexpr int kBytes = WgmmaBias<kId>::kElementBytes, kPlaces = kBytes / 2;  // places of 16 bits in an element
    return encode_tiles({"bias", bias.data, p.dtype == DType::kFloat16, int64_t(kPlaces) * p.seqlen_k, bias.row ? p.seqlen_q : 1,
                         bias.head ? p.nheads : 1, bias.batch ? p.batch : 1, kBytes * bias.row, kBytes * bias.head, kBytes * bias.batch,
                         bias.row ? kWgmmaPlan<kId>.block_m() : 1, kPlaces * kWgmmaPlan<kId>.block_n, true},
                        map, &loads);
}

template <typename T, WgmmaPlanId kId>
cudaError_t launch_wgmma(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr int kBlockM = kWgmmaPlan<kId>.block_m();
    if (work_items(p, kBlockM) == 0) return cudaSuccess;
    ForwardWorkList list = forward_work_list(p, kBlockM, multiprocessors);
    add_leading_sections(p, multiprocessors, &list);
    if constexpr (kWgmmaPlan<kId>.bias) {
        AttentionParams call = p;
        if (wgmma_copies_bias(p)) {
            void* const workspace = static_cast<char*>(p.workspace) + kWorkListBytes;
            if (cudaError_t error = launch_bias_copy(p, wgmma_bias_copy(p), workspace, &call, stream)) return error;
        }
        CUtensorMap map_bias;
        if (cudaError_t error = encode_bias<kId>(call, &map_bias)) return error;
        return launch_wgmma<T, kId>(call, list, forward_wgmma_bias_kernel<T, kId>, stream, map_bias);
    } else if constexpr (kWgmmaPlan<kId>.blocks) {
        SeenBlocks blocks;
        void* const workspace = static_cast<char*>(p.workspace) + kWorkListBytes;
        if (cudaError_t error = launch_seen_blocks(p, PairWords::kOfRows, workspace, &blocks, stream)) return error;
        return launch_wgmma<T, kId>(p, list, forward_wgmma_blocks_kernel<T, kId>, stream, blocks);
    } else {
        return launch_wgmma<T, kId>(p, list, forward_wgmma_kernel<T, kId, KeyLoads::kTilesOrRows>, stream);
    }
}

template <WgmmaPlanId kId>
cudaError_t launch_wgmma(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_wgmma<__half, kId>(p, multiprocessors, stream)
                                      : launch_wgmma<__nv_bfloat16, kId>(p, multiprocessors, stream);
}

}  // namespace fa
