"""Tests of the backward pass that need a GPU: graphs, streams, memory, tensors beyond 2^31 elements, very long
sequences."""

import gc
import time

import numpy as np
import pytest
from conftest import CUDA, NO_CUDA, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]


@pytest.fixture
def cuda_kernel(backward_kernel):
    if backward_kernel.device.name != "cuda":
        pytest.skip("for the GPU's kernels")
    return backward_kernel


def served(kernel, *arrays, **options):
    plan = fa.backward_query(*arrays, kernel=kernel.name, **options)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error
    return plan


def inputs(seqlen, headdim=64, heads=(4, 2), batch=1, dtype="float16"):
    """dout, q, k, v, out, lse of a causal call."""
    torch.manual_seed(seqlen)
    shapes = ((batch, seqlen, heads[0], headdim), *[(batch, seqlen, heads[1], headdim)] * 2)
    q, k, v = (torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes)
    out, lse = fa.flash_attn_func(q, k, v, causal=True, return_lse=True)
    return torch.randn_like(out), q, k, v, out, lse


def close(got, want, tolerance):
    for x, y in zip(got, want, strict=True):
        assert not torch.isnan(x).any()
        difference, size = (x.float() - y.float()).norm(), y.float().norm()
        assert difference <= tolerance * size, f"{difference / size:.2e}"


@pytest.mark.parametrize("headdim", [64, 128, 192, 320])
@pytest.mark.parametrize("seqlen", [64, 500])
def test_calls_one_after_another(cuda_kernel, seqlen, headdim):
    """The kernels of a call may start before the one before has ended, and the next call has the same workspace."""
    pair = [inputs(seqlen + extra, headdim, batch=3) for extra in (0, 1)]
    served(cuda_kernel, *pair[0][1:4], causal=True, deterministic=True)
    options = {"causal": True, "deterministic": True, "kernel": cuda_kernel.name}
    alone = []
    for arrays in pair:
        alone.append(fa.backward(*arrays, **options))
        torch.cuda.synchronize()
    found = [fa.backward(*arrays, **options) for _ in range(20) for arrays in pair]
    for i, gradients in enumerate(found):
        assert all(map(torch.equal, gradients, alone[i % 2]))


def test_graph_capture_and_replay(cuda_kernel):
    """A replayed call uses the new contents of its inputs, and calls of other sizes in between do not affect its
    workspace."""
    arrays = inputs(300)
    served(cuda_kernel, *arrays[1:4], causal=True)
    options = {"causal": True, "kernel": cuda_kernel.name}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fa.backward(*arrays, **options)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fa.backward(*arrays, **options)
    for turn in range(3):
        for array, x in zip(arrays, inputs(300), strict=True):
            array.copy_(x)
        arrays[0].mul_(turn + 1)
        fa.backward(*inputs(500 * (turn + 1)), **options)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        close(captured, fa.backward(*arrays, **options), 1e-3)


def test_two_streams_at_once(cuda_kernel):
    one, two = inputs(1000), inputs(1001)
    served(cuda_kernel, *one[1:4], causal=True)
    options = {"causal": True, "kernel": cuda_kernel.name}
    want = fa.backward(*one, **options), fa.backward(*two, **options)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, arrays in zip(streams, (one, two), strict=True):
            with torch.cuda.stream(stream):
                got.append(fa.backward(*arrays, **options))
        torch.cuda.synchronize()
        for x, y in zip(got, want, strict=True):
            close(x, y, 1e-3)


def test_deterministic_a_hundred_times(cuda_kernel):
    """Bitwise equal, even while another kernel occupies some of the multiprocessors."""
    arrays = inputs(700, heads=(8, 4), batch=2)
    served(cuda_kernel, *arrays[1:4], causal=True, deterministic=True)
    options = {"causal": True, "kernel": cuda_kernel.name, "deterministic": True}
    first = fa.backward(*arrays, **options)
    side, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for turn in range(100):
        if turn % 2:
            with torch.cuda.stream(side):
                busy @ busy
        for x, y in zip(fa.backward(*arrays, **options), first, strict=True):
            assert torch.equal(x, y)


HOLD = """
extern "C" __global__ void hold(const volatile int* go) {
    while (*go == 0) __nanosleep(1000);
}
"""


@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("heads_k", [24, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_deterministic_in_part_of_the_gpu(cuda_kernel, headdim, heads_k, causal):
    """The call ends, with the same bits, while another kernel holds all multiprocessors except four. Blocks that take
    turns must not wait for blocks that have not started."""
    cupy = pytest.importorskip("cupy")
    arrays = inputs(1500, headdim, heads=(24, heads_k), batch=24 // heads_k)  # more blocks of keys than multiprocessors
    options = {"causal": causal, "kernel": cuda_kernel.name, "deterministic": True}
    served(cuda_kernel, *arrays[1:4], causal=causal, deterministic=True)
    want = fa.backward(*arrays, **options)
    torch.cuda.synchronize()
    device, go = cupy.cuda.Device(), cupy.cuda.alloc_pinned_memory(4)
    flag = np.frombuffer(go, np.int32, 1)
    flag[0] = 0
    shared = device.attributes["MaxSharedMemoryPerBlockOptin"]
    kernel, side = cupy.RawKernel(HOLD, "hold"), cupy.cuda.Stream(non_blocking=True)
    kernel.max_dynamic_shared_size_bytes = shared
    done = torch.cuda.Event()
    try:
        with side:
            kernel((device.attributes["MultiProcessorCount"] - 4,), (32,), (np.uintp(go.ptr),), shared_mem=shared)
        time.sleep(0.2)
        got = fa.backward(*arrays, **options)
        done.record()
        end = time.monotonic() + 30
        while not done.query() and time.monotonic() < end:
            time.sleep(0.01)
        ended = done.query()
    finally:
        flag[0] = 1
        torch.cuda.synchronize()
    assert ended, "the backward pass waited for the other kernel"
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_memory_grows_with_seqlen(cuda_kernel):
    """The peak is the gradients and the workspace that the query returned, which is linear in seqlen."""
    used = {}
    for seqlen in (4096, 8192):
        arrays = inputs(seqlen)
        plan = served(cuda_kernel, *arrays[1:4], causal=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = fa.backward(*arrays, causal=True, kernel=cuda_kernel.name)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        assert peak <= sum(x.nbytes for x in gradients) + plan.workspace_bytes + (4 << 20)
        used[seqlen] = plan.workspace_bytes
    assert used[8192] <= 2.1 * used[4096] + (1 << 16)


@pytest.mark.parametrize("seqlen_q, seqlen_k, heads, window", [
    (8300, 8500, (2, 1), (-1, 0)),  # chunks of rows and of keys, each head alone
    (8300, 300, (3, 3), (-1, -1)),
    (130, 17000, (4, 2), (-1, -1)),
    (8192, 8192, (6, 2), (3000, 0)),  # the heads of a group one after another
    (4096, 4096, (14, 2), (-1, 0)),  # and in twos and fours
])  # fmt: skip
def test_gradients_in_rounds(cuda_kernel, seqlen_q, seqlen_k, heads, window):
    """Only P and dS of 256 MB, and of 8192 rows and keys, exist at a time. The sum over the rounds is the result of
    `simple`."""
    if cuda_kernel.name != "mma_wide_sm80":
        pytest.skip("for the kernel with rounds")
    torch.manual_seed(0)
    shapes = ((1, seqlen_q, heads[0], 40), *[(1, seqlen_k, heads[1], 40)] * 2)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes)
    served(cuda_kernel, q, k, v, window_size=window)
    out, lse = fa.flash_attn_func(q, k, v, window_size=window, return_lse=True)
    arrays = (torch.randn_like(out), q, k, v, out, lse)
    got = fa.backward(*arrays, window_size=window, kernel=cuda_kernel.name)
    close(got, fa.backward(*arrays, window_size=window, kernel="simple"), 2e-3)
    old = [torch.randn_like(x) for x in (q, k, v)]
    results = {name: x.clone() for name, x in zip(("dq", "dk", "dv"), old, strict=True)}
    fa.backward(*arrays, window_size=window, kernel=cuda_kernel.name, accumulate=True, **results)
    close(results.values(), [(x.float() + y.float()).half() for x, y in zip(old, got, strict=True)], 2e-3)


@pytest.mark.parametrize("headdim", [320, 512])
def test_wide_heads_repeat(cuda_kernel, headdim):
    """Repeated calls give the same bits in either mode; if a kernel has only one order, both modes give the same
    bits."""
    arrays = inputs(1000, headdim, heads=(4, 2), batch=2)
    served(cuda_kernel, *arrays[1:4], causal=True, deterministic=True)
    options = {"causal": True, "kernel": cuda_kernel.name}
    first = fa.backward(*arrays, **options, deterministic=True)
    for turn in range(20):
        again = fa.backward(*arrays, **options, deterministic=cuda_kernel.name != "mma_wide_sm80" or turn % 2 == 0)
        assert all(torch.equal(x, y) for x, y in zip(again, first, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("batch, seqlen, heads, headdim", [
    (4, 269, (32, 2), 128),
    (2, 1000, (7, 1), 64),
    (1, 2048, (16, 1), 256),
    (3, 333, (12, 2), 192),
    (1, 130, (64, 1), 40),
])  # fmt: skip
def test_groups_in_parts(cuda_kernel, batch, seqlen, heads, headdim, deterministic):
    """Few key heads and short sequences: wgmma_sm90 cuts groups into parts of heads. The gradients are those of key
    heads that are repeated for each query head, summed; they repeat their bits, add to what is there, and leave gaps
    between packed sequences as they are."""
    if "wgmma" not in cuda_kernel.name or "float32" in cuda_kernel.name:
        pytest.skip("for the kernels that cut groups into parts")
    arrays = inputs(seqlen, headdim, heads, batch, dtype="bfloat16")
    served(cuda_kernel, *arrays[1:4], causal=True)
    options = {"causal": True, "kernel": cuda_kernel.name, "deterministic": deterministic}
    got = fa.backward(*arrays, **options)
    dout, q, k, v, out, lse = arrays
    group = heads[0] // heads[1]
    many = [x.repeat_interleave(group, 2) for x in (k, v)]
    dq, dk, dv = fa.backward(dout, q, *many, out, lse, causal=True, kernel="simple")
    sums = [x.float().unflatten(2, (heads[1], group)).sum(3).bfloat16() for x in (dk, dv)]
    close(got, (dq, *sums), 1e-2)
    again = fa.backward(*arrays, **options)
    assert all(
        torch.equal(x, y)
        for x, y in zip(again[0 if deterministic else 1 :], got[0 if deterministic else 1 :], strict=True)
    )
    old = [torch.randn_like(x) for x in (q, k, v)]
    results = {name: x.clone() for name, x in zip(("dq", "dk", "dv"), old, strict=True)}
    fa.backward(*arrays, **options, accumulate=True, **results)
    close(results.values(), [(x.float() + y.float()).bfloat16() for x, y in zip(old, got, strict=True)], 1e-2)

    more = 5  # rows after the last sequence
    flat = [torch.nn.functional.pad(x.flatten(0, 1), (0, 0, 0, 0, 0, more), value=float("nan")) for x in arrays[:5]]
    packed_lse = torch.nn.functional.pad(lse.transpose(0, 1).flatten(1), (0, more), value=float("nan")).contiguous()
    ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seqlen
    lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": seqlen, "max_seqlen_k": seqlen}
    results = {name: torch.full_like(x, 7.0) for name, x in zip(("dq", "dk", "dv"), flat[1:4], strict=True)}
    fa.backward(*flat, packed_lse, **lengths, **options, **results)
    for x, y in zip(results.values(), got, strict=True):
        assert (x[-more:] == 7).all()
        close([x[:-more]], [y.flatten(0, 1)], 1e-2)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "option", ["none", "causal", "window", "mask of keys", "mask of pairs", "intervals", "bias", "dropout"]
)
@pytest.mark.parametrize("batch, rows, keys, heads, headdim", [
    (1, 3000, 128, (1, 1), 128),
    (2, 2100, 300, (2, 1), 64),
    (1, 1300, 1300, (2, 2), 192),
    (3, 1000, 1100, (7, 1), 80),
])  # fmt: skip
def test_rows_in_parts(cuda_kernel, batch, rows, keys, heads, headdim, option, deterministic):
    """Few key blocks with long walks: wgmma_sm90 cuts walks into parts of rows, too. The gradients are those of
    `simple`, and those of k and v repeat their bits."""
    if "wgmma" not in cuda_kernel.name or "float32" in cuda_kernel.name:
        pytest.skip("for the kernels that cut walks into parts")
    torch.manual_seed(rows + headdim)
    q, dout = (torch.randn(batch, rows, heads[0], headdim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(batch, keys, heads[1], headdim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ends = torch.randint(0, rows // 2, (2, batch, 1, keys), device="cuda", dtype=torch.int32)  # of what sees a key
    intervals = torch.stack((rows - ends[0], ends[1]), -1)  # rows from the first on, and before the second, do not
    options = {
        "none": {}, "causal": {"causal": True}, "window": {"window_size": (700, 90)},
        "mask of keys": {"mask": torch.rand(batch, 1, 1, keys, device="cuda") < 0.7},
        "mask of pairs": {"mask": torch.rand(1, 1, rows, keys, device="cuda") < 0.7},
        "intervals": {"startend_row_indices": intervals},
        "bias": {"bias": torch.randn(1, heads[0], rows, keys, device="cuda", dtype=torch.bfloat16)},
        "dropout": {"dropout_p": 0.25, "dropout_seed": 5},
    }[option]  # fmt: skip
    served(cuda_kernel, q, k, v, **options, deterministic=deterministic)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    arrays = (dout, q, k, v, out, lse)
    got = fa.backward(*arrays, **options, kernel=cuda_kernel.name, deterministic=deterministic)
    close(got[:3], fa.backward(*arrays, **options, kernel="simple")[:3], 1e-2)
    again = fa.backward(*arrays, **options, kernel=cuda_kernel.name, deterministic=deterministic)
    first = 0 if deterministic else 1
    assert all(torch.equal(x, y) for x, y in zip(again[first:3], got[first:3], strict=True))


def test_beyond_2_to_31_elements(cuda_kernel):
    """Every tensor starts or ends beyond 2^31 elements of its buffer. The same values in compact tensors give the same
    results."""
    gc.collect()
    torch.cuda.empty_cache()
    needs = 40 << 30
    if torch.cuda.mem_get_info()[0] < needs:
        pytest.skip(f"needs {needs >> 30} GiB of free GPU memory")
    arrays = inputs(150, batch=2)
    served(cuda_kernel, *arrays[1:4], causal=True)
    far = (1 << 31) + 4096
    buffers = [torch.empty(far + (1 << 20), dtype=torch.half, device="cuda") for _ in range(8)]

    def place(buffer, x, copy=True):  # batch entries more than 2^31 elements apart
        view = buffer.as_strided(x.shape, (far, *x.stride()[1:]))
        if copy:
            view.copy_(x)
        return view

    big = [place(buffer, x) for buffer, x in zip(buffers, arrays[:5], strict=False)]
    results = {
        name: place(buffer, x, copy=False)
        for name, buffer, x in zip(("dq", "dk", "dv"), buffers[5:], arrays[1:4], strict=True)
    }
    for x in results.values():
        x.fill_(float("nan"))
    got = fa.backward(*big, arrays[5], causal=True, kernel=cuda_kernel.name, **results)
    close(got, fa.backward(*arrays, causal=True, kernel=cuda_kernel.name), 1e-3)


def test_a_long_sequence(cuda_kernel):
    """131072 tokens at headdim 128 run on one card. Only the gradients of the last keys are checked, because they
    depend only on the last rows."""
    if cuda_kernel.name == "simple":
        pytest.skip("minutes on CUDA cores")
    seqlen, tail = 131072, 512
    arrays = inputs(seqlen, headdim=128, heads=(2, 2), dtype="bfloat16")
    served(cuda_kernel, *arrays[1:4], causal=True)
    dq, dk, dv = fa.backward(*arrays, causal=True, kernel=cuda_kernel.name)
    assert not any(torch.isnan(x).any() for x in (dq, dk, dv))
    dout, q, k, v, out, lse = (x.double() for x in arrays)
    for head in range(2):
        rows, keys = slice(seqlen - tail, seqlen), slice(seqlen - tail, seqlen)
        s = q[0, rows, head] @ k[0, keys, head].T / np.sqrt(128)
        p = torch.exp(s - lse[0, head, rows, None]).tril()
        delta = (dout[0, rows, head] * out[0, rows, head]).sum(1)
        ds = p * (dout[0, rows, head] @ v[0, keys, head].T - delta[:, None])
        close([dv[0, keys, head]], [p.T @ dout[0, rows, head]], 2e-2)
        close([dk[0, keys, head]], [ds.T @ q[0, rows, head] / np.sqrt(128)], 2e-2)
