"""The handlers that XLA calls (cuda/api/xla_ffi.cpp): the ABI that they use, their errors, and processes that end while
a call is running."""

import ctypes
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, jax_platforms

jax = pytest.importorskip("jax")
jnp = jax.numpy

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_minimal._core.structs import AttentionArgs  # noqa: E402
from flash_attn_minimal.jax import ffi  # noqa: E402

RUNS = int(os.environ.get("FLASH_ATTN_EXIT_RUNS", 6))  # 20 runs find more


@pytest.fixture(params=jax_platforms())
def platform(request):
    return request.param


# ---- the ABI ----

# (our struct, XLA's struct, fields); a field is our name, then XLA's if it differs.
STRUCTS = [
    ("Extension", "decltype(XLA_FFI_Metadata_Extension::extension_base)", "struct_size type next"),
    (
        "ApiVersion",
        "XLA_FFI_Api_Version",
        "struct_size extension:extension_start major:major_version minor:minor_version",
    ),
    ("Metadata", "XLA_FFI_Metadata", "struct_size version:api_version traits"),
    ("MetadataExtension", "XLA_FFI_Metadata_Extension", "base:extension_base metadata"),
    ("ErrorCreateArgs", "XLA_FFI_Error_Create_Args", "struct_size extension:extension_start message code:errc"),
    ("StreamGetArgs", "XLA_FFI_Stream_Get_Args", "struct_size extension:extension_start context:ctx stream"),
    (
        "Api",
        "XLA_FFI_Api",
        "struct_size extension:extension_start version:api_version error_create:XLA_FFI_Error_Create "
        "stream_get:XLA_FFI_Stream_Get",
    ),
    ("Buffer", "XLA_FFI_Buffer", "struct_size extension:extension_start dtype data rank dims"),
    ("Buffers", "XLA_FFI_Args", "struct_size extension:extension_start size types items:args"),
    ("Buffers", "XLA_FFI_Rets", "struct_size extension:extension_start size types items:rets"),
    ("ByteSpan", "XLA_FFI_ByteSpan", "text:ptr length:len"),
    ("Array", "XLA_FFI_Array", "dtype size data"),
    ("Attributes", "XLA_FFI_Attrs", "struct_size extension:extension_start size types names values:attrs"),
    (
        "CallFrame",
        "XLA_FFI_CallFrame",
        "struct_size extension:extension_start api context:ctx stage arguments:args results:rets attributes:attrs",
    ),
]
WHOLE = {"ErrorCreateArgs", "StreamGetArgs"}  # made here and handed to XLA
NUMBERS = {
    "kMetadataExtension": "XLA_FFI_Extension_Metadata",
    "kCommandBufferCompatible": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "kInvalidArgument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "kResourceExhausted": "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED",
    "kUnimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "kInternal": "XLA_FFI_Error_Code_INTERNAL",
    "kInt32": "XLA_FFI_DataType_S32",
    "kInt64": "XLA_FFI_DataType_S64",
    "kArrayAttribute": "XLA_FFI_AttrType_ARRAY",
    "kExecuteStage": "XLA_FFI_ExecutionStage_EXECUTE",
}


def test_the_abi_is_jaxlibs(tmp_path):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler")
    ours = ROOT / "cuda/api/xla_ffi.h"
    if not ours.is_file():
        pytest.skip("the sources are not beside the tests")
    declared = set(re.findall(r"^struct (\w+) \{", ours.read_text(), re.MULTILINE))
    assert declared == {name for name, *_ in STRUCTS}
    checks = [f"static_assert(int64_t(fa::xla::{name}) == int64_t({number}));" for name, number in NUMBERS.items()]
    for name, theirs, fields in STRUCTS:
        for field in fields.split():
            mine, other = (field.split(":") * 2)[:2]
            checks.append(f"static_assert(offsetof(fa::xla::{name}, {mine}) == offsetof({theirs}, {other}));")
            checks.append(f"static_assert(sizeof(fa::xla::{name}::{mine}) == sizeof({theirs}::{other}));")
        if name in WHOLE:
            checks.append(f"static_assert(sizeof(fa::xla::{name}) == sizeof({theirs}));")
    source = tmp_path / "abi.cpp"
    source.write_text('#include "api/xla_ffi.h"\n#include "xla/ffi/api/c_api.h"\n' + "\n".join(checks) + "\n")
    include = [f"-I{ROOT / 'cuda'}", f"-I{ffi.include_dir()}"]
    command = [*compiler.split(), "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", *include, source]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr


# ---- errors of a handler ----


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_an_error_inside_a_program_is_pythons_with_our_text(platform, direction, monkeypatch):
    """The kernel is forced by the environment, unknown to the trace."""
    q = jax.device_put(jnp.ones((1, 5, 2, 8)), jax.devices(platform)[0])
    name = "FLASH_ATTN_KERNEL" if direction == "forward" else "FLASH_ATTN_BACKWARD_KERNEL"
    gradient = jax.grad(lambda q: fa.flash_attn_func(q, q, q).sum())
    program = jax.jit(gradient).lower(q).compile()
    monkeypatch.setenv(name, "fast")
    for _ in range(2):
        with pytest.raises(Exception, match=f"INVALID_ARGUMENT.*{name}=fast is not a kernel of this build"):
            jax.block_until_ready(program(q))
    monkeypatch.delenv(name)
    np.testing.assert_array_equal(program(q), gradient(q))


def test_lengths_are_checked_inside_a_program_on_the_cpu():
    cpu = jax.devices("cpu")[0]
    q = jax.device_put(jnp.ones((5, 2, 8)), cpu)
    program = jax.jit(lambda q, cu: fa.flash_attn_varlen_func(q, q, q, cu, cu, 5, 5))
    for cu, text in (
        ([1, 5], r"cu_seqlens_q\[0\]=1 is not 0"),
        ([0, 3, 2], r"cu_seqlens_q\[2\]=2 is below cu_seqlens_q\[1\]=3"),
        ([0, 3, 9], "cu_seqlens_q: sequence 1 has 6 rows, more than seqlen_q=5"),
    ):
        with pytest.raises(Exception, match=text):
            program(q, jax.device_put(jnp.array(cu, jnp.int32), cpu)).block_until_ready()


def test_a_call_described_for_another_library_is_refused(platform):
    q = jax.device_put(jnp.ones((1, 5, 2, 8)), jax.devices(platform)[0])
    jax.jit(lambda q: fa.flash_attn_func(q, q, q))(q)  # registers the handlers
    call = ffi.ffi_call("flash_attn_minimal_call", [jax.ShapeDtypeStruct(q.shape, q.dtype)])
    size = ctypes.sizeof(AttentionArgs)
    place = AttentionArgs.q_data.offset
    good = {
        "call": np.array([1, 0]), "image": np.frombuffer(bytes(AttentionArgs(struct_size=size)), np.int64),
        "holes": np.array([place, 8, 3, AttentionArgs.device.offset, 4, 0], np.int32),
    }  # fmt: skip

    def holes(*numbers):
        return {"holes": np.array(numbers, np.int32)}

    for wrong, text in (
        ({"call": None}, "attribute call is not an array of int64"),
        ({"holes": "words"}, "attribute holes is not an array of int32"),
        ({"holes": good["holes"].astype(np.int64)}, "attribute holes is not an array of int32"),
        ({"image": good["image"].astype(np.int32)}, "attribute image is not an array of int64"),
        ({"call": np.array([99, 0])}, r"operation=99 is not an fa_operation \(1 \.\. "),
        ({"call": np.array([1])}, "attributes call and holes have 1 and 6 numbers"),
        (holes(8, 8), "attributes call and holes have 2 and 2 numbers"),
        (holes(8, 8, 5), rf"holes\[0\].value=5 in a call of 5 values and {size} bytes"),
        (holes(8, 8, 0, 8, 8, -1 - size), rf"holes\[1\].value={-1 - size} in a call of 5 values and {size} bytes"),
        (holes(size - 7, 8, 0), rf"holes\[0\] is 8 bytes at byte {size - 7}: expected 4 or 8 of the image's {size}"),
        (holes(-1, 4, 0), r"holes\[0\] is 4 bytes at byte -1"),
        (holes(8, 2, 0), r"holes\[0\] is 2 bytes at byte 8"),
        ({"image": np.zeros(size // 8, np.int64)}, "struct_size"),
    ):
        words = {name: x for name, x in {**good, **wrong}.items() if x is not None}
        with pytest.raises(Exception, match=text):
            jax.block_until_ready(jax.jit(lambda q, words=words: call(q, **words))(q))


# ---- processes that end ----

START = """
import threading, jax
from flash_attn_minimal import flash_attn_func
q = jax.random.normal(jax.random.key(0), (1, 700, 4, 64))
gradient = jax.jit(jax.grad(lambda q: flash_attn_func(q, q, q, causal=True).sum()))
"""
GRADIENT = "r = gradient(q)"
ENDS = {
    "many": "r = [gradient(q + i) for i in range(20)]",
    "in a thread": "threading.Thread(target=lambda: gradient(q).block_until_ready()).start()",
    "from a thread": "r = []; t = threading.Thread(target=lambda: r.append(gradient(q))); t.start(); t.join()",
}


def _check_end(platform, code):
    environment = {**os.environ, "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda"}[platform]}
    command = [sys.executable, "-c", START + code]
    said = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert said.returncode == 0, said.stderr


def test_a_process_ends_with_a_gradient_in_flight(platform):
    """XLA's thread must not wait for the interpreter, because the interpreter waits for that thread. A handler in
    Python hung in 5 of 6 runs."""
    for _ in range(RUNS):
        _check_end(platform, GRADIENT)


@pytest.mark.parametrize("end", ENDS)
def test_a_process_ends_with_work_in_flight(platform, end):
    _check_end(platform, ENDS[end])
