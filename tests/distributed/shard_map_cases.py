"""Context parallelism of JAX against one device. test_jax_shard_map.py runs this file in a process with several
devices. Several devices of the CPU need a flag that has to be set before JAX is imported."""

import doctest
import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import flash_attn_minimal as fa
from flash_attn_minimal.jax import context_parallel_attention, shard_tokens, unshard_tokens

TOKENS = PartitionSpec(None, "context")
AXES = {"q": 1, "k": 1, "v": 1, "out": 1, "lse": 2, "bias": 2, "mask": 2}  # the axis of tokens
ALIBI = np.array([0.5, 0.25, 0.1, 0.02], np.float32)
SINKS = np.array([0.3, -1, 2, 0.5], np.float32)


def mesh_of(*sizes, names=("context",)):
    devices = jax.devices()
    if len(devices) < np.prod(sizes):
        pytest.skip(f"{len(devices)} devices")
    return Mesh(np.array(devices[: np.prod(sizes)]).reshape(sizes), names)


def spec(name, x):
    """The sharding of an array: by tokens; an array without tokens is on every device whole."""
    axis = AXES.get(name)
    return PartitionSpec(*["context" if i == axis and x.shape[i] > 1 else None for i in range(x.ndim)])


def order(length, size, layout):
    """Tokens in the order of the ranks."""
    if layout == "contiguous":
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * size, -1)
    return np.concatenate([x for rank in range(size) for x in (chunks[rank], chunks[2 * size - 1 - rank])])


def inputs_of(seqlen=48, seqlen_k=None, nheads=4, nheads_k=2, batch=2, seed=0):
    rng = np.random.default_rng(seed)
    seqlen_k = seqlen_k or seqlen
    shapes = {
        "q": (batch, seqlen, nheads, 16), "k": (batch, seqlen_k, nheads_k, 16), "v": (batch, seqlen_k, nheads_k, 24),
        "dout": (batch, seqlen, nheads, 24), "dlse": (batch, nheads, seqlen),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def on_one_device(x, arrays, options):
    """out, lse and the gradients, by name."""
    q, k, v = x["q"], x["k"], x["v"]
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **arrays, **options)
    wanted = {f"return_d{name}": True for name in ("bias", "sinks") if name in arrays}
    found = fa.backward(x["dout"], q, k, v, out, lse, dlse=x["dlse"], **wanted, **arrays, **options)
    names = ["out", "lse", "q", "k", "v", *(name for name in ("bias", "sinks") if name in arrays)]
    return dict(zip(names, (out, lse, *found), strict=True))


def on_devices(x, arrays, options, size, layout, mode, **wrap):
    """out, lse and the gradients on a mesh, in the natural order of tokens. Gradients are taken outside shard_map."""
    mesh, x = mesh_of(size), {"q": x["q"], "k": x["k"], "v": x["v"], "out": x["dout"], "lse": x["dlse"], **arrays}
    axes = {name: axis for name, axis in AXES.items() if name in x and x[name].ndim > axis and x[name].shape[axis] > 1}
    own = {name: order(x[name].shape[axis], size, layout) for name, axis in axes.items()}
    x = {name: np.take(array, own[name], axes[name]) if name in own else array for name, array in x.items()}
    dout, dlse = x.pop("out"), x.pop("lse")
    graded = [name for name in ("q", "k", "v", "bias", "sinks") if name in x]
    specs = {name: spec(name, array) for name, array in x.items()}
    out_specs = TOKENS, PartitionSpec(None, None, "context")

    def attend(x):
        x = {**x}
        q, k, v = x.pop("q"), x.pop("k"), x.pop("v")
        return context_parallel_attention(
            q, k, v, axis_name="context", layout=layout, mode=mode, return_lse=True, **x, **options
        )

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=out_specs, **wrap)

    @jax.jit
    def both(x, dout, dlse):
        rest = {name: array for name, array in x.items() if name not in graded}
        results, pull = jax.vjp(lambda some: sharded({**some, **rest}), {name: x[name] for name in graded})
        return *results, pull((dout, dlse))[0]

    out, lse, gradients = both(x, dout, dlse)
    found = {name: np.asarray(array) for name, array in {"out": out, "lse": lse, **gradients}.items()}
    return {
        name: np.take(array, np.argsort(own[name]), axes[name]) if name in own else array
        for name, array in found.items()
    }


def check(size, layout, mode, arrays=None, exact=False, wrap=(), **options):
    shapes = {name: options.pop(name) for name in ("seqlen", "seqlen_k", "nheads", "nheads_k") if name in options}
    x, arrays = inputs_of(**shapes), arrays or {}
    want = on_one_device(x, arrays, options)
    got = on_devices(x, arrays, options, size, layout, mode, **dict(wrap))
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].shape == want[name].shape and got[name].dtype == want[name].dtype, name
        # Fewer heads, or parts instead of a whole sequence, may change the order of a sum, and nothing else.
        close = 2e-6 if exact and name in ("out", "lse") else 2e-5
        np.testing.assert_allclose(got[name], want[name], atol=close, rtol=close, err_msg=name)


CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "left": {"window_size": (30, -1)},
    "causal_window_softcap": {"causal": True, "window_size": (5, -1), "softcap": 2.0},
    "alibi_sinks_scale": {"arrays": {"alibi_slopes": ALIBI, "sinks": SINKS}, "causal": True, "softmax_scale": 0.4},
    "sinks_full": {"arrays": {"sinks": SINKS}},
    "one_key_head": {"nheads_k": 1, "causal": True},
    "lengths": {"seqlen_k": 96, "causal": True, "arrays": {"sinks": SINKS}},
    "lengths_top_left": {"seqlen_k": 24, "causal": True, "top_left": True, "window_size": (9, 0)},
    "rows_that_see_nothing": {"seqlen_k": 24, "causal": True},
}


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
@pytest.mark.parametrize("case", CASES)
def test_modes(mode, case):
    size, layout = 4, "contiguous" if case in ("window", "lengths") else "zigzag"
    check(size, layout, mode, exact=case not in ("full", "sinks_full"), **CASES[case])


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
@pytest.mark.parametrize("size, layout", [(1, "zigzag"), (2, "zigzag"), (3, "contiguous")])
def test_sizes(mode, size, layout):
    heads = {"nheads": 6, "nheads_k": 3} if size == 3 else {}
    check(size, layout, mode, causal=True, window_size=(40 // size, 0), **heads)


def test_dropout_drops_what_one_device_drops():
    for layout in ("contiguous", "zigzag"):
        dropout = {"dropout_p": 0.3, "dropout_seed": 5}
        check(2, layout, "gather", seqlen=64, causal=True, window_size=(20, 0), arrays={"sinks": SINKS}, **dropout)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_gather_takes_bias_and_mask(layout):
    rng = np.random.default_rng(2)
    arrays = {"bias": rng.standard_normal((1, 4, 48, 48)).astype(np.float32), "mask": rng.random((2, 1, 48, 48)) < 0.8}
    check(4, layout, "gather", arrays, exact=True, window_size=(20, 4))


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_bias_and_mask_of_keys(mode):
    rng = np.random.default_rng(2)
    arrays = {"bias": rng.standard_normal((2, 4, 1, 48)).astype(np.float32), "mask": rng.random((2, 1, 1, 48)) < 0.8}
    check(2, "zigzag", mode, arrays, exact=True, causal=True)


@pytest.mark.parametrize("mode", ["gather", "auto", "ulysses"])
@pytest.mark.parametrize("what", ["bias", "mask"])
def test_one_row_a_device(what, mode):
    """A bias or mask of one row may belong to only one device. ulysses, which gives a device the rows of all devices,
    cannot tell."""
    size, rng = 4, np.random.default_rng(2)
    own = {"bias": rng.standard_normal((1, 1, size, 8)).astype(np.float32), "mask": rng.random((1, 1, size, 8)) < 0.6}
    x = inputs_of(seqlen=size, seqlen_k=8, batch=1)
    mesh = mesh_of(size)

    def attend(array, lies, mode=mode):
        def local(q, k, v, array):
            more = {what: array}
            return context_parallel_attention(q, k, v, axis_name="context", layout="contiguous", mode=mode, **more)

        specs = (TOKENS, TOKENS, TOKENS, lies)
        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=TOKENS))(x["q"], x["k"], x["v"], array)

    def want(array):
        return fa.flash_attn_func(x["q"], x["k"], x["v"], **{what: array})

    rows = PartitionSpec(None, None, "context", None)
    if mode == "ulysses":
        for array, lies in ((own[what], rows), (own[what][:, :, :1], PartitionSpec())):
            with pytest.raises(ValueError, match=rf"mode='ulysses' does not serve {what} of shape \(1, 1, 1, 8\)"):
                attend(array, lies)
    else:
        np.testing.assert_allclose(attend(own[what], rows), want(own[what]), atol=2e-5)
        np.testing.assert_allclose(attend(own[what][:, :, :1], PartitionSpec()), want(own[what][:, :, :1]), atol=2e-5)
    shared = own[what][0, 0, 0]  # without an axis of rows there is no doubt
    np.testing.assert_allclose(attend(shared, PartitionSpec()), want(shared), atol=2e-5)


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_without_check_vma(mode):
    """Gradients of shared arrays are summed even if JAX does not track which arrays differ between devices."""
    check(2, "zigzag", mode, {"sinks": SINKS}, causal=True, wrap={"check_vma": False})


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_bfloat16(mode):
    """The error is at most 2.4 times that of one device: dk and dv are sums of four rounded contributions, rounded once
    more (the square root of 1 + 4)."""
    x = inputs_of(seqlen=128, nheads_k=1)
    given = {name: array if name == "dlse" else array.astype(ml_dtypes.bfloat16) for name, array in x.items()}
    exact = on_one_device({name: array.astype(np.float32) for name, array in given.items()}, {}, {"causal": True})
    plain = on_one_device(given, {}, {"causal": True})
    got = on_devices(given, {}, {"causal": True}, 4, "zigzag", mode)
    for name, want in exact.items():
        assert got[name].dtype == plain[name].dtype

        def error(found, name=name, want=want):
            return np.sqrt(np.mean((found[name].astype(np.float32) - want) ** 2))

        assert error(got) <= 2.4 * error(plain) + 1e-6, (name, error(got), error(plain))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_no_sequence(mode, layout):
    x = inputs_of(batch=0)
    got = on_devices(x, {}, {"causal": True}, 4, layout, mode)
    for name, array in got.items():
        assert array.shape == x[{"out": "dout", "lse": "dlse"}.get(name, name)].shape
    assert unshard_tokens(shard_tokens(x["q"], 4, layout), 4, layout).shape == x["q"].shape


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_order_of_tokens(layout):
    x = np.arange(2 * 24 * 3).reshape(2, 24, 3)
    moved = shard_tokens(jnp.asarray(x), 3, layout)
    np.testing.assert_array_equal(moved, x[:, order(24, 3, layout)])
    np.testing.assert_array_equal(unshard_tokens(moved, 3, layout), x)
    np.testing.assert_array_equal(shard_tokens(jnp.asarray(x.swapaxes(1, 2)), 3, layout, -1), moved.swapaxes(1, 2))


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_data_and_context_axes_and_checkpoint(mode):
    """Gradients inside shard_map of a loss of each device's rows, under jit and jax.checkpoint; without lse."""
    mesh, both = mesh_of(2, 2, names=("data", "context")), PartitionSpec("data", "context")
    q, k, v = (jnp.asarray(inputs_of()[name]) for name in "qkv")
    attend = functools.partial(context_parallel_attention, axis_name="context", mode=mode, causal=True)

    def gradients(q, k, v):
        loss = jax.checkpoint(lambda q, k, v: jnp.sin(attend(q, k, v)).sum())
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    sharded = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(both,) * 3, out_specs=(both,) * 3))
    got = [unshard_tokens(x, 2) for x in sharded(*(shard_tokens(x, 2) for x in (q, k, v)))]
    want_all = jax.grad(lambda *qkv: jnp.sin(fa.flash_attn_func(*qkv, causal=True)).sum(), (0, 1, 2))(q, k, v)
    for one, want in zip(got, want_all, strict=True):
        np.testing.assert_allclose(one, want, atol=2e-5)


def test_a_sequence_over_two_axes():
    mesh, both = mesh_of(2, 2, names=("host", "device")), PartitionSpec(None, ("host", "device"))
    q, k, v = (jnp.asarray(inputs_of()[name]) for name in "qkv")
    attend = functools.partial(context_parallel_attention, axis_name=("host", "device"), causal=True)
    sharded = jax.shard_map(functools.partial(attend, mode="gather"), mesh=mesh, in_specs=(both,) * 3, out_specs=both)
    out = unshard_tokens(jax.jit(sharded)(*(shard_tokens(x, 4) for x in (q, k, v))), 4)
    np.testing.assert_allclose(out, fa.flash_attn_func(q, k, v, causal=True), atol=2e-6)


def test_nothing_of_other_devices_is_kept_for_the_gradient():
    mesh = mesh_of(4)
    x = inputs_of(seqlen=128)
    attend = functools.partial(context_parallel_attention, axis_name="context", mode="gather", causal=True)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    _, pull = jax.vjp(jax.jit(sharded), x["q"], x["k"], x["v"])
    kept = sum(array.size for array in jax.tree.leaves(pull) if hasattr(array, "size"))
    need = sum(x[name].size for name in ("q", "k", "v", "dout", "dlse"))  # out and lse are as large as their gradients
    assert need <= kept <= need + 100


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_without_jit(mode):
    x = inputs_of()
    attend = functools.partial(context_parallel_attention, axis_name="context", mode=mode, layout="contiguous")
    sharded = jax.shard_map(attend, mesh=mesh_of(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    np.testing.assert_allclose(sharded(x["q"], x["k"], x["v"]), fa.flash_attn_func(x["q"], x["k"], x["v"]), atol=2e-6)


def test_second_derivatives_are_refused():
    x = inputs_of()
    attend = functools.partial(context_parallel_attention, axis_name="context", mode="gather")
    sharded = jax.shard_map(attend, mesh=mesh_of(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)

    def gradient(q):
        return jax.grad(lambda q: jnp.sin(sharded(q, x["k"], x["v"])).sum())(q)

    with pytest.raises(fa.Unsupported, match="second derivatives are not served"):
        jax.jit(jax.grad(lambda q: gradient(q).sum()))(x["q"])


def collectives(mode="auto", size=4, **options):
    """The names of the collectives in a program, with their numbers."""
    shapes = {name: options.pop(name) for name in ("nheads", "nheads_k") if name in options}
    x = inputs_of(**shapes)
    attend = functools.partial(context_parallel_attention, axis_name="context", mode=mode, **options)
    sharded = jax.shard_map(attend, mesh=mesh_of(size), in_specs=(TOKENS,) * 3, out_specs=TOKENS)
    text = str(jax.make_jaxpr(sharded)(x["q"], x["k"], x["v"]))
    return {name: text.count(f"= {name}[") for name in ("all_gather", "all_to_all", "ppermute") if f"= {name}[" in text}


def test_what_auto_takes():
    assert collectives() == {"all_to_all": 4}
    assert collectives(nheads=3, nheads_k=1) == {"all_gather": 2}
    assert collectives(nheads=24, nheads_k=6) == {"all_gather": 2}
    assert collectives(dropout_p=0.5, dropout_seed=1) == {"all_gather": 2}
    assert collectives(window_size=(30, 0), layout="contiguous") == {"all_gather": 2}


def test_a_window_fetches_what_it_reaches():
    assert collectives(window_size=(8, 0), layout="contiguous") == {"ppermute": 2}  # k and v of the rank before
    assert collectives(window_size=(8, 2), layout="contiguous") == {"ppermute": 4}


@pytest.mark.parametrize(
    "text, changes",
    [
        ("layout='ring' is not one of 'contiguous', 'zigzag'", {"layout": "ring"}),
        ("mode='gathers' is not one of 'auto', 'gather', 'ulysses'", {"mode": "gathers"}),
        ("layout='zigzag' needs a number of tokens that 2 * 4 divides", {"seqlen": 44}),
        ("mode='ulysses' does not serve nheads=6 on 4 devices", {"mode": "ulysses", "nheads": 6}),
        ("mode='ulysses' does not serve nheads_k=6 on 4 devices", {"mode": "ulysses", "nheads": 24, "nheads_k": 6}),
        ("mode='ulysses' does not serve dropout_p=0.5", {"mode": "ulysses", "dropout_p": 0.5, "dropout_seed": 1}),
        ("dropout_p=0.5 without dropout_seed", {"dropout_p": 0.5}),
        ("mode='ulysses' does not serve mask", {"mode": "ulysses", "mask": np.ones((12, 48), bool)}),
        ("bias has shape (48, 48): expected one that broadcasts", {"bias": np.zeros((48, 48), np.float32)}),
        ("nheads=4 is not a multiple of nheads_k=3", {"nheads_k": 3}),
        ("sinks has shape (1,): expected (4,)", {"sinks": np.zeros(1, np.float32)}),
        ("alibi_slopes has shape (2, 1): expected (4,) or (2, 4)", {"alibi_slopes": np.zeros((2, 1), np.float32)}),
        ("softcap=-1 is not a finite number", {"softcap": -1.0}),
        ("window_size=3 is not a pair", {"window_size": 3}),
    ],
)
def test_refusals(text, changes):
    changes = {**changes}
    shapes = {name: changes.pop(name) for name in ("seqlen", "nheads", "nheads_k") if name in changes}
    x = inputs_of(**shapes)
    attend = functools.partial(context_parallel_attention, axis_name="context", **changes)
    with pytest.raises(ValueError) as raised:
        jax.shard_map(attend, mesh=mesh_of(4), in_specs=(TOKENS,) * 3, out_specs=TOKENS)(x["q"], x["k"], x["v"])
    assert text in str(raised.value)


def test_float8_is_refused():
    x = jnp.zeros((1, 8, 4, 16), jnp.float8_e4m3fn)
    attend = functools.partial(context_parallel_attention, axis_name="context", mode="gather")
    with pytest.raises(fa.Unsupported, match="float8 is not served"):
        jax.shard_map(attend, mesh=mesh_of(2), in_specs=(TOKENS,) * 3, out_specs=TOKENS)(x, x, x)


def test_the_example_of_the_docstring():
    result = doctest.testmod(sys.modules[context_parallel_attention.__module__])
    assert result.attempted and not result.failed


def test_lengths_of_shard_tokens():
    with pytest.raises(ValueError, match="needs an axis 1 that 8 divides"):
        shard_tokens(np.zeros((1, 12, 1, 1)), 4)
