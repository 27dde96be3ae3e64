"""Other packages' interfaces, served by this library. Each module or package here is for one of them. All need
PyTorch.

flash_attn      flash_attn and flash_attn_interface, the packages of FlashAttention-2 and -3
transformers    an attention implementation for Hugging Face transformers
diffusers       an attention backend for Hugging Face diffusers
flashmask       FlashMask's function
vllm            an attention backend for vLLM
"""
