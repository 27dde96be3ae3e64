// constants.h: the two factors that convert between 2^x, which kernels compute, and e^x, which users mean.
#pragma once

namespace fa {

constexpr double kLog2eDouble = 1.4426950408889634;
constexpr float kLog2e = float(kLog2eDouble);  // e^x = 2^(x kLog2e)
constexpr float kLn2 = 0.6931471805599453f;    // ln x = kLn2 log2 x

}  // namespace fa
