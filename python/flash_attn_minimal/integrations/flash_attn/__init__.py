"""The packages of FlashAttention-2 and -3 on top of this library: the same names, arguments and results.

    import flash_attn_minimal.integrations.flash_attn as flash_attn             FlashAttention-2's functions
    from flash_attn_minimal.integrations.flash_attn import hopper               FlashAttention-3's

Programs that say `import flash_attn` or `import flash_attn_interface` find these after

    import flash_attn_minimal.integrations.flash_attn
    flash_attn_minimal.integrations.flash_attn.install()

which raises if flash_attn or flash_attn_interface is installed: nothing is ever shadowed.

    flash_attn, flash_attn.flash_attn_interface    flash_attn_interface.py here
    flash_attn.bert_padding                        bert_padding.py
    flash_attn.layers.rotary                       layers/rotary.py
    flash_attn_interface                           hopper.py

Differences from those packages:
    tensors             may be on a CPU, may be float32, and may have any head dims from 1 to 512
    gradients           exist wherever the core has them, also with attention_chunk and qv
    errors              are RuntimeErrors too; the text names the argument and its value
    lse                 of a row that sees no key is -inf (inf in FlashAttention-2)
    num_splits          of calls without a cache, pack_gqa and sm_margin have no effect; there they affect the speed
    float8              calls that no float8 kernel serves are computed in bfloat16

The functions of compiled modules (flash_attn_2_cuda, flash_attn_3._C) are not here.
"""

from . import bert_padding, flash_attn_interface, hopper, layers
from ._install import install, uninstall
from .flash_attn_interface import *  # noqa: F403

__version__ = "2.8.4"  # the release of flash_attn whose functions these are

__all__ = ["bert_padding", "flash_attn_interface", "hopper", "install", "layers", "uninstall"]
__all__ += flash_attn_interface.__all__
