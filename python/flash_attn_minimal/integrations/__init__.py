"""Other packages' names over this library: each module or package here stands in for one of them.

flash_attn      flash_attn and flash_attn_interface, the packages of FlashAttention-2 and -3; needs PyTorch
jax             jax.nn.dot_product_attention, and attention over a cache as a function; needs JAX
"""
