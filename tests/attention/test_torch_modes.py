"""PyTorch's modes, the refusals under them, and the operators themselves."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from torch_cases import (  # noqa: E402
    BATCH,
    DEVICES,
    DIM,
    HEADS,
    OPTIONS,
    QUIET,
    ROWS,
    close,
    compiled,
    normal,
    options_of,
    qkv,
    standard,
    varlen,
)

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal._core.options import Options  # noqa: E402
from flash_attn_minimal.torch import _operators, autograd  # noqa: E402
from flash_attn_minimal.transformer import ops, quantized  # noqa: E402

pytestmark = QUIET


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


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
    inputs = [x.requires_grad_(grad) for x in qkv(device)]
    with kind() as mode:
        out = fa.flash_attn_func(*inputs)
        varlen(*(x[0] for x in inputs))
    assert sum("flash_attn_minimal.attention" in name for name in mode.names) == 2
    close(out, standard(*inputs)[0])
    if grad and kind is Seen:
        with kind() as mode:
            out.sum().backward()
        assert any("attention_backward" in name for name in mode.names)


def test_modes_that_only_look_on_do_not_hinder(device):
    """out=, and functions that are not operators, can be used under modes that work on real tensors."""
    q, k, v = qkv(device)
    with Seen(), FlopCounterMode(display=False):
        out = torch.empty_like(q)
        assert fa.flash_attn_func(q, k, v, out=out) is out
        _, lse = fa.flash_attn_func(q, k, v, return_lse=True)
        merged, _ = fa.merge(out, lse, out, lse)
    close(out, standard(q, k, v)[0])
    close(merged, out)


def test_default_device_stays_plain(device, monkeypatch):
    q, k, v = qkv(device)
    monkeypatch.setattr(autograd, "_attention_op", None)
    with torch.device(device):
        close(fa.flash_attn_func(q, k, v), standard(q, k, v)[0])


def test_inference_mode(device):
    with torch.inference_mode():
        q, k, v = qkv(device)
        for _ in range(3):
            out = fa.flash_attn_func(q, k, v)
    assert out.is_inference()
    close(out, standard(q, k, v)[0])


def test_inference_mode_and_gradients_enabled(device):
    """PyTorch records nothing in inference mode, whatever enable_grad says. Neither does the library, before and after
    calls that are recorded."""
    q, k, v = (x.requires_grad_() for x in qkv(device))
    slopes = torch.linspace(0.1, 0.5, HEADS, device=device).requires_grad_()
    for _ in range(4):
        with torch.inference_mode(), torch.enable_grad():
            inner = fa.flash_attn_func(q, k, v)
            out = torch.zeros_like(q)
            fa.flash_attn_func(q, k, v, out=out)
            packed = varlen(*(x[0] for x in (q, k, v)))
            fa.flash_attn_func(q, k, v, alibi_slopes=slopes)
        assert inner.is_inference() and not inner.requires_grad and not packed.requires_grad
        assert torch.equal(inner, out)
        outer = fa.flash_attn_func(q, k, v)
        assert outer.requires_grad and torch.equal(outer, inner)
        torch.autograd.grad(outer.sum(), (q, k, v))


def test_lazily_negated_gradients(device):
    """A gradient that PyTorch negates lazily, like that of an imaginary part."""
    inputs = [x.requires_grad_() for x in qkv(device)]
    for _ in range(4):
        out, lse = fa.flash_attn_func(*inputs, return_lse=True)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        want = torch.autograd.grad((out, lse), inputs, (dout, dlse), retain_graph=True)
        negated = torch._neg_view(-dout), torch._neg_view(-dlse)
        assert all(x.is_neg() for x in negated)
        got = torch.autograd.grad((out, lse), inputs, negated)
        for x, y in zip(got, want, strict=True):
            close(x, y, 1e-5)


@pytest.mark.parametrize("name", ["q", "bias", "out", "k_cache", "x"])
def test_lazily_negated_arrays_are_refused(name):
    q, k, v = (x[:1] for x in qkv("cpu"))
    bias = normal("cpu", q.shape[1], k.shape[1])
    calls = {
        "q": lambda x: fa.flash_attn_func(x, k, v),
        "bias": lambda x: fa.flash_attn_func(q, k, v, bias=x),
        "out": lambda x: fa.flash_attn_func(q, k, v, out=x),
        "k_cache": lambda x: fa.flash_attn_with_kvcache(q[:, :1], x, v),
        "x": lambda x: ops.rms_norm(x, x[0, 0, 0]),
    }
    like = {"q": q, "bias": bias, "out": q, "k_cache": k, "x": q}[name]
    for _ in range(4):  # after calls like it
        calls[name](like.clone())
    with pytest.raises(fa.BadArgument, match=f"{name} is a lazily negated view: pass {name}.resolve_neg()"):
        calls[name](torch._neg_view(like))


def test_slopes_that_require_a_gradient_where_none_is_recorded(device):
    q, k, v = qkv(device)
    slopes = torch.linspace(0.1, 0.5, HEADS, device=device).requires_grad_()

    def attend(q, k, v):
        return fa.flash_attn_func(q, k, v, alibi_slopes=slopes)

    with pytest.raises(fa.Unsupported, match="alibi_slopes requires a gradient"):
        attend(q, k, v)
    with torch.no_grad():
        want = attend(q, k, v)
        assert torch.equal(compiled(attend, (q, k, v))(q, k, v), want)
    close(want, standard(q, k, v, alibi_slopes=slopes.detach())[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(device, reentrant):
    inputs = [x.requires_grad_() for x in qkv(device)]
    out = torch.utils.checkpoint.checkpoint(
        lambda *a: fa.flash_attn_func(*a, causal=True), *inputs, use_reentrant=reentrant
    )
    got = torch.autograd.grad if not reentrant else None
    if reentrant:
        out.square().sum().backward()
        got = [x.grad for x in inputs]
    else:
        got = torch.autograd.grad(out.square().sum(), inputs)
    want = torch.autograd.grad(standard(*inputs, causal=True)[0].square().sum(), inputs)
    for x, y in zip(got, want, strict=True):
        close(x, y)


def test_parameters_and_subclasses(device):
    class Mine(torch.Tensor):
        pass

    q, k, v = qkv(device)
    sinks = torch.nn.Parameter(normal(device, HEADS), requires_grad=False)
    want = standard(q, k, v, sinks=sinks)[0]
    close(fa.flash_attn_func(torch.nn.Parameter(q, requires_grad=False), k, v, sinks=sinks), want)
    mine = fa.flash_attn_func(*(x.as_subclass(Mine) for x in (q, k, v)), sinks=sinks)
    assert type(mine) is Mine
    close(mine.as_subclass(torch.Tensor), want)


def test_numpy_is_not_concerned():
    q = np.ones((1, 3, 1, 4), np.float32)
    with Seen(), torch.device("cpu"):
        assert np.array_equal(fa.flash_attn_func(q, q, q), q)
    torch.jit.trace(lambda x: x + torch.as_tensor(fa.flash_attn_func(q, q, q)), torch.ones(1))


# ---- refusals ----


def test_double_backward_is_refused(device):
    inputs = [x.requires_grad_() for x in qkv(device)]
    (dq,) = torch.autograd.grad(fa.flash_attn_func(*inputs).square().sum(), inputs[:1], create_graph=True)
    close(dq, torch.autograd.grad(standard(*inputs)[0].square().sum(), inputs[:1])[0])
    with pytest.raises(fa.Unsupported, match="double backward"):
        dq.sum().backward()
    loss = lambda q: fa.flash_attn_func(q, *inputs[1:]).square().sum()  # noqa: E731
    with pytest.raises(fa.Unsupported, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(inputs[0].detach())
    with pytest.raises(fa.Unsupported, match="forward-mode|double backward"):
        torch.func.hessian(loss)(inputs[0].detach())


def test_forward_mode_is_refused(device):
    q, k, v = qkv(device)
    with pytest.raises(fa.Unsupported, match="forward-mode"):
        torch.func.jvp(lambda q: fa.flash_attn_func(q, k, v), (q,), (q,))
    with pytest.raises(fa.Unsupported, match="forward-mode"):
        torch.func.jacfwd(lambda q: fa.flash_attn_func(q, k, v))(q)
    with torch.autograd.forward_ad.dual_level():
        close(fa.flash_attn_func(q, k, v), standard(q, k, v)[0])
        with pytest.raises(fa.Unsupported, match="k has a tangent: forward-mode"):
            fa.flash_attn_func(q, torch.autograd.forward_ad.make_dual(k, k), v)


@pytest.mark.parametrize("where", ["jit", "make_fx", "fake", "meta", "vmap"])
def test_out_is_refused(where):
    q, k, v = qkv("cpu")

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
    q, k, v = qkv("cpu")

    def attend(q):
        return TRANSFORMS[name](lambda q: fa.flash_attn_func(q, k, v).sum(), q)

    with pytest.raises(Exception, match="under a transform of torch.func is not served inside torch.compile"):
        compiled(attend, (q,))(q)


def test_vmap_over_nothing_is_refused():
    q, k, v = qkv("cpu")
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
    x = normal("cpu", BATCH, ROWS, HEADS, DIM)
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
    options = options_of(device)[name]
    inputs = [x.requires_grad_() for x in qkv(device)]
    tensors = [options.get(key) for key in _operators.OPTION_ARRAYS]
    rest = (None, None, 0, 0, *_operators.packed(Options(causal=options.get("causal", False))))
    torch.library.opcheck(torch.ops.flash_attn_minimal.attention.default, (*inputs, *tensors, *rest))
    q, k, v = (x.detach() for x in inputs)
    out, lse = torch.ops.flash_attn_minimal.attention(q, k, v, *tensors, *rest)
    wanted = tensors[0] is not None, tensors[3] is not None
    for dlse in (None, lse.sin()):
        torch.library.opcheck(
            torch.ops.flash_attn_minimal.attention_backward.default,
            (out.cos(), dlse, out, lse, *wanted, q, k, v, *tensors, *rest),
        )
