"""python -m flash_attn_minimal quantize MODEL: writes a model with 4-bit weights."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

from .._commands.command import Parser, check_file, command, one_of
from .._commands.report import size_text
from ..errors import BadArgument
from ..transformer._safetensors import ALL, numpy_dtype
from .checkpoint import STACKED
from .w4 import FORMATS, PLACE, Place, W4Checkpoint, quantize, save, tensor_shapes
from .weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint, tokenizer_file

DESCRIPTION = """\
Write a model with 4-bit weights, which `generate` runs. Needs no GPU, but ml_dtypes (pip install ml_dtypes) for
bfloat16. What 4 bits cost a model, and which of its matrices had better stay 16 bits wide, is measured by the command
`quality` of flash_attn_lab, in a checkout."""

EPILOG = """\
examples:
  python -m flash_attn_minimal quantize --weights int4 --out stories-int4.safetensors        (the model in the package)
  python -m flash_attn_minimal quantize stories15M.bin --weights nvfp4 --keep 0.w2,5.w2 --out mixed.safetensors

exit status: 0 done, 1 failed, 2 bad input (one line on standard error says what), 130 interrupted."""


def places(text: str) -> list[Place]:
    """Matrices by layer and name: 0.w2,3.wo."""
    found = []
    for word in text.split(","):
        layer, _, name = word.partition(".")
        if not re.fullmatch(PLACE, word) or name not in STACKED:
            raise argparse.ArgumentTypeError(f"{word!r} is not a layer and one of {', '.join(STACKED)}, such as 0.w2")
        found.append((int(layer), name))
    return found


def build_parser() -> Parser:
    parser = Parser("quantize", description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="MODEL",
        nargs="?",
        default=str(DEFAULT_CHECKPOINT),
        help="llama2.c checkpoint, or a folder with config.json and *.safetensors (default: the model in the package)",
    )
    add("--tokenizer", metavar="FILE", help="as of generate")
    add("--weights", **one_of(FORMATS), required=True, help="the format")
    add("--keep", type=places, default=[], metavar="LAYER.NAME,...", help="matrices that stay 16 bits wide")
    add("--out", metavar="FILE", required=True, help="the model with 4-bit weights, FILE.safetensors")
    return parser


def tensor_bytes(checkpoint: W4Checkpoint) -> dict[str, int]:
    """Bytes of the file's data by kind: "codes", "scales", "kept" matrices, and the "rest"."""
    found = dict.fromkeys(("codes", "scales", "kept", "rest"), 0)
    for name, (code, shape) in tensor_shapes(checkpoint).items():
        matrix, _, part = name.removeprefix("layers.").partition(".")[2].partition(".")
        kind = "rest" if matrix not in STACKED else "codes" if part == "codes" else "scales" if part else "kept"
        found[kind] += math.prod(shape) * numpy_dtype(ALL[code]).itemsize
    return found


def run(args: argparse.Namespace) -> int:
    if not args.out.endswith(".safetensors"):
        raise BadArgument(f"--out {args.out} does not end in .safetensors, by which it is known")
    numpy_dtype("bfloat16")  # refuses where there is no ml_dtypes
    check_file("--out", args.out)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files can hold anything
    checkpoint = load_checkpoint(args.checkpoint)
    for layer, name in args.keep:
        if layer >= (layers := checkpoint.config.n_layers):
            raise BadArgument(f"--keep {layer}.{name}: the model's layers are 0 to {layers - 1}")
    tokenizer = find_tokenizer(checkpoint, args.tokenizer)
    quantized = quantize(checkpoint, args.weights, args.keep)
    copy = save(args.out, quantized, tokenizer_file(checkpoint, args.tokenizer), tokenizer.stops)
    parts, size = tensor_bytes(quantized), Path(args.out).stat().st_size
    lines = ", ".join(f"{name} {size_text(count)}" for name, count in parts.items() if count)
    print(f"wrote {args.out}: {size_text(size)} ({lines})")
    if copy:
        print(f"wrote {copy}: a copy of the tokenizer, which lay elsewhere")
    return 0


@command("quantize")
def main(argv: list[str]) -> int:
    return run(build_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
