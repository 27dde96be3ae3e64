"""Damaged files for every reader of files: what comes out must be a value, BadArgument that names the file, or OSError.

    python -m flash_attn_minimal.fuzz.readers --cases 100000 --seed 1 --memory 4 --out report.json

An input is a small valid file, made here, after one to four edits. The edits know the format: trees of JSON get hostile
values, names and depths, also inside the strings that hold JSON; fields of protobuf messages and integers of headers
become huge, negative or of another type; and bytes anywhere are flipped, cut, doubled. Case n of a seed is always the
same input, so that `run(1, seed, first=n)` repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import random
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

from .. import quantized
from .._library import BadArgument
from .._safetensors import ALL, read_safetensors
from ..llama import w4
from ..llama.config import Config, RopeScaling
from ..llama.generate import find_tokenizer
from ..llama.huggingface import JsonTokenizer, stop_ids
from ..llama.synthetic import (
    RandomTensors,
    synthetic_vocabulary,
    write_checkpoint,
    write_folder,
    write_tokenizer,
    write_tokenizer_json,
)
from ..llama.tokenizer import load_tokenizer
from ..llama.weights import Checkpoint, checkpoint_bytes, load_checkpoint

EXPECTED = ("read", "BadArgument", "OSError")
KEPT_FAILURES = 50  # whose inputs the result holds
INTERVAL = 10.0  # seconds between two lines of progress
SMALL = Config(dim=8, hidden_dim=12, n_layers=2, n_heads=2, n_kv_heads=1, vocab_size=20, seq_len=16)
TOKENS = 360  # enough for the bytes and the printable characters

Random = random.Random


# ---- edits of bytes ----

INTS = [0, 1, 2, 3, 7, 8, 255, 256, 4096, 65535, 1 << 16, 1 << 20, 1 << 24, (1 << 24) + 1]
INTS += [(1 << bits) + step for bits in (31, 32, 53, 62, 63, 64) for step in (-1, 0, 1)]


def edit_bytes(rng: Random, data: bytes) -> bytes:
    at, length = rng.randint(0, len(data)), rng.choice((1, 2, 4, 8, 64, 1000))
    what = rng.randrange(8)
    if what == 0:  # a bit
        return data[: at - 1] + bytes([data[at - 1] ^ (1 << rng.randrange(8))]) + data[at:] if at else data
    if what == 1:
        return data[:at]
    if what == 2:
        return data[:at] + data[at + length :]
    if what == 3:
        return data[:at] + rng.randbytes(length) + data[at:]
    if what == 4:
        return data[: at + length] + data[at:]
    if what == 5:
        return data + bytes(length)
    return edit_int(rng, data, at)


def edit_int(rng: Random, data: bytes, at: int) -> bytes:
    """A little-endian number in place of what is there."""
    size = rng.choice((1, 2, 4, 4, 4, 8))
    value = rng.choice(INTS) * rng.choice((1, 1, -1)) % (1 << 8 * size)
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


# ---- edits of JSON ----


class Text(str):
    """Goes into a file as it is."""


class Pairs(list):
    """An object, as a list of [name, value]: a name may stand twice."""


VALUES = [*map(str, INTS), "-1", "-2147483649", "1" + "0" * 400, "9" * 5000, "0.5", "16.0", "-0.0", "1e400", "-1e400"]
VALUES += ["1e-320", "1e308", "1e30", "NaN", "Infinity", "-Infinity", "null", "true", "false"]
VALUES += ['""', '"x"', '"\\ud800"', '"\\udcff"', '"\\u0000"', '"/etc/passwd"', '"../x"', '"a/../../b"', '"."', '"a/b"']
VALUES += [
    '"F32"',
    '"U8"',
    '"nvfp4"',
    '"int4"',
    '"bfloat16"',
    '"BPE"',
    '"0.wqkv"',
    '"9.w2"',
    '"\u2028"',
    f'"{"a" * 999}"',
]
VALUES += ["[]", "{}", "[[]]", "[0]", "[1.5]", "[-1]", "[null]", '[""]', "[[1,2],3]", '{"a":1}', '{"type":"linear"}']
VALUES += ["[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000, "[" * 90 + "]" * 90, "[1,", "nul", "\ufeff1", ""]


def parse(text: str) -> Any:
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def dump(node: Any) -> str:
    if isinstance(node, Text):
        return node
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{dump(name)}:{dump(value)}" for name, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node)


def edit_tree(rng: Random, tree: Any) -> Any:
    """One edit somewhere below, by a walk from the root: what stands in a short object comes as often as a long one."""
    root: list = [tree]
    holder, at = root, 0
    while isinstance(holder[at], list) and holder[at] and rng.random() < 0.8:
        inner = holder[at]
        i = rng.randrange(len(inner))
        holder, at = (inner[i], 1) if isinstance(inner, Pairs) else (inner, i)
    holder[at] = edit_value(rng, holder[at])
    return root[0]


def edit_value(rng: Random, value: Any) -> Any:
    what = rng.randrange(10)
    if isinstance(value, list) and value and what < 6:
        i = rng.randrange(len(value))
        if what == 0:
            del value[i]
        elif what == 1:
            value.append(value[i])
        elif what == 2 and isinstance(value, Pairs):
            value[i] = [rng.choice(["", "\ud800", "__metadata__", "rope_theta", value[0][0]]), value[i][1]]
        elif what == 3 and isinstance(value, Pairs):
            j = rng.randrange(len(value))
            value[i][1], value[j][1] = value[j][1], value[i][1]
        elif what == 4:
            value[:] = value[:i]
        else:
            value.insert(
                i, ["extra", Text(rng.choice(VALUES))] if isinstance(value, Pairs) else Text(rng.choice(VALUES))
            )
        return value
    if isinstance(value, str) and value[:1] in ("{", "[") and what < 9:  # JSON in a string
        with contextlib.suppress(ValueError):
            return dump(edit_tree(rng, parse(value)))
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and what < 3:
        return rng.choice((value + 1, value - 1, -value, 2 * value, float(value), str(value), [value]))
    if isinstance(value, str) and value and what < 3:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice(("", "/", "\0", "..", "\ud800", "\u00e9", "0", value)) + value[at + 1 :]
    return Text(rng.choice(VALUES))


def edit_json(rng: Random, data: bytes) -> bytes:
    try:
        return dump(edit_tree(rng, parse(data.decode()))).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):  # an earlier edit has left no JSON, or none that Python can write
        return edit_bytes(rng, data)


PARTS = {  # of a tokenizer.json: what the package can do beside what is in the valid one
    "truncation": [
        {"direction": "Right", "max_length": n, "strategy": "LongestFirst", "stride": s}
        for n in (0, 1, 9)
        for s in (0, 9)
    ],
    "padding": [
        {
            "strategy": strategy,
            "direction": "Left",
            "pad_to_multiple_of": multiple,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
        for strategy in ("BatchLongest", {"Fixed": 0}, {"Fixed": 1 << 50})
        for multiple in (None, 0, 7)
    ],
    "normalizer": [
        {"type": "Precompiled", "precompiled_charsmap": text} for text in ("", "AAAA", "/////w==", "AQAAAAEAAAA=")
    ]
    + [{"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": ""}, {"type": "NFKD"}]
    + [
        {"type": "Replace", "pattern": pattern, "content": "x"}
        for pattern in ({"String": ""}, {"Regex": "("}, {"Regex": ""})
    ],
    "pre_tokenizer": [{"type": "Metaspace", "replacement": "ab", "prepend_scheme": "always", "split": True}]
    + [{"type": "Split", "pattern": {"Regex": "(a*)*b"}, "behavior": "Isolated", "invert": True}, {"type": "Digits"}]
    + [{"type": "FixedLength", "length": n} for n in (0, 1, 1 << 63)],
    "post_processor": [{"type": "BertProcessing", "sep": ["</s>", 1 << 31], "cls": ["<s>", 0]}, {"type": "ByteLevel"}]
    + [
        {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
        for single in ([], [{"Sequence": {"id": "B", "type_id": 9}}])
    ],
    "decoder": [{"type": "Strip", "content": "a", "start": n, "stop": n} for n in (0, 1, 99, 1 << 62)]
    + [
        {"type": "WordPiece", "prefix": "", "cleanup": True},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    ]
    + [{"type": "Sequence", "decoders": []}, {"type": "ByteFallback"}, {"type": "Fuse"}],
    "model": [
        {"type": "Unigram", "unk_id": unk, "vocab": vocab, "byte_fallback": True}
        for unk in (None, 0, 9)
        for vocab in ([], [["a", -1.5]], [["", 0.0]])
    ]
    + [
        {
            "type": "WordPiece",
            "unk_token": unk,
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": n,
            "vocab": {"a": 7},
        }
        for unk in ("", "a")
        for n in (0, 100)
    ]
    + [
        {"type": "WordLevel", "vocab": {"a": 1 << 31, "b": 5}, "unk_token": "c"},
        {"type": "BPE", "vocab": {"a": 9}, "merges": ["a a"]},
    ],
    "added_tokens": [
        [
            {
                "id": n,
                "content": text,
                "single_word": False,
                "lstrip": True,
                "rstrip": True,
                "normalized": True,
                "special": False,
            }
        ]
        for n in (0, 900, 4294967295)
        for text in ("", "a", " ")
    ],
}


def edit_tokenizer_json(rng: Random, data: bytes) -> bytes:
    """As edit_json, often behind another part in place of one of the file's."""
    if rng.random() < 0.6:
        with contextlib.suppress(ValueError, RecursionError, TypeError):
            name = rng.choice(list(PARTS))
            data = json.dumps({**json.loads(data), name: rng.choice(PARTS[name])}).encode()
            if rng.random() < 0.7:
                return data
    return edit_json(rng, data)


def edit_safetensors(rng: Random, data: bytes) -> bytes:
    what = rng.randrange(10)
    start = 8 + int.from_bytes(data[:8], "little")
    if what == 0 or start > len(data):
        return edit_int(rng, data, 0)
    if what == 1:
        return edit_bytes(rng, data)
    header = edit_json(rng, data[8:start])
    return len(header).to_bytes(8, "little") + header + data[start:]


# ---- edits of protobuf messages ----


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def read_message(data: bytes) -> list[tuple[int, int, Any]]:
    """[(number, wire type, value)], or IndexError."""
    fields, at = [], 0
    while at < len(data):
        key, at = read_varint(data, at)
        value: Any
        if key & 7 == 0:
            value, at = read_varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, at = read_varint(data, at)
            value, at = data[at : at + size], at + size
        fields.append((key >> 3, key & 7, value))
    return fields


def write_message(fields: list[tuple[int, int, Any]]) -> bytes:
    out = bytearray()
    for number, wire, value in fields:
        out += varint(number << 3 | wire)
        if isinstance(value, int):
            out += varint(value)
        else:
            out += (varint(len(value)) if wire == 2 else b"") + value
    return bytes(out)


FLOATS = (math.nan, math.inf, -math.inf, 3e38, -0.0)


def edit_message(rng: Random, data: bytes) -> bytes:
    try:
        fields = read_message(data)
    except IndexError:
        return edit_bytes(rng, data)
    if not fields:
        return bytes([rng.randrange(256)])
    i = rng.randrange(len(fields)) if rng.random() < 0.8 else -1 - rng.randrange(min(2, len(fields)))
    number, wire, value = fields[i]
    what = rng.randrange(10)
    if what == 0:
        del fields[i]
    elif what == 1:
        fields.insert(i, fields[rng.randrange(len(fields))])
    elif what == 2:
        fields[i] = (rng.choice((0, 1, 2, 3, 4, 15, 16, 1 << 29)), wire, value)
    elif what == 3:
        fields[i] = (number, rng.randrange(8), value)
    elif isinstance(value, int):
        fields[i] = (number, wire, rng.choice(INTS))
    elif wire == 5:
        fields[i] = (number, wire, struct.pack("<f", rng.choice(FLOATS)))
    else:
        fields[i] = (number, wire, edit_message(rng, value) if what < 8 else edit_bytes(rng, value))
    return write_message(fields)


# ---- edits of headers ----


def edit_llama2c(rng: Random, data: bytes) -> bytes:
    """A number of the header; sometimes with the size that it then asks for, so that more than the size is wrong."""
    if rng.random() < 0.2:
        return edit_bytes(rng, data)
    magic = data[:4] == b"24ka"
    data = edit_int(rng, data, 4 * rng.randrange(11 if magic else 7)) if rng.random() < 0.6 else data
    if rng.random() < 0.3:
        at = 4 * rng.randrange(2 if magic else 0, 9 if magic else 7)
        data = data[:at] + struct.pack("<i", rng.randint(-2, 40)) + data[at + 4 :]
    if rng.random() < 0.5 and len(data) >= 41:
        version, group = struct.unpack_from("<i", data, 4)[0] if magic else 0, struct.unpack_from("<i", data, 37)[0]
        shape = struct.unpack_from("<7i", data, 8 if magic else 0)
        tied = bool(data[36]) if magic else shape[5] > 0
        config = Config(*shape[:5], abs(shape[5]), shape[6])
        if version in (0, 1, 2) and not config.problem() and (version < 2 or group > 0):
            size = checkpoint_bytes(config, version, tied, group if version == 2 else 0)
            if size < 1 << 18:
                data = data[:size].ljust(size, b"\x3f")
    return data


def edit_entries(rng: Random, data: bytes) -> bytes:
    """tokenizer.bin: a number of one of the first entries, or of the head."""
    if rng.random() < 0.3:
        return edit_bytes(rng, data)
    at = 0
    for _ in range(rng.randrange(8)):
        at += 4 if at == 0 else 8 + int.from_bytes(data[at + 4 : at + 8], "little", signed=True)
        if not 0 <= at < len(data):
            return edit_bytes(rng, data)
    if rng.random() < 0.3:
        return data[:at] + struct.pack("<f", rng.choice(FLOATS)) + data[at + 4 :]
    return edit_int(rng, data, min(len(data), at + 4 * rng.randrange(2)))


WORDS = ("\0", "\ud800", "\udcff", "/", "..", "~", "\u00e9", "\U0001f600", "\n", " ", "a" * 300, "<s>", "<0x41>")


def edit_text(rng: Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return edit_bytes(rng, data)
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(WORDS).encode("utf-8", "surrogatepass") + data[at:]


# ---- the readers ----


@dataclass(frozen=True)
class Reader:
    """`read` gets the file in which the input lies; `where` stands in every BadArgument."""

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
        """(one of EXPECTED or what went wrong, the error)"""
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
        except BaseException as error:  # a panic of Rust's is no Exception
            return type(error).__name__, "".join(traceback.format_exception(error)[-3:])
        return "read", ""


def use(checkpoint: Checkpoint) -> None:
    """Takes of every tensor what a model would; what was accepted has the shape that the config says."""
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
    """Rust says on standard error that it panics, before Python hears of it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def read_result(file: Path) -> None:
    from ..bench import report

    report.read(file)


def read_held_out(file: Path) -> None:
    from ..llama.quantize import find_text

    checkpoint = Checkpoint("a model", "none", True, Config(*SMALL.shape), "float32", {})
    args = argparse.Namespace(text=str(file), tokens=64, seed=0)
    with contextlib.suppress(BadArgument):  # a text that is too short says so, and has no file
        if not find_text(args, checkpoint, load_tokenizer(file.with_name("tok.bin")))[0].size:
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
    """The input is a file's name."""
    path, refused = file.with_name("folder") / as_text(file.read_bytes()), None
    for load in (load_checkpoint, load_tokenizer, read_safetensors, stop_ids, JsonTokenizer, read_result):
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
    """Version 2, with values that mean nothing."""
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
    "command": "python -m flash_attn_minimal bench --suite llama",
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
    """Each with a folder of its own, in which the rest of what it reads is as it should be."""
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
    add("bench's result", file, edit_json, read_result)
    return found


# ---- a campaign ----


@contextlib.contextmanager
def workshop() -> Iterator[list[Reader]]:
    """The readers, with their files, as long as it lasts."""
    with tempfile.TemporaryDirectory(prefix="readers-") as root:
        yield make_readers(Path(root))


def run(cases: int, seed: int, report: Callable[[str], Any] = print, first: int = 0) -> dict[str, Any]:
    """Cases first .. first + cases - 1 of a seed, the readers in turn. `report` gets lines: progress, and each failure.

    {"cases", "seed", "counts": {reader: {outcome: n}}, "failures": [{"case", "reader", "outcome", "error", "input"}],
    "seconds"}; the input in hexadecimal digits. There are no failures where every outcome is one of EXPECTED.
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


def main(argv: list[str] | None = None) -> int:
    """0 if every outcome was expected, else 1."""
    prog = "python -m flash_attn_minimal.fuzz.readers"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=10000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first case")
    parser.add_argument("--memory", type=float, metavar="GIB", help="address space that a reader may take")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the result goes, as JSON")
    args = parser.parse_args(argv)
    if args.memory:
        resource.setrlimit(resource.RLIMIT_AS, (int(args.memory * 2**30),) * 2)
    result = run(args.cases, args.seed, lambda line: print(line, flush=True), args.first)
    for reader, outcomes in result["counts"].items():
        print(f"{reader:<30} " + ", ".join(f"{name} {count}" for name, count in outcomes.items()))
    print(f"{args.cases} cases in {result['seconds']} s")
    if args.out:
        words = sys.argv[1:] if argv is None else argv
        if "--out" in words:  # the same numbers, wherever they go
            at = words.index("--out")
            words = [*words[:at], *words[at + 2 :]]
        from ..bench.machine import cpu_model
        from ..bench.report import commit

        about = {
            "date": datetime.date.today().isoformat(),
            "commit": commit(),
            "command": f"{prog} {shlex.join(words)}",
            "machine": cpu_model(),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(about | result, indent=1) + "\n")
    return 1 if any(name not in EXPECTED for found in result["counts"].values() for name in found) else 0


if __name__ == "__main__":
    sys.exit(main())
