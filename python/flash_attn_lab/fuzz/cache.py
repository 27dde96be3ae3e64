"""Draws, makes and judges calls of flash_attn_with_kvcache and quantize_kvcache."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flash_attn_minimal import kvcache, kvcache_quantize

from .. import reference
from . import judge
from .arrays import Array, as_dtype, normal
from .attention import INT_OPTIONS, SCORE_OPTIONS, repeated, results_of, runnable
from .draw import Draw
from .function import Function
from .judge import Wrong, round_to

E4M3 = "float8_e4m3fn"
MOST = {"int8": np.float32(127), E4M3: np.float32(448)}
PAGES = (1, 2, 3, 8, 16, 16, 17, 32, 64, 64, 100, 128, 256)
UNEVEN = (2339, 2936, 1777, 999)  # lengths that no tile and no number of pieces divides
KEYS = ("k", "v")


def quantised(x: np.ndarray, factor: np.ndarray, dtype: str) -> np.ndarray:
    """x / factor rounded to an 8-bit type, as numbers. NaN becomes -127 in int8."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.asarray(x, np.float32) / factor
    if dtype == "int8":
        return np.where(np.isnan(ratio), -127, np.clip(np.rint(ratio), -127, 127)).astype(np.int8)
    return as_dtype(np.clip(ratio, -448, 448), E4M3)


class Cached(Function):
    """flash_attn_with_kvcache. `lengths` are the numbers of keys before the call: one number for all sequences, None if
    there is just room for the new keys, or a list, in which a negative number stands for an idle sequence."""

    name = "flash_attn_with_kvcache"
    weight = 7
    DEFAULTS: dict[str, Any] = {
        "dtype": "float32", "lengths": [1], "batch": 1, "seqlen_q": 1, "seqlen_new": 0, "rows": 1, "pages": 0,
        "spare": 0, "batch_idx": False, "nheads_k": 1, "group": 1, "headdim": 8, "headdim_v": None, "latent": False,
        "cache_dtype": None, "scales": "heads", "causal": False, "window_size": None, "softcap": 0.0, "alibi": 0,
        "sinks": False, "softmax_scale": None, "rotary_dim": 0, "rotary_interleaved": True, "rotary_float32": False,
        "rotary_rows": 0, "num_splits": 0, "tree": 0, "trees": 1, "batch_invariant": False, "programmatic": False,
        "out": False, "return_softmax_lse": True, "layouts": {}, "num_threads": 0, "spread": 1.0, "repeats": 0,
        "kernel": None, "attention_chunk": 0, "leftpad": False, "whole_table": False, "shared_prefix": False,
        "common_pages": 0,
    }  # fmt: skip
    LEAST = {"nheads_k": 1, "group": 1, "headdim": 1, "headdim_v": 1, "rows": 1, "batch": 1, "trees": 1}
    REQUIRED = ("q", "k_cache", "v_cache")
    LOOSE = {"q": (1, 2), "v_cache": (3,)}
    FREE = {"block_table": (1,)}
    BAD_OPTIONS = SCORE_OPTIONS | {
        "num_splits": (-1, 257, 1.5),
        "tree_keys": (-1, 65, 1.5),
        "batch_invariant": (2, "x"),
        "programmatic": (3,),
        "shared_prefix": (2, "x"),
        "return_softmax_lse": ("no",),
        "cache_leftpad": (0,),
    }
    queried = True
    ALIASES = (("out", "q"), ("out", "k_cache"), ("out", "v_cache"))

    def kernels(self, backend):
        return runnable("forward", backend.device)

    # ---- drawing ----

    def draw(self, draw: Draw, backend) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "dtype": draw.pick(
                [t for t in ("float16", "bfloat16", "float16", "bfloat16", "float32") if t in backend.dtypes]
            )
        }
        spec["headdim"] = draw.headdim()
        if draw.option(0.15):
            spec["headdim_v"] = draw.headdim()
        if draw.chance(0.1 + 0.3 * draw.plain):
            spec["headdim"], spec["headdim_v"] = draw.pick(((576, 512), (576, 512), (192, 128), (560, 300)))
        wide = spec["headdim"] + (spec.get("headdim_v") or min(spec["headdim"], 512))
        if spec["headdim"] > 512 and not spec.get("headdim_v"):
            spec["headdim_v"] = 512
        work, elements = draw.budget(0.05)
        spec["seqlen_q"] = draw.pick((1, 1, 1, 1, 1, 2, 3, 4, 5, 7, 8, 16)) if draw.chance(0.8) else draw.size(200)
        spec["group"] = draw.groups(16)
        rows = max(spec["seqlen_q"], 1) * spec["group"]
        if draw.chance(0.35):  # just fewer, as many, or more pieces of work than fill the processor
            tiles = -(-rows // 64)
            pieces = draw.near_multiprocessors(backend.multiprocessors, int(min(400, elements / wide / 8) * tiles))
            entries = max(pieces // tiles, 1)
            spec["nheads_k"] = draw.pick([h for h in (1, 1, 2, 3, 4, 8) if entries % h == 0])
            batch = entries // spec["nheads_k"]
            most = int(min(work / wide / rows, elements / wide) / entries)
            fitting = [n for n in UNEVEN if n <= most] or [max(most, 1)]
            length = draw.pick(fitting) if draw.chance(0.6) else draw.size(min(most, 8000), 1)
        else:
            batch = draw.pick((1, 1, 2, 2, 3, 5)) if draw.chance(0.95) else draw.log_uniform(1, 40)
            spec["nheads_k"] = draw.pick((1, 1, 2, 3, 4, 8))
            most = int(min(work / wide / rows, elements / wide) / batch / spec["nheads_k"])
            length = draw.size(min(most, 16000))
        spec["seqlen_new"] = draw.pick((0, 0, 1, 1, 1, 2, 5)) if draw.chance(0.9) else draw.size(70)
        kind = draw.rng.random()
        if kind < 0.35:
            lengths: Any = [length] * batch
        else:
            lengths = [draw.size(length) if draw.chance(0.8) else length for _ in range(batch)]
        if draw.chance(0.12):
            lengths[draw.below(batch)] = draw.pick((-1, -1, -5, -(2**31)))
        if draw.chance(0.05):
            lengths = [0] * batch
        if kind < 0.15:
            lengths = length
        elif kind < 0.2:
            lengths = None
        spec["lengths"], spec["batch"] = lengths, batch
        most = max(lengths) if isinstance(lengths, list) else length
        room = max(most, 0) + spec["seqlen_new"] + draw.pick((0, 0, 1, 5, 64))
        if draw.chance(0.5):
            page = draw.pick(PAGES) if draw.chance(0.9) else 1 + draw.below(300)
            spec["rows"], spec["pages"] = page, max(-(-room // page), 1)
        else:
            spec["rows"], spec["batch_idx"] = max(room, 1), draw.chance(0.3)
        spec["spare"] = draw.pick((0, 0, 1, 3))
        if draw.option(0.35):
            spec["cache_dtype"] = draw.pick([t for t in ("int8", E4M3) if t in backend.dtypes])
            spec["scales"] = draw.pick(("heads", "entries", "tokens", "tokens"))
        elif spec.get("headdim_v") and spec["headdim_v"] < spec["headdim"] and draw.chance(0.5):
            spec["latent"] = True
        if not spec.get("latent") and draw.chance(0.4 if spec["seqlen_new"] else 0.1):
            spec["rotary_dim"] = (
                2 * (1 + draw.below(spec["headdim"] // 2)) if draw.chance(0.5) else spec["headdim"] // 2 * 2
            )
            spec["rotary_interleaved"], spec["rotary_float32"] = draw.chance(0.5), draw.chance(0.5)
        spec["causal"] = draw.chance(0.4)
        if draw.option(0.15):
            spec["window_size"] = [draw.pick((-1, 0, 100, draw.size(300))), draw.pick((-1, 0, 3))]
        spec["softcap"] = draw.pick((1.0, 30.0)) if draw.option(0.1) else 0.0
        spec["alibi"] = draw.pick((1, 2)) if draw.option(0.1) else 0
        spec["sinks"] = draw.option(0.1)
        if draw.option(0.2):
            self._draw_tree(draw, spec)
        if draw.option(0.15):
            spec["softmax_scale"] = round(float(draw.rng.uniform(-1, 1)), 3)
        spec["leftpad"] = draw.option(0.12)
        if draw.option(0.08) and not spec.get("tree"):
            spec["attention_chunk"] = draw.pick((1, 64, 1 + draw.size(300)))
        spec["num_splits"] = draw.pick((1, 2, 3, 7, 16, 100, 256)) if draw.chance(0.3) else 0
        spec["batch_invariant"], spec["programmatic"] = draw.chance(0.2), draw.chance(0.2)
        spec["out"], spec["return_softmax_lse"] = draw.chance(0.8), draw.chance(0.7)
        spec["num_threads"] = draw.pick((0, 0, 1, 2, 3)) if backend.device == "cpu" else 0
        spec["spread"] = draw.pick((1.0, 1.0, 1.0, 10.0))
        spec["repeats"] = draw.pick((0, 0, 0, 1, 2))
        ranks = {"q": 4, "out": 4, "k_cache": 4}
        if not spec.get("latent"):
            ranks["v_cache"] = 4
        if spec["seqlen_new"]:
            ranks |= {"k": 4, "v": 4}
        outputs = ("out", "k_cache", "v_cache")
        spec["layouts"] = draw.layouts(ranks, backend, outputs=outputs, p=0.25)
        if spec.get("pages") and draw.chance(0.2):
            spec["layouts"]["block_table"] = {"pad": [0, 1 + draw.below(5)]}
        if spec.get("cache_dtype") and draw.chance(0.3):
            for name in ("k_scale", "v_scale"):
                rank = 1 if spec["scales"] == "heads" else 3
                spec["layouts"][name] = {"pad": [draw.below(3) for _ in range(rank)], "step": 1 + draw.below(3)}
        spec["layouts"] = {name: layout for name, layout in spec["layouts"].items() if layout}
        if spec.get("pages") and not spec["leftpad"]:  # padding is NaN, which is not to be another sequence's keys
            spec["common_pages"] = draw.below(spec["pages"] + 1) if draw.chance(0.4) else 0
            spec["shared_prefix"] = not spec["batch_invariant"] and draw.chance(0.7 if spec["common_pages"] else 0.1)
        return spec

    def trimmed(self, spec):
        if not spec.get("pages"):  # only pages can be shared
            spec = {k: v for k, v in spec.items() if k not in ("common_pages", "shared_prefix")}
        return super().trimmed(spec)

    @staticmethod
    def _draw_tree(draw: Draw, spec: dict[str, Any]) -> None:
        """Draws a tree of draft tokens, and removes options that depend on positions."""
        spec["tree"], spec["trees"] = draw.pick((1, 2, 7, 8, 16, 31, 32, 33, 63, 64)), draw.pick((1, 2))
        spec["causal"], spec["alibi"] = False, 0
        spec.pop("window_size", None), spec.pop("rotary_dim", None)

    # ---- the call ----

    def capacity(self, spec) -> int:
        return self.get(spec, "rows") * (self.get(spec, "pages") or 1)

    def batch(self, spec) -> int:
        lengths = self.get(spec, "lengths")
        return len(lengths) if isinstance(lengths, list) else self.get(spec, "batch")

    def new(self, spec) -> int:
        return min(self.get(spec, "seqlen_new"), self.capacity(spec))

    def before(self, spec) -> list[int]:
        """The number of keys of each sequence before the call, at most as many as there is room for. (A shrunk spec may
        ask for more.)"""
        lengths, most = self.get(spec, "lengths"), self.capacity(spec) - self.new(spec)
        if lengths is None:
            lengths = most
        if not isinstance(lengths, list):
            lengths = [lengths] * self.batch(spec)
        return [min(n, most) for n in lengths]

    def entries(self, spec) -> int:
        return self.batch(spec) * max(self.get(spec, "pages"), 1) + self.get(spec, "spare")

    def scales(self, spec) -> str:
        """The kind of scales: which values share a factor. With pages of one row, "entries" is the same as "tokens"."""
        kind = self.get(spec, "scales")
        return "tokens" if kind == "entries" and self.get(spec, "rows") == 1 else kind

    def wide(self, spec) -> dict[str, int]:
        headdim = self.get(spec, "headdim")
        return {"k": headdim, "v": self.get(spec, "headdim_v") or min(headdim, 512)}

    def latent(self, spec) -> bool:
        """Whether v_cache is the first columns of k_cache."""
        wide = self.wide(spec)
        plain = self.get(spec, "cache_dtype") is None and not self.rotary(spec)
        return self.get(spec, "latent") and plain and wide["v"] <= wide["k"]

    def rotary(self, spec) -> int:
        return min(self.get(spec, "rotary_dim"), self.get(spec, "headdim")) // 2 * 2

    def rotary_rows(self, spec) -> int:
        return self.get(spec, "rotary_rows") or self.capacity(spec) + self.get(spec, "seqlen_q") + 1

    def arrays(self, spec):
        get = functools.partial(self.get, spec)
        dtype, layouts, wide = get("dtype"), get("layouts"), self.wide(spec)
        batch, heads, new = self.batch(spec), get("nheads_k") * get("group"), self.new(spec)
        cache = (self.entries(spec), get("rows"), get("nheads_k"))
        eight, rotary = get("cache_dtype"), self.rotary(spec)

        def array(name, shape, kind=dtype, output=False, inside=None):
            return Array(tuple(shape), kind, layouts.get(name, {}), output, inside)

        found = {"q": array("q", (batch, get("seqlen_q"), heads, wide["k"]))}
        found["k_cache"] = array("k_cache", (*cache, wide["k"]), eight or dtype, new > 0)
        inside = "k_cache" if self.latent(spec) else None
        found["v_cache"] = array("v_cache", (*cache, wide["v"]), eight or dtype, new > 0, inside)
        if new:
            for name in KEYS:
                found[name] = array(name, (batch, new, get("nheads_k"), wide[name]))
        if isinstance(get("lengths"), list):
            found["cache_seqlens"] = array("cache_seqlens", (batch,), "int32")
        if get("pages"):
            found["block_table"] = array("block_table", (batch, get("pages")), "int32")
        elif get("batch_idx"):
            found["cache_batch_idx"] = array("cache_batch_idx", (batch,), "int32")
        if rotary:
            kind = "float32" if get("rotary_float32") else dtype
            for name in ("rotary_cos", "rotary_sin"):
                found[name] = array(name, (self.rotary_rows(spec), rotary // 2), kind)
        if eight:
            shape = {"heads": cache[2:], "entries": (cache[0], 1, cache[2]), "tokens": cache}[self.scales(spec)]
            for name in ("k_scale", "v_scale"):
                found[name] = array(name, shape, "float32", new > 0 and self.scales(spec) == "tokens")
        if get("alibi"):
            found["alibi_slopes"] = array("alibi_slopes", (batch, heads)[2 - get("alibi") :], "float32")
        if get("tree"):
            found["tree_mask"] = array("tree_mask", (batch, get("seqlen_q"))[2 - get("trees") :], "int64")
        if get("sinks"):
            found["sinks"] = array("sinks", (heads,), "float32")
        if get("leftpad"):
            found["cache_leftpad"] = array("cache_leftpad", (batch,), "int32")
        if get("out"):
            found["out"] = array("out", (batch, get("seqlen_q"), heads, wide["v"]), dtype, True)
        return found

    def places(self, spec, values, b: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The entries of the cache, and the rows in them, of `count` keys of sequence b from `first` on."""
        at = np.arange(first, first + count)
        if self.get(spec, "pages"):
            page, row = np.divmod(at, self.get(spec, "rows"))
            return values["block_table"][b, page], row
        return np.full(count, values["cache_batch_idx"][b] if "cache_batch_idx" in values else b), at

    def values(self, spec):
        get = functools.partial(self.get, spec)
        rng = np.random.default_rng(spec.get("seed", 0))
        dtype, arrays, before, new = get("dtype"), self.arrays(spec), self.before(spec), self.new(spec)
        batch = self.batch(spec)

        values = {"q": repeated(normal(rng, arrays["q"].shape, dtype, get("spread")), get("layouts").get("q"))}
        if new:
            for name in KEYS:
                values[name] = repeated(normal(rng, arrays[name].shape, dtype), get("layouts").get(name))
            if self.latent(spec):
                values["v"] = repeated(values["k"][..., : self.wide(spec)["v"]].copy(), get("layouts").get("v"))
                if "repeat" in get("layouts").get("v", {}):
                    values["k"][..., : self.wide(spec)["v"]] = values["v"]
                    values["k"] = repeated(values["k"], get("layouts").get("k"))
                    values["v"] = values["k"][..., : self.wide(spec)["v"]].copy()
        if isinstance(get("lengths"), list):
            values["cache_seqlens"] = np.array(before, np.int32)
        order = rng.permutation(self.entries(spec)).astype(np.int32)
        used = [-(-(n + new) // get("rows")) if n >= 0 else 0 for n in before]
        if get("pages"):
            pages = get("pages")
            used = [pages] * batch if get("whole_table") else used
            nonsense = np.where(rng.random((batch, pages)) < 0.5, 2**31 - 1, -(2**31))
            table = order[: batch * pages].reshape(batch, pages)
            for b in range(1, batch):  # with the first sequence, as far as neither appends there
                common = max(min(get("common_pages"), before[0] // get("rows"), before[b] // get("rows")), 0)
                table[b, :common] = table[0, :common]
            values["block_table"] = np.where(np.arange(pages) < np.array(used)[:, None], table, nonsense).astype(
                np.int32
            )
        elif get("batch_idx"):
            values["cache_batch_idx"] = order[:batch]
        self._fill_caches(spec, values, arrays, before, rng)
        if "rotary_cos" in arrays:
            angle = np.outer(np.arange(self.rotary_rows(spec)), 100.0 ** -np.linspace(0, 1, self.rotary(spec) // 2))
            for name, function in (("rotary_cos", np.cos), ("rotary_sin", np.sin)):
                values[name] = round_to(function(angle), arrays[name].dtype)
        if get("alibi"):
            values["alibi_slopes"] = rng.uniform(0.01, 0.5, arrays["alibi_slopes"].shape).astype(np.float32)
        if get("tree"):
            values["tree_mask"] = self._tree(rng, arrays["tree_mask"].shape)
        if get("sinks"):
            values["sinks"] = rng.standard_normal(arrays["sinks"].shape, dtype=np.float32)
        if get("leftpad"):
            values["cache_leftpad"] = np.array([rng.integers(0, max(n, 0) + 1) for n in before], np.int32)
            for b, padding in enumerate(values["cache_leftpad"]):  # padding may hold anything
                for name in KEYS:
                    nothing = 127 if get("cache_dtype") == "int8" else np.nan
                    values[f"{name}_cache"][self.places(spec, values, b, 0, padding)] = nothing
        return values

    @staticmethod
    def _tree(rng, shape) -> np.ndarray:
        """Masks of rows that see many, few, all or none of the draft tokens."""
        words = rng.integers(-(2**63), 2**63 - 1, shape, np.int64, endpoint=True)
        fewer = words & rng.integers(-(2**63), 2**63 - 1, shape, np.int64, endpoint=True)
        kind = rng.integers(0, 4, shape)
        return np.select([kind == 0, kind == 1, kind == 2], [words, fewer, np.full(shape, -1, np.int64)], 0)

    def _fill_caches(self, spec, values, arrays, before, rng) -> None:
        """Puts keys and values into the rows of sequences, and NaN (in int8: 127) into every other row."""
        dtype, eight, kind = self.get(spec, "dtype"), self.get(spec, "cache_dtype"), self.scales(spec)
        for name in KEYS:
            cache = np.full(arrays[f"{name}_cache"].shape, np.nan, np.float32)
            for b, length in enumerate(before):
                if length > 0:
                    shape = (length, *cache.shape[2:])
                    cache[self.places(spec, values, b, 0, length)] = normal(rng, shape, dtype)
            if self.latent(spec) and name == "v":
                values["v_cache"] = values["k_cache"][..., : cache.shape[-1]]
                continue
            if not eight:
                values[f"{name}_cache"] = cache
                continue
            shape = arrays[f"{name}_scale"].shape
            if kind == "tokens":
                factors = (np.abs(cache).max(-1) / MOST[eight]).astype(np.float32)
            else:
                factors = rng.uniform(2, 6, shape).astype(np.float32) / MOST[eight]
            wide = np.where(np.isnan(factors), 1, factors)[..., None] if kind == "tokens" else factors[..., None]
            stored = quantised(cache, wide, eight)
            if eight == "int8":
                stored[np.isnan(cache)] = 127
            values[f"{name}_cache"], values[f"{name}_scale"] = stored, factors

    def options(self, spec):
        get = functools.partial(self.get, spec)
        options = {}
        for name in (
            "causal", "softcap", "softmax_scale", "num_splits", "batch_invariant", "programmatic", "num_threads",
            "attention_chunk", "shared_prefix",
        ):  # fmt: skip
            if get(name) != self.DEFAULTS[name]:
                options[name] = get(name)
        if get("window_size") is not None:
            options["window_size"] = tuple(get("window_size"))
        if get("tree"):
            options["tree_keys"] = get("tree")
        if not isinstance(get("lengths"), list) and get("lengths") is not None:
            options["cache_seqlens"] = max(self.before(spec)[0], 0)
        if self.rotary(spec):
            options["rotary_interleaved"] = get("rotary_interleaved")
        return options

    def query(self, spec, views, options):
        return kvcache.kvcache_query(**views, **options)

    def call(self, spec, views, options):
        wanted = {"return_softmax_lse": True} if self.get(spec, "return_softmax_lse") else {}
        got = kvcache.flash_attn_with_kvcache(**views, **(wanted | options))
        return results_of(got, ["lse"] if wanted else [], views)

    def appended(self, spec, values) -> tuple[np.ndarray, np.ndarray]:
        """The entries of the cache, and the rows in them, that the call writes."""
        new = self.new(spec)
        places = [self.places(spec, values, b, n, new) for b, n in enumerate(self.before(spec)) if n >= 0]
        if not places or not new:
            return np.zeros(0, int), np.zeros(0, int)
        return tuple(np.concatenate(part) for part in zip(*places, strict=True))

    def written(self, spec, values):
        at = self.appended(spec, values)
        found = {"out": ...} if self.get(spec, "out") else {}
        if not len(at[0]):
            return found
        return found | {name: at for name, array in self.arrays(spec).items() if array.output and name != "out"}

    def bad_contents(self, spec, values, draw):
        far = (2**31 - 1, -(2**31), 10**6)
        before, new = self.before(spec), self.new(spec)
        names = [n for n in ("cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad") if n in values]
        busy = [b for b, n in enumerate(before) if n + new > 0 and n >= 0]
        if not names or not busy:
            return None
        name, b = draw.pick(names), draw.pick(busy)
        if name == "cache_seqlens":
            return name, b, draw.pick((self.capacity(spec) - new + 1, 2**31 - 1, 10**6))
        if name == "cache_leftpad":
            return name, b, draw.pick((-1, before[b] + 1, 2**31 - 1))
        if name == "cache_batch_idx":
            return name, b, draw.pick((*far, -1, self.entries(spec)))
        page = draw.below(-(-(before[b] + new) // self.get(spec, "rows")))
        return name, b * self.get(spec, "pages") + page, draw.pick((*far, -1, self.entries(spec)))

    # ---- the answer ----

    def judge(self, spec, values, after, results):
        get = functools.partial(self.get, spec)
        self._judge_appended(spec, values, after)
        dtype, before, new = get("dtype"), self.before(spec), self.new(spec)
        q = values["q"].astype(np.float64)
        ordered = get("causal") or max(get("window_size") or [-1]) >= 0 or get("attention_chunk") > 0
        if "rotary_cos" in values:
            for b, length in enumerate(before):
                if length >= 0:
                    q[b] = self._turned(values, q[b], length, ordered, get("rotary_interleaved"))
            q = round_to(q.astype(np.float32), dtype)
        caches = {f"{n}_cache": after[f"{n}_cache"] for n in KEYS}
        rest = {
            n: values[n]
            for n in ("block_table", "cache_batch_idx", "cache_leftpad", "alibi_slopes", "sinks", "tree_mask")
            if n in values
        }
        rest |= {"tree_keys": get("tree")} if get("tree") else {}
        rest |= {n: after[n] for n in ("k_scale", "v_scale") if n in after}
        for name in ("causal", "softcap", "softmax_scale", "attention_chunk"):
            if get(name) != self.DEFAULTS[name]:
                rest[name] = get(name)
        if get("window_size") is not None:
            rest["window_size"] = tuple(get("window_size"))
        rest["cache_seqlens"] = [n if n < 0 else n + new for n in before]

        def attend(one_head):
            def whole(q, k, v, **options):
                return reference._over_heads(one_head, q, k, v, options)

            return reference.kvcache_attention(q, **caches, **rest, attention=whole)

        exact = attend(reference._standard)
        plain = functools.cache(lambda: attend(functools.partial(judge.plain_head, dtype=dtype)))
        largest = {n: self._largest(after, values, n) for n in KEYS}
        most_q = float(np.linalg.norm(q, axis=-1).max(initial=0))
        scale = wide = get("headdim") ** -0.5 if get("softmax_scale") is None else abs(get("softmax_scale"))
        floor = 2e-5 + 2.0**-23 * scale * most_q * largest["k"] * get("headdim") ** 0.5
        turned = 0.0
        if "rotary_cos" in values and dtype != "float32":  # q half way between two is rounded to either
            turned = wide * judge.EPSILON[dtype] * float(np.abs(q).max(initial=0)) * largest["k"]
        out = results["out"] if "out" in results else after["out"]
        if "lse" in results:
            judge.check("lse", results["lse"], exact[1], lambda: plain()[1], "float32", floor=floor + turned)
        room = floor + 2 * turned * largest["v"]
        judge.check("out", out, exact[0], lambda: plain()[0], dtype, floor=room)

    @staticmethod
    def _turned(values, x, length, ordered, interleaved):
        tables = values["rotary_cos"], values["rotary_sin"]
        at = np.minimum(length + np.arange(len(x)) * ordered, len(tables[0]) - 1)
        return reference.rotary(x, *tables, at, interleaved)

    @staticmethod
    def _largest(after, values, name: str) -> float:
        cache = np.abs(np.asarray(after[f"{name}_cache"], np.float64))
        if f"{name}_scale" in after:
            cache = cache * np.broadcast_to(after[f"{name}_scale"], cache.shape[:3])[..., None]
        return float(np.max(cache, initial=0, where=np.isfinite(cache)))

    def _judge_appended(self, spec, values, after) -> None:
        """Checks that appended rows hold the rotated keys and the values, up to rounding. That no other row has changed
        was checked before."""
        new, eight = self.new(spec), self.get(spec, "cache_dtype")
        if not new:
            return
        for name in KEYS:
            for b, length in enumerate(self.before(spec)):
                if length < 0:
                    continue
                want = values[name][b].astype(np.float64)
                if name == "k" and "rotary_cos" in values:
                    want = self._turned(values, want, length, True, self.get(spec, "rotary_interleaved"))
                at = self.places(spec, values, b, length, new)
                got = np.asarray(after[f"{name}_cache"][at], np.float64)
                allowed = judge.EPSILON[self.get(spec, "dtype")] * np.abs(want) + 1e-6
                if eight:
                    most = float(MOST[eight])
                    factor = np.broadcast_to(after[f"{name}_scale"], after[f"{name}_cache"].shape[:3])[at]
                    factor = factor[..., None].astype(np.float64)
                    if self.scales(spec) == "tokens":
                        largest = np.abs(want).max(-1, keepdims=True)
                        some = largest > 0
                        judge.within(f"{name}_scale", factor[some], largest[some] / most, 1e-5 * largest[some] / most)
                    got, want = got * factor, np.clip(want, -most * factor, most * factor)
                    # half a step: in int8 half a factor; in e4m3 1/16 of the value, or half the smallest step
                    step = 0.501 * factor if eight == "int8" else np.abs(want) / 15.9 + 2**-10 * factor
                    allowed = np.broadcast_to(step + 1e-6, want.shape)
                judge.within(f"{name}_cache rows of sequence {b}", got, want, allowed)


class Quantize(Function):
    """quantize_kvcache."""

    name = "quantize_kvcache"
    weight = 0.7
    DEFAULTS: dict[str, Any] = {
        "dtype": "float32", "to": "int8", "factors": "token", "shape": [1, 1, 1, 8], "headdim_v": 8, "given": None,
        "layouts": {}, "num_threads": 0, "lost": False,
    }  # fmt: skip
    LEAST = {"shape": 1, "headdim_v": 1}
    REQUIRED = ("k_cache", "v_cache")
    LOOSE = {"v_cache": (3,), "k_cache": (3,)}
    BAD_OPTIONS = {"dtype": ("int4", None, 8), "factors": ("page", None), "num_threads": INT_OPTIONS}

    def draw(self, draw, backend):
        spec: dict[str, Any] = {
            "dtype": draw.pick([t for t in ("float32", "float16", "bfloat16") if t in backend.dtypes])
        }
        spec["to"] = draw.pick([t for t in ("int8", E4M3) if t in backend.dtypes])
        heads, headdim = draw.pick((1, 2, 3, 8)), draw.headdim()
        rows = draw.size(int(min(1000, 1e5 / heads / headdim)))
        entries = draw.size(int(min(40, 2e5 / max(rows, 1) / heads / headdim)), 0)
        spec["shape"], spec["headdim_v"] = [entries, rows, heads, headdim], draw.headdim()
        spec["factors"] = draw.pick(("token", "entry", "head"))
        spec["given"] = draw.pick(("heads", "entries")) if draw.chance(0.2) else None
        spec["num_threads"] = draw.pick((0, 1, 3)) if backend.device == "cpu" else 0
        spec["lost"] = draw.chance(0.15)
        spec["layouts"] = draw.layouts({"k_cache": 4, "v_cache": 4}, backend)
        return spec

    def arrays(self, spec):
        shape, layouts = tuple(self.get(spec, "shape")), self.get(spec, "layouts")
        dtype = self.get(spec, "dtype")
        found = {
            "k_cache": Array(shape, dtype, layouts.get("k_cache", {})),
            "v_cache": Array((*shape[:3], self.get(spec, "headdim_v")), dtype, layouts.get("v_cache", {})),
        }
        if self.get(spec, "given"):
            kind = (shape[2],) if spec["given"] == "heads" else (shape[0], 1, shape[2])
            found |= {"k_scale": Array(kind, "float32"), "v_scale": Array(kind, "float32")}
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        values = {}
        for name, array in self.arrays(spec).items():
            if "scale" in name:
                values[name] = rng.uniform(0.001, 0.03, array.shape).astype(np.float32)
                continue
            x = rng.standard_normal(array.shape, dtype=np.float32) * np.float32(10.0 ** rng.integers(-3, 3))
            x[rng.random(x.shape[:3]) < 0.05] = 0
            if self.get(spec, "lost") and x.size:
                x.flat[int(rng.integers(x.size))] = np.nan
            values[name] = repeated(round_to(x, array.dtype), array.layout)
        return values

    def options(self, spec):
        options = {"dtype": self.get(spec, "to"), "factors": self.get(spec, "factors")}
        return options | ({"num_threads": spec["num_threads"]} if self.get(spec, "num_threads") else {})

    def always_served(self, spec):
        return False

    def exact_query(self, spec):
        return False  # factors="head" refuses rows at unequal distances

    def call(self, spec, views, options):
        got = kvcache_quantize.quantize_kvcache(**views, **options)
        names = ("k8", "v8", "k_scale", "v_scale")
        if self.get(spec, "given") and (got[2] is not views["k_scale"] or got[3] is not views["v_scale"]):
            raise Wrong("given factors came back as other arrays")
        return dict(zip(names[: 2 if self.get(spec, "given") else 4], got, strict=False))

    def judge(self, spec, values, after, results):
        to, kind = self.get(spec, "to"), self.get(spec, "factors")
        axes = {"token": (3,), "entry": (1, 3), "head": (0, 1, 3)}[kind]
        for name in KEYS:
            x = values[f"{name}_cache"]
            if self.get(spec, "given"):
                scale = values[f"{name}_scale"]
            else:
                scale = results[f"{name}_scale"]
                magnitude = np.abs(np.nan_to_num(x.astype(np.float64)))
                largest = magnitude.max(axes, initial=0, keepdims=kind == "entry")
                largest = largest[..., 0] if kind == "entry" else largest
                if scale.shape != largest.shape:
                    raise Wrong(f"{name}_scale has shape {scale.shape}, expected {largest.shape}")
                some, most = largest > 0, float(MOST[to])
                judge.within(f"{name}_scale", scale[some], largest[some] / most, 4e-7 * largest[some] / most + 1e-45)
                if not (np.isfinite(scale).all() and (scale > 0).all()):
                    raise Wrong(f"{name}_scale is not positive and finite")
            wide = np.broadcast_to(scale[..., None], (*x.shape[:3], 1))
            got, want = np.asarray(results[f"{name}8"], np.float32), np.asarray(quantised(x, wide, to), np.float32)
            judge.within(f"{name}8", got, want, 0.0)


FUNCTIONS = (Cached(), Quantize())
