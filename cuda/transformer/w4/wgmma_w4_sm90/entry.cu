// wgmma_w4_sm90/entry.cu: divides the wgmma products with 4-bit weights among blocks, and launches them. The kernels are in
// wgmma_w4_sm90/kernel.cuh and, with tiles of up to 64 rows of x, in wgmma_w4_sm90/few.cuh.
#include "device/launch.h"
#include "device/tensor_map.h"
#include "transformer/w4/common/product.h"
#include "transformer/w4/kernels.h"
#include "transformer/w4/round_x.h"
#include "transformer/w4/wgmma_w4_sm90/few.cuh"

namespace fa {
namespace {

int64_t row_blocks_of(const W4LinearParams& p) { return ceil_div(w4::row_tiles(p.out_features, p.swiglu), kW4RowTiles); }

// How the product is divided.
struct Plan {
    int tokens;     // a tile is 128 rows of the weight x `tokens` rows of x
    int resident;   // blocks per SM
    int64_t whole;  // tiles that one block computes; each other tile is split among the blocks of a cluster
    int splits;     // blocks per cluster
    int64_t blocks;
};

// Clusters that fit on the GPU at the same time. Measured on an H200, whose groups of SMs are not multiples of three or four.
int64_t clusters_of(int blocks, int resident, int64_t sms) {
    constexpr int kFit[2][8] = {{0, 132, 66, 39, 30, 22, 17, 15}, {0, 264, 132, 79, 62, 47, 39, 32}};
    return sms * kFit[resident - 1][blocks] / 132;
}

constexpr int kFewTokens = 64;  // rows of x in a tile of the kernel for few rows, at most

// The plan with the least estimated time, with `least_tokens` to `most_tokens` tokens per tile.
Plan plan_of(const W4LinearParams& p, const DeviceInfo& gpu, int least_tokens, int most_tokens) {
    struct Cost {              // measured on an H200, in ns
        int tokens, resident;  // the plan that the costs belong to
        int step, tile, part;  // a step of 64 columns; the rest of a tile; each part of a split tile
        int max_splits;        // the most splits that were measured
    };
    constexpr Cost kCosts[] = {{32, 1, 245, 2000, 850, 4}, {32, 2, 440, 3000, 150, 7},  {64, 1, 283, 3800, 850, 4},
                               {64, 2, 510, 5000, 350, 7}, {128, 1, 385, 5500, 500, 4}, {256, 1, 620, 5500, 3000, 4}};
    const int64_t steps = w4::column_tiles(p.in_features), sms = gpu.multiprocessors;
    Plan best{};
    int64_t least = 0;
    for (const Cost& cost : kCosts) {
        if (cost.tokens < least_tokens || cost.tokens > most_tokens) continue;
        const int64_t tiles = row_blocks_of(p) * ceil_div(p.rows, cost.tokens), walk = steps * cost.step + cost.tile;
        const int64_t slots = sms * cost.resident;
        const auto consider = [&](const Plan& plan, int64_t time) {
            if (best.tokens == 0 || time < least) best = plan, least = time;
        };
        Plan plan{};
        plan.tokens = cost.tokens, plan.resident = cost.resident;
        plan.whole = tiles, plan.splits = 1, plan.blocks = tiles < slots ? tiles : slots;
        consider(plan, ceil_div(tiles, slots) * walk);
        for (int splits = 2; splits <= cost.max_splits; ++splits) {
            const int64_t clusters = clusters_of(splits, cost.resident, sms), blocks = clusters * splits;
            const int64_t rounds = clusters ? tiles / blocks : 0, whole = rounds * blocks, rest = tiles - whole;
            if (rest == 0 || rest > clusters || steps < (cost.resident == 2 ? 10 : 8) * splits) continue;
            plan.whole = whole, plan.splits = splits, plan.blocks = rounds ? blocks : rest * splits;
            consider(plan, rounds * walk + ceil_div(steps, splits) * cost.step + cost.tile + 1000 + cost.part * splits);
        }
    }
    return best;
}

// Whether rows consist of whole 16-byte pieces.
bool by_eights(const MatrixView& x, const W4LinearParams& p) {
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (p.rows == 1 || x.row % 8 == 0) && p.columns() % 8 == 0;
}

template <typename T, w4::Format kFormat, int kTokens, int kResident>
cudaError_t launch(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    const bool direct = w4::fetches_x(p);
    if (!direct)
        if (cudaError_t error = round_x(p, p.workspace, stream)) return error;
    WgmmaW4 all{};
    all.p = p;
    all.column_tiles = int32_t(w4::column_tiles(p.in_features));
    all.row_blocks = int32_t(row_blocks_of(p)), all.token_blocks = int32_t(ceil_div(p.rows, kTokens));
    all.whole = int32_t(plan.whole), all.rounds = int32_t(plan.whole / plan.blocks);
    all.splits = plan.splits, all.part_blocks = int32_t((int64_t(all.row_blocks) * all.token_blocks - plan.whole) * plan.splits);
    all.share = int32_t(ceil_div(all.column_tiles, plan.splits));
    const int64_t out_row = p.rows > 1 ? p.out.row : 0, residual_row = p.rows > 1 ? p.residual.row : 0;
    all.fours =
        by_fours(p.out.data, out_row, p.out_dtype) && (!p.residual.data || by_fours(p.residual.data, residual_row, p.residual_dtype));
    all.eights = p.out_dtype == p.compute_dtype && by_eights(p.out, p) && w4::copy_engine_takes_rows(p, p.out, p.columns()) &&
                 (!p.residual.data || (p.residual_dtype == p.compute_dtype && by_eights(p.residual, p)));

    TensorTiles x{};
    x.name = "x", x.data = direct ? p.x.data : p.workspace, x.half = std::is_same_v<T, __half>;
    x.columns = p.in_features, x.rows = p.rows, x.heads = x.batch = 1;
    x.row_stride = 2 * (direct ? p.x.row : rounded_columns(p.in_features));
    x.box_rows = kTokens, x.padded_columns = kChunkColumns, x.by_chunk = true;
    int loads;
    if (cudaError_t error = encode_tiles(x, &all.map_x, &loads)) return error;
    if (all.eights) {
        TensorTiles out = x;
        out.name = "out", out.data = p.out.data, out.columns = p.columns(), out.row_stride = 2 * p.out.row;
        out.box_rows = w4_turned(kTokens);
        if (cudaError_t error = encode_tiles(out, &all.map_out, &loads)) return error;
    }
    constexpr int kWords = w4::tile_bytes(kFormat) / 4;
    const int64_t words = int64_t(all.column_tiles) * kWords;
    WordTiles packed{};
    packed.name = "packed", packed.data = static_cast<const uint8_t*>(p.packed) + sizeof(w4::PackedHeader);
    packed.words = words, packed.rows = w4::row_tiles(p.out_features, p.swiglu), packed.row_stride = 4 * words;
    packed.box_words = kWords, packed.box_rows = kW4RowTiles;
    if (cudaError_t error = encode_words(packed, &all.map_weight)) return error;
    LaunchOptions options;
    options.programmatic = !direct || p.programmatic, options.cluster = unsigned(plan.splits);
    if constexpr (kTokens <= kFewTokens)
        return launch_kernel(wgmma_w4_few_kernel<T, kFormat, kTokens, kResident>, unsigned(plan.blocks), kW4Threads,
                             sizeof(WgmmaW4FewSmem<T, kFormat, kTokens, kResident>), stream, all, options);
    else
        return launch_kernel(wgmma_w4_kernel<T, kFormat, kTokens>, unsigned(plan.blocks), kW4Threads,
                             sizeof(WgmmaW4Smem<T, kFormat, kTokens>), stream, all, options);
}

template <typename T, w4::Format kFormat>
cudaError_t launch(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    const bool two = plan.resident == 2;
    switch (plan.tokens) {
        case 32: return two ? launch<T, kFormat, 32, 2>(p, plan, stream) : launch<T, kFormat, 32, 1>(p, plan, stream);
        case 64: return two ? launch<T, kFormat, 64, 2>(p, plan, stream) : launch<T, kFormat, 64, 1>(p, plan, stream);
        case 128: return launch<T, kFormat, 128, 1>(p, plan, stream);
        default: return launch<T, kFormat, 256, 1>(p, plan, stream);
    }
}

cudaError_t launch(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    return w4::with_format_and_type(p, [&](auto format, auto zero) { return launch<decltype(zero), format.value>(p, plan, stream); });
}

}  // namespace

size_t wgmma_w4_sm90_workspace(const W4LinearParams& p, const DeviceInfo&) { return w4::fetches_x(p) ? 0 : rounded_bytes(p); }

bool wgmma_w4_few_sm90_wins(const W4LinearParams& p, const DeviceInfo& gpu) { return plan_of(p, gpu, 1, 256).tokens <= kFewTokens; }

cudaError_t wgmma_w4_few_sm90(const W4LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    return launch(p, plan_of(p, gpu, 1, kFewTokens), stream);
}
cudaError_t wgmma_w4_sm90(const W4LinearParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    return launch(p, plan_of(p, gpu, kFewTokens + 1, 256), stream);
}

}  // namespace fa
