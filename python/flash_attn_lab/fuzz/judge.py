"""Judges results: compares them with float64, within the error of a plain implementation of the same precision.

A kernel's error may be twice the largest error of the plain implementation, plus a floor for rounding. NaN and
infinities are compared first: they must be in the same places, with the same signs.
"""

from __future__ import annotations

import functools

import numpy as np

from .. import reference

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to the nearest value of `dtype`, kept as float32."""
    x = np.asarray(x, np.float32)
    if dtype == "float32":
        return x
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    bits = np.atleast_1d(x).view(np.uint32)  # the sum wraps around only for NaN
    rounded = (bits + ((bits >> 16 & 1) + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(np.float32).reshape(x.shape)
    return np.where(np.isnan(x), x, rounded)


class Wrong(AssertionError):
    """A result that is not right."""


def same_kinds(what: str, got: np.ndarray, exact: np.ndarray) -> None:
    """Raises Wrong unless NaN, infinities and finite numbers are in the same places."""
    if got.shape != exact.shape:
        raise Wrong(f"{what} has shape {got.shape}, expected {exact.shape}")
    for kind, test in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = np.argwhere(test(got) != test(exact))
        if len(wrong):
            at = tuple(map(int, wrong[0]))
            raise Wrong(f"{what}{at}: got {got[at]}, want {exact[at]} ({len(wrong)} wrong about {kind})")


def within(what: str, got, exact, allowed) -> None:
    """Raises Wrong unless |got - exact| <= allowed where exact is finite, and got equals exact elsewhere (NaN, inf)."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    same_kinds(what, got, exact)
    if not exact.size:
        return
    finite = np.isfinite(exact)
    error = np.abs(np.where(finite, got, 0) - np.where(finite, exact, 0))
    over = np.where(finite, error - allowed, -1.0)
    at = tuple(map(int, np.unravel_index(over.argmax(), over.shape)))
    if over[at] > 0:
        budget = float(np.broadcast_to(allowed, over.shape)[at])
        raise Wrong(
            f"{what}{at}: got {got[at]:.7g}, want {exact[at]:.7g}, {error[at] / budget if budget else np.inf:.2f}x the "
            f"budget {budget:.3g}, {int((over > 0).sum())} of {over.size} are over"
        )


def check(what: str, got, exact, plain, dtype: str, factor: float = 2.0, floor: float = 1e-5) -> None:
    """Raises Wrong unless |got - exact| <= factor * max |plain - exact| + epsilon * max |exact| + floor everywhere.
    `plain` may be a function that returns the array; it is called only if the rest of the budget is not enough."""
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    finite = np.isfinite(exact)
    budget = floor + EPSILON[dtype] * np.abs(exact, where=finite, out=np.zeros(exact.shape)).max(initial=0)
    if callable(plain):
        try:
            return within(what, got, exact, budget)
        except Wrong:
            plain = plain()
    plain = np.asarray(plain, np.float64)
    allowed = finite & np.isfinite(plain)
    plain_error = np.abs(np.where(allowed, plain, 0) - np.where(allowed, exact, 0)).max(initial=0)
    within(what, got, exact, budget + factor * plain_error)


def plain_head(head: reference.Head, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Standard attention of a plain GPU implementation: fp32 sums and softmax, probabilities and output rounded to
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
    """1e-5 plus half a unit in the last place of the scaled product of the longest q and the longest k. With few scores
    the plain implementation may by luck not have such an error."""
    if not q.size or not k.size:
        return 1e-5
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else abs(softmax_scale)
    longest = [float(np.linalg.norm(x.astype(np.float64), axis=-1).max()) for x in (q, k)]
    return 1e-5 + 2.0**-24 * scale * longest[0] * longest[1]


def plain_backward_head(
    head: reference.Head, dout: np.ndarray, dlse: np.ndarray, dtype: str, forward=reference._standard
):  # fmt: skip
    """The gradients of a plain GPU implementation: fp32 sums and softmax; P, dS and the results rounded to dtype.
    `forward` computes out and lse as the kernels are given them."""
    f = np.float32
    everything = slice(None)
    out, lse = forward(head)
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
        delta = np.where(np.isneginf(lse), f(0), delta - dlse.astype(f))
        ds = np.where(seen, p * ((dout @ v.T) * kept - delta[:, None]), f(0))
        sink = -np.sum(np.exp(f(head.sink) - lse, where=~np.isneginf(lse), out=np.zeros_like(lse)) * delta)
        raw = round_to(np.where(seen, ds * slope, f(0)), dtype).astype(np.float64)
        weight = round_to(p * kept, dtype).astype(np.float64)
    dq, dk = reference._times_values(raw, head.k), reference._times_values(raw.T, head.q)
    dv = reference._times_values(weight.T, dout.astype(np.float64))
    return round_to(dq, dtype), dk, dv, ds, sink  # dk and dv are summed over heads, then rounded by the caller


def plain_backward(dout, q, k, v, dtype: str, forward=reference._standard, **options) -> reference.Gradients:
    one_head = functools.partial(plain_backward_head, dtype=dtype, forward=forward)
    got = reference.standard_attention_backward(dout, q, k, v, one_head=one_head, **options)
    return got._replace(dk=round_to(got.dk, dtype), dv=round_to(got.dv, dtype))


def gradient_floor(q, k, lse, exact, softmax_scale=None) -> float:
    """The error of fp32 arithmetic, even if the plain implementation is lucky. P = exp(S - lse) is known to half a unit
    in the last place of lse, and so is every sum of P. The floor is relative to the largest gradient."""
    finite = np.abs(lse[np.isfinite(lse)]).max(initial=1.0)
    scores = rounding_floor(q, k, softmax_scale) + 2.0**-23 * finite
    largest = np.abs(exact[np.isfinite(exact)]).max(initial=0.0)
    return 1e-5 + 4 * scores * largest
