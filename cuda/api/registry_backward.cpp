// registry_backward.cpp: every kernel of the backward pass, best first on each device, and what each can serve.
#include "cpu/kernels.h"
#include "registry.h"
#include "serve.h"

namespace fa {
namespace {

const char* serves_all(const BackwardParams&, const DeviceInfo&, char*, size_t) { return nullptr; }

// ---- CPU ----

template <cpu::Isa isa>
const char* needs_isa(const BackwardParams&, const DeviceInfo&, char*, size_t) {
    return cpu::isa_available(isa) ? nullptr : "this processor, or this build, lacks the instruction set";
}
size_t cpu_workspace(const BackwardParams& b, const DeviceInfo&) { return cpu::backward_workspace(b); }
template <cpu::Isa isa>
fa_status cpu_launch(const BackwardParams& b, const DeviceInfo&, void*) {
    return on_host([&] { cpu::backward(b, isa); });
}
template <cpu::Isa isa>
constexpr BackwardKernel cpu_kernel(const char* name, const char* summary) {
    return {name, summary, FA_CPU, needs_isa<isa>, cpu_workspace, cpu_launch<isa>};
}
size_t cpu_naive_workspace(const BackwardParams& b, const DeviceInfo&) { return cpu::backward_naive_workspace(b); }
fa_status cpu_naive_launch(const BackwardParams& b, const DeviceInfo&, void*) {
    return on_host([&] {
        cpu::backward_naive(b);
        cpu::backward_scores(b);
    });
}

// Best first within a device.
constexpr BackwardKernel kKernels[] = {
    cpu_kernel<cpu::Isa::kAvx512>("cpu_avx512", "tiles of keys against blocks of queries, 16 lanes"),
    cpu_kernel<cpu::Isa::kAvx2>("cpu_avx2", "tiles of keys against blocks of queries, 8 lanes"),
    cpu_kernel<cpu::Isa::kNeon>("cpu_neon", "tiles of keys against blocks of queries, 4 lanes"),
    cpu_kernel<cpu::Isa::kPortable>("cpu_portable", "tiles of keys against blocks of queries, whatever the compiler makes of it"),
    {"cpu_naive", "gradients of standard attention, a row of S at a time", FA_CPU, serves_all, cpu_naive_workspace, cpu_naive_launch},
};

}  // namespace

int backward_kernel_count() { return int(sizeof kKernels / sizeof kKernels[0]); }
const BackwardKernel* backward_kernel_at(int index) { return index >= 0 && index < backward_kernel_count() ? &kKernels[index] : nullptr; }

}  // namespace fa
