"""JAX's arrays that are spread over devices, against one device. test_jax_programs.py runs this file in a process with
four devices. Several devices of the CPU need a flag that has to be set before JAX is imported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import flash_attn_minimal as fa
from flash_attn_minimal.jax import dot_product_attention, flash_attn_with_kvcache
from flash_attn_minimal.transformer import ops

BATCH, ROWS, KEYS, HEADS, DIM = 4, 9, 13, 8, 16
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def mesh_of(kind):
    if jax.device_count() < 4:
        pytest.skip(f"{jax.device_count()} devices")
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape), jnp.float32)


def spread(mesh, arrays, specs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]


def check(function, arrays, mesh, specs, results, gathers=False):
    """Checks that the numbers equal those on one device, that results have the sharding `results`, and that no input is
    gathered (unless gathers)."""
    want = jax.jit(function)(*arrays)
    arrays = spread(mesh, arrays, specs)
    compiled = jax.jit(function).lower(*arrays).compile()
    got = compiled(*arrays)
    for x, y, spec in zip(jax.tree.leaves(got), jax.tree.leaves(want), results, strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), (x.sharding.spec, spec)
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=2e-5)
    text = compiled.as_text()
    assert gathers == any(word in text for word in ("all-gather", "collective-permute", "all-to-all"))
    return text


def loss_of(function):
    return lambda *arrays: sum(jnp.sin(x).sum() for x in jax.tree.leaves(function(*arrays)))


LAYOUTS = {  # of q, of k and v, of a bias of all sequences, of sinks
    "batch": (P(("data", "model")), P(("data", "model")), P(), P()),
    "batch and heads": (P("data", None, "model"), P("data", None, "model"), P(None, "model"), P("model")),
    "heads": (P(None, None, ("data", "model")), P(None, None, ("data", "model")), P(None, ("data", "model")), P()),
    "heads of one key head": (P("data", None, "model"), P("data"), P(None, "model"), P("model")),
}


@KINDS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_stays_spread(kind, layout):
    mesh, (q, k, bias, sinks) = mesh_of(kind), LAYOUTS[layout]
    nheads_k = 1 if layout == "heads of one key head" else 4
    keys = (BATCH, KEYS, nheads_k, DIM)
    arrays = normal(BATCH, ROWS, HEADS, DIM), normal(*keys), normal(*keys, seed=1), normal(1, HEADS, ROWS, KEYS)
    arrays, specs = (*arrays, normal(HEADS)), (q, k, k, bias, sinks)

    def attend(q, k, v, bias, sinks):
        return fa.flash_attn_func(q, k, v, causal=True, bias=bias, sinks=sinks, return_lse=True)

    rows, _, heads = (*q, None, None)[:3]
    check(attend, arrays, mesh, specs, [q, P(rows, heads)])
    gradient = jax.grad(loss_of(attend), tuple(range(5)))
    types_say = kind == AxisType.Explicit
    gathers = layout == "heads" and types_say  # the gradient of sinks, which lie on every device whole, has their type
    results = specs if types_say or layout != "heads" else (*specs[:4], P(("data", "model")))
    text = check(gradient, arrays, mesh, specs, results, gathers)
    assert ("all-reduce" in text) == (layout != "heads")


@KINDS
@pytest.mark.parametrize("heads", [1, 4, HEADS])
def test_masks_by_intervals_and_blocks_stay_spread(kind, heads):
    """Each device has the numbers and blocks of its own sequences and heads."""
    mesh, rng = mesh_of(kind), np.random.default_rng(heads)
    rows, keys = 70, 130
    arrays = normal(BATCH, rows, HEADS, DIM), normal(BATCH, keys, 4, DIM), normal(BATCH, keys, 4, DIM, seed=1)
    indices = jnp.asarray(rng.integers(0, rows + 1, (BATCH, heads, keys, 2)), jnp.int32)
    blocks = jnp.asarray(rng.random((BATCH, heads, 2, 3)) < 0.7)
    cut = P("data", None, "model")
    own = P("data", "model") if heads > 1 else P("data")

    def attend(q, k, v, indices, blocks):
        return fa.flash_attn_func(q, k, v, startend_row_indices=indices, block_mask=blocks)

    specs = (cut, cut, cut, own, own)
    check(attend, (*arrays, indices, blocks), mesh, specs, [cut])
    check(jax.grad(loss_of(attend), (0, 1, 2)), (*arrays, indices, blocks), mesh, specs, specs[:3])


@KINDS
def test_what_cannot_be_cut_is_whole(kind):
    """Rows are not cut, and two key heads are not cut over four devices. Dropout counts the heads and sequences of the
    whole array."""
    mesh = mesh_of(kind)
    arrays = normal(BATCH, ROWS + 1, HEADS, DIM), normal(BATCH, KEYS, 2, DIM), normal(BATCH, KEYS, 2, DIM, seed=1)

    def attend(q, k, v, **options):
        return fa.flash_attn_func(q, k, v, **options)

    check(attend, arrays, mesh, (P("data", "model"), P("data"), P("data")), [P("data")], gathers=True)
    heads = P(None, None, ("data", "model"))
    result = P(None, None, "data") if kind == AxisType.Explicit else heads  # XLA cuts it once more
    check(attend, arrays, mesh, (heads, P(), P()), [result], gathers=True)

    def dropped(q, k, v):
        return attend(q, k, v, dropout_p=0.3, dropout_seed=1)

    check(dropped, arrays, mesh, (P("data"),) * 3, [P()], gathers=True)


@KINDS
def test_lengths_and_packed_sequences(kind):
    mesh = mesh_of(kind)
    arrays = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, 4, DIM), normal(BATCH, KEYS, 4, DIM, seed=1)
    lengths = jnp.array([4, 9, 0, 5], jnp.int32), jnp.array([13, 2, 7, 6], jnp.int32)

    def filled(q, k, v, rows, keys):
        return dot_product_attention(q, k, v, is_causal=True, query_seq_lengths=rows, key_value_seq_lengths=keys)

    specs = (P("data", None, "model"),) * 3
    check(filled, (*arrays, *lengths), mesh, (*specs, P("data"), P("data")), specs[:1])
    gradient = jax.grad(loss_of(filled), (0, 1, 2))
    check(gradient, (*arrays, *lengths), mesh, (*specs, P("data"), P("data")), specs)

    packed = [x.reshape(-1, *x.shape[2:]) for x in arrays]
    cu = [jnp.arange(BATCH + 1, dtype=jnp.int32) * n for n in (ROWS, KEYS)]

    def varlen(q, k, v, cu_q, cu_k):
        return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, ROWS, KEYS)

    heads = P(None, ("data", "model"))
    check(varlen, (*packed, *cu), mesh, (heads, heads, heads, P(), P()), [heads])


@KINDS
def test_a_cache_stays_spread(kind):
    mesh, now = mesh_of(kind), P("data", None, "model")
    arrays = normal(BATCH, 1, HEADS, DIM), *(normal(BATCH, n, 4, DIM, seed=i) for i, n in enumerate((20, 20, 1, 1)))
    arrays = (*arrays, jnp.array([3, 19, 0, 7], jnp.int32))

    def step(q, k_cache, v_cache, k, v, lengths):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, return_lse=True)

    specs = (*[now] * 5, P("data"))
    check(step, arrays, mesh, specs, [now, now, now, P("data", "model")])
    mine = spread(mesh, arrays, specs)
    addresses = [x.data.unsafe_buffer_pointer() for x in mine[1].addressable_shards]
    became = jax.jit(step, donate_argnums=(1, 2))(*mine)
    assert [x.data.unsafe_buffer_pointer() for x in became.k_cache.addressable_shards] == addresses

    def paged(q, k_cache, v_cache, table):
        return fa.flash_attn_with_kvcache(q, k_cache, v_cache, block_table=table)

    pages = [x.reshape(8, 10, 4, DIM) for x in arrays[1:3]]
    table = jnp.arange(8, dtype=jnp.int32)[::-1].reshape(4, 2)
    heads = P(None, None, "model")
    check(paged, (arrays[0], *pages, table), mesh, (heads, heads, heads, P()), [heads])


@KINDS
def test_operations_stay_spread(kind):
    mesh, rows = mesh_of(kind), P("data", None, "model")
    x, heads, lse = normal(BATCH, ROWS, 32), normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, HEADS, ROWS)
    tables, positions = (normal(20, DIM // 2), normal(20, DIM // 2, seed=1)), jnp.array([4, 0, 9, 1], jnp.int32)
    logits, seeds = normal(BATCH, 50), jnp.array([4, 0, 9, 1], jnp.int32)
    other = normal(BATCH, ROWS, HEADS, DIM, seed=1), normal(BATCH, HEADS, ROWS, seed=1)
    both = P(("data", "model"))
    for function, arrays, specs, results in (
        (ops.rms_norm, (x, normal(32)), (P("data"), P()), [P("data")]),
        (ops.swiglu, (x,), (both,), [both]),
        (ops.rope, (heads, *tables, positions), (rows, P(), P(), P("data")), [rows]),
        (ops.linear, (x, normal(24, 32), normal(24)), (P("data"), P("model"), P("model")), [rows]),
        (lambda logits, seeds: ops.sample(logits, 1.0, seeds=seeds), (logits, seeds), (both, both), [both]),
        (fa.merge, (heads, lse, *other), (rows, P("data", "model")) * 2, [rows, P("data", "model")]),
    ):
        check(function, arrays, mesh, specs, results)
    gradient = jax.grad(loss_of(fa.merge), (0, 1, 2, 3))
    specs = (rows, P("data", "model")) * 2
    check(gradient, (heads, lse, *other), mesh, specs, specs)


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(kind, check_vma):
    """With and without the checks of vma, over one axis of the mesh and over both; some arrays vary over the mesh and
    some do not."""
    mesh = mesh_of(kind)
    arrays = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, 4, DIM), normal(1, HEADS, ROWS, KEYS)

    def attend(q, k, bias):
        half = KEYS // 2
        parts = [
            fa.flash_attn_func(q, k[:, keys], k[:, keys], bias=bias[..., keys], return_lse=True)
            for keys in (slice(0, half), slice(half, KEYS))
        ]
        return ops.rope(fa.merge(*parts[0], *parts[1])[0], *[jnp.ones((ROWS, DIM // 2))] * 2)

    def gradient(attend):
        return jax.grad(loss_of(attend), (0, 1, 2))

    want = jax.jit(gradient(attend))(*arrays)
    specs = (P("data"), P("data"), P())
    for more in ({}, {"axis_names": {"data"}}):
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check_vma, **more)
        got = jax.jit(gradient(mapped))(*spread(mesh, arrays, specs))
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=2e-5)


def test_shard_map_outside_a_program():
    mesh = mesh_of(AxisType.Auto)
    arrays = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, 4, DIM)

    def attend(q, k):
        return fa.flash_attn_func(q, k, k)

    mapped = jax.shard_map(attend, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    _, pull = jax.vjp(mapped, *spread(mesh, arrays, [P("data")] * 2))
    _, want = jax.vjp(attend, *arrays)
    for x, y in zip(pull(jnp.ones_like(arrays[0])), want(jnp.ones_like(arrays[0])), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5, rtol=2e-5)
