"""Gradients of wgmma_sm90 and wgmma_pair_sm90 where one block has all keys of a sequence, up to 128: it stores rows of
dq instead of adding to sums, and no kernel follows it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]
HEADDIMS = [40, 64, 96, 128, 160, 192, 256]


def kernel_of(headdim):
    return "wgmma_sm90" if headdim <= 128 else "wgmma_pair_sm90"


CASES = {
    "one tile": Case(17, 17, 64),
    "one key": Case(70, 1, 64),
    "many rows": Case(333, 128, 64),
    "causal": Case(128, 128, 64, causal=True),
    "causal, fewer rows": Case(60, 127, 64, causal=True),
    "causal from the top": Case(200, 90, 64, causal=True, top_left=True),
    "rows without keys": Case(200, 90, 64, causal=True),
    "rows without keys, sinks": Case(200, 90, 64, causal=True, sinks=True),
    "sinks": Case(100, 100, 64, sinks=True),
    "softcap": Case(100, 100, 64, softcap=40.0),
    "ALiBi": Case(100, 100, 64, causal=True, alibi=1),
    "dropout": Case(130, 120, 64, dropout_p=0.3),
    "window": Case(128, 128, 64, window_size=(20, 3)),
    "mask of keys": Case(130, 120, 64, mask=(True, False, False)),
    "mask of pairs": Case(130, 120, 64, mask=(True, False, True)),
    "bias": Case(130, 120, 64, bias=(True, True, True)),
    "bias and dropout": Case(130, 120, 64, bias=(False, True, True), dropout_p=0.2),
    "bias of float32 and dropout": Case(130, 120, 64, bias=(False, True, True), bias_float32=True, dropout_p=0.2),
    "scale below zero": Case(100, 100, 64, softmax_scale=-0.1),
    "packed": Case(100, 100, 64, batch=3, cu_seqlens_q=(0, 50, 50, 150), cu_seqlens_k=(0, 100, 120, 180)),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("headdim", HEADDIMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients(case, headdim, dtype, deterministic):
    heads = (
        {"batch": max(case.batch, 2), "nheads": 4, "nheads_k": 2} if not case.varlen else {"nheads": 4, "nheads_k": 2}
    )
    case = replace(case, headdim=headdim, dtype=dtype, **heads)
    BackwardKernel(CUDA, kernel_of(headdim)).check(case, deterministic=deterministic)


def arrays(headdim, batch=3, rows=200, keys=128, heads=4, heads_k=4, spread=1.0):
    generator = torch.Generator("cuda").manual_seed(headdim)
    shapes = ((rows, heads), (keys, heads_k), (keys, heads_k), (rows, heads))
    q, k, v, dout = (
        torch.randn(batch, n, h, headdim, device="cuda", generator=generator).bfloat16() for n, h in shapes
    )
    q = q * spread
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    return dout, q, k, v, out, lse


def gradients(given, **options):
    nans = {name: torch.full_like(x, math.nan) for name, x in zip(("dq", "dk", "dv"), given[1:4], strict=True)}
    return fa.backward(*given, kernel=kernel_of(given[1].shape[-1]), **nans, **options)


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_bits_are_those_of_packed_sequences(headdim):
    """Packed sequences take the sums of dq and the kernel after: the same products, rounded once."""
    given = arrays(headdim)
    got = gradients(given)
    packed = [x.flatten(0, 1) for x in given[:5]] + [given[5].transpose(0, 1).flatten(1, 2).contiguous()]
    cu = [torch.arange(0, 4, device="cuda", dtype=torch.int32) * n for n in (200, 128)]
    lengths = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True)) | {"max_seqlen_q": 200, "max_seqlen_k": 128}
    want = fa.backward(*packed, kernel=kernel_of(headdim), **lengths)
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert torch.equal(x.flatten(0, 1), y), name


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_added(headdim):
    given = arrays(headdim)
    fresh = gradients(given)
    before = [torch.randn_like(x) for x in given[1:4]]
    named = {name: x.clone() for name, x in zip(("dq", "dk", "dv"), before, strict=True)}
    fa.backward(*given, kernel=kernel_of(headdim), accumulate=True, **named)
    for x, y, z in zip(named.values(), before, fresh, strict=False):
        assert (x.float() - y.float() - z.float()).abs().max() <= 2e-2 * x.float().abs().max()


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_call_with_large_scores_between(headdim):
    """The mark of large rows is taken back, and the next call finds the memory as it needs it."""
    given, large = arrays(headdim), arrays(headdim, spread=3e4)
    first = gradients(given)
    assert all(bool(torch.isfinite(x).all()) for x in gradients(large)[:3])
    again = gradients(given)
    assert all(torch.equal(x, y) for x, y in zip(first[:3], again[:3], strict=True))


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_a_group_in_parts(headdim):
    given = arrays(headdim, batch=1, rows=300, keys=100, heads=16, heads_k=1)
    got = gradients(given)
    want = fa.backward(*given, kernel="simple")
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=False):
        assert np.isfinite(x.float().norm().item())
        assert (x.float() - y.float()).norm() <= 1e-2 * y.float().norm(), name
