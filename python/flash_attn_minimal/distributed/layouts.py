"""Layouts: which rank holds which tokens, and functions that split arrays that way and join them again.

    contiguous   every sequence is cut into `size` chunks; rank r holds chunk r of each
    zigzag       every sequence is cut into 2 size chunks; rank r holds chunks r and 2 size - 1 - r: equal work under a
                 causal mask
    flat         all sequences together are cut into `size` chunks: the fewest and largest transfers

The rows of a rank's arrays are its tokens, in the order of the sequences and within each sequence in its order.
"""

from __future__ import annotations

import ctypes as ct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _arrays
from .._core.checks import integer, one_of, quoted
from .._core.options import Array
from ..errors import BadArgument
from ._structs import LAYOUTS, MOST_RANKS, Segment, load

_MOST_TOKENS = 2**31 - 1


def host_lengths(name: str, cu_seqlens: Any) -> np.ndarray:
    """cu_seqlens as int32 in host memory; the library checks the values."""
    try:
        given = np.asarray(cu_seqlens)
    except (TypeError, ValueError, RuntimeError):
        given = np.empty(0, object)
    if given.ndim != 1 or given.dtype.kind not in "iu" or not given.size:
        raise BadArgument(f"{name}={quoted(cu_seqlens)} is no sequence of integers in host memory")
    if given.dtype != np.int32:
        if not -_MOST_TOKENS <= int(given.min()) <= int(given.max()) <= _MOST_TOKENS:
            raise BadArgument(f"{name}={quoted(cu_seqlens)} has numbers beyond an int32")
        given = given.astype(np.int32)
    return np.ascontiguousarray(given)


def equal_lengths(batch: int, length: int) -> np.ndarray:
    """cu_seqlens for a batch of sequences of equal length."""
    if batch * length > _MOST_TOKENS:
        raise BadArgument(f"a batch of {batch} sequences of {length} tokens: together beyond an int32")
    return np.arange(batch + 1, dtype=np.int32) * np.int32(length)


def check_flat(layout: str, batch: int) -> None:
    if layout == "flat" and batch > 1:
        raise BadArgument(f"layout='flat' with a dense batch of {batch}: ranks may hold unequal parts of its sequences")


def segments(layout: str, rank: int, size: int, cu_seqlens: Any) -> np.ndarray:
    """The tokens of a rank, (n, 3) int32: rows (sequence, begin, end) for the tokens begin .. end - 1 of a sequence.
    The rank's arrays hold the tokens of these rows, one row after another.

    >>> from flash_attn_minimal.distributed import segments
    >>> segments("zigzag", 1, 2, [0, 8, 12]).tolist()
    [[0, 2, 4], [0, 4, 6], [1, 1, 2], [1, 2, 3]]
    """
    number = LAYOUTS[one_of("layout", layout, LAYOUTS)]
    size = integer("size", size, 1, MOST_RANKS)
    rank = integer("rank", rank, 0, size - 1)
    return _segments(number, rank, size, host_lengths("cu_seqlens", cu_seqlens))


def _segments(layout: int, rank: int, size: int, cu: np.ndarray) -> np.ndarray:
    most, count = 2 * cu.size, ct.c_int64()
    found = np.empty((most, 3), np.int32)
    load().fa_distributed_segments(
        layout, rank, size, cu.size - 1, cu.ctypes.data_as(ct.POINTER(ct.c_int32)),
        found.ctypes.data_as(ct.POINTER(Segment)), most, ct.byref(count),
    )  # fmt: skip
    return found[: count.value]


def _spread(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """first[i] .. first[i] + lengths[i] - 1 for each i, concatenated."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(first - (ends - lengths), lengths)


def indices(layout: str, rank: int, size: int, cu_seqlens: Any) -> np.ndarray:
    """For each row of the rank, its row in the packed array of all tokens, int64."""
    cu = host_lengths("cu_seqlens", cu_seqlens).astype(np.int64)
    sequence, begin, end = segments(layout, rank, size, cu_seqlens).astype(np.int64).T
    return _spread(cu[sequence] + begin, end - begin)


def positions(layout: str, rank: int, size: int, cu_seqlens: Any) -> np.ndarray:
    """For each row of the rank, its position in its sequence, int64, as a rotary embedding needs it."""
    _, begin, end = segments(layout, rank, size, cu_seqlens).astype(np.int64).T
    return _spread(begin, end - begin)


def local_cu_seqlens(layout: str, rank: int, size: int, cu_seqlens: Any) -> np.ndarray:
    """Where the rows of each sequence begin in the rank's arrays, (batch + 1,) int32."""
    batch = host_lengths("cu_seqlens", cu_seqlens).size - 1
    return _local(segments(layout, rank, size, cu_seqlens), batch)


def _local(found: np.ndarray, batch: int) -> np.ndarray:
    lengths = np.zeros(batch + 1, np.int32)
    np.add.at(lengths, found[:, 0] + 1, found[:, 2] - found[:, 1])
    return np.cumsum(lengths, dtype=np.int32)


def shard(x: Array, layout: str, rank: int, size: int, cu_seqlens: Any = None, axis: int | None = None) -> Array:
    """A copy of the rank's rows of an array of all tokens. Arrays of NumPy, PyTorch, CuPy and JAX.

    cu_seqlens: None for a dense array (batch, seqlen, ...) of equal lengths; otherwise the array is packed, (total,
    ...). axis: the axis of the tokens, if it is not 1 (dense) or 0 (packed).
    """
    axis, length = _axis(x, cu_seqlens, axis)
    return _take(x, indices(layout, rank, size, _whole(layout, x, cu_seqlens, length, "x")), axis)


def unshard(parts: Sequence[Array], layout: str, cu_seqlens: Any = None, axis: int | None = None) -> Array:
    """The array of all tokens, joined from the rows of each rank: the inverse of shard. To join lse, (nheads, rows),
    pass axis=1 and cu_seqlens, also for equal lengths."""
    size = len(parts)
    if not size:
        raise BadArgument("parts=[]: one array for each rank")
    where, _ = _axis(parts[0], cu_seqlens, axis)
    length = sum(part.shape[where] for part in parts)
    cu = _whole(layout, parts[0], cu_seqlens, length, "parts")
    rows = [indices(layout, rank, size, cu) for rank in range(size)]
    for rank, (part, wanted) in enumerate(zip(parts, rows, strict=True)):
        if part.shape[where] != wanted.size:
            raise BadArgument(
                f"parts[{rank}] has shape {tuple(part.shape)}: rank {rank} of {size} holds {wanted.size} of the "
                f"{length} tokens"
            )
    return _take(_concatenate(parts, where), np.argsort(np.concatenate(rows)), where)


def _axis(x: Any, cu_seqlens: Any, axis: int | None) -> tuple[int, int]:
    """The axis of the tokens, and its length."""
    rank = len(x.shape)
    default = 1 if cu_seqlens is None else 0
    where = default if axis is None else integer("axis", axis, -rank, rank - 1) % rank
    if where >= rank:
        raise BadArgument(f"an array of shape {tuple(x.shape)} has no axis {where} of tokens")
    return where, x.shape[where]


def _whole(layout: str, x: Any, cu_seqlens: Any, length: int, name: str) -> np.ndarray:
    if cu_seqlens is None:
        check_flat(layout, x.shape[0])
        return np.array([0, length], np.int32)
    cu = host_lengths("cu_seqlens", cu_seqlens)
    if cu[-1] != length:
        raise BadArgument(f"{name} has {length} tokens, but cu_seqlens ends at {cu[-1]}")
    return cu


def _take(x: Any, rows: np.ndarray, axis: int) -> Any:
    if isinstance(x, np.ndarray):
        return x.take(rows, axis)  # indexing could give another memory layout
    return x[(slice(None),) * axis + (rows,)]


def _concatenate(parts: Sequence[Any], axis: int) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    for module, kind, function in (("torch", "Tensor", "cat"), ("cupy", "ndarray", "concatenate")):
        if _arrays._is_a(parts[0], module, kind):
            return getattr(sys.modules[module], function)(tuple(parts), axis)
    if _arrays._is_a(parts[0], "jax", "Array"):
        return sys.modules["jax"].numpy.concatenate(parts, axis)
    raise BadArgument(f"parts[0] is a {type(parts[0]).__name__}: expected an array of NumPy, PyTorch, CuPy or JAX")
