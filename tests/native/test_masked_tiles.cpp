// test_masked_tiles.cpp: which tiles the backward pass of wgmma_sm90 visits under masks by blocks and masks of pairs, and what it compares
// in them, against the mask pair by pair, for random calls. The loops of seen_blocks.cu and masked_tiles.cu are written again here, but
// every decision is that of the kernels: attention/common/seen_blocks.h, attention/backward/wgmma_sm90/masked_tiles.h and tiles.h, plain
// C++.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "attention/backward/wgmma_sm90/masked_tiles.h"
#include "random_calls.h"

namespace {

using namespace fa;
using namespace random_calls;

struct Call {
    AttentionParams p{};
    std::vector<int32_t> cu_q{0}, cu_k{0};
    std::vector<uint8_t> blocks, mask;
};

uint8_t random_bool(int style) { return style == 0 ? 1 : style == 1 ? 0 : below(style) == 0; }

void make(Call& c) {
    AttentionParams& p = c.p;
    const bool varlen = below(4) == 0, pairs = !varlen && below(2), by_blocks = !pairs || below(2);
    p.batch = 1 + below(3), p.nheads_k = 1 + below(2), p.group = 1 + below(4), p.nheads = p.nheads_k * p.group;
    p.headdim = p.headdim_v = 64, p.scale = 1, p.top_left = below(2);
    p.window_left = below(3) ? -1 : below(300), p.window_right = below(2) ? 0 : below(3) ? -1 : below(200);
    p.seqlen_q = 2 + below(500), p.seqlen_k = below(2) ? p.seqlen_q : 1 + below(500);
    if (varlen) {
        p.seqlen_q = p.seqlen_k = 1;
        for (int b = 0; b < p.batch; ++b) {
            const int rows = below(300), keys = below(4) ? rows : below(300);
            c.cu_q.push_back(c.cu_q.back() + rows), c.cu_k.push_back(c.cu_k.back() + keys);
            if (rows > p.seqlen_q) p.seqlen_q = rows;
            if (keys > p.seqlen_k) p.seqlen_k = keys;
        }
        p.cu_seqlens_q = c.cu_q.data(), p.cu_seqlens_k = c.cu_k.data(), p.total_q = c.cu_q.back(), p.total_k = c.cu_k.back();
    }
    const int choices[] = {1, p.nheads_k, p.nheads}, style = below(6);
    if (by_blocks) {
        BlockMaskView& x = p.blocks;
        x.row_shift = 6 + below(2), x.key_shift = 6 + below(2);
        const int heads = choices[below(3)], rows = ((p.seqlen_q - 1) >> x.row_shift) + 1, keys = ((p.seqlen_k - 1) >> x.key_shift) + 1;
        const bool of_batches = below(2);
        x.heads_of_entry = p.nheads / heads;
        x.row = keys, x.head = heads == 1 ? 0 : rows * keys, x.batch = of_batches ? heads * rows * keys : 0;
        c.blocks.resize(size_t(rows * keys * heads * (of_batches ? p.batch : 1)));
        for (uint8_t& element : c.blocks) element = random_bool(style);
        x.data = c.blocks.data();
    }
    if (pairs) {
        const bool of_heads = below(2), of_batches = below(2);
        const int64_t of_head = int64_t(p.seqlen_q) * p.seqlen_k;
        p.mask.row = p.seqlen_k, p.mask.head = of_heads ? of_head : 0, p.mask.batch = of_batches ? of_head * (of_heads ? p.nheads : 1) : 0;
        c.mask.resize(size_t(of_head * (of_heads ? p.nheads : 1) * (of_batches ? p.batch : 1)));
        const int run = 1 + below(3 * p.seqlen_k), step = 1 + below(200);  // runs of equal elements, over rows or within them
        uint8_t own = 0;
        for (size_t i = 0; i < c.mask.size(); ++i) {
            if (i % size_t(run) == 0) own = random_bool(style);
            c.mask[i] = own && (below(step) || style == 0);
        }
        p.mask.data = c.mask.data();
        if (by_blocks && below(3) == 0) p.mask.row = 0;  // a mask of keys beside one by blocks
    }
    // The call of parts of groups (walk_parts.h): each part has a key head of its own.
    const int parts = p.group % 2 == 0 && below(2) ? 2 : below(3) ? 1 : p.group;
    p.nheads_k *= parts, p.group /= parts;
}

// What the masks show, causal and windows aside; and all together.
bool masks_show(const AttentionParams& p, int b, int head, int i, int j) {
    if (p.blocks.data && block_hides(p, b, head, i, j)) return false;
    const uint8_t* const mask = static_cast<const uint8_t*>(p.mask.data);
    return !mask || mask[b * p.mask.batch + head * p.mask.head + i * p.mask.row + j];
}
bool sees(const AttentionParams& p, const Sequence& s, int b, int head, int i, int j) {
    const KeyRange range = key_range(p, s, i);
    return j >= range.begin && j < range.end && masks_show(p, b, head, i, j);
}

// The workspace.
struct Memory {
    std::vector<uint64_t> pairs, keys;
    std::vector<SeenWord> words;
    std::vector<uint32_t> tiles;
    std::vector<MaskedWalk> walks;
};

// As seen_blocks.cu, with words of keys.
void fill_blocks(const AttentionParams& p, SeenBlocks& to, Memory& memory) {
    const SeenBlocksShape& shape = to.shape;
    memory.words.assign(size_t(shape.words()), {0, 0});
    to.words = memory.words.data();
    if (shape.pairs) {
        memory.pairs.assign(size_t(shape.blocks()) * kSeenBlock, 0x5555AAAA12345678), memory.keys.assign(size_t(shape.blocks()), 0);
        to.pairs = memory.pairs.data(), to.keys = memory.keys.data();
    }
    for (int64_t entry = 0; entry < shape.entries(); ++entry)
        for (int m = 0; m < shape.row_blocks; ++m)
            for (int n = 0; n < shape.key_blocks; ++n) {
                const int b = int(entry / shape.heads), head = int(entry % shape.heads) * shape.heads_of_entry;
                SeenWord& word = memory.words[size_t(shape.word(entry, m) + n / 32)];
                if (!shape.pairs) {
                    word.seen |= uint32_t(masks_show(p, b, head, m * kSeenBlock, n * kSeenBlock)) << n % 32;
                    continue;
                }
                const Sequence s = sequence_of(p, b);
                uint64_t keys = 0, own[kSeenBlock] = {};
                bool cut = false;
                for (int c = 0; c < kSeenBlock; ++c)
                    for (int r = 0; r < kSeenBlock; ++r) {
                        const int i = m * kSeenBlock + r, j = n * kSeenBlock + c;
                        if (j >= s.seqlen_k) continue;
                        const bool exists = i < s.seqlen_q, shown = !exists || sees(p, s, b, head, i, j);
                        own[c] |= uint64_t(shown) << r, keys |= uint64_t(exists && shown) << c, cut |= !shown;
                    }
                const int64_t block = shape.block(entry, m) + n;
                memory.keys[size_t(block)] = keys;
                word.seen |= uint32_t(keys != 0) << n % 32, word.cut |= uint32_t(keys && cut) << n % 32;
                for (int c = 0; c < kSeenBlock && keys && cut; ++c) memory.pairs[size_t(block * kSeenBlock + c)] = own[c];
            }
}

// As masked_tiles.cu.
template <int kRows>
TileSeen seen_of_walk(const MaskedTiles& to, const VisibleBand& band, int b, int head_k, int m, int block) {
    const WalkEntries entries = entries_of_walk(to, b, head_k);
    TileSeen all{};
    for (int x = 0; x < entries.count; ++x) add_seen<kRows>(all, to.seen, band, entries.first + x, m, block);
    return all;
}
template <int kRows>
void fill_walks(const AttentionParams& p, MaskedTiles& to, Memory& memory) {
    memory.tiles.assign(size_t(walks_of(to)) * to.tiles_q, ~0u), memory.walks.assign(size_t(walks_of(to)), {});
    to.tiles = memory.tiles.data(), to.walks = memory.walks.data();
    for (int b = 0; b < to.batches; ++b)
        for (int head_k = 0; head_k < to.heads_k; ++head_k) {
            const VisibleBand band = visible_band(p, sequence_of(p, b));
            for (int m = 0; m < to.tiles_q; ++m) {
                const Range blocks = key_blocks_of(band, m * kRows * kSeenBlock, kRows * kSeenBlock, 2 * kSeenBlock);
                for (int block = 0, before = 0; block < to.key_blocks; ++block) {
                    TileSeen seen{};
                    if (block >= blocks.begin && block < blocks.end) seen = seen_of_walk<kRows>(to, band, b, head_k, m, block);
                    memory.tiles[size_t(to.walk_of(b, head_k, block) * to.tiles_q + m)] = tile_state(seen.anything(), before, seen.cut);
                    before += seen.anything();
                }
            }
            for (int block = 0; block < to.key_blocks; ++block) {
                uint32_t* const tiles = memory.tiles.data() + to.walk_of(b, head_k, block) * to.tiles_q;
                MaskedWalk& walk = memory.walks[size_t(to.walk_of(b, head_k, block))];
                uint64_t keys[2] = {};
                for (int m = 0; m < to.tiles_q; ++m) {
                    if (!tiles[m]) continue;
                    const TileSeen seen = seen_of_walk<kRows>(to, band, b, head_k, m, block);
                    tiles[walk.count++] = tile_of_state(m, tiles[m]).packed();
                    keys[0] |= seen.keys[0], keys[1] |= seen.keys[1];
                }
                // Without states: the same tiles, as far as causal and windows leave any.
                const Range met = query_tiles_of(band, block * 128, kRows * kSeenBlock, 2 * kSeenBlock);
                int count = 0;
                for (int m = met.begin; m < met.end; ++m) {
                    const TileSeen seen = seen_of_walk<kRows>(to, band, b, head_k, m, block);
                    if (!seen.anything()) continue;
                    const SeenTile tile = SeenTile::from(tiles[count++]);
                    require(tile.m == m && tile.cut == seen.cut, "a walk without states visits other tiles");
                }
                require(count == walk.count, "a walk without states visits fewer tiles");
                for (int x = 0; x < 8; ++x)
                    walk.unseen[x] = uint16_t(~(keys[x / 4] >> x % 4 * 16) & bits_of_range<16>(0, band.seqlen_k, block * 128 + x * 16));
            }
        }
}

long visited, skipped, cut_tiles;

// What masks.cuh and a thread's registers make of a tile that is visited: whether element i of `thread` is shown.
template <int kRows>
struct ThreadPairs {
    uint32_t seen[kRows];
    ThreadPairs(const SeenBlocks& blocks, int64_t entry, int m, int block, bool cut, int thread) {
        const SeenBlocksShape& shape = blocks.shape;
        const BlocksOfTile tile = blocks_of_tile<kRows, 2>(blocks.words + shape.word(entry, m * kRows), shape.words_of_row(), 2 * block,
                                                           shape.row_blocks - m * kRows, shape.key_blocks);
        const int x = thread / 128, key = thread / 32 % 4 * 16 + thread % 32 / 4;
        for (int r = 0; r < kRows; ++r) {
            seen[r] = cut && !(tile.seen >> (2 * r + x) & 1) ? 0u : ~0u;
            if (!cut || !(tile.cut >> (2 * r + x) & 1)) continue;
            const uint64_t* const words = blocks.pairs + (shape.block(entry, m * kRows + r) + 2 * block + x) * kSeenBlock + key;
            seen[r] = pack_seen(words[0], words[8], thread % 4);
        }
    }
    bool shows(int i) const { return seen[i / 32] >> seen_bit(i % 32) & 1; }
};

template <int kRows>
void check_tile(const AttentionParams& p, const Sequence& s, const VisibleBand& band, const MaskedTiles& all, int b, int head_k,
                int of_group, SeenTile tile, int block) {
    const int head = head_k * p.group + of_group;
    const int64_t entry = all.seen.shape.entry(b, head_k * p.group) + of_group / all.seen.shape.heads_of_entry;  // masks.cuh
    for (int thread = 0; thread < 256; ++thread) {
        const ThreadPairs<kRows> pairs(all.seen, entry, tile.m, block, tile.cut, thread);
        for (int element = 0; element < 32 * kRows; ++element) {  // fragments.cuh
            const int i = tile.m * kRows * kSeenBlock + element / 4 * 8 + thread % 4 * 2 + element % 2;
            const int j = block * 128 + thread / 32 * 16 + thread % 32 / 4 + element / 2 % 2 * 8;
            if (i >= s.seqlen_q || j >= s.seqlen_k) continue;
            const bool shown = pairs.shows(element) && j <= i + band.right && j >= i + band.left;
            require(shown == sees(p, s, b, head, i, j), "a pair is shown that the masks hide, or the other way round");
        }
    }
}

template <int kRows>
void check(const AttentionParams& p) {
    constexpr int kM = kRows * kSeenBlock;
    BackwardPlan plan;
    plan.block_m = kM, plan.block_n = 128;
    MaskedTiles all = masked_tiles(p, plan);
    Memory memory;
    fill_blocks(p, all.seen, memory), fill_walks<kRows>(p, all, memory);
    for (int b = 0; b < p.batch; ++b) {
        const Sequence s = sequence_of(p, b);
        const VisibleBand band = visible_band(p, s);
        for (int head_k = 0; head_k < p.nheads_k; ++head_k) {
            std::vector<int> visits(size_t(all.tiles_q), 0);  // of lower keys
            for (int key0 = 0; key0 < s.seqlen_k; key0 += 128) {
                const int64_t walk = all.walk_of(b, head_k, key0 / 128);
                const Range range = query_tiles_of(band, key0, kM, 128);
                std::vector<char> walked(size_t(all.tiles_q), 0);
                for (int step = 0, last = -1; step < all.walks[walk].count; ++step) {
                    const SeenTile tile = SeenTile::from(all.tiles[walk * all.tiles_q + step]);
                    require(tile.m > last && tile.m >= range.begin && tile.m < range.end, "tiles are out of order or outside the walk");
                    require(tile.before == visits[size_t(tile.m)]++, "a turn does not follow that of the block before");
                    last = tile.m, walked[size_t(tile.m)] = 1, ++visited, cut_tiles += tile.cut;
                    for (int head = 0; head < p.group; ++head) check_tile<kRows>(p, s, band, all, b, head_k, head, tile, key0 / 128);
                }
                skipped += range.end - range.begin - all.walks[walk].count;
                for (int j = key0; j < key0 + 128; ++j) {
                    bool seen = j >= s.seqlen_k;
                    for (int head = head_k * p.group; head < (head_k + 1) * p.group && j < s.seqlen_k; ++head)
                        for (int i = 0; i < s.seqlen_q; ++i)
                            if (sees(p, s, b, head, i, j)) {
                                require(walked[size_t(i / kM)], "a tile is left out that a row sees");
                                seen = true;
                            }
                    require(!seen == (all.walks[walk].unseen[(j - key0) / 16] >> (j - key0) % 16 & 1), "the wrong keys are zeroed");
                }
            }
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned calls = argc > 1 ? unsigned(std::atoi(argv[1])) : 300;
    for (seed = 0; seed < calls; ++seed) {
        generator.seed(seed);
        Call call;
        make(call);
        if (seed % 2) check<2>(call.p);
        else check<1>(call.p);
    }
    std::printf("%u calls: %ld tiles visited, %ld of them cut, %ld left out\n", calls, visited, cut_tiles, skipped);
    return visited > cut_tiles && cut_tiles > 0 && skipped > 0 ? 0 : 1;
}
