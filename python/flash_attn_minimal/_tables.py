"""The kernels of the whole library: those of attention and those of the functions around it."""

from __future__ import annotations

from . import _library
from ._query import kernel_table
from .transformer import _library as _transformer


def kernel_tables() -> dict[str, list[dict[str, str]]]:
    """Every kernel that can be forced by name, in lists like that of kernels(): "forward" (with caches), "backward",
    "linear", "w4_linear" and "w4_linear_chain"."""
    lib = _transformer.load()
    prefixes = _library.KERNEL_TABLES | _transformer.KERNEL_TABLES
    return {name: kernel_table(lib, prefix) for name, prefix in prefixes.items()}
