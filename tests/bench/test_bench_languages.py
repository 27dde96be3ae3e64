"""The suite `languages` on the CPU with tiny shapes: the rungs of the ladder, and rungs that misbehave."""

import json
import os
import shutil
import signal
import sys
import time
import types

import numpy as np
import pytest
from bench_run import run
from conftest import ROOT, ml_dtypes

from flash_attn_lab import bench
from flash_attn_lab.bench import figure, languages, machine
from flash_attn_lab.bench.rows import timed
from flash_attn_lab.reference import standard_attention

if not (ROOT / "ladder").is_dir():
    pytest.skip("the ladder is not beside the tests", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from ladder import ahead, library, rungs  # noqa: E402
from ladder.rung import Calls, Rung, Unavailable  # noqa: E402

TINY = ["--suite", "languages", "--device", "cpu", "--rounds", "2", "--quick"]
SMALL = [*TINY, "--seqlen", "65", "--headdim", "64", "--heads", "4", "--heads-k", "2", "--batch", "1"]


def standard(q, k, v, causal):
    out, lse = standard_attention(q, k, v, causal=causal)
    return out.astype(np.float32), lse.astype(np.float32)


def rung(name, forward=standard, load=None, **more):
    options = {"language": "NumPy", "about": "a test", "device": "cpu", "files": (), **more}
    return Rung(name=name, load=load or (lambda: Calls(forward)), **options)


@pytest.fixture
def only(monkeypatch):
    """A function that replaces the ladder's rungs by the given ones."""
    return lambda *mine: monkeypatch.setattr(rungs, "RUNGS", mine)


def test_every_rung_of_the_cpu(tmp_path):
    data = run(tmp_path, *SMALL, "--mask", "full,causal")
    here = {rung.name: rung for rung in rungs.RUNGS if rung.device == "cpu" and "float32" in rung.dtypes}
    here = {name: rung for name, rung in here.items() if not rung.peer}
    reasons = {item["system"]: item["reason"] for item in data["left_out"]}
    if shutil.which(os.environ.get("CC") or "cc"):
        assert not here.keys() & reasons.keys(), reasons
    forward = [row for row in data["rows"] if row["pass"] == "fwd"]
    for causal in (False, True):
        found = [row["system"] for row in forward if row["causal"] == causal and not row.get("peer")]
        assert found == [*(name for name in here if name not in reasons), "ours"]
    assert {"numpy_standard", "ours"} <= {row["system"] for row in data["rows"] if row["pass"] == "bwd"}
    for row in data["rows"]:
        assert row["max_err"] <= row["err_budget"] * (5 if row.get("peer") else 1) and row["compile_s"] >= 0
        if row["system"] in here:
            assert row["lines"] == here[row["system"]].lines() > 20
        products = 5 if row["pass"] == "bwd" else 2
        flop = products * 2 * 65 * 65 * 64 * 4 * (0.5 if row["causal"] else 1)
        assert row["tflops"] * row["us"] * 1e6 == pytest.approx(flop, rel=1e-3)
    text = (tmp_path / "languages.md").read_text()
    assert "## fp32 forward, 4/2 heads, headdim 64, batch 1" in text and "## fp32 backward" in text
    assert "| numpy_v3 | NumPy | " in text and "| flash-attn-minimal | C++ |  | " in text
    assert (tmp_path / "languages_curves.png").exists() == figure.available()
    assert bench.main(["--plot-only", str(tmp_path / "languages.json")]) == 0
    assert (tmp_path / "languages.md").read_text() == text


def test_compiling_is_measured_with_an_empty_cache(tmp_path):
    if not shutil.which(os.environ.get("CC") or "cc"):
        pytest.skip("no C compiler")
    before = {name: os.environ.get(name) for name in languages.CACHES}  # torch.compile sets one of them itself
    for _ in range(2):  # the second run compiles again
        data = run(tmp_path, *SMALL, "--kernel", "c_vectors,numpy_standard")
        first = {row["system"]: row["compile_s"] for row in timed(data)}
        assert first["c_vectors"] > max(0.05, 2 * first["numpy_standard"])
    assert {name: os.environ.get(name) for name in languages.CACHES} == before


def test_shapes():
    gpu, cpu = types.SimpleNamespace(device="cuda"), types.SimpleNamespace(device="cpu")

    def points(machine, *words):
        return languages.points(bench._parser().parse_args(["--suite", "languages", *words]), machine)

    every = points(gpu)
    story = [shape for shape in every if shape.headdim == 64]
    assert every[: len(story)] == story
    assert {(s.batch, s.nheads, s.seqlen) for s in story} == {(8, 12, 1024)}
    assert len(story) == 2 * (2 + 2 + 2 + 1)  # masks x passes, without a backward pass of fp8
    rest = every[len(story) :]
    assert {shape.tokens for shape in rest} == {16384} and {shape.seqlen for shape in rest} == set(languages.SEQLENS)
    assert {(shape.nheads, shape.headdim) for shape in rest} == {(16, 128)}
    assert len(rest) == len(languages.SEQLENS) * len(story)
    for dtype in languages.DTYPES["cuda"]:  # small to large, so that the slow are found out early
        lengths = [shape.seqlen for shape in rest if shape.dtype == dtype]
        assert lengths == sorted(lengths)
    assert sum(s.flops for s in points(cpu)) < sum(s.flops for s in every) / 50
    assert len(points(gpu, "--quick")) == 4 and len(points(cpu, "--quick")) == 4
    [one] = points(gpu, "--quick", "--dtype", "fp8", "--seqlen", "256", "--headdim", "64", "--mask", "causal")
    assert (one.batch, one.dtype, one.causal, one.backward) == (64, "float8_e4m3fn", True, False)


def test_a_wrong_rung_is_a_finding_and_a_wrong_peer_is_left_out(tmp_path, only):
    def wrong(factor):
        return lambda *call: (standard(*call)[0] * np.float32(factor), None)

    only(rung("right"), rung("off", wrong(1.001)), rung("other", wrong(1.1), peer=True))
    data = run(tmp_path, *SMALL, code=1)
    [row] = [row for row in data["rows"] if row["system"] == "off"]
    assert row["wrong"] and "us" not in row and row["max_err"] > row["err_budget"]
    assert {row["system"] for row in timed(data)} == {"right", "ours"}
    [item] = [item for item in data["left_out"] if item["system"] == "other"]
    assert item["reason"] == "its answer is off by more than 5 times the budget"
    assert "## Wrong answers" in (tmp_path / "languages.md").read_text()


def test_a_peer_may_compute_in_tf32(tmp_path, only):
    def coarse(q, k, v, causal):
        from flash_attn_lab.bench.check import round_to

        return standard(*(round_to(x, "tf32") for x in (q, k, v)), causal)

    only(rung("coarse", coarse, peer=True))
    rows = run(tmp_path, *SMALL)["rows"]
    assert [row["system"] for row in rows if row.get("tf32")] == ["coarse"]


def test_rungs_that_do_not_serve(tmp_path, only):
    def missing():
        raise Unavailable("no such compiler")

    def broken():
        raise OSError("cannot load")

    def raising(q, k, v, causal):
        raise ZeroDivisionError("in the kernel")

    only(
        rung("missing", load=missing),
        rung("broken", load=broken),
        rung("raising", raising),
        rung("narrow", refusal=lambda shape: f"seqlen_k={shape.seqlen_k} is odd" if shape.seqlen_k % 2 else None),
        rung("other dtype", dtypes=("float16",)),
        rung("other headdim", headdims=(32,)),
        rung("other device", device="cuda"),
    )
    data = run(tmp_path, *SMALL)
    assert {row["system"] for row in data["rows"]} == {"ours"}
    found = {item["system"]: (item["reason"], item["shape"]) for item in data["left_out"]}
    assert found.keys() == {"missing", "broken", "raising", "narrow"}
    assert found["missing"] == ("no such compiler", "all shapes")
    assert found["broken"] == ("load() raised OSError: cannot load", "all shapes")
    assert found["raising"][0] == "raised ZeroDivisionError: in the kernel" and "seqlen 65" in found["raising"][1]
    assert found["narrow"][0] == "seqlen_k=65 is odd"


def test_a_slow_rung_is_left_out_where_a_call_would_take_too_long(tmp_path, only, monkeypatch):
    calls = []

    def slow(q, k, v, causal):
        calls.append(q.shape[1])
        time.sleep(1e-6 * q.shape[1] ** 2)
        return standard(q, k, v, causal)

    monkeypatch.setitem(languages.CALL_LIMIT_S, "cpu", 0.05)
    monkeypatch.setitem(languages.PROBE_SEQLEN, "cpu", 64)
    only(rung("slow", slow))
    data = run(tmp_path, *TINY, "--seqlen", "64,1024", "--headdim", "64", "--heads", "1", "--batch", "1")
    assert [row["seqlen_q"] for row in data["rows"] if row["system"] == "slow"] == [64]
    assert 1024 not in calls
    [item] = [item for item in data["left_out"] if item["system"] == "slow"]
    assert "longer than 0.05 s" in item["reason"] and "seqlen 1024" in item["shape"]


def test_a_run_that_ends_early_reports_what_it_has(tmp_path, only, monkeypatch):
    clock = iter([0.0, 0.0, 0.0] + [1e9] * 99)
    monkeypatch.setattr(languages.time, "monotonic", lambda: next(clock))
    only(rung("once"))
    data = run(tmp_path, *TINY, "--seqlen", "8,16,24", "--headdim", "64", "--heads", "1", "--batch", "1")
    assert {row["seqlen_q"] for row in data["rows"]} == {8}
    ends = [item for item in data["left_out"] if item["system"] == "all"]
    assert {"seqlen 16" in item["shape"] or "seqlen 24" in item["shape"] for item in ends[1:]} == {True}
    assert "limit of 20 minutes" in ends[0]["reason"]


def test_a_signal_ends_the_run_and_keeps_its_rows(tmp_path, only):
    def once(q, k, v, causal):
        if q.shape[1] == 16:
            signal.raise_signal(signal.SIGTERM)
        return standard(q, k, v, causal)

    only(rung("once", once))
    before = signal.getsignal(signal.SIGTERM)
    shape = ["--seqlen", "8,16,24", "--headdim", "64", "--heads", "1", "--batch", "1", "--output", str(tmp_path)]
    assert bench.main([*TINY, *shape]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    data = json.loads((tmp_path / "languages_part.json").read_text())
    assert {row["seqlen_q"] for row in data["rows"]} == {8} and data["stopped"] == "interrupted"


def test_one_failure_while_timing_does_not_cost_the_others_their_times(tmp_path, only):
    calls = []

    def tired(q, k, v, causal):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("no more")
        return standard(q, k, v, causal)

    only(rung("first"), rung("tired", tired))
    data = run(tmp_path, *SMALL)
    assert [row["system"] for row in data["rows"] if row["pass"] == "fwd"] == ["first", "ours"]
    [item] = [item for item in data["left_out"] if item["system"] == "tired"]
    assert item["reason"] == "raised RuntimeError when it was timed: no more"


def test_eight_bits(tmp_path):
    if ml_dtypes is None:
        pytest.skip("ml_dtypes is not installed")
    options = ["--dtype", "fp8", "--seqlen", "64", "--headdim", "64", "--heads", "1", "--batch", "1"]
    data = run(tmp_path, *TINY, *options)
    assert "numpy_fp8" in [row["system"] for row in data["rows"]]
    assert all(row["pass"] == "fwd" and row["dtype"] == "float8_e4m3fn" for row in data["rows"])


def test_a_shape_without_inputs_is_left_out(tmp_path, only, monkeypatch):
    class Arrays(languages.Arrays):
        def __init__(self, machine, shape, seed):
            if shape.seqlen == 16 and not shape.backward:
                raise MemoryError("too large")
            super().__init__(machine, shape, seed)

    monkeypatch.setattr(languages, "Arrays", Arrays)
    only(rung("one"))
    data = run(tmp_path, *TINY, "--seqlen", "8,16,24", "--headdim", "64", "--heads", "1", "--batch", "1")
    assert [row["seqlen_q"] for row in data["rows"] if row["system"] == "one"] == [8, 24]
    assert [item["reason"] for item in data["left_out"]] == ["no inputs, MemoryError: too large"]


def test_the_machine_of_torch_has_what_the_suite_needs(tmp_path, only, monkeypatch):
    """Rungs for a GPU get PyTorch tensors; in this test the tensors are on the CPU."""
    torch = pytest.importorskip("torch")

    def forward(q, k, v, causal):
        assert isinstance(q, torch.Tensor)
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.float().transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        )
        return out.transpose(1, 2).to(torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype), None

    monkeypatch.setattr(languages, "open_machine", lambda *_: machine.TorchCpu())
    only(rung("torch", forward, dtypes=("bfloat16", "float8_e4m3fn")))
    for dtype in ("bf16", "fp8"):
        data = run(tmp_path, *SMALL, "--dtype", dtype)
        assert "torch" in {row["system"] for row in timed(data)}


@pytest.mark.parametrize(
    "options, complaint",
    [
        (["--kernel", "c_tiles,warp"], "--kernel c_tiles,warp: 'warp' is not one of numpy_standard, "),
        (["--peers", "torch"], "--peers torch: suite languages takes all or none"),
    ],
)
def test_refusals(capsys, options, complaint):
    assert bench.main([*TINY, *options]) == 2
    assert complaint in capsys.readouterr().err


def test_without_a_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(languages, "__file__", str(tmp_path / "site-packages/flash_attn_lab/bench/languages.py"))
    monkeypatch.chdir(tmp_path)
    assert bench.main(TINY) == 2
    assert "run this in the root of a checkout" in capsys.readouterr().err


def test_compiling_ahead_is_timed_beside_the_run(tmp_path, monkeypatch):
    """nvcc is a script here that writes the file of its last argument, the object, and fails for one unit."""
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\ncase "$*" in *naive.cu*) exit 1;; esac\nsleep 0.2\nfor word; do :; done\ntouch "$word"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 64)
    rows = [{"system": name} for name in ("naive", "wgmma_sm90", "ours")]
    timer = ahead.Ahead(library.RUNGS, (9, 0))
    assert set(timer.running) == {rung.name for rung in library.RUNGS if rung.unit}
    timer.finish(rows)
    assert [row.get("build_s", 0) > 0.1 for row in rows] == [False, True, False]
    assert not os.path.exists(timer.folder.name)
    assert not ahead.Ahead(library.RUNGS, None).running
    words = ahead.nvcc_command("cuda/flash_attn_minimal.cu", (9, 0), "x.o")
    assert "-gencode=arch=compute_90a,code=sm_90a" in words and words[-2:] == ["-o", "x.o"]
    assert all((ROOT / rung.unit).is_file() for rung in library.RUNGS if rung.unit)
