"""Hostile contents of files: each of these inputs once made a reader raise another error than BadArgument, or none."""

import json
import os
import shutil
import struct
import types

import numpy as np
import pytest

from flash_attn_lab.bench import report
from flash_attn_lab.fuzz import readers
from flash_attn_lab.models import quality, quality_report
from flash_attn_lab.models.synthetic import (
    synthetic_vocabulary,
    write_checkpoint,
    write_folder,
    write_tokenizer,
    write_tokenizer_json,
)
from flash_attn_minimal import BadArgument
from flash_attn_minimal._core import files
from flash_attn_minimal.llama import w4
from flash_attn_minimal.llama.config import Config, RopeScaling
from flash_attn_minimal.llama.generate import find_tokenizer, main
from flash_attn_minimal.llama.huggingface import JsonTokenizer, stop_ids
from flash_attn_minimal.llama.tokenizer import Tokenizer, load_tokenizer
from flash_attn_minimal.llama.weights import load_checkpoint
from flash_attn_minimal.transformer._safetensors import ALL, read_safetensors

DEEP = "[" * 100_000 + "]" * 100_000
SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=360, seq_len=32)


def refused(call, *words):
    with pytest.raises(BadArgument) as error:
        call()
    for word in words:
        assert word in str(error.value), str(error.value)[:500]


# ---- safetensors ----


def safetensors(path, header, data=b"", size=None):
    text = header.encode() if isinstance(header, str) else header
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header, words",
    [
        (DEEP, ["its header is damaged: it is nested too deeply"]),
        ('{"a": ' + DEEP + "}", ["nested too deeply"]),
        ("[]", ["its header is damaged: [] is not an object"]),
        (b"\xff\xfe{\0}\0", ["its header is damaged", "'utf-8' codec can't decode"]),
        ('{"a": 1, "a": 2}', ["'a' stands twice"]),
        ('{"a": ' + "9" * 5000 + "}", ["its header is damaged"]),
        ('{"__metadata__": {"a": 1}}', ["__metadata__ 'a'=1 is no string"]),
        ('{"__metadata__": [1]}', ["__metadata__=[1] is not a dict"]),
        ('{"__metadata__": {"crc32": "[]"}}', ["crc32", "[] is not an object"]),
        ('{"__metadata__": {"crc32": "' + DEEP + '"}}', ["crc32: it is nested too deeply"]),
    ],
)
def test_headers(tmp_path, header, words):
    refused(lambda: read_safetensors(safetensors(tmp_path / "x", header), ALL), str(tmp_path / "x"), *words)


@pytest.mark.parametrize(
    "entries, words",
    [
        ({"a": entry(0, 6), "b": entry(4, 8)}, ["tensor 'b' begins at 4, but tensor 'a' ends at 6", "overlaps"]),
        ({"a": entry(0, 8), "b": entry(0, 8)}, ["tensor 'b' begins at 0", "overlaps"]),
        ({"a": entry(0, 2), "b": entry(5, 8)}, ["tensor 'b' begins at 5, but tensor 'a' ends at 2", "gap"]),
        ({"a": entry(0, 5)}, ["its last tensor ends at 5, but its data have 8 bytes"]),
        ({"a": entry(0, 9)}, ["tensor 'a' of U8 (9,) needs 9 bytes, but lies at 0 .. 9 of 8"]),
        ({"a": entry(8, 0, [])}, ["tensor 'a' of U8 () needs 1 bytes, but lies at 8 .. 0"]),
        ({"a": entry(0, 8, [True, 8])}, ["'a'.shape=[True, 8] is not a list of integers"]),
    ],
)
def test_offsets(tmp_path, entries, words):
    path = safetensors(tmp_path / "x", json.dumps(entries), bytes(8))
    refused(lambda: read_safetensors(path, ALL), repr(str(path)), *words)


def test_what_tiles_the_data_is_read(tmp_path):
    entries = {"b": entry(5, 8), "empty": entry(5, 5, [0, 7]), "a": entry(0, 5), "one": entry(8, 9, [])}
    found = read_safetensors(safetensors(tmp_path / "x", json.dumps(entries), bytes(range(9))), ALL)
    assert found["a"].tolist() == [0, 1, 2, 3, 4] and found["b"].tolist() == [5, 6, 7]
    assert found["empty"].shape == (0, 7) and found["one"].shape == () and found["one"] == 8


@pytest.mark.parametrize("size", [1 << 20, 1 << 62, (1 << 64) - 1])
def test_lengths_of_headers(tmp_path, size):
    path = safetensors(tmp_path / "x", "{}", size=size)
    refused(lambda: read_safetensors(path), f"its header would end at byte {8 + size}, but the file has 10")


def test_a_header_of_the_file_s_length_is_not_read_as_a_whole(tmp_path):
    path = safetensors(tmp_path / "x", "{}", size=200_000_000)
    os.truncate(path, 300_000_000)  # sparse: no memory and no disk
    refused(lambda: read_safetensors(path), "its header would have 200000000 bytes, more than 100000000")


# ---- 4-bit files ----


@pytest.fixture
def saved(tmp_path):
    write_tokenizer(tmp_path / "tok.bin", SMALL.vocab_size)
    readers.write_w4(tmp_path / "m.safetensors", SMALL, tmp_path / "tok.bin")
    return tmp_path / "m.safetensors"


def rewrite(path, key, change):
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    about = json.loads(header["__metadata__"][key])
    change(about)
    header["__metadata__"][key] = json.dumps(about)
    safetensors(path, json.dumps(header), data[start:])


def test_the_small_file_is_read(saved):
    checkpoint = load_checkpoint(saved)
    assert checkpoint.kept == {(1, "w2")} and checkpoint.stops == {2}
    assert find_tokenizer(checkpoint).vocab_size == SMALL.vocab_size


@pytest.mark.parametrize(
    "about, words",
    [
        ({"version": True}, ["version=True is not an int"]),
        ({"version": 1.0}, ["version=1.0 is not an int"]),
        ({"tied": 1}, ["tied=1 is not a bool"]),
        ({"biases": "no"}, ["biases='no' is not a bool"]),
        ({"weights": ["nvfp4"]}, ["weights=['nvfp4'] is not a str"]),
        ({"source": 7}, ["source=7 is not a str"]),
        ({"stops": [2.5]}, ["stops=[2.5] is not a list of integers"]),
        ({"stops": {}}, ["stops={} is not a list"]),
        ({"kept": [[0, "w2"]]}, ["kept=[[0, 'w2']] is not a list of matrices"]),
        ({"kept": ["9.w2"]}, ["kept=(9, 'w2') is no matrix"]),
        ({"kept": ["-1.w2"]}, ["kept=['-1.w2'] is not a list of matrices"]),
        ({"tokenizer": "tok.bin"}, ["tokenizer='tok.bin' is not a dict"]),
        ({"tokenizer": {"file": 3, "sha256": ""}}, ["tokenizer.file=3 is not a str"]),
        ({"tokenizer": {"file": "tok.bin"}}, ["tokenizer.sha256=None is not a str"]),
    ],
)
def test_metadata_of_4_bit_files(saved, about, words):
    rewrite(saved, w4.KEY, lambda found: found.update(about))
    refused(lambda: load_checkpoint(saved), repr(str(saved)), *words)


@pytest.mark.parametrize(
    "config, words",
    [
        ({"dim": 16.0}, ["dim=16.0 is outside 1 .. 16777216"]),
        ({"n_layers": "2"}, ["n_layers='2' is outside"]),
        ({"n_layers": 1 << 24}, ["n_layers=16777216, but it holds"]),  # no name is made for each
        ({"head_size": 4.0}, ["head_size=4.0 is outside"]),
        ({"window": -1}, ["window=-1 is outside"]),
        ({"rms_eps": None}, ["rms_eps=None is not a number"]),
        ({"rope_theta": 0}, ["rope_theta=0 is not a number from 1e-30 to 1e+30"]),
        ({"rope_theta": 10**400}, ["rope_theta=1000", "is not a number"]),
        ({"rope_interleaved": 1}, ["rope_interleaved=1 is not a bool"]),
        ({"rope_scaling": [1]}, ["rope_scaling=[1] is not an object"]),
        ({"rope_scaling": {"kind": "yarn", "factor": 2.0}}, ["rope_scaling: kind='yarn' is neither"]),
        ({"rope_scaling": {"kind": "linear"}}, ["its metadata are damaged: config:", "'factor'"]),
        ({"colour": 3}, ["its metadata are damaged: config:", "'colour'"]),
    ],
)
def test_configs_of_4_bit_files(saved, config, words):
    rewrite(saved, w4.KEY, lambda found: found["config"].update(config))
    refused(lambda: load_checkpoint(saved), repr(str(saved)), *words)


@pytest.mark.parametrize("text", ["[" * 3000, "3", '{"version": 1, "version": 1}', "{"])
def test_metadata_that_are_no_object(saved, text):
    data = saved.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    for key in (w4.KEY, w4.FORMATS_KEY):
        header = json.loads(data[8:start])
        header["__metadata__"][key] = text
        safetensors(saved, json.dumps(header), data[start:])
        refused(lambda: load_checkpoint(saved), repr(str(saved)), "its metadata are damaged")


def test_formats_of_4_bit_files(saved):
    name = "layers.0.wo"
    for change, words in (
        ({"in_features": 16.0}, [f"'{name}'.in_features=16.0 is not an int"]),
        ({"format": ["nvfp4"]}, [f"'{name}'.format=['nvfp4'] is not a str"]),
        ({"format": "nvfp4", "in_features": 10**30}, [f"weight '{name}': in_features=1000", "is outside"]),
    ):
        rewrite(saved, w4.FORMATS_KEY, lambda found, change=change: found[name].update(change))
        refused(lambda: load_checkpoint(saved), *words)


@pytest.mark.parametrize("file", ["/etc/hostname", "../tok.bin", "a/../../tok.bin", "", ".", "out/tok.bin", "t\0k"])
def test_tokenizers_outside_of_the_folder(saved, tmp_path, file):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "out").symlink_to(tmp_path)
    path = shutil.copy(saved, inside / saved.name)
    rewrite(inside / saved.name, w4.KEY, lambda found: found["tokenizer"].update(file=file))
    refused(lambda: find_tokenizer(load_checkpoint(path)), repr(str(path)), "is not inside its folder", "--tokenizer")


def test_a_tokenizer_elsewhere_is_copied_beside_the_checkpoint(saved, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for _ in range(2):  # once more, over the copy
        readers.write_w4(out / "model.safetensors", SMALL, tmp_path / "tok.bin")
    assert (out / "model.tok.bin").read_bytes() == (tmp_path / "tok.bin").read_bytes()
    assert find_tokenizer(load_checkpoint(out / "model.safetensors")).vocab_size == SMALL.vocab_size
    assert load_checkpoint(saved).tokenizer["file"] == "tok.bin" and not (tmp_path / "m.tok.bin").exists()


# ---- folders ----


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path, Config(*SMALL.shape, rope_interleaved=False), "float32", tied=True)
    return tmp_path


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"rope_theta": 0}, ["rope_theta=0 is not a positive number"]),
        ({"rope_theta": 10**400}, ["rope_theta=1000", "is not a positive number"]),
        ({"rope_theta": 1e-300}, ["rope_theta=1e-300 is not a positive number"]),
        ({"rope_theta": float("nan")}, ["rope_theta=nan is not a positive number"]),
        ({"rope_theta": True}, ["rope_theta=True is not a number"]),
        ({"rms_norm_eps": float("inf")}, ["rms_norm_eps=inf is not a positive number"]),
        ({"rope_scaling": {"rope_type": ["linear"]}}, ["rope_scaling.rope_type=['linear'] is not understood"]),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, ["rope_scaling.factor=1000"]),
        ({"num_hidden_layers": 1 << 24}, ["num_hidden_layers=16777216, but its files hold 20 tensors"]),
        ({"num_hidden_layers": -1}, ["n_layers=-1 is outside"]),
        ({"hidden_size": 10**400}, ["dim=1000", "is outside 1 .. 16777216"]),
        ({"num_attention_heads": 0}, ["n_heads=0 is outside"]),
        ({"head_dim": -4}, ["head_size=-4 is outside"]),
        ({"architectures": [["LlamaForCausalLM"]]}, ["architectures=[['LlamaForCausalLM']] is none of"]),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 10**30}, ["window=1000", "is outside"]),
    ],
)
def test_configs(folder, fields, words):
    edit(folder / "config.json", **fields)
    refused(lambda: load_checkpoint(folder), str(folder), *words)


def test_llama3_contexts(folder):
    for context in (0, -8, 1 << 60):
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        edit(folder / "config.json", rope_scaling={**scaling, "original_max_position_embeddings": context})
        refused(lambda: load_checkpoint(folder), str(folder), f"original_context={context} is outside")


def test_angles_of_every_constant_that_is_read_are_finite():
    for theta in (1e-30, 1e30):
        for factor in (1e-30, 1e30):
            for scaling in (RopeScaling("linear", factor), RopeScaling("llama3", factor, 1e-30, 1e30, 1 << 24)):
                config = Config(*SMALL.shape, rope_theta=theta, rope_scaling=scaling)
                assert config.problem() is None
                assert all(np.isfinite(table).all() for table in config.rope_tables(64))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "data, word",
    [
        (DEEP.encode(), "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b'{"\xff": 1}', "'utf-8' codec can't decode"),
        (b'{"a": 1, "a": 2}', "'a' stands twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not JSON"),
    ],
)
def test_json_files(folder, name, data, word):
    (folder / name).write_bytes(data)
    refused(lambda: (stop_ids(folder), load_checkpoint(folder)), repr(str(folder / name)), word)


def test_a_json_file_is_not_read_at_any_size(folder):
    os.truncate(folder / "config.json", 1 << 40)  # sparse
    refused(lambda: load_checkpoint(folder), "config.json", f"has {1 << 40} bytes")
    os.truncate(folder / "config.json", 0)
    refused(lambda: load_checkpoint(folder), "config.json' is not JSON")


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "../model.safetensors", "a/../../model.safetensors", "link/model.safetensors", "", ".", "a\0"],
)
def test_shards_outside_of_the_folder(folder, tmp_path, file):
    (folder / "a").mkdir()
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere")
    elsewhere.mkdir()
    shutil.copy(folder / "model.safetensors", elsewhere)
    (folder / "link").symlink_to(elsewhere)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x.weight": file}}))
    refused(
        lambda: load_checkpoint(folder), "index.json", f"weight_map 'x.weight'={file!r}", "inside the model's folder"
    )


def test_shards_below_the_folder_and_linked_ones_are_read(folder):
    """Caches of models have links from a file's name to the place of its contents."""
    names = list(read_safetensors(folder / "model.safetensors"))
    (folder / "sub").mkdir()
    (folder / "model.safetensors").rename(folder / "sub" / "all.safetensors")
    for file in ("sub/all.safetensors", "linked.safetensors"):
        if file == "linked.safetensors":
            outside = folder.with_name(f"{folder.name}-blob")
            (folder / "sub" / "all.safetensors").rename(outside)
            (folder / file).symlink_to(outside)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, file)}))
        assert load_checkpoint(folder).config.dim == 16


# ---- tokenizers ----


@pytest.fixture
def tokenizer_json(tmp_path):
    pytest.importorskip("tokenizers", reason="the tokenizers package is not installed")
    write_tokenizer_json(tmp_path / "tokenizer.json", SMALL.vocab_size)
    return tmp_path / "tokenizer.json"


TABLE = {"type": "Precompiled", "precompiled_charsmap": "/////w=="}  # the table would have 4 GiB
CHUNKS = {"type": "FixedLength", "length": 0}
STRIP = {"type": "Strip", "content": "a", "start": 99, "stop": 99}


@pytest.mark.parametrize(
    "part, words",
    [
        ({"normalizer": TABLE}, ["precompiled_charsmap='/////w==' has 4 bytes, fewer than the table of 4294967295"]),
        ({"normalizer": {"type": "Sequence", "normalizers": [TABLE]}}, ["fewer than the table of 4294967295"]),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!"}}, ["precompiled_charsmap='!'"]),
        ({"decoder": STRIP}, ["index"]),  # these two make the package's Rust code panic
        ({"model": {"type": "BPE", "vocab": {"a": 9}, "merges": ["a a"]}}, []),
    ],
)
def test_tokenizer_json(tokenizer_json, part, words):
    edit(tokenizer_json, **part)

    def read():
        tokenizer = JsonTokenizer(tokenizer_json)
        tokenizer.decode(tokenizer.encode("a word"))

    refused(read, f"tokenizer {str(tokenizer_json)!r}", *words)


def test_escaped_letters_hide_no_table(tokenizer_json):
    edit(tokenizer_json, normalizer=TABLE)
    tokenizer_json.write_text(tokenizer_json.read_text().replace('"precompiled_', '"\\u0070recompiled_'))
    refused(lambda: JsonTokenizer(tokenizer_json), "fewer than the table")


@pytest.mark.parametrize("data", [b"\xff", DEEP.encode(), b"", b"[]", b'{"version": "1.0"}'])
def test_tokenizer_json_of_other_bytes(tokenizer_json, data):
    tokenizer_json.write_bytes(data)
    refused(lambda: JsonTokenizer(tokenizer_json), repr(str(tokenizer_json)))


def test_a_text_is_neither_cut_nor_filled_up(tokenizer_json):
    """A text is neither cut nor filled up, and 2^50 tokens of padding do not end the process."""
    plain = JsonTokenizer(tokenizer_json).encode("once upon a time")
    padding = {"strategy": {"Fixed": 1 << 50}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0}
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    edit(tokenizer_json, padding={**padding, "pad_type_id": 0, "pad_token": "x"}, truncation=truncation)
    assert JsonTokenizer(tokenizer_json).encode("once upon a time") == plain and len(plain) > 5


def test_interrupts_pass_through_the_tokenizers_package(tokenizer_json):
    tokenizer = JsonTokenizer(tokenizer_json)
    panic = type("PanicException", (BaseException,), {})
    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (SystemExit(3), SystemExit)):
        tokenizer._tokenizer = types.SimpleNamespace(encode=lambda text, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(expected):
            tokenizer.encode("a")
    tokenizer._tokenizer = types.SimpleNamespace(encode=lambda text: (_ for _ in ()).throw(panic("unwrap on None")))
    refused(lambda: tokenizer.encode("a word"), repr(str(tokenizer_json)), "text 'a word'", "unwrap on None")


def test_prompts_that_are_no_text(tokenizer_json, tmp_path, capsys):
    write_checkpoint(tmp_path / "model.bin", SMALL)
    write_tokenizer(tmp_path / "tok360.bin", SMALL.vocab_size)
    plain = Tokenizer(*synthetic_vocabulary(SMALL.vocab_size))
    refused(lambda: plain.encode("a\ud800b"), "text 'a\\ud800b' holds '\\ud800'")
    for text in ("a\ud800b", "a\udcffb"):
        refused(lambda text=text: JsonTokenizer(tokenizer_json).encode(text), f"text {text!r}")
    argv = [str(tmp_path / "model.bin"), "--prompt", "a\ud800b", "--device", "cpu"]
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "text 'a\\ud800b'" in err


def test_a_checkpoint_given_as_a_tokenizer_is_not_read_as_a_whole(tmp_path):
    (tmp_path / "tok.bin").write_bytes(b"\x07\0\0\0")
    os.truncate(tmp_path / "tok.bin", 1 << 40)
    refused(lambda: load_tokenizer(tmp_path / "tok.bin"), "tok.bin", f"has {1 << 40} bytes")


# ---- names ----


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "a\0b.safetensors", "\ud800.safetensors", "n" * 300, "\udcff.bin"])
def test_names_that_no_file_can_have(tmp_path, name):
    calls = [load_checkpoint, load_tokenizer, read_safetensors, report.read]
    calls.append(lambda path: quality.find_text(types.SimpleNamespace(path="x"), None, 64, path=path))
    if readers.HAS_TOKENIZERS:
        calls.append(JsonTokenizer)
    for call in calls:
        refused(lambda call=call: call(tmp_path / name), "" if call is report.read else ascii(name)[1:-1])


def test_a_name_that_is_no_utf_8(tmp_path, capsys):
    path = os.fsencode(tmp_path) + b"/\xff.bin"
    write_checkpoint(os.fsdecode(path), SMALL)
    assert load_checkpoint(os.fsdecode(path)).config == SMALL
    assert main([os.fsdecode(path), "--device", "cpu"]) == 2  # no tokenizer beside it
    assert "tok360.bin" in capsys.readouterr().err
    os.truncate(path, 100)
    refused(lambda: load_checkpoint(os.fsdecode(path)), "\\udcff.bin' is truncated")


def test_a_disk_that_fails_is_one_line(monkeypatch, capsys):
    def fail(*_):
        raise OSError(5, "Input/output error", "model.bin")

    monkeypatch.setattr("flash_attn_minimal.llama.generate.load_checkpoint", fail)
    assert main(["model.bin", "--device", "cpu"]) == 1
    assert capsys.readouterr() == ("", "generate: [Errno 5] Input/output error: 'model.bin'\n")


# ---- uses of a model, and of results ----


def test_reports_of_a_damaged_model(tmp_path):
    assert quality.Loss(1e4, 0.0, 0.0, 0.0).row()["perplexity"] == float("inf")
    assert (
        quality._share(0.0, 0.0) == 0 and quality._share(1.0, 0.0) == float("inf") and quality._share(1.0, 2.0) == 0.5
    )
    data = {"model": "\udcff.bin", "command": "", "budget": 1.0, "rows": [], "formats": {"int4": {"matrices": []}}}
    data["text"] = {"judged_with": 1, "window": 1, "source": "x"}
    assert "\\udcff.bin" in quality_report.write(data, tmp_path / "r.json")[1].read_text()
    refused(lambda: quality_report.write(data, tmp_path / "a\0b.json"), "report", "a\\x00b.json")


@pytest.mark.parametrize(
    "change, word",
    [
        ({"rows": None}, "not iterable"),
        ({"machine": []}, "not a result of `bench`"),
        ({"rows": [{"pass": "step", "us": 1}]}, "it lacks"),
        ({"rows": [3]}, "not a result of `bench`"),
        ({"machine": {}}, "it lacks 'host'"),
        ({"left_out": [{"system": "x"}]}, "it lacks 'reason'"),
    ],
)
def test_results_of_bench(tmp_path, change, word):
    path = tmp_path / "x.json"
    path.write_text(json.dumps({**readers.RESULT, **change}))
    refused(lambda: report.read(path), str(path), word)
    path.write_text(DEEP)
    refused(lambda: report.read(path), str(path), "nested too deeply")


def test_what_is_quoted_is_short():
    nested = []
    for _ in range(500):
        nested = [nested]
    for value in (nested, "a" * 10**6, 10**4000, list(range(10**5)), {i: i for i in range(1000)}, b"x" * 10**6):
        assert len(files.quoted(value)) < 700
    assert files.quoted("\ud800") == "'\\ud800'" and files.quoted(["a", 1.5]) == "['a', 1.5]"


def test_headers_of_llama2c(tmp_path):
    """Version, shape and group are compared with the file's size before they are used to allocate memory or to
    divide."""
    rng = np.random.default_rng(0)
    path = tmp_path / "model.bin"
    values = [-(1 << 31), -1, 0, 1, 2, 8, 1 << 24, (1 << 31) - 1]
    for _ in range(300):
        numbers = [int(x) for x in rng.choice(values, 9)]
        magic = struct.pack("<4si", b"24ka", int(rng.integers(0, 4))) if rng.random() < 0.7 else b""
        path.write_bytes((magic + struct.pack("<7ibi", *numbers[:7], numbers[7] % 2, numbers[8])).ljust(300, b"\0"))
        refused(lambda: load_checkpoint(path), repr(str(path)))
