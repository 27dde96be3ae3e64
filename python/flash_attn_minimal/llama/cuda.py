"""The GPU as the engine's device: CuPy's arrays on a stream of their own, this library's kernels, cuBLAS for products
of many rows, and a CUDA graph for each kind of step.

A captured step keeps every array that it makes: they come from a memory pool that belongs to the graph, and a replay
writes to the same places again.
"""

from __future__ import annotations

import ctypes as ct
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._core import library
from ..errors import BadArgument, CudaError
from ..transformer._safetensors import numpy_dtype
from ..transformer.quantized import PackedW4
from .host import Host, check_dtype, in_order
from .sampling import Rule

# ops.linear serves up to FUSED_ROWS rows, or 1 row of a matrix above FUSED_BYTES. Beyond that: rms_norm, cuBLAS,
# swiglu.
FUSED_ROWS, FUSED_BYTES = 8, 16 << 20
WORKSPACE_BYTES = 32 << 20  # recommended by cuBLAS's documentation for Hopper


def reason_against() -> str:
    """The reason why there is no such device here, or "" if there is one."""
    try:
        import cupy
    except ImportError as error:
        return f"needs CuPy (pip install cupy-cuda13x, or cupy-cuda12x): {error}"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"has no GPU: {error}"
    if not library.load().fa_cuda_device_count():
        return "needs a library that was built with CUDA"
    return ""


class Cublas:
    """Matrix products that also work inside a stream capture, where CuPy's do not."""

    TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
    COMPUTE_32F, DEFAULT_ALGORITHM = 68, -1

    def __init__(self, cupy, stream):
        cupy.cuda.device.get_cublas_handle()  # CuPy finds the library and loads it
        for version in (13, 12, 11):
            try:
                self._lib = ct.CDLL(f"libcublas.so.{version}")
                break
            except OSError:
                continue
        else:
            raise CudaError("cuBLAS is not to be found (libcublas.so.13, 12 or 11)")
        self._handle, self._one, self._zero = ct.c_void_p(), ct.c_float(1), ct.c_float(0)
        self._workspace = cupy.empty(WORKSPACE_BYTES, np.uint8)
        self._call("cublasCreate_v2", ct.byref(self._handle))
        self._call("cublasSetStream_v2", self._handle, ct.c_void_p(stream.ptr))
        pointer = ct.c_void_p(self._workspace.data.ptr)
        self._call("cublasSetWorkspace_v2", self._handle, pointer, ct.c_size_t(WORKSPACE_BYTES))

    def _call(self, name: str, *arguments) -> None:
        if status := getattr(self._lib, name)(*arguments):
            raise CudaError(f"{name} returned cuBLAS status {status}")

    def product(
        self, a: Any, b: Any, out: Any, transpose_b: bool, alpha: float = 1.0, accumulate: bool = False
    ) -> None:
        """out (batch, m, n) = alpha a (batch, m, k) times b (batch, k, n), or b (batch, n, k) transposed, with
        accumulate added to out. Sums are float32; last axes are contiguous."""
        # To cuBLAS row-major matrices are transposed column-major ones: out^T = b^T a^T.
        batch, m, n = out.shape
        arguments = [
            self._handle, int(transpose_b), 0, n, m, a.shape[2], ct.byref(ct.c_float(alpha)),
            *self._operand(b), *self._operand(a),
            ct.byref(self._one if accumulate else self._zero), *self._operand(out),
            batch, self.COMPUTE_32F, self.DEFAULT_ALGORITHM,
        ]  # fmt: skip
        self._call("cublasGemmStridedBatchedEx", *arguments)

    def _operand(self, x: Any) -> tuple:
        batch_stride, row_stride, item = x.strides[0] // x.itemsize, x.strides[1] // x.itemsize, x.strides[2]
        assert item == x.itemsize, "last axes are contiguous"
        kind = self.TYPES[x.dtype.name]
        return ct.c_void_p(x.data.ptr), kind, max(row_stride, x.shape[2]), ct.c_longlong(batch_stride)


class Cuda(Host):
    """dtype: the type of the matrices. cache_dtype: the type of q, k, v and the cache, by default dtype."""

    name = "cuda"
    ahead = 8  # steps queued beyond the one that is waited for, so that the host's work meanwhile costs no time

    def __init__(self, dtype: str = "float32", cache_dtype: str | None = None):
        cache_dtype = cache_dtype or dtype
        check_dtype(dtype)
        check_dtype(cache_dtype)
        import cupy

        self.xp = cupy
        self.matrix_dtype, self.dtype = numpy_dtype(dtype), numpy_dtype(cache_dtype)
        self.between = self.matrix_dtype  # for results that only feed the next product
        for native in (self.matrix_dtype, self.dtype):
            try:
                cupy.empty(1, native)
            except (TypeError, ValueError, NotImplementedError) as error:  # bfloat16 needs CuPy 14
                what = f"dtype={native.name!r} is not served by this CuPy {cupy.__version__}"
                raise BadArgument(f"{what}: {error}") from None
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._cublas = Cublas(cupy, self.stream)
        self._kernels = _Kernels(cupy)

    # ---- weights ----

    def stack(self, parts: Sequence[Any], dtype: np.dtype) -> Any:
        cupy = self.xp
        bits = np.dtype(np.uint16) if dtype.itemsize == 2 else dtype  # CuPy can copy bfloat16, but not compute with it
        on_device = [
            self.cast(part, dtype)
            if isinstance(part, cupy.ndarray)
            else cupy.asarray(np.asarray(part).astype(dtype, copy=False).view(bits))
            for part in parts
        ]
        joined = on_device[0] if len(parts) == 1 else cupy.concatenate([part.view(bits) for part in on_device])
        return joined.view(dtype)

    def cast(self, x: Any, dtype: np.dtype) -> Any:
        """x as another of the three dtypes; x itself if it has that dtype already."""
        if x.dtype == dtype:
            return x
        if x.dtype.name == "bfloat16":
            x = (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        if dtype.name == "bfloat16":
            return self._kernels.round_bfloat16(x.astype(np.float32, copy=False).view(np.uint32)).view(dtype)
        return x.astype(dtype, copy=False)

    # ---- the operations of a forward pass ----

    def embed(self, embedding: Any, tokens: Any) -> Any:
        x = self.xp.empty((tokens.size, embedding.shape[1]), np.float32)
        return self._kernels.embed(embedding, tokens, x)

    def linear(self, x, weight, norm=None, eps=0.0, bias=None, residual=None, swiglu=False, out_dtype=None):
        """As host.Host.linear; the result is of out_dtype (None: float32). `residual` may be overwritten with the
        result."""
        from ..transformer import ops

        out_dtype = out_dtype or np.dtype(np.float32)
        packed = isinstance(weight, PackedW4)
        if packed or len(x) <= (FUSED_ROWS if weight.nbytes <= FUSED_BYTES else min(FUSED_ROWS, 1)):
            return ops.linear(
                x, weight, norm_weight=norm, eps=eps, bias=bias, residual=residual, swiglu=swiglu,
                out_dtype=out_dtype.name, programmatic=True,
            )  # fmt: skip
        if norm is not None:
            x = ops.rms_norm(x, norm, eps=eps, out_dtype=self.matrix_dtype.name, programmatic=True)
        y = residual
        if y is None:  # cuBLAS writes float32 or the matrices' dtype
            direct = not swiglu and out_dtype == self.matrix_dtype
            y = self.xp.empty((len(x), len(weight)), out_dtype if direct else np.float32)
            if bias is not None:
                _bits(y)[...] = _bits(self.cast(bias, y.dtype))
        accumulate = residual is not None or bias is not None
        x = self.cast(x, self.matrix_dtype)
        self._cublas.product(x[None], weight[None], y[None], True, accumulate=accumulate)
        return ops.swiglu(y, out_dtype=out_dtype.name, programmatic=True) if swiglu else self.cast(y, out_dtype)

    def linears(self, products: Sequence[Mapping[str, Any]], ahead: Sequence[Any] = ()) -> list[Any]:
        """As host.Host.linears. If all weights are 4-bit, it is one ops.linear_chain, for a few rows a single
        launch."""
        from ..transformer import ops

        if not all(isinstance(product["weight"], PackedW4) for product in products):
            return in_order(self.linear, products)
        ahead = [weight for weight in ahead if isinstance(weight, PackedW4)]
        return ops.linear_chain([_of_chain(product) for product in products], ahead)

    def sample(self, logits, tokens, rule: Rule, seeds, steps) -> None:
        from ..transformer import ops

        temperature, top_k, top_p = rule
        ops.sample(logits, temperature, top_k, top_p, seeds=seeds, step=steps, out=tokens[:, 0], programmatic=True)

    # ---- for the engine ----

    def scope(self):
        return self.stream

    def upload(self, target: Any, values: np.ndarray) -> None:
        target.set(values, stream=self.stream)

    def shared(self, shape: tuple[int, ...]) -> tuple[Any, np.ndarray]:
        """Page-locked host memory to which kernels write directly: the device's view and the host's."""
        cuda, count = self.xp.cuda, int(np.prod(shape))
        memory = cuda.alloc_pinned_memory(4 * count)
        host = np.frombuffer(memory, np.int32, count).reshape(shape)
        host[...] = 0
        mapped = cuda.UnownedMemory(memory.ptr, 4 * count, memory, self.stream.device_id)
        return self.xp.ndarray(shape, np.int32, cuda.MemoryPointer(mapped, 0)), host

    def advance(self, tokens, ring, count, lengths, active) -> None:
        self._kernels.advance(tokens, active, ring, count, lengths)

    def once(self, body: Callable[[], None]) -> Callable[[], None]:
        """A function that repeats the work of body() as one CUDA graph."""
        return _Graph(self.xp, self.stream, body)

    def event(self) -> Callable[[], None]:
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event.synchronize

    def synchronize(self) -> None:
        self.xp.cuda.runtime.deviceSynchronize()


def _bits(x: Any) -> Any:
    """16-bit arrays as integers, which CuPy can copy whatever the dtype."""
    return x.view(np.uint16) if x.dtype.itemsize == 2 else x


def _of_chain(product: Mapping[str, Any]) -> dict[str, Any]:
    """A product of `linears` as one of ops.linear_chain."""
    product = dict(product)
    dtype = product.pop("out_dtype", None)
    norm = product.pop("norm", None)
    return {**product, "norm_weight": norm, "out_dtype": dtype.name if dtype else "float32", "programmatic": True}


class _Graph:
    """A function that is captured at its first call and replayed from then on."""

    def __init__(self, cupy, stream, body: Callable[[], None]):
        self._cupy, self._stream, self._body = cupy, stream, body
        self._pool, self._graph = cupy.cuda.MemoryPool(), None

    def __call__(self) -> None:
        if self._graph is None:
            with self._cupy.cuda.using_allocator(self._pool.malloc):
                self._stream.begin_capture()
                try:
                    self._body()
                finally:
                    graph = self._stream.end_capture()
            self._graph = graph
        self._graph.launch(self._stream)


class _Kernels:
    """Three element-wise kernels that CuPy compiles when they are first used."""

    def __init__(self, cupy):
        self._kernel = functools.partial(functools.cache(cupy.ElementwiseKernel))

    def embed(self, embedding: Any, tokens: Any, x: Any) -> Any:
        """x (rows, dim) float32 = embedding[tokens]; -1, which is not a token, gets row 0."""
        stored, value = _bits(embedding), "(float)stored"
        if embedding.dtype.name == "bfloat16":
            value = "__uint_as_float((unsigned int)stored << 16)"
        elif embedding.dtype.name == "float16":
            stored = embedding
        code = f"""
            const long long row = max(tokens[i / dim], 0);
            const T stored = embedding[row * dim + i % dim];
            x = {value};"""
        kernel = self._kernel("raw T embedding, raw int32 tokens, int64 dim", "float32 x", code, "embed")
        return kernel(stored, tokens, embedding.shape[1], x)

    def advance(self, tokens: Any, active: Any, ring: Any, count: Any, lengths: Any) -> None:
        code = """
            ring[count[i] * slots + i] = tokens[i];
            count[i] = (count[i] + 1) % rows;
            lengths[i] += active;"""
        inputs, outputs = "int32 active, raw int32 tokens, int32 rows, int32 slots", "raw int32 ring, raw int32 count"
        kernel = self._kernel(inputs, f"{outputs}, raw int32 lengths", code, "advance")
        kernel(active, tokens, len(ring), len(count), ring, count, lengths)

    def round_bfloat16(self, bits: Any) -> Any:
        """float32 bits to bfloat16 bits, to nearest even. A NaN may become an infinity; probabilities have no NaN."""
        code = "y = (unsigned short)((x + 0x7fff + ((x >> 16) & 1)) >> 16)"
        return self._kernel("uint32 x", "uint16 y", code, "round_bfloat16")(bits)
