// variant.h: a row of the table of variants, and the parts of it that several files need.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "api/attention/limits.h"
#include "attention/common/params.h"
#include "device/device_info.h"
#include "ladder/variants/experiments.h"

// When a value has no enumerator, nvcc 13.0 writes the enumeration in a kernel's template arguments by its mangled name. The numbers of
// the variants are such values.
namespace fa {
enum class MmaSm;
enum class WgmmaPlanId;
enum class BackwardPlanId;
}  // namespace fa
using _ZN2fa5MmaSmE = fa::MmaSm;
using _ZN2fa11WgmmaPlanIdE = fa::WgmmaPlanId;
using _ZN2fa14BackwardPlanIdE = fa::BackwardPlanId;

namespace fa {

struct Variant {
    std::string name, experiment, kernel, about;
    int order = 0, headdim = 0;
    int tile_m = 0, tile_n = 0, stages = 1, threads = 0;
    int compute = 0;  // the GPU it needs: 0, 80 or 90
    size_t shared_bytes = 0;
    const void* function = nullptr;  // the kernel; nullptr: the step is a kernel of the library, forced by the name in `kernel`
    bool backward = false;
    bool copies = false;             // reads q, k and v by the copy engine
    bool aligned_workspace = false;  // on 16 bytes
    size_t (*workspace)(const AttentionParams&, int multiprocessors) = nullptr;
    cudaError_t (*launch)(const AttentionParams&, int multiprocessors, cudaStream_t) = nullptr;
    cudaError_t (*launch_backward)(const BackwardParams&, int multiprocessors, cudaStream_t) = nullptr;
};
using Variants = std::vector<Variant>;

// Each file's variants.
void add_cuda_core_variants(Variants* variants);
void add_mma_tile_variants_d64(Variants* variants);
void add_mma_tile_variants_d128(Variants* variants);
void add_mma_climb_variants(Variants* variants);
void add_wgmma_tile_variants_d64(Variants* variants);
void add_wgmma_tile_variants_d128(Variants* variants);
void add_wgmma_climb_variants(Variants* variants);
void add_trace_variants(Variants* variants);
void add_backward_mma_variants(Variants* variants);
void add_backward_wgmma_variants(Variants* variants);

inline std::string tile_text(int headdim, int m, int n) {
    return "d" + std::to_string(headdim) + "_" + std::to_string(m) + "x" + std::to_string(n);
}

}  // namespace fa
