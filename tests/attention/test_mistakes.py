"""Calls with the mistakes of newcomers, and the errors they get: the argument, its value, what is expected, and often
what to pass instead. Where an error advises an argument, the test passes it, until the call works."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import flash_attn_minimal as fa
from flash_attn_minimal import distributed
from flash_attn_minimal._core import error_texts, library, structs
from flash_attn_minimal.transformer import ops, quantized

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
try:
    import torch
except ImportError:
    torch = None

BATCH, ROWS, KEYS, HEADS, HEADS_K, DIM = 2, 5, 7, 4, 2, 8
f4, i4 = np.float32, np.int32
ones, zeros = np.ones, np.zeros


def draw(*shape):
    return np.random.default_rng(0).standard_normal(shape, dtype=f4)


Q, K = draw(BATCH, ROWS, HEADS, DIM), draw(BATCH, KEYS, HEADS_K, DIM)
V = draw(BATCH, KEYS, HEADS_K, DIM)[::-1].copy()
OUT, LSE = fa.flash_attn_func(Q, K, V, return_lse=True)
PACKED = {"q": Q.reshape(-1, HEADS, DIM), "k": K.reshape(-1, HEADS_K, DIM), "v": V.reshape(-1, HEADS_K, DIM)}
PACKED |= {"cu_seqlens_q": np.array([0, 5, 10], i4), "cu_seqlens_k": np.array([0, 7, 14], i4)}
PACKED |= {"max_seqlen_q": ROWS, "max_seqlen_k": KEYS}
CACHE = zeros((BATCH, 64, HEADS_K, DIM), f4)
STEP = {"q": Q[:, :1], "k": K[:, :1], "v": V[:, :1], "k_cache": CACHE, "v_cache": CACHE.copy(), "cache_seqlens": 3}
PAGES = {**STEP, "k_cache": zeros((16, 16, HEADS_K, DIM), f4), "v_cache": zeros((16, 16, HEADS_K, DIM), f4)}
PAGES |= {"block_table": np.arange(8, dtype=i4).reshape(2, 4), "cache_seqlens": np.array([3, 4], i4)}
TABLE = ones((64, DIM // 2), f4)
GOOD = {
    "func": (fa.flash_attn_func, {"q": Q, "k": K, "v": V}),
    "varlen": (fa.flash_attn_varlen_func, PACKED),
    "cache": (fa.flash_attn_with_kvcache, STEP),
    "pages": (fa.flash_attn_with_kvcache, PAGES),
    "backward": (fa.backward, {"dout": OUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE}),
    "merge": (fa.merge, {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE}),
    "fp8": (fa.quantize_fp8, {"x": Q}),
    "cache8": (fa.quantize_kvcache, {"k_cache": CACHE, "v_cache": CACHE, "dtype": "int8"}),
    "norm": (ops.rms_norm, {"x": draw(3, 16), "weight": ones(16, f4)}),
    "rope": (ops.rope, {"x": Q, "cos": TABLE, "sin": TABLE}),
    "linear": (ops.linear, {"x": draw(3, 16), "weight": draw(8, 16)}),
    "sample": (ops.sample, {"logits": draw(3, 16)}),
}
flip = {"q": Q.swapaxes(1, 2), "k": K.swapaxes(1, 2), "v": V.swapaxes(1, 2)}
flat = {"q": Q.reshape(BATCH, ROWS, -1), "k": K.reshape(BATCH, KEYS, -1), "v": V.reshape(BATCH, KEYS, -1)}
one = {"q": Q[0], "k": K[0], "v": V[0]}
new_q = Q[:, :1].swapaxes(1, 2)
upright = {"k_cache": CACHE.swapaxes(1, 2), "v_cache": CACHE.copy().swapaxes(1, 2)}
byte = CACHE.astype(np.int8)
PADDING = np.tri(BATCH, KEYS, 3, dtype=bool)

# (function, wrong arguments, what the text says). Advice that is followed is in FOLLOWED.
TOLD = [
    ("func", {"q": draw(BATCH, ROWS, 3, DIM)}, r"nheads=3 is not a multiple of nheads_k=2$"),
    ("func", {"q": draw(BATCH, ROWS, 3, HEADS, DIM)}, r"q has shape \(2, 5, 3, 4, 8\): .*; pass q\[:, :, 0\]|$"),
    ("func", {"k": None}, "k is None: expected an array of NumPy, PyTorch"),
    ("func", {"q": 3.0}, r"q=3\.0 is a float: expected an array[^;]*$"),
    ("func", {"q": "q"}, r"q='q' is a str: expected an array"),
    ("func", {"mask": True}, r"mask=True is a bool: expected an array"),
    ("func", {"sinks": 0.5}, r"sinks=0\.5 is a float: expected an array[^;]*$"),
    ("func", {"q": Q.astype(np.complex64), "k": K, "v": V}, "q is complex64, k is float32, .* must be the same$"),
    ("func", {name: x.astype(np.complex64) for name, x in one.items()}, r"q has shape \(5, 4, 8\)"),
    ("func", {"bias": ones((12, 12), f4)}, r"bias has shape \(12, 12\), which does not broadcast to [^;]*$"),
    ("func", {"bias": ones((ROWS, KEYS), bool)}, "bias is bool: expected float32; .* pass mask=bias"),
    ("func", {"window_size": 128}, r"window_size=128 is not a pair .* for the last 128 keys pass \(128, 0\)"),
    ("func", {"window_size": None}, r"window_size=None is not a pair \(left, right\) of integers, -1 for an open end$"),
    ("func", {"window_size": (None, 0)}, r"window_size\[0\]=None is not an integer: -1 is an open end"),
    ("func", {"window_size": (-5, 0)}, r"window_size\[0\]=-5 is below -1 \(open\)"),
    ("func", {"window_size": (0, -5)}, r"window_size\[1\]=-5 is below -1 \(open\)"),
    ("func", {"dropout_p": True}, "dropout_p=True is not a number; .* such as causal=True"),
    ("func", {"softcap": None}, "softcap=None is not a number; leave it out for its default"),
    ("func", {"num_threads": None}, "num_threads=None is not an integer; leave it out for its default"),
    ("func", {"kernel": "window_left"}, "kernel=window_left is not a kernel of this build"),
    ("func", {"kernel": "flash3"}, "kernel=flash3 is not a kernel of this build, whose kernels for the CPU are cpu_"),
    ("func", {"out_dtype": "bf16"}, "out_dtype='bf16' is not one of 'float32', 'float16', 'bfloat16'"),
    ("func", {"out_dtype": float}, "out_dtype=<class 'float'> is not one of 'float32'"),
    ("func", {"out_dtype": np.float16}, "out_dtype=float16, but q, k and v are float32: only those of float8_e4m3fn"),
    ("func", {"fast_accum": True}, "fast_accum=True, but only q, k and v of float8_e4m3fn have sums"),
    ("func", {"q_descale": ones((2, 4), f4)}, "q_descale is given, but only q, k and v of float8_e4m3fn have factors"),
    ("varlen", {"cu_seqlens_q": np.array([5, 5], i4), "cu_seqlens_k": np.array([7, 7], i4)},
     r"cu_seqlens_q\[0\]=5 is not 0: expected cumulative lengths from 0 on, such as \[0, 3, 8\]"),
    ("varlen", {"max_seqlen_q": 4}, "cu_seqlens_q: sequence 0 has 5 rows, more than max_seqlen_q=4"),
    ("varlen", {"max_seqlen_k": 2**40}, r"max_seqlen_k=1099511627776 is above"),
    ("varlen", {"mask": ones((10, 14), bool)}, r"to \(batch, nheads, max_seqlen_q, max_seqlen_k\) = \(2, 4, 5, 7\)$"),
    ("varlen", {"window_size": (-7, 0)}, r"window_size\[0\]=-7 is below -1"),
    ("cache", {"cache_seqlens": 3.0}, r"cache_seqlens=3\.0 is neither an integer nor an array of int32"),
    ("cache", {"cache_seqlens": True}, "cache_seqlens=True is neither an integer nor an array of int32"),
    ("cache", {"k_cache": None}, "k_cache is None: expected an array"),
    ("cache", {"k_cache": K[:, :1], "v_cache": V[:, :1], "k": CACHE, "v": CACHE},
     "64 new keys are more than the 1 keys .*; the order of arguments is q, k_cache, v_cache, k, v"),
    ("cache", {"k_cache": K[:, :1], "v_cache": V[:, :1], "k": CACHE, "v": CACHE, "cache_seqlens": None},
     "seqlen_new=64 is above the 1 keys of a cache entry: the order of arguments is q, k_cache, v_cache, k, v"),
    ("cache", {"k_cache": byte, "v_cache": byte.copy()}, "k_scale is None: .* k_scale and v_scale; quantize_kv"),
    ("cache", {"k_scale": ones(2, f4)}, "k_scale is given, but only an 8-bit cache has factors"),
    ("cache", {"rotary_cos": TABLE[:2], "rotary_sin": TABLE[:2]}, r"rotary_cos has 2 rows, .* needs rows 3 \.\. 3"),
    ("cache", {"k": CACHE[:, :1], "v": CACHE[:, 3:4]}, r"k_cache\.data=.* overlaps k\.data="),
    ("cache", {"tree_mask": ones((BATCH, 1), np.uint64), "window_size": (4, 0)}, r"window_size=\(4, 0\) with"),
    ("cache", {"tree_mask": ones((BATCH, 1), np.uint64), "causal": True}, "causal=True with tree"),
    ("cache", {"tree_mask": ones((BATCH, 1), bool)}, "tree_mask is bool: expected uint64 or int64: a word"),
    ("cache", {"k_cache": CACHE[:1], "v_cache": CACHE[:1].copy()}, "k_cache has 1 entries, fewer than batch=2"),
    ("backward", {"lse": LSE.swapaxes(1, 2)}, r"lse has shape \(2, 5, 4\): expected .*, \(batch, nheads, seqlen_q\)"),
    ("merge", {"lse_a": LSE.swapaxes(1, 2)}, r"lse_a is float32 \(2, 5, 4\): expected .*, \(batch, nheads, seqlen\)"),
    ("fp8", {"x": draw(1, 2, 1, 80), "hadamard": True}, "headdim=80 with hadamard=True: it must be a power of two"),
    ("cache8", {"dtype": "fp8"}, "dtype='fp8' is not one of 'float8_e4m3fn', 'int8'"),
    ("rope", {"positions": 5}, r"positions=5 is an int: expected an array[^;]*$"),
    ("rope", {"cos": TABLE[:3], "sin": TABLE[:3]}, "seqlen=5 goes beyond the 3 rows of cos and sin"),
    ("linear", {"kernel": "gemm"}, "kernel=gemm is not a kernel of this build, whose kernels for the CPU are cpu"),
]  # fmt: skip

# (function, wrong arguments, the arguments as they are meant, which advice of a text that has several)
FOLLOWED = [
    ("func", flip, None, 0),
    ("func", flat, None, 0),
    ("func", one, {name: x[None] for name, x in one.items()}, -1),
    ("func", {"q": Q.tolist()}, None, 0),
    ("func", {"k": K.tolist()}, None, 0),
    ("func", {"q": Q.astype(float), "k": K.astype(float), "v": V.astype(float)}, None, 0),
    ("func", {"v": V.astype(float)}, None, 0),
    ("func", {"q": np.repeat(Q, 2, -1)[..., ::2]}, None, 0),
    ("func", {"mask": PADDING}, {"mask": PADDING[:, None, None]}, 0),
    ("func", {"mask": PADDING.astype(int)}, {"mask": PADDING[:, None, None]}, 0),
    ("func", {"mask": ones((BATCH, 1, KEYS), bool)}, {}, 0),
    ("func", {"mask": ones((BATCH, ROWS, KEYS), f4)}, {}, 0),
    ("func", {"mask": [[True] * KEYS] * ROWS}, {}, 0),
    ("func", {"bias": ones((BATCH, ROWS, KEYS), f4)}, {}, 0),
    ("func", {"bias": ones(HEADS, f4)}, {}, 0),
    ("func", {"bias": np.tri(KEYS, ROWS, dtype=f4)}, {"bias": np.tri(KEYS, ROWS, dtype=f4).T}, 0),
    ("func", {"bias": np.tri(ROWS, 12, 3, dtype=f4)}, {"bias": np.tri(ROWS, KEYS, 3, dtype=f4)}, 0),
    ("func", {"bias": ones((ROWS, KEYS))}, {}, 0),
    ("func", {"sinks": [0.5] * HEADS}, {"sinks": np.full(HEADS, 0.5, f4)}, 0),
    ("func", {"alibi_slopes": ones((HEADS, 1, 1), f4)}, {"alibi_slopes": ones(HEADS, f4)}, 0),
    ("func", {"num_threads": 2.0}, {}, 0),
    ("varlen", {"q": Q, "k": K, "v": V}, None, 0),
    ("varlen", {name: PACKED[name][None] for name in "qkv"}, None, 0),
    ("varlen", {name: PACKED[name].reshape(len(PACKED[name]), -1) for name in "qkv"}, None, 0),
    ("varlen", {"cu_seqlens_q": [0, 5, 10], "cu_seqlens_k": np.array([0, 7, 14])}, None, 0),
    ("varlen", {"max_seqlen_q": 5.0, "max_seqlen_k": None}, None, 0),
    ("varlen", {"max_seqlen_q": np.array([5, 5])}, None, 0),
    ("cache", {"q": Q[:, 0], "k": K[:, 0], "v": V[:, 0]}, None, 0),
    ("cache", upright, None, 0),
    ("cache", {"cache_seqlens": [3, 3]}, None, 0),
    ("cache", {"cache_seqlens": np.array(3, i4)}, None, 0),
    ("cache", {"cache_seqlens": np.array([3, 3])}, None, 0),
    ("cache", {"k": K[:, :1].astype(float), "v": V[:, :1].astype(float)}, None, 0),
    ("pages", {"block_table": PAGES["block_table"].tolist()}, None, 0),
    ("pages", {"block_table": PAGES["block_table"].astype(f4)}, None, 0),
    ("backward", {"dout": np.broadcast_to(f4(1), OUT.shape)}, {"dout": ones(OUT.shape, f4)}, 0),
    ("fp8", {"x": Q.astype(float)}, None, 0),
    ("norm", {"weight": [1.0] * 16}, None, 0),
    ("norm", {"x": GOOD["norm"][1]["x"].astype(float)}, None, 0),
    ("rope", {"positions": np.array([3, 4])}, {"positions": np.array([3, 4], i4)}, 0),
    ("rope", {"positions": [3, 4]}, {"positions": np.array([3, 4], i4)}, 0),
    ("linear", {"weight": GOOD["linear"][1]["weight"].T.copy()}, None, 0),
    ("sample", {"logits": np.arange(48).reshape(3, 16)}, {"logits": np.arange(48, dtype=f4).reshape(3, 16)}, 0),
]  # fmt: skip
needs_ml_dtypes = {"fp8"}


def name_of(row):
    function, wrong, *_ = row
    return f"{function}-{'-'.join(wrong)}"


@pytest.mark.parametrize("function,wrong,text", TOLD, ids=map(name_of, TOLD))
def test_what_a_mistake_is_told(function, wrong, text):
    call, good = GOOD[function]
    if function in needs_ml_dtypes and ml_dtypes is None:
        pytest.skip("ml_dtypes is not installed")
    with pytest.raises((fa.BadArgument, fa.Unsupported), match=text):
        call(**{**good, **wrong})


def follow(call, arguments, choice, most=9):
    """The result of a call after its refusals have been followed."""
    for _ in range(most):
        try:
            return call(**arguments)
        except fa.BadArgument as refused:
            said = str(refused)
        words = re.findall(r"[;:] (?:(?:for|if|of) [^;]*?)?pass ([^;]+)", said)
        assert words, said
        value = eval(words[choice % len(words)].replace(" and ", ", "), {"np": np, **arguments, **SIZES})
        if isinstance(value, tuple):  # as many arrays as the text names
            names = re.findall(r"(\w+)\.swapaxes", words[0])
            arguments = arguments | dict(zip(names, value, strict=True))
        else:
            name = re.match(r"\w+", said)[0]
            if said.startswith("q is") and "they must be the same" in said:
                name = re.match(r"\w+", words[choice])[0]
            arguments = arguments | {name: value}
    raise AssertionError(f"refused {most} times: {said}")


SIZES = {"nheads": HEADS, "nheads_k": HEADS_K}


@pytest.mark.parametrize("function,wrong,meant,choice", FOLLOWED, ids=map(name_of, FOLLOWED))
def test_what_a_refusal_says_to_pass_is_right(function, wrong, meant, choice):
    call, good = GOOD[function]
    if function in needs_ml_dtypes and ml_dtypes is None:
        pytest.skip("ml_dtypes is not installed")
    with pytest.raises(fa.BadArgument):
        call(**{**good, **wrong})
    got = follow(call, {**good, **wrong}, choice)
    want = call(**{**good, **({} if meant is None else meant)})
    if meant == {}:  # what is meant leaves the result as it is, or is the argument in another form
        assert np.shape(got) == np.shape(want)
        return
    for x, y in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
        np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(ml_dtypes is None, reason="ml_dtypes is not installed")
def test_bits_are_viewed_not_cast():
    halves = [x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)]
    bits = [x.view(np.uint16) for x in halves]
    with pytest.raises(
        fa.BadArgument, match=r"q is uint16: .*; if it has the bits of bfloat16, pass q\.view\(ml_dtypes"
    ):
        fa.flash_attn_func(*bits)
    with pytest.raises(
        fa.BadArgument, match=r"k is uint16, .*; if it has the bits of bfloat16, pass k\.view\(ml_dtypes"
    ):
        fa.flash_attn_func(halves[0], bits[1], halves[2])
    with pytest.raises(fa.BadArgument, match=r"q is uint8: .*; if it has the bits of float8_e4m3fn, pass q\.view"):
        fa.flash_attn_func(*[np.zeros(x.shape, np.uint8) for x in (Q, K, V)])
    eights = [x.astype(ml_dtypes.float8_e4m3fn) for x in (Q, K, V)]
    with pytest.raises(
        fa.BadArgument, match="q_descale is None: .* need q_descale, k_descale and v_descale; .*quantize_fp8"
    ):
        fa.flash_attn_func(*eights)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_tensors_of_one_integer_are_integers():
    packed = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in PACKED.items()}
    want = fa.flash_attn_varlen_func(**packed)
    for most in (torch.tensor, lambda n: torch.tensor([n])):
        given = {"max_seqlen_q": most(ROWS), "max_seqlen_k": most(KEYS)}
        assert torch.equal(fa.flash_attn_varlen_func(**packed | given), want)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_an_error_of_a_tensor_class_is_not_about_dtypes():
    class Refusing(torch.Tensor):
        def new_empty(self, *_, **__):
            raise TypeError("this class makes no tensors")

    q, k, v = map(torch.from_numpy, (Q, K, V))
    with pytest.raises(TypeError, match="this class makes no tensors"):
        fa.flash_attn_func(q.as_subclass(Refusing), k, v)


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_what_pytorch_is_told():
    q, k, v = map(torch.from_numpy, (Q, K, V))
    wants = q.clone().requires_grad_()
    for first in (q, wants):
        with pytest.raises(fa.BadArgument, match=r"nheads=100 is not .* pass q.swapaxes\(1, 2\), k.swap.*, v.swap"):
            wide = first[:, :1, :1].expand(2, 4, 100, 8)
            fa.flash_attn_func(wide, torch.zeros(2, 2, 300, 8), torch.zeros(2, 2, 300, 8))
    with pytest.raises(
        fa.BadArgument, match=r"k is a numpy.ndarray, but q is a PyTorch tensor; pass torch.as_tensor\(k, d"
    ):
        fa.flash_attn_func(wants, K, V)
    with pytest.raises(fa.BadArgument, match=r"q is uint16: .*pass q\.view\(torch\.bfloat16\)"):
        fa.flash_attn_func(*[x.bfloat16().view(torch.uint16) for x in (q, k, v)])


def dtypes():
    yield "float16", np.float16, GOOD["norm"][1]
    yield "float16", np.dtype("float16"), GOOD["norm"][1]
    yield "float32", "float32", GOOD["norm"][1]
    if ml_dtypes:
        yield "bfloat16", ml_dtypes.bfloat16, GOOD["norm"][1]
        yield "bfloat16", np.dtype(ml_dtypes.bfloat16), GOOD["norm"][1]
    if torch:
        yield "bfloat16", torch.bfloat16, {name: torch.from_numpy(x) for name, x in GOOD["norm"][1].items()}
    try:
        import jax.numpy as jnp
    except ImportError:
        return
    arrays = {name: jnp.asarray(x) for name, x in GOOD["norm"][1].items()}
    yield "bfloat16", jnp.bfloat16, arrays
    yield "float16", jnp.dtype("float16"), arrays


def test_dtypes_of_every_framework_are_names():
    for name, dtype, arrays in dtypes():
        assert name in str(ops.rms_norm(**arrays, out_dtype=dtype).dtype), dtype
    k8, *_ = fa.quantize_kvcache(CACHE, CACHE, np.int8)
    assert k8.dtype == np.int8
    if torch:
        pair = [torch.zeros(2, 4, 2, 8)] * 2
        assert fa.quantize_kvcache(*pair, torch.float8_e4m3fn)[0].dtype == torch.float8_e4m3fn


def run(program, **environment):
    """The last line that a program prints in a fresh process."""
    names = {"FLASH_ATTN_LIBRARY": str(library.path()), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | names | environment, capture_output=True, text=True
    )
    return (done.stdout or done.stderr).strip().splitlines()[-1]


SAYS = """
import numpy as np, flash_attn_minimal as fa
from flash_attn_minimal.transformer import ops
x = np.ones((1, 2, 1, 8), np.float32)
said = []
for call in (
    lambda: ops.swiglu(x, out_dtype="bfloat16"),
    lambda: fa.flash_attn_func(x, x, x, out_dtype="bfloat16"),
    lambda: fa.quantize_fp8(x)[0],
    lambda: fa.quantize_kvcache(x, x)[0],
):
    try:
        said.append(str(call().dtype))
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(*said, sep=" | ")
"""


def test_dtypes_of_ml_dtypes():
    """They need not be imported; where the package is missing, the text says so."""
    needs = "Unsupported: NumPy needs the ml_dtypes package (pip install ml_dtypes) for {}".format
    said = run("import sys; sys.modules['ml_dtypes'] = None\n" + SAYS)
    assert said == " | ".join(map(needs, ["bfloat16"] * 2 + ["float8_e4m3fn"] * 2))
    if ml_dtypes is not None:
        other = (
            "Unsupported: out_dtype=bfloat16, but q, k and v are float32: only those of float8_e4m3fn have a result of"
        )
        assert re.match(rf"bfloat16 \| {other} [^|]*\| float8_e4m3fn \| float8_e4m3fn$", run(SAYS))


THREADED = [
    lambda: fa.flash_attn_func(Q, K, V),
    lambda: fa.merge(OUT, LSE, OUT, LSE),
    lambda: fa.flash_attn_with_kvcache(**STEP),
    lambda: fa.backward(OUT, Q, K, V, OUT, LSE),
    lambda: ops.rms_norm(**GOOD["norm"][1]),
    lambda: ops.linear(**GOOD["linear"][1]),
    lambda: ops.sample(**GOOD["sample"][1]),
    lambda: ops.rope(**GOOD["rope"][1]),
]


@pytest.mark.parametrize("value", ["two", "-1", "4097", "1.5", "2 threads", "4,2"])
def test_a_number_of_threads_that_is_none(monkeypatch, value):
    results = [call() for call in THREADED for _ in range(3)]  # the next one is a repeat
    monkeypatch.setenv("FLASH_ATTN_NUM_THREADS", value)
    for call in THREADED:
        with pytest.raises(
            fa.BadArgument, match=f"FLASH_ATTN_NUM_THREADS={value} is not a number of threads: expected"
        ):
            call()
    assert fa.query(Q, K, V).status == "FA_BAD_ARGUMENT"
    assert fa.flash_attn_func(Q, K, V, num_threads=2).shape == Q.shape  # the argument goes before the variable
    for usual in ("", "0", "1", "4096"):
        monkeypatch.setenv("FLASH_ATTN_NUM_THREADS", usual)
        for got, want in zip([call() for call in THREADED], results[::3], strict=True):
            for x, y in zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]:
                np.testing.assert_array_equal(x, y)


def test_a_program_s_texts_are_python_s_too():
    """The capability query, its reasons, and a repeat of a call say what the call says."""
    assert fa.query(Q, K, V, window_size=(-5, 0)).error == "window_size[0]=-5 is below -1 (open)"
    assert fa.query(**PACKED, window_size=(0, -5)).error == "window_size[1]=-5 is below -1 (open)"
    cu = PACKED["cu_seqlens_q"].copy()
    for _ in range(3):
        fa.flash_attn_varlen_func(**PACKED | {"cu_seqlens_q": cu})
    cu[1] = 6
    with pytest.raises(fa.BadArgument, match="^cu_seqlens_q: sequence 0 has 6 rows, more than max_seqlen_q=5$"):
        fa.flash_attn_varlen_func(**PACKED | {"cu_seqlens_q": cu})
    lengths = np.array([3, 4], i4)
    for _ in range(3):
        fa.flash_attn_with_kvcache(**STEP | {"cache_seqlens": lengths, "rotary_cos": TABLE, "rotary_sin": TABLE})
    lengths[1] = 64
    with pytest.raises(fa.BadArgument, match=r"cache_seqlens\[1\]=64"):
        fa.flash_attn_with_kvcache(**STEP | {"cache_seqlens": lengths, "rotary_cos": TABLE, "rotary_sin": TABLE})


def test_names_in_c_that_python_has_not_are_translated():
    for text, said in (
        ("window_left=3, window_right=0 with tree_keys=4", "window_size=(3, 0) with tree_keys=4"),
        ("wgmma_split_sm90: takes no window_left", "wgmma_split_sm90: takes no window_size[0]"),
        (
            "kernel=cpu_naive runs on the CPU, but device is FA_CUDA",
            "kernel=cpu_naive runs on the CPU, but device is a GPU",
        ),
        ("causal=0 on rank 1, but 1 on rank 0", "causal=0 on rank 1, but 1 on rank 0"),
        ("k.data=0x10 overlaps k_new.data=0x10", "k.data=0x10 overlaps k_new.data=0x10"),
        ("kernel=pair=1 is not a kernel of this build", "kernel=pair=1 is not a kernel of this build"),
        ("FLASH_ATTN_NUM_THREADS=pair=1 is not a number of threads",) * 2,
    ):
        assert error_texts.explained(text) == said
    step = structs.new(structs.KVCacheArgs)
    assert (
        error_texts.explained("k.data=0x10 overlaps k_new.data=0x20", step) == "k_cache.data=0x10 overlaps k.data=0x20"
    )


def test_calls_over_ranks(monkeypatch):
    """The same texts, and those of the arguments that these calls alone have."""
    (group,) = distributed.thread_groups(1, timeout=20)
    wide = zeros((2, 3, 300, 8), f4)
    for call, text in (
        (
            lambda: distributed.forward(group, wide[:, :, :100], wide, wide),
            "nheads_k=300; the layout is .* pass q.swap",
        ),
        (lambda: distributed.forward(group, Q, K, V, window_size=(-3, 0)), r"window_size\[0\]=-3 is below -1"),
        (lambda: distributed.forward(Q, K, V, group), "group is a ndarray: expected a Group of this rank"),
        (lambda: distributed.forward(group, Q, K, V, seqlen_q=20), "of the 40 tokens of 2 sequences of 20 with layout"),
        (
            lambda: distributed.forward(group, Q[0], K[0], V[0], cu_seqlens_q=[2, 3], cu_seqlens_k=[3, 4]),
            r"cu_seqlens_q=\[2, 3\] does not go from 0 upwards: expected batch \+ 1 cumulative lengths, such as",
        ),
        (lambda: distributed.create_group(0, 1, "mpi"), "all_gather='mpi' is not a function"),
    ):
        with pytest.raises(fa.BadArgument, match=text):
            call()


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_the_stand_in_for_flash_attn():
    from flash_attn_minimal.integrations import flash_attn

    q, k, v = map(torch.from_numpy, (Q, K, V))
    for call, text in (
        (
            lambda: flash_attn.flash_attn_qkvpacked_func(q),
            r"qkv has shape \(2, 5, 4, 8\): expected \(batch, seqlen, 3, n",
        ),
        (
            lambda: flash_attn.flash_attn_kvpacked_func(q, k),
            r"kv has shape \(2, 7, 2, 8\): expected \(batch, seqlen_k, 2,",
        ),
        (
            lambda: flash_attn.flash_attn_varlen_qkvpacked_func(q[0], None, 5),
            r"qkv has shape \(5, 4, 8\): .*\(total, 3,",
        ),
        (lambda: flash_attn.flash_attn_func(q, k, v, window_size=5), r"window_size=5 is not a pair .* pass \(5, 0\)"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()


def test_weights_that_are_not_packed():
    weight = quantized.W4Weight.quantize(draw(16, 64))
    with pytest.raises(fa.BadArgument, match=r"weight is a W4Weight: expected .*; pass weight\.pack\(\)"):
        ops.linear(draw(1, 64), weight)
    assert ops.linear(draw(1, 64), weight.pack()).shape == (1, 16)
    assert weight.pack(np.float16).dtype == "float16" and weight.dequantize(np.float16).dtype == np.float16


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_a_first_call_inside_a_compiled_function():
    """PyTorch is not told of the library where the library is imported first: the text says what to do."""
    said = run("""
import flash_attn_minimal as fa
import torch
q = torch.zeros(1, 4, 2, 8)
f = torch.compile(lambda q: fa.flash_attn_func(q, q, q), fullgraph=True, backend="eager")
try:
    f(q)
except Exception as error:
    said = str(error).replace(chr(10), " ")
import flash_attn_minimal.torch
torch._dynamo.reset()
print(said, tuple(f(q).shape))
""")
    assert "imported before PyTorch" in said and "import torch first, or flash_attn_minimal.torch before" in said
    assert said.endswith("(1, 4, 2, 8)")
