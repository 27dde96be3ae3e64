"""PyTorch's version counters: a write by the library is counted like an in-place operation of PyTorch. A graph that has
saved the tensor then raises, instead of computing with other values."""

import pytest

torch = pytest.importorskip("torch")

from torch_cases import DEVICES, HEADS, HEADS_K, QUIET, normal, qkv  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal import distributed  # noqa: E402
from flash_attn_minimal import torch as integration  # noqa: E402
from flash_attn_minimal._arrays import torch as torch_door  # noqa: E402
from flash_attn_minimal._core.recordings import Recording  # noqa: E402
from flash_attn_minimal.transformer import ops, quantized  # noqa: E402

pytestmark = QUIET
CALLS = 5  # the first calls take the long way, later ones the shortcut
BATCH, ROWS, DIM = 2, 12, 16


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.fixture(params=["guards", "descriptions"])
def guarded(request, monkeypatch):
    """Runs a test with PyTorch's TensorGuards, and as in a PyTorch without them."""
    if request.param == "descriptions":
        monkeypatch.setattr(torch_door, "_guards_hold", lambda torch: False)


def check(write, *written, untouched=()):
    """Checks that graphs that have saved one of the tensors `written` notice each call of write(), and that no other
    graphs do."""
    for _ in range(CALLS):
        saved = [*written, *untouched]
        weights = [torch.ones_like(x, dtype=torch.float32).requires_grad_() for x in saved]
        losses = [(w * x).sum() for w, x in zip(weights, saved, strict=True)]
        with torch.no_grad():
            write()
        for x, loss in zip(saved, losses, strict=True):
            if any(x is y for y in written):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()


def cache(device, dtype=torch.float32):
    k_cache, v_cache = (normal(device, BATCH, ROWS, HEADS_K, DIM).to(dtype).clone() for _ in range(2))
    q = normal(device, BATCH, 1, HEADS, DIM)
    k, v = (normal(device, BATCH, 1, HEADS_K, DIM) for _ in range(2))
    return q, k_cache, v_cache, k, v


def test_out(device, guarded):
    q, k, v = qkv(device)
    out = torch.empty_like(q)
    check(lambda: fa.flash_attn_func(q, k, v, out=out), out, untouched=(q, k, v))
    check(lambda: fa.flash_attn_func(q, k, v, return_max_score=True, out=out), out, untouched=(q, k, v))
    bias = normal(device, q.shape[1], k.shape[1])
    check(lambda: fa.flash_attn_func(q, k, v, bias=bias, return_lse=True, out=out), out, untouched=(bias,))
    whole = torch.empty(3, *q.shape, device=device)
    check(lambda: fa.flash_attn_func(q, k, v, out=whole[1]), whole)  # a view counts with its base


def test_packed_sequences(device, guarded):
    q, k, v = (x[0] for x in qkv(device))
    cu_q, cu_k = (torch.tensor([0, 4, x.shape[0]], dtype=torch.int32, device=device) for x in (q, k))
    out = torch.zeros_like(q)
    check(lambda: fa.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 9, 11, out=out), out, untouched=(q, cu_q, cu_k))


def test_given_gradients(device):
    q, k, v = qkv(device)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    given = {f"d{name}": torch.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
    check(lambda: fa.backward(out, q, k, v, out, lse, **given), *given.values(), untouched=(q, k, v, out, lse))
    dk = given["dk"]
    check(lambda: fa.backward(out, q, k, v, out, lse, dk=dk), dk, untouched=(given["dq"],))


@pytest.mark.parametrize("lengths", ["number", "array"])
def test_an_append_to_a_cache(device, guarded, lengths):
    q, k_cache, v_cache, k, v = cache(device)
    at = 5 if lengths == "number" else torch.full((BATCH,), 5, dtype=torch.int32, device=device)
    read = fa.flash_attn_with_kvcache
    check(lambda: read(q, k_cache, v_cache, k, v, cache_seqlens=at), k_cache, v_cache, untouched=(q, k, v))
    check(lambda: read(q, k_cache, v_cache, cache_seqlens=at), untouched=(q, k_cache, v_cache))
    check(lambda: read(q, k_cache, v_cache, k[:, :0], v[:, :0], cache_seqlens=at), untouched=(k_cache, v_cache))
    out = torch.empty_like(q)
    check(lambda: read(q, k_cache, v_cache, k, v, cache_seqlens=at, out=out), k_cache, v_cache, out, untouched=(q,))
    check(lambda: read(q, k_cache, v_cache, cache_seqlens=at, out=out), out, untouched=(k_cache, v_cache))


def test_an_append_to_an_8_bit_cache(device, guarded):
    q, k_cache, v_cache, k, v = cache(device, torch.int8)
    factors = [torch.ones(BATCH, ROWS, HEADS_K, device=device) for _ in range(2)]
    heads = [torch.ones(HEADS_K, device=device) for _ in range(2)]

    def append(scales):
        fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=5, k_scale=scales[0], v_scale=scales[1]
        )  # fmt: skip

    check(lambda: append(factors), k_cache, v_cache, *factors, untouched=(q, k, v))
    check(lambda: append(heads), k_cache, v_cache, untouched=heads)


def test_attention_over_a_cache_and_then_an_append(device):
    q, k_cache, v_cache, k, v = cache(device)
    for append in (fa.flash_attn_with_kvcache, integration.flash_attn_with_kvcache):
        out = fa.flash_attn_func(q.clone().requires_grad_(), k_cache, v_cache)
        append(q, k_cache, v_cache, k, v, cache_seqlens=5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_appends(device, backend):
    q, k_cache, v_cache, k, v = cache(device)
    torch._dynamo.reset()
    step = torch.compile(
        lambda *x: integration.flash_attn_with_kvcache(*x, cache_seqlens=5), backend=backend, fullgraph=True
    )  # fmt: skip
    check(lambda: step(q, k_cache, v_cache, k, v), k_cache, v_cache, untouched=(q, k, v))


def test_tensors_of_the_inference_mode_have_no_counter(device, guarded):
    with torch.inference_mode():
        q, k_cache, v_cache, k, v = cache(device)
        out = torch.empty_like(q)
    plain = torch.empty(q.shape, device=device)
    for mode in (torch.inference_mode, torch.no_grad):
        for _ in range(CALLS):
            with mode():
                fa.flash_attn_func(q, k_cache, v_cache, out=out)
                fa.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5)
        check(lambda: fa.flash_attn_func(q, k_cache, v_cache, out=plain), plain)


def test_releases_that_count_one_tensor_at_a_time(monkeypatch):
    """PyTorch 2.4 counts one tensor at a time, and a tensor of the inference mode is an error there."""
    counted = []

    def increment(x):
        if not isinstance(x, torch.Tensor):
            raise TypeError("expected a tensor")
        assert not x.is_inference()
        counted.append(x)

    monkeypatch.setattr(torch.autograd.graph, "increment_version", increment)
    with torch.inference_mode():
        without = torch.zeros(1)
    x = torch.zeros(1)
    torch_door._version_counter(torch)([x, without, x])
    assert len(counted) == 2 and all(y is x for y in counted)


def test_what_writes_nothing_counts_nothing(device):
    q, k, v = qkv(device)
    out = torch.zeros_like(q)
    before = out._version
    fa.query(q, k, v, out=out)
    with pytest.raises(fa.BadArgument, match="kernel"):
        fa.flash_attn_func(q, k, v, out=out, kernel="none of them")
    assert out._version == before
    q, k_cache, v_cache, k, v = cache(device)
    before = k_cache._version, v_cache._version
    fa.kvcache_query(q, k_cache, v_cache, k, v, cache_seqlens=5)
    assert (k_cache._version, v_cache._version) == before


def test_operations_of_a_transformer(device):
    x, weight = normal(device, 3, 64), normal(device, 64)
    matrix, out = normal(device, 64, 64), torch.empty(3, 64, device=device)
    check(lambda: ops.rms_norm(x, weight, out=out), out, untouched=(x, weight))
    check(lambda: ops.rms_norm(x, weight, residual=out), x, untouched=(weight, out))
    check(lambda: ops.linear(x, matrix, out=out), out, untouched=(x, matrix))
    both = torch.cat([x, x], 1)
    check(lambda: ops.swiglu(both, out=out), out, untouched=(both,))
    heads, (cos, sin) = x.view(3, 1, 4, 16), normal(device, 2, 4, 8)
    check(lambda: ops.rope(heads, cos, sin, out=heads), x, untouched=(cos,))
    tokens = torch.zeros(3, dtype=torch.int32, device=device)
    check(lambda: ops.sample(x, out=tokens), tokens, untouched=(x,))


def test_products_with_4_bit_weights(device):
    x, out, last = normal(device, 3, 64), torch.empty(3, 64, device=device), torch.empty(3, 64, device=device)
    weight = quantized.W4Weight.quantize(normal(device, 64, 64)).pack()
    check(lambda: ops.linear(x, weight, out=out), out, untouched=(x,))
    products = [{"x": x, "weight": weight, "out": out}, {"x": 0, "weight": weight, "out": last}]
    check(lambda: ops.linear_chain(products), out, last, untouched=(x,))
    workspace = torch.zeros(max(ops.linear_query(x, weight).workspace_bytes, 256), dtype=torch.uint8, device=device)
    check(lambda: ops.linear(x, weight, out=out, workspace=workspace), out, workspace, untouched=(x,))


def test_collective_calls(device):
    (group,) = distributed.thread_groups(1, torch.empty(0, device=device).device)  # a group's device has a number
    q, k, v = (x[:, :8].contiguous() for x in qkv(device))
    out, lse = distributed.forward(group, q, k, v, return_lse=True)
    given = torch.empty_like(q)
    check(lambda: distributed.forward(group, q, k, v, out=given), given, untouched=(q, k, v))
    dq = torch.empty_like(q)
    check(lambda: distributed.backward(group, out, q, k, v, out, lse, dq=dq), dq, untouched=(q, k, v, out, lse))
    check(lambda: distributed.merge(group, out, lse), out, lse)
    q, k_cache, v_cache, k, v = cache(device)
    check(
        lambda: distributed.decode(group, q, k_cache, v_cache, k, v, cache_seqlens=5), k_cache, v_cache,
        untouched=(q, k, v),
    )  # fmt: skip
    check(lambda: distributed.decode(group, q, k_cache, v_cache, cache_seqlens=5), untouched=(q, k_cache, v_cache))


def test_recordings(guarded):
    """Calls that repeat earlier ones are recorded, too. A replay also writes the arrays that the recorded call made."""
    q, k, v = qkv("cpu")
    out = torch.zeros_like(q)
    for _ in range(CALLS):
        want = fa.flash_attn_func(q, k, v, out=out).clone()
        fa.flash_attn_func(q, k, v)
    recording = Recording()
    with recording:
        fa.flash_attn_func(q, k, v, out=out)
        made = fa.flash_attn_func(q, k, v)
    out.zero_()
    made.zero_()
    recording()
    assert torch.equal(out, want) and torch.equal(made, want)
    check(recording, out, made, untouched=(q, k, v))


def test_a_recorded_backward_pass():
    q, k, v = qkv("cpu")
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    dq = torch.zeros_like(q)
    recording = Recording()
    with recording:
        _, dk, dv = fa.backward(out, q, k, v, out, lse, dq=dq)
    check(recording, dq, dk, dv, untouched=(q, k, v, out, lse))
