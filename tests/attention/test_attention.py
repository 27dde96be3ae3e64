"""Every kernel against float64: shapes, dtypes, options one by one and combined, strides, special values."""

import itertools
from dataclasses import replace

import accuracy
import numpy as np
import pytest
from accuracy import Case

import flash_attn_minimal as fa

DTYPES = ("float32", "float16", "bfloat16")
SEQLENS = [
    (1, 1),
    (7, 7),
    (31, 33),
    (33, 31),
    (63, 63),
    (65, 65),
    (127, 129),
    (129, 127),
    (113, 203),
    (239, 1),
    (1, 239),
    (799, 3),
    (3, 799),
]
HEADDIMS = [(d, d) for d in (1, 8, 33, 40, 64, 72, 80, 96, 128, 160, 192, 256, 264, 320, 328, 512)] + [
    (192, 128),
    (64, 512),
    (5, 1),
]
ALIGNMENTS = {"full": {}, "causal": {"causal": True}, "causal_top_left": {"causal": True, "top_left": True}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", SEQLENS)
def test_seqlens(kernel, seqlen_q, seqlen_k, alignment, dtype):
    kernel.check(Case(seqlen_q, seqlen_k, dtype=dtype, **ALIGNMENTS[alignment]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seqlen_q,seqlen_k,causal", [(1023, 1024, True), (1024, 1023, False)])
def test_long(kernel, seqlen_q, seqlen_k, causal, dtype):
    kernel.check(Case(seqlen_q, seqlen_k, nheads=1, causal=causal, dtype=dtype, batch=1 if dtype != "float32" else 2))


def test_very_long(kernel):
    kernel.check(Case(2049, 4099, headdim=32, nheads=1, causal=True))


def test_long_cache(kernel):
    kernel.check(Case(1, 20011, nheads=4, nheads_k=2, dtype="float16"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim,headdim_v", HEADDIMS)
def test_headdims(kernel, headdim, headdim_v, dtype):
    kernel.check(Case(67, 131, headdim, headdim_v, dtype=dtype, causal=True))


@pytest.mark.parametrize("nheads_k", [1, 2])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6, 7, 8, 16])
def test_head_ratios(kernel, ratio, nheads_k):
    kernel.check(Case(33, 70, 32, nheads=ratio * nheads_k, nheads_k=nheads_k, batch=2))


WINDOWS = [(0, 0), (0, -1), (-1, 0), (5, 3), (5, -1), (-1, 3), (64, 64), (1, 1000), (1000, 1000), (2**31, 2**40)]


@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(113, 203), (203, 113), (1, 100)])
def test_windows(kernel, seqlen_q, seqlen_k, top_left, window_size):
    kernel.check(Case(seqlen_q, seqlen_k, 40, nheads=1, window_size=window_size, top_left=top_left))
    kernel.check(Case(seqlen_q, seqlen_k, 40, nheads=1, window_size=window_size, top_left=top_left, causal=True))


CHUNKS = [1, 2, 33, 64, 1000, 2**31 - 1]


@pytest.mark.parametrize("attention_chunk", CHUNKS)
@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(113, 203), (203, 113), (1, 100)])
def test_chunks(kernel, seqlen_q, seqlen_k, top_left, attention_chunk):
    """Chunks are counted from the first key. Rows before the first key belong to no chunk."""
    case = Case(seqlen_q, seqlen_k, 40, nheads=1, top_left=top_left, attention_chunk=attention_chunk)
    kernel.check(case)
    kernel.check(replace(case, causal=True, dtype="float16"))
    kernel.check(replace(case, window_size=(20, 9)))


OPTIONS = {
    "softmax_scale": {"softmax_scale": 0.3},
    "softmax_scale_0": {"softmax_scale": 0.0},
    "softmax_scale_negative": {"softmax_scale": -0.5},
    "chunks": {"attention_chunk": 37},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi": 1},
    "alibi_batch": {"alibi": 2},
    "bias": {"bias": (True, True, True)},
    "bias_batch": {"bias": (True, False, True)},
    "bias_heads": {"bias": (True, False)},
    "bias_rows": {"bias": (True,)},
    "bias_columns": {"bias": ()},
    "bias_float32": {"bias": (False, True, True), "bias_float32": True},
    "mask": {"mask": (True, True, True)},
    "mask_batch": {"mask": (True, False, False)},
    "mask_rows": {"mask": (True,)},
    "mask_sparse": {"mask": (True, True, True), "mask_rate": 0.02},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "dropout_little": {"dropout_p": 1e-9},
    "dropout_much": {"dropout_p": 0.999},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_option(kernel, option, dtype):
    kernel.check(Case(70, 133, 48, batch=2, nheads=4, nheads_k=2, dtype=dtype, **OPTIONS[option]))
    kernel.check(Case(70, 133, 48, batch=2, nheads=4, nheads_k=2, dtype=dtype, causal=True, **OPTIONS[option]))


_SOME = ["softcap", "alibi_batch", "bias_heads", "mask_batch", "sinks", "dropout"]


@pytest.mark.parametrize("pair", list(itertools.combinations(_SOME, 2)), ids="+".join)
def test_option_pairs(kernel, pair):
    kernel.check(Case(67, 99, 40, batch=2, top_left=True, window_size=(40, 20), **OPTIONS[pair[0]], **OPTIONS[pair[1]]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options(kernel, dtype):
    together = {name: value for option in _SOME for name, value in OPTIONS[option].items()}
    kernel.check(
        Case(129, 203, 72, 33, batch=2, nheads=6, nheads_k=2, dtype=dtype, causal=True, window_size=(90, 5), **together)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(kernel, dtype):
    """Scores of about +-1e4: a softmax without its maximum subtracted overflows."""
    case = Case(
        65, 130, 64, dtype=dtype, spread=1000.0 if dtype != "float16" else 900.0, causal=True, softmax_scale=1.0
    )
    out, lse = kernel.check(case)
    assert np.abs(lse).max() > 5e3
    assert np.isfinite(out).all()


@pytest.mark.parametrize("seqlen_q,seqlen_k,batch", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_axes(kernel, seqlen_q, seqlen_k, batch, sinks):
    out, lse = kernel.check(Case(seqlen_q, seqlen_k, 16, batch=batch, sinks=sinks))
    assert not out.any()
    assert sinks or np.isneginf(lse).all()


EMPTY_ROWS = {
    "causal": (Case(20, 5, 24, causal=True), slice(0, 15)),
    "window": (Case(100, 10, 24, window_size=(3, 3), top_left=True), slice(14, 100)),
    "chunks": (Case(30, 10, 24, attention_chunk=5), slice(0, 20)),
    "mask": (Case(9, 70, 24, mask=(True,), mask_rate=0.0), slice(0, 9)),
}


@pytest.mark.parametrize("why", EMPTY_ROWS)
def test_empty_rows(kernel, why):
    case, empty = EMPTY_ROWS[why]
    out, lse = kernel.check(case)
    assert not out[:, empty].any() and np.isneginf(lse[..., empty]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_values_do_not_leak(kernel, bad, dtype):
    """Values that no row may see do not reach the output: past the diagonal, outside the window, hidden by the mask or
    by a bias of -inf."""
    (q, k, v, _), *_ = accuracy.expected(Case(50, 90, 40, dtype=dtype, nheads_k=2))
    hidden = {
        "causal": (slice(50, 90), {"causal": True, "top_left": True}),
        "window": (slice(0, 30), {"window_size": (10, 0)}),
        "chunks": (slice(0, 40), {"attention_chunk": 40}),
        "mask": (slice(40, 60), {"mask": np.r_[[True] * 40, [False] * 20, [True] * 30]}),
        "bias": (slice(40, 60), {"bias": np.r_[[0] * 40, [-np.inf] * 20, [1] * 30].astype(np.float32)}),
    }
    for keys, options in hidden.values():
        clean, clean_lse = kernel(q, k, v, dtype, **options)
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[:, keys], v_bad[:, keys] = bad, bad
        out, lse = kernel(q, k_bad, v_bad, dtype, **options)
        if (
            "float32_sm" in kernel.name and kernel.name != "float32_sm80"
        ):  # blocks with such values add in another order
            np.testing.assert_allclose(out, clean, rtol=0, atol=4e-6 * np.abs(clean).max())
            np.testing.assert_allclose(lse, clean_lse, rtol=4e-6)
        else:
            np.testing.assert_array_equal(out, clean)
            np.testing.assert_array_equal(lse, clean_lse)


def test_lse_has_two_names():
    """return_lse and return_softmax_lse are the same option, in every function that returns lse."""
    q, cu = np.ones((1, 5, 2, 8), np.float32), np.array([0, 5], np.int32)
    for call in (
        lambda **on: fa.flash_attn_func(q, q, q, **on),
        lambda **on: fa.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 5, 5, **on),
        lambda **on: fa.flash_attn_with_kvcache(q, q, q, **on),
    ):
        assert isinstance(call(return_lse=False, return_softmax_lse=False), np.ndarray)
        for name in ("return_lse", "return_softmax_lse"):
            for _ in range(3):  # the third is a repeat of the second
                out, lse = call(**{name: True})
            assert out.dtype == lse.dtype == np.float32 and lse.shape[-1] == 5
            with pytest.raises(fa.BadArgument, match=f"{name}='no' is neither True nor False"):
                call(**{name: "no"})
    assert fa.query(q, q, q, return_softmax_lse=True) == fa.query(q, q, q, return_lse=True)
    assert fa.kvcache_query(q, q, q, return_softmax_lse=True) == fa.kvcache_query(q, q, q, return_lse=True)


def test_visible_nan_arrives(kernel):
    """A NaN in a key reaches exactly the rows that may look at the key. A NaN in a value reaches at least those rows,
    and only its column and head."""
    (q, k, v, _), *_ = accuracy.expected(Case(50, 50, 40, nheads_k=2))
    k_bad, v_bad = k.copy(), v.copy()
    k_bad[0, 20, 1, 3] = np.nan
    out, lse = kernel(q, k_bad, v, causal=True)
    assert np.isnan(out[0, 20:, 1]).all() and np.isnan(lse[0, 1, 20:]).all()
    assert np.isfinite(out[0, :20]).all() and np.isfinite(out[0, :, 0]).all() and np.isfinite(lse[0, 0]).all()
    v_bad[0, 20, 1, 3] = np.nan
    out, lse = kernel(q, k, v_bad, causal=True)
    assert np.isnan(out[0, 20:, 1, 3]).all() and np.isfinite(lse).all()
    out[0, :, 1, 3] = 0  # an earlier row of the same tile multiplies the NaN by a probability of 0
    assert np.isfinite(out).all()


def _padded(x, pad, fill=np.nan):
    """The values of x in a buffer with `pad` more elements, all NaN, after every row, head and batch entry."""
    big = np.full([size + extra for size, extra in zip(x.shape, pad, strict=True)], fill, x.dtype)
    view = big[tuple(slice(0, size) for size in x.shape)]
    view[...] = x
    return view


@pytest.mark.parametrize("layout", ["padded", "bhsd", "reversed", "packed", "broadcast"])
def test_strides(kernel, layout):
    """Free strides: padding full of NaN, heads before rows, negative steps, one packed qkv buffer, stride 0."""
    case = Case(70, 70, 40, batch=2, nheads=3, nheads_k=3, causal=True)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    device = kernel.device
    if layout == "broadcast":
        k, v = (np.broadcast_to(x[:1, :, :1], x.shape) for x in (k, v))
        exact = accuracy.reference.standard_attention(q, k, v, **options)
    q, k, v = np.array(q), np.array(k), np.array(v)

    def place(x):
        if layout == "padded":
            native = device.array(_padded(x, (1, 2, 3, 5)).base)
            return native[: x.shape[0], : x.shape[1], : x.shape[2], : x.shape[3]]
        if layout == "bhsd":
            return device.array(np.ascontiguousarray(x.swapaxes(1, 2))).swapaxes(1, 2)
        if layout == "broadcast":
            one = device.array(x[:1, :, :1])
            return one.expand(x.shape) if device.framework == "torch" else np.broadcast_to(one, x.shape)
        return device.array(np.ascontiguousarray(x[:, ::-1]))[:, ::-1]  # reversed

    if layout == "reversed" and device.framework == "torch":
        pytest.skip("PyTorch has no negative strides")
    if layout == "broadcast" and device.framework == "cupy":
        pytest.skip("broadcast through CuPy is the door test's")
    if layout == "packed":
        native = device.array(np.concatenate([q, k, v], axis=2))
        arrays = native[:, :, :3], native[:, :, 3:6], native[:, :, 6:]
    elif layout == "broadcast":
        arrays = device.array(q), place(k), place(v)
    else:
        arrays = place(q), place(k), place(v)
    buffer = device.nans((2, 3, 71, 41), "float32")
    out_view = buffer.swapaxes(1, 2)[:, :70, :, :40]
    try:
        out = fa.flash_attn_func(*arrays, kernel=kernel.name, out=out_view, **options)
    except fa.Unsupported as error:
        if kernel.general:
            raise
        pytest.skip(str(error))
    accuracy.check("out", device.numpy(out), exact[0], plain[0], "float32")
    whole = device.numpy(buffer)
    assert np.isnan(whole[:, :, 70]).all() and np.isnan(whole[..., 40]).all(), "wrote outside of out"


@pytest.mark.parametrize("repeat_threads", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_reproducible(kernel, dtype, repeat_threads):
    """Same arguments, same bits, however many threads share the work."""
    (q, k, v, options), *_ = accuracy.expected(
        Case(130, 203, 64, batch=2, nheads=4, dtype=dtype, causal=True, dropout_p=0.1)
    )
    first = kernel(q, k, v, dtype, **options)
    again = kernel(q, k, v, dtype, num_threads=repeat_threads, deterministic=True, **options)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1])


def test_result_does_not_depend_on_the_batch(kernel):
    """A sequence gives the same bits alone and in a batch."""
    (q, k, v, _), *_ = accuracy.expected(Case(65, 99, 64, batch=3, nheads=4))
    out, lse = kernel(q, k, v)
    alone, alone_lse = kernel(q[1:2], k[1:2], v[1:2])
    np.testing.assert_array_equal(out[1:2], alone)
    np.testing.assert_array_equal(lse[1:2], alone_lse)


def test_heads_that_read_keys_together(kernel):
    """On a CPU the query heads of a key head read it together. Each head gives the same bits as alone, with its own
    mask."""
    if not kernel.name.startswith("cpu_"):
        pytest.skip("the work of a GPU depends on the number of heads")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, rows, heads, 72), np.float32) for rows, heads in ((1, 4), (333, 2), (333, 2)))
    mask = np.ones((1, 4, 1, 333), bool)
    mask[0, 1, 0, 200] = False
    v[:, 200, 0, 3] = np.nan
    q, k, v = (kernel.device.array(x, kernel.dtype) for x in (q, k, v))
    together = kernel.device.numpy(fa.flash_attn_func(q, k, v, mask=mask, kernel=kernel.name))
    assert np.isnan(together[:, :, 0, 3]).all() and np.isfinite(together[:, :, 1]).all()
    for head in range(2):
        alone = fa.flash_attn_func(
            q[:, :, head::2], k, v, mask=np.ascontiguousarray(mask[:, head::2]), kernel=kernel.name
        )
        np.testing.assert_array_equal(kernel.device.numpy(alone), together[:, :, head::2])
