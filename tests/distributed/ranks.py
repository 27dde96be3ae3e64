"""Calls across ranks for the tests: a case of accuracy.py is cut into the rows of each rank, and the results are
joined."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from dataclasses import dataclass, replace
from typing import Any

import accuracy
import numpy as np
import pytest
from conftest import CPU, CUDA, CUDA_DEVICES, NO_CUDA, Device

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_minimal import distributed as fad

# FLASH_ATTN_TEST_RANKS=8: every group of the tests has at least 8 ranks, which may share GPUs.
LEAST = int(os.environ.get("FLASH_ATTN_TEST_RANKS") or 1)

LAYOUTS = ("contiguous", "zigzag", "flat")
MODES = ("gather", "ulysses")
NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


@contextlib.contextmanager
def watchdog(seconds: float, groups=()):
    """Ends a test that would wait forever, by aborting its groups."""

    def bark():
        for group in groups:
            group.abort(f"the watchdog barked after {seconds} seconds")

    timer = threading.Timer(seconds, bark)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def shared_groups(size: int, device: Device = CPU) -> list[fad.Group]:
    """Groups that many tests share. A test that breaks groups makes its own."""
    return new_groups(size, device, timeout=60)


def new_groups(size: int, device: Device = CPU, timeout: float = 20.0) -> list[fad.Group]:
    if device is CPU:
        return fad.thread_groups(size, timeout=timeout)
    return fad.thread_groups(devices=[rank % CUDA_DEVICES for rank in range(size)], timeout=timeout)


def on(device: Device, rank: int) -> Device:
    """The device with a rank's arrays."""
    return device if device is CPU else Device(f"cuda:{rank % CUDA_DEVICES}", device.framework)


devices = [
    pytest.param(CPU, id="cpu"),
    pytest.param(CUDA, id="cuda", marks=pytest.mark.skipif(bool(NO_CUDA) or CUDA.framework != "torch", reason=NO_CUDA)),
]


@dataclass(frozen=True)
class Split:
    """The way in which ranks share a call."""

    size: int = 2
    layout: str = "zigzag"
    mode: str = "auto"
    groups: int = 0
    dense: bool = False  # arrays (batch, rows, heads, dim), for a case of equal lengths

    def __post_init__(self):
        object.__setattr__(self, "size", max(self.size, LEAST))


def lengths_of(case: accuracy.Case) -> tuple[np.ndarray, np.ndarray]:
    if case.varlen:
        return np.array(case.cu_seqlens_q), np.array(case.cu_seqlens_k)
    return np.arange(case.batch + 1) * case.seqlen_q, np.arange(case.batch + 1) * case.seqlen_k


def packed(x: np.ndarray, case: accuracy.Case) -> np.ndarray:
    return x if case.varlen else x.reshape(-1, *x.shape[2:])


def packed_lse(x: np.ndarray, case: accuracy.Case) -> np.ndarray:
    return x if case.varlen else x.transpose(1, 0, 2).reshape(x.shape[1], -1)


class Shards:
    """The rows of one rank."""

    def __init__(self, case: accuracy.Case, split: Split, rank: int):
        self.case, self.split, self.rank = case, split, rank
        self.cu_q, self.cu_k = lengths_of(case)
        place = split.layout, rank, split.size
        self.q, self.k = fad.indices(*place, self.cu_q), fad.indices(*place, self.cu_k)
        self.local = fad.local_cu_seqlens(*place, self.cu_q)
        self.positions = fad.positions(*place, self.cu_q)
        self.batch = len(self.cu_q) - 1

    def rows(self, x: np.ndarray, keys: bool = False) -> np.ndarray:
        """The rank's rows of q, out or dout; with keys=True, of k or v."""
        found = packed(x, self.case)[self.k if keys else self.q]
        return found.reshape(self.batch, -1, *found.shape[1:]) if self.split.dense else found

    def lse(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(packed_lse(x, self.case)[:, self.q])

    def scores(self, x: np.ndarray, fill: Any) -> np.ndarray:
        """The rank's rows of a bias or mask that has rows, as (batch, heads, the most rows of a sequence, keys)."""
        x = np.broadcast_to(x, (self.batch, *((1,) * (4 - x.ndim) + x.shape)[1:]))
        most = int(np.diff(self.local).max())
        cut = np.full((*x.shape[:2], most, x.shape[3]), fill, x.dtype)
        for b in range(self.batch):
            mine = self.positions[self.local[b] : self.local[b + 1]]
            cut[b, :, : mine.size] = x[b][:, mine]
        return cut

    def intervals(self, x: np.ndarray) -> np.ndarray:
        """startend_row_indices of all keys of whole sequences, padded to the longest: (batch, heads, keys, numbers)."""
        if not self.case.varlen:
            return x
        padded = np.full((self.batch, len(x), int(np.diff(self.cu_k).max()), x.shape[2]), 3, np.int32)
        for b in range(self.batch):
            padded[b, :, : self.cu_k[b + 1] - self.cu_k[b]] = x[:, self.cu_k[b] : self.cu_k[b + 1]]
        return padded

    def where(self) -> dict[str, Any]:
        split = self.split
        where = {"layout": split.layout, "mode": split.mode, "groups": split.groups}
        if split.dense:
            return where | {"seqlen_q": self.case.seqlen_q, "seqlen_k": self.case.seqlen_k}
        return where | {"cu_seqlens_q": self.cu_q, "cu_seqlens_k": self.cu_k}


def has_rows(x: np.ndarray) -> bool:
    return x.ndim >= 2 and x.shape[-2] > 1


def local_options(shards: Shards, options: dict[str, Any], device: Device) -> dict[str, Any]:
    """The options of a rank, with its rows of bias and mask. Rows that it does not have are NaN."""
    found = dict(options)
    for name in ("alibi_slopes", "sinks"):
        if name in found:
            found[name] = device.array(found[name])
    if "mask" in found:
        mask = found["mask"]
        found["mask"] = device.array(shards.scores(mask, True) if has_rows(mask) else mask)
    if "startend_row_indices" in found:
        found["startend_row_indices"] = device.array(shards.intervals(found["startend_row_indices"]))
    if "bias" in found:
        bias, dtype = found["bias"], shards.case.dtype
        exact = np.array_equal(accuracy.round_to(bias, dtype), bias)
        cut = shards.scores(bias, np.nan) if has_rows(bias) else bias
        found["bias"] = device.array(cut, dtype if exact else "float32")
    return found


def rank_of(
    group: fad.Group, case: accuracy.Case, split: Split, device: Device, backward: bool = True, **more: Any
) -> dict[str, np.ndarray]:
    """Runs both passes on one rank. Returns its rows {"out", "lse", "dq", ...} as NumPy arrays."""
    (q, k, v, options), _, _ = accuracy.expected(case)
    shards = Shards(case, split, group.rank)
    mine = {**local_options(shards, options, device), **more, **shards.where()}
    if device.name == "cpu":
        mine["num_threads"] = 1
    arrays = [device.array(shards.rows(x, keys), case.dtype) for x, keys in ((q, False), (k, True), (v, True))]
    given = device.nans((*arrays[0].shape[:-1], v.shape[-1]), case.dtype)
    out, lse = fad.forward(group, *arrays, return_lse=True, out=given, **mine)
    assert out is given
    found = {"out": out, "lse": lse}
    if backward:
        (dout, *_, all_options), exact, _ = accuracy.expected_backward(case)
        if case.dlse:
            mine["dlse"] = device.array(shards.lse(all_options["dlse"]))
        wanted = {f"return_{name}": getattr(exact, name) is not None for name in ("dbias", "dsinks")}
        results = [device.nans(x.shape, case.dtype) for x in arrays]
        places = dict(zip(NAMES[:3], results, strict=True))
        back = device.array(shards.rows(dout), case.dtype)
        gradients = fad.backward(group, back, *arrays, out, lse, **places, **wanted, **mine)
        assert all(x is y for x, y in zip(gradients, results, strict=False))
        names = [name for name in NAMES if name not in ("dbias", "dsinks") or wanted[f"return_{name}"]]
        found |= dict(zip(names, gradients, strict=True))
    return {name: device.numpy(x) for name, x in found.items()}


def compute(case: accuracy.Case, split: Split, device: Device = CPU, groups=None, backward: bool = True, **more: Any):
    """Runs both passes on all ranks, which are threads. Returns whole packed arrays {"out", "lse", "dq", ...} as
    NumPy."""
    accuracy.expected(case)  # kept for all ranks
    dbias = accuracy.expected_backward(case)[1].dbias if backward else None
    groups = groups or shared_groups(split.size, device)

    def rank(group: fad.Group) -> dict[str, np.ndarray]:
        return rank_of(group, case, split, on(device, group.rank), backward, **more)

    try:
        with watchdog(60, groups):
            parts = fad.run(groups, rank)
    except fa.RankLost:
        shared_groups.cache_clear()
        raise
    return together(case, [Shards(case, split, rank) for rank in range(split.size)], parts, dbias)


def together(case, cut: list[Shards], parts: list[dict], dbias) -> dict[str, np.ndarray]:
    """Whole packed arrays from those of the ranks."""
    whole = {}
    for name, first in parts[0].items():
        if name == "dsinks":
            assert all(np.array_equal(first, part[name]) for part in parts)  # the same bits on each
            whole[name] = first
        elif name == "dbias":
            whole[name] = _dbias(cut, [part[name] for part in parts], dbias)
        else:
            keys, axis = name in ("dk", "dv"), 1 if name == "lse" else 0
            rows = [part[name].reshape(-1, *part[name].shape[-2:]) if axis == 0 else part[name] for part in parts]
            index = np.argsort(np.concatenate([shards.k if keys else shards.q for shards in cut]))
            whole[name] = np.take(np.concatenate(rows, axis), index, axis)
    return whole


def _dbias(cut: list[Shards], parts: list[np.ndarray], exact: np.ndarray) -> np.ndarray:
    if not has_rows(exact):
        return np.sum(parts, axis=0, dtype=np.float64)
    batch = cut[0].batch
    whole = np.zeros((batch, *((1,) * (4 - exact.ndim) + exact.shape)[1:]))
    for shards, part in zip(cut, parts, strict=True):
        for b in range(batch):
            mine = shards.positions[shards.local[b] : shards.local[b + 1]]
            whole[b][:, mine] = part[b, :, : mine.size]
    padded = (1,) * (4 - exact.ndim) + exact.shape
    return whole.sum(axis=0, keepdims=True).reshape(exact.shape) if padded[0] == 1 else whole.reshape(exact.shape)


def check_case(case: accuracy.Case, split: Split, device: Device = CPU, backward: bool = True, **more: Any) -> dict:
    """Runs a case and compares it with float64."""
    got = compute(case, split, device, backward=backward, **more)
    check_results(case, got, backward)
    return got


def check_results(case: accuracy.Case, got: dict[str, np.ndarray], backward: bool = True) -> None:
    """Whole packed arrays against float64."""
    (q, k, *_), exact, plain = accuracy.expected(case)
    floor = accuracy.rounding_floor(q, k, case.softmax_scale)
    accuracy.check("lse", got["lse"], packed_lse(exact[1], case), packed_lse(plain[1], case), "float32", floor=floor)
    accuracy.check("out", got["out"], packed(exact[0], case), packed(plain[0], case), case.dtype, floor=floor)
    if not backward:
        return
    _, exact, plain = accuracy.expected_backward(case)
    for name in NAMES:
        if (right := getattr(exact, name)) is None:
            continue
        floor, dtype = accuracy.gradient_floor(case, right), case.dtype
        other = getattr(plain, name)
        if name == "dsinks":
            floor += _noise_of_dsinks(case)
        if name == "dbias":
            floor += _noise_of_dbias(case)
        if name in ("dbias", "dsinks"):
            dtype = "float32"
        else:
            right, other = packed(right, case), packed(other, case)
        accuracy.check(name, got[name], right, other, dtype, floor=floor)


def _noise_of_dsinks(case: accuracy.Case) -> float:
    """The error of dsinks from rounding out to the case's dtype (twice, if results are merged). dsinks is the sum over
    all rows of -exp(sink - lse) (dout . out). With 16-bit types the error is large; with few rows a plain
    implementation may by luck not have it."""
    (dout, _, _, _, out, lse, options), _, _ = accuracy.expected_backward(case)
    lse = packed_lse(lse, case)
    chance = np.exp(options["sinks"][:, None] - lse, where=np.isfinite(lse), out=np.zeros(lse.shape, np.float32))
    each = (packed(dout, case) * packed(out, case) * chance.T[:, :, None]) ** 2
    return float(2 * accuracy.EPSILON[case.dtype] * np.sqrt(each.sum(axis=(0, 2)).max(initial=0)))


def _noise_of_dbias(case: accuracy.Case) -> float:
    """The error of dbias from rounding out: dbias sums P (dP - dout . out) over rows that share a bias. Its variance is
    at most the sum of P (dout * out)^2, which is a gradient of v."""
    arrays, _, _ = accuracy.expected_backward(case)
    (dout, q, k, v, out, _, options), cu = arrays, (case.cu_seqlens_q, case.cu_seqlens_k)
    squares = np.square(np.asarray(dout, np.float64) * np.asarray(out, np.float64)).sum(-1, keepdims=True)
    spread = np.broadcast_to(squares, out.shape)
    options = {name: x for name, x in options.items() if name != "dlse"}
    backward = reference.standard_attention_backward
    if case.varlen:
        found = reference.varlen_backward(backward, spread, q, k, v, *cu, **options)
    else:
        found = backward(spread, q, k, v, **options)
    return float(accuracy.EPSILON[case.dtype] * np.sqrt(np.nanmax(found.dv, initial=0)))


def one_call(case: accuracy.Case, device: Device = CPU) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of flash_attn_varlen_func over all tokens."""
    (q, k, v, options), _, _ = accuracy.expected(case)
    cu = [device.array(x.astype(np.int32)) for x in lengths_of(case)]
    options = {
        name: device.array(x) if isinstance(x, np.ndarray) and name != "bias" else x for name, x in options.items()
    }
    if "bias" in options:
        options["bias"] = device.array(options["bias"], "float32" if case.bias_float32 else case.dtype)
    if device.name == "cpu":
        options["num_threads"] = 1
    arrays = [device.array(packed(x, case), case.dtype) for x in (q, k, v)]
    out, lse = fa.flash_attn_varlen_func(*arrays, *cu, case.seqlen_q, case.seqlen_k, return_lse=True, **options)
    return device.numpy(out), device.numpy(lse)


def small(**fields: Any) -> accuracy.Case:
    """A case of three sequences with odd lengths, and at least one head for each rank."""
    defaults = {"cu_seqlens_q": (0, 37, 50, 113), "cu_seqlens_k": (0, 37, 50, 113), "nheads": 4, "nheads_k": 2}
    case = accuracy.Case(**{**defaults, "headdim": 16, **fields})
    case = replace(case, nheads=case.nheads * -(-LEAST // case.nheads))
    if not case.varlen:
        return case
    longest = [int(np.diff(cu).max()) for cu in (case.cu_seqlens_q, case.cu_seqlens_k)]
    return replace(case, seqlen_q=longest[0], seqlen_k=longest[1])


# ---- a small call that any group can make ----

Q = np.random.default_rng(0).standard_normal((1, 8, 2, 16), dtype=np.float32)
OPTIONS = {"num_threads": 1}


def attend(group: fad.Group, tokens: int = 8, **options) -> np.ndarray:
    """Attention over equal keys, which gives the mean of the values: the same rows on every rank."""
    part = fad.shard(Q[:, :tokens], "zigzag", group.rank, group.size)
    return fad.forward(group, part, part, part, seqlen_q=tokens, **({"num_threads": 1} | options))


def still_works(groups) -> None:
    out = fad.unshard(fad.run(groups, attend), "zigzag")
    np.testing.assert_allclose(out, fa.flash_attn_func(Q, Q, Q), atol=1e-6)


def each(groups, function) -> list:
    """Calls function on every rank, on threads. Returns the error that each rank raised, or None."""
    raised = [None] * len(groups)

    def rank(group):
        try:
            function(group)
        except Exception as error:
            raised[group.rank] = error

    threads = [threading.Thread(target=rank, args=(group,)) for group in groups]
    with watchdog(30, groups):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return raised
