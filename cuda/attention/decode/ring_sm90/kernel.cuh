// ring_sm90/kernel.cuh: few rows of q against a long cache, on Hopper. New against split_sm80/kernel.cuh: one block per SM. Two of its
// warps load, one K and one V, through the copy engine into one ring that fills the SM's shared memory; eight warps attend.
//   - The ring never drains: the loading warps go on to the next unit's keys while the others finish the last unit. The loading warps find
//     the unit and its keys and pass both on with the unit's rows of q, so that the other warps have no integer work.
//   - A tile is four parts of keys. A warp attends to its part of every second tile and meets the other warps only at the end of a segment.
//   - A page of 16 keys or more is one box of the copy engine, or several. The lanes of a loading warp look up 32 boxes at a time.
//   - 8-bit caches as in split_sm80/kernel.cuh. Factors that differ between keys arrive by cp.async with their tile. One factor for all
//     keys is folded into the rows' scale and into the result.
//
// Bound by memory and, at its beginning and end, by latency: lengths -> first keys, and last keys -> result.
#pragma once

#include "attention/decode/ring_sm90/attend.cuh"
#include "device/launch.h"
#include "device/mbarrier_sm80.cuh"
#include "device/tensor_map.h"

namespace fa {
namespace {

// Copies the factors of a tile's keys, from key0 on, to `to`; a lane copies every 32nd. Lane i holds the place of box i: `batch` and `row`.
template <typename Smem>
__device__ __forceinline__ void copy_scales(const CacheScale& scale, int head_k, const SequenceKeys& keys, int key0, int box_rows,
                                            int batch, int row, int lane, const float* to) {
#pragma unroll
    for (int j = lane; j < Smem::kKeys; j += 32) {
        const int box = j / box_rows, box_batch = __shfl_sync(kFullWarp, batch, box), box_row = __shfl_sync(kFullWarp, row, box);
        const bool seen = unsigned(key0 + j - keys.begin) < unsigned(keys.end - keys.begin);
        const float* const from = scale.data + box_batch * scale.batch + (box_row + j - box * box_rows) * scale.row + head_k * scale.head;
        cp_async_4(shared_address(to + j), seen ? from : scale.data, seen ? 4 : 0);
    }
}

// A warp copies the rows of q of a key head to `to`.
template <typename TileQ>
__device__ __forceinline__ void copy_query(const DecodeParams& d, int b, int head_k, int lane, uint32_t to) {
    const AttentionParams& p = d.attention;
    const int rows = p.seqlen_q * p.group, piece = lane % TileQ::kPieces;
#pragma unroll 1
    for (int r = lane / TileQ::kPieces; r < rows; r += 32 / TileQ::kPieces) {
        const int i = d.group.divide(r), head = head_k * p.group + d.group.remainder(r, i);
        const uint16_t* const from = static_cast<const uint16_t*>(p.q.data) + b * p.q.batch + i * p.q.row + head * p.q.head + 8 * piece;
        if (8 * piece < p.headdim) cp_async_16(to + TileQ::offset(r, piece), from, 16);
    }
}

// The work of a loading warp: it loads K, or V.
template <typename E, int kD>
__device__ __forceinline__ void load_ring(const RingParams& params, RingSmem<E, kD>& smem, SegmentsOf<UnitOrder::kEveryNth> segments) {
    using Smem = RingSmem<E, kD>;
    using TileQ = SharedTile<__half, kD>;  // of 16-bit values
    const DecodeParams& d = params.decode;
    const AttentionParams& p = d.attention;
    const CacheView& cache = p.cache;
    const int lane = threadIdx.x % 32, box_rows = params.box_rows, boxes = params.boxes;
    const bool values = threadIdx.x / 32 > kWarps;
    const CUtensorMap* const map = values ? &params.v_map : &params.k_map;
    const int column_boxes = values ? params.v_boxes : params.k_boxes;
    const CacheScale& scale = values ? cache.v_scale : cache.k_scale;
    const uint32_t slots = shared_address(smem.slots), full = shared_address(smem.full), empty = shared_address(smem.empty);
    const uint32_t q_full = shared_address(smem.q_full), q_empty = shared_address(smem.q_empty);
    bool waited = !d.after_append;
    const auto wait_for_append = [&] {
        if (waited) return;
        grid_dependency_wait();
        fence_proxy_async_global();
        waited = true;
    };

    RingPlace<Smem::kSlots> ring;
    ring.advance(values);
    int n = 0;
#pragma unroll 1
    for (Segment segment; segments.next(d, segment); ++n) {
        const int b = segment.b, head_k = segment.unit, buffer = n & 1;  // the rows of a key head are one tile
        const SequenceKeys keys = sequence_keys(d, b);
        const int first = keys.first_tile + segment.begin, end = keys.first_tile + segment.end;
        const int entry = !cache.entries ? b : cache.block_table ? 0 : cache_entry(cache, b);
        float k_factor = 1, v_factor = 1;
        if (Smem::kBytes && !d.scaled_by_key && !values)
            k_factor = cache.k_scale.data[entry * cache.k_scale.batch + head_k * cache.k_scale.head],
            v_factor = cache.v_scale.data[entry * cache.v_scale.batch + head_k * cache.v_scale.head];
        // If this kernel starts before the kernel that computes q has ended, the rows of q come last, when the ring is full.
        const int query_tile = d.after_append && n == 0 ? min(first + Smem::kSlots / 2, end) - 1 : first;
        // The page of box i of the segment. Keys that nobody sees may have no page; a page number past the end arrives as zeros.
        const auto find = [&](int i) {
            const int key = first * Smem::kKeys + i * box_rows;
            const bool seen = i < (end - first) * boxes && key < keys.end && key + box_rows > keys.begin;
            return seen ? cache_page(cache, b, d.page.divide(key)) : cache.entries;
        };
        int page = 0, next_page = cache.block_table ? find(lane) : 0;
#pragma unroll 1
        for (int tile = first; tile < end; ++tile) {
            const int key0 = tile * Smem::kKeys;
            if (cache.added && key0 + Smem::kKeys > keys.count - cache.added) wait_for_append();
            int batch = entry, row = key0;
            if (cache.block_table) {
                const int i = (tile - first) * boxes;
                if (i % 32 == 0) page = next_page, next_page = find(i + 32 + lane);
                batch = __shfl_sync(kFullWarp, page, (i + lane) % 32);
                row = key0 + lane * box_rows;
                row = d.page.remainder(row, d.page.divide(row));
            }
            mbarrier_wait(empty + 8 * ring.slot, ring.phase ^ 1);
            const uint32_t barrier = full + 8 * ring.slot;
            if (lane == 0) mbarrier_arrive_expect_tx(barrier, Smem::kSlotBytes);
            __syncwarp();
            if (lane < boxes) {
                const uint32_t to = slots + ring.slot * Smem::kSlotBytes + lane * box_rows * Smem::kRowBytes;
                for (int c = 0; c < column_boxes; ++c)
                    tma_load(to + c * box_rows * 128, map, barrier, 64 * c, row, 0, head_k, batch, kEvictFirst);
            }
            __syncwarp();
            if (Smem::kBytes && d.scaled_by_key) {
                copy_scales<Smem>(scale, head_k, keys, key0, box_rows, batch, row, lane, smem.scales[ring.slot]);
                cp_async_mbarrier_arrive(barrier);
            }
            ring.advance(2);
            if (tile == query_tile && !values) {
                wait_for_append();
                mbarrier_wait(q_empty + 8 * buffer, (n / 2 & 1) ^ 1);
                copy_query<TileQ>(d, b, head_k, lane, shared_address(smem.q[buffer]));
                cp_async_mbarrier_arrive(q_full + 8 * buffer);
                if (lane == 0) {
                    smem.work[buffer] = {segment, keys, k_factor, v_factor};
                    mbarrier_arrive(q_full + 8 * buffer);
                }
            }
        }
    }
    wait_for_append();  // so the end of this kernel is also the end of the one before
    if (values) return;
    mbarrier_wait(q_empty + 8 * (n & 1), (n / 2 & 1) ^ 1);
    if (lane == 0) smem.work[n & 1].segment.b = -1;
    __syncwarp();
    mbarrier_arrive(q_full + 8 * (n & 1));
    if (lane == 0) mbarrier_arrive(q_full + 8 * (n & 1));
}

// E: the cache's element type.
template <typename E, int kD>
__global__ void __launch_bounds__(kThreads, 1) decode_ring_kernel(const __grid_constant__ RingParams params) {
    using Smem = RingSmem<E, kD>;
    extern __shared__ __align__(1024) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < Smem::kSlots; ++i)
            mbarrier_init(shared_address(smem.full + i), Smem::kBytes && params.decode.scaled_by_key ? 33 : 1),
                mbarrier_init(shared_address(smem.empty + i), kParts * kWarpArrivals);
        for (int i = 0; i < 2; ++i)
            mbarrier_init(shared_address(smem.q_full + i), 33), mbarrier_init(shared_address(smem.q_empty + i), kWarps * kWarpArrivals);
        fence_mbarrier_init();
    }
    const bool loads = threadIdx.x / 32 >= kWarps;
    SegmentsOf<UnitOrder::kEveryNth> segments;
    if (loads) {  // finds its work while the other warps zero the rows of q
        // Each map by its own address: if the address depends on the warp, ptxas 12.4 computes it from a wrong start of the parameters.
        if (threadIdx.x == 32 * kWarps) prefetch_tensormap(&params.k_map), prefetch_tensormap(&params.v_map);
        segments = SegmentsOf<UnitOrder::kEveryNth>(params.decode);
    } else {
        for (int x = threadIdx.x; x < int(sizeof(smem.q)) / 16; x += 32 * kWarps) store_shared_16(shared_address(smem.q) + 16 * x, uint4{});
    }
    __syncthreads();  // the barriers are initialised, and rows and columns that q does not have are zeros
    if (loads) load_ring<E, kD>(params, smem, segments);
    else attend_ring<E, kD>(params, smem);
}

template <typename E, int kD>
cudaError_t launch_ring(const DecodeParams& d, const DeviceInfo& device, cudaStream_t stream) {
    using Smem = RingSmem<E, kD>;
    static_assert(sizeof(Smem) <= 227 * 1024, "one Hopper block can address 227 KiB");
    constexpr int kSize = int(sizeof(E));
    const AttentionParams& p = d.attention;
    RingParams params;
    params.decode = d;
    params.box_rows = ring_box_rows(p, Smem::kKeys), params.boxes = Smem::kKeys / params.box_rows;
    const int64_t rows = p.cache.block_table ? p.cache.page_size : p.seqlen_k, batch = p.cache.entries ? p.cache.entries : p.batch;
    // The map's elements are pairs of bytes.
    const auto encode = [&](const char* name, const TensorView& t, int columns, CUtensorMap* map, int* boxes) {
        return encode_tiles({name, t.data, true, columns * kSize / 2, rows, p.nheads_k, batch, kSize * t.row, kSize * t.head,
                             kSize * t.batch, params.box_rows, Smem::kRowBytes / 2},
                            map, boxes);
    };
    if (cudaError_t error = encode("k", p.k, p.headdim, &params.k_map, &params.k_boxes)) return error;
    if (cudaError_t error = encode("v", p.v, p.headdim_v, &params.v_map, &params.v_boxes)) return error;
    const unsigned blocks = unsigned(decode_blocks(d.shape, d.attention, device));
    return launch_kernel(decode_ring_kernel<E, kD>, blocks, kThreads, sizeof(Smem), stream, params, d.after_append);
}

}  // namespace
}  // namespace fa
