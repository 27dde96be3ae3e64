// cases.h: the definition of a correctness case, and the table of all cases. A case is data: sizes, options, layout. problem.h
// makes its arrays.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "memory.h"
#include "numbers.h"

enum class Layout {
    kContiguous,  // (batch, seqlen, heads, dim)
    kHeadsFirst,  // (batch, heads, seqlen, dim) in memory
    kPadded,      // gaps of NaN after each head, row and batch entry; the first element is one element away from vector alignment
    kBroadcast,   // batch and head strides of q, k, v are 0
    kReversed,    // rows of q, k, v run backwards through memory
};

enum class Mask {
    kNone,
    kRandom,
    kFull,
    kHoles,
    kNothing
};  // kFull: each head has its own mask; kHoles: some rows see nothing; kNothing: no row sees anything

struct Case {
    std::string name;
    int32_t dtype = FA_FLOAT32;
    int64_t seqlen_q = 64, seqlen_k = 64;
    int32_t headdim = 64, headdim_v = 0;
    int32_t batch = 2, nheads = 2, nheads_k = 2;
    std::vector<int32_t> lengths_q, lengths_k;  // a varlen case when not empty; batch, seqlen_q and seqlen_k follow from them
    bool causal = false, top_left = false, has_window = false;
    int64_t window_left = 0, window_right = 0;
    int32_t attention_chunk = 0;
    bool has_scale = false;
    float scale = 0, softcap = 0;
    int alibi = 0;  // 1: a slope per head, 2: per batch and head
    int bias = 0;   // 1: full, 2: the same for all batch entries and heads, 3: the same for all rows
    bool bias_is_fp32 = false, bias_has_infinities = false;
    Mask mask = Mask::kNone;
    int intervals = 0;                  // numbers for each key of startend_row_indices
    int interval_heads = 0;             // 0: one list for all heads, 1: for each key head, 2: for each head
    int row_block = 0, key_block = 64;  // of block_mask: 64 or 128; row_block 0 = none. Its heads are those of interval_heads
    int sinks = 0;                      // 1: finite sinks, 2: some are -inf
    bool allow_tf32 = false, fast_accum = false;
    float dropout_p = 0;
    uint64_t dropout_seed = 0, dropout_offset = 0;
    Layout layout = Layout::kContiguous;
    double magnitude = 1;      // standard deviation of q and k
    bool constant = false;     // q = 0: every score equal
    bool visible_nan = false;  // a NaN in K and a NaN in V that some rows see
    bool want_lse = true;
    int64_t row_step = 1;           // every row_step-th row is checked
    bool outer_heads_only = false;  // check only the first head of the first batch entry and the last head of the last

    bool varlen() const { return !lengths_q.empty(); }
    int32_t dim_v() const { return headdim_v ? headdim_v : headdim; }
    double pairs() const {  // roughly the multiply-adds of q k^T
        double n = double(batch) * double(seqlen_q) * double(seqlen_k);
        if (varlen()) {
            n = 0;
            for (size_t b = 0; b < lengths_q.size(); ++b) n += double(lengths_q[b]) * lengths_k[b];
        }
        return n * nheads * std::max(headdim, dim_v()) * (causal ? 0.5 : 1);
    }
};

inline Case shape(int64_t seqlen_q, int64_t seqlen_k, int32_t headdim, int32_t dtype) {
    Case c;
    c.seqlen_q = seqlen_q, c.seqlen_k = seqlen_k, c.headdim = headdim, c.dtype = dtype;
    return c;
}

// "group[/detail]/113x203/d64/h6k2/bf16"
inline std::string full_name(const std::string& group, const Case& c) {
    std::string name = group;
    if (c.varlen()) name += format("/b%zu", c.lengths_q.size());
    else name += format("/%lldx%lld", (long long)c.seqlen_q, (long long)c.seqlen_k);
    name += format("/d%d", c.headdim);
    if (c.headdim_v) name += format("v%d", c.headdim_v);
    if (c.nheads != 2 || c.nheads_k != 2) name += format("/h%dk%d", c.nheads, c.nheads_k);
    return name + "/" + dtype_name(c.dtype);
}

class CaseTable {
public:
    void add(const std::string& group, Case c) {
        if (c.varlen()) {
            c.batch = int32_t(c.lengths_q.size());
            c.seqlen_q = *std::max_element(c.lengths_q.begin(), c.lengths_q.end());
            c.seqlen_k = *std::max_element(c.lengths_k.begin(), c.lengths_k.end());
        }
        c.name = full_name(group, c);
        cases_.push_back(std::move(c));
    }
    // Adds the case after all changes are made to it.
    template <typename... Changes>
    void add(const std::string& group, Case c, Changes... changes) {
        (changes(c), ...);
        add(group, std::move(c));
    }
    const std::vector<Case>& all() const { return cases_; }

private:
    std::vector<Case> cases_;
};

const std::vector<int32_t> kAllDtypes = {FA_FLOAT32, FA_FLOAT16, FA_BFLOAT16};
const std::vector<int32_t> kTwoDtypes = {FA_FLOAT32, FA_BFLOAT16};

struct Lengths {
    int64_t q, k;
};

// A random case within the contract. Seed and number, which are in its name, determine it.
inline Case fuzz(uint64_t seed, int number) {
    Random r(hash_name(format("fuzz %llu %d", (unsigned long long)seed, number)));
    const std::vector<int64_t> lengths = {1, 2, 5, 16, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 257};
    Case c = shape(r.pick(lengths), r.pick(lengths), int32_t(r.chance(0.7) ? r.integer(1, 136) : r.integer(1, 512)), r.pick(kAllDtypes));
    if (r.chance(0.3)) c.headdim_v = int32_t(r.integer(1, 160));
    c.batch = int32_t(r.integer(1, 3)), c.nheads_k = int32_t(r.integer(1, 3)), c.nheads = c.nheads_k * int32_t(r.integer(1, 4));
    if (r.chance(0.3))
        for (int b = 0; b < 4; ++b) {
            c.lengths_q.push_back(int32_t(r.chance(0.2) ? 0 : r.integer(1, 90)));
            c.lengths_k.push_back(int32_t(r.chance(0.2) ? 0 : r.integer(1, 150)));
        }
    c.causal = r.chance(0.4), c.top_left = r.chance(0.4), c.has_window = r.chance(0.3);
    if (c.has_window) c.window_left = r.integer(-1, 100), c.window_right = r.integer(-1, 100);
    if (r.chance(0.2)) c.has_scale = true, c.scale = float(0.3 * r.normal());
    if (r.chance(0.2)) c.softcap = float(0.5 + 10 * r.uniform());
    if (r.chance(0.25)) c.alibi = int(r.integer(1, 2));
    if (r.chance(0.25)) c.bias = int(r.integer(1, 3)), c.bias_is_fp32 = r.chance(0.5), c.bias_has_infinities = r.chance(0.3);
    if (r.chance(0.25)) c.mask = r.pick<Mask>({Mask::kRandom, Mask::kFull, Mask::kHoles});
    if (r.chance(0.2)) c.intervals = int(r.integer(1, 2)) * (c.causal ? 1 : 2), c.interval_heads = int(r.integer(0, 2));
    if (r.chance(0.2)) c.row_block = r.pick<int>({64, 128}), c.key_block = r.pick<int>({64, 128});
    if (r.chance(0.2)) c.sinks = int(r.integer(1, 2));
    if (r.chance(0.2)) c.dropout_p = float(r.uniform()), c.dropout_seed = r.bits(), c.dropout_offset = r.bits();
    c.layout = r.pick<Layout>(
        {Layout::kContiguous, Layout::kContiguous, Layout::kHeadsFirst, Layout::kPadded, Layout::kBroadcast, Layout::kReversed});
    c.want_lse = !r.chance(0.1);
    return c;
}

inline std::vector<Case> correctness_cases(uint64_t seed, bool quick) {
    CaseTable t;
    const auto causal = [](Case& c) { c.causal = true; };
    const auto top_left = [](Case& c) { c.top_left = true; };
    const auto heads = [](int32_t nheads, int32_t nheads_k) { return [=](Case& c) { c.nheads = nheads, c.nheads_k = nheads_k; }; };
    const auto chunks = [](int64_t keys) { return [=](Case& c) { c.attention_chunk = int32_t(keys); }; };
    const auto window = [](int64_t left, int64_t right) {
        return [=](Case& c) { c.has_window = true, c.window_left = left, c.window_right = right; };
    };

    // Large cases first, so that errors which need many tiles show early. Only some of the rows are checked.
    const auto large = [](int64_t step) { return [=](Case& c) { c.batch = 1, c.nheads = c.nheads_k = 1, c.row_step = step; }; };
    t.add("large/full", shape(4096, 4096, 64, FA_FLOAT32), large(61));
    t.add("large/causal", shape(4099, 4099, 128, FA_BFLOAT16), large(67), causal);
    t.add("large/window", shape(8192, 8192, 64, FA_FLOAT16), large(131), causal, window(1000, 0));
    t.add("large/decode", shape(1, 16384, 128, FA_BFLOAT16), large(1), heads(4, 1));
    if (!quick) t.add("large/causal", shape(2047, 6001, 80, FA_FLOAT32), large(53), causal);

    // Tiny cases: one small launch each, to be chosen by name under a profiler or a sanitizer.
    for (const int32_t dtype : kAllDtypes) {
        t.add("tiny/plain", shape(5, 7, 8, dtype));
        t.add("tiny/causal", shape(17, 19, 16, dtype), causal);
    }
    const auto everything = [](Case& c) {
        c.nheads = 4, c.causal = true, c.softcap = 3, c.alibi = 2, c.bias = 1, c.mask = Mask::kHoles, c.sinks = 1;
        c.dropout_p = 0.3f, c.dropout_seed = 1234567890123456789u, c.dropout_offset = 42;
    };
    const auto fast = [](Case& c) { c.fast_accum = true; };
    for (const int32_t dim : {64, 128, 256})  // a tile and a part of one; sums that are promoted once and twice
        for (const int64_t keys : {150, 1200, 2200}) {
            t.add("tiny/float8", shape(70, keys, dim, FA_FLOAT8_E4M3), heads(2, 1));
            t.add("tiny/float8_causal", shape(70, keys, dim, FA_FLOAT8_E4M3), causal);
            if (keys == 2200) t.add("tiny/float8_fast", shape(70, keys, dim, FA_FLOAT8_E4M3), fast);
        }
    for (const int32_t dim : {33, 64, 96, 128, 192, 256}) {
        t.add("tiny/tf32", shape(70, 90, dim, FA_FLOAT32), [](Case& c) { c.allow_tf32 = true; });
        t.add("tiny/tf32_causal", shape(70, 90, dim, FA_FLOAT32), [](Case& c) { c.allow_tf32 = c.causal = true, c.softcap = 3; });
    }
    t.add("tiny/everything", shape(33, 35, 24, FA_FLOAT32), everything);
    t.add("tiny/everything", shape(33, 35, 24, FA_BFLOAT16), everything);
    const auto lengths = [](std::vector<int32_t> q, std::vector<int32_t> k) { return [=](Case& c) { c.lengths_q = q, c.lengths_k = k; }; };
    t.add("tiny/bias_one_for_all", shape(33, 70, 24, FA_FLOAT32), [](Case& c) { c.bias = 2; });
    t.add("tiny/bias_one_row", shape(70, 33, 24, FA_BFLOAT16), [](Case& c) { c.bias = 3; });
    t.add("tiny/varlen", shape(0, 0, 16, FA_FLOAT32), lengths({3, 0, 9}, {5, 2, 9}), causal);

    // Lengths that are awkward for some kernel.
    const std::vector<Lengths> awkward = {{1, 1},     {7, 7},     {31, 31},   {33, 33}, {63, 63}, {65, 65},
                                          {127, 127}, {129, 129}, {113, 203}, {239, 1}, {799, 3}, {1023, 1024}};
    for (const Lengths& n : awkward)
        for (const int32_t dtype : kAllDtypes) {
            const auto one_head = [&](Case& c) { c.batch = n.q > 1000 ? 1 : 2, c.nheads = c.nheads_k = n.q > 1000 ? 1 : 2; };
            t.add("shapes/full", shape(n.q, n.k, 64, dtype), one_head);
            if (!quick && dtype != FA_FLOAT16) t.add("shapes/causal", shape(n.q, n.k, 128, dtype), one_head, causal);
        }
    for (const int32_t dim : {1, 8, 33, 40, 64, 72, 80, 96, 128, 160, 192, 256, 264, 320, 328, 512})
        for (const int32_t dtype : kAllDtypes)
            t.add("headdim", shape(67, 129, dim, dtype), [&](Case& c) { c.batch = 1, c.causal = dim % 16 == 0; });
    for (const auto& [dim, dim_v] :
         std::vector<std::pair<int32_t, int32_t>>{{192, 128}, {64, 80}, {72, 1}, {1, 512}, {576 - 64, 33}, {320, 256}, {264, 400}})
        for (const int32_t dtype : kAllDtypes)
            t.add("headdim_v", shape(65, 131, dim, dtype), causal, [&, v = dim_v](Case& c) { c.batch = 1, c.headdim_v = v; });
    for (const int32_t ratio : {1, 2, 3, 5, 6, 7, 8, 16})
        for (const int32_t dtype : kTwoDtypes) {
            t.add("heads", shape(33, 65, 40, dtype), heads(2 * ratio, 2));
            if (!quick) t.add("heads/one_key_head", shape(1, 257, 64, dtype), heads(ratio, 1), causal);
        }

    // The keys that a row sees.
    const std::vector<Lengths> corners = {{64, 64}, {113, 203}, {203, 113}, {65, 64}, {1, 129}, {129, 1}, {7, 63}, {300, 37}};
    for (const Lengths& n : corners)
        for (const int32_t dtype : kAllDtypes) {
            t.add("causal_bottom_right", shape(n.q, n.k, 64, dtype), causal);
            t.add("causal_top_left", shape(n.q, n.k, 64, dtype), causal, top_left);
        }
    for (const Lengths& w :
         std::vector<Lengths>{{0, 0}, {1, 0}, {0, 1}, {16, 16}, {-1, 5}, {5, -1}, {65, 3}, {70, 0}, {1000, 1000}, {-1, -1}})
        for (const Lengths& n : std::vector<Lengths>{{113, 203}, {203, 113}}) {
            const std::string group = format("window%lld,%lld", (long long)w.q, (long long)w.k);
            const int32_t dtype = kAllDtypes[size_t(w.q + w.k + 2) % 3];
            t.add(group, shape(n.q, n.k, 64, dtype), window(w.q, w.k));
            t.add(group + "/top_left", shape(n.q, n.k, 72, dtype), window(w.q, w.k), top_left);
            if (w.q >= 0) t.add(group + "/chunks", shape(n.q, n.k, 40, dtype), window(w.q, w.k), chunks(1 + n.q / 3));
            if (!quick) t.add(group + "/causal", shape(n.q, n.k, 32, dtype), window(w.q, w.k), causal);
        }
    for (const int32_t dtype : kAllDtypes) {
        const Case c = shape(113, 203, 64, dtype);
        t.add("mask/random", c, [](Case& c) { c.mask = Mask::kRandom; });
        t.add("mask/per_head", c, heads(6, 2), [](Case& c) { c.mask = Mask::kFull; });
        t.add("mask/empty_rows", c, [](Case& c) { c.mask = Mask::kHoles; });
        t.add("mask/nothing", c, [](Case& c) { c.mask = Mask::kNothing; });
        for (const int numbers : {1, 2, 4})
            for (const int of_heads : {0, 1, 2}) {
                const auto intervals = [=](Case& x) { x.intervals = numbers, x.interval_heads = of_heads; };
                if (numbers < 4) t.add(format("intervals/causal%d/lists%d", numbers, of_heads), c, heads(4, 2), causal, intervals);
                if (numbers > 1) t.add(format("intervals/full%d/lists%d", numbers, of_heads), c, heads(4, 2), intervals);
                const auto blocks = [=](Case& x) {
                    x.row_block = numbers == 2 ? 128 : 64, x.key_block = numbers == 4 ? 128 : 64, x.interval_heads = of_heads;
                };
                t.add(format("blocks/%d/lists%d", numbers, of_heads), c, heads(4, 2), [=](Case& x) { x.causal = numbers == 1; }, blocks);
            }
        t.add("mask/causal", c, causal, [](Case& c) { c.mask = Mask::kHoles; });
        t.add("empty/no_keys", shape(33, 0, 64, dtype));
        t.add("empty/no_keys/sinks", shape(33, 0, 64, dtype), [](Case& c) { c.sinks = 2; });
        t.add("nan/visible", shape(65, 129, 64, dtype), [](Case& c) { c.visible_nan = true; });
    }

    // Options of a score.
    for (const int32_t dtype : kAllDtypes) {
        const Case c = shape(113, 203, 64, dtype);
        const auto scale = [](float s) { return [=](Case& c) { c.has_scale = true, c.scale = s; }; };
        t.add("scale/explicit", c, scale(0.37f));
        t.add("scale/negative", c, scale(-0.2f), causal);
        t.add("scale/zero", c, scale(0));
        t.add("softcap", c, [](Case& c) { c.softcap = 2; });
        t.add("softcap/causal", c, causal, [](Case& c) { c.softcap = 50; });
        t.add("alibi/per_head", c, heads(6, 2), [](Case& c) { c.alibi = 1; });
        t.add("alibi/per_batch/causal", c, causal, [](Case& c) { c.alibi = 2; });
        t.add("alibi/top_left", c, top_left, [](Case& c) { c.alibi = 1; });
        t.add("bias/full", c, heads(4, 2), [](Case& c) { c.bias = 1; });
        t.add("bias/one_for_all", c, [](Case& c) { c.bias = 2; });
        t.add("bias/one_row/causal", c, causal, [](Case& c) { c.bias = 3; });
        t.add("bias/fp32", c, [](Case& c) { c.bias = 1, c.bias_is_fp32 = true; });
        t.add("bias/minus_infinity", c, [](Case& c) { c.bias = 1, c.bias_has_infinities = true; });
        t.add("sinks", c, heads(6, 2), [](Case& c) { c.sinks = 1; });
        t.add("sinks/empty_rows", shape(203, 113, 64, dtype), causal, [](Case& c) { c.sinks = 2; });
        for (const float p : {1e-6f, 0.1f, 0.5f, 0.9f})
            t.add(format("dropout%g", p), c, heads(4, 2),
                  [=](Case& c) { c.dropout_p = p, c.dropout_seed = 0x123456789ABCDEF0u, c.dropout_offset = 7; });
        t.add("dropout/offset/causal", c, causal,
              [](Case& c) { c.dropout_p = 0.25f, c.dropout_seed = 5, c.dropout_offset = 0xFEDCBA9876543210u; });
        t.add("extreme/logits_1e4", c, [](Case& c) { c.magnitude = 60; });
        t.add("extreme/logits_1e4/causal", c, causal, [](Case& c) { c.magnitude = 60; });
        t.add("extreme/all_equal", c, [](Case& c) { c.constant = true; });
        t.add("everything", shape(203, 190, 96, dtype), everything);
        t.add("no_lse", c, causal, [](Case& c) { c.want_lse = false; });
    }

    // Layouts of the arrays.
    for (const int32_t dtype : kAllDtypes)
        for (const auto& [layout, name] : std::vector<std::pair<Layout, const char*>>{{Layout::kHeadsFirst, "heads_first"},
                                                                                      {Layout::kPadded, "padded"},
                                                                                      {Layout::kBroadcast, "broadcast"},
                                                                                      {Layout::kReversed, "reversed"}}) {
            const auto lay = [layout = layout](Case& c) { c.layout = layout; };
            t.add(format("layout/%s", name), shape(65, 97, 64, dtype), lay, heads(4, 2));
            t.add(format("layout/%s/everything", name), shape(65, 97, 40, dtype), everything, lay);
        }

    // Packed sequences.
    for (const int32_t dtype : kAllDtypes) {
        const Case c = shape(0, 0, 64, dtype);
        const auto mixed = lengths({1, 0, 65, 128, 7, 33}, {129, 5, 0, 128, 63, 1});
        t.add("varlen/full", c, mixed);
        t.add("varlen/causal", c, mixed, causal, heads(6, 2));
        t.add("varlen/causal/top_left", c, mixed, causal, top_left);
        t.add("varlen/window", c, mixed, window(20, 3));
        t.add("varlen/chunks", c, mixed, chunks(30), causal);
        t.add("varlen/everything", c, mixed, everything);
        t.add("varlen/bias_one_row", c, mixed, [](Case& c) { c.bias = 3, c.mask = Mask::kFull; });
        t.add("varlen/padded", c, mixed, causal, [](Case& c) { c.layout = Layout::kPadded, c.headdim_v = 40; });
        t.add("varlen/heads_first", c, mixed, [](Case& c) { c.layout = Layout::kHeadsFirst; });
        t.add("varlen/one", c, lengths({100}, {200}), causal);
        t.add("varlen/decode", c, lengths({1, 1, 1, 1}, {1, 700, 64, 333}), causal, heads(8, 2));
    }

    for (int i = 0; i < (quick ? 20 : 80); ++i) t.add(format("fuzz/seed%llu/%03d", (unsigned long long)seed, i), fuzz(seed, i));
    return t.all();
}
