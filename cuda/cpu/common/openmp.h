// openmp.h: the program's own OpenMP runtime, if it has asked for its threads (fa_use_openmp). The threads of such a runtime keep a
// processor busy for milliseconds after each of their loops. Threads beside them would share the processors with them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "cpu/common/float_mode.h"

namespace fa::cpu {

struct OpenMp {
    // Two functions that libgomp, libomp and libiomp5 all have; null if loops run on the library's own threads. A thread that reads both
    // while another one changes them may see one of each runtime: max_threads only decides how many threads work.
    //
    // parallel calls body(data) once on every thread of a team, of which the caller is one, and returns when all have returned. threads is
    // 0: as many as max_threads() says. A team of another size would make libgomp end threads, and start them again for the program's next
    // loop.
    using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
    static inline std::atomic<Parallel> parallel{nullptr};
    static inline std::atomic<int (*)()> max_threads{nullptr};

    // The runtime waits for every thread of its team. If other programs keep one from running, that takes as long as the system lets these
    // run, tens of milliseconds. The library's own threads are not waited for so long, so the next loops go to them: `passed` loops from
    // now on, and each time that a thread is late again twice as many.
    static constexpr int kMostPassed = 1024;
    static constexpr std::chrono::milliseconds kLate{1};
    static inline std::atomic<int> passed{0}, next_passed{1};
};

// Whether the next loop goes to the runtime.
inline bool uses_openmp() {
    return OpenMp::parallel.load(std::memory_order_relaxed) && OpenMp::passed.load(std::memory_order_relaxed) <= 0;
}

// Looks the functions up in `library`, which the program has loaded, and in what that is linked to; null: back to own threads. Returns the
// reason why loops do not run on that runtime, or null.
const char* use_openmp(const char* library);

// Runs work(0) .. work(threads - 1) on the runtime's threads, or some of them if it has fewer. Returns false if the loop is one for own
// threads: nobody has asked for the runtime, its threads were late, or there are fewer than the caller of the library has asked for.
template <typename Work>
bool run_on_openmp(int threads, bool given, const Work& work) {
    using Clock = std::chrono::steady_clock;
    const OpenMp::Parallel parallel = OpenMp::parallel.load(std::memory_order_acquire);
    if (!parallel) return false;
    if (given && threads > OpenMp::max_threads.load(std::memory_order_relaxed)()) return false;
    if (OpenMp::passed.load(std::memory_order_relaxed) > 0) return OpenMp::passed.fetch_sub(1, std::memory_order_relaxed), false;
    struct Loop {
        const Work& work;
        const int threads;
        const std::thread::id caller;
        std::atomic<int> next{0};
        std::atomic<Clock::time_point> last_came{Clock::time_point::min()};
        Clock::time_point caller_ended{};
    } loop{work, threads, std::this_thread::get_id()};
    const auto body = [](void* data) {
        Loop& loop = *static_cast<Loop*>(data);
        const bool is_caller = std::this_thread::get_id() == loop.caller;
        if (!is_caller) loop.last_came.store(Clock::now(), std::memory_order_relaxed);
        if (const int thread = loop.next.fetch_add(1, std::memory_order_relaxed); thread < loop.threads) {
            const FloatMode mode;
            loop.work(thread);
        }
        if (is_caller) loop.caller_ended = Clock::now();
    };
    parallel(body, &loop, 0, 0);
    const bool late = loop.last_came.load(std::memory_order_relaxed) > loop.caller_ended + OpenMp::kLate;
    const int passed = late ? OpenMp::next_passed.load(std::memory_order_relaxed) : 0;
    if (late) OpenMp::passed.store(passed, std::memory_order_relaxed);
    OpenMp::next_passed.store(std::clamp(2 * passed, 1, OpenMp::kMostPassed), std::memory_order_relaxed);
    return true;
}

}  // namespace fa::cpu
