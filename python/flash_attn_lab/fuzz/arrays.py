"""The arrays of a case on their device, all in one arena. A call may change its outputs, and no other byte of the
arena.

    | guard | q, with gaps between rows | guard | k_cache | guard | out | guard | ...

At first the arena holds a pattern that every float type reads as NaN, with random signs. So the gaps between strided
rows, outputs before the call and everything that a call must not read are NaN, and integers there are nonsense. The
arena is uploaded once and compared once: bytes that changed outside the outputs are a finding.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import reference_w4
from .judge import Wrong, round_to

GUARD = 2048  # bytes between arrays
ALIGNMENT = 256  # bytes; of an array whose layout has no offset

# The types in which the arena stores elements: NumPy has no bfloat16 and float8.
STORAGE = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
    "int32": np.int32,
    "int64": np.int64,
    "float64": np.float64,
}
_E4M3 = reference_w4.decode_e4m3(np.arange(256))


def itemsize(dtype: str) -> int:
    return np.dtype(STORAGE[dtype]).itemsize


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as the arena stores them. `dtype` must be able to hold them, except for float8, which rounds here."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "float8_e4m3fn":
        values = np.asarray(values, np.float32)
        return reference_w4.encode_e4m3(np.abs(values)) | (np.signbit(values) * np.uint8(128))
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(STORAGE[dtype])


def decode(stored: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers that encode() has stored; floats as float32."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32)
    if dtype == "float8_e4m3fn":
        return _E4M3[stored]
    return stored.astype(np.float32) if dtype == "float16" else stored


_POOL = 65521  # a prime, so that the rows of a large array, which repeats these numbers, differ


def normal(rng: np.random.Generator, shape, dtype: str = "float32", spread: float = 1.0) -> np.ndarray:
    """Normally distributed numbers that `dtype` can hold, as float32. A large array repeats _POOL of them."""
    size = int(np.prod(shape, dtype=np.int64))
    pool = np.float32(spread) * rng.standard_normal(min(size, _POOL), dtype=np.float32)
    pool = as_dtype(pool, dtype) if dtype == "float8_e4m3fn" else round_to(pool, dtype)
    return np.resize(pool, shape) if size else np.zeros(shape, np.float32)


def as_dtype(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values rounded to `dtype`."""
    return decode(encode(values, dtype), dtype)


@dataclass(frozen=True)
class Array:
    """One array of a call. Its layout says where the elements are; sizes are in elements:

    order: the axes from the outermost in memory to the innermost; the last axis stays the innermost
    step: the distance of neighbours along the last axis
    pad: the number of unused elements at the end of an axis, for the last axes
    flip: axes with a negative stride
    repeat: axes with stride 0
    offset: the distance of the array from a multiple of 256 bytes
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    output: bool = False  # the call may write its elements
    inside: str | None = None  # the array is the first columns of this other array, and has no memory of its own
    scratch: bool = False  # an output whose contents are not judged: a workspace

    def strides(self) -> tuple[tuple[int, ...], int, int]:
        """(strides, the index of the first element from the lowest, the number of elements from the lowest to the
        highest). A shrunk case may have lost an axis that its layout still names."""
        rank = len(self.shape)
        pad = [*[0] * rank, *self.layout.get("pad", ())][len(self.layout.get("pad", ())) :]  # of the last axes
        order = self.layout.get("order", ())
        repeat, flip = ([axis for axis in self.layout.get(key, ()) if axis < rank] for key in ("repeat", "flip"))
        strides, step, reach = [0] * rank, self.layout.get("step", 1), 1
        for axis in reversed(order if len(order) == rank else range(rank)):
            if axis in repeat:
                continue
            strides[axis] = step
            reach += (max(self.shape[axis], 1) - 1) * step
            step *= max(self.shape[axis], 1) + pad[axis]
        first = 0
        for axis in flip:
            first += (max(self.shape[axis], 1) - 1) * strides[axis]
            strides[axis] = -strides[axis]
        return tuple(strides), first, reach


def size_of(arrays: Mapping[str, Array]) -> int:
    """Bytes of all arrays, with their gaps."""
    return sum(array.strides()[2] * itemsize(array.dtype) for array in arrays.values())


@dataclass(frozen=True)
class _Place:
    offset: int  # in bytes, of the element with all indices 0
    strides: tuple[int, ...]  # in elements
    start: int
    end: int  # bytes of the arena that belong to it


class Layout:
    """The places of a call's arrays in one block of memory, with guards between them. The memory may be on any
    device."""

    def __init__(self, arrays: Mapping[str, Array]):
        self.arrays, self.places = dict(arrays), {}
        end = GUARD
        for name, array in self.arrays.items():
            if array.inside is not None:
                outer = self.places[array.inside]
                self.places[name] = _Place(outer.offset, outer.strides, outer.start, outer.end)
                continue
            size = itemsize(array.dtype)
            strides, first, reach = array.strides()
            start = -(-end // ALIGNMENT) * ALIGNMENT + array.layout.get("offset", 0) * size
            self.places[name] = _Place(start + first * size, strides, start, start + reach * size)
            end = start + reach * size + GUARD
        self.size = -(-end // ALIGNMENT) * ALIGNMENT

    def filled(self, values: Mapping[str, np.ndarray], seed: int = 0) -> np.ndarray:
        """The bytes of the block before the call."""
        memory = poison(self.size, seed)
        for name in self.arrays:
            if name in values:
                self.stored(memory, name)[...] = encode(values[name], self.arrays[name].dtype)
        return memory

    def view(self, backend, handle, name: str, **changed):
        """The array as it is given to the library. `changed` replaces dtype, shape or strides."""
        place, array = self.places[name], self.arrays[name]
        about = {"dtype": array.dtype, "shape": array.shape, "strides": place.strides, "offset": place.offset}
        return backend.view(handle, **(about | changed))

    def views_in(self, backend, handle) -> dict[str, Any]:
        return {name: self.view(backend, handle, name) for name in self.arrays}

    def stored(self, memory: np.ndarray, name: str) -> np.ndarray:
        """The array in a host copy of the block, in its stored type."""
        place, array = self.places[name], self.arrays[name]
        return host_view(memory, array.dtype, array.shape, place.strides, place.offset)

    def values(self, memory: np.ndarray, name: str) -> np.ndarray:
        return decode(self.stored(memory, name), self.arrays[name].dtype)

    def where(self, byte: int) -> str:
        name = min(self.places, key=lambda n: max(self.places[n].start - byte, byte - self.places[n].end + 1, 0))
        place = self.places[name]
        size = itemsize(self.arrays[name].dtype)
        if byte < place.start:
            return f"{place.start - byte} bytes before {name}"
        if byte >= place.end:
            return f"{byte - place.end} bytes behind {name}"
        return f"element {(byte - place.offset) // size} of {name} (strides {place.strides})"

    def check_same(self, expected: np.ndarray, after: np.ndarray, written: Mapping[str, Any], what: str) -> None:
        """Raises Wrong unless every byte outside of written[name], an index into the array, is as expected."""
        if written:
            expected = expected.copy()
        for name, index in written.items():
            self.stored(expected, name)[index] = self.stored(after, name)[index]
        if np.array_equal(expected.view(np.uint64), after.view(np.uint64)):
            return
        changed = np.flatnonzero(expected != after)
        first, last = int(changed[0]), int(changed[-1])
        raise Wrong(f"{len(changed)} bytes {what}: from {self.where(first)} to {self.where(last)}")


class Arena(Layout):
    """The arrays of one case in the memory of a backend; `views` has them by name."""

    def __init__(self, backend, arrays: Mapping[str, Array], values: Mapping[str, np.ndarray] | None, seed: int = 0):
        """values=None makes an arena for queries, which look at no element."""
        super().__init__(arrays)
        self.backend = backend
        if values is None:
            self.handle = backend.empty(self.size)
        else:
            self.before = self.filled(values, seed)
            self.handle = backend.upload(self.before)
        self.views = self.views_in(backend, self.handle)

    def download(self) -> np.ndarray:
        return self.backend.download(self.handle)

    def check_untouched(self, after: np.ndarray, written: Mapping[str, Any]) -> None:
        """Raises Wrong if a byte outside of written[name], an index into the array, has changed."""
        self.check_same(self.before, after, written, "changed that are not the call's to write")


def poison(size: int, seed: int) -> np.ndarray:
    """Bytes that are NaN as float32, float16, bfloat16 and float8, with random signs."""
    rng = np.random.default_rng(seed ^ 0x5EED)
    tile = np.where(rng.random(2048) < 0.5, 0x7FFF, 0xFFFF).astype("<u2").view(np.uint8)
    return np.resize(tile, size)


def host_view(memory: np.ndarray, dtype: str, shape, strides, offset: int) -> np.ndarray:
    kind = np.dtype(STORAGE[dtype])
    return np.ndarray(shape, kind, memory.data, offset, tuple(s * kind.itemsize for s in strides))


# ---- where arrays live ----


def _optional(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


class Numpy:
    """Arrays on the CPU."""

    device, framework, negative_strides, graphs = "cpu", "numpy", True, False
    multiprocessors = 132  # sizes are often drawn near this number of blocks

    def __init__(self):
        self.ml_dtypes = _optional("ml_dtypes")
        self.dtypes = set(STORAGE) - (set() if self.ml_dtypes else {"bfloat16", "float8_e4m3fn"})

    def native(self, dtype: str) -> np.dtype:
        return np.dtype(getattr(self.ml_dtypes, dtype) if dtype in ("bfloat16", "float8_e4m3fn") else dtype)

    def empty(self, size: int) -> np.ndarray:
        memory = np.empty(size + ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT
        return memory[start : start + size]

    def upload(self, host: np.ndarray) -> np.ndarray:
        memory = self.empty(len(host))
        memory[:] = host
        return memory

    def view(self, handle, dtype, shape, strides, offset):
        kind = self.native(dtype)
        return np.ndarray(shape, kind, handle.data, offset, tuple(s * kind.itemsize for s in strides))

    def download(self, handle) -> np.ndarray:
        return handle.copy()

    def numpy(self, array) -> np.ndarray:
        """A result that the library allocated, as numbers."""
        name = array.dtype.name
        stored = array.view(STORAGE[name]) if name in ("bfloat16", "float8_e4m3fn") else array
        return decode(stored, name)

    def same_kind(self, array) -> bool:
        return type(array) is np.ndarray

    def foreign(self, array):
        """The numbers of an array as an object that is not an array of this backend."""
        return array.tolist()

    def synchronize(self) -> None:
        pass

    def alive(self) -> bool:
        return True


class Torch:
    """Arrays of PyTorch, on the GPU or on the CPU."""

    framework, negative_strides = "torch", False
    dtypes = set(STORAGE)

    def __init__(self, torch, device: str = "cuda"):
        self.torch, self.device = torch, device
        cuda = self.graphs = device == "cuda"
        self.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 132

    def empty(self, size: int):
        return self.torch.empty(size, dtype=self.torch.uint8, device=self.device)

    def upload(self, host: np.ndarray):
        return self.torch.from_numpy(host).to(self.device, copy=True)

    def view(self, handle, dtype, shape, strides, offset):
        kind = getattr(self.torch, dtype)
        return handle.view(kind).as_strided(shape, strides, offset // kind.itemsize)

    def download(self, handle) -> np.ndarray:
        return handle.cpu().numpy() if self.device == "cuda" else handle.numpy().copy()

    def numpy(self, array) -> np.ndarray:
        name = str(array.dtype).removeprefix("torch.")
        raw = {"bfloat16": self.torch.int16, "float8_e4m3fn": self.torch.uint8}.get(name)
        stored = (array.view(raw) if raw else array).cpu().numpy()
        return decode(stored.view(STORAGE[name]), name)

    def same_kind(self, array) -> bool:
        return isinstance(array, self.torch.Tensor) and array.device.type == self.device

    def foreign(self, array):
        return array.cpu() if self.device == "cuda" else array.tolist()

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def replayed(self, call):
        """The results of a call captured in a CUDA graph and replayed once, and the graph."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            results = call()
        graph.replay()
        self.synchronize()
        return results, graph

    def alive(self) -> bool:
        """Whether the device still takes work: a sticky error makes every later call fail."""
        for _ in range(2):  # an error that is not sticky is reported once
            try:
                self.torch.ones(2, device=self.device).sum().item()
                return True
            except RuntimeError:
                pass
        return False


class Cupy(Numpy):
    """Arrays of CuPy, on the GPU."""

    device, framework = "cuda", "cupy"

    def __init__(self, cupy):
        super().__init__()
        self.cupy = cupy
        self.dtypes -= {"float8_e4m3fn"}
        self.multiprocessors = cupy.cuda.Device().attributes["MultiProcessorCount"]

    def empty(self, size: int):
        return self.cupy.empty(size, np.uint8)

    def upload(self, host: np.ndarray):
        return self.cupy.asarray(host)

    def view(self, handle, dtype, shape, strides, offset):
        kind = self.native(dtype)
        return self.cupy.ndarray(shape, kind, handle.data + offset, tuple(s * kind.itemsize for s in strides))

    def download(self, handle) -> np.ndarray:
        return handle.get()

    def numpy(self, array) -> np.ndarray:
        return super().numpy(array.get())

    def same_kind(self, array) -> bool:
        return isinstance(array, self.cupy.ndarray)

    def foreign(self, array):
        return array.get()

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()

    def alive(self) -> bool:
        try:
            return int(self.cupy.ones(2).sum()) == 2
        except Exception:
            return False


def without_ml_dtypes(device: str, framework: str | None) -> set[str]:
    """The dtypes that NumPy arrays lack where ml_dtypes is not installed."""
    return set(STORAGE) - Numpy().dtypes if device == "cpu" and framework != "torch" else set()


def backend_for(device: str, framework: str | None = None):
    """The backend of a device and framework. The defaults are NumPy on the CPU; on a GPU PyTorch, or else CuPy."""
    from flash_attn_minimal._core.library import load
    from flash_attn_minimal.errors import Unsupported

    if device == "cpu":
        return Torch(importlib.import_module("torch"), "cpu") if framework == "torch" else Numpy()
    if not load().fa_cuda_device_count():
        raise Unsupported(f"--device cuda: this library sees no CUDA device ({load().fa_build_info().decode()})")
    torch = _optional("torch") if framework in (None, "torch") else None
    if torch and torch.cuda.is_available():
        return Torch(torch)
    cupy = _optional("cupy")
    if cupy:
        return Cupy(cupy)
    raise Unsupported("--device cuda needs PyTorch with CUDA, or CuPy, to hold the arrays")


def random_intervals(rng: np.random.Generator, shape: tuple[int, ...], rows: int) -> np.ndarray:
    """startend_row_indices (..., seqlen_k, numbers) for this many rows of q: runs of keys with the same numbers, so
    that whole tiles of keys are hidden from whole tiles of rows, some keys with numbers of their own, and some numbers
    beyond the rows. Some masks have intervals that overlap, or that end before they begin."""
    *lead, keys, count = shape
    if 0 in shape:
        return np.zeros(shape, np.int32)
    numbers = rng.integers(-3, rows + 4, (*lead, keys, count))
    if rng.random() < 0.8:
        numbers = np.sort(numbers, axis=-1)
    if count == 2 and rng.random() < 0.5:  # of a full mask: from n[0] on, and before n[1]
        numbers = numbers[..., ::-1]
    run = int(rng.integers(1, max(keys, 2)))
    alone = rng.random((*lead, keys, 1)) < rng.choice([0.0, 0.05, 1.0])
    numbers = np.where(alone, numbers, numbers[..., np.arange(keys) // run * run, :])
    extreme = rng.random(numbers.shape) < rng.choice([0.0, 0.1])
    return np.where(extreme, rng.choice([-(2**31), 2**31 - 1], numbers.shape), numbers).astype(np.int32)
