"""JAX: what flash_attn_func and flash_attn_varlen_func do with traced arrays, so that they work under jit and grad, on
CPU and GPU.

XLA calls the library through its foreign function interface (openxla.org/xla/custom_call): the handlers are ctypes
callbacks that read XLA's call frame, so nothing has to be compiled against JAX. The options travel as JSON inside the
compiled program. On a GPU the stream is XLA's, and the workspace comes from XLA's own allocator.

Gradients: q, k, v, bias and sinks; lse has none. vmap maps one call after the other.

>>> import jax
>>> from flash_attn_minimal import flash_attn_func
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 10, 2, 16))
>>> jax.jit(jax.grad(lambda q: flash_attn_func(q, k, v, causal=True).sum()))(q).shape
(1, 10, 2, 16)
"""

from __future__ import annotations

import ctypes as ct
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _arrays
from ._arrays import Door, View
from ._launch import _launch
from ._library import CPU, CUDA, AttentionBackwardArgs, FlashAttnError, Unsupported
from ._pack import _PREPARED, _flag, _prepare, _put_tensor
from .backward import _launch_backward, _put_dbias

_ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")


def traced(q, k, v, varlen, out, return_lse, options: tuple):
    """A call as part of a JAX program. varlen: None, or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), the
    last two Python integers; options: what _prepare takes after it, Python values but for the arrays."""
    if out is not None:
        raise Unsupported("out is given, but a traced call has no memory to write to: pass out=None")
    options = dict(zip(_PREPARED, options, strict=True))
    for name in ("q_descale", "k_descale", "v_descale", "out_dtype", "fast_accum"):
        value = options.pop(name)
        if value is not None and value is not False:
            raise Unsupported(f"{name} is given, but float8 is not served in a traced call")
    arrays = {"q": q, "k": k, "v": v, **{name: options.pop(name) for name in _ARRAYS}}
    if varlen:
        arrays["cu_seqlens_q"], arrays["cu_seqlens_k"], options["max_seqlen_q"], options["max_seqlen_k"] = varlen
    for name, value in options.items():
        if isinstance(value, jax.core.Tracer):
            raise Unsupported(f"{name} is a traced value: pass a Python one")
    arrays = {name: jnp.asarray(array) for name, array in arrays.items() if array is not None}
    names = tuple(arrays)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays.values()]
    args, views, _ = _call(dict(zip(names, map(_shape_view, shapes), strict=True)), dict(options))  # raises at once
    q, v = views[0], views[2]
    rows = (args.batch, args.nheads, args.seqlen_q) if len(q.shape) == 4 else (args.nheads, q.shape[0])
    results = (
        jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), arrays["q"].dtype),
        jax.ShapeDtypeStruct(rows, jnp.float32),
    )
    text = json.dumps({"names": names, "options": options})

    @jax.custom_vjp
    def attend(*inputs):
        return _ffi("flash_attn_minimal_forward", results, inputs, text)

    def forward(*inputs):
        out, lse = attend(*inputs)
        return (out, lse), (inputs, out, lse)

    def backward(saved, cotangents):
        inputs, out, lse = saved
        by_name = dict(zip(names, inputs, strict=True))
        wanted = [name for name in ("q", "k", "v", "bias", "sinks") if name in by_name]
        shapes = [
            jax.ShapeDtypeStruct(by_name[name].shape, jnp.float32 if name == "bias" else by_name[name].dtype)
            for name in wanted
        ]
        pass_options = {**options, "kernel": None}  # the forward pass's
        text = json.dumps({"names": (*names, "out", "lse", "dout"), "options": pass_options})
        given = (*inputs, out, lse, cotangents[0])
        gradients = dict(
            zip(wanted, _ffi("flash_attn_minimal_backward", tuple(shapes), given, text), strict=True)
        )  # fmt: skip
        if "cu_seqlens_q" in by_name:
            for name in "qkv":
                rows = jnp.arange(gradients[name].shape[0])
                covered = rows < by_name["cu_seqlens_q" if name == "q" else "cu_seqlens_k"][-1]
                gradients[name] = jnp.where(covered[:, None, None], gradients[name], 0)
        if "bias" in gradients:
            gradients["bias"] = gradients["bias"].astype(by_name["bias"].dtype)
        return tuple(gradients.get(name, _no_gradient(by_name[name])) for name in names)

    attend.defvjp(forward, backward)
    out, lse = attend(*arrays.values())
    if "cu_seqlens_q" in arrays:  # XLA's results start as anything, and rows behind the last sequence stay it
        covered = jnp.arange(out.shape[0]) < arrays["cu_seqlens_q"][-1]
        out, lse = jnp.where(covered[:, None, None], out, 0), jnp.where(covered, lse, -jnp.inf)
    return (out, jax.lax.stop_gradient(lse)) if _flag("return_lse", return_lse) else out


def _no_gradient(array):
    if jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.zeros_like(array)
    return np.zeros(array.shape, jax.dtypes.float0)


def _ffi(target: str, results, inputs, text: str):
    _register()
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*inputs, call=text)


def _call(views: dict[str, View], options: dict[str, Any]):
    """AttentionArgs and views for named arrays; the third is what only a backward call has."""
    extra = {name: views.pop(name) for name in ("out", "lse", "dout") if name in views}
    lengths = tuple(
        views.pop(name, None) if name in views else options.pop(name, None)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    )
    options["window_size"] = tuple(options["window_size"])
    args, all_views = _prepare(varlen=None if lengths[0] is None else lengths, **views, **options)
    return args, all_views, extra


def _shape_view(aval) -> View:
    return View(None, _FRAME, None, tuple(aval.shape), _contiguous(aval.shape), str(aval.dtype), CPU, 0, True)


def _contiguous(shape) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


# ---- XLA's call frame (xla/ffi/api/c_api.h, version 0.1 and later) ----


class _Extension(ct.Structure):
    pass


_Extension._fields_ = [("size", ct.c_size_t), ("type", ct.c_int), ("next", ct.POINTER(_Extension))]
_BASE = [("size", ct.c_size_t), ("extension", ct.POINTER(_Extension))]


class _Version(ct.Structure):
    _fields_ = [*_BASE, ("major", ct.c_int), ("minor", ct.c_int)]


class _Metadata(ct.Structure):
    _fields_ = [("size", ct.c_size_t), ("version", _Version), ("traits", ct.c_uint32)]


class _MetadataExtension(ct.Structure):
    _fields_ = [("base", _Extension), ("metadata", ct.POINTER(_Metadata))]


class _Buffer(ct.Structure):
    _fields_ = [
        *_BASE, ("dtype", ct.c_int), ("data", ct.c_void_p), ("rank", ct.c_int64), ("dims", ct.POINTER(ct.c_int64))
    ]  # fmt: skip


class _List(ct.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = [*_BASE, ("count", ct.c_int64), ("types", ct.c_void_p), ("items", ct.POINTER(ct.POINTER(_Buffer)))]


class _Span(ct.Structure):
    _fields_ = [("text", ct.c_void_p), ("length", ct.c_size_t)]


class _Attributes(ct.Structure):
    _fields_ = [
        *_BASE, ("count", ct.c_int64), ("types", ct.c_void_p), ("names", ct.c_void_p),
        ("values", ct.POINTER(ct.POINTER(_Span))),
    ]  # fmt: skip


class _ErrorArgs(ct.Structure):
    _fields_ = [*_BASE, ("message", ct.c_char_p), ("code", ct.c_int)]


class _StreamArgs(ct.Structure):
    _fields_ = [*_BASE, ("context", ct.c_void_p), ("stream", ct.c_void_p)]


class _AllocateArgs(ct.Structure):
    _fields_ = [
        *_BASE, ("context", ct.c_void_p), ("bytes", ct.c_size_t), ("alignment", ct.c_size_t), ("data", ct.c_void_p)
    ]  # fmt: skip


class _FreeArgs(ct.Structure):
    _fields_ = [*_BASE, ("context", ct.c_void_p), ("bytes", ct.c_size_t), ("data", ct.c_void_p)]


_Asked = ct.CFUNCTYPE(ct.c_void_p, ct.c_void_p)


class _Api(ct.Structure):
    _fields_ = [
        *_BASE, ("version", _Version), ("internal", ct.c_void_p), ("error_create", _Asked),
        ("error_message", ct.c_void_p), ("error_destroy", ct.c_void_p), ("handler_register", ct.c_void_p),
        ("stream_get", _Asked), ("type_register", ct.c_void_p), ("context_get", ct.c_void_p),
        ("state_set", ct.c_void_p), ("state_get", ct.c_void_p), ("memory_allocate", _Asked), ("memory_free", _Asked),
    ]  # fmt: skip


class _Frame(ct.Structure):
    _fields_ = [
        *_BASE, ("api", ct.POINTER(_Api)), ("context", ct.c_void_p), ("stage", ct.c_int), ("args", _List),
        ("results", _List), ("attributes", _Attributes),
    ]  # fmt: skip


_METADATA, _EXECUTE = 1, 3
_INVALID_ARGUMENT, _INTERNAL = 3, 13
_DTYPES = {1: "bool", 4: "int32", 5: "int64", 6: "uint8", 10: "float16", 11: "float32", 12: "float64", 16: "bfloat16"}


class _FrameDoor(Door):
    """Arrays that are buffers of a call frame; a view's owner is the frame."""

    name = "XLA"

    def empty(self, like, shape, dtype):
        """Workspace on a GPU, given back when the handler returns: XLA's allocator hands it to nobody but work queued
        behind ours on the same stream."""
        frame: _Frame = like.owner
        ask = _AllocateArgs(size=ct.sizeof(_AllocateArgs), context=frame.context, bytes=shape[0], alignment=16)
        if frame.api[0].memory_allocate(ct.addressof(ask)):
            raise MemoryError(f"XLA has no {shape[0]} bytes for the workspace")
        frame.scratch = [*getattr(frame, "scratch", ()), (ask.data, shape[0])]
        return View(frame, self, ask.data, shape, (1,), dtype, like.device, like.index, True)

    def stream(self, views):
        frame: _Frame = views[0].owner
        ask = _StreamArgs(size=ct.sizeof(_StreamArgs), context=frame.context)
        if frame.api[0].stream_get(ct.addressof(ask)):
            raise RuntimeError("XLA has no stream for this call")
        return ask.stream

    def view(self, array, name):
        return array


_FRAME = _FrameDoor()
_arrays._doors[View] = _FRAME  # a view is taken as it is


def _views(frame: _Frame, items: _List, device: int) -> list[View]:
    found = []
    for i in range(items.count):
        buffer = items.items[i][0]
        shape = tuple(buffer.dims[: buffer.rank])
        dtype = _DTYPES.get(buffer.dtype, f"XLA type {buffer.dtype}")
        found.append(View(frame, _FRAME, buffer.data, shape, _contiguous(shape), dtype, device, 0, True))
    return found


@functools.lru_cache(maxsize=1024)
def _parse(text: bytes) -> tuple[tuple[str, ...], dict[str, Any]]:
    call = json.loads(text)
    return tuple(call["names"]), call["options"]


def _forward(named, options, results):
    args, views, _ = _call(named, options)
    out, lse = results
    _put_tensor(args, "out", out)
    args.lse = lse.pointer
    _launch(args, views)


def _backward(named, options, results):
    args, views, extra = _call(named, options)
    _put_tensor(args, "out", extra["out"])
    args.lse = extra["lse"].pointer
    call = AttentionBackwardArgs(struct_size=ct.sizeof(AttentionBackwardArgs), forward=ct.pointer(args))
    _put_tensor(call, "dout", extra["dout"])
    dq, dk, dv, *rest = results
    for name, view in (("dq", dq), ("dk", dk), ("dv", dv)):
        _put_tensor(call, name, view)
    if args.bias_data:
        _put_dbias(call, rest.pop(0))
    if args.sinks:
        call.dsinks = rest.pop(0).pointer
    _launch_backward(call, args, views)


def _handler(run, device: int):
    """An XLA_FFI_Handler for one pass on one device. It returns NULL or an error of XLA's making; Python's exceptions
    end here."""

    @_Asked
    def handle(address):
        frame = _Frame.from_address(address)
        try:
            extension = frame.extension
            while extension:
                if extension[0].type == _METADATA:  # XLA asks which version of the interface this was written for
                    metadata = ct.cast(extension, ct.POINTER(_MetadataExtension))[0].metadata[0]
                    metadata.version.major, metadata.version.minor, metadata.traits = 0, 1, 0
                    return None
                extension = extension[0].next
            if frame.stage != _EXECUTE:
                return None
            span = frame.attributes.values[0][0]
            names, options = _parse(ct.string_at(span.text, span.length))
            inputs = _views(frame, frame.args, device)
            run(dict(zip(names, inputs, strict=True)), dict(options), _views(frame, frame.results, device))
            return None
        except BaseException as error:
            code = _INVALID_ARGUMENT if isinstance(error, FlashAttnError) else _INTERNAL
            text = f"{type(error).__name__}: {error}".encode()
            told = _ErrorArgs(size=ct.sizeof(_ErrorArgs), message=text, code=code)  # alive until XLA has read it
            return frame.api[0].error_create(ct.addressof(told))
        finally:
            for data, size in getattr(frame, "scratch", ()):
                give = _FreeArgs(size=ct.sizeof(_FreeArgs), context=frame.context, bytes=size, data=data)
                frame.api[0].memory_free(ct.addressof(give))

    return handle


@functools.cache
def _register() -> list:
    """Tells XLA about the handlers, once; they live as long as the process."""
    handlers = []
    for name, run in (("forward", _forward), ("backward", _backward)):
        for platform, device in (("cpu", CPU), ("CUDA", CUDA)):
            handler = _handler(run, device)
            handlers.append(handler)
            capsule = jax.ffi.pycapsule(handler)
            jax.ffi.register_ffi_target(f"flash_attn_minimal_{name}", capsule, platform=platform)
    return handlers
