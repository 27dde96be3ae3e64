"""Calls of distributed.decode: the keys of a cache are spread over the ranks, and the ranks' shares grow unequally."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flash_attn_minimal import distributed

from ... import reference
from .. import judge
from ..arrays import Array, normal
from ..attention import score_floor
from ..distributed import groups_of
from ..function import Function
from ..judge import Wrong


class Decode(Function):
    """distributed.decode. `lengths`: the keys of each rank before the call."""

    name, weight, capturable = "distributed_decode", 2.0, False
    DEFAULTS: dict[str, Any] = {
        "dtype": "float32", "batch": 1, "seqlen_q": 1, "rows": 8, "nheads_k": 1, "group": 1, "headdim": 8,
        "lengths": [1, 1], "appends": None, "at_once": True, "num_threads": 0, "return_lse": True, "kernel": None,
        "layouts": {},
    }  # fmt: skip
    LEAST = {"nheads_k": 1, "group": 1, "headdim": 1, "rows": 1, "batch": 1, "seqlen_q": 1}

    def draw(self, draw, backend):
        spec: dict[str, Any] = {
            "dtype": draw.pick([t for t in ("float32", "float16", "bfloat16") if t in backend.dtypes])
        }
        spec |= {"batch": draw.pick((1, 1, 2)), "nheads_k": draw.pick((1, 2)), "group": draw.pick((1, 2, 4, 8))}
        spec["headdim"] = draw.pick((16, 64, 64, 128))
        spec["rows"] = draw.size(20000, 8) if backend.device == "cuda" else draw.size(200, 8)
        spec["lengths"] = [draw.below(spec["rows"]) for _ in range(draw.pick((2, 2, 3)))]
        spec["appends"] = draw.pick((None, 0, 1))
        spec["at_once"], spec["return_lse"] = draw.chance(0.6), draw.chance(0.5)
        spec["num_threads"] = draw.pick((1, 2)) if backend.device == "cpu" else 0
        return spec

    def ranks(self, spec) -> int:
        return max(len(self.get(spec, "lengths")), 2)

    def lengths(self, spec) -> list[int]:
        given = [*self.get(spec, "lengths"), 1, 1][: self.ranks(spec)]
        return [min(max(n, 0), self.get(spec, "rows") - 1) for n in given]

    def arrays(self, spec):
        get = functools.partial(self.get, spec)
        dtype, batch, heads, wide = get("dtype"), get("batch"), get("nheads_k"), get("headdim")
        found = {"q": Array((batch, get("seqlen_q"), heads * get("group"), wide), dtype)}
        for rank in range(self.ranks(spec)):
            for name in ("k_cache", "v_cache"):
                found[f"{name}{rank}"] = Array((batch, get("rows"), heads, wide), dtype, {}, rank == get("appends"))
            if not get("at_once"):
                found[f"cache_seqlens{rank}"] = Array((batch,), "int32")
        if get("appends") is not None and get("appends") < self.ranks(spec):
            found |= {name: Array((batch, 1, heads, wide), dtype) for name in "kv"}
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        values = {}
        for name, array in self.arrays(spec).items():
            if name.startswith("cache_seqlens"):
                values[name] = np.full(array.shape, self.lengths(spec)[int(name[-1])], np.int32)
                continue
            values[name] = normal(rng, array.shape, array.dtype)
            if "cache" in name:
                values[name][:, self.lengths(spec)[int(name[-1])] :] = np.nan
        return values

    def options(self, spec):
        return {"num_threads": spec["num_threads"]} if self.get(spec, "num_threads") else {}

    def call(self, spec, views, options):
        lengths, appends = self.lengths(spec), self.get(spec, "appends")

        def rank(group):
            r = group.rank
            more = {name: views[name] for name in "kv" if r == appends and name in views}
            more["cache_seqlens"] = lengths[r] if self.get(spec, "at_once") else views[f"cache_seqlens{r}"]
            caches = views[f"k_cache{r}"], views[f"v_cache{r}"]
            return distributed.decode(
                group, views["q"], *caches, **more, **options, return_lse=self.get(spec, "return_lse")
            )

        on_cpu = str(getattr(views["q"], "device", "cpu")) == "cpu"
        try:
            parts = distributed.run(groups_of(("cpu" if on_cpu else 0,) * self.ranks(spec)), rank)
        except Exception:
            groups_of.cache_clear()
            raise
        if not self.get(spec, "return_lse"):
            parts = [(part, None) for part in parts]
        return {
            f"{name}{r}": x for r, part in enumerate(parts) for name, x in zip(("out", "lse"), part, strict=True)
            if x is not None
        }  # fmt: skip

    def judge(self, spec, values, after, results):
        lengths, appends = self.lengths(spec), self.get(spec, "appends")
        parts: dict[str, list] = {"k": [], "v": []}
        for rank, length in enumerate(lengths):
            length += rank == appends and "k" in values
            for name in "kv":
                parts[name].append(after[f"{name}_cache{rank}"][:, :length])
        q, (k, v) = values["q"], (np.concatenate(parts[name], 1) for name in "kv")
        dtype, batch = self.get(spec, "dtype"), self.get(spec, "batch")
        exact, lse = reference._over_heads(reference._standard, q, k, v, {})
        floor = score_floor(q, k, None) + 2 * judge.EPSILON[dtype] * float(np.abs(v).max(initial=0))
        plain = functools.cache(lambda: judge.plain_attention(q, k, v, dtype))
        for rank in range(self.ranks(spec)):
            if not np.array_equal(results[f"out{rank}"], results["out0"], equal_nan=True):
                raise Wrong(f"out of rank {rank} is not that of rank 0")
        judge.check("out", results["out0"], exact, lambda: plain()[0], dtype, floor=floor)
        if "lse0" in results and batch:
            judge.check("lse", results["lse0"], lse, lambda: plain()[1], "float32", floor=floor)


FUNCTIONS = (Decode(),)
