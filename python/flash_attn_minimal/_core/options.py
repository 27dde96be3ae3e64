"""The options of attention as one object, from the argument list to the C struct, and the C struct of a call.

flash_attn_func, flash_attn_varlen_func, backward, their queries and the operators of torch/ and jax/ all carry
an Options; flash_attn_with_kvcache makes one of the options that it shares with them. flash_attn_func explains the
options.
"""

from __future__ import annotations

import inspect
import math
from collections import namedtuple
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypedDict, TypeVar

from .. import _arrays
from .._arrays import View
from .._arrays.words import pass_cast
from ..errors import BadArgument
from . import checks
from .fields import _broadcast, _columns, _copied, _destination, _empty, _option, _put_strides, _put_tensor
from .structs import DTYPES, AttentionArgs, new

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack  # for the modules with options
else:
    Unpack = tuple

_NAMES = {number: name for name, number in DTYPES.items()}


class AnyArray(Protocol):
    """For type checkers: an array of NumPy, PyTorch, CuPy, JAX or Numba, or one with DLPack."""

    @property
    def shape(self) -> Any: ...


class _DType(Protocol):
    @property
    def itemsize(self) -> int: ...


# For type checkers: "float16", np.float16, np.dtype("float16"), torch.float16, jnp.float16.
DType: TypeAlias = str | type | _DType

Array = TypeVar("Array", bound=AnyArray)  # of one call's framework: numpy.ndarray, torch.Tensor, jax.Array, ...


class ScoreOptions(TypedDict, total=False):
    """For type checkers: keyword-only options of every function of attention, of those with a cache too."""

    sinks: AnyArray | None
    attention_chunk: int
    kernel: str | None
    num_threads: int


class KeywordOptions(ScoreOptions, total=False):
    """For type checkers: the options that flash_attn_func takes by keyword only."""

    bias: AnyArray | None
    mask: AnyArray | None
    startend_row_indices: AnyArray | None
    block_mask: AnyArray | None
    top_left: bool
    dropout_seed: int | None
    dropout_offset: int
    allow_tf32: bool
    q_descale: AnyArray | None
    k_descale: AnyArray | None
    v_descale: AnyArray | None
    out_dtype: DType | None
    fast_accum: bool


class PositionalOptions(TypedDict, total=False):
    """For type checkers: the options that flash_attn_func also takes by position."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: AnyArray | None
    deterministic: bool


class AttentionOptions(PositionalOptions, KeywordOptions, total=False):
    """For type checkers: all options of flash_attn_func."""


def hints_of(declared: type) -> dict[str, str]:
    """The type of each option of a TypedDict, as it is written there."""
    return {name: hint.__forward_arg__ for name, hint in declared.__annotations__.items()}


def default_of(hint: str) -> Any:
    """The default of every option of this type."""
    if hint.endswith("| None"):
        return None
    return {"bool": False, "int": 0, "float": 0.0, "tuple[int, int]": checks.OPEN}[hint]


def arrays_of(declared: type) -> tuple[str, ...]:
    """The options of a TypedDict that are arrays."""
    return tuple(name for name, hint in hints_of(declared).items() if hint.startswith("AnyArray"))


def with_signature(declared: type, without: Collection[str] = (), **defaults: Any) -> Callable[[Any], Any]:
    """Shows the options that a function takes as **options as parameters of its signature. without: those that it does
    not take; defaults: those that do not follow from the types."""

    def named(function: Any) -> Any:
        signature = inspect.signature(function)
        *before, _ = signature.parameters.values()
        by_keyword, hints = inspect.Parameter.KEYWORD_ONLY, hints_of(declared)
        shown = {name: defaults[name] if name in defaults else default_of(hints[name]) for name in hints}
        after = [
            inspect.Parameter(name, by_keyword, annotation=hints[name], default=default)
            for name, default in shown.items()
            if name not in without
        ]
        function.__signature__ = signature.replace(parameters=[*before, *after])
        return function

    return named


_HINTS = hints_of(AttentionOptions)
ARRAYS = arrays_of(AttentionOptions)
FLOAT8 = ("q_descale", "k_descale", "v_descale", "out_dtype", "fast_accum")  # what only calls with float8 have
# Arrays without float8's, in the order of arguments of PyTorch's operators and of XLA's calls: the axes of each ("own
# heads" are 1, those of k or those of q) and its dtype, "" where it follows q's.
OPTION_ARRAYS = {
    "bias": ("batch, heads, rows, keys", ""),
    "mask": ("batch, heads, rows, keys", "bool"),
    "alibi_slopes": ("batch, heads", ""),
    "sinks": ("heads", ""),
    "startend_row_indices": ("batch, own heads, keys, numbers", "int32"),
    "block_mask": ("batch, own heads, blocks of rows, blocks of keys", "bool"),
}
# Options that count from the start of whole sequences, and how texts call what they count. Calls over parts of
# sequences do not take them.
FROM_START = {"attention_chunk": "its chunks", "block_mask": "its blocks"}


class Options(namedtuple("_Options", _HINTS, defaults=map(default_of, _HINTS.values()))):  # type: ignore[misc]
    """The options of a call: those of AttentionOptions, with flash_attn_func's defaults. A new option needs a line in
    one of the TypedDicts above and a field of AttentionArgs in structs.py; if it is no bool, int or float, also lines
    in `put`."""

    __slots__ = ()

    def numbers(self) -> tuple:
        """The options that are not arrays, for the signature of a call; of the dropout's seed and offset, which vary
        between repeats, only whether they are given."""
        return (*[getattr(self, name) for name in _NUMBERS], self.dropout_seed is not None)

    def put(self, args: AttentionArgs, views: list[View]) -> None:
        """Checks the options and writes them into a struct with sizes and dtype; their arrays are added to views."""
        batch, nheads, nheads_k, dtype = args.batch, args.nheads, args.nheads_k, views[0].dtype
        self._put_scores(args, views, (batch, nheads, args.seqlen_q, args.seqlen_k), dtype)
        if chance := checks.number("dropout_p", self.dropout_p):
            args.dropout_p = min(max(chance, 1e-6), 1 - 1e-6) if 0 < chance < 1 else chance  # float32 might be 0 or 1
            if self.dropout_seed is None:
                raise BadArgument(
                    f"dropout_p={chance} without dropout_seed: "
                    "name the seed, so that the same call drops the same elements"
                )
        if self.dropout_seed is not None:
            args.dropout_seed = checks.integer("dropout_seed", self.dropout_seed, 0, 2**64 - 1)
        args.dropout_offset = checks.integer("dropout_offset", self.dropout_offset, 0, 2**64 - 1)
        for name, heads in (("q_descale", nheads), ("k_descale", nheads_k), ("v_descale", nheads_k)):
            if (factors := getattr(self, name)) is not None:
                view = _option(views, name, factors, ("float32",))
                strides = _broadcast(name, view, (batch, heads), "batch, heads", least=0)
                _put_strides(args, name, view.pointer, strides, ("batch", "head"))
        if self.out_dtype is not None:
            args.out_dtype = DTYPES[checks.dtype_name("out_dtype", self.out_dtype, DTYPES)]
        _put_kernel(args, self.kernel)

    def _put_scores(self, args: AttentionArgs, views: list[View], scores: tuple[int, ...], dtype: str) -> None:
        """The part of `put` for the options that act on the scores, whose shape is (batch, nheads, seqlen_q,
        seqlen_k)."""
        batch, nheads, *_ = scores
        for name in _FLAGS:
            if (given := getattr(self, name)) is not False:
                setattr(args, name, checks.flag(name, given))
        if self.softmax_scale is not None:
            args.softmax_scale, args.has_softmax_scale = checks.number("softmax_scale", self.softmax_scale), 1
        for name in _REALS:
            setattr(args, name, real := checks.number(name, given := getattr(self, name)))
            if 0 < abs(real) < checks.LEAST_FLOAT:
                raise BadArgument(f"{name}={checks.quoted(given)} is below the normal numbers of a float32")
        if self.window_size is not checks.OPEN:
            args.window_left, args.window_right = checks.window(self.window_size)
            args.has_window = 1
        for name in _INTEGERS:
            if type(given := getattr(self, name)) is not int or given:
                setattr(args, name, checks.integer(name, given, -(2**31), 2**31 - 1))
        if self.alibi_slopes is not None:
            view = _per_head(views, "alibi_slopes", self.alibi_slopes, (nheads,), (batch, nheads))
            args.alibi_slopes = view.pointer
            args.alibi_batch_stride = view.strides[0] if len(view.shape) == 2 else 0
        if self.sinks is not None:
            args.sinks = _per_head(views, "sinks", self.sinks, (nheads,)).pointer
        for name, dtypes in (("bias", (dtype, "float32")), ("mask", ("bool", "uint8"))):
            if (array := getattr(self, name)) is None:
                continue
            view = _option(views, name, array, dtypes)
            axes = "batch, nheads, seqlen_q, seqlen_k"
            if args.cu_seqlens_q:
                axes = "batch, nheads, max_seqlen_q, max_seqlen_k"
            strides = _broadcast(name, view, scores, axes)
            if strides[-1] != 1 and scores[-1] > 1 and 0 not in view.shape:
                view = _columns(views, name, view, scores[-1])
                strides = _broadcast(name, view, scores, axes)
            _put_strides(args, name, view.pointer, strides, ("batch", "head", "row"))
            if name == "bias":
                args.bias_dtype = DTYPES[view.dtype]
        if self.startend_row_indices is not None:
            _put_row_indices(args, views, self.startend_row_indices)
        if self.block_mask is not None:
            _put_block_mask(args, views, self.block_mask)


def _put_row_indices(args: AttentionArgs, views: list[View], array: Any) -> None:
    """Checks startend_row_indices, (batch, heads, seqlen_k, numbers) or in a varlen call (heads, total_k, numbers), and
    puts it into the struct."""
    name, causal = "startend_row_indices", bool(args.causal)
    view = _option(views, name, array, ("int32",))
    shape, strides = tuple(view.shape), list(view.strides)
    *batch, keys = [args.total_k] if args.cu_seqlens_q else [args.batch, args.seqlen_k]
    heads, numbers = dict.fromkeys((1, args.nheads_k, args.nheads)), (1, 2) if causal else (2, 4)
    fits = len(shape) == len(batch) + 3 and shape[:-3] in ((), tuple(batch), (1,)) and shape[-2] == keys
    if not fits or shape[-3] not in heads or shape[-1] not in (1, 2, 4):
        wanted = [*map(str, batch), " or ".join(map(str, heads)), str(keys), "1, 2 or 4"]
        axes = "heads, total_k, numbers" if args.cu_seqlens_q else "batch, heads, seqlen_k, numbers"
        raise BadArgument(f"{name} has shape {shape}: expected ({axes}) = ({', '.join(wanted)})")
    if shape[-1] not in numbers:
        raise BadArgument(
            f"{name} has {shape[-1]} number{'s' if shape[-1] > 1 else ''} for each key: with causal={causal} it has "
            f"{numbers[0]} or {numbers[1]}"
        )
    checks.last_axis(name, view)
    steps = [stride if size != 1 else 0 for size, stride in zip(shape[:-1], strides, strict=False)]
    _put_strides(args, name, view.pointer, [0] * (3 - len(steps)) + steps, ("batch", "head", "key"))
    args.startend_row_indices_heads, args.startend_row_indices_numbers = shape[-3], shape[-1]


def _put_block_mask(args: AttentionArgs, views: list[View], array: Any) -> None:
    """Checks block_mask, (batch, heads, blocks of rows, blocks of keys), and puts it into the struct. The sizes of the
    blocks follow from the shape: only up to 64 rows have as many blocks of 64 as of 128, which are then the same."""
    name, lengths = "block_mask", (args.seqlen_q, args.seqlen_k)
    view = _option(views, name, array, ("bool", "uint8"))
    shape, heads = tuple(view.shape), dict.fromkeys((1, args.nheads_k, args.nheads))
    counts = [{-(-length // size): size for size in (128, 64)} for length in lengths]
    fits = len(shape) == 4 and shape[0] in (1, args.batch) and shape[1] in heads
    if not fits or shape[2] not in counts[0] or shape[3] not in counts[1]:
        wanted = [" or ".join(map(str, x)) for x in (dict.fromkeys((1, args.batch)), heads, *counts)]
        ends = ("max_seqlen_q", "max_seqlen_k") if args.cu_seqlens_q else ("seqlen_q", "seqlen_k")
        raise BadArgument(
            f"{name} has shape {shape}: expected (batch, heads, blocks of rows, blocks of keys) = ({', '.join(wanted)})"
            f", for blocks of 128 or 64 of {ends[0]}={lengths[0]} and {ends[1]}={lengths[1]}"
        )
    checks.last_axis(name, view)
    steps = [stride if size != 1 else 0 for size, stride in zip(shape[:-1], view.strides, strict=False)]
    _put_strides(args, name, view.pointer, steps, ("batch", "head", "row"))
    args.block_mask_heads = shape[1]
    args.block_mask_row_block, args.block_mask_key_block = counts[0][shape[2]], counts[1][shape[3]]


def _per_head(views: list[View], name: str, array: Any, *shapes: tuple[int, ...]) -> View:
    """An array with an entry for each head, as float32, of one of these shapes; the first is (heads,)."""
    view, heads = _option(views, name, array, checks.FLOATS), shapes[0][0]
    if view.dtype != "float32":
        view = _copied(views, name, view, tuple(view.shape), "float32")
    if tuple(view.shape) not in shapes:
        advice = f"; pass {name}.reshape({heads})" if math.prod(view.shape) == heads else ""
        raise BadArgument(f"{name} has shape {tuple(view.shape)}: expected {' or '.join(map(str, shapes))}{advice}")
    checks.last_axis(name, view)
    return view


_FLAGS, _INTEGERS, _REALS = (
    tuple(name for name, hint in _HINTS.items() if hint == kind and not name.startswith("dropout_"))
    for kind in ("bool", "int", "float")
)
_NUMBERS = tuple(name for name in Options._fields if name not in (*ARRAYS, "dropout_seed", "dropout_offset"))


def field_of(name: str) -> str:
    """The field of AttentionArgs with the address of an array."""
    return data if hasattr(AttentionArgs, data := f"{name}_data") else name


def _options_of(function: str, given: Mapping[str, Any], **named: Any) -> Options:
    """The Options of a function's keyword arguments: those in `given`, which may be wrong, and the named ones."""
    if unknown := [name for name in given if name not in Options._fields]:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")
    return Options(**given, **named)


def _put_kernel(args: Any, kernel: Any) -> None:
    if kernel is not None:
        if not isinstance(kernel, str) or not kernel.isascii() or "\0" in kernel:
            raise BadArgument(f"kernel={checks.quoted(kernel)} is not the name of a kernel")
        args.kernel = kernel.encode()


def _prepare(q: Any, k: Any, v: Any, varlen: tuple | None, options: Options) -> tuple[AttentionArgs, list[View]]:
    """Checks a call and fills its struct, except for the outputs and the workspace. varlen: None, or (cu_seqlens_q,
    cu_seqlens_k, max_seqlen_q, max_seqlen_k). The views (q, k, v, then the optional ones) keep the memory alive."""
    qv = _arrays.view(q, "q")
    kv, vv = _arrays.view(k, "k", ("q", qv), ""), _arrays.view(v, "v", ("q", qv), "")
    views = [qv, kv, vv]
    rank = 4 if varlen is None else 3
    for name, view in (("q", qv), ("k", kv), ("v", vv)):
        if len(view.shape) != rank:
            expected = "(batch, seqlen, nheads, headdim)" if rank == 4 else "(total, nheads, headdim)"
            raise BadArgument(
                f"{name} has shape {tuple(view.shape)}: expected {expected}{_regrouped(name, view, rank)}"
            )
        if view.strides[-1] != 1 and view.shape[-1] > 1:
            checks.last_axis(name, view)
    checks.same_place("k", kv, "q", qv)
    checks.same_place("v", vv, "q", qv)
    if kv.dtype != qv.dtype or vv.dtype != qv.dtype:
        name, like = ("k" if kv.dtype != qv.dtype else "v", "q") if qv.dtype in DTYPES else ("q", "k")
        advice = pass_cast(qv.door.name, name, f"{like}.dtype", {"q": qv, "k": kv, "v": vv}[name].dtype)
        raise BadArgument(f"q is {qv.dtype}, k is {kv.dtype}, v is {vv.dtype}: they must be the same{advice}")
    checks.dtype("q", qv)

    *batch, seqlen_q, nheads, headdim = qv.shape
    *batch_k, seqlen_k, nheads_k, headdim_k = kv.shape
    if batch_k != batch or headdim_k != headdim:
        must = "headdim" if varlen else "batch and headdim"
        raise BadArgument(f"k has shape {tuple(kv.shape)}, but q has {tuple(qv.shape)}: {must} must agree")
    checks.values_like_keys("v", vv, "k", kv)
    args = new(AttentionArgs)
    args.device, args.dtype = qv.device, DTYPES[qv.dtype]
    for name, view in (("q", qv), ("k", kv), ("v", vv)):
        _put_tensor(args, name, view)
    if varlen is not None:
        args.total_q, args.total_k = seqlen_q, seqlen_k
        batch[:], seqlen_q, seqlen_k = _sequences(args, views, *varlen)
    args.batch, args.seqlen_q, args.seqlen_k = batch[0], seqlen_q, seqlen_k
    args.nheads, args.nheads_k, args.headdim, args.headdim_v = nheads, nheads_k, headdim, vv.shape[-1]
    options.put(args, views)
    return args, views


def _regrouped(name: str, view: View, rank: int) -> str:
    """Advice for an array with the right numbers and the wrong axes."""
    shape, heads = tuple(view.shape), "nheads" if name == "q" else "nheads_k"
    if rank == 3:
        if len(shape) == 2:
            return f"; if it is (total, {heads} * headdim), pass {name}.reshape({shape[0]}, {heads}, -1)"
        if len(shape) == 4:
            return f"; pass {name}[0]" if shape[0] == 1 else f"; pass {name}.reshape(-1, {shape[2]}, {shape[3]})"
    elif len(shape) == 2:
        return f"; if it is (seqlen, headdim), pass {name}[None, :, None]"
    elif len(shape) == 3:
        joined = (
            f"if it is (batch, seqlen, {heads} * headdim), pass {name}.reshape({shape[0]}, {shape[1]}, {heads}, -1)"
        )
        return f"; {joined}; if it is one sequence (seqlen, {heads}, headdim), pass {name}[None]"
    elif len(shape) == 5 and shape[2] == 3:
        return f"; if it has q, k and v, pass {name}[:, :, 0], {name}[:, :, 1], {name}[:, :, 2]"
    return ""


def _lengths(what: str, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> tuple | None:
    """The arguments that make a call or query a varlen one: all of them, or None if none is given."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    missing = [name for name, x in zip(names, lengths, strict=True) if x is None]
    if 0 < len(missing) < 4:
        raise BadArgument(f"{missing[0]} is None: a varlen {what} needs {', '.join(names[:3])} and {names[3]}")
    return None if missing else lengths


def _sequences(args: AttentionArgs, views: list[View], cu_q, cu_k, max_q, max_k) -> tuple[list[int], int, int]:
    """Reads the arguments that only varlen calls have; returns [batch], seqlen_q, seqlen_k."""
    cu_q = _option(views, "cu_seqlens_q", cu_q, ("int32",))
    cu_k = _option(views, "cu_seqlens_k", cu_k, ("int32",))
    for name, view in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        checks.shape(name, view, len(view.shape) == 1 and view.shape[0] > 0, "(batch + 1,)")
        checks.last_axis(name, view)
    if cu_k.shape[0] != cu_q.shape[0]:
        raise BadArgument(
            f"cu_seqlens_k has {cu_k.shape[0]} entries, but cu_seqlens_q has {cu_q.shape[0]}: both have batch + 1"
        )
    args.cu_seqlens_q, args.cu_seqlens_k = cu_q.pointer, cu_k.pointer
    seqlen_q, seqlen_k = _longest("q", max_q), _longest("k", max_k)
    return [cu_q.shape[0] - 1], seqlen_q, seqlen_k


def _longest(of: str, value: Any) -> int:
    if value is None or math.prod(getattr(value, "shape", ())) != 1:  # PyTorch makes an integer of a tensor (1,)
        starts = f"cu_seqlens_{of}"
        raise BadArgument(
            f"max_seqlen_{of}={checks.quoted(value)} is not an integer; pass int(({starts}[1:] - {starts}[:-1]).max())"
        )
    return checks.integer(f"max_seqlen_{of}", value, 0, 2**63 - 1)


def _output(
    args: AttentionArgs, views: list[View], out: Any, shape: tuple[int, ...], zeroed: bool, names: Sequence[str] = "qkv"
) -> View:
    """The given output or a new one, put into args. names: of the first views."""
    qv = views[0]
    dtype = _NAMES.get(args.out_dtype) or ("bfloat16" if qv.dtype == "float8_e4m3fn" else qv.dtype)
    if out is None:
        view = qv.door.full(qv, shape, dtype, 0) if zeroed else _empty(qv, shape, dtype)
    else:
        view = _destination("out", out, dict(zip(names, views, strict=False)), shape, dtype)
    _put_tensor(args, "out", view)
    return view
