"""sdpa against scaled_dot_product_attention of PyTorch: dense and jagged, compiled, exported, and its FLOPs."""

from __future__ import annotations

import pytest
from conftest import CUDA_DEVICES

torch = pytest.importorskip("torch", reason="it takes and returns PyTorch's tensors")

import torch.nn.functional as F  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils import flop_counter  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal.torch import sdpa  # noqa: E402

HAS_CUDA = CUDA_DEVICES and torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device for the library and PyTorch")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]
theirs = F.scaled_dot_product_attention
BATCH, HEADS, ROWS, KEYS, DIM, DIM_V = 2, 4, 9, 13, 16, 24


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(device, *shape, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(sum(shape) + 7 * len(shape))
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)


def close(got, want, tolerance=2e-5):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def check(inputs, tolerance=2e-5, run=sdpa, **options):
    """Compares out, and the gradients of all inputs and of a float mask, with PyTorch in float64."""
    mask = options.pop("attn_mask", None)
    inputs = [*inputs, *([] if mask is None else [mask])]
    exact = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    given = exact if mask is None or mask.dim() > 1 else [*exact[:3], exact[3].expand(ROWS, KEYS)]
    out, want = run(*inputs, **options), theirs(*given, **options)
    assert out.dtype == inputs[0].dtype
    close(out, want, tolerance)
    weights = torch.sin(torch.arange(want.numel(), device=want.device)).view(want.shape)
    got = torch.autograd.grad((out * weights).sum(), [x for x in inputs if x.requires_grad])
    exact = torch.autograd.grad((want * weights).sum(), [x for x in exact if x.requires_grad])
    for x, y, given in zip(got, exact, [x for x in inputs if x.requires_grad], strict=True):
        assert x.dtype == given.dtype
        close(x, y, tolerance)


SHAPES = {
    "usual": ((BATCH, HEADS, ROWS, DIM), (BATCH, HEADS, KEYS, DIM), (BATCH, HEADS, KEYS, DIM_V)),
    "square": ((BATCH, HEADS, ROWS, DIM),) * 3,
    "no batch": ((HEADS, ROWS, DIM), (HEADS, KEYS, DIM), (HEADS, KEYS, DIM)),
    "no heads": ((ROWS, DIM), (KEYS, DIM), (KEYS, DIM_V)),
    "many axes": ((3, BATCH, HEADS, ROWS, DIM), (3, BATCH, HEADS, KEYS, DIM), (3, BATCH, HEADS, KEYS, DIM)),
    "broadcast": ((BATCH, 1, HEADS, ROWS, DIM), (3, HEADS, KEYS, DIM), (1, 3, 1, KEYS, DIM)),
    "one query": ((1, 1, ROWS, DIM), (BATCH, HEADS, KEYS, DIM), (BATCH, HEADS, KEYS, DIM)),
    "one head of keys": ((BATCH, HEADS, ROWS, DIM), (BATCH, 1, KEYS, DIM), (BATCH, 1, KEYS, DIM)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(device, name, causal):
    check([normal(device, *shape) for shape in SHAPES[name]], is_causal=causal, scale=0.3 if causal else None)


MASKS = {
    "full": (BATCH, HEADS, ROWS, KEYS),
    "matrix": (ROWS, KEYS),
    "heads": (HEADS, 1, KEYS),
    "keys": (BATCH, 1, 1, KEYS),
    "row": (KEYS,),
    "one key": (BATCH, 1, ROWS, 1),
    "number": (),
}


@pytest.mark.parametrize("kind", ["bool", "float", "double stride"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name, kind):
    shape = MASKS[name]
    mask = normal(device, *shape)
    if kind == "bool":
        mask = mask.detach() > -0.7
    if kind == "double stride":
        mask = normal(device, *shape, 2)[..., 0] if shape else mask
    inputs = [normal(device, *x) for x in SHAPES["usual"]]
    check(inputs, attn_mask=mask)


def test_masks_of_many_axes(device):
    inputs = [normal(device, *x) for x in SHAPES["many axes"]]
    for shape in ((3, 1, 1, ROWS, KEYS), (BATCH, HEADS, ROWS, KEYS), (HEADS, 1, KEYS), (ROWS, KEYS)):
        check(inputs, attn_mask=normal(device, *shape))


def test_a_row_that_sees_nothing_is_zero(device):
    inputs = [normal(device, *x) for x in SHAPES["square"]]
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool, device=device).tril(-1)
    out = sdpa(*inputs, mask)
    assert not out[:, :, 0].any()
    close(sdpa(*inputs, torch.where(mask, 0.0, -torch.inf)), out)
    check(inputs, attn_mask=mask)


@pytest.mark.parametrize("heads", [(4, 2, 2), (6, 1, 1), (4, 2, 1), (4, 4, 4)])
def test_grouped_heads(device, heads):
    inputs = [normal(device, BATCH, n, ROWS, DIM) for n in heads]
    check(inputs, enable_gqa=True, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    inputs = [normal(device, *x, dtype=dtype) for x in SHAPES["usual"]]
    for mask_dtype in (dtype, torch.float32):
        check(inputs, attn_mask=normal(device, ROWS, KEYS, dtype=mask_dtype), tolerance=3e-2)


def test_memory_in_any_order(device):
    """Memory layouts of models: views of one projection, in which the last axis may be any axis."""
    x = normal(device, BATCH, ROWS, 3, HEADS, DIM)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    close(sdpa(q, k, v), theirs(q, k, v))
    columns = [y.transpose(-1, -2).contiguous().transpose(-1, -2) for y in (q, k, v)]
    close(sdpa(*columns), theirs(q, k, v))
    assert sdpa(q, k, v).transpose(1, 2).is_contiguous()


def test_autocast_casts_as_it_does_for_pytorch(device):
    inputs = [normal(device, *x) for x in SHAPES["usual"]]
    mask = normal(device, ROWS, KEYS)
    with torch.autocast(device, torch.bfloat16):
        out, want = sdpa(*inputs, mask), theirs(*inputs, mask)
        assert out.dtype == want.dtype == torch.bfloat16
        mixed = sdpa(inputs[0].bfloat16(), *inputs[1:])
    close(out, want, 2e-2)
    assert mixed.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in torch.autograd.grad(out.float().sum(), inputs))


# ---- dropout ----


def dropped(device, run, p):
    """P of a call with dropout, read from the output for v = 1."""
    q, k = normal(device, 1, 2, 64, DIM), normal(device, 1, 2, 64, DIM)
    torch.manual_seed(5)
    return run(q, k, torch.eye(64, device=device).expand(1, 2, 64, 64), dropout_p=p), q, k


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **({"backend": "aot_eager"} | options))


@pytest.mark.parametrize("how", ["plain", "compiled", "exported"])
def test_dropout(device, how):
    run = sdpa
    if how == "compiled":
        run = compiled(sdpa)
    elif how == "exported":
        shapes = (1, 2, 64, DIM), (1, 2, 64, DIM), (1, 2, 64, 64)
        inputs = tuple(normal(device, *x, grad=False) for x in shapes)
        program = torch.export.export(Module(dropout_p=0.25), inputs).module()
        run = lambda q, k, v, dropout_p: program(q, k, v)  # noqa: E731
    p, q, k = dropped(device, run, 0.25)
    again = dropped(device, run, 0.25)[0]
    assert torch.equal(p, again)
    assert not torch.equal(p, run(q, k, torch.eye(64, device=device).expand(1, 2, 64, 64), dropout_p=0.25))
    whole = theirs(q, k, torch.eye(64, device=device).expand(1, 2, 64, 64))
    kept = p > 0
    close(p, torch.where(kept, whole / 0.75, 0.0))
    assert abs(kept.double().mean() - 0.75) < 0.03
    if how == "exported":
        return
    v = normal(device, 1, 2, 64, 64)  # the same elements are dropped for other values, and in the gradients
    torch.manual_seed(5)
    out = run(q, k, v, dropout_p=0.25)
    exact = theirs(q, k, torch.eye(64, device=device).expand(1, 2, 64, 64)) * kept / 0.75 @ v
    close(out, exact)
    got, want = (torch.autograd.grad(x.sin().sum(), (q, k, v)) for x in (out, exact))
    for x, y in zip(got, want, strict=True):
        close(x, y)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_of_mapped_calls(device, randomness):
    """vmap's `randomness` acts as on PyTorch's random operations; gradients drop the same elements as the forward
    pass."""
    q, k, eye = normal(device, 3, 1, 2, 64, DIM), normal(device, 1, 2, 64, DIM), torch.eye(64, device=device)
    v = normal(device, 1, 2, 64, 64)

    def attend(q, v):
        return sdpa(q, k, v, dropout_p=0.25)

    def run(function, v):
        torch.manual_seed(5)
        return torch.vmap(function, (0, None), randomness=randomness)(q, v)

    p = run(attend, eye.expand(1, 2, 64, 64))
    kept = p > 0
    assert torch.equal(kept[0], kept[1]) == (randomness == "same")
    exact = [theirs(x, k, eye.expand(1, 2, 64, 64)) * y / 0.75 for x, y in zip(q, kept, strict=True)]
    for x, y in zip(p, exact, strict=True):
        close(x, y)
    close(run(attend, v), torch.stack([x @ v for x in exact]))
    got = run(torch.func.grad(lambda q, v: attend(q, v).sin().sum()), v)
    want = torch.autograd.grad(torch.stack([x @ v for x in exact]).sin().sum(), q)[0]
    close(got, want)
    close(torch.autograd.grad(run(attend, v).sin().sum(), q)[0], want)
    nested = torch.vmap(lambda q: torch.vmap(lambda q: attend(q, v), randomness=randomness)(q), randomness=randomness)
    out = nested(q[None].expand(2, *q.shape))
    assert torch.equal(out[0], out[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(lambda q: attend(q, v))(q)


def test_dropout_in_a_cuda_graph_is_refused(monkeypatch):
    """A launch holds its seed as a number, so every replay would drop the same."""
    from flash_attn_minimal.integrations.flash_attn._calls import draw_dropout

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(fa.Unsupported, match="every replay would drop the same .*; leave this call out of the graph"):
        draw_dropout(0.5, torch.device("cuda", 0))
    assert draw_dropout(0.0, torch.device("cuda", 0)) == {}
    for name in ("attention_seeded", "attention_seeded_backward"):
        tags = getattr(torch.ops.flash_attn_minimal, name).default.tags
        assert not hasattr(torch.Tag, "cudagraph_unsafe") or torch.Tag.cudagraph_unsafe in tags


@NO_CUDA
def test_dropout_and_cuda_graphs_on_a_gpu():
    q = normal("cuda", 1, 4, 64, 64, dtype=torch.bfloat16).detach()
    for _ in range(3):
        sdpa(q, q, q, dropout_p=0.5)
    torch.cuda.synchronize()
    with (
        pytest.raises(fa.Unsupported, match="every replay would drop the same"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        sdpa(q, q, q, dropout_p=0.5)
    x = q.clone().requires_grad_()
    run = compiled(lambda q: sdpa(q, q, q, dropout_p=0.5) * 2, backend="inductor", mode="reduce-overhead")
    outs, gradients = [], []
    for _ in range(6):
        out = run(x)
        (gradient,) = torch.autograd.grad(out.float().sum(), x)
        outs.append(out.detach().clone())
        gradients.append(gradient.clone())
    for found in (outs, gradients):
        assert not any(torch.equal(a, b) for a, b in zip(found, found[1:], strict=False))


def test_checkpointing_drops_the_same(device):
    inputs = [normal(device, *x) for x in SHAPES["square"]]
    grads = []
    for run in (sdpa, lambda *x: torch.utils.checkpoint.checkpoint(sdpa, *x, use_reentrant=False)):
        torch.manual_seed(1)
        grads.append(torch.autograd.grad(run(*inputs, None, 0.4).square().sum(), inputs))
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)


def test_opcheck_of_the_operator_with_a_seed():
    from flash_attn_minimal._core.options import Options
    from flash_attn_minimal.torch import _operators

    inputs = [normal("cpu", BATCH, ROWS, HEADS, DIM) for _ in range(3)]
    rest = (*[None] * 8, 0, 0, *_operators.packed(Options(dropout_p=0.5)))
    torch.library.opcheck(torch.ops.flash_attn_minimal.attention_seeded.default, (torch.tensor([3]), *inputs, *rest))


# ---- graphs ----


class Module(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, *args):
        return sdpa(*args, **self.options)


def test_compiled(device):
    run = compiled(sdpa)
    check([normal(device, *x) for x in SHAPES["usual"]], run=run, attn_mask=normal(device, ROWS, KEYS))
    check([normal(device, *x) for x in SHAPES["square"]], run=run, is_causal=True)
    dynamic = compiled(sdpa, dynamic=True)
    for rows in (5, 8, 21):
        check([normal(device, BATCH, HEADS, n, DIM) for n in (rows, KEYS, KEYS)], run=dynamic)


def test_compiled_under_autocast(device):
    inputs = [normal(device, *x) for x in SHAPES["square"]]

    def attend(*args):
        with torch.autocast(device, torch.bfloat16):
            return sdpa(*args)

    out = compiled(attend)(*inputs)
    assert out.dtype == torch.bfloat16
    close(out, attend(*inputs))


def test_exported(device):
    inputs = tuple(normal(device, *x, grad=False) for x in SHAPES["usual"])
    mask = normal(device, HEADS, 1, KEYS, grad=False)
    batch = torch.export.Dim("batch")
    shapes = {"args": ({0: batch}, {0: batch}, {0: batch}, None)}
    program = torch.export.export(Module(scale=0.2), (*inputs, mask), dynamic_shapes=shapes)
    more = [torch.cat([x, x.flip(0), x]) for x in inputs]
    close(program.module()(*more, mask), theirs(*more, mask, scale=0.2))


# ---- jagged ----


def jagged(device, lengths, dim, dtype=torch.float32):
    rows = [normal(device, n, dim, grad=False).to(dtype) + i for i, n in enumerate(lengths)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=True)


def heads(x, n):
    return x.unflatten(-1, (n, x.shape[-1] // n)).transpose(1, 2)


def one_by_one(q, k, v, **options):
    """out of each sequence, as a list of (seqlen, heads, headdim_v)."""
    rows = zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    return [theirs(*(x.unsqueeze(0) for x in entry), **options)[0].transpose(0, 1) for entry in rows]


JAGGED = {
    "plain": ((3, 12, 1), None, {}),
    "causal": ((3, 12, 1), None, {"is_causal": True, "scale": 0.4}),
    "grouped": ((3, 12, 1), None, {"enable_gqa": True, "is_causal": True}),
    "cross": ((3, 12, 1), (5, 2, 7), {}),
    "cross causal": ((3, 12, 1), (5, 2, 7), {"is_causal": True}),
}


def jagged_inputs(device, lengths, lengths_k, grouped):
    heads_k = 2 if grouped else HEADS
    x = jagged(device, lengths, HEADS * DIM)
    kv = x if lengths_k is None and not grouped else jagged(device, lengths_k or lengths, heads_k * DIM)
    if grouped:
        kv = torch.nested.nested_tensor_from_jagged(kv.values().detach(), x.offsets())
    return x, heads(x, HEADS), heads(kv * 0.7, heads_k), heads(kv.sin(), heads_k)


@pytest.mark.parametrize("name", JAGGED)
def test_jagged(device, name):
    lengths, lengths_k, options = JAGGED[name]
    x, q, k, v = jagged_inputs(device, lengths, lengths_k, "enable_gqa" in options)
    out = sdpa(q, k, v, **options)
    want = torch.cat(one_by_one(q, k, v, **options))
    assert out.is_nested and out.shape == q.shape
    close(out.transpose(1, 2).values(), want)
    (out * 2 + q).transpose(1, 2).flatten(-2)  # it goes on with tensors of the same lengths
    got, exact = (torch.autograd.grad(y.sin().sum(), x, retain_graph=True)[0] for y in
                  (out.transpose(1, 2).values(), want))  # fmt: skip
    close(got.values(), exact.values())


def test_jagged_compiled(device):
    counter = CompileCounterWithBackend("aot_eager")
    attend = lambda x: sdpa(heads(x, HEADS), heads(x * 0.7, HEADS), heads(x, HEADS), is_causal=True)  # noqa: E731
    run = compiled(attend, backend=counter)
    for lengths in ((3, 11, 4), (6, 2, 20), (9, 9, 9)):
        x = jagged(device, lengths, HEADS * DIM)
        out, q = run(x), heads(x, HEADS)
        close(out.transpose(1, 2).values(), torch.cat(one_by_one(q, q * 0.7, q, is_causal=True)))
    assert counter.frame_count == 1  # lengths are not part of a graph


def test_jagged_under_autocast_and_dropout(device):
    q = heads(jagged(device, (3, 12, 1), HEADS * DIM), HEADS)
    with torch.autocast(device, torch.bfloat16):
        assert sdpa(q, q, q).dtype == torch.bfloat16
    torch.manual_seed(0)
    a, b = sdpa(q, q, q, dropout_p=0.5), sdpa(q, q, q, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(a.values(), sdpa(q, q, q, dropout_p=0.5).values())
    assert not torch.equal(a.values(), b.values())


# ---- FLOPs ----


def flops(function):
    with flop_counter.FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_flops_are_those_of_pytorch(device):
    inputs = [normal(device, *x) for x in SHAPES["usual"]]
    q, k, v = (x.shape for x in inputs)
    forward = flop_counter.sdpa_flop_count(q, k, v)
    out = sdpa(*inputs)
    assert flops(lambda: sdpa(*inputs)) == forward
    assert flops(lambda: sdpa(*inputs, torch.zeros(ROWS, KEYS, device=device), 0.5)) == forward
    both = forward + flop_counter.sdpa_backward_flop_count(out.shape, q, k, v)
    assert flops(lambda: sdpa(*inputs).sum().backward()) == both
    program = torch.export.export(Module(dropout_p=0.5), tuple(inputs)).module()
    assert flops(lambda: program(*inputs).sum().backward()) == both
    meta = [x.to("meta") for x in inputs]
    assert flops(lambda: sdpa(*meta)) == forward
    assert flops(lambda: fa.flash_attn_func(*(x.transpose(1, 2) for x in meta), causal=True)) == forward


def test_flops_of_packed_sequences_are_their_own(device):
    q = heads(jagged(device, (3, 12, 1), HEADS * DIM), HEADS)
    pairs = HEADS * (9 + 144 + 1)
    assert flops(lambda: sdpa(q, q, q)) == 4 * pairs * DIM
    assert flops(lambda: sdpa(q, q, q).values().sum().backward()) == 14 * pairs * DIM


# ---- refusals ----


def test_errors_name_the_argument():
    q, k, v = (normal("cpu", *x) for x in SHAPES["square"])
    nested = heads(jagged("cpu", (3, 4), HEADS * DIM), HEADS)
    strided = torch.nested.nested_tensor([torch.zeros(HEADS, 3, DIM)])
    mask = torch.zeros(ROWS, ROWS)
    for match, args, options in (
        ("is_causal=True with attn_mask", (q, k, v, mask), {"is_causal": True}),
        ("query is a list", ([], k, v), {}),
        (r"key has shape \(2, 4, 9, 8\)", (q, k[..., :8], v), {}),
        (r"value has shape \(2, 4, 3, 16\)", (q, k, v[:, :, :3]), {}),
        (r"value has shape \(16,\)", (q, k, v[0, 0, 0]), {}),
        ("value is torch.float16 on cpu, but query is torch.float32", (q, k, v.half()), {}),
        ("query has 4 heads, key 2, value 4: that needs enable_gqa=True", (q, k[:, :2], v), {}),
        ("query has 4 heads, no multiple of key's 3", (q, k[:, :3], v[:, :3]), {"enable_gqa": True}),
        (r"attn_mask has shape \(9, 7\), which does not broadcast", (q, k, v, mask[:, :7]), {}),
        ("attn_mask is torch.float16: expected bool, float32", (q, k, v, mask.half()), {}),
        ("attn_mask is a list", (q, k, v, []), {}),
        ("value is a dense tensor beside nested ones", (nested, nested, v), {}),
        (r"query has 4 axes, number 1 of them ragged", (nested.transpose(1, 2),) * 3, {}),
        ("that needs enable_gqa=True", jagged_inputs("cpu", (3, 4), None, True)[1:], {}),
    ):
        with pytest.raises(fa.BadArgument, match=match):
            sdpa(*args, **options)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(fa.BadArgument, match="attn_mask is a ndarray"):
        sdpa(q, k, v, mask.numpy())
    for match, args in (
        (r"query is torch.float64: .* query.float\(\)", (q.double(), k.double(), v.double())),
        ("attn_mask is given, which attention of nested", (nested, nested, nested, mask)),
        ("query is a nested tensor of layout torch.strided: make it with layout=torch.jagged", (strided,) * 3),
    ):
        with pytest.raises(fa.Unsupported, match=match):
            sdpa(*args)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("shape", ["square", "usual"])
def test_traced_causal(device, shape):
    inputs = [normal(device, *x, grad=False) for x in SHAPES[shape]]
    graph = torch.jit.trace(lambda *x: sdpa(*x, is_causal=True), inputs)
    close(graph(*inputs), theirs(*inputs, is_causal=True))
