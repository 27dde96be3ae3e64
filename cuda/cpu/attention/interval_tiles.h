// interval_tiles.h: masks by intervals on the host: the bounds of each tile of keys (HiddenBounds in mask.h), by which the kernels skip
// tiles that no row sees and compare none where every row sees every key. The bounds are in the workspace.
#pragma once

#include <algorithm>

#include "attention/common/mask.h"
#include "cpu/common/parallel.h"

namespace fa::cpu {

class IntervalTiles {
public:
    // keys: of a tile. `at`: `size` words.
    IntervalTiles(const AttentionParams& params, int32_t keys, void* at)
        : p(params), keys_(keys), bounds_(static_cast<HiddenBounds*>(at)) {}

    static int64_t size(const AttentionParams& p, int32_t keys) {
        return p.intervals.data ? heads(p) * tiles(p, keys) * int64_t(sizeof(HiddenBounds) / sizeof(int32_t)) : 0;
    }

    void fill(int threads) const {
        if (!p.intervals.data) return;
        parallel_for(heads(p) * p.batch, threads, [&](int64_t task, int) {
            const int32_t b = int32_t(task % p.batch), head = int32_t(task / p.batch) * p.intervals.heads_of_entry;
            const Sequence s = sequence_of(p, b);
            HiddenBounds* to = bounds_ + place(b, head);
            const int32_t* numbers = row_indices_of(p, b, head);
            for (int32_t first = 0; first < s.seqlen_k; first += keys_, ++to) {
                to->clear();
                for (int32_t j = first; j < std::min(first + keys_, s.seqlen_k); ++j)
                    to->add(hidden_rows(p, numbers + j * p.intervals.key));
            }
        });
    }

    // The bounds of the first tile of sequence b, for a query head; nullptr without intervals.
    const HiddenBounds* of(int32_t b, int32_t head) const { return p.intervals.data ? bounds_ + place(b, head) : nullptr; }

private:
    static int64_t heads(const AttentionParams& p) { return p.nheads / p.intervals.heads_of_entry; }
    // Tiles of all sequences. In a varlen call the first tile of each sequence is a new one.
    static int64_t tiles(const AttentionParams& p, int32_t keys) {
        return p.cu_seqlens_k ? p.total_k / keys + p.batch : p.batch * ceil_div(p.seqlen_k, keys);
    }
    int64_t place(int32_t b, int32_t head) const {
        const int64_t first = p.cu_seqlens_k ? first_key_row(p, b) / keys_ + b : b * ceil_div(p.seqlen_k, keys_);
        return head / p.intervals.heads_of_entry * tiles(p, keys_) + first;
    }

    const AttentionParams& p;
    const int32_t keys_;
    HiddenBounds* const bounds_;
};

}  // namespace fa::cpu
