"""PyTorch when it does more than run calls: traces, modes, transforms, tensors without memory. The numbers are right,
or the refusal is ours."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
from conftest import CUDA_DEVICES

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import autograd, ops, quantized  # noqa: E402, F401

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
HAS_CUDA = CUDA_DEVICES and torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device for the library and PyTorch")
BATCH, ROWS, COLUMNS, HEADS, HEADS_K, DIM = 2, 9, 11, 4, 2, 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NO_CUDA)])
def device(request):
    return request.param


def _normal(device, *shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device)


def _qkv(device, *mapped):
    return (
        _normal(device, *mapped, BATCH, ROWS, HEADS, DIM),
        _normal(device, *mapped, BATCH, COLUMNS, HEADS_K, DIM),
        _normal(device, *mapped, BATCH, COLUMNS, HEADS_K, DIM) * 0.7,
    )


def _standard(q, k, v, bias=None, mask=None, alibi_slopes=None, sinks=None, causal=False):
    """(out, lse) in PyTorch's own operations, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    rows = torch.arange(s.shape[2], device=q.device)[:, None] + s.shape[3] - s.shape[2]
    columns = torch.arange(s.shape[3], device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[..., None, None] * (rows - columns).abs()
    if bias is not None:
        s = s + bias.double()
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if causal:
        s = s.masked_fill(columns > rows, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)
    out = torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., : k.shape[1]], v)
    return out, s.logsumexp(-1)


def _close(got, want, tolerance=1e-4):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def _options(device):
    """Every option that is a tensor, one by one, and together with the numbers."""
    bias, sinks = _normal(device, 1, HEADS, ROWS, COLUMNS), _normal(device, HEADS)
    mask = (_normal(device, BATCH, 1, ROWS, COLUMNS) > -0.5).logical_or(torch.eye(ROWS, COLUMNS, device=device) > 0)
    slopes = torch.linspace(0.1, 0.5, HEADS, device=device)
    return {
        "plain": {},
        "causal": {"causal": True},
        "bias": {"bias": bias},
        "row_bias": {"bias": bias[0, 0, 0]},
        "mask": {"mask": mask},
        "alibi": {"alibi_slopes": slopes},
        "alibi2": {"alibi_slopes": slopes.expand(BATCH, HEADS).contiguous()},
        "sinks": {"sinks": sinks},
        "all": {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks},
    }


OPTIONS = ["plain", "causal", "bias", "row_bias", "mask", "alibi", "alibi2", "sinks", "all"]
LENGTHS = ([0, 4, 9], [0, 6, 11])


def _varlen(q, k, v, **options):
    """The first batch entry's rows as two sequences."""
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=q.device) for cu in LENGTHS)
    return fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, **options)


def _varlen_standard(q, k, v):
    (a, b), (c, d) = LENGTHS[0][1:], LENGTHS[1][1:]
    parts = (slice(0, a), slice(0, c)), (slice(a, b), slice(c, d))
    return torch.cat([_standard(q[None, i], k[None, j], v[None, j])[0][0] for i, j in parts])


# ---- traces and graphs: called again, with other inputs ----


def _jit(function, inputs):
    return torch.jit.trace(function, inputs)


def _fx(function, inputs):
    return make_fx(function)(*inputs)


def _fx_symbolic(function, inputs):
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def _compiled(function, inputs):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _exported(function, inputs):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    return torch.export.export(Module(), inputs).module()


TRACERS = [_jit, _fx, _fx_symbolic, _compiled, _exported]


@pytest.mark.parametrize("trace", TRACERS)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_traced(device, trace, name):
    options = _options(device)[name]
    tensors = list(options)

    def attend(q, k, v, *rest):
        return fa.flash_attn_func(q, k, v, return_lse=True, causal=True, **dict(zip(tensors, rest, strict=True)))

    inputs = (*_qkv(device), *options.values())
    traced = trace(attend, inputs)
    others = (*(x.flip(1) + 0.5 for x in inputs[:3]), *options.values())
    want = _standard(*others[:3], **options, causal=True)
    for got, exact in zip(traced(*others), want, strict=True):
        _close(got, exact)


@pytest.mark.parametrize("trace", TRACERS)
def test_varlen_traced(device, trace):
    inputs = tuple(x[0] for x in _qkv(device))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in LENGTHS)
    traced = trace(lambda q, k, v, a, b: fa.flash_attn_varlen_func(q, k, v, a, b, 5, 6), (*inputs, cu_q, cu_k))
    others = tuple(x.flip(0) for x in inputs)
    _close(traced(*others, cu_q, cu_k), _varlen_standard(*others))


@pytest.mark.parametrize("trace", [_jit, _compiled])
def test_traced_gradients(device, trace):
    q, k, v = _qkv(device)
    traced = trace(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True), (q, k, v))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(traced(*inputs).square().sum(), inputs)
    want = torch.autograd.grad(_standard(*inputs, causal=True)[0].square().sum(), inputs)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


def test_dropout_is_the_same_in_a_trace(device):
    q, k, v = _qkv(device)

    def attend(q):
        return fa.flash_attn_func(q, k, v, 0.3, dropout_seed=2**64 - 5, dropout_offset=2**63 + 1)

    want = attend(q + 1)
    for trace in (_jit, _fx, _compiled):
        assert torch.equal(trace(attend, (q,))(q + 1), want)


def test_traced_after_a_plain_call_of_the_same_kind(device):
    """The shortcut for repeated calls is not taken while somebody watches."""
    q, k, v = _qkv(device)
    for _ in range(3):
        fa.flash_attn_func(q, k, v)
    traced = _jit(lambda q, k, v: fa.flash_attn_func(q, k, v), (q, k, v))
    assert "flash_attn_minimal::attention" in str(traced.graph)
    _close(traced(q + 1, k, v), _standard(q + 1, k, v)[0])


# ---- tensors without memory ----


@pytest.mark.parametrize("name", OPTIONS)
def test_fake_and_meta(device, name):
    inputs, options = _qkv(device), _options(device)[name]
    want = fa.flash_attn_func(*inputs, return_lse=True, **options)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        fake_options = {k: mode.from_tensor(x) if torch.is_tensor(x) else x for k, x in options.items()}
        fake = fa.flash_attn_func(*fakes, return_lse=True, **fake_options)
    outside = fa.flash_attn_func(*fakes, return_lse=True, **fake_options)
    metas = [x.to("meta") for x in inputs]
    meta_options = {k: x.to("meta") if torch.is_tensor(x) else x for k, x in options.items()}
    meta = fa.flash_attn_func(*metas, return_lse=True, **meta_options)
    for got, place in ((fake, device), (outside, device), (meta, "meta")):
        for x, y in zip(got, want, strict=True):
            assert (x.shape, x.dtype, x.stride(), x.device.type) == (y.shape, y.dtype, y.stride(), place)


def test_varlen_fake_and_meta(device):
    inputs = [x[0].requires_grad_() for x in _qkv(device)]
    out, lse = _varlen(*(x.detach().to("meta").requires_grad_() for x in inputs), return_lse=True)
    assert out.is_meta and out.shape == (ROWS, HEADS, DIM) and lse.shape == (HEADS, ROWS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        out = _varlen(*fakes)
        grads = torch.autograd.grad(out.sum(), fakes)
    assert out.shape == (ROWS, HEADS, DIM) and [x.shape for x in grads] == [x.shape for x in inputs]


def test_meta_gradients():
    inputs = [x.to("meta").requires_grad_() for x in _qkv("cpu")]
    bias = torch.zeros(HEADS, 1, COLUMNS, device="meta", requires_grad=True)
    sinks = torch.zeros(HEADS, device="meta", requires_grad=True)
    given = (*inputs, bias, sinks)
    grads = torch.autograd.grad(fa.flash_attn_func(*inputs, bias=bias, sinks=sinks).sum(), given)
    assert all(x.is_meta and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(grads, given, strict=True))


def test_meta_shapes_are_looked_at():
    q, k, v = (x.to("meta") for x in _qkv("cpu"))
    with pytest.raises(fa.BadArgument, match="k has shape"):
        fa.flash_attn_func(q, k[0], v)
    with pytest.raises(fa.BadArgument, match="v is torch.float16"):
        fa.flash_attn_func(q, k, v.half())
    with pytest.raises(fa.BadArgument, match="sinks is on cpu, but q is on meta"):
        fa.flash_attn_func(q, k, v, sinks=torch.zeros(HEADS))


# ---- transforms of torch.func ----


@pytest.mark.parametrize("name", OPTIONS)
def test_func_grad(device, name):
    inputs, options = _qkv(device), _options(device)[name]
    got = torch.func.grad(lambda *a: fa.flash_attn_func(*a, **options).square().sum(), (0, 1, 2))(*inputs)
    want = torch.func.grad(lambda *a: _standard(*a, **options)[0].square().sum(), (0, 1, 2))(*inputs)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


def test_func_grad_of_bias_and_sinks(device):
    q, k, v = _qkv(device)
    bias, sinks = _normal(device, HEADS, 1, COLUMNS), _normal(device, HEADS)

    def loss(attend):
        return lambda bias, sinks: attend(q, k, v, bias=bias, sinks=sinks).square().sum()

    got = torch.func.grad(loss(fa.flash_attn_func), (0, 1))(bias, sinks)
    want = torch.func.grad(loss(lambda *a, **o: _standard(*a, **o)[0]), (0, 1))(bias, sinks)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 2, 0), (4, 1, -1), (None, None, 3)])
@pytest.mark.parametrize("name", OPTIONS)
def test_vmap(device, in_dims, name):
    options = _options(device)[name]
    inputs = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(_qkv(device, 3), in_dims, strict=True)
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # "there is a performance drop because we have not implemented the batching rule"
        out, lse = torch.vmap(lambda *a: fa.flash_attn_func(*a, return_lse=True, **options), in_dims)(*inputs)
    for i in range(3):
        entry = [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)]
        want = _standard(*entry, **options)
        _close(out[i], want[0])
        _close(lse[i], want[1])


@pytest.mark.parametrize("name", ["bias", "row_bias", "mask", "alibi", "alibi2", "sinks"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_vmap_over_an_option(device, name, shared, last):
    """shared: q, k and v are the same for all entries. last: the mapped axis is the last one."""
    ((option, x),) = _options(device)[name].items()
    xs = torch.stack([x, x.flip(-1), x.roll(1, -1)], -1 if last else 0)
    inputs = _qkv(device) if shared else _qkv(device, 3)
    dim = None if shared else 0
    out = torch.vmap(lambda q, k, v, x: fa.flash_attn_func(q, k, v, **{option: x}), (dim, dim, dim, -1 if last else 0))(
        *inputs, xs
    )
    for i in range(3):
        entry = inputs if shared else [x[i] for x in inputs]
        _close(out[i], _standard(*entry, **{option: xs.select(-1 if last else 0, i)})[0])


def test_vmap_with_dropout_is_a_loop(device):
    q, k, v = _qkv(device, 3)

    def attend(q, k, v):
        return fa.flash_attn_func(q, k, v, 0.4, dropout_seed=11)

    assert torch.equal(torch.vmap(attend)(q, k, v), torch.stack([attend(*x) for x in zip(q, k, v, strict=True)]))


def test_vmap_varlen(device):
    inputs = [x[:, 0] for x in _qkv(device, 3)]
    got = torch.vmap(lambda q, k, v: _varlen(q, k, v))(*inputs)
    for i in range(3):
        _close(got[i], _varlen_standard(*(x[i] for x in inputs)))
    grads = torch.vmap(torch.func.grad(lambda q, k, v: _varlen(q, k, v).square().sum()))(*inputs)
    want = torch.vmap(torch.func.grad(lambda q, k, v: _varlen_standard(q, k, v).square().sum()))(*inputs)
    _close(grads, want)


@pytest.mark.parametrize("order", ["vmap_grad", "grad_vmap"])
@pytest.mark.parametrize("argnums", [(0, 1, 2), (1,), (3, 4), (0, 3)])
def test_vmap_and_grad(device, order, argnums):
    inputs = (*_qkv(device, 3), _normal(device, HEADS, 1, COLUMNS), _normal(device, 3, HEADS))
    in_dims = (0, 0, 0, None, 0)

    def loss(attend):
        def entry(q, k, v, bias, sinks):
            return attend(q, k, v, bias=bias, sinks=sinks).square().sum()

        if order == "vmap_grad":
            return torch.vmap(torch.func.grad(entry, argnums), in_dims)
        return torch.func.grad(lambda *a: torch.vmap(entry, in_dims)(*a).sum(), argnums)

    got = loss(fa.flash_attn_func)(*inputs)
    want = loss(lambda *a, **o: _standard(*a, **o)[0])(*inputs)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


def test_vmap_of_vmap(device):
    inputs = _qkv(device, 2, 3)
    got = torch.vmap(torch.vmap(lambda q, k, v: fa.flash_attn_func(q, k, v)), (1, 1, 1))(*inputs)
    want = torch.vmap(torch.vmap(lambda q, k, v: _standard(q, k, v)[0]), (1, 1, 1))(*inputs)
    _close(got, want)


def test_backward_through_vmap(device):
    """Transforms inside, the tape of plain autograd outside."""
    inputs = [x.requires_grad_() for x in _qkv(device, 3)]
    got = torch.autograd.grad(torch.vmap(lambda *a: fa.flash_attn_func(*a))(*inputs).square().sum(), inputs)
    want = torch.autograd.grad(torch.vmap(lambda *a: _standard(*a)[0])(*inputs).square().sum(), inputs)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


def test_jacrev(device):
    q, k, v = (x[:, :3] for x in _qkv(device))
    got = torch.func.jacrev(lambda q: fa.flash_attn_func(q, k, v, causal=True))(q)
    _close(got, torch.func.jacrev(lambda q: _standard(q, k, v, causal=True)[0])(q))


def test_constant_inside_a_transform(device):
    """A call on tensors that the transform does not touch."""
    q, k, v = _qkv(device)
    got = torch.func.grad(lambda x: (x * fa.flash_attn_func(q, k, v)).sum())(torch.ones((), device=device))
    _close(got, _standard(q, k, v)[0].sum())


def test_make_fx_of_grad(device):
    q, k, v = _qkv(device)
    graph = make_fx(torch.func.grad(lambda q, k, v: fa.flash_attn_func(q, k, v).square().sum()))(q, k, v)
    want = torch.func.grad(lambda q, k, v: _standard(q, k, v)[0].square().sum())(q + 1, k, v)
    _close(graph(q + 1, k, v), want)


# ---- lse's gradient ----


@pytest.mark.parametrize("how", ["eager", "func", "compiled"])
@pytest.mark.parametrize("name", ["plain", "causal", "all"])
def test_gradient_of_lse(device, how, name):
    inputs, options = (*_qkv(device), _normal(device, HEADS)), _options(device)[name]
    options.pop("sinks", None)

    def loss(attend):
        def total(q, k, v, sinks):
            out, lse = attend(q, k, v, sinks=sinks, **options)
            return out.square().sum() + lse.sin().sum()

        return total

    want = torch.func.grad(loss(_standard), (0, 1, 2, 3))(*inputs)
    ours = loss(lambda *a, **o: fa.flash_attn_func(*a, return_lse=True, **o))
    if how == "func":
        got = torch.func.grad(ours, (0, 1, 2, 3))(*inputs)
    else:
        inputs = [x.requires_grad_() for x in inputs]
        got = torch.autograd.grad((ours if how == "eager" else _compiled(ours, inputs))(*inputs), inputs)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


def test_gradient_of_lse_alone_and_varlen(device):
    q, k, v = (x[0].requires_grad_() for x in _qkv(device))
    sinks = _normal(device, HEADS).requires_grad_()
    _, lse = _varlen(q, k, v, sinks=sinks, return_lse=True)
    got = torch.autograd.grad(lse.sin().sum(), (q, k, sinks))
    (a, b), (c, d) = LENGTHS[0][1:], LENGTHS[1][1:]
    parts = (slice(0, a), slice(0, c)), (slice(a, b), slice(c, d))
    exact = sum(_standard(q[None, i], k[None, j], v[None, j], sinks=sinks)[1].sin().sum() for i, j in parts)
    for x, y in zip(got, torch.autograd.grad(exact, (q, k, sinks)), strict=True):
        _close(x, y)


def test_lse_has_no_gradient_with_dropout(device):
    q, k, v = (x.requires_grad_() for x in _qkv(device))
    out, lse = fa.flash_attn_func(q, k, v, 0.5, dropout_seed=1, return_lse=True)
    assert out.requires_grad and not lse.requires_grad


# ---- modes ----


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class SeenFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Seen, SeenFunctions])
@pytest.mark.parametrize("grad", [False, True])
def test_modes_see_the_operator(device, kind, grad):
    inputs = [x.requires_grad_(grad) for x in _qkv(device)]
    with kind() as mode:
        out = fa.flash_attn_func(*inputs)
        _varlen(*(x[0] for x in inputs))
    assert sum("flash_attn_minimal.attention" in name for name in mode.names) == 2
    _close(out, _standard(*inputs)[0])
    if grad and kind is Seen:
        with kind() as mode:
            out.sum().backward()
        assert any("attention_backward" in name for name in mode.names)


def test_modes_that_only_look_on_do_not_hinder(device):
    """out=, and functions that are no operators, under modes that work on real tensors."""
    q, k, v = _qkv(device)
    with Seen(), FlopCounterMode(display=False):
        out = torch.empty_like(q)
        assert fa.flash_attn_func(q, k, v, out=out) is out
        _, lse = fa.flash_attn_func(q, k, v, return_lse=True)
        merged, _ = fa.merge(out, lse, out, lse)
    _close(out, _standard(q, k, v)[0])
    _close(merged, out)


def test_default_device_stays_plain(device, monkeypatch):
    q, k, v = _qkv(device)
    monkeypatch.setattr(autograd, "_attention_op", None)
    with torch.device(device):
        _close(fa.flash_attn_func(q, k, v), _standard(q, k, v)[0])


def test_inference_mode(device):
    with torch.inference_mode():
        q, k, v = _qkv(device)
        for _ in range(3):
            out = fa.flash_attn_func(q, k, v)
    assert out.is_inference()
    _close(out, _standard(q, k, v)[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    inputs = [x.requires_grad_() for x in _qkv(device)]
    out = torch.utils.checkpoint.checkpoint(
        lambda *a: fa.flash_attn_func(*a, causal=True), *inputs, use_reentrant=reentrant
    )
    got = torch.autograd.grad if not reentrant else None
    if reentrant:
        out.square().sum().backward()
        got = [x.grad for x in inputs]
    else:
        got = torch.autograd.grad(out.square().sum(), inputs)
    want = torch.autograd.grad(_standard(*inputs, causal=True)[0].square().sum(), inputs)
    for x, y in zip(got, want, strict=True):
        _close(x, y)


def test_parameters_and_subclasses(device):
    class Mine(torch.Tensor):
        pass

    q, k, v = _qkv(device)
    sinks = torch.nn.Parameter(_normal(device, HEADS), requires_grad=False)
    want = _standard(q, k, v, sinks=sinks)[0]
    _close(fa.flash_attn_func(torch.nn.Parameter(q, requires_grad=False), k, v, sinks=sinks), want)
    mine = fa.flash_attn_func(*(x.as_subclass(Mine) for x in (q, k, v)), sinks=sinks)
    assert type(mine) is Mine
    _close(mine.as_subclass(torch.Tensor), want)


def test_numpy_is_not_concerned():
    q = np.ones((1, 3, 1, 4), np.float32)
    with Seen(), torch.device("cpu"):
        assert np.array_equal(fa.flash_attn_func(q, q, q), q)
    torch.jit.trace(lambda x: x + torch.as_tensor(fa.flash_attn_func(q, q, q)), torch.ones(1))


# ---- refusals ----


def test_double_backward_is_refused(device):
    inputs = [x.requires_grad_() for x in _qkv(device)]
    (dq,) = torch.autograd.grad(fa.flash_attn_func(*inputs).square().sum(), inputs[:1], create_graph=True)
    _close(dq, torch.autograd.grad(_standard(*inputs)[0].square().sum(), inputs[:1])[0])
    with pytest.raises(fa.Unsupported, match="double backward"):
        dq.sum().backward()
    loss = lambda q: fa.flash_attn_func(q, *inputs[1:]).square().sum()  # noqa: E731
    with pytest.raises(fa.Unsupported, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(inputs[0].detach())
    with pytest.raises(fa.Unsupported, match="forward-mode|double backward"):
        torch.func.hessian(loss)(inputs[0].detach())


def test_forward_mode_is_refused(device):
    q, k, v = _qkv(device)
    with pytest.raises(fa.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda q: fa.flash_attn_func(q, k, v), (q,), (q,))
    with pytest.raises(fa.Unsupported, match="forward-mode"):
        torch.func.jacfwd(lambda q: fa.flash_attn_func(q, k, v))(q)
    with torch.autograd.forward_ad.dual_level():
        _close(fa.flash_attn_func(q, k, v), _standard(q, k, v)[0])
        with pytest.raises(fa.Unsupported, match="k has a tangent: forward-mode"):
            fa.flash_attn_func(q, torch.autograd.forward_ad.make_dual(k, k), v)


@pytest.mark.parametrize("where", ["jit", "make_fx", "fake", "meta", "vmap"])
def test_out_is_refused(where):
    q, k, v = _qkv("cpu")

    def attend(q):
        return fa.flash_attn_func(q, k, v, out=torch.empty_like(q))

    with pytest.raises(fa.Unsupported, match="out is given, which attention does not take under"):
        _under(where, attend, q)


def _under(where, function, x):
    if where == "jit":
        torch.jit.trace(function, x, check_trace=False)
    elif where == "make_fx":
        make_fx(function)(x)
    elif where == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            function(mode.from_tensor(x))
    elif where == "meta":
        function(x.to("meta"))
    else:
        torch.vmap(function)(x[None])


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(f)(q),
    "vmap": lambda f, q: torch.func.vmap(f)(q[None]),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_inside_compiled_code_are_refused(name):
    """A jvp would lose its tangent there."""
    q, k, v = _qkv("cpu")

    def attend(q):
        return TRANSFORMS[name](lambda q: fa.flash_attn_func(q, k, v).sum(), q)

    with pytest.raises(Exception, match="under a transform of torch.func is not served inside torch.compile"):
        _compiled(attend, (q,))(q)


def test_vmap_over_nothing_is_refused():
    q, k, v = _qkv("cpu")
    with pytest.raises(fa.Unsupported, match="axis of length 0"):
        torch.vmap(lambda q: fa.flash_attn_func(q, k, v))(q.new_empty(0, *q.shape))


def _lse(x):
    return x.new_ones(BATCH, HEADS, ROWS)


UNSERVED = {
    "merge": lambda x: fa.merge(x, _lse(x), x, _lse(x)),
    "backward": lambda x: fa.backward(x, x, x, x, x, _lse(x)),
    "flash_attn_with_kvcache": lambda x: fa.flash_attn_with_kvcache(x, x, x),
    "quantize_fp8": lambda x: fa.quantize_fp8(x),
    "rms_norm": lambda x: ops.rms_norm(x[0, 0], x.new_ones(DIM)),
    "swiglu": lambda x: ops.swiglu(x[0, 0]),
    "linear": lambda x: ops.linear(x[0, 0], x[0, 1]),
    "rope": lambda x: ops.rope(x, *x.new_ones(2, ROWS, DIM // 2)),
    "sample": lambda x: ops.sample(x[0, 0]),
    "quantize": lambda x: quantized.W4Weight.quantize(x[0, 0].repeat(1, 8)),
    "quantize_kvcache": lambda x: fa.quantize_kvcache(x, x, "int8"),
}


@pytest.mark.parametrize("where", ["jit", "make_fx", "fake", "meta", "vmap"])
@pytest.mark.parametrize("name", UNSERVED)
def test_other_functions_are_refused_by_name(where, name):
    x = _normal("cpu", BATCH, ROWS, HEADS, DIM)
    if name != "quantize_fp8":
        for _ in range(2):  # the shortcut of the third call is not taken below
            UNSERVED[name](x)
    with pytest.raises(fa.Unsupported, match=name):
        _under(where, UNSERVED[name], x)


# ---- another PyTorch ----

LATE = """
import flash_attn_minimal as fa
import torch
for name in {missing}:
    delattr(torch._C, name)
q = torch.ones(1, 3, 2, 8)
for _ in range(3):
    assert torch.equal(fa.flash_attn_func(q, q, q), q)
{then}
"""
TRACE = """
traced = torch.jit.trace(lambda q: fa.flash_attn_func(q, q, q), q)
assert torch.equal(traced(q + 1), q + 1)
assert fa.flash_attn_func(q.to("meta"), q.to("meta"), q.to("meta")).is_meta
"""


@pytest.mark.parametrize("missing", [[], ["_are_functorch_transforms_active", "_is_torch_function_mode_enabled"]])
def test_imported_later_and_without_private_names(missing):
    subprocess.run([sys.executable, "-c", LATE.format(missing=missing, then="" if missing else TRACE)], check=True)


# ---- the operators ----


@pytest.mark.parametrize("name", OPTIONS)
def test_opcheck(device, name):
    options = _options(device)[name]
    inputs = [x.requires_grad_() for x in _qkv(device)]
    tensors = [options.get(key) for key in ("bias", "mask", "alibi_slopes", "sinks")]
    rest = (None, None, 0, 0, 0.0, None, options.get("causal", False), -1, -1, 0.0, False, False, None, 0, None, False)
    torch.library.opcheck(torch.ops.flash_attn_minimal.attention.default, (*inputs, *tensors, *rest, 0))
    q, k, v = (x.detach() for x in inputs)
    out, lse = torch.ops.flash_attn_minimal.attention(q, k, v, *tensors, *rest, 0)
    wanted = tensors[0] is not None, tensors[3] is not None
    for dlse in (None, lse.sin()):
        torch.library.opcheck(
            torch.ops.flash_attn_minimal.attention_backward.default,
            (out.cos(), dlse, out, lse, *wanted, q, k, v, *tensors, *rest, 0),
        )
