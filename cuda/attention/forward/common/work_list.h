// work_list.h: how the Hopper forward kernels distribute their work. An item is block_m query rows of one head. The grid has one block on
// each multiprocessor, and a block takes one item after another.
#pragma once

#include <cstdint>

#include "attention/common/params.h"
#include "attention/common/seen_blocks.h"

namespace fa {

enum class WorkOrder {
    kStride,  // block i takes items i, i + blocks, ...: no setup, and balanced when all items are equally long
    kCounter  // a counter in the workspace, zeroed before every launch: a free block takes the longest item left
};

struct ForwardWorkList {
    int items, blocks;
    int m_blocks;        // dense: query blocks of a sequence
    bool longest_first;  // dense: items in order of their length, section by section
    // The heads of a section share L2. Within a section the longest query blocks of all its heads come first (varlen: those of a sequence).
    // Dense calls: the first `leading` heads go in sections of leading_section heads, the others in sections of section_heads.
    int leading, leading_section, section_heads;
    WorkOrder order;
    int* counter;  // kCounter: items handed out so far, without the first of every block
};

// Query blocks of all heads. A varlen call does not know the lengths of its sequences on the host, so it counts a few items that turn out
// empty.
inline int64_t work_items(const AttentionParams& p, int block_m) {
    const int64_t blocks =
        p.cu_seqlens_q ? int64_t(p.total_q) / block_m + p.batch : (int64_t(p.seqlen_q) + block_m - 1) / block_m * p.batch;
    return blocks * p.nheads;
}

inline WorkOrder work_order(const AttentionParams& p, int64_t items, int multiprocessors) {
    // Causal: compared with a stride, the counter gains from 1 % (512 keys) to 40 % (head dim 256, 16k keys). Its memset costs 2 us, which
    // is 8 .. 17 % of calls of 12 to 20 us and 3 % of a 39 us call, whose `work` is 10^10.
    const double work = double(p.batch) * p.nheads * p.seqlen_q * p.seqlen_k * (p.headdim + p.headdim_v);
    if (items <= multiprocessors || (!p.cu_seqlens_q && work <= 1e10)) return WorkOrder::kStride;
    const bool padded = p.mask.data && p.mask.row == 0;  // a mask of keys may leave each sequence another number of tiles
    const bool skips = p.intervals.data || has_seen_blocks(p);
    const bool uneven = p.cu_seqlens_q || p.cache.seqlens || p.window_left >= 0 || p.window_right >= 0 || padded || skips;
    return uneven ? WorkOrder::kCounter : WorkOrder::kStride;
}

// Heads whose K and V take 32 of the 50 MB of L2.
inline int64_t heads_of_section(const AttentionParams& p) {
    const int64_t bytes = 2 * int64_t(p.seqlen_k) * (p.headdim + p.headdim_v), all = (p.cu_seqlens_q ? 1 : int64_t(p.batch)) * p.nheads;
    int64_t heads = 1;
    while (2 * heads * bytes <= (int64_t(32) << 20) && heads < all) heads *= 2;
    return heads * p.group < all ? heads * p.group : all;
}

inline ForwardWorkList forward_work_list(const AttentionParams& p, int block_m, int multiprocessors) {
    ForwardWorkList list{};
    const int64_t items = work_items(p, block_m);
    list.items = int(items);
    list.blocks = int(items < multiprocessors ? items : multiprocessors);
    list.m_blocks = (p.seqlen_q + block_m - 1) / block_m;
    list.longest_first = p.window_right >= 0;
    list.section_heads = int(heads_of_section(p));
    list.order = work_order(p, items, multiprocessors);
    if (list.order == WorkOrder::kCounter) list.counter = static_cast<int*>(align_up(p.workspace, alignof(int)));
    return list;
}
// Bytes of the counter and of room to align it, or 0.
constexpr size_t kWorkListBytes = 2 * sizeof(int);
inline size_t work_list_workspace(const AttentionParams& p, int block_m, int multiprocessors) {
    return work_order(p, work_items(p, block_m), multiprocessors) == WorkOrder::kCounter ? kWorkListBytes : 0;
}

// A section as large as L2 reads the K and V of its heads from memory during its first pass and never again. Short sequences need the
// memory's bandwidth all the time, so their leading heads go in sections of half a wave of items. Only as many heads as fit in L2 stay in
// one section, at the end, where it decides how evenly the blocks finish: +3 .. 8 % at 512 and 1k, causal, head dims 128 and 256. Longer
// sequences: +1 .. -3 %.
inline void add_leading_sections(const AttentionParams& p, int multiprocessors, ForwardWorkList* list) {
    if (p.window_right < 0 || p.cu_seqlens_q) return;
    const int64_t all = int64_t(p.batch) * p.nheads;
    int64_t heads = p.group;
    while (2 * heads * list->m_blocks <= multiprocessors / 2) heads *= 2;
    list->leading_section = int(heads);
    list->leading = p.seqlen_k <= 1024 ? int((all - list->section_heads) / p.group * p.group) : 0;
}

enum class WorkState : int {
    kEnd,    // there are no more items
    kEmpty,  // varlen: the item has no rows
    kRows
};

// One item, and what its block needs to know about the sequence. The producer computes it for all threads of the block.
struct alignas(16) ForwardWork {
    WorkState state;
    int row0;  // first query row of the block
    int head, batch;
    int seqlen_q, seqlen_k;
    int q_row, k_row;  // varlen: the sequence's first row; else 0
    int left, right;   // row i sees keys i + left .. i + right, within 0 .. seqlen_k - 1
    int first_tile, last_tile;
    int shift;  // last on purpose: elsewhere it costs fp8_sm90 at head dim 256 a register that its wgmma needs (C7511)
};

FA_HOST_DEVICE int clamp64(int64_t x, int low, int high) { return x < low ? low : x > high ? high : int(x); }

// Finds item `index` of the list. Tiles::kBlockM: query rows of an item; kBlockN: keys of a tile; kCaches: K and V may be a cache.
template <typename Tiles>
FA_HOST_DEVICE void find_work(const AttentionParams& p, const ForwardWorkList& list, int index, ForwardWork& w) {
    constexpr int kBlockM = Tiles::kBlockM, kBlockN = Tiles::kBlockN;
    w.state = WorkState::kEnd;
    if (index >= list.items) return;
    w.state = WorkState::kEmpty;
    int m;
    if (p.cu_seqlens_q) {
        // The heads of a section share L2. A slot (one query block) is taken for all of them before the next slot.
        const int slots = list.items / p.nheads, section = index / (list.section_heads * slots), first = section * list.section_heads;
        const int i = index - first * slots, heads = list.section_heads < p.nheads - first ? list.section_heads : p.nheads - first;
        int slot = i / heads;
        w.head = first + i - slot * heads;
        // Of two parts of a sequence, the later one sees more keys under a causal mask, so parts go from the last to the first.
        if (p.parts) slot = slots - 1 - slot;
        // Sequence b owns slots cu[b] / M + b .. cu[b + 1] / M + b. That is enough wherever the sequence starts, and needs no prefix sum.
        const auto start = [&](int b) { return clamp_to(p.cu_seqlens_q[b], 0, p.total_q); };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (start(middle) / kBlockM + middle <= slot) low = middle;
            else high = middle - 1;
        }
        w.batch = low;
        w.q_row = start(low);
        w.seqlen_q = count_rows(p, low, w.q_row);
        const KeySpan keys = keys_of(p, low, w.seqlen_q);
        w.k_row = keys.first_row, w.seqlen_k = keys.count, w.shift = keys.shift;
        m = slot - w.q_row / kBlockM - low;
        if (!p.parts) m = (w.seqlen_q + kBlockM - 1) / kBlockM - 1 - m;
    } else {
        int sequence_head;
        if (list.longest_first) {
            const bool early = index < list.leading * list.m_blocks;
            const int width = early ? list.leading_section : list.section_heads;
            int first = early ? 0 : list.leading, i = index - first * list.m_blocks;
            const int section = i / (width * list.m_blocks);
            first += section * width, i -= section * width * list.m_blocks;
            const int left = (early ? list.leading : p.batch * p.nheads) - first, heads = width < left ? width : left, step = i / heads;
            m = list.m_blocks - 1 - step;
            sequence_head = first + i - step * heads;
        } else {
            sequence_head = index / list.m_blocks;
            m = index - sequence_head * list.m_blocks;
        }
        w.batch = sequence_head / p.nheads;
        w.head = sequence_head - w.batch * p.nheads;
        w.q_row = w.k_row = 0;
        w.seqlen_q = p.seqlen_q, w.seqlen_k = Tiles::kCaches && p.cache.entries ? cached_keys(p, w.batch) : p.seqlen_k;
        w.shift = p.top_left ? 0 : w.seqlen_k - w.seqlen_q;
    }
    w.row0 = m * kBlockM;
    if (m < 0 || w.row0 >= w.seqlen_q) return;
    w.state = WorkState::kRows;
    w.right = p.window_right < 0 ? w.seqlen_k : clamp64(int64_t(w.shift) + p.window_right, -w.seqlen_q, w.seqlen_k);
    w.left = p.window_left < 0 ? -w.seqlen_q : clamp64(int64_t(w.shift) - p.window_left, -w.seqlen_q, w.seqlen_k);
    // At least one tile, so that rows without keys need no code path.
    const int end_row = w.row0 + kBlockM < w.seqlen_q ? w.row0 + kBlockM : w.seqlen_q, end = clamp_to(end_row + w.right, 0, w.seqlen_k);
    w.first_tile = clamp_to(w.row0 + w.left, 0, w.seqlen_k) / kBlockN;
    w.last_tile = (end + kBlockN - 1) / kBlockN - 1;
    if (w.last_tile < w.first_tile) w.last_tile = w.first_tile;
}

}  // namespace fa
