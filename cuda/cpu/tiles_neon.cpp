// The tile kernels of both passes and of linear for 64-bit ARM: 4 lanes, 32 registers. NEON is part of the baseline, so no
// flags are needed.
#define FA_ISA neon
#define FA_LANES 4
#define FA_VECTORS 4
#define FA_TILE kTileNeon
#define FA_BACKWARD_TILE kBackwardTileNeon
#define FA_LINEAR kLinearNeon
#define FA_LINEAR_W4 kLinearW4Neon
#include "cpu/attention/backward_tile_kernel.h"
#include "cpu/attention/tile_kernel.h"
//
#include "cpu/transformer/linear_tile_kernel.h"
//
#include "cpu/transformer/linear_w4_tile_kernel.h"
