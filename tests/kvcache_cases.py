"""Calls with a cache, with arrays from a seed. They are judged against float64: the attention, and the keys and values
appended to the cache."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import accuracy
import numpy as np
import pytest
from conftest import Kernel, torch

import flash_attn_minimal as fa
from flash_attn_lab import reference

SCALES = ("heads", "entries", "tokens")  # (nheads_k,), (entries, 1, nheads_k), (entries, rows, nheads_k)


@dataclass(frozen=True)
class Case:
    """One call. Its arrays follow from the seed. Lengths are those before the call; None stands for an idle
    sequence."""

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
    attention_chunk: int = 0
    leftpads: tuple[int, ...] | None = None  # the padding of each sequence, at most its length
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: int = 0
    sinks: bool = False
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    rotary_float32: bool = False
    rotary_rows: int = 0  # 0: one for each position that a row can have
    num_splits: int = 0
    batch_invariant: bool = False
    shared_prefix: bool = False
    # Groups of sequences, and how many pages each has in common with the first, as far as neither appends to them.
    shares: tuple[tuple[tuple[int, ...], int], ...] = ()
    seed: int = 0

    @property
    def capacity(self) -> int:
        return self.rows * (self.pages or 1)

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def turns_beyond_tables(self) -> bool:
        """Whether a row has a position beyond the tables of the rotary embedding."""
        in_order = self.causal or max(self.window_size) >= 0 or self.attention_chunk > 0
        rows = max(self.seqlen_q if in_order else min(self.seqlen_q, 1), self.seqlen_new)
        lengths = [length for length in self.lengths if length is not None]
        return bool(self.rotary_dim and self.rotary_rows) and max(lengths, default=-rows) + rows > self.rotary_rows


@dataclass
class Call:
    """NumPy arrays of a case. Values that must not be read are NaN; such integers are nonsense."""

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
    if case.leftpads:
        where["cache_leftpad"] = np.array(case.leftpads, np.int32)
    order = rng.permutation(entries).astype(np.int32)
    if case.pages:
        table = order[: case.batch * case.pages].reshape(case.batch, case.pages)
        used = -(-(lengths + case.seqlen_new) // case.rows)
        used[lengths < 0] = 0
        nonsense = np.where(np.arange(case.pages) % 2, 2**31 - 1, -(2**31))
        where["block_table"] = np.where(np.arange(case.pages) < used[:, None], table, nonsense).astype(np.int32)
        for members, pages in case.shares:
            for b in members[1:]:
                common = max(min(pages, *(lengths[[members[0], b]] // case.rows)), 0)
                where["block_table"][b, :common] = where["block_table"][members[0], :common]
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
            keys = np.arange(case.leftpads[b] if case.leftpads else 0, max(length, 0))
            full[place(case, where, b, keys)] = normal(len(keys), case.nheads_k, dim)
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
        positions = case.rotary_rows or case.capacity + case.seqlen_q
        angle = np.outer(np.arange(positions), 100.0 ** -np.linspace(0, 1, case.rotary_dim // 2))
        dtype = "float32" if case.rotary_float32 else case.dtype
        turn = {f"rotary_{n}": accuracy.round_to(f(angle), dtype) for n, f in (("cos", np.cos), ("sin", np.sin))}
        turn["rotary_interleaved"] = case.rotary_interleaved
    options = {}
    for name in ("causal", "window_size", "attention_chunk", "softcap", "softmax_scale"):
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
    """The call's arrays as arrays of the kernel's framework."""
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
    if case.shared_prefix:
        arrays["shared_prefix"] = True
    return {**arrays, "batch_invariant": case.batch_invariant, "kernel": kernel.name}


def bytes_on_device(kernel: Kernel, x: np.ndarray):
    """An 8-bit cache on the device. Frameworks that cannot convert to its dtype take it as bytes."""
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
    """Makes the call. Returns out, which was filled with NaN before, lse, and the cache and factors after the call, as
    NumPy arrays."""
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


def check(kernel: Kernel, case: Case) -> tuple[np.ndarray, np.ndarray] | None:
    """Runs a case. Checks that appended rows are right, that the rest of the cache is unchanged, and that the result is
    attention over this cache."""
    call = make(case)
    if case.turns_beyond_tables and kernel.device.framework == "numpy":  # the CPU refuses; a GPU uses the last row
        with pytest.raises(fa.BadArgument, match=f"rotary_cos has {case.rotary_rows} rows, but sequence . needs"):
            run(kernel, case, call)
        return None
    out, lse, after = run(kernel, case, call)
    check_cache(case, call, after)

    # Attention over the new contents of the cache, with q rotated and rounded as in the kernels.
    q = call.q.astype(np.float64)
    ordered = case.causal or max(case.window_size) >= 0 or case.attention_chunk > 0
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
    """How much a score changes if one element of a rotated q, half way between two 16-bit numbers, is rounded the other
    way."""
    scale = case.headdim**-0.5 if case.softmax_scale is None else abs(case.softmax_scale)
    return scale * accuracy.EPSILON[case.dtype] * np.abs(q).max(initial=0) * largest(case, after, "k")


def largest(case: Case, after: dict[str, np.ndarray], name: str) -> float:
    values = np.abs(np.asarray(after[f"{name}_cache"], np.float64))
    if case.cache_dtype:
        values = values * np.broadcast_to(after[f"{name}_scale"], values.shape[:3])[..., None]
    return float(np.max(values, initial=0, where=np.isfinite(values)))


_expected: dict[tuple, tuple] = {}


def expected(case: Case, call: Call, q: np.ndarray, after: dict[str, np.ndarray]):
    """float64 and plain (out, lse) over the cache after a call. Kernels that leave the same cache share them."""
    content = hashlib.sha256(b"".join(x.tobytes() for x in after.values())).digest()
    key = (replace(case, num_splits=0, batch_invariant=False, shared_prefix=False), content)
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
    """Checks that appended rows hold the rotated keys and the values, up to rounding, and that no other byte has
    changed."""
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
                    # half a step: in int8 half a factor; in e4m3 1/16 of the value, or half the smallest step
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
