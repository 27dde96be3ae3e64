// isa.h: the instruction sets that the tile kernels are compiled for.
#pragma once

namespace fa::cpu {

enum class Isa { kPortable, kAvx2, kAvx512, kAmx, kNeon };

bool isa_available(Isa isa);  // true if the kernels of this set are compiled in and the processor has the set

}  // namespace fa::cpu
