"""The Llama model against a float64 forward written from the formulas, over contiguous and paged caches full of NaN."""

import json
from dataclasses import replace

import numpy as np
import pytest
from real_models import model_file

from flash_attn_lab.models.huggingface import save_folder
from flash_attn_lab.models.standard import Host
from flash_attn_lab.models.synthetic import RandomTensors, write_checkpoint, write_folder
from flash_attn_minimal import BadArgument
from flash_attn_minimal.llama.cache import KVCache, PagePool
from flash_attn_minimal.llama.config import Config, RopeScaling
from flash_attn_minimal.llama.huggingface import load_folder
from flash_attn_minimal.llama.model import Llama, Rows
from flash_attn_minimal.llama.weights import load_checkpoint

CONFIGS = {
    "multi-head": Config(dim=24, hidden_dim=40, n_layers=2, n_heads=3, n_kv_heads=3, vocab_size=50, seq_len=40),
    "grouped": Config(dim=48, hidden_dim=56, n_layers=3, n_heads=6, n_kv_heads=2, vocab_size=70, seq_len=40),
    "one key head": Config(dim=40, hidden_dim=30, n_layers=2, n_heads=4, n_kv_heads=1, vocab_size=60, seq_len=40),
}
ATTENTIONS = ["standard", "flash"]
PAGE_SIZES = [None, 1, 3, 16]


@pytest.fixture
def checkpoint(tmp_path):
    """A function that makes synthetic checkpoints."""

    def make(config=CONFIGS["grouped"], version=0, tied=True):
        write_checkpoint(tmp_path / "model.bin", config, version, tied, seed=5)
        return load_checkpoint(tmp_path / "model.bin")

    return make


def exact_logits(checkpoint, tokens):
    """The logits of all positions of one sequence in float64: no cache, no fused matrices, heads in a loop."""
    c, n = checkpoint.config, len(tokens)
    hs = c.head_dim

    def w(name, layer=None):
        return np.asarray(checkpoint[name] if layer is None else checkpoint[name][layer]).astype(np.float64)

    def rms(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.rms_eps) * weight

    def frequency(pair):
        f = c.rope_theta ** (-2 * pair / hs)
        if c.rope_scaling is None:
            return f
        s = c.rope_scaling
        if s.kind == "linear":
            return f / s.factor
        wavelength = 2 * np.pi / f  # the published rule, case by case
        if wavelength < s.original_context / s.high_freq_factor:
            return f
        if wavelength > s.original_context / s.low_freq_factor:
            return f / s.factor
        smooth = (s.original_context / wavelength - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        return (1 - smooth) * f / s.factor + smooth * f

    def rope(x):  # (n, heads * hs)
        out = x.copy()
        for t in range(n):
            for head in range(0, x.shape[1], hs):
                for pair in range(hs // 2):
                    a, b = (2 * pair, 2 * pair + 1) if c.rope_interleaved else (pair, pair + hs // 2)
                    a, b, angle = head + a, head + b, t * frequency(pair)
                    out[t, a] = x[t, a] * np.cos(angle) - x[t, b] * np.sin(angle)
                    out[t, b] = x[t, a] * np.sin(angle) + x[t, b] * np.cos(angle)
        return out

    def product(x, name, layer):
        bias = f"b{name[1]}"
        return x @ w(name, layer).T + (w(bias, layer) if bias in checkpoint else 0)

    x = w("token_embedding")[list(tokens)]
    row, column = np.arange(n)[:, None], np.arange(n)
    hidden_from = (column > row) | (bool(c.window) & (column <= row - c.window))
    for i in range(c.n_layers):
        h = rms(x, w("rms_att", i))
        q, k, v = rope(product(h, "wq", i)), rope(product(h, "wk", i)), product(h, "wv", i)
        heads = []
        for head in range(c.n_heads):
            kv = head // (c.n_heads // c.n_kv_heads)
            s = q[:, head * hs : (head + 1) * hs] @ k[:, kv * hs : (kv + 1) * hs].T / np.sqrt(hs)
            s[hidden_from] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, kv * hs : (kv + 1) * hs])
        x = x + np.concatenate(heads, -1) @ w("wo", i).T
        h = rms(x, w("rms_ffn", i))
        gate = h @ w("w1", i).T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w("w3", i).T)) @ w("w2", i).T
    return rms(x, w("rms_final")) @ w("wcls").T


class Sequences:
    """A batch over a cache in which positions that are not written, and pages that belong to no sequence, are NaN."""

    def __init__(self, model, batch, page_size=None):
        config = model.config
        pages = 0 if page_size is None else -(-config.seq_len // page_size)
        self.cache = KVCache(model.device, config, batch, config.seq_len, page_size, batch * pages + 3)
        for array in (*self.cache.k, *self.cache.v):
            array[...] = np.nan
        self.model, self.lengths = model, np.zeros(batch, np.int32)
        shuffled = np.random.default_rng(3).permutation(batch * pages + 3)[: batch * pages]
        self.table = None if page_size is None else shuffled.reshape(batch, pages).astype(np.int32)

    def __call__(self, tokens):
        tokens = np.asarray(tokens, np.int32)
        longest = int(self.lengths.max()) + tokens.shape[1]
        rows = Rows(tokens, self.lengths.copy(), self.table, 0, longest)
        logits = self.model.forward(rows, self.cache)
        self.lengths += tokens.shape[1]
        return logits


def check_parts(file, attention, page_size, tolerance=1e-4):
    """Checks prefill, decode, and chunks in between, of two sequences, against float64."""
    tokens = np.random.default_rng(0).integers(0, file.config.vocab_size, (2, 21))
    exact = np.stack([exact_logits(file, row) for row in tokens])
    model = Llama(file, Host(attention))
    for parts in ([21], [1] * 21, [7, 1, 1, 9, 3]):
        sequences, start = Sequences(model, 2, page_size), 0
        for n in parts:
            logits = sequences(tokens[:, start : start + n])
            start += n
            assert logits.shape == (2, file.config.vocab_size) and logits.dtype == np.float32
            np.testing.assert_allclose(logits, exact[:, start - 1], atol=tolerance, err_msg=f"{parts} at {start}")


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("shape", CONFIGS)
@pytest.mark.parametrize("version, tied", [(0, True), (1, False)])
def test_logits_match_float64(checkpoint, attention, shape, version, tied):
    check_parts(checkpoint(CONFIGS[shape], version, tied), attention, None)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("page_size", PAGE_SIZES[1:])
def test_paged(checkpoint, attention, page_size):
    check_parts(checkpoint(), attention, page_size)


VARIANTS = {
    "halves turn": {},
    "eps, theta": {"rms_eps": 1e-2, "rope_theta": 50.0},
    "head_dim": {"head_size": 14},
    "linear scaling": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3 scaling": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 30)},
    "window": {"window": 6},
    "window of one": {"window": 1},
}


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("page_size", [None, 4])
def test_hugging_face_variants(tmp_path, attention, variant, page_size):
    config = replace(CONFIGS["grouped"], rope_interleaved=False, **VARIANTS[variant])
    write_folder(tmp_path, config, "float32", tied="window" not in variant)
    file = load_folder(tmp_path)
    assert file.config == replace(config, head_size=config.head_dim)
    check_parts(file, attention, page_size)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_biases(tmp_path, attention):
    write_folder(tmp_path, replace(CONFIGS["grouped"], rope_interleaved=False), "float32", biases=True, shards=4)
    file = load_folder(tmp_path)
    assert file.format == "Hugging Face Qwen2ForCausalLM" and "bq" in file
    check_parts(file, attention, None)


def test_the_same_model_in_both_formats(checkpoint, tmp_path):
    """RoPE on halves of a head instead of neighbours: with the rows of wq and wk in another order, logits are the
    same."""
    file = checkpoint()
    c = file.config

    def halves(matrices, heads):
        shape = (c.n_layers, heads, c.head_dim // 2, 2, c.dim)
        return matrices.reshape(shape).swapaxes(2, 3).reshape(c.n_layers, -1, c.dim)

    tensors = dict(file.tensors) | {"wq": halves(file["wq"], c.n_heads), "wk": halves(file["wk"], c.n_kv_heads)}
    save_folder(tmp_path / "folder", replace(c, rope_interleaved=False), tensors, "float32")
    tokens = np.random.default_rng(2).integers(0, c.vocab_size, (1, 15))
    ours, theirs = (Sequences(Llama(f, Host()), 1)(tokens) for f in (file, load_folder(tmp_path / "folder")))
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_weights(tmp_path, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    write_folder(tmp_path, replace(CONFIGS["grouped"], rope_interleaved=False), dtype)
    file = load_folder(tmp_path)
    assert file.dtype == dtype and file["wq"][0].dtype.name == dtype
    check_parts(file, "flash", None)  # products are float32 here: only the weights were rounded


@pytest.mark.parametrize("dtype, tolerance", [("float16", 0.02), ("bfloat16", 0.15)])
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("page_size", [None, 5])
def test_half_precision_cache(checkpoint, attention, dtype, tolerance, page_size):
    file = checkpoint()
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    sequences = Sequences(Llama(file, Host(attention, dtype)), 1, page_size)
    tokens = np.random.default_rng(1).integers(0, file.config.vocab_size, 20)
    exact = exact_logits(file, tokens)
    assert sequences.cache.k[0].dtype == dtype
    for start, end in ((0, 12), *((n, n + 1) for n in range(12, 20))):
        error = np.abs(sequences([tokens[start:end]])[0] - exact[end - 1]).max()
        assert error < tolerance, f"after {end} tokens the logits are off by {error}"


def test_large_gates_do_not_overflow():
    gate = np.float32([[-1e4, -200, -1, 0, 1, 200, 1e4]])
    weight = np.concatenate([np.eye(7), np.zeros((7, 7))]).astype(np.float32)
    with np.errstate(all="raise"):
        silu = Host("standard").linear(gate, weight, bias=np.repeat(np.float32([0, 1]), 7), swiglu=True)
    np.testing.assert_allclose(silu, [[0, 0, -0.26894143, 0, 0.7310586, 200, 1e4]], rtol=1e-6)


@pytest.mark.parametrize("arguments, message", [
    (("sparse",), "attention='sparse' is none of flash, standard"),
    (("flash", "float64"), "dtype='float64' is none of float32, float16, bfloat16"),
])  # fmt: skip
def test_unknown_names(arguments, message):
    with pytest.raises(BadArgument, match=message):
        Host(*arguments)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("page_size", [None, 7])
def test_golden_logits(attention, page_size):
    case = max(
        json.loads(model_file("stories260K_greedy.json").read_text())["cases"], key=lambda case: case["n_positions"]
    )
    sequences = Sequences(Llama(load_checkpoint(model_file("stories260K.bin")), Host(attention)), 1, page_size)
    for i, (token, logit, margin) in enumerate(
        zip(case["token_ids"], case["argmax_logit"], case["argmax_margin"], strict=False)
    ):
        logits = np.sort(sequences([[token]])[0])
        assert abs(logits[-1] - logit) < 1e-3 and abs(logits[-1] - logits[-2] - margin) < 1e-3, f"position {i}"


def test_float32_matrices_stay_in_the_file(checkpoint):
    file = checkpoint()
    model = Llama(file, Host("standard"))
    assert np.shares_memory(model.layers[1].w2, file["w2"]) and np.shares_memory(model.embedding, file["wcls"])


# ---- pages ----


def test_pages_are_given_once_and_taken_back():
    pool = PagePool(5)
    first = pool.take(3)
    assert len(set(first)) == 3 and len(pool) == 2
    with pytest.raises(BadArgument, match="3 pages are wanted, but 2 of 5 are free"):
        pool.take(3)
    pool.give_back(first)
    assert sorted(pool.take(5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("page", [-1, 5, 2])
def test_bad_pages_are_refused(page):
    pool = PagePool(5)
    pool.take(2)
    with pytest.raises(BadArgument, match=f"page {page} is given back, but of 5 pages it is not one in use"):
        pool.give_back([page])


def test_random_tensors_do_not_depend_on_the_order():
    config = CONFIGS["grouped"]
    a, b = RandomTensors(config, seed=1), RandomTensors(config, seed=1)
    np.testing.assert_array_equal(a["wq"][2], (b["w2"][0], b["wq"][2])[1])
    assert not np.array_equal(a["wq"][0], a["wq"][1])
    with pytest.raises(KeyError):
        a["bq"]
