// The tile kernel with 4 lanes and nothing but the baseline of the target architecture.
#define FA_ISA portable
#define FA_LANES 4
#define FA_QUERY_VECTORS 2
#define FA_TILE kTilePortable
#include "tile_kernel.h"
