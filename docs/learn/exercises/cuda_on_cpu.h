// cuda_on_cpu.h: as much of CUDA as the exercises need, on a CPU: blocks one after another, the threads of a block as fibers that run until
// they wait. Which of the ready ones goes on is random, and an asynchronous copy lands at once or only when its thread waits for it, so
// that a missing barrier or wait shows. If all threads wait, that is a deadlock. Shared memory holds NaN when a block begins.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cassert>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#ifdef __ELF__
#define __shared__ __attribute__((section("shared_memory"))) static
extern "C" __attribute__((weak, visibility("hidden"))) char __start_shared_memory[], __stop_shared_memory[];  // the linker's
inline char *const shared_begin = __start_shared_memory, *const shared_end = __stop_shared_memory;
#else
#define __shared__ static
inline char *const shared_begin = nullptr, *const shared_end = nullptr;
#endif
#define __launch_bounds__(...)
#define __forceinline__ inline
#define CUDART_INF_F INFINITY

struct uint4 {
    uint32_t x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
template <class T>
T __ldg(const T* p) {
    return *p;
}
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x < y ? y : x; }
using std::isinf, std::isnan;

// ---- threads ----

struct Index {
    uint32_t x = 0, y = 0, z = 0;
};
constexpr int warpSize = 32;
struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStack]};
    std::function<bool()> ready;  // empty: it does not wait
    bool ended = false;
    static constexpr size_t kStack = 1 << 16;
};
// Threads that meet: a block or a warp. Everybody leaves when the last one has come.
struct Meeting {
    uint32_t members = 0, come = 0, turn = 0;
};

inline Index threadIdx, blockIdx, blockDim{1, 1, 1}, gridDim{1, 1, 1};
inline std::vector<Fiber> fibers;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline Meeting whole_block, warps[32];
inline uint32_t exchanged[32][32];
inline bool deadlock, outside_of_shared;
extern "C" {
inline uint32_t block_meetings, most_groups;  // how often a block met; copy groups of one thread that nobody had waited for yet
}
inline uint32_t random_state = 1;
inline uint32_t random_number() { return (random_state = random_state * 1664525 + 1013904223) >> 16; }

struct Copy {
    uint32_t to;
    const void* from;
    int valid;
};
inline std::vector<std::vector<Copy>> groups[1024];  // of each thread; the last one is not committed yet

inline void wait_until(std::function<bool()> ready) {
    const uint32_t me = threadIdx.x;
    fibers[me].ready = std::move(ready);
    swapcontext(&fibers[me].context, &scheduler);
}
inline void maybe_late() {  // others may go on before this thread does
    if (random_number() % 2) wait_until([] { return true; });
}
inline void meet(Meeting& m) {
    const uint32_t turn = m.turn;
    if (++m.come == m.members) m.come = 0, ++m.turn;
    else wait_until([&m, turn] { return m.turn != turn; });
}
inline void run_fiber() {
    body();
    fibers[threadIdx.x].ended = true;
    for (Meeting* m : {&whole_block, &warps[threadIdx.x / 32]})  // nobody waits for a thread that has ended
        if (--m->members == m->come && m->come) m->come = 0, ++m->turn;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}
inline void emulated(uint32_t blocks, uint32_t threads, std::function<void()> kernel) {
    body = std::move(kernel), gridDim.x = blocks, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks && !deadlock; ++blockIdx.x) {
        fibers = std::vector<Fiber>(threads);
        whole_block = {threads};
        if (shared_begin) memset(shared_begin, 0xFF, shared_end - shared_begin);
        for (auto& of_thread : groups) of_thread.clear();
        for (Meeting& warp : warps) warp = {32};
        for (Fiber& f : fibers) {
            memset(f.stack.get(), 0xFF, Fiber::kStack);  // NaN in variables that get no value
            getcontext(&f.context);
            f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = Fiber::kStack;
            makecontext(&f.context, run_fiber, 0);
        }
        for (uint32_t left = threads; left && !deadlock;) {
            bool moved = false;
            const uint32_t first = random_number();
            for (uint32_t i = 0; i < threads; ++i) {
                const uint32_t t = (first + i) % threads;
                Fiber& f = fibers[t];
                if (f.ended || (f.ready && !f.ready())) continue;
                f.ready = nullptr, threadIdx.x = t, moved = true;
                swapcontext(&scheduler, &f.context);
                left -= f.ended;
            }
            deadlock = !moved;
        }
        block_meetings += whole_block.turn;
    }
}

inline void __syncthreads() { meet(whole_block); }
inline void __syncwarp(uint32_t = ~0u) { meet(warps[threadIdx.x / 32]); }
template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
    static_assert(sizeof x == 4, "the stand-in shuffles numbers of 4 bytes");
    uint32_t(&row)[32] = exchanged[threadIdx.x / 32];
    memcpy(&row[threadIdx.x % 32], &x, 4);
    __syncwarp();
    memcpy(&x, &row[lane & 31], 4);
    __syncwarp();
    return x;
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T x, int bits) {
    return __shfl_sync(mask, x, threadIdx.x % 32 ^ bits);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T x, int by) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, x, lane + by < 32 ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T x, int by) {
    const int lane = threadIdx.x % 32;
    return __shfl_sync(mask, x, lane < by ? lane : lane - by);
}
inline uint32_t __ballot_sync(uint32_t mask, int yes) {
    uint32_t found = 0;
    for (int lane = 0; lane < 32; ++lane) found |= uint32_t(__shfl_sync(mask, int(yes != 0), lane)) << lane;
    return found;
}
inline int __any_sync(uint32_t mask, int yes) { return __ballot_sync(mask, yes) != 0; }
inline int __all_sync(uint32_t mask, int yes) { return __ballot_sync(mask, yes) == ~0u; }
inline void __threadfence_block() {}
inline void __threadfence() {}
inline void __nanosleep(uint32_t) { maybe_late(); }
inline long long clock64() { return 0; }  // a wait lasts until it ends, or until everybody waits

// ---- device/mma.cuh and device/ptx.cuh ----

namespace fa {

inline char anchor;  // shared addresses count from here
inline char* pointer(uint32_t shared) {
    alignas(16) static char nowhere[16];
    char* p = &anchor + int32_t(shared);
    if (!shared_begin || (p >= shared_begin && p + 8 <= shared_end)) return p;
    outside_of_shared = true;
    return nowhere;
}
inline uint32_t shared_address(const void* p) { return uint32_t((const char*)p - &anchor); }
inline void store_shared_16(uint32_t shared, uint4 x) { memcpy(pointer(shared), &x, 16); }

inline void cp_async_16(uint32_t shared, const void* global, int valid) {
    auto& mine = groups[threadIdx.x];
    if (mine.empty()) mine.emplace_back();
    mine.back().push_back({shared, global, valid});
}
inline void land(std::vector<Copy>& group) {
    for (const Copy& c : group) memset(pointer(c.to), 0, 16), memcpy(pointer(c.to), c.from, c.valid);
    group.clear();
}
inline void cp_async_commit() {
    auto& mine = groups[threadIdx.x];
    if (mine.empty()) mine.emplace_back();
    most_groups = most_groups < mine.size() ? mine.size() : most_groups;
    if (random_number() % 2) land(mine.back());
    mine.emplace_back();
}
template <int kPending>
void cp_async_wait_group() {
    auto& mine = groups[threadIdx.x];
    while (mine.size() > kPending + 1) {
        land(mine.front());
        mine.erase(mine.begin());
    }
}

extern "C" {
uint32_t bank_conflicts = 0;  // of ldmatrix: lanes whose 16 bytes lie in the banks of another lane's
}
inline void count_conflicts(const uint32_t (&rows)[32]) {
    for (uint32_t lane = 0; lane < 32; ++lane)
        for (uint32_t other = lane / 8 * 8; other < lane; ++other)
            if (rows[lane] != rows[other] && uintptr_t(pointer(rows[lane])) / 16 % 8 == uintptr_t(pointer(rows[other])) / 16 % 8) {
                ++bank_conflicts;
                break;
            }
}
inline void ldmatrix_x4(uint32_t (&d)[4], uint32_t shared) {
    static uint32_t rows[32][32];
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    rows[warp][lane] = shared;
    __syncwarp();
    if (lane == 0) count_conflicts(rows[warp]);
    for (uint32_t m = 0; m < 4; ++m) memcpy(&d[m], pointer(rows[warp][8 * m + lane / 4]) + 4 * (lane % 4), 4);
    __syncwarp();
}

struct Barrier {  // in the 64 bits of an mbarrier
    uint16_t count, pending;
    uint32_t phase;
};
inline Barrier& barrier_at(uint32_t at) { return *reinterpret_cast<Barrier*>(pointer(at)); }
inline void mbarrier_init(uint32_t at, uint32_t count) { barrier_at(at) = {uint16_t(count), uint16_t(count), 0}; }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t at) {
    Barrier& b = barrier_at(at);
    if (--b.pending == 0) b.pending = b.count, b.phase ^= 1;
    maybe_late();
}
inline bool mbarrier_test(uint32_t at, uint32_t parity) {
    if (barrier_at(at).phase == parity) wait_until([at, parity] { return barrier_at(at).phase != parity; });
    return true;
}

}  // namespace fa

// ---- the host's side ----

enum cudaError_t { cudaSuccess };
enum { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
typedef int cudaEvent_t;
inline bool before_a_page;  // arrays end where memory begins that nobody may read
inline void cudaMalloc(unsigned char** p, size_t bytes) {
    if (!before_a_page) {
        *p = (unsigned char*)aligned_alloc(1024, (bytes + 1023) / 1024 * 1024);
        return;
    }
    const size_t page = sysconf(_SC_PAGESIZE), room = (bytes + page - 1) / page * page;
    char* whole = (char*)mmap(nullptr, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(whole + room, page, PROT_NONE);
    *p = (unsigned char*)whole + room - bytes;
}
inline void cudaFree(void* p) {
    if (!before_a_page) free(p);
}
inline void cudaMemcpy(void* to, const void* from, size_t bytes, int) { memcpy(to, from, bytes); }
inline void cudaMemcpyFromSymbol(int* to, int, size_t) { *to = deadlock; }
inline void cudaEventCreate(cudaEvent_t*) {}
inline void cudaEventRecord(cudaEvent_t) {}
inline void cudaEventSynchronize(cudaEvent_t) {}
inline void cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) {}
inline void cudaEventDestroy(cudaEvent_t) {}
inline cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
