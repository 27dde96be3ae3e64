// The tile kernels of both passes and of linear for AVX2 with FMA and F16C: 8 lanes, 16 registers. Compiled with -mavx2 -mfma -mf16c.
#define FA_ISA avx2
#define FA_LANES 8
#define FA_VECTORS 2
#define FA_TILE kTileAvx2
#define FA_BACKWARD_TILE kBackwardTileAvx2
#define FA_LINEAR kLinearAvx2
#define FA_LINEAR_W4 kLinearW4Avx2
#include "cpu/attention/backward_tile_kernel.h"
#include "cpu/attention/tile_kernel.h"
//
#include "cpu/transformer/linear_tile_kernel.h"
//
#include "cpu/transformer/linear_w4_tile_kernel.h"
