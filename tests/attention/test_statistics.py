"""max_score against float64, from every kernel that gives it."""

import dataclasses

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import torch
from test_attention import OPTIONS
from test_varlen import LENGTHS, varlen_case

import flash_attn_minimal as fa
from flash_attn_minimal import _arrays, _library, _pack, kvcache, reference

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def _results_start_as_nan(monkeypatch, request):
    """What the library allocates for its results holds NaN."""
    if "kernel" not in request.fixturenames:
        return
    array = request.getfixturevalue("kernel").device.array(np.zeros(1, np.float32))
    door = type(_arrays.view(array, "array").door)
    empty = door.empty

    def poisoned(self, like, shape, dtype):
        view = empty(self, like, shape, dtype)
        if dtype != "uint8" and 0 not in shape:
            view.owner[...] = float("nan")
        return view

    monkeypatch.setattr(door, "empty", poisoned)


def given(kernel, case: Case, **wanted):
    """The kernel's results beside out, as NumPy arrays; skips where the kernel does not give them."""
    q, k, v, options = accuracy.inputs(case)
    lengths = (case.cu_seqlens_q, case.cu_seqlens_k, case.seqlen_q, case.seqlen_k) if case.varlen else None
    arrays, options = kernel.arguments(q, k, v, case.dtype, lengths, options)
    plan = fa.query(*arrays, **wanted, **options)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert (plan.status, plan.kernel) == ("FA_OK", kernel.name), plan
    function = fa.flash_attn_varlen_func if case.varlen else fa.flash_attn_func
    out, *results = function(*arrays, **wanted, **options)
    plain = function(*arrays, **options)
    assert np.array_equal(kernel.device.numpy(out), kernel.device.numpy(plain), equal_nan=True)
    return [kernel.device.numpy(x) for x in results]


def check(kernel, case: Case) -> np.ndarray:
    (got,) = given(kernel, case, return_max_score=True)
    q, k, v, options = accuracy.inputs(case)
    if case.varlen:
        exact = reference.varlen_max_score(q, k, v, case.cu_seqlens_q, case.cu_seqlens_k, **options)
    else:
        exact = reference.max_score(q, k, v, **options)
    floor = 4 * accuracy.rounding_floor(q, k, case.softmax_scale)
    assert got.dtype == np.float32
    accuracy.check("max_score", got, exact, exact, "float32", floor=floor)
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 1), (7, 300), (65, 63), (113, 203), (239, 1), (300, 129)])
def test_lengths(kernel, seqlen_q, seqlen_k, causal, dtype):
    check(kernel, Case(seqlen_q, seqlen_k, nheads=4, nheads_k=2, batch=2, causal=causal, dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "headdim,headdim_v",
    [(1, 1), (40, 40), (64, 64), (96, 96), (128, 64), (192, 128), (192, 192), (256, 256), (320, 512)],
)
def test_headdims(kernel, headdim, headdim_v, dtype):
    check(kernel, Case(150, 260, headdim, headdim_v, dtype=dtype, causal=True))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(kernel, option, dtype):
    case = {"batch": 2, "nheads": 4, "nheads_k": 2, "dtype": dtype, **OPTIONS[option]}
    check(kernel, Case(70, 133, 48, **case))
    check(kernel, Case(133, 70, 48, causal=True, **case))


@pytest.mark.parametrize("window_size", [(0, 0), (5, -1), (-1, 3), (40, 20)])
def test_windows(kernel, window_size):
    check(kernel, Case(113, 203, 40, window_size=window_size, dtype="bfloat16"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences(kernel, lengths, causal):
    got = check(kernel, varlen_case(LENGTHS[lengths], nheads=4, nheads_k=2, causal=causal, dtype="bfloat16"))
    assert got.shape == (len(LENGTHS[lengths][0]), 4)


def test_rows_without_keys(kernel):
    """No row of the first head and sequence sees a key: -inf, never NaN; a sink is no score."""
    assert np.isneginf(check(kernel, Case(70, 133, 48, mask=(True, True, True), mask_rate=0.0, sinks=True))).all()
    lengths = ((70, 60, 0), (0, 33, 9))
    got = check(kernel, varlen_case(lengths, headdim=64, causal=True, sinks=True, dtype="bfloat16"))
    assert np.isneginf(got[[0, 2]]).all() and np.isfinite(got[1]).all()


# Long enough for every tile and way to keep the running maximum. Rows and keys of a sequence end inside of tiles.
LONG = {
    "d64": Case(300, 1500, 64),
    "d64 causal": Case(1000, 2100, 64, causal=True),
    "d128": Case(300, 1100, 128),
    "d128 causal": Case(300, 1196, 128, causal=True),
    "d128 packed": varlen_case(((300, 200), (2100, 700)), headdim=128),
    "d128 causal packed": varlen_case(((300, 20), (8300, 7)), headdim=128, causal=True),
    "d256": Case(200, 600, 256),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("signs", ["both", "negative", "rising"])
@pytest.mark.parametrize("long", LONG)
def test_long(kernel, long, signs, dtype, monkeypatch):
    """Also where no score is positive, and where they grow along the keys, or towards the first ones, by far more than
    a speculative maximum bears."""
    inputs = accuracy.inputs

    def changed(case):
        q, k, v, options = inputs(case)
        if signs == "negative":
            q, k = np.abs(q), -np.abs(k)
        elif signs == "rising":
            slope = np.linspace(-40, 40, len(k) if case.varlen else k.shape[1], dtype=np.float32)
            q[..., 0], k[..., 0] = 4, accuracy.round_to(slope[:, None], dtype)
            q[..., 1, 0] = -4
        return q, k, v, options

    monkeypatch.setattr(accuracy, "inputs", changed)
    check(kernel, dataclasses.replace(LONG[long], dtype=dtype))


def test_hidden_keys_do_not_leak(kernel):
    """NaN and infinities in keys that no row sees, and in rows of other sequences."""
    case = Case(50, 90, 64, causal=True, top_left=True, dtype="bfloat16")
    q, k, v, options = accuracy.inputs(case)
    arrays, options = kernel.arguments(q, k, v, case.dtype, None, options)
    k[:, 50:], v[:, 50:] = np.inf, np.nan
    poisoned, _ = kernel.arguments(q, k, v, case.dtype, None, {})
    if fa.query(*arrays, return_max_score=True, **options).status == "FA_UNSUPPORTED":
        pytest.skip("the kernel does not give it")
    for want, got in zip(
        *(fa.flash_attn_func(*x, return_max_score=True, **options) for x in (arrays, poisoned)), strict=True
    ):
        assert np.array_equal(kernel.device.numpy(want), kernel.device.numpy(got))


@pytest.mark.parametrize("seqlen_q,seqlen_k,batch", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
def test_empty_axes(kernel, seqlen_q, seqlen_k, batch):
    got = check(kernel, Case(seqlen_q, seqlen_k, batch=batch, nheads=4, nheads_k=2, dtype="bfloat16"))
    assert got.shape == (batch, 4)
    if not (seqlen_q and seqlen_k):
        assert np.isneginf(got).all()


def test_threads_agree():
    """Bitwise, with zeros of both signs among the greatest scores."""
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-1, 1, (2, 700, 4, 8)).astype(np.float32) for _ in "qk")
    k[:, :, 0] = 0
    got = [fa.flash_attn_func(q, k, k, num_threads=n, return_max_score=True)[1].tobytes() for n in (1, 2, 5)]
    assert got[0] == got[1] == got[2]


def test_what_comes_back():
    """out, lse, max_score, in this order; a given out is returned; nothing is asked for by False."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4, 8), dtype=np.float32)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    mine = np.empty_like(out)
    more = fa.flash_attn_func(q, k, v, return_lse=True, return_max_score=True, out=mine)
    assert more[0] is mine and len(more) == 3
    for got, want in zip(more, (out, lse, reference.max_score(q, k, v)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    assert len(fa.flash_attn_func(q, k, v, return_max_score=True)) == 2
    assert isinstance(fa.flash_attn_func(q, k, v, return_max_score=False), np.ndarray)
    with pytest.raises(fa.BadArgument, match="return_max_score=3 is neither True nor False"):
        fa.flash_attn_func(q, k, v, return_max_score=3)


def test_kernels_that_do_not_give_it_say_so(device):
    if device.name != "cuda":
        pytest.skip("every kernel of the CPU gives it")
    q, k = (device.array(np.zeros((1, n, 1, 64), np.float32), "bfloat16") for n in (1, 9000))
    plan = fa.query(q, k, k, return_max_score=True, kernel="decode_split_sm80")
    assert plan.status == "FA_UNSUPPORTED" and "max_score" in plan.error
    assert fa.query(q, k, k, return_max_score=True).status == "FA_OK"


def test_a_cache_does_not_give_it():
    """In the C ABI, where fa_kvcache_args has a whole fa_attention_args."""
    q, cache = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 9, 2, 8), np.float32)
    call, args, views, _ = kvcache._prepare_step(kvcache._Step(q, cache, cache))
    _pack._put_tensor(args, "out", _arrays.view(np.empty_like(q), "out"))
    args.max_score = cache.ctypes.data
    with pytest.raises(fa.Unsupported, match="max_score is set"):
        _library.load().fa_kvcache_attention(call, None)


def test_gradients_stay(device):
    """PyTorch's gradients through out and lse are those of the call without max_score, which has none."""
    if torch is None or device.framework != "torch" and device.name != "cpu":
        pytest.skip("needs PyTorch")
    q, k, v = torch.randn(3, 2, 33, 4, 16, device=device.name).unbind()
    arrays = [x.clone().requires_grad_() for x in (q, k[:, :, :2], v[:, :, :2])]
    slopes = torch.rand(4, device=device.name)
    sinks = torch.randn(4, device=device.name, requires_grad=True)
    options = {"causal": True, "alibi_slopes": slopes, "sinks": sinks}
    wants = (*arrays, sinks)

    def gradients(out, lse):
        return torch.autograd.grad((out * q).sum() + lse.sum(), wants)

    out, lse, score = fa.flash_attn_func(*arrays, return_lse=True, return_max_score=True, **options)
    assert out.requires_grad and not score.requires_grad and score.shape == (2, 4)
    for got, want in zip(
        gradients(out, lse), gradients(*fa.flash_attn_func(*arrays, return_lse=True, **options)), strict=True
    ):
        assert torch.equal(got, want)
    out, score = fa.flash_attn_func(*arrays, return_max_score=True)
    out.sum().backward()
    assert arrays[0].grad is not None
    with pytest.raises(fa.Unsupported, match="return_max_score is given"):
        torch.func.grad(lambda x: fa.flash_attn_func(x, k, v, return_max_score=True)[0].sum())(q)
