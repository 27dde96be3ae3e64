"""`python -m flash_attn_minimal verify`: attention on large shapes against its formula in float64 NumPy."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .._core.library import load
from ..attention import flash_attn_func, query
from ..errors import Unsupported
from .command import Parser, UsageError, command, one_of


@dataclass
class Case:
    dtype: str
    seqlen_q: int
    seqlen_k: int
    headdim: int
    headdim_v: int
    nheads: int = 2
    nheads_k: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        dim = f"{self.headdim}" if self.headdim == self.headdim_v else f"{self.headdim}/{self.headdim_v}"
        options = " ".join(name if value is True else f"{name}={value}" for name, value in self.options.items())
        heads = f"{self.nheads}/{self.nheads_k} heads"
        return f"{self.dtype} {self.seqlen_q}x{self.seqlen_k} d{dim} {heads} {options}".rstrip()


_CASES = [
    Case("float32", 4096, 4096, 64, 64, options={"causal": True}),
    Case("float32", 2048, 8192, 128, 128),
    Case("float16", 4096, 4096, 64, 64),
    Case("float16", 8192, 8192, 128, 128, 1, 1, options={"causal": True}),
    Case("float32", 1, 32768, 128, 128, 8, 2),
    Case("float32", 4097, 5003, 96, 80, options={"causal": True, "window_size": (512, 0)}),
    Case("float16", 3001, 4999, 256, 256, options={"softcap": 20.0, "causal": True}),
    Case("bfloat16", 4096, 4096, 128, 128, options={"causal": True}),
    Case("bfloat16", 2048, 8192, 192, 128, options={"causal": True, "top_left": True}),
    Case("float32", 2111, 3001, 512, 512, 1, 1),
]
_QUICK = [
    Case("float32", 1023, 1024, 64, 64, options={"causal": True}),
    Case("float16", 799, 2003, 128, 128),
    Case("float32", 1, 4096, 80, 80, 6, 3),
    Case("bfloat16", 1024, 1024, 128, 128, options={"causal": True, "window_size": (100, 0)}),
]

# Half a unit in the last place of numbers below 1.
_ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def tolerance(dtype: str, exact: np.ndarray) -> float:
    """The allowed error of `out`. P and out are rounded to dtype, each by half a unit in the last place; the rest is
    for sums in fp32."""
    return 3 * _ROUNDING[dtype] * float(np.abs(exact).max()) + 2e-5


def _arrays_for(device: str) -> tuple[str, Callable, Callable]:
    """For one device: the framework's name, a function (NumPy float32, dtype name) -> array, and one back to NumPy
    float64."""
    if device == "cuda":
        if not load().fa_cuda_device_count():
            raise UsageError(f"--device cuda: this library sees no CUDA device ({load().fa_build_info().decode()})")
        cupy, torch = _optional("cupy"), _optional("torch")
        if cupy:
            return "cupy", lambda x, t: cupy.asarray(x).astype(_numpy_dtype(t)), lambda x: x.astype(np.float64).get()
        if torch and torch.cuda.is_available():
            from_numpy, dtype = torch.from_numpy, lambda t: getattr(torch, t)
            return "torch", lambda x, t: from_numpy(x).cuda().to(dtype(t)), lambda x: x.double().cpu().numpy()
        raise UsageError("--device cuda needs CuPy, or PyTorch with CUDA, to hold the arrays")
    return "numpy", lambda x, t: x.astype(_numpy_dtype(t)), lambda x: np.asarray(x, np.float64)


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def _numpy_dtype(name: str) -> np.dtype:
    if name != "bfloat16":
        return np.dtype(name)
    if (found := _optional("ml_dtypes")) is None:
        raise Unsupported("bfloat16 in NumPy needs ml_dtypes (pip install ml_dtypes)")
    return np.dtype(found.bfloat16)


def formula(q, k, v, *, causal=False, top_left=False, window_size=(-1, -1), softcap=0.0, rows=512):
    """(out, lse) of one sequence by the definition, some rows at a time; float64, (1, seqlen, heads, dim)."""
    (m, nheads), (n, nheads_k) = q.shape[1:3], k.shape[1:3]
    left, right = window_size[0], 0 if causal else window_size[1]
    out, lse = np.empty((*q.shape[:3], v.shape[-1])), np.empty((1, nheads, m))
    for head in range(nheads):
        keys, values = (x[0, :, head * nheads_k // nheads] for x in (k, v))
        for first in range(0, m, rows):
            block = slice(first, min(first + rows, m))
            s = q[0, block, head] @ keys.T * q.shape[-1] ** -0.5
            if softcap:
                s = softcap * np.tanh(s / softcap)
            # How far each key is behind the last key that a row sees by causality.
            behind = np.arange(block.start, block.stop)[:, None] + (0 if top_left else n - m) - np.arange(n)
            s[((left >= 0) & (behind > left)) | ((right >= 0) & (behind < -right))] = -np.inf
            top = s.max(1, keepdims=True)
            p = np.exp(s - top)
            total = p.sum(1, keepdims=True)
            out[0, block, head] = p @ values / total
            lse[0, head, block] = (top + np.log(total))[:, 0]
    return out, lse


def check(case: Case, to_device: Callable, to_numpy: Callable) -> tuple[str, float, float, float]:
    """Runs a case. Returns the kernel, its seconds, the error of out, and the used part of the allowed error, the
    larger of out's and lse's."""
    rng = np.random.default_rng(case.seqlen_q * 7919 + case.headdim)
    shapes = [
        (1, case.seqlen_q, case.nheads, case.headdim),
        (1, case.seqlen_k, case.nheads_k, case.headdim),
        (1, case.seqlen_k, case.nheads_k, case.headdim_v),
    ]
    q, k, v = (to_device(rng.standard_normal(shape, dtype=np.float32), case.dtype) for shape in shapes)
    kernel = query(q, k, v, **case.options).kernel
    out = to_device(np.full((*shapes[0][:3], case.headdim_v), np.nan, np.float32), case.dtype)
    start = time.perf_counter()
    out, lse = flash_attn_func(q, k, v, return_lse=True, out=out, **case.options)
    out, lse = to_numpy(out), to_numpy(lse)  # on a GPU this waits for the result
    seconds = time.perf_counter() - start
    exact, exact_lse = formula(*map(to_numpy, (q, k, v)), **case.options)
    if not np.array_equal(np.isfinite(out), np.isfinite(exact)) or not np.array_equal(
        np.isneginf(lse), np.isneginf(exact_lse)
    ):
        return kernel, seconds, np.inf, np.inf
    finite = np.isfinite(exact_lse)
    error = float(np.abs(out - exact).max())
    lse_error = float(np.abs(lse - exact_lse)[finite].max(initial=0))
    lse_allowed = 1e-5 * max(1.0, float(np.abs(exact_lse[finite]).max(initial=0)))
    return kernel, seconds, error, float(np.maximum(error / tolerance(case.dtype, exact), lse_error / lse_allowed))


@command("verify")
def main(argv: list[str]) -> int:
    parser = Parser("verify", description=__doc__.split(": ", 1)[1])
    parser.add_argument("--device", **one_of(("cpu", "cuda")), help="default: cuda where there is one, else cpu")
    parser.add_argument("--quick", action="store_true", help="a few smaller shapes, some seconds")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if load().fa_cuda_device_count() else "cpu")
    framework, to_device, to_numpy = _arrays_for(device)
    cases = _QUICK if options.quick else _CASES
    lines, failures, skipped, interrupted = [], 0, 0, False
    for number, case in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case}", file=sys.stderr, flush=True)
        try:
            kernel, seconds, error, used = check(case, to_device, to_numpy)
        except Unsupported as reason:
            lines.append(f"skip  {case}: {reason}")
            skipped += 1
            continue
        except KeyboardInterrupt:  # the cases that were checked are reported
            interrupted = True
            break
        failures += not used <= 1  # NaN fails too
        verdict = "ok  " if used <= 1 else "FAIL"
        measured = f"{kernel}, {1e3 * seconds:.1f} ms, max error {error:.2e}, {used:.0%} of the allowed"
        lines.append(f"{verdict}  {case}: {measured}")
    print(*lines, sep="\n", end="\n" * bool(lines))
    passed = sum(line.startswith("ok") for line in lines)
    rest = f", {len(cases) - len(lines)} not run: interrupted" if interrupted else ""
    print(f"{device} through {framework}: {passed} of {len(cases)} passed, {failures} failed, {skipped} skipped{rest}")
    if interrupted:
        return 130
    return 1 if failures or not passed else 0
