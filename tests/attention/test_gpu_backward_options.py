"""Options that Hopper's backward pass serves in the code of its bare plans: windows, masks of keys, ALiBi, softcap and
dropout. Alone and together, over several tiles of rows and keys. Needs a GPU."""

import itertools
import re

import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

HEAD_DIMS = [64, 128, 192, 256]
OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "open window": {"window_size": (70, -1)},
    "mask": {"mask": (True, False, False), "mask_rate": 0.8},
    "few keys": {"mask": (True, False, False), "mask_rate": 0.02},
    "alibi": {"alibi": 1},
    "alibi of batches": {"alibi": 2},
    "softcap": {"softcap": 30.0},
    "small softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
}
PAIRS = [
    pair
    for pair in itertools.combinations(OPTIONS, 2)
    if len({name.split()[-1] for name in pair}) == 2 and not {"mask", "few keys"} == set(pair)
]


def kernel_of(headdim):
    return "wgmma_sm90" if headdim <= 128 else "wgmma_pair_sm90"


def served(*arrays, **options):
    plan = fa.backward_query(*arrays, kernel=kernel_of(arrays[0].shape[-1]), **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error


def inputs(rows, keys, headdim, heads=(4, 2), batch=2, dtype="bfloat16"):
    torch.manual_seed(rows + keys)
    shapes = ((batch, rows, heads[0], headdim), *[(batch, keys, heads[1], headdim)] * 2)
    return [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for shape in shapes]


def gradients(q, k, v, kernel=None, **options):
    """dq, dk, dv, which start as NaN, for a dout that depends on q's shape alone."""
    served(q, k, v, **options)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    torch.manual_seed(1)
    dout = torch.randn(out.shape, device="cuda").to(out.dtype)
    results = {name: torch.full_like(x, float("nan")) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    return fa.backward(dout, q, k, v, out, lse, kernel=kernel or kernel_of(q.shape[-1]), **results, **options)


def close(got, want, tolerance=1e-2):
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert torch.isfinite(x).all(), name
        difference, size = (x.float() - y.float()).norm(), y.float().norm()
        assert difference <= tolerance * size, f"{name}: {difference / size:.2e}"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("headdim", [40, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("options", [*((name,) for name in OPTIONS), *PAIRS], ids="+".join)
def test_options_and_pairs(options, headdim, dtype):
    together = {name: value for option in options for name, value in OPTIONS[option].items()}
    kernel = BackwardKernel(CUDA, kernel_of(headdim))
    for rows, keys, top_left in ((270, 333, False), (333, 130, True)):
        shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": dtype, "top_left": top_left}
        kernel.check(Case(rows, keys, headdim, **shape, **together))


@pytest.mark.parametrize(("headdim", "headdim_v"), [(192, 128), (136, 64), (192, 144), (64, 192), (256, 8)])
@pytest.mark.parametrize("option", OPTIONS)
def test_own_head_dim_of_values(option, headdim, headdim_v):
    case = Case(
        270, 333, headdim, headdim_v=headdim_v, batch=2, nheads=4, nheads_k=2, dtype="bfloat16", **OPTIONS[option]
    )
    BackwardKernel(CUDA, "wgmma_pair_sm90").check(case)


@pytest.mark.parametrize("headdim", HEAD_DIMS)
@pytest.mark.parametrize("option", OPTIONS)
def test_packed_in_order_and_added(option, headdim):
    """Packed sequences, fixed order, gradients of lse, and sums with what is there."""
    kernel, rest = BackwardKernel(CUDA, kernel_of(headdim)), OPTIONS[option]
    cu = {"cu_seqlens_q": (0, 5, 5, 300, 471), "cu_seqlens_k": (0, 7, 20, 20, 419)}
    shape = {"nheads": 4, "nheads_k": 2, "dtype": "bfloat16"}
    packed = {name: value for name, value in rest.items() if name != "mask"}
    kernel.check(Case(295, 399, headdim, **cu, **shape, **packed))
    kernel.check(Case(270, 333, headdim, batch=2, dlse=True, **shape, **rest), deterministic=True)


@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [32, 64, 80, 128, 144, 192, 256])
@pytest.mark.parametrize("kind", ["all", "last quarter", "first half", "one block", "random", "none", "of heads"])
def test_masks_of_keys(kind, headdim, causal, deterministic):
    """Hidden keys and values are NaN or infinite; they have zero gradients, and the rest is the result of `simple` with
    zeros in their place."""
    q, k, v = inputs(500, 700, headdim, heads=(2, 2) if kind == "of heads" else (4, 2))
    mask = torch.ones(2, 2 if kind == "of heads" else 1, 1, 700, dtype=torch.bool, device="cuda")
    if kind == "last quarter":
        mask[..., 525:] = False
    elif kind == "first half":
        mask[0, ..., :350] = False
    elif kind == "one block":
        mask[..., 128:256] = False
    elif kind in ("random", "of heads"):
        mask = torch.rand(mask.shape, device="cuda") < 0.8
    elif kind == "none":
        mask[1] = False
    hidden = ~mask[:, :, 0].transpose(1, 2).expand(2, 700, 2)[..., None]
    options = {"mask": mask, "causal": causal, "deterministic": deterministic}
    want = gradients(q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0), kernel="simple", **options)
    for bad in (float("nan"), float("inf")):
        got = gradients(q, k.masked_fill(hidden, bad), v.masked_fill(hidden, bad), **options)
        close(got, want)
        assert not (got[1].masked_select(hidden).any() or got[2].masked_select(hidden).any())


@pytest.mark.parametrize("headdim", HEAD_DIMS)
@pytest.mark.parametrize("option", ["window", "mask", "alibi", "softcap"])
def test_in_order_gives_the_same_bits(option, headdim):
    q, k, v = inputs(700, 900, headdim)
    options = {
        "window": {"window_size": (300, 0)},
        "mask": {"mask": torch.rand(2, 1, 1, 900, device="cuda") < 0.5},
        "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1, -0.01, 0.0], device="cuda")},
        "softcap": {"softcap": 50.0},
    }[option]
    first = gradients(q, k, v, deterministic=True, **options)
    close(first, gradients(q, k, v, kernel="simple", **options))
    for _ in range(10):
        assert all(
            torch.equal(x, y) for x, y in zip(gradients(q, k, v, deterministic=True, **options), first, strict=True)
        )


@pytest.mark.parametrize("what", ["mask", "mask and window", "alibi", "alibi and mask", "alibi below zero"])
@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_probabilities_of_large_rows_sum_to_one(headdim, what):
    """lse is so large that it cannot hold log(sum): large products beside hidden larger ones, and distant keys under
    ALiBi."""
    q, k, v = inputs(300, 200, headdim, heads=(2, 2), batch=1)
    options = {}
    if "alibi" in what:
        slopes = torch.tensor([300.0, 5000.0], device="cuda")
        options |= {"alibi_slopes": -slopes if "below" in what else slopes, "top_left": True}
        q = q * 0.01
    else:
        q, k = (q * 1e4).abs(), (k.float() * 1e-3 + 1).bfloat16()
    if "mask" in what:
        options["mask"] = torch.rand(1, 1, 1, 200, device="cuda") < 0.7
        k = k.masked_fill(~options["mask"][:, 0, 0, :, None, None], 3.0)
    if "window" in what:
        options["window_size"] = (60, 60)
    served(q, k, v, **options)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
    dout = torch.randn_like(q)
    dv = fa.backward(dout, q, k, v, out, lse, kernel=kernel_of(headdim), **options)[2]
    want = (dout.double() * lse.isfinite().transpose(1, 2)[..., None]).sum(1)
    error = (dv.double().sum(1) - want).abs().max() / want.abs().max()
    assert error <= 3e-2, f"sum of P is off by {error:.3g} at |lse| to {lse[lse.isfinite()].abs().max():.3g}"


@pytest.mark.parametrize("headdim", HEAD_DIMS)
def test_the_plan_shows_in_the_kernels_name(headdim):
    """Plans with options serve these calls, and the bare plan no others: a profile shows the plan's number."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = inputs(256, 256, headdim, heads=(2, 2), batch=1)
    keys = torch.ones(1, 1, 1, 256, dtype=torch.bool, device="cuda")

    def plan(**options):
        gradients(q, k, v, **options)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            gradients(q, k, v, **options)
            torch.cuda.synchronize()
        names = {event.name for event in trace.events() if re.search("backward_wgmma(_pair)?_kernel", event.name)}
        if not names:
            pytest.skip("the profiler saw no kernel")
        (name,) = names
        return name

    bare, general = plan(), plan(mask=keys.expand(1, 1, 256, 256).contiguous())
    options = plan(window_size=(100, 0))
    assert len({bare, general, options, plan(softcap=50.0)}) == 4
    assert plan(causal=True) == bare
    assert plan(mask=keys) == plan(alibi_slopes=torch.ones(2, device="cuda")) == options
