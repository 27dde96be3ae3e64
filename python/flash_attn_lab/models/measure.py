"""`python -m flash_attn_lab quality MODEL`: measures what 4-bit weights cost a model."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from flash_attn_minimal._commands.command import Parser, any_seed, check_file, command, integer, one_of, real
from flash_attn_minimal.llama.checkpoint import Checkpoint
from flash_attn_minimal.llama.quantize import tensor_bytes
from flash_attn_minimal.llama.w4 import FORMATS, quantize, stacked_shapes
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint
from flash_attn_minimal.transformer._safetensors import numpy_dtype

from .. import PROGRAM
from .quality import BUDGET, HELD_OUT, Text, choose, find_text, measure
from .quality_report import check_matplotlib, draw, show, write

DESCRIPTION = """\
Measure what 4-bit weights cost a model: the error of every matrix and block, the perplexity on text it has not seen,
and which matrices are to stay 16 bits wide for the perplexity to rise by no more than a budget. Needs no GPU, but
ml_dtypes (pip install ml_dtypes) for bfloat16. The last lines are the commands that write the mixed models."""

EPILOG = """\
The first half of the text measures errors and chooses; the second half gives the perplexities.

examples:
  python -m flash_attn_lab quality                                   (the model in the package, all formats)
  python -m flash_attn_lab quality stories15M.bin --text held_out.txt --report quality.json --picture quality.png

exit status: 0 done, 1 failed, 2 bad input (one line on standard error says what), 130 interrupted."""


def build_parser() -> Parser:
    parser = Parser("quality", PROGRAM, description=DESCRIPTION, epilog=EPILOG)
    add = parser.add_argument
    add(
        "checkpoint",
        metavar="MODEL",
        nargs="?",
        default=str(DEFAULT_CHECKPOINT),
        help="llama2.c checkpoint, or a folder with config.json and *.safetensors (default: the model in the package)",
    )
    add("--tokenizer", metavar="FILE", help="as of generate")
    add("--weights", **one_of((*FORMATS, "all")), default="all", help="the format (default: each of them in turn)")
    add(
        "--budget",
        metavar="P",
        type=real(),
        default=BUDGET,
        help="percent that mixed may raise the perplexity (default 1)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        metavar="FILE",
        help=f"text that the model was not trained on, empty lines between its pieces (default: {HELD_OUT} beside the "
        "model, else text that the model writes at temperature 1)",
    )
    text.add_argument(
        "--tokens",
        metavar="N",
        type=integer(),
        default=16384,
        help="how much of it (default 16384)",
    )
    text.add_argument("--seed", metavar="S", type=any_seed, default=0, help="of text that the model writes (default 0)")
    out = parser.add_argument_group("files")
    out.add_argument("--report", metavar="FILE", help="the numbers, FILE.json; tables beside them, FILE.md")
    out.add_argument("--picture", metavar="FILE", help="FILE.png (needs matplotlib)")
    return parser


def build_report(args: argparse.Namespace, checkpoint: Checkpoint, tokenizer: Any) -> dict[str, Any]:
    """All data that the tables, the JSON and the picture show."""
    formats = list(FORMATS) if args.weights == "all" else [args.weights]
    print("text", file=sys.stderr)
    windows, source = find_text(checkpoint, tokenizer, args.tokens, args.seed, args.text)
    seqlen, half = windows.shape[1] - 1, len(windows) // 2
    first, second = Text(checkpoint, windows[:half]), Text(checkpoint, windows[half:])
    errors, choices = {}, {}
    for weights in formats:
        print(f"{weights}: errors, and what is to stay wide", file=sys.stderr)
        errors[weights] = measure(first, weights)
        choices[weights] = choose(first, errors[weights], args.budget, curve=True)
    print("perplexities", file=sys.stderr)
    changes = {weights: found.change() for weights, found in errors.items()}
    changes |= {f"{weights} mixed": errors[weights].change(choice.kept) for weights, choice in choices.items()}
    stored = checkpoint.dtype if checkpoint.dtype not in ("float16", "bfloat16") else ""
    losses = second.run(changes, stored)

    config = checkpoint.config
    count = config.n_layers * sum(math.prod(shape) for shape in stacked_shapes(config).values())
    rest = tensor_bytes(quantize(checkpoint, formats[0]))["rest"]
    rows = [{"weights": "16 bit", "bits": 16.0, "bytes": 2 * count + rest, **losses[""].row()}]
    if stored:
        vocabulary = config.vocab_size * config.dim * (1 if checkpoint.tied else 2)
        total = 4 * count + rest + 2 * vocabulary  # `rest` counts 16 bits for each number of embedding and classifier
        rows.insert(0, {"weights": f"{stored}, stored", "bits": 32.0, "bytes": total, **losses[stored].row()})
    for weights, choice in choices.items():
        for name, kept in ((weights, frozenset()), (f"{weights} mixed", choice.kept)):
            parts = tensor_bytes(quantize(checkpoint, weights, kept))
            size = {"bits": 8 * (sum(parts.values()) - parts["rest"]) / count, "bytes": sum(parts.values())}
            rows.append({"weights": name, **size, "parts": parts, "kept": len(kept), **losses[name].row()})
    tokens = {"chosen_with": half * seqlen, "judged_with": (len(windows) - half) * seqlen}
    return {
        "model": f"{Path(checkpoint.path).name}: {checkpoint.format}, {config}",
        "text": {"source": source, "window": seqlen, **tokens},
        "budget": args.budget,
        "rows": rows,
        "formats": {
            weights: {
                "matrices": [{**vars(m), "kept": m.place in choices[weights].kept} for m in found.matrices],
                "blocks": found.blocks,
                "curve": choices[weights].curve,
            }
            for weights, found in errors.items()
        },
    }


def keep_line(data: dict[str, Any], weights: str, model: str) -> str:
    """The command that writes the mixed model."""
    kept = [f"{m['layer']}.{m['matrix']}" for m in data["formats"][weights]["matrices"] if m["kept"]]
    words = [] if model == str(DEFAULT_CHECKPOINT) else [model]
    words += ["--weights", weights, *(["--keep", ",".join(kept)] if kept else []), "--out", f"{weights}.safetensors"]
    return shlex.join(["python", "-m", "flash_attn_minimal", "quantize", *words])


def command_of(args: argparse.Namespace) -> str:
    """The command that gives the same numbers, with file names instead of paths."""
    words = [] if args.checkpoint == str(DEFAULT_CHECKPOINT) else [Path(args.checkpoint).name]
    defaults = build_parser().parse_args([])
    for name in ("weights", "budget", "text", "tokens", "seed"):
        value = getattr(args, name)
        if value != getattr(defaults, name):
            words += [f"--{name}", Path(value).name if name == "text" else str(value)]
    return shlex.join([*PROGRAM.split(), "quality", *words])


@command("quality")
def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    numpy_dtype("bfloat16")  # refuses where there is no ml_dtypes
    check_file("--report", args.report)
    check_file("--picture", args.picture)
    if args.picture:
        check_matplotlib(args.picture)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files can hold anything
    checkpoint = load_checkpoint(args.checkpoint)
    tokenizer = find_tokenizer(checkpoint, args.tokenizer)
    data = build_report(args, checkpoint, tokenizer)
    data["command"] = command_of(args)
    written = [*(write(data, Path(args.report)) if args.report else ())]
    if args.picture:
        written.append(draw(data, Path(args.picture)))
    for path in written:
        print(f"wrote {path}", file=sys.stderr)
    show(data)
    print("\nmixed, as chosen:", *(keep_line(data, weights, args.checkpoint) for weights in data["formats"]), sep="\n")
    return 0
