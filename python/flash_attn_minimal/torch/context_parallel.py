"""Context parallelism for PyTorch: attention of a rank's rows as an operator with gradients.

    out = context_parallel_attention(q, k, v, causal=True)        # the ranks are those of torch.distributed

The operators flash_attn_minimal::context_parallel and ::context_parallel_backward make the calls `forward` and
`backward`. They refer to a group by its name, so that traces and graphs can hold them.

The order of calls: every rank must make the same calls in the same order, forward and backward. Autograd goes through
equal graphs in equal order, and activation checkpointing repeats calls in equal order, so a program that is the same on
every rank meets this rule. A rank whose loss depends on none of its rows makes no backward call, and the others wait
for it until the timeout; let it add 0 * out.sum(). Autograd runs the calls of a GPU on a separate thread, one for each
GPU: ranks that are threads and share a GPU need torch.autograd.set_multithreading_enabled(False).

Gradients of arrays that all ranks share (sinks, a bias broadcast along an axis) are this rank's share, as for every
other weight: the sum over the ranks is the gradient.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .._arrays import torch_modes
from .._core.checks import flag, integer, one_of, quoted
from .._core.options import Options, Unpack
from ..distributed import calls
from ..distributed import groups as _groups
from ..distributed._structs import LAYOUTS, MODES
from ..distributed.groups import Group, from_torch
from ..errors import BadArgument, Unsupported
from . import _operators as operators
from ._operators import ARRAYS, OPTION_ARRAYS, OUTSIDE_CUDA_GRAPHS, Operators, packed, unpacked

_TIMEOUT = 600.0  # seconds: ranks may save checkpoints or compile at different times. A dead process is noticed at once


# ---- groups ----

# (process group's name, device) -> (a weak reference to the process group, its Group).
_made: dict[tuple[str, str], tuple[Any, Group]] = {}
_making = threading.RLock()  # reentrant, because a garbage collector may run close_groups anywhere


def _forget_groups() -> None:
    """In the child of a fork the groups are the parent's, and another thread may have held the lock."""
    global _making
    _making = threading.RLock()
    _made.clear()


os.register_at_fork(after_in_child=_forget_groups)


def group_of(process_group: Any = None, device: Any = "cpu") -> Group:
    """The Group of a torch.distributed process group (None: the default one) for tensors on `device`. The first call
    for a process group makes the Group and is collective. It is kept until close_groups or the end of the process."""
    name = _name_of(process_group)
    if name in _groups.named:
        raise BadArgument(f"process_group={process_group} is a Group already")
    return _group(name, torch.device(device))


def close_groups() -> None:
    """Closes the groups that were made for process groups. Collective. The end of the process does this too."""
    with _making:
        closing = [group for _, group in _made.values()]
        _made.clear()
    for group in closing:
        group.close()


def _at_exit() -> None:
    """Closes the groups. A rank that ends with an exception first tells the others, so that nobody waits."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is not None:
        for _, group in list(_made.values()):
            group.abort(f"rank {group.rank} ended with {type(error).__name__}: {error}")
    close_groups()


def _name_of(group: Any) -> str:
    """The name by which the operators refer to a group: "" is the default process group."""
    if group is None:
        return ""
    if isinstance(group, Group):
        return group.name
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return group.group_name
    if dist.is_available() and isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise BadArgument(f"group={group} has {group.ndim} dimensions: choose one, mesh['name']")
        return group.get_group().group_name
    raise BadArgument(f"group={quoted(group)} is neither a Group nor a process group of torch.distributed")


def _group(name: str, device: torch.device) -> Group:
    """The group of this name; the Group of a process group is made at the first call."""
    if (group := _groups.named.get(name)) is not None:
        return group
    if not (dist.is_available() and dist.is_initialized()):
        raise BadArgument("group=None, but torch.distributed has no default process group: init_process_group makes it")
    process_group = dist.distributed_c10d._resolve_process_group(name) if name else dist.group.WORLD
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = process_group.group_name, str(device)
    with _making:
        found = _made.get(key)
        if found is None or found[0]() is not process_group:
            if not _made:
                atexit.unregister(_at_exit)
                atexit.register(_at_exit)  # registered after PyTorch's handlers, so it runs before them
            if found is not None:  # its process group was destroyed, on all ranks
                found[1].close()
            found = _made[key] = weakref.ref(process_group), from_torch(process_group, device, _TIMEOUT)
    return found[1]


# ---- attention ----


@calls.shows_options
def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any = None,
    return_lse: bool = False,
    **options: Unpack[calls.RankOptions],
) -> Any:
    """This rank's rows of attention over the tokens of all ranks: `forward` with gradients of q, k, v, bias and sinks,
    through out and lse. Collective, as is its backward pass: see the top of this module.

    It runs under torch.compile (fullgraph; the graph holds one operator), activation checkpointing and autocast, but
    not in a CUDA graph. If torch.compile finds an error in an argument, the other ranks notice only after the timeout.

    Arguments:
        q, k, v: this rank's rows, (batch, rows, heads, dim), or (rows, heads, dim) with cu_seqlens_q: see `forward`.
        group: a Group, or a process group or one-dimensional DeviceMesh of torch.distributed; None means the default
            process group. The Group for processes of one host is made at the first call (group_of); processes of
            several hosts need from_torch(kind="nccl").
        cu_seqlens_q, cu_seqlens_k: for the whole sequences, in host memory. With a CPU tensor of int32, compiled code
            takes new lengths without being compiled again.
        layout, mode, groups, seqlen_q, seqlen_k, return_lse: as in `forward`. lse is (nheads, rows).
        options: those of flash_attn_func except float8's, the same on every rank. dropout_p needs dropout_seed, the
            same on every rank, and drops the elements that one device would drop.

    Raises: as `forward`. Transforms of torch.func, forward mode and double backward are Unsupported.
    """
    name = _name_of(group)
    try:
        where, chosen = calls.split_options("context_parallel_attention", options)
        arguments = _arguments(q, k, v, where, chosen, name)
        return_lse = flag("return_lse", return_lse)
    except Exception as error:
        if not torch.compiler.is_compiling():
            _tell(name, q, error)
        raise
    out, lse = _forward_op(*arguments)
    return (out, lse) if return_lse else out


def _tell(name: str, like: Any, error: Exception) -> None:
    """Reports an error to the other ranks, which are about to wait for this one."""

    def fail() -> Any:
        raise error

    if isinstance(like, torch.Tensor):
        with suppress(Exception):  # `error` is raised by the caller
            _group(name, like.device).collective(fail)


def _arguments(q, k, v, where: dict[str, Any], options: Options, name: str) -> list:
    """The arguments of the operator."""
    calls.refuse_unserved(options)
    given = {"q": q, "k": k, "v": v, **{array: getattr(options, array) for array in OPTION_ARRAYS}}
    for array in "qkv":
        if not isinstance(given[array], torch.Tensor):
            raise BadArgument(f"{array} is a {type(given[array]).__name__}: expected a torch.Tensor")
    operators.check_arrays(given)
    if torch_modes.transforms():
        raise Unsupported("attention across ranks is not served under a transform of torch.func")
    if not torch.compiler.is_compiling():
        operators.refuse_tangents({array: x for array, x in given.items() if x is not None})
    for what, names in (("layout", LAYOUTS), ("mode", MODES)):
        one_of(what, where[what], names)
    for what in ("cu_seqlens_q", "cu_seqlens_k"):
        where[what] = _host(what, where[what])
    for what in ("seqlen_q", "seqlen_k"):
        where[what] = None if where[what] is None else integer(what, where[what], 0, 2**31 - 1)
    where["groups"] = integer("groups", where["groups"], -(2**31), 2**31 - 1)
    return [*given.values(), *where.values(), name, *packed(options)]


def _host(name: str, cu_seqlens: Any) -> torch.Tensor | None:
    """Checks lengths; returns them as a tensor in host memory."""
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, torch.Tensor):
        try:
            cu_seqlens = torch.tensor(cu_seqlens, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise BadArgument(f"{name}={quoted(cu_seqlens)} is no sequence of integers in host memory") from None
    if cu_seqlens.device.type != "cpu":
        raise BadArgument(f"{name} is on {cu_seqlens.device}: the hosts read it, so it has to be in host memory")
    return cu_seqlens


def _call(arguments: tuple) -> tuple[Group, tuple, dict[str, Any]]:
    """The arguments of `forward` and `backward` from those of the operator: the group, (q, k, v), the rest."""
    first = len(ARRAYS) - 2  # cu_seqlens_q, the first of calls.WHERE
    name = first + len(calls.WHERE)
    q, k, v, *scores = arguments[:first]
    options = unpacked(tuple(scores), arguments[name + 1 :])._asdict()
    options |= zip(calls.WHERE, arguments[first:name], strict=True)
    return _group(arguments[name], q.device), (q, k, v), options


def _forward(*arguments):
    group, qkv, rest = _call(arguments)
    with torch.no_grad(), torch_modes.unwatched():
        return calls.forward(group, *qkv, return_lse=True, **rest)


def _backward(dout, dlse, out, lse, want_dbias, want_dsinks, *arguments):
    """dq, dk, dv, dbias, dsinks; the last two in the dtype of their inputs, empty where not wanted."""
    group, qkv, rest = _call(arguments)
    rest["kernel"] = None  # it names a forward kernel; $FLASH_ATTN_BACKWARD_KERNEL is for this pass
    with torch.no_grad(), torch_modes.unwatched():
        dq, dk, dv, *more = calls.backward(
            group, dout.contiguous(), *qkv, out, lse, dlse=None if dlse is None else dlse.contiguous(),
            return_dbias=want_dbias, return_dsinks=want_dsinks, **rest,
        )  # fmt: skip
        dbias = more.pop(0).to(rest["bias"].dtype) if want_dbias else dout.new_empty(0)
        dsinks = more.pop(0) / group.size if want_dsinks else dout.new_empty(0)  # this rank's share of the sum
    return dq, dk, dv, dbias, dsinks


def _fake(q, k, v, *rest):
    for name, x in (("q", q), ("k", k), ("v", v)):
        calls.check_axes(name, x, q)
    operators.check_together((q, k, v, *rest[: len(OPTION_ARRAYS)]))
    rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    return q.new_empty((*q.shape[:-1], v.shape[-1])), q.new_empty((q.shape[-2], rows), dtype=torch.float32)


_WHERE = "SymInt? seqlen_q, SymInt? seqlen_k, str layout, str mode, int groups, str group"
# The hosts wait for each other in a call, so a CUDA graph cannot hold it.
_forward_op = Operators("context_parallel", _WHERE, _forward, _backward, _fake, tags=OUTSIDE_CUDA_GRAPHS).forward


# ---- PyTorch's own context parallelism ----


def context_parallel_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: Any = None,
    layout: str | None = None,
    mode: str = "auto",
    dropout_seed: int | None = None,
    dropout_offset: int = 0,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention for a rank's rows, as torch.distributed.tensor.experimental.
    context_parallel has cut them: query, key and value are (batch, heads, rows, dim). Collective.

    Arguments:
        query ... enable_gqa: as in PyTorch. A causal mask hangs from the top left corner. attn_mask, which PyTorch's
            own context parallelism does not take, has this rank's rows and all columns, in the order of the sequence:
            cut it as a buffer along its rows only.
        group: as in context_parallel_attention, for instance the mesh given to PyTorch's context manager.
        layout: None is PyTorch's own: head and tail chunks ("zigzag") where the length is a multiple of twice the
            number of ranks and PyTorch's load balance is on, else "contiguous".
        dropout_seed, dropout_offset: with dropout_p; PyTorch's random state is not used.

    Not supported:
        - Lengths that the number of ranks does not divide. PyTorch gives the last ranks fewer rows, and cannot attend
          to them either. Use context_parallel_attention with `shard`.
        - PyTorch's other load balancers, made for flex_attention. Documents with head and tail chunks each are packed
          sequences: use context_parallel_attention with cu_seqlens_q. Cuts in the order of work have no layout.
        - DTensors: pass the local tensors.
    """
    name = _name_of(group)
    try:
        for array, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, torch.Tensor) or x.dim() != 4:
                got = f"has shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
                raise BadArgument(f"{array} {got}: expected a tensor (batch, heads, rows, dim)")
        if attn_mask is not None and is_causal:
            raise BadArgument("is_causal=True with attn_mask: PyTorch takes one of them")
        if not enable_gqa and query.shape[1] != key.shape[1]:
            raise BadArgument(f"query has {query.shape[1]} heads, key {key.shape[1]}: that needs enable_gqa=True")
        layout = _torch_layout(query.shape[2], key.shape[2]) if layout is None else layout
    except Exception as error:
        if not torch.compiler.is_compiling():
            _tell(name, query, error)
        raise
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    out = context_parallel_attention(
        *(x.transpose(1, 2).contiguous() for x in (query, key, value)),  # usually views of such memory: no copy
        group=group, layout=layout, mode=mode, causal=is_causal, top_left=True, softmax_scale=scale,
        mask=attn_mask if boolean else None, bias=None if boolean else attn_mask, dropout_p=dropout_p,
        dropout_seed=dropout_seed, dropout_offset=dropout_offset,
    )  # fmt: skip
    return out.transpose(1, 2)


def _torch_layout(rows_q: int, rows_k: int) -> str:
    """The layout in which PyTorch's context_parallel cuts a sequence of which each rank has this many rows."""
    if rows_q % 2 != rows_k % 2:
        raise BadArgument(f"query has {rows_q} rows, key {rows_k}: PyTorch cuts them differently; choose a layout")
    # PyTorch's switches, if the release has them; its context manager turns load balance off for odd rows.
    options = getattr(sys.modules.get("torch.distributed.tensor.experimental._attention"), "_cp_options", None)
    return "zigzag" if rows_k % 2 == 0 and getattr(options, "enable_load_balance", True) else "contiguous"


@contextmanager
def sdpa_across_ranks(group: Any = None, **options: Any) -> Iterator[None]:
    """Inside, torch.nn.functional.scaled_dot_product_attention is context_parallel_sdpa, with these options added to
    the call's. For code written for PyTorch's context parallelism:

        with context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]), sdpa_across_ranks(mesh):
            loss = model(x, labels)

    Like PyTorch's own context manager, it replaces the function in its module, for every thread. Code that has imported
    the function by name keeps the original.
    """
    before = F.scaled_dot_product_attention

    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return context_parallel_sdpa(*args, **kwargs, **({"group": group} | options))

    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
