"""Attention in C, one file for each step. The files are compiled on the machine that runs them, and called through
ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from ..rung import ROOT, Calls, Rung, Unavailable

HERE = "ladder/c/"
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
CACHE = "FLASH_ATTN_LADDER_CACHE"  # environment variable: another folder for the compiled libraries


class Shape(ctypes.Structure):
    """struct attention of attention.h."""

    _fields_ = [(name, ctypes.c_int) for name in "batch seqlen_q seqlen_k heads heads_k headdim causal".split()]


def compiled(sources: tuple[str, ...], *more: str) -> Path:
    """Compiles some files of this folder, or of absolute paths, into a shared library; `more` are flags. The library is
    kept under a name that hashes sources, compiler, flags and processor."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise Unavailable(f"no C compiler: {os.environ.get('CC') or 'cc'} is not on the PATH")
    about = _output(compiler, "--version") + _output(compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull)
    files = _with_includes([ROOT / HERE / source for source in sources])
    content = [path.read_bytes() for path in files]
    digest = hashlib.sha256(repr([about, FLAGS, more, sources, content]).encode()).hexdigest()
    folder = Path(os.environ.get(CACHE) or ROOT / "build" / "ladder")
    library = folder / f"c_{digest[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # renamed when complete: processes may race
            made = Path(scratch) / library.name
            paths = [str(ROOT / HERE / source) for source in sources]
            _output(compiler, *FLAGS, *more, *paths, "-o", str(made), "-lm")
            made.replace(library)
    return library


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True, timeout=120)
        return done.stdout
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or ["failed"]
        first = next((line for line in said if "error:" in line), said[0])
        raise Unavailable(f"{' '.join(command[:2])}: {first}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{' '.join(command[:2])}: {error}") from None


def _with_includes(paths: list[Path]) -> list[Path]:
    """The files and all files beside them or of this folder that they include, sorted."""
    found: dict[Path, None] = {}
    while paths:
        path = paths.pop()
        if path not in found and path.is_file():
            found[path] = None
            names = re.findall(r'#include "(.+)"', path.read_text(encoding="utf-8", errors="replace"))
            paths += [folder / name for name in names for folder in (path.parent, ROOT / HERE)]
    return sorted(found)


def _load(sources: tuple[str, ...], backward: bool) -> Calls:
    library = ctypes.CDLL(str(compiled(sources)))

    def call(name, arrays, shape):
        if getattr(library, name)(*(ctypes.c_void_p(x.ctypes.data) for x in arrays), ctypes.byref(shape)):
            raise MemoryError(f"{name} of {sources[0]} has not enough memory")

    def shape_of(q, k, causal):
        batch, seqlen_q, heads, headdim = q.shape
        return Shape(batch, seqlen_q, k.shape[1], heads, k.shape[2], headdim, causal)

    def forward(q, k, v, causal):
        q, k, v = (np.ascontiguousarray(x, np.float32) for x in (q, k, v))
        out, lse = np.empty_like(q), np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
        call("attention_forward", (q, k, v, out, lse), shape_of(q, k, causal))
        return out, lse

    def gradients(dout, q, k, v, out, lse, causal):
        given = [np.ascontiguousarray(x, np.float32) for x in (dout, q, k, v, out, lse)]
        made = [np.empty_like(x) for x in given[1:4]]
        call("attention_backward", (*given, *made), shape_of(q, k, causal))
        return tuple(made)

    return Calls(forward, gradients if backward else None)


def _rung(name: str, about: str, *sources: str, also: tuple[str, ...] = (), backward: bool = False) -> Rung:
    """`also`: files that the sources include."""
    files = tuple(HERE + file for file in (*sources, *also, "attention.h"))
    load = functools.partial(_load, sources, backward)
    return Rung(name=name, language="C", about=about, device="cpu", files=files, load=load, headdims=(32, 64, 128))


RUNGS = (
    _rung("c_naive", "the formula, S in memory", "01_naive.c", "backward_01_naive.c", backward=True),
    _rung("c_vectors", "loops that become vectors, e^x as a polynomial", "02_vectors.c", also=("row.h",)),
    _rung("c_tiles", "online softmax: a tile of S in the cache", "03_tiles.c", "backward_02_tiles.c", also=("row.h",),
          backward=True),
    _rung("c_register_tiles", "products of 6 x 4 vectors in registers", "04_register_tiles.c", also=("row.h",)),
    _rung("c_threads", "all cores", "05_threads.c", also=("04_register_tiles.c", "row.h")),
)  # fmt: skip
