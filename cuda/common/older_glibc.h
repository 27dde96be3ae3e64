// older_glibc.h: functions whose first version in glibc is asked for by name.
//
// When glibc gives a function a new version, linkers take the new one: exp and log of double in 2.29, dlopen in 2.34. A wheel has to load
// with glibc 2.27, which has the first version alone. tests/package/test_packaging.py reads which versions a built library asks for.
#pragma once

#include <cstdlib>  // says __GLIBC__

#if defined(__GLIBC__) && defined(__x86_64__)
#define FA_FIRST_VERSION(function) __asm__(".symver " #function ", " #function "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define FA_FIRST_VERSION(function) __asm__(".symver " #function ", " #function "@GLIBC_2.17")
#else
#define FA_FIRST_VERSION(function) static_assert(true, "any version")
#endif
