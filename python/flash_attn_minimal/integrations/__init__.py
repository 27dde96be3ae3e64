"""Other packages' interfaces, served by this library. Each module or package here is for one of them.

flash_attn      flash_attn and flash_attn_interface, the packages of FlashAttention-2 and -3; needs PyTorch
torch           torch.nn.functional.scaled_dot_product_attention and flex_attention; needs PyTorch
transformers    an attention implementation for Hugging Face transformers
diffusers       an attention backend for Hugging Face diffusers
jax             jax.nn.dot_product_attention, and attention over a cache as a function; needs JAX
"""
