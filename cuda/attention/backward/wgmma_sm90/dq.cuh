// wgmma_sm90/dq.cuh: how dQ leaves a block of the Hopper backward. A separate warpgroup multiplies dQ and adds it to sums in global memory,
// when it is the block's turn (wgmma_sm90/turns.cuh).
//
// send_dq adds from registers. At head dim 128 the warpgroup instead hands its pieces through shared memory to a thread that adds them by
// bulk copies (stage_dq, copy_dq). This head dim leaves room for that, and it is 5 % faster from seqlen 8192 on without a mask (H200).
//
// Where a block has all keys of its sequence, nothing is added: it stores rows of dQ (store_dq).
#pragma once

#include "attention/backward/wgmma_sm90/turns.cuh"
#include "device/mma.cuh"
#include "device/movmatrix.cuh"
#include "device/ptx.cuh"
#include "device/wgmma.cuh"

namespace fa {

template <BackwardPlanId kId>  // distance to the next 64 queries of dS, or 64 columns of K
inline constexpr uint32_t kDqOperandPiece = kBackwardPlan<kId>.block_n * kChunkRowBytes >> 4;

// The product of a piece of 64 queries x 64 columns. columns, rows: descriptors of K and of dS. held: the last kHeld steps of K^T.
template <typename T, BackwardPlanId kId, int kHeld, int kRows>
__device__ __forceinline__ void multiply_dq_piece(float (&dq)[32], uint32_t columns, uint32_t rows, const uint32_t (&held)[kRows][4]) {
    constexpr int kSteps = kBackwardPlan<kId>.block_n / 16;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {  // both operands run along their rows, the keys
        const uint64_t k = descriptor_from(columns, descriptor_row_step(i)), s = descriptor_from(rows, descriptor_row_step(i));
        if constexpr (kBackwardPlan<kId>.columns() == 64) {
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
}

// Stores a piece to rows of dQ, 16 bytes a lane. rows: column 0 of the piece, in the tile's first row; `columns` of it are inside. first:
// the piece's first row in the tile, of which `count` rows are inside. lse: of the tile. A row that sees no key gets zeros
// (empty_rows.cuh).
template <typename T, BackwardPlanId kId>
__device__ __forceinline__ void store_dq_piece(const float (&dq)[32], T* rows, int64_t stride, int first, int count, int columns,
                                               const float* lse, float scale) {
    const int self = opaque(int(threadIdx.x)) % 128, lane = self % 32, quad = lane % 4, warp = self / 32;
    const auto store = [&](int row, int column, uint32_t(&pairs)[4]) {
        transpose_quad(pairs, quad);
        if (row >= count || column >= columns) return;
        const bool empty = lse[quad_order(row)] == INFINITY;
        *reinterpret_cast<uint4*>(rows + row * stride + column) =
            empty ? make_uint4(0, 0, 0, 0) : make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    };
#pragma unroll
    for (int x = 0; x < 2; ++x)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int e = 4 * (4 * x + j) + 2 * r;
                pairs[j] = pack_16<T>(dq[e] * scale, dq[e + 1] * scale);
                // Of dQ^T: two queries of a column become two columns of a query.
                if constexpr (kBackwardPlan<kId>.columns() == 64) pairs[j] = transposed_8x8(pairs[j]);
            }
            if constexpr (kBackwardPlan<kId>.columns() == 64) store(first + 8 * (4 * x + quad) + lane / 4, 16 * warp + 8 * r, pairs);
            else store(first + 16 * warp + lane / 4 + 8 * r, 8 * (4 * x + quad), pairs);
        }
}
// The warpgroup multiplies dQ and stores it, where QueryTiles::direct. The arguments are those of send_dq.
template <typename T, BackwardPlanId kId, int kFirst, int kPieces, typename Work, typename Wait, typename Release>
__device__ __forceinline__ void store_dq(const BackwardParams& b, const QueryTiles& tiles, const Work& w, const T* keys, const T* ds,
                                         int count, const Wait& wait, const Release& release) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n;
    uint32_t low_keys = descriptor_low(shared_address(keys), kBlockN * kChunkRowBytes);
    uint32_t low_ds = descriptor_low(shared_address(ds), kBlockN * kChunkRowBytes);
    const uint32_t it0 = w.it0;
    float dq[32];
    const uint32_t none[1][4] = {};
    if (count == 0) return;
#pragma unroll 1
    for (uint32_t it = it0; it < it0 + uint32_t(count); ++it) {
        uint32_t columns = low_keys, rows = low_ds + (it & 1) * (kBlockM / 64 * kDqOperandPiece<kId>);
        // Found before the product, whose sums take half of the registers.
        const Visited at = visited(w, int(it - it0));
        const int row0 = at.m * kBlockM;
        T* const tile = static_cast<T*>(b.dq.data) +
                        (w.batch * b.dq.batch + row0 * b.dq.row + (w.head_k * b.forward.group + at.head) * b.dq.head + kFirst * 64);
        const uint32_t number = first_query_tile(b.forward, tiles, w) + uint32_t(at.head * tiles.tiles + at.m);
        wait(it);
        __syncwarp();
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece) {
            multiply_dq_piece<T, kId, 0>(dq, columns, rows, none);
            if (piece == kPieces - 1) release(it);
            const int column0 = kBlockM > 64 ? 0 : piece * 64, first = kBlockM > 64 ? piece * 64 : 0;
            store_dq_piece<T, kId>(dq, tile + column0, b.dq.row, first, w.seqlen_q - row0, b.forward.headdim - kFirst * 64 - column0,
                                   tiles.lse + int64_t(number) * kBlockM, b.forward.scale);
            (kBlockM > 64 ? rows : columns) += kDqOperandPiece<kId>;
        }
    }
}
// A thread block, or a pair of them, has read some_large for the last time. The last one of the grid clears it.
__device__ __forceinline__ void end_direct(const QueryTiles& tiles, int enders) {
    if (tiles.direct && atomicAdd(tiles.ended(), 1) == enders - 1) *tiles.some_large() = 0;
}

// The warpgroup multiplies dQ = dS^T K and adds it from registers: of every tile, kPieces pieces of 64 queries x 64 columns, from piece
// kFirst on. `keys`: the rows of K, with the columns of these pieces. `ds`: two slots of dS, a row per key. wait(it) returns when dS of
// tile `it` is there; release(it) is called when dS has been read.
//
// With 64 columns the product is dQ^T = K^T dS, so that some of K^T can stay in registers. That saves reads of shared memory, whose
// bandwidth is the bound.
template <typename T, BackwardPlanId kId, int kFirst, int kPieces, typename Work, typename Wait, typename Release>
__device__ __forceinline__ void send_dq(const BackwardParams& b, const QueryTiles& tiles, const Work& w, DqTurns& turns, const T* keys,
                                        const T* ds, int count, const Wait& wait, const Release& release) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kBlockM = kPlan.block_m, kBlockN = kPlan.block_n, kHeld = kPlan.held_steps(std::is_same_v<T, __half>);
    uint32_t low_keys = descriptor_low(shared_address(keys), kBlockN * kChunkRowBytes);
    uint32_t low_ds = descriptor_low(shared_address(ds), kBlockN * kChunkRowBytes);
    const uint32_t it0 = uniform(w.it0);
    float dq[32];
    uint32_t held[kHeld ? kHeld : 1][4];  // the last steps of K^T
    if (count == 0) return;
    if constexpr (kHeld > 0) {
        wait(it0);  // hidden keys have been zeroed by then
        const int lane = threadIdx.x % 32, key = kBlockN - kHeld * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int i = 0; i < kHeld; ++i)
            ldmatrix_x4_trans(held[i],
                              shared_address(keys) + swizzled_offset(kBlockN, key + 16 * i, threadIdx.x % 128 / 32 * 2 + lane / 8 % 2));
    }
    int step = w.start_step;
    constexpr bool kSkips = kPlan.masks || kPlan.intervals;
    int round = kSkips ? w.end_m - 1 : 0;  // in order
    uint32_t tile0 = first_query_tile(b.forward, tiles, w) + (w.in_order && !kSkips ? w.end_m - 1 : 0);
#pragma unroll 1
    for (uint32_t it = it0; it < it0 + uint32_t(count); ++it) {
        uint32_t columns = low_keys, rows = low_ds + (it & 1) * (kBlockM / 64 * kDqOperandPiece<kId>);
        wait(it);
        __syncwarp();
        uint32_t tile;
        if constexpr (kSkips) tile = tile0 + (w.in_order ? step * tiles.tiles : 0) + tile_of_step(w, w.in_order ? round : step);
        else tile = tile0 + (w.in_order ? step * tiles.tiles : step);
        float* sums = tiles.dq + int64_t(tile) * (kBlockM * kPlan.columns()) + kFirst * kDqPiece + opaque(int(threadIdx.x)) % 128 * 4;
        bool writes = false;
        const auto take_turn = [&] {
            if (!takes_turns(b, tiles)) return;
            const uint32_t now = opaque(it);
            mbarrier_wait(shared_address(&turns.turn_full[turn_slot(now)]), turn_phase(now));
            writes = turns.turn[turn_slot(now)].writes;
            __syncwarp();
        };
        if (kPlan.general) take_turn();
#pragma unroll 1
        for (int left = kPieces; left > 0; --left, sums += kDqPiece) {
            multiply_dq_piece<T, kId, kHeld>(dq, columns, rows, held);
            if (left == 1) release(it);
            if (!kPlan.general && left == kPieces) take_turn();  // after the product, which need not wait for the turn
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float* place = sums + i * 512;
                if (writes) *reinterpret_cast<float4*>(place) = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
                else red_add_4(place, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
            }
            (kBlockM > 64 ? rows : columns) += kDqOperandPiece<kId>;
        }
        if (takes_turns(b, tiles)) {
            __syncwarp();
            if (arrives(threadIdx.x % 32)) mbarrier_arrive(shared_address(&turns.sent[turn_slot(it)]));
            __syncwarp();
        }
        step = next_step(step, w.first_step, w.end_step);
        if (kSkips && w.in_order) round -= step == w.start_step;
        else if (step == w.start_step) tile0 += w.in_order ? -1 : tiles.tiles;
    }
}

// The other way out leads through shared memory: the warpgroup stores its pieces to slots, and one thread sends them by bulk copies, which
// L2 adds a whole line at a time.
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
// One thread sends the pieces and counts them. It takes each turn only when it needs it: if tiles were claimed ahead, a block that has
// caught up with another would wait for each of them, which costs 1 % (causal, H200). A claimed tile is counted at once, because other
// blocks may be waiting for it.
template <BackwardPlanId kId, typename Work, int kStages>
__device__ __forceinline__ void copy_dq(const BackwardParams& b, const QueryTiles& tiles, const Work& w, DqStages<kStages>& stages) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kPieces = kPlan.columns() / 64;
    constexpr uint32_t kPieceBytes = kDqPiece * sizeof(float);
    const bool in_turn = takes_turns(b, tiles);
    uint32_t stage = w.it0 * kPieces % kStages, phase = w.it0 * kPieces / kStages & 1;
    uint64_t* previous = nullptr;  // slot of the previous piece; free once that piece has been read, which is awaited one piece later
    const auto visit = [&](uint32_t, Visited, uint32_t tile) {
        int* counter = tiles.turn + tile;
        Turn turn{};
        if (in_turn) turn = claim(tiles, counter);
        float* sums = tiles.dq + int64_t(tile) * (kPlan.block_m * kPlan.columns());
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
        if (turn.publishes) {
            bulk_wait<0>();
            fence_proxy_async_global();
            add_release(counter, 1);
        }
    };
    for_each_query_tile(b.forward, tiles, w, visit);
    bulk_wait_read<0>();
    if (previous) mbarrier_arrive(shared_address(previous));
}
// In order, two threads send: one the even tiles of the walk, the other the odd tiles, each from its own slots. So a tile is counted as
// soon as it is in memory, for which the next block waits, and no tile waits until the one before it is there.
template <BackwardPlanId kId, typename Work, int kStages>
__device__ __forceinline__ void copy_dq_in_order(const BackwardParams& b, const QueryTiles& tiles, const Work& w, DqStages<kStages>& stages,
                                                 uint32_t odd) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    constexpr int kPieces = kPlan.columns() / 64;
    constexpr uint32_t kPieceBytes = kDqPiece * sizeof(float);
    static_assert(kStages == 2 * kPieces, "a tile of dQ for each of the two threads");
    const auto visit = [&](uint32_t it, auto at, uint32_t tile) {
        if (it % 2 != odd) return;
        int* counter = tiles.turn + tile;
        float* sums = tiles.dq + int64_t(tile) * (kPlan.block_m * kPlan.columns());
        const bool writes = wait_in_order<kPlan.block_m, kPlan.block_n>(tiles, w, counter, at);
#pragma unroll 1
        for (int piece = 0; piece < kPieces; ++piece, sums += kDqPiece) {
            const uint32_t stage = odd * kPieces + piece, from = shared_address(stages.piece[stage]);
            mbarrier_wait(shared_address(&stages.full[stage]), it >> 1 & 1);
            if (writes) bulk_store(sums, from, kPieceBytes);
            else bulk_reduce_add(sums, from, kPieceBytes);
            bulk_commit();
        }
        bulk_wait_read<0>();
        for (int piece = 0; piece < kPieces; ++piece) mbarrier_arrive(shared_address(&stages.empty[odd * kPieces + piece]));
        bulk_wait<0>();
        fence_proxy_async_global();
        add_release(counter, 1);
    };
    for_each_query_tile(b.forward, tiles, w, visit);
}

}  // namespace fa
