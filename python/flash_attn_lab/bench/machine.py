"""One interface to the three sources of arrays (NumPy, PyTorch, CuPy): make inputs, read rows back, time launches.

A framework is imported when its machine is opened, never before. `burst(launch, count, us)` returns a callable that
queues launches 0 .. count - 1; `seconds(burst)` measures how long the device takes for the burst:

    CPU    the calls one after another between two readings of a steady clock
    GPU    CUDA events around a replayed CUDA graph of the launches (short kernels: no host time is included),
           or around plain launches (long kernels: the host stays ahead of the device)
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from flash_attn_minimal._commands.command import UsageError
from flash_attn_minimal._commands.report import cores, cpu_model, plural
from flash_attn_minimal._core.library import load
from flash_attn_minimal.errors import FlashAttnError

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}  # bytes
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}
GRAPH_BELOW_US = 200  # a launch that takes longer than this hides the host's work for the next launch
CAPTURE_FAILED = "timed without a CUDA graph"


class BenchError(UsageError):
    """The command cannot do what was asked on this machine; the text says why."""


@dataclass
class OneByOne:
    """Launches that the host queues one after the other. capture_failed: they should have become a CUDA graph, so short
    ones are timed with the work of the host."""

    launch: Callable[[int], Any]
    count: int
    capture_failed: bool = False

    def __call__(self):
        for i in range(self.count):
            self.launch(i)


class CpuClock:
    device = "cpu"
    l2_bytes = 0  # inputs do not rotate: in real programs, too, they are often in the CPU's cache
    gpu_id = None

    def burst(self, launch, count, us):
        return OneByOne(launch, count)

    def seconds(self, burst, repeat=1, warm=True):
        time.sleep(0.005)  # lets the threads of the previous system stop spinning
        if warm:
            burst()
        start = time.perf_counter()
        for _ in range(repeat):
            burst()
        return time.perf_counter() - start

    def synchronize(self):
        pass

    def use_one_stream(self):
        pass

    def release(self):
        pass

    def describe(self):
        return {"cpu": cpu_model()}

    @property
    def title(self):
        return f"{cpu_model()}, {plural(cores(), 'core')}"


class Numpy(CpuClock):
    framework = "numpy"
    xp = np

    def random(self, shape, dtype, seed):
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        return values.astype(self._dtype(dtype), copy=False)

    def nans(self, shape, dtype):
        return np.full(shape, np.nan, self._dtype(dtype))

    def int32(self, values):
        return np.asarray(values, np.int32)

    def float32(self, values):
        return np.asarray(values, np.float32)

    def host(self, array):
        """A float32 NumPy copy."""
        return np.asarray(array).astype(np.float32)

    def cast(self, array, dtype):
        return array.astype(self._dtype(dtype))

    def finite(self, array):
        return bool(np.isfinite(array).all())

    @staticmethod
    def _dtype(dtype):
        if dtype in ("bfloat16", "float8_e4m3fn"):
            try:
                import ml_dtypes
            except ImportError:
                raise BenchError(
                    f"arrays of {dtype} on the CPU need ml_dtypes or PyTorch: pip install ml_dtypes"
                ) from None
            return np.dtype(getattr(ml_dtypes, dtype))
        return np.dtype(dtype)


class _Torch:
    framework = "torch"

    def __init__(self):
        import torch

        self.torch = self.xp = torch

    def random(self, shape, dtype, seed):
        generator = self.torch.Generator(self.device).manual_seed(seed)
        values = self.torch.randn(shape, generator=generator, device=self.device, dtype=self.torch.float32)
        return values.to(getattr(self.torch, dtype))

    def nans(self, shape, dtype):
        return self.torch.full(shape, float("nan"), dtype=getattr(self.torch, dtype), device=self.device)

    def int32(self, values):
        return self.torch.tensor(values, dtype=self.torch.int32, device=self.device)

    def float32(self, values):
        return self.torch.tensor(values, dtype=self.torch.float32, device=self.device)

    def host(self, array):
        return array.detach().float().cpu().numpy()

    def cast(self, array, dtype):
        return array.to(getattr(self.torch, dtype))

    def finite(self, array):
        return bool(self.torch.isfinite(array).all())


class TorchCpu(_Torch, CpuClock):
    pass


class TorchCuda(_Torch):
    device = "cuda"

    def __init__(self):
        super().__init__()
        if not self.torch.cuda.is_available():
            raise BenchError("PyTorch sees no CUDA device")
        properties = self.torch.cuda.get_device_properties(self.torch.cuda.current_device())
        self.name = properties.name
        self.l2_bytes = getattr(properties, "L2_cache_size", 50 << 20)
        uuid = getattr(properties, "uuid", None)
        self.gpu_id = None if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
        self._start, self._end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._captured = self.torch.cuda.Stream()

    def use_one_stream(self):
        """From here on PyTorch works on the stream that `burst` captures. A backward pass runs on the stream of its
        forward pass: only on this one can it be captured, and on any other stream each launch would wait for two
        events more."""
        self.torch.cuda.synchronize()
        self.torch.cuda.set_stream(self._captured)

    def rehearse(self, launch):
        """Does the host's part of a launch alone, in a graph that is thrown away. Raises what the launch raises."""
        with self.torch.cuda.graph(self.torch.cuda.CUDAGraph(), stream=self._captured, capture_error_mode="relaxed"):
            launch()

    def burst(self, launch, count, us):
        if us < GRAPH_BELOW_US:
            graph = self.torch.cuda.CUDAGraph()
            try:
                with self.torch.cuda.graph(graph, stream=self._captured):
                    for i in range(count):
                        launch(i)
                return graph.replay
            except RuntimeError as error:
                self.torch.cuda.synchronize()
                print(f"  {CAPTURE_FAILED}: {first_line(error)}", file=sys.stderr)
                return OneByOne(launch, count, capture_failed=True)
        return OneByOne(launch, count)

    def seconds(self, burst, repeat=1, warm=True):
        if warm:
            burst()  # keeps the device busy while the host queues the timed bursts
        self._start.record()
        for _ in range(repeat):
            burst()
        self._end.record()
        self._end.synchronize()
        return self._start.elapsed_time(self._end) * 1e-3

    def synchronize(self):
        self.torch.cuda.synchronize()

    def release(self):
        self.torch.cuda.empty_cache()

    def describe(self):
        about = {"gpu": self.name, "cuda": self.torch.version.cuda, "torch": self.torch.__version__}
        return about | {"cudnn": self.torch.backends.cudnn.version()}

    @property
    def title(self):
        return self.name


class Cupy:
    device = "cuda"
    framework = "cupy"

    def __init__(self):
        import cupy

        self.cupy = self.xp = cupy
        try:
            number = cupy.cuda.runtime.getDevice()
            properties = cupy.cuda.runtime.getDeviceProperties(number)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise BenchError(f"CuPy sees no CUDA device: {first_line(error)}") from None
        self.name = properties["name"].decode()
        self.l2_bytes = properties.get("l2CacheSize", 50 << 20)
        raw = properties.get("uuid")
        digits = bytes(raw).hex() if raw else ""
        groups = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        self.gpu_id = f"GPU-{'-'.join(groups)}" if len(digits) == 32 else None
        # A capture needs a stream that is not the default one, and launches go to the current stream. This is both.
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.use()
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

    def random(self, shape, dtype, seed):
        values = self.cupy.random.RandomState(seed).standard_normal(shape, dtype=self.cupy.float32)
        return values.astype(self._dtype(dtype), copy=False)

    def nans(self, shape, dtype):
        return self.cupy.full(shape, float("nan"), self._dtype(dtype))

    def int32(self, values):
        return self.cupy.asarray(values, dtype=self.cupy.int32)

    def float32(self, values):
        return self.cupy.asarray(values, dtype=self.cupy.float32)

    def host(self, array):
        return array.astype(self.cupy.float32).get()

    def cast(self, array, dtype):
        return array.astype(self._dtype(dtype))

    def finite(self, array):
        return bool(self.cupy.isfinite(array.astype(self.cupy.float32)).all())

    def _dtype(self, dtype):
        if dtype == "bfloat16":  # this CuPy may or may not know ml_dtypes' type
            try:
                return (
                    self.cupy.zeros(1, Numpy._dtype(dtype)).astype(self.cupy.float32).astype(Numpy._dtype(dtype)).dtype
                )
            except (BenchError, TypeError, ValueError) as error:
                raise BenchError(
                    f"this CuPy has no bfloat16 ({first_line(error)}): install PyTorch, or use --dtype float16"
                ) from None
        return self.cupy.dtype(dtype)

    def burst(self, launch, count, us):
        if us < GRAPH_BELOW_US:
            stream = self._stream
            stream.synchronize()
            stream.begin_capture()
            try:
                try:
                    for i in range(count):
                        launch(i)
                finally:
                    graph = stream.end_capture()
                return lambda: graph.launch(stream)
            except (RuntimeError, FlashAttnError) as error:
                print(f"  {CAPTURE_FAILED}: {first_line(error)}", file=sys.stderr)
                return OneByOne(launch, count, capture_failed=True)
        return OneByOne(launch, count)

    def seconds(self, burst, repeat=1, warm=True):
        if warm:
            burst()
        self._start.record(self._stream)
        for _ in range(repeat):
            burst()
        self._end.record(self._stream)
        self._end.synchronize()
        return self.cupy.cuda.get_elapsed_time(self._start, self._end) * 1e-3

    def use_one_stream(self):
        pass  # it works on one already

    def synchronize(self):
        self._stream.synchronize()

    def release(self):
        self.cupy.get_default_memory_pool().free_all_blocks()

    def describe(self):
        version = self.cupy.cuda.runtime.runtimeGetVersion()
        return {"gpu": self.name, "cuda": f"{version // 1000}.{version % 1000 // 10}", "cupy": self.cupy.__version__}

    @property
    def title(self):
        return self.name


FRAMEWORKS = {"numpy": [Numpy], "torch": [TorchCuda, TorchCpu], "cupy": [Cupy]}


def gpus(asked: str | None) -> list[str]:
    """The value of CUDA_VISIBLE_DEVICES for each worker."""
    count = load().fa_cuda_device_count()
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    names = visible or [str(i) for i in range(count)]
    if asked is None:
        return names[:count]
    chosen = asked.split(",")
    for word in chosen:
        if not word.isdigit() or int(word) >= count:
            raise BenchError(
                f"--devices {asked}: {word!r} is not a number below {count}, which is how many GPUs there are"
            )
    return [names[int(word)] for word in chosen]


def open_machine(device: str | None, framework: str | None, suite: str = ""):
    """A machine on `device` (None: a GPU if there is one) with arrays of `framework`. None chooses PyTorch, which has
    peers to time, or without it CuPy on a GPU and NumPy on the CPU. `suite` names what asked, if no option did."""
    reasons = []
    for kind in (TorchCuda, Cupy, TorchCpu, Numpy):
        if device not in (None, kind.device) or framework not in (None, kind.framework):
            continue
        if kind.device == "cuda" and not library_has_cuda():
            reasons.append("the library sees no GPU")
            continue
        try:
            return kind()
        except ImportError:
            reasons.append(f"{kind.framework} is not installed")
        except BenchError as error:
            reasons.append(str(error))
    wanted = " ".join(filter(None, (device and f"--device {device}", framework and f"--framework {framework}")))
    if suite:
        where = " on ".join(filter(None, (f"arrays of {framework}" if framework else "", device)))
        wanted = f"suite {suite} needs {where}"
    reasons = list(dict.fromkeys(reasons)) or ["there is no such combination"]
    raise BenchError(f"{wanted}: {'; '.join(reasons)}")


def library_has_cuda() -> bool:
    return load().fa_cuda_device_count() > 0


# ---- what the hardware is, and its clock, power and load ----


def load_average() -> float | None:
    """The average number of processes that ran or waited for a core during the last minute."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def device_slug(machine) -> str:
    """The name of the folder for this device's results: h200 for `NVIDIA H200`, intel-xeon for `Intel(R) Xeon(R)
    Processor`."""
    name = machine.name if machine.device == "cuda" else cpu_model()
    words = [word for word in name.lower().replace("/", " ").split() if word not in ("nvidia", "geforce", "tesla")]
    return "-".join(words) or machine.device


def first_line(error) -> str:
    """The first line of a message, for a list of reasons."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


class Meter:
    """Samples the SM clock and the board's power in a thread while the block runs. Without NVML and nvidia-smi there
    are no samples."""

    def __init__(self, machine):
        self.samples = []  # (time, MHz, W)
        self.driver = None
        self._pause = 0.02
        self._read = self._open(machine.gpu_id) if machine.device == "cuda" else None
        self._stop = threading.Event()
        self._thread = None

    def __enter__(self):
        if self._read:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        if self._thread:
            self._thread.join()

    def between(self, start=0.0, end=float("inf")):
        """Medians of (MHz, W) between two times of time.perf_counter(), or None without samples."""
        inside = [sample for sample in list(self.samples) if start <= sample[0] <= end]
        return (median(s[1] for s in inside), median(s[2] for s in inside)) if inside else None

    def _run(self):
        while not self._stop.wait(self._pause):
            try:
                mhz, watts = self._read()
            except Exception:  # no error of the driver's library may end a benchmark
                return
            self.samples.append((time.perf_counter(), mhz, watts))

    def _open(self, gpu_id):
        for opener in (self._open_nvml, self._open_smi):
            try:
                read = opener(gpu_id)
                read()
                return read
            except Exception:  # not installed, no driver, or no readings from this card: try the next
                continue
        return None

    def _open_nvml(self, gpu_id):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu_id) if gpu_id else pynvml.nvmlDeviceGetHandleByIndex(0)
        driver = pynvml.nvmlSystemGetDriverVersion()
        self.driver = driver.decode() if isinstance(driver, bytes) else driver

        def watts():  # on some cards the plain reading is an average over a second; prefer the instant one
            instant = getattr(pynvml, "NVML_FI_DEV_POWER_INSTANT", None)
            if instant is not None:
                field = pynvml.nvmlDeviceGetFieldValues(handle, [instant])[0]
                if field.nvmlReturn == 0:
                    return field.value.uiVal / 1e3
            return pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3

        return lambda: (pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM), watts())

    def _open_smi(self, gpu_id):
        def ask(fields):
            command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", gpu_id or "0"]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

        self.driver = ask("driver_version")
        self._pause = 0.2  # each reading starts a process
        return lambda: tuple(float(x) for x in ask("clocks.sm,power.draw").split(","))
