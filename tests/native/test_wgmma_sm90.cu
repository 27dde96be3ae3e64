// test_wgmma_sm90.cu: parts of the Hopper kernels in isolation. On any machine it compares their lists of work items with mask.h. On a
// Hopper GPU it tests tensor maps, swizzle, descriptors and fragment layouts, on integers whose products are exact. Exit status: 0 passed,
// 1 failed, 77 only the first part could run.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "attention/backward/wgmma_sm90/hidden.cuh"
#include "attention/backward/wgmma_sm90/walk_parts.h"
#include "attention/backward/wgmma_sm90/work.cuh"
#include "attention/common/mask.h"
#include "attention/forward/common/work_list.h"
#include "device/mma.cuh"
#include "device/ptx.cuh"
#include "device/tensor_map.h"
#include "device/wgmma.cuh"
#include "expect.h"

namespace {

using namespace fa;

// ---- work items: every query block is computed once; tiles and masks hide exactly the keys that key_range hides ----

template <int kBlockM, int kBlockN>
void check_block(const AttentionParams& p, const ForwardWork& w) {
    const Sequence s = sequence_of(p, w.batch);
    EXPECT(w.seqlen_q == s.seqlen_q && w.seqlen_k == s.seqlen_k, "sequence %d", w.batch);
    for (int row0 = w.row0; row0 < w.row0 + kBlockM; row0 += 64) {
        const int right_tile = clamp_to(row0 + w.right + 1, 0, w.seqlen_k) / kBlockN;
        const int left_tile = (clamp_to(row0 + 63 + w.left, 0, w.seqlen_k) + kBlockN - 1) / kBlockN;
        for (int i = row0; i < row0 + 64 && i < w.seqlen_q; ++i) {
            const KeyRange range = key_range(p, s, i);
            for (int j = w.first_tile * kBlockN; j < (w.last_tile + 1) * kBlockN; ++j) {
                const int tile = j / kBlockN;
                const bool hidden =
                    (tile >= right_tile && j > std::min(i + w.right, w.seqlen_k - 1)) || (tile < left_tile && j < i + w.left);
                EXPECT(hidden == (j < range.begin || j >= range.end), "row %d key %d of (%d, %d)", i, j, w.seqlen_q, w.seqlen_k);
            }
            const bool covered =
                range.begin >= range.end || (range.begin >= w.first_tile * kBlockN && range.end <= (w.last_tile + 1) * kBlockN);
            EXPECT(covered, "row %d sees keys %d .. %d, tiles %d .. %d", i, range.begin, range.end, w.first_tile, w.last_tile);
        }
    }
}

template <int kM, int kN>
struct Tiles {
    static constexpr int kBlockM = kM, kBlockN = kN;
    static constexpr bool kCaches = true;
};

template <int kBlockM, int kBlockN>
void check_items(const AttentionParams& p, int blocks, bool sections) {
    ForwardWorkList list = forward_work_list(p, kBlockM, blocks);
    if (sections) add_leading_sections(p, blocks, &list);
    const int slots = (std::max(p.seqlen_q, p.total_q) + kBlockM) / kBlockM;
    std::vector<int> seen(size_t(p.batch) * p.nheads * slots);
    for (int block = 0; block < blocks; ++block)
        for (int index = block; index < list.items; index += blocks) {
            ForwardWork w;
            find_work<Tiles<kBlockM, kBlockN>>(p, list, index, w);
            if (w.state != WorkState::kRows) continue;
            ++seen[(size_t(w.batch) * p.nheads + w.head) * slots + w.row0 / kBlockM];
            if (w.head == 0) check_block<kBlockM, kBlockN>(p, w);
        }
    for (int b = 0; b < p.batch; ++b)
        for (int head = 0; head < p.nheads; ++head)
            for (int m = 0; m < slots; ++m) {
                const int times = seen[(size_t(b) * p.nheads + head) * slots + m], wanted = m * kBlockM < sequence_of(p, b).seqlen_q;
                EXPECT(times == wanted, "sequence %d head %d block %d is computed %d times, not %d", b, head, m, times, wanted);
            }
}

// ---- backward: every key block is computed once and, where blocks take turns, in the order of the turns. Its query tiles are exactly
// those whose range of key blocks contains it. It walks through all of them, and no visible pair is missed. Parts of a walk follow each
// other, and none is longer than another by two tiles ----

template <int kBlockM, int kBlockN>
void check_key_blocks(const AttentionParams& p, bool in_order, int parts) {
    BackwardSchedule schedule{};
    schedule.row_parts = parts;
    schedule.n_blocks = (p.seqlen_k + kBlockN - 1) / kBlockN;
    schedule.section_heads = int(in_order ? backward_section_heads_in_order(p) : backward_section_heads(p));
    schedule.by_section = p.window_right >= 0 || in_order;
    BackwardPlan plan;
    plan.headdim = plan.headdim_v = 64, plan.block_m = kBlockM, plan.block_n = kBlockN;
    schedule.in_order = in_order, schedule.blocks = int(backward_blocks(p, plan)) * parts;
    int words[] = {0, 1};  // QueryTiles::taken, has_order
    schedule.tiles.turn = words;
    for (int b = 0; p.cu_seqlens_q && b + 1 < p.batch; ++b)
        EXPECT(ends_before_next(p, kBlockM, kBlockN, b), "lengths in order, but sequence %d runs into the next one", b);
    std::vector<int> found(size_t(p.batch) * p.nheads_k);  // blocks of the head so far, or their parts
    Range before{0, 0};                                    // tiles of the parts of the same block so far
    for (int index = 0; index < schedule.blocks; ++index) {
        BackwardWork w;
        if (!find_key_block<kBlockM, kBlockN>(p, schedule, index, w)) continue;
        const Sequence s = sequence_of(p, w.batch);
        const int part = index % parts, due = found[size_t(w.batch) * p.nheads_k + w.head_k]++ / parts;
        EXPECT(w.key0 == due * kBlockN, "sequence %d head %d: key %d where block %d was due", w.batch, w.head_k, w.key0, due);
        EXPECT(w.sums_k == w.head_k * parts + part, "head %d of part %d of head %d", w.sums_k, part, w.head_k);
        if (w.head_k) continue;
        const Range all = query_tiles_of(visible_band(p, s), w.key0, kBlockM, kBlockN);
        const int tiles = all.end - all.begin, own = w.end_m - w.first_m;
        EXPECT(w.first_m == (part ? before.end : all.begin) && (part + 1 < parts || w.end_m == all.end), "part %d has tiles %d .. %d", part,
               w.first_m, w.end_m);
        EXPECT(own == tiles / parts || own == tiles / parts + 1, "part %d of %d has %d of %d tiles", part, parts, own, tiles);
        before = {w.first_m, w.end_m};
        const int walk = count_tiles(w);
        BackwardParams gradients{};
        gradients.forward = p;
        if (stores_dq(gradients, plan))
            EXPECT(schedule.n_blocks == 1 && all.begin == 0 && all.end == int(ceil_div(s.seqlen_q, kBlockM)),
                   "the only block has tiles %d .. %d of %d rows", all.begin, all.end, s.seqlen_q);
        EXPECT(walk == (w.first_m < w.end_m ? (w.end_m - w.first_m) * p.group : 0), "%d tiles of %d .. %d", walk, w.first_m, w.end_m);
        std::vector<bool> walked(size_t(walk ? w.end_m : 0) * p.group);
        for (int it = 0, place = w.start_place; it < walk; ++it, place = next_place(place, w.last_place, w.wrap_place)) {
            const Visited at = visited(w, it);
            EXPECT(at.m >= w.first_m && at.m < w.end_m && at.head >= 0 && at.head < p.group, "walks to tile %d of head %d", at.m, at.head);
            EXPECT(place == at.m * w.width + w.width - 1 - (in_order ? at.head : 0), "place %d is not tile %d of head %d", place, at.m,
                   at.head);
            EXPECT(!walked[at.m * p.group + at.head], "walks to tile %d of head %d twice", at.m, at.head);
            walked[at.m * p.group + at.head] = true;
        }
        for (int m = 0; m * kBlockM < s.seqlen_q; ++m) {
            const Range blocks = key_blocks_of(visible_band(p, s), m * kBlockM, kBlockM, kBlockN);
            const bool meets = m >= all.begin && m < all.end, walks = m >= w.first_m && m < w.end_m,
                       met = w.key0 / kBlockN >= blocks.begin && w.key0 / kBlockN < blocks.end;
            EXPECT(meets == met, "tile %d and key %d of (%d, %d): %d, %d", m, w.key0, s.seqlen_q, s.seqlen_k, meets, met);
            bool visible = false, hidden = false, cut = false;
            for (int i = m * kBlockM; i < (m + 1) * kBlockM && i < s.seqlen_q; ++i) {
                const KeyRange range = key_range(p, s, i);
                visible = visible || (range.begin < w.key0 + kBlockN && range.end > w.key0 && range.begin < range.end);
                hidden = hidden || range.end < w.key0 + kBlockN;
                cut = cut || range.begin > w.key0;
            }
            EXPECT(meets || !visible, "tile %d sees keys from %d on of (%d, %d)", m, w.key0, s.seqlen_q, s.seqlen_k);
            EXPECT(!walks || !hidden || m * w.width < w.mask_place, "tile %d is not masked at key %d of (%d, %d)", m, w.key0, s.seqlen_q,
                   s.seqlen_k);
            EXPECT(!walks || !cut || m * w.width >= left_place_of(p, w, kBlockM), "tile %d: no left edge at key %d of (%d, %d)", m, w.key0,
                   s.seqlen_q, s.seqlen_k);
        }
    }
    for (int b = 0; b < p.batch; ++b)
        for (int head = 0; head < p.nheads_k; ++head) {
            const int blocks = found[size_t(b) * p.nheads_k + head], keys = sequence_of(p, b).seqlen_k;
            EXPECT(blocks == (keys + kBlockN - 1) / kBlockN * parts, "sequence %d head %d: %d blocks of %d keys", b, head, blocks, keys);
        }
}

// Lengths that are not in order, which a kernel may find in device memory. Blocks may wait for each other if every sequence ends before
// the next one: then all key blocks must exist, and no two sequences may share a query tile. Tiles must stay inside the workspace whatever
// the lengths are.
template <int kBlockM, int kBlockN>
void check_any_lengths(const AttentionParams& p) {
    BackwardPlan plan;
    plan.headdim = plan.headdim_v = 64, plan.block_m = kBlockM, plan.block_n = kBlockN;
    BackwardSchedule schedule{};
    int words[] = {0, 1};
    schedule.row_parts = 1;
    schedule.tiles.turn = words, schedule.in_order = true, schedule.blocks = int(backward_blocks(p, plan));
    bool ordered = true;
    for (int b = 0; b + 1 < p.batch; ++b) ordered = ordered && ends_before_next(p, kBlockM, kBlockN, b);
    std::vector<int> owner(p.total_q / kBlockM + p.batch, -1);
    for (int b = 0; b < p.batch; ++b) {
        const Sequence s = sequence_of(p, b);
        for (int m = 0; m * kBlockM < s.seqlen_q; ++m) {
            const size_t tile = first_tile_of(p, kBlockM, b) + m;
            EXPECT(tile < owner.size(), "tile %zu of %zu", tile, owner.size());
            if (tile >= owner.size()) continue;
            EXPECT(!ordered || owner[tile] < 0, "sequences %d and %d share tile %zu", owner[tile], b, tile);
            owner[tile] = b;
        }
    }
    std::vector<int> found(p.batch);
    for (int index = 0; index < schedule.blocks; ++index) {
        BackwardWork w;
        if (!find_key_block<kBlockM, kBlockN>(p, schedule, index, w) || w.head_k) continue;
        EXPECT(!ordered || w.key0 == found[w.batch] * kBlockN, "sequence %d: key %d is not block %d", w.batch, w.key0, found[w.batch]);
        ++found[w.batch];
        EXPECT(w.end_m * kBlockM < w.seqlen_q + kBlockM, "sequence %d: tile %d of %d rows", w.batch, w.end_m, w.seqlen_q);
    }
    for (int b = 0; ordered && b < p.batch; ++b) {
        const int keys = sequence_of(p, b).seqlen_k;
        EXPECT(found[b] == (keys + kBlockN - 1) / kBlockN, "sequence %d: %d blocks of %d keys", b, found[b], keys);
    }
}

void test_any_lengths() {
    std::mt19937 random(2);
    const auto below = [&](int n) { return int(random() % unsigned(n)); };
    for (int round = 0; round < 2000; ++round) {
        AttentionParams p{};
        p.nheads_k = p.group = p.nheads = 1 + below(2), p.group = 1;
        p.headdim = p.headdim_v = 64, p.scale = 1, p.window_left = -1, p.window_right = below(2) ? 0 : -1;
        p.batch = 1 + below(4), p.total_q = 1 + below(1000), p.total_k = 1 + below(1000);
        p.seqlen_q = 1 + below(p.total_q), p.seqlen_k = 1 + below(p.total_k);
        const bool wild = below(3) == 0;
        std::vector<int> cu_q, cu_k;
        for (int b = 0; b <= p.batch; ++b) {
            cu_q.push_back(wild ? int(random()) : below(p.total_q + 1)), cu_k.push_back(wild ? int(random()) : below(p.total_k + 1));
        }
        if (!wild && below(2)) std::sort(cu_q.begin(), cu_q.end());
        if (!wild && below(2)) std::sort(cu_k.begin(), cu_k.end());
        p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data();
        check_any_lengths<128, 128>(p);
        check_any_lengths<64, 128>(p);
    }
}

void test_items() {
    std::mt19937 random(1);
    const auto below = [&](int n) { return int(random() % unsigned(n)); };
    for (int round = 0; round < 150; ++round) {
        AttentionParams p{};
        p.nheads_k = 1 + below(3), p.group = 1 + below(3), p.nheads = p.nheads_k * p.group;
        p.headdim = p.headdim_v = 64, p.scale = 1, p.top_left = below(2);
        p.window_left = below(2) ? -1 : below(400), p.window_right = below(3) == 0 ? -1 : below(2) ? 0 : below(300);
        p.batch = 1 + below(8);
        std::vector<int> cu_q{0}, cu_k{0};
        if (below(2)) {
            p.seqlen_q = 1 + below(500), p.seqlen_k = 1 + below(below(2) ? 600 : 3000);
        } else {
            for (int b = 0; b < p.batch; ++b) {
                const int q = below(4) ? below(400) : 0, k = below(4) ? below(2) ? q : below(500) : 0;
                cu_q.push_back(cu_q.back() + q), cu_k.push_back(cu_k.back() + k);
                p.seqlen_q = std::max(p.seqlen_q, q), p.seqlen_k = std::max(p.seqlen_k, k);
            }
            p.total_q = cu_q.back(), p.total_k = cu_k.back(), p.cu_seqlens_q = cu_q.data(), p.cu_seqlens_k = cu_k.data();
        }
        const int blocks = 1 + below(9);
        const bool sections = below(2);
        check_items<128, 128>(p, blocks, sections);
        check_items<192, 80>(p, blocks, sections);
        check_items<128, 64>(p, blocks, sections);
        for (const bool in_order : {false, true}) {
            for (int parts : {1, 2, 7}) {
                check_key_blocks<128, 128>(p, in_order, parts);
                check_key_blocks<64, 128>(p, in_order, parts);
                check_key_blocks<64, 64>(p, in_order, parts);
            }
        }
    }
}

// ---- backward: which plan serves a call. A plan that serves less than the call asks for would give wrong gradients ----

void test_choice() {
    const auto expect = [](BackwardPlanId want, int headdim, int headdim_v, const auto& change, const char* what) {
        const float slopes[] = {1};
        const uint8_t mask[] = {1};
        AttentionParams p{};
        p.batch = 2, p.nheads = 4, p.nheads_k = 2, p.group = 2, p.headdim = headdim, p.headdim_v = headdim_v, p.scale = 0.125f;
        p.window_left = p.window_right = -1, p.seqlen_q = p.seqlen_k = 100;
        change(p, slopes, mask);
        const int chosen = int(backward_choose(p));
        EXPECT(chosen == int(want), "%s, head dims %d and %d: plan %d, not %d", what, headdim, headdim_v, chosen, int(want));
    };
    // d192_v128: for values of up to 128 columns.
    const auto each = [&](BackwardPlanId d64, BackwardPlanId d128, BackwardPlanId d192_v128, BackwardPlanId d192, BackwardPlanId d256,
                          const char* what, const auto& change) {
        expect(d64, 64, 64, change, what), expect(d64, 32, 40, change, what);
        expect(d128, 128, 128, change, what), expect(d128, 72, 64, change, what), expect(d128, 64, 72, change, what);
        expect(d192_v128, 192, 128, change, what), expect(d192_v128, 136, 64, change, what);
        expect(d192, 192, 192, change, what), expect(d192, 64, 136, change, what);
        expect(d256, 256, 256, change, what), expect(d256, 200, 64, change, what), expect(d256, 64, 200, change, what);
    };
    using Id = BackwardPlanId;
    using P = AttentionParams;
    const auto bare = [&](const char* what, const auto& change) {
        each(Id::kD64, Id::kD128, Id::kD192V128, Id::kD192, Id::kD256, what, change);
    };
    const auto options = [&](const char* what, const auto& change) {
        each(Id::kD64Options, Id::kD128Options, Id::kD192V128Options, Id::kD192Options, Id::kD256Options, what, change);
    };
    const auto softcap = [&](const char* what, const auto& change) {
        each(Id::kD64Softcap, Id::kD128Softcap, Id::kD192Softcap, Id::kD192Softcap, Id::kD256Softcap, what, change);
    };
    const auto general = [&](const char* what, const auto& change) {
        each(Id::kD64General, Id::kD128General, Id::kD192V128General, Id::kD192General, Id::kD256General, what, change);
    };
    const auto with_dropout = [&](const char* what, const auto& change) {
        each(Id::kD64BiasDropout, Id::kD128BiasDropout, Id::kD192BiasDropout, Id::kD192BiasDropout, Id::kD256BiasDropout, what, change);
    };
    bare("bare", [](P&, auto*, auto*) {});
    bare("causal", [](P& p, auto*, auto*) { p.window_right = 0; });
    options("window", [](P& p, auto*, auto*) { p.window_left = 100, p.window_right = 0; });
    options("alibi", [](P& p, auto* slopes, auto*) { p.alibi_slopes = slopes; });
    options("mask of keys", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 0}; });
    options("all three", [](P& p, auto* slopes, auto* mask) { p.mask = {mask, 7, 0, 0}, p.alibi_slopes = slopes, p.window_left = 0; });
    options("mask of the keys of each head", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 9, 0}, p.group = 1; });
    softcap("softcap", [](P& p, auto*, auto*) { p.softcap = 50; });
    softcap("softcap, window and mask", [](P& p, auto*, auto* mask) { p.softcap = 30, p.window_left = 5, p.mask = {mask, 7, 0, 0}; });
    general("softcap too small", [](P& p, auto*, auto*) { p.softcap = 5; });
    general("softcap and alibi", [](P& p, auto* slopes, auto*) { p.softcap = 50, p.alibi_slopes = slopes; });
    const auto masks = [&](const char* what, const auto& change) {
        each(Id::kD64Masks, Id::kD128Masks, Id::kD192V128Masks, Id::kD192Masks, Id::kD256Masks, what, change);
    };
    masks("mask of pairs", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}; });
    masks("mask of pairs, window", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 9, 1}, p.window_left = 5; });
    masks("mask by blocks, causal", [](P& p, auto*, auto* mask) { p.blocks.data = mask, p.window_right = 0; });
    masks("masks by blocks and of pairs", [](P& p, auto*, auto* mask) { p.blocks.data = mask, p.mask = {mask, 7, 9, 1}; });
    masks("masks by blocks and of keys", [](P& p, auto*, auto* mask) { p.blocks.data = mask, p.mask = {mask, 7, 0, 0}; });
    static const int32_t ends[] = {0, 1, 2};
    masks("mask by blocks, packed sequences",
          [](P& p, auto*, auto* mask) { p.blocks.data = mask, p.cu_seqlens_q = p.cu_seqlens_k = ends; });
    general("mask of pairs, packed sequences",
            [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}, p.cu_seqlens_q = p.cu_seqlens_k = ends; });
    const auto biases = [&](const char* what, const auto& change) {
        each(Id::kD64Bias, Id::kD128Bias, Id::kD192Bias, Id::kD192Bias, Id::kD256Bias, what, change);
    };
    biases("mask of pairs and scale below zero", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}, p.scale = -1; });
    general("mask of pairs and softcap", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}, p.softcap = 50; });
    general("mask of pairs and alibi", [](P& p, auto* slopes, auto* mask) { p.mask = {mask, 7, 0, 1}, p.alibi_slopes = slopes; });
    general("mask of one row", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}, p.seqlen_q = 1; });
    biases("mask of keys of query heads", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 9, 0}; });
    with_dropout("mask of pairs and dropout", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}, p.dropout_threshold = 9; });
    general("mask of pairs and dropout in a short call",
            [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}, p.dropout_threshold = 9, p.seqlen_q = p.seqlen_k = 60; });
    const auto with_bias = [&](const char* what, const auto& change) {
        biases(what, [&](P& p, auto* slopes, auto* mask) {
            p.dtype = p.bias_dtype = DType::kFloat16, p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 64, 8};
            change(p, slopes, mask);
        });
    };
    const auto without_tiles = [&](const char* what, const auto& change) {
        general(what, [&](P& p, auto* slopes, auto* mask) {
            p.dtype = p.bias_dtype = DType::kFloat16, p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 64, 8};
            change(p, slopes, mask);
        });
    };
    with_bias("bias", [](P&, auto*, auto*) {});
    with_bias("bias, window and mask", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 0}, p.window_left = 5; });
    with_bias("bias of every row, scale below zero", [](P& p, auto*, auto*) { p.bias.row = 0, p.scale = -1; });
    each(Id::kD64BiasFloat32, Id::kD128BiasFloat32, Id::kD192BiasFloat32, Id::kD192BiasFloat32, Id::kD256BiasFloat32, "bias of float32",
         [](P& p, auto*, auto*) {
             p.dtype = DType::kFloat16, p.bias_dtype = DType::kFloat32, p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 64, 8};
         });
    each(Id::kD64BiasFloat32Dropout, Id::kD128BiasFloat32Dropout, Id::kD256BiasFloat32Dropout, Id::kD256BiasFloat32Dropout,
         Id::kD256BiasFloat32Dropout, "bias of float32 and dropout", [](P& p, auto*, auto*) {
             p.dtype = DType::kFloat16, p.bias_dtype = DType::kFloat32, p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 64, 8};
             p.dropout_threshold = 9;
         });
    with_bias("bias with rows of 12 bytes", [](P& p, auto*, auto*) { p.bias.row = 6; });
    with_bias("bias that begins anywhere", [](P& p, auto*, auto*) { p.bias.data = reinterpret_cast<const void*>(uintptr_t(4098)); });
    without_tiles("bias with rows of 12 bytes in a short call", [](P& p, auto*, auto*) { p.bias.row = 6, p.seqlen_q = p.seqlen_k = 60; });
    without_tiles("bias and alibi", [](P& p, auto* slopes, auto*) { p.alibi_slopes = slopes; });
    with_dropout("bias and dropout", [](P& p, auto*, auto*) {
        p.dtype = p.bias_dtype = DType::kFloat16, p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 64, 8};
        p.dropout_threshold = 9;
    });
    with_bias("bias with rows of 12 bytes and mask of pairs", [](P& p, auto*, auto* mask) { p.bias.row = 6, p.mask = {mask, 7, 0, 1}; });
    with_bias("bias and mask of pairs", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 1}; });
    const auto dropout = [&](const char* what, const auto& change) {
        each(Id::kD64Dropout, Id::kD128Dropout, Id::kD192Dropout, Id::kD192Dropout, Id::kD256Dropout, what,
             [&](P& p, auto* slopes, auto* mask) {
                 p.dropout_threshold = 9;
                 change(p, slopes, mask);
             });
    };
    dropout("dropout", [](P&, auto*, auto*) {});
    dropout("dropout, window and mask", [](P& p, auto*, auto* mask) { p.mask = {mask, 7, 0, 0}, p.window_left = 5; });
    dropout("dropout, causal and alibi", [](P& p, auto* slopes, auto*) { p.alibi_slopes = slopes, p.window_right = 0; });
    general("dropout of nearly everything", [](P& p, auto*, auto*) { p.dropout_threshold = kDropoutPairsThreshold + 1; });
    general("dropout and softcap", [](P& p, auto*, auto*) { p.dropout_threshold = 9, p.softcap = 50; });
    general("dropout and scale below zero", [](P& p, auto*, auto*) { p.dropout_threshold = 9, p.scale = -1; });
    const auto intervals = [&](const char* what, const auto& change) {
        each(Id::kD64Intervals, Id::kD128Intervals, Id::kD192V128Intervals, Id::kD192Intervals, Id::kD256Intervals, what,
             [&](P& p, auto* slopes, auto* mask) {
                 p.intervals.data = reinterpret_cast<const int32_t*>(mask);
                 change(p, slopes, mask);
             });
    };
    intervals("mask by intervals", [](P&, auto*, auto*) {});
    intervals("mask by intervals and window", [](P& p, auto*, auto*) { p.window_left = 5; });
    without_tiles("bias and mask by blocks", [](P& p, auto*, auto* mask) { p.blocks.data = mask; });
    general("dropout and mask by blocks", [](P& p, auto*, auto* mask) { p.dropout_threshold = 9, p.blocks.data = mask; });
    // What else a plan for masks does not serve of masks by blocks, the registry refuses by this function.
    const auto refused_blocks = [](const char* what, const auto& change) {
        static const uint8_t mask[1] = {};
        P p{};
        p.headdim = p.headdim_v = 64, p.scale = 0.125f, p.window_left = p.window_right = -1, p.blocks.data = mask;
        EXPECT(backward_serves_masks(p), "mask by blocks");
        change(p);
        EXPECT(!backward_serves_masks(p), "mask by blocks and %s", what);
    };
    refused_blocks("bias", [](P& p) { p.bias.data = ends; });
    refused_blocks("dropout", [](P& p) { p.dropout_threshold = 9; });
    refused_blocks("softcap", [](P& p) { p.softcap = 50; });
    refused_blocks("intervals", [](P& p) { p.intervals.data = ends; });
    refused_blocks("scale below zero", [](P& p) { p.scale = -1; });
    refused_blocks("a mask of packed sequences", [](P& p) { p.mask.data = ends, p.cu_seqlens_q = p.cu_seqlens_k = ends; });
    refused_blocks("too many rows", [](P& p) { p.seqlen_q = (1 << 22) + 1; });
    // What else a plan for intervals does not serve, the registry refuses by this function.
    const auto refused = [](const char* what, const auto& change) {
        static const int32_t numbers[1] = {};
        P p{};
        p.headdim = p.headdim_v = 64, p.scale = 0.125f, p.window_left = p.window_right = -1, p.intervals.data = numbers;
        EXPECT(backward_serves_intervals(p), "mask by intervals");
        change(p);
        EXPECT(!backward_serves_intervals(p) && !backward_serves_bias(p) && !backward_serves_dropout(p), "mask by intervals and %s", what);
    };
    refused("bias",
            [](P& p) { p.dtype = p.bias_dtype = DType::kFloat16, p.bias = {reinterpret_cast<const void*>(uintptr_t(4096)), 0, 64, 8}; });
    refused("dropout", [](P& p) { p.dropout_threshold = 9; });
    refused("softcap", [](P& p) { p.softcap = 50; });
    refused("scale below zero", [](P& p) { p.scale = -1; });
    general("scale below zero", [](P& p, auto*, auto*) { p.scale = -1, p.window_left = 5; });
    general("scale of zero", [](P& p, auto* slopes, auto*) { p.scale = 0, p.alibi_slopes = slopes; });
    general("tiny scale and alibi", [](P& p, auto* slopes, auto*) { p.scale = 1e-7f, p.alibi_slopes = slopes; });
}

// ---- backward: in which tiles rows past the end have to be hidden, because what the copy engine brings for them is not zero ----

void test_ragged_tiles() {
    constexpr int kBlockM = 64;
    const auto tile = [](int rows, bool packed, int64_t bias_row) {
        static const int32_t ends[] = {0, 1};
        AttentionParams p{};
        p.bias = {ends, 0, 0, bias_row};
        if (packed) p.cu_seqlens_q = p.cu_seqlens_k = ends;
        BackwardWork w{};
        w.seqlen_q = rows, w.width = 3;
        const int place = ragged_place<true>(p, w, kBlockM);
        EXPECT(packed == (ragged_place(p, w, kBlockM) != INT_MAX) || rows % kBlockM == 0, "plans without a bias, %d rows", rows);
        return place == INT_MAX ? -1 : place / w.width;
    };
    for (const int rows : {1, 63, 64, 65, 128, 200}) {
        const int last = rows % kBlockM ? rows / kBlockM : -1;
        EXPECT(tile(rows, true, 8) == last && tile(rows, true, 0) == last, "%d rows of a packed sequence", rows);
        EXPECT(tile(rows, false, 8) == -1, "%d rows: past the end the bias is zero", rows);
        EXPECT(tile(rows, false, 0) == last, "%d rows that share a bias", rows);
    }
}

// ---- one tile through the hardware: S = Q K^T, O = S V, and K read back through the swizzle formula ----

template <int kColumns, int kColumnsV, int kBlockN>
struct alignas(1024) TileSmem {
    uint16_t q[64 * kColumns], k[kBlockN * kColumns], v[kBlockN * kColumnsV];
    uint64_t full;
};

// kD: the columns that are multiplied, out of the kColumns in shared memory.
template <typename T, int kD, int kBlockN, int kDV>
__global__ void __launch_bounds__(128, 1)
    tile_kernel(const __grid_constant__ CUtensorMap map_q, const __grid_constant__ CUtensorMap map_k,
                const __grid_constant__ CUtensorMap map_v, int loads_q, int loads_v, float* S, float* O, T* K) {
    constexpr int kColumns = (kD + 63) / 64 * 64, kColumnsV = (kDV + 63) / 64 * 64;
    extern __shared__ __align__(1024) unsigned char shared[];
    auto& smem = *reinterpret_cast<TileSmem<kColumns, kColumnsV, kBlockN>*>(shared);
    const uint32_t q = shared_address(smem.q), k = shared_address(smem.k), v = shared_address(smem.v), full = shared_address(&smem.full);
    if (threadIdx.x == 0) mbarrier_init(full, 1), fence_mbarrier_init();
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, sizeof smem.q + sizeof smem.k + sizeof smem.v);
        for (int c = 0; c < loads_q; ++c) {
            tma_load(q + c * 64 * kChunkRowBytes, &map_q, full, 64 * c, 0, 0, 0, 0, kEvictFirst);
            tma_load(k + c * kBlockN * kChunkRowBytes, &map_k, full, 64 * c, 0, 0, 0, 0, kEvictLast);
        }
        for (int c = 0; c < loads_v; ++c) tma_load(v + c * kBlockN * kChunkRowBytes, &map_v, full, 64 * c, 0, 0, 0, 0, kEvictLast);
    }
    __syncwarp();
    mbarrier_wait(full, 0);
    float s[kBlockN / 2], o[kDV / 2];
    uint32_t p[kBlockN / 4];
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kD / 16; ++i)
        wgmma_ss<T, kBlockN>(s, wgmma_descriptor(q, 16) + descriptor_k_step(i, 64), wgmma_descriptor(k, 16) + descriptor_k_step(i, kBlockN),
                             i != 0);
    wgmma_commit();
    wgmma_wait<0>(s);
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) p[i] = pack_16<T>(s[2 * i], s[2 * i + 1]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i)
        wgmma_rs<T, kDV, 1>(o, p + 4 * i, wgmma_descriptor(v, kBlockN * kChunkRowBytes) + descriptor_row_step(i), i != 0);
    wgmma_commit();
    wgmma_wait<0>(o);
#pragma unroll
    for (int i = 0; i < kBlockN / 2; ++i) S[accumulator_row(threadIdx.x, i) * kBlockN + accumulator_column(threadIdx.x, i)] = s[i];
#pragma unroll
    for (int i = 0; i < kDV / 2; ++i) O[accumulator_row(threadIdx.x, i) * kDV + accumulator_column(threadIdx.x, i)] = o[i];
    for (int i = threadIdx.x; i < kBlockN * kD; i += 128) {
        const int row = i / kD, column = i % kD;
        K[i] = *reinterpret_cast<T*>(reinterpret_cast<unsigned char*>(smem.k) + swizzled_offset(kBlockN, row, column / 8) + column % 8 * 2);
    }
}

// headdim and headdim_v may be below kD and kDV; TMA fills the rest with zeros.
template <typename T, int kD, int kBlockN, int kDV>
void test_tile(const char* type, int headdim, int headdim_v) {
    constexpr int kColumns = (kD + 63) / 64 * 64, kColumnsV = (kDV + 63) / 64 * 64;
    const int rows_k = kBlockN - 3;  // TMA fills the rows past the last key with zeros
    T *q, *k, *v, *K;
    float *S, *O;
    cudaMallocManaged(&q, 64 * headdim * sizeof(T)), cudaMallocManaged(&k, rows_k * headdim * sizeof(T)),
        cudaMallocManaged(&v, rows_k * headdim_v * sizeof(T));
    cudaMallocManaged(&S, 64 * kBlockN * sizeof(float)), cudaMallocManaged(&O, 64 * kDV * sizeof(float)),
        cudaMallocManaged(&K, kBlockN * kD * sizeof(T));
    std::mt19937 random(kD + kBlockN);
    const auto fill = [&](T* x, int count, int sparsity) {
        for (int i = 0; i < count; ++i) x[i] = T(random() % sparsity ? 0.0f : float(int(random() % 5) - 2));
    };
    fill(q, 64 * headdim, 4), fill(k, rows_k * headdim, 1), fill(v, rows_k * headdim_v, 1);  // |S| stays below 256, exact in bfloat16

    CUtensorMap map_q, map_k, map_v;
    int loads_q = 0, loads_k = 0, loads_v = 0;
    const bool half = std::is_same_v<T, __half>;
    cudaError_t error = encode_tiles({"q", q, half, headdim, 64, 1, 1, 2 * headdim, 0, 0, 64, kColumns}, &map_q, &loads_q);
    if (!error) error = encode_tiles({"k", k, half, headdim, rows_k, 1, 1, 2 * headdim, 0, 0, kBlockN, kColumns}, &map_k, &loads_k);
    if (!error) error = encode_tiles({"v", v, half, headdim_v, rows_k, 1, 1, 2 * headdim_v, 0, 0, kBlockN, kColumnsV}, &map_v, &loads_v);
    const auto kernel = tile_kernel<T, kD, kBlockN, kDV>;
    const int bytes = sizeof(TileSmem<kColumns, kColumnsV, kBlockN>);
    if (!error) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (!error) kernel<<<1, 128, bytes>>>(map_q, map_k, map_v, loads_q, loads_v, S, O, K), error = cudaDeviceSynchronize();
    EXPECT(!error, "%s d%d n%d dv%d: %s", type, kD, kBlockN, kDV, cudaGetErrorString(error));
    if (error) return;

    int wrong_k = 0, wrong_s = 0, wrong_o = 0;
    std::vector<float> s(64 * kBlockN);
    for (int j = 0; j < kBlockN; ++j)
        for (int d = 0; d < kD; ++d) wrong_k += float(K[j * kD + d]) != (j < rows_k && d < headdim ? float(k[j * headdim + d]) : 0.0f);
    for (int i = 0; i < 64; ++i)
        for (int j = 0; j < kBlockN; ++j) {
            for (int d = 0; j < rows_k && d < headdim; ++d) s[i * kBlockN + j] += float(q[i * headdim + d]) * float(k[j * headdim + d]);
            wrong_s += S[i * kBlockN + j] != s[i * kBlockN + j];
        }
    for (int i = 0; i < 64; ++i)
        for (int d = 0; d < kDV; ++d) {
            float sum = 0;
            for (int j = 0; j < rows_k && d < headdim_v; ++j) sum += s[i * kBlockN + j] * float(v[j * headdim_v + d]);
            wrong_o += O[i * kDV + d] != sum;
        }
    EXPECT(!wrong_k && !wrong_s && !wrong_o, "%s d%d (%d) n%d dv%d (%d): wrong elements in K %d, S %d, O %d", type, kD, headdim, kBlockN,
           kDV, headdim_v, wrong_k, wrong_s, wrong_o);
    for (void* x : {(void*)q, (void*)k, (void*)v, (void*)K, (void*)S, (void*)O}) cudaFree(x);
}

template <typename T>
void test_tiles(const char* type) {
    test_tile<T, 64, 128, 64>(type, 64, 64);
    test_tile<T, 64, 128, 64>(type, 40, 24);
    test_tile<T, 96, 128, 96>(type, 96, 96);
    test_tile<T, 96, 128, 96>(type, 72, 80);
    test_tile<T, 128, 128, 128>(type, 128, 128);
    test_tile<T, 128, 80, 128>(type, 128, 64);
    test_tile<T, 192, 112, 192>(type, 192, 192);
    test_tile<T, 192, 96, 192>(type, 136, 160);
    test_tile<T, 192, 128, 128>(type, 192, 128);
    test_tile<T, 256, 64, 256>(type, 256, 256);
}

// If a tensor map cannot be made, the error text names the tensor and quotes the driver.
void test_failed_map() {
    CUtensorMap map;
    int loads = 0;
    alignas(16) unsigned char memory[16];
    const cudaError_t error =
        encode_tiles({"values", memory, true, 64, 64, 1, 1, 24, 0, 0, 64, 64}, &map, &loads);  // 24 is not a multiple of 16
    const std::string why = tensor_map_failure();
    EXPECT(error == cudaErrorInvalidValue, "a stride of 24 bytes: %s", cudaGetErrorString(error));
    EXPECT(why.find("the tensor map of values (data=") == 0 && why.find("CUDA_ERROR_INVALID_VALUE") != std::string::npos, "%s",
           why.c_str());
    EXPECT(!*tensor_map_failure(), "the same failure is reported twice");
}

}  // namespace

// ---- backward: parts of walks ----

BackwardParams shared_heads(int batch, int seqlen, int heads, int heads_k, bool causal, int headdim) {
    BackwardParams b{};
    AttentionParams& p = b.forward;
    p.batch = batch, p.seqlen_q = p.seqlen_k = seqlen, p.nheads = heads, p.nheads_k = heads_k, p.group = heads / heads_k;
    p.headdim = p.headdim_v = headdim, p.scale = 0.1f, p.window_left = -1, p.window_right = causal ? 0 : -1;
    return b;
}
WalkParts parts_of(const BackwardParams& b) { return backward_walk_parts(b, backward_plan(backward_choose(b.forward)), 132); }

// Parts of heads divide the group, parts of rows have a tile each, and there are few; calls that fill the GPU evenly have one.
void test_walk_parts() {
    for (int batch : {1, 2, 4, 16})
        for (int seqlen : {1, 64, 269, 1024, 2048, 8192})
            for (int heads_k : {1, 2, 3, 8})
                for (int group : {1, 2, 4, 7, 16})
                    for (int headdim : {64, 128, 192, 256})
                        for (bool causal : {false, true}) {
                            const BackwardParams b = shared_heads(batch, seqlen, heads_k * group, heads_k, causal, headdim);
                            const int64_t blocks = backward_blocks(b.forward, backward_plan(backward_choose(b.forward)));
                            const WalkParts parts = parts_of(b);
                            const int count = parts.count();
                            EXPECT(parts.heads >= 1 && group % parts.heads == 0, "%d parts of a group of %d", parts.heads, group);
                            EXPECT(parts.rows >= 1 && (parts.rows == 1 || 2 * parts.rows <= ceil_div(seqlen, headdim > 64 ? 64 : 128)),
                                   "%d parts of %d rows", parts.rows, seqlen);
                            EXPECT(count == 1 || blocks * count <= 8 * 132, "%d parts of %lld blocks", count, (long long)blocks);
                        }
    EXPECT(parts_of(shared_heads(4, 269, 32, 2, true, 128)).count() >= 4, "24 blocks with walks of 16 heads stay whole");
    EXPECT(parts_of(shared_heads(4, 2048, 4, 1, true, 128)).count() >= 2, "64 blocks of uneven walks stay whole");
    EXPECT(parts_of(shared_heads(3, 4097, 7, 1, true, 80)).count() >= 3, "99 blocks of walks of 7 heads stay whole");
    EXPECT(parts_of(shared_heads(1, 2048, 2, 2, false, 128)).rows >= 4, "32 blocks of 32 tiles stay whole");
    EXPECT(parts_of(shared_heads(1, 64, 2, 1, true, 64)).count() == 1, "a short call is cut");
    EXPECT(parts_of(shared_heads(2, 2048, 16, 16, false, 128)).count() == 1, "512 equal blocks are cut");
    BackwardParams late = shared_heads(1, 3000, 1, 1, true, 128);  // of whose rows the last 128 see keys
    late.forward.seqlen_k = 128;
    EXPECT(parts_of(late).count() == 1, "a walk of 3 tiles has %d parts", parts_of(late).count());
    BackwardParams few_keys = shared_heads(8, 32768, 1, 1, false, 128);
    few_keys.forward.seqlen_k = 128;
    EXPECT(parts_of(few_keys).rows == 16, "8 blocks of 512 tiles have %d parts", parts_of(few_keys).rows);
    // The addition visits every key that there is, and few blocks more, whatever a packed call says about its longest sequence.
    static const int32_t ends[] = {0, 900, 1000};
    BackwardParams packed = shared_heads(2, 1000, 64, 32, true, 64);
    packed.forward.cu_seqlens_q = packed.forward.cu_seqlens_k = ends, packed.forward.total_q = packed.forward.total_k = 1000;
    EXPECT(addition_blocks(packed.forward) == 2 * 63 * 2 * 32, "%lld blocks", (long long)addition_blocks(packed.forward));
    packed.forward.seqlen_q = packed.forward.seqlen_k = 900;
    EXPECT(addition_blocks(packed.forward) == 2 * 57 * 2 * 32, "%lld blocks", (long long)addition_blocks(packed.forward));
    packed.forward.seqlen_q = packed.forward.seqlen_k = INT_MAX - 4096;
    EXPECT(addition_blocks(packed.forward) == 2 * 63 * 2 * 32, "%lld blocks", (long long)addition_blocks(packed.forward));
}

int main() {
    test_items();
    test_any_lengths();
    test_choice();
    test_ragged_tiles();
    test_walk_parts();
    std::printf("work items: %s\n", failures ? "FAILED" : "passed");
    int major = 0, minor = 0;
    const bool hopper = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
                        cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0) == cudaSuccess && major == 9 && minor == 0;
    if (!hopper) {
        std::printf("no Hopper GPU: tiles not tested\n");
        return failures ? 1 : 77;
    }
    cudaFree(nullptr);  // makes the context current, which the driver needs
    test_failed_map();
    test_tiles<__nv_bfloat16>("bf16");
    test_tiles<__half>("fp16");
    std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
