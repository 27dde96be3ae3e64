"""The peers of the bench command, and how it finds a wrong answer."""

import sys

import numpy as np
import pytest
from bench_run import FAST, attention_rows, needs_torch, run

from flash_attn_lab.bench import check, curves, machine, systems, timing

# ---- FlashAttention's own packages ----


@needs_torch
@pytest.mark.parametrize("suite,name", [("cpu", "fa3"), ("backward", "fa3"), ("backward", "fa4")])
def test_flash_attention_where_it_is_installed(tmp_path, monkeypatch, suite, name):
    """It is called through the functions of its package, which is a stand-in here."""
    import torch

    def attention(q, k, v, causal):
        views = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*views, is_causal=causal).transpose(1, 2)

    package = systems.PACKAGES[name]
    monkeypatch.setitem(systems.PEERS["cpu"], name, systems.flash_attention)
    options = ["--quick", "--rounds", "1", "--seqlen", "40", "--headdim", "16", "--mask", "causal", "--peers", name]
    options += ["--device", "cpu"] if suite == "backward" else []
    data = run(tmp_path, "--suite", suite, *options)
    assert data["left_out"][-1]["reason"] == f"{package} is not installed"
    for module in (package.partition(".")[0], package):
        monkeypatch.setitem(sys.modules, module, type(sys)(module))
    sys.modules[package].flash_attn_func = attention
    data = run(tmp_path, "--suite", suite, *options)
    assert name in {row["system"] for row in attention_rows(data)}


def test_a_speed_over_flash_attention_3_is_of_rows_of_the_same_run():
    """A table has a line for this speed if the run has rows of FlashAttention-3, and does not mention it otherwise."""
    shape = systems.Shape(32, 512, 16, 16, 128, False, "bfloat16")
    start = {"suite": "forward", "pass": "fwd", "tbps": 1.0, "us_spread": 0.0} | shape.keys()
    ours = start | {"system": "ours", "us": 80.0, "tflops": 100.0}
    peers = [start | {"system": name, "us": us, "tflops": 8000 / us} for name, us in (("cudnn", 90.0), ("fa3", 100.0))]
    data = {"suite": "forward", "machine": {"gpu": "NVIDIA H200", "host": ""}, "date": "2000-01-01"}
    text = "\n".join(curves.table(data, [ours, *peers]))
    line = next(x for x in text.splitlines() if "**speed over FlashAttention-3**" in x)
    assert line.split("|")[-2].strip() == "1.25"
    assert "FlashAttention-3" not in "\n".join(curves.table(data, [ours, peers[0]]))


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
    q, k, v = (check.round_to(draw.standard_normal(size).astype(np.float32), dtype) for size in shape.sizes[:3])
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
