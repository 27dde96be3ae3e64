"""Arrays that the kernels do not take, but that calls serve: a bias or mask whose columns are strided, or one column
for all keys; and sinks and ALiBi slopes of 16 bits. And the advice in refusals, in terms of the caller's framework: the
tests follow it, and it works."""

import re

import numpy as np
import pytest
from conftest import CPU, CUDA, NO_CUDA, Device, jax, ml_dtypes, torch

import flash_attn_minimal as fa
from flash_attn_minimal import _arrays
from flash_attn_minimal._core.fields import _columns
from flash_attn_minimal._core.recordings import Recording

BATCH, ROWS, KEYS, HEADS, DIM = 2, 5, 7, 4, 8
FRAMEWORKS = [CPU] + [Device("cpu", "torch")] * (torch is not None)


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


def qkv(device=CPU):
    shapes = (BATCH, ROWS, HEADS, DIM), (BATCH, KEYS, 2, DIM), (BATCH, KEYS, 2, DIM)
    return [device.array(draw(*shape) + 0.1 * i) for i, shape in enumerate(shapes)]


@pytest.fixture(params=FRAMEWORKS, ids=lambda device: device.framework)
def host(request):
    return request.param


@pytest.fixture(
    params=[*FRAMEWORKS, pytest.param(CUDA, marks=pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA or "-"))],
    ids=lambda device: f"{device.name}-{device.framework}",
)
def place(request):
    """Both frameworks of the CPU, and that of a GPU if there is one."""
    return request.param


def strided(device, dense):
    """The array with its columns two elements apart, and zeros between them."""
    wide = np.full((*dense.shape, 2), 0, dense.dtype)
    wide[..., 0] = dense
    return device.array(wide)[..., 0]


def transposed(device, dense):
    """The array with its columns outermost in memory, as T5 makes its bias."""
    last = list(range(dense.ndim))[-1:] + list(range(dense.ndim))[:-1]
    back = [*range(1, dense.ndim), 0]
    moved = device.array(np.ascontiguousarray(dense.transpose(last)))
    return moved.permute(back) if device.framework == "torch" else moved.transpose(back)


def repeated(device, column):
    """One column, expanded to all keys by stride 0."""
    if device.framework == "torch":
        return device.array(column).expand(*column.shape[:-1], KEYS)
    module = np if device.framework == "numpy" else __import__("cupy")
    return module.broadcast_to(device.array(column), (*column.shape[:-1], KEYS))


SHAPES = [(BATCH, HEADS, ROWS), (1, HEADS, ROWS), (HEADS, ROWS), (BATCH, 1, 1), (ROWS,), ()]


@pytest.mark.parametrize("name", ["bias", "mask"])
@pytest.mark.parametrize("layout", [strided, transposed, repeated, "one column"])
@pytest.mark.parametrize("rows", SHAPES, ids=str)
def test_columns_of_any_stride(place, name, layout, rows):
    dense = draw(*rows, 1 if layout in (repeated, "one column") else KEYS)
    if name == "mask":
        dense = dense > -0.5
    q, k, v = qkv(place)
    given = place.array(dense) if layout == "one column" else layout(place, dense)
    full = place.array(np.ascontiguousarray(np.broadcast_to(dense, (*rows, KEYS))))
    want, want_lse = fa.flash_attn_func(q, k, v, **{name: full}, return_lse=True)
    for _ in range(4):  # the later ones would be repeats of the first
        out, lse = fa.flash_attn_func(q, k, v, **{name: given}, return_lse=True)
        np.testing.assert_array_equal(place.numpy(out), place.numpy(want))
        np.testing.assert_array_equal(place.numpy(lse), place.numpy(want_lse))
    other = place.array(np.ascontiguousarray(np.broadcast_to(dense[..., ::-1], (*rows, KEYS))))
    out = fa.flash_attn_func(q, k, v, **{name: given}, return_lse=True)[0]
    again = fa.flash_attn_func(q, k, v, **{name: other}, return_lse=True)[0]
    if dense.shape[-1] > 1:
        assert not np.array_equal(place.numpy(out), place.numpy(again))
    assert fa.query(q, k, v, **{name: given}).status == "FA_OK"


@pytest.mark.parametrize("layout", [strided, transposed, repeated, "one column"])
@pytest.mark.parametrize("rows", SHAPES[:-1], ids=str)
def test_the_gradient_has_the_shape_of_the_bias(place, layout, rows):
    dense = draw(*rows, 1 if layout in (repeated, "one column") else KEYS)
    q, k, v = qkv(place)
    given = place.array(dense) if layout == "one column" else layout(place, dense)
    full = place.array(np.ascontiguousarray(np.broadcast_to(dense, (*rows, KEYS))))
    out, lse = fa.flash_attn_func(q, k, v, bias=full, return_lse=True)
    dout, dlse = place.array(draw(*out.shape)), place.array(draw(*lse.shape))
    *_, want = fa.backward(dout, q, k, v, out, lse, dlse=dlse, bias=full, return_dbias=True)
    want = place.numpy(want)
    for _ in range(3):
        *_, dbias = fa.backward(dout, q, k, v, out, lse, dlse=dlse, bias=given, return_dbias=True)
        assert tuple(dbias.shape) == tuple(given.shape)
        got = place.numpy(dbias)
        np.testing.assert_allclose(got, want.sum(-1, keepdims=True) if got.shape[-1] == 1 else want, atol=1e-5)
    assert np.abs(want).max() > 0.01


def test_a_repeated_axis_is_copied_once(host):
    bias = transposed(host, draw(ROWS, KEYS))
    full = (BATCH, HEADS, ROWS, KEYS)
    bias = np.broadcast_to(bias, full) if host.framework == "numpy" else bias.expand(full)
    views = []
    copied = _columns(views, "bias", _arrays.view(bias, "bias"), KEYS)
    assert tuple(copied.shape) == (1, 1, ROWS, KEYS) and copied.strides[-1] == 1 and views == [copied]


SIXTEEN = ["float16"] + ["bfloat16"] * (ml_dtypes is not None)


@pytest.mark.parametrize("dtype", SIXTEEN)
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_sixteen_bits_for_each_head(place, name, dtype):
    if place.framework == "cupy" and dtype == "bfloat16":
        pytest.skip("CuPy has no bfloat16")
    q, k, v = qkv(place)
    given = place.array(draw(HEADS), dtype)
    full = place.array(place.numpy(given).astype(np.float32))
    want = place.numpy(fa.flash_attn_func(q, k, v, **{name: full}))
    for _ in range(3):
        np.testing.assert_array_equal(place.numpy(fa.flash_attn_func(q, k, v, **{name: given})), want)
    for _ in range(3):
        got = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=KEYS, **{name: given})
        np.testing.assert_allclose(place.numpy(got), want, atol=1e-5)
    if name == "sinks":
        out, lse = fa.flash_attn_func(q, k, v, sinks=full, return_lse=True)
        *_, want = fa.backward(out, q, k, v, out, lse, sinks=full, return_dsinks=True)
        *_, got = fa.backward(out, q, k, v, out, lse, sinks=given, return_dsinks=True)
        np.testing.assert_array_equal(place.numpy(got), place.numpy(want))


def test_a_recording_copies_nothing():
    q, k, v = qkv()
    with Recording(), pytest.raises(fa.Unsupported, match="bias is float32, shape .* would be copied"):
        fa.flash_attn_func(q, k, v, bias=strided(CPU, draw(ROWS, KEYS)))
    with Recording(), pytest.raises(fa.Unsupported, match="sinks is float16, .*; pass float32 of shape"):
        fa.flash_attn_func(q, k, v, sinks=np.zeros(HEADS, np.float16))


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
@pytest.mark.parametrize("compiled", [False, True])
def test_pytorch_records_it(compiled):
    bias = torch.tensor(draw(HEADS, ROWS, 1), requires_grad=True)
    across = torch.tensor(draw(ROWS, KEYS, HEADS), requires_grad=True)  # of stride HEADS, once permuted
    sinks = torch.tensor(draw(HEADS)).to(torch.bfloat16).requires_grad_()
    q, k, v = qkv(Device("cpu", "torch"))

    def loss(q, k, v, bias, across, sinks):
        first = fa.flash_attn_func(q, k, v, bias=bias, sinks=sinks)
        return (first * fa.flash_attn_func(q, k, v, bias=across.permute(2, 0, 1))).sum()

    def plain(q, k, v, bias, across, sinks):
        given = bias.expand(HEADS, ROWS, KEYS).contiguous(), sinks.float()
        first = fa.flash_attn_func(q, k, v, bias=given[0], sinks=given[1])
        return (first * fa.flash_attn_func(q, k, v, bias=across.permute(2, 0, 1).contiguous())).sum()

    wanted = torch.autograd.grad(plain(q, k, v, bias, across, sinks), (bias, across, sinks))
    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    for _ in range(3):
        got = torch.autograd.grad(run(q, k, v, bias, across, sinks), (bias, across, sinks))
        for x, want, array in zip(got, wanted, (bias, across, sinks), strict=True):
            assert x.dtype == array.dtype and x.shape == array.shape
            torch.testing.assert_close(x, want, atol=1e-5, rtol=1e-2 if array is sinks else 1e-5)


@pytest.mark.skipif(jax is None, reason="JAX is not installed")
def test_jax_traces_it():
    import jax.numpy as jnp

    q, k, v = map(jnp.asarray, qkv())
    bias, sinks = jnp.asarray(draw(HEADS, ROWS, 1)), jnp.asarray(draw(HEADS), jnp.bfloat16)
    mask = jnp.asarray(draw(ROWS, 1) > -0.5)

    def loss(bias, sinks):
        return fa.flash_attn_func(q, k, v, bias=bias, sinks=sinks, mask=mask, alibi_slopes=sinks)[..., 0].sum()

    def plain(bias, sinks):
        full = jnp.broadcast_to(bias, (HEADS, ROWS, KEYS)), sinks.astype(jnp.float32)
        options = {"mask": jnp.broadcast_to(mask, (ROWS, KEYS)), "alibi_slopes": jax.lax.stop_gradient(full[1])}
        return fa.flash_attn_func(q, k, v, bias=full[0], sinks=full[1], **options)[..., 0].sum()

    assert float(loss(bias, sinks)) == float(jax.jit(plain)(bias, sinks))
    got = jax.jit(jax.grad(loss, (0, 1)))(bias, sinks)
    for x, want, array in zip(got, jax.grad(plain, (0, 1))(bias, sinks), (bias, sinks), strict=True):
        assert x.dtype == array.dtype and x.shape == array.shape
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(want, np.float32), atol=1e-5)


# ---- the advice in refusals ----


def advised(call, choice=0, **names):
    """Evaluates the expression that a refused call advises to pass. choice: which, where it advises several."""
    with pytest.raises(fa.FlashAttnError) as caught:
        call()
    words = re.findall(r"; (?:(?:for|if) [^;]*?)?pass ([^;]+)", str(caught.value))
    assert words, caught.value
    modules = {"np": np, "torch": torch, "jax": jax, "jnp": jax and jax.numpy}
    return eval(words[choice], {**modules, **names})


@pytest.fixture(params=["numpy"] + ["torch"] * (torch is not None) + ["jax"] * (jax is not None))
def framework(request):
    """A function that turns a NumPy array into an array of the framework."""
    return {"numpy": np.asarray, "torch": torch and torch.tensor, "jax": jax and jax.numpy.asarray}[request.param]


def test_cu_seqlens_of_another_dtype_or_none(framework):
    q, k = framework(draw(10, 4, 8)), framework(draw(10, 2, 8))
    good = framework(np.array([0, 5, 10], np.int32))
    want = np.asarray(fa.flash_attn_varlen_func(q, k, k, good, good, 5, 5))
    for bad in (framework(np.array([0, 5, 10], np.int16)), [0, 5, 10], np.array([0, 5, 10], np.int64)):
        if type(bad) is np.ndarray and bad.dtype == np.int64 and framework is np.asarray:
            continue
        cu = advised(lambda bad=bad: fa.flash_attn_varlen_func(q, k, k, bad, good, 5, 5), q=q, cu_seqlens_q=bad)
        np.testing.assert_array_equal(np.asarray(fa.flash_attn_varlen_func(q, k, k, cu, good, 5, 5)), want)
    most = advised(lambda: fa.flash_attn_varlen_func(q, k, k, good, good, 5, None), cu_seqlens_k=good)
    assert most == 5


def test_dtypes(framework):
    q, k, v = map(framework, qkv())
    half = framework(draw(BATCH, KEYS, 2, DIM).astype(np.float16))
    k_again = advised(lambda: fa.flash_attn_func(q, half, v), q=q, k=half)
    fa.flash_attn_func(q, k_again, v)
    bias = framework(draw(ROWS, KEYS).astype(np.float16))
    fa.flash_attn_func(q, k, v, bias=advised(lambda: fa.flash_attn_func(q, k, v, bias=bias), q=q, bias=bias))
    mask = framework(draw(ROWS, KEYS))
    fa.flash_attn_func(q, k, v, mask=advised(lambda: fa.flash_attn_func(q, k, v, mask=mask), mask=mask))
    whole = framework(np.arange(DIM * KEYS * 2 * BATCH, dtype=np.int32).reshape(k.shape))
    assert "float32" in str(advised(lambda: fa.flash_attn_func(whole, whole, whole), q=whole).dtype)


def test_shapes(framework):
    q, k, v = map(framework, qkv())
    bias = framework(draw(ROWS, KEYS + 3))
    cut = advised(lambda: fa.flash_attn_func(q, k, v, bias=bias), bias=bias)
    fa.flash_attn_func(q, k, v, bias=cut)
    sinks = framework(draw(1, HEADS, 1, 1))
    fa.flash_attn_func(q, k, v, sinks=advised(lambda: fa.flash_attn_func(q, k, v, sinks=sinks), sinks=sinks))
    alone = advised(lambda: fa.flash_attn_func(q[0], k[0], v[0]), -1, q=q[0])
    assert alone.shape == (1, *q.shape[1:])
    flat = q.reshape(*q.shape[:2], -1)
    split = advised(lambda: fa.flash_attn_func(flat, k, v), q=flat, nheads=HEADS)
    np.testing.assert_array_equal(np.asarray(split), np.asarray(q))


def test_lists_and_arrays_of_another_framework(framework):
    q, k, v = map(framework, qkv())
    fa.flash_attn_func(q, advised(lambda: fa.flash_attn_func(q, np.asarray(k).tolist(), v), q=q, k=k.tolist()), v)
    if framework is not np.asarray:
        host = np.asarray(v)
        fa.flash_attn_func(q, k, advised(lambda: fa.flash_attn_func(q, k, host), q=q, v=host))


@pytest.mark.parametrize("host", FRAMEWORKS, ids=lambda device: device.framework)
def test_strides(host):
    q, k, v = qkv(host)
    wide = strided(host, draw(BATCH, ROWS, HEADS, DIM))
    fa.flash_attn_func(advised(lambda: fa.flash_attn_func(wide, k, v), q=wide), k, v)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    broken = strided(host, host.numpy(lse))
    fa.merge(out, lse, out, advised(lambda: fa.merge(out, lse, out, broken), lse_b=broken))


def test_no_advice_where_nothing_would_help():
    q, k, v = qkv()
    for bad in (None, "k", True):
        with pytest.raises(fa.BadArgument) as caught:
            fa.flash_attn_func(q, bad, v)
        assert "; pass" not in str(caught.value)
    with pytest.raises(fa.BadArgument, match=r"does not broadcast .* = \(2, 4, 5, 7\)$"):
        fa.flash_attn_func(q, k, v, bias=draw(ROWS, 3))
