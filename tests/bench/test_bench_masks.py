"""The suite `masks` on the CPU: what it makes of a mask, its float64 answer, its peers, its table."""

import json
import sys

import numpy as np
import pytest
from bench_run import FAST, needs_torch, run

from flash_attn_lab import bench
from flash_attn_lab.bench import masked, masks
from flash_attn_lab.bench.machine import Numpy
from flash_attn_lab.bench.masked import CUT, EMPTY, WHOLE, Case, Mask, MaskedExact, lists, ours, seen
from flash_attn_lab.bench.systems import Shape
from flash_attn_minimal import flash_attn_func
from flash_attn_minimal import masks as makers

TINY = ["--suite", "masks", "--device", "cpu", "--seqlen", "128", "--headdim", "16", "--heads", "2"]
WITH_TORCH = [*TINY, "--quick", "--rounds", "2", "--framework", "torch"]
N = 192
MORE = {"documents, full": makers.documents([50, 100, 42], causal=False), "window, right": makers.window(N, 20, 9)}
MORE["global, full"] = makers.global_and_window(N, 7, 20, right=9)
MADE = {name: maker(N) for name, maker in masks.MASKS.items()} | MORE


def dense(made):
    """(n, n): the pairs that count, from the rows that docs/masks.md says are hidden."""
    numbers = made["startend_row_indices"][0, 0].T
    n = numbers.shape[1]
    row, key = np.arange(n)[:, None], np.arange(n)[None]
    if made["causal"]:
        first, last = numbers[0], numbers[1] if len(numbers) == 2 else np.full(n, n)
        hidden = (key > row) | ((first <= row) & (row < last))
    elif len(numbers) == 2:
        hidden = (row >= numbers[0]) | (row < numbers[1])
    else:
        hidden = ((numbers[0] <= row) & (row < numbers[1])) | ((numbers[2] <= row) & (row < numbers[3]))
    return ~hidden


@pytest.mark.parametrize("name", MADE)
def test_what_is_made_of_a_mask(name, monkeypatch):
    pairs = dense(MADE[name])
    mask = Mask.of(Numpy(), name, MADE[name])
    assert np.array_equal(mask.rows(np.arange(N)), pairs) and mask.pairs == pairs.sum()
    for rows, keys in ((16, 16), (128, 80), (64, 48)):
        tiles = mask.tiles(rows, keys)
        for m, n in np.ndindex(tiles.shape):
            part = pairs[m * rows : (m + 1) * rows, n * keys : (n + 1) * keys]
            assert tiles[m, n] == (WHOLE if part.all() else CUT if part.any() else EMPTY)
    monkeypatch.setattr(masked, "TILE", 16)
    visited = pairs.reshape(12, 16, 12, 16).any((1, 3)).sum()
    assert mask.share == visited / 78
    endpoints, key = mask.endpoints, np.arange(N)
    assert len(endpoints) % 2 == 1 and (np.diff(endpoints, axis=0) >= 0).all()
    again = key < endpoints[0][:, None]
    for begin, end in zip(endpoints[1::2], endpoints[2::2], strict=True):
        again |= (begin[:, None] <= key) & (key < end[:, None])
    assert np.array_equal(again, pairs)


def test_the_rows_of_endpoints_come_in_blocks(monkeypatch):
    monkeypatch.setattr(masked, "BLOCK_PAIRS", 5 * N)
    once = Mask.of(Numpy(), "", MADE["global, full"]).endpoints
    monkeypatch.undo()
    assert np.array_equal(once, Mask.of(Numpy(), "", MADE["global, full"]).endpoints)


def test_lists_of_tiles():
    counts, order = lists(np.array([[0, 1, 1], [0, 0, 0], [1, 0, 1]], bool))
    assert counts.tolist() == [[[2, 0, 2]]] and order[0, 0, :, :2].tolist() == [[1, 2], [0, 1], [0, 2]]
    assert counts.dtype == order.dtype == np.int32


def test_the_masks_of_the_suite():
    lengths = masks.equal(8192 - 2048, 24)
    assert lengths == [256] * 24 and sum(masks.equal(101, 8)) == 101
    assert (masks.width(8192), masks.width(32768), masks.width(131072)) == (1024, 4096, 4096)
    options = type("O", (), dict.fromkeys(("seqlen", "headdim", "heads", "heads_k", "quick", "row")))()
    found = masks.shapes(options, "cuda", "bfloat16")
    assert len(found) == 2 * (4 * 3 + 1) and sum(shape.nheads_k == 8 for shape in found) == 2
    assert {s.nheads for s in found if s.seqlen > 32768 and s.headdim == 256} == {2}
    assert all(names == list(masks.USUALLY) for _, names in masks.chosen(options, found))
    for row, names in (("tree bwd", {"tree"}), ("fwd", {*masks.USUALLY}), ("window", {"window", "global_and_window"})):
        options.row = [row]
        assert {name for _, more in masks.chosen(options, found) for name in more} == names


# ---- the float64 answer ----


def case_of(name, backward, heads_k=1):
    machine, n = Numpy(), 96
    shape = Shape(1, n, 2, heads_k, 16, True, "float32", backward=backward)
    *sizes, out = shape.sizes
    arrays = [machine.random(size, "float32", i) for i, size in enumerate([*sizes, out])]
    return Case(machine, shape, Mask.of(machine, name, masks.MASKS[name](n)), *arrays)


@pytest.mark.parametrize("name", ["shared_prompt", "window", "prefix_lm", "block_diffusion"])
@pytest.mark.parametrize("heads_k", [1, 2])
def test_ours_is_right_and_a_wrong_answer_is_seen(name, heads_k):
    for backward in (False, True):
        case = case_of(name, backward, heads_k)
        exact = MaskedExact(case)
        answer = ours(case, case.mask.options).launch(0)
        error, budget = exact.judge(answer, "float32")
        assert 0 < error <= budget
        parts = answer if backward else (answer,)
        for x in parts:
            before = x.copy()
            x *= 1.01
            error, budget = exact.judge(answer, "float32")
            assert error > budget
            x[...] = before
        other = ours(case, {"causal": True}).launch(0)
        error, budget = exact.judge(other, "float32")
        assert error > budget


# ---- the suite ----


def test_masks_suite(tmp_path):
    data = run(tmp_path, *TINY, *FAST)
    assert not data["left_out"]
    rows = {(row["mask"], row["form"], row["pass"]): row for row in data["rows"]}
    forms = [(name, "intervals") for name in masks.USUALLY] + [("documents", "a batch"), ("window", "window_size")]
    assert rows.keys() == {(*form, way) for form in forms for way in ("fwd", "bwd")}
    for (name, form, _), row in rows.items():
        assert row["system"] == "ours" and row["max_err"] <= row["err_budget"]
        assert (row["seqlen_q"], row["nheads"], row["headdim"], row["share"]) == (128, 2, 16, 1)
        assert row["over_share"] == pytest.approx(row["us"] / row["dense_us"], rel=1e-3)
        assert row["us_spread"] >= 0 and ("peers" in row) == (form == "intervals")
        pairs = dense(masks.MASKS[name](128)).sum() * (10 if row["pass"] == "bwd" else 4) * 2 * 16
        assert row["tflops"] * row["us"] * 1e6 == pytest.approx(pairs, rel=1e-3)
    text = (tmp_path / "masks.md").read_text()
    assert "| mask | tokens | heads | D | pass | share | us | over share x dense |" in text
    assert text.count("| shared prompt | 128 | 2 | 16 |") == 2 and ", window_size |" in text


def test_parts_of_the_suite_are_joined(tmp_path, capsys):
    first = run(tmp_path, *TINY, *FAST, "--row", "documents fwd,tree", "--heads-k", "1")
    assert [(row["mask"], row["pass"]) for row in first["rows"]] == [
        ("documents", "fwd"), ("documents", "fwd"), ("tree", "fwd"), ("tree", "bwd")
    ]  # fmt: skip
    file = tmp_path / "masks.json"
    arguments = [*TINY, *FAST, "--row", "all_seen,tree fwd", "--heads-k", "1", "--before", str(file)]
    both = run(tmp_path, *arguments)
    found = [(row["mask"], row["pass"]) for row in both["rows"]]
    assert sorted(found) == sorted(
        [("documents", "fwd")] * 2 + [(n, w) for n in ("tree", "all_seen") for w in ("fwd", "bwd")]
    )
    file.write_text(json.dumps(both | {"commit": "another"}))
    assert bench.main([*arguments, "--output", str(tmp_path)]) == 2
    assert "its rows are of commit another" in capsys.readouterr().err


def test_a_mask_that_does_not_fit(tmp_path):
    data = run(tmp_path, *TINY[:-4], *FAST[:-2], "--framework", "numpy", "--seqlen", "131", "--heads", "1",
               "--row", "block_diffusion,documents", "--headdim", "8")  # fmt: skip
    assert {item["reason"] for item in data["left_out"]} == {"not for 131 tokens", "131 tokens are not 8 equal parts"}
    assert {row["form"] for row in data["rows"]} == {"intervals"}


def test_what_the_suite_refuses(tmp_path, capsys):
    for more, message in (
        (["--row", "diagonal"], "--row diagonal: no row has this in its name"),
        (["--dtype", "fp8"], "which fp8 has not"),
        (["--peers", "fa3"], "--peers fa3: 'fa3' is not one of torch, flex on this device"),
    ):
        assert bench.main([*TINY, *FAST, *more, "--output", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err


def test_a_wrong_answer_under_a_mask_is_not_timed(tmp_path, monkeypatch):
    right = masked.flash_attn_func

    def wrong(q, k, v, **options):
        options.pop("startend_row_indices", None)
        return right(q, k, v, **options)

    monkeypatch.setattr(masked, "flash_attn_func", wrong)
    data = run(tmp_path, *TINY, *FAST, "--row", "documents fwd,window fwd", code=1)
    assert {row["mask"] for row in data["rows"]} == {"documents", "window", "global_and_window"}
    assert all(row["wrong"] and "us" not in row for row in data["rows"])


# ---- peers ----


@needs_torch
def test_the_peers_compute_the_same(tmp_path, monkeypatch):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(masked, "compiled", lambda torch: flex_attention)  # what it compiles; that alone takes long
    data = run(tmp_path, *WITH_TORCH, "--peers", "torch,flex", "--row", ",".join(masks.MASKS), "--heads-k", "1")
    for row in data["rows"]:
        if row["form"] == "intervals":
            assert row["peers"].keys() == ({"torch", "flex"} if row["pass"] == "fwd" else {"torch"})
            assert row["ratio"] == pytest.approx(row["peers"][row["best"]] / row["us"], rel=1e-3)
    assert {(item["system"], item["reason"].partition(":")[0]) for item in data["left_out"]} == {
        ("flex", "NotImplementedError")
    }
    assert "FlexAttention (PyTorch, compiled), over ours" in (tmp_path / "masks.md").read_text()


@needs_torch
def test_a_peer_that_fails_or_is_wrong_is_left_out(tmp_path, monkeypatch):
    def fails(name, case):
        raise OSError("cannot compile\n\n  for this device")

    def zeros(name, case):
        return lambda i: case.machine.torch.zeros_like(case.q)

    for name, function in (("fails", fails), ("later", lambda name, case: lambda i: 1 / 0), ("zeros", zeros)):
        monkeypatch.setitem(masked.PEERS["cpu"], name, function)
    data = run(tmp_path, *WITH_TORCH, "--row", "documents fwd", "--peers", "fails,later,zeros,torch")
    reasons = {item["system"]: item["reason"] for item in data["left_out"]}
    assert reasons["fails"] == "OSError: cannot compile / for this device"
    assert reasons["later"] == "ZeroDivisionError: division by zero" and "its answer is off by" in reasons["zeros"]
    assert data["rows"][0]["peers"].keys() == {"torch"}


@needs_torch
def test_the_peers_of_a_gpu_say_why_they_are_not_there(monkeypatch):
    from flash_attn_lab.bench.machine import TorchCpu

    machine = TorchCpu()
    monkeypatch.setitem(masked.PEERS, "cpu", masked.PEERS["cuda"])
    made = Mask.of(machine, "documents", masks.MASKS["documents"](64))
    shape = Shape(1, 64, 1, 1, 16, True, "float32")
    x = machine.random((1, 64, 1, 16), "float32", 0)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", None)
    for name, reason in (("fa4", "flash_attn.cute is not installed"), ("cudnn_flex", "ModuleNotFoundError: ")):
        with pytest.raises(masked.Refused, match=reason):
            masked.peer(name, Case(machine, shape, made, x, x, x, x))
    monkeypatch.setattr(masked, "DENSE_TOKENS", 32)
    with pytest.raises(masked.Refused, match="no dense mask is made above 32 tokens"):
        masked.peer("efficient", Case(machine, shape, made, x, x, x, x))


def test_seen_is_what_the_library_computes():
    q = np.zeros((1, N, 1, 8), np.float32)
    v = np.eye(N, dtype=np.float32)[None, :, None]  # (1, N, 1, N): the output is P
    for made in MADE.values():
        numbers = made["startend_row_indices"][0, 0]
        i, j = np.arange(N)[:, None], np.arange(N)[None]
        weights = flash_attn_func(q, q, v, **made)[0, :, 0]
        assert np.array_equal(weights > 0, seen(i, j, [x[None] for x in numbers.T], made["causal"]))
