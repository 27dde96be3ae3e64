// expect.h: EXPECT for the small native programs. It counts all failures and prints the first 20.
#pragma once

#include <cstdio>

namespace {
int failures = 0;
}

#define EXPECT(condition, ...)                                          \
    do {                                                                \
        if (!(condition) && ++failures <= 20) {                         \
            std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
            std::printf(__VA_ARGS__);                                   \
            std::printf("\n");                                          \
        }                                                               \
    } while (0)
