"""Calls with a cache that are refused on the CPU, each for a different reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flash_attn_minimal as fa

LACKING = {
    "bias": np.zeros((1, 20), np.float32),
    "mask": np.ones((1, 20), bool),
    "q_descale": np.ones(4, np.float32),
    "dropout_p": 0.5,
    "dropout_seed": 3,
    "dropout_offset": 4,
    "top_left": True,
    "deterministic": True,
    "allow_tf32": True,
    "out_dtype": "float16",
    "nonsense": None,
}


@pytest.mark.parametrize("name", LACKING)
def test_options_without_a_meaning_here(name):
    for function in (fa.flash_attn_with_kvcache, fa.kvcache_query):
        for _ in range(3):
            with pytest.raises(TypeError, match=f"got an unexpected keyword argument '{name}'"):
                function(**small(**{name: LACKING[name]}))


def small(**change) -> dict[str, Any]:
    """The arguments of a call that works on the CPU, with changes."""
    call = {
        "q": np.zeros((2, 1, 4, 16), np.float32),
        "k_cache": np.zeros((3, 20, 2, 16), np.float32),
        "v_cache": np.zeros((3, 20, 2, 8), np.float32),
        "cache_seqlens": np.array([5, 19], np.int32),
    }
    return {**call, **change}


def appending(**change) -> dict[str, Any]:
    new = {"k": np.zeros((2, 1, 2, 16), np.float32), "v": np.zeros((2, 1, 2, 8), np.float32)}
    return small(**{**new, **change})


def paged(**change) -> dict[str, Any]:
    return small(**{"block_table": np.array([[0, 99], [1, 2]], np.int32), **change})


def int8(**change) -> dict[str, Any]:
    cache = {f"{n}_cache": np.zeros((3, 20, 2, d), np.int8) for n, d in (("k", 16), ("v", 8))}
    return small(**{**cache, "k_scale": np.ones(2, np.float32), "v_scale": np.ones(2, np.float32), **change})


def rotating(**change) -> dict[str, Any]:
    tables = {"rotary_cos": np.ones((20, 4), np.float32), "rotary_sin": np.zeros((20, 4), np.float32)}
    return appending(**{**tables, **change})


def shared(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "v_cache": call["k_cache"][..., :8]}


def read_only(*shape):
    x = np.zeros(shape, np.float32)
    x.flags.writeable = False
    return x


def lengths(*values):
    return np.array(values, np.int32)


def repeated(*shape, full=(3, 20, 2)):
    """Factors of tokens that repeat along the axes of size 1."""
    x = np.ones(shape, f4)
    return np.lib.stride_tricks.as_strided(x, full, [0 if n == 1 else s for n, s in zip(shape, x.strides, strict=True)])


def strided(shape, strides):
    return np.lib.stride_tricks.as_strided(np.ones(1000, f4), shape, [4 * s for s in strides])


def tokens(**change) -> dict[str, Any]:
    """A call that appends to an int8 cache with a factor for every token."""
    new = {"k": np.zeros((2, 1, 2, 16), f4), "v": np.zeros((2, 1, 2, 8), f4)}
    factors = {name: np.ones((3, 20, 2), f4) for name in ("k_scale", "v_scale")}
    return int8(**{**new, **factors, "cache_seqlens": lengths(5, 19), **change})


def new_in_cache(name: str, cache: str, target: str = "") -> dict[str, Any]:
    """A call whose new keys or values are themselves part of the cache."""
    call = appending(cache_seqlens=lengths(5, 19))
    call[name] = call[cache][:2, 7:8]
    if target:
        call[target] = call[cache][0, :4].reshape(2, 1, 4, 16)[..., :8]
    return call


f4 = np.float32
REFUSED = [
    (small(q=np.zeros((2, 4, 16), f4)), r"q has shape \(2, 4, 16\)"),
    (small(q=np.zeros((2, 1, 4, 16))), "q is float64: expected float32, float16 or bfloat16"),
    (small(k_cache=np.zeros((20, 2, 16), f4)), r"k_cache has shape \(20, 2, 16\): expected \(entries, seqlen_cache"),
    (small(k_cache=np.zeros((3, 20, 2, 24), f4)), r"k_cache has shape .* headdim must agree"),
    (small(v_cache=np.zeros((3, 19, 2, 8), f4)), r"v_cache has shape .* all but headdim must agree"),
    (small(v_cache=np.zeros((3, 20, 2, 0), f4)), "headdim_v=0 is outside 1 .. 512"),
    (small(v_cache=np.zeros((3, 20, 2, 513), f4)), "headdim_v=513 is outside 1 .. 512"),
    (small(k_cache=np.zeros((3, 20, 2, 16), np.float16)), "k_cache is float16, v_cache is float32: expected"),
    (small(k_cache=np.zeros((3, 20, 2, 32), f4)[..., ::2]), "k_cache has stride 2 along its last axis"),
    (small(k_cache=np.zeros((3, 20, 3, 16), f4), v_cache=np.zeros((3, 20, 3, 8), f4)), "nheads=4 is not a multiple of"),
    (small(k_cache=np.zeros((1, 20, 2, 16), f4), v_cache=np.zeros((1, 20, 2, 8), f4)), "has 1 entries, fewer"),
    (small(q=np.zeros((2, 1, 4, 577), f4), k_cache=np.zeros((3, 20, 2, 577), f4)), "headdim=577 is outside 1 .. 576"),
    (shared(rotating()), "v_cache.data=.* is k_cache.data: values that are columns of the keys"),
    (shared(int8(k=np.zeros((2, 1, 2, 16), f4), v=np.zeros((2, 1, 2, 8), f4))), "v_cache.data=.* is k_cache"),
    (small(cache_seqlens=np.array([5, 19])), "cache_seqlens is int64: expected int32"),
    (small(cache_seqlens=lengths(5, 6, 7)), r"cache_seqlens has shape \(3,\): expected \(2,\)"),
    (small(cache_seqlens=lengths(1, 2, 3, 4)[::2]), "cache_seqlens has stride 2"),
    (small(cache_seqlens=lengths(5, 21)), r"cache_seqlens\[1\]=21 and seqlen_new=0 are more than the 20 keys"),
    (small(cache_seqlens=21), "cache_seqlens=21 and 0 new keys are more than the 20 keys of a cache entry"),
    (small(cache_seqlens=-1), "cache_seqlens=-1 is outside 0"),
    (small(cache_seqlens=True), "cache_seqlens=True is neither an integer"),
    (small(cache_seqlens=5.0), "cache_seqlens=5.0 is neither an integer"),
    (appending(cache_seqlens=lengths(5, 20)), r"cache_seqlens\[1\]=20 and seqlen_new=1 are more than the 20 keys"),
    (appending(cache_seqlens=20), "cache_seqlens=20 and 1 new keys are more than the 20 keys"),
    (appending(k=None), "k is None and v is not"),
    (appending(v=None), "v is None and k is not"),
    (appending(k=np.zeros((2, 1, 2, 8), f4)), r"k has shape \(2, 1, 2, 8\): expected \(2, seqlen_new, 2, 16\)"),
    (appending(v=np.zeros((2, 2, 2, 8), f4)), "seqlen_new must agree"),
    (appending(k=np.zeros((2, 1, 2, 16), np.float16)), "k is float16: expected float32"),
    (appending(k=np.zeros((2, 21, 2, 16), f4), v=np.zeros((2, 21, 2, 8), f4)), "=21 is above the 20 keys"),
    (appending(k_cache=read_only(3, 20, 2, 16)), "k_cache is a read-only NumPy array"),
    (appending(v_cache=read_only(3, 20, 2, 8)), "v_cache is a read-only NumPy array"),
    (appending(v_cache=np.broadcast_to(np.zeros(8, f4), (3, 20, 2, 8))), "v_cache is a read-only NumPy array"),
    (small(cache_leftpad=lengths(0, 0, 0)), r"cache_leftpad has shape \(3,\): expected \(2,\)"),
    (small(cache_leftpad=np.zeros(2, np.int64)), "cache_leftpad is int64: expected int32"),
    (small(cache_seqlens=lengths(5, 7), cache_leftpad=lengths(0, 8)), r"cache_leftpad\[1\]=8 is outside 0 .. 7"),
    (small(cache_leftpad=lengths(-1, 0)), r"cache_leftpad\[0\]=-1 is outside 0 .. "),
    (small(attention_chunk=-1), "attention_chunk=-1 is negative"),
    (small(attention_chunk=2.0), "attention_chunk=2.0 is not an integer"),
    (small(attention_chunk=False), "attention_chunk=False is not an integer"),
    (small(cache_batch_idx=lengths(0, 3)), r"cache_batch_idx\[1\]=3 is outside 0 .. 2, the entries of the cache"),
    (small(cache_batch_idx=lengths(-1, 0)), r"cache_batch_idx\[0\]=-1 is outside 0 .. 2"),
    (small(cache_batch_idx=lengths(0)), r"cache_batch_idx has shape \(1,\): expected \(2,\)"),
    (paged(cache_batch_idx=lengths(0, 1)), "cache_batch_idx and block_table are both set"),
    (paged(block_table=lengths(0, 1)), r"block_table has shape \(2,\): expected \(2, pages of a sequence\)"),
    (paged(block_table=np.zeros((2, 2))), "block_table is float64: expected int32"),
    (paged(block_table=np.array([[0], [3]], np.int32)), r"block_table\[1\]\[0\]=3 is outside 0 .. 2, the pages"),
    (paged(block_table=np.array([[-1], [1]], np.int32)), r"block_table\[0\]\[0\]=-1 is outside 0 .. 2, the pages"),
    (paged(cache_seqlens=lengths(21, 1)), r"block_table\[0\]\[1\]=99 is outside 0 .. 2"),
    (paged(cache_seqlens=lengths(5, 41)), r"cache_seqlens\[1\]=41 and seqlen_new=0 .* keys of a row of block_table"),
    (paged(k_cache=np.zeros((3, 0, 2, 16), f4), v_cache=np.zeros((3, 0, 2, 8), f4)), "a page has at least one row"),
    (small(k_scale=np.ones(2, f4)), "k_scale is given, but only an 8-bit cache has factors"),
    (int8(k_scale=None), "k_scale is None: an 8-bit cache needs k_scale and v_scale; quantize_kvcache makes"),
    (int8(v_scale=None), "v_scale is None"),
    (int8(k_scale=np.ones(2)), "k_scale is float64: expected float32"),
    (int8(k_scale=np.ones((3, 20), f4)), r"k_scale has shape \(3, 20\): expected \(2,\), \(3, 1, 2\) or \(3, 20, 2\)"),
    (int8(v_cache=np.zeros((3, 20, 2, 8), f4)), "k_cache is int8, v_cache is float32"),
    (int8(k=np.zeros((2, 1, 2, 16), f4), v=np.zeros((2, 1, 2, 8), f4), k_scale=read_only(3, 20, 2), cache_seqlens=4),
     "k_scale is a read-only NumPy array"),
    (rotating(rotary_sin=None), "rotary_sin is None and rotary_cos is not"),
    (rotating(rotary_sin=np.zeros((20, 3), f4)), "rotary_sin is float32 .*, but rotary_cos is"),
    (rotating(rotary_cos=np.ones((20, 4))), "rotary_cos is float64: expected float32"),
    (rotating(rotary_cos=np.ones((20, 8), f4)[:, ::2]), "rotary_cos has strides .* it must be contiguous"),
    (rotating(rotary_cos=np.ones((20, 9), f4), rotary_sin=np.ones((20, 9), f4)), "rotary_cos has 9 columns"),
    (rotating(rotary_cos=np.ones((0, 4), f4), rotary_sin=np.ones((0, 4), f4)), "rotary_cos has no rows"),
    (rotating(rotary_interleaved=2), "rotary_interleaved=2 is neither True nor False"),
    (tokens(k_scale=repeated(3, 1, 2)), r"k_scale has strides \(2, 0, 1\): appended tokens write factors that"),
    (tokens(v_scale=repeated(3, 20, 1)), "v_scale.head_stride=0 with nheads=2"),
    (tokens(k_scale=repeated(1, 20, 2)), "k_scale.batch_stride=0 with batch=3"),
    (tokens(k_scale=strided((3, 20, 2), (2, 2, 1))), "k_scale.(batch|row)_stride=2 with (batch=3|rows=20)"),
    (tokens(k_scale=strided((3, 20, 2), (40, 1, 1))), "k_scale.(row|head)_stride=1 with (rows=20|nheads=2)"),
    ((lambda f: tokens(k_scale=f, v_scale=f))(np.ones((3, 20, 2), f4)), "k_scale.data=.* overlaps v_scale.data="),
    (appending(cache_seqlens=lengths(5, 9), cache_batch_idx=lengths(2, 2)),
     "cache_batch_idx: sequences 0 and 1 both append to entry 2"),
    (appending(cache_seqlens=lengths(25, 25), block_table=np.array([[0, 2], [1, 2]], np.int32)),
     "block_table: sequences 0 and 1 both append to the same rows of page 2"),
    (new_in_cache("k", "k_cache"), "k_cache.data=.* overlaps k.data="),
    (new_in_cache("v", "v_cache"), "v_cache.data=.* overlaps v.data="),
    (new_in_cache("k", "k_cache", "out"), "out starts at the same address as|out.data=.* overlaps k_cache"),
    ((lambda c: appending(k_cache=c[:3], v_cache=c[1:], v=np.zeros((2, 1, 2, 16), f4)))(np.zeros((4, 20, 2, 16), f4)),
     "k_cache.data=.* overlaps v_cache.data="),
    ((lambda c: appending(q=c[0, :2].reshape(2, 1, 4, 8)[..., :8], k_cache=c[..., :8], k=np.zeros((2, 1, 2, 8), f4)))(
        np.zeros((3, 20, 2, 16), f4)), "k_cache.data=.* overlaps q.data="),
    ((lambda c: small(k_cache=c, out=c[0, :4].reshape(2, 1, 4, 16)[..., 8:]))(np.zeros((3, 20, 2, 16), f4)),
     "out.data=.* overlaps k_cache.data="),
    (small(num_splits=257), "num_splits=257 is outside 0 .. 256"),
    (small(num_splits=-1), "num_splits=-1 is outside 0 .. 256"),
    (small(batch_invariant=3), "batch_invariant=3 is neither True nor False"),
    (small(shared_prefix=True), "shared_prefix=True without a block_table"),
    (paged(shared_prefix=3), "shared_prefix=3 is neither True nor False"),
    (paged(shared_prefix=True, batch_invariant=True, block_table=np.array([[0], [1]], np.int32)),
     "shared_prefix=True with batch_invariant=True: which keys"),
    (small(causal="yes"), "causal='yes' is neither True nor False"),
    (small(out=np.zeros((2, 1, 4, 16), f4)), r"out is float32 \(2, 1, 4, 16\): expected float32 \(2, 1, 4, 8\)"),
    (small(out=read_only(2, 1, 4, 8)), "out is a read-only NumPy array"),
    (small(kernel="no_such"), "no_such"),
    (small(num_threads=5000), "num_threads=5000 is outside 0 .. 4096"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_refused(call, text):
    """A call that is refused changes none of its arrays. They hold random numbers, because zeros appended to a cache of
    zeros would change nothing."""
    rng = np.random.default_rng(0)
    for x in call.values():
        if isinstance(x, np.ndarray) and x.dtype.kind == "f" and x.flags.writeable:
            x[...] = rng.uniform(0.5, 1, x.shape)
        elif isinstance(x, np.ndarray) and x.dtype == np.int8:
            x[...] = rng.integers(-127, 128, x.shape)
    before = {name: x.copy() for name, x in call.items() if isinstance(x, np.ndarray)}
    with pytest.raises((fa.BadArgument, fa.Unsupported), match=text):
        fa.flash_attn_with_kvcache(**call)
    for name, x in before.items():
        np.testing.assert_array_equal(call[name], x)


def test_factors_that_repeat_are_read():
    """A factor that stands for many tokens or heads (stride 0) gives the same result as copies of it."""
    rng = np.random.default_rng(0)
    cache = {n: rng.integers(-127, 128, (3, 20, 2, d)).astype(np.int8) for n, d in (("k_cache", 16), ("v_cache", 8))}
    call = small(**cache, q=rng.standard_normal((2, 1, 4, 16)).astype(f4))
    for shape in ((3, 1, 2), (1, 20, 2), (3, 20, 1), (1, 1, 2), (3, 1, 1), (1, 1, 1)):
        factors = [rng.uniform(0.01, 0.03, shape).astype(f4) for _ in "kv"]
        k_scale, v_scale = [np.broadcast_to(x, (3, 20, 2)) for x in factors]
        out = fa.flash_attn_with_kvcache(**call, k_scale=k_scale, v_scale=v_scale)
        want = fa.flash_attn_with_kvcache(**call, k_scale=k_scale.copy(), v_scale=v_scale.copy())
        np.testing.assert_array_equal(out, want)


def test_factors_of_tokens_where_they_may_lie():
    """Factors interleaved with each other, padded, or in another order. No two share a place, so an append may write
    them."""
    rng = np.random.default_rng(0)
    new = {n: rng.standard_normal((2, 1, 2, d)).astype(f4) for n, d in (("k", 16), ("v", 8))}
    both = np.ones((3, 20, 2, 2), f4)
    swapped, padded = np.ones((2, 20, 3), f4).transpose(2, 1, 0), np.ones((3, 20, 5), f4)[..., :2]
    for k_scale, v_scale in ((both[..., 0], both[..., 1]), (swapped, padded)):
        fa.flash_attn_with_kvcache(**tokens(**new, k_scale=k_scale, v_scale=v_scale))
        for name, factors in (("k", k_scale), ("v", v_scale)):
            for b, row in enumerate((5, 19)):
                np.testing.assert_allclose(factors[b, row], np.abs(new[name][b, 0]).max(axis=-1) / 127, rtol=1e-6)
            assert np.count_nonzero(factors != 1) == 4


def test_caches_in_one_buffer():
    """Keys and values of a token side by side, and an entry for each of two sequences. No place is written twice."""
    rng = np.random.default_rng(0)
    both = np.zeros((3, 20, 2, 24), f4)
    call = appending(k_cache=both[..., :16], v_cache=both[..., 16:], cache_seqlens=lengths(5, 19))
    for name in "kv":
        call[name] = rng.standard_normal(call[name].shape).astype(f4)
    fa.flash_attn_with_kvcache(**call, cache_batch_idx=lengths(2, 0))
    for b, (entry, row) in enumerate(((2, 5), (0, 19))):
        np.testing.assert_array_equal(both[entry, row], np.concatenate([call["k"][b, 0], call["v"][b, 0]], axis=-1))
    assert np.count_nonzero(both) == 2 * 2 * 24


def test_idle_sequences_share_an_entry():
    """Only a sequence that appends needs its own entry; several sequences may read the same full pages."""
    out = fa.flash_attn_with_kvcache(**appending(cache_seqlens=lengths(5, -1), cache_batch_idx=lengths(2, 2)))
    assert np.isfinite(out).all()
    table = np.array([[0, 1], [0, 2]], np.int32)
    fa.flash_attn_with_kvcache(**appending(cache_seqlens=lengths(20, 25), block_table=table))
    shared = np.array([[0, 1], [2, 1]], np.int32)  # rows 0 and 5 of page 1
    fa.flash_attn_with_kvcache(**appending(cache_seqlens=lengths(20, 25), block_table=shared))


def test_the_small_calls_work():
    """The unchanged calls work, so each refusal above has the reason that it names."""
    for call in (small(), appending(cache_seqlens=lengths(5, 19)), paged(), int8(), rotating()):
        out, lse = fa.flash_attn_with_kvcache(**call, return_softmax_lse=True)
        assert out.shape == (2, 1, 4, 8) and lse.shape == (2, 4, 1) and np.isfinite(lse).all()


def test_the_query_needs_no_contents():
    plan = fa.kvcache_query(**paged(), kernel="cpu_portable")
    assert (plan.status, plan.kernel, plan.error) == ("FA_OK", "cpu_portable", "")
    assert plan.workspace_bytes > 0
    assert fa.kvcache_query(**small(num_splits=300)).error == "num_splits=300 is outside 0 .. 256"
