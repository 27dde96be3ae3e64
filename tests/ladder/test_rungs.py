"""Every rung of the ladder computes attention: the same shapes and dtypes for all, against float64."""

import functools
import sys

import accuracy
import numpy as np
import pytest
from accuracy import Case
from conftest import CPU, CUDA, NO_CUDA, ROOT

if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from ladder.rung import Unavailable, lines_of_code  # noqa: E402
from ladder.rungs import RUNGS  # noqa: E402

OWN = [rung for rung in RUNGS if not rung.peer]
SHAPES = {
    "one": {"seqlen_q": 1, "seqlen_k": 1},
    "a tile": {"seqlen_q": 128, "seqlen_k": 128},
    "awkward": {"seqlen_q": 77, "seqlen_k": 203, "batch": 2, "nheads": 4, "nheads_k": 2},
    "more queries": {"seqlen_q": 130, "seqlen_k": 35},
    "several tiles": {"seqlen_q": 300, "seqlen_k": 300, "nheads_k": 2},
}


@functools.cache
def loaded(rung):
    try:
        return rung.load()
    except Unavailable as error:
        return str(error)


def calls_of(rung):
    if rung.device == "cuda" and (NO_CUDA or CUDA.framework != "torch"):
        pytest.skip(NO_CUDA or "the rung takes PyTorch tensors")
    calls = loaded(rung)
    if isinstance(calls, str):
        pytest.skip(calls)
    return calls, CUDA if rung.device == "cuda" else CPU


def cases():
    for rung in OWN:
        for shape, sizes in SHAPES.items():
            for causal in (False, True):
                for dtype in rung.dtypes:
                    if dtype not in accuracy.EPSILON:  # 8 bits have separate tests
                        continue
                    headdim = rung.headdims[len(shape) % len(rung.headdims)]
                    case = Case(headdim=headdim, dtype=dtype, causal=causal, **sizes)
                    yield pytest.param(rung, case, id=f"{rung.name}-{shape}-{'causal' if causal else 'full'}-{dtype}")


CASES = list(cases())


@pytest.mark.parametrize("rung, case", CASES)
def test_forward(rung, case):
    calls, device = calls_of(rung)
    if reason := rung.refusal(case):
        pytest.skip(reason)
    (q, k, v, _), (exact, exact_lse), (plain, plain_lse) = accuracy.expected(case)
    out, lse = calls.forward(*[device.array(x, case.dtype) for x in (q, k, v)], case.causal)
    floor = accuracy.rounding_floor(q, k)
    accuracy.check("lse", device.numpy(lse), exact_lse, plain_lse, "float32", floor=floor)
    accuracy.check("out", device.numpy(out), exact, plain, case.dtype, floor=floor)


@pytest.mark.parametrize("rung, case", CASES)
def test_backward(rung, case):
    calls, device = calls_of(rung)
    if calls.backward is None:
        pytest.skip("the rung has no backward pass")
    if reason := rung.refusal(case):
        pytest.skip(reason)
    (dout, q, k, v, out, lse, _), exact, plain = accuracy.expected_backward(case)
    arrays = [device.array(x, case.dtype) for x in (dout, q, k, v, out)]
    found = calls.backward(*arrays, device.array(lse), case.causal)
    for name, got in zip(("dq", "dk", "dv"), found, strict=True):
        true = getattr(exact, name)
        floor = accuracy.gradient_floor(case, true)
        accuracy.check(name, device.numpy(got), true, getattr(plain, name), case.dtype, floor=floor)


def test_names_are_unique_and_files_exist():
    names = [rung.name for rung in RUNGS]
    assert len(set(names)) == len(names)
    for rung in OWN:
        assert rung.files, rung.name
        for file in rung.files:
            assert (ROOT / file).is_file(), f"{rung.name}: {file}"


@pytest.mark.parametrize(
    "name, text, lines",
    [
        ("a.py", '"""Docstring\nof two lines."""\n\n# comment\nx = 1  # one\n', 1),
        ("a.py", 'def f():\n    """D."""\n    return """a\nb"""\n', 3),
        ("a.cu", '/* a\n b */\nint x; // c\n\n  // d\nconst char* s = "// no comment";\n', 2),
        ("a.c", 'int a; /* b\n c */ int d;\n', 2),
    ],
)  # fmt: skip
def test_lines_of_code(name, text, lines):
    assert lines_of_code(text, name) == lines


def test_counting_is_not_fooled_by_the_sources():
    assert np.all([rung.lines() > 20 for rung in OWN])
