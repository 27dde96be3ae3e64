"""Runs the bench command for its tests, and checks the files that it writes."""

import importlib.util
import json
import math
import re

import pytest

from flash_attn_lab import bench
from flash_attn_lab.bench import figure

HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_matplotlib = pytest.mark.skipif(not figure.available(), reason="matplotlib is not installed")
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")
FAST = ["--quick", "--rounds", "2", "--framework", "numpy"]

ROW_TYPES = dict.fromkeys(
    "suite system kernel pass dtype mix arrays device call mode fused model cache_dtype layout weights".split(), str
)
ROW_TYPES |= dict.fromkeys("option best mask form".split(), str)
ROW_TYPES |= dict.fromkeys("commit against date row family reason".split(), str)  # of the ledger
ROW_TYPES |= {"number": int, "rounds": int, "peers": dict, "not_captured": list, "peers_wrong": list}
ROW_TYPES |= {
    "language": str,
    "part": str,
    "peer": bool,
    "lines": int,
    "shared": int,
    "shared_prefix": bool,
    "page_size": int,
    "compile_s": float,
}
ROW_TYPES |= dict.fromkeys("forced causal wrong tf32 deterministic fast_accum".split(), bool)
ROW_TYPES |= dict.fromkeys(
    "headdim headdim_v seqlen_q seqlen_k batch nheads nheads_k m n k input_sets tokens position bytes".split(), int
)
ROW_TYPES |= dict.fromkeys(
    "us us_min us_spread tflops tbps max_err err_budget sustained_us sustained_tflops steps_per_s share".split(), float
)
ROW_TYPES |= dict.fromkeys(
    "ratio before_us price dense_us over_share other_us ratio_min ratio_max ratio_error".split(), float
)


OTHERS = (
    "overhead",
    "ops",
    "linear",
    "transformers",
    "sweep",
    "dispatch",
    "prices",
    "masks",
    "ledger",
)  # rows of a kind of their own


def run(tmp_path, *argv, code=0):
    """Runs the command, and returns its result after checking it against the schema."""
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
    assert data["command"].startswith("python -m flash_attn_lab bench") and "--output" not in data["command"]
    for row in data["rows"]:
        assert row["suite"] == suite
        for key, value in row.items():
            assert type(value) in (ROW_TYPES[key], int if ROW_TYPES[key] is float else ROW_TYPES[key]), (key, value)
        for key in ("us", "us_min", "tflops", "tbps"):
            assert 0 < row.get(key, 1) < math.inf
        if suite == "llama":
            assert row["pass"] in ("step", "copy")
        elif row["system"] not in ("blas", "copy") and suite not in OTHERS:
            if suite in ("decode", "queries"):
                assert row["pass"] == "decode"
            elif suite == "shapes":
                assert row["pass"] == ("bwd" if row["part"] == "backward" else "fwd")
            elif suite != "languages":
                assert row["pass"] == ("bwd" if suite.startswith("backward") else "fwd")
            assert row["headdim"] == row["headdim_v"] or suite == "shapes"
            if row["system"] == "ours":
                assert ("us" in row) == (row["max_err"] <= row["err_budget"])


def attention_rows(data):
    return [row for row in data["rows"] if row["pass"] in ("fwd", "bwd")]
