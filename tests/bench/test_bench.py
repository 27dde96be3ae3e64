"""The bench command on the CPU, end to end with tiny shapes: files, schema, exit codes; wrong answers are not timed."""

import re
import sys

import numpy as np
import pytest
from bench_run import FAST, attention_rows, needs_matplotlib, run

from flash_attn_lab import bench
from flash_attn_lab.__main__ import main as command_line
from flash_attn_lab.bench import attention, curves, figure, machine, profile, suite, systems, timing
from flash_attn_minimal import kernels


def test_cpu_suite(tmp_path):
    data = run(
        tmp_path, "--suite", "cpu", *FAST, "--seqlen", "65,128", "--headdim", "40", "--heads", "4", "--heads-k", "2"
    )
    rows = attention_rows(data)
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
    for maker in (curves.picture, curves.roofline):
        for axis in maker(data, rows).axes:
            points = [point for line in axis.lines for point in line.get_xydata()]
            (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
            assert points and all(left <= x <= right and low <= y <= high for x, y in points)


def test_without_matplotlib_there_is_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(figure, "available", lambda: False)
    run(
        tmp_path, "--suite", "short", "--device", "cpu", *FAST, "--seqlen", "1,3", "--headdim", "16", "--mask", "causal"
    )
    assert {path.name for path in tmp_path.iterdir()} == {"short.json", "short.md"}
    assert "Microseconds" in (tmp_path / "short.md").read_text()


def test_ladder_has_every_kernel_and_says_who_refuses(tmp_path):
    data = run(tmp_path, "--suite", "ladder", "--device", "cpu", *FAST, "--seqlen", "96", "--heads", "2")
    ran, refused = [row["kernel"] for row in attention_rows(data)], [item["system"] for item in data["left_out"]]
    everyone = [kernel["name"] for kernel in kernels() if kernel["device"] == "cpu"]
    assert sorted(ran + refused) == sorted(everyone) and ran[0] == "cpu_naive"
    assert all(item["reason"] for item in data["left_out"])
    text = (tmp_path / "ladder.md").read_text()
    assert all(name in text for name in everyone)


def test_lengths_are_the_same_every_time():
    lengths = attention.draw_lengths("prompts", 32768)
    assert lengths == attention.draw_lengths("prompts", 32768) and sum(lengths) == 32768
    assert min(lengths) >= 1 and max(lengths) <= 4096 and 100 < np.median(lengths) < 600


def test_forward_shapes_are_the_protocol():
    gpu = type("Gpu", (), {"device": "cuda"})
    options = bench._parser().parse_args(["--dtype", "bf16", "--suite", "forward"])
    shapes = attention.shapes_of(options, gpu)
    assert len(shapes) == 36 + 12
    assert all(shape.tokens == 16384 and shape.dtype == "bfloat16" for shape in shapes)
    assert {(s.headdim, s.nheads, s.nheads_k) for s in shapes} == {
        (64, 32, 32),
        (128, 16, 16),
        (256, 8, 8),
        (128, 64, 8),
    }


def test_the_other_suites_on_the_same_shapes():
    gpu = type("Gpu", (), {"device": "cuda"})
    found = {}
    more = {"mma": ["--dtype", "bf16"], "fp8": ["--dtype", "fp8"], "tf32": ["--dtype", "fp32", "--allow-tf32"]}
    more |= {name: ["--dtype", "bf16", "--backward"] for name in ("backward", "backward_mma")}
    for name, options in more.items():
        found[name] = attention.shapes_of(bench._parser().parse_args([*options, "--suite", name]), gpu)
        assert len(found[name]) == (24 if name == "tf32" else 36)
        assert all(s.tokens == 16384 and s.nheads * s.headdim == 2048 for s in found[name])
    assert all(s.allow_tf32 for s in found["tf32"]) and found["backward_mma"] == found["backward"]
    assert all(s.backward for s in found["backward"]) and not any(s.backward for s in found["mma"])
    for name in ("mma", "backward_mma"):
        assert (suite.SUITES[name].kernels, suite.SUITES[name].peers) == (("mma_sm80",), "fa2")
    one, eight, back = (found[name][0] for name in ("mma", "fp8", "backward"))
    assert eight.given == one and one.given is one
    assert (eight.flops, back.flops) == (one.flops, 2.5 * one.flops)
    assert (eight.bytes, back.bytes) == (one.bytes * 5 / 8, 2 * one.bytes)


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
        (["--suite", "backwards"], "--suite: 'backwards' is not one of cpu, "),
        (["--suite", "cpu", "--device", "cpu"], "--device has no meaning in suite cpu"),
        (["--suite", "overhead", "--headdim", "64"], "--headdim has no meaning in suite overhead"),
        (["--suite", "cpu", "--inner"], "--inner has no meaning in suite cpu"),
        (["--suite", "fp8", "--dtype", "fp8"], "--dtype has no meaning in suite fp8"),
        (["--suite", "backward", "--allow-tf32"], "--allow-tf32 has no meaning in suite backward"),
        (["--suite", "ladder", "--backward"], "--backward has no meaning in suite ladder"),
        (["--suite", "ladder", "--device", "cpu", "--dtype", "fp16", "--allow-tf32"], "needs --dtype fp32, not fp16"),
        (
            ["--suite", "mma", "--device", "cpu", "--framework", "numpy"],
            "--suite mma times mma_sm80, which is not a kernel of the cpu",
        ),
        (
            ["--suite", "backward_mma", "--device", "cpu", "--framework", "numpy"],
            "--suite backward_mma times mma_sm80, which is not a kernel of the cpu",
        ),
        (["--suite", "cpu", "--seqlen", "0"], "0 is not positive"),
        (["--suite", "cpu", "--seqlen", "x"], "--seqlen: 'x' is not a whole number"),
        (["--suite", "cpu", "--mask", "full,round"], "--mask: 'round' is not one of full, causal"),
        (["--suite", "cpu", "--dtype", "int8"], "--dtype: 'int8' is not one of fp32, "),
        (["--suite", "cpu", "--heads-k", "2"], "--heads-k 2 needs --heads"),
        (["--suite", "cpu", "--heads", "6", "--heads-k", "4"], "--heads 6 is not a multiple of --heads-k 4"),
        (["--suite", "cpu", "--seed", "-1"], "-1 is negative"),
        (["--suite", "cpu", "--framework", "cupy"], "there is no such combination"),
        (["--suite", "cpu", "--framework", "numpy", "--kernel", "warp"], "--kernel warp: 'warp' is not one of best, "),
        (["--suite", "cpu", "--framework", "numpy", "--peers", "torch"], "need PyTorch arrays"),
        (["--suite", "cpu", "--framework", "numpy", "--peers", "fa9"], "'fa9' is not one of torch, standard"),
        (["--suite", "ladder", "--device", "cpu", "--framework", "numpy", "--seqlen", "1,2"], "takes one value"),
        (["--suite", "profile", "--run", "--inner"], "--run and --inner exclude each other"),
        (
            ["--suite", "profile", "--device", "cpu", "--framework", "numpy", "--kernel", "best,best"],
            "takes one kernel",
        ),
        (["--plot-only", "no.json"], "No such file"),
        (["--plot-only", "no.json", "--suite", "cpu"], "--plot-only stands alone"),
        (["--output", "/dev/null/x"], "--output /dev/null/x: cannot write there: Not a directory"),
        (["--sead", "1"], "--sead is not an option of this command; did you mean --seed?"),
        (
            ["--suite", "cpu", "--framework", "cupy"],
            "suite cpu needs arrays of cupy on cpu: there is no",
        ),
        (["--suite", "cpu", "--threads", "9999"], "--threads: 9999 is above 4096"),
        (["--seed"], "--seed: a value is missing"),
        (["--seed", "1", "2"], "'2' is one argument too many"),
        (["--device", "gpu"], "--device: 'gpu' is not one of cpu, cuda\n"),
        (
            ["--nonsense"],
            "--nonsense is not an option of this command; `python -m flash_attn_lab bench --help` lists",
        ),
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
    assert "cannot write there" in capsys.readouterr().err


def test_results_go_to_benchmarks_and_not_to_the_tables_of_the_documents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    shape = ["--seqlen", "8", "--headdim", "8", "--mask", "full"]
    assert bench.main(["--suite", "cpu", *FAST, *shape]) == 0
    folder = tmp_path / "benchmarks" / machine.device_slug(machine.Numpy())
    assert (folder / "cpu.json").is_file() and not list((tmp_path / "docs" / "benchmarks").iterdir())
    said = capsys.readouterr().err
    assert ("no pictures: matplotlib is not installed" in said) == (not figure.available())


def test_a_gpu_is_not_replaced_by_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(bench, "library_has_cuda", lambda: False)
    monkeypatch.setattr(machine, "library_has_cuda", lambda: False)
    assert bench.main(["--device", "cuda"]) == 2
    assert capsys.readouterr().err == "bench: --device cuda: the library sees no GPU\n"


def test_nothing_timed_says_why(tmp_path, capsys):
    shape = ["--seqlen", "8", "--headdim", "600", "--mask", "full", "--output", str(tmp_path)]
    assert bench.main(["--suite", "cpu", *FAST, *shape]) == 1
    assert "nothing was timed\n  headdim=600 is outside 1 .. 512" in capsys.readouterr().err


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
    monkeypatch.setattr(profile, "prepared", lambda *_: (None, None, None, None))
    monkeypatch.setattr(profile, "ours", lambda shape, inputs, name, threads: systems.System("ours", name, None))
    text = " ".join(profile.command(options, gpu, "python"))
    assert text.startswith(
        "ncu --set full --clock-control none --profile-from-start off -f -o fast_bf16_d128_s256_full "
    )
    assert "--suite profile --inner --device cuda --kernel fast" in text


def test_nothing_is_imported_before_it_is_needed():
    import subprocess

    heavy = ("torch", "cupy", "matplotlib", "rich")
    code = f"import sys, flash_attn_lab.bench; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
