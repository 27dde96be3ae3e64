"""max_score and key_sums against float64, from every kernel that gives them."""

import dataclasses

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import torch
from test_attention import OPTIONS
from test_varlen import LENGTHS, varlen_case

import flash_attn_minimal as fa
from flash_attn_lab import reference
from flash_attn_minimal import _arrays, kvcache
from flash_attn_minimal._core import fields, library, structs
from flash_attn_minimal._core import options as _options

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture(autouse=True)
def _results_start_as_nan(monkeypatch, request):
    """Fills the arrays that the library allocates for its results with NaN."""
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
    """The kernel's results besides out, as NumPy arrays. Skips the test if the kernel does not give them."""
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
    out, plain = kernel.device.numpy(out), kernel.device.numpy(plain)
    if kernel.name == "wgmma_sm90" and "return_max_score" in wanted:  # the plans that give it round P differently
        np.testing.assert_allclose(
            out, plain, rtol=0, atol=4 * accuracy.EPSILON[case.dtype] * np.nanmax(np.abs(plain), initial=0)
        )
    else:
        assert np.array_equal(out, plain, equal_nan=True)
    return [kernel.device.numpy(x) for x in results]


def exact(name: str, case: Case) -> np.ndarray:
    q, k, v, options = accuracy.inputs(case)
    if case.varlen:
        function = getattr(reference, f"varlen_{name}")
        return function(q, k, v, case.cu_seqlens_q, case.cu_seqlens_k, **options)
    return getattr(reference, name)(q, k, v, **options)


def check(kernel, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Checks max_score and key_sums against float64, and returns them. They come from one call if the kernel gives
    both."""
    q, k, *_ = accuracy.inputs(case)
    floor = 4 * accuracy.rounding_floor(q, k, case.softmax_scale)
    (lse, score, sums), want = given(kernel, case, **dict.fromkeys(ALL, True)), exact("max_score", case)
    assert score.dtype == sums.dtype == np.float32
    accuracy.check("max_score", score, want, want, "float32", floor=floor)
    want = exact("key_sums", case)
    # The relative error of a probability is the error of its score and lse; that of a long float32 sum is a bit larger.
    finite = np.abs(lse[np.isfinite(lse)]).max(initial=1.0)
    allowed = 1e-5 + 2 * (floor + 2.0**-23 * finite) * (1 + np.abs(want))
    accuracy.within("key_sums", sums, want, allowed)
    return score, sums


ALL = ("return_lse", "return_max_score", "return_key_sums")


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
    got, _ = check(kernel, varlen_case(LENGTHS[lengths], nheads=4, nheads_k=2, causal=causal, dtype="bfloat16"))
    assert got.shape == (len(LENGTHS[lengths][0]), 4)


def test_rows_without_keys(kernel):
    """No row of the first head and sequence sees a key: max_score is -inf, never NaN. A sink is not a score."""
    score, sums = check(kernel, Case(70, 133, 48, mask=(True, True, True), mask_rate=0.0, sinks=True))
    assert np.isneginf(score).all() and not sums.any()
    lengths = ((70, 60, 0), (0, 33, 9))
    got, _ = check(kernel, varlen_case(lengths, headdim=64, causal=True, sinks=True, dtype="bfloat16"))
    assert np.isneginf(got[[0, 2]]).all() and np.isfinite(got[1]).all()


# Long enough for every tile size and every way to keep the running maximum. Rows and keys of a sequence end inside
# tiles.
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
    """Also if no score is positive, and if scores grow along the keys, or towards the first keys, by far more than a
    speculative maximum allows."""
    if kernel.name == "cpu_naive" and signs != "both":
        pytest.skip("takes the maximum of the whole row before it adds anything up")
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
    options |= dict.fromkeys(ALL, True)
    if fa.query(*arrays, **options).status == "FA_UNSUPPORTED":
        pytest.skip("the kernel does not give them")
    for want, got in zip(*(fa.flash_attn_func(*x, **options) for x in (arrays, poisoned)), strict=True):
        assert np.array_equal(kernel.device.numpy(want), kernel.device.numpy(got))


@pytest.mark.parametrize("seqlen_q,seqlen_k,batch", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 5, 0)])
def test_empty_axes(kernel, seqlen_q, seqlen_k, batch):
    got, sums = check(kernel, Case(seqlen_q, seqlen_k, batch=batch, nheads=4, nheads_k=2, dtype="bfloat16"))
    assert got.shape == (batch, 4) and sums.shape == (batch, 4, seqlen_k)
    if not (seqlen_q and seqlen_k):
        assert np.isneginf(got).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seqlen_q,nheads_k", [(1, 1), (5, 2), (64, 4)])
def test_few_rows_over_many_keys(kernel, seqlen_q, nheads_k, dtype):
    """key_sums alone: lse is then in the workspace, and kernels for few rows also serve the call."""
    case = Case(seqlen_q, 1300, 128, nheads=4, nheads_k=nheads_k, causal=True, dtype=dtype)
    (sums,), want = given(kernel, case, return_key_sums=True), exact("key_sums", case)
    accuracy.within("key_sums", sums, want, 1e-5 * (1 + want))
    np.testing.assert_allclose(sums.sum(axis=-1), seqlen_q, rtol=1e-5)  # a row's probabilities are 1 together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("headdim,headdim_v", [(320, 320), (512, 512)])
def test_key_sums_of_wide_heads(kernel, headdim, headdim_v, dtype):
    """key_sums alone, because not every kernel for these head dims gives max_score."""
    case = Case(150, 260, headdim, headdim_v, nheads=4, nheads_k=2, causal=True, dtype=dtype)
    (sums,), want = given(kernel, case, return_key_sums=True), exact("key_sums", case)
    q, k, *_ = accuracy.inputs(case)
    floor = 8 * accuracy.rounding_floor(q, k, case.softmax_scale)
    accuracy.within("key_sums", sums, want, (1e-5 + floor) * (1 + want))


def test_keys_of_no_sequence(device):
    """Sums of keys that belong to no sequence are 0 in a new array, and the library does not write them."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 50, 2, 16), dtype=np.float32)
    starts = [device.array(np.array(x, np.int32)) for x in ([0, 15, 15, 30], [0, 25, 30, 40])]
    arrays = [device.array(x) for x in (q, k, v)]
    sums = device.numpy(fa.flash_attn_varlen_func(*arrays, *starts, 15, 25, return_key_sums=True)[1])
    assert sums.shape == (2, 50) and not sums[:, 25:30].any() and not sums[:, 40:].any()
    np.testing.assert_allclose(sums[:, :25].sum(1), 15, rtol=1e-5)
    np.testing.assert_allclose(sums[:, 30:40].sum(1), 15, rtol=1e-5)


def test_threads_agree():
    """Any number of threads gives the same bits, also with zeros of both signs among the greatest scores."""
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-1, 1, (2, 700, 4, 8)).astype(np.float32) for _ in "qk")
    k[:, :, 0] = 0
    more = dict.fromkeys(ALL, True)
    got = [[x.tobytes() for x in fa.flash_attn_func(q, k, k, num_threads=n, **more)] for n in (1, 2, 5)]
    assert got[0] == got[1] == got[2]


def test_repeats(kernel):
    """Repeated calls give the same bits."""
    case = Case(700, 900, 64, nheads=4, nheads_k=2, causal=True, dtype="bfloat16")
    first = given(kernel, case, **dict.fromkeys(ALL, True))
    for _ in range(3):
        assert all(map(np.array_equal, given(kernel, case, **dict.fromkeys(ALL, True)), first))


def test_repeated_calls_without_them_do_not_serve_a_call_with_them(device):
    rng = np.random.default_rng(0)
    q, k, v = (device.array(x) for x in rng.standard_normal((3, 2, 9, 4, 8), dtype=np.float32))
    rows = [x.reshape(18, 4, 8) for x in (q, k, v)]
    cu = device.array(np.array([0, 9, 18], np.int32))
    for function, arrays in ((fa.flash_attn_func, (q, k, v)), (fa.flash_attn_varlen_func, (*rows, cu, cu, 9, 9))):
        for _ in range(3):
            out = function(*arrays)
        more = function(*arrays, return_max_score=True)
        assert len(more) == 2 and more[1].shape == (2, 4)
        assert np.array_equal(device.numpy(more[0]), device.numpy(out))
        assert np.array_equal(device.numpy(function(*arrays)), device.numpy(out))


def test_what_comes_back():
    """The call returns out, lse, max_score and key_sums in this order, and the given out itself. False asks for
    nothing."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 9, 4, 8), dtype=np.float32)
    out, lse = fa.flash_attn_func(q, k, v, return_lse=True)
    mine, score, sums = np.empty_like(out), reference.max_score(q, k, v), reference.key_sums(q, k, v)
    more = fa.flash_attn_func(q, k, v, **dict.fromkeys(ALL, True), out=mine)
    assert more[0] is mine
    for got, want in zip(more, (out, lse, score, sums), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    for asked, want in (("return_max_score", score), ("return_key_sums", sums)):
        _, got = fa.flash_attn_func(q, k, v, **{asked: True})
        np.testing.assert_allclose(got, want, atol=1e-5)
        assert isinstance(fa.flash_attn_func(q, k, v, **{asked: False}), np.ndarray)
        with pytest.raises(fa.BadArgument, match=f"{asked}=3 is neither True nor False"):
            fa.flash_attn_func(q, k, v, **{asked: 3})


def test_a_query_counts_the_workspace_of_key_sums():
    q = np.zeros((2, 100, 4, 8), np.float32)
    plain, more, with_lse = (
        fa.query(q, q, q, num_threads=1, **asked)
        for asked in ({}, {"return_key_sums": True}, {"return_key_sums": True, "return_lse": True})
    )
    rows = 2 * 100 * 4
    assert more.workspace_bytes >= with_lse.workspace_bytes + 4 * rows  # lse
    assert with_lse.workspace_bytes >= plain.workspace_bytes + 8 * rows  # the maximum and the sum of each row


def test_kernels_that_do_not_give_it_say_so(device):
    if device.name != "cuda":
        pytest.skip("every kernel of the CPU gives it")
    q, k = (device.array(np.zeros((1, n, 1, 64), np.float32), "bfloat16") for n in (1, 9000))
    plan = fa.query(q, k, k, return_max_score=True, kernel="decode_split_sm80")
    assert plan.status == "FA_UNSUPPORTED" and "max_score" in plan.error
    assert fa.query(q, k, k, return_max_score=True).status == "FA_OK"


@pytest.mark.parametrize("name", ["max_score", "key_sums"])
def test_a_cache_does_not_give_it(name):
    """In the C ABI the field exists, because fa_kvcache_args contains a whole fa_attention_args."""
    q, cache = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 9, 2, 8), np.float32)
    call, args, _, _ = kvcache._prepare_step(kvcache._Step(q, cache, cache))
    fields._put_tensor(args, "out", _arrays.view(np.empty_like(q), "out"))
    setattr(args, name, cache.ctypes.data)
    with pytest.raises(fa.Unsupported, match=f"{name} is set"):
        library.load().fa_kvcache_attention(call, None)


def test_parts_have_no_key_sums():
    q = np.zeros((4, 1, 8), np.float32)
    starts, parts = np.array([0, 4], np.int32), np.zeros(1, structs.PART_DTYPE)
    args, _ = _options._prepare(q, q, q, (starts, starts, 4, 4), _options.Options())
    fields._put_tensor(args, "out", _arrays.view(np.empty_like(q), "out"))
    args.parts, args.cu_seqlens_k, args.key_sums = parts.ctypes.data, None, q.ctypes.data
    with pytest.raises(fa.BadArgument, match="key_sums=0x[0-9a-f]+ with parts=0x"):
        library.load().fa_attention_forward(args, None)


def test_gradients_stay(device):
    """PyTorch's gradients through out and lse equal those of the call without max_score. max_score has no gradient."""
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

    out, lse, score, sums = fa.flash_attn_func(*arrays, **dict.fromkeys(ALL, True), **options)
    assert out.requires_grad and not score.requires_grad and not sums.requires_grad
    assert score.shape == (2, 4) and sums.shape == (2, 4, 33)
    for got, want in zip(
        gradients(out, lse), gradients(*fa.flash_attn_func(*arrays, return_lse=True, **options)), strict=True
    ):
        assert torch.equal(got, want)
    out, score = fa.flash_attn_func(*arrays, return_max_score=True)
    out.sum().backward()
    assert arrays[0].grad is not None
    with pytest.raises(fa.Unsupported, match="return_max_score is given"):
        torch.func.grad(lambda x: fa.flash_attn_func(x, k, v, return_max_score=True)[0].sum())(q)
