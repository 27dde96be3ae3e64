// tiles_mma_sm80.h: the tile shapes of attention/forward/mma_sm80/kernel.cuh for each head dim, the choice among five for a call, and the
// short calls that it serves faster than attention/forward/wgmma_sm90/entry.cu; then the tiles of attention/backward/mma_sm80/kernel.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/divisor.h"
#include "device/device_info.h"

namespace fa {

struct MmaTile {
    int block_m, block_n;  // queries per block, keys per step
    int warps;             // a warp owns block_m / warps query rows, 16 or 32; with column_parts, so many times more
    int stages;            // 2: K and V of the next tile arrive while this one is computed; 1: K and V take turns, in half the memory
    int blocks_per_sm;     // promised to the compiler for its register allocation: 32 warps x registers x blocks <= 65536
    bool q_in_registers = false;  // Q's fragments stay in registers for the whole loop instead of being read again for every tile
    int column_parts = 1;         // warps that share rows: each sums S over a part of the columns of Q and K, and has a part of those of O
};
constexpr MmaTile with_q_in_registers(MmaTile tile) {
    tile.q_in_registers = true;
    return tile;
}
constexpr bool operator==(const MmaTile& a, const MmaTile& b) {
    return a.block_m == b.block_m && a.block_n == b.block_n && a.warps == b.warps && a.stages == b.stages &&
           a.blocks_per_sm == b.blocks_per_sm && a.q_in_registers == b.q_in_registers && a.column_parts == b.column_parts;
}

// The SM that a tile is made for, by its KB of shared memory. The first three, with blocks of at most 99 KB, run on all.
enum class MmaSm {
    kAny,    // for rows that do not start on 16 bytes, and for options, which need registers
    kShort,  // 16-bit, few keys: half the code, which each block has to fetch once, and small blocks, which start soon
    k99,     // 16-bit, sm_86, 89, 120; elsewhere for grids of too few large tiles to fill the GPU
    k164,    // sm_80
    k228     // sm_90
};
// Bytes that a block may ask for.
constexpr size_t kMostSharedSm80 = size_t(163) << 10;  // sm_80, 87
constexpr size_t kMostSharedSm86 = size_t(99) << 10;   // sm_86, 89, 120
constexpr size_t kMostSharedSm90 = size_t(227) << 10;  // sm_90, 100
// Those that its tile may take, of these three. GPUs from sm_100 on run PTX, which is a large part of the library: there all take the tiles
// that sm_120 has room for.
inline size_t tile_memory(const DeviceInfo& device) {
    return device.compute >= 100 && device.shared_memory > kMostSharedSm86 ? kMostSharedSm86 : device.shared_memory;
}

// What the code being compiled runs on. A GPU runs code of its own architecture and of lower ones with the same first digit; code of sm_90a
// runs on Hopper alone, so what is compiled for 90 without the letter is PTX, for GPUs from sm_100 on.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kTarget = 900;
#elif defined(__CUDA_ARCH__)
constexpr int kTarget = __CUDA_ARCH__ < 900 ? __CUDA_ARCH__ : 1000;
#endif
// Kernels leave out the code of tiles that no GPU able to run that code would take. A kernel says with the function by which the host
// chooses its tile where that is taken: taken(bytes that a tile may take). If its code was left out, it traps: should it be launched all
// the same, that must not look like a success.
constexpr bool runs_where(int target, size_t tile_memory) {
    if (tile_memory == kMostSharedSm90) return target == 900;
    if (tile_memory == kMostSharedSm80) return target < 890;  // sm_86, too: sm_87 runs its code
    return target != 900;
}
constexpr bool is_compiled(int target, bool (*taken)(size_t)) {
    return (runs_where(target, kMostSharedSm80) && taken(kMostSharedSm80)) ||
           (runs_where(target, kMostSharedSm86) && taken(kMostSharedSm86)) ||
           (runs_where(target, kMostSharedSm90) && taken(kMostSharedSm90));
}

// Head dims are padded with zeros to a bucket: Q and K to d, V and the output to dv. A bucket for each pair would make 25. Of the unequal
// pairs, models use only (192, 128); every other pair runs in the larger of its two buckets. Above 256, dv is the width of one part of V's
// columns.
//
// The measure of a tile is the bytes that ldmatrix reads from shared memory for each m16n8k16. (An SM reads 128 bytes a cycle, and its
// tensor cores take one mma.sync about every 1.6 cycles on sm_90, every 2 on sm_80.)
//     rows of a warp   Q                   bytes, 64 keys    32 keys     cycles, 64 keys
//     16               in shared memory    288               320         2.25
//     16               in registers        256               256         2
//     32               in shared memory    160               192         1.25
//     32               in registers        128               128         1
// So a warp should own 32 rows wherever the registers allow it: O takes dv of them, S takes 64 at 64 keys. That works up to dv = 128.
constexpr MmaTile mma_tile(int d, int dv, MmaSm sm) {
    if (d > 256) {  // O at most 128 registers + S 16. One block is promised; two fit on an SM of sm_90 where memory allows
        if (sm == MmaSm::kAny) return {32, 32, 2, 1, 1};                        // 80 KB
        if (d <= 384) return {64, 32, 4, 1, 1};                                 // 84 KB
        if (sm == MmaSm::kShort || sm == MmaSm::k99) return {64, 16, 4, 1, 1};  // 88 KB
        return {64, 32, 4, 1, 1};                                               // 112 KB
    }
    if (sm == MmaSm::k228) {                                // measured on H200 against the tile below
        if (d <= 64) return {128, 128, 4, 2, 2};            // O 64 + S 128; 80 KB. Half the barriers and maxima: 4 % faster
        if (d > 96 && d <= 128) return {128, 64, 4, 2, 2};  // 96 KB. One barrier a tile instead of two: 5 % faster
        if (dv > 192) return {64, 64, 4, 1, 2};             // O 128 + S 32; 96 KB. Two blocks that do not wait for each other: 10 % faster
    }
    if (sm == MmaSm::k164 || sm == MmaSm::k228) {
        if (d <= 64) return with_q_in_registers({128, 64, 4, 2, 2});  // O 64 + S 64 + Q 32 registers; 48 KB
        if (d <= 96) return {128, 64, 4, 2, 2};                       // O 96 + S 64; 72 KB: two blocks on an SM of sm_80 and of sm_90
        if (d <= 128) return {128, 64, 4, 1, 2};                      // O 128 + S 64; 64 KB: two blocks on an SM of sm_80
        if (dv <= 128) return {128, 32, 4, 2, 2};                     // O 128 + S 32, 64 keys spill; 88 KB: two blocks on an SM of sm_90
        if (d <= 192) return {128, 64, 8, 2, 1};                      // O 96 + S 32; 144 KB, one block of 8 warps
        return {128, 64, 8, 1, 1};                                    // O 128 + S 32; 128 KB
    }
    if (sm == MmaSm::kShort) return {32, 32, 2, 2, 4};          // 20 .. 80 KB
    if (sm == MmaSm::k99 && d <= 64) return {64, 64, 4, 2, 4};  // 40 KB. Four blocks on an SM: 20 % faster than three
    if (d <= 128) return {64, 64, 4, 2, 2};                     // at most 80 KB
    if (d <= 192) return {64, 32, 4, 2, 2};                     // 72 KB
    return {64, 32, 4, 2, 1};                                   // 96 KB
}

// tf32: values are twice as wide in shared memory, but not in accumulators. Comments: TFLOP/s on H200 at 16k without mask, this tile first.
constexpr MmaTile mma_tile_tf32(int d, int dv, MmaSm sm) {
    if (sm == MmaSm::k228) {
        if (d <= 64) return {128, 64, 4, 2, 2};             // O 64 + S 64; 96 KB: 155. One stage: 153, 64 rows: 121
        if (d > 96 && d <= 128) return {128, 32, 4, 1, 2};  // O 128 + S 32; 96 KB: 151. One block per SM: 109 with 4 warps, 139 with 8
        if (dv > 192) return {128, 32, 8, 1, 1};            // O 128 + S 16; 192 KB: 122. 64 rows: 76
    }
    if (sm != MmaSm::kAny) {
        if (d <= 64) return {128, 64, 4, 1, 2};   // 64 KB
        if (d <= 96) return {128, 32, 4, 1, 2};   // 72 KB
        if (d <= 128) return {128, 32, 4, 2, 1};  // 128 KB
        if (d <= 192) return {128, 32, 8, 1, 1};  // 144 KB
        return {64, 32, 4, 1, 1};                 // 128 KB
    }
    if (d <= 64) return {64, 64, 4, 2, 2};   // 80 KB
    if (d <= 128) return {64, 32, 4, 2, 2};  // 96 KB
    if (d <= 192) return {64, 32, 4, 1, 2};  // 96 KB
    return {32, 32, 2, 1, 2};                // 96 KB
}

// An SM has 1 KB more than one block may ask for. Every block on it takes 1 KB for the system.
template <typename Tile>
constexpr bool mma_tile_fits(const Tile& tile, size_t shared_bytes, size_t most_of_a_block) {
    return size_t(tile.blocks_per_sm) * (shared_bytes + 1024) <= most_of_a_block + 1024;
}

// Large tiles pay when a head's rows fill more than half a tile, and when they make more than half as many blocks as the GPU holds at a
// time. With fewer, twice as many blocks of half the rows still run all at once.
inline bool mma_tile_fills(const MmaTile& tile, int64_t heads, int64_t seqlen_q, int multiprocessors) {
    return 2 * seqlen_q > tile.block_m &&
           2 * ((seqlen_q + tile.block_m - 1) / tile.block_m) * heads > int64_t(tile.blocks_per_sm) * multiprocessors;
}

// Blocks with few keys that all run at once finish sooner than large ones: 12 % at batch 8 x 32 heads x 128 of head dim 64.
inline bool mma_tile_runs_at_once(const MmaTile& tile, int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int multiprocessors) {
    return seqlen_k <= 256 && (seqlen_q + tile.block_m - 1) / tile.block_m * heads <= int64_t(tile.blocks_per_sm) * multiprocessors;
}

// Short calls with plain scores that forward_mma_sm80 serves faster than forward_wgmma_sm90, whose blocks take 128 rows and longer to set
// up. Times in us on H200 in CUDA graphs, bf16, no mask, batch x heads x seqlen, wgmma_sm90 -> mma_sm80 (in parentheses the best of cuDNN
// and FA2):
//     head dim 64      1 x 32 x 16    5.2 -> 3.1 (5.9)    8 x 32 x 64     9.3 -> 6.2 (8.4)    32 x 32 x 64   23.9 -> 13.4 (22.0)
//                      1 x 32 x 256   7.7 -> 6.8 (7.9)    8 x 32 x 128   10.0 -> 9.7 (9.1)    32 x 32 x 128  24.2 -> 30.9 (22.1)
//     head dim 128     1 x 16 x 16    6.4 -> 3.4 (5.0)    8 x 16 x 64     8.4 -> 6.3 (6.9)    32 x 16 x 64   18.2 -> 15.9 (16.5)
//                      1 x 16 x 256   9.0 -> 8.4 (9.3)    8 x 16 x 128    9.9 -> 9.8 (9.7)    4 x 16 x 256   10.6 -> 12.6 (10.8)
//     rows of several heads that share no keys, 64 x 4 x 8 over 511 keys of head dim 96: 18.5 -> 13.8; head dim 160, 8 x 16 x 64: 9.3
//     -> 6.2
// steps: tiles of 64 keys that a row sees on average; rows: of a head, on average.
inline bool mma_is_faster_than_wgmma(int headdim, int group, int64_t heads, int64_t rows, int64_t steps, int multiprocessors) {
    const int64_t blocks = (rows + 63) / 64 * heads;
    if (headdim > 128)
        return (rows <= 64 && steps <= 1) || (rows <= 64 && steps <= 2 && blocks <= 2 * multiprocessors) ||
               (steps <= 3 && blocks <= multiprocessors);
    if (rows <= 64 && steps <= 4) return true;  // half of a 128-row block is padding. 16 queries, 256 keys, 32 x 32 heads: 29.5 -> 22.2
    if (rows <= 16 && steps <= 8 && group == 1 && blocks >= multiprocessors) return true;
    if (steps <= 2) return blocks <= int64_t(mma_tile(headdim, headdim, MmaSm::k99).blocks_per_sm) * multiprocessors;
    if (steps <= 4) return blocks <= multiprocessors;
    return headdim <= 64 && steps <= 8 && 2 * blocks <= multiprocessors;  // 1 x 4 x 512: 9.7 -> 9.2
}

// Query heads whose tiles run side by side. Heads are taken in sections, so that the K and V of a section are read from memory once and
// then from L2. 16 MB fit, with other traffic, in the L2 of A100 (40), H100 (50) and most GPUs since; GPUs with less only lose this gain.
inline int64_t heads_per_section(int64_t seqlen_k, int64_t bytes_per_key, int group) {
    constexpr int64_t kSectionBytes = int64_t(16) << 20;
    const int64_t heads_k = kSectionBytes / ((seqlen_k > 0 ? seqlen_k : 1) * bytes_per_key);
    return (heads_k > 1 ? heads_k : 1) * group;
}

struct GridPlace {
    int b, head, query_tile;
};

// The order of the blocks: section by section and, in a section, the last query tile of every head first, because under a causal mask it
// has the most keys. Heads that share K and V are neighbours. Heads are counted over the batch. Every block computes its place twice, so
// the divisions are multiplications: in a short call the blocks do little else.
struct GridOrder {
    Divisor section_blocks;     // heads of a section x tiles
    Divisor heads, last_heads;  // of a section; of the last section
    Divisor nheads;
    int sections, tiles;  // tiles: of a head

    FA_HOST_DEVICE GridPlace place(int block) const {
        const int section = section_blocks.divide(block), index = section_blocks.remainder(block, section);
        const Divisor& own = section == sections - 1 ? last_heads : heads;
        const int turn = own.divide(index), head = section * int(heads.divisor) + own.remainder(index, turn), b = nheads.divide(head);
        return {b, nheads.remainder(head, b), tiles - 1 - turn};
    }
};
// tiles x nheads x batch fits in an int. section: most heads of a section.
inline GridOrder grid_order(int tiles, int nheads, int batch, int64_t section) {
    const int all = nheads * batch > 1 ? nheads * batch : 1, heads = int(section < all ? section : all);
    const int sections = (all - 1) / heads + 1, last = all - (sections - 1) * heads;
    return {divisor_of(tiles > 0 ? heads * tiles : 1), divisor_of(heads), divisor_of(last), divisor_of(nheads), sections, tiles};
}

// ---- backward ----

struct BackwardTile {
    int block_m, block_n;       // queries per step, keys per block
    int warps;                  // how the warps divide the products:
    int warps_m_s;              //     S and dP: warps_m_s along the queries, warps / warps_m_s along the keys
    int warps_n_kv;             //     dK and dV: warps_n_kv along the keys, warps / warps_n_kv along the head dim
    int warps_m_dq;             //     dQ: warps_m_dq along the queries, warps / warps_m_dq along the head dim
    int stages_q, stages_dout;  // 2: the next tile is copied while this one is computed
    int blocks_per_sm;          // as in MmaTile
};
constexpr bool operator==(const BackwardTile& a, const BackwardTile& b) {
    return a.block_m == b.block_m && a.block_n == b.block_n && a.warps == b.warps && a.warps_m_s == b.warps_m_s &&
           a.warps_n_kv == b.warps_n_kv && a.warps_m_dq == b.warps_m_dq && a.stages_q == b.stages_q && a.stages_dout == b.stages_dout &&
           a.blocks_per_sm == b.blocks_per_sm;
}

// A block owns block_n keys, whose dK and dV fill half of its registers, and walks over tiles of block_m queries. For an m x n part of a
// product, a warp reads 32 (m + n) bytes of shared memory per step of 16 summed elements, for m n / 128 mma. Parts should therefore be
// large and square. Bytes per mma, for S and dP | dK and dV | dQ:
//     64 x 128, d 128, 8 warps   32 x 32: 256 | 32 x 64: 192 | 32 x 32: 256
//     128 x 64, d 256, 8 warps   32 x 32: 256 | 32 x 64: 192 | 32 x 128 in parts: 256
//     64 x 64, d 256, 8 warps    16 x 32: 384 | 32 x 64: 192 | 32 x 64 in parts: 256
// The numbers beside a tile were measured on an H200, bf16, 512 .. 8192 tokens.
constexpr BackwardTile backward_mma_tile(int d, MmaSm sm) {
    if (sm == MmaSm::kShort) {
        if (d <= 64) return {64, 64, 4, 2, 2, 2, 2, 2, 3};             // 65 KB
        if (d > 96 && d <= 128) return {64, 64, 4, 2, 2, 1, 1, 1, 2};  // 81 KB
    }
    if (sm == MmaSm::kShort || sm == MmaSm::k228) {
        if (d <= 64)
            return {64, 128, 4, 2, 2, 2, 2, 2, 2};  // 97 KB. Three blocks of 64 x 64 are 9 .. 16 % slower: twice the copies of Q and dO,
                                                    // twice the adds to dQ, a tenth more ldmatrix. The 128 x 128 tile below is 10 % slower
        if (d > 128 && d <= 192) return {128, 64, 8, 4, 2, 4, 2, 1, 1};  // 226 KB
        if (d > 192) return {128, 64, 8, 4, 2, 4, 1, 1, 1};              // 225 KB. 64 x 64: 1 .. 18 % slower
    }
    if (sm != MmaSm::kAny) {
        if (d <= 64) return {128, 128, 8, 4, 4, 4, 2, 1, 1};  // 146 KB
        if (d <= 96) return {64, 128, 8, 2, 4, 4, 2, 2, 1};   // 129 KB
        if (d <= 128)
            return {64, 128, 8, 2, 4, 2, 2, 2, 1};           // 161 KB. 128 x 128 is as fast, but rounds P before dS; 64 x 64, two blocks,
                                                             // 5 % faster at 512 causal and 7 .. 10 % slower at 8192
        if (d <= 192) return {64, 64, 8, 4, 2, 2, 2, 1, 1};  // 137 KB
        return {64, 64, 8, 4, 2, 2, 1, 1, 1};                // 145 KB
    }
    if (d <= 64) return {64, 128, 8, 2, 4, 2, 2, 2, 1};  // 97 KB
    if (d <= 96) return {64, 64, 8, 4, 4, 4, 2, 2, 1};   // 89 KB
    if (d <= 128) return {64, 64, 8, 4, 2, 2, 2, 1, 1};  // 97 KB
    if (d <= 192) return {64, 32, 8, 4, 2, 2, 1, 1, 1};  // 81 KB
    return {32, 32, 4, 2, 2, 2, 1, 1, 1};                // 68 KB; 64 queries do not fit beside 32 keys
}

// Shared memory of the smallest tile of attention/backward/mma_float32_sm80.cu for head dims above 256.
constexpr size_t kBackwardSplitWideBytes = 141312;

// Few keys under a causal mask: tiles of 64 keys waste less on the diagonal. On H200, 64 against 128 keys at head dim 64: 5 % faster at 512
// keys, 9 % slower from 2048 on; at head dim 128: 2 % faster at 512, 1 % slower from 1024 on.
inline bool backward_mma_is_short(bool causal, int seqlen_k) { return causal && seqlen_k <= 512; }

// Calls body with the bucket of a pair of head dims.
template <typename Body>
auto with_backward_bucket(int headdim, int headdim_v, const Body& body) {
    using std::integral_constant;
    const int d = headdim > headdim_v ? headdim : headdim_v;
    if (d <= 64) return body(integral_constant<int, 64>{}, integral_constant<int, 64>{});
    if (d <= 96) return body(integral_constant<int, 96>{}, integral_constant<int, 96>{});
    if (d <= 128) return body(integral_constant<int, 128>{}, integral_constant<int, 128>{});
    if (d <= 192) return body(integral_constant<int, 192>{}, integral_constant<int, 192>{});
    return body(integral_constant<int, 256>{}, integral_constant<int, 256>{});
}

}  // namespace fa
