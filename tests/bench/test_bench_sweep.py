"""The suites over calls with options: what a line says, what is drawn and judged, the tables."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from bench_run import FAST, run

import flash_attn_minimal as fa
from flash_attn_lab import bench
from flash_attn_lab.bench import dispatch, prices, sweep, sweep_worker
from flash_attn_lab.bench import machine as machine_module
from flash_attn_lab.bench.calls import call as lines
from flash_attn_lab.bench.calls import make
from flash_attn_lab.bench.calls.call import BadCall, Call
from flash_attn_lab.bench.calls.judge import Judge
from flash_attn_lab.bench.calls.make import Arrays
from flash_attn_lab.bench.machine import BenchError, Numpy, TorchCpu, open_machine
from flash_attn_lab.bench.systems import Refused
from flash_attn_lab.bench.timing import Protocol, Timing

FLOATS = ("float32", "float16", "bfloat16")
SMALL = "b2 q20 k33 h4/2 d16/8"


# ---- a call as a line ----


@pytest.mark.parametrize("device, dtypes", [("cpu", FLOATS), ("cuda", (*FLOATS, "float8_e4m3fn"))])
def test_drawn_calls_are_read_back_and_stay_in_their_limits(device, dtypes):
    drawn = [lines.drawn(3, number, device, dtypes) for number in range(400)]
    assert drawn == [lines.drawn(3, number, device, dtypes) for number in range(400)]
    assert len({lines.drawn(seed, 0, device, dtypes) for seed in range(20)}) > 15
    for call in drawn:
        assert Call.parse(str(call)) == call
        assert call.flops <= lines.LIMITS[device].flops and call.elements <= lines.LIMITS[device].elements
    options = {name for call in drawn for name in call.options}
    assert options == {name for name in lines.OPTIONS if not name.endswith(("_all", "_zero"))}
    assert {call.dtype for call in drawn} == set(dtypes)
    assert {call.backward for call in drawn} == {False, True}
    assert sum(call.packed is not None for call in drawn) > 10 and sum(call.is_cache for call in drawn) > 10
    assert sum(len(call.options) == 2 for call in drawn) > 20


@pytest.mark.parametrize(
    "line, named",
    [
        ("bf16 fwd b1", "a call has a dtype"),
        ("bf17 fwd b1 q1 k1 h1 d8", "'bf17'"),
        ("bf16 both b1 q1 k1 h1 d8", "'both'"),
        ("bf16 fwd b0 q1 k1 h1 d8", "'b0'"),
        ("bf16 fwd b1 q1 k1 h1/0 d8", "'h1/0'"),
        ("bf16 fwd b1 q1 k1 h1 8", "'8'"),
        ("bf16 fwd b1 q1 k1 h1 d8 casual", "'casual'"),
        ("bf16 fwd b1 q1 k1 h3/2 d8", "3 heads are not a multiple of 2"),
        ("bf16 fwd b1 q9 k9 h1 d8 key_mask pair_mask", "two masks"),
        ("bf16 fwd b1 q9 k8 h1 d8 packed1", "packed sequences have as many keys"),
        ("bf16 bwd b1 q9 k9 h1 d8 cache", "no backward pass"),
        ("bf16 fwd b1 q9 k9 h1 d8 page16", "only a cache has pages"),
        ("fp8 fwd b1 q9 k9 h1 d16 dropout", "fp8"),
        ("bf16 fwd b1 q9 k9 h1 d16 deterministic", "deterministic is for bwd"),
    ],
)
def test_a_line_that_is_no_call_is_refused_by_its_word(line, named):
    with pytest.raises(BadCall, match=named):
        Call.parse(line)


@pytest.mark.parametrize(
    "options", ["", "causal", "window", "window causal", "window_all", "packed5 causal", "cache window"]
)
@pytest.mark.parametrize("sizes", ["q20 k33", "q33 k33"])
def test_pairs_counts_what_causal_and_window_let_see(options, sizes):
    if "packed" in options:
        sizes = "q33 k33"
    call = Call.parse(f"fp32 fwd b3 {sizes} h2 d8 {options}")
    left, right = call.window
    count = 0
    for n_q, n_k in call._each():
        for i in range(n_q):
            at = i + n_k - n_q
            count += sum((left < 0 or j >= at - left) and (right < 0 or j <= at + right) for j in range(n_k))
    assert call.pairs() == 2 * count
    assert call.flops == 2 * 16 * call.pairs()


# ---- ours and the judge ----


@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "option", ["", *lines.OPTIONS, "causal window", "causal alibi", "heads_first", "packed7 softcap"]
)
def test_ours_is_right_with_every_option(way, option):
    if "packed" in option:
        call = Call.parse(f"fp32 {way} b3 q20 k20 h4/2 d16/8 {option}")
    else:
        call = Call.parse(
            f"fp32 {way} {SMALL} {option}" if option != "bias_float32" else f"fp16 {way} {SMALL} {option}"
        )
    machine = Numpy()
    arrays = Arrays.of(machine, call, seed=4)
    system = make.ours(arrays)
    error, budget = Judge(arrays, seed=4).verdict(system.launch(0))
    assert error <= budget


@pytest.mark.parametrize("page", ["", "page16", "page5"])
@pytest.mark.parametrize("option", ["", "causal", "causal window", "alibi", "sinks"])
def test_ours_is_right_over_caches(page, option):
    call = Call.parse(f"fp32 fwd b3 q4 k50 h4/2 d16/8 cache {page} {option}")
    arrays = Arrays.of(Numpy(), call)
    error, budget = Judge(arrays).verdict(make.ours(arrays).launch(0))
    assert error <= budget


@pytest.mark.parametrize(
    "line", [f"fp32 fwd {SMALL} causal", f"fp32 bwd {SMALL}", "fp32 bwd b3 q20 k20 h4/2 d16 packed7"]
)
def test_the_judge_refuses_a_wrong_answer(line):
    call = Call.parse(line)
    arrays = Arrays.of(Numpy(), call)
    judge = Judge(arrays)
    answer = make.ours(arrays).launch(0)
    parts = answer if isinstance(answer, tuple) else (answer,)
    for name, h, *_ in judge.samples:
        x = dict(zip(("dq", "dk", "dv") if call.backward else ("out",), parts, strict=True))[name]
        rows = judge.rows_k if name in ("dk", "dv") else judge.rows_q
        place = x[rows, h] if call.packed is not None else x[judge.b, rows, h]
        for wrong in (np.nan, place[1, 2] + 0.05 * (1 + abs(place[1, 2]))):
            before = place[1, 2].copy()
            place[1, 2] = wrong
            error, budget = judge.verdict(answer)
            assert not error <= budget, (name, wrong)
            place[1, 2] = before
    error, budget = judge.verdict(answer)
    assert error <= budget


def test_peers_compute_the_same_call():
    torch = pytest.importorskip("torch")
    machine = open_machine("cpu", "torch")
    served = 0
    for option in [
        "",
        *lines.OPTIONS,
        "causal key_mask",
        "bias pair_mask",
        "causal alibi",
        "window bias",
        "heads_first",
    ]:
        for way in ("fwd", "bwd"):
            call = Call.parse(f"fp32 {way} {SMALL} {option}") if option != "bias_float32" else None
            if call is None or "dropout" in call.options:
                continue
            arrays = Arrays.of(machine, call)
            try:
                system = make.peer("torch", arrays)
            except Refused:
                assert {"softcap", "sinks"} & set(call.options), call
                continue
            error, budget = Judge(arrays).verdict(system.launch(0), system.heads_second)
            assert error <= sweep_worker.PEER_FACTOR * budget, call
            served += 1
    assert served >= 30
    for line in (
        f"fp32 fwd {SMALL} cache causal",
        f"fp32 fwd {SMALL} cache alibi",
        "fp32 bwd b3 q9 k9 h4/2 d16 packed3 causal",
    ):
        arrays = Arrays.of(machine, Call.parse(line))
        system = make.peer("torch", arrays)
        error, budget = Judge(arrays).verdict(system.launch(0), system.heads_second)
        assert error <= sweep_worker.PEER_FACTOR * budget, line
    assert torch.is_grad_enabled()


# ---- the command ----


def test_sweep_suite(tmp_path, capsys):
    data = run(tmp_path, "--suite", "sweep", "--device", "cpu", "--calls", "7", "--seed", "11", *FAST)
    assert [row["number"] for row in data["rows"]] == sorted(row["number"] for row in data["rows"])
    assert len(data["rows"]) + len(data["left_out"]) == 7 and not any(row.get("wrong") for row in data["rows"])
    assert all(Call.parse(row["call"]) and row["us"] > 0 and row["kernel"] for row in data["rows"])
    assert any(row["max_err"] <= row["err_budget"] for row in data["rows"] if "max_err" in row)
    text = (tmp_path / "sweep.md").read_text()
    assert "calls" in text and "Ours alone" in text
    # the same seed again, compared with the first result
    again = run(
        tmp_path / "again", "--suite", "sweep", "--device", "cpu", "--calls", "7", "--seed", "11", *FAST,
        "--before", str(tmp_path / "sweep.json"),
    )  # fmt: skip
    assert [row["call"] for row in again["rows"]] == [row["call"] for row in data["rows"]]
    assert [row["before_us"] for row in again["rows"]] == [row["us"] for row in data["rows"]]
    assert "Against the earlier result" in (tmp_path / "again" / "sweep.md").read_text()
    # without a seed, the calls of the earlier result
    (tmp_path / "sweep.json").write_text(json.dumps(data | {"rows": data["rows"][:2]}))
    third = run(
        tmp_path / "third", "--suite", "sweep", "--device", "cpu", *FAST, "--before", str(tmp_path / "sweep.json")
    )
    assert [row["call"] for row in third["rows"]] == [row["call"] for row in data["rows"][:2]]
    assert all("before_us" in row for row in third["rows"]) and "--seed" not in third["command"]
    one = run(tmp_path / "one", "--suite", "sweep", "--device", "cpu", "--call", f"fp32 fwd {SMALL} causal", *FAST)
    assert [row["call"] for row in one["rows"]] == [f"fp32 fwd {SMALL} causal"]


@pytest.mark.parametrize(
    "words, named",
    [
        (["--call", "fp32 fwd b1"], "--call"),
        (["--devices", "0", "--calls", "1"], "--devices 0"),
        (["--before", "nowhere.json", "--calls", "1"], "--before nowhere.json"),
        (["--before", os.devnull, "--calls", "1"], "--before"),
        (["--batch", "3"], "--batch has no meaning"),
        (["--framework", "cupy", "--calls", "1"], "bench: --device cpu --framework cupy: there is no such combination"),
        (["--seconds", "0"], "0"),
    ],
)
def test_sweep_refuses_by_name(tmp_path, capsys, words, named):
    assert bench.main(["--suite", "sweep", "--device", "cpu", "--output", str(tmp_path), *words]) == 2
    assert named in capsys.readouterr().err


ABOUT = {"device": "cpu", "framework": "numpy", "threads": 1, "seed": 0, "rounds": 1, "burst_s": 1e-4}


def test_a_worker_that_dies_is_lost_and_a_call_that_breaks_is_reported():
    worker = sweep.Worker(ABOUT, None)
    try:
        assert worker.ready["framework"] == "numpy" and worker.ready["peers"] == []
        assert "row" in worker.ask({"call": f"fp32 fwd {SMALL}", "check": True})
        assert "failed" in worker.ask({"call": "fp32 fwd", "check": True})
        assert "row" in worker.ask({"call": f"fp32 bwd {SMALL}", "check": False})
        os.kill(worker.process.pid, signal.SIGKILL)
        with pytest.raises(sweep.Lost, match="ended"):
            worker.ask({"call": f"fp32 fwd {SMALL}", "check": True})
    finally:
        worker.end()


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_that_hangs_is_asked_for_again_without_peers(tmp_path, monkeypatch, times):
    """Once lost it was perhaps a peer that hung; lost without peers, too, it is a failure of ours."""
    asked = sweep.Worker.ask
    hung = []

    def ask(self, order):
        if len(hung) < times:
            hung.append((order["call"], order["peers"]))
            os.kill(self.process.pid, signal.SIGSTOP)
            return self._line(0.2)
        return asked(self, order)

    monkeypatch.setattr(sweep.Worker, "ask", ask)
    options = ["--suite", "sweep", "--device", "cpu", "--framework", "numpy", "--calls", "3", "--seed", "1", *FAST]
    data = run(tmp_path, *options, code=times - 1)
    assert len(data["rows"]) == 4 - times
    assert hung == [(hung[0][0], True), (hung[0][0], False)][:times]
    [item] = data["left_out"]
    assert item["shape"] == hung[0][0] and item["reason"].startswith("no answer after 0 s")
    assert item["system"] == ("peers", "ours")[times - 1]


def test_dispatch_suite(tmp_path):
    """Each call stands beside the library's other kernels, forced by name, which give the same answer."""
    data = run(tmp_path, "--suite", "dispatch", "--device", "cpu", "--calls", "6", "--seed", "11", *FAST)
    names = {kernel["name"] for kernel in fa.kernels() if kernel["device"] == "cpu"} - {"cpu_naive"}
    assert len(data["rows"]) == 6
    for row in data["rows"]:
        assert row["suite"] == "dispatch" and {*row["peers"]} <= names - {row["kernel"]} and "peers_wrong" not in row
    assert any(row["peers"] for row in data["rows"])
    assert "The library chose a slower kernel in" in (tmp_path / "dispatch.md").read_text()


def test_dispatch_names_the_kernels_that_were_faster():
    def row(line, us, peers):
        times = {name: Timing([x]) for name, x in {"ours": us, **peers}.items()}
        found = sweep_worker._timed(Call.parse(line), times, [])
        return found | {"call": line, "kernel": "a", "pass": "fwd"}

    rows = [row(f"bf16 fwd b1 q{n} k64 h1 d64", 10.0, {"b": us, "c": 20.0}) for n, us in ((1, 5.0), (8, 8.0), (9, 9.9))]
    rows.append(row("bf16 fwd b1 q7 k64 h1 d64", 10.0, {}))
    text = "\n".join(dispatch.table({}, rows))
    assert "4 calls, 3 of them with more than one kernel. The library chose a slower kernel in 2 (50%" in text
    assert f"would take {(0.5 * 0.8 * 0.99) ** 0.25:.3f} of their time" in text
    assert f"| fwd | a | b | 2 | {0.4**0.5:.2f} | 0.50 | 1 .. 8 |" in text
    assert "* 0.50 `bf16 fwd b1 q1 k64 h1 d64` a: 10 us; b 5, c 20" in text and "q9" not in text
    assert dispatch.table({}, []) == ["No call was timed."]


def test_dispatch_leaves_out_what_is_far_slower(monkeypatch):
    machine = Numpy()
    by_name = sweep_worker.ByName(machine)
    assert "cpu_naive" not in by_name.names["fwd"] and "cpu_portable" in by_name.names["bwd"]
    arrays = Arrays.of(machine, Call.parse(f"fp32 fwd {SMALL}"))
    chosen = make.ours(arrays).kernel
    seconds = {chosen: 1.0, "cpu_portable": 4.0}
    monkeypatch.setattr(by_name, "_seconds", lambda made: seconds[made.kernel])
    with pytest.raises(Refused, match="far longer"):
        by_name.peer("cpu_portable", arrays)
    with pytest.raises(Refused, match="choice"):
        by_name.peer(chosen, arrays)
    seconds["cpu_portable"] = 2.0
    assert by_name.peer("cpu_portable", arrays).name == "cpu_portable"


def test_ctrl_c_ends_the_sweep_with_what_there_is(tmp_path):
    command = [sys.executable, "-m", "flash_attn_lab", "bench", "--suite", "sweep", "--device", "cpu", *FAST]
    process = subprocess.Popen(
        [*command, "--seconds", "100", "--output", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    line = process.stdout.readline()
    for _ in range(600):  # as a terminal does, all processes of the group get it
        tasks = Path(f"/proc/{process.pid}/task").glob("*/children")
        if children := " ".join(task.read_text() for task in tasks).split():
            break
        time.sleep(0.05)
    time.sleep(6)
    os.killpg(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert "interrupted" in errors and process.returncode == 130, errors
    data = json.loads((tmp_path / "sweep_part.json").read_text())
    # A random call may be wrong, which is not this test's subject. Such a row has no time.
    assert all(row.get("wrong") or row["us"] > 0 for row in data["rows"]) and not data["left_out"]
    seed = re.search(r"seed (\d+)", line + said).group(1)
    assert data["command"].endswith(f"--seed {seed}")  # drawn, and written down
    assert children
    for pid in children:
        assert not os.path.exists(f"/proc/{pid}")


def test_several_workers_share_the_calls(tmp_path, monkeypatch):
    """As on several GPUs: each call is made once, and one worker that cannot start does not end the sweep."""
    started = sweep.Worker.__init__
    seen = []

    def start(self, about, gpu):
        seen.append(gpu)
        if gpu == "2":
            raise sweep.Lost("the process ended: no such GPU")
        started(self, about | {"device": "cpu"}, gpu)
        self.ready["device"] = "cuda"
        self.ready["dtypes"] = ["float32"]

    monkeypatch.setattr(sweep.Worker, "__init__", start)
    monkeypatch.setattr(sweep, "gpus", lambda asked: ["0", "1", "2"])
    monkeypatch.setattr(sweep, "drawn", lambda seed, number, *_: Call.parse(f"fp32 fwd b1 q{number + 1} k9 h1 d8"))
    options = bench._parser().parse_args(
        ["--suite", "sweep", "--device", "cuda", "--calls", "9", "--seed", "4", "--output", str(tmp_path), *FAST]
    )
    machine, outcome = sweep.run(options, Protocol())
    assert [row["number"] for row in outcome.rows] == list(range(9)) and set(seen) == {"0", "1", "2"}
    assert machine.describe()["workers"] == 2 and not outcome.wrong


def test_workers_of_a_gpu_take_turns(tmp_path):
    order = []
    first, second = (sweep_worker.Turn(str(tmp_path / "gpu")) for _ in range(2))

    def other():
        with second:
            order.append("other")

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    with sweep_worker.Turn(None):  # a worker of its own
        order.append("alone")
    assert order == ["first", "other", "alone"]


def test_answers_are_judged_outside_a_turn(monkeypatch):
    """Another worker has the GPU while the host computes in float64."""

    class Told:
        file, held = None, False

        def __enter__(self):
            self.held = True

        def __exit__(self, *error):
            self.held = False

    turn, seen, judged = Told(), [], Judge.judged

    def told(self, answer):
        seen.append(turn.held)
        return judged(self, answer)

    monkeypatch.setattr(Judge, "judged", told)
    call = Call.parse(f"fp32 bwd {SMALL} bias")
    found = sweep_worker.measured(Numpy(), call, True, Protocol(rounds=1, burst_s=1e-4), 0, [], turn=turn)
    assert seen == [False] and found["row"]["max_err"] <= found["row"]["err_budget"]


def test_a_rehearsal_runs_the_launch_and_keeps_its_errors():
    """A peer refuses again what it has refused in its rehearsal."""
    pytest.importorskip("torch")

    class Machine(TorchCpu):
        def rehearse(self, launch):
            rehearsed.append(launch)
            raise RuntimeError("not during a capture")

    rehearsed = []
    for line, does in (
        ("fp32 fwd b1 q9 k9 h1 d8", True),
        ("fp32 fwd b1 q9 k9 h1 d8 key_mask", True),
        ("fp32 bwd b1 q9 k9 h1 d8 dropout", False),
        ("fp32 fwd b1 q9 k9 h1 d8 softcap", False),
    ):
        arrays = make.Arrays.of(Machine(), Call.parse(line), 0)
        assert make.prepared("cudnn", arrays) == does and not make.prepared("fa4", arrays), line
        assert (arrays.dense is not None) == ("key_mask" in line)
    make.rehearse("cudnn", arrays)
    assert len(rehearsed) == 1


def test_a_wrong_answer_is_a_finding(monkeypatch):
    machine = Numpy()
    right = make.ours

    def wrong(arrays, *args):
        system = right(arrays, *args)
        return make.Made("ours", lambda i: system.launch(i) * 1.1, system.kernel)

    call = Call.parse(f"fp32 fwd {SMALL}")
    protocol = Protocol(rounds=1, burst_s=1e-4)
    assert "row" in sweep_worker.measured(machine, call, True, protocol, 0, [])
    monkeypatch.setattr(sweep_worker, "ours", wrong)
    found = sweep_worker.measured(machine, call, True, protocol, 0, [])
    assert found["wrong"]["max_err"] > found["wrong"]["err_budget"]


# ---- the tables ----


def _row(line, us, peers, **more):
    call = Call.parse(line)
    row = {"suite": "sweep", "system": "ours", "kernel": "k", **call.fields(), "us": us, "peers": peers, "tflops": 1.0}
    if peers:
        row |= {"best": min(peers, key=peers.get), "ratio": min(peers.values()) / us}
    return row | more


def test_the_tables_say_mean_least_and_share():
    rows = [
        _row("bf16 fwd b1 q512 k512 h1 d64", 10.0, {"cudnn": 20.0, "fa2": 40.0}),
        _row("bf16 fwd b1 q512 k512 h1 d32", 10.0, {"cudnn": 5.0}),
        _row("bf16 fwd b1 q512 k512 h1 d128 dropout bias", 10.0, {"cudnn": 9.0}, before_us=9.0),
        _row("bf16 bwd b1 q512 k512 h1 d64 packed1", 10.0, {}),
    ]
    assert "4 calls, of which 3 have a peer" in sweep.overall(rows)
    mean = (2.0 * 0.5 * 0.9) ** (1 / 3)
    assert f"is {mean:.2f} in the geometric mean; ours is slower in 67%, below 0.7 in 33%, 0.50 at" in sweep.overall(
        rows
    )
    text = "\n".join(sweep.table({"machine": {"gpu": "x"}}, rows))
    assert "| bare | 1.00 (0.50, 50%, 2) |" in text
    assert "| two options |  | 0.90 (0.90, 100%, 1) |" in text
    assert "| dropout | 0.90 (0.90, 100%, 1) |  |" in text and "| bias | 0.90" in text  # by option, with another
    assert text.index("* 0.50 `") < text.index("dropout bias` k:") < text.index("* 2.00 `")
    assert "1 calls are in both: earlier time over today's 0.900" in text
    assert "no peer took one" in sweep.overall(rows[3:])


def test_fp8_and_tf32_are_tables_of_their_own():
    """A peer takes a call in fp8 as bfloat16, so it is in no mean over all calls."""
    lines = ("fp8 fwd b1 q64 k64 h1 d64", "fp32 fwd b1 q64 k64 h1 d64 tf32", "fp32 fwd b1 q64 k64 h1 d64")
    rows = [_row(line, 10.0, {"cudnn": us}) for line, us in zip(lines, (40.0, 20.0, 5.0), strict=True)]
    text = "\n".join(sweep.table({"machine": {"gpu": "x"}}, rows))
    assert "of which 2 have a peer" in text and "is 1.00 in the geometric mean" in text
    for title, mean in (("fp8, the peers in bfloat16", "4.00"), ("float32", "0.50"), ("float32, tf32 allowed", "2.00")):
        assert f"| bare | {mean}" in text.split(f"\n## {title}\n")[1].split("##")[0]


def test_times_with_the_work_of_the_host_compare_with_their_like():
    call = Call.parse(f"fp32 fwd {SMALL}")

    def timed(failed, **us):
        found = {name: Timing([t], capture_failed=name in failed) for name, t in us.items()}
        return sweep_worker._timed(call, found, [])

    row = timed((), ours=2.0, cudnn=3.0, fa2=2.5)
    assert (row["best"], row["ratio"]) == ("fa2", 1.25) and "not_captured" not in row
    row = timed(("fa2",), ours=2.0, cudnn=3.0, fa2=2.5)
    assert (row["best"], row["ratio"], row["not_captured"]) == ("cudnn", 1.5, ["fa2"])
    assert "ratio" not in timed(("ours",), ours=2.0, cudnn=3.0)
    assert timed(("fa2",), ours=2e3, fa2=3e3)["ratio"] == 1.5  # long ones hide what the host does
    text = "\n".join(sweep.table({"machine": {"gpu": "x"}}, [_row(str(call), 2.0, {}, not_captured=["fa2"])]))
    assert "FlashAttention-2" in text and "could not be captured" in text


def test_a_peer_with_another_answer_is_left_out_of_each_call(monkeypatch):
    torch = pytest.importorskip("torch")
    machine, right = open_machine("cpu", "torch"), make.peer

    def wrong(name, arrays):
        system = right(name, arrays)
        return make.Made(name, lambda i: system.launch(i) * 1.1, heads_second=system.heads_second)

    call, protocol = Call.parse(f"fp32 fwd {SMALL} causal"), Protocol(rounds=1, burst_s=1e-4)
    assert "torch" in sweep_worker.measured(machine, call, False, protocol, 0, ["torch"])["row"]["peers"]
    monkeypatch.setattr(sweep_worker, "peer", wrong)
    row = sweep_worker.measured(machine, call, False, protocol, 0, ["torch"])["row"]
    assert row["peers"] == {} and row["peers_wrong"] == ["torch"] and "ratio" not in row
    assert row["max_err"] <= row["err_budget"]  # a difference makes it a call that is checked
    assert torch.is_grad_enabled()


def test_a_checked_call_judges_each_row_of_a_peer(monkeypatch):
    """One wrong row among many hardly changes the mean square."""
    pytest.importorskip("torch")
    machine, right = open_machine("cpu", "torch"), make.peer

    def wrong(name, arrays):
        system = right(name, arrays)

        def launch(i):
            out = system.launch(i)
            out[:, :, 7] *= 2
            return out

        return make.Made(name, launch, heads_second=True)

    monkeypatch.setattr(sweep_worker, "peer", wrong)
    call, protocol = Call.parse("fp32 fwd b1 q2048 k2048 h1 d32"), Protocol(rounds=1, burst_s=1e-4)
    row = sweep_worker.measured(machine, call, True, protocol, 0, ["torch"])["row"]
    assert row["peers"] == {} and row["peers_wrong"] == ["torch"]


@pytest.mark.parametrize("good", [1, 2, 5])
@pytest.mark.parametrize("option", ["causal", "dropout"])
def test_a_peer_that_breaks_on_the_way_does_not_spoil_the_row_of_ours(monkeypatch, good, option):
    torch = pytest.importorskip("torch")
    machine, right = open_machine("cpu", "torch"), make.peer

    def breaks(name, arrays):
        system, left = right(name, arrays), iter(range(good))

        def launch(i):
            if next(left, None) is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return system.launch(i)

        return make.Made(name, launch, heads_second=True)

    monkeypatch.setattr(sweep_worker, "peer", breaks)
    call, protocol = Call.parse(f"fp32 fwd {SMALL} {option}"), Protocol(rounds=1, burst_s=1e-4)
    row = sweep_worker.measured(machine, call, True, protocol, 0, ["torch"])["row"]
    assert row["us"] > 0 and row["peers"] == {} and row["peers_wrong"] == ["torch"]


def test_a_peer_without_memory_is_refused_and_frees_what_it_had(monkeypatch):
    torch = pytest.importorskip("torch")
    machine = open_machine("cpu", "torch")
    alive = []

    class Held:
        def __init__(self):
            alive.append(self)

    def big(name, arrays):
        held = weakref.ref(Held())
        kept = alive.pop()
        alive.append(held)
        raise torch.OutOfMemoryError(f"CUDA out of memory with {kept}")

    monkeypatch.setattr(make, "_sdpa", big)
    monkeypatch.setattr(machine, "release", lambda: alive.append(alive[0]()))
    with pytest.raises(Refused, match="out of memory"):
        make.peer("torch", Arrays.of(machine, Call.parse(f"fp32 fwd {SMALL}")))
    assert alive[1] is None  # nothing held it when the memory was given back


def test_an_array_that_nobody_would_make_is_refused():
    call = Call.parse("bf16 fwd b1 q32768 k32768 h64 d64 alibi")
    arrays = Arrays(type("M", (), {"torch": None})(), call, None, None, None, {})
    with pytest.raises(Refused, match="its mask would have 68719476736 numbers"):
        make._dense(arrays)


def test_deterministic_peers_are_deterministic():
    torch = pytest.importorskip("torch")
    call = Call.parse(f"fp32 bwd {SMALL} deterministic")
    before = torch.utils.deterministic.fill_uninitialized_memory
    with make._modes(torch, call):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory == before


def test_a_peer_that_compiles_does_so_for_a_part_of_the_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(sweep_worker.time, "monotonic", lambda: now[0])

    def slow(name, arrays):
        now[0] += 15
        return name

    monkeypatch.setattr(sweep_worker, "peer", slow)
    compiled = sweep_worker.Compiled()
    kinds = [type("A", (), {"call": Call.parse(f"bf16 fwd b1 q9 k9 h1 d{d}")})() for d in (16, 32, 64)]
    assert compiled.peer("fa4", kinds[0]) == compiled.peer("fa4", kinds[1]) == "fa4"
    with pytest.raises(Refused, match="compiled enough"):
        compiled.peer("fa4", kinds[2])
    assert compiled.peer("fa4", kinds[0]) == "fa4" and compiled.peer("cudnn", kinds[2]) == "cudnn"
    now[0] += 300
    assert compiled.peer("fa4", kinds[2]) == "fa4"


def test_the_judge_looks_at_a_sequence_that_hides_keys():
    for line in ("fp32 fwd b4 q8 k20 h1 d8 key_mask", "fp32 fwd b4 q8 k20 h1 d8 cache"):
        arrays = Arrays.of(Numpy(), Call.parse(line))
        assert {Judge(arrays, seed).b for seed in range(30)} == {1, 2, 3}


def test_prices_suite(tmp_path):
    data = run(
        tmp_path, "--suite", "prices", "--device", "cpu", "--seqlen", "24", "--headdim", "16", "--heads", "2", *FAST
    )
    by_place = {}
    for row in data["rows"]:
        by_place.setdefault((row["pass"], row["causal"]), {})[row["option"]] = row
    assert set(by_place) == {(way, causal) for way in ("fwd", "bwd") for causal in (False, True)}
    for rows in by_place.values():
        assert set(rows) == {"", *prices.PRICED.values()}
        assert all(row["max_err"] <= row["err_budget"] for row in rows.values())
        for option, row in rows.items():
            if option:
                assert row["price"] == pytest.approx(row["us"] / rows[""]["us"], rel=1e-3)
    text = (tmp_path / "prices.md").read_text()
    assert "| a window that cuts nothing |" in text and "D16 24 causal" in text


def test_a_row_is_json_with_finite_numbers(tmp_path):
    found = sweep_worker.measured(
        Numpy(), Call.parse(f"fp32 bwd {SMALL}"), True, Protocol(rounds=1, burst_s=1e-4), 0, []
    )
    assert all(math.isfinite(value) for value in found["row"].values() if isinstance(value, float))
    assert json.loads(json.dumps(found)) == found


def test_devices_are_numbers_of_gpus(monkeypatch):
    monkeypatch.setattr(
        machine_module, "load", lambda: type("L", (), {"fa_cuda_device_count": staticmethod(lambda: 4)})
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine_module.gpus(None) == ["0", "1", "2", "3"] and machine_module.gpus("1,3") == ["1", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert machine_module.gpus("1,3") == ["5", "7"]
    with pytest.raises(BenchError, match="'4' is not a number below 4"):
        machine_module.gpus("4")
