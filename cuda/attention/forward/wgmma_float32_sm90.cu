// wgmma_float32_sm90.cu: float32 attention with float32's accuracy on Hopper's tensor cores, in float16 parts.
//
// A first kernel scales Q, K and V by powers of 2, so that the largest numbers of a row of Q, or of a tile of K or V, lie just below 2^15,
// and writes each as two float16 numbers of 11 bits, high + low. A product is then low high' + high low' + high high', as in
// device/split_tf32.cuh, at twice the rate of tf32; P is split in registers. The second kernel is FlashAttention with wgmma:
//   - a producer thread copies tiles of both parts, which lie in the workspace in the order of shared memory, one bulk copy each;
//   - two warpgroups of 64 rows multiply. While one computes its softmax, the tensor cores work for the other;
//   - each chain of products adds up 64 columns or 64 keys, small products first, in an accumulator of its own: tensor cores truncate.
//     Float32 multiply-adds, which also undo the scale of a tile of V, join the chains.
//
// Float16 has 5 bits of exponent. Numbers below 2^-16 of the largest lose bits. Where that could be seen (several such numbers in a row, a
// column of V with a mean of less than 2^-13 of the tile's largest number), and for infinity and NaN, the first kernel sets a word, and
// mma_float32_sm80 serves the call: it is always launched, and returns at once if the word is 0.
//
// Shared memory (SplitSmem)     Q 2 x 64 x d | K stages x block_n x d | V stages x block_n x d; two parts each
// Bound by the tensor cores: six products.
#include "attention/common/epilogue.cuh"
#include "attention/common/float16_parts.cuh"
#include "attention/common/general_scores.cuh"
#include "attention/common/mask.h"
#include "attention/common/score_fragment.cuh"
#include "attention/common/tiles_mma_sm80.h"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/ring.cuh"
#include "device/split_tf32.cuh"
#include "device/wgmma.cuh"

namespace fa {

namespace {

constexpr int kWarpgroups = 2, kWarpgroupRows = 64, kBlockM = kWarpgroups * kWarpgroupRows;
constexpr int block_n(int d) { return d <= 128 ? 128 : d <= 192 ? 64 : 32; }  // keys of a tile
constexpr int kThreads = 128 * (kWarpgroups + 1);
constexpr int kChain = 4;              // steps of 16 that a chain of products adds up
constexpr float kTop = 11, kRise = 4;  // P is 2^11 at the maximum that is subtracted, and at most 2^15
constexpr float kMostRaised = 110;     // a tile's P is multiplied by up to 2^110, less where its inverse times V's scale would be subnormal

// ---- the parts ----

struct SplitParams {
    SplitTensor q, k, v;
    int blocks_q, blocks_k;
    int* out_of_range;
};

template <int kD>
__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ SplitParams params) {
    __shared__ uint32_t shared[split_words(kD)];
    int index = blockIdx.x;
    if (index < params.blocks_q) return split_tile<kD, kWarpgroupRows, true, false>(params.q, index, params.out_of_range, shared);
    index -= params.blocks_q;
    if (index < params.blocks_k) return split_tile<kD, block_n(kD), false, false>(params.k, index, params.out_of_range, shared);
    split_tile<kD, block_n(kD), false, true>(params.v, index - params.blocks_k, params.out_of_range, shared);
}

// ---- attention ----

template <int kD>
struct alignas(1024) SplitSmem {
    static constexpr int kStages = kD <= 64 ? 2 : 1, kBlockN = block_n(kD);
    __half q[kWarpgroups][2][kWarpgroupRows * kD];
    __half k[kStages][2][kBlockN * kD];
    __half v[kStages][2][kBlockN * kD];
    uint64_t q_full[1], k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
};

struct WgmmaFloat32Params {
    AttentionParams attention;
    SplitTensor q, k, v;
    int tiles;    // of kBlockM rows
    int section;  // heads whose K and V share L2, tiles_mma_sm80.h
    const int* out_of_range;
};

struct Work {
    int b, head, row0;
    Sequence s;
    int first_tile, last_tile;  // of keys
};
// Blocks start in order of their index: section by section and, in a section, the last rows of every head first, which see the most keys.
template <int kBlockN>
__device__ __forceinline__ Work work_of(const WgmmaFloat32Params& params, int block) {
    const AttentionParams& p = params.attention;
    const int before = block / (params.section * params.tiles) * params.section, index = block - before * params.tiles;
    const int heads = min(params.section, p.nheads * p.batch - before), at = before + index % heads;
    Work w;
    w.b = at / p.nheads, w.head = at % p.nheads, w.row0 = (params.tiles - 1 - index / heads) * kBlockM;
    w.s = sequence_of(p, w.b);
    const int begin = key_range(p, w.s, w.row0).begin, end = key_range(p, w.s, min(w.row0 + kBlockM, w.s.seqlen_q) - 1).end;
    w.first_tile = begin / kBlockN, w.last_tile = end > begin ? (end - 1) / kBlockN : w.first_tile - 1;
    return w;
}

template <int kD>
__device__ __forceinline__ void produce(const WgmmaFloat32Params& params, SplitSmem<kD>& smem, const Work& w) {
    constexpr int kStages = SplitSmem<kD>::kStages, kBlockN = block_n(kD);
    constexpr uint32_t kBytesQ = sizeof smem.q[0], kBytesK = sizeof smem.k[0];
    const AttentionParams& p = params.attention;
    const int64_t head_q = int64_t(w.b) * p.nheads + w.head, head_k = int64_t(w.b) * p.nheads_k + w.head / p.group;
    const __half* const q = params.q.parts + (head_q * params.q.tiles + w.row0 / kWarpgroupRows) * (2 * kWarpgroupRows * kD);
    const __half* const k = params.k.parts + head_k * params.k.tiles * (2 * kBlockN * kD);
    const __half* const v = params.v.parts + head_k * params.v.tiles * (2 * kBlockN * kD);
    const uint32_t q_full = shared_address(smem.q_full);
    mbarrier_arrive_expect_tx(q_full, kWarpgroups * kBytesQ);
    bulk_load(shared_address(smem.q), q, kWarpgroups * kBytesQ, q_full);
    Ring<kStages> ring_k(smem.k_full, smem.k_empty), ring_v(smem.v_full, smem.v_empty);
#pragma unroll 1
    for (int n = w.last_tile; n >= w.first_tile; --n) {
        const auto load = [&](Ring<kStages>& ring, const auto& to, const __half* from) {
            ring.wait_empty();
            mbarrier_arrive_expect_tx(ring.full_barrier(), kBytesK);
            bulk_load(shared_address(to[ring.slot]), from + int64_t(n) * (2 * kBlockN * kD), kBytesK, ring.full_barrier());
            ring.next();
        };
        load(ring_k, smem.k, k);
        load(ring_v, smem.v, v);
    }
}

// C = Q K^T over the 64 columns of a chain, small products first. Descriptors of the high parts; the low parts are to_low_q, to_low_k
// further.
template <int kBlockN>
__device__ __forceinline__ void multiply_scores(float (&C)[kBlockN / 2], uint64_t q, uint64_t k, uint64_t to_low_q, uint64_t to_low_k,
                                                int chain) {
#pragma unroll
    for (int x = 0; x < 3; ++x)
#pragma unroll
        for (int i = kChain * chain; i < kChain * (chain + 1); ++i) {
            const uint64_t a = q + (x == 0 ? to_low_q : 0) + descriptor_k_step(i, kWarpgroupRows);
            const uint64_t b = k + (x == 1 ? to_low_k : 0) + descriptor_k_step(i, kBlockN);
            const bool first = x == 0 && i == kChain * chain;
            if constexpr (kBlockN < 64) wgmma_ss<__half, kBlockN>(C, a, b, !first);
            else if (first) wgmma_ss_first<__half, kBlockN>(C, a, b);
            else wgmma_ss<__half, kBlockN>(C, a, b, 1);
        }
}
// S = Q K^T; `done` runs when K has been read.
template <int kD, typename Done>
__device__ __forceinline__ void multiply_scores(float (&S)[block_n(kD) / 2], uint64_t q, uint64_t k, uint64_t to_low_q, uint64_t to_low_k,
                                                const Done& done) {
    constexpr int kBlockN = block_n(kD), kChains = kD / 64;
    float T[kChains > 1 ? kChains - 1 : 1][kBlockN / 2];
    wgmma_fence();
    multiply_scores<kBlockN>(S, q, k, to_low_q, to_low_k, 0);
#pragma unroll
    for (int x = 1; x < kChains; ++x) multiply_scores<kBlockN>(T[x - 1], q, k, to_low_q, to_low_k, x);
    wgmma_commit();
    wgmma_wait<0>(S);
    done();
#pragma unroll
    for (int x = 1; x < kChains; ++x) {
        hold(T[x - 1]);
#pragma unroll
        for (int i = 0; i < kBlockN / 2; ++i) S[i] += T[x - 1][i];
    }
}
// O += scale P V in chains of at most 64 keys; each of the thread's two rows has a scale. Above 128 columns the registers hold 64 columns.
template <int kD>
__device__ __forceinline__ void multiply_values(float (&O)[kD / 2], const uint32_t (&high)[block_n(kD) / 4],
                                                const uint32_t (&low)[block_n(kD) / 4], uint64_t v, uint64_t to_low_v,
                                                const float (&scale)[2]) {
    constexpr int kBlockN = block_n(kD), kColumns = kD <= 128 ? kD : 64, kSteps = kBlockN / 16 < kChain ? kBlockN / 16 : kChain;
#pragma unroll
    for (int first = 0; first < kBlockN / 16; first += kSteps)
#pragma unroll
        for (int part = 0; part < kD / kColumns; ++part) {
            float T[kColumns / 2];
            const uint64_t columns = v + descriptor_step(part * kBlockN * kChunkRowBytes);
            wgmma_fence();
#pragma unroll
            for (int x = 0; x < 3; ++x)
#pragma unroll
                for (int i = first; i < first + kSteps; ++i)
                    wgmma_rs<__half, kColumns, 1>(T, (x == 0 ? low : high) + 4 * i,
                                                  columns + (x == 1 ? to_low_v : 0) + descriptor_row_step(i), x != 0 || i != first);
            wgmma_commit();
            wgmma_wait<0>(T);
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) {
                float& sum = O[part * kColumns / 2 + i];
                sum = fmaf(T[i], scale[i / 2 % 2], sum);
            }
        }
}

// What options need of the block's work and of this thread's place in it. It is computed where they use it, and takes no registers in
// between.
struct PlaceNow {
    Work w;
    FragmentPlace at;

    template <int kBlockN>
    static __device__ __forceinline__ PlaceNow of(const WgmmaFloat32Params& params, int tile) {
        const int thread = opaque(int(threadIdx.x)) - 128;  // of the consumers
        PlaceNow now;
        now.w = work_of<kBlockN>(params, opaque(blockIdx.x));
        now.at = {now.w.b,
                  now.w.head,
                  now.w.row0 + thread / 32 * 16 + thread % 32 / 4,
                  tile * kBlockN + 2 * (thread % 4),
                  now.w.s.seqlen_q,
                  now.w.s.seqlen_k,
                  now.w.s.shift};
        return now;
    }
};
// Scores with every option, in natural units, from the sums of a tile. No number of V is infinite or NaN here, so hidden keys need no care
// beyond P = 0. Tiles that masks by intervals or by blocks hide are computed, too.
template <int kD>
__device__ __forceinline__ void transform_scores(const WgmmaFloat32Params& params, int tile, float k_scale, float (&S)[block_n(kD) / 2]) {
    const AttentionParams& p = params.attention;
    const PlaceNow now = PlaceNow::of<block_n(kD)>(params, tile);
    const FragmentPlace& at = now.at;
    const float* const q_scale = params.q.scales + (int64_t(at.batch) * p.nheads + at.head) * params.q.tiles * kWarpgroupRows + at.row;
    const float unit[2] = {q_scale[0] * k_scale, q_scale[8] * k_scale};
#pragma unroll
    for (int i = 0; i < block_n(kD) / 2; ++i) S[i] *= unit[i / 2 % 2];
    transform_fragment<float>(p, at, S);
    if (p.intervals.data) hide_by_intervals(p, at, S);
    if (p.blocks.data) hide_by_blocks(p, at, S);
    const KeyRange a = key_range(p, now.w.s, at.row), b = key_range(p, now.w.s, at.row + 8);
    const int begin = tile * block_n(kD), end = begin + block_n(kD);
    if (max(a.begin, b.begin) <= begin && min(a.end, b.end) >= end) return;
    mask_right(S, a.end - 1 - at.key, b.end - 1 - at.key);
    mask_left(S, a.begin - at.key, b.begin - at.key);
}

template <int kD, bool kGeneral>
__device__ __forceinline__ void consume(const WgmmaFloat32Params& params, SplitSmem<kD>& smem, const Work& w, int wg) {
    constexpr int kStages = SplitSmem<kD>::kStages, kBlockN = block_n(kD), kScores = kBlockN / 2, kOutputs = kD / 2;
    constexpr uint32_t kChunkN = kBlockN * kChunkRowBytes;
    const AttentionParams& p = params.attention;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), quad = lane % 4;
    const int row = w.row0 + wg * kWarpgroupRows + warp * 16 + lane / 4;  // and row + 8
    const uint64_t q = wgmma_descriptor(shared_address(smem.q[wg][0]), kWarpgroupRows * kChunkRowBytes);
    const uint64_t k0 = wgmma_descriptor(shared_address(smem.k[0][0]), kChunkN),
                   v0 = wgmma_descriptor(shared_address(smem.v[0][0]), kChunkN);
    constexpr uint64_t kLowQ = descriptor_step(sizeof smem.q[0][0]), kLowK = descriptor_step(sizeof smem.k[0][0]);
    const int64_t head_k = int64_t(w.b) * p.nheads_k + w.head / p.group;
    const float* const k_scales = params.k.scales + head_k * params.k.tiles;
    const float* const v_scales = params.v.scales + head_k * params.v.tiles;
    const float scale = kGeneral ? kLog2e : p.scale * kLog2e;
    float q_scale[2], row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int64_t place = (int64_t(w.b) * p.nheads + w.head) * params.q.tiles * kWarpgroupRows + row + 8 * r;
        q_scale[r] = params.q.scales[place];
    }
    // Keys that every row of the warpgroup sees.
    const int wg_row0 = w.row0 + wg * kWarpgroupRows, wg_last = min(wg_row0 + kWarpgroupRows, w.s.seqlen_q) - 1;
    const int every_begin = wg_row0 < w.s.seqlen_q ? key_range(p, w.s, wg_last).begin : 0;
    const int every_end = wg_row0 < w.s.seqlen_q ? key_range(p, w.s, wg_row0).end : 0;

    float O[kOutputs] = {};
    Ring<kStages> k(smem.k_full, smem.k_empty), v(smem.v_full, smem.v_empty);
    mbarrier_wait(shared_address(smem.q_full), 0);
#pragma unroll 1
    for (int n = w.last_tile; n >= w.first_tile; --n) {
        const float k_scale = k_scales[n], signed_v_scale = v_scales[n], v_scale = fabsf(signed_v_scale);
        // ---- S = Q K^T ----
        float S[kScores];
        k.wait_full();
        const uint64_t desc_k = k0 + k.slot * descriptor_step(sizeof smem.k[0]), desc_v = v0 + v.slot * descriptor_step(sizeof smem.v[0]);
        multiply_scores<kD>(S, q, desc_k, kLowQ, kLowK, [&] { k.release(lane); });
        // ---- softmax ----
        if constexpr (kGeneral) {
            transform_scores<kD>(params, n, k_scale, S);
        } else if (n * kBlockN < every_begin || (n + 1) * kBlockN > every_end) {
            const int key = n * kBlockN + 2 * quad, here = opaque(row);
            const KeyRange a = key_range(p, w.s, here), b = key_range(p, w.s, here + 8);
            mask_right(S, a.end - 1 - key, b.end - 1 - key);
            mask_left(S, a.begin - key, b.begin - key);
        }
        // row_max is a product of q and k; `base` is the same in the unit of this tile's sums. With options both are scores.
        float tile_max[2], base[2], exponent[2], top[2], lower[2];
        tile_maximum(S, tile_max);
        bool moved = false;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float own = kGeneral ? tile_max[r] : tile_max[r] * (q_scale[r] * k_scale);
            tile_max[r] = fmaxf(row_max[r], own);
            moved |= (tile_max[r] - row_max[r]) * scale > kRise;
            top[r] = own;
        }
        if (__any_sync(~0u, moved)) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float factor = exp2_approx((row_max[r] - tile_max[r]) * scale);
                row_max[r] = tile_max[r], row_sum[r] *= factor;
#pragma unroll
                for (int i = 2 * r; i < kOutputs; i += 4) O[i] *= factor, O[i + 1] *= factor;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if constexpr (kGeneral) {  // a bias may be as low as -FLT_MAX
                base[r] = row_max[r], exponent[r] = scale;
                continue;
            }
            const float unit = q_scale[r] * k_scale;
            base[r] = row_max[r] == -FLT_MAX ? 0.0f : row_max[r] * inverse_of(unit);
            exponent[r] = fmaxf(unit * scale, 0x1p-149f);  // a hidden key's -inf times 0 is NaN; a larger one would count: base < 2^126
        }
        if (signed_v_scale < 0) {
            // Keys with v = 0 count in row_sum only. Otherwise they would take the bits of the others' P (`add_zero_attn`).
            const uint32_t* const zeros = params.v.zeros + (head_k * params.v.tiles + n) * (kBlockN / 32);
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                const int r = i / 2 % 2;
                if (!(zeros[i / 16] >> (i / 4 % 4 * 8 + 2 * quad + i % 2) & 1)) continue;
                sum[r] += exp2_approx(fmaf(S[i] - base[r], exponent[r], kTop));
                S[i] = -INFINITY;
            }
            tile_maximum(S, top);
#pragma unroll
            for (int r = 0; r < 2; ++r) row_sum[r] += sum[r], top[r] = kGeneral ? top[r] : top[r] * (q_scale[r] * k_scale);
        }
        // P of a row in this tile is raised by 2^(top - kTop), so that its largest number keeps its bits, however far below row_max it is.
        const float most_raised = fminf(kMostRaised, float(int(__float_as_uint(v_scale) >> 23) - 2));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float raised = truncf(fminf(fmaxf((row_max[r] - top[r]) * scale, 0.0f), most_raised));
            top[r] = kTop + raised, lower[r] = __uint_as_float(uint32_t(127 - int(raised)) << 23);
        }
        float tile_sum[2] = {};
        if constexpr (kGeneral) {
#pragma unroll
            for (int i = 0; i < kScores; ++i) {
                const int r = i / 2 % 2;
                S[i] = exp2_approx(fmaf(S[i] - base[r], exponent[r], top[r]));
                tile_sum[r] += S[i];
            }
            if (p.dropout_threshold) drop_fragment(p, PlaceNow::of<kBlockN>(params, n).at, quad, S);
        }
        uint32_t high[kScores / 2], low[kScores / 2];
#pragma unroll
        for (int i = 0; i < kScores; i += 2) {
            const int r = i / 2 % 2;
            const float a = kGeneral ? S[i] : exp2_approx(fmaf(S[i] - base[r], exponent[r], top[r]));
            const float b = kGeneral ? S[i + 1] : exp2_approx(fmaf(S[i + 1] - base[r], exponent[r], top[r]));
            if (!kGeneral) tile_sum[r] += a + b;
            high[i / 2] = pack_16<__half>(a, b);
            const float2 rounded = unpack_16<__half>(high[i / 2]);
            low[i / 2] = pack_16<__half>(a - rounded.x, b - rounded.y);
        }
        // ---- O += P V ----
        v.wait_full();
        const float scale_v[2] = {v_scale * lower[0], v_scale * lower[1]};
#pragma unroll
        for (int r = 0; r < 2; ++r) row_sum[r] = fmaf(tile_sum[r], lower[r], row_sum[r]);
        multiply_values<kD>(O, high, low, desc_v, kLowK, scale_v);
        v.release(lane);
    }

    // ---- out = O / row_sum ----
    const float sink = sink_of(p.sinks, w.head);
    float* const out = static_cast<float*>(p.out.data) + w.s.out + w.head * p.out.head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = row + 8 * r;
        constexpr float kUnscale = 1.0f / (1 << int(kTop));
        const float sum = quad_sum(row_sum[r]) * kUnscale, unit = kGeneral ? 1.0f : p.scale;
        RowEnd end = finish_row<ScoreUnit::kNatural>(row_max[r] * unit, sum, sink);
        end.inverse *= kGeneral && p.dropout_threshold ? kUnscale * p.dropout_scale : kUnscale;
        if (i >= w.s.seqlen_q) continue;
        if (p.lse && quad == 0) p.lse[lse_offset(p, w.s, w.head) + i] = natural_lse(row_max[r], unit, sum, sink);
#pragma unroll
        for (int x = 2 * r; x < kOutputs; x += 4) {
            const int column = x / 4 * 8 + 2 * quad;
            if (column < p.headdim_v)
                *reinterpret_cast<float2*>(out + i * p.out.row + column) = make_float2(end.output(O[x]), end.output(O[x + 1]));
        }
    }
}

// kGeneral: every option of scores, and any scale.
template <int kD, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) attention_kernel(const __grid_constant__ WgmmaFloat32Params params) {
    if (*params.out_of_range) return;
    static_assert(sizeof(SplitSmem<kD>) <= 227 * 1024, "a block of sm_90 has no more");
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& smem = *reinterpret_cast<SplitSmem<kD>*>(shared);
    const Work w = work_of<block_n(kD)>(params, blockIdx.x);
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        mbarrier_init(shared_address(smem.q_full), 1);
        for (int i = 0; i < SplitSmem<kD>::kStages; ++i) {
            mbarrier_init(shared_address(smem.k_full + i), 1), mbarrier_init(shared_address(smem.v_full + i), 1);
            mbarrier_init(shared_address(smem.k_empty + i), 4 * kWarpgroups * kWarpArrivals);
            mbarrier_init(shared_address(smem.v_empty + i), 4 * kWarpgroups * kWarpArrivals);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if (warpgroup == 0) {
        setmaxnreg_dec<24>();
        if (threadIdx.x == 0) produce(params, smem, w);
        return;
    }
    setmaxnreg_inc<240>();
    consume<kD, kGeneral>(params, smem, w, warpgroup - 1);
}

// ---- launch ----

int bucket(const AttentionParams& p) {
    const int d = p.headdim > p.headdim_v ? p.headdim : p.headdim_v;
    return d <= 64 ? 64 : d <= 128 ? 128 : d <= 192 ? 192 : 256;
}

// Divides the workspace, which begins at `base`, and returns its bytes.
size_t divide(const AttentionParams& p, unsigned char* base, SplitParams* to) {
    const int64_t d = bucket(p), heads_q = int64_t(p.nheads) * p.batch, heads_k = int64_t(p.nheads_k) * p.batch;
    const int64_t tiles_q = (p.seqlen_q + kBlockM - 1) / kBlockM * kWarpgroups,
                  tiles_k = (p.seqlen_k + block_n(int(d)) - 1) / block_n(int(d));
    size_t used = 0;
    const auto take = [&](int64_t bytes) {
        unsigned char* const at = base + used;
        used += (size_t(bytes) + 1023) / 1024 * 1024;
        return at;
    };
    to->out_of_range = reinterpret_cast<int*>(take(sizeof(int)));
    to->q.scales = reinterpret_cast<float*>(take(heads_q * tiles_q * kWarpgroupRows * 4));
    to->k.scales = reinterpret_cast<float*>(take(heads_k * tiles_k * 4)),
    to->v.zeros = reinterpret_cast<uint32_t*>(take(heads_k * tiles_k * (block_n(int(d)) / 8))),
    to->v.scales = reinterpret_cast<float*>(take(heads_k * tiles_k * 4));
    to->q.parts = reinterpret_cast<__half*>(take(heads_q * tiles_q * kWarpgroupRows * d * 4));
    to->k.parts = reinterpret_cast<__half*>(take(heads_k * tiles_k * block_n(int(d)) * d * 4));
    to->v.parts = reinterpret_cast<__half*>(take(heads_k * tiles_k * block_n(int(d)) * d * 4));
    to->q.tiles = int(tiles_q), to->k.tiles = to->v.tiles = int(tiles_k);
    to->blocks_q = int(heads_q * tiles_q), to->blocks_k = int(heads_k * tiles_k);
    return used;
}

template <int kD>
cudaError_t launch(const SplitParams& split, const WgmmaFloat32Params& params, cudaStream_t stream) {
    const AttentionParams& p = params.attention;
    if (const cudaError_t error = cudaMemsetAsync(split.out_of_range, 0, sizeof(int), stream)) return cudaGetLastError(), error;
    if (const cudaError_t error =
            launch_kernel(split_kernel<kD>, unsigned(split.blocks_q + 2 * split.blocks_k), kSplitThreads, 0, stream, split))
        return error;
    // -FLT_MAX times a smaller scale is no low score; a larger one times the scales of q and k may be infinite.
    const bool general = p.general_scores() || !(p.scale >= FLT_MIN && p.scale < 0x1p64f);
    return launch_kernel(general ? attention_kernel<kD, true> : attention_kernel<kD, false>,
                         unsigned(int64_t(params.tiles) * p.nheads * p.batch), kThreads, sizeof(SplitSmem<kD>), stream, params);
}

}  // namespace

size_t forward_wgmma_float32_sm90_workspace(const AttentionParams& p, const DeviceInfo&) {
    SplitParams split{};
    return divide(p, nullptr, &split) + 1024;
}

cudaError_t forward_wgmma_float32_sm90(const AttentionParams& p, const DeviceInfo& device, cudaStream_t stream) {
    if (p.batch == 0 || p.seqlen_q == 0) return cudaSuccess;
    SplitParams split{};
    divide(p, static_cast<unsigned char*>(align_up(p.workspace, 1024)), &split);
    const auto view = [&](SplitTensor& t, const TensorView& x, int heads, int rows, int columns) {
        t.data = static_cast<const float*>(x.data), t.batch = x.batch, t.head = x.head, t.row = x.row;
        t.heads = heads, t.rows = rows, t.columns = columns;
    };
    view(split.q, p.q, p.nheads, p.seqlen_q, p.headdim);
    view(split.k, p.k, p.nheads_k, p.seqlen_k, p.headdim), view(split.v, p.v, p.nheads_k, p.seqlen_k, p.headdim_v);
    const int tiles = (p.seqlen_q + kBlockM - 1) / kBlockM;
    const int64_t section = heads_per_section(p.seqlen_k, 8 * int64_t(bucket(p)), p.group), heads = int64_t(p.nheads) * p.batch;
    const WgmmaFloat32Params params{p, split.q, split.k, split.v, tiles, int(section < heads ? section : heads), split.out_of_range};
    const int d = bucket(p);
    const cudaError_t error = d == 64    ? launch<64>(split, params, stream)
                              : d == 128 ? launch<128>(split, params, stream)
                              : d == 192 ? launch<192>(split, params, stream)
                                         : launch<256>(split, params, stream);
    if (error != cudaSuccess) return error;
    return forward_mma_float32_sm80_if(split.out_of_range, p, device, stream);
}

}  // namespace fa
