// narrow_kernel.h: a few rows of queries against their keys, as in decoding, where a lane for each query would be wasted. Included by
// tile_kernel.h inside an instruction set's namespace.
//
// Vectors lie along headdim in the two products and along the keys in the softmax. Rows of K and V are read where they are, whatever
// their type, stride or page. Bound by the memory they come from.

constexpr int kNarrowRows = L / 4;
static_assert(kNarrowRows <= kTileKeys, "Q and O row by row take the place of the copies of K and V");

// Where the rows of K or V of some keys are, and how much their elements count if they are of 8 bits.
struct KeyRows {
    const char* at[kTileKeys];
    float scale[kTileKeys + L];

    void find(const AttentionParams& p, const TensorView& t, const CacheScale& factors, int64_t start, int32_t b, int32_t head, int first,
              int keys) {
        const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
        for_runs(p, t, factors, start, b, head, first, keys, [&](int i, int run, int64_t offset, const float* factor) {
            const char* from = address(t.data, offset, dtype);
            for (int end = i + run; i < end; ++i, from += t.row * element_size(dtype)) {
                at[i] = from;
                if (is_8bit(dtype)) scale[i] = *factor, factor += factors.row;
            }
        });
    }
};

FA_INLINE Vec lane_numbers() {
    Vec x;
    for (int l = 0; l < L; ++l) x[l] = float(l);
    return x;
}

template <int block>
FA_INLINE Vec max_from(Vec x) {
    if constexpr (block == L) return x;
    else return max_from<block * 2>(max(x, swapped<block>(x, typename MakeLanes<L>::Type())));
}

// s[j] = k[j] . q, in whole vectors; what lies behind the last key repeats it.
template <DType dtype>
FA_INLINE void narrow_scores(const char* const* k, const float* scale, int keys, const float* q, int headdim, float* s) {
    constexpr int size = int(element_size(dtype)), kRows = L < 8 ? L : 8;  // as many addresses as there are registers for
    for (int j = 0; j < keys; j += L) {
        Vec sum[L];
#pragma GCC unroll 2
        for (int half = 0; half < L; half += kRows) {
            const char* row[kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) row[i] = k[j + half + i < keys ? j + half + i : keys - 1];
            Vec acc[kRows] = {};
            int d = 0;
            for (; d + L <= headdim; d += L)
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) acc[i] += load_vector<dtype>(row[i] + d * size) * *(const Vec*)(q + d);
            if (d < headdim)
#pragma GCC unroll 8
                for (int i = 0; i < kRows; ++i) acc[i] += load_partial<dtype>(row[i] + d * size, headdim - d) * *(const Vec*)(q + d);
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) sum[half + i] = acc[i];
        }
        Vec score = sum_from<1, L>(sum);
        if (is_8bit(dtype)) score *= load_unaligned<Vec>(scale + j);
        *(Vec*)(s + j) = score;
    }
}

// out[d] = out[d] * correction + sum of p[j] v[j][d], for kVectors vectors of d, the last of `left` numbers.
template <DType dtype, int kVectors, bool whole>
FA_INLINE void narrow_output_block(const char* const* v, int keys, const float* p, int d, int left, float correction, float* out) {
    constexpr int size = int(element_size(dtype)), kWays = 4 / kVectors;  // as many sums as hide the latency of an addition
    Vec acc[kWays][kVectors] = {};
    const auto add = [&](int way, int j) __attribute__((always_inline)) {
        const char* const from = v[j] + int64_t(d) * size;
#pragma GCC unroll 4
        for (int n = 0; n < kVectors; ++n)
            acc[way][n] += p[j] * (whole ? load_vector<dtype>(from + n * L * size) : load_partial<dtype>(from, left));
    };
    int j = 0;
    for (; j + kWays <= keys; j += kWays)
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) add(way, j + way);
    for (; j < keys; ++j) add(0, j);
    for (int n = 0; n < kVectors; ++n) {
        Vec sum = acc[0][n];
        for (int way = 1; way < kWays; ++way) sum += acc[way][n];
        Vec& total = *(Vec*)(out + d + n * L);
        total = total * correction + sum;
    }
}
template <DType dtype>
FA_INLINE void narrow_output(const char* const* v, int keys, const float* p, int headdim_v, float correction, float* out) {
    int d = 0;
    for (; d + 4 * L <= headdim_v; d += 4 * L) narrow_output_block<dtype, 4, true>(v, keys, p, d, L, correction, out);
    if (d + 2 * L <= headdim_v) narrow_output_block<dtype, 2, true>(v, keys, p, d, L, correction, out), d += 2 * L;
    if (d + L <= headdim_v) narrow_output_block<dtype, 1, true>(v, keys, p, d, L, correction, out), d += L;
    if (d < headdim_v) narrow_output_block<dtype, 1, false>(v, keys, p, d, headdim_v - d, correction, out);
}

// One row of queries.
struct NarrowRow {
    const QueryTile& t;
    const AttentionParams& p;
    const QueryRow& row;
    float *const q, *const out, *const s;  // headdim and headdim_v numbers up to whole vectors, scores of a key tile
    float row_max, row_sum;

    void load_query() const {
        for (int d = 0; d < p.headdim; d += L) {
            const int64_t offset = t.sequence.q + row.head * p.q.head + row.query * p.q.row + d;
            *(Vec*)(q + d) = load_any(address(p.q.data, offset, p.dtype), p.headdim - d, p.dtype) * p.scale;
        }
        for (int d = 0; d < p.headdim_v; d += L) *(Vec*)(out + d) = Vec{};
    }

    // Scores of the keys from `key` on, in the contract's order.
    void transform(int key, int keys) const {
        const int64_t here = int64_t(row.query) + t.sequence.shift - key;
        for (int j = 0; j < keys; j += L) {
            Vec& score = *(Vec*)(s + j);
            if (p.softcap != 0) score = p.softcap * tanh(score * (1 / p.softcap));
            if (p.alibi_slopes) {
                const float slope = p.alibi_slopes[t.batch * p.alibi_batch + row.head];
                score -= slope * abs(float(here) - (lane_numbers() + float(j)));
            }
            if (p.bias.data) {
                const int64_t offset = t.batch * p.bias.batch + row.head * p.bias.head + row.query * p.bias.row + key + j;
                const Vec bias = load_any(address(p.bias.data, offset, p.bias_dtype), keys - j, p.bias_dtype);
                score = bias == -kInfinity ? bias : score + bias;
            }
            if (p.mask.data) {
                const int64_t offset = t.batch * p.mask.batch + row.head * p.mask.head + row.query * p.mask.row + key + j;
                const char* const mask = static_cast<const char*>(p.mask.data) + offset;
                for (int l = 0; l < L && j + l < keys; ++l)
                    if (!mask[l]) score[l] = -kInfinity;
            }
        }
        if (!p.tree.rows) return;
        const int first = t.sequence.seqlen_k - p.tree.keys - key;  // the key of bit 0, counted from `key`
        if (keys <= first) return;
        const uint64_t bits = p.tree.rows[t.batch * p.tree.batch + row.query * p.tree.row];
        for (int j = first > 0 ? first : 0; j < keys; ++j)
            if (!(bits >> (j - first) & 1)) s[j] = -kInfinity;
    }

    // S becomes P: new row_max and row_sum. Returns what the old O has to be multiplied with.
    float softmax(int keys) {
        if (keys % L) {
            Vec& last = *(Vec*)(s + keys / L * L);
            last = lane_numbers() < float(keys % L) ? last : splat(-kInfinity);
        }
        Vec highest = splat(row_max);
        for (int j = 0; j < keys; j += L) highest = max(*(const Vec*)(s + j), highest);
        const float new_max = max_from<1>(highest)[0];
        // A row that saw nothing yet has row_max = -inf; -inf - -inf would be NaN, so it subtracts 0 instead.
        const float shift = new_max == -kInfinity ? 0 : new_max;
        Vec sum = {};
        for (int j = 0; j < keys; j += L) {
            Vec& x = *(Vec*)(s + j);
            x = exp(x - shift);
            sum += x;
        }
        const float correction = exp(splat(row_max - shift))[0];
        row_sum = row_sum * correction + sum_from<1, 1>(&sum)[0];
        row_max = new_max;
        return correction;
    }

    // Keys begin .. end - 1 of the tile that starts at `first`.
    template <DType dtype>
    void attend(const KeyRows& k, const KeyRows& v, int first, int begin, int end) {
        int keys = end - begin;
        narrow_scores<dtype>(k.at + begin, k.scale + begin, keys, q, p.headdim, s);
        transform(first + begin, keys);
        const char* const* values = v.at + begin;
        const float* scale = v.scale + begin;
        KeyRows visible;
        if (hides(keys)) {  // 0 x NaN must not bring the value of a hidden key into the output
            int count = 0;
            for (int j = 0; j < keys; ++j) {
                if (s[j] == -kInfinity) continue;
                s[count] = s[j], visible.at[count] = values[j], visible.scale[count] = is_8bit(dtype) ? scale[j] : 1;
                ++count;
            }
            values = visible.at, scale = visible.scale, keys = count;
        }
        const float correction = softmax(keys);
        if (is_8bit(dtype))
            for (int j = 0; j < keys; ++j) s[j] *= scale[j];
        narrow_output<dtype>(values, keys, s, p.headdim_v, correction, out);
    }
    bool hides(int keys) const {
        bool any = false;
        for (int j = 0; j < keys; ++j) any |= s[j] == -kInfinity;
        return any;
    }

    void store_output() const {
        const float weight = row_sum == 0 ? 0 : 1 / row_sum;
        const int64_t offset = t.sequence.out + row.head * p.out.head + row.query * p.out.row;
        for (int d = 0; d < p.headdim_v; d += L)
            store_any(const_cast<char*>(address(p.out.data, offset + d, p.out_dtype)), p.headdim_v - d, p.out_dtype,
                      *(const Vec*)(out + d) * weight);
    }
};
