// rows.h: converts rows of the caller's dtype to and from vectors of floats. Like simd.h, it is included inside the namespace of
// an instruction set.
#pragma once

#include "cpu/common/simd.h"

FA_INLINE constexpr bool is_8bit(DType dtype) { return dtype == DType::kFloat8E4M3 || dtype == DType::kInt8; }
FA_INLINE constexpr int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : is_8bit(dtype) ? 1 : 2; }
FA_INLINE const char* address(const void* data, int64_t index, DType dtype) {
    return static_cast<const char*>(data) + index * element_size(dtype);
}

template <DType dtype>
FA_INLINE Vec load_vector(const char* from) {
    if constexpr (dtype == DType::kFloat32) return load_unaligned<Vec>(from);
    if constexpr (dtype == DType::kFloat16) return float16_to_float(load_unaligned<HalfVec>(from));
    if constexpr (dtype == DType::kBFloat16) return bfloat16_to_float(load_unaligned<HalfVec>(from));
    if constexpr (dtype == DType::kFloat8E4M3) return e4m3_to_float(load_unaligned<ByteVec>(from));
    if constexpr (dtype == DType::kInt8) return int8_to_float(load_unaligned<SignedByteVec>(from));
}
template <DType dtype>
FA_INLINE Vec load_partial(const char* from, int count) {  // the first `count` lanes, fewer than L; the other lanes are 0
#if defined(__AVX512F__)
    const __mmask16 lanes = __mmask16((1u << count) - 1);
    if constexpr (dtype == DType::kFloat32) return (Vec)_mm512_maskz_loadu_ps(lanes, from);
    if constexpr (dtype == DType::kFloat16) return float16_to_float((HalfVec)_mm256_maskz_loadu_epi16(lanes, from));
    if constexpr (dtype == DType::kBFloat16) return bfloat16_to_float((HalfVec)_mm256_maskz_loadu_epi16(lanes, from));
    if constexpr (dtype == DType::kFloat8E4M3) return e4m3_to_float((ByteVec)_mm_maskz_loadu_epi8(lanes, from));
    if constexpr (dtype == DType::kInt8) return int8_to_float((SignedByteVec)_mm_maskz_loadu_epi8(lanes, from));
#else
    char bytes[4 * L] = {};
    __builtin_memcpy(bytes, from, size_t(count) * size_t(element_size(dtype)));
    return load_vector<dtype>(bytes);
#endif
}
FA_INLINE Vec load_any(const char* from, int count, DType dtype) {
    if (dtype == DType::kFloat32) return count >= L ? load_vector<DType::kFloat32>(from) : load_partial<DType::kFloat32>(from, count);
    if (dtype == DType::kFloat16) return count >= L ? load_vector<DType::kFloat16>(from) : load_partial<DType::kFloat16>(from, count);
    return count >= L ? load_vector<DType::kBFloat16>(from) : load_partial<DType::kBFloat16>(from, count);
}
FA_INLINE void store_any(char* to, int count, DType dtype, Vec x) {
    if (dtype == DType::kFloat32) {
        if (count >= L) __builtin_memcpy(to, &x, sizeof x);
        else __builtin_memcpy(to, &x, size_t(count) * 4);
    } else {
        const HalfVec half = dtype == DType::kFloat16 ? float_to_float16(x) : float_to_bfloat16(x);
        __builtin_memcpy(to, &half, size_t(count < L ? count : L) * 2);
    }
}

// Copies `rows` rows of `dim` elements to float32. Row i of 8-bit elements is multiplied by scale[i * scale_row]. Returns whether all
// elements are finite.
template <DType dtype>
bool copy_rows(const char* from, int64_t row_bytes, int rows, int dim, float* to, int64_t ld, const float* scale = nullptr,
               int64_t scale_row = 0) {
    constexpr int size = int(element_size(dtype));
    constexpr int kAhead = 8;  // in rows; the processor itself prefetches only adjacent rows
    Vec poison = {};           // x * 0 is NaN for an infinity or a NaN, and then the sum is NaN
    for (int i = 0; i < rows; ++i, from += row_bytes, to += ld) {
        const float factor = is_8bit(dtype) ? scale[i * scale_row] : 1;
        if (i + kAhead < rows && row_bytes != dim * size)
            for (int byte = 0; byte < dim * size; byte += 64) __builtin_prefetch(from + kAhead * row_bytes + byte);
        int d = 0;
        for (; d + L <= dim; d += L) {
            Vec x = load_vector<dtype>(from + int64_t(d) * size);
            if constexpr (is_8bit(dtype)) x *= factor;
            poison += x * 0.0f;
            *(Vec*)(to + d) = x;
        }
        if (d < dim) {
            Vec x = load_partial<dtype>(from + int64_t(d) * size, dim - d);
            if constexpr (is_8bit(dtype)) x *= factor;
            poison += x * 0.0f;
            *(Vec*)(to + d) = x;  // ld is a whole number of vectors
        }
    }
    bool finite = true;
    for (int l = 0; l < L; ++l) finite &= poison[l] == 0.0f;
    return finite;
}
bool copy_rows(const TensorView& t, int64_t first, int rows, int dim, DType dtype, float* to, int64_t ld) {
    const char* from = address(t.data, first, dtype);
    const int64_t row_bytes = t.row * element_size(dtype);
    if (dtype == DType::kFloat32) return copy_rows<DType::kFloat32>(from, row_bytes, rows, dim, to, ld);
    if (dtype == DType::kFloat16) return copy_rows<DType::kFloat16>(from, row_bytes, rows, dim, to, ld);
    return copy_rows<DType::kBFloat16>(from, row_bytes, rows, dim, to, ld);
}

// Visits keys first .. first + rows - 1 of sequence b: rows of K or V with a constant stride from element `start` on, or rows of a cache.
// Calls body(i, run, offset, factor) for each run of keys: first + i .. first + i + run - 1 lie t.row elements apart, from `offset` on. For
// 8-bit elements factor[0] is the factor of the run's first key.
template <typename Body>
FA_INLINE void for_runs(const AttentionParams& p, const TensorView& t, const CacheScale& scale, int64_t start, int32_t b, int32_t head,
                        int first, int rows, const Body& body) {
    const CacheView& c = p.cache;
    if (!c.block_table && (!c.entries || c.dtype == p.dtype)) {
        body(0, rows, start + first * t.row, static_cast<const float*>(nullptr));
        return;
    }
    for (int i = 0, run; i < rows; i += run) {  // one run per page
        int64_t entry = c.batch_idx ? c.batch_idx[b] : b, row = (c.leftpad ? c.leftpad[b] : 0) + first + i;
        run = rows - i;
        if (c.block_table) {
            entry = c.block_table[b * c.table_row + row / c.page_size], row %= c.page_size;
            if (c.page_size - row < run) run = int(c.page_size - row);
        }
        const float* const factor = is_8bit(c.dtype) ? scale.data + entry * scale.batch + row * scale.row + head * scale.head : nullptr;
        body(i, run, entry * t.batch + row * t.row + head * t.head, factor);
    }
}

bool copy_keys(const AttentionParams& p, const TensorView& t, const CacheScale& scale, int64_t start, int32_t b, int32_t head, int first,
               int rows, int dim, float* to, int64_t ld) {
    const DType dtype = p.cache.entries ? p.cache.dtype : p.dtype;
    bool finite = true;
    for_runs(p, t, scale, start, b, head, first, rows, [&](int i, int run, int64_t offset, const float* factor) {
        float* const at = to + i * ld;
        if (is_8bit(dtype)) {
            const char* from = address(t.data, offset, dtype);
            finite &= (dtype == DType::kInt8 ? copy_rows<DType::kInt8> : copy_rows<DType::kFloat8E4M3>)(from, t.row, run, dim, at, ld,
                                                                                                        factor, scale.row);
        } else {
            finite &= copy_rows(t, offset, run, dim, p.dtype, at, ld);
        }
    });
    return finite;
}
