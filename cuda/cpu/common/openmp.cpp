#include "cpu/common/openmp.h"

#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <cstring>

#include "common/older_glibc.h"

FA_FIRST_VERSION(dlopen);
FA_FIRST_VERSION(dlsym);

namespace fa::cpu {
namespace {

// In a process that was forked the runtime's threads are missing, and libgomp would wait for them.
std::atomic<bool> forked{false}, watches_forks{false};

// Whether this process runs the program of the process that forked it. Linux has a flag for this (PF_FORKNOEXEC), the seventh number after
// the name of the program.
bool was_forked() {
    char line[1024] = "";
    if (std::FILE* const file = std::fopen("/proc/self/stat", "re")) {
        if (!std::fgets(line, sizeof line, file)) line[0] = '\0';
        std::fclose(file);
    }
    const char* const name_end = std::strrchr(line, ')');
    unsigned flags = 0;
    return name_end && std::sscanf(name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags) == 1 && (flags & 0x40);
}

}  // namespace

const char* use_openmp(const char* library) {
    OpenMp::parallel = nullptr;
    if (!library) return nullptr;
    if (forked || was_forked()) return "this process was forked: the runtime's threads are those of another process";
    void* const loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);  // stays loaded
    if (!loaded) return "the program has not loaded it";
    // A runtime that was loaded before the program (LD_PRELOAD) takes the place of the one that the library was linked to.
    const auto find = [&](const char* name) {
        void* const first = dlsym(RTLD_DEFAULT, name);
        return first ? first : dlsym(loaded, name);
    };
    const auto parallel = reinterpret_cast<OpenMp::Parallel>(find("GOMP_parallel"));
    const auto max_threads = reinterpret_cast<int (*)()>(find("omp_get_max_threads"));
    if (!parallel || !max_threads) return "neither it nor what it is linked to is an OpenMP runtime";
    if (!watches_forks) {  // two threads may both register the function: it may run twice
        const auto in_child = [] { forked = true, OpenMp::parallel = nullptr; };
        if (pthread_atfork(nullptr, nullptr, in_child) != 0) return "out of memory";
        watches_forks = true;
    }
    OpenMp::max_threads = max_threads;
    OpenMp::passed = 0, OpenMp::next_passed = 1;
    OpenMp::parallel = parallel;
    return nullptr;
}

}  // namespace fa::cpu
