"""PyTorch operators and gradients of attention, for calls of flash_attn_func and flash_attn_varlen_func with which
PyTorch does more than run them.

    plain calls, no gradient    do not come here
    plain calls with gradients  a torch.autograd.Function, which costs a few microseconds
    transforms of torch.func    a torch.autograd.Function that supports transforms, on top of the operators
    everything else             the operators flash_attn_minimal::attention and ::attention_backward

Gradients exist for q, k, v, bias and sinks, through out and lse, in reverse mode and of first order only.
"""

from __future__ import annotations

import torch

from .._arrays import torch_modes
from .._core import statistics as _statistics
from .._core.checks import flag, integer, shape
from .._core.forward import attend, call, given_arrays, seeds
from .._core.options import Options
from .._core.repeats import SEEDS
from ..backward import _differentiate, find_gradients
from ..errors import Unsupported
from . import _operators as operators
from ._operators import ARRAYS, FLOAT8, NUMBERS, OPTION_ARRAYS, Operators, Transformed, check_arrays, packed, unpacked

torch_modes.active()  # fetches PyTorch's functions, in case PyTorch was imported after this library


def differentiable(
    q, k, v, varlen, out, return_lse, options: Options, sign: tuple | None = None,
    more: _statistics.Results | None = None,
):  # fmt: skip
    """Runs a call that PyTorch must see. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
    sign: the signature that Repeats.find returned; more: the results of a call with statistics, which have no gradient
    and no operator."""
    cu_q, cu_k, max_q, max_k = varlen or (None, None, 0, 0)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "out": out, **options._asdict()}
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    unserved = [name for name in ("out", *FLOAT8) if given[name] is not None and given[name] is not False]
    if more and (watcher := _watcher(tensors)):
        raise Unsupported(f"{more.first()} is given, which attention does not take under {watcher}")
    if unserved:
        _refuse(unserved[0], tensors)
        with torch_modes.unwatched():
            if more:
                return _statistics.attend(q, k, v, varlen, out, more, options)
            return call(q, k, v, varlen, out, return_lse, options)
    check_arrays(given)
    arguments = (
        q, k, v, *[given[name] for name in OPTION_ARRAYS], cu_q, cu_k,
        _longest("max_seqlen_q", max_q), _longest("max_seqlen_k", max_k),
        *packed(options),
    )  # fmt: skip
    return_lse = flag("return_lse", return_lse)
    if torch.compiler.is_compiling():
        if torch_modes.transforms():
            raise Unsupported("attention under a transform of torch.func is not served inside torch.compile")
        results = _attention_op(*arguments)
    elif torch_modes.transforms():
        results = _transformed.forward(*arguments)
    elif not more and (torch_modes.active() or not all(map(torch_modes.is_plain, tensors.values()))):
        operators.refuse_tangents(tensors)
        results = _attention_op(*arguments)
    else:
        q, k, v, *scores = map(_unwrapped, (q, k, v, *[given[name] for name in OPTION_ARRAYS]))
        options = options._replace(**dict(zip(OPTION_ARRAYS, scores, strict=True)))
        given, arrays = given_arrays(q, k, v, varlen, None, options, sign)
        recorder = _Recorder(given, options, varlen, bool(more or return_lse), arguments[len(ARRAYS) :])
        if more:
            operators.refuse_tangents(tensors)
            with torch.no_grad(), torch_modes.unwatched():
                out, lse, *statistics = _statistics.attend(q, k, v, varlen, None, more._replace(lse=True), options)
            out, lse = recorder((out, lse), arrays, recorder.seeds)
            return (out, lse, *statistics) if more.lse else (out, *statistics)
        with torch.no_grad():
            results = attend(q, k, v, varlen, None, True, options, sign, recorder)
        return recorder(results, arrays, recorder.seeds)
    return tuple(results) if return_lse else results[0]


def _longest(name: str, length: int) -> int:
    """Checks a longest length. torch.compile may pass a symbol, which integer would turn into a constant: the operator
    checks that one again."""
    if torch.compiler.is_compiling() and isinstance(length, (int, torch.SymInt)) and not isinstance(length, bool):
        return length
    return integer(name, length, 0, 2**63 - 1)


def _unwrapped(array):
    """The tensor inside a wrapper that a finished transform of torch.func has left; any other array as it is."""
    unwrap = getattr(getattr(torch._C, "_functorch", None), "unwrap_if_dead", None)
    return unwrap(array) if unwrap and isinstance(array, torch.Tensor) else array


def _refuse(name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Raises unless a call with this option, which no operator takes, may run without PyTorch's knowledge."""
    if torch_modes.records() and any(x.requires_grad for x in tensors.values()):
        if name != "out":
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


def _split(arguments: tuple) -> tuple[tuple, Options, tuple | None]:
    """(q, k, v), the options and the lengths (see differentiable) of an operator's arguments."""
    arrays, (max_q, max_k), numbers = (
        arguments[: len(ARRAYS)], arguments[len(ARRAYS) : len(ARRAYS) + 2], arguments[len(ARRAYS) + 2 :],
    )  # fmt: skip
    cu_q, cu_k = arrays[-2:]
    return arrays[:3], unpacked(arrays[3:-2], numbers), None if cu_q is None else (cu_q, cu_k, max_q, max_k)


def forward(*arguments):
    (q, k, v), options, varlen = _split(arguments)
    with torch.no_grad(), torch_modes.unwatched():
        return call(q, k, v, varlen, None, True, options)


def backward(dout, dlse, out, lse, want_dbias, want_dsinks, *arguments, sign: tuple | None = None, given: tuple = ()):
    """dq, dk, dv, dbias, dsinks. The last two have the dtype of their inputs and are empty where not wanted. sign: the
    signature that find_gradients returned for the arrays `given`."""
    (q, k, v), options, varlen = _split(arguments)
    options = options._replace(kernel=None)  # it names a forward kernel; $FLASH_ATTN_BACKWARD_KERNEL is for this pass
    with torch.no_grad(), torch_modes.unwatched():
        if dout.stride(-1) != 1 or dout.is_neg():  # out.sum() has a gradient of stride 0
            dout, sign = dout.resolve_neg().contiguous(), None
        if dlse is not None and (dlse.is_neg() or not dlse.is_contiguous()):
            dlse, sign = dlse.resolve_neg().contiguous(), None
        dq, dk, dv, *rest = _differentiate(
            dout, q, k, v, out, lse, dlse, varlen, options, want_dbias, want_dsinks, sign=sign, arrays=given
        )
        dbias = rest.pop(0).to(options.bias.dtype) if want_dbias else dout.new_empty(0)
        dsinks = rest.pop(0).to(options.sinks.dtype) if want_dsinks else dout.new_empty(0)
    return dq, dk, dv, dbias, dsinks


def _backward_for(dout, dlse, out):
    given = (dout, out) if dlse is None else (dout, dlse, out)
    if torch_modes.transforms():
        return _transformed.backward
    if any(map(torch_modes.batched, given)):  # PyTorch runs the operator for each of the gradients
        return _backward_op
    if torch.is_grad_enabled() or torch_modes.active() or not all(map(torch_modes.is_plain, given)):
        return _backward_op
    return backward


class _Recorder:
    """Puts a call that was made into PyTorch's graph. It holds no arrays, so one recorder serves all calls of a
    signature. Only for calls with which PyTorch does nothing but record them."""

    def __init__(self, given: tuple[str, ...], options: Options, varlen: tuple | None, return_lse: bool, rest: tuple):
        """given: the names of the call's arrays; rest: the operator's arguments after the arrays."""
        self.given, self.return_lse, self.rest = given, return_lse, rest
        self.names = (*given, "out", "lse", "dout"), (*given, "out", "lse", "dout", "dlse")
        self.window_size = options.window_size
        self.seeds = seeds(options.dropout_seed, options.dropout_offset)
        numbers = options._replace(kernel=None).numbers()  # kernel=None, as in `backward`
        self.values = None if self.seeds is None else (*(varlen or ())[2:], *numbers)
        # Positions among the arguments of _Attention; 0, an argument that never needs a gradient, where there is none.
        self.bias, self.sinks = (_BEFORE + given.index(x) if x in given else 0 for x in ("bias", "sinks"))

    def __call__(self, results, arrays: tuple, seeds: tuple | None):
        """results: out, lse, and perhaps more; seeds: those of this call."""
        return _record(self, results, seeds, *arrays)

    def _gradients(self, needs: tuple[bool, ...], arrays: list, seeds: tuple | None, out, lse, dout, dlse) -> list:
        """The gradients of the arguments of _Attention. needs: which arguments need one."""
        want_dbias, want_dsinks = needs[self.bias], needs[self.sinks]
        given, found, sign = (*arrays, out, lse, dout, *(() if dlse is None else (dlse,))), None, None
        if self.values is not None and not torch.is_grad_enabled():
            values = *self.values, want_dbias, want_dsinks, torch.are_deterministic_algorithms_enabled()
            found, sign = find_gradients(self.names[dlse is not None], given, values, self.window_size, seeds)
        if found is None:
            of = dict(zip(self.given, arrays, strict=True))
            rest = self.rest
            if seeds:
                rest = list(rest)
                for place, seed in zip(_SEEDS, seeds, strict=True):
                    rest[place] = operators._signed("dropout_seed", seed)
            arguments = (dout, dlse, out, lse, want_dbias, want_dsinks, *[of.get(x) for x in ARRAYS], *rest)
            run = _backward_for(dout, dlse, out)
            found = run(*arguments, sign=sign, given=given) if run is backward else run(*arguments)
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
    def forward(ctx, recorder: _Recorder, results, seeds, *arrays):
        out, lse = results[0], results[1]
        ctx.save_for_backward(*arrays, out, lse)
        ctx.recorder, ctx.seeds = recorder, seeds
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
        return tuple(ctx.recorder._gradients(needs, arrays, ctx.seeds, out, lse, dout, dlse))


torch_modes.uncompiled(_Attention.backward)
_BEFORE = 3  # the number of arguments before the arrays
_SEEDS = [2 + [*NUMBERS].index(name) for name in SEEDS]  # in _Recorder.rest
# Function.apply would also look for wrappers of finished transforms, which takes 2 us; see _unwrapped.
_record = super(torch.autograd.Function, _Attention).apply


def fake(q, k, v, *rest):
    rank = 4 if rest[len(OPTION_ARRAYS)] is None else 3  # cu_seqlens_q
    for name, x in (("q", q), ("k", k), ("v", v)):
        axes = "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim)"
        shape(name, x, x.dim() == rank, axes)
    operators.check_together((q, k, v, *rest))
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if rank == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(rows, dtype=torch.float32)


LONGEST = "SymInt max_seqlen_q, SymInt max_seqlen_k"
_operators = Operators("attention", LONGEST, forward, backward, fake, choose=_backward_for)
_attention_op, _backward_op = _operators.forward, _operators.backward
_transformed = Transformed(_operators, operators.fold)
torch.library.register_vmap("flash_attn_minimal::attention", _transformed.map_forward)
torch.library.register_vmap("flash_attn_minimal::attention_backward", _transformed.map_backward)
