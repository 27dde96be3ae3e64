"""The operations around attention in a Transformer.

ops.py            rms_norm, rope, swiglu, linear, linear_chain, sample
quantized.py      W4Weight: 4-bit weights for linear, and their files
_library.py       the part of the C ABI for these operations
_safetensors.py   the file format
"""
