"""This library as the flash backend of torch.nn.functional.scaled_dot_product_attention, for the whole process.

PyTorch chooses a backend for each call, and calls an operator of aten for it. Here these operators get this library's
implementation. Autograd, autocast and torch.compile work above them, and go on as before. A call that the library does
not serve goes to the implementation that was there before, and a warning says why, once for each reason."""

from __future__ import annotations

import collections
import contextlib
import itertools
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._arrays import torch_modes
from ..attention import flash_attn_func, flash_attn_varlen_func
from ..backward import backward
from ..errors import BadArgument, Unsupported
from ._inputs import dense_rows

NAME = "flash_attn_minimal"  # among torch.nn.attention.list_flash_attention_impls()


def activate() -> contextlib.AbstractContextManager[None]:
    """Makes this library the flash backend of scaled_dot_product_attention, for all threads of the process.

    It stays until torch.nn.attention.restore_flash_attention_impl(), or until the end of a `with` around the result,
    which brings back what was active before. Such blocks may overlap: the last to end does that.
    torch.nn.attention.activate_flash_attention_impl("flash_attn_minimal") does the same, once this package is imported.

    Served are calls for which PyTorch chooses its flash backend: torch.nn.attention.sdpa_kernel still decides. Where
    PyTorch prefers cuDNN (Hopper and later), flash comes first while the library is active. An order that sdpa_kernel
    sets (set_priority) belongs inside such a block. On the CPU these are calls without dropout, in float32, float16 or
    bfloat16, with a mask if it needs no gradient. On a GPU they are calls in float16 or bfloat16 without mask and
    dropout, and packed sequences (varlen_attn, jagged tensors). A call that PyTorch's own implementation answers says
    why in a warning, once for each reason.

    >>> import torch
    >>> from flash_attn_minimal.torch import activate
    >>> q, k, v = torch.randn(3, 1, 2, 5, 16)
    >>> with activate():
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-6)
    True
    """
    with _lock:
        block = _Block(_current())
        if block.before != NAME:
            _activate(NAME)
        _blocks[block.number] = block
    return block


class _Block(contextlib.AbstractContextManager):
    """A `with` block, or a call without one. Blocks of threads may overlap, and end in any order."""

    def __init__(self, before: str | None):
        self.before = before  # what its end brings back, if no later block is open
        self.number = next(_numbers)

    def __enter__(self) -> None:
        if self.number not in _blocks:
            raise RuntimeError("this block of activate has ended: call activate() again")

    def __exit__(self, *_: object) -> None:
        with _lock:
            del _blocks[self.number]
            later = [block for number, block in _blocks.items() if number > self.number]
            if later:
                later[0].before = self.before
            elif self.before is None:
                _restore()
            elif self.before != _current():
                _activate(self.before)


_lock = threading.RLock()  # reentrant, because a garbage collector may run code of the user anywhere
_numbers = itertools.count()
_blocks: weakref.WeakValueDictionary[int, _Block] = weakref.WeakValueDictionary()  # open ones, the oldest first


# ---- PyTorch's registry. A release may lack its functions ----


def _current() -> str | None:
    find = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return find() if find else NAME if _installed else None


def _activate(name: str) -> None:
    choose = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    choose(name) if choose else _install()


def _restore() -> None:
    restore = getattr(torch.nn.attention, "restore_flash_attention_impl", None)
    if restore and _current() is not None:  # PyTorch warns if there is nothing to restore
        restore()
    for handle in list(_installed):
        handle.remove()


class _Handle:
    """Keeps the operators replaced. PyTorch's registry holds it, and removes it."""

    def __init__(self, library: torch.library.Library):
        self.library, self.kernels, self.orders = library, [], None

    def remove(self) -> None:
        _installed.discard(self)
        if self.orders and torch._C._get_sdp_priority_order() == self.orders[1]:
            torch._C._set_sdp_priority_order(self.orders[0])
        _ended.append(self.kernels)
        self.library._destroy()

    def put_flash_first(self) -> None:
        if self not in _installed:
            return
        if torch.cuda.is_available():
            # PyTorch sets its own order at the first call on a GPU, which must not come later.
            with contextlib.suppress(Exception):
                x = torch.zeros(1, 1, 64, 64, device="cuda", dtype=torch.float16)
                torch._fused_sdp_choice(x, x, x)
        flash, before = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION), torch._C._get_sdp_priority_order()
        self.orders = before, [flash, *(backend for backend in before if backend != flash)]
        torch._C._set_sdp_priority_order(self.orders[1])


_installed: set[_Handle] = set()
# A thread that is inside PyTorch may have looked up an operator and be on its way to it while a block ends.
_ended: collections.deque = collections.deque(maxlen=1000)


def _install() -> _Handle:
    if not hasattr(torch.library, "get_kernel"):
        raise Unsupported(f"PyTorch {torch.__version__} has no torch.library.get_kernel, which activate needs")
    for handle in list(_installed):  # one at a time: what is replaced is PyTorch's own
        handle.remove()
    handle = _Handle(torch.library.Library("aten", "IMPL"))
    _installed.add(handle)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that they are replaced
            for key, operators in _OPERATORS.items():
                if key == "CUDA" and not torch.backends.cuda.is_built():
                    continue
                for name, run in operators.items():
                    original = torch.library.get_kernel(f"aten::{name}", key)
                    handle.library.impl(name, _or_original(name, run, original), key, with_keyset=True)
                    handle.kernels.append(torch.library.get_kernel(f"aten::{name}", key))
        if hasattr(torch._C, "_set_sdp_priority_order"):  # with a GPU as soon as CUDA has started
            later = torch.cuda._lazy_call if torch.cuda.is_available() else lambda run: run()
            later(handle.put_flash_first)
    except BaseException:
        handle.remove()
        raise
    return handle


_said: set[str] = set()


def _or_original(name: str, run: Callable, original: Any) -> Callable:
    def served(keyset, *args, **kwargs):
        try:
            with torch.no_grad(), torch_modes.unwatched():  # the body of an operator: modes have seen the operator
                return run(*args, **kwargs)
        except (BadArgument, Unsupported) as error:
            if (reason := re.sub(r"\d+", "#", f"{name}: {error}")) not in _said:
                _said.add(reason)
                warnings.warn(f"PyTorch's own attention answers aten::{name}: {error}", stacklevel=2)
        return original.call_boxed(keyset, *args, **kwargs)

    return torch_modes.uncompiled(served)


# ---- attention of (batch, rows, heads, dim), or with varlen of (total, heads, dim) ----


def _forward(q, k, v, varlen: tuple | None, out: torch.Tensor, **options: Any) -> torch.Tensor:
    """Writes out, and returns lse."""
    place = out if out.stride(-1) == 1 else None
    run, lengths = (flash_attn_func, ()) if varlen is None else (flash_attn_varlen_func, varlen)
    result, lse = run(*dense_rows(q, k, v), *lengths, return_lse=True, out=place, **options)
    if place is None:
        out.copy_(result)
    return lse


def _gradients(dout, q, k, v, out, lse, varlen: tuple | None, grads: list[torch.Tensor], **options: Any) -> None:
    """Writes dq, dk and dv."""
    dout, q, k, v, out = dense_rows(dout, q, k, v, out)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    options |= dict(zip(names, varlen or (), strict=False))
    places = {name: x if x.stride(-1) == 1 else None for name, x in zip(("dq", "dk", "dv"), grads, strict=True)}
    results = backward(dout, q, k, v, out, lse.contiguous(), **places, **options)
    for gradient, place, result in zip(grads, places.values(), results, strict=True):
        if place is None:
            gradient.copy_(result)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise Unsupported(f"dropout_p={dropout_p}: PyTorch draws its random numbers in its own kernel")


# ---- the CPU: causal hangs from the top left corner, and a mask is added to the scores ----


def _cpu_options(query, key, is_causal, attn_mask, scale) -> dict[str, Any]:
    (bias,) = dense_rows(attn_mask)
    top_left = bool(is_causal) and query.shape[2] != key.shape[2]
    return {"causal": bool(is_causal), "top_left": top_left, "bias": bias, "softmax_scale": scale}


def _cpu_forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    _refuse_dropout(dropout_p)
    out = torch.empty_like(query)
    options = _cpu_options(query, key, is_causal, attn_mask, scale)
    lse = _forward(*_rows(query, key, value), None, out.transpose(1, 2), **options)
    batch, heads, rows = lse.shape
    if heads > 1 and rows > 1:  # the strides that compiled code expects
        lse = lse.new_empty(batch, rows, heads).transpose(1, 2).copy_(lse)
    if attn_mask is not None:  # PyTorch's backward pass, which a call may get after a block, wants no infinity
        lse.masked_fill_(lse == -torch.inf, 0)  # rows that see no key
    return out, lse


def _cpu_backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    _refuse_dropout(dropout_p)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _rows(query, key, value)]
    options = _cpu_options(query, key, is_causal, attn_mask, scale)
    _gradients(*_rows(grad_out, query, key, value, out), logsumexp, None, grads, **options)
    return tuple(_rows(*grads))


# ---- a GPU ----


def _cuda_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    longest, out = (query.shape[2], key.shape[2]), torch.empty_like(query)
    options = {"scale": scale, "out": out.transpose(1, 2)}
    arrays = _rows(query, key, value)
    _, *rest = _attend(*arrays, None, None, *longest, dropout_p, is_causal, return_debug_mask, **options)
    return out, rest[0], None, None, *longest, *rest[1:]


def _cuda_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    philox_seed, philox_offset, *, scale=None,
):  # fmt: skip
    arrays = *_rows(grad_out, query, key, value, out), logsumexp
    grads = _attend_backward(*arrays, None, None, max_q, max_k, dropout_p, is_causal, None, None, scale=scale)
    return tuple(_rows(*grads))


def _attend(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None, out=None,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    if return_debug_mask or seqused_k is not None or block_table is not None:
        raise Unsupported("return_debug_mask, seqused_k or block_table is given")
    out = torch.empty_like(query) if out is None else out
    lse = _forward(
        query, key, value, _varlen(cum_seq_q, cum_seq_k, max_q, max_k), out, causal=bool(is_causal),
        softmax_scale=scale, window_size=_window(window_size_left, window_size_right), alibi_slopes=alibi_slopes,
    )  # fmt: skip
    # The state of random numbers that are never drawn, which a launch each would set to zero; and no debug mask.
    seed, offset = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
    return out, lse, seed, offset, query.new_empty(0)


def _attend_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    _refuse_dropout(dropout_p)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    _gradients(
        grad_out, query, key, value, out, logsumexp, _varlen(cum_seq_q, cum_seq_k, max_q, max_k), grads,
        causal=bool(is_causal), softmax_scale=scale, window_size=_window(window_size_left, window_size_right),
    )  # fmt: skip
    return tuple(grads)


def _varlen(cum_seq_q, cum_seq_k, max_q: int, max_k: int) -> tuple | None:
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise Unsupported("only one of cum_seq_q and cum_seq_k is given")
    return None if cum_seq_q is None else (cum_seq_q, cum_seq_k, max_q, max_k)


def _window(left: int | None, right: int | None) -> tuple[int, int]:
    return tuple(-1 if edge is None or edge < 0 else edge for edge in (left, right))  # type: ignore[return-value]


_OPERATORS: dict[str, dict[str, Callable]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": _cuda_forward,
        "_scaled_dot_product_flash_attention_backward": _cuda_backward,
        "_flash_attention_forward": _attend,
        "_flash_attention_backward": _attend_backward,
    },
}

if _register := getattr(torch.nn.attention, "register_flash_attention_impl", None):
    _register(NAME, register_fn=_install)
