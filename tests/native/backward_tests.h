// backward_tests.h: every backward kernel of the device against float64, and the rest of the contract of fa_attention_backward. Gradients
// start as NaN. With `deterministic` a second call, on the workspace that the first one left, must give the same bits.
#pragma once

#include "backward_reference.h"
#include "launch.h"
#include "refusal_tests.h"

namespace backward {

// Runs one kernel on one problem. Returns false if the kernel does not serve the call; the launch must then say so and touch nothing.
inline bool answer(BackwardProblem& b, const Gradients& exact, const std::string& kernel, bool deterministic, BackwardVerdict* verdict) {
    fa_attention_args forward = b.forward_args();
    forward.kernel = kernel.c_str(), forward.deterministic = deterministic;
    const fa_attention_backward_args args = b.args(&forward);
    const fa_attention_plan plan = query(args);
    b.reset();
    if (plan.status == FA_UNSUPPORTED) {
        const std::string refusal = fa_last_error();
        const fa_status status = fa_attention_backward(&args, nullptr);
        wait(b.p.device);
        EXPECT(status == FA_UNSUPPORTED && refusal == fa_last_error() && b.outputs() == b.starts(),
               "%s: the query refuses (%s), the launch returns %s and %s its outputs", kernel.c_str(), refusal.c_str(),
               fa_status_name(status), b.outputs() == b.starts() ? "leaves alone" : "writes");
        return false;
    }
    EXPECT(plan.status == FA_OK, "query: %s, %s", fa_status_name(fa_status(plan.status)), fa_last_error());
    EXPECT(kernel == plan.kernel, "asked for %s, the query names %s", kernel.c_str(), plan.kernel);
    const Workspace workspace(b.p.device, plan.workspace_bytes);
    workspace.attach(&forward);
    const auto run = [&] {
        b.reset();
        expect_ok(fa_attention_backward(&args, nullptr), "fa_attention_backward");
        wait(b.p.device);
        return b.outputs();
    };
    const std::vector<unsigned char> first = run();
    *verdict = judge(b, exact);
    if (deterministic) EXPECT(run() == first, "%s: the second call, on the first one's workspace, gave other bits", kernel.c_str());
    workspace.check();
    return true;
}

inline void check(const Context& context, const Case& c, bool accumulate) {
    BackwardProblem b(c, context.device, context.seed, context.num_threads, accumulate);
    const Gradients exact = solve_backward(b);
    int answered = 0;
    std::string complaints;
    for (const std::string& kernel : context.backward_kernels)
        for (const bool deterministic : {true, false}) {
            if (!deterministic && context.device == FA_CPU) continue;  // the CPU is always deterministic
            BackwardVerdict verdict;
            if (!answer(b, exact, kernel, deterministic, &verdict)) continue;
            ++answered;
            if (std::getenv("FLASH_ATTN_TEST_RATIOS"))
                std::printf("  %-12s %-50s %.2f of the budget, %s\n", kernel.c_str(), c.name.c_str(), verdict.ratio, verdict.where.c_str());
            if (!verdict.complaint.empty()) complaints += (complaints.empty() ? "" : "; ") + kernel + ": " + verdict.complaint;
        }
    EXPECT(complaints.empty(), "%s", complaints.c_str());
    if (answered == 0) throw Skip("no backward kernel tested here serves it");
}

// The cases of the forward pass in which every row is checked. float8 has no backward pass.
inline std::vector<Case> cases(uint64_t seed, bool quick) {
    std::vector<Case> all;
    for (Case c : correctness_cases(seed, quick)) {
        if (c.dtype == FA_FLOAT8_E4M3 || c.row_step != 1 || c.outer_heads_only || !c.want_lse || c.pairs() > 1 << 26) continue;
        c.name = "backward/" + c.name;
        all.push_back(std::move(c));
    }
    return all;
}

// ---- refusals ----

struct Refusal {
    const char* name;
    std::function<void(fa_attention_backward_args&, fa_attention_args&)> spoil;
    fa_status status;
    const char* text;
    bool query_too = true;
};

inline const std::vector<Refusal>& refusals() {
    using B = fa_attention_backward_args;
    using F = fa_attention_args;
    constexpr fa_status kBad = FA_BAD_ARGUMENT, kNot = FA_UNSUPPORTED;
    static const std::vector<Refusal> all = {
        {"struct_size", [](B& b, F&) { b.struct_size = 8; }, kBad, "fa_attention_backward_args.struct_size=8"},
        {"forward/null", [](B& b, F&) { b.forward = nullptr; }, kBad, "fa_attention_args is NULL"},
        {"forward/headdim", [](B&, F& f) { f.headdim = 777; }, kBad, "headdim=777"},
        {"lse/null", [](B&, F& f) { f.lse = nullptr; }, kBad, "lse", false},
        {"out/null", [](B&, F& f) { f.out.data = nullptr; }, kBad, "out.data is NULL", false},
        {"dout/null", [](B& b, F&) { b.dout.data = nullptr; }, kBad, "dout.data is NULL", false},
        {"dq/null", [](B& b, F&) { b.dq.data = nullptr; }, kBad, "dq.data is NULL", false},
        {"dk/null", [](B& b, F&) { b.dk.data = nullptr; }, kBad, "dk.data is NULL", false},
        {"dv/null", [](B& b, F&) { b.dv.data = nullptr; }, kBad, "dv.data is NULL", false},
        {"dout/misaligned", [](B& b, F&) { b.dout.data = moved(b.dout.data, 1); }, kBad, "dout.data="},
        {"dq/misaligned", [](B& b, F&) { b.dq.data = moved(b.dq.data, 2); }, kBad, "dq.data="},
        {"dk/misaligned", [](B& b, F&) { b.dk.data = moved(b.dk.data, 3); }, kBad, "dk.data="},
        {"dv/misaligned", [](B& b, F&) { b.dv.data = moved(b.dv.data, 1); }, kBad, "dv.data="},
        {"dbias/misaligned", [](B& b, F&) { b.dbias.data = moved(b.dbias.data, 1); }, kBad, "dbias"},
        {"dsinks/misaligned", [](B& b, F&) { b.dsinks = moved(b.dsinks, 2); }, kBad, "dsinks"},
        {"dlse/misaligned", [](B& b, F& f) { b.dlse = static_cast<const float*>(moved(f.lse, 2)); }, kBad, "dlse"},
        {"dq/row_stride", [](B& b, F&) { b.dq.row_stride = 0; }, kBad, "dq.row_stride=0"},
        {"dq/head_stride", [](B& b, F&) { b.dq.head_stride = 0; }, kBad, "dq.head_stride=0"},
        {"dk/batch_stride", [](B& b, F&) { b.dk.batch_stride = 0; }, kBad, "dk.batch_stride=0"},
        {"dk/head_stride", [](B& b, F&) { b.dk.head_stride = 0; }, kBad, "dk.head_stride=0"},
        {"dv/batch_stride", [](B& b, F&) { b.dv.batch_stride = 0; }, kBad, "dv.batch_stride=0"},
        {"dv/row_stride", [](B& b, F&) { b.dv.row_stride = 0; }, kBad, "dv.row_stride=0"},
        {"dbias/without_bias", [](B&, F& f) { f.bias.data = nullptr; }, kBad, "bias.data is NULL"},
        {"dbias/sums_an_axis", [](B& b, F&) { b.dbias.head_stride = 0; }, kBad, "dbias.head_stride=0"},
        {"dsinks/without_sinks", [](B&, F& f) { f.sinks = nullptr; }, kBad, "sinks is NULL"},
        {"accumulate", [](B& b, F&) { b.accumulate = 2; }, kBad, "accumulate=2"},
        {"deterministic", [](B&, F& f) { f.deterministic = -1; }, kBad, "deterministic=-1"},
        {"reserved", [](B& b, F&) { b.reserved = 3; }, kBad, "reserved=3"},
        {"fp8",
         [](B&, F& f) {
             f.dtype = FA_FLOAT8_E4M3;
             static float one = 1;
             f.q_descale.data = f.k_descale.data = f.v_descale.data = &one;
             f.bias_dtype = FA_FLOAT32;
         },
         kNot, "dtype=float8_e4m3"},
        {"kernel/unknown", [](B&, F& f) { f.kernel = "no_such_kernel"; }, kBad, "no_such_kernel"},
        {"kernel/other_device",
         [](B&, F& f) {
             const auto others = backward_kernels_of(f.device == FA_CPU ? FA_CUDA : FA_CPU);
             static std::string name;
             if (others.empty()) throw Skip("this build has backward kernels of one device only");
             name = others.front(), f.kernel = name.c_str();
         },
         kNot, "device is"},
    };
    return all;
}

inline Case small_case() {
    Case c = shape(33, 65, 40, FA_FLOAT32);
    c.name = "backward/api", c.causal = true, c.nheads = 4, c.bias = 1, c.sinks = 1;
    return c;
}

inline void refuse(const Context& context, const Refusal& refusal) {
    const BackwardProblem b(small_case(), context.device, context.seed, context.num_threads);
    fa_attention_args forward = b.forward_args();
    fa_attention_backward_args args = b.args(&forward);
    const Workspace workspace(b.p.device, query(args).workspace_bytes);
    workspace.attach(&forward);
    refusal.spoil(args, forward);
    const fa_status status = fa_attention_backward(&args, nullptr);
    const std::string text = fa_last_error();
    EXPECT(status == refusal.status, "status is %s (%s), want %s", fa_status_name(status), text.c_str(), fa_status_name(refusal.status));
    EXPECT(text.find(refusal.text) != std::string::npos, "the text is '%s', without '%s'", text.c_str(), refusal.text);
    wait(b.p.device);
    EXPECT(b.outputs() == b.starts(), "a refused call wrote to its outputs");
    if (!refusal.query_too) return;
    const fa_attention_plan plan = query(args);
    EXPECT(plan.status == refusal.status && text == fa_last_error(), "the query says %s, '%s'", fa_status_name(fa_status(plan.status)),
           fa_last_error());
    EXPECT(!*plan.kernel && plan.workspace_bytes == 0, "the query names kernel '%s' for a call that cannot run", plan.kernel);
}

inline void refuse_null(const Context& context) {
    EXPECT(fa_attention_backward(nullptr, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "NULL"), "args=NULL: %s",
           fa_last_error());
    const BackwardProblem b(small_case(), context.device, context.seed, context.num_threads);
    const fa_attention_args forward = b.forward_args();
    const fa_attention_backward_args args = b.args(&forward);
    EXPECT(fa_attention_backward_query(&args, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "plan"), "plan=NULL: %s",
           fa_last_error());
}

inline void workspace_is_exact(const Context& context) {
    for (const std::string& kernel : context.backward_kernels) {
        const BackwardProblem b(small_case(), context.device, context.seed, context.num_threads);
        fa_attention_args forward = b.forward_args();
        forward.kernel = kernel.c_str();
        const fa_attention_backward_args args = b.args(&forward);
        const fa_attention_plan plan = query(args);
        if (plan.status != FA_OK || plan.workspace_bytes == 0) continue;
        const Workspace workspace(b.p.device, plan.workspace_bytes);
        workspace.attach(&forward);
        forward.workspace_bytes -= 1;
        for (int pass = 0; pass < 2; ++pass) {
            const fa_status status = fa_attention_backward(&args, nullptr);
            EXPECT(status == FA_WORKSPACE_TOO_SMALL && std::strstr(fa_last_error(), format("%zu", plan.workspace_bytes).c_str()),
                   "%s with %zu bytes: %s, '%s'", kernel.c_str(), forward.workspace_bytes, fa_status_name(status), fa_last_error());
            forward.workspace = nullptr, forward.workspace_bytes = plan.workspace_bytes;  // second pass: no workspace at all
        }
        wait(b.p.device);
        EXPECT(b.outputs() == b.starts(), "%s: a refused call wrote to its outputs", kernel.c_str());
    }
}

// Memory besides inputs and outputs must be O(seqlen).
inline void workspace_is_small(const Context& context) {
    for (const std::string& kernel : context.backward_kernels) {
        if (kernel == "cpu_naive") continue;  // it keeps dk and dv of a head for every thread
        Case c = shape(1, 1, 128, FA_BFLOAT16);
        c.name = "backward/workspace", c.bias = 2, c.sinks = 1;
        const BackwardProblem b(c, context.device, context.seed, context.num_threads);
        fa_attention_args forward = b.forward_args();
        forward.kernel = kernel.c_str(), forward.seqlen_q = forward.seqlen_k = 1 << 17;
        for (fa_tensor* t : {&forward.q, &forward.k, &forward.v, &forward.out}) t->data = nullptr;
        forward.lse = nullptr;
        fa_attention_backward_args args = b.args(&forward);
        for (fa_tensor* t : {&args.dout, &args.dq, &args.dk, &args.dv}) t->data = nullptr;
        const fa_attention_plan plan = query(args);
        if (plan.status != FA_OK) continue;
        const double inputs = 2.0 * c.batch * c.nheads * double(forward.seqlen_q) * 5 * c.headdim;
        EXPECT(double(plan.workspace_bytes) < 2 * inputs, "kernel %s wants %zu bytes, q, k, v, out and dout have %.0f", plan.kernel,
               plan.workspace_bytes, inputs);
    }
}

// Without queries, keys or batch entries the gradients that exist are zero. With accumulate they keep their contents.
inline void empty_axes(const Context& context) {
    for (const std::string& kernel : context.backward_kernels)
        for (const bool accumulate : {false, true})
            for (const int axis : {0, 1, 2}) {
                Case c = shape(axis == 0 ? 0 : 5, axis == 1 ? 0 : 70, 24, FA_FLOAT32);
                c.name = format("backward/empty/%d", axis), c.sinks = 1, c.bias = axis == 0 ? 3 : axis == 2 ? 2 : 0;
                if (axis == 2) c.batch = 0;
                BackwardProblem b(c, context.device, context.seed, context.num_threads, accumulate);
                BackwardVerdict verdict;
                if (!answer(b, solve_backward(b), kernel, true, &verdict)) continue;
                EXPECT(verdict.complaint.empty(), "%s, axis %d: %s", kernel.c_str(), axis, verdict.complaint.c_str());
            }
}

inline void information(const Context& context) {
    const int32_t count = fa_backward_kernel_count();
    EXPECT(!backward_kernels_of(FA_CPU).empty(), "there is no backward kernel for the CPU");
    EXPECT(context.device == FA_CPU || !backward_kernels_of(FA_CUDA).empty(), "there is no backward kernel for the GPU");
    for (int32_t i = 0; i < count; ++i)
        EXPECT(*fa_backward_kernel_name(i) && *fa_backward_kernel_summary(i), "backward kernel %d has no name or no summary", i);
    EXPECT(!fa_backward_kernel_name(count) && !fa_backward_kernel_name(-1) && !fa_backward_kernel_summary(count) &&
               !fa_backward_kernel_device(count),
           "there is a backward kernel beyond the last");
}

// If no kernel is forced, the query names the kernel that runs, and gives a reason against each kernel preferred to it.
inline void query_matches_launch(const Context& context) {
    for (const int32_t dtype : kAllDtypes) {
        Case c = small_case();
        c.dtype = dtype;
        BackwardProblem b(c, context.device, context.seed, context.num_threads);
        const auto run = [&](const char* kernel) {
            fa_attention_args forward = b.forward_args();
            forward.kernel = kernel, forward.deterministic = 1;
            const fa_attention_backward_args args = b.args(&forward);
            const fa_attention_plan plan = query(args);
            EXPECT(plan.status == FA_OK, "%s", fa_last_error());
            const Workspace workspace(b.p.device, plan.workspace_bytes);
            workspace.attach(&forward);
            b.reset();
            expect_ok(fa_attention_backward(&args, nullptr), "fa_attention_backward");
            wait(b.p.device);
            return plan;
        };
        const fa_attention_plan plan = run(nullptr);
        const std::vector<unsigned char> chosen = b.outputs();
        run(plan.kernel);
        EXPECT(b.outputs() == chosen, "the launch gave other bits than kernel %s, which the query names", plan.kernel);
        for (const std::string& name : backward_kernels_of(context.device)) {
            if (name == plan.kernel) break;
            EXPECT(std::strstr(plan.why_not, (name + ": ").c_str()), "why_not has no line for %s: '%s'", name.c_str(), plan.why_not);
        }
    }
}

// FLASH_ATTN_BACKWARD_KERNEL forces a kernel. The variable of the forward pass has no effect.
inline void environment_forces(const Context& context) {
    if (std::getenv("FLASH_ATTN_KERNEL") || std::getenv("FLASH_ATTN_BACKWARD_KERNEL")) throw Skip("a kernel is forced already");
    struct Environment {
        const char* name;
        Environment(const char* name, const char* value) : name(name) { setenv(name, value, 1); }
        ~Environment() { unsetenv(name); }
    };
    const BackwardProblem b(small_case(), context.device, context.seed, context.num_threads);
    const fa_attention_args forward = b.forward_args();
    const fa_attention_backward_args args = b.args(&forward);
    const std::string last = backward_kernels_of(context.device).back();  // serves every call
    {
        const Environment other("FLASH_ATTN_KERNEL", "no_such_kernel"), forced("FLASH_ATTN_BACKWARD_KERNEL", last.c_str());
        EXPECT(query(args).kernel == last, "FLASH_ATTN_BACKWARD_KERNEL=%s did not choose it", last.c_str());
    }
    const Environment wrong("FLASH_ATTN_BACKWARD_KERNEL", "no_such_kernel");
    EXPECT(query(args).status == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "FLASH_ATTN_BACKWARD_KERNEL=no_such_kernel"), "%s",
           fa_last_error());
}

// Batch entries more than 2^31 elements apart give the same bits as entries close together.
inline void far_apart(const Context& context) {
    Case c = small_case();
    c.dtype = FA_BFLOAT16;
    BackwardProblem b(c, context.device, context.seed, context.num_threads);
    constexpr int64_t kFar = (int64_t(1) << 31) + 4096;  // elements between the two batches
    const std::vector<const Tensor*> inputs = {&b.p.q, &b.p.k, &b.p.v, &b.p.out, &b.dout}, outputs = {&b.dq, &b.dk, &b.dv};
    int64_t near = 0;
    for (const auto* tensors : {&inputs, &outputs})
        for (const Tensor* t : *tensors) near += t->batch_stride;
    const Buffer memory = [&] {
        try {
            return Buffer(context.device, size_t(kFar + near) * 2);
        } catch (const Failure&) {
            throw Skip(format("cannot allocate %zu bytes of device memory", size_t(kFar + near) * 2));
        }
    }();
    for (const std::string& kernel : context.backward_kernels) {
        fa_attention_args forward = b.forward_args();
        forward.kernel = kernel.c_str(), forward.deterministic = 1;
        fa_attention_backward_args args = b.args(&forward);
        const fa_attention_plan plan = query(args);
        if (plan.status == FA_UNSUPPORTED) continue;
        const Workspace workspace(context.device, plan.workspace_bytes);
        workspace.attach(&forward);
        b.reset();
        expect_ok(fa_attention_backward(&args, nullptr), "near");
        wait(context.device);
        const std::vector<unsigned char> want = b.outputs();
        b.reset();
        int64_t begin = 0;
        const auto far = [&](const Tensor& t, fa_tensor* view) {
            for (int64_t batch = 0; batch < 2; ++batch)
                memory.copy(memory.as<uint16_t>() + begin + batch * kFar, static_cast<uint16_t*>(view->data) + batch * t.batch_stride,
                            size_t(t.batch_stride) * 2);
            view->data = memory.as<uint16_t>() + begin, view->batch_stride = kFar, begin += t.batch_stride;
        };
        fa_tensor* const views[] = {&forward.q, &forward.k, &forward.v, &forward.out, &args.dout, &args.dq, &args.dk, &args.dv};
        for (size_t i = 0; i < 8; ++i) far(i < 5 ? *inputs[i] : *outputs[i - 5], views[i]);
        expect_ok(fa_attention_backward(&args, nullptr), "far");
        wait(context.device);
        for (size_t i = 0; i < 3; ++i)
            for (int64_t batch = 0; batch < 2; ++batch)
                memory.copy(static_cast<uint16_t*>(outputs[i]->view().data) + batch * outputs[i]->batch_stride,
                            static_cast<uint16_t*>(views[5 + i]->data) + batch * kFar, size_t(outputs[i]->batch_stride) * 2);
        EXPECT(b.outputs() == want, "%s: batches %lld elements apart give other gradients", kernel.c_str(), (long long)kFar);
    }
}

#if FA_WITH_CUDA
// Two concurrent launches of one kernel: all their state is in the two workspaces.
inline void two_streams(const Context& context) {
    if (context.device != FA_CUDA) throw Skip("needs a GPU");
    for (const std::string& kernel : context.backward_kernels) {
        Case cases[] = {shape(333, 517, 64, FA_BFLOAT16), small_case()};
        cases[0].name = "backward/one stream", cases[0].causal = true, cases[0].softcap = 5, cases[0].bias = 2;
        cases[1].dtype = FA_BFLOAT16;
        std::vector<BackwardProblem> problems;
        std::vector<Workspace> workspaces;
        fa_attention_args forward[2];
        fa_attention_backward_args args[2];
        cudaStream_t streams[2];
        bool served = true;
        for (int i = 0; i < 2; ++i) {
            problems.emplace_back(cases[i], FA_CUDA, context.seed, 0);
            forward[i] = problems[size_t(i)].forward_args();
            forward[i].kernel = kernel.c_str(), forward[i].deterministic = 1;
            args[i] = problems[size_t(i)].args(&forward[i]);
            const fa_attention_plan plan = query(args[i]);
            served = served && plan.status == FA_OK;
            workspaces.emplace_back(FA_CUDA, plan.workspace_bytes);
            workspaces.back().attach(&forward[i]);
            CUDA(cudaStreamCreateWithFlags(&streams[i], cudaStreamNonBlocking));
        }
        if (served) {
            std::vector<unsigned char> want[2];
            for (int i = 0; i < 2; ++i) {
                expect_ok(fa_attention_backward(&args[i], streams[i]), "alone");
                wait(FA_CUDA, streams[i]);
                want[i] = problems[size_t(i)].outputs();
                problems[size_t(i)].reset();
            }
            wait(FA_CUDA);
            for (int repetition = 0; repetition < 20; ++repetition)
                for (int i = 0; i < 2; ++i) expect_ok(fa_attention_backward(&args[i], streams[i]), "beside another");
            for (int i = 0; i < 2; ++i) {
                wait(FA_CUDA, streams[i]);
                EXPECT(problems[size_t(i)].outputs() == want[i], "%s: other bits beside another stream", kernel.c_str());
            }
        }
        for (const cudaStream_t stream : streams) CUDA(cudaStreamDestroy(stream));
    }
}

// A call that is captured once and replayed with other contents.
inline void graph(const Context& context) {
    if (context.device != FA_CUDA) throw Skip("needs a GPU");
    for (const std::string& kernel : context.backward_kernels) {
        BackwardProblem b(small_case(), FA_CUDA, context.seed, 0);
        fa_attention_args forward = b.forward_args();
        forward.kernel = kernel.c_str();
        const fa_attention_backward_args args = b.args(&forward);
        const fa_attention_plan plan = query(args);
        if (plan.status == FA_UNSUPPORTED) continue;
        const Workspace workspace(FA_CUDA, plan.workspace_bytes);
        workspace.attach(&forward);
        cudaStream_t stream;
        cudaGraph_t captured;
        cudaGraphExec_t executable;
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        const fa_status status = fa_attention_backward(&args, stream);
        CUDA(cudaStreamEndCapture(stream, &captured));
        expect_ok(status, "captured fa_attention_backward");
        CUDA(cudaGraphInstantiate(&executable, captured, 0));
        for (int replay = 0; replay < 2; ++replay) {
            b.reset();
            CUDA(cudaGraphLaunch(executable, stream));
            CUDA(cudaStreamSynchronize(stream));
            const BackwardVerdict verdict = judge(b, solve_backward(b));
            EXPECT(verdict.complaint.empty(), "%s, replay %d: %s", kernel.c_str(), replay, verdict.complaint.c_str());
            for (int64_t d = 0; d < b.dout.dim; ++d) b.dout.set(0, 3, 1, d, 4 * b.dout.value(0, 3, 1, d));
            b.dout.device.upload(b.dout.host.data());
        }
        CUDA(cudaGraphExecDestroy(executable));
        CUDA(cudaGraphDestroy(captured));
        CUDA(cudaStreamDestroy(stream));
    }
}
#endif

}  // namespace backward

inline std::vector<Test> backward_tests(uint64_t seed, bool quick) {
    std::vector<Test> all = {
        {"backward/api/information", backward::information},
        {"backward/api/query/matches_launch", backward::query_matches_launch},
        {"backward/api/query/workspace_is_exact", backward::workspace_is_exact},
        {"backward/api/query/workspace_is_small", backward::workspace_is_small},
        {"backward/api/query/environment", backward::environment_forces},
        {"backward/api/empty_axes", backward::empty_axes},
        {"backward/api/offsets_above_2^31", backward::far_apart},
        {"backward/refuses/null", backward::refuse_null},
    };
    for (const backward::Refusal& refusal : backward::refusals())
        all.push_back(
            {std::string("backward/refuses/") + refusal.name, [&](const Context& context) { backward::refuse(context, refusal); }});
#if FA_WITH_CUDA
    all.push_back({"cuda/backward/two_streams", backward::two_streams});
    all.push_back({"cuda/backward/graph", backward::graph});
#endif
    for (const Case& c : backward::cases(seed, quick)) {
        all.push_back({c.name, [c](const Context& context) { backward::check(context, c, false); }});
        if (c.name.find("everything") == std::string::npos) continue;
        Case again = c;
        again.name += "/accumulate";
        all.push_back({again.name, [again](const Context& context) { backward::check(context, again, true); }});
    }
    return all;
}
