"""Calls on the CPU that run on the threads of PyTorch's OpenMP runtime (fa_use_openmp). Each test is a program of its
own: which threads a process uses is its state."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import torch

pytestmark = [
    pytest.mark.skipif(torch is None, reason="PyTorch brings the runtime"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor"),
]

START = """
import ctypes, os, sys, threading, time
import numpy as np
import torch
import flash_attn_minimal as fa
from flash_attn_minimal._core.library import load

torch.set_num_threads(2)

def tensors(*shape, count=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]

def use(library):
    status = load().fa_use_openmp(library)
    return "" if status == 0 else load().fa_last_error().decode()

def share():
    "Uses PyTorch's threads. Forgets that some were late, which they are on a busy machine."
    assert not use(b"libtorch_cpu.so")

def threads_of():
    return set(os.listdir("/proc/self/task"))

def started(call):
    "Whether the process has other threads while the call runs than before."
    seen, done, before = set(), threading.Event(), threads_of()
    def watch():
        seen.add(str(threading.get_native_id()))
        while not done.is_set():
            seen.update(threads_of() - before)
            time.sleep(0.0005)
    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return len(seen) > 1

q, k, v, g = tensors(1, 1500, 8, 64)
attend = lambda **options: fa.flash_attn_func(q, k, v, **options)
"""


def run(program: str, **environment: str) -> str:
    others = "OMP_", "KMP_", "FLASH_ATTN_NUM_THREADS", "FLASH_ATTN_OPENMP"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=kept | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


BITS = """
def results():
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((2, 333, 4, 64), (1, 1, 8, 40), (3, 70, 2, 24)):
            for options in ({}, {"causal": True}, {"softcap": 5.0, "window_size": (40, 3)}, {"num_threads": 3}):
                q, k, v, g = tensors(*shape, dtype=dtype)
                out, lse = fa.flash_attn_func(q, k, v, return_lse=True, **options)
                found += [out, lse, *fa.backward(g, q, k, v, out, lse, **options)[:3]]
    q, k, v, _ = tensors(2, 2000, 4, 64)
    found.append(fa.flash_attn_with_kvcache(q[:, :1].contiguous(), k, v, cache_seqlens=1999))
    return [x.float() for x in found]

first = results()
assert not use(None)
own = results()
assert not use(b"libtorch_cpu.so")
with torch.inference_mode():
    again = results()
assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, own, again))
print(len(first), torch.isfinite(torch.cat([x.flatten() for x in first])).all().item())
"""


def test_both_sources_of_threads_give_the_same_bits():
    assert run(START + BITS) == "121 True"


def test_calls_start_no_threads_of_their_own():
    """PyTorch's threads work instead, as many as torch.set_num_threads says. More threads than those are the library's
    own. NumPy's arrays, too, are served by PyTorch's threads from the first tensor on."""
    program = """
x = q.numpy()
print("numpy", started(lambda: fa.flash_attn_func(x, x, x)))
(q + 1).sum()  # PyTorch's threads start
print("torch", started(attend))
share()
print("numpy", started(lambda: fa.flash_attn_func(x, x, x)))
share()
print("three", started(lambda: attend(num_threads=3)))
torch.set_num_threads(1)
print("one", started(attend))
print("two", started(lambda: attend(num_threads=2)))
torch.set_num_threads(2)
assert not use(None)
print("own", started(attend))
"""
    found = run(START + program).splitlines()
    assert found == ["numpy True", "torch False", "numpy False", "three True", "one False", "two True", "own True"]


RUNTIME = """
#include <pthread.h>
#include <unistd.h>
int regions, team, late_us;
struct part { void (*body)(void*); void* data; };
static void* other(void* given) {
    struct part* part = given;
    usleep(late_us);
    part->body(part->data);
    return 0;
}
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags) {
    struct part part = {body, data};
    pthread_t thread;
    ++regions;
    if (team == 2) pthread_create(&thread, 0, other, &part);
    body(data);
    if (team == 2) pthread_join(thread, 0);
}
int omp_get_max_threads(void) { return team; }
"""

LATE = """
import ctypes, os, sys
import numpy as np
import flash_attn_minimal as fa
from flash_attn_minimal._core.library import load

runtime = ctypes.CDLL(os.environ["RUNTIME"])
regions, team, late_us = (ctypes.c_int.in_dll(runtime, name) for name in ("regions", "team", "late_us"))
q = np.random.default_rng(0).standard_normal((1, 300, 4, 64), dtype=np.float32)
want = fa.flash_attn_func(q, q, q)

def served(calls):
    "Which of the calls run on the runtime."
    assert load().fa_use_openmp(os.environ["RUNTIME"].encode()) == 0
    text = ""
    for _ in range(calls):
        before = regions.value
        assert np.array_equal(fa.flash_attn_func(q, q, q), want)
        text += ".R"[regions.value - before]
    return text

team.value = 1
print(served(5))
team.value, late_us.value = 2, 20000
print(served(20))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_loops_pass_a_runtime_whose_threads_are_late(tmp_path):
    """The more often its threads were late, the more calls pass it. Naming it again forgets that."""
    source, library = tmp_path / "runtime.c", tmp_path / "libruntime.so"
    source.write_text(RUNTIME)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-lpthread"], check=True)
    assert run(LATE, RUNTIME=str(library)).splitlines() == ["RRRRR", "R.R..R....R........R"]


def test_the_environment_keeps_own_threads():
    assert run(START + "print(started(attend), started(attend))", FLASH_ATTN_OPENMP="0") == "True True"


def test_refusals():
    program = """
attend()
print(use(b"libnowhere.so"))
print(started(attend))
"""
    assert run(START + program).splitlines() == [
        "library=libnowhere.so: the program has not loaded it",
        "True",  # the refusal has left own threads
    ]
    program = """
from flash_attn_minimal._core.library import load
print(load().fa_use_openmp(b"libc.so.6"), load().fa_last_error().decode())
print(load().fa_use_openmp(None))
"""
    assert run(program).splitlines() == [
        "2 library=libc.so.6: neither it nor what it is linked to is an OpenMP runtime",
        "0",
    ]


FORK = """
import os, signal, sys, time
import numpy as np
import torch
torch.set_num_threads(2)
generator = torch.Generator().manual_seed(0)
q = torch.randn((1, 1500, 8, 64), generator=generator)
(q + 1).sum()  # PyTorch's threads start
def attend():
    import flash_attn_minimal as fa
    return fa.flash_attn_func(q, q, q)
if sys.argv[1] == "used":
    attend()
pid = os.fork()
if pid == 0:
    out = attend()
    os.write(1, b"child %d\\n" % bool(np.isfinite(out.numpy()).all()))
    if os.fork() == 0:
        attend()
        os.write(1, b"grandchild\\n")
        os._exit(0)
    os.wait()
    os._exit(0)
for _ in range(600):
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        break
    time.sleep(0.1)
else:
    os.kill(pid, signal.SIGKILL)
    sys.exit("the child hangs")
attend()
print("parent", status)
"""


@pytest.mark.parametrize("before", ["used", "unused"])
def test_a_forked_child_has_threads_of_its_own(before):
    """The runtime's threads are not in the child, and libgomp would wait for them for ever: also if the parent has
    never loaded this library, but has used PyTorch's threads."""
    program = f"import sys; sys.argv = ['', {before!r}]\n{FORK}"
    assert sorted(run(program).splitlines()) == ["child 1", "grandchild", "parent 0"]


def test_calls_inside_a_parallel_region_and_from_many_threads():
    """Inside a region of the program each thread does its own call. Every thread of Python's has a team of its own."""
    program = """
want = attend()
runtime = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
same = []
@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def body(_):
    same.append(torch.equal(attend(), want))
runtime.GOMP_parallel(body, None, 2, 0)
print(same)
same.clear()
def work():
    for _ in range(5):
        same.append(torch.equal(attend(), want))
workers = [threading.Thread(target=work) for _ in range(6)]
for worker in workers: worker.start()
for worker in workers: worker.join()
print(all(same), len(same))
"""
    assert run(START + program).splitlines() == ["[True, True]", "True 30"]


def test_the_usual_float_mode_holds_in_the_runtimes_threads():
    """torch.set_flush_denormal holds for the runtime's threads, too, in some versions of PyTorch."""
    program = """
tiny = 1e-39 * v
want = fa.flash_attn_func(q, k, tiny)
assert want.any()
if torch.set_flush_denormal(True):
    (q + 1).sum()
    assert torch.equal(fa.flash_attn_func(q, k, tiny).view(torch.int32), want.view(torch.int32))
print("done")
"""
    assert run(START + program) == "done"
