"""Attention in NumPy float64, written to be read: the standard three steps, FlashAttention v1 and v2 block by block,
and the gradients.

The three forward functions take the same arguments as flash_attn_func and return (out, lse) in float64. All use
`Head.scores`: the tile of S for some rows and columns with every option applied, -inf where a row may not look. They
differ in the order of the loops:

    standard_attention   S whole, softmax of each row, times V: (seqlen_q, seqlen_k) numbers in memory
    flash_attention_v1   keys outside, queries inside; out is normalised after every block (Dao et al. 2022, algorithm
                         1)
    flash_attention_v2   queries outside, keys inside; out is normalised once, at the end (Dao 2023, algorithm 1)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

# ---- one (batch, head): what a score is ----


@dataclass
class Head:
    """One head of one sequence; q (seqlen_q, headdim), k (seqlen_k, headdim), v (seqlen_k, headdim_v)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    softmax_scale: float
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    top_left: bool = False
    attention_chunk: int = 0  # keys of a chunk; 0 is off
    softcap: float = 0.0
    slope: float = 0.0
    bias: np.ndarray | None = None  # broadcasts to (seqlen_q, seqlen_k)
    mask: np.ndarray | None = None
    row_indices: np.ndarray | None = None  # (seqlen_k, 1 | 2 | 4): see dense_from_intervals
    block_mask: np.ndarray | None = None  # (blocks of rows, blocks of keys)
    block: tuple[int, int] = (64, 64)  # rows and keys of a block
    sink: float = -np.inf  # one more logit in the denominator; -inf adds nothing
    dropout: dict[str, Any] = field(default_factory=dict)  # p, seed, offset, batch, head

    def visible(self, rows: slice, columns: slice) -> np.ndarray:
        """True where row i may look at column j."""
        i, j = self._indices(rows, columns)
        aligned = i if self.top_left else i + len(self.k) - len(self.q)
        left, right = self.window_size
        seen = np.ones(np.broadcast_shapes(i.shape, j.shape), bool)
        if self.causal:
            right = 0
        if right >= 0:
            seen &= j <= aligned + right
        if left >= 0:
            seen &= j >= aligned - left
        if self.attention_chunk:
            seen &= j // self.attention_chunk == aligned // self.attention_chunk
        if self.mask is not None:
            seen &= _broadcast(self.mask, self)[rows, columns] != 0
        if self.row_indices is not None:
            seen &= dense_from_intervals(self.row_indices[columns], len(self.q), self.causal)[rows]
        if self.block_mask is not None:
            seen &= self.block_mask[i // self.block[0], j // self.block[1]] != 0
        if self.bias is not None:
            seen &= _broadcast(self.bias, self)[rows, columns] != -np.inf
        return seen

    def scores(self, rows: slice, columns: slice) -> np.ndarray:
        """The tile of S: scale, softcap, ALiBi, bias, then -inf where the row may not look."""
        i, j = self._indices(rows, columns)
        with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf in the inputs propagate
            s = self.softmax_scale * (self.q[rows] @ self.k[columns].T)
            if self.softcap:
                s = self.softcap * np.tanh(s / self.softcap)
            if self.slope:
                aligned = i if self.top_left else i + len(self.k) - len(self.q)
                s = s - self.slope * np.abs(aligned - j)
            if self.bias is not None:
                s = s + _broadcast(self.bias, self)[rows, columns]
        return np.where(self.visible(rows, columns), s, -np.inf)

    def kept(self, rows: slice, columns: slice) -> np.ndarray | float:
        """Factors on the probabilities: 0 where dropout drops one, 1 / (1 - p) elsewhere."""
        if not self.dropout:
            return 1.0
        i, j = self._indices(rows, columns)
        threshold = dropout_threshold(self.dropout["p"])
        bits = dropout_bits(
            self.dropout["seed"], self.dropout["offset"], self.dropout["batch"], self.dropout["head"], i, j
        )
        return np.where(bits < threshold, 0.0, 256 / (256 - threshold))

    def _indices(self, rows: slice, columns: slice) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(len(self.q))[rows, None], np.arange(len(self.k))[None, columns]


def shown_by(numbers, i, causal: bool):
    """Whether row i may look at the keys with these numbers, one array for each: the table of docs/masks.md, for arrays
    of any framework. Causal itself is not in the result."""
    if len(numbers) == 1:
        return i < numbers[0]
    if len(numbers) == 2 and not causal:
        return (i < numbers[0]) & (i >= numbers[1])
    shown = (i < numbers[0]) | (i >= numbers[1])
    return shown & ((i < numbers[2]) | (i >= numbers[3])) if len(numbers) == 4 else shown


def dense_from_intervals(row_indices, seqlen_q: int, causal: bool) -> np.ndarray:
    """(..., seqlen_q, seqlen_k) bool, True where row i may look at key j, of startend_row_indices (..., seqlen_k, 1 | 2
    | 4). The numbers of a key name rows that do not see it (FlashMask, arXiv 2410.01359). Causal itself is not in the
    result.

    >>> dense_from_intervals([[1], [3]], 3, causal=True).astype(int).tolist()  # the key's rows from n on are hidden
    [[1, 1], [0, 1], [0, 1]]
    >>> dense_from_intervals([[3, 0], [3, 1], [2, 0]], 3, causal=False).astype(int).tolist()  # from n0 on; before n1
    [[1, 0, 1], [1, 1, 1], [1, 1, 0]]
    """
    numbers = np.moveaxis(np.asarray(row_indices, np.int64), -1, 0)[..., None, :]  # each (..., 1, seqlen_k)
    if len(numbers) not in ((1, 2) if causal else (2, 4)):
        raise ValueError(f"{len(numbers)} numbers for each key with causal={causal}")
    return shown_by(numbers, np.arange(seqlen_q)[:, None], causal)


def _broadcast(array: np.ndarray, head: Head) -> np.ndarray:
    return np.broadcast_to(array, (len(head.q), len(head.k)))


def _or_zero(row_max: np.ndarray) -> np.ndarray:
    """row_max with 0 for empty rows, whose row_max is -inf: -inf - -inf would be NaN."""
    return np.where(np.isneginf(row_max), 0.0, row_max)


def _times_values(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p @ v, where a row of v with p = 0 (masked) adds nothing even if it holds NaN or Inf: 0 * NaN would be NaN."""
    out = p @ np.where(np.isfinite(v), v, 0)
    for j in np.flatnonzero(~np.isfinite(v).all(axis=1)):
        seen = p[:, j] != 0
        out[seen] += p[seen, j, None] * np.where(np.isfinite(v[j]), 0, v[j])
    return out


def _divide(x: np.ndarray, row_sum: np.ndarray) -> np.ndarray:
    """x / row_sum, 0 for an empty row."""
    return np.divide(x, row_sum, out=np.zeros(np.broadcast_shapes(x.shape, row_sum.shape)), where=row_sum != 0)


# ---- three ways to compute one head: out (seqlen_q, headdim_v), lse (seqlen_q) ----


def _standard(head: Head) -> tuple[np.ndarray, np.ndarray]:
    everything = slice(None)
    s = head.scores(everything, everything)
    row_max = _or_zero(np.max(s, axis=1, initial=head.sink))
    with np.errstate(invalid="ignore"):
        p = np.exp(s - row_max[:, None])
    row_sum = p.sum(axis=1) + np.exp(head.sink - row_max)
    with np.errstate(divide="ignore"):
        lse = row_max + np.log(row_sum)  # log(0) = -inf is what an empty row returns
    p = _divide(p, row_sum[:, None]) * head.kept(everything, everything)
    return _times_values(p, head.v), lse


def _flash_v1(head: Head, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    seqlen_q, seqlen_k = len(head.q), len(head.k)
    out = np.zeros((seqlen_q, head.v.shape[1]))
    row_max = np.full(seqlen_q, head.sink)  # m: the sink is there before any key
    row_sum = np.full(seqlen_q, 1.0 if head.sink > -np.inf else 0.0)  # l: exp(sink - m) = 1
    for j in range(0, seqlen_k, block_k):
        columns = slice(j, j + block_k)
        for i in range(0, seqlen_q, block_q):
            rows = slice(i, i + block_q)
            s = head.scores(rows, columns)
            new_max = np.maximum(row_max[rows], s.max(axis=1))
            with np.errstate(invalid="ignore"):
                p = np.exp(s - _or_zero(new_max)[:, None])
                correction = np.exp(row_max[rows] - _or_zero(new_max))
            new_sum = correction * row_sum[rows] + p.sum(axis=1)
            # `out` is normalised by the old sum: undo that, add this block, divide by the new sum.
            block = _times_values(p * head.kept(rows, columns), head.v[columns])
            out[rows] = _divide((correction * row_sum[rows])[:, None] * out[rows] + block, new_sum[:, None])
            row_max[rows], row_sum[rows] = new_max, new_sum
    with np.errstate(divide="ignore"):
        return out, row_max + np.log(row_sum)


def _flash_v2(head: Head, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    seqlen_q, seqlen_k = len(head.q), len(head.k)
    out, lse = np.zeros((seqlen_q, head.v.shape[1])), np.full(seqlen_q, -np.inf)
    for i in range(0, seqlen_q, block_q):
        rows = slice(i, i + block_q)
        height = len(lse[rows])
        acc = np.zeros((height, head.v.shape[1]))
        row_max = np.full(height, head.sink)
        row_sum = np.full(height, 1.0 if head.sink > -np.inf else 0.0)
        for j in range(0, seqlen_k, block_k):
            columns = slice(j, j + block_k)
            s = head.scores(rows, columns)
            new_max = np.maximum(row_max, s.max(axis=1))
            with np.errstate(invalid="ignore"):
                p = np.exp(s - _or_zero(new_max)[:, None])
                correction = np.exp(row_max - _or_zero(new_max))
            row_sum = correction * row_sum + p.sum(axis=1)
            acc = correction[:, None] * acc + _times_values(p * head.kept(rows, columns), head.v[columns])
            row_max = new_max
        out[rows] = _divide(acc, row_sum[:, None])  # the only division
        with np.errstate(divide="ignore"):
            lse[rows] = row_max + np.log(row_sum)
    return out, lse


# ---- gradients of one head ----


def _standard_backward(
    head: Head, dout: np.ndarray, dlse: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """dq, dk, dv, dS and the sink's gradient, of sum(out * dout) + sum(lse * dlse), by the chain rule through softmax
    (Dao et al. 2022, appendix B.2). dS (seqlen_q, seqlen_k) is also the gradient of the bias."""
    everything = slice(None)
    out, lse = _standard(head)
    seen = head.visible(everything, everything)
    with np.errstate(invalid="ignore", over="ignore"):
        s = head.scores(everything, everything)
        p = np.where(seen, np.exp(s - _or_zero(lse)[:, None]), 0.0)
        kept = head.kept(everything, everything)
        dp = (dout @ head.v.T) * kept
        delta = (dout * out).sum(axis=1)  # equals the sum over keys of P dP
        delta = np.where(np.isneginf(lse), 0, delta - dlse)  # d lse / d score is P
        ds = np.where(seen, p * (dp - delta[:, None]), 0.0)
        sink = -np.sum(np.exp(head.sink - lse, where=~np.isneginf(lse), out=np.zeros_like(lse)) * delta)
        slope = head.softmax_scale  # d score / d (q . k)
        if head.softcap:
            t = np.tanh(head.softmax_scale * (head.q @ head.k.T) / head.softcap)
            slope = slope * (1 - t * t)
        raw = np.where(seen, ds * slope, 0.0)
    return _times_values(raw, head.k), _times_values(raw.T, head.q), _times_values((p * kept).T, dout), ds, sink


# ---- whole arrays ----


def standard_attention(q, k, v, **options):
    """Standard attention with S in memory. q (batch, seqlen_q, nheads, headdim), k and v as in flash_attn_func; see
    `heads` for the options. Returns out (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q),
    float64.

    >>> import numpy as np
    >>> q = k = np.zeros((1, 3, 1, 4))
    >>> v = np.arange(3.0).reshape(1, 3, 1, 1)
    >>> out, lse = standard_attention(q, k, v, causal=True)
    >>> out.ravel(), np.exp(lse).ravel().round(12)
    (array([0. , 0.5, 1. ]), array([1., 2., 3.]))
    """
    return _over_heads(_standard, q, k, v, options)


def max_score(q, k, v, **options):
    """(batch, nheads): the greatest score of each head, after every option except sinks and dropout; -inf where no row
    sees a key.

    >>> q, k = np.ones((1, 1, 1, 4)), np.arange(12.0).reshape(1, 3, 1, 4)
    >>> max_score(q, k, k, softmax_scale=0.5)
    array([[19.]])
    """
    greatest = np.full((q.shape[0], q.shape[2]), -np.inf)
    for b, h, head in heads(q, k, v, **options):
        greatest[b, h] = head.scores(slice(None), slice(None)).max(initial=-np.inf)
    return greatest


def key_sums(q, k, v, **options):
    """(batch, nheads, seqlen_k): the sum over the rows of each key's probability, before dropout.

    >>> q, k = np.zeros((1, 6, 1, 4)), np.zeros((1, 3, 1, 4))
    >>> key_sums(q, k, k)
    array([[[2., 2., 2.]]])
    """
    sums = np.zeros((q.shape[0], q.shape[2], k.shape[1]))
    for b, h, head in heads(q, k, v, **options):
        _, lse = _standard(head)
        with np.errstate(invalid="ignore"):
            sums[b, h] = np.exp(head.scores(slice(None), slice(None)) - _or_zero(lse)[:, None]).sum(axis=0)
    return sums


def flash_attention_v1(q, k, v, *, block_q=32, block_k=32, **options):
    """FlashAttention as first published: keys and values outside, so each block of out is read and written once per
    block of keys.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 4, 8))
    >>> bool(np.allclose(flash_attention_v1(q, k, v)[0], standard_attention(q, k, v)[0], atol=1e-12))
    True
    """
    return _over_heads(lambda head: _flash_v1(head, block_q, block_k), q, k, v, options)


def flash_attention_v2(q, k, v, *, block_q=32, block_k=32, **options):
    """FlashAttention-2: queries outside, so out stays in registers until its row is done and is divided by its sum
    once.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 50, 4, 8))
    >>> bool(np.allclose(flash_attention_v2(q, k, v)[0], standard_attention(q, k, v)[0], atol=1e-12))
    True
    """
    return _over_heads(lambda head: _flash_v2(head, block_q, block_k), q, k, v, options)


class Gradients(NamedTuple):
    """The gradients of sum(out * dout) + sum(lse * dlse), float64. dbias has the shape of bias, dsinks that of sinks;
    they are None without bias or sinks."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsinks: np.ndarray | None


def standard_attention_backward(dout, q, k, v, *, dlse=None, one_head=_standard_backward, **options) -> Gradients:
    """The gradients of standard_attention with the same arguments. dout (batch, seqlen_q, nheads, headdim_v), dlse
    (batch, nheads, seqlen_q).

    >>> import numpy as np
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 5, 2, 3))
    >>> gradients = standard_attention_backward(dout, q, k, v, causal=True)
    >>> step = np.zeros_like(v)
    >>> step[0, 1, 0, 2] = 1e-6
    >>> before, after = (standard_attention(q, k, x, causal=True)[0] for x in (v, v + step))
    >>> bool(np.isclose(((after - before) * dout).sum() / 1e-6, gradients.dv[0, 1, 0, 2]))
    True
    """
    bias, group = options.get("bias"), q.shape[2] // k.shape[2]
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    dbias = None if bias is None else np.zeros((1,) * (4 - np.ndim(bias)) + np.shape(bias))
    dsinks = None if options.get("sinks") is None else np.zeros(q.shape[2])
    index = options.get("sequence")
    dlse = np.zeros((q.shape[0], q.shape[2], q.shape[1])) if dlse is None else dlse
    for b, h, head in heads(q, k, v, **options):
        given = np.asarray(dout[b, :, h], np.float64), np.asarray(dlse[b, h], np.float64)
        one_dq, one_dk, one_dv, ds, sink = one_head(head, *given)
        dq[b, :, h] = one_dq
        dk[b, :, h // group] += one_dk
        dv[b, :, h // group] += one_dv
        if dsinks is not None:
            dsinks[h] += sink
        if dbias is not None:
            place = dbias[(b if index is None else index) % len(dbias), h % dbias.shape[1]]
            if len(place) == 1:
                place[:, : ds.shape[1]] += ds.sum(axis=0)
            else:
                place[: len(ds), : ds.shape[1]] += ds
    return Gradients(dq, dk, dv, None if bias is None else dbias.reshape(np.shape(bias)), dsinks)


def varlen_backward(backward, dout, q, k, v, cu_seqlens_q, cu_seqlens_k, dlse=None, **options) -> Gradients:
    """standard_attention_backward over packed sequences, dlse (nheads, total_q); rows that belong to no sequence have
    zero gradients."""
    total = None
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        columns = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        arrays = dout[None, rows], q[None, rows], k[None, columns], v[None, columns]
        own = None if dlse is None else dlse[None, :, rows]
        one = backward(*arrays, dlse=own, sequence=b, **_of_sequence(options, columns, cu_seqlens_q, cu_seqlens_k))
        if total is None:
            total = Gradients(*(np.zeros(x.shape) for x in (q, k, v)), one.dbias, one.dsinks)
        else:
            for sums, part in ((total.dbias, one.dbias), (total.dsinks, one.dsinks)):
                if sums is not None:
                    sums += part
        total.dq[rows], total.dk[columns], total.dv[columns] = one.dq[0], one.dk[0], one.dv[0]
    return total


def _of_sequence(options: dict, columns: slice, cu_seqlens_q, cu_seqlens_k) -> dict:
    """The options of one sequence of a varlen call: startend_row_indices (heads, total_k, numbers) of its keys, and the
    size of the blocks of block_mask."""
    if (indices := options.get("startend_row_indices")) is not None:
        options = options | {"startend_row_indices": np.asarray(indices)[:, columns]}
    if options.get("block_mask") is None or options.get("block"):
        return options
    longest = [int(np.diff(x).max(initial=0)) for x in (cu_seqlens_q, cu_seqlens_k)]
    return options | {"block": _block_of(options["block_mask"], longest)}


def _block_of(block_mask, lengths) -> tuple[int, int]:
    """The rows and keys of a block, 64 or 128, by the shape of the mask."""
    counts = zip(np.shape(block_mask)[-2:], lengths, strict=True)
    rows, keys = (64 if count == -(-length // 64) else 128 for count, length in counts)
    return rows, keys


def varlen(attention, q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """Any of the three forward functions over packed sequences: q (total_q, nheads, headdim). Returns out (total_q,
    nheads, headdim_v) and lse (nheads, total_q); rows that belong to no sequence have out = 0, lse = -inf."""
    out = np.zeros((q.shape[0], q.shape[1], v.shape[2]))
    lse = np.full((q.shape[1], q.shape[0]), -np.inf)
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        columns = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        own = _of_sequence(options, columns, cu_seqlens_q, cu_seqlens_k)
        o, l = attention(q[None, rows], k[None, columns], v[None, columns], sequence=b, **own)  # noqa: E741
        out[rows], lse[:, rows] = o[0], l[0]
    return out, lse


def varlen_max_score(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """max_score of packed sequences: (batch, nheads)."""
    greatest = np.full((len(cu_seqlens_q) - 1, q.shape[1]), -np.inf)
    for b in range(len(greatest)):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        columns = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        own = _of_sequence(options, columns, cu_seqlens_q, cu_seqlens_k)
        greatest[b] = max_score(q[None, rows], k[None, columns], v[None, columns], sequence=b, **own)[0]
    return greatest


def varlen_key_sums(q, k, v, cu_seqlens_q, cu_seqlens_k, **options):
    """key_sums of packed sequences: (nheads, total_k), 0 for keys of no sequence."""
    sums = np.zeros((q.shape[1], k.shape[0]))
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        columns = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        own = _of_sequence(options, columns, cu_seqlens_q, cu_seqlens_k)
        sums[:, columns] = key_sums(q[None, rows], k[None, columns], v[None, columns], sequence=b, **own)[0]
    return sums


def heads(
    q,
    k,
    v,
    *,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    bias=None,
    mask=None,
    startend_row_indices=None,
    block_mask=None,
    block=None,
    sinks=None,
    top_left=False,
    attention_chunk=0,
    dropout_seed=0,
    dropout_offset=0,
    sequence=None,
):
    """Yields (b, h, Head) for every batch entry and query head. sequence: for a call on one sequence of a varlen batch,
    its index there, which selects its slopes, bias and mask, and its part of the dropout pattern. block: rows and keys
    of a block of block_mask, of which there are as many as the longest sequence needs; None: they follow from the shape
    of block_mask and the lengths of this call."""
    batch, seqlen_q, nheads, headdim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    scale = headdim**-0.5 if softmax_scale is None else softmax_scale
    slopes = np.zeros((1, nheads)) if alibi_slopes is None else np.atleast_2d(alibi_slopes)
    for b in range(batch):
        index = b if sequence is None else sequence

        def part(array, h, index=index):  # this head's (seqlen_q, seqlen_k) part of a bias or mask
            if array is None:
                return None
            array = np.reshape(array, (1,) * (4 - np.ndim(array)) + np.shape(array))
            array = array[index if len(array) > 1 else 0]
            array = array[h if len(array) > 1 else 0]
            return array[:seqlen_q, :seqlen_k]

        def indices(h, index=index):  # this head's numbers, those of its sequence in a varlen call
            array = np.asarray(startend_row_indices)
            if array.ndim == 4:
                array = array[index if len(array) > 1 else 0]
            return array[h * len(array) // nheads]

        def blocks(h, index=index):  # this head's (blocks of rows, blocks of keys)
            array = np.asarray(block_mask)[index if len(block_mask) > 1 else 0]
            return array[h * len(array) // nheads]

        if block_mask is not None and block is None:
            block = _block_of(block_mask, (seqlen_q, seqlen_k))
        for h in range(nheads):
            yield (
                b,
                h,
                Head(
                    q=np.asarray(q[b, :, h], np.float64),
                    k=np.asarray(k[b, :, h // (nheads // nheads_k)], np.float64),
                    v=np.asarray(v[b, :, h // (nheads // nheads_k)], np.float64),
                    softmax_scale=scale,
                    causal=causal,
                    window_size=window_size,
                    top_left=top_left,
                    attention_chunk=attention_chunk,
                    softcap=softcap,
                    slope=float(slopes[index if len(slopes) > 1 else 0, h]),
                    bias=None if bias is None else np.asarray(part(bias, h), np.float64),
                    mask=part(mask, h),
                    row_indices=None if startend_row_indices is None else indices(h),
                    block_mask=None if block_mask is None else blocks(h),
                    block=block or (64, 64),
                    sink=-np.inf if sinks is None else float(sinks[h]),
                    dropout={"p": dropout_p, "seed": dropout_seed, "offset": dropout_offset, "batch": index, "head": h}
                    if dropout_p
                    else {},
                ),
            )


def _over_heads(one_head, q, k, v, options):
    batch, seqlen_q, nheads, _ = q.shape
    out = np.zeros((batch, seqlen_q, nheads, v.shape[-1]))
    lse = np.full((batch, nheads, seqlen_q), -np.inf)
    for b, h, head in heads(q, k, v, **options):
        out[b, :, h], lse[b, h] = one_head(head)
    return out, lse


def merge(out_a, lse_a, out_b, lse_b):
    """Merges attention over two disjoint sets of keys into attention over their union. out (batch, seqlen, nheads,
    headdim_v), lse (batch, nheads, seqlen)."""
    lse_a, lse_b = np.asarray(lse_a, np.float64), np.asarray(lse_b, np.float64)
    lse = np.logaddexp(lse_a, lse_b)
    out = np.zeros(np.shape(out_a))
    for part, part_lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = np.exp(part_lse - _or_zero(lse)).swapaxes(-1, -2)[..., None]
        out += np.where(
            weight == 0, 0, weight * np.where(weight == 0, 0, part)
        )  # a part of weight 0 adds nothing, even if it holds NaN
    return out, lse


# ---- a cache of keys and values ----


def rotary(x, cos, sin, positions, interleaved=True):
    """Rotates the first 2 * cos.shape[1] dims of x (seqlen, nheads, headdim) by the angles of each row's position.

    >>> x, angle = np.array([[[1.0, 0.0]]]), np.array([[0.5]])
    >>> bool(np.allclose(rotary(x, np.cos(angle), np.sin(angle), [0]), [[[np.cos(0.5), np.sin(0.5)]]]))
    True
    """
    x = np.array(x, np.float64)
    half = cos.shape[1]
    c, s = (np.asarray(table, np.float64)[positions, None] for table in (cos, sin))
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first], x[..., second] = a * c - b * s, a * s + b * c
    return x


def cached_rows(cache, length, sequence, *, batch_idx=None, block_table=None, scale=None):
    """The first `length` rows of a sequence in a cache (entries, rows, nheads_k, dim), or in its pages, times their
    scale factors: (length, nheads_k, dim) float64."""
    if block_table is None:
        entry, row = np.full(length, sequence if batch_idx is None else batch_idx[sequence]), np.arange(length)
    else:
        page, row = np.divmod(np.arange(length), cache.shape[1])
        entry = np.asarray(block_table)[sequence, page]
    rows = np.asarray(cache[entry, row], np.float64)
    if scale is None:
        return rows
    factors = np.broadcast_to(scale, cache.shape[:3])  # (nheads_k), (entries, 1, nheads_k), (entries, rows, nheads_k)
    return rows * np.asarray(factors[entry, row], np.float64)[..., None]


def tree_shows(rows, seqlen_k, tree_keys):
    """(rows, seqlen_k) bool: which keys each row of a tree of draft tokens sees. rows: the rows' words of bits.

    >>> tree_shows([0b01, 0b10], 4, 2).astype(int).tolist()
    [[1, 1, 1, 0], [1, 1, 0, 1]]
    """
    bit = np.arange(seqlen_k) - (seqlen_k - tree_keys)
    words = np.asarray(rows).astype(np.uint64)[:, None]
    return (bit < 0) | (words >> np.maximum(bit, 0).astype(np.uint64) & np.uint64(1)).astype(bool)


def kvcache_attention(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    *,
    causal=False,
    window_size=(-1, -1),
    rotary_interleaved=True,
    k_scale=None,
    v_scale=None,
    tree_mask=None,
    tree_keys=0,
    attention=standard_attention,
    **options,
):
    """flash_attn_with_kvcache without its rounding. The new keys (rotated) and values follow those of the cache, which
    is not modified. Returns out (batch, seqlen_q, nheads, headdim_v) and lse (batch, nheads, seqlen_q), float64.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 5, 2, 4))
    >>> cached = kvcache_attention(q[:, 3:], k, v, k[:, 3:], v[:, 3:], cache_seqlens=[3], causal=True)[0]
    >>> bool(np.allclose(cached, standard_attention(q, k, v, causal=True)[0][:, 3:]))
    True
    """
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_new = 0 if k is None else k.shape[1]
    room = k_cache.shape[1] if block_table is None else np.shape(block_table)[1] * k_cache.shape[1]
    lengths = np.broadcast_to(room - seqlen_new if cache_seqlens is None else cache_seqlens, batch)
    padding = np.zeros(batch, int) if cache_leftpad is None else np.asarray(cache_leftpad)
    ordered = causal or window_size[0] >= 0 or window_size[1] >= 0 or options.get("attention_chunk", 0) > 0
    out = np.zeros((batch, seqlen_q, nheads, v_cache.shape[-1]))
    lse = np.full((batch, nheads, seqlen_q), -np.inf)
    if options.get("sinks") is not None:
        lse[:] = np.asarray(options["sinks"])[:, None]
    for b, length in enumerate(lengths):
        if length < 0:  # idle
            continue
        where = {"batch_idx": cache_batch_idx, "block_table": block_table}
        one_q = np.asarray(q[b], np.float64)
        keys = cached_rows(k_cache, length, b, scale=k_scale, **where)
        values = cached_rows(v_cache, length, b, scale=v_scale, **where)
        if rotary_cos is not None:
            turn, last = (rotary_cos, rotary_sin), len(rotary_cos) - 1
            at = np.minimum(length + np.arange(seqlen_q) * ordered, last)
            one_q = rotary(one_q, *turn, at, rotary_interleaved)
        if seqlen_new:
            new = np.asarray(k[b], np.float64)
            if rotary_cos is not None:
                at = np.minimum(length + np.arange(seqlen_new), last)
                new = rotary(new, *turn, at, rotary_interleaved)
            keys = np.concatenate([keys, new])
            values = np.concatenate([values, np.asarray(v[b], np.float64)])
        keys, values = keys[padding[b] :], values[padding[b] :]
        if tree_mask is not None:
            rows = np.broadcast_to(tree_mask, (batch, seqlen_q))[b]
            options["mask"] = tree_shows(rows, len(keys), tree_keys or seqlen_q)
        o, l = attention(  # noqa: E741
            one_q[None], keys[None], values[None], causal=causal, window_size=window_size, sequence=b, **options
        )
        out[b], lse[b] = o[0], l[0]
    return out, lse


# ---- dropout: cuda/common/philox.h in NumPy ----


def philox(counter, key, rounds=10):
    """Philox4x32 (Salmon et al., SC 2011): four 32-bit words from four words of counter and two of key; arrays
    broadcast.

    >>> [hex(word) for word in philox((0, 0, 0, 0), (0, 0))]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    low = np.uint64(0xFFFFFFFF)
    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    k0, k1 = int(key[0]), int(key[1])
    for _ in range(rounds):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (b >> np.uint64(32)) ^ c1 ^ np.uint64(k0), b & low
        c2, c3 = (a >> np.uint64(32)) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def dropout_threshold(p: float) -> int:
    """An element is dropped iff its 8 random bits are below this."""
    return 0 if p == 0 else min(max(int(np.floor(float(np.float32(p)) * 256 + 0.5)), 1), 255)


def dropout_bits(seed: int, offset: int, batch: int, head: int, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """The 8 random bits of each (row, column). One Philox block of seven rounds serves 16 of 64 columns: two neighbours
    of every eight. Each of its 32-bit words serves four, each half two: bits 7 to 14, and after a swap of its bytes."""
    words = (offset & 0xFFFFFFFF, offset >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32)
    key = [int(word) for word in philox(*words)[:2]]
    row, column = np.broadcast_arrays(row, column)
    block = np.stack(philox((column // 64 * 4 + column % 8 // 2, row, head, batch), key, rounds=7))
    word = np.take_along_axis(block, (column % 64 // 16)[None], axis=0)[0].astype(np.int64)
    half = np.where(column % 2 == 1, word >> 16, word) & 0xFFFF
    return np.where(column // 8 % 2 == 1, half << 8 | half >> 8, half) >> 7 & 0xFF
