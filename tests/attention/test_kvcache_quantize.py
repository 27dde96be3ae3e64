"""quantize_kvcache: factors and rounded values against float64, values that are not finite, and attention over the
result."""

from __future__ import annotations

import accuracy
import numpy as np
import pytest
from conftest import CPU, Kernel
from kvcache_cases import eight_bit, from_device, quantised

import flash_attn_minimal as fa
from flash_attn_lab.reference import standard_attention

LIMIT = {"float8_e4m3fn": 448.0, "int8": 127.0}
DTYPES = ("float32", "float16", "bfloat16")
AXES = {"token": (3,), "entry": (1, 3), "head": (0, 1, 3)}


def caches(dtype, shape=(3, 17, 2, 40), headdim_v=24, seed=0):
    rng = np.random.default_rng(seed)
    k, v = (rng.standard_normal((*shape[:3], d), np.float32) for d in (shape[3], headdim_v))
    k[1] *= 30
    v[:, :, 1] *= 0.01
    v[0, 3] = 0
    return [accuracy.round_to(x, dtype) for x in (k, v)]


def served(device, dtype):
    if dtype == "float8_e4m3fn":
        eight_bit(dtype)  # skips where NumPy has no such type
        if device.framework == "cupy":
            pytest.skip("CuPy has no float8_e4m3fn")


def exact_factors(x, factors, dtype):
    """The factors, (entries, rows or 1, nheads_k) or (nheads_k,), in float64; 1 where all values are zero."""
    largest = np.abs(x.astype(np.float64)).max(AXES[factors], keepdims=factors == "entry")
    largest = largest[..., 0] if factors == "entry" else largest
    return np.where(largest > 0, largest / LIMIT[dtype], 1)


def host(device, arrays):
    return [from_device(Kernel(device, ""), x) for x in arrays]


@pytest.mark.parametrize("cache_dtype", LIMIT)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factors", AXES)
def test_against_float64(device, factors, dtype, cache_dtype):
    served(device, cache_dtype)
    given = caches(dtype)
    *got, k_scale, v_scale = fa.quantize_kvcache(*(device.array(x, dtype) for x in given), cache_dtype, factors)
    for x, x8, scale in zip(given, host(device, got), host(device, (k_scale, v_scale)), strict=True):
        assert x8.dtype == eight_bit(cache_dtype) and x8.shape == x.shape and scale.dtype == np.float32
        want = exact_factors(x, factors, cache_dtype)
        assert scale.shape == want.shape
        largest = want != 1
        np.testing.assert_allclose(scale[largest], want[largest], rtol=3e-7)
        assert (scale > 0).all() and np.isfinite(scale).all()
        wide = scale[..., None]
        np.testing.assert_array_equal(x8.astype(np.float32), quantised(x, wide, cache_dtype).astype(np.float32))
        error = np.abs(x8.astype(np.float64) * wide - x)  # half a step: of e4m3 2^-4 of the value, at least 2^-10
        step = 0.5 * wide if cache_dtype == "int8" else np.maximum(np.abs(x) / 16, wide * 2.0**-10)
        assert (error <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("cache_dtype", LIMIT)
def test_attention_over_the_result(device, cache_dtype):
    """Contiguous, and as pages of any order; factors of each kind."""
    served(device, cache_dtype)
    k, v = caches("float32", (4, 8, 2, 64), 64)
    k[1] /= 30
    q = np.random.default_rng(1).standard_normal((1, 3, 4, 64), dtype=np.float32)
    order = np.array([[2, 0, 3, 1]], np.int32)
    exact = standard_attention(q, k[order[0]].reshape(1, 32, 2, 64), v[order[0]].reshape(1, 32, 2, 64))[0]
    for factors in AXES:
        k8, v8, k_scale, v_scale = fa.quantize_kvcache(device.array(k), device.array(v), cache_dtype, factors)
        out = fa.flash_attn_with_kvcache(
            device.array(q), k8, v8, block_table=device.array(order), k_scale=k_scale, v_scale=v_scale
        )
        assert np.abs(device.numpy(out) - exact).max() < 0.06


@pytest.mark.parametrize("cache_dtype", LIMIT)
@pytest.mark.parametrize("shape", [(2,), (3, 1, 2)], ids=str)
def test_given_factors(device, shape, cache_dtype):
    served(device, cache_dtype)
    k, v = caches("bfloat16")
    scales = [np.random.default_rng(s).uniform(0.001, 0.01, shape).astype(np.float32) for s in (2, 3)]
    on_device = [device.array(s) for s in scales]
    k8, v8, *same = fa.quantize_kvcache(
        device.array(k, "bfloat16"),
        device.array(v, "bfloat16"),
        cache_dtype,
        k_scale=on_device[0],
        v_scale=on_device[1],
    )
    assert same[0] is on_device[0] and same[1] is on_device[1]
    for x, x8, scale in zip((k, v), host(device, (k8, v8)), scales, strict=True):
        np.testing.assert_array_equal(
            x8.astype(np.float32), quantised(x, scale[..., None], cache_dtype).astype(np.float32)
        )


@pytest.mark.parametrize("cache_dtype", LIMIT)
@pytest.mark.parametrize("factors", AXES)
def test_what_is_not_finite(device, factors, cache_dtype):
    served(device, cache_dtype)
    k, v = caches("float32")
    k[2, 5, 1, 7] = np.nan
    v[1, 2, 0, 3] = np.inf
    *got, k_scale, v_scale = fa.quantize_kvcache(device.array(k), device.array(v), cache_dtype, factors)
    k8, v8, k_scale, v_scale = host(device, (*got, k_scale, v_scale))
    clean = np.nan_to_num(k)
    np.testing.assert_allclose(k_scale, exact_factors(clean, factors, cache_dtype), rtol=3e-7)
    want = quantised(clean, k_scale[..., None], cache_dtype).astype(np.float32)
    want[2, 5, 1, 7] = -127 if cache_dtype == "int8" else np.nan
    np.testing.assert_array_equal(k8.astype(np.float32), want)
    hit = np.zeros(v.shape, bool)
    hit[{"token": np.s_[1, 2, 0], "entry": np.s_[1, :, 0], "head": np.s_[:, :, 0]}[factors]] = True
    with np.errstate(invalid="ignore"):
        read = v8.astype(np.float32) * v_scale[..., None]
    assert not np.isfinite(read[hit]).any()
    assert np.isfinite(read[~hit]).all()
    tiny = np.full((1, 2, 1, 8), 1e-38, np.float32)
    for x in host(device, fa.quantize_kvcache(device.array(tiny), device.array(tiny), cache_dtype, factors)):
        assert np.isfinite(x.astype(np.float32)).all()


def test_memory_that_is_not_contiguous(device):
    """Keys and values side by side in one pool; heads before rows; values that are columns of the keys; no rows."""
    k, v = caches("float16", (5, 6, 3, 16), 16)
    pool = device.array(np.ascontiguousarray(np.stack([k, v], 1).swapaxes(2, 3)), "float16")
    views = [pool[:, i].swapaxes(1, 2) for i in (0, 1)]
    for factors in ("token", "entry"):
        for a, b in zip(
            host(device, fa.quantize_kvcache(*views, "int8", factors)),
            host(device, fa.quantize_kvcache(device.array(k, "float16"), device.array(v, "float16"), "int8", factors)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(fa.Unsupported, match=r"k_cache has strides .*: factors='head' takes rows at one stride"):
        fa.quantize_kvcache(*views, "int8", "head")
    keys = device.array(k, "float16")
    columns = fa.quantize_kvcache(keys, keys[..., :8], "int8", "head")
    np.testing.assert_array_equal(
        host(device, columns)[1], quantised(k[..., :8], host(device, columns)[3][:, None], "int8")
    )
    nothing = device.array(np.zeros((0, 4, 2, 8), np.float32))
    assert [tuple(x.shape) for x in fa.quantize_kvcache(nothing, nothing, "int8")] == [(0, 4, 2, 8)] * 2 + [
        (0, 4, 2)
    ] * 2


X, NARROW = np.zeros((2, 3, 2, 8), np.float32), np.zeros((2, 3, 1, 8), np.float32)
REFUSED = [
    ({"k_cache": X[0]}, r"k_cache has shape \(3, 2, 8\): expected"),
    ({"v_cache": X.astype(np.int8)}, "v_cache is int8: expected float32, float16 or bfloat16"),
    ({"v_cache": NARROW}, r"v_cache is float32 \(2, 3, 1, 8\), but k_cache is float32 \(2, 3, 2, 8\)"),
    ({"k_cache": X.swapaxes(2, 3)[..., :2]}, "k_cache has stride 8 along its last axis"),
    ({"dtype": "float8"}, "dtype='float8' is not one of 'float8_e4m3fn', 'int8'"),
    ({"factors": "row"}, "factors='row' is not one of 'token', 'entry', 'head'"),
    ({"k_scale": np.ones(2, np.float32)}, "v_scale is None and k_scale is not"),
    ({"k_scale": np.ones((2, 3, 2), np.float32), "v_scale": np.ones(2, np.float32)}, r"k_scale has shape \(2, 3, 2\)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), REFUSED, ids=[text[:30] for _, text in REFUSED])
def test_refused(change, text):
    with pytest.raises(fa.BadArgument, match=text):
        fa.quantize_kvcache(**{"k_cache": X, "v_cache": X, "dtype": "int8", **change})


@pytest.mark.parametrize("factors", AXES)
@pytest.mark.parametrize("framework", ["torch", "jax.numpy"])
def test_frameworks(framework, factors):
    """Results have the type of the inputs, and the same values in every framework."""
    xp = pytest.importorskip(framework)
    given = [x.astype(np.float16) for x in caches("float16")]
    arrays = [xp.asarray(x) for x in given]
    for cache_dtype in LIMIT:
        served(CPU, cache_dtype)
        want = fa.quantize_kvcache(*given, cache_dtype, factors)
        for x, y in zip(fa.quantize_kvcache(*arrays, cache_dtype, factors), want, strict=True):
            assert type(x) is type(arrays[0]) and str(x.dtype).endswith(str(y.dtype))
            x = x.float() if framework == "torch" else x
            np.testing.assert_array_equal(np.asarray(x).astype(np.float32), y.astype(np.float32))
