"""Sizes, numbers and places in memory that an argument cannot have. Each is refused with its name and value, and
nothing is written."""

import ctypes as ct
import math
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import flash_attn_minimal as fa
from flash_attn_minimal import _arrays
from flash_attn_minimal._core import library, structs
from flash_attn_minimal._core.fields import _put_tensor
from flash_attn_minimal.transformer import _library as transformer
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import W4Weight

f4 = np.float32
ONE, FOUR = np.ones(1, f4), np.ones(4, f4)


def huge(*shape):
    """An array of any shape in a few bytes: every axis except the last repeats."""
    return np.lib.stride_tricks.as_strided(np.zeros(shape[-1], f4), shape, (0,) * (len(shape) - 1) + (4,))


def wide(columns):
    """One row with this number of columns. Only the first has memory."""
    return np.lib.stride_tricks.as_strided(np.zeros(1, f4), (1, columns), (4, 4))


def window(*shape, strides, dtype=f4):
    """A view of new memory, with strides in elements."""
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    data = np.full(count, np.nan, dtype)
    return np.lib.stride_tricks.as_strided(data, shape, [s * data.itemsize for s in strides])


def q(batch=1, seqlen=4, heads=2, headdim=8):
    return np.zeros((batch, seqlen, heads, headdim), f4)


# ---- sizes of which a 32-bit field would keep only the low bits ----

MANY = 2**32 + 1
TOO_LARGE = {
    "attention batch": (lambda: fa.flash_attn_func(*[huge(MANY, 1, 1, 1)] * 3), f"batch={MANY}"),
    "attention nheads_k": (
        lambda: fa.flash_attn_func(q(heads=4), *[huge(1, 4, 2**32 + 4, 8)] * 2),
        f"nheads_k={2**32 + 4}",
    ),
    "query": (lambda: fa.query(*[huge(MANY, 1, 1, 1)] * 3), f"batch={MANY}"),
    "backward": (lambda: fa.backward(*[huge(MANY, 1, 1, 1)] * 5, np.zeros((1, 1, 1), f4)), f"batch={MANY}"),
    "merge": (lambda: fa.merge(*[huge(1, MANY, 1), huge(MANY, 1)[..., 0][None]] * 2), f"lse_a|nheads={MANY}"),
    "quantize_fp8": (lambda: fa.quantize_fp8(huge(MANY, 1, 1, 1)), f"batch={MANY}"),
    "quantize_kvcache": (lambda: fa.quantize_kvcache(*[huge(MANY, 1, 1, 1)] * 2, "int8"), f"batch={MANY}"),
    "cache entries": (lambda: fa.flash_attn_with_kvcache(q(), *[huge(MANY, 4, 2, 8)] * 2), f"cache_batch={MANY}"),
    "page size": (
        lambda: fa.flash_attn_with_kvcache(q(), *[huge(2, MANY, 2, 8)] * 2, block_table=np.zeros((1, 1), np.int32)),
        f"page_size={MANY}",
    ),
    "swiglu": (lambda: ops.swiglu(wide(2 * MANY)), f"dim={MANY}"),
    "linear": (lambda: ops.linear(huge(1, 4), huge(MANY, 4)), f"out_features={MANY}"),
    "rope": (lambda: ops.rope(huge(MANY, 1, 1, 4), *[np.ones((4, 2), f4)] * 2), f"batch={MANY}"),
    "sample": (lambda: ops.sample(huge(MANY, 4)), f"the number of rows of logits={MANY}"),
    "quantize": (lambda: W4Weight.quantize(huge(MANY, 4)), f"out_features={MANY}"),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_LARGE)
def test_sizes_beyond_their_field(name):
    call, text = TOO_LARGE[name]
    with pytest.raises(fa.BadArgument, match=text):
        call()


MIRRORS = {**vars(structs), **vars(transformer)}.values()
STRUCTS = [kind for kind in MIRRORS if isinstance(kind, type) and kind.__name__.endswith("Args")]


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda kind: kind.__name__)
def test_every_integer_of_every_struct(struct):
    """The ends of a field's range are kept, values beyond are refused, and the neighbouring fields do not change."""
    limits = {ct.c_int32: (-(2**31), 2**31 - 1), ct.c_int64: (-(2**63), 2**63 - 1), ct.c_uint64: (0, 2**64 - 1)}
    args = struct()
    checked = [(name, *limits[kind]) for name, kind in struct._fields_ if kind in limits]
    assert len(checked) > 3
    for name, low, high in checked:
        for value in (low, high, np.int32(7), 0):
            setattr(args, name, value)
            assert getattr(args, name) == value
        for value in (low - 1, high + 1, 2**70):
            with pytest.raises(fa.BadArgument, match=f"{name}={value} is outside"):
                setattr(args, name, value)
        assert bytes(args) == bytes(ct.sizeof(args))


def test_more_rows_than_there_can_be():
    """The number of rows determines the sizes of workspaces and grids."""
    for shape, text in (
        ((2**20, 1, 2**23, 8), "batch=1048576 x nheads=8388608 x seqlen_q=1 is above 2^42 rows"),
        ((1, 2**24, 2**20, 8), "batch=1 x nheads=1048576 x seqlen_q=16777216 is above 2^42 rows"),
    ):
        plan = fa.query(*[huge(*shape)] * 3)
        assert (plan.status, plan.error) == ("FA_UNSUPPORTED", text)
    small = huge(1, 4, 2**30, 8)
    plan = fa.query(small, *[huge(1, 2**20, 2**30, 8)] * 2)
    assert plan.status == "FA_UNSUPPORTED" and "nheads_k=1073741824 x seqlen_k=1048576" in plan.error
    with pytest.raises(fa.Unsupported, match="above 2.42 rows"):
        fa.flash_attn_func(small[:, :0], *[huge(1, 2**20, 2**30, 8)] * 2)


# ---- more memory than there is ----


def test_a_workspace_beyond_all_memory():
    """4096 threads x 2^50 scores x 4 bytes are 2^64."""
    arrays = (huge(1, 2**20, 1, 8), huge(1, 2**30, 1, 8), huge(1, 2**30, 1, 8))
    options = {"kernel": "cpu_naive", "num_threads": 4096}
    text = "S of seqlen_q=1048576 x seqlen_k=1073741824 for each of num_threads=4096 is beyond all memory"
    plan = fa.query(*arrays, **options)
    assert plan.status == "FA_UNSUPPORTED" and text in plan.error and plan.workspace_bytes == 0
    with pytest.raises(fa.Unsupported, match=text):
        fa.flash_attn_func(*arrays, **options)
    assert fa.query(*arrays, kernel="cpu_naive", num_threads=1).workspace_bytes == 4 * (2**50 + 8) + 4


def test_a_workspace_that_nobody_can_allocate():
    arrays = (huge(1, 2**22, 1, 8), huge(1, 2**30, 1, 8), huge(1, 2**30, 1, 8))
    with pytest.raises(fa.OutOfMemory, match=f"no memory for a workspace of {4 * (2**52 + 8) + 4} bytes"):
        fa.flash_attn_func(*arrays, kernel="cpu_naive", num_threads=1)


def test_a_result_that_nobody_can_allocate():
    with pytest.raises(fa.OutOfMemory, match="no memory for an array of shape"):
        fa.flash_attn_func(*[huge(2**10, 2**20, 2**10, 512)] * 3)


# ---- a workspace that overlaps an array of its call ----


def put(args, **arrays):
    for name, x in arrays.items():
        _put_tensor(args, name, _arrays.view(x, name))


def forward_args(arrays):
    args = structs.new(structs.AttentionArgs)
    args.device, args.dtype, args.kernel = structs.CPU, structs.DTYPES["float32"], b"cpu_naive"
    args.batch, args.seqlen_q, args.nheads, args.headdim = arrays["q"].shape
    args.seqlen_k, args.nheads_k, args.headdim_v, args.num_threads = args.seqlen_q, args.nheads, args.headdim, 1
    put(args, **{name: arrays[name] for name in ("q", "k", "v", "out")})
    return args


def forward_call(arrays):
    args = forward_args(arrays)
    args.lse = arrays["lse"].ctypes.data
    return args, args, "fa_attention_forward", "fa_attention_query"


def backward_call(arrays):
    _, inner, *_ = forward_call(arrays)
    inner.kernel = None
    args = structs.new(structs.AttentionBackwardArgs)
    args.forward = ct.pointer(inner)
    put(args, **{name: arrays[name] for name in ("dout", "dq", "dk", "dv")})
    return args, inner, "fa_attention_backward", "fa_attention_backward_query"


def cache_call(arrays):
    inner, args = forward_args(arrays), structs.new(structs.KVCacheArgs)
    args.attention = ct.pointer(inner)
    args.cache_batch, args.cache_seqlens, args.seqlen_new = inner.batch, arrays["cache_seqlens"].ctypes.data, 1
    put(args, k_new=arrays["k_new"], v_new=arrays["v_new"])
    return args, inner, "fa_kvcache_attention", "fa_kvcache_query"


ATTENTION = {"q": q, "k": q, "v": q, "out": q}
LSE = {"lse": lambda: np.zeros((1, 2, 4), f4)}
NEW = {name: lambda: q(seqlen=1) for name in ("k_new", "v_new")}
CALLS = {
    "forward": (forward_call, ATTENTION | LSE),
    "backward": (backward_call, ATTENTION | LSE | dict.fromkeys(("dout", "dq", "dk", "dv"), q)),
    "cache": (cache_call, ATTENTION | NEW | {"cache_seqlens": lambda: np.ones(1, np.int32)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_workspace_over_an_array_is_refused(name):
    make, arrays = CALLS[name]
    lib = library.load()
    for over in arrays:
        given = {x: array() for x, array in arrays.items()}
        args, inner, call, query = make(given)
        plan = structs.new(structs.AttentionPlan)
        getattr(lib, query)(ct.byref(args), ct.byref(plan))
        assert plan.workspace_bytes > 0
        memory = np.zeros(given[over].nbytes + plan.workspace_bytes, np.uint8)
        memory[: given[over].nbytes] = given[over].reshape(-1).view(np.uint8)
        moved = memory[: given[over].nbytes].view(given[over].dtype).reshape(given[over].shape)
        args, inner, call, _ = make(given | {over: moved})
        inner.workspace_bytes = plan.workspace_bytes
        inner.workspace = memory.ctypes.data + given[over].nbytes - 1
        with pytest.raises(fa.BadArgument, match=f"^workspace.data=.* overlaps {over}.data="):
            getattr(lib, call)(ct.byref(args), None)
        inner.workspace = memory.ctypes.data + given[over].nbytes  # just after it
        getattr(lib, call)(ct.byref(args), None)


def test_a_workspace_of_a_product_over_its_result_is_refused():
    x, weight = np.ones((3, 64), f4), W4Weight.quantize(np.eye(64, dtype=f4)).pack()
    memory = np.zeros(3 * 64 * 4 + ops.linear_query(x, weight).workspace_bytes, np.uint8)
    assert memory.nbytes > 3 * 64 * 4
    out = memory[: 3 * 64 * 4].view(f4).reshape(3, 64)
    with pytest.raises(fa.BadArgument, match="workspace.data=.* overlaps out.data="):
        ops.linear(x, weight, out=out, workspace=memory)
    ops.linear(x, weight, out=out, workspace=memory[out.nbytes :])


FAILING = r"""
#include "cpu/common/parallel.h"
#include <cstdio>
#include <cstdlib>
static std::atomic<long> left{1L << 60};  // allocations until there is no memory
void* operator new(size_t size) {
    if (left.fetch_sub(1) <= 0) throw std::bad_alloc();
    return std::malloc(size);
}
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, size_t) noexcept { std::free(pointer); }
int main() {
    for (long allowed = 0; allowed < 40; ++allowed) {
        std::atomic<int> done[100] = {};
        left = allowed;
        fa::cpu::parallel_for(100, 16, [&](int64_t task, int) { ++done[task]; });
        left = 1L << 60;
        for (const auto& count : done)
            if (count != 1) return std::printf("%ld allocations: a task ran %d times\n", allowed, int(count)), 1;
    }
    return 0;
}
"""


def test_threads_for_which_there_is_no_memory(tmp_path):
    """Whichever allocation fails, the threads that have started do all the tasks, and are joined."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or not (ROOT / "cuda/cpu/common/parallel.h").is_file():
        pytest.skip("no C++ compiler, or no sources beside the tests")
    source, program = tmp_path / "failing.cpp", tmp_path / "failing"
    source.write_text(FAILING)
    command = [*compiler.split(), "-std=c++17", "-pthread", f"-I{ROOT / 'cuda'}", "-o", str(program), str(source)]
    subprocess.run(command, check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


LIMITED = """
import resource
import numpy as np, flash_attn_minimal as fa
q = np.random.default_rng(0).standard_normal((4, 256, 8, 64), dtype=np.float32)
want = fa.flash_attn_func(q, q, q, num_threads=1)
fa.flash_attn_func(q, q, q, num_threads=256)  # leaves its workspace to the next call
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (40 << 20),) * 2)
assert np.array_equal(fa.flash_attn_func(q, q, q, num_threads=256, out=np.empty_like(q)), want)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux")
def test_threads_for_which_there_is_no_room():
    run = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# ---- numbers ----


class Odd:
    def __float__(self):
        raise RuntimeError("no number today")

    __index__ = __repr__ = __float__


NOT_A_NUMBER = ("3", b"3", True, False, None, 1j, [], np.bool_(True), np.array(True), np.array("3"), Odd())
NUMBERS = {
    "softcap": lambda x: fa.flash_attn_func(q(), q(), q(), softcap=x),
    "dropout_p": lambda x: fa.flash_attn_func(q(), q(), q(), dropout_p=x, dropout_seed=1),
    "eps": lambda x: ops.rms_norm(FOUR, FOUR, x),
    "temperature": lambda x: ops.sample(FOUR, x),
    "top_p": lambda x: ops.sample(FOUR, 1.0, top_p=x),
}
INTEGERS = {
    "dropout_seed": lambda x: fa.flash_attn_func(q(), q(), q(), dropout_p=0.5, dropout_seed=x),
    "dropout_offset": lambda x: fa.flash_attn_func(q(), q(), q(), dropout_p=0.5, dropout_seed=1, dropout_offset=x),
    "num_threads": lambda x: fa.flash_attn_func(q(), q(), q(), dropout_p=0.5, dropout_seed=1, num_threads=x),
    r"window_size\[0\]": lambda x: fa.flash_attn_func(q(), q(), q(), window_size=(x, 0)),
    "seed": lambda x: ops.sample(FOUR, seed=x),
    "offset": lambda x: ops.sample(FOUR, offset=x),
    "top_k": lambda x: ops.sample(FOUR, top_k=x),
    "num_splits": lambda x: fa.flash_attn_with_kvcache(q(), q(), q(), num_splits=x),
    "rotary_dim": lambda x: ops.rope(q(), *[np.ones((4, 4), f4)] * 2, rotary_dim=x),
    "max_seqlen_k": lambda x: fa.flash_attn_varlen_func(*[q()[0]] * 3, *[np.array([0, 4], np.int32)] * 2, 4, x),
}  # fmt: skip


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
def test_what_is_no_number(name):
    call = NUMBERS.get(name) or INTEGERS[name]
    for value in NOT_A_NUMBER:
        if name in ("rotary_dim", "dropout_seed") and value is None:
            continue
        with pytest.raises(fa.BadArgument, match=f"{name}(=.* is not|is None)"):
            call(value)
    with pytest.raises(fa.BadArgument, match=f"{name}=<a int that cannot be printed> is"):
        call(10**5000)
    with pytest.raises(fa.BadArgument, match=f"{name}=10{{400}} is (outside|beyond)"):
        call(10**400)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_beyond_their_field(name):
    for value in (2**70, -(2**70)):
        with pytest.raises(fa.BadArgument, match=f"{name}={value} is outside"):
            INTEGERS[name](value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_no_result_can_have(name):
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(fa.BadArgument, match=f"{name}=-?(nan|inf)"):
            NUMBERS[name](value)
    for value in (1e39, np.float64(-1e39)):
        with pytest.raises(fa.BadArgument, match=f"{name}=.*1e\\+39.* is beyond the numbers of a float32"):
            NUMBERS[name](value)


def test_numpy_numbers_are_numbers():
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 8), dtype=f4)
    want = fa.flash_attn_func(x, x, x, softcap=2.0, softmax_scale=0.5, window_size=(2, 1), num_threads=1)
    options = {"softcap": np.float16(2), "softmax_scale": np.array(0.5), "window_size": (np.int8(2), np.uint64(1))}
    np.testing.assert_array_equal(fa.flash_attn_func(x, x, x, num_threads=np.int16(1), **options), want)


def test_a_softcap_that_would_be_none():
    """As a float32 this softcap is 0, which means off, or has no reciprocal."""
    for value, text in ((1e-300, "softcap=1e-300 is below"), (1e-40, "softcap=1e-40 is below")):
        with pytest.raises(fa.BadArgument, match=text):
            fa.flash_attn_func(q(), q(), q(), softcap=value)
    assert (fa.flash_attn_func(q(), q(), q() + 1, softcap=1.2e-38) == 1).all()


# ---- names and types ----

NAMED = {
    "kernel='cpu_naive\\\\x00x'": lambda: fa.flash_attn_func(q(), q(), q(), kernel="cpu_naive\0x"),
    "kernel='.ud800'": lambda: fa.flash_attn_func(q(), q(), q(), kernel="\ud800"),
    r"out_dtype=\[1\]": lambda: fa.flash_attn_func(q(), q(), q(), out_dtype=[1]),
    r"out_dtype=\{\}": lambda: ops.rms_norm(FOUR, FOUR, out_dtype={}),
    r"out_dtype='int8'": lambda: ops.rms_norm(FOUR, FOUR, out_dtype="int8", out=np.zeros(4, f4)),
    r"format=\[\]": lambda: W4Weight.quantize(np.ones((4, 4), f4), format=[]),
    r"dtype=\[\] is neither": lambda: W4Weight.quantize(np.ones((4, 4), f4)).pack([]),
    r"dtype=array": lambda: W4Weight.quantize(np.ones((4, 4), f4)).dequantize(np.zeros(2)),
    r"factors=\[\]": lambda: fa.quantize_kvcache(q(), q(), "int8", []),
    r"products\[0\]=5 is not a dict": lambda: ops.linear_chain([5]),
    "products=5 is not a sequence": lambda: ops.linear_chain(5),
    r"products\[0\] has 5: expected x": lambda: ops.linear_chain([{5: 1}]),
    r"products\[0\] has x=True": lambda: ops.linear_chain([{"x": True}]),
    "ahead=5 is not a sequence": lambda: ops.linear_chain([chain_product()], ahead=5),
    "causal=<a int": lambda: fa.flash_attn_func(q(), q(), q(), causal=10**5000),
    r"q has dtype \|V0, whose elements": lambda: fa.flash_attn_func(*[np.zeros((1, 4, 2, 8), "V0")] * 3),
    r"q has dtype \[\], whose elements": lambda: fa.flash_attn_func(*[np.zeros((1, 4, 2, 8), np.dtype([]))] * 3),
}


def chain_product():
    return {"x": np.ones((1, 64), f4), "weight": W4Weight.quantize(np.eye(64, dtype=f4)).pack()}


@pytest.mark.parametrize("text", NAMED)
def test_names_and_types(text):
    with pytest.raises(fa.BadArgument, match=text):
        NAMED[text]()


def test_a_dtype_is_a_name():
    assert ops.rms_norm(FOUR, FOUR, out_dtype=np.dtype("float16")).dtype == np.float16


# ---- outputs that are written twice, or while something else is read ----

ARENA = np.full(4096, np.nan, f4)


def part(first, *shape):
    return ARENA[first : first + math.prod(shape)].reshape(shape)


out, lse = fa.flash_attn_func(q(), q(), q(), return_lse=True)
TWICE = {
    "heads over heads": (lambda x: fa.flash_attn_func(q(), q(), q(), out=x), (64, 16, 4, 1), "out.head_stride=4"),
    "rows over heads": (lambda x: fa.flash_attn_func(q(), q(), q(), out=x), (64, 12, 8, 1), "out.row_stride=12"),
    "batch over rows": (lambda x: fa.flash_attn_func(q(2), q(2), q(2), out=x), (48, 16, 8, 1), "out.batch_stride=48"),
    "dq": (lambda x: fa.backward(out, q(), q(), q(), out, lse, dq=x), (64, 16, 4, 1), "dq.head_stride=4"),
    "dk": (lambda x: fa.backward(out, q(), q(), q(), out, lse, dk=x), (64, 8, 8, 1), "dk.(row|head)_stride=8"),
    "dv": (lambda x: fa.backward(out, q(), q(), q(), out, lse, dv=x), (64, 8, 8, 1), "dv.(row|head)_stride=8"),
    "rope": (lambda x: ops.rope(q(), *[np.ones((4, 4), f4)] * 2, out=x), (64, 12, 8, 1), "out.row_stride=12"),
    "kvcache": (lambda x: fa.flash_attn_with_kvcache(q(), q(), q(), out=x), (64, 12, 8, 1), "out.row_stride=12"),
}  # fmt: skip


@pytest.mark.parametrize("name", TWICE)
def test_outputs_that_overlap_themselves(name):
    call, strides, text = TWICE[name]
    target = window(2 if "batch" in name else 1, 4, 2, 8, strides=strides)
    with pytest.raises(fa.BadArgument, match=f"{text} .*cannot overlap"):
        call(target)
    assert np.isnan(target).all()


def bytes_of_cache():
    return [np.zeros((1, 8, 2, 8), np.int8) for _ in "kv"]


MEANWHILE = {
    "out over q": lambda: fa.flash_attn_func(part(0, 1, 4, 2, 8), q(), q(), out=part(8, 1, 4, 2, 8)),
    "out over k": lambda: fa.flash_attn_func(q(), part(63, 1, 4, 2, 8), q(), out=part(0, 1, 4, 2, 8)),
    "out over v": lambda: fa.flash_attn_func(q(), q(), part(0, 1, 4, 2, 8), out=part(63, 1, 4, 2, 8)),
    "out over q, varlen": lambda: fa.flash_attn_varlen_func(
        part(0, 4, 2, 8), q()[0], q()[0], *[np.array([0, 4], np.int32)] * 2, 4, 4, out=part(8, 4, 2, 8)
    ),
    "dk over dq": lambda: fa.backward(
        out, q(), q(), q(), out, lse, dq=part(0, 1, 4, 2, 8), dk=part(32, 1, 4, 2, 8)
    ),
    "dv over dout": lambda: fa.backward(part(0, 1, 4, 2, 8), q(), q(), q(), out, lse, dv=part(32, 1, 4, 2, 8)),
    "out over bias": lambda: fa.flash_attn_func(q(), q(), q(), bias=part(0, 1, 2, 4, 4), out=part(8, 1, 4, 2, 8)),
    "dq over bias": lambda: fa.backward(
        out, q(), q(), q(), out, lse, bias=part(0, 1, 2, 4, 4), dq=part(8, 1, 4, 2, 8)
    ),
    "dv over lse": lambda: fa.backward(out, q(), q(), q(), out, part(8, 1, 2, 4), dv=part(0, 1, 4, 2, 8)),
    "out over factors of a cache": lambda: fa.flash_attn_with_kvcache(
        q(), *bytes_of_cache(), k_scale=part(8, 2), v_scale=ONE.repeat(2), out=part(0, 1, 4, 2, 8)
    ),
    "factors of tokens over new keys": lambda: fa.flash_attn_with_kvcache(
        q(), *bytes_of_cache(), part(2, 1, 1, 2, 8), q(seqlen=1), cache_seqlens=3,
        k_scale=part(0, 1, 8, 2), v_scale=np.ones((1, 8, 2), f4)
    ),
    "factors of tokens over lengths": lambda: fa.flash_attn_with_kvcache(
        q(), *bytes_of_cache(), q(seqlen=1), q(seqlen=1), cache_seqlens=part(4, 1).view(np.int32),
        k_scale=part(0, 1, 8, 2), v_scale=np.ones((1, 8, 2), f4)
    ),
    "rope, cos": lambda: ops.rope(q(), part(0, 4, 4), np.ones((4, 4), f4), out=part(8, 1, 4, 2, 8)),
    "rms_norm, x over weight": lambda: ops.rms_norm(part(0, 4, 8), part(8, 8), residual=np.ones((4, 8), f4)),
    "rms_norm": lambda: ops.rms_norm(part(0, 4, 8), np.ones(8, f4), out=part(8, 4, 8)),
    "rms_norm, weight": lambda: ops.rms_norm(np.ones((4, 8), f4), part(0, 8), out=part(4, 4, 8)),
    "rms_norm, residual": lambda: ops.rms_norm(part(0, 4, 8), np.ones(8, f4), residual=part(8, 4, 8)),
    "rope": lambda: ops.rope(part(0, 1, 4, 2, 8), *[np.ones((4, 4), f4)] * 2, out=part(8, 1, 4, 2, 8)),
    "swiglu": lambda: ops.swiglu(part(0, 4, 8), out=part(4, 4, 4)),
    "linear": lambda: ops.linear(part(0, 4, 8), np.ones((8, 8), f4), out=part(8, 4, 8)),
    "linear, weight": lambda: ops.linear(np.ones((4, 8), f4), part(0, 8, 8), out=part(60, 4, 8)),
    "linear, residual": lambda: ops.linear(
        np.ones((4, 8), f4), np.ones((8, 8), f4), residual=part(8, 4, 8), out=part(0, 4, 8)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANWHILE)
def test_outputs_over_what_is_read(name):
    with pytest.raises(fa.BadArgument, match=r"\.data=0x[0-9a-f]+ overlaps \w+\.data=0x"):
        MEANWHILE[name]()
    assert np.isnan(ARENA).all()


# 512 weights in float32: pairs of arrays of the C ABI's call that would overlap.
FOUR_BITS = {
    "quantize": (
        transformer.W4QuantizeArgs,
        {"w_data": 0, "out_codes": 64, "out_scales": 4096, "out_tensor_scale": 8192},
        "codes.data=.* overlaps w",
    ),
    "quantize, scales": (
        transformer.W4QuantizeArgs,
        {"w_data": 4096, "out_codes": 0, "out_scales": 64, "out_tensor_scale": 8192},
        "scales.data=.* codes",
    ),
    "dequantize": (
        transformer.W4DequantizeArgs,
        {"out_data": 0, "weight_codes": 64, "weight_scales": 4096, "weight_tensor_scale": 8192},
        "out.data=.* codes",
    ),
    "pack": (
        transformer.W4PackArgs,
        {"packed": 0, "weight_codes": 8192, "weight_scales": 256, "weight_tensor_scale": 12288},
        "packed.data=.* scales",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUR_BITS)
def test_arrays_of_a_weight_apart(name):
    """Tested through the C ABI, because the Python layer makes these outputs itself."""
    kind, places, text = FOUR_BITS[name]
    arena = np.full(16384, 7, np.uint8)
    start = arena.ctypes.data + -arena.ctypes.data % 128
    args = structs.new(kind)
    for field, place in places.items():
        setattr(args, field, start + place)
    prefix = "out" if kind is transformer.W4QuantizeArgs else "weight"
    for field, value in {"format": 1, "out_features": 8, "in_features": 64}.items():
        setattr(args, f"{prefix}_{field}", value)
    args.device = 1
    for field, value in {
        "dtype": 2 if kind is transformer.W4PackArgs else 1,
        "out_dtype": 1,
        "w_row_stride": 64,
        "out_row_stride": 64,
    }.items():
        if hasattr(args, field):
            setattr(args, field, value)
    if kind is transformer.W4PackArgs:
        args.packed_bytes = 8192
    with pytest.raises(fa.BadArgument, match=text):
        getattr(transformer.load(), f"fa_w4_{name.partition(',')[0]}")(args, None)
    assert (arena == 7).all()


def statistics_in_place(name):
    """An attention call of the C ABI whose statistic overlaps another array of the call."""
    arrays = {x: part(64 * i, 1, 4, 2, 8) for i, x in enumerate("qkv")} | {"out": part(256, 1, 4, 2, 8)}
    args = structs.new(structs.AttentionArgs)
    args.device, args.dtype, args.batch, args.nheads, args.nheads_k, args.headdim = 1, 1, 1, 2, 2, 8
    args.seqlen_q = args.seqlen_k = 4
    for x, array in arrays.items():
        setattr(args, f"{x}_data", array.ctypes.data)
        for axis, stride in (("batch", 64), ("row", 16), ("head", 8)):
            setattr(args, f"{x}_{axis}_stride", stride)
    statistic, other = name.split(" over ")
    setattr(args, statistic, arrays[other].ctypes.data + 4)
    library.load().fa_attention_forward(args, None)


@pytest.mark.parametrize(
    "name", [f"{a} over {b}" for a in ("lse", "max_score", "key_sums") for b in ("q", "k", "v", "out")]
)
def test_statistics_apart(name):
    """lse that overlapped q used to be written while q was read."""
    statistic, other = name.split(" over ")
    with pytest.raises(fa.BadArgument, match=f"{statistic}.data=.* overlaps {other}.data="):
        statistics_in_place(name)
    assert np.isnan(ARENA).all()


@pytest.mark.parametrize("of_tokens", [False, True], ids=["after the pages", "of tokens"])
def test_factors_in_the_pages(of_tokens):
    """Factors may share a buffer with the bytes that they belong to, after the bytes of each page or of each token."""
    pages, rows, heads, dim, width = 3, 8, 2, 16, 16 + 16 + 4 + 4
    buffer = np.zeros((pages, rows, heads * width), np.uint8)
    call = {}
    if of_tokens:
        ends = np.cumsum([0, dim * heads, dim * heads, 4 * heads, 4 * heads])
        views = [buffer[..., a:b] for a, b in zip(ends, ends[1:], strict=False)]
    else:
        flat, ends = buffer.reshape(pages, -1), rows * np.cumsum([0, dim * heads, dim * heads, 4 * heads, 4 * heads])
        views = [flat[:, a:b].reshape(pages, rows, -1) for a, b in zip(ends, ends[1:], strict=False)]
    for name, view in zip(("k", "v"), views[:2], strict=True):
        call[f"{name}_cache"] = np.lib.stride_tricks.as_strided(
            view.view(np.int8), (pages, rows, heads, dim), (*view.strides[:2], dim, 1)
        )
    for name, view in zip(("k", "v"), views[2:], strict=True):
        call[f"{name}_scale"] = np.lib.stride_tricks.as_strided(
            view.view(f4), (pages, rows, heads), (*view.strides[:2], 4)
        )
    table, new = np.array([[2, 0]], np.int32), np.ones((1, 3, heads, dim), f4)
    out = fa.flash_attn_with_kvcache(
        np.ones((1, 1, 4, dim), f4), **call, k=new, v=new, block_table=table, cache_seqlens=np.zeros(1, np.int32)
    )
    assert np.abs(out - 1).max() < 1e-2
    assert (call["k_scale"][2, :3] > 0).all() and not call["k_scale"][:2].any()


def fused(*widths, heads_first=False):
    """One buffer with a place for each array, and views of it that share no element."""
    buffer = np.random.default_rng(0).standard_normal((2, 5, sum(widths)), dtype=f4)
    ends = np.cumsum(widths)
    return [buffer[:, :, end - width : end].reshape(2, 5, -1, 8) for end, width in zip(ends, widths, strict=True)]


def test_arrays_that_repeat_beside_an_output():
    """An axis of stride 0 is a single place, so out may lie between the places of an input that repeats."""
    q, k, v, out, rest = fused(32, 32, 32, 32, 8)
    bias = np.lib.stride_tricks.as_strided(rest, (2, 4, 5, 5), (rest.strides[0], 0, 0, 4))
    keys = [np.broadcast_to(x[:1, :, :1], x.shape) for x in (k, v)]
    want = fa.flash_attn_func(q, *keys, bias=bias)
    fa.flash_attn_func(q, *keys, bias=bias, out=out)
    assert np.array_equal(out, want)
    over = np.lib.stride_tricks.as_strided(out[1, 4], bias.shape, (0, 0, 0, 4))
    with pytest.raises(fa.BadArgument, match=r"out.data=0x[0-9a-f]+ overlaps bias.data=0x"):
        fa.flash_attn_func(q, *keys, bias=over, out=out)


def reversed_axes(x):
    return x[::-1, ::-1, ::-1]


LAYOUTS = {
    "one buffer": lambda: fused(32, 32, 32, 32),
    "one buffer, fewer key heads": lambda: fused(32, 16, 16, 32),
    "out first": lambda: (lambda o, *qkv: [*qkv, o])(*fused(32, 32, 16, 16)),
    "interleaved heads": lambda: list(
        np.random.default_rng(0).standard_normal((2, 5, 4, 4, 8), dtype=f4).transpose(3, 0, 1, 2, 4)
    ),
    "heads before rows": lambda: list(
        np.random.default_rng(0).standard_normal((4, 2, 4, 5, 8), dtype=f4).transpose(0, 1, 3, 2, 4)
    ),
    "backwards": lambda: [reversed_axes(x) for x in fused(32, 16, 16, 32)],
    "interleaved batch": lambda: list(
        np.random.default_rng(0).standard_normal((2, 4, 5, 4, 8), dtype=f4).transpose(1, 0, 2, 3, 4)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_one_buffer(layout):
    """Interleaved or not, the parts share no element. The call runs, and gives the result of separate copies."""
    x, k, v, target = LAYOUTS[layout]()
    want = fa.flash_attn_func(x.copy(), k.copy(), v.copy())
    assert np.shares_memory(x.base if x.base is not None else x, target.base if target.base is not None else target)
    assert fa.flash_attn_func(x, k, v, out=target) is target
    np.testing.assert_array_equal(target, want)


def test_in_place_where_it_was_promised():
    x, ones = np.random.default_rng(0).standard_normal((4, 8), dtype=f4), np.ones(8, f4)
    want = ops.rms_norm(x, ones)
    y = x.copy()
    np.testing.assert_array_equal(ops.rms_norm(y, ones, out=y), want)
    r = x.reshape(1, 4, 1, 8).copy()
    tables = np.full((4, 4), 0.6, f4), np.full((4, 4), 0.8, f4)
    want = ops.rope(r, *tables)
    np.testing.assert_array_equal(ops.rope(r, *tables, out=r), want)
    residual = x.copy()
    want = ops.linear(x, np.eye(8, dtype=f4), residual=residual)
    np.testing.assert_array_equal(ops.linear(x, np.eye(8, dtype=f4), residual=residual, out=residual), want)


@pytest.mark.parametrize("seed", range(4))
def test_overlaps_against_numpys_answer(seed):
    """Random views of one buffer. Arrays that share an element are refused; others are refused only if the strides of
    their axes differ."""
    rng = np.random.default_rng(seed)
    buffer = np.zeros((3, 4, 4, 16), f4)
    refused = 0
    for _ in range(100):

        def view():
            steps = [1, 1, 1] if rng.random() < 0.5 else rng.choice([1, 2, -1], 3)
            cut = buffer[tuple(slice(rng.integers(2) if step > 0 else None, None, step) for step in steps)]
            return cut[:1, :2, :2, (first := rng.integers(3) * 4) : first + 8]

        x, target = view(), view()
        try:
            fa.flash_attn_func(x, np.zeros_like(x), np.zeros_like(x), out=target)
        except fa.BadArgument as error:
            assert "overlap" in str(error) or "same address" in str(error)
            refused += 1
            alike = x.strides == target.strides
            assert np.shares_memory(x, target) or not alike
        else:
            assert not np.shares_memory(x, target)
    assert 10 < refused < 100
