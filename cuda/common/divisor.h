// divisor.h: division by a number known on the host before the launch, as one multiplication and one shift.
#pragma once

#include "common/types.h"

namespace fa {

// x / divisor for 0 <= x < 2^31.
struct Divisor {
    uint32_t divisor, shift;
    uint32_t factor;  // 2^shift / divisor, rounded up; between 2^31 and 2^32

    FA_HOST_DEVICE constexpr int divide(int x) const { return int(uint64_t(uint32_t(x)) * factor >> shift); }
    FA_HOST_DEVICE constexpr int remainder(int x, int quotient) const { return x - quotient * int(divisor); }
};

constexpr Divisor divisor_of(int32_t x) {  // x > 0
    Divisor d{uint32_t(x), 31, 0};
    while ((uint64_t(1) << (d.shift - 31)) < uint64_t(x)) ++d.shift;
    d.factor = uint32_t((uint64_t(1) << d.shift) / uint64_t(x)) + 1;
    return d;
}
static_assert(divisor_of(1).divide(INT32_MAX) == INT32_MAX && divisor_of(7).divide(INT32_MAX) == INT32_MAX / 7 &&
                  divisor_of(INT32_MAX).divide(INT32_MAX - 1) == 0 && divisor_of(3 << 20).divide((3 << 29) - 1) == 511,
              "the largest numbers are divided exactly, too");

}  // namespace fa
