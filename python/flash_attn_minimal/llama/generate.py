"""python -m flash_attn_minimal generate CHECKPOINT: text from a Llama checkpoint, with this library's attention."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from .. import _library
from .._library import BadArgument, FlashAttnError
from .model import ATTENTIONS, KVCache, Llama
from .sampling import Sampler
from .tokenizer import BOS, EOS, Tokenizer, load_tokenizer
from .weights import Checkpoint, load_checkpoint

DTYPES = ("float32", "float16", "bfloat16")
DEVICES = ("cpu", "cuda")

DEFAULT_CHECKPOINT = Path(__file__).with_name("default") / "stories.bin"  # written by examples/train_tiny.py

DESCRIPTION = """\
Load a llama2.c checkpoint (version 0 or 1, float32), continue a prompt, and print the text as it comes.
Standard output carries the text alone; timings and memory follow on standard error."""

EXAMPLES = """\
examples:
  python -m flash_attn_minimal generate                          (a small model of made-up stories, part of the package)
  python -m flash_attn_minimal generate stories15M.bin --prompt "Once upon a time"
  python -m flash_attn_minimal generate stories15M.bin --temperature 0.8 --top-p 0.9 --seed 7
  python -m flash_attn_minimal generate stories15M.bin --attention standard      (the same text, the other way)
  python -m flash_attn_minimal generate stories110M.bin --device cuda --dtype float16

exit status: 0 done, 1 out of memory, 2 bad input (one line on standard error says what), 130 interrupted."""


@dataclass
class Timing:
    """What `generate` measures. The first new token comes out of the prefill, every further one costs a decode step."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    stopped: str = ""  # why it ended before `steps` tokens; empty when it did not


def generate(
    model: Llama, prompt: list[int], steps: int, sampler: Sampler, cache: KVCache, timing: Timing | None = None
) -> Iterator[int]:
    """Yields up to `steps` new token ids behind the prompt, each as soon as it is drawn.

    The prompt is run in one pass, then one token per pass. It ends early where the model ends the text (BOS or EOS, not
    yielded) and where the context ends: a model of context n runs n tokens, so a prompt of p tokens is followed by at
    most n - p + 1.
    """
    context = cache.seqlen
    if not prompt:
        raise BadArgument("prompt has no tokens: it starts with BOS")
    if len(prompt) > context:
        raise BadArgument(f"prompt has {len(prompt)} tokens, more than the context of {context}")
    if steps < 0:
        raise BadArgument(f"steps={steps} is negative")
    timing = Timing() if timing is None else timing
    tokens = prompt
    for step in range(steps):
        if cache.length + len(tokens) > context:
            timing.stopped = f"the context of {context} tokens is full"
            return
        started = time.perf_counter()
        token = sampler(model.forward([tokens], cache)[0])
        elapsed = time.perf_counter() - started
        if step == 0:
            timing.prompt_tokens, timing.prefill_seconds = len(prompt), elapsed
        else:
            timing.decode_steps += 1
            timing.decode_seconds += elapsed
        if token in (BOS, EOS):
            timing.stopped = "the model ended the text"
            return
        timing.new_tokens += 1
        yield token
        tokens = [token]


def array_module(device: str) -> Any:
    """NumPy for "cpu", CuPy for "cuda", which is imported only when it is asked for."""
    if device == "cpu":
        return np
    if device != "cuda":
        raise BadArgument(f"device={device!r} is none of {', '.join(DEVICES)}")
    try:
        import cupy
    except ImportError as error:
        raise BadArgument(f"device='cuda' needs CuPy (pip install cupy-cuda13x, or cupy-cuda12x): {error}") from None
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BadArgument(f"device='cuda': {error}") from None
    return cupy


def cache_dtype(name: str, xp: Any = np) -> np.dtype:
    """The dtype of q, k, v and the KV cache by name; bfloat16 comes from the ml_dtypes package."""
    if name not in DTYPES:
        raise BadArgument(f"dtype={name!r} is none of {', '.join(DTYPES)}")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise BadArgument(f"dtype='bfloat16' needs the ml_dtypes package (pip install ml_dtypes): {error}") from None
    dtype = np.dtype(ml_dtypes.bfloat16)
    try:
        xp.empty(1, dtype)
    except (TypeError, ValueError, NotImplementedError) as error:  # CuPy before 14
        raise BadArgument(f"dtype='bfloat16' is not served by this {xp.__name__} {xp.__version__}: {error}") from None
    return dtype


def find_tokenizer(checkpoint: Checkpoint, path: str | None = None) -> Tokenizer:
    """The tokenizer in `path`, or the one beside the checkpoint; its size must be the model's vocabulary."""
    vocab_size = checkpoint.config.vocab_size
    if path is None:
        names = [f"tok{vocab_size}.bin", f"tok{vocab_size}.model", "tokenizer.bin", "tokenizer.model"]
        found = [file for name in names if (file := Path(checkpoint.path).parent / name).is_file()]
        if not found:
            raise BadArgument(
                f"tokenizer: none of {', '.join(names)} is beside the checkpoint; give its path with --tokenizer"
            )
        path = str(found[0])
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size != vocab_size:
        raise BadArgument(
            f"tokenizer {path!r} has {tokenizer.vocab_size} tokens, but the checkpoint's vocab_size is {vocab_size}"
        )
    return tokenizer


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, like every other error here, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m flash_attn_minimal generate",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        nargs="?",
        default=str(DEFAULT_CHECKPOINT),
        help="llama2.c checkpoint, such as stories15M.bin (default: the small model in the package)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="tokenizer.bin or sentencepiece tokenizer.model "
        "(default: tok<vocabulary size>.* or tokenizer.* beside the checkpoint)",
    )
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", metavar="TEXT", default="", help="text to continue (default: none)")
    text.add_argument("--steps", metavar="N", type=int, default=256, help="most new tokens to write (default 256)")
    text.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.0,
        help="0 = always the likeliest token (default), 1 = as the model was trained",
    )
    text.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=0.9,
        help="draw among the likeliest tokens that hold this probability (default 0.9)",
    )
    text.add_argument(
        "--seed", metavar="S", type=int, help="makes a sampled text repeatable (default: a fresh one, shown at the end)"
    )
    how = parser.add_argument_group("how it is computed")
    how.add_argument(
        "--attention",
        choices=sorted(ATTENTIONS),
        default="flash",
        help="flash = this library (default), standard = softmax of the whole score matrix",
    )
    how.add_argument("--device", choices=DEVICES, default="cpu", help="cpu = NumPy (default), cuda = CuPy")
    how.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of q, k, v and the KV cache; float16 on cuda is that of the matrices too (default float32)",
    )
    return parser


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def report(
    args: argparse.Namespace, model: Llama, checkpoint: Checkpoint, cache: KVCache, timing: Timing, seed: int
) -> str:
    """The lines behind the text."""
    t = timing
    rate = t.decode_steps / t.decode_seconds if t.decode_seconds else 0.0
    sampling = f"temperature {args.temperature:g}, top-p {args.top_p:g}, seed {seed}" if args.temperature else "greedy"
    lines = [
        f"model    {Path(checkpoint.path).name}: llama2.c v{checkpoint.version}, {checkpoint.config}",
        f"run      {args.attention} attention, {args.dtype}, {args.device}, {sampling}",
        f"prefill  {t.prompt_tokens} tokens in {t.prefill_seconds * 1e3:.2f} ms",
        f"decode   {t.decode_steps} steps in {t.decode_seconds:.3f} s, {rate:.1f} steps/s",
        f"memory   weights {_size(model.weight_bytes)}, KV cache {_size(cache.nbytes)} ({cache.seqlen} positions)",
    ]
    if t.stopped:
        lines.append(f"stopped  after {t.new_tokens} of {args.steps} new tokens: {t.stopped}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    seed = random.SystemRandom().getrandbits(32) if args.seed is None else args.seed
    sampler = Sampler(args.temperature, args.top_p, seed)
    if args.steps < 0:
        raise BadArgument(f"steps={args.steps} is negative")
    xp = array_module(args.device)
    dtype = cache_dtype(args.dtype, xp)
    if args.attention == "flash":
        _library.load()  # a missing library is reported before any text
    checkpoint = load_checkpoint(args.checkpoint)
    tokenizer = find_tokenizer(checkpoint, args.tokenizer)
    prompt = tokenizer.encode(args.prompt)
    if len(prompt) > checkpoint.config.seq_len:
        raise BadArgument(
            f"prompt has {len(prompt)} tokens, more than the model's context of {checkpoint.config.seq_len}"
        )
    model = Llama(checkpoint, xp, args.attention, dtype)
    cache = model.new_cache(seqlen=min(checkpoint.config.seq_len, len(prompt) + args.steps))
    timing = Timing()

    def tokens() -> Iterator[int]:
        yield from prompt
        yield from generate(model, prompt, args.steps, sampler, cache, timing)

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a "?", not a traceback
    interrupted = False
    try:
        for text in tokenizer.stream(tokens()):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        interrupted = True
    print(flush=True)
    print(report(args, model, checkpoint, cache, timing, seed), file=sys.stderr)
    return 130 if interrupted else 0


def main(argv: list[str] | None = None) -> int:
    """The command. Returns the exit status; never raises for bad input."""
    try:
        return run(build_parser().parse_args(argv))
    except FlashAttnError as error:
        print(f"generate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except MemoryError as error:  # NumPy's and CuPy's say how much they were asked for
        print(f"generate: out of memory: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader has seen enough, as in `generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:  # before the text began
        return 130
    except SystemExit as done:  # --help
        return int(done.code or 0)


if __name__ == "__main__":
    sys.exit(main())
