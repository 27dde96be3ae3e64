"""Draws, makes and judges calls of merge, quantize_fp8, rms_norm, rope, swiglu, linear (plain weights) and sample."""

from __future__ import annotations

from typing import Any

import numpy as np

from flash_attn_minimal import attention
from flash_attn_minimal.transformer import ops

from .. import reference, reference_ops
from . import judge
from .arrays import Array, as_dtype, normal
from .attention import repeated, runnable
from .draw import Draw
from .function import Function
from .judge import EPSILON, Wrong, round_to

FLOATS = ("float32", "float16", "bfloat16")
E4M3 = "float8_e4m3fn"


def floats(backend) -> list[str]:
    return [t for t in FLOATS if t in backend.dtypes]


def rows_layout(draw: Draw, backend, rank: int = 2) -> dict[str, Any]:
    """A layout for functions that take rows at equal distances: only gaps between rows."""
    if rank < 2 or not draw.option(0.4):
        return {}
    layout: dict[str, Any] = {"pad": [0] * (rank - 1) + [draw.pick((1, 2, 8, 8, 16, 100))]}
    if draw.chance(0.3):
        layout["offset"] = draw.pick((1, 8))
    return layout


def rounded(name, got, exact, dtype, terms=1.0):
    """Raises Wrong if the error is above half a unit in the last place of dtype, plus the error of float32 sums of
    terms of size `terms`."""
    exact = np.asarray(exact, np.float64)
    allowed = 1.01 * EPSILON[dtype] / 2 * np.abs(exact) + 4e-6 * terms + 6e-8 * (dtype == "float16")
    judge.within(name, got, exact, allowed)


class Small(Function):
    """The shared part of these functions: arrays of any rank, mostly no choice of kernels, and every call is served."""

    any_rank = True
    DEFAULTS: dict[str, Any] = {"layouts": {}, "num_threads": 0, "programmatic": False, "out": False, "repeats": 0}
    BAD_OPTIONS: dict[str, tuple] = {"num_threads": (-1, 5000, 1.5, "x"), "programmatic": (2, "x")}

    def finish(self, spec, draw, backend) -> dict[str, Any]:
        spec["num_threads"] = draw.pick((0, 0, 1, 3)) if backend.device == "cpu" else 0
        spec["programmatic"] = draw.chance(0.2)
        return spec

    def options(self, spec):
        return {n: spec[n] for n in ("num_threads", "programmatic") if self.get(spec, n) != self.DEFAULTS[n]}

    def normal(self, rng, array: Array, spread=1.0):
        return repeated(normal(rng, array.shape, array.dtype, spread), array.layout)

    def call(self, spec, views, options):
        out = self.function(**views, **options)
        if "out" not in views:
            return {"out": out}
        if out is not views["out"]:
            raise Wrong("the call returned another array than the given out")
        return {}


class Merge(Small):
    name = "merge"
    weight, any_rank = 0.7, False
    DEFAULTS = {"dtype": "float32", "shape": [1, 1, 1, 8], "layouts": {}, "apart": 1.0, "empty": 0.0}
    LEAST = {"shape": 1}
    REQUIRED = ("out_a", "lse_a", "out_b", "lse_b")
    BAD_OPTIONS: dict[str, tuple] = {}

    def draw(self, draw, backend):
        spec = {"dtype": draw.pick(floats(backend))}
        heads, headdim = draw.pick((1, 2, 3, 8)), draw.headdim()
        lead = [draw.pick((0, 1, 2, 5))] if draw.chance(0.6) else []
        spec["shape"] = [*lead, draw.size(int(5e5 / heads / headdim / 5)), heads, headdim]
        spec["apart"], spec["empty"] = draw.pick((1.0, 5.0, 1e4)), draw.pick((0.0, 0.1, 0.6))
        rank = len(spec["shape"])
        spec["layouts"] = draw.layouts({"out_a": rank, "out_b": rank}, backend)
        return spec

    def arrays(self, spec):
        *lead, rows, heads, headdim = self.get(spec, "shape")
        layouts, dtype = self.get(spec, "layouts"), self.get(spec, "dtype")
        found = {}
        for side in "ab":
            found[f"out_{side}"] = Array((*lead, rows, heads, headdim), dtype, layouts.get(f"out_{side}", {}))
            found[f"lse_{side}"] = Array((*lead, heads, rows), "float32")
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        arrays = self.arrays(spec)
        values = {}
        for side in "ab":
            values[f"out_{side}"] = self.normal(rng, arrays[f"out_{side}"])
            lse = self.get(spec, "apart") * rng.standard_normal(arrays[f"lse_{side}"].shape)
            lse[rng.random(lse.shape) < self.get(spec, "empty")] = -np.inf
            values[f"lse_{side}"] = lse.astype(np.float32)
            if "repeat" not in arrays[f"out_{side}"].layout:  # its weight is 0, so out may hold anything
                values[f"out_{side}"].swapaxes(-2, -3)[np.isneginf(lse)] = np.nan
        return values

    def options(self, spec):
        return {}

    def call(self, spec, views, options):
        return dict(zip(("out", "lse"), attention.merge(**views, **options), strict=True))

    def judge(self, spec, values, after, results):
        exact, lse = reference.merge(*(values[n] for n in ("out_a", "lse_a", "out_b", "lse_b")))
        finite = np.abs(lse[np.isfinite(lse)]).max(initial=1)
        judge.within("lse", results["lse"], lse, 1e-6 * (1 + finite))
        judge.within("out", results["out"], exact, 4 * EPSILON[self.get(spec, "dtype")] + 1e-6 * finite)


class QuantizeFp8(Small):
    name = "quantize_fp8"
    weight = 0.7
    NEEDS = (E4M3,)
    DEFAULTS = {"dtype": "float32", "shape": [1, 1, 1, 8], "layouts": {}, "hadamard": False, "rotation": 0, "size": 1.0}
    LEAST = {"shape": 1}
    REQUIRED = ("x",)
    LOOSE = {"x": (0, 1, 2, 3)}
    BAD_OPTIONS = {"hadamard": (2, "x"), "seed": (-1, 2**64, 1.5)}

    def draw(self, draw, backend):
        spec = {"dtype": draw.pick(floats(backend)), "hadamard": draw.chance(0.3)}
        headdim = 2 ** draw.below(10) if spec["hadamard"] else draw.headdim()
        heads = draw.pick((1, 2, 3, 8))
        lead = [draw.pick((0, 1, 2, 5))] if draw.chance(0.7) else []
        spec["shape"] = [*lead, draw.size(int(5e5 / heads / headdim / 5)), heads, headdim]
        spec["rotation"], spec["size"] = draw.below(2**31), draw.pick((1.0, 1.0, 1e-3, 1e4))
        spec["layouts"] = draw.layouts({"x": len(spec["shape"])}, backend)
        return spec

    def arrays(self, spec):
        *lead, headdim = self.get(spec, "shape")
        if self.get(spec, "hadamard"):  # must be a power of two, also in a shrunk case
            headdim = 1 << headdim.bit_length() - 1
        return {"x": Array((*lead, headdim), self.get(spec, "dtype"), self.get(spec, "layouts").get("x", {}))}

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        x = self.normal(rng, self.arrays(spec)["x"], self.get(spec, "size"))
        return {"x": x}

    def options(self, spec):
        return {"hadamard": True, "seed": self.get(spec, "rotation")} if self.get(spec, "hadamard") else {}

    def always_served(self, spec):
        return False

    def call(self, spec, views, options):
        return dict(zip(("x8", "descale"), attention.quantize_fp8(**views, **options), strict=True))

    def judge(self, spec, values, after, results):
        x, x8, descale = values["x"], results["x8"], results["descale"]
        packed = x.ndim == 3
        x, x8 = (x[None], x8[None]) if packed else (x, x8)
        if descale.shape != (x.shape[0], x.shape[2]):
            raise Wrong(f"descale has shape {descale.shape} for x of shape {x.shape}")
        if not (np.isfinite(descale).all() and (descale > 0).all()):
            raise Wrong("descale is not positive and finite")
        if self.get(spec, "hadamard"):  # the library draws the signs, but lengths of rows do not depend on them
            norms = np.linalg.norm(x.astype(np.float64), axis=-1)
            wide = np.linalg.norm(x8.astype(np.float64) * descale[:, None, :, None], axis=-1)
            allowed = norms / 15.9 + 2**-9 * descale[:, None] * x.shape[-1] ** 0.5
            judge.within("the length of a row", wide, norms, allowed)
            return
        largest = np.abs(x).max((1, 3), initial=0)
        want = np.where(largest > 0, largest / np.float32(448), np.float32(1))
        judge.within("descale", descale, want, 3e-7 * want)
        factor = np.where(largest > 0, np.float32(448) / np.where(largest > 0, largest, 1), np.float32(1))
        scaled = np.clip(x * factor[:, None, :, None].astype(np.float32), -448, 448)
        judge.within("x8", x8, as_dtype(scaled, E4M3), 0.0)


class RmsNorm(Small):
    name = "rms_norm"
    DEFAULTS = Small.DEFAULTS | {
        "dtype": "float32", "lead": [1], "dim": 1, "weight_dtype": "float32", "out_dtype": None, "residual": None,
        "eps": 1e-5, "place": "new",
    }  # fmt: skip
    LEAST = {"dim": 1}
    REQUIRED = ("x", "weight")
    LOOSE = {"x": (0, 1)}
    BAD_OPTIONS = Small.BAD_OPTIONS | {"eps": ("x",), "out_dtype": ("int8", 3)}
    function = staticmethod(ops.rms_norm)

    def draw(self, draw, backend):
        kinds = floats(backend)
        spec = {"dtype": draw.pick(kinds), "weight_dtype": draw.pick(kinds), "eps": draw.pick((1e-5, 1e-6, 1e-2))}
        spec["dim"] = draw.size(9000, 1)
        rows = draw.size(int(5e5 / spec["dim"]))
        spec["lead"] = [rows] if draw.chance(0.7) else [draw.pick((1, 2, 3)), rows]
        spec["residual"] = draw.pick(kinds) if draw.chance(0.4) else None
        spec["place"] = draw.pick(("new", "out", "out", "x"))
        spec["out_dtype"] = draw.pick(kinds) if spec["place"] != "x" and draw.chance(0.5) else None
        names = ("x", "out", "residual")
        spec["layouts"] = {n: rows_layout(draw, backend, len(spec["lead"]) + 1) for n in names}
        spec["layouts"] = {k: v for k, v in spec["layouts"].items() if v}
        return self.finish(spec, draw, backend)

    def arrays(self, spec):
        shape, layouts = (*self.get(spec, "lead"), self.get(spec, "dim")), self.get(spec, "layouts")
        dtype, place = self.get(spec, "dtype"), self.get(spec, "place")
        adds = self.get(spec, "residual") is not None
        found = {"x": Array(shape, dtype, layouts.get("x", {}), adds or place == "x")}
        found["weight"] = Array(shape[-1:], self.get(spec, "weight_dtype"))
        if adds:
            found["residual"] = Array(shape, self.get(spec, "residual"), layouts.get("residual", {}))
        if place == "out":
            found["out"] = Array(shape, self.get(spec, "out_dtype") or dtype, layouts.get("out", {}), True)
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        return {n: self.normal(rng, a, 3.0) for n, a in self.arrays(spec).items() if n != "out"}

    def options(self, spec):
        options = super().options(spec) | {"eps": self.get(spec, "eps")}
        if self.get(spec, "out_dtype") and self.get(spec, "place") == "new":
            options["out_dtype"] = spec["out_dtype"]
        return options

    def call(self, spec, views, options):
        return super().call(spec, views | ({"out": views["x"]} if self.get(spec, "place") == "x" else {}), options)

    def judge(self, spec, values, after, results):
        x, dtype, place = values["x"], self.get(spec, "dtype"), self.get(spec, "place")
        if self.get(spec, "residual") is not None:
            x = round_to(x + values["residual"], dtype)
            if place != "x" and not np.array_equal(after["x"], x):
                raise Wrong("x is not x + residual")
        exact = reference_ops.rms_norm(x, values["weight"], self.get(spec, "eps"))
        out = results["out"] if place == "new" else after["x" if place == "x" else "out"]
        kind = dtype if place == "x" else self.get(spec, "out_dtype") or dtype
        rounded("out", out, exact, kind, 4 * np.abs(values["weight"]).max(initial=1))


class Rope(Small):
    name = "rope"
    any_rank = False
    DEFAULTS = Small.DEFAULTS | {
        "dtype": "float32", "shape": [1, 1, 1, 2], "half": 1, "table_dtype": "float32", "positions": None,
        "interleaved": False, "rotary_dim": None, "inverse": False, "rows": 1, "place": "new",
    }  # fmt: skip
    LEAST = {"half": 1, "rows": 1, "shape": 2}
    REQUIRED = ("x", "cos", "sin")
    LOOSE = {"x": (0, 1, 2, 3)}
    BAD_OPTIONS = Small.BAD_OPTIONS | {"interleaved": (2,), "inverse": ("x",), "rotary_dim": (-2, 0, 3, 10**6, 1.5)}
    function = staticmethod(ops.rope)

    def draw(self, draw, backend):
        spec = {"dtype": draw.pick(floats(backend))}
        headdim, heads = max(draw.headdim(512), 2), draw.pick((1, 2, 3, 8))
        seqlen = draw.size(int(min(500, 2e5 / headdim / heads)))
        spec["shape"] = [draw.pick((0, 1, 2, 3)), seqlen, heads, headdim]
        spec["half"] = 1 + draw.below(headdim // 2) if draw.chance(0.5) else headdim // 2
        spec["rotary_dim"] = 2 * (1 + draw.below(spec["half"])) if draw.chance(0.3) else None
        spec["table_dtype"] = draw.pick(("float32", spec["dtype"]))
        spec["positions"] = draw.pick((None, "starts", "each"))
        spec["rows"] = seqlen + draw.pick((0, 1, 100)) or 1
        spec["interleaved"], spec["inverse"] = draw.chance(0.5), draw.chance(0.3)
        spec["place"] = draw.pick(("new", "out", "out", "x"))
        layouts = {n: draw.layout(4, backend, repeat=False) for n in ("x", "out")}
        if draw.chance(0.2):
            layouts["tables"] = {"pad": [0, 1 + draw.below(9)]}
        spec["layouts"] = {k: v for k, v in layouts.items() if v}
        return self.finish(spec, draw, backend)

    def rows(self, spec) -> int:
        return max(self.get(spec, "rows"), self.get(spec, "shape")[1], 1)

    def arrays(self, spec):
        shape, layouts = tuple(self.get(spec, "shape")), self.get(spec, "layouts")
        dtype, place = self.get(spec, "dtype"), self.get(spec, "place")
        half = min(self.get(spec, "half"), shape[3] // 2)
        found = {"x": Array(shape, dtype, layouts.get("x", {}), place == "x")}
        for name in ("cos", "sin"):
            found[name] = Array((self.rows(spec), half), self.get(spec, "table_dtype"), layouts.get("tables", {}))
        if kind := self.get(spec, "positions"):
            found["positions"] = Array(shape[:1] if kind == "starts" else shape[:2], "int32")
        if place == "out":
            found["out"] = Array(shape, dtype, layouts.get("out", {}), True)
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        arrays, rows = self.arrays(spec), self.rows(spec)
        values = {"x": self.normal(rng, arrays["x"], 3.0)}
        half = arrays["cos"].shape[1]
        angles = np.outer(np.arange(rows), 1000.0 ** (-np.arange(half) / half))
        values["cos"], values["sin"] = (round_to(f(angles), arrays["cos"].dtype) for f in (np.cos, np.sin))
        if "positions" in arrays:
            most = rows - (self.get(spec, "shape")[1] if self.get(spec, "positions") == "starts" else 1)
            values["positions"] = rng.integers(0, most + 1, arrays["positions"].shape).astype(np.int32)
        return values

    def options(self, spec):
        options = super().options(spec)
        for name in ("interleaved", "inverse"):
            if self.get(spec, name):
                options[name] = True
        if self.get(spec, "rotary_dim"):
            even = max(2, spec["rotary_dim"] // 2 * 2)  # a shrunk spec may have any number
            options["rotary_dim"] = min(even, 2 * self.arrays(spec)["cos"].shape[1])
        return options

    def call(self, spec, views, options):
        return super().call(spec, views | ({"out": views["x"]} if self.get(spec, "place") == "x" else {}), options)

    def bad_contents(self, spec, values, draw):
        if "positions" not in values or not values["positions"].size or not all(self.get(spec, "shape")):
            return None
        return "positions", draw.below(values["positions"].size), draw.pick((-1, self.rows(spec), 2**31 - 1, -(2**31)))

    def judge(self, spec, values, after, results):
        options = {n: self.get(spec, n) for n in ("interleaved", "inverse")}
        options["rotary_dim"] = self.options(spec).get("rotary_dim")
        exact = values["x"]
        if exact.size:
            exact = reference_ops.rope(exact, values["cos"], values["sin"], values.get("positions"), **options)
        place = self.get(spec, "place")
        out = results["out"] if place == "new" else after["x" if place == "x" else "out"]
        rounded("out", out, exact, self.get(spec, "dtype"), 6)


class Swiglu(Small):
    name = "swiglu"
    weight = 0.7
    DEFAULTS = Small.DEFAULTS | {"dtype": "float32", "lead": [1], "dim": 1, "out_dtype": None}
    LEAST = {"dim": 1}
    REQUIRED = ("gate_up",)
    LOOSE = {"gate_up": (0, 1)}
    BAD_OPTIONS = Small.BAD_OPTIONS | {"out_dtype": ("int8", 3)}
    function = staticmethod(ops.swiglu)

    def draw(self, draw, backend):
        kinds = floats(backend)
        spec = {"dtype": draw.pick(kinds), "dim": draw.size(9000, 1), "out": draw.chance(0.7)}
        rows = draw.size(int(3e5 / spec["dim"]))
        spec["lead"] = [rows] if draw.chance(0.7) else [draw.pick((1, 2, 3)), rows]
        spec["out_dtype"] = draw.pick(kinds) if draw.chance(0.5) else None
        rank = len(spec["lead"]) + 1
        layouts = {n: rows_layout(draw, backend, rank) for n in ("gate_up", "out")}
        spec["layouts"] = {k: v for k, v in layouts.items() if v}
        return self.finish(spec, draw, backend)

    def arrays(self, spec):
        lead, dim, layouts = self.get(spec, "lead"), self.get(spec, "dim"), self.get(spec, "layouts")
        found = {"gate_up": Array((*lead, 2 * dim), self.get(spec, "dtype"), layouts.get("gate_up", {}))}
        if self.get(spec, "out"):
            kind = self.get(spec, "out_dtype") or self.get(spec, "dtype")
            found["out"] = Array((*lead, dim), kind, layouts.get("out", {}), True)
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        return {"gate_up": self.normal(rng, self.arrays(spec)["gate_up"], 4.0)}

    def options(self, spec):
        more = self.get(spec, "out_dtype") and not self.get(spec, "out")
        return super().options(spec) | ({"out_dtype": spec["out_dtype"]} if more else {})

    def judge(self, spec, values, after, results):
        exact = reference_ops.swiglu(values["gate_up"])
        kind = self.get(spec, "out_dtype") or self.get(spec, "dtype")
        rounded("out", results["out"] if "out" in results else after["out"], exact, kind, 4)


class Linear(Small):
    """ops.linear with a weight of 16 or 32 bits."""

    name = "linear"
    weight = 1.5
    DEFAULTS = Small.DEFAULTS | {
        "dtype": "float32", "weight_dtype": "float32", "lead": [1], "n": 1, "k": 1, "bias": None, "norm": None,
        "residual": None, "swiglu": False, "out_dtype": None, "in_place": False, "kernel": None,
    }  # fmt: skip
    LEAST = {"n": 1, "k": 1}
    REQUIRED = ("x", "weight")
    LOOSE = {"x": (0, 1), "weight": (0,)}
    ALIASES = (("out", "x"),)
    BAD_OPTIONS = Small.BAD_OPTIONS | {
        "eps": ("x",), "swiglu": (2, "x"), "kernel": ("nonesuch", 3), "out_dtype": ("int8", 3)
    }  # fmt: skip
    function = staticmethod(ops.linear)

    def draw(self, draw, backend):
        kinds = floats(backend)
        spec = {"dtype": draw.pick(kinds), "weight_dtype": draw.pick(kinds)}
        rows = draw.pick((1, 1, 1, 2, 3, 4, 5, 8, 17)) if draw.chance(0.9) else draw.below(60)
        spec["k"] = draw.size(9000, 1)
        if draw.chance(0.4 + draw.plain / 2):
            spec["k"] = -(-spec["k"] // 64) * 64
        spec["n"] = draw.size(int(min(9000, 2e6 / spec["k"] / max(rows / 4, 1))), 1)
        self.draw_options(spec, draw, backend, rows)
        return self.finish(spec, draw, backend)

    def draw_options(self, spec, draw, backend, rows) -> None:
        kinds = floats(backend)
        spec["lead"] = [rows] if draw.chance(0.8) else [draw.pick((1, 2)), rows]
        spec["swiglu"] = draw.option(0.25)
        spec["n"] += spec["n"] % 2 if spec["swiglu"] else 0
        for name in ("bias", "norm", "residual"):
            spec[name] = draw.pick(kinds) if draw.option(0.3) else None
        spec["out"] = draw.chance(0.7)
        spec["out_dtype"] = draw.pick(kinds) if draw.chance(0.5) else None
        spec["in_place"] = spec["residual"] is not None and draw.chance(0.5)
        rank = len(spec["lead"]) + 1
        layouts = {n: rows_layout(draw, backend, rank) for n in ("x", "residual", "out")}
        layouts["weight"] = rows_layout(draw, backend)
        spec["layouts"] = {k: v for k, v in layouts.items() if v}

    def kernels(self, backend):
        return runnable("linear", backend.device)

    def query(self, spec, views, options):
        names = ("x", "weight", "bias", "norm_weight", "residual")
        given = {k: v for k, v in views.items() if k in names}
        more = {k: v for k, v in options.items() if k in ("swiglu", "out_dtype", "programmatic", "kernel")}
        return ops.linear_query(**given, **more)

    def exact_query(self, spec):
        return False  # the query does not get `out`

    def bad_options(self, spec):
        return {k: v for k, v in self.BAD_OPTIONS.items() if k != "eps" or self.get(spec, "norm")}

    def in_place(self, spec) -> bool:
        return self.get(spec, "in_place") and self.get(spec, "residual") is not None

    def columns(self, spec) -> int:
        return self.get(spec, "n") // (2 if self.get(spec, "swiglu") else 1)

    def arrays(self, spec):
        lead, n, k, layouts = (
            self.get(spec, "lead"),
            self.get(spec, "n"),
            self.get(spec, "k"),
            self.get(spec, "layouts"),
        )
        n += n % 2 if self.get(spec, "swiglu") else 0
        found = {"x": Array((*lead, k), self.get(spec, "dtype"), layouts.get("x", {}))}
        found["weight"] = Array((n, k), self.get(spec, "weight_dtype"), layouts.get("weight", {}))
        columns = n // 2 if self.get(spec, "swiglu") else n
        for name, shape in (("bias", (n,)), ("norm", (k,)), ("residual", (*lead, columns))):
            if kind := self.get(spec, name):
                in_place = name == "residual" and self.in_place(spec)
                name = "norm_weight" if name == "norm" else name
                found[name] = Array(tuple(shape), kind, layouts.get(name, {}), in_place)
        if self.get(spec, "out") and not self.in_place(spec):
            kind = self.get(spec, "out_dtype") or self.get(spec, "dtype")
            found["out"] = Array((*lead, columns), kind, layouts.get("out", {}), True)
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        spread = {"weight": self.get(spec, "k") ** -0.5, "x": 2.0}
        return {n: self.normal(rng, a, spread.get(n, 1.0)) for n, a in self.arrays(spec).items() if n != "out"}

    def options(self, spec):
        options = super().options(spec)
        if self.get(spec, "swiglu"):
            options["swiglu"] = True
        if self.get(spec, "out_dtype") and not (self.get(spec, "out") or self.in_place(spec)):
            options["out_dtype"] = spec["out_dtype"]
        if self.get(spec, "norm"):
            options["eps"] = 1e-3
        return options

    def call(self, spec, views, options):
        if self.in_place(spec):
            views = views | {"out": views["residual"]}
        return super().call(spec, views, options)

    def out(self, spec, after, results) -> tuple[np.ndarray, str]:
        """The result and its dtype."""
        if self.in_place(spec):
            return after["residual"], self.get(spec, "residual")
        out = results["out"] if "out" in results else after["out"]
        return out, self.get(spec, "out_dtype") or self.get(spec, "dtype")

    def judge(self, spec, values, after, results):
        more = {n: values.get(n) for n in ("bias", "norm_weight", "residual")}
        eps = 1e-3 if self.get(spec, "norm") else 1e-5
        exact = reference_ops.linear(
            values["x"], values["weight"], eps=eps, act_swiglu=self.get(spec, "swiglu"), **more
        )
        out, dtype = self.out(spec, after, results)
        rounded("out", out, exact, dtype, 10)


class Sample(Small):
    """ops.sample: greedy draws are known; other draws must be among the tokens that top_k and top_p keep."""

    name = "sample"
    DEFAULTS = Small.DEFAULTS | {
        "dtype": "float32", "rows": 1, "vocab": 1, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "kind": "normal",
        "step": None, "seeds": False,
    }  # fmt: skip
    LEAST = {"vocab": 1}
    REQUIRED = ("logits",)
    FREE = {"logits": (1,)}
    LOOSE = {"logits": (0,)}
    BAD_OPTIONS = Small.BAD_OPTIONS | {
        "temperature": (-1.0, float("nan"), "x"),
        "top_k": (-1, 1.5, 2**31),
        "top_p": (0.0, -0.5, 1.5, float("nan"), "x"),
        "seed": (-1, 2**64, 1.5),
        "offset": (-1, "x"),
    }
    function = staticmethod(ops.sample)

    def draw(self, draw, backend):
        spec = {"dtype": draw.pick(floats(backend)), "vocab": draw.size(40000, 1)}
        spec["rows"] = draw.size(int(min(200, 2e5 / spec["vocab"])))
        spec["temperature"] = draw.pick((0.0, 0.0, 0.05, 0.7, 1.0, 3.0))
        spec["top_k"] = draw.pick((0, 0, 1, 5, 40, draw.size(spec["vocab"]), 10**6))
        spec["top_p"] = draw.pick((1.0, 1.0, 0.9, 0.5, 1e-6))
        spec["kind"] = draw.pick(("normal", "normal", "ties", "equal", "peaked", "masked", "lost"))
        spec["step"] = draw.pick((None, None, "one", "rows"))
        spec["seeds"], spec["out"] = draw.chance(0.3), draw.chance(0.5)
        layout = rows_layout(draw, backend)
        spec["layouts"] = {"logits": layout} if layout else {}
        return self.finish(spec, draw, backend)

    def arrays(self, spec):
        rows, vocab, dtype = self.get(spec, "rows"), self.get(spec, "vocab"), self.get(spec, "dtype")
        found = {"logits": Array((rows, vocab), dtype, self.get(spec, "layouts").get("logits", {}))}
        if step := self.get(spec, "step"):
            found["step"] = Array((1,) if step == "one" else (rows,), "int32")
        if self.get(spec, "seeds"):
            found["seeds"] = Array((rows,), "int64")
        if self.get(spec, "out"):
            found["out"] = Array((rows,), "int32", {}, True)
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        arrays, kind = self.arrays(spec), self.get(spec, "kind")
        logits = 2 * rng.standard_normal(arrays["logits"].shape, dtype=np.float32)
        if kind in ("ties", "equal", "peaked"):
            logits = {"ties": np.round(logits), "equal": 0 * logits, "peaked": 30 * logits}[kind]
        elif kind == "masked":
            logits[rng.random(logits.shape) < 0.9] = -np.inf
        elif kind == "lost" and logits.size:
            logits[rng.integers(len(logits)), rng.integers(logits.shape[1])] = rng.choice([np.nan, np.inf, -np.inf])
        values = {"logits": round_to(logits, arrays["logits"].dtype)}
        if "step" in arrays:
            values["step"] = rng.integers(-5, 10000, arrays["step"].shape).astype(np.int32)
        if "seeds" in arrays:
            values["seeds"] = rng.integers(-(2**63), 2**63 - 1, arrays["seeds"].shape)
        return values

    def options(self, spec):
        options = super().options(spec)
        for name in ("temperature", "top_k", "top_p"):
            if self.get(spec, name) != self.DEFAULTS[name]:
                options[name] = self.get(spec, name)
        return options | {"seed": spec.get("seed", 0), "offset": 2**40 + 1}

    def judge(self, spec, values, after, results):
        got, logits = results["out"] if "out" in results else after["out"], values["logits"]
        lost = np.isnan(logits).any(1) | (np.isneginf(logits).all(1) if logits.shape[1] else True)
        if ((got == -1) != lost).any():
            raise Wrong(
                f"rows {np.flatnonzero((got == -1) != lost)[:4]}: -1 where there is an answer, or the other way"
            )
        temperature = self.get(spec, "temperature")
        if temperature == 0:
            want = np.where(lost, -1, np.argmax(np.where(np.isnan(logits), -np.inf, logits), 1))
            judge.within("out", got, want, 0.0)
            return
        cut = {"top_k": self.get(spec, "top_k"), "top_p": self.get(spec, "top_p")}
        for i in np.flatnonzero(~lost):
            if not 0 <= got[i] < logits.shape[1]:
                raise Wrong(f"out[{i}] = {got[i]} is no token")
            row = logits[i]
            if np.isposinf(row).any():
                if not np.isposinf(row[got[i]]):
                    raise Wrong(f"out[{i}] = {got[i]}, whose logit is {row[got[i]]}, and there is an infinite one")
                continue
            # Sums in float64 and in integers may disagree on the last token that top_p keeps.
            near = reference_ops.kept(row, temperature, **{**cut, "top_p": min(1.0, cut["top_p"] + 1e-6)})
            if not near[got[i]] > 0:
                raise Wrong(f"out[{i}] = {got[i]}, which top_k and top_p leave out")


FUNCTIONS = (Merge(), QuantizeFp8(), RmsNorm(), Rope(), Swiglu(), Linear(), Sample())
