"""No function of a kernel has more than 150 lines: roles are structs with short functions, so one sees the loop."""

import re
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[2] / "cuda"
MOST = 150


def functions(source: str) -> list[tuple[int, int, str]]:
    """(first line, lines, its text) of each function on the device: from the line with __global__ or __device__ to the
    line with the brace that closes its body. Braces in comments and strings do not count."""
    bare = re.sub(r'//[^\n]*|"(?:\\.|[^"\\\n])*"', "", source)
    lines, found = bare.split("\n"), []
    for first, line in enumerate(lines):
        if not re.search(r"\b__(global|device)__\b", line) or line.lstrip().startswith("#"):
            continue
        depth = parentheses = 0
        opened = False
        for last in range(first, len(lines)):
            for character in lines[last]:
                parentheses += (character == "(") - (character == ")")
                depth += (character == "{") - (character == "}")
                opened |= character == "{"
                if depth == 0 and (opened and character == "}" or character == ";" and parentheses == 0):
                    break
            else:
                continue
            if opened:
                found.append((first + 1, last - first + 1, line.strip()))
            break
    return found


def test_the_rule_counts_from_the_first_line_to_the_closing_brace():
    source = """template <int kN>
__global__ void __launch_bounds__(128, 1)
    kernel(const int* x) {
    const auto f = [&] { return 1; };  // }
    for (;;) {
    }
}
__device__ void only_declared(int x);
struct Role {
    __device__ int one() const { return 1; }
};
"""
    assert [(first, lines) for first, lines, _ in functions(source)] == [(2, 6), (10, 1)]


SOURCES = sorted(
    path for path in CUDA.rglob("*.cu*") if "__device__" in path.read_text() or "__global__" in path.read_text()
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(CUDA)))
def test_no_kernel_function_is_too_long(path):
    long = [
        f"line {first}: {lines} lines: {text}" for first, lines, text in functions(path.read_text()) if lines > MOST
    ]
    assert not long, "\n".join(long)
