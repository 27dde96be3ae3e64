"""Tokenizers: the real files match their golden encodings, and every damaged file is named."""

import json
import random
import struct

import pytest
from real_models import model_file

from flash_attn_lab.models.synthetic import synthetic_vocabulary, write_checkpoint, write_tokenizer
from flash_attn_minimal import BadArgument
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.tokenizer import BOS, EOS, Tokenizer, load_tokenizer
from flash_attn_minimal.llama.weights import load_checkpoint

SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=400, seq_len=32)


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def protobuf(fields):
    """A protobuf message of fields [(number, int | float | bytes)], as sentencepiece writes it."""
    out = b""
    for number, value in fields:
        if isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def sentencepiece_model(vocab_size=400, trainer=((3, 2),), normalizer=((1, b"identity"),), kinds=None):
    """The synthetic vocabulary as a tokenizer.model; kinds overrides the type of single tokens."""
    message = []
    for token, (piece, score) in enumerate(zip(*synthetic_vocabulary(vocab_size), strict=True)):
        kind = (
            {0: 2, 1: 3, 2: 3}.get(token, 6 if token < 259 else 1)
            if kinds is None or token not in kinds
            else kinds[token]
        )
        piece = (b"<s>", b"</s>")[token - 1] if token in (BOS, EOS) else piece.replace(b" ", "\u2581".encode())
        message.append((1, protobuf([(1, piece), (2, score), (3, kind)])))
    return protobuf([*message, (2, protobuf(trainer)), (3, protobuf(normalizer))])


def naive_encode(tokenizer, text):
    """The plain rule: merge the best adjacent pair, the first one on a tie, until no pair can be merged."""
    id_of = {piece: token for token, piece in reversed(list(enumerate(tokenizer.pieces))) if token >= 259}
    ids = []
    for character in " " + text if text else "":
        utf8 = character.encode()
        ids += [id_of[utf8]] if utf8 in id_of else [byte + 3 for byte in utf8]
    while True:
        pairs = [(a, id_of.get(tokenizer.pieces[ids[a]] + tokenizer.pieces[ids[a + 1]])) for a in range(len(ids) - 1)]
        pairs = [(a, token) for a, token in pairs if token is not None]
        if not pairs:
            return [BOS, *ids]
        a, token = max(pairs, key=lambda pair: (tokenizer.scores[pair[1]], -pair[0]))
        ids[a : a + 2] = [token]


def golden_encodings():
    return json.loads(model_file("tokenizer_golden.json").read_text())["tokenizers"]


@pytest.mark.parametrize("name", ["tok512", "tokenizer"])
@pytest.mark.parametrize("suffix", ["bin", "model"])
def test_golden_encodings(name, suffix):
    cases = golden_encodings()[f"{name}.bin"]
    tokenizer = load_tokenizer(model_file(f"{name}.{suffix}"))
    assert tokenizer.vocab_size == {"tok512": 512, "tokenizer": 32000}[name] and len(cases) >= 8
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_sentencepiece_agrees():
    sentencepiece = pytest.importorskip("sentencepiece", reason="the sentencepiece package is not installed")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(model_file("tokenizer.model")))
    ours = load_tokenizer(model_file("tokenizer.model"))
    for text in [
        "The quick brown fox jumps over 13 lazy dogs.",
        "x = {'a': [1, 2]}\n\treturn x",
        "Ünïcödé – “quotes” … 漢字かな 🦙🦙",
    ]:
        assert ours.encode(text) == [BOS, *theirs.encode(text)], text


def test_encode_follows_the_rule(tmp_path):
    write_tokenizer(tmp_path / "tok.bin", 3000, seed=1)
    tokenizer = load_tokenizer(tmp_path / "tok.bin")
    rng = random.Random(0)
    merged = 0
    for length in [0, 1, 2, 3, 10, 50, 200]:
        for _ in range(20):
            text = "".join(rng.choice("aabbcde \u00e9z\n") for _ in range(length))
            ids = tokenizer.encode(text)
            assert ids == naive_encode(tokenizer, text), repr(text)
            assert tokenizer.decode(ids) == text
            merged += len(text) + 2 > len(ids)
    assert merged > 50  # the vocabulary does merge, or this test would show nothing


def test_ties_merge_the_first_pair():
    pieces, scores = synthetic_vocabulary(354)
    tokenizer = Tokenizer([*pieces, b"aa"], [*scores, 5.0])
    aa, a, space = 354, pieces.index(b"a"), pieces.index(b" ")
    assert tokenizer.encode("aaa") == [BOS, space, aa, a]


def test_model_and_bin_give_the_same_tokenizer(tmp_path):
    write_tokenizer(tmp_path / "tok.bin", 400)
    (tmp_path / "tok.model").write_bytes(sentencepiece_model(400))
    ours, theirs = load_tokenizer(tmp_path / "tok.bin"), load_tokenizer(tmp_path / "tok.model")
    assert ours.scores == theirs.scores and ours.pieces[3:] == theirs.pieces[3:]
    for text in ["", "hello  world", "\u00e9\u4f60\U0001f600", "<s>", "<0x41>"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)) == text


def test_special_pieces_are_not_read_from_text():
    pieces, scores = synthetic_vocabulary(354)
    grown = [b"<u", b"<un", b"<unk", b"<0", b"<0x", b"<0x4", b"<0x41"]
    tokenizer = Tokenizer(pieces + grown, scores + [1.0] * len(grown))
    assert tokenizer.encode("<unk>")[-2:] == [pieces.index(b"<unk>") + 354 + 2, pieces.index(b">")]
    assert tokenizer.decode(tokenizer.encode("<0x41>")) == "<0x41>"


def test_a_character_appears_with_its_last_byte():
    tokenizer = Tokenizer(*synthetic_vocabulary(354))
    smile = [byte + 3 for byte in "\U0001f600".encode()]
    assert list(tokenizer.stream([BOS, *smile])) == ["", "", "", "", "\U0001f600", ""]
    assert list(tokenizer.stream([BOS, *smile[:2]])) == ["", "", "", "\ufffd"]
    assert tokenizer.decode([BOS, smile[1], tokenizer.encode("a")[-1]]) == "\ufffda"


def test_space_behind_bos_is_dropped_once():
    tokenizer = Tokenizer(*synthetic_vocabulary(354))
    space = tokenizer.pieces.index(b" ")
    assert tokenizer.decode([BOS, space, space]) == " "
    assert tokenizer.decode([space, space]) == "  "
    assert tokenizer.decode([BOS, EOS]) == ""


@pytest.mark.parametrize("token", [-1, 354])
def test_token_outside_the_vocabulary(token):
    with pytest.raises(BadArgument, match=f"token={token} is outside the vocabulary 0 .. 353"):
        Tokenizer(*synthetic_vocabulary(354)).decode([BOS, token])


def test_undecodable_bytes_of_a_command_line_survive():
    tokenizer = Tokenizer(*synthetic_vocabulary(354))
    assert tokenizer.encode(b"\xff".decode("utf-8", "surrogateescape"))[-1] == 0xFF + 3


@pytest.mark.parametrize("suffix", ["bin", "model"])
def test_every_truncation_is_noticed(tmp_path, suffix):
    if suffix == "bin":
        write_tokenizer(tmp_path / "whole", 400)
    else:
        (tmp_path / "whole").write_bytes(sentencepiece_model(400))
    data = (tmp_path / "whole").read_bytes()
    path = tmp_path / f"tok.{suffix}"
    shorter = 0
    for keep in range(0, len(data), 3):
        path.write_bytes(data[:keep])
        try:
            tokenizer = load_tokenizer(path)
        except BadArgument as error:
            assert str(path) in str(error)
        else:  # cut between two tokens of a .bin, which holds no count: the vocabulary size gives it away
            assert suffix == "bin" and tokenizer.vocab_size < 400
            shorter += 1
    assert shorter < len(data) / 20


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "neither a llama2.c tokenizer.bin nor a sentencepiece tokenizer.model"),
        (b"\x07\0", "neither"),
        (b"Once upon a time", "neither"),
        (b"\x07\0\0\0", "0 tokens"),
        (b"\x07\0\0\0" + struct.pack("<fi", 0, 5) + b"<unk>", "1 tokens"),
        (b"\x07\0\0\0" + struct.pack("<fi", 0, 8) + b"<unknow>", "token 0 has length 8 .the longest is 7"),
        (b"\x07\0\0\0" + struct.pack("<fi", 0, -1), "token 0 has length -1"),
        (b"\x07\0\0\0" + struct.pack("<fi", float("nan"), 1) + b"a", "score nan"),
        (b"\x07\0\0\0" + struct.pack("<fi", 0, 7) + b"<unk>", "truncated inside token 0"),
        (b"\x07\0\0\0" + bytes(3), "truncated inside token 0"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "longer than 10 bytes"),
        (b"\x0a\x7f\x0a\x01a", "truncated inside protobuf field 1"),
        (b"\x0a\x02\x0b\x01\x01\x01", "wire type 3"),
        (sentencepiece_model(trainer=[(3, 1)]), "model_type=1"),
        (sentencepiece_model(normalizer=[(2, b"charsmap")]), "normalises text"),
        (sentencepiece_model(normalizer=[(3, 0)]), "adds no space"),
        (sentencepiece_model(kinds={300: 4}), "token 300 .* is user-defined"),
        (sentencepiece_model(kinds={1: 1}), "not <unk>, BOS and EOS"),
    ],
)
def test_not_a_tokenizer(tmp_path, data, message):
    (tmp_path / "tok").write_bytes(data)
    with pytest.raises(BadArgument, match=message) as error:
        load_tokenizer(tmp_path / "tok")
    assert repr(str(tmp_path / "tok")) in str(error.value)


def test_a_checkpoint_is_no_tokenizer_and_the_reverse(tmp_path):
    write_checkpoint(tmp_path / "model.bin", SMALL)
    write_tokenizer(tmp_path / "tok.bin", 400)
    with pytest.raises(BadArgument, match="not a tokenizer.bin"):
        load_tokenizer(tmp_path / "model.bin")
    with pytest.raises(BadArgument, match="no llama2.c checkpoint"):
        load_checkpoint(tmp_path / "tok.bin")
