"""float32 inputs with allow_tf32: the tensor-core kernel against float64, within twice the error of standard attention
on inputs rounded to tf32; and the calls and GPUs that it serves."""

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, Kernel

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_lab.fuzz.attention import plain_tf32_head

NAME = "mma_tf32_sm80"
with_gpu = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)


def plain_attention(q, k, v, **options):
    return reference._over_heads(plain_tf32_head, q, k, v, options)


def check(case: Case, change=None):
    q, k, v, options = accuracy.inputs(case)
    if change:
        change(q, k, v)
    cu = (case.cu_seqlens_q, case.cu_seqlens_k) if case.varlen else ()
    if case.varlen:
        exact = reference.varlen(reference.standard_attention, q, k, v, *cu, **options)
        plain = reference.varlen(plain_attention, q, k, v, *cu, **options)
        cu += (case.seqlen_q, case.seqlen_k)
    else:
        exact, plain = reference.standard_attention(q, k, v, **options), plain_attention(q, k, v, **options)
    out, lse = Kernel(CUDA, NAME)(q, k, v, "float32", cu or None, allow_tf32=True, **options)
    finite = [np.where(np.isfinite(x), x, 0) for x in (q, k)]
    floor = accuracy.rounding_floor(*finite, case.softmax_scale)
    accuracy.check("lse", lse, exact[1], plain[1], "float32", floor=floor)
    accuracy.check("out", out, exact[0], plain[0], "float32", floor=floor)


SEQLENS = [(1, 1), (7, 7), (31, 33), (65, 63), (127, 129), (113, 203), (239, 1), (1, 239), (799, 3), (3, 799), (5, 0)]


@with_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", SEQLENS)
def test_seqlens(seqlen_q, seqlen_k, causal):
    check(Case(seqlen_q, seqlen_k, 64, nheads=4, nheads_k=2, causal=causal))


@with_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "headdim,headdim_v",
    [(d, d) for d in (1, 8, 33, 40, 64, 72, 80, 96, 100, 128, 160, 192, 256)] + [(192, 128), (64, 256), (5, 1)],
)
def test_headdims(headdim, headdim_v, causal):
    check(Case(113, 203, headdim, headdim_v, causal=causal))


@with_gpu
@pytest.mark.parametrize("headdim", [64, 96, 128, 192, 256])
def test_tiles_of_full_grids(headdim):
    """Enough heads that the large tiles run, and a length that no tile divides."""
    check(Case(300, 301, headdim, batch=4, nheads=32, nheads_k=8, causal=True))


OPTIONS = {
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (17, 5)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": 2},
    "bias": {"bias": (False, True, True)},
    "mask": {"mask": (True, False, True)},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "scale": {"softmax_scale": -0.3},
    "varlen": {"cu_seqlens_q": (0, 65, 65, 80), "cu_seqlens_k": (0, 65, 96, 96)},
    "large scores": {"spread": 100.0},
    "several": {"causal": True, "softcap": 20.0, "alibi": 1, "sinks": True, "dropout_p": 0.1, "mask": (True,) * 3},
}


@with_gpu
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, headdim):
    check(Case(65, 65, headdim, nheads=4, nheads_k=2, **OPTIONS[option]))


@with_gpu
def test_special_values():
    """A NaN or an infinity that no row sees does not spread; one that all rows see reaches all of them."""

    def hidden(q, k, v):
        k[:, 70:], v[:, 70:] = np.nan, np.inf

    check(Case(64, 129, 64, causal=True, top_left=True), hidden)

    def seen(q, k, v):
        v[:, 3, :, 5], v[:, 60, :, 7] = np.array(0x7FFFFFFF, np.uint32).view(np.float32), np.inf

    check(Case(64, 64, 64), seen)


@with_gpu
def test_bitwise_repeatable():
    case = Case(257, 300, 128, batch=2, nheads=8, nheads_k=2)
    q, k, v, _ = accuracy.inputs(case)
    first, second = (Kernel(CUDA, NAME)(q, k, v, allow_tf32=True) for _ in range(2))
    assert all(np.array_equal(x, y) for x, y in zip(first, second, strict=True))


@with_gpu
def test_who_may_run_it():
    single, half = (CUDA.array(np.ones((1, 24, 2, 64), np.float32), dtype) for dtype in ("float32", "float16"))
    if "needs sm_80" in fa.query(single, single, single, kernel=NAME, allow_tf32=True).error:
        pytest.skip("needs sm_80 or newer")
    assert fa.query(single, single, single, allow_tf32=True).kernel == NAME
    assert fa.query(single, single, single).kernel in ("mma_float32_sm80", "float32_sm80")
    refused = fa.query(single, single, single, kernel=NAME)
    assert refused.status == "FA_UNSUPPORTED" and "allow_tf32=False" in refused.error
    refused = fa.query(half, half, half, kernel=NAME, allow_tf32=True)
    assert refused.status == "FA_UNSUPPORTED" and "takes float32 only" in refused.error
    with pytest.raises(fa.Unsupported, match="allow_tf32=False"):
        fa.flash_attn_func(single, single, single, kernel=NAME)


def test_the_processor_keeps_float32():
    """allow_tf32 only allows tf32: on a processor without tf32 nothing changes."""
    q, k, v, _ = accuracy.inputs(Case(33, 65, 64))
    assert np.array_equal(fa.flash_attn_func(q, k, v), fa.flash_attn_func(q, k, v, allow_tf32=True))
