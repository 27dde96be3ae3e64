#include "distributed/layout.h"

#include <algorithm>

namespace fa::distributed {

std::vector<Segment> segments_of(fa_layout layout, int rank, int size, const std::vector<int32_t>& cu_seqlens) {
    std::vector<Segment> found;
    int64_t row = 0;
    int32_t sequence_before = -1, round = 0;
    const auto add = [&](int32_t sequence, int64_t begin, int64_t end) {
        if (begin >= end) return;
        round = sequence == sequence_before ? round + 1 : 0, sequence_before = sequence;
        found.push_back({sequence, int32_t(begin), int32_t(end), row, round});
        row += end - begin;
    };
    const auto sequences = int32_t(cu_seqlens.size()) - 1;
    if (layout == FA_LAYOUT_FLAT) {
        const int64_t total = cu_seqlens.back(), first = rank * total / size, last = (rank + 1) * total / size;
        for (int32_t b = 0; b < sequences; ++b) {
            const int64_t start = cu_seqlens[b], end = cu_seqlens[b + 1];
            add(b, std::max(first, start) - start, std::min(last, end) - start);
        }
        return found;
    }
    for (int32_t b = 0; b < sequences; ++b) {
        const int64_t length = int64_t(cu_seqlens[b + 1]) - cu_seqlens[b];
        const int64_t chunks = layout == FA_LAYOUT_ZIGZAG ? 2 * int64_t(size) : size;
        const auto bound = [&](int64_t chunk) { return chunk * length / chunks; };
        add(b, bound(rank), bound(rank + 1));
        if (layout == FA_LAYOUT_ZIGZAG) add(b, bound(chunks - 1 - rank), bound(chunks - rank));
    }
    return found;
}

Interval Window::keys(const Segment& queries, int64_t seqlen_q, int64_t seqlen_k, int64_t align) const {
    const int64_t first = queries.begin + shift(seqlen_q, seqlen_k), last = queries.end - 1 + shift(seqlen_q, seqlen_k);
    const int64_t begin = left < 0 ? 0 : std::clamp<int64_t>(first - left, 0, seqlen_k);
    const int64_t end = right < 0 ? seqlen_k : std::clamp<int64_t>(last + right + 1, 0, seqlen_k);
    return {begin / align * align, std::max(end, begin)};
}

}  // namespace fa::distributed
