// wgmma_sm90_turns.cuh: which block of the Hopper backward may add its part of dQ to a query tile, and when.
//
// dQ of a query tile is the sum over the key blocks that meet it: floats in global memory. Each tile has a counter, and one of three rules:
//     zeroed          the sums start as zeros. A block adds whenever it comes.
//     claimed         the first block to come claims the tile and writes; the others wait until it has written, then they add. Nobody has
//                     to write zeros first. A block that has claimed a tile waits for nobody until it has written, so this cannot hang.
//     deterministic   blocks add in the same order at every tile. They start in this order, too (find_key_block).
// Threads that do nothing else wait for global memory, so that the products never do:
//     one thread      takes the turns, up to two tiles ahead -> turn_full/turn_empty. Of two blocks that share keys, one thread takes the
//                     turns for both: if each block waited for its own, the waits could form a circle.
//     one warpgroup   multiplies and adds (wgmma_sm90_dq.cuh) -> sent
//     one thread      counts the tile's part as added, once it is in memory
#pragma once

#include "attention/backward/wgmma_sm90_work.cuh"
#include "device/cluster.cuh"
#include "device/ptx.cuh"

namespace fa {

struct alignas(16) Turn {
    uint32_t writes;     // the block writes its part; else it adds
    uint32_t publishes;  // the block adds one to the counter once its part is in memory
};
struct DqTurns {
    Turn turn[2];  // of the even and of the odd tiles of the walk
    uint64_t turn_full[2], turn_empty[2];
    uint64_t sent[2];  // the warps of dQ's warpgroup have issued their part
};
__device__ __forceinline__ void init_turns(DqTurns& turns, int blocks) {
    for (int i = 0; i < 2; ++i) {
        mbarrier_init(shared_address(&turns.turn_full[i]), 1), mbarrier_init(shared_address(&turns.turn_empty[i]), blocks);
        mbarrier_init(shared_address(&turns.sent[i]), kDqWarps * kWarpArrivals);
    }
}
FA_HOST_DEVICE bool takes_turns(const BackwardParams& b, const QueryTiles& tiles) { return b.deterministic || !tiles.zeroed; }

// Waits until the counter, last `seen` so, is `value`.
__device__ __forceinline__ void wait_for_counter(const int* counter, int seen, int value) {
    for (; seen != value; seen = load_acquire(counter)) __nanosleep(64);
    fence_proxy_async_global();
}
// Waits for the block's turn at query tile m.
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

// Calls visit(counter, m, it) for the block's query tiles in the order of the walk, from iteration it0 on.
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
// The thread that takes turns; of kBlocks that share keys, the one in block 0.
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
// The thread that counts the block's part of a tile as added.
template <int kBlocks>
__device__ __forceinline__ void publish_turns(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                              uint32_t count, uint32_t it0 = 0) {
    const auto visit = [&](int* counter, int, uint32_t it) {
        const uint32_t slot = it & 1, empty = shared_address(&turns.turn_empty[slot]);
        mbarrier_wait(shared_address(&turns.sent[slot]), it >> 1 & 1);
        if (turns.turn[slot].publishes) add_release(counter, 1);
        if (kBlocks > 1 && it + 2 >= count) return;  // nobody waits for this arrival any more, and the other block may have ended
        if constexpr (kBlocks == 1) mbarrier_arrive(empty);
        else mbarrier_arrive_cluster(cluster_address(empty, 0));
    };
    for_each_counter(b.forward, tiles, w, count, visit, it0);
}

}  // namespace fa
