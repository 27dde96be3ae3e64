"""Makers of masks by intervals: for each key the rows that do not see it, as startend_row_indices.

Each maker returns the options of a call, causal and startend_row_indices, for n rows and as many keys:

    flash_attn_func(q, k, v, **masks.shared_prompt([1024], [[300, 200, 400]], like=q))

With like=q the numbers are an array of q's framework on q's device, otherwise of NumPy. docs/masks.md has a drawing of
each. Rows and keys count from the start of the sequence, so the makers are for calls where both are the same tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from ._arrays import _is_a, _kind, to_numpy
from ._core.checks import flag, integer, quoted
from .errors import BadArgument

__all__ = [
    "RowMask", "block_causal", "block_diffusion", "documents", "global_and_window", "prefix_lm", "shared_prompt",
    "shared_prompt_positions", "stack", "tree", "window",
]  # fmt: skip


class RowMask(TypedDict):
    """The options of a call: flash_attn_func(q, k, v, **mask)."""

    causal: bool
    startend_row_indices: Any  # (1, 1, n, numbers) int32; stack makes (batch, 1, n, numbers)


def documents(lengths: Sequence[int], causal: bool = True, like: Any = None) -> RowMask:
    """Documents one after the other: a row sees the keys of its own document.

    >>> documents([2, 3])["startend_row_indices"].ravel()  # the end of the key's document
    array([2, 2, 5, 5, 5], dtype=int32)
    """
    begin, end = _ranges("lengths", lengths)
    return _mask([end], like, True) if flag("causal", causal) else _mask([end, begin], like)


def prefix_lm(prefixes: Sequence[int], lengths: Sequence[int], like: Any = None) -> RowMask:
    """Documents one after the other: the first prefixes[i] tokens of document i see each other in both directions, and
    the rest is causal.

    >>> prefix_lm([2], [4])["startend_row_indices"][0, 0].T  # hidden from the end on, and before the second number
    array([[4, 4, 4, 4],
           [0, 0, 2, 3]], dtype=int32)
    """
    begin, end = _ranges("lengths", lengths)
    sizes = _lengths("prefixes", prefixes)
    if len(sizes) != len(lengths):
        raise BadArgument(f"prefixes has {len(sizes)} entries, but lengths has {len(lengths)}")
    for i, (prefix, length) in enumerate(zip(sizes, lengths, strict=True)):
        if prefix > length:
            raise BadArgument(f"prefixes[{i}]={prefix} is above lengths[{i}]={length}")
    key = np.arange(len(end))
    prefix = np.repeat(sizes, lengths)
    return _mask([end, np.where(key < begin + prefix, begin, key)], like)


def shared_prompt(prompts: Sequence[int], answers: Sequence[Sequence[int]], like: Any = None) -> RowMask:
    """Prompts with several answers each: the tokens of prompt 0, of its answers one after the other, then those of
    prompt 1, ... An answer sees its prompt and itself; all is causal. answers: for each prompt the lengths of its
    answers. shared_prompt_positions gives the positions of the tokens in their texts.

    >>> shared_prompt([2], [[1, 2]])["startend_row_indices"].ravel()
    array([5, 5, 3, 5, 5], dtype=int32)
    """
    lengths = _prompts(prompts, answers)
    end, first = [], 0
    for prompt, *rest in lengths:
        last = first + prompt + sum(rest)
        end.append(np.full(prompt, last))
        first += prompt
        for answer in rest:
            end.append(np.full(answer, first + answer))
            first += answer
    return _mask([np.concatenate(end) if end else np.zeros(0, int)], like, True)


def shared_prompt_positions(prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> np.ndarray:
    """(n,) int64: the position of each token of shared_prompt in its own text, for a rotary embedding. Every answer
    goes on where its prompt ends.

    >>> shared_prompt_positions([2], [[1, 2]])
    array([0, 1, 2, 2, 3])
    """
    lengths = _prompts(prompts, answers)
    runs: list[np.ndarray] = []
    for prompt, *rest in lengths:
        runs += [np.arange(prompt), *(np.arange(prompt, prompt + answer) for answer in rest)]
    return np.concatenate(runs).astype(np.int64) if runs else np.zeros(0, np.int64)


def tree(lengths: Sequence[int], parents: Sequence[int], like: Any = None) -> RowMask:
    """A tree of turns, such as a chat with several continuations: turn i has lengths[i] tokens and goes on from turn
    parents[i], -1 for a first turn. A token sees the turns from the root to its own, all causal. The turns come in
    depth-first order: parents[i] is turn i - 1 or a turn that turn i - 1 goes back to.

    >>> tree([2, 1, 1, 1], [-1, 0, 1, 0])["startend_row_indices"].ravel()  # turns 1 and 2 end where turn 3 begins
    array([5, 5, 4, 4, 5], dtype=int32)
    """
    sizes = _lengths("lengths", lengths)
    parents = [integer(f"parents[{i}]", x, -1, i - 1) for i, x in enumerate(parents)]
    if len(parents) != len(lengths):
        raise BadArgument(f"parents has {len(parents)} entries, but lengths has {len(lengths)}")
    path: list[int] = []  # from a first turn to the turn before this one
    starts = np.cumsum([0, *sizes])
    last = np.full(len(parents), starts[-1])  # the row after the last one that goes on from the turn
    for i, parent in enumerate(parents):
        if parent >= 0 and parent not in path:
            raise BadArgument(
                f"parents[{i}]={parent} is not among turns {path}, which turn {i - 1} goes on from: turns come in "
                "depth-first order"
            )
        while path and path[-1] != parent:
            last[path.pop()] = starts[i]
        path.append(i)
    return _mask([np.repeat(last, np.diff(starts))], like, True)


def window(seqlen: int, left: int, right: int = 0, like: Any = None) -> RowMask:
    """Row i sees the keys i - left .. i + right, as window_size=(left, right) does. right=0 is causal.

    >>> window(4, 1)["startend_row_indices"].ravel()
    array([2, 3, 4, 4], dtype=int32)
    """
    n, left, right = _sizes(seqlen, left, right)
    key = np.arange(n)
    end, begin = np.minimum(key + left + 1, n), np.maximum(key - right, 0)
    return _mask([end], like, True) if right == 0 else _mask([end, begin], like)


def global_and_window(seqlen: int, first: int, left: int, right: int = 0, like: Any = None) -> RowMask:
    """The first `first` tokens are global: every row sees them, as far as causal allows. Other keys are seen within a
    window. With right=0 all is causal (attention with sink tokens); otherwise the global rows see every key, too.

    >>> global_and_window(5, 1, 1)["startend_row_indices"].ravel()
    array([5, 3, 4, 5, 5], dtype=int32)
    """
    n, left, right = _sizes(seqlen, left, right)
    first = integer("first", first, 0, n)
    key = np.arange(n)
    is_global = key < first
    end = np.where(is_global, n, np.minimum(key + left + 1, n))
    if right == 0:
        return _mask([end], like, True)
    # Of the rows outside of the window the global ones, which come first, see the key.
    late = np.maximum(end, np.minimum(first, n))
    begin = np.where(is_global, 0, np.minimum(first, n))
    return _mask([late, np.full(n, n), begin, np.where(is_global, 0, np.maximum(key - right, 0))], like)


def block_causal(seqlen: int, block: int, like: Any = None) -> RowMask:
    """Blocks of this many tokens: a row sees its own block whole, and all blocks before it.

    >>> block_causal(4, 2)["startend_row_indices"][0, 0].T
    array([[4, 4, 4, 4],
           [0, 0, 2, 2]], dtype=int32)
    """
    n, block = integer("seqlen", seqlen, 0, 2**31 - 1), integer("block", block, 1, 2**31 - 1)
    return _mask([np.full(n, n), np.arange(n) // block * block], like)


def block_diffusion(seqlen: int, block: int, like: Any = None) -> RowMask:
    """Training of block diffusion (BD3-LM, arXiv 2503.09573): seqlen noisy tokens, then the same seqlen tokens clean,
    in blocks. A noisy block sees itself whole, and the clean blocks before it. A clean block sees itself whole, and
    the clean blocks before it. The mask is for 2 seqlen tokens.

    >>> block_diffusion(4, 2)["startend_row_indices"].shape
    (1, 1, 8, 4)
    """
    n, block = integer("seqlen", seqlen, 0, 2**30), integer("block", block, 1, 2**31 - 1)
    begin = np.arange(n) // block * block
    end = np.minimum(begin + block, n)
    zero, all_rows = np.zeros(n, int), np.full(n, 2 * n)
    noisy = [end, all_rows, zero, begin]
    clean = [np.full(n, n), n + begin, zero, end]
    return _mask([np.concatenate(x) for x in zip(noisy, clean, strict=True)], like)


def stack(masks: Sequence[RowMask], like: Any = None) -> RowMask:
    """A batch of masks of one maker, for sequences that are padded at their ends to the longest. No row sees padding.
    Masks that are batches themselves follow one another.

    >>> batch = stack([documents([2, 3]), documents([4])])
    >>> batch["startend_row_indices"].shape, batch["startend_row_indices"][1, 0, :, 0].tolist()
    ((2, 1, 5, 1), [4, 4, 4, 4, 0])
    """
    given = [_given(f"masks[{i}]", mask) for i, mask in enumerate(masks)]
    if not given:
        raise BadArgument("masks is empty: a batch has one mask or more")
    kinds = {(causal, x.shape[-1]) for causal, x in given}
    if len(kinds) > 1:
        raise BadArgument(f"masks have different causal and numbers, {sorted(kinds)}: they are all the same")
    ((causal, numbers),) = kinds
    heads = max(x.shape[1] for _, x in given)
    if unlike := sorted({x.shape[1] for _, x in given} - {1, heads}):
        raise BadArgument(f"masks have numbers of {unlike[0]} and of {heads} heads: they have 1 or all the same")
    longest = max(x.shape[2] for _, x in given)
    hidden = [0] if numbers == 1 else [0, longest] if causal else [0, 0] if numbers == 2 else [0, longest, 0, 0]
    found = np.empty((sum(len(x) for _, x in given), heads, longest, numbers), np.int32)
    found[:], entry = hidden, 0
    for _, x in given:
        found[entry : entry + len(x), :, : x.shape[2]] = x
        entry += len(x)
    return {"causal": causal, "startend_row_indices": _on(like, found)}


# ---- the parts of makers ----


def _lengths(name: str, lengths: Sequence[int]) -> list[int]:
    try:
        given = [*lengths]
    except TypeError:
        raise BadArgument(f"{name}={quoted(lengths)} is no sequence of integers") from None
    return [integer(f"{name}[{i}]", x, 0, 2**31 - 1) for i, x in enumerate(given)]


def _ranges(name: str, lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each token, where its document begins and ends."""
    sizes = np.array(_lengths(name, lengths), np.int64)
    ends = np.cumsum(sizes)
    return np.repeat(ends - sizes, sizes), np.repeat(ends, sizes)


def _prompts(prompts: Sequence[int], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each prompt its length and those of its answers."""
    own = _lengths("prompts", prompts)
    if len(own) != len(answers):
        raise BadArgument(f"answers has {len(answers)} entries, but prompts has {len(own)}")
    return [[prompt, *_lengths(f"answers[{i}]", answers[i])] for i, prompt in enumerate(own)]


def _sizes(seqlen: int, left: int, right: int) -> tuple[int, int, int]:
    n = integer("seqlen", seqlen, 0, 2**31 - 1)
    return n, integer("left", left, 0, 2**31 - 1), integer("right", right, 0, 2**31 - 1)


def _mask(numbers: Sequence[np.ndarray], like: Any, causal: bool = False) -> RowMask:
    """The options of a mask from the numbers of all keys, one array for each."""
    columns = np.stack(numbers, axis=-1).astype(np.int32)[None, None]  # (1, 1, n, numbers)
    return {"causal": causal, "startend_row_indices": _on(like, columns)}


def _given(name: str, mask: Any) -> tuple[bool, np.ndarray]:
    """causal and the numbers of a mask, checked."""
    if not isinstance(mask, Mapping) or not {"causal", "startend_row_indices"} <= {*mask}:
        raise BadArgument(f"{name}={quoted(mask)} is no mask: expected what the makers of masks return")
    numbers = to_numpy(mask["startend_row_indices"])
    if numbers.ndim != 4:
        raise BadArgument(f"{name} has numbers of shape {numbers.shape}: expected (batch, heads, seqlen, numbers)")
    return bool(flag(f"{name}['causal']", mask["causal"])), numbers


def _on(like: Any, numbers: np.ndarray) -> Any:
    """The numbers as an array of the framework of `like`, on its device."""
    if like is None or isinstance(like, np.ndarray):
        return numbers
    if _is_a(like, "torch", "Tensor"):
        return sys.modules["torch"].from_numpy(numbers).to(like.device)
    if _is_a(like, "cupy", "ndarray"):
        with like.device:
            return sys.modules["cupy"].asarray(numbers)
    if _is_a(like, "jax", "Array"):
        return _on_jax(like, numbers)
    if hasattr(like, "copy_to_host"):
        return sys.modules["numba.cuda"].to_device(numbers)
    raise BadArgument(f"like={quoted(like)} is {_kind(like)}: expected an array of NumPy, PyTorch, CuPy, JAX or Numba")


def _on_jax(like: Any, numbers: np.ndarray) -> Any:
    jax = sys.modules["jax"]
    if isinstance(like, jax.core.Tracer):
        return jax.device_put(numbers)
    if isinstance(like.sharding, jax.sharding.NamedSharding):  # of a mesh: a copy on each of its devices
        everywhere = jax.sharding.NamedSharding(like.sharding.mesh, jax.sharding.PartitionSpec())
        return jax.device_put(numbers, everywhere)
    devices = like.devices()
    return jax.device_put(numbers, next(iter(devices)) if len(devices) == 1 else None)
