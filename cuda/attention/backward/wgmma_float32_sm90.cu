// wgmma_float32_sm90.cu: the gradients of attention in float32, with float32's accuracy, on Hopper's tensor cores, in float16 parts
// (attention/forward/wgmma_float32_sm90.cu has the idea, attention/common/float16_parts.cuh the parts). Every option except dropout, head
// dims to 128; deterministic.
//
// The two mirrored kernels of mma_float32_sm80.cu. A first kernel writes the parts of q, k, v and dout, in tiles of 64 rows with a scale
// each. New against mma_float32_sm80.cu:
//   - wgmma: two warpgroups own 64 rows each and walk over tiles of 64 rows, which a producer warp copies. A second producer warp loads the
//     statistics of walked queries.
//   - Each row of P and of dS in a tile is scaled by a power of 2 of its own, before it is split in registers.
//   - The products come in an order that frees one walked tile early: the next one arrives during the products of the other.
//
// Where the parts are not precise enough, mma_float32_sm80 serves the call, and simple where a row's |lse| is beyond 4096 or its delta
// NaN or beyond 2^99.
//
// Shared memory (PartsSmem)     own a, own b 2 x 64 x d | walked a, walked b stages x 64 x d; two parts each | statistics of queries
// Bound by the tensor cores, and by their reads of both operands of S and dP.
#include "attention/backward/common/float32_parts_blocks.cuh"
#include "common/constants.h"
#include "device/ptx.cuh"
#include "device/ring.cuh"

namespace fa {

namespace {

constexpr int kWarpgroups = 2, kRows = 64, kOwnRows = kWarpgroups * kRows;
constexpr int kBlockThreads = 128 * (kWarpgroups + 1);
constexpr int kChain = 4;                                         // steps of 16 that a chain of products adds up
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 40 x 128 + 232 x 256 <= 65536

struct PartsParams {
    BackwardParams backward;
    SplitTensor q, k, v, dout;
    int tiles;          // of kOwnRows own rows
    int* out_of_range;  // two words: the parts are not precise enough; some row is large
};

template <int kD>
__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ PartsParams params) {
    __shared__ uint32_t shared[split_words(kD)];
    const AttentionParams& p = params.backward.forward;
    const int blocks_q = params.q.tiles * p.nheads * p.batch, blocks_k = params.k.tiles * p.nheads_k * p.batch;
    int index = blockIdx.x;
    const SplitTensor* t = &params.q;
    if (index >= blocks_q) index -= blocks_q, t = &params.dout;
    if (t == &params.dout && index >= blocks_q) index -= blocks_q, t = &params.k;
    if (t == &params.k && index >= blocks_k) index -= blocks_k, t = &params.v;
    split_tile<kD, kRows, false, true>(*t, index, params.out_of_range, shared);
}

template <int kD>
struct alignas(1024) PartsSmem {
    static constexpr int kStages = kD <= 64 ? 2 : 1;
    __half own_a[kWarpgroups][2][kRows * kD];
    __half own_b[kWarpgroups][2][kRows * kD];
    __half walked_a[kStages][2][kRows * kD];
    __half walked_b[kStages][2][kRows * kD];
    static constexpr bool kHoldsDs = kD > 64;  // registers do not hold dS beside dK, dV, P and a chain
    __half ds[kWarpgroups][2][kHoldsDs ? kRows * kRows : 8];
    Query query[kStages][kRows];  // own keys: of the walked queries
    int cut[kStages];             // own keys: some pair of the tile is hidden
    BlockWork work;
    uint64_t own_full[1], a_full[kStages], a_empty[kStages], b_full[kStages], b_empty[kStages];
};

// kGeneral: options of scores, except dropout.
template <int kD, Own kOwn, bool kGeneral>
struct PartsBlock : BlockView<kOwn> {
    using BlockView<kOwn>::kOwnsKeys, BlockView<kOwn>::p, BlockView<kOwn>::w;
    using BlockView<kOwn>::walked_head, BlockView<kOwn>::walked_tile, BlockView<kOwn>::query_of;
    static constexpr int kStages = PartsSmem<kD>::kStages, kPairs = kRows / 2, kSums = kD / 2;
    static constexpr int64_t kTileElements = 2 * kRows * kD;
    static constexpr uint32_t kTileBytes = kTileElements * 2;

    const PartsParams& params;
    PartsSmem<kD>& smem;

    __device__ __forceinline__ const SplitTensor& own_a() const { return kOwnsKeys ? params.k : params.q; }
    __device__ __forceinline__ const SplitTensor& own_b() const { return kOwnsKeys ? params.v : params.dout; }
    __device__ __forceinline__ const SplitTensor& walked_a() const { return kOwnsKeys ? params.q : params.k; }
    __device__ __forceinline__ const SplitTensor& walked_b() const { return kOwnsKeys ? params.dout : params.v; }

    // One thread: all tiles.
    __device__ __forceinline__ void produce() const {
        const uint32_t own_full = shared_address(smem.own_full);
        mbarrier_arrive_expect_tx(own_full, 2 * kWarpgroups * kTileBytes);
        const int64_t own = tile_of<int64_t>(own_a(), w.batch, w.head, w.own0 / kRows) * kTileElements;
        bulk_load(shared_address(smem.own_a), own_a().parts + own, kWarpgroups * kTileBytes, own_full);
        bulk_load(shared_address(smem.own_b), own_b().parts + own, kWarpgroups * kTileBytes, own_full);
        Ring<kStages> a(smem.a_full, smem.a_empty), b(smem.b_full, smem.b_empty);
#pragma unroll 1
        for (int step = 0; step < w.all_steps; ++step) {
            const int64_t walked = tile_of<int64_t>(walked_a(), w.batch, walked_head(step), walked_tile(step)) * kTileElements;
            const auto load = [&](Ring<kStages>& ring, const auto& to, const SplitTensor& from) {
                ring.wait_empty();
                mbarrier_arrive_expect_tx(ring.full_barrier(), kTileBytes);
                bulk_load(shared_address(to[ring.slot]), from.parts + walked, kTileBytes, ring.full_barrier());
                ring.next();
            };
            if (kOwnsKeys) load(a, smem.walked_a, walked_a());  // in the order of their use
            load(b, smem.walked_b, walked_b());
            if (!kOwnsKeys) load(a, smem.walked_a, walked_a());
        }
    }
    // One warp: the statistics of walked queries, which arrive with the tiles of q.
    __device__ __forceinline__ void produce_queries() const {
        const int lane = threadIdx.x % 32;
        const RowsOfCall rows = rows_of_call(p);
        Ring<kStages> a(smem.a_full, smem.a_empty);
#pragma unroll 1
        for (int step = 0; step < w.all_steps; ++step) {
            const int head = walked_head(step), row0 = walked_tile(step) * kRows;
            bool cut = false;
            a.wait_empty();
#pragma unroll 1
            for (int x = lane; x < kRows; x += 32) {
                const Query query = query_of(rows, head, row0 + x);
                cut |= query.begin > w.own0 || query.end < w.own0 + kOwnRows;
                smem.query[a.slot][x] = query;
            }
            cut = __any_sync(~0u, cut);
            if (lane == 0) smem.cut[a.slot] = cut;
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(a.full_barrier());
            a.next();
        }
    }

    // C = own walked^T over kD columns. Each 64 columns have a chain of their own, or all have one.
    template <bool kOneChain>
    static __device__ __forceinline__ void multiply_rows(float (&C)[kPairs], uint32_t own, uint32_t walked) {
        constexpr int kSteps = kD / 16;
        if constexpr (kOneChain || kSteps == kChain) {
            chain_of_rows<kSteps>(C, own, walked, 0);
            wgmma_wait<0>(C);
        } else {
            float T[kPairs];
            chain_of_rows<kChain>(C, own, walked, 0);
            chain_of_rows<kChain>(T, own, walked, kChain);
            wgmma_wait<0>(C, T);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) C[i] += T[i];
        }
    }
    template <int kSteps>
    static __device__ __forceinline__ void chain_of_rows(float (&C)[kPairs], uint32_t own, uint32_t walked, int first) {
        own = opaque(own), walked = opaque(walked);  // else all descriptors are kept in registers, as they are the same in each step
        constexpr uint64_t kLow = descriptor_step(kTileBytes / 2);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < 3; ++x)
#pragma unroll
            for (int i = first; i < first + kSteps; ++i) {
                const uint64_t a = descriptor_from(own, (x == 0 ? kLow : 0) + descriptor_k_step(i, kRows));
                const uint64_t b = descriptor_from(walked, (x == 1 ? kLow : 0) + descriptor_k_step(i, kRows));
                if (x == 0 && i == first) wgmma_ss_first<__half, kRows>(C, a, b);
                else wgmma_ss<__half, kRows>(C, a, b, 1);
            }
        wgmma_commit();
    }
    // acc += weights walked, times a factor for each of the thread's two rows; 64 columns at a time.
    static __device__ __forceinline__ void add_rows(float (&acc)[kSums], const uint32_t (&high)[kPairs / 2],
                                                    const uint32_t (&low)[kPairs / 2], uint32_t walked, const float (&factor)[2]) {
        constexpr uint64_t kLow = descriptor_step(kTileBytes / 2);
#pragma unroll
        for (int half = 0; half < kD / 64; ++half) {
            float T[kPairs];
            const uint32_t columns = opaque(walked) + uint32_t(descriptor_step(half * kRows * kChunkRowBytes));
            wgmma_fence();
#pragma unroll
            for (int x = 0; x < 3; ++x)
#pragma unroll
                for (int i = 0; i < kChain; ++i)
                    wgmma_rs<__half, 64, 1>(T, (x == 0 ? low : high) + 4 * i,
                                            descriptor_from(columns, (x == 1 ? kLow : 0) + descriptor_row_step(i)), x != 0 || i != 0);
            wgmma_commit();
            wgmma_wait<0>(T);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) acc[half * kPairs + i] = fmaf(T[i], factor[i / 2 % 2], acc[half * kPairs + i]);
        }
    }
    static __device__ __forceinline__ void split(uint32_t (&high)[kPairs / 2], uint32_t (&low)[kPairs / 2], const float (&x)[kPairs],
                                                 const float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
            const float a = x[i] * factor[i / 2 % 2], b = x[i + 1] * factor[i / 2 % 2];
            high[i / 2] = pack_16<__half>(a, b);
            const float2 rounded = unpack_16<__half>(high[i / 2]);
            low[i / 2] = pack_16<__half>(a - rounded.x, b - rounded.y);
        }
    }

    // The same with weights in shared memory, as store_parts leaves them.
    static __device__ __forceinline__ void add_shared_rows(float (&acc)[kSums], uint32_t weights, uint32_t walked,
                                                           const float (&factor)[2]) {
        constexpr uint64_t kLow = descriptor_step(kTileBytes / 2), kLowWeights = descriptor_step(kRows * kRows * 2);
#pragma unroll
        for (int half = 0; half < kD / 64; ++half) {
            float T[kPairs];
            weights = opaque(weights);
            const uint32_t columns = opaque(walked) + uint32_t(descriptor_step(half * kRows * kChunkRowBytes));
            wgmma_fence();
#pragma unroll
            for (int x = 0; x < 3; ++x)
#pragma unroll
                for (int i = 0; i < kChain; ++i) {
                    const uint64_t a = descriptor_from(weights, (x == 0 ? kLowWeights : 0) + descriptor_k_step(i, kRows));
                    const uint64_t b = descriptor_from(columns, (x == 1 ? kLow : 0) + descriptor_row_step(i));
                    if (x == 0 && i == 0) wgmma_ss_first<__half, 64, 0, 1>(T, a, b);
                    else wgmma_ss<__half, 64, 0, 1>(T, a, b, 1);
                }
            wgmma_commit();
            wgmma_wait<0>(T);
#pragma unroll
            for (int i = 0; i < kPairs; ++i) acc[half * kPairs + i] = fmaf(T[i], factor[i / 2 % 2], acc[half * kPairs + i]);
        }
    }
    // Stores the parts of x times a factor for each row as an A operand. Other warps of the warpgroup see them when it returns.
    __device__ __forceinline__ void store_parts(const float (&x)[kPairs], const float (&factor)[2], int wg) const {
        const int thread = opaque(int(threadIdx.x)), quad = thread % 4, row = thread % 128 / 32 * 16 + thread % 32 / 4;
        const uint32_t to = shared_address(smem.ds[wg][0]) + 4 * quad;
        bar_sync(1 + wg, 128);  // nobody reads the parts of the last step any more
#pragma unroll
        for (int i = 0; i < kPairs; i += 2) {
            const int r = i / 2 % 2;
            const float a = x[i] * factor[r], b = x[i + 1] * factor[r];
            const uint32_t high = pack_16<__half>(a, b);
            const float2 rounded = unpack_16<__half>(high);
            const uint32_t place = to + swizzled_offset(kRows, row + 8 * r, i / 4);
            store_shared_4(place, high);
            store_shared_4(place + kRows * kRows * 2, pack_16<__half>(a - rounded.x, b - rounded.y));
        }
        fence_proxy_async();
        bar_sync(1 + wg, 128);
    }

    // S and dP become P and dS. element i: own row g + 8 (i / 2 % 2), walked row 8 (i / 4) + 2 quad + i % 2.
    template <typename StatisticsOf>
    __device__ __forceinline__ void gradients(float (&S)[kPairs], float (&dP)[kPairs], float scale_s, float scale_dp, bool cut, int own,
                                              int walked, const StatisticsOf& statistics) const {
#pragma unroll
        for (int n = 0; n < kPairs; n += 4) {
            if (kOwnsKeys) forget_registers();  // or the statistics of all columns are loaded at once
#pragma unroll
            for (int i = n; i < n + 4; ++i) {
                const Query& query = statistics(i);
                const float P = exp2_approx(fmaf(fmaf(S[i], scale_s, -query.max), p.scale, -query.rest) * kLog2e);
                S[i] = P;
                dP[i] = P * fmaf(dP[i], scale_dp, -query.delta);
            }
            if (!cut) continue;
#pragma unroll
            for (int i = n; i < n + 4; ++i) {
                const Query& query = statistics(i);
                const int a = own + i / 2 % 2 * 8, b = walked + i / 4 * 8 + i % 2, key = kOwnsKeys ? a : b;
                const bool seen = key >= query.begin && key < query.end;
                S[i] = seen ? S[i] : 0.0f, dP[i] = seen ? dP[i] : 0.0f;
            }
        }
    }

    // The same with options. `head`: of the queries.
    template <typename StatisticsOf>
    __device__ __forceinline__ void general_gradients(float (&S)[kPairs], float (&dP)[kPairs], float scale_s, float scale_dp, int head,
                                                      int own, int walked, const StatisticsOf& statistics) const {
#pragma unroll
        for (int n = 0; n < kPairs; n += 4) {
            forget_registers();
            GeneralPairs<true> pairs(p, w.s, w.batch, head);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Query& query = statistics(n + e);
                const int a = opaque(own) + e / 2 * 8, b = opaque(walked) + n / 4 * 8 + e % 2;
                pairs.put(e, S[n + e] * scale_s, kOwnsKeys ? b : a, kOwnsKeys ? a : b, query);
            }
            pairs.transform();
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Query& query = statistics(n + e);
                const float P = pairs.probability(e, query);
                S[n + e] = P;
                dP[n + e] = pairs.seen[e] ? P * pairs.slope[e] * fmaf(dP[n + e], scale_dp, -query.delta) : 0.0f;
            }
        }
    }

    __device__ __forceinline__ void consume(int wg) const {
        const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), quad = lane % 4;
        const int own = w.own0 + wg * kRows + warp * 16 + lane / 4;  // and own + 8
        const auto descriptor = [](const __half* tile) { return descriptor_low(shared_address(tile), kRows * kChunkRowBytes); };
        const uint32_t own_a_tile = descriptor(smem.own_a[wg][0]), own_b_tile = descriptor(smem.own_b[wg][0]);
        const int64_t own_tile = tile_of<int64_t>(own_a(), w.batch, w.head, w.own0 / kRows + wg);
        const float own_a_scale = own_a().scales[own_tile], own_b_scale = own_b().scales[own_tile];
        Query mine[kOwnsKeys ? 1 : 2];
        if constexpr (!kOwnsKeys)
#pragma unroll
            for (int r = 0; r < 2; ++r) mine[r] = query_of(rows_of_call(p), w.head, own + 8 * r);
        float acc_a[kSums] = {}, acc_b[kSums] = {};
        mbarrier_wait(shared_address(smem.own_full), 0);
#pragma unroll 1
        for (int step = 0; step < w.all_steps; ++step) {
            Ring<kStages> a(smem.a_full, smem.a_empty, step), b(smem.b_full, smem.b_empty, step);
            const int64_t walked = tile_of<int64_t>(walked_a(), w.batch, walked_head(step), walked_tile(step));
            const float a_scale = walked_a().scales[walked], b_scale = walked_b().scales[walked];
            const uint32_t a_tile = descriptor(smem.walked_a[a.slot][0]), b_tile = descriptor(smem.walked_b[b.slot][0]);
            constexpr bool kShared = kOwnsKeys && PartsSmem<kD>::kHoldsDs;
            float S[kPairs], dP[kPairs];
            if constexpr (kOwnsKeys) {
                a.wait_full();
                multiply_rows<false>(S, own_a_tile, a_tile);
                b.wait_full();
                multiply_rows<kShared>(dP, own_b_tile, b_tile);  // beside dK, dV and S there are no registers for a second chain
            } else {
                b.wait_full();
                multiply_rows<false>(dP, own_b_tile, b_tile);
                b.release(lane);
                a.wait_full();
                multiply_rows<false>(S, own_a_tile, a_tile);
            }
            const float scale_s = own_a_scale * a_scale, scale_dp = own_b_scale * b_scale;
            const int walked0 = walked_tile(step) * kRows + 2 * quad;
            if constexpr (kOwnsKeys) {
                const Query* const query = smem.query[a.slot] + 2 * quad;
                const auto statistics = [=](int i) -> const Query& { return query[i / 4 * 8 + i % 2]; };
                if constexpr (kGeneral) general_gradients(S, dP, scale_s, scale_dp, walked_head(step), own, walked0, statistics);
                else gradients(S, dP, scale_s, scale_dp, smem.cut[a.slot], own, walked0, statistics);
            } else {
                const int key0 = walked_tile(step) * kRows;
                bool less = false;
#pragma unroll
                for (int r = 0; r < 2; ++r) less |= mine[r].begin > key0 || mine[r].end < key0 + kRows;
                const auto statistics = [&](int i) -> const Query& { return mine[i / 2 % 2]; };
                if constexpr (kGeneral) general_gradients(S, dP, scale_s, scale_dp, w.head, own, walked0, statistics);
                else gradients(S, dP, scale_s, scale_dp, __any_sync(~0u, less), own, walked0, statistics);
            }
            float up[2], down[2];
            scales_of_rows(dP, a_scale, up, down);
            uint32_t high[kPairs / 2], low[kPairs / 2];
            if constexpr (kShared) {
                store_parts(dP, up, wg);
                add_shared_rows(acc_a, descriptor(smem.ds[wg][0]), a_tile, down);
            } else {
                split(high, low, dP, up);
                add_rows(acc_a, high, low, a_tile, down);
            }
            a.release(lane);
            if constexpr (kOwnsKeys) {
                scales_of_rows(S, b_scale, up, down);
                split(high, low, S, up);
                add_rows(acc_b, high, low, b_tile, down);
                b.release(lane);
            }
        }
        store_sums(acc_a, acc_b, wg);
    }
    __device__ __forceinline__ void store_sums(const float (&acc_a)[kSums], const float (&acc_b)[kSums], int wg) const {
        const int thread = opaque(int(threadIdx.x)), quad = thread % 4,
                  own = w.own0 + wg * kRows + thread % 128 / 32 * 16 + thread % 32 / 4;
        this->store(acc_a, acc_b, own, [=](int i) { return i / 4 * 8 + 2 * quad; });
    }
};

template <int kD, Own kOwn, bool kGeneral>
__global__ void __launch_bounds__(kBlockThreads, 1) gradient_kernel(const __grid_constant__ PartsParams params) {
    if (params.out_of_range[0] || params.out_of_range[1]) return;
    static_assert(sizeof(PartsSmem<kD>) <= 227 * 1024, "a block of sm_90 has no more");
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& smem = *reinterpret_cast<PartsSmem<kD>*>(shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        smem.work = work_of_block<kOwn, kOwnRows, kRows>(params.backward.forward, params.tiles, blockIdx.x);
        mbarrier_init(shared_address(smem.own_full), 1);
        for (int i = 0; i < PartsSmem<kD>::kStages; ++i) {
            mbarrier_init(shared_address(smem.b_full + i), 1);
            mbarrier_init(shared_address(smem.a_full + i), 1 + (kOwn == Own::kKeys ? kWarpArrivals : 0));
            mbarrier_init(shared_address(smem.a_empty + i), 4 * kWarpgroups * kWarpArrivals);
            mbarrier_init(shared_address(smem.b_empty + i), 4 * kWarpgroups * kWarpArrivals);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const PartsBlock<kD, kOwn, kGeneral> block{{params.backward, params.backward.forward, smem.work}, params, smem};
    if (warpgroup == 0) {
        setmaxnreg_dec<kProducerRegisters>();
        if (threadIdx.x == 0) block.produce();
        if (kOwn == Own::kKeys && threadIdx.x / 32 == 1) block.produce_queries();
        return;
    }
    setmaxnreg_inc<kConsumerRegisters>();
    block.consume(warpgroup - 1);
}

// ---- launch ----

int bucket(const AttentionParams& p) { return p.headdim <= 64 && p.headdim_v <= 64 ? 64 : 128; }

// Divides the workspace behind the statistics of the rows, and returns the bytes of the whole.
size_t divide(const AttentionParams& p, unsigned char* base, PartsParams* to) {
    const int64_t d = bucket(p), heads_q = int64_t(p.nheads) * p.batch, heads_k = int64_t(p.nheads_k) * p.batch;
    const int64_t tiles_q = (p.seqlen_q + kOwnRows - 1) / kOwnRows * kWarpgroups,
                  tiles_k = (p.seqlen_k + kOwnRows - 1) / kOwnRows * kWarpgroups;
    PartsWorkspace space{base};
    to->out_of_range = space.take_statistics(p);
    for (SplitTensor* t : {&to->q, &to->dout}) space.place(*t, heads_q, tiles_q, kRows, d);
    for (SplitTensor* t : {&to->k, &to->v}) space.place(*t, heads_k, tiles_k, kRows, d);
    return space.used;
}

template <int kD, Own kOwn>
cudaError_t launch(PartsParams& params, cudaStream_t stream) {
    const AttentionParams& p = params.backward.forward;
    params.tiles = ((kOwn == Own::kKeys ? p.seqlen_k : p.seqlen_q) + kOwnRows - 1) / kOwnRows;
    const int64_t blocks = int64_t(params.tiles) * (kOwn == Own::kKeys ? p.nheads_k : p.nheads) * p.batch;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(p.general_scores() ? gradient_kernel<kD, kOwn, true> : gradient_kernel<kD, kOwn, false>, unsigned(blocks),
                         kBlockThreads, sizeof(PartsSmem<kD>), stream, params);
}
template <int kD>
cudaError_t launch(PartsParams& params, cudaStream_t stream) {
    const AttentionParams& p = params.backward.forward;
    const int64_t blocks = int64_t(2) * p.batch * (int64_t(params.q.tiles) * p.nheads + int64_t(params.k.tiles) * p.nheads_k);
    if (blocks > 0)
        if (const cudaError_t error = launch_kernel(split_kernel<kD>, unsigned(blocks), kSplitThreads, 0, stream, params)) return error;
    if (const cudaError_t error = launch<kD, Own::kKeys>(params, stream)) return error;
    return launch<kD, Own::kQueries>(params, stream);
}

}  // namespace

size_t backward_wgmma_float32_sm90_workspace(const BackwardParams& b, const DeviceInfo&) {
    PartsParams params{};
    return divide(b.forward, nullptr, &params) + 1024;
}

cudaError_t backward_wgmma_float32_sm90(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    PartsParams params{};
    params.backward = b;
    AttentionParams& p = params.backward.forward;
    p.workspace = align_up(b.forward.workspace, 1024);
    divide(p, static_cast<unsigned char*>(p.workspace), &params);
    view_tensor(params.q, p.q, p.nheads, p.seqlen_q, p.headdim), view_tensor(params.dout, b.dout, p.nheads, p.seqlen_q, p.headdim_v);
    view_tensor(params.k, p.k, p.nheads_k, p.seqlen_k, p.headdim), view_tensor(params.v, p.v, p.nheads_k, p.seqlen_k, p.headdim_v);
    return launch_with_fallbacks(params.backward, params.out_of_range, device, stream,
                                 [&] { return bucket(p) == 64 ? launch<64>(params, stream) : launch<128>(params, stream); });
}

}  // namespace fa
