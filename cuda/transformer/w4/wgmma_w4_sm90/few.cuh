// wgmma_w4_sm90/few.cuh: the product of wgmma_w4_sm90/kernel.cuh for fewer rows of x, where widening takes longer than multiplying. New
// against it: x is permuted into the column order of the packed weight (column_of in w4.h), instead of the weight into natural order. That
// takes two thirds of the instructions per weight and a quarter of the reads of shared memory. Bound by the latency of alternating between
// widening and multiplying, then by memory.
//
//     producer, one thread    64 columns of x and of the weight -> ring
//     three warps             reorder x in the ring, in place; two adjacent columns move together, as one register
//     warpgroups 0 and 1      64 rows each; they widen 64 columns while the tensor cores multiply the previous 64
//
// With kResident 2 a block takes less than half of an SM and two run on each. Then more clusters fit, and the blocks of the next launch
// load weights beside the last blocks of this one.
#pragma once

#include "transformer/w4/wgmma_w4_sm90/kernel.cuh"

namespace fa {

constexpr int w4_few_stages(int tokens, int resident) { return (tokens == 64 ? 12 : 18) / resident; }

template <typename T, w4::Format kFormat, int kTokens, int kResident>
struct alignas(1024) WgmmaW4FewSmem {
    static constexpr int kStages = w4_few_stages(kTokens, kResident), kTile = w4::tile_bytes(kFormat);
    T x[kStages][kTokens * kChunkColumns];
    alignas(128) uint8_t weight[kStages][kW4RowTiles * kTile];
    alignas(1024) unsigned char staging[2][w4_staging(kTokens)];
    uint64_t raw[kStages], full[kStages], empty[kStages];  // x has arrived; x is in order and the weight has arrived; both have been read
};

// Reorders a row of a stage of x. Columns 16 i + 8 b + 2 j and the next one, which form a register, become register i of the eight columns
// 2 j + b. Step j of 16 columns then multiplies what lanes (g, q) hold of columns 16 q + 2 j and 16 q + 8 + 2 j.
template <int kAtOnce>
__device__ __forceinline__ void order_row(uint32_t tile, int row) {
    const uint32_t at = tile + row * kChunkRowBytes;
#pragma unroll
    for (int first = 0; first < 2; first += kAtOnce) {
        float4 v[kAtOnce][4];
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b)
#pragma unroll
            for (int i = 0; i < 4; ++i) v[b][i] = load_shared_16(at + (((2 * i + first + b) ^ row % 8) << 4));
#pragma unroll
        for (int b = 0; b < kAtOnce; ++b)
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const auto pair = [&](int i) { return __float_as_uint((&v[b][i].x)[j]); };
                store_shared_16(at + (((2 * j + first + b) ^ row % 8) << 4), make_uint4(pair(0), pair(1), pair(2), pair(3)));
            }
    }
}

template <typename T, w4::Format kFormat, int kTokens, int kResident>
__global__ void __launch_bounds__(kW4Threads, kResident) wgmma_w4_few_kernel(const __grid_constant__ WgmmaW4 all) {
    using Smem = WgmmaW4FewSmem<T, kFormat, kTokens, kResident>;
    constexpr int kStages = Smem::kStages, kTile = Smem::kTile;
    constexpr uint32_t kXBytes = kTokens * kChunkRowBytes, kWeightBytes = kW4RowTiles * kTile;
    static_assert(kStages % 3 == 0, "three warps take the slots in turn");
    static_assert(sizeof(Smem) <= (kResident == 2 ? 113 : 227) * 1024, "what a Hopper block can address, or half of a multiprocessor's");
    static_assert(sizeof(Smem::x) >= size_t(2) * kTokens * kW4Stride * sizeof(float), "the ring has room for a block's part");
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    const W4LinearParams& p = all.p;
    const uint32_t raw = shared_address(smem.raw), full = shared_address(smem.full), empty = shared_address(smem.empty);
    const uint32_t smem_x = shared_address(smem.x), smem_weight = shared_address(smem.weight);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    launch_dependents();
    if (threadIdx.x == 0) {
        prefetch_tensormap(&all.map_x), prefetch_tensormap(&all.map_weight);
        for (int i = 0; i < kStages; ++i) mbarrier_init(raw + 8 * i, 1), mbarrier_init(full + 8 * i, 2), mbarrier_init(empty + 8 * i, 8);
        fence_mbarrier_init();
    }
    __syncthreads();
    W4Work w;

    // ------------------------------------------------------------------------------------------------ producer, and reordering of x
    if (warp >= kW4ConsumerWarps) {
        setmaxnreg_dec<kResident == 1 ? 64 : 48>();
        int slot = 0, phase = 0;
        if (warp > kW4ConsumerWarps) {  // takes every third slot
            int steps = 0;
            for (int i = 0; find_work(all, i, w); ++i) steps += w.count;
            slot = warp - kW4ConsumerWarps - 1;
#pragma unroll 1
            for (int step = slot; step < steps; step += 3) {
                mbarrier_wait(raw + 8 * slot, phase);
#pragma unroll 1
                for (int row = lane; row < kTokens; row += 32) order_row<kResident == 2 ? 1 : 2>(smem_x + slot * kXBytes, row);
                fence_proxy_async();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(full + 8 * slot);
                slot += 3;
                if (slot >= kStages) slot -= kStages, phase ^= 1;
            }
            return;
        }
        if (lane != 0) return;
        const auto load_weight = [&](const W4Work& w, int step, int slot) {
            mbarrier_arrive_expect_tx(full + 8 * slot, kWeightBytes);
            tma_load(smem_weight + slot * kWeightBytes, &all.map_weight, full + 8 * slot, (w.begin + step) * (kTile / 4),
                     w.row_block * kW4RowTiles, 0, 0, 0);
        };
        int ahead = 0;  // steps whose weights are requested before the previous kernel has ended
        if (find_work(all, 0, w))
            for (; ahead < min(kStages, w.count); ++ahead) load_weight(w, ahead, ahead);
        grid_dependency_wait();
#pragma unroll 1
        for (int i = 0; find_work(all, i, w); ++i)
#pragma unroll 1
            for (int step = 0; step < w.count; ++step) {
                if (ahead > 0) {
                    --ahead;
                } else {
                    mbarrier_wait(empty + 8 * slot, phase ^ 1);
                    load_weight(w, step, slot);
                }
                mbarrier_arrive_expect_tx(raw + 8 * slot, kXBytes);
                tma_load(smem_x + slot * kXBytes, &all.map_x, raw + 8 * slot, (w.begin + step) * kChunkColumns, w.token_block * kTokens, 0,
                         0, 0);
                if (++slot == kStages) slot = 0, phase ^= 1;
            }
        return;
    }

    // ------------------------------------------------------------------------------------------------ consumers
    setmaxnreg_inc<kResident == 1 ? 208 : 96>();
    grid_dependency_wait();
    const int wg = warp / 4;
    const float factor = __ldg(&static_cast<const w4::PackedHeader*>(p.packed)->factor);
    const uint64_t desc_x = wgmma_descriptor(smem_x, 16);
    int slot = 0, phase = 0;  // uniform over all threads in a way the compiler sees, so that descriptors stay in uniform registers

#pragma unroll 1
    for (int i = 0; find_work(all, i, w); ++i) {
        float sums[kTokens / 2];
#pragma unroll
        for (int j = 0; j < kTokens / 2; ++j) sums[j] = 0.0f;
        struct Packed {
            uint4 codes;
            uint32_t scales;
        } packed[2];  // for the step being widened, and for the next one
        const auto fetch = [&](Packed& to) {
            mbarrier_wait(full + 8 * slot, phase);
            const uint8_t* const from = smem.weight[slot] + warp * kTile;
            to.codes = w4::load_codes(from, lane), to.scales = w4::load_scales<kFormat>(from, lane);
        };
        constexpr int kGroup = kResident == 2 ? 2 : 4;  // steps of 16 columns per commit; two resident blocks have fewer registers
        uint32_t a[kGroup / 2][4][4];                   // one half is being multiplied, the other widened
        int step = 0, previous = -1;
        const auto release = [&] {
            if (previous >= 0 && lane == 0) mbarrier_arrive(empty + 8 * previous);
        };
        const auto multiply = [&](uint32_t(&wide)[4][4], const Packed& now, Packed& next) {
            const uint64_t desc = desc_x + slot * descriptor_step(kXBytes);
            const int current = slot;
            if (++slot == kStages) slot = 0, phase ^= 1;
            if (step + 1 < w.count) fetch(next);
            uint32_t scale[2];
            w4::widen_scales<kFormat, T>(scale, now.scales);
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // columns from 16 q + 4 half and from 16 q + 8 + 4 half
                uint32_t u[4], v[4];
                w4::dequantize_word<kFormat, T>(u, half ? now.codes.y : now.codes.x, scale);
                w4::dequantize_word<kFormat, T>(v, half ? now.codes.w : now.codes.z, scale);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    uint32_t(&to)[4] = wide[2 * half + j];
                    to[0] = u[2 * j], to[1] = u[2 * j + 1], to[2] = v[2 * j], to[3] = v[2 * j + 1];
                }
                if (kGroup == 4 && half == 0) continue;
                wgmma_fence();
#pragma unroll
                for (int s = 2 * half + 2 - kGroup; s < 2 * half + 2; ++s)
                    wgmma_rs<T, kTokens, 0>(sums, wide[s], desc + descriptor_k_step(s, kTokens), 1);
                wgmma_commit();
                wgmma_wait<1>();
                if (half == 0 || kGroup == 4) release();
            }
            previous = current;
        };
        fetch(packed[0]);
#pragma unroll 1
        for (; step < w.count; ++step) {
            multiply(a[0], packed[0], packed[1]);
            if (++step == w.count) break;
            multiply(a[kGroup / 2 - 1], packed[1], packed[0]);
        }
        wgmma_wait<0>(sums);
        release();

        store_sums<T, kTokens>(all, w, wg, factor, sums, smem.x, smem.staging[wg]);
    }
    if (threadIdx.x % 128 == 0) bulk_wait<0>();  // shared memory must stay until the stores from it are done
}

}  // namespace fa
