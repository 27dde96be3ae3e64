// dispatch.h: chooses the kernel for a call from a table of kernels, best first, and gives the reasons against the kernels before it. If no
// kernel serves the call, it quotes the one that comes closest. The queries of the C ABI return the result of the same choice.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api/common/checks.h"
#include "api/common/kernel.h"
#include "api/common/status.h"
#include "cpu/common/float_mode.h"

namespace fa {

// A text buffer of fixed size that keeps as many whole lines as fit.
class Lines {
public:
    Lines(char* text, size_t size) : text_(text), left_(size) {
        if (left_) *text_ = '\0';
    }
    void add(const char* name, const char* reason) {
        const int n = std::snprintf(text_, left_, "%s%s: %s", first_ ? "" : "\n", name, reason);
        if (n < 0 || size_t(n) >= left_) {
            if (left_) *text_ = '\0';
            left_ = 0;
            return;
        }
        text_ += n, left_ -= size_t(n), first_ = false;
    }

private:
    char* text_;
    size_t left_;
    bool first_ = true;
};

// The end of a refusal in a build without some of the kernels: the kernels that it lacks, and how to build them.
#if !FA_WITH_CUDA
constexpr char kLacks[] = "; this build has no GPU kernels: ./build_and_run.sh --all-kernels builds them (CMake: -DFLASH_ATTN_CUDA=ON)";
#elif FA_GENERAL_KERNELS
constexpr char kLacks[] =
    "; this build has only the general kernels: ./build_and_run.sh --all-kernels builds the rest (CMake: -DFLASH_ATTN_KERNELS=all)";
#elif !FA_WITH_MMA_SM80
constexpr char kLacks[] =
    "; this build has no kernels for sm_80 and newer: ./build_and_run.sh --arch 80 builds them (CMake: -DFLASH_ATTN_ARCH=80)";
#elif !FA_WITH_WGMMA_SM90
constexpr char kLacks[] = "; this build has no Hopper kernels: ./build_and_run.sh --arch 90 builds them (CMake: -DFLASH_ATTN_ARCH=90)";
#else
constexpr char kLacks[] = "";
#endif

// Whether a kernel that this build lacks may run on the device.
inline bool lacks_kernels_for([[maybe_unused]] const DeviceInfo& device) {
#if FA_GENERAL_KERNELS || (FA_WITH_CUDA && !FA_WITH_MMA_SM80)
    return device.compute >= 80;
#elif FA_WITH_CUDA && !FA_WITH_WGMMA_SM90
    return device.compute == 90;
#else
    return false;
#endif
}

// Chooses the kernel that serves the call: the kernel forced by the argument `forced`, else the one forced by the environment variable,
// else the table's fastest, where it knows one, else the first in the table that neither refuses nor yields. `place` is the device
// argument. why_not may be null.
template <typename Row, typename Params>
fa_status choose(const char* forced, int32_t place, const Params& params, const DeviceInfo& device, const Table<Row>& table,
                 const char* variable, const Row** chosen, Lines* why_not) {
    const char* source = "kernel";
    if (!forced) {
        forced = std::getenv(variable);
        source = variable;
        if (forced && !*forced) forced = nullptr;
    }
    const uint32_t call = features_of(params);
    char text[256] = "";
    const Row* const fastest = !forced && table.fastest ? table.fastest(params, device) : nullptr;
    if (fastest && !why_not) {
        *chosen = fastest;
        return FA_OK;
    }
    if (!forced && !why_not)  // a launch does not format reasons, which takes microseconds; the code below does, for those who read them
        for (int i = 0; const Row* const kernel = table.row(i); ++i)
            if (kernel->device == place && kernel->built() && !refusal(*kernel, call, params, device, text, 0).reason &&
                !(kernel->yields && kernel->yields(params, device, text, 0))) {
                *chosen = kernel;
                return FA_OK;
            }
    const char* closest = "";
    char closest_reason[sizeof text] = "there is none for this device";
    Check furthest{};
    bool known = false;
    for (int i = 0; const Row* const candidate = table.row(i); ++i) {
        const Row& kernel = *candidate;
        if (!kernel.built()) continue;
        if (forced && std::strcmp(forced, kernel.name) != 0) {
            if (kernel.device == place && why_not) why_not->add(kernel.name, "another kernel is forced");
            continue;
        }
        known = true;
        if (kernel.device != place) {
            if (!forced) continue;
            return fail(FA_UNSUPPORTED, "%s=%s runs on %s, but device is %s", source, forced, kernel.device == FA_CPU ? "the CPU" : "a GPU",
                        place == FA_CPU ? "FA_CPU" : "FA_CUDA");
        }
        Refusal found = refusal(kernel, call, params, device, text, sizeof text);
        if (!found.reason && fastest && fastest != &kernel) {
            std::snprintf(text, sizeof text, "%s is faster by an estimate", fastest->name);
            found = {text, Check::kSpeed};
        } else if (!found.reason && !fastest && !forced && kernel.yields) {
            found = {kernel.yields(params, device, text, sizeof text), Check::kSpeed};
        }
        if (!found.reason) {
            *chosen = &kernel;
            return FA_OK;
        }
        if (forced) return fail(FA_UNSUPPORTED, "%s=%s cannot serve this call: %s", source, forced, found.reason);
        if (why_not) why_not->add(kernel.name, found.reason);
        if (found.check < furthest) continue;
        closest = kernel.name, furthest = found.check;  // of equally close kernels the last one is the most general
        std::snprintf(closest_reason, sizeof closest_reason, "%s", found.reason);
    }
    if (forced && !known) {
        char names[640] = "none";
        size_t length = 0;
        for (int i = 0; const Row* const kernel = table.row(i); ++i)
            if (kernel->device == place && kernel->built() && length < sizeof names)
                length += size_t(std::snprintf(names + length, sizeof names - length, "%s%s", length ? ", " : "", kernel->name));
        return fail(FA_BAD_ARGUMENT, "%s=%.99s is not a kernel of this build, whose kernels for %s are %s%s", source, forced,
                    place == FA_CPU ? "the CPU" : "a GPU", names, kLacks);
    }
    return fail(FA_UNSUPPORTED, "no kernel of this build serves the call on %s; %s%s%s%s", place == FA_CPU ? "FA_CPU" : "FA_CUDA", closest,
                *closest ? ": " : "", closest_reason, lacks_kernels_for(device) ? kLacks : "");
}

// The query functions of the C ABI: they prepare a call from its arguments but do not launch it.
template <typename AnyCall, typename Args>
fa_status query(const Args* args, fa_attention_plan* plan) {
    const cpu::FloatMode mode;
    if (!plan || plan->struct_size < sizeof(fa_attention_plan))
        return fail(FA_BAD_ARGUMENT, "plan is NULL or plan.struct_size is not sizeof(fa_attention_plan) = %zu", sizeof(fa_attention_plan));
    plan->reserved = 0;
    plan->workspace_bytes = 0;
    plan->kernel[0] = plan->variant[0] = '\0';
    Lines why_not(plan->why_not, sizeof plan->why_not);
    AnyCall call;
    plan->status = call.prepare(args, Pointers::kOptional, &why_not);
    if (plan->status != FA_OK) return fa_status(plan->status);
    std::snprintf(plan->kernel, sizeof plan->kernel, "%s", call.kernel->name);
    std::snprintf(plan->variant, sizeof plan->variant, "%s", variant_of(*call.kernel, call.params, call.device));
    plan->workspace_bytes = call.workspace();
    return FA_OK;
}

}  // namespace fa
