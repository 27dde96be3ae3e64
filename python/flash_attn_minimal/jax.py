"""flash_attn_func and flash_attn_varlen_func on JAX's traced arrays: they work under jit and grad, on CPU and GPU.

XLA calls the library through its foreign function interface (cuda/api/attention/xla_ffi.cpp): no Python runs in a step.
Tracing a call fills the structs of flash_attn.h, with a placeholder for the address of each buffer. A call that no
device of this machine serves is refused while it is traced. On a GPU the stream is XLA's, and the workspace is one more
result of the custom call, which the caller never sees.

q, k, v, bias and sinks have gradients, through out and lse. There are no second derivatives. vmap runs one call after
the other.

>>> import jax
>>> from flash_attn_minimal import flash_attn_func
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 16))
>>> jax.jit(jax.grad(lambda q: flash_attn_func(q, k, v, causal=True).sum()))(q).shape
(1, 10, 2, 16)
"""

from __future__ import annotations

import ctypes as ct
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import _arrays
from ._arrays import Door, View
from ._checks import _flag
from ._library import (
    CPU,
    CUDA,
    OK,
    AttentionArgs,
    AttentionBackwardArgs,
    AttentionPlan,
    BadArgument,
    Unsupported,
    failure,
    load,
    new,
)
from ._options import Options, _prepare
from ._pack import _put_tensor
from .backward import _put_dbias

try:
    from jax import ffi
except ImportError:  # before JAX 0.5
    from jax.extend import ffi

_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks")


def _traced(q, k, v, varlen, out, return_lse, options: Options):
    """A call as part of a JAX program. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), the
    last two Python integers. Options that are not arrays are Python values."""
    given = {"q": q, "k": k, "v": v, **{name: getattr(options, name) for name in _ARRAYS}}
    options = options._replace(**dict.fromkeys(_ARRAYS))
    longest = ()
    if varlen:
        given["cu_seqlens_q"], given["cu_seqlens_k"], *longest = varlen
    _check_served(out, return_lse, options, longest)
    given = {name: array for name, array in given.items() if array is not None}
    names = tuple(given)
    arrays = tuple(_array(name, array) for name, array in given.items())
    if str(arrays[0].dtype) == "float8_e4m3fn":
        raise Unsupported("q is float8_e4m3fn: float8 is not served in a traced call")
    columns = longest[1] if varlen else arrays[1].shape[1] if arrays[1].ndim == 4 else 1
    arrays = tuple(_served(name, array, columns) for name, array in zip(names, arrays, strict=True))
    call = _Call(names, [(x.shape, str(x.dtype)) for x in arrays], longest, options)
    arrays = _vary([jnp.asarray(array) for array in arrays], arrays)

    @jax.custom_vjp
    def attend(*inputs):
        return call.forward(*inputs)

    def forward(*inputs):
        inputs = tuple(x.value for x in inputs)
        out, lse = attend(*inputs)
        return (out, lse), (inputs, out, lse)

    def backward(saved, cotangents):
        inputs, out, lse = saved
        dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in cotangents)
        if dout is None:
            (dout,) = _vary([jnp.zeros_like(out)], [out])
        given = (dout,) if dlse is None else (dout, dlse)
        gradients = dict(zip(call.wanted, gradients_of(*inputs, out, lse, *given), strict=True))
        by_name = dict(zip(names, inputs, strict=True))
        if "cu_seqlens_q" in by_name:
            for name in "qkv":
                rows = jnp.arange(gradients[name].shape[0])
                covered = rows < by_name["cu_seqlens_q" if name == "q" else "cu_seqlens_k"][-1]
                gradients[name] = jnp.where(covered[:, None, None], gradients[name], 0)
        if "bias" in gradients:
            gradients["bias"] = gradients["bias"].astype(by_name["bias"].dtype)
        return tuple(gradients.get(name, _no_gradient(by_name[name])) for name in names)

    attend.defvjp(forward, backward, symbolic_zeros=True)  # most losses do not depend on lse

    @jax.custom_vjp
    def gradients_of(*inputs):
        return call.backward(*inputs)

    gradients_of.defvjp(lambda *inputs: (call.backward(*inputs), None), _no_second_derivative)
    out, lse = attend(*arrays)
    if varlen:  # XLA does not initialise results, and nothing writes the rows behind the last sequence
        covered = jnp.arange(out.shape[0]) < arrays[names.index("cu_seqlens_q")][-1]
        out, lse = jnp.where(covered[:, None, None], out, 0), jnp.where(covered, lse, -jnp.inf)
    return (out, lse) if _flag("return_lse", return_lse) else out


def _check_served(out, return_lse, options: Options, longest) -> None:
    """Refuses options that no traced call has, and traced values of options that have to be known when the call is
    traced."""
    if out is not None:
        raise Unsupported("out is given, but a traced call has no memory to write to: pass out=None")
    plain = options._asdict()
    if not _is_tracer(options.fast_accum) and not _flag("fast_accum", options.fast_accum):
        plain["fast_accum"] = None
    for name in ("q_descale", "k_descale", "v_descale", "out_dtype", "fast_accum"):
        if plain.pop(name) is not None:
            raise Unsupported(f"{name} is given, but float8 is not served in a traced call")
    lengths = dict(zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=False))
    for name, value in {**plain, **lengths, "return_lse": return_lse}.items():
        if any(map(_is_tracer, value if isinstance(value, (tuple, list)) else (value,))):
            raise Unsupported(f"{name} is a traced value: pass a Python one")


def _is_tracer(value) -> bool:
    return isinstance(value, jax.core.Tracer)


def _array(name: str, array):
    """An array of JAX or NumPy, not converted: its own dtype is checked, and JAX may turn float64 into float32."""
    if isinstance(array, jax.Array):
        return array
    door = _arrays.view(array, name).door
    if door is not _arrays.NUMPY:
        raise BadArgument(f"{name} is a {door.name} array, but the call is part of a JAX program: use JAX for all")
    return array


def _served(name: str, array, seqlen_k: int):
    """The array as the library takes it: a bias or mask with all columns, what goes by heads as float32."""
    if name in ("bias", "mask") and array.ndim and array.shape[-1] == 1 != seqlen_k:
        return jnp.broadcast_to(array, (*array.shape[:-1], seqlen_k))
    if name in ("alibi_slopes", "sinks") and str(array.dtype) in ("float16", "bfloat16"):
        return jnp.asarray(array, jnp.float32)
    return array


def _vary(arrays, others) -> list:
    """The arrays, marked as varying over every mesh axis that one of `others` varies over. In jax.shard_map the
    arguments, results and gradients of a custom call have to vary over the same axes."""
    axes = frozenset().union(*map(_varying_axes, others))
    missing = [tuple(sorted(axes - _varying_axes(array))) for array in arrays]
    return [_cast(array, more) if more else array for array, more in zip(arrays, missing, strict=True)]


def _varying_axes(array) -> frozenset:
    kind = jax.typeof(array) if hasattr(jax, "typeof") else None
    return kind.mat.varying if hasattr(kind, "mat") else getattr(kind, "vma", frozenset())


def _cast(array, axes):
    return jax.lax.pcast(array, axes, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(array, axes)


def _no_gradient(array):
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


def _no_second_derivative(saved, cotangents):
    raise Unsupported("a gradient of attention is differentiated once more: second derivatives are not served")


# ---- a call, described ----


class _PlaceDoor(Door):
    """Buffers of a custom call, which have no address yet."""

    name = "JAX"

    def view(self, array, name):
        return array


_PLACES = _PlaceDoor()
_arrays._doors[View] = _PLACES  # a view is taken as it is
_ADDRESS_UNIT = 1 << 48  # kAddressUnit of xla_ffi.cpp


def _place(index: int, shape, dtype: str) -> View:
    """Buffer `index` of a custom call (arguments first, then results): a dense view whose address encodes the index."""
    strides = tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))
    return View(None, _PLACES, _ADDRESS_UNIT * (1 + index), tuple(shape), strides, dtype, CPU, 0, True)


class _Call:
    """Both passes of a call with these arguments: functions of its arrays, in the order of `names`."""

    def __init__(self, names, types, longest, options):
        """types: (shape, dtype) of each array. longest: () or, in a varlen call, (max_seqlen_q, max_seqlen_k). Instead
        of cu_seqlens_k it may have `parts`, (batch, 8) int32: the fields of an fa_part (flash_attn.h) each."""
        self.names, self.types, self.longest, self.options = names, types, longest, options
        self.wanted = [name for name in _DIFFERENTIABLE if name in names]
        args, q, v = self._prepare(options)
        rows = (args.batch, args.nheads, args.seqlen_q) if not longest else (args.nheads, q.shape[0])
        self.results = [((*q.shape[:-1], v.shape[-1]), q.dtype), (rows, "float32")]
        out, lse = (_place(len(names) + i, *result) for i, result in enumerate(self.results))
        _put_tensor(args, "out", out)
        args.lse = lse.pointer
        lib = load()
        size = _workspace(args, lambda plan: lib.fa_attention_query(args, plan))
        self.forward = _custom_call("forward", args, size, len(names), self.results)
        self._backward: dict[bool, Callable] = {}

    def backward(self, *arrays):
        """The gradients of `wanted`, that of bias as float32, of (*arrays, out, lse, dout), and dlse where the loss
        depends on lse."""
        through_lse = len(arrays) > len(self.names) + 3
        if through_lse not in self._backward:
            self._backward[through_lse] = self._describe_backward(through_lse)
        return self._backward[through_lse](*arrays)

    def _describe_backward(self, through_lse: bool) -> Callable:
        types = dict(zip(self.names, self.types, strict=True))
        inputs = [*self.types, *self.results, *self.results[: 1 + through_lse]]
        out, lse, dout, *dlse = (_place(i, *about) for i, about in enumerate(inputs) if i >= len(self.names))
        results = [(types[name][0], "float32" if name == "bias" else types[name][1]) for name in self.wanted]
        places = {name: _place(len(inputs) + i, *results[i]) for i, name in enumerate(self.wanted)}
        args, *_ = self._prepare(self.options._replace(kernel=None))  # `kernel` names one of the forward pass
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
        size = _workspace(args, lambda plan: lib.fa_attention_backward_query(call, plan))
        return _custom_call("backward", args, size, len(inputs), results, backward=call)

    def _prepare(self, options: Options):
        """AttentionArgs without outputs, and the places of q and v."""
        places = {name: _place(i, *about) for i, (name, about) in enumerate(zip(self.names, self.types, strict=True))}
        lengths, parts = None, places.pop("parts", None)
        if self.longest:
            rows = places.pop("cu_seqlens_q")
            lengths = rows, places.pop("cu_seqlens_k", rows), *self.longest
        q, k, v = (places.pop(name) for name in "qkv")
        args, _ = _prepare(q, k, v, lengths, options._replace(**places))
        if parts:
            args.parts, args.cu_seqlens_k = parts.pointer, None  # parts name their keys
        return args, q, v


def _workspace(args: AttentionArgs, query: Callable[[AttentionPlan], int]) -> int:
    """Bytes of workspace on a GPU; on the CPU the handler allocates its own. Raises if no device of this machine serves
    the call."""
    lib, plan, size, served = load(), new(AttentionPlan), 0, False
    q, args.q_data = args.q_data, None  # the query asks the driver which GPU q is on; NULL means the current one
    for device in (CPU, CUDA) if lib.fa_cuda_device_count() else (CPU,):
        args.device = device
        status = query(plan)
        if status == OK:
            served = True
            size = plan.workspace_bytes if device == CUDA else 0
    args.q_data = q
    if not served:
        raise failure(status)
    return size


def _custom_call(target: str, args: AttentionArgs, workspace: int, arguments: int, results, **more: ct.Structure):
    """The custom call that filled structs describe, as a function of `arguments` arrays."""
    _register()
    args.workspace, args.workspace_bytes = _ADDRESS_UNIT * (1 + arguments + len(results)), workspace
    kernel, args.kernel = (args.kernel or b"").decode(), None
    for struct in more.values():
        struct.forward = None
    words = {name: np.frombuffer(bytes(struct), np.int64) for name, struct in {"attention": args, **more}.items()}
    shapes = [jax.ShapeDtypeStruct(*about) for about in (*results, ((workspace,), "uint8"))]

    @jax.custom_batching.sequential_vmap  # ffi_call's own rule for vmap would stack the workspaces
    def run(*inputs):
        results = ffi.ffi_call(f"flash_attn_minimal_{target}", shapes)(*inputs, kernel=kernel, **words)
        return tuple(_vary(results[:-1], inputs))

    return run


@functools.cache
def _register() -> None:
    """Tells XLA about the handlers, once."""
    lib = load()
    for target in ("forward", "backward"):
        for platform in ("cpu", "CUDA"):
            handler = getattr(lib, f"fa_xla_{target}_{platform.lower()}")
            ffi.register_ffi_target(f"flash_attn_minimal_{target}", ffi.pycapsule(handler), platform=platform)
