"""Attention over a cache: appended, rotated, paged, 8-bit, on every kernel that takes it, against float64."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace
from typing import Any

import accuracy
import numpy as np
import pytest
from conftest import NO_CUDA, SEED, Kernel, torch

import flash_attn_minimal as fa
from flash_attn_minimal import reference

SCALES = ("heads", "entries", "tokens")  # (nheads_k,), (entries, 1, nheads_k), (entries, rows, nheads_k)


@dataclass(frozen=True)
class Case:
    """One call; the arrays follow from the seed. Lengths are those before the call; None is an idle sequence."""

    lengths: tuple[int | None, ...] = (37, 0, 65)
    seqlen_q: int = 1
    seqlen_new: int = 1
    rows: int = 80  # of an entry, or of a page
    pages: int = 0  # pages of a sequence; 0 = contiguous
    spare: int = 3  # entries or pages that no sequence owns
    batch_idx: bool = False
    nheads: int = 4
    nheads_k: int = 2
    headdim: int = 64
    headdim_v: int | None = None
    dtype: str = "float32"
    cache_dtype: str | None = None  # "float8_e4m3fn" or "int8"
    scales: str = "heads"
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: int = 0
    sinks: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    rotary_float32: bool = False
    rotary_rows: int = 0  # 0: as many as the cache can hold
    num_splits: int = 0
    batch_invariant: bool = False
    seed: int = 0

    @property
    def capacity(self) -> int:
        return self.rows * (self.pages or 1)

    @property
    def batch(self) -> int:
        return len(self.lengths)


@dataclass
class Call:
    """NumPy arrays of a case; what nobody may read is NaN, or for integers nonsense."""

    q: np.ndarray
    cache: dict[str, np.ndarray]  # k_cache, v_cache: float32 values, or int8 and float8 ones
    new: dict[str, np.ndarray]  # k, v
    where: dict[str, np.ndarray]  # cache_seqlens, cache_batch_idx, block_table
    rotary: dict[str, Any]
    scales: dict[str, np.ndarray]
    options: dict[str, Any]  # of the scores

    @property
    def arrays(self) -> dict[str, Any]:
        return {**self.cache, **self.new, **self.where, **self.rotary, **self.scales}


def eight_bit(dtype: str) -> np.dtype:
    return np.dtype("int8") if dtype == "int8" else np.dtype(pytest.importorskip("ml_dtypes").float8_e4m3fn)


def quantised(x: np.ndarray, factor: np.ndarray, dtype: str) -> np.ndarray:
    """x / factor rounded to an 8-bit type."""
    with np.errstate(invalid="ignore"):
        ratio = x.astype(np.float32) / factor
    if dtype == "int8":
        return np.clip(np.rint(ratio), -127, 127).astype(np.int8)
    return np.clip(ratio, -448, 448).astype(eight_bit(dtype))


def make(case: Case) -> Call:
    rng = np.random.default_rng(case.seed)
    headdim_v = case.headdim if case.headdim_v is None else case.headdim_v

    def normal(*shape):
        return accuracy.round_to(rng.standard_normal(shape, dtype=np.float32), case.dtype)

    q = normal(case.batch, case.seqlen_q, case.nheads, case.headdim)
    new = {}
    if case.seqlen_new:
        new = {
            n: normal(case.batch, case.seqlen_new, case.nheads_k, d) for n, d in (("k", case.headdim), ("v", headdim_v))
        }
    entries = case.batch * max(case.pages, 1) + case.spare
    lengths = np.array([-1 if length is None else length for length in case.lengths], np.int32)
    where = {"cache_seqlens": lengths}
    order = rng.permutation(entries).astype(np.int32)
    if case.pages:
        table = order[: case.batch * case.pages].reshape(case.batch, case.pages)
        used = -(-(lengths + case.seqlen_new) // case.rows)
        used[lengths < 0] = 0
        nonsense = np.where(np.arange(case.pages) % 2, 2**31 - 1, -(2**31))
        where["block_table"] = np.where(np.arange(case.pages) < used[:, None], table, nonsense).astype(np.int32)
    elif case.batch_idx:
        where["cache_batch_idx"] = order[: case.batch]
    cache, scales = {}, {}
    for name, dim in (("k", case.headdim), ("v", headdim_v)):
        full = np.full((entries, case.rows, case.nheads_k, dim), np.nan, np.float32)
        factors = np.full((entries, case.rows, case.nheads_k), np.nan, np.float32)
        if case.scales == "entries":
            factors[:] = rng.uniform(0.5, 2, (entries, 1, case.nheads_k)).astype(np.float32)
        elif case.scales == "heads":
            factors[:] = rng.uniform(0.5, 2, case.nheads_k).astype(np.float32)
        for b, length in enumerate(lengths):
            for j in range(max(length, 0)):
                full[place(case, where, b, j)] = normal(case.nheads_k, dim)
        if case.cache_dtype is None:
            cache[f"{name}_cache"] = full
            continue
        most = 127 if case.cache_dtype == "int8" else 448
        with np.errstate(invalid="ignore"):
            if case.scales == "tokens":
                factors = (np.abs(full).max(-1) / np.float32(most)).astype(np.float32)
            else:
                factors *= np.float32(4 / most)
        stored = quantised(np.nan_to_num(full), np.where(np.isnan(factors), 1, factors)[..., None], case.cache_dtype)
        stored[np.isnan(full)] = 127 if case.cache_dtype == "int8" else np.nan
        cache[f"{name}_cache"] = stored
        shape = {"heads": factors[0, 0], "entries": factors[:, :1], "tokens": factors}
        scales[f"{name}_scale"] = np.ascontiguousarray(shape[case.scales])
    turn = {}
    if case.rotary_dim:
        positions = case.rotary_rows or case.capacity
        angle = np.outer(np.arange(positions), 100.0 ** -np.linspace(0, 1, case.rotary_dim // 2))
        dtype = "float32" if case.rotary_float32 else case.dtype
        turn = {f"rotary_{n}": accuracy.round_to(f(angle), dtype) for n, f in (("cos", np.cos), ("sin", np.sin))}
        turn["rotary_interleaved"] = case.rotary_interleaved
    options = {}
    for name in ("causal", "window_size", "softcap", "softmax_scale"):
        if getattr(case, name) != getattr(Case, name):
            options[name] = getattr(case, name)
    if case.alibi:
        options["alibi_slopes"] = rng.uniform(0.01, 0.5, (case.batch, case.nheads)[2 - case.alibi :]).astype(np.float32)
    if case.sinks:
        options["sinks"] = rng.standard_normal(case.nheads, dtype=np.float32)
    return Call(q, cache, new, where, turn, scales, options)


def place(case: Case, where: dict[str, np.ndarray], b: int, j: int) -> tuple[int, int]:
    """Entry and row of key j of sequence b."""
    if case.pages:
        return where["block_table"][b, j // case.rows], j % case.rows
    return (where["cache_batch_idx"][b] if case.batch_idx else b), j


def on_device(kernel: Kernel, case: Case, call: Call) -> dict[str, Any]:
    """The call's arrays as the kernel's framework has them."""
    arrays: dict[str, Any] = {"q": kernel.device.array(call.q, case.dtype)}
    for name, x in call.arrays.items():
        if name in ("k_cache", "v_cache") and case.cache_dtype:
            arrays[name] = bytes_on_device(kernel, x)
        elif name in ("k", "v", "k_cache", "v_cache"):
            arrays[name] = kernel.device.array(x, case.dtype)
        elif name in ("rotary_cos", "rotary_sin"):
            arrays[name] = kernel.device.array(x, "float32" if case.rotary_float32 else case.dtype)
        else:
            arrays[name] = kernel.device.array(x) if isinstance(x, np.ndarray) else x
    for name, x in call.options.items():
        arrays[name] = kernel.device.array(x) if isinstance(x, np.ndarray) else x
    if case.num_splits:
        arrays["num_splits"] = case.num_splits
    return {**arrays, "batch_invariant": case.batch_invariant, "kernel": kernel.name}


def bytes_on_device(kernel: Kernel, x: np.ndarray):
    """An 8-bit cache: frameworks that cannot convert to it take its bytes."""
    if kernel.device.framework == "numpy":
        return x.copy()
    if kernel.device.framework == "torch":
        raw = torch.tensor(x.view(np.uint8), device=kernel.device.name)
        return raw.view(torch.int8 if x.dtype == np.int8 else torch.float8_e4m3fn)
    if x.dtype != np.int8:
        pytest.skip("CuPy has no float8_e4m3fn")
    return kernel.device.array(x)


def from_device(kernel: Kernel, array) -> np.ndarray:
    if kernel.device.framework == "torch" and "float8" in str(array.dtype):
        return array.view(torch.uint8).cpu().numpy().view(eight_bit("float8_e4m3fn"))
    return kernel.device.numpy(array)


def run(kernel: Kernel, case: Case, call: Call):
    """out, pre-filled with NaN, lse, and the cache and factors after the call, as NumPy."""
    arrays = on_device(kernel, case, call)
    plan = fa.kvcache_query(**arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK" and plan.kernel == kernel.name, plan
    headdim_v = call.cache["v_cache"].shape[-1]
    out = kernel.device.nans((*call.q.shape[:3], headdim_v), case.dtype)
    got, lse = fa.flash_attn_with_kvcache(**arrays, out=out, return_softmax_lse=True)
    assert got is out
    names = [name for name in ("k_cache", "v_cache", "k_scale", "v_scale") if name in arrays]
    return kernel.device.numpy(out), kernel.device.numpy(lse), {n: from_device(kernel, arrays[n]) for n in names}


def check(kernel: Kernel, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Runs a case: what joined the cache is right and the rest of it untouched, and the attention is that over it."""
    call = make(case)
    out, lse, after = run(kernel, case, call)
    check_cache(case, call, after)

    # Attention over what the cache now holds, with q rotated and rounded as the kernels are given it.
    q = call.q.astype(np.float64)
    ordered = case.causal or max(case.window_size) >= 0
    for b, length in enumerate(case.lengths):
        if case.rotary_dim and length is not None:
            q[b] = rotated(case, call, q[b], length, ordered)
    q = accuracy.round_to(q.astype(np.float32), case.dtype) if case.rotary_dim else q
    exact, plain = expected(case, call, q, after)
    floor, turned = 2e-5 * (abs(case.softmax_scale or 1) + 1), 0.0
    if case.rotary_dim and case.dtype != "float32":
        turned = rounded_either_way(case, q, after)
    accuracy.check("lse", lse, exact[1], plain[1], "float32", floor=floor + turned)
    accuracy.check("out", out, exact[0], plain[0], case.dtype, floor=floor + 2 * turned * largest(case, after, "v"))
    return out, lse


def rounded_either_way(case: Case, q: np.ndarray, after: dict[str, np.ndarray]) -> float:
    """How far a score moves when one element of a rotated q, half way between two 16-bit numbers, goes to the other."""
    scale = case.headdim**-0.5 if case.softmax_scale is None else abs(case.softmax_scale)
    return scale * accuracy.EPSILON[case.dtype] * np.abs(q).max(initial=0) * largest(case, after, "k")


def largest(case: Case, after: dict[str, np.ndarray], name: str) -> float:
    values = np.abs(np.asarray(after[f"{name}_cache"], np.float64))
    if case.cache_dtype:
        values = values * np.broadcast_to(after[f"{name}_scale"], values.shape[:3])[..., None]
    return float(np.max(values, initial=0, where=np.isfinite(values)))


_expected: dict[tuple, tuple] = {}


def expected(case: Case, call: Call, q: np.ndarray, after: dict[str, np.ndarray]):
    """float64 and plain (out, lse) over a cache as a call left it; kernels that left the same one share them."""
    content = hashlib.sha256(b"".join(x.tobytes() for x in after.values())).digest()
    key = (replace(case, num_splits=0, batch_invariant=False), content)
    if key in _expected:
        return _expected[key]
    lengths = [-1 if length is None else length + case.seqlen_new for length in case.lengths]
    cache = {n: np.asarray(after[n], np.float32) for n in ("k_cache", "v_cache")}
    rest = {**call.where, **{n: after[n] for n in after if "scale" in n}, **call.options, "cache_seqlens": lengths}

    def one(*arrays, **options):
        return accuracy.plain_attention(*arrays, dtype=case.dtype, **options)

    results = [
        reference.kvcache_attention(q, **cache, **rest, attention=a) for a in (reference.standard_attention, one)
    ]
    if len(_expected) > 500:
        _expected.clear()
    return _expected.setdefault(key, results)


def rotated(case: Case, call: Call, x: np.ndarray, length: int, ordered: bool = True) -> np.ndarray:
    tables = call.rotary["rotary_cos"], call.rotary["rotary_sin"]
    at = np.minimum(length + np.arange(len(x)) * ordered, len(tables[0]) - 1)
    return reference.rotary(x, *tables, at, case.rotary_interleaved)


def check_cache(case: Case, call: Call, after: dict[str, np.ndarray]) -> None:
    """Appended rows hold the rotated keys and the values, to a rounding; every other byte is as it was."""
    for name in ("k", "v"):
        old, got = call.cache[f"{name}_cache"], after[f"{name}_cache"]
        touched = np.zeros(old.shape[:2], bool)
        for b, length in enumerate(case.lengths):
            if length is None or not case.seqlen_new:
                continue
            want = call.new[name][b].astype(np.float64)
            if name == "k" and case.rotary_dim:
                want = rotated(case, call, want, length)
            for t in range(case.seqlen_new):
                at = place(case, call.where, b, length + t)
                touched[at] = True
                row, step = np.asarray(got[at], np.float64), accuracy.EPSILON[case.dtype] * np.abs(want[t])
                if case.cache_dtype:
                    factor = after[f"{name}_scale"]
                    if case.scales == "tokens":
                        amax = np.abs(want[t]).max(-1)
                        most = 127 if case.cache_dtype == "int8" else 448
                        np.testing.assert_allclose(factor[at], np.where(amax == 0, 1, amax / most), rtol=1e-5)
                    factor = np.broadcast_to(factor, old.shape[:3])[at][:, None]
                    row = row * factor
                    # half a step of int8; of e4m3 a sixteenth of the value, or half its smallest step
                    step = 0.501 * factor if case.cache_dtype == "int8" else np.abs(want[t]) / 15.9 + 2**-10 * factor
                    want_row = np.clip(want[t], -factor * 448, factor * 448)
                    if case.cache_dtype == "int8":
                        want_row = np.clip(want[t], -factor * 127, factor * 127)
                else:
                    want_row = want[t]
                assert (np.abs(row - want_row) <= step + 1e-6).all(), f"{name}_cache row of sequence {b}, token {t}"
        rest = [(x.view(np.uint8) if case.cache_dtype else x)[~touched] for x in (old, got)]
        assert np.array_equal(*rest, equal_nan=not case.cache_dtype), f"{name}_cache changed outside the appended rows"
        if f"{name}_scale" in after and case.scales != "tokens":
            np.testing.assert_array_equal(after[f"{name}_scale"], call.scales[f"{name}_scale"])


DTYPES = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("seqlen_new", [0, 1, 5])
@pytest.mark.parametrize("batch_idx", [False, True])
def test_contiguous(kernel, dtype, seqlen_new, batch_idx):
    case = Case(dtype=dtype, seqlen_new=seqlen_new, seqlen_q=max(seqlen_new, 1), batch_idx=batch_idx, causal=True)
    check(kernel, case)
    check(kernel, replace(case, lengths=(None, 37, None, 75, 0, 9), seqlen_q=3, causal=False))
    check(kernel, replace(case, lengths=(None, None)))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 24, 64])
@pytest.mark.parametrize("float32", [False, True])
@DTYPES
def test_rotary(kernel, interleaved, rotary_dim, float32, dtype):
    case = Case(
        dtype=dtype, rotary_dim=rotary_dim, rotary_interleaved=interleaved, rotary_float32=float32,
        seqlen_q=4, seqlen_new=4, lengths=(10, None, 0, 76),
    )  # fmt: skip
    check(kernel, case)
    check(kernel, replace(case, causal=True))
    check(kernel, replace(case, window_size=(9, 3), rotary_rows=50))


@pytest.mark.parametrize("seqlen_q", [1, 2, 7, 16, 33, 64, 200])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (6, 2), (8, 8), (16, 2)])
def test_rows_and_heads(kernel, seqlen_q, heads):
    case = Case(seqlen_q=seqlen_q, seqlen_new=seqlen_q, lengths=(130, 0, 300), rows=520)
    case = replace(case, nheads=heads[0], nheads_k=heads[1], causal=True, headdim=32)
    check(kernel, case)


SCORES = [
    {"causal": True},
    {"window_size": (20, 0)},
    {"window_size": (0, 0), "causal": True},
    {"window_size": (7, 2)},
    {"softcap": 3.0, "causal": True},
    {"alibi": 1, "causal": True},
    {"alibi": 2},
    {"sinks": True, "causal": True},
    {"sinks": True, "window_size": (11, 0), "softcap": 2.0, "alibi": 2},
    {"softmax_scale": 0.3},
]


@pytest.mark.parametrize("scores", SCORES, ids=str)
def test_scores(kernel, scores):
    check(kernel, Case(seqlen_q=6, seqlen_new=2, lengths=(37, None, 0, 71), **scores))


def test_append_then_attend_equals_concatenation(kernel):
    """Token by token with a cache, and in one causal call without."""
    rng = np.random.default_rng(5)
    q, k, v = accuracy.round_to(rng.standard_normal((3, 2, 23, 4, 32), dtype=np.float32), "float16")
    k, v = k[:, :, :2], v[:, :, :2]
    at = kernel.device.array
    cache = [at(np.full((2, 40, 2, 32), np.nan, np.float32), "float16") for _ in "kv"]
    rows, start = [], 0
    for chunk in (1, 9, 1, 1, 7, 4):
        part = slice(start, start + chunk)
        arrays = [at(x[:, part], "float16") for x in (q, k, v)]
        options = {"cache_seqlens": start, "causal": True, "kernel": kernel.name}
        if fa.kvcache_query(arrays[0], *cache, *arrays[1:], **options).status != "FA_OK":
            assert not kernel.general
            pytest.skip("refuses")
        rows.append(kernel.device.numpy(fa.flash_attn_with_kvcache(arrays[0], *cache, *arrays[1:], **options)))
        start += chunk
    exact, _ = reference.standard_attention(q, k, v, causal=True)
    plain, _ = accuracy.plain_attention(q, k, v, "float16", causal=True)
    accuracy.check("out", np.concatenate(rows, axis=1), exact, plain, "float16")


def test_one_length_for_all(kernel):
    """An integer, an array of it, and None for a full cache are the same call."""
    case = Case(lengths=(79, 79), seqlen_new=1)
    call = make(case)
    arrays = on_device(kernel, case, call)
    if fa.kvcache_query(**arrays).status == "FA_UNSUPPORTED":
        pytest.skip("refuses")
    want = kernel.device.numpy(fa.flash_attn_with_kvcache(**arrays))
    for lengths in (79, np.int64(79), None):
        again = kernel.device.numpy(fa.flash_attn_with_kvcache(**{**arrays, "cache_seqlens": lengths}))
        np.testing.assert_array_equal(again, want)


def test_whole_call_against_the_reference(kernel):
    case = Case(rotary_dim=48, causal=True, seqlen_q=5, seqlen_new=5, lengths=(12, None, 60))
    call = make(case)
    exact, exact_lse = reference.kvcache_attention(call.q, **call.arrays, **call.options)
    out, lse, _ = run(kernel, case, call)
    np.testing.assert_allclose(out, exact, atol=2e-5, rtol=0)
    np.testing.assert_allclose(lse, exact_lse, atol=2e-5, rtol=0)


PAGE_SIZES = [1, 3, 16, 17, 64, 256]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@DTYPES
def test_pages(kernel, page_size, dtype):
    """Shuffled tables; unused pages are full of NaN, unused entries of the tables of nonsense."""
    case = Case(dtype=dtype, rows=page_size, pages=-(-300 // page_size), lengths=(37, None, 0, 297), causal=True)
    check(kernel, case)
    check(kernel, replace(case, seqlen_q=3, seqlen_new=3, nheads=6, nheads_k=3, window_size=(70, 0)))
    check(kernel, replace(case, seqlen_new=0, headdim=40, headdim_v=72, seqlen_q=70))


@pytest.mark.parametrize("page_size", [1, 16, 17])
def test_page_size_changes_no_bit(kernel, page_size):
    """Paged and contiguous caches with the same keys give the same bits on one kernel."""
    contiguous = make(Case(lengths=(100, 64, 3), seqlen_new=0, rows=128, spare=0, headdim=32, dtype="float16"))
    pages = 128 // page_size + 1
    order = np.random.default_rng(1).permutation(3 * pages).astype(np.int32)
    table = order.reshape(3, pages)
    paged = replace_arrays(contiguous, block_table=table)
    for name, x in contiguous.cache.items():
        whole = np.full((3, pages * page_size, *x.shape[2:]), np.nan, np.float32)
        whole[:, : x.shape[1]] = x[:, : whole.shape[1]]
        cache = np.empty((3 * pages, page_size, *x.shape[2:]), np.float32)
        cache[table] = whole.reshape(3, pages, page_size, *x.shape[2:])
        paged.cache[name] = cache
    case = Case(dtype="float16")
    results = [run(kernel, case, call)[:2] for call in (contiguous, paged)]
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


def replace_arrays(call: Call, **where) -> Call:
    return replace(call, cache=dict(call.cache), where={**call.where, **where})


CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "int8"])


@CACHE_DTYPES
@pytest.mark.parametrize("scales", SCALES)
@DTYPES
def test_eight_bit(kernel, cache_dtype, scales, dtype):
    case = Case(dtype=dtype, cache_dtype=cache_dtype, scales=scales, lengths=(37, None, 0, 71), causal=True)
    check(kernel, case)
    check(kernel, replace(case, seqlen_q=5, seqlen_new=5, rotary_dim=32, headdim=40, headdim_v=72))
    check(kernel, replace(case, seqlen_new=0, batch_idx=True, seqlen_q=33))
    check(kernel, replace(case, rows=17, pages=5, window_size=(30, 0)))
    if scales != "entries":  # with one row a page, (pages, 1, nheads_k) are the factors of tokens
        check(kernel, replace(case, rows=1, pages=75, headdim=8))


@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("seqlen_q", [1, 40])
@DTYPES
def test_latent_attention(kernel, cache_dtype, seqlen_q, dtype):
    """Multi-head latent attention: headdim 576, headdim_v 512, one key head."""
    case = Case(dtype=dtype, cache_dtype=cache_dtype, headdim=576, headdim_v=512, nheads=4, nheads_k=1, causal=True)
    case = replace(case, seqlen_q=seqlen_q, seqlen_new=seqlen_q, lengths=(130, None, 60), rows=64, pages=4)
    check(kernel, case)
    check(kernel, replace(case, rows=200, pages=0))


def test_values_that_are_columns_of_the_keys(kernel):
    """v_cache may be a view of k_cache."""
    rng = np.random.default_rng(3)
    latent = rng.standard_normal((5, 16, 1, 576), dtype=np.float32)
    q = rng.standard_normal((1, 2, 4, 576), dtype=np.float32)
    cache, table = kernel.device.array(latent), np.array([[4, 2, 0]], np.int32)
    arrays = {"cache_seqlens": kernel.device.array(np.array([41], np.int32)), "block_table": kernel.device.array(table)}
    call = {"q": kernel.device.array(q), "k_cache": cache, "v_cache": cache[..., :512], "kernel": kernel.name, **arrays}
    if fa.kvcache_query(**call).status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip("refuses")
    out = kernel.device.numpy(fa.flash_attn_with_kvcache(**call))
    exact, _ = reference.kvcache_attention(q, latent, latent[..., :512], cache_seqlens=[41], block_table=table)
    np.testing.assert_allclose(out, exact, atol=3e-5, rtol=0)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7, 64, 256])
def test_long_caches(kernel, num_splits):
    """Few rows against many keys: whoever cuts the keys into pieces puts them together again."""
    case = Case(lengths=(9000, 0, 5000, None), rows=9001, nheads=4, nheads_k=2, headdim=32, num_splits=num_splits)
    check(kernel, case)
    check(kernel, replace(case, window_size=(3100, 0), sinks=True, seqlen_q=3, seqlen_new=3, rows=9003))
    check(kernel, replace(case, rows=64, pages=141, causal=True, alibi=1, seqlen_q=2, dtype="float16"))


def test_row_alone_equals_row_in_a_batch(kernel):
    """batch_invariant: regrouping a batch changes no bit of a sequence's result."""
    case = Case(
        lengths=(5000, 3, 7001, 640, None), rows=7100, seqlen_q=2, seqlen_new=0, headdim=32, batch_invariant=True
    )
    call = make(case)
    arrays = on_device(kernel, case, call)
    if fa.kvcache_query(**arrays).status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip("refuses")
    whole = [kernel.device.numpy(x) for x in fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)]
    for rows in ([0], [1, 2], [4, 3, 2, 1, 0], [2], [3, 3, 3, 3, 3, 3, 3, 3]):
        part = {**arrays, "q": kernel.device.array(call.q[rows], case.dtype)}
        part["cache_seqlens"] = kernel.device.array(call.where["cache_seqlens"][rows])
        part["cache_batch_idx"] = kernel.device.array(np.array(rows, np.int32))
        for got, want in zip(fa.flash_attn_with_kvcache(**part, return_softmax_lse=True), whole, strict=True):
            np.testing.assert_array_equal(kernel.device.numpy(got), want[rows])


def test_equal_calls_give_equal_bits(kernel):
    case = Case(lengths=(5000, 3, 4097), rows=5100, seqlen_q=1, seqlen_new=0, headdim=32, dtype="float16")
    call = make(case)
    first, *others = [run(kernel, case, call)[:2] for _ in range(3)]
    for again in others:
        for one, two in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, two)


def test_threads_change_no_bit():
    """The keys of one head are cut by their number, and the pieces shared out to however many threads there are."""
    rng = np.random.default_rng(4)
    q = rng.standard_normal((1, 1, 2, 64), dtype=np.float32)
    cache = rng.standard_normal((2, 1, 40_000, 1, 64), dtype=np.float32)
    for lengths in (39_999, 3073):
        results = [
            fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, num_threads=n, return_softmax_lse=True)
            for n in (1, 2, 3, 16)
        ]
        exact = reference.kvcache_attention(q, *cache, cache_seqlens=[lengths])
        for got in results:
            for one, two, want in zip(got, results[0], exact, strict=True):
                np.testing.assert_array_equal(one, two)
                np.testing.assert_allclose(one, want, atol=2e-6, rtol=0)


def random_cases(st):
    """Everything the contract allows, small."""

    @st.composite
    def cases(draw):
        flags, options = st.booleans(), {}
        options["seqlen_new"] = draw(st.integers(0, 6))
        longest = draw(st.integers(options["seqlen_new"], 150))
        options["rows"] = draw(st.sampled_from([0, 0, 1, 2, 3, 16, 17, 64, 256]))
        if options["rows"]:
            options["pages"] = max(-(-longest // options["rows"]), 1)
        else:
            options |= {"rows": max(longest, 1), "batch_idx": draw(flags)}
        room = options["rows"] * options.get("pages", 1) - options["seqlen_new"]
        length = st.none() | st.integers(0, min(room, longest - options["seqlen_new"]))
        options["lengths"] = tuple(draw(st.lists(length, min_size=1, max_size=4)))
        options["spare"] = draw(st.integers(0, 3))
        options["nheads_k"] = draw(st.integers(1, 3))
        options["nheads"] = options["nheads_k"] * draw(st.sampled_from([1, 2, 3, 5, 8]))
        options["seqlen_q"] = draw(st.sampled_from([1, 1, 1, 2, 3, 7, 16, 40, 70]))
        dims = st.sampled_from([1, 8, 33, 40, 64, 72, 80, 96, 128, 192, 256])
        options["headdim"], options["headdim_v"] = draw(dims), draw(st.none() | dims)
        options["dtype"] = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
        options["cache_dtype"] = draw(st.sampled_from([None, None, "float8_e4m3fn", "int8"]))
        options["scales"] = draw(st.sampled_from(SCALES if options["rows"] > 1 else ("heads", "tokens")))
        options["causal"] = draw(flags)
        options["window_size"] = draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 160), st.integers(-1, 160)))
        options["softcap"] = draw(st.sampled_from([0.0, 0.0, 1.0, 30.0]))
        options["softmax_scale"] = draw(st.none() | st.floats(-1, 1, width=32))
        options["alibi"], options["sinks"] = draw(st.sampled_from([0, 0, 1, 2])), draw(flags)
        if options["seqlen_new"] and options["headdim"] > 1 and draw(flags):
            options["rotary_dim"] = 2 * draw(st.integers(1, options["headdim"] // 2))
            options["rotary_interleaved"], options["rotary_float32"] = draw(flags), draw(flags)
            options["rotary_rows"] = draw(st.sampled_from([0, 0, 5]))
        options["num_splits"] = draw(st.sampled_from([0, 0, 1, 2, 3, 256]))
        options["batch_invariant"], options["seed"] = draw(flags), draw(st.integers(0, 2**16))
        return Case(**options)

    return cases()


def test_random_calls(kernel):
    hypothesis = pytest.importorskip("hypothesis")
    examples = int(os.environ.get("FLASH_ATTN_TEST_EXAMPLES", "40"))
    health = list(hypothesis.HealthCheck)

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=examples, deadline=None, database=None, suppress_health_check=health)
    @hypothesis.given(random_cases(hypothesis.strategies))
    def run(case):
        try:
            check(kernel, case)
        except pytest.skip.Exception:
            pass

    try:
        run()
    except AssertionError as error:
        raise AssertionError(f"FLASH_ATTN_TEST_SEED={SEED}: {error}") from error


# ---- what is refused ----


def small(**change) -> dict[str, Any]:
    """A call that works, on the CPU, with changes."""
    call = {
        "q": np.zeros((2, 1, 4, 16), np.float32),
        "k_cache": np.zeros((3, 20, 2, 16), np.float32),
        "v_cache": np.zeros((3, 20, 2, 8), np.float32),
        "cache_seqlens": np.array([5, 19], np.int32),
    }
    return {**call, **change}


def appending(**change) -> dict[str, Any]:
    new = {"k": np.zeros((2, 1, 2, 16), np.float32), "v": np.zeros((2, 1, 2, 8), np.float32)}
    return small(**{**new, **change})


def paged(**change) -> dict[str, Any]:
    return small(**{"block_table": np.array([[0, 99], [1, 2]], np.int32), **change})


def int8(**change) -> dict[str, Any]:
    cache = {f"{n}_cache": np.zeros((3, 20, 2, d), np.int8) for n, d in (("k", 16), ("v", 8))}
    return small(**{**cache, "k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32), **change})


def rotating(**change) -> dict[str, Any]:
    tables = {"rotary_cos": np.ones((20, 4), np.float32), "rotary_sin": np.zeros((20, 4), np.float32)}
    return appending(**{**tables, **change})


def shared(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "v_cache": call["k_cache"][..., :8]}


def read_only(*shape):
    x = np.zeros(shape, np.float32)
    x.flags.writeable = False
    return x


def lengths(*values):
    return np.array(values, np.int32)


f4 = np.float32
REFUSED = [
    (small(q=np.zeros((2, 4, 16), f4)), r"q has shape \(2, 4, 16\)"),
    (small(q=np.zeros((2, 1, 4, 16))), "q is float64: expected float32, float16 or bfloat16"),
    (small(k_cache=np.zeros((20, 2, 16), f4)), r"k_cache has shape \(20, 2, 16\): expected \(entries, seqlen_cache"),
    (small(k_cache=np.zeros((3, 20, 2, 24), f4)), r"k_cache has shape .* headdim must agree"),
    (small(v_cache=np.zeros((3, 19, 2, 8), f4)), r"v_cache has shape .* all but headdim must agree"),
    (small(v_cache=np.zeros((3, 20, 2, 0), f4)), "headdim_v=0 is outside 1 .. 512"),
    (small(v_cache=np.zeros((3, 20, 2, 513), f4)), "headdim_v=513 is outside 1 .. 512"),
    (small(k_cache=np.zeros((3, 20, 2, 16), np.float16)), "k_cache is float16, v_cache is float32: expected"),
    (small(k_cache=np.zeros((3, 20, 2, 32), f4)[..., ::2]), "k_cache has stride 2 along its last axis"),
    (small(k_cache=np.zeros((3, 20, 3, 16), f4), v_cache=np.zeros((3, 20, 3, 8), f4)), "nheads=4 is not a multiple of"),
    (small(k_cache=np.zeros((1, 20, 2, 16), f4), v_cache=np.zeros((1, 20, 2, 8), f4)), "cache_batch=1 is below batch"),
    (small(q=np.zeros((2, 1, 4, 577), f4), k_cache=np.zeros((3, 20, 2, 577), f4)), "headdim=577 is outside 1 .. 576"),
    (shared(rotating()), "is k.data: values that are columns of the keys"),
    (shared(int8(k=np.zeros((2, 1, 2, 16), f4), v=np.zeros((2, 1, 2, 8), f4))), "is k.data: values that are columns"),
    (small(cache_seqlens=np.array([5, 19])), "cache_seqlens is int64: expected int32"),
    (small(cache_seqlens=lengths(5, 6, 7)), r"cache_seqlens has shape \(3,\): expected \(2,\)"),
    (small(cache_seqlens=lengths(1, 2, 3, 4)[::2]), "cache_seqlens has stride 2"),
    (small(cache_seqlens=lengths(5, 21)), r"cache_seqlens\[1\]=21 and seqlen_new=0 are more than the 20 keys"),
    (small(cache_seqlens=21), "cache_seqlens=21 and 0 new keys are more than the 20 keys of a cache entry"),
    (small(cache_seqlens=-1), "cache_seqlens=-1 is outside 0"),
    (small(cache_seqlens=True), "cache_seqlens is a builtins.bool"),
    (small(cache_seqlens=5.0), "cache_seqlens is a builtins.float"),
    (appending(cache_seqlens=lengths(5, 20)), r"cache_seqlens\[1\]=20 and seqlen_new=1 are more than the 20 keys"),
    (appending(cache_seqlens=20), "cache_seqlens=20 and 1 new keys are more than the 20 keys"),
    (appending(k=None), "k is None and v is not"),
    (appending(v=None), "v is None and k is not"),
    (appending(k=np.zeros((2, 1, 2, 8), f4)), r"k has shape \(2, 1, 2, 8\): expected \(2, seqlen_new, 2, 16\)"),
    (appending(v=np.zeros((2, 2, 2, 8), f4)), "seqlen_new must agree"),
    (appending(k=np.zeros((2, 1, 2, 16), np.float16)), "k is float16: expected float32"),
    (appending(k=np.zeros((2, 21, 2, 16), f4), v=np.zeros((2, 21, 2, 8), f4)), "seqlen_new=21 is above seqlen_k=20"),
    (appending(k_cache=read_only(3, 20, 2, 16)), "k_cache is a read-only NumPy array"),
    (appending(v_cache=read_only(3, 20, 2, 8)), "v_cache is a read-only NumPy array"),
    (appending(v_cache=np.broadcast_to(np.zeros(8, f4), (3, 20, 2, 8))), "v_cache is a read-only NumPy array"),
    (small(cache_batch_idx=lengths(0, 3)), r"cache_batch_idx\[1\]=3 is outside 0 .. 2, the entries of the cache"),
    (small(cache_batch_idx=lengths(-1, 0)), r"cache_batch_idx\[0\]=-1 is outside 0 .. 2"),
    (small(cache_batch_idx=lengths(0)), r"cache_batch_idx has shape \(1,\): expected \(2,\)"),
    (paged(cache_batch_idx=lengths(0, 1)), "cache_batch_idx and block_table are both set"),
    (paged(block_table=lengths(0, 1)), r"block_table has shape \(2,\): expected \(2, pages of a sequence\)"),
    (paged(block_table=np.zeros((2, 2))), "block_table is float64: expected int32"),
    (paged(block_table=np.array([[0], [3]], np.int32)), r"block_table\[1\]\[0\]=3 is outside 0 .. 2, the pages"),
    (paged(block_table=np.array([[-1], [1]], np.int32)), r"block_table\[0\]\[0\]=-1 is outside 0 .. 2, the pages"),
    (paged(cache_seqlens=lengths(21, 1)), r"block_table\[0\]\[1\]=99 is outside 0 .. 2"),
    (paged(cache_seqlens=lengths(5, 41)), r"cache_seqlens\[1\]=41 and seqlen_new=0 are more than the 40 keys"),
    (paged(k_cache=np.zeros((3, 0, 2, 16), f4), v_cache=np.zeros((3, 0, 2, 8), f4)), "a page has at least one row"),
    (small(k_scale=np.ones(2, f4)), "k_scale.data is set, but only an 8-bit cache has factors"),
    (int8(k_scale=None), "k_scale.data is NULL: an 8-bit cache needs the factors of k and v"),
    (int8(v_scale=None), "v_scale.data is NULL"),
    (int8(k_scale=np.ones(2)), "k_scale is float64: expected float32"),
    (int8(k_scale=np.ones((3, 20), f4)), r"k_scale has shape \(3, 20\): expected \(2,\), \(3, 1, 2\) or \(3, 20, 2\)"),
    (int8(v_cache=np.zeros((3, 20, 2, 8), f4)), "k_cache is int8, v_cache is float32"),
    (int8(k=np.zeros((2, 1, 2, 16), f4), v=np.zeros((2, 1, 2, 8), f4), k_scale=read_only(3, 20, 2), cache_seqlens=4),
     "k_scale is a read-only NumPy array"),
    (rotating(rotary_sin=None), "rotary_sin is None and rotary_cos is not"),
    (rotating(rotary_sin=np.zeros((20, 3), f4)), "rotary_sin is float32 .*, but rotary_cos is"),
    (rotating(rotary_cos=np.ones((20, 4))), "rotary_cos is float64: expected float32"),
    (rotating(rotary_cos=np.ones((20, 8), f4)[:, ::2]), "rotary_cos has strides .* it must be contiguous"),
    (rotating(rotary_cos=np.ones((20, 9), f4), rotary_sin=np.ones((20, 9), f4)), "rotary_dim=18 is not an even number"),
    (rotating(rotary_cos=np.ones((0, 4), f4), rotary_sin=np.ones((0, 4), f4)), "rotary_rows=0 is below 1"),
    (rotating(rotary_interleaved=2), "rotary_interleaved=2 is neither True nor False"),
    (rotating(k=None, v=None), "only a call that appends keys rotates"),
    (small(num_splits=257), "num_splits=257 is outside 0 .. 256"),
    (small(num_splits=-1), "num_splits=-1 is outside 0 .. 256"),
    (small(batch_invariant=3), "batch_invariant=3 is neither True nor False"),
    (small(causal="yes"), "causal='yes' is neither True nor False"),
    (small(out=np.zeros((2, 1, 4, 16), f4)), r"out is float32 \(2, 1, 4, 16\): expected float32 \(2, 1, 4, 8\)"),
    (small(out=read_only(2, 1, 4, 8)), "out is a read-only NumPy array"),
    (small(kernel="no_such"), "no_such"),
    (small(num_threads=5000), "num_threads=5000 is outside 0 .. 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_refused(call, text):
    """Nothing is written by a call that is refused, and the query says the same of what needs no contents."""
    before = {name: x.copy() for name, x in call.items() if isinstance(x, np.ndarray)}
    with pytest.raises((fa.BadArgument, fa.Unsupported), match=text):
        fa.flash_attn_with_kvcache(**call)
    for name, x in before.items():
        np.testing.assert_array_equal(call[name], x)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_repeated_steps(framework):
    """From its third call on a step takes the shortcut: other arrays, one length for all or an array of them, the end
    of the cache, a longer cache, and refusals are what they are on the long way."""
    if framework == "torch" and torch is None:
        pytest.skip("PyTorch is not installed")
    as_array = torch.from_numpy if framework == "torch" else np.asarray
    rng = np.random.default_rng(8)
    new = rng.standard_normal((24, 3, 2, 1, 2, 16), dtype=np.float32)  # (steps, q k v, batch, 1, heads, headdim)
    turn = np.outer(np.arange(24), [1.0, 0.1]).astype(np.float32)
    cos, sin = np.cos(turn), np.sin(turn)
    exact = [np.zeros((2, 24, 2, 16), np.float32) for _ in "kv"]
    for lengths_too in (False, True):
        cache = [as_array(np.full((2, 24, 2, 16), np.nan, np.float32)) for _ in "kv"]
        tables = {"rotary_cos": as_array(cos), "rotary_sin": as_array(sin), "return_softmax_lse": True}
        for t in range(25):
            length = as_array(np.full(2, t, np.int32)) if lengths_too else t
            q, k, v = (as_array(x.copy()) for x in new[t % 24])
            if t == 24:
                with pytest.raises(fa.BadArgument, match="24 .*1.* are more than the 24 keys"):
                    fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=length, **tables)
                continue
            out, lse = fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=length, **tables)
            assert type(out) is type(q)
            arrays = (np.asarray(q), *exact, np.asarray(k), np.asarray(v), cos, sin)
            want = reference.kvcache_attention(*arrays, cache_seqlens=t)
            np.testing.assert_allclose(out, want[0], atol=1e-5)
            np.testing.assert_allclose(lse, want[1], atol=1e-5)
            for b in range(2):
                exact[0][b, t] = reference.rotary(np.asarray(k)[b], cos, sin, [t])[0]
            exact[1][:, t] = np.asarray(v)[:, 0]
        q = as_array(new[0, 0].copy())
        out = as_array(np.zeros((2, 1, 2, 16), np.float32))
        for _ in range(4):
            assert fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=7, out=out) is out
        with pytest.raises(fa.BadArgument, match="out starts at the same address as q"):
            fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=7, out=q)
        with pytest.raises(fa.BadArgument, match="cache_seqlens=-3"):
            fa.flash_attn_with_kvcache(q, *cache, cache_seqlens=-3, out=out)


def test_left_padding_is_refused():
    with pytest.raises(fa.Unsupported, match="cache_leftpad is set"):
        fa.flash_attn_with_kvcache(**small(cache_leftpad=lengths(0, 0)))


def test_the_small_calls_work():
    """So that each refusal above is for its own reason."""
    for call in (small(), appending(cache_seqlens=lengths(5, 19)), paged(), int8(), rotating()):
        out, lse = fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
        assert out.shape == (2, 1, 4, 8) and lse.shape == (2, 4, 1) and np.isfinite(lse).all()


def test_the_query_needs_no_contents():
    plan = fa.kvcache_query(**paged(), kernel="cpu_portable")
    assert (plan.status, plan.kernel, plan.error) == ("FA_OK", "cpu_portable", "")
    assert plan.workspace_bytes > 0
    assert fa.kvcache_query(**small(num_splits=300)).error == "num_splits=300 is outside 0 .. 256"


# ---- what only a GPU has ----

on_gpu = pytest.mark.skipif(bool(NO_CUDA) or torch is None, reason=NO_CUDA or "needs PyTorch with CUDA")


@pytest.fixture
def cuda_kernel(kernel):
    if kernel.device.name != "cuda":
        pytest.skip("for the GPU's kernels")
    return kernel


def served(kernel: Kernel, arrays: dict[str, Any]) -> None:
    plan = fa.kvcache_query(**arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.status == "FA_OK", plan.error


@on_gpu
@pytest.mark.parametrize("pages", [0, 40])
def test_graph_whose_lengths_change(cuda_kernel, pages):
    """A captured step is replayed as the cache grows: the device reads lengths, entries, tables and new tokens."""
    case = Case(lengths=(0, None, 500), rows=16 if pages else 640, pages=pages, dtype="float16", rotary_dim=64)
    case = replace(case, causal=True, batch_idx=not pages, spare=0)
    call = make(case)
    if pages:  # all pages in order, so that every length is legal
        call.where["block_table"] = np.arange(3 * pages, dtype=np.int32).reshape(3, pages)[:, ::-1].copy()
    arrays = on_device(cuda_kernel, case, call)
    served(cuda_kernel, arrays)
    for name in ("k_cache", "v_cache"):
        arrays[name].normal_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa.flash_attn_with_kvcache(**arrays, return_softmax_lse=True)
    for step in ((0, -1, 500), (7, 0, 501), (639, 100, -1), (-1, -1, -1), (600, 638, 300)):
        arrays["cache_seqlens"].copy_(torch.tensor(step, dtype=torch.int32))
        for name in ("q", "k", "v"):
            arrays[name].normal_()
        cache = [arrays[name].clone() for name in ("k_cache", "v_cache")]
        out.fill_(float("nan"))
        graph.replay()
        after = [arrays[name].clone() for name in ("k_cache", "v_cache")]
        want, want_lse = fa.flash_attn_with_kvcache(
            **{**arrays, "k_cache": cache[0], "v_cache": cache[1]}, return_softmax_lse=True
        )
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
        assert all(torch.equal(one, two) for one, two in zip(after, cache, strict=True))


@on_gpu
@pytest.mark.parametrize("pages", [0, 4])
def test_wild_lengths_and_pages_stay_inside(cuda_kernel, pages):
    """What only the device knows cannot be refused: entries out of range are clamped and append nothing."""
    case = Case(lengths=(3, 30, 60), rows=16 if pages else 64, pages=pages, batch_idx=not pages, dtype="float16")
    arrays = on_device(cuda_kernel, case, make(case))
    served(cuda_kernel, arrays)
    for name in ("k_cache", "v_cache"):
        arrays[name].fill_(1)
    before = arrays["k_cache"].clone()
    wild = torch.tensor([64, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    lse = fa.flash_attn_with_kvcache(**{**arrays, "cache_seqlens": wild}, return_softmax_lse=True)[1]
    assert torch.equal(arrays["k_cache"], before) and torch.isneginf(lse[2]).all()
    name = "block_table" if pages else "cache_batch_idx"
    nonsense = torch.where(torch.arange(arrays[name].numel(), device="cuda") % 2 == 0, 2**31 - 1, -(2**31))
    wild = nonsense.to(torch.int32).reshape(arrays[name].shape)
    out = fa.flash_attn_with_kvcache(**{**arrays, name: wild})
    torch.cuda.synchronize()
    assert torch.equal(arrays["k_cache"], before) and (out == 1).all()


@on_gpu
@pytest.mark.parametrize("pages", [False, True])
def test_beyond_two_billion_elements(cuda_kernel, pages):
    entries, rows, heads = 33, 65536, 8  # 33 x 65536 x 8 x 128 = 2.2e9
    k_cache = torch.zeros(entries, rows, heads, 128, dtype=torch.float16, device="cuda")
    v_cache = torch.zeros_like(k_cache)
    k_cache[-1, -1, -1] = 1
    v_cache[-1, -1, -1] = 3
    q = torch.full((1, 1, 8, 128), 4.0, dtype=torch.float16, device="cuda")
    options = {"cache_seqlens": torch.tensor([rows - 1], dtype=torch.int32, device="cuda"), "kernel": cuda_kernel.name}
    where = torch.tensor([entries - 1], dtype=torch.int32, device="cuda")
    options["block_table" if pages else "cache_batch_idx"] = where[None] if pages else where
    new = torch.ones(1, 1, 8, 128, dtype=torch.float16, device="cuda")
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": new, "v": 3 * new, **options}
    served(cuda_kernel, arrays)
    out = fa.flash_attn_with_kvcache(**arrays)
    assert (k_cache[-1, -1] == 1).all() and (out == 3).all(), out
