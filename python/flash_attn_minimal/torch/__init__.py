"""All that knows PyTorch: attention's gradients and operators, and PyTorch's own interfaces served by this library.

    activate                        this library as PyTorch's flash backend, for models that stay as they are
    sdpa                            torch.nn.functional.scaled_dot_product_attention, for dense and jagged tensors
    flex_attention, recognise       torch.nn.attention.flex_attention, for functions that the kernels support
    mods                            such functions, by name
    flash_attn_with_kvcache         this library's own, also under torch.compile and torch.export
    context_parallel_attention,     attention of sequences that are spread over the ranks of torch.distributed
    context_parallel_sdpa,
    sdpa_across_ranks

Inside it, autograd takes the calls of flash_attn_func that PyTorch records, traces or transforms.

The first call that needs this package imports it. A program that imports flash_attn_minimal before torch, and whose
first call is inside torch.compile(fullgraph=True), must import it itself.

Importing this package also tells torch.utils.flop_counter the cost of the library's operators. Import it before
torch.compile meets the first call.
"""

from . import _flops as _flops  # registers formulas
from ._backend import activate
from ._kvcache import flash_attn_with_kvcache
from ._sdpa import sdpa
from .context_parallel import (
    close_groups,
    context_parallel_attention,
    context_parallel_sdpa,
    group_of,
    sdpa_across_ranks,
)
from .flex import Form, flex_attention, mods, recognise

__all__ = [
    "Form", "activate", "close_groups", "context_parallel_attention", "context_parallel_sdpa",
    "flash_attn_with_kvcache", "flex_attention", "group_of", "mods", "recognise", "sdpa", "sdpa_across_ranks",
]  # fmt: skip
