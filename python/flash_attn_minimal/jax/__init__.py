"""All that knows JAX: the functions of the package on traced arrays, under jit, on CPU and GPU; and functions for JAX
alone.

XLA calls the library through its foreign function interface (cuda/api/xla_ffi.cpp), so no Python runs in a step.
Tracing a call fills the structs of the C ABI, with a placeholder for the address of each buffer. On a GPU the stream is
XLA's; the workspace is an additional result of the custom call, which the caller never sees.

    nn                  jax.nn.dot_product_attention, and attention over a cache as a function without side effects
    context_parallel    attention of sequences that are spread over the devices of a mesh axis

Inside it, _attention traces calls of flash_attn_func and flash_attn_varlen_func, _functions those of all others.

A call that no device of this machine can serve is refused while it is traced. vmap makes one call after the other.

>>> import jax
>>> from flash_attn_minimal import flash_attn_func
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 16))
>>> jax.jit(jax.grad(lambda q: flash_attn_func(q, k, v, causal=True).sum()))(q).shape
(1, 10, 2, 16)
"""

from ._attention import traced as traced  # for the core
from ._custom_call import ffi as ffi
from ._functions import traced_function as traced_function
from .context_parallel import context_parallel_attention, shard_tokens, unshard_tokens
from .nn import CacheStep, dot_product_attention, flash_attn_with_kvcache

__all__ = [
    "CacheStep",
    "context_parallel_attention",
    "dot_product_attention",
    "flash_attn_with_kvcache",
    "shard_tokens",
    "unshard_tokens",
]
