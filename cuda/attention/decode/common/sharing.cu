// sharing.cu: one block plans a call with shared_prefix (sharing.h). It reads lengths and block tables, which earlier kernels
// do not write, while these still run, and writes the plan when they have ended. Bound by latency: lengths and first pages, then the rows
// of the table, then the plan.
#include "attention/decode/common/prefix_call.h"
#include "device/launch.h"
#include "device/ptx.cuh"

namespace fa {
namespace {

constexpr int kThreads = 1024;

// The threads of the block. The host's halves are never called: they let the functions of sharing.h be compiled for the host, too.
struct BlockTeam {
    FA_HOST_DEVICE void sync() const {
#if defined(__CUDA_ARCH__)
        __syncthreads();
#endif
    }
    template <typename Do>
    FA_HOST_DEVICE void for_each(int32_t count, const Do& act) const {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
        for (int32_t i = threadIdx.x; i < count; i += kThreads) act(i);
#endif
    }
    // One warp for each index; its lanes run together.
    template <typename Do>
    FA_HOST_DEVICE void for_each_wide(int32_t count, const Do& act) const {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
        for (int32_t i = threadIdx.x / 32; i < count; i += kThreads / 32) act(i), __syncwarp();
#endif
    }
    FA_HOST_DEVICE bool writes() const {  // one of the lanes
#if defined(__CUDA_ARCH__)
        return threadIdx.x % 32 == 0;
#else
        return false;
#endif
    }
    template <typename T>
    FA_HOST_DEVICE void add(T* to, T x) const {
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(T) == 8) atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
        else atomicAdd(to, x);
#endif
    }
    // 64-bit maxima of shared memory are loops of compare-and-swap, so those that change nothing are left out.
    FA_HOST_DEVICE void raise(uint64_t* to, uint64_t x) const {
#if defined(__CUDA_ARCH__)
        if (*static_cast<volatile uint64_t*>(to) < x)
            atomicMax(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
#endif
    }
    // The next four are called by a warp, all of whose lanes get the result. How many of x = 0 .. n - 1 have holds(x).
    template <typename Holds>
    FA_HOST_DEVICE int32_t count(int32_t n, const Holds& holds) const {
        int32_t found = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
        for (int32_t first = 0; first < n; first += 32) {
            const int32_t x = first + int32_t(threadIdx.x % 32);
            found += __popc(__ballot_sync(~0u, x < n && holds(x)));
        }
#endif
        return found;
    }
    // The first x of 0 .. n - 1 with the greatest value(x), of which at least one is not negative.
    template <typename Value>
    FA_HOST_DEVICE int32_t first_greatest(int32_t n, const Value& value) const {
        int32_t greatest = -1, at = n;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
        for (int32_t x = int32_t(threadIdx.x % 32); x < n; x += 32)
            if (const int32_t own = value(x); own > greatest) greatest = own, at = x;
        const int32_t most = __reduce_max_sync(~0u, greatest);
        at = __reduce_min_sync(~0u, greatest == most ? at : n);
#endif
        return at;
    }
    // The least value(x) of x = 0 .. n - 1, n > 0.
    template <typename Value>
    FA_HOST_DEVICE uint64_t least(int32_t n, const Value& value) const {
        uint64_t least = ~uint64_t(0);
#if defined(__CUDA_ARCH__)
#pragma unroll 1
        for (int32_t x = int32_t(threadIdx.x % 32); x < n; x += 32)
            if (const uint64_t own = value(x); own < least) least = own;
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
            if (const uint64_t other = __shfl_xor_sync(~0u, least, step); other < least) least = other;
#endif
        return least;
    }
    // How many entries at the start of two rows are equal.
    FA_HOST_DEVICE int32_t equal_entries(const int32_t* a, const int32_t* b, int32_t count) const {
#if defined(__CUDA_ARCH__)
        constexpr int kAtOnce = 4;  // loads of a lane
        const int lane = threadIdx.x % 32;
        int32_t first = 0;
        if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0) {  // four entries a load
            constexpr int kEntries = 4 * 32 * kAtOnce;
#pragma unroll 1
            for (; first + 4 <= count; first += kEntries) {
                int equal[kAtOnce];
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j) {
                    const int32_t i = first + 4 * (32 * j + lane);
                    int4 x{}, y{};
                    if (i + 4 <= count) x = *reinterpret_cast<const int4*>(a + i), y = *reinterpret_cast<const int4*>(b + i);
                    equal[j] = x.x != y.x ? 0 : x.y != y.y ? 1 : x.z != y.z ? 2 : x.w != y.w ? 3 : 4;
                }
#pragma unroll
                for (int j = 0; j < kAtOnce; ++j)
                    if (const unsigned lanes = __ballot_sync(~0u, equal[j] < 4)) {
                        const int from = __ffs(int(lanes)) - 1;
                        return first + 4 * (32 * j + from) + __shfl_sync(~0u, equal[j], from);
                    }
            }
            first = count / 4 * 4;
        }
#pragma unroll 1
        for (; first < count; first += 32 * kAtOnce) {
            bool differs[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                const int32_t i = first + 32 * j + lane;
                differs[j] = i < count && a[i] != b[i];
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j)
                if (const unsigned lanes = __ballot_sync(~0u, differs[j])) return first + 32 * j + __ffs(int(lanes)) - 1;
        }
#endif
        return count;
    }
};

struct SharingParams {
    AttentionParams attention;
    SharingRules rules;
    PrefixPlan plan;
};

__global__ void __launch_bounds__(kThreads, 1) sharing_kernel(const __grid_constant__ SharingParams params) {
    extern __shared__ __align__(16) unsigned char shared[];
    __shared__ uint64_t saved, choice;
    __shared__ int32_t followers, group_count;
    launch_dependents();
    const int32_t batch = params.attention.batch;
    SharingScratch scratch;
    scratch.best = reinterpret_cast<uint64_t*>(shared);
    scratch.groups = reinterpret_cast<PrefixGroup*>(scratch.best + batch);
    scratch.limit = reinterpret_cast<int32_t*>(scratch.groups + batch / 2);
    scratch.page = scratch.limit + batch, scratch.leader = scratch.page + batch, scratch.common = scratch.leader + batch;
    scratch.keys = scratch.common + batch;
    scratch.saved = &saved, scratch.choice = &choice, scratch.followers = &followers, scratch.group_count = &group_count;
    const BlockTeam team;
    find_prefixes(team, params.attention, params.rules, scratch);
    grid_dependency_wait();  // earlier kernels may have used this workspace
    lay_out_prefixes(team, params.attention, params.rules, scratch, params.plan);
}

}  // namespace

cudaError_t plan_prefixes(const AttentionParams& p, const SharingRules& rules, const PrefixPlan& plan, bool programmatic,
                          cudaStream_t stream) {
    const size_t bytes = sizeof(uint64_t) * p.batch + sizeof(PrefixGroup) * (p.batch / 2) + 5 * sizeof(int32_t) * p.batch;
    return launch_kernel(sharing_kernel, 1, kThreads, bytes, stream, SharingParams{p, rules, plan}, programmatic);
}

}  // namespace fa
