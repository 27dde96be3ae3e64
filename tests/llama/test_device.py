"""The GPU code of the engine without a GPU: it runs on NumPy arrays that pass for CuPy's. This shows that the pieces
fit (shapes, dtypes, which array goes where). Streams, captures and the three small kernels need a GPU; on a GPU the
tests of the engine run them."""

import contextlib
import json
import sys
import types

import numpy as np
import pytest
from real_models import model_file
from w4_models import CONFIG, KEPT, TOLERANCE, decoded, logits
from w4_models import model as random_model

from flash_attn_lab.models import standard
from flash_attn_lab.models.synthetic import write_folder
from flash_attn_minimal.llama import cuda as cuda_module
from flash_attn_minimal.llama.config import Config
from flash_attn_minimal.llama.engine import Engine
from flash_attn_minimal.llama.model import Llama
from flash_attn_minimal.llama.sampling import Sampling
from flash_attn_minimal.llama.weights import load_checkpoint
from flash_attn_minimal.transformer._safetensors import numpy_dtype


class Array(np.ndarray):
    """A device array: a class different from the host's arrays, written to only by `set`."""

    def set(self, values, stream):
        assert (values.shape, values.dtype) == (self.shape, self.dtype)
        np.copyto(self, values)


def on_device(x):
    return x.view(Array) if isinstance(x, np.ndarray) else x


class StandInCupy(types.ModuleType):
    """NumPy's functions, with results of the class Array."""

    ndarray = Array

    def __getattr__(self, name):
        function = getattr(np, name)
        return lambda *arguments, **options: on_device(function(*arguments, **options))


class Stream:
    device_id = ptr = 0

    def __init__(self, **_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Event:
    def __init__(self, **_):
        pass

    def record(self, stream):
        pass

    def synchronize(self):
        pass


class Cublas:
    """The contract of cuda.Cublas: its valid arguments, and its results."""

    def __init__(self, *_):
        pass

    def product(self, a, b, out, transpose_b, alpha=1.0, accumulate=False):
        assert a.dtype == b.dtype and a.strides[2] == a.itemsize and b.strides[2] == b.itemsize
        assert out.flags.c_contiguous and out.dtype in (a.dtype, np.float32)
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        product = alpha * (a @ (b.swapaxes(1, 2) if transpose_b else b))
        out[...] = product + out.astype(np.float32) if accumulate else product


class Kernels:
    def __init__(self, _):
        pass

    def embed(self, embedding, tokens, x):
        x[...] = np.asarray(embedding)[np.maximum(np.asarray(tokens).ravel(), 0)]
        return x

    def advance(self, tokens, active, ring, count, lengths):
        ring[count[0]] = tokens[:, 0]
        count[...] = (count + 1) % len(ring)
        lengths += active

    def round_bfloat16(self, bits):
        return on_device(bits.view(np.float32).astype(numpy_dtype("bfloat16")).view(np.uint16))


@pytest.fixture
def cuda(monkeypatch):
    """The class Cuda over the stand-in."""
    cupy = StandInCupy("cupy")
    runtime = types.SimpleNamespace(deviceSynchronize=lambda: None)
    cupy.cuda = types.SimpleNamespace(
        Stream=Stream, Event=Event, runtime=runtime, using_allocator=lambda _: contextlib.nullcontext()
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_module, "Cublas", Cublas)
    monkeypatch.setattr(cuda_module, "_Kernels", Kernels)
    monkeypatch.setattr(cuda_module, "_Graph", lambda cupy, stream, body: body)

    def shared(self, shape):
        memory = np.zeros(shape, np.int32)
        return on_device(memory), memory

    monkeypatch.setattr(cuda_module.Cuda, "shared", shared)
    return standard.Cuda


@pytest.fixture(params=[8, 0], ids=["fused", "cublas"])
def fused_rows(request, monkeypatch):
    monkeypatch.setattr(cuda_module, "FUSED_ROWS", request.param)


@pytest.mark.parametrize("dtype, cache_dtype", [
    ("float32", None), ("float16", None), ("bfloat16", None), ("float32", "float16"), ("float32", "bfloat16"),
    ("bfloat16", "float32"), ("bfloat16", "float16"),
])  # fmt: skip
@pytest.mark.parametrize("attention", ["flash", "standard"])
@pytest.mark.parametrize("page_size", [None, 17])
def test_golden_texts(cuda, fused_rows, dtype, cache_dtype, attention, page_size):
    """Float32 follows the golden text to the end; 16 bits as long as no choice is close."""
    if "bfloat16" in (dtype, cache_dtype):
        pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    cases = json.loads(model_file("stories260K_greedy.json").read_text())["cases"]
    model = Llama(load_checkpoint(model_file("stories260K.bin")), cuda(attention, dtype, cache_dtype))
    assert model.embedding.dtype == dtype and model.layers[0].rms_att.dtype == np.float32
    engine = Engine(model, 3, page_size=page_size)
    for array in (*engine.cache.k, *engine.cache.v):
        array[...] = np.nan
    assert engine.cache.k[0].dtype == (cache_dtype or dtype)
    longest = 1000 if (dtype, cache_dtype) == ("float32", None) else 20
    requests = [engine.add(case["prompt_ids"], min(longest, case["n_positions"] - 20)) for case in cases]
    engine.add([5, 6, 7], 9, Sampling(1.0, seed=3))  # in between, another way to draw
    engine.run()
    for case, request in zip(cases, requests, strict=True):
        text = request.prompt + request.tokens
        assert text == case["token_ids"][: len(text)]


@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_biases_and_a_window(cuda, fused_rows, attention, tmp_path):
    """Biases and a window give the results of the host."""
    from flash_attn_lab.models.standard import Host

    shape = (48, 56, 2, 6, 2, 70, 40)
    for config, biases in ((Config(*shape, rope_interleaved=False, window=5), False),
                           (Config(*shape, rope_interleaved=False), True)):  # fmt: skip
        write_folder(tmp_path, config, "float32", biases=biases)
        texts = []
        for device in (Host("standard"), cuda(attention)):
            engine = Engine(Llama(load_checkpoint(tmp_path), device), 2, page_size=4)
            requests = [engine.add(prompt, 20) for prompt in ([3, 4, 5, 6, 7, 8, 9], [10])]
            engine.run()
            texts.append([request.tokens for request in requests])
        assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_standard_attention_reads_nothing_of_a_slot_s_last_owner(cuda, dtype, tmp_path):
    """Standard attention multiplies the values at unfilled positions of a contiguous cache by 0, and 0 * NaN is NaN."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    write_folder(tmp_path, Config(48, 56, 2, 6, 2, 70, 40, rope_interleaved=False), "float32")
    texts = []
    for filling in (0, np.nan):
        engine = Engine(Llama(load_checkpoint(tmp_path), cuda("standard", dtype)), 2)
        for array in (*engine.cache.k, *engine.cache.v):
            array[...] = filling
        requests = [engine.add(prompt, 20) for prompt in ([3, 4, 5, 6, 7, 8, 9], [10], [11, 12])]
        engine.run()
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1] and all(len(tokens) == 20 for tokens in texts[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("attention", ["flash", "standard"])
def test_4_bit_weights(cuda, fused_rows, attention, dtype):
    """Packed products take any number of rows; matrices that are not quantized use 16-bit products."""
    pytest.importorskip("ml_dtypes", reason="the ml_dtypes package is not installed")
    from flash_attn_lab.models.standard import Host
    from flash_attn_minimal.llama import w4

    device = cuda(attention, dtype)
    quantized = w4.quantize(random_model(tied=False), "nvfp4", KEPT, device)
    llama = Llama(quantized, device)
    assert len(llama.packed) == 4 * CONFIG.n_layers - len(KEPT) and isinstance(llama.packed[0].data, np.ndarray)
    assert llama.layers[2].w2.dtype == dtype
    exact = logits(decoded(quantized), Host("standard"))
    assert np.abs(logits(quantized, device) - exact).max() / exact.std() < TOLERANCE[dtype]


def test_the_fastest_of_several_reads_counts():
    """The bandwidth is measured by a sum over as many bytes as asked for, and at most 512 MiB."""
    asked, times = [], iter([9.0, 2.0, 4.0, 3.0, 5.0] * 2)  # milliseconds

    class Sums:
        def __init__(self, count, dtype):
            self.nbytes = count * np.dtype(dtype).itemsize
            asked.append(self.nbytes)

        def sum(self, out):
            assert out.shape == () and out.dtype == np.float32

    event = types.SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    timing = types.SimpleNamespace(Event=lambda: event, get_elapsed_time=lambda start, end: next(times))
    device = object.__new__(standard.Cuda)
    device.xp, device.stream = types.SimpleNamespace(zeros=Sums, empty=np.empty, cuda=timing), Stream()
    assert device.read_bandwidth(4_000_000) == pytest.approx(2e9)
    assert device.read_bandwidth(1 << 40) == pytest.approx((1 << 29) / 2e-3)
    assert asked == [4_000_000, 1 << 29]
