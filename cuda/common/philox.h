// philox.h: counter-based random numbers, the same bits on every device. Philox4x32 (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011) of ten rounds, or of fewer: from seven on it passes all tests of that paper (table 2).
#pragma once

#include "common/types.h"

namespace fa {

constexpr int kDropoutColumns = 64;  // four calls decide so many elements of a row: attention/common/dropout.h

struct Philox4 {
    uint32_t word[4];
};

template <int kRounds = 10>
FA_HOST_DEVICE Philox4 philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
    for (int round = 0; round < kRounds; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(b >> 32) ^ c1 ^ k0, c1 = uint32_t(b);
        c2 = uint32_t(a >> 32) ^ c3 ^ k1, c3 = uint32_t(a);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

}  // namespace fa
