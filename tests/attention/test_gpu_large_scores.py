"""Scores far from zero on a GPU: rows with a bias of the lowest finite number, and gradients where lse is large."""

import pytest
from conftest import CUDA, NO_CUDA, torch

import flash_attn_minimal as fa

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]

FORWARD = ["naive", "minimal", "mma_sm80", "mma_tf32_sm80", "wgmma_sm90"]
# kernel, head dim
BACKWARD = [
    ("simple", 64),
    ("mma_short_sm80", 64),
    ("mma_short_sm80", 128),
    ("mma_short_sm80", 256),
    ("mma_sm80", 64),
    ("mma_sm80", 128),
    ("mma_sm80", 256),
    ("mma_wide_sm80", 264),
    ("wgmma_sm90", 64),
    ("wgmma_sm90", 128),
    ("wgmma_pair_sm90", 192),
    ("wgmma_pair_sm90", 256),
]
ROWS, KEYS = 130, 200


def served(plan):
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error


def inputs(headdim, dtype, size=1.0):
    torch.manual_seed(headdim)
    shapes = (ROWS, KEYS, KEYS, ROWS)
    q, k, v, dout = (torch.randn(1, rows, 2, headdim, device="cuda").to(dtype) for rows in shapes)
    return q * size, k, v, dout


def close(got, want, tolerance, what):
    size = want.double().abs().max()
    error = (got.double() - want.double()).abs().max() / size
    assert error <= tolerance, f"{what}: {error:.2e} of {size:.2e}"


def probabilities(scores):
    """The softmax of float32 scores in float64. A row that sees nothing is zero."""
    return torch.nan_to_num(torch.softmax(scores.double(), -1))


@pytest.mark.parametrize("bias_dtype", ["float32", "own"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("kernel", FORWARD)
def test_a_row_of_the_lowest_bias_is_a_mean(kernel, dtype, bias_dtype):
    """A row whose bias is the lowest finite number used to give 0 with lse -inf, because its scores times log2 e were
    -inf."""
    dtype = getattr(torch, dtype)
    q, k, v, _ = inputs(64, dtype)
    bias_dtype = torch.float32 if bias_dtype == "float32" else dtype
    low = torch.finfo(bias_dtype).min
    bias = torch.zeros(1, 1, ROWS, KEYS, device="cuda", dtype=bias_dtype)
    bias[..., 150:] = low  # hidden as far as a row has other keys
    bias[:, :, 2] = low
    bias[:, :, 3] = -torch.inf
    bias[:, :, 4, :7], bias[:, :, 4, 7:] = -torch.inf, low
    options = {"bias": bias, "kernel": kernel, "allow_tf32": kernel == "mma_tf32_sm80"}
    served(fa.query(q, k, v, **options))
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)

    product = torch.einsum("bihd,bjhd->bhij", q.float(), k.float()) * 64**-0.5
    scores = product + bias.float()
    want = torch.einsum("bhij,bjhd->bihd", probabilities(scores), v.double())
    close(out, want, 2e-2 if dtype != torch.float32 or kernel == "mma_tf32_sm80" else 1e-4, "out")
    assert (lse[:, :, 3] == -torch.inf).all()
    rows = [i for i in range(ROWS) if i != 3]
    assert torch.isfinite(lse[:, :, rows]).all()
    want_lse = torch.logsumexp(scores.double(), -1)
    for i in (2, 4):
        error = ((lse[:, :, i] - want_lse[:, :, i]) / want_lse[:, :, i]).abs().max()
        assert error <= (1e-5 if low < -1e6 else 1e-3), (
            f"lse of row {i}: {lse[0, 0, i]:.6g}, want {want_lse[0, 0, i]:.6g}"
        )


@pytest.mark.parametrize("center", [-1e5, -1e6, -1e7, -1e9, -1e30, "lowest", 1e6, 1e9])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("kernel", "headdim"), BACKWARD)
def test_probabilities_of_a_large_row_sum_to_one(kernel, headdim, dtype, center):
    """P of the backward pass did not sum to 1 with a bias of 1e5 or more, because lse cannot hold log(sum) there."""
    dtype = getattr(torch, dtype)
    q, k, v, dout = inputs(headdim, dtype)
    center = torch.finfo(torch.float32).min if center == "lowest" else center
    bias = torch.full((1, 1, ROWS, KEYS), center, device="cuda")
    bias[:, :, ::3] = 0  # ordinary rows beside them
    options = {"bias": bias, "kernel": kernel}
    served(fa.backward_query(q, k, v, **options))
    out, lse = fa.flash_attn_func(q, k, v, bias=bias, return_lse=True)
    dq, dk, dv = fa.backward(dout, q, k, v, out, lse, **options)[:3]
    assert all(torch.isfinite(x).all() for x in (dq, dk, dv))
    # sum_j dv_j = sum_i dout_i sum_j P_ij
    close(dv.double().sum(1), dout.double().sum(1), 2e-2, "sum of dv")
    if abs(center) >= 1e9:  # the steps of float32 are wider than the products: all keys of such a row count the same
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * headdim**-0.5
        scores[:, :, [i for i in range(ROWS) if i % 3]] = center
        P = probabilities(scores)
        dP = torch.einsum("bihd,bjhd->bhij", dout.double(), v.double())
        dS = P * (dP - (P * dP).sum(-1, keepdim=True)) * headdim**-0.5
        close(dv, torch.einsum("bhij,bihd->bjhd", P, dout.double()), 2e-2, "dv")
        close(dk, torch.einsum("bhij,bihd->bjhd", dS, q.double()), 3e-2, "dk")
        close(dq, torch.einsum("bhij,bjhd->bihd", dS, k.double()), 3e-2, "dq")


@pytest.mark.parametrize("size", [1e4, 1e5, 1e6])
@pytest.mark.parametrize("deterministic", [False, True], ids=["free", "in order"])
@pytest.mark.parametrize("window", [(-1, -1), (60, 60)], ids=["all", "window"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kernel", "headdim"), BACKWARD)
def test_probabilities_of_large_products_sum_to_one(kernel, headdim, dtype, window, deterministic, size):
    """P of the backward pass did not sum to 1 where products are large, because S was summed in another order for
    lse."""
    dtype = getattr(torch, dtype)
    q, k, v, dout = inputs(headdim, dtype, size)
    q, k = q.abs(), (k * 1e-3 + 1).to(dtype)  # no row near zero; products close to each other, so that many keys count
    options = {"window_size": window, "deterministic": deterministic}
    served(fa.backward_query(q, k, v, kernel=kernel, **options))
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, window_size=window)
    dv = fa.backward(dout, q, k, v, out, lse, kernel=kernel, **options)[2]
    assert torch.isfinite(dv).all()
    seen = lse.isfinite().transpose(1, 2)[..., None]
    want = (dout.double() * seen).sum(1)
    error = (dv.double().sum(1) - want).abs().max() / want.abs().max()
    assert error <= 3e-2, f"sum of P is off by {error:.3g} at |lse| to {lse.abs().max():.3g}"


@pytest.mark.parametrize(("kernel", "headdim"), BACKWARD)
def test_a_part_of_the_keys_keeps_its_share(kernel, headdim):
    """lse may cover keys that a call does not have. The call's probabilities then keep their share, and do not sum to
    1."""
    q, k, v, dout = inputs(headdim, torch.bfloat16)
    bias = torch.full((1, 1, ROWS, KEYS), -1e4, device="cuda")
    served(fa.backward_query(q, k, v, bias=bias, kernel=kernel))
    out, lse = fa.flash_attn_func(q, k, v, bias=bias, return_lse=True)
    whole = fa.backward(dout, q, k, v, out, lse, bias=bias, kernel=kernel)[:3]
    halves = [
        fa.backward(dout, q, k[:, keys], v[:, keys], out, lse, bias=bias[..., keys].contiguous(), kernel=kernel)[:3]
        for keys in (slice(0, 96), slice(96, KEYS))
    ]
    close(halves[0][0] + halves[1][0], whole[0], 3e-2, "dq")
    for x in (1, 2):
        close(torch.cat([halves[0][x], halves[1][x]], 1), whole[x], 3e-2, "dk dv"[3 * x - 3 : 3 * x - 1])


@pytest.mark.parametrize("center", [0.0, -1e5, -1e7, "lowest", 1e9])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", ["minimal", "naive", "mma_sm80", "wgmma_sm90", None])
def test_key_sums_of_large_rows(kernel, dtype, center):
    """key_sums added up to more or less than the number of rows where lse is large."""
    q, k, v, _ = inputs(64, getattr(torch, dtype))
    center = torch.finfo(torch.float32).min if center == "lowest" else center
    bias = torch.full((1, 1, ROWS, KEYS), center, device="cuda")
    options = {"bias": bias, "kernel": kernel, "return_key_sums": True}
    served(fa.query(q, k, v, **options))
    sums = fa.flash_attn_func(q, k, v, **options)[-1]
    close(sums.sum(-1), torch.full((1, 2), float(ROWS), device="cuda"), 1e-2, "sum of key_sums")
