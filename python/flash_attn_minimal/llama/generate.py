"""python -m flash_attn_minimal generate CHECKPOINT: writes text with a Llama model and this library's attention."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._commands.command import Parser, any_seed, command, drop_output, integer, one_of, real
from .._commands.report import plural
from .._core import library
from ..errors import BadArgument
from .attend import ATTENTIONS, DTYPES
from .checkpoint import Checkpoint
from .compare import PIECE, Comparison, in_turns
from .engine import Engine, Request
from .host import Host
from .model import Llama
from .quality import choose_kept
from .sampling import Sampling
from .w4 import FORMATS, W4Checkpoint, quantize
from .weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

LARGEST_FLOAT = 3e38  # of float32
DEVICES = ("auto", "cpu", "cuda")
BOTH = "both"  # flash and standard attention, in turns
CACHED = 1 << 26  # bytes: a step that reads fewer reads them from a cache, and is not limited by reading

DESCRIPTION = """\
Load a llama2.c checkpoint or a Hugging Face model's folder, continue a prompt, and print the text as it comes.
Standard output carries the text alone; timings and memory follow on standard error."""

EXAMPLES = """\
examples:
  python -m flash_attn_minimal generate                          (a small model of made-up stories, part of the package)
  python -m flash_attn_minimal generate stories15M.bin --prompt "Once upon a time"
  python -m flash_attn_minimal generate stories15M.bin --temperature 0.8 --top-p 0.9 --seed 7
  python -m flash_attn_minimal generate stories15M.bin --attention both          (which attention is how fast)
  python -m flash_attn_minimal generate stories110M.bin --device cuda --dtype float16
  python -m flash_attn_minimal generate Llama-3.2-1B/ --prompt "The capital of France is" --prompt "1, 2, 3,"

exit status: 0 done, 1 failed, 2 bad input (one line on standard error says what), 130 interrupted."""


def open_device(
    name: str,
    attention: str = "flash",
    dtype: str = "auto",
    stored: str = "float32",
    cache_dtype: str = "auto",
    weights: str = "auto",
) -> Any:
    """Opens the engine's device. name: "auto" is a GPU where CuPy and the library find one. dtype: "auto" is float32 on
    the host, and on a GPU the type that the checkpoint stores. cache_dtype: "auto" is dtype, but on a GPU the matrices'
    type where dtype is float32.

    weights: with "bf16" or a 4-bit format, matrices that are not in 4 bits have a 16-bit type, and products with 4-bit
    matrices are computed in it. It is bfloat16, or float16 with a 4-bit format if dtype or `stored` is float16."""
    if name not in DEVICES:
        raise BadArgument(f"device={name!r} is none of {', '.join(DEVICES)}")
    narrow = "float16" if weights not in ("auto", "bf16") and "float16" in (dtype, stored) else "bfloat16"
    if name != "cpu":
        from .cuda import Cuda, reason_against

        why_not = reason_against()
        if not why_not:
            dtype = dtype if dtype != "auto" else stored if stored in DTYPES else "float32"
            matrices = dtype if weights == "auto" else narrow
            cache = matrices if dtype == "float32" else dtype
            return Cuda(attention, matrices, cache if cache_dtype == "auto" else cache_dtype)
        if name == "cuda":
            raise BadArgument(f"device='cuda' {why_not}")
    dtype = dtype if cache_dtype == "auto" else cache_dtype
    return Host(attention, "float32" if dtype == "auto" else dtype, "float32" if weights == "auto" else narrow)


def with_weights(checkpoint: Checkpoint, weights: str, mixed: bool, device: Any) -> Checkpoint:
    """The checkpoint as `--weights` and `--mixed` request it: quantised now. A checkpoint that is quantised already is
    refused if its weights differ from the request."""
    if isinstance(checkpoint, W4Checkpoint):
        if weights not in ("auto", checkpoint.weights):
            raise BadArgument(f"weights={weights!r}, but checkpoint {checkpoint.path!r} holds {checkpoint.weights}")
        if mixed and not checkpoint.kept:
            raise BadArgument(f"--mixed, but checkpoint {checkpoint.path!r} keeps no matrix in 16 bits")
        return checkpoint
    if weights in ("auto", "bf16"):
        if mixed:
            raise BadArgument(f"--mixed needs --weights {', '.join(FORMATS)}")
        return checkpoint
    kept = []
    if mixed:
        kept = choose_kept(checkpoint, weights)
    return quantize(checkpoint, weights, kept, device)


def stream(engine: Engine, request: Request) -> Iterator[int]:
    """The prompt's tokens, then each new token as soon as it has come. Raises the error that the request ended with."""
    yield from request.prompt
    sent = 0
    while True:
        while sent < len(request.tokens):
            yield request.tokens[sent]
            sent += 1
        if request.error is not None:
            raise request.error
        if request.finished:
            return
        engine.step()


def build_parser() -> Parser:
    parser = Parser("generate", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        default=str(DEFAULT_CHECKPOINT),
        help="llama2.c checkpoint, such as stories15M.bin, or a folder with config.json and *.safetensors "
        "(default: the small model in the package)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.bin, sentencepiece tokenizer.model or tokenizer.json "
        "(default: tok<vocabulary size>.* or tokenizer.* beside the checkpoint)",
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--prompt", metavar="TEXT", action="append", help="text to continue (default: none); may be given several times"
    )
    text.add_argument(
        "--steps", metavar="N", type=integer(0), default=256, help="most new tokens to write (default 256)"
    )
    text.add_argument(
        "--temperature",
        metavar="T",
        type=real(most=LARGEST_FLOAT),
        default=0.0,
        help="0 = always the likeliest token (default), 1 = as the model was trained",
    )
    text.add_argument(
        "--top-k", metavar="K", type=integer(0), default=0, help="draw among the K likeliest tokens (default 0 = all)"
    )
    text.add_argument(
        "--top-p",
        metavar="P",
        type=real(most=1.0, above=True),
        default=0.9,
        help="draw among the likeliest tokens that hold this probability (default 0.9)",
    )
    text.add_argument(
        "--seed",
        metavar="S",
        type=any_seed,
        help="makes a sampled text repeatable (default: a fresh one, shown at the end)",
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument(
        "--attention",
        **one_of((*ATTENTIONS, BOTH)),
        default="flash",
        help="flash = this library (default), standard = softmax of the whole score matrix, both = the same text with "
        "each of them in turns, for some seconds, to compare their speed",
    )
    how.add_argument(
        "--device",
        **one_of(DEVICES),
        default="auto",
        help="cpu = NumPy, cuda = CuPy, auto = a GPU if there is one (default)",
    )
    how.add_argument(
        "--dtype",
        **one_of(("auto", *DTYPES)),
        default="auto",
        help="of q, k, v and the KV cache, on cuda of the matrices too "
        "(default: float32 on cpu, the file's own on cuda)",
    )
    how.add_argument(
        "--cache-dtype",
        **one_of(("auto", *DTYPES)),
        default="auto",
        help="of q, k, v and the KV cache (default: --dtype)",
    )
    how.add_argument(
        "--weights",
        **one_of(("auto", "bf16", *FORMATS)),
        default="auto",
        help="of the blocks' matrices, quantised as they are loaded; embedding and classifier then have 16 bits "
        "(default: --dtype on cuda, float32 on cpu, 4 bits if the file has them)",
    )
    how.add_argument(
        "--mixed", action="store_true", help="the matrices that 4 bits harm most keep 16: see `quantize` (measured now)"
    )
    how.add_argument(
        "--batch",
        metavar="N",
        type=integer(),
        help="texts that are written at once, from the prompts in turn (default: one each)",
    )
    how.add_argument(
        "--page-size",
        metavar="N",
        type=integer(),
        help="a paged KV cache with pages of N positions (default: contiguous)",
    )
    return parser


def _size(count: float) -> str:
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= bytes_:
            return f"{count / bytes_:.1f} {unit}"
    return f"{count / 2**10:.1f} KiB"


def report(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    engine: Engine,
    requests: list[Request],
    seed: int,
    comparison: Comparison | None = None,
) -> str:
    """The lines that are printed after the text."""
    model, device, cache, t = engine.model, engine.device, engine.cache, engine.timing
    steps_per_second = t.decode_steps / t.decode_seconds if t.decode_seconds else 0.0
    sampling = "greedy"
    if args.temperature:
        top_k = f"top-k {args.top_k}, " if args.top_k else ""
        sampling = f"temperature {args.temperature:g}, {top_k}top-p {args.top_p:g}, seed {seed}"
    dtype = device.matrix_dtype.name
    packed = ""
    if model.packed:
        size, count = sum(w.bytes for w in model.packed), sum(w.shape[0] * w.shape[1] for w in model.packed)
        dtype = f"{model.packed[0].format} in {dtype}"
        packed = f" (4-bit {_size(size)}, {8 * size / count:.2f} bits a weight)"
    dtype += "" if device.dtype == device.matrix_dtype else f" with q, k, v in {device.dtype.name}"
    batch = f", {engine.max_batch} at once" if engine.max_batch > 1 else ""
    several = f", {t.decode_tokens / t.decode_seconds:.1f} tokens/s" if batch and t.decode_seconds else ""
    attention = args.attention if comparison is None else " and ".join(ATTENTIONS)
    lines = [
        f"model    {Path(checkpoint.path).name}: {checkpoint.format}, {checkpoint.config}",
        f"run      {attention} attention, {dtype}, {device.name}, {sampling}{batch}",
    ]
    if comparison:
        lines += [f"{name:8} {speed:.1f} steps/s" for name, speed in comparison.steps_per_second.items()]
        how = f"medians of {comparison.pieces} pieces of {PIECE} steps each, in turns; the texts are the same"
        lines.append(f"ratio    flash is {comparison.ratio:.2f} times as fast ({how})")
    else:
        lines += [
            f"prefill  {plural(t.prompt_tokens, 'token')} in {t.prefill_seconds * 1e3:.2f} ms",
            f"decode   {plural(t.decode_steps, 'step')} in {t.decode_seconds:.3f} s, "
            f"{steps_per_second:.1f} steps/s{several}",
        ]
    size = f"weights {_size(model.weight_bytes)}{packed}, KV cache {_size(cache.nbytes)} ({cache.describe()})"
    lines.append(f"memory   {size}")
    if t.decode_steps and not comparison:
        read = model.step_bytes + t.positions_read * cache.position_bytes / t.decode_steps
        if read > CACHED:
            # A step is a read too: if it is faster than the measured read of as many bytes, its rate is the limit.
            bandwidth = max(device.read_bandwidth(round(read)), steps_per_second * read)
            lines.append(
                f"limit    {_size(read)} read per step at {bandwidth / 1e9:.1f} GB/s (the fastest read of as much "
                f"here) allow {bandwidth / read:.1f} steps/s: {100 * steps_per_second * read / bandwidth:.1f} % reached"
            )
    why = {"stop": "the model ended the text", "context": f"the context of {plural(engine.context, 'token')} is full"}
    for number, request in enumerate(requests, 1):
        if request.finished in why:
            which = f"text {number} " if len(requests) > 1 else ""
            reason = why[request.finished]
            lines.append(f"stopped  {which}after {len(request.tokens)} of {args.steps} new tokens: {reason}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    Sampling(args.temperature, args.top_k, args.top_p, seed)  # reports wrong values before anything is loaded
    checkpoint = load_checkpoint(args.checkpoint)
    weights = checkpoint.weights if isinstance(checkpoint, W4Checkpoint) else args.weights
    attentions = ATTENTIONS if args.attention == BOTH else (args.attention,)
    devices = [
        open_device(args.device, attention, args.dtype, checkpoint.dtype, args.cache_dtype, weights)
        for attention in attentions
    ]
    if "flash" in attentions:
        library.load()  # a missing library is reported before any text
    tokenizer = find_tokenizer(checkpoint, args.tokenizer)
    given = args.prompt or [""]
    prompts = [tokenizer.encode(text) for text in given]
    prompts = [prompts[i % len(prompts)] for i in range(args.batch or len(prompts))]
    context = checkpoint.config.seq_len
    for text, prompt in zip(given, prompts, strict=False):
        if not prompt:
            raise BadArgument(f"prompt {text!r} has no tokens, and this model's tokenizer puts none in front")
        if len(prompt) > context:
            raise BadArgument(f"prompt has {len(prompt)} tokens, more than the model's context of {context}")
    checkpoint = with_weights(checkpoint, args.weights, args.mixed, devices[0])
    model = Llama(checkpoint, devices[0])
    context = min(context, max(map(len, prompts)) + args.steps)
    engines = [Engine(model.on(device), len(prompts), context, args.page_size) for device in devices]
    engine, requests, comparison, jobs = engines[0], [], None, []
    for number, prompt in enumerate(prompts):
        sampling = Sampling(args.temperature, args.top_k, args.top_p, seed + number)
        jobs.append((prompt, args.steps, sampling, tokenizer.stops))

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a "?", not a traceback
    interrupted = False
    try:
        if args.attention == BOTH:
            comparison = in_turns(dict(zip(attentions, engines, strict=True)), jobs)
            requests = comparison.requests
        else:
            requests = [engine.add(*job) for job in jobs]
        for number, request in enumerate(requests):
            if number:
                print("\n")  # an empty line between two texts
            for text in tokenizer.stream(stream(engine, request)):
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    print(flush=True)
    if comparison or args.attention != BOTH:
        print(report(args, checkpoint, engine, requests, seed, comparison), file=sys.stderr)
    return 130 if interrupted else 0


@command("generate")
def main(argv: list[str]) -> int:
    try:
        return run(build_parser().parse_args(argv))
    except BrokenPipeError:  # the reader of the output, as in `generate ... | head`, has closed it
        drop_output()
        return 0


if __name__ == "__main__":
    sys.exit(main())
