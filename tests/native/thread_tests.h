// thread_tests.h: many threads call at once, each with several threads of the library, in single calls and in lists of calls. Also tests
// how many processors the library counts. The thread sanitizer runs these tests (docs/reliability.md).
#pragma once

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <thread>

#include "cpu/common/processors.h"
#include "flash_attn_transformer.h"
#include "launch.h"

namespace api {

// A step of a model, as a list of calls that read each other's results: rms_norm, linear with SwiGLU, a product with 4-bit weights,
// attention, its merge with itself, sampling. The sizes give every call work for three threads.
struct Step {
    static constexpr int32_t kRows = 48, kDim = 256, kWide = 512, kVocab = 4096, kHeads = 4;
    std::vector<float> x, norm, w, y, z, attended, lse, merged, merged_lse, logits;
    std::vector<unsigned char> codes, scales, packed, scratch;
    std::vector<int32_t> tokens;
    float tensor_scale = 0;
    fa_rms_norm_args rms{};
    fa_linear_args linear{};
    fa_w4_quantize_args quantize{};
    fa_w4_pack_args pack{};
    fa_w4_linear_args product{};
    fa_attention_args attention{};
    fa_merge_args merge{};
    fa_sample_args sample{};
    std::vector<fa_call> calls;

    Step(uint64_t seed, int32_t num_threads) {
        Random random(seed);
        const auto fill = [&](std::vector<float>& values, int64_t count, float size) {
            values.resize(size_t(count));
            for (float& value : values) value = size * float(random.normal());
        };
        fill(x, kRows * kDim, 1), fill(norm, kDim, 1), fill(w, 2 * kWide * kDim, 0.06f), fill(logits, 16 * kVocab, 1);
        y.resize(kRows * kDim), z.resize(kRows * kWide), attended.resize(z.size()), merged.resize(z.size());
        lse.resize(kRows * kHeads), merged_lse.resize(lse.size()), tokens.resize(16);
        codes.resize(kWide * kWide / 2), scales.resize(kWide * kWide / 16), packed.resize(1 << 20), scratch.resize(1 << 22);
        const auto matrix = [](std::vector<float>& values, int64_t columns) { return fa_matrix{values.data(), columns}; };

        rms.struct_size = sizeof rms, rms.device = FA_CPU, rms.dtype = FA_FLOAT32, rms.dim = kDim, rms.rows = kRows;
        rms.x = matrix(x, kDim), rms.out = matrix(y, kDim), rms.weight = norm.data(), rms.eps = 1e-5f, rms.num_threads = num_threads;

        linear.struct_size = sizeof linear, linear.device = FA_CPU, linear.dtype = FA_FLOAT32, linear.rows = kRows;
        linear.in_features = kDim, linear.out_features = 2 * kWide, linear.swiglu = 1, linear.num_threads = num_threads;
        linear.x = matrix(y, kDim), linear.weight = matrix(w, kDim), linear.out = matrix(z, kWide);

        const fa_w4_weight weight = {FA_NVFP4, kWide, kWide, 0, codes.data(), scales.data(), &tensor_scale};
        quantize.struct_size = sizeof quantize, quantize.device = FA_CPU, quantize.dtype = FA_FLOAT32, quantize.search = 1;
        quantize.w = matrix(w, kWide), quantize.out = weight, quantize.num_threads = num_threads;
        pack.struct_size = sizeof pack, pack.device = FA_CPU, pack.dtype = FA_BFLOAT16, pack.weight = weight;
        pack.num_threads = num_threads;
        pack.packed = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(packed.data()) + 127) / 128 * 128);
        expect_ok(fa_w4_packed_bytes(FA_NVFP4, kWide, kWide, 0, &pack.packed_bytes), "fa_w4_packed_bytes");
        EXPECT(size_t(pack.packed_bytes) + 128 <= packed.size(), "%lld bytes", static_cast<long long>(pack.packed_bytes));
        product.struct_size = sizeof product, product.device = FA_CPU, product.dtype = FA_FLOAT32, product.rows = kRows;
        product.in_features = product.out_features = kWide, product.num_threads = num_threads;
        product.packed = pack.packed, product.format = FA_NVFP4;
        product.compute_dtype = FA_BFLOAT16;
        product.x = matrix(z, kWide), product.out = matrix(attended, kWide);
        product.workspace = scratch.data(), product.workspace_bytes = scratch.size();

        attention.struct_size = sizeof attention, attention.device = FA_CPU, attention.dtype = FA_FLOAT32;
        attention.batch = 1, attention.nheads = attention.nheads_k = kHeads, attention.headdim = kWide / kHeads;
        attention.seqlen_q = attention.seqlen_k = kRows, attention.causal = 1, attention.num_threads = num_threads;
        attention.q = attention.k = attention.v = {attended.data(), 0, kWide, kWide / kHeads};
        attention.out = {z.data(), 0, kWide, kWide / kHeads}, attention.lse = lse.data();
        attention.workspace = scratch.data(), attention.workspace_bytes = scratch.size();

        merge.struct_size = sizeof merge, merge.device = FA_CPU, merge.dtype = FA_FLOAT32;
        merge.batch = 1, merge.nheads = kHeads, merge.headdim_v = kWide / kHeads, merge.seqlen = kRows;
        merge.out_a = merge.out_b = attention.out, merge.out = {merged.data(), 0, kWide, kWide / kHeads};
        merge.lse_a = merge.lse_b = lse.data(), merge.lse = merged_lse.data();

        sample.struct_size = sizeof sample, sample.device = FA_CPU, sample.dtype = FA_FLOAT32, sample.batch = 16, sample.vocab = kVocab;
        sample.logits = matrix(logits, kVocab), sample.out = tokens.data(), sample.temperature = 1, sample.top_k = 50;
        sample.top_p = 0.9f, sample.seed = seed, sample.num_threads = num_threads;

        const auto call = [](fa_operation operation, const void* args) { return fa_call{operation, 0, args, 0, nullptr, 0, 0}; };
        calls = {call(FA_OP_RMS_NORM, &rms),          call(FA_OP_LINEAR, &linear),     call(FA_OP_W4_QUANTIZE, &quantize),
                 call(FA_OP_W4_PACK, &pack),          call(FA_OP_W4_LINEAR, &product), call(FA_OP_ATTENTION_FORWARD, &attention),
                 call(FA_OP_ATTENTION_MERGE, &merge), call(FA_OP_SAMPLE, &sample)};
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    void run(bool as_list) {
        if (as_list) expect_ok(fa_run_calls(calls.data(), int32_t(calls.size()), nullptr, nullptr, nullptr), "fa_run_calls");
        else
            for (const fa_call& call : calls) expect_ok(fa_run_call(&call, nullptr, nullptr), "a call");
    }
    bool same(const Step& other) const {
        const auto equal = [](const auto& a, const auto& b) { return !std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]); };
        return equal(y, other.y) && equal(merged, other.merged) && equal(merged_lse, other.merged_lse) && equal(codes, other.codes) &&
               equal(scales, other.scales) && tokens == other.tokens;
    }
};

// Runs body(n) on threads 0 .. count - 1 at the same time.
template <typename Body>
void at_once(int count, const Body& body) {
    std::vector<std::string> failures(static_cast<size_t>(count));
    std::vector<std::thread> threads;
    for (int n = 0; n < count; ++n)
        threads.emplace_back([&, n] {
            try {
                body(n);
            } catch (const std::exception& failure) {
                failures[size_t(n)] = failure.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& failure : failures) EXPECT(failure.empty(), "%s", failure.c_str());
}

inline void lists_from_threads(const Context& context) {
    if (context.device != FA_CPU) throw Skip("the threads of the library are those of the CPU");
    at_once(4, [&](int n) {
        const auto seed = context.seed + uint64_t(n);
        Step alone(seed, 1), given(seed, 3), chosen(seed, 0);
        alone.run(false);
        for (int repetition = 0; repetition < 4; ++repetition) {
            given.run(repetition % 2 == 0);
            EXPECT(given.same(alone), "thread %d, repetition %d: three threads give other bits than one", n, repetition);
            chosen.run(repetition % 2 == 1);
            EXPECT(chosen.same(alone), "thread %d, repetition %d: as many threads as there are processors give other bits", n, repetition);
        }
    });
}

// The backward pass, whose threads wait for each other, and the forward pass with key_sums and max_score, which its threads write together.
inline void gradients_from_threads(const Context& context) {
    if (context.device != FA_CPU) throw Skip("the threads of the library are those of the CPU");
    constexpr int64_t kRows = 600, kHeads = 2, kDim = 32, kCount = kRows * kHeads * kDim;
    at_once(2, [&](int n) {
        Random random(context.seed + uint64_t(n));
        std::vector<float> q(kCount), k(kCount), v(kCount), out(kCount), lse(kRows * kHeads), score(kHeads), sums(kRows * kHeads);
        for (std::vector<float>* x : {&q, &k, &v})
            for (float& value : *x) value = float(random.normal());
        if (n == 1)
            for (float& value : q) value *= 1e4f;  // rows with a large lse
        std::vector<float> first;
        for (const int32_t threads : {1, 3, 4}) {
            std::vector<float> dq(kCount), dk(kCount), dv(kCount);
            fa_attention_args a{};
            a.struct_size = sizeof a, a.device = FA_CPU, a.dtype = FA_FLOAT32, a.num_threads = threads, a.causal = 1;
            a.batch = 1, a.nheads = a.nheads_k = kHeads, a.headdim = kDim, a.seqlen_q = a.seqlen_k = kRows;
            const auto tensor = [&](std::vector<float>& x) { return fa_tensor{x.data(), 0, kHeads * kDim, kDim}; };
            a.q = tensor(q), a.k = tensor(k), a.v = tensor(v), a.out = tensor(out), a.lse = lse.data();
            a.max_score = score.data(), a.key_sums = sums.data();
            std::vector<unsigned char> scratch(query(a).workspace_bytes);
            a.workspace = scratch.data(), a.workspace_bytes = scratch.size();
            expect_ok(fa_attention_forward(&a, nullptr), "fa_attention_forward");
            a.max_score = a.key_sums = nullptr;
            fa_attention_backward_args b{};
            b.struct_size = sizeof b, b.forward = &a, b.dout = tensor(v), b.dq = tensor(dq), b.dk = tensor(dk), b.dv = tensor(dv);
            scratch.resize(query(b).workspace_bytes);
            a.workspace = scratch.data(), a.workspace_bytes = scratch.size();
            expect_ok(fa_attention_backward(&b, nullptr), "fa_attention_backward");
            std::vector<float> all;
            for (const std::vector<float>* x : {&out, &lse, &score, &sums, &dq, &dk, &dv}) all.insert(all.end(), x->begin(), x->end());
            if (first.empty()) first = all;
            EXPECT(!std::memcmp(first.data(), all.data(), all.size() * sizeof(float)), "%d threads give other bits than one", threads);
        }
    });
}

// ---- processors ----

inline void quotas_of_control_groups(const Context&) {
    char name[] = "/tmp/flash_attn_groups_XXXXXX";
    EXPECT(mkdtemp(name), "no temporary folder");
    const std::string root = name, list = root + "/list";
    const auto write = [](const std::string& path, const char* text) { std::ofstream(path) << text; };
    for (const char* folder : {"/pod", "/pod/box", "/cpu", "/cpu/pod", "/unified"}) mkdir((root + folder).c_str(), 0700);
    const auto expect = [&](const char* groups, double want) {
        write(list, groups);
        const double found = fa::cpu::quota_of_process(list.c_str(), root);
        EXPECT(found == want, "'%s' is worth %g processors, want %g", groups, found, want);
    };
    expect("0::/pod/box\n", INFINITY);
    write(root + "/pod/box/cpu.max", "max 100000\n");
    expect("0::/pod/box\n", INFINITY);
    write(root + "/pod/cpu.max", "150000 100000\n");
    expect("0::/pod/box\n", 1.5);  // a group above has the quota
    write(root + "/pod/box/cpu.max", "50000 100000\n");
    expect("0::/pod/box\n", 0.5);
    expect("0::/elsewhere/pod\n", INFINITY);  // a name from outside the container
    expect("0::/\n", INFINITY);
    write(root + "/cpu.max", "300000 100000\n");
    expect("0::/elsewhere/pod\n", 3);
    write(root + "/cpu/pod/cpu.cfs_quota_us", "-1\n"), write(root + "/cpu/pod/cpu.cfs_period_us", "100000\n");
    expect("5:cpuset:/pod\n3:cpu,cpuacct:/pod\n", INFINITY);
    write(root + "/cpu/pod/cpu.cfs_quota_us", "250000\n");
    expect("5:cpuset:/pod\n3:cpu,cpuacct:/pod\n", 2.5);
    expect("5:cpuset:/pod\n3:cpuacct:/pod\n", INFINITY);
    expect("nonsense\n\n:\n", INFINITY);
    expect("0::pod\n", INFINITY);  // as the end of a line that is longer than any path
    EXPECT(fa::cpu::quota_of_process((root + "/none").c_str(), root) == INFINITY, "a list that is not there");
    const int here = fa::cpu::processors_of_process();
    EXPECT(here >= 1 && here <= int(std::max(1u, std::thread::hardware_concurrency())), "%d processors", here);
    for (const char* file : {"/list", "/cpu.max", "/pod/cpu.max", "/pod/box/cpu.max", "/cpu/pod/cpu.cfs_quota_us",
                             "/cpu/pod/cpu.cfs_period_us", "/pod/box", "/pod", "/cpu/pod", "/cpu", "/unified", ""})
        std::remove((root + file).c_str());
}

}  // namespace api
