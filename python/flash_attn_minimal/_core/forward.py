"""The forward pass on arrays as they are, whatever their framework does around the call. flash_attn_func,
flash_attn_varlen_func and the operators of torch/ end here."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._arrays import View
from .checks import dtype_name, flag
from .fields import _results
from .launch import launch_with_workspace
from .options import ARRAYS, Options, _output, _prepare, field_of
from .repeats import SEEDS, Made, Repeats
from .structs import CPU, DTYPES, AttentionArgs

# The fields of AttentionArgs that vary between repeats of a call, for the backward pass too: see Repeats.
FIELDS = {
    **{field_of(name): name for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", *ARRAYS, "out")},
    **{name: name for name in ("lse", "workspace", "workspace_bytes", *SEEDS)},
}
repeats = Repeats("attention_forward", (AttentionArgs, FIELDS))
QKV = ("q", "k", "v")
QKV_VARLEN = (*QKV, "cu_seqlens_q", "cu_seqlens_k")


def joined(
    given: tuple[str, ...], arrays: tuple, values: tuple, options: Mapping[str, Any], are_arrays: Sequence[str] = ARRAYS
) -> tuple:
    """Adds options to what decides whether a call repeats an earlier one: the names of its arrays, the arrays, and its
    other arguments, None where these are not legal. The fourth result are the values of SEEDS, if they are given.
    are_arrays: the options that are arrays."""
    seed, offset = None, 0
    for name, x in options.items():
        if name in are_arrays:
            if x is not None:
                given += (name,)
                arrays += (x,)
            continue
        if name in SEEDS:
            seed, offset = (x, offset) if name == SEEDS[0] else (seed, x)
            continue
        if name == "out_dtype" and x is not None and type(x) is not str:
            x = dtype_name("out_dtype", x, DTYPES)  # a name can be part of a repeat
        values += name, x
    numbers = seeds(seed, offset)
    if numbers is None:
        return given, arrays, None, ()
    return given, arrays, (*values, SEEDS) if numbers else values, numbers


def seeds(seed, offset) -> tuple | None:
    """The values of SEEDS for a repeat: () without a seed, None where they are not legal or come as another type."""
    if type(offset) is not int or not 0 <= offset < 2**64:
        return None
    if seed is None:
        return None if offset else ()
    return (seed, offset) if type(seed) is int and 0 <= seed < 2**64 else None


def given_arrays(
    q, k, v, varlen: tuple | None, out, options: Options, sign: tuple | None = None
) -> tuple[tuple[str, ...], tuple]:
    """The names of the arrays of a call and the arrays, in the order of its signature if it has one."""
    cu_q, cu_k = varlen[:2] if varlen else (None, None)
    named = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    named |= {name: getattr(options, name) for name in ARRAYS} | {"out": out}
    given = sign[0][0] if sign else tuple([name for name, array in named.items() if array is not None])
    return given, tuple([named[name] for name in given])


def call(q, k, v, varlen: tuple | None, out, return_lse, options: Options):
    """Repeats an earlier call of the same signature, if there is one (see Repeats.find), or goes the long way."""
    sign, numbers = None, seeds(options.dropout_seed, options.dropout_offset)
    if numbers is not None:
        values = (return_lse, *(() if varlen is None else varlen[2:]), *options.numbers())
        given = given_arrays(q, k, v, varlen, out, options)
        results, sign = repeats.find(*given, values, options.window_size, numbers, True)
        if results is not None:
            return results
    return attend(q, k, v, varlen, out, return_lse, options, sign)


def attend(
    q, k, v, varlen: tuple | None, out, return_lse, options: Options, sign: tuple | None = None, finish: Any = None
):
    """Runs a call the long way (see repeats.py), and remembers it for the next one of this signature. varlen: None, or
    (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k); finish: how a repeat makes its results from the arrays
    that it allocated and the given ones."""
    wants_lse = flag("return_lse", return_lse)
    args, views = _prepare(q, k, v, varlen, options)
    qv = views[0]
    shape, rows = (*qv.shape[:-1], args.headdim_v), (args.batch, args.nheads, args.seqlen_q)
    fill = fill_lse = fits = None
    if varlen is not None:
        rows, fits = (args.nheads, args.total_q), _covers(args, views[3].device)
        if fits is None or not fits([0, 0, 0, views[3].pointer]):
            fill, fill_lse, fits = 0, -np.inf, None
    out_view = _output(args, views, out, shape, fill is not None)
    made = {} if out is not None else {"out": Made(out_view, fill)}
    lse_view = None
    if wants_lse:
        lse_view = _new(qv, rows, fill_lse)
        args.lse = lse_view.pointer
        made["lse"] = Made(lse_view, fill_lse)
    if workspace := launch_with_workspace("attention_forward", args, args, views, (out_view, lse_view)):
        made["workspace"] = Made(workspace)
    if sign:
        arrays = given_arrays(q, k, v, varlen, out, options, sign)[1]
        repeats.remember(
            sign, args, arrays, views[:3], made, fits=fits, finish=finish, views=[out_view],
            seeds=options.dropout_seed is not None, gradients=True,
        )  # fmt: skip
    return _results(out, out_view, lse_view)


def _new(like: View, shape: tuple[int, ...], fill: float | None) -> View:
    door = like.door
    return door.empty(like, shape, "float32") if fill is None else door.full(like, shape, "float32", fill)


def _covers(args: AttentionArgs, device: int) -> Callable[[list[int]], bool] | None:
    """A function of the addresses of a call's arrays: whether the sequences cover all rows, so that none has to be
    filled. None where the lengths are on a GPU."""
    if device != CPU:
        return None
    end, total_q = 4 * args.batch, args.total_q
    return lambda addresses: ct.c_int32.from_address(addresses[3] + end).value == total_q
