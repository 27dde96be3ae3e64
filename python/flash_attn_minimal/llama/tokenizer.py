"""Byte-pair encoding with a scored vocabulary, as Llama's models use it.

Two file formats carry the same content, and one encoder serves both:

tokenizer.bin       llama2.c: uint32 longest token, then per token in id order float32 score, int32 length, bytes.
tokenizer.model     sentencepiece: a protobuf message ModelProto.

The .model file is read here and not by the sentencepiece package. Only a list of (piece, score, type) and three flags
are needed from it. And sentencepiece would apply the file's remove_extra_whitespaces flag, where llama2.c keeps every
space; a model would then answer differently depending on which of its two tokenizer files was at hand.
"""

from __future__ import annotations

import codecs
import functools
import heapq
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Sequence

from .._core.files import quoted, read_bytes
from ..errors import BadArgument

UNKNOWN, BOS, EOS = 0, 1, 2
MAX_TOKEN_BYTES = 1 << 16  # a file with a larger "longest token" has another format
SPACE_MARK = "\u2581".encode()  # what sentencepiece writes for a space
BYTE_PIECE = re.compile(rb"<0x([0-9A-F]{2})>")
TYPE_NORMAL, TYPE_USER_DEFINED = 1, 4  # SentencePiece.Type; in Llama's files only normal pieces are made from text
MODEL_TYPE_BPE = 2  # TrainerSpec.ModelType


class Tokenizer:
    """A vocabulary: `pieces[id]` are bytes, `scores[id]` the merge priorities. Ids 0, 1, 2 are <unk>, BOS and EOS.

    A piece "<0xNN>" stands for that byte; text outside the vocabulary is spelled with those.
    """

    stops = frozenset({BOS, EOS})  # a text ends with either

    def __init__(self, pieces: list[bytes], scores: list[float], is_text: list[bool] | None = None):
        self.pieces, self.scores = pieces, scores
        self._bytes = [b"" if token in (BOS, EOS) else piece for token, piece in enumerate(pieces)]
        self._id_of: dict[bytes, int] = {}  # pieces that text can contain
        self._byte_id = [UNKNOWN] * 256
        for token, piece in enumerate(pieces):
            if match := BYTE_PIECE.fullmatch(piece):
                byte = int(match[1], 16)
                self._bytes[token] = bytes([byte])
                self._byte_id[byte] = token
            elif token > EOS and (is_text is None or is_text[token]):
                self._id_of.setdefault(piece, token)

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def longest(self) -> int:
        """The number of bytes of the longest token, which is at least its number of characters."""
        return max(map(len, self.pieces), default=1)

    def encode(self, text: str) -> list[int]:
        """BOS, then the tokens of the text after one added space (nothing is added to an empty text).

        Starts from single characters. The adjacent pair whose concatenation is the token with the highest score is
        merged, on a tie the first such pair, until no pair makes a token. The heap holds every candidate pair once, so
        n characters take O(n log n).
        """
        ids: list[int] = []
        for character in " " + text if text else "":
            try:  # a byte of the command line that could not be decoded stays that byte
                utf8 = character.encode("utf-8", "surrogateescape")
            except UnicodeEncodeError as error:
                raise BadArgument(f"text {quoted(text)} holds {character!r}: {error.reason}") from None
            token = self._id_of.get(utf8)
            ids += [token] if token is not None else [self._byte_id[byte] for byte in utf8]

        # A linked list of live tokens; a merge keeps the left node and removes the right one.
        n = len(ids)
        left, right, alive = list(range(-1, n - 1)), list(range(1, n + 1)), [True] * n
        heap: list[tuple[float, int, int, int, int]] = []  # (-score, left node, its id, right node's id, merged id)

        def propose(a: int) -> None:
            if 0 <= a and right[a] < n:
                pair = ids[a], ids[right[a]]
                merged = self._id_of.get(self.pieces[pair[0]] + self.pieces[pair[1]])
                if merged is not None:
                    heapq.heappush(heap, (-self.scores[merged], a, *pair, merged))

        for a in range(n):
            propose(a)
        while heap:
            _, a, first, second, merged = heapq.heappop(heap)
            b = right[a]
            if not alive[a] or b >= n or (ids[a], ids[b]) != (first, second):
                continue  # one of the two nodes has since merged with another neighbour
            ids[a], alive[b], right[a] = merged, False, right[b]
            if right[a] < n:
                left[right[a]] = a
            propose(left[a])
            propose(a)
        return [BOS] + [ids[a] for a in range(n) if alive[a]]

    def token_bytes(self, token: int, previous: int | None = None) -> bytes:
        """The text of one token. BOS and EOS are empty. The space that `encode` adds after BOS is removed again."""
        if not 0 <= token < len(self._bytes):
            raise BadArgument(f"token={token} is outside the vocabulary 0 .. {self.vocab_size - 1}")
        piece = self._bytes[token]
        return piece[1:] if previous == BOS and piece.startswith(b" ") else piece

    def stream(self, tokens: Iterable[int], after: Sequence[int] = ()) -> Iterator[str]:
        """The text of the tokens as they come: one string for each token and one more at the end. after: the tokens
        before these, whose text is not returned.

        A character whose bytes span several tokens appears with the last of them; bytes that are not valid UTF-8 become
        U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        previous = None
        for token in after[-4:]:  # a character has at most 4 bytes
            decoder.decode(self.token_bytes(token, previous))
            previous = token
        for token in tokens:
            yield decoder.decode(self.token_bytes(token, previous))
            previous = token
        yield decoder.decode(b"", final=True)

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.stream(tokens))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Reads tokenizer.bin or tokenizer.model, which it distinguishes by their first bytes. Raises BadArgument for any
    other or damaged file."""
    data = read_bytes("tokenizer", path)
    try:
        # A .model file starts with the tag of its first piece, 0x0A; its first four bytes as an integer exceed the
        # length of any token.
        if len(data) >= 4 and int.from_bytes(data[:4], "little") < MAX_TOKEN_BYTES:
            return _parse_llama2c(data)
        if data[:1] == b"\x0a":
            return _parse_sentencepiece(data)
        raise ValueError("it is neither a llama2.c tokenizer.bin nor a sentencepiece tokenizer.model")
    except ValueError as error:
        raise BadArgument(f"tokenizer {str(path)!r}: {error}") from None


def save_tokenizer(path: str | os.PathLike[str], pieces: list[bytes], scores: list[float]) -> None:
    """Writes a tokenizer.bin."""
    with open(path, "wb") as file:
        file.write(struct.pack("<I", max(map(len, pieces))))
        for piece, score in zip(pieces, scores, strict=True):
            file.write(struct.pack("<fi", score, len(piece)) + piece)


def _parse_llama2c(data: bytes) -> Tokenizer:
    longest = int.from_bytes(data[:4], "little")
    pieces, scores, at = [], [], 4
    entry = struct.Struct("<fi")
    while at < len(data):
        if at + entry.size > len(data):
            raise ValueError(f"truncated inside token {len(pieces)}")
        score, length = entry.unpack_from(data, at)
        at += entry.size
        if not 0 <= length <= longest or not math.isfinite(score):
            raise ValueError(
                f"token {len(pieces)} has length {length} (the longest is {longest}) and score {score}: "
                "not a tokenizer.bin"
            )
        if at + length > len(data):
            raise ValueError(f"truncated inside token {len(pieces)}")
        pieces.append(data[at : at + length])
        scores.append(score)
        at += length
    if len(pieces) <= EOS:
        raise ValueError(f"it has {len(pieces)} tokens, too few to hold <unk>, BOS and EOS")
    return Tokenizer(pieces, scores)


# ---- sentencepiece: as much protobuf as a ModelProto needs ----


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("truncated inside a protobuf number")
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise ValueError("a protobuf number is longer than 10 bytes")


def _fields(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """(field number, value) of one message: varints as int, 4-byte fields as float, length-delimited fields as
    bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"protobuf wire type {wire} of field {number}: not a tokenizer.model")
        if at + size > len(data):
            raise ValueError(f"truncated inside protobuf field {number}")
        value = data[at : at + size]
        at += size
        yield number, struct.unpack("<f", value)[0] if wire == 5 else value


def _message(value: int | float | bytes) -> dict[int, int | float | bytes]:
    if not isinstance(value, bytes):
        raise ValueError("a protobuf number stands where a message belongs: not a tokenizer.model")
    return dict(_fields(value))


def _parse_sentencepiece(data: bytes) -> Tokenizer:
    """ModelProto: 1 = pieces {1 piece, 2 score, 3 type}, 2 = trainer_spec {3 model_type}, 3 = normalizer_spec {2
    charsmap, 3 add_dummy_prefix}."""
    pieces, scores, is_text = [], [], []
    trainer, normalizer = {}, {}
    for number, value in _fields(data):
        if number == 1:
            message = _message(value)
            piece, score, kind = message.get(1, b""), message.get(2, 0.0), message.get(3, TYPE_NORMAL)
            if not isinstance(piece, bytes) or not isinstance(score, float) or not math.isfinite(score):
                raise ValueError(
                    f"token {len(pieces)} has piece {quoted(piece)} and score {quoted(score)}: not a tokenizer.model"
                )
            pieces.append(piece.replace(SPACE_MARK, b" "))
            scores.append(score)
            is_text.append(kind == TYPE_NORMAL)
            if kind == TYPE_USER_DEFINED:
                raise ValueError(
                    f"token {len(pieces) - 1} {quoted(piece)} is user-defined, which bypasses byte-pair encoding: "
                    "not supported"
                )
        elif number == 2:
            trainer = _message(value)
        elif number == 3:
            normalizer = _message(value)
    if not trainer or not normalizer:
        raise ValueError("truncated: its trainer and normalizer settings are missing")
    if len(pieces) <= EOS:
        raise ValueError(f"it has {len(pieces)} tokens, too few to hold <unk>, BOS and EOS")
    if any(is_text[: EOS + 1]):
        raise ValueError(f"tokens 0, 1, 2 are {quoted(pieces[: EOS + 1])}, not <unk>, BOS and EOS")
    if trainer.get(3, 1) != MODEL_TYPE_BPE:
        raise ValueError(f"model_type={quoted(trainer.get(3, 1))}: only byte-pair encoding ({MODEL_TYPE_BPE}) is read")
    if normalizer.get(2) or not normalizer.get(3, 1):
        raise ValueError("it normalises text or adds no space in front: Llama's tokenizers do neither")
    return Tokenizer(pieces, scores, is_text)
