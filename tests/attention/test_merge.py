"""merge: against float64, its identity, associativity, both layouts."""

import accuracy
import numpy as np
import pytest

import flash_attn_minimal as fa
from flash_attn_lab import reference


def parts(n, shape=(2, 33, 3, 40), dtype="float32", packed=False, seed=0):
    """n random (out, lse) in NumPy."""
    rng = np.random.default_rng(seed)
    batch, seqlen, nheads, _ = shape
    outs = [accuracy.round_to(rng.standard_normal(shape, dtype=np.float32), dtype) for _ in range(n)]
    lses = [5 * rng.standard_normal((batch, nheads, seqlen), dtype=np.float32) for _ in range(n)]
    return [(out[0], lse[0]) if packed else (out, lse) for out, lse in zip(outs, lses, strict=True)]


def merge(device, a, b, dtype="float32"):
    arrays = [device.array(a[0], dtype), device.array(a[1]), device.array(b[0], dtype), device.array(b[1])]
    out, lse = fa.merge(*arrays)
    assert type(out) is type(arrays[0]) and out.dtype == arrays[0].dtype
    return device.numpy(out), device.numpy(lse)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("headdim", [1, 40, 128, 512])
def test_against_float64(device, headdim, dtype, packed):
    a, b = parts(2, (1 if packed else 2, 37, 3, headdim), dtype, packed)
    out, lse = merge(device, a, b, dtype)
    exact, exact_lse = reference.merge(*a, *b)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(out, exact, atol=accuracy.EPSILON[dtype] * 4)


def test_minus_infinity_is_the_identity(device):
    a, b = parts(2)
    for empty in (np.nan, np.inf, 7.0):
        nothing = np.full_like(b[0], empty), np.full_like(b[1], -np.inf)
        for result in (merge(device, a, nothing), merge(device, nothing, a)):
            np.testing.assert_array_equal(result[0], a[0])
            np.testing.assert_array_equal(result[1], a[1])
        out, lse = merge(device, nothing, nothing)
        assert not out.any() and np.isneginf(lse).all()


def test_commutative_and_associative(device):
    a, b, c = parts(3)
    ab, ba = merge(device, a, b), merge(device, b, a)
    np.testing.assert_allclose(ab[0], ba[0], atol=1e-6)
    left, right = merge(device, ab, c), merge(device, a, merge(device, b, c))
    np.testing.assert_allclose(left[0], right[0], atol=1e-6)
    np.testing.assert_allclose(left[1], right[1], rtol=1e-6, atol=1e-6)


def test_far_apart(device):
    """With lse 1e4 apart nothing overflows, and the side with the larger lse decides."""
    a, b = parts(2)
    far = b[0], b[1] + np.float32(1e4)
    out, lse = merge(device, a, far)
    np.testing.assert_array_equal(out, far[0])
    np.testing.assert_array_equal(lse, far[1])


def test_many_parts_equal_one_call(kernel):
    """Attention over pieces of the keys, merged, equals attention over all keys. One piece is empty."""
    (q, k, v, _), exact, plain = accuracy.expected(accuracy.Case(70, 203, 64, nheads=4, nheads_k=2))
    pieces = [kernel(q, k[:, lo:hi], v[:, lo:hi]) for lo, hi in [(0, 1), (1, 64), (64, 64), (64, 190), (190, 203)]]
    total = pieces[0]
    for piece in pieces[1:]:
        total = merge(kernel.device, total, piece)
    accuracy.check("out", total[0], exact[0], plain[0], "float32")
    accuracy.check("lse", total[1], exact[1], plain[1], "float32")


def test_strides(device):
    a, b = parts(2)
    turned = device.array(np.ascontiguousarray(a[0].swapaxes(1, 2))).swapaxes(1, 2)
    out, _ = fa.merge(turned, device.array(a[1]), device.array(b[0]), device.array(b[1]))
    np.testing.assert_array_equal(device.numpy(out), merge(device, a, b)[0])


def test_empty(device):
    a, b = parts(2, (2, 0, 3, 8))
    out, lse = merge(device, a, b)
    assert out.shape == (2, 0, 3, 8) and lse.shape == (2, 3, 0)
