"""JAX: the functions of the package under jit, grad and vmap, through XLA's foreign function interface."""

import numpy as np
import pytest
from conftest import CUDA_DEVICES

jax = pytest.importorskip("jax")
jnp = jax.numpy

import flash_attn_minimal as fa  # noqa: E402


def _platforms():
    try:
        gpus = jax.devices("gpu") if CUDA_DEVICES else []
    except RuntimeError:
        gpus = []
    skip = pytest.mark.skip(reason="no CUDA device for the library and JAX")
    return ["cpu", "gpu" if gpus else pytest.param("gpu", marks=skip)]


@pytest.fixture(autouse=True)
def _real_float32():
    with jax.default_matmul_precision("highest"):  # of the reference: a GPU would take tf32
        yield


@pytest.fixture(params=_platforms())
def place(request):
    device = jax.devices(request.param)[0]
    return lambda x, dtype=jnp.float32: jax.device_put(jnp.asarray(x, dtype), device)


def _inputs(place, dtype=jnp.float32, seqlen_q=37, seqlen_k=37):
    rng = np.random.default_rng(3)
    shapes = ((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 24))
    return [place(rng.standard_normal(shape), dtype) for shape in shapes]


def _standard(q, k, v, bias=None, causal=False, sinks=None):
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k) / np.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if causal:
        s = jnp.where(jnp.tril(jnp.ones(s.shape[2:], bool), s.shape[3] - s.shape[2]), s, -jnp.inf)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[None, :, None, None], (*s.shape[:3], 1))], -1)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s)[..., : k.shape[1]], v)


def _gradients(function, inputs):
    def loss(*inputs):
        return jnp.sin(function(*inputs).astype(jnp.float32)).sum()

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


def test_mask_slopes_and_dropout(place):
    """Arrays without a gradient, and every kind of option, reach the library as in an eager call."""
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


def test_varlen(place):
    q, k, v = (x[0] for x in _inputs(place, seqlen_q=40, seqlen_k=50))
    cu_q, cu_k = place([0, 15, 36], jnp.int32), place([0, 20, 48], jnp.int32)  # the last rows belong to nobody

    def attend(q, k, v):
        return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 25, 30, causal=True)

    def by_sequence(q, k, v):
        parts = [((0, 15), (0, 20)), ((15, 36), (20, 48))]
        one = [_standard(q[None, a:b], k[None, c:d], v[None, c:d], causal=True)[0] for (a, b), (c, d) in parts]
        return jnp.concatenate([*one, jnp.zeros((4, *one[0].shape[1:]))])

    _assert_close([jax.jit(attend)(q, k, v)], [by_sequence(q, k, v)], 2e-5)
    _assert_close(_gradients(attend, [q, k, v]), _gradients(by_sequence, [q, k, v]), 5e-5)


def test_vmap(place):
    q, k, v = _inputs(place)
    many = jnp.stack([q, 2 * q, -q])
    got = jax.vmap(lambda q: fa.flash_attn_func(q, k, v))(many)
    _assert_close(got, [fa.flash_attn_func(x, k, v) for x in many], 1e-6)


def test_large_enough_for_workspace_and_threads(place):
    q, k, v = (place(np.random.default_rng(0).standard_normal((1, 700, 4, 64))) for _ in range(3))
    got = _gradients(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True), [q, k, v])
    want = _gradients(lambda q, k, v: _standard(q, k, v, causal=True), [q, k, v])
    _assert_close(got, want, 2e-4)


def test_refused():
    q = jnp.zeros((1, 5, 2, 8))
    with pytest.raises(fa.BadArgument, match="k has shape"):
        jax.jit(lambda q: fa.flash_attn_func(q, q[..., :4], q))(q)
    with pytest.raises(fa.BadArgument, match="causal=3 is neither True nor False"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, causal=3))(q)
    with pytest.raises(fa.Unsupported, match="softmax_scale is a traced value"):
        jax.jit(lambda q, scale: fa.flash_attn_func(q, q, q, softmax_scale=scale))(q, 1.0)
    with pytest.raises(fa.Unsupported, match="out is given"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, out=q))(q)
    with pytest.raises(Exception, match="nheads=3 is not a multiple of nheads_k=2"):  # the library's, from inside XLA
        jax.jit(lambda q, k: fa.flash_attn_func(q, k, k))(jnp.zeros((1, 5, 3, 8)), q).block_until_ready()
    with pytest.raises(Exception, match="kernel=fast is not a kernel of this build"):
        jax.jit(lambda q: fa.flash_attn_func(q, q, q, kernel="fast"))(q).block_until_ready()
