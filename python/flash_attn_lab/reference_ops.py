"""The operations of ops.py in NumPy float64, written to be read."""

from __future__ import annotations

import numpy as np

from .reference import rotary


def rms_norm(x, weight, eps=1e-5):
    x = np.asarray(x, np.float64)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * np.asarray(weight, np.float64)


def rope(x, cos, sin, positions=None, interleaved=False, rotary_dim=None, inverse=False):
    """x (batch, seqlen, nheads, headdim); cos, sin (rows, rotary_dim / 2); positions (batch,) or (batch, seqlen)."""
    x = np.asarray(x, np.float64)
    half = cos.shape[1] if rotary_dim is None else rotary_dim // 2
    batch, seqlen = x.shape[:2]
    rows = np.zeros(batch, int) if positions is None else np.asarray(positions)
    rows = rows[:, None] + np.arange(seqlen) if rows.ndim == 1 else rows  # (batch, seqlen)
    cos, sin = cos[:, :half], (-sin if inverse else sin)[:, :half]
    turned = [rotary(x[b], cos, sin, rows[b], interleaved) for b in range(batch)]
    return np.array(turned).reshape(x.shape)


def silu(x):
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return x / (1 + np.exp(-x))


def swiglu(gate_up):
    gate, up = np.split(np.asarray(gate_up, np.float64), 2, axis=-1)
    return silu(gate) * up


def linear(x, weight, bias=None, norm_weight=None, eps=1e-5, residual=None, act_swiglu=False):
    x = np.asarray(x, np.float64) if norm_weight is None else rms_norm(x, norm_weight, eps)
    y = x @ np.asarray(weight, np.float64).T
    y = y if bias is None else y + bias
    y = swiglu(y) if act_swiglu else y
    return y if residual is None else y + residual


def kept(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The probabilities, for one row, that `sample` draws from: softmax, cut to top_k, then to top_p, and
    normalised."""
    logits = np.asarray(logits, np.float64)
    order = np.argsort(-logits, kind="stable")  # equal logits by their index
    p = np.exp((logits[order] - logits[order[0]]) / temperature)
    if top_k:
        p[top_k:] = 0
    if top_p < 1:
        reached = np.searchsorted(p.cumsum(), top_p * p.sum())  # the first token at which the sum reaches top_p
        p[reached + 1 :] = 0
    result = np.zeros_like(p)
    result[order] = p / p.sum()
    return result
