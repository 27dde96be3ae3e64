// The tile kernels of both passes with 4 lanes and nothing but the baseline of the target architecture.
#define FA_ISA portable
#define FA_LANES 4
#define FA_VECTORS 2
#define FA_TILE kTilePortable
#define FA_BACKWARD_TILE kBackwardTilePortable
#include "backward_tile_kernel.h"
#include "tile_kernel.h"
