// test_sharing.cpp: the plan of shared prefixes (attention/decode/common/sharing.h), which one block of a GPU makes, on the host, for
// random batches whose tables have common beginnings. Everything that the plan says is compared with loops over single keys and pages.
#include <algorithm>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

#include "attention/common/mask.h"
#include "attention/decode/common/sharing.h"

namespace {

using fa::AttentionParams;
using fa::PrefixGroup;

int failures = 0, sequences_that_share = 0, most_groups = 0;
[[gnu::format(printf, 2, 3)]] void expect(bool holds, const char* format, ...) {
    if (holds || ++failures > 20) return;
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    std::printf("\n");
}

using Random = std::mt19937;
int below(Random& random, int end) { return int(random() % unsigned(end)); }
template <typename T>
T of(Random& random, std::initializer_list<T> values) {
    return values.begin()[below(random, int(values.size()))];
}

// What the lanes that run an iteration together find, by one thread.
struct Lanes {
    bool writes() const { return true; }
    template <typename Holds>
    int32_t count(int32_t n, const Holds& holds) const {
        int32_t found = 0;
        for (int32_t x = 0; x < n; ++x) found += holds(x);
        return found;
    }
    template <typename Value>
    int32_t first_greatest(int32_t n, const Value& value) const {
        int32_t at = 0;
        for (int32_t x = 1; x < n; ++x)
            if (value(x) > value(at)) at = x;
        return at;
    }
    template <typename Value>
    uint64_t least(int32_t n, const Value& value) const {
        uint64_t least = ~uint64_t(0);
        for (int32_t x = 0; x < n; ++x) least = std::min(least, value(x));
        return least;
    }
    int32_t equal_entries(const int32_t* a, const int32_t* b, int32_t count) const {
        return int32_t(std::mismatch(a, a + count, b).first - a);
    }
};

// Runs the iterations of a loop in random order: an iteration that needs another one before it fails here.
struct ShuffledTeam : Lanes {
    Random& random;

    explicit ShuffledTeam(Random& random) : random(random) {}
    void sync() const {}
    template <typename Do>
    void for_each(int32_t count, const Do& act) const {
        std::vector<int32_t> order(count < 0 ? 0 : count);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        for (const int32_t i : order) act(i);
    }
    template <typename Do>
    void for_each_wide(int32_t count, const Do& act) const {
        for_each(count, act);
    }
    template <typename T>
    void add(T* to, T x) const {
        *to += x;
    }
    void raise(uint64_t* to, uint64_t x) const { *to = std::max(*to, x); }
};

// Threads that run at once and meet at sync(), as those of a block do: the thread sanitizer finds a sync() that is missing.
class Meeting {
public:
    explicit Meeting(int threads) : threads_(threads) {}
    void wait() {
        std::unique_lock<std::mutex> lock(mutex_);
        const int phase = phase_;
        if (++here_ == threads_) {
            here_ = 0, ++phase_;
            all_are_here_.notify_all();
        } else {
            all_are_here_.wait(lock, [&] { return phase_ != phase; });
        }
    }

private:
    std::mutex mutex_;
    std::condition_variable all_are_here_;
    int threads_, here_ = 0, phase_ = 0;
};
struct ThreadTeam : Lanes {
    int me, threads;
    Meeting& meeting;

    ThreadTeam(int me, int threads, Meeting& meeting) : me(me), threads(threads), meeting(meeting) {}
    void sync() const { meeting.wait(); }
    template <typename Do>
    void for_each(int32_t count, const Do& act) const {
        for (int32_t i = me; i < count; i += threads) act(i);
    }
    template <typename Do>
    void for_each_wide(int32_t count, const Do& act) const {
        for_each(count, act);
    }
    template <typename T>
    void add(T* to, T x) const {
        __atomic_fetch_add(to, x, __ATOMIC_RELAXED);
    }
    void raise(uint64_t* to, uint64_t x) const {
        uint64_t old = __atomic_load_n(to, __ATOMIC_RELAXED);
        while (x > old && !__atomic_compare_exchange_n(to, &old, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }
};

struct Case {
    AttentionParams p{};
    fa::SharingRules rules{};
    std::vector<int32_t> lengths, table;
};

// A table whose rows are taken from a few families: a row follows its family up to some page, then has pages of its own. Entries past a
// sequence's keys are nonsense that must not be read.
Case draw(Random& random) {
    Case c;
    AttentionParams& p = c.p;
    p.batch = of(random, {1, 2, 3, 5, 17, 33, 64, 130});
    p.group = of(random, {1, 2, 4, 5, 8}), p.nheads_k = of(random, {1, 2, 8}), p.nheads = p.group * p.nheads_k;
    p.seqlen_q = of(random, {1, 1, 1, 2, 5, 8});
    p.window_left = -1, p.window_right = of(random, {-1, -1, 0, 0, 3}), p.top_left = below(random, 8) == 0;
    p.cache.page_size = of(random, {1, 7, 16, 64, 100, 256, 300}), p.cache.entries = 1 << 20;
    p.cache.added = of(random, {0, 0, 1, 5});
    const int pages = 1 + below(random, 3000) / p.cache.page_size, room = pages * p.cache.page_size;
    p.seqlen_k = room;
    if (p.cache.added > room) p.cache.added = 0;
    const int families = 1 + below(random, 4);
    std::vector<std::vector<int32_t>> family(families);
    int32_t next = 0;
    for (auto& f : family) {
        f.resize(pages);
        for (int i = 0; i < pages; ++i) f[i] = &f != &family[0] && i < pages / 2 && below(random, 2) ? family[0][i] : next++;
    }
    const bool all_long = below(random, 3) == 0;
    for (int b = 0; b < p.batch; ++b) {
        const int most = room - p.cache.added, length = below(random, 9) == 0 ? -1 : all_long ? most : below(random, most + 1);
        c.lengths.push_back(length);
        const auto& f = family[below(random, families)];
        const int with = below(random, 6) == 0 ? 0 : all_long && below(random, 2) ? pages : below(random, pages + 1);
        const int used = length < 0 ? 0 : (length + p.cache.added + p.cache.page_size - 1) / p.cache.page_size;
        for (int i = 0; i < pages; ++i) c.table.push_back(i >= used ? (i % 2 ? INT32_MAX : INT32_MIN) : i < with ? f[i] : next++);
    }
    p.cache.seqlens = c.lengths.data(), p.cache.block_table = c.table.data(), p.cache.table_row = pages;
    c.rules.rows = p.seqlen_q * p.group, c.rules.tile_shift = of(random, {6, 7});
    c.rules.row_shift = of(random, {6, 7}), c.rules.tile_cost = of(random, {2, 3});
    c.rules.blocks = of(random, {1, 7, 132, 264}), c.rules.most_pieces = of(random, {1, 3, 64});
    const int64_t row_tiles = int64_t(p.batch) * c.rules.rows / (1 << c.rules.row_shift) + p.batch / 2;  // as sharing_rules computes it
    c.rules.most_items = int32_t(std::max<int64_t>(2 * c.rules.blocks, row_tiles * p.nheads_k));
    c.rules.least_saved = of<int64_t>(random, {1, 1, 50, 5000});
    return c;
}

// The keys that sequences a and b have in common and may share, one by one.
int common_keys(const AttentionParams& p, int a, int b) {
    int keys = 0;
    for (;; ++keys) {
        for (const int x : {a, b}) {
            const int count = p.cache.seqlens[x] < 0 ? 0 : p.cache.seqlens[x] + p.cache.added;
            if (keys >= count - p.cache.added) return keys;
            fa::Sequence s{};
            s.seqlen_q = p.seqlen_q, s.seqlen_k = count, s.shift = p.top_left ? 0 : count - p.seqlen_q;
            for (int i = 0; i < p.seqlen_q; ++i)
                if (const fa::KeyRange range = fa::key_range(p, s, i); keys < range.begin || keys >= range.end) return keys;
        }
        const int page = keys / p.cache.page_size;
        if (p.cache.block_table[a * p.cache.table_row + page] != p.cache.block_table[b * p.cache.table_row + page]) return keys;
    }
}

void check(int number, Random& random) {
    Case c = draw(random);
    c.p.cache.seqlens = c.lengths.data(), c.p.cache.block_table = c.table.data();
    const AttentionParams& p = c.p;
    const int batch = p.batch, rows = c.rules.rows, tile_rows = 1 << c.rules.row_shift;
    std::vector<uint64_t> best(batch);
    std::vector<int32_t> limit(batch), page_of(batch), leader(batch), common(batch), shared(batch), counts(2, -1), keys(batch, -1),
        group_of(batch, -1), rank(batch, -1), order(batch, -1);
    std::vector<PrefixGroup> scratch(batch / 2), groups(batch / 2);
    uint64_t saved = 0, choice = 0;
    int32_t followers = 0, group_count = 0;
    const fa::SharingScratch s{best.data(),    limit.data(), page_of.data(), leader.data(), common.data(), shared.data(),
                               scratch.data(), &saved,       &choice,        &followers,    &group_count};
    fa::PrefixPlan plan{};
    plan.counts = counts.data(), plan.keys = keys.data(), plan.group_of = group_of.data(), plan.rank = rank.data();
    plan.order = order.data(), plan.groups = groups.data(), plan.row_shift = c.rules.row_shift;
    const ShuffledTeam team(random);
    fa::find_prefixes(team, p, c.rules, s);
    fa::lay_out_prefixes(team, p, c.rules, s, plan);

    if (number % 10 == 0) {  // the same by threads
        constexpr int kThreads = 3;
        const auto once = std::make_tuple(counts, keys, order);
        Meeting meeting(kThreads);
        std::vector<std::thread> threads;
        for (int i = 0; i < kThreads; ++i)
            threads.emplace_back([&, i] {
                const ThreadTeam side(i, kThreads, meeting);
                fa::find_prefixes(side, p, c.rules, s);
                fa::lay_out_prefixes(side, p, c.rules, s, plan);
            });
        for (std::thread& thread : threads) thread.join();
        expect(once == std::make_tuple(counts, keys, order), "case %d: threads plan something else", number);
    }

    // ---- which keys are shared: in rounds, of every class the length with the highest claim, by trying all ----
    std::vector<int> want(batch), led_by(batch, -1), alone(batch), page(batch, -1);
    for (int b = 0; b < batch; ++b)
        if ((alone[b] = common_keys(p, b, b) / fa::kPrefixStep * fa::kPrefixStep))
            page[b] = c.table[b * p.cache.table_row + (fa::kPrefixStep - 1) / p.cache.page_size];
    int64_t all_saved = 0;
    for (int round = 0, idle = 0; round < fa::kMostRounds && idle < fa::kMostIdleRounds; ++round) {
        std::map<int, std::vector<int>> classes;
        for (int b = 0; b < batch; ++b)
            if (page[b] >= 0 && !want[b]) classes[page[b]].push_back(b);
        int64_t of_round = 0;
        bool together = false;
        for (const auto& [of_class, members] : classes) {
            together |= members.size() > 1;
            const int first_longest = *std::max_element(members.begin(), members.end(), [&](int x, int y) { return alone[x] < alone[y]; });
            std::vector<int> steps;
            for (const int b : members) steps.push_back(common_keys(p, b, first_longest) / fa::kPrefixStep);
            uint64_t best = 0;
            int best_steps = 0, sharing = 0;
            for (int length = 1; length <= alone[first_longest] / fa::kPrefixStep; ++length) {
                const int with = int(std::count_if(steps.begin(), steps.end(), [&](int x) { return x >= length; }));
                if (const uint64_t claim = fa::prefix_claim(length, with, c.rules); claim > best)
                    best = claim, best_steps = length, sharing = with;
            }
            if (best) of_round += fa::saving(best_steps, sharing, c.rules);
            else page[first_longest] = -1;
            for (size_t x = 0; x < members.size() && best; ++x)
                if (steps[x] >= best_steps) want[members[x]] = best_steps * fa::kPrefixStep, led_by[members[x]] = first_longest;
        }
        if (!together) break;
        idle += of_round == 0, all_saved += of_round;
    }
    if (all_saved < c.rules.least_saved) std::fill(want.begin(), want.end(), 0);
    for (int b = 0; b < batch; ++b) {
        expect(keys[b] == want[b], "case %d: sequence %d shares %d keys instead of %d", number, b, keys[b], want[b]);
        if (keys[b] && want[b]) expect(groups[group_of[b]].leader == led_by[b], "case %d: the leader of sequence %d", number, b);
        sequences_that_share += keys[b] > 0;
    }
    most_groups = std::max(most_groups, counts[0]);

    // ---- groups ----
    const int count = counts[0], items = counts[1];
    expect(count >= 0 && count <= batch / 2 && items >= 0 && items <= c.rules.most_items, "case %d: counts %d, %d", number, count, items);
    std::set<int> seen;
    int begin = 0;
    for (int g = 0; g < count; ++g) {
        const PrefixGroup& x = groups[g];
        expect(x.members >= 2 && x.begin == begin && x.keys > 0 && x.keys % fa::kPrefixStep == 0, "case %d: group %d", number, g);
        begin += x.members;
        for (int m = 0; m < x.members; ++m) {
            const int b = order[x.begin + m];
            expect(b >= 0 && b < batch && seen.insert(b).second, "case %d: member %d of group %d is %d", number, m, g, b);
            expect(group_of[b] == g && rank[b] == m && keys[b] == x.keys, "case %d: sequence %d", number, b);
            expect(common_keys(p, b, x.leader) >= x.keys, "case %d: sequence %d shares %d keys", number, b, x.keys);
        }
    }
    for (int b = 0; b < batch; ++b) expect((keys[b] > 0) == (seen.count(b) == 1), "case %d: keys[%d]=%d", number, b, keys[b]);

    // ---- work: every tile of keys of every tile of rows in one item, and the results where the merge looks for them ----
    std::set<std::tuple<int, int, int, int>> tiles;                 // group, key head, tile of rows, tile of keys
    std::map<std::tuple<int, int, int>, std::vector<int>> item_of;  // group, key head, tile of rows -> its items in the order of keys
    for (int g = 0, item = 0; g < count; ++g) {
        const int end = g + 1 < count ? groups[g + 1].first_item : items;
        expect(groups[g].first_item == item, "case %d: first item of group %d", number, g);
        for (; item < end; ++item) {
            const fa::PrefixItem at = fa::prefix_item(groups[g], item, p.nheads_k, c.rules.tile_shift);
            expect(at.begin < at.end && at.head_k >= 0 && at.head_k < p.nheads_k && at.row_tile < groups[g].row_tiles, "case %d: item %d",
                   number, item);
            item_of[{g, at.head_k, at.row_tile}].push_back(item);
            for (int x = at.begin; x < at.end; ++x)
                expect(tiles.insert({g, at.head_k, at.row_tile, x}).second, "case %d: item %d does tile %d again", number, item, x);
        }
    }
    size_t all = 0;
    for (int g = 0; g < count; ++g) {
        expect(groups[g].row_tiles == (groups[g].members * rows + tile_rows - 1) / tile_rows, "case %d: rows of group %d", number, g);
        expect(groups[g].pieces <= c.rules.most_pieces, "case %d: pieces of group %d", number, g);
        all += size_t(p.nheads_k) * groups[g].row_tiles * (groups[g].keys >> c.rules.tile_shift);
    }
    expect(tiles.size() == all, "case %d: %zu of %zu tiles", number, tiles.size(), all);
    std::set<int64_t> places;
    for (int b = 0; b < batch; ++b)
        for (int head = 0; head < p.nheads_k; ++head)
            for (int r = 0; r < rows; ++r) {
                const fa::PrefixPieces pieces = fa::prefix_pieces(plan, b, head, r, rows, p.nheads_k);
                expect((pieces.count > 0) == (keys[b] > 0), "case %d: pieces of sequence %d", number, b);
                if (!pieces.count) continue;
                const int row = rank[b] * rows + r;
                const auto& of_row = item_of[{group_of[b], head, row / tile_rows}];
                expect(int(of_row.size()) == pieces.count, "case %d: pieces of sequence %d", number, b);
                for (int i = 0; i < pieces.count; ++i) {
                    const int64_t at = pieces.first + i * pieces.step;
                    expect(at == int64_t(of_row[i]) * tile_rows + row % tile_rows && places.insert(at).second,
                           "case %d: sequence %d, head %d, row %d, piece %d", number, b, head, r, i);
                }
            }
}

// The case that the option is for: pieces that occupy nearly all blocks, none of which has much more than its share.
void check_balance() {
    AttentionParams p{};
    p.batch = 64, p.group = 4, p.nheads_k = 8, p.seqlen_q = 1, p.seqlen_k = 8704, p.window_left = p.window_right = -1;
    const fa::SharingRules rules{4, 6, 3, 6, 264, 64, 528, 1};
    for (const int keys : {8192, 8192 + 128, 4096, 100 * 128, 131072}) {
        PrefixGroup group{0, 0, 64, keys, 0, 0, 4, 0};
        uint64_t best = ~uint64_t(0);
        for (int i = 0; i < fa::kPieceCandidates; ++i) best = std::min(best, fa::piece_candidate(i, &group, 1, p.nheads_k, rules));
        const int64_t time = int64_t(best >> 32), share = (int64_t(keys) / 64 * 32 + 263) / 264;
        expect(time <= share + share / 4 + 3, "%d keys: %lld tiles of time for a share of %lld", keys, static_cast<long long>(time),
               static_cast<long long>(share));
    }
}

// All sequences share a trunk, and those of a branch much more: the branches are the groups.
void check_tree() {
    constexpr int kBatch = 64, kBranches = 8, kPages = 512, kTrunk = 64;
    Random random(1);
    AttentionParams p{};
    std::vector<int32_t> table(kBatch * kPages), lengths(kBatch, 8192);
    for (int b = 0; b < kBatch; ++b)
        for (int i = 0; i < kPages; ++i)
            table[b * kPages + i] = i < kTrunk ? i : i < 500 ? 1000 * (1 + b % kBranches) + i : 100000 + b * kPages + i;
    p.batch = kBatch, p.group = 4, p.nheads_k = 8, p.seqlen_q = 1, p.seqlen_k = 8192, p.window_left = p.window_right = -1;
    p.cache.page_size = 16, p.cache.entries = 1 << 20, p.cache.seqlens = lengths.data(), p.cache.block_table = table.data();
    p.cache.table_row = kPages;
    const fa::SharingRules rules{4, 6, 3, 6, 264, 64, 528, 1};
    std::vector<uint64_t> best(kBatch);
    std::vector<int32_t> numbers(5 * kBatch);
    std::vector<PrefixGroup> groups(kBatch / 2);
    uint64_t saved = 0, choice = 0;
    int32_t followers = 0, count = 0;
    int32_t* const n = numbers.data();
    const fa::SharingScratch s{best.data(),   n,      n + kBatch, n + 2 * kBatch, n + 3 * kBatch, n + 4 * kBatch,
                               groups.data(), &saved, &choice,    &followers,     &count};
    fa::find_prefixes(ShuffledTeam(random), p, rules, s);
    for (int b = 0; b < kBatch; ++b) expect(s.keys[b] == 500 * 16 / 128 * 128 && s.leader[b] == b % kBranches, "tree: sequence %d", b);
}

}  // namespace

int main(int argc, char** argv) {
    const int count = argc > 1 ? std::atoi(argv[1]) : 2000;
    for (int i = 0; i < count; ++i) {
        Random random(static_cast<unsigned>(i));
        check(i, random);
    }
    expect(sequences_that_share > 10 * count && most_groups > 5, "%d sequences share keys, in up to %d groups: too few to tell",
           sequences_that_share, most_groups);
    check_balance();
    check_tree();
    if (failures) std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
