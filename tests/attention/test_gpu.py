"""Tests that need a GPU: streams, graphs, tensors beyond 2^31 elements."""

import gc

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, cupy, torch

import flash_attn_minimal as fa

pytestmark = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
with_torch = pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA")
with_cupy = pytest.mark.skipif(cupy is None, reason="CuPy is not installed")

CASE = Case(129, 203, 64, nheads=4, nheads_k=2, causal=True, dtype="float16")


def served(kernel, *arrays, **options):
    plan = fa.query(*arrays, kernel=kernel.name, **options)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error


@pytest.fixture
def cuda_kernel(kernel):
    if kernel.device.name != "cuda":
        pytest.skip("for the GPU's kernels")
    return kernel


@with_torch
def test_torch_stream(cuda_kernel):
    """Inputs are written late on a side stream: a launch on any other stream would read zeros."""
    (q, k, v, options), exact, plain = accuracy.expected(CASE)
    host = [torch.tensor(x).half().pin_memory() for x in (q, k, v)]
    served(cuda_kernel, *[x.cuda() for x in host], **options)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        arrays = [torch.zeros_like(x, device="cuda") for x in host]
        torch.cuda._sleep(50_000_000)
        for array, x in zip(arrays, host, strict=True):
            array.copy_(x, non_blocking=True)
        out = fa.flash_attn_func(*arrays, kernel=cuda_kernel.name, **options)
        result = out.float().cpu().numpy()
    accuracy.check("out", result, exact[0], plain[0], "float16")


@with_cupy
def test_cupy_stream(cuda_kernel):
    (q, k, v, options), exact, plain = accuracy.expected(CASE)
    big = cupy.zeros((4096, 4096), np.float32)
    served(cuda_kernel, *[cupy.asarray(x).astype(np.float16) for x in (q, k, v)], **options)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            big @ big
        arrays = [cupy.asarray(x).astype(np.float16) for x in (q, k, v)]
        out = fa.flash_attn_func(*arrays, kernel=cuda_kernel.name, **options)
        result = out.astype(np.float32).get(stream=stream)
        stream.synchronize()
    accuracy.check("out", result, exact[0], plain[0], "float16")


@with_torch
@pytest.mark.parametrize("varlen", [False, True])
def test_graph_capture_and_replay(cuda_kernel, varlen):
    """A captured call follows its inputs, and calls of other sizes in between do not move its workspace."""
    (q, k, v, options), *_ = accuracy.expected(CASE)
    arrays = [torch.tensor(x, device="cuda").half() for x in (q, k, v)]
    starts = [torch.tensor([0, 50, n], device="cuda", dtype=torch.int32) for n in (129, 203)]

    def packed(x):
        return (*[t[0] for t in x], *starts, 129, 203) if varlen else x

    def call(x, name):
        function = fa.flash_attn_varlen_func if varlen else fa.flash_attn_func
        return function(*packed(x), return_lse=True, kernel=name, **options)

    served(cuda_kernel, *packed(arrays), **options)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(arrays, cuda_kernel.name)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(arrays, cuda_kernel.name)
    for turn in range(3):
        for array in arrays:
            array.copy_(torch.randn(array.shape, device="cuda").half() * (turn + 1))
        larger = torch.randn(2, 500 * (turn + 1), 8, 64, device="cuda").half()
        fa.flash_attn_func(larger, larger, larger, kernel=cuda_kernel.name)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        want, want_lse = call(arrays, cuda_kernel.name)
        torch.cuda.synchronize()
        assert torch.equal(out, want) and torch.equal(lse, want_lse)


@with_cupy
def test_cupy_graph(cuda_kernel):
    arrays = [cupy.zeros((1, 129, 4, 64), np.float16) for _ in range(3)]
    served(cuda_kernel, *arrays)
    out = cupy.full((1, 129, 4, 64), np.nan, np.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        fa.flash_attn_func(*arrays, out=out, kernel=cuda_kernel.name)  # the pool gets its blocks before the capture
        stream.begin_capture()
        fa.flash_attn_func(*arrays, out=out, kernel=cuda_kernel.name)
        graph = stream.end_capture()
        for array in arrays:
            array[...] = cupy.random.standard_normal(array.shape, dtype=np.float32).astype(np.float16)
        out.fill(np.nan)
        graph.launch(stream)
        want = fa.flash_attn_func(*arrays, kernel=cuda_kernel.name)
        stream.synchronize()
        np.testing.assert_array_equal(out.get(), want.get())


@with_torch
def test_no_memory_but_the_output(cuda_kernel):
    """O(seqlen) memory: the peak of a long call is its output, its lse and the workspace that the query returned."""
    x = torch.randn(1, 8192, 4, 64, device="cuda").half()
    served(cuda_kernel, x, x, x)
    plan = fa.query(x, x, x, kernel=cuda_kernel.name)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = fa.flash_attn_func(x, x, x, return_lse=True, kernel=cuda_kernel.name)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= out.nbytes + lse.nbytes + plan.workspace_bytes + (4 << 20)
    assert cuda_kernel.name == "naive" or plan.workspace_bytes <= 64 * out.nbytes


@with_torch
@pytest.mark.parametrize("which", ["rows", "batch", "out"])
def test_beyond_2_to_31_elements(cuda_kernel, which):
    """Offsets of more than 2^31 elements in q and k, v or out; only a few rows are compared."""
    if cuda_kernel.name == "naive":
        pytest.skip("S would not fit")
    gc.collect()
    torch.cuda.empty_cache()
    needs = 24 << 30
    if torch.cuda.mem_get_info()[0] < needs:
        pytest.skip(f"needs {needs >> 30} GiB of free GPU memory")
    torch.manual_seed(0)
    far = (1 << 31) + 4096
    if which == "rows":  # k and v with rows 2^31 / 64 elements apart
        seqlen, stride = 65, far // 64
        buffer = torch.empty(seqlen * stride, dtype=torch.half, device="cuda")
        k = buffer.as_strided((1, seqlen, 1, 64), (0, stride, 64, 1))
        v = buffer.as_strided((1, seqlen, 1, 64), (0, stride, 64, 1), 128)
        q = torch.randn(1, 5, 1, 64, device="cuda").half()
        k.copy_(torch.randn(k.shape, device="cuda").half())
        v.copy_(torch.randn(v.shape, device="cuda").half())
        small = q, k.contiguous(), v.contiguous()
        big = q, k, v
    elif which == "batch":
        buffer = torch.empty(far + (1 << 20), dtype=torch.half, device="cuda")
        big = [buffer.as_strided((2, 33, 2, 64), (far, 128, 64, 1), 33 * 128 * n) for n in range(3)]
        for x in big:
            x.copy_(torch.randn(x.shape, device="cuda").half())
        small = [x.contiguous() for x in big]
    else:  # out (1, far / 64, 1, 64): one long row of queries, few keys
        rows = far // 64
        q = torch.zeros(1, 1, 1, 64, device="cuda").half().expand(1, rows, 1, 64)
        k, v = (torch.randn(1, 7, 1, 64, device="cuda").half() for _ in range(2))
        served(cuda_kernel, q, k, v)
        out = torch.full((1, rows, 1, 64), float("nan"), dtype=torch.half, device="cuda")
        fa.flash_attn_func(q, k, v, out=out, kernel=cuda_kernel.name)
        want = fa.flash_attn_func(q[:, :1], k, v, kernel=cuda_kernel.name)
        assert torch.equal(out[:, -1], want[:, 0]) and not torch.isnan(out[:, ::4099]).any()
        return
    served(cuda_kernel, *big)
    out = fa.flash_attn_func(*big, kernel=cuda_kernel.name, causal=True)
    want = fa.flash_attn_func(*small, kernel=cuda_kernel.name, causal=True)
    assert torch.equal(out, want)


def test_host_pointer_on_a_gpu_call():
    """An array that claims to be on the GPU but is not gets an error, not a fault."""
    from flash_attn_minimal._commands.info import _CALLS, typical_args
    from flash_attn_minimal._core import structs
    from flash_attn_minimal._core.queries import plan_of
    from flash_attn_minimal._core.structs import AttentionArgs

    args: AttentionArgs = typical_args(structs.CUDA, *_CALLS[1][1:])
    host = np.zeros(64, np.float16)
    args.q_data = host.ctypes.data
    plan = plan_of(args)
    assert plan.status == "FA_BAD_ARGUMENT" and "is host memory, but device is a GPU" in plan.error
