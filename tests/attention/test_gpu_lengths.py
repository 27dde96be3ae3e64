"""Lengths on a GPU that are not in order. The host cannot see them: the kernels clamp them, and every call ends."""

import subprocess
import sys

import numpy as np
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


@pytest.mark.parametrize("kernel", ["mma_sm80", "mma_tf32_sm80"])
def test_masks_by_intervals_of_any_lengths(kernel):
    """Sequences that overlap share keys. The bounds of their keys must not share a place."""
    import torch

    import flash_attn_minimal as fa

    rng = np.random.default_rng(0)
    dtype = torch.float32 if "tf32" in kernel else torch.float16
    q, k, v = (torch.tensor(rng.standard_normal((600, h, 64)), device="cuda", dtype=dtype) for h in (4, 2, 2))
    numbers = np.sort(rng.integers(0, 200, (1, 600, 2)), -1)[:, np.arange(600) // 64 * 64].astype(np.int32)
    indices = torch.tensor(numbers, device="cuda")
    cu_q, cu_k = (torch.tensor(x, device="cuda", dtype=torch.int32) for x in ([0, 200, 400, 600], [0, 400, 30, 600]))
    options = {"causal": True, "startend_row_indices": indices, "allow_tf32": True}
    want, *found = (
        fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 200, 600, kernel=name, **options).float()
        for name in ("naive", *[kernel] * 20)
    )
    for out in found:
        torch.testing.assert_close(out, want, atol=5e-3, rtol=5e-3)
