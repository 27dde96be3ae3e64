// split_sm80/kernel.cuh: few rows of q against a long cache. Only memory bandwidth limits this, so every byte of K and V is read once.
//
// The seqlen_q * group rows that share a key head are one tile of 16 or 64 rows, or several tiles. Their keys are divided into pieces for
// as many blocks as the GPU holds (schedule.h), and combine.cu merges the partial results. New against
// attention/forward/mma_sm80/kernel.cuh:
//   - A tile of keys is four parts. With 16 rows, each of the four warps owns a part: it loads and multiplies it and waits for nobody.
//     A warp's ring of stages keeps at least 16 KB in flight, and an SM has eight warps. The warps add up O only at the end of a segment.
//     With 64 rows the warps share the parts instead, and each has 16 rows.
//   - Pages: a lane looks up the page of one key of its warp's part, a tile ahead, and passes the address to the lanes that copy.
//   - 8-bit caches arrive as bytes and become fp16 in registers (device/widen.cuh). ldmatrix treats two neighbouring bytes as one 16-bit
//     value, so the columns of Q and O are permuted instead of the data. K's factor multiplies the score, V's multiplies P.
//
// Bound by memory. A call with few keys is bound by the chain lengths -> first keys -> result, and by the code that is read from memory on
// the way: there the integer work before the first copy and the size of the code matter, not the arithmetic.
#pragma once

#include "attention/decode/split_sm80/attend.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

template <typename Plan>
__global__ void __launch_bounds__(kDecodeThreads, Plan::kBlocksPerSm) decode_split_kernel(const __grid_constant__ DecodeParams d) {
    extern __shared__ __align__(128) unsigned char shared[];
    __shared__ SplitStats stats;
    __shared__ float row_factor[Plan::kRows];  // bytes and bf16: see narrow_rows
    __shared__ __align__(8) unsigned char kept_bytes[Plan::kRegistersFull ? kDecodeWarps * sizeof(SplitWork) : 8];
    SplitWork* const kept = reinterpret_cast<SplitWork*>(kept_bytes);
    const AttentionParams& p = d.attention;
    const SplitPlace<Plan> place{int(threadIdx.x % 32), __shfl_sync(kFullWarp, int(threadIdx.x / 32), 0), shared_address(shared), d.stages};

    launch_dependents();
    bool waited = !d.after_append;
    const auto wait_for_append = [&] {
        if (!waited) grid_dependency_wait();
        waited = true;
    };

    Segments segments(d);
#pragma unroll 1
    for (Segment segment; segments.next(d, segment);) {
        const SequenceKeys found = sequence_keys(d, segment.b);
        const SplitWorkAt<Plan> work(
            place, {segment, found, segment.unit / d.shape.row_tiles, segment.unit % d.shape.row_tiles * Plan::kRows}, kept);
        const int first_tile = work.first_tile();
        SplitCopies<Plan> copies(p.cache, place, work, found, first_tile);
        SplitRows<Plan> rows;

        // ---- the tiles: copied `stages` steps before they are attended to ----
        const int query_step = d.after_append ? first_tile - 1 : first_tile - d.stages;
        int slot = 0;
#pragma unroll 1
        for (int step = first_tile - d.stages; step < work.end_tile(); ++step) {
            if (step >= first_tile) {
                if (d.after_append && step == first_tile) cp_async_wait_all();
                wait_for_oldest(d.stages);
                if (step == first_tile) {
                    __syncthreads();  // the rows of q are here
                    rows.prepare(d, place, row_factor);
                } else {
                    place.meet();  // the parts of this tile are here
                }
#pragma unroll 1
                for (int part = Plan::kSharedParts ? 0 : place.warp; part < (Plan::kSharedParts ? kDecodeWarps : place.warp + 1); ++part) {
                    const int key0 = step * Plan::kKeys + part * Plan::kPartKeys;
                    if (const SequenceKeys keys = work.keys(); key0 < keys.end && key0 + Plan::kPartKeys > keys.begin)
                        rows.attend(d, place, work, key0, place.part(slot, part), place.scales(slot, part));
                }
                place.meet();  // nobody reads the parts any more
            }
            if (step + d.stages < work.end_tile()) copies.copy(p, place, work, step + d.stages, slot, wait_for_append);
            if (step == query_step) {
                wait_for_append();
                copy_query(p, place, work);
            }
            cp_async_commit();
            slot = slot + 1 == d.stages ? 0 : slot + 1;
        }

        if (Plan::kRegistersFull) __syncwarp();
        const Segment done = work.segment();
        leave_results(rows, place, shared, stats);
        store_results(d, place, done, shared, stats);
        __syncthreads();  // stage 0 may be filled again
    }
    wait_for_append();  // so the end of this kernel is also the end of the one before
}

template <typename Plan>
cudaError_t launch_split(DecodeParams d, const DeviceInfo& device, cudaStream_t stream) {
    d.stages = Plan::stages(device.shared_memory);
    const size_t bytes = size_t(d.stages) * Plan::kStageBytes + Plan::kQueryBytes;
    const unsigned blocks = unsigned(decode_blocks(d.shape, d.attention, device));
    return launch_kernel(decode_split_kernel<Plan>, blocks, kDecodeThreads, bytes, stream, d, d.after_append);
}

template <typename E, int kD, bool kReadsScores>
cudaError_t launch_split(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    if constexpr (decode_has_wide(sizeof(E), kD))
        if (d.shape.rows == 64) return launch_split<SplitPlan<E, kD, 64, kReadsScores>>(d, device, stream);
    return launch_split<SplitPlan<E, kD, 16, kReadsScores>>(d, device, stream);
}

template <typename E, bool kReadsScores = false>
cudaError_t launch_split_of(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    switch (decode_bucket(d.attention)) {
        case 64: return launch_split<E, 64, kReadsScores>(d, device, stream);
        case 128: return launch_split<E, 128, kReadsScores>(d, device, stream);
        default: return launch_split<E, 256, kReadsScores>(d, device, stream);
    }
}

}  // namespace
}  // namespace fa
