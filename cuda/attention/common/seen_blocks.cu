// seen_blocks.cu: the small kernel before those that skip tiles of masks by blocks and of masks of pairs. It reads each mask once and
// writes what seen_blocks.h describes. Bound by memory: an element of a mask of pairs is a byte, and becomes a bit.
#include "attention/common/seen_blocks.cuh"
#include "common/types.h"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
struct SeenParams {
    AttentionParams attention;
    SeenBlocks to;
};
// The batch entry and the first query head of an entry.
__device__ __forceinline__ void first_of_entry(const SeenBlocksShape& shape, int64_t entry, int& b, int& head) {
    b = int(entry / shape.heads), head = int(entry % shape.heads) * shape.heads_of_entry;
}

// block_mask alone: a warp makes a word.
__global__ void __launch_bounds__(kThreads) seen_by_blocks_kernel(const __grid_constant__ SeenParams params) {
    launch_dependents();
    const AttentionParams& p = params.attention;
    const SeenBlocksShape& shape = params.to.shape;
    const int64_t index = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
    if (index >= shape.words()) return;
    const int n = int(index % shape.words_of_row()) * 32 + threadIdx.x % 32;
    const int64_t row_block = index / shape.words_of_row();
    int b, head;
    first_of_entry(shape, row_block / shape.row_blocks, b, head);
    const int row0 = int(row_block % shape.row_blocks) * kSeenBlock;
    const bool sees = n < shape.key_blocks && blocks_of_row(p, b, head, row0)[int64_t(n) * kSeenBlock >> p.blocks.key_shift];
    const uint32_t seen = __ballot_sync(~0u, sees);
    if (threadIdx.x % 32 == 0) params.to.words[index] = {seen, 0};
}

// ---- masks of pairs ----

constexpr int kGroup = 8;  // key blocks of a thread block, of one row block
constexpr int kGroupsOfWord = 32 / kGroup;
constexpr int kLaneKeys = 16;                  // of the 512 keys of a row that a warp reads at once
constexpr int kWordsOfBlock = kSeenBlock + 2;  // in shared memory; the halves that a warp writes at once lie in different banks

// Bit x: whether byte x is not zero.
__device__ __forceinline__ uint32_t bits_of_bytes(uint32_t x) {
    x |= x >> 4, x |= x >> 2, x |= x >> 1;  // bit 0 of each byte; what comes from the byte above lands in its higher bits
    return (x & 0x01010101u) * 0x10204080u >> 28;
}
// The pairs of a row that causal, windows and block_mask leave to kKeys keys from `key` on. Rows past the end see all keys that exist.
template <int kKeys>
__device__ __forceinline__ uint32_t pairs_left(const AttentionParams& p, const Sequence& s, int b, int head, int i, int key) {
    const bool exists = i < s.seqlen_q;
    if (p.blocks.data && exists && key < s.seqlen_k && block_hides(p, b, head, i, key)) return 0;
    const KeyRange range = exists ? key_range(p, s, i) : KeyRange{0, s.seqlen_k};
    const auto up_to = [&](int end) {  // as bits_of_range, without words of 64 bits
        const int count = clamp_to(end - key, 0, kKeys);
        return count >= 32 ? ~0u : (1u << count) - 1;
    };
    return up_to(range.end) & ~up_to(range.begin);
}
// The pairs of a row block and kGroup key blocks, as bits in shared memory. A warp takes 8 rows and asks for all or several of them before
// it looks at the first: a small mask has few blocks and waits for memory, not for its rate.
constexpr int kRowsOfWarp = kSeenBlock / kWarps;
// Rows whose every 16 bytes may be read at once: a lane has kLaneKeys keys.
__device__ __forceinline__ void read_aligned_pairs(const AttentionParams& p, int b, int head, int row0, int key0,
                                                   uint64_t (&pairs)[kGroup][kWordsOfBlock]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = key0 + lane * kLaneKeys;
    const Sequence s = sequence_of(p, b);
    const uint8_t* const mask = static_cast<const uint8_t*>(p.mask.data) + b * p.mask.batch + head * p.mask.head + key;
    uint16_t* const words = reinterpret_cast<uint16_t*>(pairs[lane / 4]) + lane % 4;
    const int exist = s.seqlen_k - key;  // keys of the lane
    const int first = warp * kRowsOfWarp;
    uint4 x[kRowsOfWarp];
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
        const int i = row0 + first + r;
        x[r] = make_uint4(0, 0, 0, 0);
        if (exist >= kLaneKeys && i < s.seqlen_q) x[r] = __ldcs(reinterpret_cast<const uint4*>(mask + i * p.mask.row));
    }
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) {
        const int i = row0 + first + r;
        uint32_t bits = bits_of_bytes(x[r].x) | bits_of_bytes(x[r].y) << 4 | bits_of_bytes(x[r].z) << 8 | bits_of_bytes(x[r].w) << 12;
        if (exist > 0 && exist < kLaneKeys && i < s.seqlen_q)
            for (int c = 0; c < exist; ++c) bits |= (mask[i * p.mask.row + c] != 0) << c;
        if (i >= s.seqlen_q) bits = 0xFFFF;
        words[4 * (first + r)] = uint16_t(bits & pairs_left<kLaneKeys>(p, s, b, head, i, key));
    }
}
// Other rows: a lane reads one byte of each 32, and the warp makes a word of them.
__device__ __forceinline__ void read_pairs(const AttentionParams& p, int b, int head, int row0, int key0,
                                           uint64_t (&pairs)[kGroup][kWordsOfBlock]) {
    constexpr int kWords = kGroup * kSeenBlock / 32, kAtOnce = 4;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = key0 + lane * 32;  // of the word that the lane stores
    const Sequence s = sequence_of(p, b);
    const uint8_t* const mask = static_cast<const uint8_t*>(p.mask.data) + b * p.mask.batch + head * p.mask.head + key0 + lane;
    const int exist = s.seqlen_k - key0 - lane;
#pragma unroll 1
    for (int first = warp * kRowsOfWarp; first < (warp + 1) * kRowsOfWarp; first += kAtOnce) {
        uint8_t x[kAtOnce][kWords];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r)
#pragma unroll
            for (int n = 0; n < kWords; ++n) {
                const int i = row0 + first + r;
                x[r][n] = i >= s.seqlen_q;
                if (32 * n < exist && i < s.seqlen_q) x[r][n] = mask[i * p.mask.row + 32 * n];
            }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            uint32_t bits = 0;
#pragma unroll
            for (int n = 0; n < kWords; ++n) {
                const uint32_t word = __ballot_sync(~0u, x[r][n] != 0);
                if (lane == n) bits = word;
            }
            if (lane < kWords)
                reinterpret_cast<uint32_t*>(&pairs[lane / 2][first + r])[lane % 2] =
                    bits & pairs_left<32>(p, s, b, head, row0 + first + r, key);
        }
    }
}
__device__ __forceinline__ uint64_t or_of_warp(uint64_t x) {
    return __reduce_or_sync(~0u, uint32_t(x)) | uint64_t(__reduce_or_sync(~0u, uint32_t(x >> 32))) << 32;
}
// Lane l has words l and l + 32 of 64, before and after.
__device__ __forceinline__ void transpose(uint64_t (&words)[2]) {
    uint64_t columns[2] = {};
#pragma unroll
    for (int c = 0; c < kSeenBlock; ++c) {
        const uint64_t column = __ballot_sync(~0u, words[0] >> c & 1) | uint64_t(__ballot_sync(~0u, words[1] >> c & 1)) << 32;
        if (int(threadIdx.x % 32) == c % 32) columns[c / 32] = column;
    }
    words[0] = columns[0], words[1] = columns[1];
}

template <PairWords kOrder>
__global__ void __launch_bounds__(kThreads) seen_by_pairs_kernel(const __grid_constant__ SeenParams params) {
    __shared__ uint64_t pairs[kGroup][kWordsOfBlock];
    __shared__ uint8_t is_seen[kGroup], is_cut[kGroup];
    launch_dependents();
    const AttentionParams& p = params.attention;
    const SeenBlocksShape& shape = params.to.shape;
    const int groups = shape.words_of_row() * kGroupsOfWord, group = int(blockIdx.x % unsigned(groups));
    const int64_t row_block = blockIdx.x / unsigned(groups);
    const int64_t entry = row_block / shape.row_blocks;
    const int m = int(row_block % shape.row_blocks), row0 = m * kSeenBlock, first = group * kGroup;
    int b, head;
    first_of_entry(shape, entry, b, head);

    const uintptr_t address = reinterpret_cast<uintptr_t>(p.mask.data) | uintptr_t(p.mask.batch | p.mask.head | p.mask.row);
    if (address % kLaneKeys == 0) read_aligned_pairs(p, b, head, row0, first * kSeenBlock, pairs);
    else read_pairs(p, b, head, row0, first * kSeenBlock, pairs);
    __syncthreads();

    const int lane = threadIdx.x % 32, rows = p.seqlen_q - row0;
#pragma unroll 1
    for (int x = threadIdx.x / 32; x < kGroup; x += kWarps) {
        const int n = first + x;
        if (n >= shape.key_blocks) {
            is_seen[x] = is_cut[x] = 0;
            continue;
        }
        uint64_t words[2] = {pairs[x][lane], pairs[x][lane + 32]};
        const uint64_t all = bits_of_range<kSeenBlock>(0, p.seqlen_k, n * kSeenBlock);
        const uint64_t keys = or_of_warp((lane < rows ? words[0] : 0) | (lane + 32 < rows ? words[1] : 0));
        const bool cut = keys != 0 && __any_sync(~0u, (words[0] & words[1]) != all);
        const int64_t block = shape.block(entry, m) + n;
        if (lane == 0) params.to.keys[block] = keys, is_seen[x] = keys != 0, is_cut[x] = cut;
        if (!cut) continue;
        if (kOrder == PairWords::kOfKeys) transpose(words);
        params.to.pairs[block * kSeenBlock + lane] = words[0], params.to.pairs[block * kSeenBlock + 32 + lane] = words[1];
    }
    __syncthreads();
    if (threadIdx.x >= 32) return;
    const uint32_t seen = __ballot_sync(~0u, lane < kGroup && is_seen[lane % kGroup]),
                   cut = __ballot_sync(~0u, lane < kGroup && is_cut[lane % kGroup]);
    if (lane != 0) return;
    SeenWord& word = params.to.words[shape.word(entry, m) + first / 32];
    reinterpret_cast<uint8_t*>(&word.seen)[first % 32 / 8] = uint8_t(seen);
    reinterpret_cast<uint8_t*>(&word.cut)[first % 32 / 8] = uint8_t(cut);
}

}  // namespace

cudaError_t launch_seen_blocks(const AttentionParams& p, PairWords order, void* workspace, SeenBlocks* blocks, cudaStream_t stream) {
    const SeenBlocksShape shape = seen_blocks_shape(p);
    *blocks = seen_blocks_in(workspace, shape);
    if (shape.blocks() == 0) return cudaSuccess;
    const SeenParams params{p, *blocks};
    if (!shape.pairs) return launch_kernel(seen_by_blocks_kernel, unsigned(ceil_div(shape.words(), kWarps)), kThreads, 0, stream, params);
    const int64_t groups = shape.words() * kGroupsOfWord;
    return launch_kernel(order == PairWords::kOfRows ? seen_by_pairs_kernel<PairWords::kOfRows> : seen_by_pairs_kernel<PairWords::kOfKeys>,
                         unsigned(groups), kThreads, 0, stream, params);
}

}  // namespace fa
