"""The gradients of attention: backward, backward_query, backward_kernels.

The probabilities are computed again from q, k and lse, tile by tile, instead of being kept (Dao et al. 2022, section
3.1 and appendix B.2), so memory is O(seqlen). The backward passes of torch/ and jax/ use this module.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable
from typing import Any

from . import _arrays
from ._arrays import View, torch_modes
from ._core import recordings
from ._core.checks import OPEN, contiguous, flag, last_axis
from ._core.fields import _destination, _option, _put_dense, _put_strides, _put_tensor
from ._core.forward import FIELDS, QKV, joined
from ._core.launch import launch_with_workspace
from ._core.library import KERNEL_TABLES, load
from ._core.options import ARRAYS, AnyArray, Array, AttentionOptions, Options, Unpack, _lengths, _options_of, _prepare
from ._core.queries import Plan, kernel_table, plan_from
from ._core.repeats import Made, Repeats
from ._core.structs import AttentionArgs, AttentionBackwardArgs, new
from .errors import BadArgument, Unsupported

DQKV = ("dq", "dk", "dv")


def backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array,
    *,
    dlse: AnyArray | None = None,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    dq: AnyArray | None = None,
    dk: AnyArray | None = None,
    dv: AnyArray | None = None,
    accumulate: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, ...]:
    """dq, dk, dv: the gradients of sum(out * dout) + sum(lse * dlse).

    out and lse are the results of flash_attn_func(q, k, v, ..., return_lse=True), or, where cu_seqlens_q, cu_seqlens_k,
    max_seqlen_q and max_seqlen_k are given, of flash_attn_varlen_func. Every option of that forward call must be given
    again, unchanged; flash_attn_func explains them. All arrays come from one framework and device; the results are of
    the caller's own type. float32, float16 and bfloat16.

    Arguments:
        dout: like out, (batch, seqlen_q, nheads, headdim_v), the gradient of the loss; its last axis contiguous.
        q, k, v, out: as in the forward call.
        lse: (batch, nheads, seqlen_q) float32, varlen (nheads, total_q), contiguous.
        dlse: like lse, the gradient of the loss through lse; None means zero.
        deterministic: equal arguments give bitwise equal results. Without it the fast GPU kernels add to dq in
            whatever order their blocks finish. The CPU backend is always deterministic. For PyTorch tensors
            torch.use_deterministic_algorithms(True), also with warn_only, sets it, here and in every backward pass of
            autograd.
        return_dbias: also return the gradient of bias: float32, of bias's shape, summed over its broadcast axes.
        return_dsinks: also return the gradient of sinks, (nheads,) float32.
        dq, dk, dv: arrays for the results, of the shapes of q, k and v and of their dtype, which are also returned.
        accumulate: add to the values in the given dq, dk and dv, rounding the sum once.
        kernel: force a kernel by name (see backward_kernels()); None means $FLASH_ATTN_BACKWARD_KERNEL, else the best.
        options: the other options of flash_attn_func, except those of float8, which has no backward pass.

    Rows that see no key (lse = -inf) and keys that no row sees have zero gradients, whatever they and dlse hold.

    Returns:
        (dq, dk, dv), then dbias and dsinks if requested.

    Raises: as flash_attn_func; after BadArgument and Unsupported given dq, dk and dv are untouched.

    Source: Dao et al., FlashAttention, 2022, algorithm 4; Dao, FlashAttention-2, 2023, algorithm 2.

    >>> import numpy as np
    >>> from flash_attn_minimal import backward, flash_attn_func
    >>> q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, 7, 2, 16), dtype=np.float32)
    >>> out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv = backward(dout, q, k, v, out, lse, causal=True)
    >>> bool(np.allclose(dv.sum(axis=1), dout.sum(axis=1), atol=1e-5))  # each row of P sums to 1
    True
    """
    sign, arrays = None, ()
    if return_dbias is return_dsinks is False:
        others = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        others |= {"out": out, "lse": lse, "dlse": dlse, "dout": dout, "dq": dq, "dk": dk, "dv": dv}
        values = "backward", max_seqlen_q, max_seqlen_k, accumulate, torch_modes.deterministic(q)
        given, arrays, values, numbers = joined(QKV, (q, k, v), values, others | options, (*ARRAYS, *others))
        if values is not None:
            results, sign = _repeats.find(given, arrays, values, options.get("window_size", OPEN), numbers)
            if results is not None:
                return results
    lengths = _lengths("call", cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    wanted = flag("return_dbias", return_dbias), flag("return_dsinks", return_dsinks)
    return _differentiate(
        dout, q, k, v, out, lse, dlse, lengths, _options_of("backward", options), *wanted, (dq, dk, dv), accumulate,
        sign=sign, arrays=arrays,
    )  # fmt: skip


def _differentiate(
    dout,
    q,
    k,
    v,
    out,
    lse,
    dlse,
    lengths,
    options: Options,
    return_dbias,
    return_dsinks,
    given=(None,) * 3,
    accumulate=False,
    sign: tuple | None = None,
    arrays: tuple = (),
) -> tuple:
    """`backward` with its options in one object. lengths: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k); given: the caller's dq, dk and dv, each may be None; sign: what find_gradients returned for
    `arrays`."""
    args, views = _prepare(q, k, v, lengths, options)
    if torch_modes.deterministic(q):
        args.deterministic = 1
    qv, kv, vv = views[:3]
    out_shape = (*qv.shape[:-1], vv.shape[-1])
    rows = (args.batch, args.nheads, args.seqlen_q) if lengths is None else (args.nheads, qv.shape[0])
    out_view = _input(views, "out", out, out_shape, qv.dtype)
    dout_view = _input(views, "dout", dout, out_shape, qv.dtype)
    _put_tensor(args, "out", out_view)
    args.lse = _contiguous_input(views, "lse", lse, rows)

    call = new(AttentionBackwardArgs)
    if dlse is not None:
        call.dlse = _contiguous_input(views, "dlse", dlse, rows)
    call.forward = ct.pointer(args)
    _put_tensor(call, "dout", dout_view)
    call.accumulate = flag("accumulate", accumulate)
    if accumulate and (return_dbias or return_dsinks) and recordings.current() is not None:
        raise Unsupported(
            "accumulate=True with return_dbias or return_dsinks is not recorded: a replay would add to what the last "
            "one has returned"
        )
    inputs = {"q": qv, "k": kv, "v": vv, "out": out_view, "dout": dout_view}
    results, made, fill, dbias, destinations = [], {}, None if lengths is None else 0, None, []
    for name, array, like in zip(DQKV, given, (qv, kv, vv), strict=True):
        shape = tuple(like.shape)
        if array is not None:
            view = _destination(name, array, inputs, shape, qv.dtype)
            destinations.append(view)
        elif accumulate:
            raise BadArgument(f"accumulate=True, but {name} is None: there is nothing to add to")
        elif lengths is not None:  # the library writes no rows outside of the sequences
            view = qv.door.full(qv, shape, qv.dtype, 0)
        else:
            view = qv.door.empty(qv, shape, qv.dtype)
        _put_tensor(call, name, view)
        inputs[name] = view
        if array is None:
            made[name] = Made(view, fill)
        results.append(array if array is not None else view)
    check_wanted(options, return_dbias, return_dsinks)
    if return_dbias:
        dbias = _new_dbias(call, qv, options.bias, args.seqlen_k)
        results.append(dbias)
        made["dbias"] = Made(dbias, 0)
    if return_dsinks:
        view = qv.door.full(qv, (args.nheads,), "float32", 0)
        call.dsinks = view.pointer
        results.append(view)
        made["dsinks"] = Made(view, 0)
    written = [*inputs.values(), *[one.view for name, one in made.items() if name not in inputs]]
    if workspace := launch_with_workspace("attention_backward", call, args, views, written):
        made["workspace"] = Made(workspace)
    seeds, fits, finish = options.dropout_seed is not None, None, None
    if sign and destinations:
        fits, finish = _given(sign[0][0])
    _repeats.remember(sign, call, arrays, (qv, kv, vv), made, None, fits, finish, destinations, seeds)
    return tuple(
        _summed(x, options.bias) if x is dbias else x.door.result(x) if isinstance(x, View) else x for x in results
    )


_repeats = Repeats(
    "attention_backward",
    (AttentionArgs, FIELDS),
    (
        AttentionBackwardArgs,
        {f"{name}_data": name for name in ("dout", "dq", "dk", "dv", "dbias")} | {"dlse": "dlse", "dsinks": "dsinks"},
    ),
)


def _given(names: tuple[str, ...]) -> tuple[Callable[[list[int]], bool], Callable[..., tuple]]:
    """Makes what a repeat needs whose caller gives arrays for gradients: see Repeats.remember. names: of its arrays."""
    inputs = [names.index(x) for x in ("q", "k", "v", "out", "dout")]
    places = [names.index(x) if x in names else None for x in DQKV]
    outputs = [place for place in places if place is not None]

    def fits(addresses: list[int]) -> bool:  # no gradient begins where another array does, which _destination refuses
        starts = {addresses[i] for i in inputs}
        count = len(starts)
        starts.update([addresses[i] for i in outputs])
        return len(starts) == count + len(outputs)

    def finish(results: tuple, arrays: tuple, _) -> tuple:  # the new arrays come in order
        new = iter(results)
        return tuple([next(new) if place is None else arrays[place] for place in places])

    return fits, finish


def find_gradients(
    given: tuple[str, ...], arrays: tuple, values: tuple, window_size, seeds: tuple | None
) -> tuple[Any, tuple | None]:
    """Repeats an earlier call of the same signature, if there is one: see Repeats.find. Returns the gradients or None,
    and the signature or None. given: the names of the arrays, q, k and v first; values: all else that the call depends
    on, except for the dropout's seeds."""
    return _repeats.find(given, arrays, values, window_size, seeds or (), True)


def backward_query(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Unpack[AttentionOptions],
) -> Plan:
    """Tells what `backward` would do for these inputs and options, without doing it: see query.

    >>> import numpy as np
    >>> from flash_attn_minimal import backward_query
    >>> q = np.zeros((1, 128, 8, 64), np.float32)
    >>> backward_query(q, q, q, causal=True, kernel="cpu_naive").status
    'FA_OK'
    """
    lengths = _lengths("query", cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    args, views = _prepare(q, k, v, lengths, _options_of("backward_query", options))
    if torch_modes.deterministic(q):
        args.deterministic = 1
    call = new(AttentionBackwardArgs)
    call.forward = ct.pointer(args)
    q_shape, k_shape, v_shape = (view.shape for view in views[:3])
    out_shape = (*q_shape[:-1], v_shape[-1])
    _put_dense(args, "out", out_shape)
    for name, shape in (("dout", out_shape), ("dq", q_shape), ("dk", k_shape), ("dv", v_shape)):
        _put_dense(call, name, shape)
    return plan_from(lambda plan: load().fa_attention_backward_query(call, plan), call)


def backward_kernels() -> list[dict[str, str]]:
    """The kernels of the backward pass, best first on each device: [{"name", "device", "summary"}, ...].

    >>> from flash_attn_minimal import backward_kernels
    >>> [kernel["name"] for kernel in backward_kernels() if kernel["device"] == "cpu"][-1]
    'cpu_naive'
    """
    return kernel_table(load(), KERNEL_TABLES["backward"])


def check_wanted(options: Options, return_dbias: Any, return_dsinks: Any) -> None:
    """Raises if a gradient is requested of an array that is not given."""
    for name, wanted in (("bias", return_dbias), ("sinks", return_dsinks)):
        if wanted and getattr(options, name) is None:
            raise BadArgument(f"return_d{name}=True, but {name} is None")


def _input(views: list[View], name: str, array, shape: tuple[int, ...], dtype: str) -> View:
    view = _option(views, name, array, (dtype,))
    if tuple(view.shape) != tuple(shape):
        axes = {"lse": ", (batch, nheads, seqlen_q)", "dlse": ", like lse"}.get(name, "") if len(shape) == 3 else ""
        raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected {tuple(shape)}{axes}")
    last_axis(name, view)
    return view


def _contiguous_input(views: list[View], name: str, array, shape: tuple[int, ...]) -> int:
    """Checks lse or its gradient; returns its address."""
    view = _input(views, name, array, shape, "float32")
    contiguous(name, view)
    return view.pointer


def _new_dbias(call: AttentionBackwardArgs, qv: View, bias, seqlen_k: int) -> View:
    """A float32 array for dbias, put into call with stride 0 along the axes that bias broadcasts. It has bias's shape,
    except that the library writes all seqlen_k columns where bias has one for all keys: see _summed."""
    *rows, columns = _arrays.view(bias, "bias").shape
    view = qv.door.full(qv, (*rows, seqlen_k if columns == 1 else columns), "float32", 0)
    _put_dbias(call, view)
    return view


def _summed(view: View, bias) -> Any:
    """The array of _new_dbias as the caller gets it: summed to bias's shape."""
    dbias = view.door.result(view)
    return dbias if view.shape[-1] == _arrays.view(bias, "bias").shape[-1] else dbias.sum(-1, keepdims=True)


def _put_dbias(call: AttentionBackwardArgs, view: View) -> None:
    """Puts dbias into call with stride 0 along axes of size 1, over which the library then sums."""
    padded = (1,) * (4 - len(view.shape)) + tuple(view.shape)
    strides, step = [], max(padded[3], 1)
    for size in padded[2::-1]:
        strides.insert(0, step if size != 1 else 0)
        step *= max(size, 1)
    _put_strides(call, "dbias", view.pointer, strides, ("batch", "head", "row"))
