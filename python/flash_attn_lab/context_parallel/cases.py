"""The cases that are timed, and how often each of them runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..bench.machine import DTYPES

K = 1024
DOCUMENTS = (3000, 17000, 1017, 18983, 15555, 9981)  # 64k tokens
_RATE = {"cuda": (6e14, 4.5e14), "cpu": (2e10, 1.5e10)}  # FLOP/s forward, backward: guesses, only for the time left
_BYTES = {"cuda": 3e12, "cpu": 5e9}  # bytes of a cache read per second, a guess


@dataclass(frozen=True)
class Case:
    """Self-attention of sequences with these lengths. In a decode case: one query for each sequence against its
    cache."""

    name: str
    lengths: tuple[int, ...]
    of: str = "forward"  # or "backward", "decode"
    nheads: int = 64
    nheads_k: int = 8
    headdim: int = 128
    causal: bool = True
    window: tuple[int, int] | None = None
    layout: str = "zigzag"
    dtype: str = "bfloat16"
    line: bool = False  # a point of a line in the picture
    widely: bool = False  # by default also run by threads and by peers

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        """Two products of 2 x headdim FLOP for each visible pair and head; five in the backward pass."""
        products = 5 if self.of == "backward" else 2
        return 2.0 * products * sum(map(self._pairs, self.lengths)) * self.headdim * self.nheads

    def _pairs(self, n: int) -> int:
        if self.of == "decode":
            return n
        if self.window:
            seen = min(self.window[0] + 1, n)  # keys that a late query sees, under a causal mask
            return seen * (seen + 1) // 2 + (n - seen) * seen
        return n * (n + 1) // 2 if self.causal else n * n

    @property
    def options(self) -> dict:
        """Options of the attention call."""
        return {"causal": self.causal} | ({"window_size": self.window} if self.window else {})

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values in a decode case; 0 in others."""
        return 2 * self.tokens * self.nheads_k * self.headdim * DTYPES[self.dtype] * (self.of == "decode")

    def row(self) -> dict:
        """The fields of a result row that describe the case."""
        row = {
            "case": self.name, "pass": self.of, "tokens": self.tokens, "sequences": len(self.lengths),
            "nheads": self.nheads, "nheads_k": self.nheads_k, "headdim": self.headdim, "causal": self.causal,
            "dtype": self.dtype, "layout": self.layout,
        }  # fmt: skip
        if self.window:
            row["window"] = list(self.window)
        if self.of == "decode":
            row["cache_bytes"] = self.cache_bytes
        return row | ({"line": True} if self.line else {})

    def seconds(self, device: str, ranks: int, turns: int, protocol: Protocol, modes: int) -> float:
        """An estimate of the time that the case takes. turns: how many ranks share a device."""
        once = self.flops / _RATE[device][self.of == "backward"] + self.cache_bytes / _BYTES[device]
        alone, together = (n * t for n, t in ((protocol.count(t), t) for t in (once, once / ranks)))
        rounds = protocol.turns(once)
        return 1.0 + 4 * once + min(rounds, protocol.rounds_alone) * turns * alone + rounds * modes * together


@dataclass(frozen=True)
class Protocol:
    """How often systems run: in bursts of calls, one burst in each round."""

    rounds: int = 5
    burst_s: float = 0.06
    least: int = 3  # calls in a burst
    most_s: float = 1.0  # a burst of `least` calls that takes longer has fewer calls
    whole_s: float = 20.0  # if `rounds` bursts take longer, there are fewer rounds
    rounds_alone: int = 1000  # in this many rounds, one device alone is timed as well

    def count(self, once: float) -> int:
        """Calls in a burst, if one call takes `once` seconds."""
        once = max(once, 1e-6)
        return max(math.ceil(self.burst_s / once), min(self.least, math.ceil(self.most_s / once)))

    def turns(self, once: float) -> int:
        """Rounds, if the longest call takes `once` seconds."""
        return max(1, min(self.rounds, math.ceil(self.whole_s / max(once * self.count(once), 1e-6))))


QUICK_ROUNDS = 3
CPU = Protocol(burst_s=0.02, most_s=0.2)


def _short(tokens: int) -> str:
    return f"{tokens // K**2}m" if tokens % K**2 == 0 else f"{tokens // K}k" if tokens % K == 0 else f"{tokens}"


def _line(of: str, lengths: tuple[int, ...], widely: tuple[int, ...], **shape) -> list[Case]:
    return [Case(f"{of}-{_short(n)}", (n,), of, line=True, widely=n in widely, **shape) for n in lengths]


def _gpu() -> list[Case]:
    full = {"nheads": 32, "nheads_k": 32}
    return [
        *_line("forward", (8 * K, 16 * K, 32 * K, 64 * K, 128 * K), (8 * K, 32 * K, 64 * K)),
        *_line("backward", (16 * K, 64 * K, 128 * K), (16 * K, 64 * K)),
        Case("heads-64k", (64 * K,), **full),
        Case("full-64k", (64 * K,), causal=False),
        Case("documents-zigzag", DOCUMENTS),
        Case("documents-flat", DOCUMENTS, layout="flat"),
        Case("window-64k", (64 * K,), window=(4096, 0)),
        Case("headdim64-64k", (64 * K,), headdim=64),
    ]


def _gpu_long() -> list[Case]:
    return [
        *_line("forward", (K**2,), ()),
        *(Case(f"decode-1m-x{batch}", (K**2,) * batch, "decode", causal=False) for batch in (1, 16)),
    ]


def _cpu() -> list[Case]:
    shape = {"nheads": 4, "nheads_k": 2, "headdim": 64, "dtype": "float32"}
    documents = 300, 1, 517, 206
    return [
        *_line("forward", (512, K, 2 * K), (512, K), **shape),
        *_line("backward", (512, K), (512,), **shape),
        Case("heads-1k", (K,), **shape | {"nheads_k": 4}),
        Case("full-1k", (K,), causal=False, **shape),
        Case("documents-zigzag", documents, **shape),
        Case("documents-flat", documents, layout="flat", **shape),
        Case("window-1k", (K,), window=(256, 0), **shape),
        Case("headdim32-1k", (K,), **shape | {"headdim": 32}),
    ]


def _cpu_long() -> list[Case]:
    shape = {"nheads": 4, "nheads_k": 2, "headdim": 64, "dtype": "float32"}
    return [
        *_line("forward", (8 * K,), (), **shape),
        *(Case(f"decode-16k-x{batch}", (16 * K,) * batch, "decode", causal=False, **shape) for batch in (1, 4)),
    ]


USUAL = {"cuda": _gpu, "cpu": _cpu}
LONG = {"cuda": _gpu_long, "cpu": _cpu_long}
QUICKLY = {"cuda": ("forward-8k", "forward-64k", "backward-16k"), "cpu": ("forward-512", "backward-512")}


def known(device: str) -> dict[str, Case]:
    """All cases of a device by name."""
    return {case.name: case for case in [*USUAL[device](), *LONG[device]()]}


def chosen(device: str, names: list[str] | None, quick: bool, long: bool) -> list[Case]:
    """The named cases, or else the usual ones: fewer with quick, more with long."""
    found = known(device)
    if names is not None:
        return [replace(found[name], widely=True) for name in names]
    usual = [found[name] for name in QUICKLY[device]] if quick else USUAL[device]()
    return usual + (LONG[device]() if long else [])
