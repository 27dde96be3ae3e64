// mma_short_sm80.cu: the gradients of short sequences on tensor cores, in one launch; fp16 and bf16, head dims to 256, every option, sm_80
// to sm_90. Where a call has few tiles, its time is that of its kernels one after another: mma_sm80 and wgmma_sm90 launch three to five.
// New against mma_sm80/kernel.cuh: no kernel before or after, no workspace.
//
//     S = Q K^T      P = exp(S - lse)      dP = dO V^T      dS = P (dP - delta)      dV = P^T dO      dK = scale dS^T Q      dQ = scale dS
//     K
//
//   - a block of keys owns 64 keys and walks over the queries of every head that reads them; dK and dV stay in registers
//   - a block of queries owns 64 queries and walks over their keys; dQ stays in registers. S and dP are computed a second time: seven
//     products instead of five, but no sum has two owners, so there are no atomics, and the bits are always the same
//   - on Hopper a cluster of up to eight blocks has the same owner, where there are fewer owners than places on the GPU: its blocks share
//     the steps, and add their sums up through each other's shared memory, in the order of their ranks
//   - delta = rowsum(dO * O) - dlse is computed by whoever needs it, from tiles in shared memory
//   - where all keys fit in one block and the GPU is full, the block of keys writes dQ, too, and there are no blocks of queries. With a
//     mask it has one step, for it may have to zero K
//
// One step (|: block barrier), eight warps. For S and dP a warp has 16 queries and 32 keys, for a gradient 16 rows and half of the columns.
//
//     copy     | Q, dO, O of the next step (head dims to 64; above, once the step is done) . . . . . . . . |
//     tensor   |           S = Q K^T   dP = dO V^T              | dV += P^T dO   dK += dS^T Q   dQ = dS K   |
//     ALU      | delta                              exp2   dS   |                                           |
//
// Shared memory (ShortSmem)     K, V 64 x d | Q, dO, O stages x 64 x d | P, dS 64 x 64 | lse of large rows
// Bound by latency: the copies of the first tiles, and a step after the other.
#include "attention/backward/common/empty_rows.cuh"
#include "attention/backward/common/mma_sm80_parts.cuh"
#include "attention/backward/mma_short_sm80.h"
#include "attention/kernels.h"
#include "device/cluster.cuh"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kTile = 64, kThreads = 256, kRowWarps = 4, kHalves = 2;  // 4 x 2 warps
constexpr int kTilesS = kTile / kHalves / 8;                           // n8 tiles of S of a warp

#if defined(__CUDA_ARCH__)
constexpr bool kLargeSm = kTarget >= 900;
#else
constexpr bool kLargeSm = true;
#endif

struct ShortParams {
    BackwardParams backward;
    int tiles_q;                      // of the longest sequence
    int key_clusters;                 // clusters below this one own keys, the others queries
    int cluster;                      // blocks of a cluster; 1: no clusters
    bool keys_write_dq, keys_zeroed;  // keys_zeroed: beside a mask
    float scale_log2;                 // scale x log2(e)
    bool aligned_q, aligned_k, aligned_v, aligned_out, aligned_dout, aligned_dq, aligned_dk, aligned_dv;
};

template <typename T, int kD>
struct ShortSmem {
    static constexpr int kStages = backward_short_stages(kD);
    alignas(128) T own[2][kTile * kD];              // K, V of a block of keys; Q, dO of a block of queries
    alignas(128) T walked[kStages][3][kTile * kD];  // Q, dO, O; K, V, and at first O
    alignas(128) T p[kTile * kTile];                // a row per query
    alignas(128) T ds[kTile * kTile];
    float statistic[kHalves][kTile];  // each half of the warps has its own
    float2 large[kHalves][kTile];     // RowBase of large rows
    int used[kTile];                  // with a mask or bias: whether some row of the step has a nonzero dS for this key
};

// The statistics of a thread's rows in a fragment: lse as an exponent of 2 or kLargeRow, and delta.
struct RowValues {
    float lse[2], delta[2];
};

// What a block knows of its sequence, and where a warp's shares begin.
template <typename T, int kD, Scores kScores>
struct ShortBlock {
    static constexpr bool kGeneral = kScores == Scores::kGeneral;
    static constexpr int kStages = ShortSmem<T, kD>::kStages, kTilesOut = kD / kHalves / 8;
    using Tile = SharedTile<T, kD>;
    using TileP = SharedTile<T, kTile>;
    using Gradient = float[1][kTilesOut][4];

    const ShortParams& params;
    const BackwardParams& backward;
    const AttentionParams& p;
    ShortSmem<T, kD>& smem;
    int b;
    Sequence s;
    int lane, half, share;  // share: the first of the warp's 16 rows of a tile
    int rank;               // in the cluster

    __device__ __forceinline__ ShortBlock(const ShortParams& params, ShortSmem<T, kD>& smem, int b)
        : params(params), backward(params.backward), p(backward.forward), smem(smem), b(b), s(sequence_of(p, b)) {
        const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
        lane = threadIdx.x % 32, half = warp / kRowWarps, share = warp % kRowWarps * 16;
        rank = params.cluster > 1 ? int(cluster_rank()) : 0;
    }

    // ---- copies to shared memory ----

    __device__ __forceinline__ void load(const T* to, const TensorView& x, int64_t first, int head, int row0, KeyRange rows, int columns,
                                         bool aligned) const {
        const T* from = static_cast<const T*>(x.data) + first + head * x.head + row0 * x.row;
        load_tile<kTile, kD, kThreads, true>(to, from, x.row, rows.begin - row0, rows.end - row0, columns, aligned);
    }
    __device__ __forceinline__ void load_queries(const T* q, const T* dout, const T* out, int head, int row0, KeyRange rows) const {
        load(q, p.q, s.q, head, row0, rows, p.headdim, params.aligned_q);
        load(dout, backward.dout, gradients_of(backward, b).dout, head, row0, rows, p.headdim_v, params.aligned_dout);
        load(out, p.out, s.out, head, row0, rows, p.headdim_v, params.aligned_out);
    }
    __device__ __forceinline__ void load_keys(const T* k, const T* v, int head_k, int key0, KeyRange keys) const {
        load(k, p.k, s.k, head_k, key0, keys, p.headdim, params.aligned_k);
        load(v, p.v, s.v, head_k, key0, keys, p.headdim_v, params.aligned_v);
    }

    // ---- scores ----

    // lse of the row that this lane looks after in row_values; two lanes have the same one.
    __device__ __forceinline__ float own_lse(int head, int row0) const {
        const int row = row0 + share + lane / 2;
        return row < s.seqlen_q ? p.lse[lse_offset(p, s, head) + row] : -INFINITY;
    }
    // dO and O of the warp's 16 rows are in shared memory.
    __device__ __forceinline__ RowValues row_values(const T* dout, const T* out, int head, int row0, float lse) const {
        const int row = share + lane / 2;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Tile::kPieces / 2; ++i) {
            const uint32_t at = Tile::offset(row, i + lane % 2 * (Tile::kPieces / 2));
            const uint4 x = *reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(dout) + at);
            const uint4 y = *reinterpret_cast<const uint4*>(reinterpret_cast<const unsigned char*>(out) + at);
            const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float u[2], w[2];
                unpack_16<T>(u, xs[e]), unpack_16<T>(w, ys[e]);
                sum = fmaf(u[0], w[0], sum), sum = fmaf(u[1], w[1], sum);
            }
        }
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        const bool empty = lse == -INFINITY;  // P = 0, so P (dP - delta) must be 0, too, whatever dlse holds
        if (!empty && backward.dlse) sum -= backward.dlse[lse_offset(p, s, head) + row0 + row];
        float statistic = row_statistic(lse);
        if (__any_sync(kFullWarp, is_large(lse))) {  // rare
            float* const statistics = smem.statistic[half];
            float2* const large = smem.large[half];
            statistics[row] = statistic;
            __syncwarp();
            find_large_rows<T>(p, s, b, head, row0 + share, kGeneral, LseCovers::kPerhapsMore, [=](int i, const RowBase& base) {
                statistics[i - row0] = kLargeRow, large[i - row0] = make_float2(base.max, base.rest);
            });
            __syncwarp();
            statistic = statistics[row];
        }
        const float delta = empty ? 0.0f : sum;
        RowValues values;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int from = 2 * mma_row(lane, 2 * r);
            values.lse[r] = __shfl_sync(kFullWarp, statistic, from), values.delta[r] = __shfl_sync(kFullWarp, delta, from);
        }
        return values;
    }

    // P and dS of 64 queries and 64 keys, to shared memory. q, dout, k and v are tiles there.
    __device__ __forceinline__ void scores(const T* q, const T* dout, const T* k, const T* v, int head, int row0, int key0,
                                           const RowValues& rows) const {
        const int first_key = half * (8 * kTilesS), row_b = first_key + lane % 8 + lane / 16 * 8;
        const uint32_t a = Tile::offset(share + lane % 16, lane / 16), b_ = Tile::offset(row_b, lane / 8 % 2);
        float S[1][kTilesS][4], dP[1][kTilesS][4];
        clear(S), clear(dP);
        multiply_rows<T, Tile, Tile, kD / 16>(S, shared_address(q) + a, shared_address(k) + b_, Nothing{});
        multiply_rows<T, Tile, Tile, kD / 16>(dP, shared_address(dout) + a, shared_address(v) + b_, Nothing{});
        const float2* const large = smem.large[half] + share + mma_row(lane, 0);
        if constexpr (kGeneral) {
            const FragmentPlace at{b,          head,   row0 + share + mma_row(lane, 0), key0 + first_key + mma_column(lane, 0), s.seqlen_q,
                                   s.seqlen_k, s.shift};
            general_gradients<T>(p, at, lane % 4, rows.lse, large, rows.delta, flat(S[0]), flat(dP[0]));
        } else {
            adjust_large(rows.lse, large, flat(S[0]), large_score);
#pragma unroll
            for (int i = 0; i < 4 * kTilesS; ++i) {
                const int r = i / 2 % 2;
                const float P = exp2_approx(fmaf(flat(S[0])[i], params.scale_log2, -rows.lse[r]));
                flat(S[0])[i] = P, flat(dP[0])[i] = P * (flat(dP[0])[i] - rows.delta[r]);
            }
        }
        const KeyRange whole = rows_seeing_all(p, s, key0, key0 + kTile - 1);
        if (row0 < whole.begin || row0 + kTile > whole.end) {
            hide(S, p, s, row0 + share, key0 + first_key, lane);
            hide(dP, p, s, row0 + share, key0 + first_key, lane);
        }
#pragma unroll
        for (int n = 0; n < kTilesS; ++n)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t to = TileP::offset(share + mma_row(lane, 2 * r), first_key / 8 + n) + lane % 4 * 4;
                *reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(smem.p) + to) =
                    pack_16<T>(S[0][n][2 * r], S[0][n][2 * r + 1]);
                *reinterpret_cast<uint32_t*>(reinterpret_cast<unsigned char*>(smem.ds) + to) =
                    pack_16<T>(dP[0][n][2 * r], dP[0][n][2 * r + 1]);
            }
        if (kGeneral && p.may_hide_keys()) {
#pragma unroll
            for (int i = 0; i < 4 * kTilesS; ++i)
                if (flat(dP[0])[i] != 0) smem.used[first_key + 8 * (i / 4) + mma_column(lane, i)] = 1;
        }
    }

    // ---- gradients ----

    // A key without a nonzero dS in this step may hold NaN in K, and 0 x NaN is NaN: its K is zeroed.
    __device__ __forceinline__ void zero_unused_keys(T* k) const {
        for (int x = opaque(int(threadIdx.x)); x < kTile * Tile::kPieces; x += kThreads)
            if (!smem.used[x / Tile::kPieces]) reinterpret_cast<uint4*>(k)[x] = uint4{};
        __syncthreads();
    }
    // C += X^T Y: 16 keys, the sum over the 64 queries of the step. X is P or dS, Y is dO or Q.
    __device__ __forceinline__ void add_to_keys(Gradient& C, const T* x, const T* y) const {
        const uint32_t a = shared_address(x) + TileP::offset(lane % 8 + lane / 16 * 8, share / 8 + lane / 8 % 2);
        multiply_columns<T, TileP, Tile, OperandA::kTransposed, kHalves, 0, kTile / 16>(C, a, columns_of(y));
    }
    // C += dS K: 16 queries, the sum over the 64 keys of the step.
    __device__ __forceinline__ void add_to_queries(Gradient& C, const T* k) const {
        const uint32_t a = shared_address(smem.ds) + TileP::offset(share + lane % 16, lane / 16);
        multiply_columns<T, TileP, Tile, OperandA::kAsStored, kHalves, 0, kTile / 16>(C, a, columns_of(k));
    }
    __device__ __forceinline__ uint32_t columns_of(const T* y) const {
        return shared_address(y) + Tile::offset(lane % 16, 2 * half + lane / 16);
    }
    // Adds up the sums of all blocks of the cluster, in the order of their ranks. Each block does so for some pairs of column tiles:
    // store(x, first, C) gets a pair of sums[x], whose first column is 16 `first`.
    template <int kCount, typename Store>
    __device__ __forceinline__ void reduce(const Gradient (&sums)[kCount], const Store& store) const {
        constexpr int kPairs = kTilesOut / 2;
        static_assert(kCount * kPairs * 2 * kThreads * sizeof(float4) <= sizeof smem.own + sizeof smem.walked,
                      "fragments fit into the tiles");
        float4* const fragments = reinterpret_cast<float4*>(smem.own) + threadIdx.x;
        const int blocks = params.cluster;
        cp_async_wait_all();
        __syncthreads();  // nobody reads the tiles any more
#pragma unroll
        for (int x = 0; x < kCount; ++x)
#pragma unroll
            for (int n = 0; n < kTilesOut; ++n) {
                const float(&from)[4] = sums[x][0][n];
                fragments[(x * kTilesOut + n) * kThreads] = make_float4(from[0], from[1], from[2], from[3]);
            }
        if (blocks > 1) cluster_arrive_release(), cluster_wait();
#pragma unroll 1
        for (int unit = rank; unit < kCount * kPairs; unit += blocks) {
            float C[1][2][4];
            clear(C);
#pragma unroll 1
            for (int other = 0; other < blocks; ++other)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float4* const from = fragments + (2 * unit + e) * kThreads;
                    const float4 x = blocks > 1 ? load_cluster_16(cluster_address(shared_address(from), other)) : *from;
                    C[0][e][0] += x.x, C[0][e][1] += x.y, C[0][e][2] += x.z, C[0][e][3] += x.w;
                }
            store(unit / kPairs, kHalves * (unit % kPairs) + half, C);
        }
        if (blocks > 1) cluster_arrive_release(), cluster_wait();  // nobody leaves while others read its shared memory
    }
    template <int kCount>
    __device__ __forceinline__ void store_dq(float (&dQ)[1][kCount][4], int head, int row0, int first) const {
        clear_empty_rows(dQ, p, s, head, row0 + share, lane);
        T* const to = static_cast<T*>(backward.dq.data) + gradients_of(backward, b).dq + head * backward.dq.head;
        store_rows<T, kHalves>(dQ, p.scale, to, backward.dq.row, row0 + share, s.seqlen_q, first, p.headdim, params.aligned_dq,
                               backward.accumulate, lane);
    }

    // ---- the two kinds of blocks ----

    __device__ __forceinline__ void own_keys(int head_k, int key0) const {
        const bool writes_dq = params.keys_write_dq, zeroes_keys = kGeneral && params.keys_zeroed;
        if (key0 >= s.seqlen_k && !writes_dq) return;
        const KeyRange keys = keys_seen(p, s), rows = rows_seeing(p, s, key0, min(key0 + kTile, s.seqlen_k) - 1);
        // Rows that see none of the keys have a dQ, too: 0.
        const int first = writes_dq ? 0 : rows.begin / kTile, end = ((writes_dq ? s.seqlen_q : rows.end) + kTile - 1) / kTile;
        const int tiles = writes_dq || rows.end > rows.begin ? end - first : 0, steps = tiles * p.group;
        const auto load_step = [&](int step, int stage) {
            const auto& to = smem.walked[stage];
            load_queries(to[0], to[1], to[2], head_k * p.group + step / tiles, (first + step % tiles) * kTile, rows);
            cp_async_commit();
        };
        load_keys(smem.own[0], smem.own[1], head_k, key0, keys);
        if (rank < steps) load_step(rank, 0);
        Gradient sums[2];  // dK, dV
        clear(sums[0]), clear(sums[1]);
        int stage = 0;
#pragma unroll 1
        for (int step = rank; step < steps; step += params.cluster) {
            const auto& queries = smem.walked[stage];
            const int head = head_k * p.group + step / tiles, row0 = (first + step % tiles) * kTile, next = step + params.cluster;
            const float lse = own_lse(head, row0);
            if (zeroes_keys && threadIdx.x < kTile) smem.used[threadIdx.x] = 0;
            cp_async_wait_all();
            __syncthreads();  // this step is here; nobody reads the previous step any more
            if (kStages == 2) {
                stage ^= 1;
                if (next < steps) load_step(next, stage);
            }
            const RowValues values = row_values(queries[1], queries[2], head, row0, lse);
            scores(queries[0], queries[1], smem.own[0], smem.own[1], head, row0, key0, values);
            __syncthreads();  // P and dS are here
            add_to_keys(sums[1], smem.p, queries[1]);
            add_to_keys(sums[0], smem.ds, queries[0]);
            if (writes_dq) {
                if (zeroes_keys) zero_unused_keys(smem.own[0]);  // it is the only step
                Gradient dQ;
                clear(dQ);
                add_to_queries(dQ, smem.own[0]);
                store_dq(dQ, head, row0, half);
            }
            if (kStages == 1 && next < steps) {
                __syncthreads();  // nobody reads this step any more
                load_step(next, 0);
            }
        }
        const GradientSequence to = gradients_of(backward, b);
        reduce(sums, [&](int x, int first, const float(&C)[1][2][4]) {
            const TensorView& view = x == 0 ? backward.dk : backward.dv;
            T* const begin = static_cast<T*>(view.data) + (x == 0 ? to.dk : to.dv) + head_k * view.head;
            store_rows<T, kHalves>(C, x == 0 ? p.scale : 1.0f, begin, view.row, key0 + share, s.seqlen_k, first,
                                   x == 0 ? p.headdim : p.headdim_v, x == 0 ? params.aligned_dk : params.aligned_dv, backward.accumulate,
                                   lane);
        });
    }

    __device__ __forceinline__ void own_queries(int head, int row0) const {
        if (row0 >= s.seqlen_q) return;
        const int begin = window_range(p, s, row0).begin, end = window_range(p, s, min(row0 + kTile, s.seqlen_q) - 1).end;
        const KeyRange keys{begin, max(begin, end)};
        const int first = keys.begin / kTile + rank, end_tile = keys.end > keys.begin ? (keys.end + kTile - 1) / kTile : first;
        const bool may_hide = kGeneral && p.may_hide_keys();
        const auto load_step = [&](int tile, int stage) {
            load_keys(smem.walked[stage][0], smem.walked[stage][1], head / p.group, tile * kTile, keys);
            cp_async_commit();
        };
        Gradient sums[1];
        clear(sums[0]);
        RowValues values;
        if (first < end_tile) {
            load_queries(smem.own[0], smem.own[1], smem.walked[0][2], head, row0, {0, s.seqlen_q});
            load_step(first, 0);
            const float lse = own_lse(head, row0);
            cp_async_wait_all();
            __syncthreads();
            values = row_values(smem.own[1], smem.walked[0][2], head, row0, lse);
        }
        int stage = 0;
#pragma unroll 1
        for (int tile = first; tile < end_tile; tile += params.cluster) {
            auto& to = smem.walked[stage];
            if (may_hide && threadIdx.x < kTile) smem.used[threadIdx.x] = 0;
            cp_async_wait_all();
            __syncthreads();
            if (kStages == 2) {
                stage ^= 1;
                if (tile + params.cluster < end_tile) load_step(tile + params.cluster, stage);
            }
            scores(smem.own[0], smem.own[1], to[0], to[1], head, row0, tile * kTile, values);
            __syncthreads();
            if (may_hide) zero_unused_keys(to[0]);
            add_to_queries(sums[0], to[0]);
            if (kStages == 1 && tile + params.cluster < end_tile) {
                __syncthreads();
                load_step(tile + params.cluster, 0);
            }
        }
        reduce(sums, [&](int, int first, float(&C)[1][2][4]) { store_dq(C, head, row0, first); });
    }
};

template <typename T, int kD, Scores kScores>
__global__ void __launch_bounds__(kThreads, backward_short_blocks_per_sm(kD, kLargeSm))
    gradient_kernel(const __grid_constant__ ShortParams params) {
#if defined(__CUDA_ARCH__)
    if constexpr (kTarget > 900) {  // the table of kernels names no GPU that runs this code
        __trap();
        return;
    }
#endif
    extern __shared__ __align__(128) unsigned char shared[];
    auto& smem = *reinterpret_cast<ShortSmem<T, kD>*>(shared);
    const AttentionParams& p = params.backward.forward;
    // Under a causal mask the first keys, and the last queries, see the most: they start first.
    const int cluster = int(blockIdx.x) / params.cluster;
    if (cluster < params.key_clusters) {
        const int heads = p.nheads_k * p.batch, index = cluster % heads;
        const ShortBlock<T, kD, kScores> block(params, smem, index / p.nheads_k);
        return block.own_keys(index % p.nheads_k, cluster / heads * kTile);
    }
    const int heads = p.nheads * p.batch, place = cluster - params.key_clusters, index = place % heads;
    const ShortBlock<T, kD, kScores> block(params, smem, index / p.nheads);
    block.own_queries(index % p.nheads, (params.tiles_q - 1 - place / heads) * kTile);
}

template <typename T, int kD>
cudaError_t launch(const BackwardParams& backward, const DeviceInfo& device, cudaStream_t stream) {
    static_assert(sizeof(ShortSmem<T, kD>) <= backward_short_bytes(kD), "what the registry asks for");
    const AttentionParams& p = backward.forward;
    ShortParams params{};
    params.backward = backward, params.scale_log2 = p.scale * kLog2e;
    const BackwardShortPlan plan = backward_short_plan(p, device);
    if (plan.clusters == 0) return cudaSuccess;
    params.tiles_q = int(plan.tiles_q), params.keys_write_dq = plan.keys_write_dq;
    params.keys_zeroed = plan.keys_write_dq && p.may_hide_keys();
    params.key_clusters = int(plan.key_clusters), params.cluster = plan.blocks;
    find_aligned_rows<T>(params);
    params.aligned_out = aligned_rows<T>(p, p.out, p.nheads, p.headdim_v);
    LaunchOptions options;
    options.cluster = unsigned(plan.blocks);
    const bool general = p.general_scores() || !(p.scale > 0);
    return launch_kernel(general ? gradient_kernel<T, kD, Scores::kGeneral> : gradient_kernel<T, kD, Scores::kPlain>,
                         unsigned(plan.clusters) * options.cluster, kThreads, sizeof(ShortSmem<T, kD>), stream, params, options);
}

template <typename T>
cudaError_t launch(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    const int d = backward_short_bucket(b.forward);
    return d == 64 ? launch<T, 64>(b, device, stream) : d == 128 ? launch<T, 128>(b, device, stream) : launch<T, 256>(b, device, stream);
}

}  // namespace

cudaError_t backward_mma_short_sm80(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    return b.forward.dtype == DType::kFloat16 ? launch<__half>(b, device, stream) : launch<__nv_bfloat16>(b, device, stream);
}

}  // namespace fa
