// prefix_sm80/kernel.cuh: the prefix pass of decode_prefix_sm80: the queries of sequences that begin with the same pages share one read of
// them. common/prefix_call.cu has the launches around it.
//
// New against split_sm80/kernel.cuh, whose loop over tiles runs here: a row of the matrix is a query head of any member, and blocks take
// items (group, key head, tile of 64 rows, piece of the keys) instead of segments of a line. Every row sees every key of an item, so no
// scores are masked. Bound by shared memory, from which the four warps read each tile; K and V come from memory once and from L2 for other
// tiles of rows.
#pragma once

#include "attention/decode/common/prefix_call.h"
#include "attention/decode/common/prefix_items.cuh"
#include "attention/decode/split_sm80/attend.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

struct PrefixParams {
    DecodeParams decode;  // with tiles of 64 rows; its partial results are the plan's
    Divisor of_sequence;  // divides by the rows of a key head in one sequence
};

// Copies the tile's rows of q from `from`: the offset of each row in q, below 0 for a row that does not exist.
template <typename Plan>
__device__ __forceinline__ void copy_gathered(const AttentionParams& p, const SplitPlace<Plan>& place, const int64_t* from) {
    using TileQ = typename Plan::TileQ;
    constexpr int kRowsOfPass = kDecodeThreads / TileQ::kPieces;
    const int piece = threadIdx.x % TileQ::kPieces;
    const uint16_t* const q = static_cast<const uint16_t*>(p.q.data);
#pragma unroll 1
    for (int row = threadIdx.x / TileQ::kPieces; row < Plan::kRows; row += kRowsOfPass) {
        const int64_t at = from[row];
        const bool exists = at >= 0 && 8 * piece < p.headdim;
        cp_async_16(place.q_tile() + TileQ::offset(row, piece), exists ? q + at + 8 * piece : q, exists ? 16 : 0);
    }
}

template <typename Plan>
__global__ void __launch_bounds__(kDecodeThreads, Plan::kBlocksPerSm) decode_prefix_kernel(const __grid_constant__ PrefixParams params) {
    static_assert(Plan::kRows == 64 && Plan::kSharedParts, "every warp has 16 rows and all keys");
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ __align__(16) SplitStats stats;
    __shared__ float row_factor[Plan::kRows];  // bytes and bf16: see narrow_rows
    __shared__ __align__(8) unsigned char kept_bytes[Plan::kRegistersFull ? kDecodeWarps * sizeof(SplitWork) : 8];
    static_assert(sizeof stats >= Plan::kRows * sizeof(int64_t), "the places of the rows lie there until there are statistics");
    int64_t* const row_places = reinterpret_cast<int64_t*>(&stats);
    SplitWork* const kept = reinterpret_cast<SplitWork*>(kept_bytes);
    const DecodeParams& d = params.decode;
    const AttentionParams& p = d.attention;
    const PrefixPlan& plan = d.prefix;
    const SplitPlace<Plan> place{int(threadIdx.x % 32), __shfl_sync(kFullWarp, int(threadIdx.x / 32), 0), shared_address(shared), d.stages};

    launch_dependents();
    grid_dependency_wait();  // the plan is there, q is there, and the keys before those of this call
    const int items = plan.counts[1];
#pragma unroll 1
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const PrefixGroup group = group_of_item(plan, p.batch, item);
        const PrefixItem at = prefix_item(group, item, p.nheads_k, d.shape.tile_shift);
        if (threadIdx.x < Plan::kRows)
            row_places[threadIdx.x] = prefix_row(d, group, at.head_k, at.row_tile * Plan::kRows + int(threadIdx.x), params.of_sequence);
        SequenceKeys keys;  // of the leader; every row of the tile sees all of them
        keys.count = keys.shift = keys.end = group.keys, keys.begin = keys.first_tile = 0, keys.tiles = group.keys >> d.shape.tile_shift;
        const Segment segment{group.leader, at.head_k, at.begin, at.end, item};
        const SplitWorkAt<Plan> work(place, {segment, keys, at.head_k, 0}, kept);
        const int first_tile = work.first_tile();
        SplitCopies<Plan> copies(p.cache, place, work, keys, first_tile);
        SplitRows<Plan> rows;
        __syncthreads();  // the places of the rows are there

        // ---- the tiles: copied `stages` steps before they are attended to ----
        int slot = 0;
#pragma unroll 1
        for (int step = first_tile - d.stages; step < work.end_tile(); ++step) {
            if (step >= first_tile) {
                wait_for_oldest(d.stages);
                __syncthreads();  // this tile is here, and before the first one the rows of q
                if (step == first_tile) rows.prepare(d, place, row_factor);
#pragma unroll 1
                for (int part = 0; part < kDecodeWarps; ++part)
                    rows.attend(d, place, work, step * Plan::kKeys + part * Plan::kPartKeys, place.part(slot, part),
                                place.scales(slot, part));
                __syncthreads();  // nobody reads the tile any more
            }
            if (step + d.stages < work.end_tile()) copies.copy(p, place, work, step + d.stages, slot, [] {});
            if (step == first_tile - d.stages) copy_gathered(p, place, row_places);
            cp_async_commit();
            slot = slot + 1 == d.stages ? 0 : slot + 1;
        }

        if (Plan::kRegistersFull) __syncwarp();
        const Segment done = work.segment();
        leave_results(rows, place, shared, stats);
        store_results(d, place, done, shared, stats);
        __syncthreads();  // stage 0 may be filled again
    }
}

template <typename Plan>
cudaError_t launch_prefix(const DecodeParams& suffix, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    if (1 << rules.tile_shift != Plan::kKeys || 1 << rules.row_shift != Plan::kRows) return cudaErrorInvalidValue;
    PrefixParams params{suffix, divisor_of(rules.rows)};
    DecodeParams& d = params.decode;
    // store_results keeps the rows below seqlen_q * group: all of a tile, because nobody reads those that no member has.
    d.attention.seqlen_q = Plan::kRows;
    d.shape.rows = Plan::kRows, d.shape.row_tiles = 1, d.shape.tile_shift = rules.tile_shift;
    d.partial = suffix.prefix.partial, d.partial_lse = suffix.prefix.partial_lse;
    d.stages = Plan::stages(device.shared_memory);
    const size_t bytes = size_t(d.stages) * Plan::kStageBytes + Plan::kQueryBytes;
    const unsigned blocks = unsigned(std::min(rules.blocks, rules.most_items));
    return launch_kernel(decode_prefix_kernel<Plan>, blocks, kDecodeThreads, bytes, stream, params, device.compute >= 90);
}

template <typename E>
cudaError_t launch_prefix_of(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream) {
    switch (decode_bucket(d.attention)) {
        case 64: return launch_prefix<SplitPlan<E, 64, 64>>(d, rules, device, stream);
        case 128: return launch_prefix<SplitPlan<E, 128, 64>>(d, rules, device, stream);
    }
    if constexpr (sizeof(E) == 2) return launch_prefix<SplitPlan<E, 256, 64>>(d, rules, device, stream);
    return cudaErrorInvalidValue;  // the table of kernels refuses 8-bit keys of such head dims
}

}  // namespace

cudaError_t attend_to_prefixes_8bit(const DecodeParams& d, const SharingRules& rules, const DeviceInfo& device, cudaStream_t stream);

}  // namespace fa
