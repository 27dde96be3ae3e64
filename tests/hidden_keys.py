"""Keys that no row sees have no influence, whatever hides them: NaN stands in their K and V."""

from __future__ import annotations

import accuracy
import numpy as np
import pytest

import flash_attn_minimal as fa
from flash_attn_lab import reference


def poisoned(rng, seqlen_q, seqlen_k, options, nheads=4, nheads_k=2, headdim=64):
    """q, k, v, dout and options with NaN in the keys and values that no row sees; and which keys those are."""
    q, dout = rng.standard_normal((2, 2, seqlen_q, nheads, headdim), np.float32)
    k, v = rng.standard_normal((2, 2, seqlen_k, nheads_k, headdim), np.float32)
    options = options(rng)
    seen = np.zeros((2, nheads_k, seqlen_k), bool)
    for b, h, head in reference.heads(q, k, v, **options):
        seen[b, h * nheads_k // nheads] |= head.visible(slice(None), slice(None)).any(0)
    for x in (k, v):
        x.swapaxes(1, 2)[~seen] = np.nan
    return q, k, v, dout, options, seen


def check_forward(kernel, q, k, v, options):
    q, k, v = (accuracy.round_to(x, kernel.dtype) for x in (q, k, v))
    exact = reference.standard_attention(q, np.nan_to_num(k), np.nan_to_num(v), **options)
    out, lse = kernel(q, k, v, kernel.dtype, **options | ({"allow_tf32": True} if "tf32" in kernel.name else {}))
    atol = 5e-3 if "tf32" in kernel.name else 2e-5
    np.testing.assert_allclose(out, exact[0], atol=atol if kernel.dtype == "float32" else 2e-2)
    np.testing.assert_allclose(lse, exact[1], atol=atol)


def check_gradients(backward_kernel, dtype, deterministic, q, k, v, dout, options, seen):
    if dtype == "float16":
        q, k, v, dout = (x.astype(np.float16).astype(np.float32) for x in (q, k, v, dout))
    arrays = q, np.nan_to_num(k), np.nan_to_num(v)
    out, lse = reference.standard_attention(*arrays, **options)
    exact = reference.standard_attention_backward(dout, *arrays, **options)
    given = dout, q, k, v, out.astype(np.float32), lse.astype(np.float32)
    got = backward_kernel(*given, dtype, deterministic=deterministic, **options)
    for x, want in zip(got, exact[:3], strict=True):
        np.testing.assert_allclose(x, want, atol=3e-5 if dtype == "float32" else 2e-2)
    for x in got[1:]:
        assert not x.swapaxes(1, 2)[~seen].any()


def check_statistics(kernel, q, k, v, options):
    q, k, v = (accuracy.round_to(np.nan_to_num(x), kernel.dtype) for x in (q, k, v))
    exact = reference.max_score(q, k, v, **options), reference.key_sums(q, k, v, **options)
    arrays, options = kernel.arguments(q, k, v, kernel.dtype, None, options)
    if fa.query(*arrays, return_max_score=True, return_key_sums=True, **options).status == "FA_UNSUPPORTED":
        assert not kernel.general
        pytest.skip("not served")
    _, greatest, sums = fa.flash_attn_func(*arrays, return_max_score=True, return_key_sums=True, **options)
    np.testing.assert_allclose(kernel.device.numpy(greatest), exact[0], rtol=1e-5)
    np.testing.assert_allclose(kernel.device.numpy(sums), exact[1], atol=1e-4)
