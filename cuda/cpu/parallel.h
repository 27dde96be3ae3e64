// parallel.h: a loop over independent tasks, shared out to threads one task at a time. No pool: nothing outlives the call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace fa::cpu {

// Threads that are joined whatever happens: a std::thread that is destroyed while it runs ends the process.
class Helpers {
public:
    ~Helpers() {
        for (std::thread& helper : threads_) helper.join();
    }
    // False when the system has no thread, or no memory for one, to give.
    template <typename Work>
    bool start(const Work& work, int thread) {
        try {
            threads_.emplace_back(work, thread);
        } catch (const std::system_error&) {
            return false;
        } catch (const std::bad_alloc&) {
            return false;
        }
        return true;
    }

private:
    std::vector<std::thread> threads_;
};

// body(task, thread), thread in 0 .. threads - 1; it throws nothing. Tasks start in order, so list the longest first.
// When the system has no more threads to give, the ones there are do all of it.
template <typename Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
    threads = int(std::min<int64_t>(threads, tasks));
    std::atomic<int64_t> next{0};
    const auto work = [&](int thread) noexcept {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, thread);
    };
    Helpers helpers;
    for (int thread = 1; thread < threads && helpers.start(work, thread); ++thread) {
    }
    work(0);
}

}  // namespace fa::cpu
