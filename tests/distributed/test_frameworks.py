"""Groups of PyTorch's process groups and of mpi4py's communicators; arrays of PyTorch and JAX."""

import socket

import numpy as np
import processes
import pytest
from conftest import NO_CUDA, jax, torch
from process_calls import DOUT, K, Q, V, both_passes, mpi_rank, torch_rank
from ranks import shared_groups, watchdog

import flash_attn_minimal as fa
from flash_attn_minimal import distributed as fad

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def expected() -> list[np.ndarray]:
    out, lse = fa.flash_attn_func(Q, K, V, causal=True, return_lse=True)
    return [out, *fa.backward(DOUT, Q, K, V, out, lse, causal=True)]


def check(parts: list[list]) -> None:
    for right, shares in zip(expected(), zip(*parts, strict=True), strict=True):
        np.testing.assert_allclose(fad.unshard(list(map(np.asarray, shares)), "zigzag"), right, atol=2e-6)


# ---- torch.distributed ----


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@needs_torch
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA))])
def test_from_torch(on_gpu, subset):
    found = processes.run(3 if subset else 2, torch_rank, free_port(), on_gpu, subset)
    found = [each for each in found if each is not None]
    for parts in zip(*found, strict=True):
        check(list(parts))


# ---- mpi4py, in the shape of its communicators ----


def test_from_mpi():
    check(processes.run(2, mpi_rank))


# ---- arrays ----


@needs_torch
def test_torch_tensors():
    groups = shared_groups(2)

    def rank(group):
        for _ in range(3):  # the later ones are calls like one before
            found = both_passes(group, torch.tensor)
        assert all(type(x) is torch.Tensor for x in found)
        return found

    with watchdog(60, groups):
        check(fad.run(groups, rank))


@needs_torch
def test_tensors_that_require_a_gradient_are_refused():
    groups = shared_groups(2)

    def rank(group):
        q = torch.zeros(1, 4, 2, 16, requires_grad=group.rank == 1)
        with pytest.raises(fa.Unsupported, match="q requires a gradient, which this function does not have"):
            fad.forward(group, q, q, q)
        with torch.no_grad():
            fad.forward(group, q, q, q)

    with watchdog(60, groups):
        fad.run(groups, rank)


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_jax_arrays():
    groups = shared_groups(2)
    cpu = jax.devices("cpu")[0] if jax else None

    def rank(group):
        found = both_passes(group, lambda x: jax.device_put(x, cpu))
        assert all(isinstance(x, jax.Array) for x in found)
        with pytest.raises(fa.BadArgument, match="out is a read-only JAX array"):
            fad.merge(group, found[0], jax.device_put(np.zeros((2, 20), np.float32), cpu))
        return found

    with watchdog(60, groups):
        check(fad.run(groups, rank))


def test_arrays_of_two_frameworks_are_refused():
    if torch is None:
        pytest.skip("PyTorch is not installed")
    groups = shared_groups(2)

    def rank(group):
        part = fad.shard(Q, "zigzag", group.rank, 2)
        with pytest.raises(fa.BadArgument, match="k is a PyTorch array, but q is a NumPy array"):
            fad.forward(group, part, torch.tensor(part), part)
        with pytest.raises(fa.BadArgument, match="is no sequence of integers in host memory"):
            fad.forward(group, part[0], part[0], part[0], cu_seqlens_q="abc")
        return fad.forward(group, part[0], part[0], part[0], cu_seqlens_q=torch.tensor([0, 40]), num_threads=1)

    with watchdog(60, groups):
        parts = fad.run(groups, rank)
    np.testing.assert_allclose(fad.unshard(parts, "zigzag", [0, 40]), fa.flash_attn_func(Q, Q, Q)[0], atol=2e-6)
