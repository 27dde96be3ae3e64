// openmp.h: the program's own OpenMP runtime, if it has asked for its threads (fa_use_openmp). The threads of such a runtime keep a
// processor busy for milliseconds after each of their loops. Threads beside them would share the processors with them.
#pragma once

#include <atomic>

#include "cpu/common/float_mode.h"

namespace fa::cpu {

// Two functions that libgomp, libomp and libiomp5 all have; null if loops run on the library's own threads. A thread that reads both while
// another one changes them may see one of each runtime: max_threads only decides how many threads work.
struct OpenMp {
    // Calls body(data) once on every thread of a team, of which the caller is one, and returns when all have returned. threads is 0: as
    // many as max_threads() says. A team of another size would make libgomp end threads, and start them again for the program's next loop.
    using Parallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
    static inline std::atomic<Parallel> parallel{nullptr};
    static inline std::atomic<int (*)()> max_threads{nullptr};
};

inline bool uses_openmp() { return OpenMp::parallel.load(std::memory_order_relaxed) != nullptr; }

// Looks the functions up in `library`, which the program has loaded, and in what that is linked to; null: back to own threads. Returns the
// reason why loops do not run on that runtime, or null.
const char* use_openmp(const char* library);

// Runs work(0) .. work(threads - 1) on the runtime's threads, or some of them if it has fewer. Returns false if the runtime is not to be
// used: nobody has asked for it, or its team is smaller than the number of threads that the caller of the library has set.
template <typename Work>
bool run_on_openmp(int threads, bool given, const Work& work) {
    const OpenMp::Parallel parallel = OpenMp::parallel.load(std::memory_order_acquire);
    if (!parallel) return false;
    if (given && threads > OpenMp::max_threads.load(std::memory_order_relaxed)()) return false;
    struct Loop {
        const Work& work;
        const int threads;
        std::atomic<int> next{0};
    } loop{work, threads};
    const auto body = [](void* data) {
        Loop& loop = *static_cast<Loop*>(data);
        const int thread = loop.next.fetch_add(1, std::memory_order_relaxed);
        if (thread >= loop.threads) return;
        const FloatMode mode;
        loop.work(thread);
    };
    parallel(body, &loop, 0, 0);
    return true;
}

}  // namespace fa::cpu
