// test_tile_intervals.cpp: which tiles wgmma_sm90 visits under masks by intervals, and what it compares in them, against the mask pair by
// pair, for random calls. The walks are written again here, but every decision is that of the kernels: attention/common/tile_intervals.h,
// attention/common/mask.h, work_list.h and tiles.h, which are plain C++.
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "attention/backward/wgmma_sm90/tiles.h"
#include "attention/common/tile_intervals.h"
#include "attention/forward/common/work_list.h"
#include "random_calls.h"

namespace {

using namespace fa;
using namespace random_calls;

struct Call {
    AttentionParams p{};
    std::vector<int32_t> numbers, cu_q{0}, cu_k{0};
};

int32_t random_number(int style, int run_number, int x, int rows) {
    const int32_t extremes[] = {INT32_MIN, INT32_MAX, 0, rows};
    if (style == 0) return below(rows + 20) - 10;
    if (style == 1 || (style == 2 && below(20))) return run_number;
    if (style == 2) return extremes[below(4)];
    if (style == 4) return (x + 1) * rows / 5 + below(3);       // all keys share two intervals
    return style == 3 ? (x % 2 ? rows : 0) : x % 2 ? 0 : rows;  // everything is hidden; nothing is, in causal calls
}

void make(Call& c) {
    AttentionParams& p = c.p;
    const bool varlen = below(3) == 0, causal = below(2);
    p.batch = 1 + below(3), p.nheads_k = 1 + below(2), p.group = 1 + below(3), p.nheads = p.nheads_k * p.group;
    p.headdim = p.headdim_v = 64, p.scale = 1, p.top_left = below(2);
    p.window_left = below(3) ? -1 : below(300), p.window_right = causal ? 0 : below(3) ? -1 : below(200);
    p.seqlen_q = 1 + below(500), p.seqlen_k = below(2) ? p.seqlen_q : 1 + below(500);
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
    const int count = causal ? 1 + below(2) : 2 + 2 * below(2);
    p.intervals.form = causal ? (count == 1 ? RowIndicesForm::kFrom : RowIndicesForm::kBetween)
                              : (count == 2 ? RowIndicesForm::kOutside : RowIndicesForm::kTwoIntervals);
    const int choices[] = {1, p.nheads_k, p.nheads}, heads = choices[below(3)], keys = varlen ? p.total_k : p.seqlen_k;
    p.intervals.heads_of_entry = p.nheads / heads;
    p.intervals.key = count, p.intervals.head = int64_t(keys) * count, p.intervals.batch = varlen ? 0 : heads * p.intervals.head;
    c.numbers.resize(size_t(keys) * count * heads * (varlen ? 1 : p.batch) + 1);
    const int style = below(6), run = 1 + below(90);
    int own[4] = {};
    for (size_t i = 0; i + 1 < c.numbers.size(); ++i) {
        if (i / count % run == 0) own[i % count] = below(p.seqlen_q + 40) - 20;
        c.numbers[i] = random_number(style, own[i % count], int(i % count), p.seqlen_q);
    }
    p.intervals.data = c.numbers.data();
}

bool sees(const AttentionParams& p, const Sequence& s, int b, int head, int i, int j) {
    const KeyRange range = key_range(p, s, i);
    return j >= range.begin && j < range.end && !interval_hides(p, b, head, i, j);
}
// Whether any row of the sequence sees the key, in a head that shares its key head.
bool anyone_sees(const AttentionParams& p, const Sequence& s, int b, int head_k, int j) {
    for (int head = head_k * p.group; head < (head_k + 1) * p.group; ++head)
        for (int i = 0; i < s.seqlen_q; ++i)
            if (sees(p, s, b, head, i, j)) return true;
    return false;
}
HiddenRows hidden_rows_of(const AttentionParams& p, int b, int head, int j) {
    return hidden_rows(p, row_indices_of(p, b, head) + j * p.intervals.key);
}
// As interval_bounds.cu.
HiddenBounds bounds_of(const AttentionParams& p, const Sequence& s, int b, int head, int tile, int keys) {
    HiddenBounds bounds;
    bounds.clear();
    for (int j = tile * keys; j < (tile + 1) * keys && j < s.seqlen_k; ++j) add_key(bounds, p, s, hidden_rows_of(p, b, head, j), j);
    return bounds;
}

int largest(int a, int b) { return a > b ? a : b; }
int smallest(int a, int b) { return a < b ? a : b; }

template <int kM, int kN>
struct Tiles {
    static constexpr int kBlockM = kM, kBlockN = kN;
    static constexpr bool kCaches = false;
};

// A tile of an item, as forward/wgmma_sm90/intervals.cuh takes it: the producer's rows and hidden keys, and what each warp compares.
template <int kM, int kN>
void check_forward_tile(const AttentionParams& p, const Sequence& s, const ForwardWork& w, int n, bool cut) {
    const HiddenBounds bounds = bounds_of(p, s, w.batch, w.head, n, kN);
    const int rows = smallest(kM, w.seqlen_q - w.row0);
    for (int j = n * kN; j < smallest((n + 1) * kN, w.seqlen_k); ++j) {
        TileRows hidden[2] = {};
        for (int x = 0; x < 2 && cut; ++x)
            hidden[x] = TileRows::from(rows_in_tile(hidden_rows_of(p, w.batch, w.head, j), x, p.intervals.form, w.row0, kM).packed());
        const bool zeroed = cut && hides_all(hidden, largest(0, j - w.right - w.row0), smallest(rows - 1, j - w.left - w.row0));
        bool seen = false;
        for (int r = 0; r < rows; ++r) {
            const int i = w.row0 + r, first = i / 16 * 16, group = r / 64;  // as masked_tiles: edges of a warpgroup
            const int right_tile = clamp_to(w.row0 + group * 64 + w.right, 0, w.seqlen_k) / kN;
            const int left_tile = (clamp_to(w.row0 + group * 64 + 63 + w.left, 0, w.seqlen_k) + kN - 1) / kN;
            bool shown = !(n >= right_tile && j > i + w.right) && !(n < left_tile && j < i + w.left);
            if (cut && bounds.seen_by(first, first + 15) != Seen::kEverything)
                for (int x = 0; x < intervals_of_tile(p.intervals.form); ++x) shown = shown && !hidden[x].hides(r);
            require(shown == sees(p, s, w.batch, w.head, i, j), "forward: a pair is shown that the mask hides, or the other way round");
            seen = seen || shown;
        }
        require(!(zeroed && seen), "forward: the values of a key that a row sees are zeroed");
        const bool outside = j < clamp_to(w.left, 0, w.seqlen_k) || j >= clamp_to(w.seqlen_q + w.right, 0, w.seqlen_k);
        require(zeroed || outside || seen || anyone_sees(p, s, w.batch, w.head / p.group, j), "forward: values that nobody sees remain");
    }
}

long visited, skipped;

template <int kM, int kN>
void check_forward(const AttentionParams& p) {
    const ForwardWorkList list = forward_work_list(p, kM, 7);
    for (int index = 0; index < list.items; ++index) {
        ForwardWork w;
        find_work<Tiles<kM, kN>>(p, list, index, w);
        if (w.state != WorkState::kRows) continue;
        const Sequence s = sequence_of(p, w.batch);
        const int last_row = smallest(w.row0 + kM, w.seqlen_q) - 1;
        std::vector<char> walked(size_t(w.seqlen_k / kN + 2), 0);
        for (int n = w.last_tile; n >= w.first_tile; --n) {
            const Seen seen = bounds_of(p, s, w.batch, w.head, n, kN).seen_by(w.row0, last_row);
            if (seen == Seen::kNothing) {
                ++skipped;
                continue;
            }
            ++visited, walked[size_t(n)] = 1;
            check_forward_tile<kM, kN>(p, s, w, n, seen == Seen::kSome);
        }
        for (int i = w.row0; i <= last_row; ++i)
            for (int j = 0; j < w.seqlen_k; ++j)
                require(walked[size_t(j / kN)] || !sees(p, s, w.batch, w.head, i, j), "forward: a tile is left out that a row sees");
    }
}

// A block of keys of one key head, as backward/wgmma_sm90/intervals.cuh takes it.
template <int kM>
void check_keys(const AttentionParams& p, const Sequence& s, int b, int head_k, int key0, std::vector<int>& turns) {
    constexpr int kN = 128;
    const VisibleBand band = visible_band(p, s);
    const Range tiles = query_tiles_of(band, key0, kM, kN);
    HiddenBounds bounds;
    bounds.clear();
    const int first_head = head_k * p.group, end_head = first_head + p.group;
    for (int head = first_head; head < end_head; head += p.intervals.heads_of_entry) merge(bounds, bounds_of(p, s, b, head, key0 / kN, kN));
    const TileGaps gaps = tile_gaps(bounds, tiles.begin, tiles.end, kM, s.seqlen_q);
    std::vector<char> walked(size_t(s.seqlen_q / kM + 1), 0);
    for (int step = tiles.begin; step < tiles.end - gaps.tiles(); ++step) {
        const int m = gaps.tile_of(step);
        require(m >= tiles.begin && m < tiles.end && !walked[size_t(m)], "backward: a tile is visited twice, or lies outside the walk");
        walked[size_t(m)] = 1, ++visited;
    }
    skipped += gaps.tiles();
    // In order: the tiles of the lists (meets_by_intervals in masked_tiles.cu).
    for (int m = 0; m * kM < s.seqlen_q; ++m) {
        const Range blocks = key_blocks_of(band, m * kM, kM, kN);
        const bool inside = key0 / kN >= blocks.begin && key0 / kN < blocks.end;
        const bool meets = inside && bounds.seen_by(m * kM, smallest((m + 1) * kM, s.seqlen_q) - 1) != Seen::kNothing;
        require(meets == (walked[size_t(m)] != 0), "backward: a walk in order visits other tiles than one in any order");
        turns[size_t(m)] += meets;
    }
    for (int j = key0; j < smallest(key0 + kN, s.seqlen_k); ++j) {
        bool unseen = true;
        for (int head = first_head; head < end_head && unseen; head += p.intervals.heads_of_entry)
            unseen = hides_all(hidden_rows_of(p, b, head, j), largest(0, j - band.right), smallest(s.seqlen_q - 1, j - band.left));
        require(unseen == !anyone_sees(p, s, b, head_k, j), "backward: the wrong keys are zeroed");
        require(!unseen || may_have_unseen_key(bounds), "backward: the bounds do not know of a key that nobody sees");
        for (int head = first_head; head < end_head; ++head) {
            const HiddenRows hidden = hidden_rows_of(p, b, head, j);
            for (int i = 0; i < s.seqlen_q; ++i) {
                const int m = i / kM, row0 = m * kM;
                const bool seen = sees(p, s, b, head, i, j);
                require(walked[size_t(m)] || !seen, "backward: a tile is left out that a row sees");
                if (!walked[size_t(m)]) continue;
                bool shown = j <= i + band.right && j >= i + band.left;
                if (bounds.seen_by(row0, smallest(row0 + kM, s.seqlen_q) - 1) != Seen::kEverything)
                    for (int x = 0; x < intervals_of_tile(p.intervals.form); ++x)
                        shown = shown && !rows_in_tile(hidden, x, p.intervals.form, row0, kM).hides(i - row0);
                require(shown == seen, "backward: a pair is shown that the mask hides, or the other way round");
            }
        }
    }
}
template <int kM>
void check_backward(const AttentionParams& p) {
    for (int b = 0; b < p.batch; ++b) {
        const Sequence s = sequence_of(p, b);
        for (int head_k = 0; head_k < p.nheads_k; ++head_k) {
            std::vector<int> turns(size_t(s.seqlen_q / kM + 1), 0);  // the blocks that add to each tile
            for (int key0 = 0; key0 < s.seqlen_k; key0 += 128) check_keys<kM>(p, s, b, head_k, key0, turns);
            for (int i = 0; i < s.seqlen_q; ++i)  // a tile without turns gets a dq of zeros
                for (int head = head_k * p.group; head < (head_k + 1) * p.group && !turns[size_t(i / kM)]; ++head)
                    for (int j = 0; j < s.seqlen_k; ++j) require(!sees(p, s, b, head, i, j), "backward: no block adds to a tile that sees");
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    const unsigned calls = argc > 1 ? unsigned(std::atoi(argv[1])) : 1500;
    for (seed = 0; seed < calls; ++seed) {
        generator.seed(seed);
        Call call;
        make(call);
        if (seed % 3 == 0) check_forward<192, 80>(call.p), check_backward<64>(call.p);
        else if (seed % 3 == 1) check_forward<192, 128>(call.p), check_backward<128>(call.p);
        else check_forward<128, 64>(call.p), check_forward<128, 128>(call.p);
    }
    std::printf("%u calls: %ld tiles visited, %ld left out\n", calls, visited, skipped);
    return visited > 0 && skipped > 0 ? 0 : 1;
}
