// wgmma_w4_sm90.cu: how a product with 4-bit weights is cut into blocks, and the launch. The kernels: wgmma_w4_sm90.cuh, and up to 64 rows
// of x wgmma_w4_few_sm90.cuh.
#include "device/tensor_map.h"
#include "linear/kernels.h"
#include "linear/round_x.h"
#include "linear/wgmma_w4_few_sm90.cuh"

namespace fa {
namespace {

int64_t row_blocks_of(const W4LinearParams& p) { return ceil_div(w4::row_tiles(p.out_features, p.swiglu), kW4RowTiles); }

// How the product is cut into tiles of 128 rows x `tokens`, and these into work: `whole` ones are a block's, each of the others is the
// work of the `splits` blocks of a cluster. `resident` blocks run on a multiprocessor.
struct Plan {
    int tokens, resident, splits;
    int64_t whole, blocks;
};

// Clusters that fit on the GPU at the same time: those of an H200, whose groups of multiprocessors are not multiples of three or four.
int64_t clusters_of(int blocks, int resident, int64_t sms) {
    constexpr int kFit[2][8] = {{0, 132, 66, 39, 30, 22, 17, 15}, {0, 264, 132, 79, 62, 47, 39, 32}};
    return sms * kFit[resident - 1][blocks] / 132;
}

constexpr int kFewTokens = 64;  // of a tile of the kernel for few rows, at most

// The cut of tiles of `least_tokens` to `most_tokens` that takes the least time: in ns of an H200 a step of 64 columns, what a tile costs
// beside, and each part of one that is cut.
Plan plan_of(const W4LinearParams& p, const GpuSize& gpu, int least_tokens, int most_tokens) {
    struct Cost {
        int tokens, resident, step, tile, part, max_splits;
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
        consider({cost.tokens, cost.resident, 1, tiles, tiles < slots ? tiles : slots}, ceil_div(tiles, slots) * walk);
        for (int splits = 2; splits <= cost.max_splits; ++splits) {
            const int64_t clusters = clusters_of(splits, cost.resident, sms), blocks = clusters * splits;
            const int64_t rounds = clusters ? tiles / blocks : 0, whole = rounds * blocks, rest = tiles - whole;
            if (rest == 0 || rest > clusters || steps < (cost.resident == 2 ? 10 : 8) * splits) continue;
            consider({cost.tokens, cost.resident, splits, whole, rounds ? blocks : rest * splits},
                     rounds * walk + ceil_div(steps, splits) * cost.step + cost.tile + 1000 + cost.part * splits);
        }
    }
    return best;
}

// x as the copy engine can fetch it: nothing to be done to it before.
bool is_direct(const W4LinearParams& p) {
    return !p.norm_weight && p.dtype == p.compute_dtype && reinterpret_cast<uintptr_t>(p.x.data) % 16 == 0 &&
           (p.rows == 1 || (p.x.row % 8 == 0 && p.x.row >= p.in_features));
}

// Rows of 16-byte pieces, all of them inside out.
bool by_eights(const MatrixView& x, const W4LinearParams& p) {
    return reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && (p.rows == 1 || x.row % 8 == 0) && p.columns() % 8 == 0;
}

template <typename T, w4::Format kFormat, int kTokens, int kResident>
cudaError_t launch(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    const bool direct = is_direct(p);
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
    all.eights = p.out_dtype == p.compute_dtype && by_eights(p.out, p) &&
                 (!p.residual.data || (p.residual_dtype == p.compute_dtype && by_eights(p.residual, p)));

    constexpr bool kHalf = std::is_same_v<T, __half>;
    const void* const x = direct ? p.x.data : p.workspace;
    const int64_t x_row = direct ? p.x.row : rounded_columns(p.in_features);
    int loads;
    if (cudaError_t error =
            encode_tiles({"x", x, kHalf, p.in_features, p.rows, 1, 1, 2 * x_row, 0, 0, kTokens, kChunkColumns, true}, &all.map_x, &loads))
        return error;
    if (all.eights)
        if (cudaError_t error = encode_tiles(
                {"out", p.out.data, kHalf, p.columns(), p.rows, 1, 1, 2 * p.out.row, 0, 0, w4_turned(kTokens), kChunkColumns, true},
                &all.map_out, &loads))
            return error;
    constexpr int kWords = w4::tile_bytes(kFormat) / 4;
    const int64_t words = int64_t(all.column_tiles) * kWords;
    if (cudaError_t error = encode_words({"packed", static_cast<const uint8_t*>(p.packed) + sizeof(w4::PackedHeader), words,
                                          w4::row_tiles(p.out_features, p.swiglu), 4 * words, kWords, kW4RowTiles},
                                         &all.map_weight))
        return error;
    const LaunchOptions options{!direct || p.programmatic, unsigned(plan.splits)};
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

template <typename T>
cudaError_t launch(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    switch (p.format) {
        case w4::Format::kNvfp4: return launch<T, w4::Format::kNvfp4>(p, plan, stream);
        case w4::Format::kMxfp4: return launch<T, w4::Format::kMxfp4>(p, plan, stream);
        default: return launch<T, w4::Format::kInt4>(p, plan, stream);
    }
}
cudaError_t launch(const W4LinearParams& p, const Plan& plan, cudaStream_t stream) {
    return p.compute_dtype == DType::kFloat16 ? launch<__half>(p, plan, stream) : launch<__nv_bfloat16>(p, plan, stream);
}

}  // namespace

int64_t wgmma_w4_sm90_workspace(const W4LinearParams& p, const GpuSize&) {
    return is_direct(p) ? 0 : p.rows * rounded_columns(p.in_features) * 2;
}

bool wgmma_w4_few_sm90_wins(const W4LinearParams& p, const GpuSize& gpu) { return plan_of(p, gpu, 1, 256).tokens <= kFewTokens; }

cudaError_t wgmma_w4_few_sm90(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    return launch(p, plan_of(p, gpu, 1, kFewTokens), stream);
}
cudaError_t wgmma_w4_sm90(const W4LinearParams& p, const GpuSize& gpu, cudaStream_t stream) {
    return launch(p, plan_of(p, gpu, kFewTokens + 1, 256), stream);
}

}  // namespace fa
