// The tile kernels of both passes and of linear for AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers. Compiled with the matching -m flags.
#define FA_ISA avx512
#define FA_LANES 16
#define FA_VECTORS 4
#define FA_TILE kTileAvx512
#define FA_BACKWARD_TILE kBackwardTileAvx512
#define FA_LINEAR kLinearAvx512
#define FA_LINEAR_W4 kLinearW4Avx512
#include "cpu/attention/backward_tile_kernel.h"
#include "cpu/attention/tile_kernel.h"
//
#include "cpu/transformer/linear_tile_kernel.h"
//
#include "cpu/transformer/linear_w4_tile_kernel.h"
