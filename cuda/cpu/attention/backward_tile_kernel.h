// backward_tile_kernel.h: one block of queries against one tile of keys, the inner part of the CPU's backward pass. tiles_<isa>.cpp
// compiles it once per instruction set, like tile_kernel.h, and defines one more macro:
//     FA_BACKWARD_TILE  the BackwardTileKernel to define
//
// The block goes through the tile in panels of kPanelKeys keys, with five matrix products each:
//     S = Q K^T    dP = dO V^T    dV += P^T dO    dK += dS^T Q    dQ += dS K
// Each product is a sum of (an element of the left matrix, broadcast) x (a vector from a row of the right matrix). K and V of the tile are
// transposed beforehand, so the lanes of S are keys, the lanes of every gradient are head dims, and no operation is horizontal. The
// statistics and delta are one number per row; bias and mask are read along their rows. Bound by the multiply-add units: a register tile of
// 6 x 4 vectors (6 x 2 with 16 registers) does 24 (12) multiply-adds per 10 (8) loads.
//
// A hidden pair has P = -0, which no exponential returns, and dS = 0. If Q, dO and K are finite, the products add hidden pairs like any
// other. If not, the products recognise hidden pairs by this -0 and leave them out.
#include <stddef.h>
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/attention/backward_tile.h"

namespace fa::cpu::FA_ISA {
namespace {

#include "cpu/attention/row_products.h"

constexpr int kPanelVectors = kPanelKeys / L;
static_assert(kPanelKeys % (kVectors * L) == 0 && kPanelKeys == kDropoutColumns, "whole register tiles, whole blocks of dropout");

FA_INLINE int vectors_of(int dim) { return (dim + L - 1) / L; }

// Prefetches the rows of the next block while this block is computed, a few cache lines at a time. The processor does not prefetch these
// rows by itself.
struct NextBlock {
    struct Rows {
        const char* at;
        int64_t stride, bytes;  // bytes between rows, and bytes of one row
        int rows;
    };
    static constexpr int kLines = 6;  // per register tile; a key tile of kMaxTileKeys keys then prefetches every row of the block
    Rows matrix[3];                   // Q, dO, dQ
    int64_t byte = 0;
    int current = 0;

    void advance() {
        for (int line = 0; line < kLines && current < 3; ++line) {
            Rows& m = matrix[current];
            if (m.rows > 0) __builtin_prefetch(m.at + byte, 0, 2);
            byte += 64;
            if (byte < m.bytes) continue;
            byte = 0, m.at += m.stride;
            if (--m.rows <= 0) ++current;
        }
    }
};

// ---- C += A B, or C = A B, by register tiles. With kTransposed, A is passed as its transpose ----

template <bool kTransposed, int kHeight, int kWidth>
FA_INLINE void product_block(Matrix a, Matrix b, int length, bool add, Matrix c) {
    const float* right = b.data;
    for (int x0 = 0; x0 < length; x0 += kSumLength) {
        const int x1 = length - x0 < kSumLength ? length : x0 + kSumLength;
        Vec acc[kHeight][kWidth] = {};
        for (int x = x0; x < x1; ++x, right += b.ld) {
            Vec row[kWidth];
#pragma GCC unroll 4
            for (int n = 0; n < kWidth; ++n) row[n] = *(const Vec*)(right + n * L);
#pragma GCC unroll 12
            for (int i = 0; i < kHeight; ++i) {
                const Vec left = splat(kTransposed ? a.data[x * a.ld + i] : a.data[i * a.ld + x]);
#pragma GCC unroll 4
                for (int n = 0; n < kWidth; ++n) acc[i][n] += left * row[n];
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < kHeight; ++i)
#pragma GCC unroll 4
            for (int n = 0; n < kWidth; ++n) {
                Vec& sum = *(Vec*)(c.data + i * c.ld + n * L);
                sum = add || x0 > 0 ? sum + acc[i][n] : acc[i][n];
            }
    }
}
template <bool kTransposed, int kWidth>
void product_columns(Matrix a, Matrix b, int length, bool add, Matrix c, int rows, NextBlock& next) {
    constexpr int kHeight = height(kWidth);
    const auto left = [&](int i) { return kTransposed ? a.at(0, i) : a.at(i, 0); };
    int i = 0;
    for (; i + kHeight <= rows; i += kHeight) {
        product_block<kTransposed, kHeight, kWidth>(left(i), b, length, add, c.at(i, 0));
        next.advance();
    }
    for (; i + 4 <= rows; i += 4) product_block<kTransposed, 4, kWidth>(left(i), b, length, add, c.at(i, 0));
    for (; i + 2 <= rows; i += 2) product_block<kTransposed, 2, kWidth>(left(i), b, length, add, c.at(i, 0));
    for (; i < rows; ++i) product_block<kTransposed, 1, kWidth>(left(i), b, length, add, c.at(i, 0));
}
// A (rows, length), with kTransposed passed as (length, rows); B (length, vectors); C (rows, vectors)
template <bool kTransposed>
void product(Matrix a, Matrix b, int length, bool add, Matrix c, int rows, int vectors, NextBlock& next) {
    int n = 0;
    for (; n + kVectors <= vectors; n += kVectors)
        product_columns<kTransposed, kVectors>(a, b.at(0, n * L), length, add, c.at(0, n * L), rows, next);
    if (kVectors > 3 && vectors - n == 3) product_columns<kTransposed, 3>(a, b.at(0, n * L), length, add, c.at(0, n * L), rows, next);
    if (kVectors > 2 && vectors - n == 2) product_columns<kTransposed, 2>(a, b.at(0, n * L), length, add, c.at(0, n * L), rows, next);
    if (kVectors > 1 && vectors - n == 1) product_columns<kTransposed, 1>(a, b.at(0, n * L), length, add, c.at(0, n * L), rows, next);
}

// C += A B over the visible pairs only: for a hidden pair 0 times an infinity in B would be NaN. `p` is P at the same pairs as A.
template <bool kTransposed>
void visible_product(Matrix a, Matrix p, Matrix b, int length, Matrix c, int rows, int vectors) {
    for (int i = 0; i < rows; ++i)
        for (int x = 0; x < length; ++x) {
            const int64_t at = kTransposed ? x * a.ld + i : i * a.ld + x;
            uint32_t bits;
            __builtin_memcpy(&bits, p.data + at, sizeof bits);
            if (bits == 0x80000000u) continue;
            for (int n = 0; n < vectors; ++n) *(Vec*)(c.data + i * c.ld + n * L) += a.data[at] * *(const Vec*)(b.data + x * b.ld + n * L);
        }
}

// C = A B^T for few rows of A (rows, length) and up to kPanelKeys rows of B (columns, length). C has whole vectors, of which lanes past the
// last column repeat it.
void few_products(Matrix a, Matrix b, int length, Matrix c, int rows, int columns) {
    const char* row[kPanelKeys];
    for (int j = 0; j < columns; ++j) row[j] = (const char*)b.at(j, 0).data;
    for (int i = 0; i < rows; ++i) {
        const float* const left = a.at(i, 0).data;
        float* const to = c.at(i, 0).data;
        row_products<DType::kFloat32, 1>(row, nullptr, columns, &left, length, 1.0f, &to, [](int) {});
    }
}

// ---- a panel: S and dP, which become P and dS ----

struct Panel {
    const KeyTile& t;
    const QueryBlock& q;
    const AttentionParams& p;
    const int key;                                    // the first key of the panel, relative to the tile
    int row_begin, row_end;                           // the rows of the block that see a key of the panel
    int begin, end;                                   // the keys of the panel that such a row sees
    bool cut;                                         // masks by intervals hide some of these pairs
    HiddenRowsOf<KeysOfLanes> hidden[kPanelVectors];  // set where cut
    uint8_t numbers[(kBlockRows + L) * kPanelKeys];   // dropout: the random number of every pair, from row_begin on

    Panel(const KeyTile& tile, const QueryBlock& block, int first_key)
        : t(tile),
          q(block),
          p(tile.params->forward),
          key(first_key),
          row_begin(block.rows),
          row_end(0),
          begin(kPanelKeys),
          end(0),
          cut(false) {
        for (int i = 0; i < q.rows; ++i) {
            const int first = row_first(i), last = q.end[i] - t.first - key < keys() ? q.end[i] - t.first - key : keys();
            if (first >= last) continue;
            row_begin = row_begin < i ? row_begin : i, row_end = i + 1;
            begin = begin < first ? begin : first, end = end > last ? end : last;
        }
        if (p.blocks.data) apply_blocks();
        if (q.bounds && !empty()) apply_intervals();
    }
    // Leaves out the rows that a mask by blocks hides. The panel lies in one block of keys, and its rows in two blocks of rows at most, so
    // the rows that are left see the whole panel.
    void apply_blocks() {
        static_assert(kBlockRows == 96 && kPanelKeys == 64, "rows 96 x .. 96 x + 95 lie in two blocks of 64 rows");
        const auto hidden = [&](int i) { return block_hides(p, t.batch, q.head, q.first + i, t.first + key); };
        while (!empty() && hidden(row_begin)) ++row_begin;
        while (!empty() && hidden(row_end - 1)) --row_end;
    }
    // Leaves out the first and last rows and keys that masks by intervals hide altogether.
    __attribute__((noinline)) void apply_intervals() {
        const HiddenBounds& bounds = q.bounds[panel()];
        while (!empty() && bounds.hides_from_all(q.first + row_begin)) ++row_begin;
        while (!empty() && bounds.hides_from_all(q.first + row_end - 1)) --row_end;
        if (empty()) return;
        const int32_t first_query = q.first + row_begin, last_query = q.first + row_end - 1;
        cut = bounds.seen_by(first_query, last_query) != Seen::kEverything;
        if (!cut) return;
        const int32_t* const numbers = row_indices_of(p, t.batch, q.head) + int64_t(t.first + key) * p.intervals.key;
        for (HiddenRowsOf<KeysOfLanes>& rows : hidden) rows = {};
        int first = end, last = begin;  // of the keys that a row may see
        for (int j = begin; j < end; ++j) {
            const HiddenRows rows = hidden_rows(p, numbers + j * p.intervals.key);
            HiddenBounds one;
            one.clear(), one.add(rows);
            if (one.seen_by(first_query, last_query) != Seen::kNothing) first = first < j ? first : j, last = j + 1;
            for (int x = 0; x < 2; ++x) hidden[j / L].begin[x][j % L] = rows.begin[x], hidden[j / L].end[x][j % L] = rows.end[x];
        }
        begin = first, end = last;
        if (begin >= end) row_begin = row_end;
    }
    int keys() const { return t.keys - key < kPanelKeys ? t.keys - key : kPanelKeys; }
    int row_first(int i) const { return q.begin[i] > t.first + key ? q.begin[i] - t.first - key : 0; }
    bool empty() const { return row_begin >= row_end; }
    int rows() const { return row_end - row_begin; }
    int panel() const { return key / kPanelKeys; }

    // The parts of the matrices that belong to this panel.
    Matrix s() const { return {q.p + row_begin * kPanelKeys, kPanelKeys}; }
    Matrix dp() const { return {q.ds + row_begin * kPanelKeys, kPanelKeys}; }
    Matrix queries() const { return {q.q + row_begin * t.ld_k, t.ld_k}; }
    Matrix douts() const { return {q.dout + row_begin * t.ld_v, t.ld_v}; }

    // S without softmax_scale. Each product is summed in the order of the forward pass; with few rows that holds up to the L / 2 rows that
    // narrow_kernel.h serves.
    void scores(NextBlock& next) const {
        if (t.few_rows) return few_products(queries(), t.k.at(key, 0), p.headdim, s(), rows(), keys());
        const Matrix k_t = {t.k_t + int64_t(panel()) * p.headdim * kPanelKeys, kPanelKeys};
        product<false>(queries(), k_t, p.headdim, false, s(), rows(), kPanelVectors, next);
    }
    void scores_and_dp(NextBlock& next) const {
        scores(next);
        if (t.few_rows) return few_products(douts(), t.v.at(key, 0), p.headdim_v, dp(), rows(), keys());
        const Matrix v_t = {t.v_t + int64_t(panel()) * p.headdim_v * kPanelKeys, kPanelKeys};
        product<false>(douts(), v_t, p.headdim_v, false, dp(), rows(), kPanelVectors, next);
    }

    // Whether S is finite. An element of K that is not makes S of its key infinite or NaN, whatever the row of Q holds.
    bool finite_scores() const {
        Vec poison = {};
        for (int i = row_begin; i < row_end; ++i)
            for (int j = 0; j < keys(); j += L) poison += *(const Vec*)(q.p + i * kPanelKeys + j) * 0.0f;
        return sum_from<1, 1>(&poison)[0] == 0.0f;
    }

    void draw_dropout() {
        const DropoutOrigin& origin = t.origin;
        const IVec lane = lanes();
        for (int x = 0; x < 4 * rows(); x += L) {  // four Philox blocks cover a row of the panel
            const UVec call = (UVec)lane + uint32_t(x);
            UVec word[4];
            philox<kDropoutRounds>((call & 3u) + (origin.calls + dropout_call(uint32_t(t.first + key))),
                                   call / 4u + (origin.row + uint32_t(q.first + row_begin)), origin.head + uint32_t(q.head) + UVec{},
                                   origin.sequence + UVec{}, p.dropout_key, word);
            for (int w = 0; w < 4; ++w) {
                word[w] = dropout_numbers(word[w]);
                for (int l = 0; l < L; ++l) {
                    uint8_t* const to = numbers + (x + l) / 4 * kPanelKeys + 16 * w + 2 * ((x + l) % 4);
                    for (int i = 0; i < 4; ++i) to[i / 2 * 8 + i % 2] = uint8_t(word[w][l] >> dropout_number(i));
                }
            }
        }
    }

    // Turns a row of softmax_scale Q K^T into scores, in the order of the contract; hidden scores become -inf.
    // slope is d score / d (softmax_scale q . k).
    void transform(int i, Vec* s, Vec* slope) const {
        const int column = t.first + key, end = t.keys - key < kPanelKeys ? t.keys - key : kPanelKeys, query = q.first + i;
        if (p.softcap != 0)
            for (int n = 0; n < kPanelVectors; ++n) {
                const Vec x = tanh(s[n] * (1 / p.softcap));
                s[n] = p.softcap * x, slope[n] = 1.0f - x * x;
            }
        if (p.alibi_slopes) {
            const float alibi = p.alibi_slopes[t.batch * p.alibi_batch + q.head];
            const float distance = float(int64_t(query) + t.sequence.shift - column);
            for (int n = 0; n < kPanelVectors; ++n) s[n] -= alibi * abs(distance - float(n * L) - __builtin_convertvector(lanes(), Vec));
        }
        if (p.bias.data) {
            const int64_t row = t.batch * p.bias.batch + q.head * p.bias.head + query * p.bias.row + column;
            for (int n = 0; n * L < end; ++n) {
                const Vec bias = load_any(address(p.bias.data, row + n * L, p.bias_dtype), end - n * L, p.bias_dtype);
                s[n] = bias == -kInfinity ? bias : s[n] + bias;
            }
        }
        if (p.mask.data) {
            const char* row =
                static_cast<const char*>(p.mask.data) + t.batch * p.mask.batch + q.head * p.mask.head + query * p.mask.row + column;
            for (int n = 0; n * L < end; ++n) {
                char bytes[L] = {};
                __builtin_memcpy(bytes, row + n * L, size_t(end - n * L < L ? end - n * L : L));
                s[n] = __builtin_convertvector(load_unaligned<ByteVec>(bytes), IVec) == 0 ? splat(-kInfinity) : s[n];
            }
        }
        for (int n = 0; cut && n < kPanelVectors; ++n) s[n] = hidden[n].hides(splat(int32_t(query))) ? splat(-kInfinity) : s[n];
    }

    // softmax_scale Q K^T, rounded to float32 as in every other pass.
    Vec scaled(Vec s) const {
        s *= p.scale;
        round_now(s);
        return s;
    }

    // Turns a row of Q K^T into scores.
    void score_row(int i, Vec* s, Vec* slope) const {
        for (int n = 0; n < kPanelVectors; ++n) s[n] = scaled(s[n]), slope[n] = splat(1.0f);
        transform(i, s, slope);
    }

    // Turns S into P with dropout, and dP into dS = P (dP - delta) slope, times `factor`.
    template <bool kGeneral>
    void gradients(bool slopes, float factor) const {
        Vec slope[kPanelVectors], keep = splat(1.0f);
        for (int i = row_begin; i < row_end; ++i) {
            Vec *const s = (Vec*)(q.p + i * kPanelKeys), *const ds = (Vec*)(q.ds + i * kPanelKeys);
            const IVec first = splat(int32_t(row_first(i))), last = splat(int32_t(q.end[i] - t.first - key));
            if constexpr (kGeneral) score_row(i, s, slope);
            const Vec row_max = splat(q.row_max[i]), log_sum = splat(q.log_sum[i]);
            for (int n = 0; n < kPanelVectors; ++n) {
                const IVec column = lanes() + n * L;
                const Vec score = kGeneral ? s[n] : scaled(s[n]);
                const auto visible = (column >= first) & (column < last) & (score != -kInfinity);
                const Vec probability = FA_ISA::probability(score, row_max, log_sum);
                Vec weight = probability, grad = ds[n];
                if constexpr (kGeneral) {
                    if (p.dropout_threshold) {
                        const UVec random =
                            __builtin_convertvector(load_unaligned<ByteVec>(numbers + (i - row_begin) * kPanelKeys + n * L), UVec);
                        keep = random < p.dropout_threshold ? Vec{} : splat(p.dropout_scale);
                        weight *= keep, grad *= keep;
                    }
                }
                grad = probability * (grad - q.delta[i]) * factor;
                if constexpr (kGeneral)
                    if (slopes) grad *= slope[n];
                s[n] = visible ? weight : splat(-0.0f);
                ds[n] = visible ? grad : Vec{};
            }
        }
    }
    void gradients(bool slopes, float factor) {
        if (p.dropout_threshold) draw_dropout();
        if (p.changes_scores() || cut) gradients<true>(slopes, factor);
        else gradients<false>(slopes, factor);
    }

    // Updates the maximum and the sum of every row with the keys of the panel that it sees.
    template <bool kGeneral>
    void sum_rows(float* row_max, float* row_sum) const {
        Vec slope[kPanelVectors];
        for (int i = row_begin; i < row_end; ++i) {
            Vec* const s = (Vec*)(q.p + i * kPanelKeys);
            const IVec first = splat(int32_t(row_first(i))), last = splat(int32_t(q.end[i] - t.first - key));
            if constexpr (kGeneral) score_row(i, s, slope);
            float new_max = row_max[i];
            for (int n = 0; n < kPanelVectors; ++n) {
                const IVec column = lanes() + n * L;
                const Vec score = kGeneral ? s[n] : scaled(s[n]);
                s[n] = ((column >= first) & (column < last)) ? score : splat(-kInfinity);
                for (int l = 0; l < L; ++l) new_max = s[n][l] > new_max ? s[n][l] : new_max;
            }
            if (new_max == -kInfinity) continue;  // the row has not seen any key so far
            Vec sum = {};
            for (int n = 0; n < kPanelVectors; ++n) sum += probability(s[n], splat(new_max), Vec{});
            row_sum[i] *= exp(splat(row_max[i] - new_max))[0];
            for (int l = 0; l < L; ++l) row_sum[i] += sum[l];
            row_max[i] = new_max;
        }
    }

    FA_INLINE IVec lanes() {
        IVec x;
        for (int l = 0; l < L; ++l) x[l] = l;
        return x;
    }
};

// ---- the entry points ----

void delta(const BackwardParams& b, int64_t out, int64_t dout, int rows, float* delta) {
    const AttentionParams& p = b.forward;
    for (int i = 0; i < rows; ++i) {
        Vec sum = {};
        for (int d = 0; d < p.headdim_v; d += L)
            sum += load_any(address(b.dout.data, dout + i * b.dout.row + d, p.dtype), p.headdim_v - d, p.dtype) *
                   load_any(address(p.out.data, out + i * p.out.row + d, p.dtype), p.headdim_v - d, p.dtype);
        delta[i] = 0;
        for (int l = 0; l < L; ++l) delta[i] += sum[l];
    }
}

// Transposes (count, ld) to (panels, dim, kPanelKeys), with zeros past the last row.
void transpose_rows(const float* rows, int64_t ld, int count, int dim, float* panels) {
    for (int j = 0; j < (count + kPanelKeys - 1) / kPanelKeys * kPanelKeys; j += L) {
        float* const to = panels + int64_t(j / kPanelKeys) * dim * kPanelKeys + j % kPanelKeys;
        for (int d = 0; d < dim; d += L) {
            Vec x[L];
            for (int l = 0; l < L; ++l) x[l] = j + l < count ? *(const Vec*)(rows + (j + l) * ld + d) : Vec{};
            transpose(x);
            for (int i = 0; i < L && d + i < dim; ++i) *(Vec*)(to + (d + i) * kPanelKeys) = x[i];
        }
    }
}

// With few rows of queries, aligned rows of float32 are read and written where they lie, unless they lie whole pages apart: then they share
// few sets of the L1 cache, and a copy is faster. Returns whether `rows` has become these.
bool lie_in_place(const KeyTile& t, const TensorView& x, int64_t first, int dim, Matrix& rows) {
    const DType dtype = t.params->forward.dtype;
    float* const at = (float*)address(x.data, first, dtype);
    if (!t.few_rows || dtype != DType::kFloat32 || dim % L || x.row % L || x.row % 1024 == 0 || uintptr_t(at) % sizeof(Vec)) return false;
    rows = {at, x.row};
    return true;
}
// Returns whether all elements are finite; false if that is not known.
bool load_rows(const KeyTile& t, const TensorView& x, int64_t sequence, int dim, Matrix& rows) {
    const int64_t first = sequence + t.head_k * x.head + t.first * x.row;
    return !lie_in_place(t, x, first, dim, rows) && copy_rows(x, first, t.keys, dim, t.params->forward.dtype, rows.data, rows.ld);
}
void zero_rows(const KeyTile& t, const TensorView& x, int64_t sequence, int dim, Matrix& rows) {
    if (!t.params->accumulate) lie_in_place(t, x, sequence + t.head_k * x.head + t.first * x.row, dim, rows);
    for (int j = 0; j < t.keys; ++j) __builtin_memset(rows.at(j, 0).data, 0, size_t(vectors_of(dim)) * sizeof(Vec));
}

void load_keys(KeyTile& t, bool gradients) {
    const BackwardParams& b = *t.params;
    const AttentionParams& p = b.forward;
    t.finite_k = load_rows(t, p.k, t.sequence.k, p.headdim, t.k);
    load_rows(t, p.v, t.sequence.v, p.headdim_v, t.v);
    if (!t.few_rows) {  // V lies in dV until V^T has been made
        transpose_rows(t.k.data, t.ld_k, t.keys, p.headdim, t.k_t);
        transpose_rows(t.v.data, t.ld_v, t.keys, p.headdim_v, t.v_t);
    }
    if (!gradients) return;
    zero_rows(t, b.dk, t.gradients.dk, p.headdim, t.dk);
    zero_rows(t, b.dv, t.gradients.dv, p.headdim_v, t.dv);
}

int64_t row_of_q(const KeyTile& t, const QueryBlock& q, int32_t row) {
    const TensorView& view = t.params->forward.q;
    return t.sequence.q + q.head * view.head + row * view.row;
}
int64_t row_of_dout(const KeyTile& t, const QueryBlock& q, int32_t row) {
    const TensorView& view = t.params->dout;
    return t.gradients.dout + q.head * view.head + row * view.row;
}

struct Finite {
    bool q, dout;
};
Finite load_queries(const KeyTile& t, const QueryBlock& q) {
    const BackwardParams& b = *t.params;
    const AttentionParams& p = b.forward;
    return {copy_rows(p.q, row_of_q(t, q, q.first), q.rows, p.headdim, p.dtype, q.q, t.ld_k),
            copy_rows(b.dout, row_of_dout(t, q, q.first), q.rows, p.headdim_v, p.dtype, q.dout, t.ld_v)};
}
NextBlock next_block(const KeyTile& t, const QueryBlock& q) {
    const BackwardParams& b = *t.params;
    const AttentionParams& p = b.forward;
    const int64_t size = element_size(p.dtype);
    return {{{address(p.q.data, row_of_q(t, q, q.next), p.dtype), p.q.row * size, p.headdim * size, q.next_rows},
             {address(b.dout.data, row_of_dout(t, q, q.next), p.dtype), b.dout.row * size, p.headdim_v * size, q.next_rows},
             {(const char*)q.next_dq, q.next_ld * 4, p.headdim * 4, q.next_dq ? q.next_rows : 0}}};
}

void add_block(const KeyTile& t, QueryBlock& q) {
    const AttentionParams& p = t.params->forward;
    const Finite finite = load_queries(t, q);
    NextBlock next = next_block(t, q);
    __builtin_memset(q.dq, 0, size_t(q.rows * t.ld_k) * sizeof(float));
    for (int key = 0; key < t.keys; key += kPanelKeys) {
        Panel panel(t, q, key);
        if (panel.empty()) continue;
        panel.scores_and_dp(next);
        const bool finite_k = t.finite_k || (t.few_rows && panel.finite_scores());
        panel.gradients(p.softcap != 0, t.few_rows ? p.scale : 1);

        const int rows = panel.rows(), keys = panel.end - panel.begin, first = key + panel.begin;
        const Matrix weight = panel.s().at(0, panel.begin), grad = panel.dp().at(0, panel.begin);
        const Matrix k = t.k.at(first, 0), dk = t.dk.at(first, 0), dv = t.dv.at(first, 0);
        const Matrix dq = {q.dq + panel.row_begin * t.ld_k, t.ld_k};
        if (finite.dout) product<true>(weight, panel.douts(), rows, true, dv, keys, vectors_of(p.headdim_v), next);
        else visible_product<true>(weight, weight, panel.douts(), rows, dv, keys, vectors_of(p.headdim_v));
        if (finite.q) product<true>(grad, panel.queries(), rows, true, dk, keys, vectors_of(p.headdim), next);
        else visible_product<true>(grad, weight, panel.queries(), rows, dk, keys, vectors_of(p.headdim));
        if (finite_k) product<false>(grad, k, keys, true, dq, rows, vectors_of(p.headdim), next);
        else visible_product<false>(grad, weight, k, keys, dq, rows, vectors_of(p.headdim));
    }
}

void add_bias(const KeyTile& t, QueryBlock& q, float* dbias, int64_t row_stride) {
    load_queries(t, q);
    NextBlock next = next_block(t, q);
    for (int key = 0; key < t.keys; key += kPanelKeys) {
        Panel panel(t, q, key);
        if (panel.empty()) continue;
        panel.scores_and_dp(next);
        panel.gradients(false, 1);
        for (int i = panel.row_begin; i < panel.row_end; ++i)
            for (int j = panel.begin; j < panel.end; ++j) dbias[i * row_stride + key + j] += q.ds[i * kPanelKeys + j];
    }
}

void sum_rows(const KeyTile& t, QueryBlock& q, float* row_max, float* row_sum) {
    load_queries(t, q);
    NextBlock next = next_block(t, q);
    for (int key = 0; key < t.keys; key += kPanelKeys) {
        Panel panel(t, q, key);
        if (panel.empty()) continue;
        panel.scores(next);
        if (t.params->forward.changes_scores() || panel.cut) panel.sum_rows<true>(row_max, row_sum);
        else panel.sum_rows<false>(row_max, row_sum);
    }
}

void store_rows(const TensorView& to, int64_t first, DType dtype, int rows, int dim, Matrix from, float factor, bool accumulate) {
    if ((const char*)from.data == address(to.data, first, dtype)) return;
    constexpr int kAhead = 8;  // in rows
    const int bytes = dim * element_size(dtype);
    for (int i = 0; i < rows; ++i) {
        if (i + kAhead < rows && to.row != dim)
            for (int byte = 0; byte < bytes; byte += 64)
                __builtin_prefetch(address(to.data, first + (i + kAhead) * to.row, dtype) + byte, 1);
        for (int d = 0; d < dim; d += L) {
            char* const at = const_cast<char*>(address(to.data, first + i * to.row + d, dtype));
            Vec x = *(const Vec*)(from.at(i, d).data) * factor;
            if (accumulate) x += load_any(at, dim - d, dtype);
            store_any(at, dim - d, dtype, x);
        }
    }
}

}  // namespace
}  // namespace fa::cpu::FA_ISA

namespace fa::cpu {
const BackwardTileKernel FA_BACKWARD_TILE = {FA_LANES,         FA_ISA::delta,    FA_ISA::load_keys, FA_ISA::add_block,
                                             FA_ISA::add_bias, FA_ISA::sum_rows, FA_ISA::store_rows};
}
