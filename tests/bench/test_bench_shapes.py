"""The suite `shapes`: fewer queries than keys, values narrower than keys, and their checks."""

import numpy as np
import pytest
from bench_run import FAST, attention_rows, needs_torch, run

from flash_attn_lab.bench import check, machine, shapes, systems
from flash_attn_lab.bench.systems import Shape

CASES = [
    shapes.Case("forward", Shape(1, 40, 4, 4, 24, True, "float32", headdim_v=16), ("best", "cpu_portable")),
    shapes.Case("forward", Shape(1, 7, 4, 1, 16, True, "float32", seqlen_k=90)),
    shapes.Case("backward", Shape(1, 40, 4, 2, 24, True, "float32", backward=True, headdim_v=16), mode="deterministic"),
    shapes.Case("backward", Shape(1, 7, 2, 2, 16, True, "float32", backward=True, seqlen_k=90)),
    shapes.Case("float32", Shape(1, 40, 2, 2, 16, False, "float32")),
]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(shapes.CASES, "cpu", CASES)
    monkeypatch.setitem(shapes.QUICK, "cpu", 1)


def test_shapes_suite(tmp_path, small):
    data = run(tmp_path, "--suite", "shapes", "--device", "cpu", *FAST)
    rows = attention_rows(data)
    assert not data["left_out"]
    assert [(r["part"], r["seqlen_q"], r["seqlen_k"], r["headdim_v"]) for r in rows] == [
        *[("forward", 40, 40, 16)] * 2, ("forward", 7, 90, 16), *[("backward", 40, 40, 16)] * 2,
        ("backward", 7, 90, 16), ("float32", 40, 40, 16),
    ]  # fmt: skip
    assert [row["kernel"] for row in rows if "forced" in row] == ["cpu_portable"]
    assert [row["headdim_v"] for row in rows if "deterministic" in row] == [16]
    text = (tmp_path / "shapes.md").read_text()
    parts = [text.index(f"## {title}\n") for title in shapes.TITLES.values()]
    assert parts == sorted(parts) and "| D24/16, 40, 4 heads | causal | cpu_portable | cpu_portable |" in text
    assert "| D16, 7 on 90, 4/1 heads | causal |" in text


@needs_torch
def test_shapes_beside_pytorch(tmp_path, small):
    """PyTorch's answers and gradients pass the check, also with a mask aligned at the last key."""
    data = run(tmp_path, "--suite", "shapes", "--device", "cpu", "--quick", "--rounds", "1")
    rows = attention_rows(data)
    assert not data["left_out"]
    assert len([row for row in rows if row["system"] == "torch"]) == 4  # float32 is beside `efficient`
    assert all(row["max_err"] <= row["err_budget"] for row in rows)
    mine, theirs = (
        [r for r in rows if (r["system"], r["seqlen_k"], r["pass"]) == (x, 90, "fwd")] for x in ("ours", "torch")
    )
    assert f"**{theirs[0]['us'] / mine[0]['us']:.2f}**" in (tmp_path / "shapes.md").read_text()


def test_the_gpu_shapes():
    cases = shapes.CASES["cuda"]
    assert {case.part for case in cases} == set(shapes.TITLES) == set(shapes.PEERS)
    forced = {case.shape.headdim for case in cases if "mma_sm80" in case.kernels}
    assert forced == {512}
    assert {case.shape.nheads for case in cases if case.mode} == {64, 32, 128}
    assert all(case.shape.backward == (case.part == "backward") for case in cases)
    assert max(case.shape.bytes for case in cases) < 8 << 30
    quick = cases[:: shapes.QUICK["cuda"]]
    assert {case.part for case in quick} == set(shapes.TITLES) and any(case.shape.seqlen_k for case in quick)


def test_work_of_a_rectangle_and_of_narrow_values():
    square, chunk = Shape(2, 64, 4, 2, 32, False, "bfloat16"), Shape(2, 64, 4, 2, 32, True, "bfloat16", seqlen_k=256)
    assert Shape(2, 64, 4, 2, 32, False, "bfloat16", seqlen_k=64, headdim_v=32).flops == square.flops
    assert square.flops == 4 * 2 * 64**2 * 32 * 4
    assert chunk.flops == 4 * 2 * 64 * (256 - 32) * 32 * 4
    assert chunk.bytes == 2 * 2 * (64 * 4 * 64 + 256 * 2 * 64)
    narrow = Shape(1, 64, 4, 4, 48, False, "bfloat16", headdim_v=32)
    assert narrow.flops == 2 * 64**2 * 80 * 4 and narrow.bytes == 2 * 64 * 4 * 160
    back = Shape(1, 64, 4, 4, 48, False, "bfloat16", backward=True, headdim_v=32)
    assert back.flops == 2 * 64**2 * (3 * 48 + 2 * 32) * 4 and back.bytes == 2 * narrow.bytes
    assert str(chunk) == "headdim 32, causal, batch 2, 64 queries, 256 keys, heads 4/2"
    assert str(narrow) == "headdim 48/32, full, batch 1, seqlen 64, heads 4"
    assert (chunk.keys()["seqlen_q"], chunk.keys()["seqlen_k"]) == (64, 256)


@pytest.mark.parametrize("seqlen_k", [50, 300])
def test_the_check_sees_a_mask_that_starts_at_the_first_key(seqlen_k):
    """A mask that is top-left instead of bottom-right aligned, and one that is off by one."""
    host = machine.Numpy()
    shape = Shape(1, 50, 2, 1, 24, True, "bfloat16", seqlen_k=seqlen_k, headdim_v=8)
    draw = np.random.default_rng(3)
    q, k, v = (check.round_to(draw.standard_normal(size).astype(np.float32), "bfloat16") for size in shape.sizes[:3])
    exact = check.Exact(host, shape, q, k, v)
    for moved in {0, 1, 50 - seqlen_k}:
        out = np.empty(shape.sizes[3], np.float32)
        for h in range(2):
            ends = np.arange(50) + seqlen_k - 50 + moved
            out[0, :, h] = check.attend(q[0, :, h], k[0, :, 0], v[0, :, 0], ends, True, "bfloat16")
        err, budget = exact.judge(out, "bfloat16")
        assert (err <= budget) == (moved == 0)


def test_gradients_at_a_few_rows():
    """A head is judged at its first rows, its last rows and some others. With fewer queries than keys, the exact
    gradients are slopes."""
    host, draw = machine.Numpy(), np.random.default_rng(1)
    shape = Shape(1, 200, 1, 1, 4, True, "float32", backward=True, seqlen_k=220, headdim_v=3)
    *inputs, dout = (draw.standard_normal(size).astype(np.float32) for size in shape.sizes)
    exact = check.Exact(host, shape, *inputs, dout, kept=8)
    assert [(array, len(rows) < 140, rows[0], rows[-1]) for array, _, rows, *_ in exact.samples] == [
        (0, True, 0, 199), (1, True, 0, 219), (2, True, 0, 219),
    ]  # fmt: skip
    q, k, v = (x[0, :, 0] for x in inputs)

    def loss(q, k, v):
        return float((check.attend(q, k, v, np.arange(200) + 20, True) * dout[0, :, 0]).sum())

    (dq,), dk, dv = check.gradients(host, [q], k, v, [dout[0, :, 0]], True)
    for x, grad, at in ((0, dq, (5, 2)), (1, dk, (215, 1)), (2, dv, (100, 2))):
        sides = []
        for step in (1e-5, -1e-5):
            moved = [array.astype(np.float64) for array in (q, k, v)]
            moved[x][at] += step
            sides.append(loss(*moved))
        assert (sides[0] - sides[1]) / 2e-5 == pytest.approx(grad[at], abs=1e-7)
    answer = [x.astype(np.float32)[None, :, None] for x in (dq, dk, dv)]
    err, budget = exact.judge(tuple(answer), "float32")
    assert err <= budget
    answer[1][0, 219] *= 1.01
    err, budget = exact.judge(tuple(answer), "float32")
    assert err > budget


@needs_torch
def test_peers_with_a_mask_at_the_last_key():
    import torch

    shape = Shape(1, 5, 4, 1, 16, True, "float32", seqlen_k=30)
    host = machine.open_machine("cpu", "torch")
    inputs = systems.Inputs(host, shape, 0)
    exact = check.Exact(host, shape, *inputs[0][:3])
    for name in ("torch", "standard"):
        err, budget = exact.judge(systems.peer(name, host, shape, inputs).launch(0), "float32")
        assert err <= 5 * budget
    with pytest.raises(systems.Refused, match="top-left"):
        systems.sdpa("cudnn", torch, shape, inputs)
