"""float32 on tensor cores (docs/float32.md): the sums that the kernels rely on, in NumPy; the kernels against float64
with the budget of float32; infinity and NaN; and who serves what."""

from dataclasses import replace

import accuracy
import kvcache_cases
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, Kernel

import flash_attn_minimal as fa
from flash_attn_lab import reference

with_gpu = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
NAMES = ["mma_float32_sm80", "wgmma_float32_sm90"]
BACKWARD = [*NAMES, "wgmma_float32_wide_sm90"]
UNIT = 2.0**-24


# ---- the sums of tensor cores, emulated ----


def rounded(x, bits):
    fraction, exponent = np.frexp(x)
    return np.ldexp(np.rint(fraction * 2.0**bits), exponent - bits)


def parts(x, bits, count=2):
    x, found = x.astype(np.float64), []
    for _ in range(count):
        found.append(rounded(x, bits))
        x = x - found[-1]
    return found


def multiply(total, a, b, block):
    """total + a @ b as a tensor core adds: a block at a time, aligned to the largest, cut off to float32."""
    for i in range(0, a.shape[1], block):
        products = a[:, i : i + block, None] * b[None, i : i + block]
        largest = np.maximum(np.abs(products).max(1), np.abs(total))
        unit = np.ldexp(1.0, np.frexp(largest)[1] - 26)
        exact = (np.trunc(products / unit[:, None]) * unit[:, None]).sum(1) + np.trunc(total / unit) * unit
        fraction, exponent = np.frexp(exact)
        total = np.ldexp(np.trunc(fraction * 2.0**24), exponent - 24)
    return total


def split_product(a, b, bits, block, chain):
    """Three products of two parts. Each `chain` summed elements have an accumulator, joined by float32 additions."""
    (high_a, low_a), (high_b, low_b) = parts(a, bits), parts(b, bits)
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i in range(0, a.shape[1], chain):
        here = slice(i, i + chain)
        own = np.zeros(total.shape)
        for x, y in ((low_a, high_b), (high_a, low_b), (high_a, high_b)):
            own = multiply(own, x[:, here], y[here], block)
        total += own.astype(np.float32)
    return total


def chain_of_additions(a, b):
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i in range(a.shape[1]):
        total = (total + a[:, i : i + 1].astype(np.float64) * b[i : i + 1]).astype(np.float32)
    return total


def errors(got, a, b):
    exact = a.astype(np.float64) @ b
    return np.abs(got - exact) / np.abs(exact).max() / UNIT


def scores(headdim):
    rng = np.random.default_rng(headdim)
    q, k = rng.standard_normal((2, 24, headdim), dtype=np.float32)
    k[:6] = q[:6]  # large scores
    return q, k.T


def probabilities(keys):
    rng = np.random.default_rng(keys)
    return np.exp(rng.standard_normal((16, keys)) - 3).astype(np.float32), 1 + np.abs(
        rng.standard_normal((keys, 16), dtype=np.float32)
    )


def test_two_parts_hold_a_float32():
    x = np.random.default_rng(1).standard_normal(10000).astype(np.float32)
    high, low = parts(x, 11)
    assert (np.abs(low) <= 2.0**-11 * np.abs(x)).all() and (np.abs(x - high - low) <= 2.0**-23 * np.abs(x)).all()


@pytest.mark.parametrize("bits,block,chain", [(11, 8, 8), (11, 16, 64)], ids=["tf32", "float16"])
@pytest.mark.parametrize("operands", [scores(64), scores(128), probabilities(1024)], ids=["64", "128", "values"])
def test_split_products_are_as_exact_as_float32(operands, bits, block, chain):
    plain = errors(chain_of_additions(*operands), *operands)
    split = errors(split_product(*operands, bits, block, chain), *operands)
    assert split.max() <= 2 * plain.max() and split.mean() <= 2 * plain.mean()


def test_one_chain_of_split_products_is_not():
    """Why each chain is short: tensor cores truncate, always to the same side."""
    operands = probabilities(1024)
    plain = errors(chain_of_additions(*operands), *operands)
    assert errors(split_product(*operands, 11, 8, 1024), *operands).mean() > 8 * plain.mean()


# ---- the kernels ----


def check(name, case: Case, change=None, factor=2.0):
    q, k, v, options = accuracy.inputs(case)
    if change:
        change(q, k, v)
    with np.errstate(all="ignore"):
        exact = reference.standard_attention(q, k, v, **options)
        plain = accuracy.plain_attention(q, k, v, "float32", **options)
    out, lse = Kernel(CUDA, name)(q, k, v, "float32", **options)
    finite = [np.where(np.isfinite(x), x, 0) for x in (q, k)]
    floor = accuracy.rounding_floor(*finite, case.softmax_scale)
    accuracy.check("lse", lse, exact[1], plain[1], "float32", factor, floor)
    accuracy.check("out", out, exact[0], plain[0], "float32", factor, floor)


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (65, 63), (129, 257), (300, 301), (1, 700), (700, 1)])
@pytest.mark.parametrize("headdim", [32, 64, 100, 128])
def test_lengths(name, seqlen_q, seqlen_k, headdim, causal):
    check(name, Case(seqlen_q, seqlen_k, headdim, nheads=4, nheads_k=2, causal=causal))


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [20.0, 1000.0])
def test_large_scores(name, spread):
    check(name, Case(150, 200, 64, nheads=4, nheads_k=2, spread=spread))


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1e-33, 1e-12, 1e15], ids=str)
def test_small_and_large_values(name, factor):
    """out follows v, in float32's exponents: the error is relative to the largest value."""
    q, k, v, _ = accuracy.inputs(Case(70, 90, 64))
    plain, _ = Kernel(CUDA, "minimal")(q, k, v, "float32")
    got, _ = Kernel(CUDA, name)(q, k, v * np.float32(factor), "float32")
    assert np.abs(got / factor - plain).max() < 2e-5 * np.abs(plain).max()


def of_bits(bits):
    return np.array(bits, np.uint32).view(np.float32)


SPECIAL = {
    "q inf": (0, np.inf), "q nan": (0, np.nan), "k inf": (1, np.inf), "k -inf": (1, -np.inf), "k nan": (1, np.nan),
    "v inf": (2, np.inf), "v nan": (2, np.nan), "k 1e30": (1, 1e30), "v 1e30": (2, 1e30), "q 1e-42": (0, 1e-42),
    "q nan of low bits": (0, of_bits(0x7F800001)), "k nan of low bits": (1, of_bits(0x7F800001)),
    "v nan of low bits": (2, of_bits(0xFF801FFF)), "nan of all bits": (1, of_bits(0x7FFFFFFF)),
    "largest": (2, np.finfo(np.float32).max),
}  # fmt: skip


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values(name, value):
    """Infinite and NaN where the CUDA cores are, and equal elsewhere, in the rows and columns that a value reaches."""
    which, number = SPECIAL[value]
    arrays = accuracy.inputs(Case(70, 90, 64))[:3]
    arrays[which][0, 40, 0, 5] = number
    want = Kernel(CUDA, "minimal")(*arrays, "float32")
    got = Kernel(CUDA, name)(*arrays, "float32")
    for x, y in zip(got, want, strict=True):
        assert np.array_equal(np.isnan(x), np.isnan(y)) and np.array_equal(np.isinf(x), np.isinf(y))
        finite = np.isfinite(y)
        assert np.allclose(x[finite], y[finite], rtol=1e-4, atol=1e-5)


@with_gpu
def test_the_choice_of_a_kernel_repeats():
    """A column of V whose mean is, to a rounding, the least that float16 parts take: no order of a sum may decide."""
    q, k, v, _ = accuracy.inputs(Case(128, 128, 64, nheads=8, nheads_k=8))
    column = np.random.default_rng(0).uniform(0.1, 1.9, v[..., 5].shape)
    v[:] = np.clip(v, -1, 1)
    v[:, 0, :, 0], v[..., 5] = 1, 2.0**-13 * column / column.mean(1, keepdims=True)
    first, *others = (Kernel(CUDA, "wgmma_float32_sm90")(q, k, v)[0] for _ in range(30))
    for other in others:
        np.testing.assert_array_equal(other, first)


@with_gpu
def test_values_out_of_float16s_range_in_one_tile():
    """Rows of K 2^20 times smaller than another one: float16 parts of a common scale would lose them."""

    def change(q, k, v):
        k[:, 50] *= 2.0**20
        k[:, 50, :, 1:] = 0
        v[:, :60] *= 2.0**-20

    check("wgmma_float32_sm90", Case(70, 120, 64), change)


OUTLIERS = {
    "q large where k is 0": lambda q, k: (q[..., 0].__imul__(1e12), k[..., 0].fill(0)),
    "k large where q is 0": lambda q, k: (k[..., 3].__imul__(1e12), q[..., 3].fill(0)),
    "q large where k is small": lambda q, k: (q[..., 5].__imul__(1e6), k[..., 5].__imul__(1e-6)),
    "a row of q": lambda q, k: (q[:, 64, :, 0].__imul__(1e12), k[..., 0].fill(0)),
    "tiles of k apart": lambda q, k: (k[:, :128].__imul__(2.0**41), k[:, 128:].__imul__(2.0**-44)),
    "channels rescaled": lambda q, k: (
        q.__imul__(np.repeat([2.0**12, 1, 2.0**-12], [16, 32, 16])),
        k.__imul__(np.repeat([2.0**-12, 1, 2.0**12], [16, 32, 16])),
    ),
    "few columns": lambda q, k: (q[..., 8:].fill(0), q[..., :2].__imul__(1e9), k[..., :2].__imul__(1e-9)),
}  # fmt: skip


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("outlier", OUTLIERS)
def test_outliers(name, outlier):
    """Columns or rows so large that parts of a common scale would lose the others, where those decide the scores."""
    scale = 2.0**-44 if outlier == "tiles of k apart" else 0.125
    check(name, Case(65, 200, 64, nheads=2, softmax_scale=scale), lambda q, k, _: OUTLIERS[outlier](q, k))


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("array", ["k", "v"])
def test_rows_of_few_small_numbers(name, array):
    """Only hidden keys are large; the zeros of the others must not stand for numbers that keep their bits."""
    case = Case(70, 256, 64, nheads=2, mask=(True, True, True), mask_rate=1.0)
    q, k, v, options = accuracy.inputs(case)
    options["mask"][..., [0, 128]] = False
    x = k if array == "k" else v
    small = np.arange(256) % 128 != 0
    x[:, small, :, 16:] = 0
    x[:, small] *= 2.0**-28
    q *= 2.0**28 if array == "k" else 1
    exact = reference.standard_attention(q, k, v, **options)
    plain = accuracy.plain_attention(q, k, v, "float32", **options)
    out, lse = Kernel(CUDA, name)(q, k, v, "float32", **options)
    for got, want, beside in ((out, exact[0], plain[0]), (lse, exact[1], plain[1])):
        assert np.abs(got - want).max() <= 4 * np.abs(beside - want).max() + 2.0**-20 * np.abs(want).max()


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"window_size": (140, 90)}, {"softcap": 200.0}], ids=str)
@pytest.mark.parametrize("zeros", [[299], [5], [0, 130, 299], [256]], ids=str)
def test_largest_scores_without_values(name, headdim, options, zeros):
    """`add_zero_attn`: the keys with the largest scores have v = 0, so the others decide out."""
    case = Case(70, 300, headdim, **options)
    q, k, v, options = accuracy.inputs(case)
    q[..., 0], k[..., 0], v[:, zeros] = headdim**0.5, 0, 0
    for margin in (14, 24, 40, 60):
        k[:, zeros, :, 0] = margin
        exact = reference.standard_attention(q, k, v, **options)
        plain = accuracy.plain_attention(q, k, v, "float32", **options)
        out, lse = Kernel(CUDA, name)(q, k, v, "float32", **options)
        for got, want, beside in ((out, exact[0], plain[0]), (lse, exact[1], plain[1])):
            assert np.abs(got - want).max() <= 4 * np.abs(beside - want).max() + 2.0**-21 * np.abs(want).max()


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("small", [2.0**-16, 2.0**-13, 2.0**-9])
def test_largest_score_with_small_values(name, headdim, small):
    q, k, v = (np.zeros((1, 128, 1, headdim), np.float32) for _ in range(3))
    q[..., 0], k[:, 7, :, 0], v[:] = headdim**0.5, 25, 1
    v[:, 7] = small
    out, _ = Kernel(CUDA, name)(q, k, v, "float32")
    exact, _ = reference.standard_attention(q, k, v)
    assert np.abs(out - exact).max() <= 2.0**-15 * np.abs(exact).max()


@with_gpu
@pytest.mark.parametrize("name", NAMES)
def test_many_keys_without_values(name):
    """Their sum is as exact as that of the other keys."""
    q, k, v = (np.zeros((1, 16384 if x else 8, 1, 64), np.float32) for x in (0, 1, 1))
    q[..., 0], k[..., 0] = 8, -0.25958914
    k[:, ::128] = 0
    v[:, ::128] = np.random.default_rng(1).uniform(1, 2, (1, 128, 1, 64))
    out, lse = Kernel(CUDA, name)(q, k, v, "float32")
    exact = reference.standard_attention(q, k, v)
    assert np.abs(out - exact[0]).max() <= 1e-5 * np.abs(exact[0]).max()
    assert np.abs(lse - exact[1]).max() <= 1e-5


@with_gpu
@pytest.mark.parametrize("name", NAMES)
def test_huge_softmax_scale_of_scores_of_zero(name):
    q, k, v, _ = accuracy.inputs(Case(64, 128, 64, nheads=1, nheads_k=1))
    q[..., :32], q[..., 32:], k[..., :32], k[..., 32:] = 2.0**43, 0, 0, 2.0**43
    out, _ = Kernel(CUDA, name)(q, k, v, "float32", softmax_scale=2.0**72)
    assert np.abs(out - v.mean(1, keepdims=True)).max() < 1e-6


@with_gpu
def test_small_exponents_of_distant_tiles():
    """Numbers of k that differ by 2^88, and a tiny softmax_scale: exponents of the small tile are subnormal, not 0."""
    q, k, v, _ = accuracy.inputs(Case(64, 256, 64, nheads=1, nheads_k=1))
    q[:], k[:] = np.abs(q) % 0.2 + 0.8, np.abs(k) % 0.2 + 0.8
    k[:, 128:] *= 1.9 * 2.0**43
    k[:, :128] *= 1.26 * 2.0**-45
    v[:, 128:], v[:, :128] = -0.9, 1.0
    for exponent in (-60, -66):
        out, _ = Kernel(CUDA, NAMES[1])(q, k, v, "float32", softmax_scale=2.0**exponent)
        exact, _ = reference.standard_attention(q, k, v, softmax_scale=2.0**exponent)
        assert np.abs(out - exact).max() < 1e-5


@with_gpu
@pytest.mark.parametrize("name", [*NAMES, "float32_sm80", "minimal"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window_size": (60, 0)}, {}], ids=str)
@pytest.mark.parametrize("scale", [1e-20, 1e-37, 1e-39, 1e-44])
def test_tiny_softmax_scale(name, options, scale):
    """All visible keys weigh the same, and hidden ones nothing."""
    check(name, Case(200, 333, 64, softmax_scale=scale, **options))
    check(
        name, Case(200, 333, 64, softmax_scale=scale, **options), lambda q, k, _: (q.__imul__(1e-12), k.__imul__(1e-12))
    )


@with_gpu
@pytest.mark.parametrize("name", NAMES)
def test_bitwise_repeatable(name):
    q, k, v, _ = accuracy.inputs(Case(257, 300, 128, batch=2, nheads=8, nheads_k=2))
    first, second = (Kernel(CUDA, name)(q, k, v) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))


def spoiled(case, change):
    """The arrays of a backward call after change(q, k, v), with the out and lse of the CUDA cores, and dout."""
    q, k, v, options = accuracy.inputs(case)
    change(q, k, v)
    out, lse = Kernel(CUDA, "minimal")(q, k, v, "float32", **options)
    dout = np.random.default_rng(3).standard_normal(out.shape).astype(np.float32)
    return (dout, q, k, v, out, lse), options


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (65, 63), (129, 257), (300, 301), (1, 700), (700, 1)])
@pytest.mark.parametrize("headdim", [64, 100, 192, 256])
def test_gradients(name, seqlen_q, seqlen_k, headdim, causal):
    BackwardKernel(CUDA, name).check(Case(seqlen_q, seqlen_k, headdim, nheads=4, nheads_k=2, causal=causal, dlse=True))


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_in_gradients(name, headdim, value):
    """As in the forward pass. (Equal numbers only where the value leaves the others their size.)"""
    which, number = SPECIAL[value]

    def change(*arrays):
        arrays[which][0, 40, 0, 5] = number

    arrays, options = spoiled(Case(70, 90, headdim), change)
    want = BackwardKernel(CUDA, "simple")(*arrays, **options)
    got = BackwardKernel(CUDA, name)(*arrays, **options)
    for x, y in zip(got, want, strict=True):
        assert np.array_equal(np.isfinite(x), np.isfinite(y))
        if not 1e10 < abs(number) < np.inf:
            finite = np.isfinite(y)
            assert np.allclose(x[finite], y[finite], rtol=1e-4, atol=2e-5)


@with_gpu
@pytest.mark.parametrize("headdim", [64, 128])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(64, 64), (192, 128), (128, 320), (257, 65)])
def test_gradients_come_from_parts(seqlen_q, seqlen_k, headdim):
    """Neither a tile of 64 rows without rows nor one of a single row, some number of which is always small, may send
    the call to the kernel with tf32 parts. Their bits differ."""
    arrays, options = spoiled(Case(seqlen_q, seqlen_k, headdim, nheads=32, nheads_k=16), lambda *_: None)
    float16, tf32 = (BackwardKernel(CUDA, name)(*arrays, **options) for name in (BACKWARD[1], BACKWARD[0]))
    assert not any(np.array_equal(x, y) for x, y in zip(float16, tf32, strict=True))


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan], ids=str)
def test_infinite_dlse(name, headdim, number):
    """dS is infinite, although q, k, v and dout are not."""
    arrays, options = spoiled(Case(70, 90, headdim), lambda *_: None)
    dlse = np.zeros_like(arrays[-1])
    dlse[0, 0, 40] = number
    want = BackwardKernel(CUDA, "simple")(*arrays, dlse=dlse, **options)
    got = BackwardKernel(CUDA, name)(*arrays, dlse=dlse, **options)
    for x, y in zip(got, want, strict=True):
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        assert np.allclose(x[finite], y[finite], rtol=1e-4, atol=2e-5)


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_gradients_of_values_out_of_float16s_range(name, headdim):
    """A row of K 2^20 times larger than the others: float16 parts of a common scale would lose those."""

    def change(q, k, v):
        k[:, 50] *= 2.0**20
        q[:, :, :, :] *= 2.0**-20

    arrays, options = spoiled(Case(70, 120, headdim), change)
    want = BackwardKernel(CUDA, "simple")(*arrays, **options)
    got = BackwardKernel(CUDA, name)(*arrays, **options)
    for x, y in zip(got, want, strict=True):
        assert np.abs(x - y).max() < 1e-5 * np.abs(y).max()


def check_beside_simple(name, arrays, options, factor=2.0):
    """The largest error of each gradient, beside that of the kernel on the CUDA cores: no floor hides anything."""
    exact = reference.standard_attention_backward(*(x.astype(np.float64) for x in arrays[:4]), **options)[:3]
    plain, got = (BackwardKernel(CUDA, kernel)(*arrays, **options) for kernel in ("simple", name))
    for what, x, y, z in zip(("dq", "dk", "dv"), got, plain, exact, strict=True):
        errors, allowed = np.abs(x - z), np.abs(y - z)
        assert np.isfinite(x).all(), what
        assert errors.max() <= factor * allowed.max() + 2.0**-24 * np.abs(z).max(), (what, errors.max(), allowed.max())


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("headdim", [64, 256])
@pytest.mark.parametrize("v_factor,dout_factor", [(1, 1e6), (1e16, 1e16), (1e12, 1e13), (1e-12, 1e-12), (1e17, 1)])
def test_gradients_of_large_and_small_values(name, headdim, v_factor, dout_factor):
    """dS is as large as the product of v and dout."""
    arrays, options = spoiled(Case(70, 90, headdim), lambda q, k, v: v.__imul__(v_factor))
    arrays[0][:] *= dout_factor
    check_beside_simple(name, arrays, options)


@with_gpu
@pytest.mark.parametrize("name,headdim", [(BACKWARD[0], 64), (BACKWARD[1], 64), (BACKWARD[1], 128), (BACKWARD[2], 192)])
def test_gradients_over_many_keys(name, headdim):
    """P is 2^-18 on average, which parts of a fixed scale would hold in few bits."""
    arrays, options = spoiled(Case(16, 1 << 18, headdim, nheads=1, nheads_k=1), lambda q, k, v: q.__imul__(0.1))
    check_beside_simple(name, arrays, options)


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
def test_gradients_repeat_bitwise(name):
    arrays, options = spoiled(Case(257, 300, 256 if "wide" in name else 128, nheads=8, nheads_k=2), lambda *_: None)
    first, second = (BackwardKernel(CUDA, name)(*arrays, **options) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))


# ---- pages of a cache, head dims above 256, options ----


@with_gpu
@pytest.mark.parametrize("page_size", [1, 5, 16, 24, 128])
@pytest.mark.parametrize(
    "headdim, headdim_v", [(30, None), (64, None), (128, 100), (192, None), (256, None), (512, 300)]
)
def test_pages(headdim, headdim_v, page_size):
    """Rows past a sequence's keys, and pages that no sequence owns, hold NaN."""
    kernel = Kernel(CUDA, NAMES[0])
    case = kvcache_cases.Case(
        lengths=(300, None, 0, 129), rows=page_size, pages=-(-390 // page_size), seqlen_q=70, seqlen_new=0,
        headdim=headdim, headdim_v=headdim_v, nheads=4, nheads_k=2,
    )  # fmt: skip
    kvcache_cases.check(kernel, case)
    kvcache_cases.check(kernel, replace(case, causal=True, seqlen_q=65, seqlen_new=65))
    kvcache_cases.check(kernel, replace(case, seqlen_q=1, window_size=(90, 0), sinks=True))
    kvcache_cases.check(kernel, replace(case, causal=True, softcap=20.0, alibi=1))


@with_gpu
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_special_values_in_pages(value):
    """A block with an infinite sum walks over the pages a second time."""
    rng = np.random.default_rng(0)
    q = CUDA.array(rng.standard_normal((1, 40, 2, 64), dtype=np.float32))
    cache = rng.standard_normal((2, 10, 16, 2, 64), dtype=np.float32)
    cache[0, 3, 5, 0, 7] = value
    table = rng.permutation(10).astype(np.int32)[None]
    outs = []
    for name in ("minimal", NAMES[0]):
        arrays = [CUDA.array(x) for x in cache]
        lengths = CUDA.array(np.array([155], np.int32))
        outs.append(CUDA.numpy(fa.flash_attn_with_kvcache(
            q, *arrays, cache_seqlens=lengths, block_table=CUDA.array(table), causal=True, kernel=name
        )))  # fmt: skip
    for is_special in (np.isnan, np.isinf):
        assert np.array_equal(is_special(outs[0]), is_special(outs[1]))
    finite = np.isfinite(outs[0])
    assert np.allclose(outs[0][finite], outs[1][finite], rtol=1e-4, atol=1e-5)


WIDE = [(264, None), (320, 256), (384, None), (392, 448), (512, None), (512, 64), (64, 512), (333, 301)]


@with_gpu
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (65, 63), (129, 257), (1, 700), (300, 31)])
@pytest.mark.parametrize("headdim, headdim_v", WIDE)
def test_head_dims_above_256(headdim, headdim_v, seqlen_q, seqlen_k):
    case = Case(seqlen_q, seqlen_k, headdim, headdim_v, nheads=4, nheads_k=2)
    check(NAMES[0], case)
    check(NAMES[0], replace(case, causal=True))


@with_gpu
@pytest.mark.parametrize("headdim", [320, 512])
@pytest.mark.parametrize("value", SPECIAL)
def test_special_values_of_wide_heads(headdim, value):
    which, number = SPECIAL[value]
    arrays = accuracy.inputs(Case(70, 90, headdim))[:3]
    arrays[which][0, 40, 0, 5] = number
    want = Kernel(CUDA, "minimal")(*arrays, "float32")
    got = Kernel(CUDA, NAMES[0])(*arrays, "float32")
    for x, y in zip(got, want, strict=True):
        assert np.array_equal(np.isnan(x), np.isnan(y)) and np.array_equal(np.isinf(x), np.isinf(y))


@with_gpu
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (65, 63), (129, 257), (300, 31)])
@pytest.mark.parametrize("headdim, headdim_v", WIDE)
def test_gradients_of_head_dims_above_256(headdim, headdim_v, seqlen_q, seqlen_k):
    case = Case(seqlen_q, seqlen_k, headdim, headdim_v, nheads=4, nheads_k=2, dlse=True)
    BackwardKernel(CUDA, NAMES[0]).check(case)
    BackwardKernel(CUDA, NAMES[0]).check(replace(case, causal=True, seqlen_q=seqlen_q + 7))


OPTIONS = [
    {"softcap": 15.0}, {"softcap": 15.0, "spread": 12.0}, {"alibi": 1}, {"alibi": 2, "causal": True},
    {"bias": (True, True, True)}, {"bias": (False, True, True), "softcap": 15.0}, {"bias": ()},
    {"mask": (True, False, True)}, {"mask": (True, False, False), "mask_rate": 0.1}, {"dropout_p": 0.3},
    {"mask": (True, True, True), "bias": (False, False, True), "dropout_p": 0.2, "causal": True},
    {"intervals": (2, 2)}, {"blocks": (4, 64, 128)}, {"attention_chunk": 100}, {"sinks": True, "softcap": 15.0},
    {"window_size": (90, 20), "alibi": 1}, {"window_size": (50, -1)},
]  # fmt: skip


@with_gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("headdim", [64, 100, 128, 192, 256])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(name, headdim, options):
    check(name, Case(200, 333, headdim, batch=2, nheads=4, nheads_k=2, **options))


@with_gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_wide_heads(options):
    check(NAMES[0], Case(130, 210, 320, 400, batch=2, nheads=4, nheads_k=2, **options))
    BackwardKernel(CUDA, NAMES[0]).check(Case(130, 210, 320, 400, batch=2, nheads=4, nheads_k=2, **options))


@with_gpu
@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("headdim", [64, 100, 128, 192])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_with_options(name, headdim, options):
    BackwardKernel(CUDA, name).check(Case(200, 333, headdim, batch=2, nheads=4, nheads_k=2, dlse=True, **options))


@with_gpu
@pytest.mark.parametrize("name", ["wgmma_float32_sm90"])
def test_options_out_of_float16s_range(name):
    """mma_float32_sm80 serves the call instead, with its options."""

    def change(q, k, v):
        k[:, 50] *= 2.0**20
        k[:, 50, :, 1:] = 0

    check(name, Case(70, 120, 64, bias=(True, True, True), softcap=15.0), change)


@with_gpu
@pytest.mark.parametrize("seqlen_q", [1, 3, 16])
@pytest.mark.parametrize("softcap", [5.0, 50.0])
def test_softcap_of_few_rows(seqlen_q, softcap):
    """softcap multiplies the error of tanh, so that float32 needs an exact one."""
    case = kvcache_cases.Case(
        lengths=(700, 300), rows=800, seqlen_q=seqlen_q, seqlen_new=0, headdim=64, softcap=softcap, causal=True
    )
    for name in ("decode_lanes_sm80", "decode_lanes_cluster_sm90"):
        kvcache_cases.check(Kernel(CUDA, name), case)


@with_gpu
def test_what_float32_calls_run_on():
    def plan(headdim=64, rows=2048, query=fa.query, **options):
        q = CUDA.array(np.zeros((1, rows, 8, headdim), np.float32))
        return query(q, q, q, **options)

    if "needs sm_90" in plan().why_not.get("wgmma_float32_sm90", "needs sm_90"):
        pytest.skip("needs a Hopper GPU")
    bias = CUDA.array(np.zeros((2048, 2048), np.float32))
    for options in ({}, {"causal": True}, {"softcap": 30.0}, {"bias": bias}, {"attention_chunk": 256}):
        for headdim in (64, 128):
            for query in (fa.query, fa.backward_query):
                assert plan(headdim, query=query, **options).kernel == "wgmma_float32_sm90", (headdim, options)
    assert plan(512).kernel == plan(512, query=fa.backward_query).kernel == "mma_float32_sm80"


@with_gpu
def test_who_may_run_it():
    single, half = (CUDA.array(np.ones((1, 8, 2, 64), np.float32), dtype) for dtype in ("float32", "float16"))
    if "needs sm_80" in fa.query(single, single, single, kernel=NAMES[0]).error:
        pytest.skip("needs sm_80 or newer")
    refused = fa.query(half, half, half, kernel=NAMES[0])
    assert refused.status == "FA_UNSUPPORTED" and "takes float32 only" in refused.error
