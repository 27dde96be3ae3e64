"""The advice at the end of a message: the call that fixes an argument, in the terms of the caller's own framework.

Each function returns "; pass ...", or "" for a framework that is not listed here.
"""

from __future__ import annotations

from typing import NamedTuple


class _Words(NamedTuple):
    """Templates of {x}, the argument's name; {first}, the name of a correct argument; and {dtype}."""

    module: str  # the module that has the framework's dtypes
    array: str  # makes an array of this dtype on first's device from a list or another framework's array
    cast: str
    contiguous: str = ""
    move: str = ""  # to the device of `first`
    bits: str = ""  # integers that are the bits of this dtype


_WORDS = {
    "NumPy": _Words(
        "np",
        "np.asarray({x}, {dtype})",
        "{x}.astype({dtype})",
        "np.ascontiguousarray({x})",
        bits="{x}.view(ml_dtypes.{dtype})",
    ),
    "PyTorch": _Words(
        "torch",
        "torch.as_tensor({x}, dtype={dtype}, device={first}.device)",
        "{x}.to({dtype})",
        "{x}.contiguous()",
        "{x}.to({first}.device)",
        "{x}.view(torch.{dtype})",
    ),
    "CuPy": _Words("cupy", "cupy.asarray({x}, {dtype})", "{x}.astype({dtype})", "cupy.ascontiguousarray({x})"),
    "JAX": _Words(
        "jnp",
        "jnp.asarray({x}, {dtype})",
        "{x}.astype({dtype})",
        move="jax.device_put({x}, {first}.device)",
        bits="jax.lax.bitcast_convert_type({x}, jnp.{dtype})",
    ),
}


def advice(framework: str, what: str, name: str, first: str = "", dtype: str = "") -> str:
    """framework: a door's name, for an array that of `first`; what: a field of _Words; dtype: a dtype's name, or an
    expression such as q.dtype."""
    words = _WORDS.get(framework)
    if words is None or not (template := getattr(words, what)):
        return ""
    if not dtype.endswith(".dtype"):
        dtype = f"{words.module}.{dtype}"
    return "; pass " + template.format(x=name, first=first, dtype=dtype)


# Integers of these types are often the bits of floats that a file, or a framework, had no name for.
_BITS = {"uint16": "bfloat16", "int16": "bfloat16", "uint8": "float8_e4m3fn"}


def pass_cast(framework: str, name: str, dtype: str, given: str = "") -> str:
    """given: the dtype that the array has, where a cast may not be what is wanted: of bits it makes other numbers."""
    if given.startswith("complex"):
        return ""
    words = _WORDS.get(framework)
    if words and words.bits and given in _BITS and "int" not in dtype:
        bits = _BITS[given]
        return f"; if it has the bits of {bits}, pass {words.bits.format(x=name, dtype=bits)}"
    return advice(framework, "cast", name, dtype=dtype)
