"""JAX: dot_product_attention against that of jax.nn, attention over a cache as a pure function, and merge and the other
operations inside programs. mesh_cases.py has arrays that are spread over devices."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import jax_platforms

jax = pytest.importorskip("jax")
jnp = jax.numpy

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal.jax import (  # noqa: E402
    _custom_call,  # noqa: E402
    dot_product_attention,
    flash_attn_with_kvcache,
)
from flash_attn_minimal.transformer import ops  # noqa: E402
from flash_attn_minimal.transformer.quantized import W4Weight  # noqa: E402

BATCH, ROWS, KEYS, HEADS, HEADS_K, DIM = 2, 19, 23, 4, 2, 16


@pytest.fixture(autouse=True)
def _real_float32():
    with jax.default_matmul_precision("highest"):  # of the reference: a GPU would take tf32
        yield


@pytest.fixture(params=jax_platforms())
def place(request):
    device = jax.devices(request.param)[0]
    return lambda x, dtype=jnp.float32: jax.device_put(jnp.asarray(x, dtype), device)


def normal(place, *shape, dtype=jnp.float32, seed=0):
    return place(np.random.default_rng(seed + sum(shape)).standard_normal(shape), dtype)


def qkv(place, dtype=jnp.float32, batch=(BATCH,)):
    shapes = (*batch, ROWS, HEADS, DIM), (*batch, KEYS, HEADS_K, DIM), (*batch, KEYS, HEADS_K, DIM)
    return [normal(place, *shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def assert_close(got, want, tolerance):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


def both_passes(function, *inputs):
    """The results of a function, and the gradients of a loss of the first result."""

    def loss(*inputs):
        results = function(*inputs)
        first = results[0] if isinstance(results, tuple) else results
        return jnp.sin(first.astype(jnp.float32)).sum(), results

    return jax.jit(jax.value_and_grad(loss, tuple(range(len(inputs))), has_aux=True))(*inputs)


# ---- dot_product_attention ----

CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 5},
    "causal window": {"local_window_size": (6, 2), "is_causal": True, "scale": 0.3},
    "bias": {"bias": (HEADS, ROWS, KEYS)},
    "bias of rows": {"bias": (1, 1, ROWS, 1), "is_causal": True},
    "mask": {"mask": (BATCH, 1, ROWS, KEYS)},
    "mask of keys": {"mask": (1, 1, 1, KEYS), "bias": (BATCH, HEADS, 1, KEYS)},
    "keys that count": {"key_value_seq_lengths": [7, KEYS]},
    "rows that count": {"query_seq_lengths": [ROWS, 4]},
    "everything": {
        "key_value_seq_lengths": [18, KEYS], "query_seq_lengths": [ROWS, 11], "local_window_size": (7, 3),
        "bias": (1, HEADS, ROWS, KEYS), "mask": (1, 1, 1, KEYS), "scale": 0.2,
    },
}  # fmt: skip


def arguments(place, case):
    """(arrays with a gradient, other arguments) of a case."""
    case, arrays = dict(CASES[case]), {}
    if shape := case.pop("bias", None):
        arrays["bias"] = normal(place, *shape)
    if shape := case.pop("mask", None):
        mask = np.random.default_rng(5).random(shape) < 0.7
        mask[..., :2] = True  # jax.nn has another answer for rows that see nothing
        case["mask"] = place(mask, bool)
    for name in ("query_seq_lengths", "key_value_seq_lengths"):
        if name in case:
            case[name] = place(case[name], jnp.int32)
    return arrays, case


@pytest.mark.parametrize("case", CASES)
def test_it_is_jax_nn_s(place, case):
    arrays, options = arguments(place, case)
    inputs = [*qkv(place), *arrays.values()]

    def called(function):
        return lambda q, k, v, *more: function(q, k, v, **dict(zip(arrays, more, strict=True)), **options)

    got, want = (both_passes(called(f), *inputs) for f in (dot_product_attention, jax.nn.dot_product_attention))
    assert_close(got, want, 5e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision(place, dtype):
    """Compared with float32 of the same numbers. The bias has the other 16-bit type."""
    other = jnp.bfloat16 if dtype == jnp.float16 else jnp.float16
    inputs = [*qkv(place, dtype), normal(place, 1, HEADS, 1, KEYS, dtype=other)]
    got = both_passes(functools.partial(dot_product_attention, is_causal=True, return_residual=True), *inputs)
    assert got[0][1][1].dtype == dtype and [x.dtype for x in got[1]] == [dtype, dtype, dtype, other]
    exact = [x.astype(jnp.float32) for x in inputs]
    want = both_passes(functools.partial(jax.nn.dot_product_attention, is_causal=True, return_residual=True), *exact)
    assert_close(got[0][1], want[0][1], 2e-2)
    assert_close(got[1], want[1], 4e-2)


def test_residual_and_three_axes(place):
    inputs = qkv(place, batch=())
    got = both_passes(lambda *a: dot_product_attention(*a, return_residual=True), *inputs)
    want = both_passes(lambda *a: jax.nn.dot_product_attention(*a, return_residual=True), *inputs)
    assert_close(got, want, 5e-5)
    assert got[0][1][1].shape == (ROWS, HEADS)
    gradient = jax.grad(lambda q: dot_product_attention(q, *inputs[1:], return_residual=True)[1].sum())(inputs[0])
    np.testing.assert_array_equal(gradient, 0)


def test_what_does_not_count_is_not_read(place):
    """Rows and keys beyond the lengths hold NaN. The result of a sequence without keys, or without rows, is 0."""
    q, k, v = qkv(place)
    rows, keys = place([0, 6], jnp.int32), place([5, 0], jnp.int32)
    k, v = (x.at[0, 5:].set(jnp.nan).at[1].set(jnp.nan) for x in (k, v))
    q = q.at[0].set(jnp.nan)

    def attend(q, k, v):
        return dot_product_attention(q, k, v, query_seq_lengths=rows, key_value_seq_lengths=keys, return_residual=True)

    (_, (out, residual)), gradients = both_passes(attend, q, k, v)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(residual, -np.inf)
    for x in gradients:
        np.testing.assert_array_equal(x, 0)


def test_no_sequence(place):
    q, k, v = (x[:0] for x in qkv(place))
    none = place([], jnp.int32)
    options = {"query_seq_lengths": none, "key_value_seq_lengths": none}
    (_, out), gradients = both_passes(lambda *a: dot_product_attention(*a, **options), q, k, v)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_a_traced_scale(place):
    """A traced scale has a gradient. With the usual value it changes no bit."""
    inputs = [*qkv(place), place(0.4)]
    got = both_passes(lambda q, k, v, scale: dot_product_attention(q, k, v, scale=scale, is_causal=True), *inputs)
    want = both_passes(
        lambda q, k, v, scale: jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True), *inputs
    )
    assert_close(got, want, 5e-5)
    q, k, v = qkv(place, jnp.bfloat16)
    usual = jax.jit(lambda scale: fa.flash_attn_func(q, k, v, softmax_scale=scale, softcap=3.0))(place(DIM**-0.5))
    np.testing.assert_array_equal(usual, fa.flash_attn_func(q, k, v, softcap=3.0))
    with pytest.raises(fa.BadArgument, match=r"softmax_scale is float32 \(2,\): expected one floating-point number"):
        jax.jit(lambda scale: fa.flash_attn_func(q, k, v, softmax_scale=scale))(jnp.ones(2))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_sinks_and_slopes(place, dtype):
    inputs = [*qkv(place, dtype), normal(place, HEADS, dtype=dtype)]
    slopes = place([0.1, 0.2, 0.3, 0.4], dtype)

    def attend(slopes):
        return lambda q, k, v, sinks: fa.flash_attn_func(q, k, v, sinks=sinks, alibi_slopes=slopes)

    got = both_passes(attend(slopes), *inputs)
    assert got[1][3].dtype == dtype
    want = both_passes(attend(slopes.astype(jnp.float32)), *(x.astype(jnp.float32) for x in inputs))
    assert_close(got[1], want[1], 4e-2)


def test_implementation(place):
    q, k, v = qkv(place)
    ours = dot_product_attention(q, k, v, implementation="flash_attn_minimal")
    assert_close(ours, dot_product_attention(q, k, v, implementation="xla"), 2e-5)
    with pytest.raises(fa.BadArgument, match="implementation='fast' is not one of None, 'flash_attn_minimal', 'xla'"):
        dot_product_attention(q, k, v, implementation="fast")


def test_it_says_what_is_wrong():
    q, k = jnp.zeros((2, 5, 4, 8)), jnp.zeros((2, 6, 2, 8))
    for text, call in {
        r"query has shape \(5,\)": lambda: dot_product_attention(q[0, :, 0, 0], k, k),
        "key has a batch of 1, but query has one of 2": lambda: dot_product_attention(q, k[:1], k),
        "value is float16, but query is float32": lambda: dot_product_attention(q, k, k.astype(jnp.float16)),
        "they do not fit": lambda: dot_product_attention(q, k[..., :4], k),
        "nheads=4 is not a multiple of nheads_k=3": lambda: dot_product_attention(q, *[jnp.zeros((2, 6, 3, 8))] * 2),
        "bias is bool: expected a floating dtype": lambda: dot_product_attention(q, k, k, jnp.ones((5, 6), bool)),
        "mask is float32: expected bool": lambda: dot_product_attention(q, k, k, mask=jnp.ones((5, 6))),
        r"query_seq_lengths is int32 \(3,\)": lambda: dot_product_attention(
            q, k, k, query_seq_lengths=jnp.ones(3, jnp.int32)
        ),
        "is_causal|causal=3": lambda: dot_product_attention(q, k, k, is_causal=3),
        r"local_window_size=\(-1, 2\) is negative": lambda: dot_product_attention(q, k, k, local_window_size=(-1, 2)),
        "local_window_size=2.5 is neither": lambda: dot_product_attention(q, k, k, local_window_size=2.5),
        r"local_window_size=\(1, 2, 3\) is": lambda: dot_product_attention(q, k, k, local_window_size=(1, 2, 3)),
        r"local_window_size=\(1, 'a'\) is": lambda: dot_product_attention(q, k, k, local_window_size=(1, "a")),
        "local_window_size=-1 is negative": lambda: dot_product_attention(q, k, k, local_window_size=-1),
    }.items():
        with pytest.raises(fa.BadArgument, match=text):
            call()


# ---- a cache ----


def test_a_cache_in_a_loop(place):
    """One token at a time in jax.lax.scan. Sequences begin with different lengths."""
    q, k, v = (x[:, :ROWS] for x in qkv(place))
    begin = place([0, 7], jnp.int32)
    before = normal(place, 2, BATCH, 40, HEADS_K, DIM, seed=9)

    def generate(q, k, v, k_cache, v_cache):
        def step(carry, now):
            out, k_cache, v_cache, lse, *_ = flash_attn_with_kvcache(
                now[0][:, None], *carry[:2], now[1][:, None], now[2][:, None], cache_seqlens=carry[2], return_lse=True
            )
            return (k_cache, v_cache, carry[2] + 1), (out[:, 0], lse[..., 0])

        carry, results = jax.lax.scan(step, (k_cache, v_cache, begin), [x.swapaxes(0, 1) for x in (q, k, v)])
        return *(x.swapaxes(0, 1) for x in results), *carry

    out, lse, k_cache, v_cache, lengths = jax.jit(generate)(q, k, v, *before)
    np.testing.assert_array_equal(lengths, np.asarray(begin) + ROWS)
    for b, start in enumerate(np.asarray(begin)):
        keys, values = (
            jnp.concatenate([old[b, :start], new[b]])[None] for old, new in zip(before, (k, v), strict=True)
        )
        want, want_lse = fa.flash_attn_func(q[b : b + 1], keys, values, causal=True, return_lse=True)
        assert_close((out[b], lse[b].T), (want[0], want_lse[0]), 2e-5)
        np.testing.assert_array_equal(k_cache[b, : start + ROWS], keys[0])
        np.testing.assert_array_equal(v_cache[b, start + ROWS :], before[1, b, start + ROWS :])


def step_arrays(place, seqlen_cache=40):
    q, k, v = (normal(place, BATCH, 1, heads, DIM, seed=heads + i) for i, heads in enumerate((HEADS, HEADS_K, HEADS_K)))
    caches = [normal(place, BATCH, seqlen_cache, HEADS_K, DIM, seed=i) for i in range(2)]
    return q, *caches, k, v, place([3, 30], jnp.int32)


def test_donated_caches_are_written_in_place(place):
    arrays = step_arrays(place)
    want = jax.jit(lambda *a: flash_attn_with_kvcache(*a[:5], cache_seqlens=a[5]))(*arrays)
    np.testing.assert_array_equal(arrays[1], step_arrays(place)[1])  # nobody gave it away
    program = jax.jit(lambda *a: flash_attn_with_kvcache(*a[:5], cache_seqlens=a[5]), donate_argnums=(1, 2))
    compiled = program.lower(*arrays).compile()
    assert " copy(" not in compiled.as_text()
    addresses = [x.unsafe_buffer_pointer() for x in arrays[1:3]]
    got = compiled(*arrays)
    assert [x.unsafe_buffer_pointer() for x in got[1:3]] == addresses and arrays[1].is_deleted()
    assert_close(got, want, 0)


@pytest.mark.parametrize("donated", [(), (1, 2)], ids=["kept", "donated"])
def test_every_version_of_a_cache_is_kept(place, donated):
    """A cache is written twice and read afterwards. Each result belongs to the version of the cache that the program
    names."""

    def program(q, k_cache, v_cache, k, v, lengths):
        first = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
        other = flash_attn_with_kvcache(q, k_cache, v_cache, 2 * k, v, cache_seqlens=lengths + 1)
        third = flash_attn_with_kvcache(q, first.k_cache, first.v_cache, 3 * k, v, cache_seqlens=lengths + 1)
        return tuple(x[:3] for x in (first, other, third)), k_cache + 0

    def step(q, k_cache, v_cache, k, v, lengths):
        caches = np.array(k_cache), np.array(v_cache)
        return fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths), *caches

    q, k_cache, v_cache, k, v, lengths = map(np.array, step_arrays(place))
    first = step(q, k_cache, v_cache, k, v, lengths)
    want = first, step(q, k_cache, v_cache, 2 * k, v, lengths + 1), step(q, *first[1:], 3 * k, v, lengths + 1)
    for _ in range(2):
        assert_close(jax.jit(program, donate_argnums=donated)(*step_arrays(place)), (want, k_cache), 2e-5)


def test_one_array_for_keys_and_values(place):
    q, cache, _, k, _, lengths = step_arrays(place)
    caches = np.array(cache), np.array(cache)
    want = fa.flash_attn_with_kvcache(
        *map(np.array, (q,)), *caches, *[np.array(k)] * 2, cache_seqlens=np.array(lengths)
    )
    for donated in ((), 1):
        step = jax.jit(
            lambda q, c, k, n: flash_attn_with_kvcache(q, c, c, k, k, cache_seqlens=n), donate_argnums=donated
        )
        assert_close(step(q, cache + 0, k, lengths)[:3], (want, *caches), 2e-5)


@pytest.mark.parametrize("shared", [False, True], ids=["own caches", "shared caches"])
def test_caches_under_vmap(place, shared):
    """Every member of the batch writes to its own cache, or to its own copy of a shared one."""
    members = [step_arrays(place) for _ in range(3)]
    many = [jnp.stack([x * (1 + i) for i, x in enumerate(arrays)]) for arrays in zip(*members, strict=True)]
    many[5] = jnp.stack([members[0][5] + i for i in range(3)])
    axes = [None if shared and i in (1, 2) else 0 for i in range(6)]
    given = [x if axis == 0 else x[0] for x, axis in zip(many, axes, strict=True)]

    def step(*a):
        return flash_attn_with_kvcache(*a[:5], cache_seqlens=a[5], return_lse=True)[:4]

    each = [step(*[x if axis is None else x[i] for x, axis in zip(given, axes, strict=True)]) for i in range(3)]
    want = [jnp.stack(x) for x in zip(*each, strict=True)]
    for wrap in (jax.vmap(step, axes), jax.jit(jax.vmap(step, axes))):
        assert_close(wrap(*given), want, 2e-5)


def test_caches_that_xla_parts_from_their_results(place, monkeypatch):
    """XLA may drop the aliases of a call, as it does on a GPU when it merges the call with the slices around it.
    Results are right, and the given caches are not written."""
    plain = _custom_call.ffi.ffi_call
    parted = SimpleNamespace(**vars(_custom_call.ffi))
    parted.ffi_call = lambda *a, input_output_aliases=None, **options: plain(*a, **options)
    arrays = step_arrays(place)

    def step(*a):
        return flash_attn_with_kvcache(*a[:5], cache_seqlens=a[5], return_lse=True)[:4]

    want = step(*arrays)
    monkeypatch.setattr(_custom_call, "ffi", parted)
    assert_close(jax.jit(lambda *a: step(*a))(*arrays), want, 0)
    for now, before in zip(arrays, step_arrays(place), strict=True):
        np.testing.assert_array_equal(now, before)


CACHES = {
    "full": {},
    "one length": {"cache_seqlens": 7},
    "rotary": {"causal": True, "rotary_interleaved": False},
    "pages": {"pages": True},
    "entries": {"entries": True},
    "padding": {"leftpad": True, "window_size": (9, 0)},
    "int8": {"int8": True},
}


@pytest.mark.parametrize("case", CACHES)
def test_a_step_is_the_one_that_writes(place, case):
    options = dict(CACHES[case])
    q, k_cache, v_cache, k, v, lengths = map(np.array, step_arrays(place))
    options.setdefault("cache_seqlens", lengths if case != "full" else None)
    if case == "rotary":
        angles = np.random.default_rng(0).standard_normal((50, DIM // 2)).astype(np.float32)
        options |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles)}
    if options.pop("pages", False):
        k_cache, v_cache = (x.reshape(-1, 8, HEADS_K, DIM) for x in (k_cache, v_cache))
        options["block_table"] = np.random.default_rng(0).permutation(10).astype(np.int32).reshape(2, 5)
    if options.pop("entries", False):
        options["cache_batch_idx"] = np.array([1, 0], np.int32)
    if options.pop("leftpad", False):
        options["cache_leftpad"] = np.array([2, 5], np.int32)
    if options.pop("int8", False):
        k_cache, v_cache, k_scale, v_scale = fa.quantize_kvcache(k_cache, v_cache, "int8")
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    plain = {name: x for name, x in options.items() if name not in arrays}

    def step(q, k_cache, v_cache, k, v, arrays):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, return_softmax_lse=True, **arrays, **plain)

    on = jax.tree.map(lambda x: place(x, x.dtype), (q, k_cache, v_cache, k, v, arrays))
    got = jax.jit(step)(*on)
    inputs = jax.tree.map(np.array, (q, k_cache, v_cache, k, v, arrays))
    out, lse = fa.flash_attn_with_kvcache(*inputs[:5], return_lse=True, **inputs[5], **plain)
    tolerance = 2e-5 if case != "int8" else 1e-4
    assert_close((got.out, got.lse, got.k_cache, got.v_cache), (out, lse, *inputs[1:3]), tolerance)
    assert (got.k_scale is None) == (case != "int8")
    if case == "int8":
        assert_close((got.k_scale, got.v_scale), (inputs[5]["k_scale"], inputs[5]["v_scale"]), 1e-6)


def test_a_cache_that_is_only_read(place):
    q, k_cache, v_cache, k, v, lengths = step_arrays(place)
    tree = np.array([1], np.uint64)
    got = jax.jit(fa.flash_attn_with_kvcache)(q, k_cache, v_cache, cache_seqlens=lengths, tree_mask=jnp.uint32([1]))
    host = [np.asarray(x) for x in (q, k_cache, v_cache)]
    want = fa.flash_attn_with_kvcache(*host, cache_seqlens=np.asarray(lengths), tree_mask=tree)
    assert_close(got, want, 2e-5)
    rest = functools.partial(fa.flash_attn_with_kvcache, q, k_cache, v_cache, cache_seqlens=lengths)
    got = jax.jit(lambda tree: rest(tree_mask=tree))(jnp.uint32([1]))  # no other array is traced
    assert_close(got, want, 2e-5)
    with pytest.raises(fa.BadArgument, match=r"softmax_scale=<JAX array float32 \(\)> is not a number"):
        jax.jit(lambda tree, scale: rest(tree_mask=tree, softmax_scale=scale))(jnp.uint32([1]), 0.3)
    with pytest.raises(fa.BadArgument, match="k_cache is a read-only JAX array.*jax.*returns the new"):
        jax.jit(fa.flash_attn_with_kvcache)(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    with pytest.raises(fa.BadArgument, match="out is given"):
        flash_attn_with_kvcache(q, k_cache, v_cache, out=q)
    with pytest.raises(fa.Unsupported, match="flash_attn_with_kvcache is differentiated, but has no gradient"):
        jax.grad(lambda q: flash_attn_with_kvcache(q, k_cache, v_cache).out.sum())(q)


# ---- merge, and the operations around attention ----


def operations(place):
    """name -> (function, its arrays) for each operation."""
    x, heads = normal(place, BATCH, ROWS, 32), normal(place, BATCH, ROWS, HEADS, DIM)
    angles = normal(place, 40, DIM // 2)
    weights, seeds = normal(place, 24, 32), place([7, 2**31 - 1], jnp.int32)
    logits = normal(place, BATCH, 50)
    return {
        "rms_norm": (functools.partial(ops.rms_norm, eps=1e-3), (x, normal(place, 32))),
        "swiglu": (ops.swiglu, (x,)),
        "rope": (ops.rope, (heads, jnp.cos(angles), jnp.sin(angles), place([4, 1], jnp.int32))),
        "linear": (functools.partial(ops.linear, swiglu=True), (x, weights, normal(place, 24), normal(place, 32))),
        "sample": (lambda logits, seeds: ops.sample(logits, 1.0, top_k=9, seeds=seeds), (logits, seeds)),
    }


@pytest.mark.parametrize("name", ["rms_norm", "swiglu", "rope", "linear", "sample"])
def test_an_operation_in_a_program(place, name):
    function, arrays = operations(place)[name]
    host = [np.asarray(x) for x in arrays]
    if name == "sample":
        host[1] = host[1].astype(np.int64)
    want = function(*host)
    assert_close(jax.jit(function)(*arrays), want, 1e-5)
    assert_close(jax.jit(lambda x: function(x, *host[1:]))(arrays[0]), want, 1e-5)  # NumPy's beside a traced one
    both = jax.vmap(lambda x: function(x, *arrays[1:]))(jnp.stack([arrays[0], -arrays[0]]))
    assert_close(both, np.stack([want, function(-host[0], *host[1:])]), 1e-5)


def test_quantize_fp8(place):
    x = normal(place, BATCH, ROWS, HEADS, DIM)
    for got, want in zip(jax.jit(fa.quantize_fp8)(x), fa.quantize_fp8(np.asarray(x)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_gradients_of_operations(place):
    rope, (x, cos, sin, positions) = operations(place)["rope"]
    dout = jnp.cos(x)
    _, pull = jax.vjp(lambda x: rope(x, cos, sin, positions), x)
    assert_close(pull(dout), ops.rope(dout, cos, sin, positions, inverse=True), 1e-6)
    with pytest.raises(fa.Unsupported, match="swiglu is differentiated, but has no gradient"):
        jax.grad(lambda x: ops.swiglu(x).sum())(x)
    packed = W4Weight.quantize(np.eye(64, dtype=np.float32)).pack()
    with pytest.raises(fa.Unsupported, match="weight is a PackedW4: 4-bit weights are not served in a traced call"):
        jax.jit(lambda x: ops.linear(x, packed))(jnp.ones((1, 64)))
    sample, (logits, seeds) = operations(place)["sample"]
    assert not jax.grad(lambda logits: logits[0, sample(logits, seeds)[0]] - logits[0, 0])(logits)[1].any()
    with pytest.raises(fa.BadArgument, match="out is a read-only JAX array"):
        jax.jit(lambda x: ops.rms_norm(x, x[0, 0, 0], out=x))(x)
    with pytest.raises(fa.BadArgument, match="x is a read-only JAX array, and residual is added to it in place"):
        jax.jit(lambda x: ops.rms_norm(x, x[0, 0, 0], residual=x))(x)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_merge(place, dtype):
    """Merging two halves of the keys, one of which some rows do not see, gives the results and gradients of one
    call."""
    q, k, v = qkv(place, dtype)
    causal = place(np.tri(ROWS, KEYS), bool)

    def merged(q, k, v):
        halves = [
            fa.flash_attn_func(q, k[:, keys], v[:, keys], mask=causal[:, keys], return_lse=True)
            for keys in (slice(0, 9), slice(9, KEYS))
        ]
        out, lse = fa.merge(*halves[0], *halves[1])
        return out, jnp.sin(lse).sum()

    def whole(q, k, v):
        out, lse = fa.flash_attn_func(q, k, v, mask=causal, return_lse=True)
        return out, jnp.sin(lse).sum()

    def loss(function):
        return lambda *a: (lambda out, rest: jnp.sin(out.astype(jnp.float32)).sum() + rest)(*function(*a))

    for function in (lambda f: f, lambda f: jax.grad(loss(f), (0, 1, 2))):
        got, want = (jax.jit(function(f))(q, k, v) for f in (merged, whole))
        assert_close(got, want, 5e-5 if dtype == jnp.float32 else 5e-2)


def test_a_merge_with_nothing(place):
    """The side without keys may hold anything. It gets no gradient, and does not change the other side."""
    out, lse = normal(place, 1, 3, 2, 8), normal(place, 1, 2, 3)
    empty = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)

    def loss(out, lse, *other):
        return sum(x.sum() for x in fa.merge(out, lse, *other))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(out, lse, *empty)
    for x, want in zip(gradients, (1, 1, 0, 0), strict=True):
        np.testing.assert_allclose(x, want, atol=1e-6)


# ---- several devices ----


def test_arrays_that_are_spread():
    """mesh_cases.py in a process with four devices."""
    if not hasattr(jax, "shard_map"):
        pytest.skip("this JAX has no jax.shard_map")
    flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"  # compiles in half the time
    cases = Path(__file__).with_name("mesh_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cases],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=600,
        cwd=cases.parent.parent,
    )  # fmt: skip
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-20000:] + done.stderr[-5000:]
    assert "skipped" not in done.stdout
