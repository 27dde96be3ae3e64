"""What right means: a case with all its inputs, the float64 answer, and the error a plain implementation of the same
precision makes.

A kernel may be off by twice the plain implementation's largest error, plus a floor for rounding. NaN and infinities
are compared
first: they must sit in the same places with the same signs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from flash_attn_minimal import reference

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to the nearest that `dtype` has."""
    x = np.asarray(x, np.float32)
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = np.atleast_1d(x).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).reshape(x.shape)
    return np.where(np.isnan(x), x, rounded)


def check(what: str, got, exact, plain, dtype: str, factor: float = 2.0, floor: float = 1e-5) -> None:
    """|got - exact| <= factor * max |plain - exact| + floor, everywhere."""
    got, exact, plain = (np.asarray(x, np.float64) for x in (got, exact, plain))
    assert got.shape == exact.shape, f"{what} has shape {got.shape}, expected {exact.shape}"
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(got) != test(exact))
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            raise AssertionError(f"{what}{at}: got {got[at]}, want {exact[at]} ({len(wrong)} wrong about {kind})")
    finite = np.isfinite(exact)
    if not finite.any():
        return
    error = np.where(finite, np.abs(np.where(finite, got, 0) - np.where(finite, exact, 0)), 0)
    allowed = finite & np.isfinite(plain)
    plain_error = np.abs(np.where(allowed, plain, 0) - np.where(allowed, exact, 0)).max()
    budget = factor * plain_error + floor + EPSILON[dtype] * np.abs(exact[finite]).max()
    at = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    assert error[at] <= budget, (
        f"{what}{at}: got {got[at]:.7g}, want {exact[at]:.7g}, {error[at] / budget:.2f}x the budget {budget:.3g}"
    )


@dataclass(frozen=True)
class Case:
    """One call, small enough to print; the arrays follow from the seed."""

    seqlen_q: int = 65
    seqlen_k: int = 65
    headdim: int = 64
    headdim_v: int | None = None
    batch: int = 1
    nheads: int = 2
    nheads_k: int = 1
    dtype: str = "float32"
    softmax_scale: float | None = None
    causal: bool = False
    top_left: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: int = 0  # rank of alibi_slopes: 0 off, 1 (nheads), 2 (batch, nheads)
    bias: tuple[bool, ...] | None = (
        None  # which of the leading axes are full size, the columns left out; () is a bias of rank 1
    )
    bias_float32: bool = False
    mask: tuple[bool, ...] | None = None
    mask_rate: float = 0.7
    sinks: bool = False
    dropout_p: float = 0.0
    spread: float = 1.0  # standard deviation of q
    cu_seqlens_q: tuple[int, ...] | None = None  # varlen: seqlen_q and seqlen_k are then the longest
    cu_seqlens_k: tuple[int, ...] | None = None
    seed: int = 0

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None


def inputs(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
    """q, k, v as float32 values that case.dtype has, and the options."""
    rng = np.random.default_rng(case.seed)
    if case.varlen:
        batch = len(case.cu_seqlens_q) - 1
        lead_q, lead_k = (case.cu_seqlens_q[-1],), (case.cu_seqlens_k[-1],)
    else:
        batch, lead_q, lead_k = case.batch, (case.batch, case.seqlen_q), (case.batch, case.seqlen_k)
    headdim_v = case.headdim if case.headdim_v is None else case.headdim_v

    def normal(*shape, spread=1.0):
        return round_to(spread * rng.standard_normal(shape, dtype=np.float32), case.dtype)

    q = normal(*lead_q, case.nheads, case.headdim, spread=case.spread)
    k = normal(*lead_k, case.nheads_k, case.headdim)
    v = normal(*lead_k, case.nheads_k, headdim_v)

    def score_shape(full: tuple[bool, ...]):
        sizes = (batch, case.nheads, case.seqlen_q)[3 - len(full) :]
        return (*[size if whole else 1 for size, whole in zip(sizes, full, strict=True)], case.seqlen_k)

    options: dict[str, Any] = {}
    for name in ("softmax_scale", "causal", "top_left", "window_size", "softcap", "dropout_p"):
        if getattr(case, name) != getattr(Case, name):
            options[name] = getattr(case, name)
    if case.dropout_p:
        options |= {"dropout_seed": 2**63 + case.seed, "dropout_offset": 2**40 + 3}
    if case.alibi:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, (batch, case.nheads)[2 - case.alibi :]).astype(np.float32)
    if case.bias is not None:
        bias = rng.standard_normal(score_shape(case.bias), dtype=np.float32)
        options["bias"] = bias if case.bias_float32 else round_to(bias, case.dtype)
    if case.mask is not None:
        options["mask"] = rng.random(score_shape(case.mask)) < case.mask_rate
    if case.sinks:
        options["sinks"] = rng.standard_normal(case.nheads, dtype=np.float32)
    return q, k, v, options


def plain_head(head: reference.Head, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Standard attention as one writes it on a GPU: fp32 sums and softmax, probabilities and output rounded to
    dtype."""
    f = np.float32
    everything = slice(None)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        s = f(head.softmax_scale) * (head.q.astype(f) @ head.k.astype(f).T)
        if head.softcap:
            s = f(head.softcap) * np.tanh(s / f(head.softcap))
        if head.slope:
            i, j = head._indices(everything, everything)
            s = s - f(head.slope) * np.abs((i if head.top_left else i + len(head.k) - len(head.q)) - j).astype(f)
        if head.bias is not None:
            s = s + np.broadcast_to(head.bias.astype(f), s.shape)
        s = np.where(head.visible(everything, everything), s, f(-np.inf))
        row_max = np.max(s, axis=1, initial=f(head.sink))
        row_max = np.where(np.isneginf(row_max), f(0), row_max)
        p = np.exp(s - row_max[:, None])
        row_sum = p.sum(axis=1, dtype=f) + np.exp(f(head.sink) - row_max)
        lse = row_max + np.log(row_sum)
        p = np.where(row_sum[:, None] == 0, f(0), p / row_sum[:, None]) * np.asarray(
            head.kept(everything, everything), f
        )
    p = round_to(p, dtype).astype(np.float64)
    return round_to(reference._times_values(p, head.v), dtype), lse


def plain_attention(q, k, v, dtype: str, **options):
    return reference._over_heads(lambda head: plain_head(head, dtype), q, k, v, options)


def rounding_floor(q: np.ndarray, k: np.ndarray, softmax_scale: float | None = None) -> float:
    """1e-5, and more where the terms of q . k are large: half a unit in the last place of the longest q times the
    longest k, which a plain implementation can miss by luck when there are few scores."""
    if not q.size or not k.size:
        return 1e-5
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else abs(softmax_scale)
    longest = [float(np.linalg.norm(x.astype(np.float64), axis=-1).max()) for x in (q, k)]
    return 1e-5 + 2.0**-24 * scale * longest[0] * longest[1]


def plain_backward_head(head: reference.Head, dout: np.ndarray, dtype: str):
    """The gradients as one writes them on a GPU: fp32 sums and softmax; P, dS and the results rounded to dtype. out and
    lse are those that the kernels are given."""
    f = np.float32
    everything = slice(None)
    out, lse = reference._standard(head)
    out, lse = round_to(out, dtype), lse.astype(f)
    q, k, v = (x.astype(f) for x in (head.q, head.k, head.v))
    dout = dout.astype(f)
    seen = head.visible(everything, everything)
    with np.errstate(invalid="ignore", over="ignore"):
        s = f(head.softmax_scale) * (q @ k.T)
        slope = np.full(s.shape, head.softmax_scale, f)
        if head.softcap:
            t = np.tanh(s / f(head.softcap))
            s, slope = f(head.softcap) * t, slope * (1 - t * t)
        if head.slope:
            i, j = head._indices(everything, everything)
            s = s - f(head.slope) * np.abs((i if head.top_left else i + len(head.k) - len(head.q)) - j).astype(f)
        if head.bias is not None:
            s = s + np.broadcast_to(head.bias.astype(f), s.shape)
        p = np.where(seen, np.exp(s - np.where(np.isneginf(lse), f(0), lse)[:, None]), f(0))
        kept = np.asarray(head.kept(everything, everything), f)
        delta = (dout * out.astype(f)).sum(axis=1, dtype=f)
        ds = np.where(seen, p * ((dout @ v.T) * kept - delta[:, None]), f(0))
        sink = -np.sum(np.exp(f(head.sink) - lse, where=~np.isneginf(lse), out=np.zeros_like(lse)) * delta)
        raw = round_to(np.where(seen, ds * slope, f(0)), dtype).astype(np.float64)
        weight = round_to(p * kept, dtype).astype(np.float64)
    dq, dk = reference._times_values(raw, head.k), reference._times_values(raw.T, head.q)
    dv = reference._times_values(weight.T, dout.astype(np.float64))
    return round_to(dq, dtype), dk, dv, ds, sink  # dk and dv are sums over heads: rounded by the caller


def plain_backward(dout, q, k, v, dtype: str, **options) -> reference.Gradients:
    one_head = functools.partial(plain_backward_head, dtype=dtype)
    got = reference.standard_attention_backward(dout, q, k, v, one_head=one_head, **options)
    return got._replace(dk=round_to(got.dk, dtype), dv=round_to(got.dv, dtype))


def gradient_floor(case: Case, exact: np.ndarray) -> float:
    """What fp32 arithmetic leaves uncertain whatever the plain implementation's luck: P = exp(S - lse) is known to half
    a unit in the last place of lse, and so is every sum of it; relative to the largest gradient."""
    (q, k, *_), (_, lse), _ = expected(case)
    finite = np.abs(lse[np.isfinite(lse)]).max(initial=1.0)
    scores = rounding_floor(q, k, case.softmax_scale) + 2.0**-23 * finite
    largest = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    return 1e-5 + 4 * scores * largest


@functools.lru_cache(maxsize=128)
def expected_backward(case: Case):
    """(inputs with dout, out and lse; float64 gradients; plain gradients) of a case."""
    (q, k, v, options), (out, lse), _ = expected(case)
    rng = np.random.default_rng(case.seed + 1)
    dout = round_to(rng.standard_normal(out.shape, dtype=np.float32), case.dtype)
    plain = functools.partial(plain_backward, dtype=case.dtype)
    arrays = (dout, q, k, v)
    if case.varlen:
        cu = case.cu_seqlens_q, case.cu_seqlens_k
        exact = reference.varlen_backward(reference.standard_attention_backward, *arrays, *cu, **options)
        plain = reference.varlen_backward(plain, *arrays, *cu, **options)
    else:
        exact = reference.standard_attention_backward(*arrays, **options)
        plain = plain(*arrays, **options)
    return (*arrays, round_to(out, case.dtype), lse.astype(np.float32), options), exact, plain


@functools.lru_cache(maxsize=128)
def expected(case: Case):
    """(inputs, float64 out and lse, plain out and lse) of a case; shared by all kernels that run it."""
    q, k, v, options = inputs(case)

    def plain(*arrays, **rest):
        return plain_attention(*arrays, dtype=case.dtype, **rest)

    if not case.varlen:
        return (q, k, v, options), reference.standard_attention(q, k, v, **options), plain(q, k, v, **options)
    cu = case.cu_seqlens_q, case.cu_seqlens_k
    exact = reference.varlen(reference.standard_attention, q, k, v, *cu, **options)
    return (q, k, v, options), exact, reference.varlen(plain, q, k, v, *cu, **options)
