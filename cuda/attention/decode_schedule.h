// decode_schedule.h: which block of the decode kernel attends to which keys, found on the device from the lengths as they are then.
//
// A unit is one tile of rows of one key head of one sequence; its work are the tiles of keys that some row of the sequence sees.
//   balanced   the tiles of all units lie on a line, sequence by sequence, which is cut into equal pieces, one for each block:
//                  unit   0000000000111111112222222222222333333      a block ends one unit and begins the next; a sequence of any
//                  piece  000000011111112222222333333344444445       length is shared by as many blocks as it needs
//              Units of one length are cut at their ends: into so many pieces each, or not at all where whole ones fill the GPU.
//   uniform    every unit is cut by itself, into pieces that depend on its own length alone: num_splits and batch_invariant
// A unit in several pieces leaves a partial result of each in its slot of the workspace, and decode_combine.cu merges them.
#pragma once

#include "attention/kernels.h"
#include "attention/mask.h"

namespace fa {

// x / divisor for 0 <= x < 2^31, by a multiplication.
struct Divisor {
    uint32_t divisor, shift;
    uint32_t factor;  // 2^shift / divisor, rounded up
#if defined(__CUDACC__)
    __device__ __forceinline__ int divide(int x) const { return int(uint64_t(uint32_t(x)) * factor >> shift); }
    __device__ __forceinline__ int remainder(int x, int quotient) const { return x - quotient * int(divisor); }
#endif
};
inline Divisor divisor_of(int32_t x) {  // x > 0
    Divisor d{uint32_t(x), 31, 0};
    while ((uint64_t(1) << (d.shift - 31)) < uint64_t(x)) ++d.shift;
    d.factor = uint32_t((uint64_t(1) << d.shift) / uint64_t(x)) + 1;
    return d;
}

// What a cut of the line into pieces for all blocks needs and the host knows.
struct Balance {
    int units, units_each;  // of the call; of a block where blocks have whole ones
    bool whole;             // they may: that gives work to nearly all blocks
    Divisor pieces;         // DecodeParams::pieces
    Divisor of_unit;        // pieces of a unit at most; 1: a unit is not worth cutting at its ends
};
inline Balance balance_of(int units, int pieces) {
    Balance x{};
    x.units = units, x.units_each = (units + pieces - 1) / pieces;
    // A block alone on an SM is slower than two of half its length: only whole units for all places are worth it.
    x.whole = 10 * int64_t((units + x.units_each - 1) / x.units_each) >= 9 * int64_t(pieces);
    x.pieces = divisor_of(pieces), x.of_unit = divisor_of(pieces > units ? pieces / units : 1);
    return x;
}

struct DecodeParams {
    AttentionParams attention;  // its window no wider than all queries and keys together
    int rows, row_tiles;        // of a tile; tiles of the seqlen_q * group rows that share a key head
    int tile_shift;             // a tile has 2^tile_shift keys
    int pieces;                 // balanced: of the line at most, one for each block; uniform: of a unit at most
    bool uniform;
    int least_tiles;             // uniform: of a piece, where that leaves fewer pieces
    int stages;                  // of the ring in shared memory
    int row_warps;               // decode_lanes.cuh: warps that share their keys, each with its part of a tile's rows; 0: decode_split.cuh
    int cluster;                 // blocks that share a unit; 0: none do, the pieces are those above
    Divisor page, group, units;  // by the size of a page, the heads of a key head, the units of a sequence
    float* partial;              // (slots, rows, headdim_v), each row a mean
    float* partial_lse;          // (slots, rows), of base 2
    bool combines;               // a unit may be in several pieces
    bool after_append;  // the launch is programmatic: the kernel before may still be making q and putting the new keys into the cache
    DecodeKernel kernel;
    Balance balance;  // not uniform

    FA_HOST_DEVICE int heads() const { return attention.nheads_k * row_tiles; }  // units of a sequence
};

#if defined(__CUDACC__)

// The keys of a sequence: how many, those that some row sees, and their tiles, one at least, so that some block writes the zeros of a
// sequence without keys. 32 bits, and short: this is the first thing that every block computes.
struct SequenceKeys {
    int count, shift, begin, end;
    int first_tile, tiles;
};

__device__ __forceinline__ SequenceKeys sequence_keys(const DecodeParams& d, int b) {
    const AttentionParams& p = d.attention;
    SequenceKeys k;
    k.count = p.cache.entries ? cached_keys(p, b) : p.seqlen_k;
    k.shift = p.top_left ? 0 : k.count - p.seqlen_q;
    k.begin = p.window_left >= 0 ? min(max(k.shift - p.window_left, 0), k.count) : 0;
    k.end = max(p.window_right >= 0 ? min(p.seqlen_q + k.shift + p.window_right, k.count) : k.count, k.begin);
    k.first_tile = k.begin >> d.tile_shift;
    k.tiles = max(((k.end - 1) >> d.tile_shift) + 1 - k.first_tile, 1);
    return k;
}
__device__ __forceinline__ int tiles_of(const DecodeParams& d, int b) {
    return b < d.attention.batch ? sequence_keys(d, b).tiles * d.heads() : 0;
}

// Uniform: tiles of each piece of a unit of so many, the last one's remainder aside.
__device__ __forceinline__ int piece_tiles(const DecodeParams& d, int tiles) {
    const int pieces = min((tiles + d.least_tiles - 1) / d.least_tiles, d.pieces);
    return (tiles + pieces - 1) / pieces;
}

// Balanced: the line in pieces that differ by one tile at most, the longer ones first; or, `whole`, of equal units, so many units in a
// piece or so many pieces of a unit. Called by whole warps, as is all of the following.
struct Cut {
    unsigned each = 0, longer = 0, pieces = 0;
    unsigned tiles = 0, of_unit = 0;  // equal units: of each; its pieces, 0 = it has neighbours in its piece

    __device__ __forceinline__ explicit Cut(const DecodeParams& d) {
        if (d.uniform) return;
        unsigned least = ~0u, most = 0, sum = 0;
        for (int b = threadIdx.x % 32; b < d.attention.batch; b += 32) {
            const unsigned more = sequence_keys(d, b).tiles;
            sum += more, least = min(least, more), most = max(most, more);
        }
        const Balance& balance = d.balance;
        most = __reduce_max_sync(~0u, most), least = __reduce_min_sync(~0u, least);
        const unsigned length = __reduce_add_sync(~0u, sum) * d.heads(), resident = d.pieces, of_each = min(balance.of_unit.divisor, most);
        each = length < resident ? 1 : balance.pieces.divide(length), pieces = min(resident, length), longer = length - each * pieces;
        if (least != most) return;
        const unsigned longest = of_each < most ? balance.of_unit.divide(most + of_each - 1) : 1;
        if (balance.whole) tiles = most, pieces = (balance.units + balance.units_each - 1) / balance.units_each;
        else if (of_each > 1 && 10 * longest <= 11 * (each + (longer > 0)))
            tiles = most, of_unit = of_each, pieces = balance.units * of_each;
    }
    __device__ __forceinline__ unsigned begin(unsigned piece) const { return piece * each + min(piece, longer); }  // of units of any length
    __device__ __forceinline__ unsigned piece_at(unsigned place) const {
        const unsigned end = longer * (each + 1);
        return place < end ? place / (each + 1) : longer + (place - end) / each;
    }
};

// A unit's pieces and where their results lie.
struct UnitPieces {
    int count;
    int64_t first_slot;
    bool balanced;
    // A block has two slots: for the end of a unit that an earlier one began, and for the beginning of a unit that a later one ends.
    __device__ __forceinline__ int64_t slot(int i) const { return balanced ? first_slot + 2 * i + (i == 0) : first_slot + i; }
};

__device__ __forceinline__ UnitPieces pieces_of(const DecodeParams& d, const Cut& cut, int b, int unit) {
    const int tiles = sequence_keys(d, b).tiles;
    if (d.uniform) {
        const int each = piece_tiles(d, tiles);
        return {(tiles + each - 1) / each, (int64_t(b) * d.heads() + unit) * d.pieces, false};
    }
    if (cut.of_unit) return {int(cut.of_unit), 2 * (int64_t(b) * d.heads() + unit) * cut.of_unit, true};
    if (cut.tiles) return {1, 0, true};
    unsigned before = 0;
    for (int x = threadIdx.x % 32; x < b; x += 32) before += tiles_of(d, x);
    const unsigned begin = __reduce_add_sync(~0u, before) + unit * tiles, first = cut.piece_at(begin),
                   last = cut.piece_at(begin + tiles - 1);
    return {int(last - first) + 1, 2 * int64_t(first), true};
}

// What a block does at a time: tiles begin .. end - 1, counted from the sequence's first, of a unit.
struct Segment {
    int b, unit, begin, end;
    int slot;  // of its partial result; below 0: it is the whole unit
};

// kDealt: of equal whole units a block has every so manyth, else those that follow each other. All heads of a few sequences are then read
// at a time, whose rows are neighbours in memory: on an H200 up to 2 % faster.
template <bool kDealt>
class SegmentsOf {
public:
    SegmentsOf() = default;  // none
    __device__ __forceinline__ explicit SegmentsOf(const DecodeParams& d) {
        if (d.uniform) {
            at_ = blockIdx.x, end_ = d.attention.batch * d.heads() * d.pieces;
            return;
        }
        const Cut cut(d);
        const unsigned piece = min(blockIdx.x, cut.pieces);
        if (kDealt && cut.tiles) length_ = cut.pieces;
        if (cut.tiles && !cut.of_unit) {
            if (kDealt) at_ = piece < cut.pieces ? piece : d.balance.units, end_ = d.balance.units;
            else at_ = min(piece * d.balance.units_each, d.balance.units), end_ = min(at_ + d.balance.units_each, d.balance.units);
            equal_ = cut.tiles;
        } else if (cut.tiles) {
            at_ = piece, end_ = min(piece + 1, cut.pieces);
            equal_ = cut.tiles;
        } else {
            at_ = cut.begin(piece), end_ = cut.begin(min(piece + 1, cut.pieces));
        }
    }

    // False when there is nothing left.
    __device__ __forceinline__ bool next(const DecodeParams& d, Segment& segment) {
        if (equal_) {
            if (at_ >= end_) return false;
            const Divisor& most = d.balance.of_unit;
            const unsigned of_unit = d.balance.whole ? 1 : min(most.divisor, equal_);
            const auto by_pieces = [&](unsigned x) { return of_unit < most.divisor ? x / of_unit : unsigned(most.divide(x)); };
            const unsigned unit = d.balance.whole ? at_ : by_pieces(at_), i = at_ - unit * of_unit, b = d.units.divide(unit);
            at_ += kDealt ? length_ : 1;
            segment = {int(b), int(unit - b * d.heads()), 0, int(equal_), -1};
            if (of_unit > 1) {
                segment.begin = by_pieces(i * equal_), segment.end = by_pieces((i + 1) * equal_);
                segment.slot = 2 * blockIdx.x + (i == 0);
            }
            return true;
        }
        while (at_ < end_) {
            if (d.uniform) {
                const unsigned slot = at_, piece = slot % d.pieces, unit = slot / d.pieces, b = unit / d.heads();
                at_ += gridDim.x;
                const int tiles = sequence_keys(d, b).tiles, each = piece_tiles(d, tiles), begin = piece * each;
                if (begin >= tiles) continue;
                segment = {int(b), int(unit % d.heads()), begin, min(begin + each, tiles), each >= tiles ? -1 : int(slot)};
                return true;
            }
            const int lane = threadIdx.x % 32;
            while (at_ >= before_ + length_) {  // on to the next 32 sequences: where on the line each of them ends
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

private:
    unsigned at_ = 0, end_ = 0;                     // of the line; equal units: of them or of their pieces
    unsigned equal_ = 0;                            // equal units: tiles of each
    int first_ = -32;                               // of 32 sequences,
    unsigned before_ = 0, length_ = 0, place_ = 0;  // which begin at before_; place_: where this lane's ends, from there; equal units,
                                                    // kDealt: length_ of them to the next
};
using Segments = SegmentsOf<false>;

#endif

}  // namespace fa
