"""The bench command on the CPU, end to end with tiny shapes: files, schema, exit codes; nothing wrong is timed."""

import importlib.util
import json
import math
import re
import sys

import numpy as np
import pytest

from flash_attn_minimal import bench, kernels
from flash_attn_minimal.bench import check, machine, plots, report, suites, systems, timing
from flash_attn_minimal.cli import main as command_line

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_matplotlib = pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed")
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
FAST = ["--quick", "--rounds", "2", "--framework", "numpy"]

ROW_TYPES = dict.fromkeys("suite system kernel pass dtype mix arrays device call".split(), str)
ROW_TYPES |= dict.fromkeys("forced causal wrong".split(), bool)
ROW_TYPES |= dict.fromkeys(
    "headdim headdim_v seqlen_q seqlen_k batch nheads nheads_k m n k input_sets tokens".split(), int
)
ROW_TYPES |= dict.fromkeys(
    "us us_min us_spread tflops tbps max_err err_budget sustained_us sustained_tflops".split(), float
)


def run(tmp_path, *argv, code=0):
    """Runs the command and returns what it wrote, checked against the schema."""
    assert bench.main([*argv, "--output", str(tmp_path)]) == code
    suite = argv[argv.index("--suite") + 1]
    data = json.loads((tmp_path / f"{suite}.json").read_text())
    check_schema(data, suite)
    text = (tmp_path / f"{suite}.md").read_text()
    assert text.startswith(f"# {suite}: ") and data["date"] in text
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    return data


def check_schema(data, suite):
    assert data.keys() - {"commit"} == {"machine", "date", "command", "suite", "rows", "left_out"}
    assert data["machine"].keys() >= {"cpu", "host", "library"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", data["date"])
    assert data["command"].startswith("python -m flash_attn_minimal bench") and "--output" not in data["command"]
    for row in data["rows"]:
        assert row["suite"] == suite
        for key, value in row.items():
            assert type(value) in (ROW_TYPES[key], int if ROW_TYPES[key] is float else ROW_TYPES[key]), (key, value)
        for key in ("us", "us_min", "tflops", "tbps"):
            assert 0 < row.get(key, 1) < math.inf
        if row["system"] not in ("blas", "copy") and suite != "overhead":
            assert row["pass"] == "fwd" and row["headdim"] == row["headdim_v"]
            if row["system"] == "ours":
                assert ("us" in row) == (row["max_err"] <= row["err_budget"])


def attention(data):
    return [row for row in data["rows"] if row["pass"] == "fwd"]


def test_cpu_suite(tmp_path):
    data = run(
        tmp_path, "--suite", "cpu", *FAST, "--seqlen", "65,128", "--headdim", "40", "--heads", "4", "--heads-k", "2"
    )
    rows = attention(data)
    assert [(row["seqlen_q"], row["causal"]) for row in rows] == [(65, False), (128, False), (65, True), (128, True)]
    assert all((row["nheads"], row["nheads_k"], row["kernel"]) == (4, 2, rows[0]["kernel"]) for row in rows)
    full, causal = rows[1], rows[3]
    assert full["tflops"] * full["us"] * 1e6 == pytest.approx(4 * 128**2 * 40 * 4, rel=1e-3)
    assert causal["tflops"] * causal["us"] * 1e6 == pytest.approx(2 * 128**2 * 40 * 4, rel=1e-3)
    assert full["tbps"] * full["us"] * 1e6 == pytest.approx(128 * 40 * (2 * 4 + 2 * 2) * 4, rel=1e-3)
    assert {row["system"] for row in data["rows"]} == {"ours", "blas", "copy"}


@needs_matplotlib
def test_pictures_appear_and_can_be_made_again(tmp_path):
    run(tmp_path, "--suite", "cpu", *FAST, "--seqlen", "64", "--headdim", "32,64")
    pictures = {"cpu.png", "cpu_roofline.png"}
    assert {path.name for path in tmp_path.iterdir()} == {"cpu.json", "cpu.md"} | pictures
    before = {name: (tmp_path / name).read_bytes() for name in pictures | {"cpu.md"}}
    for name in before:
        (tmp_path / name).unlink()
    assert bench.main(["--plot-only", str(tmp_path / "cpu.json")]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


@needs_matplotlib
def test_every_point_is_inside_its_panel():
    rows = []
    for headdim, speed in ((64, 100.0), (128, 700.0), (256, 300.0)):
        for n in (512, 1024):
            shape = systems.Shape(1, n, 4, 4, headdim, False, "bfloat16").keys()
            rows.append(
                {"suite": "forward", "system": "ours", "pass": "fwd", "us": 1.0, "tflops": speed, "tbps": 1.0} | shape
            )
    data = {"suite": "forward", "machine": {"gpu": "NVIDIA H200"}, "date": "2000-01-01", "rows": rows}
    for maker in (plots.curves, plots.roofline):
        for axis in maker(data, rows).axes:
            points = [point for line in axis.lines for point in line.get_xydata()]
            (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
            assert points and all(left <= x <= right and low <= y <= high for x, y in points)


def test_without_matplotlib_there_is_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "available", lambda: False)
    run(
        tmp_path, "--suite", "short", "--device", "cpu", *FAST, "--seqlen", "1,3", "--headdim", "16", "--mask", "causal"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"short.json", "short.md"}
    assert "Microseconds" in (tmp_path / "short.md").read_text()


def test_ladder_has_every_kernel_and_says_who_refuses(tmp_path):
    data = run(tmp_path, "--suite", "ladder", "--device", "cpu", *FAST, "--seqlen", "96", "--heads", "2")
    ran, refused = [row["kernel"] for row in attention(data)], [item["system"] for item in data["left_out"]]
    everyone = [kernel["name"] for kernel in kernels() if kernel["device"] == "cpu"]
    assert sorted(ran + refused) == sorted(everyone) and ran[0] == "cpu_naive"
    assert all(item["reason"] for item in data["left_out"])
    text = (tmp_path / "ladder.md").read_text()
    assert all(name in text for name in everyone)


def test_varlen_suite(tmp_path):
    options = ["--device", "cpu", *FAST, "--tokens", "700", "--headdim", "32", "--heads", "2"]
    data = run(tmp_path, "--suite", "varlen", *options)
    assert {(row["mix"], row["causal"]) for row in attention(data)} == {(m, c) for m in suites.MIXES for c in (0, 1)}
    assert all(row["tokens"] == 700 for row in attention(data))


def test_lengths_are_the_same_every_time():
    lengths = suites.draw_lengths("prompts", 32768)
    assert lengths == suites.draw_lengths("prompts", 32768) and sum(lengths) == 32768
    assert min(lengths) >= 1 and max(lengths) <= 4096 and 100 < np.median(lengths) < 600


def test_forward_shapes_are_the_protocol():
    gpu = type("Gpu", (), {"device": "cuda"})
    options = bench._parser().parse_args(["--dtype", "bf16"])
    shapes = suites.forward_shapes(options, gpu)
    assert len(shapes) == 36 + 12
    assert all(shape.tokens == 16384 and shape.dtype == "bfloat16" for shape in shapes)
    assert {(s.headdim, s.nheads, s.nheads_k) for s in shapes} == {
        (64, 32, 32),
        (128, 16, 16),
        (256, 8, 8),
        (128, 64, 8),
    }


def test_overhead_suite(tmp_path):
    data = run(tmp_path, "--suite", "overhead", "--rounds", "1", "--quick", "--framework", "numpy")
    assert [(row["arrays"], row["call"]) for row in data["rows"]] == [("numpy", "new out"), ("numpy", "given out")]


@needs_torch
def test_peers_are_timed_beside_ours(tmp_path):
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--headdim", "32", "--heads", "4", "--heads-k", "2"]
    data = run(
        tmp_path, "--suite", "short", *options, "--seqlen", "33", "--batch", "2", "--peers", "all", "--dtype", "bf16"
    )
    assert {row["system"] for row in attention(data)} == {"ours", "torch", "standard"} and not data["left_out"]
    assert "speed over standard attention" in (tmp_path / "short.md").read_text()


@needs_torch
def test_sustained_and_packed_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SUSTAINED_S", 0.01)
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--tokens", "300", "--heads", "2", "--mask", "causal"]
    data = run(tmp_path, "--suite", "varlen", *options, "--headdim", "32", "--sustained")
    assert {row["system"] for row in attention(data)} == {"ours", "torch"}
    assert all(row["sustained_us"] > 0 for row in attention(data))
    assert "sustained" in (tmp_path / "varlen.md").read_text()


@needs_torch
def test_a_peer_that_refuses_is_left_out(tmp_path, monkeypatch):
    def refuse(name, torch, shape, inputs):
        raise RuntimeError("only on Tuesdays\nand other lines")

    monkeypatch.setitem(systems.PEERS["cpu"], "torch", refuse)
    data = run(
        tmp_path, "--suite", "cpu", "--quick", "--rounds", "1", "--seqlen", "32", "--headdim", "16", "--mask", "full"
    )
    assert [(item["system"], item["reason"]) for item in data["left_out"]] == [("torch", "only on Tuesdays")]
    assert "only on Tuesdays" in (tmp_path / "cpu.md").read_text()


@needs_torch
def test_a_peer_that_computes_something_else_is_left_out(tmp_path, monkeypatch):
    def zeros(name, torch, shape, inputs):
        return systems.System(name, None, lambda i: torch.zeros_like(inputs[i][0]))

    monkeypatch.setitem(systems.PEERS["cpu"], "torch", zeros)
    data = run(
        tmp_path, "--suite", "cpu", "--quick", "--rounds", "1", "--seqlen", "32", "--headdim", "16", "--mask", "full"
    )
    assert [item["system"] for item in data["left_out"]] == ["torch"] and "its answer is off" in data["left_out"][0][
        "reason"
    ]
    assert {row["system"] for row in attention(data)} == {"ours"}


# ---- the check ----


@pytest.mark.parametrize("fault", ["scaled", "one row", "nan", "untouched"])
def test_a_wrong_answer_is_recorded_and_not_timed(tmp_path, monkeypatch, capsys, fault):
    right = systems.flash_attn_func

    def wrong(q, k, v, *, out, **options):
        if fault == "untouched":
            return out
        right(q, k, v, out=out, **options)
        if fault == "scaled":
            out *= 1.001
        elif fault == "one row":
            out[:, -1] = out[:, -2]
        else:
            out[0, 3, 0, 0] = np.nan
        return out

    monkeypatch.setattr(systems, "flash_attn_func", wrong)
    data = run(
        tmp_path, "--suite", "cpu", *FAST, "--seqlen", "80", "--headdim", "16", "--heads", "2", "--mask", "full", code=1
    )
    [row] = attention(data)
    assert row["wrong"] and "us" not in row and row["max_err"] > row["err_budget"]
    assert "WRONG" in capsys.readouterr().out
    assert "Wrong answers" in (tmp_path / "cpu.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_check_passes_the_same_precision_and_sees_a_mask_off_by_one(dtype):
    host = machine.Numpy()
    shape = systems.Shape(2, 150, 4, 2, 24, True, dtype)
    draw = np.random.default_rng(3)
    sizes = [shape.size(heads) for heads in (4, 2, 2)]
    q, k, v = (check.round_to(draw.standard_normal(size).astype(np.float32), dtype) for size in sizes)
    exact = check.Exact(host, shape, q, k, v)
    rows, out, shifted = np.arange(150), np.empty_like(q), np.empty_like(q)
    for b in range(2):
        for h in range(4):
            at, of = shape.where(b, h), shape.where(b, h // 2)
            out[at] = check.attend(q[at], k[of], v[of], rows, True, dtype)
            shifted[at] = check.attend(q[at], k[of], v[of], rows + 1, True, dtype)
    err, budget = exact.judge(out)
    assert err <= budget
    err, budget = exact.judge(shifted)
    assert err > budget


def test_rounding_to_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * np.float32(2.0) ** np.arange(
        -60, 68
    ).repeat(32)
    x = np.concatenate([x, np.array([0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8], np.float32)])
    assert np.array_equal(check.round_to(x, "bfloat16"), x.astype(ml_dtypes.bfloat16).astype(np.float32))


# ---- the clock ----


def test_interleave_is_shuffled_and_counts_launches():
    calls = []
    host = machine.Numpy()
    launches = [lambda i, name=name: calls.append(name) for name in "abc"]
    protocol = timing.Protocol(rounds=8, burst_s=1e-9)
    found = timing.interleave(host, launches, protocol, machine.Meter(host), seed=1)
    assert [len(timed.bursts) for timed in found] == [8, 8, 8]
    rounds = ["".join(dict.fromkeys(calls[-6 * n :][:6])) for n in range(8, 0, -1)]  # each twice: warm-up and timed
    assert all(sorted(order) == list("abc") for order in rounds) and len(set(rounds)) > 1


def test_meter_reads_nothing_on_the_cpu():
    with machine.Meter(machine.Numpy()) as meter:
        assert meter.between() is None and meter.driver is None


# ---- usage ----


@pytest.mark.parametrize(
    "argv, text",
    [
        (["--suite", "backwards"], "invalid choice: 'backwards'"),
        (["--suite", "cpu", "--device", "cpu"], "--device has no meaning in suite cpu"),
        (["--suite", "overhead", "--headdim", "64"], "--headdim has no meaning in suite overhead"),
        (["--suite", "cpu", "--inner"], "--inner has no meaning in suite cpu"),
        (["--suite", "cpu", "--seqlen", "0"], "0 is not positive"),
        (["--suite", "cpu", "--seqlen", "x"], "invalid numbers value: 'x'"),
        (["--suite", "cpu", "--mask", "full,round"], "'round' is neither full nor causal"),
        (["--suite", "cpu", "--dtype", "int8"], "'int8' is none of float32"),
        (["--suite", "cpu", "--heads-k", "2"], "--heads-k 2 needs --heads"),
        (["--suite", "cpu", "--heads", "6", "--heads-k", "4"], "--heads 6 is not a multiple of --heads-k 4"),
        (["--suite", "cpu", "--seed", "-1"], "-1 is negative"),
        (["--suite", "cpu", "--framework", "cupy"], "there is no such combination"),
        (["--suite", "cpu", "--framework", "numpy", "--kernel", "warp"], "'warp' is none of best, "),
        (["--suite", "cpu", "--framework", "numpy", "--peers", "torch"], "need PyTorch arrays"),
        (["--suite", "cpu", "--framework", "numpy", "--peers", "fa9"], "'fa9' is none of torch, standard"),
        (["--suite", "ladder", "--device", "cpu", "--framework", "numpy", "--seqlen", "1,2"], "takes one value"),
        (["--suite", "profile", "--run", "--inner"], "--run and --inner exclude each other"),
        (
            ["--suite", "profile", "--device", "cpu", "--framework", "numpy", "--kernel", "best,best"],
            "takes one kernel",
        ),
        (["--plot-only", "no.json"], "No such file"),
        (["--plot-only", "no.json", "--suite", "cpu"], "--plot-only stands alone"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_arguments(argv, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert bench.main(argv) == 2
    assert text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_gpu_suite_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(machine, "library_has_cuda", lambda: False)
    assert bench.main(["--suite", "forward", "--device", "cuda"]) == 2
    assert "the library sees no GPU" in capsys.readouterr().err


def test_a_foreign_file_and_a_folder_that_cannot_be(tmp_path, capsys):
    (tmp_path / "x.json").write_text('{"rows": 1}')
    assert bench.main(["--plot-only", str(tmp_path / "x.json")]) == 2
    assert "not a result" in capsys.readouterr().err
    options = ["--seqlen", "8", "--headdim", "8", "--mask", "full", "--output", str(tmp_path / "x.json" / "below")]
    assert bench.main(["--suite", "cpu", *FAST, *options]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert report.default_folder("h200").parts == ("benchmarks", "h200")
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    assert report.default_folder("h200").parts == ("docs", "benchmarks", "h200")


def test_device_slug():
    card = type("Card", (), {"device": "cuda", "name": "NVIDIA H200"})
    assert machine.device_slug(card) == "h200"
    assert re.fullmatch(r"[a-z0-9.\-]+", machine.device_slug(machine.Numpy()))


def test_profile_prints_a_command_that_runs(capsys):
    options = ["--device", "cpu", "--framework", "numpy", "--seqlen", "64", "--heads", "2", "--kernel", "cpu_portable"]
    assert command_line(["bench", "--suite", "profile", *options, "--mask", "causal"]) == 0
    printed = capsys.readouterr().out.split()
    assert printed[:2] == ["perf", "record"] and "--inner" in printed
    assert command_line(printed[printed.index("bench") :]) == 0
    assert "cpu_portable: headdim 64, causal, batch 1, seqlen 64, heads 2: error" in capsys.readouterr().out


def test_profile_on_a_gpu_is_ncu(monkeypatch):
    gpu = type("Gpu", (machine.Numpy,), {"device": "cuda"})()
    options = bench._parser().parse_args(
        ["--suite", "profile", "--dtype", "bf16", "--kernel", "fast", "--seqlen", "256"]
    )
    monkeypatch.setattr(suites, "Inputs", lambda *_: None)
    monkeypatch.setattr(suites, "ours", lambda shape, inputs, name, threads: systems.System("ours", name, None))
    text = " ".join(suites.profile_command(options, gpu, "python"))
    assert text.startswith(
        "ncu --set full --clock-control none --profile-from-start off -f -o fast_bf16_d128_s256_full "
    )
    assert "--suite profile --inner --device cuda --kernel fast" in text


def test_nothing_is_imported_before_it_is_needed():
    import subprocess

    heavy = ("torch", "cupy", "matplotlib", "rich")
    code = f"import sys, flash_attn_minimal.bench; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
