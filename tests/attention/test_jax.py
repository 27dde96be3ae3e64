"""JAX: the functions of the package under jit, grad and vmap, through XLA's foreign function interface."""

import functools

import numpy as np
import pytest
from conftest import jax_platforms, torch

jax = pytest.importorskip("jax")
jnp = jax.numpy

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import jax as fa_jax  # noqa: E402


@pytest.fixture(autouse=True)
def _real_float32():
    with jax.default_matmul_precision("highest"):  # of the reference: a GPU would take tf32
        yield


@pytest.fixture(params=jax_platforms())
def place(request):
    device = jax.devices(request.param)[0]
    return lambda x, dtype=jnp.float32: jax.device_put(jnp.asarray(x, dtype), device)


def _inputs(place, dtype=jnp.float32, seqlen_q=37, seqlen_k=37):
    rng = np.random.default_rng(3)
    shapes = ((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 24))
    return [place(rng.standard_normal(shape), dtype) for shape in shapes]


def _standard(q, k, v, bias=None, causal=False, sinks=None, return_lse=False):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool), s.shape[3] - s.shape[2]), s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))], -1)
    out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s)[..., : k.shape[1]], v)
    return (out, jax.nn.logsumexp(s, -1)) if return_lse else out


def _gradients(function, inputs):
    """Gradients of a loss of out, or of out and lse."""

    def loss(*inputs):
        return sum(jnp.sin(x.astype(jnp.float32)).sum() for x in jax.tree.leaves(function(*inputs)))

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(inputs)))))(*inputs)


def _assert_close(got, want, tolerance):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, atol=tolerance, rtol=tolerance)


def test_forward_under_jit(place):
    q, k, v = _inputs(place, seqlen_q=20)
    out, lse = jax.jit(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True, return_lse=True))(q, k, v)
    eager, eager_lse = fa.flash_attn_func(q, k, v, causal=True, return_lse=True)
    np.testing.assert_array_equal(out, eager)
    np.testing.assert_array_equal(lse, eager_lse)
    assert out.devices() == q.devices()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(place, dtype, causal):
    inputs = _inputs(place, dtype)
    got = _gradients(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=causal), inputs)
    assert all(x.dtype == dtype for x in got)
    exact = [x.astype(jnp.float32) for x in inputs]
    want = _gradients(lambda q, k, v: _standard(q, k, v, causal=causal), exact)
    _assert_close(got, want, 2e-5 if dtype == jnp.float32 else 4e-2)


@pytest.mark.parametrize("shape", [(2, 4, 37, 37), (1, 4, 1, 37), (37,)])
def test_bias_and_sinks(place, shape):
    rng = np.random.default_rng(4)
    inputs = [*_inputs(place), place(rng.standard_normal(shape)), place(rng.standard_normal(4))]
    got = _gradients(lambda q, k, v, bias, sinks: fa.flash_attn_func(q, k, v, bias=bias, sinks=sinks), inputs)
    want = _gradients(lambda q, k, v, bias, sinks: _standard(q, k, v, bias, sinks=sinks), inputs)
    _assert_close(got, want, 5e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_lse(place, dtype, causal):
    rng = np.random.default_rng(4)
    inputs = [*_inputs(place, dtype), place(rng.standard_normal((1, 4, 1, 37)), dtype), place(rng.standard_normal(4))]

    def both(attend):
        return lambda q, k, v, bias, sinks: attend(q, k, v, bias=bias, sinks=sinks, causal=causal, return_lse=True)

    exact = [x.astype(jnp.float32) for x in inputs]
    tolerance = 5e-5 if dtype == jnp.float32 else 6e-2
    for wanted in (slice(0, 2), slice(1, 2)):  # a loss of both, and of lse alone

        def chosen(attend, wanted=wanted):
            return lambda *inputs: both(attend)(*inputs)[wanted]

        got = _gradients(chosen(fa.flash_attn_func), inputs)
        _assert_close(got, _gradients(chosen(_standard), exact), tolerance)


WRAPS = {"plain": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint, "vmap": jax.vmap}


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_loss_of_out_alone_has_no_dlse(place, wrap, monkeypatch):
    """The custom call of the gradient gets dlse only if the loss depends on lse."""
    q, k, v = _inputs(place)
    described, real = [], fa_jax._attention.Call._describe_backward

    def describe(self, through_lse):
        described.append(through_lse)
        return real(self, through_lse)

    monkeypatch.setattr(fa_jax._attention.Call, "_describe_backward", describe)

    def gradient(loss):
        attend = WRAPS[wrap](lambda q: fa.flash_attn_func(q[None], k[:1], v[:1], return_lse=True))
        described.clear()
        jax.grad(lambda q: loss(*attend(q)))(q if wrap == "vmap" else q[0])
        return described

    assert gradient(lambda out, lse: out.sum()) == [False]
    assert gradient(lambda out, lse: lse.sum()) == [True]
    assert gradient(lambda out, lse: out.sum() + lse.sum()) == [True]


def test_merged_halves_of_the_keys_have_one_call_s_gradients(place):
    """With a causal mask, half of the rows see nothing of the second half."""
    q, k, v = _inputs(place)
    causal = place(np.tri(37), bool)

    def merged(q, k, v):
        parts = [
            fa.flash_attn_func(q, k[:, keys], v[:, keys], mask=causal[:, keys], return_lse=True)
            for keys in (slice(0, 18), slice(18, 37))
        ]
        lse = jnp.logaddexp(parts[0][1], parts[1][1])
        return sum(jnp.exp(own - lse).swapaxes(1, 2)[..., None] * out for out, own in parts), lse

    got = _gradients(merged, [q, k, v])
    _assert_close(got, _gradients(lambda *a: fa.flash_attn_func(*a, causal=True, return_lse=True), [q, k, v]), 2e-5)
    _assert_close(got, _gradients(lambda *a: _standard(*a, causal=True, return_lse=True), [q, k, v]), 5e-5)


def test_mask_slopes_and_dropout(place):
    """Arrays without a gradient, and options of every kind, reach the library as in an eager call."""
    q, k, v = _inputs(place)
    options = {
        "mask": place(np.random.default_rng(1).random((2, 1, 37, 37)) < 0.7, bool),
        "alibi_slopes": place([0.1, 0.2, 0.3, 0.4]),
    }
    static = {"dropout_p": 0.2, "dropout_seed": 2**64 - 5, "window_size": (9, 3), "softcap": 4.0, "top_left": True}

    def attend(q, k, v, mask, alibi_slopes):
        return fa.flash_attn_func(q, k, v, mask=mask, alibi_slopes=alibi_slopes, **static)

    eager, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options, **static)
    np.testing.assert_array_equal(jax.jit(attend)(q, k, v, **options), eager)
    dout = jnp.cos(eager)
    want = fa.backward(*map(np.asarray, (dout, q, k, v, eager, lse)), **jax.tree.map(np.asarray, options), **static)
    got = _gradients(lambda q, k, v: attend(q, k, v, **options), [q, k, v])
    _assert_close(got, want, 2e-5)

    def both(q, k, v):
        return fa.flash_attn_func(q, k, v, return_lse=True, **options, **static)

    options = jax.tree.map(np.asarray, options)
    given = map(np.asarray, (dout, q, k, v, eager, lse))
    want = fa.backward(*given, dlse=np.cos(lse), **options, **static)
    _assert_close(_gradients(both, [q, k, v]), want, 2e-5)


def test_varlen(place):
    q, k, v = (x[0] for x in _inputs(place, seqlen_q=40, seqlen_k=50))
    cu_q, cu_k = place([0, 15, 36], jnp.int32), place([0, 20, 48], jnp.int32)  # the last rows belong to nobody

    def attend(q, k, v, **more):
        return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 25, 30, causal=True, **more)

    def by_sequence(q, k, v):
        parts = [((0, 15), (0, 20)), ((15, 36), (20, 48))]
        one = [_standard(q[None, a:b], k[None, c:d], v[None, c:d], None, True, None, True) for (a, b), (c, d) in parts]
        out = jnp.concatenate([*(x[0][0] for x in one), jnp.zeros((4, *one[0][0].shape[2:]))])
        return out, jnp.concatenate([x[1][0] for x in one], 1)

    _assert_close([jax.jit(attend)(q, k, v)], [by_sequence(q, k, v)[0]], 2e-5)
    _assert_close(_gradients(attend, [q, k, v]), _gradients(lambda *a: by_sequence(*a)[0], [q, k, v]), 5e-5)

    def covered(q, k, v):
        out, lse = attend(q, k, v, return_lse=True)
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    _assert_close(_gradients(covered, [q, k, v]), _gradients(by_sequence, [q, k, v]), 5e-5)


def test_vmap(place):
    q, k, v = _inputs(place)
    many = jnp.stack([q, 2 * q, -q])
    got = jax.vmap(lambda q: fa.flash_attn_func(q, k, v))(many)
    _assert_close(got, [fa.flash_attn_func(x, k, v) for x in many], 1e-6)
    twice = jax.jit(jax.vmap(jax.vmap(lambda q, v: fa.flash_attn_func(q, k, v), (0, None)), (None, 0)))
    vs = jnp.stack([v, -v])
    want = jnp.stack([jnp.stack([fa.flash_attn_func(x, k, y) for x in many]) for y in vs])
    _assert_close([twice(many, vs)], [want], 1e-6)


@pytest.mark.parametrize("through_lse", [False, True])
def test_vmap_and_gradients_in_either_order(place, through_lse):
    q, k, v = _inputs(place)
    many = jnp.stack([q, 2 * q, -q])

    def loss(q, k):
        out, lse = fa.flash_attn_func(q, k, v, causal=True, return_lse=True)
        return jnp.sin(out).sum() + (jnp.sin(lse).sum() if through_lse else 0)

    gradient = jax.jit(jax.grad(loss, (0, 1)))
    want = [jnp.stack(x) for x in zip(*(gradient(q, k) for q in many), strict=True)]
    _assert_close(jax.jit(jax.vmap(jax.grad(loss, (0, 1)), (0, None)))(many, k), want, 1e-6)
    dq, dk = jax.jit(jax.grad(lambda many, k: jax.vmap(loss, (0, None))(many, k).sum(), (0, 1)))(many, k)
    _assert_close([dq, dk], [want[0], want[1].sum(0)], 2e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_scan_of_layers(place, wrap):
    q, k, v = (x[..., :16] for x in _inputs(place))
    layer = wrap(lambda x: x + fa.flash_attn_func(x, k, v, causal=True))

    def scanned(q):
        return jax.lax.scan(lambda x, _: (layer(x), None), q, None, length=3)[0]

    def unrolled(q):
        return functools.reduce(lambda x, _: x + _standard(x, k, v, causal=True), range(3), q)

    _assert_close([jax.jit(scanned)(q)], [unrolled(q)], 2e-5)
    _assert_close(_gradients(scanned, [q]), _gradients(unrolled, [q]), 5e-5)


def test_one_program_called_again_and_again(place):
    """The program has enough calls that XLA may capture it in a CUDA graph, and replay it on other arrays."""
    q, k, v = (x[..., :16] for x in _inputs(place))

    def chain(attend, q):
        return functools.reduce(lambda x, _: x / 2 + attend(x, k, v), range(8), q)

    program = jax.jit(jax.value_and_grad(lambda q: jnp.sin(chain(fa.flash_attn_func, q)).sum()))
    want = jax.jit(jax.value_and_grad(lambda q: jnp.sin(chain(_standard, q)).sum()))
    for i in range(5):
        _assert_close(program(q * (1 - i / 5)), want(q * (1 - i / 5)), 2e-4)


def test_one_function_for_calls_of_any_size(place):
    """State that is kept of a call belongs to the shapes of its arrays, so each size gives its own result again."""

    def attend(q, k, v, through_lse):
        out, lse = fa.flash_attn_func(q, k, v, causal=True, return_lse=True)
        return (out, lse) if through_lse else out

    def wanted(q, k, v, through_lse):
        out, lse = _standard(q, k, v, causal=True, return_lse=True)
        return (out, lse) if through_lse else out

    def loss(function, q, k, v, through_lse):
        return sum(jnp.sin(x).sum() for x in jax.tree.leaves(function(q, k, v, through_lse)))

    program = jax.jit(jax.value_and_grad(functools.partial(loss, attend), (0, 1, 2)), static_argnums=3)
    expected = jax.jit(jax.value_and_grad(functools.partial(loss, wanted), (0, 1, 2)), static_argnums=3)
    for sizes, through_lse in (((5, 9), 0), ((70, 130), 1), ((5, 9), 1), ((1, 1), 0), ((70, 130), 0), ((5, 9), 0)):
        inputs = _inputs(place, seqlen_q=sizes[0], seqlen_k=sizes[1])
        got, want = (jax.tree.leaves(f(*inputs, through_lse)) for f in (program, expected))
        _assert_close(got, want, 2e-4)


def test_a_kernel_forced_after_tracing(place, monkeypatch):
    """A program has the workspace that its kernel needed when it was traced. A kernel forced later gives the right
    result, or is refused."""
    q, k, v = _inputs(place, seqlen_q=70, seqlen_k=130)
    program = jax.jit(functools.partial(fa.flash_attn_func, causal=True))
    want = program(q, k, v)
    device = "cpu" if q.device.platform == "cpu" else "cuda"
    for kernel in fa.kernels():
        if kernel["device"] != device:
            continue
        monkeypatch.setenv("FLASH_ATTN_KERNEL", kernel["name"])
        try:
            got = jax.block_until_ready(program(q, k, v))
        except Exception as error:  # jaxlib's own class
            assert kernel["name"] in str(error) or "workspace" in str(error)
            continue
        np.testing.assert_allclose(got, want, atol=2e-3)
    monkeypatch.delenv("FLASH_ATTN_KERNEL")
    np.testing.assert_array_equal(program(q, k, v), want)


@pytest.mark.parametrize("wanted", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=["out", "lse", "both"])
def test_shard_map(place, wanted):
    """Some arrays differ over the mesh; the gradients of arrays that do not are summed over it."""
    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        pytest.skip("this JAX has no jax.shard_map")
    q, k, v = _inputs(place)
    slopes, mask = place([0.1, 0.2, 0.3, 0.4]), place(np.tri(37), bool)
    mesh = jax.sharding.Mesh(list(q.devices()), ("x",))
    P = jax.sharding.PartitionSpec

    def attend(q, k, v):
        both = fa.flash_attn_func(q[None], k[None], v[None], alibi_slopes=slopes, mask=mask, return_lse=True)
        return [x[0] for x in both][wanted]

    def sharded(q, k, v):
        one_by_one = shard_map(jax.vmap(lambda q: attend(q, k, v)), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return one_by_one(q)

    got = _gradients(sharded, [q, k[0], v[0]])
    want = _gradients(lambda q, k, v: [attend(x, k, v) for x in q], [q, k[0], v[0]])
    _assert_close(got, want, 2e-5)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
def test_nothing_in_it(place, shape):
    batch, seqlen_q, seqlen_k = shape
    q, k = place(np.ones((batch, seqlen_q, 2, 8))), place(np.ones((batch, seqlen_k, 2, 8)))
    bias = place(np.zeros((1, 2, seqlen_q, seqlen_k)))
    out, pull = jax.vjp(jax.jit(lambda q, k, bias: fa.flash_attn_func(q, k, k, bias=bias)), q, k, bias)
    np.testing.assert_array_equal(out, np.zeros(q.shape))
    for x, gradient in zip((q, k, bias), pull(jnp.ones_like(out)), strict=True):
        np.testing.assert_array_equal(gradient, np.zeros(x.shape))


def test_large_enough_for_workspace_and_threads(place):
    q, k, v = (place(np.random.default_rng(0).standard_normal((1, 700, 4, 64))) for _ in range(3))
    got = _gradients(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True), [q, k, v])
    want = _gradients(lambda q, k, v: _standard(q, k, v, causal=True), [q, k, v])
    _assert_close(got, want, 2e-4)


@pytest.mark.parametrize("kernel", [{"cpu": "cpu_naive", "gpu": "naive"}, {"cpu": "cpu_portable", "gpu": "minimal"}])
def test_a_forced_kernel_and_its_workspace(place, kernel):
    """In both programs the best kernel computes the gradient."""
    q, k, v = _inputs(place)
    kernel = kernel["cpu" if q.device.platform == "cpu" else "gpu"]
    got = jax.jit(lambda q, k, v: fa.flash_attn_func(q, k, v, kernel=kernel))(q, k, v)
    np.testing.assert_array_equal(got, fa.flash_attn_func(q, k, v, kernel=kernel))
    many = jax.vmap(lambda q: fa.flash_attn_func(q, k, v, kernel=kernel))(jnp.stack([q, q]))
    np.testing.assert_array_equal(many, [got, got])
    want = _gradients(_standard, [q, k, v])
    _assert_close(_gradients(lambda q, k, v: fa.flash_attn_func(q, k, v, kernel=kernel), [q, k, v]), want, 5e-5)


def test_numpy_scalars_as_options(place):
    q, k, v = _inputs(place)
    plain = {
        "softmax_scale": 0.125, "causal": True, "softcap": 3.0, "window_size": (9, 4), "dropout_p": 0.5,
        "dropout_seed": 7, "dropout_offset": 3, "deterministic": False, "top_left": True, "num_threads": 1,
        "allow_tf32": False, "return_lse": True, "fast_accum": False, "attention_chunk": 6,
    }  # fmt: skip
    numpy = {
        "softmax_scale": np.float32(0.125), "causal": np.bool_(True), "softcap": np.float64(3),
        "window_size": np.array([9, 4]), "dropout_p": np.float16(0.5), "dropout_seed": np.uint64(7),
        "dropout_offset": np.int8(3), "deterministic": np.bool_(False), "top_left": np.bool_(True),
        "num_threads": np.int32(1), "allow_tf32": np.bool_(False), "return_lse": np.bool_(True),
        "fast_accum": np.bool_(False), "attention_chunk": np.int64(6),
    }  # fmt: skip
    want = jax.jit(lambda q, k, v: fa.flash_attn_func(q, k, v, **plain))(q, k, v)
    got = jax.jit(lambda q, k, v: fa.flash_attn_func(q, k, v, **numpy))(q, k, v)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    scale = jnp.float32(0.125)
    got = jax.jit(lambda q, k, v: fa.flash_attn_func(q, k, v, softmax_scale=scale))(q, k, v)
    np.testing.assert_array_equal(got, fa.flash_attn_func(q, k, v, softmax_scale=0.125))


OPTIONS = {
    "dropout_p": 0.1, "causal": True, "softcap": 1.0, "deterministic": True, "top_left": True,
    "dropout_seed": 1, "dropout_offset": 1, "allow_tf32": True, "num_threads": 1, "return_lse": True,
    "attention_chunk": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("traced_q", [True, False])
def test_traced_options_are_refused_by_name(name, traced_q):
    q = jnp.zeros((1, 5, 2, 8))
    seed = {} if name == "dropout_seed" else {"dropout_seed": 0}

    def attend(q, option):
        return fa.flash_attn_func(q, q, q, **seed, **{name: option})

    with pytest.raises(fa.FlashAttnError, match=f"{name}( is a traced value|=.*Trace)"):
        if traced_q:
            jax.jit(attend)(q, OPTIONS[name])
        else:
            jax.jit(functools.partial(attend, q))(OPTIONS[name])
    with pytest.raises(fa.FlashAttnError, match=f"{name}( is a traced value|=.*Trace)"):
        jax.jit(lambda x: fa.flash_attn_func(q, q, q, **{name: x}))(OPTIONS[name])


def test_traced_pairs_and_lengths_are_refused_by_name():
    q, cu = jnp.zeros((1, 5, 2, 8)), jnp.array([0, 5], jnp.int32)
    with pytest.raises(fa.Unsupported, match="window_size is a traced value"):
        jax.jit(lambda q, left: fa.flash_attn_func(q, q, q, window_size=(left, 0)))(q, 3)
    with pytest.raises(fa.Unsupported, match="max_seqlen_k is a traced value"):
        jax.jit(lambda q, n: fa.flash_attn_varlen_func(q, q, q, cu, cu, 5, n))(q[0], 5)


def test_numpy_arrays_beside_traced_ones(place):
    q, k, v = _inputs(place)
    rng = np.random.default_rng(8)
    bias, mask = rng.standard_normal((37, 37)).astype(np.float32), rng.random((37, 37)) < 0.7
    arrays = {"k": np.asarray(k), "v": np.asarray(v)[:, :, :, ::-1], "bias": bias, "mask": mask}
    got = jax.jit(lambda q: fa.flash_attn_func(q, **arrays))(q)
    want = jax.jit(fa.flash_attn_func)(q, **{name: place(x, x.dtype) for name, x in arrays.items()})
    np.testing.assert_array_equal(got, want)
    assert got.devices() == q.devices()
    dk = jax.jit(jax.grad(lambda k: fa.flash_attn_func(np.asarray(q), k, arrays["v"]).sum()))(k)
    want = jax.jit(jax.grad(lambda k: fa.flash_attn_func(q, k, place(arrays["v"])).sum()))(k)
    np.testing.assert_array_equal(dk, want)


def test_foreign_arrays_are_refused_by_name():
    q = jnp.zeros((1, 5, 2, 8))
    wide, cu = np.zeros((1, 5, 2, 8)), np.array([0, 5])
    with pytest.raises(fa.BadArgument, match="q is float32, k is float64"):
        jax.jit(lambda q: fa.flash_attn_func(q, wide, q))(q)
    with pytest.raises(fa.BadArgument, match="bias is float64: expected float32"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, bias=np.zeros((5, 5))))(q)
    with pytest.raises(fa.BadArgument, match="cu_seqlens_q is int64: expected int32"):
        jax.jit(lambda q: fa.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5))(q[0])
    with pytest.raises(fa.BadArgument, match="v is a masked array"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, np.ma.masked_less(wide, 0)))(q)
    with pytest.raises(fa.BadArgument, match="sinks is a list"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, sinks=[0.0, 0.0]))(q)
    if torch is not None:
        with pytest.raises(fa.BadArgument, match="k is a PyTorch array, but the call is part of a JAX program"):
            jax.jit(lambda q: fa.flash_attn_func(q, torch.zeros(1, 5, 2, 8), q))(q)


def test_derivatives_that_are_not_served():
    q = jnp.ones((1, 5, 2, 8))

    def loss(q):
        return jnp.sin(fa.flash_attn_func(q, q, q)).sum()

    for twice in (jax.grad(lambda q: jax.grad(loss)(q).sum()), jax.jacrev(jax.grad(loss))):
        with pytest.raises(fa.Unsupported, match="second derivatives are not served"):
            twice(q)
        with pytest.raises(fa.Unsupported, match="second derivatives are not served"):
            jax.jit(twice)(q)
    for forward in (jax.jacfwd(loss), jax.hessian(loss)):  # in JAX's words
        with pytest.raises(TypeError, match="forward-mode.*custom_vjp"):
            forward(q)
    step = jax.grad(lambda q: loss(q - jax.lax.stop_gradient(jax.grad(loss)(q))))
    np.testing.assert_allclose(step(q), jax.grad(loss)(q - jax.grad(loss)(q)), atol=1e-5)


def test_refused():
    q = jnp.zeros((1, 5, 2, 8))
    with pytest.raises(fa.BadArgument, match="k has shape"):
        jax.jit(lambda q: fa.flash_attn_func(q, q[..., :4], q))(q)
    with pytest.raises(fa.BadArgument, match="causal=3 is neither True nor False"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, causal=3))(q)
    with pytest.raises(fa.Unsupported, match="out is given"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, out=q))(q)
    with pytest.raises(fa.Unsupported, match="float8"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q))(q.astype(jnp.float8_e4m3fn))
    with pytest.raises(fa.Unsupported, match="q_descale is given, but float8"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, q_descale=q))(q)
    with pytest.raises(
        fa.BadArgument, match="nheads=3 is not a multiple of nheads_k=2"
    ):  # the library's, while tracing
        jax.jit(lambda q, k: fa.flash_attn_func(q, k, k))(jnp.zeros((1, 5, 3, 8)), q)
    with pytest.raises(fa.BadArgument, match="kernel=fast is not a kernel of this build"):
        jax.eval_shape(lambda q: fa.flash_attn_func(q, q, q, kernel="fast"), q)
