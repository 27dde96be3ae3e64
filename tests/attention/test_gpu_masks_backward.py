"""Masks by blocks and masks of pairs in Hopper's backward pass: which calls it takes, and that they are right where
tiles are hidden, whole or cut, and where keys that nobody sees hold NaN. Needs a GPU."""

from __future__ import annotations

import hidden_keys
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

HEAD_DIMS = [64, 128, 192, 256]
SHAPES = [(700, 900), (900, 700), (333, 1333), (65, 500), (450, 64), (1300, 1300)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
MASKS = {
    "blocks 64x64": {"blocks": (6, 64, 64), "block_rate": 0.2},
    "blocks 128x64": {"blocks": (2, 128, 64), "block_rate": 0.3},
    "blocks 64x128": {"blocks": (1, 64, 128), "block_rate": 0.5},
    "blocks 128x128": {"blocks": (2, 128, 128), "block_rate": 0.3},
    "pairs": {"mask": (True, True, True)},
    "pairs of all": {"mask": (False, False, True), "mask_rate": 0.02},
    "both": {"blocks": (2, 64, 64), "block_rate": 0.4, "mask": (True, False, True)},
    "blocks and keys": {"blocks": (6, 128, 64), "block_rate": 0.4, "mask": (True, False, False)},
}
kinds = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
orders = pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])


def kernel_of(headdim):
    return "wgmma_sm90" if headdim <= 128 else "wgmma_pair_sm90"


def backward_of(headdim):
    return BackwardKernel(CUDA, kernel_of(headdim))


def case_of(shape, mask, headdim, dtype="bfloat16", **more):
    return Case(*shape, headdim, batch=2, nheads=6, nheads_k=2, dtype=dtype, **mask, **more)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@orders
@shapes
@kinds
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 160, 256])
def test_gradients(headdim, mask, shape, deterministic, dtype):
    for seed in range(2):
        case = case_of(shape, mask, headdim, dtype, seed=seed, causal=seed == 1, dlse=seed == 1)
        backward_of(headdim).check(case, deterministic=deterministic)


@pytest.mark.parametrize(("headdim", "headdim_v"), [(192, 128), (136, 64), (64, 192), (256, 8)])
@kinds
def test_own_head_dim_of_values(mask, headdim, headdim_v):
    backward_of(256).check(case_of((700, 900), mask, headdim, headdim_v=headdim_v))


OPTIONS = {
    "top_left": {"top_left": True, "causal": True},
    "window": {"window_size": (160, 90)},
    "left edge": {"window_size": (70, -1)},
    "sinks": {"sinks": True},
    "large scores": {"spread": 3e3},
    "overflow": {"spread": 30.0},
}


@pytest.mark.parametrize("option", OPTIONS)
@kinds
@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_beside_options(headdim, mask, option):
    for shape in SHAPES[:3]:
        backward_of(headdim).check(case_of(shape, mask, headdim, "float16", **OPTIONS[option]))


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_packed_sequences(headdim, heads):
    cu_q, cu_k = (0, 1, 200, 200, 537, 900), (0, 130, 130, 330, 790, 1153)  # the second has no keys, the third no rows
    mask = {"blocks": (heads, 64, 64), "block_rate": 0.4}
    for deterministic in (False, True):
        case = case_of((363, 460), mask, headdim, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
        backward_of(headdim).check(case, deterministic=deterministic)


@orders
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kind", ["blocks", "pairs"])
@pytest.mark.parametrize("headdim", [64, 192, 256])
def test_hidden_keys_have_no_gradient(headdim, kind, heads, deterministic):
    def masks(rng):
        if kind == "blocks":
            return {"block_mask": rng.random((2, heads, 5, 5)) < 0.3, "causal": True}
        keys = rng.random((2, heads, 1, 290)) < 0.3
        return {"mask": (rng.random((2, heads, 300, 290)) < 0.3) & keys}

    made = hidden_keys.poisoned(np.random.default_rng(heads), 300, 290, masks, headdim=headdim)
    hidden_keys.check_gradients(backward_of(headdim), "float16", deterministic, *made)


@pytest.mark.parametrize("kind", ["blocks", "pairs"])
@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_same_as_the_general_kernel(headdim, kind):
    """At a size where every block takes many items: 4096 keys, 32 heads; twice the same in order."""
    torch.manual_seed(0)
    q = torch.randn(1, 4096, 32, headdim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 4096, 8, headdim, device="cuda", dtype=torch.bfloat16)
    blocks = torch.rand(1, 8, 32, 64, device="cuda") < 0.2
    if kind == "blocks":
        options = {"block_mask": blocks, "causal": True}
    else:
        pairs = torch.rand(1, 1, 4096, 4096, device="cuda") < 0.5
        options = {"mask": pairs & blocks[:, :1].repeat_interleave(128, 2).repeat_interleave(64, 3)}
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    want = fa.backward(out, q, k, v, out, lse, kernel="mma_sm80", **options)
    orders = (False, True, True)
    free, *in_order = (
        fa.backward(out, q, k, v, out, lse, kernel=kernel_of(headdim), deterministic=order, **options)
        for order in orders
    )
    for got in (free, in_order[0]):
        for x, y in zip(got, want, strict=True):
            assert ((x.float() - y.float()).abs().max() / y.float().abs().max()).item() < 1.5e-2
    assert all(torch.equal(x, y) for x, y in zip(*in_order, strict=True))


@pytest.mark.parametrize("headdim", [64, 128, 192, 264])
def test_which_kernel(headdim):
    x = torch.zeros(1, 2048, 2, headdim, device="cuda", dtype=torch.bfloat16)
    blocks = torch.ones(1, 1, 32, 32, device="cuda", dtype=torch.bool)
    rest = "mma_sm80" if headdim <= 256 else "mma_wide_sm80"
    served = torch.cuda.get_device_capability()[0] == 9 and headdim <= 256
    assert fa.backward_query(x, x, x, block_mask=blocks).kernel == (kernel_of(headdim) if served else rest)
    for more in {"softcap": 9.0}, {"alibi_slopes": torch.ones(2, device="cuda")}, {"dropout_p": 0.1, "dropout_seed": 1}:
        assert fa.backward_query(x, x, x, block_mask=blocks, **more).kernel == rest
