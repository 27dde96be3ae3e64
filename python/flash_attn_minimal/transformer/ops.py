"""The small operations around attention in a Transformer: rms_norm, rope, swiglu, linear, linear_chain, sample.

Arrays come from NumPy, PyTorch, CuPy, JAX or anything else that _arrays has a door for; those of one call come from
one framework. The work goes to the caller's current stream, nothing is waited for, and every call can be captured in a
CUDA graph. Results are new arrays of the caller's own type, or `out`, which is also returned. Types are float32,
float16 and bfloat16, and may differ between the arrays of a call unless a function says otherwise; sums are float32.

`programmatic=True` lets the GPU (sm_90 and newer) start a kernel while earlier ones in the stream still run. The kernel
waits for their end before it reads anything except weight and norm_weight of `linear`, which it loads at once. So
nothing after the last call without `programmatic` may write those two. This helps in chains of short calls inside a
CUDA graph.
"""

from __future__ import annotations

import ctypes as ct
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import _arrays
from .._arrays import View, words
from .._arrays.words import pass_cast
from .._core import checks, recordings
from .._core.fields import _empty, _put_tensor
from .._core.frameworks import traceable
from .._core.launch import launch_with_workspace
from .._core.options import AnyArray, Array, DType, _put_kernel
from .._core.queries import Plan, plan_from
from .._core.structs import DTYPES, new
from ..errors import BadArgument, Unsupported
from ._library import (
    W4_FORMATS,
    LinearArgs,
    RmsNormArgs,
    RopeArgs,
    SampleArgs,
    SwigluArgs,
    W4LinearArgs,
    W4LinearChainArgs,
    load,
)
from .quantized import PackedW4, W4Weight


@traceable
def rms_norm(
    x: Array,
    weight: AnyArray,
    eps: float = 1e-5,
    residual: AnyArray | None = None,
    *,
    out: AnyArray | None = None,
    out_dtype: DType | None = None,
    programmatic: bool = False,
    num_threads: int = 0,
) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis.

    Arguments:
        x: (..., dim).
        weight: (dim,).
        residual: like x, of any of the dtypes: first x += residual, in place; the sum is normalised.
        out: (..., dim), may be x. out_dtype: the dtype of a new result; None means x's.

    >>> import numpy as np
    >>> from flash_attn_minimal.transformer.ops import rms_norm
    >>> rms_norm(np.array([3, 4], np.float32), np.ones(2, np.float32), eps=0) * 12.5**0.5
    array([3., 4.], dtype=float32)
    """
    xv = _input("x", x)
    args = _args(RmsNormArgs, xv, programmatic, num_threads)
    args.rows, args.dim = _put_matrix(args, "x", xv)
    args.eps, views = checks.number("eps", eps), [xv]
    _put_vector(args, views, "weight", weight, args.dim)
    if residual is not None:
        checks.writable("x", xv, ", and residual is added to it in place")
        xv.written = True
        _put_residual(args, views, residual, tuple(xv.shape))
    return _run("rms_norm", args, views, out, _put_output(args, out, "x", xv, tuple(xv.shape), out_dtype))


@traceable
def rope(
    x: Array,
    cos: Array,
    sin: Array,
    positions: AnyArray | None = None,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    inverse: bool = False,
    *,
    out: AnyArray | None = None,
    programmatic: bool = False,
    num_threads: int = 0,
) -> Array:
    """Rotary position embedding: pairs (a, b) of every head become (a cos - b sin, a sin + b cos).

    Arguments:
        x: (batch, seqlen, nheads, headdim); the last axis must be contiguous, other strides are free.
        cos, sin: (positions, rotary_dim / 2), both float32 or both of x's dtype: a row for each position.
        positions: int32 on x's device: (batch,), where token i of a sequence has position positions[b] + i; or (batch,
            seqlen), one for each token; None counts them from 0. The CPU refuses positions outside the tables; a GPU,
            where they are not read before the launch, takes the nearest row for them.
        interleaved: pair j is (2 j, 2 j + 1), as in llama2.c and GPT-J, instead of (j, j + rotary_dim / 2), as in
            Hugging Face's Llama and GPT-NeoX.
        rotary_dim: how many dims of each head are rotated, from the first on; None means twice the width of cos.
        inverse: rotate by the negative angles, which also gives the gradient.
        out: like x, may be x.

    >>> import numpy as np
    >>> from flash_attn_minimal.transformer.ops import rope
    >>> x = np.array([1, 2, 3, 4], np.float32).reshape(1, 1, 1, 4)
    >>> quarter = np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)  # cos and sin of 90 degrees
    >>> rope(x, *quarter).ravel(), rope(x, *quarter, interleaved=True).ravel()
    (array([-3., -4.,  1.,  2.], dtype=float32), array([-2.,  1., -4.,  3.], dtype=float32))
    """
    xv = _input("x", x)
    checks.shape("x", xv, len(xv.shape) == 4, "(batch, seqlen, nheads, headdim)")
    args = _args(RopeArgs, xv, programmatic, num_threads)
    args.batch, args.seqlen, args.nheads, args.headdim = xv.shape
    cv, sv = _input("cos", cos, xv), _input("sin", sin, xv)
    checks.shape("cos", cv, len(cv.shape) == 2 and cv.shape[1] > 0, "(positions, rotary_dim / 2)")
    if tuple(sv.shape) != tuple(cv.shape) or sv.dtype != cv.dtype:
        raise BadArgument(f"sin is {sv.dtype} {tuple(sv.shape)}, but cos is {cv.dtype} {tuple(cv.shape)}")
    if sv.strides[0] != cv.strides[0] and cv.shape[0] > 1:
        raise BadArgument(f"sin has strides {tuple(sv.strides)}, but cos has {tuple(cv.strides)}")
    args.rotary_dim = 2 * cv.shape[1] if rotary_dim is None else checks.integer("rotary_dim", rotary_dim, 1, 2**31 - 1)
    if args.rotary_dim > 2 * cv.shape[1]:
        raise BadArgument(f"rotary_dim={args.rotary_dim} is above twice the {cv.shape[1]} columns of cos")
    args.cos, args.sin, args.table_dtype = cv.pointer, sv.pointer, DTYPES[cv.dtype]
    args.table_rows, args.table_row_stride = cv.shape[0], cv.strides[0]
    args.interleaved, args.inverse = checks.flag("interleaved", interleaved), checks.flag("inverse", inverse)
    views = [xv, cv, sv]
    if positions is not None:
        pv = _integers("positions", positions, xv, "int32")
        first, each = (args.batch,), (args.batch, args.seqlen)
        checks.shape("positions", pv, tuple(pv.shape) in (first, each), f"{first} or {each}")
        args.positions, args.per_token = pv.pointer, len(pv.shape) == 2
        views.append(pv)
    ov = _output(out, "x", xv, tuple(xv.shape), xv.dtype)
    _put_tensor(args, "x", xv)
    _put_tensor(args, "out", ov)
    return _run("rope", args, views, out, ov)


@traceable
def swiglu(
    gate_up: Array,
    *,
    out: AnyArray | None = None,
    out_dtype: DType | None = None,
    programmatic: bool = False,
    num_threads: int = 0,
) -> Array:
    """silu(gate) * up, where silu(x) = x / (1 + exp(-x)); gate is the first half of the last axis, up the second.

    Arguments:
        gate_up: (..., 2 dim).
        out: (..., dim). out_dtype: the dtype of a new result; None means gate_up's.
    """
    xv = _input("gate_up", gate_up)
    args = _args(SwigluArgs, xv, programmatic, num_threads)
    args.rows, columns = _put_matrix(args, "gate_up", xv)
    if columns % 2:
        raise BadArgument(f"gate_up has shape {tuple(xv.shape)}: its last axis must have an even length")
    args.dim = columns // 2
    ov = _put_output(args, out, "gate_up", xv, (*xv.shape[:-1], args.dim), out_dtype)
    return _run("swiglu", args, [xv], out, ov)


@traceable
def linear(
    x: Array,
    weight: AnyArray | PackedW4,
    bias: AnyArray | None = None,
    norm_weight: AnyArray | None = None,
    eps: float = 1e-5,
    residual: AnyArray | None = None,
    swiglu: bool = False,
    *,
    out: AnyArray | None = None,
    out_dtype: DType | None = None,
    programmatic: bool = False,
    num_threads: int = 0,
    kernel: str | None = None,
    workspace: AnyArray | None = None,
) -> Array:
    """residual + act(norm(x) weight^T + bias): the products of a decoder, at the speed at which memory delivers
    weights.

    A 16 or 32-bit weight is for one or a few rows of x: on a GPU, with large weights (4096 x 4096), your framework's
    own product is faster from two rows of x on. A packed 4-bit weight is for any number of rows.

    Arguments:
        x: (..., in_features).
        weight: (out_features, in_features); or a PackedW4 (quantized.py), 4-bit, to whose dtype x is rounded after the
            norm.
        bias: (out_features,).
        norm_weight: (in_features,): x is first normalised as by rms_norm(x, norm_weight, eps), in float32.
        swiglu: act(y) is silu(first half of y) * second half, and the result has out_features / 2 columns. A packed
            weight must have been packed with pair=True.
        residual: like the result, added at the end; may be `out`.
        out: (..., columns), not x. out_dtype: the dtype of a new result; None means x's.
        kernel: force a kernel by name, from kernel_tables()["linear"], or with a PackedW4 from ["w4_linear"]. None
            means $FLASH_ATTN_DENSE_LINEAR_KERNEL, or with a PackedW4 $FLASH_ATTN_LINEAR_KERNEL, else the best one.
        workspace: with a PackedW4, a uint8 array of at least linear_query's size to use as scratch instead of a new
            one: a captured graph needs memory that nothing else uses.
    >>> import numpy as np
    >>> from flash_attn_minimal.transformer.ops import linear
    >>> linear(np.array([1, 2], np.float32), np.array([[1, 1], [1, -1]], np.float32), residual=np.float32([10, 20]))
    array([13., 19.], dtype=float32)
    """
    args, views, ov = _linear_args(
        x, weight, bias, norm_weight, eps, residual, swiglu, out, out_dtype, programmatic, num_threads, kernel
    )
    if isinstance(args, LinearArgs):
        if workspace is not None:
            raise BadArgument("workspace is for the products with a PackedW4: this weight takes none")
        return _run("linear", args, views, out, ov)
    _run_w4("w4_linear", args, [*views, ov], workspace)
    return out if out is not None else ov.door.result(ov)


def linear_query(
    x: AnyArray,
    weight: AnyArray | PackedW4,
    bias: AnyArray | None = None,
    norm_weight: AnyArray | None = None,
    residual: AnyArray | None = None,
    swiglu: bool = False,
    *,
    out_dtype: DType | None = None,
    programmatic: bool = False,
    kernel: str | None = None,
) -> Plan:
    """Tells what linear would do, without doing it: a Plan, with the kernel and its workspace. Pass `programmatic` as
    in the call, because it can change the kernel."""
    args, _, _ = _linear_args(
        x, weight, bias, norm_weight, 1e-5, residual, swiglu, None, out_dtype, programmatic, 0, kernel
    )
    query = load().fa_linear_query if isinstance(args, LinearArgs) else load().fa_w4_linear_query
    return plan_from(lambda plan: query(args, plan))


def linear_chain(
    products: Sequence[Mapping[str, Any]],
    ahead: Sequence[PackedW4] = (),
    *,
    kernel: str | None = None,
    workspace: AnyArray | None = None,
) -> list[Any]:
    """Products with 4-bit weights one after the other: a list of the results of linear(**product) for each.

    On Hopper a chain of a few rows is one launch, in which weights keep coming from memory between the products.
    Elsewhere each product is a launch of its own.

    Arguments:
        products: 1 to 8 dicts of linear's arguments except kernel and workspace; the weight is a PackedW4. x and
            residual may be an integer i, which stands for the result of products[i], an earlier product. In a chain of
            one launch `programmatic` of the first product holds for all.
        ahead: up to 4 PackedW4s that later calls read first: a hint to fetch them early, because memory is idle while
            another kernel, such as attention, reads little.
        kernel: force a kernel by name: "chain_w4_sm90" (products of one format, dtype and number of rows, up to 8 rows
            that fit into shared memory), "one_by_one", or on the CPU "cpu". None means $FLASH_ATTN_CHAIN_KERNEL, else
            the best one.
        workspace: as for linear, of at least linear_chain_query's size.

    >>> import numpy as np
    >>> from flash_attn_minimal.transformer.ops import linear, linear_chain
    >>> from flash_attn_minimal.transformer.quantized import W4Weight
    >>> twice = W4Weight.quantize(2 * np.eye(64, dtype=np.float32)).pack()
    >>> x = np.ones((1, 64), np.float32)
    >>> four, seven = linear_chain([dict(x=linear(x, twice), weight=twice), dict(x=0, weight=twice, residual=-x)])
    >>> four[0, 0], seven[0, 63]
    (np.float32(4.0), np.float32(7.0))
    """
    args, views, results = _chain_args(products, kernel)
    _put_ahead(args, views, ahead)
    _run_w4("w4_linear_chain", args, views, workspace)
    return results


def linear_chain_query(products: Sequence[Mapping[str, Any]], *, kernel: str | None = None) -> Plan:
    """Tells what linear_chain would do, without doing it: a Plan, with the kernel and its workspace."""
    args, _, _ = _chain_args(products, kernel)
    return plan_from(lambda plan: load().fa_w4_linear_chain_query(args, plan))


# linear's arguments, in its order, with their defaults; None for those without a default.
_LINEAR = {
    name: None if argument.default is argument.empty else argument.default
    for name, argument in inspect.signature(linear).parameters.items()
    if name not in ("kernel", "workspace")
}


def _chain_args(products, kernel) -> tuple[W4LinearChainArgs, list[View], list]:
    """Checks the products. Returns the struct, complete except for a workspace; the Views that keep its memory alive;
    the results."""
    structs, views, results = [], [], []
    for i, product in enumerate(_sequence("products", products)):
        if not isinstance(product, Mapping):
            raise BadArgument(f"products[{i}]={checks.quoted(product)} is not a dict of linear's arguments")
        if unknown := product.keys() - _LINEAR.keys():
            raise BadArgument(f"products[{i}] has {', '.join(map(str, unknown))}: expected {', '.join(_LINEAR)}")
        given = _LINEAR | dict(product)
        for name in ("x", "residual"):
            if isinstance(at := given[name], (int, np.integer)):
                if isinstance(at, bool) or not 0 <= at < i:
                    text = f"products[{i}] has {name}={checks.quoted(at)}: expected the number of one of those before"
                    raise BadArgument(text)
                given[name] = results[at]
        if not isinstance(given["weight"], PackedW4):
            raise BadArgument(f"products[{i}] has a {type(given['weight']).__name__} as its weight, not a PackedW4")
        struct, mine, ov = _linear_args(**given, kernel=None)
        structs.append(struct)
        if views:
            checks.same_place(f"products[{i}]: x", mine[0], "that of products[0]", views[0])
        views += [*mine, ov]
        results.append(given["out"] if given["out"] is not None else ov.door.result(ov))
    if not structs:
        raise BadArgument("products is empty")
    args = new(W4LinearChainArgs)
    args.products, args.count = (W4LinearArgs * len(structs))(*structs), len(structs)
    _put_kernel(args, kernel)
    return args, views, results


def _sequence(name: str, items: Any) -> list:
    try:
        return list(items)
    except TypeError:
        raise BadArgument(f"{name}={checks.quoted(items)} is not a sequence") from None


def _put_ahead(args: W4LinearChainArgs, views: list[View], ahead: Sequence[PackedW4]) -> None:
    ahead = _sequence("ahead", ahead)
    if len(ahead) > len(args.ahead):
        raise BadArgument(f"ahead has {len(ahead)} weights, more than {len(args.ahead)}")
    for i, weight in enumerate(ahead):
        if not isinstance(weight, PackedW4):
            raise BadArgument(f"ahead[{i}] is a {type(weight).__name__}, not a PackedW4")
        args.ahead[i], args.ahead_bytes[i] = weight._view.pointer, weight.bytes
        views.append(weight._view)
    args.ahead_count = len(ahead)


def _run_w4(name: str, args: W4LinearArgs | W4LinearChainArgs, views: list[View], workspace: Any) -> None:
    """Runs fa_<name> with the caller's workspace, or with a new one."""
    if workspace is None:
        launch_with_workspace(name, args, args, views, ())
        return
    views.append(_arrays.view(workspace, "workspace"))
    checks.same_place("workspace", views[-1], "x", views[0])
    if views[-1].dtype != "uint8":
        raise BadArgument(f"workspace is {views[-1].dtype}: expected uint8")
    checks.contiguous("workspace", views[-1])
    checks.writable("workspace", views[-1])
    views[-1].written = True
    args.workspace, args.workspace_bytes = views[-1].pointer, math.prod(views[-1].shape)
    recordings.run(load(), name, args, views[0].door.stream(views), views)


def _linear_args(
    x, weight, bias, norm_weight, eps, residual, swiglu, out, out_dtype, programmatic, num_threads, kernel
) -> tuple[LinearArgs | W4LinearArgs, list[View], View]:
    """Checks the arguments. Returns the struct, complete except for a workspace; the Views that keep its memory alive;
    the output."""
    xv = _input("x", x)
    packed = isinstance(weight, PackedW4)
    args = _args(W4LinearArgs if packed else LinearArgs, xv, programmatic, num_threads)
    args.rows, args.in_features = _put_matrix(args, "x", xv)
    if packed:
        if xv.door.launch:
            raise Unsupported("weight is a PackedW4: 4-bit weights are not served in a traced call")
        wv, shape = weight._view, weight.shape
        if wv.device != xv.device or wv.index != xv.index:
            raise BadArgument(f"weight is on {wv.place}, but x is on {xv.place}")
        if weight.pair != bool(checks.flag("swiglu", swiglu)):
            raise BadArgument(f"swiglu={swiglu!r}, but weight was packed with pair={weight.pair}")
        args.packed, args.format, args.compute_dtype = wv.pointer, W4_FORMATS[weight.format], DTYPES[weight.dtype]
    else:
        if isinstance(weight, W4Weight):
            raise BadArgument("weight is a W4Weight: expected an array or a PackedW4; pass weight.pack()")
        wv = _input("weight", weight, xv)
        shape = tuple(wv.shape)
    _put_kernel(args, kernel)
    if len(shape) != 2 or shape[1] != args.in_features:
        turned = len(shape) == 2 and shape[0] == args.in_features and not packed
        advice = (words.advice(xv.door.name, "contiguous", "weight.T") or "; pass weight.T") if turned else ""
        raise BadArgument(f"weight has shape {shape}: expected (out_features, {args.in_features}){advice}")
    args.out_features = shape[0]
    if not packed:
        _put_matrix(args, "weight", wv)
        args.weight_dtype = DTYPES[wv.dtype]
    views = [xv, wv]
    columns = args.out_features
    if checks.flag("swiglu", swiglu):
        if columns % 2:
            raise BadArgument(f"weight has shape {shape}: swiglu needs an even number of rows")
        args.swiglu, columns = 1, columns // 2
    if bias is not None:
        _put_vector(args, views, "bias", bias, args.out_features)
    args.eps = checks.number("eps", eps)
    if norm_weight is not None:
        _put_vector(args, views, "norm_weight", norm_weight, args.in_features)
    shape = (*xv.shape[:-1], columns)
    if residual is not None:
        _put_residual(args, views, residual, shape)
    return args, views, _put_output(args, out, "x", xv, shape, out_dtype)


@traceable
def sample(
    logits: Array,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    offset: int = 0,
    step: AnyArray | None = None,
    seeds: AnyArray | None = None,
    *,
    out: AnyArray | None = None,
    programmatic: bool = False,
    num_threads: int = 0,
) -> Array:
    """Draws a token for each row from softmax(logits / temperature): int32 ids on the device of the logits.

    top_k keeps the k most likely tokens (0: all). top_p then keeps the fewest of the most likely tokens whose sum
    reaches this share of what top_k has left. Equal logits count in the order of their indices; temperature=0 takes the
    first of the largest. A row that holds a NaN, or nothing above -inf, gives -1. The same arguments draw the same
    tokens on every device.

    Arguments:
        logits: (..., vocab), vocab up to 2^20.
        seed, offset: 64-bit integers; draws with different offsets are independent.
        step: int32 on the device of the logits, one number or (rows,). It is read when the kernel runs, so a replayed
            CUDA graph draws anew; different steps are independent. The lengths of the sequences can serve as steps.
        seeds: (rows,) int64 on the device of the logits: a seed for each row, whose draws then do not depend on its
            place in the batch. None: `seed`, and the rows draw independently.
        out: int32, the shape of logits without its last axis.

    >>> import numpy as np
    >>> from flash_attn_minimal.transformer.ops import sample
    >>> logits = np.log(np.array([[1, 2, 1], [4, 4, 0.5]], np.float32))
    >>> sample(logits), sample(logits, temperature=1.0, top_k=1)
    (array([1, 0], dtype=int32), array([1, 0], dtype=int32))
    """
    lv = _input("logits", logits)
    args = _args(SampleArgs, lv, programmatic, num_threads)
    rows, args.vocab = _put_matrix(args, "logits", lv)
    args.batch = checks.integer("the number of rows of logits", rows, 0, 2**31 - 1)
    args.temperature = checks.number("temperature", temperature)
    args.top_k = checks.integer("top_k", top_k, 0, 2**31 - 1)
    args.top_p = checks.number("top_p", top_p)
    if not 0 < args.top_p <= 1:
        raise BadArgument(f"top_p={top_p} is outside 0 < top_p <= 1")
    args.seed = checks.integer("seed", seed, 0, 2**64 - 1)
    args.offset = checks.integer("offset", offset, 0, 2**64 - 1)
    views = [lv]
    if step is not None:
        views.append(_integers("step", step, lv, "int32", "logits"))
        checks.shape("step", views[-1], math.prod(views[-1].shape) in (1, rows), f"one number, or ({rows},)")
        args.step, args.step_stride = views[-1].pointer, int(math.prod(views[-1].shape) != 1)
    if seeds is not None:
        views.append(_integers("seeds", seeds, lv, "int64", "logits"))
        checks.shape("seeds", views[-1], math.prod(views[-1].shape) == rows, (rows,))
        args.seeds = views[-1].pointer
    shape = tuple(lv.shape[:-1])
    if out is None:
        ov = lv.door.empty(lv, shape, "int32")
    else:
        ov = _integers("out", out, lv, "int32", "logits")
        checks.shape("out", ov, tuple(ov.shape) == shape, shape)
        checks.writable("out", ov)
        lv.door.stream([lv, ov])  # waits for the stream of `out`, if it has another one
        ov.written = True
    args.out = ov.pointer
    return _run("sample", args, views, out, ov)


# ---- arrays to arguments ----


def _args(kind: type, first: View, programmatic, num_threads) -> Any:
    args = new(kind)
    args.device, args.dtype = first.device, DTYPES[first.dtype]
    args.programmatic = checks.flag("programmatic", programmatic)
    args.num_threads = checks.integer("num_threads", num_threads, 0, 4096)
    return args


def _run(name: str, args: Any, views: list[View], out: Any, out_view: View):
    """Runs fa_<name> on the stream of the first View; returns `out` or the new array. `views` keep the memory alive."""
    recordings.run(load(), name, args, views[0].door.stream(views), [*views, out_view])
    return out if out is not None else out_view.door.result(out_view)


def _input(name: str, array: Any, first: View | None = None, shape: tuple[int, ...] | None = None) -> View:
    """Checks a float array, which must come from the framework and device of `first`."""
    beside = ("x", first) if first else None
    view = _arrays.view(array, name, beside)
    if first:
        checks.same_place(name, view, "x", first, "float32" if view.dtype not in checks.FLOATS else view.dtype)
    checks.floats(name, view, cast=True)
    checks.shape(name, view, shape is None or tuple(view.shape) == shape, shape)
    checks.shape(name, view, bool(view.shape), "at least one axis")
    checks.last_axis(name, view)
    return view


def _put_vector(args: Any, views: list[View], name: str, array: Any, length: int) -> None:
    view = _input(name, array, views[0], (length,))
    setattr(args, name, view.pointer)
    setattr(args, f"{name.removesuffix('_weight')}_dtype", DTYPES[view.dtype])
    views.append(view)


def _put_residual(args: Any, views: list[View], residual: Any, shape: tuple[int, ...]) -> None:
    views.append(_input("residual", residual, views[0], shape))
    _put_matrix(args, "residual", views[-1])
    args.residual_dtype = DTYPES[views[-1].dtype]


def _put_output(args: Any, array: Any, first_name: str, first: View, shape: tuple[int, ...], dtype: Any) -> View:
    view = _output(array, first_name, first, shape, dtype)
    _put_matrix(args, "out", view)
    args.out_dtype = DTYPES[view.dtype]
    return view


def _integers(name: str, array: Any, first: View, dtype: str, first_name: str = "x") -> View:
    view = _arrays.view(array, name, (first_name, first), dtype)
    checks.same_place(name, view, first_name, first, dtype)
    if view.dtype != dtype:
        raise BadArgument(f"{name} is {view.dtype}: expected {dtype}{pass_cast(view.door.name, name, dtype)}")
    checks.contiguous(name, view)
    return view


def _output(array: Any, first_name: str, first: View, shape: tuple[int, ...], dtype: str | None) -> View:
    if dtype is not None:
        dtype = checks.dtype_name("out_dtype", dtype, checks.FLOATS)
    if array is None:
        return _empty(first, shape, dtype or first.dtype)
    view = _arrays.view(array, "out")
    view.door.check_seen()
    checks.same_place("out", view, first_name, first)
    if view.dtype not in checks.FLOATS or tuple(view.shape) != shape or (dtype and view.dtype != dtype):
        raise BadArgument(f"out is {view.dtype} {tuple(view.shape)}: expected {dtype or first.dtype} {shape}")
    checks.last_axis("out", view)
    checks.writable("out", view)
    first.door.stream([first, view])  # waits for the stream of `out`, if it has another one
    view.written = True
    return view


def _put_matrix(args: ct.Structure, name: str, view: View) -> tuple[int, int]:
    """Puts the address and row stride of an array seen as (rows, columns) into args; returns rows and columns."""
    *lead, columns = view.shape
    stride = None  # between rows: the stride of the innermost axis longer than 1, with which the outer ones must agree
    expected = 0
    for size, step in zip(reversed(lead), reversed(view.strides[:-1]), strict=True):
        if size == 1:
            continue
        if stride is None:
            stride, expected = step, step
        elif step != expected and 0 not in lead:
            raise BadArgument(
                f"{name} has strides {tuple(view.strides)} for shape {tuple(view.shape)}: "
                "its rows must lie at equal distances"
            )
        expected *= size
    setattr(args, f"{name}_data", view.pointer)
    setattr(args, f"{name}_row_stride", columns if stride is None else stride)
    return math.prod(lead), columns
