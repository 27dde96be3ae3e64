// mma_wide_sm80.cu: the gradients of attention on tensor cores for wide heads: fp16 and bf16, any head dim, every option, every GPU from
// sm_80 on. New against mma_sm80/kernel.cuh: P and dS go through memory, so that all five products are plain matrix products:
//
//     scores       S = Q K^T    P = exp(S - lse)    dP = dO V^T    dS = P (dP - delta)      -> P, dS in 16 bits
//     gradients    dV = P^T dO    dK = scale dS^T Q    dQ = scale dS K
//
// Head dim 512 makes that cheap: a pair of a query and a key costs 5120 operations, but only 4 bytes of P and dS written and about 10 read.
// dK and dV of 64 keys would fill all registers of a multiprocessor, and blocks that own a slice of their columns would compute S and dP
// once per slice: 7 products instead of 5. Here a block owns 128 x 128 pairs, or 128 rows x kN columns of one gradient. Every sum has one
// owner and a fixed order: the same bits every time, `deterministic` or not.
//
// Memory stays linear in the sequence: P and dS exist only for the pairs of one round, at most 8192 x 8192 of a head and 256 MB in all
// (Plan). Rounds run one after another on the stream. Where a gradient takes several rounds, its sums are kept in float32 in the workspace
// in between.
//
//     for each set of key heads                              as many as fit
//         for each part of their query heads                 more than one only where a group alone does not fit
//             for each chunk of keys, for each chunk of rows: scores, gradients
//
// One step of either kernel, 3 or 4 stages: wait for the copies of this step | start those of a later step | ldmatrix and mma.sync.
//
//     scores       128 x 128 pairs, 8 warps of 64 x 32, twice (S and dP); a step is 64 columns of Q and K, then of dO and V
//     gradients    128 x kN, 8 warps of 64 x kN / 4; a step is 32 rows of dO or Q, or 32 keys of K
//
// Bound by mma.sync: ldmatrix reads 192 bytes of shared memory per mma of scores, and 128 per mma of gradients at kN = 256. (An SM reads
// 128 bytes a cycle; its tensor cores take one mma.sync about every 1.6 cycles on sm_90.)
#include <algorithm>

#include "attention/backward/common/empty_rows.cuh"
#include "attention/backward/common/mma_sm80_parts.cuh"
#include "attention/kernels.h"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kTile = 128, kThreads = 256, kColumnWarps = 4;  // 2 x 4 warps
constexpr int kMmas = kTile / 2 / 16;                         // m16 tiles of a warp, along the rows
constexpr int kDepth = 64, kScoreStages = 3;                  // columns of a step of scores
constexpr int kWalk = 32, kWalkStages = 4;                    // rows, or keys, of a step of gradients
constexpr int kMostRows = 8192;                               // most rows, and most keys, of a chunk
constexpr int64_t kRoundBytes = int64_t(256) << 20;           // most bytes of P and dS together

constexpr int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// How a call is divided into rounds. Query heads and key heads are counted over the whole batch: key head h has the query heads from h x
// group on.
struct Plan {
    int64_t heads_k, heads, parts;       // of a round: key heads, query heads; parts: rounds that share the query heads of one group
    int chunks_q, chunks_k, rows, keys;  // chunks of a sequence; the size of a chunk, in whole tiles
    int64_t sums_q, sums_kv;             // floats of the sums kept between rounds; 0 if none are
    int64_t rows_of_call;                // padded: floats of delta, and of each statistic next to it
    bool flags;                          // store which keys have a dS, see scores_kernel
};
Plan plan_of(const AttentionParams& p) {
    Plan plan{};
    const auto chunks = [](int length) { return std::max(1, (length + kMostRows - 1) / kMostRows); };
    const auto chunk = [](int length, int chunks) { return int(std::max(up((length + chunks - 1) / chunks, kTile), int64_t(kTile))); };
    plan.chunks_q = chunks(p.seqlen_q), plan.rows = chunk(p.seqlen_q, plan.chunks_q);
    plan.chunks_k = chunks(p.seqlen_k), plan.keys = chunk(p.seqlen_k, plan.chunks_k);
    const int64_t fit = std::max<int64_t>(1, kRoundBytes / (int64_t(plan.rows) * plan.keys * 4));
    if (fit >= p.group) {
        plan.heads_k = std::min(fit / p.group, int64_t(p.nheads_k) * p.batch);
        plan.heads = plan.heads_k * p.group, plan.parts = 1;
    } else {
        plan.heads_k = 1, plan.parts = (p.group + fit - 1) / fit, plan.heads = (p.group + plan.parts - 1) / plan.parts;
        plan.parts = (p.group + plan.heads - 1) / plan.heads;
    }
    const auto padded = [](int columns) { return std::max(up(columns, 256), up(columns, 192)); };  // enough for any result of block_columns
    const int64_t d = padded(p.headdim), dv = padded(p.headdim_v);
    if (plan.chunks_k > 1) plan.sums_q = plan.heads * plan.chunks_q * plan.rows * d;
    if (plan.parts > 1 || plan.chunks_q > 1) plan.sums_kv = plan.heads_k * plan.chunks_k * plan.keys * (d + dv);
    plan.rows_of_call = up(backward_delta_count(p), 32);
    plan.flags = p.may_hide_keys();
    return plan;
}

struct WideParams {
    BackwardParams backward;
    void *p, *ds;   // [head][row][key] of the round
    uint8_t* used;  // [head][tile of rows][key]: some row of the tile has a nonzero dS for this key; nullptr = nothing hides keys
    float *delta, *sums_q, *sums_kv;
    CallStatistics statistics;
    float scale_log2;        // scale x log2(e)
    int rows, keys;          // of a chunk
    int all_rows, all_keys;  // of all chunks together
    // The current round.
    int head0, heads, head_k0, heads_k, row0, key0;
    bool first_q, last_q, first_kv, last_kv;  // whether this is the first, the last round of a dQ; of a dK and dV
    bool aligned_q, aligned_k, aligned_v, aligned_dout, aligned_dq, aligned_dk, aligned_dv;
};

// Whether some row of a tile of rows sees some key of a tile of keys.
__device__ __forceinline__ bool tile_seen(const AttentionParams& p, const Sequence& s, int row0, int key0) {
    if (row0 >= s.seqlen_q || key0 >= s.seqlen_k) return false;
    const KeyRange rows = rows_seeing(p, s, key0, min(key0 + kTile, s.seqlen_k) - 1);
    return row0 < rows.end && row0 + kTile > rows.begin;
}

// ---- scores ----

template <typename T>
struct ScoresSmem {
    alignas(128) T own[kScoreStages][kTile * kDepth];    // Q, dO
    alignas(128) T other[kScoreStages][kTile * kDepth];  // K, V
    int used[kTile];
};

template <typename T, Scores kScores>
__global__ void __launch_bounds__(kThreads, 1) scores_kernel(const __grid_constant__ WideParams params) {
    constexpr bool kGeneral = kScores == Scores::kGeneral;  // also for rows of any alignment
    constexpr int kTiles = kTile / kColumnWarps / 8;
    using Tile = SharedTile<T, kDepth>;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<ScoresSmem<T>*>(shared);
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int tiles_k = params.keys / kTile, tiles_q = params.rows / kTile;
    const int tile_k = blockIdx.x % tiles_k, tile_q = blockIdx.x / tiles_k % tiles_q, place = blockIdx.x / tiles_k / tiles_q;
    const int b = (params.head0 + place) / p.nheads, head = (params.head0 + place) % p.nheads;
    const int row0 = params.row0 + tile_q * kTile, key0 = params.key0 + tile_k * kTile;
    const Sequence s = sequence_of(p, b);
    if (!tile_seen(p, s, row0, key0)) return;  // nobody reads P and dS of this tile
    const KeyRange keys = keys_seen(p, s), rows = rows_seeing(p, s, key0, min(key0 + kTile, s.seqlen_k) - 1);
    if (kGeneral && threadIdx.x < kTile) smem.used[threadIdx.x] = 0;

    const T* q = static_cast<const T*>(p.q.data) + s.q + head * p.q.head + row0 * p.q.row;
    const T* k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head + key0 * p.k.row;
    const T* v = static_cast<const T*>(p.v.data) + s.v + head / p.group * p.v.head + key0 * p.v.row;
    const T* dout =
        static_cast<const T*>(backward.dout.data) + gradients_of(backward, b).dout + head * backward.dout.head + row0 * backward.dout.row;
    const int steps_s = (p.headdim + kDepth - 1) / kDepth, steps = steps_s + (p.headdim_v + kDepth - 1) / kDepth;
    const auto load = [&](int step) {
        const int stage = step % kScoreStages, column = (step < steps_s ? step : step - steps_s) * kDepth;
        const bool is_s = step < steps_s;
        const int columns = (is_s ? p.headdim : p.headdim_v) - column;
        load_tile<kTile, kDepth, kThreads, kGeneral>(smem.own[stage], (is_s ? q : dout) + column, is_s ? p.q.row : backward.dout.row,
                                                     rows.begin - row0, rows.end - row0, columns,
                                                     is_s ? params.aligned_q : params.aligned_dout);
        load_tile<kTile, kDepth, kThreads, kGeneral>(smem.other[stage], (is_s ? k : v) + column, is_s ? p.k.row : p.v.row,
                                                     keys.begin - key0, keys.end - key0, columns,
                                                     is_s ? params.aligned_k : params.aligned_v);
    };
#pragma unroll
    for (int step = 0; step < kScoreStages - 1; ++step) {
        if (step < steps) load(step);
        cp_async_commit();
    }
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const int warp_row = warp / kColumnWarps * (16 * kMmas), warp_key = warp % kColumnWarps * (8 * kTiles);
    const uint32_t own = shared_address(smem.own) + Tile::offset(warp_row + lane % 16, lane / 16);
    const uint32_t other = shared_address(smem.other) + Tile::offset(warp_key + lane % 8 + lane / 16 * 8, lane / 8 % 2);
    float S[kMmas][kTiles][4], dP[kMmas][kTiles][4];
    const auto multiply = [&](float(&C)[kMmas][kTiles][4], int begin, int end) {
        clear(C);
#pragma unroll 1
        for (int step = begin; step < end; ++step) {
            cp_async_wait_group<kScoreStages - 2>();
            __syncthreads();  // this step is here; nobody reads the previous step's stage any more
            const uint32_t to = step % kScoreStages * uint32_t(sizeof smem.own[0]);
            multiply_rows<T, Tile, Tile, kDepth / 16>(C, own + to, other + to, [&](int x) {
                if (x > 0) return;  // the copies are started while the tensor cores work
                if (step + kScoreStages - 1 < steps) load(step + kScoreStages - 1);
                cp_async_commit();
            });
        }
    };
    multiply(S, 0, steps_s);
    multiply(dP, steps_s, steps);

    float lse[kMmas][2], delta[kMmas][2];
#pragma unroll
    for (int r = 0; r < 2 * kMmas; ++r) {
        const int row = row0 + warp_row + 16 * (r / 2) + mma_row(lane, r % 2 * 2);
        const int64_t at = lse_offset(p, s, head) + row;
        const float own_lse = row < s.seqlen_q ? params.statistics.lse[at] : INFINITY;
        const bool empty = own_lse == INFINITY;  // P = 0, so P (dP - delta) must be 0, too, whatever dlse holds
        lse[r / 2][r % 2] = own_lse;
        delta[r / 2][r % 2] = empty ? 0.0f : params.delta[at];
    }
#pragma unroll
    for (int m = 0; m < kMmas; ++m) {
        const float2* const large = params.statistics.large + lse_offset(p, s, head) + row0 + warp_row + 16 * m + mma_row(lane, 0);
        if constexpr (kGeneral) {
            const FragmentPlace at{
                b,          head,   row0 + warp_row + 16 * m + mma_row(lane, 0), key0 + warp_key + mma_column(lane, 0), s.seqlen_q,
                s.seqlen_k, s.shift};
            general_gradients<T>(p, at, lane % 4, lse[m], large, delta[m], flat(S[m]), flat(dP[m]));
        } else {
            adjust_large(lse[m], large, flat(S[m]), large_score);
#pragma unroll
            for (int i = 0; i < 4 * kTiles; ++i) {
                const int half = i / 2 % 2;
                const float P = exp2_approx(fmaf(flat(S[m])[i], params.scale_log2, -lse[m][half]));
                flat(S[m])[i] = P, flat(dP[m])[i] = P * (flat(dP[m])[i] - delta[m][half]);
            }
        }
    }
    const KeyRange whole = rows_seeing_all(p, s, key0, key0 + kTile - 1);
    if (row0 < whole.begin || row0 + kTile > whole.end) {
        hide(S, p, s, row0 + warp_row, key0 + warp_key, lane);
        hide(dP, p, s, row0 + warp_row, key0 + warp_key, lane);
    }
    const int64_t to = (int64_t(place) * params.rows + tile_q * kTile) * params.keys + tile_k * kTile;
    store_rows<T, 1>(S, 1.0f, static_cast<T*>(params.p) + to, params.keys, warp_row, kTile, warp_key / 16, kTile, true, false, lane);
    store_rows<T, 1>(dP, 1.0f, static_cast<T*>(params.ds) + to, params.keys, warp_row, kTile, warp_key / 16, kTile, true, false, lane);
    if constexpr (kGeneral) {
        if (!params.used) return;
        // A key without a nonzero dS in this tile may hold NaN in K, and 0 x NaN is NaN: dQ of these rows reads zeros instead.
#pragma unroll
        for (int x = 0; x < 4 * kMmas * kTiles; ++x) {
            const int m = x / (4 * kTiles), i = x % (4 * kTiles);
            if (flat(dP[m])[i] != 0) smem.used[warp_key + 8 * (i / 4) + mma_column(lane, i)] = 1;
        }
        __syncthreads();
        if (threadIdx.x < kTile)
            params.used[(int64_t(place) * tiles_q + tile_q) * params.keys + tile_k * kTile + threadIdx.x] = smem.used[threadIdx.x] != 0;
    }
}

// ---- gradients ----

enum class Gradient { kDv, kDk, kDq };

template <typename T, int kN>
struct GradientSmem {
    alignas(128) T scores[kWalkStages][kTile * kWalk];  // P or dS: a row per walked row (dV, dK) or per own row (dQ)
    alignas(128) T walked[kWalkStages][kWalk * kN];     // dO, Q or K
};

// C = P^T dO, dS^T Q or dS K over `steps` steps. load(stage) starts the copies of the next step; ready(stage, step) runs once they landed.
template <typename T, int kN, OperandA kOperandA, typename Load, typename Ready>
__device__ __forceinline__ void walk(float (&C)[kMmas][kN / kColumnWarps / 8][4], GradientSmem<T, kN>& smem, int steps, const Load& load,
                                     const Ready& ready) {
    using Walked = SharedTile<T, kN>;
    using TileA = SharedTile<T, kOperandA == OperandA::kTransposed ? kTile : kWalk>;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const int own = warp / kColumnWarps * (16 * kMmas);
    const uint32_t a =
        shared_address(smem.scores) + (kOperandA == OperandA::kTransposed ? TileA::offset(lane % 8 + lane / 16 * 8, own / 8 + lane / 8 % 2)
                                                                          : TileA::offset(own + lane % 16, lane / 16));
    const uint32_t b = shared_address(smem.walked) + Walked::offset(lane % 16, 2 * (warp % kColumnWarps) + lane / 16);
#pragma unroll
    for (int step = 0; step < kWalkStages - 1; ++step) {
        if (step < steps) load(step);
        cp_async_commit();
    }
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        cp_async_wait_group<kWalkStages - 2>();
        __syncthreads();  // this step is here; nobody reads the previous step's stage any more
        const int stage = step % kWalkStages;
        ready(stage, step);
        multiply_columns<T, TileA, Walked, kOperandA, kColumnWarps, 0, kWalk / 16>(
            C, a + stage * uint32_t(sizeof smem.scores[0]), b + stage * uint32_t(sizeof smem.walked[0]), [&](int x) {
                if (x > 0) return;  // the copies are started while the tensor cores work
                if (step + kWalkStages - 1 < steps) load((step + kWalkStages - 1) % kWalkStages);
                cp_async_commit();
            });
    }
}

template <typename T, int kN, bool kAnyAlignment>
__global__ void __launch_bounds__(kThreads, 1) gradient_kernel(const __grid_constant__ WideParams params) {
    constexpr int kTiles = kN / kColumnWarps / 8;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<GradientSmem<T, kN>*>(shared);
    const BackwardParams& backward = params.backward;
    const AttentionParams& p = backward.forward;
    const int columns_k = (p.headdim + kN - 1) / kN, columns_v = (p.headdim_v + kN - 1) / kN;  // blocks side by side, which share P or dS
    const int tiles_k = params.keys / kTile, tiles_q = params.rows / kTile;
    // Order: dV, dK, dQ. Tiles that see the most under a causal mask come first: the first keys, the last rows.
    const int blocks_v = params.heads_k * tiles_k * columns_v, blocks_kv = blocks_v + params.heads_k * tiles_k * columns_k;
    const int block = blockIdx.x;
    const Gradient what = block < blocks_v ? Gradient::kDv : block < blocks_kv ? Gradient::kDk : Gradient::kDq;
    const int index = what == Gradient::kDv ? block : what == Gradient::kDk ? block - blocks_v : block - blocks_kv;
    const int columns = what == Gradient::kDv ? columns_v : columns_k, heads = what == Gradient::kDq ? params.heads : params.heads_k;
    const int part = index % columns, place = index / columns % heads, tile = index / columns / heads, column0 = part * kN;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    const int64_t head_pitch = int64_t(params.rows) * params.keys;

    float C[kMmas][kTiles][4];
    const auto begin = [&](const float* sums, bool first) {  // the sums of this block; fragments of all threads are interleaved
#pragma unroll
        for (int x = 0; x < kMmas * kTiles; ++x) {
            float4 y{};
            if (!first) y = reinterpret_cast<const float4*>(sums)[x * kThreads + threadIdx.x];
            float(&c)[4] = C[x / kTiles][x % kTiles];
            c[0] = y.x, c[1] = y.y, c[2] = y.z, c[3] = y.w;
        }
    };
    const auto end = [&](float* sums, bool last, float scale, const TensorView& to, int64_t offset, int own0, int seqlen, int width,
                         bool aligned) {
        if (last) {
            store_rows<T, kColumnWarps>(C, scale, static_cast<T*>(to.data) + offset + column0, to.row,
                                        own0 + warp / kColumnWarps * (16 * kMmas), seqlen, warp % kColumnWarps, width - column0, aligned,
                                        backward.accumulate, lane);
            return;
        }
#pragma unroll
        for (int x = 0; x < kMmas * kTiles; ++x) {
            const float(&c)[4] = C[x / kTiles][x % kTiles];
            reinterpret_cast<float4*>(sums)[x * kThreads + threadIdx.x] = make_float4(c[0], c[1], c[2], c[3]);
        }
    };

    if (what == Gradient::kDq) {
        const int h = params.head0 + place, b = h / p.nheads, head = h % p.nheads, tile_q = tiles_q - 1 - tile;
        const int row0 = params.row0 + tile_q * kTile;
        const Sequence s = sequence_of(p, b);
        if (row0 >= s.seqlen_q) return;
        float* const sums = params.sums_q + ((int64_t(place) * (params.all_rows / kTile) + row0 / kTile) * columns + part) * (kTile * kN);
        int key = params.key0, end_key = min(params.key0 + params.keys, s.seqlen_k);
        while (key < end_key && !tile_seen(p, s, row0, key)) key += kTile;
        while (end_key > key && !tile_seen(p, s, row0, (end_key - 1) / kTile * kTile)) end_key = (end_key - 1) / kTile * kTile;
        const KeyRange keys = keys_seen(p, s);
        const T* ds = static_cast<const T*>(params.ds) + place * head_pitch + int64_t(tile_q) * kTile * params.keys + (key - params.key0);
        const T* k = static_cast<const T*>(p.k.data) + s.k + head / p.group * p.k.head + key * p.k.row + column0;
        const uint8_t* used = params.used ? params.used + (int64_t(place) * tiles_q + tile_q) * params.keys + (key - params.key0) : nullptr;
        const int steps = end_key > key ? (end_key - key + kWalk - 1) / kWalk : 0;
        if (steps == 0 && !params.first_q && !params.last_q) return;
        begin(sums, params.first_q);
        const auto load = [&](int stage) {
            load_tile<kTile, kWalk, kThreads, false>(smem.scores[stage], ds, params.keys, 0, kTile, kWalk, true);
            load_tile<kWalk, kN, kThreads, kAnyAlignment>(smem.walked[stage], k, p.k.row, keys.begin - key, keys.end - key,
                                                          p.headdim - column0, params.aligned_k);
            key += kWalk, ds += kWalk, k += kWalk * p.k.row;
        };
        const auto ready = [&](int stage, int step) {
            if (!used) return;
            constexpr int kPieces = SharedTile<T, kN>::kPieces;
            for (int x = threadIdx.x; x < kWalk * kPieces; x += kThreads)
                if (!used[step * kWalk + x / kPieces]) reinterpret_cast<uint4*>(smem.walked[stage])[x] = make_uint4(0, 0, 0, 0);
            __syncthreads();
        };
        walk<T, kN, OperandA::kAsStored>(C, smem, steps, load, ready);
        if (params.last_q) clear_empty_rows(C, p, s, head, row0 + warp / kColumnWarps * (16 * kMmas), lane);
        end(sums, params.last_q, p.scale, backward.dq, gradients_of(backward, b).dq + head * backward.dq.head, row0, s.seqlen_q, p.headdim,
            params.aligned_dq);
        return;
    }

    const bool is_v = what == Gradient::kDv;
    const int h = params.head_k0 + place, b = h / p.nheads_k, head_k = h % p.nheads_k, key0 = params.key0 + tile * kTile;
    const Sequence s = sequence_of(p, b);
    if (key0 >= s.seqlen_k) return;
    float* const sums = params.sums_kv + ((int64_t(place) * (params.all_keys / kTile) + key0 / kTile) * (columns_v + columns_k) +
                                          (is_v ? 0 : columns_v) + part) *
                                             (kTile * kN);
    const KeyRange rows = rows_seeing(p, s, key0, min(key0 + kTile, s.seqlen_k) - 1);
    const int first_row = max(rows.begin, params.row0) / kWalk * kWalk, end_row = min(rows.end, params.row0 + params.rows);
    const int first_head = max(params.head0, h * p.group), end_head = min(params.head0 + params.heads, (h + 1) * p.group);
    const int steps = end_row > first_row ? (end_row - first_row + kWalk - 1) / kWalk * (end_head - first_head) : 0;
    if (steps == 0 && !params.first_kv && !params.last_kv) return;
    begin(sums, params.first_kv);
    const TensorView& view = is_v ? backward.dout : p.q;
    const int width = is_v ? p.headdim_v : p.headdim;
    const bool aligned = is_v ? params.aligned_dout : params.aligned_q;
    const T* const source = static_cast<const T*>(view.data) + (is_v ? gradients_of(backward, b).dout : s.q) + column0;
    const T* const scores = static_cast<const T*>(is_v ? params.p : params.ds) + tile * kTile;
    int row = first_row, head = first_head;
    const auto load = [&](int stage) {
        load_tile<kWalk, kTile, kThreads, false>(smem.scores[stage],
                                                 scores + (head - params.head0) * head_pitch + int64_t(row - params.row0) * params.keys,
                                                 params.keys, 0, kWalk, kTile, true);
        load_tile<kWalk, kN, kThreads, kAnyAlignment>(smem.walked[stage], source + head % p.nheads * view.head + row * view.row, view.row,
                                                      rows.begin - row, rows.end - row, width - column0, aligned);
        row += kWalk;
        if (row >= end_row) row = first_row, ++head;
    };
    walk<T, kN, OperandA::kTransposed>(C, smem, steps, load, [](int, int) {});
    const GradientSequence g = gradients_of(backward, b);
    if (is_v) end(sums, params.last_kv, 1.0f, backward.dv, g.dv + head_k * backward.dv.head, key0, s.seqlen_k, width, params.aligned_dv);
    else end(sums, params.last_kv, p.scale, backward.dk, g.dk + head_k * backward.dk.head, key0, s.seqlen_k, width, params.aligned_dk);
}

// ---- launches ----

// Bytes of P (and of dS, as many), bytes of the flags, then the number of floats.
struct Places {
    int64_t scores, flags, floats;
    size_t bytes() const { return size_t(2 * scores + flags + floats * int64_t(sizeof(float))) + 128; }
};
Places places_of(const Plan& plan) {
    const int64_t pairs = plan.heads * plan.rows * plan.keys;
    return {2 * pairs, plan.flags ? up(pairs / kTile, 128) : 0, 4 * plan.rows_of_call + plan.sums_q + plan.sums_kv};
}

// Columns per block of gradients, chosen for the least padding.
int block_columns(const AttentionParams& p) {
    int best = 256;
    const auto padded = [&](int n) { return 2 * up(p.headdim, n) + up(p.headdim_v, n); };
    for (const int n : {192, 128})
        if (padded(n) < padded(best)) best = n;
    return best;
}

template <typename T, Scores kScores, int kN>
cudaError_t run(const WideParams& params, cudaStream_t stream) {
    const AttentionParams& p = params.backward.forward;
    const int tiles_q = params.rows / kTile, tiles_k = params.keys / kTile;
    const int columns_k = (p.headdim + kN - 1) / kN, columns_v = (p.headdim_v + kN - 1) / kN;
    const cudaError_t error = launch_kernel(scores_kernel<T, kScores>, unsigned(params.heads * tiles_q * tiles_k), kThreads,
                                            sizeof(ScoresSmem<T>), stream, params);
    if (error != cudaSuccess) return error;
    return launch_kernel(gradient_kernel < T, kN, kScores == Scores::kGeneral >,
                         unsigned(params.heads_k * tiles_k * (columns_v + columns_k) + params.heads * tiles_q * columns_k), kThreads,
                         sizeof(GradientSmem<T, kN>), stream, params);
}
static_assert(sizeof(ScoresSmem<__half>) <= 99 * 1024 && sizeof(GradientSmem<__half, 256>) <= 99 * 1024,
              "a block of sm_86 and 89 has no more");

template <typename T>
cudaError_t launch(const BackwardParams& backward, cudaStream_t stream) {
    const AttentionParams& p = backward.forward;
    const Plan plan = plan_of(p);
    const Places places = places_of(plan);
    WideParams params{};
    params.backward = backward, params.scale_log2 = p.scale * kLog2e;
    auto* const base = static_cast<unsigned char*>(align_up(p.workspace, 128));
    params.p = base, params.ds = base + places.scores, params.used = plan.flags ? base + 2 * places.scores : nullptr;
    params.delta = reinterpret_cast<float*>(base + 2 * places.scores + places.flags);
    params.statistics.lse = params.delta + plan.rows_of_call;
    params.statistics.large = reinterpret_cast<float2*>(params.statistics.lse + plan.rows_of_call);
    params.sums_q = params.delta + 4 * plan.rows_of_call, params.sums_kv = params.sums_q + plan.sums_q;
    params.rows = plan.rows, params.keys = plan.keys;
    params.all_rows = plan.chunks_q * plan.rows, params.all_keys = plan.chunks_k * plan.keys;
    find_aligned_rows<T>(params);
    const bool plain =
        !p.general_scores() && p.scale > 0 && params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_dout;
    const int columns = block_columns(p);

    cudaError_t error = backward_delta(backward, params.delta, nullptr, stream);
    if (error == cudaSuccess) error = launch_row_statistics<T>(p, params.statistics, !plain, LseCovers::kPerhapsMore, stream);
    const int64_t all_heads_k = int64_t(p.nheads_k) * p.batch;
    for (int64_t set = 0; set < all_heads_k; set += plan.heads_k)
        for (int64_t part = 0; part < plan.parts; ++part) {
            params.head_k0 = int(set), params.heads_k = int(std::min(plan.heads_k, all_heads_k - set));
            params.head0 = int(set * p.group + part * plan.heads);
            params.heads = int(std::min(plan.heads, (set + params.heads_k) * p.group - params.head0));
            for (int k = 0; k < plan.chunks_k; ++k)
                for (int q = 0; q < plan.chunks_q && error == cudaSuccess; ++q) {
                    params.row0 = q * plan.rows, params.key0 = k * plan.keys;
                    params.first_q = k == 0, params.last_q = k == plan.chunks_k - 1;
                    params.first_kv = part == 0 && q == 0, params.last_kv = part == plan.parts - 1 && q == plan.chunks_q - 1;
                    if (!plain) error = run<T, Scores::kGeneral, 256>(params, stream);
                    else if (columns == 256) error = run<T, Scores::kPlain, 256>(params, stream);
                    else if (columns == 192) error = run<T, Scores::kPlain, 192>(params, stream);
                    else error = run<T, Scores::kPlain, 128>(params, stream);
                }
        }
    return error;
}

}  // namespace

cudaError_t backward_mma_wide_sm80(const BackwardParams& b, const DeviceInfo&, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch<__half>(b, stream) : launch<__nv_bfloat16>(b, stream);
}

size_t backward_mma_wide_sm80_workspace(const BackwardParams& b, const DeviceInfo&) { return places_of(plan_of(b.forward)).bytes(); }

}  // namespace fa
