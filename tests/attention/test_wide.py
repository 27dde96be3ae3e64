"""Head dims above 256, whose results and loads are cut into columns; and the choice of a kernel."""

from dataclasses import replace

import accuracy
import kvcache_cases
import numpy as np
import pytest
from accuracy import Case
from conftest import CUDA, NO_CUDA

import flash_attn_minimal as fa
from flash_attn_lab import reference

HEADDIMS = [
    (264, 264), (320, 320), (328, 328), (384, 384), (392, 448), (512, 512), (320, 256), (512, 64), (264, 128),
    (64, 512), (256, 392), (488, 260), (333, 301), (384, 512),
]  # fmt: skip


@pytest.mark.parametrize("headdim, headdim_v", HEADDIMS)
def test_answers(kernel, headdim, headdim_v):
    case = Case(150, 333, headdim, headdim_v, nheads=4, nheads_k=2, dtype="bfloat16")
    kernel.check(case)
    kernel.check(replace(case, causal=True, dtype="float16"))
    kernel.check(replace(case, seqlen_q=333, seqlen_k=150, causal=True))  # rows without keys
    kernel.check(replace(case, seqlen_q=3, seqlen_k=70, causal=True, top_left=True, dtype="float16"))


@pytest.mark.parametrize("headdim", [320, 512])
def test_many_tiles(kernel, headdim):
    """The rings of the Hopper kernel wrap around many times, in items of unequal length."""
    case = Case(500, 1100, headdim, batch=2, nheads=3, nheads_k=1, dtype="bfloat16")
    kernel.check(replace(case, causal=True))
    kernel.check(replace(case, window_size=(100, 40)))


def test_more_items_than_blocks(kernel):
    """140 items, of which an H200 processes 66 at a time, so that state kept from item to item is used."""
    kernel.check(Case(130, 200, 512, batch=10, nheads=7, nheads_k=7, causal=True, dtype="bfloat16"))


@pytest.mark.parametrize("scores", [
    {"window_size": (50, 3)}, {"window_size": (0, -1), "top_left": True}, {"softcap": 3.0, "causal": True},
    {"alibi": 2}, {"sinks": True, "causal": True}, {"softmax_scale": -0.05}, {"softmax_scale": 0.0},
    {"bias": (True, True, True)}, {"mask": (True, False, True), "mask_rate": 0.1}, {"dropout_p": 0.3},
], ids=str)  # fmt: skip
def test_options(kernel, scores):
    kernel.check(Case(140, 270, 320, 400, batch=2, nheads=4, nheads_k=2, dtype="bfloat16", **scores))


@pytest.mark.parametrize("headdim", [320, 448, 512])
@pytest.mark.parametrize("mask_rate", [0.5, 1.0])
def test_hidden_keys_do_not_leak(kernel, headdim, mask_rate):
    """NaN in keys and values that no row sees."""
    q, k, v, options = accuracy.inputs(
        Case(100, 200, headdim, nheads=2, dtype="float16", mask=(True, True, True), mask_rate=mask_rate)
    )
    hidden = [*range(50, 70), *range(190, 200)]
    options["mask"][..., hidden] = False
    out, lse = reference.standard_attention(q, k, v, **options)
    k[:, hidden] = v[:, hidden] = np.nan
    got = kernel(q, k, v, "float16", **options)
    np.testing.assert_allclose(got[0], out, atol=4e-3)
    np.testing.assert_allclose(got[1], lse, atol=2e-4)


@pytest.mark.parametrize("headdim", [264, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(kernel, headdim, causal):
    """Another sequence follows, which may hold NaN and must not affect this one."""
    starts_q, starts_k = (0, 1, 1, 131, 330), (0, 63, 163, 163, 500)
    kernel.check(
        Case(199, 337, headdim, nheads=2, nheads_k=1, causal=causal, dtype="float16", cu_seqlens_q=starts_q,
             cu_seqlens_k=starts_k)
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [0, 5, 8, 16, 24, 64, 96, 128])
@pytest.mark.parametrize("headdim, headdim_v", [(320, None), (512, None), (384, 200)])
def test_caches(kernel, headdim, headdim_v, page_size):
    case = kvcache_cases.Case(
        lengths=(300, None, 0, 129), rows=page_size or 390, pages=-(-390 // page_size) if page_size else 0,
        seqlen_q=70, seqlen_new=0, headdim=headdim, headdim_v=headdim_v, nheads=4, nheads_k=2, dtype="bfloat16",
        batch_idx=not page_size,
    )  # fmt: skip
    kvcache_cases.check(kernel, case)
    kvcache_cases.check(kernel, replace(case, causal=True, dtype="float16"))
    kvcache_cases.check(kernel, replace(case, seqlen_q=1, window_size=(90, 0)))


def test_values_that_are_columns_of_the_keys(kernel):
    """64 query heads on one key head whose values are its first columns: prefill of absorbed latent attention."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, heads, 512), dtype=np.float32) for n, heads in ((100, 64), (300, 1)))
    q, k = (kernel.device.numpy(kernel.device.array(x, "bfloat16")) for x in (q, k))
    out, lse = kernel(q, k, k, "bfloat16", causal=True)
    arrays = [kernel.device.array(x, "bfloat16") for x in (q, k)]
    again = fa.flash_attn_func(arrays[0], arrays[1], arrays[1], causal=True, kernel=kernel.name)
    np.testing.assert_array_equal(kernel.device.numpy(again), out)
    assert np.isfinite(lse).all()


def chosen(headdim, headdim_v=None, dtype="bfloat16", **options):
    shapes = ((1, 300, 2, headdim), (1, 300, 2, headdim), (1, 300, 2, headdim_v or headdim))
    return fa.query(*(CUDA.array(np.zeros(shape, np.float32), dtype) for shape in shapes), **options)


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_the_choice():
    if "needs sm_90" in chosen(64).why_not.get("wgmma_sm90", ""):
        pytest.skip("needs a Hopper GPU")
    for headdims in ((264,), (512,), (320, 256), (64, 512), (512, 64)):
        assert chosen(*headdims).kernel == "wgmma_wide_sm90", headdims
        assert chosen(*headdims, dropout_p=0.1, dropout_seed=1).kernel == "wgmma_wide_sm90", headdims
        assert chosen(*headdims, attention_chunk=64).kernel == "mma_sm80", headdims
    for headdims in ((260,), (333, 301)):  # rows that are not a multiple of 16 bytes
        assert chosen(*headdims).kernel == "mma_sm80", headdims
    assert chosen(256).kernel == "wgmma_sm90"
    assert chosen(256, kernel="wgmma_wide_sm90").kernel == "wgmma_wide_sm90"


# ---- gradients ----

BACKWARD_HEADDIMS = [
    (264, 264), (320, 256), (384, 384), (392, 448), (512, 512), (512, 64), (264, 128), (64, 512), (488, 260),
    (333, 301),
]  # fmt: skip


@pytest.mark.parametrize("headdim, headdim_v", BACKWARD_HEADDIMS)
def test_gradients(backward_kernel, headdim, headdim_v):
    case = Case(150, 333, headdim, headdim_v, nheads=4, nheads_k=2, dtype="bfloat16")
    backward_kernel.check(case)
    backward_kernel.check(replace(case, seqlen_q=333, seqlen_k=150, causal=True, dtype="float16"))  # rows without keys


@pytest.mark.parametrize("scores", [
    {"window_size": (50, 3)}, {"window_size": (0, -1), "top_left": True}, {"softcap": 3.0, "causal": True},
    {"alibi": 2}, {"sinks": True, "causal": True}, {"softmax_scale": -0.05}, {"softmax_scale": 0.0},
    {"bias": (True, True, True)}, {"mask": (True, False, True), "mask_rate": 0.1}, {"dropout_p": 0.3},
    {"dlse": True, "causal": True},
], ids=str)  # fmt: skip
def test_gradients_with_options(backward_kernel, scores):
    backward_kernel.check(Case(140, 270, 320, 400, batch=2, nheads=4, nheads_k=2, dtype="bfloat16", **scores))


@pytest.mark.parametrize("headdim", [264, 512])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_packed_sequences(backward_kernel, headdim, causal):
    packed = {"cu_seqlens_q": (0, 1, 1, 131, 330), "cu_seqlens_k": (0, 63, 163, 163, 500)}
    case = Case(199, 337, headdim, nheads=2, nheads_k=1, causal=causal, dtype="float16", **packed)
    backward_kernel.check(case)


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA)
def test_the_choice_of_gradients():
    def plan(headdim, headdim_v=None, dtype="bfloat16", **options):
        shapes = ((1, 300, 2, headdim), (1, 300, 2, headdim), (1, 300, 2, headdim_v or headdim))
        return fa.backward_query(*(CUDA.array(np.zeros(shape, np.float32), dtype) for shape in shapes), **options)

    if "needs sm_80" in plan(64).why_not.get("mma_sm80", ""):
        pytest.skip("needs sm_80")
    for headdims in ((264,), (512,), (320, 256), (64, 512), (333, 301)):
        for deterministic in (False, True):
            assert (
                plan(*headdims, deterministic=deterministic, dropout_p=0.1, dropout_seed=1).kernel == "mma_wide_sm80"
            ), headdims
    assert plan(256).kernel != "mma_wide_sm80"
    assert plan(512, dtype="float32").kernel == "mma_float32_sm80"
    refused = plan(520, dtype="float32")
    assert refused.status == "FA_BAD_ARGUMENT" and "headdim=520 is outside 1 .. 512" in refused.error
    assert plan(256, kernel="mma_wide_sm80").kernel == "mma_wide_sm80"
