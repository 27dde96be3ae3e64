"""The Llama model: against a float64 forward written from the formulas, golden texts of a trained model, and a stand-in
for device arrays."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from flash_attn_minimal import BadArgument, FlashAttnError
from flash_attn_minimal.llama.generate import Timing, generate
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import Sampler
from flash_attn_minimal.llama.synthetic import write_checkpoint
from flash_attn_minimal.llama.tokenizer import BOS, EOS, load_tokenizer
from flash_attn_minimal.llama.weights import Config, load_checkpoint

MODELS = Path(os.environ.get("FLASH_ATTN_TEST_MODELS", Path(__file__).resolve().parents[2] / "shared" / "models"))
CONFIGS = {
    "multi-head": Config(dim=24, hidden_dim=40, n_layers=2, n_heads=3, n_kv_heads=3, vocab_size=50, seq_len=40),
    "grouped": Config(dim=48, hidden_dim=56, n_layers=3, n_heads=6, n_kv_heads=2, vocab_size=70, seq_len=40),
    "one key head": Config(dim=40, hidden_dim=30, n_layers=2, n_heads=4, n_kv_heads=1, vocab_size=60, seq_len=40),
}
ATTENTIONS = ["standard", "flash"]


def model_file(name):
    if not (MODELS / name).is_file():
        pytest.skip(f"{MODELS / name} is not here; FLASH_ATTN_TEST_MODELS names the folder of the real models")
    return MODELS / name


@pytest.fixture
def checkpoint(tmp_path):
    """A maker of synthetic checkpoints."""

    def make(config=CONFIGS["grouped"], version=0, tied=True):
        write_checkpoint(tmp_path / "model.bin", config, version, tied, seed=5)
        return load_checkpoint(tmp_path / "model.bin")

    return make


def exact_logits(checkpoint, tokens):
    """All positions' logits of one sequence in float64: no cache, no fused matrices, heads in a loop."""
    c, w = checkpoint.config, {name: tensor.astype(np.float64) for name, tensor in checkpoint.tensors.items()}
    hs, n = c.head_dim, len(tokens)

    def rms(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rope(x):  # (n, heads * hs)
        out = x.copy()
        for t in range(n):
            for a in range(0, x.shape[1], 2):
                angle = t * 10000.0 ** -((a % hs) / hs)
                out[t, a] = x[t, a] * np.cos(angle) - x[t, a + 1] * np.sin(angle)
                out[t, a + 1] = x[t, a] * np.sin(angle) + x[t, a + 1] * np.cos(angle)
        return out

    x = w["token_embedding"][list(tokens)]
    for i in range(c.n_layers):
        h = rms(x, w["rms_att"][i])
        q, k, v = rope(h @ w["wq"][i].T), rope(h @ w["wk"][i].T), h @ w["wv"][i].T
        heads = []
        for head in range(c.n_heads):
            kv = head // (c.n_heads // c.n_kv_heads)
            s = q[:, head * hs : (head + 1) * hs] @ k[:, kv * hs : (kv + 1) * hs].T / np.sqrt(hs)
            s[np.triu_indices(n, 1)] = -np.inf
            p = np.exp(s - s.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ v[:, kv * hs : (kv + 1) * hs])
        x = x + np.concatenate(heads, -1) @ w["wo"][i].T
        h = rms(x, w["rms_ffn"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return rms(x, w["rms_final"]) @ w["token_embedding" if checkpoint.tied else "wcls"].T


def nan_cache(model, **shape):
    """A cache whose unwritten rows would poison whatever reads them."""
    cache = model.new_cache(**shape)
    for array in (*cache.k, *cache.v):
        array[...] = np.nan
    return cache


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("shape", CONFIGS)
@pytest.mark.parametrize("version, tied", [(0, True), (0, False), (1, True), (1, False)])
def test_logits_match_float64(checkpoint, attention, shape, version, tied):
    file = checkpoint(CONFIGS[shape], version, tied)
    tokens = np.random.default_rng(0).integers(0, file.config.vocab_size, (2, 21))  # two sequences of a batch
    exact = np.stack([exact_logits(file, row) for row in tokens])
    model = Llama(file, attention=attention)
    for parts in ([21], [1] * 21, [7, 1, 1, 9, 3]):  # prefill, decode, and chunks in between
        cache = nan_cache(model, batch=2)
        for n in parts:
            start = cache.length
            logits = model.forward(tokens[:, start : start + n], cache)
            assert logits.shape == (2, file.config.vocab_size) and logits.dtype == np.float32
            np.testing.assert_allclose(logits, exact[:, start + n - 1], atol=1e-4, err_msg=f"{parts} at {start}")


@pytest.mark.parametrize("dtype, tolerance", [("float16", 0.02), ("bfloat16", 0.15)])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_half_precision_cache(checkpoint, attention, dtype, tolerance):
    file = checkpoint()
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed").bfloat16
    model = Llama(file, attention=attention, dtype=dtype)
    tokens = np.random.default_rng(1).integers(0, file.config.vocab_size, 20)
    exact = exact_logits(file, tokens)
    cache = nan_cache(model)
    assert cache.k[0].dtype == dtype
    for start, end in ((0, 12), *((n, n + 1) for n in range(12, 20))):
        logits = model.forward([tokens[start:end]], cache)[0]
        error = np.abs(logits - exact[end - 1]).max()
        assert error < tolerance, f"after {end} tokens the logits are off by {error}"


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_attention_reads_the_cache_where_it_lies(checkpoint, attention, monkeypatch):
    model, seen = Llama(checkpoint(), attention=attention), []
    attend = model._attend
    monkeypatch.setattr(model, "_attend", lambda xp, q, k, v: seen.append((q, k, v)) or attend(xp, q, k, v))
    cache = model.new_cache(batch=2)
    model.forward([[1, 2, 3], [4, 5, 6]], cache)
    model.forward([[7], [8]], cache)
    assert [q.shape[1] for q, _, _ in seen] == [3, 3, 3, 1, 1, 1] and [k.shape[1] for _, k, _ in seen] == [
        3,
        3,
        3,
        4,
        4,
        4,
    ]
    for i, (q, k, v) in enumerate(seen):
        assert np.shares_memory(k, cache.k[i % 3]) and np.shares_memory(v, cache.v[i % 3])
        assert not k.flags.c_contiguous and k.strides[0] == 40 * k.strides[1]  # batches lie a whole context apart
        assert q.base is not None and q.strides[1] > q.shape[2] * q.strides[2]  # a slice of the fused q, k, v product


def test_large_gates_do_not_overflow(checkpoint):
    model = Llama(checkpoint(), attention="standard")
    gate = np.float32([[-1e4, -200, -1, 0, 1, 200, 1e4]])
    with np.errstate(all="raise"):
        silu = model._silu(gate)
    np.testing.assert_allclose(silu, [[0, 0, -0.26894143, 0, 0.7310586, 200, 1e4]], rtol=1e-6)


@pytest.mark.parametrize("tokens", [[], [[]], [1, 2], [[[1]]]])
def test_wrong_token_shapes(checkpoint, tokens):
    model = Llama(checkpoint(), attention="standard")
    with pytest.raises(BadArgument, match=r"tokens has shape \("):
        model.forward(tokens, model.new_cache())


@pytest.mark.parametrize("token", [-1, 70])
def test_token_outside_the_vocabulary(checkpoint, token):
    model = Llama(checkpoint(), attention="standard")
    with pytest.raises(BadArgument, match=f"{token}, outside the vocabulary 0 .. 69"):
        model.forward([[token]], model.new_cache())


def test_a_full_cache_refuses(checkpoint):
    model = Llama(checkpoint(), attention="standard")
    cache = model.new_cache(seqlen=4)
    model.forward([[1, 2, 3]], cache)
    with pytest.raises(BadArgument, match="seqlen=2 tokens at position 3 go beyond the 4 positions"):
        model.forward([[1, 2]], cache)
    assert cache.length == 3
    model.forward([[1]], cache)


@pytest.mark.parametrize("seqlen", [0, -1, 41])
def test_cache_sizes(checkpoint, seqlen):
    with pytest.raises(BadArgument, match=f"seqlen={seqlen} is outside 1 .. 40"):
        Llama(checkpoint(), attention="standard").new_cache(seqlen=seqlen)


def test_unknown_attention(checkpoint):
    with pytest.raises(BadArgument, match="attention='sparse' is none of flash, standard"):
        Llama(checkpoint(), attention="sparse")


# ---- a trained model ----


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["stories260K.bin", "stories260K_v1.bin"])
def test_golden_texts(name, attention):
    cases = json.loads(model_file("stories260K_greedy.json").read_text())["cases"]
    tokenizer = load_tokenizer(model_file("tok512.bin"))
    model = Llama(load_checkpoint(model_file(name)), attention=attention)
    assert len(cases) >= 4
    for case in cases:
        prompt = tokenizer.encode(case["prompt"])
        assert prompt == case["prompt_ids"]
        new = len(case["token_ids"]) - len(prompt)
        ids = prompt + list(generate(model, prompt, new, Sampler(), nan_cache(model)))
        assert ids == case["token_ids"]
        assert tokenizer.decode(ids) == case["text"]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_golden_logits(attention):
    case = max(
        json.loads(model_file("stories260K_greedy.json").read_text())["cases"], key=lambda case: case["n_positions"]
    )
    model = Llama(load_checkpoint(model_file("stories260K.bin")), attention=attention)
    cache = nan_cache(model)
    for i, (token, logit, margin) in enumerate(
        zip(case["token_ids"], case["argmax_logit"], case["argmax_margin"], strict=False)
    ):
        logits = np.sort(model.forward([[token]], cache)[0])
        assert abs(logits[-1] - logit) < 1e-3 and abs(logits[-1] - logits[-2] - margin) < 1e-3, f"position {i}"


# ---- generate: where a text ends ----


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("prompt_tokens, new", [(1, 40), (30, 11), (39, 2), (40, 1)])
def test_the_context_ends_the_text(checkpoint, attention, prompt_tokens, new):
    model, timing = Llama(checkpoint(), attention=attention), Timing()
    never_ends = lambda logits: 9  # noqa: E731
    cache = nan_cache(model)
    assert list(generate(model, [5] * prompt_tokens, 100, never_ends, cache, timing)) == [9] * new
    assert timing.stopped == "the context of 40 tokens is full" and cache.length == 40
    assert (timing.prompt_tokens, timing.new_tokens, timing.decode_steps) == (prompt_tokens, new, new - 1)


def test_steps_bound_the_text(checkpoint):
    model, timing = Llama(checkpoint(), attention="standard"), Timing()
    cache = model.new_cache()
    assert list(generate(model, [5], 3, lambda logits: 9, cache, timing)) == [9, 9, 9]
    assert timing.stopped == "" and cache.length == 3
    assert list(generate(model, [5], 0, lambda logits: 9, model.new_cache())) == []


@pytest.mark.parametrize("end", [BOS, EOS])
def test_the_model_ends_the_text(checkpoint, end):
    model, timing, draws = Llama(checkpoint(), attention="standard"), Timing(), iter([7, 8, end, 9])
    assert list(generate(model, [5], 10, lambda logits: next(draws), model.new_cache(), timing)) == [7, 8]
    assert timing.stopped == "the model ended the text" and timing.new_tokens == 2


def test_generate_refuses(checkpoint):
    model = Llama(checkpoint(), attention="standard")
    with pytest.raises(BadArgument, match="prompt has 41 tokens, more than the context of 40"):
        list(generate(model, [5] * 41, 1, Sampler(), model.new_cache()))
    with pytest.raises(BadArgument, match="prompt has no tokens"):
        list(generate(model, [], 1, Sampler(), model.new_cache()))
    with pytest.raises(BadArgument, match="steps=-1"):
        list(generate(model, [5], -1, Sampler(), model.new_cache()))


# ---- sampling ----


def test_greedy_takes_the_first_largest():
    assert Sampler(0.0)(np.float32([1, 3, 2, 3])) == 1
    assert Sampler(0.0, top_p=0.1, seed=9)(np.float32([1, 3, 2, 3])) == 1


def test_samples_follow_the_distribution():
    logits, temperature, n = np.float32([2.0, 1.0, 0.0, -1.0, -30.0]), 0.7, 20000
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    sampler = Sampler(temperature, 1.0, seed=1)
    counts = np.bincount([sampler(logits) for _ in range(n)], minlength=5)
    assert np.abs(counts - n * p).max() < 5 * np.sqrt(n) / 2 and counts[4] == 0


def test_top_p_keeps_the_smallest_set():
    rng = np.random.default_rng(2)
    for top_p in (0.05, 0.3, 0.9, 0.99, 1.0):
        for _ in range(20):
            p = rng.dirichlet(np.full(40, 0.3))
            order = sorted(range(40), key=lambda i: -p[i])
            expected, total = [], 0.0
            for i in order:
                expected.append(i)
                total += p[i]
                if total >= top_p and top_p < 1:
                    break
            assert sorted(Sampler(1.0, top_p)._nucleus(p)) == sorted(expected)


def test_uniform_logits_keep_the_nucleus_right():
    assert len(Sampler(1.0, 0.5)._nucleus(np.full(10, 0.1))) == 5
    assert len(Sampler(1.0, 1e-9)._nucleus(np.full(10, 0.1))) == 1


def test_top_p_draws_within_the_set():
    logits = np.log(np.float32([0.5, 0.3, 0.15, 0.05]))
    sampler = Sampler(1.0, 0.7, seed=3)
    assert {sampler(logits) for _ in range(500)} == {0, 1}


def test_the_seed_decides():
    logits = np.random.default_rng(4).standard_normal(100, dtype=np.float32)

    def draws(seed):
        sampler = Sampler(1.5, 0.95, seed)
        return [sampler(logits) for _ in range(50)]

    assert draws(7) == draws(7) != draws(8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_noticed(temperature, bad):
    with pytest.raises(FlashAttnError, match=f"largest logit is {bad}"):
        Sampler(temperature, 0.9)(np.float32([1, bad, 2]))


def test_hot_and_cold_extremes_stay_finite():
    logits = np.float32([1e4, -1e4, 0])
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        assert Sampler(1e-6, 0.9, 1)(logits) == 0
        assert Sampler(1e6, 1.0, 1)(logits) in (0, 1, 2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0 is outside 0 < top_p <= 1"),
        ({"top_p": -1.0}, "top_p=-1.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_sampler_refuses(arguments, message):
    with pytest.raises(BadArgument, match=message):
        Sampler(**arguments)


# ---- arrays on a device ----


class DeviceArray:
    """Acts like CuPy's array where it matters: operators and methods stay on the device, and NumPy's functions get no
    look inside."""

    __array_ufunc__ = None

    def __init__(self, host):
        self._host = host

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion of a device array to NumPy")

    def __getattr__(self, name):
        if name.startswith("__array"):  # no back door to the memory either
            raise AttributeError(name)
        found = getattr(self._host, name)
        return (lambda *a, **k: wrap(found(*map(unwrap, a), **k))) if callable(found) else wrap(found)

    def __setitem__(self, key, value):
        self._host[unwrap(key)] = value._host if isinstance(value, DeviceArray) else np.float32(value)

    def __int__(self):
        return int(self._host)

    def __float__(self):
        return float(self._host)

    def get(self):
        return self._host.copy()


def wrap(value):
    return DeviceArray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def unwrap(value):
    if isinstance(value, tuple):
        return tuple(map(unwrap, value))
    if isinstance(value, np.ndarray):
        raise TypeError("a host array among device arrays")
    return value._host if isinstance(value, DeviceArray) else value


def operator(name):
    def method(self, *operands):
        result = getattr(self._host, name)(*map(unwrap, operands))
        return self if result is self._host else wrap(result)

    return method


for _name in "add radd sub rsub mul rmul truediv rtruediv matmul iadd imul itruediv getitem le neg".split():
    setattr(DeviceArray, f"__{_name}__", operator(f"__{_name}__"))


class FakeCupy:
    """The few names of CuPy that the model uses."""

    float32, complex64 = np.float32, np.complex64
    asarray = staticmethod(lambda array: array if isinstance(array, DeviceArray) else DeviceArray(np.array(array)))
    empty = staticmethod(lambda shape, dtype: DeviceArray(np.empty(shape, dtype)))
    arange = staticmethod(lambda n: DeviceArray(np.arange(n)))
    where = staticmethod(lambda condition, a, b: DeviceArray(np.where(unwrap(condition), unwrap(a), b)))
    exp, sqrt, tanh = (staticmethod(lambda x, f=f: DeviceArray(f(unwrap(x)))) for f in (np.exp, np.sqrt, np.tanh))


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float16", 0.05)])
def test_only_the_array_module_differs_on_a_device(checkpoint, dtype, tolerance):
    file = checkpoint()
    host, device = Llama(file, attention="standard"), Llama(file, FakeCupy, "standard", dtype)
    assert device.layers[0].wqkv.dtype == dtype and device.layers[0].rms_att.dtype == np.float32
    caches = host.new_cache(), device.new_cache()
    for tokens in ([[1, 2, 3, 4, 5]], [[6]], [[7]]):
        ours, theirs = host.forward(tokens, caches[0]), device.forward(tokens, caches[1])
        assert isinstance(theirs, DeviceArray) and theirs.dtype == np.float32
        np.testing.assert_allclose(theirs.get(), ours, atol=tolerance)
    assert isinstance(Sampler(0.0)(theirs[0]), int) and isinstance(Sampler(1.0, 0.9, 1)(theirs[0]), int)


def test_the_stand_in_notices_host_arrays():
    device = DeviceArray(np.ones(3, np.float32))
    for mistake in (
        lambda: np.exp(device),
        lambda: device + np.ones(3),
        lambda: np.asarray(device),
        lambda: device * np.ones(3),
    ):
        with pytest.raises(TypeError):
            mistake()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_on_a_gpu(attention, dtype):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"no GPU: {error}")
    case = json.loads(model_file("stories260K_greedy.json").read_text())["cases"][0]
    model = Llama(load_checkpoint(model_file("stories260K.bin")), cupy, attention, dtype)
    if dtype == "float32":
        ids = case["prompt_ids"] + list(generate(model, case["prompt_ids"], 100, Sampler(), model.new_cache()))
        assert ids == case["token_ids"]
    cache = model.new_cache()
    for token, logit in zip(case["token_ids"], case["argmax_logit"], strict=False):
        assert abs(float(model.forward([[token]], cache).max()) - logit) < (1e-2 if dtype == "float32" else 0.5)
