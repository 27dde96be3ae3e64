// backward_wgmma_sm90_dq.cuh: how the Hopper backward's dQ leaves a block.
//
// dQ of a query tile is the sum over the key blocks that meet it, floats in global memory. Who may add when, by the tile's counter:
//     zeroed          a block adds when it comes
//     else            whoever comes first claims the tile and writes instead of adding, and the others wait for that: nobody has to write
//                     zeros first. Who has claimed a tile waits for nobody before it is written, so this cannot hang
//     deterministic   blocks add in the same order at every tile. They start in this order too (find_key_block)
// Three parties, so that nobody waits for global memory but those who do nothing else:
//     one thread      takes the turns, up to two tiles ahead; of two blocks that share the keys for both, because a turn taken by one while
//                     the other waits for its own could close a circle                                  -> turn_full/turn_empty
//     one warpgroup   multiplies and adds, from registers (send_dq)                                     -> sent
//     one thread      counts the tile's part as added, once that is in memory
// At head dim 128 the warpgroup hands its pieces to the last thread through shared memory instead (stage_dq, copy_dq): bulk copies are
// faster there when sequences are long, by 5 % from 8192 on without a mask (H200), and shared memory has room. Turns are taken ahead there
// only in a fixed order.
#pragma once

#include "attention/backward_wgmma_sm90_block.cuh"
#include "device/cluster.cuh"

namespace fa {

struct alignas(16) Turn {
    uint32_t writes;     // or adds
    uint32_t publishes;  // adds one to the counter when its part is in memory
};
struct DqTurns {
    Turn turn[2];
    uint64_t turn_full[2], turn_empty[2], sent[2];
};
__device__ __forceinline__ void init_turns(DqTurns& turns, int blocks) {
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared_address(&turns.turn_full[i]), 1), mbarrier_init(shared_address(&turns.turn_empty[i]), blocks);
        mbarrier_init(shared_address(&turns.sent[i]), 4 * kWarpArrivals);
    }
}
FA_HOST_DEVICE bool takes_turns(const BackwardParams& b, const QueryTiles& tiles) { return b.deterministic || !tiles.zeroed; }

// Until the counter, which was `seen`, is `value`.
__device__ __forceinline__ void wait_for_counter(const int* counter, int seen, int value) {
    for (; seen != value; seen = load_acquire(counter)) __nanosleep(64);
    fence_proxy_async_global();
}
template <int kBlockM, int kBlockN>
__device__ __forceinline__ Turn take_turn(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, int* counter, int m) {
    constexpr int kClaimed = 1;
    if (b.deterministic) {
        const Range blocks = key_blocks_of({w.left, w.right, w.seqlen_q, w.seqlen_k}, m * kBlockM, kBlockM, kBlockN);
        const int n = w.key0 / kBlockN, place = b.forward.window_right < 0 ? n - blocks.begin : blocks.end - 1 - n;
        wait_for_counter(counter, load_acquire(counter), place * tiles.blocks);
        return {place == 0 && !tiles.zeroed, true};
    }
    const int seen = compare_exchange_acquire(counter, 0, kClaimed);
    if (seen == 0) return {true, true};
    wait_for_counter(counter, seen, kClaimed + tiles.blocks);
    return {false, false};
}

// Calls visit(counter, m, it) for the block's query tiles in order, from iteration it0 on.
template <typename Visit>
__device__ __forceinline__ void for_each_counter(const AttentionParams& p, const QueryTiles& tiles, const BackwardWork& w, uint32_t count,
                                                 const Visit& visit, uint32_t it0 = 0) {
    int* counters = tiles.turn + first_query_tile(p, tiles, w, w.head_k * p.group);
    int m = w.start_m;
#pragma unroll 1
    for (uint32_t it = it0; it < it0 + count; ++it) {
        visit(counters + m, m, it);
        m = next_tile(m, w.first_m, w.end_m);
        if (m == w.start_m) counters += tiles.tiles;  // the next head of the group
    }
}
// The thread that takes turns, of block 0 of kBlocks.
template <int kBlockM, int kBlockN, int kBlocks>
__device__ __forceinline__ void take_turns(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                           uint32_t count, uint32_t it0 = 0) {
    const auto visit = [&](int* counter, int m, uint32_t it) {
        const uint32_t slot = it & 1, full = shared_address(&turns.turn_full[slot]);
        mbarrier_wait(shared_address(&turns.turn_empty[slot]), it >> 1 & 1 ^ 1);
        const Turn turn = take_turn<kBlockM, kBlockN>(b, tiles, w, counter, m);
        if constexpr (kBlocks == 1) {
            turns.turn[slot] = turn;
            mbarrier_arrive(full);
        } else {
            for (uint32_t block = 0; block < kBlocks; ++block) {
                mbarrier_arrive_expect_tx_cluster(cluster_address(full, block), sizeof turn);
                store_async_16(cluster_address(shared_address(&turns.turn[slot]), block), {turn.writes, turn.publishes, 0, 0},
                               cluster_address(full, block));
            }
        }
    };
    for_each_counter(b.forward, tiles, w, count, visit, it0);
}
// The thread that counts.
template <int kBlocks>
__device__ __forceinline__ void publish_turns(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                              uint32_t count, uint32_t it0 = 0) {
    const auto visit = [&](int* counter, int, uint32_t it) {
        const uint32_t slot = it & 1, empty = shared_address(&turns.turn_empty[slot]);
        mbarrier_wait(shared_address(&turns.sent[slot]), it >> 1 & 1);
        if (turns.turn[slot].publishes) add_release(counter, 1);
        if (kBlocks > 1 && it + 2 >= count) return;  // nobody waits for it, and the other block may be gone
        if constexpr (kBlocks == 1) mbarrier_arrive(empty);
        else mbarrier_arrive_cluster(cluster_address(empty, 0));
    };
    for_each_counter(b.forward, tiles, w, count, visit, it0);
}

// The warpgroup: kPieces pieces of 64 queries x 64 columns of every tile, from piece kFirst of the tile on. `keys` are the rows of K with
// the pieces' columns, `ds` two slots of dS, a row per key. wait(it) until dS of tile `it` is there, release(it) when it has been read.
//
// With 64 columns it is dQ^T = K^T dS that is multiplied, so that some of K^T can stay in registers: the operand that shared memory need
// not deliver, where shared memory is what there is least of.
template <typename T, BackwardPlanId kId, int kFirst, int kPieces, typename Wait, typename Release>
__device__ __forceinline__ void send_dq(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                        const T* keys, const T* ds, int count, const Wait& wait, const Release& release, uint32_t it0 = 0) {
    constexpr BackwardPlan kPlan = backward_plan(kId);
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kSteps = kBlockN / 16,
                  kHeld = kPlan.held_steps(std::is_same_v<T, __half>);
    constexpr uint32_t kPiece = kBlockN * kChunkRowBytes >> 4;  // from 64 queries of dS, or 64 columns of K, to the next
    uint32_t low_keys = descriptor_low(shared_address(keys), kBlockN * kChunkRowBytes);
    uint32_t low_ds = descriptor_low(shared_address(ds), kBlockN * kChunkRowBytes);
    const bool in_turn = takes_turns(b, tiles);
    float dq[32];
    uint32_t held[kHeld ? kHeld : 1][4];  // the last steps of K^T
    if (count == 0) return;
    if constexpr (kHeld > 0) {
        wait(it0);  // keys that must not be seen are zeros by then
        const int lane = threadIdx.x % 32, key = (kSteps - kHeld) * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            ldmatrix_x4_trans(held[i],
                              shared_address(keys) + swizzled_offset(kBlockN, key + 16 * i, threadIdx.x % 128 / 32 * 2 + lane / 8 % 2));
    }
    int m = w.start_m;
    uint32_t tile0 = uint32_t(first_query_tile(b.forward, tiles, w, w.head_k * b.forward.group));  // 16 KiB and more each: 32 bits do
#pragma unroll 1
    for (uint32_t it = it0; it < it0 + uint32_t(count); ++it) {
        uint32_t columns = low_keys, rows = low_ds + (it & 1) * (kBlockM / 64 * kPiece);
        wait(it);
        __syncwarp();
        float* sums = tiles.dq + int64_t(tile0 + m) * (kBlockM * kPlan.columns()) + kFirst * kDqPiece + opaque(int(threadIdx.x)) % 128 * 4;
        bool writes = false;
        if (in_turn) {
            mbarrier_wait(shared_address(&turns.turn_full[it & 1]), it >> 1 & 1);
            writes = turns.turn[it & 1].writes;
            __syncwarp();
        }
#pragma unroll 1
        for (int left = kPieces; left > 0; --left, sums += kDqPiece) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {  // both operands run along their rows, the keys
                const uint64_t k = descriptor_from(columns, descriptor_row_step(i)), s = descriptor_from(rows, descriptor_row_step(i));
                if constexpr (kPlan.columns() == 64) {
                    if (i >= kSteps - kHeld) wgmma_rs<T, 64, 1>(dq, held[kHeld ? i - (kSteps - kHeld) : 0], s, 1);
                    else if (i == 0) wgmma_ss_first<T, 64, 1, 1>(dq, k, s);
                    else wgmma_ss<T, 64, 1, 1>(dq, k, s, 1);
                } else {
                    if (i == 0) wgmma_ss_first<T, 64, 1, 1>(dq, s, k);
                    else wgmma_ss<T, 64, 1, 1>(dq, s, k, 1);
                }
            }
            wgmma_commit();
            wgmma_wait<0>(dq);
            if (left == 1) release(it);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float* place = sums + i * 512;
                if (writes) *reinterpret_cast<float4*>(place) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
                else red_add_4(place, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
            }
            (kBlockM > 64 ? rows : columns) += kPiece;
        }
        if (in_turn) {
            __syncwarp();
            if (arrives(threadIdx.x % 32)) mbarrier_arrive(shared_address(&turns.sent[it & 1]));
            __syncwarp();
        }
        m = next_tile(m, w.first_m, w.end_m);
        if (m == w.start_m) tile0 += tiles.tiles;
    }
}

// The other way out, through shared memory: the warpgroup stores its pieces to slots, and one thread sends them by bulk copies, which L2
// adds a line at a time.
template <int kStages>
struct DqStages {
    float piece[kStages][kDqPiece];
    uint64_t full[kStages], empty[kStages];
};
template <typename T, BackwardPlanId kId, int kStages, typename Wait, typename Release>
__device__ __forceinline__ void stage_dq(DqStages<kStages>& stages, const T* keys, const T* ds, int count, const Wait& wait,
                                         const Release& release, uint32_t it0) {
    constexpr BackwardPlan kPlan = backward_plan(kId);
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kPieces = kPlan.columns() / 64;
    constexpr uint32_t kChunk = kBlockN * kChunkRowBytes >> 4;
    static_assert(kBlockM == 64 && kStages % kPieces == 0, "a piece always takes the same slots");
    uint32_t low_keys = descriptor_low(shared_address(keys), kBlockN * kChunkRowBytes);
    uint32_t low_ds = descriptor_low(shared_address(ds), kBlockN * kChunkRowBytes);
    const uint32_t own = shared_address(stages.piece) + threadIdx.x % 128 * 16;
    float dq[32];
#pragma unroll 1
    for (uint32_t it = it0; it < it0 + uint32_t(count); ++it) {
        const uint32_t stage0 = it * kPieces % kStages, phase = it * kPieces / kStages & 1;
        low_keys = opaque(low_keys), low_ds = opaque(low_ds);
        const uint32_t rows = low_ds + (it & 1) * kChunk;
        const auto multiply = [&](int piece) {  // both operands run along their rows, the keys
            wgmma_fence();
            wgmma_ss_first<T, 64, 1, 1>(dq, descriptor_from(rows), descriptor_from(low_keys + piece * kChunk));
#pragma unroll
            for (int i = 1; i < kBlockN / 16; ++i)
                wgmma_ss<T, 64, 1, 1>(dq, descriptor_from(rows, descriptor_row_step(i)),
                                      descriptor_from(low_keys + piece * kChunk, descriptor_row_step(i)), 1);
            wgmma_commit();
        };
        wait(it);
        __syncwarp();
        multiply(0);
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
            const uint32_t stage = stage0 + piece;
            wgmma_wait<0>(dq);
            if (piece == kPieces - 1) release(it);
            mbarrier_wait(shared_address(&stages.empty[stage]), phase ^ 1);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 8; ++i)
                store_shared_16(own + stage * (kDqPiece * 4) + i * 2048,
                                make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]), __float_as_uint(dq[4 * i + 2]),
                                           __float_as_uint(dq[4 * i + 3])));
            if (piece + 1 < kPieces) multiply(piece + 1);
            fence_proxy_async();
            __syncwarp();
            if (arrives(threadIdx.x % 32)) mbarrier_arrive(shared_address(&stages.full[stage]));
        }
    }
}
// The thread that sends the pieces and counts them. In a fixed order turns are taken ahead and a tile is counted while the next one is on
// its way. Else the thread takes a turn itself, no sooner than it needs it: a block that has caught up with another would wait for every
// tile claimed ahead, which costs 1 % (causal, H200); and a claimed tile is counted at once, because the next one's claimant might wait for
// it.
template <BackwardPlanId kId, int kStages>
__device__ __forceinline__ void copy_dq(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                        DqStages<kStages>& stages, uint32_t count, uint32_t it0) {
    constexpr BackwardPlan kPlan = backward_plan(kId);
    constexpr int kPieces = kPlan.columns() / 64;
    constexpr uint32_t kPieceBytes = kDqPiece * sizeof(float);
    const bool in_turn = takes_turns(b, tiles);
    uint32_t stage = it0 * kPieces % kStages, phase = it0 * kPieces / kStages & 1;
    uint64_t* previous = nullptr;  // slot of the piece before, which is free when that has been read: waited for one piece later
    int* uncounted = nullptr;
    const auto visit = [&](int* counter, int m, uint32_t it) {
        Turn turn{};
        if (in_turn && b.deterministic) {
            mbarrier_wait(shared_address(&turns.turn_full[it & 1]), it >> 1 & 1);
            turn = turns.turn[it & 1];
            mbarrier_arrive(shared_address(&turns.turn_empty[it & 1]));
            fence_proxy_async_global();
        } else if (in_turn) {
            turn = take_turn<kPlan.block_m, kPlan.block_n>(b, tiles, w, counter, m);
        }
        float* sums = tiles.dq + (counter - tiles.turn) * (kPlan.block_m * kPlan.columns());
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece, sums += kDqPiece) {
            mbarrier_wait(shared_address(&stages.full[stage]), phase);
            if (turn.writes) bulk_store(sums, shared_address(stages.piece[stage]), kPieceBytes);
            else bulk_reduce_add(sums, shared_address(stages.piece[stage]), kPieceBytes);
            bulk_commit();
            bulk_wait_read<1>();
            if (previous) mbarrier_arrive(shared_address(previous));
            previous = &stages.empty[stage];
            if (++stage == kStages) stage = 0, phase ^= 1;
        }
        if (uncounted) {
            bulk_wait<kPieces>();
            fence_proxy_async_global();
            add_release(uncounted, 1);
            uncounted = nullptr;
        }
        if (turn.publishes && !b.deterministic) {
            bulk_wait<0>();
            fence_proxy_async_global();
            add_release(counter, 1);
        } else if (turn.publishes) {
            uncounted = counter;
        }
    };
    for_each_counter(b.forward, tiles, w, count, visit, it0);
    bulk_wait_read<0>();
    if (previous) mbarrier_arrive(shared_address(previous));
    if (uncounted) {
        bulk_wait<0>();
        fence_proxy_async_global();
        add_release(uncounted, 1);
    }
}

}  // namespace fa
