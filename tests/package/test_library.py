"""The Python mirror of the three C headers: offsets, constants, versions; loading and its errors; the cost of a
call."""

import ctypes as ct
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

import flash_attn_minimal as fa
from flash_attn_minimal._core import library, structs
from flash_attn_minimal.distributed import _structs as distributed
from flash_attn_minimal.transformer import _library as transformer

HEADERS = [ROOT / "cuda" / name for name in ("flash_attn.h", "flash_attn_transformer.h", "flash_attn_distributed.h")]
OPERATIONS = transformer.OPERATIONS
STRUCTS = {
    "fa_attention_args": structs.AttentionArgs,
    "fa_attention_plan": structs.AttentionPlan,
    "fa_kvcache_args": structs.KVCacheArgs,
    "fa_merge_args": structs.MergeArgs,
    "fa_quantize_args": structs.QuantizeArgs,
    "fa_call": structs.Call,
    "fa_group_args": distributed.GroupArgs,
    "fa_segment": distributed.Segment,
    "fa_distributed_args": distributed.DistributedArgs,
    "fa_distributed_plan": distributed.DistributedPlan,
    **{f"fa_distributed_{name}_args": struct for name, struct in distributed.CALLS.items() if name != "forward"},
    **{f"fa_{name}_args": struct for name, struct in OPERATIONS.items()},
}
NESTED = re.compile(
    r"^(q|k|v|x|out|bias|mask|startend_row_indices|block_mask|out_a|out_b|q_descale|k_descale|v_descale|k_new|v_new|k_scale|v_scale|residual|weight|gate_up|logits|w)"
    r"_(data|batch_stride|row_stride|head_stride|key_stride|heads|numbers|row_block|key_block|format|out_features|in_features|reserved|codes|scales|tensor_scale)$"
)


def python(code, **environment):
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_structs_match_the_header(tmp_path):
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler")
    if not HEADERS[0].is_file():
        pytest.skip("the headers are not beside the tests")
    lines = []
    for c_name, mirror in STRUCTS.items():
        lines.append(f'printf("{c_name} %zu\\n", sizeof({c_name}));')
        for field, _ in mirror._fields_:
            member = NESTED.sub(r"\1.\2", field)
            value = f"offsetof({c_name}, {member}), sizeof((({c_name}*)0)->{member})"
            lines.append(f'printf("{c_name}.{field} %zu %zu\\n", {value});')
    names = {"FA_CPU": structs.CPU, "FA_CUDA": structs.CUDA, "FA_OK": library.OK}
    names |= {"FA_FLOAT32": 1, "FA_FLOAT16": 2, "FA_BFLOAT16": 3, "FA_FLOAT8_E4M3": 4, "FA_INT8": 5}
    for prefix, numbers in (("GROUP", distributed.KINDS), ("LAYOUT", distributed.LAYOUTS), ("MODE", distributed.MODES)):
        names |= {f"FA_{prefix}_{name.upper()}": number for name, number in numbers.items()}
    names |= {"FA_NVFP4": 1, "FA_MXFP4": 2, "FA_INT4": 3}
    names |= {
        "FA_BAD_ARGUMENT": 1,
        "FA_UNSUPPORTED": 2,
        "FA_WORKSPACE_TOO_SMALL": 3,
        "FA_CUDA_ERROR": 4,
        "FA_OUT_OF_MEMORY": 5,
        "FA_RANK_LOST": 6,
    }
    lines += [f'printf("{name} %d\\n", (int){name});' for name in names]
    source = tmp_path / "layout.c"
    source.write_text(
        "#include <stdio.h>\n#include <stddef.h>\n"
        + "".join(f"#include <{header.name}>\n" for header in HEADERS)
        + "int main(void) {\n"
        + "\n".join(lines)
        + "\nreturn 0; }\n"
    )
    subprocess.run([*compiler.split(), f"-I{HEADERS[0].parent}", "-o", tmp_path / "layout", source], check=True)
    said = dict(
        line.split(" ", 1)
        for line in subprocess.run(tmp_path / "layout", capture_output=True, text=True, check=True).stdout.splitlines()
    )
    for c_name, mirror in STRUCTS.items():
        for field, _ in mirror._fields_:
            descriptor = getattr(mirror, field)
            assert said[f"{c_name}.{field}"] == f"{descriptor.offset} {descriptor.size}", field
        assert said[c_name] == str(ct.sizeof(mirror))
    assert {name: int(said[name]) for name in names} == names
    assert structs.DTYPES == {"float32": 1, "float16": 2, "bfloat16": 3, "float8_e4m3fn": 4}
    assert transformer.W4_FORMATS == {
        "nvfp4": int(said["FA_NVFP4"]),
        "mxfp4": int(said["FA_MXFP4"]),
        "int4": int(said["FA_INT4"]),
    }
    assert structs.CACHE_DTYPES == {"float8_e4m3fn": 4, "int8": 5}


def test_statuses():
    lib = library.load()
    names = {
        1: "FA_BAD_ARGUMENT",
        2: "FA_UNSUPPORTED",
        3: "FA_WORKSPACE_TOO_SMALL",
        4: "FA_CUDA_ERROR",
        5: "FA_OUT_OF_MEMORY",
        6: "FA_RANK_LOST",
    }
    assert lib.fa_status_name(0) == b"FA_OK"
    for status, name in names.items():
        assert lib.fa_status_name(status).decode() == name
        words = "".join(word.capitalize() for word in name.split("_")[1:])
        assert library._ERRORS[status].__name__ == words
    assert lib.fa_status_name(99)


def test_versions_agree():
    assert fa.__version__ == library.load().fa_version().decode()
    project = ROOT / "pyproject.toml"
    if project.is_file():
        assert re.search(r'^version = "(.*)"', project.read_text(), re.M).group(1) == fa.__version__


def test_every_exported_function_is_declared():
    """The two _library modules declare every function that the headers export, with argument types."""
    if not HEADERS[0].is_file():
        pytest.skip("the headers are not beside the tests")
    exported = re.findall(r"FA_API [\w *]*?(fa_\w+)\(", "".join(header.read_text() for header in HEADERS))
    lib = transformer.load()
    assert distributed.load() is lib
    assert exported
    for name in exported:
        assert getattr(lib, name).argtypes is not None, name


def test_kernel_list():
    names = [kernel["name"] for kernel in fa.kernels()]
    assert len(names) == len(set(names)) and {"cpu_portable", "cpu_naive"} <= set(names)
    assert all(kernel["summary"] and kernel["device"] in ("cpu", "cuda") for kernel in fa.kernels())
    lib = library.load()
    for beyond in (-1, len(names)):
        assert (
            lib.fa_kernel_name(beyond) is None
            and lib.fa_kernel_summary(beyond) is None
            and lib.fa_kernel_device(beyond) == 0
        )


def test_last_error_belongs_to_the_thread():
    q = np.zeros((1, 3, 3, 8), np.float32)
    with pytest.raises(fa.BadArgument, match="nheads=3"):
        fa.flash_attn_func(q, q[:, :, :2], q[:, :, :2])
    lib, other = library.load(), []
    thread = threading.Thread(target=lambda: other.append(lib.fa_last_error()))
    thread.start()
    thread.join()
    assert other == [b""] and b"nheads=3" in lib.fa_last_error()


def test_missing_library(tmp_path):
    call = "import flash_attn_minimal as fa\ntry: fa.kernels()\nexcept fa.LibraryNotFound as e: print(e)"
    said = python(call, FLASH_ATTN_LIBRARY=str(tmp_path / "nowhere.so"))
    assert f"FLASH_ATTN_LIBRARY={tmp_path}/nowhere.so: no such file" in said.stdout and "pip install" in said.stdout
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert "broken.so does not load: " in python(call, FLASH_ATTN_LIBRARY=str(tmp_path / "broken.so")).stdout
    said = python(call, FLASH_ATTN_LIBRARY=str(tmp_path)).stdout
    assert f"FLASH_ATTN_LIBRARY={tmp_path} is a folder. " in said and "set FLASH_ATTN_LIBRARY to its path" in said


@pytest.mark.skipif(not Path("/proc/self/exe").is_file(), reason="needs Linux")
def test_a_library_for_another_processor(tmp_path):
    """The loader's own words for it are that there is no such file."""
    file = tmp_path / "other.so"
    content = bytearray(library.path().read_bytes())
    content[18] ^= 0x80  # the architecture in the header
    file.write_bytes(content)
    call = "import flash_attn_minimal as fa\ntry: fa.kernels()\nexcept fa.LibraryNotFound as e: print(e)"
    said = python(call, FLASH_ATTN_LIBRARY=str(file)).stdout.strip()
    assert said == f"{file} does not load: it was built for another kind of processor"


def test_a_checkout_finds_the_library_in_its_build_folder(tmp_path):
    """Without environment variables. The package's own folder comes first; a message names all places."""
    (tmp_path / "python").mkdir()
    (tmp_path / "python/flash_attn_minimal").symlink_to(ROOT / "python/flash_attn_minimal")
    own = ROOT / "python/flash_attn_minimal" / library.LIBRARY_NAME
    if own.exists():
        pytest.skip(f"{own} is there")
    call = (
        "import flash_attn_minimal as fa\ntry: print(fa._core.library.path())\nexcept fa.LibraryNotFound as e: print(e)"
    )

    def said():
        return python(call, PYTHONPATH=str(tmp_path / "python"), FLASH_ATTN_LIBRARY="").stdout.strip()

    package = tmp_path / "python/flash_attn_minimal"
    assert said() == (
        f"no {own.name} in {package}. Install the package (pip install . in a checkout), "
        "or build the library with CMake and set FLASH_ATTN_LIBRARY to its path"
    )
    (tmp_path / "CMakeLists.txt").touch()
    assert said() == (
        f"no {own.name} in {package} or {tmp_path}/build. Build it ({tmp_path}/build_and_run.sh build), "
        f"set FLASH_ATTN_LIBRARY to its path, or pip install {tmp_path}"
    )
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / own.name).touch()
    assert said() == str(tmp_path / "build" / own.name)


def test_foreign_library():
    import _ctypes

    other = getattr(_ctypes, "__file__", None)
    if not other:
        pytest.skip("no other shared library at hand")
    call = "import flash_attn_minimal as fa\ntry: fa.kernels()\nexcept fa.LibraryNotFound as e: print(e)"
    assert (
        "has no function fa_attention_forward: it belongs to another release"
        in python(call, FLASH_ATTN_LIBRARY=other).stdout
    )
    if library.checkout():
        command = f"{library.checkout()}/build_and_run.sh build builds that of these sources"
        assert command in python(call, FLASH_ATTN_LIBRARY=other).stdout


def test_import_brings_numpy_alone():
    """Importing the package imports only NumPy among installed packages, no suite and no engine, and does not load the
    library before the first call; otherwise it would be slow. (The bench suite `overhead` times calls.)"""
    code = (
        "import sys, numpy; before = set(sys.modules); import flash_attn_minimal as fa\n"
        "print(*sorted(set(sys.modules) - before), fa._core.library.load.cache_info().currsize)"
    )
    *modules, loaded = python(code, PYTHONPATH=str(ROOT / "python")).stdout.split()
    ours = [name for name in modules if name.startswith("flash_attn_minimal")]
    heavy = {"bench", "fuzz", "llama", "cli", "verify", "autograd", "jax"}
    assert not heavy & {name.split(".")[1] for name in ours if "." in name} and loaded == "0"
    assert {name.split(".")[0] for name in modules} - {"flash_attn_minimal"} <= sys.stdlib_module_names
