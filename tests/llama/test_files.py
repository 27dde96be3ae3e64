"""Checkpoints: what is written is read back, and every damaged file is named."""

import os
import struct
import sys

import numpy as np
import pytest
from real_models import model_file

from flash_attn_lab.models import huggingface, synthetic
from flash_attn_lab.models.synthetic import SHAPES, RandomTensors, write_checkpoint, write_folder, write_tokenizer
from flash_attn_minimal import BadArgument
from flash_attn_minimal.llama.checkpoint import LAYERED
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.llama2c import checkpoint_bytes, save_checkpoint, tensor_shapes
from flash_attn_minimal.llama.tokenizer import load_tokenizer
from flash_attn_minimal.llama.weights import load_checkpoint

SMALL = Config(dim=16, hidden_dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=400, seq_len=32)


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
        write_folder(tmp_path / "folder", Config(*SMALL.shape, rope_interleaved=False), "float32", shards=99)
    with pytest.raises(BadArgument, match="vocab_size=300 is below 354"):
        write_tokenizer(tmp_path / "tok.bin", 300)


# ---- quantised checkpoints ----


def write_quantised(path, config, tied, group, seed=0):
    """Writes version 2 as llama2.c's export does. Returns the tensors that the file represents."""
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


# ---- the command `synthetic` ----


def test_a_folder_that_is_written_in_part_is_no_model(tmp_path, monkeypatch):
    """config.json comes last, and goes first where it is of an earlier model."""
    folder = tmp_path / "model"
    config = Config(*SMALL.shape, rope_interleaved=False)
    write_folder(folder, config, "float32")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "write_safetensors", fail)
    with pytest.raises(OSError):
        write_folder(folder, config, "float32")
    assert not (folder / "config.json").exists()
    with pytest.raises(BadArgument, match="is a folder without config.json"):
        load_checkpoint(folder)


def test_bfloat16_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert synthetic.main(["tiny", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("synthetic: bfloat16 needs the ml_dtypes package") and "give --dtype float16" in said
    assert not list(tmp_path.iterdir())
    assert synthetic.main(["tiny", str(tmp_path / "model"), "--dtype", "float16"]) == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["tiny"], "the following arguments are required: output"),
        (["tyni", "x"], "SHAPE: 'tyni' is not one of stories260K, stories15M, stories42M, stories110M, tiny, 7b"),
        (["tiny", "x", "--shards", "0"], "--shards: 0 is not positive"),
        (["tiny", "x", "--seed", "-1"], "--seed: -1 is negative"),
        (["tiny", "x", "--version", "1"], "--version 1: tiny becomes a Hugging Face folder"),
        (["stories260K", "x", "--version", "7"], "--version: '7' is not one of 0, 1"),
        (["stories260K", "x", "--shards", "2"], "--shards 2: stories260K becomes a llama2.c checkpoint"),
        (["stories260K", "/dev/null/x"], "output /dev/null/x: cannot write there"),
        (["tiny", "/dev/null/x"], "output /dev/null/x: cannot write there"),
        (["tiny", "x", "--tokenizer", "/dev/null/x"], "--tokenizer /dev/null/x: cannot write there"),
    ],
)
def test_synthetic_refuses(argv, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert synthetic.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"synthetic: {says}") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())
