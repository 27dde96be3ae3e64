"""The backward pass in the bench command: the suite, the ladder, the check."""

import numpy as np
import pytest
from bench_run import FAST, attention_rows, needs_torch, run

from flash_attn_lab.bench import check, machine, systems
from flash_attn_minimal import backward_kernels


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
    """PyTorch's gradients pass the check, which does not use PyTorch's attention."""

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
    """The exact gradients are the slopes of the exact output, for blocks of any size. The plain gradients are near
    them."""
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
