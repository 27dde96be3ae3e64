// parallel.h: a loop over independent tasks, shared out to threads one task at a time. No pool: nothing outlives the call.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace fa::cpu {

// body(task, thread), thread in 0 .. threads - 1. Tasks start in order, so list the longest first.
// When the system has no more threads to give, the ones there are do all of it.
template <typename Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
    threads = int(std::min<int64_t>(threads, tasks));
    std::atomic<int64_t> next{0};
    const auto work = [&](int thread) {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, thread);
    };
    std::vector<std::thread> helpers;
    for (int thread = 1; thread < threads; ++thread) {
        try {
            helpers.emplace_back(work, thread);
        } catch (const std::system_error&) {
            break;
        }
    }
    work(0);
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace fa::cpu
