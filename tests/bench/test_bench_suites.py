"""The suites of the bench command on the CPU, with tiny shapes: operations, sequences of many lengths, 8 bits,
models, overhead."""

import json
import math

import numpy as np
import pytest
from bench_run import FAST, attention_rows, needs_torch, run

from flash_attn_lab import bench
from flash_attn_lab.bench import attention, check, linear, small_ops, suite, systems
from flash_attn_lab.bench.rows import series


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


def test_ops_suite_counts_its_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(small_ops, "STORY", [(768, 64), (2304, 32)])
    run(tmp_path, "--suite", "ops", "--device", "cpu", *FAST)
    said = capsys.readouterr().out
    assert "[1/2] 768 x 64" in said and "[2/2] 2304 x 32" in said


# ---- answers with a NaN, and JSON, which has none ----


def test_a_row_has_numbers_of_json():
    row = {"max_err": math.nan, "err_budget": math.inf, "us": 1.23456789, "n": 3, "wrong": True, "kernel": "cpu"}
    want = {"max_err": 1e30, "err_budget": 1e30, "us": 1.2346, "n": 3, "wrong": True, "kernel": "cpu"}
    assert suite.rounded(row) == want
    assert suite.rounded({"max_err": np.float64("nan")}) == {"max_err": 1e30}


def test_no_nan_is_lost_among_errors():
    assert check.largest([1.0, 3.0, 2.0]) == 3 and math.isnan(check.largest([0.0, math.nan, 1.0]))
    assert check.worst([(1.0, 2.0), (1.0, 1.5), (2.0, 5.0)]) == (1.0, 1.5)
    for broken in ((math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf), (math.inf, math.inf)):
        error, budget = check.worst([(0.0, 1.0), broken])
        assert error == math.inf and budget == 1
    assert check.worst([(0.0, math.nan)]) == (math.inf, 0.0)


def strictly(file):
    """The rows of a result. NaN and Infinity, which only Python's JSON knows, are refused."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(file.read_text(), parse_constant=refuse)["rows"]


def test_a_nan_of_ops(tmp_path, monkeypatch):
    monkeypatch.setattr(small_ops, "STORY", [(768, 64)])
    linear = small_ops.ops.linear
    monkeypatch.setattr(small_ops.ops, "linear", lambda *x, **more: linear(*x, **more) * np.float32("nan"))
    run(tmp_path, "--suite", "ops", "--device", "cpu", *FAST, code=1)
    [row] = [row for row in strictly(tmp_path / "ops.json") if row["pass"] == "matvec"]
    assert row["wrong"] and row["max_err"] == 1e30 and row["err_budget"] < 1


def test_a_nan_of_a_step(tmp_path, monkeypatch):
    from flash_attn_minimal.llama import host

    attention = host.Host.attend
    monkeypatch.setattr(
        host.Host, "attend", lambda *x, **kernel: np.float32(1 if kernel else "nan") * attention(*x, **kernel)
    )
    shape = ["--device", "cpu", "--model", "stories260K", "--batch", "1", "--seqlen", "3"]
    assert bench.main(["--suite", "llama", "--quick", *shape, "--output", str(tmp_path)]) == 1
    [row, _] = strictly(tmp_path / "llama.json")
    assert row["wrong"] and row["max_err"] == 1e30 and row["err_budget"] == 1e-4


def test_a_nan_of_one_call_in_overhead(tmp_path, monkeypatch):
    from flash_attn_lab.bench import overhead

    right = overhead.flash_attn_func
    for at in range(3):
        calls = iter(range(3))
        monkeypatch.setattr(
            overhead, "flash_attn_func",
            lambda *x, calls=calls, at=at, **more: right(*x, **more) * np.float32("nan" if next(calls) == at else 1),
        )  # fmt: skip
        options = ["--suite", "overhead", "--rounds", "1", "--framework", "numpy", "--output", str(tmp_path)]
        assert bench.main(options) == 1
        assert [row["wrong"] for row in strictly(tmp_path / "overhead.json")] == [True]


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
        (m, c) for m in attention.MIXES for c in (0, 1)
    }
    assert all(row["tokens"] == 700 for row in attention_rows(data))


# ---- float8 and float32 ----


@pytest.fixture
def fp8_attention(monkeypatch):
    """Provides float8 attention on the CPU, which the library does not have."""
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


def test_the_forward_suite_scales_itself_to_a_cpu(tmp_path, capsys):
    data = run(tmp_path, "--suite", "forward", "--device", "cpu", *FAST, "--mask", "causal")
    rows = [row for row in data["rows"] if row["pass"] == "fwd" and row["system"] == "ours"]
    assert {row["batch"] * row["seqlen_q"] for row in rows} == {2048}
    assert {row["nheads"] * row["headdim"] for row in rows if row["nheads_k"] == row["nheads"]} == {512}
    assert any(row["nheads_k"] * 8 == row["nheads"] for row in rows)
    assert "on a CPU: 2048 tokens" in capsys.readouterr().out


def test_a_suite_that_nobody_serves(tmp_path, capsys):
    pytest.importorskip("ml_dtypes")
    options = ["--device", "cpu", *FAST, "--tokens", "64", "--seqlen", "64", "--headdim", "64", "--heads", "2"]
    data = run(tmp_path, "--suite", "fp8", *options, code=1)
    assert not attention_rows(data) and "takes no float8_e4m3" in data["left_out"][0]["reason"]
    assert "nothing was timed" in capsys.readouterr().err


@needs_torch
def test_tf32_suite_lets_tf32_in(tmp_path, monkeypatch):
    monkeypatch.setitem(systems.PEERS["cpu"], "standard_tf32", systems.standard)
    options = ["--device", "cpu", "--quick", "--rounds", "1", "--tokens", "66", "--seqlen", "33", "--headdim", "16"]
    data = run(tmp_path, "--suite", "tf32", *options, "--heads", "2", "--kernel", "cpu_portable,best")
    rows = attention_rows(data)
    assert {series(row) for row in rows} == {"cpu_portable", "ours", "standard", "standard_tf32"}
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
    from flash_attn_lab.bench import llama

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

    wrong = lambda *x, **kernel: (1 if kernel else 1.01) * attention(*x, **kernel)  # noqa: E731  # standard names one
    attention = host.Host.attend
    monkeypatch.setattr(host.Host, "attend", wrong)
    shape = ["--device", "cpu", "--model", "stories260K", "--batch", "1", "--seqlen", "3"]
    assert bench.main(["--suite", "llama", "--quick", *shape, "--output", str(tmp_path)]) == 1
    [row, _] = json.loads((tmp_path / "llama.json").read_text())["rows"]
    assert row["wrong"] and "us" not in row


def test_block_suite(tmp_path, monkeypatch):
    pytest.importorskip("ml_dtypes")
    from flash_attn_lab.bench import block
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
        (["--model", "13b"], "--model 13b is not one of stories260K"),
        (["--model", "stories260K", "--seqlen", "512"], "--seqlen 512: positions of stories260K end at 511"),
    ],
)
def test_llama_suite_refuses(tmp_path, capsys, argv, message):
    assert bench.main(["--suite", "llama", "--device", "cpu", *argv, "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_overhead_suite(tmp_path):
    data = run(tmp_path, "--suite", "overhead", "--rounds", "1", "--quick", "--framework", "numpy")
    assert [(row["arrays"], row["call"]) for row in data["rows"]] == [
        ("numpy", "new out"), ("numpy", "given out"), ("numpy", "mask"),
    ]  # fmt: skip


@needs_torch
def test_overhead_suite_with_gradients(tmp_path):
    rows = run(tmp_path, "--suite", "overhead", "--rounds", "1", "--quick", "--device", "cpu", "--framework", "torch")[
        "rows"
    ]
    calls = {system: {row["call"] for row in rows if row["system"] == system} for system in ("ours", "torch")}
    assert calls["ours"] - calls["torch"] == {"given out"} and "and backward" in calls["torch"]


# ---- the registry ----


def test_a_suite_brings_its_own_table_and_picture(tmp_path, monkeypatch, capsys):
    """A new suite is one module that registers itself. No other module has to name it."""

    def run(options, protocol):
        row = {"suite": "new", "system": "ours", "pass": "new", "dtype": "float32", "us": 1.5}
        return attention.open_machine("cpu", "numpy"), suite.Outcome(rows=[row])

    made = suite.Suite(
        name="new",
        about="a test's",
        options=frozenset({"output"}),
        run=run,
        table=lambda data, rows: [f"{len(rows)} row of {data['suite']}"],
        how="how it was measured",
    )
    monkeypatch.setitem(suite.SUITES, "new", made)
    assert bench.main(["--suite", "new", "--output", str(tmp_path)]) == 0
    text = (tmp_path / "new.md").read_text()
    assert "1 row of new" in text and "how it was measured" in text and "fp32" in text.splitlines()[0]
    assert bench.main(["--help"]) == 0
    assert "a test's" in capsys.readouterr().out
    monkeypatch.delitem(suite.SUITES, "new")
    assert bench.main(["--plot-only", str(tmp_path / "new.json")]) == 2
    assert "suite='new' is not one of cpu, forward" in capsys.readouterr().err


def test_every_suite_module_registers():
    names = {module.__name__.rpartition(".")[2] for module in bench.MODULES}
    registered = {found.run.__module__.rpartition(".")[2] for found in suite.SUITES.values()}
    assert names == registered


# ---- a model of transformers ----


@needs_torch
def test_transformers_suite(tmp_path, monkeypatch):
    pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    options = "--suite", "transformers", "--device", "cpu", "--rounds", "1", "--seqlen", "20"
    data = run(tmp_path, *options)
    found = {(row["system"], row["mode"]) for row in data["rows"]}
    modes = ("prefill", "dynamic", "static")
    assert found >= {(system, mode) for system in ("ours", "activated", "torch") for mode in modes}
    assert all(row["max_err"] < 1e-5 for row in data["rows"])
    assert "| 20 | flash-attn-minimal |" in (tmp_path / "transformers.md").read_text()
    from flash_attn_minimal.integrations import transformers as adapter

    monkeypatch.setattr(adapter, "flash_attn_with_kvcache", lambda q, k, v, **_: v[:, :1].repeat(1, 1, 2, 1))
    wrong = run(tmp_path, *options, code=1)
    assert [row["mode"] for row in wrong["rows"] if row.get("wrong")] == ["dynamic", "static"]


@needs_torch
def test_no_budget_follows_from_logits_that_are_not_finite(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5", reason="transformers 5 is not installed")
    from flash_attn_lab.bench import transformers

    monkeypatch.setattr(transformers, "_error", lambda got, exact: math.inf)
    options = "--suite", "transformers", "--device", "cpu", "--rounds", "1", "--seqlen", "20"
    assert bench.main([*options, "--output", str(tmp_path)]) == 2
    assert "PyTorch's logits (prefill, dynamic, static) are not finite" in capsys.readouterr().err
    assert not (tmp_path / "transformers.json").exists()
