"""The CUDA exercises: solutions, slow lines and empty places compile; judges refuse mistakes of stand-ins in NumPy; and
on a GPU the solutions pass."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ROOT

FOLDER = ROOT / "docs/learn/exercises"
if not FOLDER.is_dir() or not (ROOT / "cuda").is_dir():
    pytest.skip("docs/learn or the kernels are not beside the tests", allow_module_level=True)
sys.path.insert(0, str(FOLDER))

import judging  # noqa: E402
import kernels  # noqa: E402

SOLUTIONS = FOLDER.parent / "solutions"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.cu"))


def nvcc(source, made, arch=(9, 0), slow=False):
    try:
        return kernels.CudaKernel.command(source, made, arch, slow)
    except judging.Unavailable as error:
        pytest.skip(str(error))


def kernel_of(name):
    return kernels.CudaKernel(FOLDER / f"{name}.cu", (SOLUTIONS / f"{name}.cu").read_text())


@pytest.mark.parametrize("lines", ["solution", "slow", "empty"])
@pytest.mark.parametrize("name", NAMES)
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


def test_the_judge_of_the_descriptor_reads_its_bits_without_a_gpu():
    nvcc(FOLDER / "x.cu", FOLDER / "x.so")
    exercise = judging.load(FOLDER / "25_cuda_descriptor.py")
    said = judging.verdict(exercise.judge, {"kernel": kernel_of("25_cuda_descriptor")})
    assert said == "passed" or said.startswith("skipped: to run it, this exercise needs")
    with pytest.raises(judging.Wrong, match="tile at 0, step 1: the address / 16 is 1, expected 2"):
        exercise.look_at(lambda tile, step: (tile + 16 * step) >> 4 | 64 << 32 | 1 << 62)
    with pytest.raises(judging.Wrong, match="tile at 0, step 0: the swizzle is 0, expected 1"):
        exercise.look_at(lambda tile, step: (tile + 32 * step) >> 4 | 64 << 32)


@pytest.mark.parametrize("name", NAMES)
def test_an_exercise_that_is_not_written_says_so(name):
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"{name}: not written yet: the lines between #else and #endif of {name}.cu\n"


@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_the_judge_accepts_the_solution(name):
    exercise, kernel = judging.load(FOLDER / f"{name}.py"), kernel_of(name)
    try:
        kernel.capability()
    except judging.Unavailable as error:
        pytest.skip(str(error))
    kernel.strict = 0
    said = judging.apart(lambda: judging.verdict(exercise.judge, {"kernel": kernel}))
    assert said == "passed" or said.startswith("skipped: this exercise needs compute capability")


# ---- stand-ins ----


class Stand(kernels.CudaKernel):
    """A kernel in NumPy: function(inputs, sizes) -> outputs."""

    def __init__(self, function):
        self.function, self.strict, self.said = function, 0, None

    def run(self, inputs, shapes, sizes=(), **_):
        made = self.function([x.copy() for x in inputs], *sizes)
        assert [x.shape for x in made] == [shape for shape, _ in shapes]
        return [x.astype(dtype) for x, (_, dtype) in zip(made, shapes, strict=True)], 1.0

    def race(self, *_):
        """Times are the GPU's."""

    def library(self, slow=False):
        def bits(tile, step):
            return (tile.value + 32 * step) >> 4 | 64 << 32 | 1 << 62

        return SimpleNamespace(descriptor_on_host=bits)


def ldmatrix(offset):
    """Exercise 22 with this function for the addresses."""

    def kernel(inputs):
        pieces = inputs[0].reshape(64, 8, 8)  # (row, piece, 8 numbers)
        memory = np.zeros((512, 8), np.uint16)
        for row in range(64):
            for piece in range(8):
                memory[offset(row, piece) // 16] = pieces[row, piece]
        made = np.zeros((16, 32, 4, 2), np.uint16)
        for at in range(16):
            rows = [memory[offset(at // 4 * 16 + lane % 16, at % 4 * 2 + lane // 16) // 16] for lane in range(32)]
            for lane in range(32):
                for m in range(4):
                    made[at, lane, m] = rows[8 * m + lane // 4][2 * (lane % 4) : 2 * (lane % 4) + 2]
        return [made]

    return kernel


def pipeline(late=0):
    """Exercise 23; `late`: this many of the last tiles are not summed."""

    def kernel(inputs, blocks, tiles):
        x = inputs[0].reshape(blocks, tiles, 512)[:, : tiles - late]
        return [judging.load(FOLDER / "23_cuda_pipeline.py").sums(x)]

    return kernel


def hand_over(behind=0):
    def kernel(inputs, tiles):
        return [2 * np.roll(np.roll(inputs[0], behind, axis=0), -1, axis=1)]

    return kernel


def product(swizzled):
    def kernel(inputs):
        a, b = ((x.astype(np.uint32) << 16).view(np.float32) for x in inputs)
        if not swizzled:  # the tensor cores read the pieces of a row in another order than they were stored in
            a = np.stack([row.reshape(8, 8)[np.arange(8) ^ n % 8].ravel() for n, row in enumerate(a)])
        return [a @ b.T]

    return kernel


def merge(skips=True, base=True):
    def kernel(inputs, pieces, rows):
        outs, lses = inputs
        with np.errstate(all="ignore"):
            top = lses.max(0) if base else np.zeros(rows, np.float32)
            weight = np.exp(lses - np.where(np.isneginf(top), 0, top))
            total = weight.sum(0)
            outs = np.where(weight[..., None] == 0, 0, outs) if skips else outs
            out = (weight[..., None] * outs).sum(0) / np.where(total == 0, 1, total)[:, None]
            return [out, np.where(total > 0, top + np.log(total), -np.inf)]

    return kernel


STANDS = [
    ("22_cuda_swizzle", ldmatrix(lambda row, piece: 128 * row + 16 * (piece ^ row % 8)), "passed"),
    (
        "22_cuda_swizzle",
        ldmatrix(lambda row, piece: 128 * row + 16 * (piece & row % 8)),
        "fragments[tile, lane, register",
    ),
    ("23_cuda_pipeline", pipeline(), "passed"),
    ("23_cuda_pipeline", pipeline(late=1), "1 tiles: y[block, thread]"),
    ("24_cuda_phase", hand_over(), "passed"),
    ("24_cuda_phase", hand_over(behind=2), "3 tiles: y[tile, lane]"),
    ("25_cuda_descriptor", product(True), "passed"),
    ("25_cuda_descriptor", product(False), "C[row, column]"),
    ("26_cuda_merge", merge(), "passed"),
    ("26_cuda_merge", merge(skips=False), "7 pieces, 9 rows, some without keys: out[row, d]"),
    ("26_cuda_merge", merge(base=False), "5 pieces, 7 rows: lse[row]"),
]


@pytest.mark.parametrize("name, function, said", STANDS, ids=[f"{s[0]}-{i}" for i, s in enumerate(STANDS)])
def test_judges_of_stand_ins(name, function, said):
    text = judging.verdict(judging.load(FOLDER / f"{name}.py").judge, {"kernel": Stand(function)})
    assert text == "passed" if said == "passed" else text.startswith("wrong: ") and said in text and "idea: " in text


def test_every_cuda_exercise_has_a_mistake_that_its_judge_refuses():
    assert {name for name, _, said in STANDS if said != "passed"} == {*NAMES}


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
