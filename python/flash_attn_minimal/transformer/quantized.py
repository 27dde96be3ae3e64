"""4-bit weights, in the formats NVFP4, MXFP4 and INT4, for the products of ops.linear.

    weight[n, k] = code[n, k] * scale[n, k // block] * tensor_scale

    format  code                     block  scale          tensor_scale  bits per weight
    nvfp4   E2M1: 0, 0.5, 1, 1.5,      16   float8_e4m3    float32       4.5
            2, 3, 4, 6 and negatives
    mxfp4   E2M1                       32   power of two   1             4.25
    int4    -8 .. 7                   128   float16        1             4.125

A W4Weight is the plain form, which files hold; `pack` reorders it once for the products:

>>> import numpy as np
>>> from flash_attn_minimal.transformer import ops
>>> from flash_attn_minimal.transformer.quantized import W4Weight
>>> w = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
>>> weight = W4Weight.quantize(w, "nvfp4")
>>> weight.bytes, w.nbytes
(9220, 65536)
>>> x = np.ones((1, 256), np.float32)
>>> y = ops.linear(x, weight.pack("float16"))
>>> bool(np.allclose(y, x @ weight.dequantize().T, rtol=1e-4, atol=1e-4))
True

Arrays come from NumPy, PyTorch, CuPy, JAX or anything else that _arrays has a door for, and results are arrays of
the same framework. Every function computes the same bytes on CPU and GPU.
"""

from __future__ import annotations

import ctypes as ct
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import _arrays
from .._arrays import View, to_numpy
from .._core import checks, recordings
from .._core.files import Fields, json_of, quoted
from .._core.options import DType
from .._core.structs import CPU, DTYPES, new
from ..errors import BadArgument
from ._library import W4_FORMATS, W4DequantizeArgs, W4PackArgs, W4QuantizeArgs, load
from ._safetensors import ALL, FLOATS, bad_file, read_metadata, read_safetensors, write_safetensors

BLOCK = {"nvfp4": 16, "mxfp4": 32, "int4": 128}
_SCALES = {"nvfp4": ("uint8", "F8_E4M3"), "mxfp4": ("uint8", "U8"), "int4": ("float16", "F16")}
_ALIGNMENT = 128  # of a packed weight, in bytes
_KEY = "flash_attn_minimal.w4"  # a key of the metadata: {name: {"format", "in_features"}}


def parts_of(format: str, rows: int, columns: int) -> dict[str, tuple[str, str, tuple[int, ...]]]:
    """The arrays of a weight of this format and size: dtype, safetensors' name of it, shape."""
    return {
        "codes": ("uint8", "U8", (rows, -(-columns // 2))),
        "scales": (*_SCALES[format], (rows, -(-columns // BLOCK[format]))),
        "tensor_scale": ("float32", "F32", (1,)),
    }


class W4Weight:
    """A 4-bit matrix (out_features, in_features), in the plain form.

    codes: uint8 (out_features, ceil(in_features / 2)); an even column in the low 4 bits, the next in the high 4.
    scales: (out_features, ceil(in_features / block)); uint8 (the bits of a float8_e4m3, or an exponent plus 127), or
        float16 for int4.
    tensor_scale: float32 (1,).

    All three are contiguous and from the same framework and device.
    """

    def __init__(self, format: str, codes: Any, scales: Any, tensor_scale: Any, in_features: int):
        format = checks.one_of("format", format, W4_FORMATS)
        self.format, self.codes, self.scales, self.tensor_scale = format, codes, scales, tensor_scale
        self.in_features = checks.integer("in_features", in_features, 1, 1 << 24)
        self._views()

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def bytes(self) -> int:
        """The size of the three arrays, in memory and in a file."""
        columns = -(-self.in_features // 2), -(-self.in_features // BLOCK[self.format]) * (1 + (self.format == "int4"))
        return self.out_features * sum(columns) + 4

    def __repr__(self) -> str:
        return f"W4Weight({self.format!r}, {self.out_features} x {self.in_features}, {self.bytes} bytes)"

    @classmethod
    def quantize(cls, w, format: str = "nvfp4", search: bool = True, *, num_threads: int = 0) -> W4Weight:
        """Rounds a float32, float16 or bfloat16 matrix.

        search: try several scales near the one that maps a block's largest number to the largest code, and take the one
            with the least squared error. A block with a NaN or an infinity becomes NaN.

        The scales of "int4" are float16: a block whose largest number is above 4.5e5 would be cut off, and a block
        below 2e-7 becomes 0. The CPU refuses the first, and also a matrix of which nothing but zeros would be left.
        Arrays on a GPU are not checked, because that would wait for the GPU.
        """
        format = checks.one_of("format", format, W4_FORMATS)
        view = _arrays.view(w, "w")
        checks.floats("w", view, cast=True)
        fits = len(view.shape) == 2 and 0 not in view.shape
        checks.shape("w", view, fits, "(out_features, in_features), neither of them 0")
        checks.last_axis("w", view)
        rows, columns = view.shape
        args = new(W4QuantizeArgs)
        args.device, args.dtype = view.device, DTYPES[view.dtype]
        args.search = checks.flag("search", search)
        args.num_threads = checks.integer("num_threads", num_threads, 0, 4096)
        args.w_data, args.w_row_stride = view.pointer, view.strides[0]
        made = [view.door.empty(view, shape, dtype) for dtype, _, shape in parts_of(format, rows, columns).values()]
        _put_weight(args, "out", format, rows, columns, made)
        load().fa_w4_quantize(args, view.door.stream([view]))
        recordings.wrote([view, *made])
        if format == "int4" and view.device == CPU:
            _check_int4_range(w, made[1])
        return cls(format, *(each.door.result(each) for each in made), columns)

    def dequantize(self, dtype: DType = "float32", *, num_threads: int = 0):
        """The matrix in float32, float16 or bfloat16."""
        dtype = checks.dtype_name("dtype", dtype, checks.FLOATS)
        views = self._views()
        out = views[0].door.empty(views[2], self.shape, dtype)
        args = new(W4DequantizeArgs)
        args.device, args.out_dtype = views[0].device, DTYPES[dtype]
        args.num_threads = checks.integer("num_threads", num_threads, 0, 4096)
        _put_weight(args, "weight", self.format, *self.shape, views)
        args.out_data, args.out_row_stride = out.pointer, self.in_features
        load().fa_w4_dequantize(args, views[0].door.stream(views))
        recordings.wrote([*views, out])
        return out.door.result(out)

    def pack(self, dtype: DType = "bfloat16", pair: bool = False, *, num_threads: int = 0) -> PackedW4:
        """Reorders the weight for ops.linear, which computes its products in `dtype`: "float16" or "bfloat16".

        pair: for linear(swiglu=True); the first half of the rows is the gate, the second half is up.
        """
        names, expected = ("float16", "bfloat16"), "neither 'float16' nor 'bfloat16', which products are made in"
        dtype = checks.dtype_name("dtype", dtype, names, expected)
        views = self._views()
        args = new(W4PackArgs)
        args.device, args.dtype = views[0].device, DTYPES[dtype]
        args.pair, args.num_threads = checks.flag("pair", pair), checks.integer("num_threads", num_threads, 0, 4096)
        _put_weight(args, "weight", self.format, *self.shape, views)
        size = ct.c_int64()
        load().fa_w4_packed_bytes(args.weight_format, *self.shape, args.pair, size)
        packed = PackedW4(self.format, dtype, bool(pair), self.shape, size.value, views[0])
        args.packed, args.packed_bytes = packed._view.pointer, size.value
        load().fa_w4_pack(args, views[0].door.stream(views))
        recordings.wrote([*views, packed._view])
        return packed

    def to(self, convert: Callable[[Any], Any]) -> W4Weight:
        """The weight with each array converted: `weight.to(cupy.asarray)` copies a NumPy weight to the GPU."""
        return W4Weight(self.format, *map(convert, (self.codes, self.scales, self.tensor_scale)), self.in_features)

    def save(self, path: str | os.PathLike[str], name: str = "weight") -> None:
        """Writes a safetensors file; see save()."""
        save(path, {name: self})

    @classmethod
    def load(cls, path: str | os.PathLike[str], name: str | None = None) -> W4Weight:
        """Reads a weight from a file of save(); `name` may be omitted where there is only one."""
        weights, _ = load_file(path)
        weights = {key: weight for key, weight in weights.items() if isinstance(weight, W4Weight)}
        if name is None and len(weights) == 1:
            return next(iter(weights.values()))
        if name not in weights:
            raise BadArgument(f"{os.fspath(path)!r} has no 4-bit weight {name!r}, but {', '.join(sorted(weights))}")
        return weights[name]

    def _views(self) -> list[View]:
        """Checks the three arrays; returns their Views."""
        views = [_arrays.view(getattr(self, name), name) for name in ("codes", "scales", "tensor_scale")]
        codes, scales, tensor_scale = views
        if len(codes.shape) != 2 or codes.dtype != "uint8" or codes.shape[1] != -(-self.in_features // 2):
            raise BadArgument(
                f"codes is {codes.dtype} {tuple(codes.shape)}: expected uint8 (out_features, "
                f"{-(-self.in_features // 2)}) for in_features={self.in_features}"
            )
        parts = parts_of(self.format, codes.shape[0], self.in_features)
        for name, view in (("scales", scales), ("tensor_scale", tensor_scale)):
            dtype, _, shape = parts[name]
            checks.same_place(name, view, "codes", codes)
            if view.dtype != dtype or tuple(view.shape) != shape:
                raise BadArgument(
                    f"{name} is {view.dtype} {tuple(view.shape)}: expected {dtype} {shape} for {self.format} "
                    f"and codes of shape {tuple(codes.shape)}"
                )
        for name, view in (("codes", codes), ("scales", scales)):
            checks.contiguous(name, view)
        return views


def _check_int4_range(w, scales: View) -> None:
    """Raises if a matrix on the CPU is outside the range of float16 scales."""
    rows, blocks = scales.shape
    found = np.ctypeslib.as_array((ct.c_uint16 * (rows * blocks)).from_address(scales.pointer)).reshape(rows, blocks)
    if (found == 0x7BFF).any():  # 65504, the largest float16
        row, block = (int(i) for i in np.argwhere(found == 0x7BFF)[0])
        columns = slice(BLOCK["int4"] * block, BLOCK["int4"] * (block + 1))
        raise BadArgument(
            f"w[{row}, {columns.start}:{columns.stop}] reaches {float(abs(w[row, columns]).max()):g}: a block of int4, "
            "whose scale is a float16, holds numbers up to 4.5e5. Divide w, or use nvfp4"
        )
    if not found.any() and bool((w != 0).any()):
        raise BadArgument(
            f"w reaches {float(abs(w).max()):g}, and every number of it would become 0: a block of int4, whose scale "
            "is a float16, holds numbers from 2e-7 on. Multiply w, or use nvfp4"
        )


class PackedW4:
    """A weight in the order in which the products read it, made by W4Weight.pack. ops.linear takes it as `weight`.

    `data` is its memory, uint8. The order is the library's own and may change with a release, so files do not hold it.
    """

    def __init__(self, format: str, dtype: str, pair: bool, shape: tuple[int, int], size: int, like: View):
        """Allocates aligned memory of the framework and on the device of `like`."""
        self.format, self.dtype, self.pair, self.shape, self.bytes = format, dtype, pair, shape, size
        view = like.door.empty(like, (self.bytes + (_ALIGNMENT if like.device == CPU else 0),), "uint8")
        if like.device == CPU:  # frameworks align to 64 bytes or less there
            owner = view.owner[0] if isinstance(view.owner, tuple) else view.owner  # for JAX a NumPy array
            start = -view.pointer % _ALIGNMENT
            view = _arrays.view(owner[start : start + self.bytes], "packed")
        self.data, self._view = view.door.result(view), view

    def __repr__(self) -> str:
        pair = ", pair=True" if self.pair else ""
        return f"PackedW4({self.format!r}, {self.shape[0]} x {self.shape[1]}, dtype={self.dtype!r}{pair})"


def _put_weight(args: ct.Structure, name: str, format: str, rows: int, columns: int, views: list[View]) -> None:
    setattr(args, f"{name}_format", W4_FORMATS[format])
    setattr(args, f"{name}_out_features", rows)
    setattr(args, f"{name}_in_features", columns)
    for part, view in zip(("codes", "scales", "tensor_scale"), views, strict=True):
        setattr(args, f"{name}_{part}", view.pointer)


# ---- files ----


def save(path: str | os.PathLike[str], weights: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> None:
    """Writes a safetensors file of W4Weights and float arrays. A W4Weight `name` becomes name.codes, name.scales and
    name.tensor_scale. The metadata hold the formats and a checksum of every tensor."""
    about, tensors, shapes = {}, {}, {}
    codes = {native: code for code, native in FLOATS.items()}
    for name, weight in weights.items():
        if isinstance(weight, W4Weight):
            about[name] = {"format": weight.format, "in_features": weight.in_features}
            for part, (_, *stored) in parts_of(weight.format, *weight.shape).items():
                tensors[f"{name}.{part}"], shapes[f"{name}.{part}"] = to_numpy(getattr(weight, part)), tuple(stored)
        else:
            array = to_numpy(weight)
            if array.dtype.name not in codes:
                raise BadArgument(f"{name} is {array.dtype}: expected a W4Weight or an array of {', '.join(codes)}")
            tensors[name], shapes[name] = array, (codes[array.dtype.name], array.shape)
    write_safetensors(path, tensors.items(), shapes, {**(metadata or {}), _KEY: json.dumps(about)})


def load_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads a file of save(): ({name: W4Weight or NumPy array}, metadata). The arrays are views of the mapped file;
    checksums are compared."""
    metadata = read_metadata(path)
    if _KEY not in metadata:
        raise bad_file(path, f"its metadata have no {_KEY!r}: it holds no 4-bit weights of this package")
    tensors = read_safetensors(path, ALL)
    where = f"safetensors file {os.fspath(path)!r}: its metadata are damaged"
    entries = Fields(where, json_of(f"{where}: {_KEY}", metadata[_KEY]), f"{_KEY}.").fields
    about = {}
    for name, entry in entries.items():
        fields = Fields(where, entry, f"{quoted(name)}.")
        about[name] = fields.get("format", str), fields.get("in_features", int)
    weights: dict[str, Any] = {}
    for name, (format, in_features) in about.items():
        try:
            parts = [tensors.pop(f"{name}.{part}") for part in ("codes", "scales", "tensor_scale")]
            weights[name] = W4Weight(format, *parts, in_features)
        except KeyError as error:
            raise bad_file(path, f"it lacks the tensor {error}") from None
        except BadArgument as error:
            raise bad_file(path, f"weight {quoted(name)}: {error}") from None
    return weights | tensors, {key: text for key, text in metadata.items() if key not in (_KEY, "crc32")}
