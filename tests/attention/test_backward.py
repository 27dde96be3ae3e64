"""Every kernel of the backward pass against float64, on the shapes and options of the forward tests."""

import dataclasses
import itertools

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CPU
from test_attention import _SOME, ALIGNMENTS, CHUNKS, DTYPES, HEADDIMS, OPTIONS, SEQLENS, WINDOWS

import flash_attn_minimal as fa
from flash_attn_lab import reference


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"softcap": 3.0, "bias": True, "sinks": True, "dropout_p": 0.3}]
)
def test_reference_against_finite_differences(options):
    """The reference's gradients are the slopes of the reference's forward pass."""
    rng = np.random.default_rng(5)
    arrays = {name: rng.standard_normal((2, 4, 2, 3)) for name in ("q", "v")}
    arrays["k"] = rng.standard_normal((2, 4, 1, 3))
    arrays["v"] = rng.standard_normal((2, 4, 1, 2))
    options = dict(options)
    if options.pop("bias", False):
        arrays["bias"] = rng.standard_normal((2, 1, 4))
    if options.pop("sinks", False):
        arrays["sinks"] = rng.standard_normal(2)
    dout, dlse = rng.standard_normal((2, 4, 2, 2)), rng.standard_normal((2, 2, 4))
    exact = reference.standard_attention_backward(dout, **arrays, dlse=dlse, **options)

    def loss(**changed):
        out, lse = reference.standard_attention(**{**arrays, **changed}, **options)
        return (out * dout).sum() + (lse * dlse).sum()

    for name, x in arrays.items():
        slopes = np.zeros_like(x)
        for at in np.ndindex(x.shape):
            step = np.zeros_like(x)
            step[at] = 1e-6
            slopes[at] = (loss(**{name: x + step}) - loss(**{name: x - step})) / 2e-6
        np.testing.assert_allclose(getattr(exact, f"d{name}"), slopes, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("seqlen_q,seqlen_k", SEQLENS)
def test_seqlens(backward_kernel, seqlen_q, seqlen_k, alignment, dtype):
    backward_kernel.check(Case(seqlen_q, seqlen_k, dtype=dtype, **ALIGNMENTS[alignment]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("seqlen_q,seqlen_k,causal", [(1023, 1024, True), (1024, 1023, False), (700, 1500, True)])
def test_long(backward_kernel, seqlen_q, seqlen_k, causal, headdim, dtype):
    backward_kernel.check(Case(seqlen_q, seqlen_k, headdim, nheads=1, causal=causal, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim,headdim_v", HEADDIMS)
def test_headdims(backward_kernel, headdim, headdim_v, dtype):
    backward_kernel.check(Case(67, 131, headdim, headdim_v, dtype=dtype, causal=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("nheads_k", [1, 2])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 8, 16])
def test_head_ratios(backward_kernel, ratio, nheads_k, dtype):
    backward_kernel.check(Case(33, 70, 32, nheads=ratio * nheads_k, nheads_k=nheads_k, batch=2, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window_size", WINDOWS)
@pytest.mark.parametrize("top_left", [False, True])
def test_windows(backward_kernel, top_left, window_size, dtype):
    for seqlen_q, seqlen_k in ((113, 203), (203, 113)):
        case = Case(seqlen_q, seqlen_k, 40, nheads=1, window_size=window_size, top_left=top_left, dtype=dtype)
        backward_kernel.check(case)


@pytest.mark.parametrize("attention_chunk", CHUNKS)
@pytest.mark.parametrize("causal", [False, True])
def test_chunks(backward_kernel, causal, attention_chunk):
    for seqlen_q, seqlen_k, top_left in ((113, 203, False), (203, 113, False), (113, 203, True)):
        shape = {"nheads": 1, "top_left": top_left, "dtype": "float16" if causal else "float32"}
        backward_kernel.check(Case(seqlen_q, seqlen_k, 40, attention_chunk=attention_chunk, causal=causal, **shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", OPTIONS)
def test_option(backward_kernel, option, dtype):
    for causal in (False, True):
        case = Case(70, 133, 48, batch=2, nheads=4, nheads_k=2, dtype=dtype, causal=causal, **OPTIONS[option])
        backward_kernel.check(case)


@pytest.mark.parametrize("pair", list(itertools.combinations(_SOME, 2)), ids="+".join)
def test_option_pairs(backward_kernel, pair):
    options = {**OPTIONS[pair[0]], **OPTIONS[pair[1]]}
    backward_kernel.check(Case(67, 99, 40, batch=2, dtype="float16", top_left=True, window_size=(40, 20), **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_options(backward_kernel, dtype):
    together = {name: value for option in _SOME for name, value in OPTIONS[option].items()}
    shape = {"batch": 2, "nheads": 6, "nheads_k": 2}
    backward_kernel.check(Case(129, 203, 72, 40, dtype=dtype, causal=True, window_size=(90, 5), **shape, **together))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"dropout_p": 0.2, "bias": (True, True, True), "sinks": True}]
)
def test_varlen(backward_kernel, options, dtype):
    cu_q, cu_k = (0, 5, 5, 134, 200), (0, 7, 20, 20, 219)
    shape = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "nheads": 4, "nheads_k": 2}
    backward_kernel.check(Case(130, 199, 64, dtype=dtype, **shape, **options))


# ---- a loss of lse, too ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("option", ["plain", *OPTIONS])
def test_dlse(backward_kernel, option, dtype):
    """dlse with every option. With a causal mask the first rows see nothing, and dlse is NaN there."""
    for seqlen_q, seqlen_k, causal in ((70, 133, False), (133, 70, True)):
        shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "causal": causal}
        case = Case(seqlen_q, seqlen_k, 48, dtype=dtype, dlse=True, **shape, **OPTIONS.get(option, {}))
        backward_kernel.check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window_size", WINDOWS)
def test_dlse_windows(backward_kernel, window_size, dtype):
    for seqlen_q, seqlen_k in ((113, 203), (203, 113)):
        backward_kernel.check(Case(seqlen_q, seqlen_k, 64, window_size=window_size, dtype=dtype, dlse=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim,headdim_v", [(64, 64), (128, 128), (40, 72), (192, 128), (256, 256), (33, 512)])
@pytest.mark.parametrize("causal", [False, True])
def test_dlse_headdims(backward_kernel, causal, headdim, headdim_v, dtype):
    backward_kernel.check(Case(300, 331, headdim, headdim_v, dtype=dtype, causal=causal, dlse=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.2, "bias": (True, True), "sinks": True}])
def test_dlse_varlen(backward_kernel, options, dtype):
    cu_q, cu_k = (0, 5, 5, 134, 200), (0, 7, 20, 20, 219)
    shape = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "nheads": 4, "nheads_k": 2}
    backward_kernel.check(Case(130, 199, 64, dtype=dtype, dlse=True, **shape, **options))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dlse_with_all_options(backward_kernel, dtype):
    together = {name: value for option in _SOME for name, value in OPTIONS[option].items()}
    shape = {"batch": 2, "nheads": 6, "nheads_k": 2}
    case = Case(129, 203, 72, 40, dtype=dtype, causal=True, window_size=(90, 5), dlse=True, **shape, **together)
    backward_kernel.check(case)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dlse_of_rows_that_see_nothing(backward_kernel, bad, dtype):
    """Rows that see nothing because of causal, a window, a mask or a bias. dlse of these rows changes no bit; in the
    other rows dlse is zero."""
    (dout, q, k, v, *_), *_ = accuracy.expected_backward(Case(150, 90, 64, dtype=dtype, nheads_k=2))
    blind = np.r_[[False] * 20, [True] * 30, [False] * 100][:, None]
    for options in (
        {"causal": True},
        {"window_size": (3, 0)},
        {"mask": np.broadcast_to(~blind, (150, 90))},
        {"bias": np.where(blind, np.float32(-np.inf), np.float32(0)) + np.zeros((1, 90), np.float32)},
    ):
        out, lse = reference.standard_attention(q, k, v, **options)
        given = accuracy.round_to(out, dtype), lse.astype(np.float32)
        dlse = np.where(np.isneginf(lse), np.float32(bad), np.float32(0))
        assert not np.isfinite(dlse).all()
        options |= {"deterministic": True, "return_dbias": "bias" in options}
        want = backward_kernel(dout, q, k, v, *given, dtype, **options)
        for x, y in zip(backward_kernel(dout, q, k, v, *given, dtype, dlse=dlse, **options), want, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_lse_alone(backward_kernel, dtype):
    """With dout = 0 and dlse = 1: P k summed over keys, P q over queries, and nothing for v."""
    (_, q, k, v, *_), *_ = accuracy.expected_backward(Case(65, 90, 64, dtype=dtype))
    q, options = q / 8, {"causal": True, "softmax_scale": 1.0}
    out, lse = reference.standard_attention(q, k, v, **options)
    given = accuracy.round_to(out, dtype), lse.astype(np.float32)
    dq, dk, dv = backward_kernel(0 * out, q, k, v, *given, dtype, dlse=np.ones_like(given[1]), **options)
    p = np.exp(np.einsum("bihd,bjgd->bhij", q, k) - lse[..., None]) * np.tri(65, 90, 25)
    for got, want in ((dq, np.einsum("bhij,bjgd->bihd", p, k)), (dk, np.einsum("bhij,bihd->bjd", p, q)[:, :, None])):
        np.testing.assert_allclose(
            got, want, rtol=0, atol={"float32": 1e-5, "bfloat16": 1e-2}[dtype] * np.abs(want).max()
        )
    assert not dv.any()


@pytest.mark.parametrize("seqlen_q,seqlen_k,batch", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
@pytest.mark.parametrize("sinks", [False, True])
def test_empty_axes(backward_kernel, seqlen_q, seqlen_k, batch, sinks):
    for gradient in backward_kernel.check(
        Case(seqlen_q, seqlen_k, 16, batch=batch, sinks=sinks, bias=(True, False, True))
    ):
        assert not gradient.any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty_rows(backward_kernel, dtype):
    got = backward_kernel.check(Case(150, 5, 64, causal=True, dtype=dtype))
    assert not got[0][:, :145].any()
    got = backward_kernel.check(Case(9, 70, 64, mask=(True,), mask_rate=0.0, dtype=dtype))
    assert not any(x.any() for x in got)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masked_values_do_not_leak(backward_kernel, bad, dtype):
    """Keys and values that no row may see reach no gradient, and their own gradient is zero."""
    (dout, q, k, v, *_), *_ = accuracy.expected_backward(Case(50, 90, 64, dtype=dtype, nheads_k=2))
    hidden = {
        "causal": (slice(50, 90), {"causal": True, "top_left": True}),
        "window": (slice(0, 30), {"window_size": (10, 0)}),
        "mask": (slice(40, 60), {"mask": np.r_[[True] * 40, [False] * 20, [True] * 30]}),
        "bias": (slice(40, 60), {"bias": np.r_[[0] * 40, [-np.inf] * 20, [1] * 30].astype(np.float32)}),
    }
    for keys, options in hidden.values():
        out, lse = reference.standard_attention(q, k, v, **options)
        given = accuracy.round_to(out, dtype), lse.astype(np.float32)
        clean = backward_kernel(dout, q, k, v, *given, dtype, **options)
        k_bad, v_bad = k.copy(), v.copy()
        k_bad[:, keys], v_bad[:, keys] = bad, bad
        got = backward_kernel(dout, q, k_bad, v_bad, *given, dtype, deterministic=False, **options)
        for x, y in zip(got, clean, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-2 if dtype != "float32" else 1e-5, atol=1e-5)
        assert not got[1][:, keys].any() and not got[2][:, keys].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
@pytest.mark.parametrize("rows", [True, False], ids=["bias of pairs", "bias of keys"])
def test_bias_of_keys_that_no_row_sees(backward_kernel, rows, headdim, dtype, bad):
    """The bias of hidden pairs is not read. A tile has rows past the end: to these, some of the keys are not hidden."""
    case = Case(100, 304, headdim, dtype=dtype, nheads_k=2, bias=(True, True, rows), causal=True, top_left=True)
    (dout, q, k, v, out, lse, options), exact, plain = accuracy.expected_backward(case)
    bias = options["bias"].copy()
    bias[..., 100:] = bad
    got = backward_kernel(dout, q, k, v, out, lse, dtype, return_dbias=True, **options | {"bias": bias})
    for name, x in zip(("dq", "dk", "dv", "dbias"), got, strict=True):
        floor = accuracy.gradient_floor(case, getattr(exact, name))
        of = "float32" if name == "dbias" else dtype
        accuracy.check(name, x, getattr(exact, name), getattr(plain, name), of, floor=floor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_visible_nan_arrives(backward_kernel, dtype):
    (dout, q, k, v, out, lse, _), *_ = accuracy.expected_backward(
        Case(50, 50, 64, nheads_k=2, dtype=dtype, causal=True)
    )
    k_bad = k.copy()
    k_bad[0, 20, 1, 3] = np.nan
    dq, dk, dv = backward_kernel(dout, q, k_bad, v, out, lse, dtype, causal=True)
    assert np.isnan(dq[0, 20:, 1]).all() and np.isfinite(dq[0, :, 0]).all()
    assert np.isnan(dk[0, 20, 1]).all() and np.isnan(dv[0, 20, 1]).all() and np.isfinite(dk[0, :, 0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(backward_kernel, dtype):
    (dout, q, k, v, out, lse, _), exact, plain = accuracy.expected_backward(Case(100, 130, 64, dtype=dtype, nheads_k=1))
    rng = np.random.default_rng(0)
    old = [accuracy.round_to(rng.standard_normal(x.shape, dtype=np.float32), dtype) for x in (q, k, v)]
    got = backward_kernel(dout, q, k, v, out, lse, dtype, before=old)
    for name, x, was in zip(("dq", "dk", "dv"), got, old, strict=True):
        rounded = accuracy.round_to(was + getattr(plain, name), dtype)
        accuracy.check(name, x, was + getattr(exact, name), rounded, dtype)


# Keys wider than values. Several sizes have more sets of 128 keys than an H200 has clusters, so a cluster takes a
# second and a third set. Some sets have no query tile, one, or an odd number.
NARROW_VALUES = {
    "one tile": Case(64, 128, batch=1, nheads=2, nheads_k=2),
    "ends of tiles": Case(129, 65, batch=2, nheads=2, nheads_k=1),
    "three sets a cluster": Case(70, 260, batch=8, nheads=8, nheads_k=8),
    "walks of many lengths": Case(400, 700, batch=2, nheads=12, nheads_k=12),
    "shared keys": Case(200, 390, batch=3, nheads=16, nheads_k=8),
    "keys unseen": Case(33, 700, batch=4, nheads=4, nheads_k=4, top_left=True),
    "rows unseen": Case(700, 200, batch=4, nheads=4, nheads_k=4),
    "varlen": Case(
        330, 400, nheads=24, nheads_k=12, cu_seqlens_q=(0, 5, 5, 335, 400), cu_seqlens_k=(0, 7, 300, 300, 700)
    ),
}


def narrow_values(kernel, shape) -> Case:
    """The case of a shape. On a CPU, which has no clusters to fill, only two key heads and at most two sequences."""
    case = NARROW_VALUES[shape]
    if kernel.device.name != "cpu":
        return case
    group = case.nheads // case.nheads_k
    return dataclasses.replace(case, batch=min(case.batch, 2), nheads=2 * group, nheads_k=2)


@pytest.mark.parametrize("headdim,headdim_v,dtype", [(192, 128, "bfloat16"), (136, 40, "float16")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", NARROW_VALUES)
def test_narrow_values(backward_kernel, shape, causal, headdim, headdim_v, dtype):
    case = narrow_values(backward_kernel, shape)
    backward_kernel.check(
        dataclasses.replace(case, headdim=headdim, headdim_v=headdim_v, causal=causal, dtype=dtype, dlse=True)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", NARROW_VALUES)
def test_narrow_values_in_order(backward_kernel, shape, causal):
    """Deterministic gradients are near the exact ones, and a second call gives the same bits."""
    case = narrow_values(backward_kernel, shape)
    case = dataclasses.replace(case, headdim=192, headdim_v=128, causal=causal, dtype="bfloat16")
    cu_seqlens = (case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k) if case.varlen else None
    (*arrays, options), exact, *_ = accuracy.expected_backward(case)
    first, again = (backward_kernel(*arrays, case.dtype, cu_seqlens, deterministic=True, **options) for _ in range(2))
    for x, y in zip(first, exact, strict=False):
        np.testing.assert_allclose(x, y, atol=5e-2 * np.abs(y).max())
    for x, y in zip(first, again, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim", [64, 192])
def test_deterministic(backward_kernel, headdim, dtype):
    """Same arguments, same bits, however many threads share the work."""
    case = Case(
        300, 403, headdim, batch=2, nheads=4, dtype=dtype, causal=True, dropout_p=0.1, bias=(True, False, False)
    )
    (*arrays, options), *_ = accuracy.expected_backward(case)
    first = backward_kernel(*arrays, dtype, deterministic=True, return_dbias=True, **options)
    exact = accuracy.expected_backward(case)[1]
    for x, y in zip(first, exact, strict=False):
        np.testing.assert_allclose(x, y, atol=5e-2 * np.abs(y).max())
    for threads in (1, 2, 5):
        again = backward_kernel(*arrays, dtype, deterministic=True, return_dbias=True, num_threads=threads, **options)
        for x, y in zip(first, again, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(backward_kernel, dtype):
    case = Case(
        65, 130, 64, dtype=dtype, spread=1000.0 if dtype != "float16" else 900.0, causal=True, softmax_scale=1.0
    )
    for gradient in backward_kernel.check(case):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides(backward_kernel, dtype):
    """Inputs and gradients with heads before rows, and padding after every row."""
    case = Case(70, 99, 64, batch=2, nheads=4, nheads_k=2, causal=True, dtype=dtype)
    (dout, q, k, v, out, lse, options), exact, plain = accuracy.expected_backward(case)
    device = backward_kernel.device

    def place(x, fill=None):
        batch, rows, heads, dim = x.shape
        big = np.full((batch, heads, rows + 1, dim + 8), np.nan, np.float32)
        big[:, :, :rows, :dim] = np.swapaxes(x, 1, 2) if fill is None else fill
        whole = device.array(big, dtype)
        return whole.swapaxes(1, 2)[:, :rows, :, :dim], whole

    inputs = [place(x)[0] for x in (dout, q, k, v, out)]
    plan = fa.backward_query(*inputs[1:4], kernel=backward_kernel.name, **options)
    if plan.status == "FA_UNSUPPORTED" and not backward_kernel.general:
        pytest.skip(plan.error)
    outputs = [place(x, np.nan) for x in (q, k, v)]
    results = {name: view for name, (view, _) in zip(("dq", "dk", "dv"), outputs, strict=True)}
    fa.backward(*inputs, device.array(lse), kernel=backward_kernel.name, **results, **options)
    for name, (view, whole) in zip(("dq", "dk", "dv"), outputs, strict=True):
        accuracy.check(name, device.numpy(view), getattr(exact, name), getattr(plain, name), dtype)
        assert np.isnan(device.numpy(whole)[:, :, -1]).all() and np.isnan(device.numpy(whole)[..., -8:]).all()


# ---- what is refused ----


def _call(device, **changed):
    (dout, q, k, v, out, lse, _), *_ = accuracy.expected_backward(Case(5, 7, 8))
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if "dlse" in changed:
        arrays["dlse"] = changed["dlse"]
    options = {name: value for name, value in changed.items() if name not in arrays}
    arrays = {name: device.array(changed.get(name, x)) for name, x in arrays.items()}
    return fa.backward(**arrays, **options)


REFUSED = {
    "dout shape": (
        {"dout": np.zeros((1, 5, 2, 4), np.float32)},
        r"dout has shape \(1, 5, 2, 4\): expected \(1, 5, 2, 8\)",
    ),
    "dout dtype": ({"dout": np.zeros((1, 5, 2, 8), np.float16)}, "dout is float16: expected float32"),
    "out shape": ({"out": np.zeros((1, 4, 2, 8), np.float32)}, r"out has shape \(1, 4, 2, 8\)"),
    "lse shape": ({"lse": np.zeros((1, 5, 2), np.float32)}, r"lse has shape \(1, 5, 2\): expected \(1, 2, 5\)"),
    "lse dtype": ({"lse": np.zeros((1, 2, 5), np.float16)}, "lse is float16: expected float32"),
    "dlse shape": ({"dlse": np.zeros((1, 5, 2), np.float32)}, r"dlse has shape \(1, 5, 2\): expected \(1, 2, 5\)"),
    "dlse dtype": ({"dlse": np.zeros((1, 2, 5), np.float16)}, "dlse is float16: expected float32"),
    "accumulate": ({"accumulate": True}, "accumulate=True, but dq is None"),
    "accumulate value": ({"accumulate": 2}, "accumulate=2 is neither True nor False"),
    "dbias": ({"return_dbias": True}, "return_dbias=True, but bias is None"),
    "dsinks": ({"return_dsinks": True}, "return_dsinks=True, but sinks is None"),
    "varlen": ({"max_seqlen_q": 5}, "cu_seqlens_q is None"),
    "kernel": ({"kernel": "fast"}, "kernel=fast is not a kernel of this build"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(device, why):
    changed, text = REFUSED[why]
    with pytest.raises(fa.BadArgument, match=text):
        _call(device, **changed)


def test_a_dlse_with_gaps_is_refused():
    (*arrays, _), *_ = accuracy.expected_backward(Case(5, 7, 8))
    with pytest.raises(fa.BadArgument, match=r"dlse has strides \(12, 6, 1\): it must be contiguous"):
        fa.backward(*arrays, dlse=np.zeros((1, 2, 6), np.float32)[..., :5])


def test_results_of_the_wrong_kind_are_refused():
    read_only = np.zeros((1, 5, 2, 8), np.float32)
    read_only.flags.writeable = False
    for given, text in (
        (np.zeros((1, 5, 2, 9), np.float32), r"dq is float32 \(1, 5, 2, 9\): expected float32 \(1, 5, 2, 8\)"),
        (np.zeros((1, 5, 2, 8), np.float16), "dq is float16"),
        (read_only, "dq is a read-only NumPy array"),
    ):
        with pytest.raises(fa.BadArgument, match=text):
            _call(CPU, dq=given)
    (*arrays, _), *_ = accuracy.expected_backward(Case(5, 7, 8))
    with pytest.raises(fa.BadArgument, match="dq starts at the same address as q"):
        fa.backward(*arrays, dq=arrays[1])


def test_forced_by_environment(monkeypatch):
    q = np.zeros((1, 4, 2, 8), np.float32)
    monkeypatch.setenv("FLASH_ATTN_BACKWARD_KERNEL", "cpu_naive")
    assert fa.backward_query(q, q, q).kernel == "cpu_naive"
    monkeypatch.setenv("FLASH_ATTN_BACKWARD_KERNEL", "nonsense")
    assert "FLASH_ATTN_BACKWARD_KERNEL=nonsense" in fa.backward_query(q, q, q).error


def test_float8_has_no_backward_pass():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = np.zeros((1, 4, 2, 16), ml_dtypes.float8_e4m3fn)
    plan = fa.backward_query(q, q, q, **{f"{x}_descale": np.ones(1, np.float32) for x in "qkv"})
    assert plan.status == "FA_UNSUPPORTED" and "float8_e4m3fn has no backward pass" in plan.error


def test_out_is_read_alone(backward_kernel):
    """The forward's out may be any of the inputs: the backward pass does not write it."""
    q = backward_kernel.device.array(np.random.default_rng(0).standard_normal((1, 5, 2, 8), dtype=np.float32))
    lse = backward_kernel.device.array(np.zeros((1, 2, 5), np.float32))
    if fa.backward_query(q, q, q, kernel=backward_kernel.name).status != "FA_OK":
        pytest.skip("refuses")
    apart = fa.backward(q, q, q, q, backward_kernel.device.array(backward_kernel.device.numpy(q)), lse)
    for alone, same in zip(apart, fa.backward(q, q, q, q, q, lse), strict=True):
        np.testing.assert_array_equal(backward_kernel.device.numpy(alone), backward_kernel.device.numpy(same))
