"""Scores so large that a float32 lse of them is not exact enough: P of a row still sums to 1, in every pass that
recomputes it (docs/contract.md, section 3). And numbers at the ends of float32."""

import accuracy
import numpy as np
import pytest
from conftest import cpu_kernels, ml_dtypes

import flash_attn_minimal as fa
from flash_attn_lab import reference

LOWEST = float(np.finfo(np.float32).min)
LEVELS = (-1e4, -1e5, -1e6, -1e7, -1e9, -1e30, LOWEST, 1e6, 1e9)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def arrays(rows, keys, dtype, headdim=64):
    shapes = ((2, rows, 2, headdim), (2, keys, 1, headdim), (2, keys, 1, headdim), (2, rows, 2, headdim))
    return [accuracy.round_to(normal(*shape, seed=i), dtype) for i, shape in enumerate(shapes)]


def sums_of_dv(dv, dout):
    """(the sum of dv over keys and heads, that sum if every row of P sums to 1)."""
    return dv.sum((1, 2)), dout.sum((1, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
@pytest.mark.parametrize("size", [1e4, 1e5, 1e6, 1e7, 1e8, 1e10, 1e12])
def test_gradients_at_large_scores(backward_kernel, size, rows, dtype):
    """dv used to be up to 1e28 times too large, because S was summed in two orders, and P = exp(S - lse)."""
    q, k, v, dout = arrays(rows, 150, dtype)
    scale = float(np.float32(size / 20))
    out, lse = reference.standard_attention(q, k, v, softmax_scale=scale)
    out, lse = accuracy.round_to(out.astype(np.float32), dtype), lse.astype(np.float32)
    exact = reference.standard_attention_backward(dout, q, k, v, softmax_scale=scale)
    dq, dk, dv = backward_kernel(dout, q, k, v, out, lse, dtype, softmax_scale=scale)[:3]
    # One key has all the weight of a row; two keys share it if their scores differ by less than float32 resolves.
    unsure = close_rows(q, k, scale)
    assert unsure.mean() < 0.1
    got, want = sums_of_dv(dv, dout)
    np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max())
    assert np.abs(dv).max() < 1.01 * np.abs(dout).sum((1, 2)).max()
    if not unsure.any():
        np.testing.assert_allclose(dv, exact.dv, atol=1e-2 * np.abs(exact.dv).max())
    for x in (dq, dk):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": True}, {"sinks": True}], ids=str)
def test_gradients_of_the_largest_scores(backward_kernel, options, sign):
    """Gradients are finite, and P sums to 1, for every kind of score."""
    q, k, v, dout = arrays(70, 150, "bfloat16")
    scale = sign * 5e10
    given = dict(options)
    if "mask" in given:
        given["mask"] = np.ones((70, 150), bool)
    if "sinks" in given:
        given["sinks"] = np.zeros(2, np.float32)  # far below every maximum: the sum stays
    out, lse = reference.standard_attention(q, k, v, softmax_scale=scale, **given)
    out, lse = accuracy.round_to(out.astype(np.float32), "bfloat16"), lse.astype(np.float32)
    got = backward_kernel(dout, q, k, v, out, lse, "bfloat16", softmax_scale=scale, **given)[:3]
    assert all(np.isfinite(x).all() for x in got)
    sums, want = sums_of_dv(got[2], dout)
    np.testing.assert_allclose(sums, want, atol=2e-2 * np.abs(want).max())


def close_rows(q, k, scale):
    """Rows whose two largest scores differ by less than 20, or by less than float32 sums may be off."""
    scores = np.sort(np.einsum("bihd,bjgd->bhij", q.astype(np.float64), k) * scale, -1)
    terms = np.einsum("bihd,bjgd->bhij", np.abs(q), np.abs(k)).max(-1) * scale
    return scores[..., -1] - scores[..., -2] < 20 + 1e-5 * terms


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_of_one_large_bias(backward_kernel, level, rows, dtype):
    """A bias that is the same for all keys of a row does not change P, until the scores are too small beside it. Then
    every key has the same weight, as in PyTorch."""
    q, k, v, dout = arrays(rows, 64, dtype)
    bias = accuracy.round_to(np.full((1, 1, rows, 64), level, np.float32), "float32")
    scores = (np.einsum("bihd,bjgd->bhij", q, k) / 8 + bias).astype(np.float32).astype(np.float64)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    sums = weights.sum(-1, keepdims=True)
    out = np.einsum("bhij,bjgd->bihd", weights / sums, v.astype(np.float64))
    lse = np.ascontiguousarray((top + np.log(sums))[..., 0], np.float32)
    options = {"bias": bias, "return_dbias": True}
    dq, dk, dv, dbias = backward_kernel(dout, q, k, v, accuracy.round_to(out, dtype), lse, dtype, **options)
    got, want = sums_of_dv(dv, dout)
    np.testing.assert_allclose(got, want, atol=2e-2 * np.abs(want).max() + 0.1 * (dtype != "float32"))
    if abs(level) >= 1e9:
        exact = reference.standard_attention_backward(dout, 0 * q, k, v)  # equal scores
        np.testing.assert_allclose(dv, exact.dv, atol=1e-2 * np.abs(exact.dv).max())
        np.testing.assert_allclose(dq, exact.dq, atol=2e-2 * np.abs(exact.dq).max())
    assert np.isfinite(dk).all()
    assert np.isfinite(dbias).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_of_the_lowest_bias(kernel, dtype):
    """finfo.min counts as a number, as in PyTorch: a row with only this bias gives the mean of V, and lse is about
    finfo.min. -inf is a mask."""
    q, k, v, _ = arrays(70, 100, dtype)
    bias = np.zeros((2, 1, 70, 100), np.float32)
    bias[0, :, :, 60:] = LOWEST  # padding after the keys of a sequence
    bias[1, :, 5] = LOWEST  # a row of padding
    bias[1, :, 6] = -np.inf
    out, lse = kernel(q, k, v, dtype, bias=bias)
    exact, exact_lse = reference.standard_attention(q[:1], k[:1, :60], v[:1, :60])
    np.testing.assert_allclose(out[0], exact[0], atol=2e-2)
    np.testing.assert_allclose(lse[0], exact_lse[0], atol=1e-2)
    mean = v[1].astype(np.float64).mean(0)[0]
    for head in range(2):
        np.testing.assert_allclose(out[1, 5, head], mean, atol=4e-3)
        assert np.isfinite(lse[1, head, 5])
        assert lse[1, head, 5] <= 0.999 * LOWEST
        assert not out[1, 6, head].any()
        assert np.isneginf(lse[1, head, 6])


@pytest.mark.parametrize("level", [0, 1e4, -1e5])
def test_parts_of_the_keys(backward_kernel, level):
    """Calls on half of the keys with the lse of all keys, as in ring attention by hand: the halves add up to the
    whole."""
    q, k, v, dout = arrays(33, 80, "float32")
    bias = np.full((1, 1, 33, 80), level, np.float32)
    exact = reference.standard_attention_backward(dout, q, k, v, bias=bias)
    out, lse = reference.standard_attention(q, k, v, bias=bias)
    out, lse = out.astype(np.float32), lse.astype(np.float32)
    halves = []
    for half in (slice(0, 40), slice(40, 80)):
        given = {"bias": np.ascontiguousarray(bias[..., half])}
        halves.append(backward_kernel(dout, q, k[:, half], v[:, half], out, lse, "float32", **given)[:3])
    ulp = 2.0**-23 * abs(level)
    for got, want in (
        (halves[0][0] + halves[1][0], exact.dq),
        (np.concatenate([halves[0][1], halves[1][1]], 1), exact.dk),
        (np.concatenate([halves[0][2], halves[1][2]], 1), exact.dv),
    ):
        np.testing.assert_allclose(got, want, atol=(2e-5 + 2 * ulp) * np.abs(want).max())


@pytest.mark.parametrize("sinks", [False, True])
def test_a_sink_among_large_scores(backward_kernel, sinks):
    """The sink is part of the sum, and dsinks is the gradient through its probability."""
    q, k, v, dout = arrays(9, 70, "float32")
    bias = np.full((1, 1, 9, 70), 2.0**20, np.float32)
    options = {"sinks": np.array([2.0**20 + 1, 2.0**20 - 2], np.float32)} if sinks else {}
    near = {"sinks": np.array([1.0, -2.0], np.float32)} if sinks else {}
    k = 0 * k  # scores are exact
    exact = reference.standard_attention_backward(dout, q, k, v, **near)
    out, lse = reference.standard_attention(q, k, v, bias=bias, **options)
    given = {**options, **({"return_dsinks": True} if sinks else {}), "bias": bias}
    got = backward_kernel(dout, q, k, v, out.astype(np.float32), lse.astype(np.float32), "float32", **given)
    np.testing.assert_allclose(got[2], exact.dv, atol=1e-4 * np.abs(exact.dv).max())
    if sinks:
        np.testing.assert_allclose(got[-1], exact.dsinks, atol=1e-4 * np.abs(exact.dsinks).max())


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("dtype,size", [("float32", 2e8), ("bfloat16", 2e8), ("float16", 3e7)])
def test_output_at_large_scores(kernel, dtype, size, rows):
    """One key has all the weight. The sizes are near the ends of a GPU's range (docs/contract.md, section 3)."""
    q, k, v, _ = arrays(rows, 150, dtype)
    out, lse = kernel(q, k, v, dtype, softmax_scale=size / 20)
    products = np.einsum("bihd,bjgd->bhij", q.astype(np.float64), k)
    terms = np.einsum("bihd,bjgd->bhij", np.abs(q), np.abs(k)).max(-1)
    order = np.sort(products, -1)
    sure = order[..., -1] - order[..., -2] > 0.02 * terms
    assert sure.any()
    want = np.stack([v[b, products[b].argmax(-1), 0] for b in range(2)])  # batch, head, row, column
    np.testing.assert_allclose(out.swapaxes(1, 2)[sure], want[sure], atol=1e-2 * np.abs(v).max())
    assert np.isfinite(out).all()
    np.testing.assert_allclose(lse, order[..., -1] * size / 20, atol=1e-2 * terms.max() * size / 20)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64, 200])
@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_key_sums_at_large_scores(kernel, size, rows, causal):
    """Each row adds 1 to the sum of key_sums."""
    for dtype in ("float32", "bfloat16"):
        q, k, v, _ = arrays(rows, 250, dtype)
        given, options = kernel.arguments(q, k, v, dtype, None, {"softmax_scale": size / 20, "causal": causal})
        plan = fa.query(*given, return_key_sums=True, **options)
        if plan.status == "FA_UNSUPPORTED":
            continue
        _, sums = fa.flash_attn_func(*given, return_key_sums=True, **options)
        np.testing.assert_allclose(kernel.device.numpy(sums).sum(-1), rows, rtol=1e-3)


# ---- the ends of float32, on the CPU ----


FLOAT32 = [name for name in cpu_kernels() if name != "cpu_amx"]


@pytest.mark.parametrize(
    "options", [{}, {"dropout_p": 0.25, "dropout_seed": 1}, {"softcap": 5.0}, {"mask": True}, {"causal": True}], ids=str
)
@pytest.mark.parametrize("rows,keys", [(1, 4), (3, 100), (64, 250), (130, 40)])
@pytest.mark.parametrize("name", FLOAT32)
def test_sums_beyond_float32(name, rows, keys, options):
    """With V of 1e38, P V is beyond float32 before the division by the sum of P, and finite afterwards."""
    if options.get("causal") and rows > keys:
        rows = keys
    q, k, v, _ = arrays(rows, keys, "float32", headdim=24)
    if "mask" in options:
        options = {"mask": np.random.default_rng(0).random((rows, keys)) < 0.8}
    big = np.float32(1e38)
    out, lse = fa.flash_attn_func(q, k, np.sign(v) * big, return_lse=True, kernel=name, **options)
    want, want_lse = fa.flash_attn_func(q, k, np.sign(v), return_lse=True, kernel="cpu_naive", **options)
    np.testing.assert_allclose(out / big, want, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("name", FLOAT32)
def test_a_long_cache_of_large_values(name):
    """The pieces of a long cache are merged without overflow of float32."""
    q, k, v = normal(1, 1, 2, 16), normal(1, 7000, 1, 16, seed=1), np.sign(normal(1, 7000, 1, 16, seed=2))
    out = fa.flash_attn_with_kvcache(q, k, np.float32(2e38) * v, cache_seqlens=7000, kernel=name)
    want = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=7000, kernel="cpu_naive")
    np.testing.assert_allclose(out / np.float32(2e38), want, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("name", FLOAT32)
@pytest.mark.parametrize("q_size,k_size,scale", [(1e38, 1e-36, 0.02), (1e20, 1e20, 1e-38), (3e38, 1e-38, 100.0)])
def test_products_beyond_float32(name, rows, q_size, k_size, scale):
    """softmax_scale is applied after the product, so the score can be in range even if the product overflows
    float32."""
    q = np.float32(q_size) * np.sign(normal(1, rows, 1, 16))
    k, v = np.float32(k_size) * np.sign(normal(1, 40, 1, 16, seed=1)), normal(1, 40, 1, 16, seed=2)
    exact, exact_lse = reference.standard_attention(q, k, v, softmax_scale=scale)
    out, lse = fa.flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True, kernel=name)
    np.testing.assert_allclose(out, exact, atol=2e-3)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-4)


@pytest.mark.parametrize("name", FLOAT32)
def test_what_is_not_finite_stays_so(name):
    """An infinity or a NaN that a row sees reaches its result."""
    q, k, v, _ = arrays(5, 40, "float32")
    v[0, 3] = np.inf
    k[1, 4] = np.nan
    out = fa.flash_attn_func(q, k, v, kernel=name)
    assert (out[0] == np.inf).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("name", FLOAT32)
def test_what_hides_among_sums_beyond_float32(name, rows):
    """Many runs of NaN that no row sees, together with V of 1e38; and rows whose bias or sink gives no finite
    result."""
    q, k, v, _ = arrays(rows, 300, "float32", headdim=24)
    big = np.float32(1e38)
    hidden = np.arange(300) % 3 == 1  # 100 runs
    mask = np.broadcast_to(~hidden, (rows, 300)).copy()
    want = fa.flash_attn_func(q, k, np.sign(v), kernel="cpu_naive", mask=mask)
    spoiled = np.where(hidden[:, None, None], np.float32(np.nan), np.sign(v) * big)
    out = fa.flash_attn_func(q, k, spoiled, kernel=name, mask=mask)
    np.testing.assert_allclose(out / big, want, atol=1e-5)
    bias = np.zeros((1, 1, rows, 300), np.float32)
    bias[..., hidden] = -np.inf
    bias[0, 0, 0, 299] = np.nan
    out = fa.flash_attn_func(q, k, spoiled, kernel=name, bias=bias)
    assert np.isnan(out[:, 0]).all()
    np.testing.assert_allclose(out[:, 1:] / big, want[:, 1:], atol=1e-5)
    out = fa.flash_attn_func(q, k, v, kernel=name, sinks=np.array([np.nan, 0], np.float32))
    assert np.isnan(out[:, :, 0]).all()
    assert np.isfinite(out[:, :, 1]).all()


@pytest.mark.skipif("cpu_amx" not in cpu_kernels() or ml_dtypes is None, reason="no AMX, or no bfloat16 in NumPy")
@pytest.mark.parametrize("rows", [3, 64, 600])  # those of 3 are too few for a tile register
def test_subnormal_numbers_of_tile_registers(rows):
    """AMX takes subnormal numbers as 0, so a result is off by at most the largest of them."""
    least = np.float32(2.0**-126)
    q, k, v = normal(1, rows, 2, 40), normal(1, 250, 2, 40, seed=1), least * normal(1, 250, 2, 40, seed=2)
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    out = fa.flash_attn_func(q, k, v, kernel="cpu_amx").astype(np.float32)
    want = fa.flash_attn_func(q, k, v, kernel="cpu_naive").astype(np.float32)
    assert (abs(out - want) <= least).all()
    assert (out == want).all() or rows > 8
    q[..., 0], k[..., 0] = 1e38, 1e-39  # adds 0.1 to every score, or nothing
    lse = fa.flash_attn_func(q, k, v, kernel="cpu_amx", return_lse=True, softmax_scale=1.0)[1]
    more = fa.flash_attn_func(q, k, v, kernel="cpu_naive", return_lse=True, softmax_scale=1.0)[1]
    k[..., 0] = 0
    none = fa.flash_attn_func(q, k, v, kernel="cpu_naive", return_lse=True, softmax_scale=1.0)[1]
    np.testing.assert_allclose(lse, more if rows <= 8 else none, rtol=1e-6, atol=1e-5)
