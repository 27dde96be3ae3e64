"""mma_short_sm80: how it divides calls, and that no answer depends on the division."""

import itertools

import numpy as np
import pytest
from conftest import CUDA, NO_CUDA

import flash_attn_minimal as fa
from flash_attn_lab import reference

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]
NAME = "mma_short_sm80"
torch = pytest.importorskip("torch")


def arrays(batch, seqlen_q, seqlen_k, heads, headdim, seed=0, **options):
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((seqlen_q, heads[0]), (seqlen_k, heads[1]), (seqlen_k, heads[1]), (seqlen_q, heads[0]))
    q, k, v, dout = (
        torch.randn(batch, n, h, headdim, device="cuda", generator=generator).to(torch.bfloat16) for n, h in shapes
    )
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    return dout, q, k, v, out, lse


def exact(dout, q, k, v, **options):
    got = reference.standard_attention_backward(*(x.double().cpu().numpy() for x in (dout, q, k, v)), **options)
    return got.dq, got.dk, got.dv


# Batch and heads decide whether owners are single blocks or clusters, and whether blocks of keys write dq.
@pytest.mark.parametrize("batch, heads", [(1, (1, 1)), (1, (7, 1)), (2, (16, 2)), (40, (8, 8)), (70, (6, 3))])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (64, 64), (65, 63), (40, 130), (300, 60), (0, 70), (70, 0)])
@pytest.mark.parametrize("headdim", [40, 128, 256])
def test_divisions(batch, heads, seqlen_q, seqlen_k, headdim):
    if not (seqlen_q and seqlen_k):
        q, k = (
            torch.ones(batch, n, h, headdim, device="cuda").bfloat16()
            for n, h in zip((seqlen_q, seqlen_k), heads, strict=True)
        )
        lse = torch.full((batch, heads[0], seqlen_q), -np.inf, device="cuda")
        nans = [torch.full_like(x, np.nan) for x in (q, k, k)]
        got = fa.backward(q, q, k, k, torch.zeros_like(q), lse, dq=nans[0], dk=nans[1], dv=nans[2], kernel=NAME)
        assert all(bool((x == 0).all()) for x in got)
        return
    options = {"causal": True} if seqlen_q == seqlen_k else {}
    given = arrays(batch, seqlen_q, seqlen_k, heads, headdim, **options)
    got = fa.backward(*given, kernel=NAME, **options)
    for x, y in zip(got, exact(*given[:4], **options), strict=True):
        assert np.abs(x.double().cpu().numpy() - y).max() <= 2e-2 * max(1, np.abs(y).max())


def test_calls_of_different_sizes_in_turn():
    """Shared memory that a call leaves does not reach the next one, whatever its clusters are."""
    sizes = [(1, 300, 300, (4, 4), 64), (64, 50, 50, (8, 8), 64), (1, 17, 500, (2, 1), 128), (3, 64, 64, (16, 2), 256)]
    made = [arrays(*size, seed) for seed, size in enumerate(sizes)]
    first = [fa.backward(*given, kernel=NAME) for given in made]
    for one, other in itertools.product(range(len(made)), repeat=2):
        fa.backward(*made[one], kernel=NAME)
        again = fa.backward(*made[other], kernel=NAME)
        assert all(torch.equal(x, y) for x, y in zip(again, first[other], strict=True))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "dropout_seed": 5}, {"softcap": 5.0}], ids=str)
def test_accumulate_and_dlse(options):
    given = arrays(2, 100, 190, (6, 2), 96, **options)
    dlse = torch.randn(given[5].shape, device="cuda")
    old = [torch.randn_like(x) for x in given[1:4]]
    got = fa.backward(*given, dlse=dlse, kernel=NAME, **options)
    other = fa.backward(*given, dlse=dlse, kernel="simple", **options)
    named = dict(zip(("dq", "dk", "dv"), (x.clone() for x in old), strict=True))
    fa.backward(*given, dlse=dlse, kernel=NAME, accumulate=True, **named, **options)
    for x, y, z, w in zip(got, other, named.values(), old, strict=True):
        assert (x.float() - y.float()).abs().max() <= 2e-2 * y.float().abs().max()
        assert (z.float() - (w.float() + x.float())).abs().max() <= 2e-2 * z.float().abs().max()


def test_what_short_calls_run_on():
    def kernel(batch, seqlen, heads, headdim, **options):
        x = torch.empty(batch, seqlen, heads, headdim, dtype=torch.bfloat16, device="cuda")
        return fa.backward_query(x, x, x, **options).kernel

    if torch.cuda.get_device_capability() != (9, 0) or torch.cuda.get_device_properties(0).multi_processor_count < 100:
        pytest.skip("the choice was measured on an H200")
    assert kernel(2, 64, 8, 64) == kernel(1, 256, 4, 128) == kernel(1, 64, 4, 256, causal=True) == NAME
    assert kernel(64, 512, 16, 64) == kernel(2, 4096, 8, 128) == "wgmma_sm90"
    assert kernel(8, 512, 8, 256) == "wgmma_pair_sm90"
