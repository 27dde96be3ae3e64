"""rms_norm, rope, swiglu, linear and sample: against float64, on awkward shapes, with wrong arguments, in a graph."""

import ctypes as ct

import accuracy
import numpy as np
import pytest
from conftest import CUDA, NO_CUDA, jax, ml_dtypes, torch

from flash_attn_lab import reference_ops as reference
from flash_attn_lab.fuzz.small import rounded as check
from flash_attn_minimal import BadArgument, FlashAttnError, Unsupported
from flash_attn_minimal._core import structs
from flash_attn_minimal.transformer import _library as transformer
from flash_attn_minimal.transformer import ops

DTYPES = ("float32", "float16", "bfloat16")
DIMS = (1, 7, 33, 288, 768, 4096)


def normal(rng, shape, dtype="float32", spread=1.0):
    return accuracy.round_to(spread * rng.standard_normal(shape, dtype=np.float32), dtype)


# ---- rms_norm ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_rms_norm(device, dim, dtype):
    rng = np.random.default_rng(dim)
    x, weight = normal(rng, (5, dim), dtype, 3), normal(rng, dim)
    for weight_dtype, out_dtype in (("float32", dtype), (dtype, "float32")):
        w = accuracy.round_to(weight, weight_dtype)
        out = device.nans((5, dim), out_dtype)
        got = ops.rms_norm(device.array(x, dtype), device.array(w, weight_dtype), 1e-6, out=out)
        assert got is out
        check("out", device.numpy(got), reference.rms_norm(x, w, 1e-6), out_dtype, np.abs(w).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", (7, 768))
def test_rms_norm_adds_the_residual_in_place(device, dim, dtype):
    rng = np.random.default_rng(1)
    x, residual, weight = normal(rng, (3, dim), dtype), normal(rng, (3, dim)), normal(rng, dim)
    given = device.array(x, dtype)
    got = ops.rms_norm(given, device.array(weight), residual=device.array(residual), out_dtype="float32")
    total = accuracy.round_to(x + residual, dtype)
    np.testing.assert_array_equal(device.numpy(given), total)
    check("out", device.numpy(got), reference.rms_norm(total, weight), "float32", 4)


def test_rms_norm_of_strided_rows_in_place_and_of_none(device):
    x = normal(np.random.default_rng(2), (4, 2, 48))
    given = device.array(x)
    part = given[:, 1]
    assert ops.rms_norm(part, device.array(np.ones(48, np.float32)), out=part) is part
    check("out", device.numpy(given)[:, 1], reference.rms_norm(x[:, 1], np.ones(48)), "float32")
    np.testing.assert_array_equal(device.numpy(given)[:, 0], x[:, 0])
    assert ops.rms_norm(given[:0], device.array(np.ones(48, np.float32))).shape == (0, 2, 48)


def test_rms_norm_nan_and_infinity_stay_in_their_row(device):
    x = np.ones((3, 40), np.float32)
    x[0, 3], x[1, 5] = np.nan, np.inf
    got = device.numpy(ops.rms_norm(device.array(x), device.array(np.ones(40, np.float32))))
    assert np.isnan(got[0]).all() and np.isnan(got[1, 5]) and (got[1, :5] == 0).all()
    np.testing.assert_allclose(got[2], 1, atol=1e-5)


# ---- rope ----


def tables(rows, half, theta=10000.0):
    angles = np.outer(np.arange(rows), theta ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("headdim", "rotary_dim"), [(64, 64), (128, 32), (2, 2), (33, 8), (576, 64)])
def test_rope(device, headdim, rotary_dim, interleaved, dtype):
    rng = np.random.default_rng(headdim)
    x = normal(rng, (3, 5, 2, headdim), dtype)
    cos, sin = tables(40, rotary_dim // 2)
    starts, each = np.array([0, 7, 35], np.int32), rng.integers(0, 40, (3, 5)).astype(np.int32)
    for table_dtype in {"float32", dtype}:
        c, s = accuracy.round_to(cos, table_dtype), accuracy.round_to(sin, table_dtype)
        for positions in (None, starts, each):
            at = None if positions is None else device.array(positions)
            given, out = device.array(x, dtype), device.nans(x.shape, dtype)
            got = ops.rope(given, device.array(c, table_dtype), device.array(s, table_dtype), at, interleaved, out=out)
            exact = reference.rope(x, c, s, positions, interleaved)
            check("out", device.numpy(got), exact, dtype)
            ops.rope(given, device.array(c, table_dtype), device.array(s, table_dtype), at, interleaved, out=given)
            np.testing.assert_array_equal(device.numpy(given), device.numpy(got))


def test_rope_turns_back(device):
    x = normal(np.random.default_rng(0), (2, 9, 3, 64))
    cos, sin = (device.array(t) for t in tables(9, 32))
    there = ops.rope(device.array(x), cos, sin)
    back = device.numpy(ops.rope(there, cos, sin, inverse=True))
    np.testing.assert_allclose(back, x, atol=1e-5)
    assert np.abs(device.numpy(there) - x).max() > 0.5


def test_rope_keeps_to_the_tables(device):
    """Positions outside of the tables are refused if they can be read, and otherwise cause no access outside of
    memory."""
    x, (cos, sin) = np.ones((2, 1, 1, 4), np.float32), tables(3, 2)
    at = device.array(np.array([-5, 1000], np.int32))
    arrays = device.array(x), device.array(cos), device.array(sin)
    if device.name == "cpu":
        with pytest.raises(BadArgument, match=r"positions\[0\]=-5 reaches row"):
            ops.rope(*arrays, at)
    else:
        got = device.numpy(ops.rope(*arrays, at))
        check("out", got, reference.rope(x, cos, sin, [0, 2]), "float32")


# ---- swiglu ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_swiglu(device, dim, dtype):
    gate_up = normal(np.random.default_rng(dim), (3, 2, 2 * dim), dtype, 4)
    gate_up[0, 0, 0], gate_up[-1, -1, -1] = -1e4, np.nan
    exact = reference.swiglu(gate_up)
    for out_dtype in {"float32", dtype}:
        got = ops.swiglu(device.array(gate_up, dtype), out_dtype=out_dtype)
        check("out", device.numpy(got), exact, out_dtype, 4)


# ---- linear ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 17])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 33), (96, 288), (768, 768), (200, 1160), (50, 4096), (2050, 72)])
def test_linear(device, n, k, rows, dtype):
    rng = np.random.default_rng(n + k)
    x, weight = normal(rng, (rows, k), dtype), normal(rng, (n, k), dtype, k**-0.5)
    got = ops.linear(device.array(x, dtype), device.array(weight, dtype), out=device.nans((rows, n), dtype))
    check("out", device.numpy(got), reference.linear(x, weight), dtype, 3)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (14, 33), (576, 288), (4096, 768), (110, 2048), (64, 11008)])
@pytest.mark.parametrize("swiglu", [False, True])
def test_linear_with_everything(device, n, k, rows, weight_dtype, swiglu):
    rng = np.random.default_rng(n + k)
    x, weight, norm = normal(rng, (rows, k), spread=3), normal(rng, (n, k), weight_dtype, k**-0.5), normal(rng, k)
    bias, residual = normal(rng, n, weight_dtype), normal(rng, (rows, n // 2 if swiglu else n))
    exact = reference.linear(x, weight, bias, norm, 1e-6, residual, swiglu)
    out = device.array(residual)  # the residual stream: added to in place
    got = ops.linear(
        device.array(x), device.array(weight, weight_dtype), device.array(bias, weight_dtype), device.array(norm), 1e-6,
        out, swiglu, out=out,
    )  # fmt: skip
    assert got is out
    check("out", device.numpy(got), exact, "float32", 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_strided_arrays(device, dtype):
    """Gaps between rows of x and weight, and weights that are not aligned to 16 bytes."""
    rng = np.random.default_rng(3)
    x, weight = normal(rng, (3, 2, 72), dtype), normal(rng, (40, 75), dtype, 0.1)
    xs, ws = device.array(x, dtype)[:, 1, 1:65], device.array(weight, dtype)[:, 3:67]
    got = ops.linear(xs, ws, out_dtype="float32")
    check("out", device.numpy(got), reference.linear(x[:, 1, 1:65], weight[:, 3:67]), "float32", 3)


def test_linear_nan_and_infinity(device):
    """A NaN or infinity reaches its row or column of the result, and no other."""
    x, weight = np.ones((3, 40), np.float32), np.ones((5, 40), np.float32)
    x[1, 7], weight[2, 39] = np.nan, np.inf
    got = device.numpy(ops.linear(device.array(x), device.array(weight)))
    assert np.isnan(got[1]).all() and np.isposinf(got[[0, 2], 2]).all()
    assert (got[[0, 2]][:, [0, 1, 3, 4]] == 40).all()


def test_linear_is_reproducible_and_rows_do_not_meet(device):
    rng = np.random.default_rng(4)
    x, weight = (
        device.array(normal(rng, (4, 768), "float16"), "float16"),
        device.array(normal(rng, (512, 768)), "float16"),
    )
    together = device.numpy(ops.linear(x, weight, out_dtype="float32"))
    np.testing.assert_array_equal(device.numpy(ops.linear(x, weight, out_dtype="float32")), together)
    for i in range(4):
        alone = device.numpy(ops.linear(x[i : i + 1], weight, out_dtype="float32"))
        np.testing.assert_allclose(alone[0], together[i], atol=2e-3 if device.name == "cuda" else 0)


# ---- sample ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 512, 32000, 128256])
def test_greedy_takes_the_first_of_the_largest(device, vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits = normal(rng, (4, vocab), dtype)
    logits[1] = np.round(logits[1])  # ties
    logits[2] = 0
    logits[2, ::2] = -0.0  # equal to 0
    logits[3] = -np.inf
    logits[3, vocab // 2] = -3e4
    got = device.numpy(ops.sample(device.array(logits, dtype)))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, logits.argmax(1))


def test_rows_without_an_answer_give_minus_one(device):
    logits = np.zeros((5, 100), np.float32)
    logits[0, 99], logits[1], logits[2, 50] = np.nan, -np.inf, np.inf
    logits[3, 4], logits[3, 60] = np.inf, np.inf
    for temperature, both in ((0, {4}), (1, {4, 60})):
        got = device.numpy(ops.sample(device.array(logits), temperature, seed=3))
        assert list(got[:3]) == [-1, -1, 50] and got[3] in both and 0 <= got[4] < 100


CUTS = [{}, {"top_k": 1}, {"top_k": 5}, {"top_k": 10**6}, {"top_p": 0.9}, {"top_p": 1e-6}, {"top_k": 40, "top_p": 0.5}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "peaked"])
def test_draws_stay_within_the_kept_tokens(device, kind, cut):
    rng = np.random.default_rng(5)
    draws, vocab = 64, 3000
    logits = normal(rng, vocab, spread=2)
    logits = {"normal": logits, "ties": np.round(logits), "equal": 0 * logits, "peaked": 30 * logits}[kind]
    rows = device.array(np.broadcast_to(logits, (draws, vocab)).copy())
    got = device.numpy(ops.sample(rows, 0.7, seed=11, **cut))
    p = reference.kept(logits, 0.7, **cut)
    # Sums in float64 and in integers may disagree on the last token of a nucleus.
    near = reference.kept(logits, 0.7, **{**cut, "top_p": min(1.0, cut.get("top_p", 1) + 1e-6)})
    assert ((p[got] > 0) | (near[got] > 0)).all()
    if p.max() < 0.01:
        assert len(set(got)) > 10


@pytest.mark.parametrize("cut", [{}, {"top_k": 6}, {"top_p": 0.8}], ids=str)
def test_draws_follow_the_distribution(device, cut):
    """Chi-square of 20000 draws over 12 tokens, seed fixed: 99.9 % of such sums stay below the bound."""
    draws = 20000
    logits = normal(np.random.default_rng(8), 12)
    rows = device.array(np.broadcast_to(logits, (draws, 12)).copy())
    got = device.numpy(ops.sample(rows, 1.3, seed=2**63 + 5, offset=2**40, **cut))
    p = reference.kept(logits, 1.3, **cut)
    counts, expected = np.bincount(got, minlength=12), draws * p
    assert not counts[p == 0].any()
    some = expected > 0
    assert ((counts - expected)[some] ** 2 / expected[some]).sum() < 31.3  # 11 degrees of freedom


def test_what_a_draw_depends_on(device):
    rng = np.random.default_rng(9)
    logits = np.broadcast_to(normal(rng, 1000), (40, 1000)).copy()
    rows = device.array(logits)

    def draw(rows=rows, **options):
        return device.numpy(ops.sample(rows, 1.0, **options))

    first = draw(seed=1)
    np.testing.assert_array_equal(draw(seed=1), first)
    step = np.arange(40, dtype=np.int32)
    for other in (
        draw(seed=2),
        draw(seed=1, offset=1),
        draw(seed=1, offset=2**32),
        draw(seed=1, step=device.array(np.array(1, np.int32))),
        draw(seed=1, step=device.array(step + 1)),
    ):
        assert (other != first).mean() > 0.8
    assert len(set(first)) > 10
    seeds = np.arange(40, dtype=np.int64) - 20
    own = draw(seeds=device.array(seeds), step=device.array(step))
    turned = draw(seeds=device.array(seeds[::-1].copy()), step=device.array(step[::-1].copy()))
    np.testing.assert_array_equal(turned, own[::-1])  # a row's draw moves with it


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA or "-")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 512, 32000, 128256])
def test_the_gpu_draws_what_the_cpu_draws(vocab, dtype):
    rng = np.random.default_rng(vocab)
    logits = normal(rng, (24, vocab), dtype, 4)
    logits[:8] = np.round(logits[:8])
    logits[8] = 1.5
    if dtype == "bfloat16":
        if ml_dtypes is None:
            pytest.skip("bfloat16 in NumPy needs ml_dtypes")
        host = logits.astype(ml_dtypes.bfloat16)
    else:
        host = logits.astype(dtype)
    for temperature in (0.0, 0.05, 1.0, 3.0):
        for cut in CUTS:
            want = ops.sample(host, temperature, seed=7, offset=vocab, **cut)
            got = CUDA.numpy(ops.sample(CUDA.array(logits, dtype), temperature, seed=7, offset=vocab, **cut))
            np.testing.assert_array_equal(got, want, err_msg=f"{temperature} {cut}")


@pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA or "-")
@pytest.mark.parametrize("batch", [1, 3, 40])  # a row's blocks: as many as the GPU has room for
def test_draws_from_bins_of_many_tokens(batch):
    """Most of a large vocabulary falls into one bin of the histogram: equal logits, nearly equal, masked out, or far
    below the first."""
    rng, vocab = np.random.default_rng(12), 100003  # no multiple of four
    near = 1 + np.arange(vocab) % 7 * np.float32(2.0**-23)
    masked = np.where(rng.random(vocab) < 0.9, -np.inf, 0.0)
    far = np.where(np.arange(vocab) == 77, 200.0, rng.standard_normal(vocab))
    logits = np.stack([np.zeros(vocab), near, masked, far])[np.arange(batch) % 4].astype(np.float32)
    for cut in ({}, {"top_p": 0.999}, {"top_k": 90001}, {"top_k": 7001, "top_p": 0.7}):
        for temperature in (1.0, 4.0):
            want = ops.sample(logits, temperature, seed=batch, **cut)
            got = CUDA.numpy(ops.sample(CUDA.array(logits), temperature, seed=batch, **cut))
            np.testing.assert_array_equal(got, want, err_msg=f"{temperature} {cut}")


# ---- graphs, programmatic launches, other doors ----


@pytest.mark.skipif(bool(NO_CUDA) or not torch, reason="needs PyTorch with CUDA")
@pytest.mark.parametrize("programmatic", [False, True])
def test_a_step_in_a_graph(programmatic):
    """A small decoder step, replayed with other inputs: products, norms, RoPE and a draw, one kernel after another."""
    rng = np.random.default_rng(6)
    dim, hidden, vocab = 96, 160, 1000
    more = {"programmatic": programmatic}
    host = [normal(rng, shape, spread=0.1) for shape in [(dim, dim), (2 * hidden, dim), (dim, hidden), (vocab, dim)]]
    norm, (cos, sin) = normal(rng, dim), tables(16, 12)
    wo, w13, w2, wcls = (torch.tensor(w, device="cuda") for w in host)
    g, c, s = (torch.tensor(t, device="cuda") for t in (norm, cos, sin))
    x, position = torch.zeros(2, dim, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    turned = torch.empty(2, 1, 4, dim // 4, device="cuda")
    stream, inner = torch.empty(2, dim, device="cuda"), torch.empty(2, hidden, device="cuda")
    final, logits = torch.empty(2, dim, device="cuda"), torch.empty(2, vocab, device="cuda")
    token = torch.empty(2, dtype=torch.int32, device="cuda")

    def step():
        ops.rope(x.view(2, 1, 4, dim // 4), c, s, position, True, out=turned, **more)
        ops.linear(turned.view(2, dim), wo, residual=x, out=stream, **more)
        ops.linear(stream, w13, norm_weight=g, swiglu=True, out=inner, **more)
        ops.linear(inner, w2, residual=stream, out=stream, **more)
        ops.rms_norm(stream, g, out=final, **more)
        ops.linear(final, wcls, out=logits, **more)
        ops.sample(logits, 1.0, top_k=50, seed=5, step=position, out=token, **more)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for i in range(6):
        x_now, at = normal(rng, (2, dim)), np.array([i, 15 - i], np.int32)
        x.copy_(torch.tensor(x_now)), position.copy_(torch.tensor(at))
        for result in (turned, stream, inner, final, logits):
            result.fill_(torch.nan)
        graph.replay()
        graph.replay()  # the second on top of the first, without a pause
        torch.cuda.synchronize()
        r = reference.rope(x_now.reshape(2, 1, 4, -1), cos, sin, at, True).reshape(2, dim)
        y = reference.linear(r, host[0], residual=x_now)
        y = reference.linear(reference.linear(y, host[1], norm_weight=norm, act_swiglu=True), host[2], residual=y)
        exact = reference.linear(reference.rms_norm(y, norm), host[3])
        got = logits.cpu().numpy()
        check("logits", got, exact, "float32", 3)
        np.testing.assert_array_equal(token.cpu().numpy(), ops.sample(got, 1.0, top_k=50, seed=5, step=at))


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_torch_and_jax_arrays(framework):
    pytest.importorskip(framework)
    array = torch.tensor if framework == "torch" else jax.numpy.asarray
    rng = np.random.default_rng(0)
    x, weight = normal(rng, (2, 3, 40)), normal(rng, (6, 40))
    given = array(x)
    got = ops.linear(given, array(weight))
    assert type(got) is type(given)
    check("out", np.asarray(got), reference.linear(x, weight), "float32", 3)
    assert tuple(ops.sample(given).shape) == (2, 3)
    if framework == "jax":
        with pytest.raises(BadArgument, match="x is a read-only JAX array"):
            ops.rms_norm(given, jax.numpy.ones(40), residual=given)
    else:
        with pytest.raises(Unsupported, match="x requires a gradient"):
            ops.rms_norm(torch.ones(2, requires_grad=True), torch.ones(2))


# ---- wrong arguments ----

F = np.float32
ONE, ROW, MATRIX, HEADS = np.ones(8, F), np.ones((2, 8), F), np.ones((6, 8), F), np.ones((2, 3, 1, 8), F)
COS = np.ones((4, 4), F)
BAD = [
    (lambda: ops.rms_norm(ROW.astype(int), ONE), "x is int64: expected float32, float16 or bfloat16"),
    (lambda: ops.rms_norm(ROW, ONE[:7]), r"weight has shape \(7,\): expected \(8,\)"),
    (lambda: ops.rms_norm(ROW, ONE, eps=-1.0), "eps=-1 is not a finite number >= 0"),
    (lambda: ops.rms_norm(ROW, ONE, eps=np.nan), "eps=nan"),
    (lambda: ops.rms_norm(ROW, ONE, residual=ONE), r"residual has shape \(8,\)"),
    (lambda: ops.rms_norm(ROW[:, ::2], ONE[:4]), "x has stride 2 along its last axis"),
    (lambda: ops.rms_norm(np.ones((3, 4, 8), F)[:, :2], ONE), "x has strides .*: its rows must lie at equal distances"),
    (lambda: ops.rms_norm(ROW, ONE, out_dtype="int8"), "out_dtype='int8'"),
    (lambda: ops.rms_norm(ROW, ONE, out=np.ones((2, 7), F)), r"out is float32 \(2, 7\): expected"),
    (lambda: ops.rms_norm(ROW, ONE, out=np.broadcast_to(ONE, (2, 8))), "out is a read-only NumPy array"),
    (lambda: ops.rms_norm(np.array(1, F), ONE), r"x has shape \(\)"),
    (lambda: ops.rms_norm(ROW, ONE, programmatic=2), "programmatic=2 is neither"),
    (lambda: ops.rms_norm(ROW, ONE, num_threads=-1), "num_threads=-1 is outside"),
    (lambda: ops.rope(ROW, COS, COS), r"x has shape \(2, 8\): expected \(batch, seqlen, nheads, headdim\)"),
    (lambda: ops.rope(HEADS, COS[0], COS[0]), r"cos has shape \(4,\)"),
    (lambda: ops.rope(HEADS, COS, COS[:3]), r"sin is float32 \(3, 4\), but cos is float32 \(4, 4\)"),
    (lambda: ops.rope(HEADS, COS, COS, rotary_dim=3), "rotary_dim=3 is odd"),
    (lambda: ops.rope(HEADS, COS, COS, rotary_dim=10), "rotary_dim=10 is above twice the 4 columns"),
    (lambda: ops.rope(HEADS[..., :6], COS, COS), "rotary_dim=8, twice the columns of cos"),
    (lambda: ops.rope(HEADS, COS[:2], COS[:2]), "seqlen=3 goes beyond the 2 rows of cos"),
    (lambda: ops.rope(HEADS, COS, COS, np.zeros(2)), "positions is float64: expected int32"),
    (lambda: ops.rope(HEADS, COS, COS, np.zeros(3, np.int32)), r"positions has shape \(3,\): expected \(2,\) or"),
    (lambda: ops.rope(HEADS, COS, COS, np.full(2, 2, np.int32)), r"positions\[0\]=2 reaches row 4 .* have 4 rows"),
    (lambda: ops.rope(HEADS, COS, COS, interleaved="yes"), "interleaved='yes'"),
    (lambda: ops.swiglu(ROW[:, :7]), r"gate_up has shape \(2, 7\): its last axis must have an even length"),
    (lambda: ops.swiglu(ROW, out=ROW), r"out is float32 \(2, 8\): expected float32 \(2, 4\)"),
    (lambda: ops.linear(ROW, MATRIX[:, :7]), r"weight has shape \(6, 7\): expected \(out_features, 8\)"),
    (lambda: ops.linear(ROW, MATRIX[:5], swiglu=True), r"weight has shape \(5, 8\): swiglu needs an even number"),
    (lambda: ops.linear(ROW, MATRIX, bias=ONE), r"bias has shape \(8,\): expected \(6,\)"),
    (lambda: ops.linear(ROW, MATRIX, norm_weight=ONE[:6]), r"norm_weight has shape \(6,\): expected \(8,\)"),
    (lambda: ops.linear(ROW, MATRIX, norm_weight=ONE, eps=np.inf), "eps=inf"),
    (lambda: ops.linear(ROW, MATRIX, residual=ROW), r"residual has shape \(2, 8\): expected \(2, 6\)"),
    (lambda: ops.linear(ROW, np.ones((8, 8), F), out=ROW), "out.data is x.data"),
    (lambda: ops.linear(ROW, MATRIX.astype(np.int8)), "weight is int8"),
    (lambda: ops.sample(ROW, -1.0), "temperature=-1 is not a finite number >= 0"),
    (lambda: ops.sample(ROW, np.inf), "temperature=inf"),
    (lambda: ops.sample(ROW, "hot"), "temperature='hot' is not a number"),
    (lambda: ops.sample(ROW, top_k=-1), "top_k=-1 is outside"),
    (lambda: ops.sample(ROW, top_p=0), "top_p=0 is outside 0 < top_p <= 1"),
    (lambda: ops.sample(ROW, top_p=1.5), "top_p=1.5 is outside"),
    (lambda: ops.sample(ROW, seed=-1), "seed=-1 is outside"),
    (lambda: ops.sample(ROW, offset=2**64), "offset=18446744073709551616 is outside"),
    (lambda: ops.sample(ROW, step=np.zeros(3, np.int32)), r"step has shape \(3,\)"),
    (lambda: ops.sample(ROW, step=np.zeros(2)), "step is float64: expected int32"),
    (lambda: ops.sample(ROW, seeds=np.zeros(2, np.int32)), "seeds is int32: expected int64"),
    (lambda: ops.sample(ROW, seeds=np.zeros(3, np.int64)), r"seeds has shape \(3,\): expected \(2,\)"),
    (lambda: ops.sample(ROW, out=np.zeros(2)), "out is float64: expected int32"),
    (lambda: ops.sample(ROW, out=np.zeros(3, np.int32)), r"out has shape \(3,\): expected \(2,\)"),
    (lambda: ops.sample(np.zeros((2, 0), F)), "vocab=0 is outside 1 .. 1048576"),
    (lambda: ops.sample(np.zeros((1, 2**20 + 1), F)), "vocab=1048577 is outside"),
]


@pytest.mark.parametrize(("call", "text"), BAD, ids=[text for _, text in BAD])
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(FlashAttnError, match=text):
        call()


@pytest.mark.parametrize("name", [name for name in transformer.OPERATIONS if not name.startswith("w4_")])
def test_c_structs_are_checked(name):
    """Values that Python never sends, one field at a time. Nothing is read or written through them."""
    function, kind = getattr(transformer.load(), f"fa_{name}"), transformer.OPERATIONS[name]
    fields = [field for field, _ in kind._fields_]
    usual = {"device": structs.CPU, "dtype": 1, "rows": 1, "dim": 4, "batch": 1, "vocab": 4, "nheads": 1, "headdim": 4}
    usual |= {"seqlen": 1, "table_rows": 1, "in_features": 4, "out_features": 4, "struct_size": ct.sizeof(kind)}

    def refused(text, **wrong):
        args = kind(**{field: value for field, value in (usual | wrong).items() if field in fields})
        with pytest.raises(BadArgument, match=text):
            function(args, None)

    refused(f"fa_{name}_args.struct_size=3: set it to", struct_size=3)
    refused("device=7 is neither", device=7)
    refused("dtype=4 is none of", dtype=4)
    refused(r"\.data is NULL")
    for field in fields:
        if field.endswith("_dtype"):
            refused(f"{field}=9 is none of", **{field: 9})
        if field in ("rows", "batch", "seqlen", "dim", "vocab", "nheads", "headdim", "in_features", "out_features"):
            refused(f"{field}=-1", **{field: -1})
    with pytest.raises(BadArgument, match=f"fa_{name}_args is NULL"):
        function(None, None)


def test_c_fields_that_only_matter_with_data():
    x = np.ones((2, 4), F)
    args = transformer.SwigluArgs(struct_size=ct.sizeof(transformer.SwigluArgs), device=1, dtype=1, dim=2, rows=2)
    args.gate_up_data, args.gate_up_row_stride, args.out_data = x.ctypes.data, 4, x.ctypes.data + 32
    for wrong, text in ((1, "out.row_stride=1 with 2 columns"), (0, "out.row_stride=0 with rows=2")):
        args.out_row_stride = wrong
        with pytest.raises(BadArgument, match=text):
            transformer.load().fa_swiglu(args, None)
    args.out_row_stride, args.programmatic = 2, 3
    with pytest.raises(BadArgument, match="programmatic=3 is neither 0 nor 1"):
        transformer.load().fa_swiglu(args, None)
    args.programmatic, args.out_data = 0, x.ctypes.data + 33
    with pytest.raises(BadArgument, match="not aligned to its element size"):
        transformer.load().fa_swiglu(args, None)


def test_an_error_leaves_the_output_alone():
    out = np.full((2, 6), 7, F)
    with pytest.raises(BadArgument):
        ops.linear(ROW, MATRIX, norm_weight=ONE, eps=-1, out=out)
    assert (out == 7).all()
