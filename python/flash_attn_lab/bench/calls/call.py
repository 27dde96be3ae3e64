"""One call as a user makes it: shape, dtype, pass, options. It can be written in a line and read back.

    bf16 bwd b4 q1024 k1024 h16/4 d128 causal dropout
    fp16 fwd b8 q1 k8192 h64/8 d128 cache page16 heads_first
    fp32 fwd b2 q77 k577 h8 d192/256 bias tf32

The words: dtype, pass, batch, queries and keys of a sequence, heads (of q / of k), head dims (of q and k / of v), then
options of OPTIONS and ways of WAYS in any order. `packedN`: sequences of different lengths, drawn with seed N, whose
longest has q tokens. `cache`: flash_attn_with_kvcache, `pageN` with pages of N keys.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..machine import SHORT

LONG = {short: long for long, short in SHORT.items()}
MASKS = ("key_mask", "pair_mask", "causal_mask", "key_mask_all", "pair_mask_all")
BIASES = ("bias", "bias_batch", "bias_shared", "bias_float32", "bias_zero")
WINDOWS = ("window", "window_all")
OPTIONS: dict[str, str] = {
    "causal": "causal=True",
    "window": "window_size=(a quarter of the keys to the left; to the right as many, none with causal)",
    "softcap": "softcap=30",
    "alibi": "alibi_slopes: (nheads,) float32",
    "sinks": "sinks: (nheads,) float32",
    "dropout": "dropout_p=0.1",
    "key_mask": "mask: (batch, 1, 1, seqlen_k) bool, the keys behind a sequence's length are False",
    "pair_mask": "mask: (batch, 1, seqlen_q, seqlen_k) bool, one in ten False",
    "causal_mask": "mask: (1, 1, seqlen_q, seqlen_k) bool, a causal mask as an array",
    "bias": "bias: (1, nheads, seqlen_q, seqlen_k) of q's dtype",
    "bias_batch": "bias: (batch, nheads, seqlen_q, seqlen_k) of q's dtype",
    "bias_shared": "bias: (1, 1, seqlen_q, seqlen_k) of q's dtype",
    "bias_float32": "bias: (1, nheads, seqlen_q, seqlen_k) float32",
    # options that change nothing: for the price list
    "window_all": "window_size that cuts nothing",
    "key_mask_all": "mask: (batch, 1, 1, seqlen_k) bool, all True",
    "pair_mask_all": "mask: (1, 1, seqlen_q, seqlen_k) bool, all True",
    "bias_zero": "bias: (1, 1, seqlen_q, seqlen_k) of q's dtype, all zero",
}
SIZES = (r"b(\d+)", r"q(\d+)", r"k(\d+)", r"h(\d+)(?:/(\d+))?", r"d(\d+)(?:/(\d+))?")  # of a line, in their order
WAYS = ("heads_first", "deterministic", "tf32", "cache")
FEW = 16  # queries up to which a call is one of few queries
SOFTCAP, DROPOUT = 30.0, 0.1


class BadCall(ValueError):
    """A text is not a call."""


@dataclass(frozen=True)
class Call:
    """seqlen_q, seqlen_k: of each sequence; packed, of the longest. headdim_v equals headdim unless it is given."""

    dtype: str
    backward: bool
    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    options: tuple[str, ...] = ()
    ways: tuple[str, ...] = ()
    packed: int | None = None  # the seed of the lengths
    page: int = 0  # keys of a page of a cache; 0: the cache is not paged

    # ---- as a line ----

    def __str__(self) -> str:
        words = [SHORT[self.dtype], "bwd" if self.backward else "fwd"]
        words += [f"b{self.batch}", f"q{self.seqlen_q}", f"k{self.seqlen_k}"]
        words.append(f"h{self.nheads}" + (f"/{self.nheads_k}" if self.nheads_k != self.nheads else ""))
        words.append(f"d{self.headdim}" + (f"/{self.headdim_v}" if self.headdim_v != self.headdim else ""))
        words += [] if self.packed is None else [f"packed{self.packed}"]
        words += [*self.options, *self.ways] + ([f"page{self.page}"] if self.page else [])
        return " ".join(words)

    @classmethod
    @functools.lru_cache(maxsize=1 << 14)
    def parse(cls, text: str) -> Call:
        """The call that a line describes; BadCall names the word that is wrong."""
        words = text.split()
        if len(words) < 7:
            raise BadCall(f"{text!r}: a call has a dtype, fwd or bwd, b, q, k, h and d, such as {EXAMPLE!r}")
        dtype, way, *sizes = words[:7]
        if dtype not in LONG:
            raise BadCall(f"{dtype!r}: the first word of a call is one of {', '.join(LONG)}")
        if way not in ("fwd", "bwd"):
            raise BadCall(f"{way!r}: the second word of a call is fwd or bwd")
        numbers: list[int] = []
        for word, pattern in zip(sizes, SIZES, strict=True):
            found = re.fullmatch(pattern, word)
            if not found or "0" in found.groups():
                raise BadCall(f"{word!r}: expected b, q, k, h and d with numbers, such as {EXAMPLE!r}")
            numbers += [int(n or found[1]) for n in found.groups()]
        options, ways, packed, page = [], [], None, 0
        for word in words[7:]:
            if found := re.fullmatch(r"packed(\d+)", word):
                packed = int(found[1])
            elif found := re.fullmatch(r"page(\d+)", word):
                page = int(found[1])
            elif word in OPTIONS:
                options.append(word)
            elif word in WAYS:
                ways.append(word)
            else:
                raise BadCall(f"{word!r} is not one of {', '.join([*OPTIONS, *WAYS, 'packedN', 'pageN'])}")
        return cls(LONG[dtype], way == "bwd", *numbers, tuple(options), tuple(ways), packed, page).checked()

    def checked(self) -> Call:
        """The call itself; BadCall where its parts exclude each other."""
        groups = (("two masks", MASKS), ("two biases", BIASES), ("two windows", WINDOWS))
        reasons = [what for what, names in groups if len(set(names) & set(self.options)) > 1]
        if self.nheads % self.nheads_k:
            reasons.append(f"{self.nheads} heads are not a multiple of {self.nheads_k}")
        if self.packed is not None and (self.seqlen_q != self.seqlen_k or self.is_cache):
            reasons.append("packed sequences have as many keys as queries, and no cache")
        if (self.packed is not None or self.is_cache) and set(self.options) & {*MASKS, *BIASES}:
            reasons.append("packed sequences and caches have neither mask nor bias here")
        if self.is_cache and (self.backward or "dropout" in self.options or "deterministic" in self.ways):
            reasons.append("a cache has no backward pass and no dropout")
        if self.page and not self.is_cache:
            reasons.append("only a cache has pages")
        if self.dtype == "float8_e4m3fn" and (self.backward or set(self.options) - {"causal"} or self.is_cache):
            reasons.append("fp8 has a forward pass, plain or causal, alone")
        if self.backward is False and "deterministic" in self.ways:
            reasons.append("deterministic is for bwd")
        if reasons:
            raise BadCall(f"{str(self)!r}: {'; '.join(reasons)}")
        return self

    # ---- what it is ----

    @property
    def is_cache(self) -> bool:
        return "cache" in self.ways

    @property
    def group(self) -> int:
        return self.nheads // self.nheads_k

    @property
    def few(self) -> bool:
        """Few queries a sequence: a step of decoding."""
        return self.seqlen_q <= FEW

    @property
    def given(self) -> str:
        """The dtype of the inputs as they are made, which peers get: bfloat16 for fp8."""
        return "bfloat16" if self.dtype == "float8_e4m3fn" else self.dtype

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of packed sequences, the longest first."""
        draw = random.Random(f"lengths {self.packed}")
        longest = self.seqlen_q
        more = (max(1, min(longest, round(longest * math.exp(draw.gauss(-1, 0.8))))) for _ in range(self.batch - 1))
        return (longest, *more)

    @property
    def filled(self) -> tuple[int, ...]:
        """Keys of each sequence of a cache, or before the padding of key_mask: the first has all."""
        draw = random.Random(f"filled {self.batch} {self.seqlen_k}")
        least = min(self.seqlen_k, max(self.seqlen_q, self.seqlen_k // 2))
        return (self.seqlen_k, *(draw.randint(least, self.seqlen_k) for _ in range(self.batch - 1)))

    @property
    def window(self) -> tuple[int, int]:
        """(left, right) as window_size has them; -1 is open."""
        left = right = -1
        if "window" in self.options:
            left = right = max(1, self.seqlen_k // 4)
        if "window_all" in self.options:
            left = right = self.seqlen_k + self.seqlen_q
        return (left, 0 if "causal" in self.options else right)

    def pairs(self) -> int:
        """Pairs of a query and a key that causal and window let each other see, over all sequences and heads. Keys that
        an array hides count."""
        left, right = self.window
        total = 0
        for n_q, n_k in self._each():
            end = np.arange(n_q) + n_k - n_q  # the key at which the row stands
            first = np.zeros(n_q, np.int64) if left < 0 else np.maximum(end - left, 0)
            last = np.full(n_q, n_k - 1) if right < 0 else np.minimum(end + right, n_k - 1)
            total += int(np.maximum(last - first + 1, 0).sum())
        return total * self.nheads

    def _each(self):
        if self.packed is not None:
            return [(n, n) for n in self.lengths]
        if self.is_cache:
            return [(self.seqlen_q, n) for n in self.filled]
        return [(self.seqlen_q, self.seqlen_k)] * self.batch

    @property
    def flops(self) -> float:
        width = 3 * self.headdim + 2 * self.headdim_v if self.backward else self.headdim + self.headdim_v
        return 2.0 * width * self.pairs()

    @property
    def elements(self) -> int:
        """How many numbers the call keeps in memory: q, k, v, out, bias and mask."""
        tokens_q = sum(self.lengths) if self.packed is not None else self.batch * self.seqlen_q
        tokens_k = tokens_q if self.packed is not None else self.batch * self.seqlen_k
        wide = self.headdim + self.headdim_v
        scores = self.seqlen_q * self.seqlen_k
        more = {"pair_mask": self.batch, "bias_batch": self.batch * self.nheads}
        more |= dict.fromkeys(("bias", "bias_float32"), self.nheads)
        arrays = sum(more.get(name, 1) * scores for name in self.options if name in (*MASKS, *BIASES))
        return (tokens_q * self.nheads + tokens_k * self.nheads_k) * wide + arrays

    def fields(self) -> dict[str, Any]:
        """The call's part of a row."""
        return {
            "call": str(self),
            "pass": "bwd" if self.backward else "fwd",
            "dtype": self.dtype,
            "headdim": self.headdim,
            "headdim_v": self.headdim_v,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "batch": self.batch,
            "nheads": self.nheads,
            "nheads_k": self.nheads_k,
        }


EXAMPLE = "bf16 bwd b4 q1024 k1024 h16/4 d128 causal dropout"


# ---- drawing ----

HEADDIMS = (
    64, 64, 64, 64, 128, 128, 128, 128, 128, 256, 256, 96, 80, 72, 40, 32, 112, 160, 192, 224, 16, 320, 384, 512,
)  # fmt: skip
TWO_HEADDIMS = ((192, 128), (96, 128), (128, 64), (64, 128), (192, 256), (256, 512))
SINGLE = ("window", "softcap", "alibi", "sinks", "dropout", "key_mask", "pair_mask", "causal_mask", "bias", "bias")
PAIRS = (  # options that programs use together
    ("causal", "window"), ("causal", "window"), ("causal", "softcap"), ("causal", "alibi"), ("causal", "sinks"),
    ("causal", "dropout"), ("causal", "dropout"), ("causal", "key_mask"), ("causal", "key_mask"), ("causal", "bias"),
    ("dropout", "key_mask"),
    ("dropout", "bias"), ("bias", "key_mask"), ("bias", "pair_mask"), ("window", "softcap"), ("window", "sinks"),
    ("alibi", "key_mask"), ("dropout", "pair_mask"), ("softcap", "key_mask"),
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """How large a drawn call may be."""

    flops: float
    elements: float
    seqlen: int
    tokens: int


LIMITS = {
    "cuda": Limits(flops=8e12, elements=6e8, seqlen=32768, tokens=1 << 17),
    "cpu": Limits(flops=2e9, elements=1e7, seqlen=4096, tokens=1 << 13),
}
WEIGHTS = {  # of dtypes
    "cuda": {"bfloat16": 5, "float16": 3, "float32": 3, "float8_e4m3fn": 0.5},
    "cpu": {"bfloat16": 3, "float16": 1, "float32": 6},
}


def drawn(seed: int, number: int, device: str, dtypes: tuple[str, ...]) -> Call:
    """Call `number` of the sweep with this seed: the same on every machine with this device and these dtypes."""
    for attempt in itertools.count():
        draw = random.Random(f"sweep {seed} {number} {attempt} {device} {' '.join(dtypes)}")
        call = _draw(draw, LIMITS[device], {name: WEIGHTS[device][name] for name in dtypes})
        try:
            call.checked()
        except BadCall:
            continue
        limits = LIMITS[device]
        if call.elements <= limits.elements and call.flops <= limits.flops:
            return call
    raise AssertionError("unreachable")


def _length(draw: random.Random, most: int, least: int = 0) -> int:
    """Half of the lengths are powers of two, as programs pad them; a quarter are near one; the rest are anything. One
    in five may be short: a bare launch is most of what such a call costs."""
    least = least or (17 if draw.random() < 0.2 else 128)
    n = round(math.exp(draw.uniform(math.log(least), math.log(most))))
    kind = draw.random()
    if kind < 0.75:
        n = 1 << round(math.log2(n))
        n += draw.choice((-1, 1, -3, 13)) if kind < 0.25 else 0
    return min(max(n, least), most)


def _draw(draw: random.Random, limits: Limits, weights: dict[str, float]) -> Call:
    dtype = draw.choices(list(weights), list(weights.values()))[0]
    headdim = draw.choice(HEADDIMS)
    headdim_v = headdim
    if draw.random() < 0.05:
        headdim, headdim_v = draw.choice(TWO_HEADDIMS)
    nheads_k = draw.choice((1, 2, 4, 8, 8, 8, 12, 16, 16, 32))
    nheads = nheads_k * draw.choice((1, 1, 1, 1, 2, 4, 4, 7, 8, 16) if nheads_k <= 8 else (1, 1, 1, 2))
    kind = draw.random()
    ways: list[str] = []
    packed, page = None, 0
    if kind < 0.5:  # self-attention
        seqlen_q = seqlen_k = _length(draw, limits.seqlen)
    elif kind < 0.6:
        seqlen_q = seqlen_k = _length(draw, limits.seqlen // 4)
        packed = draw.randrange(1000)
    elif kind < 0.72:  # few queries over many keys
        seqlen_q, seqlen_k = draw.choice((1, 1, 1, 2, 4, 8, 16)), _length(draw, limits.seqlen, 64)
    elif kind < 0.82:
        seqlen_q, seqlen_k = draw.choice((1, 1, 1, 2, 5, 16)), _length(draw, limits.seqlen, 64)
        ways.append("cache")
        page = draw.choice((0, 0, 16, 64, 256))
    else:  # a chunk of a prompt, or cross-attention
        seqlen_q, seqlen_k = (_length(draw, limits.seqlen) for _ in range(2))
    least = max(1, limits.tokens // (16 * max(seqlen_q, seqlen_k)))
    batch = min(draw.choice((1, 2, 4, 8, 16, 32, 64)), max(1, round(least * 16 * math.exp(draw.uniform(-2, 0)))))
    options: tuple[str, ...] = ()
    kind = draw.random()
    if kind < 0.25:
        pass
    elif kind < 0.42:
        options = ("causal",)
    elif kind < 0.8:
        options = (draw.choice(SINGLE),)
    else:
        options = draw.choice(PAIRS)
    options = tuple(draw.choice(BIASES[:4]) if name == "bias" and draw.random() < 0.4 else name for name in options)
    if dtype == "float32":
        options = tuple("bias" if name == "bias_float32" else name for name in options)
    if {"causal", "causal_mask", "window"} & set(options) and seqlen_q > seqlen_k:  # else some rows would see nothing
        seqlen_q, seqlen_k = seqlen_k, seqlen_q
    if seqlen_q == 1:  # the only query sees all keys
        options = tuple(name for name in options if name not in ("causal", "causal_mask"))
    is_backward = draw.random() < 0.5 and dtype != "float8_e4m3fn" and not ways and seqlen_q > FEW
    ways += ["heads_first"] if draw.random() < 0.3 and packed is None and not ways else []
    ways += ["deterministic"] if is_backward and draw.random() < 0.1 else []
    ways += ["tf32"] if dtype == "float32" and draw.random() < 0.2 else []
    shape = batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v
    return Call(dtype, is_backward, *shape, options, tuple(ways), packed, page)
