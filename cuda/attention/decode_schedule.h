// decode_schedule.h: which block of the decode kernel attends to which keys, found on the device from the lengths as they are then.
//
// A unit is one tile of rows of one key head of one sequence; its work are the tiles of keys that some row of the sequence sees.
//   balanced   the tiles of all units lie on a line, sequence by sequence, which is cut into equal pieces, one for each block:
//                  unit   0000000000111111112222222222222333333      a block ends one unit and begins the next; a sequence of any
//                  piece  000000011111112222222333333344444445       length is shared by as many blocks as it needs
//   uniform    every unit is cut by itself, into pieces that depend on its own length alone: num_splits and batch_invariant
// A unit in several pieces leaves a partial result of each in its slot of the workspace, and decode_combine.cu merges them.
#pragma once

#include "attention/mask.h"

namespace fa {

struct DecodeParams {
    AttentionParams attention;
    int rows, row_tiles;  // of a tile; tiles of the seqlen_q * group rows that share a key head
    int tile_keys;
    int pieces;  // balanced: of the line at most, one for each block; uniform: of a unit at most
    bool uniform;
    int least_tiles;     // uniform: of a piece, where that leaves fewer pieces
    int stages;          // of the ring in shared memory
    float* partial;      // (slots, rows, headdim_v), each row a mean
    float* partial_lse;  // (slots, rows), of base 2
    bool combines;       // a unit may be in several pieces
    bool after_append;   // the launch is programmatic: the kernel before may still be putting the new keys into the cache

    FA_HOST_DEVICE int heads() const { return attention.nheads_k * row_tiles; }  // units of a sequence
};

// Tiles of keys first .. first + count - 1 and, of them, the keys that some row sees.
struct KeyTiles {
    int first, count;
    KeyRange keys;
};

FA_HOST_DEVICE KeyTiles key_tiles(const DecodeParams& d, const Sequence& s) {
    if (s.seqlen_q == 0) return {0, 0, {0, 0}};
    const KeyRange keys{key_range(d.attention, s, 0).begin, key_range(d.attention, s, s.seqlen_q - 1).end};
    const int first = keys.begin / d.tile_keys;
    return {first, keys.end > keys.begin ? (keys.end - 1) / d.tile_keys - first + 1 : 0, keys};
}

// Uniform: tiles of each piece of a unit, the last one's remainder aside.
FA_HOST_DEVICE int piece_tiles(const DecodeParams& d, int count) {
    const int most = (count + d.least_tiles - 1) / d.least_tiles, pieces = most < d.pieces ? most : d.pieces;
    return pieces > 1 ? (count + pieces - 1) / pieces : count > 1 ? count : 1;
}

#if defined(__CUDACC__)

// A unit without keys takes one place on the line, so that some block writes its zeros.
__device__ __forceinline__ int line_tiles(const DecodeParams& d, int b) { return max(key_tiles(d, sequence_of(d.attention, b)).count, 1); }

__device__ __forceinline__ bool same_lengths(const AttentionParams& p) { return !p.cache.seqlens && !p.cu_seqlens_k; }

struct Line {
    int64_t length, before;  // tiles of all units; of the sequences before the one asked for
};

// Called by whole warps, the same for all lanes.
__device__ __forceinline__ Line line_of(const DecodeParams& d, int b) {
    const AttentionParams& p = d.attention;
    if (same_lengths(p)) {
        const int64_t tiles = int64_t(line_tiles(d, 0)) * d.heads();
        return {tiles * p.batch, tiles * b};
    }
    int64_t length = 0, before = 0;
    for (int x = threadIdx.x % 32; x < p.batch; x += 32) {
        const int tiles = line_tiles(d, x);
        length += tiles;
        if (x < b) before += tiles;
    }
    for (int offset = 16; offset; offset /= 2) {
        length += __shfl_xor_sync(~0u, length, offset);
        before += __shfl_xor_sync(~0u, before, offset);
    }
    return {length * d.heads(), before * d.heads()};
}

// The sequence in which place x of the line lies; `before` becomes where it begins.
__device__ __forceinline__ int sequence_at(const DecodeParams& d, int64_t x, int64_t& before) {
    const AttentionParams& p = d.attention;
    if (same_lengths(p)) {
        const int64_t tiles = int64_t(line_tiles(d, 0)) * d.heads();
        const int b = int(x / tiles);
        before = b * tiles;
        return b;
    }
    const int lane = threadIdx.x % 32;
    before = 0;
    for (int b0 = 0; b0 < p.batch; b0 += 32) {
        int64_t end = b0 + lane < p.batch ? int64_t(line_tiles(d, b0 + lane)) * d.heads() : 0;
        const int64_t own = end;
        for (int offset = 1; offset < 32; offset *= 2) {
            const int64_t lower = __shfl_up_sync(~0u, end, offset);
            if (lane >= offset) end += lower;
        }
        const unsigned behind = __ballot_sync(~0u, before + end > x);
        if (behind) {
            const int at = __ffs(behind) - 1;
            before += __shfl_sync(~0u, end - own, at);
            return b0 + at;
        }
        before += __shfl_sync(~0u, end, 31);
    }
    return p.batch - 1;  // not reached: x is on the line
}

// The pieces of the line, `pieces` of them: piece c begins at place c * length / pieces.
struct Cut {
    int64_t length;
    int pieces;
    __device__ __forceinline__ Cut(const DecodeParams& d, int64_t length) : length(length), pieces(int(min(int64_t(d.pieces), length))) {}
    __device__ __forceinline__ int64_t begin(int piece) const { return piece * length / pieces; }
    __device__ __forceinline__ int piece_at(int64_t place) const { return int(((place + 1) * pieces - 1) / length); }
};

// A unit's pieces and where their results lie.
struct UnitPieces {
    int count;
    int64_t first_slot;
    bool balanced;
    // A block has two slots: for the end of a unit that an earlier one began, and for the beginning of a unit that a later one ends.
    __device__ __forceinline__ int64_t slot(int i) const { return balanced ? first_slot + 2 * i + (i == 0) : first_slot + i; }
};

__device__ __forceinline__ UnitPieces pieces_of(const DecodeParams& d, int b, int unit) {
    const KeyTiles tiles = key_tiles(d, sequence_of(d.attention, b));
    if (d.uniform) {
        const int64_t slot = (int64_t(b) * d.heads() + unit) * d.pieces;
        const int each = piece_tiles(d, tiles.count);
        return {max((tiles.count + each - 1) / each, 1), slot, false};
    }
    const Line line = line_of(d, b);
    const Cut cut(d, line.length);
    const int count = max(tiles.count, 1);
    const int64_t begin = line.before + int64_t(unit) * count;
    const int first = cut.piece_at(begin), last = cut.piece_at(begin + count - 1);
    return {last - first + 1, 2 * int64_t(first), true};
}

// What a block does at a time: tiles begin .. end - 1 of a unit.
struct Segment {
    int b, unit, begin, end;
    int64_t slot;  // of its partial result; below 0: it is the whole unit
};

class Segments {
public:
    __device__ __forceinline__ Segments(const DecodeParams& d, int block, int blocks) : d_(d) {
        if (d.uniform) {
            at_ = block, step_ = blocks, end_ = int64_t(d.attention.batch) * d.heads() * d.pieces;
            return;
        }
        const Cut cut(d, line_of(d, 0).length);
        if (block >= cut.pieces) {
            at_ = end_ = 0;
            return;
        }
        piece_ = block, at_ = cut.begin(block), end_ = cut.begin(block + 1);
        int64_t before;
        b_ = sequence_at(d, at_, before);
        count_ = line_tiles(d, b_);
        unit_ = int((at_ - before) / count_), tile_ = int((at_ - before) % count_);
    }

    // False when there is nothing left.
    __device__ __forceinline__ bool next(Segment& segment) {
        while (at_ < end_) {
            if (d_.uniform) {
                const int64_t unit = at_ / d_.pieces;
                const int piece = int(at_ % d_.pieces), b = int(unit / d_.heads());
                const int64_t slot = at_;
                at_ += step_;
                const KeyTiles tiles = key_tiles(d_, sequence_of(d_.attention, b));
                const int each = piece_tiles(d_, tiles.count), begin = piece * each;
                if (piece && begin >= tiles.count) continue;
                const int end = min(begin + each, tiles.count);
                segment = {b, int(unit % d_.heads()), tiles.first + begin, tiles.first + end, each >= tiles.count ? -1 : slot};
                return true;
            }
            const int end = int(min(int64_t(count_), tile_ + (end_ - at_)));
            const KeyTiles tiles = key_tiles(d_, sequence_of(d_.attention, b_));
            const bool whole = tile_ == 0 && end == count_;
            segment = {b_, unit_, tiles.first + tile_, tiles.first + min(end, tiles.count),
                       whole ? -1 : 2 * int64_t(piece_) + (tile_ == 0 ? 1 : 0)};
            at_ += end - tile_;
            tile_ = 0;
            if (++unit_ == d_.heads() && at_ < end_) unit_ = 0, count_ = line_tiles(d_, ++b_);
            return true;
        }
        return false;
    }

private:
    const DecodeParams& d_;
    int64_t at_, end_, step_ = 0;
    int piece_ = 0, b_ = 0, unit_ = 0, tile_ = 0, count_ = 1;
};

#endif

}  // namespace fa
