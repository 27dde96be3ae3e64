"""Folders of Hugging Face: a written model is read back; settings that are not understood and damaged files are
refused."""

import json

import numpy as np
import pytest

from flash_attn_lab.models.synthetic import RandomTensors, write_folder, write_tokenizer_json
from flash_attn_minimal import BadArgument
from flash_attn_minimal.llama.config import Config, RopeScaling
from flash_attn_minimal.llama.huggingface import JsonTokenizer, read_safetensors, stop_ids
from flash_attn_minimal.llama.tokenizer import BOS
from flash_attn_minimal.llama.weights import find_tokenizer, load_checkpoint
from flash_attn_minimal.transformer._safetensors import numpy_dtype

SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=400, seq_len=32)
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
        ({"rope_parameters": [1]}, "rope_parameters=.1. is not an object"),
        (
            {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}},
            "rope_parameters.rope_type='ntk' is not underst",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor=0.5 is not under"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.rope_type=None says no kind of scaling, but factor=4.0"),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "default"}},
            "scaling.type='linear' contradicts rope_type='def",
        ),
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


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 99}
LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "fields, theta, scaling",
    [
        ({"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": LINEAR}, 5e5, LINEAR),
        ({"rope_parameters": {}, "rope_scaling": LINEAR}, 1e4, LINEAR),
        ({"rope_parameters": LINEAR, "rope_scaling": {}}, 1e4, LINEAR),
        (
            {"rope_parameters": {**LINEAR, "rope_theta": 5e5}, "rope_scaling": {"type": "linear", "factor": 4}},
            5e5,
            LINEAR,
        ),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "default"}}, 1e4, None),
        ({"rope_parameters": {"full_attention": {**LLAMA3, "rope_theta": 5e5}}}, 5e5, LLAMA3),
        ({"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LINEAR, "other": None}}, 1e4, LINEAR),
    ],
)
def test_rope_said_twice_or_for_types_of_layers(folder, fields, theta, scaling):
    edit(folder / "config.json", **fields)
    config = load_checkpoint(folder).config
    wanted = {None: None, "linear": RopeScaling("linear", 4.0), "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 99)}
    assert (config.rope_theta, config.rope_scaling) == (theta, wanted[scaling and scaling["rope_type"]])


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": LINEAR},
            "rope_scaling=.* contradicts rope_param",
        ),
        ({"rope_parameters": LLAMA3, "rope_scaling": LINEAR}, "rope_scaling=.* contradicts rope_parameters=.*llama3"),
        ({"rope_parameters": LINEAR, "rope_scaling": {**LINEAR, "factor": 2.0}}, "rope_scaling=.* contradicts"),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {**LINEAR, "rope_theta": 5e5}},
            "rope_scaling=.* contradicts rope_parameters=.'rope_theta': 10000.0.",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling.rope_type='yarn' is not understood",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": LINEAR}},
            "rope_parameters=.* differs between types of layers",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters.full_attention.rope_type='yarn' is not understood",
        ),
        (
            {"rope_parameters": {"full_attention": LINEAR, "rope_theta": 1e4}},
            "rope_parameters=.* has 'rope_theta' beside",
        ),
        (
            {"rope_parameters": LLAMA3, "original_max_position_embeddings": 98},
            "original_max_position_embeddings=98 contradicts rope_parameters.original_max_position_embeddings=99",
        ),
    ],
)
def test_rope_that_contradicts_itself_is_refused(folder, fields, message):
    edit(folder / "config.json", **fields)
    with pytest.raises(BadArgument, match=message):
        load_checkpoint(folder)


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
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, r"'t'.data_offsets=\[-8, 0\] is not a list of int"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}, r"'t'.data_offsets=\[0.0, 8.0\] is not a list"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
            r"'t'.data_offsets=\[0, 4, 8\] is not .begin, end.",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 10**30]}, "'t'.data_offsets=.0, 10+. is not a list of int"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, r"'t'.shape=\[2.0\] is not a list of integers"),
        (
            {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
            r"'t'.shape=\[-1, -2\] is not a list of int",
        ),
        ({"dtype": "F32", "shape": [[2]], "data_offsets": [0, 8]}, r"'t'.shape=\[\[2\]\] is not a list of integers"),
        ({"dtype": "F32", "shape": [1] * 65 + [2], "data_offsets": [0, 8]}, "has more than 32 axes"),
        (
            {"dtype": "F32", "shape": [0, 1 << 62, 4], "data_offsets": [0, 0]},
            "or more elements than there are addresses",
        ),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, r"'t'.dtype=\['F32'\] is not a str"),
        (
            {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "its last tensor ends at 4, but its data have 8",
        ),
        (
            {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
            "begins at 4, but the header ends at 0: .* a gap",
        ),
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
    with pytest.raises(BadArgument, match="bfloat16 needs the ml_dtypes package"):
        numpy_dtype("bfloat16")


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
