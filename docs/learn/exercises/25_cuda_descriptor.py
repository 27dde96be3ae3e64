"""Exercise 25, in CUDA. The descriptor of one operand of wgmma: 25_cuda_descriptor.cu.

wgmma takes its operands by a descriptor of 64 bits (PTX ISA, "Matrix descriptor"):

    bits  0 to 13    the shared address / 16
    bits 16 to 29    the leading dimension's byte offset / 16; not read for this layout
    bits 32 to 45    the stride dimension's byte offset / 16: from one group of eight rows to the next
    bits 62 to 63    1 for the 128-byte swizzle

Write it for columns 16 step to 16 step + 15 of a tile of 64 rows of 128 bytes. Within the swizzle's 128 bytes, 16
columns further is 32 bytes further. The judge looks at the bits, then multiplies with them. Needs nvcc, and for the
product a Hopper GPU.

    python docs/learn/exercises/25_cuda_descriptor.py
"""

import ctypes

import numpy as np
from judging import close, main, require
from kernels import bfloat16

KERNEL = "25_cuda_descriptor.cu"
FIELDS = (("the address / 16", 0, 14), ("the stride / 16", 32, 14), ("the swizzle", 62, 2))


def look_at(bits):
    """Compares the fields of bits(address, step) with what the layout needs."""
    for address in (0, 1024, 8192, 227 * 1024 - 9216):
        for step in range(4):
            got, want = bits(address, step), (address // 16 + 2 * step, 64, 1)
            for (name, first, width), value in zip(FIELDS, want, strict=True):
                field = got >> first & (1 << width) - 1
                require(field == value, f"tile at {address}, step {step}: {name} is {field}, expected {value}")


def judge(kernel):
    kernel.needs = (9, 0)
    library = kernel.library()
    library.descriptor_on_host.restype = ctypes.c_uint64
    look_at(lambda address, step: library.descriptor_on_host(ctypes.c_uint32(address), step))
    rng = np.random.default_rng(25)
    (a, exact_a), (b, exact_b) = (bfloat16(rng.standard_normal((64, 64))) for _ in range(2))
    (c,), _ = kernel.run([a, b], [((64, 64), np.float32)])
    close("C[row, column]", c, exact_a.astype(float) @ exact_b.astype(float).T, 1e-4)
    kernel.race([a, b], [((64, 64), np.float32)], (), 0)


if __name__ == "__main__":
    main(globals())
