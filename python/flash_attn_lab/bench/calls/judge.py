"""Answers judged: the float64 answer of a part of a call, and how far from it an answer may be."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ... import reference
from ..check import FACTOR, FLOOR, GRADIENT_FLOOR, round_to, worst
from .call import DROPOUT, Call
from .make import Arrays

CHECK_WORK = 3e9  # multiplications of the float64 answer of what is looked at: about a second


class Judge:
    """The float64 answer of one head (backward: of one key head), and what an answer may be off there. What it looks at
    is copied to the host at once, so that judging needs no device."""

    def __init__(self, arrays: Arrays, seed: int = 0):
        call, host = arrays.call, arrays.machine.host
        draw = random.Random(f"judge {seed} {call}")
        self.call = call
        first = 1 if call.batch > 1 and (call.is_cache or "key_mask" in call.options) else 0  # the first hides no key
        self.b, self.h_k = draw.randrange(first, call.batch), draw.randrange(call.nheads_k)
        lowest = self.h_k * call.group
        group = range(lowest, lowest + call.group)
        self.heads = list(group) if call.backward else [draw.choice(group)]
        starts = [0, *itertools.accumulate(call.lengths)] if call.packed is not None else []
        whole = slice(None) if not starts else slice(starts[self.b], starts[self.b + 1])
        keys = whole if not call.is_cache else slice(0, call.filled[self.b])
        self.rows_q, self.rows_k = whole, keys
        part = (lambda x, rows, h: host(x[rows, h])) if starts else (lambda x, rows, h: host(x[self.b, rows, h]))
        self.part = part
        options = dict(arrays.options)
        for name in {"alibi_slopes", "sinks"} & options.keys():
            options[name] = host(options[name])
        self.k, self.v = part(arrays.k, keys, self.h_k), part(arrays.v, keys, self.h_k)
        self.given = []  # of each head: q, dout or None, options
        for h in self.heads:
            mine = options | {n: host(_plane(options[n], self.b, h)) for n in {"bias", "mask"} & options.keys()}
            dout = part(arrays.dout, whole, h) if call.backward else None
            self.given.append((part(arrays.q, whole, h), dout, mine))

    @cached_property
    def samples(self) -> list[tuple[str, int, np.ndarray, np.ndarray]]:
        """(array, head, exact, plain) of each array that is looked at."""
        call, samples = self.call, []
        precision = "tf32" if "tf32" in call.ways else call.dtype
        sums: dict[str, Any] = {"exact": [0.0, 0.0], "plain": [0.0, 0.0]}
        for h, (q, dout, options) in zip(self.heads, self.given, strict=True):
            head = _head(call, q, self.k, self.v, self.b, h, options)
            if not call.backward:
                exact, _ = reference._standard(head)
                samples.append(("out", h, exact, _plain(head, precision)))
                continue
            dout, zero = dout.astype(np.float64), np.zeros(len(dout))
            for kind, given in (("exact", head), ("plain", _rounded(head, precision))):
                dq, dk, dv, *_ = reference._standard_backward(given, dout, zero)
                if kind == "exact":
                    exact_dq = dq
                else:
                    samples.append(("dq", h, exact_dq, dq))
                sums[kind][0] = sums[kind][0] + dk
                sums[kind][1] = sums[kind][1] + dv
        if call.backward:
            for i, name in enumerate(("dk", "dv")):
                samples.append((name, self.h_k, sums["exact"][i], sums["plain"][i]))
        return samples

    @staticmethod
    def affordable(call: Call) -> bool:
        n_q, n_k = (max(pair) for pair in zip(*call._each(), strict=True))
        heads = call.group if call.backward else 1
        return heads * n_q * n_k * (call.headdim + call.headdim_v) * (6 if call.backward else 2) <= CHECK_WORK

    def seen(self, answer, heads_second: bool = False) -> list[np.ndarray]:
        """The parts of an answer that are looked at, on the host, in the order of `samples`."""
        arrays = answer if isinstance(answer, tuple) else (answer,)
        if heads_second:
            arrays = tuple(x.transpose(1, 2) for x in arrays)
        if not self.call.backward:
            return [self.part(arrays[0], self.rows_q, self.heads[0])]
        dq, dk, dv = arrays
        return [self.part(dq, self.rows_q, h) for h in self.heads] + [
            self.part(x, self.rows_k, self.h_k) for x in (dk, dv)
        ]

    def judged(self, seen: list[np.ndarray]) -> tuple[float, float]:
        """(error, budget) of the array that is furthest off. NaN is an error of infinity."""
        verdicts = [(0.0, 1.0)]
        for got, (_, _, exact, plain) in zip(seen, self.samples, strict=True):
            error = float(np.abs(got - exact).max(initial=0)) if np.isfinite(got).all() else math.inf
            verdicts.append((error, self._budget(exact, plain)))
        return worst(verdicts)

    def verdict(self, answer, heads_second: bool = False) -> tuple[float, float]:
        """`judged` of an answer on the device."""
        return self.judged(self.seen(answer, heads_second))

    def _budget(self, exact, plain) -> float:
        """Twice the error of the plain steps in the same precision, half a unit of the largest value, and a floor."""
        dtype = "bfloat16" if self.call.dtype == "float8_e4m3fn" else self.call.dtype
        largest = float(np.abs(exact).max(initial=0))
        unit = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        floor = FLOOR[dtype] + (GRADIENT_FLOOR[dtype] * largest if self.call.backward else unit * largest)
        return 2 * FACTOR * float(np.abs(plain - exact).max(initial=0)) + floor


def _plane(array, b: int, h: int):
    """The part of a bias or mask with four axes that belongs to one head of one sequence."""
    return array[b % array.shape[0], h % array.shape[1]]


def _head(call: Call, q, k, v, b: int, h: int, options: dict[str, Any]) -> reference.Head:
    """One head of one sequence with all options of the call."""
    return reference.Head(
        *(np.asarray(x, np.float64) for x in (q, k, v)),
        softmax_scale=call.headdim**-0.5,
        causal=options.get("causal", False),
        window_size=tuple(options.get("window_size", (-1, -1))),
        softcap=options.get("softcap", 0.0),
        slope=float(options["alibi_slopes"][h]) if "alibi_slopes" in options else 0.0,
        bias=np.asarray(options["bias"], np.float64) if "bias" in options else None,
        mask=options["mask"] != 0 if "mask" in options else None,
        sink=float(options["sinks"][h]) if "sinks" in options else -math.inf,
        dropout={"p": DROPOUT, "seed": options["dropout_seed"], "offset": 0, "batch": b, "head": h}
        if "dropout" in call.options
        else {},
    )


def _rounded(head: reference.Head, precision: str) -> reference.Head:
    """The head with q, k and v off by half a unit in the last place of what the precision keeps of P and dS."""
    units = {"float32": 2.0**-22, "tf32": 2.0**-10, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4}
    draw = np.random.default_rng(len(head.q))

    def shaken(x):
        return x * (1 + units[precision] * draw.uniform(-1, 1, x.shape))

    return replace(head, q=shaken(head.q), k=shaken(head.k), v=shaken(head.v))


def _plain(head: reference.Head, precision: str) -> np.ndarray:
    """The three steps with P rounded as a kernel of this precision does."""
    if precision in ("tf32", "float8_e4m3fn"):
        head = _rounded(head, precision)
    everything = slice(None)
    s = head.scores(everything, everything).astype(np.float32)
    top = np.maximum(s.max(axis=1), np.float32(head.sink))
    top = np.where(np.isneginf(top), np.float32(0), top)
    p = np.exp(s - top[:, None])
    total = p.sum(axis=1) + np.exp(np.float32(head.sink) - top)
    p = np.divide(p, total[:, None], out=np.zeros_like(p), where=total[:, None] != 0)
    p = round_to(p * np.asarray(head.kept(everything, everything), np.float32), precision)
    stored = {"tf32": "float32", "float8_e4m3fn": "bfloat16"}.get(precision, precision)
    return round_to((p.astype(np.float64) @ head.v).astype(np.float32), stored)
