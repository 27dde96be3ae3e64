// decode_mla_sm90.cu: attention over a cache whose values are part of its keys: headdim 576, headdim_v 512, v the first columns of k. That
// is multi-head latent attention with the up-projections absorbed into q and out.   out = softmax(q k^T * softmax_scale) k[:, :512]
// Values of the same shape in a memory of their own are served too, in tiles of 32 keys, 36 KB of K and 32 KB of V (kOwnV).
//
// New against forward_wgmma_sm90: one load of a tile serves as K and as V, the heads that share keys are rows of one matrix (row r is head
// r % group of query r / group), and the keys of a sequence are split between blocks where rows alone would not fill the GPU. A block
// has 64 rows and a share of the keys:
//
//     producer              tiles of 64 keys x 576 columns, 72 KB -> ring of two; smaller pages in boxes that four warps share
//     warpgroup 0           S = Q K^T, softmax -> P   O[:, :256] = alpha O + P V      S of the next tile behind it
//     warpgroup 1                              | P, alpha: in shared memory, each thread for its twin
//                                              O[:, 256:] = alpha O + P V
//
// Bound by memory below about 64 rows, else by the products and by reading a tile from L2 for every 64 rows. A block of less than 64 rows
// multiplies zeros. When the keys are split, every share writes its own normalised O and lse, and a second kernel merges them.
#include <numeric>

#include "attention/forward_wgmma_sm90.cuh"
#include "attention/mask.h"
#include "device/launch.h"

namespace fa {
namespace {

constexpr int kD = 576, kDv = 512, kRows = 64, kStages = 2;
constexpr int kMostShares = 256;  // as validation has it
constexpr int kConsumers = 256, kThreads = kConsumers + 128;
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct MlaParams {
    CUtensorMap map_k, map_v;  // map_v: kOwnV
    AttentionParams attention;
    int rows, row_blocks;   // seqlen_q x group; blocks of 64 of them
    int splits;             // shares of a sequence's keys
    int page_rows;          // rows of a box: a divisor of the page and of the tile
    int chunk_boxes;        // boxes of page_rows rows that make a chunk of a tile
    int boxes, boxes_v;     // that make a tile of K: 1, of all chunks, or chunk_boxes for each; of V, 0 where it is part of K
    float *partial, *lses;  // (batch, nheads_k, splits, rows, headdim_v) and (batch, nheads_k, splits, rows)
};

template <typename T, bool kOwnV>
struct alignas(1024) MlaSmem {
    static constexpr int kKeys = mla_keys(kOwnV);
    T q[kRows * kD];
    T k[kStages][kKeys * (kOwnV ? kD + kDv : kD)];  // V behind K
    uint4 p[kKeys / 16][128];                       // P as A operand of warpgroup 1
    float2 alpha[128];                              // what O is off by; at the end 1 / row sum
    uint64_t k_full[kStages], k_empty[kStages];
};
static_assert(sizeof(MlaSmem<__half, false>) <= 227 * 1024 && sizeof(MlaSmem<__half, true>) <= 227 * 1024,
              "one Hopper block can address 227 KiB");

enum MlaBarrier : int { kPublished = 1, kTaken = 2, kSoftmax = 3 };  // P is there; P may be overwritten; warpgroup 0

struct MlaWork {
    int b, head_k, split, row0;
};
__device__ __forceinline__ MlaWork mla_work(const MlaParams& params, int block) {
    const int rows = block % params.row_blocks, rest = block / params.row_blocks;  // neighbours read the same keys
    const int heads = rest / params.splits, nheads_k = params.attention.nheads_k;
    return {heads / nheads_k, heads % nheads_k, rest % params.splits, rows * kRows};
}

template <typename T, bool kOwnV>
__global__ void __launch_bounds__(kThreads, 1) decode_mla_kernel(const __grid_constant__ MlaParams params) {
    extern __shared__ __align__(1024) unsigned char shared[];
    using Smem = MlaSmem<T, kOwnV>;
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    constexpr int kKeys = Smem::kKeys;
    constexpr uint32_t kTileBytes = sizeof(smem.k[0]), kChunkBytes = kKeys * kChunkRowBytes, kVBegin = kOwnV ? kKeys * kD * 2 : 0;
    const AttentionParams& p = params.attention;
    const uint32_t k_full = shared_address(smem.k_full), k_empty = shared_address(smem.k_empty);
    const uint32_t smem_q = shared_address(smem.q), smem_k = shared_address(smem.k), smem_v = smem_k + kVBegin;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prefetch_tensormap(&params.map_k);
        for (int i = 0; i < kStages; ++i) mbarrier_init(k_full + 8 * i, 1), mbarrier_init(k_empty + 8 * i, kConsumers / 32 * kWarpArrivals);
        fence_mbarrier_init();
    }

    const MlaWork work = mla_work(params, blockIdx.x);
    const Sequence s = sequence_of(p, work.b);
    const KeyRange top = key_range(p, s, work.row0 / p.group);
    const KeyRange bottom = key_range(p, s, (min(work.row0 + kRows, params.rows) - 1) / p.group);
    const int begin = top.begin, end = bottom.end;  // keys that some row sees
    const int tiles = end > begin ? (end - 1) / kKeys - begin / kKeys + 1 : 0, share = (tiles + params.splits - 1) / params.splits;
    const int first = begin / kKeys + work.split * share, count = max(0, min(share, tiles - work.split * share));

    if (warp < kConsumers / 32) {  // Q: 18 pieces of 16 bytes a thread, rows that do not exist as zeros
        const T* q = static_cast<const T*>(p.q.data) + s.q + int64_t(work.head_k) * p.group * p.q.head;
#pragma unroll 6
        for (int x = threadIdx.x; x < kRows * kD / 8; x += kConsumers) {
            const int r = x / (kD / 8), piece = x % (kD / 8), row = work.row0 + r;
            const bool exists = row < params.rows;
            const T* from = exists ? q + row / p.group * p.q.row + row % p.group * p.q.head + piece * 8 : q;
            cp_async_16(smem_q + swizzled_offset(kRows, r, piece), from, exists ? 16 : 0);
        }
        cp_async_wait_all();
        fence_proxy_async();
    }
    __syncthreads();

    // ------------------------------------------------------------------------------------------------ producer
    if (warp >= kConsumers / 32) {
        setmaxnreg_dec<32>();
        // A thread has one box of a tile at most. A warp takes some 90 cycles to issue one, so neighbours belong to different warps.
        const int box = lane * 4 + warp - kConsumers / 32, boxes = params.boxes + (kOwnV ? params.boxes_v : 0);
        const bool of_v = kOwnV && box >= params.boxes;
        const int place = of_v ? box - params.boxes : box, chunk = place / params.chunk_boxes;
        const int box_row = (place - chunk * params.chunk_boxes) * params.page_rows;
        const uint32_t to = (of_v ? smem_v : smem_k) + chunk * kChunkBytes + box_row * kChunkRowBytes;
        const CUtensorMap* map = of_v ? &params.map_v : &params.map_k;
        if (warp - kConsumers / 32 >= boxes) return;
        Ring ring;
#pragma unroll 1
        for (int tile = first; tile < first + count; ++tile) {
            int row = tile * kKeys + box_row, page;
            if (p.cache.block_table) {  // pages that the sequence does not have arrive as zeros
                const int index = row / p.cache.page_size;
                page = row < s.seqlen_k ? cache_page(p.cache, work.b, index) : p.cache.entries;
                row -= index * p.cache.page_size;
            } else {
                page = cache_entry(p.cache, work.b);
            }
            mbarrier_wait(k_empty + 8 * ring.slot, ring.phase ^ 1);
            if (box == 0) mbarrier_arrive_expect_tx(k_full + 8 * ring.slot, kTileBytes);
            if (box < boxes)
                tma_load(to + ring.slot * kTileBytes, map, k_full + 8 * ring.slot, chunk * kChunkColumns, row, 0, work.head_k, page);
            __syncwarp();
            ring.next(kStages);
        }
        return;
    }

    // ------------------------------------------------------------------------------------------------ consumers
    setmaxnreg_inc<232>();
    const int half = warp / 4, thread = threadIdx.x % 128, g = lane / 4, quad = lane % 4;
    Ring ring;
    float o[kDv / 4];
    uint32_t prob[kKeys / 4];
    float inverse[2];  // 1 / row sum, 0 for a row without keys
    const uint64_t desc_v = wgmma_descriptor(smem_v + half * (kDv / 2 / kChunkColumns) * kChunkBytes, kChunkBytes);
    const auto gemm_pv = [&] {
        const uint64_t desc = desc_v + ring.slot * descriptor_step(kTileBytes);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kKeys / 16; ++i) wgmma_rs<T, kDv / 2, 1>(o, prob + 4 * i, desc + descriptor_row_step(i), 1);
        wgmma_commit();
    };
    const auto release = [&] {
        if (arrives(lane)) mbarrier_arrive(k_empty + 8 * ring.slot);
        ring.next(kStages);
    };
#pragma unroll
    for (int i = 0; i < kDv / 4; ++i) o[i] = 0.0f;

    if (half == 0) {
        const float c = p.scale * kLog2e;
        const int row = work.row0 + warp * 16 + g;
        float sc[kKeys / 2], m[2] = {-INFINITY, -INFINITY}, l[2] = {};
        const uint64_t desc_q = wgmma_descriptor(smem_q, 16), desc_k = wgmma_descriptor(smem_k, 16);
        const auto gemm_qk = [&](int slot) {
            const uint64_t desc = desc_k + slot * descriptor_step(kTileBytes);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kD / 16; ++i)
                wgmma_ss<T, kKeys>(sc, desc_q + descriptor_k_step(i, kRows), desc + descriptor_k_step(i, kKeys), i != 0);
            wgmma_commit();
        };
        // Keys that no row sees have P = 0, but 0 x NaN is NaN: their V is zeroed.
        const auto arrived = [&](const Ring& at, int tile) {
            mbarrier_wait(k_full + 8 * at.slot, at.phase);
            const int before = begin - tile * kKeys, behind = end - tile * kKeys;
            if (before <= 0 && behind >= kKeys) return;
#pragma unroll 1
            for (int x = thread; x < kKeys * kDv / 8; x += 128) {
                const int r = x / (kDv / 8);
                if (r < before || r >= behind)
                    store_shared_16(smem_v + at.slot * kTileBytes + swizzled_offset(kKeys, r, x % (kDv / 8)), make_uint4(0, 0, 0, 0));
            }
            fence_proxy_async();
            bar_sync(kSoftmax, 128);
        };
        if (count > 0) {
            arrived(ring, first);
            gemm_qk(ring.slot);
            wgmma_wait<0>(sc);
        }
#pragma unroll 1
        for (int tile = first; tile < first + count; ++tile) {
            const int key0 = tile * kKeys;
            if (key0 < bottom.begin || key0 + kKeys > top.end) {
                const int at = key0 + 2 * quad;
                const KeyRange r0 = key_range(p, s, min(row / p.group, s.seqlen_q - 1));
                const KeyRange r1 = key_range(p, s, min((row + 8) / p.group, s.seqlen_q - 1));
                mask_right(sc, r0.end - 1 - at, r1.end - 1 - at);
                mask_left(sc, r0.begin - at, r1.begin - at);
            }
            float tile_max[2], sum[2], alpha[2] = {1.0f, 1.0f};
            fragment_max(sc, tile_max);
            tile_max[0] *= c, tile_max[1] *= c;
            const bool moved = raise_max(tile_max, 8.0f, m, l, alpha);  // P stays below 2^8
            exponentials(sc, c, m, sum);
            l[0] += sum[0], l[1] += sum[1];
#pragma unroll
            for (int i = 0; i < kKeys / 4; ++i) prob[i] = pack_16<T>(sc[2 * i], sc[2 * i + 1]);
            bar_sync(kTaken, kConsumers);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i)
                smem.p[i][thread] = make_uint4(prob[4 * i], prob[4 * i + 1], prob[4 * i + 2], prob[4 * i + 3]);
            smem.alpha[thread] = make_float2(alpha[0], alpha[1]);
            bar_arrive(kPublished, kConsumers);
            if (moved)
#pragma unroll
                for (int i = 0; i < kDv / 4; ++i) o[i] *= alpha[i / 2 % 2];
            gemm_pv();
            if (tile + 1 < first + count) {
                Ring ahead = ring;
                ahead.next(kStages);
                arrived(ahead, tile + 1);
                gemm_qk(ahead.slot);
                wgmma_wait<1>(o);
                release();
                wgmma_wait<0>(sc);
            } else {
                wgmma_wait<0>(o);
            }
        }
        const int64_t heads = int64_t(work.b) * p.nheads_k + work.head_k;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            l[r] = quad_sum(l[r]);
            inverse[r] = l[r] == 0.0f ? 0.0f : 1.0f / l[r];
            const int i = row + 8 * r;
            if (quad != 0 || i >= params.rows) continue;
            const float lse = l[r] == 0.0f ? -INFINITY : m[r] * kLn2 + __logf(l[r]);
            if (params.splits > 1) params.lses[(heads * params.splits + work.split) * params.rows + i] = lse;
            else if (p.lse) p.lse[lse_offset(p, s, work.head_k * p.group + i % p.group) + i / p.group] = lse;
        }
        bar_sync(kTaken, kConsumers);
        smem.alpha[thread] = make_float2(inverse[0], inverse[1]);
        bar_arrive(kPublished, kConsumers);
    } else {
        bar_arrive(kTaken, kConsumers);
#pragma unroll 1
        for (int tile = 0; tile < count; ++tile) {
            bar_sync(kPublished, kConsumers);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                const uint4 x = smem.p[i][thread];
                prob[4 * i] = x.x, prob[4 * i + 1] = x.y, prob[4 * i + 2] = x.z, prob[4 * i + 3] = x.w;
            }
            const float2 alpha = smem.alpha[thread];
            bar_arrive(kTaken, kConsumers);
            if (__any_sync(~0u, alpha.x != 1.0f || alpha.y != 1.0f))
#pragma unroll
                for (int i = 0; i < kDv / 4; ++i) o[i] *= i / 2 % 2 ? alpha.y : alpha.x;
            mbarrier_wait(k_full + 8 * ring.slot, ring.phase);
            gemm_pv();
            wgmma_wait<0>(o);
            release();
        }
        bar_sync(kPublished, kConsumers);
        inverse[0] = smem.alpha[thread].x, inverse[1] = smem.alpha[thread].y;
    }

    // ---- out, or this share's part of it ----
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = work.row0 + warp % 4 * 16 + g + 8 * r;
        const bool exists = row < params.rows, empty = inverse[r] == 0.0f;  // no visible key: zero, whatever 0 x V came to
        if (params.splits > 1) {
            const int64_t heads = int64_t(work.b) * p.nheads_k + work.head_k;
            float* to = params.partial + ((heads * params.splits + work.split) * params.rows + row) * kDv + half * (kDv / 2) + 2 * quad;
            if (exists)
#pragma unroll
                for (int x = 0; x < kDv / 16; ++x) {
                    const float* pair = o + 4 * x + 2 * r;
                    *reinterpret_cast<float2*>(to + 8 * x) =
                        empty ? make_float2(0, 0) : make_float2(pair[0] * inverse[r], pair[1] * inverse[r]);
                }
            continue;
        }
        const int head = work.head_k * p.group + row % p.group;
        T* to = static_cast<T*>(p.out.data) + s.out + row / p.group * p.out.row + head * p.out.head + half * (kDv / 2);
#pragma unroll
        for (int x = 0; x < kDv / 64; ++x) {
            uint32_t pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float* pair = o + 4 * (4 * x + j) + 2 * r;
                pairs[j] = empty ? 0u : pack_16<T>(pair[0] * inverse[r], pair[1] * inverse[r]);
            }
            transpose_quad(pairs, quad);  // eight neighbouring columns a lane
            if (exists) *reinterpret_cast<uint4*>(to + 8 * (4 * x + quad)) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}

// out = sum of w_i O_i, w_i = exp(lse_i - lse), lse = log sum exp(lse_i): a block for each row, four columns a thread.
constexpr int kMergeThreads = kDv / 4;
template <typename T>
__global__ void __launch_bounds__(kMergeThreads) merge_shares_kernel(const __grid_constant__ MlaParams params) {
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

template <typename T, bool kOwnV>
cudaError_t launch_mla(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    constexpr int kKeys = mla_keys(kOwnV);
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
    if (kOwnV)
        if (cudaError_t error = encode("v", p.v, kDv, &params.map_v, &params.boxes_v)) return error;
    const int64_t heads = int64_t(p.batch) * p.nheads_k;
    const cudaError_t error = launch_kernel(decode_mla_kernel<T, kOwnV>, unsigned(heads * params.row_blocks * params.splits), kThreads,
                                            sizeof(MlaSmem<T, kOwnV>), stream, params);
    if (error != cudaSuccess || params.splits == 1) return error;
    return launch_kernel(merge_shares_kernel<T>, unsigned(heads * params.rows), kMergeThreads, 0, stream, params);
}

}  // namespace

cudaError_t decode_mla_sm90(const AttentionParams& p, int multiprocessors, cudaStream_t stream) {
    const bool own_v = !mla_v_is_k(p);
    if (p.dtype == DType::kFloat16)
        return own_v ? launch_mla<__half, true>(p, multiprocessors, stream) : launch_mla<__half, false>(p, multiprocessors, stream);
    return own_v ? launch_mla<__nv_bfloat16, true>(p, multiprocessors, stream)
                 : launch_mla<__nv_bfloat16, false>(p, multiprocessors, stream);
}

size_t decode_mla_sm90_workspace(const AttentionParams& p, int multiprocessors) {
    const MlaParams params = mla_params(p, multiprocessors);
    if (params.splits == 1) return 0;
    return size_t(p.batch) * size_t(p.nheads_k) * size_t(params.splits) * size_t(params.rows) * (kDv + 1) * sizeof(float) + 16;
}

int64_t decode_mla_sm90_blocks(const AttentionParams& p, int multiprocessors) {
    const MlaParams params = mla_params(p, multiprocessors);
    return int64_t(p.batch) * p.nheads_k * params.row_blocks * params.splits;
}

}  // namespace fa
