"""Text that comes in pieces: joined, the pieces equal the decoding of all tokens, whatever text precedes them."""

import json
import threading
import time

import numpy as np
import pytest

from flash_attn_lab.models.synthetic import write_tokenizer_json
from flash_attn_minimal.llama.huggingface import CONTEXT, JsonTokenizer
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint

pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")

MARK = "\u2581"  # sentencepiece's character for a space
SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = [
    "", " leading", "  two", "a\n b", "a\n\n  b.", "    .", "x ,y", "\n", " ", "\U0001f999\n \U0001f999", "a  \n",
    "caf\u00e9 \n ol\u00e9", "the \u4f60\u597d the", "\ufffd is a character", "e\u0301",
]  # fmt: skip
LONG = ["the quick \n fox\n\n " * 60, "\u4f60\u597d\u4e16\u754c" * 80, "\U0001f999 a" * 90, " " * 300, "\n" * 300]


def sentencepiece_like(path):
    """A tokenizer.json like Llama 2's: spaces are marks, one mark comes first, and unknown characters are spelled in
    bytes."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    grown = [[MARK, MARK], [2 * MARK, 2 * MARK], *([MARK, letter] for letter in letters), ["t", "h"], ["th", "e"]]
    grown += [[MARK + "t", "h"], [MARK + "th", "e"]]
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), MARK, *letters, *map("".join, grown)]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
    model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "merges": grown}
    template = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    decoders = [{"type": "Replace", "pattern": {"String": MARK}, "content": " "}, {"type": "ByteFallback"}]
    decoders += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    text = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": name, **flags, "special": True} for i, name in enumerate(SPECIAL)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": MARK}, space]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "vocab": {piece: token for token, piece in enumerate(pieces)}},
    }
    path.write_text(json.dumps(text), encoding="utf-8")


@pytest.fixture(params=["byte-level", "byte-fallback", "own"])
def tokenizer(request, tmp_path):
    path = tmp_path / "tokenizer.json"
    if request.param == "own":
        return find_tokenizer(load_checkpoint(DEFAULT_CHECKPOINT))
    if request.param == "byte-level":
        write_tokenizer_json(path, 600)
    else:
        sentencepiece_like(path)
    return JsonTokenizer(path)


def sequences(tokenizer, seed):
    """Texts, parts of texts, noise, and noise of spaces, line breaks and special tokens."""
    rng, size = np.random.default_rng(seed), tokenizer.vocab_size
    known = [tokenizer.encode(text) for text in TEXTS + LONG]
    newline, word = tokenizer.encode("a\n")[-1], tokenizer.encode("q a")[-1]
    yield from known
    yield from (ids[len(ids) // 3 :] for ids in known)
    yield from ([1, newline, special, word, word] for special in range(3))
    for _ in range(80):
        yield rng.integers(3, size, rng.integers(1, 30)).tolist()
        yield rng.choice([0, 1, 2, newline, word, *known[3], *known[9]], rng.integers(1, 60)).tolist()


def test_pieces_joined_are_the_text(tokenizer):
    for ids in sequences(tokenizer, 0):
        pieces = list(tokenizer.stream(ids))
        assert len(pieces) == len(ids) + 1
        if "\ufffd" not in (text := tokenizer.decode(ids)):  # damaged characters may show otherwise while they come
            assert "".join(pieces) == text, ids


def test_the_text_after_a_prompt(tokenizer):
    """Wherever a text is cut between two characters, the second part completes the first. No decoding sees more than a
    few tokens, however long the prompt and the text are."""
    lengths, decode = [], tokenizer.decode

    def counted(tokens):
        tokens = list(tokens)
        lengths.append(len(tokens))
        return decode(tokens)

    rng = np.random.default_rng(1)
    for text in TEXTS + LONG:
        ids = tokenizer.encode(text)
        for cut in {0, 1, len(ids), *rng.integers(0, len(ids) + 1, 12).tolist()}:
            front, whole = decode(ids[:cut]), decode(ids)
            if front.endswith("\ufffd") or not whole.startswith(front):
                continue  # in the middle of a character
            tokenizer.decode = counted
            assert "".join(tokenizer.stream(ids[cut:], after=ids[:cut])) == whole[len(front) :], (text, cut)
            tokenizer.decode = decode
    assert max(lengths, default=0) <= 4 * CONTEXT


@pytest.mark.parametrize("prompt", ["caf\u00e9", "hello \U0001f389", "\u4f60", "a\n", "x "])
def test_a_prompt_s_last_character_is_not_shown_again(tokenizer, prompt):
    ids = tokenizer.encode(prompt)
    more = [*ids, *tokenizer.encode("a b")[1:]]
    assert "".join(tokenizer.stream(more[len(ids) :], after=ids)) == tokenizer.decode(more)[len(prompt) :]


def test_damaged_characters_come_in_the_end(tokenizer):
    """An unfinished character waits for its last byte, but not forever."""
    half = tokenizer.encode("\U0001f999")[-4:-2]
    pieces = list(tokenizer.stream(200 * half))
    shown = [at for at, piece in enumerate(pieces) if piece]
    assert set("".join(pieces)) == {"\ufffd"} and shown[0] <= 4 * CONTEXT


@pytest.mark.parametrize("text", ["the", "\u4f60", "\U0001f999 the quick fox"])
def test_no_token_is_longer_than_the_longest(tokenizer, text):
    assert len(text) <= tokenizer.longest * len(tokenizer.encode(text)) and tokenizer.longest > 1


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path):
    """Other threads can run during an encoding, so that a server can encode while it makes steps."""
    write_tokenizer_json(tmp_path / "tokenizer.json", 600)
    tokenizer, text, times, done = JsonTokenizer(tmp_path / "tokenizer.json"), "the quick " * 60_000, [0], []

    def count():
        while not done:
            times[0] += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        while not times[0]:
            time.sleep(1e-3)
        before = times[0]
        ids = tokenizer.encode(text)
        counted = times[0] - before
    finally:
        done.append(True)
        thread.join()
    assert counted > 20 and tokenizer.decode(ids) == text
    short = tokenizer.encode(text[:3000])
    assert ids[: len(short)] == short
