// gather.cpp: a rank fetches the keys and values that its queries see, to their places in the order of the sequences. Its queries are then
// parts of ordinary calls: no partial results, and every option of a call on one device.
//
// Forward: key heads are processed in pieces. All pieces except the first arrive while attention works on earlier pieces. Backward: nothing
// hides the transfers. Each rank computes one part of the gradients of the keys that it sees, or two parts if it has two segments of a
// sequence. The owner of a key adds up its parts in float32, in the order of the ranks.
#include <algorithm>

#include "distributed/call.h"

namespace fa::distributed {
namespace {

constexpr int64_t kManyRows = 1 << 15;  // query rows of a rank per key head, counting all query heads that share it

const char* no_refusal(const Problem&, char*, size_t) { return ""; }

// The keys of each sequence that queries of a rank see: disjoint intervals in ascending order.
std::vector<std::vector<Interval>> visible_keys(const Problem& p, int rank) {
    std::vector<std::vector<Interval>> found(static_cast<size_t>(p.batch));
    for (const Segment& s : p.q[size_t(rank)])
        if (const Interval keys = p.keys_of(s); keys.begin < keys.end) found[size_t(s.sequence)].push_back(keys);
    for (auto& intervals : found) {
        std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
        size_t count = 0;
        for (const Interval& i : intervals) {
            if (count && i.begin <= intervals[count - 1].end) intervals[count - 1].end = std::max(intervals[count - 1].end, i.end);
            else intervals[count++] = i;
        }
        intervals.resize(count);
    }
    return found;
}

// Lists the copies of the visible keys of all sequences, for heads first .. first + heads - 1, to (total_k, heads, dim) arrays at k and v.
void list_keys(Walk& w, const Problem& p, int32_t first, int32_t heads, char* k, char* v, std::vector<Copy>& copies) {
    const int64_t width_k = heads * p.a.headdim * p.element, width_v = heads * p.headdim_v * p.element;
    const struct {
        Array array;
        char* to;
        int64_t width, column;
    } arrays[] = {{kK, k, width_k, first * p.a.headdim * p.element}, {kV, v, width_v, first * p.headdim_v * p.element}};
    int known = -1;
    std::vector<std::vector<Interval>> visible;
    w.each_pair([&](int source, int target) {
        if (known != target) visible = visible_keys(p, target), known = target;
        for (const auto& x : arrays)
            for (const Segment& s : p.k[size_t(source)])
                for (const Interval& keys : visible[size_t(s.sequence)]) {
                    const int64_t begin = std::max<int64_t>(keys.begin, s.begin), end = std::min<int64_t>(keys.end, s.end);
                    if (begin >= end) continue;
                    char* to = x.to + (p.cu_k[size_t(s.sequence)] + begin) * x.width;
                    w.add(copies, source, target, x.array, s.row + begin - s.begin, x.column, to, x.width, x.width, end - begin);
                }
    });
}

fa_status publish_keys(Walk& w, const Problem& p) {
    const auto publish = [&](Array array, const fa_tensor& t, int64_t dim) {
        return w.publish(array, t.data, t.row_stride * p.element, p.a.nheads_k * dim * p.element, p.rows_k());
    };
    FA_RETURN_IF_ERROR(publish(kK, p.a.k, p.a.headdim));
    return publish(kV, p.a.v, p.headdim_v);
}

// Key heads per piece. The first piece is small, because nothing hides its transfer. But its attention must hide the second transfer, which
// takes relatively longer when there are few queries.
std::vector<int32_t> pieces_of(const Problem& p) {
    const int32_t heads = p.a.nheads_k;
    if (p.groups > 0) {
        std::vector<int32_t> even;
        for (int32_t i = 0, n = std::min({p.groups, heads, kMostPieces}); i < n; ++i) even.push_back((i + 1) * heads / n - i * heads / n);
        return even;
    }
    const bool few = p.total_q() / p.size * (p.a.nheads / heads) < kManyRows;
    const int32_t first = std::max(1, heads / (few ? 4 : 8));
    return first < heads ? std::vector<int32_t>{first, heads - first} : std::vector<int32_t>{heads};
}

fa_status forward(Walk& w, const Problem& p) {
    FA_RETURN_IF_ERROR(publish_keys(w, p));
    FA_RETURN_IF_ERROR(w.begin());
    Parts parts;
    for (const Segment& s : p.q[size_t(p.rank)]) {
        const Interval keys = p.keys_of(s);
        parts.add(p, s, keys, p.cu_k[size_t(s.sequence)] + keys.begin);
    }
    FA_RETURN_IF_ERROR(parts.put(w, p));
    FA_RETURN_IF_ERROR(w.fork());
    const int32_t group = p.a.nheads / p.a.nheads_k;
    struct Piece {
        int32_t first, heads;
        char *k, *v;
    };
    std::vector<Piece> pieces;
    for (const int32_t heads : pieces_of(p)) {
        const int32_t first = pieces.empty() ? 0 : pieces.back().first + pieces.back().heads;
        pieces.push_back({first, heads, w.scratch(p.total_k() * heads * p.a.headdim * p.element),
                          w.scratch(p.total_k() * heads * p.headdim_v * p.element)});
    }
    const auto list = [&](size_t i, std::vector<Copy>& copies) {
        const Piece& x = pieces[i];
        list_keys(w, p, x.first, x.heads, x.k, x.v, copies);
    };
    FA_RETURN_IF_ERROR(each_piece(w, pieces.size(), pieces.size(), list, [&](size_t i) {
        const auto [first, heads, k, v] = pieces[i];
        PartArrays arrays{};
        arrays.q = p.a.q, arrays.out = p.a.out;
        arrays.q.data = forward_by(p.a.q.data, first * group * p.a.headdim * p.element);
        arrays.out.data = forward_by(p.a.out.data, first * group * p.headdim_v * p.element);
        arrays.k = packed(k, heads, p.a.headdim), arrays.v = packed(v, heads, p.headdim_v), arrays.total_k = p.total_k();
        arrays.lse = p.a.lse ? p.a.lse + first * group * p.rows_q() : nullptr;
        return attend_parts(w, p, parts, arrays, {first * group, heads * group, heads}, int64_t(i));
    }));
    FA_RETURN_IF_ERROR(w.join());
    return w.finish();
}

fa_status backward(Walk& w, const Problem& p) {
    const int32_t rounds = p.layout == FA_LAYOUT_ZIGZAG ? 2 : 1, heads_k = p.a.nheads_k;
    const int64_t width_k = heads_k * p.a.headdim * p.element, width_v = heads_k * p.headdim_v * p.element, total = p.total_k();
    FA_RETURN_IF_ERROR(publish_keys(w, p));
    char *dk = w.shared(rounds * total * width_k), *dv = w.shared(rounds * total * width_v);
    char* dsinks = p.g.dsinks ? w.shared(rounds * int64_t(p.a.nheads) * 4) : nullptr;
    FA_RETURN_IF_ERROR(w.publish(kDk, dk, width_k, width_k, rounds * total));
    FA_RETURN_IF_ERROR(w.publish(kDv, dv, width_v, width_v, rounds * total));
    if (dsinks) FA_RETURN_IF_ERROR(w.publish(kSinks, dsinks, int64_t(p.a.nheads) * 4, int64_t(p.a.nheads) * 4, rounds));
    FA_RETURN_IF_ERROR(w.begin());
    char *k = w.scratch(total * width_k), *v = w.scratch(total * width_v);
    std::vector<Copy> copies;
    list_keys(w, p, 0, heads_k, k, v, copies);
    FA_RETURN_IF_ERROR(w.fetch(copies, kReady));
    // Separate launches for the parts add to dq, so dq must begin with zeros. Otherwise every row is written once.
    const int64_t dq_bytes = p.parts_stand_alone() ? p.rows_q() * p.a.nheads * p.a.headdim * p.element : 0;
    const fa_tensor dq = p.parts_stand_alone() ? packed(w.scratch(dq_bytes), p.a.nheads, p.a.headdim) : p.g.dq;
    if (w.runs()) {
        FA_RETURN_IF_ERROR(launch_zero(p.device(), dk, size_t(rounds * total * width_k), w.stream()));
        FA_RETURN_IF_ERROR(launch_zero(p.device(), dv, size_t(rounds * total * width_v), w.stream()));
        if (dq_bytes) FA_RETURN_IF_ERROR(launch_zero(p.device(), dq.data, size_t(dq_bytes), w.stream()));
        if (dsinks) FA_RETURN_IF_ERROR(launch_zero(p.device(), dsinks, size_t(rounds) * size_t(p.a.nheads) * 4, w.stream()));
    }
    for (int32_t round = 0; round < rounds; ++round) {
        Parts parts;
        for (const Segment& s : p.q[size_t(p.rank)])
            if (s.round == round) {
                const Interval keys = p.keys_of(s);
                parts.add(p, s, keys, p.cu_k[size_t(s.sequence)] + keys.begin);
            }
        FA_RETURN_IF_ERROR(parts.put(w, p));
        PartArrays arrays{};
        arrays.q = p.a.q, arrays.out = p.a.out, arrays.lse = p.a.lse, arrays.dout = p.g.dout;
        arrays.dq = dq;
        arrays.k = packed(k, heads_k, p.a.headdim), arrays.v = packed(v, heads_k, p.headdim_v), arrays.total_k = total;
        arrays.dk = packed(dk + round * total * width_k, heads_k, p.a.headdim);
        arrays.dv = packed(dv + round * total * width_v, heads_k, p.headdim_v);
        arrays.dsinks = dsinks ? reinterpret_cast<float*>(dsinks) + round * p.a.nheads : nullptr;
        FA_RETURN_IF_ERROR(differentiate_parts(w, p, parts, arrays, {0, p.a.nheads, heads_k}));
    }
    if (w.runs() && dq_bytes)
        FA_RETURN_IF_ERROR(launch_sum(p.rows(p.rows_q(), p.a.nheads, p.a.headdim), {p.g.dq.data, p.g.dq.row_stride, p.g.dq.head_stride},
                                      dq.data, 0, 1, w.stream()));
    FA_RETURN_IF_ERROR(w.signal(kTotals, 0));
    FA_RETURN_IF_ERROR(w.fence());

    // Fetches the parts of this rank's keys from every rank.
    const int64_t rows = p.rows_k();
    char *parts_k = w.scratch(p.size * rounds * rows * width_k), *parts_v = w.scratch(p.size * rounds * rows * width_v);
    copies.clear();
    w.each_pair([&](int source, int target) {
        const int64_t target_rows = Problem::rows_of(p.k[size_t(target)]);
        for (int32_t round = 0; round < rounds; ++round)
            for (const Segment& s : p.k[size_t(target)]) {
                const int64_t from = round * total + p.cu_k[size_t(s.sequence)] + s.begin;
                const int64_t to = (source * rounds + round) * target_rows + s.row;
                w.add(copies, source, target, kDk, from, 0, parts_k + to * width_k, width_k, width_k, s.length());
                w.add(copies, source, target, kDv, from, 0, parts_v + to * width_v, width_v, width_v, s.length());
            }
    });
    FA_RETURN_IF_ERROR(w.fetch(copies, kTotals));
    if (w.runs()) {
        FA_RETURN_IF_ERROR(launch_sum(p.rows(rows, heads_k, p.a.headdim), {p.g.dk.data, p.g.dk.row_stride, p.g.dk.head_stride}, parts_k,
                                      rows * heads_k * p.a.headdim, p.size * rounds, w.stream()));
        FA_RETURN_IF_ERROR(launch_sum(p.rows(rows, heads_k, p.headdim_v), {p.g.dv.data, p.g.dv.row_stride, p.g.dv.head_stride}, parts_v,
                                      rows * heads_k * p.headdim_v, p.size * rounds, w.stream()));
    }
    FA_RETURN_IF_ERROR(sum_sinks(w, p, rounds));
    return w.finish();
}

}  // namespace

const Mode kGather = {"gather", no_refusal, forward, backward};

}  // namespace fa::distributed
