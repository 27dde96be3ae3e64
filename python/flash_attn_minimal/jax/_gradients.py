"""Gradients of the functions around attention, in JAX's own operations where the library has none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

NONE = ("sample", "quantize_fp8")  # piecewise constant functions: their gradient is 0


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
