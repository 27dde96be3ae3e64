// wgmma_w4_sm90/kernel.cuh: out = residual + act(x weight^T + bias) for many rows of x ("tokens") and packed 4-bit weights, with Hopper's
// wgmma. Bound by the tensor cores from about 200 tokens on; below that by widening, and for few tokens by memory.
//
// New against mma_w4: the product is transposed. One instruction multiplies 64 rows of the weight by kTokens tokens, so the weight is
// the operand in registers. It is read from shared memory as 4 bits and widened in registers, with its columns in natural order
// (w4_in_order.cuh). x comes by TMA unchanged, and the tensor cores read it from shared memory. A block has 128 rows of the weight
// and kTokens tokens:
//
//     producer, one thread    64 columns of x and of the weight -> ring
//     warpgroups 0 and 1      64 rows each; they widen two steps of 16 columns while the tensor cores multiply the previous two
//
// Blocks walk over the tiles of the product. If the last tiles would leave blocks idle, these tiles are split along the columns: each block
// of a cluster computes a part, and the cluster adds the parts.
#pragma once

#include "device/ptx.cuh"
#include "device/wgmma.cuh"
#include "transformer/w4/common/params.h"
#include "transformer/w4/common/w4_in_order.cuh"
#include "transformer/w4/wgmma_w4_sm90/store.cuh"

namespace fa {

constexpr int kW4Rows = 128, kW4RowTiles = kW4Rows / w4::kTileRows;

constexpr int kW4Threads = 384, kW4ConsumerWarps = 8;

constexpr int w4_stages(int tokens) { return tokens == 256 ? 5 : 8; }  // as many as fit beside the staging buffers

struct WgmmaW4 {
    CUtensorMap map_x, map_weight, map_out;  // boxes of kTokens x 64 elements, of 8 packed row tiles, of 64 x 64 elements
    W4LinearParams p;
    int32_t column_tiles;              // of the weight, 64 columns each
    int32_t row_blocks, token_blocks;  // tiles of the product
    int32_t whole, rounds;             // tiles that are not split; the full rounds in which blocks take them
    int32_t splits, part_blocks;       // blocks (of a cluster) that share a split tile; blocks that have a part of a split tile
    int32_t share;                     // steps of 64 columns in a part
    bool fours;                        // load_4 and store_4 can access out and residual
    bool eights;                       // out and residual have the compute dtype and rows of whole 16-byte pieces, and TMA can store out
};

template <typename T, w4::Format kFormat, int kTokens>
struct alignas(1024) WgmmaW4Smem {
    static constexpr int kStages = w4_stages(kTokens), kTile = w4::tile_bytes(kFormat);
    T x[kStages][kTokens * kChunkColumns];
    alignas(128) uint8_t weight[kStages][kW4RowTiles * kTile];
    alignas(1024) unsigned char staging[2][w4_staging(kTokens)];
    uint64_t full[kStages], empty[kStages];
};

// A tile of the product, or a part of one. Tiles are ordered by groups of token blocks, so that a group's x stays in L2, and within a group
// by rows of the weight.
struct W4Work {
    int row_block, token_block;
    int begin, count;  // steps of 64 columns
    bool part;
};
// Work item i of this block; false if there is none. Whether there is work, and its number of steps, are found without a division, so that
// the compiler sees that they are the same for all threads and keeps the descriptors that depend on them in uniform registers.
__device__ __forceinline__ bool find_work(const WgmmaW4& all, int i, W4Work& w) {
    constexpr int kGroup = 8;
    int index = blockIdx.x + i * gridDim.x;
    w.part = index >= all.whole;
    w.begin = 0, w.count = all.column_tiles;
    if (w.part) {
        if (i != all.rounds || int(blockIdx.x) >= all.part_blocks) return false;
        w.begin = int(cluster_rank()) * all.share;
        w.count = min(all.share, all.column_tiles - w.begin);
        index = all.whole + blockIdx.x / all.splits;
    }
    const int first = index / (kGroup * all.row_blocks) * kGroup, wide = min(kGroup, all.token_blocks - first);
    index -= first * all.row_blocks;
    w.row_block = index / wide, w.token_block = first + index % wide;
    return true;
}

// Stores the sums of this warpgroup's half of a tile, by the fastest way that applies. All of `ring` has been read.
template <typename T, int kTokens>
__device__ __forceinline__ void store_sums(const WgmmaW4& all, const W4Work& w, int wg, float factor, float (&sums)[kTokens / 2],
                                           void* ring, void* staging) {
    const W4Place place{all.p, &all.map_out, all.fours, w.row_block * 2 + wg, w.token_block * kTokens, factor};
    if (w.part) store_parts<kTokens>(place, sums, static_cast<float*>(ring), all.splits);
    else if (all.eights) store_fast<T, kTokens>(place, sums, shared_address(staging));
    else store_staged<kTokens>(place, sums, staging);
}

template <typename T, w4::Format kFormat, int kTokens>
__global__ void __launch_bounds__(kW4Threads, 1) wgmma_w4_kernel(const __grid_constant__ WgmmaW4 all) {
    using Smem = WgmmaW4Smem<T, kFormat, kTokens>;
    constexpr int kStages = Smem::kStages, kTile = Smem::kTile;
    constexpr uint32_t kXBytes = kTokens * kChunkRowBytes, kWeightBytes = kW4RowTiles * kTile;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    static_assert(sizeof(Smem::x) >= size_t(2) * kTokens * kW4Stride * sizeof(float), "the ring has room for a block's part");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const W4LinearParams& p = all.p;
    const uint32_t full = shared_address(smem.full), empty = shared_address(smem.empty);
    const uint32_t smem_x = shared_address(smem.x), smem_weight = shared_address(smem.weight);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&all.map_x), prefetch_tensormap(&all.map_weight);
        for (int i = 0; i < kStages; ++i) mbarrier_init(full + 8 * i, 1), mbarrier_init(empty + 8 * i, 8);
        fence_mbarrier_init();
    }
    __syncthreads();

    // ------------------------------------------------------------------------------------------------ producer
    if (warp >= kW4ConsumerWarps) {
        setmaxnreg_dec<40>();
        if (warp > kW4ConsumerWarps || lane != 0) return;
        const auto load_weight = [&](const W4Work& w, int step, int slot) {
            mbarrier_arrive_expect_tx(full + 8 * slot, kXBytes + kWeightBytes);
            tma_load(smem_weight + slot * kWeightBytes, &all.map_weight, full + 8 * slot, (w.begin + step) * (kTile / 4),
                     w.row_block * kW4RowTiles, 0, 0, 0);
        };
        W4Work w;
        int ahead = 0;  // steps whose weights are requested before the previous kernel has ended
        if (find_work(all, 0, w))
            for (; ahead < min(kStages, w.count); ++ahead) load_weight(w, ahead, ahead);
        grid_dependency_wait();
        int slot = 0, phase = 1;
#pragma unroll 1
        for (int i = 0; find_work(all, i, w); ++i)
#pragma unroll 1
            for (int step = 0; step < w.count; ++step) {
                if (ahead > 0) {
                    --ahead;
                } else {
                    mbarrier_wait(empty + 8 * slot, phase);
                    load_weight(w, step, slot);
                }
                tma_load(smem_x + slot * kXBytes, &all.map_x, full + 8 * slot, (w.begin + step) * kChunkColumns, w.token_block * kTokens, 0,
                         0, 0);
                if (++slot == kStages) slot = 0, phase ^= 1;
            }
        return;
    }

    // ------------------------------------------------------------------------------------------------ consumers
    setmaxnreg_inc<232>();
    grid_dependency_wait();
    const int wg = warp / 4;
    const float factor = __ldg(&static_cast<const w4::PackedHeader*>(p.packed)->factor);
    const uint64_t desc_x = wgmma_descriptor(smem_x, 16);
    const w4::InOrder<kFormat, T> in_order(lane);
    int slot = 0, phase = 0;  // uniform over all threads in a way the compiler sees, so that descriptors stay in uniform registers

    W4Work w;
#pragma unroll 1
    for (int i = 0; find_work(all, i, w); ++i) {
        float sums[kTokens / 2];
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) sums[j] = 0.0f;
        uint4 codes[4];
        uint2 stored;
        const auto fetch = [&] {
            mbarrier_wait(full + 8 * slot, phase);
            const uint8_t* const from = smem.weight[slot] + warp * kTile;
            stored = in_order.load_scales(from);
#pragma unroll
            for (int s = 0; s < 4; ++s) codes[s] = in_order.load_codes(from, s);
        };
        uint32_t a[2][2][4];  // two steps of 16 columns being multiplied, two being widened
        int previous = -1;
        const auto release = [&] {
            if (previous >= 0 && lane == 0) mbarrier_arrive(empty + 8 * previous);
        };
        fetch();
#pragma unroll 1
        for (int step = 0; step < w.count; ++step) {
            const uint64_t desc = desc_x + slot * descriptor_step(kXBytes);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int s = 0; s < 2; ++s) {
                    uint32_t scale[2];
                    in_order.widen_scales(scale, stored, 2 * half + s);
                    in_order.dequantize(a[half][s], codes[2 * half + s], scale);
                }
                wgmma_fence();
                wgmma_rs<T, kTokens, 0>(sums, a[half][0], desc + descriptor_k_step(2 * half, kTokens), 1);
                wgmma_rs<T, kTokens, 0>(sums, a[half][1], desc + descriptor_k_step(2 * half + 1, kTokens), 1);
                wgmma_commit();
                if (half == 1) {
                    previous = slot;
                    if (++slot == kStages) slot = 0, phase ^= 1;
                    if (step + 1 < w.count) fetch();
                }
                wgmma_wait<1>();
                if (half == 0) release();
            }
        }
        wgmma_wait<0>(sums);
        release();

        store_sums<T, kTokens>(all, w, wg, factor, sums, smem.x, smem.staging[wg]);
    }
    if (threadIdx.x % 128 == 0) bulk_wait<0>();  // shared memory must stay until the stores from it are done
}

}  // namespace fa
