"""Attention of sequences whose tokens are spread over several ranks: plan, forward, backward.

Every rank holds some tokens of each sequence (layouts.py) and makes the same call with its own q, k and v. It gets its
rows of the result that one device would compute from all tokens.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import _arrays
from .._arrays import View, torch_modes
from .._core import checks
from .._core.fields import _destination, _put_strides
from .._core.forward import repeats
from .._core.library import last_error, load
from .._core.options import (
    FLOAT8,
    FROM_START,
    OPTION_ARRAYS,
    Array,
    AttentionOptions,
    Options,
    Unpack,
    _options_of,
    with_signature,
)
from .._core.queries import reasons
from .._core.repeats import signature
from .._core.structs import DTYPES, AttentionArgs, AttentionBackwardArgs, new
from ..backward import _contiguous_input, _input, _new_dbias, check_wanted
from ..errors import BadArgument, Unsupported
from ._rank_call import RankCall, make_call
from ._structs import KINDS, LAYOUTS, MODES, MOST_RANKS, DistributedArgs, DistributedBackwardArgs
from .groups import Group
from .layouts import _local, _segments, check_flat, equal_lengths, host_lengths

_PLACES = {name: repeats.fields[name][1] for name in OPTION_ARRAYS}
_NUMBERS = tuple(i for i, name in enumerate(Options._fields) if name not in OPTION_ARRAYS)
_MODE_NAMES = {number: name for name, number in MODES.items()}


@dataclass(frozen=True)
class DistributedPlan:
    """The answer of `plan`: what a call would do on one rank."""

    status: str  # "FA_OK", or the name of the status that the call would raise
    error: str  # the text of that error, "" when there is none
    mode: str  # "gather" or "ulysses"
    rows: tuple[int, int]  # rows of q and of k on this rank
    workspace_bytes: int  # scratch memory, allocated by the call itself
    shared_bytes: int  # memory that the group takes on every rank: see Group.reserve
    received_bytes: int  # bytes that this rank receives
    calls: int  # the number of launches of attention
    why_not: dict[str, str]  # for each mode that does not serve the call, the reason


class RankOptions(AttentionOptions, total=False):
    """For type checkers: those of flash_attn_func, after those that say where the rows of a rank are."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlen_q: int | None
    seqlen_k: int | None
    layout: str
    mode: str
    groups: int


WHERE = {"cu_seqlens_q": None, "cu_seqlens_k": None, "seqlen_q": None, "seqlen_k": None}
WHERE |= {"layout": "zigzag", "mode": "auto", "groups": 0}
shows_options = with_signature(RankOptions, **WHERE)


def split_options(function: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], Options]:
    """The arguments of _Whole, and the options of attention, among a function's keyword arguments."""
    where = {name: given.get(name, default) for name, default in WHERE.items()}
    return where, _options_of(function, {name: x for name, x in given.items() if name not in WHERE})


class _Whole:
    """The arguments that define where a rank's rows are in the sequences."""

    def __init__(self, cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k, layout, mode, groups):
        self.cu_seqlens = [None if cu is None else host_lengths(f"cu_seqlens_{x}", cu) for x, cu in
                           (("q", cu_seqlens_q), ("k", cu_seqlens_k))]  # fmt: skip
        self.seqlens = seqlen_q, seqlen_k
        self.layout, self.mode, self.groups = layout, mode, groups

    def values(self) -> tuple:
        """The arguments in a form for signatures."""
        cu = [None if cu is None else cu.tobytes() for cu in self.cu_seqlens]
        return (*cu, *self.seqlens, self.layout, self.mode, self.groups)

    def put(self, call: DistributedArgs, args: AttentionArgs, views: list[View], rank: int, size: int) -> list:
        """Puts the arguments into the structs, and checks q and k against them. Returns arrays that keep the lengths
        alive."""
        call.layout = LAYOUTS[checks.one_of("layout", self.layout, LAYOUTS)]
        call.mode = MODES[checks.one_of("mode", self.mode, MODES)]
        call.groups = checks.integer("groups", self.groups, -(2**31), 2**31 - 1)
        qv, kv = views[:2]
        if len(qv.shape) == 4:
            check_flat(self.layout, qv.shape[0])
            lengths = [self._dense(x, view, size) for x, view in (("q", qv), ("k", kv))]
        else:
            lengths = self._packed()
        longest = []
        for x, cu, view in zip("qk", lengths, (qv, kv), strict=True):
            if cu.size < 2 or cu[0] or (np.diff(cu) < 0).any():
                raise BadArgument(
                    f"cu_seqlens_{x}={checks.quoted(cu.tolist())} does not go from 0 upwards: expected batch + 1 "
                    "cumulative lengths, such as [0, 3, 8] for sequences of 3 and 5 tokens"
                )
            local = np.diff(_local(_segments(call.layout, rank, size, cu), cu.size - 1))
            rows, held = rows_of(view), int(local.sum())
            if rows != held:
                raise BadArgument(
                    f"{x} has shape {tuple(view.shape)}: rank {rank} of {size} holds {held} of the {cu[-1]} tokens "
                    f"of {f'cu_seqlens_{x}' if len(qv.shape) == 3 else f'{cu.size - 1} sequences of {cu[1]}'} with "
                    f"layout={self.layout!r}"
                )
            longest.append((int(local.max()), int(np.diff(cu).max())))
        if lengths[1].size != lengths[0].size:
            raise BadArgument(
                f"cu_seqlens_k has {lengths[1].size} entries, cu_seqlens_q has {lengths[0].size}: both are batch + 1"
            )
        call.batch = args.batch = lengths[0].size - 1
        call.cu_seqlens_q, call.cu_seqlens_k = lengths[0].ctypes.data, lengths[1].ctypes.data
        args.total_q, args.total_k = rows_of(qv), rows_of(kv)
        args.seqlen_q, args.seqlen_k = longest[0][0], longest[1][1]  # the rows and columns of bias and mask
        return lengths

    def _dense(self, x: str, view: View, size: int) -> np.ndarray:
        given = self.cu_seqlens["qk".index(x)]
        if given is not None:
            raise BadArgument(
                f"cu_seqlens_{x}={checks.quoted(given.tolist())} with {x} of shape {tuple(view.shape)}: a dense batch "
                f"has seqlen_{x}, and packed arrays are (rows, heads, dim)"
            )
        length_q, length = self.seqlens[0], self.seqlens["qk".index(x)]
        length = length_q if length is None else length
        length = view.shape[1] * size if length is None else checks.integer(f"seqlen_{x}", length, 0, 2**31 - 1)
        return equal_lengths(view.shape[0], length)

    def _packed(self) -> list[np.ndarray]:
        cu_q, cu_k = self.cu_seqlens
        for x, length in zip("qk", self.seqlens, strict=True):
            if length is not None:
                raise BadArgument(
                    f"seqlen_{x}={checks.quoted(length)} with packed arrays: cu_seqlens_{x} has the lengths"
                )
        if cu_q is None:
            raise BadArgument("cu_seqlens_q is None: packed arrays need the lengths of the whole sequences")
        return [cu_q, cu_q if cu_k is None else cu_k]


def rows_of(view: View) -> int:
    return int(np.prod(view.shape[:-2], dtype=np.int64))


def put_rows(struct: ct.Structure, name: str, view: View) -> None:
    """Puts the address and strides of packed rows (rows, heads, dim), or of a dense batch seen as such rows."""
    *batch, rows, _, _ = view.shape
    *outer, row, head, _ = view.strides
    if batch and batch[0] > 1:
        if rows == 1:
            row = outer[0]
        elif rows and outer[0] != rows * row:
            raise BadArgument(
                f"{name} has strides {tuple(view.strides)} for shape {tuple(view.shape)}: the rows of a sequence begin "
                "where those of the sequence before end"
            )
    _put_strides(struct, name, view.pointer, (0, row, head), ("batch", "row", "head"))


def refuse_unserved(options: Options) -> None:
    """Raises for options that no call across ranks takes."""
    for name, subject in FROM_START.items():
        if name in OPTION_ARRAYS and getattr(options, name) is not None:
            raise Unsupported(
                f"{name} is given, but attention across ranks does not take it: {subject} count from the start of "
                "whole sequences, and a rank has parts of them"
            )
    for name in FLOAT8:
        if getattr(options, name) is not Options._field_defaults[name]:
            raise Unsupported(f"{name}={checks.quoted(getattr(options, name))}: float8 is not served across ranks")


def check_axes(name: str, x: Any, q: Any) -> None:
    """Raises unless one of q, k and v, any object with a shape, has the right number of axes."""
    if len(x.shape) not in (3, 4) or len(x.shape) != len(q.shape):
        axes = "(rows, heads, dim), or (batch, rows, heads, dim)" if x is q else f"{len(q.shape)} axes as q has"
        raise BadArgument(f"{name} has shape {tuple(x.shape)}: expected {axes}")


def _prepare(q: Any, k: Any, v: Any, whole: _Whole, options: Options, rank: int, size: int):
    """The structs of a forward call, except for its results and workspace: (args, call, views, lengths)."""
    refuse_unserved(options)
    views = [_arrays.view(x, name) for x, name in ((q, "q"), (k, "k"), (v, "v"))]
    qv, kv, vv = views
    for name, view in zip("qkv", views, strict=True):
        check_axes(name, view, qv)
        checks.last_axis(name, view)
        checks.same_place(name, view, "q", qv)
        checks.floats(name, view)
        if view.dtype != qv.dtype:
            raise BadArgument(f"{name} is {view.dtype}, but q is {qv.dtype}: they must be the same")
    *batch, _, nheads, headdim = qv.shape
    *batch_k, _, nheads_k, headdim_k = kv.shape
    if batch_k != batch or headdim_k != headdim:
        raise BadArgument(f"k has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: batch and headdim must agree")
    checks.values_like_keys("v", vv, "k", kv)
    args, call = new(AttentionArgs), new(DistributedArgs)
    call.attention = ct.pointer(args)
    args.device, args.dtype = qv.device, DTYPES[qv.dtype]
    args.nheads, args.nheads_k, args.headdim, args.headdim_v = nheads, nheads_k, headdim, vv.shape[-1]
    for name, view in zip("qkv", views, strict=True):
        put_rows(args, name, view)
    lengths = whole.put(call, args, views, rank, size)
    options.put(args, views)
    scores = [name for name in ("bias", "mask") if getattr(options, name) is not None]
    for name in scores:  # frameworks give an empty array neither an address nor strides
        if not getattr(args, f"{name}_data"):
            setattr(args, f"{name}_row_stride", max(1, getattr(args, f"{name}_row_stride")))
    if whole.mode == "ulysses" and scores and not _shows_rows(call, lengths[0], size):
        for name in scores:
            if len(shape := _arrays.view(getattr(options, name), name).shape) > 1:
                setattr(args, f"{name}_row_stride", shape[-1])  # not 0, so that the library refuses it
    return args, call, views, lengths


def _shows_rows(call: DistributedArgs, cu_q: np.ndarray, size: int) -> bool:
    """Whether any rank has two rows of a sequence. If none has, an axis of one row may hold each rank's own row or one
    row that all share, and nothing tells which."""
    batch = cu_q.size - 1
    return any(np.diff(_local(_segments(call.layout, r, size, cu_q), batch)).max(initial=0) > 1 for r in range(size))


def check_place(group: Group, view: View, name: str = "q") -> None:
    if view.place != group.device:
        raise BadArgument(f"{name} is on {view.place}, but the group's device of rank {group.rank} is {group.device}")


def check_group(group: Any) -> None:
    if not isinstance(group, Group):
        given = "" if hasattr(group, "shape") else f"={checks.quoted(group)}"
        raise BadArgument(f"group{given} is a {type(group).__name__}: expected a Group of this rank")


@shows_options
def forward(
    group: Group,
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out: Any = None,
    **options: Unpack[RankOptions],
) -> Any:
    """This rank's rows of flash_attn_varlen_func, or flash_attn_func, over the tokens of all ranks. Collective.

    Arguments:
        q, k, v: this rank's rows of each sequence, in the order of `segments`: packed (rows, heads, dim) with
            cu_seqlens_q, or a dense batch of equal lengths (batch, rows, heads, dim). float32, float16 or bfloat16. The
            heads of a row must be adjacent in memory, and the rows of a sequence must follow those of the one before.
        cu_seqlens_q, cu_seqlens_k: where the whole sequences begin in a packed array of all tokens, (batch + 1,)
            integers in host memory, the same on every rank. cu_seqlens_k=None means cu_seqlens_q.
        seqlen_q, seqlen_k: for a dense batch, the whole length of its sequences. seqlen_q=None means `size` times this
            rank's; seqlen_k=None means seqlen_q if that is given, else `size` times this rank's.
        layout: which tokens a rank holds, see layouts.py. "flat" is for packed arrays, or a batch of one.
        mode: how the ranks share the work.
            "gather": a rank fetches the keys and values that its queries see. Serves every option.
            "ulysses": a rank fetches all tokens of some heads, and sends the rows of out back. The result is bitwise
                that of one device. Needs at least as many heads as ranks, and no bias or mask with an axis of rows.
                Where no rank has two rows of a sequence, an axis of size 1 is refused too: leave it out.
            "auto": the mode that moves the fewest bytes.
        groups: the number of pieces that the heads are cut into, so that transfers for one piece overlap work on
            another; 0 lets the library choose.
        return_lse: also return lse.
        out: array for the result, of q's shape with headdim_v, which is also returned.
        options: those of flash_attn_func except float8's, the same on every rank. bias and mask broadcast to (batch,
            nheads, rows, seqlen_k): row i of sequence b is this rank's i-th row of the sequence, columns are all keys.
            startend_row_indices, which only gather takes, is (batch, heads, seqlen_k, numbers) for all keys of whole
            sequences, padded to the longest, and its rows count from the start of whole sequences.
            num_threads is for this rank only.

    Returns:
        out, in q's dtype; with return_lse the pair (out, lse). lse is (nheads, rows) float32 over all rows of this
        rank. For a dense batch, too, these are the rows of its sequences one after another.

    Raises:
        BadArgument, Unsupported, OutOfMemory: on every rank, whichever rank has the cause; the group stays usable.
        RankLost, CudaError: the group has ended.
    """
    check_group(group)
    arrays = q, k, v, *[options.get(name) for name in OPTION_ARRAYS], out

    def prepare(whole: _Whole, chosen: Options) -> tuple[RankCall, list[View]]:
        args, call, views, lengths = _prepare(q, k, v, whole, chosen, group.rank, group.size)
        qv = views[0]
        check_place(group, qv)
        prepared = RankCall("forward", call, args, qv, lengths)
        prepared.places = _places(args, arrays, ("q_data", "k_data", "v_data", *_PLACES.values(), "out_data"))
        shape = (*qv.shape[:-1], args.headdim_v)
        if out is None:
            view = qv.door.empty(qv, shape, qv.dtype)
        else:
            view = _destination("out", out, dict(zip("qkv", views, strict=False)), shape, qv.dtype)
        put_rows(args, "out", view)
        prepared.output(args, "out_data", view, None if out is None else len(arrays) - 1)
        if checks.flag("return_lse", return_lse):
            prepared.output(args, "lse", qv.door.empty(qv, (args.nheads, args.total_q), "float32"))
        return prepared, views

    results = _make("forward", group, arrays, ("forward", return_lse), options, prepare)
    return tuple(results) if len(results) > 1 else results[0]


@shows_options
def backward(
    group: Group,
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: Any = None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    **options: Unpack[RankOptions],
) -> tuple[Array, ...]:
    """This rank's rows of the gradients of sum(out * dout) + sum(lse * dlse) over the tokens of all ranks. Collective.

    The arguments of the forward call must be given again; only `mode`, `groups`, `kernel`, `deterministic` and
    `num_threads` may differ.

    Arguments besides those of the forward call:
        dout: like out, this rank's rows of the gradient of the loss.
        out, lse: the results of `forward`.
        dlse: like lse, the gradient of the loss through lse; None means zero.
        return_dbias: also return the gradient of bias: float32, of bias's shape, from the rows of this rank only. Where
            an axis is broadcast, it is the sum over these rows.
        return_dsinks: also return the gradient of sinks, (nheads,) float32: the sum over all ranks, on every rank.
        dq, dk, dv: arrays for the results, of the shapes of q, k and v and of their dtype, which are also returned.

    Returns:
        (dq, dk, dv), then dbias and dsinks if requested.

    Raises: as `forward`.
    """
    check_group(group)
    if torch_modes.deterministic(q):
        options["deterministic"] = options.get("deterministic") or True
    given = dq, dk, dv
    arrays = q, k, v, *[options.get(name) for name in OPTION_ARRAYS], out, lse, dout, dlse, *given

    def prepare(whole: _Whole, chosen: Options) -> tuple[RankCall, list[View]]:
        args, call, views, lengths = _prepare(q, k, v, whole, chosen, group.rank, group.size)
        qv, kv, vv = views[:3]
        check_place(group, qv)
        outer, gradients = new(DistributedBackwardArgs), new(AttentionBackwardArgs)
        outer.forward, outer.gradients = ct.pointer(call), ct.pointer(gradients)
        prepared = RankCall("backward", outer, args, qv, lengths)
        forward_fields = ("q_data", "k_data", "v_data", *_PLACES.values(), "out_data", "lse")
        prepared.places = [
            *_places(args, arrays[: len(forward_fields)], forward_fields),
            *_places(gradients, arrays[len(forward_fields) :], ("dout_data", "dlse", "dq_data", "dk_data", "dv_data")),
        ]
        inputs, rows = {"q": qv, "k": kv, "v": vv}, (args.nheads, args.total_q)
        for name, array, struct in (("out", out, args), ("dout", dout, gradients)):
            inputs[name] = _input(views, name, array, (*qv.shape[:-1], args.headdim_v), qv.dtype)
            put_rows(struct, name, inputs[name])
        args.lse = _contiguous_input(views, "lse", lse, rows)
        if dlse is not None:
            gradients.dlse = _contiguous_input(views, "dlse", dlse, rows)
        for i, (name, array, like) in enumerate(zip(("dq", "dk", "dv"), given, (qv, kv, vv), strict=True)):
            shape = tuple(like.shape)
            if array is None:
                view = qv.door.empty(qv, shape, qv.dtype)
            else:
                view = _destination(name, array, inputs, shape, qv.dtype)
            put_rows(gradients, name, view)
            inputs[name] = view
            prepared.output(gradients, f"{name}_data", view, None if array is None else len(arrays) - 3 + i)
        wanted = checks.flag("return_dbias", return_dbias), checks.flag("return_dsinks", return_dsinks)
        check_wanted(chosen, *wanted)
        if wanted[0]:
            view = _new_dbias(gradients, qv, chosen.bias, args.seqlen_k)
            if view.shape[-1] != (shape := _arrays.view(chosen.bias, "bias").shape)[-1]:
                raise Unsupported(f"return_dbias=True of a bias of shape {tuple(shape)}: give it all keys as columns")
            prepared.output(gradients, "dbias_data", view)
        if wanted[1]:
            prepared.output(gradients, "dsinks", qv.door.full(qv, (args.nheads,), "float32", 0))
        return prepared, views

    # The library adds to dbias, so it must begin with zeros: such a call is not repeated.
    repeats = None if return_dbias else ("backward", return_dsinks)
    return tuple(_make("backward", group, arrays, repeats, options, prepare))


def _places(args: ct.Structure, arrays: tuple, fields: tuple[str, ...]) -> list[tuple[ct.Structure, str] | None]:
    return [None if array is None else (args, field) for array, field in zip(arrays, fields, strict=True)]


def _make(name: str, group: Group, arrays: tuple, repeats: tuple | None, options: Any, prepare: Any) -> list[Any]:
    """Makes a call whose arguments are checked inside the collective call, so that the other ranks hear of errors.
    repeats: the beginning of the signature, or None for a call that is not repeated."""

    def start() -> tuple[tuple | None, Any]:
        where, chosen = split_options(name, options)
        whole = _Whole(**where)
        values = repeats and (*repeats, *whole.values(), *[chosen[i] for i in _NUMBERS])
        return values and signature(arrays, values, chosen.window_size), lambda: prepare(whole, chosen)

    return make_call(group, arrays, start)


@shows_options
def plan(
    group: Group | tuple[int, int],
    q: Any,
    k: Any,
    v: Any,
    *,
    backward: bool = False,
    kind: str = "threads",
    **options: Unpack[RankOptions],
) -> DistributedPlan:
    """Tells what `forward`, or with backward=True `backward`, would do with the same arguments on this rank, without
    doing it. Not collective. `group` may also be (rank, size); `kind` is then the kind of the planned group.

    >>> import numpy as np
    >>> from flash_attn_minimal.distributed import plan
    >>> q, k = np.zeros((1, 1024, 8, 64), np.float32), np.zeros((1, 1024, 4, 64), np.float32)
    >>> plan((0, 4), q, k, k, causal=True).mode  # for 4096 tokens, 1024 of them on each rank
    'ulysses'
    """
    if isinstance(group, Group):
        rank, size, kind = group.rank, group.size, group.kind
    else:
        try:
            rank, size = group
        except (TypeError, ValueError):
            raise BadArgument(f"group={checks.quoted(group)} is neither a Group nor (rank, size)") from None
        size = checks.integer("size", size, 1, MOST_RANKS)
        rank = checks.integer("rank", rank, 0, size - 1)
        checks.one_of("kind", kind, KINDS)
    where, chosen = split_options("plan", options)
    args, call, views, lengths = _prepare(q, k, v, _Whole(**where), chosen, rank, size)
    qv, kv, vv = views[:3]
    heads, heads_k, dim, dim_v = args.nheads, args.nheads_k, args.headdim, args.headdim_v
    _put_strides(args, "out", None, (0, heads * dim_v, dim_v), ("batch", "row", "head"))
    name, outer = "forward", call
    if checks.flag("backward", backward):
        gradients, name, outer = new(AttentionBackwardArgs), "backward", new(DistributedBackwardArgs)
        outer.forward, outer.gradients = ct.pointer(call), ct.pointer(gradients)
        for x, n, d in (("dout", heads, dim_v), ("dq", heads, dim), ("dk", heads_k, dim), ("dv", heads_k, dim_v)):
            _put_strides(gradients, x, None, (0, n * d, d), ("batch", "row", "head"))
    lib = load()
    found = RankCall(name, outer, args, qv, lengths).ask(kind, rank, size)
    return DistributedPlan(
        status=lib.fa_status_name(found.status).decode(),
        error=last_error() if found.status else "",
        mode=_MODE_NAMES.get(found.mode, "") if found.mode else "",
        rows=(found.rows_q, found.rows_k),
        why_not=reasons(found.why_not),
        **{name: getattr(found, name) for name in ("workspace_bytes", "shared_bytes", "received_bytes", "calls")},
    )
