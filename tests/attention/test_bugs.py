"""Bugs that other attention libraries shipped, each with a test that would have caught it. (Contract, section 8.)

One of them has no test here: one active row per block in decode costs bandwidth, which the benchmark shows.
"""

import mmap

import accuracy
import numpy as np
import pytest
from accuracy import Case

import flash_attn_minimal as fa


def test_launch_needs_more_than_48_kib_of_shared_memory(kernel):
    """In the bug the launch was refused and logged, and the output stayed as it was. Here it was full of NaN."""
    for dtype in ("float32", "float16"):
        kernel.check(Case(130, 130, 512, 512, dtype=dtype))


def test_scale_over_a_padded_stride(kernel):
    """headdim 40 inside rows of 64: the scale is that of 40, and the padding, full of NaN, is not read."""
    (q, k, v, _), exact, plain = accuracy.expected(Case(40, 70, 40))
    arrays = []
    for x in (q, k, v):
        wide = np.full((*x.shape[:-1], 64), np.nan, np.float32)
        wide[..., :40] = x
        arrays.append(kernel.device.array(wide)[..., :40])
    if fa.query(*arrays, kernel=kernel.name).status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip("not served")
    out = fa.flash_attn_func(*arrays, kernel=kernel.name)
    accuracy.check("out", kernel.device.numpy(out), exact[0], plain[0], "float32")


@pytest.mark.parametrize("seqlen_q,seqlen_k", [(3, 9), (9, 3), (64, 200), (200, 64)])
def test_mask_on_the_wrong_triangle(kernel, seqlen_q, seqlen_k):
    """V tells the columns apart: uniform scores make out the mean of the columns seen."""
    q, k = np.zeros((1, seqlen_q, 1, 8), np.float32), np.zeros((1, seqlen_k, 1, 8), np.float32)
    v = np.arange(seqlen_k, dtype=np.float32).reshape(1, seqlen_k, 1, 1)
    for top_left in (False, True):
        out, lse = kernel(q, k, v, causal=True, top_left=top_left)
        last = np.clip(np.arange(seqlen_q) + (0 if top_left else seqlen_k - seqlen_q), -1, seqlen_k - 1)
        np.testing.assert_allclose(out.ravel(), np.where(last < 0, 0, last / 2), rtol=1e-5)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse.ravel(), np.log(last + 1.0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("direction", [1, -1])
def test_correction_applied_twice_to_the_row_sum(kernel, direction):
    """The maximum rises (or falls) from tile to tile. A wrong row sum then shows in out and, exactly, in lse."""
    seqlen_k = 700
    q = np.ones((1, 5, 1, 1), np.float32)
    k = (direction * np.linspace(-20, 20, seqlen_k, dtype=np.float32)).reshape(1, seqlen_k, 1, 1)
    v = np.random.default_rng(0).standard_normal((1, seqlen_k, 1, 3), dtype=np.float32)
    out, lse = kernel(q, k, v, softmax_scale=1.0)
    exact, exact_lse = accuracy.reference.standard_attention(q, k, v, softmax_scale=1.0)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)
    np.testing.assert_allclose(out, exact, atol=1e-5)


def test_unnormalised_block_weighted_as_normalised(kernel):
    """More than two tiles of keys, each with a different sum."""
    seqlen_k = 1000
    q = np.ones((1, 3, 1, 1), np.float32)
    k = np.repeat(np.array([0, 3, -2, 5, 1], np.float32), 200).reshape(1, seqlen_k, 1, 1)
    v = np.repeat(np.array([1, -1, 4, 2, -3], np.float32), 200).reshape(1, seqlen_k, 1, 1)
    out, _ = kernel(q, k, v, softmax_scale=1.0)
    weights = np.exp([0.0, 3, -2, 5, 1])
    np.testing.assert_allclose(out.ravel(), weights @ [1, -1, 4, 2, -3] / weights.sum(), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_decode_position_ignored_by_the_causal_mask(kernel, dtype):
    """One query against a growing cache gives the same result as that row in one causal call."""
    (q, k, v, _), *_ = accuracy.expected(Case(70, 70, 32, dtype=dtype, nheads=4, nheads_k=2))
    whole, whole_lse = kernel(q, k, v, dtype, causal=True)
    for position in (0, 1, 30, 31, 32, 63, 64, 69):
        step, step_lse = kernel(
            q[:, position : position + 1], k[:, : position + 1], v[:, : position + 1], dtype, causal=True
        )
        np.testing.assert_allclose(step[:, 0], whole[:, position], atol=2e-6 if dtype == "float32" else 2e-3)
        np.testing.assert_allclose(step_lse[..., 0], whole_lse[..., position], atol=1e-5)


@pytest.mark.parametrize("seqlen", [4, 5, 128, 257])
def test_only_seqlen_4_was_tested(kernel, seqlen):
    kernel.check(Case(seqlen, seqlen, 64, batch=2, nheads=3, nheads_k=1, causal=True))


CHANGES = {
    "softmax_scale": 0.5,
    "causal": True,
    "window_size": (3, 3),
    "softcap": 0.5,
    "alibi_slopes": np.array([0.5, 0.25], np.float32),
    "bias": np.linspace(0, 2, 20, dtype=np.float32),
    "mask": np.arange(20) % 2 == 0,
    "sinks": np.array([1.0, 2.0], np.float32),
    "dropout_p": 0.5,
}


@pytest.mark.parametrize("option", CHANGES)
def test_argument_accepted_and_then_ignored(kernel, option):
    """Every option changes the answer."""
    (q, k, v, _), *_ = accuracy.expected(Case(20, 20, 16))
    seed = {"dropout_seed": 3} if option == "dropout_p" else {}
    without = kernel(q, k, v)[0]
    changed = kernel(q, k, v, **{option: CHANGES[option]}, **seed)[0]
    assert np.abs(changed - without).max() > 1e-3
    if option in ("causal", "window_size"):
        assert (
            np.abs(kernel(q[:, :9], k, v, **{option: CHANGES[option]}, top_left=True)[0] - changed[:, :9]).max() < 1e-5
        )
    if option == "dropout_p":
        other = kernel(q, k, v, dropout_p=0.5, dropout_seed=3, dropout_offset=1)[0]
        assert np.abs(changed - other).max() > 1e-3


@pytest.mark.parametrize(("chance", "used"), [(5e-324, 1 / 256), (1e-50, 1 / 256), (1 - 2**-53, 255 / 256)])
def test_a_chance_that_float32_rounds_to_0_or_1(kernel, chance, used):
    """It is the least or the greatest chance, and not "no dropout" or an error."""
    (q, k, v, _), *_ = accuracy.expected(Case(40, 300, 16))
    got = kernel(q, k, v, dropout_p=chance, dropout_seed=3)[0]
    np.testing.assert_array_equal(got, kernel(q, k, v, dropout_p=used, dropout_seed=3)[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("headdim", [72, 88, 104, 120, 136])
def test_headdim_72_silently_wrong(kernel, headdim, dtype):
    kernel.check(Case(100, 150, headdim, dtype=dtype))


@pytest.mark.parametrize("axis", ["row", "head", "batch"])
def test_32_bit_overflow(kernel, axis):
    """Strides with offsets beyond 2^32 elements. On the CPU the memory between is reserved but never touched."""
    if kernel.device.name != "cpu":
        pytest.skip("the GPU's large tensors are in test_gpu.py")
    if kernel.dtype != "float32":
        pytest.skip("NumPy has no bfloat16")
    try:
        memory = mmap.mmap(
            -1, 20 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        )
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"20 GiB of address space are not to be had: {error}")
    case = Case(5, 5, 16, batch=3, nheads=3, nheads_k=3, causal=True)
    (q, k, v, _), exact, plain = accuracy.expected(case)
    far = (1 << 32) + 64  # bytes: 2^30 elements and a bit
    strides = [5 * 3 * 16 * 4, 3 * 16 * 4, 16 * 4, 4]
    strides[("batch", "row", "head").index(axis)] = far if axis == "row" else 2 * far  # 5 rows, 3 heads, 3 batches
    buffer = np.frombuffer(memory, np.float32)
    arrays = []
    for n, x in enumerate((q, k, v, np.full_like(q, np.nan))):
        far_apart = np.lib.stride_tricks.as_strided(buffer[n * (1 << 16) :], x.shape, strides)
        far_apart[...] = x
        arrays.append(far_apart)
    out = fa.flash_attn_func(*arrays[:3], causal=True, kernel=kernel.name, out=arrays[3])
    accuracy.check("out", out, exact[0], plain[0], "float32")


def test_lse_of_base_2_mixed_with_natural_log(kernel):
    """All scores 0: lse is ln(seqlen_k), and merging halves gives the whole."""
    q, k = np.zeros((1, 3, 2, 16), np.float32), np.zeros((1, 100, 2, 16), np.float32)
    v = np.random.default_rng(0).standard_normal(k.shape, dtype=np.float32)
    out, lse = kernel(q, k, v)
    np.testing.assert_allclose(lse, np.log(100), rtol=1e-6)
    halves = [kernel(q, k[:, part], v[:, part]) for part in (slice(0, 30), slice(30, 100))]
    merged, merged_lse = fa.merge(*halves[0], *halves[1])
    np.testing.assert_allclose(merged, out, atol=1e-6)
    np.testing.assert_allclose(merged_lse, lse, rtol=1e-6)


def test_nan_for_fully_masked_rows(kernel):
    (q, k, v, _), *_ = accuracy.expected(Case(70, 130, 32))
    mask = np.ones((70, 130), bool)
    mask[[0, 33, 69]] = False
    out, lse = kernel(q, k, v, mask=mask)
    assert np.isfinite(out).all() and not out[:, [0, 33, 69]].any() and np.isneginf(lse[..., [0, 33, 69]]).all()
    assert np.isfinite(np.delete(lse, [0, 33, 69], axis=-1)).all()


def test_deterministic_flag_that_does_not_hold(kernel):
    (q, k, v, _), *_ = accuracy.expected(Case(129, 257, 64, nheads=8, nheads_k=8, batch=2))
    results = [kernel(q, k, v, deterministic=True) for _ in range(5)]
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])


@pytest.mark.parametrize("headdim", [16, 100])
def test_scale_one_over_sqrt_of_seqlen(kernel, headdim):
    """softmax_scale=None is headdim ** -0.5, whatever the lengths, and the headdim is that of q."""
    (q, k, v, _), *_ = accuracy.expected(Case(30, 300, headdim, 24))
    implicit, explicit = kernel(q, k, v), kernel(q, k, v, softmax_scale=headdim**-0.5)
    np.testing.assert_allclose(implicit[0], explicit[0], atol=1e-6)
    np.testing.assert_allclose(implicit[1], explicit[1], atol=1e-6)
