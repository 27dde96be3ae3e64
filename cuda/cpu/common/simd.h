// simd.h: vectors of FA_LANES floats in GCC's and Clang's vector extensions, and the few functions that attention needs on them.
// The tile kernels include it once per instruction set, inside a namespace of that set. Object files compiled with different flags must not
// share any function of this file: the linker would keep one copy for all of them, perhaps one that this processor cannot run.
#pragma once

constexpr int L = FA_LANES;
typedef float Vec __attribute__((vector_size(4 * L), may_alias));
typedef int32_t IVec __attribute__((vector_size(4 * L), may_alias));
struct KeysOfLanes {  // for templates: see HiddenRowsOf
    using Rows = IVec;
};
typedef uint32_t UVec __attribute__((vector_size(4 * L), may_alias));
typedef uint64_t U64Vec __attribute__((vector_size(8 * L), may_alias));
typedef uint16_t HalfVec __attribute__((vector_size(2 * L), may_alias));
typedef uint8_t ByteVec __attribute__((vector_size(L), may_alias));
typedef int8_t SignedByteVec __attribute__((vector_size(L), may_alias));
typedef int16_t ShortVec __attribute__((vector_size(2 * L), may_alias));

#define FA_INLINE static inline __attribute__((always_inline))

constexpr float kInfinity = __builtin_inff();

FA_INLINE Vec splat(float x) { return x - Vec{}; }
FA_INLINE IVec splat(int32_t x) { return x - IVec{}; }
FA_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
FA_INLINE Vec abs(Vec x) { return (Vec)((IVec)x & 0x7FFFFFFF); }

template <typename V>
FA_INLINE V load_unaligned(const void* data) {
    V x;
    __builtin_memcpy(&x, data, sizeof x);
    return x;
}

// Otherwise the compiler loads the vector again for each use.
FA_INLINE void keep_in_register(Vec& x) {
#if defined(__AVX512F__)
    __asm__("" : "+v"(x));
#elif defined(__AVX__)
    __asm__("" : "+x"(x));
#endif
    (void)x;
}

// Rounds a product to float32 here. Otherwise the compiler may fuse it with a later addition in one function and not in another, but the
// forward and the backward pass must have the same bits.
FA_INLINE void round_now(Vec& x) {
#if defined(__aarch64__)
    if constexpr (L == 4) __asm__("" : "+w"(x));
#else
    keep_in_register(x);  // without __AVX__ there is no fused instruction
#endif
}

// ---- 16-bit floats, converted by their bits: rounded to nearest even, NaN stays NaN ----

FA_INLINE Vec bfloat16_to_float(HalfVec x) { return (Vec)(__builtin_convertvector(x, UVec) << 16); }
FA_INLINE HalfVec float_to_bfloat16(Vec x) {
    const UVec bits = (UVec)x;
    const UVec rounded = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
    return __builtin_convertvector((UVec)(x == x ? (IVec)rounded : (IVec)(bits >> 16 | 0x40u)), HalfVec);
}

FA_INLINE Vec float16_to_float(HalfVec x) {
#if defined(__AVX512F__)
    return (Vec)_mm512_maskz_cvtph_ps(__mmask16(-1), (__m256i)x);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)x);
#else
    const UVec bits = __builtin_convertvector(x, UVec), magnitude = (bits & 0x7FFFu) << 13;
    const UVec finite = (UVec)((Vec)magnitude * splat(0x1p112f));  // moves the exponent; exact for subnormals too
    const UVec special = magnitude | 0x7F800000u;
    return (Vec)((bits & 0x8000u) << 16 | (UVec)(magnitude >= 0x0F800000u ? (IVec)special : (IVec)finite));
#endif
}
FA_INLINE HalfVec float_to_float16(Vec x) {
    const UVec bits = (UVec)x, magnitude = bits & 0x7FFFFFFFu;
    const UVec normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13;
    const UVec subnormal = (UVec)((Vec)magnitude + splat(0.5f)) - 0x3F000000u;  // the sum's low bits are the rounded result
    UVec half = (UVec)(magnitude < 0x38800000u ? (IVec)subnormal : (IVec)normal);
    half = (UVec)(magnitude >= 0x477FF000u ? splat(0x7C00) : (IVec)half);  // 65520 and above round to infinity
    half = (UVec)(x == x ? (IVec)half : splat(0x7E00));
    return __builtin_convertvector(half | (bits >> 16 & 0x8000u), HalfVec);
}

// ---- 8-bit elements of a cache, by their bits ----

// Without an intrinsic, or two steps, GCC 12 widens from 8 to 32 bits lane by lane.
FA_INLINE IVec widened(SignedByteVec x) {
#if defined(__AVX512F__)
    return (IVec)_mm512_maskz_cvtepi8_epi32(__mmask16(-1), (__m128i)x);
#elif defined(__AVX2__)
    return (IVec)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)x));
#else
    return __builtin_convertvector(__builtin_convertvector(x, ShortVec), IVec);
#endif
}
FA_INLINE Vec int8_to_float(SignedByteVec x) { return __builtin_convertvector(widened(x), Vec); }
FA_INLINE Vec e4m3_to_float(ByteVec x) {
    const UVec bits = (UVec)widened((SignedByteVec)x);                     // sign-extended: the sign bit fills all bits above the magnitude
    const Vec number = (Vec)(bits << 20 & 0x87F00000u) * splat(0x1p120f);  // moves the exponent; exact for subnormals too
    return (bits & 0x7Fu) == 0x7Fu ? (Vec)splat(0x7FC00000) : number;
}

// ---- elementary functions ----

// e^x for x <= 88, within about 1 ulp. A result that would be subnormal is 0. NaN stays NaN.
FA_INLINE Vec exp(Vec x) {
    const Vec magic = splat(0x1.8p23f);  // adding it rounds to an integer, which is then in the low bits
    const Vec t = x * 0x1.715476p0f + magic;
    const Vec n = t - magic;
    Vec r = x - n * 0x1.62e4p-1f;  // ln 2 in two parts; n times the first part is exact
    r = r - n * 0x1.7f7d1cp-20f;
    Vec y = r * 0.0013814467f + 0.008368781f;  // minimax on |r| <= ln(2) / 2
    y = y * r + 0.041668393f;
    y = y * r + 0.1666652f;
    y = y * r + 0.49999994f;
    y = y * r + 1.0f;
    y = y * r + 1.0f;
    const Vec power = (Vec)(((UVec)t << 23) + 0x3F800000u);  // unsigned, so it may wrap where x is out of range
    return x < -87.33654f ? Vec{} : y * power;
}

// P = exp(S - lse) for keys of a row whose lse is row_max + log_sum. P is never above 1: the pass that computed lse may have summed a
// product in another order, so S may be larger here.
FA_INLINE Vec probability(Vec s, Vec row_max, Vec log_sum) {
    Vec zero = {};
    keep_in_register(zero);  // so that the compiler emits one minimum instruction, which returns x if x is NaN
    const Vec x = s - row_max - log_sum;
    return exp(zero < x ? zero : x);
}

FA_INLINE Vec tanh(Vec x) {
    const Vec a = abs(x), z = x * x;
    Vec small = z * -0.005515151f + 0.020469408f;  // |x| < 0.65: odd polynomial, accurate relative to x
    small = small * z + -0.05368802f;
    small = small * z + 0.1333083f;
    small = small * z + -0.3333326f;
    small = small * z * x + x;
    const Vec big = 1.0f - 2.0f / (exp(2.0f * (a > 10.0f ? splat(10.0f) : a)) + 1.0f);
    const Vec signed_big = (Vec)((IVec)big | ((IVec)x & INT32_MIN));
    return a < 0.65f ? small : x == x ? signed_big : x;
}

// ---- transposes a square of L x L floats in place: each step swaps off-diagonal blocks of half the size ----

template <int... i>
struct Lanes {};
template <int n, int... i>
struct MakeLanes : MakeLanes<n - 1, n - 1, i...> {};
template <int... i>
struct MakeLanes<0, i...> {
    typedef Lanes<i...> Type;
};

template <int block, int... i>
FA_INLINE void swap_blocks(Vec& a, Vec& b, Lanes<i...>) {  // swaps a's lanes with the bit `block` and b's lanes without it
    const Vec x = __builtin_shufflevector(a, b, (i & block ? L + i - block : i)...);
    b = __builtin_shufflevector(a, b, (i & block ? L + i : i + block)...);
    a = x;
}
template <int block>
FA_INLINE void transpose_from(Vec (&x)[L]) {
    if constexpr (block > 0) {
#pragma GCC unroll 16
        for (int i = 0; i < L; ++i)
            if (!(i & block)) swap_blocks<block>(x[i], x[i + block], typename MakeLanes<L>::Type());
        transpose_from<block / 2>(x);
    }
}
FA_INLINE void transpose(Vec (&x)[L]) { transpose_from<L / 2>(x); }

// ---- sums over the lanes ----

template <int block, int... i>
FA_INLINE Vec swapped(Vec x, Lanes<i...>) {  // swaps lanes with the bit `block` and lanes without it
    return __builtin_shufflevector(x, x, (i ^ block)...);
}

template <int block, int... i>
FA_INLINE Vec add_blocks(Vec a, Vec b, Lanes<i...>) {  // lanes without the bit `block` sum a, lanes with it sum b
    return __builtin_shufflevector(a, b, (i & block ? L + i - block : i)...) +
           __builtin_shufflevector(a, b, (i & block ? L + i : i + block)...);
}
template <int block, int count>
FA_INLINE Vec sum_from(const Vec* x) {  // sums the lanes of each of `count` vectors; count is a power of two
    if constexpr (block == L) return x[0];
    else if constexpr (count == 1) {
        const Vec sum = add_blocks<block>(x[0], x[0], typename MakeLanes<L>::Type());
        return sum_from<block * 2, 1>(&sum);
    } else {
        Vec sum[count / 2];
#pragma GCC unroll 8
        for (int n = 0; n < count / 2; ++n) sum[n] = add_blocks<block>(x[2 * n], x[2 * n + 1], typename MakeLanes<L>::Type());
        return sum_from<block * 2, count / 2>(sum);
    }
}
template <int... i>
FA_INLINE auto first_lanes(Vec x, Lanes<i...>) {
    return __builtin_shufflevector(x, x, i...);
}
// to[n] += the sum of x[n]'s lanes; count is a power of two up to L.
template <int count>
FA_INLINE void add_sums(const Vec (&x)[count], float* to) {
    const Vec sum = sum_from<1, count>(x);
    if constexpr (count == 1) *to += sum[0];
    else {
        const auto sums = first_lanes(sum, typename MakeLanes<count>::Type());
        const auto total = load_unaligned<decltype(sums + sums)>(to) + sums;
        __builtin_memcpy(to, &total, sizeof total);
    }
}

// ---- Philox4x32 in every lane (common/philox.h): four words of random bits per lane ----

template <int kRounds>
FA_INLINE void philox(UVec c0, UVec c1, UVec c2, UVec c3, const uint32_t key[2], UVec (&word)[4]) {
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < kRounds; ++round) {
        const U64Vec a = __builtin_convertvector(c0, U64Vec) * uint64_t(0xD2511F53u);
        const U64Vec b = __builtin_convertvector(c2, U64Vec) * uint64_t(0xCD9E8D57u);
        c0 = __builtin_convertvector(b >> 32, UVec) ^ c1 ^ k0, c1 = __builtin_convertvector(b, UVec);
        c2 = __builtin_convertvector(a >> 32, UVec) ^ c3 ^ k1, c3 = __builtin_convertvector(a, UVec);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

// ---- numbers of dropout (attention/common/dropout.h) ----

// Rotates each half by a bit, so that its two numbers are its bytes: first that of an even eight of columns, in the upper byte.
FA_INLINE UVec dropout_numbers(UVec word) { return (word << 1 & 0xFFFEFFFEu) | (word >> 15 & 0x00010001u); }
// The shift to the number of element i of the four that a word decides, in the order of their columns.
constexpr int dropout_number(int i) { return 16 * (i % 2) + (i / 2 % 2 ? 0 : 8); }

// ---- register tiles of the matrix products ----

constexpr int kVectors = FA_VECTORS;  // width of the widest register tile

// Height of a register tile of this width: as many accumulators as fit into the registers beside the operands.
constexpr int height(int width) { return width == 4 ? 6 : width == 3 ? 8 : width == 2 && kVectors == 2 ? 6 : 12; }

// Number of products that are summed in one register before the sum is added to the total. Without a fused multiply-add every product is
// rounded too; short partial sums make up for that error.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr int kSumLength = 512;
#else
constexpr int kSumLength = 16;
#endif
