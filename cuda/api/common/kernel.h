// kernel.h: one row of a table of kernels: its name, what it can serve, and how it is launched.
#pragma once

#include <cstddef>

#include "api/common/device.h"
#include "api/common/serve.h"
#include "flash_attn.h"

// A function of kernels that a build may lack. Rows are in every build, so that every build knows what each kernel takes; a row whose
// kernel is not in the build has null pointers here, and no call chooses it.
#if FA_WITH_CUDA
#define FA_GPU(function) function
#else
#define FA_GPU(function) nullptr
#endif
#if FA_WITH_CUDA && FA_WITH_MMA_SM80
#define FA_SM80(function) function
#else
#define FA_SM80(function) nullptr
#endif
#if FA_WITH_CUDA && FA_WITH_WGMMA_SM90
#define FA_SM90(function) function
#else
#define FA_SM90(function) nullptr
#endif
#if FA_WITH_CUTE
#define FA_CUTE(function) function
#else
#define FA_CUTE(function) nullptr
#endif

namespace fa {

// The GPUs that a kernel runs on, by compute capability (90 for sm_90).
struct Gpus {
    int least, most;
};
constexpr Gpus kAnyGpu = {0, 1000}, kFromSm80 = {80, 1000}, kFromSm90 = {90, 1000}, kHopper = {90, 90};
constexpr Gpus kSm80ToSm90 = {80, 90};  // for speed alone, where another kernel serves newer GPUs: their PTX is a large part of the library

// The order in which a row is compared with a call. Of the kernels that refuse a call, the one that comes furthest is the closest.
enum class Check { kType, kGpu, kHeadDim, kOption, kCondition, kSize, kMemory, kSpeed };

// Why a kernel does not serve a call. No reason: it does.
struct Refusal {
    const char* reason = nullptr;
    Check check{};
};

inline Refusal outside(const Gpus& gpus, const DeviceInfo& device, char* text, size_t size) {
    if (gpus.least <= device.compute && device.compute <= gpus.most) return {};
    if (gpus.least < gpus.most && gpus.most < kAnyGpu.most)
        return {say(text, size, "needs sm_%d to sm_%d, this device is sm_%d", gpus.least, gpus.most, device.compute), Check::kGpu};
    return {say(text, size, "needs sm_%d%s, this device is sm_%d", gpus.least, gpus.most == gpus.least ? " (Hopper)" : " or newer",
                device.compute),
            Check::kGpu};
}

#if FA_WITH_CUDA
template <typename Params>
using Launch = cudaError_t (*)(const Params&, const DeviceInfo&, cudaStream_t);
#else
template <typename>
using Launch = std::nullptr_t;
#endif
// Gives nullptr, or a reason. A reason with values is written to `text`, which is a valid pointer even when size is 0.
template <typename Params>
using Reason = const char* (*)(const Params&, const DeviceInfo&, char* text, size_t size);

// `Limits` is what can be said as data, with its interpreter: refuses() for what a call is, misplaces() for where its arrays are, and the
// text of too_large(). `call` is what features_of(params) has found, once for all rows.
template <typename Params, typename Limits>
struct KernelOf {
    using Call = Params;
    const char* name;
    const char* summary;
    fa_device device;
    Limits limits;
    Reason<Params> refuses = nullptr;                          // a condition beside the limits
    bool (*fits)(const Params&, const DeviceInfo&) = nullptr;  // its indices, and the blocks of a grid, suffice
    Reason<Params> yields = nullptr;                           // why a later kernel of the table is faster; not asked of a forced kernel
    size_t (*workspace)(const Params&, const DeviceInfo&) = nullptr;  // bytes
    // One of the three. `others` launches kernels of another table.
    void (*run)(const Params&) = nullptr;  // on the CPU
    Launch<Params> launch = nullptr;
    fa_status (*others)(const Params&, const DeviceInfo&, void* stream) = nullptr;
    const char* (*variant)(const Params&, const DeviceInfo&) = nullptr;  // the name of the plan that it follows, for queries

    constexpr bool built() const { return run || launch || others; }
};

template <typename Row, typename Params>
Refusal refusal(const Row& kernel, uint32_t call, const Params& params, const DeviceInfo& device, char* text, size_t size) {
    if (const Refusal found = kernel.limits.refuses(call, params, device, text, size); found.reason) return found;
    if (kernel.refuses)
        if (const char* reason = kernel.refuses(params, device, text, size)) return {reason, Check::kCondition};
    if (kernel.fits && !kernel.fits(params, device)) return {kernel.limits.too_large(params, text, size), Check::kSize};
    return {kernel.limits.misplaces(params, text, size), Check::kMemory};
}

template <typename Row, typename Params>
size_t workspace_of(const Row& kernel, const Params& params, const DeviceInfo& device) {
    return kernel.workspace ? kernel.workspace(params, device) : 0;
}

template <typename Row, typename Params>
const char* variant_of(const Row& kernel, const Params& params, const DeviceInfo& device) {
    return kernel.variant ? kernel.variant(params, device) : "";
}

// Returns FA_OK or records the error.
template <typename Row, typename Params>
fa_status launch(const Row& kernel, const Params& params, const DeviceInfo& device, [[maybe_unused]] void* stream) {
    if (kernel.run) return on_host([&] { kernel.run(params); });
    if (kernel.others) return kernel.others(params, device, stream);
#if FA_WITH_CUDA
    return launched(kernel.name, kernel.launch(params, device, static_cast<cudaStream_t>(stream)));
#else
    return FA_UNSUPPORTED;
#endif
}

// A table: rows in one or two arrays, best first on each device.
template <typename Row>
struct Table {
    const Row* rows;
    int count;
    const Row* more = nullptr;
    int more_count = 0;
    // The row that serves a call fastest, where that is known; nullptr: the first one that neither refuses nor yields.
    const Row* (*fastest)(const typename Row::Call&, const DeviceInfo&) = nullptr;

    // All rows, whether their kernels are in this build or not; nullptr past the end.
    const Row* row(int i) const { return i < count ? rows + i : i < count + more_count ? more + (i - count) : nullptr; }
    // The kernels of this build: nullptr outside 0 .. built() - 1.
    const Row* at(int index) const {
        for (int i = 0; const Row* const kernel = row(i); ++i)
            if (kernel->built() && index-- == 0) return kernel;
        return nullptr;
    }
    int built() const {
        int n = 0;
        for (int i = 0; const Row* const kernel = row(i); ++i) n += kernel->built();
        return n;
    }
};
template <typename Row, size_t kCount>
constexpr Table<Row> table_of(const Row (&rows)[kCount]) {
    return {rows, int(kCount)};
}

}  // namespace fa

// The functions of the C ABI that list a table.
#define FA_KERNEL_TABLE(prefix, table)                                                                               \
    int32_t prefix##_count(void) { return (table).built(); }                                                         \
    const char* prefix##_name(int32_t index) { return (table).at(index) ? (table).at(index)->name : nullptr; }       \
    const char* prefix##_summary(int32_t index) { return (table).at(index) ? (table).at(index)->summary : nullptr; } \
    int32_t prefix##_device(int32_t index) { return (table).at(index) ? (table).at(index)->device : 0; }
