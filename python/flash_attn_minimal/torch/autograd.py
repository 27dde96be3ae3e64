"""PyTorch operators and gradients of attention, for calls of flash_attn_func and flash_attn_varlen_func with which
PyTorch does more than run them.

    plain calls, no gradient    do not come here
    plain calls with gradients  a torch.autograd.Function, which costs a few microseconds
    transforms of torch.func    a torch.autograd.Function that supports transforms, on top of the operators
    everything else             the operators flash_attn_minimal::attention and ::attention_backward (torch.library),
                                which traces and graphs hold without looking inside

Importing this module is optional: the first call that needs it imports it. A program that imports flash_attn_minimal
before torch, and whose first call is inside torch.compile(fullgraph=True), must import it.

Gradients exist for q, k, v, bias and sinks, through out and lse, in reverse mode and of first order only.
"""

from __future__ import annotations

import torch

from .. import _arrays
from .._arrays import torch_modes
from .._arrays.words import pass_array
from .._core import statistics as _statistics
from .._core.checks import _flag, _integer, _number, _window
from .._core.forward import attend, find, given_arrays
from .._core.options import Options
from ..backward import _differentiate, find_gradients
from ..errors import BadArgument, Unsupported

torch_modes.active()  # fetches PyTorch's functions, in case PyTorch was imported after this library

_ARRAYS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")
_FLOAT8 = ("q_descale", "k_descale", "v_descale", "out_dtype", "fast_accum")


def _differentiable(
    q, k, v, varlen, out, return_lse, options: Options, sign: tuple | None = None,
    more: _statistics.Results | None = None,
):  # fmt: skip
    """Runs a call that PyTorch must see. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
    sign: the signature that _forward.find returned; more: the results of a call with statistics, which have no gradient
    and no operator."""
    cu_q, cu_k, max_q, max_k = varlen or (None, None, 0, 0)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "out": out, **options._asdict()}
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    unserved = [name for name in ("out", *_FLOAT8) if given[name] is not None and given[name] is not False]
    if more and (watcher := _watcher(tensors)):
        raise Unsupported(f"{more.first()} is given, which attention does not take under {watcher}")
    if unserved:
        _refuse(unserved[0], tensors)
        with torch_modes.unwatched():
            if more:
                return _statistics.attend(q, k, v, varlen, out, more, options)
            return _attend(q, k, v, varlen, out, return_lse, options)
    _check_arrays(given)
    arguments = (
        q, k, v, options.bias, options.mask, options.alibi_slopes, options.sinks, cu_q, cu_k,
        _longest("max_seqlen_q", max_q), _longest("max_seqlen_k", max_k),
        *_packed(options),
    )  # fmt: skip
    return_lse = _flag("return_lse", return_lse)
    if torch.compiler.is_compiling():
        if torch_modes.transforms():
            raise Unsupported("attention under a transform of torch.func is not served inside torch.compile")
        results = _attention_op(*arguments)
    elif torch_modes.transforms():
        results = _TransformedAttention.apply(*arguments)
    elif not more and (torch_modes.active() or not all(map(torch_modes.is_plain, tensors.values()))):
        _refuse_tangents(tensors)
        results = _attention_op(*arguments)
    else:
        q, k, v, *scores = map(_unwrapped, (q, k, v, *[given[name] for name in _OPTION_ARRAYS]))
        options = options._replace(**dict(zip(_OPTION_ARRAYS, scores, strict=True)))
        given, arrays = given_arrays(q, k, v, varlen, None, options)
        recorder = _Recorder(given, options, varlen, bool(more or return_lse), arguments[len(_ARRAYS) :])
        if more:
            _refuse_tangents(tensors)
            with torch.no_grad(), torch_modes.unwatched():
                out, lse, *statistics = _statistics.attend(q, k, v, varlen, None, more._replace(lse=True), options)
            out, lse = recorder((out, lse), arrays)
            return (out, lse, *statistics) if more.lse else (out, *statistics)
        with torch.no_grad():
            results = attend(q, k, v, varlen, None, True, options, sign, recorder)
        return recorder(results, arrays)
    return tuple(results) if return_lse else results[0]


def _longest(name: str, length: int) -> int:
    """Checks a longest length. torch.compile may pass a symbol, which _integer would turn into a constant: the operator
    checks that one again."""
    if torch.compiler.is_compiling() and isinstance(length, (int, torch.SymInt)) and not isinstance(length, bool):
        return length
    return _integer(name, length, 0, 2**63 - 1)


def _unwrapped(array):
    """The tensor inside a wrapper that a finished transform of torch.func has left; any other array as it is."""
    unwrap = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)
    return unwrap(array) if unwrap and isinstance(array, torch.Tensor) else array


def _check_arrays(given: dict) -> None:
    """Raises unless all arrays of a call are tensors, or if one that cannot have a gradient requires one."""
    for name in ("alibi_slopes", "mask"):
        if isinstance(given[name], torch.Tensor) and given[name].requires_grad and torch_modes.records():
            raise Unsupported(f"{name} requires a gradient, which attention does not have: pass {name}.detach()")
    for name, array in given.items():
        if name in _ARRAYS and array is not None and not isinstance(array, torch.Tensor):
            first = next(x for x in _ARRAYS if isinstance(given[x], torch.Tensor))
            dtype = {"mask": "bool", "cu_seqlens_q": "int32", "cu_seqlens_k": "int32"}.get(name, f"{first}.dtype")
            advice = pass_array("PyTorch", name, first, dtype)
            raise BadArgument(f"{name} is {_arrays._kind(array)}, but {first} is a PyTorch tensor{advice}")


def _refuse(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Raises unless a call with this option, which no operator takes, may run without PyTorch's knowledge."""
    float8 = name != "out"
    if torch_modes.records() and any(x.requires_grad for x in tensors.values()):
        if float8:
            raise Unsupported(f"{name} is given, but float8 has no backward pass")
        raise Unsupported("out is given, but the call records a gradient: pass out=None, or use torch.no_grad()")
    if watcher := _watcher(tensors):
        raise Unsupported(f"{name} is given, which attention does not take under {watcher}")


def _watcher(tensors: dict[str, torch.Tensor]) -> str | None:
    """The name of the mode, transform or tensor class that needs PyTorch to see a call on these tensors, or None."""
    watcher = torch_modes.watcher()
    for option, x in tensors.items():
        if watcher is None and not torch_modes.is_plain(x):
            watcher = f"tensors like {option}, a {'meta tensor' if x.is_meta else type(x).__name__}"
    return watcher


def _refuse_tangents(tensors: dict[str, torch.Tensor]) -> None:
    for name, x in tensors.items():
        if torch.autograd.forward_ad.unpack_dual(x).tangent is not None:
            raise Unsupported(f"{name} has a tangent: {_NO_JVP}")


_NO_JVP = "forward-mode differentiation (jvp, jacfwd) of attention is not served, reverse mode (grad, jacrev) is"
_NO_DOUBLE = "double backward (create_graph=True, torch.func.hessian) of attention is not served"


def _signed(name: str, value: int) -> int:
    """A 64-bit unsigned number as PyTorch's operators take it: the signed number of the same bits."""
    number = _integer(name, value, 0, 2**64 - 1)
    return number - 2**64 if number >= 2**63 else number


_OPTION_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")
_SIGNED = ("dropout_seed", "dropout_offset")
# The options that the operators take as numbers, in order, each with its type in PyTorch's schema language. A window is
# two numbers, because vmap would map over a pair.
_NUMBERS: dict[str, str] = {}
for _name, _hint in Options.__annotations__.items():
    if _name == "window_size":
        _NUMBERS |= {"window_left": "int", "window_right": "int"}
    elif _name not in (*_OPTION_ARRAYS, *_FLOAT8):
        _NUMBERS[_name] = _hint.__forward_arg__.replace(" | None", "?")


def _packed(options: Options) -> list:
    """The numbers among the options as the operators take them, in the order of _NUMBERS."""
    given = options._asdict()
    given["window_left"], given["window_right"] = _window(options.window_size)
    for name, kind in _NUMBERS.items():
        if name in _SIGNED and given[name] is not None:
            given[name] = _signed(name, given[name])
        elif kind.startswith("float") and given[name] is not None:
            given[name] = _number(name, given[name])
        elif kind == "bool":
            given[name] = bool(_flag(name, given[name]))
    return [given[name] for name in _NUMBERS]


def _unpacked(arrays: tuple, numbers: tuple) -> Options:
    """The Options that an operator's arguments stand for: the inverse of _packed."""
    given = dict(zip(_NUMBERS, numbers, strict=True))
    given |= {name: given[name] % 2**64 for name in _SIGNED if given[name] is not None}
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    return Options(**given, **dict(zip(_OPTION_ARRAYS, arrays, strict=True)))


def _attend(q, k, v, varlen, out, return_lse, options: Options):
    results, sign = find(q, k, v, varlen, out, return_lse, options)
    return attend(q, k, v, varlen, out, return_lse, options, sign) if results is None else results


def _forward(q, k, v, bias, mask, alibi_slopes, sinks, cu_q, cu_k, max_q, max_k, *values):
    options = _unpacked((bias, mask, alibi_slopes, sinks), values)
    varlen = None if cu_q is None else (cu_q, cu_k, max_q, max_k)
    with torch.no_grad(), torch_modes.unwatched():
        return _attend(q, k, v, varlen, None, True, options)


def _backward(dout, dlse, out, lse, want_dbias, want_dsinks, *arguments, sign: tuple | None = None, given: tuple = ()):
    """dq, dk, dv, dbias, dsinks. The last two have the dtype of their inputs and are empty where not wanted. sign: the
    signature that find_gradients returned for the arrays `given`."""
    (q, k, v, bias, mask, alibi_slopes, sinks, cu_q, cu_k), (max_q, max_k) = arguments[:9], arguments[9:11]
    options = _unpacked((bias, mask, alibi_slopes, sinks), arguments[11:])
    varlen = None if cu_q is None else (cu_q, cu_k, max_q, max_k)
    options = options._replace(kernel=None)  # it names a forward kernel; $FLASH_ATTN_BACKWARD_KERNEL is for this pass
    with torch.no_grad(), torch_modes.unwatched():
        if dout.stride(-1) != 1 or dout.is_neg():  # out.sum() has a gradient of stride 0
            dout, sign = dout.resolve_neg().contiguous(), None
        if dlse is not None and (dlse.is_neg() or not dlse.is_contiguous()):
            dlse, sign = dlse.resolve_neg().contiguous(), None
        dq, dk, dv, *rest = _differentiate(
            dout, q, k, v, out, lse, dlse, varlen, options, want_dbias, want_dsinks, sign=sign, arrays=given
        )
        dbias = rest.pop(0).to(bias.dtype) if want_dbias else dout.new_empty(0)
        dsinks = rest.pop(0).to(sinks.dtype) if want_dsinks else dout.new_empty(0)
    return dq, dk, dv, dbias, dsinks


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.rest = inputs[9:]
    ctx.set_materialize_grads(False)


def _gradients_by(choose, ctx, dout, dlse):
    """The backward pass that all ways to call attention share. choose(dout, dlse, out) returns the function that
    computes it, which takes the arguments of the operator attention_backward."""
    *arrays, out, lse = ctx.saved_tensors
    nothing = (None,) * (len(arrays) + len(ctx.rest))
    if dout is None and dlse is None:
        return nothing
    dout = torch.zeros_like(out) if dout is None else dout
    want_dbias, want_dsinks = ctx.needs_input_grad[3], ctx.needs_input_grad[6]
    run = choose(dout, dlse, out)
    dq, dk, dv, dbias, dsinks = run(dout, dlse, out, lse, want_dbias, want_dsinks, *arrays, *ctx.rest)
    return dq, dk, dv, dbias if want_dbias else None, None, None, dsinks if want_dsinks else None, *nothing[7:]


def _backward_for(dout, dlse, out):
    given = (dout, out) if dlse is None else (dout, dlse, out)
    if torch_modes.transforms():
        return _TransformedBackward.apply
    if any(map(torch_modes.batched, given)):  # PyTorch runs the operator for each of the gradients
        return _backward_op
    if torch.is_grad_enabled() or torch_modes.active() or not all(map(torch_modes.is_plain, given)):
        return _backward_op
    return _backward


def _gradients(ctx, dout, dlse):
    return _gradients_by(_backward_for, ctx, dout, dlse)


def _refuse_double(*_):
    raise Unsupported(_NO_DOUBLE)


def _refuse_jvp(*_):
    raise Unsupported(_NO_JVP)


class _Recorder:
    """Puts a call that was made into PyTorch's graph. It holds no arrays, so one recorder serves all calls of a
    signature. Only for calls with which PyTorch does nothing but record them."""

    def __init__(self, given: tuple[str, ...], options: Options, varlen: tuple | None, return_lse: bool, rest: tuple):
        """given: the names of the call's arrays; rest: the operator's arguments after the arrays."""
        self.given, self.return_lse, self.rest = given, return_lse, rest
        self.names = (*given, "out", "lse", "dout"), (*given, "out", "lse", "dout", "dlse")
        self.window_size = options.window_size
        numbers = options._replace(kernel=None).numbers()  # kernel=None, as in _backward
        self.values = None if numbers is None else (*(varlen or ())[2:], *numbers)
        # Positions among the arguments of _Attention; 0, an argument that never needs a gradient, where there is none.
        self.bias, self.sinks = (_BEFORE + given.index(x) if x in given else 0 for x in ("bias", "sinks"))

    def __call__(self, results, arrays: tuple):
        """results: out, lse, and perhaps more."""
        return _record(self, results, *arrays)

    def _gradients(self, needs: tuple[bool, ...], arrays: list, out, lse, dout, dlse) -> list:
        """The gradients of the arguments of _Attention. needs: which arguments need one."""
        want_dbias, want_dsinks = needs[self.bias], needs[self.sinks]
        given, found, sign = (*arrays, out, lse, dout, *(() if dlse is None else (dlse,))), None, None
        if self.values is not None and not torch.is_grad_enabled():
            values = *self.values, want_dbias, want_dsinks, torch.are_deterministic_algorithms_enabled()
            found, sign = find_gradients(self.names[dlse is not None], given, values, self.window_size)
        if found is None:
            of = dict(zip(self.given, arrays, strict=True))
            arguments = (dout, dlse, out, lse, want_dbias, want_dsinks, *[of.get(x) for x in _ARRAYS], *self.rest)
            run = _backward_for(dout, dlse, out)
            found = run(*arguments, sign=sign, given=given) if run is _backward else run(*arguments)
            found = *found[:3], *found[3:4] * want_dbias, *found[4:] * want_dsinks
        gradients = [None] * len(needs)
        gradients[_BEFORE : _BEFORE + 3] = found[:3]
        if want_dbias:
            gradients[self.bias] = found[3].to(arrays[self.bias - _BEFORE].dtype)
        if want_dsinks:
            gradients[self.sinks] = found[-1].to(arrays[self.sinks - _BEFORE].dtype)
        return gradients


class _Attention(torch.autograd.Function):
    """The node of a plain call, made after the launch. It has no setup_context, which would cost as much time as all
    the rest."""

    @staticmethod
    def forward(ctx, recorder: _Recorder, results, *arrays):
        out, lse = results[0], results[1]
        ctx.save_for_backward(*arrays, out, lse)
        ctx.recorder = recorder
        ctx.set_materialize_grads(False)
        return (out, lse) if recorder.return_lse else out

    @staticmethod
    def backward(ctx, dout, dlse=None):
        *arrays, out, lse = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if dout is None:
            if dlse is None:
                return (None,) * len(needs)
            dout = torch.zeros_like(out)
        return tuple(ctx.recorder._gradients(needs, arrays, out, lse, dout, dlse))


_BEFORE = 2  # the number of arguments before the arrays
# Function.apply would also look for wrappers of finished transforms, which takes 2 us; see _unwrapped.
_record = super(torch.autograd.Function, _Attention).apply


# ---- the operators ----

_T, _O = "Tensor", "Tensor?"
_INPUTS = (
    f"{_T} q, {_T} k, {_T} v, {_O} bias, {_O} mask, {_O} alibi_slopes, {_O} sinks, {_O} cu_seqlens_q, "
    f"{_O} cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
) + ", ".join(f"{kind} {name}" for name, kind in _NUMBERS.items())
_NAME, _BACKWARD_NAME = "flash_attn_minimal::attention", "flash_attn_minimal::attention_backward"
torch.library.define(_NAME, f"({_INPUTS}) -> ({_T}, {_T})")
torch.library.define(
    _BACKWARD_NAME,
    f"({_T} dout, {_O} dlse, {_T} out, {_T} lse, bool want_dbias, bool want_dsinks, {_INPUTS}) -> "
    f"({_T}, {_T}, {_T}, {_T}, {_T})",
)
_attention_op = torch.ops.flash_attn_minimal.attention.default
_backward_op = torch.ops.flash_attn_minimal.attention_backward.default
torch.library.impl(_NAME, ("cpu", "cuda"), _forward)
torch.library.impl(_BACKWARD_NAME, ("cpu", "cuda"), _backward)
torch.library.register_autograd(_NAME, _gradients, setup_context=_setup_context)
torch.library.register_autograd(_BACKWARD_NAME, _refuse_double)


@torch.library.register_fake(_NAME)
def _(q, k, v, *rest):
    rank = 4 if rest[4] is None else 3
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != rank:
            axes = "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim)"
            raise BadArgument(f"{name} has shape {tuple(x.shape)}: expected {axes}")
        if x.dtype != q.dtype:
            raise BadArgument(f"q is {q.dtype}, but {name} is {x.dtype}: they must be the same")
    for name, x in zip(_ARRAYS, (q, k, v, *rest), strict=False):
        if x is not None and x.device != q.device:
            raise BadArgument(f"{name} is on {x.device}, but q is on {q.device}")
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if rank == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(rows, dtype=torch.float32)


@torch.library.register_fake(_BACKWARD_NAME)
def _(dout, dlse, out, lse, want_dbias, want_dsinks, q, k, v, bias, mask, alibi_slopes, sinks, *rest):
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if want_dbias else dout.new_empty(0)
    dsinks = sinks.new_empty(sinks.shape) if want_dsinks else dout.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dbias, dsinks


# ---- transforms of torch.func ----
#
# vmap makes one call of all entries: it joins the mapped axis and the batch. An entry is a call of its own where its
# numbers depend on its place in the batch (dropout), or where there is no batch axis to join (varlen, sinks and their
# gradient, bias's gradient).


def _size(info) -> int:
    if info.batch_size == 0:
        raise Unsupported("torch.vmap over an axis of length 0 is not served by attention")
    return info.batch_size


def _entries(size: int, x, dim: int | None):
    """(size, ...): a view, of stride 0 where x is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _ready(x):
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _folded(size: int, x, dim: int | None):
    """Joins the mapped axis and the batch: (size * batch, ...)."""
    return _ready(_entries(size, x, dim).flatten(0, 1))


def _folded_broadcast(size: int, x, dim: int | None, batch: int, rank: int):
    """_folded for an array that broadcasts to `rank` axes, the batch first; x itself where all entries share it."""
    if x is None or (dim is None and (x.dim() < rank or x.shape[0] == 1)):
        return x
    x = _entries(size, x, dim)
    x = x.reshape(size, *(1,) * (rank + 1 - x.dim()), *x.shape[1:])
    return _ready(x.expand(size, batch, *x.shape[2:]).flatten(0, 1))


def _fold(size: int, dims: tuple, arguments: tuple) -> tuple | None:
    """The arguments of the operator attention for all entries at once, or None where each needs its own call."""
    q, k, v, bias, mask, alibi_slopes, sinks, cu_q = arguments[:8]
    if cu_q is not None or arguments[11] or dims[6] is not None:
        return None
    arrays = [_folded(size, x, dim) for x, dim in zip((q, k, v), dims, strict=False)]
    batch = arrays[0].shape[0] // size
    if dims[5] is None and alibi_slopes is not None and alibi_slopes.dim() == 2 and alibi_slopes.shape[0] == batch == 1:
        alibi_slopes = alibi_slopes[0]
    arrays += [
        _folded_broadcast(size, x, dim, batch, rank)
        for x, dim, rank in ((bias, dims[3], 4), (mask, dims[4], 4), (alibi_slopes, dims[5], 2))
    ]
    return (*arrays, *arguments[6:])


def _unfold(size: int, results: tuple) -> tuple:
    return tuple(x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results)


def _one_by_one(call, size: int, dims: tuple, arguments: tuple) -> tuple:
    def entry(i: int) -> list:
        return [
            x if dim is None else _ready(x.select(dim, i)) for x, dim in zip(arguments, dims, strict=True)
        ]  # fmt: skip

    results = [call(*entry(i)) for i in range(size)]
    return tuple(torch.stack(x) for x in zip(*results, strict=True))


def _vmap(info, in_dims, *arguments):
    size = _size(info)
    folded = _fold(size, in_dims, arguments)
    call = _TransformedAttention.apply
    results = _unfold(size, call(*folded)) if folded else _one_by_one(call, size, in_dims, arguments)
    return results, (0, 0)


def _vmap_backward(info, in_dims, *arguments):
    size, given, dims = _size(info), arguments[:4], in_dims[:4]
    want_dbias, want_dsinks = arguments[4:6]
    call = _TransformedBackward.apply
    folded = None if want_dbias or want_dsinks else _fold(size, in_dims[6:], arguments[6:])
    if folded is None:
        return _one_by_one(call, size, in_dims, arguments), (0,) * 5
    dout, dlse, out, lse = (x if x is None else _folded(size, x, dim) for x, dim in zip(given, dims, strict=True))
    *grads, dbias, dsinks = call(dout, dlse, out, lse.contiguous(), False, False, *folded)
    return (*_unfold(size, grads), dbias, dsinks), (0, 0, 0, None, None)


class _TransformedAttention(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return _attention_op(*arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_gradients)
    vmap = staticmethod(_vmap)
    jvp = staticmethod(_refuse_jvp)


class _TransformedBackward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return _backward_op(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_refuse_double)
    vmap = staticmethod(_vmap_backward)
    jvp = staticmethod(_refuse_jvp)


torch.library.register_vmap(_NAME, _vmap)
torch.library.register_vmap(_BACKWARD_NAME, _vmap_backward)
