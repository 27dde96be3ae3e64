// float_mode.h: the arithmetic of a call does not depend on the mode that the caller's thread computes in.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fa::cpu {

// While it lives, this thread rounds to nearest, keeps subnormal numbers and traps nothing. A caller may have set something else:
// torch.set_flush_denormal, fesetround, or a library linked with -ffast-math. Every exported function that computes has one, and every
// thread that it starts. In the usual mode it costs one read of the control register.
class FloatMode {
public:
    FloatMode() : saved_(read()) {
        if (!usual()) write(kUsual);
    }
    ~FloatMode() {
        if (!usual()) write(saved_);
    }
    FloatMode(const FloatMode&) = delete;
    FloatMode& operator=(const FloatMode&) = delete;

private:
    // "memory": numbers are read after the mode is set, and written before it is set back.
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word kUsual = 0x1F80, kFlags = 0x3F;  // flags: what has happened so far; no mode
    static Word read() { return _mm_getcsr(); }
    static void write(Word word) { asm volatile("ldmxcsr %0" ::"m"(word) : "memory"); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    static constexpr Word kUsual = 0, kFlags = 0;
    static Word read() {
        Word word;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(Word word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
    using Word = uint32_t;
    static constexpr Word kUsual = 0, kFlags = 0;
    static Word read() { return kUsual; }
    static void write(Word) {}
#endif
    bool usual() const { return (saved_ & ~kFlags) == kUsual; }

    const Word saved_;
};

}  // namespace fa::cpu
