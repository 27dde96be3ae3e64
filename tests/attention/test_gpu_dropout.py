"""Plans with dropout of wgmma_sm90, forward and backward, on a Hopper GPU: which calls they take, and that they drop
the same elements as the definition in float64, with other options, over several tiles, in packed sequences."""

import math

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

KERNEL = "wgmma_sm90"
OTHERS = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "padding": {"mask": (True, False, False)},
    "alibi and causal": {"alibi": 1, "causal": True},
    "padding and alibi": {"mask": (True, False, False), "alibi": 2},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 30.0},  # the backward pass takes the general plans
}
RATES = [0.1, 0.5, 1e-5, 0.96875, 0.99999]


def forward(case, q, k, v, options):
    """out and lse, whose memory holds NaN before."""
    arrays = [torch.tensor(x, device="cuda", dtype=getattr(torch, case.dtype)) for x in (q, k, v)]
    options = {name: torch.tensor(x, device="cuda") if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if case.varlen:
        cu = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in (case.cu_seqlens_q, case.cu_seqlens_k)]
        arrays += [*cu, case.seqlen_q, case.seqlen_k]
    plan = fa.query(*arrays, kernel=KERNEL, **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    assert plan.variant.endswith("_dropout" if case.dropout_p <= 0.96875 else "_general"), plan
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, device="cuda", dtype=arrays[0].dtype)
    call = fa.flash_attn_varlen_func if case.varlen else fa.flash_attn_func
    _, lse = call(*arrays, out=out, return_lse=True, kernel=KERNEL, **options)
    return out.float().cpu().numpy(), lse.cpu().numpy()


def check_both(case, **call):
    (q, k, v, options), exact, plain = accuracy.expected(case)
    got = forward(case, q, k, v, options)
    for i, name in enumerate(("out", "lse")):
        accuracy.check(name, got[i], exact[i], plain[i], case.dtype)
    BackwardKernel(CUDA, KERNEL).check(case, **call)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("headdim", [40, 64, 96, 128])
def test_with_other_options(headdim, others, dtype):
    for rows, keys in ((333, 590), (270, 130)):
        check_both(Case(rows, keys, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, dropout_p=0.2, **others))


@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("headdim", [64, 128])
def test_rates(headdim, rate, spread):
    """Rates that drop almost nothing and almost everything; large scores, whose tiles are computed again."""
    check_both(Case(400, 700, headdim, nheads=2, dtype="bfloat16", dropout_p=rate, spread=spread))


MASKS = {
    "of pairs": {"mask": (False, False, True)},
    "of all pairs, causal": {"mask": (True, True, True), "causal": True},
    "of pairs, window and sinks": {"mask": (True, False, True), "window_size": (300, 40), "sinks": True},
    "of pairs of heads, rows that see no key": {"mask": (False, True, True), "mask_rate": 0.003},
    "of pairs, scale below zero": {"mask": (False, False, True), "softmax_scale": -0.1},
}


@pytest.mark.parametrize(("headdim", "dtype"), [(40, "float16"), (64, "bfloat16"), (96, "bfloat16"), (128, "float16")])
@pytest.mark.parametrize("others", MASKS.values(), ids=MASKS)
def test_beside_masks_of_pairs(headdim, others, dtype):
    """A mask of pairs becomes a bias of zeros and -inf for the plans with bias and dropout."""
    for rows, keys in ((270, 331), (333, 590), (129, 255)):
        check_both(Case(rows, keys, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, dropout_p=0.2, **others))


@pytest.mark.parametrize("headdim", [160, 256])
def test_beside_masks_of_pairs_above_head_dim_128(headdim):
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": "bfloat16", "mask": (True, False, True)}
    case = Case(270, 331, headdim, dropout_p=0.2, **shape)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    got = forward(case, q, k, v, options)
    for i, name in enumerate(("out", "lse")):
        accuracy.check(name, got[i], exact[i], plain[i], case.dtype)


@pytest.mark.parametrize("mask", [(True, False, True), (True, True, False)])
@pytest.mark.parametrize("headdim", [64, 128])
def test_beside_masks_in_packed_sequences_in_order_and_of_few_heads(headdim, mask):
    cu = {"cu_seqlens_q": (0, 5, 5, 300, 471), "cu_seqlens_k": (0, 7, 20, 20, 419)}
    shape = {"dtype": "bfloat16", "mask": mask, "dropout_p": 0.3}
    kernel = BackwardKernel(CUDA, KERNEL)
    kernel.check(Case(295, 399, headdim, batch=4, nheads=8, nheads_k=2, **cu, **shape))
    kernel.check(Case(270, 333, headdim, batch=2, nheads=4, nheads_k=2, dlse=True, **shape), deterministic=True)
    kernel.check(Case(270, 333, headdim, nheads=16, nheads_k=1, **shape))  # a group in parts


@pytest.mark.parametrize("headdim", [64, 128])
def test_packed_in_order_and_added(headdim):
    cu = {"cu_seqlens_q": (0, 5, 5, 300, 471), "cu_seqlens_k": (0, 7, 20, 20, 419)}
    shape = {"nheads": 4, "nheads_k": 2, "dtype": "bfloat16", "dropout_p": 0.3}
    check_both(Case(295, 399, headdim, **cu, **shape))
    check_both(Case(270, 333, headdim, batch=2, dlse=True, **shape), deterministic=True)


@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_the_same_bits_as_other_kernels(headdim):
    """One block of V after another is the identity: out shows which pairs are dropped."""
    keys = 200
    q, k = (torch.randn(2, n, 3, headdim, device="cuda").to(torch.float16) for n in (1000, keys))
    options = {"dropout_p": 0.4, "dropout_seed": 2**63 + 5, "dropout_offset": 77}
    for first in range(0, keys, headdim):
        v = torch.zeros(2, keys, 3, headdim, device="cuda", dtype=torch.float16)
        own = min(headdim, keys - first)
        v[:, range(first, first + own), :, range(own)] = 1
        ours = fa.flash_attn_func(q, k, v, kernel=KERNEL, **options)[..., :own] != 0
        column = np.arange(first, first + own)[None]
        for b, head in ((0, 0), (1, 2)):
            bits = reference.dropout_bits(2**63 + 5, 77, b, head, np.arange(1000)[:, None], column)
            assert (ours[b, :, head].cpu().numpy() == (bits >= reference.dropout_threshold(0.4))).all(), (b, head)
        for kernel in ("naive", "mma_sm80", *["minimal"] * (headdim <= 128)):
            assert (ours == (fa.flash_attn_func(q, k, v, kernel=kernel, **options)[..., :own] != 0)).all(), kernel


@pytest.mark.parametrize("headdim", [64, 128])
def test_in_order_gives_the_same_bits(headdim):
    torch.manual_seed(6)
    q, k, v, dout = (torch.randn(2, 700, 4, headdim, device="cuda").to(torch.bfloat16) for _ in range(4))
    options = {"dropout_p": 0.1, "dropout_seed": 3}
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    first = fa.backward(dout, q, k, v, out, lse, kernel=KERNEL, deterministic=True, **options)
    for _ in range(3):
        again = fa.backward(dout, q, k, v, out, lse, kernel=KERNEL, deterministic=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
