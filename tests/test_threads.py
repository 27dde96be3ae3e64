"""Many Python threads at once: every result is the one that a lone call gives, errors stay with their thread."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from accuracy import Case, expected

import flash_attn_minimal as fa

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
