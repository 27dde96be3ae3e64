"""Packed sequences: every kernel against float64, and against the same sequences one by one."""

import numpy as np
import pytest
from accuracy import Case, check, expected, expected_backward, gradient_floor, rounding_floor

import flash_attn_minimal as fa

LENGTHS = {
    "equal": ((33, 33, 33), (70, 70, 70)),
    "different": ((1, 65, 31, 129), (63, 65, 1, 203)),
    "zero_length": ((0, 40, 0, 7, 0), (50, 0, 0, 33, 9)),
    "decode": ((1, 1, 1, 1), (1, 17, 100, 257)),
    "one": ((113,), (203,)),
}


def cu(lengths):
    return (0, *np.cumsum(lengths).tolist())


def varlen_case(lengths, extra=0, **options):
    q, k = lengths
    return Case(max(q) + extra, max(k) + extra, cu_seqlens_q=cu(q), cu_seqlens_k=cu(k), **options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_lengths(kernel, lengths, causal, dtype):
    kernel.check(varlen_case(LENGTHS[lengths], headdim=40, nheads=4, nheads_k=2, causal=causal, dtype=dtype))


@pytest.mark.parametrize("extra", [0, 1, 100])
def test_options_count_from_the_start_of_each_sequence(kernel, extra):
    options = {"bias": (True, True, True), "mask": (True, False, True), "alibi": 2, "dropout_p": 0.2, "sinks": True}
    kernel.check(varlen_case(LENGTHS["different"], extra, headdim=33, headdim_v=24, window_size=(50, 9), **options))
    kernel.check(varlen_case(LENGTHS["zero_length"], extra, headdim=33, causal=True, top_left=True, **options))


def poisoned_past_the_end(case, bias):
    """The bias with NaN in rows and columns past the end of its sequence."""
    bias = bias.copy()
    for own, rows, keys in zip(bias, np.diff(case.cu_seqlens_q), np.diff(case.cu_seqlens_k), strict=True):
        own[:, :, keys:] = np.nan
        if own.shape[1] > 1:
            own[:, rows:] = np.nan
    return bias


BIAS_PAST_THE_END = [
    varlen_case(lengths, extra, nheads=4, nheads_k=2, headdim=headdim, dtype="float16", bias=axes, causal=causal)
    for lengths in (((1, 65, 31, 129), (63, 65, 1, 203)), ((70, 200, 0), (136, 130, 9)))
    for axes, extra in (((True, True, True), 5), ((True, False, True), 53), ((True, True, False), 0))
    for headdim, causal in ((64, False), (128, True))
]


@pytest.mark.parametrize("case", BIAS_PAST_THE_END)
def test_bias_past_the_end_of_a_sequence(kernel, case):
    (q, k, v, options), exact, plain = expected(case)
    options = options | {"bias": poisoned_past_the_end(case, options["bias"])}
    cu_seqlens = case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k
    out, lse = kernel(q, k, v, case.dtype, cu_seqlens, **options)
    check("out", out, exact[0], plain[0], case.dtype, floor=rounding_floor(q, k, None))
    check("lse", lse, exact[1], plain[1], "float32", floor=rounding_floor(q, k, None))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", BIAS_PAST_THE_END)
def test_gradients_with_bias_past_the_end_of_a_sequence(backward_kernel, case, deterministic):
    (dout, q, k, v, out, lse, options), exact, plain = expected_backward(case)
    options = options | {"bias": poisoned_past_the_end(case, options["bias"]), "deterministic": deterministic}
    cu_seqlens = case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k
    got = backward_kernel(dout, q, k, v, out, lse, case.dtype, cu_seqlens, return_dbias=True, **options)
    for name, x in zip(("dq", "dk", "dv", "dbias"), got, strict=False):
        dtype = "float32" if name == "dbias" else case.dtype
        floor = gradient_floor(case, getattr(exact, name))
        check(name, x, getattr(exact, name), getattr(plain, name), dtype, floor=floor)


def test_equals_the_sequences_one_by_one(kernel):
    case = varlen_case(LENGTHS["different"], nheads=3, nheads_k=3, causal=True)
    (q, k, v, options), *_ = expected(case)
    out, lse = kernel(
        q, k, v, "float32", (case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k), **options
    )
    bounds = zip(case.cu_seqlens_q, case.cu_seqlens_q[1:], case.cu_seqlens_k, case.cu_seqlens_k[1:], strict=False)
    for q0, q1, k0, k1 in bounds:
        alone, alone_lse = kernel(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], **options)
        np.testing.assert_allclose(out[q0:q1], alone[0], atol=2e-6)
        np.testing.assert_allclose(lse[:, q0:q1], alone_lse[0], atol=2e-6)


def test_rows_of_no_sequence(device):
    """In rows that cu_seqlens does not cover, a new out is 0 and lse is -inf; a given out keeps its values. NaN in keys
    beyond does not leak."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 50, 2, 16), dtype=np.float32)
    k[40:], v[40:] = np.nan, np.nan
    starts = device.array(np.array([0, 15, 30], np.int32)), device.array(np.array([0, 25, 40], np.int32))
    arrays = [device.array(x) for x in (q, k, v)]
    out, lse = fa.flash_attn_varlen_func(*arrays, *starts, 15, 25, return_lse=True)
    out, lse = device.numpy(out), device.numpy(lse)
    assert not out[30:].any() and np.isneginf(lse[:, 30:]).all()
    assert np.isfinite(out).all() and np.isfinite(lse[:, :30]).all() and out[:30].any()
    given = device.nans((50, 2, 16), "float32")
    fa.flash_attn_varlen_func(*arrays, *starts, 15, 25, out=given)
    np.testing.assert_array_equal(device.numpy(given)[:30], out[:30])
    assert np.isnan(device.numpy(given)[30:]).all()


def test_no_sequences(device):
    q = device.array(np.zeros((0, 2, 16), np.float32))
    none = device.array(np.array([0], np.int32))
    out, lse = fa.flash_attn_varlen_func(q, q, q, none, none, 0, 0, return_lse=True)
    assert tuple(out.shape) == (0, 2, 16) and tuple(lse.shape) == (2, 0)
