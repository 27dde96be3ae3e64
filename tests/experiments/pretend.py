"""A machine that pretends to be a GPU and computes in NumPy, and a library of variants that run the CPU's kernels. With
them the GPU part of the experiments runs on any machine."""

import shutil
import subprocess
from types import SimpleNamespace

import pytest
from conftest import ROOT

from flash_attn_lab import experiments
from flash_attn_lab.bench.machine import Numpy
from flash_attn_lab.experiments import _calls, _variants, sweeps, traffic
from flash_attn_minimal._core import library


class Gpu(Numpy):
    """Arrays of NumPy on "cuda"."""

    device = "cuda"
    name = "NVIDIA H200"

    def __init__(self):
        self.marks = []
        mark = {name: lambda name=name: self.marks.append(name) for name in ("start", "stop")}
        self.cupy = SimpleNamespace(cuda=SimpleNamespace(profiler=SimpleNamespace(**mark)))

    def describe(self):
        return {"gpu": self.name}

    @property
    def title(self):
        return self.name


# (name, experiment, kernel, about, order, backward, tile_m, tile_n); every kernel is the library's own choice.
VARIANTS = [
    ("tile_d128_64x64", "block-size", "minimal", "64 rows x 64 keys", 1, 0, 64, 64),
    ("tile_d128_128x64", "block-size", "minimal", "128 rows x 64 keys", 2, 0, 128, 64),
    ("broken", "block-size", "minimal", "refuses every call", 3, 0, 16, 16),
    ("order_v1", "traffic", "minimal", "keys outside", 1, 0, 64, 64),
    ("forward_01", "optimisation", "naive", "three steps", 1, 0, 0, 0),
    ("forward_02", "optimisation", "minimal", "online softmax", 2, 0, 64, 64),
    ("backward_01", "optimisation", "simple", "two passes", 1, 1, 64, 64),
]
SOURCE = r"""
#if __has_include("ladder/variants/experiments.h")
#include "ladder/variants/experiments.h"
#else
#include "flash_attn.h"
typedef struct fa_variant {
    size_t struct_size;
    const char *name, *experiment, *kernel, *about;
    int32_t order, backward, tile_m, tile_n, stages, threads;
    int32_t registers, shared_bytes, spill_bytes, blocks_per_sm, headdim, compute;
} fa_variant;
#endif
#include <string.h>
static const struct {
    const char *name, *experiment, *kernel, *about;
    int32_t order, backward, tile_m, tile_n;
} table[] = {
@ROWS@
};
static int broken(const char* name) { return strcmp(name, "broken") == 0; }
int32_t fa_variant_count(void) { return sizeof table / sizeof *table; }
fa_status fa_variant_get(int32_t i, int32_t device, fa_variant* v) {
    if (v->struct_size != sizeof *v) return FA_BAD_ARGUMENT;
    v->name = table[i].name, v->experiment = table[i].experiment, v->kernel = table[i].kernel;
    v->about = table[i].about, v->order = table[i].order, v->backward = table[i].backward;
    v->tile_m = table[i].tile_m, v->tile_n = table[i].tile_n;
    v->stages = 2, v->threads = 128, v->headdim = table[i].tile_m ? 128 : 0, v->compute = 80, v->shared_bytes = 65536;
    v->registers = device < 0 ? 0 : 168, v->spill_bytes = 8, v->blocks_per_sm = device < 0 ? 0 : 2;
    return FA_OK;
}
fa_status fa_variant_forward(const char* name, const fa_attention_args* args, void* stream) {
    return broken(name) ? FA_UNSUPPORTED : fa_attention_forward(args, stream);
}
fa_status fa_variant_backward(const char* name, const fa_attention_backward_args* args, void* stream) {
    return fa_attention_backward(args, stream);
}
fa_status fa_variant_workspace(const char* name, const fa_attention_args* args, size_t* bytes) {
    fa_attention_plan plan;
    memset(&plan, 0, sizeof plan), plan.struct_size = sizeof plan;
    if (broken(name)) return FA_UNSUPPORTED;
    fa_status status = fa_attention_query(args, &plan);
    if (strncmp(name, "backward", 8) == 0) {
        fa_attention_backward_args b;
        memset(&b, 0, sizeof b), b.struct_size = sizeof b, b.forward = args;
        b.dout = args->out, b.dq = args->q, b.dk = args->k, b.dv = args->v;
        status = fa_attention_backward_query(&b, &plan);
    }
    *bytes = plan.workspace_bytes;
    return status;
}
const char* fa_variant_last_error(void) { return "broken: it refuses"; }
"""


@pytest.fixture(scope="session")
def variants_library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not (ROOT / "cuda" / "flash_attn.h").is_file():
        pytest.skip("a C compiler and the headers are needed")
    folder = tmp_path_factory.mktemp("variants")
    rows = ["{" + ", ".join(f'"{x}"' if isinstance(x, str) else str(x) for x in row) + "}," for row in VARIANTS]
    (folder / "variants.c").write_text(SOURCE.replace("@ROWS@", "\n".join(rows)))
    file = folder / _variants.LIBRARY_NAME
    command = [compiler, "-shared", "-fPIC", "-I", ROOT / "cuda", "-I", ROOT, folder / "variants.c", library.path()]
    subprocess.run([*command, "-o", file, f"-Wl,-rpath,{library.path().parent}"], check=True)
    return file


@pytest.fixture
def gpu(monkeypatch, variants_library):
    """The command sees a GPU of four SMs, and the library of variants."""
    pytest.importorskip("ml_dtypes", reason="the variants take bfloat16")
    machine = Gpu()
    monkeypatch.setenv("FLASH_ATTN_EXPERIMENTS", str(variants_library))
    for module in (experiments, _calls):
        monkeypatch.setattr(module, "open_machine", lambda device, framework: machine)
    for module in (sweeps, traffic):
        monkeypatch.setattr(module, "multiprocessors", lambda machine: 4)
    return machine
