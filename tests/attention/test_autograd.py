"""PyTorch: flash_attn_func has gradients, eager and compiled."""

import math

import numpy as np
import pytest
from conftest import CUDA_DEVICES

torch = pytest.importorskip("torch")

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal._core.options import Options  # noqa: E402
from flash_attn_minimal.torch import _operators  # noqa: E402  (before the first compiled call: see the package)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(
            not (CUDA_DEVICES and torch.cuda.is_available()), reason="no CUDA device for the library and PyTorch"
        ),
    ),
]


def _inputs(device, dtype=torch.float32, seqlen_q=37, seqlen_k=37, heads=(4, 2), headdim=16):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    return (
        normal(2, seqlen_q, heads[0], headdim),
        normal(2, seqlen_k, heads[1], headdim),
        normal(2, seqlen_k, heads[1], headdim),
    )


def _standard(q, k, v, bias=None, causal=False, sinks=None):
    """Attention in PyTorch's own operations, so that autograd computes the gradients."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        s = s + bias
    if causal:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1 + s.shape[3] - s.shape[2]), -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    p = s.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("bhij,bjhd->bihd", p, v)


def _gradients(function, inputs):
    out = function(*inputs)
    weight = torch.sin(torch.arange(out.numel(), device=out.device, dtype=torch.float32)).reshape(out.shape)
    return [out, *torch.autograd.grad((out.float() * weight).sum(), inputs)]


def _assert_close(got, want, tolerance):
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        torch.testing.assert_close(x.float(), y.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_against_pytorch_s_own_gradients(device, dtype, causal):
    inputs = _inputs(device, dtype)
    got = _gradients(lambda q, k, v: fa.flash_attn_func(q, k, v, causal=causal), inputs)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    want = _gradients(lambda q, k, v: _standard(q, k, v, causal=causal), exact)
    assert all(x.dtype == dtype for x in got)
    _assert_close([x.float() for x in got], want, 2e-5 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(2, 4, 37, 37), (1, 4, 1, 37), (37, 37), (37,)])
def test_bias_and_sinks_have_gradients(device, shape):
    q, k, v = _inputs(device)
    bias = torch.randn(shape, device=device, requires_grad=True)
    sinks = torch.randn(4, device=device, requires_grad=True)
    inputs = (q, k, v, bias, sinks)
    got = _gradients(lambda q, k, v, bias, sinks: fa.flash_attn_func(q, k, v, bias=bias, sinks=sinks), inputs)
    want = _gradients(lambda q, k, v, bias, sinks: _standard(q, k, v, bias, sinks=sinks), inputs)
    _assert_close(got, want, 5e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck(device):
    inputs = _inputs(device, seqlen_q=5, seqlen_k=6, heads=(2, 1), headdim=4)
    with pytest.warns(UserWarning, match="double precision"):
        assert torch.autograd.gradcheck(
            lambda q, k, v: fa.flash_attn_func(q, k, v, causal=True, return_lse=True),
            inputs,
            eps=1e-2,
            atol=2e-3,
            rtol=1e-2,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_varlen(device):
    q, k, v = (x.detach()[0].clone().requires_grad_() for x in _inputs(device, seqlen_q=40, seqlen_k=50))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in ([0, 15, 40], [0, 20, 50]))
    got = _gradients(lambda q, k, v: fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 25, 30, causal=True), (q, k, v))

    def by_sequence(q, k, v):
        parts = (((0, 15), (0, 20)), ((15, 40), (20, 50)))
        one = [_standard(q[None, a:b], k[None, c:d], v[None, c:d], causal=True)[0] for (a, b), (c, d) in parts]
        return torch.cat(one)

    _assert_close(got, _gradients(by_sequence, (q, k, v)), 5e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_and_transposed_inputs(device):
    """out.sum() gives dout of stride 0. Inputs have heads before rows, as in most PyTorch models."""
    q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in _inputs(device))
    got = torch.autograd.grad(fa.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).sum(), (q, k, v))
    want = torch.autograd.grad(_standard(*(x.transpose(1, 2) for x in (q, k, v))).sum(), (q, k, v))
    _assert_close(got, want, 5e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    """One graph without a break, and the same gradients as eager; also with dropout, which drops the same elements."""
    bias = torch.randn(1, 4, 1, 37, device=device, requires_grad=True)

    def attend(q, k, v, bias):
        out = fa.flash_attn_func(q * 2, k, v, 0.2, causal=True, bias=bias, softcap=5.0, dropout_seed=2**64 - 3)
        return torch.tanh(out)

    inputs = (*_inputs(device), bias)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    _assert_close(_gradients(compiled, inputs), _gradients(attend, inputs), 1e-6)


def test_operators_are_well_formed():
    inputs = _inputs("cpu")
    rest = (None,) * (len(_operators.ARRAYS) - 3) + (
        0,
        0,
        *_operators.packed(Options(dropout_p=0.1, causal=True, dropout_seed=7)),
    )
    torch.library.opcheck(torch.ops.flash_attn_minimal.attention.default, (*inputs, *rest))


def test_no_gradient_no_cost():
    q, k, v = _inputs("cpu")
    with torch.no_grad():
        assert not fa.flash_attn_func(q, k, v).requires_grad
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    assert out.requires_grad and lse.requires_grad


def test_only_what_is_needed():
    """Only v requires a gradient; those of q and k are not asked for."""
    q, k, v = _inputs("cpu")
    q, k = q.detach(), k.detach()
    (dv,) = torch.autograd.grad(fa.flash_attn_func(q, k, v).sum(), (v,))
    (want,) = torch.autograd.grad(_standard(q, k, v).sum(), (v,))
    _assert_close([dv], [want], 2e-5)


REFUSED = {
    "out": (lambda q, k, v: {"out": torch.empty_like(q)}, fa.Unsupported, "out is given, but the call records"),
    "alibi": (
        lambda q, k, v: {"alibi_slopes": torch.ones(4, requires_grad=True)},
        fa.Unsupported,
        "alibi_slopes requires a gradient",
    ),
    "foreign": (
        lambda q, k, v: {"sinks": np.ones(4, np.float32)},
        fa.BadArgument,
        "sinks is a numpy.ndarray, but q",
    ),
    "causal": (lambda q, k, v: {"causal": 3}, fa.BadArgument, "causal=3 is neither True nor False"),
    "seed": (lambda q, k, v: {"dropout_p": 0.5}, fa.BadArgument, "dropout_p=0.5 without dropout_seed"),
    "headdim": (lambda q, k, v: {"k": k[..., :8]}, fa.BadArgument, "k has shape"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refused(why):
    q, k, v = _inputs("cpu")
    options, error, text = REFUSED[why]
    changed = {"k": k, **options(q, k, v)}
    with pytest.raises(error, match=text):
        fa.flash_attn_func(q, v=v, **changed)
