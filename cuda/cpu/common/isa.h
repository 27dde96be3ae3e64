// isa.h: the instruction sets for which the tile kernels are compiled.
#pragma once

namespace fa::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kNeon };

bool isa_available(Isa isa);  // true when the kernels of this set are compiled in and the processor has the set

}  // namespace fa::cpu
