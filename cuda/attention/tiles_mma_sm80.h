// tiles_mma_sm80.h: the shape of a tile of forward_mma_sm80.cu for each head dim, and which of two a call takes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fa {

struct MmaTile {
    int block_m, block_n;  // queries per block, keys per step
    int warps;             // a warp owns block_m / warps query rows, 16 or 32
    int stages;            // 2: K and V of the next tile fly while this one is computed; 1: K and V take turns, in half the memory
    int blocks_per_sm;     // what the compiler may assume when it allots registers: 32 warps x registers x blocks <= 65536
    bool q_in_registers;   // Q's fragments stay in registers for the whole loop instead of being read again for every tile
};

// Head dims are padded with zeros to a bucket: Q and K to d, V and the output to dv. A bucket for each pair would be 25; only
// (192, 128) is used by models, every other pair runs in the larger of the two.
//
// Shared memory that ldmatrix reads for each m16n8k16, the measure of a tile (an SM reads 128 bytes a cycle, and its tensor cores take one
// mma.sync about every 1.6 cycles on sm_90, every 2 on sm_80):
//     rows of a warp   Q                   bytes, 64 keys    32 keys     cycles, 64 keys
//     16               in shared memory    288               320         2.25
//     16               in registers        256               256         2
//     32               in shared memory    160               192         1.25
//     32               in registers        128               128         1
// so a warp should own 32 rows wherever the registers allow it: O takes dv of them, S 64 at 64 keys. That is up to dv = 128.
constexpr MmaTile mma_tile(int d, int dv, bool large) {
    if (large) {
        if (d <= 64) return {128, 64, 4, 2, 2, true};     // O 64 + S 64 + Q 32 registers; 48 KB
        if (d <= 96) return {128, 64, 4, 2, 2, false};    // O 96 + S 64; 72 KB: two blocks on an SM of sm_80 and of sm_90
        if (dv <= 128) return {128, 64, 4, 1, 2, false};  // O 128 + S 64; 64 KB, (192, 128) 88 KB: two blocks where two stages allow one
        if (d <= 192) return {128, 64, 8, 2, 1, false};   // O 96 + S 32; 144 KB, one block of 8 warps
        return {128, 64, 8, 1, 1, false};                 // O 128 + S 32; 128 KB, which sm_80 still has
    }
    // For grids that large tiles would not spread over the GPU, for options, which need registers, and for SMs of 99 KB (sm_86, 89, 120).
    if (d <= 128) return {64, 64, 4, 2, 2, false};     // at most 80 KB
    if (d <= 192) return {64, 32, 4, 2, 2, false};     // 72 KB
    return {64, 32, 4, 2, 1, false};                   // 96 KB
}

// Query heads whose tiles run side by side: heads are taken in sections, so that the K and V of a section are read from memory once and
// then from L2. 16 MB fit beside other traffic in the L2 of A100 (40), H100 (50) and most GPUs since; smaller ones only lose this gain.
inline int64_t heads_per_section(int64_t seqlen_k, int d, int dv, int group) {
    constexpr int64_t kSectionBytes = int64_t(16) << 20;
    const int64_t heads_k = kSectionBytes / ((seqlen_k > 0 ? seqlen_k : 1) * (d + dv) * 2);
    return (heads_k > 1 ? heads_k : 1) * group;
}

}  // namespace fa
