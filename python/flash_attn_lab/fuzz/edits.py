"""Edits that damage a small valid file. Each is a function of a random generator and the file's bytes.

The edits know the format. JSON gets hostile values, names and depths, also inside strings that hold JSON. Fields of
protobuf messages and integers of headers become huge, negative or of another type. Bytes anywhere are flipped, cut or
doubled.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from typing import Any

from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.llama2c import checkpoint_bytes

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
    """Replaces the bytes at `at` by a little-endian number."""
    size = rng.choice((1, 2, 4, 4, 4, 8))
    value = rng.choice(INTS) * rng.choice((1, 1, -1)) % (1 << 8 * size)
    return data[:at] + value.to_bytes(size, "little") + data[at + size :]


# ---- edits of JSON ----


class Text(str):
    """JSON text that goes into a file unchanged."""


class Pairs(list):
    """A JSON object as a list of [name, value], in which a name may occur twice."""


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
    """One edit at a random place. A walk from the root finds the place, so that members of short and of long objects
    are edited equally often."""
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
    except (ValueError, RecursionError):  # after an earlier edit it is not JSON, or Python cannot write it
        return edit_bytes(rng, data)


PARTS = {  # parts of a tokenizer.json that the valid file does not have
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
    """Like edit_json. Often one of PARTS replaces the file's own part, either before edit_json or in place of it."""
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
    """The fields of a message as [(number, wire type, value)]. Raises IndexError if the message is cut off."""
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
    """Changes a number of the header. Sometimes the file then gets the size that the header asks for, so that the size
    is not the only thing wrong."""
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
    """Changes a number of one of the first entries of a tokenizer.bin, or of its header."""
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
