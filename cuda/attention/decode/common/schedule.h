// schedule.h: which block of a decode kernel attends to which keys. Blocks compute this on the device, from the lengths at that time.
//
// A unit is one tile of rows of one key head of one sequence. Its work is the tiles of keys that some row of the sequence sees.
//   balanced   The tiles of all units lie on a line, sequence by sequence. The line is cut into equal pieces, one for each block:
//                  unit   0000000000111111112222222222222333333      A block ends one unit and begins the next. A sequence of any length
//                  piece  000000011111112222222333333344444445       is shared by as many blocks as it needs.
//              If all units have the same length, they are cut at their ends instead, each into the same number of pieces; or they stay
//              uncut, where whole units fill the GPU.
//   uniform    Every unit is cut by itself, into pieces that depend only on its own length: num_splits and batch_invariant. Or no unit is
//              cut, because the cache is short (decode_units_stay_whole).
// A unit in several pieces leaves a partial result of each piece in the workspace, and combine.cu merges them.
// With a plan of shared prefixes (prefix.h) a sequence's tiles begin after its prefix.
#pragma once

#include "attention/common/mask.h"
#include "attention/decode/common/prefix.h"
#include "attention/kernels.h"
#include "common/divisor.h"

#if defined(__CUDACC__)
#include "device/ptx.cuh"
#endif

namespace fa {

// balanced: the part of the cut that the host computes.
struct Balance {
    int units, units_each;  // units of the call; units of a block where units stay whole
    bool whole;             // units of equal length stay whole, because that gives work to nearly all blocks
    Divisor pieces;         // DecodeShape::pieces
    Divisor of_unit;        // most pieces of a unit, where units are cut at their ends; 1: there are too many units for that
};
inline Balance balance_of(int units, int pieces) {
    Balance x{};
    x.units = units, x.units_each = (units + pieces - 1) / pieces;
    // A block alone on an SM is slower than two blocks of half its length, so units stay whole only where nearly all blocks get one.
    x.whole = 10 * int64_t((units + x.units_each - 1) / x.units_each) >= 9 * int64_t(pieces);
    x.pieces = divisor_of(pieces), x.of_unit = divisor_of(pieces > units ? pieces / units : 1);
    return x;
}

// How a call is divided into work. The host computes it without knowing the lengths.
struct DecodeShape {
    int rows, row_tiles;  // rows of a tile of rows; tiles that cover the seqlen_q * group rows of a key head
    int tile_shift;       // a tile of keys has 2^tile_shift keys
    int pieces;           // balanced: most pieces of the line, one per block; uniform: most pieces of a unit
    bool uniform;
    bool combines;    // a unit may be in several pieces, which combine.cu merges
    int least_tiles;  // uniform: least tiles of a piece
    int row_warps;    // lanes/kernel.cuh: warps that share their keys and divide a tile's rows; 0: other kernels
    int cluster;      // blocks of a cluster that share a unit; 0: units are cut into pieces
    DecodeKernel kernel;
};

// The parameters of the decode kernels.
struct DecodeParams {
    AttentionParams attention;  // with the window clamped to all queries and keys together
    float scale_log2;           // softmax_scale * log2(e): turns q . k into an exponent of 2, the unit of all scores here
    float softcap_log2;         // softcap * log2(e), in the same unit; 0 = off
    DecodeShape shape;
    int stages;                  // split_sm80/kernel.cuh: stages of the ring in shared memory
    Divisor page, group, units;  // divide by the page size; the query heads per key head; the units of a sequence
    float* partial;              // (slots, rows, headdim_v): the normalised O of each piece
    float* partial_lse;          // (slots, rows): exponents of 2; of natural scores (slots, rows, 2): the maximum and the sum
    bool after_append;           // the launch is programmatic: the previous kernel may still write q and append to the cache
    bool scaled_by_key;          // 8-bit caches: the factors may differ between the keys of a head
    Balance balance;             // unless uniform
    // decode_prefix_sm80, decode_prefix_sm90: the keys of `prefix` are another kernel's work, and the units of the sequences that have some
    // leave partial results even in one piece: unit u of sequence b in slot whole_slots + b * heads() + u.
    PrefixPlan prefix;
    int whole_slots;

    FA_HOST_DEVICE int heads() const { return attention.nheads_k * shape.row_tiles; }  // units of a sequence
};

#if defined(__CUDACC__)

// The keys of a sequence that some row sees. Every block computes this first, so it is short, and in 32 bits. Padding before the first key
// counts as keys that no row sees.
struct VisibleKeys {
    int count;       // keys of the sequence
    int shift;       // row i is aligned with key i + shift
    int begin, end;  // keys that some row sees
};
template <typename Params>  // AttentionParams or LaneParams
__device__ __forceinline__ VisibleKeys visible_keys(const Params& p, int count, int padding = 0) {
    VisibleKeys k;
    k.count = count;
    k.shift = p.top_left ? padding : k.count - p.seqlen_q;
    k.begin = p.window_left >= 0 ? min(max(k.shift - p.window_left, padding), k.count) : padding;
    k.end = max(p.window_right >= 0 ? min(p.seqlen_q + k.shift + p.window_right, k.count) : k.count, k.begin);
    return k;
}

// VisibleKeys and their tiles. There is at least one tile, so that some block writes the zeros of a sequence without keys.
struct SequenceKeys : VisibleKeys {
    int first_tile, tiles;
};
__device__ __forceinline__ SequenceKeys sequence_keys(const DecodeParams& d, int b) {
    const AttentionParams& p = d.attention;
    SequenceKeys k;
    const int rows = p.cache.entries ? cached_rows(p, b) : p.seqlen_k;
    static_cast<VisibleKeys&>(k) = visible_keys(p, rows, padded_rows(p.cache, b, rows));
    if (d.prefix.keys) k.begin = max(k.begin, d.prefix.keys[b]);  // at most k.end
    k.first_tile = k.begin >> d.shape.tile_shift;
    k.tiles = max(((k.end - 1) >> d.shape.tile_shift) + 1 - k.first_tile, 1);
    return k;
}
__device__ __forceinline__ int tiles_of(const DecodeParams& d, int b) {
    return b < d.attention.batch ? sequence_keys(d, b).tiles * d.heads() : 0;
}

// uniform: tiles per piece of a unit with `tiles` tiles; the last piece may have fewer.
__device__ __forceinline__ int piece_tiles(const DecodeParams& d, int tiles) {
    const int pieces = min((tiles + d.shape.least_tiles - 1) / d.shape.least_tiles, d.shape.pieces);
    return (tiles + pieces - 1) / pieces;
}

// balanced: where the line is cut. Pieces differ by at most one tile, and the longer ones come first. For units of equal length, either
// several units make a piece, or several pieces make a unit. This and everything below is called by whole warps.
struct Cut {
    unsigned pieces = 0;
    unsigned each = 0, longer = 0;    // tiles of a piece; pieces that have one more
    unsigned tiles = 0, of_unit = 0;  // units of equal length: tiles of each, else 0; pieces of each, 0 where units stay whole

    __device__ __forceinline__ explicit Cut(const DecodeParams& d) {
        if (d.shape.uniform) return;
        unsigned least = ~0u, most = 0, sum = 0;
        for (int b = threadIdx.x % 32; b < d.attention.batch; b += 32) {
            const unsigned more = sequence_keys(d, b).tiles;
            sum += more, least = min(least, more), most = max(most, more);
        }
        const Balance& balance = d.balance;
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
        const unsigned length = __reduce_add_sync(~0u, sum) * d.heads(), resident = d.shape.pieces,
                       of_each = min(balance.of_unit.divisor, most);
        each = length < resident ? 1 : balance.pieces.divide(length), pieces = min(resident, length), longer = length - each * pieces;
        if (least != most) return;
        const unsigned longest = of_each < most ? balance.of_unit.divide(most + of_each - 1) : 1;
        if (balance.whole) tiles = most, pieces = (balance.units + balance.units_each - 1) / balance.units_each;
        else if (of_each > 1 && 10 * longest <= 11 * (each + (longer > 0)))
            tiles = most, of_unit = of_each, pieces = balance.units * of_each;
    }
    // Units of any length: the first tile of a piece on the line, and the piece that has tile `place` of the line.
    __device__ __forceinline__ unsigned begin(unsigned piece) const { return piece * each + min(piece, longer); }
    __device__ __forceinline__ unsigned piece_at(unsigned place) const {
        const unsigned end = longer * (each + 1);
        return place < end ? place / (each + 1) : longer + (place - end) / each;
    }
};

// A unit's pieces and the slots of their results.
struct UnitPieces {
    int count;
    int64_t first_slot;
    bool balanced;
    // balanced: each block has two slots: one for the end of a unit that an earlier block began, one for the beginning of a unit that a
    // later block ends.
    __device__ __forceinline__ int64_t slot(int i) const { return balanced ? first_slot + 2 * i + (i == 0) : first_slot + i; }
};

__device__ __forceinline__ UnitPieces pieces_of(const DecodeParams& d, const Cut& cut, int b, int unit) {
    const int tiles = sequence_keys(d, b).tiles;
    if (d.shape.uniform) {
        const int each = piece_tiles(d, tiles);
        return {(tiles + each - 1) / each, (int64_t(b) * d.heads() + unit) * d.shape.pieces, false};
    }
    if (cut.of_unit) return {int(cut.of_unit), 2 * (int64_t(b) * d.heads() + unit) * cut.of_unit, true};
    if (cut.tiles) return {1, 0, true};
    unsigned before = 0;
    for (int x = threadIdx.x % 32; x < b; x += 32) before += tiles_of(d, x);
    const unsigned begin = __reduce_add_sync(~0u, before) + unit * tiles, first = cut.piece_at(begin),
                   last = cut.piece_at(begin + tiles - 1);
    return {int(last - first) + 1, 2 * int64_t(first), true};
}

// A block's work at one time: tiles begin .. end - 1 of a unit, counted from the first tile that some row sees.
struct Segment {
    int b, unit, begin, end;
    int slot;  // of its partial result; below 0: the segment is the whole unit
};

// When all units are equal and uncut, a block takes every n-th unit (kEveryNth), else consecutive units. With every n-th, the blocks read
// all heads of a few sequences at a time, whose rows are neighbours in memory: up to 2 % faster on an H200.
enum class UnitOrder { kConsecutive, kEveryNth };

// Iterates over the segments of this block.
template <UnitOrder kOrder>
class SegmentsOf {
    static constexpr bool kEveryNth = kOrder == UnitOrder::kEveryNth;

public:
    SegmentsOf() = default;  // none
    __device__ __forceinline__ explicit SegmentsOf(const DecodeParams& d) {
        if (d.prefix.keys) grid_dependency_wait();  // for the plan, which the lengths below depend on
        if (d.shape.uniform) {
            at_ = blockIdx.x, end_ = d.attention.batch * d.heads() * d.shape.pieces;
            return;
        }
        const Cut cut(d);
        const unsigned piece = min(blockIdx.x, cut.pieces);
        if (kEveryNth && cut.tiles) length_ = cut.pieces;
        if (cut.tiles && !cut.of_unit) {
            if (kEveryNth) at_ = piece < cut.pieces ? piece : d.balance.units, end_ = d.balance.units;
            else at_ = min(piece * d.balance.units_each, d.balance.units), end_ = min(at_ + d.balance.units_each, d.balance.units);
            equal_ = cut.tiles;
        } else if (cut.tiles) {
            at_ = piece, end_ = min(piece + 1, cut.pieces);
            equal_ = cut.tiles;
        } else {
            at_ = cut.begin(piece), end_ = cut.begin(min(piece + 1, cut.pieces));
        }
    }

    // Sets the next segment; returns false when there is none left.
    __device__ __forceinline__ bool next(const DecodeParams& d, Segment& segment) {
        if (!next_of_line(d, segment)) return false;
        if (d.prefix.keys && segment.slot < 0 && d.prefix.keys[segment.b] > 0)
            segment.slot = d.whole_slots + segment.b * d.heads() + segment.unit;
        return true;
    }

private:
    __device__ __forceinline__ bool next_of_line(const DecodeParams& d, Segment& segment) {
        if (equal_) {
            if (at_ >= end_) return false;
            const Divisor& most = d.balance.of_unit;
            const unsigned of_unit = d.balance.whole ? 1 : min(most.divisor, equal_);
            const auto by_pieces = [&](unsigned x) { return of_unit < most.divisor ? x / of_unit : unsigned(most.divide(x)); };
            const unsigned unit = d.balance.whole ? at_ : by_pieces(at_), i = at_ - unit * of_unit, b = d.units.divide(unit);
            at_ += kEveryNth ? length_ : 1;
            segment = {int(b), int(unit - b * d.heads()), 0, int(equal_), -1};
            if (of_unit > 1) {
                segment.begin = by_pieces(i * equal_), segment.end = by_pieces((i + 1) * equal_);
                segment.slot = 2 * blockIdx.x + (i == 0);
            }
            return true;
        }
        while (at_ < end_) {
            if (d.shape.uniform) {
                const unsigned slot = at_, piece = slot % d.shape.pieces, unit = slot / d.shape.pieces, b = unit / d.heads();
                at_ += gridDim.x;
                const int tiles = sequence_keys(d, b).tiles, each = piece_tiles(d, tiles), begin = piece * each;
                if (begin >= tiles) continue;
                segment = {int(b), int(unit % d.heads()), begin, min(begin + each, tiles), each >= tiles ? -1 : int(slot)};
                return true;
            }
            const int lane = threadIdx.x % 32;
            while (at_ >= before_ + length_) {  // on to the next 32 sequences: each lane finds where one of them ends on the line
                before_ += length_, first_ += 32;
                place_ = tiles_of(d, first_ + lane);
                for (int offset = 1; offset < 32; offset *= 2) {
                    const unsigned lower = __shfl_up_sync(~0u, place_, offset);
                    if (lane >= offset) place_ += lower;
                }
                length_ = __shfl_sync(~0u, place_, 31);
            }
            const int source = __ffs(__ballot_sync(~0u, before_ + place_ > at_)) - 1;
            const unsigned end = before_ + __shfl_sync(~0u, place_, source);
            const unsigned begin = source ? before_ + __shfl_sync(~0u, place_, source - 1) : before_;
            const unsigned tiles = (end - begin) / d.heads(), unit = (at_ - begin) / tiles, tile = at_ - begin - unit * tiles;
            const unsigned count = min(tiles - tile, end_ - at_);
            segment = {first_ + source, int(unit), int(tile), int(tile + count), count == tiles ? -1 : int(2 * blockIdx.x) + (tile == 0)};
            at_ += count;
            return true;
        }
        return false;
    }

    unsigned at_ = 0, end_ = 0;  // tiles of the line; uniform: slots; equal units: units, or pieces of units
    unsigned equal_ = 0;         // equal units: tiles of each
    int first_ = -32;            // first of the 32 sequences that the warp looks at
    unsigned before_ = 0;        // where they begin on the line
    unsigned length_ = 0;        // their tiles; equal units with kEveryNth: the step from one unit to the next
    unsigned place_ = 0;         // where this lane's sequence ends, counted from before_
};
using Segments = SegmentsOf<UnitOrder::kConsecutive>;

#endif

}  // namespace fa
