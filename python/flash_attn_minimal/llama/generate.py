"""python -m flash_attn_minimal generate CHECKPOINT: writes text with a Llama model and this library's attention."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._commands.command import Parser, any_seed, command, drop_output, integer, one_of, real
from .._commands.report import plural, size_text
from .._core import library
from ..errors import BadArgument
from .checkpoint import Checkpoint
from .engine import Engine, Request
from .host import DTYPES, Host
from .model import Llama
from .sampling import Sampling
from .w4 import FORMATS, W4Checkpoint, quantize
from .weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

LARGEST_FLOAT = 3e38  # of float32
DEVICES = ("auto", "cpu", "cuda")

DESCRIPTION = """\
Load a llama2.c checkpoint or a Hugging Face model's folder, continue a prompt, and print the text as it comes.
Standard output carries the text alone; timings and memory follow on standard error."""

EXAMPLES = """\
examples:
  python -m flash_attn_minimal generate                          (a small model of made-up stories, part of the package)
  python -m flash_attn_minimal generate stories15M.bin --prompt "Once upon a time"
  python -m flash_attn_minimal generate stories15M.bin --temperature 0.8 --top-p 0.9 --seed 7
  python -m flash_attn_minimal generate stories110M.bin --device cuda --dtype float16
  python -m flash_attn_minimal generate Llama-3.2-1B/ --prompt "The capital of France is" --prompt "1, 2, 3,"

exit status: 0 done, 1 failed, 2 bad input (one line on standard error says what), 130 interrupted."""


def device_types(
    name: str, dtype: str = "auto", stored: str = "float32", cache_dtype: str = "auto", weights: str = "auto"
) -> tuple[str, tuple[str, str]]:
    """("cpu" or "cuda", the arguments of its class) for open_device."""
    if name not in DEVICES:
        raise BadArgument(f"device={name!r} is none of {', '.join(DEVICES)}")
    narrow = "float16" if weights not in ("auto", "bf16") and "float16" in (dtype, stored) else "bfloat16"
    if name != "cpu":
        from .cuda import reason_against

        why_not = reason_against()
        if not why_not:
            dtype = dtype if dtype != "auto" else stored if stored in DTYPES else "float32"
            matrices = dtype if weights == "auto" else narrow
            cache = matrices if dtype == "float32" else dtype
            return "cuda", (matrices, cache if cache_dtype == "auto" else cache_dtype)
        if name == "cuda":
            raise BadArgument(f"device='cuda' {why_not}")
    dtype = dtype if cache_dtype == "auto" else cache_dtype
    return "cpu", ("float32" if dtype == "auto" else dtype, "float32" if weights == "auto" else narrow)


def open_device(name: str, *types: str, **named: str) -> Any:
    """Opens the engine's device: open_device(name, dtype, stored, cache_dtype, weights), each "auto" by default.

    name: "auto" is a GPU where CuPy and the library find one. dtype: "auto" is float32 on the host, and on a GPU the
    type that the checkpoint stores, which is `stored` ("float32" by default). cache_dtype: "auto" is dtype, but on a
    GPU the matrices' type where dtype is float32.

    weights: with "bf16" or a 4-bit format, matrices that are not in 4 bits have a 16-bit type, and products with 4-bit
    matrices are computed in it. It is bfloat16, or float16 with a 4-bit format if dtype or `stored` is float16."""
    kind, arguments = device_types(name, *types, **named)
    if kind == "cpu":
        return Host(*arguments)
    from .cuda import Cuda

    return Cuda(*arguments)


def with_weights(checkpoint: Checkpoint, weights: str, device: Any) -> Checkpoint:
    """The checkpoint as `--weights` requests it: quantised now. A checkpoint that is quantised already is refused if
    its weights differ from the request."""
    if isinstance(checkpoint, W4Checkpoint):
        if weights not in ("auto", checkpoint.weights):
            raise BadArgument(f"weights={weights!r}, but checkpoint {checkpoint.path!r} holds {checkpoint.weights}")
        return checkpoint
    return checkpoint if weights in ("auto", "bf16") else quantize(checkpoint, weights, device=device)


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


def add_options(parser: Parser) -> None:
    """The options of `generate`."""
    add = parser.add_argument
    help_text = "llama2.c checkpoint, such as stories15M.bin, or a folder with config.json and *.safetensors "
    help_text += "(default: the small model in the package)"
    add("checkpoint", metavar="CHECKPOINT", nargs="?", default=str(DEFAULT_CHECKPOINT), help=help_text)
    help_text = "tokenizer.bin, sentencepiece tokenizer.model or tokenizer.json "
    help_text += "(default: tok<vocabulary size>.* or tokenizer.* beside the checkpoint)"
    add("--tokenizer", metavar="FILE", help=help_text)

    add = parser.add_argument_group("text").add_argument
    add(
        "--prompt", metavar="TEXT", action="append", help="text to continue (default: none); may be given several times"
    )
    add("--steps", metavar="N", type=integer(0), default=256, help="most new tokens to write (default 256)")
    help_text = "0 = always the likeliest token (default), 1 = as the model was trained"
    add("--temperature", metavar="T", type=real(most=LARGEST_FLOAT), default=0.0, help=help_text)
    add("--top-k", metavar="K", type=integer(0), default=0, help="draw among the K likeliest tokens (default 0 = all)")
    help_text = "draw among the likeliest tokens that hold this probability (default 0.9)"
    add("--top-p", metavar="P", type=real(most=1.0, above=True), default=0.9, help=help_text)
    help_text = "makes a sampled text repeatable (default: a fresh one, shown at the end)"
    add("--seed", metavar="S", type=any_seed, help=help_text)

    add = parser.add_argument_group("how it is computed").add_argument
    help_text = "cpu = NumPy, cuda = CuPy, auto = a GPU if there is one (default)"
    add("--device", **one_of(DEVICES), default="auto", help=help_text)
    help_text = (
        "of q, k, v and the KV cache, on cuda of the matrices too (default: float32 on cpu, the file's own on cuda)"
    )
    add("--dtype", **one_of(("auto", *DTYPES)), default="auto", help=help_text)
    help_text = "of q, k, v and the KV cache (default: --dtype)"
    add("--cache-dtype", **one_of(("auto", *DTYPES)), default="auto", help=help_text)
    help_text = "of the blocks' matrices, quantised as they are loaded; embedding and classifier then have 16 bits "
    help_text += "(default: --dtype on cuda, float32 on cpu, 4 bits if the file has them)"
    add("--weights", **one_of(("auto", "bf16", *FORMATS)), default="auto", help=help_text)
    help_text = "texts that are written at once, from the prompts in turn (default: one each)"
    add("--batch", metavar="N", type=integer(), help=help_text)
    help_text = "a paged KV cache with pages of N positions (default: contiguous)"
    add("--page-size", metavar="N", type=integer(), help=help_text)


def report(args: argparse.Namespace, checkpoint: Checkpoint, engine: Engine, requests: list[Request], seed: int) -> str:
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
        packed = f" (4-bit {size_text(size, 1)}, {8 * size / count:.2f} bits a weight)"
    dtype += "" if device.dtype == device.matrix_dtype else f" with q, k, v in {device.dtype.name}"
    batch = f", {engine.max_batch} at once" if engine.max_batch > 1 else ""
    several = f", {t.decode_tokens / t.decode_seconds:.1f} tokens/s" if batch and t.decode_seconds else ""
    lines = [
        f"model    {Path(checkpoint.path).name}: {checkpoint.format}, {checkpoint.config}",
        f"run      {dtype}, {device.name}, {sampling}{batch}",
        f"prefill  {plural(t.prompt_tokens, 'token')} in {t.prefill_seconds * 1e3:.2f} ms",
        f"decode   {plural(t.decode_steps, 'step')} in {t.decode_seconds:.3f} s, "
        f"{steps_per_second:.1f} steps/s{several}",
    ]
    size = f"KV cache {size_text(cache.nbytes, 1)} ({cache.describe()})"
    lines.append(f"memory   weights {size_text(model.weight_bytes, 1)}{packed}, {size}")
    why = {"stop": "the model ended the text", "context": f"the context of {plural(engine.context, 'token')} is full"}
    for number, request in enumerate(requests, 1):
        if request.finished in why:
            which = f"text {number} " if len(requests) > 1 else ""
            reason = why[request.finished]
            lines.append(f"stopped  {which}after {len(request.tokens)} of {args.steps} new tokens: {reason}")
    return "\n".join(lines)


def loaded(
    args: argparse.Namespace, seed: int, device: Any = open_device
) -> tuple[Checkpoint, Llama, Any, list[tuple]]:
    """(checkpoint, model, tokenizer, jobs) for the options. A job is the arguments of Engine.add for one text; `device`
    opens the device."""
    Sampling(args.temperature, args.top_k, args.top_p, seed)  # reports wrong values before anything is loaded
    checkpoint = load_checkpoint(args.checkpoint)
    weights = checkpoint.weights if isinstance(checkpoint, W4Checkpoint) else args.weights
    opened = device(args.device, args.dtype, checkpoint.dtype, args.cache_dtype, weights)
    library.load()  # a missing library is reported before any text
    tokenizer = find_tokenizer(checkpoint, args.tokenizer)
    given = args.prompt or [""]
    prompts = [tokenizer.encode(text) for text in given]
    context = checkpoint.config.seq_len
    for text, prompt in zip(given, prompts, strict=True):
        if not prompt:
            raise BadArgument(f"prompt {text!r} has no tokens, and this model's tokenizer puts none in front")
        if len(prompt) > context:
            raise BadArgument(f"prompt has {len(prompt)} tokens, more than the model's context of {context}")
    model = Llama(with_weights(checkpoint, args.weights, opened), opened)
    jobs = []
    for number in range(args.batch or len(prompts)):
        sampling = Sampling(args.temperature, args.top_k, args.top_p, seed + number)
        jobs.append((prompts[number % len(prompts)], args.steps, sampling, tokenizer.stops))
    return checkpoint, model, tokenizer, jobs


def context_of(model: Llama, jobs: list[tuple]) -> int:
    """The positions of the cache that the longest text needs."""
    return min(model.config.seq_len, max(len(prompt) + steps for prompt, steps, *_ in jobs))


def run(args: argparse.Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    checkpoint, model, tokenizer, jobs = loaded(args, seed)
    engine = Engine(model, len(jobs), context_of(model, jobs), args.page_size)
    requests: list[Request] = []
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a "?", not a traceback
    interrupted = False
    try:
        requests = [engine.add(*job) for job in jobs]
        for number, request in enumerate(requests):
            if number:
                print("\n")  # an empty line between two texts
            for text in tokenizer.stream(stream(engine, request)):
                print(text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    print(flush=True)
    print(report(args, checkpoint, engine, requests, seed), file=sys.stderr)
    return 130 if interrupted else 0


@command("generate")
def main(argv: list[str]) -> int:
    try:
        parser = Parser("generate", description=DESCRIPTION, epilog=EXAMPLES)
        add_options(parser)
        return run(parser.parse_args(argv))
    except BrokenPipeError:  # the reader of the output, as in `generate ... | head`, has closed it
        drop_output()
        return 0


if __name__ == "__main__":
    sys.exit(main())
