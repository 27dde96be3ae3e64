"""Checkpoints and tokenizers: what is written is read back, the real files match their golden encodings, and every
damaged file is named."""

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest

from flash_attn_minimal import BadArgument
from flash_attn_minimal.llama import huggingface
from flash_attn_minimal.llama.config import RopeScaling
from flash_attn_minimal.llama.generate import find_tokenizer
from flash_attn_minimal.llama.huggingface import JsonTokenizer, read_safetensors, stop_ids
from flash_attn_minimal.llama.synthetic import (
    SHAPES,
    RandomTensors,
    synthetic_vocabulary,
    write_checkpoint,
    write_folder,
    write_tokenizer,
    write_tokenizer_json,
)
from flash_attn_minimal.llama.tokenizer import BOS, EOS, Tokenizer, load_tokenizer
from flash_attn_minimal.llama.weights import (
    LAYERED,
    Config,
    checkpoint_bytes,
    load_checkpoint,
    save_checkpoint,
    tensor_shapes,
)

SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=400, seq_len=32)
MODELS = Path(os.environ.get("FLASH_ATTN_TEST_MODELS", Path(__file__).resolve().parents[2] / "shared" / "models"))


def model_file(name):
    if not (MODELS / name).is_file():
        pytest.skip(f"{MODELS / name} is not here; FLASH_ATTN_TEST_MODELS names the folder of the real models")
    return MODELS / name


# ---- checkpoints ----


@pytest.mark.parametrize(
    "name, version, size",
    [
        ("stories260K", 0, 1_056_540),
        ("stories260K", 1, 1_040_384),
        ("stories15M", 0, 60_816_028),
        ("stories42M", 0, 167_020_572),
        ("stories110M", 0, 438_381_596),
    ],
)
def test_sizes_of_the_published_files(name, version, size):
    assert checkpoint_bytes(SHAPES[name], version, tied=True) == size


@pytest.mark.parametrize("tied", [True, False])
def test_both_versions_hold_the_same_tensors(tmp_path, tied):
    for version in (0, 1):
        write_checkpoint(tmp_path / f"v{version}.bin", SMALL, version, tied, seed=3)
    v0, v1 = (load_checkpoint(tmp_path / f"v{version}.bin") for version in (0, 1))
    assert (v0.format, v1.format) == ("llama2.c v0", "llama2.c v1")
    assert v0.config == v1.config == SMALL and v0.tied is v1.tied is tied
    for name in v1.tensors:
        np.testing.assert_array_equal(v0[name], v1[name], err_msg=name)
    assert v0["wk"].shape == (2, 8, 16) and v0["w2"].shape == (2, 16, 24)
    assert np.shares_memory(v0["wcls"], v0["token_embedding"]) is tied


def test_tensors_are_read_only_views_of_the_mapped_file(tmp_path):
    write_checkpoint(tmp_path / "model.bin", SMALL)
    checkpoint = load_checkpoint(tmp_path / "model.bin")
    base = checkpoint["w1"]
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        checkpoint["w1"][0, 0, 0] = 1
    with open(tmp_path / "model.bin", "rb") as file:
        assert checkpoint["token_embedding"].tobytes() == file.read()[28 : 28 + 4 * 400 * 16]


def test_real_checkpoints_agree():
    v0, v1 = load_checkpoint(model_file("stories260K.bin")), load_checkpoint(model_file("stories260K_v1.bin"))
    assert v0.config == v1.config == SHAPES["stories260K"] and v0.tied and v1.tied
    for name in v1.tensors:
        np.testing.assert_array_equal(v0[name], v1[name], err_msg=name)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize(
    "change, message",
    [(-1, "is truncated"), (-1000, "is truncated"), (1, "1 trailing bytes"), (64, "64 trailing bytes")],
)
def test_wrong_length(tmp_path, version, change, message):
    path = tmp_path / "model.bin"
    write_checkpoint(path, SMALL, version)
    size = path.stat().st_size
    os.truncate(path, size + change)
    with pytest.raises(BadArgument, match=message) as error:
        load_checkpoint(path)
    assert str(size + change) in str(error.value) and str(size) in str(error.value) and "model.bin" in str(error.value)


@pytest.mark.parametrize("version, keep", [(0, 0), (0, 1), (0, 27), (1, 4), (1, 28), (1, 255)])
def test_truncated_inside_the_header(tmp_path, version, keep):
    path = tmp_path / "model.bin"
    write_checkpoint(path, SMALL, version)
    os.truncate(path, keep)
    with pytest.raises(BadArgument, match=f"is truncated: {keep} bytes"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    "header, message",
    [
        ((0, 24, 2, 4, 2, 400, 32), "dim=0"),
        ((16, -24, 2, 4, 2, 400, 32), "hidden_dim=-24"),
        ((16, 24, 1 << 25, 4, 2, 400, 32), "n_layers=33554432"),
        ((16, 24, 2, 3, 1, 400, 32), "dim=16 is not a multiple of n_heads=3"),
        ((16, 24, 2, 4, 3, 400, 32), "n_heads=4 is not a multiple of n_kv_heads=3"),
        ((16, 24, 2, 16, 16, 400, 32), "dim / n_heads = 1 is not an even head size"),
        ((2048, 24, 2, 2, 2, 400, 32), "dim / n_heads = 1024 is not an even head size"),
        ((16, 24, 2, 4, 2, 0, 32), "vocab_size=0"),
        ((16, 24, 2, 4, 2, 400, -1), "seq_len=-1"),
    ],
)
@pytest.mark.parametrize("version", [0, 1])
def test_impossible_header(tmp_path, version, header, message):
    prefix = b"" if version == 0 else b"24ka" + struct.pack("<i", 1)
    (tmp_path / "model.bin").write_bytes((prefix + struct.pack("<7i", *header)).ljust(4096, b"\0"))
    with pytest.raises(BadArgument, match="no llama2.c checkpoint") as error:
        load_checkpoint(tmp_path / "model.bin")
    assert message in str(error.value)


def test_foreign_files(tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("Once upon a time there was a file of text, and it was no checkpoint.")
    with pytest.raises(BadArgument, match="no llama2.c checkpoint: its header says dim=1701015119"):
        load_checkpoint(path)
    path.write_bytes(b"GGUF" + bytes(1000))
    with pytest.raises(BadArgument, match="no llama2.c checkpoint"):
        load_checkpoint(path)
    path.write_bytes(b"24ka" + struct.pack("<i", 3) + bytes(1000))
    with pytest.raises(BadArgument, match="format version 3: 0, 1 and 2"):
        load_checkpoint(path)


@pytest.mark.parametrize("load, what", [(load_checkpoint, "checkpoint"), (load_tokenizer, "tokenizer")])
def test_missing_file_and_folder(tmp_path, load, what):
    with pytest.raises(BadArgument, match=f"{what} .*nowhere.bin.*No such file"):
        load(tmp_path / "nowhere.bin")
    with pytest.raises(BadArgument, match=f"{what} .* is (not a file|a folder without config.json)"):
        load(tmp_path)


def test_writer_refuses_impossible_shapes(tmp_path):
    with pytest.raises(BadArgument, match="n_heads=4 is not a multiple of n_kv_heads=3"):
        write_checkpoint(tmp_path / "model.bin", Config(16, 24, 2, 4, 3, 400, 32))
    with pytest.raises(BadArgument, match="version=2"):
        write_checkpoint(tmp_path / "model.bin", SMALL, version=2)
    with pytest.raises(BadArgument, match="rope_interleaved=True, but these models turn halves"):
        write_folder(tmp_path / "folder", SMALL)
    with pytest.raises(BadArgument, match="shards=99 is outside 1 .. 21"):
        write_folder(tmp_path / "folder", HALVES, "float32", shards=99)
    with pytest.raises(BadArgument, match="vocab_size=300 is below 354"):
        write_tokenizer(tmp_path / "tok.bin", 300)


# ---- quantised checkpoints ----


def write_quantised(path, config, tied, group, seed=0):
    """Version 2, the way llama2.c's export writes it; returns what the file means."""
    tensors, meant = RandomTensors(config, tied, seed=seed), {}
    with open(path, "wb") as file:
        header = b"24ka" + struct.pack("<i7iBi", 2, *config.shape, tied, group)
        file.write(header.ljust(256, b"\0"))
        for name in tensor_shapes(config, 2, tied):
            layers = [np.asarray(layer) for layer in tensors[name]] if name in LAYERED else [tensors[name]]
            meant[name] = layers
            for i, layer in enumerate(layers):
                if name.startswith("rms"):
                    file.write(layer.astype("<f4").tobytes())
                    continue
                groups = layer.reshape(-1, group)
                factors = np.abs(groups).max(1) / np.float32(127)
                values = np.round(groups / factors[:, None]).astype(np.int8)
                file.write(values.tobytes() + factors.astype("<f4").tobytes())
                meant[name][i] = (values * factors[:, None]).reshape(layer.shape)
    return meant


@pytest.mark.parametrize("tied", [True, False])
def test_quantised_checkpoints(tmp_path, tied):
    path = tmp_path / "model.bin"
    meant = write_quantised(path, SMALL, tied, group=8)
    checkpoint = load_checkpoint(path)
    assert (checkpoint.format, checkpoint.dtype, checkpoint.tied) == ("llama2.c v2", "int8", tied)
    assert checkpoint.config == SMALL
    for name, layers in meant.items():
        for i, layer in enumerate(layers):
            read = checkpoint[name][i] if name in LAYERED else checkpoint[name]
            np.testing.assert_array_equal(read, layer, err_msg=name)
            assert read.dtype == np.float32
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(BadArgument, match="is truncated"):
        load_checkpoint(path)


@pytest.mark.parametrize("group", [0, -1, 7])
def test_impossible_groups(tmp_path, group):
    header = b"24ka" + struct.pack("<i7iBi", 2, *SMALL.shape, 1, group)
    (tmp_path / "model.bin").write_bytes(header.ljust(100_000, b"\0"))
    with pytest.raises(BadArgument, match=f"group_size={group}, which does not divide every matrix"):
        load_checkpoint(tmp_path / "model.bin")


def test_constants_that_the_format_cannot_carry(tmp_path):
    config = Config(*SMALL.shape, rope_theta=5e5)
    with pytest.raises(BadArgument, match="has constants that a llama2.c checkpoint cannot carry"):
        save_checkpoint(tmp_path / "model.bin", config, RandomTensors(config))


# ---- Hugging Face folders ----

HALVES = Config(*SMALL.shape, rope_interleaved=False)


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, HALVES, "float32", tied=False)
    write_tokenizer_json_or_skip(tmp_path / "tokenizer.json", 400)
    return tmp_path


def write_tokenizer_json_or_skip(path, vocab_size):
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    write_tokenizer_json(path, vocab_size)


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shards", [1, 3])
def test_folders_hold_what_was_written(tmp_path, dtype, shards):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    write_folder(tmp_path, HALVES, dtype, tied=False, biases=True, shards=shards, seed=4)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.config == Config(*SMALL.shape, head_size=4, rope_interleaved=False)
    assert (checkpoint.dtype, checkpoint.tied) == (dtype, False)
    wanted = RandomTensors(HALVES, False, True, seed=4)
    assert set(wanted) == set(checkpoint.tensors)
    for name in wanted:
        for i in range(2 if isinstance(checkpoint[name], list) else 1):
            read, made = (x[name][i] if isinstance(checkpoint[name], list) else x[name] for x in (checkpoint, wanted))
            np.testing.assert_array_equal(read, made.astype(read.dtype), err_msg=name)


def test_safetensors_agrees(tmp_path):
    theirs = pytest.importorskip("safetensors.numpy", reason="the safetensors package is not installed")
    write_folder(tmp_path, HALVES, "float16")
    for read, wrote in ((theirs.load_file, None), (read_safetensors, theirs.save_file)):
        path = tmp_path / "model.safetensors"
        ours = read_safetensors(path)
        if wrote:
            wrote({name: array.copy() for name, array in ours.items()}, tmp_path / "theirs.safetensors")
            path = tmp_path / "theirs.safetensors"
        found = read(path)
        assert set(found) == set(ours)
        for name, array in ours.items():
            np.testing.assert_array_equal(found[name], array)


def test_tensors_of_a_folder_are_views_of_the_mapped_file(folder):
    base = load_checkpoint(folder)["w2"][1]
    with pytest.raises(ValueError, match="read-only"):
        base[0, 0] = 1
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures=.'GPT2LMHeadModel'. is none of LlamaForCausalLM"),
        ({"architectures": None}, "architectures=None is none of"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not understood .only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not understood"),
        ({"mlp_bias": True}, "mlp_bias=True is not understood"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not understood"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.'bits': 4. is not understood"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not understood"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type='yarn' is not understood"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_scaling.type='dynamic' is not understood"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor=None is not a number"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor=-1 is not a positive number"),
        ({"rope_scaling": [1]}, "rope_scaling=.1. is not an object"),
        ({"rope_theta": "high"}, "rope_theta='high' is not a number"),
        ({"hidden_size": 16.5}, "hidden_size=16.5 is not an int"),
        ({"hidden_size": None}, "hidden_size=None is not an int"),
        ({"num_key_value_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
        ({"head_dim": 5}, "head_dim = 5 is not an even head size"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' is not a bool"),
        ({"hidden_size": 32}, r"'model.embed_tokens.weight' has shape \(400, 16\), expected \(400, 32\)"),
        ({"num_hidden_layers": 3}, "lacks the tensor 'model.layers.2.input_layernorm.weight'"),
        ({"num_hidden_layers": 1}, r"'model.layers.1.\S+' is no tensor of this LlamaForCausalLM .9 such"),
    ],
)
def test_what_is_not_understood_is_refused(folder, fields, message):
    edit(folder / "config.json", **fields)
    with pytest.raises(BadArgument, match=message):
        load_checkpoint(folder)


def test_newer_files_keep_rope_in_one_field(folder):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(folder / "config.json", rope_parameters={**llama3, "rope_theta": 5e5, "original_max_position_embeddings": 99})
    config = load_checkpoint(folder).config
    assert config.rope_theta == 5e5 and config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 99)


def test_a_window_belongs_to_mistral(folder):
    edit(folder / "config.json", sliding_window=7)
    assert load_checkpoint(folder).config.window == 0
    edit(folder / "config.json", architectures=["MistralForCausalLM"])
    assert load_checkpoint(folder).config.window == 7
    edit(folder / "config.json", sliding_window=None)
    assert load_checkpoint(folder).config.window == 0


def test_a_tied_file_may_carry_the_classifier(folder):
    edit(folder / "config.json", tie_word_embeddings=True)
    checkpoint = load_checkpoint(folder)
    assert checkpoint.tied and "wcls" not in checkpoint and checkpoint["wcls"] is checkpoint["token_embedding"]


def test_damaged_folders(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(BadArgument, match="config.json' is not JSON"):
        load_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(BadArgument, match="holds a JSON list: expected an object"):
        load_checkpoint(folder)
    write_folder(folder, HALVES, "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadArgument, match="has neither model.safetensors nor model.safetensors.index.json"):
        load_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(BadArgument, match="has no weight_map"):
        load_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "nowhere.safetensors"}}')
    with pytest.raises(BadArgument, match="safetensors file .*nowhere.safetensors': No such file"):
        load_checkpoint(folder)


def test_every_truncated_safetensors_file_is_noticed(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for keep in range(0, len(data), 101):
        path.write_bytes(data[:keep])
        with pytest.raises(BadArgument, match="safetensors file"):
            load_checkpoint(folder)


@pytest.mark.parametrize(
    "entry, message",
    [
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "'t' has dtype 'I64': only F32, F16, BF16"),
        (
            {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
            r"'t' of F32 \(3,\) needs 12 bytes, but lies at",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "but lies at 4 .. 12 of 8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "but lies at -8 .. 0 of 8"),
        ({"dtype": "F32"}, "its header is damaged"),
        ([], "its header is damaged"),
    ],
)
def test_damaged_safetensors(tmp_path, entry, message):
    header = json.dumps({"t": entry}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(BadArgument, match=message):
        read_safetensors(tmp_path / "x")


def test_bfloat16_needs_ml_dtypes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    with pytest.raises(BadArgument, match="dtype='bfloat16' needs the ml_dtypes package"):
        huggingface.numpy_dtype("bfloat16")


def test_what_ends_a_text(folder):
    assert stop_ids(folder) == {2}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert stop_ids(folder) == {5, 7} == find_tokenizer(load_checkpoint(folder)).stops
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(BadArgument, match="eos_token_id='</s>' is neither an int nor a list"):
        stop_ids(folder)


def test_json_tokenizers(folder):
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    assert tokenizer.vocab_size == 400
    for text in ["hello world", " two  spaces\n\nand lines\n", "\u00e9\u4f60\U0001f600", ""]:
        ids = tokenizer.encode(text)
        assert ids[0] == BOS and tokenizer.decode(ids) == text
        assert "".join(tokenizer.stream(ids)) == text
    smile = tokenizer.encode("\U0001f600")
    assert list(tokenizer.stream(smile)) == ["", "", "", "", "\U0001f600", ""]
    assert list(tokenizer.stream(smile[:3]))[-1] == "\ufffd"


def test_tokenizers_of_a_folder(folder, monkeypatch):
    write_tokenizer_json(folder / "tokenizer.json", 401)
    with pytest.raises(BadArgument, match="has 401 tokens, but the checkpoint's vocab_size is 400"):
        find_tokenizer(load_checkpoint(folder))
    write_tokenizer_json(folder / "tokenizer.json", 390)  # matrices are padded, often
    assert find_tokenizer(load_checkpoint(folder)).vocab_size == 390
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(BadArgument, match="tokenizer .*tokenizer.json'"):
        find_tokenizer(load_checkpoint(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadArgument, match="none of tokenizer.json, tokenizer.model is in the folder"):
        find_tokenizer(load_checkpoint(folder))
    write_tokenizer_json(folder / "tokenizer.json", 400)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(BadArgument, match="needs the tokenizers package .pip install tokenizers"):
        find_tokenizer(load_checkpoint(folder))


# ---- tokenizers ----


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def protobuf(fields):
    """[(number, int | float | bytes)] -> a message, the way sentencepiece writes it."""
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
    """The rule itself: merge the best adjacent pair, the first on a tie, until there is none."""
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
