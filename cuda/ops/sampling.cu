// sampling.cu: greedy, top-k and top-p sampling (sampling.h says what a draw is). One block a row, which lies in L2: the product that
// made it has just written it. Greedy reads it once; a draw reads it twice and once more for each of top_k and top_p, and searches what
// falls into one bin of the histogram in shared memory.
#include "device/ptx.cuh"
#include "ops/elements.cuh"
#include "ops/kernels.h"

namespace fa {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32, kMembers = 1024;
static_assert(kBins == kThreads, "a thread for every bin");

struct Smem {
    uint64_t weight[kBins];      // of a bin; summed up from the first bin on
    uint64_t members[kMembers];  // ranks of the tokens in one bin
    uint64_t member_weight[kMembers];
    uint64_t per_warp[kWarps];
    uint64_t sum_before, mass_before;  // of what comes before the bin
    uint64_t found, mass;
    uint32_t count[kBins];
    uint32_t member_count;
    int bin;
};

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t x, int offset) {
    return __shfl_xor_sync(~0u, static_cast<unsigned long long>(x), offset);
}

// Every thread gets the sum, or the largest, over the block.
template <bool kSum>
__device__ __forceinline__ uint64_t reduce(uint64_t x, uint64_t* per_warp) {
    for (int offset = 16; offset; offset /= 2) {
        const uint64_t y = shuffle_xor(x, offset);
        x = kSum ? x + y : x > y ? x : y;
    }
    __syncthreads();  // per_warp is free
    if (threadIdx.x % 32 == 0) per_warp[threadIdx.x / 32] = x;
    __syncthreads();
    x = per_warp[threadIdx.x % 32];
    for (int offset = 16; offset; offset /= 2) {
        const uint64_t y = shuffle_xor(x, offset);
        x = kSum ? x + y : x > y ? x : y;
    }
    return x;
}

// Sums from the first thread on, x included.
__device__ __forceinline__ uint64_t scan(uint64_t x, uint64_t* per_warp) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const uint64_t y = __shfl_up_sync(~0u, static_cast<unsigned long long>(x), offset);
        if (lane >= offset) x += y;
    }
    __syncthreads();
    if (lane == 31) per_warp[warp] = x;
    __syncthreads();
    uint64_t before = lane < warp ? per_warp[lane] : 0;
    for (int offset = 16; offset; offset /= 2) before += shuffle_xor(before, offset);
    return x + before;
}

// A 64-bit sum in shared memory by halves, which the hardware adds by itself: whoever overflows the lower one carries.
__device__ __forceinline__ void add_to(uint64_t* sum, uint64_t x) {
    uint32_t* const half = reinterpret_cast<uint32_t*>(sum);
    const uint32_t low = uint32_t(x), before = atomicAdd(half, low);
    const uint32_t high = uint32_t(x >> 32) + (before + low < before);
    if (high) atomicAdd(half + 1, high);
}

struct Row {
    const SampleParams& p;
    Smem& smem;
    int64_t start;  // of the row in logits
    bool fours;     // aligned for load_4
    float largest;

    template <typename Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
        if (fours) {
            constexpr int kAhead = 4;  // loads on their way
            for (int first = 4 * threadIdx.x; first < p.vocab; first += 4 * kAhead * kThreads) {
                float4 x[kAhead];
#pragma unroll
                for (int j = 0; j < kAhead; ++j)
                    if (const int i = first + 4 * j * kThreads; i < p.vocab) x[j] = load_4(p.logits.data, start + i, p.dtype);
#pragma unroll
                for (int j = 0; j < kAhead; ++j)
                    if (const int i = first + 4 * j * kThreads; i < p.vocab)
                        body(x[j].x, i), body(x[j].y, i + 1), body(x[j].z, i + 2), body(x[j].w, i + 3);
            }
        } else {
            for (int i = threadIdx.x; i < p.vocab; i += kThreads) body(load_element(p.logits.data, start + i, p.dtype), i);
        }
    }
    __device__ __forceinline__ float exponent(float logit) const { return exponent_of(logit, largest, p.scale); }

    // The rank of the first token at which the running sum, of counts or of weights, reaches target >= 1, which the sum over all does;
    // *mass becomes the sum of the weights up to and with that token.
    __device__ uint64_t find(bool by_count, uint64_t target, uint64_t* mass) const {
        const uint64_t weight = smem.weight[threadIdx.x], weights = scan(weight, smem.per_warp);
        uint64_t reached = weights, before = weights - weight;
        if (by_count) {
            const uint64_t count = smem.count[threadIdx.x];
            reached = scan(count, smem.per_warp), before = reached - count;
        }
        if (before < target && target <= reached) {  // true for one thread: the sums never decrease
            smem.bin = threadIdx.x, smem.member_count = 0;
            smem.sum_before = before, smem.mass_before = weights - weight;
        }
        __syncthreads();
        const int bin = smem.bin;
        const uint64_t sum_before = smem.sum_before;
        for_each([&](float logit, int i) {
            const float e = exponent(logit);
            if (bin_of(e) != bin) return;
            const uint32_t at = atomicAdd(&smem.member_count, 1u);
            if (at < kMembers) smem.members[at] = rank_of(logit, i), smem.member_weight[at] = weight_of(e);
        });
        __syncthreads();
        const int members = int(smem.member_count);
        if (members > kMembers) return search(bin, by_count, target, mass);
        if (threadIdx.x < members) {  // every member adds up what comes before it
            const uint64_t mine = smem.members[threadIdx.x], own_weight = smem.member_weight[threadIdx.x];
            uint64_t counts = 0, weights_before = 0;
            for (int i = 0; i < members; ++i)
                if (smem.members[i] > mine) ++counts, weights_before += smem.member_weight[i];
            const uint64_t sum = sum_before + (by_count ? counts : weights_before);
            if (sum < target && target <= sum + (by_count ? 1 : own_weight))
                smem.found = mine, smem.mass = smem.mass_before + weights_before + own_weight;
        }
        __syncthreads();
        *mass = smem.mass;
        return smem.found;
    }

    // The same in a bin with more tokens than there is room for: halves the interval of ranks, reading all logits each time.
    __device__ uint64_t search(int bin, bool by_count, uint64_t target, uint64_t* mass) const {
        const uint64_t sum_before = smem.sum_before, mass_before = smem.mass_before;
        uint64_t low = ~0ull, high = 0;
        const auto for_bin = [&](const auto& body) {
            for_each([&](float logit, int i) {
                const float e = exponent(logit);
                if (bin_of(e) == bin) body(e, rank_of(logit, i));
            });
        };
        const auto sum_from = [&](uint64_t rank, bool counts) {
            uint64_t sum = 0;
            for_bin([&](float e, uint64_t other) {
                if (other >= rank) sum += counts ? 1 : weight_of(e);
            });
            return reduce<true>(sum, smem.per_warp);
        };
        for_bin([&](float, uint64_t rank) { low = rank < low ? rank : low, high = rank > high ? rank : high; });
        low = ~reduce<false>(~low, smem.per_warp), high = reduce<false>(high, smem.per_warp);
        while (low < high) {  // the largest rank such that the tokens from it on reach the target: low <= it <= high
            const uint64_t middle = high - (high - low) / 2;
            if (sum_before + sum_from(middle, by_count) >= target) low = middle;
            else high = middle - 1;
        }
        *mass = mass_before + sum_from(low, false);
        return low;
    }
};

__global__ void __launch_bounds__(kThreads) sample_kernel(const __grid_constant__ SampleParams p) {
    __shared__ Smem smem;
    launch_dependents();
    grid_dependency_wait();
    const int b = blockIdx.x;
    Row row{p, smem, b * p.logits.row, false, 0.0f};
    row.fours = p.vocab % 4 == 0 && p.logits.row % 4 == 0 &&
                reinterpret_cast<uintptr_t>(p.logits.data) % (p.dtype == DType::kFloat32 ? 16 : 8) == 0;

    float largest = -INFINITY;
    int first = 0;
    bool nan = false;
    row.for_each([&](float logit, int i) {  // each thread meets its tokens in order
        if (logit > largest) largest = logit, first = i;
        nan |= logit != logit;
    });
    uint64_t best = nan ? ~0ull : rank_of(largest, uint32_t(first));
    best = reduce<false>(best, smem.per_warp);
    row.largest = logit_of(best);
    if (row.largest != row.largest || row.largest == -INFINITY) {  // NaN, or nothing to choose from
        if (threadIdx.x == 0) p.out[b] = -1;
        return;
    }
    if (p.greedy) {
        if (threadIdx.x == 0) p.out[b] = int32_t(index_of(best));
        return;
    }

    smem.weight[threadIdx.x] = 0, smem.count[threadIdx.x] = 0;
    __syncthreads();
    row.for_each([&](float logit, int) {
        const float e = row.exponent(logit);
        const int bin = bin_of(e);
        atomicAdd(&smem.count[bin], 1u);
        if (const uint64_t weight = weight_of(e)) add_to(&smem.weight[bin], weight);
    });
    __syncthreads();
    uint64_t mass = reduce<true>(smem.weight[threadIdx.x], smem.per_warp);
    if (p.top_k && p.top_k < p.vocab) row.find(true, uint64_t(p.top_k), &mass);
    if (!(p.top_p >> 32)) row.find(false, nucleus_target(mass, p.top_p), &mass);
    const uint64_t drawn = row.find(false, multiply_high(sample_bits(p, b), mass) + 1, &mass);
    if (threadIdx.x == 0) p.out[b] = int32_t(index_of(drawn));
}

}  // namespace

cudaError_t sample(const SampleParams& p, cudaStream_t stream) {
    return launch_kernel(sample_kernel, unsigned(p.batch), kThreads, 0, stream, p, p.programmatic);
}

}  // namespace fa
