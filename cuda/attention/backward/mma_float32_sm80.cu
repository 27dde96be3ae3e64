// mma_float32_sm80.cu: the gradients of attention in float32, with float32's accuracy, on tensor cores: every product is three products of
// tf32 parts (device/split_tf32.cuh). For every GPU from sm_80 on; head dims up to 512, every option; deterministic.
//
// The two mirrored kernels of simple.cu, with its formulas and its sums in a fixed order. In one, a block owns keys and walks over the
// queries of every head that reads them; in the other, it owns queries and walks over keys. New against simple.cu:
//   - A warp owns 16 rows. Its tile of S has them as rows and walked rows as columns, so P and dS are A fragments of the second products
//     without leaving the registers.
//   - cp.async copies the walked rows; ldmatrix reads them as columns of S, 16-byte reads as rows of the second products.
//
//     for each tile of walked rows:                               own = keys             own = queries
//         S  = own_a walked_a^T        16 rows of each warp       k q^T                  q k^T
//         dP = own_b walked_b^T                                   v dout^T               dout v^T
//         P, dS = P (dP - delta)       in registers
//         acc_b += P walked_b                                     dV += P^T dout         -
//         acc_a += dS walked_a                                    dK += dS^T q           dQ += dS k
//
// Above head dim 128 the registers of a warp do not hold dK and dV: two warps have the same keys and half of the columns each, and both
// compute S and dP. Two warps with the same queries take half of the keys of a step each, and add up their sums of dQ at the end. Above
// head dim 256 four warps have a quarter of the columns each, also of those that S and dP are summed over; they add up these sums.
//
// A row whose |lse| is beyond 4096 needs the products of large_rows.cuh to the bit: a call that has one is left to simple.cu. So is one
// with an infinite delta.
//
// Infinity and NaN have no parts: where a sum of a block is not finite, the block computes its rows again, with code that gives what
// float32 gives. Bound by mma.sync: 7 products instead of 5, three instructions each.
#include "attention/common/mask.h"
#include "attention/common/shared_tile.cuh"
#include "attention/common/simple_tiles.cuh"
#include "attention/common/tiles_mma_sm80.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "device/split_tf32.cuh"

namespace fa {
namespace {

enum class Own { kKeys, kQueries };      // what a block owns; it walks over the other
enum class Scores { kPlain, kGeneral };  // kGeneral: every option, and rows of any alignment

struct GradientTile {
    int row_warps;  // of 16 own rows
    int walked;     // walked rows of a step
    int stages;     // of walked rows
    int blocks_per_sm;
    // Warps with the same own rows divide either the columns of dK and dV or the walked rows of a step.
    int column_parts, walked_parts;
};
constexpr int warps_of(const GradientTile& tile) { return tile.row_warps * tile.column_parts * tile.walked_parts; }
// kLarge: sm_90 and others with 227 KB; kSmall: 99 KB; kGeneral: the same, for options, which need registers
enum class Size { kLarge, kSmall, kGeneral };
constexpr GradientTile gradient_tile(int d, Own own, Size size) {
    if (d > 256) return {size == Size::kLarge ? 2 : 1, 16, 1, 1, 4, 1};                       // 209 KB; 137 KB, from sm_80 on
    if (d <= 64) return {4, 32, 2, size == Size::kGeneral ? 2 : 3, 1, 1};                     // 65 KB
    if (d == 128 && own == Own::kKeys && size == Size::kGeneral) return {4, 16, 1, 2, 1, 1};  // 81 KB
    if (d <= 128) return {4, 32, 1, 2, 1, 1};                                                 // 73, 97 KB
    if (own == Own::kKeys) return size == Size::kLarge ? GradientTile{4, 32, 1, 1, 2, 1} : GradientTile{2, 16, 1, 2, 2, 1};
    return size == Size::kLarge ? GradientTile{4, 32, 1, 1, 1, 2} : GradientTile{2, 16, 1, 2, 1, 1};  // 145, 193 KB; 73, 97 KB
}

template <int kD, Own kOwn, Size kSize>
inline constexpr GradientTile kGradientTile = gradient_tile(kD, kOwn, kSize);

struct GradientParams {
    BackwardParams backward;
    const int *wanted, *unwanted;  // words: 0 if another kernel has served the call (nullptr: none has); not 0 if another one will
    int tiles;                     // of own rows, of the longest sequence
    bool aligned_q, aligned_k, aligned_v, aligned_dout, aligned_dq, aligned_dk, aligned_dv;
};

// What a block does. It stays in shared memory, where it takes no registers between the steps.
struct BlockState {
    Sequence s;
    int batch, head, own0;  // head: of the own rows
    int own_rows, walk_begin, walk_end;
    int steps, all_steps;  // steps: of one head
};

// Above head dim 256, warps that share rows and walked rows sum S and dP over a part of the columns each, and exchange their sums here.
template <int kWarps, int kElements, bool kShares>
struct PairParts {
    float part[kWarps][kElements][32];
};
template <int kWarps, int kElements>
struct PairParts<kWarps, kElements, false> {};

template <GradientTile const& kTile, int kD>
struct GradientSmem : PairParts<warps_of(kTile), kTile.walked, (kD > 256)> {
    alignas(128) float own_a[16 * kTile.row_warps * kD];
    alignas(128) float own_b[16 * kTile.row_warps * kD];
    alignas(128) float walked_a[kTile.stages][kTile.walked * kD];
    alignas(128) float walked_b[kTile.stages][kTile.walked * kD];
    Query query[kTile.stages * kTile.walked > 16 * kTile.row_warps ? kTile.stages* kTile.walked : 16 * kTile.row_warps];
    BlockState state;
    int used[kTile.walked];  // own queries, where options may hide keys: does some row of this block have a nonzero dS for this key?
};

template <int kTiles>
__device__ __forceinline__ void clear(float (&C)[1][kTiles][4]) {
#pragma unroll
    for (int x = 0; x < 4 * kTiles; ++x) C[0][x / 4][x % 4] = 0;
}

// S = own walked^T over kSteps x 8 columns, from step `first` on. `own` and `walked` are this lane's addresses for ldmatrix.
template <SplitRange kRange, int kD, int kSteps = kD / 8, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&S)[1][kTiles][4], uint32_t own, uint32_t walked, int first = 0) {
    using Tile = SharedTile<float, kD>;
    constexpr int kAtOnce = kRange == SplitRange::kUsual && kTiles % 4 == 0 ? 4 : 2;
    clear(S);
#pragma unroll 1  // more steps at a time take registers
    for (int step = first; step < first + kSteps; ++step) {
        uint32_t x[4];
        ldmatrix_x4(x, Tile::advance(own, step));
        const SplitParts<kRange, 4> A[1] = {split_fragment<kRange, 4>(x)};
#pragma unroll(kUnrolled<kRange>)
        for (int n = 0; n < kTiles; n += kAtOnce) {
            SplitParts<kRange, 2> B[kAtOnce];
#pragma unroll
            for (int t = 0; t < kAtOnce; t += 2) {
                uint32_t y[4];
                ldmatrix_x4(y, Tile::advance(walked, step) + 8 * (n + t) * Tile::kPitch);
                B[t] = split_fragment<kRange, 2>(y), B[t + 1] = split_fragment<kRange, 2>(y + 2);
            }
            add_split_products(S, n, A, B);
        }
    }
}

// acc += weights walked, for `rows` walked rows and the accumulator's columns. `walked`: this lane's address for load_two_rows, at the
// first of these columns. Column 4 g + t of 32 is column g of tile t.
template <SplitRange kRange, int kD, int kTiles, int kColumnTiles>
__device__ __forceinline__ void add_rows(float (&acc)[1][kColumnTiles][4], const float (&weights)[1][kTiles][4], uint32_t walked,
                                         int rows) {
    using Tile = SharedTile<float, kD>;
    constexpr int kAtOnce = kRange == SplitRange::kUsual ? 4 : 1, kParts = kColumnTiles > 16 ? 2 : 1;
#pragma unroll(kUnrolled<kRange>)
    for (int x = 0; x < kTiles * kParts; ++x) {
        const int step = x / kParts, part = x % kParts;
        if (8 * step >= rows) break;  // it also keeps the compiler from mixing the steps, which takes registers
        const SplitParts<kRange, 4> A[1] = {split_accumulator<kRange>(weights[0][step])};
#pragma unroll(kUnrolled<kRange>)
        for (int group = 0; group < kColumnTiles / kParts; group += 4) {
            const int n = kColumnTiles / kParts * part + group;
            uint32_t X[4][2];
            const uint32_t at = walked + 32 * n + 8 * step * Tile::kPitch;
            load_two_rows(X, at, (at ^ 16) + Tile::kPitch);
#pragma unroll
            for (int first = 0; first < 4; first += kAtOnce) {
                SplitParts<kRange, 2> B[kAtOnce];
#pragma unroll
                for (int t = 0; t < kAtOnce; ++t) B[t] = split_fragment<kRange, 2>(X[first + t]);
                add_split_products(acc, n + first, A, B);
            }
        }
    }
}

template <int kTiles>
__device__ __forceinline__ void copy(const float (&from)[1][kTiles][4], float (&to)[1][kTiles][4]) {
#pragma unroll
    for (int x = 0; x < 4 * kTiles; ++x) to[0][x / 4][x % 4] = from[0][x / 4][x % 4];
}
template <int kTiles>
__device__ __forceinline__ bool is_finite(const float (&C)[1][kTiles][4]) {
    float zero = 0;
#pragma unroll
    for (int x = 0; x < 4 * kTiles; ++x) zero = fmaf(C[0][x / 4][x % 4], 0.0f, zero);
    return zero == 0;
}

// Rows row0 + g and row0 + g + 8 of a gradient: `scale` times the sums, from column `column0` on. `to`: row 0 of the head.
template <int kTiles>
__device__ __forceinline__ void store(const float (&acc)[1][kTiles][4], float scale, float* to, int64_t stride, int row0, int rows,
                                      int column0, int columns, bool aligned, bool accumulate) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = row0 + mma_row(lane, 2 * r);
        if (row >= rows) continue;
#pragma unroll
        for (int n = 0; n < kTiles; n += 4)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int column = column0 + 8 * (n + lane % 4) + 4 * e;
                float* const at = to + row * stride + column;
                float x[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) x[t] = acc[0][n + t][2 * r + e] * scale;
                if (aligned && column + 4 <= columns) {
                    float4& four = *reinterpret_cast<float4*>(at);
                    const float4 old = accumulate ? four : float4{};
                    four = make_float4(x[0] + old.x, x[1] + old.y, x[2] + old.z, x[3] + old.w);
                } else {
#pragma unroll
                    for (int t = 0; t < 4; ++t)
                        if (column + t < columns) at[t] = accumulate ? x[t] + at[t] : x[t];
                }
            }
    }
}

// One warp's pairs of a step: `query` and `key` give the indices of element i, `row` the statistics of its query.
struct PairPlace {
    int batch, head, shift;
};

// S, the products, becomes the weights of the second products, and dP becomes dS; both are 0 for hidden pairs.
template <SplitRange kRange, bool kGeneral, int kTiles, typename QueryOf, typename KeyOf, typename StatisticsOf>
__device__ __forceinline__ void gradients_of_pairs(const AttentionParams& p, const PairPlace& at, bool cut, float (&S)[1][kTiles][4],
                                                   float (&dP)[1][kTiles][4], const QueryOf& query, const KeyOf& key,
                                                   const StatisticsOf& statistics) {
    constexpr int kCount = 4 * kTiles;
    float(&score)[kCount] = flat(S[0]);
    float(&grad)[kCount] = flat(dP[0]);
    uint32_t seen = ~0u;
    if (cut) {
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < kCount; ++i) {
            const Query& row = statistics(i);
            if (key(i) < row.begin || key(i) >= row.end) seen &= ~(1u << i);
        }
    }
    if constexpr (!kGeneral) {
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < kCount; ++i) {
            const Query& row = statistics(i);
            const float P = exp2_approx(fmaf(score[i] - row.max, p.scale, -row.rest) * kLog2e);
            const bool visible = seen >> i & 1;
            score[i] = visible ? P : 0.0f;
            grad[i] = visible ? P * (grad[i] - row.delta) : 0.0f;
        }
    } else {
        float slope[kCount];
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < kCount; ++i) score[i] = p.general_scores() ? __fmul_rn(score[i], p.scale) : score[i], slope[i] = 1;
        if (p.softcap != 0) {
#pragma unroll(kUnrolled<kRange>)
            for (int i = 0; i < kCount; ++i) {
                const float t = tanhf(score[i] / p.softcap);
                score[i] = p.softcap * t, slope[i] = 1 - t * t;
            }
        }
        if (p.alibi_slopes) {
            const float alibi = p.alibi_slopes[at.batch * p.alibi_batch + at.head];
#pragma unroll(kUnrolled<kRange>)
            for (int i = 0; i < kCount; ++i) score[i] -= alibi * fabsf(float(int64_t(query(i)) + at.shift - key(i)));
        }
        if (p.bias.data) {
#pragma unroll(kUnrolled<kRange>)
            for (int i = 0; i < kCount; ++i) {
                if (!(seen >> i & 1)) continue;
                const int64_t place = at.batch * p.bias.batch + at.head * p.bias.head + query(i) * p.bias.row + key(i);
                const float bias = load_as_float(p.bias.data, place, p.bias_dtype);
                score[i] += bias;
                if (bias == -INFINITY) seen &= ~(1u << i);
            }
        }
        if (p.mask.data) {
#pragma unroll(kUnrolled<kRange>)
            for (int i = 0; i < kCount; ++i) {
                if (!(seen >> i & 1)) continue;
                const int64_t place = at.batch * p.mask.batch + at.head * p.mask.head + query(i) * p.mask.row + key(i);
                if (!static_cast<const uint8_t*>(p.mask.data)[place]) seen &= ~(1u << i);
            }
        }
        if (p.blocks.data) {
#pragma unroll(kUnrolled<kRange>)
            for (int i = 0; i < kCount; ++i)
                if (seen >> i & 1 && block_hides(p, at.batch, at.head, query(i), key(i))) seen &= ~(1u << i);
        }
        if (p.intervals.data) {
#pragma unroll(kUnrolled<kRange>)
            for (int i = 0; i < kCount; ++i)
                if (seen >> i & 1 && interval_hides(p, at.batch, at.head, query(i), key(i))) seen &= ~(1u << i);
        }
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < kCount; ++i) {
            const Query& row = statistics(i);
            const float below = p.general_scores() ? (score[i] - row.max) - row.rest : fmaf(score[i] - row.max, p.scale, -row.rest);
            const float P = exp2_approx(below * kLog2e);
            float weight = P, keep = 1;
            if (p.dropout_threshold) {
                keep = dropped(p, dropout_block(p, at.batch, at.head, query(i), key(i)), key(i)) ? 0.0f : p.dropout_scale;
                weight = P * keep;
            }
            const bool visible = seen >> i & 1 && score[i] != -INFINITY;
            score[i] = visible ? weight : 0.0f;
            grad[i] = visible ? P * slope[i] * ((keep == 0 ? 0.0f : grad[i] * keep) - row.delta) : 0.0f;
        }
    }
}

template <int kD, Own kOwn, Size kSize, Scores kScores>
struct GradientBlock {
    static constexpr GradientTile kTile = kGradientTile<kD, kOwn, kSize>;
    static constexpr bool kOwnsKeys = kOwn == Own::kKeys, kGeneral = kScores == Scores::kGeneral;
    static constexpr int kThreads = 32 * warps_of(kTile), kOwnRows = 16 * kTile.row_warps, kWalked = kTile.walked, kStages = kTile.stages;
    static constexpr int kPartRows = kWalked / kTile.walked_parts, kTiles = kPartRows / 8;  // walked rows of a warp
    static constexpr int kColumns = kD / kTile.column_parts, kColumnTiles = kColumns / 8;
    static_assert(kColumns % 32 == 0 && 4 * kTiles <= 32, "whole groups of columns; a bit for each element");
    static constexpr bool kShares = kD > 256;  // S and dP are summed by several warps
    using Tile = SharedTile<float, kD>;
    using Smem = GradientSmem<kGradientTile<kD, kOwn, kSize>, kD>;
    using Pairs = float[1][kTiles][4];
    using Sums = float[1][kColumnTiles][4];
    struct Side {
        const float* data;  // of the head
        int64_t head, row;  // strides
        int columns;
        bool aligned;
    };

    const GradientParams& params;
    const AttentionParams& p;
    Smem& smem;
    const BlockState& at;

    __device__ __forceinline__ GradientBlock(const GradientParams& params, Smem& smem)
        : params(params), p(params.backward.forward), smem(smem), at(smem.state) {}

    static __device__ __forceinline__ BlockState state_of(const GradientParams& params, unsigned index) {
        const AttentionParams& p = params.backward.forward;
        const int heads = kOwnsKeys ? p.nheads_k : p.nheads;
        BlockState at{};
        at.head = index % heads;
        index /= heads;
        at.batch = index % p.batch;
        // Under a causal mask the first keys and the last queries have the longest walks, so they come first.
        at.own0 = (kOwnsKeys ? index / p.batch : params.tiles - 1 - index / p.batch) * kOwnRows;
        at.s = sequence_of(p, at.batch);
        at.own_rows = kOwnsKeys ? at.s.seqlen_k : at.s.seqlen_q;
        if (at.own0 >= at.own_rows) return at;
        const int last = min(at.own0 + kOwnRows, at.own_rows) - 1;
        at.walk_begin = kOwnsKeys ? query_range(p, at.s, at.own0).begin : key_range(p, at.s, at.own0).begin;
        at.walk_end = kOwnsKeys ? query_range(p, at.s, last).end : key_range(p, at.s, last).end;
        at.steps = at.walk_end > at.walk_begin ? (at.walk_end - at.walk_begin + kWalked - 1) / kWalked : 0;
        at.all_steps = at.steps * (kOwnsKeys ? p.group : 1);
        return at;
    }

    __device__ __forceinline__ Side keys(const TensorView& t, int columns, bool aligned) const {
        const int64_t first = &t == &p.k ? at.s.k : at.s.v;
        return {static_cast<const float*>(t.data) + first + (kOwnsKeys ? at.head : at.head / p.group) * t.head, t.head, t.row, columns,
                aligned};
    }
    __device__ __forceinline__ Side queries(const TensorView& t, int64_t first, int columns, bool aligned) const {
        return {static_cast<const float*>(t.data) + first + (kOwnsKeys ? at.head * p.group : at.head) * t.head, t.head, t.row, columns,
                aligned};
    }
    __device__ __forceinline__ Side side_q() const { return queries(p.q, at.s.q, p.headdim, params.aligned_q); }
    __device__ __forceinline__ Side side_dout() const {
        const BackwardParams& b = params.backward;
        return queries(b.dout, gradients_of(b, at.batch).dout, p.headdim_v, params.aligned_dout);
    }
    __device__ __forceinline__ Side side_k() const { return keys(p.k, p.headdim, params.aligned_k); }
    __device__ __forceinline__ Side side_v() const { return keys(p.v, p.headdim_v, params.aligned_v); }

    template <int kRows>
    __device__ __forceinline__ void load(float* to, const Side& from, int head_step, int row0, int end) const {
        load_tile<kRows, kD, kThreads, kGeneral>(to, from.data + head_step * from.head + row0 * from.row, from.row, 0, end - row0,
                                                 from.columns, from.aligned);
    }
    __device__ __forceinline__ void load_own() const {
        load<kOwnRows>(smem.own_a, kOwnsKeys ? side_k() : side_q(), 0, at.own0, at.own_rows);
        load<kOwnRows>(smem.own_b, kOwnsKeys ? side_v() : side_dout(), 0, at.own0, at.own_rows);
        if (!kOwnsKeys) load_queries(smem.query, kOwnRows, p, rows_of_call(p), at.s, at.head, at.own0);
    }
    // The walked rows of a step. Returns whether this thread's query does not see all own keys.
    __device__ __forceinline__ bool load_walked(int step) const {
        const int stage = kStages == 2 ? step % 2 : 0, head_step = kOwnsKeys ? step / at.steps : 0;
        const int row0 = at.walk_begin + (step - head_step * at.steps) * kWalked;
        load<kWalked>(smem.walked_a[stage], kOwnsKeys ? side_q() : side_k(), head_step, row0, at.walk_end);
        load<kWalked>(smem.walked_b[stage], kOwnsKeys ? side_dout() : side_v(), head_step, row0, at.walk_end);
        if (!kOwnsKeys || threadIdx.x >= kWalked) return false;
        Query* const query = smem.query + stage * kWalked;
        load_queries(query, kWalked, p, rows_of_call(p), at.s, at.head * p.group + head_step, row0);
        return query[threadIdx.x].begin > at.own0 || query[threadIdx.x].end < at.own0 + kOwnRows;
    }

    template <SplitRange kRange>
    __device__ __forceinline__ void walk(Sums& acc_a, Sums& acc_b) const {
        const int lane = threadIdx.x % 32, all = __shfl_sync(~0u, threadIdx.x / 32, 0);
        const int warp = all % kTile.row_warps, group = all / kTile.row_warps;
        const int part_row = kTile.walked_parts > 1 ? group * kPartRows : 0, part_column = kTile.column_parts > 1 ? group * kColumns : 0;
        const uint32_t own = Tile::offset(16 * warp + lane % 16, lane / 16);
        const uint32_t columns = Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) + part_row * Tile::kPitch;
        const uint32_t rows = Tile::offset(lane % 4 * 2, lane / 4) + part_row * Tile::kPitch + part_column * 4;
        bool cut = false;
        if (at.all_steps > 0) {
            load_own();
            if (kStages == 2) cut = load_walked(0);
        }
#pragma unroll 1
        for (int step = 0; step < at.all_steps; ++step) {
            if (kStages == 1) cut = load_walked(step);
            cp_async_wait_all();
            const bool some_cut = __syncthreads_or(cut);  // the walked rows are here; with two stages nobody reads those of the last step
            if (kStages == 2 && step + 1 < at.all_steps) cut = load_walked(step + 1);
            const int stage = kStages == 2 ? step % 2 : 0, head_step = kOwnsKeys ? step / at.steps : 0;
            const int row0 = at.walk_begin + (step - head_step * at.steps) * kWalked + part_row;
            const uint32_t walked_a = shared_address(smem.walked_a[stage]), walked_b = shared_address(smem.walked_b[stage]);
            Pairs S, dP;
            if constexpr (kShares) {
                constexpr int kSteps = kD / 8 / kTile.column_parts;
                multiply_rows<kRange, kD, kSteps>(S, shared_address(smem.own_a) + own, walked_a + columns, group * kSteps);
                multiply_rows<kRange, kD, kSteps>(dP, shared_address(smem.own_b) + own, walked_b + columns, group * kSteps);
                join_pairs<kRange>(S, dP, all);
            } else {
                multiply_rows<kRange, kD>(S, shared_address(smem.own_a) + own, walked_a + columns);
                multiply_rows<kRange, kD>(dP, shared_address(smem.own_b) + own, walked_b + columns);
            }
            if constexpr (kOwnsKeys) {
                const Query* const query = smem.query + stage * kWalked + part_row + lane % 4 * 2;
                const int key = at.own0 + 16 * warp + lane / 4, first_row = row0 + lane % 4 * 2;
                gradients_of_pairs<kRange, kGeneral>(
                    p, PairPlace{at.batch, at.head * p.group + head_step, at.s.shift}, some_cut, S, dP,
                    [=](int i) { return first_row + i / 4 * 8 + i % 2; }, [=](int i) { return key + i / 2 % 2 * 8; },
                    [=](int i) -> const Query& { return query[i / 4 * 8 + i % 2]; });
                add_rows<kRange, kD>(acc_b, S, walked_b + rows, at.walk_end - row0);
            } else {
                const Query* const query = smem.query + 16 * warp + lane / 4;
                const int row = at.own0 + 16 * warp + lane / 4, key = row0 + lane % 4 * 2;
                gradients_of_pairs<kRange, kGeneral>(
                    p, PairPlace{at.batch, at.head, at.s.shift}, sees_less(query, row0), S, dP, [=](int i) { return row + i / 2 % 2 * 8; },
                    [=](int i) { return key + i / 4 * 8 + i % 2; }, [=](int i) -> const Query& { return query[i / 2 % 2 * 8]; });
                if (kGeneral && p.may_hide_keys()) zero_unused_keys<kRange>(dP, stage, part_row);
            }
            add_rows<kRange, kD>(acc_a, dP, walked_a + rows, at.walk_end - row0);
            if (kStages == 1) __syncthreads();  // nobody reads the walked rows any more
        }
    }
    // Adds up the sums of warps with the same pairs. All add in the same order, so all have the same bits. The block's barrier at the end
    // of a step keeps a warp from writing its next sums before these have been read.
    template <SplitRange kRange>
    __device__ __forceinline__ void join_pairs(Pairs& S, Pairs& dP, int warp) const {
        static_assert(kStages == 1, "a barrier at the end of a step");
        constexpr int kCount = 4 * kTiles;
        const int lane = opaque(int(threadIdx.x)) % 32, row_warp = warp % kTile.row_warps;
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < kCount; ++i) {
            smem.part[warp][i][lane] = S[0][i / 4][i % 4];
            smem.part[warp][kCount + i][lane] = dP[0][i / 4][i % 4];
        }
        bar_sync(1 + row_warp, 32 * kTile.column_parts);
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < 2 * kCount; ++i) {
            float sum = smem.part[row_warp][i][lane];
#pragma unroll
            for (int part = 1; part < kTile.column_parts; ++part) sum += smem.part[row_warp + part * kTile.row_warps][i][lane];
            (i < kCount ? S : dP)[0][i % kCount / 4][i % 4] = sum;
        }
    }
    // Whether a row of this warp does not see all keys of the tile.
    __device__ __forceinline__ bool sees_less(const Query* query, int key0) const {
        bool less = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) less |= query[8 * r].begin > key0 || query[8 * r].end < key0 + kPartRows;
        return __any_sync(~0u, less);
    }
    // A key whose dS are all zero in this block may hold NaN, and 0 x NaN is NaN: its K is zeroed.
    template <SplitRange kRange>
    __device__ __forceinline__ void zero_unused_keys(const Pairs& dS, int stage, int part_row) const {
        const int thread = opaque(int(threadIdx.x));
        if (thread < kWalked) smem.used[thread] = 0;
        __syncthreads();
#pragma unroll(kUnrolled<kRange>)
        for (int i = 0; i < 4 * kTiles; ++i)
            if (dS[0][i / 4][i % 4] != 0) smem.used[part_row + 8 * (i / 4) + mma_column(thread % 32, i)] = 1;
        __syncthreads();
        for (int x = thread; x < kWalked * Tile::kPieces; x += kThreads)
            if (!smem.used[x / Tile::kPieces]) reinterpret_cast<uint4*>(smem.walked_a[stage])[x] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    // Adds the sums of warps with other walked rows to those of the first ones. Called by the whole block.
    __device__ __forceinline__ void join(Sums& acc) const {
        static_assert(sizeof(Sums) * 32 * kTile.row_warps <= 2 * sizeof smem.own_a, "room in the own rows");
        constexpr int kOfPart = 32 * kTile.row_warps;
        const int thread = opaque(int(threadIdx.x));
        __syncthreads();  // nobody reads the own rows any more
#pragma unroll
        for (int x = 0; x < 4 * kColumnTiles; ++x)
            if (thread >= kOfPart) smem.own_a[x * kOfPart + thread - kOfPart] = acc[0][x / 4][x % 4];
        __syncthreads();
#pragma unroll
        for (int x = 0; x < 4 * kColumnTiles; ++x)
            if (thread < kOfPart) acc[0][x / 4][x % 4] += smem.own_a[x * kOfPart + thread];
    }
    __device__ __forceinline__ void finish(Sums& acc_a, const Sums& acc_b) const {
        const BackwardParams& b = params.backward;
        const GradientSequence g = gradients_of(b, at.batch);
        const int warp = opaque(int(threadIdx.x)) / 32, group = warp / kTile.row_warps;
        if (kTile.walked_parts > 1 && group > 0) return;
        const int row0 = at.own0 + warp % kTile.row_warps * 16, column0 = kTile.column_parts > 1 ? group * kColumns : 0;
        const auto put = [&](const Sums& acc, float scale, const TensorView& t, int64_t first, int columns, bool aligned) {
            float* const to = static_cast<float*>(const_cast<void*>(static_cast<const void*>(t.data))) + first + at.head * t.head;
            store(acc, scale, to, t.row, row0, at.own_rows, column0, columns, aligned, b.accumulate);
        };
        if (kOwnsKeys) {
            put(acc_a, p.scale, b.dk, g.dk, p.headdim, params.aligned_dk);
            put(acc_b, 1.0f, b.dv, g.dv, p.headdim_v, params.aligned_dv);
        } else {
            // The sum of a query that sees no key may be NaN: 0 times a NaN in K, which other queries see. Its dq is 0.
            const Query* const query = smem.query + row0 - at.own0 + opaque(int(threadIdx.x)) % 32 / 4;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                if (query[8 * r].begin < query[8 * r].end) continue;
#pragma unroll
                for (int n = 0; n < kColumnTiles; ++n) acc_a[0][n][2 * r] = acc_a[0][n][2 * r + 1] = 0;
            }
            put(acc_a, p.scale, b.dq, g.dq, p.headdim, params.aligned_dq);
        }
    }
};

// The sums of a block whose inputs have infinity or NaN, or whose sums are beyond float32. A function of its own with arrays of its own:
// the usual walk keeps its sums in registers.
template <typename Block>
using AnySums = typename Block::Sums[Block::kOwnsKeys ? 2 : 1];
template <typename Block>
__device__ __noinline__ void walk_any(const GradientParams& params, typename Block::Smem& smem, AnySums<Block>& acc) {
    typename Block::Sums &acc_a = acc[0], &acc_b = acc[Block::kOwnsKeys ? 1 : 0];  // own queries have no second sum
    clear(acc_a), clear(acc_b);
    Block(params, smem).template walk<SplitRange::kAny>(acc_a, acc_b);
}

// Whether some call takes these tiles on GPUs whose tiles may take so many bytes.
template <int kD, Size kSize>
constexpr bool tile_is_taken(size_t tile_memory) {
    const bool takes_large = kD > 128 && sizeof(GradientSmem<kGradientTile<kD, Own::kKeys, Size::kLarge>, kD>) <= tile_memory;
    return kSize == Size::kGeneral || (kSize == Size::kLarge) == takes_large;
}

template <int kD, Own kOwn, Size kSize, Scores kScores>
__global__ void __launch_bounds__(warps_of(kGradientTile<kD, kOwn, kSize>) * 32, kGradientTile<kD, kOwn, kSize>.blocks_per_sm)
    gradient_kernel(const __grid_constant__ GradientParams params) {
#if defined(__CUDA_ARCH__)
    if constexpr (!is_compiled(kTarget, tile_is_taken<kD, kSize>)) {
        __trap();
        return;
    }
#endif
    if ((params.wanted && *params.wanted == 0) || *params.unwanted != 0) return;
    using Block = GradientBlock<kD, kOwn, kSize, kScores>;
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<typename Block::Smem*>(shared);
    const BlockState state = Block::state_of(params, blockIdx.x);
    if (state.own0 >= state.own_rows) return;
    if (threadIdx.x == 0) smem.state = state;
    __syncthreads();
    const Block block(params, smem);
    typename Block::Sums acc_a, acc_b;
    clear(acc_a), clear(acc_b);
    block.template walk<SplitRange::kUsual>(acc_a, acc_b);
    if (__syncthreads_or(!is_finite(acc_a) || (Block::kOwnsKeys && !is_finite(acc_b)))) {  // rare
        AnySums<Block> acc;
        walk_any<Block>(params, smem, acc);
        copy(acc[0], acc_a), copy(acc[Block::kOwnsKeys ? 1 : 0], acc_b);
    }
    if constexpr (Block::kTile.walked_parts > 1) block.join(acc_a);
    block.finish(acc_a, acc_b);
}

template <int kD, Own kOwn, Size kSize, Scores kScores>
cudaError_t launch(GradientParams& params, cudaStream_t stream) {
    constexpr const GradientTile& kTile = kGradientTile<kD, kOwn, kSize>;
    const AttentionParams& p = params.backward.forward;
    constexpr int kRows = 16 * kTile.row_warps;
    params.tiles = ((kOwn == Own::kKeys ? p.seqlen_k : p.seqlen_q) + kRows - 1) / kRows;
    const int64_t blocks = int64_t(params.tiles) * (kOwn == Own::kKeys ? p.nheads_k : p.nheads) * p.batch;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(gradient_kernel<kD, kOwn, kSize, kScores>, unsigned(blocks), warps_of(kTile) * 32,
                         sizeof(GradientSmem<kGradientTile<kD, kOwn, kSize>, kD>), stream, params);
}
template <int kD, Size kSize, Scores kScores>
cudaError_t launch(GradientParams& params, cudaStream_t stream) {
    constexpr size_t kBytes = sizeof(GradientSmem<kGradientTile<kD, Own::kKeys, kSize>, kD>);
    static_assert(kBytes <= (kSize == Size::kLarge ? 227 * 1024
                             : kD > 256            ? kBackwardSplitWideBytes
                                                   : 99 * 1024),
                  "what a block of sm_90, of sm_80, and of sm_86 and 89 may have");
    if (const cudaError_t error = launch<kD, Own::kKeys, kSize, kScores>(params, stream)) return error;
    return launch<kD, Own::kQueries, kSize, kScores>(params, stream);
}
template <int kD>
cudaError_t launch(GradientParams& params, bool plain, size_t tile_memory, cudaStream_t stream) {
    if constexpr (kD > 128) {
        if (plain && tile_is_taken<kD, Size::kLarge>(tile_memory)) return launch<kD, Size::kLarge, Scores::kPlain>(params, stream);
    }
    if (plain) return launch<kD, Size::kSmall, Scores::kPlain>(params, stream);
    return launch<kD, Size::kGeneral, Scores::kGeneral>(params, stream);
}

}  // namespace

size_t backward_mma_float32_sm80_workspace(const BackwardParams& b, const DeviceInfo&) {
    return rows_of_call_bytes(b.forward) + 2 * sizeof(int);
}

cudaError_t backward_mma_float32_sm80_if(const int* wanted, const int* unwanted, const BackwardParams& b, const DeviceInfo& device,
                                         cudaStream_t stream) {
    GradientParams params{};
    params.backward = b, params.wanted = wanted, params.unwanted = unwanted;
    params.backward.forward.workspace = align_up(b.forward.workspace, alignof(float2));
    const AttentionParams& p = params.backward.forward;
    const auto aligned = [&](const TensorView& t, int heads, int columns) { return aligned_rows<float>(p, t, heads, columns); };
    params.aligned_q = aligned(p.q, p.nheads, p.headdim), params.aligned_dout = aligned(b.dout, p.nheads, p.headdim_v);
    params.aligned_k = aligned(p.k, p.nheads_k, p.headdim), params.aligned_v = aligned(p.v, p.nheads_k, p.headdim_v);
    params.aligned_dq = aligned(b.dq, p.nheads, p.headdim);
    params.aligned_dk = aligned(b.dk, p.nheads_k, p.headdim), params.aligned_dv = aligned(b.dv, p.nheads_k, p.headdim_v);
    const bool plain = !p.general_scores() && params.aligned_q && params.aligned_k && params.aligned_v && params.aligned_dout;
    if (p.headdim > 256 || p.headdim_v > 256) return launch<512>(params, plain, tile_memory(device), stream);
    return with_backward_bucket(p.headdim, p.headdim_v,
                                [&](auto d, auto) { return launch<decltype(d)::value>(params, plain, tile_memory(device), stream); });
}

cudaError_t backward_mma_float32_sm80(const BackwardParams& params, const DeviceInfo& device, cudaStream_t stream) {
    BackwardParams b = params;
    b.forward.workspace = align_up(params.forward.workspace, alignof(float2));
    const RowsOfCall rows = rows_of_call(b.forward);
    int* const some_large = reinterpret_cast<int*>(rows.delta + row_count(b.forward));
    if (const cudaError_t error = cudaMemsetAsync(some_large, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    if (const cudaError_t error = backward_delta(b, rows.delta, rows.bases, stream, some_large)) return error;
    if (const cudaError_t error = backward_mma_float32_sm80_if(nullptr, some_large, b, device, stream)) return error;
    return backward_simple_if(some_large, b, device, stream);
}

}  // namespace fa
