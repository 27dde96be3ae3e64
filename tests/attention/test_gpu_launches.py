"""State of launches: the shared memory that a kernel has been granted belongs to the kernel in a context, not to the
thread that asked for it."""

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import CUDA, NO_CUDA, torch

import flash_attn_minimal as fa
from flash_attn_minimal.transformer import ops

pytestmark = [
    pytest.mark.skipif(bool(NO_CUDA), reason=NO_CUDA),
    pytest.mark.skipif(CUDA.framework != "torch", reason="needs PyTorch with CUDA"),
]


def decode(kernel, nheads, headdim, length):
    torch.manual_seed(length)
    q = torch.randn(1, 1, nheads, headdim, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(1, 4096, 2, headdim, device="cuda", dtype=torch.bfloat16)[:, : length + 64]
    options = {"cache_seqlens": length, "kernel": kernel}
    plan = fa.kvcache_query(q, k, k, **options)
    if plan.status == "FA_UNSUPPORTED":
        pytest.skip(plan.error)
    return lambda: fa.flash_attn_with_kvcache(q, k, k, **options)


def sample(temperature):
    logits = torch.randn(1, 128256, device="cuda")
    return lambda: ops.sample(logits, temperature, top_k=50 if temperature else 0)


# Pairs of calls that run the same instantiation with different sizes of shared memory: a ring with more slots, rows of
# a tile, and logits that are kept.
PAIRS = {
    "decode_cluster_sm90": lambda name: (decode(name, 16, 128, 4000), decode(name, 16, 128, 60)),
    "decode_lanes_cluster_sm90": lambda name: (decode(name, 64, 256, 512), decode(name, 16, 256, 500)),
    "sample": lambda _: (sample(1.0), sample(0.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_smaller_block_of_another_thread(name):
    pair = PAIRS[name](name)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for large, small in (pair, pair[::-1]):
            for thread, call in ((one, large), (other, small), (one, large), (other, small)):
                thread.submit(call).result()
    torch.cuda.synchronize()


def test_threads_that_have_never_launched():
    calls = PAIRS["decode_cluster_sm90"]("decode_cluster_sm90")
    errors, until = [], time.monotonic() + 2

    def run(call):
        try:
            call()
        except fa.FlashAttnError as error:
            errors.append(error)

    def loop(call):
        while time.monotonic() < until and not errors:
            thread = threading.Thread(target=run, args=(call,))
            thread.start(), thread.join()

    loops = [threading.Thread(target=loop, args=(call,)) for call in calls]
    for thread in loops:
        thread.start()
    for thread in loops:
        thread.join()
    torch.cuda.synchronize()
    assert not errors, errors[0]


CONTEXTS = """
import ctypes as ct, sys
import numpy as np
import flash_attn_minimal as fa
from flash_attn_lab import reference

cuda = ct.CDLL("libcuda.so.1")
def check(status):
    assert status == 0, status

class Array:  # in the context that is current
    def __init__(self, host):
        self.host, pointer = host, ct.c_uint64()
        check(cuda.cuMemAlloc_v2(ct.byref(pointer), ct.c_size_t(host.nbytes)))
        check(cuda.cuMemcpyHtoD_v2(pointer, host.ctypes.data_as(ct.c_void_p), ct.c_size_t(host.nbytes)))
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": host.shape, "typestr": host.dtype.str, "data": (pointer.value, False), "version": 3, "stream": 1}
    def numpy(self):
        check(cuda.cuCtxSynchronize())
        check(cuda.cuMemcpyDtoH_v2(self.host.ctypes.data_as(ct.c_void_p), self.pointer, ct.c_size_t(self.host.nbytes)))
        return self.host.astype(np.float32)

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((1, n, 2, 128), dtype=np.float32).astype(np.float16) for n in (200, 300, 300))
want, _ = reference.standard_attention(*(x.astype(np.float32) for x in (q, k, v)))
def attend():
    for kernel in sys.argv[1:]:
        arrays, out = [Array(x.copy()) for x in (q, k, v)], Array(np.full(q.shape, np.nan, np.float16))
        fa.flash_attn_func(*arrays, out=out, kernel=kernel)
        assert np.abs(out.numpy() - want).max() < 5e-3, kernel

check(cuda.cuInit(0))
first, other = ct.c_void_p(), ct.c_void_p()
check(cuda.cuDevicePrimaryCtxRetain(ct.byref(first), 0))
check(cuda.cuCtxSetCurrent(first))
attend()
for _ in range(3):  # a new context may have the address of one that is gone
    check(cuda.cuCtxCreate_v2(ct.byref(other), 0, 0))
    attend()
    check(cuda.cuCtxDestroy_v2(other))
    check(cuda.cuCtxSetCurrent(first))
    attend()
print("done")
"""


def test_contexts_of_one_device():
    """Every context has to grant a kernel its shared memory."""
    x = torch.zeros(1, 200, 2, 128, device="cuda", dtype=torch.half)
    names = [n for n in ("mma_sm80", "wgmma_sm90") if n in [row["name"] for row in fa.kernels()]]
    names = [n for n in names if fa.query(x, x, x, kernel=n).status == "FA_OK"]
    if not names:
        pytest.skip("no kernel of this GPU takes more shared memory than the default")
    done = subprocess.run([sys.executable, "-c", CONTEXTS, *names], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr
