"""PyTorch's own interfaces of attention, served by this library.

    sdpa                        torch.nn.functional.scaled_dot_product_attention, for dense and jagged tensors
    flex_attention, recognise   torch.nn.attention.flex_attention, for functions that the kernels support
    mods                        such functions, by name
    flash_attn_with_kvcache     this library's own, also under torch.compile and torch.export

Importing this module also tells torch.utils.flop_counter the cost of the library's operators. Import it before
torch.compile meets the first call.
"""

from . import _flops, mods
from ._cache import flash_attn_with_kvcache
from ._form import Form
from ._sdpa import sdpa
from .flex import flex_attention, recognise

__all__ = ["Form", "flash_attn_with_kvcache", "flex_attention", "mods", "recognise", "sdpa"]

del _flops
