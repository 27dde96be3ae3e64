// tile_kernel.h: one tile of queries against its keys, the inner part of the CPU's tiled online softmax. tiles_<isa>.cpp compiles it once
// per instruction set, after defining
//     FA_ISA      the namespace
//     FA_LANES    floats per vector
//     FA_VECTORS  width of a register tile, here the query vectors of a group: 4 with 32 registers, 2 with 16
//     FA_TILE     the TileKernel to define
//     FA_AMX      1: the two products take bfloat16 and use tile registers (amx_kernel.h)
//
// Everything is transposed, so that the lanes are queries. S^T[key][query] and O^T[d][query] are sums of (an element of K or V, broadcast)
// x (a vector of queries): matrix products without a horizontal operation. row_max, row_sum and the rescaling are plain vertical vectors.
// Tiles of K and V are first copied to float32 scratch, where they are contiguous whatever the strides. Bound by the multiply-add units: a
// register tile of 6 x 4 vectors (6 x 2 with 16 registers) does 24 (12) multiply-adds per 10 (8) loads.
//
// This file calls only functions of simd.h, rows.h, its own and those of mask.h that are always inlined. Any other inline function would
// also be compiled here, say for AVX-512, and the linker might keep this copy as the program's only one.
#include <stddef.h>
#include <stdint.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/attention/tile.h"

namespace fa::cpu::FA_ISA {
namespace {

#include "cpu/attention/rows.h"

constexpr int kQueryVectors = kVectors;
constexpr int kMaxVectors = kMaxTileRows / L;
static_assert(kMaxGroupRows % (kQueryVectors * L) == 0 && kMaxTileRows % kMaxGroupRows == 0, "only the last group of all may be narrower");

// Prefetches the next tile's rows of K and V while this tile is computed, a few rows at a time.
struct Prefetch {
    const char *k, *v;
    int64_t k_row, v_row;  // bytes between rows
    int k_bytes, v_bytes;  // of one row
    int rows, step;        // rows left, and rows per call of advance()

    void advance() {
        for (int i = rows < step ? rows : step; i > 0; --i, --rows, k += k_row, v += v_row) {
            for (int byte = 0; byte < k_bytes; byte += 64) __builtin_prefetch(k + byte, 0, 2);
            for (int byte = 0; byte < v_bytes; byte += 64) __builtin_prefetch(v + byte, 0, 2);
        }
    }
};

// ---- the two matrix products, by register tiles of kHeight x kWidth vectors, for kWidth * L queries ----

// S^T (keys, queries) = scale * K (keys, headdim) Q^T (headdim, queries). The backward pass sums each product in the same order.
template <int kHeight, int kWidth>
FA_INLINE void scores_block(const float* k, int64_t ld_k, const float* q, int headdim, float scale, float* s) {
    for (int d0 = 0; d0 < headdim; d0 += kSumLength) {
        const int d1 = headdim - d0 < kSumLength ? headdim : d0 + kSumLength;
        Vec acc[kHeight][kWidth] = {};
        for (int d = d0; d < d1; ++d, q += kWidth * L) {
            Vec query[kWidth];
#pragma GCC unroll 4
            for (int n = 0; n < kWidth; ++n) query[n] = *(const Vec*)(q + n * L);
#pragma GCC unroll 12
            for (int j = 0; j < kHeight; ++j) {
                const Vec key = splat(k[j * ld_k + d]);
#pragma GCC unroll 4
                for (int n = 0; n < kWidth; ++n) acc[j][n] += key * query[n];
            }
        }
        const Vec factor = splat(d1 == headdim ? scale : 1.0f);  // here, because the loop above has no register to spare
#pragma GCC unroll 12
        for (int j = 0; j < kHeight; ++j)
#pragma GCC unroll 4
            for (int n = 0; n < kWidth; ++n) {
                Vec& sum = *(Vec*)(s + (j * kWidth + n) * L);
                sum = (d0 == 0 ? acc[j][n] : sum + acc[j][n]) * factor;
            }
    }
}
template <int kWidth>
void scores(const float* k, int64_t ld_k, int keys, const float* q, int headdim, float scale, float* s, Prefetch& prefetch) {
    constexpr int kHeight = height(kWidth), ld = kWidth * L;
    int j = 0;
    for (; j + kHeight <= keys; j += kHeight) {
        scores_block<kHeight, kWidth>(k + j * ld_k, ld_k, q, headdim, scale, s + j * ld);
        prefetch.advance();
    }
    for (; j + 2 <= keys; j += 2) scores_block<2, kWidth>(k + j * ld_k, ld_k, q, headdim, scale, s + j * ld);
    for (; j < keys; ++j) scores_block<1, kWidth>(k + j * ld_k, ld_k, q, headdim, scale, s + j * ld);
}

// O^T (headdim_v, queries) = O^T * correction + V^T (headdim_v, keys) P^T (keys, queries)
template <int kHeight, int kWidth>
FA_INLINE void output_block(const float* v, int64_t ld_v, int keys, const float* p, const Vec* correction, float* out) {
    Vec acc[kHeight][kWidth];
#pragma GCC unroll 12
    for (int d = 0; d < kHeight; ++d)
#pragma GCC unroll 4
        for (int n = 0; n < kWidth; ++n) acc[d][n] = *(const Vec*)(out + (d * kWidth + n) * L) * correction[n];
    for (int j = 0; j < keys; ++j, p += kWidth * L, v += ld_v) {
        Vec probability[kWidth];
#pragma GCC unroll 4
        for (int n = 0; n < kWidth; ++n) probability[n] = *(const Vec*)(p + n * L);
#pragma GCC unroll 12
        for (int d = 0; d < kHeight; ++d) {
            const Vec value = splat(v[d]);
#pragma GCC unroll 4
            for (int n = 0; n < kWidth; ++n) acc[d][n] += value * probability[n];
        }
    }
#pragma GCC unroll 12
    for (int d = 0; d < kHeight; ++d)
#pragma GCC unroll 4
        for (int n = 0; n < kWidth; ++n) *(Vec*)(out + (d * kWidth + n) * L) = acc[d][n];
}
template <int kWidth>
void output(const float* v, int64_t ld_v, int keys, int headdim_v, const float* p, const Vec* correction, float* out) {
    constexpr int kHeight = height(kWidth), ld = kWidth * L;
    int d = 0;
    for (; d + kHeight <= headdim_v; d += kHeight) output_block<kHeight, kWidth>(v + d, ld_v, keys, p, correction, out + d * ld);
    for (; d + 2 <= headdim_v; d += 2) output_block<2, kWidth>(v + d, ld_v, keys, p, correction, out + d * ld);
    for (; d < headdim_v; ++d) output_block<1, kWidth>(v + d, ld_v, keys, p, correction, out + d * ld);
}

// Whether a row has to be computed again, in double precision. `poison` is the sum of 0 times every element of its out.
FA_INLINE bool is_spoiled(const QueryTile& t, const QueryRow& row, float row_sum, float poison) {
    const AttentionParams& p = *t.params;
    if (row_sum == 0) return row.key_begin < row.key_end && !p.bias.data && !p.mask.data && !p.tree.rows && !p.hides_tiles();
    return !(poison == 0.0f);
}

// What rows first .. last see, through masks by intervals and by blocks, of the key tile in which `key` lies.
FA_INLINE Seen seen_by(const QueryTile& t, int64_t key, int32_t first, int32_t last) {
    const Seen seen = t.bounds ? t.bounds[key / kTileKeys].seen_by(first, last) : Seen::kEverything;
    if (!t.params->blocks.data || seen == Seen::kNothing) return seen;
    const int32_t begin = int32_t(key / kTileKeys * kTileKeys), left = t.sequence.seqlen_k - begin;
    const BlockRows rows{*t.params, t.batch, t.row[0].head, first, last};
    const Seen shown = rows.of_keys(begin, begin + (left < kTileKeys ? left : kTileKeys));
    return shown == Seen::kEverything ? seen : shown;
}

#include "cpu/attention/row_products.h"
//
#include "cpu/attention/narrow_kernel.h"
#if FA_AMX
#include "cpu/attention/amx_kernel.h"
#endif

// ---- a group: query vectors that go through the products together ----

struct Group {
    QueryTile& t;
    const AttentionParams& p;
    const int lane0, width;  // first lane in the tile, number of vectors
    float *const q, *const out, *const s;
    const Vec *row_max, *row_sum;
#if FA_AMX
    uint32_t* const q16;  // pairs of Q^T
#endif

    // The row of a lane. Lanes past the end repeat the last row; their results are not stored.
    const QueryRow& row(int lane) const { return t.row[lane0 + lane < t.rows ? lane0 + lane : t.rows - 1]; }
    int rows() const { return t.rows - lane0 < width * L ? t.rows - lane0 : width * L; }
    const QueryRow& first() const { return row(0); }
    const QueryRow& last() const { return row(width * L - 1); }
    Vec& score(int j, int n) const { return *(Vec*)(s + (j * width + n) * L); }

    void load_queries() const {
        for (int n = 0; n < width; ++n)
            for (int d = 0; d < p.headdim; d += L) {
                Vec x[L];
                for (int l = 0; l < L; ++l) {
                    const QueryRow& r = row(n * L + l);
                    const int64_t offset = t.sequence.q + r.head * p.q.head + r.query * p.q.row + d;
                    x[l] = load_any(address(p.q.data, offset, p.dtype), p.headdim - d, p.dtype);
                }
                transpose(x);
                for (int i = 0; i < L && d + i < p.headdim; ++i) *(Vec*)(q + ((d + i) * width + n) * L) = x[i];
            }
#if FA_AMX
        pack_queries(q, width, p.headdim, q16);
#endif
    }

    // Applies the options of a score to keys begin .. end - 1 of the key tile that starts at `key`, in the order of the contract.
    void transform(int key, int begin, int end) const {
        if (p.softcap != 0) softcap(begin, end);
        if (p.alibi_slopes) alibi(key, begin, end);
        if (p.bias.data) bias(key, begin, end);
        if (p.mask.data) mask(key, begin, end);
        if (p.tree.rows && key + end > t.sequence.seqlen_k - p.tree.keys) tree(key, begin, end);
        if (key + begin < last().key_begin || key + end > first().key_end) causal_and_window(key, begin, end);
    }

    void softcap(int begin, int end) const {
        const Vec cap = splat(p.softcap), inverse = splat(1 / p.softcap);
        for (int j = begin; j < end; ++j)
            for (int n = 0; n < width; ++n) score(j, n) = cap * tanh(score(j, n) * inverse);
    }

    void alibi(int key, int begin, int end) const {
        for (int n = 0; n < width; ++n) {
            Vec slope, distance;
            for (int l = 0; l < L; ++l) {
                const QueryRow& r = row(n * L + l);
                slope[l] = p.alibi_slopes[t.batch * p.alibi_batch + r.head];
                distance[l] = float(int64_t(r.query) + t.sequence.shift - key);
            }
            for (int j = begin; j < end; ++j) score(j, n) -= slope * abs(distance - float(j));
        }
    }

    // Loads bias or mask in blocks of L rows x L keys, and transposes each block so that its lanes are rows.
    template <typename Load, typename Apply>
    void for_score_blocks(const ScoreView& view, int64_t size, int key, int begin, int end, const Load& load, const Apply& apply) const {
        for (int n = 0; n < width; ++n)
            for (int j = begin; j < end; j += L) {
                Vec x[L];
                for (int l = 0; l < L; ++l) {
                    const QueryRow& r = row(n * L + l);
                    const int64_t offset = t.batch * view.batch + r.head * view.head + r.query * view.row + key + j;
                    x[l] = load(static_cast<const char*>(view.data) + offset * size, end - j);
                }
                transpose(x);
                for (int i = 0; i < L && j + i < end; ++i) apply(score(j + i, n), x[i]);
            }
    }
    // A bias of -inf hides its key like a mask, whatever the score.
    void bias(int key, int begin, int end) const {
        const DType dtype = p.bias_dtype;
        for_score_blocks(
            p.bias, element_size(dtype), key, begin, end, [dtype](const char* from, int count) { return load_any(from, count, dtype); },
            [](Vec& score, Vec b) { score = b == -kInfinity ? b : score + b; });
    }
    void mask(int key, int begin, int end) const {
        for_score_blocks(
            p.mask, 1, key, begin, end,
            [](const char* from, int count) {
                char bytes[L] = {};
                __builtin_memcpy(bytes, from, size_t(count < L ? count : L));
                return (Vec) __builtin_convertvector(load_unaligned<ByteVec>(bytes), IVec);
            },
            [](Vec& score, Vec m) { score = (IVec)m == 0 ? splat(-kInfinity) : score; });
    }

    // as tree_shows in mask.h
    void tree(int key, int begin, int end) const {
        const int first = t.sequence.seqlen_k - p.tree.keys - key;  // the key of bit 0, counted from `key`
        for (int n = 0; n < width; ++n)
            for (int l = 0; l < L; ++l) {
                const uint64_t bits = p.tree.rows[t.batch * p.tree.batch + row(n * L + l).query * p.tree.row];
                for (int j = begin > first ? begin : first; j < end; ++j)
                    if (!(bits >> (j - first) & 1)) score(j, n)[l] = -kInfinity;
            }
    }

    // The keys of the tile that starts at `key` and has `keys` keys which some row of the group may see; cut: masks hide some pairs.
    struct Keys {
        int begin, end;
        bool cut;
    };
    Keys keys_of(int key, int keys) const {
        Keys seen{first().key_begin > key ? first().key_begin - key : 0, last().key_end < key + keys ? last().key_end - key : keys, false};
        if (!p.hides_tiles() || seen.begin >= seen.end) return seen;
        const int32_t first_query = first().query, last_query = last().query;
        const Seen what = seen_by(t, key, first_query, last_query);
        if (what == Seen::kNothing) return {0, 0, false};
        seen.cut = what == Seen::kSome;
        if (seen.cut && p.blocks.data) {
            const BlockRows rows{p, t.batch, first().head, first_query, last_query};
            const KeyRange range = rows.seen_keys(key + seen.begin, key + seen.end);
            if (range.begin >= range.end) return {0, 0, false};
            seen = {range.begin - key, range.end - key, t.bounds || rows.of_keys(range.begin, range.end) == Seen::kSome};
        }
        if (!seen.cut || !t.bounds) return seen;
        const int32_t* const numbers = row_indices_of(p, t.batch, first().head);
        const auto hidden = [&](int j) {
            HiddenBounds one;
            one.clear(), one.add(hidden_rows(p, numbers + int64_t(key + j) * p.intervals.key));
            return one.seen_by(first_query, last_query) == Seen::kNothing;
        };
        while (seen.begin < seen.end && hidden(seen.begin)) ++seen.begin;
        while (seen.begin < seen.end && hidden(seen.end - 1)) --seen.end;
        return seen;
    }

    // Sets the scores of the pairs that masks by intervals and by blocks hide.
    void hide(int key, int begin, int end) const {
        if (t.bounds) intervals(key, begin, end);
        if (p.blocks.data) blocks(key, begin, end);
    }
    __attribute__((noinline)) void blocks(int key, int begin, int end) const {
        const int shift = p.blocks.key_shift;
        for (int n = 0; n < width; ++n) {
            const uint8_t* shown[L];
            for (int l = 0; l < L; ++l) shown[l] = blocks_of_row(p, t.batch, row(n * L + l).head, row(n * L + l).query);
            for (int j = begin, next; j < end; j = next) {  // one block of keys
                next = (((key + j) >> shift) + 1) * (1 << shift) - key;
                if (next > end) next = end;
                IVec seen;
                for (int l = 0; l < L; ++l) seen[l] = shown[l][(key + j) >> shift];
                for (int i = j; i < next; ++i) score(i, n) = seen == 0 ? splat(-kInfinity) : score(i, n);
            }
        }
    }
    __attribute__((noinline)) void intervals(int key, int begin, int end) const {
        IVec query[kQueryVectors];
        for (int n = 0; n < width; ++n)
            for (int l = 0; l < L; ++l) query[n][l] = row(n * L + l).query;
        const int32_t* const numbers = row_indices_of(p, t.batch, first().head);
        const int32_t first_query = first().query, last_query = last().query;
        for (int j = begin; j < end; ++j) {
            const HiddenRows hidden = hidden_rows(p, numbers + int64_t(key + j) * p.intervals.key);
            HiddenBounds one;
            one.clear(), one.add(hidden);
            if (one.seen_by(first_query, last_query) == Seen::kEverything) continue;
            for (int n = 0; n < width; ++n) score(j, n) = hidden.hides(query[n]) ? splat(-kInfinity) : score(j, n);
        }
    }
    void causal_and_window(int key, int begin, int end) const {
        for (int n = 0; n < width; ++n) {
            IVec key_begin, key_end;
            for (int l = 0; l < L; ++l) key_begin[l] = row(n * L + l).key_begin, key_end[l] = row(n * L + l).key_end;
            for (int j = begin; j < end; ++j) {
                const IVec column = splat(key + j);
                score(j, n) = ((column >= key_begin) & (column < key_end)) ? score(j, n) : splat(-kInfinity);
            }
        }
    }

    void dropout(int key, int begin, int end) const {
        const DropoutOrigin& origin = t.origin;
        for (int n = 0; n < width; ++n) {
            UVec query, head;
            for (int l = 0; l < L; ++l)
                query[l] = origin.row + uint32_t(row(n * L + l).query), head[l] = origin.head + uint32_t(row(n * L + l).head);
            for (int j = begin - (key + begin) % kDropoutColumns; j < end; j += kDropoutColumns)
                for (int pair = 0; pair < 8; pair += 2) {  // one Philox call covers columns `pair` and pair + 1 of each eight
                    UVec word[4];
                    philox<kDropoutRounds>(origin.calls + dropout_call(uint32_t(key + j + pair)) + UVec{}, query, head,
                                           origin.sequence + UVec{}, p.dropout_key, word);
                    for (int w = 0; w < 4; ++w) word[w] = dropout_numbers(word[w]);
                    for (int i = 0; i < 16; ++i) {
                        const int column = j + i / 2 * 8 + pair + i % 2;
                        if (column < begin || column >= end) continue;
                        const UVec number = word[i / 4] >> dropout_number(i) & uint32_t(kDropoutChances - 1);
                        score(column, n) = number < p.dropout_threshold ? Vec{} : score(column, n);
                    }
                }
        }
    }

    // out = O / row_sum, transposed back to one row per query.
    void store_output() const {
        for (int n = 0; n < width; ++n) {
            const Vec weight = row_sum[n] == 0.0f ? Vec{} : (p.dropout_threshold ? p.dropout_scale : 1.0f) / row_sum[n];
            Vec poison = {};  // a lane becomes NaN if an element of the row is not finite
            for (int d = 0; d < p.headdim_v; d += L) {
                Vec x[L] = {};
                for (int i = 0; i < L && d + i < p.headdim_v; ++i) {
                    x[i] = *(const Vec*)(out + ((d + i) * width + n) * L) * weight;
                    poison += x[i] * 0.0f;
                }
                transpose(x);
                for (int l = 0; l < L && lane0 + n * L + l < t.rows; ++l) {
                    const QueryRow& r = row(n * L + l);
                    const int64_t offset = t.sequence.out + r.head * p.out.head + r.query * p.out.row + d;
                    store_any(const_cast<char*>(address(p.out.data, offset, p.out_dtype)), p.headdim_v - d, p.out_dtype, x[l]);
                }
            }
            for (int l = 0; l < L && lane0 + n * L + l < t.rows; ++l)
                t.spoiled[lane0 + n * L + l] = is_spoiled(t, row(n * L + l), row_sum[n][l], poison[l]);
        }
    }
};

// ---- the tile ----

struct Tile {
    QueryTile& t;
    const AttentionParams& p;
    const Scratch& scratch;
    const int all_vectors, narrow_rows;  // narrow_rows: rows of the last vector if narrow_kernel.h handles it, otherwise 0
    const int vectors;                   // all other vectors
    Vec row_max[kMaxVectors], row_sum[kMaxVectors], greatest[kMaxVectors];

    explicit Tile(QueryTile& tile, bool may_be_narrow = true)
        : t(tile),
          p(*tile.params),
          scratch(tile.scratch),
          all_vectors((tile.rows + L - 1) / L),
          narrow_rows(may_be_narrow && is_narrow() ? t.rows - (all_vectors - 1) * L : 0),
          vectors(all_vectors - (narrow_rows > 0)) {}

    // Whether the last vector is alone in its group and has few rows. A row's arithmetic must not depend on its tile, and this condition
    // does not, because tiles end at whole groups. It does depend on the number of rows of the call, except with batch_invariant.
    bool is_narrow() const {
        if (p.cache.batch_invariant) return false;
        return (all_vectors - 1) % kQueryVectors == 0 && t.rows - (all_vectors - 1) * L <= kNarrowRows && !p.dropout_threshold;
    }

    // Calls body(width, n) for each group of vectors n .. n + width - 1. Only the last group may be narrower than kQueryVectors.
    template <typename Body>
    void for_groups(const Body& body) {
        int n = 0;
        for (; n + kQueryVectors <= vectors; n += kQueryVectors) body(Width<kQueryVectors>(), n);
        if (kQueryVectors > 3 && vectors - n == 3) body(Width<(kQueryVectors > 3 ? 3 : 1)>(), n);
        if (kQueryVectors > 2 && vectors - n == 2) body(Width<(kQueryVectors > 2 ? 2 : 1)>(), n);
        if (kQueryVectors > 1 && vectors - n == 1) body(Width<1>(), n);
    }
    Group group(int n, int width) {
        float *const q = scratch.q + int64_t(n) * L * p.headdim, *const out = scratch.out + int64_t(n) * L * out_rows();
#if FA_AMX
        uint32_t* const q16 = scratch.q16 + int64_t(n) * L * (whole(p.headdim, kSummed) / 2);
        return {t, p, n * L, width, q, out, scratch.s, row_max + n, row_sum + n, q16};
#else
        return {t, p, n * L, width, q, out, scratch.s, row_max + n, row_sum + n};
#endif
    }
    int out_rows() const {  // rows of O^T in the scratch
#if FA_AMX
        return whole(p.headdim_v, 16);
#else
        return p.headdim_v;
#endif
    }

    // What the products need of keys and values from .. keys - 1 in the scratch.
    void prepare_keys([[maybe_unused]] int from, [[maybe_unused]] int keys) const {
#if FA_AMX
        pack_keys(scratch.k, scratch.ld_k, from, keys, p.headdim, scratch.k16);
#endif
    }
    void prepare_values([[maybe_unused]] int from, [[maybe_unused]] int keys) const {
#if FA_AMX
        pack_values(scratch.v, scratch.ld_v, from, keys, p.headdim_v, scratch.v16);
#endif
    }
    // S^T of a group for keys begin .. end - 1 of the tile.
    template <int kWidth>
    void multiply_keys(const Group& g, int begin, int end, Prefetch& prefetch) const {
#if FA_AMX
        FA_ISA::scores<kWidth>(scratch.k16, begin, end, g.q16, p.headdim, p.scale, g.s);
        for (int j = begin; j < end; j += height(kWidth)) prefetch.advance();
#else
        FA_ISA::scores<kWidth>(scratch.k + begin * scratch.ld_k, scratch.ld_k, end - begin, g.q, p.headdim, p.scale,
                               g.s + int64_t(begin) * kWidth * L, prefetch);
#endif
    }
    // O^T of a group, by P^T of keys begin .. end - 1 of the tile.
    template <int kWidth>
    void multiply_values(const Group& g, int begin, int end, const Vec* correction) const {
#if FA_AMX
        pack_probabilities<kWidth>(g.s, begin, end, scratch.p16);
        FA_ISA::output<kWidth>(scratch.v16, begin, end, p.headdim_v, scratch.p16, correction, g.out);
#else
        FA_ISA::output<kWidth>(scratch.v + begin * scratch.ld_v, scratch.ld_v, end - begin, p.headdim_v, g.s + int64_t(begin) * kWidth * L,
                               correction, g.out);
#endif
    }

    void start_rows() {
        for (int n = 0; n < all_vectors; ++n) {
            row_max[n] = greatest[n] = splat(-kInfinity), row_sum[n] = Vec{};
            if (!p.sinks) continue;
            for (int l = 0; l < L; ++l) {  // a sink counts like a key without a value
                const float sink = p.sinks[t.row[n * L + l < t.rows ? n * L + l : 0].head];
                row_max[n][l] = sink;
                row_sum[n][l] = sink == -kInfinity ? 0 : sink == sink ? 1 : sink;
            }
        }
        for (int64_t i = 0; i < int64_t(out_rows()) * vectors; ++i) *(Vec*)(scratch.out + i * L) = Vec{};
    }

    // Rows of V that hold an infinity or a NaN are left out of the product, because 0 x NaN would reach queries that cannot see them. They
    // are added afterwards, to the queries that see them.
    void take_out_special_values(int from, int keys, bool* special) const {
        for (int j = from; j < keys; ++j) {
            float* v = scratch.v + j * scratch.ld_v;
            special[j] = false;
            for (int d = 0; d < p.headdim_v; ++d) special[j] |= !(v[d] * 0.0f == 0.0f);
            for (int d = 0; special[j] && d < p.headdim_v; ++d) v[d] = 0;
        }
    }
    void add_special_values(const Group& g, int key, int begin, int end, const bool* special) const {
        float* v = scratch.v + kTileKeys * scratch.ld_v;  // the extra row after the tile
        for (int j = begin; j < end; ++j) {
            if (!special[j]) continue;
            copy_values(key + j, 1, v);
            for (int n = 0; n < g.width; ++n) {
                const auto visible = *(const Vec*)(scratch.seen + (j * g.width + n) * L) != -kInfinity;
                for (int d = 0; d < p.headdim_v; ++d) *(Vec*)(g.out + (d * g.width + n) * L) += visible ? g.score(j, n) * v[d] : Vec{};
            }
        }
    }

    // Turns S of keys begin .. end - 1 into P, updates row_max, row_sum and greatest, and sets correction, the factor by which the old O
    // must be multiplied.
    template <int kWidth>
    void softmax(float* s, int begin, int end, Vec* row_max, Vec* row_sum, Vec* greatest, Vec* correction) {
        Vec new_max[kWidth], shift[kWidth], sum[kWidth];
        for (int n = 0; n < kWidth; ++n) new_max[n] = greatest[n];
        for (int j = begin; j < end; ++j)
            for (int n = 0; n < kWidth; ++n) new_max[n] = max(*(const Vec*)(s + (j * kWidth + n) * L), new_max[n]);
        for (int n = 0; n < kWidth; ++n) {
            greatest[n] = new_max[n];
            new_max[n] = max(new_max[n], row_max[n]);
            // A row that has seen no key yet has row_max = -inf. -inf - -inf would be NaN, so such a row subtracts 0 instead.
            shift[n] = new_max[n] == -kInfinity ? Vec{} : new_max[n];
            sum[n] = Vec{};
        }
        for (int j = begin; j < end; ++j)
            for (int n = 0; n < kWidth; ++n) {
                Vec& x = *(Vec*)(s + (j * kWidth + n) * L);
                x = exp(x - shift[n]);
                sum[n] += x;
            }
        for (int n = 0; n < kWidth; ++n) {
            correction[n] = exp(row_max[n] - shift[n]);
            row_sum[n] = row_sum[n] * correction[n] + sum[n];
            row_max[n] = new_max[n];
        }
    }

    void copy_keys(int first, int keys, float* to) const {
        const int64_t start = t.sequence.k + t.head_k * p.k.head;
        FA_ISA::copy_keys(p, p.k, p.cache.k_scale, start, t.batch, t.head_k, first, keys, p.headdim, to, scratch.ld_k);
    }
    bool copy_values(int first, int keys, float* to) const {
        const int64_t start = t.sequence.v + t.head_k * p.v.head;
        return FA_ISA::copy_keys(p, p.v, p.cache.v_scale, start, t.batch, t.head_k, first, keys, p.headdim_v, to, scratch.ld_v);
    }

    // `first`, or the start of the next key tile of which some row sees a key.
    int64_t seen_from(int64_t first) const {
        while (first < t.key_end && seen_by(t, first, t.row[0].query, t.row[t.rows - 1].query) == Seen::kNothing)
            first = end_of_tile(first);
        return first;
    }
    int64_t end_of_tile(int64_t key) const {
        const int64_t end = (key / kTileKeys + 1) * kTileKeys;
        return end < t.key_end ? end : t.key_end;
    }

    Prefetch prefetch_tile(int64_t first) const {
        if (p.cache.block_table) return {};  // the next page may be anywhere
        const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
        const int64_t k0 = t.sequence.k + t.head_k * p.k.head, v0 = t.sequence.v + t.head_k * p.v.head;
        const int size = int(element_size(dtype));
        const int64_t left = t.key_end - first;
        const int rows = left < 0 ? 0 : left < kTileKeys ? int(left) : kTileKeys;
        const int steps = (vectors + kQueryVectors - 1) / kQueryVectors * (kTileKeys / height(kQueryVectors));
        return {address(p.k.data, k0 + first * p.k.row, dtype),
                address(p.v.data, v0 + first * p.v.row, dtype),
                p.k.row * size,
                p.v.row * size,
                p.headdim * size,
                p.headdim_v * size,
                rows,
                (rows + steps - 1) / steps};
    }

    // Handles the rows of the last vector if they are few. The addresses of a tile's keys are looked up once for all these rows.
    void run_narrow() {
#if FA_AMX
        run_narrow_as<DType::kBFloat16>();  // cpu_amx takes nothing else
#else
        const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
        if (dtype == DType::kFloat32) run_narrow_as<DType::kFloat32>();
        else if (dtype == DType::kFloat16) run_narrow_as<DType::kFloat16>();
        else if (dtype == DType::kBFloat16) run_narrow_as<DType::kBFloat16>();
        else if (dtype == DType::kFloat8E4M3) run_narrow_as<DType::kFloat8E4M3>();
        else run_narrow_as<DType::kInt8>();
#endif
    }
    template <DType dtype>
    void run_narrow_as() {
        const int n = vectors;  // the vector of the narrow rows
        const QueryRow* const rows = t.row + n * L;
        NarrowRow row[kNarrowRows];
        for (int r = 0; r < narrow_rows; ++r) {
            float *const q = scratch.k + r * scratch.ld_k, *const out = scratch.v + r * scratch.ld_v;  // not yet used for copies of K and V
            row[r] = {&t, rows + r, q, out, scratch.s + r * kTileKeys, row_max[n][r], row_sum[n][r], greatest[n][r]};
            row[r].load_query();
        }
        const int begin = rows[0].key_begin, end = rows[narrow_rows - 1].key_end;  // both grow with the query
        const auto keys_from = [&](int first) {
            return int(kTileKeys - first % kTileKeys < end - first ? kTileKeys - first % kTileKeys : end - first);
        };
        const auto find_k = [&](KeyRows& k, int first) {
            k.find(p, p.k, p.cache.k_scale, t.sequence.k + t.head_k * p.k.head, t.batch, t.head_k, first, keys_from(first), p.headdim);
        };
        KeyRows k[2], v;
        if (begin < end) find_k(k[0], begin);
        for (int key = begin, keys, turn = 0; key < end; key += keys, turn ^= 1) {
            keys = keys_from(key);
            v.find(p, p.v, p.cache.v_scale, t.sequence.v + t.head_k * p.v.head, t.batch, t.head_k, key, keys, p.headdim_v);
            const bool more = keys < end - key;
            if (more) find_k(k[turn ^ 1], key + keys);
            if (seen_by(t, key, rows[0].query, rows[narrow_rows - 1].query) == Seen::kNothing) continue;
            const auto from = [&](int r) { return rows[r].key_begin > key ? rows[r].key_begin - key : 0; };
            const auto to = [&](int r) { return rows[r].key_end < key + keys ? rows[r].key_end - key : keys; };
            for (int r = 0, together; r < narrow_rows; r += together) {
                const auto same = [&](int count) {
                    return r + count <= narrow_rows && from(r) == from(r + count - 1) && to(r) == to(r + count - 1);
                };
                const auto attend = [&](auto count) {
                    together = decltype(count)::value;
                    if (from(r) < to(r))
                        attend_narrow<dtype, decltype(count)::value>(row + r, k[turn], v, more && r == 0 ? k + (turn ^ 1) : nullptr, r == 0,
                                                                     key, from(r), to(r));
                };
                if (kNarrowTogether >= 4 && same(4)) attend(Width<(kNarrowTogether >= 4 ? 4 : 1)>());
                else if (kNarrowTogether >= 2 && same(2)) attend(Width<(kNarrowTogether >= 2 ? 2 : 1)>());
                else attend(Width<1>());
            }
        }
        for (int r = 0; r < narrow_rows; ++r) {
            t.spoiled[n * L + r] = row[r].store_output();
            row_max[n][r] = row[r].row_max, row_sum[n][r] = row[r].row_sum, greatest[n][r] = row[r].greatest;
        }
    }

    void run() {
        start_rows();
        if (narrow_rows) run_narrow();
        if (vectors == 0) return store_statistics();
        if (t.key_begin < t.key_end) for_groups([&](auto width, int n) { group(n, width.value).load_queries(); });

        // Key tiles start at multiples of kTileKeys, so that the result of a row does not depend on the other rows of its tile. No row sees
        // a key of the first tile before key + from. The others keep their places, because AMX sums the keys of an instruction together.
        for (int64_t first = seen_from(t.key_begin), next; first < t.key_end; first = next) {
            const int from = int(first % kTileKeys), key = int(first) - from, keys = int(end_of_tile(first)) - key;
            next = seen_from(end_of_tile(first));
            copy_keys(int(first), keys - from, scratch.k + from * scratch.ld_k);
            const bool finite = copy_values(int(first), keys - from, scratch.v + from * scratch.ld_v);
            bool special[kTileKeys];
            if (!finite) take_out_special_values(from, keys, special);
            prepare_keys(from, keys), prepare_values(from, keys);

            Prefetch prefetch = prefetch_tile(next);
            for_groups([&](auto width, int n) {
                constexpr int kWidth = decltype(width)::value;
                const Group g = group(n, kWidth);
                const auto [begin, end, cut] = g.keys_of(key, keys);
                if (begin >= end) return;
                const int64_t s0 = int64_t(begin) * kWidth * L;
                multiply_keys<kWidth>(g, begin, end, prefetch);
                g.transform(key, begin, end);
                if (cut) g.hide(key, begin, end);
                if (!finite) __builtin_memcpy(scratch.seen + s0, g.s + s0, size_t(end - begin) * kWidth * L * sizeof(float));
                Vec correction[kWidth];
                softmax<kWidth>(g.s, begin, end, row_max + n, row_sum + n, greatest + n, correction);
                if (p.dropout_threshold) g.dropout(key, begin, end);
                multiply_values<kWidth>(g, begin, end, correction);
                if (!finite) add_special_values(g, key, begin, end, special);
            });
        }

        for_groups([&](auto width, int n) { group(n, width.value).store_output(); });
        store_statistics();
    }

    // Computes S again, and calls body(width, n, group, key, begin, end) for keys key + begin .. key + end - 1 of each group.
    template <typename Body>
    void for_scores(const Body& body) {
        for_groups([&](auto width, int n) { group(n, width.value).load_queries(); });
        for (int64_t first = seen_from(t.key_begin); first < t.key_end; first = seen_from(end_of_tile(first))) {
            const int key = int(first), keys = int(end_of_tile(first) - first);
            copy_keys(key, keys, scratch.k);
            prepare_keys(0, keys);
            Prefetch prefetch = {};
            for_groups([&](auto width, int n) {
                constexpr int kWidth = decltype(width)::value;
                const Group g = group(n, kWidth);
                const auto [begin, end, cut] = g.keys_of(key, keys);
                if (begin >= end) return;
                multiply_keys<kWidth>(g, begin, end, prefetch);
                g.transform(key, begin, end);
                if (cut) g.hide(key, begin, end);
                body(width, n, g, key, begin, end);
            });
        }
    }

    // P is computed a second time, because it needs the sum of the whole row.
    void sum_keys() {
        Vec log_sum[kMaxVectors];
        for (int n = 0; n < vectors; ++n)  // lanes past the end add nothing
            for (int l = 0; l < L; ++l) {
                const RowStatistics lse = n * L + l < t.rows ? t.lse[n * L + l] : RowStatistics{kInfinity, 0};
                row_max[n][l] = lse.row_max, log_sum[n][l] = lse.log_sum;
            }
        for_scores([&](auto width, int n, const Group& g, int key, int begin, int end) {
            for (int j = begin; j < end; ++j) {
                Vec sum = {};
                for (int x = 0; x < decltype(width)::value; ++x) sum += probability(g.score(j, x), row_max[n + x], log_sum[n + x]);
                t.key_sums[key + j] += sum_from<1, 1>(&sum)[0];
            }
        });
    }

    void sum_rows() {
        for (int n = 0; n < vectors; ++n)
            for (int l = 0; l < L; ++l) {
                const int r = n * L + l < t.rows ? n * L + l : t.rows - 1;
                row_max[n][l] = greatest[n][l] = t.row_max[r], row_sum[n][l] = t.row_sum[r];
            }
        for_scores([&](auto width, int n, const Group& g, int, int begin, int end) {
            Vec correction[decltype(width)::value];
            softmax<decltype(width)::value>(g.s, begin, end, row_max + n, row_sum + n, greatest + n, correction);
        });
        for (int r = 0; r < t.rows; ++r) t.row_max[r] = row_max[r / L][r % L], t.row_sum[r] = row_sum[r / L][r % L];
    }

    void store_statistics() const {
        for (int n = 0; n < all_vectors; ++n)
            for (int l = 0; l < L; ++l)
                t.row_max[n * L + l] = row_max[n][l], t.row_sum[n * L + l] = row_sum[n][l], t.greatest[n * L + l] = greatest[n][l];
    }
};

#if !FA_AMX
struct TileRegisters {
    TileRegisters() {}
};
#endif
void run_tile(QueryTile& tile) {
    const TileRegisters registers;
    Tile(tile).run();
}
void sum_keys_of_tile(QueryTile& tile) {
    const TileRegisters registers;
    Tile(tile, false).sum_keys();
}
void sum_rows_of_tile(QueryTile& tile) {
    const TileRegisters registers;
    Tile(tile, false).sum_rows();
}

}  // namespace
}  // namespace fa::cpu::FA_ISA

namespace fa::cpu {
const TileKernel FA_TILE = {FA_LANES, FA_ISA::run_tile, FA_ISA::sum_keys_of_tile, FA_ISA::sum_rows_of_tile};
}
