// reference.h: the exact answer in float64, and the error that a kernel may have.
//
// The same code runs twice. In double it gives the exact answer. In float, with the probabilities and the output rounded to the
// input's dtype, it is the plain implementation in the same precision. A kernel's error may be twice that of the plain implementation,
// plus a rounding floor.
#pragma once

#include <atomic>
#include <thread>
#include <type_traits>

#include "problem.h"

enum class Row : char { kOutside, kUnchecked, kChecked };  // in no sequence; in a sequence; in a sequence, with an exact answer

struct Answer {
    std::vector<double> out, lse;              // exact; out by (tensor_batch, row, head, d), lse by (tensor_batch, head, row)
    std::vector<double> plain_out, plain_lse;  // of the plain implementation
    std::vector<Row> state;                    // by (tensor_batch, head, row)
    double out_budget = 0;                     // the largest allowed error of out; lse_budget is added to a floor that grows with |lse|
    double lse_budget = 0;

    int64_t rows, heads, dim;
    int64_t row_at(int64_t b, int64_t head, int64_t row) const { return (b * heads + head) * rows + row; }
    int64_t out_at(int64_t b, int64_t head, int64_t row) const { return ((b * rows + row) * heads + head) * dim; }
};

constexpr double kFloor = 1e-5;
// Half a unit in the last place of an output near `exact`. A kernel's running maximum may differ from the true maximum, so P of a row's
// only key need not be 1. Such a kernel rounds twice where the plain implementation rounds once.
inline double half_ulp(int32_t dtype, double exact) { return std::ldexp(std::fabs(exact), -significand_bits(dtype)); }
// The error of an fp32 lse cannot be smaller than its last places.
inline double lse_floor(double exact) { return kFloor + std::fabs(exact) * 0x1p-22; }

// The score of a visible pair in natural units, and its slope d score / d (q . k).
template <typename Real>
struct Score {
    Real value, slope;
};
template <typename Real>
Score<Real> transformed(const Problem& p, const Span& s, int64_t head, int64_t i, int64_t j, Real dot) {
    const Case& c = p.c;
    const Real scale = c.has_scale ? Real(c.scale) : 1 / std::sqrt(Real(c.headdim));
    Score<Real> score = {dot * scale, scale};
    if (c.softcap != 0) {
        const Real t = std::tanh(score.value / Real(c.softcap));
        score = {Real(c.softcap) * t, scale * (1 - t * t)};
    }
    const int64_t aligned = c.top_left ? i : i + s.k_rows - s.q_rows;
    if (c.alibi) score.value -= p.slopes[size_t(head + (c.alibi == 2 ? s.index * c.nheads : 0))] * Real(std::abs(aligned - j));
    if (c.bias) score.value += get(p.bias.host.data(), p.bias.at(s.index, head, i, j), p.bias_dtype);
    return score;
}

template <typename Real>
class HeadReference {
public:
    HeadReference(const Problem& p, const Span& s, int64_t head)
        : p_(p), s_(s), head_(head), n_(s.k_rows), dropout_(p.c.dropout_p, p.c.dropout_seed, p.c.dropout_offset) {
        const int64_t head_k = head / (p.c.nheads / p.c.nheads_k);
        score_descale_ = p.descale(p.q_descale, s, head) * p.descale(p.k_descale, s, head_k);
        v_descale_ = p.descale(p.v_descale, s, head_k);
        k_transposed_.resize(size_t(p.c.headdim * n_)), v_.resize(size_t(p.c.dim_v() * n_)), p_row_.resize(size_t(n_));
        for (int64_t j = 0; j < n_; ++j) {
            for (int64_t d = 0; d < p.c.headdim; ++d)
                k_transposed_[size_t(d * n_ + j)] = operand(p.k.value(s.tensor_batch, s.k_begin + j, head_k, d));
            for (int64_t d = 0; d < p.c.dim_v(); ++d)
                v_[size_t(j * p.c.dim_v() + d)] = operand(p.v.value(s.tensor_batch, s.k_begin + j, head_k, d));
        }
    }

    // One row: out (headdim_v) and lse.
    void attend(int64_t i, double* out, double* lse) {
        const Case& c = p_.c;
        Real* score = p_row_.data();
        std::fill(p_row_.begin(), p_row_.end(), Real(0));
        for (int64_t d = 0; d < c.headdim; ++d) {
            const Real q = operand(p_.q.value(s_.tensor_batch, s_.q_begin + i, head_, d));
            const Real* k = k_transposed_.data() + d * n_;
            for (int64_t j = 0; j < n_; ++j) score[j] += q * k[j];
        }

        Real largest = p_.sinks.empty() ? -INFINITY : p_.sinks[size_t(head_)];
        for (int64_t j = 0; j < n_; ++j) {
            score[j] = p_.sees(s_, head_, i, j) ? transformed(p_, s_, head_, i, j, score[j] * score_descale_).value : -INFINITY;
            if (score[j] > largest) largest = score[j];
        }
        if (largest == -INFINITY) largest = 0;  // an empty row, whose exponentials below are all 0
        Real sum = p_.sinks.empty() ? 0 : std::exp(p_.sinks[size_t(head_)] - largest);
        for (int64_t j = 0; j < n_; ++j) sum += score[j] = std::exp(score[j] - largest);
        *lse = sum == 0 ? -INFINITY : double(largest + std::log(sum));

        std::vector<Real> total(size_t(c.dim_v()), Real(0));
        for (int64_t j = 0; j < n_; ++j) {
            if (score[j] == 0 || (dropout_.on() && dropout_.drops(s_.index, head_, i, j))) continue;
            const Real weight = operand(score[j] / sum);
            for (int64_t d = 0; d < c.dim_v(); ++d) total[size_t(d)] += weight * v_[size_t(j * c.dim_v() + d)];
        }
        for (int64_t d = 0; d < c.dim_v(); ++d)
            out[d] = rounded(v_descale_ * (dropout_.on() ? total[size_t(d)] * Real(dropout_.scale()) : total[size_t(d)]));
    }

private:
    Real rounded(Real x) const {
        if constexpr (std::is_same_v<Real, double>) return x;
        else return round_fast(p_.out.dtype, x);
    }
    // An operand of a product, rounded to the inputs' dtype, or to tf32 if that is allowed. Rounding changes the inputs only for tf32.
    Real operand(Real x) const {
        if constexpr (std::is_same_v<Real, double>) return x;
        else return round_fast(p_.c.allow_tf32 ? kTf32 : p_.c.dtype, x);
    }

    const Problem& p_;
    const Span s_;
    const int64_t head_, n_;
    const Dropout dropout_;
    Real score_descale_, v_descale_;
    std::vector<Real> k_transposed_, v_, p_row_;
};

inline Answer solve(const Problem& p) {
    Answer a;
    a.rows = p.q.rows, a.heads = p.c.nheads, a.dim = p.c.dim_v();
    a.out.assign(size_t(p.q.batch * a.rows * a.heads * a.dim), 0), a.plain_out = a.out;
    a.lse.assign(size_t(p.q.batch * a.rows * a.heads), 0), a.plain_lse = a.lse;
    a.state.assign(a.lse.size(), Row::kOutside);

    const int64_t jobs = int64_t(p.spans.size()) * p.c.nheads;
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        for (int64_t job; (job = next++) < jobs;) {
            const Span& s = p.spans[size_t(job / p.c.nheads)];
            const int64_t head = job % p.c.nheads;
            for (int64_t i = 0; i < s.q_rows; ++i) a.state[size_t(a.row_at(s.tensor_batch, head, s.q_begin + i))] = Row::kUnchecked;
            if (p.c.outer_heads_only && job != 0 && job != jobs - 1) continue;
            HeadReference<double> exact(p, s, head);
            HeadReference<float> plain(p, s, head);
            for (int64_t i = 0; i < s.q_rows; ++i) {
                if (i % p.c.row_step != 0 && i != s.q_rows - 1) continue;
                const int64_t row = a.row_at(s.tensor_batch, head, s.q_begin + i), at = a.out_at(s.tensor_batch, head, s.q_begin + i);
                a.state[size_t(row)] = Row::kChecked;
                exact.attend(i, &a.out[size_t(at)], &a.lse[size_t(row)]);
                plain.attend(i, &a.plain_out[size_t(at)], &a.plain_lse[size_t(row)]);
            }
        }
    };
    std::vector<std::thread> helpers;
    const int threads = int(std::min<int64_t>(jobs, std::max(1u, std::thread::hardware_concurrency())));
    for (int t = 1; t < threads; ++t) helpers.emplace_back(work);
    work();
    for (std::thread& t : helpers) t.join();

    double largest_out = 0, largest_score = 0;  // largest |lse|, as a stand-in for the scores that dominate a row
    for (const double x : a.out)
        if (std::isfinite(x)) largest_out = std::max(largest_out, std::fabs(x));
    for (const double x : a.lse)
        if (std::isfinite(x)) largest_score = std::max(largest_score, std::fabs(x));
    const auto worst = [](const std::vector<double>& exact, const std::vector<double>& plain) {
        double error = 0;
        for (size_t i = 0; i < exact.size(); ++i)
            if (std::isfinite(exact[i]) && std::isfinite(plain[i])) error = std::max(error, std::fabs(exact[i] - plain[i]));
        return error;
    };
    // In fp32 a score of size s has no digits below 2^-24 s. One more rounding of the score changes its probability by this fraction.
    a.out_budget = 2 * worst(a.out, a.plain_out) + kFloor + 0x1p-24 * largest_score * largest_out;
    a.lse_budget = 2 * worst(a.lse, a.plain_lse);
    // 8-bit tensor cores truncate scores to 13 bits. Also, the plain P of a row's largest score is 1, while a kernel may have to round it.
    if (p.c.dtype == FA_FLOAT8_E4M3) a.out_budget += 0x1p-4 * largest_out, a.lse_budget += 1e-2;
    return a;
}

struct Verdict {
    double out_error = 0, lse_error = 0;  // largest absolute errors
    double out_ratio = 0, lse_ratio = 0;  // the largest error / budget
    std::string complaint;                // empty = right
};

// Judges what a launch wrote to p.out and p.lse_device.
inline Verdict judge(const Problem& p, const Answer& a) {
    Verdict verdict;
    const auto complain = [&](std::string text) {
        if (verdict.complaint.empty()) verdict.complaint = std::move(text);
    };
    // Infinities and NaNs must be in the same places, and finite values within the budget. Returns false if over the budget.
    const auto within = [](double got, double exact, double budget, double* error, double* ratio) {
        if (std::isnan(exact) ? std::isnan(got) : std::isinf(exact) && got == exact) return true;
        const double off = std::isfinite(exact) && std::isfinite(got) ? std::fabs(got - exact) : INFINITY;
        *error = std::max(*error, off), *ratio = std::max(*ratio, off / budget);
        return off <= budget;
    };
    const auto verdict_on = [](double got, double exact, double budget) {
        return format(": got %.9g, want %.9g, %.1fx the budget of %.2g", got, exact, std::fabs(got - exact) / budget, budget);
    };
    const std::vector<unsigned char> out = p.out.device.bytes();
    const std::vector<unsigned char> lse_bytes = p.lse_device.bytes();
    const float* lse = reinterpret_cast<const float*>(lse_bytes.data()) + kGuard;
    const size_t element = element_size(p.out.dtype);
    std::vector<char> owned(size_t(p.out.elements()), 0);
    for (int64_t b = 0; b < p.q.batch; ++b)
        for (int64_t h = 0; h < a.heads; ++h)
            for (int64_t i = 0; i < a.rows; ++i) {
                const int64_t row = a.row_at(b, h, i);
                const Row state = a.state[size_t(row)];
                const auto place = [&] { return format("[b=%lld, row=%lld, head=%lld]", (long long)b, (long long)i, (long long)h); };
                const bool lse_written = !is_canary(lse, row, 4), lse_wanted = p.c.want_lse && state != Row::kOutside;
                if (lse_written != lse_wanted)
                    complain("lse" + place() + (lse_written ? " was written, but must not be" : " was not written"));
                if (lse_wanted && state == Row::kChecked) {
                    const double exact = a.lse[size_t(row)], budget = a.lse_budget + lse_floor(exact);
                    if (!within(lse[row], exact, budget, &verdict.lse_error, &verdict.lse_ratio))
                        complain("lse" + place() + verdict_on(lse[row], exact, budget));
                }
                if (state == Row::kOutside) continue;
                for (int64_t d = 0; d < a.dim; ++d) {
                    const int64_t at = p.out.at(b, i, h, d);
                    owned[size_t(at)] = 1;
                    if (is_canary(out.data(), at, element)) {
                        complain("out" + place() + format("[d=%lld] was not written", (long long)d));
                    } else if (state == Row::kChecked) {
                        const double got = get(out.data(), at, p.out.dtype), exact = a.out[size_t(a.out_at(b, h, i) + d)];
                        const double budget = a.out_budget + half_ulp(p.out.dtype, exact);
                        if (!within(got, exact, budget, &verdict.out_error, &verdict.out_ratio))
                            complain("out" + place() + format("[d=%lld]", (long long)d) + verdict_on(got, exact, budget));
                    }
                }
            }
    for (int64_t at = 0; at < p.out.elements(); ++at)
        if (!owned[size_t(at)] && !is_canary(out.data(), at, element))
            complain(format("element %lld beside out was overwritten", (long long)at));
    for (int64_t i = 0; i < kGuard; ++i)
        if (!is_canary(lse, -1 - i, 4) || !is_canary(lse, p.lse_elements + i, 4)) complain("memory beside lse was overwritten");
    return verdict;
}

// Whether out, lse and the memory beside them are unwritten.
inline bool untouched(const Problem& p) {
    const std::vector<unsigned char> out = p.out.device.bytes(), lse = p.lse_device.bytes();
    for (int64_t i = 0; i < p.out.elements(); ++i)
        if (!is_canary(out.data(), i, element_size(p.out.dtype))) return false;
    for (size_t i = 0; i < lse.size() / 4; ++i)
        if (!is_canary(lse.data(), int64_t(i), 4)) return false;
    return true;
}
