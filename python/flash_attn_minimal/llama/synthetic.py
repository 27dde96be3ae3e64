"""Random checkpoints in the real file formats: for tests, and for timing a model's shape without downloading it.

    python -m flash_attn_minimal.llama.synthetic stories110M model.bin [--version 1] [--untied] [--seed 0] [--tokenizer
    tok32000.bin]

The text such a model writes is noise; its arithmetic, memory and file layout are those of a trained one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from .._library import BadArgument, FlashAttnError
from .tokenizer import save_tokenizer
from .weights import Config, save_checkpoint, tensor_shapes

SHAPES = {
    "stories260K": Config(64, 172, 5, 8, 4, 512, 512),
    "stories15M": Config(288, 768, 6, 6, 6, 32000, 256),
    "stories42M": Config(512, 1376, 8, 8, 8, 32000, 1024),
    "stories110M": Config(768, 2048, 12, 12, 12, 32000, 1024),
}


def write_checkpoint(
    path: str | os.PathLike[str], config: Config, version: int = 0, tied: bool = True, seed: int = 0
) -> None:
    """Writes a checkpoint with normally distributed matrices (variance 1 / in, so activations keep their size) and
    norms near 1.

    The same config and seed give the same tensors in both versions.
    """
    if version not in (0, 1):
        raise BadArgument(f"version={version} is neither 0 nor 1")
    if problem := config.problem():
        raise BadArgument(f"config: {problem}")
    save_checkpoint(path, config, _Tensors(tensor_shapes(config, version, tied), seed), version, tied)


class _Tensors(Mapping):
    """Each made when it is asked for: a large model need not fit into memory at once."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], seed: int):
        self.shapes, self.seed = shapes, seed

    def __getitem__(self, name: str) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *name.encode()])
        shape = self.shapes[name]
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.startswith("rms"):
            values = 1 + values / 8
        elif not name.startswith("freq"):
            values /= np.float32(np.sqrt(shape[-1]))
        return values

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


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


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_minimal.llama.synthetic",
        description="Write a random llama2.c checkpoint of a known shape: right layout and size, meaningless text.",
    )
    parser.add_argument("shape", choices=sorted(SHAPES), help="which model's shape")
    parser.add_argument("output", help="the checkpoint to write")
    parser.add_argument("--version", type=int, choices=(0, 1), default=0, help="file format (default 0)")
    parser.add_argument("--untied", action="store_true", help="give the classifier its own matrix")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default 0)")
    parser.add_argument(
        "--tokenizer", metavar="FILE", help="also write a tokenizer.bin of the same vocabulary size here"
    )
    args = parser.parse_args(argv)
    try:
        write_checkpoint(args.output, SHAPES[args.shape], args.version, not args.untied, args.seed)
        if args.tokenizer:
            write_tokenizer(args.tokenizer, SHAPES[args.shape].vocab_size, args.seed)
    except (FlashAttnError, OSError) as error:
        print(f"synthetic: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
