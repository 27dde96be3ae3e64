"""PyTorch's traces and graphs, and tensors without memory: results are right, or the library refuses the call."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_cases import (  # noqa: E402
    COLUMNS,
    DEVICES,
    DIM,
    HEADS,
    LENGTHS,
    OPTIONS,
    QUIET,
    ROWS,
    close,
    compiled,
    options_of,
    qkv,
    standard,
    varlen,
    varlen_standard,
)

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal.torch import autograd  # noqa: E402, F401  (before the first compiled call: see its text)

pytestmark = QUIET


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


# ---- traces and graphs: called again, with other inputs ----


def _jit(function, inputs):
    return torch.jit.trace(function, inputs)


def _fx(function, inputs):
    return make_fx(function)(*inputs)


def _fx_symbolic(function, inputs):
    return make_fx(function, tracing_mode="symbolic")(*inputs)


def _exported(function, inputs):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    return torch.export.export(Module(), inputs).module()


TRACERS = [_jit, _fx, _fx_symbolic, compiled, _exported]


@pytest.mark.parametrize("trace", TRACERS)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_traced(device, trace, name):
    options = options_of(device)[name]
    tensors = list(options)

    def attend(q, k, v, *rest):
        return fa.flash_attn_func(q, k, v, return_lse=True, causal=True, **dict(zip(tensors, rest, strict=True)))

    inputs = (*qkv(device), *options.values())
    traced = trace(attend, inputs)
    others = (*(x.flip(1) + 0.5 for x in inputs[:3]), *options.values())
    want = standard(*others[:3], **options, causal=True)
    for got, exact in zip(traced(*others), want, strict=True):
        close(got, exact)


@pytest.mark.parametrize("trace", TRACERS)
def test_varlen_traced(device, trace):
    inputs = tuple(x[0] for x in qkv(device))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in LENGTHS)
    traced = trace(lambda q, k, v, a, b: fa.flash_attn_varlen_func(q, k, v, a, b, 5, 6), (*inputs, cu_q, cu_k))
    others = tuple(x.flip(0) for x in inputs)
    close(traced(*others, cu_q, cu_k), varlen_standard(*others))


@pytest.mark.parametrize("trace", [_jit, compiled])
def test_traced_gradients(device, trace):
    q, k, v = qkv(device)
    traced = trace(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True), (q, k, v))
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(traced(*inputs).square().sum(), inputs)
    want = torch.autograd.grad(standard(*inputs, causal=True)[0].square().sum(), inputs)
    for x, y in zip(got, want, strict=True):
        close(x, y)


def test_dropout_is_the_same_in_a_trace(device):
    q, k, v = qkv(device)

    def attend(q):
        return fa.flash_attn_func(q, k, v, 0.3, dropout_seed=2**64 - 5, dropout_offset=2**63 + 1)

    want = attend(q + 1)
    for trace in (_jit, _fx, compiled):
        assert torch.equal(trace(attend, (q,))(q + 1), want)


def test_traced_after_a_plain_call_of_the_same_kind(device):
    """The shortcut for repeated calls is not taken while PyTorch traces."""
    q, k, v = qkv(device)
    for _ in range(3):
        fa.flash_attn_func(q, k, v)
    traced = _jit(lambda q, k, v: fa.flash_attn_func(q, k, v), (q, k, v))
    assert "flash_attn_minimal::attention" in str(traced.graph)
    close(traced(q + 1, k, v), standard(q + 1, k, v)[0])


FIRST_CALL = """
import torch, flash_attn_minimal as fa
q = torch.randn(1, 5, 2, 8)
torch.jit.trace(lambda q: fa.flash_attn_func(q, q, q), q)
"""


def test_traced_as_the_first_call_of_a_process():
    """torch.jit.trace calls a function twice, and refuses it if the graphs differ, even in the names of values."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_CALL], check=True)


# ---- tensors without memory ----


@pytest.mark.parametrize("name", OPTIONS)
def test_fake_and_meta(device, name):
    inputs, options = qkv(device), options_of(device)[name]
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
    inputs = [x[0].requires_grad_() for x in qkv(device)]
    out, lse = varlen(*(x.detach().to("meta").requires_grad_() for x in inputs), return_lse=True)
    assert out.is_meta and out.shape == (ROWS, HEADS, DIM) and lse.shape == (HEADS, ROWS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        out = varlen(*fakes)
        grads = torch.autograd.grad(out.sum(), fakes)
    assert out.shape == (ROWS, HEADS, DIM) and [x.shape for x in grads] == [x.shape for x in inputs]


@pytest.mark.parametrize("options", [{"num_threads": True}, {"attention_chunk": True}, {"attention_chunk": 2.0}])
def test_a_trace_refuses_what_a_plain_call_refuses(options):
    for device in ("cpu", "meta"):
        q = torch.ones(1, 4, 2, 8, device=device)
        with pytest.raises(fa.BadArgument, match="=(True|2.0) is not an integer"):
            fa.flash_attn_func(q, q, q, **options)


def test_meta_gradients():
    inputs = [x.to("meta").requires_grad_() for x in qkv("cpu")]
    bias = torch.zeros(HEADS, 1, COLUMNS, device="meta", requires_grad=True)
    sinks = torch.zeros(HEADS, device="meta", requires_grad=True)
    given = (*inputs, bias, sinks)
    grads = torch.autograd.grad(fa.flash_attn_func(*inputs, bias=bias, sinks=sinks).sum(), given)
    assert all(x.is_meta and x.shape == y.shape and x.dtype == y.dtype for x, y in zip(grads, given, strict=True))


def test_meta_shapes_are_looked_at():
    q, k, v = (x.to("meta") for x in qkv("cpu"))
    with pytest.raises(fa.BadArgument, match="k has shape"):
        fa.flash_attn_func(q, k[0], v)
    with pytest.raises(fa.BadArgument, match="v is torch.float16"):
        fa.flash_attn_func(q, k, v.half())
    with pytest.raises(fa.BadArgument, match="sinks is on cpu, but q is on meta"):
        fa.flash_attn_func(q, k, v, sinks=torch.zeros(HEADS))
