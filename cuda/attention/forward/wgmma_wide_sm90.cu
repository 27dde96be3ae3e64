// wgmma_wide_sm90.cu: attention for head dims above 256, up to 512 for q and k and for v, on Hopper.   out = softmax(q k^T * scale) v
//
// New against wgmma_sm90/kernel.cuh: a block has 64 rows; two warpgroups share the columns of O; a third computes S for both; and a cluster
// of two blocks shares K and V.
//
//     block 0, rows 0 .. 63                                       block 1, rows 64 .. 127 of the same head
//     producers, one warp each for K and V: half of every slot, to both blocks (multicast)      the other half
//                                  | nine slots, 64 keys x 128 columns, 16 KB each: a ring for K, and one for V
//     scores warpgroup         S(n - 1) = Q K^T  under  softmax(n) -> P, o_scale: through shared memory, thread t to thread t of
//                              the output warpgroups
//     output warpgroups, two   O[:, own columns] = o_scale O + P V, 256 columns each at head dim 512
//
// Why this shape: costs for head dim 512, one tile of 64 keys and 64 rows. An SM makes 4096 flops a cycle, so each product takes 1024
// cycles.
//
//     registers        O of 64 x 512 floats is half of the register file: 128 registers in each thread of two warpgroups, which leaves none
//                      for S.
//     softmax          about 700 cycles of one warpgroup. It has two buffers of S, so that the products of the next tile run meanwhile,
//                      whatever the output warpgroups do.
//     shared memory    S reads 16 cycles of Q and 16 of K for every 32 cycles of products: 1024. P V reads only V: 512. The copies write
//                      128 KB: 1024. P: 192. That is 2750 cycles for 2048 of products, which bounds the kernel at 3/4 of the peak.
//     L2               128 KB for each 64 rows would be 64 flops per byte, 350 TFLOP/s at 5.5 TB/s. Two blocks that share K and V reach
//                      twice that.
//
// A barrier tells its phase by one bit, so whoever waits for a slot has to wait for each of its phases. Therefore a slot is always filled
// by the same warp of each block and always read by the same warpgroup. With one ring for K and V, a warpgroup that runs ahead would wait
// for a K whose slot still expects an earlier V. It would take an older phase for the one it waits for, and read and release data that has
// not arrived.
//
// A bias, a mask or dropout has a kernel of its own: the scores warpgroup applies it, and says beside P which keys some row of the block
// sees. The output warpgroups zero V of the others, whose P is 0, because V may be NaN there.
//
// An item is 128 rows of one head. Block 0 of a cluster finds the items and sends them to block 1. Both blocks walk over all tiles that any
// row of the item sees.
#include <numeric>
#include <type_traits>

#include "attention/common/epilogue.cuh"
#include "attention/common/general_scores.cuh"
#include "attention/common/output_fragment.cuh"
#include "attention/common/score_fragment.cuh"
#include "attention/forward/common/work_list.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/ring.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kBlocks = 2;                     // blocks of a cluster
constexpr int kRows = 64, kKeys = 64;          // rows of a block, keys of a tile
constexpr int kSlotColumns = 128, kSlots = 9;  // a slot has two chunks of 64 columns; each block of the cluster copies one
constexpr int kMostColumns = kWgmmaWideMaxHeadDim;
constexpr int kPSlots = 2, kWorkSlots = 3;
constexpr int kWarps = 16, kThreads = 32 * kWarps;
enum ProducerWarp { kKeysWarp, kValuesWarp, kQueriesWarp };
constexpr uint32_t kChunkBytes = kKeys * kChunkRowBytes, kSlotBytes = 2 * kChunkBytes;
static_assert(kRows == kKeys, "chunks of Q are as large as those of K");

// 128 registers per thread at launch: 32 + 128 + 2 x 176 = 4 x 128.
constexpr int kProducerRegisters = 32, kScoresRegisters = 128, kOutputRegisters = 176;

enum WideBarrier : int { kOutputWarpgroup = 1 };  // and 2: the threads of one output warpgroup

struct WideSchedule {
    ForwardWorkList list;  // `blocks` are clusters here
    int box_rows;          // rows of a box: a whole tile, or a common divisor of tile and page
};

// With options: which keys of a tile some row of the block sees, as each warp knows it. Bit 2 i + e of [quad]: key 8 i + 2 quad + e.
struct alignas(8) SeenKeys {
    uint16_t of_warp[4][4];  // warp, quad

    // Of all warps; two quads in a word. (As four words of 16 bits, ptxas 13.0 took keys that nobody sees for seen ones.)
    __device__ __forceinline__ uint2 of_block() const {
        uint2 seen{0, 0};
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) {
            const uint2 own = *reinterpret_cast<const uint2*>(of_warp[warp]);
            seen.x |= own.x, seen.y |= own.y;
        }
        return seen;
    }
};

template <typename T>
struct alignas(1024) WideSmem {
    T q[kRows * kMostColumns];
    T slots[kSlots][kKeys * kSlotColumns];
    uint4 p[kPSlots][kKeys / 16][128];  // P as A operand
    float2 o_scale[kPSlots][128];       // the factor for O; after the last tile, 1 / row sum
    uint64_t q_full[1], q_empty[1], full[kSlots], empty[kSlots], p_full[kPSlots], p_empty[kPSlots];
    uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];  // work_empty: block 0's counts the readers of both blocks
    ForwardWork work[kWorkSlots];
    int next_index;  // index into the list of items: where block 0 looks next
    SeenKeys seen[kPSlots];
};
static_assert(sizeof(WideSmem<__half>) <= 227 * 1024, "one Hopper block can address 227 KiB");

struct WideTiles {
    static constexpr int kBlockM = kBlocks * kRows, kBlockN = kKeys;
    static constexpr bool kCaches = true;
};

// The number of slots that a tile of K and a tile of V take. The first kKeyRing slots are the ring of K; the others hold one or two tiles
// of V.
template <int kOfKeys, int kOfValues>
struct WideShape {
    static constexpr int kKeySlots = kOfKeys, kValueSlots = kOfValues;
    static constexpr int kValueTiles = kValueSlots == 2 ? 2 : 1, kKeyRing = kSlots - kValueTiles * kValueSlots;
    // The first output warpgroup has the larger half of V's columns.
    static constexpr int first_slot(int half) { return half ? (kValueSlots + 1) / 2 : 0; }
    static constexpr int own_slots(int half) { return (kValueSlots + 1 - half) / 2; }
};
// A slot, and the phase of its barriers.
struct SlotPlace {
    uint32_t slot, phase;
};
// The first slot of tile `tile` of V; tiles count over all items.
template <typename Shape>
__device__ __forceinline__ SlotPlace place_of_values(uint32_t tile) {
    return {Shape::kKeyRing + tile % Shape::kValueTiles * Shape::kValueSlots, tile / Shape::kValueTiles % 2};
}
template <typename Shape>
__device__ __forceinline__ void next_slot(SlotPlace& keys) {
    if (++keys.slot == Shape::kKeyRing) keys = {0, keys.phase ^ 1};
}
template <typename T>
__device__ __forceinline__ void wait_full(const WideSmem<T>& smem, SlotPlace at) {
    mbarrier_wait(shared_address(smem.full) + 8 * at.slot, at.phase);
}
// A warp has read a slot: the copies of both blocks may overwrite it. `other`: the empty barriers of the other block.
template <typename T>
__device__ __forceinline__ void release_slot(const WideSmem<T>& smem, uint32_t other, uint32_t slot) {
    mbarrier_arrive(shared_address(smem.empty) + 8 * slot), mbarrier_arrive_cluster(other + 8 * slot);
}

// ---- work: a reader waits for the next item, reads it in its own shared memory, and releases it in block 0 ----

template <typename T>
__device__ __forceinline__ const ForwardWork& next_work(const WideSmem<T>& smem, const Ring<kWorkSlots>& work) {
    mbarrier_wait_cluster(work.full_barrier(), work.phase);
    return smem.work[work.slot];
}
__device__ __forceinline__ void release_work(Ring<kWorkSlots>& work, int lane) {
    __syncwarp();
    if (arrives(lane)) mbarrier_arrive_cluster(cluster_address(work.empty_barrier(), 0));
    work.next();
}

// ---- producers: a warp for K (in block 0 also for the items), a warp for V, and a warp for Q ----

// Called by one thread of block 0: writes the next item with rows, or the end, to its own shared memory and to that of block 1.
template <typename T>
__device__ __forceinline__ void send_work(const AttentionParams& p, const ForwardWorkList& list, WideSmem<T>& smem, uint32_t item) {
    const Ring<kWorkSlots> work(smem.work_full, smem.work_empty, item);
    ForwardWork& w = smem.work[work.slot];
    work.wait_empty();
    do {
        find_work<WideTiles>(p, list, smem.next_index, w);
        smem.next_index = list.order == WorkOrder::kCounter ? list.blocks + atomicAdd(list.counter, 1) : smem.next_index + list.blocks;
    } while (w.state == WorkState::kEmpty);
    const uint32_t here = shared_address(&w), there = cluster_address(here, 1), full = cluster_address(work.full_barrier(), 1);
    mbarrier_arrive_expect_tx_cluster(full, sizeof w);
#pragma unroll
    for (uint32_t i = 0; i < sizeof w; i += 16) store_async_16(there + i, load_shared_16(here + i), full);
    mbarrier_arrive(work.full_barrier());
}

// Copies this block's chunks of the kCount slots of tile n of K or V, one box per lane. place(i): the place of slot i.
template <int kCount, typename T, typename Place>
__device__ __forceinline__ void load_tile(const CUtensorMap& map, const AttentionParams& p, int box_rows, const ForwardWork& w, int n,
                                          WideSmem<T>& smem, const Place& place) {
    const int lane = threadIdx.x % 32, box_row = lane * box_rows;
    int row = w.k_row + n * kKeys + box_row, page = p.cu_seqlens_q ? 0 : w.batch;
    if (p.cache.block_table) {  // pages past the sequence arrive as zeros
        page = p.cache.entries;
        if (box_row < kKeys && row < w.seqlen_k) {
            const int number = row / p.cache.page_size;
            page = cache_page(p.cache, w.batch, number), row -= number * p.cache.page_size;
        }
    } else if (p.cache.entries) {
        page = cache_entry(p.cache, page);
    }
    const int head_k = w.head / p.group;
#pragma unroll 1
    for (int i = 0; i < kCount; ++i) {
        const SlotPlace at = place(i);
        const uint32_t chunk = 2 * i + cluster_rank(), full = shared_address(smem.full) + 8 * at.slot;
        mbarrier_wait(shared_address(smem.empty) + 8 * at.slot, at.phase ^ 1);
        __syncwarp();  // no lane may still wait when the slot is filled
        if (lane == 0) mbarrier_arrive_expect_tx(full, kSlotBytes);
        if (box_row < kKeys)
            tma_load_multicast(shared_address(smem.slots[at.slot]) + chunk % 2 * kChunkBytes + box_row * kChunkRowBytes, &map, full,
                               chunk * kChunkColumns, row, 0, head_k, page, (1 << kBlocks) - 1);
        __syncwarp();
    }
}

// Copies this block's rows of Q, one chunk per lane. Columns past headdim are zeros, as they are in K.
template <int kChunks, typename T>
__device__ __forceinline__ void load_queries(const CUtensorMap& map, const AttentionParams& p, const ForwardWork& w, WideSmem<T>& smem,
                                             const Ring<1>& q) {
    const int lane = threadIdx.x % 32;
    q.wait_empty();
    __syncwarp();
    if (lane == 0) mbarrier_arrive_expect_tx(q.full_barrier(), kChunks * kChunkBytes);
    if (lane < kChunks)
        tma_load(shared_address(smem.q) + lane * kChunkBytes, &map, q.full_barrier(), lane * kChunkColumns,
                 w.q_row + w.row0 + int(cluster_rank()) * kRows, 0, w.head, p.cu_seqlens_q ? 0 : w.batch, kEvictFirst);
    __syncwarp();
}

template <typename T, typename Shape>
__device__ __forceinline__ void produce(const CUtensorMap& map_q, const CUtensorMap& map_k, const CUtensorMap& map_v,
                                        const AttentionParams& p, const WideSchedule& schedule, WideSmem<T>& smem, int warp) {
    if (warp > kQueriesWarp) return;
    Ring<kWorkSlots> work(smem.work_full, smem.work_empty);
    SlotPlace keys{0, 0};
    uint32_t tile = 0;  // tiles of V so far, over all items
#pragma unroll 1
    for (uint32_t item = 0;; ++item) {
        if (warp == kKeysWarp && cluster_rank() == 0) {  // the previous item's K has been issued: items are taken late, close to their turn
            if (threadIdx.x % 32 == 0) send_work(p, schedule.list, smem, item);
            __syncwarp();
        }
        const ForwardWork& w = next_work(smem, work);
        if (w.state == WorkState::kEnd) return;
        if (warp == kQueriesWarp) {
            load_queries<2 * Shape::kKeySlots>(map_q, p, w, smem, Ring<1>(smem.q_full, smem.q_empty, item));
        } else if (warp == kKeysWarp) {
#pragma unroll 1
            for (int n = w.last_tile; n >= w.first_tile; --n)
                load_tile<Shape::kKeySlots>(map_k, p, schedule.box_rows, w, n, smem, [&](int) {
                    const SlotPlace at = keys;
                    next_slot<Shape>(keys);
                    return at;
                });
        } else {
#pragma unroll 1
            for (int n = w.last_tile; n >= w.first_tile; --n, ++tile)
                load_tile<Shape::kValueSlots>(map_v, p, schedule.box_rows, w, n, smem, [&](int i) {
                    const SlotPlace first = place_of_values<Shape>(tile);
                    return SlotPlace{first.slot + i, first.phase};
                });
        }
        release_work(work, threadIdx.x % 32);
    }
}

// ---- the scores warpgroup ----

// S = Q K^T for the tile of K whose slots begin at `at`, which moves on to the next tile. The descriptors' low halves go through opaque();
// otherwise the compiler would keep one per step of Q in registers.
template <typename T, typename Shape>
__device__ __forceinline__ void multiply_qk(float (&S)[kKeys / 2], uint32_t low_q, uint32_t low_slots, const WideSmem<T>& smem,
                                            SlotPlace& at) {
    constexpr int kSteps = kSlotColumns / 16;
#pragma unroll
    for (int x = 0; x < Shape::kKeySlots; ++x) {
        wait_full(smem, at);
        const uint32_t q = opaque(low_q), k = opaque(low_slots + at.slot * uint32_t(descriptor_step(kSlotBytes)));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
            wgmma_ss<T, kKeys>(S, descriptor_from(q, descriptor_k_step(x * kSteps + i, kRows)),
                               descriptor_from(k, descriptor_k_step(i, kKeys)), x != 0 || i != 0);
        next_slot<Shape>(at);
    }
    wgmma_commit();
}

// Which of the thread's keys one of its two rows sees: SeenKeys, or-ed over the warp.
__device__ __forceinline__ uint32_t seen_keys(const float (&S)[kKeys / 2], bool first_exists, bool second_exists) {
    uint32_t seen = 0;
#pragma unroll
    for (int i = 0; i < kKeys / 2; i += 4)
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if ((first_exists && S[i + e] != -INFINITY) || (second_exists && S[i + 2 + e] != -INFINITY)) seen |= 1u << (i / 2 + e);
#pragma unroll
    for (int other = 4; other < 32; other *= 2) seen |= __shfl_xor_sync(~0u, seen, other);
    return seen;
}

// kOptions: bias, masks and dropout, beside softcap and ALiBi. Scores are natural then.
template <typename T, typename Shape, bool kOptions>
__device__ __forceinline__ void compute_scores(const AttentionParams& p, WideSmem<T>& smem, uint32_t rank, int warp, int lane) {
    constexpr float kRise = 8.0f;  // P stays below 2^8: safe in fp16, too
    Ring<kWorkSlots> work(smem.work_full, smem.work_empty);
    Ring<1> q(smem.q_full, smem.q_empty);
    Ring<kPSlots> out(smem.p_full, smem.p_empty);
    const uint32_t low_q = descriptor_low(shared_address(smem.q), 16), low_slots = descriptor_low(shared_address(smem.slots), 16);
    const uint32_t other = cluster_address(shared_address(smem.empty), rank ^ 1);
    const int quad = lane % 4, thread = threadIdx.x % 128;
    const bool natural = !kOptions && wgmma_scores_are_natural(p);
    const float scale_log2 = natural ? kLog2e : p.scale * kLog2e;
    SlotPlace keys{0, 0};
    uint32_t read = 0;  // the first slot that this warpgroup has read but not released
    const auto release_keys = [&] {
        if (arrives(lane))
#pragma unroll
            for (int i = 0; i < Shape::kKeySlots; ++i) release_slot(smem, other, (read + i) % Shape::kKeyRing);
        read = keys.slot;
    };
#pragma unroll 1
    for (;;) {
        const ForwardWork& w = next_work(smem, work);
        if (w.state == WorkState::kEnd) return;
        const int tiles = w.last_tile - w.first_tile + 1, first_row = w.row0 + int(rank) * kRows, row = first_row + warp * 16 + lane / 4;
        const int right_tile = clamp_to(first_row + w.right + 1, 0, w.seqlen_k) / kKeys;                      // masked from this tile on
        const int left_tile = (clamp_to(first_row + kRows - 1 + w.left, 0, w.seqlen_k) + kKeys - 1) / kKeys;  // and tiles before this one
        float S[kKeys / 2], next[kKeys / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};

        // Turns S of tile t into P and hands it to the output warpgroups.
        const auto softmax = [&](int t) {
            const int n = w.last_tile - t, key = n * kKeys + 2 * quad;
            const FragmentPlace at{w.batch, w.head, row, key, w.seqlen_q, w.seqlen_k, w.shift};
            if constexpr (kOptions) transform_fragment<T>(p, at, S);
            else if (natural) transform_products<T>(p, at, S);
            if (n >= right_tile) mask_right(S, min(row + w.right, w.seqlen_k - 1) - key, min(row + 8 + w.right, w.seqlen_k - 1) - key);
            if (n < left_tile) mask_left(S, row + w.left - key, row + 8 + w.left - key);
            float tile_max[2], sum[2], o_scale[2] = {1.0f, 1.0f};
            [[maybe_unused]] uint32_t seen = 0;
            if constexpr (kOptions) seen = seen_keys(S, row < w.seqlen_q, row + 8 < w.seqlen_q);
            tile_maximum(S, tile_max);
            if constexpr (kOptions) {
                raise_maximum(tile_max, kRise * kLn2, row_max, row_sum, o_scale, kLog2e);
                exponentials(S, exponent_of_natural(), row_max, sum);
            } else {
                tile_max[0] *= scale_log2, tile_max[1] *= scale_log2;
                raise_maximum(tile_max, kRise, row_max, row_sum, o_scale);
                exponentials(S, scale_log2, row_max, sum);
            }
            row_sum[0] += sum[0], row_sum[1] += sum[1];
            if constexpr (kOptions)
                if (p.dropout_threshold) drop_fragment(p, at, quad, S);
            out.wait_empty();
            if constexpr (kOptions)
                if (lane < 4) smem.seen[out.slot].of_warp[warp][lane] = uint16_t(seen);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                const float* from = S + 8 * i;
                smem.p[out.slot][i][thread] = make_uint4(pack_16<T>(from[0], from[1]), pack_16<T>(from[2], from[3]),
                                                         pack_16<T>(from[4], from[5]), pack_16<T>(from[6], from[7]));
            }
            smem.o_scale[out.slot][thread] = make_float2(o_scale[0], o_scale[1]);
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(out.full_barrier());
            out.next();
        };

        q.wait_full();
        multiply_qk<T, Shape>(S, low_q, low_slots, smem, keys);
        wgmma_wait<0>(S);
        release_keys();
        // The products of tile t + 1 run under the softmax of tile t.
#pragma unroll 1
        for (int t = 0; t + 1 < tiles; ++t) {
            multiply_qk<T, Shape>(next, low_q, low_slots, smem, keys);
            softmax(t);
            wgmma_wait<0>(next);
            release_keys();
#pragma unroll
            for (int i = 0; i < kKeys / 2; ++i) S[i] = next[i];
        }
        q.release(lane);  // the next Q arrives during the last softmax
        softmax(tiles - 1);

        const bool varlen = p.cu_seqlens_q;
        const int64_t lse_row = (int64_t(varlen ? 0 : w.batch) * p.nheads + w.head) * (varlen ? p.total_q : p.seqlen_q) + w.q_row;
        float inverse[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            constexpr ScoreUnit kUnit = kOptions ? ScoreUnit::kNatural : ScoreUnit::kLog2;
            const RowEnd end = finish_row<kUnit>(row_max[r], quad_sum(row_sum[r]), sink_of(p.sinks, w.head));
            inverse[r] = kOptions && p.dropout_threshold ? end.inverse * p.dropout_scale : end.inverse;
            if (p.lse && quad == 0 && row + 8 * r < w.seqlen_q) p.lse[lse_row + row + 8 * r] = kOptions ? end.lse : end.lse * kLn2;
        }
        out.wait_empty();
        smem.o_scale[out.slot][thread] = make_float2(inverse[0], inverse[1]);
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(out.full_barrier());
        out.next();
        release_work(work, lane);
    }
}

// ---- an output warpgroup: computes its slots of the columns of O ----

// Zeroes the rows of V of a tile for which is_hidden(key of the tile) holds: they have P = 0, but 0 x NaN is NaN.
template <int kOwn, typename T, typename IsHidden>
__device__ __forceinline__ void zero_values(WideSmem<T>& smem, SlotPlace at, int half, const IsHidden& is_hidden) {
#pragma unroll 1
    for (int i = 0; i < kOwn; ++i, ++at.slot) {
        wait_full(smem, at);
        uint4* pieces = reinterpret_cast<uint4*>(smem.slots[at.slot]);
        for (int x = opaque(int(threadIdx.x % 128)); x < int(kSlotBytes / 16); x += 128)
            if (is_hidden(x / 8 % kKeys)) pieces[x] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    bar_sync(kOutputWarpgroup + half, 128);
}

// Those of keys that no row of the sequence sees. Past the end of a dense tensor the copies have
// written zeros, but in a varlen call the next sequence follows, and a cache may hold anything.
template <int kOwn, typename T>
__device__ __forceinline__ void zero_hidden_values(const AttentionParams& p, const ForwardWork& w, int n, WideSmem<T>& smem, SlotPlace at,
                                                   int half) {
    const int begin = clamp_to(w.left, 0, w.seqlen_k), end = clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
    const bool hidden_end = (n + 1) * kKeys > end && (p.cu_seqlens_q || p.cache.entries || end < w.seqlen_k);
    if (!hidden_end && n * kKeys >= begin) return;
    zero_values<kOwn>(smem, at, half, [=](int key) { return n * kKeys + key < begin || n * kKeys + key >= end; });
}

// With options: those of keys that no row of the block sees.
template <int kOwn, typename T>
__device__ __forceinline__ void zero_unseen_values(uint2 seen, WideSmem<T>& smem, SlotPlace at, int half) {
    if ((seen.x & seen.y) == ~0u) return;
    zero_values<kOwn>(smem, at, half, [=](int key) {
        const int quad = key % 8 / 2;
        return !((quad < 2 ? seen.x : seen.y) >> (quad % 2 * 16 + key / 8 * 2 + key % 2) & 1);
    });
}

template <typename T, typename Shape, int kHalf, bool kOptions>
__device__ __forceinline__ void compute_output(const AttentionParams& p, WideSmem<T>& smem, uint32_t rank, int warp, int lane) {
    constexpr int kFirst = Shape::first_slot(kHalf), kOwn = Shape::own_slots(kHalf);
    Ring<kWorkSlots> work(smem.work_full, smem.work_empty);
    Ring<kPSlots> in(smem.p_full, smem.p_empty);
    const uint32_t low_slots = descriptor_low(shared_address(smem.slots), kChunkBytes);
    const uint32_t other = cluster_address(shared_address(smem.empty), rank ^ 1);
    const int quad = lane % 4, thread = threadIdx.x % 128;
    uint32_t tile = 0;  // tiles of V so far, over all items
#pragma unroll 1
    for (;;) {
        const ForwardWork& w = next_work(smem, work);
        if (w.state == WorkState::kEnd) return;
        const int tiles = w.last_tile - w.first_tile + 1;
        float O[kOwn * kSlotColumns / 2];
        uint32_t P[kKeys / 4];
#pragma unroll
        for (int i = 0; i < kOwn * kSlotColumns / 2; ++i) O[i] = 0.0f;
        const auto read_o_scale = [&] { return smem.o_scale[in.slot][thread]; };
        const auto release_p = [&] {
            __syncwarp();
            in.release(lane);
        };
#pragma unroll 1
        for (int t = 0; t < tiles; ++t, ++tile) {
            in.wait_full();
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                const uint4 x = smem.p[in.slot][i][thread];
                P[4 * i] = x.x, P[4 * i + 1] = x.y, P[4 * i + 2] = x.z, P[4 * i + 3] = x.w;
            }
            const float2 o_scale = read_o_scale();
            [[maybe_unused]] uint2 seen{};
            if constexpr (kOptions) seen = smem.seen[in.slot].of_block();
            release_p();
            if (__any_sync(~0u, o_scale.x != 1.0f || o_scale.y != 1.0f)) {
#pragma unroll
                for (int i = 0; i < kOwn * kSlotColumns / 2; ++i) O[i] *= i / 2 % 2 ? o_scale.y : o_scale.x;
            }
            SlotPlace values = place_of_values<Shape>(tile);
            values.slot += kFirst;
            if constexpr (kOptions) zero_unseen_values<kOwn>(seen, smem, values, kHalf);
            else zero_hidden_values<kOwn>(p, w, w.last_tile - t, smem, values, kHalf);
#pragma unroll
            for (int x = 0; x < kOwn; ++x) {
                wait_full(smem, SlotPlace{values.slot + x, values.phase});
                const uint32_t v = opaque(low_slots + (values.slot + x) * uint32_t(descriptor_step(kSlotBytes)));
                wgmma_fence();
#pragma unroll
                for (int i = 0; i < kKeys / 16; ++i)
                    wgmma_rs<T, kSlotColumns, 1>(reinterpret_cast<float(&)[kSlotColumns / 2]>(O[x * kSlotColumns / 2]), P + 4 * i,
                                                 descriptor_from(v, descriptor_row_step(i)), 1);
                wgmma_commit();
            }
            wgmma_wait<0>(O);
            if (arrives(lane))
#pragma unroll
                for (int x = 0; x < kOwn; ++x) release_slot(smem, other, values.slot + x);
        }
        in.wait_full();
        const float2 inverse = read_o_scale();
        release_p();

        const bool varlen = p.cu_seqlens_q;
        const int row = w.row0 + int(rank) * kRows + warp * 16 + lane / 4, column = kFirst * kSlotColumns;
        T* out = static_cast<T*>(p.out.data) + (varlen ? 0 : w.batch * p.out.batch) + w.q_row * p.out.row + w.head * p.out.head + column;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float factor = r ? inverse.y : inverse.x;
            store_row(out + (row + 8 * r) * p.out.row, O, r, factor, factor == 0.0f, row + 8 * r < w.seqlen_q, p.headdim_v - column, quad);
        }
        release_work(work, lane);
    }
}

template <typename T, typename Shape, bool kOptions>
__global__ void __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 1)
    forward_wgmma_wide_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                              const __grid_constant__ CUtensorMap map_v, const __grid_constant__ AttentionParams p,
                              const __grid_constant__ WideSchedule schedule) {
    extern __shared__ __align__(1024) unsigned char shared[];
    WideSmem<T>& smem = *reinterpret_cast<WideSmem<T>*>(shared);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x % 32;
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_q), prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        const auto init = [](auto& barriers, int count) {
            for (uint64_t& barrier : barriers) mbarrier_init(shared_address(&barrier), count);
        };
        init(smem.q_full, 1), init(smem.q_empty, 4 * kWarpArrivals);
        init(smem.full, 1), init(smem.empty, kBlocks * 4 * kWarpArrivals);
        init(smem.p_full, 4 * kWarpArrivals), init(smem.p_empty, 8 * kWarpArrivals);
        init(smem.work_full, 1), init(smem.work_empty, kBlocks * (kWarps - 1) * kWarpArrivals);  // one producer warp is idle
        fence_mbarrier_init();
        smem.next_index = int(blockIdx.x) / kBlocks;
    }
    __syncthreads();
    cluster_arrive(), cluster_wait();

    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        produce<T, Shape>(map_q, map_k, map_v, p, schedule, smem, warp);
    } else if (warpgroup == 1) {
        setmaxnreg_inc<kScoresRegisters>();
        compute_scores<T, Shape, kOptions>(p, smem, rank, warp % 4, lane);
    } else if (warpgroup == 2) {
        setmaxnreg_inc<kOutputRegisters>();
        compute_output<T, Shape, 0, kOptions>(p, smem, rank, warp % 4, lane);
    } else {
        setmaxnreg_inc<kOutputRegisters>();
        compute_output<T, Shape, 1, kOptions>(p, smem, rank, warp % 4, lane);
    }
    __syncwarp();
    cluster_arrive_release(), cluster_wait();  // all messages have arrived: nobody may send to a block that has ended
}

// ---- launch ----

ForwardWorkList wide_work_list(const AttentionParams& p, int multiprocessors) {
    ForwardWorkList list = forward_work_list(p, WideTiles::kBlockM, multiprocessors / kBlocks);
    add_leading_sections(p, multiprocessors / kBlocks, &list);
    return list;
}

template <typename T>
cudaError_t launch_wide(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    if (work_items(p, WideTiles::kBlockM) == 0) return cudaSuccess;
    const bool varlen = p.cu_seqlens_q, paged = p.cache.block_table;
    WideSchedule schedule{};
    schedule.list = wide_work_list(p, multiprocessors);
    schedule.box_rows = paged ? std::gcd(p.cache.page_size, kKeys) : kKeys;
    CUtensorMap map_q, map_k, map_v;
    const int64_t batch_q = varlen ? 1 : p.batch, batch_k = varlen ? 1 : p.cache.entries ? p.cache.entries : p.batch;
    const int64_t rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : paged ? p.cache.page_size : p.seqlen_k;
    const auto encode = [&](const char* name, const TensorView& x, int columns, int64_t batch, int64_t rows, int heads, int box_rows,
                            CUtensorMap* map) {
        int loads = 0;
        return encode_tiles({name, x.data, std::is_same_v<T, __half>, columns, rows, heads, batch, 2 * x.row, 2 * x.head, 2 * x.batch,
                             box_rows, kMostColumns, /* by_chunk: */ true},
                            map, &loads);
    };
    if (cudaError_t error = encode("q", p.q, p.headdim, batch_q, rows_q, p.nheads, kRows, &map_q)) return error;
    if (cudaError_t error = encode("k", p.k, p.headdim, batch_k, rows_k, p.nheads_k, schedule.box_rows, &map_k)) return error;
    if (cudaError_t error = encode("v", p.v, p.headdim_v, batch_k, rows_k, p.nheads_k, schedule.box_rows, &map_v)) return error;
    if (schedule.list.counter)
        if (cudaError_t error = cudaMemsetAsync(schedule.list.counter, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    const auto launch = [&](auto shape) {
        using Shape = decltype(shape);
        const bool options = p.bias.data || p.mask.data || p.dropout_threshold;
        return launch_kernel(options ? forward_wgmma_wide_kernel<T, Shape, true> : forward_wgmma_wide_kernel<T, Shape, false>,
                             unsigned(kBlocks * schedule.list.blocks), kThreads, sizeof(WideSmem<T>), stream, LaunchOptions{}, map_q, map_k,
                             map_v, p, schedule);
    };
    const auto launch_keys = [&](auto key_slots) {
        constexpr int kKeySlots = decltype(key_slots)::value;
        if (p.headdim_v <= 2 * kSlotColumns) return launch(WideShape<kKeySlots, 2>{});
        if (p.headdim_v <= 3 * kSlotColumns) return launch(WideShape<kKeySlots, 3>{});
        return launch(WideShape<kKeySlots, 4>{});
    };
    return p.headdim <= 3 * kSlotColumns ? launch_keys(std::integral_constant<int, 3>{}) : launch_keys(std::integral_constant<int, 4>{});
}

}  // namespace

cudaError_t forward_wgmma_wide_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    return p.dtype == DType::kFloat16 ? launch_wide<__half>(p, device.multiprocessors, stream)
                                      : launch_wide<__nv_bfloat16>(p, device.multiprocessors, stream);
}

size_t forward_wgmma_wide_sm90_workspace(const AttentionParams& p, const DeviceInfo& device) {
    return work_list_workspace(p, WideTiles::kBlockM, device.multiprocessors / kBlocks);
}

}  // namespace fa
