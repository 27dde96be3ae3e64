// problem.h: makes the arrays of a case on the device. Memory that the library must not read holds NaN; memory that it must not
// write holds canaries.
#pragma once

#include "cases.h"

constexpr int64_t kGuard = 64;               // elements with canaries before and after an output
constexpr uint32_t kCanary32 = 0x7FC0BEEFu;  // both are NaNs that no arithmetic produces
constexpr uint16_t kCanary16 = 0x7FCDu;
constexpr uint8_t kCanary8 = 0x7F;  // for inputs only

inline void fill_with_canary(void* data, int64_t elements, size_t element) {
    for (int64_t i = 0; i < elements; ++i)
        if (element == 4) static_cast<uint32_t*>(data)[i] = kCanary32;
        else if (element == 1) static_cast<uint8_t*>(data)[i] = kCanary8;
        else static_cast<uint16_t*>(data)[i] = kCanary16;
}
inline bool is_canary(const void* data, int64_t i, size_t element) {
    return element == 4 ? static_cast<const uint32_t*>(data)[i] == kCanary32 : static_cast<const uint16_t*>(data)[i] == kCanary16;
}

// A (batch, rows, heads, dim) array in some layout: its contents on the host and its buffer on the device.
struct Tensor {
    int32_t dtype = FA_FLOAT32;
    int64_t batch = 0, rows = 0, heads = 0, dim = 0;
    int64_t batch_stride = 0, row_stride = 0, head_stride = 0, origin = 0;
    std::vector<unsigned char> host;
    Buffer device;

    Tensor() = default;
    Tensor(int32_t dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim, Layout layout, int64_t guard)
        : dtype(dtype), batch(batch), rows(rows), heads(heads), dim(dim), origin(guard) {
        head_stride = dim, row_stride = heads * dim, batch_stride = rows * row_stride;
        int64_t elements = batch * batch_stride;
        if (layout == Layout::kHeadsFirst) row_stride = dim, head_stride = rows * dim;
        if (layout == Layout::kPadded) {
            head_stride = dim + 3, row_stride = heads * head_stride + 5, batch_stride = rows * row_stride + 7;
            elements = 1 + batch * batch_stride, origin += 1;
        }
        if (layout == Layout::kBroadcast) batch_stride = 0, head_stride = 0, row_stride = dim, elements = rows * dim;
        if (layout == Layout::kReversed && rows > 0) origin += (rows - 1) * row_stride, row_stride = -row_stride;
        host.resize(size_t(elements + 2 * guard) * element_size(dtype));
        fill_with_canary(host.data(), elements + 2 * guard, element_size(dtype));
    }
    int64_t at(int64_t b, int64_t row, int64_t head, int64_t d = 0) const {
        return origin + b * batch_stride + row * row_stride + head * head_stride + d;
    }
    float value(int64_t b, int64_t row, int64_t head, int64_t d) const { return get(host.data(), at(b, row, head, d), dtype); }
    void set(int64_t b, int64_t row, int64_t head, int64_t d, double value) { put(host.data(), at(b, row, head, d), dtype, value); }
    int64_t elements() const { return int64_t(host.size() / element_size(dtype)); }
    void place(fa_device where) { device = Buffer(where, host.data(), host.size()); }
    fa_tensor view() const {
        return {device.as<unsigned char>() + size_t(origin) * element_size(dtype), batch_stride, row_stride, head_stride};
    }

    // Fills the array with normally distributed numbers. After a million they repeat, at different places in the rows.
    void fill(Random& random, double magnitude) {
        const int64_t count = std::min<int64_t>(batch * rows * heads * dim, 1048573);
        const size_t element = element_size(dtype);
        std::vector<unsigned char> pool(size_t(count) * element);
        for (int64_t i = 0; i < count; ++i) put(pool.data(), i, dtype, magnitude * random.normal());
        int64_t next = 0;
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t h = 0; h < heads; ++h)
                    for (int64_t d = 0, n; d < dim; d += n) {
                        n = std::min(dim - d, count - next);
                        std::memcpy(host.data() + size_t(at(b, i, h, d)) * element, pool.data() + size_t(next) * element,
                                    size_t(n) * element);
                        if ((next += n) == count) next = 0;
                    }
    }
    void fill_row(int64_t b, int64_t row, int64_t head, double value) {
        for (int64_t d = 0; d < dim; ++d) set(b, row, head, d, value);
    }
};

// The location of sequence `index` of a dense or varlen problem in the tensors.
struct Span {
    int64_t index, tensor_batch, q_begin, q_rows, k_begin, k_rows;
};

struct Scores {  // bias or mask: (batch, nheads, rows, columns), with the strides that the library gets
    std::vector<unsigned char> host;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;
    Buffer device;
    int64_t at(int64_t b, int64_t h, int64_t i, int64_t j) const { return b * batch_stride + h * head_stride + i * row_stride + j; }
    fa_score_tensor view() const { return {device.data(), batch_stride, head_stride, row_stride}; }
};

class Problem {
public:
    const Case c;
    const fa_device device;
    std::vector<Span> spans;
    Tensor q, k, v, out;
    std::vector<float> slopes, sinks;
    Scores bias, mask;
    std::vector<int32_t> intervals;  // (tensors, heads, rows of k, numbers)
    Scores blocks;                   // of block_mask
    Buffer intervals_device;
    std::vector<float> q_descale, k_descale, v_descale;  // (batch, heads), when the inputs are float8
    Buffer lse_device, descale_device[3], slopes_device, sinks_device, cu_q_device, cu_k_device;
    int64_t lse_elements = 0;
    int32_t bias_dtype = FA_FLOAT32;
    int32_t num_threads = 0;

    Problem(const Case& which, fa_device where, uint64_t seed) : c(which), device(where) {
        Random random(hash_name(c.name) ^ seed * 0x9E3779B97F4A7C15u);
        const int64_t spare = c.varlen() ? 3 : 0;  // rows that belong to no sequence
        std::vector<int32_t> cu_q = {0}, cu_k = {0};
        for (int64_t b = 0; b < c.batch; ++b) {
            if (c.varlen()) {
                spans.push_back({b, 0, cu_q.back(), c.lengths_q[b], cu_k.back(), c.lengths_k[b]});
                cu_q.push_back(cu_q.back() + c.lengths_q[b]), cu_k.push_back(cu_k.back() + c.lengths_k[b]);
            } else {
                spans.push_back({b, b, 0, c.seqlen_q, 0, c.seqlen_k});
            }
        }
        const int64_t tensors = c.varlen() ? 1 : c.batch;
        const int64_t rows_q = c.varlen() ? cu_q.back() + spare : c.seqlen_q, rows_k = c.varlen() ? cu_k.back() + spare : c.seqlen_k;
        const bool out_is_plain = c.layout == Layout::kBroadcast || c.layout == Layout::kReversed;
        q = Tensor(c.dtype, tensors, rows_q, c.nheads, c.headdim, c.layout, 0);
        k = Tensor(c.dtype, tensors, rows_k, c.nheads_k, c.headdim, c.layout, 0);
        v = Tensor(c.dtype, tensors, rows_k, c.nheads_k, c.dim_v(), c.layout, 0);
        const int32_t out_dtype = c.dtype == FA_FLOAT8_E4M3 ? int32_t(FA_BFLOAT16) : c.dtype;
        out = Tensor(out_dtype, tensors, rows_q, c.nheads, c.dim_v(), out_is_plain ? Layout::kContiguous : c.layout, kGuard);
        q.fill(random, c.constant ? 0 : c.magnitude);
        k.fill(random, c.magnitude);
        v.fill(random, 1);
        if (c.varlen()) {
            for (int64_t h = 0; h < c.nheads; ++h)
                for (int64_t i = rows_q - spare; i < rows_q; ++i) q.fill_row(0, i, h, NAN);
            for (int64_t h = 0; h < c.nheads_k; ++h)
                for (int64_t j = rows_k - spare; j < rows_k; ++j) k.fill_row(0, j, h, NAN), v.fill_row(0, j, h, NAN);
            cu_q_device = Buffer(device, cu_q.data(), cu_q.size() * 4), cu_k_device = Buffer(device, cu_k.data(), cu_k.size() * 4);
        }
        make_options(random);
        if (c.layout != Layout::kBroadcast && c.pairs() / c.headdim < 1 << 23) poison_unseen_keys();
        if (c.visible_nan) {
            k.set(0, rows_k / 2, 0, c.headdim / 2, NAN);
            v.set(tensors - 1, rows_k / 4, c.nheads_k - 1, c.dim_v() - 1, NAN);
        }
        lse_elements = tensors * rows_q * c.nheads;
        for (Tensor* t : {&q, &k, &v, &out}) t->place(device);
        lse_device = Buffer(device, size_t(lse_elements + 2 * kGuard) * 4);
        reset();
    }

    // Whether row i may attend to key j, as flash_attn.h defines it.
    bool sees(const Span& s, int64_t head, int64_t i, int64_t j) const {
        const int64_t aligned = c.top_left ? i : i + s.k_rows - s.q_rows;
        if (c.causal && j > aligned) return false;
        if (c.attention_chunk && std::floor(double(j) / c.attention_chunk) != std::floor(double(aligned) / c.attention_chunk)) return false;
        if (c.has_window && c.window_left >= 0 && j < aligned - c.window_left) return false;
        if (c.has_window && c.window_right >= 0 && j > aligned + c.window_right) return false;
        if (c.intervals) {
            const int32_t* n = &intervals[interval_place(s.tensor_batch, head * interval_heads() / c.nheads, s.k_begin + j)];
            if (c.intervals == 4   ? (n[0] <= i && i < n[1]) || (n[2] <= i && i < n[3])
                : c.intervals == 1 ? i >= n[0]
                : c.causal         ? n[0] <= i && i < n[1]
                                   : i >= n[0] || i < n[1])
                return false;
        }
        if (c.row_block && !blocks.host[size_t(blocks.at(s.index, head * interval_heads() / c.nheads, i / c.row_block, j / c.key_block))])
            return false;
        return mask.host.empty() || mask.host[size_t(mask.at(s.index, head, i, j))];
    }

    // Fills the outputs with canaries.
    void reset() {
        fill_with_canary(out.host.data(), out.elements(), element_size(out.dtype));
        out.device.upload(out.host.data());
        std::vector<uint32_t> lse(size_t(lse_elements + 2 * kGuard), kCanary32);
        lse_device.upload(lse.data());
    }

    fa_attention_args args() const {
        fa_attention_args a;
        std::memset(&a, 0, sizeof a);
        a.struct_size = sizeof a;
        a.device = device, a.dtype = c.dtype;
        a.batch = c.batch, a.nheads = c.nheads, a.nheads_k = c.nheads_k, a.headdim = c.headdim, a.headdim_v = c.headdim_v;
        a.seqlen_q = c.seqlen_q, a.seqlen_k = c.seqlen_k;
        a.q = q.view(), a.k = k.view(), a.v = v.view(), a.out = out.view();
        if (c.want_lse) a.lse = lse_device.as<float>() + kGuard;
        if (c.varlen()) {
            a.cu_seqlens_q = cu_q_device.as<int32_t>(), a.cu_seqlens_k = cu_k_device.as<int32_t>();
            a.total_q = q.rows, a.total_k = k.rows;
            a.q.batch_stride = a.k.batch_stride = a.v.batch_stride = a.out.batch_stride = -987654321;  // varlen ignores it
        }
        a.has_softmax_scale = c.has_scale, a.softmax_scale = c.scale, a.softcap = c.softcap;
        a.alibi_slopes = slopes_device.as<float>(), a.alibi_batch_stride = c.alibi == 2 ? c.nheads : 0;
        if (c.bias) a.bias = bias.view(), a.bias_dtype = c.bias_is_fp32 ? FA_FLOAT32 : 0;
        if (c.mask != Mask::kNone) a.mask = mask.view();
        if (c.intervals) {
            const int64_t head_stride = k.rows * c.intervals;
            a.startend_row_indices = {
                intervals_device.as<int32_t>(), interval_heads() * head_stride, head_stride, c.intervals, interval_heads(), c.intervals};
        }
        if (c.row_block)
            a.block_mask = {blocks.device.data(), blocks.batch_stride, blocks.head_stride, blocks.row_stride,
                            interval_heads(),     c.row_block,         c.key_block,        0};
        a.sinks = sinks_device.as<float>();
        a.causal = c.causal, a.top_left = c.top_left, a.has_window = c.has_window;
        a.window_left = c.window_left, a.window_right = c.window_right, a.attention_chunk = c.attention_chunk;
        a.dropout_p = c.dropout_p, a.dropout_seed = c.dropout_seed, a.dropout_offset = c.dropout_offset;
        a.allow_tf32 = c.allow_tf32, a.fast_accum = c.fast_accum;
        if (c.dtype == FA_FLOAT8_E4M3) {
            a.q_descale = {descale_device[0].as<float>(), c.nheads, 1}, a.k_descale = {descale_device[1].as<float>(), c.nheads_k, 1};
            a.v_descale = {descale_device[2].as<float>(), c.nheads_k, 1};
        }
        a.num_threads = num_threads;
        return a;
    }

    // The factor of the elements of a head in one sequence; 1 unless the inputs are float8.
    float descale(const std::vector<float>& factors, const Span& s, int64_t head) const {
        return factors.empty() ? 1.0f : factors[size_t(s.index * int64_t(factors.size()) / c.batch + head)];
    }

private:
    int32_t interval_heads() const { return c.interval_heads == 0 ? 1 : c.interval_heads == 1 ? c.nheads_k : c.nheads; }
    size_t interval_place(int64_t tensor, int64_t head, int64_t key) const {
        return size_t(((tensor * interval_heads() + head) * k.rows + key) * c.intervals);
    }

    void make_options(Random& random) {
        if (c.dtype == FA_FLOAT8_E4M3)
            for (int i = 0; i < 3; ++i) {
                std::vector<float>& factors = i == 0 ? q_descale : i == 1 ? k_descale : v_descale;
                for (int64_t h = 0; h < int64_t(c.batch) * (i == 0 ? c.nheads : c.nheads_k); ++h)
                    factors.push_back(float(0.5 + random.uniform()));
                descale_device[i] = Buffer(device, factors.data(), factors.size() * 4);
            }
        if (c.alibi) {
            for (int64_t h = 0; h < c.nheads * (c.alibi == 2 ? c.batch : 1); ++h) slopes.push_back(float(std::exp2(-8 * random.uniform())));
            slopes_device = Buffer(device, slopes.data(), slopes.size() * 4);
        }
        if (c.sinks) {
            for (int64_t h = 0; h < c.nheads; ++h) sinks.push_back(c.sinks == 2 && h % 2 ? -INFINITY : float(2 * random.normal()));
            sinks_device = Buffer(device, sinks.data(), sinks.size() * 4);
        }
        if (c.intervals) {  // runs of keys with the same numbers, some of which are beyond the rows
            intervals.resize(size_t(k.batch * interval_heads() * k.rows * c.intervals));
            const int64_t run = random.integer(1, std::max<int64_t>(k.rows / 2, 1));
            for (size_t x = 0; x < intervals.size(); ++x)
                if (const int64_t key = int64_t(x) / c.intervals; key % run && x >= size_t(c.intervals))
                    intervals[x] = intervals[x - c.intervals];
                else
                    intervals[x] =
                        random.chance(0.1) ? (random.chance(0.5) ? INT32_MIN : INT32_MAX) : int32_t(random.integer(-2, c.seqlen_q + 2));
            intervals_device = Buffer(device, intervals.data(), intervals.size() * 4);
        }
        const int64_t sq = c.seqlen_q, sk = c.seqlen_k, pad = 5;
        if (c.row_block) {
            const int64_t rows = (sq + c.row_block - 1) / c.row_block;
            blocks.row_stride = (sk + c.key_block - 1) / c.key_block + pad;
            blocks.head_stride = rows * blocks.row_stride, blocks.batch_stride = interval_heads() * blocks.head_stride;
            for (int64_t x = 0; x < c.batch * blocks.batch_stride; ++x)
                blocks.host.push_back(random.chance(0.5) ? 0 : uint8_t(random.integer(1, 255)));
            blocks.device = Buffer(device, blocks.host.data(), blocks.host.size());
        }
        if (c.bias) {
            bias_dtype = c.bias_is_fp32 ? FA_FLOAT32 : c.dtype;
            bias.row_stride = sk + pad;
            if (c.bias != 2) bias.head_stride = (c.bias == 3 ? 1 : sq) * bias.row_stride, bias.batch_stride = c.nheads * bias.head_stride;
            if (c.bias == 3) bias.row_stride = 0;
            const int64_t slabs = c.bias == 2 ? 1 : int64_t(c.batch) * c.nheads, rows = c.bias == 3 ? 1 : sq;
            bias.host.resize(size_t(slabs * rows * (sk + pad)) * element_size(bias_dtype));
            int64_t next = 0;
            for (int64_t row = 0; row < slabs * rows; ++row)
                for (int64_t j = 0; j < sk + pad; ++j)
                    put(bias.host.data(), next++, bias_dtype,
                        j >= sk                                       ? NAN
                        : c.bias_has_infinities && random.chance(0.3) ? -INFINITY
                                                                      : random.normal());
            bias.device = Buffer(device, bias.host.data(), bias.host.size());
        }
        if (c.mask != Mask::kNone) {
            const bool per_head = c.mask == Mask::kFull;
            mask.row_stride = sk + pad;
            if (per_head) mask.head_stride = sq * mask.row_stride, mask.batch_stride = c.nheads * mask.head_stride;
            const int64_t slabs = per_head ? int64_t(c.batch) * c.nheads : 1;
            const int64_t never = random.integer(0, std::max<int64_t>(sk - 1, 0));  // one key that no row sees
            for (int64_t row = 0; row < slabs * sq; ++row) {
                const bool hole = c.mask == Mask::kNothing || (c.mask == Mask::kHoles && row % 3 == 1);
                for (int64_t j = 0; j < sk + pad; ++j)
                    mask.host.push_back(j >= sk ? 1 : hole || j == never || random.chance(0.3) ? 0 : uint8_t(random.integer(1, 255)));
            }
            mask.device = Buffer(device, mask.host.data(), mask.host.size());
        }
    }

    void poison_unseen_keys() {
        const int64_t group = c.nheads / c.nheads_k;
        for (const Span& s : spans)
            for (int64_t head_k = 0; head_k < c.nheads_k; ++head_k)
                for (int64_t j = 0; j < s.k_rows; ++j) {
                    bool seen = false;
                    for (int64_t h = head_k * group; h < (head_k + 1) * group && !seen; ++h)
                        for (int64_t i = 0; i < s.q_rows && !seen; ++i) seen = sees(s, h, i, j);
                    if (seen) continue;
                    k.fill_row(s.tensor_batch, s.k_begin + j, head_k, j % 2 ? NAN : INFINITY);
                    v.fill_row(s.tensor_batch, s.k_begin + j, head_k, j % 2 ? NAN : -INFINITY);
                }
    }
};
