// cute_sm90.cu: the loop of wgmma_sm90/kernel.cuh written with CuTe.   out = softmax(q k^T * softmax_scale) v,   fp16 and bf16.
//
// New against wgmma_sm90/kernel.cuh: not the algorithm but the notation. Nothing here computes a swizzle, a descriptor, the position of an
// accumulator or the box of a copy. Shapes and layouts are types, and the rest is derived from them at compile time:
//
//     wgmma_sm90/kernel.cuh                   here
//     swizzled_offset, descriptor_k_step      SmemQ, SmemK, SmemV: a swizzled atom of 1 KB, repeated to the shape of a tile
//     wgmma_descriptor(chunk stride)          partition_fragment_A / _B of a product: descriptors as the elements of a tensor
//     accumulator_row, accumulator_column     partition_C of a tensor whose elements are their own coordinates
//     encode_tiles, load_tile                 make_tma_copy(tensor, layout of a tile); copy(load.with(barrier), from, to)
//     Ring                                    PipelineState, and a barrier pair for each stage
//
// A block computes 128 query rows of one head and walks over their keys once, from the last to the first:
//
//     producer, one thread    Q -> q;   K, V tiles -> rings k, v, K one tile ahead of V
//     two consumers, 64 rows  S(n) = Q K(n)^T  and  O += P(n+1) V(n+1)   in one turn of the ping-pong: under them the other consumer
//                             computes its exponentials
//                             softmax(n) -> P(n);  O *= o_scale when the maximum rose
//                             after the last tile  O / row_sum -> q -> out, by the copy engine; lse
//
// It is meant to be read side by side with wgmma_sm90/kernel.cuh: the same roles, barriers and ping-pong, but one block per work item, one
// plan per head dim, and only the causal mask of the options. It lacks what wgmma_sm90 gains by persistent blocks, by Q in registers and by
// the speculative maximum. Long sequences are bound by the products and the softmax in turn, short ones by the cost of an item before its
// first product and after its last.
#include <cute/tensor.hpp>

#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>
#include <cutlass/pipeline/sm90_pipeline.hpp>

#include <tuple>
#include <type_traits>

#include "attention/common/epilogue.cuh"
#include "attention/common/score_fragment.cuh"
#include "attention/forward/common/roles_sm90.cuh"
#include "attention/kernels.h"
#include "common/constants.h"
#include "device/launch.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"

namespace fa {
namespace {

using namespace cute;
using Barrier = cutlass::arch::ClusterTransactionBarrier;

// ---- the tile: shapes, layouts and products are types ----

template <class Element_, int kHeadDim>
struct CuteTile {
    using Element = Element_;  // cutlass::half_t or cutlass::bfloat16_t
    static constexpr int kBlockM = 128, kBlockN = 128;
    static constexpr int kStages = 256 / kHeadDim;  // 64 KB each for the rings of K and V
    static constexpr int kConsumers = 2;            // warpgroups of 64 rows
    using BlockM = Int<kBlockM>;
    using BlockN = Int<kBlockN>;
    using HeadDim = Int<kHeadDim>;
    using ShapeQ = Shape<BlockM, HeadDim>;  // also the shape of out
    using ShapeK = Shape<BlockN, HeadDim>;
    using ShapeV = Shape<HeadDim, BlockN>;  // V^T, as P V needs its B operand; nothing is moved for it
    using ShapeS = Shape<BlockM, BlockN>;   // also the shape of P

    // An atom is 8 rows of 128 bytes under the 128-byte swizzle. It is repeated along the rows first, so that a TMA box, 64 columns of all
    // rows, is contiguous.
    using SmemQ = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, ShapeQ{}));
    using SmemK = decltype(tile_to_shape(GMMA::Layout_K_SW128_Atom<Element>{}, Shape<BlockN, HeadDim, Int<kStages>>{}));
    using SmemV =
        decltype(tile_to_shape(GMMA::Layout_MN_SW128_Atom<Element>{}, Shape<HeadDim, BlockN, Int<kStages>>{}, Step<_2, _1, _3>{}));

    // S = Q K^T with both operands in shared memory, O += P V with P in registers; the warpgroups are stacked along the rows.
    using Warpgroups = Layout<Shape<Int<kConsumers>, _1, _1>>;
    using MmaQK = decltype(make_tiled_mma(
        GMMA::ss_op_selector<Element, Element, float, Shape<BlockM, BlockN, HeadDim>, GMMA::Major::K, GMMA::Major::K>(), Warpgroups{}));
    using MmaPV = decltype(make_tiled_mma(
        GMMA::rs_op_selector<Element, Element, float, Shape<BlockM, HeadDim, BlockN>, GMMA::Major::K, GMMA::Major::MN>(), Warpgroups{}));
    static constexpr int kConsumerThreads = size(MmaQK{}), kThreads = 128 + kConsumerThreads;
    static_assert(kConsumerThreads == 128 * kConsumers && size(MmaPV{}) == kConsumerThreads, "both products are of the same threads");

    struct alignas(1024) Smem {
        Element q[cosize_v<SmemQ>];  // becomes out
        Element k[cosize_v<SmemK>];
        Element v[cosize_v<SmemV>];
        Barrier q_full, k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    };
    static constexpr uint32_t kBytesQ = sizeof Smem::q, kBytesK = sizeof Smem::k / kStages, kBytesV = sizeof Smem::v / kStages;
    static_assert(kBytesQ == 2 * size(ShapeQ{}) && kBytesK == 2 * size(ShapeK{}) && kBytesV == kBytesK, "nothing is padded");
    static_assert(kBytesQ % 1024 == 0 && kBytesK % 1024 == 0, "every tile starts where the swizzle's pattern does");
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
};

// ---- the work of a block ----

// Row i sees keys 0 .. i + right of `keys`.
struct CuteCall {
    int batch, nheads, group, m_blocks;
    int seqlen_q, keys, right;
    float scale_log2;
    float* lse;
};

struct CuteItem {
    int m, head, batch;
    int row0;
    int tiles;   // key tiles: at least one, so that rows without keys need no code path
    int masked;  // tiles from this one on hide keys from some row
};

// The blocks of a head are consecutive, the longest first, so that they find K and V in L2.
template <int kBlockM, int kBlockN>
FA_HOST_DEVICE CuteItem cute_item(const CuteCall& call, int index) {
    CuteItem item;
    const int heads_before = index / call.m_blocks;
    item.m = call.m_blocks - 1 - (index - heads_before * call.m_blocks);
    item.batch = heads_before / call.nheads, item.head = heads_before - item.batch * call.nheads;
    item.row0 = item.m * kBlockM;
    const int end_row = item.row0 + kBlockM < call.seqlen_q ? item.row0 + kBlockM : call.seqlen_q;
    item.tiles = (clamp_to(end_row + call.right, 1, call.keys) + kBlockN - 1) / kBlockN;
    item.masked = clamp_to(item.row0 + call.right + 1, 0, call.keys) / kBlockN;
    return item;
}

// ---- fragments ----

// A thread's accumulators, ((2 neighbours, 2 rows, columns / 8), 1, 1), viewed as (row, column).
template <class Tensor>
FA_HOST_DEVICE constexpr auto rows_of(Tensor&& fragment) {
    const auto layout = fragment.layout();
    static_assert(size<1>(layout) == 1 && size<2>(layout) == 1, "one wgmma is as tall and as wide as a warpgroup's share of the tile");
    static_assert(size<0, 0>(layout) == 2 && size<0, 1>(layout) == 2, "two neighbours in each of two rows, g and g + 8");
    return make_tensor(fragment.data(), make_layout(get<0, 1>(layout), make_layout(get<0, 0>(layout), get<0, 2>(layout))));
}

// A thread's two rows and its first key of a tile, from the coordinates of its accumulators.
struct CutePlace {
    int row[2], key;
};
template <class Tile>
FA_HOST_DEVICE CutePlace cute_place(const CuteItem& item, int thread) {
    const auto place = rows_of(typename Tile::MmaQK{}.get_slice(thread).partition_C(make_identity_tensor(typename Tile::ShapeS{})));
    return {{item.row0 + int(get<0>(place(0, 0))), item.row0 + int(get<0>(place(1, 0)))}, int(get<1>(place(0, 0)))};
}

// Sets scores S (row, column) of tile n that their row does not see to -inf. Relative to the thread's first key, the columns are
// compile-time constants: those of thread 0.
template <class Tile, class Scores>
FA_HOST_DEVICE void mask_scores(Scores&& S, const CuteCall& call, const CutePlace& place, int n) {
    const auto columns = rows_of(typename Tile::MmaQK{}.get_slice(_0{}).partition_C(make_identity_tensor(typename Tile::ShapeS{})));
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
        const int seen = place.row[r] + call.right + 1, end = (seen < call.keys ? seen : call.keys) - n * Tile::kBlockN - place.key;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(S); ++c)
            if (int(get<1>(columns(r, c))) >= end) S(r, c) = -INFINITY;
    }
}

// Rounds `from` to the 16-bit type of `to`, element by element in register order.
template <class From, class To>
__device__ __forceinline__ void round_to(const From& from, To& to) {
    using Element = std::conditional_t<std::is_same_v<typename To::value_type, cutlass::half_t>, __half, __nv_bfloat16>;
    static_assert(decltype(size(from))::value == decltype(size(to))::value, "as many elements");
    Tensor pairs = recast<uint32_t>(to);
    CUTE_UNROLL
    for (int i = 0; i < size(pairs); ++i) pairs(i) = pack_16<Element>(from(2 * i), from(2 * i + 1));
}

// C = A B or C += A B, as `first` says; issued without waiting. A is in registers or, like B, given by shared-memory descriptors.
template <class Mma, class A, class B, class C>
__device__ __forceinline__ void multiply(Mma mma, A& a, const B& b, C& c, GMMA::ScaleOut first) {
    warpgroup_fence_operand(c);
    if constexpr (!std::is_base_of_v<GMMA::DescriptorIterator, typename Mma::FrgTypeA>) warpgroup_fence_operand(a);
    warpgroup_arrive();
    mma.accumulate_ = first;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(a); ++k) {
        gemm(mma, a(_, _, k), b(_, _, k), c);
        mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
}

// Waits until at most kPending of the newest products are running; `c` may then be read.
template <int kPending, class C>
__device__ __forceinline__ void wait_for(C& c) {
    warpgroup_wait<kPending>();
    warpgroup_fence_operand(c);
}

// ---- softmax of the thread's two rows ----

struct CuteRows {
    float max[2] = {-INFINITY, -INFINITY};  // of scale_log2 S: subtracted in the exponentials
    float sum[2] = {};                      // this thread's share
    float o_scale[2];                       // after a step that returned true: the factor for O
};

// S (row, column) of a tile becomes P, under the lazy maximum. Returns whether O must be multiplied by o_scale.
template <class Scores>
__device__ __forceinline__ bool softmax_step(Scores&& S, float scale_log2, CuteRows& rows) {
    constexpr float kRise = 8.0f;  // P stays below 2^8: safe in fp16, too
    float tile_max[2];
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
        float even = S(r, 0), odd = S(r, 1);  // two independent chains
        CUTE_UNROLL
        for (int c = 2; c < size<1>(S); c += 2) even = fmaxf(even, S(r, c)), odd = fmaxf(odd, S(r, c + 1));
        tile_max[r] = quad_max(fmaxf(even, odd)) * scale_log2;
    }
    const bool moved = raise_maximum(tile_max, kRise, rows.max, rows.sum, rows.o_scale);
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
        const float base = rows.max[r] == -INFINITY ? 0.0f : rows.max[r];  // the row has seen no key
        float even = 0.0f, odd = 0.0f;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(S); c += 2) {
            S(r, c) = exp2_approx(fmaf(S(r, c), scale_log2, -base));
            S(r, c + 1) = exp2_approx(fmaf(S(r, c + 1), scale_log2, -base));
            even += S(r, c), odd += S(r, c + 1);
        }
        rows.sum[r] += even + odd;
    }
    return moved;
}

// ---- roles ----

// The copy engine takes coordinates, so the tensors of a map hold coordinates instead of data. Past the end of a sequence it delivers
// zeros.
template <class Tile, class LoadQ, class LoadK, class LoadV>
__device__ __forceinline__ void produce(const LoadQ& load_q, const LoadK& load_k, const LoadV& load_v, const CuteCall& call,
                                        const CuteItem& item, typename Tile::Smem& smem) {
    using HeadDim = typename Tile::HeadDim;
    const int head_k = item.head / call.group, nheads_k = call.nheads / call.group;
    const Tensor q = load_q.get_tma_tensor(make_shape(call.seqlen_q, HeadDim{}, call.nheads, call.batch));
    const Tensor k = load_k.get_tma_tensor(make_shape(call.keys, HeadDim{}, nheads_k, call.batch));
    const Tensor v = load_v.get_tma_tensor(make_shape(HeadDim{}, call.keys, nheads_k, call.batch));
    const Tensor tile_q = local_tile(q(_, _, item.head, item.batch), typename Tile::ShapeQ{}, make_coord(item.m, _0{}));
    const Tensor tiles_k = local_tile(k(_, _, head_k, item.batch), typename Tile::ShapeK{}, make_coord(_, _0{}));
    const Tensor tiles_v = local_tile(v(_, _, head_k, item.batch), typename Tile::ShapeV{}, make_coord(_0{}, _));

    // The same tensors as the copies see them: ((elements of a box, boxes), 1, 1[, tile or stage]).
    const Tensor from_q = load_q.get_slice(_0{}).partition_S(tile_q);
    const Tensor from_k = load_k.get_slice(_0{}).partition_S(tiles_k);
    const Tensor from_v = load_v.get_slice(_0{}).partition_S(tiles_v);
    Tensor to_q = load_q.get_slice(_0{}).partition_D(make_tensor(make_smem_ptr(smem.q), typename Tile::SmemQ{}));
    Tensor to_k = load_k.get_slice(_0{}).partition_D(make_tensor(make_smem_ptr(smem.k), typename Tile::SmemK{}));
    Tensor to_v = load_v.get_slice(_0{}).partition_D(make_tensor(make_smem_ptr(smem.v), typename Tile::SmemV{}));

    // A fresh barrier counts the phase before its first as complete, so the first wait for an empty stage, with phase 1, returns at once.
    cutlass::PipelineState<Tile::kStages> k_at(0, 1, 0), v_at(0, 1, 0);
    const auto copy_tile = [](const auto& load, Barrier& full, uint32_t bytes, const auto& from, auto&& to) {
        full.arrive_and_expect_tx(bytes);
        copy(load.with(reinterpret_cast<Barrier::ValueType&>(full)), from, to);
    };
    const auto next_k = [&](int n) {
        const int stage = k_at.index();
        smem.k_empty[stage].wait(k_at.phase());
        copy_tile(load_k, smem.k_full[stage], Tile::kBytesK, from_k(_, _, _, n), to_k(_, _, _, stage)), ++k_at;
    };
    const auto next_v = [&](int n) {
        const int stage = v_at.index();
        smem.v_empty[stage].wait(v_at.phase());
        copy_tile(load_v, smem.v_full[stage], Tile::kBytesV, from_v(_, _, _, n), to_v(_, _, _, stage)), ++v_at;
    };
    copy_tile(load_q, smem.q_full, Tile::kBytesQ, from_q, to_q);
    next_k(item.tiles - 1);
#pragma unroll 1
    for (int n = item.tiles - 1; n > 0; --n) next_k(n - 1), next_v(n);
    next_v(0);
}

template <class Tile, class StoreO>
__device__ __forceinline__ void consume(const StoreO& store_o, const CuteCall& call, const CuteItem& item, int warpgroup,
                                        typename Tile::Smem& smem) {
    using Element = typename Tile::Element;
    using HeadDim = typename Tile::HeadDim;
    using ShapeQ = typename Tile::ShapeQ;
    using ShapeS = typename Tile::ShapeS;
    const int thread = threadIdx.x - 128;
    typename Tile::MmaQK mma_qk;
    typename Tile::MmaPV mma_pv;

    // Descriptors belong to a warpgroup. They are built for its first thread: a number that is the same in all lanes stays in uniform
    // registers.
    const Tensor smem_q = make_tensor(make_smem_ptr(smem.q), typename Tile::SmemQ{});
    const Tensor smem_k = make_tensor(make_smem_ptr(smem.k), typename Tile::SmemK{});
    const Tensor smem_v = make_tensor(make_smem_ptr(smem.v), typename Tile::SmemV{});
    const auto warpgroup_qk = mma_qk.get_slice(warpgroup * 128);
    const auto warpgroup_pv = mma_pv.get_slice(warpgroup * 128);
    const Tensor q = warpgroup_qk.partition_fragment_A(smem_q);  // (1, 1, headdim / 16)
    const Tensor k = warpgroup_qk.partition_fragment_B(smem_k);  // (1, 1, headdim / 16, stages)
    const Tensor v = warpgroup_pv.partition_fragment_B(smem_v);  // (1, 1, keys / 16, stages)

    // The registers of a thread. Element i of P has the row and key of element i of S, so P is just S rounded.
    Tensor S = partition_fragment_C(mma_qk, ShapeS{});
    Tensor P = make_tensor<Element>(partition_shape_A(mma_pv, ShapeS{}));
    Tensor O = partition_fragment_C(mma_pv, ShapeQ{});
    static_assert(size(S) == Tile::kBlockN / 2 && size(P) == size(S) && size(O) == HeadDim{} / 2, "64 rows of 128 threads");
    CuteRows rows;
    const CutePlace place = cute_place<Tile>(item, thread);

    cutlass::PipelineState<Tile::kStages> k_at, v_at;
    const auto release = [&](const Barrier& empty) {  // after a warp's products have read the stage
        if (arrives(thread % 32)) empty.arrive();
    };

    if (warpgroup == 1) give_turn<true, Tile::kConsumers>(warpgroup);  // the first turn is warpgroup 0's
    int n = item.tiles - 1;
    clear(O);
    smem.q_full.wait(0);
    smem.k_full[k_at.index()].wait(k_at.phase());
    multiply(mma_qk, q, k(_, _, _, k_at.index()), S, GMMA::ScaleOut::Zero);
    wait_for<0>(S);
    release(smem.k_empty[k_at.index()]), ++k_at;
    if (n >= item.masked) mask_scores<Tile>(rows_of(S), call, place, n);
    softmax_step(rows_of(S), call.scale_log2, rows);
    round_to(S, P);
#pragma unroll 1
    for (--n; n >= 0; --n) {
        smem.k_full[k_at.index()].wait(k_at.phase());
        take_turn<true>(warpgroup);
        multiply(mma_qk, q, k(_, _, _, k_at.index()), S, GMMA::ScaleOut::Zero);  // S(n)
        smem.v_full[v_at.index()].wait(v_at.phase());
        multiply(mma_pv, P, v(_, _, _, v_at.index()), O, GMMA::ScaleOut::One);  // O += P(n + 1) V(n + 1)
        give_turn<true, Tile::kConsumers>(warpgroup);
        wait_for<1>(S);
        release(smem.k_empty[k_at.index()]), ++k_at;
        if (n >= item.masked) mask_scores<Tile>(rows_of(S), call, place, n);
        const bool moved = softmax_step(rows_of(S), call.scale_log2, rows);
        wait_for<0>(O);
        release(smem.v_empty[v_at.index()]), ++v_at;
        round_to(S, P);  // not before the wait: P(n + 1) was still being read
        if (moved) {
            Tensor sums = rows_of(O);
            CUTE_UNROLL
            for (int i = 0; i < size(sums); ++i) sums(i) *= rows.o_scale[i % 2];
        }
    }
    smem.v_full[v_at.index()].wait(v_at.phase());
    multiply(mma_pv, P, v(_, _, _, v_at.index()), O, GMMA::ScaleOut::One);
    wait_for<0>(O);

    // out = O / row_sum; lse. A row that has seen no key is stored as zeros, because 0 x V may have given NaN.
    Tensor sums = rows_of(O);
    float* lse = call.lse + (int64_t(item.batch) * call.nheads + item.head) * call.seqlen_q;
    CUTE_UNROLL
    for (int r = 0; r < 2; ++r) {
        const float row_sum = quad_sum(rows.sum[r]);
        const RowEnd end = finish_row<ScoreUnit::kLog2>(rows.max[r], row_sum);
        if (call.lse && place.key == 0 && place.row[r] < call.seqlen_q) lse[place.row[r]] = end.lse * kLn2;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(sums); ++c) sums(r, c) = row_sum == 0.0f ? 0.0f : sums(r, c) * end.inverse;
    }

    // out goes through q, in which each warpgroup has read only its own rows: stmatrix writes it to shared memory and the copy engine from
    // there to global memory, leaving out the rows past the sequence.
    Tensor rounded = make_tensor_like<Element>(O);
    round_to(O, rounded);
    const auto copy_o = make_tiled_copy_C(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, mma_pv).get_slice(thread);
    Tensor smem_o = as_position_independent_swizzle_tensor(make_tensor(make_smem_ptr(smem.q), typename Tile::SmemQ{}));
    bar_sync(kWarpgroup + warpgroup, 128);  // all warps of the warpgroup have read Q
    copy(Copy_Atom<SM90_U32x4_STSM_N, Element>{}, copy_o.retile_S(rounded), copy_o.partition_D(smem_o));
    fence_proxy_async();
    bar_sync(kConsumers, Tile::kConsumerThreads);
    if (thread == 0) {
        const Tensor out = store_o.get_tma_tensor(make_shape(call.seqlen_q, HeadDim{}, call.nheads, call.batch));
        const Tensor tile_o = local_tile(out(_, _, item.head, item.batch), ShapeQ{}, make_coord(item.m, _0{}));
        copy(store_o, store_o.get_slice(_0{}).partition_S(smem_q), store_o.get_slice(_0{}).partition_D(tile_o));
        tma_store_arrive();
        tma_store_wait<0>();  // the block's shared memory must live until the store has read it
    }
}

template <class Tile, class LoadQ, class LoadK, class LoadV, class StoreO>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    forward_cute_kernel(const __grid_constant__ LoadQ load_q, const __grid_constant__ LoadK load_k, const __grid_constant__ LoadV load_v,
                        const __grid_constant__ StoreO store_o, const __grid_constant__ CuteCall call) {
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& smem = *reinterpret_cast<typename Tile::Smem*>(shared);
    const int warpgroup = cutlass::canonical_warp_group_idx();  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tma_descriptor(load_q.get_tma_descriptor()), prefetch_tma_descriptor(load_k.get_tma_descriptor());
        prefetch_tma_descriptor(load_v.get_tma_descriptor()), prefetch_tma_descriptor(store_o.get_tma_descriptor());
        constexpr int kArrivals = Tile::kConsumerThreads / 32 * kWarpArrivals;  // one per consumer warp
        smem.q_full.init(1);
        for (int i = 0; i < Tile::kStages; ++i) {
            smem.k_full[i].init(1), smem.k_empty[i].init(kArrivals);
            smem.v_full[i].init(1), smem.v_empty[i].init(kArrivals);
        }
        cutlass::arch::fence_barrier_init();
    }
    __syncthreads();
    const CuteItem item = cute_item<Tile::kBlockM, Tile::kBlockN>(call, blockIdx.x);
    if (warpgroup == 0) {
        cutlass::arch::warpgroup_reg_dealloc<40>();  // 40 + 2 x 232 = 3 x 168, the registers at launch
        if (threadIdx.x == 0) produce<Tile>(load_q, load_k, load_v, call, item, smem);
    } else {
        cutlass::arch::warpgroup_reg_alloc<232>();
        consume<Tile>(store_o, call, item, warpgroup - 1, smem);
    }
}

// ---- launch ----

inline CuteCall cute_call(const AttentionParams& p, int block_m) {
    CuteCall call{p.batch, p.nheads, p.group, int(fa::ceil_div(p.seqlen_q, block_m)), p.seqlen_q, p.seqlen_k, 0, p.scale * kLog2e, p.lse};
    const int64_t shift = p.top_left ? 0 : int64_t(p.seqlen_k) - p.seqlen_q;
    const int64_t right = p.window_right < 0 ? p.seqlen_k : shift + p.window_right;
    call.right = int(right < p.seqlen_k ? right : p.seqlen_k);
    // The keys end with the last one that any row sees. Later keys arrive as zeros, so a row of V that nobody sees is never multiplied.
    if (p.seqlen_q + right < p.seqlen_k) call.keys = int(p.seqlen_q + right);
    return call;
}

// The copies of Q, K, V and out, from tensor maps over (row, column, head, sequence); V is (column, row, head, sequence).
template <class Tile>
auto cute_copies(const AttentionParams& p, const CuteCall& call) {
    using HeadDim = typename Tile::HeadDim;
    const auto tensor = [&](const TensorView& x, int rows, int heads) {
        // The stride of an axis with one element is never used, but has to be valid.
        const auto stride = [](int extent, int64_t elements) { return extent > 1 ? elements : int64_t(HeadDim{}); };
        return make_tensor(make_gmem_ptr(static_cast<typename Tile::Element*>(x.data)), make_shape(rows, HeadDim{}, heads, p.batch),
                           make_stride(stride(rows, x.row), _1{}, stride(heads, x.head), stride(p.batch, x.batch)));
    };
    const Tensor q = tensor(p.q, p.seqlen_q, p.nheads), out = tensor(p.out, p.seqlen_q, p.nheads);
    const Tensor k = tensor(p.k, call.keys, p.nheads_k), v = tensor(p.v, call.keys, p.nheads_k);
    const Tensor v_transposed = make_tensor(v.data(), select<1, 0, 2, 3>(v.layout()));
    return std::make_tuple(make_tma_copy(SM90_TMA_LOAD{}, q, typename Tile::SmemQ{}, typename Tile::ShapeQ{}, _1{}),
                           make_tma_copy(SM90_TMA_LOAD{}, k, typename Tile::SmemK{}(_, _, _0{}), typename Tile::ShapeK{}, _1{}),
                           make_tma_copy(SM90_TMA_LOAD{}, v_transposed, typename Tile::SmemV{}(_, _, _0{}), typename Tile::ShapeV{}, _1{}),
                           make_tma_copy(SM90_TMA_STORE{}, out, typename Tile::SmemQ{}, typename Tile::ShapeQ{}, _1{}));
}

template <class Tile>
cudaError_t launch_cute(const AttentionParams& p, cudaStream_t stream) {
    const CuteCall call = cute_call(p, Tile::kBlockM);
    const int64_t blocks = int64_t(call.m_blocks) * p.nheads * p.batch;
    if (blocks == 0) return cudaSuccess;
    const auto launch = [&](const auto&... copies) {
        const auto kernel = forward_cute_kernel<Tile, std::decay_t<decltype(copies)>...>;
        return launch_kernel(kernel, unsigned(blocks), Tile::kThreads, sizeof(typename Tile::Smem), stream, LaunchOptions{}, copies...,
                             call);
    };
    return std::apply(launch, cute_copies<Tile>(p, call));
}

}  // namespace

cudaError_t forward_cute_sm90(const AttentionParams& p, const DeviceInfo&, cudaStream_t stream) {
    using cutlass::bfloat16_t, cutlass::half_t;
    const bool half = p.dtype == DType::kFloat16, small = p.headdim == 64;
    if (half) return small ? launch_cute<CuteTile<half_t, 64>>(p, stream) : launch_cute<CuteTile<half_t, 128>>(p, stream);
    return small ? launch_cute<CuteTile<bfloat16_t, 64>>(p, stream) : launch_cute<CuteTile<bfloat16_t, 128>>(p, stream);
}

}  // namespace fa
