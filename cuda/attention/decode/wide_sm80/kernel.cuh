// wide_sm80/kernel.cuh: few rows of q against many keys, for head dims above 256. Only memory bandwidth limits this.
//
// The seqlen_q * group rows that share a key head are tiles of 16 rows, whose keys are divided into pieces for as many blocks as the GPU
// holds (schedule.h); combine.cu merges the partial results. New against split_sm80/kernel.cuh, whose warps each hold O of 16 whole rows:
// 512 columns of O don't fit in the registers of a warp, so the eight warps share all of a tile:
//   - S = Q K^T: warp w has eight of the 32 keys, and every second group of 32 columns of the head dim. The two halves of a score meet in
//     shared memory.
//   - Softmax: every warp reads all scores of the tile and computes the same maxima and sums.
//   - O += P V: warp w has columns 64 w .. 64 w + 63 of all rows.
// A tile takes two barriers. The first says that its keys have arrived and that nobody reads the tile before any more, whose stage is
// filled again; the second, that the scores are written.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/common/shared_tile.cuh"
#include "attention/decode/common/decode.h"
#include "attention/decode/common/read_scores.cuh"
#include "attention/decode/wide_sm80/plan.h"
#include "device/launch.h"
#include "device/ptx.cuh"

#include <cfloat>

namespace fa {
namespace {

using Wide = DecodeWide;
static_assert(Wide::kKeys == 1 << kWideTileShift, "keys of a tile");

// The segment that a block works on, and the keys of its sequence.
struct WideWork {
    Segment segment;
    SequenceKeys keys;
    int head_k, row_tile0;  // the key head; the first of its rows in this tile

    __device__ __forceinline__ WideWork(const DecodeParams& d, const Segment& s)
        : segment(s),
          keys(sequence_keys(d, s.b)),
          head_k(s.unit / d.shape.row_tiles),
          row_tile0(s.unit % d.shape.row_tiles * Wide::kRows) {}
    // The segment's tiles, counted from the sequence's first key.
    __device__ __forceinline__ int first_tile() const { return keys.first_tile + segment.begin; }
    __device__ __forceinline__ int end_tile() const { return keys.first_tile + segment.end; }
};

// A thread's place, and the addresses of the block's shared memory (DecodeWide).
struct WidePlace {
    int lane, warp, stages;
    uint32_t ring;

    __device__ __forceinline__ uint32_t k_tile(int slot) const { return ring + slot * uint32_t(Wide::kStageBytes); }
    __device__ __forceinline__ uint32_t v_tile(int slot) const { return k_tile(slot) + Wide::kTileBytes; }
    __device__ __forceinline__ uint32_t q_tile() const { return ring + stages * uint32_t(Wide::kStageBytes); }
    __device__ __forceinline__ float* scores(unsigned char* shared, int half, int row, int key) const {
        unsigned char* const at = shared + stages * Wide::kStageBytes + Wide::kQueryBytes;
        return reinterpret_cast<float*>(at) + (half * Wide::kRows + row) * Wide::kScorePitch + key;
    }
};

// The block's copies of tiles of keys. Of a paged cache each lane looks up the page of one key, a tile ahead, and passes the offset to the
// lanes that copy this key.
template <typename E, bool kCache>
class WideCopies {
    using Tile = SharedTile<E, Wide::kColumns>;
    static constexpr int kRowsAtOnce = Wide::kThreads / Tile::kPieces, kPasses = Wide::kKeys / kRowsAtOnce;
    static_assert(Wide::kKeys == 32, "a key for each lane");

public:
    __device__ __forceinline__ WideCopies(const CacheView& cache, const WidePlace& place, const WideWork& work) {
        page_ = kCache && cache.block_table ? page_of(cache, place, work, work.first_tile()) : 0;
    }

    template <typename Wait>
    __device__ __forceinline__ void copy(const AttentionParams& p, const WidePlace& place, const WideWork& work, int tile, int slot,
                                         const Wait& wait_for_append) {
        const CacheView& cache = p.cache;
        const int key0 = tile * Wide::kKeys, piece = threadIdx.x % Tile::kPieces, row = threadIdx.x / Tile::kPieces;
        const bool k_piece = piece * Tile::kPieceColumns < p.headdim, v_piece = piece * Tile::kPieceColumns < p.headdim_v;
        const int entry = !kCache || !cache.entries ? work.segment.b : cache.block_table ? 0 : cache_entry(cache, work.segment.b);
        const E* const k = static_cast<const E*>(p.k.data) + entry * p.k.batch + work.head_k * p.k.head + piece * Tile::kPieceColumns;
        const E* const v = static_cast<const E*>(p.v.data) + entry * p.v.batch + work.head_k * p.v.head + piece * Tile::kPieceColumns;
        if (key0 + Wide::kKeys > work.keys.count - cache.added) wait_for_append();
        const auto copy_row = [&](int r, const E* k_from, const E* v_from) {
            const bool is = seen(work.keys, key0 + r);
            cp_async_16(place.k_tile(slot) + Tile::offset(r, piece), k_from, is && k_piece ? 16 : 0);
            cp_async_16(place.v_tile(slot) + Tile::offset(r, piece), v_from, is && v_piece ? 16 : 0);
        };
        if (kCache && cache.block_table) {
            const int at = (key0 + place.lane) % cache.page_size;
            const int64_t k_own = page_ * p.k.batch + at * p.k.row, v_own = page_ * p.v.batch + at * p.v.row;  // of this lane's key
            page_ = page_of(cache, place, work, tile + 1);
#pragma unroll 4
            for (int r = row; r < Wide::kKeys; r += kRowsAtOnce)
                copy_row(r, k + __shfl_sync(kFullWarp, k_own, r), v + __shfl_sync(kFullWarp, v_own, r));
        } else {
            const E* k_from = k + (key0 + row) * p.k.row;
            const E* v_from = v + (key0 + row) * p.v.row;
#pragma unroll 4
            for (int pass = 0; pass < kPasses; ++pass) {
                copy_row(pass * kRowsAtOnce + row, k_from, v_from);
                k_from += kRowsAtOnce * p.k.row, v_from += kRowsAtOnce * p.v.row;
            }
        }
    }

private:
    __device__ __forceinline__ static bool seen(const SequenceKeys& keys, int key) {
        return unsigned(key - keys.begin) < unsigned(keys.end - keys.begin);
    }
    __device__ __forceinline__ static int page_of(const CacheView& cache, const WidePlace& place, const WideWork& work, int tile) {
        const int key = tile * Wide::kKeys + place.lane;
        return tile < work.end_tile() && seen(work.keys, key) ? cache_page(cache, work.segment.b, key / cache.page_size) : 0;
    }
    int page_;  // page of this lane's key in the tile that is copied next
};

// Copies the tile's rows of q. Row r of the seqlen_q * group rows of a key head is head r % group of query r / group.
template <typename E>
__device__ __forceinline__ void copy_wide_query(const DecodeParams& d, const WidePlace& place, const WideWork& work) {
    using Tile = SharedTile<E, Wide::kColumns>;
    const AttentionParams& p = d.attention;
    const int piece = threadIdx.x % Tile::kPieces;
#pragma unroll 1
    for (int row = threadIdx.x / Tile::kPieces; row < Wide::kRows; row += Wide::kThreads / Tile::kPieces) {
        const int r = work.row_tile0 + row;
        const RowPlace at(d, work.head_k, r);
        const E* const from =
            static_cast<const E*>(p.q.data) + work.segment.b * p.q.batch + at.query * p.q.row + at.head * p.q.head + 8 * piece;
        cp_async_16(place.q_tile() + Tile::offset(row, piece), from, r < p.seqlen_q * p.group && 8 * piece < p.headdim ? 16 : 0);
    }
}

// The 16 rows of the tile: this warp's 64 columns of O, and the statistics, which are the same in every warp.
template <typename E, bool kReadsScores>
struct WideRows {
    using Tile = SharedTile<E, Wide::kColumns>;
    static constexpr ScoreUnit kUnit = kReadsScores ? ScoreUnit::kNatural : ScoreUnit::kLog2;
    static constexpr int kTilesN = Wide::kKeys / 8, kTilesV = Wide::kWarpColumns / 8;
    static constexpr int kGroups = Wide::kColumns / 64;  // groups of 32 columns of K that a warp multiplies: every second one
    static constexpr bool kHoldsQuery = !kReadsScores;   // in registers, which options need for themselves

    uint32_t Q[kHoldsQuery ? 2 * kGroups : 1][4];  // of the warp's groups
    float O[kTilesV][4] = {};
    float row_max[2] = {-FLT_MAX, -FLT_MAX}, row_sum[2] = {0, 0};  // sum: this thread's share

    // The rows of q in 32 columns.
    __device__ __forceinline__ static void load_query(uint32_t (*A)[4], const WidePlace& place, int group) {
        const uint32_t q_lane = place.q_tile() + Tile::offset(place.lane % 16, place.lane / 16);
        ldmatrix_x4(A[0], Tile::advance(q_lane, 2 * group)), ldmatrix_x4(A[1], Tile::advance(q_lane, 2 * group + 1));
    }
    __device__ __forceinline__ void hold_query(const WidePlace& place) {
        if constexpr (kHoldsQuery) {
#pragma unroll
            for (int i = 0; i < kGroups; ++i) load_query(Q + 2 * i, place, 2 * i + place.warp / kTilesN);
        }
    }

    // Half of q . k of the warp's eight keys, to shared memory.
    __device__ __forceinline__ void multiply_keys(const AttentionParams& p, const WidePlace& place, int slot, unsigned char* shared) const {
        const int key0 = place.warp % kTilesN * 8, half = place.warp / kTilesN, lane = place.lane;
        // From pieces 0 .. 3 of a row, by an even number of steps.
        const uint32_t k_lane = place.k_tile(slot) + Tile::offset(key0 + lane % 8, lane / 8);
        float S[2][4] = {};
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            const int group = 2 * i + half;
            uint32_t loaded[2][4], B[4];
            if constexpr (!kHoldsQuery) {
                if (32 * group >= p.headdim) break;
                load_query(loaded, place, group);
            }
            const auto& A = kHoldsQuery ? Q + 2 * i : loaded;
            ldmatrix_x4(B, Tile::advance(k_lane, 2 * group));
            mma<E>(S[0], A[0], B[0], B[1]);
            mma<E>(S[1], A[1], B[2], B[3]);
        }
#pragma unroll
        for (int x = 0; x < 2; ++x)
            *reinterpret_cast<float2*>(place.scores(shared, half, lane / 4 + 8 * x, key0 + mma_column(lane, 0))) =
                make_float2(S[0][2 * x] + S[1][2 * x], S[0][2 * x + 1] + S[1][2 * x + 1]);
    }

    // S -> P = 2^(S - row_max), of natural scores e^(S - row_max); O += P V.
    __device__ __forceinline__ void add(const DecodeParams& d, const WidePlace& place, const WideWork& work, int tile, int slot,
                                        unsigned char* shared) {
        const AttentionParams& p = d.attention;
        const int key0 = tile * Wide::kKeys, lane = place.lane;
        const float scale = kReadsScores ? p.scale : d.scale_log2;
        const auto row_of = [&](int half) { return min(work.row_tile0 + lane / 4 + 8 * half, p.seqlen_q * p.group - 1); };
        const auto slopes = [&] { return work.segment.b * p.alibi_batch + work.head_k * p.group; };
        float S[kTilesN][4];
#pragma unroll
        for (int n = 0; n < kTilesN; ++n)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int row = lane / 4 + 8 * x, key = 8 * n + mma_column(lane, 0);
                const float2 a = *reinterpret_cast<const float2*>(place.scores(shared, 0, row, key)),
                             b = *reinterpret_cast<const float2*>(place.scores(shared, 1, row, key));
                S[n][2 * x] = __fmul_rn(a.x + b.x, scale), S[n][2 * x + 1] = __fmul_rn(a.y + b.y, scale);
            }
        const uint32_t v_lane = place.v_tile(slot) + Tile::offset(lane % 16, lane / 16) + place.warp * (Wide::kWarpColumns * 2);
        const auto values = [&](int step, int i) { return Tile::advance(v_lane, i) + 16 * step * Tile::kPitch; };
        const bool has_columns = place.warp * Wide::kWarpColumns < p.headdim_v;
        if constexpr (kReadsScores) {
            score_options<kUnit>(natural_options_of(d), work.keys, key0, lane, row_of, slopes, S, [&](auto& scores) {
                float addends[kTilesN][4];
                load_addends<E, 2>(d, work.segment.b, work.head_k, key0, work.keys.end - 1, lane, row_of, addends);
                add_addends(scores, addends);
            });
            const SeenKeys<kTilesN> seen(S, lane);
            softmax_step<kUnit>(S, O, row_max, row_sum);
            if (p.dropout_threshold) drop_scores(d, work.segment.b, work.head_k, key0, lane, row_of, S);
            if (has_columns) add_values<E, E>(O, S, values, seen);
        } else {
            score_options(score_options_of(d), work.keys, key0, lane, row_of, slopes, S);
            softmax_step(S, O, row_max, row_sum);
            if (has_columns) add_values<E, E>(O, S, values);
        }
    }

    // Stores the warp's columns of the rows to out, with lse; or, if the segment is not the whole unit, to its slot in the workspace.
    __device__ __forceinline__ void store(const DecodeParams& d, const WidePlace& place, const WideWork& work) const {
        const AttentionParams& p = d.attention;
        const bool whole = work.segment.slot < 0, first = place.warp == 0 && place.lane % 4 == 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int tile_row = place.lane / 4 + 8 * half, r = work.row_tile0 + tile_row;
            const float sum = quad_sum(row_sum[half]);
            if (r >= p.seqlen_q * p.group) continue;
            const RowPlace at(d, work.head_k, r);
            RowEnd end = finish_row<kUnit>(row_max[half], sum, whole ? sink_of(p.sinks, at.head) : -INFINITY);
            const int64_t partial_row = int64_t(work.segment.slot) * Wide::kRows + tile_row;
            if (first && !whole && kReadsScores) reinterpret_cast<float2*>(d.partial_lse)[partial_row] = make_float2(row_max[half], sum);
            else if (first && !whole) d.partial_lse[partial_row] = end.lse;
            else if (first && p.lse)
                p.lse[(int64_t(work.segment.b) * p.nheads + at.head) * p.seqlen_q + at.query] = end.lse * (kReadsScores ? 1.0f : kLn2);
            if (kReadsScores && p.dropout_threshold) end.inverse *= p.dropout_scale;
            float* const partial = d.partial + partial_row * p.headdim_v;
            E* const out = static_cast<E*>(p.out.data) + work.segment.b * p.out.batch + at.query * p.out.row + at.head * p.out.head;
#pragma unroll
            for (int n = 0; n < kTilesV; ++n) {
                const int column = place.warp * Wide::kWarpColumns + 8 * n + mma_column(place.lane, 0);
                if (column >= p.headdim_v) continue;
                const float x = end.output(O[n][2 * half]), y = end.output(O[n][2 * half + 1]);
                if (!whole) *reinterpret_cast<float2*>(partial + column) = make_float2(x, y);
                else *reinterpret_cast<uint32_t*>(out + column) = pack_16<E>(x, y);
            }
        }
    }
};

template <typename E, bool kReadsScores>
__global__ void __launch_bounds__(Wide::kThreads, 1) decode_wide_kernel(const __grid_constant__ DecodeParams d) {
    extern __shared__ __align__(128) unsigned char shared[];
    const AttentionParams& p = d.attention;
    const WidePlace place{int(threadIdx.x % 32), __shfl_sync(kFullWarp, int(threadIdx.x / 32), 0), d.stages, shared_address(shared)};
    const int ahead = d.stages - 1;  // tiles are copied so many steps before they are multiplied

    launch_dependents();
    bool waited = !d.after_append;
    const auto wait_for_append = [&] {
        if (!waited) grid_dependency_wait();
        waited = true;
    };

    Segments segments(d);
#pragma unroll 1
    for (Segment segment; segments.next(d, segment);) {
        const WideWork work(d, segment);
        const int first_tile = work.first_tile(), query_step = d.after_append ? first_tile - 1 : first_tile - ahead;
        WideCopies<E, !kReadsScores> copies(p.cache, place, work);
        WideRows<E, kReadsScores> rows;
        int slot = 0, filled = 0;  // of this step's tile; of the tile that is copied, where the tile before this step's was
#pragma unroll 1
        for (int step = first_tile - ahead; step < work.end_tile(); ++step) {
            if (step >= first_tile) {
                if (step == first_tile && d.after_append) cp_async_wait_all();
                else if (ahead == 2) cp_async_wait_group<1>();
                else cp_async_wait_group<0>();
                __syncthreads();  // the tile is here, and nobody reads the one before
                if (step == first_tile) rows.hold_query(place);
            }
            if (step + ahead < work.end_tile()) copies.copy(p, place, work, step + ahead, filled, wait_for_append);
            filled = filled + 1 == d.stages ? 0 : filled + 1;
            if (step == query_step) {
                wait_for_append();
                copy_wide_query<E>(d, place, work);
            }
            cp_async_commit();
            if (step < first_tile) continue;
            rows.multiply_keys(p, place, slot, shared);
            __syncthreads();  // the scores are written
            if (step * Wide::kKeys < work.keys.end)
                rows.add(d, place, work, step, slot, shared);  // a sequence without keys has a tile, too
            slot = slot + 1 == d.stages ? 0 : slot + 1;
        }
        rows.store(d, place, work);
        __syncthreads();  // the stages may be filled again
    }
    wait_for_append();  // so the end of this kernel is also the end of the one before
}

template <bool kReadsScores>
cudaError_t launch_wide(DecodeParams d, const DeviceInfo& device, cudaStream_t stream) {
    d.stages = Wide::stages(device.shared_memory);
    const unsigned blocks = unsigned(decode_blocks(d.shape, d.attention, device));
    const auto kernel =
        d.attention.dtype == DType::kFloat16 ? decode_wide_kernel<__half, kReadsScores> : decode_wide_kernel<__nv_bfloat16, kReadsScores>;
    return launch_kernel(kernel, blocks, Wide::kThreads, Wide::bytes(d.stages), stream, d, d.after_append);
}

}  // namespace
}  // namespace fa
