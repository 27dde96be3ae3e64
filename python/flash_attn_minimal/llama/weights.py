"""Loads a model by the path of its files: the checkpoint, and the tokenizer beside it."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import BadArgument
from .checkpoint import Checkpoint
from .huggingface import JsonTokenizer, load_folder, stop_ids
from .llama2c import load_llama2c
from .tokenizer import Tokenizer, load_tokenizer
from .w4 import W4Checkpoint, load

DEFAULT_CHECKPOINT = Path(__file__).with_name("default") / "stories.bin"  # written by examples/train_tiny.py


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Maps a llama2.c checkpoint, a Hugging Face model's folder, or a file with 4-bit weights that `quantize` wrote.
    Raises BadArgument for any other or damaged file."""
    if os.path.isdir(path):
        return load_folder(path)
    return load(path) if os.fspath(path).endswith(".safetensors") else load_llama2c(path)


def tokenizer_file(checkpoint: Checkpoint, path: str | None = None) -> str:
    """`path`, or else the path of the tokenizer beside this checkpoint."""
    if path is not None:
        return path
    if isinstance(checkpoint, W4Checkpoint):
        return str(checkpoint.tokenizer_file())
    vocab_size, place = checkpoint.config.vocab_size, Path(checkpoint.path)
    folder = place if place.is_dir() else place.parent
    names = ["tokenizer.json"] if place.is_dir() else [f"tok{vocab_size}.bin", f"tok{vocab_size}.model"]
    names += ["tokenizer.model"] if place.is_dir() else ["tokenizer.bin", "tokenizer.model"]
    found = [file for name in names if (file := folder / name).is_file()]
    if not found:
        where = "in the folder" if place.is_dir() else "beside the checkpoint"
        raise BadArgument(f"tokenizer: none of {', '.join(names)} is {where}; give its path with --tokenizer")
    return str(found[0])


def find_tokenizer(checkpoint: Checkpoint, path: str | None = None) -> Tokenizer | JsonTokenizer:
    """The tokenizer in `path`, or else the one beside the checkpoint; its size must fit the model's vocabulary."""
    vocab_size, place = checkpoint.config.vocab_size, Path(checkpoint.path)
    path = tokenizer_file(checkpoint, path)
    if path.endswith(".json"):
        stops = checkpoint.stops if isinstance(checkpoint, W4Checkpoint) else frozenset()
        tokenizer = JsonTokenizer(path, stop_ids(place) if place.is_dir() else stops)
        fits = tokenizer.vocab_size <= vocab_size  # many of these models have padded matrices
    else:
        tokenizer = load_tokenizer(path)
        fits = tokenizer.vocab_size == vocab_size
    if not fits:
        raise BadArgument(
            f"tokenizer {path!r} has {tokenizer.vocab_size} tokens, but the checkpoint's vocab_size is {vocab_size}"
        )
    return tokenizer
