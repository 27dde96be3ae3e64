"""The capability query, forced kernels, workspaces: a launch does what the query says."""

import ctypes as ct
import os
import shutil
import subprocess

import numpy as np
import pytest
from accuracy import Case, expected
from conftest import ROOT, cpu_kernels

import flash_attn_minimal as fa
from flash_attn_minimal._core import library, options, queries, structs


def native(device, case):
    (q, k, v, _), *_ = expected(case)
    return [device.array(x, case.dtype) for x in (q, k, v)]


CASES = [
    Case(),
    Case(1, 257, 128, nheads=4, dtype="float16"),
    Case(65, 65, 72, 33, causal=True),
    Case(5, 3, 512, dtype="bfloat16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_launch_does_what_the_query_says(device, case, monkeypatch):
    """Forcing the kernel that the query names gives the same bits as a call without a forced kernel."""
    arrays = native(device, case)
    plan = fa.query(*arrays, causal=case.causal)
    assert plan.status == "FA_OK" and plan.error == ""
    assert plan.kernel in [kernel["name"] for kernel in fa.kernels() if kernel["device"] == device.name]
    assert bool(plan.variant) == (plan.kernel == "wgmma_sm90")  # the kernel that names its plans
    free = device.numpy(fa.flash_attn_func(*arrays, causal=case.causal))
    forced = device.numpy(fa.flash_attn_func(*arrays, causal=case.causal, kernel=plan.kernel))
    np.testing.assert_array_equal(free, forced)


def test_why_not_names_every_kernel_preferred_to_the_chosen_one(device):
    plan = fa.query(*native(device, Case()))
    names = [kernel["name"] for kernel in fa.kernels() if kernel["device"] == device.name]
    assert list(plan.why_not) == names[: names.index(plan.kernel)]
    assert all(plan.why_not.values())


def test_forced_by_environment(kernel, monkeypatch):
    arrays = native(kernel.device, Case())
    monkeypatch.setenv("FLASH_ATTN_KERNEL", kernel.name)
    plan = fa.query(*arrays)
    if plan.status == "FA_UNSUPPORTED" and not kernel.general:
        pytest.skip(plan.error)
    assert plan.kernel == kernel.name
    out = kernel.device.numpy(fa.flash_attn_func(*arrays))
    monkeypatch.delenv("FLASH_ATTN_KERNEL")
    np.testing.assert_array_equal(out, kernel.device.numpy(fa.flash_attn_func(*arrays, kernel=kernel.name)))


def test_argument_wins_over_environment(kernel, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_KERNEL", "nonesuch")
    arrays = native(kernel.device, Case())
    with pytest.raises(fa.BadArgument, match="FLASH_ATTN_KERNEL=nonesuch is not a kernel of this build"):
        fa.flash_attn_func(*arrays)
    assert fa.query(*arrays).status == "FA_BAD_ARGUMENT"
    assert fa.query(*arrays, kernel=kernel.name).status in ("FA_OK", "FA_UNSUPPORTED")


def test_a_kernel_that_this_build_lacks():
    """The text says which kernels the build has, and how to build the rest."""
    q, info = np.zeros((1, 1, 1, 8), np.float32), library.load().fa_build_info().decode()
    if "CPU backend only" in info:
        why = (
            "; this build has no GPU kernels: ./build_and_run.sh --all-kernels builds them "
            "(CMake: -DFLASH_ATTN_CUDA=ON)"
        )
    elif "general kernels only" in info:
        why = (
            "; this build has only the general kernels: ./build_and_run.sh --all-kernels builds the rest "
            "(CMake: -DFLASH_ATTN_KERNELS=all)"
        )
    elif not {"mma_sm80", "wgmma_sm90"} - {row["name"] for row in fa.kernels()}:
        why = ""
    else:
        pytest.skip(f"a build for some GPUs: {info}")
    with pytest.raises(fa.BadArgument) as error:
        fa.flash_attn_func(q, q, q, kernel="wgmma_sm99")
    text = str(error.value)
    assert text.startswith("kernel=wgmma_sm99 is not a kernel of this build, whose kernels for the CPU are cpu_")
    assert text.endswith(why or "cpu_naive")


# What the headers need of CUDA, for a compiler without it.
CUDA_RUNTIME = """
enum cudaError_t { cudaSuccess };
typedef struct CUstream_st* cudaStream_t;
const char* cudaGetErrorString(cudaError_t);
const char* cudaGetErrorName(cudaError_t);
"""
CHOICES = r"""
#define FA_WITH_CUDA 1
#define FA_GENERAL_KERNELS 1
#include <cstdarg>
#include "api/common/dispatch.h"
fa_status fa::fail(fa_status status, const char* format, ...) {
    va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
    return std::puts(""), status;
}
struct Params {};
uint32_t features_of(const Params&) { return 0; }
struct Limits {
    fa::Check check;
    fa::Refusal refuses(uint32_t, const Params&, const fa::DeviceInfo&, char*, size_t) const {
        return {"too long", check};
    }
    const char* misplaces(const Params&, char*, size_t) const { return nullptr; }
    static const char* too_large(const Params&, char*, size_t) { return ""; }
};
using Row = fa::KernelOf<Params, Limits>;
void run(const Params&) {}
using fa::Check;
constexpr Row kRows[] = {{"cpu", "", FA_CPU, {}, {}, {}, {}, {}, run},
                         {"minimal", "", FA_CUDA, {Check::kOption}, {}, {}, {}, {}, run},
                         {"special", "", FA_CUDA, {Check::kType}, {}, {}, {}, {}, run},
                         {"elsewhere", "", FA_CUDA, {Check::kSpeed}}};
int main() {
    const Row* row;
    fa::DeviceInfo device{};
    for (int compute : {75, 90}) {
        device.compute = compute;
        for (int count : {1, 4})
            fa::choose(nullptr, FA_CUDA, Params{}, device, fa::Table<Row>{kRows, count}, "VARIABLE", &row, nullptr);
    }
}
"""


def test_refusals_of_a_build_with_the_general_kernels_alone(tmp_path):
    """The rest of the kernels is mentioned where it could run: from sm_80 on. The reason is that of the kernel that
    comes closest, not of the last one, or of one that the build lacks."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or not (ROOT / "cuda/api/common/dispatch.h").is_file():
        pytest.skip("no C++ compiler, or no sources beside the tests")
    source, program = tmp_path / "choices.cpp", tmp_path / "choices"
    source.write_text(CHOICES)
    (tmp_path / "cuda_runtime_api.h").write_text(CUDA_RUNTIME)
    subprocess.run(
        [*compiler.split(), "-std=c++17", f"-I{ROOT / 'cuda'}", f"-I{tmp_path}", "-o", str(program), str(source)],
        check=True,
    )
    said = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    none = "no kernel of this build serves the call on FA_CUDA; there is none for this device"
    one = "no kernel of this build serves the call on FA_CUDA; minimal: too long"
    rest = "; this build has only the general kernels: ./build_and_run.sh --all-kernels builds the rest "
    rest += "(CMake: -DFLASH_ATTN_KERNELS=all)"
    assert said == [none, one, none + rest, one + rest]


def test_forced_kernel_that_this_processor_lacks():
    q = np.zeros((1, 1, 1, 8), np.float32)
    lacking = [x["name"] for x in fa.kernels() if x["device"] == "cpu" and x["name"] not in cpu_kernels()]
    if not lacking:
        pytest.skip("this processor runs every CPU kernel of this build")
    with pytest.raises(fa.Unsupported, match=f"kernel={lacking[0]} cannot serve this call: "):
        fa.flash_attn_func(q, q, q, kernel=lacking[0])


def test_varlen(device):
    q = device.array(np.zeros((10, 2, 16), np.float32))
    starts = device.array(np.array([0, 4, 10], np.int32))
    plan = fa.query(q, q, q, starts, starts, 6, 6, causal=True, return_lse=True)
    assert plan.status == "FA_OK" and plan.kernel


def _call(kernel):
    """A filled struct with exactly as much workspace as the query asks for."""
    (q, k, v, _), *_ = expected(Case(65, 65, 40))
    out = np.full(q.shape, np.nan, np.float32)
    args, views = options._prepare(q, k, v, None, options.Options(kernel=kernel))
    views.append(options._output(args, views, out, out.shape, False))
    return args, views, out


@pytest.mark.parametrize("name", ["cpu_portable", "cpu_naive"])
def test_workspace(name):
    """A workspace of exactly the size that the query returns is enough, at any alignment. One byte less is refused, and
    the call writes nothing."""
    lib = library.load()
    args, views, out = _call(name)
    size = queries.plan_of(args).workspace_bytes
    assert size > 0
    room = (ct.c_char * (size + 3))(*[b"\xff"] * (size + 3))
    args.workspace, args.workspace_bytes = ct.addressof(room) + 1, size - 1
    with pytest.raises(fa.WorkspaceTooSmall, match=f"workspace_bytes={size - 1} .* but kernel {name} needs {size}"):
        lib.fa_attention_forward(args, None)
    args.workspace, args.workspace_bytes = None, size
    with pytest.raises(fa.WorkspaceTooSmall):
        lib.fa_attention_forward(args, None)
    assert np.isnan(out).all()
    args.workspace = ct.addressof(room) + 1
    lib.fa_attention_forward(args, None)
    assert np.isfinite(out).all()
    assert room[0] == b"\xff" and room[size + 1] == b"\xff", "wrote outside of the workspace"
    del views


def test_strides_of_gradients_without_addresses():
    """A query refuses the strides that the call would refuse, whether or not the gradients already have memory."""
    forward, *_ = _call("cpu_portable")
    lib, plan = library.load(), structs.new(structs.AttentionPlan)
    args = structs.new(structs.AttentionBackwardArgs)
    args.forward = ct.pointer(forward)
    for name, x in (("dout", "out"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
        for axis in ("batch", "row", "head"):
            setattr(args, f"{name}_{axis}_stride", getattr(forward, f"{x}_{axis}_stride"))
    forward.kernel = None
    assert lib.fa_attention_backward_query(args, plan) == 0, lib.fa_last_error()
    args.dk_row_stride = 0
    assert lib.fa_attention_backward_query(args, plan) == 1
    assert b"dk.row_stride=0" in lib.fa_last_error()


def test_workspace_does_not_grow():
    """CPU scratch is per thread. Once the keys fill a tile, it depends neither on batch nor on seqlen."""
    shapes = [(1, 8192, 4, 64), (2, 32768, 4, 64)]
    plans = [fa.query(*[np.zeros(shape, np.float32)] * 3, num_threads=2) for shape in shapes]
    assert plans[0].kernel == plans[1].kernel != "cpu_naive"
    assert plans[0].workspace_bytes == plans[1].workspace_bytes


def test_struct_from_an_older_or_newer_header():
    lib = library.load()
    args, *_ = _call("cpu_portable")
    args.struct_size = 8
    with pytest.raises(fa.BadArgument, match="struct_size=8"):
        lib.fa_attention_forward(args, None)

    class Newer(ct.Structure):
        _fields_ = [("known", structs.AttentionArgs), ("unknown", ct.c_int64)]

    newer = Newer(_call("cpu_portable")[0], 0)
    newer.known.struct_size = ct.sizeof(Newer)
    plan = structs.AttentionPlan(struct_size=ct.sizeof(structs.AttentionPlan))
    assert lib.fa_attention_query(ct.cast(ct.byref(newer), ct.POINTER(structs.AttentionArgs)), plan) == 0
    newer.unknown = 1
    assert lib.fa_attention_query(ct.cast(ct.byref(newer), ct.POINTER(structs.AttentionArgs)), plan) == 2
    assert b"does not know" in lib.fa_last_error()


def test_cuda_on_a_build_without_it():
    if {kernel["device"] for kernel in fa.kernels()} != {"cpu"}:
        pytest.skip("this build has CUDA kernels")
    from flash_attn_minimal._commands.info import _CALLS, typical_args

    plan = queries.plan_of(typical_args(structs.CUDA, *_CALLS[0][1:]))
    assert plan.status == "FA_UNSUPPORTED" and "CPU backend only" in plan.error
