"""Functions of arrays that may be called while JAX traces a program."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


def is_traced(*arguments: Any) -> bool:
    """Whether one of the arguments is a tracer of JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(x, jax.core.Tracer) for x in arguments)


def traceable(function: _Function) -> _Function:
    """Wraps a function so that it becomes part of a JAX program when an argument is a tracer."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if "jax" in sys.modules and is_traced(*arguments, *named.values()):
            from .. import jax

            return jax.traced_function(function, signature.bind(*arguments, **named).arguments)
        return function(*arguments, **named)

    return call  # type: ignore[return-value]
