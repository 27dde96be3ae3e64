"""A mask by intervals, its float64 answer, and the systems that compute under it, for the suite `masks`.

Everything about a mask comes from one function, `seen`, on blocks of rows: the tiles of the peers, the float64 answer,
the intervals of keys that cuDNN wants, a dense mask. An array of n x n is made only for the peers that need one.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flash_attn_minimal import backward, backward_query, flash_attn_func, query
from flash_attn_minimal.errors import BadArgument, Unsupported

from ..reference import shown_by
from .check import EARLY, FLOOR, GRADIENT_FLOOR, Exact
from .machine import BenchError, first_line
from .systems import Refused, Shape, System, backward_of, fa_function, only
from .timing import estimate_us

TILE = 128
EMPTY, CUT, WHOLE = 0, 1, 2
BLOCK_PAIRS = 1 << 26  # pairs of a row and a key in memory at once; half of it where they are float64
DENSE_TOKENS = 32768  # above it no dense mask is made
REASON = 300  # characters of a reason


def seen(i: Any, j: Any, numbers: list[Any], causal: bool) -> Any:
    """Whether row i sees key j, whose numbers are given, for arrays of any framework."""
    shown = shown_by(numbers, i, causal)
    return (j <= i) & shown if causal else shown


@dataclass
class Mask:
    """A mask by intervals for n rows and as many keys, the same for all heads of one sequence."""

    machine: Any
    name: str
    causal: bool
    columns: list[np.ndarray]  # one for each number of a key, (n,) int32
    cache: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, machine: Any, name: str, made: Any) -> Mask:
        """made: what a maker of flash_attn_minimal.masks returns, of NumPy."""
        numbers = np.asarray(made["startend_row_indices"])[0, 0]  # (n, numbers)
        columns = [np.ascontiguousarray(numbers[:, x]) for x in range(numbers.shape[1])]
        return cls(machine, name, made["causal"], columns)

    @property
    def n(self) -> int:
        return len(self.columns[0])

    @functools.cached_property
    def numbers(self) -> list[Any]:
        """The columns on the machine."""
        return [self.machine.int32(column) for column in self.columns]

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """The options of our calls."""
        numbers = np.stack(self.columns, axis=-1)[None, None]
        return {"causal": self.causal, "startend_row_indices": self.machine.int32(numbers)}

    def rows(self, rows: np.ndarray) -> Any:
        """(len(rows), n) bool on the machine: the keys that the rows see."""
        i, j = self.machine.int32(rows)[:, None], self.machine.int32(np.arange(self.n))[None]
        return seen(i, j, [numbers[None] for numbers in self.numbers], self.causal)

    def tiles(self, rows: int, keys: int) -> np.ndarray:
        """(ceil(n / rows), ceil(n / keys)) of EMPTY, CUT and WHOLE: whether a row of the tile sees none, some or all of
        its keys."""
        if (rows, keys) not in self.cache:
            firsts, found, pairs = np.arange(0, self.n, keys), [], 0.0
            for first in range(0, self.n, rows):
                block = np.arange(first, min(first + rows, self.n))
                counts = self.machine.host(self.rows(block).sum(0))  # (n,): rows of the block that see each key
                least, most = (ufunc.reduceat(counts, firsts) for ufunc in (np.minimum, np.maximum))
                found.append(np.where(least == len(block), WHOLE, np.where(most > 0, CUT, EMPTY)))
                pairs += counts.sum(dtype=np.float64)
            self.cache[rows, keys], self.cache["pairs"] = np.stack(found).astype(np.uint8), int(pairs)
        return self.cache[rows, keys]

    @property
    def pairs(self) -> int:
        """Pairs of a row and a key that it sees."""
        self.tiles(TILE, TILE)
        return self.cache["pairs"]

    @property
    def share(self) -> float:
        """Tiles that some row sees, over those of the causal call without a mask."""
        count = -(-self.n // TILE)
        return float((self.tiles(TILE, TILE) != EMPTY).sum()) / (count * (count + 1) / 2)

    @functools.cached_property
    def endpoints(self) -> np.ndarray:
        """(numbers, n) int32 with an odd number of numbers e: row i sees the keys [0, e0), [e1, e2), ..."""
        n, step = self.n, max(1, BLOCK_PAIRS // self.n)
        rows, keys = [], []  # of the changes between two keys
        first, last = [], []  # whether key 0 and key n - 1 are seen
        for start in range(0, n, step):
            block = self.rows(np.arange(start, min(start + step, n)))
            change = block[:, 1:] != block[:, :-1]
            where = change.nonzero(as_tuple=True) if self.machine.framework == "torch" else change.nonzero()
            row, key = (np.asarray(x.cpu() if hasattr(x, "cpu") else x) for x in where)
            rows.append(row + start)
            keys.append(key + 1)
            first.append(self.machine.host(block[:, 0]) != 0)
            last.append(self.machine.host(block[:, -1]) != 0)
        row, key, seen_first, seen_last = (np.concatenate(x) for x in (rows, keys, first, last))
        inner = np.bincount(row, minlength=n)
        counts = inner + ~seen_first + seen_last  # a row that does not see key 0 begins with the interval [0, 0)
        place = np.arange(len(row)) - (np.cumsum(inner) - inner)[row] + ~seen_first[row]
        found = np.zeros((n, counts.max()), np.int32)
        found[row, place] = key
        found[seen_last, counts[seen_last] - 1] = n
        return np.ascontiguousarray(np.maximum.accumulate(found, axis=1).T)  # shorter rows end with empty intervals

    def dense(self, torch: Any, dtype: Any) -> Any:
        """(1, 1, n, n): 0 where a row sees a key, else -inf. In q's dtype, into which PyTorch would convert a mask of
        bools in every call."""
        if "dense" not in self.cache:
            if self.n > DENSE_TOKENS:
                raise Refused(f"no dense mask is made above {DENSE_TOKENS} tokens")
            bias = torch.zeros((self.n, self.n), dtype=dtype, device=self.machine.device)
            step = max(1, BLOCK_PAIRS // self.n)
            for start in range(0, self.n, step):
                rows = np.arange(start, min(start + step, self.n))
                bias[start : start + step].masked_fill_(~self.rows(rows), -math.inf)
            self.cache["dense"] = bias[None, None]
        return self.cache["dense"]


def lists(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(1, 1, rows) counts and (1, 1, rows, columns) indices, int32: in each row of a bool array first the columns that
    are True, in their order."""
    order = np.argsort(~wanted, axis=1, kind="stable")
    return wanted.sum(1, dtype=np.int32)[None, None], order.astype(np.int32)[None, None]


# ---- the float64 answer ----


class MaskedExact(Exact):
    """The float64 answer under a mask, on a sample. Forward: rows of the first and of the last head. Backward: rows of
    dq, and keys of dk and dv, of one key head; their sums run over all rows."""

    ROWS = 24  # drawn ones, beside the first, the last, those at edges of intervals and early ones

    def __init__(self, case: Case, seed: int = 0):
        self.machine, self.kept, self.samples = case.machine, None, []
        draw, n = np.random.default_rng(seed), case.mask.n
        edges = np.unique(np.concatenate(case.mask.columns))
        edges = draw.permutation(edges[(edges > 0) & (edges < n)])[:8]
        few = draw.integers(n, size=self.ROWS), draw.integers(min(n, EARLY), size=self.ROWS // 3)
        rows = np.unique(np.concatenate([[0, n // 2, n - 1], edges - 1, edges, *few]))
        (self._gradients_of if case.shape.backward else self._outputs_of)(case, rows)

    def _outputs_of(self, case: Case, rows: np.ndarray) -> None:
        dtype, group = case.shape.dtype, case.shape.nheads // case.shape.nheads_k
        pairs = case.mask.rows(rows)
        for h in sorted({0, case.shape.nheads - 1}):
            q, k, v = case.q[0, :, h][rows], case.k[0, :, h // group], case.v[0, :, h // group]
            exact, plain = (_attended(self.machine, q, k, v, pairs, precision) for precision in (None, dtype))
            where = (0, slice(None), h)
            self.samples.append((0, where, rows, exact, {dtype: plain}, (FLOOR[dtype], 0.0)))

    def _gradients_of(self, case: Case, rows: np.ndarray) -> None:
        dtype, group, h_k = case.shape.dtype, case.shape.nheads // case.shape.nheads_k, case.shape.nheads_k - 1
        heads = range(h_k * group, (h_k + 1) * group)
        exact, plain = (_gradients(self.machine, case, heads, h_k, rows, precision) for precision in (None, dtype))
        floors = 0.1 * FLOOR[dtype], GRADIENT_FLOOR[dtype]
        places = [*((0, (0, slice(None), h)) for h in heads), *((x, (0, slice(None), h_k)) for x in (1, 2))]
        for (array, where), e, p in zip(places, exact, plain, strict=True):
            self.samples.append((array, where, rows, e, {dtype: p}, floors))


def _weights(xp: Any, q: Any, k: Any, pairs: Any) -> Any:
    """P of some rows. The largest score of a row counts even if it is hidden: scores of the inputs here are close."""
    s = q @ k.T * q.shape[1] ** -0.5
    p = xp.exp(s - xp.amax(s, 1)[:, None]) * pairs
    total = p.sum(1)[:, None]
    return p / (total + (total == 0))


def _rounding(machine: Any, dtype: str | None) -> tuple[Callable, Callable]:
    """Functions that convert an input to the type of the sums, and that round a value as the steps in `dtype` do."""
    working = "float32" if dtype else "float64"
    cast = machine.cast
    return (lambda x: cast(x, working)), (lambda x: cast(cast(x, dtype), working) if dtype else x)


def _host(array: Any) -> np.ndarray:
    return np.asarray(array.get() if hasattr(array, "get") else array.cpu() if hasattr(array, "cpu") else array)


def _attended(machine: Any, q: Any, k: Any, v: Any, pairs: Any, dtype: str | None) -> np.ndarray:
    """The output of some rows of a head; with a dtype in its precision, otherwise in float64."""
    wide, rounded = _rounding(machine, dtype)
    q, k, v = wide(q), wide(k), wide(v)
    return _host(rounded(rounded(_weights(machine.xp, q, k, pairs)) @ v))


def _gradients(
    machine: Any, case: Case, heads: range, h_k: int, places: np.ndarray, dtype: str | None
) -> list[np.ndarray]:
    """dq of each head of a key head at some rows, then dk and dv at the same places of the keys."""
    xp = machine.xp
    wide, rounded = _rounding(machine, dtype)
    k, v = wide(case.k[0, :, h_k]), wide(case.v[0, :, h_k])
    scale, n = k.shape[1] ** -0.5, case.mask.n
    few_k, few_v = k[places], v[places]
    dq, dk, dv = [], xp.zeros_like(few_k), xp.zeros_like(few_v)
    step = max(1, BLOCK_PAIRS // 2 // n)
    for h in heads:
        q, dout = case.q[0, :, h], case.dout[0, :, h]
        for start in range(0, n, step):
            rows = np.arange(start, min(start + step, n))
            qb, doutb = wide(q[start : start + step]), wide(dout[start : start + step])
            p = _weights(xp, qb, k, case.mask.rows(rows))
            delta = (doutb * rounded(rounded(p) @ v)).sum(1)[:, None]
            p = p[:, places]
            dk += rounded(p * (doutb @ few_v.T - delta)).T @ qb * scale
            dv += rounded(p).T @ doutb
        few_q, few_dout = wide(q[places]), wide(dout[places])
        p = _weights(xp, few_q, k, case.mask.rows(places))
        delta = (few_dout * rounded(rounded(p) @ v)).sum(1)[:, None]
        dq.append(_host(rounded(rounded(p * (few_dout @ v.T - delta)) @ k * scale)))
    return [*dq, _host(rounded(dk)), _host(rounded(dv))]


# ---- ours ----


@dataclass
class Case:
    """A mask with the inputs of one pass: q and dout (1, n, heads, headdim), k and v (1, n, key heads, headdim)."""

    machine: Any
    shape: Shape
    mask: Mask
    q: Any
    k: Any
    v: Any
    dout: Any

    def __str__(self) -> str:
        shape = self.shape
        heads = f"{shape.nheads}" if shape.nheads == shape.nheads_k else f"{shape.nheads}/{shape.nheads_k}"
        return f"{self.mask.name} {'bwd' if shape.backward else 'fwd'} n{shape.seqlen} h{heads} d{shape.headdim}"


def ours(case: Case, options: dict[str, Any], threads: int = 0, parts: int = 1) -> System:
    """flash_attn_func or backward with these options, on the sequence cut into a batch of equal parts."""
    options = options | {"num_threads": threads}
    q, k, v, dout = (x.reshape(parts, -1, *x.shape[2:]) for x in (case.q, case.k, case.v, case.dout))
    try:
        plan = (backward_query if case.shape.backward else query)(q, k, v, **options)
        if plan.status != "FA_OK":
            raise Refused(plan.error)
        places = [case.machine.nans(x.shape, case.shape.dtype) for x in (q, k, v)]
        if not case.shape.backward:
            return System("ours", plan.kernel, lambda i: flash_attn_func(q, k, v, out=places[0], **options))
        out, lse = flash_attn_func(q, k, v, return_lse=True, **options)
    except (BadArgument, Unsupported) as error:
        raise Refused(first_line(error)) from None
    grads = dict(zip(("dq", "dk", "dv"), places, strict=True))
    return System("ours", plan.kernel, lambda i: backward(dout, q, k, v, out, lse, **grads, **options))


def whole(case: Case, answer: Any) -> tuple:
    """The arrays of an answer, each of one sequence."""
    arrays = answer if isinstance(answer, tuple) else (answer,)
    return tuple(x.reshape(1, case.mask.n, *x.shape[2:]) for x in arrays)


# ---- peers: each makes a launch of the pass; what it makes of the mask before is not timed ----


def _passing(case: Case, forward: Callable, heads_first: bool) -> Callable[[int], Any]:
    """A launch of `forward` on q, k and v, or of the backward pass alone through the graph that its output keeps. With
    heads_first the peer gets views as (1, heads, n, headdim), and its arrays are turned back."""
    turned = (lambda x: x.transpose(1, 2)) if heads_first else (lambda x: x)
    arrays = [turned(x) for x in (case.q, case.k, case.v)]
    if not case.shape.backward:
        return lambda i: turned(forward(*arrays))
    leaves = [x.detach().requires_grad_() for x in arrays]
    launch = backward_of(case.machine.torch, [forward(*leaves)], [leaves], [turned(case.dout)])
    return lambda i: tuple(map(turned, launch(i)))


def _on_device(case: Case, *arrays: np.ndarray) -> list[Any]:
    return [case.machine.torch.from_numpy(x).to(case.q.device) for x in arrays]


@functools.cache
def compiled(torch: Any) -> Callable:
    """FlexAttention, compiled. Each shape is a new graph, so PyTorch must not stop after its usual eight. The backward
    pass is timed with a graph that is kept, for which no buffer of it may be given away."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    from torch.nn.attention.flex_attention import flex_attention

    functorch.donated_buffer = False
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(dynamo, name):
            setattr(dynamo, name, 512)
    return torch.compile(flex_attention, dynamic=False)


def flex(name: str, case: Case) -> Callable[[int], Any]:
    from torch.nn.attention.flex_attention import BlockMask

    mask, numbers = case.mask, case.mask.numbers
    run = compiled(case.machine.torch)

    def mask_mod(b, h, i, j):
        return seen(i, j, [x[j] for x in numbers], mask.causal)

    tiles = mask.tiles(TILE, TILE)
    found = _on_device(case, *lists(tiles == CUT), *lists(tiles == WHOLE))
    block_mask = BlockMask.from_kv_blocks(*found, BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=(mask.n, mask.n))
    options: dict[str, Any] = {"block_mask": block_mask}
    if case.shape.nheads != case.shape.nheads_k:
        options["enable_gqa"] = True
    return _passing(case, lambda q, k, v: run(q, k, v, **options), heads_first=True)


def dense(name: str, case: Case) -> Callable[[int], Any]:
    """scaled_dot_product_attention with one backend and a dense mask."""
    torch = case.machine.torch
    options: dict[str, Any] = {"attn_mask": case.mask.dense(torch, case.q.dtype)}
    if case.shape.nheads != case.shape.nheads_k:
        options["enable_gqa"] = True

    def forward(q, k, v):
        with only(name):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return _passing(case, forward, heads_first=True)


# Keys of a tile of FlashAttention-4 on sm_90, by the largest head dim: its sparse blocks have as many. Its rows divide
# 128.
FA4_KEYS = {"fwd": {128: 128, 192: 112, 256: 80}, "bwd": {128: 128, 192: 96, 256: 64}}


def fa4(name: str, case: Case) -> Callable[[int], Any]:
    """FlashAttention-4's CuTe package: a mask_mod, and lists of tiles that are cut or whole. The forward pass has the
    tiles of keys of each block of rows, the backward pass those of rows of each block of keys."""
    attention = fa_function(name, "flash_attn_func")
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    mask, limit = case.mask, min(d for d in (128, 192, 256, math.inf) if case.shape.headdim <= d)
    if limit == math.inf:
        raise Refused(f"no sparse blocks are known for head dim {case.shape.headdim}")

    def sparse(way: str) -> Any:
        keys = FA4_KEYS[way][int(limit)]
        tiles = mask.tiles(TILE, keys)
        tiles = tiles if way == "fwd" else tiles.T
        cut, all_cut, full, all_full = _on_device(case, *lists(tiles == CUT), *lists(tiles == WHOLE))
        return BlockSparseTensorsTorch(
            mask_block_cnt=cut, mask_block_idx=all_cut, full_block_cnt=full, full_block_idx=all_full,
            block_size=(TILE, keys),
        )  # fmt: skip

    # A kernel may ask for keys behind the last one, whose pairs it hides itself.
    padded = [np.pad(column, (0, 2 * TILE)) for column in mask.columns]
    options: dict[str, Any] = {"mask_mod": fa4_mask_mod(mask.causal, len(padded))}
    options |= {"aux_tensors": _on_device(case, *padded), "block_sparse_tensors": sparse("fwd")}
    if case.shape.backward:
        options["block_sparse_tensors_bwd"] = sparse("bwd")

    def forward(q, k, v):
        out = attention(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    return _passing(case, forward, heads_first=False)


def fa4_mask_mod(causal: bool, count: int) -> Callable:
    """`seen` in CuTe's language: i and j are vectors of one element, aux[x] is the tensor of number x of all keys."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    int32 = cutlass.Int32

    @cute.jit
    def causal_one(batch, head, i, j, seqlen_info, aux):
        end = scalar_to_ssa(aux[0][j[0]], int32)
        return (j <= i) & (i < end)

    @cute.jit
    def causal_two(batch, head, i, j, seqlen_info, aux):
        first = scalar_to_ssa(aux[0][j[0]], int32)
        end = scalar_to_ssa(aux[1][j[0]], int32)
        return (j <= i) & ((i < first) | (i >= end))

    @cute.jit
    def full_two(batch, head, i, j, seqlen_info, aux):
        end = scalar_to_ssa(aux[0][j[0]], int32)
        first = scalar_to_ssa(aux[1][j[0]], int32)
        return (i < end) & (i >= first)

    @cute.jit
    def full_four(batch, head, i, j, seqlen_info, aux):
        first = scalar_to_ssa(aux[0][j[0]], int32)
        end = scalar_to_ssa(aux[1][j[0]], int32)
        other_first = scalar_to_ssa(aux[2][j[0]], int32)
        other_end = scalar_to_ssa(aux[3][j[0]], int32)
        return ((i < first) | (i >= end)) & ((i < other_first) | (i >= other_end))

    return {(True, 1): causal_one, (True, 2): causal_two, (False, 2): full_two, (False, 4): full_four}[causal, count]


def cudnn_flex(name: str, case: Case) -> Callable[[int], Any]:
    """flex_attention of cuDNN's Python package: a plan from the intervals of keys that each row sees."""
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    [endpoints] = _on_device(case, case.mask.endpoints[None])  # (1, numbers, n)
    plan = create_mask_plan(endpoints, case.q, case.k, case.v, build_backward=case.shape.backward)
    return _passing(case, lambda q, k, v: flex_attn_func(q, k, v, mask_plan=plan), heads_first=False)


PEERS: dict[str, dict[str, Callable[[str, Case], Callable[[int], Any]]]] = {
    "cuda": {"flex": flex, "fa4": fa4, "cudnn_flex": cudnn_flex, "efficient": dense, "cudnn": dense},
    "cpu": {"torch": dense, "flex": flex},
}
USUAL = {"cuda": "flex,fa4,cudnn_flex,efficient,cudnn", "cpu": "torch"}  # FlexAttention compiles for long on a CPU


def reason_of(error: BaseException) -> str:
    """An error in one line; compilers put what matters behind the first line of a message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *([" / ".join(lines)[:REASON]] if lines else [])])


def peer(name: str, case: Case) -> System:
    """A peer, tried as it will be timed. Any error of another project is a reason to leave it out, not to end the
    run, as long as the device still works."""
    machine = case.machine
    with warnings.catch_warnings(record=True) as said:  # PyTorch explains a refusal in warnings
        warnings.simplefilter("always")
        try:
            launch = PEERS[machine.device][name](name, case)
            machine.burst(launch, 1, estimate_us(machine, launch))()
            machine.synchronize()
            return System(name, None, launch)
        except Refused:
            raise
        except Exception as error:
            texts = [
                str(w.message).partition(" (Triggered")[0].strip() for w in said if "not used" not in str(w.message)
            ]
            texts = [text for text in texts if "kernel" in text and "disabled" not in text]
            reason = reason_of(error) + (f" ({texts[0][:REASON]})" if texts else "")
    works(machine, name, reason)
    raise Refused(reason)


def works(machine: Any, name: str, reason: str) -> None:
    """Ends the run if the device has stopped to work: then nothing more can be measured in this process."""
    try:
        machine.synchronize()
        machine.release()
        machine.random((4,), "float32", 0)
        machine.synchronize()
    except Exception as error:
        raise BenchError(f"the device does not work after {name} ({reason}): {reason_of(error)}") from None
