// test_tvm_ffi.cpp: a C++ program that loads the module for tvm-ffi with tvm-ffi's own loader: test_tvm_ffi MODULE. The results must have
// the bits of the C ABI, and a refusal must reach the program as tvm-ffi's error with the name of the argument.
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/tvm_ffi.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "flash_attn.h"

namespace ffi = tvm::ffi;

struct Array {  // contiguous float32 on the CPU
    std::vector<int64_t> shape, strides;
    std::vector<float> values;
    DLTensor view;

    Array(std::vector<int64_t> extents, float step) : shape(std::move(extents)), strides(shape.size()) {
        int64_t size = 1;
        for (size_t i = shape.size(); i-- > 0; size *= shape[i]) strides[i] = size;
        values.resize(size_t(size));
        for (int64_t i = 0; i < size; ++i) values[size_t(i)] = float((i * 7919) % 101 - 50) * step;
        view = {values.data(), {kDLCPU, 0}, int32_t(shape.size()), {kDLFloat, 32, 1}, shape.data(), strides.data(), 0};
    }
    fa_tensor rows() { return {values.data(), strides[0], strides[1], strides[2]}; }
};

static int failures = 0;
static void expect(bool right, const char* what) {
    std::printf("%s: %s\n", right ? "ok" : "FAILED", what);
    failures += !right;
}

int main(int argc, char** argv) {
    if (argc != 2) return std::fprintf(stderr, "usage: test_tvm_ffi MODULE\n"), 2;
    const ffi::Module module = ffi::Module::LoadFromFile(argv[1]);
    const auto function = [&](const char* name) { return module->GetFunction(name).value(); };
    Array q({2, 9, 4, 32}, 0.01f), k({2, 11, 2, 32}, 0.02f), v({2, 11, 2, 32}, 0.03f), out({2, 9, 4, 32}, 1), lse({2, 4, 9}, 1);
    Array same_out({2, 9, 4, 32}, 2), same_lse({2, 4, 9}, 2);

    function("forward")("q k v out lse causal softmax_scale num_threads kernel", &q.view, &k.view, &v.view, &out.view, &lse.view, true,
                        0.25, 1, "cpu_portable");
    fa_attention_args args{};
    args.struct_size = sizeof args, args.device = FA_CPU, args.dtype = FA_FLOAT32;
    args.batch = 2, args.nheads = 4, args.nheads_k = 2, args.headdim = 32, args.seqlen_q = 9, args.seqlen_k = 11;
    args.q = q.rows(), args.k = k.rows(), args.v = v.rows(), args.out = same_out.rows(), args.lse = same_lse.values.data();
    args.causal = 1, args.softmax_scale = 0.25f, args.has_softmax_scale = 1, args.num_threads = 1, args.kernel = "cpu_portable";
    fa_attention_plan plan{};
    plan.struct_size = sizeof plan;
    fa_attention_query(&args, &plan);
    std::vector<char> workspace(plan.workspace_bytes);
    args.workspace = workspace.data(), args.workspace_bytes = workspace.size();
    expect(fa_attention_forward(&args, nullptr) == FA_OK, "the call through the C ABI");
    expect(out.values == same_out.values && lse.values == same_lse.values, "the bits of the C ABI");

    const auto bytes = function("forward_workspace")("q k v out lse causal num_threads kernel", &q.view, &k.view, &v.view, &out.view,
                                                     &lse.view, true, 1, "cpu_portable")
                           .cast<int64_t>();
    expect(bytes == int64_t(plan.workspace_bytes), "the workspace that the C ABI asks for");

    std::string text;
    try {
        Array wrong({2, 11, 2, 16}, 1);
        function("forward")("q k v out", &q.view, &wrong.view, &v.view, &out.view);
    } catch (const ffi::Error& error) {
        text = error.kind() + ": " + error.message();
    }
    expect(text == "ValueError: k has shape (2, 11, 2, 16): expected (batch=2, seqlen_k, nheads_k, headdim=32)", text.c_str());
    return failures != 0;
}
