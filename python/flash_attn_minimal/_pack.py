"""From arrays to the C struct: every check that Python makes, with its text; `_prepare` for the inputs and options,
`_output` for the output."""

from __future__ import annotations

import ctypes as ct
import inspect
import math
import operator
from collections.abc import Collection
from typing import Any

import numpy as np

from . import _arrays
from ._arrays import View
from ._library import DTYPES, AttentionArgs, BadArgument

_ARGS_SIZE = ct.sizeof(AttentionArgs)
_OPEN = (-1, -1)
_NAMES = {number: name for name, number in DTYPES.items()}


def _prepare(
    q,
    k,
    v,
    varlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=_OPEN,
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    bias=None,
    mask=None,
    sinks=None,
    top_left=False,
    dropout_seed=None,
    dropout_offset=0,
    kernel=None,
    allow_tf32=False,
    num_threads=0,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    out_dtype=None,
    fast_accum=False,
) -> tuple[AttentionArgs, list[View]]:
    """Everything but the outputs and the workspace. The views (q, k, v, then the optional ones) keep the memory
    alive."""
    qv, kv, vv = _arrays.view(q, "q"), _arrays.view(k, "k"), _arrays.view(v, "v")
    views = [qv, kv, vv]
    rank = 4 if varlen is None else 3
    for name, view in (("q", qv), ("k", kv), ("v", vv)):
        if len(view.shape) != rank:
            expected = "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim)"
            raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected {expected}")
        if view.strides[-1] != 1 and view.shape[-1] > 1:
            _check_last_axis(name, view)
    _check_same_place("k", kv, "q", qv)
    _check_same_place("v", vv, "q", qv)
    if kv.dtype != qv.dtype or vv.dtype != qv.dtype:
        raise BadArgument(f"q is {qv.dtype}, k is {kv.dtype}, v is {vv.dtype}: they must be the same")
    _check_dtype("q", qv)

    args = AttentionArgs()
    args.struct_size = _ARGS_SIZE
    args.device = qv.device
    args.dtype = DTYPES[qv.dtype]
    args.q_data, args.k_data, args.v_data = qv.pointer, kv.pointer, vv.pointer
    if varlen is None:
        batch, seqlen_q, nheads, headdim = qv.shape
        batch_k, seqlen_k, nheads_k, headdim_k = kv.shape
        if batch_k != batch or headdim_k != headdim:
            raise BadArgument(
                f"k has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: batch and headdim must agree"
            )
        if vv.shape[:3] != kv.shape[:3]:
            raise BadArgument(f"v has shape {tuple(vv.shape)}, but k has {tuple(kv.shape)}: all but headdim must agree")
        args.q_batch_stride, args.q_row_stride, args.q_head_stride, _ = qv.strides
        args.k_batch_stride, args.k_row_stride, args.k_head_stride, _ = kv.strides
        args.v_batch_stride, args.v_row_stride, args.v_head_stride, _ = vv.strides
    else:
        total_q, nheads, headdim = qv.shape
        total_k, nheads_k, headdim_k = kv.shape
        if headdim_k != headdim:
            raise BadArgument(f"k has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: headdim must agree")
        if vv.shape[:2] != kv.shape[:2]:
            raise BadArgument(f"v has shape {tuple(vv.shape)}, but k has {tuple(kv.shape)}: all but headdim must agree")
        args.q_row_stride, args.q_head_stride, _ = qv.strides
        args.k_row_stride, args.k_head_stride, _ = kv.strides
        args.v_row_stride, args.v_head_stride, _ = vv.strides
        args.total_q, args.total_k = total_q, total_k
        batch, seqlen_q, seqlen_k = _sequences(args, views, *varlen)
    if vv.shape[-1] < 1:  # 0 would mean "the same as headdim" to the library
        raise BadArgument(f"v has shape {tuple(vv.shape)}: headdim_v=0 is outside 1 .. 512")
    args.batch, args.seqlen_q, args.seqlen_k = batch, seqlen_q, seqlen_k
    args.nheads, args.nheads_k, args.headdim, args.headdim_v = nheads, nheads_k, headdim, vv.shape[-1]

    _score_options(args, views, softmax_scale, causal, window_size, softcap, alibi_slopes, sinks)
    if top_left is not False:
        args.top_left = _flag("top_left", top_left)
    if bias is not None:
        view = _option(views, "bias", bias, (qv.dtype, "float32"))
        args.bias_dtype = DTYPES[view.dtype]
        strides = _broadcast("bias", view, (batch, nheads, seqlen_q, seqlen_k))
        args.bias_data, (args.bias_batch_stride, args.bias_head_stride, args.bias_row_stride) = view.pointer, strides
    if mask is not None:
        view = _option(views, "mask", mask, ("bool", "uint8"))
        strides = _broadcast("mask", view, (batch, nheads, seqlen_q, seqlen_k))
        args.mask_data, (args.mask_batch_stride, args.mask_head_stride, args.mask_row_stride) = view.pointer, strides
    if chance := _number("dropout_p", dropout_p):
        args.dropout_p = chance
        if dropout_seed is None:
            raise BadArgument(
                f"dropout_p={chance} without dropout_seed: name the seed, so that the same call drops the same elements"
            )
    if dropout_seed is not None:
        args.dropout_seed = _integer("dropout_seed", dropout_seed, 0, 2**64 - 1)
    args.dropout_offset = _integer("dropout_offset", dropout_offset, 0, 2**64 - 1)
    if deterministic is not False:
        args.deterministic = _flag("deterministic", deterministic)
    if allow_tf32 is not False:
        args.allow_tf32 = _flag("allow_tf32", allow_tf32)
    args.num_threads = _integer("num_threads", num_threads, -(2**31), 2**31 - 1)
    for name, factors, heads in (("q", q_descale, nheads), ("k", k_descale, nheads_k), ("v", v_descale, nheads_k)):
        if factors is not None:
            _descale(args, views, f"{name}_descale", factors, (batch, heads))
    if out_dtype is not None:
        args.out_dtype = DTYPES[_name("out_dtype", out_dtype, DTYPES)]
    if fast_accum is not False:
        args.fast_accum = _flag("fast_accum", fast_accum)
    _kernel(args, kernel)
    return args, views


def _score_options(args: AttentionArgs, views: list[View], softmax_scale, causal, window_size, softcap, slopes, sinks):
    """The options that every kind of call has."""
    if causal is not False:
        args.causal = _flag("causal", causal)
    if softmax_scale is not None:
        args.softmax_scale, args.has_softmax_scale = _number("softmax_scale", softmax_scale), 1
    args.softcap = cap = _number("softcap", softcap)
    if 0 < abs(cap) < _LEAST_FLOAT:
        raise BadArgument(f"softcap={_quoted(softcap)} is below the normal numbers of a float32")
    if window_size is not _OPEN:
        args.window_left, args.window_right = _window(window_size)
        args.has_window = 1
    if slopes is not None:
        view = _option(views, "alibi_slopes", slopes, ("float32",))
        batch, nheads = args.batch, args.nheads
        if tuple(view.shape) not in ((nheads,), (batch, nheads)):
            raise BadArgument(
                f"alibi_slopes has shape {tuple(view.shape)}: expected ({nheads},) or ({batch}, {nheads})"
            )
        _check_last_axis("alibi_slopes", view)
        args.alibi_slopes = view.pointer
        args.alibi_batch_stride = view.strides[0] if len(view.shape) == 2 else 0
    if sinks is not None:
        view = _option(views, "sinks", sinks, ("float32",))
        if tuple(view.shape) != (args.nheads,):
            raise BadArgument(f"sinks has shape {tuple(view.shape)}: expected ({args.nheads},)")
        _check_last_axis("sinks", view)
        args.sinks = view.pointer


def _kernel(args: AttentionArgs, kernel: Any) -> None:
    if kernel is not None:
        if not isinstance(kernel, str) or not kernel.isascii() or "\0" in kernel:
            raise BadArgument(f"kernel={_quoted(kernel)} is not the name of a kernel")
        args.kernel = kernel.encode()


_DEFAULTS = {name: option.default for name, option in [*inspect.signature(_prepare).parameters.items()][4:]}
_PREPARED = [*_DEFAULTS]  # the options, in order


def _lengths(what: str, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> tuple | None:
    """The arguments that make a call or query a varlen one: all of them, or None where there are none."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    missing = [name for name, x in zip(names, lengths, strict=True) if x is None]
    if 0 < len(missing) < 4:
        raise BadArgument(f"{missing[0]} is None: a varlen {what} needs {', '.join(names[:3])} and {names[3]}")
    return None if missing else lengths


def _sequences(args: AttentionArgs, views: list[View], cu_q, cu_k, max_q, max_k) -> tuple[int, int, int]:
    """Reads the arguments that only varlen calls have; returns batch, seqlen_q, seqlen_k."""
    cu_q = _option(views, "cu_seqlens_q", cu_q, ("int32",))
    cu_k = _option(views, "cu_seqlens_k", cu_k, ("int32",))
    for name, view in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        if len(view.shape) != 1 or view.shape[0] < 1:
            raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected (batch + 1,)")
        _check_last_axis(name, view)
    if cu_k.shape[0] != cu_q.shape[0]:
        raise BadArgument(
            f"cu_seqlens_k has {cu_k.shape[0]} entries, but cu_seqlens_q has {cu_q.shape[0]}: both have batch + 1"
        )
    args.cu_seqlens_q, args.cu_seqlens_k = cu_q.pointer, cu_k.pointer
    seqlen_q = _integer("max_seqlen_q", max_q, 0, 2**63 - 1)
    seqlen_k = _integer("max_seqlen_k", max_k, 0, 2**63 - 1)
    return cu_q.shape[0] - 1, seqlen_q, seqlen_k


def _descale(args: AttentionArgs, views: list[View], name: str, factors: Any, full: tuple[int, int]) -> None:
    """Puts an array that broadcasts to `full`, (batch, heads), into args; stride 0 repeats an axis."""
    view = _option(views, name, factors, ("float32",))
    shape, strides = tuple(view.shape), tuple(view.strides)
    if len(shape) > 2 or any(have not in (1, want) for have, want in zip(shape[::-1], full[::-1])):  # noqa: B905
        raise BadArgument(f"{name} has shape {shape}, which does not broadcast to (batch, heads) = {full}")
    moves = [stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True)]
    batch_stride, head_stride = [0] * (2 - len(shape)) + moves
    setattr(args, f"{name}_data", view.pointer)
    setattr(args, f"{name}_batch_stride", batch_stride)
    setattr(args, f"{name}_head_stride", head_stride)


def _output(args: AttentionArgs, views: list[View], out: Any, shape: tuple[int, ...], zeroed: bool) -> View:
    """The given or a new output, put into args."""
    qv = views[0]
    dtype = _NAMES.get(args.out_dtype) or ("bfloat16" if qv.dtype == "float8_e4m3fn" else qv.dtype)
    if out is None:
        view = qv.door.full(qv, shape, dtype, 0) if zeroed else qv.door.empty(qv, shape, dtype)
    else:
        view = _destination("out", out, dict(zip("qkv", views, strict=False)), shape, dtype)
    _put_tensor(args, "out", view)
    return view


def _put_tensor(args: ct.Structure, name: str, view: View) -> None:
    """The address and strides of a (batch, rows, heads, dim) or (rows, heads, dim) array."""
    strides = view.strides if len(view.shape) == 4 else (0, *view.strides)
    setattr(args, f"{name}_data", view.pointer)
    for axis, stride in zip(("batch", "row", "head"), strides, strict=False):
        setattr(args, f"{name}_{axis}_stride", stride)


def _destination(name: str, array: Any, inputs: dict[str, View], shape: tuple[int, ...], dtype: str) -> View:
    """An array given to be written: of this shape and dtype, from where the inputs come from, and none of them."""
    first_name, first = next(iter(inputs.items()))
    view = _arrays.view(array, name)
    view.door.check_seen()
    _check_same_place(name, view, first_name, first)
    if tuple(view.shape) != shape or view.dtype != dtype:
        raise BadArgument(f"{name} is {view.dtype} {tuple(view.shape)}: expected {dtype} {shape}")
    _check_last_axis(name, view)
    if not view.writable:
        raise BadArgument(f"{name} is a read-only {view.door.name} array")
    for other_name, other in inputs.items():
        if view.pointer == other.pointer and view.pointer and 0 not in shape:
            raise BadArgument(
                f"{name} starts at the same address as {other_name}: it would be overwritten while it is read"
            )
    return view


def _option(views: list[View], name: str, array: Any, dtypes: tuple[str, ...]) -> View:
    """One more input array, of one of these dtypes, from where q comes from."""
    view = _arrays.view(array, name)
    _check_same_place(name, view, "q", views[0])
    if view.dtype not in dtypes:
        raise BadArgument(f"{name} is {view.dtype}: expected {' or '.join(dict.fromkeys(dtypes))}")
    views.append(view)
    return view


def _broadcast(name: str, view: View, full: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """(batch, head, row) strides of an array that broadcasts to `full`; 0 repeats an axis. Columns are never
    repeated."""
    shape, strides = tuple(view.shape), tuple(view.strides)
    if not 1 <= len(shape) <= 4 or any(have not in (1, want) for have, want in zip(shape[::-1], full[::-1])):  # noqa: B905
        raise BadArgument(
            f"{name} has shape {shape}, which does not broadcast to (batch, nheads, seqlen_q, seqlen_k) = {full}"
        )
    if shape[-1] != full[-1]:
        raise BadArgument(f"{name} has shape {shape}: its last axis must have all seqlen_k={full[-1]} columns")
    _check_last_axis(name, view)
    padded = (0,) * (4 - len(shape)) + tuple(
        stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True)
    )
    return padded[:3]


def _check_same_place(name: str, view: View, first_name: str, first: View) -> None:
    if view.door is not first.door:
        raise BadArgument(
            f"{name} is a {view.door.name} array, but {first_name} is a {first.door.name} array: "
            "use one of them for all"
        )
    if view.device != first.device or view.index != first.index:
        raise BadArgument(f"{name} is on {view.place}, but {first_name} is on {first.place}")


def _check_dtype(name: str, view: View) -> None:
    if view.dtype not in DTYPES:
        raise BadArgument(f"{name} is {view.dtype}: expected float32, float16 or bfloat16 (or float8_e4m3fn)")


def _check_last_axis(name: str, view: View) -> None:
    if view.shape[-1] > 1 and view.strides[-1] != 1 and 0 not in view.shape:
        raise BadArgument(f"{name} has stride {view.strides[-1]} along its last axis: it must be contiguous (stride 1)")


def _is_contiguous(view: View) -> bool:
    expected = 1
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and stride != expected:
            return 0 in view.shape
        expected *= size
    return True


def _quoted(value: Any) -> str:
    """A value for a message: short, whatever it is."""
    try:
        text = repr(value)
    except Exception:  # an integer of 5000 digits has no repr
        text = f"<a {type(value).__name__} that cannot be printed>"
    return text if len(text) <= 500 else f"{text[:500]}..."


def _flag(name: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return int(value)
    raise BadArgument(f"{name}={_quoted(value)} is neither True nor False")


_LEAST_FLOAT, _MOST_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _number(name: str, value: Any) -> float:
    """A number that a C float holds; NaN and infinities are the library's to refuse."""
    kind = value.dtype.kind if isinstance(value, (np.ndarray, np.generic)) else ""
    if kind in tuple("bSUO") or isinstance(value, (bool, str, bytes, bytearray)):
        raise BadArgument(f"{name}={_quoted(value)} is not a number")
    try:
        number = float(value)
        beyond = _MOST_FLOAT < abs(number) < math.inf
    except OverflowError:
        beyond = True
    except (TypeError, ValueError, RuntimeError):
        raise BadArgument(f"{name}={_quoted(value)} is not a number") from None
    if beyond:
        raise BadArgument(f"{name}={_quoted(value)} is beyond the numbers of a float32")
    return number


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise BadArgument(f"{name}={_quoted(value)} is not an integer") from None
    if not low <= number <= high:
        raise BadArgument(f"{name}={_quoted(number)} is outside {low} .. {high}")
    return number


def _name(what: str, value: Any, names: Collection[str], expected: str = "") -> str:
    """One of the names; a NumPy dtype goes by its own."""
    name = value.name if isinstance(value, np.dtype) else value
    if not isinstance(name, str) or name not in names:
        raise BadArgument(f"{what}={_quoted(value)} is {expected or 'none of ' + ', '.join(map(repr, names))}")
    return name


def _window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise BadArgument(f"window_size={_quoted(window_size)} is not a pair (left, right)") from None
    low, high = -(2**63), 2**63 - 1
    return _integer("window_size[0]", left, low, high), _integer("window_size[1]", right, low, high)
