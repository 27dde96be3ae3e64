// wgmma_sm90_dq.cuh: how dQ leaves a block of the Hopper backward: products of its own warpgroup, added to sums in global memory in turn
// (wgmma_sm90_turns.cuh).
//
// send_dq adds from registers. At head dim 128 the warpgroup hands its pieces through shared memory to a thread that adds them by bulk
// copies instead (stage_dq, copy_dq). There is room for that at this head dim, and it is 5 % faster from seqlen 8192 on without a mask
// (H200).
#pragma once

#include "attention/backward/wgmma_sm90_turns.cuh"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

// The warpgroup multiplies dQ = dS^T K and adds it from registers: of every tile kPieces pieces of 64 queries x 64 columns, from piece
// kFirst on. `keys`: the rows of K, with the pieces' columns. `ds`: two slots of dS, a row per key. wait(it) returns when dS of tile `it`
// is there; release(it) is called when it has been read.
//
// With 64 columns the product is dQ^T = K^T dS, so that some of K^T can stay in registers and need not come from shared memory, whose
// bandwidth is the bound.
template <typename T, BackwardPlanId kId, int kFirst, int kPieces, typename Wait, typename Release>
__device__ __forceinline__ void send_dq(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                        const T* keys, const T* ds, int count, const Wait& wait, const Release& release, uint32_t it0 = 0) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
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
        wait(it0);  // by then hidden keys are zeros
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

// The other way out leads through shared memory: the warpgroup stores its pieces to slots, and one thread sends them by bulk copies, which
// L2 adds a line at a time.
template <int kStages>
struct DqStages {
    float piece[kStages][kDqPiece];
    uint64_t full[kStages], empty[kStages];
};
template <typename T, BackwardPlanId kId, int kStages, typename Wait, typename Release>
__device__ __forceinline__ void stage_dq(DqStages<kStages>& stages, const T* keys, const T* ds, int count, const Wait& wait,
                                         const Release& release, uint32_t it0) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
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
// The thread that sends the pieces and counts them. Deterministic: another thread takes the turns ahead, and a tile is counted while the
// next one is on its way. Else this thread takes each turn itself, when it needs it: a block that has caught up with another one would wait
// for every tile that was claimed ahead, which costs 1 % (causal, H200). A claimed tile is counted at once, because other blocks may be
// waiting for it.
template <BackwardPlanId kId, int kStages>
__device__ __forceinline__ void copy_dq(const BackwardParams& b, const QueryTiles& tiles, const BackwardWork& w, DqTurns& turns,
                                        DqStages<kStages>& stages, uint32_t count, uint32_t it0) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kPieces = kPlan.columns() / 64;
    constexpr uint32_t kPieceBytes = kDqPiece * sizeof(float);
    const bool in_turn = takes_turns(b, tiles);
    uint32_t stage = it0 * kPieces % kStages, phase = it0 * kPieces / kStages & 1;
    uint64_t* previous = nullptr;  // slot of the piece before; it is free once that piece has been read, which is awaited one piece later
    int* uncounted = nullptr;      // counter of the tile before, whose pieces are still on their way
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
