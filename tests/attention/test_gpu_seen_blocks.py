"""Masks by blocks and masks of pairs in Hopper's kernels: which calls they take, and that these calls are right where
tiles are hidden, whole or cut, and where keys that nobody sees hold NaN. Needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, Kernel, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

NAME = "wgmma_sm90"
FORWARD = Kernel(CUDA, NAME)
BLOCKS = [(64, 64), (128, 128), (64, 128), (128, 64)]
SHAPES = [(700, 900, 1), (900, 700, 2), (333, 333, 6), (1, 500, 1), (450, 64, 6), (130, 2300, 2)]
PLANS = [(64, "d64_blocks"), (72, "d128_blocks"), (128, "d128_blocks"), (192, "d256_blocks"), (256, "d256_blocks")]
OPTIONS = {
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (160, 90)},
    "left edge": {"window_size": (70, -1)},
    "sinks": {"sinks": True},
    "large scores": {"spread": 3e3},
    "overflow": {"spread": 30.0},
    "both": {"mask": (True, True, True)},
    "both, keys": {"mask": (True, False, False)},
}


def case_of(shape, headdim, dtype="bfloat16", **more):
    rows, keys, _ = shape
    return Case(rows, keys, headdim, batch=2, nheads=6, nheads_k=2, dtype=dtype, **more)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 256])
def test_blocks(headdim, blocks, shape, dtype):
    for seed, rate in enumerate((0.1, 0.5, 0.9)):
        FORWARD.check(case_of(shape, headdim, dtype, seed=seed, blocks=(shape[2], *blocks), block_rate=rate))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axes", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 256])
def test_pairs(headdim, axes, shape, dtype):
    for seed in range(3):
        FORWARD.check(case_of(shape, headdim, dtype, seed=seed, mask=(*axes, True)))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_beside_options(headdim, option):
    for shape in SHAPES[:3]:
        FORWARD.check(case_of(shape, headdim, "float16", blocks=(shape[2], 64, 64), **OPTIONS[option]))
        if "mask" not in OPTIONS[option]:
            FORWARD.check(case_of(shape, headdim, "float16", mask=(True, True, True), **OPTIONS[option]))


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_packed_sequences(headdim, blocks, heads):
    cu_q, cu_k = (0, 1, 200, 200, 537, 900), (0, 130, 130, 330, 790, 1153)  # the second has no keys, the third no rows
    for causal in (False, True):
        more = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "causal": causal}
        FORWARD.check(case_of((363, 460, heads), headdim, blocks=(heads, *blocks), **more))


def squares(rng, batch, heads, rows, keys):
    """Hidden, mixed and seen squares of 64 x 64, and rows that see nothing."""
    of_square = (
        rng.random((batch, heads, -(-rows // 64), -(-keys // 64))).repeat(64, 2).repeat(64, 3)[..., :rows, :keys]
    )
    mixed = rng.random((batch, heads, rows, keys)) < 0.3
    return ((of_square < 0.35) | ((of_square < 0.6) & mixed)) & (rng.random((batch, heads, rows, 1)) < 0.9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["squares", "whole", "few", "keys nobody sees", "late"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_patterns(headdim, kind, causal):
    """More items than multiprocessors, so that a block takes several. Keys that nobody sees hold NaN. The rows of the
    mask lie apart and begin at any byte."""
    rng = np.random.default_rng(headdim)
    batch, rows, keys, heads = 4, 1100, 1337, 12
    mask = {
        "squares": lambda: squares(rng, batch, heads, rows, keys),
        "whole": lambda: np.ones((1, 1, rows, keys), bool),
        "few": lambda: rng.random((batch, 1, rows, keys)) < 1e-3,
        "keys nobody sees": lambda: (
            (rng.random((1, 1, rows, keys)) < 0.5) & (rng.random((batch, heads, 1, keys)) < 0.3)
        ),
        "late": lambda: np.arange(keys) < 64 * (1 + np.arange(rows)[:, None] % 7) + np.zeros((1, 1, 1, 1), int),
    }[kind]()
    q = rng.standard_normal((batch, rows, heads, headdim), np.float32)
    k, v = rng.standard_normal((2, batch, keys, 4, headdim), np.float32)
    q, k, v = (torch.from_numpy(x).bfloat16().float().numpy() for x in (q, k, v))
    out, lse = reference.standard_attention(q, k, v, mask=mask, causal=causal)
    seen = np.broadcast_to(mask, (batch, heads, rows, keys))
    if causal:
        seen = seen & (np.arange(keys) <= np.arange(rows)[:, None] + keys - rows)
    nobody = ~seen.any(2).reshape(batch, 4, 3, keys).any(2).transpose(0, 2, 1)  # batch, keys, key heads
    assert nobody.any() or kind not in ("few", "keys nobody sees")
    k, v = (np.where(nobody[..., None], np.float32(np.nan), x) for x in (k, v))
    apart = np.ones((*mask.shape[:3], keys + 5), bool)
    apart[..., 3 : 3 + keys] = mask
    got = FORWARD(q, k, v, "bfloat16", mask=apart[..., 3 : 3 + keys], causal=causal)
    np.testing.assert_allclose(got[0], out, atol=3e-2)
    np.testing.assert_allclose(got[1], lse, atol=5e-5)


@pytest.mark.parametrize("option", ["block_mask", "mask"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_everything_hidden(headdim, option):
    x = np.random.default_rng(0).standard_normal((2, 400, 2, headdim), np.float32)
    nan = np.full_like(x, np.nan)
    shape = (1, 1, 7, 7) if option == "block_mask" else (1, 1, 400, 400)
    out, lse = FORWARD(x, nan, nan, "float16", **{option: np.zeros(shape, bool)})
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("option", ["block_mask", "mask"])
@pytest.mark.parametrize("headdim", [64, 128])
def test_same_as_the_general_kernel(headdim, option):
    """At a size where every block takes many items: 8192 keys, 32 heads."""
    torch.manual_seed(0)
    q = torch.randn(1, 8192, 32, headdim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 8192, 8, headdim, device="cuda", dtype=torch.bfloat16)
    seen = torch.rand(1, 8, 64, 64, device="cuda") < 0.3
    if option == "mask":
        seen = seen[:, :1].repeat_interleave(128, 2).repeat_interleave(128, 3)
        seen[:, :, 1000:3000] &= torch.rand(1, 1, 2000, 8192, device="cuda") < 0.5
    results = [
        fa.flash_attn_func(q, k, v, return_lse=True, kernel=kernel, **{option: seen}) for kernel in (NAME, "mma_sm80")
    ]
    for got, want in zip(*results, strict=True):
        assert (torch.isinf(got) == torch.isinf(want)).all()
        finite = torch.isfinite(want)
        scale = want[finite].float().abs().max()
        assert ((got.float() - want.float())[finite].abs().max() / scale).item() < 1.5e-2


@pytest.mark.parametrize(("headdim", "plan"), PLANS)
def test_which_plan(headdim, plan):
    x = torch.zeros(1, 2048, 2, headdim, device="cuda", dtype=torch.bfloat16)
    blocks = {"block_mask": torch.ones(1, 1, 16, 16, device="cuda", dtype=torch.bool)}
    pairs = {"mask": torch.ones(1, 1, 2048, 2048, device="cuda", dtype=torch.bool)}
    found = fa.query(x, x, x, **blocks)
    if torch.cuda.get_device_capability()[0] != 9:
        assert found.kernel == "mma_sm80"
        return
    for options in (blocks, pairs, blocks | pairs, blocks | {"causal": True}, blocks | {"window_size": (100, 3)}):
        found = fa.query(x, x, x, **options)
        assert (found.kernel, found.variant) == (NAME, plan)
    blocks = {"block_mask": torch.ones(1, 1, 16, 32, device="cuda", dtype=torch.bool)}
    assert fa.query(x, x, x, **blocks).variant == (plan if headdim > 128 else plan + "64")
    others = {"softcap": 9.0}, {"alibi_slopes": torch.ones(2, device="cuda")}, {"dropout_p": 0.1, "dropout_seed": 1}
    for more in (*others, {"return_max_score": True}):
        assert fa.query(x, x, x, **blocks, **more).kernel == "mma_sm80"
