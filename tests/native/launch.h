// launch.h: one library call as a careful caller makes it, with exactly the workspace that the query asks for.
#pragma once

#include <functional>

#include "problem.h"

struct Context {
    fa_device device = FA_CPU;
    std::vector<std::string> kernels;  // the kernels to test, best first
    std::vector<std::string> backward_kernels;
    uint64_t seed = 1;
    int32_t num_threads = 0;
    bool quick = false;
};

struct Test {
    std::string name;
    std::function<void(const Context&)> run;
};

inline std::vector<std::string> kernels_of(fa_device device) {
    std::vector<std::string> names;
    for (int32_t i = 0; i < fa_kernel_count(); ++i)
        if (fa_kernel_device(i) == device) names.push_back(fa_kernel_name(i));
    return names;
}

inline std::vector<std::string> backward_kernels_of(fa_device device) {
    std::vector<std::string> names;
    for (int32_t i = 0; i < fa_backward_kernel_count(); ++i)
        if (fa_backward_kernel_device(i) == device) names.push_back(fa_backward_kernel_name(i));
    return names;
}

inline fa_attention_plan query(const fa_attention_args& args) {
    fa_attention_plan plan;
    std::memset(&plan, 0, sizeof plan);
    plan.struct_size = sizeof plan;
    const fa_status status = fa_attention_query(&args, &plan);
    EXPECT(status == plan.status, "fa_attention_query returned %s but plan.status is %d", fa_status_name(status), plan.status);
    return plan;
}

inline fa_attention_plan query(const fa_attention_backward_args& args) {
    fa_attention_plan plan;
    std::memset(&plan, 0, sizeof plan);
    plan.struct_size = sizeof plan;
    const fa_status status = fa_attention_backward_query(&args, &plan);
    EXPECT(status == plan.status, "fa_attention_backward_query returned %s but plan.status is %d", fa_status_name(status), plan.status);
    return plan;
}

// A workspace of exactly the given size, filled with NaN, at an odd address, between two guards.
class Workspace {
public:
    Workspace(fa_device device, size_t bytes) : bytes_(bytes), buffer_(device, bytes + 2 * kEdge) {
        std::vector<unsigned char> host(bytes + 2 * kEdge, 0xFF);
        buffer_.upload(host.data());
    }
    void attach(fa_attention_args* args) const { args->workspace = buffer_.as<unsigned char>() + kEdge, args->workspace_bytes = bytes_; }
    void check() const {
        const std::vector<unsigned char> host = buffer_.bytes();
        for (size_t i = 0; i < kEdge; ++i)
            EXPECT(host[i] == 0xFF && host[kEdge + bytes_ + i] == 0xFF, "memory beside the workspace of %zu bytes was written", bytes_);
    }

private:
    static constexpr size_t kEdge = 33;  // odd, because a workspace may have any alignment
    size_t bytes_;
    Buffer buffer_;
};

// Runs the problem and waits for it. Returns the plan that the query gave before.
inline fa_attention_plan launch(const Problem& p, fa_attention_args args, void* stream = nullptr) {
    const fa_attention_plan plan = query(args);
    EXPECT(plan.status == FA_OK, "query: %s, %s", fa_status_name(fa_status(plan.status)), fa_last_error());
    const Workspace workspace(p.device, plan.workspace_bytes);
    workspace.attach(&args);
    expect_ok(fa_attention_forward(&args, stream), "fa_attention_forward");
    wait(p.device, stream);
    workspace.check();
    return plan;
}
inline fa_attention_plan launch(const Problem& p, const char* kernel) {
    fa_attention_args args = p.args();
    args.kernel = kernel;
    return launch(p, args);
}

// Everything that a launch wrote, for bitwise comparison.
inline std::vector<unsigned char> outputs(const Problem& p) {
    std::vector<unsigned char> all = p.out.device.bytes();
    const std::vector<unsigned char> lse = p.lse_device.bytes();
    all.insert(all.end(), lse.begin(), lse.end());
    return all;
}

// The small problem of most tests that do not check numbers.
inline Problem small(const Context& context, int32_t dtype = FA_FLOAT32) {
    Case c = shape(33, 65, 40, dtype);
    c.name = "api", c.causal = true, c.nheads = 4;
    Problem p(c, context.device, context.seed);
    p.num_threads = context.num_threads;
    return p;
}

template <typename T>
T* moved(T* data, int64_t bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<intptr_t>(data) + bytes);
}
