// layout.h: which tokens a rank holds, and which keys its queries see. Host only; every rank computes it for every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "flash_attn_distributed.h"

namespace fa::distributed {

// Consecutive tokens of a sequence, and the row that holds the first of them in their rank's memory.
struct Segment {
    int32_t sequence, begin, end;
    int64_t row;
    int32_t round;  // number of segments of this sequence that the rank has before this one
    int64_t length() const { return int64_t(end) - begin; }
};

// The segments of a rank, in the order of its rows; empty ones are left out.
std::vector<Segment> segments_of(fa_layout layout, int rank, int size, const std::vector<int32_t>& cu_seqlens);

// Tokens begin .. end - 1 of a sequence.
struct Interval {
    int64_t begin, end;
};

// The options that decide which keys a query sees, the same for all sequences. -1 = no limit.
struct Window {
    bool top_left;
    int64_t left, right;
    int64_t shift(int64_t seqlen_q, int64_t seqlen_k) const { return top_left ? 0 : seqlen_k - seqlen_q; }
    // Keys that the queries of a segment see; none if begin >= end. begin is a multiple of `align`.
    Interval keys(const Segment& queries, int64_t seqlen_q, int64_t seqlen_k, int64_t align) const;
};

}  // namespace fa::distributed
