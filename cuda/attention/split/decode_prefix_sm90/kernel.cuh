// decode_prefix_sm90/kernel.cuh: the prefix pass of decode_prefix_sm90: as in prefix_sm80, the rows of a group's sequences are one matrix
// that attends to the keys these sequences begin with. common/prefix_call.cu has the launches around it.   fp16 and bf16.
//
// New against prefix_sm80: wgmma and the copy engine. A block is a block of wgmma_split_sm90 with 128 rows, whose consumer loop runs here;
// an item is some of the shared keys for one tile of rows. Pages come as boxes. A row of the matrix may be any row of q, so the producer's
// threads copy the rows one by one. Every row sees every key of an item, so no scores are masked. Bound by the tensor cores.
#pragma once

#include "attention/decode/common/prefix_call.h"
#include "attention/decode/common/prefix_items.cuh"
#include "attention/split/wgmma_split_sm90/kernel.cuh"

namespace fa {

struct PrefixWgmmaParams {
    DecodeParams decode;
    WgmmaSchedule loads;  // its list is not used
    Divisor of_sequence;  // divides by the rows of a key head in one sequence
    int tile_shift;       // a tile has 2^tile_shift keys
};

// Called by the producer's warpgroup, whose thread t knows where row t of the tile lies (prefix_row). Rows that no member has are zeros.
template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void gather_q(const AttentionParams& p, int64_t place, WgmmaSmem<T, kId>& smem) {
    constexpr int kChunks = kWgmmaPlan<kId>.columns() / kChunkColumns;
    static_assert(kWgmmaPlan<kId>.block_m() == 128, "a row a thread");
    const int lane = threadIdx.x % 32, piece = lane % 8;  // eight lanes copy the 128 bytes of a chunk
    const T* const q = static_cast<const T*>(p.q.data) + 8 * piece;
#pragma unroll 2
    for (int pass = 0; pass < 8; ++pass) {
        const int64_t from = __shfl_sync(~0u, place, 4 * pass + lane / 8);
        const int row = threadIdx.x / 32 * 32 + 4 * pass + lane / 8;
        const uint32_t to = shared_address(smem.q[row / 64]) + row % 64 * kChunkRowBytes + ((piece ^ row % 8) << 4);
#pragma unroll
        for (int c = 0; c < kChunks; ++c) {
            const bool exists = from >= 0 && c * kChunkColumns + 8 * piece < p.headdim;
            cp_async_16(to + c * 64 * kChunkRowBytes, exists ? q + from + c * kChunkColumns : q, exists ? 16 : 0);
        }
    }
}

template <typename T, WgmmaPlanId kId>
__device__ __forceinline__ void produce_prefixes(const CUtensorMap& map_k, const CUtensorMap& map_v, const PrefixWgmmaParams& params,
                                                 WgmmaSmem<T, kId>& smem) {
    constexpr int kRows = kWgmmaPlan<kId>.block_m();
    const DecodeParams& d = params.decode;
    const AttentionParams& p = d.attention;
    const PrefixPlan& plan = d.prefix;
    WarpgroupBoxes<T, kId> tiles(map_k, map_v, p, params.loads, smem);
    Ring<WgmmaSmem<T, kId>::kWorkSlots> work(smem.work_full, smem.work_empty);
    uint32_t count = 0, tile = 0;
    grid_dependency_wait();  // the plan is there, q is there, and the keys before those of this call
    fence_proxy_async_global();
    const int items = plan.counts[1];
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const PrefixGroup group = group_of_item(plan, p.batch, item);
        const PrefixItem at = prefix_item(group, item, p.nheads_k, params.tile_shift);
        SplitWork& w = smem.work[work.slot];
        work.wait_empty();
        if (threadIdx.x == 0) {
            // Rows count from the tile's first. Each is a query of its own that sees all keys of the group.
            w.state = WorkState::kRows;
            w.row0 = w.q_row = w.k_row = 0, w.batch = group.leader, w.head = at.head_k * p.group;
            w.seqlen_q = kRows, w.seqlen_k = w.shift = w.right = group.keys, w.left = -kRows;
            w.group = 1, w.slab_rows = 64;
            w.rows = group.members * int(params.of_sequence.divisor) - at.row_tile * kRows;
            w.first_tile = at.begin, w.last_tile = at.end - 1;
            w.tree_begin = group.keys;
            const int64_t row = int64_t(item) * kRows;
            w.partial = plan.partial + row * p.headdim_v, w.partial_lse = plan.partial_lse + row;
            mbarrier_arrive(work.full_barrier());
        }
        const int64_t place = prefix_row(d, group, at.head_k, at.row_tile * kRows + int(threadIdx.x), params.of_sequence);
        const Ring<1> q(smem.q_full, smem.q_empty, count);
        const auto gather = [&] {
            q.wait_empty();
            gather_q<T, kId>(p, place, smem);
        };
        if (count == 0) gather();  // before the first keys, which take longer to find
        bar_sync(kProducer, 128);  // all have read the item; no warp is more than one item ahead
        load_item<T, kId>(w, smem, tiles, tile, [&] {
            if (count > 0) gather();
            cp_async_wait_all();
            fence_proxy_async();
            bar_sync(kProducer, 128);  // all rows are there, and no warp still waits for this phase of the buffer
            if (threadIdx.x == 0) mbarrier_arrive(q.full_barrier());
            __syncwarp();
        });
        ++count, work.next();
    }
    work.wait_empty();
    if (threadIdx.x == 0) {
        smem.work[work.slot].state = WorkState::kEnd;
        mbarrier_arrive(work.full_barrier());
    }
}

template <typename T, SplitTile kTile>
__global__ void __launch_bounds__(128 * (split_plan(kTile).warpgroups + 1), 1)
    prefix_wgmma_kernel(const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                        const __grid_constant__ PrefixWgmmaParams params) {
    constexpr WgmmaPlanId kId = split_id(kTile);
    constexpr WgmmaPlan kPlan = kWgmmaPlan<kId>;
    using Smem = WgmmaSmem<T, kId>;
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    launch_dependents();
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);  // the shuffle tells the compiler that it is uniform
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map_k), prefetch_tensormap(&map_v);
        init_barriers(smem, false);
    }
    __syncthreads();
    if (warpgroup == 0) {
        if constexpr (kPlan.moves_registers()) setmaxnreg_dec<kPlan.producer_registers()>();
        produce_prefixes<T, kId>(map_k, map_v, params, smem);
        return;
    }
    if constexpr (kPlan.moves_registers()) setmaxnreg_inc<kPlan.consumer_registers()>();
    consume(params.decode.attention, smem, Consumer{warpgroup - 1, int(threadIdx.x % 128 / 32), int(threadIdx.x % 32)});
}

// ---- launch ----

template <typename T, SplitTile kTile>
cudaError_t launch_prefix_wgmma(const DecodeParams& suffix, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    constexpr WgmmaPlan kPlan = split_plan(kTile);
    if (1 << rules.tile_shift != kPlan.block_n || 1 << rules.row_shift != kPlan.block_m()) return cudaErrorInvalidValue;
    const AttentionParams& p = suffix.attention;
    PrefixWgmmaParams params{};
    params.decode = suffix, params.of_sequence = divisor_of(rules.rows), params.tile_shift = rules.tile_shift;
    params.loads.page_boxes = std::gcd(p.cache.page_size, kPlan.block_n);
    const auto tiles = [&](const char* name, const TensorView& x, int columns, int padded) {
        return TensorTiles{name,
                           x.data,
                           std::is_same_v<T, __half>,
                           columns,
                           p.cache.page_size,
                           p.nheads_k,
                           p.cache.entries,
                           2 * x.row,
                           2 * x.head,
                           2 * x.batch,
                           params.loads.page_boxes,
                           padded,
                           true};
    };
    CUtensorMap map_k, map_v;
    if (cudaError_t error = encode_tiles(tiles("k", p.k, p.headdim, kPlan.columns()), &map_k, &params.loads.k_loads)) return error;
    if (cudaError_t error = encode_tiles(tiles("v", p.v, p.headdim_v, kPlan.columns_v()), &map_v, &params.loads.v_loads)) return error;
    const unsigned blocks = unsigned(std::min(rules.blocks, rules.most_items));
    LaunchOptions options;
    options.programmatic = true;
    return launch_kernel(prefix_wgmma_kernel<T, kTile>, blocks, 128 * (kPlan.warpgroups + 1), sizeof(WgmmaSmem<T, split_id(kTile)>), stream,
                         options, map_k, map_v, params);
}

}  // namespace fa
