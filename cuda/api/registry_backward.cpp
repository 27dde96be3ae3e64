// registry_backward.cpp: every kernel of the backward pass, best first on each device, and what each can serve.
#include "cpu/kernels.h"
#include "registry.h"
#include "serve.h"

namespace fa {
namespace {

const char* serves_all(const BackwardParams&, const DeviceInfo&, char*, size_t) { return nullptr; }

// ---- CPU ----

size_t cpu_naive_workspace(const BackwardParams& b, const DeviceInfo&) { return cpu::backward_naive_workspace(b); }
fa_status cpu_naive_launch(const BackwardParams& b, const DeviceInfo&, void*) {
    return on_host([&] {
        cpu::backward_naive(b);
        cpu::backward_scores(b);
    });
}

// Best first within a device.
constexpr BackwardKernel kKernels[] = {
    {"cpu_naive", "gradients of standard attention, a row of S at a time", FA_CPU, serves_all, cpu_naive_workspace, cpu_naive_launch},
};

}  // namespace

int backward_kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const BackwardKernel* backward_kernel_at(int index) { return index >= 0 && index < backward_kernel_count() ? &kKernels[index] : nullptr; }

}  // namespace fa
