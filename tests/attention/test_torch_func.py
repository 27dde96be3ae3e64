"""Transforms of torch.func, and the gradient of lse."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_cases import (  # noqa: E402
    COLUMNS,
    DEVICES,
    HEADS,
    LENGTHS,
    OPTIONS,
    QUIET,
    close,
    compiled,
    normal,
    options_of,
    qkv,
    standard,
    varlen,
    varlen_standard,
)

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import autograd  # noqa: E402, F401  (before the first compiled call: see its text)

pytestmark = QUIET


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


# ---- transforms of torch.func ----


@pytest.mark.parametrize("name", OPTIONS)
def test_func_grad(device, name):
    inputs, options = qkv(device), options_of(device)[name]
    got = torch.func.grad(lambda *a: fa.flash_attn_func(*a, **options).square().sum(), (0, 1, 2))(*inputs)
    want = torch.func.grad(lambda *a: standard(*a, **options)[0].square().sum(), (0, 1, 2))(*inputs)
    for x, y in zip(got, want, strict=True):
        close(x, y)


def test_func_grad_of_bias_and_sinks(device):
    q, k, v = qkv(device)
    bias, sinks = normal(device, HEADS, 1, COLUMNS), normal(device, HEADS)

    def loss(attend):
        return lambda bias, sinks: attend(q, k, v, bias=bias, sinks=sinks).square().sum()

    got = torch.func.grad(loss(fa.flash_attn_func), (0, 1))(bias, sinks)
    want = torch.func.grad(loss(lambda *a, **o: standard(*a, **o)[0]), (0, 1))(bias, sinks)
    for x, y in zip(got, want, strict=True):
        close(x, y)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 2, 0), (4, 1, -1), (None, None, 3)])
@pytest.mark.parametrize("name", OPTIONS)
def test_vmap(device, in_dims, name):
    options = options_of(device)[name]
    inputs = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(qkv(device, 3), in_dims, strict=True)
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # "there is a performance drop because we have not implemented the batching rule"
        out, lse = torch.vmap(lambda *a: fa.flash_attn_func(*a, return_lse=True, **options), in_dims)(*inputs)
    for i in range(3):
        entry = [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, in_dims, strict=True)]
        want = standard(*entry, **options)
        close(out[i], want[0])
        close(lse[i], want[1])


@pytest.mark.parametrize("name", ["bias", "row_bias", "mask", "alibi", "alibi2", "sinks"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_vmap_over_an_option(device, name, shared, last):
    """shared: q, k and v are the same for all entries. last: the mapped axis is the last one."""
    ((option, x),) = options_of(device)[name].items()
    xs = torch.stack([x, x.flip(-1), x.roll(1, -1)], -1 if last else 0)
    inputs = qkv(device) if shared else qkv(device, 3)
    dim = None if shared else 0
    out = torch.vmap(lambda q, k, v, x: fa.flash_attn_func(q, k, v, **{option: x}), (dim, dim, dim, -1 if last else 0))(
        *inputs, xs
    )
    for i in range(3):
        entry = inputs if shared else [x[i] for x in inputs]
        close(out[i], standard(*entry, **{option: xs.select(-1 if last else 0, i)})[0])


def test_vmap_with_dropout_is_a_loop(device):
    q, k, v = qkv(device, 3)

    def attend(q, k, v):
        return fa.flash_attn_func(q, k, v, 0.4, dropout_seed=11)

    assert torch.equal(torch.vmap(attend)(q, k, v), torch.stack([attend(*x) for x in zip(q, k, v, strict=True)]))


def test_vmap_varlen(device):
    inputs = [x[:, 0] for x in qkv(device, 3)]
    got = torch.vmap(lambda q, k, v: varlen(q, k, v))(*inputs)
    for i in range(3):
        close(got[i], varlen_standard(*(x[i] for x in inputs)))
    grads = torch.vmap(torch.func.grad(lambda q, k, v: varlen(q, k, v).square().sum()))(*inputs)
    want = torch.vmap(torch.func.grad(lambda q, k, v: varlen_standard(q, k, v).square().sum()))(*inputs)
    close(grads, want)


@pytest.mark.parametrize("order", ["vmap_grad", "grad_vmap"])
@pytest.mark.parametrize("argnums", [(0, 1, 2), (1,), (3, 4), (0, 3)])
def test_vmap_and_grad(device, order, argnums):
    inputs = (*qkv(device, 3), normal(device, HEADS, 1, COLUMNS), normal(device, 3, HEADS))
    in_dims = (0, 0, 0, None, 0)

    def loss(attend):
        def entry(q, k, v, bias, sinks):
            return attend(q, k, v, bias=bias, sinks=sinks).square().sum()

        if order == "vmap_grad":
            return torch.vmap(torch.func.grad(entry, argnums), in_dims)
        return torch.func.grad(lambda *a: torch.vmap(entry, in_dims)(*a).sum(), argnums)

    got = loss(fa.flash_attn_func)(*inputs)
    want = loss(lambda *a, **o: standard(*a, **o)[0])(*inputs)
    for x, y in zip(got, want, strict=True):
        close(x, y)


def test_vmap_of_vmap(device):
    inputs = qkv(device, 2, 3)
    got = torch.vmap(torch.vmap(lambda q, k, v: fa.flash_attn_func(q, k, v)), (1, 1, 1))(*inputs)
    want = torch.vmap(torch.vmap(lambda q, k, v: standard(q, k, v)[0]), (1, 1, 1))(*inputs)
    close(got, want)


def test_backward_through_vmap(device):
    """Transforms inside, the tape of plain autograd outside."""
    inputs = [x.requires_grad_() for x in qkv(device, 3)]
    got = torch.autograd.grad(torch.vmap(lambda *a: fa.flash_attn_func(*a))(*inputs).square().sum(), inputs)
    want = torch.autograd.grad(torch.vmap(lambda *a: standard(*a)[0])(*inputs).square().sum(), inputs)
    for x, y in zip(got, want, strict=True):
        close(x, y)


def test_jacrev(device):
    q, k, v = (x[:, :3] for x in qkv(device))
    got = torch.func.jacrev(lambda q: fa.flash_attn_func(q, k, v, causal=True))(q)
    close(got, torch.func.jacrev(lambda q: standard(q, k, v, causal=True)[0])(q))


def test_constant_inside_a_transform(device):
    """A call on tensors that the transform does not touch."""
    q, k, v = qkv(device)
    got = torch.func.grad(lambda x: (x * fa.flash_attn_func(q, k, v)).sum())(torch.ones((), device=device))
    close(got, standard(q, k, v)[0].sum())


def test_make_fx_of_grad(device):
    q, k, v = qkv(device)
    graph = make_fx(torch.func.grad(lambda q, k, v: fa.flash_attn_func(q, k, v).square().sum()))(q, k, v)
    want = torch.func.grad(lambda q, k, v: standard(q, k, v)[0].square().sum())(q + 1, k, v)
    close(graph(q + 1, k, v), want)


# ---- lse's gradient ----


@pytest.mark.parametrize("how", ["eager", "func", "compiled"])
@pytest.mark.parametrize("name", ["plain", "causal", "all"])
def test_gradient_of_lse(device, how, name):
    inputs, options = (*qkv(device), normal(device, HEADS)), options_of(device)[name]
    options.pop("sinks", None)

    def loss(attend):
        def total(q, k, v, sinks):
            out, lse = attend(q, k, v, sinks=sinks, **options)
            return out.square().sum() + lse.sin().sum()

        return total

    want = torch.func.grad(loss(standard), (0, 1, 2, 3))(*inputs)
    ours = loss(lambda *a, **o: fa.flash_attn_func(*a, return_lse=True, **o))
    if how == "func":
        got = torch.func.grad(ours, (0, 1, 2, 3))(*inputs)
    else:
        inputs = [x.requires_grad_() for x in inputs]
        got = torch.autograd.grad((ours if how == "eager" else compiled(ours, inputs))(*inputs), inputs)
    for x, y in zip(got, want, strict=True):
        close(x, y)


def test_gradient_of_lse_alone_and_varlen(device):
    q, k, v = (x[0].requires_grad_() for x in qkv(device))
    sinks = normal(device, HEADS).requires_grad_()
    _, lse = varlen(q, k, v, sinks=sinks, return_lse=True)
    got = torch.autograd.grad(lse.sin().sum(), (q, k, sinks))
    (a, b), (c, d) = LENGTHS[0][1:], LENGTHS[1][1:]
    parts = (slice(0, a), slice(0, c)), (slice(a, b), slice(c, d))
    exact = sum(standard(q[None, i], k[None, j], v[None, j], sinks=sinks)[1].sin().sum() for i, j in parts)
    for x, y in zip(got, torch.autograd.grad(exact, (q, k, sinks)), strict=True):
        close(x, y)


def test_lse_has_no_gradient_with_dropout(device):
    q, k, v = (x.requires_grad_() for x in qkv(device))
    out, lse = fa.flash_attn_func(q, k, v, 0.5, dropout_seed=1, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
