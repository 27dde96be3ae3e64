"""The bench command on the CPU, end to end with tiny shapes: files, schema, exit codes; nothing wrong is timed."""

import importlib.util
import json
import math
import re
import sys

import numpy as np
import pytest

from flash_attn_minimal import backward_kernels, bench, kernels
from flash_attn_minimal.bench import check, linear, machine, plots, report, small_ops, suites, systems, timing
from flash_attn_minimal.cli import main as command_line

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_matplotlib = pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed")
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
FAST = ["--quick", "--rounds", "2", "--framework", "numpy"]

ROW_TYPES = dict.fromkeys(
    "suite system kernel pass dtype mix arrays device call mode fused model cache_dtype layout weights".split(), str
)
ROW_TYPES |= dict.fromkeys("forced causal wrong tf32 deterministic fast_accum".split(), bool)
ROW_TYPES |= dict.fromkeys(
    "headdim headdim_v seqlen_q seqlen_k batch nheads nheads_k m n k input_sets tokens position bytes".split(), int
)
ROW_TYPES |= dict.fromkeys(
    "us us_min us_spread tflops tbps max_err err_budget sustained_us sustained_tflops steps_per_s share".split(), float
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
        if suite == "llama":
            assert row["pass"] in ("step", "copy")
        elif row["system"] not in ("blas", "copy") and suite not in ("overhead", "ops", "linear"):
            assert (
                row["pass"] == ("bwd" if suite.startswith("backward") else "fwd") and row["headdim"] == row["headdim_v"]
            )
            if row["system"] == "ours":
                assert ("us" in row) == (row["max_err"] <= row["err_budget"])


def attention_rows(data):
    return [row for row in data["rows"] if row["pass"] in ("fwd", "bwd")]


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
    ran, refused = [row["kernel"] for row in attention_rows(data)], [item["system"] for item in data["left_out"]]
    everyone = [kernel["name"] for kernel in kernels() if kernel["device"] == "cpu"]
    assert sorted(ran + refused) == sorted(everyone) and ran[0] == "cpu_naive"
    assert all(item["reason"] for item in data["left_out"])
    text = (tmp_path / "ladder.md").read_text()
    assert all(name in text for name in everyone)


def test_ops_suite(tmp_path, monkeypatch):
    monkeypatch.setattr(small_ops, "STORY", [(768, 64), (2304, 32), (4096, 40)])
    data = run(tmp_path, "--suite", "ops", "--device", "cpu", *FAST)
    assert not data["left_out"]
    mine = [row for row in data["rows"] if row["system"] == "ours"]
    assert [row.get("fused") for row in mine if row["pass"] == "matvec"] == [None, "norm", "norm, swiglu"]
    assert {row["pass"] for row in mine} == {"matvec", "sample", "rms_norm", "swiglu", "rope"}
    assert all(row["max_err"] <= row["err_budget"] for row in mine if row["pass"] == "matvec")
    monkeypatch.setattr(small_ops.reference, "linear", lambda *_, **__: np.float64(7))
    wrong = run(tmp_path, "--suite", "ops", "--device", "cpu", *FAST, code=1)
    assert [row["pass"] for row in wrong["rows"] if row.get("wrong")] == ["matvec"] * 3


def test_linear_suite(tmp_path, monkeypatch):
    monkeypatch.setitem(linear.QUICK, "cpu", (((96, 64), (130, 72)), (1, 5)))
    options = "--suite", "linear", "--device", "cpu", "--dtype", "fp16", *FAST
    data = run(tmp_path, *options, "--quick")
    assert not data["left_out"]
    mine = [row for row in data["rows"] if row["system"] == "ours"]
    assert [(row["n"], row["m"], row["weights"]) for row in mine] == [
        (n, m, weights) for n in (96, 130) for m in (1, 5) for weights in linear.FORMATS
    ]
    assert all(row["kernel"] == "cpu" and row["max_err"] <= row["err_budget"] for row in mine)
    assert all(
        row["tflops"] * row["us"] * 1e6 == pytest.approx(2 * row["m"] * row["n"] * row["k"], rel=1e-3) for row in mine
    )
    assert "| rows of x | BLAS | nvfp4 | mxfp4 | int4 | kernel |" in (tmp_path / "linear.md").read_text()
    forced = run(tmp_path, *options, "--quick", "--kernel", "cpu")
    assert all(row["forced"] for row in forced["rows"] if row["system"] == "ours")
    monkeypatch.setattr(linear.ops, "linear", lambda x, packed, out, **_: out)  # NaN
    wrong = run(tmp_path, *options, "--quick", code=1)
    assert len([row for row in wrong["rows"] if row.get("wrong")]) == 12


def test_varlen_suite(tmp_path):
    options = ["--device", "cpu", *FAST, "--tokens", "700", "--headdim", "32", "--heads", "2"]
    data = run(tmp_path, "--suite", "varlen", *options)
    assert {(row["mix"], row["causal"]) for row in attention_rows(data)} == {
        (m, c) for m in suites.MIXES for c in (0, 1)
    }
    assert all(row["tokens"] == 700 for row in attention_rows(data))


def test_lengths_are_the_same_every_time():
    lengths = suites.draw_lengths("prompts", 32768)
    assert lengths == suites.draw_lengths("prompts", 32768) and sum(lengths) == 32768
    assert min(lengths) >= 1 and max(lengths) <= 4096 and 100 < np.median(lengths) < 600


def test_forward_shapes_are_the_protocol():
    gpu = type("Gpu", (), {"device": "cuda"})
    options = bench._parser().parse_args(["--dtype", "bf16", "--suite", "forward"])
    shapes = suites.shapes_of(options, gpu)
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
    more = {"mma": ["--dtype", "bf16"], "fp8": ["--dtype", "fp8"], "float32": ["--dtype", "fp32", "--allow-tf32"]}
    more |= {suite: ["--dtype", "bf16", "--backward"] for suite in ("backward", "backward_mma")}
    for suite, options in more.items():
        found[suite] = suites.shapes_of(bench._parser().parse_args([*options, "--suite", suite]), gpu)
        assert len(found[suite]) == (18 if suite == "float32" else 36)
        assert all(s.tokens == 16384 and s.nheads * s.headdim == 2048 for s in found[suite])
    assert all(s.allow_tf32 for s in found["float32"]) and found["backward_mma"] == found["backward"]
    assert all(s.backward for s in found["backward"]) and not any(s.backward for s in found["mma"])
    for suite in ("mma", "backward_mma"):
        assert (suites.SUITES[suite].kernels, suites.SUITES[suite].peers) == (("mma_sm80",), "fa2")
    one, eight, back = (found[suite][0] for suite in ("mma", "fp8", "backward"))
    assert eight.given == one and one.given is one
    assert (eight.flops, back.flops) == (one.flops, 2.5 * one.flops)
    assert (eight.bytes, back.bytes) == (one.bytes * 5 / 8, 2 * one.bytes)


# ---- float8 and float32 ----


@pytest.fixture
def fp8_attention(monkeypatch):
    """float8 attention on the CPU, where the library has none."""
    pytest.importorskip("ml_dtypes")
    exact = systems.flash_attn_func

    def attention(q, k, v, *, out, q_descale, k_descale, v_descale, causal, **_):
        factors = (q_descale, k_descale, v_descale)
        wide = [x.astype(np.float32) * f[:, None, :, None] for x, f in zip((q, k, v), factors, strict=True)]
        out[...] = exact(*wide, causal=causal).astype(out.dtype)
        return out

    plan = type("Plan", (), {"status": "FA_OK", "kernel": "fp8_cpu"})
    monkeypatch.setattr(systems, "flash_attn_func", attention)
    monkeypatch.setattr(systems, "query", lambda *_, **__: plan)
    return attention


def test_fp8_suite(tmp_path, fp8_attention):
    options = [*FAST, "--device", "cpu", "--tokens", "128", "--seqlen", "64,128", "--headdim", "64", "--heads", "2"]
    rows = attention_rows(run(tmp_path, "--suite", "fp8", *options))
    assert [(row["seqlen_q"], row["batch"], row["causal"], "fast_accum" in row) for row in rows] == [
        (n, 128 // n, causal, fast) for causal in (False, True) for n in (64, 128) for fast in (False, True)
    ]
    assert all((row["kernel"], row["dtype"]) == ("fp8_cpu", "float8_e4m3fn") for row in rows)
    text = (tmp_path / "fp8.md").read_text()
    assert text.startswith("# fp8: ") and "flash-attn-minimal, fast_accum" in text


def test_fp8_with_a_wrong_factor_is_wrong(tmp_path, monkeypatch, fp8_attention):
    def wrong(q, k, v, *, v_descale, **options):
        return fp8_attention(q, k, v, v_descale=v_descale * 1.2, **options)

    monkeypatch.setattr(systems, "flash_attn_func", wrong)
    options = [*FAST, "--device", "cpu", "--tokens", "64", "--seqlen", "64", "--headdim", "64", "--heads", "2"]
    data = run(tmp_path, "--suite", "fp8", *options, code=1)
    assert all(row["wrong"] for row in attention_rows(data))


def test_a_suite_that_nobody_serves(tmp_path, capsys):
    pytest.importorskip("ml_dtypes")
    options = ["--device", "cpu", *FAST, "--tokens", "64", "--seqlen", "64", "--headdim", "64", "--heads", "2"]
    data = run(tmp_path, "--suite", "fp8", *options, code=1)
    assert not attention_rows(data) and "takes no float8_e4m3" in data["left_out"][0]["reason"]
    assert "nothing was timed" in capsys.readouterr().err


@needs_torch
def test_float32_suite_lets_tf32_in(tmp_path, monkeypatch):
    monkeypatch.setitem(systems.PEERS["cpu"], "standard_tf32", systems.standard)
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--tokens", "66", "--seqlen", "33", "--headdim", "16"]
    data = run(tmp_path, "--suite", "float32", *options, "--heads", "2", "--kernel", "cpu_portable,best")
    rows = attention_rows(data)
    assert {report.series(row) for row in rows} == {"cpu_portable", "ours", "standard", "standard_tf32"}
    assert all(("tf32" in row) == (row["system"] == "standard_tf32") for row in rows)
    rows = {row["system"]: row for row in rows if not row["causal"]}
    assert rows["standard_tf32"]["err_budget"] > 10 * rows["standard"]["err_budget"]


def test_rounding_to_tf32_and_float8():
    x = np.array([1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0, 3], np.float32)
    assert check.round_to(x, "tf32").tolist() == [1 + 2**-10, 1, -1 - 2**-10, 0, 3]
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * np.float32(2.0) ** np.arange(-14, 2).repeat(
        256
    )
    x = np.concatenate([x, np.array([0, -0.0, 2**-10, 3 * 2**-10, 448, 17, 18, 19], np.float32)])
    assert np.array_equal(check.round_to(x, "float8_e4m3fn"), x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


# ---- backward ----


def plain_backward(dout, q, k, v, out, lse, *, causal=False, dq, dk, dv, deterministic=False, kernel=None, **_):
    """NumPy, straight from the formulas."""
    group = q.shape[2] // k.shape[2]
    dq[...], dk[...], dv[...] = 0, 0, 0
    for b, h in np.ndindex(q.shape[0], q.shape[2]):
        at, of = (b, slice(None), h), (b, slice(None), h // group)
        s = q[at] @ k[of].T * q.shape[-1] ** -0.5 - lse[b, h][:, None]
        p = np.exp(np.where(np.tri(*s.shape, dtype=bool), s, -np.inf) if causal else s)
        ds = p * (dout[at] @ v[of].T - (dout[at] * out[at]).sum(1)[:, None]) * q.shape[-1] ** -0.5
        dq[at] = ds @ k[of]
        dk[of] += ds.T @ q[at]
        dv[of] += p.T @ dout[at]
    return dq, dk, dv


def with_backward(monkeypatch, function):
    monkeypatch.setattr(systems, "backward", function)


BACKWARD = ["--suite", "backward", "--device", "cpu", *FAST, "--headdim", "16", "--heads", "4", "--heads-k", "2"]


def test_backward_suite(tmp_path, monkeypatch):
    with_backward(monkeypatch, plain_backward)
    data = run(tmp_path, *BACKWARD, "--seqlen", "65,130", "--batch", "2")
    rows = attention_rows(data)
    assert [(row["seqlen_q"], row["causal"], "deterministic" in row) for row in rows] == [
        (n, causal, deterministic) for causal in (False, True) for n in (65, 130) for deterministic in (False, True)
    ]
    assert rows[0]["tflops"] * rows[0]["us"] * 1e6 == pytest.approx(10 * 65**2 * 16 * 4 * 2, rel=1e-3)
    assert "flash-attn-minimal, deterministic" in (tmp_path / "backward.md").read_text()


@pytest.mark.parametrize("fault", ["dq", "dk", "dv", "one head", "nan"])
def test_a_wrong_gradient_is_not_timed(tmp_path, monkeypatch, fault):
    def wrong(*arrays, **options):
        dq, dk, dv = plain_backward(*arrays, **options)
        if fault in ("dq", "dk", "dv"):
            {"dq": dq, "dk": dk, "dv": dv}[fault][:, 70:] *= 1.001
        elif fault == "one head":
            dk[:, :, 1] -= 0.5 * dk[:, :, 1]
        else:
            dv[0, 3, 0, 0] = np.nan
        return dq, dk, dv

    with_backward(monkeypatch, wrong)
    data = run(tmp_path, *BACKWARD, "--seqlen", "130", "--mask", "causal", code=1)
    assert all(row["wrong"] and row["max_err"] > row["err_budget"] for row in attention_rows(data))


@needs_torch
def test_backward_peers(tmp_path, monkeypatch):
    """PyTorch's gradients pass the check, which knows nothing of PyTorch's."""

    def through_numpy(*arrays, dq, dk, dv, **options):
        plain_backward(*(x.numpy() for x in arrays), dq=dq.numpy(), dk=dk.numpy(), dv=dv.numpy(), **options)
        return dq, dk, dv

    with_backward(monkeypatch, through_numpy)
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--seqlen", "70", "--headdim", "16", "--heads", "2"]
    data = run(tmp_path, "--suite", "backward", *options)
    rows = attention_rows(data)
    assert {row["system"] for row in rows} == {"ours", "torch"} and not data["left_out"]
    assert all(row["max_err"] <= row["err_budget"] for row in rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_against_finite_differences(monkeypatch, dtype, causal):
    """The exact gradients are the slopes of the exact output, in blocks of any size; the plain ones are near them."""
    pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(check, "BLOCK", 5)
    host, draw, n, d = machine.Numpy(), np.random.default_rng(1), 12, 4
    q, k, v, dout = (check.round_to(draw.standard_normal((n, d)).astype(np.float32), dtype) for _ in range(4))

    def loss(q, k, v):
        return float((check.attend(q, k, v, np.arange(n), causal) * dout).sum())

    ((dq,), dk, dv) = check.gradients(host, [q], k, v, [dout], causal)
    for x, grad in ((0, dq), (1, dk), (2, dv)):
        for at in ((0, 0), (5, 2), (11, 3)):
            sides = []
            for step in (1e-5, -1e-5):
                moved = [array.astype(np.float64) for array in (q, k, v)]
                moved[x][at] += step
                sides.append(loss(*moved))
            assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(grad[at], abs=1e-7)
    ((plain,), *_) = check.gradients(host, [q], k, v, [dout], causal, dtype)
    assert 0 < np.abs(plain - dq).max() < 0.1


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_our_backward_pass(tmp_path, dtype):
    data = run(tmp_path, *BACKWARD, "--seqlen", "33,200", "--dtype", dtype)
    assert len(attention_rows(data)) == 8 and not data["left_out"]
    assert not any("wrong" in row for row in attention_rows(data))


def test_backward_ladder(tmp_path):
    options = ["--device", "cpu", *FAST, "--seqlen", "96", "--heads", "2"]
    data = run(tmp_path, "--suite", "backward_ladder", *options)
    ran, refused = [row["kernel"] for row in attention_rows(data)], [item["system"] for item in data["left_out"]]
    everyone = [kernel["name"] for kernel in backward_kernels() if kernel["device"] == "cpu"]
    assert sorted(ran + refused) == sorted(everyone) and ran[0] == "cpu_naive"
    assert all(row["pass"] == "bwd" for row in attention_rows(data))


# ---- FlashAttention-3 by its ratio ----


@needs_torch
@pytest.mark.parametrize("suite", ["cpu", "backward"])
def test_flash_attention_3_where_it_is_installed(tmp_path, monkeypatch, suite):
    """Through the functions of its package, here a stand-in."""
    import torch

    def attention(q, k, v, causal):
        views = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*views, is_causal=causal).transpose(1, 2)

    monkeypatch.setitem(systems.PEERS["cpu"], "fa3", systems.flash_attention_3)
    options = ["--quick", "--rounds", "1", "--seqlen", "40", "--headdim", "16", "--mask", "causal", "--peers", "fa3"]
    options += ["--device", "cpu"] if suite == "backward" else []
    data = run(tmp_path, "--suite", suite, *options)
    assert data["left_out"][-1]["reason"] == "flash_attn_interface is not installed"
    monkeypatch.setitem(sys.modules, "flash_attn_interface", type(sys)("flash_attn_interface"))
    sys.modules["flash_attn_interface"].flash_attn_func = attention
    data = run(tmp_path, "--suite", suite, *options)
    assert "fa3" in {row["system"] for row in attention_rows(data)}


def test_flash_attention_3_is_placed_beside_cudnn(tmp_path):
    rows = []
    for suite, dtype in (("forward", "bfloat16"), ("fp8", "float8_e4m3fn"), ("backward", "bfloat16")):
        rows.clear()
        for causal in (False, True):
            for n in (512, 16384):
                shape = systems.Shape(16384 // n, n, 16, 16, 128, causal, dtype)
                start = {"suite": suite, "pass": "bwd" if suite == "backward" else "fwd", "tbps": 1.0, "us_spread": 0.0}
                ours = start | shape.keys() | {"system": "ours", "us": 80.0, "tflops": 100.0}
                peer = start | shape.given.keys() | {"system": "cudnn", "us": 100.0, "tflops": 80.0}
                rows += [ours, peer, peer | {"nheads_k": 8}, peer | {"headdim": 96}]
        data = {"suite": suite, "machine": {"gpu": "NVIDIA H200", "host": ""}, "date": "2000-01-01", "rows": rows}
        placed = report.fa3.rows(data)
        ratio = report.fa3.RATIOS["fp8" if suite == "fp8" else "bwd" if suite == "backward" else "fwd"][128, False][-1]
        assert len(placed) == 4 and placed[1]["us"] == pytest.approx(100 / ratio)
        assert placed[1]["tflops"] == pytest.approx(80 * ratio)
        text = "\n".join(report.curves_table(data, [*rows, *placed]))
        line = next(
            x for x in text.splitlines() if "full | **speed over FlashAttention-3**" in x and "headdim 128 |" in x
        )
        assert line.split("|")[-2].strip() == f"{100 / 80 / ratio:.2f}"
        assert not report.fa3.rows(data | {"machine": {"gpu": "NVIDIA A100", "host": ""}})
        live = data | {"rows": [*rows, rows[1] | {"system": "fa3"}]}
        assert not report.fa3.rows(live)
        if plots.available():
            assert plots.curves(data, [*rows, *placed]).axes and plots.roofline(data, [*rows, *placed]).axes


def test_every_ratio_has_a_shape():
    for table in report.fa3.RATIOS.values():
        assert set(table) == {(d, causal) for d in (64, 128, 256) for causal in (False, True)}
        assert all(len(line) == len(report.fa3.SEQLENS) and min(line) > 0.7 for line in table.values())


def test_llama_suite(tmp_path):
    shape = ["--device", "cpu", "--model", "stories260K", "--batch", "2", "--seqlen", "3,40"]
    data = run(tmp_path, "--suite", "llama", "--rounds", "2", "--quick", *shape)
    steps = [row for row in data["rows"] if row["pass"] == "step"]
    assert [(row["kernel"], row["position"]) for row in steps] == [
        (kernel, position) for position in (3, 40) for kernel in ("flash", "standard")
    ]
    for row in steps:
        assert row["steps_per_s"] == pytest.approx(1e6 / row["us"], rel=1e-3) and row["max_err"] < row["err_budget"]
        cache = 2 * (row["position"] + 1) * 5 * 2 * 4 * 8 * 4  # batch, keys, layers, k and v, heads, headdim, float32
        assert row["bytes"] == pytest.approx(1_040_000 + cache, rel=0.01)
    assert "**flash over standard**" in (tmp_path / "llama.md").read_text()


def test_llama_suite_with_4_bit_weights(tmp_path, monkeypatch):
    pytest.importorskip("ml_dtypes")
    from flash_attn_minimal.bench import llama

    monkeypatch.setitem(llama.PLANS, "cpu", {"stories260K": (("nvfp4/float16",), (2,), (40,))})
    data = run(tmp_path, "--suite", "llama", "--device", "cpu", "--rounds", "2")
    steps = [row for row in data["rows"] if row["pass"] == "step"]
    assert [(row["dtype"], row["cache_dtype"], row["kernel"]) for row in steps] == [
        ("nvfp4", "float16", "flash"),
        ("nvfp4", "float16", "standard"),
    ]
    assert steps[0]["bytes"] < 450_000 and "nvfp4/fp16" in (tmp_path / "llama.md").read_text()


def test_a_wrong_step_is_not_timed(tmp_path, monkeypatch):
    from flash_attn_minimal.llama import host

    wrong = lambda *arguments: 1.01 * attention(*arguments)  # noqa: E731
    attention = host.flash_attention
    monkeypatch.setattr(host, "flash_attention", wrong)
    shape = ["--device", "cpu", "--model", "stories260K", "--batch", "1", "--seqlen", "3"]
    assert bench.main(["--suite", "llama", "--quick", *shape, "--output", str(tmp_path)]) == 1
    [row, _] = json.loads((tmp_path / "llama.json").read_text())["rows"]
    assert row["wrong"] and "us" not in row


def test_block_suite(tmp_path, monkeypatch):
    pytest.importorskip("ml_dtypes")
    from flash_attn_minimal.bench import block
    from flash_attn_minimal.llama.config import Config

    monkeypatch.setitem(block.SHAPES, "small", Config(128, 160, 2, 4, 2, 300, 64))
    monkeypatch.setitem(block.PLANS, "cpu", ("small", (1, 9), (("small", "bfloat16", (2,)),)))
    arguments = ["--suite", "block", "--device", "cpu", "--rounds", "2", "--output", str(tmp_path)]
    assert bench.main(arguments) == 0
    rows = json.loads((tmp_path / "block.json").read_text())["rows"]
    found = {(row["pass"], row["batch"], row["dtype"]): row for row in rows}
    formats = ("nvfp4", "mxfp4", "int4")
    assert found.keys() == {("block", m, dtype) for m in (1, 9) for dtype in ("bfloat16", *formats)} | {
        ("model", 2, dtype) for dtype in ("bfloat16", "nvfp4", "mxfp4")
    }
    count = 128 * (256 + 128 + 3 * 160)
    for (kind, batch, dtype), row in found.items():
        assert row["us"] > 0 and (dtype == "bfloat16" or row.get("max_err", 0) < row.get("err_budget", 1))
        if kind == "block" and dtype == "bfloat16":
            assert row["bytes"] == 2 * count + 2 * 4 * 128 + batch * 57 * 2 * 2 * 32 * 4  # and norms, and the cache
    assert found["block", 1, "mxfp4"]["bytes"] < found["block", 1, "bfloat16"]["bytes"] / 2
    wide, narrow = (found["block", 1, dtype]["us"] for dtype in ("bfloat16", "nvfp4"))
    text = (tmp_path / "block.md").read_text()
    assert f"**{wide / narrow:.2f}**" in text and "## Decode step of the whole model" in text
    monkeypatch.setattr(block, "BLOCK_ERROR", 0.0)
    assert bench.main(arguments) == 1
    wrong = [row for row in json.loads((tmp_path / "block.json").read_text())["rows"] if row.get("wrong")]
    assert len(wrong) == 6 and not any("us" in row for row in wrong)


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--model", "13b"], "--model 13b is none of stories260K"),
        (["--model", "stories260K", "--seqlen", "512"], "--seqlen 512: positions of stories260K end at 511"),
    ],
)
def test_llama_suite_refuses(tmp_path, capsys, argv, message):
    assert bench.main(["--suite", "llama", "--device", "cpu", *argv, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_overhead_suite(tmp_path):
    data = run(tmp_path, "--suite", "overhead", "--rounds", "1", "--quick", "--framework", "numpy")
    assert [(row["arrays"], row["call"]) for row in data["rows"]] == [("numpy", "new out"), ("numpy", "given out")]


@needs_torch
def test_peers_are_timed_beside_ours(tmp_path):
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--headdim", "32", "--heads", "4", "--heads-k", "2"]
    data = run(
        tmp_path, "--suite", "short", *options, "--seqlen", "33", "--batch", "2", "--peers", "all", "--dtype", "bf16"
    )
    assert {row["system"] for row in attention_rows(data)} == {"ours", "torch", "standard"} and not data["left_out"]
    assert "speed over standard attention" in (tmp_path / "short.md").read_text()


@needs_torch
def test_sustained_and_packed_peer(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "SUSTAINED_S", 0.01)
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--tokens", "300", "--heads", "2", "--mask", "causal"]
    data = run(tmp_path, "--suite", "varlen", *options, "--headdim", "32", "--sustained")
    assert {row["system"] for row in attention_rows(data)} == {"ours", "torch"}
    assert all(row["sustained_us"] > 0 for row in attention_rows(data))
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
    assert {row["system"] for row in attention_rows(data)} == {"ours"}


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
    [row] = attention_rows(data)
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
    err, budget = exact.judge(out, dtype)
    assert err <= budget
    err, budget = exact.judge(shifted, dtype)
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
        (["--suite", "fp8", "--dtype", "fp8"], "--dtype has no meaning in suite fp8"),
        (["--suite", "backward", "--allow-tf32"], "--allow-tf32 has no meaning in suite backward"),
        (["--suite", "ladder", "--backward"], "--backward has no meaning in suite ladder"),
        (["--suite", "ladder", "--device", "cpu", "--dtype", "fp16", "--allow-tf32"], "needs --dtype fp32, not fp16"),
        (["--suite", "mma", "--device", "cpu", "--framework", "numpy"], "--kernel mma_sm80: 'mma_sm80' is none of"),
        (
            ["--suite", "backward_mma", "--device", "cpu", "--framework", "numpy"],
            "--kernel mma_sm80: 'mma_sm80' is none of",
        ),
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
    monkeypatch.setattr(suites, "prepared", lambda *_: (None, None, None, None))
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
