// wgmma_float32_wide_sm90.cu: wgmma_float32_sm90.cu for head dims above 128, to 256. Every option except softcap, whose slope would
// have to be exchanged, too, and dropout; deterministic.
//
// New against that kernel: a block owns 64 rows, because shared memory does not hold the parts of 128, and walks over tiles of 32. Its two
// warpgroups divide the work of a step by product and then by column:
//
//     warpgroup 0   S  = own_a walked_a^T, P  |  dS = P (dP - delta)   acc_a += dS walked_a, acc_b += P walked_b, the first half of d
//     warpgroup 1   dP = own_b walked_b^T     |  the same              the second half
//
// At | (a barrier of both) warpgroup 0 gives P and warpgroup 1 gives dP to the other, through shared memory. A thread has the same pairs in
// both. The exchange has two buffers, so that one barrier a step suffices.
//
// Shared memory (WideSmem)     own a, own b 64 x d | walked a, walked b 32 x d; two parts each | exchange | statistics of queries
// Bound by the reads of both operands of S and dP from shared memory, and by the tensor cores.
#include "attention/backward/common/float32_parts_blocks.cuh"
#include "common/constants.h"
#include "device/ptx.cuh"
#include "device/ring.cuh"

namespace fa {

namespace {

constexpr int kD = 256, kOwnRows = 64, kWalked = 32, kConsumerThreads = 256, kBlockThreads = 384;
constexpr int kChain = 4, kChains = kD / 16 / kChain;  // steps of 16 columns in a chain of S or dP; chains
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
constexpr int kPairs = kWalked / 2, kSums = kD / 4, kPiece = 64;  // of a thread: pairs of a step, sums of half of d; columns of a product

// The parts of a tensor, in tiles of own rows and in tiles of walked rows.
struct TwoTilings {
    SplitTensor own, walked;
};
struct WideParams {
    BackwardParams backward;
    TwoTilings q, k, v, dout;
    int* out_of_range;  // two words: the parts are not precise enough; some row is large
};

__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ WideParams params) {
    __shared__ uint32_t shared[split_words(kD)];
    const AttentionParams& p = params.backward.forward;
    const TwoTilings* const tensors[] = {&params.q, &params.dout, &params.k, &params.v};
    int index = blockIdx.x;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int heads = p.batch * (i < 2 ? p.nheads : p.nheads_k), own = tensors[i]->own.tiles * heads;
        if (index < own) return split_tile<kD, kOwnRows, false, true>(tensors[i]->own, index, params.out_of_range, shared);
        index -= own;
        const int walked = tensors[i]->walked.tiles * heads;
        if (index < walked) return split_tile<kD, kWalked, false, true>(tensors[i]->walked, index, params.out_of_range, shared);
        index -= walked;
    }
}

struct alignas(1024) WideSmem {
    __half own_a[2][kOwnRows * kD];
    __half own_b[2][kOwnRows * kD];
    __half walked_a[2][kWalked * kD];
    __half walked_b[2][kWalked * kD];
    float given[2][2][kPairs][128];  // buffer, P or dP, pair, thread
    Query query[kWalked];            // own keys: of the walked queries
    int cut;                         // own keys: some pair of the tile is hidden
    BlockWork work;
    uint64_t own_full[1], a_full[1], a_empty[1], b_full[1], b_empty[1];
};
static_assert(sizeof(WideSmem) <= 227 * 1024, "a block of sm_90 has no more");

// C = own walked^T: a chain for each 64 columns.
__device__ __forceinline__ void multiply_rows(float (&C)[kPairs], uint32_t own, uint32_t walked) {
    constexpr uint64_t kLowOwn = descriptor_step(kOwnRows * kD * 2), kLowWalked = descriptor_step(kWalked * kD * 2);
    float T[kChains][kPairs];
    own = opaque(own), walked = opaque(walked);  // else all descriptors are kept in registers, as they are the same in each step
    wgmma_fence();
#pragma unroll
    for (int chain = 0; chain < kChains; ++chain)
#pragma unroll
        for (int x = 0; x < 3; ++x)
#pragma unroll
            for (int i = kChain * chain; i < kChain * (chain + 1); ++i)
                wgmma_ss<__half, kWalked>(T[chain], descriptor_from(own, (x == 0 ? kLowOwn : 0) + descriptor_k_step(i, kOwnRows)),
                                          descriptor_from(walked, (x == 1 ? kLowWalked : 0) + descriptor_k_step(i, kWalked)),
                                          x != 0 || i != kChain * chain);
    wgmma_commit();
    wgmma_wait<0>(T[0], T[1], T[2], T[3]);
    static_assert(kChains == 4, "four accumulators");
#pragma unroll
    for (int i = 0; i < kPairs; ++i) C[i] = (T[0][i] + T[1][i]) + (T[2][i] + T[3][i]);
}
// acc += weights walked for the half of d that begins with 64-column chunk `chunk`, times a factor for each of the thread's two rows.
__device__ __forceinline__ void add_rows(float (&acc)[kSums], const float (&weights)[kPairs], const float (&up)[2], const float (&down)[2],
                                         uint32_t walked, int chunk) {
    constexpr uint64_t kLow = descriptor_step(kWalked * kD * 2);
    uint32_t high[kPairs / 2], low[kPairs / 2];
#pragma unroll
    for (int i = 0; i < kPairs; i += 2) {
        const float a = weights[i] * up[i / 2 % 2], b = weights[i + 1] * up[i / 2 % 2];
        high[i / 2] = pack_16<__half>(a, b);
        const float2 rounded = unpack_16<__half>(high[i / 2]);
        low[i / 2] = pack_16<__half>(a - rounded.x, b - rounded.y);
    }
#pragma unroll
    for (int piece = 0; piece < kD / 2 / kPiece; ++piece) {
        float T[kPiece / 2];
        const uint32_t columns = opaque(walked) + uint32_t(descriptor_step(kWalked * kChunkRowBytes)) * (chunk + piece);
        wgmma_fence();
#pragma unroll
        for (int x = 0; x < 3; ++x)
#pragma unroll
            for (int i = 0; i < kWalked / 16; ++i)
                wgmma_rs<__half, kPiece, 1>(T, (x == 0 ? low : high) + 4 * i,
                                            descriptor_from(columns, (x == 1 ? kLow : 0) + descriptor_row_step(i)), x != 0 || i != 0);
        wgmma_commit();
        wgmma_wait<0>(T);
#pragma unroll
        for (int i = 0; i < kPiece / 2; ++i) {
            float& sum = acc[piece * kPiece / 2 + i];
            sum = fmaf(T[i], down[i / 2 % 2], sum);
        }
    }
}

template <Own kOwn, bool kGeneral>
struct WideBlock : BlockView<kOwn> {
    using BlockView<kOwn>::kOwnsKeys, BlockView<kOwn>::p, BlockView<kOwn>::w;
    using BlockView<kOwn>::walked_head, BlockView<kOwn>::walked_tile, BlockView<kOwn>::query_of;
    static constexpr uint32_t kOwnBytes = 2 * kOwnRows * kD * 2, kWalkedBytes = 2 * kWalked * kD * 2;

    const WideParams& params;
    WideSmem& smem;

    __device__ __forceinline__ const SplitTensor& own_a() const { return kOwnsKeys ? params.k.own : params.q.own; }
    __device__ __forceinline__ const SplitTensor& own_b() const { return kOwnsKeys ? params.v.own : params.dout.own; }
    __device__ __forceinline__ const SplitTensor& walked_a() const { return kOwnsKeys ? params.q.walked : params.k.walked; }
    __device__ __forceinline__ const SplitTensor& walked_b() const { return kOwnsKeys ? params.dout.walked : params.v.walked; }

    // One thread: all tiles.
    __device__ __forceinline__ void produce() const {
        const uint32_t own_full = shared_address(smem.own_full);
        mbarrier_arrive_expect_tx(own_full, 2 * kOwnBytes);
        const int64_t own = int64_t(tile_of<int>(own_a(), w.batch, w.head, w.own0 / kOwnRows)) * (kOwnBytes / 2);
        bulk_load(shared_address(smem.own_a), own_a().parts + own, kOwnBytes, own_full);
        bulk_load(shared_address(smem.own_b), own_b().parts + own, kOwnBytes, own_full);
        Ring<1> a(smem.a_full, smem.a_empty), b(smem.b_full, smem.b_empty);
#pragma unroll 1
        for (int step = 0; step < w.all_steps; ++step) {
            const int64_t walked = int64_t(tile_of<int>(walked_a(), w.batch, walked_head(step), walked_tile(step))) * (kWalkedBytes / 2);
            const auto load = [&](Ring<1>& ring, const auto& to, const SplitTensor& from) {
                ring.wait_empty();
                mbarrier_arrive_expect_tx(ring.full_barrier(), kWalkedBytes);
                bulk_load(shared_address(to), from.parts + walked, kWalkedBytes, ring.full_barrier());
                ring.next();
            };
            if (kOwnsKeys) load(a, smem.walked_a, walked_a());  // in the order in which they are freed
            load(b, smem.walked_b, walked_b());
            if (!kOwnsKeys) load(a, smem.walked_a, walked_a());
        }
    }
    // One warp: the statistics of walked queries, which arrive with the tiles of q.
    __device__ __forceinline__ void produce_queries() const {
        const int lane = threadIdx.x % 32;
        const RowsOfCall rows = rows_of_call(p);
        Ring<1> a(smem.a_full, smem.a_empty);
#pragma unroll 1
        for (int step = 0; step < w.all_steps; ++step) {
            const Query query = query_of(rows, walked_head(step), walked_tile(step) * kWalked + lane);
            const bool cut = __any_sync(~0u, query.begin > w.own0 || query.end < w.own0 + kOwnRows);
            a.wait_empty();
            smem.query[lane] = query;
            if (lane == 0) smem.cut = cut;
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(a.full_barrier());
            a.next();
        }
    }

    // S becomes P; 0 for hidden pairs. element i: own row g + 8 (i / 2 % 2), walked row 8 (i / 4) + 2 quad + i % 2.
    template <typename StatisticsOf>
    __device__ __forceinline__ void probabilities(float (&S)[kPairs], float scale, bool cut, int own, int walked,
                                                  const StatisticsOf& statistics) const {
#pragma unroll
        for (int n = 0; n < kPairs; n += 4) {
            if (kOwnsKeys) forget_registers();  // or the statistics of all columns are loaded at once
#pragma unroll
            for (int i = n; i < n + 4; ++i) {
                const Query& query = statistics(i);
                S[i] = exp2_approx(fmaf(fmaf(S[i], scale, -query.max), p.scale, -query.rest) * kLog2e);
            }
            if (!cut) continue;
#pragma unroll
            for (int i = n; i < n + 4; ++i) {
                const Query& query = statistics(i);
                const int a = own + i / 2 % 2 * 8, b = walked + i / 4 * 8 + i % 2, key = kOwnsKeys ? a : b;
                S[i] = key >= query.begin && key < query.end ? S[i] : 0.0f;
            }
        }
    }

    // The same with options. `head`: of the queries.
    template <typename StatisticsOf>
    __device__ __forceinline__ void general_probabilities(float (&S)[kPairs], float scale, int head, int own, int walked,
                                                          const StatisticsOf& statistics) const {
#pragma unroll
        for (int n = 0; n < kPairs; n += 4) {
            forget_registers();
            GeneralPairs<false> pairs(p, w.s, w.batch, head);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int a = opaque(own) + e / 2 * 8, b = opaque(walked) + n / 4 * 8 + e % 2;
                pairs.put(e, S[n + e] * scale, kOwnsKeys ? b : a, kOwnsKeys ? a : b, statistics(n + e));
            }
            pairs.transform();
#pragma unroll
            for (int e = 0; e < 4; ++e) S[n + e] = pairs.probability(e, statistics(n + e));
        }
    }

    __device__ __forceinline__ void consume(int wg) const {
        const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, thread / 32, 0), quad = lane % 4;
        const int own = w.own0 + warp * 16 + lane / 4;  // and own + 8
        const uint32_t own_tile = descriptor_low(shared_address(wg == 0 ? smem.own_a[0] : smem.own_b[0]), kOwnRows * kChunkRowBytes);
        const uint32_t a_tile = descriptor_low(shared_address(smem.walked_a[0]), kWalked * kChunkRowBytes);
        const uint32_t b_tile = descriptor_low(shared_address(smem.walked_b[0]), kWalked * kChunkRowBytes);
        const int own_index = tile_of<int>(own_a(), w.batch, w.head, w.own0 / kOwnRows);
        const float own_scale = (wg == 0 ? own_a() : own_b()).scales[own_index];
        Query mine[kOwnsKeys ? 1 : 2];
        if constexpr (!kOwnsKeys)
#pragma unroll
            for (int r = 0; r < 2; ++r) mine[r] = query_of(rows_of_call(p), w.head, own + 8 * r);
        float acc_a[kSums] = {}, acc_b[kSums] = {};
        const int chunk = wg * (kD / 2 / kPiece);
        mbarrier_wait(shared_address(smem.own_full), 0);
#pragma unroll 1
        for (int step = 0; step < w.all_steps; ++step) {
            Ring<1> a(smem.a_full, smem.a_empty, step), b(smem.b_full, smem.b_empty, step);
            const int walked = tile_of<int>(walked_a(), w.batch, walked_head(step), walked_tile(step));
            const float a_scale = walked_a().scales[walked], b_scale = walked_b().scales[walked];
            float P[kPairs], dP[kPairs];
            float(&given)[2][kPairs][128] = smem.given[step % 2];
            const auto statistics = [&](int i) -> const Query& {
                if constexpr (kOwnsKeys) return smem.query[i / 4 * 8 + 2 * quad + i % 2];
                else return mine[i / 2 % 2];
            };
            if (wg == 0) {
                a.wait_full();
                multiply_rows(P, own_tile, a_tile);
                bool cut = false;
                if constexpr (kOwnsKeys) {
                    cut = smem.cut;
                } else {
                    const int key0 = walked_tile(step) * kWalked;
#pragma unroll
                    for (int r = 0; r < 2; ++r) cut |= mine[r].begin > key0 || mine[r].end < key0 + kWalked;
                    cut = __any_sync(~0u, cut);
                }
                const int walked0 = walked_tile(step) * kWalked + 2 * quad;
                if constexpr (kGeneral)
                    general_probabilities(P, own_scale * a_scale, kOwnsKeys ? walked_head(step) : w.head, own, walked0, statistics);
                else probabilities(P, own_scale * a_scale, cut, own, walked0, statistics);
#pragma unroll
                for (int i = 0; i < kPairs; ++i) given[0][i][thread] = P[i];
            } else {
                b.wait_full();
                multiply_rows(dP, own_tile, b_tile);
                const float scale = own_scale * b_scale;
#pragma unroll
                for (int i = 0; i < kPairs; ++i) given[1][i][thread] = dP[i] *= scale;
            }
            if (!kOwnsKeys) b.release(lane);
            bar_sync(1, kConsumerThreads);
            if (wg == 0) {
#pragma unroll
                for (int i = 0; i < kPairs; ++i) dP[i] = given[1][i][thread];
                if (kOwnsKeys) b.wait_full();
            } else {
                a.wait_full();
#pragma unroll
                for (int i = 0; i < kPairs; ++i) P[i] = given[0][i][thread];
            }
#pragma unroll
            for (int i = 0; i < kPairs; ++i) dP[i] = P[i] * (dP[i] - statistics(i).delta);
            float up[2], down[2];
            scales_of_rows(dP, a_scale, up, down);
            add_rows(acc_a, dP, up, down, a_tile, chunk);
            a.release(lane);
            if constexpr (kOwnsKeys) {
                scales_of_rows(P, b_scale, up, down);
                add_rows(acc_b, P, up, down, b_tile, chunk);
                b.release(lane);
            }
        }
        const int column0 = wg * (kD / 2) + 2 * quad;
        this->store(acc_a, acc_b, own, [=](int i) { return column0 + i / 4 * 8; });
    }
};

template <Own kOwn, bool kGeneral>
__global__ void __launch_bounds__(kBlockThreads, 1) gradient_kernel(const __grid_constant__ WideParams params) {
    if (params.out_of_range[0] || params.out_of_range[1]) return;
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& smem = *reinterpret_cast<WideSmem*>(shared);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        constexpr int kWarps = kConsumerThreads / 32 * kWarpArrivals;
        const int tiles = kOwn == Own::kKeys ? params.k.own.tiles : params.q.own.tiles;
        smem.work = work_of_block<kOwn, kOwnRows, kWalked>(params.backward.forward, tiles, blockIdx.x);
        mbarrier_init(shared_address(smem.own_full), 1);
        mbarrier_init(shared_address(smem.b_full), 1), mbarrier_init(shared_address(smem.b_empty), kWarps);
        mbarrier_init(shared_address(smem.a_full), 1 + (kOwn == Own::kKeys ? kWarpArrivals : 0));
        mbarrier_init(shared_address(smem.a_empty), kWarps);
        fence_mbarrier_init();
    }
    __syncthreads();
    const WideBlock<kOwn, kGeneral> block{{params.backward, params.backward.forward, smem.work}, params, smem};
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

// Divides the workspace behind the statistics of the rows, and returns the bytes of the whole.
size_t divide(const AttentionParams& p, unsigned char* base, WideParams* to) {
    PartsWorkspace space{base};
    to->out_of_range = space.take_statistics(p);
    const auto place = [&](TwoTilings& t, int64_t heads, int rows) {
        space.place(t.own, heads, (rows + kOwnRows - 1) / kOwnRows, kOwnRows, kD);
        space.place(t.walked, heads, (rows + kWalked - 1) / kWalked, kWalked, kD);
    };
    for (TwoTilings* t : {&to->q, &to->dout}) place(*t, int64_t(p.nheads) * p.batch, p.seqlen_q);
    for (TwoTilings* t : {&to->k, &to->v}) place(*t, int64_t(p.nheads_k) * p.batch, p.seqlen_k);
    return space.used;
}

template <Own kOwn>
cudaError_t launch(const WideParams& params, cudaStream_t stream) {
    const AttentionParams& p = params.backward.forward;
    const int64_t tiles = kOwn == Own::kKeys ? params.k.own.tiles : params.q.own.tiles;
    const int64_t blocks = tiles * (kOwn == Own::kKeys ? p.nheads_k : p.nheads) * p.batch;
    if (blocks == 0) return cudaSuccess;
    return launch_kernel(p.general_scores() ? gradient_kernel<kOwn, true> : gradient_kernel<kOwn, false>, unsigned(blocks), kBlockThreads,
                         sizeof(WideSmem), stream, params);
}

}  // namespace

size_t backward_wgmma_float32_wide_sm90_workspace(const BackwardParams& b, const DeviceInfo&) {
    WideParams params{};
    return divide(b.forward, nullptr, &params) + 1024;
}

cudaError_t backward_wgmma_float32_wide_sm90(const BackwardParams& b, const DeviceInfo& device, cudaStream_t stream) {
    WideParams params{};
    params.backward = b;
    AttentionParams& p = params.backward.forward;
    p.workspace = align_up(b.forward.workspace, 1024);
    divide(p, static_cast<unsigned char*>(p.workspace), &params);
    int64_t blocks = 0;
    const auto view = [&](TwoTilings& two, const TensorView& x, int heads, int rows, int columns) {
        for (SplitTensor* t : {&two.own, &two.walked}) {
            view_tensor(*t, x, heads, rows, columns);
            blocks += int64_t(t->tiles) * heads * p.batch;
        }
    };
    view(params.q, p.q, p.nheads, p.seqlen_q, p.headdim), view(params.dout, b.dout, p.nheads, p.seqlen_q, p.headdim_v);
    view(params.k, p.k, p.nheads_k, p.seqlen_k, p.headdim), view(params.v, p.v, p.nheads_k, p.seqlen_k, p.headdim_v);
    return launch_with_fallbacks(params.backward, params.out_of_range, device, stream, [&]() -> cudaError_t {
        if (blocks > 0)
            if (const cudaError_t error = launch_kernel(split_kernel, unsigned(blocks), kSplitThreads, 0, stream, params)) return error;
        if (const cudaError_t error = launch<Own::kKeys>(params, stream)) return error;
        return launch<Own::kQueries>(params, stream);
    });
}

}  // namespace fa
