"""The kernels of the library, forced by name, as rungs of the ladder."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .rung import Calls, Rung, Unavailable

SIXTEEN = ("float16", "bfloat16")
EIGHT = ("float8_e4m3fn",)
ALL = ("float32", *SIXTEEN)


def calls(kernel: str | None, backward_kernel: str | None, device: str, **options: Any) -> Calls:
    """Calls of the library's kernels with these names; None leaves the choice to the library. `options` go to
    flash_attn_func."""
    import flash_attn_minimal as fa

    if kernel and kernel not in {row["name"] for row in fa.kernel_tables()["forward"]}:
        raise Unavailable(f"this build of the library has no kernel {kernel}")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise Unavailable("no GPU")

    @functools.cache
    def factors(batch: int, nheads: int, nheads_k: int) -> dict[str, Any]:
        """The descale factors that 8-bit inputs need, all 1."""
        names = {"q_descale": nheads, "k_descale": nheads_k, "v_descale": nheads_k}
        if device == "cpu":
            return {name: np.ones((batch, heads), "float32") for name, heads in names.items()}
        return {name: torch.ones((batch, heads), device="cuda") for name, heads in names.items()}

    def forward(q, k, v, causal):
        eight_bits = factors(q.shape[0], q.shape[2], k.shape[2]) if "float8" in str(q.dtype) else {}
        return fa.flash_attn_func(q, k, v, causal=causal, return_lse=True, kernel=kernel, **eight_bits, **options)

    def backward(dout, q, k, v, out, lse, causal):
        return fa.backward(dout, q, k, v, out, lse, causal=causal, kernel=backward_kernel)

    return Calls(forward, backward if backward_kernel or kernel is None else None)


def _rung(name, about, files, device, dtypes, backward_kernel=None, language="CUDA C++", options=None, **more) -> Rung:
    load = functools.partial(calls, name, backward_kernel, device, **(options or {}))
    return Rung(name=name, language=language, about=about, device=device, files=files, load=load, dtypes=dtypes, **more)


FORWARD = "cuda/attention/forward/"
WGMMA = tuple(f"{FORWARD}wgmma_sm90/{part}" for part in ("kernel.cuh", "block.cuh", "consume.cuh", "plan.h",
                                                         "produce.cuh"))  # fmt: skip
FP8 = tuple(f"{FORWARD}fp8_sm90/{part}" for part in ("kernel.cuh", "plan.h"))
RUNGS = (
    _rung("cpu_naive", "the definition, S in memory", ("cuda/cpu/attention/forward_naive.cpp",), "cpu", ALL,
          "cpu_naive", "C++"),
    _rung("naive", "three steps, S in memory", (FORWARD + "naive.cu",), "cuda", ALL, unit=FORWARD + "naive.cu"),
    _rung("minimal", "online softmax, S in registers", ("cuda/flash_attn_minimal.cu",), "cuda", ALL, "simple",
          unit="cuda/flash_attn_minimal.cu"),
    _rung("mma_sm80", "tensor cores, asynchronous copies, P in registers", (FORWARD + "mma_sm80/kernel.cuh",),
          "cuda", SIXTEEN, "mma_sm80", unit=FORWARD + "mma_sm80/entry.cu"),
    _rung("mma_float32_sm80", "float32 on tensor cores: three products of tf32 parts",
          (FORWARD + "mma_sm80/float32.cu", "cuda/device/split_tf32.cuh"), "cuda", ("float32",), "mma_float32_sm80",
          unit=FORWARD + "mma_sm80/float32.cu"),
    _rung("wgmma_sm90", "TMA, wgmma, producer and consumer warpgroups", WGMMA,
          "cuda", SIXTEEN, "wgmma_sm90", unit=FORWARD + "wgmma_sm90/instances/d128.cu"),
    _rung("fp8_sm90", "8 bits: V transposed on the way, sums of two levels", FP8, "cuda", EIGHT,
          unit=FORWARD + "fp8_sm90/entry.cu"),
    _rung("fp8_fast_sm90", "8 bits, the sums left to the tensor cores", FP8, "cuda", EIGHT,
          options={"fast_accum": True}),
    _rung("cute_sm90", "the loop of wgmma_sm90 from Layouts, a TiledMMA and TMA atoms", ("ladder/cute_/cute_sm90.cu",),
          "cuda", SIXTEEN, language="CuTe C++", unit="ladder/cute_/cute_sm90.cu"),
)  # fmt: skip
