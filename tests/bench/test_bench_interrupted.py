"""A run of `bench` that ends early, by Ctrl-C or by an error, keeps the rows that it has."""

import json

import pytest
from bench_run import FAST

from flash_attn_lab import bench, progress
from flash_attn_minimal import CudaError

# Suites of which each has another table.
SUITES = {
    "cpu": ["--headdim", "64", "--seqlen", "64", "--framework", "numpy"],
    "overhead": ["--framework", "numpy"],
    "prefill": ["--framework", "numpy"],
    "shapes": ["--framework", "numpy"],
    "llama": ["--seqlen", "1", "--model", "stories260K"],
}


@pytest.fixture
def ends(monkeypatch):
    """Makes the first step of a run end with an error."""

    def arrange(error):
        def step(self, line):
            raise error

        monkeypatch.setattr(progress.Progress, "step", step)

    return arrange


@pytest.mark.parametrize("suite", SUITES)
def test_ctrl_c(suite, tmp_path, ends, capsys):
    ends(KeyboardInterrupt())
    (tmp_path / f"{suite}.json").write_text("a whole result")
    argv = ["--suite", suite, "--quick", "--rounds", "2", *SUITES[suite], "--output", str(tmp_path)]
    argv = [word for word in argv if suite != "overhead" or word != "--quick"]
    assert bench.main(argv) == 130
    data = json.loads((tmp_path / f"{suite}_part.json").read_text())
    assert any("us" in row for row in data["rows"]) and data["stopped"] == "interrupted"
    assert "**The run ended early (interrupted)" in (tmp_path / f"{suite}_part.md").read_text()
    assert (tmp_path / f"{suite}.json").read_text() == "a whole result"
    assert "ended early: interrupted" in capsys.readouterr().err
    assert bench.main(["--plot-only", str(tmp_path / f"{suite}_part.json")]) == 0


def test_an_error(tmp_path, ends, capsys):
    ends(CudaError("an illegal access"))
    assert bench.main(["--suite", "cpu", *FAST, "--headdim", "8", "--seqlen", "8", "--output", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "cpu_part.json").read_text())
    assert data["stopped"] == "CudaError: an illegal access" and any("us" in row for row in data["rows"])
    assert capsys.readouterr().err.endswith("bench: an illegal access\n")


def test_an_error_of_ours_keeps_its_traceback(tmp_path, ends):
    ends(ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        bench.main(["--suite", "cpu", *FAST, "--headdim", "8", "--seqlen", "8", "--output", str(tmp_path)])
    assert (tmp_path / "cpu_part.json").is_file()


def test_without_rows_there_is_nothing_to_keep(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.attention, "roofs", stop)
    assert bench.main(["--suite", "cpu", *FAST, "--output", str(tmp_path)]) == 130
    assert not list(tmp_path.iterdir())
