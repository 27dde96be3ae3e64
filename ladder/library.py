"""The kernels of the library, forced by name, as rungs of the ladder."""

from __future__ import annotations

import functools

from .rung import Calls, Rung, Unavailable

SIXTEEN = ("float16", "bfloat16")
ALL = ("float32", *SIXTEEN)


def _calls(kernel: str, backward_kernel: str | None, device: str) -> Calls:
    import flash_attn_minimal as fa

    if kernel not in {row["name"] for row in fa.kernel_tables()["forward"]}:
        raise Unavailable(f"this build of the library has no kernel {kernel}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise Unavailable("no GPU")

    def forward(q, k, v, causal):
        return fa.flash_attn_func(q, k, v, causal=causal, return_lse=True, kernel=kernel)

    def backward(dout, q, k, v, out, lse, causal):
        return fa.backward(dout, q, k, v, out, lse, causal=causal, kernel=backward_kernel)

    return Calls(forward, backward if backward_kernel else None)


def _rung(name, about, files, device, dtypes, backward_kernel=None, language="CUDA C++", **more) -> Rung:
    load = functools.partial(_calls, name, backward_kernel, device)
    return Rung(name=name, language=language, about=about, device=device, files=files, load=load, dtypes=dtypes, **more)


FORWARD = "cuda/attention/forward/"
WGMMA = tuple(f"{FORWARD}wgmma_sm90{end}" for end in (".cuh", "_block.cuh", "_consume.cuh", "_plan.h", "_produce.cuh"))
RUNGS = (
    _rung("cpu_naive", "the definition, S in memory", ("cuda/cpu/attention/forward_naive.cpp",), "cpu", ALL,
          "cpu_naive", "C++"),
    _rung("naive", "three steps, S in memory", (FORWARD + "naive.cu",), "cuda", ALL),
    _rung("minimal", "online softmax, S in registers", ("cuda/flash_attn_minimal.cu",), "cuda", ALL, "simple"),
    _rung("mma_sm80", "tensor cores, asynchronous copies, P in registers", (FORWARD + "mma_sm80.cuh",), "cuda", SIXTEEN,
          "mma_sm80"),
    _rung("wgmma_sm90", "TMA, wgmma, producer and consumer warpgroups", WGMMA,
          "cuda", SIXTEEN, "wgmma_sm90"),
    _rung("cute_sm90", "the loop of wgmma_sm90 from Layouts, a TiledMMA and TMA atoms", (FORWARD + "cute_sm90.cu",),
          "cuda", SIXTEEN, language="CuTe C++"),
)  # fmt: skip
