// kvcache_tests.h: fa_kvcache_attention on every kernel that serves a call, with contiguous, paged and 8-bit caches, new keys and
// rotary embedding. Buffers have exactly their size and hold garbage where the library must not look. The cases are small, so that they
// can run under sanitizers.
#pragma once

#include "launch.h"

namespace kvcache {

struct CacheCase {
    const char* name;
    int32_t dtype = FA_FLOAT32, cache_dtype = 0, page_size = 0, seqlen_q = 1, seqlen_new = 1;
    int32_t nheads = 4, nheads_k = 2, headdim = 40, headdim_v = 24, rotary_dim = 0;
    bool interleaved = false, token_scales = false, causal = true, rotary_float32 = false;
    int32_t num_splits = 0, tree_keys = 0;
    std::vector<int32_t> lengths = {37, -1, 0, 66}, leftpads = {};  // leftpads: empty, or one per sequence
};

inline std::vector<CacheCase> cache_cases() {
    std::vector<CacheCase> all;
    const auto add = [&](const char* name, const std::function<void(CacheCase&)>& change) {
        CacheCase c;
        c.name = name;
        change(c);
        all.push_back(c);
    };
    add("contiguous", [](CacheCase&) {});
    add("fp16 chunk", [](CacheCase& c) { c.dtype = FA_FLOAT16, c.seqlen_q = c.seqlen_new = 33, c.headdim = c.headdim_v = 64; });
    add("bf16 pages of 16", [](CacheCase& c) { c.dtype = FA_BFLOAT16, c.page_size = 16, c.headdim = c.headdim_v = 128; });
    add("pages of 1", [](CacheCase& c) { c.page_size = 1, c.seqlen_q = c.seqlen_new = 3; });
    add("pages of 17, nothing new", [](CacheCase& c) { c.page_size = 17, c.seqlen_new = 0, c.seqlen_q = 5, c.causal = false; });
    add("int8", [](CacheCase& c) { c.cache_dtype = FA_INT8, c.seqlen_q = 2; });
    add("int8 by token, pages of 3", [](CacheCase& c) { c.cache_dtype = FA_INT8, c.token_scales = true, c.page_size = 3; });
    add("e4m3, pages of 64", [](CacheCase& c) { c.dtype = FA_FLOAT16, c.cache_dtype = FA_FLOAT8_E4M3, c.page_size = 64; });
    add("e4m3 by token", [](CacheCase& c) { c.dtype = FA_BFLOAT16, c.cache_dtype = FA_FLOAT8_E4M3, c.token_scales = true; });
    add("rotary", [](CacheCase& c) { c.rotary_dim = 24, c.seqlen_q = c.seqlen_new = 4; });
    add("rotary in pairs", [](CacheCase& c) {
        c.dtype = FA_FLOAT16, c.rotary_dim = 40, c.interleaved = true, c.rotary_float32 = true, c.causal = false, c.seqlen_q = 3;
    });
    add("latent, pages of 16", [](CacheCase& c) { c.nheads_k = 1, c.headdim = 576, c.headdim_v = 512, c.page_size = 16; });
    add("whole step",
        [](CacheCase& c) { c.dtype = FA_FLOAT16, c.nheads_k = 4, c.headdim = c.headdim_v = c.rotary_dim = 64, c.num_splits = 4; });
    add("whole step, bf16 pages of 16", [](CacheCase& c) {
        c.dtype = FA_BFLOAT16, c.page_size = 16, c.headdim = c.headdim_v = 128, c.rotary_dim = 32, c.interleaved = true, c.num_splits = 2;
    });
    add("whole step, float32", [](CacheCase& c) { c.rotary_dim = 40, c.num_splits = 16, c.lengths = {300, 1, -1}; });
    add("tree", [](CacheCase& c) {
        c.dtype = FA_BFLOAT16, c.seqlen_q = c.seqlen_new = 7, c.headdim = c.headdim_v = 128, c.causal = false, c.tree_keys = 7;
    });
    add("tree of 64, pages of 16", [](CacheCase& c) {
        c.dtype = FA_FLOAT16, c.seqlen_q = 9, c.headdim = c.headdim_v = 64, c.causal = false, c.tree_keys = 64, c.page_size = 16;
        c.lengths = {200, 63, -1, 127};
    });
    add("left padding", [](CacheCase& c) { c.leftpads = {11, 0, 0, 66}, c.seqlen_q = c.seqlen_new = 3; });
    add("left padding, fp16 pages of 3", [](CacheCase& c) {
        c.dtype = FA_FLOAT16, c.page_size = 3, c.leftpads = {37, 0, 0, 13}, c.headdim = c.headdim_v = 64, c.rotary_dim = 32;
    });
    add("left padding, int8", [](CacheCase& c) { c.cache_dtype = FA_INT8, c.leftpads = {5, 0, 0, 40}, c.causal = false; });
    add("rotary without new keys", [](CacheCase& c) { c.dtype = FA_BFLOAT16, c.rotary_dim = 24, c.seqlen_new = 0, c.seqlen_q = 4; });
    add("split", [](CacheCase& c) { c.num_splits = 3, c.lengths = {300, 1, -1}; });
    return all;
}

inline double get_element(const void* data, int64_t i, int32_t dtype) {
    return dtype == FA_INT8 ? static_cast<const int8_t*>(data)[i] : get(data, i, dtype);
}

// A contiguous array (batch, rows, heads, dim), on host and device.
struct Array {
    int32_t dtype = 0;
    int64_t rows = 0, heads = 0, dim = 0;
    std::vector<unsigned char> host;
    Buffer device;

    Array() = default;
    Array(int32_t dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim) : dtype(dtype), rows(rows), heads(heads), dim(dim) {
        host.assign(size_t(batch * rows * heads * dim) * size(), dtype == FA_INT8 || dtype == FA_FLOAT8_E4M3 ? 0x7F : 0xFF);  // NaN
    }
    size_t size() const { return dtype == FA_INT8 ? 1 : element_size(dtype); }
    int64_t at(int64_t b, int64_t row, int64_t head) const { return ((b * rows + row) * heads + head) * dim; }
    void set(int64_t i, double x) {
        if (dtype == FA_INT8) host[size_t(i)] = uint8_t(int8_t(x));
        else put(host.data(), i, dtype, x);
    }
    double value(int64_t i) const { return get_element(host.data(), i, dtype); }
    void place(fa_device where) { device = Buffer(where, host.data(), host.size()); }
    fa_tensor view() const { return {device.data(), rows * heads * dim, heads * dim, dim}; }
};

struct CacheProblem {
    const CacheCase& c;
    const fa_device device;
    int32_t cache_dtype, batch, rows, entries, pages;
    Array q, k, v, k_new, v_new, out, cos, sin, k_scale, v_scale;
    std::vector<int32_t> table;
    std::vector<uint64_t> tree;  // (seqlen_q), one tree for all sequences
    Buffer table_device, lengths_device, leftpads_device, tree_device, lse;

    CacheProblem(const CacheCase& c, const Context& context) : c(c), device(context.device) {
        Random random(context.seed + hash_name(c.name));
        cache_dtype = c.cache_dtype ? c.cache_dtype : c.dtype, batch = int32_t(c.lengths.size());
        const int32_t longest = *std::max_element(c.lengths.begin(), c.lengths.end()) + c.seqlen_new + 5;
        rows = c.page_size ? c.page_size : longest, pages = (longest + rows - 1) / rows, entries = batch * pages;
        const auto normal = [&](int32_t dtype, int64_t b, int64_t n, int64_t heads, int64_t dim) {
            Array a(dtype, b, n, heads, dim);
            for (int64_t i = 0; i < b * n * heads * dim; ++i) a.set(i, random.normal());
            a.place(device);
            return a;
        };
        q = normal(c.dtype, batch, c.seqlen_q, c.nheads, c.headdim);
        k_new = normal(c.dtype, batch, c.seqlen_new, c.nheads_k, c.headdim);
        v_new = normal(c.dtype, batch, c.seqlen_new, c.nheads_k, c.headdim_v);
        out = Array(c.dtype, batch, c.seqlen_q, c.nheads, c.headdim_v), out.place(device);
        lse = Buffer(device, size_t(batch) * c.nheads * c.seqlen_q * 4);
        const int32_t rotary_dtype = c.rotary_float32 ? int32_t(FA_FLOAT32) : c.dtype;
        cos = Array(rotary_dtype, 1, longest, 1, c.rotary_dim / 2);
        sin = Array(rotary_dtype, 1, longest, 1, c.rotary_dim / 2);
        for (int64_t t = 0; t < longest; ++t)
            for (int64_t i = 0; i < c.rotary_dim / 2; ++i)
                cos.set(cos.at(0, t, 0) + i, std::cos(double(t) / double(i + 1))), sin.set(sin.at(0, t, 0) + i, std::sin(t / (i + 1.0)));
        cos.place(device), sin.place(device);

        // Pages are in shuffled order. Table entries and cache rows past the keys of a sequence hold garbage.
        std::vector<int32_t> order(static_cast<size_t>(entries));
        for (int32_t i = 0; i < entries; ++i) order[size_t(i)] = i;
        for (int32_t i = entries - 1; c.page_size && i > 0; --i) std::swap(order[size_t(i)], order[size_t(random.integer(0, i))]);
        for (int32_t i = 0; i < entries; ++i) {
            const int32_t keys = c.lengths[size_t(i / pages)] < 0 ? 0 : c.lengths[size_t(i / pages)] + c.seqlen_new;
            table.push_back(i % pages * rows < keys ? order[size_t(i)] : i % 2 ? INT32_MAX : INT32_MIN);
        }
        table_device = Buffer(device, table.data(), table.size() * 4);
        lengths_device = Buffer(device, c.lengths.data(), c.lengths.size() * 4);
        leftpads_device = Buffer(device, c.leftpads.data(), c.leftpads.size() * 4);
        for (int32_t i = 0; i < c.seqlen_q; ++i) tree.push_back(uint64_t(random.integer(0, INT32_MAX)) * 0x9E3779B97F4A7C15);
        tree_device = Buffer(device, tree.data(), tree.size() * 8);
        k = cache(random, c.headdim, k_scale), v = cache(random, c.headdim_v, v_scale);
    }

    Array cache(Random& random, int64_t dim, Array& scale) {
        Array a(cache_dtype, entries, rows, c.nheads_k, dim);
        scale = Array(FA_FLOAT32, c.token_scales ? entries : 1, c.token_scales ? rows : 1, c.nheads_k, 1);
        const double unit = cache_dtype == FA_INT8 ? 4.0 / 127 : cache_dtype == FA_FLOAT8_E4M3 ? 4.0 / 448 : 1;
        for (int64_t i = 0; !c.token_scales && i < c.nheads_k; ++i) scale.set(i, unit * (1 + 0.5 * double(i)));
        for (int32_t b = 0; b < batch; ++b)
            for (int32_t j = padding(b); j < c.lengths[size_t(b)]; ++j)
                for (int32_t h = 0; h < c.nheads_k; ++h) {
                    const int64_t at = a.at(entry(b, j), j % rows, h);
                    if (c.token_scales) scale.set(scale.at(entry(b, j), j % rows, h), unit * (0.5 + random.uniform()));
                    for (int64_t d = 0; d < dim; ++d) {
                        const double x = std::max(-3.9, std::min(3.9, random.normal())) / unit;
                        a.set(at + d, cache_dtype == FA_INT8 ? std::nearbyint(x) : x);
                    }
                }
        a.place(device), scale.place(device);
        return a;
    }
    int32_t padding(int32_t b) const { return c.leftpads.empty() ? 0 : c.leftpads[size_t(b)]; }
    int64_t entry(int32_t b, int32_t j) const { return c.page_size ? table[size_t(b * pages + j / rows)] : b; }

    fa_attention_args attention(const char* kernel, int32_t num_threads) const {
        fa_attention_args a;
        std::memset(&a, 0, sizeof a);
        a.struct_size = sizeof a, a.device = device, a.dtype = c.dtype, a.batch = batch, a.nheads = c.nheads, a.nheads_k = c.nheads_k;
        a.headdim = c.headdim, a.headdim_v = c.headdim_v, a.seqlen_q = c.seqlen_q, a.seqlen_k = int64_t(rows) * pages;
        a.q = q.view(), a.k = k.view(), a.v = v.view(), a.out = out.view(), a.lse = lse.as<float>();
        a.causal = c.causal, a.kernel = kernel, a.num_threads = num_threads;
        return a;
    }
    fa_kvcache_args args(const fa_attention_args* attention) const {
        fa_kvcache_args a;
        std::memset(&a, 0, sizeof a);
        a.struct_size = sizeof a, a.attention = attention, a.cache_dtype = c.cache_dtype, a.cache_batch = entries;
        a.cache_seqlens = lengths_device.as<int32_t>(), a.num_splits = c.num_splits, a.seqlen_new = c.seqlen_new;
        if (c.page_size) a.block_table = table_device.as<int32_t>(), a.block_table_stride = pages, a.page_size = c.page_size;
        if (!c.leftpads.empty()) a.cache_leftpad = leftpads_device.as<int32_t>();
        if (c.tree_keys) a.tree_mask = tree_device.as<uint64_t>(), a.tree_row_stride = 1, a.tree_keys = c.tree_keys;
        if (c.seqlen_new) a.k_new = k_new.view(), a.v_new = v_new.view();
        if (c.rotary_dim) {
            a.rotary_cos = cos.device.data(), a.rotary_sin = sin.device.data(), a.rotary_dtype = cos.dtype;
            a.rotary_rows = int32_t(cos.rows), a.rotary_dim = c.rotary_dim, a.rotary_interleaved = c.interleaved;
        }
        const auto factors = [&](const Array& s) {
            const bool tokens = c.token_scales;
            return fa_cache_scale{s.device.as<float>(), tokens ? int64_t(rows) * c.nheads_k : 0, tokens ? c.nheads_k : 0, 1};
        };
        if (c.cache_dtype) a.k_scale = factors(k_scale), a.v_scale = factors(v_scale);
        return a;
    }

    // A row after the rotary embedding; with turns = false, the row itself.
    std::vector<double> turned(const Array& a, int64_t at, int64_t position, bool turns = true) const {
        std::vector<double> x(size_t(a.dim)), y;
        for (size_t d = 0; d < x.size(); ++d) x[d] = a.value(at + int64_t(d));
        y = x;
        for (int32_t i = 0; turns && i < c.rotary_dim / 2; ++i) {
            const size_t one = size_t(c.interleaved ? 2 * i : i), two = size_t(c.interleaved ? 2 * i + 1 : i + c.rotary_dim / 2);
            const double co = cos.value(cos.at(0, position, 0) + i), si = sin.value(sin.at(0, position, 0) + i);
            y[one] = x[one] * co - x[two] * si, y[two] = x[one] * si + x[two] * co;
        }
        return y;
    }
    double factor(const Array& scale, int64_t e, int64_t row, int64_t head) const {
        return !c.cache_dtype ? 1 : scale.value(c.token_scales ? scale.at(e, row, head) : head);
    }

    // Compares the results of the call with the definition in float64.
    void check(const char* kernel) {
        const Array k_before = copy(k), v_before = copy(v);
        for (Array* a : {&k, &v, &k_scale, &v_scale, &out}) a->host = a->device.bytes();
        std::vector<float> got_lse(lse.size() / 4);
        lse.download(got_lse.data());
        check_cache(kernel, k, k_before, k_new, k_scale, true), check_cache(kernel, v, v_before, v_new, v_scale, false);
        const double tolerance = 3e-5 + (c.dtype == FA_FLOAT32 ? 0 : 12 * std::exp2(-significand_bits(c.dtype)));
        for (int32_t b = 0; b < batch; ++b)
            for (int32_t h = 0; h < c.nheads; ++h)
                for (int32_t i = 0; i < c.seqlen_q; ++i) {
                    const int32_t before = c.lengths[size_t(b)], keys = before < 0 ? 0 : before + c.seqlen_new,
                                  hk = h / (c.nheads / c.nheads_k);
                    std::vector<int32_t> seen;
                    for (int32_t j = padding(b); j < keys; ++j) {
                        const int32_t draft = j - (keys - c.tree_keys);
                        if (!(c.causal && j > i + keys - c.seqlen_q) && (draft < 0 || tree[size_t(i)] >> draft & 1)) seen.push_back(j);
                    }
                    const std::vector<double> row = turned(q, q.at(b, i, h), std::max(before, 0) + (c.causal ? i : 0));
                    std::vector<double> score, want(size_t(c.headdim_v), 0.0);
                    double top = -INFINITY, sum = 0;
                    for (const int32_t j : seen) {
                        double dot = 0;
                        const int64_t at = k.at(entry(b, j), j % rows, hk);
                        for (int32_t d = 0; d < c.headdim; ++d) dot += round_to(c.dtype, row[size_t(d)]) * k.value(at + d);
                        score.push_back(dot * factor(k_scale, entry(b, j), j % rows, hk) / std::sqrt(double(c.headdim)));
                        top = std::max(top, score.back());
                    }
                    for (const double s : score) sum += std::exp(s - top);
                    for (size_t x = 0; x < seen.size(); ++x) {
                        const int32_t j = seen[x];
                        const double p = std::exp(score[x] - top) / sum * factor(v_scale, entry(b, j), j % rows, hk);
                        for (int32_t d = 0; d < c.headdim_v; ++d) want[size_t(d)] += p * v.value(v.at(entry(b, j), j % rows, hk) + d);
                    }
                    const double want_lse = !seen.empty() ? top + std::log(sum) : -INFINITY;
                    const float l = got_lse[size_t((b * c.nheads + h) * c.seqlen_q + i)];
                    EXPECT(!seen.empty() ? std::fabs(l - want_lse) <= tolerance : l == -INFINITY, "%s: lse[%d, %d, %d] = %g, want %g",
                           kernel, b, h, i, l, want_lse);
                    for (int32_t d = 0; d < c.headdim_v; ++d) {
                        const double x = out.value(out.at(b, i, h) + d), y = want[size_t(d)];
                        EXPECT(std::fabs(x - y) <= tolerance, "%s: out[%d, %d, %d, %d] = %g, want %g", kernel, b, i, h, d, x, y);
                    }
                }
    }
    static Array copy(const Array& a) {
        Array b(a.dtype, 0, a.rows, a.heads, a.dim);
        b.host = a.host;
        return b;
    }

    // Appended rows must hold the new keys or values, rounded once. Every other byte must be unchanged.
    void check_cache(const char* kernel, const Array& now, const Array& before, const Array& added, const Array& scale, bool turns) {
        std::vector<char> touched(now.host.size() / now.size(), 0);
        for (int32_t b = 0; b < batch; ++b)
            for (int32_t t = 0; t < c.seqlen_new && c.lengths[size_t(b)] >= 0; ++t)
                for (int32_t h = 0; h < c.nheads_k; ++h) {
                    const int32_t j = c.lengths[size_t(b)] + t;
                    const int64_t at = now.at(entry(b, j), j % rows, h), from = added.at(b, t, h);
                    const double unit = factor(scale, entry(b, j), j % rows, h);
                    const std::vector<double> want = turned(added, from, j, turns);
                    for (int64_t d = 0; d < now.dim; ++d) {
                        const double x = now.value(at + d) * unit, y = want[size_t(d)];
                        const double step = c.cache_dtype == FA_INT8 ? 0.51 * unit
                                            : c.cache_dtype == FA_FLOAT8_E4M3
                                                ? std::fabs(y) / 15.9 + unit / 1000
                                                : 1e-6 + std::fabs(y) * std::exp2(1 - significand_bits(c.dtype));
                        EXPECT(std::fabs(x - y) <= step, "%s: key %d of sequence %d, head %d, dim %lld: %g was appended as %g", kernel, j,
                               b, h, (long long)d, y, x);
                        touched[size_t(at + d)] = 1;
                    }
                }
        for (size_t i = 0; i < touched.size(); ++i)
            EXPECT(touched[i] || !std::memcmp(&now.host[i * now.size()], &before.host[i * now.size()], now.size()),
                   "%s: element %zu of the cache was written", kernel, i);
    }
};

inline fa_attention_plan query(const fa_kvcache_args& args) {
    fa_attention_plan plan;
    std::memset(&plan, 0, sizeof plan);
    plan.struct_size = sizeof plan;
    fa_kvcache_query(&args, &plan);
    return plan;
}

inline void answer(const Context& context, const CacheCase& c) {
    int served = 0;
    for (const std::string& name : context.kernels) {
        CacheProblem p(c, context);
        fa_attention_args attention = p.attention(name.c_str(), context.num_threads);
        const fa_kvcache_args args = p.args(&attention);
        const fa_attention_plan plan = query(args);
        if (plan.status == FA_UNSUPPORTED) continue;
        EXPECT(plan.status == FA_OK && name == plan.kernel, "%s: %s", name.c_str(), fa_last_error());
        const Workspace workspace(p.device, plan.workspace_bytes);
        workspace.attach(&attention);
        expect_ok(fa_kvcache_attention(&args, nullptr), name.c_str());
        wait(p.device);
        workspace.check();
        p.check(name.c_str());
        ++served;
    }
    if (!served) throw Skip("no kernel tested here takes this cache");
}

inline void refusals(const Context& context) {
    using K = fa_kvcache_args;
    struct Bad {
        std::function<void(K&)> spoil;
        const char* text;
    };
    const std::vector<Bad> all = {
        {[](K& a) { a.struct_size = 8; }, "struct_size=8"},
        {[](K& a) { a.attention = nullptr; }, "fa_attention_args is NULL"},
        {[](K& a) { a.cache_dtype = 9; }, "(9)"},
        {[](K& a) { a.cache_batch = -1; }, "cache_batch=-1"},
        {[](K& a) { a.cache_batch = 0; }, "cache_batch=0 with seqlen_new="},
        {[](K& a) { a.page_size = -1; }, "page_size=-1"},
        {[](K& a) { a.page_size = 0; }, "block_table is set with page_size=0"},
        {[](K& a) { a.block_table = nullptr; }, "without a block_table"},
        {[](K& a) { a.cache_batch_idx = a.cache_seqlens; }, "cache_batch_idx and block_table are both set"},
        {[](K& a) { a.cache_seqlens = moved(a.cache_seqlens, 1); }, "cache_seqlens.data="},
        {[](K& a) { a.cache_leftpad = moved(a.cache_seqlens, 1); }, "cache_leftpad.data="},
        {[](K& a) { a.seqlen_new = -1; }, "seqlen_new=-1"},
        {[](K& a) { a.seqlen_new = 100000; }, "seqlen_new=100000"},
        {[](K& a) { a.k_new.data = nullptr; }, "k_new.data is NULL"},
        {[](K& a) { a.k_new.data = a.attention->k.data; }, "k.data="},
        {[](K& a) { a.v_new.data = a.attention->v.data; }, "overlaps v_new.data="},
        {[](K& a) { a.cache_seqlens = static_cast<const int32_t*>(a.attention->out.data); }, "overlaps cache_seqlens.data="},
        {[](K& a) { a.block_table = static_cast<const int32_t*>(a.attention->k.data); }, "k.data="},
        {[](K& a) { a.seqlen_new = 0; }, "k_new or v_new is set with seqlen_new=0"},
        {[](K& a) { a.rotary_dim = 8; }, "rotary_dim=8"},
        {[](K& a) { a.k_scale.data = reinterpret_cast<float*>(a.k_new.data); }, "only an 8-bit cache has factors"},
        {[](K& a) { a.cache_dtype = FA_INT8; }, "an 8-bit cache needs the factors"},
        {[](K& a) { a.batch_invariant = 2; }, "batch_invariant=2"},
        {[](K& a) { a.num_splits = 257; }, "num_splits=257"},
        {[](K& a) { a.shared_prefix = 2; }, "shared_prefix=2"},
        {[](K& a) { a.reserved = 1; }, "reserved=1"},
        {[](K& a) { a.tree_keys = 65; }, "tree_keys=65"},
        {[](K& a) { a.tree_keys = 8; }, "tree_mask.data is NULL"},
        {[](K& a) { a.tree_mask = reinterpret_cast<const uint64_t*>(a.k_new.data); }, "tree_mask is set with tree_keys=0"},
    };
    CacheCase c;
    c.name = "refusals", c.page_size = 16;
    const CacheProblem p(c, context);
    const fa_attention_args attention = p.attention(nullptr, context.num_threads);
    for (const Bad& bad : all) {
        K args = p.args(&attention);
        bad.spoil(args);
        const fa_status status = fa_kvcache_attention(&args, nullptr);
        const std::string said = fa_last_error();
        EXPECT(status == FA_BAD_ARGUMENT && said.find(bad.text) != std::string::npos, "wanted '%s', got %s: %s", bad.text,
               fa_status_name(status), said.c_str());
        wait(p.device);
        EXPECT(p.out.device.bytes() == p.out.host && p.k.device.bytes() == p.k.host, "'%s' was refused, but something was written",
               bad.text);
    }
}

// Lengths, entries and pages in device memory may have any value. No access may leave the cache (a sanitizer would report it), and new keys
// without a valid place are not written.
inline void wild_contents(const Context& context) {
    if (context.device == FA_CPU) throw Skip("on the CPU the contents are checked and refused");
    for (const int32_t page_size : {0, 16})
        for (const int32_t cache_dtype : {0, int32_t(FA_INT8)}) {
            CacheCase c;
            c.name = "wild contents", c.dtype = FA_FLOAT16, c.cache_dtype = cache_dtype, c.page_size = page_size, c.rotary_dim = 8;
            c.token_scales = cache_dtype, c.headdim = c.headdim_v = 64;
            for (const std::string& name : context.kernels)
                for (const bool lengths : {false, true}) {
                    CacheProblem p(c, context);
                    fa_attention_args attention = p.attention(name.c_str(), context.num_threads);
                    fa_kvcache_args args = p.args(&attention);
                    std::vector<int32_t> wild(size_t(p.batch * p.pages), 0);
                    for (size_t i = 0; i < wild.size(); ++i)
                        wild[i] = i % 3 == 0 ? INT32_MAX : i % 3 == 1 ? INT32_MIN : lengths ? p.rows * p.pages : p.entries;
                    const Buffer contents(p.device, wild.data(), wild.size() * 4);
                    if (lengths) args.cache_seqlens = contents.as<int32_t>();
                    else if (page_size) args.block_table = contents.as<int32_t>();
                    else args.cache_batch_idx = contents.as<int32_t>();
                    const fa_attention_plan plan = query(args);
                    if (plan.status == FA_UNSUPPORTED) continue;
                    const Workspace workspace(p.device, plan.workspace_bytes);
                    workspace.attach(&attention);
                    expect_ok(fa_kvcache_attention(&args, nullptr), name.c_str());
                    wait(p.device);
                    workspace.check();
                    EXPECT(p.k.device.bytes() == p.k.host && p.v.device.bytes() == p.v.host, "%s: keys that have no place were written",
                           name.c_str());
                }
        }
}

inline std::vector<Test> tests() {
    static const std::vector<CacheCase> cases = cache_cases();
    std::vector<Test> all;
    for (const CacheCase& c : cases)
        all.push_back({std::string("kvcache/tiny/") + c.name, [&c](const Context& context) { answer(context, c); }});
    all.push_back({"kvcache/tiny/wild contents", wild_contents});
    all.push_back({"kvcache/refusals", refusals});
    return all;
}

}  // namespace kvcache
