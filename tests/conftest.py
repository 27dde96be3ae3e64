"""The library, the devices and the kernels that tests use; and how arrays reach a device.

The library is $FLASH_ATTN_LIBRARY with the sources beside this folder, else an installed package, else the sources,
which look for it in build/."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
if "FLASH_ATTN_LIBRARY" in os.environ or importlib.util.find_spec("flash_attn_minimal") is None:
    sys.path.insert(0, str(ROOT / "python"))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [sys.path[0], os.environ.get("PYTHONPATH")])
    )  # subprocesses
elif importlib.util.find_spec("flash_attn_lab") is None:
    sys.path.append(str(ROOT / "python"))  # the laboratory, beside an installed package
FORCING = [f"FLASH_ATTN_{what}KERNEL" for what in ("", "BACKWARD_", "DENSE_LINEAR_", "LINEAR_", "CHAIN_")]
for variable in FORCING:
    os.environ.pop(variable, None)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background; the programs of tests would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory at once

import accuracy  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal._core import library  # noqa: E402

# In the environment, from which the processes of pytest-xdist have it: they must collect tests of the same names.
if not os.environ.get("FLASH_ATTN_TEST_SEED"):
    os.environ["FLASH_ATTN_TEST_SEED"] = str(np.random.SeedSequence().generate_state(1)[0])
SEED = int(os.environ["FLASH_ATTN_TEST_SEED"])


def _module(name: str):
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


ml_dtypes, torch, cupy, jax = (_module(name) for name in ("ml_dtypes", "torch", "cupy", "jax"))
try:
    CUDA_DEVICES = library.load().fa_cuda_device_count()
except fa.LibraryNotFound as error:
    pytest.exit(str(error), returncode=4)
if not CUDA_DEVICES:
    NO_CUDA = "no CUDA device, or a build without CUDA"
elif not (torch and torch.cuda.is_available()) and not cupy:
    NO_CUDA = "neither PyTorch with CUDA nor CuPy to hold the arrays"
else:
    NO_CUDA = ""


@dataclass(frozen=True)
class Device:
    """Arrays on one device through one framework."""

    name: str
    framework: str

    def array(self, x: np.ndarray, dtype: str | None = None):
        """A NumPy array on this device, as `dtype`."""
        dtype = dtype or x.dtype.name
        if dtype == "bfloat16" and self.framework != "torch" and ml_dtypes is None:
            pytest.skip("bfloat16 needs ml_dtypes")
        if self.framework == "torch":
            return torch.tensor(x, device=self.name).to(getattr(torch, dtype))
        native = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
        return cupy.asarray(x).astype(native) if self.framework == "cupy" else x.astype(native)

    def nans(self, shape, dtype: str):
        return self.array(np.full(shape, np.nan, np.float32), dtype)

    def numpy(self, array) -> np.ndarray:
        """An array as a NumPy array; 16-bit floats become float32."""
        if self.framework == "torch":
            return (array.float() if array.dtype in (torch.float16, torch.bfloat16) else array).cpu().numpy()
        array = array.get() if self.framework == "cupy" else array
        return array.astype(np.float32) if array.dtype.itemsize == 2 else array


@dataclass(frozen=True)
class Kernel:
    """One kernel on one device."""

    device: Device
    name: str

    @property
    def general(self) -> bool:
        """Whether the kernel serves every call, so that a refusal is a failure and not a skip. Only kernels named after
        a GPU's architecture, and the one of bfloat16, may refuse."""
        return "_sm" not in self.name and self.dtype == "float32"

    @property
    def dtype(self) -> str:
        """The dtype of tests that have only one. cpu_amx takes no other than bfloat16."""
        return "bfloat16" if self.name == "cpu_amx" else "float32"

    def __call__(self, q, k, v, dtype="float32", cu_seqlens=None, **options):
        """Attention over NumPy arrays. Returns out, which was filled with NaN before the call, and lse as NumPy
        arrays."""
        arrays, options = self.arguments(q, k, v, dtype, cu_seqlens, options)
        plan = fa.query(*arrays, **options)
        if plan.status == "FA_UNSUPPORTED" and not self.general:
            pytest.skip(plan.error)
        assert plan.status == "FA_OK", plan
        assert plan.kernel == self.name
        shape = (*q.shape[:-1], v.shape[-1])
        options["out"] = self.device.nans(shape, dtype)
        out, lse = (fa.flash_attn_func if cu_seqlens is None else fa.flash_attn_varlen_func)(
            *arrays, return_lse=True, **options
        )
        assert out is options["out"]
        return self.device.numpy(out), self.device.numpy(lse)

    def arguments(self, q, k, v, dtype, cu_seqlens, options):
        arrays = [self.device.array(x, dtype) for x in (q, k, v)]
        options = {"kernel": self.name, **options}
        for name in ("alibi_slopes", "sinks", "mask", "startend_row_indices", "block_mask"):
            if name in options:
                options[name] = self.device.array(options[name])
        if "bias" in options:
            bias = options["bias"]
            exact = np.array_equal(accuracy.round_to(bias, dtype), bias, equal_nan=True)
            options["bias"] = self.device.array(bias, dtype if exact else "float32")
        if cu_seqlens is not None:
            for name, cu, longest in zip(("q", "k"), cu_seqlens[:2], cu_seqlens[2:], strict=True):
                options[f"cu_seqlens_{name}"] = self.device.array(np.array(cu, np.int32))
                options[f"max_seqlen_{name}"] = longest
        return arrays, options

    def check(self, case: accuracy.Case) -> tuple[np.ndarray, np.ndarray]:
        """Runs a case, compares it with float64, and returns the kernel's out and lse."""
        (q, k, v, options), exact, plain = accuracy.expected(case)
        cu = (case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k) if case.varlen else None
        out, lse = self(q, k, v, case.dtype, cu, **options)
        floor = accuracy.rounding_floor(q, k, case.softmax_scale)
        accuracy.check("lse", lse, exact[1], plain[1], "float32", floor=floor)
        accuracy.check("out", out, exact[0], plain[0], case.dtype, floor=floor)
        return out, lse


class BackwardKernel(Kernel):
    """One kernel of the backward pass on one device."""

    def __call__(self, dout, q, k, v, out, lse, dtype="float32", cu_seqlens=None, before=None, **options):
        """Gradients over NumPy arrays. dq, dk and dv start as NaN, or are added to `before`."""
        wanted = {name: options.pop(name, False) for name in ("return_dbias", "return_dsinks")}
        if (dlse := options.pop("dlse", None)) is not None:
            wanted["dlse"] = self.device.array(dlse)
        arrays, options = self.arguments(q, k, v, dtype, cu_seqlens, options)
        plan = fa.backward_query(*arrays, **options)
        if plan.status == "FA_UNSUPPORTED" and not self.general:
            pytest.skip(plan.error)
        assert plan.status == "FA_OK", plan
        assert plan.kernel == self.name
        given = [self.device.array(dout, dtype), *arrays, self.device.array(out, dtype), self.device.array(lse)]
        fill = np.nan if cu_seqlens is None else 0.0  # rows of no sequence are not touched
        for name, x, old in zip(("dq", "dk", "dv"), (q, k, v), before or (None,) * 3, strict=True):
            start = np.full(x.shape, fill, np.float32) if old is None else old
            options[name] = self.device.array(start, dtype)
        results = fa.backward(*given, accumulate=before is not None, **wanted, **options)
        assert all(results[i] is options[name] for i, name in enumerate(("dq", "dk", "dv")))
        return [self.device.numpy(x) for x in results]

    def check(self, case: accuracy.Case, **call) -> list[np.ndarray]:
        """Runs a case, compares it with float64, and returns the kernel's gradients."""
        (dout, q, k, v, out, lse, options), exact, plain = accuracy.expected_backward(case)
        cu = (case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k) if case.varlen else None
        wanted = {"return_dbias": exact.dbias is not None, "return_dsinks": exact.dsinks is not None}
        got = self(dout, q, k, v, out, lse, case.dtype, cu, **wanted, **options, **call)
        names = [name for name in exact._fields if getattr(exact, name) is not None]
        for name, x in zip(names, got, strict=True):
            dtype = case.dtype if name in ("dq", "dk", "dv") else "float32"
            floor = accuracy.gradient_floor(case, getattr(exact, name))
            accuracy.check(name, x, getattr(exact, name), getattr(plain, name), dtype, floor=floor)
        return got


CPU = Device("cpu", "numpy")
CUDA = Device("cuda", "torch" if torch and torch.cuda.is_available() else "cupy")


def cpu_kernels() -> list[str]:
    """Forward kernels whose instructions this processor has. One of them takes bfloat16 alone."""
    names = [kernel["name"] for kernel in fa.kernels() if kernel["device"] == "cpu"]
    q = np.zeros((1, 1, 1, 8), ml_dtypes.bfloat16 if ml_dtypes else np.float32)
    return [name for name in names if "lacks the instruction set" not in fa.query(q, q, q, kernel=name).error]


no_cuda = pytest.param(None, id="cuda", marks=pytest.mark.skip(reason=NO_CUDA))
_devices = [pytest.param(CPU, id="cpu"), no_cuda if NO_CUDA else pytest.param(CUDA, id="cuda")]
_kernels = [pytest.param(Kernel(CPU, name), id=name) for name in cpu_kernels()]
if NO_CUDA:
    _kernels.append(no_cuda)
else:
    _names = [kernel["name"] for kernel in fa.kernels() if kernel["device"] == "cuda"]
    _kernels += [pytest.param(Kernel(CUDA, name), id=name) for name in _names]


def _cpu_backward_kernels() -> list[str]:
    q = np.zeros((1, 1, 1, 8), np.float32)
    names = [kernel["name"] for kernel in fa.backward_kernels() if kernel["device"] == "cpu"]
    return [name for name in names if fa.backward_query(q, q, q, kernel=name).status == "FA_OK"]


_backward_kernels = [pytest.param(BackwardKernel(CPU, name), id=name) for name in _cpu_backward_kernels()]
if NO_CUDA:
    _backward_kernels.append(no_cuda)
else:
    _names = [kernel["name"] for kernel in fa.backward_kernels() if kernel["device"] == "cuda"]
    _backward_kernels += [pytest.param(BackwardKernel(CUDA, name), id=f"cuda_{name}") for name in _names]


def jax_platforms() -> list:
    """Parameters for tests that need JAX: "cpu", and "gpu", which is skipped unless JAX and the library both have
    one."""
    try:
        gpus = jax.devices("gpu") if CUDA_DEVICES else []
    except RuntimeError:
        gpus = []
    skip = pytest.mark.skip(reason="no CUDA device for the library and JAX")
    return ["cpu", "gpu" if gpus else pytest.param("gpu", marks=skip)]


@pytest.fixture(params=_devices)
def device(request) -> Device:
    return request.param


@pytest.fixture(params=_kernels)
def kernel(request) -> Kernel:
    return request.param


@pytest.fixture(params=_backward_kernels)
def backward_kernel(request) -> BackwardKernel:
    return request.param


@pytest.fixture(autouse=True)
def _no_forced_kernel(monkeypatch):
    for variable in FORCING:
        monkeypatch.delenv(variable, raising=False)


# ---- which tests run ----

# The tests of a run that names none: folders and files of tests/. docs/testing.md says what each of the others finds.
QUICK = (
    "attention",
    "distributed",
    "integrations",
    "llama",
    "transformer",
    "package/test_library.py",
    "test_llama_host.py",
)


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="every test; without it and without names, the quick ones")


def pytest_configure(config):
    if hasattr(config, "workerinput"):  # of pytest-xdist, which hands on what the first process has decided
        return
    chosen = config.getoption("keyword") or config.getoption("markexpr") or config.getoption("lf", False)
    if chosen or config.args_source is not config.ArgsSource.TESTPATHS:
        config.option.all = True


def pytest_ignore_collect(collection_path, config):
    if config.option.all or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT / "tests").as_posix()
    return None if any(name == quick or name.startswith(f"{quick}/") for quick in QUICK) else True


def pytest_report_header(config):
    return [
        "tests: " + ("all that are named" if config.option.all else "the quick ones (--all: every test)"),
        f"library: {library.path()} ({library.load().fa_build_info().decode()})",
        f"fuzz seed: {SEED} (FLASH_ATTN_TEST_SEED={SEED} repeats this run); cuda: {NO_CUDA or CUDA.framework}",
    ]
