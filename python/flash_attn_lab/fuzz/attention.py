"""Draws, makes and judges calls of flash_attn_func and flash_attn_varlen_func."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from flash_attn_minimal import attention
from flash_attn_minimal._core.queries import kernel_tables
from flash_attn_minimal.backward import backward_query

from .. import reference
from . import judge
from .arrays import Array, Numpy, as_dtype, normal, random_intervals
from .draw import Draw
from .function import Function
from .judge import Wrong

E4M3 = "float8_e4m3fn"
INT_OPTIONS = (-1, 5000, 2**31, 1.5, "x")
SCORE_OPTIONS = {
    "causal": (2, "yes", None),
    "softmax_scale": (float("nan"), float("inf"), 1e300, "big"),
    "window_size": (3, [1, 2, 3], [-2, 0], [0, -5], [0.5, 0], [0, 2**63]),
    "softcap": (-1.0, float("nan"), [], float("inf")),
    "attention_chunk": (-1, 2**31, 1.5, "x"),
    "kernel": ("nonesuch", 3, ""),
    "num_threads": INT_OPTIONS,
}


def repeated(x: np.ndarray, layout) -> np.ndarray:
    """x with equal elements along the axes to which the layout gives stride 0."""
    for axis in (layout or {}).get("repeat", ()):
        x = np.repeat(x.take([0], axis), x.shape[axis], axis) if x.shape[axis] else x
    return x


def round_to_tf32(x: np.ndarray) -> np.ndarray:
    """x rounded to 10 bits of mantissa, ties away from zero."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x)


def plain_tf32_head(head: reference.Head):
    rounded = {name: round_to_tf32(getattr(head, name).astype(np.float32)).astype(np.float64) for name in "qkv"}
    return judge.plain_head(dataclasses.replace(head, **rounded), "float32")


def plain_e4m3_head(head: reference.Head):
    """Attention whose P is rounded to e4m3 (three bits of fraction) before it is normalised; the largest P of a row is
    1."""
    everything = slice(None)
    out, lse = reference._standard(head)
    s = head.scores(everything, everything)
    top = reference._or_zero(np.max(s, axis=1, initial=-np.inf))
    p = np.exp(s - top[:, None])
    total = p.sum(1, keepdims=True)
    return as_dtype(p, E4M3) @ head.v / np.where(total == 0, 1, total), lse


def results_of(got, more: Sequence[str], views) -> dict[str, Any]:
    """The results of a call by name: out, then `more`. A given out is among the views already; the call has to return
    that array, and it is left out here."""
    results = dict(zip(("out", *more), got if more else (got,), strict=True))
    if "out" not in views:
        return results
    if results.pop("out") is not views["out"]:
        raise Wrong("the call returned another array than the given out")
    return results


def largest_score(q, k, softmax_scale) -> float:
    """An upper bound of the scores, before bias and softcap."""
    norms = [float(np.linalg.norm(x, axis=-1).max(initial=0)) for x in (q, k)]
    return norms[0] * norms[1] * abs(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


def score_floor(q, k, softmax_scale) -> float:
    """judge.rounding_floor, made wider because there are very many cases: the error of a float32 sum of headdim terms
    grows with the root of headdim."""
    floor = judge.rounding_floor(q, k, softmax_scale)
    return 1e-5 + (floor - 1e-5) * (1 + q.shape[-1] ** 0.5 / 8)


@functools.cache
def runnable(table: str, device: str) -> list[str]:
    """The names in a table of kernels for this device; on the CPU only kernels whose instructions the processor has."""
    names = [kernel["name"] for kernel in kernel_tables()[table] if kernel["device"] == device]
    ask = {"forward": attention.query, "backward": backward_query}.get(table)
    if device != "cpu" or ask is None:
        return names
    arrays = Numpy()  # every kernel takes bfloat16, one takes nothing else
    q = np.zeros((1, 1, 1, 8), arrays.native("bfloat16" if "bfloat16" in arrays.dtypes else "float32"))
    return [n for n in names if "lacks the instruction set" not in ask(q, q, q, kernel=n).error]


def clean(x: np.ndarray) -> np.ndarray:
    """x with 0 for NaN. A case has NaN only where no row may look."""
    return np.nan_to_num(x, nan=0.0)


class Forward(Function):
    """flash_attn_func, and with `lens` (seqlen_q and seqlen_k of every sequence) flash_attn_varlen_func."""

    DEFAULTS: dict[str, Any] = {
        "dtype": "float32", "batch": 1, "seqlen_q": 1, "seqlen_k": 1, "nheads_k": 1, "group": 1, "headdim": 8,
        "headdim_v": None, "causal": False, "top_left": False, "window_size": None, "softcap": 0.0, "alibi": 0,
        "bias": None, "bias_float32": False, "bias_hides": False, "mask": None, "mask_rate": 0.7, "sinks": False,
        "dropout_p": 0.0, "softmax_scale": None, "spread": 1.0, "out": False, "layouts": {}, "lens": None,
        "extra": [0, 0], "longer": [0, 0], "allow_tf32": False, "num_threads": 0, "deterministic": False, "hide": False,
        "descale": None, "fast_accum": False, "out_dtype": None, "repeats": 0, "return_lse": True, "kernel": None,
        "max_score": False, "key_sums": False, "attention_chunk": 0, "intervals": None, "blocks": None,
    }  # fmt: skip
    LEAST = {"nheads_k": 1, "group": 1, "headdim": 1, "headdim_v": 1}
    REQUIRED = ("q", "k", "v")
    LOOSE = {"q": (1, 2), "v": (3,)}
    BAD_OPTIONS = SCORE_OPTIONS | {
        "dropout_p": (-0.1, 1.0, float("nan"), "half"),
        "dropout_seed": (-1, 2**64, 1.5),
        "dropout_offset": (-1, "x"),
        "deterministic": (3,),
        "top_left": (None, 7),
        "allow_tf32": ("x", 5),
        "return_lse": ("no",),
        "return_max_score": (3,),
        "return_key_sums": ("x",),
        "out_dtype": ("int8", "float64", 3),
        "fast_accum": (3,),
    }
    ALIASES = (("out", "q"), ("out", "k"), ("out", "v"))
    max_headdim, queried = 512, True

    def __init__(self, name: str, varlen: bool, weight: float):
        self.name, self.varlen, self.weight = name, varlen, weight
        if varlen:  # q alone may have one more row or head
            self.LOOSE = {"q": (0, 1), "v": (2,)}

    def kernels(self, backend):
        return runnable("forward", backend.device)

    # ---- drawing ----

    def draw(self, draw: Draw, backend) -> dict[str, Any]:
        spec = self.draw_shape(draw, backend)
        self.draw_scores(draw, backend, spec)
        factors_apart: dict[str, Any] = {}
        if spec["dtype"] == E4M3:
            spec["fast_accum"] = draw.chance(0.4)
            spec["out_dtype"] = draw.pick((None, "bfloat16", "float16"))
            batch, heads = self._batch(spec), {"q": spec["nheads_k"] * spec["group"]}
            spec["descale"] = {
                n: draw.pick(([batch, h], [1, h], [batch, 1], [1, 1], [h], [1]))
                for n, h in ((n, heads.get(n, spec["nheads_k"])) for n in "qkv")
            }
            if draw.chance(0.3):
                factors_apart = {f"{n}_descale": {"pad": [draw.below(3)] * 2, "step": 1 + draw.below(3)} for n in "qkv"}
        spec["repeats"] = draw.pick((0, 0, 0, 0, 1, 2))
        spec["return_lse"] = draw.chance(0.8)
        spec["out"] = draw.chance(0.7)
        spec["num_threads"] = draw.pick((0, 0, 1, 2, 3, 7)) if backend.device == "cpu" else 0
        rank = 3 if self.varlen else 4
        ranks = {"q": rank, "k": rank, "v": rank, "out": rank, **self._option_ranks(spec)}
        spec["layouts"] = draw.layouts(ranks, backend, outputs=("out",)) | factors_apart
        for name in ("max_score", "key_sums"):
            spec[name] = spec["dtype"] != E4M3 and draw.option(0.25)
        return spec

    def draw_shape(self, draw: Draw, backend) -> dict[str, Any]:
        floats = [t for t in ("float32", "float16", "bfloat16") if t in backend.dtypes]
        dtype = draw.pick(floats)
        if E4M3 in backend.dtypes and draw.chance(0.12 + 0.2 * draw.plain if backend.device == "cuda" else 0.01):
            dtype = E4M3
        headdim = draw.headdim(self.max_headdim)
        headdim_v = draw.headdim(self.max_headdim) if draw.option(0.25) else None
        if draw.chance(0.04):
            headdim, headdim_v = 192, 128
        (work, elements), wide = draw.budget(), headdim + (headdim_v or headdim) + 32  # + 32 for the scores
        spec = {"dtype": dtype, "headdim": headdim, "headdim_v": headdim_v}
        if draw.chance(0.12):  # about as many pieces of work as multiprocessors
            pieces = draw.near_multiprocessors(backend.multiprocessors, int(min(300, elements / wide / 8)))
            spec["batch"] = draw.log_uniform(1, pieces)
            heads = max(pieces // spec["batch"], 1)
            spec["group"] = draw.pick([g for g in (1, 2, 4, 8) if heads % g == 0])
            spec["nheads_k"] = heads // spec["group"]
        else:
            spec["batch"] = draw.pick((0, 1, 1, 1, 2, 3)) if draw.chance(0.97) else 9
            spec["nheads_k"], spec["group"] = draw.pick((1, 1, 2, 2, 3, 4)), draw.groups(12)
        heads = spec["batch"] * spec["nheads_k"] * spec["group"]
        if not self.varlen:
            spec["seqlen_q"], spec["seqlen_k"] = self._lengths(draw, work, elements, wide, max(heads, 1), spec["group"])
            return spec
        del spec["batch"]
        heads = max(spec["nheads_k"] * spec["group"], 1)
        count = draw.pick((1, 2, 3, 4, 4, 7)) if draw.chance(0.95) else draw.log_uniform(1, 40)
        most = work / count, elements / count, wide, heads, spec["group"]
        spec["lens"] = [list(self._lengths(draw, *most)) for _ in range(count)]
        if draw.chance(0.2):
            spec["lens"] = [[min(pair)] * 2 for pair in spec["lens"]] if draw.chance(0.5) else count * [spec["lens"][0]]
        spec["extra"] = [draw.pick((0, 0, 0, 1, 30)), draw.pick((0, 0, 0, 1, 30))]
        spec["longer"] = [draw.pick((0, 0, 1, 100)), draw.pick((0, 0, 1, 100))]
        return spec

    @staticmethod
    def _lengths(draw: Draw, work, elements, wide, heads, group) -> tuple[int, int]:
        """seqlen_q and seqlen_k within the budgets of work and of elements, for this number of heads."""
        area, most_q = int(work / wide / heads), int(elements / wide / heads)
        most_k = most_q * group
        if draw.chance(0.3):
            n = draw.size(min(int(area**0.5), most_q))
            return n, n
        if draw.chance(0.3):
            k = draw.size(min(area, most_k, 1500))
            return draw.size(min(area // max(k, 1), most_q)), k
        q = draw.size(min(area, most_q)) if draw.chance(0.7) else draw.below(6)
        return q, draw.size(min(area // max(q, 1), most_k))

    def draw_scores(self, draw: Draw, backend, spec) -> None:
        fp8 = spec["dtype"] == E4M3
        rare = 0.05 if fp8 else 1.0
        spec["causal"] = draw.chance(0.45)
        spec["top_left"] = draw.option(0.15)
        if draw.option(0.2 * rare):
            spec["window_size"] = [draw.pick((-1, 0, 1, draw.size(300), 2**40)), draw.pick((-1, -1, 0, draw.size(200)))]
        spec["softcap"] = draw.pick((1.0, 30.0)) if draw.option(0.12 * rare) else 0.0
        spec["alibi"] = draw.pick((1, 2)) if draw.option(0.12 * rare) else 0
        for name in ("bias", "mask"):
            if draw.option(0.12 * rare):
                spec[name] = [draw.chance(0.5) for _ in range(draw.below(4))]
        spec["bias_float32"] = draw.chance(0.5)
        spec["bias_hides"] = draw.chance(0.3)
        spec["mask_rate"] = draw.pick((0.0, 0.1, 0.5, 0.9))
        spec["sinks"] = draw.option(0.12 * rare)
        spec["dropout_p"] = draw.pick((0.1, 0.5, 0.9, 1e-6)) if draw.option(0.1 * rare) else 0.0
        if draw.option(0.2):
            spec["softmax_scale"] = (
                round(float(draw.rng.uniform(-2, 2)), 3) if draw.chance(0.6) else draw.pick((0.0, 1.0))
            )
        spec["spread"] = draw.pick((1.0, 1.0, 1.0, 1.0, 30.0)) if not fp8 else 1.0
        spec["allow_tf32"] = spec["dtype"] == "float32" and draw.chance(0.4)
        spec["hide"] = draw.chance(0.25)
        if draw.option(0.08 * rare):
            spec["attention_chunk"] = draw.pick((1, 64, 1 + draw.size(300)))
        if draw.option(0.15 * rare):  # see _intervals
            spec["intervals"] = [draw.below(3), draw.below(2), draw.below(2)]
            many = spec.get("lens") is None and spec["headdim"] <= 128 and not spec.get("headdim_v")
            if many and backend.device == "cuda" and draw.chance(0.03):  # kernels have plans for many keys
                rows, keys = 1 + draw.below(60), draw.pick((8193, 16385, 32769)) + draw.below(300)
                spec |= {"batch": 1, "nheads_k": 1, "group": 1, "seqlen_q": rows, "seqlen_k": keys}
        if draw.option(0.1 * rare):  # see _blocks
            spec["blocks"] = [draw.below(3), draw.pick((64, 128)), draw.pick((64, 128)), draw.below(2)]

    def _option_ranks(self, spec) -> dict[str, int]:
        ranks = {"alibi_slopes": spec["alibi"]} if spec.get("alibi") else {}
        if spec.get("intervals"):
            ranks["startend_row_indices"] = 4 if spec.get("lens") is None else 3
        if spec.get("blocks"):
            ranks["block_mask"] = 4
        return ranks | {n: len(spec[n]) + 1 for n in ("bias", "mask") if spec.get(n) is not None}

    # ---- the call ----

    def _batch(self, spec) -> int:
        lens = self.get(spec, "lens")
        return self.get(spec, "batch") if lens is None else len(lens)

    def _cu(self, spec) -> tuple[np.ndarray, np.ndarray]:
        starts = np.zeros((len(spec["lens"]) + 1, 2), np.int32)
        starts[1:] = np.cumsum(spec["lens"], axis=0)
        return starts[:, 0].copy(), starts[:, 1].copy()

    def _longest(self, spec) -> list[int]:
        longer = self.get(spec, "longer")
        return [max((n[i] for n in spec["lens"]), default=0) + longer[i] for i in (0, 1)]

    def shapes(self, spec) -> dict[str, tuple[int, ...]]:
        get = functools.partial(self.get, spec)
        if get("lens") is None:
            lead_q, lead_k = (get("batch"), get("seqlen_q")), (get("batch"), get("seqlen_k"))
            longest = [get("seqlen_q"), get("seqlen_k")]
        else:
            lead_q, lead_k = (([sum(n[i] for n in get("lens")) + get("extra")[i]]) for i in (0, 1))
            longest = self._longest(spec)
        heads, wide = get("nheads_k") * get("group"), get("headdim_v") or get("headdim")
        shapes = {
            "q": (*lead_q, heads, get("headdim")),
            "k": (*lead_k, get("nheads_k"), get("headdim")),
            "v": (*lead_k, get("nheads_k"), wide),
            "out": (*lead_q, heads, wide),
        }
        batch = self._batch(spec)
        if get("alibi"):
            shapes["alibi_slopes"] = (batch, heads)[2 - get("alibi") :]
        for name in ("bias", "mask"):
            if (full := get(name)) is not None:
                sizes = (batch, heads, longest[0])[3 - len(full) :]
                shapes[name] = (*(size if whole else 1 for size, whole in zip(sizes, full, strict=True)), longest[1])
        if get("sinks"):
            shapes["sinks"] = (heads,)
        if get("intervals"):
            shapes["startend_row_indices"] = self._intervals(spec, lead_k)
        if get("blocks"):
            shapes["block_mask"] = self._blocks(spec, batch, longest)
        return shapes

    def _blocks(self, spec, batch, longest) -> tuple[int, ...]:
        """The shape of block_mask. The spec has four choices: one mask for all heads, for each key head or for each
        head; rows of a block; keys of a block; one mask for the batch or for each of its entries."""
        of_heads, *sizes, shared = self.get(spec, "blocks")
        nheads_k, group = self.get(spec, "nheads_k"), self.get(spec, "group")
        counts = (-(-length // size) for length, size in zip(longest, sizes, strict=True))
        return 1 if shared else batch, (1, nheads_k, nheads_k * group)[of_heads], *counts

    def _intervals(self, spec, lead_k) -> tuple[int, ...]:
        """The shape of startend_row_indices. The spec has three choices: one list of numbers for all heads, for each
        key head or for each head; fewer or more numbers; one for the batch or for each of its entries."""
        of_heads, more, shared = self.get(spec, "intervals")
        nheads_k, group = self.get(spec, "nheads_k"), self.get(spec, "group")
        heads = (1, nheads_k, nheads_k * group)[of_heads]
        numbers = ((1, 2) if self.get(spec, "causal") else (2, 4))[more]
        *batch, keys = lead_k
        return *(1 if shared else size for size in batch), heads, keys, numbers

    def _descale(self, spec) -> dict[str, tuple[int, ...]]:
        """The shapes of the factors of float8: every size of the spec but 1 stands for the whole batch or all heads,
        however many a smaller spec has."""
        if self.get(spec, "dtype") != E4M3:
            return {}
        given, shapes = self.get(spec, "descale") or {}, {}
        for name in "qkv":
            whole = self._batch(spec), self.get(spec, "nheads_k") * (self.get(spec, "group") if name == "q" else 1)
            sizes = given.get(name, [1])
            shapes[f"{name}_descale"] = tuple(
                1 if size == 1 else all_of for size, all_of in zip(sizes, whole[2 - len(sizes) :], strict=True)
            )
        return shapes

    def arrays(self, spec) -> dict[str, Array]:
        dtype, layouts = self.get(spec, "dtype"), self.get(spec, "layouts")
        kinds = {"alibi_slopes": "float32", "sinks": "float32", "mask": "bool", "startend_row_indices": "int32",
                 "block_mask": "bool"}  # fmt: skip
        kinds["bias"] = "float32" if self.get(spec, "bias_float32") else dtype
        kinds["out"] = (self.get(spec, "out_dtype") or "bfloat16") if dtype == E4M3 else dtype
        found = {
            name: Array(tuple(shape), kinds.get(name, dtype), layouts.get(name, {}), name == "out")
            for name, shape in self.shapes(spec).items()
            if name != "out" or self.get(spec, "out")
        }
        if self.get(spec, "lens") is not None:
            for name in ("cu_seqlens_q", "cu_seqlens_k"):
                found[name] = Array((len(spec["lens"]) + 1,), "int32")
        for name, shape in self._descale(spec).items():
            found[name] = Array(shape, "float32", layouts.get(name, {}))
        return found

    def values(self, spec) -> dict[str, np.ndarray]:
        get = functools.partial(self.get, spec)
        rng = np.random.default_rng(spec.get("seed", 0))
        dtype, layouts = get("dtype"), get("layouts")
        values = {}
        for name, shape in self.shapes(spec).items():
            if name == "out":
                continue
            if name in ("mask", "block_mask"):
                x = rng.random(shape) < get("mask_rate")
            elif name == "startend_row_indices":
                rows = get("seqlen_q") if get("lens") is None else self._longest(spec)[0]
                x = random_intervals(rng, shape, rows)
            elif name == "alibi_slopes":
                x = rng.uniform(0.01, 0.5, shape).astype(np.float32)
            else:
                kind = dtype if name in "qkv" or (name == "bias" and not get("bias_float32")) else "float32"
                x = normal(rng, shape, kind, 60.0 if kind == E4M3 else get("spread") if name == "q" else 1.0)
                if name == "bias" and get("bias_hides"):
                    x[rng.random(shape) < 0.2] = -np.inf
            values[name] = repeated(x, layouts.get(name))
        for name, shape in self._descale(spec).items():
            values[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32) / np.float32(60)
        if get("lens") is not None:
            values["cu_seqlens_q"], values["cu_seqlens_k"] = self._cu(spec)
            for name, rows in (("q", "q"), ("k", "k"), ("v", "k")):
                if "repeat" not in layouts.get(name, {}):
                    values[name][values[f"cu_seqlens_{rows}"][-1] :] = np.nan
        if get("hide"):
            self._hide(spec, values)
        return values

    def _hide(self, spec, values) -> None:
        """Puts NaN into keys and values that no row may see."""
        layouts, group = self.get(spec, "layouts"), self.get(spec, "group")
        names = [name for name in ("k", "v") if "repeat" not in layouts.get(name, {})]
        for rows, columns, more in self._sequences(spec, values):
            q, k, v = (values[n][part] for n, part in (("q", rows), ("k", columns), ("v", columns)))
            if self.get(spec, "lens") is not None:
                q, k, v = q[None], k[None], v[None]
            seen = np.zeros((k.shape[0], k.shape[2], k.shape[1]), bool)
            for b, h, head in reference.heads(q, k, v, **more):
                seen[b, h // group] |= head.visible(slice(None), slice(None)).any(0)
            for name in names:
                part = values[name][columns]
                part = part[None] if self.get(spec, "lens") is not None else part
                part.swapaxes(1, 2)[~seen] = np.nan

    def _sequences(self, spec, values):
        """Yields (rows of q, rows of k, options of the reference), once for a dense batch, or for every packed
        sequence."""
        scores = self._scores(spec, values)
        if self.get(spec, "lens") is None:
            yield slice(None), slice(None), scores
            return
        cu_q, cu_k = self._cu(spec)
        for b in range(len(cu_q) - 1):
            columns = slice(cu_k[b], cu_k[b + 1])
            yield (
                slice(cu_q[b], cu_q[b + 1]),
                columns,
                reference._of_sequence(scores, columns, cu_q, cu_k) | {"sequence": b},
            )

    def _scores(self, spec, values) -> dict[str, Any]:
        """The options as the reference takes them."""
        names = ("alibi_slopes", "bias", "mask", "startend_row_indices", "block_mask", "sinks")
        scores = {name: values[name] for name in names if name in values}
        if "block_mask" in scores:
            scores["block"] = tuple(self.get(spec, "blocks")[1:3])
        for name in ("causal", "top_left", "softcap", "softmax_scale", "dropout_p", "attention_chunk"):
            if self.get(spec, name) != self.DEFAULTS[name]:
                scores[name] = self.get(spec, name)
        if "dropout_p" in scores:
            scores |= self._dropout(spec)
        if self.get(spec, "window_size") is not None:
            scores["window_size"] = tuple(spec["window_size"])
        return scores

    @staticmethod
    def _dropout(spec) -> dict[str, int]:
        seed = spec.get("seed", 0)
        return {"dropout_seed": 2**63 + seed, "dropout_offset": 2**40 + seed % 7}

    def options(self, spec) -> dict[str, Any]:
        options = {k: v for k, v in self._scores(spec, {}).items()}
        float8 = ("fast_accum", "out_dtype") if self.get(spec, "dtype") == E4M3 else ()
        for name in ("allow_tf32", "num_threads", "deterministic", *float8):
            if self.get(spec, name) != self.DEFAULTS[name]:
                options[name] = self.get(spec, name)
        if self.get(spec, "lens") is not None:
            options["max_seqlen_q"], options["max_seqlen_k"] = self._longest(spec)
        return options | {f"return_{name}": True for name in ("max_score", "key_sums") if self.get(spec, name)}

    def query(self, spec, views, options):
        return attention.query(**views, **options)

    def call(self, spec, views, options):
        function = attention.flash_attn_func if self.get(spec, "lens") is None else attention.flash_attn_varlen_func
        wanted = {"return_lse": True} if self.get(spec, "return_lse") else {}
        wanted |= options
        got = function(**views, **wanted)
        return results_of(
            got, [name for name in ("lse", "max_score", "key_sums") if wanted.get(f"return_{name}")], views
        )

    def written(self, spec, values):
        if not self.get(spec, "out"):
            return {}
        return {"out": ... if self.get(spec, "lens") is None else slice(0, sum(n[0] for n in spec["lens"]))}

    def always_served(self, spec):
        return self.get(spec, "dtype") != E4M3

    def bad_contents(self, spec, values, draw):
        if self.get(spec, "lens") is None:
            return None
        name = draw.pick(("cu_seqlens_q", "cu_seqlens_k"))
        at = draw.below(len(values[name]))
        wrong = [-1, -(2**31), 2**31 - 1, int(values[name.replace("cu_seqlens_", "")].shape[0]) + 1]
        return name, at, draw.pick([1, *wrong] if at == 0 else wrong)

    # ---- the answer ----

    def attend(self, spec, values, one_head):
        """(out, lse) from a function of one head, with q, k and v times their descale factors."""
        q, k, v = self._inputs(spec, values)
        scores = self._scores(spec, values)

        def whole(q, k, v, **options):
            return reference._over_heads(one_head, q, k, v, options)

        if self.get(spec, "lens") is None:
            return whole(q, k, v, **scores)
        return reference.varlen(whole, q, k, v, *self._cu(spec), **scores)

    def _inputs(self, spec, values) -> list[np.ndarray]:
        arrays = [clean(values[name]) for name in "qkv"]
        if self.get(spec, "dtype") != E4M3:
            return arrays
        batch = self._batch(spec)
        for i, name in enumerate("qkv"):
            factor = np.broadcast_to(values[f"{name}_descale"], (batch, arrays[i].shape[-2])).astype(np.float64)
            if self.get(spec, "lens") is None:
                arrays[i] = arrays[i] * factor[:, None, :, None]
                continue
            starts = self._cu(spec)[name != "q"]
            wide = np.zeros(arrays[i].shape)
            for b in range(batch):
                rows = slice(starts[b], starts[b + 1])
                wide[rows] = arrays[i][rows] * factor[b, None, :, None]
            arrays[i] = wide
        return arrays

    def judge(self, spec, values, after, results):
        exact, exact_lse = self.attend(spec, values, reference._standard)
        out, dtype = results["out"] if "out" in results else after["out"], self.get(spec, "dtype")
        if self.get(spec, "lens") is not None:
            covered = sum(n[0] for n in spec["lens"])
            if "out" in results and np.any(out[covered:]):
                raise Wrong("rows of out that belong to no sequence are not 0")
            out, exact = out[:covered], exact[:covered]
        else:
            covered = None
        q, k, v = self._inputs(spec, values)
        if dtype == E4M3:
            self._judge_e4m3(spec, values, out, exact, results, exact_lse, v)
            return
        scale = self.get(spec, "softmax_scale")
        floor = score_floor(q, k, scale)
        one_head, epsilon = functools.partial(judge.plain_head, dtype=dtype), dtype
        tf32 = dtype == "float32" and self.get(spec, "allow_tf32")
        if tf32:  # 10 bits of fraction, as float16 has, in the scores, in P and in v
            one_head, epsilon = plain_tf32_head, "float16"
            floor = 1e-5 + (floor - 1e-5) * 2**11
        plain = functools.cache(lambda: self.attend(spec, values, one_head))
        if "lse" in results:
            judge.check("lse", results["lse"], exact_lse, lambda: plain()[1], "float32", floor=floor)
        if "max_score" in results:
            greatest, room = self._statistic("max_score", spec, values), 2 * floor
            if tf32:  # the products of one score may all be off to the same side
                room += 2.0**-10 * largest_score(q, k, scale)
            judge.check("max_score", results["max_score"], greatest, greatest, "float32", floor=room)
        if "key_sums" in results:
            # The relative error of a probability is the error of its score and lse.
            sums, largest = (
                self._statistic("key_sums", spec, values),
                np.abs(exact_lse[np.isfinite(exact_lse)]).max(initial=1.0),
            )
            judge.within(
                "key_sums", results["key_sums"], sums, floor + 4 * (floor + 2.0**-23 * largest) * (1 + np.abs(sums))
            )
        room = floor * max(1.0, float(np.abs(exact).max(initial=0)))  # dropout scales P up: outputs can be many times v
        room += self.noise(spec, v)
        judge.check("out", out, exact, lambda: plain()[0][:covered], epsilon, floor=room)

    def _statistic(self, name: str, spec, values) -> np.ndarray:
        arrays, scores = self._inputs(spec, values), self._scores(spec, values)
        if self.get(spec, "lens") is None:
            return getattr(reference, name)(*arrays, **scores)
        return getattr(reference, f"varlen_{name}")(*arrays, *self._cu(spec), **scores)

    def noise(self, spec, v) -> float:
        """The error of out that a distribution of the work over ranks adds."""
        return 0.0

    def _judge_e4m3(self, spec, values, out, exact, results, exact_lse, v):
        rounded = self.attend(spec, values, plain_e4m3_head)[0][: len(exact)]
        budget = 2 * np.abs(rounded - exact).max(initial=0) + 2**-5 * np.abs(v).max(initial=0) + 1e-5
        judge.within("out", out, exact, budget)
        if "lse" in results:  # scores, too, are truncated to 13 bits
            finite = np.abs(exact_lse[np.isfinite(exact_lse)]).max(initial=0)
            judge.within("lse", results["lse"], exact_lse, 1e-2 + 2**-9 * finite)


DENSE = Forward("flash_attn_func", varlen=False, weight=6)
VARLEN = Forward("flash_attn_varlen_func", varlen=True, weight=3)
FUNCTIONS = (DENSE, VARLEN)
