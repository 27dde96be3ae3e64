"""Masks by intervals in PyTorch: recorded, compiled, mapped and traced calls equal those with the same dense mask."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_lab import reference  # noqa: E402
from flash_attn_lab.fuzz.arrays import random_intervals  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]
FORMS = [(True, 1, 1), (True, 2, 2), (False, 2, 4), (False, 4, 1)]  # causal, numbers, heads


def inputs(device, form, seed=0, batch=2, entries=2):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(batch, n, h, 16, device=device) for n, h in ((70, 4), (90, 2), (90, 2)))
    causal, numbers, heads = form
    indices = random_intervals(np.random.default_rng(seed), (entries, heads, 90, numbers), 70)
    seen = reference.dense_from_intervals(indices, 70, causal).repeat(4 // heads, axis=1)
    return (q, k, v), torch.tensor(indices, device=device), torch.tensor(seen, device=device)


def gradients(function, arrays):
    arrays = [x.detach().requires_grad_() for x in arrays]
    out, lse = function(*arrays)
    loss = out.sin().sum() + torch.where(lse.isneginf(), 0, lse).cos().sum()
    return out, lse, *torch.autograd.grad(loss, arrays)


def close(got, want):
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, atol=2e-5, rtol=2e-5)


def calls(indices, seen, causal):
    def by_intervals(q, k, v):
        return fa.flash_attn_func(q, k, v, causal=causal, startend_row_indices=indices, return_lse=True)

    def dense(q, k, v):
        return fa.flash_attn_func(q, k, v, causal=causal, mask=seen, return_lse=True)

    return by_intervals, dense


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_recorded(device, form):
    for seed in range(3):  # the third call repeats the second
        arrays, indices, seen = inputs(device, form, seed)
        by_intervals, dense = calls(indices, seen, form[0])
        close(gradients(by_intervals, arrays), gradients(dense, arrays))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_compiled(device, form):
    arrays, indices, seen = inputs(device, form)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def by_intervals(q, k, v, indices):
        return fa.flash_attn_func(q, k, v, causal=form[0], startend_row_indices=indices, return_lse=True)

    want = gradients(calls(indices, seen, form[0])[1], arrays)
    close(gradients(lambda *x: by_intervals(*x, indices), arrays), want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shared", ["nothing", "intervals", "qkv"])
def test_vmap(device, shared):
    form = (False, 2, 2)
    sets = [inputs(device, form, seed) for seed in range(3)]
    qkv = sets[0][0] if shared == "qkv" else [torch.stack(x) for x in zip(*(s[0] for s in sets), strict=True)]
    indices = sets[0][1] if shared == "intervals" else torch.stack([s[1] for s in sets])
    dims = (None,) * 3 if shared == "qkv" else (0,) * 3, None if shared == "intervals" else 0

    def attend(q, k, v, indices):
        return fa.flash_attn_func(q, k, v, startend_row_indices=indices, return_lse=True)

    got = torch.vmap(attend, (*dims[0], dims[1]))(*qkv, indices)
    for i in range(3):
        arrays, own = sets[0 if shared == "qkv" else i][0], sets[0 if shared == "intervals" else i][1]
        close([x[i] for x in got], attend(*arrays, own))

    def loss(q, k, v, indices):
        out, lse = attend(q, k, v, indices)
        return out.sin().sum() + torch.where(lse.isneginf(), 0, lse).cos().sum()

    got = torch.vmap(torch.func.grad(loss, (0, 1, 2)), (*dims[0], dims[1]))(*qkv, indices)
    for i in range(3):
        arrays, own = sets[0 if shared == "qkv" else i][0], sets[0 if shared == "intervals" else i][1]
        close([x[i] for x in got], gradients(lambda *a, own=own: attend(*a, own), arrays)[2:])


@pytest.mark.parametrize("device", DEVICES)
def test_vmap_of_one_entry_for_the_batch(device):
    sets = [inputs(device, (True, 1, 1), seed, entries=1) for seed in range(2)]
    qkv = [torch.stack(x) for x in zip(*(s[0] for s in sets), strict=True)]
    indices = torch.stack([s[1] for s in sets])
    attend = lambda q, k, v, x: fa.flash_attn_func(q, k, v, causal=True, startend_row_indices=x)  # noqa: E731
    got = torch.vmap(attend)(*qkv, indices)
    close(got, [attend(*arrays, own) for arrays, own, _ in sets])


@pytest.mark.parametrize("device", DEVICES)
def test_varlen(device):
    rng = np.random.default_rng(0)
    q, k, v = (
        torch.tensor(rng.standard_normal((n, h, 16), np.float32), device=device) for n, h in ((70, 4), (90, 2), (90, 2))
    )
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 30, 70], [0, 41, 90]))
    indices = torch.tensor(random_intervals(rng, (2, 90, 2), 40), device=device)

    def packed(q, k, v):
        return fa.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 40, 49, causal=True, startend_row_indices=indices, return_lse=True
        )

    def one_by_one(q, k, v):
        found = []
        for rows, keys in ((slice(0, 30), slice(0, 41)), (slice(30, 70), slice(41, 90))):
            own = indices[None, :, keys]
            found.append(fa.flash_attn_func(q[None, rows], k[None, keys], v[None, keys], causal=True,
                                            startend_row_indices=own, return_lse=True))  # fmt: skip
        return torch.cat([x[0][0] for x in found]), torch.cat([x[1][0] for x in found], 1)

    want = gradients(one_by_one, (q, k, v))
    close(gradients(packed, (q, k, v)), want)
    torch._dynamo.reset()
    close(gradients(torch.compile(packed, fullgraph=True, backend="aot_eager"), (q, k, v)), want)


def test_fake_tensors_and_export():
    arrays, indices, seen = inputs("cpu", (True, 1, 1))
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (*arrays, indices)]
        out, lse = fa.flash_attn_func(*fakes[:3], causal=True, startend_row_indices=fakes[3], return_lse=True)
    assert out.shape == arrays[0].shape and lse.shape == (2, 4, 70)

    class Model(torch.nn.Module):
        def forward(self, q, k, v, indices):
            return fa.flash_attn_func(q, k, v, causal=True, startend_row_indices=indices)

    program = torch.export.export(Model(), (*arrays, indices)).module()
    close([program(*arrays, indices)], [fa.flash_attn_func(*arrays, causal=True, mask=seen)])


def test_a_numpy_array_is_refused_by_name():
    arrays, indices, _ = inputs("cpu", (True, 1, 1))
    for requires in (False, True):
        q = arrays[0].requires_grad_(requires)
        with pytest.raises(
            fa.BadArgument,
            match="startend_row_indices is a (numpy.ndarray|NumPy array), but q is a PyTorch",
        ):
            fa.flash_attn_func(q, *arrays[1:], causal=True, startend_row_indices=indices.numpy())
