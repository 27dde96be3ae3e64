// The tile kernel for AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers. Compiled with the matching -m flags.
#define FA_ISA avx512
#define FA_LANES 16
#define FA_QUERY_VECTORS 4
#define FA_TILE kTileAvx512
#include "tile_kernel.h"
