"""Many Python threads at once: every result equals that of a single call, and errors stay with their thread."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from accuracy import Case, expected
from conftest import CUDA, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference

CASES = [
    Case(33, 70, 40, causal=True),
    Case(1, 257, 64, nheads=4),
    Case(100, 100, 16, batch=3, dtype="float16"),
    Case(129, 5, 72, sinks=True, dropout_p=0.3),
    Case(64, 64, 8, mask=(True,), softcap=2.0),
]


def test_calls_from_many_threads(kernel):
    alone = {}
    for case in CASES:
        (q, k, v, options), *_ = expected(case)
        alone[case] = kernel(q, k, v, case.dtype, **options)
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait()
        for turn in range(10):
            case = CASES[(number + turn) % len(CASES)]
            (q, k, v, options), *_ = expected(case)
            out, lse = kernel(q, k, v, case.dtype, num_threads=1 + number % 3, **options)
            np.testing.assert_array_equal(out, alone[case][0])
            np.testing.assert_array_equal(lse, alone[case][1])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_errors_stay_with_their_thread():
    def work(number):
        q = np.zeros((1, 3, 2 * number + 3, 8), np.float32)
        for _ in range(200):
            with pytest.raises(fa.BadArgument, match=f"^nheads={2 * number + 3} is not a multiple of nheads_k=2$"):
                fa.flash_attn_func(q, q[:, :, :2], q[:, :, :2])
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


SHAPES = [(n, 16 + 37 * n, 8 * (1 + n % 9), 1 + n % 3) for n in range(1, 17)]  # seqlen_q, seqlen_k, headdim, nheads


def test_sixteen_threads_with_shapes_of_their_own(device):
    """The library chooses the kernels, so threads run different kernels at the same time, some for the first time."""
    rng = np.random.default_rng(0)
    calls = []
    for seqlen_q, seqlen_k, headdim, nheads in SHAPES:
        q = rng.standard_normal((2, seqlen_q, nheads, headdim), dtype=np.float32)
        k, v = rng.standard_normal((2, 2, seqlen_k, nheads, headdim), dtype=np.float32)
        exact, _ = reference.standard_attention(q, k, v, causal=True)
        calls.append(([device.array(x) for x in (q, k, v)], exact))
    barrier = threading.Barrier(len(calls))

    def work(number):
        arrays, exact = calls[number]
        barrier.wait()
        first = device.numpy(fa.flash_attn_func(*arrays, causal=True))
        np.testing.assert_allclose(first, exact, atol=1e-5)
        for _ in range(20):
            np.testing.assert_array_equal(device.numpy(fa.flash_attn_func(*arrays, causal=True)), first)
        return True

    with ThreadPoolExecutor(len(calls)) as pool:
        assert all(pool.map(work, range(len(calls))))


FORK = """
import os, sys
import numpy as np
import flash_attn_minimal as fa
q = np.random.default_rng(0).standard_normal((1, 300, 4, 64), dtype=np.float32)
if sys.argv[1] == "cuda":
    import torch
    q = torch.tensor(q, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
else:
    out = np.empty_like(q)
first = fa.flash_attn_func(q, q, q, causal=True, out=out)
first = first.copy() if sys.argv[1] == "cpu" else torch.cuda.synchronize()
child = os.fork()
if child == 0:
    try:
        again = fa.flash_attn_func(q, q, q, causal=True, out=out)
        os._exit(0 if sys.argv[1] == "cpu" and np.array_equal(again, first) else 1)
    except fa.CudaError as error:
        os._exit(2 if sys.argv[1] == "cuda" else 3)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
if sys.argv[1] == "cuda":  # the parent goes on
    fa.flash_attn_func(q, q, q, causal=True, out=out)
    torch.cuda.synchronize()
print("child", code)
"""


def test_fork_after_use(device):
    """The child works on the CPU. CUDA cannot be shared with a child; the child gets an error, and does not hang."""
    if device.name == "cuda" and device.framework != "torch":
        pytest.skip("needs PyTorch")
    done = subprocess.run([sys.executable, "-c", FORK, device.name], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"child {2 if device.name == 'cuda' else 0}", done.stdout + done.stderr


@pytest.mark.skipif(CUDA.framework != "torch" or torch.cuda.device_count() < 2, reason="needs PyTorch and two GPUs")
@pytest.mark.parametrize("threads", [1, 2])
def test_two_gpus_in_turn(threads):
    """Calls from one thread and from two. They do not change the current device."""
    q = torch.randn(2, 300, 4, 128, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact, _ = reference.standard_attention(*[q.float().numpy()] * 3, causal=True)

    def work(order):
        for turn in range(40):
            index = order[turn % 2]
            x = q.to(f"cuda:{index}")
            out = fa.flash_attn_func(x, x, x, causal=True)
            assert out.device.index == index and torch.cuda.current_device() == 0
            np.testing.assert_allclose(out.float().cpu().numpy(), exact, atol=0.03)
            step = fa.flash_attn_with_kvcache(x[:, :1], x, x, cache_seqlens=300)
            assert step.device.index == index and torch.isfinite(step).all()
        return True

    with ThreadPoolExecutor(threads) as pool:
        assert all(pool.map(work, [(0, 1), (1, 0)][:threads]))
