"""The reader's lines inside a working kernel: compiled, checked against float64, timed in turns with the slow lines,
and placed under the machine's roofline. An exercise of this kind is a file in C (or CUDA) with the slow lines in
`#ifdef SLOW` and a place for the reader's in its `#else`, and a Python file of the same name with the judge."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import mmap
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from judging import Unavailable, Wrong, apart, require

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT))

from ladder import c  # noqa: E402
from ladder import rung as ladder_rung  # noqa: E402

HOLE = re.compile(r"(#else\n)((?:(?!#endif).)*?// yours(?:(?!#endif).)*)(?=#endif)", re.DOTALL)
GUARD = 4096  # floats around every array, NaN
FAULTS = {
    1: "reports that it has not enough memory",
    78: "wrote past the end of its scratch memory",
    81: "it writes into an input",
    82: "it writes outside of its arrays",
    85: "it reads or writes outside of the shared memory that it has",
    84: "asks for more scores at once than s has room for",
    83: "a wait has lasted a second: a deadlock, or a barrier whose phase nobody ends",
}


class Kernel:
    """The compiled file of an exercise. `lines`: what stands in the reader's place instead of what the file has."""

    def __init__(self, path: Path, lines: str | None = None):
        self.path, self.lines = path, lines
        self.said: str | None = None  # where the reader's lines stand, once they are timed
        self.strict = 1.0  # a factor of every speed that the judge asks for

    @functools.cache  # noqa: B019
    def library(self, slow: bool = False) -> ctypes.CDLL:
        if shutil.which(os.environ.get("CC") or "cc") is None:
            raise Unavailable(f"there is no C compiler: {os.environ.get('CC') or 'cc'} is not on the PATH")
        flags = (
            f"-I{self.path.parent}",
            f"-I{Path(__file__).parent}",
            f"-I{ROOT / c.HERE}",
            "-Werror=implicit-function-declaration",
            "-fno-trapping-math",  # else a selection of floats becomes vectors with AVX-512 alone
            *(["-DSLOW"] if slow else []),
        )
        try:
            return ctypes.CDLL(str(c.compiled((str(self.source(slow)),), *flags)))
        except ladder_rung.Unavailable as error:
            raise Wrong(f"it does not compile: {str(error).split(': ', 1)[1]}") from None
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
                raise Unavailable(f"{error.filename} cannot be written; set {c.CACHE} to a folder that can") from None
            # a function that is declared and nowhere defined
            raise Wrong(f"it does not compile: {str(error).split(': ', 1)[-1]}") from None

    def source(self, slow: bool) -> Path:
        """The file to compile: the exercise's, or a copy with other lines in the reader's place."""
        if self.lines is None or slow:
            return self.path
        text, count = HOLE.subn(lambda hole: f"{hole[1]}{self.lines}\n", self.text())
        assert count == 1, f"{self.path.name} has {count} places for the reader's lines"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        path = Path(os.environ.get(c.CACHE) or ROOT / "build/ladder") / f"{self.path.stem}_{digest}.c"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace")

    def not_written(self) -> NotImplementedError:
        return NotImplementedError(
            f"the lines between #else and #endif of {self.path.name}, "
            "in the place of the one with `yours`, comment and all"
        )

    def attention(self, q, k, v, causal: bool, *, slow: bool = False):
        """out and lse, in arrays that held NaN and lie between NaN; raises Wrong if anything else was written."""
        arrays = [_between_nans(x) for x in (q, k, v)]
        out, lse = (_between_nans(np.full(shape, np.nan)) for shape in (q.shape, (q.shape[0], q.shape[2], q.shape[1])))
        before = [whole.tobytes() for whole, _ in arrays]
        shape = c.Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], q.shape[3], causal)
        self.call(slow, *(inner for _, inner in (*arrays, out, lse)), shape)
        for name, (whole, _), old in zip("qkv", arrays, before, strict=True):
            require(whole.tobytes() == old, f"it writes into {name}, or beside it")
        for name, (whole, inner) in (("out", out), ("lse", lse)):
            edges = np.concatenate([whole[:GUARD], whole[GUARD + inner.size :]])
            require(np.isnan(edges).all(), f"it writes outside of {name}")
        return out[1], lse[1]

    def call(self, slow: bool, *arguments):
        library = self.library(slow)
        pointers = [ctypes.c_void_p(x.ctypes.data) if isinstance(x, np.ndarray) else ctypes.byref(x) for x in arguments]
        code = library.attention_forward(*pointers)
        if code == 77:
            raise self.not_written()
        if code in (79, 80):
            item, count = (ctypes.c_int.in_dll(library, name).value for name in ("wrong_item", "wrong_count"))
            raise Wrong(
                f"item {item} was computed {count} times" if code == 79 else f"there is no item {item} of {count}"
            )
        require(code == 0, f"it {FAULTS.get(code, f'returned {code}')}")


def _before_a_page(x: np.ndarray):
    """A copy that ends where memory begins which nobody may read."""
    room = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(whole.ctypes.data + room), ctypes.c_size_t(mmap.PAGESIZE), 0)
    inner = whole[room - x.nbytes : room].view(np.float32).reshape(x.shape)
    inner[...] = x
    return inner


def _between_nans(x: np.ndarray):
    whole = np.full(x.size + 2 * GUARD, np.nan, np.float32)
    inner = whole[GUARD : GUARD + x.size].reshape(x.shape)
    inner[...] = x
    return whole, inner


class CudaKernel(Kernel):
    """The same in CUDA: a file with a function `launch`, which cuda_tools.cuh calls. Blocks run on the CPU by
    cuda_on_cpu.h, whose threads take turns in random order; `on_gpu` is the same kernel on a GPU that has `needs`, its
    compute capability. Kernels that use wgmma run on a GPU alone."""

    needs = (8, 0)
    place = "cpu"

    def __init__(self, path: Path, lines: str | None = None):
        super().__init__(path, lines)
        self.calls: list[tuple] = []  # on the CPU

    @functools.cache  # noqa: B019
    def library(self, slow: bool = False) -> ctypes.CDLL:
        text = self.text()
        if self.lines is None and not slow and "yours: kNotWritten" in text:
            raise self.not_written()
        if self.lines is not None:
            text = HOLE.sub(lambda hole: f"{hole[1]}{self.lines}\n", text)
        with tempfile.TemporaryDirectory() as folder:
            source, made = Path(folder) / self.path.name, Path(folder) / "kernel.so"
            source.write_text(_for_cpu(text) if self.on_cpu() else text, encoding="utf-8")
            done = subprocess.run(
                self.command(source, made, slow), capture_output=True, encoding="utf-8", errors="replace"
            )
            if (fatal := done.stderr.partition("nvcc fatal")[2]) and done.returncode:
                raise Unavailable(f"nvcc cannot make code for this GPU{fatal.rstrip()}")
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            part = " with cuda_on_cpu.h, which has a part of CUDA" * self.on_cpu()
            said = (errors or [done.stderr])[0].replace(folder, "")
            require(done.returncode == 0, f"it does not compile{part}: {said}")
            return ctypes.CDLL(str(made))

    def command(self, source: Path, made: Path, slow: bool = False) -> list[str]:
        more = [*(["-DSLOW"] if slow else []), f"-I{Path(__file__).parent}", f"-I{ROOT / 'cuda'}", "-o", str(made)]
        if self.on_cpu():
            compiler = shutil.which(os.environ.get("CXX") or "c++")
            if compiler is None:
                raise Unavailable("there is no C++ compiler")
            # without optimisation: else reads whose result is not used go away, and with them reads outside
            return [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", *more, "-x", "c++", str(source)]
        if (nvcc := self.nvcc()) is None:
            raise Unavailable("there is no nvcc")
        major, minor = self.gpu() or self.needs
        name = f"{10 * major + minor}{'a' if major == 9 else ''}"
        kind = ["-shared", "-Xcompiler", "-fPIC"] if made.suffix == ".so" else ["-cubin"]
        flags = ["-std=c++17", "-O3", "-gencode", f"arch=compute_{name},code=sm_{name}", "-diag-suppress=177,550"]
        return [nvcc, *kind, *flags, *more, str(source)]

    def gpu(self) -> tuple[int, int] | None:
        """The compute capability of the first GPU, if it is at least `needs`."""
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
        major, minor = ctypes.c_int(), ctypes.c_int()
        if driver.cuInit(0) or any(
            driver.cuDeviceGetAttribute(ctypes.byref(x), at, 0) for x, at in ((major, 75), (minor, 76))
        ):
            return None
        here = major.value, minor.value
        if not self.for_cpu() and here[0] != 9:  # of later GPUs only Hopper has wgmma
            return None
        return here if here >= self.needs else None

    def on_cpu(self) -> bool:
        return self.place == "cpu" and self.for_cpu()

    def for_cpu(self) -> bool:
        return "wgmma.cuh" not in self.text()

    def on_gpu(self) -> CudaKernel | None:
        """The kernel that ran on the CPU, for a GPU: None without one."""
        if not self.on_cpu() or self.gpu() is None or self.nvcc() is None:
            return None
        there = type(self)(self.path, self.lines)
        there.place, there.needs, there.strict = "gpu", self.needs, self.strict
        return there

    @staticmethod
    def nvcc() -> str | None:
        return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")

    def run(self, inputs, shapes, sizes=(), *, slow: bool = False, launches: int = 1):
        """Arrays of the shapes, and the best time in ms. Raises Wrong if anything else was written, or on an error."""
        library = self.library(slow)
        if not self.on_cpu() and self.gpu() is None:
            raise Unavailable(
                f"to run it, this exercise needs a GPU of compute capability {'.'.join(map(str, self.needs))}"
            )
        given = [np.ascontiguousarray(x) for x in inputs]
        made = [np.empty(shape, dtype) for shape, dtype in shapes]
        if self.on_cpu() and not slow:
            self.calls.append((given, made, sizes))
        ms = ctypes.c_float()
        code = self.launch(library, given, made, sizes, launches, ms)
        require(code == 0, FAULTS.get(code, f"CUDA error {code - 1000}: an address outside, or a launch that failed"))
        return made, ms.value

    @staticmethod
    def launch(library, given, made, sizes, launches, ms) -> int:
        def both(arrays):
            addresses = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
            return addresses, (ctypes.c_size_t * len(arrays))(*(x.nbytes for x in arrays)), len(arrays)

        return library.run(*both(given), *both(made), (ctypes.c_int * 8)(*sizes), launches, ctypes.byref(ms))

    def counted(self, name: str) -> int:
        """What the stand-in for CUDA has counted: a variable of cuda_on_cpu.h."""
        return ctypes.c_uint32.in_dll(self.library(False), name).value

    def _at_the_end(self, given, made, sizes) -> None:
        library = self.library(False)
        ctypes.c_int.in_dll(library, "guard_after").value = 0
        self.launch(library, given, made, sizes, 1, ctypes.c_float())

    def race(self, inputs, shapes, sizes, least: float, moved: int = 0) -> None:
        """Times the slow lines and the reader's in turns. On a CPU it makes the calls of before once more, with arrays
        that end where memory begins which nobody may read, and says that time needs a GPU."""
        if self.on_cpu():
            for call in self.calls:
                said = apart(lambda call=call: str(self._at_the_end(*call)))
                far = f"behind its inputs it reads memory that is not theirs, with the sizes {call[2]}"
                require("ended the process by" not in said, f"right, but it reads outside of its arrays: {far}")
            self.said = "right, run on the CPU thread by thread. How fast it is can be seen on a GPU alone."
            return
        best, results = {True: np.inf, False: np.inf}, {}
        for _ in range(3):
            for slow in best:
                results[slow], took = self.run(inputs, shapes, sizes, slow=slow, launches=10)
                best[slow] = min(best[slow], took)
        _same(results)
        ratio = best[True] / best[False]
        self.said = f"{1000 * best[False]:.1f} us, {ratio:.2f} times the slow lines" + (
            f", {moved / best[False] / 1e6:.0f} GB/s" if moved else ""
        )
        require(ratio >= least * self.strict, f"right, but {self.said}; {least:g} times is enough")


def _for_cpu(text: str) -> str:
    """A CUDA file as C++: without the headers of CUDA and of the library, and with launches as calls."""
    text = re.sub(r'^#include [<"](?:device/|math_constants).*\n', "", text, flags=re.MULTILINE)
    text = re.sub(r"__shared__ (alignas\(\d+\))", r"\1 __shared__", text)
    call = r"emulated(\2, \3, [=] { \1(\4); });"
    return re.sub(r"(\w+)<<<(.+?), (.+?)>>>\((.*?)\);", call, text, flags=re.DOTALL)


def bfloat16(x) -> tuple[np.ndarray, np.ndarray]:
    """Numbers rounded to bfloat16: their bits, and their values."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return bits.astype(np.uint16), (bits << 16).astype(np.uint32).view(np.float32)


# ---- right ----


def standard(q, k, v, causal: bool, dtype):
    """The formula in one precision: out, lse."""
    q, k, v = (x.astype(dtype).transpose(0, 2, 1, 3) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    s = q @ k.swapaxes(2, 3) * dtype(q.shape[3] ** -0.5)
    if causal:
        i, j = np.indices(s.shape[2:])
        s[..., j > i + s.shape[3] - s.shape[2]] = -np.inf
    top = s.max(3, keepdims=True)
    p = np.exp(s - np.where(np.isneginf(top), 0, top))
    total = p.sum(3, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.where(np.isneginf(top), 0, top) + np.log(total))[..., 0]
    return (p @ v / np.where(total == 0, 1, total)).transpose(0, 2, 1, 3), lse


def inputs(batch, seqlen_q, seqlen_k, heads, heads_k, headdim, kind="random", seed=14):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((batch, n, h, headdim)).astype(np.float32)
               for n, h in ((seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k)))  # fmt: skip
    if kind == "huge":
        q *= 200
    if kind in ("rising", "falling"):
        q[...] = np.abs(q)
        ramp = np.linspace(-1, 1, seqlen_k, dtype=np.float32) * (1 if kind == "rising" else -1)
        k[...] = (1.5 if kind == "rising" else 60) * ramp[None, :, None, None]
    if kind == "low":  # every score far below 0
        q[...], k[...] = np.abs(q), -60 * np.abs(k)
    return q, k, v


CASES = (  # name, sizes, causal, kind of input; what tells one idea from another comes first
    ("one tile of everything", (1, 32, 64, 1, 1, 32), False, "random"),
    ("scores beyond 88", (1, 32, 64, 1, 1, 32), False, "huge"),
    ("scores far below 0", (1, 32, 64, 1, 1, 32), False, "low"),
    ("maxima that rise", (1, 32, 256, 1, 1, 32), False, "rising"),
    ("maxima that fall", (1, 32, 256, 1, 1, 32), False, "falling"),
    ("one query, one key", (1, 1, 1, 1, 1, 32), False, "random"),
    ("ragged lengths", (1, 77, 203, 1, 1, 48), False, "random"),
    ("grouped heads", (2, 33, 70, 4, 2, 32), False, "random"),
    ("a causal mask", (1, 77, 203, 2, 1, 32), True, "random"),
    ("a causal mask on a whole number of tiles", (1, 64, 128, 1, 1, 32), True, "random"),
    ("many keys", (1, 2, 70001, 1, 1, 16), False, "random"),
    ("rows that see no key", (1, 130, 35, 1, 1, 32), True, "random"),
)


def check(kernel: Kernel) -> None:
    """Every case against float64, with a budget of four times what float32 by the formula is off; twice."""
    kernel.library()
    for name, sizes, causal, kind in CASES:
        q, k, v = inputs(*sizes, kind)
        try:
            out, lse = kernel.attention(q, k, v, causal)
            exact, plain = (standard(q, k, v, causal, dtype) for dtype in (np.float64, np.float32))
            _compare("lse[batch, head, row]", lse, exact[1], plain[1])
            _compare("out[batch, row, head, dim]", out, exact[0], plain[0], "lse is right everywhere; ")
            again = kernel.attention(q, k, v, causal)
            require(all(x.tobytes() == y.tobytes() for x, y in zip((out, lse), again, strict=True)),
                    "a second call with the same inputs gives other bits")  # fmt: skip
        except Wrong as error:
            batch, rows, keys, heads, heads_k, headdim = sizes
            shape = f"{rows} queries, {keys} keys, {heads}/{heads_k} heads of {headdim}, batch {batch}"
            raise Wrong(f"{name} ({shape}): {error}") from None
    for name, sizes, causal, kind in CASES:
        if name in ("one query, one key", "ragged lengths"):  # what is read too far and not used gives no NaN
            said = apart(lambda sizes=sizes, causal=causal, kind=kind: str(_at_the_end(kernel, sizes, causal, kind)))
            far = "behind q, k and v it reads memory that is not theirs"
            require("ended the process by" not in said, f"right, but it reads outside of its arrays. {name}: {far}")


def _at_the_end(kernel: Kernel, sizes, causal: bool, kind: str) -> None:
    arrays = [_before_a_page(x) for x in inputs(*sizes, kind)]
    arrays += [np.empty(arrays[0].shape, np.float32), np.empty((sizes[0], sizes[3], sizes[1]), np.float32)]
    kernel.call(False, *arrays, c.Shape(*sizes, causal))


def _same(results: dict[bool, list[np.ndarray]]) -> None:
    """Compares what timed calls returned, of the slow lines and of the reader's: they are longer than checked ones."""
    for number, (want, got) in enumerate(zip(results[True], results[False], strict=True)):
        off = ~np.isclose(got, want, rtol=1e-3, atol=1e-4)
        if off.any():
            at = tuple(int(i) for i in np.argwhere(off)[0])
            raise Wrong(
                f"the timed call, output {number}: {int(off.sum())} of {off.size} are wrong, the first at {at}: "
                f"got {got[at]:.6g}, expected {want[at]:.6g}"
            )


def _compare(what, got, exact, plain, before=""):
    wrong = np.isnan(got) | (np.isneginf(got) != np.isneginf(exact))
    known = ~wrong & np.isfinite(exact)
    off = np.abs(np.where(known, got, 0) - np.where(known, exact, 0))
    plain_off = np.abs(np.where(known, plain, 0) - np.where(known, exact, 0)).max(initial=0)
    wrong |= off > 4 * plain_off + 2e-5
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        count = f"{int(wrong.sum())} of {wrong.size} are wrong"
        raise Wrong(f"{before}{what}: {count}, the first at {at}: got {got[at]:.6g}, expected {exact[at]:.6g}")


# ---- fast ----


@functools.cache
def machine() -> dict[str, float]:
    """Of one core: multiply-adds a second times 2, bytes a second from memory, both measured, and bytes of a vector."""
    library = ctypes.CDLL(str(c.compiled((str(Path(__file__).with_name("machine.c")),))))
    for name in ("operations_a_second", "bytes_a_second"):
        getattr(library, name).restype = ctypes.c_double
    return {
        "operations": library.operations_a_second(),
        "bytes": library.bytes_a_second(),
        "vector": library.bytes_of_a_vector(),
    }


def cores() -> int:
    """That this process may use: a container may have less time than its machine has cores."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
    except (OSError, ValueError):
        return count


def race(kernel: Kernel, sizes, causal: bool, least: float, threads: int = 1, seconds: float = 3.0) -> None:
    """Times the slow lines and the reader's in turns until the reader's are `least` times as fast, or time is up."""
    arrays = [*inputs(*sizes)]
    made = [np.empty(arrays[0].shape, np.float32), np.empty((sizes[0], sizes[3], sizes[1]), np.float32)]
    shape = c.Shape(*sizes, causal)
    least *= kernel.strict
    best, results = {True: np.inf, False: np.inf}, {}
    end = time.monotonic() + seconds
    turns = 0
    while turns < 3 or (best[True] < least * best[False] and time.monotonic() < end):
        arrays[0] *= np.float32(0.99)  # other inputs in each turn: nothing can be kept from the last one
        for slow in (True, False):
            for x in made:
                x.fill(np.nan)
            start = time.perf_counter()
            kernel.call(slow, *arrays, *made, shape)
            best[slow] = min(best[slow], time.perf_counter() - start)
            results[slow] = [x.copy() for x in made]
        _same(results)
        turns += 1
    kernel.said = report(sizes, causal, best[True], best[False], threads)
    ratio = best[True] / best[False]
    said = f"right, but {ratio:.2f} times as fast as the slow lines; {least:g} times is enough\n    {kernel.said}"
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    if busy > cores() - 0.5:
        said += f"\n    The machine is busy: a load of {busy:.1f} on {cores()} cores. Try again when it is not."
    require(ratio >= least, said)


def report(sizes, causal: bool, slow: float, yours: float, threads: int) -> str:
    batch, rows, keys, heads, heads_k, headdim = sizes
    operations = 4 * batch * heads * rows * keys * headdim / (2 if causal else 1)
    moved = 4 * batch * headdim * (2 * heads * rows + 2 * heads_k * keys)
    peak, bandwidth = threads * machine()["operations"], machine()["bytes"]
    roof = min(peak, operations / moved * bandwidth)
    what = "multiply-adds" if roof == peak else "memory"
    return (
        f"{operations / yours / 1e9:.1f} GFLOP/s, {slow / yours:.2f} times the slow lines; "
        f"{operations / moved:.0f} operations a byte, so {what} set the roof: {roof / 1e9:.0f} GFLOP/s on "
        f"{threads} core{'s' * (threads > 1)}. You reach {100 * operations / yours / roof:.0f} %"
    )
