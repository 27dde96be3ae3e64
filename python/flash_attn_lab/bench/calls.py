"""One call as a user makes it: shape, dtype, pass, options. It can be written in a line and read back, made with ours
and with every peer that takes it, and judged against float64.

    bf16 bwd b4 q1024 k1024 h16/4 d128 causal dropout
    fp16 fwd b8 q1 k8192 h64/8 d128 cache page16 heads_first
    fp32 fwd b2 q77 k577 h8 d192/256 bias tf32

The words: dtype, pass, batch, queries and keys of a sequence, heads (of q / of k), head dims (of q and k / of v), then
options of OPTIONS and ways of WAYS in any order. `packedN`: sequences of different lengths, drawn with seed N, whose
longest has q tokens. `cache`: flash_attn_with_kvcache, `pageN` with pages of N keys.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flash_attn_minimal import (
    backward,
    backward_query,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    kvcache_query,
    quantize_fp8,
    query,
)
from flash_attn_minimal.errors import FlashAttnError

from .. import reference
from .check import FACTOR, FLOOR, GRADIENT_FLOOR, round_to, worst
from .machine import DTYPES, SHORT, first_line
from .systems import PACKAGES, Refused, allowing_tf32, backward_of, fa_function, only, varlen_options

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


# ---- making it ----


@dataclass
class Arrays:
    """The inputs of a call on a machine, those of ours and of the peers. There is one set: what fits into the level-2
    cache stays there, for each system alike, as for a caller that has just written it."""

    machine: Any
    call: Call
    q: Any
    k: Any
    v: Any
    options: dict[str, Any]  # of ours
    lengths: tuple = ()  # varlen's arguments
    cache: dict[str, Any] = field(default_factory=dict)  # flash_attn_with_kvcache's
    dout: Any = None
    dense: Any = None  # the peers' mask, once one has made it
    pages: tuple[Any, Any, Any] | None = None

    @classmethod
    def of(cls, machine, call: Call, seed: int = 0) -> Arrays:
        rows_q = (sum(call.lengths),) if call.packed is not None else (call.batch, call.seqlen_q)
        rows_k = rows_q if call.packed is not None else (call.batch, call.seqlen_k)

        def made(rows, heads, width, which):
            if "heads_first" in call.ways:
                return machine.random((rows[0], heads, rows[1], width), call.given, seed + which).swapaxes(1, 2)
            return machine.random((*rows, heads, width), call.given, seed + which)

        q = made(rows_q, call.nheads, call.headdim, 0)
        k, v = (made(rows_k, call.nheads_k, width, i) for i, width in ((1, call.headdim), (2, call.headdim_v)))
        arrays = cls(machine, call, q, k, v, _options(machine, call, seed))
        if call.packed is not None:
            starts = machine.int32([0, *itertools.accumulate(call.lengths)])
            arrays.lengths = (starts, starts, call.seqlen_q, call.seqlen_q)
        if call.is_cache:
            arrays.cache = {"cache_seqlens": machine.int32(list(call.filled))}
        if call.backward:
            arrays.dout = made(rows_q, call.nheads, call.headdim_v, 3)
        return arrays

    def paged(self) -> tuple[Any, Any, Any]:
        """(k_cache, v_cache, block_table): the cache cut into pages, which lie in a shuffled order. What is behind the
        last key of a sequence in its last page is random."""
        if self.pages is None:
            call, machine = self.call, self.machine
            each = -(-call.seqlen_k // call.page)
            order = random.Random(call.page).sample(range(call.batch * each), call.batch * each)
            place = np.argsort(order).tolist()  # order[i]: where page i lies; place[j]: the page that lies at j
            pools = []
            for cache in (self.k, self.v):
                whole = machine.random((call.batch, each * call.page, *cache.shape[2:]), call.given, 30)
                whole[:, : call.seqlen_k] = cache
                pools.append(whole.reshape(call.batch * each, call.page, *cache.shape[2:])[place])
            table = machine.int32(np.asarray(order, np.int32).reshape(call.batch, each).tolist())
            self.pages = pools[0], pools[1], table
        return self.pages


def _options(machine, call: Call, seed: int) -> dict[str, Any]:
    """The keyword arguments of ours."""
    found: dict[str, Any] = {}
    b, h, n_q, n_k = call.batch, call.nheads, call.seqlen_q, call.seqlen_k

    def uniform(shape, which):
        return machine.random(shape, "float32", seed + 10 + which)

    for name in call.options:
        if name == "causal":
            found["causal"] = True
        elif name in WINDOWS:
            found["window_size"] = call.window
        elif name == "softcap":
            found["softcap"] = SOFTCAP
        elif name == "alibi":
            found["alibi_slopes"] = machine.float32([2.0 ** (-8 * (i + 1) / h) for i in range(h)])
        elif name == "sinks":
            found["sinks"] = uniform((h,), 0)
        elif name == "dropout":
            found |= {"dropout_p": DROPOUT, "dropout_seed": 1 + seed}
        elif name == "key_mask":
            columns, ends = machine.int32(list(range(n_k))), machine.int32(list(call.filled))
            found["mask"] = (columns[None, :] < ends[:, None])[:, None, None, :]
        elif name == "pair_mask":
            mask = uniform((b, 1, n_q, n_k), 1) > -1.2816  # nine in ten
            mask[..., 0] = True  # no row is empty: PyTorch gives NaN there
            found["mask"] = mask
        elif name == "causal_mask":
            rows, columns = machine.int32(list(range(n_q))), machine.int32(list(range(n_k)))
            mask = columns[None, :] <= rows[:, None] + (n_k - n_q)
            mask[..., 0] = True
            found["mask"] = mask[None, None]
        elif name == "key_mask_all":
            found["mask"] = _true(machine, (b, 1, 1, n_k))
        elif name == "pair_mask_all":
            found["mask"] = _true(machine, (1, 1, n_q, n_k))
        elif name in BIASES:
            shape = {"bias_batch": (b, h), "bias_shared": (1, 1), "bias_zero": (1, 1)}.get(name, (1, h))
            dtype = "float32" if name == "bias_float32" else call.given
            bias = machine.random((*shape, n_q, n_k), dtype, seed + 20)
            found["bias"] = bias * 0 if name == "bias_zero" else bias
    if "deterministic" in call.ways:
        found["deterministic"] = True
    if "tf32" in call.ways:
        found["allow_tf32"] = True
    return found


def _true(machine, shape):
    return machine.nans(shape, "float32") != 0  # NaN differs from everything


@dataclass
class Made:
    """A system that takes a call. launch(i) returns the output, or (dq, dk, dv)."""

    name: str
    launch: Callable[[int], Any]
    kernel: str | None = None
    heads_second: bool = False  # the answer is (batch, heads, seqlen, headdim)


def ours(arrays: Arrays, kernel: str | None = None, threads: int = 0) -> Made:
    """flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache or backward, outputs given."""
    call, machine, options = arrays.call, arrays.machine, dict(arrays.options)
    if kernel:
        options["kernel"] = kernel
    if machine.device == "cpu" and threads:
        options["num_threads"] = threads
    q, k, v = arrays.q, arrays.k, arrays.v
    factors: dict[str, Any] = {}
    try:
        if call.is_cache:
            if call.page:
                k, v, table = arrays.paged()
                options["block_table"] = table
            options |= arrays.cache
            out = machine.nans(_shape(q, call.headdim_v), call.given)
            options.pop("allow_tf32", None)
            plan = kvcache_query(q, k, v, **options)
            launch = lambda i: flash_attn_with_kvcache(q, k, v, out=out, **options)  # noqa: E731
        else:
            if call.dtype == "float8_e4m3fn":
                (q, a), (k, b), (v, c) = (quantize_fp8(x) for x in (q, k, v))
                factors = {"q_descale": a, "k_descale": b, "v_descale": c}
            attention = flash_attn_varlen_func if arrays.lengths else flash_attn_func
            out = machine.nans(_shape(q, call.headdim_v), call.given)
            everything = options | factors
            if not call.backward:
                plan = query(q, k, v, *arrays.lengths, **everything)
                launch = lambda i: attention(q, k, v, *arrays.lengths, out=out, **everything)  # noqa: E731
            else:
                plan = backward_query(q, k, v, *arrays.lengths, **options)
                if plan.status == "FA_OK":
                    forward = {name: value for name, value in options.items() if name not in ("kernel",)}
                    _, lse = attention(q, k, v, *arrays.lengths, out=out, return_lse=True, **forward)
                    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
                    places = {
                        f"d{n}": machine.nans(tuple(x.shape), call.dtype) for n, x in zip("qkv", (q, k, v), strict=True)
                    }
                    given = dict(zip(names, arrays.lengths, strict=False)) | options | places
                    launch = lambda i: backward(arrays.dout, q, k, v, out, lse, **given)  # noqa: E731
    except FlashAttnError as error:
        raise Refused(first_line(error)) from None
    if plan.status != "FA_OK":
        raise Refused(first_line(plan.error))
    return Made("ours", launch, plan.kernel)


def _shape(q, headdim_v) -> tuple[int, ...]:
    return (*q.shape[:-1], headdim_v)


# ---- peers, all through PyTorch ----

USUAL = {"cuda": ("cudnn", "fa2", "efficient", "fa3", "fa4"), "cpu": ("torch",)}


def peer(name: str, arrays: Arrays) -> Made:
    """A peer, tried once. Refused says why it does not take the call."""
    machine = arrays.machine
    with warnings.catch_warnings():  # PyTorch explains a refusal in warnings
        warnings.simplefilter("ignore")
        try:
            made = (_flash_attention if name in PACKAGES else _packed if arrays.lengths else _sdpa)(name, arrays)
            made.launch(0)
            machine.synchronize()
            return made
        except Refused:
            raise
        except Exception as error:  # whatever a peer raises, ours is timed without it
            why = first_line(error)
    made = None  # out of memory: what the peer has allocated must not be missing for the others
    machine.release()
    raise Refused(why)


def _visible(arrays: Arrays):
    """The bool array that says what a row sees, broadcastable to (batch, heads, seqlen_q, seqlen_k), of everything that
    hides scores in this call; None where nothing does. Causal alone on a square is not in it."""
    call, machine = arrays.call, arrays.machine
    left, right = call.window
    mask = arrays.options.get("mask")
    if call.is_cache:
        columns, ends = machine.int32(list(range(call.seqlen_k))), arrays.cache["cache_seqlens"]
        mask = (columns[None, :] < ends[:, None])[:, None, None, :]
    if left < 0 and right < 0 or (right == 0 and left < 0 and call.seqlen_q == 1):
        return mask
    rows, columns = machine.int32(list(range(call.seqlen_q))), machine.int32(list(range(call.seqlen_k)))
    ends = arrays.cache["cache_seqlens"][:, None] if call.is_cache else machine.int32([[call.seqlen_k]])
    stands = (rows[None, :] + ends - call.seqlen_q)[:, None, :, None]
    seen = columns[None, None, None, :] <= stands + right if right >= 0 else None
    if left >= 0:
        near = columns[None, None, None, :] >= stands - left
        seen = near if seen is None else seen & near
    return seen if mask is None else seen & mask


DENSE = 1 << 32  # numbers in an array that a peer needs and ours does not, above which nobody would make it


def _dense(arrays: Arrays):
    """The attn_mask that a user of scaled_dot_product_attention passes for the options that it does not know: True
    where a row sees a key, or a bias of q's dtype. One array serves all peers, and making it is not timed."""
    call, torch, options = arrays.call, arrays.machine.torch, arrays.options
    if arrays.dense is not None:
        return arrays.dense
    scores = call.seqlen_q * call.seqlen_k
    batch = call.batch if call.is_cache or {"key_mask", "pair_mask", "bias_batch"} & set(call.options) else 1
    heads = call.nheads if {"alibi", *BIASES} & set(call.options) else 1
    if scores * heads * batch > DENSE:
        raise Refused(f"its mask would have {scores * heads * batch} numbers")
    mask, bias = _visible(arrays), options.get("bias")
    if "alibi" in call.options:
        rows = torch.arange(call.seqlen_q, device=arrays.q.device)[:, None] + (call.seqlen_k - call.seqlen_q)
        ends = torch.arange(call.seqlen_k, device=arrays.q.device)[None, :]
        if call.is_cache:
            rows = rows + (arrays.cache["cache_seqlens"] - call.seqlen_k)[:, None, None, None]
        distance = (rows - ends).abs_().float()
        alibi = -options["alibi_slopes"][:, None, None] * distance
        bias = alibi if bias is None else alibi + bias
    if bias is not None:
        bias = bias.to(arrays.q.dtype)
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    arrays.dense = mask
    return mask


def _sdpa(name: str, arrays: Arrays) -> Made:
    """scaled_dot_product_attention with one backend, or with the one that PyTorch picks."""
    call, torch = arrays.call, arrays.machine.torch
    if {"softcap", "sinks"} & set(call.options):
        raise Refused("scaled_dot_product_attention has neither softcap nor sinks")
    more: dict[str, Any] = {"dropout_p": DROPOUT} if "dropout" in call.options else {}
    hides = set(call.options) - {"dropout"}
    if hides == {"causal"} and not call.is_cache and call.seqlen_q == call.seqlen_k:
        more["is_causal"] = True
    elif hides == {"causal"} and not call.is_cache and name in ("fa2", "efficient"):
        from torch.nn.attention.bias import causal_lower_right  # elsewhere it would become an array at each call

        more["attn_mask"] = causal_lower_right(call.seqlen_q, call.seqlen_k)
    elif hides or call.is_cache:
        if name == "fa2":
            raise Refused("FlashAttention-2 in PyTorch takes no mask")
        more["attn_mask"] = _dense(arrays)
    one_for_all = name == "efficient" and call.group > 1 and call.nheads_k == 1 and not call.backward
    if call.group > 1 and not one_for_all:
        more["enable_gqa"] = True
    views = [x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v)]
    if one_for_all:  # it has no grouped heads, but takes a view that repeats the only one
        views[1:] = [x.expand(-1, call.nheads, -1, -1) for x in views[1:]]

    def forward(q, k, v):
        with only(name), _modes(torch, call):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    if not call.backward:
        return Made(name, lambda i: forward(*views), heads_second=True)
    leaves = [x.detach().requires_grad_() for x in views]
    graph = backward_of(torch, [forward(*leaves)], [leaves], [arrays.dout.transpose(1, 2)])

    def launch(i):
        with _modes(torch, call):
            return graph(0)

    return Made(name, launch, heads_second=True)


@contextlib.contextmanager
def _modes(torch, call: Call):
    """PyTorch's switches as the call wants them. With deterministic a backend that has no such order refuses."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    wanted = "deterministic" in call.ways
    with allowing_tf32(torch, "tf32" in call.ways):
        if not wanted:
            yield
            return
        try:
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # a fill of each new array would be timed
            yield
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _packed(name: str, arrays: Arrays) -> Made:
    """FlashAttention-2 on packed sequences, as it comes with PyTorch; on a CPU one call a sequence."""
    call, torch = arrays.call, arrays.machine.torch
    if set(call.options) - {"causal"}:
        raise Refused("packed sequences with options have no peer in PyTorch")
    causal = "causal" in call.options
    if name == "torch":
        starts = [0, *itertools.accumulate(call.lengths)]
        gqa = {"enable_gqa": True} if call.group > 1 else {}

        def attention(q, k, v):
            parts = []
            for a, b in itertools.pairwise(starts):
                one = [x[None, a:b].transpose(1, 2) for x in (q, k, v)]
                parts.append(torch.nn.functional.scaled_dot_product_attention(*one, is_causal=causal, **gqa))
            return torch.cat([part[0].transpose(0, 1) for part in parts])

    elif name == "fa2":
        function, more = varlen_options(torch, causal, call.group > 1)

        def attention(q, k, v):
            return function(q, k, v, *arrays.lengths, **more)

    else:
        raise Refused(f"{name} has no packed sequences in PyTorch")
    return _with_gradients(name, arrays, attention)


def _flash_attention(name: str, arrays: Arrays) -> Made:
    """FlashAttention-3 or -4 through its own package: causal, windows, softcap; FlashAttention-3 over caches, too."""
    call = arrays.call
    if set(call.options) - {"causal", "softcap", *WINDOWS} or "tf32" in call.ways:
        raise Refused(f"{PACKAGES[name]} has not these options")
    if call.dtype == "float32":
        raise Refused(f"{PACKAGES[name]} takes no float32")
    if call.is_cache and name != "fa3":
        raise Refused(f"{PACKAGES[name]} is not timed over caches")
    options: dict[str, Any] = {"causal": "causal" in call.options}
    if set(call.options) & set(WINDOWS):
        options["window_size"] = call.window if name == "fa3" else tuple(None if n < 0 else n for n in call.window)
    if "softcap" in call.options:
        options["softcap"] = SOFTCAP
    if "deterministic" in call.ways:
        options["deterministic"] = True
    q, k, v = arrays.q, arrays.k, arrays.v
    kind = "flash_attn_with_kvcache" if call.is_cache else "flash_attn_varlen_func" if arrays.lengths else ""
    function = fa_function(name, kind or "flash_attn_func")
    if call.is_cache:
        options |= arrays.cache
        if call.page:
            k, v, options["page_table"] = arrays.paged()
    elif arrays.lengths:
        starts, _, longest, _ = arrays.lengths
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attention(q, k, v):
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    if call.is_cache:
        return Made(name, lambda i: attention(q, k, v))
    return _with_gradients(name, arrays, attention)


def _with_gradients(name: str, arrays: Arrays, attention) -> Made:
    q, k, v = arrays.q, arrays.k, arrays.v
    if not arrays.call.backward:
        return Made(name, lambda i: attention(q, k, v))
    torch = arrays.machine.torch
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with _modes(torch, arrays.call):
        graph = backward_of(torch, [attention(*leaves)], [leaves], [arrays.dout])

    def launch(i):
        with _modes(torch, arrays.call):
            return graph(0)

    return Made(name, launch)


# ---- the answer ----

CHECK_WORK = 3e9  # multiplications of the float64 answer of what is looked at: about a second


class Judge:
    """The float64 answer of one head (backward: of one key head), and what an answer may be off there."""

    def __init__(self, arrays: Arrays, seed: int = 0):
        call, host = arrays.call, arrays.machine.host
        draw = random.Random(f"judge {seed} {call}")
        self.call, self.machine = call, arrays.machine
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
        precision = "tf32" if "tf32" in call.ways else call.dtype
        k, v = part(arrays.k, keys, self.h_k), part(arrays.v, keys, self.h_k)
        self.samples: list[tuple[str, int, np.ndarray, np.ndarray]] = []  # array, head, exact, plain
        sums: dict[str, Any] = {"exact": [0.0, 0.0], "plain": [0.0, 0.0]}
        for h in self.heads:
            given = options | {n: host(_plane(options[n], self.b, h)) for n in {"bias", "mask"} & options.keys()}
            head = _head(call, part(arrays.q, whole, h), k, v, self.b, h, given)
            if not call.backward:
                exact, _ = reference._standard(head)
                plain = _plain(head, precision)
                self.samples.append(("out", h, exact, plain))
                continue
            dout = part(arrays.dout, whole, h).astype(np.float64)
            zero = np.zeros(len(dout))
            for kind, given in (("exact", head), ("plain", _rounded(head, precision))):
                dq, dk, dv, *_ = reference._standard_backward(given, dout, zero)
                if kind == "exact":
                    exact_dq = dq
                else:
                    self.samples.append(("dq", h, exact_dq, dq))
                sums[kind][0] = sums[kind][0] + dk
                sums[kind][1] = sums[kind][1] + dv
        if call.backward:
            for i, name in enumerate(("dk", "dv")):
                self.samples.append((name, self.h_k, sums["exact"][i], sums["plain"][i]))

    @staticmethod
    def affordable(call: Call) -> bool:
        n_q, n_k = (max(pair) for pair in zip(*call._each(), strict=True))
        heads = call.group if call.backward else 1
        return heads * n_q * n_k * (call.headdim + call.headdim_v) * (6 if call.backward else 2) <= CHECK_WORK

    def verdict(self, answer, heads_second: bool = False) -> tuple[float, float]:
        """(error, budget) of the array that is furthest off. NaN is an error of infinity."""
        arrays = answer if isinstance(answer, tuple) else (answer,)
        if heads_second:
            arrays = tuple(x.transpose(1, 2) for x in arrays)
        places = dict(zip(("dq", "dk", "dv") if self.call.backward else ("out",), arrays, strict=True))
        verdicts = [(0.0, 1.0)]
        for name, h, exact, plain in self.samples:
            got = self.part(places[name], self.rows_k if name in ("dk", "dv") else self.rows_q, h)
            error = float(np.abs(got - exact).max(initial=0)) if np.isfinite(got).all() else math.inf
            verdicts.append((error, self._budget(exact, plain)))
        return worst(verdicts)

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


def dtypes_of(machine) -> tuple[str, ...]:
    """The dtypes that a machine's arrays have."""
    known = [name for name in DTYPES if name != "float8_e4m3fn" or machine.device == "cuda"]
    found = []
    for name in known:
        try:
            machine.random((1,), "float32" if name == "float8_e4m3fn" else name, 0)
            found.append(name)
        except Exception:  # a framework without this dtype
            continue
    return tuple(found)
