#include "cpu/common/isa.h"

#if FA_WITH_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fa::cpu {
namespace {

#if FA_WITH_AMX
// Linux lets a process use the tile registers once it has asked for them. A process whose signal stacks are too small for them is refused.
bool may_use_tiles() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
bool has_amx() {
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kAmxBf16 | kAmxTile)) != (kAmxBf16 | kAmxTile)) return false;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvx512Bf16) && may_use_tiles();
}
#endif

}  // namespace

bool isa_available(Isa isa) {
    switch (isa) {
        case Isa::kPortable: return true;
#if defined(__x86_64__)
        case Isa::kAvx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::kAvx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
#if FA_WITH_AMX
        case Isa::kAmx: {
            static const bool found = isa_available(Isa::kAvx512) && has_amx();
            return found;
        }
#endif
#elif defined(__aarch64__)
        case Isa::kNeon: return true;
#endif
        default: return false;
    }
}

}  // namespace fa::cpu
