// sampling.cu: greedy, top-k and top-p sampling (sampling.h defines a draw). The logits are in L2, because the previous product has just
// written them. On sm_90 the blocks of a cluster share a row; each reads its slice once and keeps it in shared memory. Elsewhere one block
// handles a row. Bound by the latency of a few passes over the slice and of cluster barriers.
//
// top_k, top_p and the draw all search for the token at which a running sum reaches a target. The search starts with a histogram over
// exponents, summed over the cluster, which finds the bin of that token. Each block lists its tokens of the bin. While there are many,
// a histogram over their interval of ranks narrows them down. The last few go to the first block of the cluster, which compares each
// with all others.
#include "device/cluster.cuh"
#include "device/launch.h"
#include "device/ptx.cuh"
#include "transformer/common/elements.cuh"
#include "transformer/ops/kernels.h"

namespace fa {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kMostBlocks = 8, kListed = 2048, kFew = 128;
constexpr int kScanThreads = kBins / 4;

struct SampleLaunch {
    SampleParams p;
    int32_t blocks;  // blocks per cluster, a power of two
    int32_t slice;   // tokens per block
    bool keep;       // keep the slice in shared memory
    bool fours;      // load_4 can read the rows
};

enum class Slice { kRead, kKept };

struct Histogram {  // of tokens; the bins are in order, the largest logits first
    uint64_t weight[kBins];
    uint32_t count[kBins];
};

struct Ends {  // the lowest and the highest rank of a set of tokens, that is its last and its first token
    uint64_t low, high;
};

struct alignas(16) Smem {
    Histogram own;                         // of the block's slice
    Histogram exponents, ranks;            // of the row, as running sums from the first bin on: over bin_of, and over an interval of ranks
    uint64_t list[kListed];                // ranks of the slice's tokens in one bin
    uint64_t few[kFew], few_weight[kFew];  // in the first block of the cluster: the last few tokens, from all blocks
    uint64_t found, mass;                  // in the first block of the cluster: the answer
    Ends ends[2][kMostBlocks];             // from each block; two arrays, used alternately
    Ends warp_ends[kWarps];
    uint64_t warp_weight[kScanThreads / 32];
    uint32_t warp_count[kScanThreads / 32];
    uint32_t listed, few_count;
    int bin;
};

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t x, int offset) {
    return __shfl_xor_sync(~0u, static_cast<unsigned long long>(x), offset);
}
__device__ __forceinline__ Ends join(Ends a, int lanes) {  // over `lanes` adjacent lanes
    for (int offset = lanes / 2; offset; offset /= 2) {
        const uint64_t low = shuffle_xor(a.low, offset), high = shuffle_xor(a.high, offset);
        a.low = low < a.low ? low : a.low, a.high = high > a.high ? high : a.high;
    }
    return a;
}

// Adds to a 64-bit sum in shared memory by two native 32-bit atomics. The thread that overflows the lower half adds the carry.
__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t x) {
    uint32_t* const half = reinterpret_cast<uint32_t*>(sum);
    const uint32_t low = uint32_t(x), before = atomicAdd(half, low);
    const uint32_t high = uint32_t(x >> 32) + (before + low < before);
    if (high) atomicAdd(half + 1, high);
}

static_assert(sizeof(Smem) <= 64 * 1024, "a block can have 64 KiB on sm_75");

// A thread's view of its row and of its block's slice. All threads of the cluster call its functions together.
struct Row {
    const SampleLaunch& all;
    Smem& smem;
    float* const slice;  // in shared memory, if it is kept
    const int rank, begin, end;
    const int64_t start;  // of the row, in elements of logits
    float largest = 0;
    int turn = 0;

    __device__ __forceinline__ void synchronise() const {
        if (kHasClusters && all.blocks > 1) cluster_arrive_release(), cluster_wait();
        else __syncthreads();
    }
    __device__ __forceinline__ float exponent(float logit) const { return exponent_of(logit, largest, all.p.scale); }

    // Calls body(logit, i) for each token of the slice in global memory. With kKept the slice is also copied to shared memory, if
    // that has room.
    template <Slice kSlice, typename Body>
    __device__ __forceinline__ void load_each(const Body& body) const {
        const SampleParams& p = all.p;
        if (all.fours) {
            constexpr int kAhead = 4;  // loads in flight
            for (int first = begin + 4 * threadIdx.x; first < end; first += 4 * kAhead * kThreads) {
                float4 x[kAhead];
#pragma unroll
                for (int j = 0; j < kAhead; ++j)
                    if (const int i = first + 4 * j * kThreads; i < end) x[j] = load_4(p.logits.data, start + i, p.dtype);
#pragma unroll
                for (int j = 0; j < kAhead; ++j) {
                    const int i = first + 4 * j * kThreads;
                    if (i >= end) continue;
                    if (kSlice == Slice::kKept && all.keep) *reinterpret_cast<float4*>(slice + i - begin) = x[j];
                    body(x[j].x, i), body(x[j].y, i + 1), body(x[j].z, i + 2), body(x[j].w, i + 3);
                }
            }
        } else {
            for (int i = begin + threadIdx.x; i < end; i += kThreads) {
                const float x = load_element(p.logits.data, start + i, p.dtype);
                if (kSlice == Slice::kKept && all.keep) slice[i - begin] = x;
                body(x, i);
            }
        }
    }
    template <typename Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
        if (!all.keep) return load_each<Slice::kRead>(body);
        for (int i = begin + threadIdx.x; i < end; i += kThreads) body(slice[i - begin], i);
    }

    // Joins the ends of all threads of the cluster. low > high means no tokens.
    __device__ __forceinline__ Ends join_all(Ends mine) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        if (__any_sync(~0u, mine.low <= mine.high)) mine = join(mine, 32);
        if (lane == 0) smem.warp_ends[warp] = mine;
        __syncthreads();
        Ends(&ends)[kMostBlocks] = smem.ends[turn ^= 1];
        if (warp == 0) {
            mine = join(smem.warp_ends[lane], 32);
            if (lane < all.blocks) cluster_object(ends[rank], lane) = mine;
        }
        synchronise();
        return join(ends[lane % all.blocks], all.blocks);
    }

    __device__ __forceinline__ void clear_own() {
        for (int i = threadIdx.x; i < kBins; i += kThreads) smem.own.weight[i] = 0, smem.own.count[i] = 0;
        __syncthreads();
    }
    __device__ __forceinline__ void count(int bin, uint64_t weight) {
        atomicAdd(&smem.own.count[bin], 1u);
        if (weight) add_to(&smem.own.weight[bin], weight);
    }
    // Adds up the histograms of all blocks and turns them into running sums from the first bin on. Every block gets the result.
    __device__ __forceinline__ void sum_up(Histogram& sum) {
        synchronise();
        {  // each block adds up its share of the bins; a thread reads one bin of one block
            static_assert(kBins == kThreads, "one thread for each bin and block of the share");
            const int blocks = all.blocks, at = (rank * kBins + threadIdx.x) / blocks, other = threadIdx.x % blocks;
            const Histogram& part = cluster_object(smem.own, other);
            uint64_t weight = part.weight[at];
            uint32_t count = part.count[at];
            for (int offset = blocks / 2; offset; offset /= 2)
                weight += shuffle_xor(weight, offset), count += __shfl_xor_sync(~0u, count, offset);
            Histogram& whole = cluster_object(sum, other);
            whole.weight[at] = weight, whole.count[at] = count;
        }
        synchronise();
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const bool scans = threadIdx.x < kScanThreads;  // a thread has four bins
        uint64_t weights[4], weight = 0;
        uint32_t counts[4], count = 0;
        if (scans) {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[i] = weight += sum.weight[4 * threadIdx.x + i], counts[i] = count += sum.count[4 * threadIdx.x + i];
            const uint64_t own_weight = weight;
            const uint32_t own_count = count;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const uint64_t more = __shfl_up_sync(~0u, static_cast<unsigned long long>(weight), offset);
                const uint32_t others = __shfl_up_sync(~0u, count, offset);
                if (lane >= offset) weight += more, count += others;
            }
            if (lane == 31) smem.warp_weight[warp] = weight, smem.warp_count[warp] = count;
            weight -= own_weight, count -= own_count;
        }
        __syncthreads();
        if (scans) {
            for (int w = 0; w < warp; ++w) weight += smem.warp_weight[w], count += smem.warp_count[w];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum.weight[4 * threadIdx.x + i] = weight + weights[i], sum.count[4 * threadIdx.x + i] = count + counts[i];
        }
        __syncthreads();
    }

    // Returns the bin in which the running sum of counts or weights reaches *target. Subtracts the sum before that bin from *target, sets
    // *tokens to the number of tokens in the bin, and adds the weights of the bins before it to *mass.
    __device__ __forceinline__ int reach(const Histogram& sum, bool by_count, uint64_t* target, uint64_t* mass, uint32_t* tokens) {
        const auto up_to = [&](int bin) { return bin < 0 ? 0 : by_count ? sum.count[bin] : sum.weight[bin]; };
        const int mine = threadIdx.x;
        if (up_to(mine - 1) < *target && *target <= up_to(mine)) smem.bin = mine;  // true for one thread: the sums never decrease
        if (mine == 0) smem.listed = 0;
        __syncthreads();
        const int bin = smem.bin;
        *target -= up_to(bin - 1);
        *tokens = sum.count[bin];
        if (bin > 0) *mass += sum.weight[bin - 1], *tokens -= sum.count[bin - 1];
        return bin;
    }

    // Finds the first token at which the running sum, of counts or of weights, reaches target; 1 <= target <= the sum over all tokens. The
    // first block of the cluster writes the token's rank to smem.found, and the sum of the weights up to and including it to smem.mass.
    __device__ __forceinline__ void find(bool by_count, uint64_t target) {
        uint64_t mass = 0;
        uint32_t tokens;
        const int bin = reach(smem.exponents, by_count, &target, &mass, &tokens);
        for_each([&](float logit, int i) {
            if (bin_of(exponent(logit)) != bin) return;
            const uint32_t at = atomicAdd(&smem.listed, 1u);
            if (at < kListed) smem.list[at] = rank_of(logit, uint32_t(i));
        });
        __syncthreads();
        const int listed = int(smem.listed);
        Ends ends{0, ~0ull};                              // ranks of the tokens that may be the answer
        const auto for_members = [&](const auto& body) {  // body(rank)
            const auto member = [&](uint64_t token) {
                if (token >= ends.low && token <= ends.high) body(token);
            };
            if (listed <= kListed) {
                for (int i = threadIdx.x; i < listed; i += kThreads) member(smem.list[i]);
            } else {
                for_each([&](float logit, int i) {
                    if (bin_of(exponent(logit)) == bin) member(rank_of(logit, uint32_t(i)));
                });
            }
        };
        const auto weight = [&](uint64_t token) { return weight_of(exponent(logit_of(token))); };
        while (tokens > kFew) {
            Ends mine{~0ull, 0};
            for_members(
                [&](uint64_t token) { mine.low = token < mine.low ? token : mine.low, mine.high = token > mine.high ? token : mine.high; });
            ends = join_all(mine);
            const int bits = 64 - __clzll(static_cast<long long>(ends.high - ends.low)), shift = bits > 10 ? bits - 10 : 0;
            static_assert(kBins == 1 << 10, "bins for 10 bits");
            clear_own();
            for_members([&](uint64_t token) { count(int((ends.high - token) >> shift), weight(token)); });
            sum_up(smem.ranks);
            const uint64_t at = reach(smem.ranks, by_count, &target, &mass, &tokens), others = (uint64_t(1) << shift) - 1;
            ends.high -= at << shift;
            if (ends.high - ends.low > others) ends.low = ends.high - others;
        }
        Smem& first = cluster_object(smem, 0);
        for_members([&](uint64_t token) {
            const uint32_t at = atomicAdd(&first.few_count, 1u);
            first.few[at] = token, first.few_weight[at] = weight(token);
        });
        synchronise();
        if (rank == 0 && threadIdx.x < tokens) {  // one thread per token adds up the tokens before it
            const uint64_t mine = smem.few[threadIdx.x], own_weight = smem.few_weight[threadIdx.x];
            uint64_t counts = 0, before = 0;
#pragma unroll 4
            for (int i = 0; i < tokens; ++i)
                if (smem.few[i] > mine) ++counts, before += smem.few_weight[i];
            const uint64_t sum = by_count ? counts : before;
            if (sum < target && target <= sum + (by_count ? 1 : own_weight)) smem.found = mine, smem.mass = mass + before + own_weight;
        }
        if (rank == 0 && threadIdx.x == 0) smem.few_count = 0;
    }
};

__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleLaunch all) {
    extern __shared__ __align__(16) unsigned char shared[];
    Smem& smem = *reinterpret_cast<Smem*>(shared);
    launch_dependents();
    if (threadIdx.x == 0) smem.few_count = 0;
    const bool shared_row = kHasClusters && all.blocks > 1;
    if (shared_row) cluster_arrive_release();
    grid_dependency_wait();
    const SampleParams& p = all.p;
    const int b = blockIdx.x / all.blocks, rank = blockIdx.x % all.blocks;
    const int begin = min(rank * all.slice, p.vocab), end = min(begin + all.slice, p.vocab);
    Row row{all, smem, reinterpret_cast<float*>(&smem + 1), rank, begin, end, b * p.logits.row};

    const uint64_t random = p.greedy ? 0 : sample_bits(p, b);
    float largest = -INFINITY;
    int first = 0;
    bool nan = false;
    row.load_each<Slice::kKept>([&](float logit, int i) {  // each thread sees its tokens in increasing order
        if (logit > largest) largest = logit, first = i;
        nan |= logit != logit;
    });
    if (shared_row) cluster_wait();  // the other blocks have started, so their shared memory can be accessed
    const uint64_t likeliest = nan ? ~0ull : rank_of(largest, uint32_t(first)), best = row.join_all({likeliest, likeliest}).high;
    const bool writes = rank == 0 && threadIdx.x == 0;
    row.largest = logit_of(best);
    if (row.largest != row.largest || row.largest == -INFINITY) {  // NaN, or no token above -infinity
        if (writes) p.out[b] = -1;
        return;
    }
    if (p.greedy) {
        if (writes) p.out[b] = int32_t(index_of(best));
        return;
    }
    row.clear_own();
    row.for_each([&](float logit, int) {
        const float e = row.exponent(logit);
        row.count(bin_of(e), weight_of(e));
    });
    row.sum_up(smem.exponents);
    uint64_t mass = smem.exponents.weight[kBins - 1];
    enum { kTopK, kTopP, kDraw };
#pragma unroll 1
    for (int step = kTopK; step <= kDraw; ++step) {  // a loop, so that find is inlined only once
        if (step == kTopK && (p.top_k == 0 || p.top_k >= p.vocab)) continue;
        if (step == kTopP && p.top_p >> 32) continue;
        const uint64_t cut = step == kTopK ? uint64_t(p.top_k) : nucleus_target(mass, p.top_p);
        row.find(step == kTopK, step == kDraw ? multiply_high(random, mass) + 1 : cut);
        if (step == kDraw) break;  // the other blocks do not access the first block again, so it may end before them
        row.synchronise();
        mass = cluster_object(smem.mass, 0);
    }
    __syncthreads();
    if (writes) p.out[b] = int32_t(index_of(smem.found));
}

int blocks_of(const SampleParams& p, const DeviceInfo& gpu) {
    const auto pays = [&](int blocks) { return p.vocab / blocks >= 4000 && int64_t(blocks) * p.batch <= gpu.multiprocessors * 3 / 4; };
    int blocks = 1;
    while (gpu.compute >= 90 && blocks < kMostBlocks && pays(2 * blocks)) blocks *= 2;
    return blocks;
}

}  // namespace

int64_t sample_blocks(const SampleParams& p, const DeviceInfo& gpu) { return int64_t(p.batch) * blocks_of(p, gpu); }

cudaError_t sample(const SampleParams& p, const DeviceInfo& gpu, cudaStream_t stream) {
    SampleLaunch all{};
    all.p = p, all.blocks = blocks_of(p, gpu);
    all.slice = ((p.vocab + all.blocks - 1) / all.blocks + 3) / 4 * 4;
    all.fours = p.vocab % 4 == 0 && by_fours(p.logits.data, p.logits.row, p.dtype);
    size_t bytes = sizeof(Smem) + all.slice * sizeof(float);
    all.keep = !p.greedy && bytes <= gpu.shared_memory;
    if (!all.keep) bytes = sizeof(Smem);
    LaunchOptions options;
    options.programmatic = p.programmatic, options.cluster = all.blocks > 1 ? unsigned(all.blocks) : 0;
    return launch_kernel(sample_kernel, unsigned(p.batch * all.blocks), kThreads, bytes, stream, all, options);
}

}  // namespace fa
