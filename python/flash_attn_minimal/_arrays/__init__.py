"""The doors: how arrays of NumPy, PyTorch, CuPy, JAX, Numba and anything with DLPack or __cuda_array_interface__ come
in and go out.

A door reads an array into a `View` (pointer, shape, strides in elements, dtype, device), allocates outputs of the
caller's own type through the caller's own framework, and names the stream on which the caller's work is queued. No
framework is ever imported: if a caller passes an array, its framework is already in `sys.modules`, the only place where
doors look.

    door        device     stream
    NumPy       CPU        -
    PyTorch     CPU, CUDA  torch.cuda.current_stream of the tensor's device
    CuPy        CUDA       cupy.cuda.get_current_stream of the array's device
    JAX         CPU, CUDA  the legacy default stream; inputs are waited for before the launch, the result after it
    Numba       CUDA       the array's own stream, else the default stream
    CUDA array  CUDA       the `stream` entry of __cuda_array_interface__, else the default stream. Where the arrays of
                           a call (`out` included) have different streams, they are synchronized before and after it
    DLPack      CPU, CUDA  the legacy default stream, for which the producer is told to make its work ready; the call is
                           waited for
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ..errors import BadArgument
from . import torch_modes, words
from .door import Door, View
from .numpy import NUMPY

# A type's door never changes, so threads may race to write the same entry.
_doors: dict[type, Door] = {np.ndarray: NUMPY}
_single_doors: dict[str, Door] = {}


def _framework_door(module: str, make: Any) -> Door:
    return _single_doors.setdefault(module, make(sys.modules[module]))


def _is_a(array: Any, module: str, attribute: str) -> bool:
    """Whether an array is a `module.attribute`. False if nobody has imported the module (to the end)."""
    base = getattr(sys.modules.get(module), attribute, None)
    return isinstance(base, type) and isinstance(array, base)


def _find_door(array: Any, name: str, first: tuple[str, View] | None, dtype: str) -> Door:
    kind = type(array)
    if isinstance(array, np.ma.MaskedArray):
        raise BadArgument(
            f"{name} is a masked array, whose mask would be ignored: pass {name}.data, and the keys to skip as mask="
        )
    if isinstance(array, np.ndarray):
        return NUMPY
    # A door's module is imported with the first array of its kind: most programs have one framework.
    torch_modes.active()  # loads PyTorch's functions, if this is the first tensor
    if _is_a(array, "torch", "Tensor"):
        from .torch import TorchDoor, TorchSubclassDoor

        own, tensors = (getattr(x, "__torch_dispatch__", None) for x in (kind, torch_modes.Tensor))
        if own is not tensors:  # such as FakeTensor, which answers operators itself
            return TorchSubclassDoor(sys.modules["torch"])
        return _framework_door("torch", TorchDoor)
    if _is_a(array, "cupy", "ndarray"):
        from .cupy import CupyDoor

        return _framework_door("cupy", CupyDoor)
    if _is_a(array, "jax", "Array"):
        from .jax import JaxDoor

        return _framework_door("jax", JaxDoor)
    if hasattr(array, "__cuda_array_interface__") and kind.__module__.startswith("numba"):
        from .cuda_array import NumbaDoor

        return NumbaDoor(kind, sys.modules["numba.cuda"])
    # DLPack is tried before __cuda_array_interface__, because it knows the device and bfloat16.
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        from .dlpack import DLPackDoor

        return DLPackDoor(kind)
    if hasattr(array, "__cuda_array_interface__"):
        from .cuda_array import CudaArrayDoor

        return CudaArrayDoor(kind)
    raise BadArgument(
        f"{name}{_value(array)} is {_kind(array)}: expected an array of NumPy, PyTorch, CuPy, JAX or Numba, "
        f"or one with __cuda_array_interface__ or DLPack{_advice(array, name, first, dtype)}"
    )


def _kind(value: Any) -> str:
    """`a list`, `an int`, `a pandas.core.series.Series`, `None`."""
    if value is None:
        return "None"
    kind = type(value)
    named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if named[0] in 'aeiou' else 'a'} {named}"


def _value(value: Any) -> str:
    """`=0.5`, of single values and short texts."""
    short = isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) < 99)
    return f"={value!r}" if short and not isinstance(value, np.generic) else ""


def _advice(array: Any, name: str, first: tuple[str, View] | None, dtype: str) -> str:
    """Advice for plain Python numbers or lists of them: the call that makes an array. Only the factors of float8 may be
    single numbers."""
    numbers = (list, tuple, int, float, np.generic) if name.endswith("descale") else (list, tuple)
    if isinstance(array, bool) or not isinstance(array, numbers):
        return ""
    if first is None:
        return words.advice("NumPy", "array", name, dtype=dtype)
    first_name, beside = first
    return words.advice(beside.door.name, "array", name, first_name, dtype or f"{first_name}.dtype")


def view(array: Any, name: str, first: tuple[str, View] | None = None, dtype: str = "float32") -> View:
    """The array as the library sees it. The other arguments serve messages: name: the argument's; first: the name and
    the View of an earlier array; dtype: the dtype that it should have, '' for that of `first`."""
    door = _doors.get(type(array))
    if door is None:
        door = _doors.setdefault(type(array), _find_door(array, name, first, dtype))
    return door.view(array, name)


def to_numpy(array: Any) -> np.ndarray:
    """The array in host memory."""
    for name in ("get", "cpu", "copy_to_host"):  # methods of CuPy's, PyTorch's and Numba's arrays
        if hasattr(array, name):
            array = getattr(array, name)()
            break
    return np.asarray(array)
