"""Small calls of every kernel that can be forced and of every operation, with their exact results. They have to be
right in any thread, the first and the thousandth time, and under a memory checker. If a block of the kernel works on
several tiles, segments or items one after another, the call has two for each block of an H200, so that state kept from
one to the next is used.

Imports nothing that touches a GPU: a process may fork after it has made the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import flash_attn_minimal as fa
from flash_attn_lab import reference, reference_ops
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import W4Weight

TOLERANCE = {"float32": 2e-6, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1.5e-2, "float8": 8e-2}  # relative to the norm


@dataclass(frozen=True)
class Sample:
    """A call. `arrays` go to the device with their dtypes; `call` takes them there, and returns results in the order of
    `exact`."""

    name: str
    arrays: dict[str, tuple[np.ndarray, str]]
    call: Callable[..., list[Any]]
    exact: list[np.ndarray]
    tolerance: float
    repeatable: bool = True  # bitwise, by the contract

    def check(self, got: list[np.ndarray]) -> None:
        for i, (x, exact) in enumerate(zip(got, self.exact, strict=True)):
            assert x.shape == exact.shape, f"{self.name}: result {i} has shape {x.shape}, not {exact.shape}"
            finite = np.isfinite(exact)  # an empty row's lse is -inf
            assert (x[~finite] == exact[~finite]).all(), f"{self.name}: result {i} has infinities of its own"
            error = np.linalg.norm((x.astype(np.float64) - exact)[finite]) / max(np.linalg.norm(exact[finite]), 1e-30)
            assert error <= self.tolerance, f"{self.name}: result {i} is off by {error:.3g} of its norm"


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _qkv(batch, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim_v=None):
    shapes = (
        (batch, seqlen_q, nheads, headdim),
        (batch, seqlen_k, nheads_k, headdim),
        (batch, seqlen_k, nheads_k, headdim_v or headdim),
    )
    return [_rounded(_normal(i, *shape)) for i, shape in enumerate(shapes)]


def _rounded(x: np.ndarray) -> np.ndarray:
    """x rounded to 8 bits of fraction, which bfloat16 and float16 can hold, so that the exact result is the same for
    all dtypes."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & np.uint32(0xFFFF0000)).view(np.float32)


STATISTICS = ("max_score", "key_sums")


def _forward(name: str, dtype: str, shape: tuple, tolerance: str = "", statistics=STATISTICS, **options) -> Sample:
    """A forward call. statistics: the names of those that the kernel gives, in the order of the results."""
    q, k, v = _qkv(*shape)
    exact = list(reference.standard_attention(q, k, v, causal=True))
    exact += [getattr(reference, name)(q, k, v, causal=True) for name in statistics]
    options |= {f"return_{name}": True for name in statistics}
    return Sample(
        name,
        {"q": (q, dtype), "k": (k, dtype), "v": (v, dtype)},
        lambda q, k, v: list(fa.flash_attn_func(q, k, v, causal=True, return_lse=True, kernel=name, **options)),
        exact,
        TOLERANCE[tolerance or dtype],
    )


def _hidden(name: str, dtype: str, shape: tuple, **masks: float) -> Sample:
    """A forward call with masks by blocks or of pairs, of which these shares are seen."""
    q, k, v = _qkv(*shape)
    batch, rows, keys, heads, heads_k, _ = shape
    sizes = {"block_mask": (batch, heads_k, -(-rows // 64), -(-keys // 64)), "mask": (batch, heads, rows, keys)}
    arrays = {x: np.random.default_rng(9).random(sizes[x]) < share for x, share in masks.items()}
    return Sample(
        name,
        {"q": (q, dtype), "k": (k, dtype), "v": (v, dtype), **{x: (a, "bool") for x, a in arrays.items()}},
        lambda q, k, v, **on: list(fa.flash_attn_func(q, k, v, **on, causal=True, return_lse=True, kernel=name)),
        list(reference.standard_attention(q, k, v, **arrays, causal=True)),
        TOLERANCE[dtype],
    )


def _cache(
    name: str, dtype: str, lengths, rows, nheads, nheads_k, headdim, headdim_v=None, new=0, cache=None, splits=0
) -> Sample:
    """Sequences of unequal lengths, keys appended or not, the kernel forced. splits: pieces of a sequence's keys; 0
    leaves them to the kernel."""
    batch, lengths = len(lengths), np.array(lengths, np.int32)
    q, k, v = _qkv(batch, max(new, 1), rows, nheads, nheads_k, headdim, headdim_v)
    arrays = {"q": (q, dtype), "k_cache": (k, dtype), "v_cache": (v, dtype), "cache_seqlens": (lengths, "int32")}
    more: dict[str, Any] = {}
    if new:
        more = {
            "k": _rounded(_normal(7, batch, new, nheads_k, headdim)),
            "v": _rounded(_normal(8, batch, new, *v.shape[2:])),
        }
        arrays |= {n: (x, dtype) for n, x in more.items()}
    if cache:
        scale = np.full(nheads_k, 0.05, np.float32)
        k, v = (np.clip(np.rint(x / 0.05), -127, 127).astype(np.int8) for x in (k, v))
        arrays |= {
            "k_cache": (k, "int8"),
            "v_cache": (v, "int8"),
            "k_scale": (scale, "float32"),
            "v_scale": (scale, "float32"),
        }
        more |= {"k_scale": scale, "v_scale": scale}
    out, lse = reference.kvcache_attention(q, k, v, cache_seqlens=lengths, causal=True, **more)

    def call(**on):
        options = {"causal": True, "return_softmax_lse": True, "num_splits": splits, "kernel": name}
        return list(fa.flash_attn_with_kvcache(**on, **options))

    return Sample(name, arrays, call, [out, lse], TOLERANCE[dtype])


def _shared(
    name: str, groups: int, members: int, keys: int, own: int, nheads: int, nheads_k: int, headdim: int, splits=1
) -> Sample:
    """Groups of sequences that share `keys` keys in pages of 16, each with `own` keys after them. With num_splits a
    GPU shares any number of keys."""
    dtype, page, batch = "bfloat16", 16, groups * members
    common, rest = keys // page, -(-own // page)
    q, k, v = _qkv(batch, 1, page, nheads, nheads_k, headdim)
    pages = groups * common + batch * rest
    k, v = (_rounded(_normal(seed, pages, page, nheads_k, headdim)) for seed in (7, 8))
    order = np.random.default_rng(9).permutation(batch)  # the members of a group lie anywhere in the batch
    shared = np.arange(groups * common).reshape(groups, common)[order % groups]
    table = np.concatenate([shared, groups * common + np.arange(batch * rest).reshape(batch, rest)], 1).astype(np.int32)
    lengths = np.full(batch, common * page + own, np.int32)
    where = {"cache_seqlens": (lengths, "int32"), "block_table": (table, "int32")}
    exact = reference.kvcache_attention(q, k, v, cache_seqlens=lengths, block_table=table)
    options = {"return_softmax_lse": True, "num_splits": splits, "kernel": name, "shared_prefix": True}
    return Sample(
        name,
        {"q": (q, dtype), "k_cache": (k, dtype), "v_cache": (v, dtype), **where},
        lambda **on: list(fa.flash_attn_with_kvcache(**on, **options)),
        list(exact),
        TOLERANCE[dtype],
    )


def _float8(name: str, batch: int = 20) -> Sample:
    q, k, v = (np.clip(_rounded(x), -3, 3) for x in _qkv(batch, 300, 300, 3, 3, 64))
    codes = [np.rint(x * 4) / 4 for x in (q, k, v)]  # quarters up to 3 are e4m3 numbers
    out, _ = reference.standard_attention(*codes, causal=True)
    ones = {f"{n}_descale": (np.ones((batch, 3), np.float32), "float32") for n in "qkv"}
    return Sample(
        name,
        {n: (x, "float8_e4m3fn") for n, x in zip("qkv", codes, strict=True)} | ones,
        lambda **on: [fa.flash_attn_func(**on, causal=True, kernel=name, fast_accum="fast" in name)],
        [out],
        TOLERANCE["float8"],
    )


def _backward(name: str, dtype: str, shape: tuple, deterministic: bool) -> Sample:
    q, k, v = _qkv(*shape)
    dout = _rounded(_normal(5, *q.shape[:3], v.shape[3]))
    out, lse = reference.standard_attention(q, k, v, causal=True)
    dlse = _normal(6, *lse.shape)
    exact = reference.standard_attention_backward(dout, q, k, v, dlse=dlse, causal=True)
    arrays = {n: (x, dtype) for n, x in {"dout": dout, "q": q, "k": k, "v": v, "out": out.astype(np.float32)}.items()}

    def call(**on):
        return list(fa.backward(**on, causal=True, deterministic=deterministic, kernel=name))

    return Sample(
        name,
        arrays | {"lse": (lse.astype(np.float32), "float32"), "dlse": (dlse, "float32")},
        call,
        [exact.dq, exact.dk, exact.dv],
        TOLERANCE[dtype],
        deterministic,
    )


def _linear(name: str, rows: int, out_features: int, in_features: int, dtype: str) -> Sample:
    x, w = _rounded(_normal(1, rows, in_features)), _rounded(_normal(2, out_features, in_features))
    return Sample(
        name,
        {"x": (x, dtype), "weight": (w, dtype)},
        lambda x, weight: [ops.linear(x, weight, kernel=name)],
        [reference_ops.linear(x, w)],
        TOLERANCE[dtype],
    )


def _w4(
    name: str, rows: int, out_features: int, in_features: int, chain: bool = False, x_type: str = "bfloat16"
) -> Sample:
    x = _rounded(_normal(1, rows, in_features))
    plain = W4Weight.quantize(_normal(2, out_features, in_features), "nvfp4")
    exact = reference_ops.linear(x, plain.dequantize().astype(np.float64))
    parts = {
        "codes": (plain.codes, "uint8"),
        "scales": (plain.scales, "uint8"),
        "factor": (plain.tensor_scale, "float32"),
    }

    def call(x, codes, scales, factor):
        weight = W4Weight("nvfp4", codes, scales, factor, in_features).pack("bfloat16")
        if chain:
            return ops.linear_chain([{"x": x, "weight": weight, "out_dtype": "float32"}] * 2, kernel=name)
        return [ops.linear(x, weight, out_dtype="float32", kernel=name)]

    return Sample(name, {"x": (x, x_type), **parts}, call, [exact] * (2 if chain else 1), TOLERANCE["float16"])


def _small_operations() -> list[Sample]:
    x, weight = _normal(1, 300, 1000), _normal(2, 1000)
    logits = _normal(3, 5, 5000)
    cos, sin = _normal(4, 300, 32), _normal(5, 300, 32)
    heads = _normal(6, 2, 300, 3, 64)
    out_a, out_b, lse_a, lse_b = heads, _normal(7, *heads.shape), _normal(8, 2, 3, 300), _normal(9, 2, 3, 300)
    merged = reference.merge(out_a, lse_a, out_b, lse_b)
    as32 = lambda **arrays: {n: (x, "float32") for n, x in arrays.items()}  # noqa: E731
    return [
        Sample(
            "rms_norm",
            as32(x=x, weight=weight),
            lambda **on: [ops.rms_norm(**on)],
            [reference_ops.rms_norm(x, weight)],
            2e-6,
        ),
        Sample("swiglu", as32(gate_up=x), lambda **on: [ops.swiglu(**on)], [reference_ops.swiglu(x)], 2e-6),
        Sample(
            "rope",
            as32(x=heads, cos=cos, sin=sin),
            lambda **on: [ops.rope(**on)],
            [reference_ops.rope(heads, cos, sin)],
            2e-6,
        ),
        Sample("sample", as32(logits=logits), lambda **on: [ops.sample(**on)], [logits.argmax(1)], 0.0),
        Sample(
            "merge",
            as32(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b),
            lambda **on: list(fa.merge(**on)),
            list(merged),
            2e-6,
        ),
        Sample(
            "quantize_fp8", as32(x=heads), lambda x: [fa.quantize_fp8(x)[1]], [np.abs(heads).max((1, 3)) / 448], 2e-6
        ),
    ]


MANY = tuple(40 + 13 * i % 351 for i in range(110))  # 440 key heads: three for each multiprocessor of an H200
LONG = tuple(40 + 13 * i % 351 for i in range(34))  # 136 key heads: more than an H200 has multiprocessors


Makers = list[Callable[..., Sample]]  # partial(function, name, ...): only the wanted exact results are computed


def cuda_items(names: list[str] | None = None) -> Makers:
    """Calls of the kernels whose blocks take one piece of work after another, with at least three pieces for each of
    the 132 blocks of an H200. Only the third piece uses state that the first has left, such as the phase of a barrier.

    tiles      wgmma_sm90, wgmma_wide_sm90 (66 pairs of blocks), fp8: rows of q, at most 192 of a head
    segments   wgmma_split_sm90, decode_ring_sm90, decode_split_sm80, decode_wide_sm80, decode_lanes_sm80: keys of a
               head of a sequence
    items      decode_prefix_sm80, decode_prefix_sm90: keys of a key head of a group
    key blocks wgmma_sm90, wgmma_pair_sm90 backward: 128 keys, or fewer, of a key head; the pair's blocks take one each
    row tiles  of 4-bit weights: 128 rows, or 16 in few_w4_sm90, mma_w4 and chain_w4_sm90; walks of linear_gemv_sm80
    """
    half, sums = "bfloat16", ("key_sums",)
    makers = [
        *(partial(_forward, "wgmma_sm90", half, (52, 200, 230, 4, 2, headdim)) for headdim in (64, 128, 256)),
        *(partial(_hidden, "wgmma_sm90", half, (52, 200, 330, 4, 2, d), block_mask=0.5) for d in (64, 128, 256)),
        *(partial(_hidden, "wgmma_sm90", half, (52, 200, 330, 4, 2, d), mask=0.5) for d in (64, 128, 256)),
        *(partial(_forward, "wgmma_wide_sm90", half, (18, 200, 230, 6, 2, wide), "", sums) for wide in (320, 512)),
        *(partial(_hidden, "wgmma_wide_sm90", half, (18, 200, 330, 6, 2, wide), mask=0.5) for wide in (320, 512)),
        partial(_forward, "wgmma_split_sm90", half, (210, 100, 130, 4, 2, 128), "", sums),
        partial(_cache, "wgmma_split_sm90", half, MANY, 400, 8, 4, 128, new=3),
        *(partial(_float8, name, 70) for name in ("fp8_sm90", "fp8_fast_sm90")),
        *(partial(_cache, "decode_ring_sm90", half, MANY, 400, 8, 4, headdim) for headdim in (64, 128)),
        partial(_cache, "decode_ring_sm90", half, MANY, 400, 8, 4, 128, cache="int8"),
        partial(_cache, "decode_split_sm80", half, MANY, 400, 8, 4, 128),
        partial(_cache, "decode_split_sm80", half, MANY, 400, 8, 4, 128, cache="int8"),
        partial(_cache, "decode_wide_sm80", half, MANY, 400, 8, 4, 512),
        *(partial(_shared, f"decode_prefix_{sm}", 200, 2, 128, 20, 4, 4, 64) for sm in ("sm80", "sm90")),
        partial(_cache, "decode_lanes_sm80", "float32", MANY, 400, 8, 4, 64),
        partial(_cache, "decode_mla_sm90", half, MANY, 400, 64, 1, 576, 512),
        *(
            partial(_backward, name, half, (70, 150, 260, 4, 2, headdim), deterministic)
            for name, headdim in (("wgmma_sm90", 64), ("wgmma_sm90", 128), ("wgmma_pair_sm90", 256))
            for deterministic in (False, True)
        ),
        partial(_linear, "linear_gemv_sm80", 3, 50000, 264, half),
        partial(_w4, "few_w4_sm90", 9, 26000, 512),
        partial(_w4, "few_w4_sm90", 9, 26000, 512, x_type="float32"),
        *(partial(_w4, "mma_w4", rows, 26000, 512) for rows in (2, 9, 40)),
        *(partial(_w4, "wgmma_w4_few_sm90", rows, 51200, 256) for rows in (20, 50)),
        partial(_w4, "wgmma_w4_sm90", 64, 51200, 256),
        partial(_w4, "wgmma_w4_sm90", 300, 26000, 256),
        partial(_w4, "wgmma_w4_sm90", 700, 12800, 256),
        partial(_w4, "chain_w4_sm90", 2, 8192, 512, chain=True),
    ]  # fmt: skip
    return [make for make in makers if not names or make.args[0] in names]


def _made(makers: Makers, names: list[str] | None) -> list[Sample]:
    made = [make() for make in makers if not names or make.args[0] in names]
    return made + [sample for sample in _small_operations() if not names or sample.name in names]


def names(device: str) -> list[str]:
    """The names of all samples, each once."""
    makers = _cuda_makers() if device == "cuda" else _cpu_makers()
    return list(dict.fromkeys([*(make.args[0] for make in makers), *(sample.name for sample in _small_operations())]))


def cpu_samples(names: list[str] | None = None) -> list[Sample]:
    return _made(_cpu_makers(), names)


def cuda_samples(names: list[str] | None = None) -> list[Sample]:
    """The samples for a Hopper GPU. On other GPUs some of the kernels refuse."""
    return _made(_cuda_makers(), names)


def _cpu_makers() -> Makers:
    tables = fa.kernel_tables()
    on_cpu = lambda table: [k["name"] for k in tables[table] if k["device"] == "cpu"]  # noqa: E731
    q = np.zeros((1, 1, 1, 8), np.float32)
    served = [name for name in on_cpu("forward") if fa.query(q, q, q, kernel=name).status == "FA_OK"]
    return [
        *(partial(_forward, name, "float32", (2, 70, 130, 4, 2, 40)) for name in served),
        *(partial(_backward, name, "float32", (2, 70, 130, 4, 2, 40), True) for name in served),
        *(partial(_linear, name, 3, 65, 70, "float32") for name in on_cpu("linear")),
        *(partial(_w4, name, 3, 65, 70) for name in on_cpu("w4_linear")),
        *(partial(_w4, name, 3, 65, 70, chain=True) for name in on_cpu("w4_linear_chain")),
    ]


def _built(optional: str) -> list[str]:
    """[optional] if this build has the kernel, else []."""
    return [kernel["name"] for kernel in fa.kernel_tables()["forward"] if kernel["name"] == optional]


def _cuda_makers() -> Makers:
    half = "bfloat16"
    return [
        partial(_forward, "minimal", "float32", (3, 130, 170, 4, 2, 40)),
        partial(_forward, "naive", "float32", (2, 70, 130, 4, 2, 40)),
        partial(_forward, "float32_sm80", "float32", (3, 300, 330, 4, 2, 128), "", ("key_sums",)),
        partial(_forward, "mma_sm80", half, (3, 300, 330, 4, 2, 128)),
        partial(_forward, "mma_tf32_sm80", "float32", (3, 300, 330, 4, 2, 64), "tf32", allow_tf32=True),
        partial(_forward, "wgmma_float32_sm90", "float32", (2, 300, 330, 4, 2, 128), "", ("key_sums",)),
        partial(_forward, "mma_float32_sm80", "float32", (3, 300, 330, 4, 2, 64)),
        partial(_forward, "mma_float32_sm80", "float32", (2, 150, 180, 4, 2, 512)),
        partial(_hidden, "wgmma_float32_sm90", "float32", (2, 300, 330, 4, 2, 128), block_mask=0.5, mask=0.8),
        partial(_forward, "wgmma_sm90", half, (20, 300, 330, 4, 2, 128)),
        partial(_forward, "wgmma_sm90", half, (1, 300, 2100, 4, 2, 64)),  # a speculative maximum
        partial(_hidden, "wgmma_sm90", half, (2, 300, 330, 4, 2, 128), block_mask=0.5, mask=0.8),
        partial(_forward, "mma_sm80", half, (3, 150, 180, 4, 2, 512)),
        partial(_forward, "wgmma_wide_sm90", half, (10, 300, 330, 6, 2, 512), "", ("key_sums",)),
        partial(_forward, "wgmma_wide_sm90", half, (10, 300, 330, 6, 2, 320), "", ("key_sums",)),
        partial(_hidden, "wgmma_wide_sm90", half, (10, 300, 330, 6, 2, 512), mask=0.8),
        *(partial(_forward, name, half, (20, 300, 330, 4, 2, 128), "", ("key_sums",)) for name in _built("cute_sm90")),
        partial(_forward, "wgmma_split_sm90", half, (70, 100, 330, 4, 2, 128), "", ("key_sums",)),
        partial(_cache, "wgmma_split_sm90", half, LONG, 400, 6, 2, 128, new=3),
        partial(_float8, "fp8_sm90"),
        partial(_float8, "fp8_fast_sm90"),
        partial(_cache, "decode_mla_sm90", half, (700, 1000, 3), 1000, 16, 1, 576, 512),
        partial(_cache, "decode_mla_sm90", half, (700, 3), 720, 128, 1, 576, 512),  # pairs of blocks
        partial(_cache, "decode_mla_sm90", half, (700, 3), 720, 16, 1, 576, 512, splits=1),  # many tiles of a block
        partial(_cache, "decode_mla_sm90", half, (700, 3), 720, 128, 1, 576, 512, splits=1),
        partial(_cache, "decode_lanes_cluster_sm90", half, (150, 70, 0), 160, 4, 4, 64, new=1),
        partial(_cache, "decode_lanes_cluster_sm90", half, (150, 70, 0), 160, 4, 4, 64, cache="int8"),
        partial(_cache, "decode_cluster_sm90", half, (700, 300, 0), 1000, 8, 2, 128),
        partial(_cache, "decode_cluster_sm90", half, (700, 300, 0), 1000, 8, 2, 64, cache="int8"),
        partial(_cache, "decode_ring_sm90", half, LONG, 400, 8, 4, 128),
        partial(_cache, "decode_ring_sm90", half, LONG, 400, 8, 4, 128, cache="int8"),
        partial(_cache, "decode_split_sm80", half, LONG, 400, 8, 4, 256),
        partial(_cache, "decode_split_sm80", half, LONG, 400, 8, 4, 128, new=2),
        partial(_cache, "decode_wide_sm80", half, LONG, 400, 8, 4, 512),
        partial(_cache, "decode_wide_sm80", half, LONG, 400, 8, 4, 320, new=2),
        partial(_cache, "decode_split_sm80", half, LONG, 400, 8, 4, 128, cache="int8"),
        *(partial(_shared, f"decode_prefix_{sm}", 2, 9, 400, 40, 8, 2, 128, splits=3) for sm in ("sm80", "sm90")),
        partial(_cache, "decode_lanes_sm80", "float32", LONG, 400, 8, 4, 64),
        *(
            partial(_backward, name, dtype, (3, 200, 260, 4, 2, headdim), deterministic)
            for name, dtype, headdim in (
                ("simple", "float32", 40), ("mma_float32_sm80", "float32", 64),
                ("mma_float32_sm80", "float32", 512), ("wgmma_float32_sm90", "float32", 128),
                ("wgmma_float32_wide_sm90", "float32", 256),
                ("mma_short_sm80", half, 64), ("mma_short_sm80", half, 128), ("mma_short_sm80", half, 256),
                ("mma_sm80", half, 128), ("wgmma_sm90", half, 128),
                ("wgmma_pair_sm90", half, 256), ("mma_wide_sm80", half, 512), ("mma_wide_sm80", half, 321),
            )
            for deterministic in (False, True)
            if deterministic or name != "simple"
        ),
        partial(_linear, "linear_small_sm80", 1, 512, 512, half),
        partial(_linear, "linear_mma_sm80", 4, 512, 512, half),
        partial(_linear, "linear_gemv_sm80", 3, 3000, 1000, half),
        partial(_w4, "small_w4", 1, 512, 512),
        partial(_w4, "few_w4_sm90", 9, 5120, 1024),  # blocks of half a multiprocessor
        partial(_w4, "few_w4_sm90", 9, 5120, 1024, x_type="float32"),  # of a whole one, after the rounding of x
        partial(_w4, "wgmma_w4_few_sm90", 50, 5120, 1024),
        partial(_w4, "wgmma_w4_sm90", 300, 5120, 1024),
        *(partial(_w4, "mma_w4", rows, 5120, 1024) for rows in (2, 9, 40)),  # its three shapes
        partial(_w4, "chain_w4_sm90", 2, 5120, 1024, chain=True),
        partial(_w4, "one_by_one", 2, 5120, 1024, chain=True),
    ]  # fmt: skip
