"""The backend for vLLM, with vLLM's own classes: a builder and layers on steps made by hand, against float64, and a
whole engine on the CPU beside vLLM's own backend."""

import copy
import gc
import json
import os
import pickle
import re
import subprocess
import sys
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import SEED

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.config import VllmConfig  # noqa: E402
from vllm.model_executor.layers.attention.chunked_local_attention import (  # noqa: E402
    create_chunked_local_attention_backend,
)
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, CommonAttentionMetadata  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode  # noqa: E402
from vllm.v1.worker.utils import clear_layer_kv_caches  # noqa: E402

from flash_attn_lab.reference import standard_attention  # noqa: E402
from flash_attn_minimal import BadArgument, Unsupported  # noqa: E402
from flash_attn_minimal.integrations import vllm as adapter  # noqa: E402

if current_platform.is_unspecified():
    pytest.skip("vLLM is for another device than those here", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass
class Layer:
    """An attention layer of vLLM, its cache in vLLM's layout, and the keys and values written so far."""

    impl: adapter.Impl
    builder: adapter.Builder
    kv_cache: torch.Tensor
    keys: list
    values: list
    scales: SimpleNamespace
    chunk: int = 0

    def step(self, table, before, counts, rng, **given):
        """Runs requests with `before` keys and `counts` new rows. Returns their results and those of float64."""
        impl, page = self.impl, self.builder.kv_cache_spec.block_size
        common, rows = metadata(table, before, counts, page, **given)
        dtype, padded = self.scales.dtype, rows + given.get("padding", 0)
        random = torch.from_numpy(rng.standard_normal((padded, impl.num_heads + 2 * impl.num_kv_heads, impl.head_size)))
        q, k, v = random.to(DEVICE, dtype).split([impl.num_heads, impl.num_kv_heads, impl.num_kv_heads], 1)
        out = torch.full((padded, impl.num_heads, impl.head_size), float("nan"), dtype=dtype, device=DEVICE)
        step = self.builder.build(0, common)
        assert impl.forward(self.scales, q, k, v, self.kv_cache, step, out) is out
        start, pairs = 0, []
        for request, count in enumerate(counts):
            now = slice(start, start + count)
            start += count
            self.keys[request] = torch.cat([self.keys[request][: before[request]], k[now].double().cpu()])
            self.values[request] = torch.cat([self.values[request][: before[request]], v[now].double().cpu()])
            pairs.append((out[now].double().cpu().numpy(), self.expected(request, q[now].double().cpu().numpy())))
        return pairs

    def expected(self, request, q):
        impl = self.impl
        options = {"softmax_scale": impl.scale, "causal": True, "softcap": impl._options["softcap"]}
        if impl.sliding_window is not None:
            options["window_size"] = (impl.sliding_window - 1, 0)
        options["attention_chunk"] = self.chunk
        if impl.alibi_slopes is not None:
            options["alibi_slopes"] = impl.alibi_slopes.cpu().numpy()
        if impl.sinks is not None:
            options["sinks"] = impl.sinks.double().cpu().numpy()
        k, v = self.keys[request].numpy(), self.values[request].numpy()
        return standard_attention(q[None], k[None], v[None], **options)[0][0]


def metadata(table, before, counts, page, padding=0, skipped=0, requests=None):
    """vLLM's metadata of a step, and its rows. Padding rows and the last `skipped` rows have slot -1."""
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = int(starts[-1])
    slots = np.full(rows + padding, -1, np.int64)
    for request, count in enumerate(counts):
        positions = before[request] + np.arange(count)
        slots[starts[request] : starts[request + 1]] = table[request, positions // page] * page + positions % page
    slots[rows - skipped : rows] = -1
    lengths = np.array(before, np.int32) + np.array(counts, np.int32)
    more = 0 if requests is None else requests - len(counts)  # padding requests of a graph
    starts, lengths = np.pad(starts, (0, more), "edge"), np.pad(lengths, (0, more))
    on_host = torch.from_numpy(starts)
    return CommonAttentionMetadata(
        query_start_loc=on_host.to(DEVICE),
        query_start_loc_cpu=on_host,
        seq_lens=torch.from_numpy(lengths).to(DEVICE),
        num_reqs=len(lengths),
        num_actual_tokens=rows + (padding if requests else 0),
        max_query_len=max(counts, default=0),
        max_seq_len=int(lengths.max(initial=0)),
        block_table_tensor=torch.from_numpy(np.pad(table[: len(counts)], ((0, more), (0, 0)))).to(DEVICE),
        slot_mapping=torch.from_numpy(slots).to(DEVICE),
    ), rows


def config_of(tokens):
    config = VllmConfig()
    config.scheduler_config.max_num_batched_tokens = tokens
    return config


def layer_of(
    requests, dtype=torch.float32, heads=(4, 2), dim=32, kv="auto", physical="LBNHC", most=300, buffer=2048, **options
):
    """A layer whose cache has NaN in it, and a table of the pages of its requests, in no order."""
    pages = requests * -(-most // PAGE)
    quantized = get_kv_quant_mode(kv)
    kind = torch.uint8 if quantized else dtype
    spec = FullAttentionSpec(block_size=PAGE, num_kv_heads=heads[1], head_size=dim, dtype=kind, kv_quant_mode=quantized)
    spec = adapter.Backend.customize_spec(spec)
    builder = adapter.Builder(spec, ["layer"], config_of(buffer), torch.device(DEVICE))
    impl = adapter.Impl(heads[0], dim, dim**-0.5, heads[1], kv_cache_dtype=kv, **options)
    columns = spec.state_content_size_bytes // kind.itemsize
    cache = torch.full((pages, heads[1], PAGE, columns), 255 if quantized else float("nan"), dtype=kind, device=DEVICE)
    if physical == "LBNHC":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    scales = SimpleNamespace(_k_scale=torch.tensor(0.05, device=DEVICE), dtype=dtype)
    scales._v_scale = torch.linspace(0.01, 0.02, heads[1], device=DEVICE)  # of each head
    empty = [torch.zeros(0, heads[1], dim, dtype=torch.float64) for _ in range(requests)]
    table = np.random.default_rng(SEED).permutation(pages).astype(np.int32).reshape(requests, -1)
    return Layer(impl, builder, cache, [*empty], [*empty], scales), table


def close(pairs, tolerance):
    assert pairs
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


# The rows of requests in three steps: prompts; a mixed step; decodes, a chunk and an idle request.
STEPS = ([1, 1, 130, 7, 257], [1, 1, 1, 129, 5], [1, 1, 1, 1, 30])
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 20},
    "softcap": {"logits_soft_cap": 1.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.1, 0.05]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)},
    "headmajor": {"physical": "LBHNC"},
    "mqa": {"heads": (8, 1), "dim": 48},
    "bfloat16": {"dtype": torch.bfloat16, "dim": 128},
    "float16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_prompts_chunks_and_decodes_in_one_step(name):
    options = OPTIONS[name]
    layer, table = layer_of(5, **options)
    rng, before = np.random.default_rng(SEED), [0] * 5
    tolerance = TOLERANCE[options.get("dtype", torch.float32)]
    for counts in STEPS:
        close(layer.step(table, before, counts, rng), tolerance)
        before = [a + b for a, b in zip(before, counts, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed):
    rng = np.random.default_rng([SEED, seed])
    requests = int(rng.integers(1, 7))
    options = OPTIONS[rng.choice(["plain", "window", "sinks", "headmajor"])]
    layer, table = layer_of(requests, **options)
    before = [0] * requests
    for _ in range(4):
        limit = int(rng.choice([1, 3, 70]))
        counts = sorted(int(x) for x in rng.integers(1, limit + 1, requests))
        close(layer.step(table, before, counts, rng), TOLERANCE[torch.float32])
        before = [a + b for a, b in zip(before, counts, strict=True)]


@pytest.mark.parametrize("kv, tolerance", [("fp8", 0.1), ("fp8_per_token_head", 0.1), ("int8_per_token_head", 0.03)])
def test_8_bit_caches(kv, tolerance):
    layer, table = layer_of(5, kv=kv)
    rng, before = np.random.default_rng(SEED), [0] * 5
    for counts in STEPS:
        pairs = layer.step(table, before, counts, rng)
        close(pairs, tolerance)
        before = [a + b for a, b in zip(before, counts, strict=True)]
    difference = max(abs(got - expected).max() for got, expected in pairs)
    assert difference > 1e-4  # it was rounded


def test_the_factors_of_an_fp8_cache():
    """A byte times the factor is the value, as in vLLM's own caches."""
    layer, table = layer_of(1, kv="fp8")
    layer.step(table, [0], [3], np.random.default_rng(SEED))
    place, dim = table[0, 0], 32
    stored = layer.kv_cache[place, :, :3].view(torch.float8_e4m3fn).transpose(0, 1).double().cpu()
    factors = [getattr(layer.scales, name).double().cpu() for name in ("_k_scale", "_v_scale")]
    for part, factor, written in (
        (stored[..., :dim], factors[0], layer.keys[0]),
        (stored[..., dim:], factors[1][:, None], layer.values[0]),
    ):
        torch.testing.assert_close(part * factor, written, rtol=1 / 16, atol=0.001)


@pytest.mark.parametrize("kv", ["auto", "fp8_per_token_head"])
@pytest.mark.parametrize("dim_v", [16, 48])
def test_values_of_their_own_head_dim(dim_v, kv):
    """vLLM's layers take head_size_v. The cache then has head_size + head_size_v columns."""
    layer, table = layer_of(2, kv=kv)
    dtype = torch.uint8 if kv != "auto" else torch.float32
    sizes = {"block_size": PAGE, "num_kv_heads": 2, "head_size": 32, "head_size_v": dim_v}
    spec = FullAttentionSpec(**sizes, dtype=dtype, kv_quant_mode=get_kv_quant_mode(kv))
    columns = adapter.Backend.customize_spec(spec).state_content_size_bytes // dtype.itemsize
    cache = torch.full((table.size, 2, PAGE, columns), 255 if kv != "auto" else float("nan"), dtype=dtype)
    rng, counts = np.random.default_rng(SEED), [3, 40]
    common, rows = metadata(table, [0, 0], counts, PAGE)
    q, k, v = (rng.standard_normal((rows, h, d), np.float32) for h, d in ((4, 32), (2, 32), (2, dim_v)))
    out = torch.full((rows, 4, dim_v), float("nan"), device=DEVICE)
    given = (torch.from_numpy(x).to(DEVICE) for x in (q, k, v))
    layer.impl.forward(layer.scales, *given, cache.to(DEVICE), layer.builder.build(0, common), out)
    for now in (slice(0, 3), slice(3, 43)):
        want = standard_attention(*(x[None, now] for x in (q, k, v)), softmax_scale=32**-0.5, causal=True)[0][0]
        close([(out[now].cpu(), want)], 2e-5 if kv == "auto" else 0.1)


def test_a_cache_that_vllm_frees_is_not_held():
    """A layer outlives its cache: vLLM makes a small one to measure memory, and frees the last one at shutdown."""
    layer, table = layer_of(1)
    layer.step(table, [0], [5], np.random.default_rng(SEED))
    held = weakref.ref(layer.kv_cache)
    clear_layer_kv_caches([layer])
    gc.collect()
    assert held() is None


def test_padding_writes_nothing():
    layer, table = layer_of(3)
    rng = np.random.default_rng(SEED)
    close(layer.step(table, [0, 0, 0], [1, 4, 9], rng, padding=5), 2e-5)
    written = layer.kv_cache.isfinite().all(-1).all(1)  # (pages, rows)
    assert int(written.sum()) == 1 + 4 + 9
    assert bool(layer.kv_cache.transpose(1, 2)[~written].isnan().all())
    saved = layer.kv_cache.clone()
    layer.step(table, [1, 4, 9], [1, 1, 1], rng, skipped=3)  # reads keys that nobody wrote
    assert torch.equal(saved.nan_to_num(7), layer.kv_cache.nan_to_num(7))


def test_the_padding_requests_of_a_graph():
    """Requests without keys stand after the decodes, with a row for each in q."""
    layer, table = layer_of(3)
    rng = np.random.default_rng(SEED)
    close(layer.step(table, [0, 0, 0], [40, 3, 17], rng), 2e-5)
    close(layer.step(table, [40, 3, 17], [1, 1, 1], rng, padding=5, requests=8), 2e-5)
    common, _ = metadata(table, [41, 4, 18], [1, 1, 1], PAGE, padding=5, requests=8)
    (call,) = layer.builder.build_for_cudagraph_capture(common).calls
    assert call.shape == (8, 1) and call.gather is None
    assert call.lengths.data_ptr() == common.seq_lens.data_ptr()  # a graph reads what vLLM writes before its replay
    assert call.table.data_ptr() == common.block_table_tensor.data_ptr()


def test_drafts_are_one_call():
    """Speculative decoding: 1 + 3 rows of each request are a uniform decode, other numbers are not."""
    layer, table = layer_of(4)
    layer.builder.reorder_batch_threshold = 4
    rng = np.random.default_rng(SEED)
    close(layer.step(table, [0] * 4, [33, 2, 50, 9], rng), 2e-5)
    for counts, shapes in (([4, 4, 4, 4], [(4, 4)]), ([4, 4, 2, 30], [(2, 4), (2, 30)])):
        step = layer.builder.build(0, metadata(table, [33, 2, 50, 9], counts, PAGE)[0])
        assert [call.shape for call in step.calls] == shapes
        close(layer.step(table, [33, 2, 50, 9], counts, rng), 2e-5)


@pytest.mark.parametrize("asked", [False, True])
def test_decodes_may_share_pages(monkeypatch, asked):
    """Decodes ask for shared prefixes if the environment does; prompts do not."""
    monkeypatch.setenv(adapter.SHARED_PREFIX, str(int(asked)))
    layer, table = layer_of(4)
    called, function = [], adapter.flash_attn_with_kvcache

    def spy(q, *arrays, **options):
        called.append((q.shape[1], options.get("shared_prefix", False)))
        return function(q, *arrays, **options)

    monkeypatch.setattr(adapter, "flash_attn_with_kvcache", spy)
    rng = np.random.default_rng(SEED)
    close(layer.step(table, [0] * 4, [33, 2, 50, 9], rng), 2e-5)
    close(layer.step(table, [33, 2, 50, 0], [1, 1, 1, 60], rng), 2e-5)
    assert [shared for rows, shared in called if rows > 1] == [False, False]
    assert [shared for rows, shared in called if rows == 1] == [asked]


def test_local_attention_in_chunks():
    """Llama 4: vLLM's wrapper makes a request of each chunk that a request's rows touch."""
    layer, table = layer_of(5)
    layer.chunk = 32
    wrapped = create_chunked_local_attention_backend(adapter.Backend, layer.chunk).get_builder_cls()
    layer.builder = wrapped(layer.builder.kv_cache_spec, ["layer"], config_of(2048), torch.device(DEVICE))
    rng, before = np.random.default_rng(SEED), [0] * 5
    for counts in STEPS:
        close(layer.step(table, before, counts, rng), 2e-5)
        before = [a + b for a, b in zip(before, counts, strict=True)]


def test_an_empty_step():
    layer, table = layer_of(2)
    assert layer.step(table, [], [], np.random.default_rng(SEED)) == []
    out = torch.ones(3, 4, 32)
    assert not layer.impl.forward(layer.scales, out, out, out, layer.kv_cache, None, out).any()  # vLLM measures memory


def test_shared_caches_are_read_alone():
    layer, table = layer_of(2)
    rng = np.random.default_rng(SEED)
    close(layer.step(table, [0, 0], [20, 30], rng), 2e-5)
    layer.impl.kv_sharing_target_layer_name = "layer.0"
    saved = layer.kv_cache.clone()
    layer.step(table, [20, 30], [1, 1], rng)
    assert torch.equal(saved.nan_to_num(7), layer.kv_cache.nan_to_num(7))


def test_encoders_need_no_cache():
    layer, table = layer_of(3, attn_type=AttentionType.ENCODER_ONLY, sliding_window=9)
    common, rows = metadata(table, [0] * 3, [5, 60, 1], PAGE)
    common.causal = False
    q, k, v = torch.from_numpy(np.random.default_rng(SEED).standard_normal((3, rows, 4, 32))).to(DEVICE, torch.float32)
    out = torch.full_like(q, float("nan"))
    layer.impl.forward(layer.scales, q, k[:, :2], v[:, :2], layer.kv_cache, layer.builder.build(0, common), out)
    for now in (slice(0, 5), slice(5, 65), slice(65, 66)):
        parts = [x[None, now].double().cpu().numpy() for x in (q, k[:, :2], v[:, :2])]
        expected = standard_attention(*parts, softmax_scale=32**-0.5, window_size=(8, 8))[0][0]
        np.testing.assert_allclose(out[now].cpu().numpy(), expected, rtol=2e-5, atol=2e-5)


def test_cross_attention_sees_all_keys_of_an_encoder():
    """Keys and values of the encoder have slots of their own, which vLLM's builder computes, and more of them than
    the step has rows. The second step brings no keys."""
    layer, table = layer_of(2, attn_type=AttentionType.ENCODER_DECODER, buffer=32)
    cross = create_cross_attention_backend(adapter.Backend)
    builder = cross.get_builder_cls()(layer.builder.kv_cache_spec, ["layer"], config_of(32), torch.device(DEVICE))
    rng, encoded = np.random.default_rng(SEED), np.array([200, 290], np.int32)
    k, v = torch.from_numpy(rng.standard_normal((2, 490, 2, 32))).to(DEVICE, torch.float32)
    for before, counts, keys in (([0, 0], [2, 300], (k, v)), ([2, 300], [1, 1], (None, None))):
        q = torch.from_numpy(rng.standard_normal((sum(counts), 4, 32))).to(DEVICE, torch.float32)
        common, _ = metadata(table, [0, 0], counts, PAGE)
        common.encoder_seq_lens, common.encoder_seq_lens_cpu = torch.from_numpy(encoded).to(DEVICE), encoded
        common.seq_lens_cpu_upper_bound = torch.tensor(before) + torch.tensor(counts)
        out = torch.full_like(q, float("nan"))
        layer.impl.forward(layer.scales, q, *keys, layer.kv_cache, builder.build(0, common), out)
        starts = np.cumsum([0, *counts])
        for request, seen in enumerate((slice(0, 200), slice(200, 490))):
            rows = slice(starts[request], starts[request + 1])
            parts = [x[None].double().cpu().numpy() for x in (q[rows], k[seen], v[seen])]
            expected = standard_attention(*parts, softmax_scale=32**-0.5)[0][0]
            np.testing.assert_allclose(out[rows].cpu().numpy(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(DEVICE != "cpu", reason="declared for the CPU alone")
def test_batch_invariance(monkeypatch):
    """A request has the same bits alone, among others, whole, in chunks, and one row at a time."""
    assert adapter.Backend.supports_batch_invariance()
    results = []
    for others, chunks in ((0, [90]), (3, [90]), (3, [64, 26]), (3, [33, 57]), (0, [1] * 90)):
        layer, table = layer_of(1 + others, dtype=torch.bfloat16, dim=64)
        monkeypatch.setattr(layer.impl, "_invariant", True)
        rng, own = np.random.default_rng(SEED), np.random.default_rng(SEED + 1).standard_normal((90, 8, 64))
        done, rows = 0, []
        for count in chunks:
            counts = [count] + [int(x) for x in rng.integers(2, 99, others)]
            common, total = metadata(table, [done] + [0] * others, counts, PAGE)
            random = np.concatenate([own[done : done + count], rng.standard_normal((total - count, 8, 64))])
            q, k, v = torch.from_numpy(random).bfloat16().split([4, 2, 2], 1)
            out = torch.full_like(q, float("nan"))
            layer.impl.forward(layer.scales, q, k, v, layer.kv_cache, layer.builder.build(0, common), out)
            rows.append(out[:count])
            done += count
        results.append(torch.cat(rows))
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_what_it_tells_vllm():
    declared = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    declared |= {"use_mla": False, "has_sink": True, "use_sparse": False, "use_mm_prefix": False}
    declared |= {"use_per_head_quant_scales": True, "device_capability": SimpleNamespace(major=9, minor=0)}
    declared |= {"attn_type": AttentionType.DECODER, "has_sliding_window": True}
    assert adapter.Backend.validate_configuration(**declared) == []
    for refused in (
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "float16"},
        {"head_size": 513},
        {"head_size": 65, "kv_cache_dtype": "fp8_per_token_head"},
        {"use_mla": True},
        {"use_mm_prefix": True},
        {"use_non_causal": True},
        {"use_dcp": True},
    ):
        assert len(adapter.Backend.validate_configuration(**{**declared, **refused})) == 1, refused
    assert adapter.Builder.get_cudagraph_support(None, None) == AttentionCGSupport.UNIFORM_BATCH


def test_refusals_name_the_argument():
    with pytest.raises(Unsupported, match="kv_cache_dtype=fp8_e5m2"):
        layer_of(1, kv="fp8_e5m2")
    layer, table = layer_of(1)
    common, _ = metadata(table, [0], [3], PAGE)
    common.causal = torch.ones(1, dtype=torch.bool)
    with pytest.raises(Unsupported, match="causal is a Tensor"):
        layer.builder.build(0, common)
    with pytest.raises(Unsupported, match="output_scale"):
        layer.impl.forward(layer.scales, *[None] * 5, torch.ones(1), output_scale=torch.ones(1))


def test_register(monkeypatch):
    assert adapter.register() == adapter.register() == "FLASH_ATTN_MINIMAL"
    assert AttentionBackendEnum.FLASH_ATTN_MINIMAL.get_class() is adapter.Backend
    member = AttentionBackendEnum.FLASH_ATTN_MINIMAL
    assert copy.deepcopy(pickle.loads(pickle.dumps(member))) is member
    code = (
        "import pickle, sys; print(pickle.load(sys.stdin.buffer).get_class().get_name())"  # before plugins are loaded
    )
    spawned = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(member), capture_output=True)
    assert spawned.stdout.split()[-1:] == [b"FLASH_ATTN_MINIMAL"], spawned.stderr.decode()
    own = AttentionBackendEnum.CPU_ATTN.get_path()
    monkeypatch.setenv("FLASH_ATTN_VLLM_OVERRIDE", "CPU_ATTN")
    try:
        adapter.register()
        assert AttentionBackendEnum.CPU_ATTN.get_class() is adapter.Backend
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == own
    monkeypatch.setenv("FLASH_ATTN_VLLM_OVERRIDE", "GPU_ATTN")
    with pytest.raises(BadArgument, match="FLASH_ATTN_VLLM_OVERRIDE=GPU_ATTN"):
        adapter.register()


def test_the_example_runs():
    said = subprocess.run([sys.executable, ROOT / "examples/vllm_generate.py"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-3000:]
    assert said.stdout.count("as transformers generates") == 2


@pytest.mark.skipif(not current_platform.is_cpu(), reason="this vLLM has no engine for the CPU")
def test_an_engine_generates_the_same_as_with_its_own_backend(tmp_path):
    """vLLM finds the library by its entry point. Prompts are cut into chunks, and decodes run beside them."""
    project = (ROOT / "pyproject.toml").read_text()
    group, name, function = re.search(
        r'^\[project\.entry-points\."(.+)"\]\n(\w+) = "(.+?)"', project, re.MULTILINE
    ).groups()
    installed = tmp_path / "site/flash_attn_minimal-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-minimal\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[{group}]\n{name} = {function}\n")
    places = [str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "HF_HUB_OFFLINE": "1"}
    environment |= {"FLASH_ATTN_VLLM_OVERRIDE": "CPU_ATTN", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, Path(__file__).with_name("vllm_engine.py"), tmp_path]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["backend"] == "FLASH_ATTN_MINIMAL"
    assert found["calls"]["own"] == 0 < min(found["calls"]["ours"], found["calls"]["drafts"])
    for name, runs in found["models"].items():
        own = runs.pop("own")
        assert len({tuple(tokens) for tokens in own["tokens"]}) == len(own["tokens"]) > 5
        for run in runs.values():
            assert run["tokens"] == own["tokens"], name
            np.testing.assert_allclose(run["logprobs"], own["logprobs"], atol=1e-3)
