"""Each decode kernel by name: every way to cut, load and merge the keys of a call, against float64."""

from __future__ import annotations

from dataclasses import replace

import accuracy
import numpy as np
import pytest
import test_kvcache
from conftest import CUDA, NO_CUDA, Kernel, torch
from kvcache_cases import on_device
from test_kvcache import SCORES, Case, check

import flash_attn_minimal as fa
from flash_attn_lab import reference

# decode_mla_sm90 serves one pair of head dims: test_kvcache.py and test_prefill.py run it.
NAMES = [k["name"] for k in fa.kernels() if k["name"].startswith("decode_") and k["name"] != "decode_mla_sm90"]


@pytest.fixture(params=NAMES or [pytest.param("", marks=pytest.mark.skip(reason="a build without GPU kernels"))])
def kernel(request) -> Kernel:
    if NO_CUDA:
        pytest.skip(NO_CUDA)
    return Kernel(CUDA, request.param)


DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
LONG = Case(lengths=(1300, None, 0, 64, 517), rows=1400, nheads=8, nheads_k=2, headdim=128, dtype="bfloat16")
CACHES = pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])


ALL_DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
STEP = Case(
    lengths=(500, None, 0, 64, 199, 1), rows=512, seqlen_new=1, rotary_dim=24, causal=True, nheads=4, nheads_k=4
)


@DTYPES
@CACHES
@pytest.mark.parametrize("headdim", [(64, None), (128, None), (256, None), (16, 32), (96, None), (192, 128)], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_head_dims(kernel, dtype, cache_dtype, headdim, seqlen_q):
    case = replace(LONG, dtype=dtype, cache_dtype=cache_dtype, headdim=headdim[0], headdim_v=headdim[1])
    check(kernel, replace(case, seqlen_q=seqlen_q, causal=True))


@CACHES
@pytest.mark.parametrize("page", [1, 3, 16, 17, 48, 64, 256])
@pytest.mark.parametrize("headdim", [64, 128])
def test_pages(kernel, page, cache_dtype, headdim):
    case = replace(LONG, cache_dtype=cache_dtype, headdim=headdim, rows=page, pages=-(-1400 // page))
    for scales in test_kvcache.SCALES if cache_dtype else ("heads",):
        if page > 1 or scales != "entries":  # a page of one row has its factors by token
            check(kernel, replace(case, scales=scales))
    check(kernel, replace(case, seqlen_q=20, causal=True, scales="tokens"))


@CACHES
@pytest.mark.parametrize("scores", SCORES, ids=str)
@pytest.mark.parametrize("rows", [3, 9])
def test_scores(kernel, scores, cache_dtype, rows):
    check(kernel, replace(LONG, cache_dtype=cache_dtype, seqlen_q=rows, seqlen_new=2, **scores))


@pytest.mark.parametrize("seqlen_q", [1, 2, 7, 16, 33, 64, 200])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (8, 8), (16, 2), (64, 1)])
def test_rows_and_heads(kernel, seqlen_q, heads):
    case = Case(seqlen_q=seqlen_q, seqlen_new=seqlen_q, lengths=(130, 0, 300), rows=520, dtype="float16")
    check(kernel, replace(case, nheads=heads[0], nheads_k=heads[1], causal=True))


@CACHES
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 256])
def test_num_splits(kernel, splits, cache_dtype):
    check(kernel, replace(LONG, num_splits=splits, cache_dtype=cache_dtype))
    check(kernel, replace(LONG, num_splits=splits, cache_dtype=cache_dtype, seqlen_q=17, sinks=True))


@pytest.mark.parametrize("batch", [1, 2, 31, 33, 70, 300])
def test_batches(kernel, batch):
    lengths = tuple(int(x) for x in np.random.default_rng(batch).integers(-40, 700, batch))
    lengths = tuple(None if x < 0 else x for x in lengths)
    case = replace(LONG, lengths=lengths, rows=720, headdim=64, nheads=4, spare=0)
    check(kernel, case)
    check(kernel, replace(case, batch_invariant=True))


@CACHES
@pytest.mark.parametrize("batch", [3, 64, 130])
def test_equal_lengths(kernel, batch, cache_dtype):
    """Units that are cut at their ends, that whole blocks take, or neither: all lengths equal, and one that differs."""
    case = replace(LONG, lengths=(300,) * batch, rows=320, nheads=4, spare=0, cache_dtype=cache_dtype)
    check(kernel, case)
    check(kernel, replace(case, lengths=(300,) * (batch - 1) + (37,), window_size=(250, 0)))


@DTYPES
@CACHES
@pytest.mark.parametrize(
    "splits, heads", [(0, (8, 2)), (1, (8, 2)), (2, (16, 1)), (4, (3, 3)), (8, (8, 2)), (16, (16, 1))]
)
def test_clusters(kernel, dtype, cache_dtype, splits, heads):
    """Up to 16 rows in clusters of blocks: a tile for only one warp, and rings that wrap around."""
    case = replace(LONG, lengths=(1000, None, 0, 64, 517, 15), rows=1020, seqlen_new=0, dtype=dtype)
    case = replace(case, cache_dtype=cache_dtype, num_splits=splits, nheads=heads[0], nheads_k=heads[1])
    check(kernel, case)
    check(kernel, replace(case, rows=16, pages=64, scales="tokens"))
    check(kernel, replace(case, seqlen_q=2, rows=24, pages=42, window_size=(300, 0), sinks=True, batch_invariant=True))
    check(kernel, replace(case, seqlen_q=2, headdim=80, headdim_v=48, softcap=20.0, alibi=2, scales="tokens"))
    check(kernel, replace(case, headdim=64, seqlen_new=3, causal=True, batch_idx=True))


@DTYPES
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("headdim", [(64, None), (128, None), (16, 48), (96, 80)], ids=str)
def test_one_row_of_8_bits(kernel, dtype, cache_dtype, headdim):
    """One factor for a key head, or for a key head of a sequence. It is not looked up for each key."""
    case = replace(LONG, dtype=dtype, cache_dtype=cache_dtype, headdim=headdim[0], headdim_v=headdim[1], nheads_k=8)
    for seqlen_new in (0, 1):
        for scales in ("heads", "entries"):
            check(kernel, replace(case, seqlen_new=seqlen_new, scales=scales, batch_idx=True, sinks=True))
        check(kernel, replace(case, seqlen_new=seqlen_new, rows=32, pages=44, alibi=2, window_size=(400, 0)))


def test_factors_by_key_are_refused():
    """decode_lanes_cluster_sm90 takes an 8-bit cache only with one factor for all keys of a head."""
    name = "decode_lanes_cluster_sm90"
    if NO_CUDA or name not in NAMES:
        pytest.skip(NO_CUDA or "a build without GPU kernels")
    case = replace(LONG, cache_dtype="int8", nheads_k=8, seqlen_new=0)
    for scales, served in (("heads", True), ("entries", True), ("tokens", False)):
        changed = replace(case, scales=scales)
        plan = fa.kvcache_query(**on_device(Kernel(CUDA, name), changed, test_kvcache.make(changed)))
        assert (plan.status == "FA_OK") == served, plan
        assert served or "one factor for all keys of a key head" in plan.error


@pytest.mark.parametrize(
    "heads, headdim, rows, name",
    [
        (12, 64, 1024, "decode_lanes_cluster_sm90"),
        (32, 128, 256, "decode_lanes_cluster_sm90"),
        (32, 128, 1024, "decode_cluster_sm90"),  # more than 16 KB for each of two blocks of a multiprocessor
    ],
)
def test_first_choices_of_8_bits_on_hopper(heads, headdim, rows, name):
    if NO_CUDA or name not in NAMES:
        pytest.skip(NO_CUDA or "a build without GPU kernels")
    case = Case(lengths=(rows,), rows=rows, nheads=heads, nheads_k=heads, headdim=headdim, cache_dtype="int8")
    call = test_kvcache.make(replace(case, dtype="bfloat16", seqlen_new=0))
    on = {n: CUDA.array(x, "bfloat16" if n == "q" else None) for n, x in {"q": call.q, **call.arrays}.items()}
    if fa.kvcache_query(**on, kernel=name).status != "FA_OK":
        pytest.skip("not a Hopper GPU")
    assert fa.kvcache_query(**on).kernel == name


def outputs(kernel: Kernel, case: Case):
    return test_kvcache.run(kernel, case, test_kvcache.make(case))[:2]


@pytest.mark.parametrize("options", [{}, {"num_splits": 5}, {"batch_invariant": True}], ids=str)
def test_same_bits_again(kernel, options):
    case = replace(LONG, **options)
    for first, again in zip(outputs(kernel, case), outputs(kernel, case), strict=True):
        np.testing.assert_array_equal(first, again)


def test_batch_invariant(kernel):
    """A sequence gives the same bits alone and in a batch."""
    call = test_kvcache.make(replace(LONG, lengths=(1300, 900, 517, 64, 1), seqlen_new=0))
    arrays = {"q": call.q, **call.cache}

    def attend(rows, lengths):
        on = {n: kernel.device.array(x[rows], "bfloat16") for n, x in arrays.items()}
        on["cache_seqlens"] = kernel.device.array(lengths[rows])
        return kernel.device.numpy(fa.flash_attn_with_kvcache(**on, kernel=kernel.name, batch_invariant=True))

    lengths = call.where["cache_seqlens"]
    on = {n: kernel.device.array(x, "bfloat16") for n, x in arrays.items()}
    plan = fa.kvcache_query(**on, cache_seqlens=500, kernel=kernel.name, batch_invariant=True)
    if plan.status != "FA_OK":
        pytest.skip(plan.error)
    together = attend(slice(0, 5), lengths)
    for b in range(5):
        np.testing.assert_array_equal(attend(slice(b, b + 1), lengths)[0], together[b])


def test_plain_calls(kernel):
    """Few rows and no cache; packed sequences are refused."""
    rng = np.random.default_rng(3)
    q, k, v = (
        accuracy.round_to(rng.standard_normal(s, dtype=np.float32), "float16")
        for s in ((2, 3, 4, 64), (2, 1111, 2, 64), (2, 1111, 2, 64))
    )
    at = kernel.device.array
    exact, _ = reference.standard_attention(q, k, v, causal=True)
    plain, _ = accuracy.plain_attention(q, k, v, "float16", causal=True)
    arrays = [at(x, "float16") for x in (q, k, v)]
    if (plan := fa.query(*arrays, causal=True, kernel=kernel.name)).status != "FA_OK":
        pytest.skip(plan.error)
    out = fa.flash_attn_func(*arrays, causal=True, kernel=kernel.name)
    accuracy.check("out", kernel.device.numpy(out), exact, plain, "float16")
    starts = at(np.array([0, 3], np.int32))
    plan = fa.query(
        *(at(x[0], "float16") for x in (q, q[:, :, :2], q[:, :, :2])), starts, starts, 3, 3, kernel=kernel.name
    )
    assert plan.status == "FA_UNSUPPORTED" and "takes no packed sequences" in plan.error


@pytest.mark.parametrize("headdim", [(64, None), (128, None), (256, None), (16, 32), (96, None), (192, 128)], ids=str)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (5, 1), (40, 1)])
def test_float32(kernel, headdim, heads):
    """Caches too long for a cluster, and short ones."""
    case = replace(LONG, dtype="float32", headdim=headdim[0], headdim_v=headdim[1], nheads=heads[0], nheads_k=heads[1])
    check(kernel, case)
    check(kernel, replace(case, seqlen_q=3, causal=True, rows=17, pages=83))
    check(kernel, replace(case, lengths=(150, None, 0), rows=160, seqlen_new=1, batch_invariant=True))


@ALL_DTYPES
@pytest.mark.parametrize("splits", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (14, 2), (32, 1)])
def test_whole_steps(kernel, dtype, splits, heads):
    """One new key, in clusters: one launch rotates it, rounds it, writes it to the cache and attends to it."""
    case = replace(STEP, dtype=dtype, num_splits=splits, nheads=heads[0], nheads_k=heads[1])
    check(kernel, case)
    check(kernel, replace(case, rotary_interleaved=False, rotary_float32=True, headdim=40, headdim_v=80, sinks=True))
    check(kernel, replace(case, rotary_dim=0, rows=17, pages=31, headdim=128, window_size=(100, 0)))


@ALL_DTYPES
@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_scores_of_whole_steps(kernel, dtype, scores):
    check(kernel, replace(STEP, dtype=dtype, num_splits=4, **{"causal": False, **scores}))
    check(kernel, replace(STEP, dtype=dtype, num_splits=2, seqlen_q=3, **{"causal": False, **scores}))


def test_whole_steps_need_no_workspace(kernel):
    case = replace(STEP, dtype="float16")
    plan = fa.kvcache_query(**test_kvcache.on_device(kernel, case, test_kvcache.make(case)))
    if kernel.name != "decode_lanes_cluster_sm90" or plan.status != "FA_OK":
        pytest.skip("no whole steps")
    assert plan.workspace_bytes == 0, plan


@pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA")
@ALL_DTYPES
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_programmatic_steps(kernel, dtype, heads):
    """Steps between programmatic products in a graph, replayed as the lengths grow, give the results of plain calls."""
    from flash_attn_minimal.transformer import ops

    nheads, nheads_k = heads
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).to(getattr(torch, dtype))

    layers, width, headdim = 3, (nheads + 2 * nheads_k) * 64, 64
    weights = [(normal(width, 256) / 16, normal(256, nheads * headdim) / 16) for _ in range(layers)]
    tables = [torch.randn(100, headdim // 2, device="cuda", generator=generator) for _ in range(2)]
    first, caches = normal(2, 256), normal(layers, 2, 2, 100, nheads_k, headdim)
    about = [normal(2, 1, heads, headdim) for heads in (nheads, nheads_k, nheads_k)]
    plan = fa.kvcache_query(about[0], *caches[0], *about[1:], *tables, cache_seqlens=1, causal=True, kernel=kernel.name)
    if plan.status != "FA_OK":
        pytest.skip(plan.error)

    def step(x, caches, lengths, programmatic):
        out = torch.empty_like(x)
        out.copy_(x)  # a plain launch: what the steps before wrote is there
        for layer, (into, back) in enumerate(weights):
            qkv = ops.linear(out, into, programmatic=programmatic).view(2, 1, -1, headdim)
            q, k, v = qkv.split([nheads, nheads_k, nheads_k], 2)
            y = fa.flash_attn_with_kvcache(
                q, *caches[layer], k, v, *tables, cache_seqlens=lengths, causal=True, kernel=kernel.name,
                programmatic=programmatic,
            )  # fmt: skip
            out = ops.linear(y.view(2, -1), back, residual=out, programmatic=programmatic)
        return out

    lengths, plain_caches = torch.tensor([0, 37], dtype=torch.int32, device="cuda"), caches.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(first, caches.clone(), lengths, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(first, caches, lengths, True)
    for _ in range(40):
        graph.replay()
        want = step(first, plain_caches, lengths, False)
        torch.testing.assert_close(result, want, rtol=0, atol=0)
        lengths += 1
    torch.testing.assert_close(caches, plain_caches, rtol=0, atol=0)


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
@pytest.mark.parametrize("heads, rows", [((8, 8), 16384), ((16, 16), 8192), ((32, 8), 32768)])
def test_long_caches_go_to_kernels_that_divide_the_keys(heads, rows):
    """One sequence may be much longer than the others, and its keys must not be the work of one block."""
    q, k = (
        CUDA.array(np.zeros(shape, np.float32), "float16") for shape in ((2, 1, heads[0], 64), (2, rows, heads[1], 64))
    )
    plan = fa.kvcache_query(q, k, k, cache_seqlens=CUDA.array(np.array([rows, 100], np.int32)))
    assert plan.kernel not in ("mma_sm80", "wgmma_sm90", "decode_cluster_sm90", "decode_lanes_cluster_sm90"), plan


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_plain_calls_of_few_rows_come_here():
    q, k = (CUDA.array(np.zeros(shape, np.float32), "float16") for shape in ((1, 2, 8, 64), (1, 700, 2, 64)))
    assert fa.query(q, k, k).kernel in NAMES
    assert fa.query(q, k[:, :100], k[:, :100]).kernel not in NAMES


# (batch, nheads, nheads_k, seqlen_k, headdim): tiles of keys that no usual number of multiprocessors divides evenly, so
# that a block ends one sequence and begins the next.
UNEVEN = [
    (5, 28, 4, 2339, 256), (8, 40, 5, 2936, 192), (33, 4, 4, 700, 256), (7, 19, 19, 1031, 160), (3, 64, 1, 4099, 256),
    (5, 28, 4, 2339, 128), (8, 40, 5, 2936, 64), (67, 8, 2, 513, 128), (34, 16, 4, 391, 72),
]  # fmt: skip


@ALL_DTYPES
@pytest.mark.parametrize("shape", UNEVEN, ids=str)
def test_work_that_is_not_cut_evenly(kernel, dtype, shape):
    batch, nheads, nheads_k, seqlen_k, headdim = shape
    rng = np.random.default_rng(seqlen_k)
    q = accuracy.round_to(rng.standard_normal((batch, 1, nheads, headdim), dtype=np.float32), dtype)
    k, v = accuracy.round_to(rng.standard_normal((2, batch, seqlen_k, nheads_k, headdim), dtype=np.float32), dtype)
    out, lse = kernel(q, k, v, dtype, causal=True)
    exact, exact_lse = reference.standard_attention(q, k, v, causal=True)
    plain, plain_lse = accuracy.plain_attention(q, k, v, dtype, causal=True)
    accuracy.check("out", out, exact, plain, dtype)
    accuracy.check("lse", lse, exact_lse, plain_lse, "float32")
    lengths = tuple(int(x) for x in rng.integers(0, seqlen_k, batch))  # and each sequence has a different length
    case = Case(lengths=lengths, rows=seqlen_k, seqlen_new=0, dtype=dtype, spare=0, causal=True)
    check(kernel, replace(case, nheads=nheads, nheads_k=nheads_k, headdim=headdim))
