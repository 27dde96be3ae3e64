"""The suites `decode` and `queries` on the CPU: query tokens against caches."""

import pytest
from bench_run import needs_matplotlib, needs_torch, run

from flash_attn_lab import bench
from flash_attn_lab.bench import decode, queries
from flash_attn_lab.bench.machine import open_machine

CPU = ["--device", "cpu", "--quick", "--rounds", "1"]
SMALL = decode.Point(2, 192, 4, 2, 32)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(decode.QUICK, "cpu", [SMALL])
    monkeypatch.setitem(queries.CACHES, "cpu", [([SMALL, decode.Point(2, 192, 2, 2, 32)], True)])


@needs_torch
def test_decode_suite(tmp_path, small):
    data = run(tmp_path, "--suite", "decode", *CPU)
    mine = [row for row in data["rows"] if row["system"] == "ours"]
    assert [(row["page_size"], row["cache_dtype"]) for row in mine] == [
        (0, "float32"), (16, "float32"), (64, "float32"), (0, "float8_e4m3fn"), (0, "int8"),
    ]  # fmt: skip
    assert {row["seqlen_q"] for row in data["rows"]} == {1}
    assert "| ours int8 |" in (tmp_path / "decode.md").read_text()


@needs_torch
def test_shared_pages_are_timed_with_and_without_the_option(tmp_path, monkeypatch):
    monkeypatch.setitem(decode.QUICK, "cpu", [decode.Point(3, 192, 4, 2, 32, shared=128)])
    rows = run(tmp_path, "--suite", "decode", *CPU)["rows"]
    assert [(row["page_size"], row["shared_prefix"]) for row in rows] == [
        (16, False), (16, True), (64, False), (64, True),
    ]  # fmt: skip
    assert {row["system"] for row in rows} == {"ours"} and {row["shared"] for row in rows} == {128}
    assert (tmp_path / "decode.md").read_text().count("| 3 | 192 | 128 | 4/2 | 32 |") == 2


@needs_torch
def test_queries_suite(tmp_path, small, monkeypatch):
    monkeypatch.setattr(queries, "COUNTS", (1, 3, 4, 17))
    data = run(tmp_path, "--suite", "queries", "--device", "cpu", "--rounds", "1")
    mine = [row for row in data["rows"] if row["system"] == "ours"]
    assert {(row["nheads"], row["page_size"], row["seqlen_q"]) for row in mine} == {
        (heads, page, n) for heads, page in ((4, 0), (4, 16), (2, 0)) for n in (1, 3, 4, 17)
    }
    for row in mine:
        pairs = sum(192 - i for i in range(row["seqlen_q"]))
        assert row["tflops"] * row["us"] * 1e6 == pytest.approx(4 * 2 * row["nheads"] * pairs * 32, rel=1e-3)
        assert row["tbps"] * row["us"] * 1e6 == pytest.approx(2 * 2 * 192 * 2 * 32 * 4, rel=1e-3)
    peers = [(row["system"], row["nheads"], row["seqlen_q"]) for row in data["rows"] if row["system"] != "ours"]
    assert {peer for peer in peers if peer[0] == "torch"} == {("torch", heads, n) for heads in (4, 2) for n in (1, 4)}
    one, three = (next(r["us"] for r in mine if (r["nheads"], r["seqlen_q"]) == (2, n)) for n in (1, 3))
    line = next(x for x in (tmp_path / "queries.md").read_text().splitlines() if x.startswith("| 2 | 192 | 2/2 | 3 |"))
    assert [float(x) for x in line.split("|")[-3:-1]] == pytest.approx([one / three, three / one], abs=0.006)
    assert len(run(tmp_path, "--suite", "queries", *CPU)["rows"]) > 0


@needs_torch
@pytest.mark.parametrize("fault", ["not causal", "first row", "nan"])
def test_a_wrong_row_of_queries_is_not_timed(tmp_path, small, monkeypatch, fault):
    right = decode.flash_attn_with_kvcache

    def wrong(q, *arrays, causal, out, **options):
        right(q, *arrays, causal=causal and fault != "not causal", out=out, **options)
        if fault == "first row":
            out[:, 0] = out[:, -1].clone()
        elif fault == "nan":
            out[1, 0, 2, 5] = float("nan")  # of a head that is not compared
        return out

    monkeypatch.setattr(decode, "flash_attn_with_kvcache", wrong)
    assert bench.main(["--suite", "queries", *CPU, "--output", str(tmp_path)]) == 1
    text = (tmp_path / "queries.md").read_text()
    assert "## Wrong answers" in text
    right_ones = [line for line in text.splitlines() if line.startswith("| 2 | 192")]
    assert len(right_ones) == (0 if fault == "nan" else 2)  # one query, plain and in pages


@needs_matplotlib
def test_the_picture_has_the_bounds():
    """On a GPU each curve has two bounds: the read of its cache, which is constant, and its products, which double."""
    rows = []
    for heads in (64, 32):
        shape = {"batch": 8, "nheads": heads, "nheads_k": 8, "headdim": 128, "headdim_v": 128, "seqlen_k": 8192}
        shape |= {"suite": "queries", "pass": "decode", "dtype": "bfloat16"}
        for n in (1, 2):
            speed = {"us": 60.0 + n, "tflops": 300.0 * n * (60 + 1) / (60 + n), "tbps": 4.4}
            rows.append(shape | speed | {"system": "ours", "kernel": "fast", "page_size": 0, "seqlen_q": n})
        rows.append(shape | {"system": "read", "us": 55.0, "tbps": 4.8, "seqlen_q": 1})
    data = {"suite": "queries", "machine": {"gpu": "NVIDIA H200"}, "date": "2000-01-01", "rows": rows}
    axes = queries.picture(data, rows).axes
    assert [axis.get_title() for axis in axes] == ["64/8 heads", "32/8 heads"]
    for axis in axes:
        curve, read, work = (list(line.get_ydata()) for line in axis.lines)
        assert curve == [61, 62] and read == [55, 55] and work == pytest.approx([30.5, 61])
    text = "\n".join(queries.table(data, rows))
    assert "A read alone: 8 x 8192 keys 4.80 TB/s." in text and "| 8 | 8192 | 64/8 | 2 | 62.0 | 4.40 |" in text


@needs_torch
def test_caches_are_kept_between_numbers_of_queries():
    from dataclasses import replace

    host = open_machine("cpu", "torch")
    caches = decode.Caches(host, SMALL, "float32", 0)
    more = caches.asked(replace(SMALL, queries=5, nheads=8), 1)
    assert more.kv is caches.kv and more.q.shape == more.out.shape == (2, 5, 8, 32)
    assert caches.q.shape == (2, 1, 4, 32) and str(more.point).startswith("batch 2, 5 queries, 192 keys, heads 8/2")


@needs_torch
@pytest.mark.parametrize("suite", ["decode", "queries"])
def test_one_kernel_at_a_time(tmp_path, small, capsys, suite):
    options = ["--suite", suite, *CPU, "--output", str(tmp_path)]
    assert bench.main([*options, "--kernel", "cpu_naive,best"]) == 2
    assert f"--kernel cpu_naive,best: suite {suite} takes one kernel" in capsys.readouterr().err
    assert bench.main([*options, "--kernel", "cpu_portable"]) == 0
    assert "cpu_portable" in (tmp_path / f"{suite}.json").read_text()
