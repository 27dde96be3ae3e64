// Copies between two GPUs of a host: many messages at once, as a rank fetches the keys of the others. Both GPUs read from each other.
//
//     nvcc -O3 -std=c++17 -arch=native docs/context_parallel/peer_copies.cu -o build/peer_copies && build/peer_copies
//
// Prints, for every way to copy and every size of the messages, the least time of nine.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#define CHECK(call)                                                             \
    do {                                                                        \
        if (const cudaError_t error = (call)) {                                 \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)); \
            std::exit(1);                                                       \
        }                                                                       \
    } while (0)

constexpr int kMessages = 28, kThreads = 512, kAtOnce = 8, kRounds = 12, kWarm = 3;
constexpr size_t kPitch = 2048, kBuffer = size_t(1) << 28;

// Rows of `words` 16-byte words.
__global__ void copy_kernel(char* to, size_t to_pitch, const char* from, size_t from_pitch, long words, long all) {
    const long step = long(gridDim.x) * blockDim.x;
    for (long i = long(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += kAtOnce * step) {
        uint4 word[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (const long x = i + j * step; x < all) word[j] = *(const uint4*)(from + x / words * from_pitch + x % words * 16);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j)
            if (const long x = i + j * step; x < all) *(uint4*)(to + x / words * to_pitch + x % words * 16) = word[j];
    }
}

struct Way {
    int streams;  // of copy engines; 0: one kernel
    int blocks;   // of that kernel
};

struct Gpus {
    char *from[2], *to[2];
};

// Microseconds of GPU `device`, which starts when the other one does.
double time_of(int device, const Gpus& gpus, const Way& way, size_t rows, size_t width, std::atomic<int>& gate) {
    CHECK(cudaSetDevice(device));
    std::vector<cudaStream_t> streams(std::max(way.streams, 1));
    for (auto& stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t begin, end, done;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    double best = 1e9;
    for (int round = 0; round < kRounds; ++round) {
        CHECK(cudaDeviceSynchronize());
        ++gate;
        while (gate < 2 * (round + 1)) {
        }
        CHECK(cudaEventRecord(begin, streams[0]));
        for (size_t i = 1; i < streams.size(); ++i) CHECK(cudaStreamWaitEvent(streams[i], begin, 0));
        for (int message = 0; way.streams && message < kMessages; ++message)
            CHECK(cudaMemcpy2DAsync(gpus.to[device] + message * rows * width, width, gpus.from[1 - device] + message * rows * kPitch,
                                    kPitch, width, rows, cudaMemcpyDefault, streams[message % way.streams]));
        if (!way.streams)
            copy_kernel<<<way.blocks, kThreads, 0, streams[0]>>>(gpus.to[device], width, gpus.from[1 - device], kPitch, long(width / 16),
                                                                 long(kMessages * rows * width / 16));
        for (size_t i = 1; i < streams.size(); ++i) {
            CHECK(cudaEventRecord(done, streams[i]));
            CHECK(cudaStreamWaitEvent(streams[0], done, 0));
        }
        CHECK(cudaEventRecord(end, streams[0]));
        CHECK(cudaStreamSynchronize(streams[0]));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (round >= kWarm) best = std::min(best, 1e3 * ms);
    }
    for (auto& stream : streams) CHECK(cudaStreamDestroy(stream));
    return best;
}

int main() {
    Gpus gpus;
    cudaDeviceProp about;
    CHECK(cudaGetDeviceProperties(&about, 0));
    for (int device = 0; device < 2; ++device) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaDeviceEnablePeerAccess(1 - device, 0));
        CHECK(cudaMalloc(&gpus.from[device], kBuffer));
        CHECK(cudaMalloc(&gpus.to[device], kBuffer));
        CHECK(cudaMemset(gpus.from[device], device + 1, kBuffer));
    }
    std::printf("2 x %s, %d messages\n%-28s %10s %10s %10s\n", about.name, kMessages, "", "KB", "us", "GB/s");
    const Way ways[] = {{1, 0}, {2, 0}, {4, 0}, {0, 8}, {0, 16}, {0, 32}, {0, 132}};
    for (const Way& way : ways)
        for (const size_t width : {256, 1792})
            for (const size_t rows : {1024, 4096}) {
                std::atomic<int> gate{0};
                double us[2];
                std::thread other([&] { us[1] = time_of(1, gpus, way, rows, width, gate); });
                us[0] = time_of(0, gpus, way, rows, width, gate);
                other.join();
                const std::string name = way.streams ? "copy engines, " + std::to_string(way.streams) + " streams"
                                                     : "kernel of " + std::to_string(way.blocks) + " blocks";
                const double slower = std::max(us[0], us[1]);
                std::printf("%-28s %10.0f %10.1f %10.1f\n", name.c_str(), rows * width / 1024.0, slower,
                            1e-3 * kMessages * rows * width / slower);
            }
}
