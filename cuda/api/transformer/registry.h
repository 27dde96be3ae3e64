// registry.h: the tables of the kernels for products in this build, best first on each device.
#pragma once

#include "api/common/kernel.h"
#include "transformer/ops/ops.h"
#include "transformer/w4/common/params.h"

namespace fa {

using LinearKernel = KernelOf<W4LinearParams>;     // products with 4-bit weights
using ChainKernel = KernelOf<W4ChainParams>;       // chains of such products
using DenseLinearKernel = KernelOf<LinearParams>;  // products with 16 or 32-bit weights

int linear_kernel_count();
const LinearKernel* linear_kernel_at(int index);  // nullptr outside 0 .. linear_kernel_count() - 1
int chain_kernel_count();
const ChainKernel* chain_kernel_at(int index);
int dense_linear_kernel_count();
const DenseLinearKernel* dense_linear_kernel_at(int index);
constexpr char kLinearVariable[] = "FLASH_ATTN_LINEAR_KERNEL";  // forces a kernel for products with 4-bit weights

}  // namespace fa
