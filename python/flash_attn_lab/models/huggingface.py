"""Writes the folders that flash_attn_minimal/llama/huggingface.py reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.huggingface import ARCHITECTURES, tensor_names
from flash_attn_minimal.transformer._safetensors import FLOATS, numpy_dtype, write_safetensors


class _Views(Iterable):
    """(Hugging Face's name, array) for each tensor of a checkpoint, made one at a time."""

    def __init__(self, names, tensors, dtype):
        self.names, self.tensors, self.dtype = names, tensors, dtype

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, (ours, layer, _) in self.names.items():
            array = self.tensors[ours] if layer is None else self.tensors[ours][layer]
            yield name, np.asarray(array).astype(self.dtype)


def save_folder(
    path: str | os.PathLike[str],
    config: Config,
    tensors: Mapping[str, Any],
    dtype: str = "bfloat16",
    tied: bool = True,
    shards: int = 1,
    eos: int = 2,
) -> None:
    """Writes config.json and the safetensors files. `tensors` is as a Checkpoint holds them; the values are converted
    to dtype. The architecture follows from the model: with biases it is Qwen2, with a window Mistral, else Llama."""
    if problem := config.problem():
        raise BadArgument(f"config: {problem}")
    if config.rope_interleaved:
        raise BadArgument(
            "config: rope_interleaved=True, but these models turn halves of a head (rope_interleaved=False)"
        )
    biases = "bq" in tensors
    if biases and config.window:
        raise BadArgument(f"config: window={config.window} with biases on q, k, v is no architecture here")
    names = tensor_names(config, tied, biases)
    if not 1 <= shards <= len(names):
        raise BadArgument(f"shards={shards} is outside 1 .. {len(names)}, the number of tensors")
    kept, folder = numpy_dtype(dtype), Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    scaling = config.rope_scaling
    kind = 2 if biases else 1 if config.window else 0
    fields = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": ("llama", "mistral", "qwen2")[kind],  # read by transformers
        "hidden_size": config.dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.seq_len,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        },
        "sliding_window": config.window or None,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "eos_token_id": eos,
    }
    # Last, so that a folder which is written in part is not taken for a model.
    (folder / "config.json").unlink(missing_ok=True)
    listed, per_shard = list(names.items()), -(-len(names) // shards)
    parts = [dict(listed[at : at + per_shard]) for at in range(0, len(listed), per_shard)]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = "model.safetensors" if shards == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        code = {native: code for code, native in FLOATS.items()}[dtype]
        shapes = {name: (code, shape) for name, (_, _, shape) in part.items()}
        write_safetensors(folder / file, _Views(part, tensors, kept), shapes)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2)
        (folder / "model.safetensors.index.json").write_text(text + "\n")
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


# ---- tokenizer.json ----
