"""Masks by blocks in PyTorch and JAX programs: recorded, compiled, mapped and cut calls equal those with the same dense
mask."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import torch

import flash_attn_minimal as fa

jax = pytest.importorskip("jax")
from jax import numpy as jnp  # noqa: E402

needs_torch = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")


def inputs(seed=0, heads=4, entries=2, rows=130, keys=200):
    """q, k, v, block_mask and the same mask as a dense one."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((2, n, h, 16), np.float32) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    blocks = rng.random((entries, heads, -(-rows // 64), -(-keys // 128))) < 0.6
    dense = blocks.repeat(64, axis=2).repeat(128, axis=3)[:, :, :rows, :keys].repeat(4 // heads, axis=1)
    return (q, k, v), blocks, dense


def close(got, want):
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=3e-5)


def gradients(function, arrays):
    arrays = [x.detach().requires_grad_() for x in arrays]
    out, lse = function(*arrays)
    loss = out.sin().sum() + torch.where(lse.isneginf(), 0, lse).cos().sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, arrays))]


@needs_torch
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_gradients(compiled, heads):
    for seed in range(1 if compiled else 3):  # the third call repeats the second
        arrays, blocks, dense = inputs(seed, heads)
        arrays, blocks, dense = [torch.tensor(x) for x in arrays], torch.tensor(blocks), torch.tensor(dense)

        def attend(q, k, v, blocks=blocks):
            return fa.flash_attn_func(q, k, v, causal=True, block_mask=blocks, return_lse=True)

        torch._dynamo.reset()
        call = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
        want = gradients(lambda *x: fa.flash_attn_func(*x, causal=True, mask=dense, return_lse=True), arrays)  # noqa: B023
        close(gradients(call, arrays), want)


@needs_torch
@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_torch_vmap(shared, entries):
    sets = [inputs(seed, entries=entries) for seed in range(3)]
    qkv = [torch.tensor(np.stack(x)) for x in zip(*(s[0] for s in sets), strict=True)]
    blocks = torch.tensor(sets[0][1]) if shared else torch.tensor(np.stack([s[1] for s in sets]))

    def loss(q, k, v, blocks):
        return fa.flash_attn_func(q, k, v, block_mask=blocks).sin().sum()

    got = torch.vmap(torch.func.grad(loss, (0, 1, 2)), (0, 0, 0, None if shared else 0))(*qkv, blocks)
    for i in range(3):
        own = [x[i] for x in qkv]
        close([x[i] for x in got], torch.func.grad(loss, (0, 1, 2))(*own, blocks if shared else blocks[i]))


@needs_torch
def test_torch_refuses_other_arrays():
    (q, k, v), blocks, _ = inputs()
    q, k, v = map(torch.tensor, (q, k, v))
    with pytest.raises(fa.BadArgument, match="block_mask is a NumPy array|block_mask is a numpy"):
        fa.flash_attn_func(q.requires_grad_(), k, v, block_mask=blocks)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_jax_gradients(heads):
    arrays, blocks, dense = inputs(0, heads)
    arrays = [jnp.asarray(x) for x in arrays]

    def loss(options, q, k, v, mask):
        out, lse = fa.flash_attn_func(q, k, v, causal=True, return_lse=True, **{options: mask})
        return jnp.sin(out).sum() + jnp.cos(jnp.where(jnp.isneginf(lse), 0, lse)).sum()

    def both(name, mask):
        value, grads = jax.jit(jax.value_and_grad(loss, (1, 2, 3)), static_argnums=0)(name, *arrays, jnp.asarray(mask))
        return [value / 1e3, *grads]

    close(both("block_mask", blocks), both("mask", dense))


def test_jax_vmap():
    sets = [inputs(seed) for seed in range(2)]
    arrays = [jnp.stack([jnp.asarray(x) for x in part]) for part in zip(*(s[0] for s in sets), strict=True)]
    attend = lambda q, k, v, x: fa.flash_attn_func(q, k, v, block_mask=x)  # noqa: E731
    got = jax.jit(jax.vmap(attend))(*arrays, jnp.stack([jnp.asarray(s[1]) for s in sets]))
    close(got, [fa.flash_attn_func(*s[0], mask=s[2]) for s in sets])


@pytest.mark.parametrize("mask_heads", [1, 2, 4])
def test_shares_of_devices_get_their_own_blocks(mask_heads):
    """The heads' axis of the mask is cut like that of q or of k."""
    from flash_attn_minimal._core.options import Options
    from flash_attn_minimal.jax._attention import _Passes

    arrays, blocks, _ = inputs(0, mask_heads)
    given = dict(zip(("q", "k", "v", "block_mask"), [jnp.asarray(x) for x in (*arrays, blocks)], strict=True))
    axes, _ = _Passes(tuple(given), (), Options())._axes(given)
    heads = {1: None, 2: "heads", 4: ("heads", "group")}[mask_heads]
    assert axes["block_mask"] == ("batch", heads, None, None)
