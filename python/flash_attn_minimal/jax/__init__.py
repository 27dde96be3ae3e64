"""The functions of the package on JAX's traced arrays: they work under jit, on CPU and GPU.

XLA calls the library through its foreign function interface (cuda/api/xla_ffi.cpp), so no Python runs in a step.
Tracing a call fills the structs of the C ABI, with a placeholder for the address of each buffer. On a GPU the stream is
XLA's; the workspace is an additional result of the custom call, which the caller never sees.

    _attention    both passes of flash_attn_func, flash_attn_varlen_func, and of sequences that fill their rows in part
    _functions    all other functions, by calling them with placeholders: merge, attention over a cache, ops
    _gradients    of merge and rope
    _cuts         which axes of a function's arrays may be cut when the arrays are spread over devices
    _partition    how a call is cut along them
    _axes         the axes of a mesh that an array varies over, in jax.shard_map
    _custom_call  from filled structs to a custom call

A call that no device of this machine can serve is refused while it is traced. vmap makes one call after the other.

>>> import jax
>>> from flash_attn_minimal import flash_attn_func
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 16))
>>> jax.jit(jax.grad(lambda q: flash_attn_func(q, k, v, causal=True).sum()))(q).shape
(1, 10, 2, 16)
"""

from ._attention import Call, check_served, no_second_derivative, scaled, traced
from ._axes import vary
from ._custom_call import as_array, ffi
from ._functions import traced_function
from ._gradients import nothing

__all__ = [
    "Call",
    "as_array",
    "check_served",
    "ffi",
    "no_second_derivative",
    "nothing",
    "scaled",
    "traced",
    "traced_function",
    "vary",
]
