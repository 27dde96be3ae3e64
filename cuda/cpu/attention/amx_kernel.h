// amx_kernel.h: the two products of a tile in AMX (Sapphire Rapids and newer), for bfloat16. Included by tile_kernel.h inside the namespace
// of that instruction set.
//
// TDPBF16PS adds to a tile of 16 x 16 float32 the product of 16 x 32 and 32 x 16 bfloat16. Both products keep the transposed layout of
// tile_kernel.h, so everything between them is the same code: S^T (keys, queries) = K Q^T and O^T (headdim_v, queries) += V^T P^T. The left
// operand lies row by row, 32 summed elements in 64 bytes; the right one pair by pair: a row holds, for each of 16 queries, two neighbours
// along the summed axis. Arrays of pairs (uint32_t) have the even neighbour in the low half.
//
// K, Q and V are exact in bfloat16. P is rounded to it, as on a GPU; row_sum adds P before it is rounded. AMX takes subnormal numbers as 0.
// An element of a product does not depend on the other rows and columns of its tile.
#pragma once

constexpr int kSummed = 32;  // elements along the summed axis that one instruction multiplies
FA_INLINE constexpr int whole(int count, int step) { return (count + step - 1) / step * step; }

// The eight tile registers, each 16 rows of 64 bytes, while this lives.
struct TileRegisters {
    TileRegisters() {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; ++i) shape.row_bytes[i] = 64, shape.rows[i] = 16;
        __asm__ volatile("" : "+m"(shape));  // GCC's intrinsic says that it reads 8 bytes, so it would drop the other stores
        _tile_loadconfig(&shape);
    }
    ~TileRegisters() { _tile_release(); }
};

// Operands in memory. A tile of A or C is 16 rows down from the one before, a tile of B or C 64 bytes to the right.
struct Operand {
    const char* data;
    int64_t row, step;  // bytes between rows, and between what consecutive instructions read
};

// C (16 kM, 16 kN) = or += A (16 kM, 32 steps) B (32 steps, 16 kN). c_row: bytes between rows of C.
template <int kM, int kN>
FA_INLINE void multiply_tiles(Operand a, Operand b, int steps, char* c, int64_t c_row, bool add) {
    static_assert((kM == 1 || kM == 2) && (kN == 1 || kN == 2), "four tiles of C, two of A, two of B");
    char* const below = c + 16 * c_row;
    __asm__ volatile("" ::: "memory");  // the intrinsics do not say that they read memory
    if (add) {
        _tile_loadd(0, c, c_row);
        if constexpr (kN == 2) _tile_loadd(1, c + 64, c_row);
        if constexpr (kM == 2) _tile_loadd(2, below, c_row);
        if constexpr (kM == 2 && kN == 2) _tile_loadd(3, below + 64, c_row);
    } else {
        _tile_zero(0);
        if constexpr (kN == 2) _tile_zero(1);
        if constexpr (kM == 2) _tile_zero(2);
        if constexpr (kM == 2 && kN == 2) _tile_zero(3);
    }
    for (int i = 0; i < steps; ++i, a.data += a.step, b.data += b.step) {
        _tile_loadd(4, a.data, a.row);
        _tile_loadd(6, b.data, b.row);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (kN == 2) {
            _tile_loadd(7, b.data + 64, b.row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (kM == 2) {
            _tile_loadd(5, a.data + 16 * a.row, a.row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if constexpr (kM == 2 && kN == 2) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_row);
    if constexpr (kN == 2) _tile_stored(1, c + 64, c_row);
    if constexpr (kM == 2) _tile_stored(2, below, c_row);
    if constexpr (kM == 2 && kN == 2) _tile_stored(3, below + 64, c_row);
    __asm__ volatile("" ::: "memory");
}
// The same for `rows` rows of C, a multiple of 16, and kWidth vectors of queries.
template <int kWidth>
FA_INLINE void multiply(Operand a, Operand b, int steps, int rows, char* c, bool add) {
    constexpr int64_t kRow = kWidth * 64;
    b.row = kRow, b.step = 16 * kRow;
    for (int m = 0; m < rows; m += 32) {
        const auto columns = [&](auto tiles) __attribute__((always_inline)) {
            constexpr int kM = decltype(tiles)::value;
            const Operand left{a.data + m * a.row, a.row, a.step};
            char* const to = c + m * kRow;
            int n = 0;
            for (; n + 2 <= kWidth; n += 2) multiply_tiles<kM, 2>(left, {b.data + n * 64, b.row, b.step}, steps, to + n * 64, kRow, add);
            if (n < kWidth) multiply_tiles<kM, 1>(left, {b.data + n * 64, b.row, b.step}, steps, to + n * 64, kRow, add);
        };
        if (m + 16 < rows) columns(Width<2>());
        else columns(Width<1>());
    }
}

// Two vectors of floats that are bfloat16, lane by lane in pairs.
FA_INLINE UVec pairs(Vec even, Vec odd) { return (UVec)even >> 16 | ((UVec)odd & 0xFFFF0000u); }
// The same, rounded to nearest even. NaN stays NaN.
FA_INLINE UVec rounded_pairs(Vec even, Vec odd) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);  // all of `even`, then all of `odd`
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                           18, 2, 17, 1, 16, 0);
    return (UVec)_mm512_permutexvar_epi16(order, halves);
}

// Q^T (headdim, queries) in floats -> pairs along headdim, padded with zeros to whole instructions.
FA_INLINE void pack_queries(const float* q, int width, int headdim, uint32_t* to) {
    const auto at = [&](int d, int n) { return d < headdim ? *(const Vec*)(q + (int64_t(d) * width + n) * L) : Vec{}; };
    for (int d = 0; d < whole(headdim, kSummed); d += 2)
        for (int n = 0; n < width; ++n) *(UVec*)(to + (d / 2 * width + n) * L) = pairs(at(d, n), at(d + 1, n));
}
// K (keys, headdim) in floats, from row `from` on -> rows of bfloat16, padded with zeros to whole instructions.
FA_INLINE void pack_keys(const float* k, int64_t ld_k, int from, int keys, int headdim, uint16_t* to) {
    const int row = whole(headdim, kSummed);
    for (int j = from; j < keys; ++j)
        for (int d = 0; d < row; d += L) {  // a row of floats is padded with zeros to a whole vector
            const UVec x = d < headdim ? *(const UVec*)(k + j * ld_k + d) : UVec{};
            *(HalfVec*)(to + j * row + d) = __builtin_convertvector(x >> 16, HalfVec);
        }
}
// V (keys, headdim_v) in floats, from row `from` on -> V^T: rows of kTileKeys bfloat16, with zeros in the rest of the first and the last
// instruction.
FA_INLINE void pack_values(const float* v, int64_t ld_v, int from, int keys, int headdim_v, uint16_t* to) {
    for (int j = from / kSummed * kSummed; j < keys; j += kSummed)
        for (int d = 0; d < headdim_v; d += L) {
            const auto at = [&](int key) { return key >= from && key < keys ? *(const Vec*)(v + key * ld_v + d) : Vec{}; };
            Vec x[L];  // x[i]: keys j + 2i and j + 2i + 1 of 16 columns
            for (int i = 0; i < L; ++i) x[i] = (Vec)pairs(at(j + 2 * i), at(j + 2 * i + 1));
            transpose(x);
            for (int i = 0; i < L; ++i) *(Vec*)(to + (d + i) * kTileKeys + j) = x[i];
        }
}
// P^T (keys, queries) of keys begin .. end - 1 -> pairs along keys, with zeros in the rest of the first and the last instruction.
template <int kWidth>
FA_INLINE void pack_probabilities(const float* s, int begin, int end, uint32_t* to) {
    const auto at = [&](int key, int n) { return key >= begin && key < end ? *(const Vec*)(s + (key * kWidth + n) * L) : Vec{}; };
    for (int key = begin / kSummed * kSummed; key < whole(end, kSummed); key += 2)
        for (int n = 0; n < kWidth; ++n) *(UVec*)(to + (key / 2 * kWidth + n) * L) = rounded_pairs(at(key, n), at(key + 1, n));
}

// S^T of keys begin .. end - 1 of the tile, and of those that share a register tile with them.
template <int kWidth>
void scores(const uint16_t* k, int begin, int end, const uint32_t* q, int headdim, float scale, float* s) {
    const int row = whole(headdim, kSummed) * 2, first = begin / 16 * 16;
    multiply<kWidth>({(const char*)k + first * row, row, 64}, {(const char*)q, 0, 0}, row / 64, whole(end, 16) - first,
                     (char*)(s + first * kWidth * L), false);
    for (int x = begin * kWidth; x < end * kWidth; ++x) *(Vec*)(s + x * L) *= scale;
}
// O^T = O^T * correction + V^T P^T, over the keys of the instructions that cover begin .. end - 1.
template <int kWidth>
void output(const uint16_t* v, int begin, int end, int headdim_v, const uint32_t* p, const Vec* correction, float* out) {
    bool scales = false;
    for (int n = 0; n < kWidth; ++n)
        for (int l = 0; l < L; ++l) scales |= !(correction[n][l] == 1.0f);
    if (scales)
        for (int d = 0; d < headdim_v; ++d)
            for (int n = 0; n < kWidth; ++n) *(Vec*)(out + (d * kWidth + n) * L) *= correction[n];
    const int first = begin / kSummed * kSummed;
    multiply<kWidth>({(const char*)(v + first), kTileKeys * 2, 64}, {(const char*)(p + first / 2 * kWidth * L), 0, 0},
                     (whole(end, kSummed) - first) / kSummed, whole(headdim_v, 16), (char*)out, true);
}
