"""flashmask_attention, FlashMask's function, against a dense mask."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_lab import reference  # noqa: E402
from flash_attn_lab.fuzz.arrays import random_intervals  # noqa: E402
from flash_attn_minimal.integrations.flashmask import flashmask_attention  # noqa: E402

FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]  # causal and the numbers of a key


def arrays(rows=300, keys=300, heads=4, heads_k=2):
    generator = torch.Generator().manual_seed(0)
    sizes = (rows, heads), (keys, heads_k), (keys, heads_k)
    return [torch.randn(2, *size, 32, generator=generator).requires_grad_() for size in sizes]


@pytest.mark.parametrize("blocks", [None, torch.int32, torch.bool])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_intervals_and_blocks(form, blocks):
    causal, numbers = form
    q, k, v = arrays()
    indices = random_intervals(np.random.default_rng(1), (2, 2, 300, numbers), 300)
    mask = torch.tensor(reference.dense_from_intervals(indices, 300, causal)).repeat_interleave(2, 1)
    given = {}
    if blocks is not None:
        kept = torch.rand(2, 1, 3, 3, generator=torch.Generator().manual_seed(2)) < 0.6
        given["block_mask"] = kept.to(blocks)
        mask = mask & kept.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :300, :300]
    got = flashmask_attention(
        q, k, v, torch.tensor(indices), causal=causal, return_softmax_lse=True, softmax_scale=0.3, **given
    )
    want = fa.flash_attn_func(q, k, v, mask=mask, causal=causal, return_lse=True, softmax_scale=0.3)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)
    grads = (torch.autograd.grad(out.sin().sum(), (q, k, v)) for out, _ in (got, want))
    for x, y in zip(*grads, strict=True):
        torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-5)


def test_other_arguments():
    q, k, v = arrays()
    for window, causal in ((3, True), ((4, 2), False), (5, False)):
        pair = window if isinstance(window, tuple) else (window, window)
        want = fa.flash_attn_func(q, k, v, causal=causal, window_size=pair)
        assert torch.equal(flashmask_attention(q, k, v, causal=causal, window_size=window), want)
    plain = fa.flash_attn_func(q, k, v)
    assert torch.equal(flashmask_attention(q, k, v, dropout=0.5, training=False), plain)
    assert not torch.equal(flashmask_attention(q, k, v, dropout=0.5), plain)
    for name, value in (("return_seed_offset", True), ("fixed_seed_offset", torch.ones(2)), ("rng_name", "x")):
        with pytest.raises(fa.Unsupported, match=f"{name} is given"):
            flashmask_attention(q, k, v, **{name: value})
    with pytest.raises(fa.BadArgument, match="block_mask has shape"):
        flashmask_attention(q, k, v, block_mask=torch.ones(2, 1, 2, 3))
