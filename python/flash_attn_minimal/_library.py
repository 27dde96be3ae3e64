"""Finds and loads libflash_attn_minimal.so, mirrors cuda/flash_attn.h, and turns statuses into exceptions.

The structs are the header's with nested fields written flat: `q.row_stride` is `q_row_stride` here, at the same offset
(tests/package/test_library.py compares every offset with what a C compiler says). transformer/_library.py mirrors the
functions around attention in the same way.
"""

from __future__ import annotations

import ctypes as ct
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ._arrays.door import CPU, CUDA, DEVICES  # noqa: F401  (of fa_device; other modules take them from here)
from ._explain import explained
from .errors import (
    BadArgument,
    CudaError,
    FlashAttnError,
    LibraryNotFound,
    OutOfMemory,
    RankLost,
    Unsupported,
    WorkspaceTooSmall,
)

LIBRARY_NAME = "libflash_attn_minimal.so"


OK = 0
_ERRORS = {1: BadArgument, 2: Unsupported, 3: WorkspaceTooSmall, 4: CudaError, 5: OutOfMemory, 6: RankLost}
WORKSPACE_TOO_SMALL = 3

DTYPES = {"float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4}
CACHE_DTYPES = {"float8_e4m3fn": 4, "int8": 5}  # dtypes that a KV cache may have, besides q's


class _Integer(property):
    """An integer field that refuses values out of range; plain ctypes would cut them to their low bits."""

    def __init__(self, name: str, field: Any, kind: type):
        put, bits = field.__set__, 8 * ct.sizeof(kind)
        signed = kind(-1).value < 0
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

        def fill(struct: ct.Structure, value: int) -> None:
            if not low <= value <= high:
                raise BadArgument(f"{name}={value} is outside {low} .. {high}")
            put(struct, value)

        super().__init__(field.__get__, fill)
        self.offset, self.size = field.offset, field.size


def _checked(struct: type) -> type:
    """Makes a mirror of a C struct check its integers as they are set."""
    for name, kind in struct._fields_:
        if kind in (ct.c_int32, ct.c_int64, ct.c_uint64):  # c_size_t is one of them
            setattr(struct, name, _Integer(name, getattr(struct, name), kind))
    return struct


def _tensor(name: str) -> list[tuple[str, type]]:
    return [(f"{name}_data", ct.c_void_p)] + [
        (f"{name}_{axis}_stride", ct.c_int64) for axis in ("batch", "row", "head")
    ]


def _score_tensor(name: str) -> list[tuple[str, type]]:
    return [(f"{name}_data", ct.c_void_p)] + [
        (f"{name}_{axis}_stride", ct.c_int64) for axis in ("batch", "head", "row")
    ]


def _descale(name: str) -> list[tuple[str, type]]:
    return [
        (f"{name}_data", ct.c_void_p),
        (f"{name}_batch_stride", ct.c_int64),
        (f"{name}_head_stride", ct.c_int64),
    ]


# fa_part, as a NumPy dtype: an array of these describes sequences of a varlen call that are parts of longer ones.
PART_FIELDS = ("key_begin", "seqlen_k", "shift", "first_row", "first_key", "sequence", "seqlen_q", "reserved")
PART_DTYPE = [(name, "<i4") for name in PART_FIELDS]


@_checked
class AttentionArgs(ct.Structure):
    """fa_attention_args. A fresh one is all zero, and zero always means the default."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device", ct.c_int32),
        ("dtype", ct.c_int32),
        ("out_dtype", ct.c_int32),
        ("batch", ct.c_int32),
        ("nheads", ct.c_int32),
        ("nheads_k", ct.c_int32),
        ("headdim", ct.c_int32),
        ("headdim_v", ct.c_int32),
        ("seqlen_q", ct.c_int64),
        ("seqlen_k", ct.c_int64),
        *_tensor("q"),
        *_tensor("k"),
        *_tensor("v"),
        *_tensor("out"),
        ("lse", ct.c_void_p),
        ("cu_seqlens_q", ct.c_void_p),
        ("cu_seqlens_k", ct.c_void_p),
        ("total_q", ct.c_int64),
        ("total_k", ct.c_int64),
        ("softmax_scale", ct.c_float),
        ("has_softmax_scale", ct.c_int32),
        ("softcap", ct.c_float),
        ("alibi_slopes", ct.c_void_p),
        ("alibi_batch_stride", ct.c_int64),
        *_score_tensor("bias"),
        ("bias_dtype", ct.c_int32),
        ("reserved0", ct.c_int32),
        *_score_tensor("mask"),
        ("top_left", ct.c_int32),
        ("causal", ct.c_int32),
        ("has_window", ct.c_int32),
        ("reserved1", ct.c_int32),
        ("window_left", ct.c_int64),
        ("window_right", ct.c_int64),
        ("sinks", ct.c_void_p),
        ("dropout_p", ct.c_float),
        ("deterministic", ct.c_int32),
        ("dropout_seed", ct.c_uint64),
        ("dropout_offset", ct.c_uint64),
        ("allow_tf32", ct.c_int32),
        ("num_threads", ct.c_int32),
        ("kernel", ct.c_char_p),
        ("workspace", ct.c_void_p),
        ("workspace_bytes", ct.c_size_t),
        *_descale("q_descale"),
        *_descale("k_descale"),
        *_descale("v_descale"),
        ("fast_accum", ct.c_int32),
        ("first_head", ct.c_int32),
        ("parts", ct.c_void_p),
        ("max_score", ct.c_void_p),
        ("key_sums", ct.c_void_p),
        ("attention_chunk", ct.c_int32),
        ("reserved2", ct.c_int32),
    ]


@_checked
class AttentionBackwardArgs(ct.Structure):
    """fa_attention_backward_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("forward", ct.POINTER(AttentionArgs)),
        *_tensor("dout"),
        *_tensor("dq"),
        *_tensor("dk"),
        *_tensor("dv"),
        *_score_tensor("dbias"),
        ("dsinks", ct.c_void_p),
        ("accumulate", ct.c_int32),
        ("reserved", ct.c_int32),
        ("dlse", ct.c_void_p),
    ]


@_checked
class KVCacheArgs(ct.Structure):
    """fa_kvcache_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("attention", ct.POINTER(AttentionArgs)),
        ("cache_dtype", ct.c_int32),
        ("cache_batch", ct.c_int32),
        ("cache_seqlens", ct.c_void_p),
        ("cache_batch_idx", ct.c_void_p),
        ("block_table", ct.c_void_p),
        ("block_table_stride", ct.c_int64),
        ("page_size", ct.c_int32),
        ("seqlen_new", ct.c_int32),
        *_tensor("k_new"),
        *_tensor("v_new"),
        ("rotary_cos", ct.c_void_p),
        ("rotary_sin", ct.c_void_p),
        ("rotary_dtype", ct.c_int32),
        ("rotary_rows", ct.c_int32),
        ("rotary_dim", ct.c_int32),
        ("rotary_interleaved", ct.c_int32),
        *_tensor("k_scale"),
        *_tensor("v_scale"),
        ("batch_invariant", ct.c_int32),
        ("num_splits", ct.c_int32),
        ("programmatic", ct.c_int32),
        ("tree_keys", ct.c_int32),
        ("tree_mask", ct.c_void_p),
        ("tree_batch_stride", ct.c_int64),
        ("tree_row_stride", ct.c_int64),
        ("cache_leftpad", ct.c_void_p),
    ]


class AttentionPlan(ct.Structure):
    """fa_attention_plan."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("status", ct.c_int32),
        ("reserved", ct.c_int32),
        ("workspace_bytes", ct.c_size_t),
        ("kernel", ct.c_char * 32),
        ("why_not", ct.c_char * 1472),
    ]


@_checked
class MergeArgs(ct.Structure):
    """fa_merge_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device", ct.c_int32),
        ("dtype", ct.c_int32),
        ("batch", ct.c_int32),
        ("nheads", ct.c_int32),
        ("headdim_v", ct.c_int32),
        ("reserved", ct.c_int32),
        ("seqlen", ct.c_int64),
        *_tensor("out_a"),
        *_tensor("out_b"),
        *_tensor("out"),
        ("lse_a", ct.c_void_p),
        ("lse_b", ct.c_void_p),
        ("lse", ct.c_void_p),
    ]


@_checked
class QuantizeArgs(ct.Structure):
    """fa_quantize_args."""

    _fields_ = [
        ("struct_size", ct.c_size_t),
        ("device", ct.c_int32),
        ("dtype", ct.c_int32),
        ("batch", ct.c_int32),
        ("nheads", ct.c_int32),
        ("headdim", ct.c_int32),
        ("hadamard", ct.c_int32),
        ("seqlen", ct.c_int64),
        ("seed", ct.c_uint64),
        *_tensor("x"),
        *_tensor("out"),
        ("descale", ct.c_void_p),
    ]


_Struct = TypeVar("_Struct", bound=ct.Structure)


def new(kind: type[_Struct]) -> _Struct:
    """A new struct with its size set and all else zero, which always means the default."""
    struct = kind()
    struct.struct_size = ct.sizeof(kind)  # type: ignore[attr-defined]
    return struct


class Call(ct.Structure):
    """fa_call, of flash_attn_transformer.h."""

    _fields_ = [("operation", ct.c_int32), ("reserved", ct.c_int32), ("args", ct.c_void_p)]


# fa_operation of flash_attn_transformer.h, from 1 on: the functions fa_<name> that take one struct and a stream.
OPERATIONS = (
    *("attention_forward", "attention_backward", "kvcache_attention", "attention_merge", "quantize_fp8"),
    *("rms_norm", "rope", "swiglu", "sample", "linear"),
    *("w4_quantize", "w4_dequantize", "w4_pack", "w4_linear", "w4_linear_chain"),
)
# The tables of kernels: <prefix>_count, _name, _summary, _device.
KERNEL_TABLES = {"forward": "fa_kernel", "backward": "fa_backward_kernel"}


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
    for name, struct in {
        "attention_forward": AttentionArgs,
        "attention_backward": AttentionBackwardArgs,
        "kvcache_attention": KVCacheArgs,
        "attention_merge": MergeArgs,
        "quantize_fp8": QuantizeArgs,
    }.items():
        declare_launch(lib, f"fa_{name}", struct)
    for name, struct in {
        "attention": AttentionArgs,
        "attention_backward": AttentionBackwardArgs,
        "kvcache": KVCacheArgs,
    }.items():
        declare(lib, f"fa_{name}_query", ct.c_int, ct.POINTER(struct), ct.POINTER(AttentionPlan))
    for table in KERNEL_TABLES.values():
        declare_table(lib, table)
    for platform in ("cpu", "cuda"):
        declare(lib, f"fa_xla_call_{platform}", ct.c_void_p, ct.c_void_p)
    calls = declare(lib, "fa_run_calls", ct.c_int, ct.POINTER(Call), ct.c_int32, ct.POINTER(ct.c_int32), ct.c_void_p)
    calls.errcheck = raise_on_error
    declare(lib, "fa_status_name", ct.c_char_p, ct.c_int)
    declare(lib, "fa_last_error", ct.c_char_p)
    declare(lib, "fa_version", ct.c_char_p)
    declare(lib, "fa_build_info", ct.c_char_p)
    declare(lib, "fa_cuda_device_count", ct.c_int32)
    return lib


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


def declare_table(lib: ct.CDLL, prefix: str) -> None:
    """Types the functions of a table of kernels."""
    declare(lib, f"{prefix}_count", ct.c_int32)
    declare(lib, f"{prefix}_name", ct.c_char_p, ct.c_int32)
    declare(lib, f"{prefix}_summary", ct.c_char_p, ct.c_int32)
    declare(lib, f"{prefix}_device", ct.c_int32, ct.c_int32)


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


@functools.cache
def load_packed(name: str, bytes_of_it: bool) -> Callable[[Any, int | None], int]:
    """A second object for fa_<name>, which takes the struct as its address or, with bytes_of_it, as a bytes object, and
    returns the status instead of raising."""
    function = load()[f"fa_{name}"]  # indexing makes a new function object, with its own types
    function.restype, function.argtypes = ct.c_int, [ct.c_char_p if bytes_of_it else ct.c_void_p, ct.c_void_p]
    return function
