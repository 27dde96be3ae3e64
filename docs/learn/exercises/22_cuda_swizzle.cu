// 22_cuda_swizzle.cu: a warp reads a tile of 64 x 64 bf16 from shared memory with ldmatrix, again and again. With rows of 128 bytes one
// after another, the eight rows of a matrix lie in the same four banks. The exercise and its judge are in 22_cuda_swizzle.py.
#include "cuda_tools.cuh"
#include "device/mma.cuh"

constexpr int kRows = 64, kPieces = 8;

// The byte at which the 16-byte piece `piece` of row `row` lies.
__device__ __forceinline__ uint32_t offset(uint32_t row, uint32_t piece) {
#ifdef SLOW
    return 128 * row + 16 * piece;
#else
    (void)row, (void)piece;
    return 0;  // yours: kNotWritten
#endif
}

// fragments (4 row tiles, 4 column tiles, 32 lanes, 4 registers): the A operands of mma.m16n8k16.
__global__ void __launch_bounds__(32) read_fragments(const uint4* tile, uint4* fragments, int turns) {
    __shared__ alignas(1024) unsigned char smem[kRows * kPieces * 16];
    const uint32_t base = fa::shared_address(smem), lane = threadIdx.x;
    for (uint32_t i = lane; i < kRows * kPieces; i += 32) fa::store_shared_16(base + offset(i / kPieces, i % kPieces), tile[i]);
    __syncwarp();
    uint32_t d[4];
    for (int turn = 0; turn < turns; ++turn)
#pragma unroll
        for (uint32_t at = 0; at < 16; ++at) {
            const uint32_t row = at / 4 * 16 + lane % 16, piece = at % 4 * 2 + lane / 16;  // lanes 8 m to 8 m + 7 address matrix m
            fa::ldmatrix_x4(d, base + offset(row, piece));
            if (turn == 0) fragments[32 * at + lane] = make_uint4(d[0], d[1], d[2], d[3]);
        }
}

static void launch(const Arguments& a) { read_fragments<<<1, 32>>>((const uint4*)a.in[0], (uint4*)a.out[0], a.sizes[0]); }
