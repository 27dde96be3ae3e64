"""Caches whose rows and pages take the tensor-core kernels through all paths: chunks of queries, latent attention."""

from __future__ import annotations

from dataclasses import replace

import accuracy
import numpy as np
import pytest
from bench_run import FAST
from bench_run import run as bench
from kvcache_cases import Case, check, expected, make, on_device

import flash_attn_minimal as fa


@pytest.mark.parametrize(
    "headdim, page_size",
    [
        *((d, page) for d in (64, 128, 256) for page in (0, 1, 8, 16, 24, 64, 128)),
        *((d, page) for d in (40, 96, 192) for page in (8, 16, 48)),
        *((128, page) for page in (2, 3, 4, 5, 7, 9, 12, 20, 32, 100, 192, 256)),
        *((d, page) for d in (64, 192, 256) for page in (5, 6, 12, 14)),
    ],
)
def test_chunks(kernel, headdim, page_size):
    """A chunk is appended to caches of many lengths, and attends to them. Tiles divide some page sizes, not others."""
    case = Case(
        lengths=(0, None, 253, 130), rows=page_size or 390, pages=-(-390 // page_size) if page_size else 0,
        seqlen_q=130, seqlen_new=130, headdim=headdim, nheads_k=1, nheads=2, dtype="bfloat16", batch_idx=not page_size,
    )  # fmt: skip
    check(kernel, replace(case, causal=True))
    check(kernel, replace(case, headdim_v=64, dtype="float16", seqlen_new=0, seqlen_q=70))


@pytest.mark.parametrize("page_size", [0, 5, 16, 64, 128])
@pytest.mark.parametrize(
    "scores", [{"causal": True}, {}, {"window_size": (90, 20)}, {"softcap": 5.0, "alibi": 1}], ids=str
)
def test_capacity_beyond_the_lengths(kernel, scores, page_size):
    """Tiles are chosen by the capacity of the cache, because only the device knows the lengths."""
    case = Case(
        lengths=(300, 5, None), rows=page_size or 9000, pages=-(-9000 // page_size) if page_size else 0, spare=0,
        seqlen_q=140, seqlen_new=0, nheads=2, nheads_k=1, headdim=128, dtype="bfloat16", **scores,
    )  # fmt: skip
    check(kernel, replace(case, headdim=64, nheads=1, lengths=(200,)))
    check(kernel, case)


@pytest.mark.parametrize("headdim, page_size", [(128, 16), (64, 24), (256, 8), (128, 5)])
def test_pages_apart_from_each_other(kernel, headdim, page_size):
    """Keys and values of a page side by side in one pool, heads before rows; the strides differ from those of two
    pools."""
    case = Case(
        lengths=(300, None, 129), rows=page_size, pages=-(-330 // page_size), seqlen_q=130, seqlen_new=0, nheads=4,
        nheads_k=2, headdim=headdim, dtype="bfloat16", causal=True,
    )  # fmt: skip
    call = make(case)
    arrays = on_device(kernel, case, call)
    pool = np.stack([call.cache["k_cache"], call.cache["v_cache"]], 1).swapaxes(
        2, 3
    )  # (pages, 2, nheads_k, page_size, headdim)
    pool = kernel.device.array(np.ascontiguousarray(pool), case.dtype)
    arrays |= {name: pool[:, i].swapaxes(1, 2) for i, name in enumerate(("k_cache", "v_cache"))}
    plan = fa.kvcache_query(**arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    out = kernel.device.nans((*call.q.shape[:3], headdim), case.dtype)
    fa.flash_attn_with_kvcache(**arrays, out=out)
    exact, plain = expected(case, call, call.q, call.cache)
    accuracy.check("out", kernel.device.numpy(out), exact[0], plain[0], case.dtype, floor=4e-5)


@pytest.mark.parametrize("page_size", [0, 16])
def test_chunk_alone_equals_chunk_in_a_batch(kernel, page_size):
    """batch_invariant: kernel and tiles do not depend on the size of the batch."""
    case = Case(
        lengths=(300, None, 129), rows=page_size or 8200, pages=8200 // page_size + 1 if page_size else 0, spare=0,
        seqlen_q=140, seqlen_new=0, nheads=2, nheads_k=1, headdim=128, dtype="bfloat16", causal=True,
        batch_invariant=True,
    )  # fmt: skip
    call = make(case)
    arrays = on_device(kernel, case, call)
    if fa.kvcache_query(**arrays).status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip("refuses")
    whole = kernel.device.numpy(fa.flash_attn_with_kvcache(**arrays))
    for rows in ([0], [2, 0], [0] * 40):
        part = {**arrays, "q": kernel.device.array(call.q[rows], case.dtype)}
        part["cache_seqlens"] = kernel.device.array(call.where["cache_seqlens"][rows])
        if page_size:
            part["block_table"] = kernel.device.array(call.where["block_table"][rows])
        else:
            part["cache_batch_idx"] = kernel.device.array(np.array(rows, np.int32))
        np.testing.assert_array_equal(kernel.device.numpy(fa.flash_attn_with_kvcache(**part)), whole[rows])


@pytest.mark.parametrize("values", ["columns of k", "their own"])
@pytest.mark.parametrize(
    "nheads, page_size", [(16, 0), (16, 8), (5, 16), (3, 24), (128, 64), (128, 8), (16, 32), (16, 128), (70, 0)]
)
def test_latent_attention(kernel, nheads, page_size, values):
    """v_cache is the first 512 columns of k_cache, or a separate array. The rows of all heads form one matrix, in tiles
    of 64."""
    case = Case(
        lengths=(300, None, 0, 64), rows=page_size or 320, pages=-(-320 // page_size) if page_size else 0,
        batch_idx=not page_size, seqlen_new=0, nheads=nheads, nheads_k=1, headdim=576, headdim_v=512,
    )  # fmt: skip
    of_k = values == "columns of k"
    check_latent(kernel, replace(case, dtype="bfloat16"), of_k)
    check_latent(kernel, replace(case, dtype="float16", seqlen_q=3, causal=True, num_splits=3), of_k)
    check_latent(kernel, replace(case, dtype="bfloat16", seqlen_q=2, window_size=(70, 0), num_splits=1), of_k)
    if nheads == 16:  # more shares than tiles, merged by several threads a column
        check_latent(kernel, replace(case, dtype="bfloat16", num_splits=70), of_k)


def check_latent(kernel, case, of_k):
    call = make(case)
    if of_k:
        call.cache["v_cache"] = call.cache["k_cache"][..., : case.headdim_v]
    arrays = on_device(kernel, case, call)
    if of_k:
        arrays["v_cache"] = arrays["k_cache"][..., : case.headdim_v]
    plan = fa.kvcache_query(**arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    out = kernel.device.nans((*call.q.shape[:3], case.headdim_v), case.dtype)
    _, lse = fa.flash_attn_with_kvcache(**arrays, out=out, return_softmax_lse=True)
    exact, plain = expected(case, call, call.q, call.cache)
    accuracy.check("lse", kernel.device.numpy(lse), exact[1], plain[1], "float32", floor=4e-5)
    accuracy.check("out", kernel.device.numpy(out), exact[0], plain[0], case.dtype, floor=4e-5)


def test_bench_suite(tmp_path):
    rows = bench(tmp_path, "--suite", "prefill", "--device", "cpu", *FAST)["rows"]
    assert [row["layout"] for row in rows] == ["no cache", "contiguous", "page 1", "page 16", "page 64", "page 256"]
    assert all(0 < row["max_err"] <= row["err_budget"] for row in rows)
