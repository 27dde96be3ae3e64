"""The host as the engine's device: NumPy arrays, and this library for all operations of a step with few rows.

A decode step is recorded once (_core/recordings.py) and replayed as one call of the library. BLAS computes products of
many rows, as in a long prompt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .._core import recordings
from ..errors import BadArgument, WorkspaceTooSmall
from ..kvcache import flash_attn_with_kvcache
from ..transformer import ops
from ..transformer._safetensors import numpy_dtype
from ..transformer.quantized import PackedW4, W4Weight
from .config import Config
from .sampling import Rule

DTYPES = ("float32", "float16", "bfloat16")
NARROW_ROWS = 16  # the library computes products of up to this many rows, BLAS larger ones


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise BadArgument(f"dtype={dtype!r} is none of {', '.join(DTYPES)}")


def in_order(linear: Callable[..., Any], products: Sequence[Mapping[str, Any]]) -> list[Any]:
    """A device's `linears`, by its `linear`: see Host.linears."""
    results = []
    for product in products:
        earlier = {name: results[at] for name in ("x", "residual") if isinstance(at := product.get(name), int)}
        results.append(linear(**{**product, **earlier}))
    return results


class Host:
    """dtype: the type of q, k, v and the cache. matrix_dtype: the type of the matrices, float32 or 16 bits; the library
    reads 16-bit matrices as they are, BLAS gets a float32 copy. Sums are float32."""

    name, xp = "cpu", np
    between = np.dtype(np.float32)  # for results that only feed the next product: rounding them would gain nothing

    def __init__(self, dtype: str = "float32", matrix_dtype: str = "float32"):
        check_dtype(dtype)
        check_dtype(matrix_dtype)
        self.dtype, self.matrix_dtype = numpy_dtype(dtype), numpy_dtype(matrix_dtype)

    # ---- weights ----

    def matrix(self, *parts: Any, pair: bool = False) -> Any:
        """The parts stacked into one matrix. A 4-bit weight is a single part. pair: it is a SwiGLU's gate above its
        up."""
        if isinstance(parts[0], W4Weight):
            return parts[0].to(self.xp.asarray).pack(self.matrix_dtype.name, pair=pair)
        return self.stack(parts, self.matrix_dtype)

    def vector(self, *parts: np.ndarray) -> np.ndarray:
        return self.stack(parts, np.dtype(np.float32))

    def stack(self, parts: Sequence[Any], dtype: np.dtype) -> np.ndarray:
        arrays = [np.asarray(part).astype(dtype, copy=False) for part in parts]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    # ---- the operations of a forward pass ----

    def array(self, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """The result of compute(), which must not call the library. A replay computes it again into the same array."""
        result = compute()
        self.do(lambda: np.copyto(result, compute()), now=False)
        return result

    def do(self, function: Callable[[], Any], now: bool = True) -> None:
        """Calls the function, now and in every replay."""
        if now:
            function()
        if recording := recordings.current():
            recording.function(function)

    def embed(self, embedding: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self.array(lambda: embedding[tokens.ravel()].astype(np.float32, copy=False))

    def linear(self, x, weight, norm=None, eps=0.0, bias=None, residual=None, swiglu=False, out_dtype=None):
        """rms(x) weight^T + bias + residual; with swiglu, silu of the first half of the columns times the second. The
        result is of out_dtype (None: float32)."""
        out_dtype = out_dtype or np.dtype(np.float32)
        if isinstance(weight, PackedW4) or len(x) <= NARROW_ROWS:
            return ops.linear(x, weight, bias, norm, eps, residual, swiglu, out_dtype=out_dtype.name)
        product = lambda: self._product(x, weight, norm, eps, bias, residual, swiglu)  # noqa: E731
        return self.array(lambda: product().astype(out_dtype, copy=False))

    def _product(self, x, weight, norm, eps, bias, residual, swiglu) -> np.ndarray:
        """`linear` by BLAS."""
        x = x.astype(np.float32, copy=False)
        if norm is not None:
            mean_square = (x * x).sum(-1, keepdims=True) * (1 / x.shape[-1])
            x = x * norm / np.sqrt(mean_square + eps)
        y = x @ weight.astype(np.float32, copy=False).T
        if bias is not None:
            y += bias
        if swiglu:
            columns = y.shape[1] // 2
            gate, up = y[:, :columns], y[:, columns:]
            half = gate * 0.5  # silu through tanh, which cannot overflow
            return (half + half * np.tanh(half)) * up
        return y if residual is None else residual + y

    def linears(self, products: Sequence[Mapping[str, Any]], ahead: Sequence[Any] = ()) -> list[np.ndarray]:
        """The results of linear(**product) for each product. An integer as x or residual stands for the result of that
        product. ahead: the matrices of the products after the next attention, which a device may fetch early."""
        return in_order(self.linear, products)

    def attend(self, q, k, v, cache_k, cache_v, rows, rope, config: Config, kernel: str | None = None) -> Any:
        """Rotates q and k, appends k and v to the cache, and attends, in one call: (batch, seqlen, nheads, headdim)."""
        if rows.table is None:
            cache_k, cache_v = (c[rows.first : rows.first + len(q)] for c in (cache_k, cache_v))
        return flash_attn_with_kvcache(
            q, cache_k, cache_v, k, v, *rope, cache_seqlens=rows.lengths, block_table=rows.table, causal=True,
            window_size=(config.window - 1, -1), rotary_interleaved=config.rope_interleaved, kernel=kernel,
            programmatic=True,  # safe: cache and lengths were written before the step's first kernel, a plain launch
        )  # fmt: skip

    # ---- for the engine ----

    def scope(self) -> contextlib.AbstractContextManager:
        """The context in which the engine does everything."""
        return contextlib.nullcontext()

    ahead = 0  # steps to queue ahead: none, because a step is done when it returns
    reads_unfilled = False  # whether a pass reads positions of a contiguous cache that its sequence has not filled

    def vector_int32(self, values) -> Any:
        return self.xp.asarray(np.asarray(values, np.int32))

    def upload(self, target: np.ndarray, values: np.ndarray) -> None:
        target[...] = values

    def shared(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """int32 memory that the device writes and the host reads: the device's view and the host's."""
        memory = np.zeros(shape, np.int32)
        return memory, memory

    def advance(self, tokens, ring, count, lengths, active) -> None:
        """Ends a step: the tokens go to the host through the ring; active sequences get one position longer."""

        def step() -> None:
            ring[count[0]] = tokens[:, 0]
            np.add(count, 1, count)
            if count[0] == len(ring):
                count.fill(0)
            np.add(lengths, active, lengths)

        self.do(step)

    def sample(self, logits, tokens, rule: Rule, seeds, steps) -> None:
        """Draws tokens (batch, 1) by the rule, as ops.sample; -1 where a row holds a NaN or nothing above -inf."""
        ops.sample(logits, *rule, seeds=seeds, step=steps, out=tokens[:, 0])

    def select(self, tokens, drawn, where) -> None:
        """Copies `drawn` to `tokens` where `where`() is true."""
        self.do(lambda: self.xp.copyto(tokens, drawn, where=where()))

    def longest_bucket(self, longest: int, context: int) -> int:
        """The part of the longest sequence's length that a step depends on: none, because kernels read the lengths."""
        return 0

    def once(self, body: Callable[[], None]) -> Callable[[], None]:
        """A function that repeats the work of body() on the same arrays."""
        return _Replay(body)

    def event(self) -> Callable[[], None]:
        """A function that waits until all work queued so far is done."""
        return lambda: None

    def synchronize(self) -> None:
        """Waits for all work on the device."""


class _Replay:
    """Records a step at its first call and replays it from then on. A replay refuses when its workspace is too small,
    because environment variables now ask for more threads or another kernel. Then the step runs and is recorded anew.
    That is safe: all parts of a step except the last write the same numbers to the same places, and the last cannot
    fail."""

    def __init__(self, body: Callable[[], None]):
        self._body, self._recording = body, None

    def __call__(self) -> None:
        if self._recording is not None:
            with contextlib.suppress(WorkspaceTooSmall):
                return self._recording()
        with recordings.Recording() as recording:
            self._body()
        self._recording = recording
