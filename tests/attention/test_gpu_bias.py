"""Plans with a bias of wgmma_sm90, forward and backward, on a Hopper GPU: which calls they take, and that these calls
are right on every axis that the bias shares, where it hides pairs, and where hidden keys and values hold NaN."""

import math

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, BackwardKernel, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

KERNEL, PAIR = "wgmma_sm90", "wgmma_pair_sm90"  # PAIR: gradients above head dim 128
AXES = {
    "all": (True, True, True),
    "shared by heads": (True, False, True),
    "shared by sequences": (False, True, True),
    "shared by both": (False, False, True),
    "shared by rows": (True, True, False),
    "of keys": (False, False, False),
}
OTHERS = {
    "alone": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 30)},
    "mask": {"mask": (True, False, False)},
    "mask and window": {"mask": (True, False, False), "window_size": (200, -1), "causal": True},
    "sinks": {"sinks": True},
    "scale below zero": {"softmax_scale": -0.1},
    "dropout": {"dropout_p": 0.2},
    "dropout, mask and causal": {"dropout_p": 0.5, "mask": (True, False, False), "causal": True},
}


def some(others, step):
    """Parameters: every so many of the pairs of a way to share the bias and of options beside it. Every option comes
    with several ways, and every way with several options."""
    pairs = [(axes, name) for i, axes in enumerate(AXES) for j, name in enumerate(others) if (i + j) % step == 0]
    return [pytest.param(AXES[axes], others[name], id=f"{axes}, {name}") for axes, name in pairs]


def served(*arrays, **options):
    plan = fa.query(*arrays, kernel=KERNEL, **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error
    return plan.variant


def forward(case, q, k, v, options):
    """out and lse, whose memory holds NaN before."""
    arrays = [torch.tensor(x, device="cuda", dtype=getattr(torch, case.dtype)) for x in (q, k, v)]
    options = {name: torch.tensor(x, device="cuda") if isinstance(x, np.ndarray) else x for name, x in options.items()}
    if case.bias is not None and not case.bias_float32:
        options["bias"] = options["bias"].to(arrays[0].dtype)
    if case.varlen:
        cu = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in (case.cu_seqlens_q, case.cu_seqlens_k)]
        arrays += [*cu, case.seqlen_q, case.seqlen_k]
    assert "_bias" in served(*arrays, **options)
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, device="cuda", dtype=arrays[0].dtype)
    call = fa.flash_attn_varlen_func if case.varlen else fa.flash_attn_func
    _, lse = call(*arrays, out=out, return_lse=True, kernel=KERNEL, **options)
    return out.float().cpu().numpy(), lse.cpu().numpy()


def check(case, got, exact, plain):
    for i, name in enumerate(("out", "lse")):
        accuracy.check(name, got[i], exact[i], plain[i], case.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("headdim", [40, 64, 96, 128])
def test_forward(headdim, axes, others, dtype):
    case = Case(333, 592, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, bias=axes, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)


@pytest.mark.parametrize(("headdim", "dtype"), [(160, "float16"), (192, "bfloat16"), (256, "bfloat16")])
@pytest.mark.parametrize(("axes", "others"), some(OTHERS, 3))
def test_forward_above_head_dim_128(headdim, axes, others, dtype):
    case = Case(333, 592, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, bias=axes, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("headdim", [40, 64, 96, 128])
def test_backward(headdim, axes, others, dtype):
    kernel = BackwardKernel(CUDA, KERNEL)
    for rows, keys, top_left in ((270, 336, False), (333, 136, True)):
        shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": dtype, "top_left": top_left}
        kernel.check(Case(rows, keys, headdim, bias=axes, **shape, **others))


WIDE = [(136, "float16"), (192, "bfloat16"), (200, "bfloat16"), (256, "float16")]


@pytest.mark.parametrize(("headdim", "dtype"), WIDE)
@pytest.mark.parametrize("bias_float32", [False, True], ids=["16 bits", "float32"])
@pytest.mark.parametrize(("axes", "others"), some(OTHERS, 2))
def test_backward_above_head_dim_128(headdim, dtype, bias_float32, axes, others):
    kernel = BackwardKernel(CUDA, PAIR)
    for rows, keys, top_left in ((270, 336, False), (333, 136, True)):
        shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": dtype, "top_left": top_left}
        kernel.check(Case(rows, keys, headdim, bias=axes, bias_float32=bias_float32, **shape, **others))


@pytest.mark.parametrize("bias_float32", [False, True], ids=["16 bits", "float32"])
@pytest.mark.parametrize(("headdim", "headdim_v"), [(192, 128), (192, 256), (256, 256), (64, 136)])
def test_backward_above_head_dim_128_of_every_kind(headdim, headdim_v, bias_float32):
    kernel = BackwardKernel(CUDA, PAIR)
    cu = {"cu_seqlens_q": (0, 5, 5, 300, 471), "cu_seqlens_k": (0, 7, 20, 20, 420)}
    for axes in AXES.values():
        shape = {"dtype": "bfloat16", "bias": axes, "bias_float32": bias_float32, "headdim_v": headdim_v}
        kernel.check(Case(295, 400, headdim, batch=4, nheads=4, nheads_k=2, **cu, **shape))
        kernel.check(Case(270, 336, headdim, batch=2, nheads=4, nheads_k=2, dlse=True, **shape), deterministic=True)
    shape["bias"] = (True, True, True)
    kernel.check(Case(513, 607, headdim, batch=2, nheads=4, nheads_k=2, mask=(True, False, True), **shape))  # copied
    kernel.check(Case(300, 331, headdim, nheads=16, nheads_k=1, mask=(False, True, False), **shape))  # a group in parts
    kernel.check(Case(63, 72, headdim, causal=True, **shape))
    kernel.check(Case(1000, 1032, headdim, nheads_k=2, spread=30.0, **shape))


BESIDE = {
    "softcap": {"softcap": 20.0},
    "ALiBi": {"alibi": 1},
    "ALiBi of sequences, causal": {"alibi": 2, "causal": True},
    "softcap, ALiBi, mask and window": {
        "softcap": 3.0,
        "alibi": 1,
        "mask": (True, False, False),
        "window_size": (200, 60),
    },
    "large scores": {"softcap": 60.0, "spread": 40.0},
}


@pytest.mark.parametrize(("headdim", "dtype"), [(40, "float16"), (64, "bfloat16"), (128, "float16"), (256, "bfloat16")])
@pytest.mark.parametrize(("axes", "others"), some(BESIDE, 2))
def test_softcap_and_alibi(headdim, axes, others, dtype):
    case = Case(333, 592, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, bias=axes, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)


@pytest.mark.parametrize(
    ("headdim", "dtype"),
    [(40, "float16"), (64, "bfloat16"), (96, "bfloat16"), (128, "float16"), (176, "bfloat16"), (256, "float16")],
)
@pytest.mark.parametrize(("axes", "others"), some(OTHERS, 3))
def test_float32(headdim, axes, others, dtype):
    """A bias of float32, in place."""
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": dtype, "bias": axes, "bias_float32": True}
    case = Case(333, 592, headdim, **shape, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)
    if headdim <= 128:
        BackwardKernel(CUDA, KERNEL).check(case)


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("headdim", [64, 128])
def test_packed_in_order_and_added(headdim, axes):
    cu = {"cu_seqlens_q": (0, 5, 5, 300, 471), "cu_seqlens_k": (0, 7, 20, 20, 420)}
    shape = {"nheads": 4, "nheads_k": 2, "dtype": "bfloat16", "bias": axes}
    case = Case(295, 400, headdim, batch=4, **cu, **shape)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)
    kernel = BackwardKernel(CUDA, KERNEL)
    kernel.check(case)
    kernel.check(Case(270, 336, headdim, batch=2, dlse=True, **shape), deterministic=True)


def hiding_bias(kind, rows, keys, low):
    """A bias (1, 1, rows, keys) that is `low` where it hides, and small numbers elsewhere."""
    i, j = np.arange(rows)[:, None], np.arange(keys)[None]
    hidden = {
        "causal": j > i + keys - rows,
        "padding": (j >= keys - 200) & (i >= 0),
        "holes": (j // 70 % 2 == 1) & (i >= 0),
        "random": np.random.default_rng(2).random((rows, keys)) < 0.3,
        "rows": (i % 3 == 0) & (j >= 0),
        "everything": (i >= 0) & (j >= 0),
    }[kind]
    bias = np.random.default_rng(3).standard_normal((rows, keys), dtype=np.float32)
    return np.where(hidden, low, accuracy.round_to(bias, "bfloat16"))[None, None].astype(np.float32)


@pytest.mark.parametrize("spread", [1, 30])
@pytest.mark.parametrize("low", ["-inf", "finfo.min"])
@pytest.mark.parametrize("kind", ["causal", "padding", "holes", "random", "rows", "everything"])
@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_bias_that_hides(headdim, kind, low, spread):
    """Keys hidden from all rows hold NaN in K and V if the bias is -inf there. finfo.min is a number: a row of nothing
    else is the mean of V."""
    from flash_attn_lab import reference

    rows, keys = 520, 1000
    value = -np.inf if low == "-inf" else float(torch.finfo(torch.bfloat16).min)
    case = Case(rows, keys, headdim, nheads=2, dtype="bfloat16", bias=(False, False, True), spread=spread)
    q, k, v, options = accuracy.inputs(case)
    options["bias"] = hiding_bias(kind, rows, keys, value)
    exact = reference.standard_attention(q, k, v, **options)
    plain = accuracy.plain_attention(q, k, v, dtype=case.dtype, **options)
    unseen = np.isneginf(options["bias"]).all((0, 1, 2))
    k, v = k.copy(), v.copy()
    k[:, unseen], v[:, unseen] = np.nan, np.nan
    got = forward(case, q, k, v, options)
    check(case, got, exact, plain)
    if low == "-inf" and kind == "everything":
        assert (got[0] == 0).all() and np.isneginf(got[1]).all()


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("headdim", [32, 64, 80, 128, 192, 256])
def test_gradients_beside_hidden_keys(headdim, causal, bad):
    """Keys that a bias of -inf hides from all rows of their heads, alone or together with the diagonal, may hold
    anything. Their gradients are zero."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, n, 2, headdim, device="cuda").to(torch.bfloat16) for n in (500, 704, 704))
    bias = torch.randn(1, 1, 500, 704, device="cuda").to(torch.bfloat16)
    bias[..., 100:170] = -math.inf
    bias[..., :350, 640:] = -math.inf  # with the diagonal: the later rows see these keys
    unseen = torch.zeros(704, dtype=torch.bool, device="cuda")
    unseen[100:170] = True
    dout = torch.randn_like(q)
    results = []
    for kernel, value in (("simple", 0.0), (KERNEL if headdim <= 128 else PAIR, float(bad))):
        x, y = (t.masked_fill(unseen[None, :, None, None], value) for t in (k, v))
        options = {"bias": bias, "causal": causal}
        forward_kernel = "minimal" if value == 0 else KERNEL
        out, lse = fa.flash_attn_func(q, x, y, return_lse=True, kernel=forward_kernel, **options)
        results.append((out, *fa.backward(dout, q, x, y, out, lse, kernel=kernel, **options)[:3]))
    for name, want, got in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        assert torch.isfinite(got).all(), name
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm(), name
    assert not results[1][2][:, unseen].any() and not results[1][3][:, unseen].any()


@pytest.mark.parametrize("headdim", [64, 128, 192, 256])
def test_large_rows(headdim):
    """Rows whose bias is finfo.min, or far from zero: P of the backward pass comes from the row's own maximum."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(1, 264, 2, headdim, device="cuda").to(torch.bfloat16) for _ in range(3))
    bias = torch.randn(1, 2, 264, 264, device="cuda").to(torch.bfloat16)
    bias[:, :, 3], bias[:, :, 7] = torch.finfo(torch.bfloat16).min, 1e5
    bias[:, 1, 70:90] = -3e4
    dout = torch.randn_like(q)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, bias=bias, kernel=KERNEL)
    out_of_rest, lse_of_rest = fa.flash_attn_func(q, k, v, return_lse=True, bias=bias, kernel="minimal")
    assert (out.float() - out_of_rest.float()).norm() <= 1e-2 * out_of_rest.float().norm()
    got = fa.backward(dout, q, k, v, out, lse, kernel=KERNEL if headdim <= 128 else PAIR, bias=bias)[:3]
    want = fa.backward(dout, q, k, v, out_of_rest, lse_of_rest, kernel="simple", bias=bias)[:3]
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert (x.float() - y.float()).norm() <= 1e-2 * y.float().norm(), name


@pytest.mark.parametrize("headdim", [64, 128])
def test_which_plan(headdim):
    """Strides that the copy engine does not take go to the general plans in short calls; softcap and ALiBi beside a
    bias of float32 in any call."""
    x = torch.zeros(2, 512, 2, headdim, device="cuda", dtype=torch.bfloat16)
    bias = torch.zeros(2, 2, 512, 512, device="cuda", dtype=torch.bfloat16)
    assert served(x, x, x, bias=bias).endswith("_bias")
    assert served(x, x, x, bias=bias[:1, :1, :1]).endswith("_bias")
    wide = torch.zeros(2, 2, 512, 516, device="cuda", dtype=torch.bfloat16)[..., :512]
    shifted = torch.zeros(2 * 2 * 512 * 512 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 2, 512, 512)
    assert served(x, x, x, bias=bias.float()).endswith("_bias_float32")
    assert served(x, x, x, bias=wide.float()).endswith("_bias_float32")
    assert served(x, x, x, bias=bias.float(), dropout_p=0.1, dropout_seed=1).endswith("_bias_float32_dropout")
    for other in (wide, shifted):
        assert served(x, x, x, bias=other).endswith("_bias")
        assert served(x[:, :16], x, x, bias=other[:, :, :16]).endswith("_general")
    slopes = torch.ones(2, device="cuda")
    for options in ({"softcap": 30.0}, {"alibi_slopes": slopes}):
        assert served(x, x, x, bias=bias, **options).endswith("_bias_options")
        assert served(x, x, x, bias=bias.float(), **options).endswith("_general")
    assert served(x, x, x, bias=bias, dropout_p=0.1, dropout_seed=1).endswith("_bias_dropout")


COPIES = {
    "odd rows": {},
    "causal": {"causal": True},
    "window": {"window_size": (500, 30)},
    "mask of keys": {"mask": (True, False, False)},
    "mask of pairs": {"mask": (True, False, True)},
    "mask of all pairs, causal": {"mask": (True, True, True), "causal": True},
    "sinks": {"sinks": True},
    "dropout and a mask of pairs": {"dropout_p": 0.2, "mask": (True, False, True)},
}


@pytest.mark.parametrize(("headdim", "dtype"), [(64, "float16"), (128, "bfloat16")])
@pytest.mark.parametrize(("axes", "others"), some(COPIES, 3))
def test_copies(headdim, axes, others, dtype):
    """A bias whose rows the copy engine cannot load, or beside a mask of pairs, is copied to the workspace first."""
    case = Case(513, 607, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, bias=axes, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)
    BackwardKernel(CUDA, KERNEL).check(case)


@pytest.mark.parametrize(("headdim", "dtype"), [(64, "bfloat16"), (128, "float16")])
@pytest.mark.parametrize("others", [{}, {"mask": (True, False, False)}, {"mask": (True, False, True)}])
def test_copies_of_float32(headdim, others, dtype):
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": dtype, "bias": (False, False, True), "bias_float32": True}
    case = Case(513, 607, headdim, **shape, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)
    BackwardKernel(CUDA, KERNEL).check(case)


@pytest.mark.parametrize("others", [{}, {"causal": True, "alibi": True}], ids=["alone", "causal and ALiBi"])
@pytest.mark.parametrize(("headdim", "bias_float32"), [(64, False), (96, True), (256, False)])
def test_copies_in_pieces(headdim, bias_float32, others):
    """A mask of sequences and a bias of heads whose sum is too large for one copy: every sequence is that of a call of
    its own, to the last bit."""
    batch, heads, rows, keys = 7, 8, 2000, 6000 if bias_float32 else 9000
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, dout = random(batch, rows, heads, headdim), random(batch, rows, heads, headdim)
    k, v = random(batch, keys, heads, headdim), random(batch, keys, heads, headdim)
    bias = random(1, heads, rows, keys)
    bias = bias.float() if bias_float32 else bias
    mask = torch.rand(batch, 1, rows, keys, device="cuda", generator=generator) < 0.9
    options = {"causal": "causal" in others}
    if "alibi" in others:
        options["alibi_slopes"] = torch.rand(batch, heads, device="cuda", generator=generator)
    if "alibi" in others and bias_float32:
        pytest.skip("served by the general plans")
    kernel = KERNEL if headdim <= 128 else PAIR
    plan = fa.query(q, k, v, bias=bias, mask=mask, kernel=KERNEL, **options)
    entry = heads * rows * keys * bias.element_size()
    assert "_bias" in plan.variant and entry < plan.workspace_bytes < batch * entry
    out = torch.full_like(q, math.nan)
    _, lse = fa.flash_attn_func(q, k, v, out=out, return_lse=True, bias=bias, mask=mask, kernel=KERNEL, **options)
    got = fa.backward(dout, q, k, v, out, lse, bias=bias, mask=mask, kernel=kernel, deterministic=True, **options)
    for b in range(batch):
        at = slice(b, b + 1)
        one = dict(options)
        if "alibi_slopes" in one:
            one["alibi_slopes"] = one["alibi_slopes"][at].contiguous()
        x = (q[at], k[at], v[at])
        single, single_lse = fa.flash_attn_func(*x, return_lse=True, bias=bias, mask=mask[at], kernel=KERNEL, **one)
        assert torch.equal(out[at], single) and torch.equal(lse[at], single_lse), b
        gradients = fa.backward(
            dout[at], *x, single, single_lse, bias=bias, mask=mask[at], kernel=kernel, deterministic=True, **one
        )
        for name, whole, alone in zip(("dq", "dk", "dv"), got, gradients, strict=False):
            assert torch.equal(whole[at], alone), (name, b)


MASKS = {
    "scale below zero": {"mask": (True, False, True), "softmax_scale": -0.1},
    "softcap, forward": {"mask": (True, True, True), "softcap": 20.0},
    "ALiBi and a window, forward": {"mask": (False, False, True), "alibi": 1, "window_size": (300, 50)},
    "packed": {
        "mask": (True, True, True),
        "cu_seqlens_q": (0, 500, 1013),
        "cu_seqlens_k": (0, 601, 1201),
    },
}


@pytest.mark.parametrize(("headdim", "dtype"), [(64, "float16"), (96, "bfloat16"), (128, "bfloat16")])
@pytest.mark.parametrize("others", MASKS.values(), ids=MASKS)
def test_copies_of_masks_alone(headdim, others, dtype):
    """A mask of pairs that the plans for masks do not take becomes a bias of zeros and -inf."""
    case = Case(513, 607, headdim, batch=2, nheads=4, nheads_k=2, dtype=dtype, **others)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)
    BackwardKernel(CUDA, KERNEL).check(case)


@pytest.mark.parametrize("headdim", [64, 128])
def test_gradients_beside_masks_of_heads(headdim):
    """Query heads that share keys and hide different ones: the mask is copied, a row for each head."""
    for nheads, nheads_k in ((4, 2), (16, 1)):
        case = Case(300, 333, headdim, nheads=nheads, nheads_k=nheads_k, dtype="bfloat16", mask=(False, True, False))
        BackwardKernel(CUDA, KERNEL).check(case)


@pytest.mark.parametrize("headdim", [64, 128])
def test_copies_of_packed_sequences(headdim):
    cu = {"cu_seqlens_q": (0, 500, 1013), "cu_seqlens_k": (0, 601, 1201)}
    case = Case(513, 603, headdim, batch=2, nheads=4, nheads_k=2, dtype="bfloat16", bias=(True, True, True), **cu)
    (q, k, v, options), exact, plain = accuracy.expected(case)
    check(case, forward(case, q, k, v, options), exact, plain)
    BackwardKernel(CUDA, KERNEL).check(case)


@pytest.mark.parametrize("headdim", [24, 64, 128])
def test_one_hidden_value_that_is_not_finite(headdim):
    """A key that the bias hides from all rows, and whose value holds the only NaN of its tile, at every place of a
    tile: whoever finds the NaN must also be the one who removes it."""
    heads, keys = 256, 256
    q, k, v = (torch.randn(1, n, heads, headdim, device="cuda", dtype=torch.bfloat16) for n in (2, keys, keys))
    bias = torch.zeros(1, heads, 1, keys, device="cuda", dtype=torch.bfloat16)
    place = torch.arange(heads, device="cuda")  # head h hides key h
    bias[0, place, 0, place] = -math.inf
    assert served(q, k, v, bias=bias).endswith("_bias")
    clean = fa.flash_attn_func(q, k, v, bias=bias, kernel=KERNEL)
    v[0, place, place, -1] = math.nan
    assert torch.equal(fa.flash_attn_func(q, k, v, bias=bias, kernel=KERNEL), clean)
