"""A Llama model on top of the attention kernels: real checkpoints in, text out.

    config.py       a model's shape and the constants of its formulas
    checkpoint.py   its tensors by name
    llama2c.py      llama2.c checkpoints (v0, v1, v2), memory-mapped
    huggingface.py  Hugging Face folders: config.json, *.safetensors, tokenizer.json
    weights.py      finds any of these by its path, and the tokenizer beside it
    tokenizer.py    byte-pair encoding; reads tokenizer.bin and sentencepiece's tokenizer.model
    model.py        one forward pass over a cache, in terms of a device's operations
    host.py         those operations on the CPU: NumPy, and this library for attention
    cuda.py         those operations on a GPU: CuPy's arrays, this library's kernels, cuBLAS for larger products, CUDA
                    graphs
    cache.py        the KV cache, contiguous or paged
    engine.py       sequences that join and leave a running batch
    sampling.py     greedy, temperature, top-k, top-p
    w4.py           models with 4-bit weights, and their file
    quantize.py     the command line of w4.py: python -m flash_attn_minimal quantize MODEL
    generate.py     the command line: python -m flash_attn_minimal generate CHECKPOINT

Of the package, only the command line imports this one.
"""
