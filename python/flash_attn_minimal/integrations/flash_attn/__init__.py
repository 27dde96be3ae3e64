"""FlashAttention-2's and -3's packages over this library: the same names, arguments and results.

    import flash_attn_minimal.integrations.flash_attn as flash_attn             FlashAttention-2's functions
    from flash_attn_minimal.integrations.flash_attn import hopper               FlashAttention-3's

Programs that say `import flash_attn` or `import flash_attn_interface` find these after

    import flash_attn_minimal.integrations.flash_attn
    flash_attn_minimal.integrations.flash_attn.install()

which an installed flash_attn or flash_attn_interface forbids: nothing is ever shadowed.

    flash_attn, flash_attn.flash_attn_interface    flash_attn_interface.py here
    flash_attn.bert_padding                        bert_padding.py
    flash_attn.layers.rotary                       layers/rotary.py
    flash_attn_interface                           hopper.py

What is different:
    tensors             on a CPU as on a GPU; float32, too; any head dims from 1 to 512
    gradients           wherever the core has them, also with attention_chunk and qv
    errors              RuntimeErrors, as there; the text names the argument and its value
    lse                 of a row that sees no key is -inf (FlashAttention-2 says inf)
    num_splits          of calls without a cache, pack_gqa and sm_margin change the speed there, and nothing here
    float8              where no kernel of float8 serves a call, it is computed in bfloat16

The functions of compiled modules (flash_attn_2_cuda, flash_attn_3._C) are not here.
"""

from . import bert_padding, flash_attn_interface, hopper, layers
from ._install import install, uninstall
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.8.4"  # the release of flash_attn whose functions these are

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "hopper",
    "install",
    "layers",
    "uninstall",
]
