// distributed_tests.h: calls over several ranks, as a C program makes them. The ranks are threads that share one device. The reference is
// one call over all tokens, which other tests compare with float64.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "flash_attn_distributed.h"
#include "launch.h"

namespace api {

// An all-gather between the threads of a test.
class Crowd {
public:
    explicit Crowd(int size) : size_(size), words_(size_t(size)) {}
    struct Member {
        Crowd* crowd;
        int rank;
    };
    static int all_gather(void* context, const void* mine, void* all, size_t bytes) {
        const Member& me = *static_cast<Member*>(context);
        me.crowd->words_[size_t(me.rank)].assign(static_cast<const char*>(mine), bytes);
        me.crowd->meet();
        for (int r = 0; r < me.crowd->size_; ++r)
            std::memcpy(static_cast<char*>(all) + size_t(r) * bytes, me.crowd->words_[size_t(r)].data(), bytes);
        me.crowd->meet();
        return 0;
    }

private:
    void meet() {
        std::unique_lock<std::mutex> lock(mutex_);
        const int64_t turn = turn_;
        if (++waiting_ == size_) {
            waiting_ = 0, ++turn_;
            all_here_.notify_all();
        } else {
            all_here_.wait(lock, [&] { return turn_ != turn; });
        }
    }
    int size_, waiting_ = 0;
    int64_t turn_ = 0;
    std::mutex mutex_;
    std::condition_variable all_here_;
    std::vector<std::string> words_;
};

struct RankedCase {
    int32_t layout, mode;
    int size;
};

// Sequences of odd lengths, one of them empty, causal, with sinks.
struct Ranked {
    static constexpr int32_t kHeads = 4, kHeadsK = 2, kDim = 32;
    const std::vector<int32_t> cu = {0, 45, 45, 46, 113};
    const int64_t total = 113;
    fa_device device;
    std::vector<float> q, k, v, dout, sinks = {0.5f, -1, 2, 0};
    std::vector<float> out, lse, dq, dk, dv;  // of the single call

    explicit Ranked(const Context& context) : device(context.device) {
        Random random(context.seed);
        const auto draw = [&](int32_t heads) {
            std::vector<float> x(size_t(total * heads * kDim));
            for (float& e : x) e = float(random.normal());
            return x;
        };
        q = draw(kHeads), k = draw(kHeadsK), v = draw(kHeadsK), dout = draw(kHeads);
        std::vector<fa_segment> all;
        for (int32_t b = 0; b + 1 < int32_t(cu.size()); ++b) all.push_back({b, 0, cu[size_t(b) + 1] - cu[size_t(b)]});
        Rows whole(*this, all);
        const Buffer starts(device, cu.data(), cu.size() * sizeof(int32_t));
        fa_attention_args& a = whole.args;
        a.batch = int32_t(cu.size()) - 1, a.seqlen_q = a.seqlen_k = 67, a.cu_seqlens_q = a.cu_seqlens_k = starts.as<int32_t>();
        fa_attention_plan plan;
        plan.struct_size = sizeof plan;
        whole.gradients.forward = &a;
        for (const bool backward : {false, true}) {
            expect_ok(backward ? fa_attention_backward_query(&whole.gradients, &plan) : fa_attention_query(&a, &plan), "query of one call");
            const Buffer workspace(device, plan.workspace_bytes + 1);
            a.workspace = workspace.data(), a.workspace_bytes = plan.workspace_bytes;
            expect_ok(backward ? fa_attention_backward(&whole.gradients, nullptr) : fa_attention_forward(&a, nullptr), "one call");
            wait(device);
        }
        out = whole.read(whole.out), lse = whole.read(whole.lse);
        dq = whole.read(whole.dq), dk = whole.read(whole.dk), dv = whole.read(whole.dv);
    }

    // The rows of some segments in device memory, with NaN in the outputs.
    struct Rows {
        std::vector<int64_t> rows;  // row numbers among all sequences
        Buffer q, k, v, dout, sinks, out, lse, dq, dk, dv;
        fa_attention_args args;
        fa_attention_backward_args gradients;
        Rows(const Ranked& from, const std::vector<fa_segment>& segments) {
            for (const fa_segment& s : segments)
                for (int32_t i = s.begin; i < s.end; ++i) rows.push_back(from.cu[size_t(s.sequence)] + i);
            const auto put = [&](const std::vector<float>& x, int64_t width) {
                std::vector<float> mine;
                for (const int64_t row : rows) mine.insert(mine.end(), x.begin() + row * width, x.begin() + (row + 1) * width);
                return Buffer(from.device, mine.data(), mine.size() * 4);
            };
            const auto nans = [&](int64_t count) {
                const std::vector<float> x(size_t(count), NAN);
                return Buffer(from.device, x.data(), x.size() * 4);
            };
            constexpr int64_t kWide = kHeads * kDim, kNarrow = kHeadsK * kDim;
            const auto n = int64_t(rows.size());
            q = put(from.q, kWide), k = put(from.k, kNarrow), v = put(from.v, kNarrow), dout = put(from.dout, kWide);
            sinks = Buffer(from.device, from.sinks.data(), from.sinks.size() * 4);
            out = nans(n * kWide), lse = nans(n * kHeads), dq = nans(n * kWide), dk = nans(n * kNarrow), dv = nans(n * kNarrow);
            std::memset(&args, 0, sizeof args), std::memset(&gradients, 0, sizeof gradients);
            args.struct_size = sizeof args, gradients.struct_size = sizeof gradients;
            args.device = from.device, args.dtype = FA_FLOAT32, args.num_threads = 2;
            args.nheads = kHeads, args.nheads_k = kHeadsK, args.headdim = kDim, args.total_q = args.total_k = n;
            const auto wide = [](const Buffer& x) { return fa_tensor{x.data(), 0, kWide, kDim}; };
            const auto narrow = [](const Buffer& x) { return fa_tensor{x.data(), 0, kNarrow, kDim}; };
            args.q = wide(q), args.k = narrow(k), args.v = narrow(v), args.out = wide(out), args.lse = lse.as<float>();
            args.causal = 1, args.sinks = sinks.as<float>(), args.deterministic = 1;
            gradients.dout = wide(dout), gradients.dq = wide(dq), gradients.dk = narrow(dk), gradients.dv = narrow(dv);
        }
        std::vector<float> read(const Buffer& x) const {
            const std::vector<unsigned char> bytes = x.bytes();
            std::vector<float> values(bytes.size() / 4);
            if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
            return values;
        }
        // Compares this rank's rows, `width` numbers each, with those of the single call.
        void check(const char* name, const Buffer& got, const std::vector<float>& want, int64_t width, bool heads_first = false) const {
            const std::vector<float> values = read(got);
            const auto n = int64_t(rows.size()), all = int64_t(want.size()) / width;
            for (int64_t i = 0; i < n; ++i)
                for (int64_t x = 0; x < width; ++x) {
                    const float value = values[size_t(heads_first ? x * n + i : i * width + x)];
                    const float right = want[size_t(heads_first ? x * all + rows[size_t(i)] : rows[size_t(i)] * width + x)];
                    EXPECT(value == right || std::fabs(value - right) <= 2e-5f * (1 + std::fabs(right)),
                           "%s of token %lld, %lld: %g, want %g", name, static_cast<long long>(rows[size_t(i)]), static_cast<long long>(x),
                           double(value), double(right));
                }
        }
    };

    void rank(const RankedCase& c, int me, Crowd& crowd) const {
#if FA_WITH_CUDA
        if (device == FA_CUDA) CUDA(cudaSetDevice(0));
#endif
        Crowd::Member member{&crowd, me};
        fa_group_args g;
        std::memset(&g, 0, sizeof g);
        g.struct_size = sizeof g, g.kind = FA_GROUP_THREADS, g.rank = me, g.size = c.size, g.device = device;
        g.all_gather = Crowd::all_gather, g.context = &member;
        fa_group* group = nullptr;
        expect_ok(fa_group_create(&g, &group), "fa_group_create");
        struct Close {
            fa_group* group;
            ~Close() { fa_group_destroy(group); }
        } close{group};
        const auto batch = int32_t(cu.size()) - 1;
        int64_t count = 0;
        expect_ok(fa_distributed_segments(c.layout, me, c.size, batch, cu.data(), nullptr, 0, &count), "fa_distributed_segments");
        std::vector<fa_segment> segments(static_cast<size_t>(count));
        expect_ok(fa_distributed_segments(c.layout, me, c.size, batch, cu.data(), segments.data(), count, &count),
                  "fa_distributed_segments");
        Rows mine(*this, segments);
        fa_distributed_args d;
        std::memset(&d, 0, sizeof d);
        d.struct_size = sizeof d, d.attention = &mine.args, d.cu_seqlens_q = cu.data(), d.batch = batch, d.layout = c.layout,
        d.mode = c.mode;
        fa_distributed_backward_args b = {sizeof b, &d, &mine.gradients};
        for (const bool backward : {false, true}) {
            fa_distributed_plan plan;
            plan.struct_size = sizeof plan;
            expect_ok(backward ? fa_distributed_backward_query(&b, g.kind, me, c.size, &plan)
                               : fa_distributed_query(&d, g.kind, me, c.size, &plan),
                      "query");
            EXPECT(plan.mode == c.mode, "mode %d, want %d", plan.mode, c.mode);
            EXPECT(plan.rows_q == int64_t(mine.rows.size()), "%lld rows, want %zu", static_cast<long long>(plan.rows_q), mine.rows.size());
            const Buffer workspace(device, plan.workspace_bytes);
            mine.args.workspace = workspace.data(), mine.args.workspace_bytes = plan.workspace_bytes;
            expect_ok(fa_group_reserve(group, plan.shared_bytes), "fa_group_reserve");
            expect_ok(backward ? fa_distributed_backward(group, &b, nullptr) : fa_distributed_forward(group, &d, nullptr),
                      backward ? "fa_distributed_backward" : "fa_distributed_forward");
            wait(device);
        }
        mine.check("out", mine.out, out, kHeads * kDim), mine.check("lse", mine.lse, lse, kHeads, true);
        mine.check("dq", mine.dq, dq, kHeads * kDim), mine.check("dk", mine.dk, dk, kHeadsK * kDim),
            mine.check("dv", mine.dv, dv, kHeadsK * kDim);
    }

    void run(const RankedCase& c) const {
        Crowd crowd(c.size);
        std::vector<std::string> failures(static_cast<size_t>(c.size));
        std::vector<std::thread> threads;
        for (int r = 0; r < c.size; ++r)
            threads.emplace_back([&, r] {
                try {
                    rank(c, r, crowd);
                } catch (const std::exception& failure) {
                    failures[size_t(r)] = failure.what();
                }
            });
        for (std::thread& thread : threads) thread.join();
        for (int r = 0; r < c.size; ++r)
            EXPECT(failures[size_t(r)].empty(), "rank %d of %d, layout %d, mode %d: %s", r, c.size, c.layout, c.mode,
                   failures[size_t(r)].c_str());
    }
};

inline void distributed_ranks(const Context& context) {
    const Ranked ranked(context);
    for (const int size : {1, 2, 3, 4})
        for (const int32_t layout : {FA_LAYOUT_CONTIGUOUS, FA_LAYOUT_ZIGZAG, FA_LAYOUT_FLAT})
            for (const int32_t mode : {FA_MODE_GATHER, FA_MODE_ULYSSES}) ranked.run({layout, mode, size});
}

}  // namespace api
