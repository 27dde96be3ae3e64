"""The experiments library: its table and its refusals on any machine, and every variant against float64 on a GPU.

Variants run in a separate process, with a time limit for each, so that a kernel that hangs fails its test, and the next
variants get a new process."""

import ctypes as ct
import json
import os
import re
import subprocess
import sys
import threading

import pytest
from conftest import CUDA, NO_CUDA, ROOT

if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from ladder import variants  # noqa: E402

import flash_attn_minimal as fa  # noqa: E402
from flash_attn_lab.experiments._variants import VariantStruct  # noqa: E402
from flash_attn_minimal._core import structs  # noqa: E402

try:
    TABLE = variants.variants()
except fa.LibraryNotFound as error:
    pytest.skip(str(error), allow_module_level=True)
NAMES = {variant.name: variant for variant in TABLE}
OWN = [variant for variant in TABLE if variant.headdim]  # the others are kernels of the library
HEADER = (ROOT / "ladder/variants/experiments.h").read_text()
SECONDS = 60  # limit for a variant's calls, with the start of the process

# q and k: rows that end inside a tile and heads that share keys, one tile, more queries than keys (rows that see none)
SHAPES = {"awkward": (2, 333, 4, 717, 2), "a tile": (1, 128, 2, 128, 2), "more queries": (1, 300, 2, 170, 1)}


# ---- without a GPU ----


def test_names_are_unique_and_steps_go_upwards():
    assert len(NAMES) == len(TABLE) > 80
    for backward, least in ((False, 8), (True, 5)):
        climb = [
            v for v in TABLE if v.experiment == "optimisation" and v.backward == backward and v.headdim in (0, 128)
        ]
        orders = [v.order for v in sorted(climb, key=lambda v: v.order)]
        assert orders == list(range(1, len(orders) + 1)) and len(orders) >= least
        for v in climb:
            assert v.name.startswith(f"{'backward' if backward else 'forward'}_{v.order:02}_"), v.name


@pytest.mark.parametrize("variant", TABLE, ids=lambda v: v.name)
def test_numbers_are_sane(variant):
    assert variant.experiment in variants.EXPERIMENTS and variant.about and variant.kernel
    assert (variant.registers, variant.spill_bytes, variant.blocks_per_sm) == (0, 0, 0)  # known on a GPU alone
    if variant.headdim == 0:
        return
    assert variant.headdim in (64, 128) and variant.stages in (1, 2, 3, 4)
    assert 16 <= variant.tile_m <= 256 and 16 <= variant.tile_n <= 256
    assert variant.tile_m % 16 == 0 and variant.tile_n % 16 == 0
    assert 32 <= variant.threads <= 1024 and variant.threads % 32 == 0
    assert 0 < variant.shared_bytes <= 227 * 1024
    if variant.experiment == "block-size":
        assert f"d{variant.headdim}_{variant.tile_m}x{variant.tile_n}" in variant.name


def test_python_mirrors_the_header():
    body = re.search(r"typedef struct fa_variant \{(.*?)\} fa_variant;", HEADER, re.DOTALL)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    fields = [
        name.strip(" *") for line in re.findall(r"(?:size_t|char\*|int32_t) ([^;]+);", body) for name in line.split(",")
    ]
    assert fields == [name for name, _ in VariantStruct._fields_]
    assert ct.sizeof(VariantStruct) == 8 * 5 + 4 * 12
    numbers = dict(re.findall(r"FA_TRACE_(\w+) = (\d+)", HEADER))
    for name in ("offset", "blocks", "roles", "stamps"):
        assert int(numbers.pop(name.upper())) == getattr(variants, f"TRACE_{name.upper()}")
    assert {name.lower(): int(value) for name, value in numbers.items()} == {
        name: value for value, name in enumerate(variants.TRACE_EVENTS)
    }
    assert variants.STAMP.itemsize == 16 and variants.ROLE.itemsize == 8 + 16 * variants.TRACE_STAMPS


def test_bad_arguments_are_named():
    with pytest.raises(fa.BadArgument, match="name=nothing"):
        variants.workspace_bytes("nothing", variants.arguments((1, 8, 1, 64), (1, 8, 1, 64)))
    struct = structs.new(VariantStruct)
    for index in (-1, len(TABLE)):
        with pytest.raises(fa.BadArgument, match=f"index={index}"):
            variants.load().fa_variant_get(index, -1, struct)
    struct.struct_size -= 4
    with pytest.raises(fa.BadArgument, match="struct_size"):
        variants.load().fa_variant_get(0, -1, struct)


def call(headdim=128, dtype="bfloat16", **fields):
    args = variants.arguments((1, 256, 2, headdim), (1, 256, 2, headdim), dtype=dtype)
    for name, value in fields.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize("variant", OWN, ids=lambda v: v.name)
def test_refusals_are_named(variant):
    d = variant.headdim
    for args, text in (
        (call(d, dtype="float16"), "bfloat16 only"),
        (call(192 - d), f"headdim={192 - d}"),
        (call(d, softcap=2.0), "softcap"),
        (call(d, has_window=1, window_left=5, window_right=-1), "window_left"),
        (call(d, softmax_scale=-1.0, has_softmax_scale=1), "softmax_scale=-1"),
        (call(d, seqlen_k=0), "no keys to load"),
        (call(d, q_row_stride=2 * d + 4), r"\bq(\.row_stride=| of )"),
        (call(d, device=structs.CPU), "device=1"),
    ):
        with pytest.raises(fa.Unsupported, match=text) as raised:
            variants.workspace_bytes(variant.name, args)
        assert variant.name in str(raised.value)


def test_a_variant_refuses_the_other_pass():
    forward, backward = (next(v.name for v in OWN if v.backward == which) for which in (False, True))
    with pytest.raises(fa.Unsupported, match="variant of the backward pass"):
        variants.load().fa_variant_forward(backward.encode(), call(), None)
    with pytest.raises(fa.Unsupported, match="variant of the forward pass"):
        variants.load().fa_variant_backward(forward.encode(), structs.new(structs.AttentionBackwardArgs), None)


# ---- on a GPU ----


class Watchdog:
    """A process that runs variants one after another, until one hangs or breaks the GPU's context."""

    process = None

    def run(self, name: str) -> list:
        if self.process is None or self.process.poll() is not None:
            command = [sys.executable, __file__, "--worker"]
            paths = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
            environment = {**os.environ, "PYTHONPATH": paths}
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        timer = threading.Timer(SECONDS, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.process.wait()
            pytest.fail(f"{name}: the process ended with {self.process.returncode}, or hung for {SECONDS} s")
        failures = json.loads(line)
        if failures:  # after a fault the context is lost: a fresh process for the next one
            self.process.kill()
            self.process.wait()
        return failures


@pytest.fixture(scope="module")
def watchdog():
    dog = Watchdog()
    yield dog
    if dog.process is not None:
        dog.process.kill()
        dog.process.wait()


@pytest.mark.parametrize("variant", TABLE, ids=lambda v: v.name)
def test_against_float64(variant, watchdog):
    if NO_CUDA or CUDA.framework != "torch":
        pytest.skip(NO_CUDA or "variants take PyTorch tensors")
    import torch

    major, minor = torch.cuda.get_device_capability()
    if 10 * major + minor < variant.compute or (variant.compute == 90 and major != 9):
        pytest.skip(f"needs sm_{variant.compute}")
    assert watchdog.run(variant.name) == []


def _failures(variant) -> list[str]:
    """Texts about what is wrong with a variant's results. Runs in the worker."""
    import accuracy
    import numpy as np
    import torch

    found = []
    for shape, (batch, seqlen_q, nheads, seqlen_k, nheads_k) in SHAPES.items():
        for causal in (False, True):
            case = accuracy.Case(
                batch=batch, seqlen_q=seqlen_q, nheads=nheads, seqlen_k=seqlen_k, nheads_k=nheads_k,
                headdim=variant.headdim or 128, dtype="bfloat16", causal=causal,
            )  # fmt: skip
            try:
                if variant.backward:
                    (dout, q, k, v, out, lse, _), exact, plain = accuracy.expected_backward(case)
                    arrays = [CUDA.array(x, "bfloat16") for x in (dout, q, k, v, out)]
                    got = variants.backward(variant.name, *arrays, CUDA.array(lse), causal)
                    torch.cuda.synchronize()
                    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
                        true = getattr(exact, name)
                        floor = accuracy.gradient_floor(case, true)
                        accuracy.check(name, CUDA.numpy(x), true, getattr(plain, name), "bfloat16", floor=floor)
                    continue
                (q, k, v, _), (exact, exact_lse), (plain, plain_lse) = accuracy.expected(case)
                arrays = [CUDA.array(x, "bfloat16") for x in (q, k, v)]
                launch, out, lse, workspace = variants.prepare_forward(variant.name, *arrays, causal)
                launch()
                torch.cuda.synchronize()
                floor = accuracy.rounding_floor(q, k)
                accuracy.check("lse", CUDA.numpy(lse), exact_lse, plain_lse, "float32", floor=floor)
                accuracy.check("out", CUDA.numpy(out), exact, plain, "bfloat16", floor=floor)
                if variant.experiment == "trace":
                    trace = variants.read_trace(workspace)
                    groups = variant.tile_m // 64
                    assert (trace["count"][0, : 1 + groups] > 0).all(), "a role of the first block recorded nothing"
                    for role in trace[0, : 1 + groups]:
                        stamps = role["stamps"][: min(int(role["count"]), variants.TRACE_STAMPS)]
                        assert (np.diff(stamps["clock"].astype(np.int64)) >= 0).all(), "stamps in order of time"
                        assert stamps["event"].max() < len(variants.TRACE_EVENTS)
                if variant.experiment == "online-softmax":
                    rows = variants.read_counters(workspace, batch, nheads, seqlen_q)
                    assert (rows["tiles"] * variant.tile_n < seqlen_k + variant.tile_n).all()
                    assert (rows["rescales"] <= rows["moved"]).all() and (rows["rise"] >= 0).all()
            except Exception as error:
                found.append(f"{shape}, causal={causal}: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_failures(NAMES[line.strip()])), flush=True)
