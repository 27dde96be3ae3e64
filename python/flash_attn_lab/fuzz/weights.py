"""Draws, makes and judges calls with 4-bit weights: quantize and dequantize, pack, linear and linear_chain."""

from __future__ import annotations

from typing import Any

import numpy as np

from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import BLOCK, W4Weight

from .. import reference_w4
from . import judge
from .arrays import Array
from .attention import INT_OPTIONS, runnable
from .draw import Draw
from .function import Function
from .judge import EPSILON, Wrong, round_to
from .small import Linear, floats, rows_layout

FORMATS = tuple(BLOCK)
COMPUTE = ("float16", "bfloat16")


def weight_arrays(name: str, format: str, n: int, k: int) -> dict[str, Array]:
    scales = Array((n, -(-k // BLOCK[format])), "float16" if format == "int4" else "uint8")
    return {
        f"{name}.codes": Array((n, -(-k // 2)), "uint8"),
        f"{name}.scales": scales,
        f"{name}.tensor_scale": Array((1,), "float32"),
    }


def random_weight(rng, name: str, format: str, n: int, k: int) -> dict[str, np.ndarray]:
    """Random codes, with scales that give weights of about k ** -0.5 / 2, so that results do not grow along a chain of
    products."""
    codes = rng.integers(0, 256, (n, -(-k // 2))).astype(np.uint8)
    if k % 2:
        codes[:, -1] &= 15
    blocks, size = (n, -(-k // BLOCK[format])), k**-0.5 / 6
    tensor_scale = np.float32(1)
    if format == "nvfp4":
        tensor_scale = np.float32(size)
        scales = rng.integers(40, 64, blocks).astype(np.uint8)  # 1/4 .. 1.9
    elif format == "mxfp4":
        scales = (127 + int(np.log2(size)) + rng.integers(-2, 2, blocks)).astype(np.uint8)
    else:
        scales = (size / 2 * rng.uniform(0.3, 1.5, blocks)).astype(np.float16)
    return {f"{name}.codes": codes, f"{name}.scales": scales, f"{name}.tensor_scale": np.array([tensor_scale])}


def wide(values, name: str, format: str, k: int) -> np.ndarray:
    parts = (values[f"{name}.{part}"] for part in ("codes", "scales"))
    if format == "int4":
        codes, scales = parts
        parts = codes, np.asarray(scales, np.float16)
    tensor_scale = values[f"{name}.tensor_scale"][0]
    return reference_w4.dequantize(*parts, tensor_scale, format, k).astype(np.float64)


def product(x, w, format, dtype, out_dtype, bias=None, norm_weight=None, eps=1e-5, residual=None, swiglu=False):
    """(exact result, allowed error) of a product with a 4-bit weight, both float64. Kernels round x to the 16-bit
    `dtype`, may round an int4 weight to it, too, and sum in float32."""
    epsilon = EPSILON[dtype] / 2 * 1.01
    if norm_weight is None:
        x, rounding = round_to(x, dtype).astype(np.float64), 0.0
    else:  # a kernel may round before or after the factor 1 / rms
        x = np.asarray(x, np.float64)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * norm_weight
        rounding = epsilon
    rounding += 2 * epsilon * (format == "int4")  # code * scale is rounded, and perhaps the scale
    with np.errstate(invalid="ignore", over="ignore"):
        y, terms = x @ w.T, np.abs(x) @ np.abs(w).T
        error = (rounding + 2e-6) * terms
        if dtype == "float16":  # for x below the smallest normal number
            error = error + 2.0**-25 * np.abs(w).sum(-1)
        if bias is not None:
            y = y + bias
        if swiglu:
            (gate, up), (d_gate, d_up) = np.split(y, 2, -1), np.split(error, 2, -1)
            silu = gate / (1 + np.exp(-gate))
            y = silu * up
            error = 1.1 * d_gate * (np.abs(up) + d_up) + np.abs(silu) * d_up + 2e-6 * np.abs(y)
        if residual is not None:  # it may cancel a result that has already been rounded
            error = error + 2.0**-23 * np.abs(y)
            y = y + residual
        error = error + 1.01 * EPSILON[out_dtype] / 2 * np.abs(y) + 1e-6 * np.abs(y) + 1e-30
        error += 6e-8 * (out_dtype == "float16")
    return y, error


class Quantize(Function):
    """W4Weight.quantize and dequantize, which have to give exactly the bytes of the NumPy reference."""

    name = "W4Weight.quantize"
    weight = 0.7
    DEFAULTS: dict[str, Any] = {
        "dtype": "float32", "format": "nvfp4", "n": 1, "k": 1, "search": True, "size": 1.0, "awkward": False,
        "to": "float32", "layouts": {}, "num_threads": 0,
    }  # fmt: skip
    LEAST = {"n": 1, "k": 1}
    REQUIRED = ("w",)
    LOOSE = {"w": (0, 1)}
    BAD_OPTIONS = {"format": ("int8", None), "search": (2,), "num_threads": INT_OPTIONS}

    def draw(self, draw, backend):
        kinds = floats(backend)
        spec = {"dtype": draw.pick(kinds), "to": draw.pick(kinds), "format": draw.pick(FORMATS)}
        spec["k"] = draw.size(5000, 1)
        spec["n"] = draw.size(int(max(1e5 / spec["k"], 1)), 1)
        spec["search"], spec["awkward"] = draw.chance(0.7), draw.chance(0.3)
        spec["size"] = draw.pick((1.0, 1e-3, 100.0))
        spec["num_threads"] = draw.pick((0, 1, 3)) if backend.device == "cpu" else 0
        layout = rows_layout(draw, backend)
        spec["layouts"] = {"w": layout} if layout else {}
        return spec

    def arrays(self, spec):
        shape = (self.get(spec, "n"), self.get(spec, "k"))
        return {"w": Array(shape, self.get(spec, "dtype"), self.get(spec, "layouts").get("w", {}))}

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        w = np.float32(self.get(spec, "size")) * rng.standard_normal(self.arrays(spec)["w"].shape, dtype=np.float32)
        if self.get(spec, "awkward"):
            w *= np.exp(rng.uniform(-8, 8, (len(w), 1))).astype(np.float32)
            w[rng.random(len(w)) < 0.1] = 0
            if self.get(spec, "format") == "int4":  # beyond these limits the CPU refuses the matrix
                w = np.where(np.abs(w) < 1e-6, np.float32(0), np.clip(w, -4e5, 4e5))
            w[rng.random(w.shape) < 1e-3] = rng.choice([0.0, -0.0, np.nan, np.inf, -np.inf])
        return {"w": round_to(w, self.get(spec, "dtype"))}

    def options(self, spec):
        options = {"format": self.get(spec, "format"), "search": self.get(spec, "search")}
        return options | ({"num_threads": spec["num_threads"]} if self.get(spec, "num_threads") else {})

    def call(self, spec, views, options):
        weight = W4Weight.quantize(**views, **options)
        results = {part: getattr(weight, part) for part in ("codes", "scales", "tensor_scale")}
        return results | {"wide": weight.dequantize(self.get(spec, "to"))}

    def judge(self, spec, values, after, results):
        format, k = self.get(spec, "format"), self.get(spec, "k")
        codes, scales, tensor_scale = reference_w4.quantize(values["w"], format, self.get(spec, "search"))
        for name, got, want in (
            ("tensor_scale", results["tensor_scale"], np.float32([tensor_scale])),
            ("scales", results["scales"], scales),
            ("codes", results["codes"], codes),
        ):
            if not np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True):
                raise Wrong(f"{name} are not NumPy's: {(got != want).sum()} of {got.size} differ")
        exact = round_to(reference_w4.dequantize(codes, scales, tensor_scale, format, k), self.get(spec, "to"))
        judge.within("the widened matrix", results["wide"], exact, 0.0)


class Product(Linear):
    """ops.linear with a packed 4-bit weight."""

    name = "linear (4 bits)"
    weight = 3
    DEFAULTS = Linear.DEFAULTS | {"format": "nvfp4", "compute": "bfloat16", "workspace": False}
    REQUIRED = ("x",)
    LOOSE = {"x": (0, 1)}
    BAD_OPTIONS = Linear.BAD_OPTIONS

    def kernels(self, backend):
        return runnable("w4_linear", backend.device)

    def draw(self, draw, backend):
        spec = {"dtype": draw.pick(floats(backend)), "format": draw.pick(FORMATS), "compute": draw.pick(COMPUTE)}
        rows = draw.pick((1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 31, 32, 33)) if draw.chance(0.6) else draw.size(600)
        spec["k"] = draw.size(9000, 1)
        if draw.chance(0.5):
            spec["k"] = -(-spec["k"] // 64) * 64
        spec["n"] = draw.size(int(min(9000, max(2e6 / spec["k"] / max(rows / 8, 1), 8))), 1)
        self.draw_options(spec, draw, backend, rows)
        if draw.plain > 0.5 and spec["compute"] in backend.dtypes:
            spec["dtype"] = spec["compute"]
        spec["workspace"] = draw.chance(0.3)
        spec["repeats"] = draw.pick((0, 0, 1)) if not spec["in_place"] else 0
        return self.finish(spec, draw, backend)

    def arrays(self, spec):
        found = super().arrays(spec)
        n, k = found.pop("weight").shape
        found |= weight_arrays("weight", self.get(spec, "format"), n, k)
        if self.get(spec, "workspace"):
            found["workspace"] = Array((1 << 22,), "uint8", {}, output=True, scratch=True)
        return found

    def values(self, spec):
        arrays = {n: a for n, a in self.arrays(spec).items() if not n.startswith("weight.") and n != "workspace"}
        rng = np.random.default_rng(spec.get("seed", 0))
        values = {n: self.normal(rng, a) for n, a in arrays.items() if n != "out"}
        n, k = super().arrays(spec)["weight"].shape
        return values | random_weight(rng, "weight", self.get(spec, "format"), n, k)

    def weight_of(self, spec, views) -> dict[str, Any]:
        """The views with the packed weight in place of its three parts."""
        parts = [views[f"weight.{part}"] for part in ("codes", "scales", "tensor_scale")]
        plain = W4Weight(self.get(spec, "format"), *parts, self.get(spec, "k"))
        packed = plain.pack(self.get(spec, "compute"), pair=self.get(spec, "swiglu"))
        return {k: v for k, v in views.items() if not k.startswith("weight.")} | {"weight": packed}

    def query(self, spec, views, options):
        return super().query(spec, self.weight_of(spec, views), options)

    def call(self, spec, views, options):
        views = self.weight_of(spec, views)
        if "workspace" in views:
            plan = super().query(spec, views, options)
            if plan.workspace_bytes > views["workspace"].shape[0]:
                del views["workspace"]
        return super().call(spec, views, options)

    def judge(self, spec, values, after, results):
        out, dtype = self.out(spec, after, results)
        format, k = self.get(spec, "format"), self.get(spec, "k")
        more = {n: values[n].astype(np.float64) for n in ("bias", "norm_weight", "residual") if n in values}
        w = wide(values, "weight", format, k)
        exact, error = product(
            values["x"], w, format, self.get(spec, "compute"), dtype, eps=1e-3, swiglu=self.get(spec, "swiglu"), **more
        )
        judge.within("out", out, exact, error)


class Chain(Function):
    """ops.linear_chain: a product may read the results of earlier products."""

    name = "linear_chain"
    weight = 2
    DEFAULTS: dict[str, Any] = {
        "rows": 1, "format": "nvfp4", "compute": "bfloat16", "links": [{}], "ahead": 0, "programmatic": False,
        "num_threads": 0, "repeats": 0, "kernel": None, "layouts": {},
    }  # fmt: skip
    LEAST = {"rows": 1}
    BAD_OPTIONS = {"kernel": ("nonesuch", 3)}

    def kernels(self, backend):
        return runnable("w4_linear_chain", backend.device)

    def draw(self, draw: Draw, backend):
        kinds = floats(backend)
        spec = {"format": draw.pick(FORMATS), "compute": draw.pick(COMPUTE)}
        spec["rows"] = draw.pick((1, 1, 1, 2, 3, 4, 5, 8)) if draw.chance(0.8) else draw.size(40, 1)
        links: list[dict[str, Any]] = []
        widths: list[int] = []
        count = draw.pick((1, 2, 3, 4, 4, 5, 8))
        room = 2.5e6 / count / max(spec["rows"] / 4, 1)
        for i in range(count):
            link: dict[str, Any] = {"x": draw.below(i) if i and draw.chance(0.8) else None}
            if i and draw.chance(0.6):
                link["x"] = i - 1
            k = widths[link["x"]] if link["x"] is not None else draw.size(4100, 1)
            most = int(max(min(4100, room / k), 2))
            link["swiglu"] = draw.option(0.25)
            columns = draw.size(most // 2 if link["swiglu"] else most, 1)
            if draw.plain > 0.5 or draw.chance(0.4):
                columns = -(-columns // 64) * 64
            link["n"], link["k"] = columns * (2 if link["swiglu"] else 1), k
            before = [j for j, width in enumerate(widths) if width == columns]
            if draw.option(0.3):
                link["residual"] = draw.pick(before) if before and draw.chance(0.7) else draw.pick(kinds)
            for name in ("bias", "norm"):
                link[name] = draw.pick(kinds) if draw.option(0.3) else None
            link["x_dtype"], link["out_dtype"] = draw.pick(kinds), draw.pick(kinds)
            widths.append(columns)
            links.append({key: value for key, value in link.items() if value not in (None, False)})
        spec["links"], spec["ahead"] = links, draw.pick((0, 0, 1, 4))
        spec["programmatic"], spec["repeats"] = draw.chance(0.2), draw.pick((0, 0, 1))
        spec["num_threads"] = draw.pick((0, 1, 3)) if backend.device == "cpu" else 0
        return spec

    def links(self, spec) -> list[dict[str, Any]]:
        """The links, with defaults filled in. If shrinking has removed the source of a link, an array takes its
        place."""
        usual = {"n": 8, "k": 8, "swiglu": False, "x": None, "residual": None, "bias": None, "norm": None}
        usual |= {"x_dtype": "float32", "out_dtype": "float32"}
        links: list[dict[str, Any]] = []
        widths: list[int] = []
        for i, given in enumerate(self.get(spec, "links")):
            link = usual | given
            link["n"], link["k"] = max(link["n"], 1), max(link["k"], 1)
            link["n"] += link["n"] % 2 if link["swiglu"] else 0
            columns = link["n"] // (2 if link["swiglu"] else 1)
            if link["x"] is not None and (link["x"] >= i or widths[link["x"]] != link["k"]):
                link["x"] = None
            if isinstance(link["residual"], int) and (link["residual"] >= i or widths[link["residual"]] != columns):
                link["residual"] = None
            widths.append(columns)
            links.append(link | {"columns": columns})
        return links

    def arrays(self, spec):
        rows, found = self.get(spec, "rows"), {}
        for i, link in enumerate(self.links(spec)):
            found |= weight_arrays(f"{i}.weight", self.get(spec, "format"), link["n"], link["k"])
            if link["x"] is None:
                found[f"{i}.x"] = Array((rows, link["k"]), link["x_dtype"])
            for name, shape in (("bias", (link["n"],)), ("norm", (link["k"],))):
                if link[name]:
                    found[f"{i}.{name}"] = Array(shape, link[name])
            if isinstance(link["residual"], str):
                found[f"{i}.residual"] = Array((rows, link["columns"]), link["residual"])
            found[f"{i}.out"] = Array((rows, link["columns"]), link["out_dtype"], {}, True)
        return found

    def values(self, spec):
        rng = np.random.default_rng(spec.get("seed", 0))
        values = {}
        for i, link in enumerate(self.links(spec)):
            values |= random_weight(rng, f"{i}.weight", self.get(spec, "format"), link["n"], link["k"])
        for name, array in self.arrays(spec).items():
            if name not in values and not name.endswith(".out"):
                values[name] = round_to(rng.standard_normal(array.shape, dtype=np.float32), array.dtype)
        return values

    def products(self, spec, views) -> list[dict[str, Any]]:
        made = []
        for i, link in enumerate(self.links(spec)):
            parts = [views[f"{i}.weight.{part}"] for part in ("codes", "scales", "tensor_scale")]
            plain = W4Weight(self.get(spec, "format"), *parts, link["k"])
            packed = plain.pack(self.get(spec, "compute"), pair=link["swiglu"])
            x = views[f"{i}.x"] if link["x"] is None else link["x"]
            one = {"x": x, "weight": packed, "out": views[f"{i}.out"], "eps": 1e-3, "swiglu": link["swiglu"]}
            residual = views[f"{i}.residual"] if isinstance(link["residual"], str) else link["residual"]
            for name, array in (
                ("bias", views.get(f"{i}.bias")),
                ("norm_weight", views.get(f"{i}.norm")),
                ("residual", residual),
            ):
                if array is not None:
                    one[name] = array
            for name in ("programmatic", "num_threads"):
                if self.get(spec, name):
                    one[name] = self.get(spec, name)
            made.append(one)
        return made

    def query(self, spec, views, options):
        return ops.linear_chain_query(self.products(spec, views), **options)

    def call(self, spec, views, options):
        products = self.products(spec, views)
        ahead = [p["weight"] for p in products][: self.get(spec, "ahead")]
        got = ops.linear_chain(products, ahead, **options)
        if any(out is not product["out"] for out, product in zip(got, products, strict=True)):
            raise Wrong("the call returned other arrays than the given ones")
        return {}

    def judge(self, spec, values, after, results):
        format, compute = self.get(spec, "format"), self.get(spec, "compute")
        for i, link in enumerate(self.links(spec)):
            x = values[f"{i}.x"] if link["x"] is None else after[f"{link['x']}.out"]
            more = {"bias": values.get(f"{i}.bias"), "norm_weight": values.get(f"{i}.norm")}
            if link["residual"] is not None:
                text = isinstance(link["residual"], str)
                more["residual"] = values[f"{i}.residual"] if text else after[f"{link['residual']}.out"]
            more = {k: v.astype(np.float64) for k, v in more.items() if v is not None}
            w = wide(values, f"{i}.weight", format, link["k"])
            if not np.isfinite(x).all():
                return  # an earlier result has overflowed its dtype, so later ones cannot be compared
            exact, error = product(x, w, format, compute, link["out_dtype"], eps=1e-3, swiglu=link["swiglu"], **more)
            largest = float(np.finfo(np.float16 if link["out_dtype"] == "float16" else np.float32).max)
            exact = np.where(np.abs(exact) > largest, np.copysign(np.inf, exact), exact)
            judge.within(f"the result of product {i}", after[f"{i}.out"], exact, error)


FUNCTIONS = (Quantize(), Product(), Chain())
