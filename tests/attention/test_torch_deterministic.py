"""torch.use_deterministic_algorithms makes every backward pass of PyTorch's tensors deterministic, if it is set when
the pass runs."""

import ctypes as ct
import sys

import pytest

torch = pytest.importorskip("torch")

from torch_cases import NO_CUDA, QUIET, normal, qkv  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import distributed  # noqa: E402
from flash_attn_minimal._core import repeats  # noqa: E402
from flash_attn_minimal._core.structs import OPERATIONS, AttentionArgs, AttentionBackwardArgs, Call  # noqa: E402
from flash_attn_minimal.distributed import calls  # noqa: E402
from flash_attn_minimal.integrations import flash_attn as stand_in  # noqa: E402
from flash_attn_minimal.torch import (  # noqa: E402
    context_parallel_attention,  # noqa: E402
    flex_attention,
    mods,
    sdpa,
)

pytestmark = QUIET
backward = sys.modules["flash_attn_minimal.backward"]  # fa.backward is the function


@pytest.fixture(autouse=True)
def restored():
    enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    backward._repeats.clear()
    yield
    torch.use_deterministic_algorithms(enabled, warn_only=warns)


@pytest.fixture
def asked(monkeypatch):
    """For each backward pass that reached the library, whether it was asked to be deterministic."""
    seen, launch, run = [], backward.launch_with_workspace, repeats.runner()

    def launched(name, call, args, *views):
        seen.append(bool(args.deterministic))
        return launch(name, call, args, *views)

    def running(address, values, stream):
        call = Call.from_address(address)
        if OPERATIONS[call.operation - 1] == "attention_backward":
            image = ct.string_at(call.image, call.image_bytes)
            begin = ct.sizeof(AttentionBackwardArgs)  # behind it are the arguments of the forward call
            seen.append(bool(AttentionArgs.from_buffer_copy(image, begin).deterministic))
        return run(address, values, stream)

    monkeypatch.setattr(backward, "launch_with_workspace", launched)
    monkeypatch.setattr(repeats, "runner", lambda: running)
    return seen


def packed(q, k, v):
    lengths = [torch.tensor([0, 4, x.shape[1]], dtype=torch.int32, device=x.device) for x in (q, k)]
    return fa.flash_attn_varlen_func(q[0], k[0], v[0], *lengths, q.shape[1], k.shape[1])


def heads_first(function):
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1))))


CALLS = {
    "flash_attn_func": fa.flash_attn_func,
    "flash_attn_varlen_func": packed,
    "sdpa": heads_first(sdpa),
    "dropout": heads_first(lambda q, k, v: sdpa(q, k, v, dropout_p=0.5)),
    "flex_attention": heads_first(lambda q, k, v: flex_attention(q, k, v, block_mask=mods.causal)),
    "stand-in": lambda q, k, v: stand_in.flash_attn_func(q, k, v, causal=True),
}


FLAGS = [(False, False)] * 3 + [(True, False), (True, True), (True, False), (False, False)]  # and warn_only


@pytest.mark.parametrize("name", CALLS)
def test_read_as_the_backward_pass_runs(asked, name):
    inputs = [x.requires_grad_() for x in qkv("cpu")]
    outs = [CALLS[name](*inputs) for _ in FLAGS]  # before the flag is set
    for out, (flag, warns) in zip(outs, FLAGS, strict=True):
        torch.use_deterministic_algorithms(flag, warn_only=warns)
        out.sum().backward()
        assert asked == [flag]
        asked.clear()


@pytest.mark.parametrize("name", ["flash_attn_func", "dropout"])
def test_compiled(asked, name):
    """PyTorch itself refuses a compiled backward pass if the flag was set after its forward pass."""
    torch._dynamo.reset()
    function = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True)
    for flag, warns in FLAGS:
        torch.use_deterministic_algorithms(flag, warn_only=warns)
        function(*(x.requires_grad_() for x in qkv("cpu"))).sum().backward()
        assert asked == [flag]
        asked.clear()


def test_calls_of_the_core(asked):
    q, k, v = qkv("cpu")
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    arrays = out, q, k, v, out, lse
    fa.backward(*arrays)
    fa.backward(*arrays, deterministic=True)
    torch.use_deterministic_algorithms(True)
    fa.backward(*arrays)
    fa.backward(*arrays, deterministic=False)
    fa.backward(*(x.numpy() for x in arrays))  # no tensors of PyTorch's
    torch.func.grad(lambda q: fa.flash_attn_func(q, k, v).sum())(q)
    assert asked == [False, True, True, True, False, True]


def test_collective_calls(monkeypatch):
    seen, make = [], calls._make
    monkeypatch.setattr(calls, "_make", lambda *a: seen.append(a[4].get("deterministic", False)) or make(*a))
    (group,) = distributed.thread_groups(1)
    q, k, v = (x[:, :8].contiguous().requires_grad_() for x in qkv("cpu"))
    outs = [context_parallel_attention(q, k, v, group=group) for _ in range(3)]
    for out, flag in zip(outs, (False, True, False), strict=True):
        torch.use_deterministic_algorithms(flag)
        seen.clear()
        out.sum().backward()
        assert seen == [flag]


@NO_CUDA
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("headdim", [64, 128])
def test_the_same_bits_on_a_gpu(headdim, compiled, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    shape = 2, 4096, 8, headdim
    q, k, v, dout = (normal("cuda", *shape).bfloat16() * (i + 1) for i in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attend = fa.flash_attn_func
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    torch.use_deterministic_algorithms(True)
    first = torch.autograd.grad(attend(*inputs, causal=True), inputs, dout)
    for _ in range(10):
        again = torch.autograd.grad(attend(*inputs, causal=True), inputs, dout)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
