"""This library behind PyTorch's own interfaces of attention.

    sdpa                        torch.nn.functional.scaled_dot_product_attention, of dense and of jagged tensors
    flex_attention, recognise   torch.nn.attention.flex_attention, for the functions that the kernels know
    mods                        such functions, with names
    flash_attn_with_kvcache     this library's own, for torch.compile and torch.export too

Importing this module also tells torch.utils.flop_counter what the library's operators cost. Import it before
torch.compile meets the first call.
"""

from . import _flops, mods
from ._cache import flash_attn_with_kvcache
from ._form import Form
from ._sdpa import sdpa
from .flex import flex_attention, recognise

__all__ = ["Form", "flash_attn_with_kvcache", "flex_attention", "mods", "recognise", "sdpa"]

del _flops
