// backward_mma.cu: from the first tensor-core gradients to the tile of the library's mma_sm80, at headdim 128. A step is a tile: a
// specialisation of the kernel's table. The kernels are the library's.
#include "attention/backward/mma_sm80/kernel.cuh"
#include "ladder/variants/variant.h"

namespace fa {
namespace {

// queries, keys, warps, of which along the queries of S, the keys of dK and dV, the queries of dQ; stages of Q and dO; blocks on an SM
#define FA_TILE(id, ...) \
    template <>          \
    inline constexpr BackwardTile kBackwardTileOf<128, 128, MmaSm(id)> = {__VA_ARGS__};
FA_TILE(601, 32, 32, 4, 2, 2, 2, 1, 1, 1)
FA_TILE(602, 64, 64, 8, 4, 2, 2, 1, 1, 1)
FA_TILE(603, 64, 64, 8, 4, 2, 2, 2, 2, 1)
FA_TILE(604, 64, 128, 8, 2, 4, 2, 2, 2, 1)
#undef FA_TILE

using T = __nv_bfloat16;
constexpr int kD = 128;

template <int kId>
cudaError_t launch_gradients(const BackwardParams& backward, int, cudaStream_t stream) {
    constexpr MmaSm kSm = MmaSm(kId);
    constexpr const BackwardTile& kTile = kBackwardTileOf<kD, kD, kSm>;
    const AttentionParams& p = backward.forward;
    MmaBackwardParams params{};
    params.backward = backward, params.scale_log2 = p.scale * kLog2e;
    params.aligned_q = params.aligned_k = params.aligned_v = params.aligned_out = true;  // the table refuses other calls
    params.aligned_dout = params.aligned_dq = params.aligned_dk = params.aligned_dv = true;
    params.tiles_q = (p.seqlen_q + kTile.block_m - 1) / kTile.block_m, params.tiles_k = (p.seqlen_k + kTile.block_n - 1) / kTile.block_n;
    params.workspace = workspace_of(backward, kTile.block_m, kD);
    const int64_t heads = int64_t(p.nheads_k) * p.batch, row_bytes = 2 * kD * int64_t(sizeof(T)) + kD * int64_t(sizeof(float));
    const int64_t section = heads_per_section(p.seqlen_q, p.group * row_bytes, 1);
    params.section = int(section < heads ? section : heads);
    const unsigned blocks_q = unsigned(params.tiles_q * p.nheads) * p.batch, blocks_k = unsigned(params.tiles_k * heads);
    cudaError_t error = launch_kernel(before_kernel<T, kTile.block_m, kD, kD>, blocks_q, kSideThreads, 0, stream, params);
    if (error == cudaSuccess)
        error = launch_kernel(gradient_kernel<T, kD, kD, kSm, Scores::kPlain>, blocks_k, kTile.warps * 32,
                              sizeof(MainSmem<T, kBackwardTileOf<kD, kD, kSm>, kD, kD>), stream, params);
    if (error != cudaSuccess) return error;
    return launch_kernel(after_kernel<T, kD, kD, kSm>, blocks_q, kTile.warps * 32, 0, stream, params);
}

template <int kId>
void add_step(Variants* variants, int order, const char* name, const char* about) {
    constexpr MmaSm kSm = MmaSm(kId);
    constexpr const BackwardTile& kTile = kBackwardTileOf<kD, kD, kSm>;
    Variant v;
    v.name = "backward_0" + std::to_string(order) + "_" + name + "_d128", v.experiment = "optimisation", v.kernel = "mma_sm80";
    v.about = about, v.order = order, v.headdim = kD, v.backward = true, v.compute = 80;
    v.tile_m = kTile.block_m, v.tile_n = kTile.block_n, v.stages = kTile.stages_q, v.threads = kTile.warps * 32;
    v.shared_bytes = sizeof(MainSmem<T, kBackwardTileOf<kD, kD, kSm>, kD, kD>);
    v.function = reinterpret_cast<const void*>(gradient_kernel<T, kD, kD, kSm, Scores::kPlain>);
    v.workspace = [](const AttentionParams& p, int) {
        BackwardParams backward{};
        backward.forward = p;
        return workspace_bytes(backward, kTile.block_m, kD);
    };
    v.launch_backward = launch_gradients<kId>;
    variants->push_back(std::move(v));
}

}  // namespace

void add_backward_mma_variants(Variants* variants) {
    add_step<601>(variants, 2, "tensor_cores", "mma.sync in tiles of 32 x 32: a block owns keys and adds to dq");
    add_step<602>(variants, 3, "larger_tiles", "tiles of 64 x 64, eight warps: ldmatrix reads half as much for each mma");
    add_step<603>(variants, 4, "two_stages", "the next tile of Q and dO arrives while this one is computed");
    add_step<604>(variants, 5, "more_keys", "64 x 128: half as many adds to dq: the library's mma_sm80 on Hopper");
}

}  // namespace fa
