"""Calls as data: fa_run_call fills the holes of one, and a list of fa_run_calls does the same as its calls one by one,
including errors. And recordings, which use the list."""

import ctypes as ct
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from conftest import CUDA_DEVICES, NO_CUDA, ROOT, cupy, torch

import flash_attn_minimal as fa
from flash_attn_minimal._core import library, recordings
from flash_attn_minimal._core import structs as _structs
from flash_attn_minimal._core.prepared import Prepared
from flash_attn_minimal._core.queries import plan_of
from flash_attn_minimal.distributed import _structs as distributed
from flash_attn_minimal.transformer import _library as transformer
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import W4Weight

STRUCTS = {
    "attention_forward": _structs.AttentionArgs,
    "attention_backward": _structs.AttentionBackwardArgs,
    "kvcache_attention": _structs.KVCacheArgs,
    "attention_merge": _structs.MergeArgs,
    "quantize_fp8": _structs.QuantizeArgs,
    **transformer.OPERATIONS,
}
LINEAR, RMS_NORM, SAMPLE = (1 + _structs.OPERATIONS.index(name) for name in ("linear", "rms_norm", "sample"))


def linear_args(x, weight, out, **changed):
    args = transformer.LinearArgs(struct_size=ct.sizeof(transformer.LinearArgs), device=1, dtype=1)
    args.rows, args.in_features, args.out_features = len(x), x.shape[1], len(weight)
    for name, array in (("x", x), ("weight", weight), ("out", out)):
        setattr(args, f"{name}_data", array.ctypes.data)
        setattr(args, f"{name}_row_stride", array.shape[1])
    for name, value in changed.items():
        setattr(args, name, value)
    return args


def norm_args(x, weight, out):
    args = transformer.RmsNormArgs(
        struct_size=ct.sizeof(transformer.RmsNormArgs), device=1, dtype=1, dim=x.shape[1], eps=1e-5
    )
    args.rows, args.weight = len(x), weight.ctypes.data
    for name, array in (("x", x), ("out", out)):
        setattr(args, f"{name}_data", array.ctypes.data)
        setattr(args, f"{name}_row_stride", array.shape[1])
    return args


def run_calls(calls, count=None, failed=None):
    """Calls fa_run_calls with a list of (operation, struct) or (operation, struct, reserved)."""
    table = (_structs.Call * max(len(calls), 1))()
    for call, (operation, args, *reserved) in zip(table, calls, strict=False):
        call.operation, call.image = operation, ct.addressof(args) if args is not None else None
        call.reserved = reserved[0] if reserved else 0
    library.load().fa_run_calls(table, len(calls) if count is None else count, None, failed, None)


def a_chain(count=4):
    """Products one after another: (weight, [x, the results], their structs)."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((8, 8), dtype=np.float32)
    arrays = [rng.standard_normal((2, 8), dtype=np.float32)]
    arrays += [np.full((2, 8), np.nan, np.float32) for _ in range(count)]
    structs = [linear_args(x, weight, out) for x, out in zip(arrays, arrays[1:], strict=False)]
    return weight, arrays, structs


def test_a_list_is_its_calls_in_order():
    weight, arrays, structs = a_chain()
    norm = np.full((2, 8), np.nan, np.float32)
    failed = ct.c_int32(7)
    calls = [*((LINEAR, args) for args in structs), (RMS_NORM, norm_args(arrays[-1], weight[0], norm))]
    run_calls(calls, failed=failed)
    assert failed.value == -1
    x = arrays[0]
    for array in arrays[1:]:
        x = ops.linear(x, weight)
        np.testing.assert_array_equal(array, x)
    np.testing.assert_array_equal(norm, ops.rms_norm(x, weight[0]))


def test_an_empty_list():
    failed = ct.c_int32(7)
    run_calls([], failed=failed)
    library.load().fa_run_calls(None, 0, None, None, None)
    assert failed.value == -1


@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize("field, value, error, reason", [
    ("in_features", 0, fa.BadArgument, "in_features=0 is outside 1 .. 16777216"),
    ("struct_size", 3, fa.BadArgument, "fa_linear_args.struct_size=3: set it to sizeof(fa_linear_args)"),
    ("weight_data", None, fa.BadArgument, "weight.data is NULL"),
    ("device", 7, fa.BadArgument, "device=7 is neither FA_CPU (1) nor FA_CUDA (2)"),
    ("kernel", b"linear_gemv_sm80", (fa.BadArgument, fa.Unsupported), "kernel=linear_gemv_sm80 "),
])  # fmt: skip
def test_the_first_failure_ends_the_list(index, field, value, error, reason):
    """The calls before the failing call have been made; the failing call and later calls have written nothing. Status
    and text are those of the failing call."""
    weight, arrays, structs = a_chain()
    setattr(structs[index], field, value)
    with pytest.raises(error) as alone:
        transformer.load().fa_linear(structs[index], None)
    failed = ct.c_int32(7)
    with pytest.raises(error) as caught:
        run_calls([(LINEAR, args) for args in structs], failed=failed)
    assert reason in str(alone.value) and type(caught.value) is type(alone.value)
    assert str(caught.value) == f"calls[{index}] (fa_linear): {alone.value}"
    assert failed.value == index
    assert all(np.isfinite(array).all() for array in arrays[: index + 1])
    assert all(np.isnan(array).all() for array in arrays[index + 1 :])
    with pytest.raises(error):
        run_calls([(LINEAR, args) for args in structs])  # without a place for the index


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("operation", [0, -1, 20, 2**31 - 1])
def test_an_unknown_operation(index, operation):
    weight, arrays, structs = a_chain(3)
    calls = [(LINEAR, args) for args in structs]
    calls[index] = operation, structs[index]
    with pytest.raises(fa.BadArgument, match=rf"calls\[{index}\]: operation={operation} is not an fa_operation \(1 "):
        run_calls(calls)
    assert [bool(np.isnan(array).all()) for array in arrays[1:]] == [i >= index for i in range(3)]


@pytest.mark.parametrize("name", STRUCTS)
def test_every_operation_is_the_function_of_its_name(name):
    """With an empty struct, or none, the list gives the same error as the function."""
    number, lib = 1 + _structs.OPERATIONS.index(name), transformer.load()
    for args in (STRUCTS[name](), None):
        with pytest.raises(fa.BadArgument) as alone:
            getattr(lib, f"fa_{name}")(args, None)
        with pytest.raises(fa.BadArgument) as caught:
            run_calls([(number, args)])
        assert str(caught.value) == f"calls[0] (fa_{name}): {alone.value}"


def test_numbers_are_those_of_the_header():
    header = ROOT / "cuda" / "flash_attn.h"
    if not header.is_file():
        pytest.skip("the headers are not beside the tests")
    text = header.read_text()
    for number, name in enumerate(_structs.OPERATIONS, 1):
        assert re.search(rf"\bFA_OP_{name.upper()} = {number}\b", text), name
    assert len(re.findall(r"\bFA_OP_\w+ = ", text)) == len(_structs.OPERATIONS)


@pytest.mark.parametrize("name", ["forward", "backward", "decode", "merge"])
def test_operations_of_groups_are_the_functions_of_their_names(name):
    number, args = 1 + _structs.OPERATIONS.index(f"distributed_{name}"), _structs.new(distributed.GROUP_CALLS[name])
    function = getattr(distributed.load(), f"fa_distributed_{name}")
    with pytest.raises(fa.BadArgument) as alone:
        function(None, None, None)
    with pytest.raises(fa.BadArgument) as caught:
        run_calls([(number, args)])
    assert str(caught.value) == f"calls[0] (fa_distributed_{name}): {alone.value}"
    with pytest.raises(fa.BadArgument, match=r"fa_group_call.struct_size=0"):
        run_calls([(number, distributed.GROUP_CALLS[name]())])


@pytest.mark.parametrize("arguments, message", [
    (([], -1), "count=-1 is negative"),
    (([(LINEAR, None, 5)],), r"calls\[0\] \(fa_linear\): fa_call.reserved=5 must be 0"),
])  # fmt: skip
def test_a_bad_list(arguments, message):
    failed = ct.c_int32(7)
    with pytest.raises(fa.BadArgument, match=message):
        run_calls(*arguments, failed=failed)
    assert failed.value == (-1 if "count" in message else 0)
    with pytest.raises(fa.BadArgument, match="calls is NULL with count=2"):
        library.load().fa_run_calls(None, 2, None, None, None)


@pytest.mark.skipif(CUDA_DEVICES > 0, reason="host memory is refused there, see below")
def test_a_gpu_call_without_a_gpu():
    weight, arrays, structs = a_chain(3)
    structs[1].device = 2
    with pytest.raises((fa.Unsupported, fa.CudaError), match=r"^calls\[1\] \(fa_linear\): device=FA_CUDA: "):
        run_calls([(LINEAR, args) for args in structs])
    assert np.isfinite(arrays[1]).all() and np.isnan(arrays[2]).all()


@pytest.mark.skipif(bool(NO_CUDA) or cupy is None, reason=NO_CUDA or "CuPy is not installed")
def test_calls_on_both_devices():
    """One list with calls on the host, on the GPU and on the host. A call on the GPU refuses memory of the host."""
    weight, arrays, structs = a_chain(3)
    x, w, out = (cupy.asarray(array) for array in (arrays[0], weight, arrays[2]))
    cupy.cuda.Device().synchronize()
    structs[1].device, structs[1].x_data, structs[1].weight_data, structs[1].out_data = (
        2,
        x.data.ptr,
        w.data.ptr,
        out.data.ptr,
    )
    structs[2].x_data = arrays[0].ctypes.data
    run_calls([(LINEAR, args) for args in structs])
    cupy.cuda.Device().synchronize()
    np.testing.assert_allclose(out.get(), arrays[1], rtol=1e-5)
    np.testing.assert_array_equal(arrays[1], arrays[3])
    structs[1].x_data = arrays[0].ctypes.data
    with pytest.raises(fa.BadArgument, match=r"^calls\[1\] \(fa_linear\): x.data=.* is host memory"):
        run_calls([(LINEAR, args) for args in structs])


def test_a_long_reason_is_cut():
    """The text has room for an index, a name and a reason of a normal length; a longer one loses its end."""
    weight, arrays, structs = a_chain(1)
    structs[0].kernel = b"k" * 5000
    with pytest.raises(fa.BadArgument, match=r"^calls\[0\] \(fa_linear\): kernel=kkkk"):
        run_calls([(LINEAR, structs[0])])


# ---- holes ----


def with_holes(args, places, values, **changed):
    """A call of fa_linear with holes at these places, (byte, bytes, value); `values` are integers."""
    table = (_structs.Hole * len(places))(*places)
    call = _structs.Call(
        LINEAR, 0, ct.addressof(args), ct.sizeof(args), ct.addressof(table), len(places), len(values)
    )  # fmt: skip
    for name, value in changed.items():
        setattr(call, name, value)
    packed = struct.pack(f"={len(values)}Q", *values)
    if status := library.load().fa_run_call(ct.addressof(call), packed, None):
        raise library.failure(status)


def at(name):
    return getattr(transformer.LinearArgs, name).offset


def test_a_call_with_holes_is_made_on_other_arrays():
    """Addresses, 64-bit and 32-bit numbers, and the address of a string in the image; the image stays as it is."""

    class Named(ct.Structure):
        _fields_ = [("args", transformer.LinearArgs), ("kernel", ct.c_char * 16)]

    weight, (x, out), (args,) = a_chain(1)
    image = Named(args, b"cpu_dense")
    image.args.x_data = image.args.weight_data = image.args.out_data = None
    image.args.rows = image.args.device = 0
    before = bytes(image)
    holes = [(at("weight_data"), 8, 0), (at("x_data"), 8, 1), (at("out_data"), 8, 2), (at("rows"), 8, 3)]
    holes += [(at("device"), 4, 4), (at("kernel"), 8, -1 - Named.kernel.offset)]
    kernels = [row["name"] for row in fa.kernel_tables()["linear"] if row["device"] == "cpu"]
    image.kernel = kernels[0].encode()
    before = bytes(image)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x, out = rng.standard_normal((2, 8), dtype=np.float32), np.full((2, 8), np.nan, np.float32)
        values = [weight.ctypes.data, x.ctypes.data, out.ctypes.data, 2, (7 << 32) + 1]
        with_holes(image, holes, values, image_bytes=ct.sizeof(image))
        np.testing.assert_array_equal(out, ops.linear(x, weight))
        assert bytes(image) == before
    image.kernel = b"nothing"
    with pytest.raises(fa.BadArgument, match="kernel=nothing is not a kernel"):
        with_holes(image, holes, values, image_bytes=ct.sizeof(image))


@pytest.mark.parametrize("hole, changed, message", [
    ((-1, 4, 0), {}, r"holes\[0\] is 4 bytes at byte -1: expected 4 or 8 of the image's"),
    ((8, 2, 0), {}, r"holes\[0\] is 2 bytes at byte 8"),
    ((8, 8, 1), {}, r"holes\[0\].value=1 in a call of 1 values"),
    ((8, 8, -1 - (1 << 20)), {}, r"holes\[0\].value=-1048577 in a call"),
    ((at("rows"), 8, 0), {"hole_count": -1}, "hole_count=-1 is negative"),
    ((at("rows"), 8, 0), {"image": None}, "image is NULL with hole_count=1"),
    ((at("rows"), 8, 0), {"holes": None}, "holes is NULL with hole_count=1"),
    ((8, 8, 0), {"image_bytes": 64}, "image_bytes=64 with a struct of "),
    ((at("rows"), 8, 0), {"reserved": 1}, "fa_call.reserved=1 must be 0"),
    ((at("rows"), 8, 0), {"operation": 77}, r"operation=77 is not an fa_operation"),
])  # fmt: skip
def test_a_bad_hole(hole, changed, message):
    _, (_, out), (args,) = a_chain(1)
    with pytest.raises(fa.BadArgument, match=message):
        with_holes(args, [hole], [2], **changed)
    assert np.isnan(out).all()


def test_a_call_larger_than_most():
    """An image beyond the memory that a call has at hand."""
    weight, (x, out), (args,) = a_chain(1)

    class Padded(ct.Structure):
        _fields_ = [("args", transformer.LinearArgs), ("more", ct.c_char * 100_000)]

    with_holes(Padded(args), [(at("rows"), 8, 0)], [2], image_bytes=ct.sizeof(Padded))
    np.testing.assert_array_equal(out, ops.linear(x, weight))


def test_the_plan_is_that_of_the_values():
    """fa_query_call answers for the kernel and the lengths of these very values, and refuses operations without one."""
    args = _structs.new(_structs.AttentionArgs)
    args.device = args.dtype = args.batch = args.nheads = args.nheads_k = 1
    args.headdim, args.seqlen_q = 64, 100
    for name in ("q", "k", "v", "out"):
        setattr(args, f"{name}_row_stride", 64)
    fields = [(_structs.AttentionArgs, "seqlen_k"), (_structs.AttentionArgs, "num_threads")]
    call = Prepared("attention_forward", args, fields)
    for keys in (100, 3000, 100):
        for threads in (1, 3):
            args.seqlen_k, args.num_threads = keys, threads
            assert call.plan(call.pack(keys, threads)).workspace_bytes == plan_of(args).workspace_bytes
    rows = Prepared("linear", a_chain(1)[2][0], [])
    assert library.load().fa_query_call(rows.address, None, None) == 2
    assert library.last_error() == "fa_linear has no query: it needs no workspace"


# ---- threads ----

SHARED = """
import os, resource, sys, threading, time
import numpy as np
sys.path[:0] = {folders!r}
from test_calls import LINEAR, linear_args, run_calls

rng = np.random.default_rng(1)
weight = rng.standard_normal((1024, 1024), dtype=np.float32) / 32
x = rng.standard_normal((32, 1024), dtype=np.float32)

def step(counts):
    arrays = [x, *(np.zeros((32, 1024), np.float32) for _ in counts)]
    structs = [linear_args(a, weight, out, num_threads=n) for a, out, n in zip(arrays, arrays[1:], counts)]
    run_calls([(LINEAR, args) for args in structs])
    return arrays[-1].tobytes()

def many():
    for _ in range(5):
        found.extend(step(counts) for counts in ([2] * 6, [1, 3, 2, 8, 1, 4], [16, 2, 2, 1, 1, 16]))

alone, found = step([1] * 6), []
callers = [threading.Thread(target=many) for _ in range({callers} - 1)]
before = len(os.listdir("/proc/self/task"))
{limit}
[thread.start() for thread in callers]
many()
[thread.join() for thread in callers]
assert len(found) == 15 * {callers} and set(found) == {{alone}}, "the result depends on the threads"
ends = time.monotonic() + 10  # a thread of Python's is joined a moment before the system has forgotten it
while len(os.listdir("/proc/self/task")) > before and time.monotonic() < ends:
    time.sleep(0.01)
assert len(os.listdir("/proc/self/task")) == before, "a thread is left"
"""


def shared(callers, limit):
    code = SHARED.format(
        folders=[str(ROOT / "tests"), str(ROOT / "tests" / "transformer")], callers=callers, limit=limit
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("callers", [1, 4])
def test_the_calls_of_a_list_share_threads(callers):
    """Any number of threads gives the same bits, also while other lists run. No thread remains afterwards."""
    shared(callers, "")


def test_a_list_does_without_threads():
    """If the system gives no threads, the caller runs every loop. (Root has no limit.)"""
    shared(1, "resource.setrlimit(resource.RLIMIT_NPROC, (0, 0)); os.getuid() or os.setuid(65534)")


# ---- recordings ----


def a_step(x, weight, packed, cache, lengths, tokens):
    """A small model's step on these arrays: every kind of call that the engine records."""
    qkv = ops.linear(x, weight)
    q, k, v = (qkv[:, start : start + 8].reshape(2, 1, 1, 8) for start in (0, 8, 16))
    attended = fa.flash_attn_with_kvcache(q, *cache, k, v, cache_seqlens=lengths, causal=True)
    [y] = ops.linear_chain([{"x": attended.reshape(2, 8), "weight": packed, "residual": x}])
    ops.sample(ops.linear(ops.rms_norm(y, weight[0]), weight), temperature=1.0, step=lengths, out=tokens)
    own = fa.flash_attn_func(q, k, v, causal=True)
    return y, own


def arrays_of_a_step():
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((2, 8), dtype=np.float32), rng.standard_normal((24, 8), dtype=np.float32)
    packed = W4Weight.quantize(rng.standard_normal((8, 8), dtype=np.float32)).pack()
    cache = np.full((2, 2, 6, 1, 8), np.nan, np.float32)
    return x, weight, packed, cache, np.zeros(2, np.int32), np.zeros(2, np.int32)


def test_a_recording_repeats_its_calls():
    """A recording repeats its calls on the current contents of the arrays, bit for bit; also after the signatures of
    the calls have become shortcuts."""
    x, weight, packed, cache, lengths, tokens = arrays_of_a_step()
    other = arrays_of_a_step()
    for _ in range(3):
        a_step(*arrays_of_a_step())
    for step in range(6):
        if step == 0:
            with recordings.Recording() as recording:
                results = a_step(x, weight, packed, cache, lengths, tokens)
        else:
            recording()
        expected = a_step(*other)
        for got, wanted in zip((*results, cache, tokens), (*expected, other[3], other[5]), strict=True):
            np.testing.assert_array_equal(got, wanted)
        for arrays in ((x, lengths), (other[0], other[4])):
            arrays[0][...] = np.float32(step) - arrays[0][::-1].copy()
            arrays[1][...] += 1
    assert recordings.current() is None
    lengths[:] = 5, 6
    with pytest.raises(fa.BadArgument, match=r"^calls\[1\] \(fa_kvcache_attention\): cache_seqlens\[1\]=6 and "):
        recording()


def test_a_recording_owns_what_it_uses():
    """The recording keeps its arrays alive, and has its own workspace, to which other calls of this thread do not
    write."""
    x, weight, packed, cache, lengths, tokens = arrays_of_a_step()
    with recordings.Recording() as recording:
        results = a_step(x, weight, packed, cache, lengths, tokens)
    expected = [array.copy() for array in (*results, tokens)]
    del weight, packed, cache
    big = np.ones((1, 3000, 2, 64), np.float32)
    fa.flash_attn_func(big, big, big)
    rubbish = [np.full(size, np.nan, np.float32) for size in (16, 48, 192, 8, 16, 64) for _ in range(20)]
    recording()
    for got, wanted in zip((*results, tokens), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert len(rubbish) == 120


def test_functions_between_the_calls():
    x = np.ones((1, 4), np.float32)
    weight, seen = 2 * np.eye(4, dtype=np.float32), []
    with recordings.Recording() as recording:
        y = ops.linear(x, weight)
        recording.function(lambda: seen.append(y[0, 0].item()))
        ops.linear(y, weight, out=x)
    recording()
    recording()
    assert seen == [8.0, 32.0] and x[0, 0] == 64


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("before", [0, 3])
def test_a_call_like_those_before_is_recorded(framework, before):
    """The shortcut for repeated calls would make the call without recording it."""
    if framework == "torch" and torch is None:
        pytest.skip("no PyTorch here")
    arrays = np.random.default_rng(0).standard_normal((4, 1, 6, 2, 16)).astype(np.float32)
    q, k, v, dout = arrays if framework == "numpy" else torch.from_numpy(arrays)
    out, dq, dk, dv, step = (x * 0 for x in (q, q, k, v, q))
    lengths = q.reshape(-1)[:1].astype("i4") * 0 + 6 if framework == "numpy" else torch.tensor([6], dtype=torch.int32)

    def calls():
        _, lse = fa.flash_attn_func(q, k, v, out=out, return_lse=True)
        fa.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
        fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, out=step)

    for _ in range(before):
        calls()
    with recordings.Recording() as recording:
        calls()
    want = [np.asarray(x).copy() for x in (out, dq, dk, dv, step)]
    assert all(x.any() for x in want)
    for x in (out, dq, dk, dv, step):
        x[:] = np.nan
    recording()
    for x, y in zip((out, dq, dk, dv, step), want, strict=True):
        np.testing.assert_array_equal(np.asarray(x), y)


def test_gradients_that_a_replay_would_add_to_are_not_recorded():
    q, k, v, out, dq, dk, dv = np.ones((7, 1, 3, 2, 8), np.float32)
    sinks, lse = np.zeros(2, np.float32), np.ones((1, 2, 3), np.float32)
    with recordings.Recording(), pytest.raises(fa.Unsupported, match="accumulate=True .* is not recorded"):
        fa.backward(
            out, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, sinks=sinks, accumulate=True, return_dsinks=True
        )  # fmt: skip


def test_recordings_do_not_nest_and_end_with_an_error():
    with pytest.raises(fa.Unsupported, match="a recording inside a recording"), recordings.Recording():
        with recordings.Recording():
            pass
    assert recordings.current() is None
    with recordings.Recording() as recording:
        ops.linear(np.ones((1, 8), np.float32), np.ones((8, 8), np.float32))
    with pytest.raises(fa.Unsupported, match="a replay is not recorded"), recordings.Recording():
        recording()


@pytest.mark.skipif(bool(NO_CUDA) or cupy is None, reason=NO_CUDA or "CuPy is not installed")
def test_calls_on_a_gpu_are_not_recorded():
    x = cupy.ones((1, 8), np.float32)
    with recordings.Recording(), pytest.raises(fa.Unsupported, match="a call on cuda:0 is not recorded"):
        ops.linear(x, cupy.ones((8, 8), np.float32))
