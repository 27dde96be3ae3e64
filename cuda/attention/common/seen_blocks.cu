// seen_blocks.cu: the small kernel before those that skip tiles of masks by blocks and of masks of pairs. It reads each mask once and
// writes what seen_blocks.h describes: an element of a mask of pairs is a byte, and becomes a bit.
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
    const uint32_t set = ((x & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | x;  // in bit 7 of each byte
    return (set & 0x80808080u) * 0x00204081u >> 28;              // the four bits meet nowhere else
}
// The bytes of kLaneKeys keys of a row, as words from a place on that is a multiple of four, `shift` bytes before the first key.
struct LaneBytes {
    uint32_t word[5];
    int shift;

    // From the address of the lane's first key, of the `exist` keys from there to the end of the row. Keys that do not exist are zero.
    // first: no key of the row lies before. The words' loads stand side by side: a row's loads are on their way together.
    __device__ __forceinline__ void load(const uint8_t* from, int exist, bool first) {
        shift = int(reinterpret_cast<uintptr_t>(from) % 4);
#pragma unroll
        for (int x = 0; x < 5; ++x) {
            const int at = 4 * x - shift;
            word[x] = 0;
            if ((x > 0 || shift == 0 || !first) && at < kLaneKeys && at + 4 <= exist)
                word[x] = __ldcs(reinterpret_cast<const uint32_t*>(from + at));
        }
        // Bytes of the words that reach beyond the row: the first one, and the last one. All are asked for at once.
        if (exist <= 0 || (exist >= kLaneKeys + 4 && (shift == 0 || !first))) return;
        const int last = (exist + shift) / 4, rest = (exist + shift) % 4;
        const bool cut = first && shift > 0;
#pragma unroll
        for (int y = 0; y < 4; ++y) {
            const int head = y - shift, tail = 4 * last - shift + y;
            if (cut && head >= 0 && head < exist) word[0] |= uint32_t(from[head]) << 8 * y;
            if (y >= rest || last > 4 || (last == 0 && (cut || tail < 0))) continue;
            const uint32_t byte = uint32_t(from[tail]) << 8 * y;
#pragma unroll
            for (int x = 0; x < 5; ++x)
                if (x == last) word[x] |= byte;
        }
    }
    __device__ __forceinline__ uint32_t bits() const {
        uint32_t all = 0;
#pragma unroll
        for (int x = 0; x < 4; ++x) all |= bits_of_bytes(__funnelshift_r(word[x], word[x + 1], 8 * shift)) << 4 * x;
        return all;
    }
};
// The same where the address is a multiple of kLaneKeys.
struct AlignedLaneBytes {
    uint4 words;

    __device__ __forceinline__ void load(const uint8_t* from, int exist, bool) {
        words = make_uint4(0, 0, 0, 0);
        if (exist >= kLaneKeys) words = __ldcs(reinterpret_cast<const uint4*>(from));
        if (exist <= 0 || exist >= kLaneKeys) return;
        uint32_t bytes[4] = {};
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i)
            if (i < exist) bytes[i / 4] |= uint32_t(from[i]) << i % 4 * 8;
        words = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
    }
    __device__ __forceinline__ uint32_t bits() const {
        return bits_of_bytes(words.x) | bits_of_bytes(words.y) << 4 | bits_of_bytes(words.z) << 8 | bits_of_bytes(words.w) << 12;
    }
};
// The pairs of a row that causal, windows and block_mask leave to kLaneKeys keys from `key` on.
__device__ __forceinline__ uint32_t pairs_left(const AttentionParams& p, const Sequence& s, int b, int head, int i, int key) {
    if (p.blocks.data && key < s.seqlen_k && block_hides(p, b, head, i, key)) return 0;
    const KeyRange range = key_range(p, s, i);
    const auto up_to = [&](int end) { return (1u << clamp_to(end - key, 0, kLaneKeys)) - 1; };
    return up_to(range.end) & ~up_to(range.begin);
}
// The pairs of a row block and kGroup key blocks, as bits in shared memory. A warp takes 8 rows, a lane 16 keys. A warp asks for all of its
// rows, or half of them, before it looks at the first: a small mask has few blocks and waits for memory, not for its rate. A large one
// waits for instructions, so that nothing is computed for each row that is the same for all.
constexpr int kRowsOfWarp = kSeenBlock / kWarps;
template <typename Bytes, int kAtOnce>
__device__ __forceinline__ void read_pairs(const AttentionParams& p, int b, int head, int row0, int key0,
                                           uint64_t (&pairs)[kGroup][kWordsOfBlock]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, key = key0 + lane * kLaneKeys;
    const Sequence s = sequence_of(p, b);
    const uint8_t* const mask = static_cast<const uint8_t*>(p.mask.data) + b * p.mask.batch + head * p.mask.head + key;
    uint16_t* const words = reinterpret_cast<uint16_t*>(pairs[lane / 4]) + lane % 4;
    const int exist = s.seqlen_k - key;  // keys from the lane's first on
    const uint32_t all = (1u << clamp_to(exist, 0, kLaneKeys)) - 1;
    const bool alone = !p.blocks.data && p.window_left < 0 && p.window_right < 0 && !p.chunk.divisor;
#pragma unroll 1
    for (int first = warp * kRowsOfWarp; first < (warp + 1) * kRowsOfWarp; first += kAtOnce) {
        Bytes bytes[kAtOnce];
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            const int i = row0 + first + r;
            bytes[r].load(mask + i * p.mask.row, i < s.seqlen_q ? exist : 0, key == 0);
        }
#pragma unroll
        for (int r = 0; r < kAtOnce; ++r) {
            const int i = row0 + first + r;
            uint32_t left = all;  // rows past the end see all keys that exist
            if (i < s.seqlen_q) left &= bytes[r].bits() & (alone ? ~0u : pairs_left(p, s, b, head, i, key));
            words[4 * (first + r)] = uint16_t(left);
        }
    }
}
__device__ __forceinline__ uint64_t or_of_warp(uint64_t x) {
    return __reduce_or_sync(~0u, uint32_t(x)) | uint64_t(__reduce_or_sync(~0u, uint32_t(x >> 32))) << 32;
}
// Lane l has row l of 32 bits, before and after: halves change places between lanes 16 apart, then quarters between lanes 8 apart, and so
// on.
__device__ __forceinline__ uint32_t transposed_32x32(uint32_t row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 16; j > 0; j /= 2) {
        const uint32_t low = ~0u / ((1u << j) + 1);  // bits c of which c & j is 0
        const uint32_t other = __shfl_xor_sync(~0u, row, j);
        row = lane & j ? (row & ~low) | (other >> j & low) : (row & low) | (other << j & ~low);
    }
    return row;
}
// Lane l has words l and l + 32 of 64, before and after.
__device__ __forceinline__ void transpose(uint64_t (&words)[2]) {
    const uint32_t low0 = transposed_32x32(uint32_t(words[0])), high0 = transposed_32x32(uint32_t(words[0] >> 32));
    const uint32_t low1 = transposed_32x32(uint32_t(words[1])), high1 = transposed_32x32(uint32_t(words[1] >> 32));
    words[0] = low0 | uint64_t(low1) << 32, words[1] = high0 | uint64_t(high1) << 32;
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
    SeenWord& word = params.to.words[shape.word(entry, m) + first / 32];
    uint8_t &seen_byte = reinterpret_cast<uint8_t*>(&word.seen)[first % 32 / 8],
            &cut_byte = reinterpret_cast<uint8_t*>(&word.cut)[first % 32 / 8];
    if (first >= shape.key_blocks) {
        if (threadIdx.x == 0) seen_byte = cut_byte = 0;
        return;
    }
    int b, head;
    first_of_entry(shape, entry, b, head);

    const uintptr_t address = reinterpret_cast<uintptr_t>(p.mask.data) | uintptr_t(p.mask.batch | p.mask.head | p.mask.row);
    if (address % kLaneKeys == 0) read_pairs<AlignedLaneBytes, kRowsOfWarp>(p, b, head, row0, first * kSeenBlock, pairs);
    else read_pairs<LaneBytes, kRowsOfWarp / 2>(p, b, head, row0, first * kSeenBlock, pairs);
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
    if (lane == 0) seen_byte = uint8_t(seen), cut_byte = uint8_t(cut);
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
