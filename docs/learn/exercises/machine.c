// machine.c: the two numbers of a roofline, of one core: how fast it multiplies and adds, and how fast memory answers.
#include <stdlib.h>
#include <time.h>

// As wide as a register: a wider one is kept in memory, and its roof is far too low.
#if defined(__AVX512F__)
enum { kBytes = 64 };
#elif defined(__AVX__)
enum { kBytes = 32 };
#else
enum { kBytes = 16 };
#endif
typedef float vector __attribute__((vector_size(kBytes)));
enum { kWidth = kBytes / 4, kChains = 12, kSteps = 2000000, kFloats = 1 << 24 };

int bytes_of_a_vector(void) { return kBytes; }

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

// Independent chains of multiply-adds, enough to hide their latency.
double operations_a_second(void) {
    vector sum[kChains];
    for (int c = 0; c < kChains; ++c)
        for (int l = 0; l < kWidth; ++l) sum[c][l] = c + l;
    double best = 1e9;
    for (int turn = 0; turn < 4; ++turn) {
        const double start = seconds();
        for (int step = 0; step < kSteps / 4; ++step)
            for (int c = 0; c < kChains; ++c) sum[c] = sum[c] * 0.999f + 0.001f;
        const double took = seconds() - start;
        best = took < best ? took : best;
        __asm__ volatile("" ::"m"(sum) : "memory");
    }
    return 2.0 * kWidth * kChains * (kSteps / 4) / best;
}

// Sums of 64 MB that are read once each.
double bytes_a_second(void) {
    float* x = malloc(sizeof(float) * kFloats);
    if (!x) return 1e10;
    for (int i = 0; i < kFloats; ++i) x[i] = i;
    double best = 1e9;
    for (int turn = 0; turn < 3; ++turn) {
        const double start = seconds();
        vector sum[4] = {{0}};
        for (int i = 0; i < kFloats / kWidth; i += 4)
            for (int c = 0; c < 4; ++c) {
                vector part;
                __builtin_memcpy(&part, x + kWidth * (i + c), sizeof part);
                sum[c] += part;
            }
        __asm__ volatile("" ::"m"(sum) : "memory");
        const double took = seconds() - start;
        best = took < best ? took : best;
    }
    free(x);
    return sizeof(float) * (double)kFloats / best;
}
