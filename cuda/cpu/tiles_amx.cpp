// The tile kernel of the forward pass for AVX-512 with AMX: products of bfloat16. Compiled with the matching -m flags.
#define FA_ISA amx
#define FA_LANES 16
#define FA_VECTORS 4
#define FA_AMX 1
#define FA_TILE kTileAmx
#include "cpu/attention/tile_kernel.h"
