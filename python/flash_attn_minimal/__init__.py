"""FlashAttention without a framework: exact attention for NumPy, PyTorch, CuPy, JAX, Numba and any DLPack array, on
CPU and GPU.

>>> import numpy as np
>>> from flash_attn_minimal import flash_attn_func
>>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 100, 8, 64), dtype=np.float32)
>>> flash_attn_func(q, k, v, causal=True).shape  # (batch, seqlen, nheads, headdim)
(2, 100, 8, 64)
"""

from ._core.queries import Plan, kernel_tables
from .attention import flash_attn_func, flash_attn_varlen_func, kernels, merge, quantize_fp8, query
from .backward import backward, backward_kernels, backward_query
from .errors import (
    BadArgument,
    CudaError,
    FlashAttnError,
    LibraryNotFound,
    OutOfMemory,
    RankLost,
    Unsupported,
    WorkspaceTooSmall,
)
from .kvcache import flash_attn_with_kvcache, kvcache_query
from .kvcache_quantize import quantize_kvcache

__version__ = "0.1.0"

__all__ = [
    "BadArgument",
    "CudaError",
    "FlashAttnError",
    "LibraryNotFound",
    "OutOfMemory",
    "Plan",
    "RankLost",
    "Unsupported",
    "WorkspaceTooSmall",
    "backward",
    "backward_kernels",
    "backward_query",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "kernel_tables",
    "kernels",
    "kvcache_query",
    "merge",
    "quantize_fp8",
    "quantize_kvcache",
    "query",
]
