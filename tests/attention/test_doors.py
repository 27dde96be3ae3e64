"""Arrays of every framework: results have the framework's type, device and stream, and are right. Mixtures are
refused."""

import subprocess
import sys
import types

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import NO_CUDA, cupy, jax, ml_dtypes, torch

import flash_attn_minimal as fa
from flash_attn_minimal._arrays import cuda_array, dlpack
from flash_attn_minimal._core import launch, structs

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
needs_jax = pytest.mark.skipif(jax is None, reason="JAX is not installed")
needs_ml_dtypes = pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
needs_cuda = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
needs_cupy = pytest.mark.skipif(cupy is None or bool(NO_CUDA), reason=NO_CUDA or "CuPy is not installed")

CASE = Case(
    33, 70, 40, 24, batch=2, nheads=4, nheads_k=2, causal=True, alibi=2, bias=(True, False), mask=(True,), sinks=True
)


def round_trip(make, back, case=CASE):
    """Attention and merge with arrays of one framework, against float64; returns (arrays, out, lse) of the
    framework."""
    (q, k, v, options), exact, plain = accuracy.expected(case)
    arrays = [make(x, case.dtype) for x in (q, k, v)]
    options = {name: make(x, x.dtype.name) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out, lse = fa.flash_attn_func(*arrays, return_lse=True, **options)
    accuracy.check("out", back(out), exact[0], plain[0], case.dtype)
    accuracy.check("lse", back(lse), exact[1], plain[1], "float32")
    merged, merged_lse = fa.merge(out, lse, out, lse)
    assert type(merged) is type(out) and type(merged_lse) is type(lse)
    accuracy.check("merged", back(merged), exact[0], plain[0], case.dtype)
    return arrays, out, lse


def dtypes(*names):
    return pytest.mark.parametrize("dtype", names)


# ---- NumPy ----


@dtypes("float32", "float16")
def test_numpy(dtype):
    case = Case(33, 70, 40, causal=True, dtype=dtype)
    arrays, out, lse = round_trip(lambda x, t: x.astype(t), np.asarray, case)
    assert type(out) is np.ndarray and out.dtype == dtype and lse.dtype == np.float32


@needs_ml_dtypes
def test_numpy_bfloat16():
    case = Case(33, 70, 40, causal=True, dtype="bfloat16")
    _, out, _ = round_trip(
        lambda x, t: x.astype(ml_dtypes.bfloat16 if t == "bfloat16" else t), lambda x: np.asarray(x, np.float32), case
    )
    assert out.dtype == ml_dtypes.bfloat16


def test_numpy_read_only_inputs_and_subclasses(tmp_path):
    (q, k, v, _), exact, plain = accuracy.expected(Case(9, 9, 16))
    q.flags.writeable = False
    mapped = np.memmap(tmp_path / "k", np.float32, "w+", shape=k.shape)
    mapped[...] = k
    out = fa.flash_attn_func(q, mapped, v)
    q.flags.writeable = True
    accuracy.check("out", out, exact[0], plain[0], "float32")
    assert type(out) is np.ndarray


def test_uint8_mask_is_non_zero():
    (q, k, v, _), *_ = accuracy.expected(Case(9, 20, 16))
    mask = np.random.default_rng(0).integers(0, 3, (9, 20), np.uint8) * 100
    np.testing.assert_array_equal(fa.flash_attn_func(q, k, v, mask=mask), fa.flash_attn_func(q, k, v, mask=mask != 0))


# ---- PyTorch ----


def torch_make(device):
    return lambda x, t: torch.tensor(x, device=device).to(getattr(torch, t))


def torch_back(x):
    return (x if x.dtype == torch.float32 else x.float()).cpu().numpy()


@needs_torch
@dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_torch(where, dtype):
    case = Case(33, 70, 40, causal=True, dtype=dtype, mask=(True,))
    arrays, out, lse = round_trip(torch_make(where), torch_back, case)
    assert isinstance(out, torch.Tensor) and out.dtype == arrays[0].dtype and out.device == arrays[0].device
    assert lse.dtype == torch.float32
    round_trip(torch_make(where), torch_back)


@needs_torch
def test_torch_against_its_own_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 64) for n in (50, 70, 70))
    mask = torch.rand(2, 1, 50, 70) < 0.8
    theirs = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask)
    torch.testing.assert_close(fa.flash_attn_func(q, k, v, mask=mask), theirs.transpose(1, 2), atol=2e-6, rtol=1e-5)


@needs_torch
def test_torch_views():
    """transpose, expand, slices of one packed buffer: no copies, so strides matter."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 3, 4, 20, 16)  # (batch, 3, heads, seqlen, dim)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(1))
    expected = fa.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(fa.flash_attn_func(q, k, v), expected)
    one = torch.randn(1, 20, 1, 16)
    wide = one.expand(2, 20, 4, 16)
    torch.testing.assert_close(
        fa.flash_attn_func(q, wide, wide), fa.flash_attn_func(q, wide.contiguous(), wide.contiguous())
    )


@needs_torch
def test_torch_gradients_are_refused_where_there_are_none():
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    plain = q.detach()
    with pytest.raises(fa.Unsupported, match=r"q requires a gradient, which .*torch.no_grad\(\).*q.detach\(\)"):
        fa.query(q, plain, plain)
    with pytest.raises(NotImplementedError, match="out_a requires a gradient"):
        fa.merge(q, torch.zeros(1, 2, 5), plain, torch.zeros(1, 2, 5))
    with torch.no_grad():
        out = fa.flash_attn_func(q, q, q)
    assert not out.requires_grad and torch.equal(out, fa.flash_attn_func(plain, plain, plain))
    parameter = torch.nn.Parameter(plain)
    with torch.inference_mode():
        assert type(fa.flash_attn_func(parameter, plain, plain)) is torch.Tensor


@needs_torch
@pytest.mark.parametrize("make,message", [
    (lambda: torch.zeros(1, 5, 2, 8).to_sparse(), "q has layout torch.sparse_coo"),
    (lambda: torch.zeros(1, 5, 2, 8, dtype=torch.complex64).conj().imag, "q is a lazily negated view"),
    (lambda: torch.zeros(1, 5, 2, 8, dtype=torch.float64), "q is float64"),
    (lambda: torch.zeros(1, 5, 2, 8, dtype=torch.complex64), "q is complex64"),
])  # fmt: skip
def test_torch_tensors_that_are_refused(make, message):
    q, other = make(), torch.zeros(1, 5, 2, 8)
    k = q if q.dtype != other.dtype else other
    with pytest.raises(fa.FlashAttnError, match=message):
        fa.flash_attn_func(q, k, k)


# ---- JAX ----


@needs_jax
@dtypes("float32", "float16", "bfloat16")
def test_jax(dtype):
    case = Case(33, 70, 40, causal=True, dtype=dtype, mask=(True,))
    arrays, out, lse = round_trip(
        lambda x, t: jax.numpy.asarray(x).astype(t), lambda x: np.asarray(jax.numpy.asarray(x, "float32")), case
    )
    assert isinstance(out, jax.Array) and out.dtype == arrays[0].dtype and out.devices() == arrays[0].devices()
    round_trip(lambda x, t: jax.numpy.asarray(x).astype(t), np.asarray)


@needs_jax
def test_jax_limits():
    q = jax.numpy.zeros((1, 5, 2, 8))
    with pytest.raises(fa.Unsupported, match="k_cache is a JAX tracer"):
        jax.jit(lambda x: fa.quantize_kvcache(x, x))(q)
    with pytest.raises(fa.BadArgument, match="out is a read-only JAX array"):
        fa.flash_attn_func(q, q, q, out=q + 1)


# ---- CuPy, Numba ----


@needs_cupy
@dtypes("float32", "float16")
def test_cupy(dtype):
    case = Case(33, 70, 40, causal=True, dtype=dtype, mask=(True,))
    _, out, lse = round_trip(lambda x, t: cupy.asarray(x).astype(t), lambda x: x.get(), case)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    round_trip(lambda x, t: cupy.asarray(x).astype(t), lambda x: x.get())


@needs_cupy
def test_cupy_broadcast():
    q, one = (
        cupy.random.standard_normal((2, 20, 4, 16), dtype=np.float32),
        cupy.random.standard_normal((1, 20, 1, 16), dtype=np.float32),
    )
    wide = cupy.broadcast_to(one, q.shape)
    np.testing.assert_array_equal(
        fa.flash_attn_func(q, wide, wide).get(), fa.flash_attn_func(q, wide.copy(), wide.copy()).get()
    )


@needs_cuda
@dtypes("float32", "float16")
def test_numba(dtype):
    numba_cuda = pytest.importorskip("numba.cuda")
    if not numba_cuda.is_available():
        pytest.skip("Numba finds no GPU")
    case = Case(33, 70, 40, causal=True, dtype=dtype, mask=(True,))
    arrays, out, _ = round_trip(lambda x, t: numba_cuda.to_device(x.astype(t)), lambda x: x.copy_to_host(), case)
    assert type(out) is type(arrays[0])


# ---- types that the library does not know ----


class Opaque:
    """An array type that has only DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class OldOpaque(Opaque):
    """A producer from before DLPack 1.0."""

    def __dlpack__(self, stream=None):
        return self._array.__dlpack__()


class Namespaced(Opaque):
    """An array type that follows the array API, and so says how to make another array."""

    dtype = property(lambda self: self._array.dtype)
    device = property(lambda self: self._array.device)

    def __array_namespace__(self):
        return Namespaced

    float32 = "float32"

    @staticmethod
    def empty(shape, dtype, device):
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return Namespaced(torch.empty(shape, dtype=dtype, device=device))


@pytest.mark.parametrize("kind", [Opaque, OldOpaque])
def test_dlpack_from_numpy(kind):
    _, out, lse = round_trip(lambda x, t: kind(x.astype(t)), lambda x: x, Case(33, 70, 40, causal=True, batch=2))
    assert type(out) is np.ndarray and type(lse) is np.ndarray  # the type does not say how to make another
    (q, k, v, _), exact, plain = accuracy.expected(Case(9, 9, 16))
    target = np.full(q.shape, np.nan, np.float32)
    out = Opaque(target)
    assert fa.flash_attn_func(*map(Opaque, (q, k, v)), out=out) is out
    accuracy.check("out", target, exact[0], plain[0], "float32")


@needs_torch
@dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize("kind", [Opaque, Namespaced])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_dlpack_from_torch(where, kind, dtype):
    case = Case(33, 70, 40, causal=True, batch=2, dtype=dtype)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    arrays = [kind(torch_make(where)(x, dtype)) for x in (q, k, v)]
    if kind is Namespaced:
        out = fa.flash_attn_func(*arrays, **options)
        assert type(out) is Namespaced
    else:
        out = kind(torch_make(where)(np.full(q.shape, np.nan, np.float32), dtype))
        fa.flash_attn_func(*arrays, out=out, **options)
    accuracy.check("out", torch_back(out._array), exact[0], plain[0], dtype)


def test_dlpack_capsules_are_returned():
    """The capsule is only borrowed: every reference to the array is given back."""
    array = np.zeros((1, 5, 2, 8), np.float32)
    before = sys.getrefcount(array)
    wrapped = Opaque(array)
    for _ in range(10):
        fa.flash_attn_func(wrapped, wrapped, wrapped)
    del wrapped
    assert sys.getrefcount(array) == before


def test_dlpack_read_only_output():
    array = np.zeros((1, 5, 2, 8), np.float32)
    locked = array.copy()
    locked.flags.writeable = False
    try:
        locked.__dlpack__(max_version=(1, 0))
    except (BufferError, TypeError):
        pytest.skip("this NumPy does not export read-only arrays")
    arrays = Opaque(array), Opaque(array.copy()), Opaque(array.copy())
    with pytest.raises(fa.BadArgument, match="out is a read-only .*Opaque array"):
        fa.flash_attn_func(*arrays, out=Opaque(locked))


def test_dlpack_device_that_is_not_served():
    class Elsewhere(Opaque):
        def __dlpack_device__(self):
            return (8, 0)  # Metal

    with pytest.raises(fa.Unsupported, match="q is on DLPack device type 8"):
        fa.flash_attn_func(*[Elsewhere(np.zeros((1, 5, 2, 8), np.float32))] * 3)


class CudaArray:
    """An array type that has only __cuda_array_interface__."""

    def __init__(self, array, **changes):
        self._array = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, **changes}


@pytest.mark.skipif(not NO_CUDA, reason="this machine has a GPU")
def test_an_array_of_a_gpu_where_there_is_none():
    about = {"data": (4096, False), "shape": (1, 3, 2, 8), "typestr": "<f4", "version": 3}
    x = CudaArray(types.SimpleNamespace(__cuda_array_interface__=about, dtype=np.dtype("float32")))
    with pytest.raises(fa.CudaError):
        fa.flash_attn_func(x, x, x)


@needs_cuda
@needs_torch
def test_cuda_array_interface():
    (q, k, v, _), exact, plain = accuracy.expected(Case(33, 70, 40))
    arrays = [CudaArray(torch.tensor(x, device="cuda")) for x in (q, k, v)]
    target = torch.full(q.shape, float("nan"), device="cuda")
    torch.cuda.synchronize()
    fa.flash_attn_func(*arrays, out=CudaArray(target))
    torch.cuda.synchronize()
    accuracy.check("out", target.cpu().numpy(), exact[0], plain[0], "float32")
    with pytest.raises(fa.BadArgument, match="out is a read-only"):
        fa.flash_attn_func(*arrays, out=CudaArray(target, data=(target.data_ptr(), True)))
    with pytest.raises(fa.Unsupported, match="do not say how to make another"):
        fa.flash_attn_func(*arrays)


class OnStream:
    """Like CudaArray, but with memory of the host."""

    def __init__(self, array, stream):
        self._array, (pointer, _) = array, array.__array_interface__["data"]
        about = {"shape": array.shape, "typestr": array.dtype.str, "strides": None, "version": 3}
        self.__cuda_array_interface__ = about | {"data": (pointer, False), "stream": stream}


@pytest.fixture
def launched(monkeypatch):
    """The operations on streams in order, with the launches, which do nothing here."""
    seen = []

    class Library:
        def fa_attention_forward(self, args, stream):
            seen.append("launch")

    monkeypatch.setattr(cuda_array, "device_of", lambda pointer: 0)
    for module in (cuda_array, dlpack):
        monkeypatch.setattr(module, "synchronize", lambda index, stream: seen.append(stream))
    monkeypatch.setattr(launch, "load", Library)
    return seen


@pytest.mark.parametrize("out_stream, bias_stream", [(7, 7), (None, 7), (8, 7), (7, 8), (8, 9)])
def test_streams_of_cuda_arrays(out_stream, bias_stream, launched):
    """The call waits for work that is queued on another array's stream, and later work on that stream waits for the
    call. One of these arrays is `out`."""
    q, k, v, out = (OnStream(np.zeros((1, 5, 2, 8), np.float32), stream) for stream in (7, 7, 7, out_stream))
    bias = OnStream(np.zeros((5, 5), np.float32), bias_stream)
    assert fa.flash_attn_func(q, k, v, bias=bias, out=out) is out
    at, others = launched.index("launch"), {out_stream, bias_stream} - {7, None}
    assert set(launched[:at]) == others
    assert launched[at + 1 :] == [7] * bool(others)


def test_streams_of_dlpack(launched, monkeypatch):
    """A producer's stream cannot be made to wait for the call, so the host waits for the call."""

    class Producer(Opaque):
        def __dlpack__(self, stream, max_version):
            return self._array.__dlpack__()

    q, k, v, out = (Producer(np.zeros((1, 5, 2, 8), np.float32)) for _ in range(4))
    fa.flash_attn_func(q, k, v, out=out)
    assert launched == ["launch"]
    monkeypatch.setitem(dlpack.DLPackDoor._devices, 1, structs.CUDA)
    fa.flash_attn_func(q, k, v, out=out)
    assert launched[1:] == ["launch", None]


# ---- mixtures ----


@needs_torch
def test_numpy_with_torch():
    q = np.zeros((1, 5, 2, 8), np.float32)
    t = torch.zeros(1, 5, 2, 8)
    with pytest.raises(fa.BadArgument, match="k is a PyTorch array, but q is a NumPy array: use one of them for all"):
        fa.flash_attn_func(q, t, q)
    with pytest.raises(fa.BadArgument, match="out is a NumPy array, but q is a PyTorch array"):
        fa.flash_attn_func(t, t, t, out=q)
    with pytest.raises(fa.BadArgument, match="mask is a NumPy array, but q is a PyTorch array"):
        fa.flash_attn_func(t, t, t, mask=np.ones((5, 5), bool))
    with pytest.raises(fa.BadArgument, match="lse_b is a NumPy array, but out_a is a PyTorch array"):
        fa.merge(t, torch.zeros(1, 2, 5), t, np.zeros((1, 2, 5), np.float32))


@needs_torch
@needs_cuda
def test_two_devices():
    here, there = torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2, 8, device="cuda")
    with pytest.raises(fa.BadArgument, match="v is on cpu, but q is on cuda:0"):
        fa.flash_attn_func(there, there, here)
    if torch.cuda.device_count() > 1:
        with pytest.raises(fa.BadArgument, match="k is on cuda:1, but q is on cuda:0"):
            fa.flash_attn_func(there, there.to("cuda:1"), there)


@needs_torch
@pytest.mark.skipif(not torch or torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_second_gpu_while_the_first_is_current():
    (q, k, v, _), exact, plain = accuracy.expected(Case(33, 70, 40))
    out = fa.flash_attn_func(*[torch.tensor(x, device="cuda:1") for x in (q, k, v)])
    assert out.device.index == 1 and torch.cuda.current_device() == 0
    accuracy.check("out", out.cpu().numpy(), exact[0], plain[0], "float32")


def test_nothing_is_imported():
    """Neither importing the package nor calling it with NumPy arrays imports a framework."""
    code = (
        "import sys, numpy as np, flash_attn_minimal as fa\n"
        "q = np.zeros((1, 3, 2, 8), np.float32)\n"
        "fa.flash_attn_func(q, q, q)\n"
        "print([m for m in ('torch', 'cupy', 'jax', 'numba', 'ml_dtypes', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", ["jax", "torch", "cupy", "numba"])
def test_a_framework_that_another_thread_is_importing(name):
    """Its module lacks what the import has not reached. The same holds for a module of the user's with this name."""
    code = f"""
import sys, types, numpy as np, flash_attn_minimal as fa
from flash_attn_minimal import distributed

class Owned:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

q = np.zeros((1, 3, 2, 8), np.float32)
for names in [], ["export", "core"]:
    module = sys.modules[{name!r}] = types.ModuleType({name!r})
    for attribute in names:
        setattr(module, attribute, types.ModuleType(attribute))
    out, lse = fa.flash_attn_func(q, q, q, return_lse=True)
    fa.merge(out, lse, out, lse)
    fa.flash_attn_with_kvcache(q, q, q)
    fa.flash_attn_func(*[Owned(q)] * 3, out=Owned(out))
    distributed.unshard([q, q], 'contiguous')
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
