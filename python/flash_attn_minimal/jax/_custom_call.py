"""From the structs of a call to a custom call of XLA, whose parts cuda/api/xla_ffi.cpp describes."""

from __future__ import annotations

import ctypes as ct
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import ffi

from .. import _arrays
from .._arrays import View
from .._arrays.door import Door
from .._core.library import OK, failure, load
from .._core.prepared import Image, pointers
from .._core.structs import CPU, CUDA, OPERATIONS, AttentionPlan, new
from ..errors import BadArgument, Unsupported

_TARGET = "flash_attn_minimal_call"
# Placeholders are aligned, and farther apart than any buffer is long, so they pass checks of alignment and overlap.
_ADDRESS_UNIT = 1 << 48
_OF_THE_CALL = ("device", "workspace", "workspace_bytes")  # the values before the addresses of buffers


class PlaceDoor(Door):
    """A door for buffers of a custom call, which have no address yet."""

    name = "JAX"

    def view(self, array, name):
        return array


_PLACES = PlaceDoor()
_arrays._doors[View] = _PLACES  # so that a View can be passed as an array


def address(index: int) -> int:
    """The placeholder in a struct for the address of a buffer."""
    return _ADDRESS_UNIT * (1 + index)


def place(index: int, shape: Sequence[int], dtype: str, door: Door = _PLACES, writable: bool = True) -> View:
    """A dense View of buffer `index` of a custom call (arguments first, then results)."""
    strides = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return View(None, door, address(index), tuple(shape), strides, dtype, CPU, 0, writable)


def as_array(name: str, array: Any) -> Any:
    """Checks that an array is JAX's or NumPy's and returns it unconverted: JAX may turn float64 into float32, and the
    array's own dtype has to be checked."""
    if isinstance(array, jax.Array):
        return array
    door = _arrays.view(array, name).door
    if door is not _arrays.NUMPY:
        raise BadArgument(f"{name} is a {door.name} array, but the call is part of a JAX program: use JAX for all")
    return array


def workspace_bytes(args: Any, query: Callable[[AttentionPlan], int]) -> int:
    """The bytes of workspace on a GPU; on the CPU the handler allocates its own. Raises if no device of this machine
    can serve the call. args: the struct with the fields device and q."""
    lib, plan, size, served = load(), new(AttentionPlan), 0, False
    q, args.q_data = args.q_data, None  # the query asks the driver which GPU q is on; NULL means the current one
    for device in (CPU, CUDA) if lib.fa_cuda_device_count() else (CPU,):
        args.device = device
        status = query(plan)
        if status == OK:
            served = True
            size = plan.workspace_bytes if device == CUDA else 0
    args.q_data = q
    if not served:
        raise failure(status, args)
    return size


def custom_call(
    operation: str,
    struct: ct.Structure,
    results: Sequence[tuple[tuple[int, ...], str]],
    workspace: int | None = None,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., tuple]:
    """fa_<operation>(struct) as a function of arrays, which returns the results.

    results: their shapes and dtypes. struct: has the placeholder `address` of each buffer. workspace: the bytes of an
    additional result, for a call that has a workspace. aliases: for arguments that are also results, the number of the
    argument and that of the result."""
    _register()
    if workspace is not None:
        results = (*results, ((workspace,), "uint8"))
    shapes = [jax.ShapeDtypeStruct(*about) for about in results]
    written = [(i, to, math.prod(shapes[to].shape) * shapes[to].dtype.itemsize) for i, to in (aliases or {}).items()]
    image = Image(struct)
    words = {
        "call": np.array([1 + OPERATIONS.index(operation), workspace is not None, *sum(written, ())], np.int64),
        "image": np.frombuffer(bytes(image.bytes), np.int64),
        "holes": np.array([*image.links, *_holes(image)], np.int32).reshape(-1),
    }
    more = {"input_output_aliases": dict(aliases)} if aliases else {}
    call = ffi.ffi_call(_TARGET, shapes, **more)

    def run(*arrays):
        arrays = vary(arrays, arrays)
        found = call(*arrays, **words)
        return tuple(vary(found if workspace is None else found[:-1], arrays))

    return run


def _holes(image: Image) -> list[tuple[int, int, int]]:
    """The fields that get their values from XLA: first the device, the workspace and its size, then the buffers."""
    holes = []
    for kind in image.places:
        names = [name for name, of, _ in pointers(kind) if of is ct.c_void_p]
        for name in [*names, *[name for name in ("device", "workspace_bytes") if hasattr(kind, name)]]:
            at, size = image.field(kind, name)
            value = int.from_bytes(image.bytes[at : at + 8], "little")
            if name in _OF_THE_CALL:
                holes.append((at, size, _OF_THE_CALL.index(name)))
            elif value >= _ADDRESS_UNIT:
                holes.append((at, size, len(_OF_THE_CALL) + value // _ADDRESS_UNIT - 1))
            elif value:
                raise Unsupported(f"{name} is memory that XLA does not know of: not served in a traced call")
    return holes


@functools.cache
def _register() -> None:
    """Registers the handlers with XLA, once."""
    lib = load()
    for platform in ("cpu", "CUDA"):
        handler = getattr(lib, f"fa_xla_call_{platform.lower()}")
        ffi.register_ffi_target(_TARGET, ffi.pycapsule(handler), platform=platform)


# ---- the axes of a mesh that arrays vary over: in jax.shard_map the same for arguments, results and gradients ----


def vary(arrays, others) -> list:
    """The arrays, marked as varying over every axis that any of `others` varies over."""
    axes = frozenset().union(*map(varying_axes, others))
    missing = [tuple(sorted(axes - varying_axes(array))) for array in arrays]
    return [_cast(array, more) if more else array for array, more in zip(arrays, missing, strict=True)]


def varying_axes(array) -> frozenset:
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def _cast(array, axes):
    return jax.lax.pcast(array, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, axes)
