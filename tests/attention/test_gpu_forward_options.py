"""Plans with options of wgmma_sm90, on a Hopper GPU: a left edge, ALiBi, softcap, masks of keys, alone and together.
Which calls they take, and that these calls are right where tiles are cut, hidden, or hold NaN."""

import math

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]
HEADDIMS = [64, 96, 128, 192, 256]


def plan_of(*arrays, **options):
    plan = fa.query(*arrays, kernel="wgmma_sm90", **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error
    return plan.variant


def on_gpu(dtype, *arrays):
    return [torch.tensor(x, device="cuda", dtype=getattr(torch, dtype)) for x in arrays]


def options_on_gpu(options):
    return {name: torch.tensor(x, device="cuda") if isinstance(x, np.ndarray) else x for name, x in options.items()}


def run(case, q, k, v, options):
    """out and lse of wgmma_sm90, whose outputs hold NaN before."""
    arrays = on_gpu(case.dtype, q, k, v)
    options = options_on_gpu(options)
    if case.varlen:
        cu = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in (case.cu_seqlens_q, case.cu_seqlens_k)]
        arrays += [*cu, case.seqlen_q, case.seqlen_k]
    assert plan_of(*arrays, **options).endswith("_options")
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, device="cuda", dtype=arrays[0].dtype)
    call = fa.flash_attn_varlen_func if case.varlen else fa.flash_attn_func
    _, lse = call(*arrays, out=out, return_lse=True, kernel="wgmma_sm90", **options)
    return out.float().cpu().numpy(), lse.cpu().numpy()


def check(case, spoil=None):
    """`spoil`: called with k, v and the mask, before the kernel sees them."""
    (q, k, v, options), exact, plain = accuracy.expected(case)
    if spoil:
        k, v = k.copy(), v.copy()
        spoil(k, v, options["mask"])
    out, lse = run(case, q, k, v, options)
    accuracy.check("out", out, exact[0], plain[0], case.dtype)
    accuracy.check("lse", lse, exact[1], plain[1], case.dtype)


def nan_where_hidden(k, v, mask):
    """NaN in the keys and values that the mask hides from all heads."""
    for b in range(len(k)):
        hidden = ~np.broadcast_to(mask, (len(k), *mask.shape[1:]))[b, :, 0].any(0)
        k[b, hidden], v[b, hidden] = np.nan, np.nan


OPTIONS = {
    "window": {"window_size": (70, 30)},
    "window that cuts nothing": {"window_size": (600, -1)},
    "short window": {"window_size": (5, 0), "causal": True},
    "alibi": {"alibi": 1},
    "alibi of a batch": {"alibi": 2, "causal": True},
    "softcap": {"softcap": 30.0},
    "large softcap": {"softcap": 100.0, "causal": True},
    "small softcap": {"softcap": 0.5, "causal": True},
    "mask": {"mask": (True, False, False)},
    "mask of heads": {"mask": (True, True, False), "causal": True},
    "mask and alibi": {"mask": (True, False, False), "alibi": 1},
    "mask and window": {"mask": (False, False, False), "window_size": (100, 7)},
    "softcap and window": {"softcap": 20.0, "window_size": (64, -1), "causal": True},
    "all": {"mask": (True, False, False), "alibi": 2, "softcap": 5.0, "window_size": (200, -1), "causal": True},
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("headdim", HEADDIMS)
def test_options(headdim, options, dtype):
    spoil = nan_where_hidden if "mask" in options else None
    check(Case(333, 590, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, sinks=headdim == 96, **options), spoil)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("headdim", [40, 64, 128])
def test_packed_sequences(headdim, options):
    lengths_q, lengths_k = (0, 1, 200, 200, 537), (0, 130, 130, 330, 790)  # the second has no keys, the third no rows
    check(Case(337, 460, headdim, batch=4, nheads=2, nheads_k=1, dtype="bfloat16", cu_seqlens_q=lengths_q,
               cu_seqlens_k=lengths_k, **options))  # fmt: skip


@pytest.mark.parametrize("spread", [1, 30], ids=["small", "large"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("seen", ["all", "front", "end", "sides", "middle", "holes", "one", "none"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_hidden_tiles(headdim, seen, causal, spread):
    """Whole tiles are hidden in front, in the middle, at the end; all of them hold NaN. Large scores overflow under the
    maximum of the first tile, so that tiles are computed again."""
    keys = np.arange(1500)
    masks = {
        "all": keys >= 0,
        "front": keys < 777,
        "end": keys >= 650,
        "sides": (keys < 130) | (keys >= 1390),
        "middle": (keys >= 390) & (keys < 800),
        "holes": keys // 140 % 2 == 1,
        "one": keys == 702,
        "none": keys < 0,
    }
    case = Case(700, 1500, headdim, dtype="float16", causal=causal, mask=(False, False, False), spread=spread)
    (q, k, v, options), _, _ = accuracy.expected(case)
    options = {**options, "mask": masks[seen][None, None, None]}
    exact = fa_reference(q, k, v, options)
    plain = accuracy.plain_attention(q, k, v, dtype=case.dtype, **options)
    k, v = k.copy(), v.copy()
    nan_where_hidden(k, v, options["mask"])
    out, lse = run(case, q, k, v, options)
    accuracy.check("out", out, exact[0], plain[0], case.dtype)
    accuracy.check("lse", lse, exact[1], plain[1], case.dtype)
    if seen == "none":
        assert (out == 0).all() and (lse == -np.inf).all()


def fa_reference(q, k, v, options):
    from flash_attn_lab import reference

    return reference.standard_attention(q, k, v, **options)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("slopes", [(0.5, 0.004), (-0.05, -0.002), (20.0, 0.0)], ids=str)
@pytest.mark.parametrize("shape", [(700, 1500), (1500, 700), (1, 999)], ids=str)
@pytest.mark.parametrize("headdim", [64, 128])
def test_slopes(headdim, shape, slopes, causal):
    """Both sides of the diagonal, and a diagonal that starts before or after the keys; steep, falling and no slopes."""
    case = Case(*shape, headdim, dtype="bfloat16", causal=causal, alibi=1)
    (q, k, v, options), _, _ = accuracy.expected(case)
    options = {**options, "alibi_slopes": np.float32(slopes)}
    exact = fa_reference(q, k, v, options)
    plain = accuracy.plain_attention(q, k, v, dtype=case.dtype, **options)
    out, lse = run(case, q, k, v, options)
    accuracy.check("out", out, exact[0], plain[0], case.dtype)
    accuracy.check("lse", lse, exact[1], plain[1], case.dtype)


@pytest.mark.parametrize("keys", [1, 20, 2600], ids=str)
@pytest.mark.parametrize("softcap", [5.0, 30.0, 50.0, 100.0])
@pytest.mark.parametrize("spread", [1, 6, 40])
@pytest.mark.parametrize("headdim", [64, 128])
def test_lse_under_softcap(headdim, spread, softcap, keys):
    """Small scores, scores on both sides of the polynomial's end, and scores at the cap. The lse of a row with one key
    is its score."""
    check(Case(300, keys, headdim, dtype="float16", softcap=softcap, spread=spread))


@pytest.mark.parametrize("headdim", HEADDIMS)
def test_which_plan(headdim):
    """A bare call keeps its plan; what the plans with options do not serve goes to the general ones."""
    x = torch.zeros(1, 4096, 2, headdim, device="cuda", dtype=torch.bfloat16)
    keys = torch.ones(1, 1, 1, 4096, device="cuda", dtype=torch.bool)
    pairs = torch.ones(1, 1, 4096, 4096, device="cuda", dtype=torch.bool)
    slopes = torch.ones(2, device="cuda")
    for options in ({}, {"causal": True}, {"sinks": slopes}):
        assert not plan_of(x, x, x, **options).endswith(("_options", "_general"))
    for options in ({"window_size": (9, 0)}, {"alibi_slopes": slopes}, {"mask": keys}, {"softcap": 9.0}):
        assert plan_of(x, x, x, **options).endswith("_options")
        assert plan_of(x, x, x, **options, return_max_score=True).endswith("_general")
        assert plan_of(x, x, x, **options, dropout_p=0.1, dropout_seed=1).endswith("_dropout")
    assert plan_of(x, x, x, mask=pairs).endswith("_blocks")
    assert plan_of(x, x, x, bias=torch.zeros(1, 1, 1, 4096, device="cuda")).endswith("_bias_float32")
    assert plan_of(x, x, x, softmax_scale=-1.0).endswith("_general")
