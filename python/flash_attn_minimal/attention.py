"""Exact attention with memory linear in the sequence length: flash_attn_func, flash_attn_varlen_func, merge, query.

The algorithm is FlashAttention (Dao et al. 2022, section 3.1: tiling and the online softmax) in the loop order of
FlashAttention-2 (Dao 2023, section 3.1: queries outside, normalisation delayed to the end). Names and layout are those
of the flash-attn package.

Every function is thread-safe: calls share a scratch buffer that belongs to the calling thread, and a table of earlier
calls (see _core/repeats.py) whose entries never change.
"""

from __future__ import annotations

from typing import Literal, overload

from . import _arrays
from ._arrays import torch_modes
from ._core import checks, frameworks, recordings, statistics
from ._core.fields import _empty, _put_dense, _put_tensor
from ._core.forward import QKV, QKV_VARLEN, attend, joined, repeats
from ._core.frameworks import is_traced, traceable
from ._core.library import KERNEL_TABLES, load
from ._core.options import (
    AnyArray,
    Array,
    AttentionOptions,
    KeywordOptions,
    Options,
    PositionalOptions,
    Unpack,
    _lengths,
    _options_of,
    _output,
    _prepare,
    with_signature,
)
from ._core.queries import Plan, kernel_table, plan_of
from ._core.structs import DTYPES, MergeArgs, QuantizeArgs, new
from .errors import BadArgument, Unsupported


class _KeywordCall(KeywordOptions, total=False):
    """For type checkers: the keyword-only arguments of a call that returns one array."""

    out: AnyArray | None


class _Call(PositionalOptions, _KeywordCall, total=False):
    """For type checkers: the other arguments of a call, by keyword."""


class _CallWithLse(_Call, total=False):
    return_lse: bool


class _CallWithSums(_CallWithLse, total=False):
    return_key_sums: bool


@overload
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: AnyArray | None = ...,
    deterministic: bool = ...,
    return_lse: Literal[False] = ...,
    **options: Unpack[_KeywordCall],
) -> Array: ...
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, return_lse: Literal[True], **options: Unpack[_Call]
) -> tuple[Array, Array]: ...
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, return_softmax_lse: Literal[True], **options: Unpack[_Call]
) -> tuple[Array, Array]: ...
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, return_lse: bool, **options: Unpack[_Call]
) -> Array | tuple[Array, Array]: ...
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, return_max_score: Literal[True], **options: Unpack[_CallWithSums]
) -> tuple[Array, ...]: ...
@overload
def flash_attn_func(
    q: Array, k: Array, v: Array, *, return_key_sums: Literal[True], **options: Unpack[_CallWithLse]
) -> tuple[Array, ...]: ...
@with_signature(KeywordOptions)
def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = checks.OPEN,
    softcap: float = 0.0,
    alibi_slopes: AnyArray | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    return_softmax_lse: bool = False,
    return_max_score: bool = False,
    return_key_sums: bool = False,
    out: AnyArray | None = None,
    **options: Unpack[KeywordOptions],
) -> Array | tuple[Array, ...]:
    """out = softmax(softmax_scale * q k^T + ...) v, without the (seqlen_q, seqlen_k) matrix in memory.

    Arrays come from NumPy, PyTorch, CuPy, JAX, Numba, or anything with DLPack or __cuda_array_interface__; those of one
    call come from one framework and lie on one device. The result is of the caller's own type; on a GPU the work goes
    to the caller's current stream. (With JAX the call waits for its inputs and for its result.) PyTorch tensors that
    require a gradient get one (torch/), and so do JAX arrays under grad and jit (jax/); other callers use
    `backward`.

    Arguments:
        q: (batch, seqlen_q, nheads, headdim), float32, float16 or bfloat16. headdim and headdim_v from 1 to 512.
            On a Hopper GPU also float8_e4m3fn with its descale factors (quantize_fp8 makes both), for plain and causal
            attention with head dims that are multiples of 16 up to 256.
        k: (batch, seqlen_k, nheads_k, headdim), the same dtype. nheads is a multiple of nheads_k; head h of q reads
            head h // (nheads // nheads_k) of k and v.
        v: (batch, seqlen_k, nheads_k, headdim_v).
            Strides are free (a broadcast axis with stride 0 is fine), but the last axis must be contiguous.
        dropout_p: chance of dropping a probability, 0 <= p < 1, used as round(256 p) / 256. Needs dropout_seed.
        softmax_scale: factor on q k^T; None means headdim ** -0.5.
        causal: row i sees column j only if j <= i + seqlen_k - seqlen_q (bottom-right), or j <= i with top_left=True.
        window_size: (left, right): row i sees columns i' - left .. i' + right, i' being i aligned as above; -1 is open.
        softcap: s = softcap * tanh(s / softcap); 0 is off.
        alibi_slopes: (nheads,) or (batch, nheads), float32 or 16 bits: s -= slope * |i' - j|.
        deterministic: for flash-attn's signature; the forward pass is always bitwise reproducible.
        return_lse, return_softmax_lse: also return lse; two names of one option.
        return_max_score: also return max_score, the greatest score of each batch entry and head as the softmax gets it:
            after scale, softcap, ALiBi, bias, mask, causal and window, without sinks. It is -inf where no row sees a
            key. (Muon's QK-clip needs it.)
        return_key_sums: also return key_sums: for each key and each head of q, the sum over the rows of the key's
            probability before dropout. This costs a second pass over q and k. (H2O and SnapKV need it, summed over the
            heads of q that read one head of k.)
            Neither max_score nor key_sums has a gradient. PyTorch tensors can ask for them in plain calls, also in
            calls with gradients, but not under torch.compile, torch.func and modes; JAX arrays outside jit and grad.
        bias: added to the scores; broadcasts to (batch, nheads, seqlen_q, seqlen_k). Of q's dtype or float32. A last
            axis that is not contiguous, or that has one column for all keys, costs a copy with all columns.
        mask: bool or uint8, non-zero = attend; broadcasts the same way.
        startend_row_indices: a mask by intervals, int32, (batch, heads, seqlen_k, numbers): for each key the rows that
            do not see it. heads is 1, nheads_k or nheads, batch may be 1. Row i does not see the key if
                causal,     1 number:   i >= n[0]
                causal,     2 numbers:  n[0] <= i < n[1]
                not causal, 2 numbers:  i >= n[0] or i < n[1]
                not causal, 4 numbers:  n[0] <= i < n[1] or n[2] <= i < n[3]
            masks makes those of documents, shared prompts, trees and others. These are FlashMask's (arXiv 2410.01359).
            Parts that no row sees cost next to nothing where the kernel skips them (docs/masks.md).
        block_mask: block-sparse attention: bool or uint8, (batch, heads, blocks of rows, blocks of keys), non-zero =
            attend, for blocks of 64 or of 128. batch may be 1; heads is 1, nheads_k or nheads. The sizes of the blocks
            follow from the shape: seqlen_q and seqlen_k divided by 64 or by 128, rounded up. Hidden blocks are skipped
            like those of startend_row_indices.
        sinks: (nheads,), float32 or 16 bits: one more logit per head in every row's denominator. lse includes it.
        top_left: hang causal and window from the top-left corner instead of the bottom-right one.
        dropout_seed, dropout_offset: 64-bit integers that decide which probabilities are dropped, the same on every
            device.
        out: array for the result, (batch, seqlen_q, nheads, headdim_v), which is also returned.
        kernel: force a kernel by name (see kernels()); None means $FLASH_ATTN_KERNEL, else the best one.
        allow_tf32: float32 inputs may use tf32 tensor cores.
        num_threads: for the CPU backend; 0 means $FLASH_ATTN_NUM_THREADS, else one per core.
        q_descale, k_descale, v_descale: factors that the float8_e4m3fn values of q, k and v are multiplied by. Required
            for float8_e4m3fn and refused for other dtypes. float32, positive, broadcasting to (batch, nheads), (batch,
            nheads_k) and (batch, nheads_k).
        out_dtype: "bfloat16" or "float16" for float8_e4m3fn inputs, or such a dtype (torch.float16); None means q's
            dtype, or bfloat16 for float8_e4m3fn.
        fast_accum: with float8_e4m3fn inputs, P v may be summed over all keys in the tensor cores, which keep 14 bits
            of such sums. Faster beyond 1024 keys, but there a mean of v shrinks as keys are added, as in
            FlashAttention-3.
        attention_chunk: keys are divided into chunks of this many, and row i sees only the chunk that contains i', in
            addition to causal and window_size; 0 is off. (Llama 4 has such layers.)

    The order is: scale, softcap, ALiBi, bias, masks, causal and window, sinks, dropout.

    causal=True with seqlen_q = 2 and seqlen_k = 5, then with seqlen_q = 5 and seqlen_k = 2:

        bottom-right      top_left=True         bottom-right    top_left=True
        1 1 1 1 0         1 0 0 0 0             0 0             1 0
        1 1 1 1 1         1 1 0 0 0             0 0             1 1
                                                0 0             1 1
                                                1 0             1 1
                                                1 1             1 1

    A row that sees no key returns out = 0 and lse = -inf (with sinks, lse = the sink), never NaN. Keys and values that
    no row sees do not reach the output, whatever they hold.

    Returns:
        out (batch, seqlen_q, nheads, headdim_v) in q's dtype; with return_lse the pair (out, lse), lse (batch, nheads,
        seqlen_q) float32, the natural logarithm of each row's sum of exponentials. With return_max_score or
        return_key_sums a tuple of the requested results in the order out, lse, max_score (batch, nheads), key_sums
        (batch, nheads, seqlen_k), the last two float32.

    Raises:
        BadArgument (a ValueError): the text names the argument and quotes its value; a given `out` is untouched.
        Unsupported (a NotImplementedError): legal, but no kernel here serves it; the text says why.
        CudaError (a RuntimeError), OutOfMemory (a MemoryError). All of them are FlashAttnError.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_func
    >>> q = np.zeros((1, 2, 1, 8), np.float32)
    >>> k = np.zeros((1, 5, 1, 8), np.float32)
    >>> v = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)
    >>> flash_attn_func(q, k, v, causal=True).ravel()  # the means of 0 1 2 3 and of 0 1 2 3 4
    array([1.5, 2. ], dtype=float32)
    """
    if return_softmax_lse is not False:
        return_lse = checks.wants_lse(return_lse, return_softmax_lse)
    results = sign = None
    if return_max_score is return_key_sums is False:
        given, arrays, numbers = QKV, (q, k, v), ()
        values = return_lse, dropout_p, softmax_scale, causal, window_size, softcap, deterministic
        if alibi_slopes is not None:
            given, arrays = (*given, "alibi_slopes"), (*arrays, alibi_slopes)
        if options:
            given, arrays, values, numbers = joined(given, arrays, values, options)
        if out is not None:
            given, arrays = (*given, "out"), (*arrays, out)
        if values is not None:
            results, sign = repeats.find(given, arrays, values, window_size, numbers, True)
            if results is not None:
                return results
    chosen = _options_of(
        "flash_attn_func", options, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    more = statistics.wanted(return_lse, return_max_score, return_key_sums)
    return _route(q, k, v, None, out, return_lse, chosen, sign, more)


@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ..., window_size: tuple[int, int] = ...,
    softcap: float = ..., alibi_slopes: AnyArray | None = ..., deterministic: bool = ...,
    return_lse: Literal[False] = ..., **options: Unpack[_KeywordCall],
) -> Array: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: Literal[True], **options: Unpack[_Call],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int,
    *, return_softmax_lse: Literal[True], **options: Unpack[_Call],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int,
    *, return_lse: bool, **options: Unpack[_Call],
) -> Array | tuple[Array, Array]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int,
    *, return_max_score: Literal[True], **options: Unpack[_CallWithSums],
) -> tuple[Array, ...]: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Array, k: Array, v: Array, cu_seqlens_q: Array, cu_seqlens_k: Array, max_seqlen_q: int, max_seqlen_k: int,
    *, return_key_sums: Literal[True], **options: Unpack[_CallWithLse],
) -> tuple[Array, ...]: ...  # fmt: skip
@with_signature(KeywordOptions)
def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = checks.OPEN,
    softcap: float = 0.0,
    alibi_slopes: AnyArray | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    return_softmax_lse: bool = False,
    return_max_score: bool = False,
    return_key_sums: bool = False,
    out: AnyArray | None = None,
    **options: Unpack[KeywordOptions],
) -> Array | tuple[Array, ...]:
    """flash_attn_func for sequences of different lengths, packed one after the other.

    Arguments, where they differ:
        q: (total_q, nheads, headdim); k: (total_k, nheads_k, headdim); v: (total_k, nheads_k, headdim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32, contiguous, on q's device: sequence b owns the rows
            cu_seqlens[b] .. cu_seqlens[b + 1] - 1. Entries start at 0, never decrease, and the last is at most total_q
            or total_k. The CPU backend checks this. On a GPU, where reading them would wait for the device, rows
            outside these bounds are left alone.
        max_seqlen_q, max_seqlen_k: integers, at least the length of the longest sequence.
        bias, mask: broadcast to (batch, nheads, max_seqlen_q, max_seqlen_k); rows and columns count from the start of
            each sequence.
        startend_row_indices: (heads, total_k, numbers).
        block_mask: blocks count from the start of each sequence, and there are as many as max_seqlen_q and
            max_seqlen_k need.
        alibi_slopes: (nheads,) or (batch, nheads).

    Returns:
        out (total_q, nheads, headdim_v); on request also lse (nheads, total_q), max_score (batch, nheads) and key_sums
        (nheads, total_k). Rows that belong to no sequence are 0 in `out` and -inf in `lse`; keys that belong to no
        sequence are 0 in `key_sums`. A given `out` keeps its values in such rows.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_varlen_func
    >>> q = np.zeros((4, 1, 8), np.float32)
    >>> v = np.array([1, 3, 10, 20], np.float32).reshape(4, 1, 1)
    >>> cu_seqlens = np.array([0, 2, 4], np.int32)  # rows 0 1 and rows 2 3
    >>> flash_attn_varlen_func(q, q, v, cu_seqlens, cu_seqlens, 2, 2).ravel()
    array([ 2.,  2., 15., 15.], dtype=float32)
    """
    if return_softmax_lse is not False:
        return_lse = checks.wants_lse(return_lse, return_softmax_lse)
    results = sign = None
    if return_max_score is return_key_sums is False:
        given, arrays, numbers = QKV_VARLEN, (q, k, v, cu_seqlens_q, cu_seqlens_k), ()
        values = (
            return_lse, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, max_seqlen_q,
            max_seqlen_k,
        )  # fmt: skip
        if alibi_slopes is not None:
            given, arrays = (*given, "alibi_slopes"), (*arrays, alibi_slopes)
        if options:
            given, arrays, values, numbers = joined(given, arrays, values, options)
        if out is not None:
            given, arrays = (*given, "out"), (*arrays, out)
        if values is not None:
            results, sign = repeats.find(given, arrays, values, window_size, numbers, True)
            if results is not None:
                return results
    chosen = _options_of(
        "flash_attn_varlen_func", options, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, deterministic=deterministic,
    )  # fmt: skip
    varlen = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    more = statistics.wanted(return_lse, return_max_score, return_key_sums)
    return _route(q, k, v, varlen, out, return_lse, chosen, sign, more)


def _route(
    q, k, v, varlen: tuple | None, out, return_lse, options: Options, sign: tuple | None,
    more: statistics.Results | None,
):  # fmt: skip
    """Runs the call as its framework requires: as an operator of PyTorch, as a part of a traced JAX program, or
    directly. more: the results of a call with statistics, else None."""
    if torch_modes.must_see(q, k, v, options.bias, options.mask, options.alibi_slopes, options.sinks):
        return frameworks.pytorch().autograd.differentiable(q, k, v, varlen, out, return_lse, options, sign, more)
    if is_traced(q, k, v, *(varlen or ()), *options):
        if more:
            raise Unsupported(f"{more.first()} is given, but statistics of the scores are not served in a traced call")
        return frameworks.jax().traced(q, k, v, varlen, out, return_lse, options)
    if more:
        return statistics.attend(q, k, v, varlen, out, more, options)
    return attend(q, k, v, varlen, out, return_lse, options, sign)


@traceable
def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Merges attention over two disjoint sets of keys into attention over their union.

        lse = log(exp(lse_a) + exp(lse_b)),   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    Associative up to rounding. Where one side has lse = -inf the result is the other side's, whatever the first side's
    out holds. With sinks, give them to one side only.

    Arguments:
        out_a, out_b: (batch, seqlen, nheads, headdim_v), or packed (total, nheads, headdim_v); last axis contiguous.
        lse_a, lse_b: (batch, nheads, seqlen), or (nheads, total); float32, contiguous.

    Returns (out, lse), new arrays of the caller's own type.

    >>> import numpy as np
    >>> from flash_attn_minimal import flash_attn_func, merge
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8), dtype=np.float32)
    >>> left = flash_attn_func(q, k[:, :2], v[:, :2], return_lse=True)
    >>> right = flash_attn_func(q, k[:, 2:], v[:, 2:], return_lse=True)
    >>> out, lse = merge(*left, *right)
    >>> bool(np.allclose(out, flash_attn_func(q, k, v), atol=1e-6))
    True
    """
    names, arrays = ("out_a", "lse_a", "out_b", "lse_b"), (out_a, lse_a, out_b, lse_b)
    views = [_arrays.view(array, name) for name, array in zip(names, arrays, strict=True)]
    a, la, b, lb = views
    for name, view in zip(names[1:], views[1:], strict=True):
        checks.same_place(name, view, "out_a", a)
    packed = len(a.shape) == 3
    if not packed and len(a.shape) != 4:
        raise BadArgument(
            f"out_a has shape {tuple(a.shape)}: "
            "expected (batch, seqlen, nheads, headdim_v) or (total, nheads, headdim_v)"
        )
    checks.dtype("out_a", a)
    if b.shape != a.shape or b.dtype != a.dtype:
        raise BadArgument(f"out_b is {b.dtype} {tuple(b.shape)}, but out_a is {a.dtype} {tuple(a.shape)}")
    *batch, seqlen, nheads, headdim_v = a.shape
    lse_shape = (*batch, nheads, seqlen)
    for name, view in (("lse_a", la), ("lse_b", lb)):
        if tuple(view.shape) != lse_shape or view.dtype != "float32":
            axes = "(nheads, total)" if packed else "(batch, nheads, seqlen)"
            raise BadArgument(f"{name} is {view.dtype} {tuple(view.shape)}: expected float32 {lse_shape}, {axes}")
        checks.contiguous(name, view)
    for name, view in (("out_a", a), ("out_b", b)):
        checks.last_axis(name, view)
    out, lse = a.door.empty(a, tuple(a.shape), a.dtype), a.door.empty(a, lse_shape, "float32")

    args = new(MergeArgs)
    args.device, args.dtype = a.device, DTYPES[a.dtype]
    args.batch, args.seqlen, args.nheads, args.headdim_v = batch[0] if batch else 1, seqlen, nheads, headdim_v
    for name, view in (("out_a", a), ("out_b", b), ("out", out)):
        _put_tensor(args, name, view)
    args.lse_a, args.lse_b, args.lse = la.pointer, lb.pointer, lse.pointer
    recordings.run(load(), "attention_merge", args, a.door.stream(views), [*views, out, lse])
    return out.door.result(out), lse.door.result(lse)


@traceable
def quantize_fp8(x: Array, hadamard: bool = False, seed: int = 0) -> tuple[Array, Array]:
    """Rounds x to float8_e4m3fn with one factor for each head of each batch entry: x is about x8 * descale.

    With hadamard=True every row is first multiplied by random signs and by an orthonormal Hadamard matrix, which
    spreads outliers over the row. q k^T does not change when q and k are both rotated with the same seed. Never rotate
    only one of the two, and do not rotate v.

    Arguments:
        x: (batch, seqlen, nheads, headdim), or packed (total, nheads, headdim), which counts as one batch entry;
            float32, float16 or bfloat16, finite, last axis contiguous, headdim up to 512, with hadamard a power of two.
        seed: 64-bit integer that decides the signs.

    Returns (x8, descale): x8 like x in float8_e4m3fn, descale (batch, nheads) float32. NumPy arrays need the ml_dtypes
    package for float8_e4m3fn.

    On a Hopper GPU, with PyTorch or JAX arrays:

        (q8, q_descale), (k8, k_descale) = quantize_fp8(q, hadamard=True), quantize_fp8(k, hadamard=True)
        v8, v_descale = quantize_fp8(v)
        out = flash_attn_func(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    """
    view = _arrays.view(x, "x")
    if len(view.shape) not in (3, 4):
        raise BadArgument(
            f"x has shape {tuple(view.shape)}: expected (batch, seqlen, nheads, headdim) or (total, nheads, headdim)"
        )
    checks.floats("x", view, cast=True)
    checks.last_axis("x", view)
    *batch, seqlen, nheads, headdim = view.shape
    args = new(QuantizeArgs)
    args.device, args.dtype = view.device, DTYPES[view.dtype]
    args.batch, args.seqlen, args.nheads, args.headdim = batch[0] if batch else 1, seqlen, nheads, headdim
    args.hadamard, args.seed = checks.flag("hadamard", hadamard), checks.integer("seed", seed, 0, 2**64 - 1)
    out = _empty(view, tuple(view.shape), "float8_e4m3fn")
    descale = view.door.empty(view, (args.batch, nheads), "float32")
    _put_tensor(args, "x", view)
    _put_tensor(args, "out", out)
    args.descale = descale.pointer
    recordings.run(load(), "quantize_fp8", args, view.door.stream([view]), [view, out, descale])
    return out.door.result(out), descale.door.result(descale)


def query(
    q: AnyArray,
    k: AnyArray,
    v: AnyArray,
    cu_seqlens_q: AnyArray | None = None,
    cu_seqlens_k: AnyArray | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: bool = False,
    return_softmax_lse: bool = False,
    return_max_score: bool = False,
    return_key_sums: bool = False,
    out: AnyArray | None = None,
    **options: Unpack[AttentionOptions],
) -> Plan:
    """Tells what flash_attn_func (or, with cu_seqlens, flash_attn_varlen_func) would do with the same arguments,
    without doing it.

    Arguments that the Python layer refuses raise as they would in the call; a refusal by the library is in the Plan.

    >>> import numpy as np
    >>> from flash_attn_minimal import query
    >>> q = np.zeros((1, 128, 8, 64), np.float32)
    >>> plan = query(q, q, q, causal=True, kernel="cpu_naive")
    >>> plan.status, plan.kernel
    ('FA_OK', 'cpu_naive')
    >>> query(q[:, :, :6], q[:, :, :4], q[:, :, :4]).error
    'nheads=6 is not a multiple of nheads_k=4'
    """
    lengths = _lengths("query", cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    args, views = _prepare(q, k, v, lengths, _options_of("query", options))
    return_lse = bool(checks.wants_lse(return_lse, return_softmax_lse))
    if more := statistics.wanted(return_lse, return_max_score, return_key_sums):
        more.put_placeholders(args)
    shape = (*views[0].shape[:-1], args.headdim_v)
    if out is not None:
        _output(args, views, out, shape, False)
    else:
        _put_dense(args, "out", shape)
    return plan_of(args)


def kernels() -> list[dict[str, str]]:
    """The kernels of this build, best first on each device: [{"name", "device", "summary"}, ...].

    >>> from flash_attn_minimal import kernels
    >>> [kernel["name"] for kernel in kernels() if kernel["device"] == "cpu"][-2:]
    ['cpu_portable', 'cpu_naive']
    """
    return kernel_table(load(), KERNEL_TABLES["forward"])
