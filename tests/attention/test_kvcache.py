"""Attention over a cache: with new keys, rotary embedding, pages and 8 bits, on every kernel that serves it, against
float64."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import accuracy
import numpy as np
import pytest
from conftest import NO_CUDA, SEED, Kernel, torch
from kvcache_cases import (
    SCALES,
    Call,
    Case,
    check,
    make,
    on_device,
    run,
)

import flash_attn_minimal as fa
from flash_attn_lab import reference

DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("seqlen_new", [0, 1, 5])
@pytest.mark.parametrize("batch_idx", [False, True])
def test_contiguous(kernel, dtype, seqlen_new, batch_idx):
    case = Case(dtype=dtype, seqlen_new=seqlen_new, seqlen_q=max(seqlen_new, 1), batch_idx=batch_idx, causal=True)
    check(kernel, case)
    check(kernel, replace(case, lengths=(None, 37, None, 75, 0, 9), seqlen_q=3, causal=False))
    check(kernel, replace(case, lengths=(None, None)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 24, 64])
@pytest.mark.parametrize("float32", [False, True])
@DTYPES
def test_rotary(kernel, interleaved, rotary_dim, float32, dtype):
    case = Case(
        dtype=dtype, rotary_dim=rotary_dim, rotary_interleaved=interleaved, rotary_float32=float32,
        seqlen_q=4, seqlen_new=4, lengths=(10, None, 0, 76),
    )  # fmt: skip
    check(kernel, case)
    check(kernel, replace(case, causal=True))
    check(kernel, replace(case, window_size=(9, 3), rotary_rows=50))


@pytest.mark.parametrize("seqlen_q", [1, 2, 7, 16, 33, 64, 200])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (8, 8), (16, 2)])
def test_rows_and_heads(kernel, seqlen_q, heads):
    case = Case(seqlen_q=seqlen_q, seqlen_new=seqlen_q, lengths=(130, 0, 300), rows=520)
    case = replace(case, nheads=heads[0], nheads_k=heads[1], causal=True, headdim=32)
    check(kernel, case)


SCORES = [
    {"causal": True},
    {"window_size": (20, 0)},
    {"window_size": (0, 0), "causal": True},
    {"window_size": (7, 2)},
    {"attention_chunk": 16, "causal": True},
    {"attention_chunk": 5, "window_size": (7, 2), "alibi": 1},
    {"softcap": 3.0, "causal": True},
    {"alibi": 1, "causal": True},
    {"alibi": 2},
    {"sinks": True, "causal": True},
    {"sinks": True, "window_size": (11, 0), "softcap": 2.0, "alibi": 2},
    {"softmax_scale": 0.3},
]


@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_scores(kernel, scores):
    check(kernel, Case(seqlen_q=6, seqlen_new=2, lengths=(37, None, 0, 71), **scores))


@pytest.mark.parametrize("scores", [*SCORES, {}], ids=str)
def test_left_padding(kernel, scores):
    """Keys begin after padding, which holds NaN. Positions of the scores are counted from the first key."""
    case = Case(seqlen_q=6, seqlen_new=2, lengths=(37, None, 0, 71, 71, 5), leftpads=(11, 0, 0, 40, 70, 5), **scores)
    check(kernel, case)
    check(kernel, replace(case, dtype="float16", batch_idx=True, seqlen_new=0, seqlen_q=1))
    check(kernel, replace(case, rows=16, pages=5, dtype="float16"))
    check(kernel, replace(case, rows=3, pages=30, seqlen_q=70, nheads=6, nheads_k=3))


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_left_padding_of_8_bits(kernel, cache_dtype, scales):
    case = Case(lengths=(37, None, 71), leftpads=(11, 0, 70), dtype="float16", cache_dtype=cache_dtype, scales=scales)
    check(kernel, case)
    check(kernel, replace(case, rows=16, pages=5, causal=True, seqlen_q=3, seqlen_new=3))


def test_left_padding_and_rotary(kernel):
    """Positions of the rotary embedding are rows of an entry, including the padding."""
    case = Case(lengths=(37, 0, 71), leftpads=(11, 0, 3), rotary_dim=24, seqlen_q=4, seqlen_new=4, causal=True)
    check(kernel, case)
    check(kernel, replace(case, causal=False, rows=16, pages=5))


@pytest.mark.parametrize("leftpads", [None, (3, 0, 0, 60)])
def test_rotary_without_new_keys(kernel, leftpads):
    """Only q is rotated, from the position after the existing keys on."""
    case = Case(lengths=(10, None, 0, 76), leftpads=leftpads, rotary_dim=24, seqlen_q=4, seqlen_new=0)
    check(kernel, case)
    check(kernel, replace(case, causal=True, dtype="float16", rotary_interleaved=False))
    check(kernel, replace(case, attention_chunk=32, rows=16, pages=5))
    check(kernel, replace(case, seqlen_q=1, window_size=(9, 3), rotary_rows=50))


def test_append_then_attend_equals_concatenation(kernel):
    """Token by token with a cache gives the result of one causal call without a cache."""
    rng = np.random.default_rng(5)
    q, k, v = accuracy.round_to(rng.standard_normal((3, 2, 23, 4, 32), dtype=np.float32), "float16")
    k, v = k[:, :, :2], v[:, :, :2]
    at = kernel.device.array
    cache = [at(np.full((2, 40, 2, 32), np.nan, np.float32), "float16") for _ in "kv"]
    rows, start = [], 0
    for chunk in (1, 9, 1, 1, 7, 4):
        part = slice(start, start + chunk)
        arrays = [at(x[:, part], "float16") for x in (q, k, v)]
        options = {"cache_seqlens": start, "causal": True, "kernel": kernel.name}
        if fa.kvcache_query(arrays[0], *cache, *arrays[1:], **options).status != "FA_OK":
            assert not kernel.general
            pytest.skip("refuses")
        rows.append(kernel.device.numpy(fa.flash_attn_with_kvcache(arrays[0], *cache, *arrays[1:], **options)))
        start += chunk
    exact, _ = reference.standard_attention(q, k, v, causal=True)
    plain, _ = accuracy.plain_attention(q, k, v, "float16", causal=True)
    accuracy.check("out", np.concatenate(rows, axis=1), exact, plain, "float16")


def test_one_length_for_all(kernel):
    """An integer, an array of that integer, and None for a full cache give the same result."""
    case = Case(lengths=(79, 79), seqlen_new=1)
    call = make(case)
    arrays = on_device(kernel, case, call)
    if fa.kvcache_query(**arrays).status == "FA_UNSUPPORTED":
        pytest.skip("refuses")
    want = kernel.device.numpy(fa.flash_attn_with_kvcache(**arrays))
    for lengths in (79, np.int64(79), None):
        again = kernel.device.numpy(fa.flash_attn_with_kvcache(**{**arrays, "cache_seqlens": lengths}))
        np.testing.assert_array_equal(again, want)


def test_whole_call_against_the_reference(kernel):
    case = Case(rotary_dim=48, causal=True, seqlen_q=5, seqlen_new=5, lengths=(12, None, 60))
    call = make(case)
    exact, exact_lse = reference.kvcache_attention(call.q, **call.arrays, **call.options)
    out, lse, _ = run(kernel, case, call)
    np.testing.assert_allclose(out, exact, atol=2e-5, rtol=0)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5, rtol=0)


PAGE_SIZES = [1, 3, 16, 17, 64, 256]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@DTYPES
def test_pages(kernel, page_size, dtype):
    """Shuffled tables. Unused pages are full of NaN, and unused entries of the tables hold nonsense."""
    case = Case(dtype=dtype, rows=page_size, pages=-(-300 // page_size), lengths=(37, None, 0, 297), causal=True)
    check(kernel, case)
    check(kernel, replace(case, seqlen_q=3, seqlen_new=3, nheads=6, nheads_k=3, window_size=(70, 0)))
    check(kernel, replace(case, seqlen_new=0, headdim=40, headdim_v=72, seqlen_q=70))


@pytest.mark.parametrize("page_size", [1, 16, 17])
def test_page_size_changes_no_bit(kernel, page_size):
    """Paged and contiguous caches with the same keys give the same bits on one kernel."""
    contiguous = make(Case(lengths=(100, 64, 3), seqlen_new=0, rows=128, spare=0, headdim=32, dtype="float16"))
    pages = 128 // page_size + 1
    order = np.random.default_rng(1).permutation(3 * pages).astype(np.int32)
    table = order.reshape(3, pages)
    paged = replace_arrays(contiguous, block_table=table)
    for name, x in contiguous.cache.items():
        whole = np.full((3, pages * page_size, *x.shape[2:]), np.nan, np.float32)
        whole[:, : x.shape[1]] = x[:, : whole.shape[1]]
        cache = np.empty((3 * pages, page_size, *x.shape[2:]), np.float32)
        cache[table] = whole.reshape(3, pages, page_size, *x.shape[2:])
        paged.cache[name] = cache
    case = Case(dtype="float16")
    results = [run(kernel, case, call)[:2] for call in (contiguous, paged)]
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


def replace_arrays(call: Call, **where) -> Call:
    return replace(call, cache=dict(call.cache), where={**call.where, **where})


CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])


@CACHE_DTYPES
@pytest.mark.parametrize("scales", SCALES)
@DTYPES
def test_eight_bit(kernel, cache_dtype, scales, dtype):
    case = Case(dtype=dtype, cache_dtype=cache_dtype, scales=scales, lengths=(37, None, 0, 71), causal=True)
    check(kernel, case)
    check(kernel, replace(case, seqlen_q=5, seqlen_new=5, rotary_dim=32, headdim=40, headdim_v=72))
    check(kernel, replace(case, seqlen_new=0, batch_idx=True, seqlen_q=33))
    check(kernel, replace(case, rows=17, pages=5, window_size=(30, 0)))
    if scales != "entries":  # with one row a page, (pages, 1, nheads_k) are the factors of tokens
        check(kernel, replace(case, rows=1, pages=75, headdim=8))


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("seqlen_q", [1, 40])
@DTYPES
def test_latent_attention(kernel, cache_dtype, seqlen_q, dtype):
    """Multi-head latent attention: headdim 576, headdim_v 512, one key head."""
    case = Case(dtype=dtype, cache_dtype=cache_dtype, headdim=576, headdim_v=512, nheads=4, nheads_k=1, causal=True)
    case = replace(case, seqlen_q=seqlen_q, seqlen_new=seqlen_q, lengths=(130, None, 60), rows=64, pages=4)
    check(kernel, case)
    check(kernel, replace(case, rows=200, pages=0))


def test_values_that_are_columns_of_the_keys(kernel):
    """v_cache may be a view of k_cache."""
    rng = np.random.default_rng(3)
    latent = rng.standard_normal((5, 16, 1, 576), dtype=np.float32)
    q = rng.standard_normal((1, 2, 4, 576), dtype=np.float32)
    cache, table = kernel.device.array(latent), np.array([[4, 2, 0]], np.int32)
    arrays = {"cache_seqlens": kernel.device.array(np.array([41], np.int32)), "block_table": kernel.device.array(table)}
    call = {"q": kernel.device.array(q), "k_cache": cache, "v_cache": cache[..., :512], "kernel": kernel.name, **arrays}
    if fa.kvcache_query(**call).status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip("refuses")
    out = kernel.device.numpy(fa.flash_attn_with_kvcache(**call))
    exact, _ = reference.kvcache_attention(q, latent, latent[..., :512], cache_seqlens=[41], block_table=table)
    np.testing.assert_allclose(out, exact, atol=3e-5, rtol=0)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 64, 256])
def test_long_caches(kernel, num_splits):
    """Few rows against many keys, which a kernel may cut into pieces whose results it merges."""
    case = Case(lengths=(9000, 0, 5000, None), rows=9001, nheads=4, nheads_k=2, headdim=32, num_splits=num_splits)
    check(kernel, case)
    check(kernel, replace(case, window_size=(3100, 0), sinks=True, seqlen_q=3, seqlen_new=3, rows=9003))
    check(kernel, replace(case, rows=64, pages=141, causal=True, alibi=1, seqlen_q=2, dtype="float16"))


def test_row_alone_equals_row_in_a_batch(kernel):
    """batch_invariant: the other sequences of a batch change no bit of a sequence's result."""
    case = Case(
        lengths=(5000, 3, 7001, 640, None), rows=7100, seqlen_q=2, seqlen_new=0, headdim=32, batch_invariant=True
    )
    call = make(case)
    arrays = on_device(kernel, case, call)
    if fa.kvcache_query(**arrays).status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip("refuses")
    whole = [kernel.device.numpy(x) for x in fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)]
    for rows in ([0], [1, 2], [4, 3, 2, 1, 0], [2], [3, 3, 3, 3, 3, 3, 3, 3]):
        part = {**arrays, "q": kernel.device.array(call.q[rows], case.dtype)}
        part["cache_seqlens"] = kernel.device.array(call.where["cache_seqlens"][rows])
        part["cache_batch_idx"] = kernel.device.array(np.array(rows, np.int32))
        for got, want in zip(fa.flash_attn_with_kvcache(**part, return_softmax_lse=True), whole, strict=True):
            np.testing.assert_array_equal(kernel.device.numpy(got), want[rows])


@pytest.mark.parametrize("num_splits", [0, 3])
def test_the_capacity_changes_no_bit(kernel, num_splits):
    """batch_invariant: a wider block table, such as a longer sequence needs, changes no bit of a result."""
    rng = np.random.default_rng(3)
    pages = [rng.standard_normal((640, 16, 2, 64), dtype=np.float32) for _ in range(2)]
    q, lengths = rng.standard_normal((2, 1, 4, 64), dtype=np.float32), np.array([100, 4500], np.int32)
    table = np.arange(640, dtype=np.int32).reshape(2, 320)
    for dtype in ("float32", "bfloat16"):
        cache = [kernel.device.array(x, dtype) for x in pages]

        def attend(batch, width, cache=cache, dtype=dtype):
            given = {
                "block_table": kernel.device.array(np.ascontiguousarray(table[:batch, :width])),
                "cache_seqlens": kernel.device.array(lengths[:batch]),
                "batch_invariant": True,
                "num_splits": num_splits,
                "kernel": kernel.name,
            }
            arrays = kernel.device.array(q[:batch], dtype), *cache
            plan = fa.kvcache_query(*arrays, **given)
            if plan.status == "FA_UNSUPPORTED":
                pytest.skip(plan.error)
            results = fa.flash_attn_with_kvcache(*arrays, **given, return_softmax_lse=True)
            return [kernel.device.numpy(x)[0] for x in results]

        alone = attend(1, 7)
        for batch, width in ((1, 8), (1, 192), (1, 193), (1, 320), (2, 320)):
            for got, want in zip(attend(batch, width), alone, strict=True):
                np.testing.assert_array_equal(got, want, err_msg=f"batch {batch}, table of {width} pages, {dtype}")


def test_equal_calls_give_equal_bits(kernel):
    case = Case(lengths=(5000, 3, 4097), rows=5100, seqlen_q=1, seqlen_new=0, headdim=32, dtype="float16")
    call = make(case)
    first, *others = [run(kernel, case, call)[:2] for _ in range(3)]
    for again in others:
        for one, two in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, two)


def test_threads_change_no_bit():
    """The pieces of a head's keys depend only on the number of keys; then any number of threads shares them."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 1, 2, 64), dtype=np.float32)
    cache = rng.standard_normal((2, 1, 40_000, 1, 64), dtype=np.float32)
    for lengths in (39_999, 3073):
        results = [
            fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, num_threads=n, return_softmax_lse=True)
            for n in (1, 2, 3, 16)
        ]
        exact = reference.kvcache_attention(q, *cache, cache_seqlens=[lengths])
        for got in results:
            for one, two, want in zip(got, results[0], exact, strict=True):
                np.testing.assert_array_equal(one, two)
                np.testing.assert_allclose(one, want, atol=2e-6, rtol=0)


def random_cases(st):
    """Draws any small case that the contract allows."""

    @st.composite
    def cases(draw):
        flags, options = st.booleans(), {}
        options["seqlen_new"] = draw(st.integers(0, 6))
        longest = draw(st.integers(options["seqlen_new"], 150))
        options["rows"] = draw(st.sampled_from([0, 0, 1, 2, 3, 16, 17, 64, 256]))
        if options["rows"]:
            options["pages"] = max(-(-longest // options["rows"]), 1)
        else:
            options |= {"rows": max(longest, 1), "batch_idx": draw(flags)}
        room = options["rows"] * options.get("pages", 1) - options["seqlen_new"]
        length = st.none() | st.integers(0, min(room, longest - options["seqlen_new"]))
        options["lengths"] = tuple(draw(st.lists(length, min_size=1, max_size=4)))
        options["spare"] = draw(st.integers(0, 3))
        options["nheads_k"] = draw(st.integers(1, 3))
        options["nheads"] = options["nheads_k"] * draw(st.sampled_from([1, 2, 3, 5, 8]))
        options["seqlen_q"] = draw(st.sampled_from([1, 1, 1, 2, 3, 7, 16, 40, 70]))
        dims = st.sampled_from([1, 8, 33, 40, 64, 72, 80, 96, 128, 192, 256])
        options["headdim"], options["headdim_v"] = draw(dims), draw(st.none() | dims)
        options["dtype"] = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
        options["cache_dtype"] = draw(st.sampled_from([None, None, "float8_e4m3fn", "int8"]))
        options["scales"] = draw(st.sampled_from(SCALES if options["rows"] > 1 else ("heads", "tokens")))
        options["causal"] = draw(flags)
        options["window_size"] = draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 160), st.integers(-1, 160)))
        options["softcap"] = draw(st.sampled_from([0.0, 0.0, 1.0, 30.0]))
        options["softmax_scale"] = draw(st.none() | st.floats(-1, 1, width=32))
        options["alibi"], options["sinks"] = draw(st.sampled_from([0, 0, 1, 2])), draw(flags)
        if options["seqlen_new"] and options["headdim"] > 1 and draw(flags):
            options["rotary_dim"] = 2 * draw(st.integers(1, options["headdim"] // 2))
            options["rotary_interleaved"], options["rotary_float32"] = draw(flags), draw(flags)
            options["rotary_rows"] = draw(st.sampled_from([0, 0, 5]))
        options["num_splits"] = draw(st.sampled_from([0, 0, 1, 2, 3, 256]))
        options["batch_invariant"], options["seed"] = draw(flags), draw(st.integers(0, 2**16))
        return Case(**options)

    return cases()


def test_random_calls(kernel):
    hypothesis = pytest.importorskip("hypothesis")
    examples = int(os.environ.get("FLASH_ATTN_TEST_EXAMPLES", "40"))
    health = list(hypothesis.HealthCheck)

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=health)
    @hypothesis.given(random_cases(hypothesis.strategies))
    def run(case):
        try:
            check(kernel, case)
        except pytest.skip.Exception:
            pass

    try:
        run()
    except AssertionError as error:
        raise AssertionError(f"FLASH_ATTN_TEST_SEED={SEED}: {error}") from error


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_repeated_steps(framework):
    """From its third call on a step takes the shortcut. Other arrays, one length for all or an array of lengths, the
    end of the cache, a longer cache, and refusals must give the results of the long way."""
    if framework == "torch" and torch is None:
        pytest.skip("PyTorch is not installed")
    as_array = torch.from_numpy if framework == "torch" else np.asarray
    rng = np.random.default_rng(8)
    new = rng.standard_normal((24, 3, 2, 1, 2, 16), dtype=np.float32)  # (steps, q k v, batch, 1, heads, headdim)
    turn = np.outer(np.arange(24), [1.0, 0.1]).astype(np.float32)
    cos, sin = np.cos(turn), np.sin(turn)
    exact = [np.zeros((2, 24, 2, 16), np.float32) for _ in "kv"]
    for lengths_too in (False, True):
        cache = [as_array(np.full((2, 24, 2, 16), np.nan, np.float32)) for _ in "kv"]
        tables = {"rotary_cos": as_array(cos), "rotary_sin": as_array(sin), "return_softmax_lse": True}
        for t in range(25):
            length = as_array(np.full(2, t, np.int32)) if lengths_too else t
            q, k, v = (as_array(x.copy()) for x in new[t % 24])
            if t == 24:
                with pytest.raises(fa.BadArgument, match="24 .*1.* are more than the 24 keys"):
                    fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=length, **tables)
                continue
            out, lse = fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=length, **tables)
            assert type(out) is type(q)
            arrays = (np.asarray(q), *exact, np.asarray(k), np.asarray(v), cos, sin)
            want = reference.kvcache_attention(*arrays, cache_seqlens=t)
            np.testing.assert_allclose(out, want[0], atol=1e-5)
            np.testing.assert_allclose(lse, want[1], atol=1e-5)
            for b in range(2):
                exact[0][b, t] = reference.rotary(np.asarray(k)[b], cos, sin, [t])[0]
            exact[1][:, t] = np.asarray(v)[:, 0]
        q = as_array(new[0, 0].copy())
        out = as_array(np.zeros((2, 1, 2, 16), np.float32))
        for _ in range(4):
            assert fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=7, out=out) is out
        with pytest.raises(fa.BadArgument, match="out starts at the same address as q"):
            fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=7, out=q)
        with pytest.raises(fa.BadArgument, match="cache_seqlens=-3"):
            fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=-3, out=out)


# ---- on a GPU ----

on_gpu = pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA or "needs PyTorch with CUDA")


@pytest.fixture
def cuda_kernel(kernel):
    if kernel.device.name != "cuda":
        pytest.skip("for the GPU's kernels")
    return kernel


def served(kernel: Kernel, arrays: dict[str, Any]) -> None:
    plan = fa.kvcache_query(**arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error


@on_gpu
@pytest.mark.parametrize("pages", [0, 40])
def test_graph_whose_lengths_change(cuda_kernel, pages):
    """A captured step is replayed while the cache grows. The device reads lengths, entries, tables and new tokens."""
    case = Case(lengths=(0, None, 500), rows=16 if pages else 640, pages=pages, dtype="float16", rotary_dim=64)
    case = replace(case, causal=True, batch_idx=not pages, spare=0)
    call = make(case)
    if pages:  # all pages in order, so that every length is legal
        call.where["block_table"] = np.arange(3 * pages, dtype=np.int32).reshape(3, pages)[:, ::-1].copy()
    arrays = on_device(cuda_kernel, case, call)
    served(cuda_kernel, arrays)
    for name in ("k_cache", "v_cache"):
        arrays[name].normal_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    for step in ((0, -1, 500), (7, 0, 501), (639, 100, -1), (-1, -1, -1), (600, 638, 300)):
        arrays["cache_seqlens"].copy_(torch.tensor(step, dtype=torch.int32))
        for name in ("q", "k", "v"):
            arrays[name].normal_()
        cache = [arrays[name].clone() for name in ("k_cache", "v_cache")]
        out.fill_(float("nan"))
        graph.replay()
        after = [arrays[name].clone() for name in ("k_cache", "v_cache")]
        want, want_lse = fa.flash_attn_with_kvcache(
            **{**arrays, "k_cache": cache[0], "v_cache": cache[1]}, return_softmax_lse=True
        )
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert all(torch.equal(one, two) for one, two in zip(after, cache, strict=True))


EMPTY = {  # options of a call whose sequences have no keys
    "pages": {"block_table": np.zeros((2, 3), np.int32)},
    "a table without columns": {"block_table": np.zeros((2, 0), np.int32)},
    "cache_batch_idx": {"cache_batch_idx": np.array([5, 0], np.int32)},
    "cache_leftpad": {"cache_leftpad": np.zeros(2, np.int32)},
    "sinks": {"sinks": np.array([1, 2, 3, 4], np.float32)},
    "causal": {"causal": True},
    "window": {"window_size": (3, 0)},
    "chunk": {"causal": True, "attention_chunk": 4},
    "tree": {"tree_mask": np.full((2, 3), 7, np.uint64), "tree_keys": 3},
    "softcap": {"softcap": 5.0},
    "splits": {"num_splits": 4},
    "invariant": {"batch_invariant": True},
    "programmatic": {"programmatic": True},
    "shared prefix": {"shared_prefix": True, "block_table": np.zeros((2, 3), np.int32)},
    "int8": {"int8": "heads"},
    "int8 of tokens": {"int8": "tokens"},
    "no capacity": {"capacity": 0},
}
APART = [{"tree", other} for other in ("causal", "window", "chunk")] + [
    {"cache_batch_idx", "pages"}, {"cache_batch_idx", "a table without columns"}, {"pages", "no capacity"},
    {"a table without columns", "no capacity"}, {"pages", "a table without columns"}, {"int8", "int8 of tokens"},
    *({"shared prefix", other} for other in ("cache_batch_idx", "no capacity", "invariant")),
]  # fmt: skip


@pytest.mark.parametrize("entries", [0, 2])
@pytest.mark.parametrize("one", EMPTY)
def test_caches_without_keys(kernel, one, entries):
    """Pools without entries, rows of a table without pages, entries without rows: out is 0, and lse is that of the
    sink. No address is read, so arrays without elements need no address."""
    for other in EMPTY:
        if {one, other} in APART:
            continue
        options = {**EMPTY[one], **EMPTY[other], "cache_seqlens": np.array([0, -1], np.int32)}
        rows, scales = options.pop("capacity", 16), options.pop("int8", None)
        if "cache_batch_idx" in options and entries:
            options["cache_batch_idx"] = np.array([1, 0], np.int32)
        for dtype, headdim in (("float16", 64), ("float32", 64), ("float16", 128)):
            arrays = {n: kernel.device.array(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
            cache = np.full((entries, rows, 2, headdim), np.nan, np.float32)
            for name in ("k", "v"):
                if scales:
                    arrays[f"{name}_cache"] = kernel.device.array(np.ones(cache.shape, np.int8))
                    factors = np.full(cache.shape[:3] if scales == "tokens" else 2, np.nan, np.float32)
                    arrays[f"{name}_scale"] = kernel.device.array(factors)
                else:
                    arrays[f"{name}_cache"] = kernel.device.array(cache, dtype)
            arrays["q"] = kernel.device.array(np.ones((2, 3, 4, headdim), np.float32), dtype)
            plan = fa.kvcache_query(**arrays, kernel=kernel.name)
            if plan.status == "FA_UNSUPPORTED":
                continue
            assert plan.status == "FA_OK", plan.error
            out = kernel.device.nans((2, 3, 4, headdim), dtype)
            _, lse = fa.flash_attn_with_kvcache(**arrays, out=out, kernel=kernel.name, return_softmax_lse=True)
            want = options.get("sinks", np.full(4, -np.inf, np.float32))
            assert (kernel.device.numpy(out) == 0).all(), (other, dtype)
            assert (kernel.device.numpy(lse) == want[None, :, None]).all(), (other, dtype)


def test_arrays_without_elements_have_no_address():
    """A pool without pages, its factors, and a table without columns, without addresses as in PyTorch."""
    torch = pytest.importorskip("torch")
    q, lengths = torch.ones(2, 1, 4, 16), torch.zeros(2, dtype=torch.int32)
    for pages, table in ((0, (2, 3)), (0, (2, 0)), (3, (2, 0))):
        cache = torch.ones(pages, 8, 2, 16, dtype=torch.int8)
        assert pages or cache.data_ptr() == 0
        scale = torch.ones(pages, 8, 2)
        out, lse = fa.flash_attn_with_kvcache(
            q, cache, cache.clone(), k_scale=scale, v_scale=scale.clone(), cache_seqlens=lengths,
            block_table=torch.zeros(table, dtype=torch.int32), return_softmax_lse=True,
        )  # fmt: skip
        assert (out == 0).all() and torch.isneginf(lse).all()


def test_no_row_turns():
    """Tables of the rotary embedding need no row for a call without queries and new keys."""
    cache = np.ones((1, 16, 2, 8), np.float32)
    tables = {f"rotary_{n}": np.ones((4, 4), np.float32) for n in ("cos", "sin")}
    q = np.ones((1, 1, 2, 8), np.float32)
    with pytest.raises(fa.BadArgument, match=r"rotary_cos has 4 rows, but sequence 0 needs rows 9 \.\. 9"):
        fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=np.array([9], np.int32), **tables)
    assert fa.flash_attn_with_kvcache(q[:, :0], cache, cache, cache_seqlens=np.array([9], np.int32), **tables).size == 0


@on_gpu
@pytest.mark.parametrize("pages", [0, 4])
def test_wild_lengths_and_pages_stay_inside(cuda_kernel, pages):
    """Values that only the device knows cannot be refused. Entries out of range are clamped, and append nothing."""
    case = Case(lengths=(3, 30, 60), rows=16 if pages else 64, pages=pages, batch_idx=not pages, dtype="float16")
    arrays = on_device(cuda_kernel, case, make(case))
    served(cuda_kernel, arrays)
    for name in ("k_cache", "v_cache"):
        arrays[name].fill_(1)
    before = arrays["k_cache"].clone()
    wild = torch.tensor([64, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    lse = fa.flash_attn_with_kvcache(**{**arrays, "cache_seqlens": wild}, return_softmax_lse=True)[1]
    assert torch.equal(arrays["k_cache"], before) and torch.isneginf(lse[2]).all()
    name = "block_table" if pages else "cache_batch_idx"
    nonsense = torch.where(torch.arange(arrays[name].numel(), device="cuda") % 2 == 0, 2**31 - 1, -(2**31))
    wild = nonsense.to(torch.int32).reshape(arrays[name].shape)
    out = fa.flash_attn_with_kvcache(**{**arrays, name: wild})
    torch.cuda.synchronize()
    assert torch.equal(arrays["k_cache"], before) and (out == 1).all()


@on_gpu
@pytest.mark.parametrize("pages", [False, True])
def test_beyond_two_billion_elements(cuda_kernel, pages):
    entries, rows, heads = 33, 65536, 8  # 33 x 65536 x 8 x 128 = 2.2e9
    k_cache = torch.zeros(entries, rows, heads, 128, dtype=torch.float16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    k_cache[-1, -1, -1] = 1
    v_cache[-1, -1, -1] = 3
    q = torch.full((1, 1, 8, 128), 4.0, dtype=torch.float16, device="cuda")
    options = {"cache_seqlens": torch.tensor([rows - 1], dtype=torch.int32, device="cuda"), "kernel": cuda_kernel.name}
    where = torch.tensor([entries - 1], dtype=torch.int32, device="cuda")
    options["block_table" if pages else "cache_batch_idx"] = where[None] if pages else where
    new = torch.ones(1, 1, 8, 128, dtype=torch.float16, device="cuda")
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": new, "v": 3 * new, **options}
    served(cuda_kernel, arrays)
    out = fa.flash_attn_with_kvcache(**arrays)
    assert (k_cache[-1, -1] == 1).all() and (out == 3).all(), out
