// memory.h: buffers on the device under test, and the exceptions that make a test fail or be skipped.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "flash_attn.h"

#if FA_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct Skip : std::runtime_error {
    using std::runtime_error::runtime_error;
};

[[gnu::format(printf, 1, 2)]] inline std::string format(const char* text, ...) {
    char buffer[2048];
    va_list arguments;
    va_start(arguments, text);
    std::vsnprintf(buffer, sizeof buffer, text, arguments);
    va_end(arguments);
    return buffer;
}

// EXPECT(condition, "printf text", ...) fails the running test with the text if the condition is false.
#define EXPECT(condition, ...)                                \
    do {                                                      \
        if (!(condition)) throw Failure(format(__VA_ARGS__)); \
    } while (0)

inline void expect_ok(fa_status status, const char* what) {
    EXPECT(status == FA_OK, "%s: %s, %s", what, fa_status_name(status), fa_last_error());
}

#if FA_WITH_CUDA
inline void cuda_check(cudaError_t error, const char* call) {
    EXPECT(error == cudaSuccess, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
}
#define CUDA(call) cuda_check(call, #call)
#endif

// Waits for the work of one stream (NULL = the default stream) on the device. On the CPU there is nothing to wait for.
inline void wait([[maybe_unused]] fa_device device, [[maybe_unused]] void* stream = nullptr) {
#if FA_WITH_CUDA
    if (device == FA_CUDA) CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)));
#endif
}

// Exactly `bytes` bytes in the memory that the library will use, so that a sanitizer detects every access beyond either end.
class Buffer {
public:
    Buffer() = default;
    Buffer(fa_device device, size_t bytes) : device_(device), bytes_(bytes) {
        if (bytes == 0) return;
#if FA_WITH_CUDA
        if (device == FA_CUDA) {
            CUDA(cudaMalloc(&data_, bytes));
            return;
        }
#endif
        data_ = std::malloc(bytes);
        if (!data_) throw Skip(format("cannot allocate %zu bytes of memory", bytes));
    }
    Buffer(fa_device device, const void* host, size_t bytes) : Buffer(device, bytes) { upload(host); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    Buffer(Buffer&& other) noexcept { *this = std::move(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(device_, other.device_), std::swap(data_, other.data_), std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Buffer() {
#if FA_WITH_CUDA
        if (device_ == FA_CUDA) {
            static bool told = false;
            if (data_ && cudaFree(data_) != cudaSuccess && !std::exchange(told, true))
                std::fprintf(stderr, "cudaFree failed: an earlier kernel is at fault\n");
            return;
        }
#endif
        std::free(data_);
    }

    void upload(const void* host) { copy(data_, host, bytes_); }
    void download(void* host) const { copy(host, data_, bytes_); }
    void copy(void* to, const void* from, size_t bytes) const {
        if (bytes == 0) return;
#if FA_WITH_CUDA
        if (device_ == FA_CUDA) {
            CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
            return;
        }
#endif
        std::memcpy(to, from, bytes);
    }
    std::vector<unsigned char> bytes() const {
        std::vector<unsigned char> host(bytes_);
        download(host.data());
        return host;
    }
    void* data() const { return data_; }
    size_t size() const { return bytes_; }
    template <typename T>
    T* as() const {
        return static_cast<T*>(data_);
    }

private:
    fa_device device_ = FA_CPU;
    void* data_ = nullptr;
    size_t bytes_ = 0;
};
