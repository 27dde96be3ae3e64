// warp.cuh: a warp of mma_sm80: what it copies, its walk over the tiles of keys, and the end of its rows.
#pragma once

#include "attention/common/epilogue.cuh"
#include "attention/common/general_scores.cuh"
#include "attention/common/interval_bounds.cuh"
#include "attention/common/mask.h"
#include "attention/common/max_score.cuh"
#include "attention/common/shared_tile.cuh"
#include "attention/common/tiles_mma_sm80.h"
#include "attention/forward/mma_sm80/tiles_split.h"
#include "common/constants.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/split_tf32.cuh"

#include <cfloat>
#include <type_traits>

namespace fa {
namespace {

// A row keeps its maximum until a new one is 2^8 times larger, so O and row_sum are rarely rescaled. This is exact: both refer to the same
// maximum, whatever it is, and probabilities stay below 2^8, far from the limits of fp16.
constexpr float kRescaleThreshold = 8;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;

struct MmaParams {
    AttentionParams attention;
    GridOrder order;                                    // of the blocks
    Divisor group;                                      // nheads / nheads_k
    bool bounds_keys;                                   // causal, windows or chunks may hide keys
    int parts;                                          // of the columns of V and out, kDv each; > 1 only for kD > 256
    bool aligned_q, aligned_k, aligned_v, aligned_out;  // rows start on 16 bytes and are a multiple of them
    IntervalBounds bounds;
};

// Where warps that share rows exchange their sums of S. Two rounds have room, so that a round needs one barrier.
template <int kWarps, int kAtOnce, bool kShares>
struct ScoreParts {
    float part[2][kWarps][kAtOnce][32];
};
template <int kWarps, int kAtOnce>
struct ScoreParts<kWarps, kAtOnce, false> {};

template <typename T, MmaTile const& kTile, int kD, int kDv>
struct Smem : ScoreParts<kTile.warps, exchanged_at_once(kTile), (kTile.column_parts > 1)> {
    alignas(128) T q[kTile.block_m * kD];
    alignas(128) T k[kTile.stages][kTile.block_n * kD];
    alignas(128) T v[kTile.stages][kTile.block_n * kDv];
    KeyRange some[kTile.warps], every[kTile.warps];  // keys that some row of a warp sees; keys that every row sees
    int visible[kTile.block_n];                      // general scores: does any row of this block see this key?
    float greatest[kTile.block_m];                   // for max_score: each row's greatest maximum so far; kept here to save registers
};

// Rounds fp32 to tf32 in place, once for all warps. Each thread rounds what it loaded, so no barrier is needed.
template <int kRows, int kColumns, int kThreads>
__device__ __forceinline__ void round_tile(const float* tile) {
    using Tile = SharedTile<float, kColumns>;
    constexpr int kRowsAtOnce = Tile::rows_at_once(kThreads);
    const int row0 = threadIdx.x / Tile::kPieces, piece = threadIdx.x % Tile::kPieces;
    if (kRowsAtOnce * Tile::kPieces < kThreads && row0 >= kRowsAtOnce) return;
    const uint32_t shared = shared_address(tile);
#pragma unroll 4
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
        const uint32_t at = shared + Tile::offset(row0 + r, piece);
        const float4 x = load_shared_16(at);
        store_shared_16(at, make_uint4(round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w)));
    }
}
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void round_tile(const T*) {}  // 16-bit values need no rounding

// Sets scores outside the window of their row to -inf.
template <SplitRange kRange, int kMmas, int kTilesN>
__device__ __forceinline__ void apply_window(float (&S)[kMmas][kTilesN][4], const AttentionParams& p, const Sequence& s, int row0, int key0,
                                             int lane) {
    lane = opaque(lane);  // keeps the limits of the rows, needed on few tiles, out of the main loop's registers
#pragma unroll(kUnrolled<kRange>)
    for (int m = 0; m < kMmas; ++m)
#pragma unroll(kUnrolled<kRange>)
        for (int half = 0; half < 2; ++half) {
            const KeyRange range = key_range(p, s, row0 + 16 * m + mma_row(lane, 2 * half));
            const int begin = range.begin - key0 - mma_column(lane, 0), end = range.end - key0 - mma_column(lane, 0);
#pragma unroll(kUnrolled<kRange>)
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll(kUnrolled<kRange>)
                for (int e = 0; e < 2; ++e)
                    if (8 * n + e < begin || 8 * n + e >= end) S[m][n][2 * half + e] = -INFINITY;
        }
}

// Marks the keys of a tile that some row sees.
template <SplitRange kRange, int kMmas, int kTilesN>
__device__ __forceinline__ void mark_visible(const float (&S)[kMmas][kTilesN][4], int* visible, int rows, int lane) {
#pragma unroll(kUnrolled<kRange>)
    for (int n = 0; n < kTilesN; ++n)
#pragma unroll(kUnrolled<kRange>)
        for (int e = 0; e < 2; ++e) {
            bool seen = false;
#pragma unroll(kUnrolled<kRange>)
            for (int r = 0; r < 2 * kMmas; ++r) seen |= S[r / 2][n][r % 2 * 2 + e] != -INFINITY && 8 * r + lane / 4 < rows;
            if (seen) visible[8 * n + mma_column(lane, e)] = 1;
        }
}

template <typename T, int kD, int kDv, MmaSm kSm>
inline constexpr MmaTile kTileOf = sizeof(T) == 2                  ? mma_tile(kD, kDv, kSm)
                                   : std::is_same_v<T, SplitFloat> ? mma_tile_split(kD, kDv, kSm)
                                                                   : mma_tile_tf32(kD, kDv, kSm);

enum class Options { kNone, kAll };         // kAll: every option of scores, and any scale
enum class KeyRows { kStrided, kInPages };  // rows of K and V at a fixed stride, or in the pages of a cache
struct Nowhere {};                          // in place of PagedRows or SeenTiles
// Bit i says whether some row of a block sees a key of tile `from` + i; next: the tile that the walk computes after this one.
struct SeenTiles {
    int from = INT32_MAX, next;
    unsigned tiles = 0;
};

// A warp of the kernel. The register tiles are arguments of its functions.
template <typename T, int kD, int kDv, MmaSm kSm, Options kOptions, KeyRows kKeyRows>
struct ForwardWarp {
    static constexpr MmaTile kTile = kTileOf<T, kD, kDv, kSm>;
    static constexpr bool kGeneral = kOptions == Options::kAll, kPaged = kKeyRows == KeyRows::kInPages;
    static constexpr bool kSplit = std::is_same_v<T, SplitFloat>;
    using Stored = std::conditional_t<kSplit, float, T>;  // of a bias in T
    static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kThreads = kTile.warps * 32, kStages = kTile.stages;
    static constexpr int kColumnParts = kTile.column_parts, kRowWarps = kTile.warps / kColumnParts, kOwnDv = kDv / kColumnParts;
    static constexpr int kWarpRows = kBlockM / kRowWarps, kMmas = kWarpRows / 16, kRows = 2 * kMmas;  // a thread has kRows rows of S, O
    static constexpr int kTilesN = kBlockN / 8, kTilesV = kOwnDv / 8,
                         kStep = 32 / int(sizeof(T));  // of an mma: columns of Q, K; keys of P, V
    static constexpr int kStepsD = kD / kStep, kStepsN = kBlockN / kStep, kStepTiles = kStep / 8, kStepPairs = 2 * kStepTiles * kMmas;
    static constexpr bool kAnyAlignment = kSm == MmaSm::kAny;
    static constexpr bool kFull = kMmas * kTilesN * 4 >= 128;  // S fills the registers: what can be read again is not kept in registers
    static_assert(kWarpRows == 16 || kWarpRows == 32, "one or two m16 tiles a warp");
    static constexpr bool kInParts = kD > 256 && kColumnParts == 1;
    static constexpr bool kTight = kD == 128 && kStages == 1 && sizeof(T) == 2 && !kPaged;  // sm_80's tile, which fills the registers
    static_assert(kColumnParts == 1 || kSplit, "16 bits share out the parts of columns to blocks");
    static_assert(!kPaged || sizeof(T) == 2 || kSplit, "no pages of float32 in tf32");
    static constexpr float kThreshold = kGeneral ? kRescaleThreshold * kLn2 : kRescaleThreshold;
    static constexpr bool kRaw = kSplit && !kGeneral;  // row maxima are products: subtracted before scale, they may be as large as float32
    using SharedMemory = Smem<T, kTileOf<T, kD, kDv, kSm>, kD, kDv>;
    using TileQK = SharedTile<T, kD>;
    using TileV = SharedTile<T, kDv>;
    // Whether tiles that masks by intervals or by blocks hide from all rows of the block are skipped. (SplitFloat may walk twice.)
    static constexpr bool kSkips = kGeneral && !kPaged && !kSplit;
    static_assert(!kSkips || (!kFull && kBlockN % kBoundsKeys == 0), "the stage does not follow from the tile; a tile has its own bounds");
    // Whether what the next tile's addresses need is computed again instead of being kept in registers.
    static constexpr bool kForgets = kPaged && kSplit;
    // Row places in the tile to be loaded next. Where V is narrower than K, other lanes load V's rows.
    static constexpr bool kRowsOfV = kPaged && kD != kDv;
    struct Places {
        std::conditional_t<kPaged, PagedRows<kBlockN, kD, kThreads, T>, Nowhere> k;
        std::conditional_t<kRowsOfV, PagedRows<kBlockN, kDv, kThreads, T>, Nowhere> v;
        std::conditional_t<kSkips, SeenTiles, Nowhere> seen;
    };
    using Scores = float[kMmas][kTilesN][4];
    using Output = float[kMmas][kTilesV][4];
    using RowValues = float[kRows];
    using Queries = uint32_t[kTile.q_in_registers ? kStepsD : 1][kMmas][4];

    const MmaParams& params;
    const AttentionParams& p;
    SharedMemory& smem;
    Places& places;
    GridPlace work;
    Sequence s;
    int columns_v;  // of V, from this block's part on
    const T *q, *k, *v;
    int first_key, end_key, first_tile, last_tile;
    int lane, warp, warp_row;         // warps 0 .. kRowWarps - 1 have the first part of the columns
    uint32_t q_lane, k_lane, v_lane;  // addresses of this lane's rows
    // Row maxima are in units of log2, so that scale and subtraction are one multiply-add; of split products they are products. General
    // scores are scaled already and stay in natural units, where a mask written as a bias of -FLT_MAX does not overflow. The maximum of a
    // row that has seen nothing is -FLT_MAX, not -inf: no difference of maxima is then NaN, and 2^(-inf + FLT_MAX) is zero.
    float scale;
    bool hides;  // options may hide keys inside the window
    int stage = 0;

    // Parts of the same rows are neighbours, because they read the same K.
    static __device__ __forceinline__ int part_of(const MmaParams& params, int block) { return kInParts ? block % params.parts : 0; }
    static __device__ __forceinline__ GridPlace work_at(const MmaParams& params, int block) {
        if (kPaged || kTight) block = opaque(block);  // not in uniform registers: there the place takes more of the others
        return params.order.place(kInParts ? block / params.parts : block);
    }

    __device__ __forceinline__ ForwardWarp(const MmaParams& params, SharedMemory& smem, Places& places, const GridPlace& work,
                                           const Sequence& s)
        : params(params), p(params.attention), smem(smem), places(places), work(work), s(s) {
        const int first_column = part_of(params, blockIdx.x) * kDv, row0 = work.query_tile * kBlockM;
        columns_v = p.headdim_v - first_column;
        q = static_cast<const T*>(p.q.data) + s.q + work.head * p.q.head + row0 * p.q.row;
        const int head_k = params.group.divide(work.head);
        k = static_cast<const T*>(p.k.data) + s.k + head_k * p.k.head;
        v = static_cast<const T*>(p.v.data) + s.v + head_k * p.v.head + first_column;
        first_key = 0, end_key = s.seqlen_k;
        if (kTight || params.bounds_keys)
            first_key = key_range(p, s, row0).begin, end_key = key_range(p, s, min(row0 + kBlockM, s.seqlen_q) - 1).end;
        first_tile = first_key / kBlockN, last_tile = end_key > first_key ? (end_key - 1) / kBlockN : first_tile - 1;
        lane = threadIdx.x % 32, warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);  // the shuffle makes it known as uniform
        warp_row = row0 + row_warp_of(warp) * kWarpRows;
        // For ldmatrix, A and V^T take 16 rows x 32 bytes, K takes 16 keys x 32 bytes with the middle two 8 x 8 matrices swapped. ldmatrix
        // cannot transpose fp32 V: there a lane loads keys 2 q and 2 q + 1, four columns of each.
        q_lane = shared_address(smem.q) + TileQK::offset(row_warp_of(warp) * kWarpRows + lane % 16, lane / 16);
        k_lane = shared_address(smem.k) + TileQK::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
        v_lane = shared_address(smem.v) + (sizeof(T) == 2 ? TileV::offset(lane % 16, lane / 16) : TileV::offset(lane % 4 * 2, lane / 4));
        if constexpr (kColumnParts > 1) v_lane += column_part_of(warp) * (kOwnDv * sizeof(T));
        scale = p.scale * kLog2e;
        hides = p.may_hide_keys() || p.tree.rows;
        if constexpr (kSkips) {
            if (p.hides_tiles()) last_tile = tile_before(last_tile + 1);
        }
    }

    // The place of a warp among those of other rows, and among those of the same rows.
    static __device__ __forceinline__ int row_warp_of(int warp) { return kColumnParts == 1 ? warp : warp % kRowWarps; }
    static __device__ __forceinline__ int column_part_of(int warp) { return kColumnParts == 1 ? 0 : warp / kRowWarps; }

    // ---- which tiles the walk computes ----

    // The tile before `tile`, with masks by intervals or by blocks the next one before it of which some row sees a key; below first_tile:
    // none.
    __device__ __forceinline__ int tile_before(int tile) const {
        SeenTiles& seen = places.seen;
        if (!p.hides_tiles()) return tile - 1;
        while (--tile >= first_tile) {
            if (tile < seen.from) find_seen(tile);
            if (const unsigned up_to_tile = seen.tiles << (31 - (tile - seen.from))) return tile - __clz(up_to_tile);
            tile = seen.from;
        }
        return tile;
    }
    // Looks at the 32 tiles that end with `tile`, one in each lane.
    __device__ __forceinline__ void find_seen(int tile) const {
        SeenTiles& seen = places.seen;
        seen.from = tile - 31;
        // opaque: not kept in a register from one search to the next, which would spill at head dim 512.
        const int own = seen.from + opaque(lane), row0 = opaque(work.query_tile) * kBlockM;
        const int last_row = min(row0 + kBlockM, s.seqlen_q) - 1, end = min((own + 1) * kBlockN, s.seqlen_k);
        bool sees = own >= first_tile;
        if (sees && p.intervals.data) {
            const HiddenBounds* const bounds = params.bounds.of<kBoundsKeys>(p, work.b, work.head);
            sees = false;
#pragma unroll 1
            for (int x = own * (kBlockN / kBoundsKeys); x * kBoundsKeys < end; ++x)
                sees |= bounds[x].seen_by(row0, last_row) != Seen::kNothing;
        }
        if (sees && p.blocks.data) sees = BlockRows{p, work.b, work.head, row0, last_row}.of_keys(own * kBlockN, end) != Seen::kNothing;
        seen.tiles = __ballot_sync(kFullWarp, sees);
    }

    // ---- copies to shared memory ----

    // What the addresses of pages need. Options read `work` everywhere.
    __device__ __forceinline__ auto work_now() const { return kGeneral ? work : work_at(params, opaque(blockIdx.x)); }
    __device__ __forceinline__ int batch_now() const {
        if constexpr (kForgets) return work_now().b;
        return work.b;
    }
    __device__ __forceinline__ const T* head_now(const TensorView& view) const {
        return static_cast<const T*>(view.data) + work_now().head / p.group * view.head;
    }
    __device__ __forceinline__ void load_k(int tile, int stage) const {
        const int begin = first_key - tile * kBlockN, end = end_key - tile * kBlockN;
        if constexpr (kForgets)
            load_paged_tile<kBlockN, kD, kThreads>(smem.k[stage], head_now(p.k), p.k, places.k, begin, end, p.headdim, params.aligned_k);
        else if constexpr (kPaged)
            load_paged_tile<kBlockN, kD, kThreads>(smem.k[stage], k, p.k, places.k, begin, end, p.headdim, params.aligned_k);
        else
            load_tile<kBlockN, kD, kThreads, kAnyAlignment>(smem.k[stage], k + tile * kBlockN * p.k.row, p.k.row, begin, end, p.headdim,
                                                            params.aligned_k);
    }
    __device__ __forceinline__ void load_v(int tile, int stage) const {
        const int begin = first_key - tile * kBlockN, end = end_key - tile * kBlockN;
        if constexpr (kRowsOfV)
            load_paged_tile<kBlockN, kDv, kThreads>(smem.v[stage], v, p.v, places.v, begin, end, columns_v, params.aligned_v);
        else if constexpr (kForgets)
            load_paged_tile<kBlockN, kDv, kThreads>(smem.v[stage], head_now(p.v), p.v, places.k, begin, end, columns_v, params.aligned_v);
        else if constexpr (kPaged)
            load_paged_tile<kBlockN, kDv, kThreads>(smem.v[stage], v, p.v, places.k, begin, end, columns_v, params.aligned_v);
        else
            load_tile<kBlockN, kDv, kThreads, kAnyAlignment>(smem.v[stage], v + tile * kBlockN * p.v.row, p.v.row, begin, end, columns_v,
                                                             params.aligned_v);
    }
    __device__ __forceinline__ void find_rows(int tile) const {
        const int key0 = tile * kBlockN;
        if constexpr (kPaged) places.k.find(p, batch_now(), key0, first_key - key0, end_key - key0);
        if constexpr (kRowsOfV) places.v.find(p, work.b, key0, first_key - key0, end_key - key0);
    }
    __device__ __forceinline__ void load_q_step(Queries& Q, int step) const {
#pragma unroll
        for (int m = 0; m < kMmas; ++m)
            ldmatrix_x4(Q[kTile.q_in_registers ? step : 0][m], TileQK::advance(q_lane + 16 * m * TileQK::kPitch, step));
    }
    // Writes to shared memory what the walk reads again in every tile: the keys that this warp sees, and where max_score begins.
    __device__ __forceinline__ void prepare_walk() const {
        // opaque: otherwise this address is shared with later ones and holds registers all the time.
        if (!kPaged && p.max_score && threadIdx.x < kBlockM) smem.greatest[opaque(threadIdx.x)] = -FLT_MAX;
        const auto range_of = [&](int row) { return kTight || params.bounds_keys ? key_range(p, s, row) : KeyRange{0, s.seqlen_k}; };
        const int last_row = min(warp_row + kWarpRows, s.seqlen_q) - 1;
        if (kStages == 2 && lane < 2) {  // lane 0: the warp's first row; lane 1: its last one
            const KeyRange range = range_of(lane == 0 ? warp_row : last_row);
            if (lane == 0) smem.some[warp].begin = range.begin, smem.every[warp].end = range.end;
            else smem.some[warp].end = warp_row < s.seqlen_q ? range.end : 0, smem.every[warp].begin = range.begin;
        }
        if (kStages == 1 && lane == 0) {  // the same: at head dim 128 this form leaves the registers that the loop needs
            const KeyRange first = range_of(warp_row), last = range_of(last_row);
            smem.some[warp] = {first.begin, warp_row < s.seqlen_q ? last.end : 0};
            smem.every[warp] = {last.begin, first.end};
        }
        __syncwarp();
    }
    // Q, and K and V of the last tile, which is the first one to be computed.
    __device__ __forceinline__ void load_first(Queries& Q) const {
        const int row0 = work.query_tile * kBlockM;
        load_tile<kBlockM, kD, kThreads, kAnyAlignment>(smem.q, q, p.q.row, 0, s.seqlen_q - row0, p.headdim, params.aligned_q);
        find_rows(last_tile);
        load_k(last_tile, 0);
        if (kStages == 1) cp_async_commit();
        load_v(last_tile, 0);
        if (kStages == 1) cp_async_commit();
        if (last_tile > first_tile) find_rows(last_tile - 1);
        prepare_walk();  // after the copies have been started, which take longer
        if (kTile.q_in_registers) {
            static_assert(!kTile.q_in_registers || (kStages == 2 && sizeof(T) == 2), "what this wait and the lack of rounding are for");
            cp_async_wait_all();
            __syncthreads();
#pragma unroll
            for (int step = 0; step < kStepsD; ++step) load_q_step(Q, step);
        }
    }
    // Waits for what the tile's first product reads.
    __device__ __forceinline__ void wait_for_tile(int tile) const {
        if (kStages == 1 && tile == last_tile) cp_async_wait_group<1>();  // the first V has been in flight since the start
        else cp_async_wait_all();
        if (sizeof(T) == 4) {
            if (tile == last_tile) round_tile<kBlockM, kD, kThreads>(smem.q);
            round_tile<kBlockN, kD, kThreads>(smem.k[stage]);
            if (kStages == 2) round_tile<kBlockN, kDv, kThreads>(smem.v[stage]);
        }
        __syncthreads();  // K (with two stages also V) of this tile is here; nobody reads the previous tile any more
    }
    __device__ __forceinline__ void load_ahead(int tile) const {
        if constexpr (kSkips) {
            const int next = places.seen.next;
            if (kStages == 1 && tile < last_tile) load_v(tile, 0);
            if (kStages == 2 && next >= first_tile) load_k(next, stage ^ 1), load_v(next, stage ^ 1);
            return;
        }
        if (kStages == 1 && tile < last_tile) {
            load_v(tile, 0);
            if (tile > first_tile) find_rows(tile - 1);
        }
        if (kStages == 2 && tile > first_tile) {
            load_k(tile - 1, stage ^ 1), load_v(tile - 1, stage ^ 1);
            if (tile - 1 > first_tile) find_rows(tile - 2);
        }
    }

    // ---- the tiles of keys ----

    // row_max: of the whole row; row_sum: this thread's share
    template <SplitRange kRange = SplitRange::kUsual>
    __device__ __forceinline__ void walk(Queries& Q, Output& O, RowValues& row_max, RowValues& row_sum) {
#pragma unroll 1
        for (int tile = last_tile; tile >= first_tile; --tile) {
            const int key0 = tile * kBlockN;
            if constexpr (kSkips) places.seen.next = tile_before(tile);
            if (kFull) stage = kStages == 2 ? (last_tile - tile) & 1 : 0;
            if (kGeneral && threadIdx.x < kBlockN) smem.visible[threadIdx.x] = 0;
            const KeyRange some = smem.some[warp], every = smem.every[warp];
            wait_for_tile(tile);
            const bool sees = key0 < some.end && key0 + kBlockN > some.begin, cut = key0 < every.begin || key0 + kBlockN > every.end;
            load_ahead(tile);
            Scores S;
            if (sees) {
                if constexpr (kSplit) multiply_split_scores<kRange>(S);
                else multiply_scores(Q, S);
                if (kGeneral) transform_scores<kRange>(S, key0);
                if constexpr (kFull) {
                    if (const KeyRange now = smem.every[warp]; key0 < now.begin || key0 + kBlockN > now.end)
                        apply_window<kRange>(S, p, s, warp_row, key0, lane);
                } else if (cut) {
                    apply_window<kRange>(S, p, s, warp_row, key0, lane);
                }
                if (kGeneral && hides) mark_visible<kRange>(S, smem.visible, s.seqlen_q - warp_row, lane);
            }
            if (kStages == 1) {
                cp_async_wait_all();
                round_tile<kBlockN, kDv, kThreads>(smem.v[0]);
                __syncthreads();  // V of this tile is here; nobody reads its K any more
                if constexpr (kSkips) {
                    if (places.seen.next >= first_tile) load_k(places.seen.next, 0);
                } else if (tile > first_tile) {
                    load_k(tile - 1, 0);
                }
            }
            if (kGeneral && hides) zero_unseen_values();
            if (sees) {
                if constexpr (kSplit) {
                    move_split_maxima<kRange>(S, O, row_max, row_sum);
                    multiply_split_values<kRange>(S, O, row_max, row_sum, key0);
                } else {
                    move_maxima(S, O, row_max, row_sum);
                    multiply_values(S, O, row_max, row_sum, key0);
                }
            }
            if (!kFull && kStages == 2) stage ^= 1;
            if constexpr (kSkips) tile = places.seen.next + 1;
        }
    }

    // S = Q K^T
    __device__ __forceinline__ void multiply_scores(Queries& Q, Scores& S) const {
        const uint32_t k_stage = k_lane + stage * uint32_t(sizeof smem.k[0]);
#pragma unroll
        for (int m = 0; m < kMmas; ++m)
#pragma unroll
            for (int n = 0; n < kTilesN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) S[m][n][i] = 0;
#pragma unroll
        for (int step = 0; step < kStepsD; ++step) {
            if (!kTile.q_in_registers) load_q_step(Q, step);
            const auto& A = Q[kTile.q_in_registers ? step : 0];
#pragma unroll
            for (int n = 0; n < kTilesN; n += 2) {
                uint32_t B[4];
                ldmatrix_x4(B, TileQK::advance(k_stage, step) + 8 * n * TileQK::kPitch);
#pragma unroll
                for (int m = 0; m < kMmas; ++m) {
                    mma<T>(S[m][n], A[m], B[0], B[1]);
                    mma<T>(S[m][n + 1], A[m], B[2], B[3]);
                }
            }
        }
    }
    // The same in split products.
    template <SplitRange kRange>
    __device__ __forceinline__ void multiply_split_scores(Scores& S) const {
        constexpr int kTiles = kRange == SplitRange::kUsual && kTilesN % 4 == 0 ? 4 : 2;  // of S at a time
        constexpr int kOwnSteps = kStepsD / kColumnParts;
        static_assert(kStepsD % kColumnParts == 0 && kOwnDv % 32 == 0, "whole steps; columns of O come in fours of tiles");
        static_assert(kColumnParts == 1 || kMmas == 1, "what join_scores is written for");
        const uint32_t k_stage = k_lane + stage * uint32_t(sizeof smem.k[0]);
#pragma unroll(kUnrolled<kRange>)
        for (int x = 0; x < kMmas * kTilesN * 4; ++x) S[x / 4 / kTilesN][x / 4 % kTilesN][x % 4] = 0;
#pragma unroll 1  // more steps at a time take registers
        for (int x = 0; x < kOwnSteps; ++x) {
            const int step = column_part_of(warp) * kOwnSteps + x;
            SplitParts<kRange, 4> A[kMmas];
#pragma unroll
            for (int m = 0; m < kMmas; ++m) {
                uint32_t x[4];
                ldmatrix_x4(x, TileQK::advance(q_lane + 16 * m * TileQK::kPitch, step));
                A[m] = split_fragment<kRange, 4>(x);
            }
#pragma unroll(kUnrolled<kRange>)
            for (int n = 0; n < kTilesN; n += kTiles) {
                SplitParts<kRange, 2> B[kTiles];
#pragma unroll
                for (int t = 0; t < kTiles; t += 2) {
                    uint32_t x[4];
                    ldmatrix_x4(x, TileQK::advance(k_stage, step) + 8 * (n + t) * TileQK::kPitch);
                    B[t] = split_fragment<kRange, 2>(x), B[t + 1] = split_fragment<kRange, 2>(x + 2);
                }
                add_split_products(S, n, A, B);
            }
        }
        if constexpr (kColumnParts > 1) join_scores<kRange>(S);
    }
    // Adds up the sums of the warps that share rows. All add in the same order, so all have the same bits. A round's barrier also says that
    // the round before it has been read; the block's barrier between two tiles says so of a tile's last rounds.
    template <SplitRange kRange>
    __device__ __forceinline__ void join_scores(Scores& S) const {
        constexpr int kElements = kMmas * kTilesN * 4, kAtOnce = exchanged_at_once(kTile);
        static_assert(kElements % kAtOnce == 0, "whole rounds");
        const int here = opaque(lane), row_warp = row_warp_of(warp);
#pragma unroll(kUnrolled<kRange>)
        for (int first = 0; first < kElements; first += kAtOnce) {
            auto& part = smem.part[first / kAtOnce % 2];
#pragma unroll(kUnrolled<kRange>)
            for (int x = 0; x < kAtOnce; ++x) part[warp][x][here] = S[0][(first + x) / 4][(first + x) % 4];
            bar_sync(1 + row_warp, 32 * kColumnParts);
#pragma unroll(kUnrolled<kRange>)
            for (int x = 0; x < kAtOnce; ++x) {
                float sum = part[row_warp][x][here];
#pragma unroll(kUnrolled<kRange>)
                for (int other = 1; other < kColumnParts; ++other) sum += part[row_warp + other * kRowWarps][x][here];
                S[0][(first + x) / 4][(first + x) % 4] = sum;
            }
        }
    }
    __device__ __forceinline__ FragmentPlace place(int m, int key0) const {
        const int here = opaque(lane);  // values that few options need are computed where they are used
        return {work.b, work.head, warp_row + 16 * m + mma_row(here, 0), key0 + mma_column(here, 0), s.seqlen_q, s.seqlen_k, s.shift};
    }
    // Calls body(fragment, place) for parts of the scores: for each 16 rows or, where code is to be small, for each 16 rows and 16 keys.
    template <SplitRange kRange, typename Body>
    __device__ __forceinline__ void for_fragments(Scores& S, int key0, const Body& body) const {
        constexpr int kTiles = kRange == SplitRange::kUsual ? kTilesN : 2;
#pragma unroll
        for (int m = 0; m < kMmas; ++m)
#pragma unroll(kUnrolled<kRange>)
            for (int n = 0; n < kTilesN; n += kTiles) body(reinterpret_cast<float(&)[4 * kTiles]>(S[m][n]), place(m, key0 + 8 * n));
    }
    template <SplitRange kRange>
    __device__ __forceinline__ void transform_scores(Scores& S, int key0) const {
        for_fragments<kRange>(S, key0, [&](auto& part, const FragmentPlace& at) { transform_fragment<Stored>(p, at, part); });
        if (p.tree.rows) for_fragments<kRange>(S, key0, [&](auto& part, const FragmentPlace& at) { hide_by_tree(p, at, part); });
        if (p.intervals.data) for_fragments<kRange>(S, key0, [&](auto& part, const FragmentPlace& at) { hide_by_intervals(p, at, part); });
        if (p.blocks.data) for_fragments<kRange>(S, key0, [&](auto& part, const FragmentPlace& at) { hide_by_blocks(p, at, part); });
    }
    // A key that nobody sees has P = 0, but 0 x NaN is NaN: its V is zeroed. Keys past the window are zeros already.
    __device__ __forceinline__ void zero_unseen_values() const {
        __syncthreads();
#pragma unroll 1
        for (int x = opaque(threadIdx.x); x < kBlockN * TileV::kPieces; x += kThreads)
            if (!smem.visible[x / TileV::kPieces]) reinterpret_cast<uint4*>(smem.v[stage])[x] = make_uint4(0, 0, 0, 0);
        __syncthreads();
    }
    // The maximum of each row; O and row_sum are rescaled when it has moved far.
    __device__ __forceinline__ void move_maxima(const Scores& S, Output& O, RowValues& row_max, RowValues& row_sum) const {
        RowValues new_max;
        bool moved = false;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            float x = fmaxf(S[r / 2][0][r % 2 * 2], S[r / 2][0][r % 2 * 2 + 1]);
#pragma unroll
            for (int n = 1; n < kTilesN; ++n) x = fmaxf(x, fmaxf(S[r / 2][n][r % 2 * 2], S[r / 2][n][r % 2 * 2 + 1]));
            new_max[r] = fmaxf(row_max[r], kGeneral ? quad_max(x) : quad_max(x) * scale);
            moved |= new_max[r] - row_max[r] > kThreshold;
        }
        if (!kPaged && p.max_score) {  // calls with a cache never want it
            const int thread = opaque(threadIdx.x);
            float* const greatest = smem.greatest + thread / 32 * kWarpRows + mma_row(thread % 32, 0);
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                if (thread % 4 == 0) greatest[8 * r] = fmaxf(greatest[8 * r], new_max[r]);
        }
        if (!__any_sync(kFullWarp, moved)) return;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const float next = new_max[r] - row_max[r] > kThreshold ? new_max[r] : row_max[r];
            const float factor = exp2_approx(kGeneral ? (row_max[r] - next) * kLog2e : row_max[r] - next);
            row_max[r] = next;
            row_sum[r] *= factor;
#pragma unroll
            for (int n = 0; n < kTilesV; ++n) O[r / 2][n][r % 2 * 2] *= factor, O[r / 2][n][r % 2 * 2 + 1] *= factor;
        }
    }
    // The same for split products. Under SplitRange::kAny P is at most 1, so that P V overflows only where float32's does.
    template <SplitRange kRange>
    __device__ __forceinline__ void move_split_maxima(const Scores& S, Output& O, RowValues& row_max, RowValues& row_sum) const {
        const float unit = kGeneral ? kLog2e : scale, threshold = kRange == SplitRange::kAny ? 0.0f : kRescaleThreshold;
        RowValues new_max;
        bool moved = false;
#pragma unroll(kUnrolled<kRange>)
        for (int r = 0; r < kRows; ++r) {
            float x = fmaxf(S[r / 2][0][r % 2 * 2], S[r / 2][0][r % 2 * 2 + 1]);
#pragma unroll(kUnrolled<kRange>)
            for (int n = 1; n < kTilesN; ++n) x = fmaxf(x, fmaxf(S[r / 2][n][r % 2 * 2], S[r / 2][n][r % 2 * 2 + 1]));
            new_max[r] = fmaxf(row_max[r], quad_max(x));
            moved |= (new_max[r] - row_max[r]) * unit > threshold;
        }
        if (!kPaged && p.max_score) {
            const int thread = opaque(threadIdx.x);
            float* const greatest = smem.greatest + row_warp_of(thread / 32) * kWarpRows + mma_row(thread % 32, 0);
#pragma unroll(kUnrolled<kRange>)
            for (int r = 0; r < kRows; ++r)
                if (thread % 4 == 0 && column_part_of(thread / 32) == 0) greatest[8 * r] = fmaxf(greatest[8 * r], new_max[r]);
        }
        if (!__any_sync(kFullWarp, moved)) return;
#pragma unroll(kUnrolled<kRange>)
        for (int r = 0; r < kRows; ++r) {
            const float factor = exp2_approx((row_max[r] - new_max[r]) * unit);
            row_max[r] = new_max[r];
            row_sum[r] *= factor;
#pragma unroll(kUnrolled<kRange>)
            for (int n = 0; n < kTilesV; ++n) O[r / 2][n][r % 2 * 2] *= factor, O[r / 2][n][r % 2 * 2 + 1] *= factor;
        }
    }
    __device__ __forceinline__ float exponential(float score, float max) const {
        if constexpr (kRaw) return exp2_approx((score - max) * scale);
        return exp2_approx(kGeneral ? (score - max) * kLog2e : fmaf(score, scale, -max));
    }
    // Exponentiates this thread's pairs of neighbouring keys [begin, end) of a step.
    __device__ __forceinline__ void exponentials(Scores& S, const RowValues& row_max, RowValues& row_sum, int step, int begin,
                                                 int end) const {
#pragma unroll
        for (int x = begin; x < end; ++x) {
            const int m = x / (2 * kStepTiles), r = 2 * m + x % 2;
            float* pair = S[m][kStepTiles * step + x / 2 % kStepTiles] + x % 2 * 2;
            pair[0] = exponential(pair[0], row_max[r]);
            pair[1] = exponential(pair[1], row_max[r]);
            row_sum[r] += pair[0] + pair[1];
        }
    }
    // The exponentials of all further steps, and dropout.
    template <SplitRange kRange>
    __device__ __forceinline__ void finish_probabilities(Scores& S, const RowValues& row_max, RowValues& row_sum, int key0) const {
#pragma unroll(kUnrolled<kRange>)
        for (int step = 1; step < kStepsN; ++step) exponentials(S, row_max, row_sum, step, 0, kStepPairs);
        if (p.dropout_threshold)
            for_fragments<kRange>(S, key0, [&](auto& part, const FragmentPlace& at) { drop_fragment(p, at, lane % 4, part); });
    }
    // P = 2^(S - row_max), O += P V: the exponentials of the next step run between the products of this step.
    __device__ __forceinline__ void multiply_values(Scores& S, Output& O, const RowValues& row_max, RowValues& row_sum, int key0) const {
        const uint32_t v_stage = v_lane + stage * uint32_t(sizeof smem.v[0]);
        exponentials(S, row_max, row_sum, 0, 0, kStepPairs);
        if constexpr (kGeneral) finish_probabilities<SplitRange::kUsual>(S, row_max, row_sum, key0);
#pragma unroll
        for (int step = 0; step < kStepsN; ++step) {
            uint32_t A[kMmas][4];
#pragma unroll
            for (int m = 0; m < kMmas; ++m) fragment_of<T>(A[m], &S[m][kStepTiles * step]);
            constexpr int kGroupTiles = sizeof(T) == 2 ? 2 : 4, kGroups = kTilesV / kGroupTiles;  // tiles of O that one load of V serves
#pragma unroll
            for (int n = 0; n < kGroups; ++n) {
                uint32_t B[kGroupTiles][2];
                if constexpr (sizeof(T) == 2) {
                    ldmatrix_x4_trans(B, TileV::advance(v_stage, n) + kStep * step * TileV::kPitch);
                } else {
                    const uint32_t at = v_stage + 128 * n + kStep * step * TileV::kPitch;
                    load_two_rows(B, at, (at ^ 16) + TileV::kPitch);
                }
#pragma unroll
                for (int m = 0; m < kMmas; ++m)
#pragma unroll
                    for (int t = 0; t < kGroupTiles; ++t) mma<T>(O[m][kGroupTiles * n + t], A[m], B[t][0], B[t][1]);
                if (!kGeneral && step + 1 < kStepsN)
                    exponentials(S, row_max, row_sum, step + 1, kStepPairs * n / kGroups, kStepPairs * (n + 1) / kGroups);
            }
        }
    }
    // The same in split products.
    template <SplitRange kRange>
    __device__ __forceinline__ void multiply_split_values(Scores& S, Output& O, const RowValues& row_max, RowValues& row_sum,
                                                          int key0) const {
        constexpr int kGroups = kTilesV / 4, kParts = kOwnDv > 192 ? 2 : 1, kOfPart = kGroups / kParts;  // four tiles of O; parts of a step
        static_assert(kGroups % kParts == 0, "whole groups");
        const uint32_t v_stage = v_lane + stage * uint32_t(sizeof smem.v[0]);
        exponentials(S, row_max, row_sum, 0, 0, kStepPairs);
        if constexpr (kGeneral) finish_probabilities<kRange>(S, row_max, row_sum, key0);
#pragma unroll(kUnrolled<kRange>)
        for (int x = 0; x < kStepsN * kParts; ++x) {
            const int step = x / kParts, part = x % kParts;
            // Keys that no row of the warp sees have P = 0. The branch also keeps the compiler from mixing the steps, which takes
            // registers.
            if (key0 + kStep * step >= smem.some[opaque(warp)].end) break;
            SplitParts<kRange, 4> A[kMmas];
#pragma unroll
            for (int m = 0; m < kMmas; ++m) A[m] = split_accumulator<kRange>(S[m][step]);
#pragma unroll(kUnrolled<kRange>)
            for (int group = 0; group < kOfPart; ++group) {
                const int n = kOfPart * part + group;
                uint32_t V[4][2];
                const uint32_t at = v_stage + 128 * n + kStep * step * TileV::kPitch;
                load_two_rows(V, at, (at ^ 16) + TileV::kPitch);
                constexpr int kTiles = kRange == SplitRange::kUsual ? 4 : 1;  // of O at a time
#pragma unroll
                for (int first = 0; first < 4; first += kTiles) {
                    SplitParts<kRange, 2> B[kTiles];
#pragma unroll
                    for (int t = 0; t < kTiles; ++t) B[t] = split_fragment<kRange, 2>(V[first + t]);
                    add_split_products(O, 4 * n + first, A, B);
                }
            }
            if (!kGeneral && part == kParts - 1 && step + 1 < kStepsN) exponentials(S, row_max, row_sum, step + 1, 0, kStepPairs);
        }
    }

    // Split products alone: whether every sum of this thread is finite. If not, the walk with SplitRange::kAny says what float32 gives.
    __device__ __forceinline__ bool is_finite(const Output& O, const RowValues& row_sum) const {
        float zero = 0;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            zero = fmaf(row_sum[r], 0.0f, zero);
#pragma unroll
            for (int n = 0; n < kTilesV; ++n)
                zero = fmaf(O[r / 2][n][r % 2 * 2], 0.0f, zero), zero = fmaf(O[r / 2][n][r % 2 * 2 + 1], 0.0f, zero);
        }
        return zero == 0;
    }

    // ---- out = O / row_sum, in 16-byte pieces; lse ----

    // What is needed here is computed again instead of being kept in registers through the loop.
    __device__ __forceinline__ void finish(const Output& O, const RowValues& row_max, const RowValues& row_sum) const {
        const GridPlace done = kGeneral ? work : work_at(params, opaque(blockIdx.x));
        const int last_lane = opaque(threadIdx.x) % 32, every_warp = opaque(threadIdx.x) / 32, last_warp = row_warp_of(every_warp);
        const int part = kColumnParts > 1 ? column_part_of(every_warp) : part_of(params, opaque(blockIdx.x));
        const Sequence done_s =
            kGeneral && kInParts ? s : sequence_of(p, opaque(done.b));  // a second Sequence would spill in the first case
        const int end_row = done.query_tile * kBlockM + last_warp * kWarpRows;
        T* out = static_cast<T*>(p.out.data) + done_s.out + done.head * p.out.head + part * kOwnDv;
        const float sink = sink_of(p.sinks, done.head);
        if (!kPaged && p.max_score && part == 0) {
            float score = -INFINITY;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                const int row = 8 * r + mma_row(last_lane, 0);
                const bool sees = quad_sum(row_sum[r]) != 0;  // else its maximum is still -FLT_MAX
                if (sees && end_row + row < done_s.seqlen_q && last_lane % 4 == 0)
                    score = fmaxf(score, smem.greatest[last_warp * kWarpRows + row]);
            }
            raise_max_score(p, done.b, done.head, kGeneral ? score : score * (kRaw ? p.scale : kLn2));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            const int i = end_row + 16 * (r / 2) + mma_row(last_lane, r % 2 * 2);
            RowEnd end;
            if constexpr (kSplit) {
                const float sum = quad_sum(row_sum[r]), unit = kRaw ? p.scale : 1.0f;
                end = finish_row<ScoreUnit::kNatural>(row_max[r] * unit, sum, sink);
                end.lse = natural_lse(row_max[r], unit, sum, sink);
            } else {
                end = finish_row<kGeneral ? ScoreUnit::kNatural : ScoreUnit::kLog2>(row_max[r], quad_sum(row_sum[r]), sink);
            }
            if (p.lse && last_lane % 4 == 0 && i < done_s.seqlen_q && part == 0)
                p.lse[lse_offset(p, done_s, done.head) + i] = kGeneral || kSplit ? end.lse : end.lse * kLn2;
            if (kGeneral && p.dropout_threshold) end.inverse *= p.dropout_scale;
            store_row(O, r, end, last_lane, part, out + i * p.out.row, i < done_s.seqlen_q);
        }
    }
    // Stores row r of this thread's quad, if there is one in the sequence.
    __device__ __forceinline__ void store_row(const Output& O, int r, const RowEnd& end, int lane, int part, T* row, bool exists) const {
#pragma unroll
        for (int n = 0; n < kTilesV; n += 4) {  // a lane has eight neighbouring columns of every four tiles
            constexpr int kPieces = int(sizeof(T)) / 2, kPieceColumns = 8 / kPieces;
            uint32_t word[kPieces][4];
            const auto value = [&](int x, int e) { return O[r / 2][n + x][r % 2 * 2 + e] * end.inverse; };
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                if constexpr (sizeof(T) == 2) word[0][x] = pack_16<T>(value(x, 0), value(x, 1));
                else word[0][x] = __float_as_uint(value(x, 0)), word[1][x] = __float_as_uint(value(x, 1));
                if (end.empty) word[0][x] = word[kPieces - 1][x] = 0;
            }
            if (sizeof(T) == 2) transpose_quad(word[0], lane % 4);  // from two columns of each tile to eight columns of one tile
#pragma unroll
            for (int piece = 0; piece < kPieces; ++piece) {
                const int column = 8 * (n + lane % 4) + kPieceColumns * piece;
                const int columns = exists ? p.headdim_v - part * kOwnDv - column : 0;
                T* to = row + column;
                const uint32_t(&x)[4] = word[piece];
                if (!kAnyAlignment || params.aligned_out) {
                    if (columns > 0) store_global_16(to, make_uint4(x[0], x[1], x[2], x[3]));
                } else {
#pragma unroll
                    for (int e = 0; e < kPieceColumns; ++e) {
                        if (e >= columns) continue;
                        if (sizeof(T) == 2) reinterpret_cast<uint16_t*>(to)[e] = uint16_t(x[e / 2] >> (e % 2 * 16));
                        else reinterpret_cast<uint32_t*>(to)[e] = x[e % 4];
                    }
                }
            }
        }
    }
};

}  // namespace
}  // namespace fa
