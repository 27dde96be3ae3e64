// float_mode.h: makes the arithmetic of a call independent of the floating-point mode of the caller's thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace fa::cpu {

// While such an object lives, this thread rounds to nearest, keeps subnormal numbers and does not trap. A caller may have set another mode:
// torch.set_flush_denormal, fesetround, or a library linked with -ffast-math. Every exported function that computes holds one, and so does
// every thread that it starts. If the usual mode is already set, this costs one read of the control register.
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
    // "memory": loads come after the mode is set, and stores before it is restored.
#if defined(__x86_64__)
    using Word = uint32_t;
    static constexpr Word kUsual = 0x1F80, kFlags = 0x3F;  // kFlags: the sticky exception flags, which are not part of the mode
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
