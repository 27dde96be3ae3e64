#include "cpu/common/isa.h"

namespace fa::cpu {

bool isa_available(Isa isa) {
    switch (isa) {
        case Isa::kPortable: return true;
#if defined(__x86_64__)
        case Isa::kAvx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        case Isa::kAvx512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl");
#elif defined(__aarch64__)
        case Isa::kNeon: return true;
#endif
        default: return false;
    }
}

}  // namespace fa::cpu
