// mla_sm90.cu: attention over a cache whose values are part of its keys: headdim 576, headdim_v 512, v the first columns of k. That is
// multi-head latent attention with the up-projections absorbed into q and out.   out = softmax(q k^T * softmax_scale) k[:, :512]
// Values of the same shape in a memory of their own are served, too, in tiles of 32 keys: 36 KB of K and 32 KB of V (MlaValues::kOwn).
//
// New against wgmma_sm90: one load of a tile serves as K and as V. The heads that share keys are rows of one matrix: row r is head r %
// group of query r / group. And the keys of a sequence are cut into shares for several blocks where rows alone would not fill the GPU. A
// block has 64 rows and one share of the keys:
//
//     producer              tiles of 64 keys x 576 columns, 72 KB -> ring of two; smaller pages in boxes that four warps share
//     softmax warpgroup     S = Q K^T, softmax -> P   O[:, :256] = o_scale O + P V      S of the next tile behind it
//     twin warpgroup                           | P, o_scale: in shared memory, from each thread to its twin
//                                              O[:, 256:] = o_scale O + P V
//
// Bound by memory below about 64 rows, else by the products and by reading a tile from L2 for every 64 rows. A block of less than 64 rows
// multiplies zeros. When the keys are cut, every share writes its own normalised O and lse, and a second kernel merges them.
#include <numeric>

#include "attention/common/epilogue.cuh"
#include "attention/common/mask.h"
#include "attention/common/output_fragment.cuh"
#include "attention/common/score_fragment.cuh"
#include "attention/decode/mla_sm90_plan.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "device/ring.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"

namespace fa {
namespace {

constexpr int kD = 576, kDv = 512, kRows = 64, kStages = 2;
constexpr int kMostShares = 256;  // as validation has it
constexpr int kConsumers = 256, kConsumerWarps = kConsumers / 32, kThreads = kConsumers + 128;

enum class MlaValues { kInKeys, kOwn };

struct MlaParams {
    CUtensorMap map_k, map_v;  // map_v: MlaValues::kOwn
    AttentionParams attention;
    int rows, row_blocks;   // seqlen_q x group; blocks of 64 of them
    int splits;             // shares of a sequence's keys
    int page_rows;          // rows of a box: a divisor of the page and of the tile
    int chunk_boxes;        // boxes of page_rows rows that make a chunk of a tile
    int boxes, boxes_v;     // that make a tile of K: 1, of all chunks, or chunk_boxes for each; of V, 0 where it is part of K
    float *partial, *lses;  // (batch, nheads_k, splits, rows, headdim_v) and (batch, nheads_k, splits, rows)
};

template <typename T, MlaValues kValues>
struct alignas(1024) MlaSmem {
    static constexpr int kKeys = mla_keys(kValues == MlaValues::kOwn);
    static constexpr int kVBegin = kValues == MlaValues::kOwn ? kKeys * kD : 0;  // elements from the start of a tile
    T q[kRows * kD];
    T k[kStages][kKeys * (kValues == MlaValues::kOwn ? kD + kDv : kD)];  // V of its own behind K
    uint4 p[kKeys / 16][128];                                            // P as A operand, for the twin
    float2 o_scale[128];                                                 // what O must be multiplied by; at the end 1 / row sum
    uint64_t k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(MlaSmem<__half, MlaValues::kInKeys>) <= 227 * 1024 && sizeof(MlaSmem<__half, MlaValues::kOwn>) <= 227 * 1024,
              "one Hopper block can address 227 KiB");

enum MlaBarrier : int {
    kPublished = 1,  // P and o_scale are in shared memory
    kTaken = 2,      // the twin has read them: they may be overwritten
    kSoftmax = 3     // the softmax warpgroup alone
};

// What a block computes: 64 rows of a key head, against one share of the keys that some of these rows see.
struct MlaWork {
    int b, head_k, split, row0;
    Sequence s;
    KeyRange top, bottom;  // what the first and the last row see
    int first, count;      // tiles
};
template <int kKeys>
__device__ __forceinline__ MlaWork mla_work(const MlaParams& params, int block) {
    const AttentionParams& p = params.attention;
    const int rows = block % params.row_blocks, rest = block / params.row_blocks;  // neighbours read the same keys
    const int heads = rest / params.splits;
    MlaWork w;
    w.b = heads / p.nheads_k, w.head_k = heads % p.nheads_k, w.split = rest % params.splits, w.row0 = rows * kRows;
    w.s = sequence_of(p, w.b);
    w.top = key_range(p, w.s, w.row0 / p.group);
    w.bottom = key_range(p, w.s, (min(w.row0 + kRows, params.rows) - 1) / p.group);
    const int begin = w.top.begin, end = w.bottom.end;
    const int tiles = end > begin ? (end - 1) / kKeys - begin / kKeys + 1 : 0, share = (tiles + params.splits - 1) / params.splits;
    w.first = begin / kKeys + w.split * share, w.count = max(0, min(share, tiles - w.split * share));
    return w;
}

// Q to shared memory, by the consumers: 18 pieces of 16 bytes a thread. Rows that do not exist are zeros.
template <typename T>
__device__ __forceinline__ void load_queries(const MlaParams& params, const MlaWork& w, uint32_t smem_q) {
    const AttentionParams& p = params.attention;
    const T* q = static_cast<const T*>(p.q.data) + w.s.q + int64_t(w.head_k) * p.group * p.q.head;
#pragma unroll 6
    for (int x = threadIdx.x; x < kRows * kD / 8; x += kConsumers) {
        const int r = x / (kD / 8), piece = x % (kD / 8), row = w.row0 + r;
        const bool exists = row < params.rows;
        const T* from = exists ? q + row / p.group * p.q.row + row % p.group * p.q.head + piece * 8 : q;
        cp_async_16(smem_q + swizzled_offset(kRows, r, piece), from, exists ? 16 : 0);
    }
    cp_async_wait_all();
    fence_proxy_async();
}

// ---- producer ----

// A thread has at most one box of a tile. A warp takes some 90 cycles to issue one, so neighbouring boxes belong to different warps.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void load_tiles(const MlaParams& params, const MlaWork& w, MlaSmem<T, kValues>& smem, int warp, int lane) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys;
    constexpr uint32_t kChunkBytes = kKeys * kChunkRowBytes;
    const AttentionParams& p = params.attention;
    Ring<kStages> ring(smem.k_full, smem.k_empty);
    const int box = lane * 4 + warp, boxes = params.boxes + (kValues == MlaValues::kOwn ? params.boxes_v : 0);
    const bool of_v = kValues == MlaValues::kOwn && box >= params.boxes;
    const int place = of_v ? box - params.boxes : box, chunk = place / params.chunk_boxes;
    const int box_row = (place - chunk * params.chunk_boxes) * params.page_rows;
    const uint32_t to = shared_address(smem.k[0] + (of_v ? smem.kVBegin : 0)) + chunk * kChunkBytes + box_row * kChunkRowBytes;
    const CUtensorMap* map = of_v ? &params.map_v : &params.map_k;
    if (warp >= boxes) return;
#pragma unroll 1
    for (int tile = w.first; tile < w.first + w.count; ++tile) {
        int row = tile * kKeys + box_row, page;
        if (p.cache.block_table) {  // pages that the sequence does not have arrive as zeros
            const int index = row / p.cache.page_size;
            page = row < w.s.seqlen_k ? cache_page(p.cache, w.b, index) : p.cache.entries;
            row -= index * p.cache.page_size;
        } else {
            page = cache_entry(p.cache, w.b);
        }
        ring.wait_empty();
        if (box == 0) mbarrier_arrive_expect_tx(ring.full_barrier(), sizeof smem.k[0]);
        if (box < boxes)
            tma_load(to + ring.slot * sizeof smem.k[0], map, ring.full_barrier(), chunk * kChunkColumns, row, 0, w.head_k, page);
        __syncwarp();
        ring.next();
    }
}

// ---- consumers; each warpgroup has all rows and half of the columns of O ----

template <typename T, int kOutputs, int kProbabilities>
__device__ __forceinline__ void multiply_pv(float (&O)[kOutputs], const uint32_t (&P)[kProbabilities], uint64_t desc_v) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kProbabilities / 4; ++i) wgmma_rs<T, 2 * kOutputs, 1>(O, P + 4 * i, desc_v + descriptor_row_step(i), 1);
    wgmma_commit();
}
template <int kCount>
__device__ __forceinline__ void rescale_output(float (&O)[kCount], float o_scale0, float o_scale1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) O[i] *= i / 2 % 2 ? o_scale1 : o_scale0;
}
template <typename T, int kKeys>
__device__ __forceinline__ void multiply_qk(float (&S)[kKeys / 2], uint64_t desc_q, uint64_t desc_k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kD / 16; ++i)
        wgmma_ss<T, kKeys>(S, desc_q + descriptor_k_step(i, kRows), desc_k + descriptor_k_step(i, kKeys), i != 0);
    wgmma_commit();
}

// A tile has arrived. Keys that no row sees have P = 0, but 0 x NaN is NaN: their V is zeroed. The softmax warpgroup.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void wait_for_tile(const MlaWork& w, MlaSmem<T, kValues>& smem, const Ring<kStages>& at, int tile) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys;
    at.wait_full();
    const int before = w.top.begin - tile * kKeys, behind = w.bottom.end - tile * kKeys;
    if (before <= 0 && behind >= kKeys) return;
    const uint32_t values = shared_address(smem.k[at.slot] + smem.kVBegin);
#pragma unroll 1
    for (int x = threadIdx.x % 128; x < kKeys * kDv / 8; x += 128) {
        const int r = x / (kDv / 8);
        if (r < before || r >= behind) store_shared_16(values + swizzled_offset(kKeys, r, x % (kDv / 8)), make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async();
    bar_sync(kSoftmax, 128);
}
// Scores outside the window of their row become -inf. `row`: of element 0.
template <int kKeys>
__device__ __forceinline__ void mask_scores(float (&S)[kKeys / 2], const AttentionParams& p, const MlaWork& w, int key0, int row,
                                            int quad) {
    if (key0 >= w.bottom.begin && key0 + kKeys <= w.top.end) return;
    const int at = key0 + 2 * quad;
    const KeyRange r0 = key_range(p, w.s, min(row / p.group, w.s.seqlen_q - 1));
    const KeyRange r1 = key_range(p, w.s, min((row + 8) / p.group, w.s.seqlen_q - 1));
    mask_right(S, r0.end - 1 - at, r1.end - 1 - at);
    mask_left(S, r0.begin - at, r1.begin - at);
}

// The softmax warpgroup: P and o_scale of every tile for both, and O[:, :256]. inverse: 1 / row sum, 0 for a row without keys.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void attend_with_softmax(const MlaParams& params, const MlaWork& w, MlaSmem<T, kValues>& smem, uint64_t desc_v,
                                                    int warp, int lane, float (&O)[kDv / 4], float (&inverse)[2]) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys;
    const AttentionParams& p = params.attention;
    const int quad = lane % 4, row = w.row0 + warp * 16 + lane / 4, thread = threadIdx.x % 128;
    const float scale_log2 = p.scale * kLog2e;
    float S[kKeys / 2], row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    uint32_t P[kKeys / 4];
    const uint64_t desc_q = wgmma_descriptor(shared_address(smem.q), 16), desc_k = wgmma_descriptor(shared_address(smem.k), 16),
                   step = descriptor_step(sizeof smem.k[0]);
    Ring<kStages> ring(smem.k_full, smem.k_empty);
    if (w.count > 0) {
        wait_for_tile(w, smem, ring, w.first);
        multiply_qk<T, kKeys>(S, desc_q, desc_k + ring.slot * step);
        wgmma_wait<0>(S);
    }
#pragma unroll 1
    for (int tile = w.first; tile < w.first + w.count; ++tile) {
        mask_scores<kKeys>(S, p, w, tile * kKeys, row, quad);
        float tile_max[2], sum[2], o_scale[2] = {1.0f, 1.0f};
        tile_maximum(S, tile_max);
        tile_max[0] *= scale_log2, tile_max[1] *= scale_log2;
        const bool moved = raise_maximum(tile_max, 8.0f, row_max, row_sum, o_scale);  // P stays below 2^8
        exponentials(S, scale_log2, row_max, sum);
        row_sum[0] += sum[0], row_sum[1] += sum[1];
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) P[i] = pack_16<T>(S[2 * i], S[2 * i + 1]);
        bar_sync(kTaken, kConsumers);
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) smem.p[i][thread] = make_uint4(P[4 * i], P[4 * i + 1], P[4 * i + 2], P[4 * i + 3]);
        smem.o_scale[thread] = make_float2(o_scale[0], o_scale[1]);
        bar_arrive(kPublished, kConsumers);
        if (moved) rescale_output(O, o_scale[0], o_scale[1]);
        multiply_pv<T>(O, P, desc_v + ring.slot * step);
        if (tile + 1 < w.first + w.count) {
            Ring<kStages> ahead = ring;
            ahead.next();
            wait_for_tile(w, smem, ahead, tile + 1);
            multiply_qk<T, kKeys>(S, desc_q, desc_k + ahead.slot * step);
            wgmma_wait<1>(O);
            ring.release(lane);
            wgmma_wait<0>(S);
        } else {
            wgmma_wait<0>(O);
        }
    }
    const int64_t heads = int64_t(w.b) * p.nheads_k + w.head_k;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const RowEnd end = finish_row<ScoreUnit::kLog2>(row_max[r], quad_sum(row_sum[r]));
        inverse[r] = end.inverse;
        const int i = row + 8 * r;
        if (quad != 0 || i >= params.rows) continue;
        const float lse = end.lse * kLn2;
        if (params.splits > 1) params.lses[(heads * params.splits + w.split) * params.rows + i] = lse;
        else if (p.lse) p.lse[lse_offset(p, w.s, w.head_k * p.group + i % p.group) + i / p.group] = lse;
    }
    bar_sync(kTaken, kConsumers);
    smem.o_scale[thread] = make_float2(inverse[0], inverse[1]);
    bar_arrive(kPublished, kConsumers);
}

// The twin warpgroup: O[:, 256:], with the P and o_scale of the thread's twin.
template <typename T, MlaValues kValues>
__device__ __forceinline__ void attend_as_twin(const MlaWork& w, MlaSmem<T, kValues>& smem, uint64_t desc_v, int lane, float (&O)[kDv / 4],
                                               float (&inverse)[2]) {
    constexpr int kKeys = MlaSmem<T, kValues>::kKeys;
    const int thread = threadIdx.x % 128;
    uint32_t P[kKeys / 4];
    Ring<kStages> ring(smem.k_full, smem.k_empty);
    bar_arrive(kTaken, kConsumers);
#pragma unroll 1
    for (int tile = 0; tile < w.count; ++tile) {
        bar_sync(kPublished, kConsumers);
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) {
            const uint4 x = smem.p[i][thread];
            P[4 * i] = x.x, P[4 * i + 1] = x.y, P[4 * i + 2] = x.z, P[4 * i + 3] = x.w;
        }
        const float2 o_scale = smem.o_scale[thread];
        bar_arrive(kTaken, kConsumers);
        if (__any_sync(~0u, o_scale.x != 1.0f || o_scale.y != 1.0f)) rescale_output(O, o_scale.x, o_scale.y);
        ring.wait_full();
        multiply_pv<T>(O, P, desc_v + ring.slot * descriptor_step(sizeof smem.k[0]));
        wgmma_wait<0>(O);
        ring.release(lane);
    }
    bar_sync(kPublished, kConsumers);
    inverse[0] = smem.o_scale[thread].x, inverse[1] = smem.o_scale[thread].y;
}

// out, or this share's part of it.
template <typename T>
__device__ __forceinline__ void store_output(const MlaParams& params, const MlaWork& w, const float (&O)[kDv / 4],
                                             const float (&inverse)[2], int half, int warp, int lane) {
    const AttentionParams& p = params.attention;
    const int quad = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = w.row0 + warp * 16 + lane / 4 + 8 * r;
        const bool exists = row < params.rows, empty = inverse[r] == 0.0f;  // no visible key: zero, whatever 0 x V came to
        if (params.splits > 1) {
            const int64_t heads = int64_t(w.b) * p.nheads_k + w.head_k;
            float* to = params.partial + ((heads * params.splits + w.split) * params.rows + row) * kDv + half * (kDv / 2) + 2 * quad;
            if (exists)
#pragma unroll
                for (int x = 0; x < kDv / 16; ++x) {
                    const float* pair = O + 4 * x + 2 * r;
                    *reinterpret_cast<float2*>(to + 8 * x) =
                        empty ? make_float2(0, 0) : make_float2(pair[0] * inverse[r], pair[1] * inverse[r]);
                }
            continue;
        }
        const int head = w.head_k * p.group + row % p.group;
        T* to = static_cast<T*>(p.out.data) + w.s.out + row / p.group * p.out.row + head * p.out.head + half * (kDv / 2);
        store_row(to, O, r, inverse[r], empty, exists, kDv / 2, quad);
    }
}

template <typename T, MlaValues kValues>
__global__ void __launch_bounds__(kThreads, 1) decode_mla_before_kernel(const __grid_constant__ MlaParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using Smem = MlaSmem<T, kValues>;
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    constexpr uint32_t kChunkBytes = Smem::kKeys * kChunkRowBytes;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&params.map_k);
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(shared_address(smem.k_full + i), 1);
            mbarrier_init(shared_address(smem.k_empty + i), kConsumerWarps * kWarpArrivals);
        }
        fence_mbarrier_init();
    }
    const MlaWork work = mla_work<Smem::kKeys>(params, blockIdx.x);
    if (warp < kConsumerWarps) load_queries<T>(params, work, shared_address(smem.q));
    __syncthreads();

    if (warp >= kConsumerWarps) {
        setmaxnreg_dec<32>();
        load_tiles(params, work, smem, warp - kConsumerWarps, lane);
        return;
    }
    setmaxnreg_inc<232>();
    const int half = warp / 4;
    float O[kDv / 4], inverse[2];
#pragma unroll
    for (int i = 0; i < kDv / 4; ++i) O[i] = 0.0f;
    const uint64_t desc_v =
        wgmma_descriptor(shared_address(smem.k[0] + Smem::kVBegin) + half * (kDv / 2 / kChunkColumns) * kChunkBytes, kChunkBytes);
    if (half == 0) attend_with_softmax(params, work, smem, desc_v, warp, lane, O, inverse);
    else attend_as_twin(work, smem, desc_v, lane, O, inverse);
    store_output<T>(params, work, O, inverse, half, warp % 4, lane);
}

// out = sum of w_i O_i, w_i = exp(lse_i - lse), lse = log sum exp(lse_i): a block for each row, four columns a thread.
constexpr int kMergeThreads = kDv / 4;
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_shares_before_kernel(const __grid_constant__ MlaParams params) {
    __shared__ float weight[kMostShares], lse;
    const AttentionParams& p = params.attention;
    const int row = blockIdx.x % params.rows, heads = blockIdx.x / params.rows, splits = params.splits;
    const float* lses = params.lses + int64_t(heads) * splits * params.rows + row;
    for (int i = threadIdx.x; i < splits; i += kMergeThreads) weight[i] = lses[int64_t(i) * params.rows];
    __syncthreads();
    if (threadIdx.x < 32) {
        float m = -INFINITY, l = 0;
        for (int i = threadIdx.x; i < splits; i += 32) m = fmaxf(m, weight[i]);
        for (int x = 16; x > 0; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
        for (int i = threadIdx.x; i < splits; i += 32) l += weight[i] = weight[i] == -INFINITY ? 0.0f : __expf(weight[i] - m);
        for (int x = 16; x > 0; x /= 2) l += __shfl_xor_sync(~0u, l, x);
        for (int i = threadIdx.x; i < splits; i += 32) weight[i] = l == 0.0f ? 0.0f : weight[i] / l;
        if (threadIdx.x == 0) lse = l == 0.0f ? -INFINITY : m + __logf(l);
    }
    __syncthreads();
    const float* from = params.partial + (int64_t(heads) * splits * params.rows + row) * kDv + 4 * threadIdx.x;
    float4 sum{};
#pragma unroll 8
    for (int i = 0; i < splits; ++i) {  // a share without keys is zero
        const float4 x = *reinterpret_cast<const float4*>(from + int64_t(i) * params.rows * kDv);
        const float w = weight[i];
        sum.x += w * x.x, sum.y += w * x.y, sum.z += w * x.z, sum.w += w * x.w;
    }
    const int b = heads / p.nheads_k, head = heads % p.nheads_k * p.group + row % p.group;
    const Sequence s = sequence_of(p, b);
    T* to = static_cast<T*>(p.out.data) + s.out + row / p.group * p.out.row + head * p.out.head + 4 * threadIdx.x;
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_16<T>(sum.x, sum.y), pack_16<T>(sum.z, sum.w));
    if (p.lse && threadIdx.x == 0) p.lse[lse_offset(p, s, head) + row / p.group] = lse;
}

MlaParams mla_params(const AttentionParams& p, int multiprocessors) {
    MlaParams params{};
    params.attention = p;
    params.rows = p.seqlen_q * p.group;
    params.row_blocks = (params.rows + kRows - 1) / kRows;
    params.splits = mla_splits(p, mla_keys(!mla_v_is_k(p)), int64_t(params.row_blocks) * p.nheads_k, multiprocessors);
    if (params.splits > 1) {
        params.partial = static_cast<float*>(align_up(p.workspace, 16));
        params.lses = params.partial + int64_t(p.batch) * p.nheads_k * params.splits * params.rows * kDv;
    }
    return params;
}

template <typename T, MlaValues kValues>
cudaError_t launch_mla(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr int kKeys = mla_keys(kValues == MlaValues::kOwn);
    MlaParams params = mla_params(p, multiprocessors);
    params.page_rows = p.cache.block_table ? std::gcd(p.cache.page_size, kKeys) : kKeys;
    params.chunk_boxes = kKeys / params.page_rows;
    const int64_t rows = p.cache.block_table ? p.cache.page_size : p.seqlen_k;
    const auto encode = [&](const char* name, const TensorView& x, int columns, CUtensorMap* map, int* boxes) {
        int loads = 0;  // boxes for the columns: 1, or one for each chunk
        const cudaError_t error = encode_tiles({name, x.data, std::is_same_v<T, __half>, columns, rows, p.nheads_k, p.cache.entries,
                                                2 * x.row, 2 * x.head, 2 * x.batch, params.page_rows, columns, params.page_rows < kKeys},
                                               map, &loads);
        *boxes = params.chunk_boxes * loads;
        return error;
    };
    if (cudaError_t error = encode("k", p.k, kD, &params.map_k, &params.boxes)) return error;
    if (kValues == MlaValues::kOwn)
        if (cudaError_t error = encode("v", p.v, kDv, &params.map_v, &params.boxes_v)) return error;
    const int64_t heads = int64_t(p.batch) * p.nheads_k;
    const cudaError_t error = launch_kernel(decode_mla_before_kernel<T, kValues>, unsigned(heads * params.row_blocks * params.splits), kThreads,
                                            sizeof(MlaSmem<T, kValues>), stream, params);
    if (error != cudaSuccess || params.splits == 1) return error;
    return launch_kernel(merge_shares_before_kernel<T>, unsigned(heads * params.rows), kMergeThreads, 0, stream, params);
}

}  // namespace

cudaError_t decode_mla_before(const AttentionParams& p, int multiprocessors, cudaStream_t stream);
cudaError_t decode_mla_before(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    const auto launch = [&](auto zero) {
        using T = decltype(zero);
        return mla_v_is_k(p) ? launch_mla<T, MlaValues::kInKeys>(p, multiprocessors, stream)
                             : launch_mla<T, MlaValues::kOwn>(p, multiprocessors, stream);
    };
    return p.dtype == DType::kFloat16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

}  // namespace fa
