"""All functions except attention itself in a JAX program: the function is called once with placeholders for its arrays,
and the call that it makes to the library becomes a custom call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import Unsupported
from . import _cuts
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
    if title in NO_GRADIENT:
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
        if title not in OF:
            raise Unsupported(f"{title} is differentiated, but has no gradient: call it on jax.lax.stop_gradient(...)")
        by_name = dict(zip(names, inputs, strict=True))
        gradients = OF[title](again, by_name, plain, results, cotangents)
        return tuple(laid_like(gradients[name], x) if name in gradients else nothing(x) for name, x in by_name.items())

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


# ---- gradients of these functions, in JAX's own operations where the library has none ----

NO_GRADIENT = ("sample", "quantize_fp8")  # piecewise constant functions: their gradient is 0


def nothing(array):
    """A zero gradient for an array that has no gradient."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


def _of_merge(again, given, plain, results, cotangents):
    """out = a out_a + b out_b with a = exp(lse_a - lse), so dlse_a = a (dlse + dout . (out_a - out))."""
    (out, lse), (dout, dlse) = results, cotangents
    dout, out = dout.astype(jnp.float32), out.astype(jnp.float32)
    gradients = {}
    for side in "ab":
        own, kind = given[f"out_{side}"].astype(jnp.float32), given[f"out_{side}"].dtype
        share = jnp.exp(given[f"lse_{side}"] - jnp.where(jnp.isneginf(lse), 0, lse))  # 0 for a row that sees no key
        rows = share.swapaxes(-1, -2)[..., None]
        gradients[f"out_{side}"] = (rows * dout).astype(kind)
        through = jnp.where(rows > 0, dout * (own - out), 0).sum(-1).swapaxes(-1, -2)  # out is arbitrary where rows = 0
        gradients[f"lse_{side}"] = share * (dlse + through)
    return gradients


def _of_rope(again, given, plain, results, cotangents):
    """The rotation by the negative angles."""
    (dout,) = cotangents
    return {"x": again({**given, **plain, "x": dout, "inverse": not plain.get("inverse", False)})}


# Gradients by the function's name. again(arguments) calls the function; given are its arrays, plain its other
# arguments.
OF = {"merge": _of_merge, "rope": _of_rope}
