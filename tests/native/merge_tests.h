// merge_tests.h: fa_attention_merge against its formula in float64, in place, with empty sides, and on pieces of real attention.
#pragma once

#include <functional>

#include "launch.h"
#include "reference.h"

namespace api {

struct MergeProblem {
    int32_t dtype;
    Tensor a, b, out;
    std::vector<float> lse_a, lse_b;
    Buffer device_a, device_b, device_lse;
    MergeProblem(const Context& context, int32_t dtype, Layout layout) : dtype(dtype) {
        constexpr int64_t kBatch = 2, kRows = 37, kHeads = 3, kDim = 24;
        Random random(context.seed + uint64_t(dtype));
        a = Tensor(dtype, kBatch, kRows, kHeads, kDim, layout, kGuard), b = Tensor(dtype, kBatch, kRows, kHeads, kDim, layout, kGuard);
        out = Tensor(dtype, kBatch, kRows, kHeads, kDim, layout, kGuard);
        a.fill(random, 1), b.fill(random, 1);
        for (int64_t batch = 0; batch < kBatch; ++batch)
            for (int64_t head = 0; head < kHeads; ++head)
                for (int64_t row = 0; row < kRows; ++row) {  // of ten rows, one lacks a, one b, and one both, with NaN in out
                    const bool no_a = row % 10 == 3 || row % 10 == 5, no_b = row % 10 == 4 || row % 10 == 5;
                    lse_a.push_back(no_a ? -INFINITY : float(20 * random.normal())),
                        lse_b.push_back(no_b ? -INFINITY : float(20 * random.normal()));
                    if (row % 4 == 0 && !no_a && !no_b) lse_b.back() = lse_a.back() + float(random.normal());
                    if (no_a) a.fill_row(batch, row, head, NAN);
                    if (no_b) b.fill_row(batch, row, head, NAN);
                }
        a.place(context.device), b.place(context.device), out.place(context.device);
        device_a = Buffer(context.device, lse_a.data(), lse_a.size() * 4),
        device_b = Buffer(context.device, lse_b.data(), lse_b.size() * 4);
        const std::vector<uint32_t> canary(lse_a.size(), kCanary32);
        device_lse = Buffer(context.device, canary.data(), canary.size() * 4);
    }
    fa_merge_args args(fa_device device) const {
        fa_merge_args m;
        std::memset(&m, 0, sizeof m);
        m.struct_size = sizeof m, m.device = device, m.dtype = dtype;
        m.batch = int32_t(a.batch), m.nheads = int32_t(a.heads), m.headdim_v = int32_t(a.dim), m.seqlen = a.rows;
        m.out_a = a.view(), m.out_b = b.view(), m.out = out.view();
        m.lse_a = device_a.as<float>(), m.lse_b = device_b.as<float>(), m.lse = device_lse.as<float>();
        return m;
    }
    // Compares a pair (out, lse) on the device with the formula in float64.
    void check(const Tensor& got, const Buffer& got_lse) const {
        const std::vector<unsigned char> bytes = got.device.bytes(), lse_bytes = got_lse.bytes();
        const float* lse = reinterpret_cast<const float*>(lse_bytes.data());
        std::vector<char> owned(size_t(got.elements()), 0);
        for (int64_t batch = 0; batch < a.batch; ++batch)
            for (int64_t head = 0; head < a.heads; ++head)
                for (int64_t row = 0; row < a.rows; ++row) {
                    const size_t at = size_t((batch * a.heads + head) * a.rows + row);
                    const double x = lse_a[at], y = lse_b[at], top = std::max(x, y);
                    const double both = top == -INFINITY ? -INFINITY : top + std::log(std::exp(x - top) + std::exp(y - top));
                    EXPECT(both == -INFINITY ? lse[at] == both : std::fabs(lse[at] - both) <= lse_floor(both),
                           "lse[%zu]: merged %g and %g into %g, want %g", at, x, y, lse[at], both);
                    for (int64_t d = 0; d < a.dim; ++d) {
                        double want = 0;
                        if (x != -INFINITY) want += std::exp(x - both) * a.value(batch, row, head, d);
                        if (y != -INFINITY) want += std::exp(y - both) * b.value(batch, row, head, d);
                        const int64_t element = got.at(batch, row, head, d);
                        owned[size_t(element)] = 1;
                        const double value = get(bytes.data(), element, dtype),
                                     budget = kFloor + 2 * std::fabs(want - round_to(dtype, want)) +
                                              std::fabs(want) * std::exp2(-significand_bits(dtype));
                        EXPECT(std::fabs(value - want) <= budget, "out[%lld, %lld, %lld, %lld]: got %g, want %g", (long long)batch,
                               (long long)row, (long long)head, (long long)d, value, want);
                    }
                }
        for (int64_t i = 0; i < got.elements(); ++i)
            EXPECT(owned[size_t(i)] || is_canary(bytes.data(), i, element_size(dtype)), "element %lld beside out was overwritten",
                   (long long)i);
    }
};

inline void merge_formula(const Context& context) {
    for (const int32_t dtype : kAllDtypes)
        for (const Layout layout : {Layout::kContiguous, Layout::kHeadsFirst, Layout::kPadded}) {
            const MergeProblem m(context, dtype, layout);
            fa_merge_args args = m.args(context.device);
            expect_ok(fa_attention_merge(&args, nullptr), "fa_attention_merge");
            wait(context.device);
            m.check(m.out, m.device_lse);
            args.out = args.out_a, args.lse = m.device_a.as<float>();  // in place
            expect_ok(fa_attention_merge(&args, nullptr), "fa_attention_merge in place");
            wait(context.device);
            m.check(m.a, m.device_a);
        }
}

inline void merge_refuses(const Context& context) {
    using M = fa_merge_args;
    struct Bad {
        std::function<void(M&)> spoil;
        const char* text;
    };
    const std::vector<Bad> all = {
        {[](M& m) { m.struct_size = 12; }, "struct_size=12"},
        {[](M& m) { m.device = 0; }, "device=0"},
        {[](M& m) { m.dtype = FA_FLOAT8_E4M3; }, "dtype=4"},
        {[](M& m) { m.batch = -1; }, "batch=-1"},
        {[](M& m) { m.nheads = 0; }, "nheads=0"},
        {[](M& m) { m.headdim_v = 513; }, "headdim_v=513"},
        {[](M& m) { m.headdim_v = 0; }, "headdim_v=0"},
        {[](M& m) { m.seqlen = -1; }, "seqlen=-1"},
        {[](M& m) { m.reserved = 3; }, "reserved=3"},
        {[](M& m) { m.out_a.data = nullptr; }, "out_a"},
        {[](M& m) { m.out_b.data = moved(m.out_b.data, 1); }, "out_b"},
        {[](M& m) { m.out.data = nullptr; }, "out"},
        {[](M& m) { m.lse_a = nullptr; }, "lse_a"},
        {[](M& m) { m.lse_b = moved(m.lse_b, 2); }, "lse_b"},
        {[](M& m) { m.lse = nullptr; }, "lse"},
        {[](M& m) { m.out.row_stride = 0; }, "out.row_stride=0"},
    };
    const MergeProblem m(context, FA_FLOAT32, Layout::kContiguous);
    for (const Bad& bad : all) {
        fa_merge_args args = m.args(context.device);
        bad.spoil(args);
        const fa_status status = fa_attention_merge(&args, nullptr);
        EXPECT(status == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), bad.text), "%s: '%s', without '%s'", fa_status_name(status),
               fa_last_error(), bad.text);
    }
    wait(context.device);
    EXPECT(m.out.device.bytes() == m.out.host, "a refused merge wrote to out");
}

// Attention over pieces of the keys, merged in either order, must equal attention over all keys.
inline void merge_pieces(const Context& context) {
    for (const int32_t dtype : kAllDtypes) {
        Case c = shape(65, 150, 64, dtype);
        c.name = "pieces";
        Problem p(c, context.device, context.seed);
        const Answer answer = solve(p);
        struct Piece {
            Tensor out;
            Buffer lse;
        };
        const auto blank = [&] {
            Piece piece;
            piece.out = Tensor(dtype, c.batch, c.seqlen_q, c.nheads, c.dim_v(), Layout::kContiguous, kGuard);
            piece.out.place(p.device);
            piece.lse = Buffer(p.device, size_t(p.lse_elements) * 4);
            return piece;
        };
        const auto attend = [&](int64_t begin, int64_t end) {
            Piece piece = blank();
            fa_attention_args args = p.args();
            args.k.data = moved(args.k.data, begin * p.k.row_stride * int64_t(element_size(dtype)));
            args.v.data = moved(args.v.data, begin * p.v.row_stride * int64_t(element_size(dtype)));
            args.seqlen_k = end - begin, args.out = piece.out.view(), args.lse = piece.lse.as<float>();
            launch(p, args);
            return piece;
        };
        const auto merge = [&](const Piece& a, const Piece& b, fa_tensor out, float* lse) {
            fa_merge_args m;
            std::memset(&m, 0, sizeof m);
            m.struct_size = sizeof m, m.device = p.device, m.dtype = dtype;
            m.batch = c.batch, m.nheads = c.nheads, m.headdim_v = c.dim_v(), m.seqlen = c.seqlen_q;
            m.out_a = a.out.view(), m.out_b = b.out.view(), m.out = out;
            m.lse_a = a.lse.as<float>(), m.lse_b = b.lse.as<float>(), m.lse = lse;
            expect_ok(fa_attention_merge(&m, nullptr), "fa_attention_merge");
            wait(p.device);
        };
        const Piece first = attend(0, 1), second = attend(1, 70), third = attend(70, 150), none = attend(70, 70);
        for (const bool left_to_right : {true, false}) {
            const Piece half = blank(), whole = blank();
            p.reset();
            if (left_to_right) {
                merge(first, second, half.out.view(), half.lse.as<float>());
                merge(half, none, whole.out.view(), whole.lse.as<float>());
                merge(whole, third, p.out.view(), p.lse_device.as<float>() + kGuard);
            } else {
                merge(second, third, half.out.view(), half.lse.as<float>());
                merge(none, first, whole.out.view(), whole.lse.as<float>());
                merge(whole, half, p.out.view(), p.lse_device.as<float>() + kGuard);
            }
            Answer allowed = answer;  // the partial results are rounded twice, and each rounding may add the same error again
            allowed.out_budget *= 2;
            const Verdict verdict = judge(p, allowed);
            EXPECT(verdict.complaint.empty(), "%s, %s: %s", dtype_name(dtype), left_to_right ? "left to right" : "right to left",
                   verdict.complaint.c_str());
        }
    }
}

}  // namespace api
