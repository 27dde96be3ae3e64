"""python -m flash_attn_lab context-parallel, on the CPU: its files, its refusals, and ranks that fail."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import crew_ranks
import numpy as np
import pytest
from bench_run import needs_matplotlib, needs_torch
from conftest import CUDA_DEVICES

from flash_attn_lab import context_parallel as command
from flash_attn_lab.bench.machine import BenchError, Numpy
from flash_attn_lab.context_parallel import cases, crew, rank, report

START = [sys.executable, "-m", "flash_attn_lab", "context-parallel"]


def run(*arguments, code=0):
    said = subprocess.run([*START, *arguments], capture_output=True, text=True, timeout=300)
    assert said.returncode == code, said.stdout + said.stderr
    assert "Traceback" not in said.stderr
    return said


def read(file):
    data = json.loads(file.read_text())
    assert data.keys() >= {"machine", "date", "commit", "command", "ranks", "gpus", "rows"}
    assert data["machine"].keys() >= {"host", "library"}
    assert data["command"].startswith("python -m flash_attn_lab context-parallel")
    assert "--json" not in data["command"] and str(file) not in data["command"]
    return data


def check_row(row):
    """Checks a row of this library that has a time."""
    assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["rounds"] >= 1 and row["calls"] >= 3
    assert len(row["one_each_ms"]) == row["ranks"] == row["devices"] and row["single_ms"] > 0
    assert row["one_ms"] == pytest.approx(np.mean(row["one_each_ms"]), rel=1e-3)
    assert row["one_slowest_ms"] == max(row["one_each_ms"])
    assert row["efficiency"] == pytest.approx(row["one_ms"] / row["ms"] / row["ranks"], rel=1e-3)
    assert row["efficiency_slowest"] >= row["efficiency"]
    assert row["tflops"] == pytest.approx(row["flops"] / row["ms"] * 1e-9, rel=1e-3)
    assert row["err"] <= rank.TOLERANCE[row["dtype"]][0] and not row.get("wrong")
    assert row["rank_bytes"] > 0


@needs_matplotlib
def test_quick_run(tmp_path):
    files = [tmp_path / name for name in ("cp.json", "cp.md", "cp.png")]
    outputs = [
        word for file, name in zip(files, ("--json", "--md", "--png"), strict=True) for word in (name, str(file))
    ]
    said = run("--ranks", "2", "--device", "cpu", "--quick", *outputs)
    data, text = read(files[0]), files[1].read_text()
    assert (data["ranks"], data["gpus"], "interrupted" in data) == ([2], 0, False)
    assert [row["case"] for row in data["rows"]] == ["forward-512", "backward-512"]
    for row in data["rows"]:
        check_row(row)
        assert (row["system"], row["kind"], row["asked"]) == ("ours", "processes", "auto")
        assert row["mode"] in ("gather", "ulysses") and row["received_bytes"] > 0
        assert f"| {row['case']} | {row['mode']} (auto) |" in text and row["case"] in said.stdout
    assert (
        text.startswith("# Context parallelism on 2 ranks of the CPU") and "![efficiency over tokens](cp.png)" in text
    )
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert re.search(r"^\[1/2\] forward-512: one alone .* ms, 2 ranks .* ms, .*%", said.stdout, re.MULTILINE)
    assert "2 rows timed, 0 wrong answers" in said.stdout


@needs_matplotlib
def test_groups_of_several_sizes(tmp_path):
    """One run, a table with the ranks of each row, a picture over ranks."""
    files = [tmp_path / name for name in ("cp.json", "cp.md", "cp.png")]
    outputs = [
        word for file, name in zip(files, ("--json", "--md", "--png"), strict=True) for word in (name, str(file))
    ]
    chosen = "--cases", "forward-512,backward-512", "--kinds", "threads", "--rounds", "1"
    said = run("--ranks", "4,2", "--device", "cpu", *chosen, *outputs)
    data, text = read(files[0]), files[1].read_text()
    assert data["ranks"] == [2, 4]
    found = [(row["case"], row["ranks"]) for row in data["rows"]]
    assert found == [("forward-512", 2), ("backward-512", 2), ("forward-512", 4), ("backward-512", 4)]
    for row in data["rows"]:
        check_row(row)
    assert text.startswith("# Context parallelism on 2 and 4 ranks of the CPU") and "![efficiency over ranks](" in text
    lines = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines() if line.startswith("| ")]
    assert lines[0][:2] == ["case", "ranks"]
    table = [line for line in lines[2:] if line[2].endswith("threads")]
    assert [line[:2] for line in table] == [["forward-512", "2"], ["", "4"], ["backward-512", "2"], ["", "4"]]
    assert files[2].read_bytes().startswith(b"\x89PNG")
    assert re.search(r"forward-512: one alone .* ms, 4 ranks ", said.stdout)


def test_modes_kinds_and_named_cases(tmp_path):
    """Every mode, documents, and a cache in shards; with threads and with processes."""
    file = tmp_path / "cp.json"
    chosen = "--modes", "gather,ulysses", "--cases", "documents-flat,decode-16k-x1", "--rounds", "1"
    run("--ranks", "3", "--device", "cpu", *chosen, "--json", str(file))
    rows = read(file)["rows"]
    found = [(row["kind"], row["case"], row["asked"]) for row in rows]
    assert found == [
        (kind, case, mode)
        for kind in ("processes", "threads")
        for case, modes in (("documents-flat", ("gather", "ulysses")), ("decode-16k-x1", ("decode",)))
        for mode in modes
    ]
    for row in rows:
        assert row.get("refused") == (True if row["asked"] == "ulysses" and row["nheads"] < 3 else None)
        check_row(row)
    assert {row["tbps"] > 0 for row in rows if row["pass"] == "decode"} == {True}


def test_through_jax(tmp_path):
    pytest.importorskip("jax")
    file = tmp_path / "cp.json"
    chosen = "--kinds", "jax", "--cases", "forward-512,backward-512", "--rounds", "2"
    run("--ranks", "2", "--device", "cpu", *chosen, "--json", str(file))
    forward, backward = read(file)["rows"]
    assert forward["kind"] == "jax" and forward["err"] < 1e-5 and forward["ms"] > 0
    assert backward["refused"] and "only forward passes" in backward["error"]


def test_a_mode_that_refuses_is_no_failure(tmp_path):
    """With 4 query heads on 5 ranks, ulysses refuses, and the other modes go on."""
    file = tmp_path / "cp.json"
    asked = "--cases", "forward-512", "--modes", "ulysses,gather", "--kinds", "threads", "--rounds", "1"
    said = run("--ranks", "5", "--device", "cpu", *asked, "--json", str(file), "--md", str(tmp_path / "cp.md"))
    refused, served = read(file)["rows"]
    assert refused["refused"] and "heads" in refused["error"] and "ms" not in refused
    assert refused["error"] in said.stdout and refused["error"] in (tmp_path / "cp.md").read_text()
    check_row(served)


@needs_torch
def test_peers(tmp_path):
    """The ring of our calls runs on gloo. PyTorch's context_parallel needs GPUs; its refusal becomes a row."""
    file = tmp_path / "cp.json"
    asked = "--cases", "forward-512,backward-512", "--kinds", "threads", "--peers", "ring,torch_allgather"
    run("--ranks", "2", "--device", "cpu", *asked, "--rounds", "2", "--json", str(file))
    rows = {(row["system"], row["case"]): row for row in read(file)["rows"]}
    ring, ours = rows["ring", "forward-512"], rows["ours", "forward-512"]
    assert ring["err"] <= 1e-5 and "one_ms" not in ring
    assert ring["efficiency"] == pytest.approx(report.efficiency(ours["one_ms"], ring["ms"], 2), rel=1e-3)
    assert "forward pass" in rows["ring", "backward-512"]["error"]
    for case in ("forward-512", "backward-512"):
        assert "ms" not in rows["torch_allgather", case] and rows["torch_allgather", case]["error"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="processes are looked for in /proc")
def test_interrupted_run_keeps_its_rows(tmp_path):
    file = tmp_path / "cp.json"
    running = subprocess.Popen(
        [*START, "--ranks", "2", "--device", "cpu", "--json", str(file)], stdout=subprocess.PIPE, text=True
    )
    assert "forward-512" in running.stdout.readline()
    children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == running.pid]
    running.send_signal(signal.SIGINT)
    said = running.communicate(timeout=60)[0]
    assert running.returncode == 130 and "interrupted" in said
    data = read(file)
    assert data["interrupted"] and 1 <= len(data["rows"]) < len(cases.known("cpu"))
    check_row(data["rows"][0])
    until = time.monotonic() + 20
    while any(map(_parent, children)) and time.monotonic() < until:
        time.sleep(0.1)
    assert children and not any(map(_parent, children)), "processes outlive the command"


def _parent(pid):
    """The parent of a running process."""
    try:
        state, parent = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


# ---- wrong usage ----


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu", "--gpus", "2"], "--gpus 2 with --device cpu: give --ranks 2"),
        (["--device", "cpu", "--ranks", "1"], "1 rank: context parallelism is for 2 or more"),
        (["--device", "cpu", "--cases", "forward-3k"], "'forward-3k' is not one of forward-512"),
        (["--device", "cpu", "--peers", "telepathy"], "'telepathy' is not one of torch_allgather"),
        (["--device", "cpu", "--modes", "gather,star"], "'star' is not one of auto, gather, ulysses"),
        (["--device", "cpu", "--kinds", "fibres"], "'fibres' is not one of processes, threads"),
        (["--device", "cpu", "--kinds", "processes,hosts"], "--kinds hosts: NCCL needs a GPU for each of 2 ranks"),
        (["--device", "cpu", "--ranks", "0"], "0 is not positive"),
        (["--device", "cpu", "--ranks", "2,x"], "--ranks: 'x' is not a whole number"),
        (["--device", "cpu", "--ranks", "1,4"], "1 rank: context parallelism is for 2 or more"),
        (["--device", "cpu", "--trace", "timelines"], "--trace timelines: timelines are of GPUs"),
        (["--device", "cpu", "--trace", "/nowhere/lines"], "--trace /nowhere/lines: timelines are"),
        (
            ["--device", "cpu", "--json", "/nowhere/cp.json"],
            "--json /nowhere/cp.json: cannot write there: No such file",
        ),
    ],
)
def test_wrong_usage(arguments, said, capsys):
    assert command.main(arguments) == 2
    assert said in capsys.readouterr().err


def devices(arguments, gpus):
    return command.devices_of(command._parser().parse_args(arguments), gpus, "CPU backend only")


@needs_torch
def test_devices_of_the_ranks():
    assert devices([], 0) == [("cpu", "cpu")] and devices(["--ranks", "3"], 0) == [("cpu",) * 3]
    assert devices([], 4) == [(0, 1), (0, 1, 2, 3)] and devices(["--gpus", "2"], 4) == [(0, 1)]
    assert [len(group) for group in devices([], 8)] == [2, 4, 8]
    assert [len(group) for group in devices(["--gpus", "6"], 8)] == [2, 4, 6]
    assert devices(["--gpus", "2", "--ranks", "4"], 2) == [(0, 1, 0, 1)]
    assert devices(["--ranks", "4,2"], 3) == [(0, 1), (0, 1, 2, 0)]
    assert devices(["--device", "cpu"], 8) == [("cpu", "cpu")]
    assert crew.Spec("processes", (0, 1, 0, 1, 1), 1).turns == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "gpus", "said"),
    [
        (["--gpus", "4"], 2, "--gpus 4: this machine has 2 GPUs"),
        (["--gpus", "2"], 1, "--gpus 2: this machine has 1 GPU"),
        (["--gpus", "3"], 0, "no GPU (CPU backend only): give --ranks 3 --device cpu"),
        (["--device", "cuda"], 0, "--device cuda: the library sees no GPU"),
    ],
)
def test_too_few_gpus(arguments, gpus, said):
    with pytest.raises(BenchError) as error:
        devices(arguments, gpus)
    assert said in str(error.value)


@pytest.mark.skipif(CUDA_DEVICES > 0, reason="there is a GPU")
def test_gpus_without_a_gpu():
    assert "give --ranks 2 --device cpu" in run("--gpus", "2", code=2).stderr


# ---- what is timed ----


def tasks(*arguments, gpus=2):
    return command.tasks_of(command._parser().parse_args(arguments), [tuple(range(gpus))])


def test_the_usual_run_on_gpus():
    found = {}
    for task in tasks():
        found.setdefault(task.spec.kind, []).append(task.order.case.name)
    assert list(found) == ["processes", "threads", "torch_allgather", "torch_alltoall", "ring"]
    assert {f"forward-{n}k" for n in (8, 16, 32, 64, 128)} | {f"backward-{n}k" for n in (16, 64, 128)} <= {
        *found["processes"]
    }
    assert {"heads-64k", "full-64k", "documents-zigzag", "documents-flat", "window-64k"} <= {*found["processes"]}
    assert {*found["threads"]} == {*found["ring"]} < {*found["processes"]}
    assert sum(task.seconds for task in tasks()) < 200 and sum(task.seconds for task in tasks("--quick")) < 20
    assert not any(task.spec.peer for task in tasks("--quick")) and len(tasks("--long")) == len(tasks()) + 3


def test_cases():
    usual = cases.known("cuda")
    assert sum(cases.DOCUMENTS) == 65536 and sum(n % 2 for n in cases.DOCUMENTS) > 2
    n, heads, dim = 65536, 64, 128
    assert usual["full-64k"].flops == 4 * n * n * heads * dim
    assert usual["forward-64k"].flops == 2 * n * (n + 1) * heads * dim
    assert usual["backward-64k"].flops == 2.5 * usual["forward-64k"].flops
    seen = sum(min(i + 1, 4097) for i in range(n))
    assert usual["window-64k"].flops == 4 * seen * heads * dim
    assert usual["decode-1m-x16"].cache_bytes == 16 * 2**20 * 8 * 128 * 2 * 2


def test_bursts():
    protocol = cases.Protocol()
    assert [protocol.count(t) for t in (0.001, 0.02, 0.03, 0.4, 0.6, 2.0)] == [60, 3, 3, 3, 2, 1]
    assert [protocol.turns(t) for t in (0.001, 0.4, 2.0, 30.0)] == [5, 5, 5, 1]


# ---- arithmetic ----


def test_efficiency():
    assert report.efficiency(10.0, 5.0, 2) == 1.0
    assert report.efficiency(10.0, 10.0, 4) == 0.25
    row = cases.known("cpu")["forward-512"].row() | {"flops": 1e12, "ranks": 4, "devices": 4}
    ours = row | {"system": "ours", "kind": "processes", "ms": 4.0, "one_ms": 12.0, "one_slowest_ms": 13.0}
    peer = row | {"system": "torch_allgather", "ms": 6.0, "one_ms": 20.0, "one_slowest_ms": 21.0}
    mine, theirs = report.completed([ours, peer])
    assert (mine["efficiency"], mine["efficiency_slowest"], mine["tflops"]) == (0.75, 0.8125, 250.0)
    assert theirs["efficiency"] == 0.5, "a peer is judged by our time on one device"
    assert (theirs["own_one_ms"], theirs["own_efficiency"]) == (20.0, 0.83333) and "one_ms" not in theirs
    assert "efficiency" not in report.completed([peer])[0]
    other = peer | {"ranks": 2, "devices": 2}
    assert "efficiency" not in report.completed([ours, other])[1], "one device is measured in each group"


def test_difference():
    machine, rows = rank.Host(), np.array([1, 3])
    want = np.ones((4, 2, 8), np.float32)
    got = want[rows].copy()
    assert rank.difference(machine, got, want, rows) == (0.0, 0.0)
    got[1, 0] += 0.5
    whole, worst = rank.difference(machine, got, want, rows)
    assert whole == pytest.approx(0.25) and worst == pytest.approx(0.5 / 2**0.5)
    got[0, 0, 0] = np.nan
    assert rank.difference(machine, got, want, rows) == (np.inf, np.inf)
    assert rank.verdict([(0.0, 0.0), (np.inf, np.inf)], "float32")["wrong"]
    assert rank.verdict([(1e-6, 1e-6), (2e-5, 2e-5)], "float32")["why"] == "error 2.00e-05, worst row 2.00e-05"
    assert "wrong" not in rank.verdict([(2e-5, 2e-5)], "float32", room=3)
    assert isinstance(machine, Numpy)


def test_a_wrong_answer_is_a_failure(monkeypatch, capsys, tmp_path):
    case = cases.known("cpu")["forward-512"]
    right = case.row() | {"system": "ours", "kind": "processes", "asked": "auto", "mode": "gather", "flops": 1.0}
    right |= {"ranks": 2, "devices": 2, "ms": 1.0, "ms_min": 1.0, "ms_max": 1.0, "single_ms": 1.0, "err": 0.0}
    wrong = right | rank.verdict([(0.5, 0.5)], "float32")
    for rows, code in (([right], 0), ([right, wrong], 1), ([wrong | {"system": "ring"}, right], 0), ([], 1)):
        monkeypatch.setattr(command, "_measure", lambda tasks, machine, rows=rows: iter([(rows, 0.0)] if rows else []))
        assert command.main(["--device", "cpu", "--quick", "--md", str(tmp_path / "cp.md")]) == code
        assert ("WRONG: error 5.00e-01" in capsys.readouterr().out) == any(row.get("wrong") for row in rows)
    lost = case.row() | {"system": "ours", "kind": "processes", "asked": "auto", "error": "no answer", "flops": 1.0}
    lost |= {"ranks": 2, "devices": 2}
    monkeypatch.setattr(command, "_measure", lambda tasks, machine: iter([([right], 0.0), ([lost], 0.0)]))
    assert command.main(["--device", "cpu", "--quick"]) == 1


# ---- ranks that fail ----


@pytest.fixture
def ranks():
    made = []

    def make(open_ranks=crew_ranks.open_ranks, size=3):
        made.append(crew.Crew(crew.Spec("processes", ("cpu",) * size, 1), open_ranks))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def test_ranks_meet(ranks):
    one = ranks()
    assert one.about == {"rank": 0}
    for number in range(3):
        assert one.ask(("gather", number), 30) == [(r, number) for r in range(3)]
    one.close()
    assert not any(process.is_alive() for process in one.processes)


def test_a_rank_may_work_alone_for_as_long_as_the_order_may_take(ranks):
    one = ranks(crew_ranks.open_impatient, 2)
    assert one.ask(1.5, 30) == [0, 1]
    with pytest.raises(crew.Lost, match="no answer within 1 seconds"):  # not: another rank left
        one.ask(3, 1)


@pytest.mark.parametrize(
    ("what", "said", "final"),
    [
        ("raise", "ValueError: rank 1 does not like it", False),
        ("die", "the process of rank 1 ended: signal SIGKILL", False),
        ("hang", "no answer within 2 seconds", True),
    ],
)
def test_a_rank_that_fails_takes_the_crew_with_it(ranks, what, said, final):
    one, start = ranks(), time.monotonic()
    with pytest.raises(crew.Lost) as error:
        one.ask((what, 1), 2 if what == "hang" else 60)
    assert said in str(error.value) and error.value.final == final
    assert time.monotonic() - start < 30
    assert not any(process.is_alive() for process in one.processes)


def test_ranks_that_do_not_start(ranks):
    with pytest.raises(crew.Lost) as error:
        ranks(crew_ranks.open_badly)
    assert "RuntimeError: there is no such device" in str(error.value) and error.value.final


def test_after_lost_ranks_the_others_go_on(monkeypatch):
    """A lost crew is made again. After the second lost crew, or after one that hangs, the remaining cases are left
    out."""
    log = []

    class Crew:
        about = {"gpu": "none"}

        def __init__(self, spec, open_ranks):
            log.append(spec.kind)
            if spec.kind == "torch_allgather":
                raise crew.Lost("it does not start", final=True)

        def ask(self, order, seconds):
            if log[-1] == "ring":
                raise crew.Lost("it hangs", final=True)
            if order.case.name in ("backward-512", "full-1k") and log[-1] == "processes":
                raise crew.Lost("it dies")
            return [{"case": order.case.name}]

        def close(self):
            pass

        kill = close

    monkeypatch.setattr(command, "Crew", Crew)
    names = "forward-512,backward-512,full-1k,forward-1k"
    asked = command._parser().parse_args(["--device", "cpu", "--cases", names, "--peers", "torch_allgather,ring"])
    rows = [row for found, _ in command._measure(command.tasks_of(asked, [("cpu", "cpu")]), {}) for row in found]
    assert log == ["processes", "processes", "threads", "torch_allgather", "ring"]
    errors = [row.get("error", "") for row in rows]
    assert errors[:4] == ["", "it dies", "it dies", "left out, after: it dies"] and errors[4:8] == [""] * 4
    assert errors[8:12] == ["it does not start"] + ["left out, after: it does not start"] * 3
    assert errors[12:] == ["it hangs"] + ["left out, after: it hangs"] * 3
