// processors.h: how many processors a call may use. The machine, the affinity of the calling thread and the CPU quota of the process's
// control group limit the number.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <thread>

namespace fa::cpu {

// The first line of a file, or "".
inline std::string first_line(const std::string& path) {
    char line[256] = "";
    if (std::FILE* const file = std::fopen(path.c_str(), "re")) {
        if (!std::fgets(line, sizeof line, file)) line[0] = '\0';
        std::fclose(file);
    }
    return line;
}

// The CPU quota of a control group, in processors, from its folder `group` (version 1 or 2); infinity without a quota.
inline double quota_of_group(const std::string& group) {
    long long quota = 0, period = 0;
    if (std::sscanf(first_line(group + "/cpu.max").c_str(), "%lld %lld", &quota, &period) != 2) {
        quota = period = 0;
        std::sscanf(first_line(group + "/cpu.cfs_quota_us").c_str(), "%lld", &quota);
        std::sscanf(first_line(group + "/cpu.cfs_period_us").c_str(), "%lld", &period);
    }
    return quota > 0 && period > 0 ? double(quota) / double(period) : INFINITY;
}

// The CPU quota of a process, in processors: the least of its control groups and of all groups above them. `list` is the file
// /proc/self/cgroup, `root` the folder /sys/fs/cgroup. A group may have another name here than in its container; groups that do not exist
// here are ignored.
inline double quota_of_process(const char* list, const std::string& root) {
    double least = INFINITY;
    std::FILE* const file = std::fopen(list, "re");
    if (!file) return least;
    char line[4096];
    while (std::fgets(line, sizeof line, file)) {  // hierarchy:controllers:/path
        line[std::strcspn(line, "\n")] = '\0';
        char* const controllers = std::strchr(line, ':');
        char* const path = controllers ? std::strchr(controllers + 1, ':') : nullptr;
        if (!path) continue;
        const std::string names = "," + std::string(controllers + 1, path) + ",";
        const bool unified = names == ",,";  // version 2; on a system with both versions its folder is unified/
        if (!unified && names.find(",cpu,") == std::string::npos) continue;
        for (const char* const mount : {"", "/unified", "/cpu", "/cpu,cpuacct"}) {
            if (unified != (mount[0] == '\0' || mount[1] == 'u')) continue;
            for (std::string group = path + 1;; group.erase(group.find_last_of('/'))) {
                if (group == "/") group.clear();
                least = std::min(least, quota_of_group(root + mount + group));
                if (group.find('/') == std::string::npos) break;
            }
        }
    }
    std::fclose(file);
    return least;
}

// Processors of the machine, or the quota of the process, rounded up, if that is less. Determined once per process, because it takes many
// microseconds; later changes of the quota are not noticed. Two threads that ask at the same time find the same number, and neither waits,
// so the process may be forked meanwhile.
inline int processors_of_process() {
    static std::atomic<int> known{0};
    int count = known.load(std::memory_order_relaxed);
    if (count == 0) {
        double quota = INFINITY;
        try {
            quota = quota_of_process("/proc/self/cgroup", "/sys/fs/cgroup");
        } catch (const std::bad_alloc&) {  // no quota then
        }
        count = int(std::clamp(std::ceil(quota), 1.0, double(std::max(1u, std::thread::hardware_concurrency()))));
        known.store(count, std::memory_order_relaxed);
    }
    return count;
}

// Processors that the calling thread may run on now. Asked each time, because the affinity may change, and a forked process may have
// another; takes under a microsecond.
inline int processors_of_thread() {
    unsigned long words[128];  // 8192 processors
    const long bytes = sched_getaffinity(0, sizeof words, reinterpret_cast<cpu_set_t*>(words)) == 0 ? long(sizeof words) : 0;
    int count = 0;
    for (long i = 0; i < bytes / long(sizeof words[0]); ++i) count += __builtin_popcountl(words[i]);
    return count > 0 ? count : INT_MAX;
}

}  // namespace fa::cpu
