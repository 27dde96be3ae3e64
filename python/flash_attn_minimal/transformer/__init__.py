"""The operations around attention in a Transformer.

ops.py            rms_norm, rope, swiglu, linear, linear_chain, sample
quantized.py      W4Weight: 4-bit weights for linear, and their files
reference_ops.py, reference_w4.py    the same operations in NumPy, written to be read
_library.py       the part of the C ABI for these operations
_safetensors.py   the file format
"""
