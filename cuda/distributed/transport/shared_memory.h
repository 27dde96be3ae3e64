// shared_memory.h: memory shared by processes: a file in /dev/shm with a generated name. The name is passed to the other processes and
// removed once they have opened the file. shm_open does the same, but its symbol version would need a newer C library.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <utility>

namespace fa::distributed {

constexpr size_t kSharedNameSize = 64;

class SharedMemory {
public:
    SharedMemory() = default;
    SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }
    SharedMemory& operator=(SharedMemory&& other) noexcept {
        std::swap(data_, other.data_), std::swap(bytes_, other.bytes_), std::swap(linked_, other.linked_);
        char name[kSharedNameSize];
        std::memcpy(name, name_, sizeof name), std::memcpy(name_, other.name_, sizeof name), std::memcpy(other.name_, name, sizeof name);
        return *this;
    }
    ~SharedMemory() { close(); }

    // Makes new memory, filled with zeros. Returns false, with errno set, on failure.
    bool create(size_t bytes) {
        static std::atomic<uint32_t> count{0};
        const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
        std::snprintf(name_, sizeof name_, "/dev/shm/flash_attn_%d_%u_%llx", int(getpid()), count.fetch_add(1),
                      static_cast<unsigned long long>(now));
        const int file = ::open(name_, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
        if (file < 0) return false;
        linked_ = true;
        if (posix_fallocate(file, 0, off_t(bytes)) != 0) {  // not ftruncate: if memory ran out later, an access would kill the process
            ::close(file), unlink();
            return false;
        }
        return map(file, bytes);
    }
    bool open(const char* name, size_t bytes) {
        const int file = ::open(name, O_RDWR | O_CLOEXEC, 0600);
        return file >= 0 && map(file, bytes);
    }
    void unlink() {
        if (linked_) ::unlink(name_);
        linked_ = false;
    }
    void close() {
        unlink();
        if (data_) munmap(data_, bytes_);
        data_ = nullptr, bytes_ = 0;
    }
    void* data() const { return data_; }
    const char* name() const { return name_; }

private:
    bool map(int file, size_t bytes) {
        void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        ::close(file);
        if (data == MAP_FAILED) return false;
        data_ = data, bytes_ = bytes;
        return true;
    }
    void* data_ = nullptr;
    size_t bytes_ = 0;
    bool linked_ = false;
    char name_[kSharedNameSize] = {};
};

}  // namespace fa::distributed
