"""The CUDA exercises: solutions and empty places compile. All that need no Hopper run on the CPU, then on a GPU if
there is one: judges accept the solution and the slow lines, and refuse mistakes."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import NO_CUDA, ROOT

FOLDER = ROOT / "docs/learn/exercises"
if not FOLDER.is_dir() or not (ROOT / "cuda").is_dir():
    pytest.skip("docs/learn or the kernels are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import judging  # noqa: E402
import kernels  # noqa: E402

SOLUTIONS = FOLDER.parent / "solutions"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.cu"))


class Slow(kernels.CudaKernel):
    """The slow lines in the place of the reader's."""

    def run(self, *arguments, slow=False, **more):
        return super().run(*arguments, slow=True, **more)


def kernel_of(name, lines=None, kind=kernels.CudaKernel):
    kernel = kind(FOLDER / f"{name}.cu", lines or (SOLUTIONS / f"{name}.cu").read_text())
    kernel.strict = 0
    return kernel


def judged(name, kernel):
    """Returns what the judge says."""
    if not NO_CUDA:  # CUDA does not survive the fork of a process that other tests have used it in
        about = {"name": name, "lines": kernel.lines, "slow": isinstance(kernel, Slow)}
        command = [sys.executable, "-c", IN_A_PROCESS, str(FOLDER)]
        done = subprocess.run(command, input=json.dumps(about), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()
    judge = judging.load(FOLDER / f"{name}.py").judge
    return judging.apart(lambda: judging.verdict(judge, {"kernel": kernel}))


IN_A_PROCESS = """
import json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import judging, kernels
class Slow(kernels.CudaKernel):
    def run(self, *arguments, slow=False, **more):
        return super().run(*arguments, slow=True, **more)
folder, about = pathlib.Path(sys.argv[1]), json.load(sys.stdin)
kind = Slow if about["slow"] else kernels.CudaKernel
kernel = kind(folder / (about["name"] + ".cu"), about["lines"])
kernel.strict = 0
judge = judging.load(folder / (about["name"] + ".py")).judge
print(judging.apart(lambda: judging.verdict(judge, {"kernel": kernel})))
"""


def nvcc(source, made, slow=False):
    kernel = kernel_of("25_cuda_descriptor")  # which is never for a CPU
    kernel.needs = (9, 0)
    try:
        return kernel.command(source, made, slow)
    except judging.Unavailable as error:
        pytest.skip(str(error))


COMPILED = [(name, lines) for name in NAMES for lines in ("solution", "empty")] + [("25_cuda_descriptor", "slow")]


@pytest.mark.parametrize("name, lines", COMPILED)
def test_it_compiles(name, lines, tmp_path):
    text = (FOLDER / f"{name}.cu").read_text()
    if lines == "solution":
        solution = (SOLUTIONS / f"{name}.cu").read_text()
        text, count = kernels.HOLE.subn(lambda hole: f"{hole[1]}{solution}\n", text)
        assert count == 1 and "kNotWritten" not in text
    source = tmp_path / f"{name}.cu"
    source.write_text(text)
    done = subprocess.run(nvcc(source, tmp_path / "kernel.cubin", slow=lines == "slow"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_bits_of_a_descriptor():
    exercise = judging.load(FOLDER / "25_cuda_descriptor.py")
    exercise.look_at(lambda tile, step: (tile + 32 * step) >> 4 | 64 << 32 | 1 << 62 | 1 << 16)
    with pytest.raises(judging.Wrong, match="tile at 0, step 1: the address / 16 is 1, expected 2"):
        exercise.look_at(lambda tile, step: (tile + 16 * step) >> 4 | 64 << 32 | 1 << 62)
    with pytest.raises(judging.Wrong, match="tile at 0, step 0: the swizzle is 0, expected 1"):
        exercise.look_at(lambda tile, step: (tile + 32 * step) >> 4 | 64 << 32)


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_that_is_not_written_says_so(name):
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    lines = f"the lines between #else and #endif of {name}.cu, in the place of the one with `yours`, comment and all"
    assert done.stdout == f"{name}: not written yet: {lines}\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_judge_accepts_the_solution(name):
    said = judged(name, kernel_of(name))
    if said.startswith("skipped"):
        assert name == "25_cuda_descriptor"
        pytest.skip(said)
    assert said == "passed"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "25_cuda_descriptor"])
def test_the_slow_lines_are_right(name):
    said = judged(name, kernel_of(name, kind=Slow))
    assert said == "passed" or said.startswith(("wrong: right, but each copy is", "wrong: right, but the whole block"))


SLIPS = [  # exercise, what the solution has, what a reader writes first, what the judge says
    ("22_cuda_swizzle", "piece ^ row % 8", "piece & row % 8", "fragments[tile, lane, register, half]: "),
    ("22_cuda_swizzle", "16 * (piece ^ row % 8)", "16 * (piece + row % 8)", "outside of the shared memory"),
    ("23_cuda_pipeline", "    __syncthreads();", "    ", "tiles: y[block, thread]"),
    ("23_cuda_pipeline", "kStages - 2", "kStages - 1", "1 tiles: y[block, thread]"),
    ("23_cuda_pipeline", "next = tile + kStages - 1", "next = tile + kStages", "tiles: y[block, thread]"),
    ("22_cuda_swizzle", "piece ^ row % 8", "piece", "wants the banks of another"),
    ("24_cuda_phase", "wait(empty[slot], phase ^ 1)", "wait(empty[slot], phase)", "a wait has lasted a second"),
    ("24_cuda_phase", "wait(full[slot], phase)", "wait(full[slot], phase ^ 1)", "a wait has lasted a second"),
    ("24_cuda_phase", "fa::mbarrier_arrive(empty[slot])", "", "a wait has lasted a second"),
    ("24_cuda_phase", "consume(slots[slot]", "consume(slots[0]", "tiles: y[tile, lane]"),
    ("26_cuda_merge", "if (w == 0) continue;", "", "some without keys: out[row, d]"),
    ("26_cuda_merge", "lane < pieces ? lses[lane * rows + row] : -CUDART_INF_F", "lses[lane % pieces * rows + row]",
     "lse[row]"),
    ("26_cuda_merge", "expf(mine - top)", "expf(mine)", "lse[row]"),
    ("26_cuda_merge", "lse[row] = sum", "lse[row + 1] = sum", "it writes outside of its arrays"),
    ("26_cuda_merge", "const float mine = lane < pieces ? lses[lane * rows + row] : -CUDART_INF_F",
     "const float read = lses[lane * rows + row], mine = lane < pieces ? read : -CUDART_INF_F",
     "reads outside of its arrays: behind its inputs"),
    ("26_cuda_merge", "float4 total = {0, 0, 0, 0};",
     "__shared__ float4 totals[128]; float4& total = totals[threadIdx.x];",
     "1 pieces, 1 rows: out[row, d]"),
    ("26_cuda_merge", "float4 total = {0, 0, 0, 0};", "float4 total;", "1 pieces, 1 rows: out[row, d]: 128 of 128"),
    ("22_cuda_swizzle", "128 * row + 16 * (piece ^ row % 8)", "144 * row + 16 * piece", "outside of the shared memory"),
    ("23_cuda_pipeline", "% kStages]", "% (kStages + 1)]", "outside of the shared memory"),
    ("26_cuda_merge", "total.x += w", "totals.x += w", "it does not compile"),
]  # fmt: skip


@pytest.mark.parametrize("name, old, new, said", SLIPS, ids=[f"{s[0]}-{i}" for i, s in enumerate(SLIPS)])
def test_the_judge_refuses_wrong_lines(name, old, new, said):
    lines = (SOLUTIONS / f"{name}.cu").read_text()
    assert old in lines
    text = judged(name, kernel_of(name, lines.replace(old, new)))
    assert (
        text.startswith("wrong: ")
        and said in text
        and ("\n    idea: " in text or "compile" in text or "writes" in text)
    )


@pytest.mark.parametrize(
    "act, barrier", [("produce(slots[slot], x, tile)", "full"), ("consume(slots[slot], y, tile)", "empty")]
)
def test_an_arrival_before_the_work_is_seen(act, barrier):
    lines = (SOLUTIONS / "24_cuda_phase.cu").read_text()
    arrive = f"fa::mbarrier_arrive({barrier}[slot])"
    assert act in lines and arrive in lines
    swapped = lines.replace(act, "@").replace(arrive, act).replace("@", arrive)
    kernel = kernel_of("24_cuda_phase", swapped)
    assert "tiles: y[tile, lane]" in judged("24_cuda_phase", kernel)


SLOW_LINES = [
    ("23_cuda_pipeline", "right, but each copy is waited for before the next one starts"),
    ("24_cuda_phase", "right, but the whole block meets 2036 times"),
]


@pytest.mark.parametrize("name, said", SLOW_LINES, ids=[name for name, _ in SLOW_LINES])
def test_slow_lines_in_the_place_of_the_reader_are_refused_on_the_cpu(name, said):
    slow = re.search(r"#ifdef SLOW\n(.*?)#else", (FOLDER / f"{name}.cu").read_text(), re.DOTALL)[1]
    text = judged(name, kernel_of(name, slow))
    assert text.startswith(f"wrong: {said}") and "\n    idea: " in text


RIGHT = [
    ("22_cuda_swizzle", "return 128 * row + 16 * (piece ^ row % 8);", "return 128 * row + (piece + row & 7) * 16;"),
    ("23_cuda_pipeline", "kStages - 2>();", "0>();"),
    ("24_cuda_phase", "const int slot = tile % kSlots, phase = tile / kSlots % 2;",
     "const int slot = tile & 1; const bool phase = tile & 2;"),
]  # fmt: skip


@pytest.mark.parametrize("name, old, new", RIGHT, ids=[name for name, *_ in RIGHT])
def test_right_lines_of_another_style_pass_on_the_cpu(name, old, new, monkeypatch):
    monkeypatch.setattr(kernels.CudaKernel, "on_gpu", lambda self: None)
    lines = (SOLUTIONS / f"{name}.cu").read_text()
    assert old in lines
    judge = judging.load(FOLDER / f"{name}.py").judge
    kernel = kernel_of(name, lines.replace(old, new).replace("phase ^ 1", "!phase"))
    assert judging.apart(lambda: judging.verdict(judge, {"kernel": kernel})) == "passed"


def test_a_gpu_that_nvcc_cannot_compile_for_leaves_the_verdict_of_the_cpu(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho \"nvcc fatal   : Unsupported gpu architecture 'compute_120'\" >&2\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(kernels.CudaKernel, "gpu", lambda self: (12, 0))
    monkeypatch.setattr(kernels.CudaKernel, "nvcc", staticmethod(lambda: str(nvcc)))
    judge = judging.load(FOLDER / "26_cuda_merge.py").judge
    kernel = kernel_of("26_cuda_merge")
    assert judging.verdict(judge, {"kernel": kernel}) == "passed" and kernel.said.startswith("right, run on the CPU")
    with pytest.raises(judging.Unavailable, match="nvcc cannot make code for this GPU   : Unsupported gpu arch"):
        kernel.on_gpu().library()


@pytest.mark.parametrize("name, there", [("24_cuda_phase", (10, 0)), ("25_cuda_descriptor", None)])
def test_wgmma_needs_hopper_and_nothing_later(name, there, monkeypatch):
    class Driver:
        def cuInit(self, _):  # noqa: N802
            return 0

        def cuDeviceGetAttribute(self, at, which, _):  # noqa: N802
            at._obj.value = {75: 10, 76: 0}[which]
            return 0

    monkeypatch.setattr(kernels.ctypes, "CDLL", lambda _: Driver())
    kernel = kernel_of(name)
    kernel.needs = (9, 0)
    assert kernel.gpu() == there


def test_functions_that_learners_reach_for():
    lines = (SOLUTIONS / "26_cuda_merge.cu").read_text()
    old = "if (w == 0) continue;"
    new = 'if (!__any_sync(~0u, w > 0)) continue; __threadfence_block(); assert(__ballot_sync(~0u, 1)); printf("");'
    assert old in lines and "#include <cassert>" in (FOLDER / "cuda_on_cpu.h").read_text()
    kernel = kernel_of("26_cuda_merge", lines.replace(old, new))
    judge = judging.load(FOLDER / "26_cuda_merge.py").judge
    assert judging.apart(lambda: judging._verdict(judge, {"kernel": kernel})) == "passed"
    said = judging._verdict(judge, {"kernel": kernel_of("26_cuda_merge", "__match_all_sync();")})
    assert said.startswith("wrong: it does not compile with cuda_on_cpu.h, which has a part of CUDA: ")


def test_a_merge_of_another_style_passes():
    lines = """
        const int row = (blockIdx.x * blockDim.x + threadIdx.x) / warpSize, lane = threadIdx.x % warpSize;
        if (row >= rows) return;
        __shared__ float weights[4][32];
        float (&mine)[32] = weights[threadIdx.x / 32];
        float top = lane < pieces ? __ldg(lses + lane * rows + row) : -CUDART_INF_F;
        const float own = top;
        for (int by = 16; by; by /= 2) top = fmaxf(top, __shfl_down_sync(0xffffffff, top, by));
        top = __shfl_sync(0xffffffff, top, 0);
        mine[lane] = isinf(own) ? 0.0f : __expf(own - top);
        __syncwarp();
        float sum = 0;
        for (int p = 0; p < min(pieces, 32); ++p) sum += mine[p];
        for (int d = lane; d < kDim; d += 32) {
            float total = 0;
            for (int p = pieces - 1; p >= 0; --p)
                if (mine[p] > 0) total += mine[p] * outs[((size_t)p * rows + row) * kDim + d];
            out[(size_t)row * kDim + d] = sum > 0 ? total / sum : 0;
        }
        if (lane == 0) lse[row] = sum > 0 ? top + __logf(sum) : -CUDART_INF_F;
    """
    assert judged("26_cuda_merge", kernel_of("26_cuda_merge", lines)) == "passed"


# ---- a stand-in for the exercise that needs Hopper ----


class Stand(kernels.CudaKernel):
    """A kernel in NumPy: function(inputs) -> outputs."""

    def __init__(self, function):
        self.function, self.strict, self.said = function, 0, None

    def run(self, inputs, shapes, sizes=(), **_):
        made = self.function([x.copy() for x in inputs])
        assert [x.shape for x in made] == [shape for shape, _ in shapes]
        return [x.astype(dtype) for x, (_, dtype) in zip(made, shapes, strict=True)], 1.0

    def race(self, *_):
        """Times are the GPU's."""

    def on_cpu(self):
        return False

    def library(self, slow=False):
        def bits(tile, step):
            return (tile.value + 32 * step) >> 4 | 64 << 32 | 1 << 62

        return SimpleNamespace(descriptor_on_host=bits)


def product(swizzled):
    def kernel(inputs):
        a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in inputs)
        if not swizzled:  # the tensor cores read the pieces of a row in another order than they were stored in
            a = np.stack([row.reshape(8, 8)[np.arange(8) ^ n % 8].ravel() for n, row in enumerate(a)])
        return [a @ b.T]

    return kernel


@pytest.mark.parametrize("swizzled, said", [(True, "passed"), (False, "wrong: C[row, column]: ")])
def test_the_judge_of_a_product(swizzled, said):
    judge = judging.load(FOLDER / "25_cuda_descriptor.py").judge
    text = judging.verdict(judge, {"kernel": Stand(product(swizzled))})
    assert text.startswith(said) and (swizzled or "\n    idea: " in text)


class Elsewhere(Stand):
    """The product on the CPU, if it compiles there; on a GPU that of `right_there`."""

    def __init__(self, right, compiles=True):
        super().__init__(product(swizzled=right))
        self.compiles = compiles

    def library(self, slow=False):
        judging.require(self.compiles, "it does not compile: no such function")
        return super().library(slow)

    def on_gpu(self):
        there = Elsewhere(self.right_there)
        there.said = "on a GPU"
        return there


@pytest.mark.parametrize("compiles", (True, False))
@pytest.mark.parametrize("right, said", [(True, "passed"), (False, "wrong: C[row, column]: ")])
def test_what_passes_on_the_cpu_is_judged_on_the_gpu(right, said, compiles):
    judge = judging.load(FOLDER / "25_cuda_descriptor.py").judge
    kernel = Elsewhere(True, compiles)
    kernel.right_there = right
    assert judging.verdict(judge, {"kernel": kernel}).startswith(said)
    assert kernel.said == "on a GPU"


def test_what_is_wrong_on_the_cpu_does_not_reach_the_gpu():
    judge = judging.load(FOLDER / "25_cuda_descriptor.py").judge
    kernel = Elsewhere(False)
    kernel.right_there = True
    assert judging.verdict(judge, {"kernel": kernel}).startswith("wrong: C[row, column]: ")
    assert kernel.said is None


def test_the_same_kernel_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels.CudaKernel, "gpu", lambda self: (9, 0))
    monkeypatch.setattr(kernels.CudaKernel, "nvcc", staticmethod(lambda: "nvcc"))
    kernel = kernel_of("24_cuda_phase")
    kernel.needs = (9, 0)
    there = kernel.on_gpu()
    assert kernel.on_cpu() and not there.on_cpu() and there.on_gpu() is None
    assert (there.lines, there.needs, there.strict) == (kernel.lines, (9, 0), 0)
    assert there.command("x.cu", FOLDER / "x.so")[0] == "nvcc" and kernel.command("x.cu", "x.so")[0] != "nvcc"
    assert kernel_of("25_cuda_descriptor").on_gpu() is None


def test_every_cuda_exercise_has_a_mistake_that_its_judge_refuses():
    assert {name for name, *_ in SLIPS} | {"25_cuda_descriptor"} == {*NAMES}


def test_bfloat16_rounds_to_nearest_even():
    bits, values = kernels.bfloat16([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -2.5])
    assert bits.tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020] and values.tolist() == [1.0, 1.0, 1 + 2**-6, -2.5]


def test_a_right_kernel_that_is_too_slow_is_refused():
    kernel = Stand(lambda inputs: [])
    kernel.run = lambda *_, slow, **more: ([], 0.3 if slow else 0.2)
    kernel.strict = 1
    with pytest.raises(
        judging.Wrong, match=r"right, but 200.0 us, 1.50 times the slow lines, 5 GB/s; 2 times is enough"
    ):
        kernels.CudaKernel.race(kernel, [], [], (), 2, moved=1_000_000)
    kernels.CudaKernel.race(kernel, [], [], (), 1.4)
    assert kernel.said == "200.0 us, 1.50 times the slow lines"
