// The tile kernel for 64-bit ARM: 4 lanes, 32 registers. NEON is in its baseline, so there are no flags.
#define FA_ISA neon
#define FA_LANES 4
#define FA_QUERY_VECTORS 4
#define FA_TILE kTileNeon
#include "tile_kernel.h"
