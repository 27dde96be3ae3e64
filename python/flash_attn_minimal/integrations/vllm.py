"""An attention backend for vLLM (0.32 and newer). The entry point `vllm.general_plugins` calls `register`.

    vllm serve MODEL --attention-backend FLASH_ATTN_MINIMAL
    FLASH_ATTN_VLLM_OVERRIDE=CPU_ATTN vllm serve MODEL    # on a CPU, where vLLM lets nobody choose

vLLM has one `Builder` for each group of layers that share a kind of cache. It calls `build` once a step, and
`Impl.forward` for every layer.

In a step each request has its own number of new rows, but a call over a cache has the same number for every sequence.
`build` therefore cuts the rows into at most two calls: the decodes, which vLLM moves to the front, and the others. If
requests of the second call have different numbers of rows, they are cut into tiles. A tile is a sequence of its own
that ends at the key of its last row. The first tile of a request is filled up at its front, with rows whose results
nobody reads.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention import backend as base
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from ..attention import flash_attn_varlen_func
from ..errors import BadArgument, Unsupported
from ..kvcache import flash_attn_with_kvcache

NAME = "FLASH_ATTN_MINIMAL"
OVERRIDE = "FLASH_ATTN_VLLM_OVERRIDE"  # names of vLLM's backends that this one replaces
SHARED_PREFIX = "FLASH_ATTN_VLLM_SHARED_PREFIX"  # 1: decodes of requests with the same first pages read these once
TILE_ROWS = 128  # a multiple of the tiles of the GPU's and the CPU's kernels
_8_BIT = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}
_8_BIT_TOKENS = {"fp8_per_token_head": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}
_FACTORS = 16  # bytes after K and V of a token and head: two float32 factors, and 8 that keep the next row aligned
_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


def register() -> str:
    """Adds this backend to vLLM's registry under NAME, which is also returned, and in the place of the backends that
    $FLASH_ATTN_VLLM_OVERRIDE names."""
    here = f"{__name__}.{Backend.__name__}"
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, here)
        # A process that vLLM spawns unpickles its configuration before it loads the plugins.
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (_member, ())
    for name in os.environ.get(OVERRIDE, "").replace(",", " ").split():
        if name not in AttentionBackendEnum.__members__:
            raise BadArgument(f"{OVERRIDE}={name} is no attention backend of vLLM")
        register_backend(AttentionBackendEnum[name], here)
    return NAME


def _member() -> AttentionBackendEnum:
    return AttentionBackendEnum[register()]


class Backend(base.AttentionBackend):
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16", *_8_BIT, *_8_BIT_TOKENS]
    forward_includes_kv_cache_update = True

    get_name = staticmethod(lambda: NAME)
    get_impl_cls = staticmethod(lambda: Impl)
    get_builder_cls = staticmethod(lambda: Builder)
    supports_head_size = classmethod(lambda cls, head_size: 1 <= head_size <= 512)
    supports_sink = supports_sliding_window = supports_per_head_quant_scales = classmethod(lambda cls: True)
    supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: False)  # Builder cuts by lengths on the host

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """With factors of tokens, a token and head has K, V and _FACTORS more bytes in the cache."""
        if not spec.kv_quant_mode.is_per_token_head or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=spec.head_size + spec.head_size_v + _FACTORS)

    @classmethod
    def supports_combination(cls, head_size, dtype, kv_cache_dtype, *rest: Any) -> str | None:
        if kv_cache_dtype in ("float16", "bfloat16") and str(dtype) != f"torch.{kv_cache_dtype}":
            return f"a {kv_cache_dtype} cache needs a {kv_cache_dtype} model"
        if kv_cache_dtype in _8_BIT_TOKENS and head_size % 2:
            return f"a {kv_cache_dtype} cache needs an even head size: float32 factors lie after K and V"
        return None

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER_DECODER, *_ENCODERS)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Not on a GPU, where prompts and decodes have kernels with different bits, and which of them computes a row
        depends on how the scheduler cuts the prompt."""
        return current_platform.is_cpu()


@dataclass
class Call:
    """Rows first .. end of a step, seen as `sequences` times `rows`."""

    first: int
    end: int
    shape: tuple[int, int]
    lengths: torch.Tensor  # (sequences,) int32, with the keys of the step
    table: torch.Tensor  # (sequences, pages of a sequence) int32
    gather: torch.Tensor | None = None  # tiles: (sequences * rows,) the row, less `first`, that each place takes
    scatter: torch.Tensor | None = None  # and (end - first,) the place from which each row takes its result


@dataclass
class Metadata(base.AttentionMetadata):
    calls: list[Call]
    causal: bool
    starts: torch.Tensor  # (requests + 1,) int32 on the device
    tokens: int
    longest: int
    page_size: int
    pages: torch.Tensor  # (tokens, 1) int32: where each new key goes
    rows: torch.Tensor  # (tokens,) int32: the row in its page; -1 for a token of padding

    def _place(self, slots: torch.Tensor) -> None:
        self.pages, self.rows = self.pages[: len(slots)], self.rows[: len(slots)]
        if len(self.rows) < len(slots):  # keys of encoders, which are in no graph
            self.pages, self.rows = self.pages.new_empty(len(slots), 1), self.rows.new_empty(len(slots))
        self.pages[:, 0] = (slots // self.page_size).clamp_(min=0)
        self.rows.copy_(torch.where(slots < 0, -1, slots % self.page_size))

    slot_mapping = property(None, _place)  # vLLM's builder for cross attention sets it after `build`


class Builder(base.AttentionMetadataBuilder[Metadata]):
    _cudagraph_support = base.AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        most = vllm_config.scheduler_config.max_num_batched_tokens
        most = max(most, vllm_config.compilation_config.max_cudagraph_capture_size or 0)
        # Captured graphs hold these addresses.
        self._pages = torch.zeros(most, 1, dtype=torch.int32, device=device)
        self._rows = torch.zeros(most, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise Unsupported(f"causal is a Tensor: {NAME} makes the same choice for all requests of a step")
        step = Metadata(
            calls=self._calls(common),
            causal=common.causal,
            starts=common.query_start_loc[: common.num_reqs + 1],
            tokens=common.num_actual_tokens,
            longest=common.max_query_len,
            page_size=self.kv_cache_spec.block_size,
            pages=self._pages,
            rows=self._rows,
        )
        step.slot_mapping = common.slot_mapping
        return step

    def _calls(self, common: Any) -> list[Call]:
        requests = common.num_reqs
        starts = common.query_start_loc_cpu[: requests + 1].numpy()
        counts = np.diff(starts)
        calls, decodes = [], 0
        width = int(counts[0]) if requests else 0
        if 0 < width <= self.reorder_batch_threshold:
            decodes = requests if (counts == width).all() else int((counts != width).argmax())
            if not counts[decodes:].any() and requests * width == common.num_actual_tokens:
                decodes = requests  # a graph is captured with padding requests, which have no keys
            calls.append(self._equal(common, 0, decodes, 0, width))
        rest = counts[decodes:]
        if rest.any():
            first = int(starts[decodes])
            if (rest == rest[0]).all():
                calls.append(self._equal(common, decodes, requests, first, int(rest[0])))
            else:
                calls.append(self._tiles(common, decodes, starts[decodes:] - first, first))
        return calls

    def _equal(self, common: Any, request: int, end: int, first: int, width: int) -> Call:
        lengths, table = common.seq_lens[request:end], common.block_table_tensor[request:end]
        return Call(first, first + (end - request) * width, (end - request, width), lengths, table)

    def _tiles(self, common: Any, request: int, starts: np.ndarray, first: int) -> Call:
        """starts: (requests + 1,) the first rows of the requests from `request` on, counted from row `first`."""
        counts = np.diff(starts)
        rows = min(TILE_ROWS, int(counts.max()))
        tiles = -(-counts // rows)
        of = np.repeat(np.arange(len(counts)), tiles)  # the request of each tile
        after = (np.cumsum(tiles)[of] - 1 - np.arange(len(of))) * rows  # rows of the request after the tile
        gather = np.maximum((starts[1:][of] - after)[:, None] - rows + np.arange(rows), 0)
        scatter = np.arange(starts[-1]) + np.repeat(np.cumsum(tiles * rows) - starts[1:], counts)

        def on_device(x: np.ndarray) -> torch.Tensor:
            x = torch.from_numpy(np.ascontiguousarray(x, np.int32))
            return (x.pin_memory() if self.device.type == "cuda" else x).to(self.device, non_blocking=True)

        chosen = on_device(of + request)
        lengths = common.seq_lens.index_select(0, chosen)
        if common.causal:
            lengths -= on_device(after)
        table = common.block_table_tensor.index_select(0, chosen)
        end = first + int(starts[-1])
        return Call(first, end, gather.shape, lengths, table, on_device(gather.ravel()), on_device(scatter))


class Impl(base.AttentionImpl[Metadata]):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None,
        kv_cache_dtype="auto", logits_soft_cap=None, attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None, sinks=None,
    ) -> None:  # fmt: skip
        if kv_cache_dtype not in Backend.supported_kv_cache_dtypes:
            raise Unsupported(f"kv_cache_dtype={kv_cache_dtype}: {NAME} has {Backend.supported_kv_cache_dtypes}")
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads or num_heads, head_size
        self.scale, self.kv_cache_dtype, self.attn_type = float(scale), kv_cache_dtype, attn_type
        self.sliding_window, self.sinks = sliding_window, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        side = -1 if sliding_window is None else sliding_window - 1
        self._options: dict[str, Any] = {"softmax_scale": self.scale, "window_size": (side, side)}
        self._options["softcap"] = logits_soft_cap or 0.0
        self._invariant = bool(envs.VLLM_BATCH_INVARIANT)
        self._shares = os.environ.get(SHARED_PREFIX) == "1"
        # The cache that was seen last, and its views. vLLM clears the attribute of this name when it frees the cache.
        self._k_scale_cache: tuple | None = None

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor | None, value: torch.Tensor | None,
        kv_cache: torch.Tensor, attn_metadata: Metadata | None, output: torch.Tensor,
        output_scale: Any = None, output_block_scale: Any = None,
    ) -> torch.Tensor:  # fmt: skip
        """query, key, value, output: (tokens, heads, head dim), perhaps with padding at the end."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported(f"output_scale is given: {NAME} does not quantize its output")
        step = attn_metadata
        if step is None:  # vLLM measures memory
            return output.fill_(0)
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        options = {**self._options, "alibi_slopes": self.alibi_slopes, "sinks": self.sinks, "causal": step.causal}
        if self.attn_type in _ENCODERS:
            rows = [x[: step.tokens] for x in (query, key, value)]
            ends = (step.starts, step.starts, step.longest, step.longest)
            flash_attn_varlen_func(*rows, *ends, out=output[: step.tokens], **options)
            return output
        if self.sliding_window is not None and not step.causal:
            raise Unsupported(f"sliding_window={self.sliding_window} of a step that is not causal")
        k_cache, v_cache, scales = self._views(layer, kv_cache, output.shape[-1])
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            # Every token is a sequence of its own without a query.
            tokens = min(len(key), len(step.rows))
            new = (x[:tokens, None] for x in (key, value))
            where = {"cache_seqlens": step.rows[:tokens], "block_table": step.pages[:tokens]}
            nothing = query.new_empty(tokens, 0, *query.shape[1:])
            flash_attn_with_kvcache(nothing, k_cache, v_cache, *new, **where, **scales)
        options |= scales
        options["batch_invariant"] = self._invariant
        for call in step.calls:
            keys = {"cache_seqlens": call.lengths, "block_table": call.table}
            q, out = query[call.first : call.end], output[call.first : call.end]
            if call.gather is None:
                out = out.unflatten(0, call.shape)
                few = call.shape[1] * self.num_heads <= 16 * self.num_kv_heads  # rows of a key head: decodes, drafts
                options["shared_prefix"] = self._shares and few and not self._invariant
                flash_attn_with_kvcache(q.unflatten(0, call.shape), k_cache, v_cache, out=out, **keys, **options)
            else:
                options["shared_prefix"] = False
                q = q.index_select(0, call.gather).unflatten(0, call.shape)
                tiles = flash_attn_with_kvcache(q, k_cache, v_cache, **keys, **options)
                torch.index_select(tiles.flatten(0, 1), 0, call.scatter, out=out)
        return output

    def _views(self, layer: Any, kv_cache: torch.Tensor, dim_v: int) -> tuple:
        """K and V of the pages, (pages, page_size, heads, head dim), and the options for their factors. kv_cache:
        (pages, heads, page_size, columns of K and of V), and _FACTORS bytes where tokens have factors."""
        if self._k_scale_cache is None or self._k_scale_cache[0] is not kv_cache:
            pages, dim = kv_cache.transpose(1, 2), self.head_size
            factors: Any = ()
            if self.kv_cache_dtype in _8_BIT_TOKENS:
                factors = pages[..., dim + dim_v :].view(torch.float32).unbind(-1)
            elif self.kv_cache_dtype in _8_BIT:
                factors = [x.expand(self.num_kv_heads) for x in (layer._k_scale, layer._v_scale)]
            if factors:
                pages = pages.view({**_8_BIT, **_8_BIT_TOKENS}[self.kv_cache_dtype])
            scales = dict(zip(("k_scale", "v_scale"), factors, strict=False))
            self._k_scale_cache = kv_cache, (pages[..., :dim], pages[..., dim : dim + dim_v], scales)
        return self._k_scale_cache[1]
