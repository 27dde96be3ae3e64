// warp.cuh: a warp of mma_sm80's main kernel: what it copies, and what it computes in a step.
#pragma once

#include "attention/backward/mma_sm80/side.cuh"
#include "attention/common/interval_bounds.cuh"

namespace fa {
namespace {

// The keys of a block: from key0 on, of one key head.
struct BackwardWork {
    int b, head_k, key0;
};

template <typename T, BackwardTile const& kTile, int kD, int kDv>
struct MainSmem {
    alignas(128) T k[kTile.block_n * kD];
    alignas(128) T v[kTile.block_n * kDv];
    alignas(128) T q[kTile.stages_q][kTile.block_m * kD];
    alignas(128) T dout[kTile.stages_dout][kTile.block_m * kDv];
    alignas(128) T p[kTile.block_m * kTile.block_n];
    alignas(128) T ds[kTile.block_m * kTile.block_n];
    alignas(16) float lse_delta[kTile.stages_q][2][kTile.block_m];
    // State of the block that every step needs. Kept here, it takes no registers between the steps.
    BackwardWork work;
    int seqlen_q, seqlen_k, shift;
    KeyRange rows, whole_rows;  // queries that see some keys of this block; queries that see all of them
    int first_tile, last_tile;  // first and last tile of `rows`
    const T *q_rows, *dout_rows;
    float *sums, *stats;  // of query head 0, in the workspace
    const float2* large;  // of query head 0, in the workspace
    bool some_large;      // some row of the call may be large: then every step runs the code for edges
    HiddenBounds bounds;  // of masks by intervals, over the keys of this block and the heads that read them

    // The lengths that decide which pairs are visible, without row offsets. volatile: read again where used, not kept in registers.
    __device__ __forceinline__ Sequence lengths() const volatile {
        Sequence s{};
        s.seqlen_q = seqlen_q, s.seqlen_k = seqlen_k, s.shift = shift;
        return s;
    }
};

// Blocks start in order of their index: section by section. In a section the first keys of every head come first, because under a causal
// mask the most rows see them.
__device__ __forceinline__ BackwardWork work_of(const MmaBackwardParams& params, int block, int block_n) {
    const AttentionParams& p = params.backward.forward;
    const int first = block / (params.section * params.tiles_k) * params.section, index = block % (params.section * params.tiles_k);
    const int heads = min(params.section, p.nheads_k * p.batch - first), head = first + index % heads;
    return {head / p.nheads_k, head % p.nheads_k, index / heads * block_n};
}

// How the warps divide S, dK and dV, and dQ: rows x columns of warps, and what of it a warp has.
template <int kD, int kDv, MmaSm kSm>
struct MainShares {
    static constexpr BackwardTile kTile = kBackwardTileOf<kD, kDv, kSm>;
    static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = kTile.warps * 32;
    static constexpr int kStagesQ = kTile.stages_q, kStagesDout = kTile.stages_dout;
    static_assert(kStagesQ >= kStagesDout && kStagesQ <= 2, "the next Q is asked for no later than the next dO");
    static constexpr int kRowsS = kTile.warps_m_s, kColumnsS = kTile.warps / kRowsS;
    static constexpr int kRowsKv = kTile.warps_n_kv, kColumnsKv = kTile.warps / kRowsKv;
    static constexpr int kRowsDq = kTile.warps_m_dq, kColumnsDq = kTile.warps / kRowsDq;
    static constexpr int kMmasS = kBlockM / kRowsS / 16, kTilesS = kBlockN / kColumnsS / 8, kMmasKv = kBlockN / kRowsKv / 16;
    static constexpr int kTilesK = kD / kColumnsKv / 8, kTilesV = kDv / kColumnsKv / 8, kMmasDq = kBlockM / kRowsDq / 16,
                         kTilesDq = kD / kColumnsDq / 8;
    static_assert(kMmasS * kRowsS * 16 == kBlockM && kTilesS * kColumnsS * 8 == kBlockN && kTilesS % 2 == 0, "S is shared out evenly");
    static_assert(kMmasKv * kRowsKv * 16 == kBlockN && kTilesK * kColumnsKv * 8 == kD && kTilesK % 2 == 0 &&
                      kTilesV * kColumnsKv * 8 == kDv && kTilesV % 2 == 0,
                  "dK and dV are shared out evenly");
    static_assert(kMmasDq * kRowsDq * 16 == kBlockM && kTilesDq * kColumnsDq * 8 == kD && kTilesDq % 2 == 0, "dQ is shared out evenly");
    static constexpr int kPartTiles = kD > 192 || kMmasDq *kTilesDq > 16 ? 8 / kMmasDq : kTilesDq,
                         kPartsDq = kTilesDq / kPartTiles;  // tiles of dQ at a time; parts of dQ
    // On an edge, half of a step may be hidden: rows above the first keys, or keys past the last rows. Beyond head dim 192 there are no
    // registers for skipping halves.
    static constexpr bool kHalfRows = kBlockM > kBlockN &&kD <= 192, kHalfKeys = kBlockN > kBlockM;
    // The first S begins before V and dO have landed. With three blocks on an SM, the others work in that time. Beyond head dim 192
    // registers are short.
    static constexpr bool kEarlyStart = kTile.blocks_per_sm < 3 && kD <= 192;
    // A warp computes its S and dP in parts, each of which takes at most 64 registers.
    static constexpr int kPartTilesS = kMmasS * kTilesS <= 8 ? kTilesS : 8 / kMmasS, kPartsS = kTilesS / kPartTilesS;
    static_assert(kPartTilesS % 2 == 0 && kPartsS * kPartTilesS == kTilesS, "S is cut into even parts");
};

// A step is a tile of queries of one of the heads that read a block's keys.
struct MainStep {
    int head, tile;
};

// A warp of the main kernel. The register tiles are arguments of its functions.
template <typename T, int kD, int kDv, MmaSm kSm, Scores kScores>
struct MainWarp : MainShares<kD, kDv, kSm> {
    using Shares = MainShares<kD, kDv, kSm>;
    using Shares::kBlockM, Shares::kBlockN, Shares::kThreads, Shares::kStagesQ, Shares::kStagesDout;
    using Shares::kColumnsDq, Shares::kMmasDq, Shares::kTilesDq, Shares::kPartTiles, Shares::kPartsDq;
    using Shares::kColumnsKv, Shares::kMmasKv, Shares::kTilesK, Shares::kTilesV, Shares::kHalfRows, Shares::kHalfKeys;
    using Shares::kRowsS, Shares::kColumnsS, Shares::kMmasS, Shares::kTilesS, Shares::kPartTilesS, Shares::kPartsS, Shares::kEarlyStart;
    static constexpr bool kGeneral = kScores == Scores::kGeneral, kAnyAlignment = kSm == MmaSm::kAny;
    using Smem = MainSmem<T, kBackwardTileOf<kD, kDv, kSm>, kD, kDv>;
    using TileQ = SharedTile<T, kD>;
    using TileV = SharedTile<T, kDv>;
    using TileP = SharedTile<T, kBlockN>;
    using RowStatistics = float[kMmasS][2];
    using PartS = float[kMmasS][kPartTilesS][4];
    using PartDq = float[kMmasDq][kPartTiles][4];
    using GradientK = float[kMmasKv][kTilesK][4];
    using GradientV = float[kMmasKv][kTilesV][4];
    static constexpr uint32_t kToDs = sizeof Smem::p;  // dS follows P, in the same order

    const MmaBackwardParams& params;
    const BackwardParams& backward;
    const AttentionParams& p;
    Smem& smem;
    int lane, warp;
    int s_row, s_key, kv_key, kv_column, dq_row, dq_column;  // where the warp's shares begin
    uint32_t q_a, dout_a, k_b, v_b, p_store;                 // addresses of this lane
    MainStep step;
    int end_head;
    unsigned steps = 0;  // completed

    // Consecutive warps go to different quarters of an SM. Warps that a causal diagonal leaves without work should not share a quarter.
    static __device__ __forceinline__ int row_of_s(int warp) {
        return (kRowsS < kColumnsS ? warp % kRowsS : warp / kColumnsS) * (16 * kMmasS);
    }
    static __device__ __forceinline__ int key_of_s(int warp) {
        return (kRowsS < kColumnsS ? warp / kRowsS : warp % kColumnsS) * (8 * kTilesS);
    }

    __device__ __forceinline__ MainWarp(const MmaBackwardParams& params, Smem& smem, MainStep first, int end_head)
        : params(params), backward(params.backward), p(backward.forward), smem(smem), step(first), end_head(end_head) {
        lane = threadIdx.x % 32;
        warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);  // the shuffle tells the compiler that it is uniform
        // This lane's row and 16-byte piece for ldmatrix. Operand A: 16 rows, then their second 16 bytes. Operand B: 8 rows, their second
        // 16 bytes, then the next 8 rows.
        const int row_a = lane % 16, piece_a = lane / 16, row_b = lane % 8 + lane / 16 * 8, piece_b = lane / 8 % 2;
        s_row = row_of_s(warp), s_key = key_of_s(warp);
        q_a = shared_address(smem.q) + TileQ::offset(s_row + row_a, piece_a);
        dout_a = shared_address(smem.dout) + TileV::offset(s_row + row_a, piece_a);
        k_b = shared_address(smem.k) + TileQ::offset(s_key + row_b, piece_b);
        v_b = shared_address(smem.v) + TileV::offset(s_key + row_b, piece_b);
        p_store = shared_address(smem.p) + TileP::offset(s_row + lane / 4, s_key / 8) + lane % 4 * 4;
        kv_key = warp / kColumnsKv * (16 * kMmasKv), kv_column = warp % kColumnsKv;
        dq_row = warp / kColumnsDq * (16 * kMmasDq), dq_column = warp % kColumnsDq;
    }

    // ---- copies to shared memory ----

    __device__ __forceinline__ void load_q(MainStep step, int stage) const {
        const int row0 = step.tile * kBlockM;
        const T* q = smem.q_rows + step.head * p.q.head + row0 * p.q.row;
        load_tile<kBlockM, kD, kThreads, kAnyAlignment>(smem.q[stage], q, p.q.row, smem.rows.begin - row0, smem.rows.end - row0, p.headdim,
                                                        params.aligned_q);
        if (threadIdx.x < kBlockM / 2) {  // lse and delta, 16 bytes for each thread
            const float* from = smem.stats + (int64_t(step.head) * params.workspace.tiles + step.tile) * (2 * kBlockM);
            cp_async_16(shared_address(smem.lse_delta[stage]) + 16 * threadIdx.x, from + 4 * threadIdx.x, 16);
        }
    }
    __device__ __forceinline__ void load_dout(MainStep step, int stage) const {
        const int row0 = step.tile * kBlockM;
        const T* dout = smem.dout_rows + step.head * backward.dout.head + row0 * backward.dout.row;
        load_tile<kBlockM, kDv, kThreads, kAnyAlignment>(smem.dout[stage], dout, backward.dout.row, smem.rows.begin - row0,
                                                         smem.rows.end - row0, p.headdim_v, params.aligned_dout);
    }
    // K, V and the first step.
    __device__ __forceinline__ void load_first(const BackwardWork& work, const Sequence& s, const KeyRange& keys) const {
        const T* k = static_cast<const T*>(p.k.data) + s.k + work.head_k * p.k.head + work.key0 * p.k.row;
        const T* v = static_cast<const T*>(p.v.data) + s.v + work.head_k * p.v.head + work.key0 * p.v.row;
        load_tile<kBlockN, kD, kThreads, kAnyAlignment>(smem.k, k, p.k.row, keys.begin - work.key0, keys.end - work.key0, p.headdim,
                                                        params.aligned_k);
        load_q(step, 0);
        cp_async_commit();  // S can begin before V and dO have landed
        load_tile<kBlockN, kDv, kThreads, kAnyAlignment>(smem.v, v, p.v.row, keys.begin - work.key0, keys.end - work.key0, p.headdim_v,
                                                         params.aligned_v);
        load_dout(step, 0);
        cp_async_commit();
    }
    // A key that the mask, the bias, intervals or blocks hide from every row has dS = 0, but 0 x NaN is NaN: its K must be zero when dQ
    // reads it.
    __device__ __forceinline__ void zero_hidden_keys(const BackwardWork& work, const Sequence& s, const KeyRange& rows) const {
        int* const visible = reinterpret_cast<int*>(smem.p);  // P is not yet in use
        if (threadIdx.x < kBlockN) visible[threadIdx.x] = 0;
        __syncthreads();
        const int column = opaque(threadIdx.x) % kBlockN, j = work.key0 + column;
        const bool own = (p.intervals.data && p.intervals.heads_of_entry < p.group) || (p.blocks.data && p.blocks.heads_of_entry < p.group);
        // own: each query head has its own intervals or blocks. Heads before step.head see nothing of this tile.
        const int end = p.mask.head || p.bias.head || own ? end_head : step.head + 1;
        bool seen = j >= s.seqlen_k;
        for (int head = step.head; head < end; ++head)
            for (int i = rows.begin + opaque(threadIdx.x) / kBlockN; !seen && i < rows.end; i += kThreads / kBlockN) {
                const KeyRange range = window_range(p, s, i);
                seen = j >= range.begin && j < range.end;
                if (p.mask.data) {
                    const int64_t at = work.b * p.mask.batch + head * p.mask.head + i * p.mask.row + j;
                    seen = seen && static_cast<const uint8_t*>(p.mask.data)[at];
                }
                if (p.bias.data) {
                    const int64_t at = work.b * p.bias.batch + head * p.bias.head + i * p.bias.row + j;
                    seen = seen && load_as_float(p.bias.data, at, p.bias_dtype) != -INFINITY;
                }
                if (p.intervals.data) seen = seen && !interval_hides(p, work.b, head, i, j);
                if (p.blocks.data) seen = seen && !block_hides(p, work.b, head, i, j);
            }
        if (seen) visible[column] = 1;
        cp_async_wait_all();
        __syncthreads();
        for (int x = threadIdx.x; x < kBlockN * TileQ::kPieces; x += kThreads)
            if (!visible[x / TileQ::kPieces]) reinterpret_cast<uint4*>(smem.k)[x] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ MainStep next() const {
        MainStep to{step.head, step.tile + 1};
        if (step.tile >= smem.last_tile) ++to.head, to.tile = smem.first_tile;
        if constexpr (kGeneral) to = seen_from(to);
        return to;
    }
    // The step, or the next one of which masks by intervals and by blocks leave some pair. Called by whole warps: each lane looks at
    // another tile, because a read of the mask takes as long as a part of a step.
    __device__ __forceinline__ MainStep seen_from(MainStep to) const {
        if (!p.hides_tiles()) return to;
        while (to.head < end_head) {
            const int tile = to.tile + opaque(int(threadIdx.x)) % 32, row0 = tile * kBlockM, last = min(row0 + kBlockM, smem.seqlen_q) - 1;
            bool seen = tile <= smem.last_tile && (!p.intervals.data || smem.bounds.seen_by(row0, last) != Seen::kNothing);
            if (seen && p.blocks.data) {
                const int key0 = smem.work.key0;
                const BlockRows rows{p, smem.work.b, to.head, row0, last};
                seen = rows.of_keys(key0, min(key0 + kBlockN, smem.seqlen_k)) != Seen::kNothing;
            }
            __syncwarp();
            const uint32_t lanes = __ballot_sync(~0u, seen);
            to.tile += lanes ? __ffs(int(lanes)) - 1 : 32;
            if (lanes) break;
            if (to.tile > smem.last_tile) ++to.head, to.tile = smem.first_tile;
        }
        return to;
    }
    // Sets smem.bounds; called by one warp.
    __device__ static __forceinline__ void find_bounds(const AttentionParams& p, Smem& smem, const BackwardWork& work, int seqlen_k) {
        HiddenBounds bounds;
        bounds.clear();
        for (int head = work.head_k * p.group; head < (work.head_k + 1) * p.group; head += p.intervals.heads_of_entry)
            for (int key = work.key0 + threadIdx.x % 32; key < min(work.key0 + kBlockN, seqlen_k); key += 32)
                bounds.add(hidden_rows(p, row_indices_of(p, work.b, head) + key * p.intervals.key));
        reduce_bounds(bounds);
        if (threadIdx.x % 32 == 0) smem.bounds = bounds;
    }
    __device__ __forceinline__ void load_next(bool with_q, bool with_dout) const {
        const MainStep to = next();
        if (to.head >= end_head) return;
        if (with_q) load_q(to, kStagesQ == 2 ? (steps + 1) % 2 : 0);
        if (with_dout) load_dout(to, kStagesDout == 2 ? (steps + 1) % 2 : 0);
    }

    __device__ __forceinline__ void walk(GradientK& dK, GradientV& dV) {
        constexpr bool kOneBody = kAnyAlignment || kD > 192;  // else steps without an edge have separate code without branches
#pragma unroll 1
        for (; step.head < end_head; ++steps) {
            if (kEarlyStart && steps == 0) cp_async_wait_group<1>();
            else cp_async_wait_all();
            __syncthreads();  // Q and dO of this step are here; nobody reads P, dS and the stages of the previous step any more
            if (kStagesQ == 2) load_next(true, kStagesDout == 2);
            const int row0 = step.tile * kBlockM;
            const bool cut = row0 < smem.whole_rows.begin || row0 + kBlockM > smem.whole_rows.end;
            if (kOneBody || cut || smem.some_large) compute<true>(dK, dV, cut);
            else compute<false>(dK, dV, cut);
            step = next();
        }
    }

    // ---- a step, once Q and dO are here ----

    // kEdge: the code for tiles with hidden pairs; cut: this tile has some.
    template <bool kEdge>
    struct Here {
        bool cut;
        int row0;
        unsigned stage_q;
        uint32_t to_q, to_dout;  // from the first stage of Q, dO
    };
    template <bool kEdge>
    __device__ __forceinline__ void compute(GradientK& dK, GradientV& dV, bool cut) const {
        const unsigned stage_q = kStagesQ == 2 ? steps % 2 : 0, stage_dout = kStagesDout == 2 ? steps % 2 : 0;
        const Here<kEdge> here{cut, step.tile * kBlockM, stage_q, stage_q * uint32_t(sizeof smem.q[0]),
                               stage_dout * uint32_t(sizeof smem.dout[0])};
        const bool does_s = sees(here, row_of_s(opaque(warp)), 16 * kMmasS, key_of_s(opaque(warp)), 8 * kTilesS);
        RowStatistics lse;
        load_rows(lse, here.stage_q, 0);
#pragma unroll
        for (int part = 0; part < kPartsS; ++part) compute_scores(here, lse, part, does_s);
        __syncthreads();  // P and dS are here
        add_gradients(here, dK, dV);
    }
    // Whether any of `count` rows of the tile from `row` on sees any of `keys` keys from `key` on.
    template <bool kEdge>
    __device__ __forceinline__ bool sees(const Here<kEdge>& here, int row, int count, int key, int keys) const {
        if (!kEdge || !here.cut) return true;
        const BackwardWork work = smem.work;
        const Sequence s = sequence_of(p, work.b);
        const KeyRange seeing = rows_seeing(p, s, work.key0 + key, min(work.key0 + key + keys, s.seqlen_k) - 1);
        return work.key0 + key < s.seqlen_k && here.row0 + row < seeing.end && here.row0 + row + count > seeing.begin;
    }

    // ---- S = Q K^T, P, dP = dO V^T, dS ----

    template <bool kEdge>
    __device__ __forceinline__ void compute_scores(const Here<kEdge>& here, const RowStatistics& lse, int part, bool does_s) const {
        constexpr int kTiles = kPartTilesS, kStepsD = kD / 16, kStepsDv = kDv / 16;
        PartS S, dP;
        clear(S), clear(dP);
        const uint32_t k_part = k_b + 8 * kTiles * part * TileQ::kPitch, v_part = v_b + 8 * kTiles * part * TileV::kPitch;
        if (does_s) multiply_rows<T, TileQ, TileQ, kStepsD>(S, q_a + here.to_q, k_part, Nothing{});
        if (kEarlyStart && part == 0 && steps == 0) {
            cp_async_commit();  // the copies for the next step
            cp_async_wait_group<1>();
            __syncthreads();  // V and the first dO are here
        }
        RowStatistics delta;
        if (kGeneral) {
            if (does_s) multiply_rows<T, TileV, TileV, kStepsDv>(dP, dout_a + here.to_dout, v_part, Nothing{});
            load_rows(delta, here.stage_q, 1);
            general_scores(here, lse, delta, S, dP, part);
            if (kEdge && here.cut) hide_pairs(here, S, part), hide_pairs(here, dP, part);
            store_scores(S, part, 0), store_scores(dP, part, kToDs);
            return;
        }
        if (kEdge && smem.some_large) {
#pragma unroll
            for (int m = 0; m < kMmasS; ++m) adjust_large(lse[m], large_of(m), flat(S[m]), large_score);
        }
        constexpr int kPairs = 2 * kMmasS * kTiles;  // pairs of neighbouring keys in a thread
        const auto exponentials = [&](int step) {    // a share of them for each step of dP
#pragma unroll
            for (int x = kPairs * step / kStepsDv; x < kPairs * (step + 1) / kStepsDv; ++x) {
                const int m = x / (2 * kTiles), half = x % 2;
                float* pair = S[m][x / 2 % kTiles] + 2 * half;
                pair[0] = exp2_approx(fmaf(pair[0], params.scale_log2, -lse[m][half]));
                pair[1] = exp2_approx(fmaf(pair[1], params.scale_log2, -lse[m][half]));
            }
        };
        if (does_s) multiply_rows<T, TileV, TileV, kStepsDv>(dP, dout_a + here.to_dout, v_part, exponentials);
        if (kEdge && here.cut) hide_pairs(here, S, part);
        store_scores(S, part, 0);
        load_rows(delta, here.stage_q, 1);
#pragma unroll
        for (int x = 0; x < kPairs; ++x) {
            const int m = x / (2 * kTiles), n = x / 2 % kTiles, half = x % 2;
            float *pair = dP[m][n] + 2 * half, *P = S[m][n] + 2 * half;
            pair[0] = P[0] * (pair[0] - delta[m][half]);
            pair[1] = P[1] * (pair[1] - delta[m][half]);
        }
        if (kEdge && here.cut) hide_pairs(here, dP, part);  // 0 x NaN is NaN
        store_scores(dP, part, kToDs);
    }
    // Values that few options need are computed where they are used.
    template <bool kEdge>
    __device__ __forceinline__ void general_scores(const Here<kEdge>& here, const RowStatistics& lse, const RowStatistics& delta, PartS& S,
                                                   PartS& dP, int part) const {
        const int lane = opaque(this->lane);
        const BackwardWork work = smem.work;
        const Sequence now = smem.lengths();
#pragma unroll
        for (int m = 0; m < kMmasS; ++m) {
            const int row = here.row0 + s_row + 16 * m + mma_row(lane, 0),
                      key = work.key0 + s_key + 8 * kPartTilesS * part + mma_column(lane, 0);
            const FragmentPlace at{work.b, step.head, row, key, now.seqlen_q, now.seqlen_k, now.shift};
            general_gradients<T>(p, at, lane % 4, lse[m], large_of(m), delta[m], flat(S[m]), flat(dP[m]));
        }
    }
    // lse (which = 0) or delta (1) of this thread's rows.
    __device__ __forceinline__ void load_rows(RowStatistics& x, unsigned stage, int which) const {
        const int from = row_of_s(opaque(warp)) + opaque(lane) / 4;
#pragma unroll
        for (int r = 0; r < 2 * kMmasS; ++r) x[r / 2][r % 2] = smem.lse_delta[stage][which][from + 8 * r];
    }
    // The RowBase of the thread's first row in m16 tile m.
    __device__ __forceinline__ const float2* large_of(int m) const {
        return smem.large + (int64_t(step.head) * params.workspace.tiles + step.tile) * kBlockM + row_of_s(opaque(warp)) + 16 * m +
               opaque(lane) / 4;
    }
    template <bool kEdge>
    __device__ __forceinline__ void hide_pairs(const Here<kEdge>& here, PartS& X, int part) const {
        const int who = opaque(warp);
        hide(X, p, smem.lengths(), here.row0 + row_of_s(who), smem.work.key0 + key_of_s(who) + 8 * kPartTilesS * part, lane);
    }
    // Stores P, or with kToDs dS.
    __device__ __forceinline__ void store_scores(const PartS& X, int part, uint32_t to) const {
#pragma unroll
        for (int x = 0; x < 2 * kMmasS * kPartTilesS; ++x) {
            const int m = x / (2 * kPartTilesS), n = x / 2 % kPartTilesS, half = x % 2;
            store_shared_4((p_store ^ (kPartTilesS * part + n) * 16) + to + (16 * m + 8 * half) * TileP::kPitch,
                           pack_16<T>(X[m][n][2 * half], X[m][n][2 * half + 1]));
        }
    }

    // ---- dV += P^T dO, dQ = dS K, dK += dS^T Q ----

    template <bool kEdge>
    __device__ __forceinline__ void add_gradients(const Here<kEdge>& at, GradientK& dK, GradientV& dV) const {
        // dQ is added between the steps of dK where registers hold both and Q need not be freed first.
        constexpr bool kAddsBetween = !kEdge && kPartsDq == 1 && kStagesQ == 2 && kD > 64;
        const int here = opaque(lane), row = here % 16, piece = here / 16;  // addresses that take no registers during S and dP
        const uint32_t p_a = shared_address(smem.p) + TileP::offset(here % 8 + here / 16 * 8, kv_key / 8 + here / 8 % 2);
        const uint32_t dout_b = shared_address(smem.dout) + TileV::offset(row, 2 * kv_column + piece);
        const uint32_t q_b = shared_address(smem.q) + TileQ::offset(row, 2 * kv_column + piece);
        const bool does_kv = sees(at, 0, kBlockM, opaque(warp) / kColumnsKv * (16 * kMmasKv), 16 * kMmasKv);
        const bool has_first_rows = !kHalfRows || sees(at, 0, kBlockM / 2, 0, kBlockN);
        constexpr int kSteps = kBlockM / 16, kHalf = kHalfRows ? kSteps / 2 : 0;
        if (does_kv) {
            if (has_first_rows)
                multiply_columns<T, TileP, TileV, OperandA::kTransposed, kColumnsKv, 0, kHalf>(dV, p_a, dout_b + at.to_dout);
            multiply_columns<T, TileP, TileV, OperandA::kTransposed, kColumnsKv, kHalf, kSteps>(dV, p_a, dout_b + at.to_dout);
        }
        if (kStagesQ == 2 && kStagesDout == 1) {
            __syncthreads();  // nobody reads dO any more
            load_next(false, true);
        }
        const bool does_dq = !backward.deterministic && sees(at, opaque(warp) / kColumnsDq * (16 * kMmasDq), 16 * kMmasDq, 0, kBlockN);
        float* const sums =
            smem.sums + (int64_t(step.head) * params.workspace.tiles + step.tile) * (kBlockM * kD) + warp * (kMmasDq * kTilesDq * 128);
        PartDq dQ;
        constexpr int kFragments = kMmasDq * kPartTiles;
        if (kAddsBetween && does_dq) multiply_dq(at, dQ, row, piece, 0);
        const auto add_share = [&](int x) {
            if (kAddsBetween && does_dq)
                add_dq(dQ, sums, 0, kFragments * (x - kHalf) / (kSteps - kHalf), kFragments * (x - kHalf + 1) / (kSteps - kHalf));
        };
        if (does_kv) {
            if (has_first_rows)
                multiply_columns<T, TileP, TileQ, OperandA::kTransposed, kColumnsKv, 0, kHalf>(dK, p_a + kToDs, q_b + at.to_q);
            multiply_columns<T, TileP, TileQ, OperandA::kTransposed, kColumnsKv, kHalf, kSteps>(dK, p_a + kToDs, q_b + at.to_q, add_share);
        } else if (kAddsBetween && does_dq) {
            add_dq(dQ, sums, 0, 0, kFragments);
        }
        if (kStagesQ == 1) {
            __syncthreads();  // nobody reads Q and dO any more
            load_next(true, true);
        }
        if (!kAddsBetween && does_dq)
#pragma unroll
            for (int part = 0; part < kPartsDq; ++part) multiply_dq(at, dQ, row, piece, part), add_dq(dQ, sums, part, 0, kFragments);
    }
    // row, piece: of this lane, for ldmatrix.
    template <bool kEdge>
    __device__ __forceinline__ void multiply_dq(const Here<kEdge>& here, PartDq& dQ, int row, int piece, int part) const {
        const bool has_last_keys = !kHalfKeys || sees(here, 0, kBlockM, kBlockN / 2, kBlockN / 2);
        const uint32_t ds_a = shared_address(smem.ds) + TileP::offset(dq_row + row, piece);
        const uint32_t k_columns =
            TileQ::advance(shared_address(smem.k) + TileQ::offset(row, 2 * dq_column + piece), kColumnsDq * kPartTiles / 2 * part);
        constexpr int kKeySteps = kBlockN / 16, kFirstHalf = kHalfKeys ? kKeySteps / 2 : kKeySteps;
        clear(dQ);
        multiply_columns<T, TileP, TileQ, OperandA::kAsStored, kColumnsDq, 0, kFirstHalf>(dQ, ds_a, k_columns);
        if (has_last_keys) multiply_columns<T, TileP, TileQ, OperandA::kAsStored, kColumnsDq, kFirstHalf, kKeySteps>(dQ, ds_a, k_columns);
    }
    // Adds fragments begin .. end - 1 of the part.
    __device__ __forceinline__ void add_dq(const PartDq& dQ, float* sums, int part, int begin, int end) const {
#pragma unroll
        for (int x = begin; x < end; ++x)
            red_add_fragment(sums + (x / kPartTiles * kTilesDq + kPartTiles * part + x % kPartTiles) * 128,
                             dQ[x / kPartTiles][x % kPartTiles], lane);
    }
};

}  // namespace
}  // namespace fa
