"""flex_attention of functions that are recognised, against PyTorch's flex_attention and its definition; and
refusals."""

from __future__ import annotations

import pytest
from conftest import CUDA_DEVICES

torch = pytest.importorskip("torch", reason="it takes and returns PyTorch's tensors")
pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has no flex_attention")

from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex  # noqa: E402
from torch.nn.attention.flex_attention import (  # noqa: E402
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    noop_mask,
    or_masks,
)
from torch.nn.attention.flex_attention import flex_attention as theirs  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal.torch import Form, flex_attention, mods, recognise  # noqa: E402

HAS_CUDA = CUDA_DEVICES and torch.cuda.is_available()
NO_CUDA = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device for the library and PyTorch")
DEVICES = ["cpu", pytest.param("cuda", marks=NO_CUDA)]
BATCH, HEADS, ROWS, DIM = 2, 4, 40, 16
INF = float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile", "ignore:.*return_lse")


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def normal(device, *shape, grad=False):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device).requires_grad_(grad)


def close(got, want, tolerance=2e-5):
    assert got.shape == want.shape
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


class Captured:
    """Tensors that the functions below read."""

    def __init__(self, device, rows=ROWS, keys=ROWS, grad=True):
        self.ids = torch.tensor([0] * 7 + [4] * 15 + [2] * 18, device=device)
        self.ids_of_both = torch.stack([self.ids, torch.tensor([5] * 30 + [3] * 10, device=device)])
        self.lengths = torch.tensor([17, 33], device=device)
        self.slopes = torch.linspace(0.1, 0.4, HEADS, device=device)
        self.slopes_of_both = torch.stack([self.slopes, 2 * self.slopes])
        self.bias = normal(device, HEADS, rows, keys, grad=grad)
        self.larger = normal(device, BATCH, HEADS, rows + 3, keys + 5)
        self.of_keys = normal(device, keys, HEADS)
        self.padding = torch.arange(keys, device=device) < self.lengths[:, None]


def masks(c):
    """mask_mods, by name."""
    seen = c.larger > 0
    return {
        "noop": noop_mask,
        "causal": mods.causal,
        "written the other way": lambda b, h, q, k: ~(k > q),
        "with a number": lambda b, h, q, k: q - k + 1 > 0,
        "window": mods.sliding_window(5),
        "window of both sides": mods.sliding_window(5, 3),
        "abs": lambda b, h, q, k: (q - k).abs() < 4,
        "torch.abs": lambda b, h, q, k: torch.abs(k - q) <= 4,
        "logical_and": lambda b, h, q, k: torch.logical_and(q >= k, torch.le(q - k, 6)),
        "documents": mods.documents(c.ids),
        "causal documents": and_masks(mods.documents(c.ids_of_both), mods.causal),
        "documents with a window": and_masks(mods.documents(c.ids), mods.sliding_window(3)),
        "chunks": lambda b, h, q, k: (q // 8 == k // 8) & (q >= k),
        "chunks of documents": lambda b, h, q, k: (c.ids[q] == c.ids[k]) & (q // 8 == k // 8),
        "prefix": mods.prefix_lm(13),
        "prefix of everything": mods.prefix_lm(ROWS),
        "prefix of nothing": mods.prefix_lm(0),
        "prefixes": mods.prefix_lm(c.lengths),
        "or_masks": or_masks(mods.causal, lambda b, h, q, k: c.lengths[b] > k),
        "padding": mods.padding(c.lengths),
        "causal padding": and_masks(mods.padding(c.lengths), mods.causal),
        "padding in memory": lambda b, h, q, k: c.padding[b][k] & (q >= k),
        "left padding": lambda b, h, q, k: (k >= c.lengths[b] - 15) & (q >= k),
        "heads": lambda b, h, q, k: (q >= k) & ((k % 3 == 0) | (h < 2)),
        "memory": lambda b, h, q, k: seen[b, h, q, k],
        "before itself": lambda b, h, q, k: k < q,
        "shared prompt": lambda b, h, q, k: (q >= k) & ((k < 7) | (c.ids[q] == c.ids[k])),
        "window and global": lambda b, h, q, k: (q >= k) & ((q - k <= 3) | (k < 2)),
        "window and global of both sides": lambda b, h, q, k: ((q - k).abs() <= 3) | (k < 2) | (q < 2),
        "documents in pieces": and_masks(
            mods.documents(torch.tensor([0] * 9 + [1] * 9 + [0] * 22, device=c.ids.device)), mods.causal
        ),
        "documents that are NaN": mods.documents(
            c.ids + torch.tensor([0.0] * 20 + [torch.nan] * 20, device=c.ids.device)
        ),
        "documents with padding": and_masks(mods.documents(c.ids), mods.padding(c.lengths), mods.causal),
        "documents of prefixes": and_masks(mods.documents(c.ids_of_both), mods.prefix_lm(c.lengths)),
        "prefix with a window": and_masks(mods.prefix_lm(3), mods.sliding_window(4)),
        "heads differ": lambda b, h, q, k: q >= k + h,
        "other ids": lambda b, h, q, k: c.ids[q] == c.ids_of_both[b, k],
        "block diffusion": lambda b, h, q, k: (q // 8 == k // 8) | ((q // 8 > k // 8) & (k >= 20)),
        "not": lambda b, h, q, k: ~((q >= 5) & (q < c.lengths[b]) & (k > 3)),
    }


def scores(c):
    """score_mods by name, with the captured tensors that have a gradient."""

    def of_the_paper(score, b, h, q, k):
        return torch.where(q >= k, score + (k - q) * torch.exp2(-((h + 1) * 8.0 / HEADS)), -INF)

    return {
        "softcap": (mods.softcap(2.0), []),
        "softcap by a factor": (lambda s, b, h, q, k: torch.tanh(s * 0.25) * 3, []),
        "scale": (lambda s, b, h, q, k: -s * 0.3 / 2, []),
        "alibi": (mods.alibi(c.slopes), []),
        "alibi of entries": (mods.alibi(c.slopes_of_both), []),
        "alibi of the paper": (of_the_paper, []),
        "bias": (mods.bias(c.bias), [c.bias]),
        "minus bias, turned": (lambda s, b, h, q, k: s - c.bias[h, k, q], [c.bias]),
        "larger bias": (mods.bias(c.larger), []),
        "bias of keys": (lambda s, b, h, q, k: c.of_keys[k, h] * 0.5 + s, []),
        "chain": (mods.chain(mods.softcap(3.0), mods.alibi(c.slopes), mods.bias(c.bias)), [c.bias]),
        "where": (lambda s, b, h, q, k: torch.where(q >= k, s, -INF), []),
        "where not": (lambda s, b, h, q, k: torch.where((k > q) | (q - k > 7), -INF, s + c.bias[h, q, k]), [c.bias]),
    }


NAMES = list(masks(Captured("cpu"))), list(scores(Captured("cpu")))


def definition(q, k, v, score_mod, mask_mod):
    """(out, lse) in float64, by evaluating the functions at every position."""
    s = (q.double() @ k.double().mT) * q.shape[-1] ** -0.5
    places = [torch.arange(n, device=q.device) for n in s.shape]
    if score_mod is not None:
        mapped = score_mod
        for axes in (
            (0, None, None, None, 0),
            (0, None, None, 0, None),
            (0, None, 0, None, None),
            (0, 0, None, None, None),
        ):
            mapped = torch.vmap(mapped, in_dims=axes)
        with TransformGetItemToIndex():
            s = mapped(s, *places)
    if mask_mod is not None:
        s = s.masked_fill(~create_mask(mask_mod, *s.shape, device=q.device), -INF)
    lse = s.logsumexp(-1)
    p = torch.where(lse[..., None] == -INF, 0.0, (s - lse[..., None].nan_to_num(neginf=0.0)).exp())
    return p @ v.double(), lse


def inputs_of(device, rows=ROWS, keys=ROWS):
    return [normal(device, BATCH, HEADS, n, DIM, grad=True) + 0.0 for n in (rows, keys, keys)]


def check(inputs, score_mod, mask_mod, captured=(), form=None):
    given = form or mask_mod
    out, lse = flex_attention(*inputs, None if form else score_mod, given, return_lse=True)
    want, exact = definition(*inputs, score_mod, mask_mod)
    close(out, want)
    close(lse, exact)
    leaves = [*inputs, *captured]
    got, exact = (torch.autograd.grad(x.sin().sum(), leaves, retain_graph=True) for x in (out, want))
    for x, y in zip(got, exact, strict=True):
        close(x, y)


@pytest.mark.parametrize("name", NAMES[0])
def test_masks(device, name):
    """Compared with the definition, and with PyTorch, which takes the BlockMask."""
    mask_mod, inputs = masks(Captured(device))[name], inputs_of(device)
    check(inputs, None, mask_mod)
    block_mask = create_block_mask(mask_mod, BATCH, HEADS, ROWS, ROWS, device=device, BLOCK_SIZE=16)
    inputs = [x.detach() for x in inputs]
    close(flex_attention(*inputs, block_mask=block_mask), theirs(*inputs, block_mask=block_mask))


@pytest.mark.parametrize("name", NAMES[1])
def test_scores(device, name):
    (score_mod, captured), inputs = scores(Captured(device))[name], inputs_of(device)
    check(inputs, score_mod, None, captured)
    inputs, (score_mod, _) = [x.detach() for x in inputs], scores(Captured(device, grad=False))[name]
    close(flex_attention(*inputs, score_mod), theirs(*inputs, score_mod))


@pytest.mark.parametrize("score", ["alibi of entries", "softcap"])
@pytest.mark.parametrize(
    "mask", ["causal documents", "documents with a window", "prefixes", "causal padding", "window"]
)
def test_both(device, mask, score):
    c = Captured(device)
    check(inputs_of(device), scores(c)[score][0], masks(c)[mask])


@pytest.mark.parametrize("rows, keys", [(13, 40), (40, 13)])
def test_rows_that_are_not_the_keys(device, rows, keys):
    """q_idx counts from the first row. A captured difference of the lengths aligns the last ones."""
    inputs, c = inputs_of(device, rows, keys), Captured(device, rows, keys)
    offset = torch.tensor(keys - rows, device=device)
    for mask_mod in (
        mods.causal,
        mods.sliding_window(3, 2),
        lambda b, h, q, k: k <= q + (keys - rows),
        lambda b, h, q, k: (q + offset - k < 6) & (q + offset >= k),
    ):
        check(inputs, None, mask_mod)
    check(inputs, lambda s, b, h, q, k: s - c.slopes[h] * (q + offset - k).abs(), lambda b, h, q, k: q + offset >= k)
    check(inputs, mods.alibi(c.slopes), mods.causal)
    check(inputs, mods.bias(c.bias), lambda b, h, q, k: k % 2 == 0, [c.bias])


def test_grouped_heads_scale_and_aux(device):
    q, k, v = (x.detach() for x in inputs_of(device))
    k, v = k[:, :2], v[:, :2]
    causal = create_block_mask(mods.causal, 1, 1, ROWS, ROWS, device=device)
    want = theirs(q, k, v, block_mask=causal, scale=0.4, enable_gqa=True)
    close(flex_attention(q, k, v, None, causal, 0.4, True), want)
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = flex_attention(q, k, v, None, mods.causal, 0.4, True, return_aux=AuxRequest(lse=True))
    close(out, want)
    assert aux.lse.shape == (BATCH, HEADS, ROWS) and aux.max_scores is None
    with pytest.raises(fa.Unsupported, match="return_aux.max_scores"):
        flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True))
    with pytest.raises(fa.BadArgument, match="query has 4 heads, key 2: that needs enable_gqa=True"):
        flex_attention(q, k, v)


def test_autocast_casts_as_it_does_for_pytorch(device):
    c = Captured(device)
    inputs = [normal(device, BATCH, HEADS, ROWS, DIM, grad=True) for _ in range(3)]
    want = flex_attention(*[x.bfloat16() for x in inputs], mods.bias(c.bias))
    with torch.autocast(device, torch.bfloat16):
        assert theirs(*(x.detach() for x in inputs)).dtype == torch.bfloat16
        out, lse = flex_attention(*inputs, mods.bias(c.bias), return_lse=True)
        mixed = flex_attention(*inputs[:2], inputs[2].bfloat16(), mods.bias(c.bias))
        form = recognise(mods.bias(c.bias), None, BATCH, HEADS, ROWS, ROWS, device)
        called = form(*inputs)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    for got in (out, mixed, called):
        assert torch.equal(got, want)
    gradients = torch.autograd.grad(out.float().square().sum(), (*inputs, c.bias))
    assert all(x.dtype == torch.float32 and x.abs().sum() > 0 for x in gradients)


@pytest.mark.parametrize("mask", ["causal documents", "prefixes", "padding", "window", None])
def test_a_form_in_compiled_code(device, mask):
    c = Captured(device)
    score_mod, mask_mod = scores(c)["alibi"][0], masks(c).get(mask)
    form = recognise(score_mod, mask_mod, BATCH, HEADS, ROWS, ROWS, device)
    assert isinstance(form, Form)
    inputs = inputs_of(device)
    check(inputs, score_mod, mask_mod, form=form)
    torch._dynamo.reset()
    graph = torch.compile(lambda *x: flex_attention(*x, block_mask=form), fullgraph=True, backend="aot_eager")
    out, want = graph(*inputs), form(*inputs)
    close(out, want, 1e-6)
    for x, y in zip(*(torch.autograd.grad(z.sin().sum(), inputs) for z in (out, want)), strict=True):
        close(x, y, 1e-6)


def test_functions_in_compiled_code_are_refused():
    inputs = inputs_of("cpu")
    torch._dynamo.reset()
    with pytest.raises(Exception, match="call recognise"):
        torch.compile(lambda *x: flex_attention(*x, block_mask=mods.causal), fullgraph=True, backend="eager")(*inputs)
    plain = torch.compile(flex_attention, fullgraph=True, backend="eager")
    close(plain(*inputs), definition(*inputs, None, None)[0])


# ---- masks by intervals and by blocks ----


def test_which_options_a_mask_becomes():
    c = Captured("cpu")
    of = masks(c)

    def form(mask_mod, rows=ROWS, keys=ROWS):
        return recognise(None, mask_mod, BATCH, HEADS, rows, keys)

    for name, window, shape in (
        ("shared prompt", (-1, 0), (1, 1, ROWS, 1)),
        ("window and global", (-1, 0), (1, 1, ROWS, 1)),
        ("window and global of both sides", (-1, -1), (1, 1, ROWS, 4)),
        ("documents in pieces", (-1, 0), (1, 1, ROWS, 2)),
        ("documents of prefixes", (-1, -1), (BATCH, 1, ROWS, 2)),
        ("heads differ", (-1, -1), (1, HEADS, ROWS, 2)),
    ):
        found = form(of[name])
        assert (found.window, tuple(found.row_indices.shape), found.blocks) == (window, shape, None)
    found = form(and_masks(mods.causal, lambda b, h, q, k: (q // 64 + k // 64 + b) % 2 == 0), 300, 300)
    assert found.row_indices is None and found.window == (-1, 0) and tuple(found.blocks.shape) == (BATCH, 1, 5, 5)
    assert form(of["causal documents"]).documents is not None and form(of["prefixes"]).prefix is not None


@pytest.mark.parametrize("rows,keys", [(300, 300), (200, 330)])
def test_masks_of_blocks(device, rows, keys):
    """Functions whose values are those of whole blocks, and a BlockMask of blocks alone, with gradients."""
    layout = torch.rand(1, HEADS, 5, 6, generator=torch.Generator().manual_seed(0)).to(device) < 0.5
    layout[:, :, :, 0] = True
    arrays = [normal(device, 1, HEADS, n, DIM, grad=True) for n in (rows, keys, keys)]
    by_function = lambda b, h, q, k: layout[b, h, q // 64, k // 64]  # noqa: E731
    kept = layout[:, :, : -(-rows // 64), : -(-keys // 64)].int()
    listed = kept.sum(-1).int(), kept.argsort(dim=-1, descending=True, stable=True).int()
    by_blocks = BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=64, seq_lengths=(rows, keys))
    want = definition(*arrays, None, by_function)[0]
    grads = torch.autograd.grad(want.sin().sum(), arrays)
    for mask in (by_function, by_blocks):
        out = flex_attention(*arrays, block_mask=mask)
        close(out, want)
        for x, y in zip(torch.autograd.grad(out.sin().sum(), arrays), grads, strict=True):
            close(x, y, 1e-4)


def test_a_block_mask_that_hides_more_than_its_function():
    arrays = [normal("cpu", 1, 2, 256, DIM) for _ in range(3)]
    lists = torch.tensor([[[1, 1]]], dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=mods.causal)  # each row sees its own block
    form = recognise(None, mask, 1, 2, 256, 256)
    assert form.blocks.tolist() == [[[[True, False], [False, True]]]] and form.window == (-1, 0)
    close(form(*arrays), definition(*arrays, None, lambda b, h, q, k: (q >= k) & (q // 128 == k // 128))[0])


# ---- functions that are not understood are refused, with the part that was not understood ----


def branch(b, h, q, k):
    if q > 3:
        return q >= k
    return k < 3


def test_masks_that_are_refused():
    c, inputs = Captured("cpu"), inputs_of("cpu")
    split = torch.tensor([0, 1] * (ROWS // 2))
    for mask_mod, text in (
        (lambda b, h, q, k: (q - k) % 2 == 0, r"\(\(\(q_idx - kv_idx\) % 2\) == 0\): not a window"),
        (lambda b, h, q, k: ((q - k) % 5 != 0) & (q > k), r"whole blocks of 64; flex_attention of PyTorch"),
        (and_masks(mods.documents(split), mods.prefix_lm(3)), "more than two intervals of rows from some key"),
        (lambda b, h, q, k: (q + k) % 3, "a mask of torch.int64: expected bool"),
        (branch, r"a Python `if`, `and`, `or` or `not` asks whether \(q_idx > 3\)"),
        (lambda b, h, q, k: int(q) > 2, "q_idx is used as a Python number"),
        (lambda b, h, q, k: torch.max(q, k) > 2, r"max\(q_idx, kv_idx\) is no operation that is known"),
        (lambda b, h, q, k: c.ids[q : q + 1] == k, "expected a number for each axis|used as a Python number"),
        (lambda b, h, q, k: c.larger[b, h, q] > 0, "is no element"),
        (lambda b, h, q, k: k % 3, "a mask of torch.int64: expected bool"),
    ):
        with pytest.raises(fa.Unsupported, match=text):
            flex_attention(*inputs, block_mask=mask_mod)
    with pytest.raises(fa.BadArgument, match="returned a NoneType"):
        flex_attention(*inputs, block_mask=lambda b, h, q, k: None)
    with pytest.raises(fa.BadArgument, match="a list is given"):
        flex_attention(*inputs, block_mask=[])
    with pytest.raises(fa.BadArgument, match=r"the tensor has 40 places for q_idx, the call 41"):
        recognise(None, lambda b, h, q, k: (c.bias > 0)[h, q, k], BATCH, HEADS, 41, ROWS)


def test_scores_that_are_refused():
    c, inputs = Captured("cpu"), inputs_of("cpu")
    for score_mod, text in (
        (lambda s, b, h, q, k: s + c.slopes[h] * (k - q), "score_mod|a signed distance needs a causal mask"),
        (lambda s, b, h, q, k: s + c.bias[h, 0, q - k + 20], r"score_mod: tensor.* not ALiBi, a bias in memory"),
        (lambda s, b, h, q, k: s + (q - k).abs() ** 2, "not ALiBi"),
        (lambda s, b, h, q, k: s + 0.1 * q, "not ALiBi"),
        (lambda s, b, h, q, k: s - c.slopes[h] * (q - k).abs() - (q - k).abs(), "not ALiBi"),
        (lambda s, b, h, q, k: s - c.slopes[h] * (q - k + 3).abs(), r"distances from q_idx \+ 3"),
        (lambda s, b, h, q, k: torch.tanh(torch.tanh(s)), "not a scale, softcap"),
        (lambda s, b, h, q, k: torch.exp(s), r"exp\(score\): not a scale, softcap"),
        (lambda s, b, h, q, k: s * s, "not a function of one score"),
        (lambda s, b, h, q, k: (s + c.bias[h, q, k]) * 2, "not a scale, softcap"),
        (lambda s, b, h, q, k: s * c.slopes[h], "not a scale, softcap"),
        (lambda s, b, h, q, k: 1 - s, "a score that is subtracted"),
        (lambda s, b, h, q, k: 1 / s, "not a scale, softcap"),
        (lambda s, b, h, q, k: -3 * torch.tanh(s), "a softcap of -3.0"),
        (lambda s, b, h, q, k: torch.add(s, k, alpha=2), "add with alpha"),
        (lambda s, b, h, q, k: torch.where(q >= k, s, -1e9), r"hides scores with -1000000000.0: expected -inf"),
        (lambda s, b, h, q, k: torch.where(s > 0, s, -INF), "not a function of one score|depends on the score"),
        (lambda s, b, h, q, k: torch.tanh(torch.where(q >= k, s, -INF)), "not a scale, softcap"),
        (lambda s, b, h, q, k: s.half(), r"half\(score\) is no operation that is known"),
        (lambda s, b, h, q, k: q * 1.0, "not a function of one score"),
        (lambda s, b, h, q, k: q, "q_idx: a score that does not depend on the score"),
        (lambda s, b, h, q, k: s * torch.rand(()), r"rand\(\) draws numbers"),
        (lambda s, b, h, q, k: s * c.bias.sum(), "requires a gradient, which only a bias gets"),
    ):
        with pytest.raises(fa.Unsupported, match=text):
            flex_attention(*inputs, score_mod)
    with pytest.raises(fa.Unsupported, match="alibi_slopes requires a gradient"):
        flex_attention(*inputs, mods.alibi(c.slopes.requires_grad_()), mods.causal)


def test_block_masks_that_are_not_their_function():
    """PyTorch hides blocks that were left out by hand, whatever mask_mod says."""
    inputs = inputs_of("cpu")
    right = create_block_mask(mods.causal, None, None, ROWS, ROWS, device="cpu", BLOCK_SIZE=8)
    close(flex_attention(*inputs, block_mask=right), definition(*inputs, None, mods.causal)[0])
    lists = right.kv_num_blocks, right.kv_indices, right.full_kv_num_blocks, right.full_kv_indices
    for place, change in ((0, lambda n: n * 0), (2, lambda n: n.clamp(max=2)), (2, lambda n: n + (n < 5).int())):
        wrong = [change(x) if i == place else x for i, x in enumerate(lists)]
        by_hand = BlockMask.from_kv_blocks(*wrong, BLOCK_SIZE=8, mask_mod=mods.causal, seq_lengths=(ROWS, ROWS))
        with pytest.raises(fa.Unsupported, match="the blocks of block_mask are not those of this function"):
            flex_attention(*inputs, block_mask=by_hand)
    with pytest.raises(fa.BadArgument, match=r"block_mask is of .*\(40, 40\).*, but the call of \(20, 40\)"):
        flex_attention(inputs[0][:, :, :20], *inputs[1:], block_mask=right)


def test_other_calls_of_a_form_are_refused():
    q, k, v = inputs_of("cpu")
    form = recognise(None, mods.causal, BATCH, HEADS, ROWS, ROWS)
    with pytest.raises(fa.BadArgument, match=r"query has shape \(2, 4, 20, 16\): this form is of"):
        form(q[:, :, :20], k, v)
    with pytest.raises(fa.BadArgument, match=r"value has shape \(2, 4, 20, 16\): this form is of"):
        form(q, k, v[:, :, :20])
    for name, given in {
        "query": (q.detach().numpy(), k, v),
        "key": (q, k.detach().numpy(), v),
        "value": (q, k, []),
    }.items():
        with pytest.raises(fa.BadArgument, match=f"{name} is a"):
            form(*given)
    with pytest.raises(fa.BadArgument, match="score_mod is given beside a Form"):
        flex_attention(q, k, v, mods.softcap(2.0), form)
    with pytest.raises(fa.BadArgument, match="query is"):
        flex_attention(q[0], k, v)


# ---- a form, and captured tensors that change ----


def live(c):
    """(score_mod, mask_mod, captured tensor) by name. A form reads the captured tensor at every call."""
    table, scalar = c.of_keys, torch.ones((), device=c.bias.device)
    mask = c.larger > 0
    return {
        "bias": (mods.bias(c.bias), None, c.bias),
        "minus bias": (lambda s, b, h, q, k: s - c.bias[h, q, k], None, c.bias),
        "two": (mods.chain(mods.bias(c.bias), lambda s, b, h, q, k: s + table[k, h]), None, table),
        "table": (lambda s, b, h, q, k: s + table[k, h] * 2, None, table),
        "scalar": (lambda s, b, h, q, k: s + scalar * table[k, h], None, scalar),
        "alibi": (mods.alibi(c.slopes), mods.causal, c.slopes),
        "mask": (None, lambda b, h, q, k: mask[b, h, q, k], mask),
        "hidden scores": (lambda s, b, h, q, k: torch.where(mask[b, h, q, k], s, -INF), None, mask),
        "padding": (None, mods.padding(c.lengths), c.lengths),
        "padding and mask": (None, and_masks(mods.padding(c.lengths), lambda b, h, q, k: mask[b, h, q, k]), c.lengths),
    }


@pytest.mark.parametrize("how", ["plain", "compiled"])
@pytest.mark.parametrize("made", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", live(Captured("cpu")))
def test_a_form_reads_captured_tensors_at_every_call(device, name, made, how):
    c = Captured(device, grad=False)
    score_mod, mask_mod, captured = live(c)[name]
    learned = score_mod is not None and captured.is_floating_point() and name != "alibi"
    captured.requires_grad_(learned)
    inputs = inputs_of(device)
    with made():
        form = recognise(score_mod, mask_mod, BATCH, HEADS, ROWS, ROWS, device)
    run = form
    if how == "compiled":
        torch._dynamo.reset()
        run = torch.compile(lambda *x: form(*x), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        out, want = run(*inputs), definition(*inputs, score_mod, mask_mod)[0]
        close(out, want)
        wanted = [*inputs, captured] if learned else inputs
        got, exact = (torch.autograd.grad(x.sin().sum(), wanted) for x in (out, want))
        for x, y in zip(got, exact, strict=True):
            close(x, y)
        with torch.no_grad():
            if captured.dtype == torch.bool:
                captured[..., 1:] = ~captured[..., 1:]
            else:
                captured.sub_(3 if captured.dtype == torch.int64 else 0.05)


@pytest.mark.parametrize("name", ["documents", "prefix", "number", "blocks", "derived", "window"])
def test_a_form_whose_tensors_have_changed_raises(device, name):
    c = Captured(device)
    number, window = torch.tensor(2.0, device=device), torch.tensor(4, device=device)
    blocks = create_block_mask(mods.padding(c.lengths), BATCH, None, ROWS, ROWS, device=device, BLOCK_SIZE=8)
    score_mod, mask_mod, captured = {
        "documents": (None, mods.documents(c.ids), c.ids),
        "prefix": (None, mods.prefix_lm(c.lengths), c.lengths),
        "number": (lambda s, b, h, q, k: number * torch.tanh(s / number), None, number),
        "window": (None, lambda b, h, q, k: q - k <= window, window),
        "blocks": (None, blocks, c.lengths),
        "derived": (lambda s, b, h, q, k: s + (2 * c.of_keys)[k, h], None, c.of_keys),
    }[name]
    inputs = inputs_of(device)
    form = recognise(score_mod, mask_mod, BATCH, HEADS, ROWS, ROWS, device)
    for _ in range(2):
        form(*inputs)
    captured += 1
    with pytest.raises(fa.BadArgument, match="has changed since the form was made.*: call recognise again"):
        form(*inputs)
    if name != "blocks":
        close(flex_attention(*inputs, score_mod, mask_mod), definition(*inputs, score_mod, mask_mod)[0])


@pytest.mark.parametrize("made", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("computed", ["twice", "transposed"])
def test_a_gradient_that_a_form_would_lose(device, computed, made):
    """The function computes a new tensor from the captured one. The form is made where that tensor has no gradient."""
    c = Captured(device)
    inputs = inputs_of(device)

    def score_mod(s, b, h, q, k):
        return s + (2 * c.bias if computed == "twice" else c.bias.transpose(1, 2))[h, q, k]

    with made():
        form = recognise(score_mod, None, BATCH, HEADS, ROWS, ROWS, device)
        form(*inputs)
    (want,) = torch.autograd.grad(definition(*inputs, score_mod, None)[0].sin().sum(), c.bias)
    (gradient,) = torch.autograd.grad(flex_attention(*inputs, score_mod).sin().sum(), c.bias)
    close(gradient, want)
    with pytest.raises(fa.BadArgument, match="requires a gradient, but the form.* no gradient was recorded"):
        form(*inputs)


@pytest.mark.parametrize("name", ["factor", "softcap"])
@pytest.mark.parametrize("asked", ["before", "after"])
def test_a_gradient_of_a_number_that_a_form_would_lose(device, name, asked):
    """The number is read only once, so calls have no gradient for it."""
    number = torch.tensor(2.0, device=device, requires_grad=asked == "before")
    inputs = inputs_of(device)

    def score_mod(s, b, h, q, k):
        return s * number if name == "factor" else torch.tanh(s / number) * number

    with torch.no_grad():
        form = recognise(score_mod, None, BATCH, HEADS, ROWS, ROWS, device)
        number.requires_grad_()
        close(form(*inputs), definition(*inputs, score_mod, None)[0])
    with pytest.raises(fa.BadArgument, match="score.* requires a gradient, which only a bias gets: detach it"):
        form(*inputs)


@pytest.mark.parametrize("made", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("detached", [torch.Tensor.detach, torch.detach, lambda x: x.data])
def test_a_form_of_detached_tensors(device, made, detached):
    """Detached tensors need no gradient, wherever the form was made."""
    c = Captured(device)
    inputs = inputs_of(device)
    number = torch.tensor(2.0, device=device, requires_grad=True)

    def score_mod(s, b, h, q, k):
        return s * detached(number) + detached(c.bias)[h, q, k]

    with made():
        form = recognise(score_mod, None, BATCH, HEADS, ROWS, ROWS, device)
    for _ in range(2):
        close(form(*inputs), definition(*inputs, score_mod, None)[0])
        with torch.no_grad():
            c.bias += 1


def test_functions_that_are_drawn_mean_what_they_say():
    """Random expressions: every function that is recognised has the values of its definition."""
    generator = torch.Generator().manual_seed(2026)
    q, k, v = (normal("cpu", 1, 2, 12, 8) for _ in range(3))

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def condition(a, n, m, way, part):
        terms = {
            "difference": lambda b, h, q, k: a * q - a * k + n,
            "turned": lambda b, h, q, k: n - (k - q) * a,
            "abs": lambda b, h, q, k: (q - k + (n % 2)).abs() - m,
            "key": lambda b, h, q, k: k * a + n,
            "chunk": lambda b, h, q, k: q // (abs(n) + 1) - k // (abs(n) + 1),
        }
        compare = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq}[way]
        return lambda b, h, q, k: compare(terms[part](b, h, q, k), 0)

    served = 0
    for _ in range(120):
        drawn = [
            condition(pick(-1, 1, 1, 2), pick(-3, -1, 0, 0, 1, 4), pick(2, 5), pick("<", "<=", ">", ">=", "=="),
                      pick("difference", "turned", "abs", "key", "chunk"))
            for _ in range(pick(1, 1, 2))
        ]  # fmt: skip
        mask_mod = pick(and_masks, and_masks, or_masks)(*drawn)
        try:
            out = flex_attention(q, k, v, block_mask=mask_mod)
        except fa.Unsupported:
            continue
        served += 1
        close(out, definition(q, k, v, None, mask_mod)[0])
    assert served > 20
