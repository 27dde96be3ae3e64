// forward_wgmma_sm90_work.cuh: what the roles of forward_wgmma_sm90 hand each other: the schedule, work items, the block's shared memory
// and its barriers, and how an item is found.
#pragma once

#include "attention/params.h"
#include "attention/tiles.h"
#include "device/wgmma.cuh"

namespace fa {

struct WgmmaSchedule {
    int items, m_blocks;  // m_blocks: query blocks of a sequence (dense)
    // Longest first: the heads of a section share L2, their longest query blocks come first. `leading` heads in small sections, then the
    // rest.
    int leading, leading_section, section_heads;
    WorkOrder order;
    bool longest_first;
    int* counter;                   // WorkOrder::kCounter: items handed out, beyond every block's first
    int q_loads, k_loads, v_loads;  // boxes that make a tile
    bool page_copies;               // a paged cache whose pages tiles do not divide: its rows are copied one by one
    int page_boxes;                 // the same, where boxes of so many rows make a tile; 0 otherwise
};

// One work item and everything about its sequence, worked out by the producer.
struct alignas(16) WgmmaWork {
    int valid;
    int row0;  // first query row of the block
    int head, batch;
    int seqlen_q, seqlen_k;
    int q_row, k_row;  // varlen: the sequence's first row, else 0
    int left, right;   // row i sees keys i + left .. i + right of 0 .. seqlen_k - 1
    int first_tile, last_tile;
};

struct WgmmaItem : WgmmaWork {
    int has_rows;  // the producer's own
};

template <typename T, WgmmaPlanId kId>
struct alignas(1024) WgmmaSmem {
    static constexpr WgmmaPlan kPlan = wgmma_plan(kId);
    T q[kPlan.warpgroups][64 * kPlan.columns()];
    T k[kPlan.stages][kPlan.block_n * kPlan.columns()];
    T v[kPlan.stages][kPlan.block_n * kPlan.columns_v()];
    uint64_t q_full, q_empty;
    uint64_t k_full[kPlan.stages], k_empty[kPlan.stages], v_full[kPlan.stages], v_empty[kPlan.stages];
    static constexpr int kWorkSlots = 3;  // consumers keep theirs until the item's last store, and the producer is one ahead
    uint64_t work_full[kWorkSlots], work_empty[kWorkSlots];
    WgmmaItem work[kWorkSlots];
    uint8_t seen[2][kPlan.general ? kPlan.block_n : 1];  // does any row of the block see this key? For two neighbouring tiles
};

// Named barriers; 0 is __syncthreads.
enum WgmmaBarrier : int {
    kTurn = 1,       // 1, 2, 3: warpgroup's turn to issue products, handed round by its predecessor
    kWarpgroup = 4,  // 4, 5, 6: the threads of one warpgroup
    kConsumers = 7,  // all consumers
    kProducer = 8    // the producer's warpgroup
};

// Position in a circular buffer. Both sides start at slot 0, phase 0, and never reset.
struct Ring {
    uint32_t slot = 0, phase = 0;
    __device__ __forceinline__ void next(uint32_t slots) {
        if (++slot == slots) slot = 0, phase ^= 1;
    }
};

FA_HOST_DEVICE int clamp64(int64_t x, int low, int high) { return x < low ? low : x > high ? high : int(x); }

// Item `index` of the list, longest first where lengths differ. False when it has no rows, or (then also !valid) there are no more items.
template <int kBlockM, int kBlockN, bool kCaches = true>  // kCaches: K and V may be a cache
FA_HOST_DEVICE bool find_work(const AttentionParams& p, const WgmmaSchedule& schedule, int index, WgmmaWork& w) {
    w.valid = index < schedule.items;
    if (!w.valid) return false;
    int m;
    if (p.cu_seqlens_q) {
        const int slot = index / p.nheads;
        w.head = index - slot * p.nheads;
        // Sequence b owns slots cu[b] / M + b .. cu[b + 1] / M + b: enough wherever it starts, and no prefix sum is needed.
        const auto start = [&](int b) { return clamp_to(p.cu_seqlens_q[b], 0, p.total_q); };
        int low = 0, high = p.batch - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (start(middle) / kBlockM + middle <= slot) low = middle;
            else high = middle - 1;
        }
        w.batch = low;
        w.q_row = start(low);
        w.k_row = clamp_to(p.cu_seqlens_k[low], 0, p.total_k);
        w.seqlen_q = clamp_to(clamp_to(p.cu_seqlens_q[low + 1], w.q_row, p.total_q) - w.q_row, 0, p.seqlen_q);
        w.seqlen_k = clamp_to(clamp_to(p.cu_seqlens_k[low + 1], w.k_row, p.total_k) - w.k_row, 0, p.seqlen_k);
        m = (w.seqlen_q + kBlockM - 1) / kBlockM - 1 - (slot - w.q_row / kBlockM - low);
    } else {
        int sequence_head;
        if (schedule.longest_first) {
            const int m_blocks = schedule.m_blocks;
            const bool early = index < schedule.leading * m_blocks;
            const int width = early ? schedule.leading_section : schedule.section_heads;
            int first = early ? 0 : schedule.leading, i = index - first * m_blocks;
            const int section = i / (width * m_blocks);
            first += section * width, i -= section * width * m_blocks;
            const int heads = min(width, (early ? schedule.leading : p.batch * p.nheads) - first), step = i / heads;
            m = schedule.m_blocks - 1 - step;
            sequence_head = first + i - step * heads;
        } else {
            sequence_head = index / schedule.m_blocks;
            m = index - sequence_head * schedule.m_blocks;
        }
        w.batch = sequence_head / p.nheads;
        w.head = sequence_head - w.batch * p.nheads;
        w.q_row = w.k_row = 0;
        w.seqlen_q = p.seqlen_q, w.seqlen_k = kCaches && p.cache.entries ? cached_keys(p, w.batch) : p.seqlen_k;
    }
    w.row0 = m * kBlockM;
    if (m < 0 || w.row0 >= w.seqlen_q) return false;
    const int shift = p.top_left ? 0 : w.seqlen_k - w.seqlen_q;
    w.right = p.window_right < 0 ? w.seqlen_k : clamp64(int64_t(shift) + p.window_right, -w.seqlen_q, w.seqlen_k);
    w.left = p.window_left < 0 ? -w.seqlen_q : clamp64(int64_t(shift) - p.window_left, -w.seqlen_q, w.seqlen_k);
    // At least one tile, so that rows without keys need no path of their own.
    const int end = clamp_to(min(w.row0 + kBlockM, w.seqlen_q) + w.right, 0, w.seqlen_k);
    w.first_tile = clamp_to(w.row0 + w.left, 0, w.seqlen_k) / kBlockN;
    w.last_tile = max(w.first_tile, (end + kBlockN - 1) / kBlockN - 1);
    return true;
}

}  // namespace fa
