"""A Llama model on top of the attention kernels: real checkpoints in, text out.

    weights.py     llama2.c checkpoints (v0, v1), memory-mapped
    tokenizer.py   byte-pair encoding; reads tokenizer.bin and sentencepiece's tokenizer.model
    model.py       the forward pass with a KV cache; NumPy or CuPy for the matrix products, this library for attention
    sampling.py    greedy, temperature, top-p
    generate.py    the command line: python -m flash_attn_minimal generate CHECKPOINT
    synthetic.py   random checkpoints of any shape in the real file format

Nothing here is imported by the rest of the package.
"""
