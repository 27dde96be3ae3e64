// ulysses.cpp: an all-to-all gives each rank all tokens of some heads. The rank makes an ordinary call with these heads, and a second
// all-to-all returns the rows of its result to the ranks that hold the tokens. Jacobs et al. 2023, DeepSpeed Ulysses.
//
// Heads are processed in pieces: while attention works on one piece, the next one arrives, and the previous result returns. Backward:
// rowsum(dout * out) is computed where both arrays are, and is sent instead of out.
#include <algorithm>

#include "distributed/call.h"

namespace fa::distributed {
namespace {

constexpr int64_t kManyRows = 1 << 15;  // rows of a launch: two blocks per SM
constexpr int64_t kSmall = 1 << 19;     // bytes of a message of results; a copy engine takes at least 8 us per message

// Query heads q0 .. q1 - 1 and their key heads k0 .. k1 - 1: all query heads of each key head, or some of a single one.
struct Piece {
    int32_t q0, q1, k0, k1;
    Heads heads() const { return {q0, q1 - q0, k1 - k0}; }
};

// Rank r has query heads r H / P .. (r + 1) H / P - 1. The first and the last piece are small: nothing hides the transfers of the first
// piece, or those of the last result. But a launch with few blocks ends with its longest blocks beside idle SMs, unless the next launch has
// enough blocks to fill them; two halves are better in that case.
std::vector<Piece> pieces_of(const Problem& p, int rank) {
    const int32_t group = p.a.nheads / p.a.nheads_k;
    const auto first_head = [&](int64_t r) { return int32_t(r * p.a.nheads / p.size); };
    const int32_t begin = first_head(rank), end = first_head(rank + 1);
    // Where pieces may end: at every key head or, if there is only one, at every query head.
    std::vector<int32_t> cuts;
    for (int32_t h = begin; h < end; h = (h / group + 1) * group) cuts.push_back(h);
    const bool split = cuts.size() == 1 && end - begin >= 4;
    if (split) {
        cuts.clear();
        for (int32_t h = begin; h < end; ++h) cuts.push_back(h);
    }
    cuts.push_back(end);
    const auto units = int32_t(cuts.size()) - 1;
    std::vector<int32_t> bounds;  // units at which pieces begin
    if (p.groups > 0) {
        for (int32_t i = 0, n = std::min({p.groups, units, kMostPieces}); i < n; ++i) bounds.push_back(int32_t(int64_t(i) * units / n));
    } else {
        const int32_t edge = std::max(1, units / 8);
        // In the backward pass a block has 128 keys of a key head, in the forward pass rows of a query head.
        const int64_t rows = p.backward() ? p.total_k() * (split ? 1 : edge) : p.total_q() * edge * (split ? 1 : group);
        bounds = units >= 3 && rows >= kManyRows ? std::vector<int32_t>{0, edge, units - edge}
                 : units >= 2                    ? std::vector<int32_t>{0, units / 2}
                                                 : std::vector<int32_t>{0};
    }
    bounds.push_back(units);
    std::vector<Piece> pieces;
    const auto add = [&](int32_t q0, int32_t q1) { pieces.push_back({q0, q1, q0 / group, (q1 - 1) / group + 1}); };
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
        int32_t q0 = cuts[size_t(bounds[i])], q1 = cuts[size_t(bounds[i + 1])];
        if (q0 >= q1) continue;
        // If a piece spans several key heads, a key head of which it has only some query heads becomes a separate piece.
        if (q0 / group != (q1 - 1) / group) {
            if (q0 % group) add(q0, (q0 / group + 1) * group), q0 = (q0 / group + 1) * group;
            const int32_t whole = q1 / group * group;
            if (q0 < whole) add(q0, whole), q0 = whole;
        }
        if (q0 < q1) add(q0, q1);
    }
    return pieces;
}

const char* refusal(const Problem& p, char* text, size_t size) {
    if (p.a.nheads < p.size) {
        std::snprintf(text, size, "nheads=%d is below the %d ranks", p.a.nheads, p.size);
        return text;
    }
    for (int r = 0; r < p.size; ++r)
        if (pieces_of(p, r).size() > kMostPieces) return "the heads of a rank make too many pieces";
    const bool rows = p.a.bias.data && p.a.bias.row_stride != 0, selected = p.a.mask.data && p.a.mask.row_stride != 0;
    if (p.wants_dbias) return "dbias: a rank has only the rows of its own tokens";
    if (rows) return "bias has rows, and a rank has only those of its own tokens";
    if (selected) return "mask has rows, and a rank has only those of its own tokens";
    if (p.a.startend_row_indices.data) return "startend_row_indices is set, which only gather takes";
    return "";
}

// The heads of a rank, and the layout of the arrays of all tokens in its memory: (total, heads, dim) each.
struct Share {
    std::vector<Piece> pieces;
    int32_t q0, k0, heads, heads_k;
    Share(const Problem& p, int rank) : pieces(pieces_of(p, rank)) {
        q0 = pieces.front().q0, k0 = pieces.front().k0;
        heads = pieces.back().q1 - q0, heads_k = pieces.back().k1 - k0;
    }
};
std::vector<Share> shares_of(const Problem& p) {
    std::vector<Share> shares;
    for (int r = 0; r < p.size; ++r) shares.emplace_back(p, r);
    return shares;
}

size_t most_pieces(const std::vector<Share>& shares) {
    size_t most = 0;
    for (const Share& s : shares) most = std::max(most, s.pieces.size());
    return most;
}

// An array of tokens that is sent to the ranks that have the heads.
struct Arriving {
    Array array;
    bool keys;  // has the tokens and heads of k, otherwise of q
    int64_t dim;
    char* to;  // (total, heads, dim) here
};
// A float32 array (heads, rows) that is sent in the same way: lse, or the sums of the backward pass.
struct ArrivingRows {
    Array array;
    char* to;  // (heads, total_q) here
};

// Lists the copies that piece i of a rank needs: its query heads, and those of its key heads that no earlier piece has fetched.
void list_piece(Walk& w, const Problem& p, const std::vector<Share>& shares, size_t i, const std::vector<Arriving>& arrays,
                const std::vector<ArrivingRows>& rows, std::vector<Copy>& copies) {
    w.each_pair([&](int source, int target) {
        const Share& share = shares[size_t(target)];
        if (i >= share.pieces.size()) return;
        const Piece& piece = share.pieces[i];
        const int32_t new_k = i && share.pieces[i - 1].k1 > piece.k0 ? share.pieces[i - 1].k1 : piece.k0;
        for (const Arriving& x : arrays) {
            const int32_t first = x.keys ? new_k : piece.q0, last = x.keys ? piece.k1 : piece.q1, base = x.keys ? share.k0 : share.q0;
            const int64_t width = x.dim * p.element, pitch = (x.keys ? share.heads_k : share.heads) * width;
            const auto& cu = x.keys ? p.cu_k : p.cu_q;
            for (const Segment& s : (x.keys ? p.k : p.q)[size_t(source)])
                w.add(copies, source, target, x.array, s.row, first * width,
                      x.to + (cu[size_t(s.sequence)] + s.begin) * pitch + (first - base) * width, pitch, (last - first) * width,
                      s.length());
        }
        for (const ArrivingRows& x : rows)
            for (const Segment& s : p.q[size_t(source)])
                w.add(copies, source, target, x.array, piece.q0, s.row * 4,
                      x.to + ((piece.q0 - share.q0) * p.total_q() + p.cu_q[size_t(s.sequence)] + s.begin) * 4, p.total_q() * 4,
                      s.length() * 4, piece.q1 - piece.q0);
    });
}

// Returns the results of all pieces; list(i, copies) lists those of piece i. Other work hides all transfers except the last piece's.
template <typename List>
fa_status each_result(Walk& w, const std::vector<Share>& shares, const List& list) {
    const size_t most = most_pieces(shares);
    FA_RETURN_IF_ERROR(w.fence());
    std::vector<std::vector<Copy>> small(most);
    for (size_t i = 0; i < most; ++i) {
        std::vector<Copy> copies, large;
        list(i, copies);
        for (const Copy& c : copies) (i + 1 < most && c.width * c.rows >= kSmall ? large : small[i]).push_back(c);
        FA_RETURN_IF_ERROR(w.move(large, kPiece + int32_t(i)));
    }
    FA_RETURN_IF_ERROR(w.join());
    for (size_t i = 0; i < most; ++i) FA_RETURN_IF_ERROR(w.fetch(small[i], kPiece + int32_t(i)));
    return w.arrive();
}

// The opposite direction: lists the copies of rows of (total, heads, dim) arrays from the ranks that had the heads to this rank's
// rows at `to`.
void bring_back(Walk& w, const Problem& p, const std::vector<Share>& shares, std::vector<Copy>& copies, size_t i, Array array, bool keys,
                int64_t dim, const fa_tensor& to) {
    w.each_pair([&](int source, int target) {
        const Share& share = shares[size_t(source)];
        if (i >= share.pieces.size()) return;
        const Piece& piece = share.pieces[i];
        const int32_t first = keys ? piece.k0 : piece.q0, count = keys ? piece.k1 - piece.k0 : piece.q1 - piece.q0;
        const int64_t width = dim * p.element;
        const auto& cu = keys ? p.cu_k : p.cu_q;
        for (const Segment& s : (keys ? p.k : p.q)[size_t(target)])
            w.add(copies, source, target, array, cu[size_t(s.sequence)] + s.begin, (first - (keys ? share.k0 : share.q0)) * width,
                  at_row(to, s.row, p.element) + first * width, to.row_stride * p.element, count * width, s.length());
    });
}

// The launch of a piece over whole sequences, on the rank's arrays at the piece's heads.
struct WholeSequences {
    const int32_t *cu_q, *cu_k;
    const Share& share;
    fa_tensor at(char* data, const Problem& p, const Piece& piece, bool keys, int64_t dim) const {
        const int32_t first = keys ? piece.k0 - share.k0 : piece.q0 - share.q0;
        return {data + first * dim * p.element, 0, (keys ? share.heads_k : share.heads) * dim, dim};
    }
    fa_attention_args args(const Problem& p, const Piece& piece) const {
        fa_attention_args args = bare_args(p);
        select_heads(args, p, piece.q0, piece.q1 - piece.q0, piece.k1 - piece.k0);
        args.seqlen_q = p.longest_q(), args.seqlen_k = p.longest_k();
        if (p.batch == 1) return args;  // one sequence: a dense call, whose work the kernels know in advance
        args.cu_seqlens_q = cu_q, args.cu_seqlens_k = cu_k, args.total_q = p.total_q(), args.total_k = p.total_k();
        return args;
    }
};

fa_status publish_inputs(Walk& w, const Problem& p) {
    const auto publish = [&](Array array, const fa_tensor& t, int32_t heads, int64_t dim, int64_t rows) {
        return w.publish(array, t.data, t.row_stride * p.element, heads * dim * p.element, rows);
    };
    FA_RETURN_IF_ERROR(publish(kQ, p.a.q, p.a.nheads, p.a.headdim, p.rows_q()));
    FA_RETURN_IF_ERROR(publish(kK, p.a.k, p.a.nheads_k, p.a.headdim, p.rows_k()));
    return publish(kV, p.a.v, p.a.nheads_k, p.headdim_v, p.rows_k());
}

fa_status forward(Walk& w, const Problem& p) {
    const std::vector<Share> shares = shares_of(p);
    const Share& own = shares[size_t(p.rank)];
    const int64_t d = p.a.headdim, dv = p.headdim_v, total_q = p.total_q(), total_k = p.total_k();
    FA_RETURN_IF_ERROR(publish_inputs(w, p));
    char* out = w.shared(total_q * own.heads * dv * p.element);
    // A rank without rows cannot say whether lse is wanted: the address of an array without elements may be NULL.
    const bool makes_lse = p.a.lse || p.rows_q() == 0;
    char* lse = makes_lse ? w.shared(total_q * own.heads * 4) : nullptr;
    FA_RETURN_IF_ERROR(w.publish(kResult, out, own.heads * dv * p.element, own.heads * dv * p.element, total_q));
    if (lse) FA_RETURN_IF_ERROR(w.publish(kResultLse, lse, total_q * 4, total_q * 4, own.heads));
    FA_RETURN_IF_ERROR(w.begin());
    WholeSequences whole{nullptr, nullptr, own};
    if (p.batch > 1) {
        FA_RETURN_IF_ERROR(w.table(p.cu_q, &whole.cu_q));
        FA_RETURN_IF_ERROR(w.table(p.cu_k, &whole.cu_k));
    }
    FA_RETURN_IF_ERROR(w.fork());
    char* q = w.scratch(total_q * own.heads * d * p.element);
    char *k = w.scratch(total_k * own.heads_k * d * p.element), *v = w.scratch(total_k * own.heads_k * dv * p.element);
    const std::vector<Arriving> arrays = {{kQ, false, d, q}, {kK, true, d, k}, {kV, true, dv, v}};
    const auto inputs = [&](size_t i, std::vector<Copy>& copies) { list_piece(w, p, shares, i, arrays, {}, copies); };
    FA_RETURN_IF_ERROR(each_piece(w, most_pieces(shares), own.pieces.size(), inputs, [&](size_t i) -> fa_status {
        const Piece& piece = own.pieces[i];
        fa_attention_args args = whole.args(p, piece);
        args.q = whole.at(q, p, piece, false, d), args.k = whole.at(k, p, piece, true, d), args.v = whole.at(v, p, piece, true, dv);
        args.out = whole.at(out, p, piece, false, dv);
        args.lse = lse ? reinterpret_cast<float*>(lse) + (piece.q0 - own.q0) * total_q : nullptr;
        FA_RETURN_IF_ERROR(w.attend(args, int64_t(i)));
        return w.signal(kPiece + int32_t(i), int64_t(i));
    }));
    FA_RETURN_IF_ERROR(each_result(w, shares, [&](size_t i, std::vector<Copy>& copies) {
        bring_back(w, p, shares, copies, i, kResult, false, dv, p.a.out);
        if (!makes_lse) return;
        w.each_pair([&](int source, int target) {
            const Share& share = shares[size_t(source)];
            if (i >= share.pieces.size() || !w.has(target, kResultLse)) return;
            const Piece& piece = share.pieces[i];
            const int64_t rows = Problem::rows_of(p.q[size_t(target)]);
            for (const Segment& s : p.q[size_t(target)])
                w.add(copies, source, target, kResultLse, piece.q0 - share.q0, (p.cu_q[size_t(s.sequence)] + s.begin) * 4,
                      reinterpret_cast<char*>(p.a.lse) + (piece.q0 * rows + s.row) * 4, rows * 4, s.length() * 4, piece.q1 - piece.q0);
        });
    }));
    return w.finish();
}

// The pieces of all ranks that contribute to the gradient of a key head, in the order of ranks and pieces.
struct Contributor {
    int rank;
    size_t piece;
};
std::vector<std::vector<Contributor>> contributors(const Problem& p, const std::vector<Share>& shares) {
    std::vector<std::vector<Contributor>> found(size_t(p.a.nheads_k));
    for (int r = 0; r < p.size; ++r)
        for (size_t i = 0; i < shares[size_t(r)].pieces.size(); ++i)
            for (int32_t h = shares[size_t(r)].pieces[i].k0; h < shares[size_t(r)].pieces[i].k1; ++h) found[size_t(h)].push_back({r, i});
    return found;
}

// Key heads of a rank, counted once for every piece that has them, because each piece writes its own gradient.
int32_t slots_of(const Share& share) {
    int32_t count = 0;
    for (const Piece& piece : share.pieces) count += piece.k1 - piece.k0;
    return count;
}
int32_t first_slot(const Share& share, size_t i) {
    int32_t count = 0;
    for (size_t j = 0; j < i; ++j) count += share.pieces[j].k1 - share.pieces[j].k0;
    return count;
}

fa_status backward(Walk& w, const Problem& p) {
    const std::vector<Share> shares = shares_of(p);
    const Share& own = shares[size_t(p.rank)];
    const int64_t d = p.a.headdim, dv = p.headdim_v, total_q = p.total_q(), total_k = p.total_k(), rows_q = p.rows_q(), e = p.element;
    const int32_t slots = slots_of(own), heads_k = p.a.nheads_k;
    FA_RETURN_IF_ERROR(publish_inputs(w, p));
    FA_RETURN_IF_ERROR(w.publish(kDout, p.g.dout.data, p.g.dout.row_stride * e, p.a.nheads * dv * e, rows_q));
    FA_RETURN_IF_ERROR(w.publish(kLse, p.a.lse, rows_q * 4, rows_q * 4, p.a.nheads));
    char* delta = w.scratch(rows_q * p.a.nheads * 4);  // dlse - rowsum(dout * out), (nheads, rows_q)
    if (w.runs())
        FA_RETURN_IF_ERROR(launch_negative_delta(p.rows(rows_q, p.a.nheads, dv), {p.a.out.data, p.a.out.row_stride, p.a.out.head_stride},
                                                 {p.g.dout.data, p.g.dout.row_stride, p.g.dout.head_stride}, p.g.dlse,
                                                 reinterpret_cast<float*>(delta), w.stream()));
    FA_RETURN_IF_ERROR(w.publish(kDelta, delta, rows_q * 4, rows_q * 4, p.a.nheads));
    char* dq = w.shared(total_q * own.heads * d * e);
    char *dk = w.shared(total_k * slots * d * e), *dvalues = w.shared(total_k * slots * dv * e);
    char* dsinks = p.g.dsinks ? w.shared(int64_t(p.a.nheads) * 4) : nullptr;
    FA_RETURN_IF_ERROR(w.publish(kResult, dq, own.heads * d * e, own.heads * d * e, total_q));
    FA_RETURN_IF_ERROR(w.publish(kDk, dk, slots * d * e, slots * d * e, total_k));
    FA_RETURN_IF_ERROR(w.publish(kDv, dvalues, slots * dv * e, slots * dv * e, total_k));
    if (dsinks) FA_RETURN_IF_ERROR(w.publish(kSinks, dsinks, int64_t(p.a.nheads) * 4, int64_t(p.a.nheads) * 4, 1));
    FA_RETURN_IF_ERROR(w.begin());
    // dk and dv: if every head has one part, it goes directly to its place. Otherwise the parts are staged and added up here, with zeros
    // for heads that have fewer parts than others.
    const auto who = contributors(p, shares);
    size_t parts = 1, fewest = SIZE_MAX;
    for (const auto& each : who) parts = std::max(parts, each.size()), fewest = std::min(fewest, each.size());
    const int64_t rows_k = p.rows_k();
    struct Gradient {
        Array array;
        int64_t dim, width;
        const fa_tensor& to;
        char* staged;
    } gradients[] = {{kDk, d, d * e, p.g.dk, nullptr}, {kDv, dv, dv * e, p.g.dv, nullptr}};
    for (Gradient& x : gradients) {
        if (parts == 1) continue;
        x.staged = w.scratch(int64_t(parts) * rows_k * heads_k * x.width);
        if (w.runs() && fewest < parts)
            FA_RETURN_IF_ERROR(launch_zero(p.device(), x.staged, parts * size_t(rows_k * heads_k * x.width), w.stream()));
    }
    WholeSequences whole{nullptr, nullptr, own};
    if (p.batch > 1) {
        FA_RETURN_IF_ERROR(w.table(p.cu_q, &whole.cu_q));
        FA_RETURN_IF_ERROR(w.table(p.cu_k, &whole.cu_k));
    }
    char* zeros = w.scratch(dv * e);  // the single row of `out` that all rows of the launches use
    if (w.runs()) {
        FA_RETURN_IF_ERROR(launch_zero(p.device(), zeros, size_t(dv * e), w.stream()));
        if (dsinks) FA_RETURN_IF_ERROR(launch_zero(p.device(), dsinks, size_t(p.a.nheads) * 4, w.stream()));
    }
    FA_RETURN_IF_ERROR(w.fork());
    char *q = w.scratch(total_q * own.heads * d * e), *dout = w.scratch(total_q * own.heads * dv * e);
    char *k = w.scratch(total_k * own.heads_k * d * e), *v = w.scratch(total_k * own.heads_k * dv * e);
    char *lse = w.scratch(total_q * own.heads * 4), *sums = w.scratch(total_q * own.heads * 4);
    const std::vector<Arriving> arrays = {{kQ, false, d, q}, {kK, true, d, k}, {kV, true, dv, v}, {kDout, false, dv, dout}};
    const std::vector<ArrivingRows> rows = {{kLse, lse}, {kDelta, sums}};
    const auto inputs = [&](size_t i, std::vector<Copy>& copies) { list_piece(w, p, shares, i, arrays, rows, copies); };
    FA_RETURN_IF_ERROR(each_piece(w, most_pieces(shares), own.pieces.size(), inputs, [&](size_t i) -> fa_status {
        const Piece& piece = own.pieces[i];
        fa_attention_args args = whole.args(p, piece);
        args.q = whole.at(q, p, piece, false, d), args.k = whole.at(k, p, piece, true, d), args.v = whole.at(v, p, piece, true, dv);
        args.out = {zeros, 0, 0, 0};
        args.lse = reinterpret_cast<float*>(lse) + (piece.q0 - own.q0) * total_q;
        fa_attention_backward_args g{};
        g.dout = whole.at(dout, p, piece, false, dv), g.dq = whole.at(dq, p, piece, false, d);
        const int32_t slot = first_slot(own, i);
        g.dk = {dk + slot * d * e, 0, slots * d, d}, g.dv = {dvalues + slot * dv * e, 0, slots * dv, dv};
        g.dlse = reinterpret_cast<float*>(sums) + (piece.q0 - own.q0) * total_q;
        g.dsinks = dsinks ? reinterpret_cast<float*>(dsinks) + piece.q0 : nullptr;
        FA_RETURN_IF_ERROR(w.differentiate(args, g, int64_t(i)));
        return w.signal(kPiece + int32_t(i), int64_t(i));
    }));
    if (dsinks) {
        FA_RETURN_IF_ERROR(w.join());
        FA_RETURN_IF_ERROR(w.signal(kTotals, 0));
    }
    FA_RETURN_IF_ERROR(each_result(w, shares, [&](size_t i, std::vector<Copy>& copies) {
        bring_back(w, p, shares, copies, i, kResult, false, d, p.g.dq);
        for (const Gradient& x : gradients)
            w.each_pair([&](int source, int target) {
                const Share& share = shares[size_t(source)];
                if (i >= share.pieces.size()) return;
                const Piece& piece = share.pieces[i];
                const int64_t target_rows = Problem::rows_of(p.k[size_t(target)]);
                if (!x.staged) {
                    for (const Segment& s : p.k[size_t(target)])
                        w.add(copies, source, target, x.array, p.cu_k[size_t(s.sequence)] + s.begin, first_slot(share, i) * x.width,
                              at_row(x.to, s.row, e) + piece.k0 * x.width, x.to.row_stride * e, (piece.k1 - piece.k0) * x.width,
                              s.length());
                    return;
                }
                for (int32_t h = piece.k0; h < piece.k1; ++h) {
                    size_t part = 0;
                    while (who[size_t(h)][part].rank != source || who[size_t(h)][part].piece != i) ++part;
                    for (const Segment& s : p.k[size_t(target)])
                        w.add(copies, source, target, x.array, p.cu_k[size_t(s.sequence)] + s.begin,
                              (first_slot(share, i) + h - piece.k0) * x.width,
                              x.staged + ((int64_t(part) * target_rows + s.row) * heads_k + h) * x.width, heads_k * x.width, x.width,
                              s.length());
                }
            });
    }));
    for (const Gradient& x : gradients)
        if (x.staged && w.runs())
            FA_RETURN_IF_ERROR(launch_sum(p.rows(rows_k, heads_k, x.dim), {x.to.data, x.to.row_stride, x.to.head_stride}, x.staged,
                                          rows_k * heads_k * x.dim, int32_t(parts), w.stream()));
    FA_RETURN_IF_ERROR(sum_sinks(w, p, 1));
    return w.finish();
}

}  // namespace

const Mode kUlysses = {"ulysses", refusal, forward, backward};

}  // namespace fa::distributed
