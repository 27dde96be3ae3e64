// narrow_kernel.h: a few rows of queries against their keys, as in decoding, where one lane per query would waste most lanes. Included by
// tile_kernel.h inside an instruction set's namespace.
//
// Vectors run along headdim in the two products and along the keys in the softmax. Rows of K and V are read in place, whatever their type,
// stride or page. Bound by reading them from memory.

constexpr int kNarrowRows = L / 2;
constexpr int kNarrowTogether = kVectors < kNarrowRows ? kVectors : kNarrowRows;  // rows that share each load of K and V
static_assert(kNarrowRows <= kTileKeys, "Q and O row by row take the place of the copies of K and V");
static_assert(kNarrowRows <= 64 / int(sizeof(float)), "each row has its scores; there is room for a cache line's number of rows");

// The addresses of the rows of K or V of some keys, and the factors of their elements if these have 8 bits.
struct KeyRows {
    const char* at[kTileKeys];
    float scale[kTileKeys + L];
    int count, bytes;  // number of rows, and bytes of one row

    void find(const AttentionParams& p, const TensorView& t, const CacheScale& factors, int64_t start, int32_t b, int32_t head, int first,
              int keys, int dim) {
        const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
        count = keys, bytes = int(dim * element_size(dtype));
        for_runs(p, t, factors, start, b, head, first, keys, [&](int i, int run, int64_t offset, const float* factor) {
            const char* const from = address(t.data, offset, dtype);
            for (int r = 0; r < run; ++r) at[i + r] = from + r * t.row * element_size(dtype);
            if (is_8bit(dtype))
                for (int r = 0; r < run; ++r) scale[i + r] = factor[r * factors.row];
        });
    }
    // The processor itself prefetches only adjacent rows. The target is the L2 cache, because L1 cannot hold K and V of two tiles.
    void prefetch(int i) const {
        for (int byte = 0; i < count && byte < bytes; byte += 64) __builtin_prefetch(at[i] + byte, 0, 2);
    }
};

FA_INLINE Vec lane_numbers() {
    Vec x;
    for (int l = 0; l < L; ++l) x[l] = float(l);
    return x;
}

template <int n>
struct Width {
    static constexpr int value = n;
};

template <int block>
FA_INLINE Vec max_from(Vec x) {
    if constexpr (block == L) return x;
    else return max_from<block * 2>(max(x, swapped<block>(x, typename MakeLanes<L>::Type())));
}

// out[n][d] = out[n][d] * correction[n] + sum of p[n][j] v[j][d], for kColumns vectors of d, of which the last has `left` numbers.
template <DType dtype, int kQueries, int kColumns, bool whole>
FA_INLINE void narrow_output_block(const char* const* v, int keys, const float* const* p, int d, int left, const float* correction,
                                   float* const* out, const KeyRows* ahead) {
    constexpr int size = int(element_size(dtype)), kWays = 4 / kColumns;  // enough sums to hide the latency of an addition
    Vec acc[kQueries][kWays][kColumns] = {};
    const auto add = [&](int way, int j) __attribute__((always_inline)) {
        const char* const from = v[j] + int64_t(d) * size;
        if (ahead) ahead->prefetch(j);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
            const Vec value = whole ? load_vector<dtype>(from + c * L * size) : load_partial<dtype>(from, left);
#pragma GCC unroll 4
            for (int n = 0; n < kQueries; ++n) acc[n][way][c] += p[n][j] * value;
        }
    };
    int j = 0;
    for (; j + kWays <= keys; j += kWays)
#pragma GCC unroll 4
        for (int way = 0; way < kWays; ++way) add(way, j + way);
    for (; j < keys; ++j) add(0, j);
#pragma GCC unroll 4
    for (int n = 0; n < kQueries; ++n)
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
            Vec sum = acc[n][0][c];
            for (int way = 1; way < kWays; ++way) sum += acc[n][way][c];
            Vec& total = *(Vec*)(out[n] + d + c * L);
            total = total * correction[n] + sum;
        }
}
template <DType dtype, int kQueries>
void narrow_output(const char* const* v, int keys, const float* const* p, int headdim_v, const float* correction, float* const* out,
                   const KeyRows* ahead) {
    int d = 0;
    const auto block = [&](auto columns, auto whole) __attribute__((always_inline)) {
        constexpr int kColumns = decltype(columns)::value;
        narrow_output_block<dtype, kQueries, kColumns, decltype(whole)::value>(v, keys, p, d, headdim_v - d, correction, out, ahead);
        d += kColumns * L, ahead = nullptr;
    };
    while (d + 4 * L <= headdim_v) block(Width<4>(), Flag<true>());
    if (d + 2 * L <= headdim_v) block(Width<2>(), Flag<true>());
    if (d + L <= headdim_v) block(Width<1>(), Flag<true>());
    if (d < headdim_v) block(Width<1>(), Flag<false>());
}

// One row of queries.
struct NarrowRow {
    const QueryTile* tile;
    const QueryRow* row;
    float *q, *out, *s;  // headdim and headdim_v floats, rounded up to whole vectors; the scores of one key tile
    float row_max, row_sum, greatest;

    void load_query() const {
        const QueryTile& t = *tile;
        const AttentionParams& p = *t.params;
        for (int d = 0; d < p.headdim; d += L) {
            const int64_t offset = t.sequence.q + row->head * p.q.head + row->query * p.q.row + d;
            *(Vec*)(q + d) = load_any(address(p.q.data, offset, p.dtype), p.headdim - d, p.dtype);
        }
        for (int d = 0; d < p.headdim_v; d += L) *(Vec*)(out + d) = Vec{};
    }

    // Applies the options of a score to the keys from `key` on, in the order of the contract.
    void transform(int key, int keys) const {
        const QueryTile& t = *tile;
        const AttentionParams& p = *t.params;
        const int64_t here = int64_t(row->query) + t.sequence.shift - key;
        for (int j = 0; j < keys; j += L) {
            Vec& score = *(Vec*)(s + j);
            if (p.softcap != 0) score = p.softcap * tanh(score * (1 / p.softcap));
            if (p.alibi_slopes) {
                const float slope = p.alibi_slopes[t.batch * p.alibi_batch + row->head];
                score -= slope * abs(float(here) - (lane_numbers() + float(j)));
            }
            if (p.bias.data) {
                const int64_t offset = t.batch * p.bias.batch + row->head * p.bias.head + row->query * p.bias.row + key + j;
                const Vec bias = load_any(address(p.bias.data, offset, p.bias_dtype), keys - j, p.bias_dtype);
                score = bias == -kInfinity ? bias : score + bias;
            }
            if (p.mask.data) {
                const int64_t offset = t.batch * p.mask.batch + row->head * p.mask.head + row->query * p.mask.row + key + j;
                const char* const mask = static_cast<const char*>(p.mask.data) + offset;
                for (int l = 0; l < L && j + l < keys; ++l)
                    if (!mask[l]) score[l] = -kInfinity;
            }
        }
        if (p.intervals.data) {
            const int32_t* numbers = row_indices_of(p, t.batch, row->head) + int64_t(key) * p.intervals.key;
            for (int j = 0; j < keys; ++j, numbers += p.intervals.key)
                if (hidden_rows(p, numbers).hides(row->query)) s[j] = -kInfinity;
        }
        if (p.blocks.data) {
            const uint8_t* const shown = blocks_of_row(p, t.batch, row->head, row->query);
            for (int j = 0; j < keys; ++j)
                if (!shown[(key + j) >> p.blocks.key_shift]) s[j] = -kInfinity;
        }
        if (!p.tree.rows) return;
        const int first = t.sequence.seqlen_k - p.tree.keys - key;  // the key of bit 0, counted from `key`
        if (keys <= first) return;
        const uint64_t bits = p.tree.rows[t.batch * p.tree.batch + row->query * p.tree.row];
        for (int j = first > 0 ? first : 0; j < keys; ++j)
            if (!(bits >> (j - first) & 1)) s[j] = -kInfinity;
    }

    // Turns S into P and updates row_max, row_sum and greatest. Returns the factor by which the old O must be multiplied.
    float softmax(int keys) {
        if (keys % L) {
            Vec& last = *(Vec*)(s + keys / L * L);
            last = lane_numbers() < float(keys % L) ? last : splat(-kInfinity);
        }
        Vec highest = splat(greatest);
        for (int j = 0; j < keys; j += L) highest = max(*(const Vec*)(s + j), highest);
        greatest = max_from<1>(highest)[0];
        const float new_max = max(splat(greatest), splat(row_max))[0];
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

    bool hides(int keys) const {
        bool any = false;
        for (int j = 0; j < keys; ++j) any |= s[j] == -kInfinity;
        return any;
    }

    // Returns whether the row is spoiled, so that exact_row.h has to compute it again.
    bool store_output() const {
        const QueryTile& t = *tile;
        const AttentionParams& p = *t.params;
        const float weight = row_sum == 0 ? 0 : 1 / row_sum;
        const int64_t offset = t.sequence.out + row->head * p.out.head + row->query * p.out.row;
        Vec poison = {};
        for (int d = 0; d < p.headdim_v; d += L) {
            const Vec x = *(const Vec*)(out + d) * weight;
            poison += x * 0.0f;
            store_any(const_cast<char*>(address(p.out.data, offset + d, p.out_dtype)), p.headdim_v - d, p.out_dtype, x);
        }
        return is_spoiled(t, *row, row_sum, sum_from<1, 1>(&poison)[0]);
    }
};

// Keys begin .. end - 1 of the tile that starts at `first`, for rows that share the loads: each row of K and V is loaded and widened
// once. The arithmetic of a query row does not depend on the rows beside it. While K is read, V is prefetched; while V is read, K of
// the next tile.
template <DType dtype, int kQueries>
void attend_narrow(NarrowRow* rows, const KeyRows& k, const KeyRows& v, const KeyRows* next_k, bool ahead, int first, int begin, int end) {
    const AttentionParams& p = *rows[0].tile->params;
    const int keys = end - begin;
    const float *q[kQueries], *weights[kQueries];
    float *s[kQueries], *out[kQueries], correction[kQueries];
    for (int n = 0; n < kQueries; ++n) q[n] = rows[n].q, weights[n] = s[n] = rows[n].s, out[n] = rows[n].out;
    const KeyRows* const values = ahead ? &v : nullptr;
    const auto prefetch = [values](int key) __attribute__((always_inline)) {
        if (values) values->prefetch(key);
    };
    row_products<dtype, kQueries>(k.at + begin, k.scale + begin, keys, q, p.headdim, p.scale, s, prefetch);
    bool hidden = false;
    for (int n = 0; n < kQueries; ++n) rows[n].transform(first + begin, keys), hidden |= rows[n].hides(keys);

    const auto weigh = [&](int n, const float* scale, int count) {
        correction[n] = rows[n].softmax(count);
        if (is_8bit(dtype))
            for (int j = 0; j < count; ++j) s[n][j] *= scale[j];
    };
    if (!hidden) {
        for (int n = 0; n < kQueries; ++n) weigh(n, v.scale + begin, keys);
        narrow_output<dtype, kQueries>(v.at + begin, keys, weights, p.headdim_v, correction, out, next_k);
        return;
    }
    for (int n = 0; n < kQueries; ++n) {  // the value of a hidden key must not reach the output: 0 x NaN would be NaN
        KeyRows visible;
        int count = 0;
        for (int j = 0; j < keys; ++j) {
            if (s[n][j] == -kInfinity) continue;
            s[n][count] = s[n][j], visible.at[count] = v.at[begin + j], visible.scale[count] = is_8bit(dtype) ? v.scale[begin + j] : 1;
            ++count;
        }
        weigh(n, visible.scale, count);
        narrow_output<dtype, 1>(visible.at, count, weights + n, p.headdim_v, correction + n, out + n, nullptr);
    }
}
