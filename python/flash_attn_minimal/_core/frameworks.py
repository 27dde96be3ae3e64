"""Calls that a framework must see, because it records or traces them: its room serves them.

The rooms stand above all functions, and most programs need none, so the first such call imports one. Imports go up
nowhere else (the contracts in pyproject.toml)."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def pytorch() -> Any:
    from .. import torch

    return torch


def jax() -> Any:
    from .. import jax

    return jax


def is_traced(*arguments: Any) -> bool:
    """Whether one of the arguments is a tracer of JAX. Another thread may be importing JAX, and a program may have a
    module of its own that is called jax."""
    kind = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    return kind is not None and any(isinstance(x, kind) for x in arguments)


def traceable(function: _Function) -> _Function:
    """Wraps a function so that it becomes part of a JAX program when an argument is a tracer."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if "jax" in sys.modules and is_traced(*arguments, *named.values()):
            return jax().traced_function(function, signature.bind(*arguments, **named).arguments)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]
