"""Lengths on a GPU that are not in order. The host cannot see them: the kernels clamp them, and every call ends."""

import subprocess
import sys

import pytest
from conftest import CUDA, NO_CUDA

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

# The workspace is filled with sevens, so that a counter that no kernel clears would keep a block waiting forever.
PROGRAM = """
import sys
import torch
import flash_attn_minimal as fa
from flash_attn_minimal import _arrays

headdim, deterministic = int(sys.argv[1]), sys.argv[2] == "True"
q, k, v, dout = (torch.randn(1024, 2, headdim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
door = type(_arrays.view(q, "q").door)
empty = door.empty


def filled(self, like, shape, dtype):
    array = empty(self, like, shape, dtype)
    if dtype == "uint8":
        array.owner.view(torch.uint8).fill_(7)
    return array


door.empty = filled
good, down, outside = [0, 512, 768, 1024], [0, 512, 128, 1024], [0, -7, 1 << 30, 1024]
for lengths in ((good, good), (down, good), (good, down), (down, down), (outside, outside[::-1])):
    for options in ({}, {"causal": True}, {"window_size": (200, 100)}):
        cu_q, cu_k = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in lengths)
        print(*lengths, options, flush=True)
        out, lse = fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 1024, 1024, return_lse=True, **options)
        fa.backward(dout, q, k, v, out, lse, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=1024,
                    max_seqlen_k=1024, deterministic=deterministic, **options)
        torch.cuda.synchronize()
print("ended")
"""


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_backward_ends_on_any_lengths(headdim, deterministic):
    """The backward pass used to hang: blocks waited for key blocks that do not exist, or for counters that no kernel
    cleared."""
    command = [sys.executable, "-c", PROGRAM, str(headdim), str(deterministic)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired as hung:
        pytest.fail(f"hung after {(hung.stdout or b'').decode().splitlines()[-1:]}")
    assert done.stdout.endswith("ended\n"), done.stdout[-200:] + done.stderr[-2000:]
