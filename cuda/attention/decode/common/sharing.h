// sharing.h: decides which sequences of a call share keys, from the block table and the lengths, and lays out the work for
// these keys. On the device one block runs it (sharing.cu); native tests run the same functions on the host.
//
//   1. Sequences whose tables agree where the first step of keys ends are a class. The longest of them is its leader.
//   2. A sequence has in common with its leader the keys of the pages up to the first that differs. What a row of either does not see, or
//      what this call appends, is not shared.
//   3. Of the lengths that the others have in common with the leader, the group's length is the one that saves the most for each sequence
//      that has as much. So in a tree of prefixes the sequences of a branch share the branch, not only the trunk.
//   4. The sequences that are not in the group are a class again, with another leader, and so on for some rounds.
//   5. If all groups together save too little, no keys are shared.
//   6. All groups get the same length of pieces: the one with which the blocks are done first.
//
// `team` runs loops side by side. Between two loops with sync() in between, what one iteration wrote is visible to all. In for_each_wide
// several lanes run an iteration together: they count and search side by side, and the one that writes() writes.
#pragma once

#include "attention/common/params.h"
#include "attention/decode/common/prefix.h"

namespace fa {

// What the host says about a call.
struct SharingRules {
    int32_t rows;         // of a key head in one sequence: seqlen_q * group
    int32_t row_shift;    // a tile of the prefix pass has 2^row_shift rows
    int32_t tile_cost;    // what such a tile takes, in halves of the time in which a decode kernel reads the keys of one sequence
    int32_t tile_shift;   // a tile of keys of the prefix pass has 2^tile_shift keys
    int32_t blocks;       // blocks of the prefix pass that run at once
    int32_t most_pieces;  // of a prefix
    int32_t most_items;   // room in the workspace
    int64_t least_saved;  // in units of `saving`
};

// (batch) each; `groups` has batch / 2 entries.
struct SharingScratch {
    uint64_t* best;  // of a leader: what its group saves for each member, and the length in steps
    int32_t *limit, *page, *leader, *common, *keys;
    PrefixGroup* groups;
    uint64_t *saved, *choice;
    int32_t *followers, *group_count;
};
constexpr int kStepBits = 23;  // of `best`: lengths are below 2^30 keys

// The keys at the start of sequence b that may be shared, in whole steps: each of its rows sees them, and this call does not append them.
FA_HOST_DEVICE int32_t shareable_keys(const AttentionParams& p, int32_t b) {
    const int32_t count = cached_rows(p, b);
    int64_t end = int64_t(count) - p.cache.added;
    if (p.window_right >= 0) {
        const int64_t first_row_end = int64_t(p.top_left ? 0 : count - p.seqlen_q) + p.window_right + 1;
        end = first_row_end < end ? first_row_end : end;
    }
    return end < 0 ? 0 : int32_t(end / kPrefixStep * kPrefixStep);
}

FA_HOST_DEVICE int32_t prefix_row_tiles(int32_t members, const SharingRules& rules) {
    return (members * rules.rows + (1 << rules.row_shift) - 1) >> rules.row_shift;
}

// What sharing `steps` steps of keys saves: key heads of half steps that are not read.
FA_HOST_DEVICE int64_t saving(int64_t steps, int32_t members, const SharingRules& rules) {
    return steps * (2 * int64_t(members) - rules.tile_cost * int64_t(prefix_row_tiles(members, rules)));
}

// x / y of numbers that are not negative. Most are below 2^31, and 64 bits take a GPU five times as long.
FA_HOST_DEVICE int64_t quotient(int64_t x, int32_t y) { return x >> 31 ? x / y : int32_t(x) / y; }

// A group's claim to be the best of its leader: the saving for each member, in 64ths; of two that save the same, the longer one.
FA_HOST_DEVICE uint64_t prefix_claim(int64_t steps, int32_t members, const SharingRules& rules) {
    const int64_t saved = saving(steps, members, rules);
    return saved > 0 ? uint64_t(quotient(saved * 64, members)) << kStepBits | uint64_t(steps) : 0;
}

constexpr int kMostRounds = 32, kMostIdleRounds = 3;  // idle: no leader finds a group

// Finds the groups: scratch.keys, and scratch.leader of their members.
template <typename Team>
FA_HOST_DEVICE void find_prefixes(const Team& team, const AttentionParams& p, const SharingRules& rules, const SharingScratch& s) {
    const CacheView& cache = p.cache;
    const int32_t batch = p.batch;
    team.for_each(batch, [&](int32_t b) {
        s.limit[b] = shareable_keys(p, b), s.keys[b] = 0;
        s.page[b] = s.limit[b] > 0 ? cache.block_table[b * cache.table_row + (kPrefixStep - 1) / cache.page_size] : -1;
        if (b == 0) *s.followers = *s.group_count = 0, *s.saved = *s.choice = 0;
    });
    team.sync();
    int32_t followers = 0;
    uint64_t saved = 0;
    for (int round = 0, idle = 0; round < kMostRounds && idle < kMostIdleRounds; ++round) {
        // A sequence that has found a group, or is no candidate for one, has no leader but itself.
        team.for_each_wide(batch, [&](int32_t b) {
            if (s.keys[b]) return;
            const int32_t page = s.page[b];
            const int32_t leader =
                page < 0 ? b : team.first_greatest(batch, [&](int32_t x) { return s.page[x] == page && s.keys[x] == 0 ? s.limit[x] : -1; });
            if (!team.writes()) return;
            s.leader[b] = leader, s.common[b] = s.limit[b], s.best[b] = 0;
            if (leader != b) team.add(s.followers, int32_t(1));
        });
        team.sync();
        if (*s.followers == followers) break;
        followers = *s.followers;

        team.for_each_wide(batch, [&](int32_t b) {
            const int32_t leader = s.leader[b];
            if (s.keys[b] || leader == b) return;
            const int32_t limit = s.limit[b] < s.limit[leader] ? s.limit[b] : s.limit[leader];
            const int32_t pages = int32_t((int64_t(limit) + cache.page_size - 1) / cache.page_size);
            const int64_t equal =
                team.equal_entries(cache.block_table + b * cache.table_row, cache.block_table + leader * cache.table_row, pages);
            const int64_t keys = equal * cache.page_size;
            if (team.writes()) s.common[b] = keys < limit ? int32_t(keys / kPrefixStep * kPrefixStep) : limit;
        });
        team.sync();
        const auto members_of = [&](int32_t leader, int64_t keys) {  // those that have `keys` keys in common with it
            return team.count(batch, [&](int32_t x) { return s.leader[x] == leader && s.common[x] >= keys; });
        };
        team.for_each_wide(batch, [&](int32_t b) {
            const int32_t leader = s.leader[b], keys = s.common[b];
            if (s.keys[b] || keys == 0 || leader == b) return;
            const uint64_t claim = prefix_claim(keys / kPrefixStep, members_of(leader, keys), rules);
            if (claim && team.writes()) team.raise(s.best + leader, claim);
        });
        team.sync();
        team.for_each_wide(batch, [&](int32_t b) {
            if (s.keys[b]) return;
            const int32_t leader = s.leader[b];
            const int64_t steps = int64_t(s.best[leader] & ((uint64_t(1) << kStepBits) - 1));
            const int32_t members = leader == b ? members_of(b, steps * kPrefixStep) : 0;
            if (!team.writes()) return;
            if (leader == b) {
                if (steps > 0) team.add(s.saved, uint64_t(saving(steps, members, rules)));
                else s.page[b] = -1;  // no group has this leader
            }
            if (s.common[b] >= steps * kPrefixStep) s.keys[b] = int32_t(steps) * kPrefixStep;
        });
        team.sync();
        idle += *s.saved == saved;
        saved = *s.saved;
    }
    if (int64_t(saved) >= rules.least_saved || saved == 0) return;
    team.for_each(batch, [&](int32_t b) { s.keys[b] = 0; });
    team.sync();
}

FA_HOST_DEVICE int32_t piece_tiles_of(const PrefixGroup& group, const SharingRules& rules, int32_t each) {
    const int32_t tiles = group.keys >> rules.tile_shift, least = (tiles + rules.most_pieces - 1) / rules.most_pieces;
    each = each < tiles ? each : tiles;
    return each > least ? each : least;
}

// Candidate number i for the tiles of a piece, and the time until the last block is done if it is chosen, in tiles; packed, so that the
// smallest is the best. The last candidate leaves every prefix in one piece and always has room.
constexpr int kPieceCandidates = 32;
FA_HOST_DEVICE uint64_t piece_candidate(int32_t i, const PrefixGroup* groups, int32_t count, int32_t nheads_k, const SharingRules& rules) {
    constexpr int64_t kItemCost = 2;  // tiles: the latency of an item's beginning and end
    int64_t work = 0;
    int32_t longest = 0;
    for (int32_t g = 0; g < count; ++g) {
        const int32_t tiles = groups[g].keys >> rules.tile_shift;
        work += int64_t(tiles) * groups[g].row_tiles * nheads_k;
        longest = tiles > longest ? tiles : longest;
    }
    // From half of an equal share on, in steps of an eighth.
    const int64_t share = quotient(work + rules.blocks - 1, rules.blocks), wanted = (share * (4 + i) + 7) / 8;
    const int32_t each = i == kPieceCandidates - 1 || wanted > longest ? longest : int32_t(wanted);
    int64_t items = 0;
    int32_t longest_piece = 0;
    for (int32_t g = 0; g < count; ++g) {
        const int32_t tiles = groups[g].keys >> rules.tile_shift, piece = piece_tiles_of(groups[g], rules, each);
        items += int64_t((tiles + piece - 1) / piece) * groups[g].row_tiles * nheads_k;
        longest_piece = piece > longest_piece ? piece : longest_piece;
    }
    if (items > rules.most_items) return ~uint64_t(0);
    const int64_t rounds = quotient(items + rules.blocks - 1, rules.blocks);
    return uint64_t(rounds * (longest_piece + kItemCost)) << 32 | uint32_t(each);
}

// Writes the plan. Called after find_prefixes.
template <typename Team>
FA_HOST_DEVICE void lay_out_prefixes(const Team& team, const AttentionParams& p, const SharingRules& rules, const SharingScratch& s,
                                     const PrefixPlan& plan) {
    const int32_t batch = p.batch;
    team.for_each_wide(batch, [&](int32_t b) {
        const int32_t leader = s.leader[b], keys = s.keys[b];
        if (keys == 0) {
            if (team.writes()) plan.keys[b] = 0;
            return;
        }
        const auto count = [&](const auto& holds) { return team.count(batch, [&](int32_t x) { return s.keys[x] != 0 && holds(x); }); };
        const int32_t group = count([&](int32_t x) { return s.leader[x] == x && x < leader; });
        const int32_t begin = count([&](int32_t x) { return s.leader[x] < leader; });
        const int32_t rank = count([&](int32_t x) { return s.leader[x] == leader && x < b; });
        const int32_t members = leader == b ? count([&](int32_t x) { return s.leader[x] == leader; }) : 0;
        if (!team.writes()) return;
        plan.keys[b] = keys, plan.group_of[b] = group, plan.rank[b] = rank, plan.order[begin + rank] = b;
        if (leader != b) return;
        s.groups[group] = {b, begin, members, s.keys[b], 0, 0, prefix_row_tiles(members, rules), 0};
        team.add(s.group_count, int32_t(1));
    });
    team.sync();
    const int32_t count = *s.group_count;
    if (count > 0)
        team.for_each_wide(1, [&](int32_t) {
            const uint64_t best =
                team.least(kPieceCandidates, [&](int32_t i) { return piece_candidate(i, s.groups, count, p.nheads_k, rules); });
            if (team.writes()) *s.choice = best;
        });
    team.sync();
    const int32_t each = int32_t(*s.choice & 0xFFFFFFFFu);
    const auto items_of = [&](const PrefixGroup& x) {
        const int32_t tiles = x.keys >> rules.tile_shift, piece = piece_tiles_of(x, rules, each);
        return (tiles + piece - 1) / piece * x.row_tiles * p.nheads_k;
    };
    team.for_each(count, [&](int32_t g) {
        PrefixGroup x = s.groups[g];
        for (int32_t before = 0; before < g; ++before) x.first_item += items_of(s.groups[before]);
        x.each = piece_tiles_of(x, rules, each);
        x.pieces = ((x.keys >> rules.tile_shift) + x.each - 1) / x.each;
        plan.groups[g] = x;
        if (g == count - 1) plan.counts[0] = count, plan.counts[1] = x.first_item + items_of(x);
    });
    team.for_each(1, [&](int32_t) {
        if (count == 0) plan.counts[0] = plan.counts[1] = 0;
    });
}

}  // namespace fa
