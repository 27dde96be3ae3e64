"""Rows that see no key beside NaN in V or K, in a position that other rows see: out is 0 and lse -inf, gradients are 0
(docs/contract.md, section 2). 0 times NaN is NaN, so a kernel that multiplies hidden pairs must select."""

from __future__ import annotations

import numpy as np
import pytest

import flash_attn_minimal as fa

# rows, keys: causal at the bottom right, so that the first rows - keys rows see nothing. The first key, whose V is NaN,
# is in the tile of the first row that sees something.
SHAPES = [(2, 1), (70, 40), (333, 150)]
DTYPES = ["float16", "bfloat16", "float32", "float8_e4m3"]


def inputs(seqlen_q, seqlen_k, headdim, nheads=4, nheads_k=2, batch=2):
    rng = np.random.default_rng(seqlen_q * 1000 + headdim)
    q = rng.standard_normal((batch, seqlen_q, nheads, headdim), np.float32)
    k, v = (rng.standard_normal((batch, seqlen_k, nheads_k, headdim), np.float32) for _ in range(2))
    v[:, 0] = np.nan
    return q, k, v


def fp8(kernel, q, k, v):
    """float8 inputs of PyTorch, and the options with their factors."""
    torch = pytest.importorskip("torch")
    if kernel.device.framework != "torch":
        pytest.skip("float8 arrays come from PyTorch here")
    (q8, q_factor), (k8, k_factor), (v8, v_factor) = (
        fa.quantize_fp8(torch.from_numpy(np.nan_to_num(x)).to(kernel.device.name)) for x in (q, k, v)
    )
    v8.view(torch.uint8)[torch.from_numpy(np.isnan(v)).to(v8.device)] = 0x7F  # NaN
    return (q8, k8, v8), {"q_descale": q_factor, "k_descale": k_factor, "v_descale": v_factor}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(kernel, shape, headdim, dtype, sinks):
    q, k, v = inputs(*shape, headdim)
    empty = shape[0] - shape[1]
    options = {"causal": True, "allow_tf32": kernel.name == "mma_tf32_sm80"}
    if sinks:
        options["sinks"] = np.linspace(-1, 1, q.shape[2]).astype(np.float32)
    if dtype == "float8_e4m3":
        if sinks or kernel.device.name == "cpu":
            pytest.skip("float8 is for GPUs, and takes no sinks")
        arrays, factors = fp8(kernel, q, k, v)
        more = factors | {"kernel": kernel.name, "causal": True, "fast_accum": kernel.name == "fp8_fast_sm90"}
        if (plan := fa.query(*arrays, **more)).status == "FA_UNSUPPORTED":
            pytest.skip(plan.error)
        out, lse = fa.flash_attn_func(*arrays, return_lse=True, **more)
        out, lse = kernel.device.numpy(out), kernel.device.numpy(lse)
    else:
        out, lse = kernel(q, k, v, dtype, **options)
    assert (out[:, :empty] == 0).all()
    want = options["sinks"][:, None] if sinks else -np.inf
    np.testing.assert_allclose(lse[:, :, :empty], np.broadcast_to(want, lse[:, :, :empty].shape), rtol=1e-6)
    assert np.isnan(out[:, empty:]).all(), "these rows see the NaN"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("headdim", [64, 128, 192, 256, 320])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("where", ["v", "k", "k, with sinks"])
def test_backward(backward_kernel, where, shape, headdim, dtype, deterministic):
    q, k, v = inputs(*shape, headdim)
    if where != "v":
        k, v = v, k
    empty = shape[0] - shape[1]
    dout = np.random.default_rng(3).standard_normal(q.shape, np.float32)
    out = np.full(q.shape, np.nan, np.float32)
    lse = np.full((q.shape[0], q.shape[2], shape[0]), 0 if where == "v" else np.nan, np.float32)
    out[:, :empty], lse[:, :, :empty] = 0, -np.inf
    options = {"causal": True, "deterministic": deterministic}
    if "sinks" in where:
        options["sinks"] = np.linspace(-1, 1, q.shape[2]).astype(np.float32)
        lse[:, :, :empty] = options["sinks"][:, None]
    dq, dk, _ = backward_kernel(dout, q, k, v, out, lse, dtype, **options)
    assert (dq[:, :empty] == 0).all()
    assert np.isnan(dq[:, empty:]).all() and np.isnan(dk).all(), "these rows see the NaN"


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("headdim", [64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("paged", [False, True])
def test_cache(kernel, paged, dtype, headdim, num_splits):
    """Four causal rows of a sequence with fewer keys than rows, beside a long sequence."""
    rng = np.random.default_rng(headdim)
    lengths, rows = np.array([1, 2, 700], np.int32), 768
    q = rng.standard_normal((3, 4, 8, headdim), np.float32)
    k, v = (rng.standard_normal((3, rows, 2, headdim), np.float32) for _ in range(2))
    v[:2, 0] = np.nan
    options = {"causal": True, "kernel": kernel.name, "num_splits": num_splits}
    if paged:
        k, v = (x.reshape(3 * rows // 64, 64, 2, headdim) for x in (k, v))
        table = np.arange(3 * rows // 64, dtype=np.int32).reshape(3, rows // 64)
        options["block_table"] = kernel.device.array(table)
    arrays = [kernel.device.array(x, dtype) for x in (q, k, v)]
    options["cache_seqlens"] = kernel.device.array(lengths)
    plan = fa.kvcache_query(*arrays, **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    out, lse = fa.flash_attn_with_kvcache(*arrays, return_lse=True, **options)
    out, lse = kernel.device.numpy(out), kernel.device.numpy(lse)
    for b, length in enumerate(lengths[:2]):
        assert (out[b, : 4 - length] == 0).all(), b
        assert (lse[b, :, : 4 - length] == -np.inf).all()
        assert np.isnan(out[b, 4 - length :]).all()
    assert np.isfinite(out[2]).all()
