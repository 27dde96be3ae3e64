"""Defines a rung: one implementation of attention that can be run, tested, timed and read."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
C_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


class Unavailable(Exception):
    """The rung cannot run here: a compiler, a package or a GPU is missing. The text says which."""


@dataclass(frozen=True)
class Calls:
    """A loaded rung. q (batch, seqlen_q, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim), contiguous.
    The scale is headdim ** -0.5, and causal is bottom-right aligned, as in flash_attn_func. A rung that serves
    float8_e4m3fn gets 8-bit arrays with descale factors of 1, and returns out in bfloat16 or float32."""

    forward: Callable[..., tuple[Any, Any]]  # (q, k, v, causal) -> out like q, lse (batch, nheads, seqlen_q) float32
    backward: Callable[..., tuple[Any, Any, Any]] | None = None  # (dout, q, k, v, out, lse, causal) -> dq, dk, dv


@dataclass(frozen=True, kw_only=True)
class Rung:
    name: str  # short, as it stands in tables and file names: c_tiles, triton, cute_sm90
    language: str  # NumPy, C, CUDA C++, Triton, Gluon, CuTe C++, ...
    about: str  # one line: what is new compared with the previous rung
    device: str  # "cpu": NumPy arrays; "cuda": PyTorch tensors
    files: tuple[str, ...]  # the source files to read, relative to the repository; () for another project's rung
    parts: tuple[str, ...] = ()  # the classes and functions to read in a single Python file; () for the whole file
    unit: str | None = None  # the file that nvcc compiles; if there is a file for each head dim, that of 128
    load: Callable[[], Calls]  # compiles or finds what it needs, or raises Unavailable; called once
    dtypes: tuple[str, ...] = ("float32",)
    headdims: tuple[int, ...] = (64, 128)
    refusal: Callable[[Any], str | None] = lambda shape: None  # why it cannot serve a shape beyond dtype and headdim
    peer: bool = False  # another project's rung: measured, not tested here

    def lines(self) -> int:
        return sum(lines_of_code(self._text(file), file) for file in self.files)

    def _text(self, file: str) -> str:
        text = (ROOT / file).read_text()
        if not self.parts:
            return text
        found = {node.name: node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        return "\n".join(ast.get_source_segment(text, found[part]) or "" for part in self.parts)


def lines_of_code(text: str, name: str) -> int:
    """Lines with code on them, counted the same way in every language: no blank lines, comments or docstrings."""
    if name.endswith(".py"):
        return len(_python_lines(text))
    bare = C_COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else "\n" * found[0].count("\n"), text)
    return sum(1 for line in bare.splitlines() if line.strip())


def _python_lines(text: str) -> set[int]:
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    begins = True  # whether a statement begins here; a string that begins one is a docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            begins = True
        elif token.type not in silent:
            if not (begins and token.type == tokenize.STRING):
                lines |= set(range(token.start[0], token.end[0] + 1))
            begins = False
    return lines
