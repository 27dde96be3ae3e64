// parallel.h: a loop over independent tasks, which threads take one at a time. There is no pool: threads end with the call that started
// them. A call that is a list of calls (fa_run_calls) has a Team, whose threads serve the loops of all its calls.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "cpu/common/float_mode.h"
#include "cpu/common/openmp.h"
#include "cpu/common/processors.h"

namespace fa::cpu {

// Threads that are always joined: destroying a std::thread that is not joined ends the process.
class Helpers {
public:
    ~Helpers() {
        for (std::thread& helper : threads_) helper.join();
    }
    // Returns false if the system has no thread to give, or no memory for one.
    template <typename Work>
    bool start(const Work& work, int thread) {
        try {
            threads_.emplace_back([work, thread] {
                const FloatMode mode;
                work(thread);
            });
        } catch (const std::system_error&) {
            return false;
        } catch (const std::bad_alloc&) {
            return false;
        }
        return true;
    }
    int count() const { return int(threads_.size()); }

private:
    // A list: a vector that grows may ask for a function of libstdc++ that wheels cannot have (tests/package/test_packaging.py).
    std::list<std::thread> threads_;
};

// Threads that serve the loops of the thread that made the team. A loop waits only for helpers that have begun to work on it: a thread that
// the system wakes up late finds the loop closed.
class Team {
public:
    Team() { current() = this; }
    ~Team() {
        current() = nullptr;
        const std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
        opened_.fetch_add(1);
        wake_.notify_all();
    }
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // This thread's team, or null.
    static Team*& current() {
        static thread_local Team* team = nullptr;
        return team;
    }

    // Runs work(0) here, and work(1) .. work(threads - 1) on the helpers that come in time.
    template <typename Work>
    void run(int threads, const Work& work) {
        while (helpers_.count() < threads - 1 && helpers_.start([this](int) { help(); }, 0)) {
        }
        const auto call = [](const void* of, int thread) { (*static_cast<const Work*>(of))(thread); };
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            loop_ = {call, &work}, next_ = 1, threads_ = threads;
            opened_.fetch_add(1);
        }
        wake_.notify_all();
        work(0);
        std::unique_lock<std::mutex> lock(mutex_);
        loop_ = {};  // no helper can join any more
        while (inside_ != 0) wait(left_);
    }

private:
    struct Loop {
        void (*call)(const void* work, int thread);
        const void* work;
    };

    void help() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        while (!ends_) {
            if (loop_.call && opened_ != seen && next_ < threads_) {
                seen = opened_;
                const Loop loop = loop_;
                const int thread = next_++;
                ++inside_;
                lock.unlock();
                loop.call(loop.work, thread);
                lock.lock();
                if (--inside_ == 0) left_.notify_one();
                continue;
            }
            // The next loop often comes at once: spin for a while before going to sleep.
            const uint64_t now = opened_;
            lock.unlock();
            for (int i = 0; i < kLooks && opened_.load(std::memory_order_relaxed) == now; ++i) pause();
            lock.lock();
            while (opened_ == now) wait(wake_);
        }
    }

    // Since GCC 12 std::condition_variable::wait has a symbol version that older C++ runtimes lack; pthread_cond_wait exists everywhere.
    // The calling thread holds mutex_.
    void wait(std::condition_variable& condition) { pthread_cond_wait(condition.native_handle(), mutex_.native_handle()); }

    static constexpr int kLooks = 2000;  // about 20 microseconds
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    std::mutex mutex_;  // guards everything below; opened_ is also read without it
    std::condition_variable wake_, left_;
    Loop loop_ = {};
    int next_ = 0, threads_ = 0, inside_ = 0;
    bool ends_ = false;
    std::atomic<uint64_t> opened_{0};  // number of loops so far
    Helpers helpers_;                  // the last member, so its threads are joined before the other members are destroyed
};

// Starting a thread takes tens of microseconds, so each should get at least a tenth of a millisecond of work. The threads of an OpenMP
// runtime wait for work: one microsecond after the last loop, tens of microseconds when they sleep.
constexpr double kThreadNanoseconds = 100e3, kOpenMpNanoseconds = 30e3;
inline int worthwhile_threads(double nanoseconds, int threads) {
    return int(std::clamp(nanoseconds / (uses_openmp() ? kOpenMpNanoseconds : kThreadNanoseconds), 1.0, double(threads)));
}

// Whether the caller of the library has set the number of threads of a call. If not, a loop starts at most as many threads as there are
// processors that its thread may run on. The loop asks for that number only if it wants threads, so a call without threads does not pay for
// it. Lives as long as the call.
class GivenThreads {
public:
    explicit GivenThreads(bool given) : before_(current()) { current() = given; }
    ~GivenThreads() { current() = before_; }
    GivenThreads(const GivenThreads&) = delete;
    GivenThreads& operator=(const GivenThreads&) = delete;

    static bool& current() {
        static thread_local bool given = false;
        return given;
    }

private:
    const bool before_;
};

// Calls body(task, thread) for every task, with thread in 0 .. threads - 1. body must not throw. Tasks start in order, so the longest
// should come first. If the system has no more threads to give, the threads that did start do all tasks.
template <typename Body>
void parallel_for(int64_t tasks, int threads, const Body& body) {
    threads = int(std::min<int64_t>(threads, tasks));
    std::atomic<int64_t> next{0};
    const auto work = [&](int thread) noexcept {
        for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, thread);
    };
    const bool given = GivenThreads::current();
    if (threads > 1 && run_on_openmp(threads, given, work)) return;
    if (threads > 1 && !given) threads = std::min(threads, processors_of_thread());
    if (threads <= 1) return work(0);
    if (Team* const team = Team::current()) return team->run(threads, work);
    Helpers helpers;
    for (int thread = 1; thread < threads && helpers.start(work, thread); ++thread) {
    }
    work(0);
}

}  // namespace fa::cpu
