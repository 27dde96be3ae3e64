"""Draws, makes and judges calls of backward."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from flash_attn_minimal.backward import backward, backward_query

from .. import reference
from . import judge
from .attention import DENSE, E4M3, VARLEN, Forward, clean, repeated, runnable
from .judge import EPSILON, Wrong, round_to


class Backward(Forward):
    """backward, dense and varlen."""

    DEFAULTS = Forward.DEFAULTS | {
        "out": True, "given": [], "accumulate": False, "return_dbias": False, "return_dsinks": False, "dlse": False,
    }  # fmt: skip
    REQUIRED = ("q", "k", "v", "dout", "out", "lse")
    LOOSE: dict[str, tuple[int, ...]] = {}
    BAD_OPTIONS = {
        k: v
        for k, v in Forward.BAD_OPTIONS.items()
        if k not in ("return_lse", "return_max_score", "return_key_sums", "out_dtype", "fast_accum")
    } | {"accumulate": (2, "x"), "return_dbias": (2,), "return_dsinks": ("x",)}
    queried = False  # backward_query does not get all arrays
    ALIASES = (("dq", "q"), ("dk", "k"), ("dv", "v"), ("dk", "dv"))

    def kernels(self, backend):
        return runnable("backward", backend.device)

    def draw(self, draw, backend):
        spec = self.draw_shape(draw, backend)
        if spec["dtype"] == E4M3:
            spec["dtype"] = "float16"
        self._lighten(spec)
        self.draw_scores(draw, backend, spec)
        spec["deterministic"] = draw.chance(0.4)
        spec["accumulate"] = draw.option(0.25)
        names = ["dq", "dk", "dv"]
        spec["given"] = names if spec["accumulate"] or draw.chance(0.6) else [n for n in names if draw.chance(0.3)]
        spec["return_dbias"] = spec.get("bias") is not None and draw.chance(0.7)
        spec["return_dsinks"] = bool(spec["sinks"]) and draw.chance(0.7)
        spec["num_threads"] = draw.pick((0, 0, 1, 2, 3)) if backend.device == "cpu" else 0
        spec["repeats"] = 0 if spec["accumulate"] or not spec["deterministic"] else draw.pick((0, 0, 1))
        rank = 4 if spec.get("lens") is None else 3
        ranks = dict.fromkeys(("q", "k", "v", "out", "dout", *spec["given"]), rank)
        spec["layouts"] = draw.layouts(ranks | self._option_ranks(spec), backend, outputs=(*names, "out"))
        spec["dlse"] = draw.option(0.3)
        return spec

    def draw_shape(self, draw, backend):
        return (VARLEN if draw.chance(0.35) else DENSE).draw_shape(draw, backend)

    def adds(self, spec) -> bool:
        return self.get(spec, "accumulate") and len(self.get(spec, "given")) == 3

    @staticmethod
    def _lighten(spec) -> None:
        """Takes fewer keys, because gradients cost four times as much as the forward pass."""
        if spec.get("lens") is not None:
            spec["lens"] = [[q, -(-k // 2)] for q, k in spec["lens"]]
        elif spec["seqlen_k"] > 600:
            spec["seqlen_k"] //= 2

    def shapes(self, spec):
        shapes = super().shapes(spec)
        shapes["dout"] = shapes["out"]
        heads, rows = shapes["q"][-2], shapes["q"][-3]
        shapes["lse"] = (heads, rows) if self.get(spec, "lens") is not None else (shapes["q"][0], heads, rows)
        if self.get(spec, "dlse"):
            shapes["dlse"] = shapes["lse"]
        return shapes | {f"d{name}": shapes[name] for name in "qkv" if f"d{name}" in self.get(spec, "given")}

    def arrays(self, spec):
        found = super().arrays({**spec, "out": True})
        for name in found:
            array = found[name]
            dtype = "float32" if name in ("lse", "dlse") else array.dtype
            found[name] = dataclasses.replace(array, dtype=dtype, output=name in self.get(spec, "given"))
        return found

    def values(self, spec):
        values = super().values(spec)  # draws dout, lse and the gradients too: lse is computed below
        dtype, layouts = self.get(spec, "dtype"), self.get(spec, "layouts")
        values["dout"] = repeated(round_to(values["dout"], dtype), layouts.get("dout"))
        for name in self.get(spec, "given"):
            if self.adds(spec):
                values[name] = round_to(values[name], dtype)
            else:
                del values[name]
        out, lse = self.attend(spec, values, reference._standard)
        values["lse"] = lse.astype(np.float32)
        values["out"] = round_to(out, dtype)
        if self.get(spec, "dlse"):
            values["dlse"][np.isneginf(lse)] = np.nan
        if self.get(spec, "lens") is not None:
            covered = self._cu(spec)[0][-1]
            values["out"][covered:] = np.nan
            values["lse"][:, covered:] = np.nan
            if self.get(spec, "dlse"):
                values["dlse"][:, covered:] = np.nan
            if "repeat" not in layouts.get("dout", {}):
                values["dout"][covered:] = np.nan
        return values

    def options(self, spec):
        options = super().options(spec)
        if self.adds(spec):
            options["accumulate"] = True
        for name, source in (("return_dbias", "bias"), ("return_dsinks", "sinks")):
            if self.get(spec, name) and self.get(spec, source) not in (None, False):
                options[name] = True
        return options

    def query(self, spec, views, options):
        names = ("dout", "dlse", "out", "lse", "dq", "dk", "dv")
        views = {k: v for k, v in views.items() if k not in names}
        options = {k: v for k, v in options.items() if k not in ("accumulate", "return_dbias", "return_dsinks")}
        return backward_query(**views, **options)

    def exact_query(self, spec):
        return not any(name in self.get(spec, "layouts") for name in ("out", "dout", "dq", "dk", "dv"))

    def call(self, spec, views, options):
        return self.named(backward(**views, **options), views, options)

    @staticmethod
    def named(found, given, options) -> dict:
        """The arrays that a call returned, by name, except those that it was given to write to."""
        got, results = list(found), {}
        for name in ("dq", "dk", "dv"):
            array = got.pop(0)
            if name not in given:
                results[name] = array
            elif array is not given[name]:
                raise Wrong(f"the call returned another array than the given {name}")
        return results | {name: got.pop(0) for name in ("dbias", "dsinks") if options.get(f"return_{name}")}

    def written(self, spec, values):
        if self.get(spec, "lens") is None:
            return dict.fromkeys(self.get(spec, "given"), ...)
        ends = [int(cu[-1]) for cu in self._cu(spec)]
        return {name: slice(0, ends[name != "dq"]) for name in self.get(spec, "given")}

    def _gradients(self, spec, values, one) -> reference.Gradients:
        arrays = [clean(values[name]) for name in ("dout", "q", "k", "v")]
        scores = self._scores(spec, values)
        if self.get(spec, "dlse"):
            scores["dlse"] = clean(values["dlse"])
        if self.get(spec, "lens") is None:
            return one(*arrays, **scores)
        return reference.varlen_backward(one, *arrays, *self._cu(spec), **scores)

    def _noise(self, spec, values) -> dict[str, float]:
        """The error that a gradient may have even where it is 0. dP - delta is the difference of two float32 sums of
        headdim_v terms; dropout scales both, and dlse is subtracted from one. A gradient sums this difference over rows
        or columns."""
        q, k, v, dout = (clean(values[name]) for name in ("q", "k", "v", "dout"))
        scale = q.shape[-1] ** -0.5 if self.get(spec, "softmax_scale") is None else abs(self.get(spec, "softmax_scale"))
        longest = [float(np.linalg.norm(x, axis=-1).max(initial=0)) for x in (dout, v)]
        one = 2.0**-23 * (1 + v.shape[-1] ** 0.5 / 8) * longest[0] * longest[1]
        # delta comes from a rounded out; the error of delta in the plain implementation may be small by luck
        one += EPSILON[self.get(spec, "dtype")] / 8 * longest[0] * longest[1] / max(v.shape[-1], 1) ** 0.5
        one /= 1 - self.get(spec, "dropout_p")
        if self.get(spec, "dlse"):
            one += 2.0**-23 * float(np.abs(clean(values["dlse"])).max(initial=0))
        rows = (q.size / max(q.shape[-1], 1)) ** 0.5
        largest = {name: float(np.abs(x).max(initial=0)) for name, x in (("dq", k), ("dk", q))}
        return {
            "dq": one * scale * largest["dq"], "dk": one * scale * largest["dk"] * rows, "dv": 0.0,
            "dbias": one * rows, "dsinks": one * rows,
        }  # fmt: skip

    def _plain(self, spec):
        """The gradients of a plain GPU implementation: a function like reference.standard_attention_backward."""
        return functools.partial(judge.plain_backward, dtype=self.get(spec, "dtype"))

    def _floor(self, spec, q, k, lse, want) -> float:
        return judge.gradient_floor(q, k, lse, want, self.get(spec, "softmax_scale"))

    def judge(self, spec, values, after, results):
        dtype = self.get(spec, "dtype")
        exact = self._gradients(spec, values, reference.standard_attention_backward)
        plain = functools.cache(lambda: self._gradients(spec, values, self._plain(spec)))
        q, k = clean(values["q"]), clean(values["k"])
        ends = [None, None] if self.get(spec, "lens") is None else [int(cu[-1]) for cu in self._cu(spec)]
        lse, noise = clean(values["lse"]), self._noise(spec, values)
        for name in ("dq", "dk", "dv", "dbias", "dsinks"):
            if name not in results and name not in after:
                continue
            rows = slice(0, ends[name != "dq"] if name in ("dq", "dk", "dv") else None)
            got, want = (results[name] if name in results else after[name])[rows], getattr(exact, name)[rows]
            floor = self._floor(spec, q, k, lse, want) + noise[name]
            before = values[name][rows].astype(np.float64) if self.adds(spec) and name in values else 0.0

            def rounded(name=name, rows=rows, before=before):
                return getattr(plain(), name)[rows] + before

            kind = dtype if name in ("dq", "dk", "dv") else "float32"
            judge.check(name, got, want + before, rounded, kind, floor=floor)


FUNCTIONS = (Backward("backward", varlen=False, weight=4),)
