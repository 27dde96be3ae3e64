// ring.cpp: processes the keys of one rank after another, with two ranks' keys in memory at a time. Results over disjoint keys are added up
// in float32, together with the logarithms of their sums (Liu et al. 2023, Ring Attention). It serves sequences whose keys do not all fit
// into the memory of one rank, and readers.
//
// Keys come directly from their owner, so no rank waits for the one before it.
#include <algorithm>

#include "distributed/call.h"

namespace fa::distributed {
namespace {

const char* refusal(const Problem& p, char* text, size_t size) {
    if (p.a.bias.data) return "bias: its columns would have to be cut with the keys";
    if (p.a.mask.data) return "mask: its columns would have to be cut with the keys";
    if (p.a.dropout_p > 0)
        for (const auto& segments : p.k)
            for (const Segment& s : segments)
                if (s.begin % 8) {
                    std::snprintf(text, size, "dropout: a rank's keys begin at token %d, which is no multiple of 8", s.begin);
                    return text;
                }
    return "";
}

int rounds_of(const Problem& p) { return p.layout == FA_LAYOUT_ZIGZAG ? 2 : 1; }

// The keys of segment `keys` that `queries` sees.
Interval common_keys(const Problem& p, const Segment& queries, const Segment& keys) {
    const Interval seen = p.keys_of(queries);
    const int64_t begin = std::max<int64_t>(seen.begin, keys.begin), end = std::min<int64_t>(seen.end, keys.end);
    if (begin >= end) return {keys.begin, keys.begin};
    return {begin, end};
}

// Parts for this rank's queries (of round round_q, or of all rounds if -1) and the keys of round `round_k` that `peer` has, in a buffer
// with the peer's rows.
Parts parts_of(const Problem& p, int peer, int round_q, int round_k) {
    Parts parts;
    size_t first = 0;  // the peer's first segment of this or a later sequence
    const auto& keys = p.k[size_t(peer)];
    for (const Segment& s : p.q[size_t(p.rank)]) {
        if (round_q >= 0 && s.round != round_q) continue;
        while (first < keys.size() && keys[first].sequence < s.sequence) ++first;
        const Segment* found = nullptr;
        for (size_t i = first; i < keys.size() && keys[i].sequence == s.sequence; ++i)
            if (keys[i].round == round_k) found = &keys[i];
        Interval seen{0, 0};
        if (found) seen = common_keys(p, s, *found);
        // Key ranges must ascend, even those without keys.
        const int64_t behind = parts.part.empty() ? 0 : int64_t(parts.part.back().key_begin) + parts.part.back().seqlen_k;
        parts.add(p, s, seen, seen.begin < seen.end ? found->row + seen.begin - found->begin : behind);
    }
    return parts;
}

// Fetches, from the rank `step` places further on, the segments in which this rank sees a key, to the same rows of a buffer.
fa_status fetch(Walk& w, const Problem& p, int step, char* k, char* v) {
    std::vector<Copy> copies;
    const int64_t width_k = p.a.nheads_k * p.a.headdim * p.element, width_v = p.a.nheads_k * p.headdim_v * p.element;
    w.each_pair([&](int source, int target) {
        if ((target + step) % p.size != source) return;
        for (const Segment& s : p.k[size_t(source)]) {
            bool seen = false;
            for (const Segment& queries : p.q[size_t(target)]) {
                if (queries.sequence != s.sequence) continue;
                const Interval keys = common_keys(p, queries, s);
                seen = seen || keys.begin < keys.end;
            }
            if (!seen) continue;
            w.add(copies, source, target, kK, s.row, 0, k + s.row * width_k, width_k, width_k, s.length());
            w.add(copies, source, target, kV, s.row, 0, v + s.row * width_v, width_v, width_v, s.length());
        }
    });
    return w.move(copies, kReady);
}

fa_status publish_keys(Walk& w, const Problem& p) {
    const auto publish = [&](Array array, const fa_tensor& t, int64_t dim) {
        return w.publish(array, t.data, t.row_stride * p.element, p.a.nheads_k * dim * p.element, p.rows_k());
    };
    FA_RETURN_IF_ERROR(publish(kK, p.a.k, p.a.headdim));
    return publish(kV, p.a.v, p.headdim_v);
}

int64_t most_rows(const Problem& p) {
    int64_t most = 0;
    for (const auto& segments : p.k) most = std::max(most, Problem::rows_of(segments));
    return most;
}

// Two buffers of keys, used alternately.
struct Buffers {
    char *k[2], *v[2];
    Buffers(Walk& w, const Problem& p) {
        const int64_t rows = most_rows(p);
        for (int i = 0; i < 2; ++i) {
            k[i] = w.scratch(rows * p.a.nheads_k * p.a.headdim * p.element);
            v[i] = w.scratch(rows * p.a.nheads_k * p.headdim_v * p.element);
        }
    }
};

// Calls visit(peer, buffer) for the keys of every rank, its own first, while the keys of the next rank are being transferred.
template <typename Visit>
fa_status each_step(Walk& w, const Problem& p, const Buffers& buffers, const Visit& visit) {
    FA_RETURN_IF_ERROR(w.follow());
    FA_RETURN_IF_ERROR(fetch(w, p, 0, buffers.k[0], buffers.v[0]));
    for (int step = 0; step < p.size; ++step) {
        const int now = step % 2, next = 1 - now;
        FA_RETURN_IF_ERROR(w.arrive());
        if (step > 0) FA_RETURN_IF_ERROR(w.follow());  // the previous step has read the buffer that the next keys go to
        if (step + 1 < p.size) FA_RETURN_IF_ERROR(fetch(w, p, step + 1, buffers.k[next], buffers.v[next]));
        FA_RETURN_IF_ERROR(visit((p.rank + step) % p.size, now));
    }
    return FA_OK;
}

fa_status forward(Walk& w, const Problem& p) {
    const int64_t rows = p.rows_q(), dv = p.headdim_v;
    const int32_t heads = p.a.nheads;
    FA_RETURN_IF_ERROR(publish_keys(w, p));
    FA_RETURN_IF_ERROR(w.begin());
    const Buffers buffers(w, p);
    auto* sum = reinterpret_cast<float*>(w.scratch(rows * heads * dv * 4));
    auto* sum_lse = p.a.lse ? p.a.lse : reinterpret_cast<float*>(w.scratch(rows * heads * 4));
    char* part = w.scratch(rows * heads * dv * p.element);
    auto* part_lse = reinterpret_cast<float*>(w.scratch(rows * heads * 4));
    bool first = true;
    FA_RETURN_IF_ERROR(each_step(w, p, buffers, [&](int peer, int now) -> fa_status {
        for (int round = 0; round < rounds_of(p); ++round) {
            Parts parts = parts_of(p, peer, -1, round);
            if (parts.part.empty() || (parts.empty && !first)) continue;  // the first launch counts the sinks, even if it sees no key
            FA_RETURN_IF_ERROR(parts.put(w, p));
            PartArrays arrays{};
            arrays.q = p.a.q, arrays.out = packed(part, heads, dv), arrays.lse = part_lse;
            arrays.k = packed(buffers.k[now], p.a.nheads_k, p.a.headdim), arrays.v = packed(buffers.v[now], p.a.nheads_k, dv);
            arrays.total_k = Problem::rows_of(p.k[size_t(peer)]);
            FA_RETURN_IF_ERROR(attend_parts(w, p, parts, arrays, {0, heads, p.a.nheads_k}, first, 0));
            if (w.runs())
                FA_RETURN_IF_ERROR(
                    launch_add_part(p.rows(rows, heads, dv), sum, sum_lse, {part, heads * dv, dv}, part_lse, first, w.stream()));
            first = false;
        }
        return FA_OK;
    }));
    if (w.runs())
        FA_RETURN_IF_ERROR(launch_round(p.rows(rows, heads, dv), {p.a.out.data, p.a.out.row_stride, p.a.out.head_stride}, sum, w.stream()));
    return w.finish();
}

fa_status backward(Walk& w, const Problem& p) {
    const int64_t rows = p.rows_q(), d = p.a.headdim, dv = p.headdim_v, total = p.total_k();
    const int32_t heads = p.a.nheads, heads_k = p.a.nheads_k;
    const int64_t width_k = heads_k * d * p.element, width_v = heads_k * dv * p.element;
    const int rounds = rounds_of(p);
    std::vector<int64_t> first_row(1, 0);  // first row of each rank's keys among those of all ranks
    for (const auto& segments : p.k) first_row.push_back(first_row.back() + Problem::rows_of(segments));
    FA_RETURN_IF_ERROR(publish_keys(w, p));
    // Parts of dk and dv: (rounds of queries, keys of all ranks in the order of ranks).
    char *dk = w.shared(rounds * total * width_k), *dvalues = w.shared(rounds * total * width_v);
    char* dsinks = p.g.dsinks ? w.shared(rounds * int64_t(heads) * 4) : nullptr;
    FA_RETURN_IF_ERROR(w.publish(kDk, dk, width_k, width_k, rounds * total));
    FA_RETURN_IF_ERROR(w.publish(kDv, dvalues, width_v, width_v, rounds * total));
    if (dsinks) FA_RETURN_IF_ERROR(w.publish(kSinks, dsinks, int64_t(heads) * 4, int64_t(heads) * 4, rounds));
    FA_RETURN_IF_ERROR(w.begin());
    const Buffers buffers(w, p);
    auto* sum = reinterpret_cast<float*>(w.scratch(rows * heads * d * 4));
    const int64_t part_bytes = rows * heads * d * p.element;
    char* part = w.scratch(part_bytes);
    if (w.runs()) {
        FA_RETURN_IF_ERROR(launch_zero(p.device(), dk, size_t(rounds * total * width_k), w.stream()));
        FA_RETURN_IF_ERROR(launch_zero(p.device(), dvalues, size_t(rounds * total * width_v), w.stream()));
        FA_RETURN_IF_ERROR(launch_zero(p.device(), sum, size_t(rows * heads * d * 4), w.stream()));
        if (dsinks) FA_RETURN_IF_ERROR(launch_zero(p.device(), dsinks, size_t(rounds * heads) * 4, w.stream()));
    }
    FA_RETURN_IF_ERROR(each_step(w, p, buffers, [&](int peer, int now) -> fa_status {
        for (int round_q = 0; round_q < rounds; ++round_q)
            for (int round_k = 0; round_k < rounds; ++round_k) {
                Parts parts = parts_of(p, peer, round_q, round_k);
                const bool counts_sinks = dsinks && peer == p.rank && round_k == 0;  // once for each row
                if (parts.part.empty() || (parts.empty && !counts_sinks)) continue;
                FA_RETURN_IF_ERROR(parts.put(w, p));
                PartArrays arrays{};
                arrays.dsinks = counts_sinks ? reinterpret_cast<float*>(dsinks) + round_q * heads : nullptr;
                arrays.q = p.a.q, arrays.out = p.a.out, arrays.lse = p.a.lse, arrays.dout = p.g.dout;
                arrays.dq = packed(part, heads, d);
                arrays.k = packed(buffers.k[now], heads_k, d), arrays.v = packed(buffers.v[now], heads_k, dv);
                arrays.total_k = Problem::rows_of(p.k[size_t(peer)]);
                const int64_t row = round_q * total + first_row[size_t(peer)];
                arrays.dk = packed(dk + row * width_k, heads_k, d), arrays.dv = packed(dvalues + row * width_v, heads_k, dv);
                if (w.runs()) FA_RETURN_IF_ERROR(launch_zero(p.device(), part, size_t(part_bytes), w.stream()));
                FA_RETURN_IF_ERROR(differentiate_parts(w, p, parts, arrays, {0, heads, heads_k}));
                if (w.runs()) FA_RETURN_IF_ERROR(launch_add(p.rows(rows, heads, d), sum, {part, heads * d, d}, false, w.stream()));
            }
        return FA_OK;
    }));
    if (w.runs())
        FA_RETURN_IF_ERROR(launch_round(p.rows(rows, heads, d), {p.g.dq.data, p.g.dq.row_stride, p.g.dq.head_stride}, sum, w.stream()));
    FA_RETURN_IF_ERROR(w.signal(kTotals, 0));
    FA_RETURN_IF_ERROR(w.fence());
    const int64_t own = p.rows_k();
    char *parts_k = w.scratch(p.size * rounds * own * width_k), *parts_v = w.scratch(p.size * rounds * own * width_v);
    std::vector<Copy> copies;
    w.each_pair([&](int source, int target) {
        const int64_t count = first_row[size_t(target) + 1] - first_row[size_t(target)];
        for (int round = 0; round < rounds; ++round) {
            const int64_t from = round * total + first_row[size_t(target)], to = (int64_t(source) * rounds + round) * count;
            w.add(copies, source, target, kDk, from, 0, parts_k + to * width_k, width_k, width_k, count);
            w.add(copies, source, target, kDv, from, 0, parts_v + to * width_v, width_v, width_v, count);
        }
    });
    FA_RETURN_IF_ERROR(w.fetch(copies, kTotals));
    if (w.runs()) {
        FA_RETURN_IF_ERROR(launch_sum(p.rows(own, heads_k, d), {p.g.dk.data, p.g.dk.row_stride, p.g.dk.head_stride}, parts_k,
                                      own * heads_k * d, p.size * rounds, w.stream()));
        FA_RETURN_IF_ERROR(launch_sum(p.rows(own, heads_k, dv), {p.g.dv.data, p.g.dv.row_stride, p.g.dv.head_stride}, parts_v,
                                      own * heads_k * dv, p.size * rounds, w.stream()));
    }
    FA_RETURN_IF_ERROR(sum_sinks(w, p, rounds));
    return w.finish();
}

}  // namespace

const Mode kRing = {"ring", refusal, forward, backward};

}  // namespace fa::distributed
