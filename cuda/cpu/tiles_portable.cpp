// The tile kernels of both passes and of linear with 4 lanes and only the baseline instructions of the target architecture.
#define FA_ISA portable
#define FA_LANES 4
#define FA_VECTORS 2
#define FA_TILE kTilePortable
#define FA_BACKWARD_TILE kBackwardTilePortable
#define FA_LINEAR kLinearPortable
#define FA_LINEAR_W4 kLinearW4Portable
#include "cpu/attention/backward_tile_kernel.h"
#include "cpu/attention/tile_kernel.h"
//
#include "cpu/transformer/linear_tile_kernel.h"
//
#include "cpu/transformer/linear_w4_tile_kernel.h"
