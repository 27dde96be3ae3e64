"""The stand-ins for flash_attn and flash_attn_interface: every function against float64, and their installation."""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import CUDA_DEVICES, ROOT

torch = pytest.importorskip("torch", reason="the stand-in takes and returns PyTorch's tensors")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_lab import reference  # noqa: E402
from flash_attn_minimal.integrations import flash_attn as fa2  # noqa: E402
from flash_attn_minimal.integrations.flash_attn import flash_attn_interface, hopper  # noqa: E402

HAS_CUDA = CUDA_DEVICES and torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device for the library and PyTorch")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_CUDA)])
HEADS, HEADS_K, DIM, DIM_V = 4, 2, 16, 24
CU_Q, CU_K = (0, 7, 7, 30, 41), (0, 19, 24, 24, 61)
SCORES = [
    {},
    {"causal": True},
    {"window_size": (9, 3)},
    {"window_size": torch.tensor([5, -7])},  # flash_attn takes any negative number for an open end
    {"softcap": 2.0, "softmax_scale": 0.4, "causal": True},
    {"alibi_slopes": np.linspace(0.05, 0.4, HEADS, dtype=np.float32)},
]
HOPPER_SCORES = [*SCORES[:-1], {"attention_chunk": 8, "causal": True}, {"attention_chunk": 5, "window_size": (9, 3)}]


def normal(device, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(device).requires_grad_()


def lengths(device, *numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def on(device, scores):
    """The options, with arrays as tensors on the device."""
    return {n: torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x for n, x in scores.items()}


def exactly(scores):
    """The options in the form that the reference takes."""
    window = scores.get("window_size")
    return scores if window is None else scores | {"window_size": tuple(max(int(edge), -1) for edge in window)}


def numpy(*tensors):
    return [x.detach().double().cpu().numpy() for x in tensors]


def close(got, want, tolerance=2e-5):
    (got,) = numpy(got)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def weights(out):
    """Weights for a loss, which is their product with out."""
    return torch.sin(torch.arange(out.numel(), dtype=torch.float32)).reshape(out.shape).to(out)


# ---- FlashAttention-2's functions ----


def dense(device, form):
    """The array arguments for a form of flash_attn_func (packed or not), and views of them as q, k, v."""
    if form == "qkvpacked":
        qkv = normal(device, 2, 23, 3, HEADS, DIM)
        return (qkv,), qkv.unbind(2)
    q = normal(device, 2, 23, HEADS, DIM)
    if form == "kvpacked":
        kv = normal(device, 2, 37, 2, HEADS_K, DIM)
        return (q, kv), (q, *kv.unbind(2))
    k, v = normal(device, 2, 37, HEADS_K, DIM), normal(device, 2, 37, HEADS_K, DIM_V, seed=1)
    return (q, k, v), (q, k, v)


@DEVICES
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("form", ["", "kvpacked", "qkvpacked"])
def test_dense(device, form, scores):
    given, qkv = dense(device, form)
    function = getattr(fa2, f"flash_attn_{form}_func" if form else "flash_attn_func")
    out, lse, s_dmask = function(*given, **on(device, scores), return_attn_probs=True)
    exact, exact_lse = reference.standard_attention(*numpy(*qkv), **exactly(scores))
    close(out, exact), close(lse, exact_lse)
    assert s_dmask.numel() == 0
    gradients = torch.autograd.grad(out, given, weights(out))
    want = reference.standard_attention_backward(*numpy(weights(out), *qkv), **exactly(scores))[:3]
    for got, wanted in zip(gradients, packed(form, want, 2), strict=True):
        close(got, wanted, 1e-4)
    assert torch.equal(function(*given, **on(device, scores)), out)


def packed(form, gradients, axis):
    dq, dk, dv = gradients
    if form == "qkvpacked":
        return (np.stack([dq, dk, dv], axis),)
    return (dq, np.stack([dk, dv], axis)) if form == "kvpacked" else (dq, dk, dv)


@DEVICES
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("form", ["", "kvpacked", "qkvpacked"])
def test_varlen(device, form, scores):
    cu_k = CU_Q if form == "qkvpacked" else CU_K
    given, qkv = dense(device, form)
    totals = (CU_Q[-1], cu_k[-1], cu_k[-1])
    given = [normal(device, total, *x.shape[2:]) for x, total in zip(given, totals, strict=False)]
    qkv = [x for y in given for x in (y.unbind(1) if y.ndim == 4 else (y,))]
    cu = lengths(device, *CU_Q), lengths(device, *cu_k)
    longest = (23, 37)
    where = (cu[0], 23) if form == "qkvpacked" else (*cu, *longest)
    function = getattr(fa2, f"flash_attn_varlen_{form}_func" if form else "flash_attn_varlen_func")
    out, lse, _ = function(*given, *where, **on(device, scores), return_attn_probs=True)
    options = (CU_Q, cu_k)
    exact, exact_lse = reference.varlen(reference.standard_attention, *numpy(*qkv), *options, **exactly(scores))
    close(out, exact), close(lse, exact_lse)
    gradients = torch.autograd.grad(out, given, weights(out))
    want = reference.varlen_backward(
        reference.standard_attention_backward, *numpy(weights(out), *qkv), *options, **exactly(scores)
    )[:3]
    for got, wanted in zip(gradients, packed(form, want, 1), strict=True):
        close(got, wanted, 1e-4)


def dropped(q, k, v, s_dmask, lse, dropout_p, **scores):
    """Attention in float64 with the dropout that S_dmask shows. Checks first that S_dmask is P, relative to the
    greatest element of each row."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / math.sqrt(q.shape[-1])
    if scores.get("causal"):
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + s.shape[3] - s.shape[2]), -torch.inf)
    p = s.softmax(-1).nan_to_num(0)
    relative = (s - s.amax(-1, keepdim=True)).exp().nan_to_num(0)
    close(s_dmask.abs(), relative.detach().cpu().numpy(), 2e-4)
    close(lse, s.logsumexp(-1).detach().cpu().numpy())
    return torch.einsum("bhij,bjhd->bihd", p * (s_dmask >= 0) / (1 - round(256 * dropout_p) / 256), v.double())


@DEVICES
@pytest.mark.parametrize("causal", [False, True])
def test_dropout(device, causal):
    """The seed comes from PyTorch's generator: manual_seed repeats a call, and the next call drops other elements."""
    (q, k, v), _ = dense(device, "")
    torch.manual_seed(5)
    first, lse, s_dmask = fa2.flash_attn_func(q, k, v, 0.3, causal=causal, return_attn_probs=True)
    second = fa2.flash_attn_func(q, k, v, 0.3, causal=causal)
    torch.manual_seed(5)
    assert torch.equal(fa2.flash_attn_func(q, k, v, 0.3, causal=causal), first)
    assert torch.equal(fa2.flash_attn_func(q, k, v, 0.3, causal=causal), second) and not torch.equal(first, second)
    want = dropped(q, k, v, s_dmask, lse, 0.3, causal=causal)
    close(first, want.detach().cpu().numpy(), 1e-4)
    assert 0.2 < (s_dmask < 0).sum() / (s_dmask != 0).sum() < 0.4
    gradients = [torch.autograd.grad(out, (q, k, v), weights(out)) for out in (first, want)]
    for got, wanted in zip(*gradients, strict=True):
        close(got, *numpy(wanted), 1e-4)


@DEVICES
def test_dropout_of_packed_sequences(device):
    cu = lengths(device, 0, 9, 9, 20), lengths(device, 0, 14, 17, 31)
    q, k, v = (normal(device, n, h, DIM) for n, h in ((20, HEADS), (31, HEADS_K), (31, HEADS_K)))
    out, lse, s_dmask = fa2.flash_attn_varlen_func(q, k, v, *cu, 11, 14, 0.4, causal=True, return_attn_probs=True)
    assert s_dmask.shape == (3, HEADS, 11, 14)
    for b, (rows, keys) in enumerate(((slice(0, 9), slice(0, 14)), (slice(9, 20), slice(17, 31)))):
        b += b  # the sequence between them has no rows
        s = s_dmask[b : b + 1, :, : rows.stop - rows.start, : keys.stop - keys.start]
        want = dropped(q[None, rows], k[None, keys], v[None, keys], s, lse[None, :, rows], 0.4, causal=True)
        close(out[None, rows], *numpy(want), 1e-4)


@DEVICES
def test_checkpointing_drops_the_same(device):
    """Activation checkpointing runs the forward pass twice, from the same state of the generator."""
    (q, k, v), _ = dense(device, "")
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(1)
    plain = fa2.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(1)
    again = checkpoint(fa2.flash_attn_func, q, k, v, 0.5, use_reentrant=False)
    gradients = [torch.autograd.grad(out, (q, k, v), weights(out)) for out in (plain, again)]
    for got, want in zip(*gradients, strict=True):
        assert torch.equal(got, want)


@DEVICES
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_compiled(device, dropout_p):
    """torch.compile traces a call into one graph; with dropout, around the draw of the seed, into several."""
    pytest.importorskip("flash_attn_minimal.torch")
    qkv = normal(device, 2, 23, 3, HEADS, DIM)
    compiled = torch.compile(fa2.flash_attn_qkvpacked_func, fullgraph=not dropout_p, backend="aot_eager")
    for seed in (0, 1):
        results = []
        for function in (compiled, fa2.flash_attn_qkvpacked_func):
            torch.manual_seed(seed)
            out = function(qkv, dropout_p, causal=True)
            results.append((out, *torch.autograd.grad(out, qkv, weights(out))))
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@DEVICES
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_passes_apart(device, dropout_p):
    """_flash_attn_forward and _flash_attn_backward, and their packed forms, give the results of autograd."""
    (q, k, v), _ = dense(device, "")
    options = {"softmax_scale": 0.3, "causal": True, "window_size_left": 20, "window_size_right": 0, "softcap": 0.0}
    options |= {"alibi_slopes": None, "dropout_p": dropout_p}
    public = {"softmax_scale": 0.3, "causal": True, "window_size": (20, 0), "dropout_p": dropout_p}
    cu = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (23, 37)]
    flat = [x.detach().flatten(0, 1) for x in (q, k, v)]
    for where in ({}, {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 23, "max_seqlen_k": 37}):
        x = [y.detach() for y in (q, k, v)] if not where else flat
        name = "_flash_attn_varlen" if where else "_flash_attn"
        forward, backward = (getattr(flash_attn_interface, f"{name}_{which}") for which in ("forward", "backward"))
        torch.manual_seed(3)
        out, lse, _, rng_state = forward(*x, **where, **options, return_softmax=False)
        torch.manual_seed(3)
        want = fa2.flash_attn_func(q, k, v, **public)
        assert torch.equal(out.view_as(want), want)
        gradients = [torch.full_like(y, torch.nan) for y in x]
        rest = {"deterministic": False, "rng_state": rng_state}
        delta = backward(weights(out), *x, out, lse, *gradients, **where, **options, **rest)
        close(delta.sum(), (weights(out) * out).sum().item(), 1e-3)
        for got, wanted in zip(gradients, torch.autograd.grad(want, (q, k, v), weights(want)), strict=True):
            torch.testing.assert_close(got.view_as(wanted), wanted, atol=1e-5, rtol=1e-5)


@DEVICES
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows_over_pages(device, causal):
    """flash_attn_varlen_func with a block_table."""
    page, pages = 8, 7
    q, cu_q, used = normal(device, CU_Q[-1], HEADS, DIM).detach(), lengths(device, *CU_Q), (51, 3, 0, 56)
    k, v = (normal(device, 40, page, HEADS_K, d).detach() for d in (DIM, DIM_V))
    table = torch.randperm(40, generator=torch.Generator().manual_seed(0))[: 4 * pages].view(4, pages)
    cu_k = lengths(device, *np.cumsum([0, *used]))
    out, lse, _ = fa2.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 23, 56, causal=causal, block_table=table.int().to(device), return_attn_probs=True
    )
    for b in range(4):
        rows = slice(CU_Q[b], CU_Q[b + 1])
        cache = {"cache_seqlens": [used[b]], "block_table": table[b : b + 1].numpy()}
        exact = reference.kvcache_attention(numpy(q)[0][None, rows], *numpy(k, v), **cache, causal=causal)
        close(out[None, rows], exact[0]), close(lse[None, :, rows], exact[1])


@DEVICES
def test_cache(device):
    """flash_attn_with_kvcache: padding on the left, new keys and rotary tables, and tables without new keys."""
    rows, used, padding = 40, (30, 4), (11, 0)
    q, new = normal(device, 2, 3, HEADS, DIM).detach(), [normal(device, 2, 3, HEADS_K, d).detach() for d in (DIM, DIM)]
    angle = torch.outer(torch.arange(rows), 10.0 ** -torch.arange(4)).to(device)
    turn = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin()}
    given = {"cache_seqlens": lengths(device, *used), "cache_leftpad": lengths(device, *padding)}
    for keys in ((), new):
        cache = [normal(device, 2, rows, HEADS_K, DIM, seed=i).detach() for i in (0, 1)]
        before = numpy(*cache)
        out, lse = fa2.flash_attn_with_kvcache(
            q, *cache, *keys, **turn, **given, causal=True, rotary_interleaved=False, return_softmax_lse=True
        )
        arrays = {name: x.cpu().numpy() for name, x in (turn | given).items()}
        exact = reference.kvcache_attention(
            *numpy(q), *before, *numpy(*keys), **arrays, causal=True, rotary_interleaved=False
        )
        close(out, exact[0]), close(lse, exact[1])


# ---- FlashAttention-3's ----


@DEVICES
@pytest.mark.parametrize("scores", HOPPER_SCORES, ids=str)
def test_hopper_dense(device, scores):
    given, qkv = dense(device, "")
    out, lse = hopper.flash_attn_func(
        *given, **scores, num_splits=3, pack_gqa=True, sm_margin=8, return_attn_probs=True
    )
    exact, exact_lse = reference.standard_attention(*numpy(*qkv), **exactly(scores))
    close(out, exact), close(lse, exact_lse)
    want = reference.standard_attention_backward(*numpy(weights(out), *qkv), **exactly(scores))[:3]
    for got, wanted in zip(torch.autograd.grad(out, given, weights(out)), want, strict=True):
        close(got, wanted, 1e-4)


@DEVICES
def test_hopper_packed(device):
    qkv = normal(device, 2, 23, HEADS + 2 * HEADS_K, DIM)
    out = hopper.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=HEADS)
    q, k, v = qkv[:, :, :HEADS], qkv[:, :, HEADS:-HEADS_K], qkv[:, :, -HEADS_K:]
    close(out, reference.standard_attention(*numpy(q, k, v), causal=True)[0])
    want = reference.standard_attention_backward(*numpy(weights(out), q, k, v), causal=True)[:3]
    close(torch.autograd.grad(out, qkv, weights(out))[0], np.concatenate(want, 2), 1e-4)
    qkv = normal(device, 2, 23, 3, HEADS, DIM)
    close(hopper.flash_attn_qkvpacked_func(qkv), reference.standard_attention(*numpy(*qkv.unbind(2)))[0])


@DEVICES
@pytest.mark.parametrize("scores", HOPPER_SCORES, ids=str)
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_used_rows(device, which, scores):
    """Unused rows hold NaN, and have no gradient."""
    sizes = [np.diff(CU_Q), np.diff(CU_K)]
    used = [sizes[0] - np.array([2, 0, 9, 11]) * (which != "k"), sizes[1] - np.array([0, 3, 0, 37]) * (which != "q")]
    q, k, v = (normal(device, n, h, d) for n, h, d in ((41, HEADS, DIM), (61, HEADS_K, DIM), (61, HEADS_K, DIM_V)))
    rows, keys = (
        np.concatenate([np.arange(a, a + n) for a, n in zip(cu, count, strict=False)])
        for cu, count in zip((CU_Q, CU_K), used, strict=True)
    )
    for x, kept in ((q, rows), (k, keys), (v, keys)):
        x.data[np.setdiff1d(np.arange(len(x)), kept)] = torch.nan
    given = {"seqused_q": lengths(device, *used[0]), "seqused_k": lengths(device, *used[1])}
    given = {n: x for n, x in given.items() if which == "both" or n[-1] == which}
    cu = lengths(device, *CU_Q), lengths(device, *CU_K)
    out, lse = hopper.flash_attn_varlen_func(q, k, v, *cu, 23, 37, **given, **scores, return_attn_probs=True)
    tight = [np.cumsum([0, *count]) for count in used]
    arrays = numpy(q[rows], k[keys], v[keys])
    exact = reference.varlen(reference.standard_attention, *arrays, *tight, **exactly(scores))
    close(out[rows], exact[0]), close(lse[:, rows], exact[1])
    others = np.setdiff1d(np.arange(41), rows)
    assert not out[others].any() and torch.isneginf(lse[:, others]).all()
    dout = weights(out)
    want = reference.varlen_backward(
        reference.standard_attention_backward, *numpy(dout[rows]), *arrays, *tight, **exactly(scores)
    )[:3]
    for got, wanted, kept in zip(torch.autograd.grad(out, (q, k, v), dout), want, (rows, keys, keys), strict=True):
        close(got[kept], wanted, 1e-4)
        assert not got[np.setdiff1d(np.arange(len(got)), kept)].any()


@DEVICES
@pytest.mark.parametrize("headdim_v", [DIM_V, 512])
@pytest.mark.parametrize("scores", [{}, {"causal": True}, {"softcap": 2.0, "attention_chunk": 9}], ids=str)
def test_two_products(device, scores, headdim_v):
    """qv: scores are q k^T + qv v^T. Up to 512 columns in total there are gradients, also of qv."""
    q, qv = normal(device, 2, 23, HEADS, DIM), normal(device, 2, 23, HEADS, headdim_v)
    k, v = normal(device, 2, 37, HEADS_K, DIM), normal(device, 2, 37, HEADS_K, headdim_v)
    out, lse = hopper.flash_attn_func(q, k, v, qv=qv, **scores, return_attn_probs=True)
    long_q, long_k = (np.concatenate(numpy(*pair), -1) for pair in ((q, qv), (k, v)))
    exact = reference.standard_attention(long_q, long_k, *numpy(v), **scores)
    close(out, exact[0], 1e-4), close(lse, exact[1], 1e-4)
    flat = [x.detach().flatten(0, 1).requires_grad_() for x in (q, k, v, qv)]
    cu = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (23, 37)]
    same = hopper.flash_attn_varlen_func(*flat[:3], *cu, 23, 37, qv=flat[3], **scores)
    close(same.view_as(out), exact[0], 1e-4)
    if headdim_v == 512:
        return
    dq, dk, dv = reference.standard_attention_backward(*numpy(weights(out)), long_q, long_k, *numpy(v), **scores)[:3]
    want = dq[..., :DIM], dk[..., :DIM], dv + dk[..., DIM:], dq[..., DIM:]
    for grads in (
        torch.autograd.grad(out, (q, k, v, qv), weights(out)),
        torch.autograd.grad(same, flat, weights(out).view_as(same)),
    ):
        for got, wanted in zip(grads, want, strict=True):
            close(got.view(wanted.shape), wanted, 1e-4)


@pytest.mark.parametrize("wanted", ["the whole", "k", "v"])
def test_gradients_of_columns_of_one_tensor(wanted):
    """v comes before k in one tensor, as in a cache of latent attention. Both get their gradients."""
    joint, q, qv = (normal("cpu", *shape).detach() for shape in ((2, 7, 2, 24), (2, 6, 4, 8), (2, 6, 4, 16)))
    found = []
    for apart in (False, True):
        whole = joint.clone().requires_grad_(wanted == "the whole")
        v, k = whole.split([16, 8], -1)
        if apart:
            v, k = v.clone(), k.clone()
        leaf = whole if wanted == "the whole" else {"k": k, "v": v}[wanted].requires_grad_()
        out = hopper.flash_attn_func(q, k, v, qv=qv, causal=True)
        found.append(torch.autograd.grad(out, leaf, weights(out))[0])
    assert found[0][..., 16 if wanted == "the whole" else 0 :].abs().max() > 0.1
    torch.testing.assert_close(*found)


@DEVICES
@pytest.mark.parametrize("headdim_v", [128, 512])
@pytest.mark.parametrize("max_seqlen_k", [0, 5])
def test_two_products_without_keys(device, headdim_v, max_seqlen_k):
    q, qv = normal(device, 6, 2, 64).detach(), normal(device, 6, 2, headdim_v).detach()
    k, v = (torch.zeros(0, 1, n, device=device) for n in (64, headdim_v))
    cu_q, cu_k = lengths(device, 0, 2, 6), lengths(device, 0, 0, 0)
    for options in ({}, {"causal": True}, {"seqused_k": lengths(device, 0, 0)}):
        out, lse = hopper.flash_attn_varlen_func(
            q, k, v, cu_q, cu_k, 4, max_seqlen_k, qv=qv, return_attn_probs=True, **options
        )
        assert out.shape == (6, 2, headdim_v) and not out.any()
        assert lse.shape == (2, 6) and torch.isneginf(lse).all()


def test_columns_of_one_cache_are_not_copied():
    """Keys and values of latent attention are columns of one cache, and are not copied."""
    from flash_attn_minimal.integrations.flash_attn._caches import joined

    cache = torch.randn(3, 8, 1, 576)
    both, v = joined(cache[..., :512], cache[..., 512:])
    assert both.data_ptr() == v.data_ptr() == cache.data_ptr() and both.stride() == cache.stride()
    assert torch.equal(both, cache)
    apart = torch.randn(3, 8, 1, 64)
    both, v = joined(cache[..., :512], apart)
    assert torch.equal(both, torch.cat([cache[..., :512], apart], -1)) and torch.equal(v, cache[..., :512])


CACHES = {
    "plain": {},
    "left padding": {"leftpad": (3, 0, 0, 20)},
    "pages": {"page": 8},
    "pages of some entries": {"page": 8, "idx": True, "leftpad": (3, 0, 0, 20)},
    "entries": {"idx": True},
    "positions of its own": {"rotary_seqlens": (1, 9, 2, 30)},
    "two products": {"qv": True, "page": 8},
}
CACHE_SCORES = [{}, {"causal": True}, {"window_size": (9, 3)}, {"attention_chunk": 6, "causal": True}]


@DEVICES
@pytest.mark.parametrize("scores", CACHE_SCORES, ids=str)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_hopper_cache(device, varlen, new, kind, scores):
    """Packed rows and packed new keys, rotated, over every kind of cache. Each sequence is compared with the
    reference."""
    how, rows, used = CACHES[kind], 48, (17, 1, 40, 33)
    batch, entries, page = 4, 6, how.get("page", rows)
    rng = np.random.default_rng(0)
    count_q, count_new = ((1, 5, 3, 2), (4, 1, 2, 5)) if varlen else ((5,) * 4, (3,) * 4)
    q = [normal(device, 1, n, HEADS, DIM, seed=i).detach() for i, n in enumerate(count_q)]
    qv = [normal(device, 1, n, HEADS, DIM_V, seed=i).detach() for i, n in enumerate(count_q)]
    k, v = ([normal(device, 1, n, HEADS_K, d, seed=i).detach() for i, n in enumerate(count_new)] for d in (DIM, DIM_V))

    def batched(parts):
        return torch.cat(parts, 1)[0] if varlen else torch.cat(parts)

    def starts(counts):
        return lengths(device, *np.cumsum([0, *counts]))

    idx = rng.permutation(entries)[:batch].astype(np.int32) if how.get("idx") else None
    table = None
    if "page" in how:
        table = rng.permutation(entries * rows // page).reshape(entries, -1)[: entries if how.get("idx") else batch]
        table = table.astype(np.int32)
    shape = (entries * rows // page, page, HEADS_K)
    cache = [normal(device, *shape, d).detach() for d in (DIM, DIM_V)]
    before = [x.clone() for x in cache]
    angle = torch.outer(torch.arange(rows), 10.0 ** -torch.arange(4)).to(device)
    given = {"cache_seqlens": lengths(device, *used)}
    given |= {} if idx is None else {"cache_batch_idx": lengths(device, *idx)}
    given |= {} if table is None else {"page_table": torch.tensor(table, device=device)}
    given |= {"cache_leftpad": lengths(device, *how["leftpad"])} if "leftpad" in how else {}
    given |= {"rotary_seqlens": lengths(device, *how["rotary_seqlens"])} if "rotary_seqlens" in how else {}
    given |= {"cu_seqlens_q": starts(count_q), "max_seqlen_q": max(count_q)} if varlen else {}
    given |= {"k": batched(k), "v": batched(v)} if new else {}
    given |= {"cu_seqlens_k_new": starts(count_new)} if new and varlen else {}
    given |= {"qv": batched(qv)} if how.get("qv") else {}
    metadata = hopper.get_scheduler_metadata(batch, 5, rows, HEADS, HEADS_K, DIM, given["cache_seqlens"])
    out, lse, *_ = hopper.flash_attn_with_kvcache(
        batched(q), *cache, rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_interleaved=False, **given, **scores,
        scheduler_metadata=metadata, num_splits=2, return_softmax_lse=True,
    )  # fmt: skip
    first = 0
    for b in range(batch):
        tables = numpy(angle.cos(), angle.sin())
        position = how.get("rotary_seqlens", used)[b]
        turned = [
            reference.rotary(numpy(x)[0][0], *tables, position + np.arange(x.shape[1]) * ordered, False)[None]
            for x, ordered in ((q[b], bool(scores)), (k[b], True))
        ]
        where = {"cache_seqlens": [used[b]], "cache_leftpad": how.get("leftpad", (0,) * 4)[b : b + 1]}
        if table is not None:
            where["block_table"] = table[b if idx is None else idx[b]][None]
        else:
            where["cache_batch_idx"] = [b if idx is None else idx[b]]
        keys, values = numpy(*before)
        added = (turned[1], *numpy(v[b])) if new else ()
        if how.get("qv"):
            turned[0] = np.concatenate([turned[0], *numpy(qv[b])], -1)
            keys = np.concatenate([keys, values], -1)
            added = (np.concatenate(added, -1), added[1]) if new else ()
        exact = reference.kvcache_attention(turned[0], keys, values, *added, **where, **scores)
        part = slice(first, first + count_q[b])
        got = (out[None, part], lse[None, :, part]) if varlen else (out[b : b + 1], lse[b : b + 1])
        close(got[0], exact[0]), close(got[1], exact[1])
        first += count_q[b]
        if new:  # what joined the cache
            entry, row = where.get("cache_batch_idx", [0])[0], used[b] + np.arange(count_new[b])
            if table is not None:
                entry, row = where["block_table"][0][row // page], row % page
            close(cache[0][entry, row], turned[1][0], 1e-5), close(cache[1][entry, row], *numpy(v[b][0]))
    changed = sum(int((x != y).any(-1).any(-1).sum()) for x, y in zip(cache, before, strict=True))
    assert changed == (2 * sum(count_new) if new else 0)


PREPARED = ["two products", "packed rows", "packed keys", "positions of its own"]


def prepared(device, kind, batch, new):
    """A step that is prepared outside of the core: its arguments without those of the cache. The last sequence has two
    rows of padding after it where k and v are packed."""
    q, qv = normal(device, batch, 2, HEADS, DIM).detach(), normal(device, batch, 2, HEADS, DIM_V).detach()
    k, v = (normal(device, batch, new, HEADS_K, d).detach() for d in (DIM, DIM_V))
    angle = torch.outer(torch.arange(16), 10.0 ** -torch.arange(4)).to(device)
    given = {"q": q, "k": k, "v": v, "rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "causal": True}
    if kind == "two products":
        return given | {"qv": qv}
    if kind == "positions of its own":
        return given | {"rotary_seqlens": lengths(device, *range(batch))}
    given |= {"k": torch.cat([k.flatten(0, 1), k[0, :2] + 1]), "v": torch.cat([v.flatten(0, 1), v[0, :2] + 1])}
    given["cu_seqlens_k_new"] = torch.arange(batch + 1, dtype=torch.int32, device=device) * new
    if kind == "packed rows":
        cu = torch.arange(batch + 1, dtype=torch.int32, device=device) * 2
        given |= {"q": q.flatten(0, 1), "cu_seqlens_q": cu, "max_seqlen_q": 2}
    return given


@DEVICES
@pytest.mark.parametrize("kind", PREPARED)
@pytest.mark.parametrize("place", ["entries", "shared entries", "pages", "shared pages"])
@pytest.mark.parametrize("idle", [(-1, 4, -7), (-1, -2, -3), (13, 4, -1)], ids=str)
@pytest.mark.parametrize("read", [False, True])
def test_sequences_that_append_nothing(device, kind, place, idle, read, monkeypatch):
    """A sequence that is idle, and on a device also one without room, changes nothing, even where its entry, or its row
    of the table, is that of another sequence, and points to the row that this one writes."""
    from flash_attn_minimal.integrations.flash_attn import _caches
    from flash_attn_minimal.integrations.flash_attn.layers import rotary

    if read and (device != "cpu" or idle[0] > 0):
        pytest.skip("lengths on a GPU are not read; on a CPU those above the room are refused")
    if not read:
        for module in (_caches, rotary):
            monkeypatch.setattr(module, "readable", lambda x: False)
    given, rows, where = prepared(device, kind, 3, 4), 16, {}
    cache = [normal(device, 3, rows, HEADS_K, d).detach() for d in (DIM, DIM_V)]
    if place == "shared entries":
        where["cache_batch_idx"] = lengths(device, 1, 1, 1)
    elif "pages" in place:
        cache = [x.reshape(12, 4, HEADS_K, -1) for x in cache]
        table = [[7, 3, 5, 0]] * 3 if "shared" in place else [[1, 2, 4, 6], [7, 3, 5, 0], [8, 9, 10, 11]]
        where["page_table"] = lengths(device, *table)
    before = [x.clone() for x in cache]
    out, lse, *_ = hopper.flash_attn_with_kvcache(
        k_cache=cache[0],
        v_cache=cache[1],
        cache_seqlens=lengths(device, *idle),
        return_softmax_lse=True,
        **given,
        **where,
    )
    if kind == "packed rows":
        out, lse = out.view(3, 2, HEADS, -1), lse.view(HEADS, 3, 2).transpose(0, 1)
    empty = [b for b in range(3) if idle[b] < 0]
    assert not out[empty].any() and torch.isneginf(lse[empty]).all()
    assert torch.isfinite(lse[[b for b in range(3) if idle[b] >= 0]]).all()
    for x, was, new in zip(cache, before, (given["k"], given["v"]), strict=True):
        x, was = [y.reshape(-1, *y.shape[2:]) for y in (x, was)]
        new = (new if new.ndim == 4 else new[:12].unflatten(0, (3, 4)))[1]
        rows_of = {"pages": 12, "shared pages": 12}.get(place, rows + 4)  # page 3 has keys 4 .. 7 of sequence 1
        if idle[1] == 4:
            if new.shape[-1] == DIM_V:
                assert torch.equal(x[rows_of : rows_of + 4], new)
            else:
                assert (x[rows_of : rows_of + 4] != was[rows_of : rows_of + 4]).any(-1).all()
            was[rows_of : rows_of + 4] = x[rows_of : rows_of + 4]
        assert torch.equal(x, was)


@pytest.mark.parametrize("table", [None, [[3, 0], [-1, 9], [2, 5]]], ids=["entries", "pages"])
@pytest.mark.parametrize("counts", [(True, True, True), (False, True, True), (False, False, False)], ids=str)
def test_places_outside_the_cache(table, counts, monkeypatch):
    """On a device an entry out of range is not refused. No access leaves the cache, and nothing is written."""
    from flash_attn_minimal.integrations.flash_attn import _caches

    monkeypatch.setattr(_caches, "readable", lambda x: False)
    cache, owner = torch.randn(6, 4, 2, 8), torch.arange(3)
    table = None if table is None else lengths("cpu", *table)
    idx = lengths("cpu", 3, -1, 6) if table is None else None
    row = torch.tensor([1, 6, 7]) if idx is None else torch.tensor([1, 2, 3])
    want, new = cache.clone(), torch.randn(3, 2, 8)
    if counts[0]:
        want[3, 1] = new[0]
    if idx is None and counts[2]:
        want[5, 3] = new[2]
    undo, before = _caches.Places(cache, owner, row, torch.tensor(counts), idx, table).write, cache.clone()
    undo = undo(cache, new)
    assert torch.equal(cache, want)
    undo()
    assert torch.equal(cache, before)


@pytest.mark.parametrize("kind", PREPARED)
@pytest.mark.parametrize("length", ["tensor", 3, None])
def test_a_step_reads_nothing_on_the_host(kind, length):
    """So that a CUDA graph can hold it: fake tensors, which have no values, raise where one is read."""
    from flash_attn_minimal.integrations.flash_attn import _caches

    given = prepared("cpu", kind, 3, 4)
    cache = [normal("cpu", 12, 4, HEADS_K, d).detach() for d in (DIM, DIM_V)]
    table = lengths("cpu", *[[7, 3, 5, 0]] * 3)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        used = mode.from_tensor(lengths("cpu", 3, -1, 15)) if length == "tensor" else length
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens", "rotary_cos", "rotary_sin")
        step = SimpleNamespace(
            **dict(zip(("k_cache", "v_cache"), map(mode.from_tensor, cache), strict=True)),
            **{name: fake.get(name) for name in names}, rotary_interleaved=False, cache_seqlens=used,
            cache_batch_idx=None, page_table=mode.from_tensor(table), written=[],
            options={"causal": True, "window_size": (-1, -1), "attention_chunk": 0},
        )  # fmt: skip
        q, after = _caches._rotate_and_append(step)
    assert q.shape == given["q"].shape and after.shape == (3,) and after.dtype == torch.int32


@pytest.mark.parametrize("kind", PREPARED)
def test_a_refused_step_has_written_nothing(kind):
    given = prepared("cpu", kind, 2, 3)
    cache = [normal("cpu", 8, 4, HEADS_K, d).detach() for d in (DIM, DIM_V)]
    before, pages = [x.clone() for x in cache], {"page_table": lengths("cpu", [0, 1, 2, 3], [4, 5, 6, 7])}
    for text, wrong in {
        r"cache_leftpad\[1\]=20 is outside": {"cache_leftpad": lengths("cpu", 0, 20)},
        "softcap=": {"softcap": math.nan},
        "num_splits=1000": {"num_splits": 1000},
        r"page_table\[1\]\[2\]=8 is outside 0 .. 7, the pages": {
            "page_table": lengths("cpu", [0, 1, 2, 3], [4, 5, 8, 7])
        },
        r"block_table\[1\]\[0\]=-1 is outside": {"page_table": lengths("cpu", [0, 1, 2, 3], [-1, 5, 6, 7])},
        "page_table: two sequences append to the same row of a page": {
            "page_table": lengths("cpu", *[[0, 1, 2, 3]] * 2)
        },
        r"cache_batch_idx\[0\]=2 is outside 0 .. 1, the rows of page_table": {"cache_batch_idx": lengths("cpu", 2, 0)},
        r"cache_seqlens=\[14, 8\]: with the new keys": {"cache_seqlens": lengths("cpu", 14, 8)},
        "cache_seqlens=-1 is outside 0": {"cache_seqlens": -1},
        "cache_seqlens has shape": {"cache_seqlens": lengths("cpu", 8)},
        "k has shape": {"k": given["k"][..., :1, :]},
        "v has shape": {"v": given["v"][..., :8]},
        "v is a ndarray": {"v": given["v"].numpy()},
        "page_table has shape": {"page_table": lengths("cpu", 0, 1, 2, 3)},
        "k_descale is given|q_descale, k_descale or v_descale is given": {"k_descale": torch.ones(2, HEADS_K)},
        "rotary_sin has shape": {"rotary_sin": given["rotary_sin"][:3]},
        "rotary_cos has shape": {name: torch.ones(16, 9) for name in ("rotary_cos", "rotary_sin")},
    }.items():
        with pytest.raises(RuntimeError, match=text):
            hopper.flash_attn_with_kvcache(
                **{"k_cache": cache[0], "v_cache": cache[1], "cache_seqlens": lengths("cpu", 8, 8), **given, **pages}
                | wrong
            )
        assert all(map(torch.equal, cache, before)), text


def test_entries_that_sequences_share():
    given = prepared("cpu", "two products", 2, 3)
    cache = [normal("cpu", 2, 16, HEADS_K, d).detach() for d in (DIM, DIM_V)]
    for text, idx in ((r"\[1\]=2 is outside 0 .. 1, the entries", (0, 2)), (": two sequences .* same entry", (1, 1))):
        with pytest.raises(RuntimeError, match="cache_batch_idx" + text):
            hopper.flash_attn_with_kvcache(
                k_cache=cache[0], v_cache=cache[1], cache_seqlens=lengths("cpu", 3, 9), **given,
                cache_batch_idx=lengths("cpu", *idx),
            )  # fmt: skip


def test_lengths_of_packed_rows_are_checked():
    """Wherever they are read here: on the CPU they are refused, as in the core."""
    rows, k, cache = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(2, 16, 2, 16)
    good, table = lengths("cpu", 0, 3, 7), lengths("cpu", [0], [1])
    for text, cu, longest in (
        (r"\[0\]=1 is not 0", (1, 3, 7), 4),
        (r"\[2\]=2 is below cu_seqlens_q\[1\]=3", (0, 3, 2), 4),
        (r"\[2\]=8 is above the 7 rows", (0, 3, 8), 5),
        (": sequence 1 has 4 rows, more than max_seqlen_q=3", (0, 3, 7), 3),
        (r" is \(1, 3\): expected a tensor", [(0, 3, 7)], 4),
    ):
        cu = lengths("cpu", *cu)
        for call in (
            lambda cu=cu, n=longest: hopper.flash_attn_with_kvcache(
                rows, cache, cache, cu_seqlens_q=cu, max_seqlen_q=n
            ),
            lambda cu=cu, n=longest: fa2.flash_attn_varlen_func(rows, cache, cache, cu, good, n, 4, block_table=table),
        ):
            with pytest.raises(RuntimeError, match="cu_seqlens_q" + text):
                call()
    for text, used in ((r"\[0\]=4 is outside 0 .. 3", (4, 4)), (r"\[1\]=-1 is", (3, -1)), (r" is \(1,\)", (3,))):
        for name in ("seqused_q", "seqused_k"):
            with pytest.raises(RuntimeError, match=name + text):
                hopper.flash_attn_varlen_func(rows, k, k, good, good, 4, 4, **{name: lengths("cpu", *used)})
    with pytest.raises(RuntimeError, match=r"cu_seqlens_k\[2\]=1 is below"):
        fa2.flash_attn_varlen_func(rows, cache, cache, good, lengths("cpu", 0, 3, 1), 4, 4, block_table=table)
    out = hopper.flash_attn_with_kvcache(rows, cache, cache, cu_seqlens_q=lengths("cpu", 0, 0, 0), max_seqlen_q=0)
    assert out.shape == rows.shape and not out.any()  # rows of no sequence


@DEVICES
@pytest.mark.parametrize("scores", [{}, {"causal": True}, {"window_size": (9, 3)}, {"softcap": 3.0}], ids=str)
def test_float8(device, scores):
    """Whether a kernel of float8 serves the call or not."""
    e4m3 = torch.float8_e4m3fn
    q, k, v = (normal(device, 2, n, h, 64).detach().to(e4m3) for n, h in ((23, HEADS), (37, HEADS_K), (37, HEADS_K)))
    factors = [torch.rand(2, HEADS_K, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    wide = [
        x.float() * f.repeat_interleave(x.shape[2] // HEADS_K, 1)[:, None, :, None]
        for x, f in zip((q, k, v), factors, strict=True)
    ]
    exact, exact_lse = reference.standard_attention(*numpy(*wide), **scores)
    out, lse = hopper.flash_attn_func(
        q, k, v, **dict(zip(names, factors, strict=True)), **scores, return_attn_probs=True
    )
    assert out.dtype == torch.bfloat16
    close(out, exact, 0.12), close(lse, exact_lse, 0.05)
    cu = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (23, 37)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    same = hopper.flash_attn_varlen_func(*flat, *cu, 23, 37, **dict(zip(names, factors, strict=True)), **scores)
    close(same.view_as(out), exact, 0.12)


@DEVICES
@pytest.mark.parametrize("varlen", [False, True])
def test_cache_of_float8(device, varlen):
    e4m3 = torch.float8_e4m3fn
    q = normal(device, 2, 3, HEADS, 64).detach().to(e4m3)
    k, v = (normal(device, 2, 3, HEADS_K, 64, seed=i).detach().to(e4m3) for i in (0, 1))
    cache = [normal(device, 2, 40, HEADS_K, 64, seed=i).detach().to(e4m3) for i in (0, 1)]
    factors = [torch.rand(2, HEADS_K, generator=torch.Generator().manual_seed(i)).to(device) + 0.5 for i in range(3)]
    wide = [
        x.float() * f.repeat_interleave(x.shape[2] // HEADS_K, 1)[:, None, :, None]
        for x, f in zip((q, *cache, k, v), (*factors, *factors[1:]), strict=True)
    ]
    exact, _ = reference.kvcache_attention(*numpy(*wide), cache_seqlens=[5, 30], causal=True)
    cu = torch.arange(3, dtype=torch.int32, device=device) * 3
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3} if varlen else {}
    q, new_k, new_v = (x.flatten(0, 1) if varlen else x for x in (q, k, v))
    out = hopper.flash_attn_with_kvcache(
        q, *cache, new_k, new_v, cache_seqlens=lengths(device, 5, 30), causal=True, q_descale=factors[0],
        k_descale=factors[1], v_descale=factors[2], **packed,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    close(out.view(2, 3, HEADS, 64), exact, 0.03)
    for held, new in zip(cache, (k, v), strict=True):  # bit by bit
        for b, first in enumerate((5, 30)):
            assert torch.equal(held[b, first : first + 3].view(torch.uint8), new[b].view(torch.uint8))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine(device, dtype):
    """Splits without keys may hold anything, and add nothing, even if no split has keys."""
    out, lse = normal(device, 5, 2, 7, HEADS, DIM).detach(), normal(device, 5, 2, 7, HEADS).detach()
    lse[1:3, 0], lse[:, 1, 2] = -torch.inf, -torch.inf
    want_lse = lse.double().logsumexp(0)
    weight = (lse.double() - want_lse).exp().nan_to_num(0)
    want = (weight[..., None] * out.double()).sum(0)
    out[1:3, 0], out[:, 1, 2] = torch.nan, torch.inf
    got, got_lse = hopper.flash_attn_combine(out, lse, out_dtype=dtype)
    assert got.dtype == dtype
    close(got, *numpy(want), 1e-5 if dtype == torch.float32 else 2e-2), close(got_lse, *numpy(want_lse))
    place = torch.empty_like(got)
    assert hopper.flash_attn_combine(out, lse, place)[0] is place and torch.equal(place, got)


# ---- bert_padding and the rotary embedding ----


@DEVICES
def test_padding(device):
    x = normal(device, 3, 5, 2, 4)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], device=device)
    rows, indices, cu_seqlens, longest, used = fa2.bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask.bool()]) and longest == 5
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 3, 3, 8] and used.tolist() == [3, 0, 5]
    back = fa2.bert_padding.pad_input(rows * 2, indices, 3, 5)
    assert torch.equal(back, 2 * x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(back, x, weights(back))
    assert torch.equal(gradient, 2 * weights(back) * mask[..., None, None])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], device=device)
    rows, _, cu_seqlens, longest, used = fa2.bert_padding.unpad_input(x, mask, unused)
    assert torch.equal(rows, x[(mask + unused).bool()]) and (longest, used.tolist()) == (5, [3, 0, 5])
    assert cu_seqlens.tolist() == [0, 4, 5, 10]
    rows, rest = fa2.bert_padding.index_first_axis_residual(x.flatten(0, 1), indices)
    assert torch.equal(rows, x.flatten(0, 1)[indices]) and torch.equal(rest, x.flatten(0, 1))


def test_concatenated_sequences():
    x, inside = torch.randn(2, 6, 3), torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = fa2.bert_padding.unpad_input_for_concatenated_sequences(x, inside)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1]])) and cu_seqlens.tolist() == [0, 2, 5, 11] and longest == 6
    assert torch.equal(fa2.bert_padding.pad_input(rows, indices, 2, 6)[0, :5], x[0, :5])


@pytest.mark.parametrize("how", ["fake", "make_fx", "vmap", "compiled"])
def test_rotary_embedding_where_positions_have_no_values(how):
    """Positions are checked on a CPU if their values can be read. In a trace or a transform they have no values."""
    x, offsets = torch.randn(2, 5, HEADS, DIM), torch.tensor([3, 20])
    angle = torch.outer(torch.arange(30), torch.ones(4))

    def turned(x, offsets):
        return fa2.layers.rotary.apply_rotary_emb(x, angle.cos(), angle.sin(), seqlen_offsets=offsets)

    want = turned(x, offsets)
    if how == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert turned(mode.from_tensor(x), mode.from_tensor(offsets)).shape == want.shape
    elif how == "make_fx":
        assert torch.equal(make_fx(turned)(x, offsets)(x, offsets), want)
    elif how == "vmap":
        got = torch.func.vmap(lambda row, offset: turned(row[None], offset[None])[0])(x, offsets)
        torch.testing.assert_close(got, want)
    else:
        assert torch.equal(torch.compile(turned, backend="aot_eager", fullgraph=True)(x, offsets), want)


@DEVICES
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(device, interleaved):
    angle = torch.outer(torch.arange(30), 10.0 ** -torch.arange(4)).to(device)
    x, offsets = normal(device, 2, 5, HEADS, DIM), (3, 20)
    tables = angle.cos(), angle.sin()
    apply = fa2.layers.rotary.apply_rotary_emb
    want = [
        reference.rotary(numpy(x[b])[0], *numpy(*tables), n + np.arange(5), interleaved) for b, n in enumerate(offsets)
    ]
    got = apply(x, *tables, interleaved, seqlen_offsets=lengths(device, *offsets))
    close(got, np.stack(want), 1e-5)
    flat = apply(
        x.flatten(0, 1), *tables, interleaved, seqlen_offsets=lengths(device, *offsets),
        cu_seqlens=lengths(device, 0, 5, 10), max_seqlen=5,
    )  # fmt: skip
    assert torch.equal(flat.view_as(got), got)
    (gradient,) = torch.autograd.grad(got, x, weights(got))  # a rotation's transpose turns back
    back = apply(gradient.detach(), *tables, interleaved, seqlen_offsets=lengths(device, *offsets))
    close(back, *numpy(weights(got)), 1e-5)
    y = x.detach().clone()
    assert apply(y, *tables, interleaved, inplace=True, seqlen_offsets=3) is y
    close(y[:1], want[0][None], 1e-5)


# ---- errors, and the names ----


def test_errors():
    """Errors are RuntimeErrors, like those of flash_attn, with the library's text, and its error as the cause."""
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(RuntimeError, match="nheads=6 is not a multiple of nheads_k=4") as caught:
        fa2.flash_attn_func(q, q[:, :, :4], q[:, :, :4])
    assert isinstance(caught.value.__cause__, fa.BadArgument)
    pages = torch.randn(4, 16, 6, 8)
    for function, table in (
        (fa2.flash_attn_with_kvcache, "block_table"),
        (hopper.flash_attn_with_kvcache, "page_table"),
    ):
        with pytest.raises(RuntimeError, match="cache_seqlens.*=17 .* of a row of block_table"):
            function(q, pages, pages, cache_seqlens=lengths("cpu", 17), **{table: torch.zeros(1, 1, dtype=torch.int32)})
    new, starts = torch.randn(2, 6, 8), lengths("cpu", 0, 2)
    with pytest.raises(RuntimeError, match=r"cache_seqlens=\[15\]: .* \[17\], more than the 16 keys of a cache entry"):
        hopper.flash_attn_with_kvcache(
            q[0, :2], pages[:1], pages[:1], new, new, cache_seqlens=15, cu_seqlens_q=starts, max_seqlen_q=2,
            cu_seqlens_k_new=starts,
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="max_seqlen_q is None with cu_seqlens_q"):
        hopper.flash_attn_with_kvcache(q[0], q, q, cu_seqlens_q=lengths("cpu", 0, 4))
    rows, cache, table, two = torch.randn(1, 2, 6, 8), torch.zeros(1, 16, 6, 8), torch.randn(9, 4), lengths("cpu", 2)
    for more in ({}, {"qv": rows}):  # what is made ready here, and what is not
        for name, pair in (("v", "k and v"), ("rotary_sin", "rotary_cos and rotary_sin")):
            given = {"k": rows, "v": rows, "rotary_cos": table, "rotary_sin": table, **more, name: None}
            with pytest.raises(RuntimeError, match=f"{name} is None, but {pair} come together"):
                hopper.flash_attn_with_kvcache(rows, cache, cache, cache_seqlens=two, **given)
    turns = {"rotary_cos": table, "rotary_sin": table, "rotary_seqlens": lengths("cpu", 8), "cache_seqlens": two}
    with pytest.raises(RuntimeError, match="cos has 9 rows, but a row of x stands at position 9"):
        hopper.flash_attn_with_kvcache(rows, cache, cache, rows, rows, causal=True, **turns)
    with pytest.raises(RuntimeError, match="cos has 9 rows, but a row of x stands at position 10"):
        fa2.layers.rotary.apply_rotary_emb(torch.randn(1, 11, 6, 8), table, table)
    packed = torch.randn(11, 6, 8)  # rows of no sequence stand nowhere
    assert (
        fa2.layers.rotary.apply_rotary_emb(packed, table, table, cu_seqlens=lengths("cpu", 0, 9)).shape == packed.shape
    )
    with pytest.raises(RuntimeError, match="attention_chunk=-3 is negative"):
        hopper.flash_attn_func(q, q, q, attention_chunk=-3)
    with pytest.raises(RuntimeError, match="attention_chunk=2.5 is not an integer"):
        hopper.flash_attn_func(q, q, q, attention_chunk=2.5)
    with pytest.raises(RuntimeError, match=r"window_size\[0\]=2.5 is not an integer"):
        fa2.flash_attn_func(q, q, q, window_size=(2.5, 0))


def _calls():
    """A good call of each kind, to be spoiled."""
    q, k, cache, pages = (torch.randn(2, n, h, 16) for n, h in ((3, 4), (5, 2), (16, 2), (16, 2)))
    qp, kp, cu, cu_k, cos = (
        q.flatten(0, 1),
        k.flatten(0, 1),
        lengths("cpu", 0, 3, 6),
        lengths("cpu", 0, 5, 10),
        torch.randn(32, 8),
    )
    packed = {"q": qp, "k": kp, "v": kp, "cu_seqlens_q": cu, "cu_seqlens_k": cu_k, "max_seqlen_q": 3, "max_seqlen_k": 5}
    two, table = lengths("cpu", 1, 0), lengths("cpu", [0], [1])
    step = {"k_cache": cache, "v_cache": pages, "cache_seqlens": lengths("cpu", 3, 4)}
    eight = {name: torch.ones(2, 2) for name in ("q_descale", "k_descale", "v_descale")}
    small = {name: x.to(torch.float8_e4m3fn) for name, x in (("q", q), ("k", k), ("v", k))}
    turn = {"rotary_cos": cos, "rotary_sin": cos}
    return {
        "fa2": (fa2.flash_attn_func, {"q": q, "k": k, "v": k}),
        "kvpacked": (fa2.flash_attn_kvpacked_func, {"q": q, "kv": torch.stack([k, k], 2)}),
        "qkvpacked": (fa2.flash_attn_qkvpacked_func, {"qkv": torch.stack([q, q, q], 2)}),
        "fa2 varlen": (fa2.flash_attn_varlen_func, packed),
        "fa2 pages": (fa2.flash_attn_varlen_func, packed | {"k": cache, "v": cache, "block_table": table}),
        "fa2 cache": (fa2.flash_attn_with_kvcache, {"q": q, **step, "k": k, "v": k, **turn, "cache_batch_idx": two}),
        "fa3": (hopper.flash_attn_func, {"q": q, "k": k, "v": k, "qv": q}),
        "fa3 float8": (hopper.flash_attn_func, small | eight),
        "fa3 qkvpacked": (hopper.flash_attn_qkvpacked_func, {"qkv": torch.randn(2, 3, 8, 16), "num_heads_q": 4}),
        "fa3 varlen": (hopper.flash_attn_varlen_func, packed | {"seqused_q": two, "seqused_k": two, "qv": qp}),
        "fa3 cache": (
            hopper.flash_attn_with_kvcache,
            {"q": q, **step, "k": k, "v": k, "qv": q, **turn, "cache_batch_idx": two, "rotary_seqlens": two},
        ),
        "fa3 pages": (
            hopper.flash_attn_with_kvcache,
            {"q": qp, **step, "k": kp, "v": kp, "cu_seqlens_q": cu, "cu_seqlens_k_new": cu_k, "max_seqlen_q": 3}
            | {"cache_batch_idx": two, "page_table": table},
        ),
        "combine": (
            hopper.flash_attn_combine,
            {"out_partial": torch.randn(2, 2, 3, 4, 8), "lse_partial": torch.randn(2, 2, 3, 4)},
        ),
        "rotary": (fa2.layers.rotary.apply_rotary_emb, {"x": q, "cos": cos, "sin": cos, "seqlen_offsets": two}),
        "packed rotary": (
            fa2.layers.rotary.apply_rotary_emb,
            {"x": qp, "cos": cos, "sin": cos, "seqlen_offsets": two, "cu_seqlens": cu},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("kind", _calls())
def test_an_argument_of_another_type_or_rank_is_named(kind):
    function, given = _calls()[kind]
    function(**given)
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            continue
        array = x.float().numpy() if x.dtype == torch.float8_e4m3fn else x.numpy()
        for wrong in (array, [1, 2], x.flatten()[0], x[None, None], *([x.flatten()] if x.ndim > 1 else [])):
            # one array may be called by the name of another one that it disagrees with, or by that of the core
            names = {
                "page_table": "(page|block)_table",
                "q": "(cu_seqlens_)?q(_descale)?",
                "k": "k(_cache)?",
                "v": "v(_cache)?",
            }
            names |= {"rotary_cos": "rotary_(cos|sin)", "cos": "(cos|sin)"}
            with pytest.raises(RuntimeError, match=rf"\b{names.get(name, name)}\b(\.data|\[2\])? ?(is|has|dtype|=)"):
                function(**given | {name: wrong})


def test_packed_heads_that_do_not_add_up():
    for call, text in (
        (lambda: fa2.flash_attn_kvpacked_func(torch.randn(1, 3, 2, 8), torch.randn(1, 3, 3, 2, 8)), "kv has shape"),
        (
            lambda: hopper.flash_attn_qkvpacked_func(torch.randn(1, 3, 7, 8), num_heads_q=4),
            "num_heads_q=4, but qkv has 7",
        ),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_no_gradient_is_lost():
    """A result without a gradient raises an error when its gradient is asked for, instead of leaving it out."""
    q, cache = torch.randn(1, 4, 2, 8, requires_grad=True), torch.randn(1, 9, 2, 8)
    wide, cu, table = torch.randn(1, 9, 2, 512), lengths("cpu", 0, 4), torch.zeros(1, 1, dtype=torch.int32)
    eight, factor = torch.randn(1, 4, 2, 8).to(torch.float8_e4m3fn), torch.ones(1, 2, requires_grad=True)
    calls = {
        "flash_attn_with_kvcache has": lambda: fa2.flash_attn_with_kvcache(q, cache, cache),
        "kvcache has": lambda: hopper.flash_attn_with_kvcache(q, cache, cache, return_softmax_lse=True)[1],
        "packed rows over": lambda: fa2.flash_attn_varlen_func(q[0], cache, cache, cu, cu, 4, 4, block_table=table),
        "above 512": lambda: hopper.flash_attn_func(q, cache, wide, qv=wide[:, :4]),
        "float8_e4m3fn": lambda: hopper.flash_attn_func(*[x.to(torch.float8_e4m3fn) for x in (q, cache, cache)]),
        "which has no backward": lambda: hopper.flash_attn_func(eight, eight, eight, q_descale=factor),
    }
    for text, call in calls.items():
        out = call()
        with torch.no_grad():
            assert torch.equal(call(), out)
        with pytest.raises(RuntimeError, match=text):
            out.sum().backward()


def test_last_axis_is_made_contiguous():
    q = torch.randn(2, 8, 4, 9).transpose(1, 3)
    close(fa2.flash_attn_func(q, q, q), reference.standard_attention(*numpy(q, q, q))[0])


def python(code, *path):
    import os

    places = os.pathsep.join([str(ROOT / "python"), *map(str, path)])
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True
    )


INSTALL = "from flash_attn_minimal.integrations import flash_attn as s\ns.install()\n"


def test_install():
    """Programs that import flash_attn and flash_attn_interface get the stand-ins, until these are removed."""
    done = python(
        INSTALL + "s.install()\n"
        "import flash_attn, flash_attn_interface, flash_attn.layers.rotary, importlib.util, sys\n"
        "from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func\n"
        "from flash_attn.bert_padding import unpad_input, pad_input, index_first_axis\n"
        "from flash_attn.flash_attn_interface import flash_attn_with_kvcache, _flash_attn_forward\n"
        "from flash_attn.layers.rotary import apply_rotary_emb\n"
        "assert flash_attn is s and flash_attn_interface is s.hopper and flash_attn.__version__ >= '2.8'\n"
        "assert importlib.util.find_spec('flash_attn') and importlib.util.find_spec('flash_attn_interface')\n"
        "s.uninstall()\n"
        "assert importlib.util.find_spec('flash_attn') is None and 'flash_attn.layers' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["flash_attn", "flash_attn_interface"])
@pytest.mark.parametrize("first", [False, True])
def test_an_installed_one_is_not_shadowed(tmp_path, name, first):
    (tmp_path / f"{name}.py").write_text("mine = True\n")
    done = python((f"import {name}\n" if first else "") + INSTALL, tmp_path)
    assert done.returncode == 1 and f"ImportError: {name} is installed" in done.stderr
    other = {"flash_attn": "flash_attn_interface"}.get(name, "flash_attn")
    done = python(
        f"import sys\n{INSTALL.replace('s.install()', '')}try: s.install()\nexcept ImportError: pass\n"
        f"import {name}\nassert {name}.mine and {other!r} not in sys.modules\n",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
