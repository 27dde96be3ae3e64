"""Random models in the real file formats: for tests, and for timing a model's shape without downloading it.

    python -m flash_attn_lab synthetic stories110M model.bin [--version 1] [--untied] [--tokenizer tok32000.bin]
    python -m flash_attn_lab synthetic 7b FOLDER [--dtype float16] [--shards 3]

The text that such a model writes is noise; its arithmetic, memory and file layout are those of a trained model. The
story shapes become llama2.c checkpoints, the others Hugging Face folders.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from flash_attn_minimal._commands.command import Parser, any_seed, check_file, command, integer, one_of
from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama.checkpoint import LAYERED, matrix_shapes
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.llama2c import save_checkpoint
from flash_attn_minimal.llama.tokenizer import save_tokenizer
from flash_attn_minimal.transformer._safetensors import FLOATS, numpy_dtype

from .. import PROGRAM
from ..command import check_folder
from .huggingface import save_folder

SHAPES = {
    "stories260K": Config(64, 172, 5, 8, 4, 512, 512),
    "stories15M": Config(288, 768, 6, 6, 6, 32000, 256),
    "stories42M": Config(512, 1376, 8, 8, 8, 32000, 1024),
    "stories110M": Config(768, 2048, 12, 12, 12, 32000, 1024),
    "tiny": Config(64, 172, 5, 8, 4, 512, 512, rope_interleaved=False),
    "7b": Config(4096, 11008, 32, 32, 32, 32000, 4096, rope_interleaved=False),
}


class RandomTensors(Mapping):
    """Normally distributed matrices (variance 1 / in, so activations keep their size) and norms near 1, by the names of
    a Checkpoint. Each is made when it is read, so a large model need not fit into memory at once."""

    def __init__(self, config: Config, tied: bool = True, biases: bool = False, seed: int = 0):
        dim, matrices = config.dim, matrix_shapes(config)
        self.seed, self.n_layers = seed, config.n_layers
        self.shapes = {"rms_att": (dim,), "rms_ffn": (dim,), "rms_final": (dim,), **matrices}
        self.shapes["token_embedding"] = (config.vocab_size, dim)
        if not tied:
            self.shapes["wcls"] = (config.vocab_size, dim)
        if biases:
            self.shapes |= {f"b{name}": matrices[f"w{name}"][:1] for name in "qkv"}

    def __getitem__(self, name: str) -> np.ndarray | Sequence[np.ndarray]:
        if name in LAYERED or name in ("bq", "bk", "bv"):
            self.shapes[name]  # raises KeyError for a name that this model does not have
            return _Layers(self, name)
        return self.make(name, 0)

    def make(self, name: str, layer: int) -> np.ndarray:
        shape = self.shapes[name]
        values = np.random.default_rng([self.seed, layer, *name.encode()]).standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            return values / np.float32(np.sqrt(shape[1]))
        return values / 8 + np.float32(name.startswith("rms"))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class _Layers(Sequence):
    def __init__(self, tensors: RandomTensors, name: str):
        self.tensors, self.name = tensors, name

    def __len__(self) -> int:
        return self.tensors.n_layers

    def __getitem__(self, layer: int) -> np.ndarray:
        if not 0 <= layer < len(self):
            raise IndexError(layer)
        return self.tensors.make(self.name, layer)


def write_checkpoint(
    path: str | os.PathLike[str], config: Config, version: int = 0, tied: bool = True, seed: int = 0
) -> None:
    """Writes a llama2.c checkpoint. The same config and seed give the same tensors in both versions."""
    if problem := config.problem():
        raise BadArgument(f"config: {problem}")
    save_checkpoint(path, config, RandomTensors(config, tied, seed=seed), version, tied)


def write_folder(
    path: str | os.PathLike[str],
    config: Config,
    dtype: str = "bfloat16",
    tied: bool = False,
    biases: bool = False,
    shards: int = 1,
    seed: int = 0,
) -> None:
    """Writes a Hugging Face folder without a tokenizer."""
    if problem := config.problem():
        raise BadArgument(f"config: {problem}")
    save_folder(path, config, RandomTensors(config, tied, biases, seed), dtype, tied, shards)


def synthetic_vocabulary(vocab_size: int, seed: int = 0) -> tuple[list[bytes], list[float]]:
    """<unk>, BOS, EOS, the 256 bytes, the printable ASCII characters, then random words with falling scores."""
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n"] + [b"<0x%02X>" % byte for byte in range(256)]
    pieces += [bytes([byte]) for byte in range(0x20, 0x7F)]
    if vocab_size < len(pieces):
        raise BadArgument(f"vocab_size={vocab_size} is below {len(pieces)}, the bytes and the printable characters")
    scores = [0.0] * len(pieces)
    rng = np.random.default_rng(seed)
    letters, seen = b" abcdefghijklmnopqrstuvwxyz", set(pieces)
    parts = [bytes([letter]) for letter in letters]  # words grow from shorter words, so merges can reach them
    while len(pieces) < vocab_size:
        word = parts[rng.integers(len(parts))] + parts[rng.integers(len(letters))]
        if len(word) <= 12 and word not in seen:
            seen.add(word)
            parts.append(word)
            pieces.append(word)
            scores.append(-float(len(pieces)))
    return pieces, scores


def write_tokenizer(path: str | os.PathLike[str], vocab_size: int, seed: int = 0) -> None:
    """Writes a tokenizer.bin of that size."""
    save_tokenizer(path, *synthetic_vocabulary(vocab_size, seed))


def write_tokenizer_json(path: str | os.PathLike[str], vocab_size: int, seed: int = 0) -> None:
    """Writes a tokenizer.json of that size: byte-level byte-pair encoding, <s> in front of every text."""
    special = ["<unk>", "<s>", "</s>"]
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # these bytes stand for themselves
    others = iter(range(0x100, 0x200))
    letters = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    pieces, merges = special + letters, []
    if vocab_size < len(pieces):
        raise BadArgument(f"vocab_size={vocab_size} is below {len(pieces)}, the special tokens and the bytes")
    rng = np.random.default_rng(seed)
    parts = [letters[byte] for byte in b" abcdefghijklmnopqrstuvwxyz"]
    seen = set(pieces)
    while len(pieces) < vocab_size:
        left, right = parts[rng.integers(len(parts))], parts[1 + rng.integers(26)]
        if len(left) < 12 and left + right not in seen:
            seen.add(left + right)
            parts.append(left + right)
            pieces.append(left + right)
            merges.append([left, right])
    token = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}
    token["single"].append({"Sequence": {"id": "A", "type_id": 0}})
    token["pair"] = [*token["single"], {"Sequence": {"id": "B", "type_id": 1}}]
    token["special_tokens"] = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    text = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags, "special": True} for i, name in enumerate(special)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": token,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: token for token, piece in enumerate(pieces)},
            "merges": merges,
        },
    }
    Path(path).write_text(json.dumps(text, ensure_ascii=False), encoding="utf-8")


@command("synthetic")
def main(argv: list[str]) -> int:
    parser = Parser(
        "synthetic",
        PROGRAM,
        description="Write a random model of a known shape: right layout and size, meaningless text. A folder in "
        "bfloat16 needs ml_dtypes.",
        epilog="The story shapes become llama2.c checkpoints, the others Hugging Face folders.",
    )
    add = parser.add_argument
    add("shape", **one_of(SHAPES, "SHAPE"), help=f"which model's: {', '.join(SHAPES)}")
    add("output", help="the checkpoint or folder to write")
    add("--version", **one_of(("0", "1")), help="llama2.c's file format (default 0)")
    add("--untied", action="store_true", help="give the classifier its own matrix (as folders have it)")
    add("--seed", metavar="S", type=any_seed, default=0, help="seed of the random weights (default 0)")
    add("--tokenizer", metavar="FILE", help="also write a tokenizer.bin of the same size here")
    add("--dtype", **one_of(tuple(FLOATS.values())), help="of a folder's matrices (default bfloat16)")
    add("--shards", metavar="N", type=integer(), help="how many safetensors files (default 1)")
    args = parser.parse_args(argv)
    config = SHAPES[args.shape]
    check_file("--tokenizer", args.tokenizer)
    if config.is_llama2c:
        for name in ("dtype", "shards"):
            if getattr(args, name) is not None:
                raise BadArgument(f"--{name} {getattr(args, name)}: {args.shape} becomes a llama2.c checkpoint")
        check_file("output", args.output)
        write_checkpoint(args.output, config, int(args.version or 0), not args.untied, args.seed)
    else:
        if args.version is not None:
            raise BadArgument(f"--version {args.version}: {args.shape} becomes a Hugging Face folder")
        dtype = args.dtype or "bfloat16"
        try:
            numpy_dtype(dtype)
        except BadArgument as error:
            raise BadArgument(f"{error}; or give --dtype float16") from None
        check_folder("output", args.output)
        write_folder(args.output, config, dtype, False, False, args.shards or 1, args.seed)
        write_tokenizer_json(Path(args.output) / "tokenizer.json", config.vocab_size, args.seed)
    if args.tokenizer:
        write_tokenizer(args.tokenizer, config.vocab_size, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
