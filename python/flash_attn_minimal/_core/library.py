"""Finds and loads libflash_attn_minimal.so, types its functions, and turns statuses into exceptions."""

from __future__ import annotations

import ctypes as ct
import functools
import os
import sys
from pathlib import Path
from typing import Any

from .. import errors
from ..errors import FlashAttnError, LibraryNotFound
from .error_texts import explained
from .structs import LAUNCHES, AttentionPlan, Call

LIBRARY_NAME = "libflash_attn_minimal.so"

OK = 0
_ERRORS = {
    1: errors.BadArgument,
    2: errors.Unsupported,
    3: errors.WorkspaceTooSmall,
    4: errors.CudaError,
    5: errors.OutOfMemory,
    6: errors.RankLost,
}
WORKSPACE_TOO_SMALL = 3

# The tables of kernels: <prefix>_count, _name, _summary, _device.
KERNEL_TABLES = {
    "forward": "fa_kernel",
    "backward": "fa_backward_kernel",
    "linear": "fa_dense_linear_kernel",
    "w4_linear": "fa_linear_kernel",
    "w4_linear_chain": "fa_chain_kernel",
}


def query_name(name: str) -> str:
    """The library's query about a call of fa_<name>."""
    shorter = {"attention_forward": "attention", "kvcache_attention": "kvcache"}
    return f"fa_{shorter.get(name, name)}_query"


def checkout() -> Path | None:
    """The folder of the sources, when the package runs from there: python/flash_attn_minimal beside CMakeLists.txt."""
    for name in sys.modules["flash_attn_minimal"].__path__:
        folder = Path(name).absolute()
        root = folder.parent.parent
        if folder == root / "python" / "flash_attn_minimal" and (root / "CMakeLists.txt").is_file():
            return root
    return None


def path() -> Path:
    """The shared library: $FLASH_ATTN_LIBRARY, else the one in a folder of the package, else the one in build/ of the
    checkout. The package of an editable install has two folders: the checkout with the Python files and, in
    site-packages, one with the library."""
    root = checkout()
    if named := os.environ.get("FLASH_ATTN_LIBRARY"):
        places = [Path(named)]
        where = f"FLASH_ATTN_LIBRARY={named}" + (" is a folder" if places[0].is_dir() else ": no such file")
    else:
        places = [Path(folder, LIBRARY_NAME) for folder in sys.modules["flash_attn_minimal"].__path__]
        if root:
            places.append(root / "build" / LIBRARY_NAME)
        where = f"no {LIBRARY_NAME} in {' or '.join(str(place.parent) for place in places)}"
    for place in places:
        if place.is_file():
            return place.resolve()
    if root:
        how = f"Build it ({root}/build_and_run.sh build), set FLASH_ATTN_LIBRARY to its path, or pip install {root}"
    else:
        how = (
            "Install the package (pip install . in a checkout), "
            "or build the library with CMake and set FLASH_ATTN_LIBRARY to its path"
        )
    raise LibraryNotFound(f"{where}. {how}")


@functools.cache
def load() -> ct.CDLL:
    """The library with all functions of flash_attn.h typed. Those that launch raise on a bad status."""
    file = path()
    try:
        lib = ct.CDLL(str(file))
    except OSError as error:
        why, built_for, here = str(error), _machine(file), _machine(Path("/proc/self/exe"))
        if built_for and here and built_for != here:
            why = "it was built for another kind of processor"  # where the loader may say that there is no such file
        raise LibraryNotFound(f"{file} does not load: {why}") from error
    for name, struct in LAUNCHES.items():
        declare_launch(lib, f"fa_{name}", struct)
    for name in ("attention_forward", "attention_backward", "kvcache_attention"):
        declare(lib, query_name(name), ct.c_int, ct.POINTER(LAUNCHES[name]), ct.POINTER(AttentionPlan))
    for table in KERNEL_TABLES.values():
        declare(lib, f"{table}_count", ct.c_int32)
        for what, result in (("name", ct.c_char_p), ("summary", ct.c_char_p), ("device", ct.c_int32)):
            declare(lib, f"{table}_{what}", result, ct.c_int32)
    for platform in ("cpu", "cuda"):
        declare(lib, f"fa_xla_call_{platform}", ct.c_void_p, ct.c_void_p)
    declare(lib, "fa_run_call", ct.c_int, ct.c_void_p, ct.c_char_p, ct.c_void_p)
    declare(lib, "fa_query_call", ct.c_int, ct.c_void_p, ct.c_char_p, ct.c_void_p)
    several = ct.POINTER(Call), ct.c_int32, ct.c_char_p, ct.POINTER(ct.c_int32), ct.c_void_p
    declare(lib, "fa_run_calls", ct.c_int, *several).errcheck = raise_on_error
    declare(lib, "fa_use_openmp", ct.c_int, ct.c_char_p)
    declare(lib, "fa_status_name", ct.c_char_p, ct.c_int)
    declare(lib, "fa_last_error", ct.c_char_p)
    declare(lib, "fa_version", ct.c_char_p)
    declare(lib, "fa_build_info", ct.c_char_p)
    declare(lib, "fa_kernel_limits", ct.c_size_t, ct.c_char_p, ct.c_size_t)
    declare(lib, "fa_cuda_device_count", ct.c_int32)
    return lib


@functools.cache
def share_threads(library: str) -> None:
    """From the first call on, the process's calls on the CPU use the threads of the OpenMP runtime that `library` is
    linked to, unless $FLASH_ATTN_OPENMP is 0. If the library refuses, its own threads are as good as they were."""
    if os.environ.get("FLASH_ATTN_OPENMP") != "0":
        load().fa_use_openmp(library.encode())


def _machine(file: Path) -> bytes:
    """The processor in the header of an ELF file: width, byte order and architecture. Empty for any other file."""
    try:
        with file.open("rb") as opened:
            header = opened.read(20)
    except OSError:
        return b""
    return header[4:6] + header[18:20] if header.startswith(b"\x7fELF") else b""


def declare(lib: ct.CDLL, name: str, result: type | None, *arguments: Any) -> Any:
    """Types a function of the library, and returns it."""
    function = getattr(lib, name, None)
    if function is None:
        root = checkout()
        how = f"; {root}/build_and_run.sh build builds that of these sources" if root else ""
        raise LibraryNotFound(f"{lib._name} has no function {name}: it belongs to another release{how}")
    function.restype, function.argtypes = result, list(arguments)
    return function


def declare_launch(lib: ct.CDLL, name: str, struct: type[ct.Structure]) -> None:
    """Types a function of one struct and a stream, which then raises on a bad status."""
    declare(lib, name, ct.c_int, ct.POINTER(struct), ct.c_void_p).errcheck = raise_on_error


def raise_on_error(status: int, function: object, arguments: tuple) -> None:
    """For ctypes' errcheck: raises unless a function returned OK."""
    if status != OK:
        raise failure(status, next((x for x in arguments if isinstance(x, ct.Structure)), None))


def failure(status: int, struct: Any = None) -> FlashAttnError:
    """The exception for this thread's last failure. struct: what the failed call was given, where that is known."""
    return _ERRORS.get(status, FlashAttnError)(last_error(struct))


def last_error(struct: Any = None) -> str:
    """The text of this thread's last failure, in the words of Python's functions."""
    return explained(load().fa_last_error().decode(errors="replace"), struct)
