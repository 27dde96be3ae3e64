// refusal_tests.h: makes one argument invalid at a time. The refusal must have the right status, name the argument, quote the value and
// leave the outputs alone. The query must give the same answer.
#pragma once

#include <functional>
#include <thread>

#include "launch.h"

namespace api {

struct Refusal {
    const char* name;
    std::function<void(fa_attention_args&)> spoil;
    fa_status status;
    const char* text;       // must be part of fa_last_error()
    bool query_too = true;  // the query, which reads no pointers, refuses the call too
};

inline const std::vector<Refusal>& refusals() {
    using A = fa_attention_args;
    constexpr fa_status kBad = FA_BAD_ARGUMENT, kNot = FA_UNSUPPORTED;
    static float odd[4];
    static const std::vector<Refusal> all = {
        {"device", [](A& a) { a.device = 3; }, kBad, "device=3"},
        {"dtype", [](A& a) { a.dtype = 9; }, kBad, "dtype=9"},
        {"dtype/zero", [](A& a) { a.dtype = 0; }, kBad, "dtype=0"},
        {"dtype/fp8", [](A& a) { a.dtype = FA_FLOAT8_E4M3; }, kBad, "q_descale.data is NULL", false},
        {"out_dtype/fp8", [](A& a) { a.dtype = FA_FLOAT8_E4M3, a.out_dtype = FA_FLOAT32; }, kNot, "out_dtype=float32"},
        {"k_descale", [](A& a) { a.k_descale.data = odd; }, kBad, "k_descale.data is set"},
        {"fast_accum", [](A& a) { a.fast_accum = 2; }, kBad, "fast_accum=2"},
        {"fast_accum/dtype", [](A& a) { a.fast_accum = 1; }, kBad, "fast_accum=1"},
        {"out_dtype", [](A& a) { a.out_dtype = -1; }, kBad, "out_dtype=-1"},
        {"out_dtype/other", [](A& a) { a.out_dtype = FA_BFLOAT16; }, kNot, "out_dtype=bfloat16"},
        {"batch", [](A& a) { a.batch = -1; }, kBad, "batch=-1"},
        {"nheads", [](A& a) { a.nheads = 0; }, kBad, "nheads=0"},
        {"nheads_k", [](A& a) { a.nheads_k = 0; }, kBad, "nheads_k=0"},
        {"nheads/multiple", [](A& a) { a.nheads = 6, a.nheads_k = 4; }, kBad, "nheads=6 is not a multiple of nheads_k=4"},
        {"headdim/zero", [](A& a) { a.headdim = 0; }, kBad, "headdim=0"},
        {"headdim/513", [](A& a) { a.headdim = 513; }, kBad, "headdim=513"},
        {"headdim_v/negative", [](A& a) { a.headdim_v = -1; }, kBad, "headdim_v=-1"},
        {"headdim_v/513", [](A& a) { a.headdim_v = 513; }, kBad, "headdim_v=513"},
        {"seqlen_q", [](A& a) { a.seqlen_q = -1; }, kBad, "seqlen_q=-1"},
        {"seqlen_k", [](A& a) { a.seqlen_k = -2; }, kBad, "seqlen_k=-2"},
        {"seqlen_q/huge", [](A& a) { a.seqlen_q = int64_t(1) << 40; }, kNot, "seqlen_q=1099511627776"},
        {"seqlen_k/huge", [](A& a) { a.seqlen_k = int64_t(1) << 40; }, kNot, "seqlen_k=1099511627776"},
        {"q/null", [](A& a) { a.q.data = nullptr; }, kBad, "q.data is NULL", false},
        {"k/null", [](A& a) { a.k.data = nullptr; }, kBad, "k.data is NULL", false},
        {"v/null", [](A& a) { a.v.data = nullptr; }, kBad, "v.data is NULL", false},
        {"out/null", [](A& a) { a.out.data = nullptr; }, kBad, "out.data is NULL", false},
        {"q/misaligned", [](A& a) { a.q.data = moved(a.q.data, 1); }, kBad, "q.data="},
        {"k/misaligned", [](A& a) { a.k.data = moved(a.k.data, 2); }, kBad, "k.data="},
        {"v/misaligned", [](A& a) { a.v.data = moved(a.v.data, 3); }, kBad, "v.data="},
        {"out/misaligned", [](A& a) { a.out.data = moved(a.out.data, 1); }, kBad, "out.data="},
        {"lse/misaligned", [](A& a) { a.lse = moved(a.lse, 2); }, kBad, "lse"},
        {"out/batch_stride", [](A& a) { a.out.batch_stride = 0; }, kBad, "out.batch_stride=0"},
        {"out/row_stride", [](A& a) { a.out.row_stride = 0; }, kBad, "out.row_stride=0"},
        {"out/head_stride", [](A& a) { a.out.head_stride = 0; }, kBad, "out.head_stride=0"},
        {"out/overlaps_itself", [](A& a) { a.out.row_stride = 1; }, kBad, "out.row_stride=1 with", false},
        {"out/overlaps_q", [](A& a) { a.out.data = moved(a.q.data, 8); }, kBad, "overlaps q.data=", false},
        {"out/overlaps_k", [](A& a) { a.out.data = moved(a.k.data, 8); }, kBad, "overlaps k.data=", false},
        {"out/overlaps_v", [](A& a) { a.out.data = moved(a.v.data, 8); }, kBad, "overlaps v.data=", false},
        {"lse/overlaps_q", [](A& a) { a.lse = static_cast<float*>(a.q.data); }, kBad, "lse.data=", false},
        {"lse/overlaps_v", [](A& a) { a.lse = static_cast<float*>(moved(a.v.data, 4)); }, kBad, "overlaps v.data=", false},
        {"lse/overlaps_out", [](A& a) { a.lse = static_cast<float*>(a.out.data); }, kBad, "overlaps out.data=", false},
        {"max_score/overlaps_k", [](A& a) { a.max_score = static_cast<float*>(a.k.data); }, kBad, "overlaps k.data=", false},
        {"key_sums/overlaps_out", [](A& a) { a.key_sums = static_cast<float*>(a.out.data); }, kBad, "overlaps out.data=", false},
        {"key_sums/overlaps_max_score", [](A& a) { a.max_score = a.key_sums = a.lse, a.lse = nullptr; }, kBad,
         "overlaps max_score.data=", false},
        {"out/overlaps_bias", [](A& a) { a.bias.data = a.out.data; }, kBad, "overlaps bias.data=", false},
        {"out/overlaps_mask", [](A& a) { a.mask.data = a.out.data; }, kBad, "overlaps mask.data=", false},
        {"out/overlaps_sinks", [](A& a) { a.sinks = static_cast<float*>(a.out.data); }, kBad, "overlaps sinks.data=", false},
        {"out/overlaps_alibi_slopes", [](A& a) { a.alibi_slopes = static_cast<float*>(a.out.data); }, kBad,
         "overlaps alibi_slopes.data=", false},
        {"rows", [](A& a) { a.batch = a.nheads = a.nheads_k = 1 << 30; }, kNot, "batch=1073741824 x nheads=1073741824 x seqlen_q="},
        {"rows/keys", [](A& a) { a.batch = 1 << 20, a.seqlen_q = 1, a.seqlen_k = 1 << 30; }, kNot, "seqlen_k=1073741824 is above 2^42"},
        {"softcap/tiny", [](A& a) { a.softcap = 1e-40f; }, kBad, "is below 1.17549e-38"},
        {"cu_seqlens_k/missing", [](A& a) { a.cu_seqlens_q = reinterpret_cast<const int32_t*>(odd); }, kBad, "cu_seqlens_k is NULL"},
        {"cu_seqlens_q/missing", [](A& a) { a.cu_seqlens_k = reinterpret_cast<const int32_t*>(odd); }, kBad, "cu_seqlens_q is NULL"},
        {"total_q/dense", [](A& a) { a.total_q = 5; }, kBad, "total_q=5"},
        {"total_k/dense", [](A& a) { a.total_k = 5; }, kBad, "total_k=5"},
        {"softmax_scale/nan", [](A& a) { a.has_softmax_scale = 1, a.softmax_scale = NAN; }, kBad, "softmax_scale=nan"},
        {"softmax_scale/infinite", [](A& a) { a.has_softmax_scale = 1, a.softmax_scale = INFINITY; }, kBad, "softmax_scale=inf"},
        {"softmax_scale/unannounced", [](A& a) { a.softmax_scale = 0.5f; }, kBad, "has_softmax_scale is 0"},
        {"has_softmax_scale", [](A& a) { a.has_softmax_scale = 2; }, kBad, "has_softmax_scale=2"},
        {"softcap/negative", [](A& a) { a.softcap = -1; }, kBad, "softcap=-1"},
        {"softcap/nan", [](A& a) { a.softcap = NAN; }, kBad, "softcap=nan"},
        {"alibi_slopes/misaligned", [](A& a) { a.alibi_slopes = moved(odd, 1); }, kBad, "alibi_slopes"},
        {"sinks/misaligned", [](A& a) { a.sinks = moved(odd, 2); }, kBad, "sinks"},
        {"bias/misaligned", [](A& a) { a.bias.data = moved(odd, 1); }, kBad, "bias"},
        {"bias_dtype", [](A& a) { a.bias.data = odd, a.bias_dtype = FA_FLOAT16; }, kBad, "bias_dtype=float16"},
        {"causal", [](A& a) { a.causal = 2; }, kBad, "causal=2"},
        {"top_left", [](A& a) { a.top_left = -1; }, kBad, "top_left=-1"},
        {"has_window", [](A& a) { a.has_window = 7; }, kBad, "has_window=7"},
        {"deterministic", [](A& a) { a.deterministic = 2; }, kBad, "deterministic=2"},
        {"allow_tf32", [](A& a) { a.allow_tf32 = 2; }, kBad, "allow_tf32=2"},
        {"window_left", [](A& a) { a.has_window = 1, a.window_left = -2; }, kBad, "window_left=-2"},
        {"window_right", [](A& a) { a.has_window = 1, a.window_right = -3; }, kBad, "window_right=-3"},
        {"window/unannounced", [](A& a) { a.window_left = 4; }, kBad, "has_window is 0"},
        {"dropout_p/negative", [](A& a) { a.dropout_p = -0.25f; }, kBad, "dropout_p=-0.25"},
        {"dropout_p/one", [](A& a) { a.dropout_p = 1; }, kBad, "dropout_p=1"},
        {"dropout_p/nan", [](A& a) { a.dropout_p = NAN; }, kBad, "dropout_p=nan"},
        {"num_threads/negative", [](A& a) { a.num_threads = -1; }, kBad, "num_threads=-1"},
        {"num_threads/huge", [](A& a) { a.num_threads = 1 << 20; }, kBad, "num_threads=1048576"},
        {"attention_chunk", [](A& a) { a.attention_chunk = -1; }, kBad, "attention_chunk=-1"},
        {"startend_row_indices/heads",
         [](A& a) { a.nheads = a.nheads_k = 2, a.startend_row_indices = {reinterpret_cast<const int32_t*>(8), 0, 0, 2, 3, 2}; }, kBad,
         "startend_row_indices.heads=3"},
        {"startend_row_indices/numbers", [](A& a) { a.startend_row_indices = {reinterpret_cast<const int32_t*>(8), 0, 0, 3, 1, 3}; }, kBad,
         "startend_row_indices.numbers=3"},
        {"startend_row_indices/full",
         [](A& a) { a.causal = 0, a.startend_row_indices = {reinterpret_cast<const int32_t*>(8), 0, 0, 1, 1, 1}; }, kBad,
         "startend_row_indices.numbers=1 without causal"},
        {"startend_row_indices/causal",
         [](A& a) { a.causal = 1, a.startend_row_indices = {reinterpret_cast<const int32_t*>(8), 0, 0, 4, 1, 4}; }, kBad,
         "startend_row_indices.numbers=4 with causal"},
        {"startend_row_indices/misaligned",
         [](A& a) { a.startend_row_indices = {reinterpret_cast<const int32_t*>(moved(odd, 1)), 0, 0, 2, 1, 2}; }, kBad,
         "startend_row_indices"},
        {"block_mask/heads",
         [](A& a) { a.nheads = a.nheads_k = 2, a.block_mask = {reinterpret_cast<const void*>(8), 0, 0, 1, 3, 64, 64, 0}; }, kBad,
         "block_mask.heads=3"},
        {"block_mask/row_block", [](A& a) { a.block_mask = {reinterpret_cast<const void*>(8), 0, 0, 1, 1, 96, 64, 0}; }, kBad,
         "block_mask.row_block=96"},
        {"block_mask/key_block", [](A& a) { a.block_mask = {reinterpret_cast<const void*>(8), 0, 0, 1, 1, 64, 0, 0}; }, kBad,
         "block_mask.key_block=0"},
        {"block_mask/reserved", [](A& a) { a.block_mask = {reinterpret_cast<const void*>(8), 0, 0, 1, 1, 64, 64, 1}; }, kBad,
         "block_mask.reserved=1"},
        {"parts/dense", [](A& a) { a.parts = reinterpret_cast<const fa_part*>(odd); }, kBad, "cu_seqlens_q is NULL: only a varlen call"},
        {"first_head", [](A& a) { a.first_head = -1; }, kBad, "first_head=-1"},
        {"kernel/unknown", [](A& a) { a.kernel = "no_such_kernel"; }, kBad, "no_such_kernel"},
        {"kernel/other_device",
         [](A& a) {
             const auto others = kernels_of(a.device == FA_CPU ? FA_CUDA : FA_CPU);
             static std::string name;
             if (others.empty()) throw Skip("this build has kernels of one device only");
             name = others.front(), a.kernel = name.c_str();
         },
         kNot, "device is"},
    };
    return all;
}

inline void refuse(const Context& context, const Refusal& refusal) {
    Problem p = small(context);
    fa_attention_args args = p.args();
    const Workspace workspace(p.device, query(args).workspace_bytes);
    workspace.attach(&args);
    refusal.spoil(args);
    const fa_status status = fa_attention_forward(&args, nullptr);
    const std::string text = fa_last_error();
    EXPECT(status == refusal.status, "status is %s (%s), want %s", fa_status_name(status), text.c_str(), fa_status_name(refusal.status));
    EXPECT(text.find(refusal.text) != std::string::npos, "the text is '%s', without '%s'", text.c_str(), refusal.text);
    wait(p.device);
    EXPECT(untouched(p), "a refused call wrote to its outputs");
    if (!refusal.query_too) return;
    const fa_attention_plan plan = query(args);
    EXPECT(plan.status == refusal.status && text == fa_last_error(), "the query says %s, '%s'", fa_status_name(fa_status(plan.status)),
           fa_last_error());
    EXPECT(!*plan.kernel && plan.workspace_bytes == 0, "the query names kernel '%s' for a call that cannot run", plan.kernel);
}

inline void refuse_null(const Context&) {
    EXPECT(fa_attention_forward(nullptr, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "NULL"), "args=NULL: %s",
           fa_last_error());
    EXPECT(fa_attention_merge(nullptr, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "NULL"), "args=NULL: %s",
           fa_last_error());
    fa_attention_plan plan;
    std::memset(&plan, 0, sizeof plan);
    plan.struct_size = sizeof plan;
    EXPECT(fa_attention_query(nullptr, &plan) == FA_BAD_ARGUMENT, "args=NULL: %s", fa_last_error());
    fa_attention_args args;
    std::memset(&args, 0, sizeof args);
    args.struct_size = sizeof args;
    EXPECT(fa_attention_query(&args, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "plan"), "plan=NULL: %s", fa_last_error());
    plan.struct_size = 16;
    EXPECT(fa_attention_query(&args, &plan) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "plan.struct_size"),
           "plan.struct_size=16: %s", fa_last_error());
}

// cu_seqlens in host memory can be read before the launch, so invalid ones are refused.
inline void refuse_cu_seqlens(const Context& context) {
    if (context.device != FA_CPU) throw Skip("cu_seqlens in device memory cannot be read before the launch");
    Case c = shape(0, 0, 16, FA_FLOAT32);
    c.name = "cu_seqlens", c.lengths_q = {4, 5}, c.lengths_k = {6, 7}, c.batch = 2, c.seqlen_q = 5, c.seqlen_k = 7;
    const Problem p(c, context.device, context.seed);
    const auto refused = [&](std::vector<int32_t> cu_q, std::vector<int32_t> cu_k, const char* text) {
        fa_attention_args args = p.args();
        const Workspace workspace(p.device, query(args).workspace_bytes);
        workspace.attach(&args);
        args.cu_seqlens_q = cu_q.data(), args.cu_seqlens_k = cu_k.data();
        const fa_status status = fa_attention_forward(&args, nullptr);
        EXPECT(status == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), text), "%s: %s, without '%s'", fa_status_name(status),
               fa_last_error(), text);
        EXPECT(untouched(p), "a refused call wrote to its outputs");
    };
    refused({1, 4, 9}, {0, 6, 13}, "cu_seqlens_q[0]=1");
    refused({0, 4, 3}, {0, 6, 13}, "cu_seqlens_q[2]=3 is below cu_seqlens_q[1]=4");
    refused({0, 4, 9}, {0, 6, 5}, "cu_seqlens_k[2]=5");
    refused({0, 3, 9}, {0, 6, 13}, "more than seqlen_q=5");
    refused({0, 4, 9}, {0, 5, 13}, "more than seqlen_k=7");
    fa_attention_args args = p.args();
    args.total_k = 12;
    EXPECT(fa_attention_forward(&args, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "cu_seqlens_k[2]=13"), "%s",
           fa_last_error());
    args = p.args();
    args.total_q = -1;
    EXPECT(fa_attention_forward(&args, nullptr) == FA_BAD_ARGUMENT && std::strstr(fa_last_error(), "total_q=-1"), "%s", fa_last_error());
}

inline void no_such_device(const Context& context) {
    if (fa_cuda_device_count() > 0) throw Skip("this machine has a GPU");
    Problem p = small(context);
    fa_attention_args args = p.args();
    args.device = FA_CUDA;
    const fa_status status = fa_attention_forward(&args, nullptr);
    EXPECT(status == (FA_WITH_CUDA ? FA_CUDA_ERROR : FA_UNSUPPORTED) && std::strstr(fa_last_error(), "device=FA_CUDA"), "%s: %s",
           fa_status_name(status), fa_last_error());
    EXPECT(untouched(p), "a refused call wrote to its outputs");
}

inline void errors_belong_to_threads(const Context& context) {
    Problem p = small(context);
    fa_attention_args args = p.args();
    args.headdim = 777;
    EXPECT(fa_attention_forward(&args, nullptr) == FA_BAD_ARGUMENT, "headdim=777 was accepted");
    std::string elsewhere;
    std::thread([&] {
        fa_attention_args other = args;
        other.batch = -555;
        if (fa_attention_forward(&other, nullptr) == FA_BAD_ARGUMENT) elsewhere = fa_last_error();
    }).join();
    EXPECT(elsewhere.find("-555") != std::string::npos, "the other thread's text is '%s'", elsewhere.c_str());
    EXPECT(std::strstr(fa_last_error(), "777"), "another thread's error replaced this one's: '%s'", fa_last_error());
}

}  // namespace api
