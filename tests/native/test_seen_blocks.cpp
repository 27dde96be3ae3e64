// test_seen_blocks.cpp: which tiles wgmma_sm90 visits under masks by blocks and masks of pairs, and what it hides in them, against the mask
// pair by pair, for random calls. The walk and the kernel that writes the bits are written again here, but every decision is that of the
// kernels: attention/common/seen_blocks.h, attention/common/mask.h and work_list.h, which are plain C++.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "attention/common/seen_blocks.h"
#include "attention/forward/common/work_list.h"
#include "random_calls.h"

namespace {

using namespace fa;
using namespace random_calls;

int largest(int a, int b) { return a > b ? a : b; }
int smallest(int a, int b) { return a < b ? a : b; }

struct Call {
    AttentionParams p{};
    std::vector<uint8_t> blocks, mask;
    std::vector<int32_t> cu_q{0}, cu_k{0};
};

void make_blocks(Call& c) {
    AttentionParams& p = c.p;
    const int choices[] = {1, p.nheads_k, p.nheads}, heads = choices[below(3)], batches = below(2) ? 1 : p.batch, rate = 10 * below(11);
    BlockMaskView& x = p.blocks;
    x.heads_of_entry = p.nheads / heads, x.row_shift = 6 + below(2), x.key_shift = 6 + below(2);
    const int rows = ((p.seqlen_q - 1) >> x.row_shift) + 1, keys = ((p.seqlen_k - 1) >> x.key_shift) + 1;
    x.row = keys, x.head = below(4) || heads > 1 ? int64_t(rows) * keys : 0, x.batch = batches > 1 ? int64_t(rows) * keys * heads : 0;
    c.blocks.resize(size_t(rows) * keys * heads * batches);
    for (uint8_t& byte : c.blocks) byte = below(100) < rate ? uint8_t(1 << below(8)) : 0;
    x.data = c.blocks.data();
}
void make_mask(Call& c, bool rows_differ) {
    AttentionParams& p = c.p;
    const int64_t rows = rows_differ ? p.seqlen_q : 1, heads = below(2) ? 1 : p.nheads, batches = below(2) ? 1 : p.batch;
    const int gap = below(3);  // rows need not be contiguous
    p.mask.row = rows_differ ? p.seqlen_k + gap : 0, p.mask.head = heads > 1 ? rows * (p.seqlen_k + gap) : 0;
    p.mask.batch = batches > 1 ? rows * (p.seqlen_k + gap) * heads : 0;
    c.mask.resize(size_t(batches * heads * rows * (p.seqlen_k + gap)));
    const int style = below(5), rate = 10 * below(11), square = 16 << below(4);
    std::vector<uint8_t> keys(size_t(p.seqlen_k + gap)), squares(4096);
    for (uint8_t& key : keys) key = below(3) == 0;
    for (uint8_t& one : squares) one = uint8_t(below(3));
    for (size_t at = 0; at < c.mask.size(); ++at) {
        const int i = int(int64_t(at) / (p.seqlen_k + gap) % rows), j = int(int64_t(at) % (p.seqlen_k + gap));
        const int of_square = squares[size_t(i / square * 37 + j / square * 11) % squares.size()];
        bool sees = below(100) < rate;
        if (style == 1) sees = of_square == 2 || (of_square == 1 && below(2));  // squares that are hidden, mixed and seen
        if (style == 2) sees = sees && keys[size_t(j)];                         // keys that nobody sees
        if (style == 3) sees = j <= i + 70;
        if (style == 4) sees = rate > 50;
        c.mask[at] = sees ? uint8_t(1 << below(8)) : 0;
    }
    p.mask.data = c.mask.data();
}
void make(Call& c) {
    AttentionParams& p = c.p;
    const bool varlen = below(4) == 0;
    p.batch = 1 + below(3), p.nheads_k = 1 + below(2), p.group = 1 + below(3), p.nheads = p.nheads_k * p.group;
    p.headdim = p.headdim_v = 64, p.scale = 1, p.top_left = below(2);
    p.window_left = below(3) ? -1 : below(300), p.window_right = below(2) ? 0 : below(3) ? -1 : below(200);
    p.seqlen_q = 1 + below(400), p.seqlen_k = below(2) ? p.seqlen_q : 1 + below(below(4) ? 400 : 5000);
    if (varlen) {
        p.seqlen_q = p.seqlen_k = 1;
        for (int b = 0; b < p.batch; ++b) {
            const int rows = below(300), keys = below(4) ? rows : below(300);
            c.cu_q.push_back(c.cu_q.back() + rows), c.cu_k.push_back(c.cu_k.back() + keys);
            p.seqlen_q = largest(p.seqlen_q, rows), p.seqlen_k = largest(p.seqlen_k, keys);
        }
        p.cu_seqlens_q = c.cu_q.data(), p.cu_seqlens_k = c.cu_k.data(), p.total_q = c.cu_q.back(), p.total_k = c.cu_k.back();
    }
    const int masks = varlen ? 0 : below(4);
    if (masks != 1) make_blocks(c);
    if (masks == 1) make_mask(c, true);
    if (masks >= 2) make_mask(c, masks == 2);
}

bool mask_shows(const AttentionParams& p, int b, int head, int i, int j) {
    return !p.mask.data || static_cast<const uint8_t*>(p.mask.data)[b * p.mask.batch + head * p.mask.head + i * p.mask.row + j];
}
bool sees(const AttentionParams& p, const Sequence& s, int b, int head, int i, int j) {
    const KeyRange range = key_range(p, s, i);
    if (j < range.begin || j >= range.end || !mask_shows(p, b, head, i, j)) return false;
    return !p.blocks.data || !block_hides(p, b, head, i, j);
}
// Whether any row of the sequence sees the key, in a head that shares its key head.
bool anyone_sees(const AttentionParams& p, const Sequence& s, int b, int head_k, int j) {
    for (int head = head_k * p.group; head < (head_k + 1) * p.group; ++head)
        for (int i = 0; i < s.seqlen_q; ++i)
            if (sees(p, s, b, head, i, j)) return true;
    return false;
}

// ---- what seen_blocks.cu writes ----

struct Written {
    std::vector<char> memory;
    SeenBlocks blocks;
};
void write_block(const AttentionParams& p, SeenBlocks& to, int64_t entry, int m, int n) {
    const int b = int(entry / to.shape.heads), head = int(entry % to.shape.heads) * to.shape.heads_of_entry;
    SeenWord& word = to.words[to.shape.word(entry, m) + n / 32];
    if (!to.shape.pairs) {
        if (blocks_of_row(p, b, head, m * kSeenBlock)[n * kSeenBlock >> p.blocks.key_shift]) word.seen |= 1u << n % 32;
        return;
    }
    const Sequence s = sequence_of(p, b);
    const uint64_t all = bits_of_range<kSeenBlock>(0, p.seqlen_k, n * kSeenBlock);
    uint64_t rows[kSeenBlock], keys = 0;
    bool whole = true;
    for (int r = 0; r < kSeenBlock; ++r) {
        const int i = m * kSeenBlock + r;
        rows[r] = i < p.seqlen_q ? 0 : all;
        for (int c = 0; c < kSeenBlock && i < p.seqlen_q && n * kSeenBlock + c < p.seqlen_k; ++c)
            if (sees(p, s, b, head, i, n * kSeenBlock + c)) rows[r] |= uint64_t(1) << c;
        whole = whole && rows[r] == all;
        if (i < p.seqlen_q) keys |= rows[r];
    }
    const int64_t block = to.shape.block(entry, m) + n;
    to.keys[block] = keys;
    if (keys) word.seen |= 1u << n % 32;
    if (keys && !whole) word.cut |= 1u << n % 32, std::memcpy(to.pairs + block * kSeenBlock, rows, sizeof rows);
}
void write(const AttentionParams& p, Written& written) {
    const SeenBlocksShape shape = seen_blocks_shape(p);
    written.memory.assign(seen_blocks_bytes(shape), char(0x5A));
    char* const begin = written.memory.data();
    SeenBlocks& to = written.blocks = seen_blocks_in(begin, shape);
    require(reinterpret_cast<char*>(to.words + shape.words()) <= begin + written.memory.size(), "the workspace is too small");
    require(!shape.pairs || to.pairs + shape.blocks() * kSeenBlock <= to.keys, "words of rows and keys overlap");
    require(!shape.pairs || reinterpret_cast<char*>(to.keys + shape.blocks()) <= reinterpret_cast<char*>(to.words), "keys overlap");
    for (int64_t i = 0; i < shape.words(); ++i) to.words[i] = {0, 0};
    for (int64_t entry = 0; entry < shape.entries(); ++entry)
        for (int m = 0; m < shape.row_blocks; ++m)
            for (int n = 0; n < shape.key_blocks; ++n) write_block(p, to, entry, m, n);
}

// ---- the walk of forward/wgmma_sm90/seen_blocks.cuh ----

template <int kM, int kN>
struct Tiles {
    static constexpr int kBlockM = kM, kBlockN = kN;
    static constexpr bool kCaches = false;
};

template <int kM, int kN>
void check_tile(const AttentionParams& p, const SeenBlocks& blocks, const Sequence& s, const ForwardWork& w, int n,
                const BlocksOfTile& tile) {
    constexpr int kRows = kM / kSeenBlock, kKeys = kN / kSeenBlock;
    const int64_t first_block = blocks.shape.block(blocks.shape.entry(w.batch, w.head), w.row0 / kSeenBlock) + n * kKeys;
    const auto block = [&](int x) { return first_block + x / kKeys * blocks.shape.key_blocks + x % kKeys; };
    const int last_row = smallest(w.row0 + kM, w.seqlen_q) - 1;
    const bool cut = !tile.is_whole<kRows, kKeys>(), looks = cut || (n + 1) * kN - 1 > last_row + w.right || n * kN < w.row0 + w.left;
    require(!tile.cut || blocks.shape.pairs, "a block is cut without a mask of pairs");
    for (int j = n * kN; j < smallest((n + 1) * kN, w.seqlen_k); ++j) {
        const int column = j % kN / kSeenBlock, c = j % kSeenBlock;
        const auto keys = [&](int x) { return tile.cut >> x & 1 ? blocks.keys[block(x)] : tile.seen >> x & 1 ? ~uint64_t(0) : 0; };
        const bool zeroed = looks && hides_key<kRows, kKeys>(column, c, largest(0, j - w.right - w.row0),
                                                             smallest(last_row - w.row0, j - w.left - w.row0), keys);
        bool seen = false;
        for (int i = w.row0; i <= last_row; ++i) {
            const int group = (i - w.row0) / kSeenBlock, x = group * kKeys + column;  // as masked_tiles: edges of a warpgroup
            const int right_tile = clamp_to(w.row0 + group * 64 + w.right, 0, w.seqlen_k) / kN;
            const int left_tile = (clamp_to(w.row0 + group * 64 + 63 + w.left, 0, w.seqlen_k) + kN - 1) / kN;
            bool shown = !(n >= right_tile && j > i + w.right) && !(n < left_tile && j < i + w.left);
            if (cut) {
                uint64_t word = tile.seen >> x & 1 ? ~uint64_t(0) : 0;
                if (tile.cut >> x & 1) word = blocks.pairs[block(x) * kSeenBlock + i % kSeenBlock];
                shown = shown && (word >> c & 1);
            }
            require(shown == sees(p, s, w.batch, w.head, i, j), "a pair is shown that the mask hides, or the other way round");
            seen = seen || shown;
        }
        require(!(zeroed && seen), "the values of a key that a row sees are zeroed");
        const bool outside = j < clamp_to(w.left, 0, w.seqlen_k) || j >= clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
        require(zeroed || outside || seen || anyone_sees(p, s, w.batch, w.head / p.group, j), "values that nobody sees remain");
    }
}

long visited, skipped, whole;

template <int kM, int kN>
void check_forward(const AttentionParams& p, const SeenBlocks& blocks) {
    constexpr int kRows = kM / kSeenBlock, kKeys = kN / kSeenBlock;
    const ForwardWorkList list = forward_work_list(p, kM, 7);
    for (int index = 0; index < list.items; ++index) {
        ForwardWork w;
        find_work<Tiles<kM, kN>>(p, list, index, w);
        if (w.state != WorkState::kRows) continue;
        const Sequence s = sequence_of(p, w.batch);
        const int last_row = smallest(w.row0 + kM, w.seqlen_q) - 1;
        const SeenWord* const words = blocks.words + blocks.shape.word(blocks.shape.entry(w.batch, w.head), w.row0 / kSeenBlock);
        std::vector<char> walked(size_t(w.seqlen_k / kN + 2), 0);
        const auto look = [&](int n) {
            return blocks_of_tile<kRows, kKeys>(words, blocks.shape.words_of_row(), n * kKeys, (w.seqlen_q - w.row0 + 63) / 64,
                                                (w.seqlen_k + 63) / 64);
        };
        bool none = true;
        for (int n = w.last_tile; n >= w.first_tile && n * kN < w.seqlen_k; --n) {
            const BlocksOfTile tile = look(n);
            if (!tile.some) {
                ++skipped;
                continue;
            }
            none = false, ++visited, whole += tile.is_whole<kRows, kKeys>(), walked[size_t(n)] = 1;
            check_tile<kM, kN>(p, blocks, s, w, n, tile);
        }
        if (none && w.last_tile * kN < w.seqlen_k) check_tile<kM, kN>(p, blocks, s, w, w.last_tile, look(w.last_tile));
        for (int i = w.row0; i <= last_row; ++i)
            for (int j = 0; j < w.seqlen_k; ++j)
                require(walked[size_t(j / kN)] || !sees(p, s, w.batch, w.head, i, j), "a tile is left out that a row sees");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned calls = argc > 1 ? unsigned(std::atoi(argv[1])) : 600;
    for (seed = 0; seed < calls; ++seed) {
        generator.seed(seed);
        Call call;
        make(call);
        if (!has_seen_blocks(call.p)) continue;
        Written written;
        write(call.p, written);
        if (seed % 3 == 0) check_forward<128, 128>(call.p, written.blocks);
        else if (seed % 3 == 1) check_forward<128, 64>(call.p, written.blocks);
        else check_forward<192, 128>(call.p, written.blocks);
    }
    std::printf("%u calls: %ld tiles visited, %ld of them whole, %ld left out\n", calls, visited, whole, skipped);
    return visited > 0 && skipped > 0 && whole > 0 ? 0 : 1;
}
