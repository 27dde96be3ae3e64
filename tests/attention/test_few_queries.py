"""Few queries over many keys with options of the scores: the kernels that divide the keys over the GPU, by name and by
default, against float64."""

from __future__ import annotations

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA, Kernel, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference

pytestmark = pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)

OPTIONS = {
    "mask of keys": {"mask": (True, False, False)},
    "mask of keys of heads": {"mask": (False, True, False)},
    "mask of pairs": {"mask": (True, True, True)},
    "bias": {"bias": (True, True, True)},
    "bias of heads": {"bias": (False, True, False)},
    "float32 bias": {"bias": (False, False, True), "bias_float32": True},
    "intervals": {"intervals": (1, 2)},
    "intervals of heads": {"intervals": (-1, 4)},
    "blocks": {"blocks": (1, 64, 128)},
    "dropout": {"dropout_p": 0.3},
    "softcap": {"softcap": 15.0},
    "mask and ALiBi": {"mask": (True, False, False), "alibi": 2},
    "bias and softcap": {"bias": (True, False, True), "softcap": 10.0},
    "mask, bias, sinks": {"mask": (False, False, True), "bias": (True, True, False), "sinks": True},
    "dropout, bias, mask": {"dropout_p": 0.1, "bias": (False, True, True), "mask": (True, False, False)},
    "causal mask": {"mask": (True, False, True), "causal": True},
    "top-left bias": {"bias": (True, False, False), "causal": True, "top_left": True},
    "window and mask": {"mask": (True, False, False), "window_size": (1000, 100)},
    "negative scale": {"bias": (True, True, True), "softmax_scale": -0.2},
    "nothing seen": {"mask": (True, False, False), "mask_rate": 0.0},
}
# seqlen_q, nheads, nheads_k: one row, tiles of 16 and of 64 rows, several tiles
ROWS = [(1, 3, 3), (1, 8, 2), (5, 6, 2), (16, 4, 1), (33, 2, 2), (70, 6, 3)]


def kernel_of(dtype: str) -> Kernel:
    return Kernel(CUDA, "decode_lanes_sm80" if dtype == "float32" else "decode_split_sm80")


def check(case: Case, kernel: Kernel | None = None) -> None:
    (q, k, v, options), exact, plain = accuracy.expected(case)
    got = (kernel or kernel_of(case.dtype))(q, k, v, case.dtype, **options)
    for i, name in enumerate(("out", "lse")):
        accuracy.check(name, got[i], exact[i], plain[i], case.dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_options(rows, options, dtype):
    seqlen_q, nheads, nheads_k = rows
    if options.get("intervals", (0,))[0] < 0:
        options = options | {"intervals": (nheads_k, options["intervals"][1])}
    check(Case(seqlen_q, 1501, 64, batch=2, nheads=nheads, nheads_k=nheads_k, dtype=dtype, **options))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("options", ["mask of pairs", "dropout, bias, mask", "intervals of heads", "blocks"])
@pytest.mark.parametrize("headdim", [(8, None), (72, None), (128, None), (192, 128), (256, None)], ids=str)
@pytest.mark.parametrize("rows", [(1, 4, 2), (20, 2, 2)], ids=str)
def test_head_dims(rows, headdim, options, dtype):
    options = OPTIONS[options]
    if "intervals" in options:
        options = {"intervals": (rows[2], 4)}
    case = Case(rows[0], 777, headdim[0], headdim[1], nheads=rows[1], nheads_k=rows[2], dtype=dtype, **options)
    check(case)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("headdim", [(264, None), (512, None), (320, 64), (40, 384)], ids=str)
@pytest.mark.parametrize("rows", [(1, 4, 2), (20, 2, 2)], ids=str)
def test_wide_head_dims(rows, headdim, options, dtype):
    """decode_wide_sm80, whose warps share a tile's columns."""
    seqlen_q, nheads, nheads_k = rows
    if options.get("intervals", (0,))[0] < 0:
        options = options | {"intervals": (nheads_k, options["intervals"][1])}
    case = Case(seqlen_q, 777, *headdim, batch=2, nheads=nheads, nheads_k=nheads_k, dtype=dtype, **options)
    check(case, Kernel(CUDA, "decode_wide_sm80"))


@pytest.mark.parametrize("keys", [0, 1, 31, 33, 5000])
@pytest.mark.parametrize("batch", [1, 3, 70])
@pytest.mark.parametrize("options", [{}, {"bias": (True, True, True)}], ids=["bare", "bias"])
def test_wide_lengths(batch, keys, options):
    """Units in one piece, in several, and several units of a block."""
    if batch * keys > 20000:
        keys = 300
    case = Case(2, keys, 512, batch=batch, nheads=4, nheads_k=2, dtype="bfloat16", causal=True, **options)
    check(case, Kernel(CUDA, "decode_wide_sm80"))


@pytest.mark.parametrize("keys", [0, 1, 15, 64, 129, 5000])
@pytest.mark.parametrize("batch", [1, 3, 70])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lengths(batch, keys, dtype):
    """Units in one piece, in several, and several units of a block."""
    if batch * keys > 20000:
        keys = 300
    shape = {"batch": batch, "nheads": 4, "nheads_k": 2, "dtype": dtype}
    check(Case(2, keys, 64, mask=(True, False, False), bias=(True, True, True), **shape))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("low", ["-inf", "finfo.min", "mask"])
@pytest.mark.parametrize("hides", ["some keys", "a row", "everything"])
@pytest.mark.parametrize("headdim", [64, 128, 256])
def test_hidden_keys(headdim, hides, low, dtype):
    """Keys that are hidden from all rows hold NaN in K and V. finfo.min is a number: a row of nothing else is the mean
    of V, and not the mean of the means of the pieces."""
    case = Case(3, 1333, headdim, nheads=4, nheads_k=2, dtype=dtype)
    q, k, v, _ = accuracy.inputs(case)
    rng = np.random.default_rng(1)
    hidden = np.zeros((3, 1333), bool)
    hidden[:, 100:300] = hidden[:, 900:] = True
    if hides != "some keys":
        hidden[1 if hides == "a row" else slice(None)] = True
    if low == "mask":
        options = {"mask": ~hidden[None, None]}
    else:
        lowest = -np.inf if low == "-inf" else {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}.get(dtype)
        lowest = float(np.finfo(np.float32).min) if lowest is None else lowest
        bias = accuracy.round_to(rng.standard_normal(hidden.shape, dtype=np.float32), dtype)
        options = {"bias": np.where(hidden, np.float32(lowest), bias)[None, None]}
    exact = reference.standard_attention(q, k, v, **options)
    plain = accuracy.plain_attention(q, k, v, dtype=dtype, **options)
    if low != "finfo.min":
        k, v = k.copy(), v.copy()
        k[:, hidden.all(0)], v[:, hidden.all(0)] = np.nan, np.nan
    got = kernel_of(dtype)(q, k, v, dtype, **options)
    for i, name in enumerate(("out", "lse")):
        accuracy.check(name, got[i], exact[i], plain[i], dtype)


@pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA")
@pytest.mark.parametrize("option", ["mask", "bias", "dropout", "softcap", "alibi", "window"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(1, 1, 8, 8, 8192), (4, 1, 32, 8, 768), (1, 16, 16, 16, 4096), (2, 8, 16, 4, 2048)])
def test_default(shape, dtype, option):
    """The kernel that such a call takes without a name."""
    batch, seqlen_q, nheads, nheads_k, keys = shape
    if (
        fa.query(*[torch.empty(1, 1, 1, 64, device="cuda", dtype=torch.bfloat16)] * 3, kernel="wgmma_sm90").status
        != "FA_OK"
    ):
        pytest.skip("measured on Hopper")
    if dtype == "float32" and (option == "dropout" or seqlen_q * nheads // nheads_k > 16):
        pytest.skip("another kernel's")
    kind = getattr(torch, dtype)
    q = torch.empty(batch, seqlen_q, nheads, 128, device="cuda", dtype=kind)
    k = torch.empty(batch, keys, nheads_k, 128, device="cuda", dtype=kind)
    options = {
        "mask": {"mask": torch.ones(batch, 1, 1, keys, device="cuda", dtype=torch.bool)},
        "bias": {"bias": torch.zeros(1, nheads, seqlen_q, keys, device="cuda", dtype=kind)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
        "softcap": {"softcap": 30.0},
        "alibi": {"alibi_slopes": torch.ones(nheads, device="cuda")},
        "window": {"window_size": (keys // 2, 0)},
    }[option]
    assert fa.query(q, k, k, **options).kernel.startswith("decode_")


@pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA")
@pytest.mark.parametrize("option", ["bias", "mask"])
def test_no_keys_beside_a_broadcast_option(option):
    """Nothing is read before an option's only element: it starts a segment of the allocator, before which reads fault
    under compute-sanitizer."""
    q = torch.randn(1, 2, 4, 512, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(1, 0, 4, 512, device="cuda", dtype=torch.bfloat16)
    dtype = torch.bool if option == "mask" else torch.bfloat16
    values = torch.zeros(1 << 24, device="cuda", dtype=dtype)[:2].view(1, 1, 2, 1)
    out, lse = fa.flash_attn_func(q, k, k, return_lse=True, kernel="decode_wide_sm80", **{option: values})
    assert (out == 0).all() and (lse == -torch.inf).all()
