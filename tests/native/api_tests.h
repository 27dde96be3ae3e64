// api_tests.h: promises of the C ABI besides correct numbers: the query, workspaces, bitwise reproducibility, 64-bit offsets, streams and
// graphs. api_tests() lists these tests and those of refusal_tests.h, merge_tests.h, distributed_tests.h and thread_tests.h.
#pragma once

#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>

#include "distributed_tests.h"
#include "header_is_c.h"
#include "launch.h"
#include "merge_tests.h"
#include "reference.h"
#include "refusal_tests.h"
#include "thread_tests.h"

namespace api {

// ---- the tools of the test program itself ----

inline void known_answers(const Context&) {
    const auto expect = [](Counter got, std::vector<uint32_t> want) {
        for (int i = 0; i < 4; ++i)
            EXPECT(got.x[i] == want[size_t(i)], "philox word %d is %08x, published as %08x", i, got.x[i], want[size_t(i)]);
    };
    const uint32_t ones = 0xFFFFFFFF;  // Philox4x32-10 at all zeros and all ones, two published vectors
    expect(philox4x32(10, {{0, 0, 0, 0}}, 0, 0), {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    expect(philox4x32(10, {{ones, ones, ones, ones}}, ones, ones), {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    for (const int32_t dtype : {FA_FLOAT16, FA_BFLOAT16})
        for (uint32_t bits = 0; bits < 65536; ++bits) {
            const float x = decode16(dtype, uint16_t(bits));
            if (std::isnan(x)) continue;
            EXPECT(encode16(dtype, x) == bits, "%s %04x decodes to %g, which encodes to %04x", dtype_name(dtype), bits, x,
                   encode16(dtype, x));
            EXPECT(std::isinf(x) || round_fast(dtype, x) == x, "%s: %g is not its own rounding", dtype_name(dtype), x);
        }
    for (uint32_t bits = 0; bits < 256; ++bits) {
        const float x = decode8(uint8_t(bits));
        if (!std::isnan(x))
            EXPECT(encode8(x) == bits && round_fast(FA_FLOAT8_E4M3, x) == x, "e4m3 %02x decodes to %g, which encodes to %02x", bits, x,
                   encode8(x));
    }
    EXPECT(decode8(0x7E) == 448 && encode8(1000) == 0x7E && encode8(0x1p-10) == 0 && encode8(0x1.8p-10) == 1,
           "the largest or the smallest values of e4m3 are wrong");
    EXPECT(round_to(FA_BFLOAT16, 1 + 0x1p-8) == 1 && round_to(FA_FLOAT16, 1 + 3 * 0x1p-11) == 1 + 0x1p-9, "ties do not go to even");
}

// ---- the header ----

inline void header_is_c(const Context&) {
    const size_t here[] = {LAYOUT_OF_THE_ABI};
    for (size_t i = 0; i < sizeof here / sizeof *here; ++i)
        EXPECT(c_layout(int(i)) == here[i], "entry %zu of the struct layout is %zu in C and %zu in C++", i, c_layout(int(i)), here[i]);
    float out[4] = {};
    const int status = c_calls_the_library(out);
    EXPECT(status == FA_OK && out[0] == 5 && out[3] == 8, "a call from C: status %d, out %g .. %g", status, out[0], out[3]);
}

inline void information(const Context&) {
    EXPECT(std::string(fa_version()) == format("%d.%d.%d", FA_VERSION_MAJOR, FA_VERSION_MINOR, FA_VERSION_PATCH), "fa_version() is %s",
           fa_version());
    EXPECT(*fa_build_info(), "fa_build_info() is empty");
    EXPECT(fa_last_error() != nullptr, "fa_last_error() is NULL");
    EXPECT(fa_cuda_device_count() >= 0, "fa_cuda_device_count() is %d", fa_cuda_device_count());
    for (int s = FA_OK; s <= FA_RANK_LOST; ++s)
        EXPECT(std::string(fa_status_name(fa_status(s))).rfind("FA_", 0) == 0, "status %d has no name", s);
    EXPECT(fa_status_name(fa_status(99)) != nullptr, "an unknown status has no text");
    const int32_t count = fa_kernel_count();
    for (int32_t i = 0; i < count; ++i) {
        EXPECT(fa_kernel_name(i) && *fa_kernel_name(i) && fa_kernel_summary(i) && *fa_kernel_summary(i),
               "kernel %d has no name or no summary", i);
        EXPECT(fa_kernel_device(i) == FA_CPU || fa_kernel_device(i) == FA_CUDA, "kernel %s runs on device %d", fa_kernel_name(i),
               fa_kernel_device(i));
    }
    EXPECT(!fa_kernel_name(count) && !fa_kernel_name(-1) && !fa_kernel_summary(count), "there is a kernel beyond the last");
}

// ---- struct_size ----

inline void struct_size(const Context& context) {
    Problem p = small(context);
    launch(p, nullptr);
    const std::vector<unsigned char> want = outputs(p);
    p.reset();
    struct Newer {  // what a later header might add
        fa_attention_args args;
        uint64_t later[4];
    } newer;
    std::memset(&newer, 0, sizeof newer);
    newer.args = p.args();
    const Workspace workspace(p.device, query(newer.args).workspace_bytes);
    workspace.attach(&newer.args);
    newer.args.struct_size = sizeof newer;
    newer.later[2] = 1;
    EXPECT(fa_attention_forward(&newer.args, nullptr) == FA_UNSUPPORTED, "a field this library does not know was accepted");
    wait(p.device);
    EXPECT(untouched(p), "a refused call wrote to its outputs");
    newer.later[2] = 0;
    expect_ok(fa_attention_forward(&newer.args, nullptr), "a newer header whose new fields are zero");
    wait(p.device);
    EXPECT(outputs(p) == want, "a newer struct_size changed the answer");
    for (const size_t bytes : {size_t(0), size_t(8), offsetof(fa_attention_args, workspace_bytes), size_t(1) << 40}) {
        fa_attention_args args = p.args();
        args.struct_size = bytes;
        EXPECT(fa_attention_forward(&args, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "struct_size"),
               "struct_size=%zu: %s", bytes, fa_last_error());
    }
}

// ---- nothing to do ----

inline void empty_calls(const Context& context) {
    Problem p = small(context);
    for (const bool no_batch : {true, false}) {
        fa_attention_args args = p.args();
        (no_batch ? args.q : args.out).data = nullptr;  // must not be looked at
        if (no_batch) args.batch = 0;
        else args.seqlen_q = 0;
        expect_ok(fa_attention_forward(&args, nullptr), no_batch ? "batch=0" : "seqlen_q=0");
    }
    wait(p.device);
    EXPECT(untouched(p), "a call without rows wrote to its outputs");
}

// ---- the query ----

inline void query_matches_launch(const Context& context) {
    for (const int32_t dtype : kAllDtypes) {
        Problem p = small(context, dtype);
        const fa_attention_plan plan = launch(p, nullptr);
        const std::vector<unsigned char> chosen = outputs(p);
        p.reset();
        launch(p, plan.kernel);
        EXPECT(outputs(p) == chosen, "the launch gave other bits than kernel %s, which the query names", plan.kernel);
        for (const std::string& name : kernels_of(p.device)) {
            if (name == plan.kernel) break;
            EXPECT(std::strstr(plan.why_not, (name + ": ").c_str()), "why_not has no line for %s: '%s'", name.c_str(), plan.why_not);
        }
        fa_attention_args bare = p.args();
        bare.q.data = bare.k.data = bare.v.data = bare.out.data = nullptr, bare.lse = nullptr;
        const fa_attention_plan without = query(bare);
        EXPECT(without.status == FA_OK && !std::strcmp(without.kernel, plan.kernel) && without.workspace_bytes == plan.workspace_bytes,
               "without data pointers the query says %s, kernel '%s', %zu bytes", fa_status_name(fa_status(without.status)), without.kernel,
               without.workspace_bytes);
    }
}

inline void workspace_is_exact(const Context& context) {
    int needed = 0;
    for (const std::string& name : context.kernels) {
        Problem p = small(context, name == "cpu_amx" ? FA_BFLOAT16 : FA_FLOAT32);
        fa_attention_args args = p.args();
        args.kernel = name.c_str();
        const fa_attention_plan plan = query(args);
        if (plan.status != FA_OK || plan.workspace_bytes == 0) continue;
        ++needed;
        const Workspace workspace(p.device, plan.workspace_bytes);
        workspace.attach(&args);
        args.workspace_bytes -= 1;
        for (int pass = 0; pass < 2; ++pass) {
            const fa_status status = fa_attention_forward(&args, nullptr);
            EXPECT(status == FA_WORKSPACE_TOO_SMALL && std::strstr(fa_last_error(), format("%zu", plan.workspace_bytes).c_str()),
                   "%s with %zu bytes: %s, '%s'", name.c_str(), args.workspace_bytes, fa_status_name(status), fa_last_error());
            args.workspace = nullptr, args.workspace_bytes = plan.workspace_bytes;  // second pass: no workspace at all
        }
        wait(p.device);
        EXPECT(untouched(p), "%s: a refused call wrote to its outputs", name.c_str());
        workspace.attach(&args);
        expect_ok(fa_attention_forward(&args, nullptr), "the exact workspace");
        wait(p.device);
        workspace.check();
    }
    if (needed == 0) throw Skip("no kernel tested here needs a workspace");
}

inline void environment_forces(const Context& context) {
    if (std::getenv("FLASH_ATTN_KERNEL")) throw Skip("FLASH_ATTN_KERNEL is set");
    const std::string last = context.device == FA_CUDA ? "naive" : "cpu_naive";  // serves every call, and is never the first choice
    struct Environment {
        explicit Environment(const char* value) { setenv("FLASH_ATTN_KERNEL", value, 1); }
        ~Environment() { unsetenv("FLASH_ATTN_KERNEL"); }
    };
    Problem p = small(context);
    {
        const Environment forced(last.c_str());
        EXPECT(launch(p, nullptr).kernel == last, "FLASH_ATTN_KERNEL=%s did not choose it", last.c_str());
    }
    const Environment wrong("no_such_kernel");
    EXPECT(query(p.args()).status == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "FLASH_ATTN_KERNEL=no_such_kernel"), "%s",
           fa_last_error());
    EXPECT(launch(p, last.c_str()).kernel == last, "the argument does not win over the environment");
}

// Only standard attention stores S. The kernel that the library chooses needs far less memory.
inline void workspace_is_small(const Context& context) {
    fa_attention_args args = small(context).args();
    args.q.data = args.k.data = args.v.data = args.out.data = nullptr, args.lse = nullptr;
    args.seqlen_q = args.seqlen_k = 1 << 16;
    const fa_attention_plan plan = query(args);
    const double score_bytes = 4.0 * args.batch * args.nheads * double(args.seqlen_q) * double(args.seqlen_k);
    EXPECT(plan.status == FA_OK && double(plan.workspace_bytes) < score_bytes / 256, "kernel %s wants %zu bytes, S has %.0f", plan.kernel,
           plan.workspace_bytes, score_bytes);
}

// ---- the same bits every time ----

inline void reproducible(const Context& context) {
    for (const std::string& name : context.kernels)
        for (const int32_t dtype : kAllDtypes) {
            Case c = shape(200, 333, 64, dtype);
            c.name = "reproducible", c.nheads = 4, c.causal = true, c.dropout_p = 0.2f, c.alibi = 1;
            Problem p(c, context.device, context.seed);
            p.num_threads = context.num_threads;
            fa_attention_args args = p.args();
            args.kernel = name.c_str();
            if (query(args).status == FA_UNSUPPORTED) continue;
            launch(p, args);
            const std::vector<unsigned char> first = outputs(p);
            for (int repetition = 1; repetition < 10; ++repetition) {
                p.reset();
                launch(p, args);
                EXPECT(outputs(p) == first, "%s, %s: repetition %d gave other bits", name.c_str(), dtype_name(dtype), repetition);
            }
        }
}

// Two threads that call at the same time do not affect each other.
inline void two_threads(const Context& context) {
    struct Caller {
        std::unique_ptr<Problem> problem;
        std::vector<unsigned char> want;
        std::string complaint;
    } callers[2];
    for (int i = 0; i < 2; ++i) {
        callers[i].problem = std::make_unique<Problem>(small(context, i == 0 ? FA_FLOAT32 : FA_FLOAT16));
        launch(*callers[i].problem, nullptr);
        callers[i].want = outputs(*callers[i].problem);
    }
    const auto work = [](Caller* caller) {
        try {
            for (int repetition = 0; repetition < 20; ++repetition) {
                caller->problem->reset();
                launch(*caller->problem, nullptr);
                EXPECT(outputs(*caller->problem) == caller->want, "repetition %d beside another thread gave other bits", repetition);
            }
        } catch (const std::exception& error) {
            caller->complaint = error.what();
        }
    };
    std::thread other(work, &callers[1]);
    work(&callers[0]);
    other.join();
    for (const Caller& caller : callers) EXPECT(caller.complaint.empty(), "%s", caller.complaint.c_str());
}

// ---- calls as data ----

// One prepared call with holes for the addresses of two problems of one shape: each gets the bits of its own plain call, on any thread.
inline void prepared_calls(const Context& context) {
    const auto problem = [&](uint64_t seed) {
        Context other = context;
        other.seed += seed;
        return std::make_unique<Problem>(small(other, FA_FLOAT32));
    };
    const std::unique_ptr<Problem> problems[] = {problem(0), problem(1)};
    std::vector<std::vector<unsigned char>> wanted;
    for (const auto& p : problems) launch(*p, nullptr), wanted.push_back(outputs(*p));
    EXPECT(wanted[0] != wanted[1], "two problems have the same result");

    const struct Image {
        fa_attention_args args;
        char kernel[32];
    } image = [&] {
        Image made{problems[0]->args(), {}};
        std::snprintf(made.kernel, sizeof made.kernel, "%s", query(made.args).kernel);
        return made;
    }();
    const auto at = [](size_t byte) { return int32_t(byte); };
    const fa_hole holes[] = {{at(offsetof(fa_attention_args, q.data)), 8, 0},
                             {at(offsetof(fa_attention_args, k.data)), 8, 1},
                             {at(offsetof(fa_attention_args, v.data)), 8, 2},
                             {at(offsetof(fa_attention_args, out.data)), 8, 3},
                             {at(offsetof(fa_attention_args, lse)), 8, 4},
                             {at(offsetof(fa_attention_args, workspace)), 8, 5},
                             {at(offsetof(fa_attention_args, workspace_bytes)), 8, 6},
                             {at(offsetof(fa_attention_args, kernel)), 8, -1 - at(offsetof(Image, kernel))}};
    const fa_call call = {FA_OP_ATTENTION_FORWARD, 0, &image, sizeof image, holes, 8, 7};
    for (int repetition = 0; repetition < 3; ++repetition)
        for (size_t i = 0; i < 2; ++i) {
            problems[i]->reset();
            const fa_attention_args own = problems[i]->args();
            uint64_t values[7];
            const void* const addresses[] = {own.q.data, own.k.data, own.v.data, own.out.data, own.lse, nullptr, nullptr};
            for (size_t n = 0; n < 7; ++n) values[n] = reinterpret_cast<uintptr_t>(addresses[n]);
            fa_attention_plan plan;
            plan.struct_size = sizeof plan;
            expect_ok(fa_query_call(&call, values, &plan), "fa_query_call");
            EXPECT(plan.workspace_bytes == query(own).workspace_bytes, "%zu bytes of workspace", plan.workspace_bytes);
            const Workspace workspace(context.device, plan.workspace_bytes);
            fa_attention_args told = own;
            workspace.attach(&told);
            values[5] = reinterpret_cast<uintptr_t>(told.workspace), values[6] = told.workspace_bytes;
            expect_ok(fa_run_call(&call, values, nullptr), "fa_run_call");
            wait(context.device, nullptr);
            workspace.check();
            EXPECT(outputs(*problems[i]) == wanted[i], "problem %zu, repetition %d: a prepared call gives other bits", i, repetition);
        }
    if (query(problems[0]->args()).workspace_bytes) {
        const uint64_t none[7] = {reinterpret_cast<uintptr_t>(image.args.q.data),
                                  reinterpret_cast<uintptr_t>(image.args.k.data),
                                  reinterpret_cast<uintptr_t>(image.args.v.data),
                                  reinterpret_cast<uintptr_t>(image.args.out.data),
                                  reinterpret_cast<uintptr_t>(image.args.lse),
                                  0,
                                  0};
        EXPECT(fa_run_call(&call, none, nullptr) == FA_WORKSPACE_TOO_SMALL, "a call without workspace is made");
    }
    EXPECT(fa_run_call(nullptr, nullptr, nullptr) == FA_BAD_ARGUMENT && fa_query_call(nullptr, nullptr, nullptr) == FA_BAD_ARGUMENT,
           "call is NULL");
    EXPECT(fa_run_call(&call, nullptr, nullptr) == FA_BAD_ARGUMENT, "values is NULL");

    const uint64_t values[1] = {0};
    const auto refuses = [&](const fa_hole& hole, size_t bytes, const char* text) {
        const fa_call made = {FA_OP_ATTENTION_FORWARD, 0, &image, bytes, &hole, 1, 1};
        const fa_status status = fa_run_call(&made, values, nullptr);
        EXPECT(status == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), text),
               "a hole of %d bytes at byte %d of %zu for value %d: status %d, \"%s\"", hole.bytes, hole.byte, bytes, hole.value, status,
               fa_last_error());
    };
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max(), kLeast = std::numeric_limits<int32_t>::min();
    const int32_t end = at(sizeof image);
    for (const fa_hole& wrong :
         {fa_hole{kMost, 8, 0}, fa_hole{kMost - 3, 4, 0}, fa_hole{kLeast, 8, 0}, fa_hole{-1, 4, 0}, fa_hole{end - 4, 8, 0},
          fa_hole{0, 2, 0}, fa_hole{0, 8, 1}, fa_hole{0, 8, kMost}, fa_hole{0, 8, kLeast}, fa_hole{0, 8, -1 - end}})
        refuses(wrong, sizeof image, "holes[0]");
    for (const size_t bytes : {size_t(4), sizeof(size_t), sizeof(fa_attention_args) - 8})
        refuses({bytes < 8 ? 0 : 4, 4, 0}, bytes, "image_bytes=");
}

// ---- 64-bit offsets ----

inline void far_apart(const Context& context) {
    Problem p = small(context, FA_BFLOAT16);
    constexpr int64_t kFar = (int64_t(1) << 31) + 4096;  // elements between the two batches
    const int64_t near_total = p.q.batch_stride + p.k.batch_stride + p.v.batch_stride + p.out.batch_stride;
    const size_t bytes = size_t(kFar + near_total) * 2;
    const Buffer memory = [&] {
        try {
            return Buffer(context.device, bytes);
        } catch (const Failure&) {
            throw Skip(format("cannot allocate %zu bytes of device memory", bytes));
        }
    }();
    int64_t begin = 0;
    const auto far = [&](const Tensor& t) {
        fa_tensor view = t.view();
        view.data = memory.as<uint16_t>() + begin;
        for (int64_t b = 0; b < 2; ++b)
            memory.copy(memory.as<uint16_t>() + begin + b * kFar, static_cast<uint16_t*>(t.view().data) + b * t.batch_stride,
                        size_t(t.batch_stride) * 2);
        view.batch_stride = kFar, begin += t.batch_stride;
        return view;
    };
    for (const std::string& name : context.kernels) {
        begin = 0, p.reset();
        fa_attention_args args = p.args();
        args.kernel = name.c_str();
        if (query(args).status == FA_UNSUPPORTED) continue;
        launch(p, args);
        const std::vector<unsigned char> want = outputs(p);
        p.reset();
        args.q = far(p.q), args.k = far(p.k), args.v = far(p.v), args.out = far(p.out);
        launch(p, args);
        for (int64_t b = 0; b < 2; ++b)
            memory.copy(static_cast<uint16_t*>(p.out.view().data) + b * p.out.batch_stride,
                        static_cast<uint16_t*>(args.out.data) + b * kFar, size_t(p.out.batch_stride) * 2);
        EXPECT(outputs(p) == want, "%s: batches %lld elements apart give another answer", name.c_str(), (long long)kFar);
    }
}

// ---- streams and graphs ----

#if FA_WITH_CUDA
inline void needs_cuda(const Context& context) {
    if (context.device != FA_CUDA) throw Skip("needs a GPU");
}

struct Stream {
    cudaStream_t stream = nullptr;
    Stream() { CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(stream); }
};

inline void two_streams(const Context& context) {
    needs_cuda(context);
    for (const std::string& name : context.kernels) {
        Case one = shape(333, 517, 64, FA_FLOAT32), other = shape(257, 400, 96, FA_BFLOAT16);
        one.name = "one stream", one.causal = true, other.name = "other stream";
        Problem problems[] = {Problem(one, FA_CUDA, context.seed), Problem(other, FA_CUDA, context.seed)};
        Stream streams[2];
        std::vector<Workspace> workspaces;
        fa_attention_args args[2];
        bool served = true;
        for (int i = 0; i < 2; ++i) {
            args[i] = problems[i].args(), args[i].kernel = name.c_str();
            const fa_attention_plan plan = query(args[i]);
            served = served && plan.status == FA_OK;
            workspaces.emplace_back(FA_CUDA, plan.workspace_bytes);
            workspaces.back().attach(&args[i]);
        }
        if (!served) continue;
        CUDA(cudaDeviceSynchronize());
        for (int repetition = 0; repetition < 20; ++repetition)
            for (int i = 0; i < 2; ++i) expect_ok(fa_attention_forward(&args[i], streams[i].stream), name.c_str());
        for (int i = 0; i < 2; ++i) {
            wait(FA_CUDA, streams[i].stream);
            const Verdict verdict = judge(problems[i], solve(problems[i]));
            EXPECT(verdict.complaint.empty(), "%s on stream %d: %s", name.c_str(), i, verdict.complaint.c_str());
        }
    }
}

inline void graph(const Context& context) {
    needs_cuda(context);
    for (const std::string& name : context.kernels) {
        Problem p = small(context, FA_BFLOAT16);
        fa_attention_args args = p.args();
        args.kernel = name.c_str();
        const fa_attention_plan plan = query(args);
        if (plan.status != FA_OK) continue;
        const Workspace workspace(FA_CUDA, plan.workspace_bytes);
        workspace.attach(&args);
        Stream s;
        CUDA(cudaDeviceSynchronize());
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t executable = nullptr;
        CUDA(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal));
        const fa_status status = fa_attention_forward(&args, s.stream);
        const std::string text = fa_last_error();
        CUDA(cudaStreamEndCapture(s.stream, &graph));
        EXPECT(status == FA_OK, "%s while capturing: %s", name.c_str(), text.c_str());
        EXPECT(untouched(p), "%s: capturing ran the kernel", name.c_str());
        CUDA(cudaGraphInstantiate(&executable, graph, 0));
        for (int replay = 0; replay < 3; ++replay) {
            Random random(context.seed + uint64_t(replay));
            p.q.fill(random, 1);  // other contents at the same addresses
            p.q.device.upload(p.q.host.data());
            p.reset();
            CUDA(cudaDeviceSynchronize());  // the uploads went to the default stream, for which this stream does not wait
            CUDA(cudaGraphLaunch(executable, s.stream));
            wait(FA_CUDA, s.stream);
            const Verdict verdict = judge(p, solve(p));
            EXPECT(verdict.complaint.empty(), "%s, replay %d: %s", name.c_str(), replay, verdict.complaint.c_str());
        }
        CUDA(cudaGraphExecDestroy(executable));
        CUDA(cudaGraphDestroy(graph));
    }
}

// The call runs on the device that owns q, whichever device is current.
inline void second_device(const Context& context) {
    needs_cuda(context);
    if (fa_cuda_device_count() < 2) throw Skip("needs two GPUs");
    CUDA(cudaSetDevice(1));
    std::string complaint;
    {
        Problem p = small(context);
        const Answer answer = solve(p);
        fa_attention_args args = p.args();
        const Workspace workspace(FA_CUDA, query(args).workspace_bytes);
        workspace.attach(&args);
        CUDA(cudaSetDevice(0));
        const fa_status status = fa_attention_forward(&args, nullptr);
        int current = -1;
        CUDA(cudaGetDevice(&current));
        CUDA(cudaSetDevice(1));
        wait(FA_CUDA);
        complaint = status != FA_OK ? fa_last_error() : current != 0 ? "the current device was changed" : judge(p, answer).complaint;
    }
    CUDA(cudaSetDevice(0));
    EXPECT(complaint.empty(), "%s", complaint.c_str());
}
#endif

}  // namespace api

inline std::vector<Test> api_tests() {
    std::vector<Test> all = {
        {"api/known_answers", api::known_answers},
        {"api/header_is_c", api::header_is_c},
        {"api/information", api::information},
        {"api/struct_size", api::struct_size},
        {"api/empty_calls", api::empty_calls},
        {"api/query/matches_launch", api::query_matches_launch},
        {"api/query/workspace_is_exact", api::workspace_is_exact},
        {"api/query/workspace_is_small", api::workspace_is_small},
        {"api/query/environment", api::environment_forces},
        {"api/reproducible", api::reproducible},
        {"api/two_threads", api::two_threads},
        {"api/distributed/ranks", api::distributed_ranks},
        {"api/threads/lists", api::lists_from_threads},
        {"api/threads/gradients", api::gradients_from_threads},
        {"api/processors/quotas", api::quotas_of_control_groups},
        {"api/prepared_calls", api::prepared_calls},
        {"api/merge/formula", api::merge_formula},
        {"api/merge/pieces", api::merge_pieces},
        {"api/merge/refuses", api::merge_refuses},
        {"api/offsets_above_2^31", api::far_apart},
        {"api/errors/belong_to_threads", api::errors_belong_to_threads},
        {"api/refuses/null", api::refuse_null},
        {"api/refuses/cu_seqlens", api::refuse_cu_seqlens},
        {"api/refuses/no_such_device", api::no_such_device},
    };
    for (const api::Refusal& refusal : api::refusals())
        all.push_back({std::string("api/refuses/") + refusal.name, [&refusal](const Context& context) { api::refuse(context, refusal); }});
#if FA_WITH_CUDA
    all.push_back({"cuda/two_streams", api::two_streams});
    all.push_back({"cuda/graph", api::graph});
    all.push_back({"cuda/second_device", api::second_device});
#endif
    return all;
}
