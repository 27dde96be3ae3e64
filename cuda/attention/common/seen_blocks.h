// seen_blocks.h: masks by blocks (block_mask) and masks of pairs (mask with a row axis) in the kernels of Hopper, for host and device: what
// rows of blocks of 64 see of blocks of 64 keys, and where that lies in a workspace. A small kernel (seen_blocks.cu) writes it before the
// forward and the backward pass.
//
// A block of 64 rows x 64 keys is hidden, whole or cut:
//
//     hidden   seen = 0            no row sees any of the keys
//     whole    seen = 1, cut = 0   every row sees every key, as far as the masks decide
//     cut      seen = 1, cut = 1   a word of 64 bits for each of its rows, or of its keys, says which pairs are seen
//
// A call with block_mask alone has no cut blocks, and causal and windows are not in its bits. In a call with a mask the bits are those of
// mask, block_mask, causal and window together. Kernels compare causal and windows themselves in any case. Rows and keys past the end of a
// sequence decide nothing: in a cut block rows past the end see all keys, and no row sees keys past the end.
#pragma once

#include "attention/common/mask.h"

namespace fa {

constexpr int kSeenBlock = 64;  // rows and keys of a block

// Bit x stands for key block 32 i + x, in word i of a row block.
struct SeenWord {
    uint32_t seen, cut;
};

// What the words of cut blocks are words of.
enum class PairWords {
    kOfRows,  // word r: row r of the block. Bit c: its key c
    kOfKeys   // word c: key c of the block. Bit r: its row r
};

// Whether a call's masks take this form: block_mask, a mask that differs between rows, or both. Masks by intervals have a form of their
// own. In a varlen call rows and keys past the end of a sequence differ between sequences, so a mask, which may be one for all, has none.
FA_HOST_DEVICE bool has_seen_blocks(const AttentionParams& p) {
    const bool pairs = p.mask.data && p.mask.row != 0 && p.seqlen_q > 1;
    return (p.blocks.data || pairs) && !p.intervals.data && !(p.mask.data && p.cu_seqlens_q);
}

// How many of everything. An entry is a batch entry and query head, or all of them where the masks do not differ.
struct SeenBlocksShape {
    int32_t batches, heads, heads_of_entry;  // heads_of_entry query heads share an entry; batches: 1, or those of the call
    int32_t row_blocks, key_blocks;          // of the longest sequence
    bool pairs;                              // whether there are cut blocks

    FA_HOST_DEVICE int64_t entries() const { return int64_t(batches) * heads; }
    FA_HOST_DEVICE int64_t entry(int32_t b, int32_t head) const { return (batches == 1 ? 0 : int64_t(b) * heads) + head / heads_of_entry; }
    FA_HOST_DEVICE int32_t words_of_row() const { return (key_blocks + 31) / 32; }
    FA_HOST_DEVICE int64_t words() const { return entries() * row_blocks * words_of_row(); }
    FA_HOST_DEVICE int64_t blocks() const { return entries() * row_blocks * key_blocks; }
    // Row block m of an entry: its first SeenWord, and its first block.
    FA_HOST_DEVICE int64_t word(int64_t entry, int32_t m) const { return (entry * row_blocks + m) * words_of_row(); }
    FA_HOST_DEVICE int64_t block(int64_t entry, int32_t m) const { return (entry * row_blocks + m) * key_blocks; }
};
FA_HOST_DEVICE SeenBlocksShape seen_blocks_shape(const AttentionParams& p) {
    SeenBlocksShape shape{};
    const bool own_batch = (p.mask.data && p.mask.batch != 0) || (p.blocks.data && p.blocks.batch != 0);
    shape.batches = own_batch ? p.batch : 1;
    shape.heads_of_entry = p.blocks.data && p.blocks.head != 0 ? p.blocks.heads_of_entry : p.nheads;
    if (p.mask.data && p.mask.head != 0) shape.heads_of_entry = 1;
    shape.heads = p.nheads / shape.heads_of_entry;
    shape.row_blocks = (p.seqlen_q + kSeenBlock - 1) / kSeenBlock, shape.key_blocks = (p.seqlen_k + kSeenBlock - 1) / kSeenBlock;
    shape.pairs = p.mask.data;
    return shape;
}

// In the workspace, in this order.
struct SeenBlocks {
    SeenBlocksShape shape;
    uint64_t* pairs;  // (entries, row blocks, key blocks, 64), written in cut blocks alone; nullptr without pairs
    uint64_t* keys;   // (entries, row blocks, key blocks): bit c: whether any row of the block sees its key c; nullptr without pairs
    SeenWord* words;  // (entries, row blocks, words of a row)
};
constexpr size_t kSeenBlocksAlignment = 128;
inline size_t seen_blocks_bytes(const SeenBlocksShape& shape) {
    const size_t of_block = shape.pairs ? (kSeenBlock + 1) * sizeof(uint64_t) : 0;
    return size_t(shape.blocks()) * of_block + size_t(shape.words()) * sizeof(SeenWord) + kSeenBlocksAlignment;
}
inline SeenBlocks seen_blocks_in(void* workspace, const SeenBlocksShape& shape) {
    char* at = static_cast<char*>(align_up(workspace, kSeenBlocksAlignment));
    SeenBlocks blocks{shape, nullptr, nullptr, nullptr};
    if (shape.pairs) {
        blocks.pairs = reinterpret_cast<uint64_t*>(at), at += size_t(shape.blocks()) * kSeenBlock * sizeof(uint64_t);
        blocks.keys = reinterpret_cast<uint64_t*>(at), at += size_t(shape.blocks()) * sizeof(uint64_t);
    }
    blocks.words = reinterpret_cast<SeenWord*>(at);
    return blocks;
}

// Bits begin .. end - 1, counted from position `first`, of a word of kBits.
template <int kBits>
FA_HOST_DEVICE uint64_t bits_of_range(int32_t begin, int32_t end, int32_t first) {
    const auto up_to = [](int32_t count) { return count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1; };
    return up_to(clamp_to(end - first, 0, kBits)) & ~up_to(clamp_to(begin - first, 0, kBits));
}

// A tile of kRows x kKeys blocks, of the forward pass: a bit for each of its blocks, row by row. Blocks without rows or without keys count
// as whole.
struct BlocksOfTile {
    uint32_t seen, cut;
    bool some;  // whether any row sees any key

    template <int kRows, int kKeys>
    FA_INLINED bool is_whole() const {
        return seen == (1u << kRows * kKeys) - 1 && cut == 0;
    }
};
// words: of the tile's first row block, each row block has words_of_row. The tile's first key block is `first`, a multiple of kKeys; there
// are `rows` row blocks from the tile's first on, and key_blocks in all.
template <int kRows, int kKeys>
FA_INLINED BlocksOfTile blocks_of_tile(const SeenWord* words, int32_t words_of_row, int32_t first, int32_t rows, int32_t key_blocks) {
    static_assert(32 % kKeys == 0, "a tile's bits lie in one word");
    constexpr uint32_t kAll = (1u << kKeys) - 1;
    BlocksOfTile tile{0, 0, false};
    const uint32_t exist = uint32_t(bits_of_range<kKeys>(0, key_blocks, first));
    for (int r = 0; r < kRows; ++r) {
        uint32_t seen = kAll, cut = 0;
        if (r < rows && exist) {
            const SeenWord word = words[r * words_of_row + first / 32];
            seen = word.seen >> first % 32 & exist, cut = word.cut >> first % 32 & exist;
            tile.some |= seen != 0;
            seen |= kAll & ~exist;
        }
        tile.seen |= seen << r * kKeys, tile.cut |= cut << r * kKeys;
    }
    return tile;
}
// Whether no row of such a tile sees key `c` of column `column` of blocks. first, last: the rows of the tile that causal and windows leave
// to the key, none with first > last. keys(block): the keys of a block that its rows see; called for every row block, because on a GPU the
// lanes of a warp exchange them.
template <int kRows, int kKeys, typename Keys>
FA_INLINED bool hides_key(int column, int c, int32_t first, int32_t last, const Keys& keys) {
    bool hidden = true;
    for (int r = 0; r < kRows; ++r) {
        const uint64_t seen = keys(r * kKeys + column);  // always: the lanes of a warp may exchange them
        hidden &= !(first < (r + 1) * kSeenBlock && last >= r * kSeenBlock && first <= last && (seen >> c & 1));
    }
    return hidden;
}

}  // namespace fa
