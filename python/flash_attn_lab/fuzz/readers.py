"""Damaged files for every reader of files: the result must be a value, a BadArgument that names the file, or OSError.

    python -m flash_attn_lab.fuzz.readers --cases 100000 --seed 1 --memory 4 --out report.json

An input is a small valid file, made here, after one to four edits (edits.py). Case n of a seed is always the same
input; `run(1, seed, first=n)` repeats it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import os
import resource
import shlex
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flash_attn_minimal._commands.command import Parser, any_seed, command, integer, real
from flash_attn_minimal._commands.report import cpu_model, plural
from flash_attn_minimal.errors import BadArgument
from flash_attn_minimal.llama import w4
from flash_attn_minimal.llama.checkpoint import Checkpoint
from flash_attn_minimal.llama.config import Config, RopeScaling
from flash_attn_minimal.llama.huggingface import JsonTokenizer, stop_ids
from flash_attn_minimal.llama.llama2c import checkpoint_bytes
from flash_attn_minimal.llama.tokenizer import load_tokenizer
from flash_attn_minimal.llama.weights import find_tokenizer, load_checkpoint
from flash_attn_minimal.transformer import quantized
from flash_attn_minimal.transformer._safetensors import ALL, read_safetensors

from .. import PROGRAM
from ..bench import report as bench_report
from ..command import check_folder, without
from ..models.quality import find_text
from ..models.synthetic import (
    RandomTensors,
    synthetic_vocabulary,
    write_checkpoint,
    write_folder,
    write_tokenizer,
    write_tokenizer_json,
)
from ..report import commit
from .edits import (
    Random,
    edit_entries,
    edit_json,
    edit_llama2c,
    edit_message,
    edit_safetensors,
    edit_text,
    edit_tokenizer_json,
    write_message,
)

EXPECTED = ("read", "BadArgument", "OSError")
KEPT_FAILURES = 50  # failures whose inputs the result holds
INTERVAL = 10.0  # seconds between two lines of progress
SMALL = Config(dim=8, hidden_dim=12, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=20, seq_len=16)
TOKENS = 360  # enough for the bytes and the printable characters

# ---- the readers ----


@dataclass(frozen=True)
class Reader:
    """A reader of files. `read` gets the file with the input; the text of every BadArgument has to contain `where`."""

    name: str
    file: Path
    edit: Callable[[Random, bytes], bytes]
    read: Callable[[Path], Any]
    where: str
    valid: bytes

    def mutated(self, rng: Random) -> bytes:
        data = self.valid
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            data = self.edit(rng, data)
        return data

    def outcome(self, data: bytes) -> tuple[str, str]:
        """(one of EXPECTED, or the kind of failure; the error's text)."""
        self.file.write_bytes(data)
        try:
            with np.errstate(all="ignore"):
                self.read(self.file)
        except BadArgument as error:
            named = self.where in str(error)
            return "BadArgument" if named else "BadArgument without the file's name", str(error)
        except OSError as error:
            return "OSError", str(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust is a BaseException
            return type(error).__name__, "".join(traceback.format_exception(error)[-3:])
        return "read", ""


def use(checkpoint: Checkpoint) -> None:
    """Reads from every tensor, as a model would. An accepted checkpoint must have the shapes that its config says."""
    config = checkpoint.config
    for name, tensor in checkpoint.tensors.items():
        last = tensor[-1] if len(tensor) == config.n_layers and not isinstance(tensor, np.ndarray) else tensor
        if isinstance(last, np.ndarray) and 0 in last.shape:
            raise AssertionError(f"{name} is empty")
    for table in config.rope_tables(4):
        if not np.isfinite(table).all():
            raise AssertionError(f"{config} turns by angles that are not finite")


def read_folder(file: Path) -> None:
    use(load_checkpoint(file.parent))


def read_w4(file: Path) -> None:
    checkpoint = load_checkpoint(file)
    use(checkpoint)
    find_tokenizer(checkpoint)


def read_tokenizer(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    tokenizer.decode(tokenizer.encode("a word \u00e9\U0001f600"))


def read_json_tokenizer(file: Path) -> None:
    with _silent():
        tokenizer = JsonTokenizer(file)
        ids = tokenizer.encode("a word \u00e9\U0001f600")
        "".join(tokenizer.stream([*ids[:20], 3, tokenizer.vocab_size]))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Hides standard error: Rust reports a panic there before Python gets it as an exception."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def read_held_out(file: Path) -> None:
    checkpoint = Checkpoint("a model", "none", True, Config(*SMALL.shape), "float32", {})
    with contextlib.suppress(BadArgument):  # the error about a text that is too short names no file
        if not find_text(checkpoint, load_tokenizer(file.with_name("tok.bin")), 64, path=str(file))[0].size:
            raise AssertionError("no windows")


def as_text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "surrogateescape")


def read_prompt(file: Path) -> None:
    text = as_text(file.read_bytes())
    tokenizers = [load_tokenizer(file.with_name("tok.bin"))]
    if (path := file.with_name("tokenizer.json")).is_file():
        tokenizers.append(JsonTokenizer(path))
    refused = None
    for tokenizer in tokenizers:
        try:
            tokenizer.encode(text)
        except BadArgument as error:
            refused = error
    if refused:
        raise refused


def read_names(file: Path) -> None:
    """Calls the readers with a file name that is the input."""
    path, refused = file.with_name("folder") / as_text(file.read_bytes()), None
    for load in (load_checkpoint, load_tokenizer, read_safetensors, stop_ids, JsonTokenizer, bench_report.read):
        if load is not JsonTokenizer or HAS_TOKENIZERS:
            try:
                load(path)
            except BadArgument as error:
                refused = error
            except OSError:
                pass
    if refused:
        raise refused


HAS_TOKENIZERS = importlib.util.find_spec("tokenizers") is not None


# ---- the valid files ----


def sentencepiece_model() -> bytes:
    message = []
    for token, (piece, score) in enumerate(zip(*synthetic_vocabulary(TOKENS), strict=True)):
        kind = {0: 2, 1: 3, 2: 3}.get(token, 6 if token < 259 else 1)
        piece = piece.replace(b" ", "\u2581".encode())
        message.append((1, 2, write_message([(1, 2, piece), (2, 5, struct.pack("<f", score)), (3, 0, kind)])))
    return write_message([*message, (2, 2, write_message([(3, 0, 2)])), (3, 2, write_message([(1, 2, b"identity")]))])


def quantised_llama2c() -> bytes:
    """A llama2.c file of version 2, with meaningless values."""
    header = struct.pack("<4si7iBi", b"24ka", 2, *SMALL.shape, 1, 4)
    return header.ljust(256, b"\0").ljust(checkpoint_bytes(SMALL, 2, True, 4), b"\x3f")


def write_w4(path: Path, config: Config, tokenizer: Path) -> None:
    """A 4-bit file of zeros, made without the library."""

    def weight(rows: int, columns: int) -> quantized.W4Weight:
        codes = np.zeros((rows, -(-columns // 2)), np.uint8), np.zeros((rows, -(-columns // 16)), np.uint8)
        return quantized.W4Weight("nvfp4", *codes, np.ones(1, np.float32), columns)

    made = RandomTensors(config)
    tensors: dict[str, Any] = {name: made[name] for name in ("token_embedding", "rms_att", "rms_ffn", "rms_final")}
    for name, shape in w4.stacked_shapes(config).items():
        tensors[name] = [weight(*shape) for _ in range(config.n_layers)]
    tensors["w2"][1] = np.zeros(w4.stacked_shapes(config)["w2"], np.float16)
    kept = frozenset({(1, "w2")})
    checkpoint = w4.W4Checkpoint("", "random", True, config, "float16", tensors, weights="nvfp4", kept=kept)
    w4.save(path, checkpoint, tokenizer, (2,))


RESULT = {
    "machine": {"host": "a CPU, 2 cores", "load": 0.7},
    "date": "2026-01-01",
    "command": "python -m flash_attn_lab bench --suite llama",
    "suite": "llama",
    "rows": [
        {"suite": "llama", "pass": "step", "model": "tiny", "dtype": "float32", "cache_dtype": "float32", "batch": 1}
        | {"position": 10, "system": system, "kernel": kernel, "us": 10.0, "steps_per_s": 1e5, "share": 0.5}
        for system, kernel in (("ours", "flash"), ("standard", "standard"))
    ]
    + [{"suite": "llama", "system": "copy", "pass": "copy", "us": 1.0, "tbps": 0.1}],
    "left_out": [{"system": "ours", "reason": "none", "shape": "1 x 1"}],
}


def make_readers(root: Path) -> list[Reader]:
    """All readers. Each has its own folder, in which the other files that it reads are valid."""
    found: list[Reader] = []

    def add(name: str, file: Path, edit: Callable, read: Callable, where: str | None = None) -> None:
        where = str(file.parent) if where is None else where
        found.append(Reader(name, file, edit, read, where, file.read_bytes()))

    def folder(name: str) -> Path:
        (root / name).mkdir()
        return root / name

    def plain(file: Path) -> None:
        use(load_checkpoint(file))

    for version in (0, 1):
        file = folder(f"v{version}") / "model.bin"
        write_checkpoint(file, SMALL, version)
        add(f"llama2.c v{version}", file, edit_llama2c, plain)
    file = folder("v2") / "model.bin"
    file.write_bytes(quantised_llama2c())
    add("llama2.c v2", file, edit_llama2c, plain)

    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    halves = Config(*SMALL.shape[:5], TOKENS, 16, rope_scaling=scaling, rope_interleaved=False, window=5)
    for name, edit, shards in (
        ("config.json", edit_json, 1),
        ("model.safetensors.index.json", edit_json, 3),
        ("model.safetensors", edit_safetensors, 1),
    ):
        file = folder(f"folder of {name}") / name
        write_folder(file.parent, halves, "float16", tied=True, shards=shards)
        add(name, file, edit, read_folder)
    file = folder("stops") / "generation_config.json"
    file.write_text('{"eos_token_id": [2, 5], "temperature": 0.5}')
    add(file.name, file, edit_json, lambda file: stop_ids(file.parent))

    tok = folder("w4") / "tok.bin"
    write_tokenizer(tok, TOKENS)
    for name, read in (("4-bit model", read_w4), ("4-bit tensors", quantized.load_file)):
        file = tok.with_name(f"{name}.safetensors")
        write_w4(file, Config(16, 16, 2, 2, 1, TOKENS, 16, rope_scaling=scaling), tok)
        add(name, file, edit_safetensors, read)
    file = tok.with_name("plain.safetensors")
    file.write_bytes(tok.with_name("4-bit tensors.safetensors").read_bytes())
    add("safetensors", file, edit_safetensors, lambda file: read_safetensors(file, ALL))

    file = folder("tokenizers") / "tokenizer.bin"
    write_tokenizer(file, TOKENS)
    add(file.name, file, edit_entries, read_tokenizer)
    file = file.with_name("tokenizer.model")
    file.write_bytes(sentencepiece_model())
    add(file.name, file, edit_message, read_tokenizer)
    if HAS_TOKENIZERS:
        file = file.with_name("tokenizer.json")
        write_tokenizer_json(file, TOKENS)
        add(file.name, file, edit_tokenizer_json, read_json_tokenizer)

    file = folder("texts") / "prompt"
    write_tokenizer(file.with_name("tok.bin"), TOKENS)
    if HAS_TOKENIZERS:
        write_tokenizer_json(file.with_name("tokenizer.json"), TOKENS)
    file.write_text("Once upon a time \u00e9")
    add("prompt", file, edit_text, read_prompt, "text")
    file = file.with_name("held_out.txt")
    file.write_text("Once upon a time there was a text.\n\nIt had two paragraphs \u00e9.")
    add("held-out text", file, edit_text, read_held_out)
    file = folder("names") / "name"
    (file.parent / "folder").mkdir()
    file.write_text("model.safetensors")
    add("file names", file, edit_text, read_names, "")
    file = folder("bench") / "llama.json"
    file.write_text(json.dumps(RESULT))
    add("bench's result", file, edit_json, bench_report.read)
    return found


# ---- a campaign ----


@contextlib.contextmanager
def workshop() -> Iterator[list[Reader]]:
    """The readers, with their files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="readers-") as root:
        yield make_readers(Path(root))


def run(cases: int, seed: int, report: Callable[[str], Any] = print, first: int = 0) -> dict[str, Any]:
    """Runs cases first .. first + cases - 1 of a seed, the readers in turn. `report` gets lines of text: progress, and
    each failure. Returns

    {"cases", "seed", "counts": {reader: {outcome: n}}, "failures": [{"case", "reader", "outcome", "error", "input"}],
    "seconds"}

    with inputs in hexadecimal digits. A failure is a case whose outcome is not in EXPECTED.
    """
    started = said = time.perf_counter()
    counts: dict[str, dict[str, int]] = {}
    failures: list[dict[str, Any]] = []
    with workshop() as readers:
        counts |= {reader.name: {} for reader in readers}
        for case in range(first, first + cases):
            reader = readers[case % len(readers)]
            data = reader.mutated(Random(f"{seed} {case}"))
            outcome, error = reader.outcome(data)
            here = counts[reader.name]
            here[outcome] = here.get(outcome, 0) + 1
            if outcome not in EXPECTED:
                report(f"case {case} of seed {seed}, {reader.name}: {outcome}: {' '.join(error.split())}")
                if len(failures) < KEPT_FAILURES:
                    about = {"case": case, "reader": reader.name, "outcome": outcome, "error": error}
                    failures.append({**about, "input": data.hex()})
            if (now := time.perf_counter()) - said > INTERVAL:
                said = now
                report(f"{case + 1 - first} of {cases} cases, {(case + 1 - first) / (now - started):.0f} a second")
    counts = {name: dict(sorted(found.items())) for name, found in counts.items()}
    seconds = round(time.perf_counter() - started, 1)
    return {"cases": cases, "seed": seed, "counts": counts, "failures": failures, "seconds": seconds}


@command("readers")
def main(argv: list[str]) -> int:
    """0 if every outcome was expected, else 1."""
    prog = f"{PROGRAM}.fuzz.readers"
    parser = Parser("readers", prog, description=__doc__.split("\n")[0])
    parser.prog = prog
    parser.add_argument("--cases", type=integer(0), default=10000, metavar="N")
    parser.add_argument("--seed", type=any_seed, default=0, metavar="S")
    parser.add_argument("--first", type=integer(0), default=0, metavar="N", help="the number of the first case")
    parser.add_argument("--memory", type=real(above=True), metavar="GIB", help="address space that a reader may take")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the result goes, as JSON")
    args = parser.parse_args(argv)
    if args.out:
        check_folder("--out", args.out.parent)
    if args.memory:
        resource.setrlimit(resource.RLIMIT_AS, (int(args.memory * 2**30),) * 2)
    result = run(args.cases, args.seed, lambda line: print(line, flush=True), args.first)
    for reader, outcomes in result["counts"].items():
        print(f"{reader:<30} " + ", ".join(f"{name} {count}" for name, count in outcomes.items()))
    print(f"{plural(args.cases, 'case')} in {result['seconds']} s")
    if args.out:
        about = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "command": f"{prog} {shlex.join(without(argv, '--out'))}",
            "machine": cpu_model(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(about | result, indent=1) + "\n")
    return 1 if any(name not in EXPECTED for found in result["counts"].values() for name in found) else 0


if __name__ == "__main__":
    sys.exit(main())
