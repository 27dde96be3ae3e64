"""A small random model for the tests of the engine: in 4 bits, and as the numbers that the 4 bits represent."""

import numpy as np

from flash_attn_lab.models.synthetic import RandomTensors
from flash_attn_minimal.llama.cache import KVCache
from flash_attn_minimal.llama.checkpoint import STACKED, Checkpoint
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.model import Llama, Rows

CONFIG = Config(dim=40, hidden_dim=56, n_layers=3, n_heads=4, n_kv_heads=2, vocab_size=360, seq_len=48)
KEPT = frozenset({(0, "wqkv"), (2, "w2")})


def model(config=CONFIG, tied=True, biases=False, dtype="float32"):
    return Checkpoint("a model", "random", tied, config, dtype, RandomTensors(config, tied, biases, seed=3))


def decoded(checkpoint):
    """The model in float32: a Checkpoint of the numbers that the 4 bits represent."""
    tensors = {name: checkpoint.tensors[name] for name in checkpoint.tensors}
    for name in STACKED:
        tensors[name] = [
            np.asarray(w.dequantize("float32") if hasattr(w, "dequantize") else w, np.float32) for w in tensors[name]
        ]
    return Checkpoint("decoded", "decoded", checkpoint.tied, checkpoint.config, "float32", tensors)


def logits(checkpoint, device, tokens=(3, 5, 7, 11, 13)):
    """The logits after a prompt, then of a step for each further token, so that prefill and decode are both tested."""
    with device.scope():
        llama = Llama(checkpoint, device)
        cache = KVCache(device, checkpoint.config, 1, 16)
        found = []
        for start, new in ((0, tokens[:3]), *((3 + i, [token]) for i, token in enumerate(tokens[3:]))):
            lengths = device.vector_int32([start])
            rows = Rows(device.vector_int32([list(new)]), lengths, None, 0, start + len(new))
            found.append(llama.forward(rows, cache))
        device.synchronize()
        return np.concatenate([x.get() if hasattr(x, "get") else x for x in found]).astype(np.float64)


# Largest difference of two logits over their standard deviation: x is rounded before each of 12 products, q, k, v too.
TOLERANCE = {"float16": 2e-2, "bfloat16": 1e-1}
