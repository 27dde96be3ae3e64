"""PyTorch's backward pass: what flash_attn_func and flash_attn_varlen_func do with tensors that require a gradient, and
under torch.compile.

Eager calls go through a torch.autograd.Function, which costs a few microseconds; compiled ones through the operators
flash_attn_minimal::attention and ::attention_backward (torch.library), which a graph can hold without looking inside.
Importing this module is optional: the first call that needs it does. Import it before torch.compile meets the first
call, and nothing breaks the graph.

Gradients: q, k, v, bias and sinks. lse has none; it is returned as a constant.
"""

from __future__ import annotations

from typing import Any

import torch

from . import attention
from ._library import BadArgument, Unsupported
from ._pack import _PREPARED, _flag, _integer, _number, _window
from .backward import backward

_ARRAYS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_k")


def differentiable(q, k, v, varlen, out, return_lse, options: tuple):
    """The call with a gradient. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k); options:
    what _prepare takes after it."""
    options = dict(zip(_PREPARED, options, strict=True))
    dropout_seed = options["dropout_seed"]
    if out is not None:
        raise Unsupported("out is given, but the call records a gradient: pass out=None, or use torch.no_grad()")
    for name in ("alibi_slopes", "mask"):
        if isinstance(options.get(name), torch.Tensor) and options[name].requires_grad:
            raise Unsupported(f"{name} requires a gradient, which attention does not have: pass {name}.detach()")
    for name in ("q_descale", "k_descale", "v_descale", "out_dtype", "fast_accum"):
        value = options.pop(name, None)
        if value is not None and value is not False:
            raise Unsupported(f"{name} is given, but float8 has no backward pass")
    for name, array in {"q": q, "k": k, "v": v, **options}.items():
        if name in _ARRAYS and array is not None and not isinstance(array, torch.Tensor):
            raise BadArgument(f"{name} is a {type(array).__name__}: where q is a tensor, it must be one too")
    cu_q, cu_k, max_q, max_k = varlen or (None, None, 0, 0)
    left, right = _window(options["window_size"])
    seed = None if dropout_seed is None else _signed("dropout_seed", dropout_seed)
    scale = options["softmax_scale"]
    arguments = (
        q, k, v, options["bias"], options["mask"], options["alibi_slopes"], options["sinks"], cu_q, cu_k,
        _integer("max_seqlen_q", max_q, 0, 2**63 - 1), _integer("max_seqlen_k", max_k, 0, 2**63 - 1),
        _number("dropout_p", options["dropout_p"]), None if scale is None else _number("softmax_scale", scale),
        bool(_flag("causal", options["causal"])), left, right, _number("softcap", options["softcap"]),
        bool(_flag("deterministic", options["deterministic"])), bool(_flag("top_left", options["top_left"])),
        seed, _signed("dropout_offset", options["dropout_offset"]), options["kernel"],
        bool(_flag("allow_tf32", options["allow_tf32"])), options["num_threads"],
    )  # fmt: skip
    out, lse = _attention_op(*arguments) if torch.compiler.is_compiling() else _Attention.apply(*arguments)
    return (out, lse) if _flag("return_lse", return_lse) else out


def _signed(name: str, value: int) -> int:
    """A 64-bit unsigned number as PyTorch's operators take it: as the signed one of the same bits."""
    number = _integer(name, value, 0, 2**64 - 1)
    return number - 2**64 if number >= 2**63 else number


_OPTIONS = (
    "dropout_p", "softmax_scale", "causal", "window_left", "window_right", "softcap", "deterministic", "top_left",
    "dropout_seed", "dropout_offset", "kernel", "allow_tf32", "num_threads",
)  # fmt: skip


def _unpack(values: tuple) -> dict[str, Any]:
    """_OPTIONS, as both passes want them."""
    options = dict(zip(_OPTIONS, values, strict=True))
    options["window_size"] = options.pop("window_left"), options.pop("window_right")
    if options["dropout_seed"] is not None:
        options["dropout_seed"] %= 2**64
    options["dropout_offset"] %= 2**64
    return options


def _forward(q, k, v, bias, mask, alibi_slopes, sinks, cu_q, cu_k, max_q, max_k, *values):
    options = _unpack(values) | {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    with torch.no_grad():
        if cu_q is None:
            return attention.flash_attn_func(q, k, v, return_lse=True, **options)
        return attention.flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, return_lse=True, **options)


def _backward(dout, out, lse, want_dbias, want_dsinks, arrays, max_q, max_k, values):
    """dq, dk, dv, dbias, dsinks; the last two in the dtype of their inputs, None where not wanted."""
    q, k, v, bias, mask, alibi_slopes, sinks, cu_q, cu_k = arrays
    options = _unpack(values) | {"bias": bias, "mask": mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    del options["kernel"]  # the forward pass's; $FLASH_ATTN_BACKWARD_KERNEL forces this one
    if cu_q is not None:
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    if dout.stride(-1) != 1:  # out.sum() has a gradient of stride 0
        dout = dout.contiguous()
    with torch.no_grad():
        dq, dk, dv, *rest = backward(
            dout, q, k, v, out, lse, return_dbias=want_dbias, return_dsinks=want_dsinks, **options
        )
    dbias = rest.pop(0).to(bias.dtype) if want_dbias else None
    return dq, dk, dv, dbias, rest.pop(0) if want_dsinks else None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        arrays, (max_q, max_k), values = arguments[:9], arguments[9:11], arguments[11:]
        out, lse = _forward(*arguments)
        ctx.save_for_backward(*arrays, out, lse)
        ctx.lengths, ctx.values = (max_q, max_k), values
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dout, _):
        nothing = (None,) * (11 + len(ctx.values))
        if dout is None:
            return nothing
        *arrays, out, lse = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dq, dk, dv, dbias, dsinks = _backward(
            dout, out, lse, wanted[3], wanted[6], arrays, *ctx.lengths, ctx.values
        )  # fmt: skip
        return (dq, dk, dv, dbias, None, None, dsinks, *nothing[7:])


# ---- the operators of compiled graphs ----

_T, _O = "Tensor", "Tensor?"
_INPUTS = (
    f"{_T} q, {_T} k, {_T} v, {_O} bias, {_O} mask, {_O} alibi_slopes, {_O} sinks, {_O} cu_seqlens_q, "
    f"{_O} cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float? softmax_scale, bool causal, "
    "int window_left, int window_right, float softcap, bool deterministic, bool top_left, int? dropout_seed, "
    "int dropout_offset, str? kernel, bool allow_tf32, int num_threads"
)
torch.library.define("flash_attn_minimal::attention", f"({_INPUTS}) -> ({_T}, {_T})")
torch.library.define(
    "flash_attn_minimal::attention_backward",
    f"({_T} dout, {_T} out, {_T} lse, bool want_dbias, bool want_dsinks, {_INPUTS}) -> ({_T}, {_T}, {_T}, {_T}, {_T})",
)
_attention_op = torch.ops.flash_attn_minimal.attention.default
_backward_op = torch.ops.flash_attn_minimal.attention_backward.default
torch.library.impl("flash_attn_minimal::attention", ("cpu", "cuda"), _forward)


@torch.library.register_fake("flash_attn_minimal::attention")
def _(q, k, v, *rest):
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    rows = (q.shape[1], q.shape[0]) if rest[4] is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(rows, dtype=torch.float32)


@torch.library.impl("flash_attn_minimal::attention_backward", ("cpu", "cuda"))
def _(dout, out, lse, want_dbias, want_dsinks, *arguments):
    arrays, (max_q, max_k), values = arguments[:9], arguments[9:11], arguments[11:]
    results = _backward(dout, out, lse, want_dbias, want_dsinks, arrays, max_q, max_k, values)
    return tuple(dout.new_empty(0) if x is None else x for x in results)


@torch.library.register_fake("flash_attn_minimal::attention_backward")
def _(dout, out, lse, want_dbias, want_dsinks, q, k, v, bias, mask, alibi_slopes, sinks, *rest):
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if want_dbias else dout.new_empty(0)
    dsinks = sinks.new_empty(sinks.shape) if want_dsinks else dout.new_empty(0)
    return *(x.new_empty(x.shape) for x in (q, k, v)), dbias, dsinks


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:9], *output)
    ctx.lengths, ctx.values = inputs[9:11], inputs[11:]
    ctx.mark_non_differentiable(output[1])


def _op_backward(ctx, dout, _):
    *arrays, out, lse = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    dq, dk, dv, dbias, dsinks = _backward_op(
        dout, out, lse, wanted[3], wanted[6], *arrays, *ctx.lengths, *ctx.values
    )  # fmt: skip
    rest = (None,) * (4 + len(ctx.values))
    return (dq, dk, dv, dbias if wanted[3] else None, None, None, dsinks if wanted[6] else None, *rest)


torch.library.register_autograd("flash_attn_minimal::attention", _op_backward, setup_context=_setup_context)
attention._is_compiling = torch.compiler.is_compiling
