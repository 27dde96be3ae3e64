"""Timelines of `context-parallel --trace`, made from traces of PyTorch's profiler; on GPUs, from a real trace."""

import json
import subprocess
import sys

import pytest
from bench_run import needs_matplotlib
from conftest import CUDA_DEVICES, NO_CUDA, torch

from flash_attn_lab import context_parallel as command
from flash_attn_lab.context_parallel import report, timeline


def event(category, name, ts, dur, stream=7, device=0, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur,
            "args": {"stream": stream, "device": device, **args}}  # fmt: skip


def between_gpus(source, target, ts):
    """A copy between GPUs, made by the copy engine of its target."""
    args = {"fromDevice": source, "inDevice": target, "toDevice": target, "stream": 16, "bytes": 4096}
    name = "Memcpy PtoP (Device -> Device)"
    return {"ph": "X", "cat": "gpu_memcpy", "name": name, "ts": ts, "dur": 300.0, "args": args}


ATTENTION = "void fa::(anonymous namespace)::forward_wgmma_kernel<__nv_bfloat16, (fa::WgmmaPlanId)3>(fa::Arguments)"
EVENTS = [
    event("kernel", ATTENTION, 900.0, 50.0),  # of the call before
    between_gpus(1, 0, 1040.0),
    between_gpus(0, 1, 1045.0),
    event("kernel", "void fa::distributed::(anonymous namespace)::copies_kernel<uint4>(fa::Copies)", 1010.0, 20.0),
    event("kernel", ATTENTION, 1050.0, 100.0),
    event("kernel", ATTENTION, 1120.0, 200.0, stream=17),
    event("kernel", ATTENTION, 1400.0, 60.0),
    event("gpu_memset", "Memset (Device)", 1035.0, 2.0, bytes=4),
    event("kernel", "void fa::distributed::(anonymous namespace)::sum_kernel<float>(int)", 1470.0, 10.0),
    event("kernel", ATTENTION, 1100.0, 500.0, device=1),  # of another GPU
    event("cpu_op", "aten::empty", 1000.0, 9.0),
    {"ph": "M", "name": "process_name"},
]


def test_what_one_gpu_did_in_the_call():
    found = timeline._timeline(EVENTS, 1000.0, 0)
    assert [(e["kind"], e["name"], e["stream"], e["start_us"], e["us"]) for e in found["rows"]] == [
        ("copy kernel", "copies_kernel", 7, 10.0, 20.0),
        ("other kernel", "Memset", 7, 35.0, 2.0),
        ("copy engine", "Memcpy PtoP", 16, 40.0, 300.0),
        ("attention", "forward_wgmma_kernel", 7, 50.0, 100.0),
        ("attention", "forward_wgmma_kernel", 17, 120.0, 200.0),
        ("attention", "forward_wgmma_kernel", 7, 400.0, 60.0),
        ("other kernel", "sum_kernel", 7, 470.0, 10.0),
    ]
    assert timeline.summary(found | {"host_us": 33.0}) == {
        "call_us": 480.0, "host_us": 33.0, "before_us": 50.0, "attention_us": 330.0, "copy_us": 300.0, "behind_us": 20.0
    }  # fmt: skip


def test_a_call_without_kernels():
    found = timeline._timeline([], 0.0, 0) | {"host_us": 1.0}
    assert found["call_us"] == 0 and timeline.summary(found)["attention_us"] == 0


def test_the_kernels_between_launches_of_attention_are_those_of_the_source():
    source = (timeline.Path(__file__).resolve().parents[2] / "cuda/distributed/rows.cu").read_text()
    kernels = {word.partition("(")[0] for word in source.split() if "_kernel(" in word and "launch_kernel" not in word}
    assert {name for name in kernels if name.endswith("_kernel")} == set(timeline.BETWEEN)


@needs_matplotlib
def test_a_timeline_becomes_files(tmp_path):
    row = {"case": "forward-8k", "asked": "auto", "mode": "gather", "ranks": 8, "kind": "processes", "system": "ours"}
    found = timeline._timeline(EVENTS, 1000.0, 0) | {"host_us": 33.0}
    folder = tmp_path / "lines"
    folder.mkdir()
    kept = command._traced(row | {"timeline": found}, folder)
    assert "timeline" not in kept and kept["trace"]["picture"] == "lines/forward-8k_auto_8.png"
    assert json.loads((folder / "forward-8k_auto_8.json").read_text()) == found
    assert (folder / "forward-8k_auto_8.png").read_bytes().startswith(b"\x89PNG")
    head, (cells,) = report._traced([kept])
    assert dict(zip(head, cells, strict=True)) | {"picture": ""} == {
        "case": "forward-8k", "ranks": "8", "system": "gather (auto)", "call, us": "480", "before": "50",
        "attention": "330", "behind": "20", "copy engines": "300", "host": "33", "picture": "",
    }  # fmt: skip


@pytest.mark.skipif(bool(NO_CUDA) or torch is None or CUDA_DEVICES < 2, reason=NO_CUDA or "needs PyTorch and two GPUs")
def test_a_timeline_of_two_gpus(tmp_path):
    file, folder = tmp_path / "cp.json", tmp_path / "lines"
    asked = "--gpus", "2", "--cases", "forward-8k", "--rounds", "1", "--peers", "none", "--json", str(file)
    said = subprocess.run(
        [sys.executable, "-m", "flash_attn_lab", "context-parallel", *asked, "--trace", str(folder)],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    for row in json.loads(file.read_text())["rows"]:
        assert 0 < row["trace"]["before_us"] < row["trace"]["call_us"]
        assert 0.5 < row["trace"]["attention_us"] / (1e3 * row["ms"]) < 1.5
    found = json.loads((folder / "forward-8k_auto_2.json").read_text())
    assert {"attention", "copy kernel"} <= {e["kind"] for e in found["rows"]}
