"""Peers compute the same results as the library where they run, and say why where they do not."""

import importlib.util
import sys

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CPU, ROOT

if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from ladder.rung import Calls, Unavailable  # noqa: E402
from ladder.rungs import RUNGS, rung  # noqa: E402

PEERS = [rung for rung in RUNGS if rung.peer]


@pytest.mark.parametrize("peer", PEERS, ids=[peer.name for peer in PEERS])
def test_a_peer_loads_or_says_what_is_missing(peer):
    try:
        assert isinstance(peer.load(), Calls)
    except Unavailable as error:
        assert str(error)


def test_a_top_left_mask_is_refused_where_it_differs():
    refused = {peer.name for peer in PEERS if peer.refusal(Case(causal=True, seqlen_q=128, seqlen_k=256))}
    assert {"torch_cpu", "torch_fa2", "torch_cudnn", "torch_math", "pallas_mgpu"} <= refused
    assert not refused & {"flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
    for peer in PEERS:
        for causal in (False, True):
            assert peer.refusal(Case(causal=causal, seqlen_q=256, seqlen_k=256)) is None


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("dtype", rung("torch_cpu").dtypes)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_on_the_cpu(causal, dtype):
    """Forward and backward, twice with other inputs: a kept graph belongs to its inputs."""
    calls = rung("torch_cpu").load()
    kept = []
    for seed in range(2):
        sizes = {"seqlen_q": 130, "seqlen_k": 130, "nheads": 4, "nheads_k": 2, "batch": 2}
        case = Case(dtype=dtype, causal=causal, seed=seed, **sizes)
        (q, k, v, _), exact, plain = accuracy.expected(case)
        kept.append([CPU.array(x, dtype) for x in (q, k, v)])
        out, _ = calls.forward(*kept[-1], causal)
        accuracy.check("out", CPU.numpy(out), exact[0], plain[0], dtype, floor=accuracy.rounding_floor(q, k))
        (dout, *_), exact, plain = accuracy.expected_backward(case)
        found = calls.backward(CPU.array(dout, dtype), *kept[-1], None, None, causal)
        again = calls.backward(CPU.array(dout, dtype), *kept[-1], None, None, causal)
        for name, got, same in zip(("dq", "dk", "dv"), found, again, strict=True):
            floor = accuracy.gradient_floor(case, getattr(exact, name))
            accuracy.check(name, CPU.numpy(got), getattr(exact, name), getattr(plain, name), dtype, floor=floor)
            np.testing.assert_array_equal(got, same)
