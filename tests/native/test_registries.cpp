// test_registries.cpp: asks every query of the C ABI about thousands of random calls, on devices that need not be there: the CPU, and GPUs
// of five architectures. It is linked with the library's own object files, and with the stand-in below instead of api/common/device.cpp.
// It checks what holds for every answer; with --print it writes all answers, so that those of two commits can be compared.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "api/common/device.h"
#include "attention/forward/wgmma_sm90/plan.h"
#include "flash_attn.h"
#include "flash_attn_transformer.h"

namespace {
fa::DeviceInfo here{-1, 0, 0, 0};
}

namespace fa {
fa_status find_device(fa_device device, const void*, DeviceInfo* info, const char*) {
    *info = device == FA_CPU ? DeviceInfo{-1, 0, 0, 0} : here;
    return FA_OK;
}
CurrentDevice::CurrentDevice(int) {}
CurrentDevice::~CurrentDevice() {}
int cuda_device_count() { return 0; }
}  // namespace fa

namespace {

struct Place {
    const char* name;
    fa_device device;
    fa::DeviceInfo info;
};
constexpr size_t kKilobyte = 1024;
constexpr Place kPlaces[] = {
    {"cpu", FA_CPU, {-1, 0, 0, 0}},
    {"sm_75", FA_CUDA, {0, 75, 40, 64 * kKilobyte}},
    {"sm_80", FA_CUDA, {0, 80, 108, 163 * kKilobyte}},
    {"sm_86", FA_CUDA, {0, 86, 84, 99 * kKilobyte}},
    {"sm_90", FA_CUDA, {0, 90, 132, 227 * kKilobyte}},
    {"sm_100", FA_CUDA, {0, 100, 148, 227 * kKilobyte}},
};

bool printing = false;
int failures = 0;

[[gnu::format(printf, 1, 2)]] void complain(const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    std::printf("\n");
    ++failures;
}

class Random {
public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    int below(int n) { return int(next() % uint64_t(n)); }
    bool one_in(int n) { return below(n) == 0; }
    template <typename T, size_t kCount>
    T of(const T (&values)[kCount]) {
        return values[below(int(kCount))];
    }

private:
    uint64_t state_;
};

// Addresses that are never read. Arrays are far apart; some do not start at a multiple of 16 bytes.
void* address(Random& random, int array, int element) {
    const uintptr_t odd = random.one_in(12) ? uintptr_t(element) * uintptr_t(1 + random.below(3)) : 0;
    return reinterpret_cast<void*>((uintptr_t(array) + 1) * (uintptr_t(1) << 42) + odd);
}

int element_of(int32_t dtype) { return dtype == FA_FLOAT32 ? 4 : dtype == FA_FLOAT8_E4M3 || dtype == FA_INT8 ? 1 : 2; }

fa_tensor tensor(Random& random, int array, int32_t dtype, bool has_address, int64_t rows, int64_t heads, int64_t columns, bool output) {
    fa_tensor t{};
    t.data = has_address ? address(random, array, element_of(dtype)) : nullptr;
    const int64_t padded = random.one_in(10) ? columns + 1 + random.below(8) : columns;
    t.head_stride = padded, t.row_stride = padded * heads, t.batch_stride = t.row_stride * (rows ? rows : 1);
    if (random.one_in(14)) t.row_stride = padded, t.head_stride = padded * (rows ? rows : 1);  // heads before rows
    if (!output && random.one_in(20)) t.batch_stride = 0;
    if (!output && random.one_in(25)) t.row_stride = -t.row_stride;
    return t;
}

constexpr int32_t kHeadDims[] = {1, 8, 33, 40, 64, 64, 64, 72, 80, 96, 128, 128, 128, 128, 160, 176, 192, 256, 256, 264, 320, 384, 512};
constexpr int32_t kBatches[] = {0, 1, 1, 2, 3, 4, 8, 16, 64, 300, 70000};
constexpr int64_t kFewRows[] = {0, 1, 1, 1, 1, 2, 3, 4, 8, 12, 16, 17, 32, 64};
constexpr int64_t kManyRows[] = {1, 7, 63, 128, 200, 512, 777, 1024, 2048, 4096, 8192, 16384, 65536, 1 << 20, 1 << 30};
constexpr int64_t kKeys[] = {0, 1, 15, 64, 128, 200, 512, 1000, 1024, 2048, 4096, 8192, 16384, 100000, 1 << 20, 1 << 30};

// Options of a call; one in two calls has none.
void put_options(Random& random, fa_attention_args& a, bool of_cache) {
    const bool any = random.one_in(2);
    const auto with = [&](int n) { return any && random.one_in(n); };
    a.causal = random.one_in(2);
    a.top_left = with(5);
    if (with(4))
        a.has_window = 1, a.window_left = random.below(3) * 128 - (random.one_in(3) ? 1 : 0), a.window_right = random.below(40) - 1;
    if (a.has_window && a.window_left < -1) a.window_left = -1;
    if (with(6)) a.softcap = 30;
    if (with(6)) a.alibi_slopes = static_cast<float*>(address(random, 10, 4));
    if (with(6)) a.sinks = static_cast<float*>(address(random, 11, 4));
    if (with(8)) a.has_softmax_scale = 1, a.softmax_scale = random.one_in(2) ? -0.5f : 0.25f;
    if (with(10)) a.attention_chunk = 256;
    if (of_cache) return;
    if (with(6)) a.bias.data = address(random, 12, 4), a.bias.row_stride = a.seqlen_k;
    if (with(6)) a.mask.data = address(random, 13, 4), a.mask.row_stride = a.seqlen_k;
    if (with(6)) a.dropout_p = 0.1f;
    if (random.one_in(12)) a.max_score = static_cast<float*>(address(random, 14, 4));
    if (random.one_in(12)) a.key_sums = static_cast<float*>(address(random, 15, 4));
    if (with(4)) a.lse = static_cast<float*>(address(random, 16, 4));
}

fa_attention_args attention(Random& random, fa_device device, bool of_cache) {
    fa_attention_args a;
    std::memset(&a, 0, sizeof a);
    a.struct_size = sizeof a, a.device = device, a.num_threads = 4;
    constexpr int32_t kDtypes[] = {FA_FLOAT16, FA_FLOAT16, FA_BFLOAT16, FA_BFLOAT16, FA_FLOAT32, FA_FLOAT8_E4M3};
    a.dtype = random.of(kDtypes);
    if (of_cache && a.dtype == FA_FLOAT8_E4M3) a.dtype = FA_FLOAT16;
    const bool fp8 = a.dtype == FA_FLOAT8_E4M3;
    a.batch = random.of(kBatches);
    constexpr int32_t kHeads[] = {1, 2, 4, 8, 16, 32}, kGroups[] = {1, 1, 1, 2, 3, 4, 8, 16};
    a.nheads_k = random.of(kHeads), a.nheads = a.nheads_k * random.of(kGroups);
    a.headdim = random.of(kHeadDims);
    if (random.one_in(6)) a.headdim_v = random.of(kHeadDims);
    if (random.one_in(20)) a.headdim = 192, a.headdim_v = 128;
    if (of_cache && random.one_in(8)) a.headdim = 576, a.headdim_v = 512;
    a.seqlen_q = of_cache || random.one_in(3) ? random.of(kFewRows) : random.of(kManyRows);
    a.seqlen_k = random.of(kKeys);
    if (!of_cache && random.one_in(4)) a.seqlen_k = a.seqlen_q;
    if (!of_cache && random.one_in(5)) {
        a.cu_seqlens_q = static_cast<int32_t*>(address(random, 17, 4));
        if (random.one_in(4)) a.parts = static_cast<fa_part*>(address(random, 18, 4));
        else a.cu_seqlens_k = static_cast<int32_t*>(address(random, 18, 4));
        const int64_t whole = (int64_t(1) << 31) - 8192 - a.batch;
        a.total_q = a.seqlen_q * a.batch < whole ? a.seqlen_q * a.batch : whole;
        a.total_k = random.one_in(10) ? 0 : a.seqlen_k * a.batch < whole ? a.seqlen_k * a.batch : whole;
    }
    const bool named = random.one_in(2);
    const int32_t headdim_v = a.headdim_v ? a.headdim_v : a.headdim;
    const int64_t rows_q = a.cu_seqlens_q ? a.total_q : a.seqlen_q, rows_k = a.cu_seqlens_q ? a.total_k : a.seqlen_k;
    a.q = tensor(random, 0, a.dtype, named, rows_q, a.nheads, a.headdim, false);
    a.k = tensor(random, 1, a.dtype, named, rows_k, a.nheads_k, a.headdim, false);
    a.v = tensor(random, 2, a.dtype, named, rows_k, a.nheads_k, headdim_v, false);
    a.out = tensor(random, 3, fp8 ? FA_BFLOAT16 : a.dtype, named, rows_q, a.nheads, headdim_v, true);
    if (fp8) {
        a.q_descale.data = a.k_descale.data = a.v_descale.data = static_cast<float*>(address(random, 19, 4));
        a.fast_accum = random.one_in(2);
    }
    if (a.dtype == FA_FLOAT32) a.allow_tf32 = random.one_in(2);
    put_options(random, a, of_cache);
    if (a.parts) a.top_left = 0, a.attention_chunk = 0, a.key_sums = nullptr;
    return a;
}

struct Backward {
    fa_attention_args forward;
    fa_attention_backward_args args;
};
void draw_backward(Random& random, fa_device device, Backward* b) {
    fa_attention_args& f = b->forward = attention(random, device, false);
    if (f.dtype == FA_FLOAT8_E4M3) {
        f.dtype = FA_BFLOAT16, f.fast_accum = 0;
        f.q_descale = f.k_descale = f.v_descale = {};
    }
    f.lse = static_cast<float*>(address(random, 16, 4));
    f.deterministic = random.one_in(3);
    std::memset(&b->args, 0, sizeof b->args);
    fa_attention_backward_args& a = b->args;
    a.struct_size = sizeof a;
    const bool named = f.q.data;
    const int32_t headdim_v = f.headdim_v ? f.headdim_v : f.headdim;
    const int64_t rows_q = f.cu_seqlens_q ? f.total_q : f.seqlen_q, rows_k = f.cu_seqlens_q ? f.total_k : f.seqlen_k;
    a.dout = tensor(random, 20, f.dtype, named, rows_q, f.nheads, headdim_v, false);
    a.dq = tensor(random, 21, f.dtype, named, rows_q, f.nheads, f.headdim, true);
    a.dk = tensor(random, 22, f.dtype, named, rows_k, f.nheads_k, f.headdim, true);
    a.dv = tensor(random, 23, f.dtype, named, rows_k, f.nheads_k, headdim_v, true);
    if (f.bias.data && random.one_in(2)) a.dbias.data = static_cast<float*>(address(random, 24, 4)), a.dbias.row_stride = f.seqlen_k;
    if (f.sinks && random.one_in(2)) a.dsinks = static_cast<float*>(address(random, 25, 4));
    if (random.one_in(4)) a.dlse = static_cast<float*>(address(random, 26, 4));
}

struct Cached {
    fa_attention_args forward;
    fa_kvcache_args args;
};
void draw_cached(Random& random, fa_device device, Cached* c) {
    fa_attention_args& f = c->forward = attention(random, device, true);
    std::memset(&c->args, 0, sizeof c->args);
    fa_kvcache_args& a = c->args;
    a.struct_size = sizeof a;
    const bool named = f.q.data;
    const int32_t headdim_v = f.headdim_v ? f.headdim_v : f.headdim;
    a.cache_batch = f.batch;
    int64_t rows = f.seqlen_k;
    if (random.one_in(4)) a.cache_dtype = random.one_in(2) ? FA_INT8 : FA_FLOAT8_E4M3;
    if (random.one_in(3)) {
        constexpr int32_t kPages[] = {1, 8, 12, 16, 64, 100, 256};
        a.page_size = random.of(kPages), a.cache_batch = 4096;
        a.block_table = static_cast<int32_t*>(address(random, 30, 4));
        f.seqlen_k = f.seqlen_k / a.page_size * a.page_size, a.block_table_stride = f.seqlen_k / a.page_size;
        rows = a.page_size;
    } else if (random.one_in(8)) {
        a.cache_batch_idx = static_cast<int32_t*>(address(random, 31, 4));
    }
    const int32_t dtype = a.cache_dtype ? a.cache_dtype : f.dtype;
    f.k = tensor(random, 1, dtype, named, rows, f.nheads_k, f.headdim, true);
    f.v = tensor(random, 2, dtype, named, rows, f.nheads_k, headdim_v, true);
    if (a.cache_dtype) {
        a.k_scale.data = static_cast<float*>(address(random, 32, 4)), a.v_scale.data = static_cast<float*>(address(random, 33, 4));
        a.k_scale.head_stride = a.v_scale.head_stride = 1;
        if (random.one_in(3)) {
            a.k_scale.row_stride = a.v_scale.row_stride = f.nheads_k;
            a.k_scale.batch_stride = a.v_scale.batch_stride = rows * f.nheads_k;
        }
    }
    if (!random.one_in(4)) a.cache_seqlens = static_cast<int32_t*>(address(random, 34, 4));
    if (random.one_in(8)) a.cache_leftpad = static_cast<int32_t*>(address(random, 35, 4));
    constexpr int32_t kNew[] = {0, 0, 1, 1, 2, 5};
    a.seqlen_new = random.of(kNew);
    if (a.seqlen_new > f.seqlen_k) a.seqlen_new = 0;
    if (a.seqlen_new) {
        a.k_new = tensor(random, 36, f.dtype, named, a.seqlen_new, f.nheads_k, f.headdim, false);
        a.v_new = tensor(random, 37, f.dtype, named, a.seqlen_new, f.nheads_k, headdim_v, false);
    }
    if (random.one_in(6)) {
        a.rotary_cos = address(random, 38, 4), a.rotary_sin = address(random, 39, 4);
        a.rotary_rows = 1 << 21, a.rotary_dim = f.headdim / 2 * 2 < 2 ? 0 : 2;
        if (!a.rotary_dim) a.rotary_cos = a.rotary_sin = nullptr, a.rotary_rows = 0;
    }
    if (random.one_in(6)) a.batch_invariant = 1;
    constexpr int32_t kSplits[] = {1, 2, 3, 4, 8, 16, 100};
    if (random.one_in(6)) a.num_splits = random.of(kSplits);
    a.programmatic = random.one_in(3);
    a.shared_prefix = a.page_size && !a.batch_invariant && random.one_in(2);
    if (random.one_in(10)) {
        a.tree_keys = 5, a.tree_mask = reinterpret_cast<uint64_t*>(address(random, 40, 8)), a.tree_row_stride = 1;
        f.causal = f.has_window = 0, f.window_left = f.window_right = 0, f.attention_chunk = 0, f.alibi_slopes = nullptr;
        a.rotary_cos = a.rotary_sin = nullptr, a.rotary_rows = a.rotary_dim = 0;
    }
}
// The pointers of a drawn call point into its own struct, which stays where it is.
void draw(Random& random, fa_device device, Backward* b) { draw_backward(random, device, b), b->args.forward = &b->forward; }
void draw(Random& random, fa_device device, Cached* c) { draw_cached(random, device, c), c->args.attention = &c->forward; }
struct Forward {
    fa_attention_args args;
};
void draw(Random& random, fa_device device, Forward* f) { f->args = attention(random, device, false); }

fa_matrix matrix(Random& random, int array, int32_t dtype, int64_t columns) {
    return {address(random, array, element_of(dtype)), random.one_in(10) ? columns + 1 + random.below(8) : columns};
}
constexpr int64_t kProductRows[] = {0, 1, 1, 1, 1, 2, 3, 4, 7, 8, 9, 16, 17, 24, 32, 33, 64, 128, 500, 4096};
constexpr int32_t kFeatures[] = {8, 100, 128, 512, 1024, 2048, 4096, 6144, 11008, 14336, 28672, 100000};
constexpr int32_t kTypes[] = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16, FA_BFLOAT16};

struct Linear {
    fa_linear_args args;
};
void draw(Random& random, fa_device device, Linear* l) {
    fa_linear_args& a = l->args;
    std::memset(&a, 0, sizeof a);
    a.struct_size = sizeof a, a.device = device, a.dtype = random.of(kTypes), a.num_threads = 4;
    if (random.one_in(4)) a.weight_dtype = random.of(kTypes);
    a.rows = random.of(kProductRows), a.in_features = random.of(kFeatures), a.out_features = random.of(kFeatures);
    a.swiglu = random.one_in(3), a.programmatic = random.one_in(2);
    const int32_t columns = a.swiglu ? a.out_features / 2 : a.out_features;
    a.x = matrix(random, 0, a.dtype, a.in_features), a.weight = matrix(random, 1, a.weight_dtype ? a.weight_dtype : a.dtype, a.in_features);
    a.out = matrix(random, 3, a.dtype, columns);
    if (random.one_in(3)) a.residual = matrix(random, 2, a.dtype, columns);
    if (random.one_in(3)) a.bias = address(random, 4, 4);
    if (random.one_in(2)) a.norm_weight = address(random, 5, 4), a.eps = 1e-5f;
}

struct W4 {
    fa_w4_linear_args args;
};
void draw(Random& random, fa_device device, W4* w) {
    fa_w4_linear_args& a = w->args;
    std::memset(&a, 0, sizeof a);
    a.struct_size = sizeof a, a.device = device, a.dtype = random.of(kTypes), a.num_threads = 4;
    a.compute_dtype = random.one_in(2) ? FA_FLOAT16 : FA_BFLOAT16, a.format = 1 + random.below(3);
    a.rows = random.of(kProductRows), a.in_features = random.of(kFeatures), a.out_features = random.of(kFeatures);
    a.swiglu = random.one_in(3), a.programmatic = random.one_in(2);
    const int32_t columns = a.swiglu ? a.out_features / 2 : a.out_features;
    a.x = matrix(random, 0, a.dtype, a.in_features), a.out = matrix(random, 3, a.dtype, columns);
    if (random.one_in(3)) a.residual = matrix(random, 2, a.dtype, columns);
    if (random.one_in(3)) a.bias = address(random, 4, 4);
    if (random.one_in(2)) a.norm_weight = address(random, 5, 4), a.eps = 1e-5f;
    if (device == FA_CUDA) a.packed = reinterpret_cast<void*>(uintptr_t(7) << 42);
}

struct Chain {
    W4 products[8];
    fa_w4_linear_args list[8];
    fa_w4_linear_chain_args args;
};
void draw(Random& random, fa_device device, Chain* c) {
    std::memset(&c->args, 0, sizeof c->args);
    c->args.struct_size = sizeof c->args, c->args.count = 1 + random.below(8);
    const int64_t rows = random.of(kProductRows);
    const bool same = !random.one_in(6);
    for (int i = 0; i < c->args.count; ++i) {
        draw(random, device, &c->products[i]);
        fa_w4_linear_args& a = c->list[i] = c->products[i].args;
        if (!same) continue;
        a.rows = rows;
        if (i) a.dtype = c->list[0].dtype, a.compute_dtype = c->list[0].compute_dtype, a.format = c->list[0].format;
    }
    c->args.products = c->list;
}

struct Table {
    int32_t (*count)();
    const char* (*name)(int32_t);
    int32_t (*device)(int32_t);
};
constexpr Table kForward = {fa_kernel_count, fa_kernel_name, fa_kernel_device};
constexpr Table kBackward = {fa_backward_kernel_count, fa_backward_kernel_name, fa_backward_kernel_device};
constexpr Table kW4 = {fa_linear_kernel_count, fa_linear_kernel_name, fa_linear_kernel_device};
constexpr Table kChain = {fa_chain_kernel_count, fa_chain_kernel_name, fa_chain_kernel_device};
constexpr Table kLinear = {fa_dense_linear_kernel_count, fa_dense_linear_kernel_name, fa_dense_linear_kernel_device};

void force(Forward& call, const char* kernel) { call.args.kernel = kernel; }
void force(Backward& call, const char* kernel) { call.forward.kernel = kernel; }
void force(Cached& call, const char* kernel) { call.forward.kernel = kernel; }
void force(Linear& call, const char* kernel) { call.args.kernel = kernel; }
void force(W4& call, const char* kernel) { call.args.kernel = kernel; }
void force(Chain& call, const char* kernel) { call.args.kernel = kernel; }

// One call on every place: what the query answers by itself, and about each kernel.
template <typename Call, typename Args>
void walk(const char* kind, int count, const Table& table, fa_status (*query)(const Args*, fa_attention_plan*)) {
    const auto ask = [&](const Call& call) {
        fa_attention_plan plan;
        std::memset(&plan, 0, sizeof plan);
        plan.struct_size = sizeof plan;
        query(&call.args, &plan);
        return plan;
    };
    int served = 0;
    for (int i = 0; i < count; ++i)
        for (const Place& place : kPlaces) {
            here = place.info;
            Random random{uint64_t(i) * 1000003 + std::strlen(kind) + uint64_t(kind[0])};
            Call call;
            draw(random, place.device, &call);
            const fa_attention_plan plan = ask(call);
            const std::string error = plan.status == FA_OK ? "" : fa_last_error(), why = plan.why_not;
            if (printing)
                std::printf("%s %d %s: %d %s %zu %s\n", kind, i, place.name, plan.status, plan.kernel, plan.workspace_bytes, error.c_str());
            if (printing && !why.empty()) std::printf("%s\n", why.c_str());
            served += plan.status == FA_OK;
            bool any = false;
            for (int32_t k = 0; k < table.count(); ++k) {
                if (table.device(k) != place.device || plan.status == FA_BAD_ARGUMENT) continue;
                force(call, table.name(k));
                const fa_attention_plan forced = ask(call);
                force(call, nullptr);
                const char* const text = forced.status == FA_OK ? "" : fa_last_error();
                if (printing) std::printf("  %s: %d %zu %s\n", table.name(k), forced.status, forced.workspace_bytes, text);
                any = any || forced.status == FA_OK;
                const bool chosen = !std::strcmp(plan.kernel, table.name(k));
                if (chosen && (forced.status != FA_OK || forced.workspace_bytes != plan.workspace_bytes))
                    complain("%s %d on %s: %s is chosen, but by its name: %s, %zu bytes instead of %zu", kind, i, place.name, plan.kernel,
                             forced.status == FA_OK ? "served" : text, forced.workspace_bytes, plan.workspace_bytes);
                if (forced.status != FA_OK && !*text) complain("%s %d on %s: %s gives no reason", kind, i, place.name, table.name(k));
            }
            if (error.find("; fp8") != std::string::npos && error.find("takes float8_e4m3 only") != std::string::npos)
                complain("%s %d on %s: %s, but other kernels are closer", kind, i, place.name, error.c_str());
            if (plan.status == FA_UNSUPPORTED && any && error.find("no kernel of this build") == 0)
                complain("%s %d on %s: %s, but a kernel serves the call by its name", kind, i, place.name, error.c_str());
        }
    if (!printing) std::printf("%-10s %d of %d calls served\n", kind, served, count * int(sizeof kPlaces / sizeof kPlaces[0]));
}

// wgmma_sm90 serves every call with max_score, so the plan of each must give it.
void plans_give_max_score() {
    static float somewhere;
    for (const int headdim : {64, 96, 128, 192, 256})
        for (const int keys : {1, 512, 1024, 2000, 4096, 8192, 65536})
            for (const int rows : {1, 128, 4096, 65536})
                for (const int right : {-1, 0})
                    for (const float softcap : {0.0f, 30.0f}) {
                        fa::AttentionParams p{};
                        p.batch = 1, p.nheads = p.nheads_k = 16, p.group = 1, p.headdim = p.headdim_v = headdim;
                        p.seqlen_q = rows, p.seqlen_k = keys, p.scale = 1, p.softcap = softcap;
                        p.window_left = -1, p.window_right = right, p.max_score = &somewhere;
                        if (!fa::wgmma_plan(fa::wgmma_choose(p, 132)).gives_max_score())
                            complain("headdim=%d, seqlen_q=%d, seqlen_k=%d, window_right=%d, softcap=%g: the plan gives no max_score",
                                     headdim, rows, keys, right, double(softcap));
                    }
}

// Few queries with a bias: a window beyond all keys chooses as a narrower one does that is still wider than the keys.
void wide_windows() {
    for (const Place& place : kPlaces)
        for (const int32_t dtype : {FA_BFLOAT16, FA_FLOAT32})
            for (const int64_t rows : {2, 16, 32, 64})
                for (const int64_t keys : {4096, 16384, 65536}) {
                    here = place.info;
                    std::string kernel;
                    for (const int64_t left : {int64_t(1) << 20, int64_t(INT32_MAX), int64_t(1) << 40}) {
                        fa_attention_args a;
                        std::memset(&a, 0, sizeof a);
                        a.struct_size = sizeof a, a.device = place.device, a.dtype = dtype, a.num_threads = 1;
                        a.batch = 1, a.nheads = a.nheads_k = 8, a.headdim = 128, a.seqlen_q = rows, a.seqlen_k = keys;
                        const int64_t row = 8 * 128;
                        a.q = a.out = {nullptr, rows * row, row, 128}, a.k = a.v = {nullptr, keys * row, row, 128};
                        a.bias.data = reinterpret_cast<const void*>(uintptr_t(1) << 42), a.bias.row_stride = keys;
                        a.has_window = 1, a.window_left = left, a.window_right = -1;
                        fa_attention_plan plan;
                        std::memset(&plan, 0, sizeof plan);
                        plan.struct_size = sizeof plan;
                        fa_attention_query(&a, &plan);
                        if (kernel.empty()) kernel = plan.kernel;
                        if (kernel != plan.kernel)
                            complain("%s: %d queries, %d keys, window_left=%lld: %s, not %s", place.name, int(rows), int(keys),
                                     static_cast<long long>(left), plan.kernel, kernel.c_str());
                    }
                }
}

// Packed sequences whose longest is said to be far longer than all together: a kernel whose grid has blocks for the longest in each of them
// must not be preferred.
void packed_far_below_the_longest() {
    here = kPlaces[4].info;
    const struct {
        int32_t batch;
        int64_t longest, total;
    } kCalls[] = {{4, int64_t(1) << 30, 128}, {256, 1 << 24, 8192}, {64, 1 << 27, 2048}, {256, 8192, 8192}};
    static int32_t lengths[257];
    for (const auto& call : kCalls) {
        fa_attention_args a;
        std::memset(&a, 0, sizeof a);
        a.struct_size = sizeof a, a.device = FA_CUDA, a.dtype = FA_BFLOAT16, a.num_threads = 1, a.causal = 1;
        a.batch = call.batch, a.nheads = a.nheads_k = 32, a.headdim = 64, a.seqlen_q = a.seqlen_k = call.longest;
        a.total_q = a.total_k = call.total, a.cu_seqlens_q = a.cu_seqlens_k = lengths;
        a.q = a.k = a.v = a.out = {nullptr, 0, 32 * 64, 64};
        a.has_window = 1, a.window_left = 64;
        fa_attention_plan plan;
        std::memset(&plan, 0, sizeof plan);
        plan.struct_size = sizeof plan;
        a.kernel = "wgmma_sm90";
        if (fa_attention_query(&a, &plan) != FA_OK) return;  // a build without it
        a.kernel = nullptr;
        const fa_status status = fa_attention_query(&a, &plan);
        if (status != FA_OK || std::strcmp(plan.kernel, "wgmma_sm90"))
            complain("packed, %d sequences of at most %lld rows, %lld in all: %s", int(call.batch), static_cast<long long>(call.longest),
                     static_cast<long long>(call.total), status == FA_OK ? plan.kernel : fa_last_error());
    }
}

// With batch_invariant the kernel does not depend on whether a key is appended in the call.
void appended_or_not() {
    here = kPlaces[4].info;
    for (const int32_t dtype : {FA_BFLOAT16, FA_FLOAT32})
        for (const int32_t headdim : {32, 64, 128, 256})
            for (const int32_t heads : {1, 4, 8, 32})
                for (const int32_t group : {1, 2, 4, 8}) {
                    std::string kernel;
                    for (const int32_t added : {0, 1}) {
                        fa_attention_args a;
                        std::memset(&a, 0, sizeof a);
                        a.struct_size = sizeof a, a.device = FA_CUDA, a.dtype = dtype, a.num_threads = 1;
                        a.batch = 2, a.nheads_k = heads, a.nheads = heads * group, a.headdim = headdim, a.seqlen_q = 1, a.seqlen_k = 4096;
                        const auto view = [&](int64_t rows, int64_t n) {
                            return fa_tensor{nullptr, rows * n * headdim, n * headdim, headdim};
                        };
                        a.q = a.out = view(1, a.nheads), a.k = a.v = view(a.seqlen_k, heads);
                        fa_kvcache_args c;
                        std::memset(&c, 0, sizeof c);
                        c.struct_size = sizeof c, c.attention = &a, c.cache_batch = a.batch, c.batch_invariant = 1, c.seqlen_new = added;
                        if (added) c.k_new = c.v_new = view(1, heads);
                        fa_attention_plan plan;
                        std::memset(&plan, 0, sizeof plan);
                        plan.struct_size = sizeof plan;
                        if (fa_kvcache_query(&c, &plan) != FA_OK) return;  // a build without kernels of a GPU
                        if (kernel.empty()) kernel = plan.kernel;
                        if (kernel != plan.kernel)
                            complain("batch_invariant, headdim=%d, %d x %d heads: %s, with a key appended %s", headdim, heads, group,
                                     kernel.c_str(), plan.kernel);
                    }
                }
}

// Tiles of mma_float32_sm80 may have 16 rows above head dim 256, however few columns V has: 17 rows of 2^31 - 65536 heads take too many.
void blocks_of_wide_float32() {
    here = kPlaces[4].info;
    for (const int32_t headdim : {256, 512}) {
        fa_attention_args a;
        std::memset(&a, 0, sizeof a);
        a.struct_size = sizeof a, a.device = FA_CUDA, a.dtype = FA_FLOAT32, a.num_threads = 1, a.kernel = "mma_float32_sm80";
        a.batch = 65536, a.nheads = a.nheads_k = 32767, a.headdim = headdim, a.headdim_v = 4, a.seqlen_q = 17, a.seqlen_k = 8;
        a.out = {nullptr, int64_t(17) * 32767 * 4, 32767 * 4, 4};
        fa_attention_plan plan;
        std::memset(&plan, 0, sizeof plan);
        plan.struct_size = sizeof plan;
        fa_attention_query(&a, &plan);
        if (plan.status == FA_BAD_ARGUMENT) return;  // this build lacks the kernel
        if ((plan.status == FA_OK) != (headdim == 256))
            complain("mma_float32_sm80, headdim=%d: %s", headdim, plan.status == FA_OK ? "served" : fa_last_error());
    }
}

// A left edge, softcap, ALiBi, masks of keys, dropout and 16-bit biases have plans of their own; bare calls and all other options do not
// take them.
void plans_by_options() {
    static float floats[1];
    const auto expect = [](const fa::AttentionParams& p, const char* what, bool options, bool general) {
        const fa::WgmmaPlan plan = fa::wgmma_plan(fa::wgmma_choose(p, 132));
        if (plan.options != options || plan.general != general)
            complain("headdim=%d, %s: %s", p.headdim, what,
                     plan.options   ? "a plan with options"
                     : plan.general ? "a general plan"
                                    : "a bare plan");
    };
    for (const int headdim : {64, 96, 128, 192, 256}) {
        fa::AttentionParams bare{};
        bare.batch = 1, bare.nheads = bare.nheads_k = 16, bare.group = 1, bare.headdim = bare.headdim_v = headdim;
        bare.seqlen_q = bare.seqlen_k = 4096, bare.scale = 1, bare.window_left = bare.window_right = -1;
        expect(bare, "bare", false, false);
        fa::AttentionParams p = bare;
        p.window_left = 8;
        expect(p, "window", true, false);
        p.max_score = floats;
        expect(p, "window and max_score", false, true);
        p = bare, p.alibi_slopes = floats;
        expect(p, "ALiBi", true, false);
        p.scale = -1;
        expect(p, "ALiBi and a scale below zero", false, true);
        p = bare, p.softcap = 30;
        expect(p, "softcap", true, false);
        p.softcap = 1e-7f;
        expect(p, "softcap too small to divide by", false, true);
        p.softcap = 30;
        p.dropout_threshold = 1;
        expect(p, "softcap and dropout", true, false);
        p.softcap = 0;
        expect(p, "dropout", true, false);
        p = bare, p.mask.data = floats;
        expect(p, "mask of keys", true, false);
        p.mask.row = 4096;
        expect(p, "mask of pairs", true, false);
        p.dropout_threshold = 1;
        expect(p, "mask of pairs and dropout", true, false);
        p.dropout_threshold = 0, p.softcap = 30, p.alibi_slopes = floats;
        expect(p, "mask of pairs, softcap and ALiBi", true, false);
        p.dropout_threshold = 1;
        expect(p, "mask of pairs, softcap, ALiBi and dropout", false, true);
        p = bare, p.dtype = p.bias_dtype = fa::DType::kBFloat16, p.bias.data = reinterpret_cast<const void*>(uintptr_t(4096)),
        p.bias.row = 4096;
        expect(p, "bias", true, false);
        p.window_left = 8, p.mask.data = floats, p.scale = -1;
        expect(p, "bias, window, mask of keys and a scale below zero", true, false);
        p.dropout_threshold = 9;
        expect(p, "the same with dropout", true, false);
        p.dropout_threshold = 0;
        p.bias.row = 4097;
        expect(p, "bias with rows that the copy engine cannot address", true, false);
        p.seqlen_q = p.seqlen_k = 90;
        expect(p, "such a bias in a short call", false, true);
        p.seqlen_q = p.seqlen_k = 4096;
        p.bias.row = 4096, p.bias_dtype = fa::DType::kFloat32;
        expect(p, "bias of float32", true, false);
        p.dropout_threshold = 9;
        expect(p, "bias of float32 and dropout", true, false);
        p.dropout_threshold = 0;
        p.bias_dtype = p.dtype, p.alibi_slopes = floats;
        expect(p, "bias, ALiBi and a scale below zero", false, true);
        p.scale = 1;
        expect(p, "bias and ALiBi", true, false);
        p.softcap = 30;
        expect(p, "bias, ALiBi and softcap", true, false);
        p.dropout_threshold = 9;
        expect(p, "the same with dropout", false, true);
    }
}

// Masks by blocks and masks of pairs have plans of their own, which take windows and sinks beside them.
void plans_for_blocks() {
    static uint8_t bytes[1];
    static float floats[1];
    const auto expect = [](const fa::AttentionParams& p, const char* what, bool serves) {
        const fa::WgmmaPlan plan = fa::wgmma_plan(fa::wgmma_choose(p, 132));
        const bool whole = plan.block_m() % fa::kSeenBlock == 0 && plan.block_n % fa::kSeenBlock == 0 && !plan.ping_pong;
        if (plan.blocks != serves || fa::wgmma_blocks_serve(p) != serves || (serves && !whole))
            complain("headdim=%d, %s: %s", p.headdim, what, plan.blocks ? "a plan for blocks" : "no plan for blocks");
    };
    for (const int headdim : {8, 64, 96, 128, 192, 256}) {
        fa::AttentionParams bare{};
        bare.batch = 1, bare.nheads = bare.nheads_k = 16, bare.group = 1, bare.headdim = bare.headdim_v = headdim;
        bare.seqlen_q = bare.seqlen_k = 4096, bare.scale = 1, bare.window_left = bare.window_right = -1;
        expect(bare, "bare", false);
        fa::AttentionParams p = bare;
        p.mask.data = bytes;
        expect(p, "mask of keys", false);
        p.mask.row = 4096;
        expect(p, "mask of pairs", true);
        p.seqlen_q = 1;
        expect(p, "mask of one row", false);
        p.blocks.data = bytes, p.blocks.heads_of_entry = 16, p.blocks.row_shift = p.blocks.key_shift = 6;
        expect(p, "mask of one row and block_mask", true);
        p = bare, p.blocks = {bytes, 0, 0, 32, 16, 7, 7};
        expect(p, "block_mask", true);
        p.blocks.key_shift = 6;
        expect(p, "block_mask of 64 keys", true);
        const int block_n = headdim <= 128 ? 64 : fa::wgmma_plan(fa::WgmmaPlanId::kD256Blocks).block_n;
        if (fa::wgmma_plan(fa::wgmma_choose(p, 132)).block_n != block_n) complain("headdim=%d: tiles are not of 64 keys", headdim);
        p.window_left = 100, p.window_right = 0, p.sinks = floats;
        expect(p, "block_mask, window and sinks", true);
        p.mask.data = bytes;
        expect(p, "block_mask and mask of keys", true);
        const int32_t lengths[] = {0, 4096};
        p.cu_seqlens_q = p.cu_seqlens_k = lengths, p.total_q = p.total_k = 4096;
        expect(p, "block_mask and mask in packed sequences", false);
        p.mask.data = nullptr;
        expect(p, "block_mask in packed sequences", true);
        const fa::AttentionParams blocks = p;
        p.softcap = 30;
        expect(p, "block_mask and softcap", false);
        p = blocks, p.alibi_slopes = floats;
        expect(p, "block_mask and ALiBi", false);
        p = blocks, p.bias.data = floats;
        expect(p, "block_mask and bias", false);
        p = blocks, p.dropout_threshold = 1;
        expect(p, "block_mask and dropout", false);
        p = blocks, p.max_score = floats;
        expect(p, "block_mask and max_score", false);
        p = blocks, p.scale = 0;
        expect(p, "block_mask and a scale of zero", false);
        p = blocks, p.intervals.data = lengths;
        expect(p, "block_mask and intervals", false);
    }
}

}  // namespace

int main(int argc, char** argv) {
    printing = argc > 1 && !std::strcmp(argv[1], "--print");
    const int count = argc > 2 ? std::atoi(argv[2]) : 1000;
    walk<Forward>("forward", count, kForward, fa_attention_query);
    walk<Cached>("cache", count, kForward, fa_kvcache_query);
    walk<Backward>("backward", count, kBackward, fa_attention_backward_query);
    walk<Linear>("linear", count, kLinear, fa_linear_query);
    walk<W4>("w4", count, kW4, fa_w4_linear_query);
    walk<Chain>("chain", count / 4, kChain, fa_w4_linear_chain_query);
    plans_give_max_score();
    plans_by_options();
    plans_for_blocks();
    wide_windows();
    blocks_of_wide_float32();
    packed_far_below_the_longest();
    appended_or_not();
    if (failures) std::printf("%d failures\n", failures);
    return failures ? 1 : 0;
}
