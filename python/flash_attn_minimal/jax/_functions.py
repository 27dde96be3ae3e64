"""All functions except attention itself in a JAX program: the function is called once with placeholders for its arrays,
and the call that it makes to the library becomes a custom call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import Unsupported
from . import _cuts, _gradients
from ._custom_call import PlaceDoor, as_array, custom_call, place, vary, workspace_bytes
from ._partition import Rule, is_manual, laid_like, partitioned


def traced_function(function: Callable[..., Any], given: Mapping[str, Any], written: Sequence[str] = ()) -> Any:
    """function(**given) as part of a JAX program. given: its arguments by name, arrays and others. written: arrays that
    it writes; the result is then a pair: the function's own result, and a tuple of the new values of these arrays. XLA
    writes them in place if the old values are not used any more: donate them to the outermost jax.jit."""
    arrays = {name: as_array(name, x) for name, x in given.items() if isinstance(x, (jax.Array, np.ndarray))}
    plain = {name: x for name, x in given.items() if name not in arrays}
    names, title = tuple(arrays), function.__name__
    wide = {name for name in _WIDE if name in arrays and _is_wide(arrays[name])}
    buffers = {name: _words(x) if name in wide else x for name, x in arrays.items()}
    described: dict[tuple, _Described] = {}

    def describe(inputs) -> _Described:
        types = tuple(
            (x.shape[:-1], _WIDE[name]) if name in wide else (x.shape, str(x.dtype))
            for name, x in zip(names, inputs, strict=True)
        )
        if types not in described:
            described[types] = _Described(function, names, types, plain, tuple(written))
        return described[types]

    whole = describe(buffers.values())
    operands, results = _cuts.of_function(title, arrays, plain, [shape for shape, _ in whole.results])
    operands |= {name: (*operands[name], None) for name in wide}
    rule = Rule(tuple(operands.values()), (*results, *(operands[name] for name in written)))

    @jax.custom_batching.sequential_vmap
    def once(*inputs):
        return partitioned(lambda *local: describe(local).run(*local), rule)(*inputs)

    call = _with_gradient(once, function, names, plain)
    inputs = vary([jnp.asarray(x) for x in buffers.values()], arrays.values())
    if title in _gradients.NONE:
        inputs = map(jax.lax.stop_gradient, inputs)
    found = (jax.jit(call, inline=True) if is_manual() else call)(*inputs)
    own, became = found[: len(results)], found[len(results) :]
    result = tuple(own) if whole.many else own[0]
    return (result, tuple(became)) if written else result


# Arguments of 64 bits, which JAX has only with jax_enable_x64: 32-bit ones are widened, and passed as 32-bit words.
_WIDE = {"seeds": "int64", "tree_mask": "uint64"}


def _is_wide(array) -> bool:
    """Whether integers have 32 bits, or 64 that jnp.asarray would cut to 32."""
    return array.dtype.kind in "iu" and array.dtype.itemsize in ((4, 8) if isinstance(array, np.ndarray) else (4,))


def _words(array) -> Any:
    """(..., 2) words of 32 bits, the low word first."""
    if isinstance(array, np.ndarray):
        return array.astype(array.dtype.kind + "8", order="C").view(np.uint32).reshape(*array.shape, 2)
    high = array >> 31 if array.dtype.kind == "i" else jnp.zeros_like(array)
    return jnp.stack([array, high], -1).astype(jnp.uint32)


def _with_gradient(once, function, names, plain) -> Callable[..., tuple]:
    call, title = jax.custom_vjp(once), function.__name__

    def again(given):
        return traced_function(function, given)

    def backward(saved, cotangents):
        inputs, results = saved
        if title not in _gradients.OF:
            raise Unsupported(f"{title} is differentiated, but has no gradient: call it on jax.lax.stop_gradient(...)")
        by_name = dict(zip(names, inputs, strict=True))
        gradients = _gradients.OF[title](again, by_name, plain, results, cotangents)
        return tuple(
            laid_like(gradients[name], x) if name in gradients else _gradients.nothing(x) for name, x in by_name.items()
        )

    def forward(*inputs):
        results = once(*inputs)
        return results, (inputs, results)

    call.defvjp(forward, backward)
    return call


class _Recorder(PlaceDoor):
    """A door for arrays of a call that is described, not made."""

    def __init__(self, arguments: int, written: int):
        self.arguments, self.written = arguments, written
        self.results: list = []
        self.workspace: int | None = None
        self.call: tuple | None = None

    def empty(self, like, shape, dtype):
        self.results.append(place(self.arguments + len(self.results), shape, dtype, self))
        return self.results[-1]

    def launch(self, name, args):
        self.call = name, args

    def scratch(self, args, query):
        self.workspace = workspace_bytes(args, query)

    def result(self, view):
        return view


class _Described:
    """A call with arrays of these types. run: a function of the arrays that returns the function's results and the new
    values of the arrays in `written`."""

    def __init__(self, function, names, types, plain, written):
        door = _Recorder(len(names), len(written))
        places = {
            name: place(i, *about, door, writable=name in written)
            for i, (name, about) in enumerate(zip(names, types, strict=True))
        }
        returned = function(**places, **plain)
        self.many = isinstance(returned, tuple)
        assert list(returned if self.many else (returned,)) == door.results and door.call
        self.results = [(view.shape, view.dtype) for view in door.results]
        became = [types[names.index(name)] for name in written]
        aliases = {names.index(name): len(self.results) + i for i, name in enumerate(written)}
        self.run = custom_call(*door.call, [*self.results, *became], door.workspace, aliases)
