// backward_reference.h: the exact gradients in float64, and the error that a kernel may have.
//
// As in reference.h the same code runs twice. In double, from the exact out and lse, it computes the exact gradients. In float it is
// the plain implementation in the same precision: it starts from the out and lse that kernels get, and rounds P, dS and the results to
// the input's dtype.
#pragma once

#include <mutex>

#include "reference.h"

// One gradient. Its elements are in the order of the tensor's elements.
struct Gradient {
    std::vector<double> exact, plain;
    double budget = 0;  // the largest error allowed before the result is rounded

    explicit Gradient(int64_t count = 0) : exact(size_t(count)), plain(size_t(count)) {}
    template <typename Real>
    std::vector<double>& of() {
        if constexpr (std::is_same_v<Real, double>) return exact;
        else return plain;
    }
};

struct Gradients {
    Gradient dq, dk, dv, dbias, dsinks;  // dbias is indexed by the offsets of bias
};

// A problem, with the inputs and outputs of the backward pass.
class BackwardProblem {
public:
    Problem p;
    Answer forward;
    Tensor dout, dq, dk, dv;
    Buffer dbias, dsinks, dlse;
    std::vector<float> dlse_host;                  // laid out like lse; empty in half of the cases
    std::vector<float> dbias_start, dsinks_start;  // contents before the call, with guards: canaries, or values to accumulate onto
    bool accumulate = false;

    BackwardProblem(const Case& c, fa_device device, uint64_t seed, int32_t threads, bool accumulates = false)
        : p(c, device, seed), forward(solve(p)), accumulate(accumulates) {
        p.num_threads = threads;
        Random random(hash_name(c.name) ^ seed ^ 0xBAC3u);
        const bool plain = c.layout == Layout::kBroadcast || c.layout == Layout::kReversed;
        const Layout own = plain ? Layout::kContiguous : c.layout;
        dout = Tensor(c.dtype, p.out.batch, p.out.rows, c.nheads, c.dim_v(), c.layout, 0);
        dout.fill(random, 1);
        if (c.varlen())
            for (int64_t h = 0; h < c.nheads; ++h)
                for (int64_t i = p.spans.back().q_begin + p.spans.back().q_rows; i < dout.rows; ++i) dout.fill_row(0, i, h, NAN);
        dq = Tensor(c.dtype, p.q.batch, p.q.rows, c.nheads, c.headdim, own, kGuard);
        dk = Tensor(c.dtype, p.k.batch, p.k.rows, c.nheads_k, c.headdim, own, kGuard);
        dv = Tensor(c.dtype, p.v.batch, p.v.rows, c.nheads_k, c.dim_v(), own, kGuard);
        const auto canaries = [](int64_t count) { return std::vector<float>(size_t(count), bits_float(kCanary32)); };
        if (c.bias) dbias_start = canaries(bias_elements() + 2 * kGuard);
        if (c.sinks) dsinks_start = canaries(c.nheads + 2 * kGuard);
        if (accumulate) {
            for (const Span& s : p.spans) {
                fill(&dq, s, s.q_begin, s.q_rows, random);
                fill(&dk, s, s.k_begin, s.k_rows, random);
                fill(&dv, s, s.k_begin, s.k_rows, random);
            }
            for_each_bias([&](int64_t at) { dbias_start[size_t(kGuard + at)] = float(random.normal()); });
            for (int64_t h = 0; c.sinks && h < c.nheads; ++h) dsinks_start[size_t(kGuard + h)] = float(random.normal());
        }
        for (const Span& s : p.spans)
            for (int64_t h = 0; h < c.nheads; ++h)
                for (int64_t i = s.q_begin; i < s.q_begin + s.q_rows; ++i)
                    for (int64_t d = 0; d < c.dim_v(); ++d)
                        p.out.set(s.tensor_batch, i, h, d, forward.out[size_t(forward.out_at(s.tensor_batch, h, i) + d)]);
        std::vector<float> lse(forward.lse.begin(), forward.lse.end());
        if (hash_name(c.name) % 2) {
            // NaN where no kernel may look: rows that see no key, and rows of no sequence.
            dlse_host.assign(lse.size(), NAN);
            for (const Span& s : p.spans)
                for (int64_t h = 0; h < c.nheads; ++h)
                    for (int64_t i = s.q_begin; i < s.q_begin + s.q_rows; ++i) {
                        const size_t at = size_t(forward.row_at(s.tensor_batch, h, i));
                        if (lse[at] != -INFINITY) dlse_host[at] = float(random.normal());
                    }
            dlse = Buffer(device, dlse_host.data(), dlse_host.size() * 4);
        }
        p.lse_device = Buffer(device, lse.data(), lse.size() * 4);
        for (Tensor* t : {&p.out, &dout, &dq, &dk, &dv}) t->place(device);
        dbias = Buffer(device, dbias_start.data(), dbias_start.size() * 4);
        dsinks = Buffer(device, dsinks_start.data(), dsinks_start.size() * 4);
    }

    // Resets the gradients to their contents before any launch.
    void reset() {
        for (Tensor* t : {&dq, &dk, &dv}) t->device.upload(t->host.data());
        dbias.upload(dbias_start.data()), dsinks.upload(dsinks_start.data());
    }

    fa_attention_args forward_args() const {
        fa_attention_args a = p.args();
        a.lse = p.lse_device.as<float>();
        return a;
    }
    fa_attention_backward_args args(const fa_attention_args* forward_args) const {
        fa_attention_backward_args a;
        std::memset(&a, 0, sizeof a);
        a.struct_size = sizeof a, a.forward = forward_args;
        a.dout = dout.view(), a.dq = dq.view(), a.dk = dk.view(), a.dv = dv.view();
        if (p.c.varlen()) a.dout.batch_stride = a.dq.batch_stride = a.dk.batch_stride = a.dv.batch_stride = -987654321;
        if (p.c.bias) a.dbias = {dbias.as<float>() + kGuard, p.bias.batch_stride, p.bias.head_stride, p.bias.row_stride};
        if (p.c.sinks) a.dsinks = dsinks.as<float>() + kGuard;
        a.accumulate = accumulate;
        a.dlse = dlse.as<float>();
        return a;
    }

    // Everything that a launch may write, for bitwise comparison.
    std::vector<unsigned char> outputs() const {
        std::vector<unsigned char> all;
        for (const Buffer* buffer : {&dq.device, &dk.device, &dv.device, &dbias, &dsinks}) {
            const std::vector<unsigned char> bytes = buffer->bytes();
            all.insert(all.end(), bytes.begin(), bytes.end());
        }
        return all;
    }
    std::vector<unsigned char> starts() const {
        std::vector<unsigned char> all;
        for (const Tensor* t : {&dq, &dk, &dv}) all.insert(all.end(), t->host.begin(), t->host.end());
        for (const std::vector<float>* x : {&dbias_start, &dsinks_start}) {
            const auto* bytes = reinterpret_cast<const unsigned char*>(x->data());
            all.insert(all.end(), bytes, bytes + 4 * x->size());
        }
        return all;
    }

    int64_t bias_elements() const { return int64_t(p.bias.host.size() / element_size(p.bias_dtype)); }
    // Calls body once with the offset of every element of dbias.
    template <typename Body>
    void for_each_bias(const Body& body) const {
        if (!p.c.bias) return;
        for (int64_t b = 0; b < (p.bias.batch_stride ? p.c.batch : 1); ++b)
            for (int64_t h = 0; h < (p.bias.head_stride ? p.c.nheads : 1); ++h)
                for (int64_t i = 0; i < (p.bias.row_stride ? p.c.seqlen_q : 1); ++i)
                    for (int64_t j = 0; j < p.c.seqlen_k; ++j) body(p.bias.at(b, h, i, j));
    }

private:
    static void fill(Tensor* t, const Span& s, int64_t begin, int64_t rows, Random& random) {
        for (int64_t i = begin; i < begin + rows; ++i)
            for (int64_t h = 0; h < t->heads; ++h)
                for (int64_t d = 0; d < t->dim; ++d) t->set(s.tensor_batch, i, h, d, random.normal());
    }
};

// Computes dk and dv of one key head, dq of its query heads, and the contributions of these heads to dbias and dsinks.
template <typename Real>
void solve_key_head(const BackwardProblem& b, const Span& s, int64_t head_k, Gradients* all, std::mutex* shared) {
    const Problem& p = b.p;
    const Case& c = p.c;
    const Dropout dropout(c.dropout_p, c.dropout_seed, c.dropout_offset);
    const int64_t group = c.nheads / c.nheads_k, keys = s.k_rows, dim = c.headdim, dim_v = c.dim_v();
    const auto rounded = [&](Real x) {
        if constexpr (std::is_same_v<Real, double>) return x;
        else return round_fast(c.dtype, x);
    };
    const auto offset = [](const Tensor& t, const Span& span, int64_t row, int64_t head) {
        return ((span.tensor_batch * t.rows + row) * t.heads + head) * t.dim;
    };
    std::vector<Real> k(size_t(keys * dim)), v(size_t(keys * dim_v)), q(size_t(dim), 0), dout(size_t(dim_v), 0);
    std::vector<double> dk(k.size()), dv(v.size()), dq(size_t(dim), 0), dS(size_t(keys), 0);
    for (int64_t j = 0; j < keys; ++j) {
        for (int64_t d = 0; d < dim; ++d) k[size_t(j * dim + d)] = p.k.value(s.tensor_batch, s.k_begin + j, head_k, d);
        for (int64_t d = 0; d < dim_v; ++d) v[size_t(j * dim_v + d)] = p.v.value(s.tensor_batch, s.k_begin + j, head_k, d);
    }
    for (int64_t head = head_k * group; head < (head_k + 1) * group; ++head) {
        double dsink = 0;
        for (int64_t i = 0; i < s.q_rows; ++i) {
            const int64_t row = s.q_begin + i, out = b.forward.out_at(s.tensor_batch, head, row);
            const size_t at = size_t(b.forward.row_at(s.tensor_batch, head, row));
            const Real lse = Real(b.forward.lse[at]);
            Real delta = b.dlse_host.empty() ? 0 : -Real(b.dlse_host[at]);  // d lse / d score is P
            for (int64_t d = 0; d < dim; ++d) q[size_t(d)] = p.q.value(s.tensor_batch, row, head, d);
            for (int64_t d = 0; d < dim_v; ++d) {
                dout[size_t(d)] = b.dout.value(s.tensor_batch, row, head, d);
                delta += dout[size_t(d)] * rounded(Real(b.forward.out[size_t(out + d)]));
            }
            std::fill(dq.begin(), dq.end(), 0);
            std::fill(dS.begin(), dS.end(), 0);
            if (lse != -INFINITY) {
                for (int64_t j = 0; j < keys; ++j) {
                    if (!p.sees(s, head, i, j)) continue;
                    Real dot = 0, dP = 0;
                    for (int64_t d = 0; d < dim; ++d) dot += q[size_t(d)] * k[size_t(j * dim + d)];
                    for (int64_t d = 0; d < dim_v; ++d) dP += dout[size_t(d)] * v[size_t(j * dim_v + d)];
                    const Score<Real> score = transformed(p, s, head, i, j, dot);
                    if (score.value == -INFINITY) continue;
                    const Real keep = !dropout.on() ? 1 : dropout.drops(s.index, head, i, j) ? 0 : Real(dropout.scale());
                    const Real P = std::exp(score.value - lse), gradient = P * (keep == 0 ? -delta : keep * dP - delta);
                    const double weight = rounded(keep == 0 ? 0 : P * keep), raw = rounded(gradient * score.slope);
                    dS[size_t(j)] = gradient;
                    for (int64_t d = 0; d < dim; ++d) {
                        dq[size_t(d)] += raw * k[size_t(j * dim + d)];
                        dk[size_t(j * dim + d)] += raw * q[size_t(d)];
                    }
                    for (int64_t d = 0; d < dim_v; ++d) dv[size_t(j * dim_v + d)] += weight * dout[size_t(d)];
                }
                if (c.sinks && p.sinks[size_t(head)] != -INFINITY) dsink -= double(std::exp(Real(p.sinks[size_t(head)]) - lse) * delta);
            }
            for (int64_t d = 0; d < dim; ++d) all->dq.of<Real>()[size_t(offset(p.q, s, row, head) + d)] = rounded(Real(dq[size_t(d)]));
            if (!c.bias) continue;
            const std::lock_guard<std::mutex> lock(*shared);
            for (int64_t j = 0; j < keys; ++j) all->dbias.of<Real>()[size_t(p.bias.at(s.index, head, i, j))] += dS[size_t(j)];
        }
        if (!c.sinks) continue;
        const std::lock_guard<std::mutex> lock(*shared);
        all->dsinks.of<Real>()[size_t(head)] += dsink;
    }
    for (int64_t j = 0; j < keys; ++j) {
        for (int64_t d = 0; d < dim; ++d)
            all->dk.of<Real>()[size_t(offset(p.k, s, s.k_begin + j, head_k) + d)] = rounded(Real(dk[size_t(j * dim + d)]));
        for (int64_t d = 0; d < dim_v; ++d)
            all->dv.of<Real>()[size_t(offset(p.v, s, s.k_begin + j, head_k) + d)] = rounded(Real(dv[size_t(j * dim_v + d)]));
    }
}

inline Gradients solve_backward(const BackwardProblem& b) {
    const Problem& p = b.p;
    const auto count = [](const Tensor& t) { return t.batch * t.rows * t.heads * t.dim; };
    Gradients all = {Gradient(count(p.q)), Gradient(count(p.k)), Gradient(count(p.v)), Gradient(p.c.bias ? b.bias_elements() : 0),
                     Gradient(p.c.sinks ? p.c.nheads : 0)};
    const int64_t jobs = int64_t(p.spans.size()) * p.c.nheads_k;
    std::atomic<int64_t> next{0};
    std::mutex exact, plain;
    const auto work = [&] {
        for (int64_t job; (job = next++) < jobs;) {
            const Span& s = p.spans[size_t(job / p.c.nheads_k)];
            solve_key_head<double>(b, s, job % p.c.nheads_k, &all, &exact);
            solve_key_head<float>(b, s, job % p.c.nheads_k, &all, &plain);
        }
    };
    std::vector<std::thread> helpers;
    const int threads = int(std::min<int64_t>(jobs, std::max(1u, std::thread::hardware_concurrency())));
    for (int t = 1; t < threads; ++t) helpers.emplace_back(work);
    work();
    for (std::thread& t : helpers) t.join();

    // fp32 leaves this much uncertainty even where the plain implementation happens to be exact: 2^-24 of |q| |k| in a score, and half a
    // unit in the last place of lse in exp(S - lse).
    const auto longest = [](const Tensor& t) {
        double most = 0;
        for (int64_t batch = 0; batch < t.batch; ++batch)
            for (int64_t i = 0; i < t.rows; ++i)
                for (int64_t h = 0; h < t.heads; ++h) {
                    double sum = 0;
                    for (int64_t d = 0; d < t.dim; ++d) sum += std::pow(double(t.value(batch, i, h, d)), 2);
                    if (std::isfinite(sum)) most = std::max(most, sum);
                }
        return std::sqrt(most);
    };
    double score = std::fabs(p.c.has_scale ? p.c.scale : 1 / std::sqrt(double(p.c.headdim))) * longest(p.q) * longest(p.k);
    for (const double lse : b.forward.lse)
        if (std::isfinite(lse)) score = std::max(score, std::fabs(lse));
    for (Gradient* g : {&all.dq, &all.dk, &all.dv, &all.dbias, &all.dsinks}) {
        double largest = 0, worst = 0;
        for (size_t i = 0; i < g->exact.size(); ++i) {
            if (!std::isfinite(g->exact[i])) continue;
            largest = std::max(largest, std::fabs(g->exact[i]));
            if (std::isfinite(g->plain[i])) worst = std::max(worst, std::fabs(g->exact[i] - g->plain[i]));
        }
        g->budget = 2 * worst + kFloor + 4 * 0x1p-23 * score * largest;
    }
    return all;
}

struct BackwardVerdict {
    double ratio = 0;  // the largest error / budget
    std::string where;
    std::string complaint;  // empty = right
};

// Judges the gradients that a launch wrote.
inline BackwardVerdict judge(const BackwardProblem& b, const Gradients& all) {
    BackwardVerdict verdict;
    const Problem& p = b.p;
    const auto complain = [&](std::string text) {
        if (verdict.complaint.empty()) verdict.complaint = std::move(text);
    };
    // `old` is the value accumulated onto, otherwise 0.
    const auto element = [&](const char* name, const auto& place, double got, double old, double exact, double budget, int32_t dtype) {
        exact += old, budget += half_ulp(dtype, exact);
        if (std::isnan(exact) ? std::isnan(got) : std::isinf(exact) && got == exact) return;
        const double off = std::isfinite(exact) && std::isfinite(got) ? std::fabs(got - exact) : INFINITY;
        if (off / budget > verdict.ratio) verdict.ratio = off / budget, verdict.where = name;
        if (!(off <= budget))
            complain(name + place() + format(": got %.9g, want %.9g, %.1fx the budget of %.2g", got, exact, off / budget, budget));
    };
    const auto tensor = [&](const char* name, const Tensor& t, const Gradient& g, bool queries) {
        const std::vector<unsigned char> now = t.device.bytes();
        const size_t size = element_size(t.dtype);
        std::vector<char> owned(size_t(t.elements()), 0);
        for (const Span& s : p.spans) {
            const int64_t begin = queries ? s.q_begin : s.k_begin, rows = queries ? s.q_rows : s.k_rows;
            for (int64_t i = begin; i < begin + rows; ++i)
                for (int64_t h = 0; h < t.heads; ++h)
                    for (int64_t d = 0; d < t.dim; ++d) {
                        const int64_t at = t.at(s.tensor_batch, i, h, d);
                        owned[size_t(at)] = 1;
                        const auto place = [&] {
                            return format("[b=%lld, row=%lld, head=%lld, d=%lld]", (long long)s.index, (long long)i, (long long)h,
                                          (long long)d);
                        };
                        if (is_canary(now.data(), at, size)) complain(name + place() + " was not written");
                        else
                            element(name, place, get(now.data(), at, t.dtype), b.accumulate ? get(t.host.data(), at, t.dtype) : 0,
                                    g.exact[size_t(((s.tensor_batch * t.rows + i) * t.heads + h) * t.dim + d)], g.budget, t.dtype);
                    }
        }
        for (int64_t at = 0; at < t.elements(); ++at)
            if (!owned[size_t(at)] && !is_canary(now.data(), at, size))
                complain(format("element %lld beside %s was overwritten", (long long)at, name));
    };
    tensor("dq", b.dq, all.dq, true);
    tensor("dk", b.dk, all.dk, false);
    tensor("dv", b.dv, all.dv, false);
    const auto floats = [&](const char* name, const Buffer& buffer, const std::vector<float>& start, const Gradient& g, const auto& each) {
        if (start.empty()) return;
        std::vector<float> now(start.size());
        buffer.download(now.data());
        std::vector<char> owned(start.size(), 0);
        each([&](int64_t at) {
            const size_t i = size_t(kGuard + at);
            owned[i] = 1;
            const auto place = [&] { return format("[offset %lld]", (long long)at); };
            if (is_canary(now.data(), int64_t(i), 4)) complain(name + place() + " was not written");
            else element(name, place, now[i], b.accumulate ? start[i] : 0, g.exact[size_t(at)], g.budget, FA_FLOAT32);
        });
        for (size_t i = 0; i < now.size(); ++i)
            if (!owned[i] && !is_canary(now.data(), int64_t(i), 4)) complain(format("element %zu beside %s was overwritten", i, name));
    };
    floats("dbias", b.dbias, b.dbias_start, all.dbias, [&](const auto& body) { b.for_each_bias(body); });
    floats("dsinks", b.dsinks, b.dsinks_start, all.dsinks, [&](const auto& body) {
        for (int64_t h = 0; h < p.c.nheads; ++h) body(h);
    });
    return verdict;
}
