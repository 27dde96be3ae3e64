"""Models with 4-bit weights: their file and its refusals, the measurements of the quality report, the choice of
matrices that are not quantized, and the engine, compared with the same numbers in float32."""

import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from w4_models import CONFIG, KEPT, TOLERANCE, decoded, logits, model

from flash_attn_lab import reference_w4 as reference
from flash_attn_lab.models import compare, measure, quality
from flash_attn_lab.models.huggingface import save_folder
from flash_attn_lab.models.standard import Host
from flash_attn_lab.models.synthetic import RandomTensors, write_tokenizer
from flash_attn_minimal import BadArgument
from flash_attn_minimal.llama import cuda, quantize, w4
from flash_attn_minimal.llama.cache import KVCache
from flash_attn_minimal.llama.checkpoint import STACKED
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.generate import main as generate
from flash_attn_minimal.llama.generate import open_device, with_weights
from flash_attn_minimal.llama.model import Llama, Rows
from flash_attn_minimal.llama.weights import DEFAULT_CHECKPOINT, find_tokenizer, load_checkpoint
from flash_attn_minimal.transformer._safetensors import ALL, read_metadata, read_safetensors, write_safetensors
from flash_attn_minimal.transformer.quantized import W4Weight

pytest.importorskip("ml_dtypes")

FORMATS = list(w4.FORMATS)


# ---- the file ----


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("kept", [frozenset(), KEPT], ids=["all", "mixed"])
@pytest.mark.parametrize("form", ["tied", "untied", "biases"])
def test_file_holds_the_bits_of_the_format(tmp_path, weights, kept, form):
    source = model(tied=form != "untied", biases=form == "biases")
    quantized = w4.quantize(source, weights, kept)
    w4.save(tmp_path / "m.safetensors", quantized)
    found = load_checkpoint(tmp_path / "m.safetensors")
    assert (found.weights, found.kept, found.config, found.tied) == (weights, kept, source.config, source.tied)
    for layer in range(CONFIG.n_layers):
        for name, parts in STACKED.items():
            whole = np.concatenate([source[part][layer] for part in parts])
            got = found[name][layer]
            if (layer, name) in kept:
                assert got.dtype.name == "bfloat16"
                np.testing.assert_array_equal(got, whole.astype(got.dtype))
                continue
            codes, scales, tensor_scale = reference.quantize(whole, weights)
            exact = reference.dequantize(codes, scales, tensor_scale, weights, whole.shape[1])
            np.testing.assert_array_equal(got.dequantize("float32"), exact)
        for name in ("rms_att", "rms_ffn", *(("bq", "bk", "bv") if form == "biases" else ())):
            np.testing.assert_array_equal(found[name][layer], source[name][layer])
    embedding = source["token_embedding"].astype(found["token_embedding"].dtype)
    np.testing.assert_array_equal(found["token_embedding"], embedding)
    np.testing.assert_array_equal(
        logits(found, Host("standard")), logits(quantized, Host("standard"))
    ) if False else None


@pytest.mark.parametrize("weights", FORMATS)
def test_bytes_are_those_of_the_format(tmp_path, weights):
    config = Config(dim=256, hidden_dim=512, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=300, seq_len=16)
    quantized = w4.quantize(model(config), weights)
    w4.save(tmp_path / "m.safetensors", quantized)
    parts = quantize.tensor_bytes(quantized)
    count = config.n_layers * sum(rows * columns for rows, columns in w4.stacked_shapes(config).values())
    scale = {"nvfp4": 1 / 16, "mxfp4": 1 / 32, "int4": 2 / 128}[weights]
    assert parts["codes"] * 8 == count * 4  # 87.5 % less than float32
    assert parts["scales"] == count * scale + 4 * config.n_layers * len(STACKED)
    assert parts["kept"] == 0
    size = (tmp_path / "m.safetensors").stat().st_size
    assert sum(parts.values()) < size < sum(parts.values()) + 8192  # and the header


def test_models_of_hugging_face_keep_their_16_bits(tmp_path):
    config = replace(CONFIG, rope_interleaved=False)
    save_folder(tmp_path / "folder", config, RandomTensors(config, False, seed=3), "float16", tied=False)
    source = load_checkpoint(tmp_path / "folder")
    w4.save(tmp_path / "m.safetensors", w4.quantize(source, "nvfp4", KEPT))
    found = load_checkpoint(tmp_path / "m.safetensors")
    assert found.dtype == "float16" and not found.config.rope_interleaved
    np.testing.assert_array_equal(found["w2"][2], source["w2"][2])
    np.testing.assert_array_equal(found["wcls"], source["wcls"])


@pytest.fixture
def saved(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.bin", CONFIG.vocab_size)
    path = tmp_path / "m.safetensors"
    w4.save(path, w4.quantize(model(), "nvfp4", KEPT), tmp_path / "tokenizer.bin")
    return path


def rewrite(path, tensors=None, types=None, about=None):
    """Rewrites the file with some parts changed, and right checksums."""
    metadata, found = read_metadata(path), read_safetensors(path, ALL)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    shapes = {name: (header[name]["dtype"], tuple(header[name]["shape"])) for name in found}
    for name, array in (tensors or {}).items():
        if array is None:
            del found[name], shapes[name]
        else:
            shapes[name] = ((types or {}).get(name, "F32"), array.shape)
            found[name] = array
    metadata[w4.KEY] = json.dumps(json.loads(metadata[w4.KEY]) | (about or {}))
    write_safetensors(path, [(n, np.array(a)) for n, a in found.items()], shapes, metadata)


def zeros(*shape):
    return np.zeros(shape, np.float32)


MISMATCHED = {
    "no scales": ({"tensors": {"layers.1.wo.scales": None}}, "it lacks the tensor 'layers.1.wo.scales'"),
    "no norm": ({"tensors": {"rms_final": None}}, r"lacks the tensor 'rms_final', float32 \(40,\)"),
    "wide and narrow": (
        {"tensors": {"layers.1.wo": zeros(40, 40)}},
        r"tensor 'layers.1.wo' is float32 \(40, 40\): expected nvfp4",
    ),
    "short norm": (
        {"tensors": {"rms_final": zeros(39)}},
        r"tensor 'rms_final' is float32 \(39,\): expected .* \(40,\)",
    ),
    "codes": ({"tensors": {"layers.0.w13.codes": zeros(112, 20)}}, "weight 'layers.0.w13': codes is float32"),
    "one more": ({"tensors": {"more": zeros(3)}}, r"'more' is no tensor of this model \(1 such\)"),
    "other format": (
        {"about": {"weights": "mxfp4"}},
        r"tensor 'layers.0.wo' is nvfp4 \(40, 40\): expected mxfp4 \(40, 40\)",
    ),
    "unknown format": ({"about": {"weights": "nvfp5"}}, "weights='nvfp5'"),
    "version": ({"about": {"version": 9}}, "version=9 is not 1"),
    "kept": ({"about": {"kept": ["3.w2"]}}, r"kept=\(3, 'w2'\) is no matrix of the model"),
    "kept is a number": ({"about": {"kept": 3}}, "its metadata are damaged"),
    "config": ({"about": {"config": {"dim": 3}}}, "its metadata are damaged"),
}


@pytest.mark.parametrize("case", MISMATCHED)
def test_mismatched_files_are_refused(saved, case):
    change, message = MISMATCHED[case]
    rewrite(saved, **change)
    with pytest.raises(BadArgument, match=message) as error:
        load_checkpoint(saved)
    assert "m.safetensors" in str(error.value)


def test_every_damaged_tensor_is_noticed(saved):
    good = saved.read_bytes()
    start = 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:start])
    for name in header.keys() - {"__metadata__"}:
        begin, end = (start + at for at in header[name]["data_offsets"])
        bad = bytearray(good)
        bad[(begin + end) // 2] ^= 1
        saved.write_bytes(bad)
        with pytest.raises(BadArgument, match=f"m.safetensors.*{re.escape(repr(name))} is damaged: its CRC-32"):
            load_checkpoint(saved)
    saved.write_bytes(good[:-1])
    with pytest.raises(BadArgument, match="m.safetensors.*truncated or damaged"):
        load_checkpoint(saved)
    saved.write_bytes(good[:start] + good[start + 4 :])
    with pytest.raises(BadArgument, match="m.safetensors"):
        load_checkpoint(saved)


def test_foreign_safetensors_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    write_safetensors(path, [("t", np.zeros(2, np.float32))], {"t": ("F32", (2,))})
    with pytest.raises(BadArgument, match="x.safetensors.*holds no 4-bit weights of this package"):
        load_checkpoint(path)
    weight = W4Weight.quantize(np.ones((3, 16), np.float32))
    weight.save(path)
    with pytest.raises(BadArgument, match="x.safetensors.*not written by `python -m flash_attn_minimal quantize`"):
        load_checkpoint(path)


def test_the_tokenizer_is_found_again(saved, tmp_path):
    assert find_tokenizer(load_checkpoint(saved)).vocab_size == CONFIG.vocab_size
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    saved.rename(moved / "m.safetensors")
    with pytest.raises(BadArgument, match="tokenizer 'tokenizer.bin' of checkpoint .* is not there"):
        find_tokenizer(load_checkpoint(moved / "m.safetensors"))
    write_tokenizer(moved / "tokenizer.bin", CONFIG.vocab_size, seed=1)
    with pytest.raises(BadArgument, match="tokenizer.bin' is not the one of checkpoint .*: its sha256"):
        find_tokenizer(load_checkpoint(moved / "m.safetensors"))
    given = find_tokenizer(load_checkpoint(moved / "m.safetensors"), str(moved / "tokenizer.bin"))
    assert given.vocab_size == CONFIG.vocab_size


# ---- measurements ----


@pytest.fixture(scope="module")
def text():
    windows = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (5, 25)).astype(np.int32)
    return quality.Text(model(), windows)


def test_errors_are_what_they_say(text, monkeypatch):
    monkeypatch.setattr(text, "batch", 2)  # windows in several parts, the last one shorter
    errors = quality.measure(text, "mxfp4")
    assert [m.place for m in errors.matrices] == [(i, name) for i in range(CONFIG.n_layers) for name in STACKED]
    norm = np.linalg.norm
    x = text.embed()
    for i in range(CONFIG.n_layers):
        stored = text.stored(i)
        layer = text.sixteen(stored)
        y = text.block(layer, x)
        decoded = {}
        for name in STACKED:
            w = getattr(stored, name)
            decoded[name] = reference.dequantize(*reference.quantize(w, "mxfp4"), "mxfp4", w.shape[1])
            found = errors.matrices[4 * i + list(STACKED).index(name)]
            assert found.error == pytest.approx(norm(decoded[name] - w) / norm(w), rel=1e-5)
            assert 0.05 < found.error < 0.2 and found.weights == w.size
            got = text.block(replace(layer, **{name: decoded[name]}), x)
            assert found.block_error == pytest.approx(norm(got - y) / norm(y - x), rel=1e-4)
        whole = text.block(replace(layer, **decoded), x)
        assert errors.blocks[i] == pytest.approx(norm(whole - y) / norm(y - x), rel=1e-4)
        x = y


def test_losses_are_those_of_the_model(text):
    """Losses are compared with the engine's forward pass, window by window, with one more token each time."""
    errors = quality.measure(text, "nvfp4")
    found = text.run({"four": errors.change(), "none": errors.change(m.place for m in errors.matrices)}, "stored")
    seqlen, device = text.windows.shape[1] - 1, Host("standard")

    def nats(checkpoint):
        llama, rows = Llama(checkpoint, device), []
        cache = KVCache(device, CONFIG, 1, seqlen)
        for window in text.windows:
            for n in range(1, seqlen + 1):
                tokens = Rows(window[None, :n], np.zeros(1, np.int32), None, 0, n)
                rows.append(llama.forward(tokens, cache)[0])
        z = np.array(rows, np.float64)
        return z - np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1, keepdims=True)) - z.max(-1, keepdims=True)

    targets = text.windows[:, 1:].reshape(-1)
    at = np.arange(len(targets))
    exact = nats(text.checkpoint)
    assert found["stored"].nats == pytest.approx(-exact[at, targets].mean(), rel=1e-5)

    def rounded(checkpoint):
        tensors = {name: checkpoint.tensors[name] for name in checkpoint.tensors}
        for name in ("token_embedding", *sum(STACKED.values(), ())):
            array = checkpoint.tensors[name]
            tensors[name] = text.rounded(array) if name == "token_embedding" else [text.rounded(a) for a in array]
        return replace(checkpoint, tensors=tensors)

    sixteen = nats(rounded(text.checkpoint))
    assert found[""].nats == pytest.approx(-sixteen[at, targets].mean(), rel=1e-5)
    quantized = decoded(w4.quantize(text.checkpoint, "nvfp4"))
    quantized.tensors["token_embedding"] = text.rounded(text.checkpoint["token_embedding"])
    four = nats(quantized)
    mine = found["four"]
    assert mine.nats == pytest.approx(-four[at, targets].mean(), rel=1e-5)
    apart = (sixteen - four)[at, targets].mean()
    assert mine.rise == pytest.approx(100 * np.expm1(apart), rel=1e-2, abs=1e-3)
    assert mine.divergence == pytest.approx((np.exp(sixteen) * (sixteen - four)).sum(-1).mean(), rel=1e-2)
    assert (found["none"].rise, found["none"].divergence) == (0, 0)


@pytest.mark.parametrize("curve", [False, True])
def test_the_choice_is_the_least_that_holds_the_budget(text, curve):
    errors = quality.measure(text, "int4")
    order = sorted(errors.matrices, key=lambda m: -(m.block_error**2) / m.weights)
    rise = [text.run({"x": errors.change(m.place for m in order[:n])})["x"].rise for n in range(len(order) + 1)]
    assert rise[-1] == 0
    for budget in (100.0, abs(rise[0]) / 2, 0.0):
        chosen = quality.choose(text, errors, budget, curve)
        assert chosen.kept == {m.place for m in order[: len(chosen.kept)]}
        count = len(chosen.kept)
        assert rise[count] <= budget and (count == 0 or rise[count - 1] > budget)
        if curve:
            assert {point["kept"] for point in chosen.curve} >= {0, 2, 4, 6, 8, 10}
            assert chosen.curve[0]["rise"] == pytest.approx(rise[0], abs=1e-4)


def test_text_becomes_windows():
    tokenizer = find_tokenizer(load_checkpoint(DEFAULT_CHECKPOINT))
    pieces = ["One day, a girl named Mia went to the park.", "Dan was sad."]
    ids = [t for piece in pieces for t in tokenizer.encode(piece)]
    windows = quality.read_windows("\n\n\n".join(pieces) + "\n", tokenizer, 8, 1000)
    assert windows.shape[1] == 9 and len(windows) == (len(ids) - 1) // 8
    for i, window in enumerate(windows):
        assert list(window) == ids[8 * i : 8 * i + 9]
    with pytest.raises(BadArgument, match=r"the text has 5 tokens: at least 17 are needed"):
        quality.read_windows("Dan was sad.", tokenizer, 8, 1000)


def test_a_model_writes_its_own_text():
    checkpoint = load_checkpoint(DEFAULT_CHECKPOINT)
    tokenizer = find_tokenizer(checkpoint)
    windows = quality.write_windows(checkpoint, tokenizer, 600, seed=5)
    assert windows.shape == (2, 257) and (windows[:, 0] == 1).all()
    np.testing.assert_array_equal(windows, quality.write_windows(checkpoint, tokenizer, 600, seed=5))
    assert (windows != quality.write_windows(checkpoint, tokenizer, 600, seed=6)).any()


# ---- the engine ----

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(bool(WHY_NOT := cuda.reason_against()), reason=WHY_NOT or "")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("weights", FORMATS)
def test_the_engine_multiplies_what_the_bits_stand_for(device, attention, dtype, weights):
    config = replace(CONFIG, dim=172, hidden_dim=130, n_heads=2, n_kv_heads=1)  # no multiples of the blocks
    source = model(config, tied=False)
    quantized = w4.quantize(source, weights, KEPT)
    opened = compare.open_device(device, dtype, "float32", "auto", weights, attention=attention)
    assert opened.matrix_dtype.name == dtype
    llama = Llama(quantized, opened)
    assert len(llama.packed) == 4 * CONFIG.n_layers - len(KEPT)
    got, exact = logits(quantized, opened), logits(decoded(quantized), Host("standard"))
    error = np.abs(got - exact).max() / exact.std()
    assert error < TOLERANCE[dtype]
    other = logits(source, Host("standard"))
    assert np.abs(other - exact).max() / exact.std() > 2 * TOLERANCE[dtype]  # 4 bits change more than rounding does


@pytest.mark.parametrize("device", DEVICES)
def test_a_quantised_model_writes_a_story(device):
    """A model from a file and one quantised while loading, alone and in a batch, on pages, give the same tokens."""
    source = load_checkpoint(DEFAULT_CHECKPOINT)
    found = []
    for max_batch, page_size in ((1, None), (3, 16)):
        opened = open_device(device, weights="mxfp4", dtype="float16")
        engine = Engine(Llama(with_weights(source, "mxfp4", opened), opened), max_batch, 64, page_size)
        requests = [engine.add([1, *range(300, 300 + i)], 40) for i in range(3)]
        engine.run()
        found.append([request.tokens for request in requests])
    text = find_tokenizer(source).decode([1, *found[0][0]])
    assert len(text) > 80 and text.isascii() and " a " in text
    assert found[0][0][:8] == found[1][0][:8]  # further on, the order of sums may decide


def test_sixteen_bits_on_the_host():
    """Few rows are multiplied by the library, many by BLAS."""
    source = model(tied=False)
    exact = logits(source, Host("standard"))
    for dtype, tolerance in (("float16", 5e-3), ("bfloat16", 4e-2)):
        host = Host("flash", "float32", dtype)
        llama = Llama(source, host)
        assert llama.layers[0].w13.dtype == host.matrix_dtype == llama.embedding.dtype
        assert np.abs(logits(source, host) - exact).max() / exact.std() < tolerance


@pytest.mark.parametrize("weights", FORMATS)
def test_memory_of_the_engine_is_that_of_the_format(weights):
    config = Config(dim=256, hidden_dim=512, n_layers=2, n_heads=8, n_kv_heads=4, vocab_size=300, seq_len=16)
    llama = Llama(w4.quantize(model(config), weights), Host("flash", "float32", "bfloat16"))
    bits = {"nvfp4": 4.5, "mxfp4": 4.25, "int4": 4.25}[weights]  # packed, a block of int4 has its scale twice
    count = config.n_layers * sum(rows * columns for rows, columns in w4.stacked_shapes(config).values())
    blocks = sum(packed.bytes for packed in llama.packed)
    assert blocks == count * bits / 8 + 128 * len(llama.packed)
    assert llama.weight_bytes == blocks + 2 * 300 * 256 + 4 * 256 * (2 * config.n_layers + 1)


# ---- the commands ----


def test_generate_takes_files_and_quantises_others(tmp_path, capsys):
    path = tmp_path / "m.safetensors"
    assert quantize.main(["--weights", "int4", "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert "codes 216.0 KiB" in out and f"wrote {tmp_path / 'm.tokenizer.bin'}: a copy of the tokenizer" in out
    steps = ["--steps", "20", "--device", "cpu"]
    found = []
    for arguments in ([str(path)], [str(path), "--weights", "int4"], ["--weights", "int4"]):
        assert generate([*arguments, *steps]) == 0
        out, err = capsys.readouterr()
        assert "int4 in bfloat16" in err and "4-bit 231.0 KiB, 4.28 bits a weight" in err
        found.append(out)
    assert found[0] == found[1] == found[2] and len(found[0]) > 40
    assert generate(["--weights", "bf16", *steps]) == 0
    assert "bfloat16 with q, k, v in float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FILE", "--weights", "mxfp4"], "weights='mxfp4', but checkpoint"),
        (["FILE", "--weights", "bf16"], "weights='bf16', but checkpoint"),
    ],
    ids=str,
)
def test_generate_refuses(arguments, message, tmp_path, capsys):
    path = str(tmp_path / "m.safetensors")
    w4.save(
        path, w4.quantize(load_checkpoint(DEFAULT_CHECKPOINT), "nvfp4"), DEFAULT_CHECKPOINT.with_name("tokenizer.bin")
    )
    assert generate([path if word == "FILE" else word for word in arguments] + ["--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_quality_measures_and_quantize_writes_what_it_chose(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    arguments = ["--tokens", "1024", "--weights", "nvfp4", "--budget", "0"]
    files = {"report": tmp_path / "r.json", "picture": tmp_path / "p.png"}
    for name, path in files.items():
        arguments += [f"--{name}", str(path)]
    assert measure.main(arguments) == 0
    shown = capsys.readouterr().out
    [line] = [line for line in shown.splitlines() if " quantize " in line]
    assert line.startswith("python -m flash_attn_minimal quantize --weights nvfp4 ")
    assert quantize.main(line.split()[4:]) == 0
    data = json.loads(files["report"].read_text())
    assert [row["weights"] for row in data["rows"]] == ["float32, stored", "16 bit", "nvfp4", "nvfp4 mixed"]
    for row in data["rows"]:
        assert f"{row['perplexity']:.4f}" in shown and 1.2 < row["perplexity"] < 1.7
    assert data["text"]["source"] == "held_out.txt"
    assert data["command"] == "python -m flash_attn_lab quality --weights nvfp4 --budget 0.0 --tokens 1024"
    assert "| nvfp4 | 4.50 |" in files["report"].with_suffix(".md").read_text()
    assert files["picture"].stat().st_size > 10000
    checkpoint = load_checkpoint(tmp_path / "nvfp4.safetensors")
    kept = {(m["layer"], m["matrix"]) for m in data["formats"]["nvfp4"]["matrices"] if m["kept"]}
    assert checkpoint.kept == kept and data["rows"][3]["kept"] == len(kept)
    assert find_tokenizer(checkpoint).vocab_size == checkpoint.config.vocab_size


def test_the_line_that_writes_the_mixed_model(tmp_path, capsys):
    rows = [{"layer": layer, "matrix": name, "kept": layer == 1} for layer in range(3) for name in STACKED]
    line = measure.keep_line({"formats": {"int4": {"matrices": rows}}}, "int4", str(DEFAULT_CHECKPOINT)).split()
    assert line[4:8] == ["--weights", "int4", "--keep", ",".join(f"1.{name}" for name in STACKED)]
    assert quantize.main([*line[4:-1], str(tmp_path / "m.safetensors")]) == 0
    assert load_checkpoint(tmp_path / "m.safetensors").kept == {(1, name) for name in STACKED}


def test_the_command_says_that_it_needs_ml_dtypes(monkeypatch, capsys):
    assert quantize.main(["--help"]) == 0 and "ml_dtypes" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert quantize.main(["--weights", "int4", "--out", "x.safetensors"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("quantize: bfloat16 needs the ml_dtypes package (pip install ml_dtypes)")
    assert said.count("\n") == 1, "nothing has begun"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "/nowhere/x.json"], "--report /nowhere/x.json: cannot write there"),
        (["--picture", "/nowhere/x.png"], "--picture /nowhere/x.png: cannot write there"),
        (["--tokens", "0"], "--tokens: 0 is not positive"),
        (["--budget", "nan"], "--budget: 'nan' is not a number"),
        (["--weights", "fp4"], "--weights: 'fp4' is not one of nvfp4, "),
        (["--text", "/nowhere"], "text '/nowhere'"),
        (["nowhere.bin"], "checkpoint 'nowhere.bin'"),
    ],
    ids=str,
)
def test_quality_refuses(arguments, message, capsys):
    assert measure.main(arguments) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and err[-1].startswith("quality: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.safetensors"], "arguments are required: --weights"),
        (["--weights", "int4"], "arguments are required: --out"),
        (["--out", "x.bin", "--weights", "int4"], "--out x.bin does not end in .safetensors"),
        (["--out", "x.safetensors", "--weights", "fp4"], "--weights: 'fp4' is not one of nvfp4, "),
        (["--out", "x.safetensors", "--weights", "int4", "--keep", "0.w9"], "--keep: '0.w9' is not a layer and one of"),
        (
            ["--out", "x.safetensors", "--weights", "int4", "--keep", "3.w2"],
            "--keep 3.w2: the model's layers are 0 to 2",
        ),
        (["--out", "x.safetensors", "--weights", "int4", "nowhere.bin"], "checkpoint 'nowhere.bin'"),
        (["--out", "/nowhere/x.safetensors", "--weights", "int4"], "--out /nowhere/x.safetensors: cannot write there"),
    ],
    ids=str,
)
def test_the_command_refuses(arguments, message, capsys):
    assert quantize.main(arguments) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and err[-1].startswith("quantize: ")
