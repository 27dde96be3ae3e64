"""Masks by blocks (block_mask), on every kernel, in both passes, against float64."""

from __future__ import annotations

import accuracy
import hidden_keys
import numpy as np
import pytest
from accuracy import Case

import flash_attn_minimal as fa
from flash_attn_lab import reference

BLOCKS = [(64, 64), (128, 128), (64, 128), (128, 64)]
SHAPES = [  # seqlen_q, seqlen_k, nheads, nheads_k
    (1, 1, 2, 1), (7, 300, 4, 2), (330, 250, 4, 2), (65, 33, 2, 1), (129, 200, 3, 3), (100, 600, 6, 2),
    (385, 385, 2, 2),
]  # fmt: skip
OPTIONS = {
    "causal": {"causal": True},
    "top_left": {"causal": True, "top_left": True},
    "window": {"window_size": (60, 20)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": 2},
    "bias": {"bias": (True, False, True)},
    "mask": {"mask": (False, True, True)},
    "intervals": {"causal": True, "intervals": (2, 1)},
    "intervals4": {"intervals": (4, 4), "block_rate": 0.8},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.25},
    "chunk": {"attention_chunk": 70},
    "large": {"spread": 8e3},
    "nothing": {"block_rate": 0.0, "causal": True},
    "everything": {"block_rate": 2.0},
    "all": {"softcap": 20.0, "alibi": 1, "bias": (False, True, True), "mask": (True, True, True),
            "sinks": True, "dropout_p": 0.1, "window_size": (150, 100), "headdim_v": 24, "block_rate": 0.8,
            "intervals": (1, 2)},
}  # fmt: skip


def cases(blocks):
    """Shapes that cut tiles and blocks, with a mask for all heads, for each key head and for each query head."""
    for i, (seqlen_q, seqlen_k, nheads, nheads_k) in enumerate(SHAPES):
        for heads in dict.fromkeys((1, nheads_k, nheads)):
            yield Case(seqlen_q, seqlen_k, 40, nheads=nheads, nheads_k=nheads_k, batch=1 + i % 2, causal=i % 3 == 1,
                       seed=i, blocks=(heads, *blocks), dtype=("float32", "float16", "bfloat16")[i % 3])  # fmt: skip


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_shapes(kernel, blocks):
    for case in cases(blocks):
        kernel.check(case)


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_gradients(backward_kernel, blocks):
    for case in cases(blocks):
        backward_kernel.check(case)


@pytest.mark.parametrize("option", OPTIONS)
def test_beside_options(kernel, option):
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "headdim": 64, **OPTIONS[option]}
    kernel.check(Case(130, 220, dtype="float32", blocks=(2, 64, 64), **shape))
    kernel.check(Case(200, 190, dtype="float16", blocks=(4, 128, 64), **shape))


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_beside_options(backward_kernel, option):
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "headdim": 64, "dlse": True, **OPTIONS[option]}
    backward_kernel.check(Case(130, 220, dtype="float32", blocks=(4, 64, 64), **shape))
    backward_kernel.check(Case(200, 190, dtype="float16", blocks=(1, 64, 128), **shape))


VARLEN = {"cu_seqlens_q": (0, 5, 5, 134, 200), "cu_seqlens_k": (0, 7, 20, 20, 219), "nheads": 4, "nheads_k": 2}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_varlen(kernel, blocks, heads):
    """Blocks count from the start of each sequence."""
    kernel.check(Case(130, 199, 64, causal=heads == 2, blocks=(heads, *blocks), block_rate=0.6, **VARLEN))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_varlen_gradients(backward_kernel, blocks, heads):
    for dtype in ("float32", "float16"):
        case = {"blocks": (heads, *blocks), "block_rate": 0.6, "dtype": dtype, "causal": heads == 2}
        backward_kernel.check(Case(130, 199, 64, **case, **VARLEN))


def poisoned(seed, seqlen_q, seqlen_k, blocks, heads):
    counts = [-(-n // size) for n, size in zip((seqlen_q, seqlen_k), blocks, strict=True)]
    return hidden_keys.poisoned(
        np.random.default_rng(seed), seqlen_q, seqlen_k,
        lambda rng: {"block_mask": rng.random((2, heads, *counts)) < 0.3, "causal": seed % 2 == 0},
    )  # fmt: skip


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_hidden_keys_do_not_leak(kernel, blocks, heads):
    for seed, (seqlen_q, seqlen_k) in enumerate([(1, 200), (5, 130), (300, 300), (140, 400)]):
        q, k, v, _, options, _ = poisoned(seed, seqlen_q, seqlen_k, blocks, heads)
        hidden_keys.check_forward(kernel, q, k, v, options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_hidden_keys_have_no_gradient(backward_kernel, blocks, heads, dtype):
    for deterministic in (False, True):
        made = poisoned(int(deterministic), 300, 290, blocks, heads)
        hidden_keys.check_gradients(backward_kernel, dtype, deterministic, *made)


def test_statistics(kernel):
    q, k, v, _, options, _ = poisoned(0, 150, 290, (64, 64), 2)
    hidden_keys.check_statistics(kernel, q, k, v, options)


@pytest.mark.parametrize("view", [np.s_[:1], np.s_[:, ::2], np.s_[:, :, ::-1], np.s_[:, 1:2, 1:4]], ids=str)
def test_one_batch_entry_and_strides(kernel, view):
    """Every stride is free but that of the blocks of a row."""
    if kernel.device.framework != "numpy":
        pytest.skip("PyTorch has no negative strides")
    rng = np.random.default_rng(0)
    q, k, v = accuracy.round_to(rng.standard_normal((3, 2, 170, 4, 32), np.float32), kernel.dtype)
    mask = (rng.random((2, 4, 5, 3)) < 0.6)[view]
    mask = mask[:, :, : -(-170 // 64)].view(np.uint8) * np.uint8(8)  # any number but zero
    exact = reference.standard_attention(q, k[:, :, :2], v[:, :, :2], block_mask=mask)[0]
    q, k, v = (kernel.device.array(x, kernel.dtype) for x in (q, k, v))
    out = fa.flash_attn_func(q, k[:, :, :2], v[:, :, :2], block_mask=mask, kernel=kernel.name)
    np.testing.assert_allclose(kernel.device.numpy(out), exact, atol=1e-5 if kernel.dtype == "float32" else 2e-2)


def bad(shape, dtype=bool, **options):
    q, k = np.zeros((2, 300, 4, 8), np.float32), np.zeros((2, 70, 2, 8), np.float32)
    return fa.flash_attn_func(q, k, k, block_mask=np.zeros(shape, dtype), **options)


@pytest.mark.parametrize(
    "shape", [(2, 1, 300, 70), (2, 1, 4, 2), (2, 1, 5, 3), (3, 1, 5, 2), (2, 3, 5, 2), (1, 5, 2), (5,), (2, 0, 5, 2)]
)
def test_bad_shapes(shape):
    text = (
        "block_mask has shape {}: expected (batch, heads, blocks of rows, blocks of keys) = (1 or 2, 1 or 2 or 4, 3 or "
        "5, 1 or 2), for blocks of 128 or 64 of seqlen_q=300 and seqlen_k=70"
    )
    with pytest.raises(fa.BadArgument) as error:
        bad(shape)
    assert str(error.value) == text.format(shape)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_bad_dtypes(dtype):
    with pytest.raises(
        fa.BadArgument, match=f"block_mask is {np.dtype(dtype)}: expected bool or uint8; pass block_mask"
    ):
        bad((2, 1, 5, 2), dtype)
    with pytest.raises(fa.BadArgument, match="block_mask has stride 5 along its last axis"):
        q = np.zeros((1, 128, 2, 8), np.float32)
        fa.flash_attn_func(q, q, q, block_mask=np.zeros((1, 1, 2, 10), bool)[..., ::5])


def test_out_may_not_overlap():
    q = np.zeros((1, 128, 1, 8), np.float32)
    mask = q.view(np.uint8).reshape(1, 1, 1, -1)[..., :4].reshape(1, 1, 2, 2)
    with pytest.raises(fa.BadArgument, match=r"out\.data=\w+ overlaps block_mask"):
        fa.flash_attn_func(q + 1, q + 1, q + 1, block_mask=mask, out=q)


def test_caches_refuse():
    q, cache = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 9, 1, 8), np.float32)
    with pytest.raises(TypeError, match="block_mask"):
        fa.flash_attn_with_kvcache(q, cache, cache, block_mask=np.zeros((1, 1, 1, 1), bool))


def test_ranks_refuse():
    from flash_attn_minimal import distributed

    q = np.zeros((1, 64, 2, 8), np.float32)
    with distributed.thread_groups(1)[0] as group, pytest.raises(fa.Unsupported, match="block_mask is given, but"):
        distributed.forward(group, q, q, q, block_mask=np.ones((1, 1, 1, 1), bool))


def test_equal_calls_repeat():
    """A call that repeats an earlier one reads the mask that it is given."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 140, 1, 16), np.float32)
    for seed in range(6):
        mask = np.random.default_rng(seed).random((1, 1, 3, 3)) < 0.6
        out, lse = fa.flash_attn_func(q, q, q, block_mask=mask, return_lse=True)
        np.testing.assert_allclose(out, reference.standard_attention(q, q, q, block_mask=mask)[0], atol=1e-5)
        got = fa.backward(q, q, q, q, out, lse, block_mask=mask)
        want = reference.standard_attention_backward(q, q, q, q, block_mask=mask)
        for x, y in zip(got, want[:3], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


def test_threads_do_not_change_bits():
    """Nor do blocks that are skipped: each block of queries adds its parts of dq in one order."""
    q, k, v, dout, options, _ = poisoned(3, 700, 900, (64, 128), 4)
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    results = []
    for threads in (1, 3, 8):
        out, lse = fa.flash_attn_func(q, k, v, return_lse=True, num_threads=threads, **options)
        results.append((out, lse, *fa.backward(dout, q, k, v, out, lse, num_threads=threads, **options)))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert x.tobytes() == y.tobytes()
