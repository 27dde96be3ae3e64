// checks.h: checks that several validations share. A check that fails names the argument and quotes its value.
#pragma once

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "api/common/regions.h"
#include "api/common/status.h"
#include "common/types.h"
#include "cpu/common/processors.h"
#include "flash_attn.h"

namespace fa {

enum class Pointers { kRequired, kOptional };  // kOptional: for a query, whose data pointers may be NULL

constexpr int64_t kMaxLength = (int64_t(1) << 31) - 4096;  // so that int32 can still count one tile past the end

inline const char* dtype_name(int32_t dtype) {
    switch (dtype) {
        case FA_FLOAT32: return "float32";
        case FA_FLOAT16: return "float16";
        case FA_BFLOAT16: return "bfloat16";
        case FA_FLOAT8_E4M3: return "float8_e4m3";
        case FA_INT8: return "int8";
    }
    return "unknown";
}

inline size_t dtype_size(int32_t dtype) { return size_t(size_of(DType(dtype))); }

inline fa_status check_pointer(const char* name, const void* data, size_t alignment, bool required) {
    if (!data) return required ? fail(FA_BAD_ARGUMENT, "%s.data is NULL", name) : FA_OK;
    if (reinterpret_cast<uintptr_t>(data) % alignment)
        return fail(FA_BAD_ARGUMENT, "%s.data=%p is not aligned to its element size of %zu bytes", name, data, alignment);
    return FA_OK;
}

inline fa_status check_bool(const char* name, int32_t value) {
    return value == 0 || value == 1 ? FA_OK : fail(FA_BAD_ARGUMENT, "%s=%d is neither 0 nor 1", name, value);
}

inline fa_status check_length(const char* name, int64_t value) {
    if (value < 0) return fail(FA_BAD_ARGUMENT, "%s=%" PRId64 " is negative", name, value);
    if (value > kMaxLength) return fail(FA_UNSUPPORTED, "%s=%" PRId64 " is above %" PRId64, name, value, kMaxLength);
    return FA_OK;
}

// The most rows of all heads together. Sizes derived from this limit fit in 64 bits, and no memory holds so many rows.
constexpr int64_t kMaxTotalRows = int64_t(1) << 42;

inline fa_status check_total(int64_t batch, const char* heads_name, int64_t heads, const char* rows_name, int64_t rows) {
    if (heads <= kMaxTotalRows / std::max<int64_t>(batch, 1) / std::max<int64_t>(rows, 1)) return FA_OK;
    return fail(FA_UNSUPPORTED, "batch=%" PRId64 " x %s=%" PRId64 " x %s=%" PRId64 " is above 2^42 rows", batch, heads_name, heads,
                rows_name, rows);
}

constexpr int32_t kMostThreads = 4096;

// The number of threads set by the environment; 0 if it sets none, and negative if its value is not a number of threads.
inline int32_t threads_of_environment() {
    const char* const text = std::getenv("FLASH_ATTN_NUM_THREADS");
    if (!text || !*text) return 0;
    char* end;
    const long n = std::strtol(text, &end, 10);
    return end == text || *end || n < 0 || n > kMostThreads ? -1 : int32_t(n);
}

// The number of threads of a call that does not set it. Workspaces are sized for it, whatever processors the calling thread may run
// on: see cpu::GivenThreads.
inline int32_t default_threads() {
    const int32_t n = threads_of_environment();
    return n > 0 ? n : std::min(cpu::processors_of_process(), kMostThreads);
}

inline bool threads_are_given(int32_t num_threads) { return num_threads || threads_of_environment() > 0; }

// Copies the caller's struct. A caller compiled against an older, shorter struct lacks the newer fields; they get 0, their default. A
// caller with a newer, longer struct must leave fields unknown to this library at zero.
template <typename Args>
fa_status copy_args(const Args* args, const char* name, size_t smallest, Args* full) {
    if (!args) return fail(FA_BAD_ARGUMENT, "%s is NULL", name);
    if (args->struct_size < smallest || args->struct_size > 65536)
        return fail(FA_BAD_ARGUMENT, "%s.struct_size=%zu: set it to sizeof(%s) = %zu", name, args->struct_size, name, sizeof(Args));
    std::memset(full, 0, sizeof(Args));
    std::memcpy(full, args, std::min(args->struct_size, sizeof(Args)));
    const auto* bytes = reinterpret_cast<const unsigned char*>(args);
    for (size_t i = sizeof(Args); i < args->struct_size; ++i)
        if (bytes[i])
            return fail(FA_UNSUPPORTED, "%s sets a field this library (%s) does not know: byte %zu is not zero", name, fa_version(), i);
    return FA_OK;
}

#define FA_RETURN_IF_ERROR(call)                                                \
    do {                                                                        \
        if (const fa_status status_ = (call); status_ != FA_OK) return status_; \
    } while (0)

inline TensorView view(const fa_tensor& t) { return {t.data, t.batch_stride, t.row_stride, t.head_stride}; }
inline fa_status check_device(int32_t device) {
    if (device == FA_CPU || device == FA_CUDA) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "device=%d is neither FA_CPU (1) nor FA_CUDA (2)", device);
}

// *found is the value of a dtype field, or `otherwise` when the field is 0.
inline fa_status check_dtype(const char* name, int32_t dtype, int32_t otherwise, DType* found) {
    if (!dtype) dtype = otherwise;
    if (dtype < FA_FLOAT32 || dtype > FA_BFLOAT16)
        return fail(FA_BAD_ARGUMENT, "%s=%d is none of float32 (1), float16 (2), bfloat16 (3)", name, dtype);
    *found = DType(dtype);
    return FA_OK;
}

inline fa_status check_range(const char* name, int64_t value, int64_t low, int64_t high) {
    if (low <= value && value <= high) return FA_OK;
    return fail(FA_BAD_ARGUMENT, "%s=%" PRId64 " is outside %" PRId64 " .. %" PRId64, name, value, low, high);
}

inline fa_status check_array(const char* name, const void* data, DType dtype, bool required) {
    return check_pointer(name, data, size_of(dtype), required);
}

// *found is the number of threads of a call: the argument, else the environment's, else one for each processor.
inline fa_status find_threads(int32_t device, int32_t num_threads, int32_t* found) {
    *found = num_threads ? num_threads : 1;
    if (num_threads || device != FA_CPU) return FA_OK;
    *found = threads_of_environment();
    if (*found < 0)
        return fail(FA_BAD_ARGUMENT,
                    "FLASH_ATTN_NUM_THREADS=%.99s is not a number of threads: expected an integer from 1 to %d, or 0 for "
                    "one for each processor",
                    std::getenv("FLASH_ATTN_NUM_THREADS"), kMostThreads);
    if (*found == 0) *found = std::min(cpu::processors_of_process(), kMostThreads);
    return FA_OK;
}

}  // namespace fa
