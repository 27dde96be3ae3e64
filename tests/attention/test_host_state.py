"""State of the thread and process that affects a call on the CPU: the float mode, and the usable processors."""

import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import cpu_kernels, ml_dtypes, torch

import flash_attn_minimal as fa
from flash_attn_minimal.transformer import ops
from flash_attn_minimal.transformer.quantized import W4Weight

KERNELS = [
    kernel["name"]
    for kernel in fa.kernels()
    if kernel["device"] == "cpu"
    and fa.query(*[np.zeros((1, 1, 1, 8), np.float32)] * 3, kernel=kernel["name"]).status == "FA_OK"
]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# Each function makes its inputs, in the usual mode, and returns the call.


def attention(kernel):
    """Outputs and inputs are subnormal float16 and float32, rows wide and narrow, on one thread and on two."""
    q, k, v = normal(1, 67, 2, 24), normal(1, 300, 1, 24, seed=1), normal(1, 300, 1, 24, seed=2)
    half = [x.astype(np.float16) for x in (q, k, np.float32(5e-5) * v)]
    tiny_q, tiny_v = np.float32(1e-39) * q, np.float32(1e-39) * v

    def call():
        results = []
        for threads in (1, 2):
            results += fa.flash_attn_func(*half, return_lse=True, kernel=kernel, num_threads=threads)
            out, lse = fa.flash_attn_func(q, k, tiny_v, return_lse=True, kernel=kernel, num_threads=threads)
            results += [out, lse]
            results += fa.backward(tiny_q, q, k, v, q, lse, num_threads=threads, kernel=kernel)[:3]
        return results

    return call


def cache_of_8_bits():
    if ml_dtypes is None:
        pytest.skip("float8_e4m3 needs ml_dtypes")
    q = normal(1, 1, 1, 16)
    one = np.ones((1, 1, 1), np.float32)
    small = np.arange(16 * 16, dtype=np.uint8).reshape(1, 16, 1, 16) % 8  # subnormal numbers of e4m3
    codes = [small.view(ml_dtypes.float8_e4m3fn)] * 2
    return lambda: [fa.flash_attn_with_kvcache(q, *codes, cache_seqlens=16, k_scale=one, v_scale=one)]


def small_operations():
    x, gate, w = np.float32(5e-5) * normal(4, 64), np.float32(1e-20) * normal(4, 64), np.float32(1e-36) * normal(32, 64)
    half, ones, row = x.astype(np.float16), np.ones(64, np.float16), np.float32(1e-20) * normal(8, 64, seed=1)
    angles = np.outer(np.arange(4), np.arange(1, 9)).astype(np.float32)
    cos, sin, heads, lse = np.cos(angles), np.sin(angles), np.float32(1e-39) * normal(1, 4, 2, 16), np.zeros((1, 2, 4))

    def call():
        weight = W4Weight.quantize(w, "mxfp4")
        return [
            ops.rms_norm(half, ones, 1e-12),
            ops.swiglu(gate),
            ops.rope(heads, cos, sin),
            ops.linear(gate, row),
            weight.codes,
            weight.scales,
            weight.dequantize(),
            *fa.merge(heads, lse.astype(np.float32), heads, lse.astype(np.float32)),
        ]

    return call


def bits(results):
    return [np.ascontiguousarray(x).view(np.uint8) for x in results]


@pytest.mark.skipif(torch is None, reason="PyTorch sets the mode")
@pytest.mark.parametrize(
    "function",
    [
        *(pytest.param(lambda name=name: attention(name), id=name) for name in KERNELS),
        cache_of_8_bits,
        small_operations,
    ],
)
def test_flushing_subnormal_numbers_changes_no_bit(function):
    """Subnormal numbers used to become 0 in some kernels."""
    tiny = torch.full((8,), 1e-39)
    call = function()
    usual = bits(call())
    assert any(x.any() for x in usual)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        flushed = bits(call())
        assert not (tiny * 1).any()  # the caller's mode is back
    finally:
        torch.set_flush_denormal(False)
    for got, want in zip(flushed, usual, strict=True):
        np.testing.assert_array_equal(got, want)


COUNT = """
import os, sys, threading, time
import numpy as np
import flash_attn_minimal as fa

x = np.random.default_rng(0).standard_normal((1, 2500, 8, 64), dtype=np.float32)

def helpers(**options):
    "Threads that a call starts."
    most, done, before = [0], threading.Event(), len(os.listdir("/proc/self/task"))
    def watch():
        while not done.is_set():
            most[0] = max(most[0], len(os.listdir("/proc/self/task")))
            time.sleep(0.001)
    watcher = threading.Thread(target=watch)
    watcher.start()
    fa.flash_attn_func(x, x, x, **options)
    done.set()
    watcher.join()
    return most[0] - before - 1

first = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, first)
print("two", helpers())
os.sched_setaffinity(0, first[:1])
print("one", helpers())
print("given", helpers(num_threads=2))
os.environ["FLASH_ATTN_NUM_THREADS"] = "2"
print("environment", helpers())
del os.environ["FLASH_ATTN_NUM_THREADS"]
os.sched_setaffinity(0, first)
sys.stdout.flush()
if os.fork() == 0:
    os.sched_setaffinity(0, first[:1])
    print("child", helpers(), flush=True)
    os._exit(0)
os.wait()
print("two again", helpers())
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_the_number_of_threads_follows_the_affinity():
    """The affinity of the calling thread at the time of the call counts; also after a fork."""
    environment = {name: value for name, value in os.environ.items() if name != "FLASH_ATTN_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    several = found["two"]  # 0 where a quota leaves one processor
    assert several in "01"
    assert found == {"two": several, "one": "0", "given": "1", "environment": "1", "child": "0", "two again": several}


STACKS = """
import ctypes, os, sys
import ml_dtypes
import numpy as np
import flash_attn_minimal as fa

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(1 << 16)
def signal_stack(size):
    return ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, size)), None) == 0

x = np.random.default_rng(0).standard_normal((1, 130, 2, 64), dtype=np.float32).astype(ml_dtypes.bfloat16)
for step in sys.argv[1:]:
    if step == "call":
        out = fa.flash_attn_func(x, x, x, num_threads=2)
        assert np.allclose(np.float32(out), np.float32(fa.flash_attn_func(x, x, x, kernel="cpu_naive")), atol=2e-2)
        print(fa.query(x, x, x).kernel)
    elif step == "fork":
        sys.stdout.flush()
        if child := os.fork():
            assert os.waitpid(child, 0)[1] == 0
            break
    else:
        print(signal_stack(int(step)))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif("cpu_amx" not in cpu_kernels() or ml_dtypes is None, reason="no AMX, or no bfloat16 in NumPy")
@pytest.mark.parametrize(
    "steps, said",
    [
        ("8192 call", ["True", "other"]),
        ("65536 call call", ["True", "cpu_amx", "cpu_amx"]),
        ("call 8192 65536 call", ["cpu_amx", "False", "True", "cpu_amx"]),
        ("call fork call", ["cpu_amx", "cpu_amx"]),
    ],
)
def test_signal_stacks_and_tile_registers(steps, said):
    """Linux gives the tile registers only where their state fits on every signal stack; a child inherits them."""
    done = subprocess.run([sys.executable, "-c", STACKS, *steps.split()], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert ["other" if "cpu_" in x and x != "cpu_amx" else x for x in found] == said
