"""Calls that must be refused: a valid call with one thing wrong, its spec's `mutation`.

    ["dtype", array]                elements of another type
    ["shape", array, axis]          one more along an axis
    ["rank", array]                 one axis less
    ["last", array]                 a last axis that is not contiguous
    ["none", array], ["foreign", array]    None, or an object that is not an array of this framework or device
    ["alias", output, input]        the same array for both
    ["option", name, value]         a value that is out of range or of another type
    ["keyword", name]               an argument that does not exist: TypeError
    ["contents", array, index, value]      an integer in the device's memory that is out of range. On a GPU the library
                                    cannot look at it before the launch; the call may run, but change only its outputs

The error must be a FlashAttnError (of "keyword": TypeError), and every byte of every array must be as before.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from flash_attn_minimal.errors import BadArgument, FlashAttnError, OutOfMemory

from .arrays import Arena, itemsize
from .draw import Draw
from .function import (
    ACCEPTED,
    EXCEPTION,
    PASSED,
    QUERY,
    REJECTED,
    SKIPPED,
    STICKY,
    UNTOUCHED,
    Outcome,
    untouched_by,
    where,
)

_OTHER = {"int32": "int64", "int64": "int32", "uint8": "float32", "bool": "float32"}


def mutated(function, spec: dict[str, Any], draw: Draw, backend) -> dict[str, Any]:
    """The spec with a mutation, or unchanged if none of ten draws fits."""
    spec = {k: v for k, v in spec.items() if k not in ("repeats", "graph")}
    kinds = ("dtype", "shape", "shape", "rank", "last", "none", "foreign", "alias", "option", "option", "option")
    kinds += ("keyword", "contents", "contents")
    for _ in range(10):
        mutation = _draw(draw.pick(kinds), function, spec, draw)
        if mutation:
            return {**spec, "mutation": mutation}
    return spec


def _draw(kind: str, function, spec, draw: Draw) -> list | None:
    arrays = {n: a for n, a in function.arrays(spec).items() if a.inside is None}
    if kind == "keyword":
        return [kind, "nonesuch"] if not hasattr(function, "links") else None
    if kind == "option":
        bad = function.bad_options(spec)
        name = draw.pick(sorted(bad)) if bad else None
        return [kind, name, draw.pick(bad[name])] if bad else None
    if kind == "alias":
        pairs = [
            (a, b)
            for a, b in function.ALIASES
            if a in arrays and b in arrays and arrays[a].shape == arrays[b].shape and math.prod(arrays[a].shape)
            and arrays[a].dtype == arrays[b].dtype
        ]  # fmt: skip
        return [kind, *draw.pick(pairs)] if pairs else None
    if kind == "contents":
        found = function.bad_contents(spec, function.values(spec), draw)
        return [kind, found[0], int(found[1]), int(found[2])] if found else None
    name = draw.pick(sorted(n for n in arrays if n != "workspace"))
    shape = arrays[name].shape
    if kind == "none":
        name = draw.pick(function.REQUIRED) if function.REQUIRED else name
        return [kind, name] if name in function.REQUIRED else None
    if kind == "shape":
        loose = function.FREE.get(name, ()) + (() if "out" in arrays else function.LOOSE.get(name, ()))
        if name == "q" and "cache_seqlens" not in arrays and "k_cache" in arrays:
            loose += (0,)  # a cache may have spare entries, and a single length counts for any batch
        if name == "block_mask":  # two blocks of 128 may be three of 64
            loose += tuple(axis for axis in (2, 3) if shape[axis] == 2)
        axes = [axis for axis, size in enumerate(shape) if size > 1 and axis not in loose]
        return [kind, name, draw.pick(axes)] if axes else None
    fewer = (
        "bias",
        "mask",
        "tree_mask",
        "alibi_slopes",
        "positions",
        "k_scale",
        "v_scale",
        "q_descale",
        "k_descale",
        "v_descale",
    )
    if kind == "rank" and (function.any_rank or len(shape) < 2 or name.rstrip("0123456789") in fewer):
        return None  # one axis less may mean the same
    if kind == "foreign" and len(arrays) < 2:
        return None  # a single array decides where the call runs, so it is valid on another device
    gaps = "scale" in name or name.rstrip("0123456789") in ("bias", "mask", "tree_mask")  # such arrays may have gaps
    if kind == "last" and (gaps or not shape or shape[-1] < 2 or 0 in shape):
        return None
    return [kind, name]


def apply(spec, arena: Arena, views, options) -> None:
    kind, name, *more = spec["mutation"]
    if kind in ("option", "keyword"):
        views.pop(name, None)  # an argument that takes an array or a number
        options[name] = more[0] if more else 1
        if name.startswith("dropout_"):
            options |= {n: v for n, v in (("dropout_p", 0.5), ("dropout_seed", 1)) if n not in options}
        if isinstance(options[name], list) and name == "window_size":
            options[name] = tuple(options[name])
    elif kind == "alias":
        views[name] = views[more[0]]
    elif kind == "none":
        views[name] = None
    elif kind == "foreign":
        views[name] = arena.backend.foreign(views[name])
    else:
        views[name] = _wrong_array(kind, arena, name, more)


def has_unknown_elements(spec) -> bool:
    """Whether a wrong call has an array from `_wrong_array`. Should the call be served after all, as PyTorch serves a
    dout of another dtype, its results are of no use."""
    return "mutation" in spec and spec["mutation"][0] in ("dtype", "shape", "rank", "last")


def _wrong_array(kind: str, arena: Arena, name: str, more):
    """The array with its fault, in separate memory that nobody has written, because no call may look at its
    elements."""
    array = arena.arrays[name]
    dtype, shape, step = array.dtype, list(array.shape), 1
    if kind == "dtype":
        dtype = _OTHER.get(dtype, "float64")
    elif kind == "shape":
        shape[more[0]] += 1
    elif kind == "rank":
        shape = shape[1:]
    else:
        step = 2
    size = step * max(math.prod(shape), 1)
    strides = [step * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    handle = arena.backend.empty(-(-size * itemsize(dtype) // 256) * 256)
    return arena.backend.view(handle, dtype, tuple(shape), tuple(strides), 0)


def run(function, spec, arena: Arena, values, options) -> Outcome:
    kind, name, *more = spec["mutation"]
    backend, kernel = arena.backend, spec.get("kernel") or ""
    survives = False
    if kind == "contents":
        at, value = more
        values[name] = np.array(values[name])
        values[name].flat[at] = value
        arena = Arena(backend, arena.arrays, values, spec.get("seed", 0))
        survives = backend.device == "cuda"
    views, options = dict(arena.views), dict(options)
    if kind != "contents":
        apply(spec, arena, views, options)
    expected = TypeError if kind == "keyword" else FlashAttnError
    refusal: Exception | None = None
    try:
        function.call(spec, views, options)
        backend.synchronize()
    except OutOfMemory as error:
        return Outcome(SKIPPED, kernel, str(error))
    except Exception as error:
        if not backend.alive():
            return Outcome(STICKY, kernel, f"{type(error).__name__}: {error}")
        refusal = error
    if refusal is None and not survives:
        return Outcome(ACCEPTED, kernel, f"{spec['mutation']} was not refused")
    written = {n: ... for n, a in arena.arrays.items() if a.output} if survives and refusal is None else {}
    untouched = untouched_by(arena, written)
    if untouched:
        after = f" after {type(refusal).__name__} ({refusal})" if refusal else ""
        return Outcome(UNTOUCHED, kernel, f"{untouched}{after}")
    if refusal is None:
        return Outcome(PASSED, kernel)
    said = f"{type(refusal).__name__}: {refusal}"
    if not isinstance(refusal, expected):
        return Outcome(EXCEPTION, kernel, f"{spec['mutation']}: {said}{where(refusal)}")
    if (
        not isinstance(refusal, (BadArgument, TypeError))
        and kind != "option"
        and not _unserved(refusal, function, spec)
    ):
        return Outcome(EXCEPTION, kernel, f"{spec['mutation']}: {said}, expected BadArgument")
    if (
        function.queried
        and kind not in ("alias", "contents", "keyword")
        and (trouble := _query(function, spec, views, options))
    ):
        return Outcome(QUERY, kernel, f"{spec['mutation']}: {trouble}, but the call raised {said}")
    return Outcome(REJECTED, kernel, "")


def _unserved(refusal: Exception, function, spec) -> bool:
    """Whether the call may have been refused for another reason first."""
    return bool(spec.get("kernel")) or not function.always_served(spec) or "takes no" in str(refusal)


def _query(function, spec, views, options) -> str:
    try:
        plan = function.query(spec, views, options)
    except FlashAttnError:
        return ""
    except Exception as error:
        return f"the query raised {type(error).__name__}: {error}"
    return f"the query says {plan.status} {plan.error!r}" if plan and plan.status == "FA_OK" else ""
