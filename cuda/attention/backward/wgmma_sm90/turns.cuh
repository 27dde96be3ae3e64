// wgmma_sm90/turns.cuh: which block of the Hopper backward may add its part of dQ to a query tile, and when.
//
// dQ of a query tile is the sum over the key blocks that meet it: floats in global memory. Each tile has a counter, and one of three rules:
//     zeroed          the sums start as zeros. A block adds whenever it comes.
//     claimed         the first block to come claims the tile and writes; the others wait until it has written, and then add. Nobody has to
//                     write zeros first. A block that has claimed a tile waits for nobody until it has written, so this cannot hang.
//     deterministic   at every tile blocks add in the order of their keys, each after the one before.
//
// Deterministic calls end, however few blocks run at a time and in whatever order they start. Key blocks are numbered so that, within a
// head, lower keys have lower numbers (find_key_block). Thread blocks take the numbers from a counter, and a block waits only for lower
// numbers. So everything that a block waits for has been taken by running thread blocks, and the lowest unfinished block waits for nobody.
// While a block waits, it holds back nothing that others need: it counts each tile as added before it takes the turn four tiles on. Two
// blocks that share keys add to different columns, and each has its own counter at every tile. Lengths on the device that are not in order
// break the numbering: some key blocks do not exist, and sequences share tiles. Then no block waits (QueryTiles::has_order).
//
// Threads that do nothing else wait for global memory, so that the products never wait for it:
//     one thread      takes the turns, some tiles ahead -> turn_full/turn_empty. Where tiles are claimed and two blocks share keys, one
//                     thread takes the turns for both: if each block waited for its own turns, the waits could form a circle.
//     one warpgroup   multiplies and adds (wgmma_sm90/dq.cuh) -> sent
//     one thread      counts the tile's part as added, once it is in memory
#pragma once

#include "attention/backward/wgmma_sm90/work.cuh"
#include "device/cluster.cuh"
#include "device/ptx.cuh"

namespace fa {

struct alignas(16) Turn {
    uint32_t writes;     // 1: the block writes its part; 0: it adds
    uint32_t publishes;  // 1: the block increments the counter once its part is in memory
};
constexpr uint32_t kTurnSlots = 4;
struct DqTurns {
    Turn turn[kTurnSlots];  // tile `it` uses slot it % 4
    uint64_t turn_full[kTurnSlots], turn_empty[kTurnSlots];
    uint64_t sent[kTurnSlots];  // the warps of dQ's warpgroup have issued their part
};
FA_HOST_DEVICE uint32_t turn_slot(uint32_t it) { return it % kTurnSlots; }
FA_HOST_DEVICE uint32_t turn_phase(uint32_t it) { return it / kTurnSlots & 1; }
// `blocks`: the number of blocks for which the turns are taken.
__device__ __forceinline__ void init_turns(DqTurns& turns, int blocks) {
    for (uint32_t i = 0; i < kTurnSlots; ++i) {
        mbarrier_init(shared_address(&turns.turn_full[i]), 1), mbarrier_init(shared_address(&turns.turn_empty[i]), blocks);
        mbarrier_init(shared_address(&turns.sent[i]), kDqWarps * kWarpArrivals);
    }
}
FA_HOST_DEVICE bool takes_turns(const BackwardParams& b, const QueryTiles& tiles) { return b.deterministic || !tiles.zeroed; }

// Waits until the counter, whose last known value is `seen`, has reached `value`.
__device__ __forceinline__ void wait_for_counter(const int* counter, int seen, int value) {
    for (; seen < value; seen = load_acquire(counter)) __nanosleep(20);
    fence_proxy_async_global();
}
// Of the key blocks that add to a query tile, those before this one.
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int blocks_before(const BackwardWork& w, const Visited& at) {
    const Range blocks = key_blocks_of({w.left, w.right, w.seqlen_q, w.seqlen_k}, at.m * kBlockM, kBlockM, kBlockN);
    return w.key0 / kBlockN - blocks.begin;
}
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int blocks_before(const BackwardWork&, const VisitedSeen& at) {
    return at.before;
}
template <int kBlockM, int kBlockN>
__device__ __forceinline__ int blocks_before(const BackwardWork& w, const VisitedInterval& at) {
    return at.before >= 0 ? at.before : blocks_before<kBlockM, kBlockN>(w, static_cast<const Visited&>(at));
}
// In order: waits until all key blocks before this one have added to the query tile. True if there are none: the block writes its part.
template <int kBlockM, int kBlockN, typename Visit>
__device__ __forceinline__ bool wait_in_order(const QueryTiles& tiles, const BackwardWork& w, const int* counter, const Visit& at) {
    const int before = blocks_before<kBlockM, kBlockN>(w, at);
    if (before > 0 && w.waits) wait_for_counter(counter, load_acquire(counter), before);
    return before == 0 && !tiles.zeroed;
}
// Waits until the block may add to a tile, or claims the tile if the block is the first to come.
__device__ __forceinline__ Turn claim(const QueryTiles& tiles, int* counter) {
    constexpr int kClaimed = 1;
    const int seen = compare_exchange_acquire(counter, 0, kClaimed);
    const bool first = seen == 0;
    if (!first) wait_for_counter(counter, seen, kClaimed + tiles.blocks);
    return {first, first};  // two constants would be read from memory, which takes as long as the claim
}

// The thread that takes turns. Of kBlocks blocks that share keys: in order, each for itself (`rank`); else the thread of block 0, for all.
template <int kBlockM, int kBlockN, int kBlocks, typename Work>
__device__ __forceinline__ void take_turns(const BackwardParams& b, const QueryTiles& tiles, const Work& w, DqTurns& turns, uint32_t rank) {
    const bool in_order = b.deterministic;
    // A claimed tile keeps others waiting until it is written, so only few are claimed ahead.
    const uint32_t ahead = in_order ? kTurnSlots : 2;
    const auto visit = [&](uint32_t it, auto at, uint32_t tile) {
        const uint32_t slot = turn_slot(it), full = shared_address(&turns.turn_full[slot]);
        if (it >= ahead) mbarrier_wait(shared_address(&turns.turn_empty[turn_slot(it - ahead)]), turn_phase(it - ahead));
        int* counter = tiles.turn + int64_t(tile) * kBlocks;
        if (in_order || kBlocks == 1) {
            turns.turn[slot] = in_order ? Turn{wait_in_order<kBlockM, kBlockN>(tiles, w, counter + rank, at), true} : claim(tiles, counter);
            mbarrier_arrive(full);
        } else {
            const Turn turn = claim(tiles, counter);
            for (uint32_t block = 0; block < kBlocks; ++block) {
                mbarrier_arrive_expect_tx_cluster(cluster_address(full, block), sizeof turn);
                store_async_16(cluster_address(shared_address(&turns.turn[slot]), block), {turn.writes, turn.publishes, 0, 0},
                               cluster_address(full, block));
            }
        }
    };
    for_each_query_tile(b.forward, tiles, w, visit);
}
// The thread that counts the block's part of a tile as added. `count`: tiles of the walk.
template <int kBlocks, typename Work>
__device__ __forceinline__ void publish_turns(const BackwardParams& b, const QueryTiles& tiles, const Work& w, DqTurns& turns,
                                              uint32_t rank, uint32_t count) {
    const bool in_order = b.deterministic;
    const auto visit = [&](uint32_t it, Visited, uint32_t tile) {
        const uint32_t slot = turn_slot(it), empty = shared_address(&turns.turn_empty[slot]);
        mbarrier_wait(shared_address(&turns.sent[slot]), turn_phase(it));
        if (turns.turn[slot].publishes) add_release(tiles.turn + int64_t(tile) * kBlocks + (in_order ? rank : 0), 1);
        if (in_order || kBlocks == 1) mbarrier_arrive(empty);
        else if (it + 2 < count)
            mbarrier_arrive_cluster(cluster_address(empty, 0));  // else nobody waits, and the other block may have ended
    };
    for_each_query_tile(b.forward, tiles, w, visit);
}

}  // namespace fa
