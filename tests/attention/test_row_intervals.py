"""Masks by intervals (startend_row_indices), on every kernel, in both passes, against float64 and against the same mask
as a dense one."""

from __future__ import annotations

import accuracy
import hidden_keys
import numpy as np
import pytest
from accuracy import Case
from conftest import CPU

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_lab.fuzz.arrays import random_intervals

# causal and the numbers of a key
FORMS = [(True, 1), (True, 2), (False, 2), (False, 4)]
ids = {"ids": lambda form: f"{'causal' if form[0] else 'full'}{form[1]}"}
DTYPES = ["float32", "float16", "bfloat16"]
OPTIONS = {
    "top_left": {"top_left": True},
    "window": {"window_size": (60, 20)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": 2},
    "bias": {"bias": (True, False, True)},
    "mask": {"mask": (False, True, True)},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.25},
    "chunk": {"attention_chunk": 70},
    "large": {"spread": 8e3},
    "all": {"softcap": 20.0, "alibi": 1, "bias": (False, True, True), "mask": (True, True, True), "mask_rate": 0.9,
            "sinks": True, "dropout_p": 0.1, "window_size": (150, 100), "headdim_v": 24},
}  # fmt: skip


def cases(causal: bool, numbers: int):
    """Shapes that cut tiles in every way, with numbers of one head, of the key heads and of the query heads."""
    for seed, (seqlen_q, seqlen_k, nheads, nheads_k, heads) in enumerate(
        [
            (1, 1, 2, 1, 1),
            (7, 300, 4, 2, 2),
            (330, 250, 4, 2, 4),
            (65, 33, 2, 1, 2),
            (129, 200, 3, 3, 1),
            (100, 600, 6, 2, 1),
        ]
    ):
        yield {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "nheads": nheads, "nheads_k": nheads_k, "seed": seed,
               "causal": causal, "intervals": (heads, numbers), "batch": 1 + seed % 2, "headdim": 40,
               "dtype": DTYPES[seed % 3]}  # fmt: skip


@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("form", FORMS, **ids)
def test_forms(kernel, form, i):
    kernel.check(Case(**[*cases(*form)][i]))


@pytest.mark.parametrize("i", range(6))
@pytest.mark.parametrize("form", FORMS, **ids)
def test_gradients(backward_kernel, form, i):
    backward_kernel.check(Case(**[*cases(*form)][i]))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", FORMS, **ids)
def test_beside_options(kernel, form, option):
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "headdim": 64, "intervals": (2, form[1]), "causal": form[0]}
    for dtype, seqlen_q, seqlen_k in (("float32", 110, 220), ("float16", 130, 90)):
        kernel.check(Case(seqlen_q, seqlen_k, dtype=dtype, **{**shape, **OPTIONS[option]}))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("form", FORMS, **ids)
def test_gradients_beside_options(backward_kernel, form, option):
    shape = {"batch": 2, "nheads": 4, "nheads_k": 2, "headdim": 64, "intervals": (4, form[1]), "causal": form[0]}
    for dtype, seqlen_q, seqlen_k in (("float32", 110, 220), ("float16", 130, 90)):
        backward_kernel.check(Case(seqlen_q, seqlen_k, dtype=dtype, dlse=True, **{**shape, **OPTIONS[option]}))


VARLEN = {"cu_seqlens_q": (0, 5, 5, 134, 200), "cu_seqlens_k": (0, 7, 20, 20, 219), "nheads": 4, "nheads_k": 2}


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS, **ids)
def test_varlen(kernel, form, heads):
    kernel.check(Case(130, 199, 64, causal=form[0], intervals=(heads, form[1]), **VARLEN))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("form", FORMS, **ids)
def test_varlen_gradients(backward_kernel, form, heads):
    for dtype in ("float32", "float16"):
        backward_kernel.check(Case(130, 199, 64, causal=form[0], intervals=(heads, form[1]), dtype=dtype, **VARLEN))


def poisoned(rng, seqlen_q, seqlen_k, form, heads):
    def options(rng):
        indices = random_intervals(rng, (2, heads, seqlen_k, form[1]), seqlen_q)
        indices[:, :, seqlen_k // 3 : seqlen_k // 2] = {
            (True, 1): [0], (True, 2): [0, seqlen_q], (False, 2): [0, 0], (False, 4): [0, 9, 9, seqlen_q],
        }[form]  # fmt: skip
        return {"startend_row_indices": indices, "causal": form[0]}

    return hidden_keys.poisoned(rng, seqlen_q, seqlen_k, options)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("form", FORMS, **ids)
def test_hidden_keys_do_not_leak(kernel, form, heads):
    for seed, (seqlen_q, seqlen_k) in enumerate([(1, 200), (5, 130), (300, 300), (140, 400)]):
        q, k, v, _, options, _ = poisoned(np.random.default_rng(seed), seqlen_q, seqlen_k, form, heads)
        hidden_keys.check_forward(kernel, q, k, v, options)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("form", FORMS, **ids)
def test_hidden_keys_have_no_gradient(backward_kernel, form, heads, dtype):
    for deterministic in (False, True):
        made = poisoned(np.random.default_rng(1), 300, 290, form, heads)
        hidden_keys.check_gradients(backward_kernel, dtype, deterministic, *made)


@pytest.mark.parametrize("form", FORMS, **ids)
def test_statistics(kernel, form):
    q, k, v, _, options, _ = poisoned(np.random.default_rng(0), 150, 290, form, 2)
    hidden_keys.check_statistics(kernel, q, k, v, options)


@pytest.mark.parametrize(
    "view", [np.s_[:, :, ::2], np.s_[:, ::-1, :150], np.s_[:, :, 149::-1], np.s_[:, :1, 7:157]], ids=str
)
def test_one_batch_entry_and_strides(kernel, view):
    """Numbers shared by the batch; every stride is free but that of the numbers of a key."""
    if kernel.device.framework != "numpy":
        pytest.skip("PyTorch has no negative strides")
    rng = np.random.default_rng(0)
    q, k, v = accuracy.round_to(rng.standard_normal((3, 2, 150, 2, 32), np.float32), kernel.dtype)
    indices = random_intervals(rng, (1, 2, 300, 4), 150)[..., :2][view]
    exact = reference.standard_attention(q, k, v, startend_row_indices=indices)[0]
    arrays = (kernel.device.array(x, kernel.dtype) for x in (q, k, v))
    out = fa.flash_attn_func(*arrays, startend_row_indices=indices, kernel=kernel.name)
    np.testing.assert_allclose(kernel.device.numpy(out), exact, atol=1e-5 if kernel.dtype == "float32" else 2e-2)


def bad(shape, causal=False, dtype=np.int32, heads=(4, 2), **options):
    q = np.zeros((2, 5, heads[0], 8), np.float32)
    k = np.zeros((2, 7, heads[1], 8), np.float32)
    return fa.flash_attn_func(q, k, k, causal=causal, startend_row_indices=np.zeros(shape, dtype), **options)


@pytest.mark.parametrize(
    "shape,causal,text",
    [
        (
            (2, 1, 7, 3),
            False,
            r"has shape \(2, 1, 7, 3\): expected \(batch, heads, seqlen_k, numbers\) = \(2, 1 or 2 or 4, 7, 1, 2 or",
        ),
        ((2, 3, 7, 2), False, r"has shape \(2, 3, 7, 2\)"),
        ((2, 1, 5, 2), False, r"has shape \(2, 1, 5, 2\)"),
        ((3, 1, 7, 2), False, r"has shape \(3, 1, 7, 2\)"),
        ((1, 7, 2), False, r"has shape \(1, 7, 2\)"),
        ((7,), False, r"has shape \(7,\)"),
        ((2, 1, 7, 1), False, "has 1 number for each key: with causal=False it has 2 or 4"),
        ((2, 1, 7, 4), True, "has 4 numbers for each key: with causal=True it has 1 or 2"),
    ],
)  # fmt: skip
def test_bad_shapes(shape, causal, text):
    with pytest.raises(fa.BadArgument, match=f"startend_row_indices {text}"):
        bad(shape, causal)


@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.uint8])
def test_bad_dtypes(dtype):
    with pytest.raises(fa.BadArgument, match=f"startend_row_indices is {np.dtype(dtype)}: expected int32"):
        bad((2, 1, 7, 2), dtype=dtype)


def test_bad_layout():
    q = np.zeros((1, 6, 2, 8), np.float32)
    indices = np.zeros((1, 1, 2, 6), np.int32).swapaxes(2, 3)
    with pytest.raises(fa.BadArgument, match="startend_row_indices has stride 6 along its last axis"):
        fa.flash_attn_func(q, q, q, startend_row_indices=indices)


def test_out_may_not_overlap():
    q = np.zeros((1, 8, 1, 8), np.float32)
    indices = q.view(np.int32)[:, :, :, :2].swapaxes(1, 2)
    with pytest.raises(fa.BadArgument, match=r"out\.data=\w+ overlaps startend_row_indices"):
        fa.flash_attn_func(q + 1, q + 1, q + 1, startend_row_indices=indices, out=q)


def test_caches_refuse():
    q, cache = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 9, 1, 8), np.float32)
    with pytest.raises(TypeError, match="startend_row_indices"):
        fa.flash_attn_with_kvcache(q, cache, cache, startend_row_indices=np.zeros((1, 1, 9, 2), np.int32))


def test_equal_calls_repeat():
    """A call that repeats an earlier one reads the numbers that it is given."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 40, 1, 16), np.float32)
    for seed in range(6):
        indices = random_intervals(np.random.default_rng(seed), (1, 1, 40, 2), 40)
        out, lse = fa.flash_attn_func(q, q, q, startend_row_indices=indices, return_lse=True)
        exact = reference.standard_attention(q, q, q, startend_row_indices=indices)
        np.testing.assert_allclose(out, exact[0], atol=1e-5)
        got = fa.backward(q, q, q, q, out, lse, startend_row_indices=indices)
        want = reference.standard_attention_backward(q, q, q, q, startend_row_indices=indices)
        for x, y in zip(got, want[:3], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("form", FORMS, **ids)
def test_threads_do_not_change_bits(form):
    """Nor do tiles that are skipped: each block of queries adds its parts of dq in one order."""
    rng = np.random.default_rng(3)
    q, k, v, dout, options, _ = poisoned(rng, 700, 900, form, 4)
    k, v = np.nan_to_num(k), np.nan_to_num(v)
    results = []
    for threads in (1, 3, 8):
        out, lse = fa.flash_attn_func(q, k, v, return_lse=True, num_threads=threads, **options)
        results.append((out, lse, *fa.backward(dout, q, k, v, out, lse, num_threads=threads, **options)))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert x.tobytes() == y.tobytes()


def test_same_bits_as_a_dense_mask_alone():
    """A tile that is not compared, and a tile that is left out, change no bit of the forward pass."""
    rng = np.random.default_rng(4)
    q, k, v = (CPU.array(x) for x in rng.standard_normal((3, 1, 600, 2, 64), np.float32))
    starts = np.repeat([200, 400, 600], 200)
    indices = np.stack([starts, starts - 200], -1).astype(np.int32)[None, None]
    dense = reference.dense_from_intervals(indices, 600, causal=False)
    a, b = (fa.flash_attn_func(q, k, v, **x) for x in ({"startend_row_indices": indices}, {"mask": dense}))
    assert a.tobytes() == b.tobytes()
