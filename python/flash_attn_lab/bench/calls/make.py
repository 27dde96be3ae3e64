"""A call made: its arrays, and the function of ours or of a peer on them."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flash_attn_minimal import (
    backward,
    backward_query,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    kvcache_query,
    quantize_fp8,
    query,
)
from flash_attn_minimal.errors import FlashAttnError

from ..machine import DTYPES, first_line
from ..systems import PACKAGES, Refused, allowing_tf32, backward_of, fa_function, only, varlen_options
from .call import BIASES, DROPOUT, SOFTCAP, WINDOWS, Call


@dataclass
class Arrays:
    """The inputs of a call on a machine, those of ours and of the peers. There is one set: what fits into the level-2
    cache stays there, for each system alike, as for a caller that has just written it."""

    machine: Any
    call: Call
    q: Any
    k: Any
    v: Any
    options: dict[str, Any]  # of ours
    lengths: tuple = ()  # varlen's arguments
    cache: dict[str, Any] = field(default_factory=dict)  # flash_attn_with_kvcache's
    dout: Any = None
    dense: Any = None  # the peers' mask, once one has made it
    pages: tuple[Any, Any, Any] | None = None

    @classmethod
    def of(cls, machine, call: Call, seed: int = 0) -> Arrays:
        rows_q = (sum(call.lengths),) if call.packed is not None else (call.batch, call.seqlen_q)
        rows_k = rows_q if call.packed is not None else (call.batch, call.seqlen_k)

        def made(rows, heads, width, which):
            if "heads_first" in call.ways:
                return machine.random((rows[0], heads, rows[1], width), call.given, seed + which).swapaxes(1, 2)
            return machine.random((*rows, heads, width), call.given, seed + which)

        q = made(rows_q, call.nheads, call.headdim, 0)
        k, v = (made(rows_k, call.nheads_k, width, i) for i, width in ((1, call.headdim), (2, call.headdim_v)))
        arrays = cls(machine, call, q, k, v, _options(machine, call, seed))
        if call.packed is not None:
            starts = machine.int32([0, *itertools.accumulate(call.lengths)])
            arrays.lengths = (starts, starts, call.seqlen_q, call.seqlen_q)
        if call.is_cache:
            arrays.cache = {"cache_seqlens": machine.int32(list(call.filled))}
        if call.backward:
            arrays.dout = made(rows_q, call.nheads, call.headdim_v, 3)
        return arrays

    def paged(self) -> tuple[Any, Any, Any]:
        """(k_cache, v_cache, block_table): the cache cut into pages, which lie in a shuffled order. What is behind the
        last key of a sequence in its last page is random."""
        if self.pages is None:
            call, machine = self.call, self.machine
            each = -(-call.seqlen_k // call.page)
            order = random.Random(call.page).sample(range(call.batch * each), call.batch * each)
            place = np.argsort(order).tolist()  # order[i]: where page i lies; place[j]: the page that lies at j
            pools = []
            for cache in (self.k, self.v):
                whole = machine.random((call.batch, each * call.page, *cache.shape[2:]), call.given, 30)
                whole[:, : call.seqlen_k] = cache
                pools.append(whole.reshape(call.batch * each, call.page, *cache.shape[2:])[place])
            table = machine.int32(np.asarray(order, np.int32).reshape(call.batch, each).tolist())
            self.pages = pools[0], pools[1], table
        return self.pages


def _options(machine, call: Call, seed: int) -> dict[str, Any]:
    """The keyword arguments of ours."""
    found: dict[str, Any] = {}
    b, h, n_q, n_k = call.batch, call.nheads, call.seqlen_q, call.seqlen_k

    def uniform(shape, which):
        return machine.random(shape, "float32", seed + 10 + which)

    for name in call.options:
        if name == "causal":
            found["causal"] = True
        elif name in WINDOWS:
            found["window_size"] = call.window
        elif name == "softcap":
            found["softcap"] = SOFTCAP
        elif name == "alibi":
            found["alibi_slopes"] = machine.float32([2.0 ** (-8 * (i + 1) / h) for i in range(h)])
        elif name == "sinks":
            found["sinks"] = uniform((h,), 0)
        elif name == "dropout":
            found |= {"dropout_p": DROPOUT, "dropout_seed": 1 + seed}
        elif name == "key_mask":
            columns, ends = machine.int32(list(range(n_k))), machine.int32(list(call.filled))
            found["mask"] = (columns[None, :] < ends[:, None])[:, None, None, :]
        elif name == "pair_mask":
            mask = uniform((b, 1, n_q, n_k), 1) > -1.2816  # nine in ten
            mask[..., 0] = True  # no row is empty: PyTorch gives NaN there
            found["mask"] = mask
        elif name == "causal_mask":
            rows, columns = machine.int32(list(range(n_q))), machine.int32(list(range(n_k)))
            mask = columns[None, :] <= rows[:, None] + (n_k - n_q)
            mask[..., 0] = True
            found["mask"] = mask[None, None]
        elif name == "key_mask_all":
            found["mask"] = _true(machine, (b, 1, 1, n_k))
        elif name == "pair_mask_all":
            found["mask"] = _true(machine, (1, 1, n_q, n_k))
        elif name in BIASES:
            shape = {"bias_batch": (b, h), "bias_shared": (1, 1), "bias_zero": (1, 1)}.get(name, (1, h))
            dtype = "float32" if name == "bias_float32" else call.given
            bias = machine.random((*shape, n_q, n_k), dtype, seed + 20)
            found["bias"] = bias * 0 if name == "bias_zero" else bias
    if "deterministic" in call.ways:
        found["deterministic"] = True
    if "tf32" in call.ways:
        found["allow_tf32"] = True
    return found


def _true(machine, shape):
    return machine.nans(shape, "float32") != 0  # NaN differs from everything


@dataclass
class Made:
    """A system that takes a call. launch(i) returns the output, or (dq, dk, dv)."""

    name: str
    launch: Callable[[int], Any]
    kernel: str | None = None
    heads_second: bool = False  # the answer is (batch, heads, seqlen, headdim)


def ours(arrays: Arrays, kernel: str | None = None, threads: int = 0) -> Made:
    """flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache or backward, outputs given."""
    call, machine, options = arrays.call, arrays.machine, dict(arrays.options)
    if kernel:
        options["kernel"] = kernel
    if machine.device == "cpu" and threads:
        options["num_threads"] = threads
    q, k, v = arrays.q, arrays.k, arrays.v
    factors: dict[str, Any] = {}
    try:
        if call.is_cache:
            if call.page:
                k, v, table = arrays.paged()
                options["block_table"] = table
            options |= arrays.cache
            out = machine.nans(_shape(q, call.headdim_v), call.given)
            options.pop("allow_tf32", None)
            plan = kvcache_query(q, k, v, **options)
            launch = lambda i: flash_attn_with_kvcache(q, k, v, out=out, **options)  # noqa: E731
        else:
            if call.dtype == "float8_e4m3fn":
                (q, a), (k, b), (v, c) = (quantize_fp8(x) for x in (q, k, v))
                factors = {"q_descale": a, "k_descale": b, "v_descale": c}
            attention = flash_attn_varlen_func if arrays.lengths else flash_attn_func
            out = machine.nans(_shape(q, call.headdim_v), call.given)
            everything = options | factors
            if not call.backward:
                plan = query(q, k, v, *arrays.lengths, **everything)
                launch = lambda i: attention(q, k, v, *arrays.lengths, out=out, **everything)  # noqa: E731
            else:
                plan = backward_query(q, k, v, *arrays.lengths, **options)
                if plan.status == "FA_OK":
                    forward = {name: value for name, value in options.items() if name not in ("kernel",)}
                    _, lse = attention(q, k, v, *arrays.lengths, out=out, return_lse=True, **forward)
                    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
                    places = {
                        f"d{n}": machine.nans(tuple(x.shape), call.dtype) for n, x in zip("qkv", (q, k, v), strict=True)
                    }
                    given = dict(zip(names, arrays.lengths, strict=False)) | options | places
                    launch = lambda i: backward(arrays.dout, q, k, v, out, lse, **given)  # noqa: E731
    except FlashAttnError as error:
        raise Refused(first_line(error)) from None
    if plan.status != "FA_OK":
        raise Refused(first_line(plan.error))
    return Made("ours", launch, plan.kernel)


def _shape(q, headdim_v) -> tuple[int, ...]:
    return (*q.shape[:-1], headdim_v)


# ---- peers, all through PyTorch ----

USUAL = {"cuda": ("cudnn", "fa2", "efficient", "fa3", "fa4"), "cpu": ("torch",)}


def prepared(name: str, arrays: Arrays) -> bool:
    """Makes what `rehearse` needs on the device. Returns whether it has something to do. cuDNN compiles a plan for each
    call, 0.4 s of the host's time, and keeps it; the others load code. A capture of dropout would move PyTorch's
    generator."""
    call = arrays.call
    if name not in ("cudnn", "fa2", "efficient") or arrays.machine.framework != "torch" or arrays.lengths:
        return False
    if {"dropout", "softcap", "sinks"} & set(call.options):
        return False
    try:
        if not _is_plain(call):
            _dense(arrays)
    except Exception:  # as later, where it counts
        return False
    return True


def rehearse(name: str, arrays: Arrays) -> None:
    """Has a peer that is `prepared` do the host's work of its first launch, without work for the device."""
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # as later, where it counts
        warnings.simplefilter("ignore")
        arrays.machine.rehearse(lambda: _sdpa(name, arrays).launch(0))
    arrays.machine.synchronize()


def peer(name: str, arrays: Arrays) -> Made:
    """A peer, tried once. Refused says why it does not take the call."""
    machine = arrays.machine
    with warnings.catch_warnings():  # PyTorch explains a refusal in warnings
        warnings.simplefilter("ignore")
        try:
            made = (_flash_attention if name in PACKAGES else _packed if arrays.lengths else _sdpa)(name, arrays)
            made.launch(0)
            machine.synchronize()
            return made
        except Refused:
            raise
        except Exception as error:  # whatever a peer raises, ours is timed without it
            why = first_line(error)
    made = None  # out of memory: what the peer has allocated must not be missing for the others
    machine.release()
    raise Refused(why)


def _visible(arrays: Arrays):
    """The bool array that says what a row sees, broadcastable to (batch, heads, seqlen_q, seqlen_k), of everything that
    hides scores in this call; None where nothing does. Causal alone on a square is not in it."""
    call, machine = arrays.call, arrays.machine
    left, right = call.window
    mask = arrays.options.get("mask")
    if call.is_cache:
        columns, ends = machine.int32(list(range(call.seqlen_k))), arrays.cache["cache_seqlens"]
        mask = (columns[None, :] < ends[:, None])[:, None, None, :]
    if left < 0 and right < 0 or (right == 0 and left < 0 and call.seqlen_q == 1):
        return mask
    rows, columns = machine.int32(list(range(call.seqlen_q))), machine.int32(list(range(call.seqlen_k)))
    ends = arrays.cache["cache_seqlens"][:, None] if call.is_cache else machine.int32([[call.seqlen_k]])
    stands = (rows[None, :] + ends - call.seqlen_q)[:, None, :, None]
    seen = columns[None, None, None, :] <= stands + right if right >= 0 else None
    if left >= 0:
        near = columns[None, None, None, :] >= stands - left
        seen = near if seen is None else seen & near
    return seen if mask is None else seen & mask


DENSE = 1 << 32  # numbers in an array that a peer needs and ours does not, above which nobody would make it


def _dense(arrays: Arrays):
    """The attn_mask that a user of scaled_dot_product_attention passes for the options that it does not know: True
    where a row sees a key, or a bias of q's dtype. One array serves all peers, and making it is not timed."""
    call, torch, options = arrays.call, arrays.machine.torch, arrays.options
    if arrays.dense is not None:
        return arrays.dense
    scores = call.seqlen_q * call.seqlen_k
    batch = call.batch if call.is_cache or {"key_mask", "pair_mask", "bias_batch"} & set(call.options) else 1
    heads = call.nheads if {"alibi", *BIASES} & set(call.options) else 1
    if scores * heads * batch > DENSE:
        raise Refused(f"its mask would have {scores * heads * batch} numbers")
    mask, bias = _visible(arrays), options.get("bias")
    if "alibi" in call.options:
        rows = torch.arange(call.seqlen_q, device=arrays.q.device)[:, None] + (call.seqlen_k - call.seqlen_q)
        ends = torch.arange(call.seqlen_k, device=arrays.q.device)[None, :]
        if call.is_cache:
            rows = rows + (arrays.cache["cache_seqlens"] - call.seqlen_k)[:, None, None, None]
        distance = (rows - ends).abs_().float()
        alibi = -options["alibi_slopes"][:, None, None] * distance
        bias = alibi if bias is None else alibi + bias
    if bias is not None:
        bias = bias.to(arrays.q.dtype)
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        mask = bias if mask is None else bias.masked_fill(~mask, -math.inf)
    arrays.dense = mask
    return mask


def _is_plain(call: Call) -> bool:
    """Whether scaled_dot_product_attention takes the call without a mask: nothing is hidden, or a square is causal."""
    hides = set(call.options) - {"dropout"}
    return not call.is_cache and (not hides or (hides == {"causal"} and call.seqlen_q == call.seqlen_k))


def _sdpa(name: str, arrays: Arrays) -> Made:
    """scaled_dot_product_attention with one backend, or with the one that PyTorch picks."""
    call, torch = arrays.call, arrays.machine.torch
    if {"softcap", "sinks"} & set(call.options):
        raise Refused("scaled_dot_product_attention has neither softcap nor sinks")
    more: dict[str, Any] = {"dropout_p": DROPOUT} if "dropout" in call.options else {}
    hides = set(call.options) - {"dropout"}
    if hides and _is_plain(call):
        more["is_causal"] = True
    elif hides == {"causal"} and not call.is_cache and name in ("fa2", "efficient"):
        from torch.nn.attention.bias import causal_lower_right  # elsewhere it would become an array at each call

        more["attn_mask"] = causal_lower_right(call.seqlen_q, call.seqlen_k)
    elif hides or call.is_cache:
        if name == "fa2":
            raise Refused("FlashAttention-2 in PyTorch takes no mask")
        more["attn_mask"] = _dense(arrays)
    one_for_all = name == "efficient" and call.group > 1 and call.nheads_k == 1 and not call.backward
    if call.group > 1 and not one_for_all:
        more["enable_gqa"] = True
    views = [x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v)]
    if one_for_all:  # it has no grouped heads, but takes a view that repeats the only one
        views[1:] = [x.expand(-1, call.nheads, -1, -1) for x in views[1:]]

    def forward(q, k, v):
        with only(name), _modes(torch, call):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)

    if not call.backward:
        return Made(name, lambda i: forward(*views), heads_second=True)
    leaves = [x.detach().requires_grad_() for x in views]
    graph = backward_of(torch, [forward(*leaves)], [leaves], [arrays.dout.transpose(1, 2)])

    def launch(i):
        with _modes(torch, call):
            return graph(0)

    return Made(name, launch, heads_second=True)


@contextlib.contextmanager
def _modes(torch, call: Call):
    """PyTorch's switches as the call wants them. With deterministic a backend that has no such order refuses."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    wanted = "deterministic" in call.ways
    with allowing_tf32(torch, "tf32" in call.ways):
        if not wanted:
            yield
            return
        try:
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # a fill of each new array would be timed
            yield
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _packed(name: str, arrays: Arrays) -> Made:
    """FlashAttention-2 on packed sequences, as it comes with PyTorch; on a CPU one call a sequence."""
    call, torch = arrays.call, arrays.machine.torch
    if set(call.options) - {"causal"}:
        raise Refused("packed sequences with options have no peer in PyTorch")
    causal = "causal" in call.options
    if name == "torch":
        starts = [0, *itertools.accumulate(call.lengths)]
        gqa = {"enable_gqa": True} if call.group > 1 else {}

        def attention(q, k, v):
            parts = []
            for a, b in itertools.pairwise(starts):
                one = [x[None, a:b].transpose(1, 2) for x in (q, k, v)]
                parts.append(torch.nn.functional.scaled_dot_product_attention(*one, is_causal=causal, **gqa))
            return torch.cat([part[0].transpose(0, 1) for part in parts])

    elif name == "fa2":
        function, more = varlen_options(torch, causal, call.group > 1)

        def attention(q, k, v):
            return function(q, k, v, *arrays.lengths, **more)

    else:
        raise Refused(f"{name} has no packed sequences in PyTorch")
    return _with_gradients(name, arrays, attention)


def _flash_attention(name: str, arrays: Arrays) -> Made:
    """FlashAttention-3 or -4 through its own package: causal, windows, softcap; FlashAttention-3 over caches, too."""
    call = arrays.call
    if set(call.options) - {"causal", "softcap", *WINDOWS} or "tf32" in call.ways:
        raise Refused(f"{PACKAGES[name]} has not these options")
    if call.dtype == "float32":
        raise Refused(f"{PACKAGES[name]} takes no float32")
    if call.is_cache and name != "fa3":
        raise Refused(f"{PACKAGES[name]} is not timed over caches")
    options: dict[str, Any] = {"causal": "causal" in call.options}
    if set(call.options) & set(WINDOWS):
        options["window_size"] = call.window if name == "fa3" else tuple(None if n < 0 else n for n in call.window)
    if "softcap" in call.options:
        options["softcap"] = SOFTCAP
    if "deterministic" in call.ways:
        options["deterministic"] = True
    q, k, v = arrays.q, arrays.k, arrays.v
    kind = "flash_attn_with_kvcache" if call.is_cache else "flash_attn_varlen_func" if arrays.lengths else ""
    function = fa_function(name, kind or "flash_attn_func")
    if call.is_cache:
        options |= arrays.cache
        if call.page:
            k, v, options["page_table"] = arrays.paged()
    elif arrays.lengths:
        starts, _, longest, _ = arrays.lengths
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attention(q, k, v):
        out = function(q, k, v, **options)
        return out[0] if isinstance(out, tuple) else out

    if call.is_cache:
        return Made(name, lambda i: attention(q, k, v))
    return _with_gradients(name, arrays, attention)


def _with_gradients(name: str, arrays: Arrays, attention) -> Made:
    q, k, v = arrays.q, arrays.k, arrays.v
    if not arrays.call.backward:
        return Made(name, lambda i: attention(q, k, v))
    torch = arrays.machine.torch
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with _modes(torch, arrays.call):
        graph = backward_of(torch, [attention(*leaves)], [leaves], [arrays.dout])

    def launch(i):
        with _modes(torch, arrays.call):
            return graph(0)

    return Made(name, launch)


def dtypes_of(machine) -> tuple[str, ...]:
    """The dtypes that a machine's arrays have."""
    known = [name for name in DTYPES if name != "float8_e4m3fn" or machine.device == "cuda"]
    found = []
    for name in known:
        try:
            machine.random((1,), "float32" if name == "float8_e4m3fn" else name, 0)
            found.append(name)
        except Exception:  # a framework without this dtype
            continue
    return tuple(found)
