"""flash_attn_func and flash_attn_varlen_func in a JAX program.

q, k, v, bias, sinks and a traced softmax_scale have gradients, through out and lse. Second derivatives do not exist.
"""

from __future__ import annotations

import ctypes as ct
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from .._core.checks import flag
from .._core.fields import _put_tensor
from .._core.frameworks import is_traced
from .._core.library import load
from .._core.options import FLOAT8, Options, _prepare
from .._core.options import OPTION_ARRAYS as ARRAYS
from .._core.structs import PART_FIELDS, AttentionBackwardArgs, new
from ..backward import _put_dbias
from ..errors import BadArgument, Unsupported
from ._custom_call import as_array, custom_call, place, vary, workspace_bytes
from ._cuts import head_axes, option_axes, own_axes
from ._functions import nothing
from ._partition import Rule, is_manual, laid_like, partitioned

_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")
_HALVES = ("float16", "bfloat16")
RESULT = "flash_attn_minimal"  # the name of out and lse for policies of jax.checkpoint, which may then keep them


def traced(q, k, v, varlen, out, return_lse, options: Options, part: dict[str, Any] | None = None):
    """A call as part of a JAX program. Options that are not arrays are Python values, except softmax_scale.

    varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), the last two Python integers. part: for
    q, k and v with four axes, which part of a longer sequence each sequence is: numbers, or (batch,) int32, of fields
    of fa_part (flash_attn.h), with key_begin from the sequence's first row on. Rows after seqlen_q are 0 in out and
    -inf in lse. Other fields than seqlen_k are 0 where they are not given.
    """
    given = {"q": q, "k": k, "v": v, **{name: getattr(options, name) for name in ARRAYS}}
    options = options._replace(**dict.fromkeys(ARRAYS))
    longest = ()
    if varlen:
        given["cu_seqlens_q"], given["cu_seqlens_k"], *longest = varlen
    elif part:
        given |= {name: jnp.broadcast_to(jnp.asarray(x, jnp.int32), q.shape[:1]) for name, x in part.items()}
    check_served(out, return_lse, options, longest)
    given = {name: as_array(name, array) for name, array in given.items() if array is not None}
    if str(given["q"].dtype) == "float8_e4m3fn":
        raise Unsupported("q is float8_e4m3fn: float8 is not served in a traced call")
    _serve_all_dtypes(given, longest)
    given["q"], options = scaled(given["q"], options)
    names = tuple(given)
    passes = _Passes(names, tuple(longest), options)
    passes.call_of(given.values())  # raises for a wrong call before XLA's compiler sees it
    attend_once, gradients_once = passes.on_devices(given)
    arrays = vary([jnp.asarray(array) for array in given.values()], given.values())

    @jax.custom_vjp
    def attend(*inputs):
        return attend_once(*inputs)

    def forward(*inputs):
        inputs = tuple(x.value for x in inputs)
        out, lse = (checkpoint_name(x, RESULT) for x in attend(*inputs))
        return (out, lse), (inputs, out, lse)

    def backward(saved, cotangents):
        inputs, out, lse = saved
        dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
        if dout is None:
            (dout,) = vary([jnp.zeros_like(out)], [out])
        given = (dout,) if dlse is None else (dout, dlse)
        gradients = dict(zip(passes.wanted, gradients_of(*inputs, out, lse, *given), strict=True))
        by_name = dict(zip(names, inputs, strict=True))
        if varlen:
            for name in "qkv":
                rows = jnp.arange(gradients[name].shape[0])
                covered = rows < by_name["cu_seqlens_q" if name == "q" else "cu_seqlens_k"][-1]
                gradients[name] = jnp.where(covered[:, None, None], gradients[name], 0)
        if "bias" in gradients:
            gradients["bias"] = gradients["bias"].astype(by_name["bias"].dtype)
        gradients = {name: laid_like(x, by_name[name]) for name, x in gradients.items()}
        return tuple(gradients.get(name, nothing(by_name[name])) for name in names)

    attend.defvjp(forward, backward, symbolic_zeros=True)  # most losses do not depend on lse

    @jax.custom_vjp
    def gradients_of(*inputs):
        return gradients_once(*inputs)

    gradients_of.defvjp(lambda *inputs: (gradients_once(*inputs), None), no_second_derivative)
    # jit, because jax.shard_map alone does not support symbolic zeros.
    out, lse = (jax.jit(attend, inline=True) if is_manual() else attend)(*arrays)
    if varlen:  # XLA does not initialise results, and nothing writes the rows after the last sequence
        covered = jnp.arange(out.shape[0]) < arrays[names.index("cu_seqlens_q")][-1]
        out, lse = jnp.where(covered[:, None, None], out, 0), jnp.where(covered, lse, -jnp.inf)
    return (out, lse) if flag("return_lse", return_lse) else out


def check_served(out, return_lse, options: Options, longest) -> None:
    """Refuses options that no traced call has, and traced values of options that must be known when the call is
    traced."""
    if out is not None:
        raise Unsupported("out is given, but a traced call has no memory to write to: pass out=None")
    plain = options._asdict()
    if is_traced(plain["softmax_scale"]):
        del plain["softmax_scale"]
    if not is_traced(options.fast_accum) and not flag("fast_accum", options.fast_accum):
        plain["fast_accum"] = None
    for name in FLOAT8:
        if plain.pop(name) is not None:
            raise Unsupported(f"{name} is given, but float8 is not served in a traced call")
    lengths = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=False))
    for name, value in {**plain, **lengths, "return_lse": return_lse}.items():
        if is_traced(*(value if isinstance(value, (tuple, list)) else (value,))):
            raise Unsupported(f"{name} is a traced value: pass a Python one")


def scaled(q, options: Options) -> tuple[Any, Options]:
    """q and options without a traced softmax_scale. q is multiplied by the scale relative to the default scale, by
    which a call without softmax_scale multiplies. So q keeps its magnitude, and with the default scale its bits."""
    scale = options.softmax_scale
    if not is_traced(scale):
        return q, options
    if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise BadArgument(f"softmax_scale is {scale.dtype} {scale.shape}: expected one floating-point number")
    relative = scale.astype(jnp.float32) * math.sqrt(max(q.shape[-1], 1))
    return (q.astype(jnp.float32) * relative).astype(q.dtype), options._replace(softmax_scale=None)


def _serve_all_dtypes(given: dict, longest) -> None:
    """Converts half-precision sinks and slopes to float32, and a bias of the other half-precision dtype too. Expands a
    bias or mask with one column to all columns."""
    for name in [x for x in ("sinks", "alibi_slopes", "bias") if x in given]:
        kind = given[name].dtype
        if str(kind) in _HALVES and (name != "bias" or kind != given["q"].dtype):
            given[name] = jnp.asarray(given[name]).astype(jnp.float32)
    seqlen_k = longest[1] if longest else given["k"].shape[1] if given["k"].ndim == 4 else None
    for name in ("bias", "mask"):
        if name in given and given[name].ndim and given[name].shape[-1] == 1 != seqlen_k is not None:
            given[name] = jnp.broadcast_to(given[name], (*given[name].shape[:-1], seqlen_k))


def no_second_derivative(saved, cotangents):
    raise Unsupported("a gradient of attention is differentiated once more: second derivatives are not served")


# ---- a call, for arrays of any sizes ----


class _Passes:
    """Both passes of a call, for arrays of any sizes: each device may have a share of them."""

    def __init__(self, names: tuple[str, ...], longest: tuple[int, ...], options: Options):
        self.names, self.longest, self.options = names, longest, options
        self.wanted = [name for name in _DIFFERENTIABLE if name in names]
        self._calls: dict[tuple, Any] = {}

    def call_of(self, arrays):
        """The call for arrays of these sizes."""
        types = tuple((x.shape, str(x.dtype)) for x in arrays)
        if types not in self._calls:
            kind = _PartsCall if "seqlen_k" in self.names else Call
            self._calls[types] = kind(self.names, types, self.longest, self.options)
        return self._calls[types]

    def on_devices(self, given: dict):
        """Both passes as functions of arrays that may be spread over devices. vmap makes one call after the other,
        because XLA's own rule would stack the workspaces."""
        operands, results = self._axes(given)
        rows = [*operands.values(), *results]  # the backward pass has dout and maybe dlse after these

        def forward(*arrays):
            return self.call_of(arrays).forward(*arrays)

        def backward(*arrays):
            return self.call_of(arrays[: len(self.names)]).backward(*arrays)

        @jax.custom_batching.sequential_vmap
        def attend(*arrays):
            return partitioned(forward, Rule(tuple(operands.values()), results))(*arrays)

        @jax.custom_batching.sequential_vmap
        def gradients(*arrays):
            more = results[: len(arrays) - len(rows)]
            rule = Rule((*rows, *more), tuple(operands[name] for name in self.wanted))
            return partitioned(backward, rule)(*arrays)

        return attend, gradients

    def _axes(self, given: dict) -> tuple[dict[str, tuple], tuple]:
        """The names of the axes (see Rule) of each argument, and those of out and lse. Batch and heads can be cut, in a
        varlen call only heads. With dropout nothing is cut, because it counts the heads and sequences of the whole
        call."""
        batch, heads, heads_k = "batch", *head_axes(given["q"].shape[-2], given["k"].shape[-2])
        if self.options.dropout_p:
            batch = heads = heads_k = None
        if self.longest:
            batch, rows = None, ()
        else:
            rows = (batch,)
        axes: dict[str, tuple] = {"q": (*rows, None, heads, None)}
        axes["k"] = axes["v"] = (*rows, None, heads_k, None)
        axes |= dict.fromkeys(PART_FIELDS, (batch,))
        axes["cu_seqlens_q"] = axes["cu_seqlens_k"] = (None,)
        axes |= option_axes(given, batch, heads, heads_k)
        return {name: own_axes(axes[name], x.shape) for name, x in given.items()}, (axes["q"], (*rows, heads, None))


# ---- a call, described ----


class Call:
    """Both passes of a call with these arguments: functions of its arrays, in the order of `names`."""

    def __init__(self, names, types, longest, options):
        """types: (shape, dtype) of each array. longest: () or, in a varlen call, (max_seqlen_q, max_seqlen_k). Instead
        of cu_seqlens_k the call may have `parts`, (batch, 8) int32: each row has the fields of an fa_part
        (flash_attn.h)."""
        self.names, self.types, self.longest, self.options = names, types, longest, options
        self.wanted = [name for name in _DIFFERENTIABLE if name in names]
        args, q, v = self._prepare(options)
        rows = (args.batch, args.nheads, args.seqlen_q) if not longest else (args.nheads, q.shape[0])
        self.results = [((*q.shape[:-1], v.shape[-1]), q.dtype), (rows, "float32")]
        out, lse = (place(len(names) + i, *result) for i, result in enumerate(self.results))
        _put_tensor(args, "out", out)
        args.lse = lse.pointer
        lib = load()
        size = workspace_bytes(args, lambda plan: lib.fa_attention_query(args, plan))
        self.forward = custom_call("attention_forward", args, self.results, size)
        self._backward: dict[bool, Any] = {}

    def backward(self, *arrays):
        """The gradients of `wanted`, bias's as float32. arrays: those of the call, then out, lse, dout, and dlse if the
        loss depends on lse."""
        through_lse = len(arrays) > len(self.names) + 3
        if through_lse not in self._backward:
            self._backward[through_lse] = self._describe_backward(through_lse)
        return self._backward[through_lse](*arrays)

    def _describe_backward(self, through_lse: bool):
        types = dict(zip(self.names, self.types, strict=True))
        inputs = [*self.types, *self.results, *self.results[: 1 + through_lse]]
        out, lse, dout, *dlse = (place(i, *about) for i, about in enumerate(inputs) if i >= len(self.names))
        results = [(types[name][0], "float32" if name == "bias" else types[name][1]) for name in self.wanted]
        places = {name: place(len(inputs) + i, *results[i]) for i, name in enumerate(self.wanted)}
        args, *_ = self._prepare(self.options._replace(kernel=None))  # `kernel` names a kernel of the forward pass
        _put_tensor(args, "out", out)
        args.lse = lse.pointer
        call = new(AttentionBackwardArgs)
        call.forward = ct.pointer(args)
        _put_tensor(call, "dout", dout)
        if dlse:
            call.dlse = dlse[0].pointer
        for name in "qkv":
            _put_tensor(call, f"d{name}", places[name])
        if "bias" in places:
            _put_dbias(call, places["bias"])
        if "sinks" in places:
            call.dsinks = places["sinks"].pointer
        lib = load()
        size = workspace_bytes(args, lambda plan: lib.fa_attention_backward_query(call, plan))
        return custom_call("attention_backward", call, results, size)

    def _prepare(self, options: Options):
        """AttentionArgs without outputs, and the Views of q and v."""
        places = {name: place(i, *about) for i, (name, about) in enumerate(zip(self.names, self.types, strict=True))}
        lengths, parts = None, places.pop("parts", None)
        if self.longest:
            rows = places.pop("cu_seqlens_q")
            lengths = rows, places.pop("cu_seqlens_k", rows), *self.longest
        q, k, v = (places.pop(name) for name in "qkv")
        args, _ = _prepare(q, k, v, lengths, options._replace(**places))
        if parts:
            args.parts, args.cu_seqlens_k = parts.pointer, None  # parts describe their keys
        return args, q, v


class _PartsCall:
    """A call whose sequences are parts of longer ones, or fill only the first of their rows and keys: a varlen call in
    which each sequence is an fa_part, so that a kernel skips what does not count. Its arrays have four axes."""

    def __init__(self, names, types, longest, options):
        by_name = dict(zip(names, types, strict=True))
        (self.batch, self.rows, *_), self.keys = by_name["q"][0], by_name["k"][0][1]
        self.names = names
        inner = tuple(name for name in names if name not in PART_FIELDS)
        packed = [((shape[0] * shape[1], *shape[2:]), kind) for shape, kind in (by_name[name] for name in "qkv")]
        packed += [by_name[name] for name in inner[3:]] + [((self.batch + 1,), "int32"), ((self.batch, 8), "int32")]
        options = options._replace(top_left=False)  # the shift of a part gives the alignment
        self.call = Call((*inner, "cu_seqlens_q", "parts"), tuple(packed), (self.rows, self.keys), options)

    def forward(self, *arrays):
        given = dict(zip(self.names, arrays, strict=True))
        out, lse = self.call.forward(*self._packed(given))
        out, lse = self._four_axes(out, self.rows), lse.reshape(lse.shape[0], self.batch, self.rows).swapaxes(0, 1)
        if "seqlen_q" not in given:
            return out, lse
        covered = jnp.arange(self.rows) < given["seqlen_q"][:, None]
        return jnp.where(covered[:, :, None, None], out, 0), jnp.where(covered[:, None], lse, -jnp.inf)

    def backward(self, *arrays):
        given, (out, lse, dout, *dlse) = dict(zip(self.names, arrays, strict=False)), arrays[len(self.names) :]
        by_row = [x.swapaxes(0, 1).reshape(x.shape[1], -1) for x in (lse, *dlse)]
        out, dout = (x.reshape(-1, *x.shape[2:]) for x in (out, dout))
        found = self.call.backward(*self._packed(given), out, by_row[0], dout, *by_row[1:])
        gradients, part = dict(zip(self.call.wanted, found, strict=True)), self._part(given)
        for name in "qkv":
            gradients[name] = self._four_axes(gradients[name], self.rows if name == "q" else self.keys)
            if name == "q" and "seqlen_q" not in given:
                continue
            first, count = (0, part["seqlen_q"]) if name == "q" else (part["key_begin"][:, None], part["seqlen_k"])
            row = jnp.arange(gradients[name].shape[1]) - first
            covered = (row >= 0) & (row < count[:, None])  # nothing writes the other rows
            gradients[name] = jnp.where(covered[:, :, None, None], gradients[name], 0)
        return tuple(gradients.values())

    def _part(self, given: dict) -> dict:
        """The fields of fa_part, (batch,) each, with key_begin from the sequence's first row on."""
        part = {name: given.get(name, jnp.zeros(self.batch, jnp.int32)) for name in PART_FIELDS}
        part["sequence"] = jnp.arange(self.batch, dtype=jnp.int32)
        part["seqlen_k"] = jnp.clip(part["seqlen_k"], 0, self.keys)
        if "seqlen_q" in given:  # a part with seqlen_q = 0 would have all rows; without rows there are no keys
            part["seqlen_q"] = jnp.clip(part["seqlen_q"], 0, self.rows)
            part["seqlen_k"] = jnp.where(part["seqlen_q"] > 0, part["seqlen_k"], 0)
        return part

    def _packed(self, given: dict) -> list:
        part = self._part(given)
        part["key_begin"] += part["sequence"] * self.keys
        packed = [
            x.reshape(-1, *x.shape[2:]) if name in "qkv" else x for name, x in given.items() if name not in PART_FIELDS
        ]
        return [*packed, jnp.arange(self.batch + 1, dtype=jnp.int32) * self.rows, jnp.stack([*part.values()], axis=1)]

    def _four_axes(self, x, rows: int):
        return x.reshape(self.batch, rows, *x.shape[1:])
