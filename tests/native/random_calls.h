// random_calls.h: what programs that check random calls on the CPU share: numbers from the seed of a call, and an end that names the call.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <random>

namespace random_calls {

inline unsigned seed;
inline std::mt19937 generator;
inline int below(int count) { return count <= 0 ? 0 : int(generator() % unsigned(count)); }

inline void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("call %u: %s\n", seed, what);
    std::exit(1);
}

}  // namespace random_calls
