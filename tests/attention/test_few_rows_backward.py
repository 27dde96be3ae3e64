"""The backward pass of few queries. The CPU multiplies them along head dims, and reads and writes aligned rows of
float32 where they lie."""

import dataclasses

import numpy as np
import pytest
from accuracy import Case
from test_attention import DTYPES, OPTIONS

import flash_attn_minimal as fa

SHAPES = {
    "one row": Case(1, 300, batch=2, nheads=3, nheads_k=3),
    "a group of four": Case(1, 300, nheads=8, nheads_k=2),
    "two rows, two heads": Case(2, 200, 40, 72, nheads=4, nheads_k=2),
    "four rows": Case(4, 130, 128, nheads=2, nheads_k=2),
    "five rows": Case(5, 130, nheads=2, nheads_k=2),
    "nine rows": Case(9, 130, nheads=2, nheads_k=2),
    "three rows of a wide head": Case(3, 70, 520 - 8, nheads=1, nheads_k=1),
    "fewer keys than lanes": Case(2, 3, 16, nheads=2, nheads_k=2),
    "keys that no row sees": Case(2, 200, nheads=2, nheads_k=2, window_size=(20, 0)),
    "packed": Case(3, 130, nheads=2, nheads_k=2, cu_seqlens_q=(0, 1, 1, 4, 6), cu_seqlens_k=(0, 7, 20, 150, 151)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(backward_kernel, shape, causal, dtype):
    case = SHAPES[shape]
    backward_kernel.check(dataclasses.replace(case, causal=causal, dtype=dtype, dlse=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(backward_kernel, option, dtype):
    backward_kernel.check(Case(2, 133, 48, batch=2, nheads=4, nheads_k=2, dtype=dtype, causal=True, **OPTIONS[option]))
    backward_kernel.check(Case(1, 300, 64, batch=2, nheads=2, nheads_k=2, dtype=dtype, **OPTIONS[option]))


def rows_at(x, bytes_past_a_line, fill=None):
    """A copy of x (batch, rows, heads, dim) float32 that begins so many bytes past a cache line, with NaN around it."""
    whole = np.full(x.size + 64, np.nan, np.float32)
    first = (-whole.ctypes.data % 64 + bytes_past_a_line) // 4 + 16
    view = whole[first : first + x.size].reshape(x.shape)
    view[...] = x if fill is None else fill
    return view, whole, first


def call(seed, past, accumulate=False, scale=1.0, **options):
    """dq, dk, dv of one query, all arrays so many bytes past a cache line."""
    rng = np.random.default_rng(seed)
    q, dout = (rng.standard_normal((2, 1, 4, 64), dtype=np.float32) * scale for _ in range(2))
    k, v = (rng.standard_normal((2, 300, 4, 64), dtype=np.float32) for _ in range(2))
    bias = rng.standard_normal((1, 300), dtype=np.float32)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, bias=bias)
    given = [rows_at(x, past)[0] for x in (dout, q, k, v, out)]
    results = [rows_at(x, past, 0.5 if accumulate else np.nan) for x in (q, k, v)]
    places = dict(zip(("dq", "dk", "dv"), (x[0] for x in results), strict=True))
    more = fa.backward(*given, lse, bias=bias, accumulate=accumulate, **places, **options)[3:]
    for view, whole, first in results:
        assert np.isnan(whole[:first]).all() and np.isnan(whole[first + view.size :]).all()
    return [x[0] for x in results], more


@pytest.mark.parametrize("scale", [1.0, 3e5])  # beyond 1e5 the row's statistics are computed again
@pytest.mark.parametrize("threads", [1, 2])
def test_in_place_or_not_the_bits_are_the_same(threads, scale):
    options = {"num_threads": threads, "scale": scale}
    wanted, _ = call(0, 4, **options)
    for past in (0, 64):
        np.testing.assert_equal(call(0, past, **options)[0], wanted)
    added, _ = call(0, 0, accumulate=True, **options)
    for x, y in zip(added, wanted, strict=True):
        np.testing.assert_allclose(x, y + 0.5, rtol=1e-6, atol=1e-6)


def test_the_gradient_of_a_bias_leaves_the_others_alone():
    """It reads K and V again after dk and dv are complete."""
    wanted, _ = call(1, 0)
    got, (dbias,) = call(1, 0, return_dbias=True)
    np.testing.assert_equal(got, wanted)
    _, (other,) = call(1, 4, return_dbias=True)
    np.testing.assert_equal(dbias, other)
    assert dbias.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("past", [0, 4])
def test_hidden_values_do_not_leak(past, bad):
    rng = np.random.default_rng(2)
    q, dout = (rng.standard_normal((1, 2, 2, 64), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((1, 150, 2, 64), dtype=np.float32) for _ in range(2))
    mask = rng.random(150) < 0.8
    mask[70] = False
    out, lse = fa.flash_attn_func(q, k, v, mask=mask, return_lse=True)
    wanted = fa.backward(dout, q, k, v, out, lse, mask=mask)
    for x in (k, v):
        x[:, ~mask] = bad
    got = fa.backward(*[rows_at(x, past)[0] for x in (dout, q, k, v, out)], lse, mask=mask)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    k[0, np.flatnonzero(mask)[5], 1, 3] = np.nan
    dq, dk, dv = fa.backward(*[rows_at(x, past)[0] for x in (dout, q, k, v, out)], lse, mask=mask)
    assert np.isnan(dq[0, :, 1]).all() and np.isfinite(dq[0, :, 0]).all() and np.isfinite(dk[0, :, 0]).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8, 9])
def test_a_short_sequence_has_the_same_bits_alone_and_beside_a_long_one(backward_kernel, rows, dtype):
    """How the rows of a sequence are summed follows from their number, not from the longest sequence of the call."""
    rng = np.random.default_rng(3)
    kernel, lengths, keys = {"kernel": backward_kernel.name}, (rows, 40), (130, 61)
    if backward_kernel.device.name != "cpu":
        pytest.skip("kernels of the CPU")
    q, dout = (rng.standard_normal((sum(lengths), 2, 16)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((sum(keys), 2, 16)).astype(dtype) for _ in range(2))
    cu = [np.array([0, *np.cumsum(x)], np.int32) for x in (lengths, keys)]
    out, lse = fa.flash_attn_varlen_func(q, k, v, *cu, max(lengths), max(keys), return_lse=True)
    packed = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": max(lengths), "max_seqlen_k": max(keys)}
    together = fa.backward(dout, q, k, v, out, lse, **packed, **kernel)
    own = [x[None, :rows] for x in (dout, q)], [x[None, : keys[0]] for x in (k, v)]
    alone = fa.backward(*own[0], *own[1], out[None, :rows], np.ascontiguousarray(lse[None, :, :rows]), **kernel)
    for x, y in zip(alone, together, strict=True):
        np.testing.assert_array_equal(x[0], y[: x.shape[1]])


@pytest.mark.parametrize("keys", [3, 300])
def test_rows_whole_pages_apart(backward_kernel, keys):
    """16 heads of 64 elements: rows of K lie 4096 bytes apart, and are copied."""
    backward_kernel.check(Case(2, keys, 64, nheads=16, nheads_k=16))
