"""Repeated calls whose workspace differs from that of the earlier calls, because it also depends on lengths given as
numbers, on alignment and on the environment. The library is never told of more workspace than there is, and a call that
needs more gets it on every rank."""

import threading

import numpy as np
import pytest
from conftest import CUDA_DEVICES, NO_CUDA, torch
from ranks import new_groups, watchdog

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad
from flash_attn_minimal._arrays import NUMPY
from flash_attn_minimal._core import recordings
from flash_attn_minimal.distributed import _rank_call

needs_cuda = pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA or "needs PyTorch")
RNG = np.random.default_rng(0)


@pytest.fixture
def workspaces(monkeypatch):
    """(bytes told, bytes there) of every workspace. Workspaces on a CPU, too, are made through the arrays' framework,
    as on a GPU."""
    seen, make, workspace = [], _rank_call.RankCall.__init__, _rank_call.RankCall._workspace

    def made(self, *args):
        make(self, *args)
        self.on_cpu = False

    def checked(self, group, size, array):
        kept, address, told = workspace(self, group, size, array)
        assert told == size
        seen.append((told, 0 if kept is None else int(np.prod(kept.shape))))
        return kept, address, told

    monkeypatch.setattr(_rank_call.RankCall, "__init__", made)
    monkeypatch.setattr(_rank_call.RankCall, "_workspace", checked)
    return seen


def check(seen: list) -> None:
    assert seen and all(told == there for told, there in seen)


def test_a_growing_cache_has_the_workspace_that_is_told(workspaces):
    cache = RNG.standard_normal((2, 1, 6000, 2, 16), dtype=np.float32)
    q, lengths = RNG.standard_normal((1, 1, 8, 16), dtype=np.float32), (10, 11, 12, 6000, 600, 7, 5000)
    options = {"kernel": "cpu_naive"}  # whose workspace grows with the keys
    groups = new_groups(2)

    def rank(group):
        mine = [np.ascontiguousarray(x[:, group.rank :: 2]) for x in cache]
        return [fad.decode(group, q, *mine, cache_seqlens=(n + 1 - group.rank) // 2, **options) for n in lengths]

    with watchdog(30, groups):
        for outs in fad.run(groups, rank):
            for n, out in zip(lengths, outs, strict=True):
                np.testing.assert_allclose(out, fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=n), atol=1e-5)
    check(workspaces)
    assert len(set(workspaces)) > 1


def test_a_repeated_step_refuses_an_out_that_is_read():
    cache = RNG.standard_normal((2, 1, 8, 4, 16), dtype=np.float32)
    q = RNG.standard_normal((1, 8, 4, 16), dtype=np.float32)
    groups = new_groups(2)

    def rank(group):
        (k, v), mine = (x.copy() for x in cache), q.copy()
        out = np.empty_like(mine)
        for _ in range(3):
            fad.decode(group, mine, k, v, cache_seqlens=5, out=out)
        for name, other in (("q", mine), ("k", k), ("v", v)):
            with pytest.raises(fa.BadArgument, match=f"out.* {name}"):
                fad.decode(group, mine, k, v, cache_seqlens=5, out=other)
        assert all(np.array_equal(x, y) for x, y in ((mine, q), (k, cache[0]), (v, cache[1])))

    with watchdog(30, groups):
        fad.run(groups, rank)


VARIABLES = {
    "kernel": ("FLASH_ATTN_KERNEL", "cpu_naive", "cpu_portable"),
    "backward_kernel": ("FLASH_ATTN_BACKWARD_KERNEL", "cpu_naive", "cpu_portable"),
    "threads": ("FLASH_ATTN_NUM_THREADS", "1", "3"),
}


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "as_on_a_gpu"])
@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_the_environment_changes_between_calls(mode, variable, on_gpu, monkeypatch, request):
    workspaces = request.getfixturevalue("workspaces") if on_gpu else None
    name, *values = VARIABLES[variable]
    q, k, v = RNG.standard_normal((3, 1, 160, 4, 16), dtype=np.float32)
    wanted = fa.flash_attn_func(q, k, v, causal=True)
    groups = new_groups(2)

    def rank(group):
        mine = [fad.shard(x, "zigzag", group.rank, 2) for x in (q, k, v)]
        out, lse = fad.forward(group, *mine, causal=True, mode=mode, return_lse=True)
        return out, fad.backward(group, out, *mine, out, lse, causal=True, mode=mode)

    found = []
    with watchdog(30, groups):
        for value in (*values, *values):
            monkeypatch.setenv(name, value)
            found.append(fad.run(groups, rank))
    for parts in found:
        np.testing.assert_allclose(fad.unshard([out for out, _ in parts], "zigzag"), wanted, atol=1e-5)
        for (_, gradients), (_, first) in zip(parts, found[0], strict=True):
            for x, y in zip(gradients, first, strict=True):
                np.testing.assert_allclose(x, y, atol=1e-4)
    assert all(len(group.calls) == 2 for group in groups)
    if workspaces:
        check(workspaces)


def test_a_rank_without_memory_for_the_larger_workspace(workspaces, monkeypatch):
    """The rank tells the other ranks, which have made their workspaces, and the group stays usable."""
    cache, q = np.ones((1, 6000, 2, 16), np.float32), np.ones((1, 1, 8, 16), np.float32)
    groups, empty, full = new_groups(2), NUMPY.empty, False

    def new(like, shape, dtype):
        if full and dtype == "uint8" and threading.current_thread() is last:
            raise fa.OutOfMemory("no memory left")
        return empty(like, shape, dtype)

    monkeypatch.setattr(NUMPY, "empty", new)

    def rank(group):
        nonlocal last
        if group.rank == 1:
            last = threading.current_thread()
        return fad.decode(group, q, cache, cache, cache_seqlens=5999 if full else 5, kernel="cpu_naive")

    last = None
    with watchdog(30, groups):
        fad.run(groups, rank)
        for _ in range(2):
            full = True
            with pytest.raises(fa.OutOfMemory, match="^no memory left"):
                fad.run(groups, rank)
            full = False
            fad.run(groups, rank)
    check(workspaces)


# ---- workspaces of exactly the size that the library is told ----


@pytest.fixture
def guards(monkeypatch):
    """The guards after the workspaces of all calls."""
    kept = []

    def grow(self, size):
        whole = np.full(size + 4096, 0xA5, np.uint8)
        kept.append(whole[size:])
        return whole, whole.ctypes.data, size

    monkeypatch.setattr(recordings.Scratch, "grow", grow)
    return kept


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "flat"])
def test_nothing_behind_a_workspace_is_written(layout, mode, guards, monkeypatch):
    """Lengths that grow and shrink, with the number of threads set by the environment."""
    groups = new_groups(3)
    rng = np.random.default_rng(1)
    cases = []
    for lengths in ([5, 70], [400], [1, 0, 33], [300, 2], [3]):
        cu = np.cumsum([0, *lengths])
        cases.append((cu, rng.standard_normal((3, cu[-1], 6, 16), dtype=np.float32)))

    def rank(group):
        for cu, arrays in cases:
            rows = fad.indices(layout, group.rank, 3, cu)
            mine = [np.ascontiguousarray(x[rows]) for x in arrays]
            options = {"cu_seqlens_q": cu, "causal": True, "layout": layout, "mode": mode}
            for _ in range(2):
                out, lse = fad.forward(group, *mine, return_lse=True, **options)
                fad.backward(group, out, *mine, out, lse, **options)
            fad.merge(group, out, lse) if layout == "contiguous" and cu[-1] % 3 == 0 and cu.size == 2 else None
            cache = np.zeros((1, max(1, len(rows)), 6, 16), np.float32)
            for n in (len(rows), len(rows) // 2):
                fad.decode(group, arrays[0][None, :1], cache, cache, cache_seqlens=n)
        return out

    for threads in ("1", "3"):
        monkeypatch.setenv("FLASH_ATTN_NUM_THREADS", threads)
        with watchdog(60, groups):
            fad.run(groups, rank)
    assert guards and all((guard == 0xA5).all() for guard in guards)


# ---- GPUs ----


@needs_cuda
def test_a_growing_cache_on_a_gpu():
    groups = fad.thread_groups(devices=[rank % CUDA_DEVICES for rank in range(2)], timeout=60)
    lengths = (10, 11, 600, 5000, 20000, 65000)

    def rank(group):
        device = f"cuda:{group.rank % CUDA_DEVICES}"
        generator = torch.Generator(device).manual_seed(group.rank)
        k, v = torch.randn((2, 1, 65536, 2, 128), generator=generator, device=device, dtype=torch.bfloat16)
        q = torch.ones((1, 1, 16, 128), device=device, dtype=torch.bfloat16)
        found = []
        for n in (*lengths, *lengths[::-1]):
            one = torch.full((1,), n, device=device, dtype=torch.int32)
            pair = fad.decode(group, q, k, v, cache_seqlens=n), fad.decode(group, q, k, v, cache_seqlens=one)
            found.append(float((pair[0].float() - pair[1].float()).abs().max()))
        return found

    with watchdog(120, groups):
        for errors in fad.run(groups, rank):
            assert all(error < 1e-2 for error in errors), errors


@needs_cuda
@pytest.mark.parametrize("offsets", [(0, 0, 1, 0), (1, 1, 0, 1)], ids=["less_aligned", "more_aligned"])
def test_pointers_of_another_alignment(offsets):
    groups = fad.thread_groups(devices=[rank % CUDA_DEVICES for rank in range(2)], timeout=60)
    count = 512 * 8 * 128

    def rank(group):
        device = f"cuda:{group.rank % CUDA_DEVICES}"
        generator = torch.Generator(device).manual_seed(group.rank)
        given = torch.randn((3, count), generator=generator, device=device, dtype=torch.bfloat16)
        outs = []
        for offset in offsets:
            store = torch.zeros((3, count + 8), device=device, dtype=torch.bfloat16)
            store[:, offset : offset + count] = given
            mine = [x[offset : offset + count].view(1, 512, 8, 128) for x in store]
            outs.append(fad.forward(group, *mine, causal=True, return_lse=True)[0].float())
        return [float((out - outs[0]).abs().max()) for out in outs]

    with watchdog(120, groups):
        for errors in fad.run(groups, rank):
            assert all(error < 2e-2 for error in errors), errors


@needs_cuda
def test_the_environment_changes_between_calls_on_a_gpu(monkeypatch):
    groups = fad.thread_groups(devices=[rank % CUDA_DEVICES for rank in range(2)], timeout=60)

    def rank(group):
        device = f"cuda:{group.rank % CUDA_DEVICES}"
        generator = torch.Generator(device).manual_seed(group.rank)
        q = torch.randn((1, 256, 4, 64), generator=generator, device=device, dtype=torch.bfloat16)
        return fad.forward(group, q, q, q, causal=True).float()

    with watchdog(120, groups):
        outs = []
        for kernel in (None, None, "naive", None, "naive"):
            if kernel:
                monkeypatch.setenv("FLASH_ATTN_KERNEL", kernel)
            else:
                monkeypatch.delenv("FLASH_ATTN_KERNEL", raising=False)
            outs.append(fad.run(groups, rank))
    for out in outs:
        for x, y in zip(out, outs[0], strict=True):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=2e-2)
