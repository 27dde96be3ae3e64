"""Bad input: every argument of every function is refused with its name and value, and the output is not changed."""

import re

import numpy as np
import pytest
from conftest import CPU

import flash_attn_minimal as fa

BATCH, SEQLEN, NHEADS, NHEADS_K, HEADDIM = 2, 5, 4, 2, 8


def arrays(device=CPU, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = [(BATCH, SEQLEN, heads, HEADDIM) for heads in (NHEADS, NHEADS_K, NHEADS_K)]
    return dict(
        zip("qkv", [device.array(rng.standard_normal(s, dtype=np.float32), dtype) for s in shapes], strict=True)
    )


def packed(device=CPU):
    starts = device.array(np.array([0, 5, 10], np.int32))
    flat = {name: x.reshape(10, *x.shape[2:]) for name, x in arrays(device).items()}
    return {**flat, "cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}


def refused(call, arguments, error, message, out_shape):
    out = np.full(out_shape, np.nan, np.float32)
    arguments.setdefault("out", out)
    with pytest.raises(error, match=message) as caught:
        call(**arguments)
    assert isinstance(caught.value, fa.FlashAttnError)
    assert np.isnan(out).all(), "an error touched the output"


f32 = np.float32
zeros = np.zeros
unaligned = (
    np.frombuffer(bytearray(4 * BATCH * SEQLEN * NHEADS * HEADDIM + 1), np.uint8)[1:]
    .view(f32)
    .reshape(BATCH, SEQLEN, NHEADS, HEADDIM)
)
read_only = zeros((BATCH, SEQLEN, NHEADS, HEADDIM), f32)
read_only.flags.writeable = False

# (argument, bad value, error, what the message says). Quoted: the argument's name and value.
BAD = [
    ("q", [1.0], fa.BadArgument, r"q is a list: expected an array"),
    ("q", None, fa.BadArgument, r"q is None"),
    (
        "q",
        zeros((5, 4, 8), f32),
        fa.BadArgument,
        r"q has shape \(5, 4, 8\): expected \(batch, seqlen, nheads, headdim\)",
    ),
    ("q", zeros((2, 5, 4, 8), np.float64), fa.BadArgument, "q is float64, k is float32"),
    (
        "q",
        zeros((2, 5, 4, 8), np.float16),
        fa.BadArgument,
        "q is float16, k is float32, v is float32: they must be the same",
    ),
    ("q", zeros((2, 5, 4, 8), ">f4"), fa.BadArgument, "q has dtype '>f4': its byte order"),
    (
        "q",
        zeros((2, 5, 4, 16), f32)[..., ::2],
        fa.BadArgument,
        "q has stride 2 along its last axis: it must be contiguous",
    ),
    ("q", zeros((2, 5, 8, 4), f32).swapaxes(2, 3), fa.BadArgument, "q has stride 4 along its last axis"),
    ("q", np.ma.masked_array(zeros((2, 5, 4, 8), f32)), fa.BadArgument, "q is a masked array"),
    ("q", unaligned, fa.BadArgument, "q is not aligned to its element size of 4 bytes"),
    ("q", zeros((2, 5, 3, 8), f32), fa.BadArgument, "nheads=3 is not a multiple of nheads_k=2"),
    ("q", zeros((2, 5, 0, 8), f32), fa.BadArgument, "nheads=0 is below 1"),
    ("k", zeros((2, 5, 8), f32), fa.BadArgument, r"k has shape \(2, 5, 8\): expected"),
    (
        "k",
        zeros((1, 5, 2, 8), f32),
        fa.BadArgument,
        r"k has shape \(1, 5, 2, 8\), but q has \(2, 5, 4, 8\): batch and headdim must agree",
    ),
    ("k", zeros((2, 5, 2, 9), f32), fa.BadArgument, r"k has shape \(2, 5, 2, 9\), but q has"),
    ("k", zeros((2, 6, 2, 8), f32), fa.BadArgument, r"v has shape \(2, 5, 2, 8\), but k has \(2, 6, 2, 8\)"),
    ("k", zeros((2, 5, 2, 8), np.float16), fa.BadArgument, "q is float32, k is float16"),
    ("k", zeros((2, 5, 2, 16), f32)[..., ::2], fa.BadArgument, "k has stride 2 along its last axis"),
    ("k", "k", fa.BadArgument, r"k='k' is a str"),
    ("v", zeros((2, 5, 1, 8), f32), fa.BadArgument, r"v has shape \(2, 5, 1, 8\), but k has \(2, 5, 2, 8\)"),
    ("v", zeros((2, 4, 2, 8), f32), fa.BadArgument, r"v has shape \(2, 4, 2, 8\), but k has"),
    ("v", zeros((2, 5, 2, 8), np.int32), fa.BadArgument, "v is int32: they must be the same"),
    ("v", zeros((2, 5, 2, 16), f32)[..., ::2], fa.BadArgument, "v has stride 2 along its last axis"),
    ("v", zeros((2, 5, 2, 0), f32), fa.BadArgument, "headdim_v=0 is outside 1 .. 512"),
    ("v", zeros((2, 5, 2, 513), f32), fa.BadArgument, "headdim_v=513 is outside 1 .. 512"),
    ("dropout_p", -0.1, fa.BadArgument, "dropout_p=-0.1 is outside 0 <= p < 1"),
    ("dropout_p", 1.0, fa.BadArgument, "dropout_p=1 is outside"),
    ("dropout_p", float("nan"), fa.BadArgument, "dropout_p=-?nan is outside"),
    ("dropout_p", "half", fa.BadArgument, "dropout_p='half' is not a number"),
    ("dropout_seed", -1, fa.BadArgument, "dropout_seed=-1 is outside 0 .."),
    ("dropout_seed", 2**64, fa.BadArgument, "dropout_seed=18446744073709551616 is outside"),
    ("dropout_seed", 1.5, fa.BadArgument, "dropout_seed=1.5 is not an integer"),
    ("dropout_offset", -1, fa.BadArgument, "dropout_offset=-1 is outside"),
    ("dropout_offset", "x", fa.BadArgument, "dropout_offset='x' is not an integer"),
    ("softmax_scale", float("nan"), fa.BadArgument, "softmax_scale=-?nan is not finite"),
    ("softmax_scale", float("inf"), fa.BadArgument, "softmax_scale=inf is not finite"),
    ("softmax_scale", 1e300, fa.BadArgument, r"softmax_scale=1e\+300 is beyond the numbers of a float32"),
    ("softmax_scale", "big", fa.BadArgument, "softmax_scale='big' is not a number"),
    ("causal", "yes", fa.BadArgument, "causal='yes' is neither True nor False"),
    ("causal", 2, fa.BadArgument, "causal=2 is neither True nor False"),
    ("window_size", 3, fa.BadArgument, r"window_size=3 is not a pair \(left, right\) of integers, .*pass \(3, 0\)"),
    ("window_size", (1, 2, 3), fa.BadArgument, r"window_size=\(1, 2, 3\) is not a pair"),
    ("window_size", (-2, 0), fa.BadArgument, r"window_size\[0\]=-2 is below -1"),
    ("window_size", (0, -5), fa.BadArgument, r"window_size\[1\]=-5 is below -1"),
    ("window_size", (0.5, 0), fa.BadArgument, r"window_size\[0\]=0.5 is not an integer"),
    ("window_size", (0, 2**63), fa.BadArgument, r"window_size\[1\]=9223372036854775808 is outside"),
    ("softcap", -1.0, fa.BadArgument, "softcap=-1 is not a finite number >= 0"),
    ("softcap", float("nan"), fa.BadArgument, "softcap=-?nan is not a finite number"),
    ("softcap", [], fa.BadArgument, r"softcap=\[\] is not a number"),
    ("alibi_slopes", zeros(3, f32), fa.BadArgument, r"alibi_slopes has shape \(3,\): expected \(4,\) or \(2, 4\)"),
    ("alibi_slopes", zeros((1, 4), f32), fa.BadArgument, r"alibi_slopes has shape \(1, 4\)"),
    ("alibi_slopes", zeros(4), fa.BadArgument, "alibi_slopes is float64: expected float32"),
    ("alibi_slopes", zeros(8, f32)[::2], fa.BadArgument, "alibi_slopes has stride 2 along its last axis"),
    ("alibi_slopes", 0.5, fa.BadArgument, r"alibi_slopes=0.5 is a float"),
    ("deterministic", 3, fa.BadArgument, "deterministic=3 is neither True nor False"),
    ("return_lse", "no", fa.BadArgument, "return_lse='no' is neither True nor False"),
    ("return_key_sums", "x", fa.BadArgument, "return_key_sums='x' is neither True nor False"),
    ("return_max_score", 2, fa.BadArgument, "return_max_score=2 is neither True nor False"),
    (
        "bias",
        zeros((2, 4, 5, 6), f32),
        fa.BadArgument,
        r"bias has shape \(2, 4, 5, 6\), which does not broadcast to .* = \(2, 4, 5, 5\)",
    ),
    ("bias", zeros((3, 1, 5, 5), f32), fa.BadArgument, "bias has shape .* does not broadcast"),
    ("bias", zeros((1, 2, 4, 5, 5), f32), fa.BadArgument, "bias has shape .* does not broadcast"),
    ("bias", np.array(1, f32), fa.BadArgument, r"bias has shape \(\), which does not broadcast"),
    ("bias", zeros((5, 5), np.float16), fa.BadArgument, "bias is float16: expected float32"),
    ("mask", zeros((5, 5), f32), fa.BadArgument, "mask is float32: expected bool or uint8"),
    ("mask", zeros((5, 6), bool), fa.BadArgument, r"mask has shape \(5, 6\), which does not broadcast"),
    ("sinks", zeros(2, f32), fa.BadArgument, r"sinks has shape \(2,\): expected \(4,\)"),
    ("sinks", zeros(4), fa.BadArgument, "sinks is float64: expected float32"),
    ("sinks", zeros(8, f32)[::2], fa.BadArgument, "sinks has stride 2"),
    ("top_left", None, fa.BadArgument, "top_left=None is neither True nor False"),
    ("kernel", "nonesuch", fa.BadArgument, "kernel=nonesuch is not a kernel of this build"),
    ("kernel", 3, fa.BadArgument, "kernel=3 is not the name of a kernel"),
    ("allow_tf32", "x", fa.BadArgument, "allow_tf32='x' is neither True nor False"),
    ("num_threads", -1, fa.BadArgument, "num_threads=-1 is outside 0 .. 4096"),
    ("num_threads", 5000, fa.BadArgument, "num_threads=5000 is outside"),
    ("num_threads", 2**31, fa.BadArgument, "num_threads=2147483648 is outside"),
    ("num_threads", 1.5, fa.BadArgument, "num_threads=1.5 is not an integer"),
    (
        "out",
        zeros((2, 5, 4, 9), f32),
        fa.BadArgument,
        r"out is float32 \(2, 5, 4, 9\): expected float32 \(2, 5, 4, 8\)",
    ),
    ("out", zeros((2, 5, 4, 8), np.float16), fa.BadArgument, "out is float16"),
    ("out", read_only, fa.BadArgument, "out is a read-only NumPy array"),
    ("out", zeros((2, 5, 4, 16), f32)[..., ::2], fa.BadArgument, "out has stride 2 along its last axis"),
    (
        "out",
        np.lib.stride_tricks.as_strided(zeros(8, f32), (2, 5, 4, 8), (0, 0, 0, 4)),
        fa.BadArgument,
        "out.batch_stride=0 with batch=2",
    ),
    ("out", [], fa.BadArgument, r"out is a list"),
]
IDS = [f"{name}-{i}" for i, (name, *_) in enumerate(BAD)]


@pytest.mark.parametrize("name,value,error,message", BAD, ids=IDS)
def test_flash_attn_func(name, value, error, message):
    arguments = arrays() | {name: value}
    if name.startswith("dropout_"):
        arguments = {"dropout_p": 0.5, "dropout_seed": 1} | arguments
    v = arguments["v"]
    wide = v.shape[-1] if isinstance(v, np.ndarray) and v.ndim == 4 else HEADDIM
    heads = arguments["q"].shape[-2] if isinstance(arguments["q"], np.ndarray) else NHEADS
    refused(fa.flash_attn_func, arguments, error, message, (BATCH, SEQLEN, heads, wide))
    arguments.pop("out", None)
    if name == "out":
        arguments["out"] = value
    if error is fa.BadArgument and not message.startswith(("out.", r"return_lse")):
        try:
            plan = fa.query(**arguments)  # the query says the same: it raises or reports
        except fa.BadArgument as said:
            plan = fa.Plan("FA_BAD_ARGUMENT", str(said), "", 0, {})
        assert plan.status == "FA_BAD_ARGUMENT" and re.search(message, plan.error)


@pytest.mark.parametrize("headdim", [0, 513])
def test_headdim(headdim):
    q = zeros((1, 3, 2, headdim), f32)
    message = "headdim_v=0" if headdim == 0 else "headdim=513 is outside 1 .. 512"
    refused(fa.flash_attn_func, {"q": q, "k": q, "v": q}, fa.BadArgument, message, (1, 3, 2, headdim))
    v = zeros((1, 3, 2, 8), f32)
    refused(
        fa.flash_attn_func,
        {"q": q, "k": q, "v": v},
        fa.BadArgument,
        f"headdim={headdim} is outside 1 .. 512",
        (1, 3, 2, 8),
    )


@pytest.mark.parametrize("dtype", ["complex64", "int32", "int8", "uint8", "bool", "float64"])
def test_dtypes(dtype):
    q = zeros((1, 3, 2, 8), dtype)
    refused(
        fa.flash_attn_func,
        {"q": q, "k": q, "v": q},
        fa.BadArgument,
        f"q is {dtype}: expected float32, float16 or bfloat16",
        (1, 3, 2, 8),
    )


def test_dropout_without_a_seed():
    refused(
        fa.flash_attn_func,
        arrays() | {"dropout_p": 0.5},
        fa.BadArgument,
        "dropout_p=0.5 without dropout_seed",
        (2, 5, 4, 8),
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_over_an_input(name):
    x = zeros((1, 3, 2, 8), f32)
    given = {"q": x.copy(), "k": x.copy(), "v": x.copy()}
    with pytest.raises(fa.BadArgument, match=f"out starts at the same address as {name}"):
        fa.flash_attn_func(**given, out=given[name])


def test_wrong_keyword():
    with pytest.raises(TypeError, match="scale"):
        fa.flash_attn_func(**arrays(), scale=1.0)
    with pytest.raises(TypeError, match="scale"):
        fa.query(**arrays(), scale=1.0)


i32 = np.int32
BAD_VARLEN = [
    ("q", zeros((1, 10, 4, 8), f32), r"q has shape \(1, 10, 4, 8\): expected \(total, nheads, headdim\)"),
    ("k", zeros((10, 2, 9), f32), r"k has shape \(10, 2, 9\), but q has \(10, 4, 8\): headdim must agree"),
    ("v", zeros((9, 2, 8), f32), r"v has shape \(9, 2, 8\), but k has \(10, 2, 8\)"),
    ("cu_seqlens_q", [0, 5, 10], r"cu_seqlens_q is a list"),
    ("cu_seqlens_q", None, r"cu_seqlens_q is None"),
    ("cu_seqlens_q", np.array([0, 5, 10], np.int64), "cu_seqlens_q is int64: expected int32"),
    ("cu_seqlens_q", np.array([[0, 5, 10]], i32), r"cu_seqlens_q has shape \(1, 3\): expected \(batch \+ 1,\)"),
    ("cu_seqlens_q", np.array([], i32), r"cu_seqlens_q has shape \(0,\)"),
    ("cu_seqlens_q", np.array([0, 0, 5, 0, 10, 0], i32)[::2], "cu_seqlens_q has stride 2"),
    ("cu_seqlens_q", np.array([1, 5, 10], i32), r"cu_seqlens_q\[0\]=1 is not 0"),
    ("cu_seqlens_q", np.array([0, 5, 3], i32), r"cu_seqlens_q\[2\]=3 is below cu_seqlens_q\[1\]=5"),
    ("cu_seqlens_q", np.array([0, 6, 10], i32), "cu_seqlens_q: sequence 0 has 6 rows, more than max_seqlen_q=5"),
    ("cu_seqlens_q", np.array([0, 5, 10, 15], i32), "cu_seqlens_k has 3 entries, but cu_seqlens_q has 4"),
    ("cu_seqlens_k", np.array([0, 4, 2], i32), r"cu_seqlens_k\[2\]=2 is below"),
    ("cu_seqlens_k", np.array([0, 0, 9], i32), "cu_seqlens_k: sequence 1 has 9 rows, more than max_seqlen_k=5"),
    ("cu_seqlens_k", np.array([0, 5, 10], np.uint8), "cu_seqlens_k is uint8: expected int32"),
    ("max_seqlen_q", -1, "max_seqlen_q=-1 is outside"),
    ("max_seqlen_q", 2.5, "max_seqlen_q=2.5 is not an integer"),
    ("max_seqlen_k", None, "max_seqlen_k=None is not an integer"),
    ("max_seqlen_k", 4, "cu_seqlens_k: sequence 0 has 5 rows, more than max_seqlen_k=4"),
    ("alibi_slopes", zeros((3, 4), f32), r"alibi_slopes has shape \(3, 4\): expected \(4,\) or \(2, 4\)"),
    (
        "bias",
        zeros((2, 4, 10, 10), f32),
        r"bias has shape \(2, 4, 10, 10\), which does not broadcast to .* = \(2, 4, 5, 5\)",
    ),
    ("mask", zeros((3, 1, 5, 5), bool), "mask has shape .* does not broadcast"),
    ("out", zeros((10, 4, 9), f32), r"out is float32 \(10, 4, 9\): expected float32 \(10, 4, 8\)"),
]


@pytest.mark.parametrize(
    "name,value,message", BAD_VARLEN, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD_VARLEN)]
)
def test_flash_attn_varlen_func(name, value, message):
    refused(fa.flash_attn_varlen_func, packed() | {name: value}, fa.BadArgument, message, (10, 4, 8))


def test_cu_seqlens_beyond_the_rows():
    arguments = packed() | {"cu_seqlens_q": np.array([0, 5, 11], i32), "max_seqlen_q": 6}
    refused(
        fa.flash_attn_varlen_func,
        arguments,
        fa.BadArgument,
        r"cu_seqlens_q\[2\]=11 is above the 10 rows there are",
        (10, 4, 8),
    )


def test_huge_lengths_are_refused():
    arguments = packed() | {"max_seqlen_q": 2**40}
    refused(fa.flash_attn_varlen_func, arguments, fa.Unsupported, "^max_seqlen_q=1099511627776 is above", (10, 4, 8))


OUT, LSE = zeros((2, 5, 4, 8), f32), zeros((2, 4, 5), f32)
BAD_MERGE = [
    ("out_a", OUT[0, 0], fa.BadArgument, r"out_a has shape \(4, 8\): expected"),
    ("out_a", OUT.astype(np.float64), fa.BadArgument, "out_a is float64: expected float32, float16 or bfloat16"),
    ("out_a", 1, fa.BadArgument, r"out_a=1 is an int"),
    ("out_a", zeros((2, 5, 4, 16), f32)[..., ::2], fa.BadArgument, "out_a has stride 2"),
    ("out_b", OUT[:1], fa.BadArgument, r"out_b is float32 \(1, 5, 4, 8\), but out_a is float32 \(2, 5, 4, 8\)"),
    ("out_b", OUT.astype(np.float16), fa.BadArgument, "out_b is float16"),
    ("out_b", zeros((2, 5, 4, 16), f32)[..., ::2], fa.BadArgument, "out_b has stride 2"),
    ("lse_a", LSE[:1], fa.BadArgument, r"lse_a is float32 \(1, 4, 5\): expected float32 \(2, 4, 5\)"),
    ("lse_a", LSE.astype(np.float64), fa.BadArgument, "lse_a is float64"),
    ("lse_a", zeros((2, 5, 4), f32).swapaxes(1, 2), fa.BadArgument, "lse_a has strides .* it must be contiguous"),
    ("lse_b", zeros((2, 5, 4), f32), fa.BadArgument, r"lse_b is float32 \(2, 5, 4\): expected float32 \(2, 4, 5\)"),
    ("lse_b", None, fa.BadArgument, r"lse_b is None"),
]


@pytest.mark.parametrize(
    "name,value,error,message", BAD_MERGE, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(BAD_MERGE)]
)
def test_merge(name, value, error, message):
    arguments = {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE} | {name: value}
    with pytest.raises(error, match=message):
        fa.merge(**arguments)


def test_merge_headdim():
    big = zeros((1, 3, 2, 513), f32)
    with pytest.raises(fa.BadArgument, match="headdim_v=513 is outside 1 .. 512"):
        fa.merge(big, zeros((1, 2, 3), f32), big, zeros((1, 2, 3), f32))


def test_forced_kernel_of_another_device(device):
    other = [kernel["name"] for kernel in fa.kernels() if kernel["device"] != device.name]
    if not other:
        pytest.skip("this build has one device only")
    with pytest.raises(fa.Unsupported, match=f"kernel={other[0]} runs on"):
        fa.flash_attn_func(**arrays(device), kernel=other[0])


def test_every_exception_is_also_a_builtin_one():
    tree = {
        fa.BadArgument: ValueError,
        fa.Unsupported: NotImplementedError,
        fa.WorkspaceTooSmall: ValueError,
        fa.CudaError: RuntimeError,
        fa.OutOfMemory: MemoryError,
        fa.RankLost: RuntimeError,
        fa.LibraryNotFound: ImportError,
    }
    for error, builtin in tree.items():
        assert issubclass(error, fa.FlashAttnError) and issubclass(error, builtin)


def test_queries_need_all_four_lengths():
    arguments = packed() | {"max_seqlen_k": None}
    with pytest.raises(fa.BadArgument, match="max_seqlen_k is None"):
        fa.query(**arguments)
