"""Attention as a module of tvm-ffi (docs/integrations.md): no Python of this project runs.

    python examples/tvm_ffi_arrays.py build/libflash_attn_minimal_tvm_ffi.so

Arrays may be those of any framework with DLPack."""

import sys

import numpy as np

try:
    import tvm_ffi
except ImportError as error:
    raise SystemExit(f"{error} (pip install apache-tvm-ffi)") from None


def call(function, **arguments):  # by name: the names are the first argument
    return function(" ".join(arguments), *arguments.values())


module = tvm_ffi.load_module(sys.argv[1] if len(sys.argv) > 1 else "build/libflash_attn_minimal_tvm_ffi.so")
q, k, v = (np.random.standard_normal((2, 100, heads, 64)).astype(np.float32) for heads in (8, 2, 2))
out, stepped = np.empty_like(q), np.empty_like(q)
call(module.forward, q=q, k=k, v=v, out=out, causal=True)
k_cache, v_cache = np.zeros((2, 2, 128, 2, 64), np.float32)
for t in range(100):  # the same, a token at a time
    row = {name: x[:, t : t + 1] for name, x in (("q", q), ("k_new", k), ("v_new", v), ("out", stepped))}
    call(module.kvcache, **row, k_cache=k_cache, v_cache=v_cache, cache_seqlens=t)
print(f"a text at once and token by token: {abs(out - stepped).max():.1e} apart")
sys.exit(not np.allclose(out, stepped, atol=1e-5))
