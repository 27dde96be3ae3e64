// wgmma_sm90/launch.cuh: the three launches of the Hopper backward, on the host: the kernel before, the main kernel of plan kId, the kernel
// after. Before them, what plans with a bias prepare.
#pragma once

#include "attention/backward/wgmma_sm90/masked_tiles.cuh"
#include "attention/backward/wgmma_sm90/options.cuh"
#include "attention/backward/wgmma_sm90/rows.h"
#include "attention/backward/wgmma_sm90/walk_parts.h"
#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/bias_copy.cuh"
#include "attention/kernels.h"
#include "device/launch.h"
#include "device/tensor_map.h"

namespace fa {

// `maps`: what the kernel takes beside those of q, k, v and dout.
template <typename T, BackwardPlanId kId, typename Kernel, typename... Maps>
cudaError_t launch_backward_block(Kernel function, int shared_bytes, const BackwardParams& b, int multiprocessors, cudaStream_t stream,
                                  const Maps&... maps) {
    constexpr BackwardPlan kPlan = kBackwardPlan<kId>;
    const AttentionParams& p = b.forward;
    const BackwardParams groups = call_of_groups(b);
    const bool varlen = p.cu_seqlens_q;

    BackwardSchedule schedule{};
    schedule.tiles = query_tiles(b, kPlan);
    place_query_tiles(&schedule.tiles, align_up(p.workspace, 128));
    schedule.n_blocks = (p.seqlen_k + kPlan.block_n - 1) / kPlan.block_n;
    BackwardParams call = b;
    if (schedule.tiles.direct) call.deterministic = false;  // in any order, for a tile meets one block
    schedule.in_order = call.deterministic;
    schedule.by_section = p.window_right >= 0 || schedule.in_order;
    schedule.section_heads = int(schedule.in_order ? backward_section_heads_in_order(p) : backward_section_heads(p));
    schedule.head_parts = b.head_parts > 1 ? b.head_parts : 1, schedule.row_parts = b.row_parts > 1 ? b.row_parts : 1;
    schedule.blocks = int(backward_blocks(p, kPlan)) * schedule.row_parts;
    if (kPlan.softcap) schedule.softcap = softcap_factors(p);

    CUtensorMap map_q, map_k, map_v, map_dout;
    const auto encode = [&](const char* name, const TensorView& x, int columns, int64_t rows, int heads, int box_rows, int padded,
                            CUtensorMap* map, int* loads, bool by_chunk = false) {
        return encode_tiles({name, x.data, std::is_same_v<T, __half>, columns, rows, heads, varlen ? 1 : p.batch, 2 * x.row, 2 * x.head,
                             2 * x.batch, box_rows, padded, by_chunk},
                            map, loads);
    };
    const int64_t rows_q = varlen ? p.total_q : p.seqlen_q, rows_k = varlen ? p.total_k : p.seqlen_k;
    if (cudaError_t error = encode("q", p.q, p.headdim, rows_q, p.nheads, kPlan.block_m, kPlan.columns(), &map_q, &schedule.q_loads))
        return error;
    if (cudaError_t error = encode("k", p.k, p.headdim, rows_k, groups.forward.nheads_k, kPlan.block_n, kPlan.columns(), &map_k,
                                   &schedule.k_loads, kPlan.blocks() > 1))
        return error;
    if (cudaError_t error =
            encode("v", p.v, p.headdim_v, rows_k, groups.forward.nheads_k, kPlan.block_n, kPlan.columns_v(), &map_v, &schedule.v_loads))
        return error;
    if (cudaError_t error =
            encode("dout", b.dout, p.headdim_v, rows_q, p.nheads, kPlan.block_m, kPlan.columns_v(), &map_dout, &schedule.dout_loads))
        return error;

    int grid = schedule.blocks * kPlan.blocks();
    if (kPlan.blocks() == 1 && grid > multiprocessors) grid = multiprocessors;  // blocks take the remaining key blocks in turn
    if constexpr (kPlan.intervals) {
        void* const bounds = static_cast<char*>(align_up(p.workspace, 128)) + query_tiles_bytes(schedule.tiles);
        if (cudaError_t error = launch_interval_bounds(p, kPlan.block_n, bounds, &schedule.bounds, stream)) return error;
        void* const lists = static_cast<char*>(bounds) + interval_bounds_bytes(p, kPlan.block_n);
        if (has_interval_tiles(p, kPlan, schedule.in_order)) {
            if (cudaError_t error = launch_interval_tiles(p, kPlan, schedule.bounds, lists, &schedule.masks, stream)) return error;
        } else if (!schedule.in_order && schedule.blocks * kPlan.blocks() > multiprocessors && can_order_intervals(p, kPlan.block_n)) {
            schedule.by_section = true;
            if (cudaError_t error = launch_interval_order(p, kPlan, schedule.bounds, lists, &schedule.order, stream)) return error;
        }
    }
    if constexpr (kPlan.masks) {
        void* const memory = static_cast<char*>(align_up(p.workspace, 128)) + query_tiles_bytes(schedule.tiles);
        if (cudaError_t error = launch_masked_tiles(p, kPlan, schedule.in_order, memory, &schedule.masks, stream)) return error;
    }
    const bool after_lists = kPlan.masks && schedule.masks.seen.shape.blocks() > 0;  // else no list was launched
    if (cudaError_t error = backward_rows_before(groups, schedule.tiles, after_lists, stream)) return error;
    if (cudaError_t error = launch_kernel(function, unsigned(grid), kBackwardThreads, size_t(shared_bytes), stream, LaunchOptions{}, map_q,
                                          map_k, map_v, map_dout, maps..., call, schedule))
        return error;
    return backward_rows_after(b, schedule.tiles, stream);
}

// Tiles of block_m queries and block_n keys; or of one row that all queries share.
template <BackwardPlanId kId>
cudaError_t encode_bias(const AttentionParams& p, CUtensorMap* map) {
    const ScoreView& bias = p.bias;
    int loads;
    constexpr int kPlaces = kBackwardPlan<kId>.bias_float32 ? 2 : 1, kBytes = 2 * kPlaces;  // places of 16 bits in an element
    return encode_tiles({"bias", bias.data, p.dtype == DType::kFloat16, int64_t(kPlaces) * p.seqlen_k, bias.row ? p.seqlen_q : 1,
                         bias.head ? p.nheads : 1, bias.batch ? p.batch : 1, kBytes * bias.row, kBytes * bias.head, kBytes * bias.batch,
                         bias.row ? kBackwardPlan<kId>.block_m : 1, kPlaces * kBackwardPlan<kId>.block_n, true},
                        map, &loads);
}

// Plans with a bias: the call as the main kernel sees it, after the copy of its bias if it needs one, and the map of the bias.
template <BackwardPlanId kId>
cudaError_t prepare_bias(const BackwardParams& b, BackwardParams* call, CUtensorMap* map, cudaStream_t stream) {
    *call = b;
    const AttentionParams whole = call_of_groups(b).forward;  // as the plan was chosen: parts of one head find masks of keys
    if (backward_copies_bias(whole)) {                        // after the query tiles
        void* const workspace =
            static_cast<char*>(align_up(b.forward.workspace, 128)) + query_tiles_bytes(query_tiles(b, kBackwardPlan<kId>));
        if (cudaError_t error = launch_bias_copy(b.forward, backward_bias_copy(whole), workspace, &call->forward, stream)) return error;
    }
    return encode_bias<kId>(call->forward, map);
}

}  // namespace fa
